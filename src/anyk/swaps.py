"""The soft comparators: how surely two values stay in (or come into) the right order, given their difference.

A swap is a function ``value(v)`` of the scaled difference ``v = (a - b) / scale`` with ``value(v) + value(-v) = 1``: the
share of the larger output that comes from ``a``. It rises from 0 to 1 and is accurate in its lower tail, so that
``value(-v)`` never has to be formed as ``1 - value(v)``. The slope at ties, ``derivative(0)``, is finite for all of them.

The known swaps:

===============  ========================================================  ==================  ================
name             value(v)                                                  tail                slope at ties
===============  ========================================================  ==================  ================
logistic         1 / (1 + exp(-v))                                         exponential         1/4
logistic_art     logistic(sign(v) sqrt(abs(v))), scale = temperature^2     exp of the root     7.9, see below
cauchy           1/2 + atan(v) / pi                                        1 / abs(v)          1 / pi
gaussian         the normal distribution function                          Gaussian            0.40
reciprocal       (v / (2 + abs(v)) + 1) / 2                                1 / abs(v)          1/4
optimal          1/2 + v, and 1 - 1/(16 v) beyond abs(v) = 1/4             1 / abs(v)          1
===============  ========================================================  ==================  ================

logistic_art is sigmoid(d / (t abs(d)^l)) with l = 1/2, written as a function of v = d / t^2. Its slope at ties would be
unbounded; within abs(v) < 0.001 the root is rounded off.

To add one, ``register(SWAPS, "mine", Swap(…))``, see :mod:`anyk.registry`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anyk.registry import SWAPS

__all__ = ["Swap"]

# logistic_art takes the square root of differences; within this many scales of a tie the root is rounded off.
ART_ROUNDING = 1e-3


@dataclass(frozen=True)
class Swap:
    """A soft comparator.

    Args:
        value: v -> probability that the first value is the larger one.
        derivative: v -> d value / dv.
        log_tail: v -> the logarithm of a function that decays no faster than ``sqrt(value(v))`` for v -> -inf and does
            not underflow; the loss continues along it where the value itself has underflowed.
        power: the scale is ``temperature ** power``.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    log_tail: Callable[[Tensor], Tensor]
    power: float = 1.0


def _logistic_derivative(v: Tensor) -> Tensor:
    return torch.sigmoid(v) * torch.sigmoid(-v)


def _exponential_tail(v: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(v) / 2


def _signed_root(v: Tensor) -> Tensor:
    # hypot, not sqrt(v^2 + c^2): the square overflows
    return v * torch.hypot(v, v.new_full((), ART_ROUNDING)).rsqrt()


def _logistic_art(v: Tensor) -> Tensor:
    return torch.sigmoid(_signed_root(v))


def _logistic_art_derivative(v: Tensor) -> Tensor:
    length = torch.hypot(v, v.new_full((), ART_ROUNDING))
    slope = length.rsqrt() * (1 - (v / length).square() / 2)
    return _logistic_derivative(_signed_root(v)) * slope


def _logistic_art_tail(v: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(_signed_root(v)) / 2


def _cauchy(v: Tensor) -> Tensor:
    # 1/2 + atan(v)/pi without the cancellation for v -> -inf
    return torch.atan2(torch.ones_like(v), -v) / math.pi


def _cauchy_derivative(v: Tensor) -> Tensor:
    return 1 / (math.pi * (1 + v.square()))


def _gaussian(v: Tensor) -> Tensor:
    return torch.erfc(v * -math.sqrt(0.5)) / 2  # torch.special.ndtr is 0 from v = -8.3 on


def _gaussian_derivative(v: Tensor) -> Tensor:
    return torch.exp(-v.square() / 2) / math.sqrt(2 * math.pi)


def _reciprocal(v: Tensor) -> Tensor:
    tail = 1 / (2 + v.abs())
    middle = (v / (2 + v.abs()) + 1) / 2  # its slope at 0 survives autograd, the tail's does not
    return torch.where(v.abs() < 1, middle, torch.where(v < 0, tail, 1 - tail))


def _reciprocal_derivative(v: Tensor) -> Tensor:
    return (2 + v.abs()).square().reciprocal()


def _optimal(v: Tensor) -> Tensor:
    tail = 1 / (16 * v.abs().clamp(min=0.25))
    return torch.where(v.abs() <= 0.25, 0.5 + v, torch.where(v < 0, tail, 1 - tail))


def _optimal_derivative(v: Tensor) -> Tensor:
    return 1 / (16 * v.abs().clamp(min=0.25).square())


def _polynomial_tail(v: Tensor) -> Tensor:
    return -torch.log1p((-v).clamp(min=0)) / 2


SWAPS["logistic"] = Swap(torch.sigmoid, _logistic_derivative, _exponential_tail)
SWAPS["logistic_art"] = Swap(_logistic_art, _logistic_art_derivative, _logistic_art_tail, power=2.0)
SWAPS["cauchy"] = Swap(_cauchy, _cauchy_derivative, _polynomial_tail)
SWAPS["gaussian"] = Swap(_gaussian, _gaussian_derivative, _exponential_tail)
SWAPS["reciprocal"] = Swap(_reciprocal, _reciprocal_derivative, _polynomial_tail)
SWAPS["optimal"] = Swap(_optimal, _optimal_derivative, _polynomial_tail)
