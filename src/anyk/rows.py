"""Scores and targets as rows: what a loss may depend on, and how the losses of the rows become one loss.

A loss takes three steps around what it measures, a :class:`Measure`:

    batch = Batch.of(scores, target, conventions)   checked, as rows of classes
    rows = batch.rows(measure, m, k)                candidates, target, softmax cross-entropy
    rows.reduce(losses)                             losses of the rows -> one loss

Whoever does not have the scores of all classes (the head, the sharded loss) makes the :class:`Rows` from the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from anyk import autograd, candidates, checks
from anyk.candidates import real_mask
from anyk.checks import working_dtype
from anyk.conventions import ClassIndices, Conventions, Counted, Scores, Shape


class Measure:
    """What is measured of a row, as far as this module needs to know; unless a loss says otherwise, as it is here."""

    @property
    def sorts(self) -> bool:
        """Whether the candidates shall come in descending order even if all are kept."""
        return False

    @property
    def uses_softmax(self) -> bool:
        """Whether it uses the softmax cross-entropy over all classes."""
        return False

    @property
    def uses_operator(self) -> bool:
        """Whether it asks for more than the softmax of the target."""
        return True

    def added_smoothing(self, label_smoothing: float) -> float:
        """Where label smoothing is the cross-entropy's alone: the weight of its mean over all classes, which is added to the
        loss; 0 where the labels are smoothed themselves."""
        return 0.0

    def outside(self, cross_entropy: Tensor, label_smoothing: float) -> Tensor:
        """What a target outside the candidates costs, from its softmax cross-entropy over all classes."""
        return cross_entropy


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Scores and targets, checked."""

    scores: Scores
    target: ClassIndices | Scores
    conventions: Conventions
    shape: Shape
    class_weight: Float[Tensor, " n"] | None

    @classmethod
    def of(cls, scores: Tensor, target: Tensor, conventions: Conventions) -> Batch:
        shape = Shape.of(scores)
        target = checks.tensor("target", target)
        class_weight = conventions.class_weights(shape.classes, scores)
        if target.dtype.is_floating_point:
            _check_probabilities(target, scores, conventions.ignore_index)
        else:
            target = checks.class_indices(target, shape.batch, shape.classes, conventions.ignore_index)
        return cls(scores, target, conventions, shape, class_weight)

    def shares_with_padding(self) -> bool:
        """Whether every class has a share in the target and some may be padding, for which torch's own has 0 times infinity."""
        shared = self.target.dtype.is_floating_point or self.conventions.label_smoothing > 0
        return shared and real_mask(self.scores) is not None

    def cross_entropy(self) -> Tensor:
        """The loss that is nothing but softmax cross-entropy: torch's own."""
        dtype = working_dtype(self.scores)
        return functional.cross_entropy(
            self.scores.to(dtype),
            self.target.to(dtype) if self.target.dtype.is_floating_point else self.target,
            weight=self.class_weight,
            reduction=self.conventions.reduction,
            ignore_index=self.conventions.ignore_index,
            label_smoothing=self.conventions.label_smoothing,
        )

    def rows(self, measure: Measure, m: int | None, k: int) -> Rows:
        """The m candidates of each row, the target among them, and what else the measure uses.

        Args:
            measure: what is measured.
            m: number of candidates; None means all.
            k: number of classes that every row must have beside padding.
        """
        scores, dtype = self.shape.rows(self.scores), working_dtype(self.scores)
        amount = self.conventions.label_smoothing
        smoothing = measure.added_smoothing(amount)
        if smoothing:
            amount = 0.0  # of the targets
        if self.target.dtype.is_floating_point:
            probabilities = self.shape.rows(self.target).to(dtype)
            if amount:
                probabilities = probabilities * (1 - amount) + amount * _uniform(scores)
            counted = Counted(None, None, self.shape.batch, self.conventions)
            return self._expected(scores, probabilities, counted, measure, m, k)
        target, counted = self.conventions.count(self.target, self.class_weight, self.scores)
        scores = counted.only(scores)
        if amount:
            one_hot = (target[:, None] == torch.arange(self.shape.classes, device=target.device)).to(dtype)
            probabilities = one_hot * (1 - amount) + amount * _uniform(scores)
            return self._expected(scores, probabilities, counted, measure, m, k)
        classes, position = candidates.choose(scores, target, m if measure.uses_operator else 1, sort=measure.sorts)
        if measure.uses_softmax:
            # A single candidate is the target, which leaves out the best class: the logarithm cannot come from there.
            by_hand = checks.eager(scores) and classes.shape[-1] > 1
            gather = _ScoresAndCrossEntropy.apply if by_hand else _scores_and_cross_entropy
            kept, cross_entropy = gather(scores, classes, target)
        else:
            whole = m is None and not measure.sorts  # all classes as they come
            kept, cross_entropy = scores if whole else scores.gather(-1, classes), None
        added = self._smoothing(scores, smoothing) if smoothing else None
        return Rows.of(kept, position, target, cross_entropy, counted, k, added)

    def _expected(
        self,
        scores: Float[Tensor, "rows n"],
        probabilities: Float[Tensor, "rows n"],
        counted: Counted,
        measure: Measure,
        m: int | None,
        k: int,
    ) -> Rows:
        """sum_c q_c w_c L(s, c): the candidates each in turn as the target, the rest at what the measure says."""
        kept, classes = candidates.select_for_probabilities(scores, probabilities, m, sort=measure.sorts)
        if self.class_weight is not None:
            probabilities = probabilities * self.class_weight
        log_softmax = scores.to(working_dtype(scores)).log_softmax(-1)
        cross_entropy = -log_softmax.gather(-1, classes) if measure.uses_softmax else None
        added = None
        if kept.shape[-1] < scores.shape[-1]:
            outside = probabilities.scatter(-1, classes, 0)
            _check_targets_are_real((outside != 0) & (scores.detach() == -torch.inf))
            cost = measure.outside(torch.where(outside != 0, -log_softmax, 0), self.conventions.label_smoothing)
            added = (outside * cost).sum(-1)
        if weight := measure.added_smoothing(self.conventions.label_smoothing):
            smoothing = self._smoothing(scores, weight)
            added = smoothing if added is None else added + smoothing
        return Rows.of_shares(kept, classes, probabilities.gather(-1, classes), cross_entropy, counted, k, added)

    def _smoothing(self, scores: Float[Tensor, "rows n"], amount: float) -> Float[Tensor, " rows"]:
        """The mean cross-entropy over the classes that are not padding, each with its weight, as much of it as is wanted."""
        log_softmax = scores.to(working_dtype(scores)).log_softmax(-1)
        if self.class_weight is None and real_mask(scores) is None:
            return -amount * log_softmax.mean(-1)
        share = _uniform(scores) if self.class_weight is None else _uniform(scores) * self.class_weight
        return -amount * (share * torch.where(share != 0, log_softmax, 0)).sum(-1)


class Rows(NamedTuple):
    """What the loss of an example may depend on, and how the losses of the rows become the loss.

    The leading shape is (rows,); or (rows, m) where each candidate in turn is the target, with its share.
    """

    scores: Float[Tensor, "*rows m"]
    """the candidates' scores"""
    position: Int[Tensor, "*rows"]
    """where among them the target stands"""
    real: Bool[Tensor, "*rows m"] | None
    """which are not padding; None means all"""
    target: Int[Tensor, "*rows"]
    """the target class"""
    cross_entropy: Float[Tensor, "*rows"] | None
    """softmax cross-entropy over all classes, if asked for"""
    padded: Bool[Tensor, "*rows"] | None
    """where the target itself is padding; None means nowhere"""
    counted: Counted
    shares: Float[Tensor, "rows m"] | None
    """of the candidates as targets, with their weights"""
    added: Float[Tensor, " rows"] | None
    """what comes on top: the targets outside the candidates, smoothing"""

    @property
    def label_smoothing(self) -> float:
        return self.counted.conventions.label_smoothing

    @classmethod
    def of(
        cls,
        scores: Float[Tensor, "rows m"],
        position: Int[Tensor, " rows"],
        target: Int[Tensor, " rows"],
        cross_entropy: Float[Tensor, " rows"] | None,
        counted: Counted,
        k: int,
        added: Float[Tensor, " rows"] | None = None,
    ) -> Rows:
        """Rows with one target each."""
        real, padded = real_mask(scores), None
        checks.real_classes(real, k, counted.valid)
        if real is not None:
            padded = ~candidates.at(real, position)
            _check_targets_are_real(padded if counted.valid is None else padded & counted.valid)
            position = torch.where(padded, 0, position)
        return cls(scores, position, real, target, cross_entropy, padded, counted, None, added)

    @classmethod
    def of_shares(
        cls,
        scores: Float[Tensor, "rows m"],
        classes: Int[Tensor, "rows m"],
        shares: Float[Tensor, "rows m"],
        cross_entropy: Float[Tensor, "rows m"] | None,
        counted: Counted,
        k: int,
        added: Float[Tensor, " rows"] | None = None,
    ) -> Rows:
        """Rows in which every candidate is a target with a share."""
        m = scores.shape[-1]
        position = torch.arange(m, device=scores.device).expand_as(classes)
        real, padded, each_real = real_mask(scores), None, None
        checks.real_classes(real, k, counted.valid)
        if real is not None:
            padded = ~real
            _check_targets_are_real(padded & (shares != 0))
            position = candidates.instead_of_padding(position, real)
            cross_entropy = None if cross_entropy is None else cross_entropy.gather(-1, position)
            each_real = real[:, None, :].expand(-1, m, -1)
        each = scores[:, None, :].expand(-1, m, -1)
        return cls(each, position, each_real, classes, cross_entropy, padded, counted, shares, added)

    def candidate_cross_entropy(self) -> Float[Tensor, "*rows"]:
        """Softmax cross-entropy over the candidates alone."""
        scores = self.scores.to(working_dtype(self.scores))
        if self.shares is not None:  # every candidate is a target, of the same scores
            return -scores[:, 0].log_softmax(-1).gather(-1, self.position)
        return -candidates.at(scores.log_softmax(-1), self.position)

    def total(self, losses: Float[Tensor, "*rows"]) -> Float[Tensor, " rows"]:
        """The loss of each row, with its weight: infinite for padding as cross-entropy has it, zero where it does not count."""
        valid, weights, *_ = self.counted
        if self.padded is not None:
            losses = torch.where(self.padded, torch.inf, losses)
        if self.shares is not None:
            losses = torch.where(self.shares != 0, self.shares * torch.where(self.shares != 0, losses, 0), 0).sum(-1)
        elif valid is not None:
            losses = torch.where(valid, losses, 0)
        if self.shares is None and weights is not None:
            losses = weights * losses
        if self.added is not None:
            losses = losses + self.added
        if valid is not None and (self.shares is not None or self.added is not None):
            losses = torch.where(valid, losses, 0)
        return losses

    def reduce(self, losses: Float[Tensor, "*rows"]) -> Tensor:
        """The loss, from the losses of all targets."""
        return self.counted.reduce(self.total(losses))


def smoothed_rows(
    scores: Float[Tensor, "rows m"],
    classes: Int[Tensor, "rows m"],
    position: Int[Tensor, " rows"],
    target: Int[Tensor, " rows"],
    counted: Counted,
    cross_entropy: Float[Tensor, "rows m"],
    uniform: Float[Tensor, "rows m"],
    mean: Float[Tensor, " rows"],
    measure: Measure,
    k: int,
    class_weight: Float[Tensor, " n"] | None,
) -> Rows:
    """Label smoothing for whoever has the candidates and sums over all classes, but not the scores of all of them.

    Args:
        scores, classes, position: of the candidates, and the target's place among them.
        target: class indices.
        counted: which rows count.
        cross_entropy: that of each candidate, over all classes.
        uniform: share of each candidate in the uniform distribution, times its weight.
        mean: the sum over all classes of such shares times their cross-entropies.
        measure: what is measured.
        k: number of classes that every row must have beside padding.
        class_weight: of all classes.
    """
    amount = counted.conventions.label_smoothing
    if weight := measure.added_smoothing(amount):
        own = candidates.at(cross_entropy, position) if measure.uses_softmax else None
        return Rows.of(scores, position, target, own, counted, k, weight * mean)
    own = torch.zeros_like(uniform).scatter(-1, position[:, None], 1 - amount)
    if class_weight is not None:
        own = own * class_weight[classes]
    inside = (uniform * torch.where(uniform != 0, cross_entropy, 0)).sum(-1)
    each = cross_entropy if measure.uses_softmax else None
    shares, outside = own + amount * uniform, amount * (mean - inside)
    return Rows.of_shares(scores, classes, shares, each, counted, k, outside)


def _scores_and_cross_entropy(rows: Tensor, classes: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates' scores and the softmax cross-entropy over all classes."""
    log_softmax = rows.to(working_dtype(rows)).log_softmax(-1)
    return rows.gather(-1, classes), -candidates.at(log_softmax, target)


class _ScoresAndCrossEntropy(torch.autograd.Function):
    """:func:`_scores_and_cross_entropy` with one (rows, n) gradient for both results instead of two that are added up.

    The gradient takes one pass over the softmax. The logarithm comes from the best class, which is among the candidates and
    has a softmax of at least 1/n: log softmax_y = s_y - s_best + log softmax_best.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = rows.gather(-1, classes)
        softmax = rows.to(working_dtype(rows)).softmax(-1)
        behind = scores.amax(-1).to(softmax.dtype) - candidates.at(rows, target)
        ctx.save_for_backward(rows, classes, target, softmax)
        return scores, behind - softmax.gather(-1, classes).amax(-1).log()

    @staticmethod
    def backward(ctx: Any, of_scores: Tensor, of_cross_entropy: Tensor) -> tuple[Tensor | None, None, None]:
        rows, classes, target, softmax = ctx.saved_tensors
        plain = autograd.plain_gradients(
            lambda rows: _scores_and_cross_entropy(rows, classes, target), [rows], [of_scores, of_cross_entropy]
        )
        if plain is not None:
            return plain[0], None, None
        gradient = softmax * of_cross_entropy[:, None]
        gradient.scatter_add_(-1, target[:, None], -of_cross_entropy[:, None])
        gradient.scatter_add_(-1, classes, of_scores.to(gradient.dtype))
        return gradient.to(rows.dtype), None, None


def _uniform(rows: Tensor) -> Tensor:
    """The uniform distribution over the classes of each row that are not padding."""
    real = rows.detach() != -torch.inf
    return real.to(working_dtype(rows)) / real.sum(-1, keepdim=True)


def _check_targets_are_real(padded: Tensor) -> None:
    if checks.readable(padded) and bool(padded.any()):
        raise ValueError("target: expected classes that are not padding, got one whose score is -inf")


def _check_probabilities(target: Tensor, scores: Tensor, ignore_index: int) -> None:
    if target.shape != scores.shape:
        raise ValueError(
            f"target: expected class indices of an integer dtype, or class probabilities of the shape of scores "
            f"{tuple(scores.shape)}, got dtype {target.dtype} and shape {tuple(target.shape)}"
        )
    if ignore_index >= 0:
        raise ValueError("ignore_index: expected class indices as targets if it is 0 or more, got class probabilities")
    if checks.readable(target) and bool((target < 0).any()):
        raise ValueError(f"target: expected class probabilities of at least 0, got {target.min().item():.6g}")
