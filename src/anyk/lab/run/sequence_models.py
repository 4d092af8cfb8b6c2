"""Models of sequences: scores for the next token from those before it.

Each takes tokens (B, length), padded on the left, where 0 … n-1 are the classes, n any other token and n + 1 the padding. It
scores what follows the last of them: (B, n). A causal one can score what follows each of them.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyk.lab.errors import LabError

#: the words for a config's model, and whether it is causal
CAUSAL = {"context": False, "gru": True, "attention": True}
#: tokens that are no classes: any other, and padding
OTHERS = 2


class TiedLinear(nn.Module):
    """The linear layer whose weights are those that tokens are embedded with: (rows, d) to (rows, n)."""

    def __init__(self, embedding: nn.Embedding, classes: int) -> None:
        super().__init__()
        self.out_features, self.in_features = classes, embedding.embedding_dim
        self._embedding = [embedding]  # in a list, so that its weights are not listed twice
        self.bias = nn.Parameter(torch.zeros(classes))

    @property
    def weight(self) -> Tensor:
        """(n, d)."""
        return self._embedding[0].weight[: self.out_features]

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)


class SequenceModel(nn.Module, ABC):
    """What the models of sequences have in common.

    Args:
        classes: n.
        embedding: numbers for a token.
        width: numbers that the body gives.
        dropout: before the last layer.
        tied: whether the last layer has the weights of the embedding.
    """

    def __init__(self, classes: int, embedding: int, width: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes + OTHERS, embedding)
        nn.init.normal_(self.embedding.weight, std=embedding**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(width, embedding) if tied and width != embedding else nn.Identity()
        self.output = TiedLinear(self.embedding, classes) if tied else nn.Linear(width, classes)

    def forward(self, tokens: Tensor, where: Tensor | None = None, *, scored: bool = True) -> Tensor:
        """Scores of what follows, (B, n), or (rows, n) for the places where ``where`` (B, length) is true.

        Args:
            tokens: (B, length).
            where: which places; None: the last of each.
            scored: whether to apply the last layer; without it, (…, d).
        """
        rows = self.project(self.dropout(self.body(tokens, where)))
        return self.output(rows) if scored else rows

    @abstractmethod
    def body(self, tokens: Tensor, where: Tensor | None) -> Tensor:
        """What the last layer sees: (rows, width)."""

    def head_parameters(self) -> list[nn.Parameter]:
        """Those of the last layer, for a learning rate of its own."""
        if isinstance(self.output, TiedLinear):
            raise LabError("tied gives the last layer the weights of the embedding: leave out head_learning_rate.")
        return list(self.output.parameters())


class ContextModel(SequenceModel):
    """One hidden layer over the embeddings of the last few tokens, side by side."""

    def __init__(self, length: int, classes: int, embedding: int, hidden: int, dropout: float, tied: bool) -> None:
        super().__init__(classes, embedding, hidden, dropout, tied)
        self.hidden = nn.Linear(length * embedding, hidden)

    def body(self, tokens: Tensor, where: Tensor | None) -> Tensor:
        assert where is None, "only a causal model sees more than one place"
        return functional.relu(self.hidden(self.embedding(tokens).flatten(1)))


class GRUModel(SequenceModel):
    """A gated recurrent network."""

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__(classes, embedding, hidden, dropout, tied)
        self.gru = nn.GRU(embedding, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)

    def body(self, tokens: Tensor, where: Tensor | None) -> Tensor:
        states, _ = self.gru(self.dropout(self.embedding(tokens)))
        return states[:, -1] if where is None else states[where]


class AttentionModel(SequenceModel):
    """Self-attention over the last tokens, each seeing itself and those before it (SASRec, ICDM 2018)."""

    def __init__(self, length: int, classes: int, embedding: int, layers: int, heads: int, dropout: float, tied: bool) -> None:
        super().__init__(classes, embedding, embedding, dropout, tied)
        self.padding = classes + OTHERS - 1
        self.positions = nn.Parameter(torch.randn(length, embedding) * embedding**-0.5)
        layer = nn.TransformerEncoderLayer(
            embedding, heads, 4 * embedding, dropout, functional.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(embedding), enable_nested_tensor=False)
        self.heads = heads

    def body(self, tokens: Tensor, where: Tensor | None) -> Tensor:
        embedded = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions
        place = torch.arange(tokens.shape[1], device=tokens.device)
        later, itself = place > place[:, None], place == place[:, None]
        # Padding sees itself: a row without anything to attend to would be NaN.
        hidden = (later | (tokens == self.padding)[:, None, :]) & ~itself
        # Of no sequence at all, torch cannot tell the shape of one mask for each. Not len(), a constant to an export.
        mask = hidden[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1) if tokens.shape[0] else later
        states = self.layers(self.dropout(embedded), mask=mask)
        return states[:, -1] if where is None else states[where]
