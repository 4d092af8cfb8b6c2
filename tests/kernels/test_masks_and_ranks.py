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
        compared(lambda s, k=k: OPERATORS[name]().mask(s, k), scores)
    scores[2, 5] = torch.nan
    assert OPERATORS[name]().mask(scores, 3).isnan().all(-1).tolist() == [False, False, True, False, False, False]
    scores[5, 7] = torch.inf  # left to the plain code
    assert anyk.soft_topk(scores, 3, name)[5, 7] == 1


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


@each
def test_rows_anywhere_and_any_number_of_threads(name):
    scores = torch.randn(64, 1000)
    expected = OPERATORS[name]().mask(scores, 30)
    strided = torch.stack([scores, scores], 1)[:, 0]
    assert torch.equal(OPERATORS[name]().mask(strided, 30), expected)
    assert torch.equal(OPERATORS[name]().mask(scores.t().contiguous().t(), 30), expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(OPERATORS[name]().mask(scores, 30), expected)
        assert torch.equal(OPERATORS[name]().ranks(scores), _single(name, scores))
    finally:
        torch.set_num_threads(threads)


def _single(name, scores):
    torch.set_num_threads(1)
    return OPERATORS[name]().ranks(scores)


@pytest.mark.parametrize(("name", "what"), [("lapsum", "ranks"), ("permutahedron", "ranks"), ("permutahedron", "sort")])
@pytest.mark.parametrize("n", [1, 2, 50, 3000])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_ranks_and_sorts(name, what, n, temperature):
    scores = 3 * torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    compared(lambda s, t: getattr(OPERATORS[name](t), what)(s), scores, [torch.tensor(temperature)], 1e-5)


@each
def test_second_derivatives_come_from_the_plain_code(name):
    scores = torch.randn(2, 9, requires_grad=True)
    (first,) = torch.autograd.grad(OPERATORS[name](2.0).mask(scores, 3).square().sum(), scores, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), scores)
    with anyk.backend("torch"):
        double = scores.detach().double().requires_grad_()
        (again,) = torch.autograd.grad(OPERATORS[name](2.0).mask(double, 3).square().sum(), double, create_graph=True)
        (expected,) = torch.autograd.grad(again.square().sum(), double)
    torch.testing.assert_close(second.double(), expected, rtol=1e-4, atol=1e-5)
