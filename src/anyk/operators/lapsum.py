"""LapSum: a class is among the first j as far as its score passes a threshold that lets j classes through."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anyk import autograd, candidates, checks
from anyk.docstrings import documented
from anyk.kernels.loss_description import LAPSUM
from anyk.operators.base import LOG_ZERO, Operator, farthest, in_order, rows_from_inclusion


@documented
class LapSum(Operator, name="lapsum"):
    """Soft thresholds under the Laplace distribution.

    ``T_j(c) = F((s_c - b_j) / t)`` with F the Laplace distribution function and b_j such that ``sum_c T_j(c) = j``: closed
    form after sorting. ``T_n = 1``. ``P[r] = T_r - T_(r-1)``; rows sum to 1, and columns too at k = n.

    Cost: O(n log n + k n). Solving for the thresholds takes (2k + 1) n numbers per row, temporarily. Where gradients are
    recorded, P keeps about 5 k n numbers per row, T keeps n + 2 k.

    Args:
        {temperature}

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.LapSum().inclusion(scores, torch.tensor(1), k=3)
        tensor([0.6453, 0.9046, 1.0000])

    Reference: Struski et al., "LapSum - One Method to Differentiate Them All: Ranking, Sorting and Top-k Selection", 2025.
    """

    kernel_code = LAPSUM

    mask_code = LAPSUM
    real_k = True

    def _mask(self, scores: Tensor, real: Tensor | None, k: int | Tensor) -> Tensor:
        relative, k, solved, _ = laplace_threshold(self, scores, real, k)
        return (_Mask.apply if checks.eager(scores) else _attached_mask)(relative, k, solved)

    def _threshold(self, scores: Tensor, real: Tensor | None, k: int | Tensor) -> Tensor:
        relative, k, solved, reference = laplace_threshold(self, scores, real, k)
        inside = solved.isfinite()
        attach = _Threshold.apply if checks.eager(scores) else _attached_threshold
        attached = attach(relative, k, torch.where(inside, solved, 0))
        unit = self._relative(torch.ones_like(reference), torch.zeros_like(reference))
        found = attached / unit + reference
        # beside +inf, and at it
        infinite = (reference == torch.finfo(found.dtype).max) | (solved > farthest(found.dtype) / 4)
        found = torch.where(infinite, torch.inf, found)
        if checks.readable(inside) and bool(inside.all()):
            return found.squeeze(-1)
        first = scores.amax(-1, keepdim=True)
        last = (scores if real is None else scores.masked_fill(~real, torch.inf)).amin(-1, keepdim=True)
        # NaN is that of the row, or of +inf at the threshold: then both have it
        return torch.where(inside, found, torch.where(solved < 0, last, first)).squeeze(-1)

    def _ranks(self, scores: Tensor, real: Tensor | None) -> Tensor:
        ordered, present, order = in_order(scores if real is None else scores.masked_fill(~real, 0), real)
        ones = torch.ones_like(ordered, dtype=torch.float64)
        if present is not None:  # padding stands with the last of the others, and weighs nothing
            last = ordered.detach().masked_fill(~present, torch.inf).amin(-1, keepdim=True)
            ordered, ones = torch.where(present, ordered, last), present.double()
        ordered = self._close(ordered, 800)  # further apart, e to the minus that is nothing
        ahead = torch.arange(ordered.shape[-1], device=scores.device)
        ranks = 1 + ahead + (decayed_sum(ordered, ones, False) - decayed_sum(ordered, ones, True)) / 2
        ranks = ranks + 0 * ordered.sum(-1, keepdim=True)  # NaN in a row is NaN everywhere in it
        return torch.zeros_like(ranks).scatter(-1, order, ranks)

    def _matrix(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        ordered, ordered_real, _ = in_order(scores, real)
        margin = scores[..., None, :] - _thresholds(ordered, ordered_real, k)[..., :, None]
        inclusion = _everyone_at_the_end(_log_laplace(margin), real).exp()
        if real is not None:
            inclusion = inclusion.masked_fill(~real[..., None, :], 0)
        return rows_from_inclusion(inclusion)

    def _log_inclusion(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        margin = candidates.at(scores, position)[..., None] - _thresholds(scores, real, k)
        return _everyone_at_the_end(_log_laplace(margin)[..., None], real, scores.shape[-1]).squeeze(-1)

    def _every_log_inclusion(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        margin = scores[..., None, :] - _thresholds(scores, real, k)[..., :, None]
        return _everyone_at_the_end(_log_laplace(margin), real).mT


def _everyone_at_the_end(log_inclusion: Tensor, real: Tensor | None, n: int | None = None) -> Tensor:
    """log T_n = 0: the threshold for all n classes is -inf."""
    k = log_inclusion.shape[-2]
    ranks = torch.arange(1, k + 1, device=log_inclusion.device)[:, None]
    number = (n or log_inclusion.shape[-1]) if real is None else real.sum(-1)[..., None, None]
    return log_inclusion.masked_fill(ranks == number, 0)


def _log_laplace(x: Tensor) -> Tensor:
    below = x.clamp(max=0) - math.log(2)
    above = torch.log1p(-0.5 * torch.exp(-x.clamp(min=0)))
    return torch.where(x < 0, below, above)


def _thresholds(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """b_1 … b_k for scores in descending order, shape (..., k)."""
    with torch.no_grad():
        solved = _solve_thresholds(scores.detach(), real, k)
    return (_Thresholds.apply if checks.eager(scores) else _attached)(scores, real, solved)


def _attached(scores: Tensor, real: Tensor | None, solved: Tensor) -> Tensor:
    """The thresholds as a function of the scores, with all its derivatives up to the second."""
    detached = scores.detach()
    # By the implicit function theorem db_j = sum_c w_c ds_c with w = softmax(-|s - b_j|). Half of the weights is attached
    # to the graph: with both halves the first derivative is w, and the second is that of b (the matrix dw/ds is symmetric).
    step = (scores - detached)[..., None, :]
    weights = _weights(detached, real, solved)
    first = solved + (weights * step).sum(-1)
    return solved + ((_weights(scores, real, first) + weights) / 2 * step).sum(-1)


class _Thresholds(torch.autograd.Function):
    """:func:`_attached`, for nothing unless there is a backward pass."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, real: Tensor | None, solved: Tensor) -> Tensor:
        ctx.save_for_backward(scores, real, solved)
        return solved.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        scores, real, solved = ctx.saved_tensors
        plain = autograd.plain_gradients(lambda scores: _attached(scores, real, solved), [scores], [gradient])
        if plain is not None:
            return plain[0], None, None
        return (_weights(scores, real, solved) * gradient[..., None]).sum(-2), None, None


def _weights(scores: Tensor, real: Tensor | None, thresholds: Tensor) -> Tensor:
    closeness = -(scores[..., None, :] - thresholds[..., :, None]).abs()
    if real is not None:
        closeness = closeness.masked_fill(~real[..., None, :], -torch.inf)
    return closeness.softmax(-1)


def _solve_thresholds(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """With i scores above b, A = sum of e^(-s) over them and B = sum of e^s over the rest, sum_c T(c) = j reads
    i - A e^b / 2 + B e^(-b) / 2 = j: a quadratic equation in e^b."""
    n = scores.shape[-1]
    # At the (2k)-th score half of 2k classes have passed at least: the thresholds lie above it. Up to there the sums are
    # taken one by one. (logcumsumexp, the other way to keep them within range, is a hundred times slower than a sum.)
    first = min(2 * k + 1, n)
    top = scores[..., :first]
    closeness = (top[..., :, None] - scores[..., None, :]).abs_().neg_().exp_()
    if real is not None:
        closeness = closeness.masked_fill(~real[..., None, :], 0)
    better = closeness[..., :first].tril().sum(-1)  # e^s A, with i scores up to s
    worse = closeness.triu().sum(-1)  # e^(-s) B, with i scores before s
    nothing = torch.full_like(top[..., :1], LOG_ZERO)
    log_a = torch.cat([nothing, better.log() - top], -1)  # by i
    log_b = torch.cat([(worse.log() + top).clamp(min=LOG_ZERO), nothing], -1)

    # sum_c T(c) with the threshold at each score in turn: it grows along the row, and tells how many scores lie above b_j
    passed = torch.arange(1, first + 1, device=scores.device) + (worse - 1 - better) / 2
    if real is not None:
        passed = passed.masked_fill(~real[..., :first], torch.inf)
    # j = n has no threshold (T_n = 1): that of n - 1 stands in for it
    ranks = torch.arange(1, k + 1, device=scores.device).expand(*scores.shape[:-1], k)
    ranks = ranks.clamp(max=n - 1) if real is None else ranks.minimum(real.sum(-1, keepdim=True) - 1)
    ranks = ranks.clamp(min=1)
    above = torch.searchsorted(passed.contiguous(), ranks.to(passed.dtype).contiguous(), right=True)
    log_a, log_b = log_a.gather(-1, above), log_b.gather(-1, above)
    missing = (ranks - above).to(scores.dtype)
    size = missing.abs().clamp(min=1)
    root = (size + (size.square() + (log_a + log_b).exp()).sqrt()).log()
    threshold = torch.where(missing > 0, log_b - root, root - log_a)
    threshold = torch.where(missing == 0, (log_b - log_a) / 2, threshold)
    # NaN scores stay NaN; the huge thresholds of unused ranks do not overflow in what follows
    return threshold.clamp(min=-1e36, max=1e36)


def laplace_threshold(
    operator: Operator, scores: Tensor, real: Tensor | None, k: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b with ``sum_c F((s_c - b) / t) = k``, F the Laplace distribution function, and what it is relative to.

    Returns:
        The scores less a score near b, over the temperature, with their graph, padding at -inf; k for each row, (..., 1); b for
        these scores, without a graph, infinite where k is 0 or all there is; the score that was taken off.
    """
    n = scores.shape[-1]
    detached = scores.detach() if real is None else scores.detach().masked_fill(~real, -torch.inf)
    number = torch.full((1,), n, device=scores.device) if real is None else real.sum(-1, keepdim=True)
    if isinstance(k, int):
        least = most = k
    else:
        least, most = (int(k.detach().min()), math.ceil(k.detach().max())) if checks.readable(k) and k.numel() else (0, n)
    if real is None and 2 * least > n:
        # few are left out: the threshold of the scores turned round, which lies among the lowest
        relative, left_out, found, reference = laplace_threshold(operator, -scores, None, n - k)
        return -relative, n - left_out, -found, -reference
    rest = None
    if 2 * most + 1 >= n:
        best = detached.sort(dim=-1, descending=True).values
    else:  # at the (2k)-th score half of 2k entries have passed at least: b lies above it
        chosen = candidates.best(detached, 2 * most + 1)
        best, rest = detached.gather(-1, chosen), detached.scatter(-1, chosen, -torch.inf)
    k = torch.full((1,), k, dtype=scores.dtype, device=scores.device) if isinstance(k, int) else k
    k = torch.minimum(k, number.to(k.dtype))
    place = (k.detach().ceil().long().clamp(1, best.shape[-1]) - 1).expand(*best.shape[:-1], 1)
    reference = best.gather(-1, place).nan_to_num(neginf=0.0)
    with torch.no_grad():
        best = operator._relative(best, reference)
        log_rest = None
        if rest is not None:
            last = best[..., -1:].clamp(min=torch.finfo(best.dtype).min)
            log_rest = (operator._relative(rest, reference, clamp=False) - last).exp().sum(-1, keepdim=True).log() + last
        # detached: no_grad does not stop the tangents of forward mode, which come by the temperature
        found = _solve_threshold(best, log_rest, k.detach(), number).detach()
    # not -inf: the temperature's gradient has this as a factor, and 0 times -inf is NaN
    finite = scores if real is None else scores.masked_fill(~real, 0)
    relative = operator._relative(finite, reference, clamp=operator._overflows(best[..., :1]))
    if real is not None:
        relative = relative.masked_fill(~real, -torch.inf)
    return relative, k, found, reference


def _solve_threshold(best: Tensor, rest: Tensor | None, k: Tensor, number: Tensor) -> Tensor:
    """b with ``sum_c F(s_c - b) = k``, (..., 1), for scores in descending order; infinite where k is 0 or all there is.

    With i scores above b, A = sum of e^(-s) over them and B = sum of e^s over the others, the equation is
    i - A e^b / 2 + B e^(-b) / 2 = k, quadratic in e^b. Which i it is tells the sum with the threshold at each score in turn.
    For that, scores far from the k-th are moved nearer: b lies between the scores around the k-th (or in the gap after it),
    where e to the minus such a distance is nothing.
    """
    dtype, best, k = best.dtype, best.double(), k.double()
    m = best.shape[-1]
    near = best.clamp(-600, 600)
    up, down = (-near).exp().cumsum(-1), near.exp().flip(-1).cumsum(-1).flip(-1)
    if rest is not None:
        rest = rest.double()
        down = down + rest.clamp(max=600).exp()
    place = torch.arange(1, m + 1, device=best.device)
    passed = place + (down * (-near).exp() - 1 - up * near.exp()) / 2
    above = (passed <= k).sum(-1, keepdim=True)
    # the two sums again, each from the score next to b: exact, however far apart the scores are
    is_above = place <= above
    lowest = best.gather(-1, (above - 1).clamp(min=0)).clamp(-1e300, 1e300)
    highest = best.gather(-1, above.clamp(max=m - 1)).clamp(-1e300, 1e300)
    log_a = torch.where(is_above, lowest - best, -torch.inf).exp().sum(-1, keepdim=True).log() - lowest
    b = torch.where(is_above, -torch.inf, best - highest).exp().sum(-1, keepdim=True)
    log_b = (b if rest is None else b + (rest - highest).exp()).log() + highest
    missing = k - above
    root = (missing.abs() + (missing.square() + (log_a + log_b).exp()).sqrt()).log()
    found = torch.where(missing > 0, log_b - root, root - log_a)
    found = torch.where(missing == 0, (log_b - log_a) / 2, found)
    found = torch.where(k <= 0, torch.inf, torch.where(k >= number, -torch.inf, found))
    return (found + 0 * best.clamp(-1, 1).sum(-1, keepdim=True)).to(dtype)


def _attached_threshold(scores: Tensor, k: Tensor, solved: Tensor) -> Tensor:
    """The threshold as a function of scores and k, with two derivatives: two Newton steps from the solution.

    All is relative to the nearest score, so that a step stays right where b is far from every score.
    """
    found = solved
    for _ in range(2):
        margin = scores - found
        distance = margin.abs()
        nearest = _nearest(distance.detach())
        slopes = torch.exp(nearest - distance)
        surplus = torch.where(margin < 0, slopes, -slopes).sum(-1, keepdim=True)
        ahead = (margin > 0).sum(-1, keepdim=True) - k
        found = found + (surplus + 2 * nearest.clamp(max=_FURTHEST).exp() * ahead) / slopes.sum(-1, keepdim=True)
    return solved + (found - found.detach())


_FURTHEST = 80.0  # e to that is still a number of float32


def _nearest(distance: Tensor) -> Tensor:
    return distance.amin(-1, keepdim=True).nan_to_num(nan=torch.nan, posinf=0.0)


class _Threshold(torch.autograd.Function):
    """:func:`_attached_threshold` with the backward pass written out: the weights of :class:`_Mask`, and
    ``db = sum_c w_c ds_c - dk / sum_c p_c``."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: Tensor, solved: Tensor) -> Tensor:
        ctx.save_for_backward(scores, k, solved)
        return solved.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scores, k, solved = ctx.saved_tensors
        plain = autograd.plain_gradients(lambda scores, k: _attached_threshold(scores, k, solved), [scores, k], [gradient])
        if plain is not None:
            return plain[0], plain[1], None
        distance = (scores - solved).abs_()
        nearest = _nearest(distance)
        slopes = torch.sub(nearest, distance, out=distance).exp_()
        total = slopes.sum(-1, keepdim=True)
        of_k = None
        if ctx.needs_input_grad[1]:
            of_k = (-2 * gradient * nearest.clamp(max=_FURTHEST).exp() / total).sum_to_size(k.shape)
        return slopes.mul_(gradient / total), of_k, None


def _attached_mask(scores: Tensor, k: Tensor, solved: Tensor) -> Tensor:
    """``F(s - b)`` with the threshold as a function of scores and k; 0 and 1 where it is infinite."""
    inside = solved.isfinite() | solved.isnan()
    margin = scores - _attached_threshold(scores, k, torch.where(inside, solved, 0))
    tail = torch.exp(-margin.abs()) / 2
    mask = torch.where(margin < 0, tail, 1 - tail)
    return torch.where(inside, mask, (solved < 0).to(mask.dtype))


class _Mask(torch.autograd.Function):
    """:func:`_attached_mask` with the backward pass written out.

    With p_c = exp(-|s_c - b|) / 2 and the weights w = softmax(-|s - b|), which stay right where every p underflows:
    db = sum_c w_c ds_c, dm_c = p_c (ds_c - db) + w_c dk.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: Tensor, solved: Tensor) -> Tensor:
        margin = scores - solved
        tail = margin.abs().neg_().exp_().div_(2)
        ctx.save_for_backward(scores, k, solved)
        return torch.where(margin < 0, tail, 1 - tail)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scores, k, solved = ctx.saved_tensors
        plain = autograd.plain_gradients(lambda scores, k: _attached_mask(scores, k, solved), [scores, k], [gradient])
        if plain is not None:
            return plain[0], plain[1], None
        closeness = (scores - solved).abs().neg_()
        weights = closeness.nan_to_num(neginf=torch.finfo(closeness.dtype).min).softmax(-1)
        mean = (gradient * weights).sum(-1, keepdim=True)
        slopes = closeness.exp_().div_(2)
        of_scores = slopes * (gradient - mean)
        of_k = None
        if ctx.needs_input_grad[1]:
            of_k = torch.where(solved.isfinite(), mean, 0).sum_to_size(k.shape)
        return of_scores, of_k, None


def decayed_sum(scores: Tensor, values: Tensor, better: bool) -> Tensor:
    """``sum_j e^(-|s_i - s_j|) v_j`` over the scores before the i-th (``better``) or after it; scores in descending order."""
    return (_DecayedSum.apply if checks.eager(scores) and checks.eager(values) else _doubling)(scores, values, better)


def _doubling(scores: Tensor, values: Tensor, better: bool) -> Tensor:
    """Sums over 1, 2, 4, … neighbours, each from two of the last. Nothing is larger than e^0: it cannot overflow."""
    if not better:
        return _doubling(-scores.flip(-1), values.flip(-1), True).flip(-1)
    n = scores.shape[-1]
    sums, width = values, 1  # over the entry itself and width - 1 before it
    while width < n:
        decay = (scores[..., width:] - scores[..., :-width]).exp()
        sums = torch.cat([sums[..., :width], sums[..., width:] + decay * sums[..., :-width]], -1)
        width *= 2
    return sums - values if n > 1 else torch.zeros_like(values) * scores


def _by_running_sums(scores: Tensor, values: Tensor, better: bool) -> Tensor:
    """:func:`_doubling` for less, where e to the range of the scores is a number."""
    spread = scores[..., :1] - scores[..., -1:]
    if not (checks.readable(scores) and scores.numel() and bool((spread < 300).all())):
        return _doubling(scores, values, better)
    centred = scores.double() - (scores[..., :1] - spread / 2)
    rising = centred.exp() if better else centred.neg().exp()
    weighted = values / rising
    sums = (weighted.cumsum(-1) if better else weighted.flip(-1).cumsum(-1).flip(-1)).mul_(rising)
    return sums.to(scores.dtype).sub_(values)


class _DecayedSum(torch.autograd.Function):
    """:func:`_doubling`, which keeps only its inputs. Its derivatives are sums of the same kind."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor, better: bool) -> Tensor:
        result = _by_running_sums(scores, values, better)
        ctx.save_for_backward(scores, values, result)
        ctx.better = better
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        scores, values, result = ctx.saved_tensors
        if torch.is_grad_enabled():
            result = decayed_sum(scores, values, ctx.better)
        of_values = decayed_sum(scores, gradient, not ctx.better)
        of_scores = gradient * result - values * of_values
        return of_scores if ctx.better else -of_scores, of_values, None
