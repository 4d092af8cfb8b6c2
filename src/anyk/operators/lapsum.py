"""LapSum: a class is among the first j as far as its score passes a threshold that lets j classes through."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anyk import autograd, candidates, checks
from anyk.docstrings import documented
from anyk.kernels.loss_description import LAPSUM
from anyk.operators.base import LOG_ZERO, Operator, in_order, rows_from_inclusion


@documented
class LapSum(Operator, name="lapsum"):
    """Soft thresholds under the Laplace distribution.

    ``T_j(c) = F((s_c - b_j) / t)`` with F the Laplace distribution function and b_j such that ``sum_c T_j(c) = j``: closed
    form after sorting. ``T_n = 1``. ``P[r] = T_r - T_(r-1)``; rows sum to 1, and columns too at k = n.

    Cost: O(n log n + k n). For a moment it takes (2k + 1) n numbers of a row, to solve for the thresholds. Where gradients are
    recorded, P keeps about 5 k n, and T n + 2 k.

    Args:
        {temperature}

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.LapSum().inclusion(scores, torch.tensor(1), k=3)
        tensor([0.6453, 0.9046, 1.0000])

    Reference: Struski et al., "LapSum - One Method to Differentiate Them All: Ranking, Sorting and Top-k Selection", 2025.
    """

    kernel_code = LAPSUM

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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
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
