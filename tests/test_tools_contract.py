"""What must hold for every function of every operator, in every form that autograd, vmap and torch.compile ask for."""

import contextlib
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
import torch
from entmax import budget_bisect
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from scipy.stats import chi2
from torch.utils._python_dispatch import TorchDispatchMode

import anyk
from anyk import checks, ranking, tools
from anyk.kernels import native
from anyk.operators.base import has

inf, nan = torch.inf, torch.nan
OPERATORS = {
    "lapsum": anyk.LapSum,
    "permutahedron": anyk.Permutahedron,
    "ksubset": anyk.KSubset,
    "sinkhorn": anyk.SinkhornSort,
    "splitter": lambda t=1.0: anyk.SortingNetwork("splitter", t),
    "odd_even": lambda t=1.0: anyk.SortingNetwork("odd_even", t),
    "softsort": anyk.SoftSort,
    "neuralsort": anyk.NeuralSort,
}
ROWS, N = 3, 7
VALUES = torch.randn(ROWS, N, 2, generator=torch.Generator().manual_seed(5), dtype=torch.double)
RELEVANCE = torch.tensor([[0, 3, 1, 0, 2, 0, 1], [1, 0, 0, 2, 0, 3, 0], [2, 2, 0, 0, 1, 0, 0]])
REAL_K = torch.tensor([1.5, 2.0, 5.3], dtype=torch.double)


class Case(NamedTuple):
    function: str
    operator: str

    def __call__(self, scores, temperature=1.0):
        operator = OPERATORS[self.operator](temperature)
        relevance = RELEVANCE[: len(scores)] if scores.ndim == 2 else RELEVANCE[0]
        match self.function:
            case "mask":
                return anyk.soft_topk(scores, 2, operator)
            case "hard":
                return anyk.soft_topk(scores, 2, operator, hard=True)
            case "real k":
                return anyk.soft_topk(scores, REAL_K[: len(scores)] if scores.ndim == 2 else 1.5, operator)
            case "ranks":
                return anyk.soft_rank(scores, operator)
            case "sort":
                return anyk.soft_sort(scores, operator)
            case "quantile":
                return anyk.soft_quantile(scores, 0.4, operator)
            case "select":
                values = VALUES[: len(scores)] if scores.ndim == 2 else VALUES[0]
                return anyk.select_topk(values.to(scores.dtype), scores, 2, operator)[0]
            case "exact":
                return anyk.sample_k_subset(scores, 2, temperature=temperature, generator=generator())
            case "gumbel":
                return anyk.sample_k_subset(
                    scores, 2, temperature=temperature, generator=generator(), method="gumbel", operator=self.operator
                )
            case "spearman":
                return ranking.spearman_loss(scores, relevance, operator=operator)
            case "ndcg":
                return ranking.ndcg_loss(scores, relevance, 3, operator=operator)
            case "recall":
                return ranking.recall_loss(scores, relevance > 1, 3, operator=operator)
            case "precision":
                return ranking.average_precision_loss(scores, relevance > 1, operator=operator)


def generator():
    return torch.Generator().manual_seed(2)


NEEDS = {"mask": "mask", "hard": "mask", "ranks": "ranks", "sort": "sort", "quantile": "threshold",
         "spearman": "ranks", "ndcg": "ranks", "recall": "mask", "precision": "ranks"}  # fmt: skip
CASES = [Case(what, name) for name, make in OPERATORS.items() for what, needed in NEEDS.items() if has(type(make()), needed)]
CASES += [Case("real k", name) for name, make in OPERATORS.items() if type(make()).real_k]
CASES += [Case("select", name) for name, make in OPERATORS.items() if type(make()).has_probabilities]
CASES += [Case("exact", "ksubset"), Case("gumbel", "lapsum"), Case("gumbel", "permutahedron")]
LOSSES = ("spearman", "ndcg", "recall", "precision")
SAME_SHAPE = [case for case in CASES if case.function not in (*LOSSES, "select", "quantile")]
SMOOTH = [case for case in CASES if case.function not in ("hard", "exact", "gumbel")]
# Masks of all operators are compiled in test_tools.py.
TRACED = [case for case in CASES if case.operator == "lapsum" and case.function != "mask"]
TRACED += [Case("ranks", "permutahedron"), Case("sort", "permutahedron"), Case("exact", "ksubset"), Case("select", "splitter")]
BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(bool(native.status()), reason="no native library"))]


def label(case):
    return f"{case.function}-{case.operator}"


every = pytest.mark.parametrize("case", CASES, ids=label)
of_same_shape = pytest.mark.parametrize("case", SAME_SHAPE, ids=label)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


def weighted(result):
    return (result * made(*result.shape, dtype=result.dtype, seed=9)).sum()


# ---- derivatives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SMOOTH, ids=label)
def test_first_and_second_derivatives(case):
    """Of scores and temperature. Permutahedron's second ones are 0 almost everywhere."""
    scores = (made(ROWS, N, dtype=torch.double) * 1.5).requires_grad_()
    temperature = torch.tensor(0.8, dtype=torch.double, requires_grad=True)
    if case.function == "select":  # exact forward: the derivative is that of the soft rows
        operator = OPERATORS[case.operator]
        weight = made(ROWS, 2, 2, dtype=torch.double, seed=9)
        actual = torch.autograd.grad((case(scores, temperature) * weight).sum(), (scores, temperature), create_graph=True)
        soft = (operator(temperature)(scores, 2) @ VALUES * weight).sum()
        expected = torch.autograd.grad(soft, (scores, temperature), create_graph=True)
        torch.testing.assert_close(actual, expected)
        second = [torch.autograd.grad(weighted(first[0]), (scores, temperature)) for first in (actual, expected)]
        torch.testing.assert_close(*second)
        return
    assert torch.autograd.gradcheck(case, (scores, temperature), fast_mode=True)
    if case.operator != "sinkhorn" or case.function == "mask":
        assert torch.autograd.gradgradcheck(case, (scores, temperature), fast_mode=True)


@every
@each_backend
@pytest.mark.parametrize("learned", ["parameter", "from the scores"])
def test_a_gradient_with_its_graph_is_the_gradient(case, backend, learned):
    """Where the temperature comes from the scores, no path may be counted twice."""
    if case.function == "exact" and learned != "parameter":
        pytest.skip("the same as the mask")
    with anyk.backend(backend):
        scores = made(ROWS, N).requires_grad_()
        parameter = torch.tensor(0.7, requires_grad=True)
        inputs = (scores, parameter) if learned == "parameter" else (scores,)

        def loss():
            return weighted(case(scores, parameter if learned == "parameter" else scores.std()))

        actual = torch.autograd.grad(loss(), inputs, create_graph=True)
        torch.testing.assert_close(actual, torch.autograd.grad(loss(), inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lapsum", "permutahedron"])
@each_backend
def test_k_and_temperature_that_come_from_the_scores(name, backend):
    with anyk.backend(backend):
        scores = made(ROWS, N).requires_grad_()

        def loss():
            return weighted(OPERATORS[name](scores.std()).mask(scores, 3 + scores.mean(-1).tanh()))

        (actual,) = torch.autograd.grad(loss(), scores, create_graph=True)
        torch.testing.assert_close(actual, torch.autograd.grad(loss(), scores)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("again", [False, True])
def test_select_topk_of_scores_that_come_from_the_values(again, monkeypatch):
    """The usual case: a linear layer scores the tokens, of which k are kept. Also some rows at a time."""
    tokens = made(ROWS, N, 4, dtype=torch.double).requires_grad_()
    layer = torch.nn.Linear(4, 1, dtype=torch.double)
    weight = made(ROWS, 2, 4, dtype=torch.double, seed=1)
    soft = (anyk.LapSum()(layer(tokens).squeeze(-1), 2) @ tokens * weight).sum()
    expected = torch.autograd.grad(soft, (tokens, layer.weight))
    for most in (tools._MOST_NUMBERS, 2 * N):
        monkeypatch.setattr(tools, "_MOST_NUMBERS", most)
        chosen, _ = anyk.select_topk(tokens, layer(tokens).squeeze(-1), 2)
        actual = torch.autograd.grad((chosen * weight).sum(), (tokens, layer.weight), create_graph=again)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("loss", [anyk.TopKErrorLoss, anyk.TopKCrossEntropyLoss])
@pytest.mark.parametrize("name", [name for name in OPERATORS if type(OPERATORS[name]()).has_probabilities])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor])
def test_the_losses_learn_a_temperature(loss, name, kind):
    scores, target = made(4, 9, dtype=torch.double), torch.tensor([0, 3, 8, 5])

    def value(temperature):
        return loss([0.3, 0.3, 0.4], OPERATORS[name](temperature), m=6)(scores, target)

    temperature = torch.tensor(1.2, dtype=torch.double)
    temperature = kind(temperature) if kind is torch.nn.Parameter else temperature.requires_grad_()
    (slope,) = torch.autograd.grad(value(temperature), temperature)
    difference = (value(1.2 + 1e-5) - value(1.2 - 1e-5)) / 2e-5
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-8)
    module = loss([0.3, 0.3, 0.4], OPERATORS[name](temperature))
    assert [each for each, _ in module.named_parameters()] == ["operator.temperature"] * (kind is torch.nn.Parameter)


# ---- shapes and numbers -------------------------------------------------------------------------------------------------


@of_same_shape
@each_backend
def test_any_dimension_and_any_strides(case, backend):
    with anyk.backend(backend):
        kind = OPERATORS[case.operator]()
        scores = made(4, 6, 5).transpose(0, 2)
        call = {
            "mask": lambda s, **more: anyk.soft_topk(s, 2, kind, **more),
            "hard": lambda s, **more: anyk.soft_topk(s, 2, kind, hard=True, **more),
            "real k": lambda s, **more: anyk.soft_topk(s, 1.5, kind, **more),
            "ranks": lambda s, **more: anyk.soft_rank(s, kind, **more),
            "sort": lambda s, **more: anyk.soft_sort(s, kind, **more),
        }.get(case.function, lambda s, **more: anyk.sample_k_subset(s, 2, method=case.function, generator=generator(), **more))
        for dim in range(-3, 3):
            expected = call(scores.movedim(dim, -1).contiguous()).movedim(-1, dim)
            torch.testing.assert_close(call(scores, dim=dim), expected)


def test_quantiles_of_any_dimension():
    scores = made(4, 6, 5).transpose(0, 2)
    for dim in range(-3, 3):
        expected = anyk.soft_quantile(scores.movedim(dim, -1).contiguous(), 0.3)
        torch.testing.assert_close(anyk.soft_quantile(scores, 0.3, dim=dim), expected)
        q = torch.rand(expected.shape, generator=generator())
        actual = anyk.soft_quantile(scores, q, dim=dim)
        torch.testing.assert_close(actual, anyk.soft_quantile(scores.movedim(dim, -1).contiguous(), q))


@every
@each_backend
def test_no_rows_and_one_entry(case, backend):
    with anyk.backend(backend):
        scores = torch.zeros(0, N, requires_grad=True)
        result = case(scores)
        assert result.shape[:1] in ((0,), ())
        result.sum().backward()
        assert scores.grad.shape == (0, N)
    single = torch.tensor([[3.0], [-1.0]])
    operator = OPERATORS[case.operator]()
    expected = {"mask": 1, "hard": 1, "ranks": 1, "sort": single}.get(case.function)
    if expected is not None:
        call = {"ranks": operator.ranks, "sort": operator.sort}.get(case.function, lambda s: operator.mask(s, 1))
        torch.testing.assert_close(call(single), torch.as_tensor(expected).to(single).expand(2, 1))


@every
@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case, backend, dtype):
    """Read as it is, computed in float32: the result is that of the same numbers in float32, rounded once."""
    with anyk.backend(backend):
        scores = made(ROWS, N).to(dtype).requires_grad_()
        exact = scores.detach().float().requires_grad_()
        actual, expected = case(scores), case(exact)
        widened = case.function in (*LOSSES, "ranks")
        assert actual.dtype == (torch.float32 if widened else dtype)
        if case.function == "select":
            expected = case(exact.detach().to(dtype).float())  # its values are rounded as well
        if case.function != "gumbel":
            torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=torch.finfo(actual.dtype).eps * 2, atol=1e-6)
            assert int((actual != expected.to(actual.dtype)).sum()) <= 1  # where float32 differs in its last digit
        weighted(actual).backward()
        assert scores.grad.dtype == dtype
        assert bool(scores.grad.isfinite().all())


@every
@each_backend
def test_nan_in_a_row_is_nan_in_that_row(case, backend):
    with anyk.backend(backend):
        scores = made(ROWS, N)
        scores[1, 4] = nan
        if case.function in LOSSES:
            result = {
                "spearman": lambda s: ranking.spearman_loss(s, RELEVANCE, operator=case.operator, reduction="none"),
                "ndcg": lambda s: ranking.ndcg_loss(s, RELEVANCE, 3, operator=case.operator, reduction="none"),
                "recall": lambda s: ranking.recall_loss(s, RELEVANCE > 1, 3, operator=case.operator, reduction="none"),
                "precision": lambda s: ranking.average_precision_loss(
                    s, RELEVANCE > 1, operator=case.operator, reduction="none"
                ),
            }[case.function](scores)
        else:
            result = case(scores)
        result = result.reshape(ROWS, -1)
        assert bool(result[1].isnan().all())
        assert bool(result[[0, 2]].isfinite().all())


@of_same_shape
@each_backend
def test_what_is_excluded_has_no_gradient(case, backend):
    with anyk.backend(backend):
        scores = made(ROWS, N)
        scores[:, 2] = -inf
        scores[1, 4:] = -inf
        scores.requires_grad_()
        temperature = torch.tensor(1.0, requires_grad=True)
        result = case(scores, temperature)
        weighted(result.masked_fill(result == -inf, 0)).backward()
        assert bool(scores.grad.isfinite().all())
        assert bool((scores.grad[scores.detach() == -inf] == 0).all())
        assert temperature.grad is None or bool(temperature.grad.isfinite())
        # rows of different lengths are as if alone
        if case.function not in ("real k", "exact", "gumbel"):
            real = scores.detach()[1] > -inf
            alone = case(scores.detach()[1][real])
            together = result.detach()[1][: real.sum()] if case.function == "sort" else result.detach()[1][real]
            torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in SAME_SHAPE if case.function not in ("exact", "gumbel", "real k")], ids=label)
@settings(max_examples=15, deadline=None)
@given(row=st.lists(st.integers(-4, 4), min_size=N, max_size=N), order=st.permutations(range(N)), shift=st.integers(-3, 3))
def test_permuting_the_scores(case, row, order, shift):
    """Masks and ranks are permuted with them, sorts stay; adding a number to all changes only the sort. There are ties."""
    if case.function == "hard" and len(set(row)) < N:
        return  # of equals the lower index is taken
    if case.function == "ranks" and case.operator in ("splitter", "odd_even"):
        row = [value + 0.1 * place for place, value in enumerate(row)]  # ranks of tied scores are not averaged there
        if len(set(row)) < N:
            return
    scores, order = torch.tensor(row, dtype=torch.double), torch.tensor(order)
    result, permuted = case(scores), case(scores[order])
    torch.testing.assert_close(permuted, result if case.function == "sort" else result[order], rtol=1e-6, atol=1e-6)
    moved = case(scores + shift)
    torch.testing.assert_close(moved, result + shift * (case.function == "sort"), rtol=1e-6, atol=1e-6)


@of_same_shape
def test_hard_and_drawn_masks_are_exact_to_the_bit(case):
    if case.function not in ("hard", "exact", "gumbel"):
        return
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        scores = (made(50, N) * 3).round().to(dtype).requires_grad_()  # with ties
        operator = OPERATORS[case.operator](0.37)
        for k in range(N + 1):
            if case.function == "hard":
                mask = anyk.soft_topk(scores, k, operator, hard=True)
                first = scores.detach().float().sort(descending=True, stable=True).indices[:, :k]
                assert torch.equal(mask, torch.zeros_like(scores).scatter(-1, first, 1))
            else:
                mask = anyk.sample_k_subset(scores, k, method=case.function, generator=generator())
            assert mask.sum(-1).tolist() == [k] * 50
            assert set(mask.unique().tolist()) <= {0.0, 1.0}


def test_ranks_of_groups_that_are_far_apart():
    """Each group has its digits: the ranks are those within the groups, one after the other."""
    group = torch.tensor([0.0, 1.0, 3.0, 1.5])
    for name in ("lapsum", "permutahedron"):
        within = anyk.soft_rank(group, name)
        for places in ([1e6, 0.0, -1e6], [1e20, 0.0], [0.0, -1e20], [inf, 2.0]):
            rows = [group if place == 0 else group + place for place in places]
            scores = torch.cat(rows if inf not in places else [torch.tensor([inf]), group])
            ranks = anyk.soft_rank(scores, name)
            if 1e20 in map(abs, places):
                own = scores.abs() < 1e10
                offset = 4 * (places[0] > 0)
                torch.testing.assert_close(ranks[own], within + offset, rtol=0, atol=1e-5)
            elif inf in places:
                torch.testing.assert_close(ranks, torch.cat([torch.ones(1), 1 + within]), rtol=0, atol=1e-5)
            else:
                torch.testing.assert_close(ranks, torch.cat([within, 4 + within, 8 + within]), rtol=0, atol=1e-5)


# ---- oracles ------------------------------------------------------------------------------------------------------------


def laplace_mask_by_mpmath(row, k, temperature):
    """The mask and its derivative by k. Of a threshold midway in a gap of 800, all depends on e^-400: 200 digits have it."""
    with mpmath.workdps(200):
        row = [mpmath.mpf(value) / mpmath.mpf(temperature) for value in row]

        def value(x):
            return mpmath.exp(x) / 2 if x < 0 else 1 - mpmath.exp(-x) / 2

        low, high = min(row) - 100, max(row) + 100
        for _ in range(70):
            b = (low + high) / 2
            low, high = (b, high) if sum(value(s - b) for s in row) > k else (low, b)
        slopes = [mpmath.exp(-abs(s - b)) / 2 for s in row]
        return [float(value(s - b)) for s in row], [float(slope / sum(slopes)) for slope in slopes], float(b * temperature)


@each_backend
@settings(max_examples=40, deadline=None)
@given(data=st.data(), row=st.lists(st.floats(-40, 40, width=32), min_size=2, max_size=8), t=st.sampled_from([0.1, 1.0, 30.0]))
def test_lapsum_against_mpmath(backend, data, row, t):
    share = data.draw(st.floats(0.05, 0.95))
    k = torch.tensor(share * len(row), requires_grad=True)
    mask, slopes, b = laplace_mask_by_mpmath(row, k.item(), t)
    with anyk.backend(backend):
        actual = anyk.soft_topk(torch.tensor(row), k, temperature=t)
        torch.testing.assert_close(actual.double(), torch.tensor(mask, dtype=torch.double), rtol=1e-5, atol=1e-6)
        weight = torch.arange(1.0, len(row) + 1)
        (of_k,) = torch.autograd.grad((actual * weight).sum(), k)
        expected = (torch.tensor(slopes, dtype=torch.double) * weight).sum()
        torch.testing.assert_close(of_k.double(), expected, rtol=1e-4, atol=1e-4)
        threshold = anyk.soft_quantile(torch.tensor(row), 1 - share, temperature=t)
        assert threshold.item() == pytest.approx(b, rel=1e-4, abs=1e-4 * max(1, t))


@each_backend
@settings(max_examples=40, deadline=None)
@given(data=st.data(), row=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12), t=st.sampled_from([0.1, 1.0, 7.0]))
def test_the_sparse_mask_against_entmax(backend, data, row, t):
    scores, k = torch.tensor(row), data.draw(st.integers(1, len(row) - 1))
    expected = budget_bisect(scores.double()[None] / t, budget=k, dim=-1, n_iter=80)[0]
    with anyk.backend(backend):
        torch.testing.assert_close(anyk.soft_topk(scores, k, "permutahedron", t).double(), expected, rtol=0, atol=2e-5)


@each_backend
@settings(max_examples=40, deadline=None)
@given(row=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=15), t=st.sampled_from([0.1, 1.0, 7.0]))
def test_the_sparse_ranks_and_sort_against_scipy(backend, row, t):
    """The projection of z onto the permutations of w (descending): z - isotonic(z - w), in the order of z."""

    def projected(z, w):
        order = np.argsort(-z, kind="stable")
        result = np.empty_like(z)
        result[order] = z[order] - isotonic_regression(z[order] - np.sort(w)[::-1], increasing=False).x
        return torch.from_numpy(result)

    scores, n = np.array(row, dtype=np.float32), len(row)
    with anyk.backend(backend):
        ranks = anyk.soft_rank(torch.from_numpy(scores), "permutahedron", t).double()
        ordered = anyk.soft_sort(torch.from_numpy(scores), "permutahedron", t).double()
    scores = scores.astype(float)
    torch.testing.assert_close(ranks, projected(-scores / t, np.arange(1.0, n + 1)), rtol=0, atol=1e-4)
    torch.testing.assert_close(ordered, projected(np.arange(n, 0.0, -1) / t, scores), rtol=0, atol=1e-4)


def test_gumbel_samples_are_plackett_luce():
    scores, k, number, t = torch.tensor([1.0, 0.3, -0.5, 2.0, 0.0, -inf]), 2, 40_000, 0.8
    drawn = anyk.sample_k_subset(scores.expand(number, 6), k, temperature=t, generator=generator(), method="gumbel")
    weights = (scores / t).exp().tolist()
    total = sum(weights)
    counts = torch.bincount((drawn * 2 ** torch.arange(6)).sum(-1).long(), minlength=64)
    distance, cells = 0.0, 0
    for i in range(5):
        for j in range(i):
            share = weights[i] / total * weights[j] / (total - weights[i]) + weights[j] / total * weights[i] / (
                total - weights[j]
            )
            distance += (counts[2**i + 2**j].item() - number * share) ** 2 / (number * share)
            cells += 1
    assert counts.sum() == number
    assert distance < chi2.isf(1e-4, cells - 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_rows_sum_to_k(backend):
    with anyk.backend(backend):
        for n, k, t in ((50_000, 500, 1.0), (50_000, 49_000, 100.0), (20_000, 20, 1e-3)):
            scores = made(2, n)
            for name in ("lapsum", "permutahedron", "sinkhorn"):
                total = anyk.soft_topk(scores, k, name, t).double().sum(-1)
                assert total.tolist() == pytest.approx([k] * 2, rel=1e-5), (name, n, k, t)


@each_backend
@pytest.mark.parametrize("n", [1000, 5000])
def test_hard_masks_of_half_a_long_row(backend, n):
    """Skewed: between mean and median there are more scores than a search from one to the next has steps."""
    with anyk.backend(backend):
        total = anyk.soft_topk(made(2, n).exp(), n // 2, temperature=1e-4).double().sum(-1)
    assert total.tolist() == pytest.approx([n // 2] * 2, rel=1e-5)


# ---- vmap, torch.compile, devices that must not be waited for ------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.function not in ("exact", "gumbel", "real k")], ids=label)
def test_vmap_and_jacobians(case):
    row = made(N, dtype=torch.double)
    rows = torch.stack([row, row.flip(0)])
    torch.testing.assert_close(torch.func.vmap(case)(rows), torch.stack([case(each) for each in rows]))
    if case.function in ("hard", "select"):
        return
    jacobian = torch.func.jacrev(case)(row)
    attached = row.clone().requires_grad_()
    expected = [torch.autograd.grad(each, attached, retain_graph=True)[0] for each in case(attached).reshape(-1)]
    torch.testing.assert_close(jacobian.reshape(-1, N), torch.stack(expected))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("case", [case for case in SMOOTH if case.function != "select"], ids=label)
def test_forward_mode_by_the_temperature(case):
    scores, temperature = made(ROWS, N, dtype=torch.double), torch.tensor(0.7, dtype=torch.double)

    def value(temperature):
        return weighted(case(scores, temperature))

    _, tangent = torch.func.jvp(value, (temperature,), (torch.ones_like(temperature),))
    torch.testing.assert_close(tangent, torch.func.grad(value)(temperature))


@pytest.mark.parametrize("case", TRACED, ids=label)
def test_one_graph(case):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def call(scores, temperature):
        if case.function in ("exact", "gumbel"):  # a generator is not traced
            own = {} if case.function == "exact" else {"method": "gumbel", "operator": case.operator}
            return anyk.sample_k_subset(scores, 2, temperature=temperature, **own)
        return case(scores, temperature)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    scores, temperature = made(ROWS, N).requires_grad_(), torch.tensor(0.7, requires_grad=True)
    actual = compiled(scores, temperature)
    gradients = torch.autograd.grad(weighted(actual), (scores, temperature))
    assert len(graphs) == 1
    if case.function in ("exact", "gumbel"):
        assert actual.sum(-1).tolist() == [2] * ROWS
        return
    torch.testing.assert_close(actual, case(scores, temperature), rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(weighted(case(scores, temperature)), (scores, temperature))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.__name__.split(".")[0]
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in arguments[1])
        if name in self.NAMES or by_mask:
            self.seen.append(name)
        return function(*arguments, **(keywords or {}))


@every
def test_the_host_waits_for_nothing(case, monkeypatch):
    """As on a device whose values are not looked at: temperature, k and where are tensors."""
    monkeypatch.setattr(checks, "readable", lambda tensor: False)
    scores, temperature = made(ROWS, N).requires_grad_(), torch.tensor(0.7, requires_grad=True)
    with Waits() as waits:
        weighted(case(scores, temperature)).backward()
    assert waits.seen == []


@pytest.mark.parametrize("case", [case for case in CASES if case.function not in ("exact", "gumbel")], ids=label)
def test_no_value_is_needed(case):
    """On the meta device there are none."""
    scores = torch.empty(ROWS, N, device="meta", requires_grad=True)
    with contextlib.ExitStack() as stack:
        if case.function in ("real k", "select", *LOSSES):
            for name in ("VALUES", "RELEVANCE", "REAL_K"):
                stack.enter_context(pytest.MonkeyPatch.context()).setitem(globals(), name, globals()[name].to("meta"))
        result = case(scores, torch.tensor(0.7, device="meta"))
        result.sum().backward()
    assert scores.grad.shape == scores.shape


# ---- bad arguments ------------------------------------------------------------------------------------------------------

S, V, B = torch.zeros(2, 6), torch.zeros(2, 6, 3), torch.ones(2, 6, dtype=torch.bool)
SCORED = {
    "soft_topk": lambda scores=S, **more: anyk.soft_topk(scores, **{"k": 2} | more),
    "soft_rank": lambda scores=S, **more: anyk.soft_rank(scores, **more),
    "soft_sort": lambda scores=S, **more: anyk.soft_sort(scores, **more),
    "soft_quantile": lambda scores=S, **more: anyk.soft_quantile(scores, **{"q": 0.5} | more),
    "select_topk": lambda scores=S, **more: anyk.select_topk(**{"values": V, "k": 2} | more, scores=scores),
    "sample_k_subset": lambda scores=S, **more: anyk.sample_k_subset(scores, **{"k": 2} | more),
    "spearman_loss": lambda scores=S, **more: ranking.spearman_loss(scores, **{"target": S} | more),
    "ndcg_loss": lambda scores=S, **more: ranking.ndcg_loss(scores, **{"relevance": S, "k": 2} | more),
    "recall_loss": lambda scores=S, **more: ranking.recall_loss(scores, **{"relevant": B, "k": 2} | more),
    "average_precision_loss": lambda scores=S, **more: ranking.average_precision_loss(scores, **{"relevant": B} | more),
}
SHARED = {
    "scores": [[1.0, 2.0], None, S.long(), S + 0j, torch.zeros(3, 0), torch.tensor(1.0), np.zeros((2, 6))],
    "operator": ["nope", None, anyk.LapSum, 3, ["lapsum"]],
    "temperature": [0, -1.0, nan, inf, "1", None, True, torch.tensor([1.0, 2.0]), torch.tensor(-1.0), torch.tensor(1)],
    "where": [[True] * 6, torch.ones(2, 6), torch.ones(3, 6, dtype=torch.bool), True],
}
K = [7, -1, "2", None, True, nan, [1, 2], torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 9.0]), torch.tensor([nan, 1.0])]
WHOLE_K = [*K, 2.5, torch.tensor([1.0, 2.0])]  # of the losses, 7 of 6 items are all
DIMS = [2, -3, "a", None, 1.0, True]
OWN = {
    "soft_topk": {"k": K, "dim": DIMS, "largest": ["no", 1, None], "hard": ["no", 1, None]},
    "soft_rank": {"dim": DIMS, "descending": ["no", 1, None]},
    "soft_sort": {"dim": DIMS, "descending": ["no", 1, None]},
    "soft_quantile": {"q": [1.5, -0.1, nan, "a", None, True, [0.1], torch.tensor(1.5), torch.tensor([0.1, nan]),
                            torch.tensor([0.1, 0.2, 0.3]), torch.tensor(True)], "dim": DIMS},
    "select_topk": {"k": [0, *WHOLE_K], "values": [V.long(), V[0], S, [1.0], None], "operator": ["permutahedron"]},
    "sample_k_subset": {"k": WHOLE_K, "dim": DIMS, "method": ["other", None, 1], "generator": [1, "a"]},
    "spearman_loss": {"target": [S[:, :5], [1.0], None, S + 0j]},
    "ndcg_loss": {"relevance": [S[:, :5], None, S - 1, S + 0j], "k": [0, *(each for each in WHOLE_K[1:] if each is not None)]},
    "recall_loss": {"relevant": [B[:, :5], None, S], "k": [0, *WHOLE_K[1:]]},
    "average_precision_loss": {"relevant": [B[:, :5], None, S]},
}  # fmt: skip
for _name in SCORED:
    if _name.endswith("_loss"):
        OWN[_name]["reduction"] = ["all", None, 1]


@pytest.mark.parametrize("function", SCORED)
def test_every_wrong_argument_is_named(function):
    for name, values in [*SHARED.items(), *OWN[function].items()]:
        for value in values:
            with pytest.raises((TypeError, ValueError)) as caught:
                SCORED[function](**{name: value})
            told = str(caught.value)
            names = {"scores": ("scores", "prediction", "dim")}.get(name, (name,))  # no dimension of a number: dim is wrong
            assert told.startswith(tuple(f"{each}:" for each in names)), (name, value, told)
            assert "expected" in told, (name, value, told)
            assert "got" in told or name == "operator", (name, value, told)


def test_a_temperature_beside_an_operator_is_refused():
    for value in (0.5, torch.tensor(1.0), True):
        with pytest.raises(TypeError, match="temperature: expected none beside an operator"):
            anyk.soft_rank(S, anyk.LapSum(), value)


def test_what_an_operator_cannot_do_names_those_that_can():
    for name, make in OPERATORS.items():
        kind = type(make())
        for what, call in {
            "mask": lambda o: anyk.soft_topk(S, 2, o),
            "ranks": lambda o: anyk.soft_rank(S, o),
            "sort": lambda o: anyk.soft_sort(S, o),
            "threshold": lambda o: anyk.soft_quantile(S, 0.5, o),
        }.items():
            if has(kind, what):
                call(name)
                continue
            able = sorted({type(make()).__name__ for make in OPERATORS.values() if has(type(make()), what)})
            with pytest.raises(TypeError, match=f"operator: {kind.__name__} has no {what}: expected one of {', '.join(able)}"):
                call(name)
