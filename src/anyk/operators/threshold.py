"""The implicit solver: for each row the threshold b at which ``sum_c F((s_c - b) / t) = k``, F a distribution function.

The masks of LapSum, SinkhornSort and Permutahedron are ``F((s_c - b) / t)``, and LapSum's T_j is its mask at k = j. With
x_c = (s_c - b) / t, the density p_c = F'(x_c) and the weights w = p / sum(p), which are a softmax of log p, all derivatives
follow from ``sum_c p_c dx_c = dk``:

    dx_c = y_c - sum_i w_i y_i + dk / sum(p)    with y_c = (ds_c - x_c dt) / t        db = t (sum_i w_i y_i - dk / sum(p))

x is an output of the autograd function, so that its backward pass, a formula of x, has derivatives as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyk import kernels
from anyk._compat import Function
from anyk.checks import working_dtype


class Law(NamedTuple):
    """A symmetric distribution with exponential tails, or with ``find`` another one.

    ``cdf`` is F, with all digits of what is small; ``log_density`` is the log of the density over ``factor``. ``refine(x, b,
    k)`` makes the threshold b of Laplace's; ``find(x, k)`` without it. ``log_cdf`` has log F and its derivative.
    """

    cdf: Callable[[Tensor], Tensor]
    log_density: Callable[[Tensor], Tensor]
    factor: float
    refine: Callable[[Tensor, Tensor, int | Tensor], Tensor] | None = None
    find: Callable[[Tensor, int | Tensor], Tensor] | None = None
    log_cdf: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


FAR = 1e25
"""as good as infinite; sums and multiples of it are numbers"""
LAWS: dict[str, Law] = {}
"""By the names that the kernels have for them."""
What = Literal["mask", "threshold", "log inclusion", "x"]


def mask(scores: Tensor, k: int | Tensor, temperature: float | Tensor, law: str) -> Tensor:
    """``F((s - b) / t)``, which sums to k, in the dtype of the scores. k: 0 < k < n, or numbers (..., 1)."""
    return Solution.run(scores, k, temperature, law, "mask", None)[0]


def threshold(scores: Tensor, k: int | Tensor, temperature: float | Tensor, law: str) -> Tensor:
    """b, (..., 1), in at least float32; the largest score if k is 0, the smallest if k is as many as there are or more."""
    found, x, *_ = Solution.run(scores, k, temperature, law, "threshold", None)
    if x is None:  # a kernel has made it, which refuses what is infinite
        return found
    k = k if isinstance(k, Tensor) else torch.full((1,), k, device=scores.device)
    infinite = (scores == torch.inf).sum(-1, keepdim=True)
    found = torch.where((k <= infinite) & (found == found), torch.inf, found)
    excluded = scores == -torch.inf
    smallest = scores.masked_fill(excluded, torch.inf).amin(-1, keepdim=True)
    found = torch.where((~excluded).sum(-1, keepdim=True) <= k, smallest, found)
    return torch.where(k <= 0, scores.amax(-1, keepdim=True), found)


def for_each(temperature: float | Tensor) -> float | Tensor:
    """(..., 1) for rows becomes (..., 1, 1) for the thresholds of rows."""
    return temperature[..., None] if isinstance(temperature, Tensor) and temperature.ndim else temperature


def over(values: Tensor, temperature: float | Tensor) -> Tensor:
    """values / t, which for the usual t = 1 is no operation."""
    return values if not isinstance(temperature, Tensor) and temperature == 1 else values / temperature


def minus_abs(x: Tensor) -> Tensor:
    """As one operation, which ONNX does not know."""
    return -x.abs() if torch.compiler.is_exporting() else x.copysign(-1.0)


def solve(scores: Tensor, k: Any, temperature: float | Tensor, law: str, every: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """``x = (s - b) / t``, finite unless the row has NaN; a score near b, the reference (..., 1); and (b - reference) / t.

    Relative to it, no digit is lost to an offset. With ``every`` for the thresholds of 1, …, k, each of which is a row of the
    results, of scores (..., 1, n) in descending order.
    """
    dtype, n = working_dtype(scores), scores.shape[-1]
    limits = torch.finfo(dtype)
    # Laplace's threshold is log n from the k-th score at most, or in the gap below it: what is so far above has no part in it
    far, lowest = -2 * math.log(limits.eps), limits.max / 4
    find, refine = LAWS[law].find, LAWS[law].refine
    if refine is not None and kernels.serve(scores) and (found := kernels.threshold(scores, k, temperature)) is not None:
        reference = found.to(dtype)
        relative = over(scores.to(dtype) - reference, temperature).clamp(-lowest, lowest)
        b = refine(relative, torch.zeros_like(reference), k)
        return relative - b, reference, b
    scores = scores.to(dtype).clamp(max=limits.max)
    ordered, order = (scores, None) if every else scores.sort(-1, descending=True)
    if every:
        reference = ordered[..., :k].mT
        k = torch.arange(1, k + 1, device=scores.device)[:, None]
    elif not isinstance(k, Tensor) and not torch.compiler.is_compiling():
        reference = ordered[..., max(k, 1) - 1, None]
    else:  # a number may be symbolic: as an index it would be a condition of the graph
        k = k if isinstance(k, Tensor) else torch.full((1,), k, dtype=dtype, device=scores.device)
        place = k.ceil().long().clamp(0, n).expand(*scores.shape[:-1], 1)
        reference = pad(ordered, (1, 0), value=limits.max).gather(-1, place)  # above all scores for k = 0
    reference = reference.clamp(min=-limits.max)
    relative = over(scores - reference, temperature).clamp(-lowest, far)  # padding is as far below as numbers go
    ordered = relative if order is None else relative.gather(-1, order)
    if find is not None:
        b = find(relative, k)
        return relative - b, reference, b
    # With i scores above b, A = sum of e^-s over them and B = sum of e^s over the rest, the equation is
    # i - A e^b / 2 + B e^-b / 2 = k. Here is its root for each i; the right i is the first whose next score lies below b.
    log_a = _log_running_sums(pad(-ordered, (1, 0), value=-far)).clamp(max=2 * far)
    log_b = _log_running_sums(pad(ordered.flip(-1), (1, 0), value=-lowest)).flip(-1)
    if isinstance(k, Tensor):
        excess = torch.arange(n + 1, device=scores.device) - k
    else:
        excess = torch.arange(-k, n + 1 - k, device=scores.device)
    half = log_a.lerp(log_b, 0.5)
    least = half.clamp(min=-far)
    # with k scores above b: the middle of the gap, however wide it is
    roots = torch.asinh(excess / least.exp()) + (torch.where(excess == 0, half, least) - log_a)
    above = (ordered >= roots[..., :-1]).sum(-1, keepdim=True)
    b = roots.gather(-1, above)
    if refine is not None:
        b = refine(relative, b, k)
    return relative - b, reference, b


def _log_running_sums(values: Tensor) -> Tensor:
    """Of ascending values."""
    if not torch.compiler.is_exporting():
        return values.logcumsumexp(-1)
    # ONNX has no logcumsumexp. Where it matters how many there are, e to the values is within range.
    return torch.maximum(values, values.clamp(max=64.0).exp().cumsum(-1).log())


class Solution(Function):
    """What is asked for; x, or None if a kernel has solved it; and what is kept."""

    @staticmethod
    def forward(
        scores: Tensor, k: int | Tensor, temperature: float | Tensor, law: str, what: What, position: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if what == "mask" and kernels.serve(scores) and (made := kernels.mask(law, scores, k, temperature)) is not None:
            return made[0], None, made[1], None
        if what == "threshold" and kernels.serve(scores) and (b := kernels.threshold(scores, k, temperature)) is not None:
            return b.to(working_dtype(scores)), None, b, None
        x, reference, b = solve(scores, k, temperature, law, every=position is not None)
        if position is not None:
            place = position[..., None, None].expand(*x.shape[:-1], 1)
            value, slope = LAWS[law].log_cdf(x.gather(-1, place).squeeze(-1))  # type: ignore[misc]
            return value, x, place, slope
        return reference + b * temperature if what == "threshold" else LAWS[law].cdf(x).to(scores.dtype), x, None, None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        scores, k, temperature, ctx.law, ctx.what, _ = inputs
        _, x, kept, slope = output
        of_rows, learned = isinstance(k, Tensor), isinstance(temperature, Tensor)
        ctx.k, ctx.temperature = None if of_rows else k, None if learned else temperature
        ctx.dtype, ctx.shape = scores.dtype, scores.shape
        ctx.mark_non_differentiable(*(each for each in (kept, slope) if each is not None))
        ctx.set_materialize_grads(False)
        tensors = x, k if of_rows else None, temperature if learned else None, scores if x is None else None, kept, slope
        ctx.save_for_backward(*tensors)
        if x is not None:
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_x: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, k, temperature, scores, kept, slope = _restored(ctx)
        law, wants = LAWS[ctx.law], ctx.needs_input_grad[1:3]
        if x is None and not torch.is_grad_enabled():
            if ctx.what == "mask":
                grads = kernels.mask_backward(ctx.law, scores, kept, temperature, grad, *wants)
            else:
                grads = kernels.threshold_backward(scores, kept, temperature, grad, *wants)
            return grads[0], _summed(grads[1], k), _summed(grads[2], temperature), None, None, None
        if x is None:
            x = Solution.run(scores, k, temperature, ctx.law, "x", None)[1]
        log_density = law.log_density(x)
        weights = log_density.softmax(-1)
        nothing: Any = None
        direct, total, grad_k = nothing, nothing, nothing  # what comes directly, and its sum, which b takes off again
        if grad is not None and ctx.what == "threshold":
            direct, total, grad_k = torch.zeros_like(x), -grad, -temperature * _inverse_density(x, law) * grad
        elif grad is not None and slope is not None:
            if torch.is_grad_enabled():
                slope = law.log_cdf(x.gather(-1, kept).squeeze(-1))[1]  # type: ignore[misc]
            total = over((grad * slope)[..., None], temperature)
            direct = torch.where(torch.arange(x.shape[-1], device=x.device) == kept, total, 0)
        elif grad is not None:
            direct = grad * log_density.exp() * (law.factor / temperature)
            total = direct.sum(-1, keepdim=True)
            grad_k = (weights * grad).sum(-1, keepdim=True) if wants[0] else None
        if grad_x is not None:
            moved = grad_x.sum(-1, keepdim=True)
            direct, total = _plus(direct, grad_x / temperature), _plus(total, moved / temperature)
            grad_k = _plus(grad_k, moved * _inverse_density(x, law)) if wants[0] else None
        if total is None:
            return None, None, None, None, None, None
        grad_scores = torch.addcmul(direct, weights, total, value=-1)
        grad_k = _summed(torch.where(_is_open(x, k, law), grad_k, 0), k) if wants[0] else None
        grad_temperature = _summed(-(grad_scores * x).sum(-1, keepdim=True), temperature) if wants[1] else None
        return grad_scores.sum_to_size(ctx.shape).to(ctx.dtype), grad_k, grad_temperature, None, None, None

    @staticmethod
    def tangent(ctx: Any, scores: Tensor | None, k: Tensor | None, temperature: Tensor | None, *_: None) -> tuple[Any, ...]:
        x, own_k, t, _, place, slope = _restored(ctx)
        law = LAWS[ctx.law]
        log_density = law.log_density(x)
        weights = log_density.softmax(-1)
        y = torch.zeros_like(x) if scores is None else (scores / t).expand_as(x)
        y = y if temperature is None else y - x * (temperature / t)
        mean = (weights * y).sum(-1, keepdim=True)
        by_k = torch.zeros_like(mean) if k is None else torch.where(_is_open(x, own_k, law), k, 0)
        moved = by_k * _inverse_density(x, law)
        if ctx.what == "threshold":
            value = t * (mean - moved)
        elif slope is not None:
            value = slope * (y.gather(-1, place) - mean).squeeze(-1)
        else:
            value = ((y - mean) * log_density.exp() * law.factor + weights * by_k).to(ctx.dtype)
        return value, y - mean + moved, None, None


def _restored(ctx: Any) -> tuple[Any, ...]:
    x, k, temperature, *more = ctx.saved_tensors
    return x, ctx.k if k is None else k, ctx.temperature if temperature is None else temperature, *more


def _summed(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.sum_to_size(like.shape).to(like.dtype)


def _is_open(x: Tensor, k: Tensor, law: Law) -> Tensor:
    """Whether the threshold depends on k: there are more than k entries, k is not 0, and some entry has a density."""
    has_density = law.log_density(x).amax(-1, keepdim=True) > -FAR
    return (k > 0) & (k < (x > -torch.finfo(x.dtype).max / 16).sum(-1, keepdim=True)) & has_density


def _inverse_density(x: Tensor, law: Law) -> Tensor:
    """1 / sum(p), at most a large number."""
    return (-law.log_density(x).logsumexp(-1, keepdim=True)).clamp(max=80.0).exp() / law.factor


def _plus(one: Any, other: Tensor) -> Any:
    return other if one is None else one + other
