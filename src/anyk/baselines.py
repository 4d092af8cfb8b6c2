"""Competing losses for one fixed k, with the same call as ``torch.nn.CrossEntropyLoss``.

In the formulae, a_j = s_j - s_y is how far another class is ahead of the target, and a_(1) >= a_(2) >= … are these in order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyk import candidates, checks
from anyk.losses import Rows, View, check_shared, over_targets, shared_repr, working_dtype
from anyk.operators.base import real_mask
from anyk.operators.ksubset import log_polynomial_ratios

__all__ = ["SmoothTopKLoss", "TopKHingeLoss", "TruncatedTopKEntropyLoss"]


class _TopKLoss(nn.Module, ABC):
    """A loss of the others' leads for one k; everything else is shared with CrossEntropyLoss."""

    weight: Tensor | None

    def __init__(
        self,
        k: int,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_shared(reduction, ignore_index, weight, label_smoothing)
        self.k = checks.at_least_one("k", k)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.register_buffer("weight", weight)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        scores = checks.tensor("scores", scores)
        if scores.ndim:
            checks.count("k", self.k, 1, scores.shape[min(1, scores.ndim - 1)], "the number of classes")
        return over_targets(
            scores,
            target,
            self._example_losses,
            View(least=self.k),
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            weight=self.weight,
            label_smoothing=self.label_smoothing,
        )

    def _example_losses(self, rows: Rows) -> Tensor:
        scores = rows.scores.to(working_dtype(rows.scores))
        target = candidates.at(scores, rows.position)
        return self._loss(candidates.others(scores, rows.position) - target[..., None])

    @abstractmethod
    def _loss(self, leads: Tensor) -> Tensor:
        """The loss from a_(1), a_(2), … of each row; padding is -inf."""

    def extra_repr(self) -> str:
        return f"k={self.k}, {shared_repr(self)}"


class SmoothTopKLoss(_TopKLoss):
    """The smooth top-k SVM loss.

    With Y the k-subsets of the classes, Y_y those that contain the target, and t the temperature,

        L = t log sum_{S in Y} exp((margin [y not in S] + sum_{j in S} s_j / k) / t)
          - t log sum_{S in Y_y} exp(sum_{j in S} s_j / (k t)).

    Where the k-th largest score is far ahead of the (k+1)-th, the published loss switches to its limit for t -> 0,
    ``max(0, margin + a_(k) / k)``: when the gap is at least ``k t log(hard_threshold)``.

    Args:
        k: the k of top-k.
        temperature: t > 0.
        margin: by how much the target must be ahead, in the mean of k scores.
        hard_threshold: where to switch; None never does. The smooth form is stable everywhere, so that is safe.
        reduction, ignore_index, weight, label_smoothing: as for ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> criterion = anyk.SmoothTopKLoss(k=5)
        >>> criterion(torch.zeros(1, 10), torch.tensor([0]))
        tensor(1.3133)

    Reference: Berrada et al., "Smooth Loss Functions for Deep Top-k Classification", ICLR 2018.
    """

    def __init__(
        self,
        k: int,
        temperature: float = 1.0,
        *,
        margin: float = 1.0,
        hard_threshold: float | None = 1e3,
        reduction: str = "mean",
        ignore_index: int = -100,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(k, reduction=reduction, ignore_index=ignore_index, weight=weight, label_smoothing=label_smoothing)
        self.temperature = checks.number("temperature", temperature, "a positive number")
        checks.temperature(self.temperature)
        self.margin = _margin(margin)
        if hard_threshold is not None:
            hard_threshold = checks.number("hard_threshold", hard_threshold, "a number of at least 1, or None")
        if hard_threshold is not None and not hard_threshold >= 1:
            raise ValueError(f"hard_threshold: expected a number of at least 1, or None, got {hard_threshold}")
        self.hard_threshold = hard_threshold

    def _loss(self, leads: Tensor) -> Tensor:
        real = real_mask(leads)
        finite = leads if real is None else leads.masked_fill(~real, 0)
        t, k = self.temperature, self.k
        ratio = log_polynomial_ratios(finite / (k * t), real, k)[..., -1]
        smooth = t * functional.softplus(self.margin / t + ratio)
        if self.hard_threshold is None or k > leads.shape[-1]:
            return smooth
        hard = (self.margin + finite[..., k - 1] / k).clamp(min=0)
        # The k-th and the (k+1)-th of all scores, the target (with lead 0) among them.
        everyone = functional.pad(leads.detach(), (1, 0)).topk(k + 1, dim=-1).values
        far = everyone[..., k - 1] - everyone[..., k] >= k * t * math.log(self.hard_threshold)
        if real is not None:
            far = far & real[..., k - 1]
        return torch.where(far, hard, smooth)

    def extra_repr(self) -> str:
        own = f"temperature={self.temperature}, margin={self.margin}, hard_threshold={self.hard_threshold}"
        return f"{super().extra_repr()}, {own}"


class TopKHingeLoss(_TopKLoss):
    """The top-k hinge losses of multiclass support vector machines.

    With b the margins ``a_j + margin`` of the other classes and 0 for the target, in descending order,

        alpha   max(0, (b_(1) + … + b_(k)) / k)
        beta    (max(0, b_(1)) + … + max(0, b_(k))) / k

    Args:
        k: the k of top-k.
        variant: ``"alpha"`` or ``"beta"``.
        margin: by how much the target must be ahead.
        reduction, ignore_index, weight, label_smoothing: as for ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> anyk.TopKHingeLoss(k=2)(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]))
        tensor(2.5000)

    Reference: Lapin et al., "Top-k Multiclass SVM", NeurIPS 2015 (alpha); "Loss Functions for Top-k Error", CVPR 2016 (beta).
    """

    def __init__(
        self,
        k: int,
        variant: str = "alpha",
        *,
        margin: float = 1.0,
        reduction: str = "mean",
        ignore_index: int = -100,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(k, reduction=reduction, ignore_index=ignore_index, weight=weight, label_smoothing=label_smoothing)
        checks.one_of("variant", variant, ("alpha", "beta"))
        self.variant = variant
        self.margin = _margin(margin)

    def _loss(self, leads: Tensor) -> Tensor:
        largest = functional.pad(leads + self.margin, (1, 0)).topk(self.k, dim=-1).values
        if self.variant == "alpha":
            return largest.mean(-1).clamp(min=0)
        return largest.clamp(min=0).mean(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, variant={self.variant!r}, margin={self.margin}"


class TruncatedTopKEntropyLoss(_TopKLoss):
    """Softmax cross-entropy that forgives the k - 1 classes most ahead.

        L = log(1 + exp(a_(k)) + exp(a_(k+1)) + …)

    Args:
        k: the k of top-k; 1 is softmax cross-entropy.
        reduction, ignore_index, weight, label_smoothing: as for ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> anyk.TruncatedTopKEntropyLoss(k=2)(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([0]))
        tensor(0.6931)

    Reference: Lapin et al., "Loss Functions for Top-k Error: Analysis and Insights", CVPR 2016.
    """

    def _loss(self, leads: Tensor) -> Tensor:
        return functional.pad(leads[..., self.k - 1 :], (1, 0)).logsumexp(-1)


def _margin(margin: float) -> float:
    margin = checks.number("margin", margin, "a number of at least 0")
    if not 0 <= margin < float("inf"):
        raise ValueError(f"margin: expected a number of at least 0, got {margin}")
    return margin
