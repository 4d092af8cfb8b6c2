"""Permutahedron: the projections against slow references, the digits of hard rows, and what the plain code costs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from torch.utils._python_dispatch import TorchDispatchMode

import anyk
from anyk.operators import Inclusion, Threshold
from anyk.operators.permutahedron import blocks

inf, nan = torch.inf, torch.nan
quick = settings(max_examples=40, deadline=None)
values = st.floats(-8, 8, width=32) | st.integers(-3, 3).map(float)  # with ties
temperatures = st.sampled_from([0.1, 0.5, 1.0, 7.0])
dtypes = st.sampled_from(["float32", "float64"])
functions = pytest.mark.parametrize("function", ["mask", "ranks", "sort"])
each_setting = pytest.mark.parametrize("setting", ["torch", "auto"])  # a fixture would be one for all examples of hypothesis


def apply(function, operator, scores):
    return operator.mask(scores, 3) if function == "mask" else getattr(operator, function)(scores)


def bisected(scores, k):
    """The mask, by bisection."""
    low, high = scores.min() - 2, scores.max() + 1
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (scores - middle).clamp(0, 1).sum() > k else (low, middle)
    return (scores - high).clamp(0, 1)


def projected(z, w):
    """The projection of z onto the permutations of w."""
    order = np.argsort(-z, kind="stable")
    result = np.empty_like(z)
    result[order] = z[order] - isotonic_regression(z[order] - np.sort(w)[::-1], increasing=False).x
    return torch.from_numpy(result)


def references(row, t):
    """Ranks and sort, descending."""
    row, place = np.array(row, dtype=float), np.arange(1.0, len(row) + 1)
    return projected(-row / t, place), projected(place[::-1] / t, row)


# ---- the mask ------------------------------------------------------------------------------------------------------------


@each_setting
@quick
@given(
    data=st.data(), row=st.lists(values, min_size=2, max_size=12), t=temperatures, dtype=st.sampled_from(["float32", "float64"])
)
def test_masks_against_bisection(setting, data, row, t, dtype):
    scores = torch.tensor(row, dtype=getattr(torch, dtype))
    for k in (data.draw(st.integers(1, len(row) - 1)), data.draw(st.floats(0.01, 0.99)) * len(row)):
        expected = bisected(scores.double() / t, k)
        with anyk.backend(setting):
            mask = anyk.Permutahedron(t).mask(scores, k)
        torch.testing.assert_close(mask.double(), expected, rtol=0, atol=1e-5 if dtype == "float32" else 1e-12)
        torch.testing.assert_close(mask.sum().item(), float(k), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_zeros_and_ones_are_exact(backend, kind):
    """k-th and next are at least t apart: all are 0 or 1, to the bit, and nothing has a gradient."""
    scores = torch.randn(50, 30, dtype=kind).sort(descending=True).values
    scores[:, 7:] -= 1.01 * 0.3
    scores[:, 20:] = -inf
    scores = scores[:, torch.randperm(30)].requires_grad_()
    for k in (7, torch.full((50,), 7.0, requires_grad=True)):
        mask = anyk.Permutahedron(0.3).mask(scores, k)
        assert torch.equal(mask, torch.zeros_like(mask).scatter(-1, scores.topk(7).indices, 1))
        (mask * torch.randn_like(mask)).sum().backward()
        assert (scores.grad == 0).all()
    assert (k.grad == 0).all()


def test_the_gradient_by_its_formula(backend):
    scores = torch.tensor([2.0, 0.4, 0.1, 0.9, -3.0], requires_grad=True)
    k, t = torch.tensor(2.5, requires_grad=True), torch.tensor(0.8, requires_grad=True)
    mask, weight = anyk.Permutahedron(t).mask(scores, k), torch.tensor([1.0, 2.0, 5.0, 1.0, 7.0])
    inside = (mask > 0) & (mask < 1)
    assert inside.tolist() == [False, True, True, False, False]
    of_scores, of_k, of_t = torch.autograd.grad((mask * weight).sum(), (scores, k, t))
    mean = weight[inside].mean()
    expected = torch.where(inside, weight - mean, 0) / t
    torch.testing.assert_close(of_scores, expected.detach())
    torch.testing.assert_close(of_k, mean)
    torch.testing.assert_close(of_t, -(expected * mask).sum().detach())


@pytest.mark.parametrize("n", [1000, 100_000])
def test_large_masks_in_float32(backend, n):
    scores = torch.randn(2, n)
    for k, t in ((1, 100.0), (n // 2, 1.0), (n - 3, 0.01), (0.37 * n, 5.0)):
        expected = torch.stack([bisected(row / t, k) for row in scores.double()])
        mask = anyk.Permutahedron(t).mask(scores, k).double()
        torch.testing.assert_close(mask.sum(-1), torch.full((2,), float(k)).double(), rtol=1e-5, atol=0)
        torch.testing.assert_close(mask, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("row", "k"), [([inf, inf, inf, 1.0], 2), ([3e38, -3e38, 0.0, 1.0], 1), ([-inf, 1.0, -inf, 1.5], 3)])
@pytest.mark.parametrize("t", [1e-6, 1.0])
def test_masks_of_infinite_scores(backend, row, k, t):
    scores = torch.tensor(row, requires_grad=True)
    mask = anyk.Permutahedron(t).mask(scores, k)
    assert mask.sum().item() == pytest.approx(min(k, (scores > -inf).sum().item()))
    assert (mask[scores == -inf] == 0).all()
    mask[0].backward()
    assert scores.grad.isfinite().all()


# ---- ranks and sort ------------------------------------------------------------------------------------------------------


@each_setting
@quick
@given(row=st.lists(values, min_size=1, max_size=15), t=temperatures, dtype=dtypes)
def test_ranks_and_sort_against_scipy(setting, row, t, dtype):
    scores, operator = torch.tensor(row, dtype=getattr(torch, dtype)), anyk.Permutahedron(t)
    with anyk.backend(setting):
        ranks, ordered = operator.ranks(scores), operator.sort(scores)
    expected = references(row, t)
    torch.testing.assert_close((ranks.double(), ordered.double()), expected, rtol=0, atol=1e-4 if dtype == "float32" else 1e-10)
    assert ranks.sum().item() == pytest.approx(len(row) * (len(row) + 1) / 2, rel=1e-6)


@pytest.mark.parametrize("n", [2, 3, 7, 64, 65, 300])
@pytest.mark.parametrize("kind", ["random", "walk", "falling", "plateaus", "spikes", "far groups"])
def test_isotonic_regression_against_scipy(n, kind):
    steps = {
        "random": torch.randn(4, n - 1),
        "walk": torch.randn(4, n - 1) - 0.1,
        "falling": -torch.rand(4, n - 1),
        "plateaus": torch.randint(-1, 2, (4, n - 1)).float(),
        "spikes": torch.randn(4, n - 1) * 10.0 ** torch.randint(-3, 4, (4, n - 1)),
        "far groups": torch.where(torch.rand(4, n - 1) < 0.1, 1e20, torch.randn(4, n - 1) - 0.5),
    }[kind]
    first, size = blocks(steps)
    for row in range(4):
        far = steps[row] > 1e15  # nothing is pooled across: so each group for itself
        start = 0
        for end in [*(far.nonzero().flatten() + 1).tolist(), n]:
            own = np.concatenate([[0.0], np.cumsum(steps[row, start : end - 1].double().numpy())])
            starts = isotonic_regression(own).blocks
            fit = isotonic_regression(own).x
            means = [own[a:b].mean() for a, b in itertools.pairwise(starts)]
            assert np.allclose(np.repeat(means, np.diff(starts)), fit)
            found = (first[row, start:end] - start).tolist()
            ours = [own[a : a + int(b)].mean() for a, b in zip(found, size[row, start:end], strict=True)]
            scale = max(1.0, np.abs(own).max())
            assert np.allclose(ours, fit, rtol=0, atol=2e-6 * scale), (kind, row)
            start = end


@pytest.mark.parametrize("far", [1e3, 1e7, 1e9])
def test_float32_pools_the_same_beside_steps_that_take_its_digits(far):
    steps = torch.where(torch.rand(500, 99) < 0.1, far, torch.randn(500, 99) - 0.5)
    torch.testing.assert_close(blocks(steps)[0], blocks(steps.double())[0])


def test_equal_neighbours_are_one_block():
    """As in the kernels: scores exactly t apart have the gradient of a block."""
    first, size = blocks(torch.tensor([0.0, 1.0, 0.0, 0.0, 5.0]))
    assert first.tolist() == [0, 0, 2, 2, 2, 5]
    assert size.tolist() == [2, 2, 3, 3, 3, 1]


def test_long_rows_in_float32():
    scores = torch.randn(1, 20_000)
    for t in (1e-4, 1e-2, 1.0, 100.0):
        ranks, ordered = references(scores[0].numpy(), t)
        with anyk.backend("torch"):
            torch.testing.assert_close(anyk.Permutahedron(t).ranks(scores)[0].double(), ranks, rtol=2e-6, atol=1e-3)
            torch.testing.assert_close(anyk.Permutahedron(t).sort(scores)[0].double(), ordered, rtol=2e-6, atol=1e-4)


def test_ranks_are_exact_where_scores_are_t_apart(backend):
    scores = torch.stack([torch.randperm(40) for _ in range(5)]) * 0.5
    expected = 40 - 2 * scores
    assert torch.equal(anyk.Permutahedron(0.5).ranks(scores), expected)
    assert torch.equal(anyk.Permutahedron(0.4).ranks(scores), expected)


def test_the_sort_is_exact_where_gaps_are_small_and_stays_in_the_range(backend):
    scores = torch.rand(5, 40)
    exact = scores.sort(descending=True).values
    gap = (exact[:, :-1] - exact[:, 1:]).amax().item()
    assert torch.equal(anyk.Permutahedron(0.99 / gap).sort(scores), exact)
    for t in (1e-3, 1.0, 100.0):
        found = anyk.Permutahedron(t).sort(10 * scores)
        torch.testing.assert_close(found.sum(-1), 10 * scores.sum(-1), rtol=1e-5, atol=0)
        assert (found <= 10 * exact[:, :1] + 1e-4).all()
        assert (found >= 10 * exact[:, -1:] - 1e-4).all()
        assert (found.diff() <= 0).all()


def test_the_strength_is_that_of_torchsort(backend):
    """soft_sort(x, regularization="l2", regularization_strength=r) there: anchors (n, …, 1) / r."""
    x, r = torch.randn(9), 0.7
    anchors = np.arange(9, 0, -1) / r
    expected = isotonic_regression(anchors - np.sort(-x.double().numpy())[::-1], increasing=False).x - anchors
    found = anyk.soft_sort(x, "permutahedron", r)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_that_are_far_apart_keep_their_digits(backend, dtype):
    group = torch.tensor([0.0, 1.0, 3.0, 1.5], dtype=dtype)
    operator = anyk.Permutahedron()
    for place in (1e6, 1e20, inf):
        scores = torch.cat([group, torch.full((3,), place, dtype=dtype), -torch.full((2,), min(place, 1e30), dtype=dtype)])
        ranks = operator.ranks(scores)
        torch.testing.assert_close(ranks[:4], operator.ranks(group) + 3, rtol=0, atol=1e-6)
        assert ranks[4:].tolist() == [2, 2, 2, 8.5, 8.5]


def test_infinite_scores_stay_and_take_no_part(backend):
    scores = torch.tensor([1.0, -inf, inf, 2.5, -inf, 2.0], requires_grad=True)
    operator, few = anyk.Permutahedron(0.5), torch.tensor([1.0, 2.5, 2.0])
    ordered, ranks = operator.sort(scores), operator.ranks(scores)
    assert ordered[[0, 4, 5]].tolist() == [inf, -inf, -inf]
    torch.testing.assert_close(ordered[1:4].detach(), operator.sort(few))
    assert ranks[[1, 4]].tolist() == [5, 6]
    torch.testing.assert_close(ranks[[0, 3, 5]].detach(), 1 + operator.ranks(few))
    weight = torch.arange(6.0)
    for result in (ordered[1:4] * weight[1:4], ranks * weight):
        (grad,) = torch.autograd.grad(result.sum(), scores, retain_graph=True)
        assert grad.isfinite().all()
        assert (grad[[1, 4]] == 0).all()


# ---- all three -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward mode
@functions
def test_derivatives(function):
    """The second ones are 0 almost everywhere, but for the temperature's."""
    scores = torch.randn(3, 9, dtype=torch.double, requires_grad=True)
    t = torch.tensor([[0.7], [2.0], [0.3]], dtype=torch.double, requires_grad=True)

    def value(scores, t):
        return apply(function, anyk.Permutahedron(t), scores)

    assert torch.autograd.gradcheck(value, (scores, t), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(value, (scores, t))


@functions
def test_the_kernel_and_the_plain_code_agree(function):
    results = []
    for backend in ("torch", "native"):
        scores, t = torch.randint(-9, 9, (20, 33)).float() / 4, torch.tensor(0.6, requires_grad=True)
        scores.requires_grad_()
        with anyk.backend(backend):
            result = apply(function, anyk.Permutahedron(t), scores)
            results.append((result.detach(), *torch.autograd.grad((result * torch.linspace(-1, 1, 33)).sum(), (scores, t))))
        torch.manual_seed(0)
    torch.manual_seed(0)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@functions
def test_forms_of_a_call(function):
    scores = torch.randn(4, 8)
    expected = apply(function, anyk.Permutahedron(), scores)
    torch.testing.assert_close(torch.func.vmap(lambda row: apply(function, anyk.Permutahedron(), row))(scores), expected)
    half = apply(function, anyk.Permutahedron(), scores.half())
    assert half.dtype == (torch.float32 if function == "ranks" else torch.float16)
    torch.testing.assert_close(half.float(), apply(function, anyk.Permutahedron(), scores.half().float()), rtol=1e-3, atol=1e-3)
    temperatures = torch.tensor([0.5, 1.0, 2.0, 4.0])
    by_row = torch.stack(
        [apply(function, anyk.Permutahedron(t.item()), row) for t, row in zip(temperatures, scores, strict=True)]
    )
    torch.testing.assert_close(apply(function, anyk.Permutahedron(temperatures), scores), by_row)
    scores[2, 3] = nan
    result = apply(function, anyk.Permutahedron(), scores)
    assert result[2].isnan().all()
    assert result[[0, 1, 3]].isfinite().all()


def test_it_is_no_operator_of_the_losses():
    operator = anyk.Permutahedron()
    assert not isinstance(operator, (Inclusion, Threshold))
    with pytest.raises(TypeError, match="Permutahedron"):
        anyk.topk_error(torch.randn(2, 5), torch.tensor([0, 1]), {2: 1.0}, operator)


# ---- where there is no kernel --------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Operations that are no views, and results of full size in float64."""

    VIEWS = (
        "view",
        "expand",
        "transpose",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "detach",
        "alias",
        "unbind",
        "_unsafe_view",
    )

    def __init__(self):
        super().__init__()
        self.number = self.wide = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function._schema.name.split("::")[1] not in self.VIEWS:
            self.number += 1
            each = result[0] if isinstance(result, (tuple, list)) else result
            self.wide += isinstance(each, torch.Tensor) and each.dtype == torch.float64 and each.numel() > 4096
        return result


@pytest.mark.parametrize(("function", "most"), [("mask", 70), ("ranks", 500), ("sort", 500)])
def test_few_operations_and_no_float64(function, most):
    scores = torch.randn(64, 1000, device="meta", requires_grad=True)
    with Counted() as counted:
        apply(function, anyk.Permutahedron(), scores).sum().backward()
    assert counted.number <= most
    assert counted.wide == 0


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        (lambda s, k: anyk.Permutahedron().mask(s, k), [(2 + i, 20 + 7 * i, 1 + i) for i in range(10)]),
        (lambda s, k: anyk.Permutahedron().ranks(s), [(2 + i, 8, 1) for i in range(10)]),
    ],
    ids=["mask", "ranks"],
)
def test_few_graphs(call, sizes):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for batch, n, k in sizes:
        scores = torch.randn(batch, n)
        torch.testing.assert_close(compiled(scores, k), call(scores, k), rtol=1e-4, atol=1e-5)
    assert len(graphs) <= 3


def test_the_middle_of_two_ties():
    """Two scores alone: the ranks are 1.5 less half the gap, up to a gap of t."""
    for gap in (0.0, 0.3, 0.99):
        ranks = anyk.Permutahedron(2.0).ranks(torch.tensor([2 * gap, 0.0]))
        assert ranks.tolist() == pytest.approx([1.5 - gap / 2, 1.5 + gap / 2], abs=1e-6)
    assert math.isclose(anyk.Permutahedron().ranks(torch.tensor([7.0, 0.0]))[0].item(), 1.0)
