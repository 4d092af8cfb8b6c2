"""Swaps: the formulae, accurate tails, right derivatives, bounded slopes."""

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from anyk.registry import SWAPS
from anyk.swaps import ART_ROUNDING

names = pytest.mark.parametrize("name", SWAPS)


@names
def test_value_is_the_formula(name):
    v = torch.linspace(-30, 30, 401, dtype=torch.float64)
    expected = torch.tensor([oracles.SWAPS[name](x.item()) for x in v], dtype=torch.float64)
    tolerance = 2e-3 if name == "logistic_art" else 1e-12  # the art swap is rounded off at ties
    torch.testing.assert_close(SWAPS[name].value(v), expected, rtol=0, atol=tolerance)


@names
def test_both_sides_sum_to_one(name):
    v = torch.cat([torch.linspace(-50, 50, 1001), torch.tensor([1e-30, 1e4, 1e20, 1e38])])
    value = SWAPS[name].value
    torch.testing.assert_close(value(v) + value(-v), torch.ones_like(v), rtol=0, atol=2e-7)
    assert ((value(v) >= 0) & (value(v) <= 1)).all()


@names
def test_lower_tail_keeps_its_digits(name):
    """float32 against float64 far below one half, where 1 - value(v) would have lost everything."""
    v = -torch.logspace(0, 1.1 if name == "gaussian" else 1.8, 50)
    exact = SWAPS[name].value(v.double())
    assert (exact > 0).all()
    torch.testing.assert_close(SWAPS[name].value(v).double(), exact, rtol=2e-4 if name == "gaussian" else 1e-5, atol=0)


@names
def test_derivative(name):
    swap = SWAPS[name]
    v = torch.linspace(-6, 6, 97, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(swap.value(v).sum(), v)
    torch.testing.assert_close(swap.derivative(v.detach()), slope, rtol=1e-9, atol=1e-12)
    assert gradcheck(swap.value, (torch.randn(20, dtype=torch.float64, requires_grad=True),))


@names
def test_slope_at_ties_is_bounded(name):
    v = torch.tensor([0.0, 1e-30, -1e-30, 1e-6]).requires_grad_()
    (slope,) = torch.autograd.grad(SWAPS[name].value(v).sum(), v)
    bound = 0.25 * ART_ROUNDING**-0.5 if name == "logistic_art" else 1.0
    assert (slope <= bound * (1 + 1e-6)).all()
    assert (slope > 0.2).all()


@names
def test_tail_outlives_the_value(name):
    """The continuation decays no faster than the root of the value, and is finite where the value underflows."""
    swap = SWAPS[name]
    v = -torch.logspace(-2, 2, 60, dtype=torch.float64)
    value = swap.value(v)
    assert (swap.log_tail(v)[value > 0] >= value[value > 0].log() / 2 - 1e-9).all()
    far = torch.tensor([-1e4, -1e20, -1e33]).requires_grad_()
    tail = swap.log_tail(far)
    assert tail.isfinite().all()
    (slope,) = torch.autograd.grad(tail.sum(), far)
    assert (slope >= 0).all()
    assert slope[0] > 0
