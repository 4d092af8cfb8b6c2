"""Permutahedron: ranks, sort and mask as Euclidean projections, which have true zeros and ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from anyk import candidates, checks
from anyk.docstrings import documented
from anyk.kernels.loss_description import PERMUTAHEDRON
from anyk.operators.base import Operator, in_order


@documented
class Permutahedron(Operator, name="permutahedron"):
    """Euclidean projections onto the permutahedron.

    The mask is the projection of s / t onto {0 <= m <= 1, sum m = k}: ``m_c = clip(s_c / t - tau, 0, 1)``. It is *sparse*:
    entries well below are 0 and entries well above are 1, exactly, and have no gradient. The ranks are the projection of -s / t
    onto the hull of all permutations of (1, …, n): exact if all scores are at least t apart. The sort is the
    projection of (n, …, 1) / t onto the hull of all permutations of s: exact if no two neighbours are more than 1 / t apart.

    Cost: O(n log n). It has no probability that a class has a rank, and is not an operator of the losses.

    Args:
        {temperature}

    Example:
        >>> anyk.Permutahedron(2.0).mask(torch.tensor([1.0, 3.0, 2.0, -5.0]), k=2)
        tensor([0.2500, 1.0000, 0.7500, 0.0000])

    Reference: Blondel et al., "Fast Differentiable Sorting and Ranking", ICML 2020.
    """

    has_probabilities = False
    mask_code = PERMUTAHEDRON
    real_k = True

    def _matrix(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        raise TypeError("operator: Permutahedron has no probability for each rank: expected another operator")

    def _log_inclusion(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        raise TypeError("operator: Permutahedron has no probability of being among the first k: expected another operator")

    def _mask(self, scores: Tensor, real: Tensor | None, k: int | Tensor) -> Tensor:
        number = torch.full((1,), scores.shape[-1], device=scores.device) if real is None else real.sum(-1, keepdim=True)
        keys = scores.detach() if real is None else scores.detach().masked_fill(~real, -torch.inf)
        goal = torch.as_tensor(k, dtype=scores.dtype, device=scores.device)
        steps = k if isinstance(k, int) and real is None and checks.readable(scores) else None
        if steps is not None:
            best = keys.gather(-1, candidates.best(keys, steps + 1))
            reference = best[..., -2:-1]
        else:
            goal = torch.minimum(goal, number.to(scores.dtype))
            best = keys.sort(dim=-1, descending=True).values
            place = (goal.detach().ceil().long().clamp(1, scores.shape[-1]) - 1).expand(*scores.shape[:-1], 1)
            reference = best.gather(-1, place).nan_to_num(neginf=0.0)
        finite = scores if real is None else scores.masked_fill(~real, 0)
        clamp = self._overflows(self._relative(best[..., :1].detach(), reference.detach()))
        relative = self._relative(finite, reference, clamp)
        with torch.no_grad():
            if steps is not None:
                gap = _by_steps(relative.detach(), self._relative(best[..., -1:], reference), steps)
            else:
                gap = relative - _threshold(self._relative(best, reference), goal.detach())
            if real is not None:
                gap = gap.masked_fill(~real, -1)
            between = (gap > 0) & (gap < 1)
            ones = (gap >= 1).to(gap.dtype)
        # tau as a function of the entries between 0 and 1, whose sum is k less the ones; no gradient where there are none
        inside = between.sum(-1, keepdim=True).clamp(min=1)
        tau = (torch.where(between, relative, 0).sum(-1, keepdim=True) + ones.sum(-1, keepdim=True) - goal) / inside
        mask = torch.where(between, relative - tau, ones)
        return mask + 0 * best.clamp(-1, 1).sum(-1, keepdim=True)  # NaN in a row is NaN everywhere in it

    def _ranks(self, scores: Tensor, real: Tensor | None) -> Tensor:
        ordered, present, order = in_order(scores, real)
        padding = None if present is None else ~present
        if padding is not None:
            ordered = ordered.masked_fill(padding, 0)
        ahead = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype, device=scores.device).expand_as(ordered)
        # the projection of z = -s / t onto the permutations of (1, …, n) is z - isotonic(z - (1, …, n))
        with torch.no_grad():
            block, counts = _blocks(-self._close(ordered, ordered.shape[-1]) - ahead, padding)  # what is n apart is not pooled
            starts = (counts.cumsum(-1) - counts).long().clamp(max=scores.shape[-1] - 1)
            own = ordered.gather(-1, starts.gather(-1, block))
        within = self._relative(ordered, own)  # from the first of its block: blocks may be far apart
        ranks = _mean(ahead, block, counts) + _mean(within, block, counts) - within + 0 * ordered.detach()[..., :1]
        return torch.zeros_like(ranks).scatter(-1, order, ranks)

    def _sort(self, scores: Tensor, real: Tensor | None) -> Tensor:
        ordered, present, _ = in_order(scores, real)
        padding = None if present is None else ~present
        if padding is not None:
            ordered = ordered.masked_fill(padding, 0)
        n = scores.shape[-1]
        ahead = torch.arange(1, n + 1, dtype=scores.dtype, device=scores.device).expand_as(ordered)
        # the projection of z = -(1, …, n) / t onto the permutations of s is z - isotonic(z - s), descending
        steps = self._relative(ahead, torch.zeros_like(ahead))
        block, counts = _blocks(ordered.detach().double() + steps.detach(), padding)
        return _mean(ordered, block, counts) + self._relative(_mean(ahead, block, counts) - ahead, torch.zeros_like(ahead))


def _by_steps(relative: Tensor, after: Tensor, k: int) -> Tensor:
    """``s - tau`` with ``sum_c clip(s_c - tau, 0, 1) = k``, by Newton steps between two bounds; scores relative to the k-th.

    The sum falls with tau in straight pieces, so that a step that ends on the right piece is exact.
    """
    low, high = (after - 1).clamp(min=-2), torch.zeros_like(after)  # the (k + 1)-th less 1, and the k-th
    tau = torch.where(after <= -1, -1 + (after + 1).clamp(min=-1) / 2, (low + high) / 2)
    gap = relative - tau
    for _ in range(100):
        mask = gap.clamp(0, 1)
        surplus = (mask.sum(-1, keepdim=True, dtype=torch.float64) - k).to(tau.dtype)
        inside = (mask == gap).sum(-1, keepdim=True)
        low, high = torch.where(surplus > 0, tau, low), torch.where(surplus < 0, tau, high)
        step = tau + surplus / inside.clamp(min=1)
        found = torch.where((step > low) & (step < high), step, (low + high) / 2)
        # the step that would follow is less than a mask's last digits
        found = torch.where((surplus.abs() <= 1e-7 * inside) | (high - low < 1e-7), tau, found)
        if not bool((found != tau).any()):
            break
        tau = found
        gap = relative - tau
    return gap


def _threshold(ordered: Float[Tensor, "*batch n"], k: Tensor) -> Float[Tensor, "*batch 1"]:
    """tau with ``sum_c clip(s_c - tau, 0, 1) = k``, for scores in descending order, relative to the k-th.

    An entry is 1 if tau <= s_i - 1, that is if the sum at tau = s_i - 1 is at most k; it is above 0 if tau < s_i. The sum
    at these places follows from running sums. tau lies less than 1 (with gaps, 2) below the k-th score: scores further away
    are moved there, so that the running sums keep their digits.
    """
    dtype = ordered.dtype
    near, k = ordered.double().clamp(-2, 1), k.double()
    n = near.shape[-1]
    sums = torch.nn.functional.pad(near.cumsum(-1), (1, 0))
    place = torch.arange(n, device=near.device)
    ascending = near.flip(-1).contiguous()
    above = n - torch.searchsorted(ascending, (ascending - 1).contiguous(), right=True).flip(-1)  # how many are > s_i - 1
    ones = n - torch.searchsorted(ascending, (ascending + 1).contiguous()).flip(-1)  # how many are >= s_i + 1
    at_one = (place + 1) + (sums.gather(-1, above) - sums[..., 1:]) - (above - place - 1) * (near - 1)
    at_zero = ones + (sums[..., :-1] - sums.gather(-1, ones)) - (place - ones) * near
    full = (at_one <= k).sum(-1, keepdim=True)
    support = (at_zero < k).sum(-1, keepdim=True)
    between = support - full
    tau = (full + sums.gather(-1, support) - sums.gather(-1, full) - k) / between.clamp(min=1)
    # no entry is between 0 and 1: any tau in the gap does
    lowest = near.gather(-1, (full - 1).clamp(min=0)) - 1
    highest = near.gather(-1, full.clamp(max=n - 1))
    middle = torch.where(full == 0, highest + 1, torch.where(full == n, lowest - 1, (lowest + highest) / 2))
    return torch.where(between > 0, tau, middle).to(dtype)


def _blocks(values: Float[Tensor, "*batch n"], padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """The blocks in which the nearest ascending sequence is constant: the number of each entry's, and their sizes.

    Args:
        values: of double precision.
        padding: entries at the end of each row, each of which is a block of its own; None: there are none.
    """
    if padding is not None:
        values = values.masked_fill(padding, torch.inf)
    starts = _merge(values) if checks.readable(values) else None
    if starts is None:
        fitted = _pool(values)
        starts = torch.nn.functional.pad(fitted[..., 1:] != fitted[..., :-1], (1, 0), value=True)
    block = starts.long().cumsum(-1) - 1
    return block, torch.zeros_like(values).scatter_add(-1, block, torch.ones_like(values))


def _mean(values: Tensor, block: Tensor, counts: Tensor) -> Tensor:
    """The mean of each entry's block."""
    totals = torch.zeros_like(values).scatter_add(-1, block, values)
    return (totals / counts.clamp(min=1).to(totals.dtype)).gather(-1, block)


def _merge(values: Tensor, rounds: int = 50) -> Tensor | None:
    """Where the blocks of the ascending fit start: neighbouring blocks that descend are merged, all at once, until none do.

    None: that took too many rounds. NaN descends to nothing.
    """
    n = values.shape[-1]
    totals = values.reshape(-1)
    sizes, starts = torch.ones_like(totals), torch.ones_like(totals, dtype=torch.bool)
    place = torch.arange(len(totals), device=values.device)  # where the blocks start
    for _ in range(rounds):
        means = totals / sizes
        kept = torch.ones_like(means, dtype=torch.bool)
        kept[1:] = (means[1:] > means[:-1]) | (place[1:] % n == 0) | means[1:].isinf()
        if bool(kept.all()):
            starts.zero_()[place] = True
            return starts.reshape(values.shape)
        into = kept.long().cumsum(0) - 1
        number = int(into[-1]) + 1
        totals = values.new_zeros(number).index_add_(0, into, totals)
        sizes = values.new_zeros(number).index_add_(0, into, sizes)
        place = place[kept]
    return None


def _pool(values: Tensor) -> Tensor:
    """The ascending fit, from those of neighbouring blocks of 1, 2, 4, … values."""
    n = values.shape[-1]
    size = 1 << max(n - 1, 0).bit_length()
    fit = torch.nn.functional.pad(values.double(), (0, size - n), value=torch.inf)
    width = 1
    while width < size:
        left, right = fit.reshape(*fit.shape[:-1], -1, 2, width).unbind(-2)
        fit = _join(left.contiguous(), right.contiguous()).reshape(fit.shape)
        width *= 2
    return fit[..., :n].to(values.dtype)


def _join(left: Tensor, right: Tensor) -> Tensor:
    """Two ascending fits side by side, (..., blocks, width) -> the ascending fit of both, (..., blocks, 2 width).

    Of the left fit what is above some mu, and of the right fit what is below, is pooled, and has the mean mu. The sum of
    the differences to mu falls with mu: a value lies above mu where that sum, taken at the value, is negative.
    """
    width = left.shape[-1]
    reference = torch.where(right[..., :1].isfinite(), right[..., :1], 0)
    left, right = left - reference, right - reference
    # running sums from the seam outwards; infinite values are never pooled
    pad = torch.nn.functional.pad
    of_left = pad(torch.where(left.isfinite(), left, 0).flip(-1).cumsum(-1), (1, 0))
    of_right = pad(torch.where(right.isfinite(), right, 0).cumsum(-1), (1, 0))

    def surplus(mu: Tensor) -> Tensor:
        above = width - torch.searchsorted(left, mu, right=True)
        below = torch.searchsorted(right, mu)
        return of_left.gather(-1, above) + of_right.gather(-1, below) - (above + below) * mu

    joins = right[..., :1].isfinite()  # else the right is padding
    above = width - _first(lambda place: surplus(left.gather(-1, place)) < 0, left)
    below = _first(lambda place: ~(surplus(right.gather(-1, place)) > 0), right)
    above, below = above * joins, below * joins
    mean = (of_left.gather(-1, above) + of_right.gather(-1, below)) / (above + below).clamp(min=1)
    place = torch.arange(width, device=left.device)
    pooled = torch.cat([torch.where(place >= width - above, mean, left), torch.where(place < below, mean, right)], -1)
    return pooled + reference


def _first(holds: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The first place of each row (..., 1) at which a condition holds, which from there on holds; the width, if at none."""
    width = values.shape[-1]
    low = torch.zeros_like(values[..., :1], dtype=torch.long)
    high = torch.full_like(low, width)
    for _ in range(width.bit_length()):
        middle = (low + high) // 2
        here = holds(middle.clamp(max=width - 1)) | (middle >= width)
        low, high = torch.where(here, low, middle + 1), torch.where(here, middle, high)
    return high
