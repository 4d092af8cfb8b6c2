"""LapSum: a class is among the first j as far as its score passes a threshold that lets j classes through."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from anyk import checks
from anyk.operators import ordering, running_sums, threshold
from anyk.operators.base import Inclusion, Mask, Ranks, Sort, Threshold
from anyk.operators.threshold import LAWS, Law, Solution, for_each, minus_abs


def _cdf(x: Tensor) -> Tensor:
    # below 0 the first term is e^x and the second half of it, above 0 the first is 1: no branch, all digits of what is small
    return torch.sub(x.clamp(max=0).exp(), minus_abs(x).exp(), alpha=0.5)


def _log_cdf(x: Tensor) -> tuple[Tensor, Tensor]:
    """And its derivative: 1 below the threshold, 1 / F - 1 above."""
    below = x.clamp(max=0)
    less = -0.5 * (below - x).exp()  # F is e^below (1 + less)
    return below + less.log1p(), less / (-1 - less)


LAWS["lapsum"] = Law(_cdf, minus_abs, 0.5, log_cdf=_log_cdf)


class LapSum(Inclusion, Mask, Threshold, Ranks, Sort, name="lapsum"):
    """Soft thresholds under the Laplace distribution.

    ``T_j(c) = F((s_c - b_j) / t)`` with F the Laplace distribution function and b_j such that ``sum_c T_j(c) = j``: closed
    form after sorting. ``T_n = 1``. ``P[r] = T_r - T_(r-1)``; rows sum to 1, and columns too at k = n. The mask is T_k, also
    for a real k. The ranks are ``rank_c = 1 + sum_{j != c} F((s_j - s_c) / t)``, and entry r of the sort is the threshold of
    k = r - 1/2.

    Cost: O(n log n), and O(k n) for P and for T of one class.

    Args:
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element
            or, for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``);
            an ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.LapSum().inclusion(scores, torch.tensor(1), k=3)
        tensor([0.6453, 0.9046, 1.0000])

    Reference: Struski et al., "LapSum - One Method to Differentiate Them All: Ranking, Sorting and Top-k Selection", 2025.
    """

    at_most_1 = real_k = True

    def compute_matrix(self, scores: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        temperature = for_each(checks.temperature_for(self.temperature, scores))
        rows = scores[..., None, :].to(checks.working_dtype(scores)).expand(*scores.shape[:-1], k, -1)
        inclusion = threshold.mask(rows, torch.arange(1, k + 1, device=scores.device)[:, None], temperature, "lapsum")
        return inclusion - pad(inclusion[..., :-1, :], (0, 0, 1, 0))

    def compute_product(
        self, scores: Float[Tensor, "*batch n"], values: Float[Tensor, "*batch n d"], k: int
    ) -> Float[Tensor, "*batch k d"]:
        return running_sums.product(scores, values, k, checks.temperature_for(self.temperature, scores))

    def compute_log_inclusion(
        self, scores: Float[Tensor, "*batch m"], position: Int[Tensor, "*batch"], k: int
    ) -> Float[Tensor, "*batch k"]:
        temperature = for_each(checks.temperature_for(self.temperature, scores))
        return Solution.run(scores[..., None, :], k, temperature, "lapsum", "log inclusion", position)[0]

    def compute_mask(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch n"]:
        return threshold.mask(scores, k, checks.temperature_for(self.temperature, scores), "lapsum")

    def compute_threshold(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch"]:
        return threshold.threshold(scores, k, checks.temperature_for(self.temperature, scores), "lapsum").squeeze(-1)

    def compute_ranks(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return ordering.ranks("lapsum", running_sums.ranks, scores, checks.temperature_for(self.temperature, scores))

    def compute_sort(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return ordering.sort("lapsum", running_sums.sort, scores, checks.temperature_for(self.temperature, scores))

    def kernel(self, m: int, k: int) -> tuple[Any, ...] | None:
        return ("lapsum", self.temperature) if type(self) is LapSum and not isinstance(self.temperature, Tensor) else None
