"""NeuralSort and SoftSort: their formulae, and the digits of hard rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import anyk
import oracles
from anyk.operators import Mask, Ranks
from strategies import rows

inf, nan = torch.inf, torch.nan
quick = settings(max_examples=25, deadline=None)
OPERATORS = {
    "neuralsort": anyk.NeuralSort,
    "softsort": anyk.SoftSort,
    "softsort, power 2": lambda t=1.0: anyk.SoftSort(t, power=2.0),
}
each = pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)


def dense(make, scores, k, t=1.0):
    """log P by the formulae, in n x n differences."""
    ordered, n = scores.sort(descending=True).values, scores.shape[-1]
    distances = (scores[..., :, None] - scores[..., None, :]).abs()
    if isinstance(make(), anyk.NeuralSort):
        rank = torch.arange(1, k + 1)[:, None]
        exponents = (n + 1 - 2 * rank) * scores[..., None, :] - distances.sum(-1)[..., None, :]
    else:
        exponents = -((ordered[..., :k, None] - scores[..., None, :]).abs() ** make().power)
    return (exponents / t).log_softmax(-1)


@quick
@given(rows(max_size=8), st.sampled_from([0.3, 1.0, 4.0]))
def test_neuralsort_is_its_formula(row, t):
    expected = torch.tensor(oracles.neuralsort(row.scores.tolist(), t), dtype=torch.float64)
    torch.testing.assert_close(anyk.NeuralSort(t)(row.scores, len(expected)), expected, rtol=1e-9, atol=1e-12)


@quick
@given(rows(max_size=8), st.sampled_from([0.3, 1.0, 4.0]), st.sampled_from([1.0, 1.5, 2.0]))
def test_softsort_is_its_formula(row, t, power):
    expected = torch.tensor(oracles.softsort(row.scores.tolist(), t, power), dtype=torch.float64)
    torch.testing.assert_close(anyk.SoftSort(t, power)(row.scores, len(expected)), expected, rtol=1e-9, atol=1e-12)


@each
def test_the_inclusion_is_the_running_sum_of_a_column(make):
    scores = (2 * torch.randn(6, 9, dtype=torch.double)).round()  # with ties
    scores[1, 7:] = scores[2, 0] = -inf
    sums = make()(scores, 4).cumsum(-2)
    for c in range(1, 7):
        target = torch.full((6,), c)
        torch.testing.assert_close(make().inclusion(scores, target, 4), sums[..., c], rtol=1e-9, atol=1e-12)
    assert make().inclusion(torch.zeros(1, 3), torch.tensor([0]), 3)[0, -1] == 1


@each
def test_padding_is_as_if_it_were_not_there(make):
    scores = torch.randn(3, 8, dtype=torch.double)
    scores[:, [1, 4, 5]] = -inf
    scores.requires_grad_()
    matrix, present = make()(scores, 5), scores > -inf
    alone = make()(scores.detach()[present].reshape(3, 5), 5)
    torch.testing.assert_close(matrix[..., [0, 2, 3, 6, 7]].detach(), alone)
    assert (matrix[..., [1, 4, 5]] == 0).all()
    ordered = make().sort(scores)
    torch.testing.assert_close(ordered[:, :5].detach(), make().sort(scores.detach()[present].reshape(3, 5)))
    assert (ordered[:, 5:] == -inf).all()
    for result in (matrix, ordered[:, :5], make().log_inclusion(scores, torch.tensor([0, 2, 7]), 3)):
        (grad,) = torch.autograd.grad(result.square().sum(), scores, retain_graph=True)
        assert grad.isfinite().all()
        assert (grad[~present] == 0).all()


@each
@pytest.mark.parametrize("k", [1, 3, 7])
def test_values_and_gradients_with_ties(make, k):
    """Against the n x n formula."""
    scores = (1.5 * torch.randn(5, 7, dtype=torch.double)).round().requires_grad_()
    target, weight = torch.tensor([0, 1, 2, 3, 6]), torch.rand(5, k, dtype=torch.double)
    column = dense(make, scores, k).gather(-1, target[:, None, None].expand(5, k, 1)).squeeze(-1)
    expected, actual = column.logcumsumexp(-1), make().log_inclusion(scores, target, k)
    torch.testing.assert_close(actual, expected)
    slopes = []
    for each in (actual, expected):  # by how much it changes when tied scores move together
        (slope,) = torch.autograd.grad((each * weight).sum(), scores)
        groups = [row.unique(return_inverse=True)[1] for row in scores.detach()]
        slopes.append(torch.stack([torch.zeros(7).double().index_add(0, *pair) for pair in zip(groups, slope, strict=True)]))
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("make", [anyk.NeuralSort, anyk.SoftSort])
@pytest.mark.parametrize("t", [0.1, 1.0, 30.0])
def test_float32_keeps_its_digits_beside_far_outliers(make, t):
    scores = torch.randn(50, 12)
    scores[:, :3] += torch.tensor([1e6, -1e7, 1e5])
    scores = scores[:, torch.randperm(12)]
    target = scores.topk(4).indices[:, -1]
    results = []
    for dtype in (torch.float32, torch.float64):
        own = scores.to(dtype).requires_grad_()
        log_inclusion = make(t).log_inclusion(own, target, 5)
        (grad,) = torch.autograd.grad(log_inclusion.sum(), own)
        results.append((log_inclusion.detach().float(), grad.float(), make(t)(own.detach(), 12).float()))
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5 * max(1, 1 / t))


@each
def test_a_class_that_is_hopeless_has_a_gradient(make):
    scores = torch.tensor([[0.0, -1e4, 1.0, 0.5]], requires_grad=True)
    log_inclusion = make().log_inclusion(scores, torch.tensor([1]), 2)
    assert (log_inclusion < -9e3).all()
    (grad,) = torch.autograd.grad(log_inclusion.sum(), scores)
    assert grad.isfinite().all()
    assert grad[0, 1] > 0.9
    lowest = make().log_inclusion(torch.tensor([[0.0, -3e38, 3e38, inf]]), torch.tensor([1]), 2)
    assert lowest.isfinite().all()


@each
def test_the_sort_is_the_mean_score_of_each_rank(make):
    scores = torch.randn(4, 9, dtype=torch.double)
    torch.testing.assert_close(make().sort(scores), (make()(scores, 9) @ scores[..., None]).squeeze(-1))
    torch.testing.assert_close(make(1e-8).sort(scores), scores.sort(descending=True).values)
    temperatures = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.double)
    by_row = torch.stack([make(t.item()).sort(row) for t, row in zip(temperatures, scores, strict=True)])
    torch.testing.assert_close(make(temperatures).sort(scores), by_row)
    found = make(0.01).sort(torch.tensor([1.0, inf, -inf, 2.0]))
    torch.testing.assert_close(found, torch.tensor([inf, 2.0, 1.0, -inf]))


@each
def test_derivatives(make):
    scores = torch.randn(2, 6, dtype=torch.double, requires_grad=True)
    t = torch.tensor(0.7, dtype=torch.double, requires_grad=True)
    for value in (
        lambda s, t: make(t)(s, 4),
        lambda s, t: make(t).log_inclusion(s, torch.tensor([1, 4]), 3),
        lambda s, t: make(t).sort(s),
    ):
        assert gradcheck(value, (scores, t))
        assert gradgradcheck(value, (scores, t))


@each
def test_forms_of_a_call(make):
    scores = torch.randn(4, 7)
    torch.testing.assert_close(torch.func.vmap(lambda row: make()(row, 3))(scores), make()(scores, 3))
    assert make()(scores.half(), 3).dtype == torch.float32
    torch.testing.assert_close(make()(scores.half(), 3), make()(scores.half().float(), 3))
    hard = make()(scores, 3, hard=True)
    assert torch.equal(hard, torch.nn.functional.one_hot(scores.topk(3).indices, 7).float())
    scores[1, 2] = nan
    matrix = make()(scores, 3)
    assert matrix[1].isnan().all()
    assert matrix[[0, 2, 3]].isfinite().all()


def test_what_they_cannot_do():
    for make in OPERATORS.values():
        assert not isinstance(make(), (Mask, Ranks))
    with pytest.raises(ValueError, match="power: expected a finite number of at least 1"):
        anyk.SoftSort(1.0, 0.5)
    assert "power=2.0" in repr(anyk.SoftSort(power=2.0))


def test_the_kernels_are_told_what_they_have():
    assert anyk.NeuralSort(0.5).kernel(10, 2) == ("neuralsort", 0.5)
    assert anyk.SoftSort(0.5).kernel(10, 2) == ("softsort", 0.5)
    assert anyk.SoftSort(0.5, power=2).kernel(10, 2) is None
    assert anyk.SoftSort(torch.tensor(0.5)).kernel(10, 2) is None

    class Mine(anyk.NeuralSort):
        """What a subclass computes is its own."""

    assert Mine().kernel(10, 2) is None
