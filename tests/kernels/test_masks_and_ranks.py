"""The native masks, ranks and sorts give the numbers of the plain code in float64."""

import pytest
import torch

import anyk
from anyk.kernels import native

pytestmark = pytest.mark.skipif(bool(native.status()), reason=native.status() or "the native library is there")

OPERATORS = {"lapsum": anyk.LapSum, "permutahedron": anyk.Permutahedron}
each = pytest.mark.parametrize("name", OPERATORS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def compared(make, scores, others=(), tolerance=2e-6):
    """Result and gradients, each as far off as rounding allows, relative to the largest."""
    weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))

    def run(scores, others):
        inputs = [scores.clone().requires_grad_(), *(each.clone().requires_grad_() for each in others)]
        result = make(*inputs)
        return result, torch.autograd.grad((result * weight.to(result.dtype)).sum(), inputs, allow_unused=True)

    actual, gradients = run(scores, others)
    with anyk.backend("torch"):
        expected, exact = run(scores.double(), [each.double() for each in others])
    for found, right in zip((actual, *gradients), (expected, *exact), strict=True):
        right = torch.zeros_like(found).double() if right is None else right
        found = torch.zeros_like(right) if found is None else found
        scale = max(1.0, right.abs().max().item()) * (10 if right.ndim == 0 else 1)  # that of the temperature is a long sum
        torch.testing.assert_close(found.double(), right, rtol=0, atol=tolerance * scale)


@each
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 2), (5, 17), (40, 100), (2, 3000), (1, 40_000)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_masks(name, rows, n, temperature):
    generator = torch.Generator().manual_seed(n)
    scores = 3 * torch.randn(rows, n, generator=generator)
    if n % 2:
        scores = scores.round()  # ties
    tolerance = 1e-5 if temperature < 1 else 3e-6
    for k in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        compared(lambda s, t, k=k: OPERATORS[name](t).mask(s, k), scores, [torch.tensor(temperature)], tolerance)
    real = n * torch.rand(rows, generator=generator)
    compared(lambda s, k: OPERATORS[name](temperature).mask(s, k), scores, [real], tolerance)


@each
def test_masks_of_padding_nan_and_infinity(name):
    scores = torch.randn(6, 40)
    scores[:4, ::3] = -torch.inf
    scores[1, 1:] = -torch.inf
    for k in (0, 3, 20, 39):
        compared(lambda s, t, k=k: OPERATORS[name](t).mask(s, k), scores, [torch.tensor(0.7)])
    scores[2, 5] = torch.nan
    assert OPERATORS[name]().mask(scores, 3).isnan().all(-1).tolist() == [False, False, True, False, False, False]
    t, ks = torch.tensor(0.7, requires_grad=True), torch.full((6,), 3.0, requires_grad=True)
    of_t, of_k = torch.autograd.grad(OPERATORS[name](t).mask(scores, ks).sum(), (t, ks))
    assert of_t.isnan()
    assert of_k.isnan().tolist() == [False, False, True, False, False, False]
    scores[5, 7] = torch.inf  # left to the plain code
    assert anyk.soft_topk(scores, 3, name)[5, 7] == 1


@each
def test_masks_far_from_zero(name):
    """Where a threshold in float64 has no digits left: relative to a score it has."""
    assert anyk.soft_topk(torch.full((2, 7), 1e30), 3, name).sum(-1).tolist() == pytest.approx([3, 3])


def test_the_gradient_of_k_where_every_slope_is_zero_in_floating_point():
    compared(anyk.LapSum().mask, torch.tensor([[0.0, -1.0, 300.0, 301.0]]), [torch.tensor([2.0])])


def test_a_subclass_is_not_computed_by_the_kernel_of_its_base():
    class Own(anyk.LapSum):
        def _mask(self, scores, real, k):
            return torch.full_like(scores, k / scores.shape[-1])

    assert anyk.soft_topk(torch.randn(2, 8), 2, Own()).unique().tolist() == [0.25]


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_and_written_as_it_is(name, dtype):
    scores = torch.randn(7, 333).to(dtype).requires_grad_()
    mask = OPERATORS[name]().mask(scores, 20)
    exact = OPERATORS[name]().mask(scores.detach().float(), 20)
    assert mask.dtype == dtype
    torch.testing.assert_close(mask, exact.to(dtype))
    (gradient,) = torch.autograd.grad(mask.float().square().sum(), scores)
    assert gradient.dtype == dtype


LONG = 70_001  # more than four parts, and no whole number of vectors


def long_rows(kind):
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
        "padded": torch.randn(2, LONG).masked_fill(place % 3 < 1, -torch.inf),
    }[kind]


ROWS = ("normal", "ascending", "periods", "ties", "equal", "two heaps", "offset", "one far ahead", "a heap of 190", "padded")


@each
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("k", [1, 125, LONG // 2, LONG - 125])
def test_masks_of_long_rows(name, kind, k):
    compared(lambda s: OPERATORS[name]().mask(s, k), long_rows(kind), tolerance=1e-5)


@pytest.fixture
def threads():
    """Sets their number."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


TOOLS = {
    "lapsum": lambda s: anyk.soft_topk(s, 30),
    "permutahedron": lambda s: anyk.soft_topk(s, 30, "permutahedron"),
    "half of all": lambda s: anyk.soft_topk(s, s.shape[-1] // 2),
    "quantile": lambda s: anyk.soft_quantile(s, 0.9),
    "splitter": lambda s: anyk.soft_topk(s, 30, "splitter"),
    "ranks": anyk.soft_rank,
    "sort": anyk.soft_sort,
}


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
        weight = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
        results.append((result, *torch.autograd.grad((result * weight).sum(), scores)))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@each
def test_rows_anywhere(name):
    scores = torch.randn(64, 1000)
    expected = OPERATORS[name]().mask(scores, 30)
    strided = torch.stack([scores, scores], 1)[:, 0]
    assert torch.equal(OPERATORS[name]().mask(strided, 30), expected)
    assert torch.equal(OPERATORS[name]().mask(scores.t().contiguous().t(), 30), expected)
    assert OPERATORS[name]().mask(scores[:0], 30).shape == (0, 1000)


@pytest.mark.parametrize(("rows", "n"), [(3, 2), (5, 17), (40, 100), (2, 5000)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_quantiles(rows, n, temperature):
    scores = 3 * torch.randn(rows, n, dtype=torch.float64).float()
    if n % 2:
        scores = scores.round()
    shares = 0.02 + 0.96 * torch.rand(rows)
    ks = (shares * n).clamp(min=0.3)  # the same in both precisions: near an integer, with gaps, everything depends on it

    def make(s, k, t):
        return anyk.LapSum(t).threshold(s, k)

    quantiles(make, scores, [ks, torch.tensor(temperature)])


def quantiles(make, scores, others, tolerance=2e-5):
    """Result and gradients by the kernel beside those of the plain code in float64, relative to the largest of each row."""

    def run(scores, others):
        inputs = [scores.clone().requires_grad_(), *(each.clone().requires_grad_() for each in others)]
        result = make(*inputs)
        weight = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
        return result.detach(), *torch.autograd.grad((result * weight).sum(), inputs)

    with anyk.backend("torch"):
        expected = run(scores.double(), [each.double() for each in others])
    for found, right in zip(run(scores, others), expected, strict=True):
        scale = right.abs().max().clamp(min=1).item()
        torch.testing.assert_close(found.double(), right, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("k", [124.5, LONG / 3, 100.0])
def test_quantiles_of_long_rows(kind, k):
    quantiles(lambda s: anyk.LapSum().threshold(s, k), long_rows(kind), [])


def test_a_quantile_far_from_every_score_has_the_gradient_of_the_nearest():
    """Every slope is zero in floating point there."""
    for gap in (100.0, 1e6):
        scores = torch.tensor([[0.0, -1.0, gap, gap + 1], [0.0, 0.0, gap, gap]])
        for backend in ("native", "torch"):
            with anyk.backend(backend):
                given, q = scores.clone().requires_grad_(), torch.full((2,), 0.5, requires_grad=True)
                found = anyk.soft_quantile(given, q)
                of_scores, of_q = torch.autograd.grad(found.sum(), (given, q))
            torch.testing.assert_close(found, torch.full((2,), gap / 2), rtol=1e-6, atol=1e-4)
            near = 0.5 / (1 + torch.exp(torch.tensor(-1.0)))
            expected = torch.tensor([[near, 0.5 - near, near, 0.5 - near], [0.25, 0.25, 0.25, 0.25]])
            torch.testing.assert_close(of_scores, expected)
            assert of_q.isfinite().all()
            assert (of_q > 1e9).all()


def test_quantiles_of_nothing_everything_nan_and_infinity_come_from_the_plain_code():
    scores = torch.randn(4, 30)
    scores[1, 3], scores[2, 4] = -torch.inf, torch.inf
    assert torch.equal(anyk.soft_quantile(scores[:2], 1.0), scores[:2].amax(-1))
    assert torch.equal(anyk.soft_quantile(scores[0], 0.0), scores[0].amin())
    assert anyk.soft_quantile(scores, 0.5).isfinite().all()
    scores[3, 0] = torch.nan
    assert anyk.soft_quantile(scores, 0.5).isnan().tolist() == [False, False, False, True]
    assert anyk.soft_quantile(scores[:0], 0.5).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantiles_of_half_precision(dtype):
    scores = torch.randn(5, 700).to(dtype).requires_grad_()
    found = anyk.soft_quantile(scores, 0.8)
    assert found.dtype == dtype
    torch.testing.assert_close(found, anyk.soft_quantile(scores.float(), 0.8).to(dtype))
    assert torch.autograd.grad(found.sum(), scores)[0].dtype == dtype


@pytest.mark.parametrize("kind", ["splitter", "bitonic", "odd_even"])
@pytest.mark.parametrize("swap", ["logistic", "logistic_art", "cauchy", "gaussian", "reciprocal", "optimal"])
@pytest.mark.parametrize(("rows", "n"), [(3, 2), (17, 7), (33, 40)])
def test_masks_of_networks(kind, swap, rows, n):
    scores = torch.randn(rows, n)
    if n == 7:
        scores = scores.round()  # ties
    for k in sorted({1, n // 2, n - 1}):
        for temperature in (0.05, 1.0, 10.0):
            compared(
                lambda s, t, k=k: anyk.soft_topk(s, k, anyk.SortingNetwork(kind, t, swap)),
                scores, [torch.tensor(temperature)], 5e-5 if swap == "logistic_art" else 2e-6,
            )  # fmt: skip


def test_masks_of_networks_of_hard_rows():
    for scores in (1e6 + torch.randn(3, 60).round(), torch.tensor([[0.0, 1e6, -1e6, 5.0, 5.0]]), torch.zeros(2, 9)):
        compared(lambda s: anyk.soft_topk(s, 3, "splitter"), scores)
    scores = torch.randn(4, 30)
    scores[0, ::2], scores[1, 4] = -torch.inf, torch.nan  # left to the plain code
    mask = anyk.soft_topk(scores, 3, "splitter")
    assert mask.isnan().all(-1).tolist() == [False, True, False, False]
    torch.testing.assert_close(mask[[0, 2, 3]].sum(-1), torch.full((3,), 3.0))
    half = scores[2:].bfloat16()
    torch.testing.assert_close(anyk.soft_topk(half, 3, "splitter"), anyk.soft_topk(half.float(), 3, "splitter").bfloat16())
    assert anyk.soft_topk(scores[:0], 3, "splitter").shape == (0, 30)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: anyk.soft_topk(s, 3),
        lambda s: anyk.soft_topk(s, 3, "permutahedron"),
        lambda s: anyk.soft_topk(s, 3, "splitter"),
        lambda s: anyk.soft_quantile(s, 0.3),
    ],
)
def test_the_kernels_are_used(make, monkeypatch):
    """And not the plain code, which would pass all the other tests."""
    scores = torch.randn(4, 20, requires_grad=True)

    def refuse(*given):
        raise AssertionError("the plain code was asked")

    monkeypatch.setattr(anyk.Operator, "_plain_mask", refuse)
    monkeypatch.setattr(anyk.Operator, "_plain_threshold", refuse)
    make(scores).sum().backward()


@pytest.mark.parametrize(("name", "what"), [("lapsum", "ranks"), ("permutahedron", "ranks"), ("permutahedron", "sort")])
@pytest.mark.parametrize("n", [1, 2, 50, 3000])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_ranks_and_sorts(name, what, n, temperature):
    scores = 3 * torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    compared(lambda s, t: getattr(OPERATORS[name](t), what)(s), scores, [torch.tensor(temperature)], 1e-5)


@pytest.mark.parametrize("make", [
    lambda s: anyk.LapSum(2.0).mask(s, 3),
    lambda s: anyk.Permutahedron(2.0).mask(s, 3),
    lambda s: anyk.SortingNetwork(temperature=2.0).mask(s, 3),
    lambda s: anyk.LapSum(2.0).threshold(s, 3.3),
])  # fmt: skip
def test_second_derivatives_come_from_the_plain_code(make):
    scores = torch.randn(2, 9, requires_grad=True)
    (first,) = torch.autograd.grad(make(scores).square().sum(), scores, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), scores)
    with anyk.backend("torch"):
        double = scores.detach().double().requires_grad_()
        (again,) = torch.autograd.grad(make(double).square().sum(), double, create_graph=True)
        (expected,) = torch.autograd.grad(again.square().sum(), double)
    torch.testing.assert_close(second.double(), expected, rtol=1e-4, atol=1e-5)
