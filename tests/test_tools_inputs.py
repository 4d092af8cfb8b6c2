"""Inputs that a function of the tools once got wrong: strides, infinities, temperatures of odd shapes, autocast."""

import numpy as np
import pytest
import torch

import anyk

INF = float("inf")


def scores_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda s, dim: anyk.soft_topk(s, 5, dim=dim),
        lambda s, dim: anyk.soft_topk(s, 5, "permutahedron", dim=dim),
        lambda s, dim: anyk.soft_topk(s, 5, "ksubset", dim=dim),
        lambda s, dim: anyk.soft_topk(s, 5, "splitter", dim=dim),
        lambda s, dim: anyk.soft_rank(s, dim=dim),
        lambda s, dim: anyk.soft_rank(s, "permutahedron", dim=dim),
        lambda s, dim: anyk.soft_sort(s, dim=dim),
    ],
)
def test_the_first_dimension_of_a_matrix(call):
    columns = scores_of(30, 8).requires_grad_()
    rows = columns.detach().t().contiguous().requires_grad_()
    weights = scores_of(30, 8)
    by_columns, by_rows = call(columns, 0), call(rows, -1)
    torch.testing.assert_close(by_columns, by_rows.t())
    (by_columns * weights).sum().backward()
    (by_rows * weights.t()).sum().backward()
    torch.testing.assert_close(columns.grad, rows.grad.t())


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_quantiles_beside_infinity(backend):
    scores = torch.tensor([1.0, INF, 3.0, 2.0], requires_grad=True)
    with anyk.backend(backend):
        for q in (0.75, 0.8, 1.0):
            assert anyk.soft_quantile(scores, q) == INF
        finite = anyk.soft_quantile(scores, 0.6)  # F(inf) = 1, and the other three have 0.6
    others = torch.tensor([1.0, 3.0, 2.0])
    torch.testing.assert_close(finite, (others.exp().sum() / 1.2).log())
    (slope,) = torch.autograd.grad(finite, scores)
    torch.testing.assert_close(slope[[0, 2, 3]], others.softmax(-1))
    assert slope[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q", [0.1, 0.3, 0.6, 0.7, 0.9])
def test_quantiles_between_two_scores(dtype, q):
    """1 - q is rounded: what is left must still be an integer number of scores."""
    scores = torch.arange(10, dtype=dtype)
    expected = np.quantile(scores.numpy(), q, method="averaged_inverted_cdf")
    for share in (q, torch.tensor(q, dtype=dtype)):
        assert anyk.soft_quantile(scores, share, temperature=0.001).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("method", ["exact", "gumbel"])
def test_samples_with_a_temperature_of_any_shape(method):
    scores = scores_of(5)
    for temperature in (torch.ones(1, 1), torch.ones(1, dtype=torch.float64)):
        sample = anyk.sample_k_subset(scores, 2, temperature=temperature, method=method)
        assert sample.shape == scores.shape
        assert sample.dtype == scores.dtype


@pytest.mark.parametrize("operator", ["lapsum", "permutahedron", "ksubset", "sinkhorn", "splitter"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nan_reaches_padding_as_well(operator, backend):
    scores = torch.tensor([[0.5, -INF, float("nan"), 1.0], [0.5, -INF, 2.0, 1.0]])
    with anyk.backend(backend):
        for k in (0, 2, 4):
            mask = anyk.soft_topk(scores, k, operator)
            assert mask[0].isnan().all()
            assert mask[1].isfinite().all()


@pytest.mark.parametrize("operator", ["lapsum", "permutahedron", "ksubset", "sinkhorn", "splitter"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nothing_and_everything_of_scores_whose_sum_overflows(operator, backend):
    scores = torch.tensor([-3e38, -3e38, 1.0])
    with anyk.backend(backend):
        assert torch.equal(anyk.soft_topk(scores, 0, operator), torch.zeros(3))
        assert torch.equal(anyk.soft_topk(scores, 3, operator), torch.ones(3))


@pytest.mark.parametrize("operator", ["permutahedron", "sinkhorn", "splitter", "softsort", "neuralsort"])
def test_sorts_keep_their_digits_under_autocast(operator):
    scores = scores_of(3, 8)
    expected = anyk.soft_sort(scores, operator)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(anyk.soft_sort(scores, operator), expected)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("temperature", [0.01, 1.0])
@pytest.mark.parametrize("operator", ["lapsum", "permutahedron", "ksubset", "sinkhorn", "splitter"])
def test_masks_take_what_is_infinitely_good_first(operator, temperature, hard, backend):
    scores = torch.tensor([torch.inf, 1.0, torch.inf, 2.0, -torch.inf], requires_grad=True)
    mask = anyk.soft_topk(scores, 3, operator, temperature, hard=hard)
    assert mask.sum().item() == pytest.approx(3)
    assert mask[[0, 2]].tolist() == pytest.approx([1, 1])
    mask[3].backward()
    assert scores.grad.isfinite().all()


def test_a_column_of_predictions_is_refused():
    with pytest.raises(ValueError, match=r"prediction: expected at least two entries in the last dimension.*\(50, 1\)"):
        anyk.ranking.spearman_loss(torch.randn(50, 1), torch.randn(50, 1))


def test_an_exact_sample_takes_no_operator():
    with pytest.raises(ValueError, match='operator: expected none with method="exact"'):
        anyk.sample_k_subset(torch.randn(5), 2, operator="permutahedron")


@pytest.mark.filterwarnings("ignore")  # torch deprecates it
def test_masks_are_traced():
    scores = torch.randn(4, 200)
    traced = torch.jit.trace(lambda scores: anyk.soft_topk(scores, 2), scores)
    other = torch.randn(4, 200)
    torch.testing.assert_close(traced(other), anyk.soft_topk(other, 2))


EVERYWHERE = {
    **{
        f"mask {operator}": lambda s, operator=operator: anyk.soft_topk(s, 3, operator)
        for operator in ("lapsum", "ksubset", "permutahedron", "sinkhorn", "splitter")
    },
    "mask, k by row": lambda s: anyk.soft_topk(s, s.detach().new_tensor([2.5, 1.0, 3.0])),
    "mask, learned temperature": lambda s: anyk.soft_topk(s, 3, temperature=s.std()),
    "hard": lambda s: anyk.soft_topk(s, 3, hard=True),
    "select": lambda s: anyk.select_topk(s.detach()[..., None], s, 3)[0],
    "quantile": lambda s: anyk.soft_quantile(s, 0.3),
    "sample": lambda s: anyk.sample_k_subset(s, 3, generator=torch.Generator("cpu").manual_seed(0)),
    "gumbel": lambda s: anyk.sample_k_subset(s, 3, method="gumbel", generator=torch.Generator("cpu").manual_seed(0)),
    **{
        f"{call.__name__} {operator}": lambda s, call=call, operator=operator: call(s, operator, s.std())
        for call in (anyk.soft_rank, anyk.soft_sort)
        for operator in ("lapsum", "permutahedron")
        if call is anyk.soft_rank or operator != "lapsum"
    },
    "spearman": lambda s: anyk.ranking.spearman_loss(s, s.detach().flip(-1)),
    "ndcg": lambda s: anyk.ranking.ndcg_loss(s, (s.detach() > 1).float(), k=5),
    "recall": lambda s: anyk.ranking.recall_loss(s, s.detach() > 0, k=5),
    "precision": lambda s: anyk.ranking.average_precision_loss(s, s.detach() > 0),
}


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("call", EVERYWHERE.values(), ids=EVERYWHERE)
def test_results_are_where_the_scores_are_whatever_the_default_device(call, backend):
    scores = scores_of(3, 40)
    with anyk.backend(backend):
        here, elsewhere = scores.clone().requires_grad_(), scores.clone().requires_grad_()
        expected = call(here)
        expected.sum().backward()
        with torch.device("meta"):
            found = call(elsewhere)
            found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(elsewhere.grad, here.grad)


MASKS = ["lapsum", "permutahedron", "ksubset", "sinkhorn", "splitter"]
each_mask = pytest.mark.parametrize("operator", MASKS)
each_backend = pytest.mark.parametrize("backend", ["auto", "torch"])
LEAST = torch.finfo(torch.float32).min


@each_mask
@each_backend
@pytest.mark.parametrize("padding", [-1e9, -1e12, -1e16, -1e20, LEAST])
@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (128, 16), (128, 40), (128, 76), (4096, 300)])
def test_padding_with_a_large_number(operator, backend, padding, n, k):
    if operator == "splitter" and n > 128:
        n, k = 128, 5
    padded = torch.arange(n) >= max(2, (6 * n) // 10)
    low, excluded = (scores_of(2, n).masked_fill(padded, value) for value in (padding, -INF))
    with anyk.backend(backend):
        mask, expected = anyk.soft_topk(low, k, operator), anyk.soft_topk(excluded, k, operator)
        mirrored = anyk.soft_topk(-low, n - k, operator)
    torch.testing.assert_close(mask.sum(-1), torch.full((2,), float(k)), rtol=1e-5, atol=0)
    torch.testing.assert_close(mask, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mirrored.sum(-1), torch.full((2,), float(n - k)), rtol=1e-5, atol=0)


@each_backend
@pytest.mark.parametrize("row", [[3.0, 1.0, -INF, -INF], [1.0, 1.0, 1.0, -INF], [-INF, 0.0, 2.0, 0.0]])
@pytest.mark.parametrize("kind", ["splitter", "bitonic", "odd_even"])
def test_ties_of_a_network_do_not_reach_into_padding(backend, row, kind):
    row = torch.tensor(row)
    with anyk.backend(backend):
        for k in range(1, int(row.isfinite().sum()) + 1):
            mask = anyk.soft_topk(row, k, kind)
            assert mask.sum().item() == pytest.approx(k)
            assert (mask[row == -INF] == 0).all()


@each_mask
@each_backend
@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "row", [[INF, 0.0, 1.0, 2.0], [INF, INF, INF, 1.0], [7e4, 0.0, 1.0, 2.0], [1e37, 0.0, 1.0, 2.0], [-INF, INF, 1.0, 2.0]]
)
def test_what_is_infinite_or_overflows_is_chosen_first(operator, backend, temperature, dtype, row):
    for k in (1, 2, 3):
        scores = torch.tensor(row).to(dtype).requires_grad_()
        with anyk.backend(backend):
            mask = anyk.soft_topk(scores, k, operator, temperature)
            (mask * torch.tensor([1, 2, 3, 4])).sum().backward()
            if operator == "ksubset":
                drawn = anyk.sample_k_subset(scores, k, temperature=temperature)
                assert sorted(drawn.tolist()) == [0] * (4 - k) + [1] * k
        tolerance = {torch.float16: 4e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
        assert mask.sum().item() == pytest.approx(k, rel=tolerance)
        assert ((mask >= 0) & (mask <= 1)).all()
        assert scores.grad.isfinite().all()
        if row.count(INF) == 1 and k == 1:
            assert mask.argmax() == scores.argmax()


@pytest.mark.parametrize("call", EVERYWHERE.values(), ids=EVERYWHERE)
def test_results_can_be_changed_in_place(call):
    scores = scores_of(3, 40).requires_grad_()
    result = call(scores)
    result.mul_(2).sum().backward()
    assert scores.grad.isfinite().all()


def test_k_with_the_last_dimension_kept():
    scores, k = scores_of(3, 8), torch.tensor([1.5, 2.0, 5.0])
    torch.testing.assert_close(anyk.soft_topk(scores, k[:, None]), anyk.soft_topk(scores, k))
    assert anyk.soft_topk(scores[0], k[:1]).sum().item() == pytest.approx(1.5)
    assert anyk.soft_quantile(scores, torch.tensor([[0.1], [0.5], [0.9]])).shape == (3,)
    with pytest.raises(ValueError, match=r"k: expected one number, or the shape \(3,\) of the rows, got \(2, 1\)"):
        anyk.soft_topk(scores, k[:2, None])


def test_a_scalar_has_no_dimension_to_choose_along():
    with pytest.raises(ValueError, match="scores: expected at least one dimension, got a scalar"):
        anyk.soft_topk(torch.tensor(1.0), 1)


@pytest.mark.parametrize("operator", ["splitter", "sinkhorn", "permutahedron"])
def test_one_entry_keeps_its_graph(operator):
    for function, slope in ((anyk.soft_rank, 0.0), (anyk.soft_sort, 1.0)):
        scores = scores_of(3, 1).requires_grad_()
        function(scores, operator).sum().backward()
        assert scores.grad.tolist() == [[slope]] * 3


def test_the_backward_pass_of_select_topk_under_autocast():
    values, weights = scores_of(4, 20, 8), scores_of(4, 3, 8)
    plain, within = (scores_of(4, 20).requires_grad_() for _ in range(2))
    (anyk.select_topk(values, plain, 3)[0] * weights).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        (anyk.select_topk(values, within, 3)[0] * weights).sum().backward()
    assert torch.equal(within.grad, plain.grad)


def test_gumbel_samples_under_vmap():
    draw = torch.func.vmap(lambda row: anyk.sample_k_subset(row, 3, method="gumbel"), randomness="different")
    drawn = draw(torch.zeros(50, 8))
    assert (drawn.sum(-1) == 3).all()
    assert len(drawn.unique(dim=0)) > 10


@pytest.mark.parametrize(
    "call",
    [lambda s: anyk.soft_rank(s, "sinkhorn"), lambda s: anyk.soft_rank(s, "splitter"), lambda s: anyk.sample_k_subset(s, 2)],
    ids=["ranks of sinkhorn", "ranks of splitter", "sample"],
)
def test_compiled_for_a_second_size(call):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for shape in ((3, 5), (4, 7)):
        scores = scores_of(*shape)
        torch.testing.assert_close(compiled(scores).sum(-1), call(scores).sum(-1))
