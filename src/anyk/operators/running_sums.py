"""LapSum by running sums: ranks, order statistics and ``P @ values`` from sums of e to the minus distance over sorted scores.

With the scores of a row in descending order, ``before_i = sum_{j < i} e^(-(s_j - s_i) / t) v_j`` and the same over j > i are
all that these and their derivatives need. No exponent is ever positive, and each is the difference of two scores over t:
nothing overflows, and each group of scores has its digits, however far apart or away from 0 the groups are. (A running product
of the factors between neighbours would add up their rounding errors; ``logcumsumexp`` rounds by the range of the scores.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import hardtanh, pad

from anyk._compat import Function
from anyk.operators.base import no_autocast
from anyk.operators.ordering import descending, is_padding, places
from anyk.operators.threshold import for_each, minus_abs, over

BLOCK = 16
"""entries that are summed pair by pair"""
FAR = 1e30
"""gaps between scores beyond are as good as infinite: over a small temperature, this is still a number"""
OUT_OF_REACH = 100.0
"""e to the minus that is nothing beside 1"""

Sums = Float[Tensor, "2 *batch n kinds"]


def decayed_sums(ordered: Float[Tensor, "*batch n"], values: Sums, temperature: float | Tensor) -> Sums:
    """``sum_{j < i} e^(-(s_j - s_i) / t) v_j`` of the first values, ``sum_{j > i} e^(-(s_i - s_j) / t) v_j`` of the second.

    The scores are finite and in descending order. Differentiable any number of times; O(n) numbers for each row and kind.
    """
    return _DecayedSums.run(ordered, values, temperature)


class _DecayedSums(Function):
    """Its derivatives are such sums again."""

    @staticmethod
    def forward(ordered: Tensor, values: Tensor, temperature: float | Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # one level, so that n makes no new graphs. The pairs are in no memory
            return _sums(ordered.expand(2, *ordered.shape), values, temperature, 2 * BLOCK, 1)
        levels = max(0, math.ceil(math.log(ordered.shape[-1] / (4 * BLOCK), BLOCK)))
        return _sums(ordered.expand(2, *ordered.shape), values, temperature, BLOCK, levels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ordered, values, temperature = inputs
        ctx.temperature = None if isinstance(temperature, Tensor) else temperature
        saved = ordered, values, temperature if ctx.temperature is None else None, output
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ordered, values, temperature, sums = ctx.saved_tensors
        t, grad_temperature = ctx.temperature if temperature is None else temperature, None
        grad_values = decayed_sums(ordered, grad.flip(0), t).flip(0)
        # e to a difference over t moves with either of its scores
        pull = (grad * sums - values * grad_values).sum(-1)
        pull = over(pull[0] - pull[1], t)
        if ctx.needs_input_grad[2]:
            grad_temperature = (pull * _distances(ordered, t)).sum(-1, keepdim=True).sum_to_size(temperature.shape)
        return pull, grad_values, grad_temperature

    @staticmethod
    def tangent(ctx: Any, ordered: Tensor | None, values: Tensor | None, temperature: Tensor | None) -> Tensor:
        own_ordered, own_values, own_temperature, sums = ctx.saved_tensors
        t = ctx.temperature if own_temperature is None else own_temperature
        moved = torch.zeros_like(own_ordered) if ordered is None else ordered / t
        if temperature is not None:
            moved = moved + _distances(own_ordered, t) * (temperature / t)
        moved = torch.stack([moved, -moved])[..., None]
        change = -own_values * moved if values is None else values - own_values * moved
        return moved * sums + decayed_sums(own_ordered, change, t)


def _sums(ends: Tensor, values: Tensor, temperature: float | Tensor, block: int, levels: int) -> Tensor:
    """Of entries that begin at one score and end at another (2, ..., n): the sums over those before, seen from where an entry
    begins, and over those after, seen from where it ends. Within blocks, and over the blocks as entries."""
    if not levels:
        return _pair_by_pair(ends, values, temperature)
    n, most = ends.shape[-1], torch.finfo(ends.dtype).max
    count = n // block + 2  # never 1, of which a graph would make a case of its own
    ends = pad(ends, (0, count * block - n), value=-most).unflatten(-1, (count, block))  # type: ignore[no-untyped-call]
    values = pad(values, (0, 0, 0, count * block - n)).unflatten(-2, (count, block))  # type: ignore[no-untyped-call]
    blocks = torch.stack([ends[0, ..., 0], ends[1, ..., -1]])
    to_ends = over(minus_abs(ends - blocks[..., None]), for_each(temperature)).exp()[..., None]
    totals = (to_ends.flip(0) * values).sum(-2)
    beyond = _sums(blocks, totals, temperature, block, levels - 1)[..., None, :]
    within = _pair_by_pair(ends, values, for_each(temperature))
    return torch.addcmul(within, to_ends, beyond).flatten(-3, -2)[..., :n, :].contiguous()  # no view: forward mode needs that


def _pair_by_pair(ends: Tensor, values: Tensor, temperature: float | Tensor) -> Tensor:
    begins, finishes = ends.unbind()
    decay = over(begins[..., :, None] - finishes[..., None, :], for_each(temperature)).exp().tril(-1)
    decay = torch.stack([decay, decay.mT])
    if values.shape[-1] <= 2:
        return (decay[..., None] * values[..., None, :, :]).sum(-2)
    with no_autocast(values.device):
        return decay @ values


def _sums_of_ones(ordered: Tensor, temperature: float | Tensor) -> Float[Tensor, "2 *batch n"]:
    ones = torch.ones_like(ordered)[..., None].expand(2, *ordered.shape, 1)
    return decayed_sums(ordered, ones, temperature).squeeze(-1)


def _gaps(ordered: Tensor, temperature: float | Tensor) -> Tensor:
    """Between neighbouring scores, over t."""
    return over(hardtanh(ordered[..., :-1] - ordered[..., 1:], -FAR, FAR), temperature)


def _distances(ordered: Tensor, temperature: float | Tensor) -> Tensor:
    """How many temperatures the scores lie below the first, where no gap counts for more than what is in reach."""
    return pad(_gaps(ordered, temperature).clamp(max=OUT_OF_REACH).cumsum(-1), (1, 0))


def ranks(ordered: Float[Tensor, "*batch n"], temperature: float | Tensor) -> Float[Tensor, "*batch n"]:
    """``rank_c = 1 + sum_{j != c} F((s_j - s_c) / t)``, F the Laplace distribution function."""
    before, after = _sums_of_ones(ordered, temperature).unbind()
    return places(ordered) + (after - before) / 2


def thresholds(ordered: Tensor, sums: Tensor, k: Tensor, temperature: float | Tensor) -> tuple[Tensor, ...]:
    """The b with ``sum_c F((s_c - b) / t) = k`` for many k in ascending order, from one pass over the scores.

    With i scores above b, and A and B the ``sums`` (1 + :func:`decayed_sums` of ones) at the neighbours of b, its distances
    from these fulfil ``i - A e^-upper / 2 + B e^-lower / 2 = k``: a quadratic equation. The nearer one is the logarithm of A or
    B over a root, so that b is as exact as the scores. At a score the left side is its rank less 1/2: these tell i.

    Returns:
        How many scores are above b, whether the reference is the first below it or the last above, the reference, and
        (b - reference) / t, all (..., k).
    """
    above, n = _count_up_to(places(ordered) - 0.5 + (sums[1] - sums[0]).detach() / 2, k), ordered.shape[-1]
    logs, missing = torch.cat([sums[0], sums[1]], -1).log(), k - above
    across = logs[..., : n - 1] + logs[..., n + 1 :] - _gaps(ordered, temperature)
    # log(|missing| + sqrt(missing^2 + e^across)), also where nothing is missing in a wide gap: there b is in the middle
    log_missing = missing.abs().log()
    log_square = torch.logaddexp(2 * log_missing, pad(across, (1, 1), value=-FAR).gather(-1, above))
    is_below = missing > 0
    place = (above + is_below - 1).clamp(min=0)
    own = logs.gather(-1, torch.where(is_below, place + n, place))
    distance = own - torch.logaddexp(log_missing, log_square / 2)
    return above, is_below, ordered.gather(-1, place), distance * torch.where(is_below, 1.0, -1.0)


def _count_up_to(ascending: Tensor, values: Tensor) -> Tensor:
    """How many of the numbers of a row are at most each of the values."""
    if torch.compiler.is_exporting():  # ONNX has no searchsorted
        return (ascending[..., None, :] <= values[..., :, None]).sum(-1)
    return torch.searchsorted(ascending, values, right=True)


def sort(ordered: Float[Tensor, "*batch n"], temperature: float | Tensor) -> Float[Tensor, "*batch n"]:
    """Entry r is the b_r of ``sum_c F((s_c - b_r) / t) = r - 1/2``, F the Laplace distribution function.

    ``db_r = sum_c w_rc ds_c + dt sum_c w_rc (b_r - s_c) / t`` with ``w_r = softmax(-|s - b_r| / t)``.
    """
    k = torch.ones_like(ordered).cumsum(-1) - 0.5
    _, _, reference, step = thresholds(ordered, 1 + _sums_of_ones(ordered, temperature), k, temperature)
    return reference + temperature * step


def product(
    scores: Float[Tensor, "*batch n"], values: Float[Tensor, "*batch n d"], k: int, temperature: float | Tensor
) -> Float[Tensor, "*batch k d"]:
    """``P @ values`` in O((n + k) d), without P."""
    ordered, order = descending(scores)
    values = values.gather(-2, order[..., None].expand_as(values)).to(ordered.dtype)
    kinds = torch.cat([torch.ones_like(ordered)[..., None], values], -1)
    kinds = kinds.expand(2, *kinds.shape)
    sums = kinds + decayed_sums(ordered, kinds, temperature)
    counts = torch.minimum(torch.ones_like(ordered[..., :k]).cumsum(-1), (~is_padding(ordered)).sum(-1, keepdim=True))
    above, is_below, _, step = thresholds(ordered, sums[..., 0], counts, temperature)
    own, gaps = step.abs(), pad(_gaps(ordered, temperature), (1, 1), value=FAR)
    decay = torch.where(torch.stack([is_below, ~is_below]), own - gaps.gather(-1, above), -own).exp()[..., None]
    beside = torch.stack([above, above + 1])[..., None].expand(*decay.shape[:-1], values.shape[-1])
    upper, lower = (decay * pad(sums[..., 1:], (0, 0, 1, 1)).gather(-2, beside)).unbind()
    inclusion = pad(values.cumsum(-2), (0, 0, 1, 0)).gather(-2, beside[0]) + (lower - upper) / 2
    return inclusion - pad(inclusion[..., :-1, :], (0, 0, 1, 0))
