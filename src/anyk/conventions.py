"""What every loss shares with ``torch.nn.CrossEntropyLoss``: shapes, ignored rows, class weights, reductions.

What a loss measures of each row, and label smoothing and class probabilities with it, is in :mod:`anyk.rows`.
"""

from __future__ import annotations

import numbers
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from anyk import _compat, checks
from anyk.checks import working_dtype

Scores = Float[Tensor, "batch n *positions"] | Float[Tensor, " n"]
"""(B, n), (n,) or (B, n, d1, …)"""
ClassIndices = Int[Tensor, "batch *positions"] | Int[Tensor, ""]
"""(B,), () or (B, d1, …)"""
Reduction = Literal["mean", "sum", "none"]
_REDUCTIONS = get_args(Reduction)


class Keywords(TypedDict, total=False):
    """The keyword arguments that all losses share."""

    reduction: Reduction
    ignore_index: int
    weight: Tensor | None
    label_smoothing: float


@dataclass(frozen=True, eq=False, slots=True)
class Conventions:
    """The arguments of ``torch.nn.CrossEntropyLoss``, checked."""

    reduction: Reduction = "mean"
    ignore_index: int = -100
    weight: Float[Tensor, " n"] | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        checks.one_of("reduction", self.reduction, _REDUCTIONS)
        if type(self.ignore_index) is not int and (
            isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, numbers.Integral)
        ):
            raise TypeError(f"ignore_index: expected an integer, got {self.ignore_index!r}")
        if self.weight is not None:
            weight = checks.tensor("weight", self.weight)
            if not weight.dtype.is_floating_point or weight.ndim != 1:
                raise ValueError(
                    f"weight: expected a floating-point tensor of shape (n,), "
                    f"got dtype {weight.dtype} and shape {tuple(weight.shape)}"
                )
        checks.between("label_smoothing", self.label_smoothing, 0, 1)

    def class_weights(self, n: int, like: Tensor) -> Float[Tensor, " n"] | None:
        """The weights of the n classes in the precision that the scores are computed in."""
        if self.weight is None:
            return None
        if self.weight.shape != (n,):
            raise ValueError(f"weight: expected shape ({n},), one for each class, got {tuple(self.weight.shape)}")
        return self.weight.to(dtype=working_dtype(like))

    def count(self, target: ClassIndices, weight: Float[Tensor, " n"] | None, like: Tensor) -> tuple[Tensor, Counted]:
        """The targets as rows, with class 0 for those that do not count; and which count, and how much."""
        shape, target = target.shape, target.reshape(-1)
        counts = target != self.ignore_index
        if checks.readable(counts) and bool(counts.all()):
            return target, Counted(None, None if weight is None else weight[target], shape, self)
        target = torch.where(counts, target, 0)
        weights = counts.to(working_dtype(like)) if weight is None else torch.where(counts, weight[target], 0)
        return target, Counted(counts, weights, shape, self)


class Counted(NamedTuple):
    """Which rows count, how much, and how their losses become the loss."""

    valid: Bool[Tensor, " rows"] | None
    """which count; None: all"""
    weights: Float[Tensor, " rows"] | None
    """what each counts; None: 1"""
    shape: torch.Size
    """of the targets"""
    conventions: Conventions

    def only(self, rows: Shaped[Tensor, "rows some"]) -> Shaped[Tensor, "rows some"]:
        """Zeros where a row does not count: whatever it holds, NaN included, must not reach a gradient."""
        return rows if self.valid is None else torch.where(self.valid[:, None], rows, 0)

    def reduce(self, losses: Float[Tensor, " rows"]) -> Tensor:
        """The loss from those of the rows, which have their weights already."""
        reduction = self.conventions.reduction
        if reduction == "none":
            return losses.reshape(self.shape)
        if reduction == "sum":
            return losses.sum()
        if self.weights is None:
            return losses.mean()
        # Nothing counted: NaN, as torch has it, but with a gradient of zero.
        counted = self.weights.sum()
        something = counted != 0
        return torch.where(something, losses.sum() / torch.where(something, counted, 1), torch.nan)


class Shape(NamedTuple):
    """(B, n, d1, …) or (n,) as rows of classes, and back."""

    classes: int
    batch: torch.Size
    batched: bool

    @classmethod
    def of(cls, scores: Tensor) -> Shape:
        scores = checks.floating("scores", scores)
        if scores.ndim == 0 or scores.shape[min(1, scores.ndim - 1)] < 1:
            raise ValueError(f"scores: expected shape (B, n), (n,) or (B, n, d1, …), got {tuple(scores.shape)}")
        if scores.ndim == 1:
            return cls(len(scores), torch.Size(), False)
        return cls(scores.shape[1], scores.shape[:1] + scores.shape[2:], True)

    def rows(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 2:
            return tensor  # a view, even a trivial one, makes autograd copy the gradient once more
        return (tensor.movedim(1, -1) if self.batched else tensor).reshape(-1, self.classes)


_probabilities_told = False


class CrossEntropyModule(nn.Module):
    """A loss whose attributes are the arguments of ``torch.nn.CrossEntropyLoss``; they may be assigned at any time."""

    weight: Tensor | None

    def __init__(self, conventions: Conventions) -> None:
        super().__init__()
        self.reduction = conventions.reduction
        self.ignore_index = conventions.ignore_index
        self.label_smoothing = conventions.label_smoothing
        self.register_buffer("weight", conventions.weight)

    @property
    def conventions(self) -> Conventions:
        """The arguments as they are now, checked."""
        return Conventions(self.reduction, self.ignore_index, self.weight, self.label_smoothing)

    def _look_at(self, scores: Tensor) -> None:
        """Warn, once in a process, of scores that look like probabilities: the loss takes the softmax itself.

        Called where a module sees its first scores: two reductions, which every step need not pay for.
        """
        global _probabilities_told
        if _probabilities_told or not isinstance(scores, Tensor) or not checks.readable(scores) or _compat.is_recorded():
            return
        if not scores.is_floating_point() or scores.ndim < 2 or scores.shape[1] < 2 or not scores.numel():
            return  # what is wrong is told elsewhere
        low, high = scores.detach().aminmax()
        off = (scores.detach().sum(1, dtype=working_dtype(scores)) - 1).abs().max()
        # One-hot rows are made by hand, not by a softmax.
        if bool((low >= 0) & (high < 1) & (off < (1e-4 if scores.itemsize >= 4 else 1e-2))):
            _probabilities_told = True
            warnings.warn(
                f"{type(self).__name__}: the scores look like probabilities: none is negative, and every row sums to 1. The "
                "loss expects logits, so leave out the softmax before it. This warning is shown once.",
                stacklevel=5,  # past the calls of nn.Module
            )

    def extra_repr(self) -> str:
        weight = "None" if self.weight is None else f"tensor of {len(self.weight)}"
        smoothing = f"label_smoothing={self.label_smoothing}"
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, weight={weight}, {smoothing}"
