"""The native mask of KSubset and its exact sampler: as the plain code in float64, and as all subsets say."""

import itertools
import math

import pytest
import torch
from scipy.stats import chi2

import anyk
from anyk.kernels import native

pytestmark = pytest.mark.skipif(bool(native.status()), reason=native.status() or "the native library is there")
inf, nan = torch.inf, torch.nan


@pytest.fixture(autouse=True)
def _native():
    torch.manual_seed(0)
    with anyk.backend("native"):
        yield


@pytest.fixture(params=[0, 1, 2, 3])
def variant(request):
    """An instruction set that this machine has."""
    if not native._library.use(request.param):
        pytest.skip("this machine has not got these instructions")
    yield request.param
    next(number for number in range(4) if native._library.use(number))  # the fastest again


def both(scores, k, temperature, weight):
    """Mask and gradients by the native code in float32 and by the plain code in float64."""
    results = []
    for backend, dtype in (("native", scores.dtype), ("torch", torch.double)):
        with anyk.backend(backend):
            inputs = scores.detach().clone().to(dtype).requires_grad_(), torch.tensor(temperature, dtype=dtype).requires_grad_()
            mask = anyk.KSubset(inputs[1]).mask(inputs[0], k)
            loss = (mask * weight.to(mask.dtype)).sum()
            results.append((mask.detach(), *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)))
    return results


@pytest.mark.parametrize(("rows", "n"), [(3, 2), (5, 17), (20, 100), (2, 1000), (1, 4001)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_as_the_plain_code(rows, n, temperature, variant):
    scores = 3 * torch.randn(rows, n)
    if n % 2:
        scores = scores.round()  # ties
    weight = torch.randn(rows, n)
    for k in sorted({0, 1, n // 50, n // 3, n // 2, n - 1, n}):
        actual, expected = both(scores, k, temperature, weight)
        # the gradient of the temperature is a long sum of scores over the temperature
        for found, right, most in zip(actual, expected, (1e-6, 3e-6, 5e-6 * max(1, 1 / temperature)), strict=True):
            scale = max(1.0, right.abs().max().item())
            torch.testing.assert_close(found.double(), right, rtol=0, atol=most * scale)
        torch.testing.assert_close(actual[0].sum(-1), torch.full((rows,), float(k)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
def test_as_all_subsets_say(temperature, variant):
    for n in (2, 3, 8, 12):
        scores = 3 * torch.randn(n)
        for k in range(1, n):
            subsets = torch.tensor(list(itertools.combinations(range(n), k)))
            members = torch.zeros(len(subsets), n, dtype=torch.double).scatter(1, subsets, 1)
            expected = (members @ (scores.double() / temperature)).softmax(0) @ members
            found = anyk.KSubset(temperature).mask(scores, k)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-7)


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


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
def test_hard_rows(kind, temperature, variant):
    scores = HARD[kind]
    n, number = scores.shape[-1], (scores > -inf).sum(-1)
    weight = torch.randn(scores.shape)
    for k in sorted({0, 1, 2, 3, n // 2, n - 2, n - 1, n}):
        actual, expected = both(scores, k, temperature, weight)
        mask = actual[0]
        assert bool(((mask >= 0) & (mask <= 1)).all())
        assert bool((mask[scores == -inf] == 0).all())
        torch.testing.assert_close(mask.sum(-1), number.clamp(max=k).float(), rtol=1e-6, atol=1e-6)
        for found, right in zip(actual[:2], expected[:2], strict=True):
            scale = max(1.0, right.abs().max().item())
            torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-6 * scale)
        drawn = anyk.sample_k_subset(scores, k, temperature=temperature)
        assert drawn.sum(-1).tolist() == number.clamp(max=k).tolist()
        assert bool((drawn[scores == -inf] == 0).all())


def test_nan_and_infinity():
    scores = torch.randn(3, 8)
    scores[1, 2], scores[2, 3] = nan, inf
    for result in (anyk.KSubset().mask(scores, 3), anyk.sample_k_subset(scores, 3)):
        assert result.isnan().all(-1).tolist() == [False, True, False]
        assert result[2, 3] == 1
    scores[2, :4] = inf  # four of them, and only three are wanted: left to the plain code
    torch.testing.assert_close(anyk.KSubset().mask(scores, 3)[2], torch.tensor([0.75] * 4 + [0.0] * 4))
    assert anyk.sample_k_subset(scores, 3)[2, :4].sum() == 3
    scores = torch.randn(1, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(anyk.KSubset().mask(scores, 3), scores, torch.full((1, 8), nan))
    assert bool(gradient.isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_and_written_as_it_is(dtype, variant):
    scores = torch.randn(7, 333).to(dtype)
    weight = torch.randn(7, 333).to(dtype)
    actual, expected = both(scores, 20, 1.0, weight)
    for found, right in zip(actual[:2], expected[:2], strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, right.to(dtype), rtol=1e-2, atol=1e-6)
    drawn = anyk.sample_k_subset(scores, 20)
    assert drawn.dtype == dtype
    assert drawn.float().sum(-1).tolist() == [20] * 7


def test_rows_anywhere_and_any_number_of_threads():
    scores = torch.randn(64, 1000)

    def run(scores):
        return anyk.KSubset().mask(scores, 30), anyk.sample_k_subset(scores, 30, generator=torch.Generator().manual_seed(0))

    expected = run(scores)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for same in (torch.stack([scores, scores], 1)[:, 0], scores.t().contiguous().t(), scores.reshape(4, 16, 1000)):
            for found, right in zip(run(same), expected, strict=True):
                assert torch.equal(found.reshape(64, 1000), right)
    finally:
        torch.set_num_threads(threads)


def test_second_derivatives_come_from_the_plain_code():
    results = []
    for dtype in (torch.float32, torch.double):
        scores = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(anyk.KSubset(2.0).mask(scores, 3).square().sum(), scores, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), scores)[0].double())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (5, 2), (9, 4), (64, 10), (1000, 3), (1000, 700), (5000, 200)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_the_same_samples_as_the_plain_code(n, k, temperature, variant):
    scores = 3 * torch.randn(6, n)
    scores[:3, 1::3] = -inf
    samples = []
    for backend in ("native", "torch"):
        with anyk.backend(backend):
            generator = torch.Generator().manual_seed(n)
            samples.append(anyk.sample_k_subset(scores, k, temperature=temperature, generator=generator))
    assert torch.equal(*samples)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_samples_have_the_exact_distribution(backend):
    """Of every subset, among 9 entries: two blocks of the tree, the second of a single entry."""
    scores, k, number = torch.tensor([1.0, 0.3, -0.5, -inf, 2.0, 0.0, -1.5, 0.8, 1.2]), 3, 60_000
    with anyk.backend(backend):
        generator = torch.Generator().manual_seed(2)
        drawn = anyk.sample_k_subset(scores.expand(number, 9), k, temperature=0.8, generator=generator)
    counts = torch.bincount((drawn * 2 ** torch.arange(9)).sum(-1).long(), minlength=512).tolist()
    weights = {
        sum(2**i for i in subset): math.exp(sum(scores[i].item() for i in subset) / 0.8)
        for subset in itertools.combinations([0, 1, 2, 4, 5, 6, 7, 8], k)
    }
    expected = {code: number * weight / sum(weights.values()) for code, weight in weights.items()}
    assert sum(counts[code] for code in expected) == number
    assert sum((counts[code] - mean) ** 2 / mean for code, mean in expected.items()) < chi2.isf(1e-4, len(expected) - 1)
