"""Generalised cross-entropy: its formula, its limits, its digits; what it shares with the other losses is in test_losses.py."""

import copy
import pickle

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

import anyk
from anyk import GeneralizedCrossEntropyLoss, generalized_cross_entropy
from strategies import batch, rows


@settings(max_examples=30, deadline=None)
@given(rows(min_size=1, max_size=9), st.data())
def test_loss_is_the_formula(row, data):
    target = torch.tensor(data.draw(st.integers(0, len(row.scores) - 1)))
    q, w, t = (data.draw(st.sampled_from(values)) for values in ([0.05, 0.3, 0.7, 1.0], [0.0, 0.2, 1.0], [0.3, 1.0, 4.0]))
    p = (row.scores / t).softmax(-1)[target].item()
    expected = -w * torch.tensor(p).double().log() + (1 - w) * (1 - p**q) / q
    actual = generalized_cross_entropy(row.scores, target, q, ce_weight=w, temperature=t)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)


def test_q_0_is_cross_entropy_of_scores_over_temperature():
    scores, target = batch(dtype=torch.float64)
    for w in (0.0, 0.4):
        for smoothing in (0.0, 0.1):
            call = {"ce_weight": w, "temperature": 0.3, "label_smoothing": smoothing}
            expected = cross_entropy(scores / 0.3, target, label_smoothing=smoothing)
            torch.testing.assert_close(generalized_cross_entropy(scores, target, 0, **call), expected)
    near = generalized_cross_entropy(scores, target, 1e-8, temperature=0.3)
    torch.testing.assert_close(near, cross_entropy(scores / 0.3, target), rtol=1e-5, atol=0)


@pytest.mark.parametrize("q", [1.0, 0.3])
@pytest.mark.parametrize("lead", [-600.0, -30.0, 0.0, 30.0])
def test_all_digits_of_the_value_and_the_slope(lead, q):
    """Where p is next to 0, too, in float64."""
    scores = torch.tensor([0.0, lead, -1.0], dtype=torch.float64, requires_grad=True)
    value = generalized_cross_entropy(scores, torch.tensor(1), q)
    (gradient,) = torch.autograd.grad(value, scores)
    with mpmath.workdps(400):
        total = 1 + mpmath.exp(lead) + mpmath.exp(-1)
        p = mpmath.exp(lead) / total
        expected = [(1 - p**q) / q, -(p**q) * (1 - p)]
    rounding = 1e-15 if lead > 0 else 0  # of torch's own log_softmax
    assert value.item() == pytest.approx(float(expected[0]), rel=1e-12, abs=rounding)
    assert gradient[1].item() == pytest.approx(float(expected[1]), rel=1e-9, abs=rounding)


def test_gradients():
    scores, target = batch(rows=3, n=6, dtype=torch.float64)
    scores.requires_grad_()
    for call in ({}, {"q": 0.3, "ce_weight": 0.2, "temperature": 2.0, "label_smoothing": 0.1}, {"q": 0}, {"ce_weight": 1}):
        assert gradcheck(lambda s, call=call: generalized_cross_entropy(s, target, **call), (scores,))
        assert gradgradcheck(lambda s, call=call: generalized_cross_entropy(s, target, **call), (scores,))


def test_shapes_weights_and_ignored_rows():
    scores = torch.randn(2, 7, 3, requires_grad=True)
    target, weight = torch.randint(7, (2, 3)), torch.rand(7)
    target[0, 1] = -100
    with torch.no_grad():
        scores[0, :, 1] = torch.nan
    losses = generalized_cross_entropy(scores, target, reduction="none")
    assert losses.shape == (2, 3)
    assert losses[0, 1] == 0
    weights = torch.where(target == -100, 0, weight[target.clamp(min=0)])
    torch.testing.assert_close(generalized_cross_entropy(scores, target), losses.sum() / 5)
    value = generalized_cross_entropy(scores, target, weight=weight)
    torch.testing.assert_close(value, (losses * weights).sum() / weights.sum())
    (gradient,) = torch.autograd.grad(value, scores)
    assert gradient.isfinite().all()
    assert (gradient[0, :, 1] == 0).all()


def test_ignored_rows_where_nothing_can_be_looked_at():
    """As on a GPU: nobody asks whether there are any."""
    scores, target = torch.randn(5, 7), torch.tensor([0, -100, 3, -100, 1])
    scores[1] = torch.nan

    def gradient(scores):
        return torch.func.grad(lambda s: generalized_cross_entropy(s, target, 0.5))(scores)

    expected = torch.func.grad(lambda s: generalized_cross_entropy(s, target[[0, 2, 4]], 0.5))(scores[[0, 2, 4]])
    torch.testing.assert_close(gradient(scores)[[0, 2, 4]], expected)
    assert (gradient(scores)[[1, 3]] == 0).all()
    assert (torch.func.grad(lambda s: generalized_cross_entropy(s, torch.full((5,), -100)))(scores) == 0).all()


def test_module_is_the_function():
    scores, target = batch(rows=5, n=20)
    given = {"ce_weight": 0.4, "temperature": 2.0, "reduction": "sum", "ignore_index": 3, "weight": torch.rand(20),
             "label_smoothing": 0.1}  # fmt: skip
    criterion = GeneralizedCrossEntropyLoss(0.6, **given)
    for made in (criterion, copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert torch.equal(made(scores, target), generalized_cross_entropy(scores, target, 0.6, **given))
    criterion.q = 0.9
    assert torch.equal(criterion(scores, target), generalized_cross_entropy(scores, target, 0.9, **given))
    assert "q=0.9, ce_weight=0.4, temperature=2.0" in repr(criterion)
    assert criterion.p_k is None


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"q": 1.5}, ValueError, "q: expected a number between 0 and 1, got 1.5"),
        ({"ce_weight": -1}, ValueError, "ce_weight: expected a number between 0 and 1, got -1"),
        ({"temperature": 0}, ValueError, "temperature: expected a positive, finite number, got 0"),
        ({"label_smoothing": 0.1}, ValueError, "label_smoothing: expected 0 with ce_weight = 0, .* got 0.1"),
        ({"example_p_k": None}, TypeError, "example_p_k"),
    ],
)
def test_bad_input(settings, error, message):
    for call in (GeneralizedCrossEntropyLoss, lambda **given: anyk.generalized_cross_entropy(*batch(), **given)):
        with pytest.raises(error, match=message):
            call(**settings)
