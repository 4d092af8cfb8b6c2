"""Sequences of tokens, of which the next is predicted from those before it. An example is a place in one stream of tokens.

A token is a number: 0 … n-1 are the classes, n is any token out of the vocabulary, which is read but never predicted, and n + 1
is padding before the first token of a sequence.
"""

import array
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data.sets import Dataset, Split, Tokens
from anyk.lab.errors import LabError

#: the label of a target that is no class, because the training part does not have it: no guess is right
OUT_OF_VOCABULARY = -1
#: the label of a place that does not count
IGNORED = -100
#: of the tokens that are no classes, in what is shown to people
OTHER = "…"


@dataclass(frozen=True)
class SequenceSplit(Split):
    """Examples that are places in a stream of tokens: the token there is to be guessed from those before it in its sequence.

    ``parts`` is the stream alone, (T,) in int32, shared with the other splits; ``labels`` is (N,), the tokens at the places, or
    :data:`OUT_OF_VOCABULARY`.
    """

    places: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """(N,), int64: where in the stream the targets are; ascending"""
    begins: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """(S + 1,), int64: where the sequences begin, and the end of the stream"""
    padding: int = 0
    """what stands before the first token of a sequence: n + 1"""

    @property
    def stream(self) -> Tensor:
        """The tokens of all sequences, one after the other."""
        return self.parts[0]

    def begin(self, places: Tensor) -> Tensor:
        """Where the sequences of these places begin."""
        return self.begins[torch.searchsorted(self.begins, places, right=True) - 1]

    def contexts(self, index: Tensor, length: int) -> Tensor:
        """The ``length`` tokens before the examples at (B,) positions, padded on the left: (B, length), int64.

        >>> stream = torch.tensor([3, 1, 4, 1, 2, 0], dtype=torch.int32)
        >>> split = SequenceSplit((stream,), torch.tensor([4, 0]), places=torch.tensor([2, 5]), begins=torch.tensor([0, 4, 6]), padding=9)
        >>> split.contexts(torch.tensor([0, 1]), 3)
        tensor([[9, 3, 1],
                [9, 9, 2]])
        """  # noqa: E501
        places = self.places[index]
        return self.before(places, self.begin(places), length)

    def before(self, places: Tensor, begin: Tensor, length: int) -> Tensor:
        """The ``length`` tokens before the places, of the sequences that begin at ``begin``: (B, length), int64."""
        wanted = places[:, None] + torch.arange(-length, 0)
        tokens = self.stream[wanted.clamp(0, len(self.stream) - 1)].long()
        return torch.where((wanted >= begin[:, None]) & (wanted < len(self.stream)), tokens, self.padding)

    def seen(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The classes that occur before these (B,) places in their sequences: two tensors (M,), the rows and their classes."""
        begin = self.begin(places)
        lengths = places - begin
        rows = torch.arange(len(places)).repeat_interleave(lengths)
        first = (begin - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
        tokens = self.stream[first + torch.arange(len(first))].long()
        real = tokens < self.padding - 1
        return rows[real], tokens[real]


class Windows:
    """Windows of ``length`` tokens for a causal model, which is trained at all places that have a label at once.

    In each epoch the windows of a sequence are shifted at random, by no more than leaves their number the same.

    Args:
        examples: what to train with.
        index: (B,) positions of the examples that count.
        length: of a window.
    """

    def __init__(self, examples: SequenceSplit, index: Tensor, length: int) -> None:
        self.examples, self.length = examples, length
        self.labels = torch.full((len(examples.stream),), IGNORED)
        self.labels[examples.places[index]] = examples.labels[index]
        begins, ends = examples.begins[:-1], examples.begins[1:]
        counted = torch.zeros(len(examples.stream) + 1, dtype=torch.int64)
        counted[1:] = (self.labels != IGNORED).cumsum(0)
        trained = counted[ends] > counted[begins]
        # A sequence ends at its last place that is trained: windows do not cover what validation and test hold behind it.
        last = torch.where(self.labels != IGNORED, torch.arange(len(self.labels)), -1).cummax(0).values
        begins, ends = begins[trained], last[ends[trained] - 1] + 1
        self.numbers = (ends - begins - 1) // length + 1  # of a sequence
        self.slack = self.numbers * length - (ends - begins - 1)
        self.begins, self.ends = begins, ends

    def __len__(self) -> int:
        return int(self.numbers.sum())

    def shifted(self, generator: torch.Generator) -> Tensor:
        """The windows of one epoch, as the place of the first target and the bounds of the sequence: (W, 3)."""
        shift = (torch.rand(len(self.slack), generator=generator, dtype=torch.float64) * (self.slack + 1)).long()
        first = (self.begins + 1 - shift).repeat_interleave(self.numbers)
        number = torch.arange(len(first)) - (self.numbers.cumsum(0) - self.numbers).repeat_interleave(self.numbers)
        bounds = (each.repeat_interleave(self.numbers) for each in (self.begins, self.ends))
        return torch.stack((first + number * self.length, *bounds), 1)

    def take(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, labels and places of some rows of :meth:`shifted`: (B, length) each, :data:`IGNORED` where none is."""
        first, begin, end = windows.T
        tokens = self.examples.before(first + self.length - 1, begin, self.length)
        places = first[:, None] + torch.arange(self.length)
        inside = (places > begin[:, None]) & (places < end[:, None])
        labels = torch.where(inside, self.labels[places.clamp(0, len(self.labels) - 1)], IGNORED)
        return tokens, labels, places


def number(texts: Iterable[str], below: int = 100) -> int:
    """A hash of the texts from 0 to ``below`` - 1, the same on every machine."""
    return int.from_bytes(hashlib.sha256("\0".join(texts).encode()).digest()[:8], "big") % below


def parts_of_tokens(parts: Sequence[int], begins: Tensor) -> Tensor:
    """(T,), int8: the part of each token, from that of its sequence: 0 (training), 1 (validation) or 2 (test)."""
    return torch.tensor(parts, dtype=torch.int8).repeat_interleave(begins.diff())


def last_parts(begins: Tensor) -> Tensor:
    """(T,), int8: the part of each token where the last of a sequence is for the test, and the one before it for validation.

    Sequences of fewer than three are for training alone.
    """
    part = torch.zeros(int(begins[-1]), dtype=torch.int8)
    ends = begins[1:][begins.diff() >= 3]
    part[ends - 1], part[ends - 2] = 2, 1
    return part


class Corpus:
    """Sequences of tokens as texts. In memory a token takes four bytes, and each text of the vocabulary is stored once."""

    def __init__(self) -> None:
        self.vocabulary: dict[str, int] = {}
        self._items, self._begins = array.array("i"), array.array("q", [0])

    def __len__(self) -> int:
        return len(self._begins) - 1

    def add(self, sequence: Iterable[str]) -> None:
        """Append a sequence."""
        known = self.vocabulary
        self._items.extend([known.setdefault(token, len(known)) for token in sequence])
        self._begins.append(len(self._items))

    @property
    def begins(self) -> Tensor:
        """(S + 1,): where the sequences begin, and the end."""
        return torch.tensor(self._begins)

    def encode(self, trained: Tensor, most: int | None = None, least: int = 1) -> tuple[tuple[str, ...], Tensor]:
        """The classes, and all sequences one after the other as class numbers; n stands for any other token.

        Args:
            trained: (T,), bool: which tokens are of the training part. The classes are chosen from these.
            most: the number of classes, the most frequent tokens; ties in alphabetical order.
            least: how often a class has to occur.
        """
        items = np.frombuffer(self._items, np.int32)
        counts = np.bincount(items[trained.numpy()], minlength=len(self.vocabulary)).tolist()
        kept = [(-count, token) for token, count in zip(self.vocabulary, counts, strict=True) if count >= max(least, 1)]
        classes = tuple(token for _, token in sorted(kept)[:most])
        numbers = np.full(len(self.vocabulary), len(classes), np.int32)
        numbers[[self.vocabulary[token] for token in classes]] = np.arange(len(classes))
        return classes, torch.from_numpy(numbers[items])


def dataset_of(
    name: str,
    classes: Sequence[str],
    stream: Tensor,
    begins: Tensor,
    part: Tensor,
    groups: Tensor | None = None,
    *,
    tokens: Tokens = "",
    out_of_vocabulary: bool = False,
    remarks: Iterable[str] = (),
) -> Dataset:
    """A data set of sequences. Targets are the classes.

    Args:
        name: of the set.
        classes: the classes by name.
        stream: the tokens.
        begins: where the sequences begin, and the end.
        part: of each token: :func:`parts_of_tokens` where whole sequences are divided, or :func:`last_parts`.
        groups: for each sequence, which ones belong together; None: each is a group of its own.
        tokens: what they are.
        out_of_vocabulary: whether tokens that are no class are targets of validation and test, which no guess hits;
            otherwise they are only read.
        remarks: sentences about the data for whoever reads the results.
    """
    sequence = torch.arange(len(begins) - 1).repeat_interleave(begins.diff())
    groups = sequence if groups is None else groups[sequence]
    if len(classes) < 2:
        kinds = "one kind" if classes else "no kind"
        raise LabError(f"{name} has {kinds} of token to guess in its training part, but at least two are needed.")

    def split(wanted: Tensor) -> SequenceSplit:
        places = wanted.nonzero().flatten()
        labels = stream[places].long()
        labels = torch.where(labels < len(classes), labels, OUT_OF_VOCABULARY)
        return SequenceSplit((stream,), labels, (), groups[places], places, begins, len(classes) + 1)

    outside = stream >= len(classes)
    target = torch.ones(len(stream), dtype=torch.bool)
    target[begins[:-1][begins.diff() > 0]] = False  # there is nothing before the first token of a sequence
    tested = target & (part == 2)
    target &= (~outside | (part > 0)) if out_of_vocabulary else ~outside
    train, test = split(target & (part < 2)), split(target & (part == 2))
    validation = (part[train.places] == 1).nonzero().flatten()
    for what, count in (("training", len(train) - len(validation)), ("validation", len(validation)), ("the test", len(test))):
        if not count:
            raise LabError(f"{name} has no token to guess for {what}: give more or longer sequences.")
    remarks = list(remarks)
    if out_of_vocabulary:
        if unseen := int((test.labels == OUT_OF_VOCABULARY).sum()):
            remarks.append(f"Test targets that are not in the training part, so no guess hits: {unseen:,} of {len(test):,}.")
    elif share := float(outside[tested].double().mean()):
        remarks.append(f"Test tokens outside the vocabulary, which are read but not to be guessed: {share:.1%}.")
    facts: dict[str, Any] = {"validation": validation, "remarks": tuple(remarks), "tokens": tokens}
    return Dataset(name, "sequences", tuple(classes), train, test, "", **facts)
