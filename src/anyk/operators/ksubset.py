"""KSubset: the first j classes are a random j-subset, drawn with weights e^s."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from anyk import autograd, candidates, checks, kernels
from anyk.candidates import real_mask
from anyk.docstrings import documented
from anyk.kernels.loss_description import KSUBSET, OperatorDescription
from anyk.operators.base import LOG_ZERO, Operator, rows_from_inclusion
from anyk.operators.sinkhorn import logistic_threshold


@documented
class KSubset(Operator, name="ksubset"):
    """Inclusion in a random subset of size j whose weight is the product of its members' e^(s/t).

    ``T_j(c) = e^(s_c/t) E_(j-1)(others) / E_j(all)`` with E the elementary symmetric polynomials of e^(s/t). T_1 is the
    softmax. ``P[r] = T_r - T_(r-1)``; rows sum to 1, and columns too at k = n.

    Cost: O(n log n + k n) for T, O(n log n + k^2 n) for P, O(n sqrt(k)) for the mask. The native mask takes 10 to 20 passes
    over a row, whatever k is, and keeps 3 numbers per row for the backward pass, beside the scores.

    Args:
        {temperature}

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.KSubset()(scores, k=1)
        tensor([[0.0900, 0.6652, 0.2447]])

    Reference: Ahmed et al., "SIMPLE: A Gradient Estimator for k-Subset Sampling", ICLR 2023.
    """

    kernel_code = KSUBSET
    mask_code = KSUBSET

    def kernel_description(self, m: int, k: int) -> OperatorDescription | str:
        if log_subsets(m, k) > 600:  # its sums grow to the number of subsets, which float64 must hold
            return "there are too many subsets"
        return super().kernel_description(m, k)

    def _mask(self, scores: Tensor, real: Tensor | None, k: int | Tensor) -> Tensor:
        assert isinstance(k, int)
        relative, number, tilt = logistic_threshold(self, scores, real, k)
        inside = tilt.isfinite() | tilt.isnan()
        tilted = relative - torch.where(inside, tilt, 0)
        run = _Mask.apply if checks.eager(scores) else _mask_by_frequencies
        mask = run(tilted, number, _frequencies(k, scores))
        return torch.where(inside, mask, (tilt < 0).to(mask.dtype))

    def draw(self, scores: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
        """A subset of size k of each row, as a mask of zeros and ones; see :func:`anyk.sample_k_subset`."""
        scores = checks.scores(scores)
        k = checks.count("k", k, 0, scores.shape[-1], "n")
        if not scores.numel():
            return torch.zeros_like(scores)
        size = 1 << (scores.shape[-1] - 1).bit_length()
        shape = *scores.shape[:-1], size - 1
        chosen: dict[str, Any] = {} if generator is None else {"generator": generator}  # None, too, breaks dynamic shapes
        uniform = torch.rand(shape, **chosen, dtype=torch.float64, device=scores.device)
        drawn = kernels.draw(scores, k, checks.temperature(self.temperature), uniform)
        if drawn is not None:
            return drawn
        dtype = scores.dtype
        scores = scores.double().clamp(max=torch.finfo(torch.float64).max)  # +inf is a score, too; the difference of two is not
        real = real_mask(scores)
        relative, number, tilt = logistic_threshold(self, scores, real, k)
        p = torch.sigmoid(relative - torch.where(tilt.isfinite(), tilt, 0))
        p = torch.where(tilt == -torch.inf, 1.0, torch.where(tilt == torch.inf, 0.0, p))
        if real is not None:
            p = p.masked_fill(~real, 0)
        drawn = _draw(p, number.expand(*p.shape[:-1], 1).round().long(), k, uniform).to(dtype)
        return torch.where(p.isnan().any(-1, keepdim=True), torch.nan, drawn)

    def _matrix(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        return rows_from_inclusion(_inclusion_of_all(scores, real, k))

    def _log_inclusion(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        target = candidates.at(scores, position)
        rest = candidates.others(scores, position) - target[..., None]
        rest_real = None if real is None else candidates.others(real, position)
        # A single class has no others: 0 times its score keeps the constant T = 1 in the graph.
        return logsigmoid(-log_polynomial_ratios(rest, rest_real, k)) + 0 * target[..., None]


def log_subsets(n: int, k: int) -> float:
    """The logarithm of the largest number of subsets of up to k of n."""
    size = min(k, n // 2)
    return math.lgamma(n + 1) - math.lgamma(size + 1) - math.lgamma(n - size + 1)


def log_polynomial_ratios(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """log E_j - log E_(j-1) for j = 1..k, E the elementary symmetric polynomials of e^scores, scores descending.

    E_j is dominated by the product of its j largest factors. F_j = E_j / that product lies between 1 and the binomial
    coefficient, so it needs no logarithms and loses no digits, however large the scores:

        F_j(first i) = sum over l <= i of e^(s_l - s_j) F_(j-1)(first l-1)     and     the ratio is s_j + log F_j - log F_(j-1).

    Ratios past the number of real scores are LOG_ZERO: there E_j = 0.
    """
    n = scores.shape[-1]
    if n == 0:
        return scores.new_full((*scores.shape[:-1], k), LOG_ZERO)
    if scores.dtype != torch.float64 and log_subsets(n, k) > 60:  # beyond float32
        return log_polynomial_ratios(scores.double(), real, k).to(scores.dtype)
    ratios = []
    subsets = scores.new_ones(()).expand(*scores.shape[:-1], n + 1)
    for j in range(min(k, n)):
        gaps = scores[..., j:] - scores[..., j : j + 1]
        if real is not None:
            gaps = gaps.masked_fill(~real[..., j:], -torch.inf)
        weights = gaps.exp()
        grown = (weights * subsets[..., :-1]).cumsum(-1)
        if real is None:
            ratios.append(scores[..., j] + (grown[..., -1] / subsets[..., -1]).log())
        else:
            # Where the j-th score is padding, all of E_j is: keep the division's and the logarithm's slopes finite.
            exists = real[..., j]
            growth = torch.where(exists, grown[..., -1] / subsets[..., -1].clamp(min=1), 1.0)
            ratios.append(torch.where(exists, scores[..., j] + growth.log(), LOG_ZERO))
        subsets = grown
    ratios += [torch.full_like(scores[..., 0], LOG_ZERO)] * (k - n)
    return torch.stack(ratios, -1)


def _inclusion_of_all(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """T_j(c) for all classes: polynomials of the classes before c times those of the classes after c."""
    dtype, scores = scores.dtype, scores.double()  # logarithms of large sums: differences need the digits
    if real is not None:
        scores = scores.masked_fill(~real, LOG_ZERO)
    before = _log_prefix_polynomials(scores, k)
    after = [prefix.flip(-1) for prefix in _log_prefix_polynomials(scores.flip(-1), k)]
    rows = []
    for j in range(1, k + 1):
        without = torch.stack([before[a][..., :-1] + after[j - 1 - a][..., 1:] for a in range(j)]).logsumexp(0)
        rows.append((scores + without - before[j][..., -1:]).exp())
    return torch.stack(rows, -2).to(dtype)


def _log_prefix_polynomials(scores: Tensor, k: int) -> list[Tensor]:
    """log E_j of the first 0, 1, …, n scores, for j = 0..k."""
    start = torch.full_like(scores[..., :1], LOG_ZERO)
    polynomials = [torch.zeros_like(torch.cat([start, scores], -1))]
    for _ in range(k):
        terms = scores + polynomials[-1][..., :-1]
        polynomials.append(torch.cat([start, _log_prefix_sums(terms)], -1))
    return polynomials


def _log_prefix_sums(terms: Tensor) -> Tensor:
    """logcumsumexp by doubling; the built-in's second derivative is NaN where an incoming gradient is zero."""
    width, n = 1, terms.shape[-1]
    while width < n:
        shifted = torch.nn.functional.pad(terms[..., :-width], (width, 0), value=LOG_ZERO)
        terms = torch.stack([terms, shifted]).logsumexp(0)
        width *= 2
    return terms


def _frequencies(k: int, scores: Tensor) -> Tensor:
    """The frequencies 2 pi l / N, l = 0 … (N - 1) / 2, that tell the probability of k apart from those of k + N, k - N, …

    A sum S of independent Bernoulli variables with mean k has a variance of at most k (1 - k / n), and by Bernstein's
    inequality P(|S - k| >= x) <= 2 exp(-x^2 / (2 (variance + x / 3))): N is the x for which that is as good as nothing. It is
    odd, so that no frequency is pi, where 1 - p + p e^(i pi) can be 0.
    """
    n = scores.shape[-1]
    nothing = 44.0 if scores.dtype == torch.float64 else 24.0  # -log of the probability
    variance = k * (1 - k / n)
    number = math.ceil(nothing / 3 + math.sqrt((nothing / 3) ** 2 + 2 * variance * nothing))
    number = min(number, n + 1) | 1
    return torch.arange(number // 2 + 1, device=scores.device, dtype=torch.float64) * (2 * math.pi / number)


def _mask_by_frequencies(scores: Tensor, k: Tensor, frequencies: Tensor) -> Tensor:
    """The probability of each entry to be in a subset of size k, from the characteristic function of the subset's size.

    With E_k = sum over subsets of size k of e^(sum of s), and any N above what the size of a subset can reach in practice,

        E_k = 1/N sum_l e^(-i w_l k) prod_c (1 + e^(s_c + i w_l)),    w_l = 2 pi l / N.

    The mask is the gradient of log E_k by the scores: a mean over the frequencies of u_c = sigmoid(s_c + i w_l), which is
    p (p + (1 - p) e^(i w_l)) / d with p = sigmoid(s_c) and d = 1 - 2 p (1 - p) (1 - cos w_l). The scores are such that the p
    sum to k: then a few standard deviations of the size are enough for N, and no term is large.
    """
    p = torch.sigmoid(scores.double())
    mask = _mean_share(p, _inverse(p, frequencies), _weights(p, k, frequencies), frequencies)
    return mask.clamp(0, 1).to(scores.dtype)


def _inverse(p: Tensor, frequencies: Tensor) -> Tensor:
    """1 / d, (..., n, N)."""
    return 1 / (1 - (2 * p * (1 - p))[..., None] * (1 - frequencies.cos()))


def _weights(p: Tensor, k: Tensor, frequencies: Tensor) -> Tensor:
    """The complex weights of the frequencies, (..., N), whose real parts sum to 1."""
    turned = torch.polar(torch.ones_like(frequencies), frequencies)
    factors = 1 + p[..., None] * (turned - 1)
    while factors.shape[-2] > 1:  # their product
        half = factors.shape[-2] // 2
        product = factors[..., :half, :] * factors[..., half : 2 * half, :]
        factors = torch.cat([product, factors[..., 2 * half :, :]], -2)
    angle = frequencies * k.double()
    weights = factors.squeeze(-2) * torch.complex(angle.cos(), -angle.sin())
    weights = weights * torch.where(frequencies == 0, 1.0, 2.0)  # each but the first stands for its conjugate too
    return weights / weights.real.sum(-1, keepdim=True)


def _mean_share(p: Tensor, inverse: Tensor, weights: Tensor, frequencies: Tensor) -> Tensor:
    """The real part of ``sum_l weight_l u_c``."""
    turned = weights.real * frequencies.cos() - weights.imag * frequencies.sin()
    plain, turned = (inverse @ torch.stack([weights.real.expand_as(turned), turned], -1)).unbind(-1)
    return p * (p * plain + (1 - p) * turned)


class _Mask(torch.autograd.Function):
    """:func:`_mask_by_frequencies`, which keeps only its inputs.

    The mask is a gradient, so that its derivative is symmetric: what is applied to the incoming gradients g is the derivative
    in their direction, sum_l weight_l [u_c (1 - u_c) g_c + u_c (D_l - D)] with D_l = sum_c u_c g_c and D its mean.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: Tensor, frequencies: Tensor) -> Tensor:
        p = torch.sigmoid(scores.double())
        weights = _weights(p, k, frequencies)
        mask = _mean_share(p, _inverse(p, frequencies), weights, frequencies)
        ctx.save_for_backward(scores, k, frequencies, weights, mask)
        return mask.clamp(0, 1).to(scores.dtype)  # by rounding it may be a little outside

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        scores, k, frequencies, weights, mask = ctx.saved_tensors
        plain = autograd.plain_gradients(lambda scores: _mask_by_frequencies(scores, k, frequencies), [scores], [gradient])
        if plain is not None:
            return plain[0], None, None
        p, incoming = torch.sigmoid(scores.double()), gradient.double()
        inverse = _inverse(p, frequencies)
        cosine, sine = frequencies.cos(), frequencies.sin()
        q = 1 - p
        both, crossed = (torch.stack([incoming * p * p, incoming * p * q], -2) @ inverse).unbind(-2)
        along = torch.complex(both + cosine * crossed, sine * crossed)
        along = weights * (along - (weights * along).real.sum(-1, keepdim=True))
        of_others = _mean_share(p, inverse, along, frequencies)
        once, twice = (torch.polar(torch.ones_like(frequencies), angle) for angle in (frequencies, 2 * frequencies))
        squares = torch.stack([weights.real, (weights * once).real, (weights * twice).real], -1)
        first, second, third = (inverse.square_() @ squares).unbind(-1)
        of_squares = p * p * (p * p * first + 2 * p * q * second + q * q * third)
        return (of_others + (mask - of_squares) * incoming).to(scores.dtype), None, None


def _draw(p: Tensor, k: Tensor, most: int, uniform: Tensor) -> Tensor:
    """Independent draws with probabilities p, given that there are k in all: (..., n) of zeros and ones.

    From the probabilities that 0, 1, … are drawn among 1, 2, 4, … neighbours, the number in all is divided again and again
    between two halves. The depth is log2 n, and what is drawn is exact but for rounding.

    Args:
        p: probabilities that sum to k, float64.
        k: (..., 1), at most ``most``.
        most: how far the numbers need to be counted.
        uniform: (..., size - 1) random numbers between 0 and 1, one for each division; size is n, or the next power of 2.
    """
    n, size = p.shape[-1], uniform.shape[-1] + 1
    p = torch.nn.functional.pad(p.nan_to_num(nan=0.5), (0, size - n))
    counts = torch.stack([1 - p, p], -1)  # (..., blocks, how many)
    least, upmost = (p >= 1).long(), (p > 0).long()
    levels = [(counts, least, upmost)]
    while counts.shape[-2] > 1:
        left, right = counts[..., 0::2, :], counts[..., 1::2, :]
        length = left.shape[-1] + right.shape[-1] - 1
        product = torch.fft.irfft(torch.fft.rfft(left, length) * torch.fft.rfft(right, length), length)
        counts = product[..., : most + 1].clamp(min=0)
        least, upmost = least[..., 0::2] + least[..., 1::2], upmost[..., 0::2] + upmost[..., 1::2]
        levels.append((counts, least, upmost))
    number = k
    for counts, least, upmost in levels[-2::-1]:
        left, right = counts[..., 0::2, :], counts[..., 1::2, :]
        width = left.shape[-1]
        in_left = torch.arange(width, device=p.device)
        in_right = number[..., None] - in_left
        fits = (in_right >= 0) & (in_right < width)
        weights = torch.where(fits, left * right.gather(-1, in_right.clamp(0, width - 1)), 0).cumsum(-1)
        blocks = weights.shape[-2]
        level = uniform[..., blocks - 1 : 2 * blocks - 1] * weights[..., -1]
        found = (weights <= level[..., None]).sum(-1)
        # Never what is excluded, and always k in all, whatever rounding says.
        low = torch.maximum(least[..., 0::2], number - upmost[..., 1::2])
        high = torch.minimum(upmost[..., 0::2], number - least[..., 1::2])
        found = torch.minimum(torch.maximum(found, low), high)
        number = torch.stack([found, number - found], -1).flatten(-2)
    return number[..., :n]
