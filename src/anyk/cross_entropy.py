"""What every loss shares with ``torch.nn.CrossEntropyLoss``: its options, shapes, ignored rows, class weights, reductions.

    rows = Rows.of(scores, target, options, …)     checked, as rows of classes
    rows.keep(m, …)                                the candidates, the target's place among them, its cross-entropy
    rows.reduce(losses)                            losses of the rows -> one loss

Who has found the candidates without the scores of all classes (the head, the sharded loss) makes the :class:`Rows` of them.
"""

from __future__ import annotations

import numbers
import warnings
import weakref
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from anyk import _compat, candidates, checks, kernels
from anyk.checks import working_dtype
from anyk.p_k import remembered

Scores = Float[Tensor, "batch n *positions"] | Float[Tensor, " n"]
"""(B, n), (n,) or (B, n, d1, …)"""
ClassIndices = Int[Tensor, "batch *positions"] | Int[Tensor, ""]
"""(B,), () or (B, d1, …)"""
Reduction = Literal["mean", "sum", "none"]
SoftmaxOver = Literal["all", "candidates"]
MOST_SHARES = 8
"""so many classes of a distribution over classes are ranked"""
_INDICES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


class Options(NamedTuple):
    """The arguments of ``torch.nn.CrossEntropyLoss``."""

    reduction: Reduction = "mean"
    ignore_index: int = -100
    weight: Float[Tensor, " n"] | None = None
    label_smoothing: float = 0.0

    def checked(self) -> Options:
        _check(self.reduction, self.ignore_index, self.label_smoothing)
        weight = self.weight
        if weight is not None and (not weight.dtype.is_floating_point or weight.ndim != 1):
            got = f"dtype {weight.dtype} and shape {tuple(weight.shape)}"
            raise ValueError(f"weight: expected a floating-point tensor of shape (n,), got {got}")
        return self

    def class_weights(self, n: int, like: Tensor) -> Float[Tensor, " n"] | None:
        """The weights of the n classes in the precision that scores like these are computed in."""
        if self.weight is None:
            return None
        if self.weight.shape != (n,):
            raise ValueError(f"weight: expected shape ({n},), one for each class, got {tuple(self.weight.shape)}")
        return self.weight.to(dtype=working_dtype(like))


class Keywords(TypedDict, total=False):
    """The same as keywords."""

    reduction: Reduction
    ignore_index: int
    weight: Tensor | None
    label_smoothing: float


@remembered
def _check(reduction: object, ignore_index: object, label_smoothing: object) -> None:
    checks.one_of("reduction", reduction, get_args(Reduction))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise TypeError(f"ignore_index: expected an integer, got {ignore_index!r}")
    checks.between("label_smoothing", label_smoothing, 0, 1)


def batch_shape(scores: Tensor) -> torch.Size:
    """The shape of the targets of scores (B, n, d1, …) or (n,)."""
    shape = checks.floating("scores", scores).shape
    if len(shape) == 0 or shape[min(1, len(shape) - 1)] < 1:
        raise ValueError(f"scores: expected shape (B, n), (n,) or (B, n, d1, …), got {tuple(shape)}")
    return shape[:1] + shape[2:] if len(shape) > 1 else shape[:0]


def as_rows(scores: Tensor) -> Float[Tensor, "rows n"]:
    """(rows, n) from (B, n, d1, …) or (n,)."""
    if scores.ndim == 2:
        return scores  # a view, even a trivial one, makes autograd copy the gradient once more
    return scores.movedim(1, -1).reshape(-1, scores.shape[1]) if scores.ndim > 1 else scores[None]


class Rows(NamedTuple):
    """Scores and targets as rows of classes. Of a distribution over the classes, the classes with the largest shares are the
    targets of its row."""

    scores: Float[Tensor, "rows n"]
    target: Int[Tensor, "*rows"]
    """class indices, 0 where a row does not count"""
    ignored: Bool[Tensor, " rows"] | None
    """which rows do not count; None: all count"""
    shares: Float[Tensor, "rows targets"] | None
    """of the targets; None: a row has one target"""
    rest: Float[Tensor, " rows"] | None
    """what all other classes of a distribution cost"""
    shape: torch.Size
    options: Options

    @classmethod
    def of(cls, scores: Tensor, target: Tensor, options: Options, keep_rest: bool) -> Rows:
        """Scores and targets, checked. Without the rest, the shares of the targets of a row sum to what all shares sum to."""
        shape, target = batch_shape(scores), checks.tensor("target", target)
        rows = as_rows(scores)
        n = rows.shape[1]
        options.class_weights(n, scores)
        if target.dtype.is_floating_point:
            _check_probabilities(target, scores, options.ignore_index)
            probabilities = as_rows(target).to(working_dtype(scores))
            return cls(rows, *_largest(rows, probabilities, options if keep_rest else None), shape, options)
        target = checks.class_indices(target, shape, n, options.ignore_index).reshape(-1)
        ignored = target == options.ignore_index
        if checks.readable(ignored) and not ignored.any():
            return cls(rows, target, None, None, None, shape, options)
        return cls(rows, target.masked_fill(ignored, 0), ignored, None, None, shape, options)

    @property
    def clean(self) -> Float[Tensor, "rows n"]:
        """The scores without what ignored rows hold: NaN, say, must not reach a gradient."""
        return self.scores if self.ignored is None else self.scores.masked_fill(self.ignored[:, None], 0)

    @property
    def weights(self) -> Float[Tensor, "*rows"] | None:
        """What each target counts by its class; None: 1."""
        weight = self.options.weight
        return None if weight is None else weight.to(dtype=working_dtype(self.scores))[self.target]

    def keep(self, m: int, k: int, descending: bool, softmax: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of each target the scores of the m candidates, its place among them, and its cross-entropy over all classes.

        Args:
            m: number of candidates; 0: none are wanted.
            k: so many of each row must be no padding.
            descending: whether they shall be in descending order, where all are kept.
            softmax: whether the cross-entropy is wanted.
        """
        target, cross_entropy = self.target, None
        if m == 0 or (m == self.scores.shape[-1] and not descending):
            scores, position = self.clean, target
            kept = scores if target.ndim == 1 else scores[:, None].expand(*target.shape, -1)
            cross_entropy = cross_entropies(scores, target) if softmax else None
        else:
            classes = candidates.best(self.scores, m)
            if target.ndim > 1:  # ranked once for all targets of a row
                classes = classes[:, None].expand(*target.shape, m)
            classes, position = candidates.insert(classes, target)
            if softmax:
                kept, cross_entropy = _KeptAndCrossEntropy.run(self.scores, classes, position, target, self.ignored)
            else:
                kept = self.clean.gather(-1, classes.flatten(1)).view(classes.shape)
        if m > 0:
            candidates.check_padding(kept, position, k)
        return kept, position, cross_entropy

    def everywhere(self) -> Float[Tensor, " rows"]:
        """The mean cross-entropy of the classes that are no padding, each with its weight."""
        return _everywhere(self.clean, self.options)

    def smoothing(
        self, share: float | Tensor, cross_entropy: Float[Tensor, "*rows"], everywhere: Float[Tensor, " rows"]
    ) -> Tensor:
        """What label smoothing adds to losses of which this share is cross-entropy."""
        own = cross_entropy if self.weights is None else cross_entropy * self.weights
        return self.options.label_smoothing * share * (everywhere.view(-1, *[1] * (own.ndim - 1)) - own)

    def reduce(self, losses: Float[Tensor, "*rows"], smoothing: Tensor | None = None) -> Tensor:
        """The losses of the targets, with their weights and shares, as one loss.

        Args:
            losses: of the targets, not smoothed.
            smoothing: what label smoothing adds to them.
        """
        weights, ignored, reduction = self.weights, self.ignored, self.options.reduction
        if weights is not None:
            losses = losses * weights
        if smoothing is not None:
            losses = losses + smoothing
        if self.shares is not None:
            losses = (losses * self.shares).sum(-1)
        if self.rest is not None:
            losses = losses + self.rest
        if ignored is not None and weights is None and reduction != "none":
            # as of classes 0 and 1, the ignored: masks, counts and divides in one operation
            return functional.nll_loss(-losses[:, None], ignored.long(), ignore_index=1, reduction=reduction)
        if ignored is not None:
            losses = losses.masked_fill(ignored, 0)
            weights = None if weights is None else weights.masked_fill(ignored, 0)
        if reduction == "none":
            return losses.reshape(self.shape)
        if reduction == "sum":
            return losses.sum()
        return losses.mean() if self.shares is not None or weights is None else losses.sum() / weights.sum()


def cross_entropies(scores: Float[Tensor, "rows n"], target: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """The softmax cross-entropy over all classes of each target."""
    if target.ndim == 1:
        return functional.cross_entropy(scores.to(working_dtype(scores)), target, reduction="none")
    return -_log_softmax(scores).gather(-1, target)


class _KeptAndCrossEntropy(_compat.Function):
    """The candidates' scores and the targets' softmax cross-entropy over all classes, with one (rows, n) gradient for both, and
    nothing of this size kept but the scores."""

    @staticmethod
    def forward(scores: Tensor, classes: Tensor, position: Tensor, target: Tensor, ignored: Any) -> tuple[Tensor, Tensor]:
        scores = scores if ignored is None else scores.masked_fill(ignored[:, None], 0)
        own = _log_softmax(scores).gather(-1, target[..., None].flatten(1)).view(target.shape)
        return scores.gather(-1, classes.flatten(1)).view(classes.shape), -own

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_kept: Tensor, grad_cross_entropy: Tensor) -> tuple[Tensor | None, ...]:
        scores, classes, position, _, ignored = ctx.saved_tensors
        grad_row = grad_cross_entropy if position.ndim == 1 else grad_cross_entropy.sum(-1)
        grad_kept = grad_kept.to(grad_row.dtype).scatter_add(-1, position[..., None], -grad_cross_entropy[..., None])
        grad_scores = scores.softmax(-1, dtype=grad_row.dtype) * grad_row[:, None]
        grad_scores = grad_scores.scatter_add(-1, classes.flatten(1), grad_kept.flatten(1))
        grad_scores = grad_scores if ignored is None else grad_scores.masked_fill(ignored[:, None], 0)
        return grad_scores.to(scores.dtype), None, None, None, None

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        scores, classes, _, target, _ = ctx.saved_tensors
        mean = (scores.softmax(-1, dtype=working_dtype(scores)) * tangent).sum(-1, keepdim=True)
        own = tangent.gather(-1, target[..., None].flatten(1)) - mean
        return tangent.gather(-1, classes.flatten(1)).view(classes.shape), -own.view(target.shape)


def indexed_rows(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scores and class indices as (rows, n) and (rows,), for the kernels; None: they are something else, or wrong."""
    if not isinstance(scores, Tensor) or not isinstance(target, Tensor) or target.dtype not in _INDICES:
        return None
    shape = scores.shape
    if len(shape) < 2 or not shape[1] or target.shape != shape[:1] + shape[2:]:
        return None
    if len(shape) == 2:
        return scores, target
    serves = torch.compiler.is_compiling() or kernels.serve(scores)  # before the scores are copied
    return (as_rows(scores), target.reshape(-1)) if serves else None


# Class probabilities -------------------------------------------------------------------------------------------------------


def _check_probabilities(target: Tensor, scores: Tensor, ignore_index: int) -> None:
    if target.shape != scores.shape:
        raise ValueError(
            f"target: expected class indices of an integer dtype, or class probabilities of the shape of scores "
            f"{tuple(scores.shape)}, got dtype {target.dtype} and shape {tuple(target.shape)}"
        )
    if ignore_index >= 0:
        raise ValueError("ignore_index: expected class indices as targets if it is 0 or more, got class probabilities")
    if checks.readable(target) and target.numel() and (least := target.amin()) < 0:
        raise ValueError(f"target: expected class probabilities of at least 0, got {least.item():.6g}")


def _largest(
    scores: Float[Tensor, "rows n"], probabilities: Float[Tensor, "rows n"], options: Options | None
) -> tuple[Tensor, None, Tensor, Tensor | None]:
    """The classes with the largest shares, these shares, and what all others cost. Without options that is nothing: the shares
    are enlarged."""
    number, more, rest = min(MOST_SHARES, scores.shape[-1]), scores.shape[-1] > MOST_SHARES, None
    classes = candidates.best(probabilities, number)
    shares = probabilities.gather(-1, classes)
    if readable := checks.readable(shares) and shares.numel() > 0:
        positive = int((shares > 0).any(0).sum())
        more, number = more and positive == number, max(positive, 1)
        classes, shares = classes[:, :number], shares[:, :number]
    if more and options is not None:
        rest = _cross_entropy(scores, probabilities.scatter(-1, classes, 0), options)
    elif more:
        total = shares.sum(-1, keepdim=True)
        shares = shares * (probabilities.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1))
    # A class without a share may be padding: another takes its place, which is none.
    other = classes[:, :1] if readable and bool((shares[:, 0] > 0).all()) else scores.detach().argmax(-1, keepdim=True)
    return torch.where(shares > 0, classes, other), None, shares, rest


def _cross_entropy(
    scores: Float[Tensor, "rows n"], shares: Float[Tensor, "rows n"], options: Options
) -> Float[Tensor, " rows"]:
    """Of shares of all classes, each with its weight, smoothed."""
    weight, amount, log_softmax = options.class_weights(scores.shape[-1], scores), options.label_smoothing, _log_softmax(scores)
    each = shares if weight is None else shares * weight
    cross_entropy = -(each * log_softmax.masked_fill(each == 0, 0)).sum(-1)
    return cross_entropy.lerp(shares.sum(-1) * _everywhere(scores, options), amount) if amount else cross_entropy


def _everywhere(scores: Float[Tensor, "rows n"], options: Options) -> Float[Tensor, " rows"]:
    weight, padding = options.class_weights(scores.shape[-1], scores), scores.detach() == -torch.inf
    each = _log_softmax(scores).masked_fill(padding, 0)
    each = each if weight is None else each * weight
    return each.sum(-1) / (padding.sum(-1) - scores.shape[-1])


def _log_softmax(scores: Tensor) -> Tensor:
    return scores.log_softmax(-1, dtype=working_dtype(scores))


# Modules -------------------------------------------------------------------------------------------------------------------

_probabilities_seen = False
_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CrossEntropyModule(nn.Module):
    """A loss with the arguments of ``torch.nn.CrossEntropyLoss``, which are attributes that may be assigned at any time."""

    weight: Tensor | None

    def __init__(self, options: Options) -> None:
        super().__init__()
        options.checked()
        self.reduction, self.ignore_index, _, self.label_smoothing = options
        self.register_buffer("weight", options.weight)

    @property
    def options(self) -> Options:
        """The arguments as they are now, checked."""
        # from where nn.Module keeps the weight: by its name it takes a microsecond
        return Options(self.reduction, self.ignore_index, self._buffers["weight"], self.label_smoothing).checked()

    def look_at(self, scores: Tensor) -> None:
        """Warn, once in a process, if a module's first scores look like probabilities: the loss takes the softmax itself."""
        global _probabilities_seen
        if torch.compiler.is_compiling() or self in _looked_at:
            return
        _looked_at.add(self)
        if _probabilities_seen or not isinstance(scores, Tensor) or not checks.readable(scores) or _compat.is_recorded():
            return
        if not scores.is_floating_point() or scores.ndim < 2 or scores.shape[1] < 2 or not scores.numel():
            return
        low, high = scores.detach().aminmax()
        off = (scores.detach().sum(1, dtype=working_dtype(scores)) - 1).abs().max()
        # One-hot rows are made by hand, not by a softmax.
        if bool((low >= 0) & (high < 1) & (off < (1e-4 if scores.itemsize >= 4 else 1e-2))):
            _probabilities_seen = True
            warnings.warn(
                f"{type(self).__name__}: the scores look like probabilities: none is negative, and every row sums to 1. The "
                "loss expects logits, so leave out the softmax before it. This warning is shown once.",
                stacklevel=5,  # past the calls of nn.Module
            )

    def extra_repr(self) -> str:
        weight = "None" if self.weight is None else f"tensor of {len(self.weight)}"
        smoothing = f"label_smoothing={self.label_smoothing}"
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, weight={weight}, {smoothing}"
