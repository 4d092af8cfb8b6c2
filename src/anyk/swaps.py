"""The soft comparators: how surely two values stay in (or come into) the right order, given their difference.

A swap is a function ``value(v)`` of the scaled difference ``v = (a - b) / scale`` with ``value(v) + value(-v) = 1``: the
share of the larger output that comes from ``a``. It rises from 0 to 1 and is accurate in its lower tail, so that
``value(-v)`` never has to be formed as ``1 - value(v)``. The slope at ties, ``derivative(0)``, is finite for all of them.

To add one, ``anyk.swaps.SWAPS["mine"] = anyk.swaps.Swap(…)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from anyk.kernels.abi import ART_ROUNDING

__all__ = ["SWAPS", "Swap"]


@dataclass(frozen=True)
class Swap:
    """A soft comparator.

    Args:
        value: v -> probability that the first value is the larger one.
        derivative: v -> d value / dv, an even function, accurate for v <= 0.
        log_tail: v -> the logarithm of a function that decays no faster than ``sqrt(value(v))`` for v -> -inf and does
            not underflow; the loss continues along it where the value itself has underflowed.
        power: the scale is ``temperature ** power``.
        heavy: whether ``v * value(-v)`` does not vanish for v -> inf, so that a value moves by as much beside one far away.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    log_tail: Callable[[Tensor], Tensor]
    power: float = 1.0
    heavy: bool = True


def _logistic_derivative(v: Tensor) -> Tensor:
    value = torch.sigmoid(v)
    return torch.addcmul(value, value, value, value=-1)


def _exponential_tail(v: Tensor) -> Tensor:
    return logsigmoid(v) / 2


def _polynomial_tail(v: Tensor) -> Tensor:
    return -torch.log1p((-v).clamp(min=0)) / 2


def _length(v: Tensor) -> Tensor:
    return torch.hypot(v, v.new_full((), ART_ROUNDING))  # not sqrt(v^2 + c^2): the square overflows


def _signed_root(v: Tensor) -> Tensor:
    """logistic_art is sigmoid(d / (t abs(d)^l)), l = 1/2, as a function of v = d / t^2, rounded off at ties for a finite slope."""
    return v * _length(v).rsqrt()


def _logistic_art_derivative(v: Tensor) -> Tensor:
    length = _length(v)
    return _logistic_derivative(_signed_root(v)) * length.rsqrt() * (1 - (v / length).square() / 2)


def _cauchy(v: Tensor) -> Tensor:
    return torch.atan2(torch.ones_like(v), -v) / math.pi  # 1/2 + atan(v)/pi without the cancellation for v -> -inf


def _gaussian(v: Tensor) -> Tensor:
    return torch.erfc(v * -math.sqrt(0.5)) / 2  # torch.special.ndtr is 0 from v = -8.3 on


def _reciprocal(v: Tensor) -> Tensor:
    """(v / (2 + abs(v)) + 1) / 2"""
    tail = 1 / (2 + v.abs())
    middle = (v * tail + 1) / 2  # its slope at 0 survives autograd, the tail's does not
    return torch.where(v.abs() < 1, middle, torch.where(v < 0, tail, 1 - tail))


def _optimal(v: Tensor) -> Tensor:
    """1/2 + v, and 1 - 1/(16 v) beyond abs(v) = 1/4"""
    tail = 1 / (16 * v.abs().clamp(min=0.25))
    return torch.where(v.abs() <= 0.25, 0.5 + v, torch.where(v < 0, tail, 1 - tail))


SWAPS = {
    "logistic": Swap(torch.sigmoid, _logistic_derivative, _exponential_tail, heavy=False),
    "logistic_art": Swap(
        value=lambda v: torch.sigmoid(_signed_root(v)),
        derivative=_logistic_art_derivative,
        log_tail=lambda v: _exponential_tail(_signed_root(v)),
        power=2.0,
        heavy=False,
    ),
    "cauchy": Swap(_cauchy, lambda v: 1 / (math.pi * (1 + v.square())), _polynomial_tail),
    "gaussian": Swap(_gaussian, lambda v: torch.exp(-v.square() / 2) / math.sqrt(2 * math.pi), _exponential_tail, heavy=False),
    "reciprocal": Swap(_reciprocal, lambda v: (2 + v.abs()).square().reciprocal(), _polynomial_tail),
    "optimal": Swap(_optimal, lambda v: 1 / (16 * v.abs().clamp(min=0.25).square()), _polynomial_tail),
}
"""The known ones by name."""
