"""KSubset: the first j classes are a random j-subset, drawn with weights e^s."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from anyk import candidates
from anyk.docstrings import documented
from anyk.kernels.loss_description import KSUBSET, OperatorDescription
from anyk.operators.base import LOG_ZERO, Operator, rows_from_inclusion


@documented
class KSubset(Operator, name="ksubset"):
    """Inclusion in a random subset of size j whose weight is the product of its members' e^(s/t).

    ``T_j(c) = e^(s_c/t) E_(j-1)(others) / E_j(all)`` with E the elementary symmetric polynomials of e^(s/t). T_1 is the
    softmax. ``P[r] = T_r - T_(r-1)``; rows sum to 1, and columns too at k = n.

    Cost: O(n log n + k n) for T, O(n log n + k^2 n) for P.

    Args:
        {temperature}

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.KSubset()(scores, k=1)
        tensor([[0.0900, 0.6652, 0.2447]])
    """

    kernel_code = KSUBSET

    def kernel_description(self, m: int, k: int) -> OperatorDescription | str:
        if log_subsets(m, k) > 600:  # its sums grow to the number of subsets, which float64 must hold
            return "there are too many subsets"
        return super().kernel_description(m, k)

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
