"""KSubset: T, the mask and samples as all subsets say; in far tails, with many subsets, and compiled."""

import itertools
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch.autograd import gradcheck, gradgradcheck

import anyk
import oracles
from strategies import rows

inf, nan = torch.inf, torch.nan
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own


def double(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def enumerated(scores, k, t=1.0):
    """The share of the k-subsets that each entry is in, by listing them."""
    return torch.tensor(oracles.ksubset_inclusion(scores.tolist(), t, k), dtype=torch.float64)


# ---- T -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(rows(max_size=8), st.sampled_from([0.3, 1.0, 4.0]))
def test_as_all_subsets_say(row, t):
    n, operator = len(row.scores), anyk.KSubset(t)
    expected = torch.stack([enumerated(row.scores, j, t) for j in range(1, n + 1)])
    torch.testing.assert_close(operator(row.scores, n).cumsum(0), expected, rtol=1e-9, atol=1e-9)
    for c in range(n):
        torch.testing.assert_close(operator.inclusion(row.scores, torch.tensor(c), n), expected[:, c], rtol=1e-9, atol=1e-12)
    for k in range(1, n):
        torch.testing.assert_close(operator.mask(row.scores, k), expected[k - 1], rtol=1e-9, atol=1e-9)


def test_one_of_one_is_the_softmax():
    scores, target = double(5, 30), torch.randint(30, (5,))
    expected = (scores / 0.7).log_softmax(-1).gather(-1, target[:, None])
    torch.testing.assert_close(anyk.KSubset(0.7).log_inclusion(scores, target, 1), expected)
    torch.testing.assert_close(anyk.KSubset(0.7).mask(scores, 1), (scores / 0.7).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_subsets_than_there_are_numbers(dtype, backend):
    """All equal: T_j = j / n, and of binomial(1000, 500) subsets none is counted twice."""
    scores = torch.zeros(1000, dtype=dtype)
    inclusion = anyk.KSubset().inclusion(scores, torch.tensor(3), 500)
    torch.testing.assert_close(inclusion, torch.arange(1, 501, dtype=dtype) / 1000, rtol=2e-5, atol=0)
    torch.testing.assert_close(anyk.KSubset().mask(scores, 300), torch.full_like(scores, 0.3))


@pytest.mark.parametrize("far", [30.0, 90.0, 1e3])
def test_digits_of_small_and_of_nearly_one(far):
    """Against arithmetic of 400 digits: log T down to -1000, and 1 - T where T is 1 in any float."""
    mpmath.mp.dps = 900
    scores = [2.0, 1.0, 0.5, -1.0, -far, far]
    for target, k in itertools.product(range(6), range(1, 5)):
        exact = oracles.exact_ksubset([mpmath.mpf(s) for s in scores], target, k)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            own = torch.tensor(scores, dtype=dtype, requires_grad=True)
            log_inclusion = anyk.KSubset().log_inclusion(own, torch.tensor(target), k)[k - 1]
            expected = float(mpmath.log(exact))
            assert abs(log_inclusion.item() - expected) <= tolerance * max(1.0, abs(expected))
            (grad,) = torch.autograd.grad(log_inclusion, own)
            if 1e-30 < 1 - exact < 1e-3:  # by the target's own score, the derivative of log T is 1 - T
                assert grad[target].item() == pytest.approx(float(1 - exact), rel=1e-4 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize(("k", "tolerance"), [(1, 2e-6), (5, 5e-6), (40, 3e-4)])
def test_gradients_in_float32(k, tolerance):
    scores, target = 3 * double(4, 200), torch.tensor([0, 50, 100, 199])
    grads = []
    for dtype in (torch.float32, torch.float64):
        own = scores.clone().to(dtype).requires_grad_()
        log_inclusion = anyk.KSubset().log_inclusion(own, target, k)
        grads.append(torch.autograd.grad((log_inclusion * torch.arange(k).cos()).sum(), own)[0].double())
    scale = grads[1].abs().amax(-1, keepdim=True)
    assert ((grads[0] - grads[1]).abs() / scale).max() < tolerance


@forward_mode
@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_gradients(scale):
    scores = (double(2, 7) * scale).requires_grad_()  # all equal, too
    temperature = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4])

    def everything(scores, temperature):
        operator = anyk.KSubset(temperature)
        return torch.cat(
            [operator.log_inclusion(scores, target, 7), operator.mask(scores, 3), operator(scores, 3).flatten(1)], -1
        )

    assert gradcheck(everything, (scores, temperature), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(everything, (scores, temperature))


@forward_mode
def test_functional_transforms():
    operator, scores, target = anyk.KSubset(), double(3, 7), torch.tensor([1, 5, 2])
    expected = operator.log_inclusion(scores, target, 3)
    torch.testing.assert_close(torch.vmap(lambda s, y: operator.log_inclusion(s, y, 3))(scores, target), expected)
    torch.testing.assert_close(torch.vmap(lambda s: operator.mask(s, 3))(scores), operator.mask(scores, 3))

    def total(s):
        return operator.log_inclusion(s, torch.tensor(1), 3).sum() + operator.mask(s, 3)[2]

    hessian = torch.autograd.functional.hessian(total, scores[0])
    torch.testing.assert_close(torch.func.hessian(total)(scores[0]), hessian)


# ---- the mask ------------------------------------------------------------------------------------------------------------

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
def test_hard_rows(kind, temperature, backend):
    scores = HARD[kind]
    n, number = scores.shape[-1], (scores > -inf).sum(-1)
    weight = torch.randn(scores.shape)
    for k in sorted({0, 1, 2, 3, n // 2, n - 2, n - 1, n}):
        results = []
        for dtype in (torch.float32, torch.float64):
            own = scores.to(dtype).clone().requires_grad_()
            mask = anyk.KSubset(temperature).mask(own, k)
            results.append((mask.detach(), *torch.autograd.grad((mask * weight).sum(), own, materialize_grads=True)))
        (mask, grad), (expected, right) = results
        assert ((mask >= 0) & (mask <= 1)).all()
        assert (mask[scores == -inf] == 0).all()
        assert (grad[scores == -inf] == 0).all()
        torch.testing.assert_close(mask.sum(-1), number.clamp(max=k).float(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mask.double(), expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(grad.double(), right, rtol=0, atol=2e-6 * max(1.0, right.abs().max().item()))
        drawn = anyk.sample_k_subset(scores, k, temperature=temperature)
        assert drawn.sum(-1).tolist() == number.clamp(max=k).tolist()
        assert (drawn[scores == -inf] == 0).all()


def test_large_masks():
    """Against the gradient of log E_k, whose k sums are in logarithms."""
    scores, k = 2 * double(1, 400), 60
    own = scores.clone().requires_grad_()
    logs = [torch.zeros(1, 1).double(), *[torch.full((1, 1), -1e300, dtype=torch.float64)] * k]
    for score in own.unbind(-1):
        logs = [logs[0], *(torch.logaddexp(logs[j], logs[j - 1] + score) for j in range(1, k + 1))]
    (expected,) = torch.autograd.grad(logs[k].sum(), own)
    torch.testing.assert_close(anyk.KSubset().mask(scores, k), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(anyk.KSubset().mask(scores.float(), k), expected.float(), rtol=1e-4, atol=2e-6)


def test_nan_and_infinity(backend):
    scores = torch.randn(3, 8)
    scores[1, 2], scores[2, 3] = nan, inf
    for result in (anyk.KSubset().mask(scores, 3), anyk.sample_k_subset(scores, 3)):
        assert result.isnan().all(-1).tolist() == [False, True, False]
        assert result[2, 3] == 1
    scores[2, :4] = inf  # four of them, and only three are wanted
    torch.testing.assert_close(anyk.KSubset().mask(scores, 3)[2], torch.tensor([0.75] * 4 + [0.0] * 4))
    assert anyk.sample_k_subset(scores, 3)[2, :4].sum() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, backend):
    scores = torch.randn(7, 100).to(dtype)
    mask = anyk.KSubset().mask(scores, 20)
    assert mask.dtype == dtype
    torch.testing.assert_close(mask, anyk.KSubset().mask(scores.float(), 20).to(dtype), rtol=1e-2, atol=1e-6)
    inclusion = anyk.KSubset().inclusion(scores, torch.arange(7), 5)
    assert inclusion.dtype == torch.float32
    torch.testing.assert_close(inclusion, anyk.KSubset().inclusion(scores.float(), torch.arange(7), 5))


def test_second_derivatives_of_a_mask_by_the_kernel():
    results = []
    for dtype in (torch.float32, torch.float64):
        scores = double(2, 9).to(dtype).requires_grad_()
        temperature = torch.tensor(2.0, requires_grad=True)
        mask = anyk.KSubset(temperature).mask(scores, 3)
        first = torch.autograd.grad(mask.square().sum(), (scores, temperature), create_graph=True)
        results.append(
            [each.double() for each in torch.autograd.grad(sum(g.square().sum() for g in first), (scores, temperature))]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_temperature_for_each_row(backend):
    scores, temperature = torch.randn(3, 8), torch.tensor([0.3, 1.0, 2.0])
    operator, target = anyk.KSubset(temperature), torch.tensor([1, 4, 2])
    for row, t in enumerate(temperature.tolist()):
        one = anyk.KSubset(t)
        torch.testing.assert_close(operator.mask(scores, 3)[row], one.mask(scores[row], 3))
        torch.testing.assert_close(operator.inclusion(scores, target, 3)[row], one.inclusion(scores[row], target[row], 3))
        torch.testing.assert_close(operator(scores, 3)[row], one(scores[row], 3))


# ---- samples -------------------------------------------------------------------------------------------------------------


def test_samples_have_the_exact_distribution(backend):
    """Of every subset, among 9 entries: two blocks of the tree, the second of a single entry."""
    scores, k, number = torch.tensor([1.0, 0.3, -0.5, -inf, 2.0, 0.0, -1.5, 0.8, 1.2]), 3, 60_000
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


@pytest.mark.parametrize(("n", "k"), [(1000, 3), (1000, 700), (300, 150)])
def test_samples_of_many_entries_have_the_mean_of_the_mask(n, k, backend):
    scores = 2 * torch.randn(n)
    scores[::7] = -inf
    number = 500
    drawn = anyk.sample_k_subset(scores.expand(number, n), k, generator=torch.Generator().manual_seed(1))
    assert (drawn.sum(-1) == k).all()
    mask = anyk.KSubset().mask(scores.double(), k)
    deviation = (drawn.double().mean(0) - mask) / ((mask * (1 - mask) / number).sqrt() + 1e-3)
    assert deviation.abs().max() < 5.5


# ---- compiled ------------------------------------------------------------------------------------------------------------


def graphs_of(function, inputs):
    """How many graphs a compiled function needs, and that it gives the same."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for each in inputs:
        torch.testing.assert_close(compiled(*each), function(*each), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    return counter.frame_count


OPERATOR = anyk.KSubset()


@pytest.mark.parametrize(
    "inputs",
    [[(b, 30, 4) for b in range(2, 12)], [(3, n, 4) for n in range(20, 70, 5)], [(3, 30, k) for k in range(2, 12)]],
    ids=["batch", "n", "k"],
)
def test_a_mask_makes_few_graphs(inputs):
    assert graphs_of(lambda s, k: OPERATOR.mask(s, k), [(torch.randn(b, n), k) for b, n, k in inputs]) <= 3


def test_inclusion_makes_few_graphs():
    inputs = [
        (torch.randn(b, n), torch.zeros(b, dtype=torch.long)) for b, n in zip(range(2, 12), range(20, 70, 5), strict=True)
    ]
    assert graphs_of(lambda s, y: OPERATOR.inclusion(s, y, 3), inputs) <= 3


def test_compiled_samples():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    draw = torch.compile(lambda s, k: anyk.sample_k_subset(s, k), backend=counter, fullgraph=True)
    for b, n, k in zip(range(2, 8), range(20, 50, 5), range(2, 8), strict=True):
        assert (draw(torch.randn(b, n), k).sum(-1) == k).all()
    assert counter.frame_count <= 3
    torch._dynamo.reset()


# ---- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: anyk.KSubset().mask(torch.zeros(4), 2.5), TypeError, "k: expected an integer for KSubset"),
        (lambda: anyk.KSubset().draw(torch.zeros(4), 5), ValueError, "k: expected 0 <= k <= n = 4, got 5"),
        (lambda: anyk.KSubset(torch.tensor(-2.0)), ValueError, "temperature: .* got -2"),
        (lambda: anyk.KSubset("auto"), TypeError, "temperature: expected a positive.* number, got 'auto'"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_the_kernels_may_not_compute():
    class Mine(anyk.KSubset):
        pass

    assert anyk.KSubset(2.0).kernel(16, 5) == ("ksubset", 2.0)
    assert Mine().kernel(16, 5) is None
    assert anyk.KSubset(torch.tensor(1.0)).kernel(16, 5) is None
    assert anyk.KSubset().kernel(10_000, 500) is None  # more subsets than float64 can count
