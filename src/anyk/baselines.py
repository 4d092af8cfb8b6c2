"""Competing losses for one fixed k, with the same call as ``torch.nn.CrossEntropyLoss``.

In the formulae s are the scores, y is the target, and a_(1) >= a_(2) >= … are the leads s_j - s_y of the other classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, Unpack, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from anyk import candidates, checks, kernels
from anyk.cross_entropy import CrossEntropyModule, Keywords, Options, Rows, indexed_rows

__all__ = ["SmoothTopKLoss", "SoftmaxAtKLoss", "TopKHingeLoss", "TruncatedTopKEntropyLoss"]

Variant = Literal["alpha", "beta"]


class FixedKLoss(CrossEntropyModule, ABC):
    """A loss for one k; what it shares with ``torch.nn.CrossEntropyLoss`` is done here."""

    def __init__(self, k: int, **options: Unpack[Keywords]) -> None:
        super().__init__(Options(**options))
        self.k = checks.at_least_one("k", k)
        self._check_smoothing()

    def _check_smoothing(self) -> None:
        if self.label_smoothing:
            name = f"{type(self).__name__}, of which cross-entropy is no term of its own"
            raise ValueError(f"label_smoothing: expected 0 for {name}, got {self.label_smoothing}")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        self.look_at(input)
        self._check_smoothing()
        if (loss := self._by_kernel(input, target)) is not None:
            return loss
        rows = Rows.of(input, target, self.options, keep_rest=False)
        n = rows.scores.shape[1]
        k = checks.count("k", self.k, 1, n, "the number of classes")
        scores, best = rows.clean.to(checks.working_dtype(input)), candidates.best(rows.scores, min(k + 2, n))
        if rows.shares is not None:  # one row for each target
            scores, best = (each[:, None].expand(*rows.target.shape, -1) for each in (scores, best))
        best, position = candidates.insert(best, rows.target)
        candidates.check_padding(scores.gather(-1, best), position, k)
        return rows.reduce(self._losses(scores, rows.target, candidates.others(best, position)))

    def _by_kernel(self, scores: Tensor, target: Tensor) -> Tensor | None:
        """The loss, if there is a kernel for it."""
        return None

    @abstractmethod
    def _losses(
        self, scores: Float[Tensor, "*rows n"], target: Int[Tensor, "*rows"], best: Int[Tensor, "*rows others"]
    ) -> Float[Tensor, "*rows"]:
        """The loss of each row. ``best`` are the k + 1 best of the other classes in descending order, or all n - 1."""

    def extra_repr(self) -> str:
        return f"k={self.k}, {super().extra_repr()}"


class SmoothTopKLoss(FixedKLoss):
    """The smooth top-k SVM loss.

    With Y the k-subsets of the classes, Y_y those that contain the target, and t the temperature,

        L = t log sum_{S in Y} exp((margin [y not in S] + sum_{j in S} s_j / k) / t)
          - t log sum_{S in Y_y} exp(sum_{j in S} s_j / (k t)).

    Where the k-th largest score is ahead of the (k+1)-th by ``k t log(hard_threshold)`` or more, the published loss switches to
    its limit for t -> 0, ``max(0, margin + (s_(k) - s_y) / k)`` with ``s_(k)`` the k-th largest score of the other classes.

    Args:
        k: the k of top-k.
        temperature: t > 0.
        margin: by how much the mean score of the best k-subset with the target must exceed that of any without it.
        hard_threshold: where to switch; None never switches, which is safe: the smooth form is stable everywhere.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Shape:
        As of ``torch.nn.CrossEntropyLoss``. Of class probabilities the 8 largest of a row count.

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
        **options: Unpack[Keywords],
    ) -> None:
        super().__init__(k, **options)
        self.temperature = checks.positive("temperature", temperature)
        self.margin = checks.at_least("margin", margin, 0)
        self.hard_threshold = None if hard_threshold is None else checks.at_least("hard_threshold", hard_threshold, 1)

    def _by_kernel(self, scores: Tensor, target: Tensor) -> Tensor | None:
        rows = indexed_rows(scores, target)
        if rows is None or self.k < 1:
            return None
        t, margin, threshold, (reduction, ignore_index, weight, _) = (
            self.temperature,
            self.margin,
            self.hard_threshold,
            self.options,
        )
        loss = kernels.smooth_loss(*rows, self.k, t, margin, threshold, reduction, ignore_index, weight)
        return loss.view(target.shape) if loss is not None and loss.ndim and target.ndim > 1 else loss

    def _losses(self, scores: Tensor, target: Tensor, best: Tensor) -> Tensor:
        t, k, own = self.temperature, self.k, candidates.at(scores, target)
        if best.shape[-1] < k:
            return 0 * own  # the target is among the first k of k classes
        ahead = scores.gather(-1, best)
        # With fewer than k others, padding is among the first k: no subset leaves the target out.
        exists = ahead[..., k - 1].detach() != -torch.inf
        first = torch.where(exists[..., None], ahead[..., :k], 0)
        rest = scores.scatter(-1, torch.cat([best[..., :k], target[..., None]], -1), -torch.inf)
        ratio = _log_ratio(torch.cat([first, rest], -1), k, k * t)
        smooth = t * functional.softplus((self.margin + (first[..., -1] - own) / k) / t + ratio)
        if self.hard_threshold is not None:
            hard = (self.margin + (first[..., -1] - own) / k).clamp(min=0)
            everyone = torch.cat([ahead, own[..., None]], -1).detach().topk(k + 1, dim=-1).values
            far = everyone[..., k - 1] - everyone[..., k] >= k * t * math.log(self.hard_threshold)
            smooth = torch.where(far, hard, smooth)
        return torch.where(exists, smooth, 0)

    def extra_repr(self) -> str:
        own = f"temperature={self.temperature}, margin={self.margin}, hard_threshold={self.hard_threshold}"
        return f"{super().extra_repr()}, {own}"


def _log_ratio(scores: Float[Tensor, "*rows n"], k: int, temperature: float) -> Float[Tensor, "*rows"]:
    """log(E_k / E_(k-1)) - s_k / t, E the elementary symmetric polynomials of e^(s / t), the k largest s first and in order.

    E_j is dominated by the product of its j largest factors. F_j = E_j / that product is a sum over the last member of a
    subset, ``F_j(first i) = sum_(l <= i) e^((s_l - s_j) / t) F_(j-1)(first l - 1)``, and at least F_(j-1) / j: shares of the
    total, which would be beyond floats, are not too small where they matter.
    """
    shares = torch.ones_like(scores)
    for j in range(k):
        sums = (((scores[..., j:] - scores[..., j : j + 1]) / temperature).exp() * shares).cumsum(-1)
        shares = (sums / sums[..., -1:])[..., :-1]
    return sums[..., -1].log()


class TopKHingeLoss(FixedKLoss):
    """The top-k hinge losses of multiclass support vector machines.

    With b the values ``s_j - s_y + margin`` of the other classes j and 0 for the target y, in descending order,

        alpha   max(0, (b_(1) + … + b_(k)) / k)
        beta    (max(0, b_(1)) + … + max(0, b_(k))) / k

    Args:
        k: the k of top-k.
        variant: ``"alpha"`` or ``"beta"``.
        margin: by how much the target must be ahead.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Shape:
        As of ``torch.nn.CrossEntropyLoss``. Of class probabilities the 8 largest of a row count.

    Example:
        >>> anyk.TopKHingeLoss(k=2)(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]))
        tensor(2.5000)

    Reference: Lapin et al., "Top-k Multiclass SVM", NeurIPS 2015 (alpha); "Loss Functions for Top-k Error", CVPR 2016 (beta).
    """

    def __init__(self, k: int, variant: Variant = "alpha", *, margin: float = 1.0, **options: Unpack[Keywords]) -> None:
        super().__init__(k, **options)
        checks.one_of("variant", variant, get_args(Variant))
        self.variant, self.margin = variant, checks.at_least("margin", margin, 0)

    def _losses(self, scores: Tensor, target: Tensor, best: Tensor) -> Tensor:
        leads = scores.gather(-1, best[..., : self.k]) - candidates.at(scores, target)[..., None]
        largest = functional.pad(leads + self.margin, (1, 0)).topk(self.k, dim=-1).values
        return largest.mean(-1).clamp(min=0) if self.variant == "alpha" else largest.clamp(min=0).mean(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, variant={self.variant!r}, margin={self.margin}"


class TruncatedTopKEntropyLoss(FixedKLoss):
    """Softmax cross-entropy without the k - 1 classes furthest ahead of the target.

    With ``a_(1) >= a_(2) >= …`` the differences ``s_j - s_y`` of the other classes, in descending order,

        L = log(1 + exp(a_(k)) + exp(a_(k+1)) + …)

    Args:
        k: the k of top-k; 1 is softmax cross-entropy.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Shape:
        As of ``torch.nn.CrossEntropyLoss``. Of class probabilities the 8 largest of a row count.

    Example:
        >>> anyk.TruncatedTopKEntropyLoss(k=2)(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([0]))
        tensor(0.6931)

    Reference: Lapin et al., "Loss Functions for Top-k Error: Analysis and Insights", CVPR 2016.
    """

    def _losses(self, scores: Tensor, target: Tensor, best: Tensor) -> Tensor:
        kept = scores.scatter(-1, best[..., : self.k - 1], -torch.inf)
        return -candidates.at(kept.log_softmax(-1), target)


class SoftmaxAtKLoss(FixedKLoss):
    """SL@K: softmax cross-entropy, weighted by how far the target's score is above the k-th largest.

    With s_[k] the k-th largest score of the row, the target's included, and t the temperature,

        L = w log sum_j exp(s_j - s_y),   w = sigmoid((s_y - s_[k]) / t)

    As published, the threshold s_[k] is a constant for the gradient and the weight w is not: a target whose (1 - w) times its
    cross-entropy is more than t (1 - softmax_y) is pushed *down*. With n equal scores that is every target, unless t is above
    about log(n) / 2: from scratch, training with a smaller t collapses. ``detach_weight=True``, as in SogSL@K by the same
    authors, makes w a constant, too. The mean is not divided by the weights w; for large t the loss tends to half of
    cross-entropy.

    Args:
        k: the k of top-k.
        temperature: t > 0, in units of the scores. The paper has two, for the weight and for the softmax; this is their
            quotient, which its code tries from 1 to 300.
        detach_weight: whether the weight w is a constant for the gradient.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Shape:
        As of ``torch.nn.CrossEntropyLoss``. Of class probabilities the 8 largest of a row count.

    Example:
        >>> anyk.SoftmaxAtKLoss(k=2)(torch.zeros(1, 10), torch.tensor([0]))  # log(10) / 2
        tensor(1.1513)

    Reference: Yang et al., "Breaking the Top-K Barrier: Advancing Top-K Ranking Metrics Optimization in Recommender Systems",
    KDD 2025.
    """

    def __init__(self, k: int, temperature: float = 1.0, *, detach_weight: bool = False, **options: Unpack[Keywords]) -> None:
        super().__init__(k, **options)
        self.temperature = checks.positive("temperature", temperature)
        self.detach_weight = checks.flag("detach_weight", detach_weight)

    def _losses(self, scores: Tensor, target: Tensor, best: Tensor) -> Tensor:
        own = candidates.at(scores, target)
        # The k-th of all is among the target and the first k of the others.
        first = torch.cat([scores.gather(-1, best[..., : self.k]), own[..., None]], -1)
        threshold = first.detach().topk(self.k, dim=-1).values[..., -1]
        counts = ((own - threshold) / self.temperature).sigmoid()
        return (counts.detach() if self.detach_weight else counts) * -candidates.at(scores.log_softmax(-1), target)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, temperature={self.temperature}"
