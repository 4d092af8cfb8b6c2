"""Competing losses for one fixed k, with the same call as ``torch.nn.CrossEntropyLoss``.

In the formulae, a_j = s_j - s_y is how far another class is ahead of the target, and a_(1) >= a_(2) >= … are these in order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.nn import functional

from anyk import candidates, checks, kernels
from anyk.checks import working_dtype
from anyk.conventions import Conventions, CrossEntropyModule, Keywords
from anyk.docstrings import documented
from anyk.operators.ksubset import log_polynomial_ratios
from anyk.registry import LOSSES, register
from anyk.rows import Batch, Measure, Rows

__all__ = ["SmoothTopKLoss", "SoftmaxAtKLoss", "TopKHingeLoss", "TruncatedTopKEntropyLoss"]

Variant = Literal["alpha", "beta"]


class FixedKLoss(CrossEntropyModule, Measure, ABC):
    """A loss of the others' leads for one k; everything else is shared with CrossEntropyLoss.

    ``class Mine(FixedKLoss, name="mine")`` makes it known to the lab as ``--loss mine``.
    """

    def __init_subclass__(cls, name: str | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if name is not None:
            register(LOSSES, name, cls)

    def __init__(self, k: int, **keywords: Unpack[Keywords]) -> None:
        super().__init__(Conventions(**keywords))
        self.k = checks.at_least_one("k", k)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and "_looked" not in self.__dict__:
            self.__dict__["_looked"] = True  # not by nn.Module, which takes longer
            self._look_at(scores)
        loss = self._by_kernel(scores, target)
        return self._plain(scores, target) if loss is None else loss

    def _by_kernel(self, scores: Tensor, target: Tensor) -> Tensor | None:
        """The loss by a kernel, if there is one for it."""
        return None

    def _plain(self, scores: Tensor, target: Tensor) -> Tensor:
        batch = Batch.of(scores, target, self.conventions)
        checks.count("k", self.k, 1, batch.shape.classes, "the number of classes")
        rows = batch.rows(self, None, self.k)
        return rows.reduce(self._example_losses(rows))

    def _example_losses(self, rows: Rows) -> Tensor:
        scores = rows.scores.to(working_dtype(rows.scores))
        # Sorting all classes would cost more than all the rest: of those behind the first k others, the order is no matter.
        classes, place = candidates.choose(scores, rows.position, min(self.k + 2, scores.shape[-1]))
        return self._loss(scores, rows.position, candidates.others(classes, place))

    @abstractmethod
    def _loss(self, scores: Tensor, position: Tensor, best: Tensor) -> Tensor:
        """The loss of each row.

        Args:
            scores: (..., n), padding is -inf.
            position: (...), where the target stands.
            best: (..., k + 1), or n - 1 if there are no more, where the best of the others stand, in descending order.
        """

    def extra_repr(self) -> str:
        return f"k={self.k}, {super().extra_repr()}"


@documented
class SmoothTopKLoss(FixedKLoss, name="smooth"):
    """The smooth top-k SVM loss.

    With Y the k-subsets of the classes, Y_y those that contain the target, and t the temperature,

        L = t log sum_{S in Y} exp((margin [y not in S] + sum_{j in S} s_j / k) / t)
          - t log sum_{S in Y_y} exp(sum_{j in S} s_j / (k t)).

    Where the k-th largest score is far ahead of the (k+1)-th, the published loss switches to its limit for t -> 0,
    ``max(0, margin + (s_(k) - s_y) / k)`` with ``s_(k)`` the k-th largest score of the other classes: when the gap is at least
    ``k t log(hard_threshold)``.

    Args:
        k: the k of top-k.
        temperature: t > 0.
        margin: by how much the mean score of the best k-subset with the target must exceed that of any without it.
        hard_threshold: where to switch; None never switches, which is safe: the smooth form is stable everywhere.
        {reduction_ignore_index_weight}
        {label_smoothing}

    Example:
        >>> criterion = anyk.SmoothTopKLoss(k=5)
        >>> criterion(torch.zeros(1, 10), torch.tensor([0]))
        tensor(1.3133)

    {shape}

    Reference: Berrada et al., "Smooth Loss Functions for Deep Top-k Classification", ICLR 2018.
    """

    def __init__(
        self,
        k: int,
        temperature: float = 1.0,
        *,
        margin: float = 1.0,
        hard_threshold: float | None = 1e3,
        **keywords: Unpack[Keywords],
    ) -> None:
        super().__init__(k, **keywords)
        self.temperature = checks.positive("temperature", temperature)
        self.margin = checks.at_least("margin", margin, 0)
        self.hard_threshold = None if hard_threshold is None else checks.at_least("hard_threshold", hard_threshold, 1)

    def _by_kernel(self, scores: Tensor, target: Tensor) -> Tensor | None:
        conventions = self.conventions
        if not kernels.uses_native(scores) or not isinstance(target, Tensor) or conventions.label_smoothing:
            return None
        rows = kernels.as_rows(scores, target)
        if rows is None:
            return None
        numbers = (self.temperature, self.margin, self.hard_threshold or 1.0)  # that may have been assigned
        if type(self.k) is not int or self.k < 1 or not all(type(number) in (int, float) for number in numbers):
            return None
        if not 1e-25 < self.temperature < 1e25:
            return None
        prepared = kernels.prepare_smooth(scores.shape[1], self.k, self.temperature, self.margin, self.hard_threshold)
        if isinstance(prepared, str):
            return None
        loss = kernels.loss(prepared, None, *rows, conventions, lambda scores, target, _: self._plain(scores, target))
        return loss.reshape(target.shape) if scores.ndim > 2 and loss is not None and loss.ndim else loss

    def _loss(self, scores: Tensor, position: Tensor, best: Tensor) -> Tensor:
        t, k = self.temperature, self.k
        target = candidates.at(scores, position)
        if best.shape[-1] < k:
            return 0 * target  # the target is among the first k of k classes
        ahead = scores.gather(-1, best)
        # With fewer than k others, padding is among the first k: no subset leaves the target out.
        exists = ahead[..., k - 1 : k].detach() != -torch.inf
        first = torch.where(exists, ahead[..., :k], 0)
        last = first[..., -1:].detach()  # where floats are to be dense; what is added here is taken off there
        rest = scores.scatter(-1, torch.cat([best[..., :k], position[..., None]], -1), -torch.inf)
        others = torch.cat([first - last, rest - last], -1)
        real = others.detach() != -torch.inf
        # Of the subsets of k and of k - 1 others: only the k largest need to come in order.
        ratio = log_polynomial_ratios(others.masked_fill(~real, 0) / (k * t), real, k)[..., -1]
        smooth = t * functional.softplus((self.margin + (last.squeeze(-1) - target) / k) / t + ratio)
        exists = exists.squeeze(-1)
        smooth = torch.where(exists, smooth, 0)
        if self.hard_threshold is None:
            return smooth
        hard = (self.margin + (first[..., -1] - target) / k).clamp(min=0)
        # The k-th and the (k+1)-th of all scores, the target among them.
        everyone = torch.cat([ahead, target[..., None]], -1).detach().topk(k + 1, dim=-1).values
        far = everyone[..., k - 1] - everyone[..., k] >= k * t * math.log(self.hard_threshold)
        return torch.where(far & exists, hard, smooth)

    def extra_repr(self) -> str:
        own = f"temperature={self.temperature}, margin={self.margin}, hard_threshold={self.hard_threshold}"
        return f"{super().extra_repr()}, {own}"


@documented
class TopKHingeLoss(FixedKLoss, name="hinge"):
    """The top-k hinge losses of multiclass support vector machines.

    With b the values ``s_j - s_y + margin`` of the other classes j and 0 for the target y, in descending order,

        alpha   max(0, (b_(1) + … + b_(k)) / k)
        beta    (max(0, b_(1)) + … + max(0, b_(k))) / k

    Args:
        k: the k of top-k.
        variant: ``"alpha"`` or ``"beta"``.
        margin: by how much the target must be ahead.
        {reduction_ignore_index_weight}
        {label_smoothing}

    Example:
        >>> anyk.TopKHingeLoss(k=2)(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]))
        tensor(2.5000)

    {shape}

    Reference: Lapin et al., "Top-k Multiclass SVM", NeurIPS 2015 (alpha); "Loss Functions for Top-k Error", CVPR 2016 (beta).
    """

    def __init__(self, k: int, variant: Variant = "alpha", *, margin: float = 1.0, **keywords: Unpack[Keywords]) -> None:
        super().__init__(k, **keywords)
        checks.one_of("variant", variant, get_args(Variant))
        self.variant = variant
        self.margin = checks.at_least("margin", margin, 0)

    def _loss(self, scores: Tensor, position: Tensor, best: Tensor) -> Tensor:
        leads = scores.gather(-1, best[..., : self.k]) - candidates.at(scores, position)[..., None]
        largest = functional.pad(leads + self.margin, (1, 0)).topk(self.k, dim=-1).values
        if self.variant == "alpha":
            return largest.mean(-1).clamp(min=0)
        return largest.clamp(min=0).mean(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, variant={self.variant!r}, margin={self.margin}"


@documented
class TruncatedTopKEntropyLoss(FixedKLoss, name="truncated"):
    """Softmax cross-entropy without the k - 1 classes furthest ahead of the target.

    With ``a_(1) >= a_(2) >= …`` the differences ``s_j - s_y`` of the other classes, in descending order,

        L = log(1 + exp(a_(k)) + exp(a_(k+1)) + …)

    Args:
        k: the k of top-k; 1 is softmax cross-entropy.
        {reduction_ignore_index_weight}
        {label_smoothing}

    Example:
        >>> anyk.TruncatedTopKEntropyLoss(k=2)(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([0]))
        tensor(0.6931)

    {shape}

    Reference: Lapin et al., "Loss Functions for Top-k Error: Analysis and Insights", CVPR 2016.
    """

    def _loss(self, scores: Tensor, position: Tensor, best: Tensor) -> Tensor:
        kept = scores.scatter(-1, best[..., : self.k - 1], -torch.inf)
        return -candidates.at(kept.log_softmax(-1), position)


@documented
class SoftmaxAtKLoss(FixedKLoss, name="softmax_at_k"):
    """SL@K: softmax cross-entropy, weighted by how far the target's score is above the k-th largest.

    With s_[k] the k-th largest score of the row, the target's included, and t the temperature,

        L = sigmoid((s_y - s_[k]) / t) log sum_j exp(s_j - s_y)

    As published, s_[k] has no gradient, s_y has one in the weight w as well, and the mean is not divided by the weights w.
    So the loss of a target far behind goes to 0, and where (1 - w) times its cross-entropy is more than t (1 - softmax_y) it is
    pushed down: hopeless examples are given up. With n equal scores that is every target, unless t is above log(n) / 2, or
    slightly more: with a smaller t, start from a trained model. For large t the loss tends to half of cross-entropy.

    Args:
        k: the k of top-k.
        temperature: t > 0, in units of the scores. The paper has two, for the weight and for the softmax; this is their
            quotient, which its code tries from 1 to 300.
        {reduction_ignore_index_weight}
        {label_smoothing}

    Example:
        >>> anyk.SoftmaxAtKLoss(k=2)(torch.zeros(1, 10), torch.tensor([0]))  # log(10) / 2
        tensor(1.1513)

    {shape}

    Reference: Yang et al., "Breaking the Top-K Barrier: Advancing Top-K Ranking Metrics Optimization in Recommender Systems",
    KDD 2025.
    """

    def __init__(self, k: int, temperature: float = 1.0, **keywords: Unpack[Keywords]) -> None:
        super().__init__(k, **keywords)
        self.temperature = checks.positive("temperature", temperature)

    def _loss(self, scores: Tensor, position: Tensor, best: Tensor) -> Tensor:
        target = candidates.at(scores, position)
        # The k-th of all scores is among the target's and the first k of the others.
        first = torch.cat([scores.gather(-1, best[..., : self.k]), target[..., None]], -1)
        threshold = first.detach().topk(self.k, dim=-1).values[..., -1]
        counts = ((target - threshold) / self.temperature).sigmoid()
        # Padding as a target has no loss here: 0 times infinity would reach the gradient.
        cross_entropy = torch.where(target.detach() == -torch.inf, 0, -candidates.at(scores.log_softmax(-1), position))
        return counts * cross_entropy

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, temperature={self.temperature}"
