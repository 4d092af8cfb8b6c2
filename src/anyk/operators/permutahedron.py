"""Permutahedron: ranks, sort and mask as Euclidean projections, which have true zeros and ones."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from anyk import checks
from anyk.operators import ordering, threshold
from anyk.operators.base import Mask, Ranks, Sort
from anyk.operators.ordering import places
from anyk.operators.threshold import FAR, LAWS, Law, over


class Permutahedron(Mask, Ranks, Sort, name="permutahedron"):
    """Sparse projections. The sort is torchsort's, with l2 and regularization strength t: exact where gaps are *small*.

    The mask is the projection of s / t onto {0 <= m <= 1, sum m = k}: ``m_c = clip(s_c / t - tau, 0, 1)``. It is *sparse*:
    entries well below are 0 and entries well above are 1, exactly, and have no gradient. The ranks are the projection of -s / t
    onto the hull of all permutations of (1, …, n): exact if all scores are at least t apart. The sort is the projection of
    (n, …, 1) / t onto the hull of all permutations of s: it stays in the range of the scores, keeps their sum, and is exact if
    no two neighbours are more than 1 / t apart (that of :class:`anyk.LapSum`: if all are many t apart). The ranks are
    torchsort's as well.

    Cost: O(n log n). It has no probability that a class has a rank, and is not an operator of the losses.

    Args:
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element
            or, for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``);
            an ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.

    Example:
        >>> anyk.Permutahedron(2.0).mask(torch.tensor([1.0, 3.0, 2.0, -5.0]), k=2)
        tensor([0.2500, 1.0000, 0.7500, 0.0000])

    Reference: Blondel et al., "Fast Differentiable Sorting and Ranking", ICML 2020.
    """

    real_k = True

    def compute_mask(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch n"]:
        return threshold.mask(scores, k, checks.temperature_for(self.temperature, scores), "permutahedron")

    def compute_ranks(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return ordering.ranks("permutahedron", sparse_ranks, scores, checks.temperature_for(self.temperature, scores))

    def compute_sort(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return ordering.sort("permutahedron", sparse_sort, scores, checks.temperature_for(self.temperature, scores))


# ---- the mask ------------------------------------------------------------------------------------------------------------


def _tau(x: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch 1"]:
    """tau with ``sum_c clip(x_c - tau, 0, 1) = k``, between -1 and 0, as x is relative to the k-th score.

    The sums are of differences to a mask of zeros and ones, so that they are as exact where k is large.
    """
    above = (x > 0).to(x.dtype)
    excess = above.sum(-1, keepdim=True) - k
    at_zero = excess + (x.clamp(0, 1) - above).sum(-1, keepdim=True)
    tau = _root(torch.cat([x, x - 1], -1).clamp(-1, 0), at_zero, 0).clamp(-1, 0)
    # once more, to the last bit: at the end of a gap the mask is zeros and ones
    relative = x - tau
    mask = relative.clamp(0, 1)
    between = (mask == relative).sum(-1, keepdim=True).clamp(min=1)
    return (tau + (excess + (mask - above).sum(-1, keepdim=True)) / between).clamp(-1, 0)


def _root(points: Float[Tensor, "*batch n"], value: Float[Tensor, "*batch 1"], slope: int) -> Float[Tensor, "*batch 1"]:
    """Where a function is 0 that falls in straight pieces.

    Args:
        points: where, seen from the right, it becomes steeper by 1 (the first half), and flatter by 1 (the others).
        value: at the largest of them, 0 or less.
        slope: minus the slope to the right of them.
    """
    n = points.shape[-1]
    points, order = points.sort(-1, descending=True)
    steeper = (order < n // 2).cumsum(-1)
    slopes = 2 * steeper + torch.arange(slope - 1, slope - 1 - n, -1, device=points.device)
    rises = slopes[..., :-1] * (points[..., :-1] - points[..., 1:])
    values = torch.cat([value, rises], -1).cumsum(-1)
    last = ((values < 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return points.gather(-1, last) + values.gather(-1, last) / slopes.gather(-1, last).clamp(min=1)


def _log_density(x: Tensor) -> Tensor:
    return torch.zeros_like(x).masked_fill((x <= 0) | (x >= 1), -FAR)


LAWS["permutahedron"] = Law(lambda x: x.clamp(0, 1), _log_density, 1.0, find=_tau)


# ---- ranks and sort ------------------------------------------------------------------------------------------------------


def sparse_ranks(ordered: Float[Tensor, "*batch n"], temperature: float | Tensor) -> Float[Tensor, "*batch n"]:
    """The projection of z = -s / t onto the permutations of w = (1, …, n), which is z plus the mean of w - z over blocks."""
    with torch.no_grad():
        first, size = blocks(over(ordered[..., :-1] - ordered[..., 1:], temperature) - 1)
    below = over((ordered.gather(-1, first) - ordered).clamp(max=FAR), temperature)
    return first + (size + 1) / 2 + below - _mean(below, first, size)


def sparse_sort(ordered: Float[Tensor, "*batch n"], temperature: float | Tensor) -> Float[Tensor, "*batch n"]:
    """The projection of z = -(1, …, n) / t onto the permutations of w = s, which is z plus the mean of w - z over blocks."""
    with torch.no_grad():
        infinite = ordered.abs() == torch.finfo(ordered.dtype).max
        steps = 1 - (ordered[..., :-1] - ordered[..., 1:]) * temperature
        first, size = blocks(steps.masked_fill(infinite[..., :-1] | infinite[..., 1:], FAR))
    top = ordered.gather(-1, first)
    mean_place = first + (size + 1) / 2
    return top - _mean((top - ordered).clamp(max=FAR), first, size) + over(mean_place - places(ordered), temperature)


def _mean(values: Tensor, first: Tensor, size: Tensor) -> Tensor:
    """Over the block of each entry."""
    return torch.zeros_like(values).scatter_add(-1, first, values / size).gather(-1, first)


def blocks(steps: Float[Tensor, "*batch less"]) -> tuple[Int[Tensor, "*batch n"], Float[Tensor, "*batch n"]]:
    """Isotonic regression: of each value the start and the size of the block in which the nearest ascending sequence is level.

    Of two ascending sequences side by side, what is above some mean in the left one and below it in the right one is pooled,
    and has this mean: so the sequences of 2, 4, 8, … values come from those of half as many.

    Args:
        steps: from each value to the next; only these matter.
    """
    *batch, n = *steps.shape[:-1], steps.shape[-1] + 1
    size = 1 << (n - 1).bit_length()
    steps = pad(steps.clamp(-FAR, FAR), (0, size - n + 1), value=FAR)
    excess = torch.zeros_like(steps)  # of the values over the ascending sequence so far
    joined = torch.zeros_like(steps, dtype=torch.bool)  # with the next one
    width = 1
    while width < size:
        # values relative to the first one on the right: so those near have their digits, wherever the others are
        left, right = steps.view(*batch, size // (2 * width), 2, width).unbind(-2)
        values = torch.cat([-left.flip(-1).cumsum(-1).flip(-1), pad(right[..., :-1].cumsum(-1), (1, 0))], -1)
        excess, joined = (each.view(*batch, size // (2 * width), 2 * width) for each in (excess, joined))
        ascending = values - excess
        highest, lowest = ascending[..., width - 1 : width], ascending[..., width : width + 1]
        points = ascending.clamp(lowest, highest)  # if there is nothing to pool, all are the highest
        mean = _root(points, (points[..., width:] - highest).sum(-1, keepdim=True), width)
        pooled = torch.cat([points[..., :width] > mean, points[..., width:] < mean], -1)
        excess = torch.where(pooled, values - mean, excess).flatten(-2)
        joined = (joined | (pooled & pad(pooled[..., 1:], (0, 1)))).flatten(-2)
        width *= 2
    joined = joined[..., :-1] | (steps[..., :-1] + excess[..., :-1] <= excess[..., 1:])  # equal ones as well
    block = pad(~joined[..., : n - 1], (1, 0)).cumsum(-1)
    sizes = torch.zeros_like(excess[..., :n]).scatter_add(-1, block, torch.ones_like(excess[..., :n]))
    return (sizes.cumsum(-1) - sizes).long().gather(-1, block), sizes.gather(-1, block)
