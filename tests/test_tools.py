"""Masks, ranks, sorts, quantiles and samples: what must hold for every operator that has them, and slow, obvious references."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from scipy.stats import chi2

import anyk
from anyk.operators import permutahedron
from anyk.operators.base import has

OPERATORS = {
    "lapsum": anyk.LapSum,
    "permutahedron": anyk.Permutahedron,
    "ksubset": anyk.KSubset,
    "sinkhorn": anyk.SinkhornSort,
    "splitter": lambda t=1.0: anyk.SortingNetwork("splitter", t),
    "bitonic": lambda t=1.0: anyk.SortingNetwork("bitonic", t),
}
REAL_K = ["lapsum", "permutahedron", "sinkhorn"]
each = pytest.mark.parametrize("name", OPERATORS)
each_real = pytest.mark.parametrize("name", REAL_K)
inf, nan = torch.inf, torch.nan


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def bisected(scores, k, value):
    """The mask with a threshold, by bisection in float64."""
    scores = scores.double()
    low, high = scores.min() - 2000, scores.max() + 2000
    for _ in range(200):
        b = (low + high) / 2
        low, high = (b, high) if value(scores - b).sum() > k else (low, b)
    return value(scores - b)


def laplace(x):
    return torch.where(x < 0, x.clamp(max=0).exp() / 2, 1 - (-x.clamp(min=0)).exp() / 2)


def enumerated(scores, k):
    """The inclusion probabilities of all subsets."""
    subsets = torch.tensor(list(itertools.combinations(range(len(scores)), k)))
    chosen = torch.zeros(len(subsets), len(scores), dtype=torch.double).scatter(1, subsets, 1)
    return (chosen @ scores.double()).softmax(0) @ chosen


REFERENCES = {
    "lapsum": lambda scores, k: bisected(scores, k, laplace),
    "sinkhorn": lambda scores, k: bisected(scores, k, torch.sigmoid),
    "permutahedron": lambda scores, k: bisected(scores, k, lambda x: x.clamp(0, 1)),
    "ksubset": enumerated,
}

rows = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=9)
temperatures = st.sampled_from([0.05, 0.7, 1.0, 20.0])


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), row=rows, temperature=temperatures)
def test_masks_against_slow_references(name, data, row, temperature):
    scores = torch.tensor(row)
    k = data.draw(st.integers(1, len(row) - 1))
    actual = OPERATORS[name](temperature).mask(scores, k).double()
    torch.testing.assert_close(actual, REFERENCES[name](scores.double() / temperature, k), rtol=1e-5, atol=2e-6)


@each_real
@settings(max_examples=30, deadline=None)
@given(row=rows, share=st.floats(0.01, 0.99), temperature=temperatures)
def test_masks_for_a_real_k(name, row, share, temperature):
    scores, k = torch.tensor(row), share * len(row)
    expected = REFERENCES[name](scores.double() / temperature, k)
    for given_k in (k, torch.tensor(k, dtype=torch.double)):
        torch.testing.assert_close(OPERATORS[name](temperature).mask(scores, given_k).double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["splitter", "bitonic", "odd_even"])
def test_the_mask_of_a_network_is_the_sum_of_its_rows(kind):
    scores = torch.randn(5, 21)
    expected = anyk.SortingNetwork(kind, wires="sorted")(scores, 4).sum(-2)
    torch.testing.assert_close(anyk.SortingNetwork(kind).mask(scores, 4), expected)


HARD_ROWS = {
    "ties": torch.zeros(2, 7),
    "two groups": torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]),
    "gaps": torch.tensor([[0.0, 1e6, -1e6, 3e6, 5.0, 4.0, -2e6]]),
    "offset": 1e6 + torch.tensor([[0.0, 1.0, -1.0, 3.0, 5.0, 4.0, -2.0]]),
    "negative offset": -1e6 + torch.tensor([[0.0, 1.0, -1.0, 3.0, 5.0, 4.0, -2.0]]),
    "wide": torch.linspace(-400, 400, 41)[None],
    "padding": torch.tensor([[0.0, -inf, 1.0, 2.0, -inf, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]),
}


@each
@pytest.mark.parametrize("kind", HARD_ROWS)
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
def test_masks_of_hard_rows(name, kind, temperature):
    scores = HARD_ROWS[kind].clone().requires_grad_()
    n = scores.shape[-1]
    number = (scores > -inf).sum(-1)
    for k in range(n + 1):
        mask = OPERATORS[name](temperature).mask(scores, k)
        assert bool(((mask >= 0) & (mask <= 1 + 1e-6)).all())
        torch.testing.assert_close(mask.sum(-1), number.clamp(max=k).float(), rtol=1e-5, atol=1e-5)
        assert bool((mask[scores == -inf] == 0).all())
        (gradient,) = torch.autograd.grad((mask * torch.linspace(-1, 1, n)).sum(), scores)
        assert bool(gradient.isfinite().all())
        assert bool((gradient[scores == -inf] == 0).all())


@each
def test_shapes_and_dtypes(name):
    operator = OPERATORS[name]()
    assert operator.mask(torch.randn(0, 5), 2).shape == (0, 5)
    torch.testing.assert_close(operator.mask(torch.randn(3, 1), 1), torch.ones(3, 1))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        scores = torch.randn(3, 6).to(dtype).requires_grad_()
        mask = anyk.soft_topk(scores, 2, operator)
        assert mask.dtype == dtype
        mask.square().sum().backward()
        assert scores.grad.dtype == dtype
        torch.testing.assert_close(mask.float(), operator.mask(scores.float(), 2), rtol=0.01, atol=0.01)
    scores = torch.randn(4, 6, 5).transpose(0, 2)
    for dim in (0, 1, -1, -2):
        expected = operator.mask(scores.movedim(dim, -1).contiguous(), 2).movedim(-1, dim)
        torch.testing.assert_close(anyk.soft_topk(scores, 2, operator, dim=dim), expected)
    torch.testing.assert_close(anyk.soft_topk(scores, 2, operator, largest=False), anyk.soft_topk(-scores, 2, operator))


@each
def test_permuting_the_scores_permutes_the_mask(name):
    scores = torch.randn(1, 12).round(decimals=0)  # with ties
    order = torch.randperm(12)
    operator = OPERATORS[name]()
    torch.testing.assert_close(operator.mask(scores[:, order], 5), operator.mask(scores, 5)[:, order])


@each
def test_nan_makes_its_row_nan_and_no_other(name):
    scores = torch.randn(3, 6)
    scores[1, 2] = nan
    for result in (
        anyk.soft_topk(scores, 2, name),
        anyk.soft_topk(scores, 2, name, hard=True),
        *([anyk.soft_rank(scores, name)] if has(type(OPERATORS[name]()), "ranks") else []),
        *([anyk.soft_sort(scores, name)] if has(type(OPERATORS[name]()), "sort") else []),
    ):
        assert bool(result[1].isnan().all())
        assert bool(result[[0, 2]].isfinite().all())


@each
def test_hard_is_exactly_k_hot_with_the_soft_gradient(name):
    scores = torch.tensor([[1.0, 1.0, 1.0, 0.0, 2.0]], requires_grad=True)
    mask = anyk.soft_topk(scores, 2, name, hard=True)
    assert mask.tolist() == [[1, 0, 0, 0, 1]]
    weight = torch.randn(5)
    (hard,) = torch.autograd.grad((mask * weight).sum(), scores)
    (soft,) = torch.autograd.grad((anyk.soft_topk(scores, 2, name) * weight).sum(), scores)
    torch.testing.assert_close(hard, soft)
    few = torch.tensor([[1.0, -inf, -inf, 0.0, -inf]])
    assert anyk.soft_topk(few, 3, name, hard=True).tolist() == [[1, 0, 0, 1, 0]]


@each
@pytest.mark.parametrize("k", [2, 5])
def test_gradients(name, k):
    scores = torch.randn(2, 7, dtype=torch.double, requires_grad=True)
    temperature = torch.tensor(0.8, dtype=torch.double, requires_grad=True)

    def mask(scores, temperature):
        return OPERATORS[name](temperature).mask(scores, k)

    assert torch.autograd.gradcheck(mask, (scores, temperature))
    assert torch.autograd.gradgradcheck(mask, (scores, temperature))


@each_real
def test_gradients_of_k(name):
    scores = torch.randn(3, 7, dtype=torch.double, requires_grad=True)
    k = torch.tensor([1.3, 4.0, 5.9], dtype=torch.double, requires_grad=True)
    operator = OPERATORS[name](1.7)
    assert torch.autograd.gradcheck(operator.mask, (scores, k))
    assert torch.autograd.gradgradcheck(operator.mask, (scores, k))
    (of_k,) = torch.autograd.grad(anyk.soft_topk(torch.tensor([[0.0, 1e5, 2e5]]), k[:1].float(), name).sum(), k)
    assert bool(of_k.isfinite().all())


@each
def test_vmap_and_compile_give_the_same(name):
    scores = torch.randn(4, 9)
    expected = anyk.soft_topk(scores, 3, name)
    torch.testing.assert_close(torch.func.vmap(lambda row: anyk.soft_topk(row, 3, name))(scores), expected)
    compiled = torch.compile(lambda scores: anyk.soft_topk(scores, 3, name), fullgraph=True, backend="aot_eager")
    scores.requires_grad_()
    torch.testing.assert_close(compiled(scores), expected)
    weight = torch.randn(4, 9)
    (actual,) = torch.autograd.grad((compiled(scores) * weight).sum(), scores)
    (plain,) = torch.autograd.grad((anyk.soft_topk(scores, 3, name) * weight).sum(), scores)
    torch.testing.assert_close(actual, plain)


def test_where():
    scores, where = torch.randn(3, 8), torch.rand(3, 8) > 0.4
    masked = scores.masked_fill(~where, -inf)
    torch.testing.assert_close(anyk.soft_topk(scores, 2, where=where), anyk.soft_topk(masked, 2))
    torch.testing.assert_close(anyk.soft_rank(scores, where=where), anyk.soft_rank(masked))
    smallest = anyk.soft_topk(scores, 2, where=where, largest=False)
    assert bool((smallest[~where] == 0).all())
    alone = [anyk.soft_quantile(row[keep], 0.3) for row, keep in zip(scores, where, strict=True)]
    torch.testing.assert_close(anyk.soft_quantile(scores, 0.3, where=where), torch.stack(alone))
    ordered = anyk.soft_sort(scores, where=where, temperature=1e-3)
    for row, keep, result in zip(scores, where, ordered, strict=True):
        torch.testing.assert_close(result[: keep.sum()], row[keep].sort(descending=True).values)


RANKED = ["lapsum", "permutahedron", "sinkhorn", "splitter"]


@pytest.mark.parametrize("name", RANKED)
def test_ranks(name):
    scores = torch.randn(3, 11)
    soft = anyk.soft_rank(scores, name)
    torch.testing.assert_close(soft.sum(-1), torch.full((3,), 66.0))
    if name in ("lapsum", "permutahedron"):
        apart = torch.stack([torch.randperm(11) for _ in range(3)]).float()  # no two nearly equal
        torch.testing.assert_close(anyk.soft_rank(apart, name, temperature=1e-2), 11 - apart)
        torch.testing.assert_close(anyk.soft_rank(scores, name, descending=False), 12 - soft)
    padded = torch.tensor([3.0, -inf, 1.0, -inf, 2.0])
    ranks = anyk.soft_rank(padded, name)
    assert ranks[[1, 3]].tolist() == [4, 5]
    torch.testing.assert_close(ranks[[0, 2, 4]], anyk.soft_rank(padded[[0, 2, 4]], name))
    double = scores.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: anyk.soft_rank(s, name), (double,))
    assert anyk.soft_rank(scores.half(), name).dtype == torch.float32


def test_laplace_ranks_against_all_pairs():
    for spread in (1.0, 50.0, 1e4):  # running sums, and where e to the spread is no number
        scores = spread * torch.randn(2, 33, dtype=torch.double)
        pairs = laplace(scores[:, None, :] - scores[:, :, None]).sum(-1) + 0.5
        torch.testing.assert_close(anyk.soft_rank(scores), pairs)
    double = torch.randn(2, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(anyk.soft_rank, (double,))
    assert torch.autograd.gradcheck(lambda s: anyk.soft_rank(1e3 * s), (double,))


@settings(max_examples=100, deadline=None)
@given(row=st.lists(st.integers(-5, 5), min_size=1, max_size=40))
def test_isotonic_regression(row):
    values = torch.tensor([row, row[::-1]], dtype=torch.double)
    expected = torch.tensor(np.stack([isotonic_regression(each.numpy()).x for each in values]))
    torch.testing.assert_close(permutahedron._pool(values), expected)
    torch.testing.assert_close(permutahedron._mean(values, *permutahedron._blocks(values, None)), expected)


@pytest.mark.parametrize("name", ["permutahedron", "sinkhorn", "softsort", "neuralsort"])
def test_sorts(name):
    scores = torch.randn(3, 8)
    hard = anyk.soft_sort(scores, name, temperature=1e-3)
    torch.testing.assert_close(hard, scores.sort(descending=True).values, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(anyk.soft_sort(scores, name, descending=False), -anyk.soft_sort(-scores, name))
    assert torch.autograd.gradcheck(lambda s: anyk.soft_sort(s, name), (scores.double().requires_grad_(),))


def test_the_sparse_sort_against_its_definition():
    """The projection of (n, …, 1) / t onto the permutahedron of the scores: the nearest point of it."""
    scores = torch.randn(5, dtype=torch.double)
    goal = torch.arange(5, 0, -1).double() / 2.0
    found = anyk.soft_sort(scores, temperature=2.0)
    vertices = torch.stack([scores[list(order)] for order in itertools.permutations(range(5))])
    torch.testing.assert_close(found.sum(), scores.sum())
    assert bool(((vertices - found) @ (goal - found) <= 1e-9).all())  # no vertex lies beyond the plane through it


@settings(max_examples=50, deadline=None)
@given(row=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12), q=st.floats(0, 1))
def test_quantiles_in_the_hard_limit(row, q):
    scores = torch.tensor(row, dtype=torch.double)
    k = (1 - q) * len(row)
    if abs(k - round(k)) < 1e-6 and k not in (0.0, float(len(row))) and float(k) != round(k):
        return  # where an integer is missed by rounding
    actual = anyk.soft_quantile(scores, q, temperature=1e-6).item()
    assert actual == pytest.approx(np.quantile(scores.numpy(), q, method="averaged_inverted_cdf"), abs=1e-3)


def test_quantiles_have_gradients():
    scores = torch.randn(3, 6, dtype=torch.double, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.9], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(anyk.soft_quantile, (scores, q))
    assert anyk.soft_quantile(scores, 0.0).tolist() == scores.amin(-1).tolist()
    assert anyk.soft_quantile(scores, 1.0).tolist() == scores.amax(-1).tolist()


def test_samples_have_the_exact_distribution():
    scores, k, number = torch.tensor([1.0, 0.3, -0.5, 2.0, 0.0, -inf]), 3, 40_000
    generator = torch.Generator().manual_seed(1)
    drawn = anyk.sample_k_subset(scores.expand(number, 6), k, temperature=0.8, generator=generator)
    counts = torch.bincount((drawn * 2 ** torch.arange(6)).sum(-1).long(), minlength=64)
    weights = {
        sum(2**i for i in subset): math.exp(sum(scores[i].item() for i in subset) / 0.8)
        for subset in itertools.combinations(range(5), k)
    }
    expected = {code: number * weight / sum(weights.values()) for code, weight in weights.items()}
    assert sum(counts[code].item() for code in expected) == number
    distance = sum((counts[code].item() - mean) ** 2 / mean for code, mean in expected.items())
    assert distance < chi2.isf(1e-4, len(expected) - 1)


@pytest.mark.parametrize("method", ["exact", "gumbel"])
def test_samples(method):
    scores = torch.randn(50, 9, requires_grad=True)
    for k in (0, 1, 4, 9):
        drawn = anyk.sample_k_subset(scores, k, method=method, generator=torch.Generator().manual_seed(0))
        again = anyk.sample_k_subset(scores, k, method=method, generator=torch.Generator().manual_seed(0))
        assert set(drawn.unique().tolist()) <= {0.0, 1.0}
        assert drawn.sum(-1).tolist() == [k] * 50
        assert torch.equal(drawn, again)
    few = torch.tensor([[1.0, -inf, 0.0, -inf]])
    assert anyk.sample_k_subset(few, 3, method=method).tolist() == [[1, 0, 1, 0]]
    weight = torch.randn(9)
    (gradient,) = torch.autograd.grad((anyk.sample_k_subset(scores, 4, method=method) * weight).sum(), scores)
    if method == "exact":
        (expected,) = torch.autograd.grad((anyk.KSubset().mask(scores, 4) * weight).sum(), scores)
        torch.testing.assert_close(gradient, expected)
    assert bool(gradient.isfinite().all())


def test_select_topk():
    values = torch.randn(3, 7, 2, dtype=torch.double, requires_grad=True)
    scores = torch.randn(3, 7, dtype=torch.double, requires_grad=True)
    operator = anyk.LapSum(torch.nn.Parameter(torch.tensor(0.7, dtype=torch.double)))
    chosen, indices = anyk.select_topk(values, scores, 3, operator)
    assert torch.equal(indices, scores.topk(3).indices)
    assert torch.equal(chosen, values.gather(1, indices[..., None].expand(-1, -1, 2)))
    weight, inputs = torch.randn(3, 3, 2, dtype=torch.double), (values, scores, operator.temperature)
    actual = torch.autograd.grad((chosen * weight).sum(), inputs)
    expected = torch.autograd.grad(((operator(scores, 3) @ values) * weight).sum(), inputs)
    torch.testing.assert_close(actual, expected)
    only = torch.tensor([True, True, True, False, False, False, False]).expand(3, 7)
    assert bool((anyk.select_topk(values, scores, 2, where=only)[1] < 3).all())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: anyk.soft_topk(s, 9), ValueError, "k: expected 0 <= k <= n = 6"),
        (lambda s: anyk.soft_topk(s, -1), ValueError, "k: expected 0 <= k"),
        (lambda s: anyk.soft_topk(s, 2.5, "ksubset"), TypeError, "k: expected an integer for KSubset"),
        (lambda s: anyk.soft_topk(s, 2.5, hard=True), TypeError, "k: expected an integer with hard=True"),
        (lambda s: anyk.soft_topk(s, torch.tensor([1.0, 2.0, 3.0])), ValueError, r"k: .* shape \(2,\) of the rows"),
        (lambda s: anyk.soft_topk(s, 2, "softsort"), TypeError, "SoftSort has no mask: expected one of KSubset, LapSum"),
        (lambda s: anyk.soft_topk(s, 2, anyk.LapSum(), 0.5), TypeError, "temperature: expected none beside an operator"),
        (lambda s: anyk.soft_topk(s, 2, dim=2), ValueError, "dim: expected a dimension"),
        (lambda s: anyk.soft_topk(s.long(), 2), TypeError, "scores: expected a floating-point tensor"),
        (lambda s: anyk.soft_topk(s, 2, where=torch.ones(2, 6)), TypeError, "where: expected a bool tensor"),
        (lambda s: anyk.soft_rank(s, "ksubset"), TypeError, "KSubset has no ranks"),
        (lambda s: anyk.soft_quantile(s, 1.5), ValueError, "q: expected a number between 0 and 1"),
        (lambda s: anyk.soft_quantile(s, 0.5, "permutahedron"), TypeError, "Permutahedron has no threshold"),
        (lambda s: anyk.sample_k_subset(s, 2, method="other"), ValueError, "method: expected one of"),
        (lambda s: anyk.select_topk(s, s, 2), ValueError, r"values: expected shape \(..., n, d\)"),
        (
            lambda s: anyk.select_topk(s[..., None], torch.full_like(s, -torch.inf), 2),
            ValueError,
            r"scores: expected at least k = 2 entries above -inf in every row, got 0",
        ),
        (lambda s: anyk.TopKErrorLoss(2.0 and {2: 1.0}, "permutahedron")(s, torch.tensor([0, 1])), TypeError, "Permutahedron"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(2, 6))
