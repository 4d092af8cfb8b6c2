"""What holds for P and T of every operator, and for operators as modules; names, abilities, bad input."""

import copy
import pickle

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyk
from anyk.operators import OPERATORS, Inclusion, Mask, Operator, by_name, register
from anyk.swaps import SWAPS
from strategies import is_doubly_stochastic, name, operators, rows

every_operator = pytest.mark.parametrize("operator", operators(), ids=name)
inf, nan = torch.inf, torch.nan


def scores_of(*shape, dtype=torch.double, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


@every_operator
@settings(max_examples=6, deadline=None)
@given(row=rows(min_size=2, max_size=9), data=st.data())
def test_p_and_t_are_probabilities(operator, row, data):
    n = len(row.scores)
    k, target = data.draw(st.integers(1, n)), torch.tensor(data.draw(st.integers(0, n - 1)))
    matrix, inclusion = operator(row.scores, k), operator.inclusion(row.scores, target, k)
    assert matrix.shape == (k, n)
    assert (matrix >= -1e-12).all()
    assert inclusion.shape == (k,)
    assert (inclusion.diff() >= -1e-12).all()
    torch.testing.assert_close(matrix.cumsum(0)[:, target], inclusion, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(operator.inclusion(row.scores + 17.0, target, k), inclusion, rtol=1e-9, atol=1e-9)
    if getattr(operator, "wires", None) != "target":
        torch.testing.assert_close(matrix.sum(-1), torch.ones(k, dtype=torch.double), rtol=0, atol=1e-7)
    if is_doubly_stochastic(operator):
        torch.testing.assert_close(operator(row.scores, n).sum(0), torch.ones(n, dtype=torch.double), rtol=0, atol=1e-7)
        assert (inclusion <= 1 + 1e-9).all()
    if operator.at_most_1:
        assert (inclusion <= 1).all()


@pytest.mark.parametrize("operator", operators(1e-5), ids=name)
@settings(max_examples=4, deadline=None)
@given(row=rows(min_size=2, max_size=9, min_gap=0.2))
def test_the_cold_limit_is_sorting(operator, row):
    n = len(row.scores)
    expected = torch.zeros(n, n, dtype=torch.double)
    expected[torch.arange(n), torch.tensor(row.order)] = 1
    heavy = getattr(operator, "swap", "") in ("cauchy", "reciprocal", "optimal")
    torch.testing.assert_close(operator(row.scores, n), expected, rtol=0, atol=3e-3 if heavy else 1e-6)


@pytest.mark.parametrize("operator", operators(wires=("target",)), ids=name)
def test_t_does_not_depend_on_the_order_of_the_classes(operator):
    scores, target, order = scores_of(4, 9), torch.tensor([0, 4, 8, 2]), torch.randperm(9)
    moved = (order == target[:, None]).nonzero()[:, 1]
    torch.testing.assert_close(operator.inclusion(scores[:, order], moved, 5), operator.inclusion(scores, target, 5))


@every_operator
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_padded_row_is_the_shorter_row_and_ties_have_one_running_sum(operator, dtype):
    scores, place = scores_of(5, 9, seed=4).to(dtype), torch.tensor([1, 2, 3, 4, 7, 8, 9, 10, 12])
    scores[:, 3] = scores[:, 5]
    padded = torch.full((5, 13), -inf, dtype=dtype).index_copy(1, place, scores).requires_grad_()
    matrix, inclusion = operator(padded, 4), operator.inclusion(padded, place[torch.arange(5)], 4)
    assert matrix.dtype == inclusion.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(matrix[..., place], operator(scores, 4))
    torch.testing.assert_close(inclusion, operator.inclusion(scores, torch.arange(5), 4))
    column = matrix.cumsum(-2).gather(-1, place[torch.arange(5)][:, None, None].expand(5, 4, 1)).squeeze(-1)
    torch.testing.assert_close(column, inclusion, rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-5)
    hidden = [c for c in range(13) if c not in place]
    assert (matrix[..., hidden] == 0).all()
    (gradient,) = torch.autograd.grad(matrix.square().sum() + inclusion.sum(), padded)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()
    assert (gradient[:, hidden] == 0).all()
    with pytest.raises(ValueError, match="scores: expected at least k = 3 classes above -inf in every row, got 2"):
        operator(torch.tensor([[0.0, 1.0, -inf, -inf]]), 3)


@every_operator
def test_batch_dimensions_are_free(operator):
    scores, target = scores_of(2, 3, 4, 7, dtype=torch.float32), torch.randint(7, (2, 3, 4))
    matrix, inclusion = operator(scores, 3), operator.inclusion(scores, target, 3)
    torch.testing.assert_close(matrix[1, 2, 3], operator(scores[1, 2, 3], 3))
    torch.testing.assert_close(inclusion[1, 2, 3], operator.inclusion(scores[1, 2, 3], target[1, 2, 3], 3))
    assert operator(scores[:0], 3).shape == (0, 3, 4, 3, 7)
    assert operator.inclusion(scores[:0], target[:0], 3).shape == (0, 3, 4, 3)
    for alone in (operator.inclusion(torch.tensor([0.3]), torch.tensor(0), 1), operator(torch.tensor([0.3]), 1)):
        assert alone.item() == pytest.approx(1)


@every_operator
def test_hard_rows_are_a_permutation_with_the_soft_gradient(operator):
    scores, weights = scores_of(3, 6, dtype=torch.float32).requires_grad_(), scores_of(3, 4, 6, dtype=torch.float32)
    hard = operator(scores, 4, hard=True)
    assert torch.equal(hard.detach(), torch.nn.functional.one_hot(scores.topk(4).indices, 6).float())
    (through,) = torch.autograd.grad((hard * weights).sum(), scores)
    torch.testing.assert_close(through, torch.autograd.grad((operator(scores, 4) * weights).sum(), scores)[0])


@every_operator
def test_the_product_with_values_is_that_of_the_matrix(operator):
    scores, values = scores_of(3, 7).requires_grad_(), scores_of(3, 7, 2, seed=1)
    actual, expected = operator.compute_product(scores, values, 4), operator(scores, 4) @ values
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(each.square().sum(), scores)[0] for each in (actual, expected)]
    torch.testing.assert_close(*gradients)


def at(operator, temperature):
    """A copy with this temperature."""
    other = copy.deepcopy(operator)
    del other.temperature
    Operator.__init__(other, temperature)
    return other


@every_operator
def test_temperatures_divide_the_scores_and_can_be_learned(operator):
    scores, target = scores_of(4, 6), torch.tensor([0, 5, 2, 3])
    power = SWAPS[operator.swap].power if hasattr(operator, "swap") else 1 / getattr(operator, "power", 1)
    warm = at(operator, 2.0).inclusion(scores * 2.0**power, target, 3)
    torch.testing.assert_close(warm, operator.inclusion(scores, target, 3))
    learned = at(operator, torch.nn.Parameter(torch.tensor(1.3, dtype=torch.double)))
    learned.inclusion(scores, target, 3).sum().backward()
    assert [each for each, _ in learned.named_parameters()] == ["temperature"]
    hotter, colder = (at(operator, 1.3 + step).inclusion(scores, target, 3).sum() for step in (1e-5, -1e-5))
    torch.testing.assert_close(learned.temperature.grad, (hotter - colder) / 2e-5, rtol=1e-5, atol=1e-7)


@every_operator
def test_modules_are_copied_saved_and_shown(operator):
    scores, target = scores_of(4, 6), torch.tensor([0, 5, 2, 3])
    for copied in (copy.deepcopy(operator), pickle.loads(pickle.dumps(operator))):
        torch.testing.assert_close(copied.inclusion(scores, target, 3), operator.inclusion(scores, target, 3))
    buffer, fresh = at(operator, torch.tensor(0.5)), at(operator, torch.tensor(9.0))
    fresh.load_state_dict(buffer.state_dict())
    assert fresh.temperature == 0.5
    assert buffer.double().temperature.dtype == torch.double
    assert "temperature=tensor" in repr(fresh)
    assert "temperature=1.0" in repr(operator)


def test_a_temperature_that_an_optimiser_has_made_negative():
    learned = anyk.LapSum(torch.nn.Parameter(torch.tensor(0.5)))
    learned.temperature.data.fill_(-0.5)
    with pytest.raises(ValueError, match=r"temperature: expected positive, finite numbers, got -0\.5"):
        learned.inclusion(torch.zeros(4), torch.tensor(0), 2)


def test_numpy_numbers_are_numbers():
    assert anyk.LapSum(numpy.float32(0.5)).temperature == 0.5
    assert anyk.LapSum()(torch.zeros(4), numpy.int64(2)).shape == (2, 4)


def test_an_operator_of_ones_own_by_its_name():
    class Even(Mask, name="even for this test"):
        """k / n everywhere."""

        def compute_mask(self, scores, k):
            return torch.full_like(scores, k / scores.shape[-1])

    try:
        assert anyk.soft_topk(torch.zeros(4), 1, "even for this test").tolist() == [0.25] * 4
        with pytest.raises(TypeError, match="operator: Even has no ranks: expected one of LapSum, Permutahedron"):
            anyk.soft_rank(torch.zeros(4), "even for this test")
        with pytest.raises(ValueError, match="name: expected one that is free, got 'lapsum'"):
            register("lapsum", Even)
    finally:
        del OPERATORS["even for this test"]


S, Y = torch.zeros(2, 4), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (Inclusion, TypeError, "abstract"),
        (lambda: anyk.SoftSort(0.0), ValueError, "temperature: expected a positive, finite number, got 0"),
        (lambda: anyk.KSubset(torch.tensor(-2.0)), ValueError, "temperature: .* got -2"),
        (lambda: anyk.LapSum(torch.ones(3)).mask(S, 2), ValueError, r"temperature: expected one number, or the shape"),
        (lambda: anyk.KSubset("auto"), TypeError, "temperature: expected a positive, finite number, got 'auto'"),
        (lambda: anyk.LapSum()(S, 5), ValueError, "k: expected 1 <= k <= the number of classes = 4, got 5"),
        (lambda: anyk.LapSum()(S, 1.5), TypeError, "k: expected an integer, got 1.5"),
        (lambda: anyk.LapSum()(S.long(), 1), TypeError, "scores: expected a floating-point tensor, got dtype torch.int64"),
        (lambda: anyk.LapSum()(torch.tensor(1.0), 1), ValueError, "scores: expected at least one class"),
        (lambda: anyk.LapSum().inclusion(S, Y[:1], 1), ValueError, r"target: expected shape \(2,\) .* got \(1,\)"),
        (lambda: anyk.LapSum().inclusion(S, Y + 3, 1), ValueError, "target: .* from 0 to 3, got 4"),
        (lambda: by_name("nope"), ValueError, "operator: expected one of .*'lapsum'.* got 'nope'"),
        (lambda: by_name(0.1), TypeError, "operator: expected .*, got 0.1; a temperature is given as temperature="),
        (lambda: by_name(anyk.LapSum), TypeError, "operator: expected .*, got the class LapSum"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
