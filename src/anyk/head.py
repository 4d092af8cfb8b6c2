"""The linear layer and the loss in one, for so many classes that the scores of all of them do not fit into memory.

The scores are made chunk by chunk. A first pass keeps of each row the m best and the log-sum-exp; the loss is a function of
these. The backward makes each chunk again and turns it into its part of the gradients. If the loss sees nothing but the
candidates, the backward visits their rows of the weight and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from anyk import candidates, checks
from anyk.checks import working_dtype
from anyk.cross_entropy import Options, Rows
from anyk.losses import Loss, RowLoss, check_is_loss, loss_of_candidates

__all__ = ["LinearHead"]


class LinearHead(nn.Module):
    """``nn.Linear`` followed by a loss, without ever storing the scores of all n classes.

    Same values and gradients as the two, up to rounding. Beyond the parameters and their gradients a step takes memory for
    B x (chunk_size + a few m) numbers instead of several times B x n, and the time of one more product of inputs and weights.

    Where the loss depends on the m candidates of each row only (``softmax_over="candidates"``, ``top1="operator"``, or for
    :class:`TopKErrorLoss` ``ce_weight=0``), the backward pass is cheap, and the gradients of weight and bias are zero except
    in at most B m rows; ``sparse=True`` gives them as sparse tensors, for ``torch.optim.SparseAdam`` or ``torch.optim.SGD``.

    Second derivatives raise an error. Under ``torch.compile`` the head runs in eager mode, with a graph break.

    Args:
        in_features: d, the size of the inputs.
        num_classes: n.
        loss: a :class:`TopKCrossEntropyLoss`, :class:`TopKErrorLoss` or :class:`GeneralizedCrossEntropyLoss`. With ``m=None``
            or n all classes are ranked, for which the scores do have to be stored: nothing is saved then.
        bias: whether the layer has a bias. A bias of -inf marks a class as padding.
        chunk_size: how many classes to score at once.
        sparse: whether the gradients of weight and bias are sparse tensors.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x (B, d), (d,) or (B, d1, …, d); target class indices of the shape of x without the last dimension (no probabilities);
        example_p_k, if given by keyword, (B, k), (k,) or (B, d1, …, k), as for the losses.

    Example:
        >>> head = anyk.LinearHead(16, 1000, anyk.TopKErrorLoss({1: 0.5, 5: 0.5}))
        >>> x, target = torch.randn(8, 16, requires_grad=True), torch.randint(1000, (8,))
        >>> head(x, target).backward()
        >>> scores, classes = head.predict(x, k=5)
        >>> classes.shape
        torch.Size([8, 5])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        loss: Loss,
        *,
        bias: bool = True,
        chunk_size: int = 16384,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n = checks.at_least_one("num_classes", num_classes)
        self.chunk_size = checks.at_least_one("chunk_size", chunk_size)
        self.linear = nn.Linear(checks.at_least_one("in_features", in_features), n, bias, device=device, dtype=dtype)
        check_is_loss(loss)
        self.criterion, self.sparse = loss, sparse
        loss.options.class_weights(n, self.linear.weight)
        p_k = loss.distribution(torch.Size)
        self._check_sparse(loss.row_loss, loss.row_loss.sizes(p_k, n)[1] if p_k is not None else 1)
        if device is not None:
            self.criterion.to(device)

    def _check_sparse(self, row_loss: RowLoss, m: int) -> None:
        if self.sparse and (row_loss.softmax == "all" or m == self.linear.out_features):
            raise ValueError(
                'sparse: expected a loss of the candidates alone (softmax_over="candidates", top1="operator" or ce_weight=0, '
                "with m below num_classes): otherwise every class has a gradient"
            )

    def forward(
        self, x: Float[Tensor, "*batch d"], target: Int[Tensor, "*batch"], *, example_p_k: Tensor | None = None
    ) -> Tensor:
        loss = self._loss
        if torch.compiler.is_compiling():  # not a decorator: that would import the compiler for everyone
            loss = torch.compiler.disable(loss)  # type: ignore[no-untyped-call]
        return loss(x, target, example_p_k)

    def _loss(self, x: Tensor, target: Tensor, example_p_k: Tensor | None) -> Tensor:
        """As :func:`anyk.losses.topk_loss`, with candidates that come out of the chunks."""
        x, loss, n = self._checked(x), self.criterion, self.linear.out_features
        row_loss, options = loss.row_loss, loss.options
        row_loss.check(options)
        target = checks.class_indices(target, x.shape[:-1], n, options.ignore_index)
        p_k = loss.distribution(lambda: target.shape, example_p_k)
        k, m = row_loss.sizes(p_k, n)
        self._check_sparse(row_loss, m)
        if m == n:
            scores, more = self.linear(x), {} if example_p_k is None else {"example_p_k": example_p_k}
            return loss(scores.movedim(-1, 1) if x.ndim > 1 else scores, target, **more)
        ignored, bias = target.reshape(-1) == options.ignore_index, self.linear.bias
        inputs = x.reshape(-1, x.shape[-1]).masked_fill(ignored[:, None], 0)
        indices = target.reshape(-1).masked_fill(ignored, 0)
        if row_loss.temperature != 1:
            inputs, bias = inputs / row_loss.temperature, None if bias is None else bias / row_loss.temperature  # type: ignore[assignment]
        shares = self._even(options) if options.label_smoothing else None
        settings = self._settings(x, max(m, 1), row_loss.softmax == "all")
        kept, position, log_sum_exp, mean = _Candidates.apply(  # type: ignore[no-untyped-call]
            inputs, self.linear.weight, bias, indices, shares, settings
        )
        kept = kept.masked_fill(ignored[:, None], 0)
        if m > 0:
            candidates.check_padding(kept, position, k)
        cross_entropy = None if log_sum_exp is None else log_sum_exp - candidates.at(kept, position)
        everywhere = None if shares is None else shares.sum() * log_sum_exp - mean
        rows = Rows(kept, indices, ignored, None, None, target.shape, options)
        return loss_of_candidates(row_loss, rows, position, cross_entropy, everywhere, p_k)

    def _even(self, options: Options) -> Float[Tensor, " n"]:
        """The uniform distribution over the classes that are no padding, each with its weight in the loss."""
        weight, bias = self.linear.weight.detach(), self.linear.bias
        exist = torch.ones_like(weight[:, 0]) if bias is None else bias.detach() != -torch.inf
        shares = exist.to(working_dtype(weight)) / exist.sum()
        return shares if options.weight is None else shares * options.weight.to(shares.dtype)

    @torch.no_grad()
    def predict(self, x: Float[Tensor, "*batch d"], k: int) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
        """The k best scores of each row in descending order and their classes, as ``torch.topk`` of all scores; no gradient.

        Example:
            >>> head = anyk.LinearHead(2, 3, anyk.TopKErrorLoss({1: 1.0}), bias=False)
            >>> _ = head.load_state_dict({"linear.weight": torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.0, 2.0]])}, strict=False)
            >>> head.predict(torch.tensor([1.0, 2.0]), k=2)
            (tensor([5., 3.]), tensor([2, 0]))
        """
        x = self._checked(x)
        k = checks.count("k", k, 1, self.linear.out_features, "num_classes")
        settings, best = self._settings(x, k), None
        for first, _, scores in _chunks(x.reshape(-1, x.shape[-1]), self.linear.weight, self.linear.bias, settings):
            best = _best(best, scores, first, k)
        scores, classes = best  # type: ignore[misc]
        return scores.to(settings.dtype).reshape(*x.shape[:-1], k), classes.reshape(*x.shape[:-1], k)

    def as_linear(self) -> nn.Linear:
        """The layer alone, as a plain ``nn.Linear`` that shares its parameters with this module.

        Example:
            >>> head = anyk.LinearHead(16, 1000, anyk.TopKErrorLoss({1: 0.5, 5: 0.5}))
            >>> head.as_linear()(torch.randn(8, 16)).shape
            torch.Size([8, 1000])
        """
        return self.linear

    def _checked(self, x: object) -> Tensor:
        x = checks.tensor("x", x)
        if x.ndim == 0 or x.shape[-1] != self.linear.in_features:
            raise ValueError(f"x: expected shape (…, {self.linear.in_features}), got {tuple(x.shape)}")
        return x

    def _settings(self, x: Tensor, m: int, softmax: bool = False) -> _Settings:
        dtype = functional.linear(x.new_empty(0, x.shape[-1]), self.linear.weight[:0]).dtype  # under autocast, too
        return _Settings(dtype, self.chunk_size, m, softmax, self.sparse)

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}, sparse={self.sparse}"


class _Settings(NamedTuple):
    dtype: torch.dtype
    """of the product of inputs and weights"""
    chunk_size: int
    m: int
    softmax: bool
    """whether sums over all classes are wanted"""
    sparse: bool


def _chunks(x: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Iterator[tuple[int, int, Tensor]]:
    """The scores of the classes first, …, last - 1, in at least float32, chunk after chunk."""
    x = x.to(settings.dtype)
    for first in range(0, len(weight), settings.chunk_size):
        last = min(first + settings.chunk_size, len(weight))
        some = None if bias is None else bias[first:last].to(settings.dtype)
        scores = functional.linear(x, weight[first:last].to(settings.dtype), some)
        yield first, last, scores.to(working_dtype(scores))


def _best(before: tuple[Tensor, Tensor] | None, scores: Tensor, first: int, m: int) -> tuple[Tensor, Tensor]:
    """The m best scores of those before and those of the classes from the first on, and their classes."""
    index = candidates.best(scores, min(m, scores.shape[-1]))
    kept, classes = scores.gather(-1, index), index + first
    if before is None:
        return kept, classes
    kept, classes = torch.cat([before[0], kept], -1), torch.cat([before[1], classes], -1)
    index = candidates.best(kept, min(m, kept.shape[-1]))
    return kept.gather(-1, index), classes.gather(-1, index)


class _Candidates(torch.autograd.Function):
    """From the inputs and the layer to what the loss depends on: the candidates' scores, and sums over all classes.

    Where there are such sums, all results are relative to the row's best score, a constant that the loss does not notice:
    log-sum-exp less the target's score then keeps its digits however large the scores are.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        """The candidates' scores, the target's place among them, log-sum-exp, and the sum of the scores times ``shares``."""
        x, weight, bias, target, shares, settings = inputs
        own = torch.zeros(len(x), dtype=torch.promote_types(settings.dtype, torch.float32), device=x.device)
        best, total, mean = torch.full_like(own, torch.finfo(own.dtype).min), own, None if shares is None else own
        found = None
        with torch.autocast(x.device.type, enabled=False):
            for first, last, scores in _chunks(x, weight, bias, settings):
                found = _best(found, scores, first, settings.m)
                place = (target - first).clamp(0, last - first - 1)
                own = torch.where(place == target - first, candidates.at(scores, place), own)
                if not settings.softmax:
                    continue
                top = torch.maximum(best, scores.amax(-1))
                scores.sub_(top[:, None])
                if mean is not None:
                    behind = shares[:first].sum() * (best - top)
                    mean = mean + behind + scores.masked_fill(shares[first:last] == 0, 0) @ shares[first:last]
                total = total * (best - top).exp() + scores.exp_().sum(-1)
                best = top
        assert found is not None
        kept, (classes, position) = found[0], candidates.insert(found[1], target)
        kept = kept.scatter(-1, position[:, None], own[:, None])
        ctx.settings = settings
        ctx.mark_non_differentiable(position)
        if not settings.softmax:
            ctx.save_for_backward(x, weight, classes)
            return kept, position, None, None
        log_sum_exp = total.log()
        ctx.save_for_backward(x, weight, classes, bias, best, log_sum_exp, shares)
        return kept - best[:, None], position, log_sum_exp, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kept: Tensor, _: Tensor, *grad_sums: Any) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_kept.device.type, enabled=False):
            gradients = _backward_of_all(ctx, grad_kept, *grad_sums) if ctx.settings.softmax else _backward(ctx, grad_kept)
        return *gradients, None, None, None


def _backward_of_all(ctx: Any, grad_kept: Tensor, grad_log_sum_exp: Tensor, grad_mean: Any) -> tuple[Tensor | None, ...]:
    """Where all classes count: each chunk's scores once more, their gradient in the same memory."""
    x, weight, classes, bias, best, log_sum_exp, shares = ctx.saved_tensors
    settings, wanted, inputs = ctx.settings, ctx.needs_input_grad, x.to(ctx.settings.dtype)
    grad_x = torch.zeros_like(x, dtype=grad_kept.dtype) if wanted[0] else None
    grad_weight = torch.empty_like(weight) if wanted[1] else None
    grad_bias = torch.empty_like(bias) if wanted[2] else None
    # d log-sum-exp / d score = exp(score - best) / exp(log-sum-exp)
    scale = grad_log_sum_exp * (-log_sum_exp).exp()
    ordered, order = classes.flatten().sort()
    starts = torch.arange(0, len(weight) + settings.chunk_size, settings.chunk_size, device=classes.device)
    bounds = torch.searchsorted(ordered, starts).tolist()  # which of the candidates are in which chunk
    rows, kept = order.div(classes.shape[-1], rounding_mode="floor"), grad_kept.flatten()[order]
    for chunk, (first, last, scores) in enumerate(_chunks(inputs, weight, bias, settings)):
        gradient = scores.sub_(best[:, None]).exp_().mul_(scale[:, None])
        if shares is not None:
            gradient.addr_(grad_mean, shares[first:last])
        here = slice(bounds[chunk], bounds[chunk + 1])
        gradient.view(-1).scatter_add_(0, rows[here] * (last - first) + (ordered[here] - first), kept[here])
        if grad_bias is not None:
            torch.sum(gradient, 0, out=grad_bias[first:last])
        gradient = gradient.to(settings.dtype)
        if grad_x is not None:
            grad_x += gradient @ weight[first:last].to(settings.dtype)
        if grad_weight is not None and grad_weight.dtype == settings.dtype:
            torch.mm(gradient.t(), inputs, out=grad_weight[first:last])
        elif grad_weight is not None:
            grad_weight[first:last] = gradient.t() @ inputs
    return None if grad_x is None else grad_x.to(x.dtype), grad_weight, grad_bias


def _backward(ctx: Any, grad_kept: Tensor) -> tuple[Tensor | None, ...]:
    """Where only the candidates count: sums over the rows of the weight that they name, and over their inputs.

    An embedding bag is such a sum, and does not store its (rows, m, d) terms.
    """
    x, weight, classes = ctx.saved_tensors
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        shares = grad_kept.to(weight.dtype)
        grad_x = functional.embedding_bag(classes, weight, mode="sum", per_sample_weights=shares).to(x.dtype)
    # An example that does not count must not wake an optimiser's old momentum in its candidates.
    counted = (grad_kept != 0).any(-1).nonzero()
    ordered, order = classes[counted[:, 0]].flatten().sort(stable=True)
    shares, rows = grad_kept[counted[:, 0]].flatten()[order], counted.expand(-1, classes.shape[-1]).flatten()[order]
    touched, group, sizes = ordered.unique_consecutive(return_inverse=True, return_counts=True)

    def whole(part: Tensor) -> Tensor:
        size = (len(weight), *part.shape[1:])
        if ctx.settings.sparse:
            return torch.sparse_coo_tensor(touched[None], part, size, is_coalesced=True, check_invariants=False)
        return part.new_zeros(size).index_copy_(0, touched, part)

    if ctx.needs_input_grad[1]:
        starts = sizes.cumsum(0) - sizes
        part = functional.embedding_bag(rows, x.to(shares.dtype), starts, mode="sum", per_sample_weights=shares)
        grad_weight = whole(part.to(weight.dtype))
    if ctx.needs_input_grad[2]:
        grad_bias = whole(shares.new_zeros(len(touched)).index_add_(0, group, shares).to(weight.dtype))
    return grad_x, grad_weight, grad_bias
