"""What each function gives: masks, ranks, sorts, quantiles, selections and samples, beside slow, obvious references."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import anyk

MASKS = {
    "lapsum": anyk.LapSum,
    "permutahedron": anyk.Permutahedron,
    "ksubset": anyk.KSubset,
    "sinkhorn": anyk.SinkhornSort,
    "splitter": anyk.SortingNetwork,
}
each_mask = pytest.mark.parametrize("name", MASKS)
inf, nan = torch.inf, torch.nan


def scores_of(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


def generator():
    return torch.Generator().manual_seed(1)


# ---- masks, ranks, sorts, quantiles --------------------------------------------------------------------------------------


@each_mask
def test_the_k_smallest_and_hard_masks(name):
    scores = scores_of(3, 8)
    torch.testing.assert_close(anyk.soft_topk(scores, 2, name, largest=False), anyk.soft_topk(-scores, 2, name))
    torch.testing.assert_close(anyk.soft_topk(scores, 2, MASKS[name]()), anyk.soft_topk(scores, 2, name))
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.0, 2.0]], requires_grad=True)
    mask, weight = anyk.soft_topk(tied, 2, name, hard=True), scores_of(5, seed=1)
    assert mask.tolist() == [[1, 0, 0, 0, 1]]
    (hard,) = torch.autograd.grad((mask * weight).sum(), tied)
    torch.testing.assert_close(hard, torch.autograd.grad((anyk.soft_topk(tied, 2, name) * weight).sum(), tied)[0])
    few = torch.tensor([[1.0, -inf, -inf, 0.0, -inf]])
    assert anyk.soft_topk(few, 3, name, hard=True).tolist() == [[1, 0, 0, 1, 0]]
    of_rows = anyk.soft_topk(torch.tensor([[3.0, 1.0, 2.0]] * 3), torch.tensor([0, 2, 3]), hard=True)
    assert of_rows.tolist() == [[0, 0, 0], [1, 0, 1], [1, 1, 1]]


def test_where():
    scores, where = scores_of(3, 8), torch.rand(3, 8, generator=generator()) > 0.4
    masked = scores.masked_fill(~where, -inf)
    torch.testing.assert_close(anyk.soft_topk(scores, 2, where=where), anyk.soft_topk(masked, 2))
    torch.testing.assert_close(anyk.soft_rank(scores, where=where, descending=True), anyk.soft_rank(masked, descending=True))
    assert bool((anyk.soft_topk(scores, 2, where=where, largest=False)[~where] == 0).all())
    alone = [anyk.soft_quantile(row[keep], 0.3) for row, keep in zip(scores, where, strict=True)]
    torch.testing.assert_close(anyk.soft_quantile(scores, 0.3, where=where), torch.stack(alone))
    for row, keep, result in zip(scores, where, anyk.soft_sort(scores, where=where, temperature=1e-3), strict=True):
        torch.testing.assert_close(result[: keep.sum()], row[keep].sort().values, rtol=0, atol=0.02)
        assert (result[keep.sum() :] == inf).all()
    assert torch.equal(anyk.select_topk(scores[..., None], scores, 2, where=where)[1], masked.topk(2).indices)


@pytest.mark.parametrize("name", ["lapsum", "permutahedron", "sinkhorn", "splitter"])
def test_ranks(name):
    scores = scores_of(3, 11)
    soft = anyk.soft_rank(scores, name)
    torch.testing.assert_close(soft.sum(-1), torch.full((3,), 66.0))
    if name in ("lapsum", "permutahedron"):
        torch.testing.assert_close(anyk.soft_rank(scores, name, descending=True), 12 - soft)
        apart = torch.stack([torch.randperm(11) for _ in range(3)]).float()  # no two nearly equal
        torch.testing.assert_close(anyk.soft_rank(apart, name, temperature=1e-2), 1 + apart)
    padded = torch.tensor([3.0, -inf, 1.0, -inf, 2.0])
    ranks = anyk.soft_rank(padded, name, descending=True)
    assert ranks[[1, 3]].tolist() == [4, 5]
    torch.testing.assert_close(ranks[[0, 2, 4]], anyk.soft_rank(padded[[0, 2, 4]], name, descending=True))


@pytest.mark.parametrize("name", ["lapsum", "permutahedron", "sinkhorn", "softsort", "neuralsort", "splitter"])
def test_sorts(name):
    scores = scores_of(3, 8)
    hard = anyk.soft_sort(scores, name, temperature=1e-3)
    torch.testing.assert_close(hard, scores.sort().values, rtol=1e-3, atol=5e-3)
    torch.testing.assert_close(anyk.soft_sort(scores, name, descending=True), -anyk.soft_sort(-scores, name))


@settings(max_examples=50, deadline=None)
@given(row=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12), q=st.floats(0, 1))
def test_quantiles_in_the_hard_limit(row, q):
    scores = torch.tensor(row, dtype=torch.double)
    k = (1 - q) * len(row)
    if abs(k - round(k)) < 1e-6 and k not in (0.0, float(len(row))) and float(k) != round(k):
        return  # where an integer is missed by rounding
    actual = anyk.soft_quantile(scores, q, temperature=1e-6).item()
    assert actual == pytest.approx(np.quantile(scores.numpy(), q, method="averaged_inverted_cdf"), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q", [0.1, 0.3, 0.6, 0.7, 0.9])
def test_quantiles_between_two_scores(dtype, q):
    """1 - q is rounded: what is left must still be an integer number of scores."""
    scores = torch.arange(10, dtype=dtype)
    expected = np.quantile(scores.numpy(), q, method="averaged_inverted_cdf")
    for share in (q, torch.tensor(q, dtype=dtype)):
        assert anyk.soft_quantile(scores, share, temperature=0.001).item() == pytest.approx(expected, abs=1e-4)


def test_quantiles_have_gradients_and_ends():
    scores = scores_of(3, 6, dtype=torch.double).requires_grad_()
    q = torch.tensor([0.2, 0.5, 0.9], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(anyk.soft_quantile, (scores, q))
    assert anyk.soft_quantile(scores, 0.0).tolist() == scores.amin(-1).tolist()
    assert anyk.soft_quantile(scores, 1.0).tolist() == scores.amax(-1).tolist()


def test_quantiles_beside_infinity(backend):
    scores = torch.tensor([1.0, inf, 3.0, 2.0], requires_grad=True)
    for q in (0.75, 0.8, 1.0):
        assert anyk.soft_quantile(scores, q) == inf
    finite = anyk.soft_quantile(scores, 0.6)  # F(inf) = 1, and the other three have 0.6
    others = torch.tensor([1.0, 3.0, 2.0])
    torch.testing.assert_close(finite, (others.exp().sum() / 1.2).log())
    (slope,) = torch.autograd.grad(finite, scores)
    torch.testing.assert_close(slope[[0, 2, 3]], others.softmax(-1))
    assert abs(slope[1]) < 1e-12


# ---- selections ----------------------------------------------------------------------------------------------------------


def test_selections_are_exact_and_both_backward_passes_as_said():
    values, scores = scores_of(3, 7, 2, dtype=torch.double), scores_of(3, 7, dtype=torch.double, seed=1)
    values.requires_grad_(), scores.requires_grad_()
    operator = anyk.LapSum(torch.nn.Parameter(torch.tensor(0.7, dtype=torch.double)))
    inputs, weight = (values, scores, operator.temperature), scores_of(3, 3, 2, dtype=torch.double, seed=2)
    best = scores.topk(3).indices
    mask = operator.mask(scores, 3)
    soft = {
        "full": operator(scores, 3) @ values,
        "mask": (values * (1 + mask - mask.detach())[..., None]).gather(1, best[..., None].expand(-1, -1, 2)),
    }
    for backward, expected in soft.items():
        chosen, indices = anyk.select_topk(values, scores, 3, operator, backward=backward)
        assert torch.equal(indices, best)
        assert torch.equal(chosen, values.gather(1, best[..., None].expand(-1, -1, 2)))
        gradients = [torch.autograd.grad((each * weight).sum(), inputs, retain_graph=True) for each in (chosen, expected)]
        torch.testing.assert_close(*gradients)
    assert torch.equal(anyk.select_topk(values, scores, 3, largest=False)[1], scores.topk(3, largest=False).indices)
    sparse = anyk.select_topk(values, scores, 3, "permutahedron", backward="mask")[0]
    assert torch.equal(sparse, chosen)


@pytest.mark.parametrize("backward", ["full", "mask"])
def test_fewer_than_k_that_may_be_selected(backward):
    """The same eager and compiled: the index -1, and zeros."""
    values, scores = scores_of(2, 4, 3), torch.tensor([[1.0, -inf, 2.0, -inf], [-inf] * 4], requires_grad=True)

    def select(scores):
        return anyk.select_topk(values, scores, 3, backward=backward)

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    for chosen, indices in (select(scores), compiled(scores)):
        assert indices.tolist() == [[2, 0, -1], [-1, -1, -1]]
        assert torch.equal(chosen[0, :2], values[0, [2, 0]])
        assert not chosen[0, 2].any()
        assert not chosen[1].any()
        (gradient,) = torch.autograd.grad(chosen.square().sum(), scores)
        assert gradient.isfinite().all()
        assert (gradient[scores == -inf] == 0).all()


@pytest.mark.parametrize("backward", ["full", "mask"])
def test_selections_beside_infinity(backward):
    """Of scores, and of values that are not selected."""
    scores = torch.tensor([0.0, inf, 1.0, 2.0, inf], requires_grad=True)
    values = torch.tensor([[nan, inf], [1.0, 1.0], [inf, 0.0], [2.0, 2.0], [3.0, 3.0]], requires_grad=True)
    chosen, indices = anyk.select_topk(values, scores, 3, backward=backward)
    assert indices.tolist() == [1, 4, 3]
    assert chosen.tolist() == [[1, 1], [3, 3], [2, 2]]
    for gradient in torch.autograd.grad(chosen.square().sum(), (scores, values)):
        assert gradient.isfinite().all()
    rows = torch.tensor([[0.0, nan, 1.0], [0.0, 2.0, 1.0]])
    chosen, _ = anyk.select_topk(torch.ones(2, 3, 1), rows, 2, backward=backward)
    assert chosen[0].isnan().all()
    assert chosen[1].tolist() == [[1], [1]]


def test_selection_by_scores_that_come_from_the_values():
    """The usual case: a linear layer scores the tokens, of which k are kept."""
    tokens, layer = scores_of(3, 7, 4, dtype=torch.double).requires_grad_(), torch.nn.Linear(4, 1, dtype=torch.double)
    weight = scores_of(3, 2, 4, dtype=torch.double, seed=1)
    soft = (anyk.LapSum()(layer(tokens).squeeze(-1), 2) @ tokens * weight).sum()
    chosen, _ = anyk.select_topk(tokens, layer(tokens).squeeze(-1), 2)
    actual = torch.autograd.grad((chosen * weight).sum(), (tokens, layer.weight), create_graph=True)
    torch.testing.assert_close(actual, torch.autograd.grad(soft, (tokens, layer.weight)))


def test_selections_keep_their_gradient_under_autocast():
    values, weights = scores_of(4, 20, 8), scores_of(4, 3, 8, seed=1)
    plain, within = (scores_of(4, 20, seed=2).requires_grad_() for _ in range(2))
    (anyk.select_topk(values, plain, 3)[0] * weights).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        (anyk.select_topk(values, within, 3)[0] * weights).sum().backward()
    assert torch.equal(within.grad, plain.grad)


# ---- samples -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "gumbel"])
def test_samples_have_their_distribution(method):
    """Subsets by the product of their weights, or drawn one after the other (Plackett-Luce)."""
    scores, k, number, t = torch.tensor([1.0, 0.3, -0.5, 2.0, 0.0, -inf]), 2, 40_000, 0.8
    drawn = anyk.sample_k_subset(scores.expand(number, 6), k, temperature=t, generator=generator(), method=method)
    counts = torch.bincount((drawn * 2 ** torch.arange(6)).sum(-1).long(), minlength=64)
    weights = (scores / t).exp().tolist()
    total = sum(weights)
    share = {}
    for i, j in itertools.combinations(range(5), 2):
        both = weights[i] * weights[j]
        share[2**i + 2**j] = both if method == "exact" else both / (total - weights[i]) + both / (total - weights[j])
    scale = number / sum(share.values())
    assert counts.sum() == sum(counts[code] for code in share)
    distance = sum((counts[code].item() - scale * part) ** 2 / (scale * part) for code, part in share.items())
    assert distance < chi2.isf(1e-4, len(share) - 1)


@pytest.mark.parametrize("method", ["exact", "gumbel"])
def test_samples(method):
    scores = scores_of(50, 9).requires_grad_()
    for k in (0, 1, 4, 9):
        drawn, again = (anyk.sample_k_subset(scores, k, method=method, generator=generator()) for _ in range(2))
        assert set(drawn.unique().tolist()) <= {0.0, 1.0}
        assert drawn.sum(-1).tolist() == [k] * 50
        assert torch.equal(drawn, again)
    assert anyk.sample_k_subset(torch.tensor([[1.0, -inf, 0.0, -inf]]), 3, method=method).tolist() == [[1, 0, 1, 0]]
    for temperature in (torch.ones(1, 1), torch.ones(1, dtype=torch.double), torch.linspace(0.5, 2, 50)):
        assert anyk.sample_k_subset(scores, 2, temperature=temperature, method=method).dtype == torch.float32
    weight = scores_of(9, seed=1)
    (gradient,) = torch.autograd.grad((anyk.sample_k_subset(scores, 4, method=method) * weight).sum(), scores)
    assert gradient.isfinite().all()
    if method == "exact":
        expected = torch.autograd.grad((anyk.KSubset().mask(scores, 4) * weight).sum(), scores)[0]
        torch.testing.assert_close(gradient, expected)
        with pytest.raises(ValueError, match='operator: expected none with method="exact"'):
            anyk.sample_k_subset(scores, 2, operator="permutahedron")
    draw = torch.func.vmap(lambda row: anyk.sample_k_subset(row, 3, method="gumbel"), randomness="different")
    assert len(draw(torch.zeros(50, 8)).unique(dim=0)) > 10


# ---- one for each row ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_k_q_and_temperature_for_each_row(backend, kept):
    """Of the shape of the rows, maybe with the last dimension kept; any that broadcasts will do."""
    scores, each = scores_of(2, 3, 8), torch.tensor([[0.5, 1.0, 2.0], [0.3, 3.0, 1.0]])
    last = (lambda x: x[..., None]) if kept else (lambda x: x)
    alone = torch.stack(
        [anyk.soft_topk(s, 3, temperature=t) for s, t in zip(scores.flatten(0, 1), each.flatten(), strict=True)]
    )
    torch.testing.assert_close(anyk.soft_topk(scores, 3, temperature=last(each)).flatten(0, 1), alone)
    torch.testing.assert_close(anyk.soft_topk(scores, last(each)).sum(-1), each)
    assert anyk.soft_quantile(scores, last(each / 4)).shape == (2, 3)
    assert anyk.soft_topk(scores, torch.tensor([1.5, 2.0, 5.0])).sum().item() == pytest.approx(17)
    for name in ("lapsum", "permutahedron", "ksubset", "sinkhorn", "splitter"):
        heads = anyk.soft_topk(scores, 3, name, temperature=torch.tensor([0.5, 1.0, 2.0]))
        torch.testing.assert_close(heads[:, 2], anyk.soft_topk(scores[:, 2], 3, name, temperature=2.0))
    for wrong in (each[:, :2], each.T):
        with pytest.raises(ValueError, match=r"k: expected one number, or the shape of the rows, \(2, 3\), got"):
            anyk.soft_topk(scores, wrong)
        with pytest.raises(ValueError, match=r"temperature: expected one number, or the shape of the rows, \(2, 3\), got"):
            anyk.soft_topk(scores, 3, temperature=wrong)
