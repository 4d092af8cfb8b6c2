"""SoftSort: each rank is a softmax of the distance to the score that holds it."""

from __future__ import annotations

import torch
from torch import Tensor

from anyk import checks
from anyk.docstrings import documented
from anyk.kernels.loss_description import SOFTSORT, OperatorDescription
from anyk.operators.base import Operator, by_class, expected_sort, in_order, log_running_sum, log_running_sums


@documented
class SoftSort(Operator, name="softsort"):
    """Row-stochastic relaxation of sorting by distances.

    ``P[r] = softmax(-|s_[r] - s|^p / t)`` with s_[r] the r-th largest score. Rows sum to 1, columns need not: T can exceed
    1, and the loss then counts it as 1.

    Cost: O(n log n + k n).

    Args:
        {temperature}
        power: p, at least 1.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.SoftSort(temperature=0.1).inclusion(scores, torch.tensor(2), k=2).round()
        tensor([0., 1.])

    Reference: Prillo and Eisenschlos, "SoftSort: A Continuous Relaxation for the argsort Operator", ICML 2020.
    """

    kernel_code = SOFTSORT

    def __init__(self, temperature: float | Tensor = 1.0, power: float = 1.0) -> None:
        super().__init__(temperature)
        self.power = checks.at_least("power", power, 1)  # below 1 the slope at ties is not bounded

    @property
    def scale_power(self) -> float:  # type: ignore[override]
        """|s|^p / t = |s / t^(1/p)|^p"""
        return 1 / self.power

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power}"

    def kernel_description(self, m: int, k: int) -> OperatorDescription | str:
        return super().kernel_description(m, k) if self.power == 1 else "SoftSort has another power than 1"

    def kernel_settings(self) -> tuple[object, ...]:
        return *super().kernel_settings(), self.power

    def _sort(self, scores: Tensor, real: Tensor | None) -> Tensor:
        return expected_sort(self, scores, real)

    def _matrix(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        scores, real, classes = in_order(scores, real)
        return by_class(self._log_rows(scores, real, k).exp(), classes)

    def _log_inclusion(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        return log_running_sum(self._log_rows(scores, real, k), position)

    def _every_log_inclusion(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        return log_running_sums(self._log_rows(scores, real, k), real)

    def _log_rows(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        distance = (scores[..., :k, None] - scores[..., None, :]).abs()
        if self.power != 1:
            # The largest distance whose power is still far from overflow.
            distance = distance.clamp(max=torch.finfo(scores.dtype).max ** (0.9 / self.power)) ** self.power
        exponents = -distance
        if real is not None:
            exponents = exponents.masked_fill(~real[..., None, :], -torch.inf)
        return exponents.log_softmax(-1)
