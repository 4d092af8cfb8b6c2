"""NeuralSort and SoftSort: each rank is a softmax over the classes; and the shape that they share with SinkhornSort."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from anyk import checks
from anyk.operators.base import Inclusion, Sort
from anyk.operators.ordering import descending, finite, unsorted
from anyk.operators.threshold import FAR, for_each, over


class LogMatrix(Inclusion, Sort):
    """P by its logarithm, for scores in descending order."""

    @abstractmethod
    def log_matrix(self, ordered: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        """log P of finite scores in descending order; padding is at the lowest number there is."""

    def precise(self, scores: Tensor) -> Tensor:
        """In the dtype to compute in."""
        return scores.to(checks.working_dtype(scores))

    def compute_matrix(self, scores: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        ordered, order = descending(self.precise(scores))
        matrix = self.log_matrix(ordered, k).exp()
        return unsorted(matrix, order[..., None, :].expand_as(matrix)).to(checks.working_dtype(scores))

    def compute_log_inclusion(
        self, scores: Float[Tensor, "*batch m"], position: Int[Tensor, "*batch"], k: int
    ) -> Float[Tensor, "*batch k"]:
        matrix = self.log_matrix(finite(self.precise(scores)), k)
        column = matrix.gather(-1, position[..., None, None].expand(*matrix.shape[:-1], 1)).squeeze(-1)
        later = torch.full((k, k), -torch.inf, dtype=column.dtype, device=column.device).triu(1)
        # a running sum, but not logcumsumexp: its second derivative is NaN where a gradient is zero
        return (column[..., None, :] + later).logsumexp(-1).to(checks.working_dtype(scores))

    def compute_sort(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """The mean score of each rank; infinite ones stay as they are."""
        ordered, _ = descending(self.precise(scores))
        infinite = ordered.abs() == torch.finfo(ordered.dtype).max
        matrix = self.log_matrix(ordered, scores.shape[-1]).exp()
        mean = (matrix * ordered.masked_fill(infinite, 0)[..., None, :]).sum(-1)  # not @, which autocast would take in half
        return torch.where(infinite, 2 * ordered.detach(), mean).to(scores.dtype)


class NeuralSort(LogMatrix, name="neuralsort"):
    """Unimodal row-stochastic relaxation of sorting.

    ``P[r] = softmax(((n + 1 - 2r) s - A) / t)`` with ``A_c = sum_j |s_c - s_j|``. Rows sum to 1, columns need not: T can
    exceed 1, and the loss then counts it as 1.

    Cost: O(n log n + k n).

    Args:
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element
            or, for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``);
            an ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.NeuralSort(temperature=0.1)(scores, k=2).round()
        tensor([[0., 1., 0.],
                [0., 0., 1.]])

    Reference: Grover et al., "Stochastic Optimization of Sorting Networks via Continuous Relaxations", ICLR 2019.
    """

    def log_matrix(self, ordered: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        # Between places c and c + 1, the exponents of rank r rise by (2r - 1 - 2c) times the gap of the scores. Summed from
        # place r outwards, all terms have one sign: no digit is lost, and n x n differences are not needed.
        gaps = (ordered[..., :-1] - ordered[..., 1:]).clamp(max=FAR)
        gaps = over(gaps, checks.temperature_for(self.temperature, ordered))[..., None, :]
        place = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
        factor = 2 * place[:k, None] - 1 - 2 * place[:-1]
        after = pad((gaps * factor.clamp(max=0)).cumsum(-1), (1, 0))
        before = pad((gaps * factor.clamp(min=0)).flip(-1).cumsum(-1).flip(-1), (0, 1))
        return (after - before).log_softmax(-1)

    def kernel(self, m: int, k: int) -> tuple[Any, ...] | None:
        served = type(self) is NeuralSort and not isinstance(self.temperature, Tensor)
        return ("neuralsort", self.temperature) if served else None


class SoftSort(LogMatrix, name="softsort"):
    """Row-stochastic relaxation of sorting by distances.

    ``P[r] = softmax(-|s_[r] - s|^p / t)`` with s_[r] the r-th largest score. Rows sum to 1, columns need not: T can exceed
    1, and the loss then counts it as 1.

    Cost: O(n log n + k n).

    Args:
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element
            or, for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``);
            an ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.
        power: p, at least 1.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.SoftSort(temperature=0.1).inclusion(scores, torch.tensor(2), k=2).round()
        tensor([0., 1.])

    Reference: Prillo and Eisenschlos, "SoftSort: A Continuous Relaxation for the argsort Operator", ICML 2020.
    """

    def __init__(self, temperature: float | Tensor = 1.0, power: float = 1.0) -> None:
        super().__init__(temperature)
        self.power = checks.at_least("power", power, 1)  # below 1 the slope at ties is not bounded

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power}"

    def log_matrix(self, ordered: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        distances = (ordered[..., :k, None] - ordered[..., None, :]).abs().clamp(max=FAR ** (1 / self.power)) ** self.power
        return over(-distances, for_each(checks.temperature_for(self.temperature, ordered))).log_softmax(-1)

    def kernel(self, m: int, k: int) -> tuple[Any, ...] | None:
        served = type(self) is SoftSort and self.power == 1 and not isinstance(self.temperature, Tensor)
        return ("softsort", self.temperature) if served else None
