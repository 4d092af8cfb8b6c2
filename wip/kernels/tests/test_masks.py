"""The kernels give the plain code's masks, thresholds, ranks, sorts and draws, and their gradients, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

import anyk
from anyk import kernels
from anyk.kernels import masks, native

if native.why_not:
    pytest.skip(f"the native library: {native.why_not}", allow_module_level=True)

inf, nan = torch.inf, torch.nan
MASKS = {"lapsum": anyk.LapSum, "permutahedron": anyk.Permutahedron, "ksubset": anyk.KSubset, "splitter": lambda t=1.0: anyk.SortingNetwork("splitter", t)}
THRESHOLDS = ("lapsum", "permutahedron")
MOST = {"ksubset": 3000, "splitter": 200}
"""scores in a row, where the plain code takes long"""


@pytest.fixture(params=[0, 1, 2, 3])
def variant(request):
    """An instruction set that this machine has, the fastest first."""
    if not native.library.use(request.param):
        pytest.skip("this machine has not got these instructions")
    yield request.param
    next(number for number in range(4) if native.library.use(number))


def spread(shape: torch.Size) -> Tensor:
    return torch.linspace(-1, 2, shape.numel(), dtype=torch.double)[torch.randperm(shape.numel())].reshape(shape)


def assert_as_in_float64(make: Callable[..., Tensor], *inputs: Tensor, most: tuple[float, ...] = (2e-6, 3e-6, 2e-5)) -> Tensor:
    """Result and gradients by the kernel, as far off as rounding allows, relative to the largest; and no call that it refuses.

    Args:
        make: of the scores and whatever else has a gradient.
        most: for the result, the gradient by the scores, and the others, which are long sums.
    """
    found = {}
    for backend, dtype in (("native", torch.float32), ("torch", torch.double)):
        with anyk.backend(backend):
            leaves = [each.detach().clone().to(dtype).requires_grad_() for each in inputs]
            result = make(*leaves)
            torch.manual_seed(1)
            incoming = spread(result.shape).to(dtype)
            found[backend] = result.detach(), *torch.autograd.grad(result, leaves, incoming, allow_unused=True)
    for ours, truth, limit in zip(*found.values(), [*most, *most[2:] * len(inputs)], strict=False):
        if truth is None:
            assert ours is None or not ours.any()
            continue
        scale = max(1.0, truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 1.0)
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=limit * scale, equal_nan=True)
    return found["native"][0]


@pytest.fixture
def kernel_only(monkeypatch):
    """Fails if a kernel is not asked, or leaves it to the plain code."""
    calls = []
    real = masks._call

    def spied(name, *given, **fields):
        calls.append(name)
        assert real(name, *given, **fields), f"{name} left it to the plain code"
        return True

    monkeypatch.setattr(masks, "_call", spied)
    yield
    assert calls, "no kernel was asked"


# ---- masks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("rows", "n"), [(3, 2), (5, 17), (20, 100), (2, 3000), (1, 40_000)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_masks(name, rows, n, temperature, kernel_only):
    if n > MOST.get(name, n):
        n = MOST[name]
    scores = 3 * torch.randn(rows, n)
    if n % 2:
        scores = scores.round()  # ties
    for k in sorted({1, n // 3, n // 2, n - 1} - {0}):
        t = torch.tensor(temperature)
        mask = assert_as_in_float64(lambda s, t, k=k: anyk.soft_topk(s, k, MASKS[name](t)), scores, t, most=(1e-5, 1e-5, 5e-5))
        torch.testing.assert_close(mask.sum(-1), torch.full((rows,), float(k)), rtol=2e-6, atol=2e-6)
        assert mask.amin() >= 0 and mask.amax() <= 1  # noqa: PT018


@pytest.mark.parametrize("name", MASKS)
def test_masks_by_every_instruction_set(name, variant, kernel_only):
    for n, k in ((9, 4), (133, 20), (1000 if name in THRESHOLDS else 200, 100)):
        assert_as_in_float64(lambda s, k=k: anyk.soft_topk(s, k, name), torch.randn(20, n))


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize("n", [1, 2, 17, 1000])
def test_a_real_k_for_each_row(name, n, kernel_only):
    scores, k = 3 * torch.randn(9, n), n * torch.rand(9, 1)
    assert_as_in_float64(lambda s, k: anyk.soft_topk(s, k.squeeze(-1), MASKS[name](0.5)), scores, k, most=(1e-5, 1e-5, 1e-4))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*THRESHOLDS, "ksubset"]),
    values=st.lists(st.integers(-4, 4), min_size=2, max_size=40),
    unit=st.sampled_from([0.1, 1.0, 1e4]),
    offset=st.sampled_from([0.0, 1e5]),
    share=st.floats(0.01, 0.99),
)
def test_masks_of_ties_and_gaps(name, values, unit, offset, share):
    scores = offset + unit * torch.tensor(values, dtype=torch.float32)
    k = min(len(values) - 1, max(1, round(share * len(values))))
    mask = assert_as_in_float64(lambda s: anyk.soft_topk(s, k, name), scores)
    assert mask.sum().item() == pytest.approx(k, rel=1e-5)
    for one, other in itertools.combinations(range(len(values)), 2):
        assert values[one] != values[other] or mask[one] == mask[other]


LONG = 70_001  # more than four parts, and no whole number of vectors


def long_rows(kind: str) -> Tensor:
    """Rows of LONG scores that are hard for whoever looks for the best ones by samples and groups."""
    place = torch.arange(float(LONG))
    return {
        "normal": torch.randn(2, LONG),
        "ascending": torch.stack([place, -place]) / 1000,
        # as many as there are groups for 125, with vectors of 16 and of 8
        "periods": (place % torch.tensor([[1008], [1016]]) < 30) * (1 + place / LONG),
        "ties": torch.randn(2, LONG).round(),
        "equal": torch.full((2, LONG), 0.3),
        "two heaps": torch.where(place % 2 < 1, 0.0, 1e6) + torch.randn(2, LONG).round(decimals=2),
        "offset": 1e6 + torch.randn(2, LONG),
        "one far ahead": torch.cat([torch.full((2, 1), 1e6), torch.randn(2, LONG - 1)], -1),
        "a heap of 190": torch.where(place % 370 < 1, 0.0, -50.0) + 0.1 * torch.randn(2, LONG),
        "padded": torch.randn(2, LONG).masked_fill(place % 3 < 1, -inf),
    }[kind]


ROWS = ("normal", "ascending", "periods", "ties", "equal", "two heaps", "offset", "one far ahead", "a heap of 190", "padded")


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("k", [1, 125, LONG // 2, LONG - 125])
def test_masks_of_long_rows(name, kind, k, kernel_only):
    assert_as_in_float64(lambda s: anyk.soft_topk(s, k, name), long_rows(kind), most=(1e-5, 1e-5))


HARD = {
    "gaps": torch.tensor([[0.0, 1e6, -1e6, 3e6, 5.0, 4.0, -2e6]]),
    "far apart": torch.tensor([[3e38, -3e38, 1e38, 0.0, 1.0, -1e38, 2.0]]),
    "offset": 1e6 + torch.tensor([[0.0, 1.0, -1.0, 3.0, 5.0, 4.0, -2.0]]),
    "equal and huge": torch.full((1, 100), 1e30),
    "one ahead": torch.tensor([[50.0] + [0.0] * 40]),
    "one behind": torch.tensor([[-50.0] + [0.0] * 40]),
    "an undecided one": torch.tensor([[0.0] + [-7.6] * 1000]),
    "wide": torch.linspace(-400, 400, 41)[None],
    "padding": torch.tensor([[0.0, -inf, 1.0, 2.0, -inf, 3.0, 4.0], [-inf] * 7, [-inf] * 6 + [0.0], [0.0] * 7]),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
def test_masks_of_hard_rows(name, kind, temperature):
    scores = HARD[kind]
    n, number = scores.shape[-1], (scores > -inf).sum(-1)
    if (name, kind) in (("splitter", "far apart"), ("splitter", "an undecided one"), ("lapsum", "equal and huge"), ("permutahedron", "wide")):
        pytest.skip("left to the plain code, or at a kink")
    for k in sorted({1, 2, 3, n // 2, n - 2, n - 1}):
        mask = assert_as_in_float64(lambda s, k=k: anyk.soft_topk(s, k, MASKS[name](temperature)), scores)
        assert not mask[scores == -inf].any()
        torch.testing.assert_close(mask.sum(-1), number.clamp(max=k).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_nan_and_infinity(name):
    scores = torch.randn(3, 8)
    scores[1, 2], scores[2, 3] = nan, inf
    mask = anyk.soft_topk(scores, 3, name)
    assert mask.isnan().all(-1).tolist() == [False, True, False]
    assert mask[2, 3] == 1
    scores, incoming = torch.randn(1, 8, requires_grad=True), torch.full((1, 8), nan)
    assert torch.autograd.grad(anyk.soft_topk(scores, 3, name), scores, incoming)[0].isnan().any()


@pytest.mark.parametrize("name", THRESHOLDS)
def test_nan_in_the_gradients_of_k_and_of_the_temperature(name):
    scores = torch.randn(3, 8)
    scores[1, 2] = nan
    t, k = torch.tensor(0.7, requires_grad=True), torch.full((3,), 3.0, requires_grad=True)
    of_t, of_k = torch.autograd.grad(anyk.soft_topk(scores, k, MASKS[name](t)).sum(), (t, k))
    assert of_t.isnan()
    assert of_k.isnan().tolist() == [False, True, False]


def test_the_gradient_of_k_where_every_slope_is_zero_in_floating_point():
    assert_as_in_float64(anyk.LapSum().mask, torch.tensor([[0.0, -1.0, 300.0, 301.0]]), torch.tensor([2.0]))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_and_written_as_it_is(name, dtype, variant, kernel_only):
    scores = torch.randn(7, 333).to(dtype).requires_grad_()
    mask = anyk.soft_topk(scores, 20, name)
    assert mask.dtype == dtype
    exact = scores.detach().double().requires_grad_()
    with anyk.backend("torch"):
        expected = anyk.soft_topk(exact, 20, name)
    torch.testing.assert_close(mask, expected.to(dtype), rtol=1e-2, atol=1e-6)
    incoming = torch.randn(7, 333).to(dtype)
    (gradient,), (truth,) = torch.autograd.grad(mask, scores, incoming), torch.autograd.grad(expected, exact, incoming.double())
    torch.testing.assert_close(gradient, truth.to(dtype), rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("make", [
    lambda s: anyk.LapSum(2.0).mask(s, 3),
    lambda s: anyk.Permutahedron(2.0).mask(s, 3),
    lambda s: anyk.KSubset(2.0).mask(s, 3),
    lambda s: anyk.SortingNetwork(temperature=2.0).mask(s, 3),
    lambda s: anyk.LapSum(2.0).threshold(s, 3.3),
    anyk.LapSum(2.0).ranks,
])  # fmt: skip
def test_second_derivatives_come_from_the_plain_code(make):
    results = []
    for dtype in (torch.float32, torch.double):
        scores = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(make(scores).square().sum(), scores, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), scores)[0].double())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# ---- thresholds, ranks, sorts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "n"), [(3, 2), (5, 17), (40, 100), (2, 5000)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_thresholds(rows, n, temperature, kernel_only):
    scores = 3 * torch.randn(rows, n)
    if n % 2:
        scores = scores.round()
    k = ((0.02 + 0.96 * torch.rand(rows)) * n).clamp(min=0.3)  # near an integer, with gaps, everything depends on it
    make = lambda s, k, t: anyk.LapSum(t).threshold(s, k)  # noqa: E731
    assert_as_in_float64(make, scores, k, torch.tensor(temperature), most=(2e-5, 2e-5, 2e-5))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("k", [124.5, LONG / 3, 100.0])
def test_thresholds_of_long_rows(kind, k, kernel_only):
    assert_as_in_float64(lambda s: anyk.LapSum().threshold(s, k), long_rows(kind), most=(2e-5, 2e-5))


def test_a_threshold_far_from_every_score_has_the_gradient_of_the_nearest(backend):
    """Every slope is zero in floating point there."""
    for gap in (100.0, 1e6):
        scores = torch.tensor([[0.0, -1.0, gap, gap + 1], [0.0, 0.0, gap, gap]], requires_grad=True)
        q = torch.full((2,), 0.5, requires_grad=True)
        found = anyk.soft_quantile(scores, q)
        of_scores, of_q = torch.autograd.grad(found.sum(), (scores, q))
        torch.testing.assert_close(found, torch.full((2,), gap / 2), rtol=1e-6, atol=1e-4)
        near = 0.5 / (1 + math.exp(-1))
        torch.testing.assert_close(of_scores, torch.tensor([[near, 0.5 - near] * 2, [0.25] * 4]))
        assert of_q.isfinite().all()
        assert (of_q > 1e9).all()


@pytest.mark.parametrize(("name", "what"), [("lapsum", "ranks"), ("permutahedron", "ranks"), ("permutahedron", "sort")])
@pytest.mark.parametrize("n", [1, 2, 50, 3000])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_ranks_and_sorts(name, what, n, temperature, kernel_only):
    make = lambda s, t: getattr(MASKS[name](t), what)(s)  # noqa: E731
    assert_as_in_float64(make, 3 * torch.randn(3, n), torch.tensor(temperature), most=(1e-5, 1e-5, 1e-4))


@pytest.mark.parametrize("kind", ["splitter", "bitonic", "odd_even"])
@pytest.mark.parametrize("swap", ["logistic", "logistic_art", "gaussian"])
def test_masks_of_networks(kind, swap, kernel_only):
    make = lambda s, t, k: anyk.SortingNetwork(kind, t, swap).mask(s, k)  # noqa: E731
    for (rows, n), temperature in itertools.product([(3, 2), (17, 7), (33, 40)], [0.05, 1.0, 10.0]):
        scores = torch.randn(rows, n)
        if n == 7:
            scores = scores.round()  # ties
        for k in {1, n // 2, n - 1}:
            most = (5e-5, 5e-5, 5e-5) if swap == "logistic_art" else (2e-6, 2e-6, 2e-5)
            assert_as_in_float64(lambda s, t, k=k: make(s, t, k), scores, torch.tensor(temperature), most=most)


# ---- draws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
def test_the_mask_of_ksubset_is_what_all_subsets_say(temperature, variant):
    for n in (2, 3, 8, 12):
        scores = 3 * torch.randn(n)
        for k in range(1, n):
            subsets = torch.tensor(list(itertools.combinations(range(n), k)))
            members = torch.zeros(len(subsets), n, dtype=torch.double).scatter(1, subsets, 1)
            expected = (members @ (scores.double() / temperature)).softmax(0) @ members
            torch.testing.assert_close(anyk.KSubset(temperature).mask(scores, k).double(), expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_draws_have_the_exact_distribution(backend):
    """Of every subset, among 9 entries."""
    scores, k, number = torch.tensor([1.0, 0.3, -0.5, -inf, 2.0, 0.0, -1.5, 0.8, 1.2]), 3, 60_000
    with anyk.backend(backend):
        drawn = anyk.sample_k_subset(scores.expand(number, 9), k, temperature=0.8)
    counts = torch.bincount((drawn * 2 ** torch.arange(9)).sum(-1).long(), minlength=512).tolist()
    weights = {
        sum(2**i for i in subset): math.exp(sum(scores[i].item() for i in subset) / 0.8)
        for subset in itertools.combinations([0, 1, 2, 4, 5, 6, 7, 8], k)
    }
    expected = {code: number * weight / sum(weights.values()) for code, weight in weights.items()}
    assert sum(counts[code] for code in expected) == number
    assert sum((counts[code] - mean) ** 2 / mean for code, mean in expected.items()) < chi2.isf(1e-4, len(expected) - 1)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (64, 10), (1000, 3), (1000, 700), (5000, 200)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_have_k_members_that_are_no_padding(n, k, temperature, dtype, variant):
    scores = 3 * torch.randn(6, n)
    scores[:3, 1::3] = -inf
    scores = scores.to(dtype)
    drawn = anyk.sample_k_subset(scores, k, temperature=temperature)
    assert drawn.dtype == dtype
    assert drawn.unique().tolist() in ([0, 1], [1])
    assert drawn.float().sum(-1).tolist() == (scores > -inf).sum(-1).clamp(max=k).tolist()
    assert not drawn[scores == -inf].any()


def test_draws_depend_on_the_generator_alone():
    """And not on the instruction set."""
    scores, found = torch.linspace(-2, 2, 40).expand(50, 40), []
    for number in range(4):
        if native.library.use(number):
            found += [anyk.sample_k_subset(scores, 7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    next(number for number in range(4) if native.library.use(number))
    assert all(torch.equal(drawn, found[0 if number % 3 < 2 else 2]) for number, drawn in enumerate(found))
    assert not torch.equal(found[0], found[2])


# ---- layouts, threads ----------------------------------------------------------------------------------------------------

TOOLS = {
    "lapsum": lambda s: anyk.soft_topk(s, 30),
    "permutahedron": lambda s: anyk.soft_topk(s, 30, "permutahedron"),
    "ksubset": lambda s: anyk.soft_topk(s, 30, "ksubset"),
    "splitter": lambda s: anyk.soft_topk(s, 30, "splitter"),
    "half of all": lambda s: anyk.soft_topk(s, s.shape[-1] // 2),
    "quantile": lambda s: anyk.soft_quantile(s, 0.9),
    "ranks": anyk.soft_rank,
    "sort": lambda s: anyk.soft_sort(s, "permutahedron"),
    "draw": lambda s: anyk.sample_k_subset(s, 30, generator=torch.Generator().manual_seed(0)),
}


@pytest.fixture
def threads():
    """Sets their number."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("shape", [(64, 1000), (3, LONG), (1, LONG)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(name, shape, dtype, threads):
    if name == "splitter" and shape[1] == LONG:
        pytest.skip("too many wires for a kernel")
    scores = torch.randn(shape).to(dtype).requires_grad_()
    results = []
    for number in (1, 2, 5):
        threads(number)
        result = TOOLS[name](scores)
        incoming = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
        results.append((result, *torch.autograd.grad(result, scores, incoming)))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", TOOLS)
def test_rows_anywhere(name):
    scores = torch.randn(64, 1000)
    incoming = torch.randn_like(TOOLS[name](scores))

    def run(scores):
        leaf = scores.detach().requires_grad_()
        result = TOOLS[name](leaf)
        strided = torch.stack([incoming.reshape(result.shape)] * 2, -1)[..., 0]
        return result, torch.autograd.grad(result, leaf, strided)[0]

    expected = run(scores)
    for same in (torch.stack([scores, scores], 1)[:, 0], scores.t().contiguous().t(), scores.reshape(4, 16, 1000)):
        for found, right in zip(run(same), expected, strict=True):
            assert torch.equal(found.reshape(right.shape), right)
    assert TOOLS[name](scores[:0]).shape[0] == 0


def test_what_the_kernels_refuse_is_left_to_the_plain_code():
    scores = torch.randn(2, 30)
    assert kernels.mask("lapsum", scores, 3, torch.rand(2, 1)) is None  # a temperature for each row
    assert kernels.mask("sinkhorn", scores, 3, 1.0) is None
    assert kernels.network_mask("splitter", "cauchy", scores, 3, 1.0) is None
    assert kernels.sort("lapsum", scores, 1.0) is None
    assert kernels.best(torch.full((1, 5), nan), 2) is None
    assert kernels.mask("lapsum", scores.double(), 3, 1.0) is None
    assert kernels.mask("lapsum", torch.full((1, 7), 1e30), 3, 1.0) is None  # float64 has no digits there for a threshold
