"""KSubset: the first j classes are a random j-subset, drawn with weights e^s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from anyk import checks, kernels
from anyk._compat import Function, is_eager
from anyk.operators.base import Inclusion, Mask, _all_or_none
from anyk.operators.masks import FromKernel, relative
from anyk.operators.ordering import descending, finite, in_order, unsorted

FAR = 1e4
"""differences over the temperature beyond are as good as infinite: e to minus that is 0 in float64, too"""


class KSubset(Inclusion, Mask, name="ksubset"):
    r"""Inclusion in a random subset of size j whose weight is the product of its members' e^(s/t).

    ``T_j(c) = e^(s_c/t) E_(j-1)(others) / E_j(all)`` with E the elementary symmetric polynomials of e^(s/t). T_1 is the
    softmax. ``P[r] = T_r - T_(r-1)``; rows sum to 1, and columns too at k = n.

    Cost: O(k n) for T, O(n log n) for the mask, whatever k is, and k times that for P.

    Args:
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element or,
            for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``); an
            ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.KSubset()(scores, k=1)
        tensor([[0.0900, 0.6652, 0.2447]])

    Reference: Ahmed et al., "SIMPLE: A Gradient Estimator for k-Subset Sampling", ICLR 2023.
    """

    at_most_1 = True

    def compute_log_inclusion(
        self, scores: Float[Tensor, "*batch m"], position: Int[Tensor, "*batch"], k: int
    ) -> Float[Tensor, "*batch k"]:
        return log_subset_inclusion(scores, position, k, checks.temperature_for(self.temperature, scores))

    def compute_matrix(self, scores: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        temperature = checks.temperature_for(self.temperature, scores)
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = temperature[..., None]
        own, sizes = finite(scores.to(checks.working_dtype(scores))), torch.arange(1, k + 1, device=scores.device)[:, None]
        x = relative(own[..., None, :], in_order(own)[0][..., :k, None], temperature)
        inclusion = subset_mask(x, sizes) * (scores > -torch.inf)[..., None, :]
        return inclusion - pad(inclusion[..., :-1, :], (0, 0, 1, 0))

    def compute_mask(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch n"]:
        def plain(scores: Tensor, temperature: float | Tensor) -> Tensor:
            own = finite(scores.to(checks.working_dtype(scores)))
            mask = subset_mask(relative(own, in_order(own)[0][..., k - 1 : k], temperature), k)
            return (mask * (scores > -torch.inf)).to(scores.dtype)

        def gradients(saved: Any, grad: Tensor, wants_temperature: bool) -> tuple[Tensor, Tensor | None]:
            own, kept = saved
            by_scores, _, by_rows = kernels.mask_backward("ksubset", own, kept, t, grad, False, wants_temperature)
            return by_scores, by_rows

        temperature = checks.temperature_for(self.temperature, scores)
        t = temperature.detach() if isinstance(temperature, Tensor) else temperature
        made = kernels.mask("ksubset", scores, k, t) if kernels.serve(scores) else None
        if made is None:
            return plain(scores, temperature)
        mask: Tensor = FromKernel.run(scores, temperature, (made[0], (scores.detach(), made[1])), gradients, plain)
        return mask

    def draw(
        self, scores: Float[Tensor, "*batch n"], k: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*batch n"]:
        """A subset of size k of each row, as zeros and ones; see :func:`anyk.sample_k_subset`.

        Args:
            scores: -inf is never drawn. A row with fewer than k other entries gives all of them.
            k: between 0 and n.
            generator: where the random numbers come from; None means torch's default.
        """
        scores = checks.scores(scores).detach()
        k = checks.count("k", k, 0, scores.shape[-1], "n")
        if k in (0, scores.shape[-1]) or not scores.numel():
            return _all_or_none(scores, k > 0)
        temperature = checks.temperature_for(self.temperature, scores)
        if isinstance(temperature, Tensor):
            temperature = temperature.detach()
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            if not isinstance(temperature, Tensor):
                temperature = torch.full((), temperature, dtype=torch.float64, device="cpu")
            return torch.ops.anyk.draw_subset(scores, k, temperature)
        return draw_subset(scores, k, temperature, generator)

    def kernel(self, m: int, k: int) -> tuple[Any, ...] | None:
        size = min(k, m // 2)
        log_subsets = math.lgamma(m + 1) - math.lgamma(size + 1) - math.lgamma(m - size + 1)
        if type(self) is not KSubset or isinstance(self.temperature, Tensor) or log_subsets > 600:
            return None  # sums grow to the number of subsets, which float64 must hold
        return "ksubset", float(self.temperature)


def _has_functions(x: Tensor) -> bool:
    """Whether the autograd functions here serve: for functional transforms and forward mode, the plain code does."""
    return is_eager(x) or torch.compiler.is_compiling()


# ---- log T of one target -------------------------------------------------------------------------------------------------


def log_subset_inclusion(
    scores: Float[Tensor, "*batch m"], position: Int[Tensor, "*batch"], k: int, temperature: float | Tensor
) -> Float[Tensor, "*batch k"]:
    """log T_j of the target at ``position``, j = 1 … k, with the digits of T and of 1 - T. The scores are in descending order.

    ``T_j = sigmoid(-log(E_j / E_(j-1)))``, x = (s - s_y) / t, E of the others. E_j is dominated by the product of its j largest
    factors. ``F_j = E_j / that product`` lies between 1 and the number of subsets, and is a sum over its last member:

        F_j(first i) = sum_(l <= i) e^(x_l - x_j) F_(j-1)(first l - 1)     so that     E_j / E_(j-1) = e^(x_j) F_j / F_(j-1).
    """
    place, position = torch.arange(scores.shape[-1] - 1, device=scores.device), position[..., None]
    order = torch.cat([place + (place >= position), position], -1)
    own = finite(scores.to(checks.working_dtype(scores))).gather(-1, order)
    x = relative(own[..., :-1], own[..., -1:], temperature)
    result: Tensor = (_LogInclusion.run if _has_functions(x) else _log_inclusion)(x, k)[0]
    return result


def _log_inclusion(x: Float[Tensor, "*batch others"], k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log T; and of subsets of size j, whose last member is the (j + i)-th of the others: ``x_(j + i) - x_j``, the logarithm of
    the share of subsets, both (..., k, others + 1), and that of their number over that of subsets of size j - 1, (..., k)."""
    rest = pad(x, (0, k), value=torch.finfo(x.dtype).min)
    best = rest[..., :k]
    windows = torch.stack([rest[..., j : rest.shape[-1] - k + j + 1] for j in range(k)], -2)  # unfold would make n a constant
    gaps = (windows - best[..., None]).clamp(min=-FAR)
    logs, growth = [], []
    before: Any = 0  # the first members of all but the last
    for gap in gaps.unbind(-2):
        terms = gap + before
        sums = terms.logcumsumexp(-1)
        growth.append(sums[..., -1:])
        logs.append(terms - growth[-1])
        before = sums - growth[-1]
    log_growth = torch.cat(growth, -1)
    return logsigmoid(-best - log_growth), gaps, torch.stack(logs, -2), log_growth


class _LogInclusion(Function):
    @staticmethod
    def forward(x: Tensor, k: int) -> tuple[Tensor, ...]:
        return _log_inclusion(x, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        """The derivative of log E_j by the scores are the shares of the subsets of size j that have them. Their weights in the
        gradient are split by their sign, so that they have logarithms. What follows upon the j-th member is
        summed up from the last size to the first."""
        x, log_inclusion, gaps, logs, growth = ctx.saved_tensors
        k, m = gaps.shape[-2:]
        if torch.is_grad_enabled():  # for a second derivative
            gaps, logs, growth = _log_inclusion(x, k)[1:]
        grad = grad * log_inclusion.expm1()
        weights = grad - pad(grad[..., 1:], (0, 1))
        is_positive = weights > 0
        starts = (torch.stack([weights * is_positive, -weights * ~is_positive]) + 1e-30).log()
        steps = (gaps - growth[..., None]).flip(-1)
        after = [starts[..., -1:].expand(*starts.shape[:-1], m)]
        for j in range(k - 1, 0, -1):
            later = (steps[..., j, :] + after[-1]).logcumsumexp(-1)
            after.append(torch.logaddexp(starts[..., j - 1 : j], later))
        positive, negative = (torch.stack(after[::-1], -2).flip(-1) + logs).exp().unbind()
        # the j-th row starts with the j-th score: shift it to there, and add up
        rows, width = grad.shape[:-1], m + k - 1
        shifted = pad(positive - negative, (0, k)).reshape(*rows, -1)[..., : k * width].reshape(*rows, k, width)
        return shifted.sum(-2)[..., : m - 1], None


# ---- the mask ------------------------------------------------------------------------------------------------------------


def subset_mask(x: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch n"]:
    """The probability of each entry to be in a subset of size k, from the characteristic function of the subset's size.

    With p = sigmoid(x - b), whatever b is, the subsets are those of independent draws with the probabilities p, given that
    there are k in all. With ``u_c(w) = p_c e^(iw) / (1 - p_c + p_c e^(iw))`` and any N above what the number can reach,

        P(k) = 1/N sum_w e^(-ikw) prod_c (1 - p_c + p_c e^(iw)),    w = 2 pi (l + 1/2) / N,    l = 0 … N - 1

    and the mask, the gradient of log P(k) by x, is the mean of u_c with the terms of this sum for weights. With the p
    summing to about k, none of the terms is large, and all but the first few are nothing.

    Args:
        x: relative to the k-th largest.
        k: how many, at least 1; (..., 1) integers for each row.
    """
    if _has_functions(x):
        mask: Tensor = _Mask.run(x, k)[0]
        return mask
    draws = _Draws(x - _tilt(x.detach(), k))
    return draws.means(draws.weights(k))


class _Mask(Function):
    """The mask is a gradient, so that its derivative is symmetric: the covariances of the entries of the subset."""

    @staticmethod
    def forward(x: Tensor, k: int | Tensor) -> tuple[Tensor, ...]:
        tilt = _tilt(x, k)
        draws = _Draws(x - tilt)
        weights = draws.weights(k)
        return draws.means(weights), tilt, *weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, k = inputs
        ctx.k = None if isinstance(k, Tensor) else k
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, k if ctx.k is None else None, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        x, k, tilt, *weights = ctx.saved_tensors
        draws = _Draws(x - tilt)
        if torch.is_grad_enabled():  # for a second derivative
            weights = list(draws.weights(k if ctx.k is None else ctx.k))
        return draws.covariances(weights, grad), None


def _tilt(x: Tensor, k: int | Tensor) -> Tensor:
    """b where the p sum to about k - 1/2, which is within log 2n of the k-th, at 0.

    From the sums at some points a straight line between the two nearest ones gives it, but for a tenth, and a step of Newton's
    method the rest.
    """
    reach, steps, number = 24, 47, k - 0.5
    points = torch.linspace(-reach, reach, steps + 1, dtype=x.dtype, device=x.device)
    sums = (x[..., None, :] - points[:, None]).sigmoid().sum(-1)
    right = (sums > number).sum(-1, keepdim=True).clamp(1, steps)
    less, more = sums.gather(-1, right), sums.gather(-1, right - 1)
    share = ((less - number) / (more - less).clamp(min=1e-30)).clamp(-1, 0)
    tilt = (right + share) * (2 * reach / steps) - reach
    p = (x - tilt).sigmoid()
    variance = torch.addcmul(p, p, p, value=-1).sum(-1, keepdim=True)
    excess = p.sum(-1, keepdim=True) - number
    return tilt + (excess / variance.clamp(min=1e-30)).clamp(-0.5, 0.5)


class _Draws:
    """Independent draws with the probabilities p = sigmoid(tilted): numbers of each entry and, with 1 - cos w, of each frequency.

    With z = p - q and d = 1 - 2 p q (1 - cos w), u = p + p q (z (1 - cos w) + i sin w) / d.
    """

    def __init__(self, tilted: Tensor) -> None:
        self.p, self.q, self.upper = tilted.sigmoid(), (-tilted).sigmoid(), tilted > 0
        self.both = self.p * self.q
        self.twice = (-2 * self.both)[..., None, :]
        self.z = (self.p - self.q)[..., None, :]

    def weights(self, k: int | Tensor) -> tuple[Tensor, ...]:
        """1 - cos w, sin w, real and imaginary part of the weight of each frequency, (..., L, 1); the real parts sum to 1.

        By Bernstein's inequality, the number drawn is N or more off its mean with a probability of 2 e^-20 at most (e^-40 in
        float64). The weights fall as e^(-variance (1 - cos w)): whatever the variance is, 14 (28) frequencies are enough.
        """
        nothing, most = (40.0, 28) if self.p.dtype == torch.float64 else (20.0, 14)
        variance = self.both.detach().sum(-1, keepdim=True)
        half = (nothing / 6 + 1.5 + (variance * (nothing / 2) + (nothing / 6) ** 2).sqrt()).floor()
        odd = torch.linspace(math.pi / 2, math.pi * (most - 0.5), most, dtype=half.dtype, device=half.device)
        w = (odd / half)[..., None]
        less, sine = 1 - w.cos(), w.sin()
        log_size = torch.log1p(self.twice * less).sum(-1, keepdim=True) / 2
        # where p > 1/2, the angle of the factor 1 - p + p e^(iw) is w less that of 1 - q + q e^(-iw), which is small where q is
        share = torch.where(self.upper, -self.q, self.p)[..., None, :]
        angle = torch.atan2(share * sine, 1 - share.abs() * less).sum(-1, keepdim=True)
        angle = torch.addcmul(angle, (self.upper.sum(-1, keepdim=True) - k)[..., None], w)
        size = log_size.exp() * (w < math.pi)
        real, imaginary = size * angle.cos(), size * angle.sin()
        total = real.sum(-2, keepdim=True)
        return less, sine, real / total, imaginary / total

    def means(self, weights: Sequence[Tensor]) -> Tensor:
        """The real part of ``sum_w weight u``."""
        less, sine, real, imaginary = weights
        moved = (self.z * (less * real) - sine * imaginary) / (1 + self.twice * less)
        return torch.addcmul(self.p, self.both, moved.sum(-2)).clamp(0, 1)

    def covariances(self, weights: Sequence[Tensor], grad: Tensor) -> Tensor:
        """The derivative of the means in a direction: ``sum_w weight [u_c (1 - u_c) g_c + u_c (D - mean of D)]`` with
        ``D = sum_c u_c g_c``."""
        less, sine, real, imaginary = weights
        inverse = 1 / (1 + self.twice * less)
        pull = self.both * grad
        mean = pull.sum(-1, keepdim=True) / self.both.sum(-1, keepdim=True).clamp(min=1e-30)  # which makes no difference
        grad = (grad - mean)[..., None, :]
        each = (self.both[..., None, :] * grad) * inverse
        d_real, d_imaginary = (self.z * each).sum(-1, keepdim=True) * less, each.sum(-1, keepdim=True) * sine
        d_real = d_real - (real * d_real - imaginary * d_imaginary).sum(-2, keepdim=True)
        along = real * d_real - imaginary * d_imaginary
        across = real * d_imaginary + imaginary * d_real
        own = torch.addcmul(real * (2 - less), self.z, imaginary * sine) * inverse - real
        return self.both * ((torch.addcmul(own * grad, self.z, less * along) - sine * across) * inverse).sum(-2)


# ---- samples -------------------------------------------------------------------------------------------------------------


def draw_subset(
    scores: Float[Tensor, "*batch n"], k: int, temperature: float | Tensor, generator: torch.Generator | None = None
) -> Float[Tensor, "*batch n"]:
    """A random subset of size k of each row, 0 < k < n, as zeros and ones."""
    chosen: dict[str, Any] = {} if generator is None else {"generator": generator}
    n, size = scores.shape[-1], 1 << (scores.shape[-1] - 1).bit_length()
    if kernels.serve(scores):
        uniform = torch.rand(*scores.shape[:-1], size - 1, **chosen, dtype=torch.float64, device=scores.device)
        drawn = kernels.draw(scores, k, temperature, uniform)
        if drawn is not None:
            return drawn
    ordered, order = descending(scores)
    x = relative(ordered, ordered[..., k - 1 : k], temperature)
    tilt = _tilt(x, k)
    tilted = pad((x - tilt).nan_to_num(nan=math.log(k / (n - k))), (0, size - n), value=-torch.inf)
    drawn = unsorted(_draw(tilted, k, chosen)[..., :n].to(x.dtype), order)
    return (drawn * (scores > -torch.inf) + 0 * tilt).to(scores.dtype)  # NaN in a row is there for all of it


def _draw(tilted: Tensor, k: int, chosen: dict[str, Any]) -> Tensor:
    """Independent draws with the probabilities sigmoid(tilted), which fall and sum to about k, given that there are k in all.

    From the probabilities of the numbers drawn in 2, 4, 8, … entries, the number in all is divided again and again between two
    halves. These are every other entry: so the numbers in blocks of one size have the same mean, but for 1, and few are likely.
    """
    blocks = size = tilted.shape[-1]
    counts = torch.stack([-tilted, tilted], -1).sigmoid()  # (..., blocks, how many)
    low, levels = 0, []
    while blocks > 1:
        blocks, width = blocks // 2, counts.shape[-1]
        left, right = counts[..., :blocks, :], counts[..., blocks:, :]
        products = left[..., :, None] * pad(right, (0, width))[..., None, :]
        # its rows one by one shifted to the right: at (a, j), the probability of a on the left and j - a on the right
        products = products.flatten(-2)[..., : width * (2 * width - 1)].reshape(*left.shape, 2 * width - 1)
        levels.append((products, low))
        mean = k / blocks
        reach = 10 + math.sqrt(64 + 48 * (mean * (1 - k / size) + 1))
        first, last = max(0, math.floor(mean - reach)), min(size // blocks, k, math.ceil(mean + reach))
        if blocks > 1:
            counts = products.sum(-2)[..., first - 2 * low : last + 1 - 2 * low]
        low = first
    sizes = [products.shape[-3] * products.shape[-2] for products, _ in levels]
    # the least of exponential variables over their weights is one of them with a probability like its weight
    noise = torch.rand(*tilted.shape[:-1], sum(sizes), **chosen, dtype=tilted.dtype, device=tilted.device).log()
    number = torch.full((*tilted.shape[:-1], 1), k, device=tilted.device)
    for (products, low), part in zip(levels[::-1], torch.split(noise, sizes, -1)[::-1], strict=True):
        column = (number - 2 * low if low else number)[..., None, None].expand(*products.shape[:-1], 1)
        found = (products.gather(-1, column).squeeze(-1) / part.reshape(products.shape[:-1])).argmin(-1)
        found = found + low if low else found
        number = torch.cat([found, number - found], -1)
    return number


@torch.library.custom_op(
    "anyk::draw_subset",
    mutates_args=(),
    schema="(Tensor scores, SymInt k, Tensor temperature) -> Tensor",
    tags=torch.Tag.nondeterministic_seeded,  # two calls give two samples
)
def _draw_compiled(scores: Tensor, k: int, temperature: Tensor) -> Tensor:
    """For compiled code: its tree makes no graph for each n and k."""
    return draw_subset(scores, k, temperature.to(scores.device))


@_draw_compiled.register_fake
def _(scores: Tensor, k: int, temperature: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)
