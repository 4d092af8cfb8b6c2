"""Inputs that a function once got wrong: infinities, large numbers as padding, autocast, default devices, changes in place."""

import pytest
import torch

import anyk

INF = float("inf")
LEAST = torch.finfo(torch.float32).min
MASKS = ["lapsum", "permutahedron", "ksubset", "sinkhorn", "splitter"]
each_mask = pytest.mark.parametrize("operator", MASKS)


def scores_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@each_mask
def test_nan_reaches_padding_as_well(operator, backend):
    scores = torch.tensor([[0.5, -INF, float("nan"), 1.0], [0.5, -INF, 2.0, 1.0]])
    for k in (0, 2, 4):
        mask = anyk.soft_topk(scores, k, operator)
        assert mask[0].isnan().all()
        assert mask[1].isfinite().all()


@each_mask
def test_nothing_and_everything_of_scores_whose_sum_overflows(operator, backend):
    scores = torch.tensor([-3e38, -3e38, 1.0])
    assert torch.equal(anyk.soft_topk(scores, 0, operator), torch.zeros(3))
    assert torch.equal(anyk.soft_topk(scores, 3, operator), torch.ones(3))


@pytest.mark.parametrize("operator", ["lapsum", "permutahedron", "sinkhorn"])
def test_a_k_of_nothing_and_of_everything_for_some_rows(operator, backend):
    scores, k = scores_of(3, 5).requires_grad_(), torch.tensor([0.0, 5.0, 2.5], requires_grad=True)
    mask = anyk.soft_topk(scores, k, operator)
    assert mask[0].tolist() == [0] * 5
    assert mask[1].tolist() == [1] * 5
    gradients = torch.autograd.grad((mask * torch.arange(5)).sum(), (scores, k))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[1][:2].tolist() == [0, 0]


@pytest.mark.parametrize("operator", ["lapsum", "permutahedron", "sinkhorn", "splitter", "softsort", "neuralsort"])
def test_sorts_keep_their_digits_under_autocast(operator):
    scores = scores_of(3, 8)
    expected = anyk.soft_sort(scores, operator)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(anyk.soft_sort(scores, operator), expected)


@pytest.mark.filterwarnings("ignore")  # torch deprecates it
def test_masks_are_traced():
    scores, other = scores_of(4, 200), scores_of(5, 200)[1:]
    traced = torch.jit.trace(lambda scores: anyk.soft_topk(scores, 2), scores)
    torch.testing.assert_close(traced(other), anyk.soft_topk(other, 2))


@each_mask
@pytest.mark.parametrize("padding", [-1e9, -1e12, -1e16, -1e20, LEAST])
@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (128, 16), (128, 76), (4096, 300)])
def test_padding_with_a_large_number(operator, padding, n, k, backend):
    if operator == "splitter" and n > 128:
        n, k = 128, 5
    padded = torch.arange(n) >= max(2, (6 * n) // 10)
    low, excluded = (scores_of(2, n).masked_fill(padded, value) for value in (padding, -INF))
    mask, expected = anyk.soft_topk(low, k, operator), anyk.soft_topk(excluded, k, operator)
    mirrored = anyk.soft_topk(-low, n - k, operator)
    torch.testing.assert_close(mask.sum(-1), torch.full((2,), float(k)), rtol=1e-5, atol=0)
    torch.testing.assert_close(mask, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mirrored.sum(-1), torch.full((2,), float(n - k)), rtol=1e-5, atol=0)


@each_mask
@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "row", [[INF, 0.0, 1.0, 2.0], [INF, INF, INF, 1.0], [7e4, 0.0, 1.0, 2.0], [1e37, 0.0, 1.0, 2.0], [-INF, INF, 1.0, 2.0]]
)
def test_what_is_infinite_or_overflows_is_chosen_first(operator, temperature, dtype, row, backend):
    for k in (1, 2, 3):
        scores = torch.tensor(row).to(dtype).requires_grad_()
        for mask in (anyk.soft_topk(scores, k, operator, temperature, hard=hard) for hard in (False, True)):
            (mask * torch.tensor([1, 2, 3, 4])).sum().backward()
            tolerance = {torch.float16: 4e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
            assert mask.sum().item() == pytest.approx(k, rel=tolerance)
            assert ((mask >= 0) & (mask <= 1)).all()
            assert not scores.grad.isnan().any()
            assert dtype == torch.float16 or scores.grad.isfinite().all()  # 1 / t may be more than float16 has
            if row.count(INF) == 1 and k == 1:
                assert mask.argmax() == scores.argmax()
        if operator == "ksubset":
            assert sorted(anyk.sample_k_subset(scores, k, temperature=temperature).tolist()) == [0] * (4 - k) + [1] * k


EVERYWHERE = {
    **{f"mask {operator}": lambda s, operator=operator: anyk.soft_topk(s, 3, operator) for operator in MASKS},
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
    },
    "ndcg": lambda s: anyk.ranking.ndcg_loss(s, (s.detach() > 1).float(), k=5),
}
everywhere = pytest.mark.parametrize("call", EVERYWHERE.values(), ids=EVERYWHERE)


@everywhere
def test_results_are_where_the_scores_are_whatever_the_default_device(call, backend):
    scores = scores_of(3, 40)
    here, elsewhere = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    expected = call(here)
    expected.sum().backward()
    with torch.device("meta"):
        found = call(elsewhere)
        found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(elsewhere.grad, here.grad)


@everywhere
def test_results_can_be_changed_in_place(call, backend):
    scores = scores_of(3, 40).requires_grad_()
    call(scores).mul_(2).sum().backward()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("operator", ["splitter", "sinkhorn", "permutahedron", "lapsum"])
def test_one_entry_keeps_its_graph(operator):
    for function, slope in ((anyk.soft_rank, 0.0), (anyk.soft_sort, 1.0)):
        scores = scores_of(3, 1).requires_grad_()
        function(scores, operator).sum().backward()
        assert scores.grad.tolist() == [[slope]] * 3


def test_a_scalar_has_no_dimension_to_choose_along():
    with pytest.raises(ValueError, match="scores: expected at least one dimension, got a scalar"):
        anyk.soft_topk(torch.tensor(1.0), 1)
