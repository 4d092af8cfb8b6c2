"""LapSum: T, mask and threshold against many digits, ranks against all pairs, sort and P @ values against their equations."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import anyk
import oracles
from anyk.operators import running_sums
from strategies import rows

inf, nan = torch.inf, torch.nan
temperatures = pytest.mark.parametrize("t", [0.05, 1.0, 30.0])


def scores_of(*shape, dtype=torch.double, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


def cdf(x):
    return torch.where(x < 0, x.clamp(max=0).exp() / 2, 1 - (-x.clamp(min=0)).exp() / 2)


# ---- T, mask, threshold --------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(rows(max_size=8), st.sampled_from([0.3, 1.0, 4.0]))
def test_p_and_t_against_bisection(row, t):
    n = len(row.scores)
    expected = torch.tensor([oracles.lapsum_inclusion(row.scores.tolist(), t, j) for j in range(1, n + 1)], dtype=torch.double)
    torch.testing.assert_close(anyk.LapSum(t)(row.scores, n).cumsum(0), expected, rtol=1e-9, atol=1e-9)
    for c in range(n):
        inclusion = anyk.LapSum(t).inclusion(row.scores, torch.tensor(c), n)
        torch.testing.assert_close(inclusion, expected[:, c], rtol=1e-9, atol=1e-9)


def mask_by_mpmath(row, k, temperature):
    """The mask, its derivative by k, b. In the middle of a gap of 800, all depends on e^-400: 200 digits have it."""
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


@settings(max_examples=30, deadline=None)
@given(data=st.data(), row=st.lists(st.floats(-40, 40, width=32), min_size=2, max_size=8), t=st.sampled_from([0.1, 1.0, 30.0]))
@pytest.mark.parametrize("setting", ["torch", "auto"])
def test_mask_threshold_and_derivative_by_k_against_mpmath(setting, data, row, t):
    share = data.draw(st.floats(0.05, 0.95))
    k = torch.tensor(share * len(row), requires_grad=True)
    mask, slopes, b = mask_by_mpmath(row, k.item(), t)
    with anyk.backend(setting):
        actual = anyk.soft_topk(torch.tensor(row), k, temperature=t)
        torch.testing.assert_close(actual.double(), torch.tensor(mask, dtype=torch.double), rtol=1e-5, atol=1e-6)
        weight = torch.arange(1.0, len(row) + 1)
        (of_k,) = torch.autograd.grad((actual * weight).sum(), k)
        expected = (torch.tensor(slopes, dtype=torch.double) * weight).sum()
        torch.testing.assert_close(of_k.double(), expected, rtol=1e-4, atol=1e-4)
        threshold = anyk.soft_quantile(torch.tensor(row), 1 - share, temperature=t)
        assert threshold.item() == pytest.approx(b, rel=1e-4, abs=1e-4 * max(1, t))


@pytest.mark.parametrize("lead", [-300.0, -30.0, -3.0, 0.0, 3.0, 30.0])
def test_log_t_keeps_its_digits_in_the_tails(lead):
    """log T itself where T underflows, 1 - T where T is nearly 1; the slopes likewise."""
    others, k = [0.5, 0.1, -0.4, -1.0], 2
    row = [lead, *others]
    scores = torch.tensor([row], requires_grad=True)
    log_t = anyk.LapSum().log_inclusion(scores, torch.tensor([0]), k)[0, -1]
    with mpmath.workdps(300):
        exact = oracles.exact_lapsum([mpmath.mpf(str(value)) for value in row], 0, k)
        assert log_t.item() == pytest.approx(float(mpmath.log(exact)), rel=1e-5, abs=1e-9 if lead < 9 else 1e-15)
    (slope,) = torch.autograd.grad(log_t, scores)
    assert slope.isfinite().all()
    if lead < -20:
        assert slope[0, 0].item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("backend", ["torch", "native"], indirect=True)
def test_large_rows_sum_to_k(backend):
    for n, k, t in ((50_000, 500, 1.0), (50_000, 49_000, 100.0), (20_000, 20, 1e-3), (5000, 2500, 1e-4)):
        scores = scores_of(2, n, dtype=torch.float32)
        for each in (scores, scores.exp()):  # skewed: between mean and median there are many
            total = anyk.soft_topk(each, k, temperature=t).double().sum(-1)
            assert total.tolist() == pytest.approx([k] * 2, rel=1e-5), (n, k, t)


# ---- ranks and sort ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 16, 64, 65, 300, 1100])  # one level of blocks, two, three
@pytest.mark.parametrize("spread", [1.0, 50.0, 1e4])
def test_ranks_against_all_pairs(n, spread):
    scores = spread * scores_of(2, n)
    expected = cdf(scores[:, :, None] - scores[:, None, :]).sum(-1) + 0.5
    torch.testing.assert_close(anyk.soft_rank(scores), expected)
    with anyk.backend("torch"):
        torch.testing.assert_close(anyk.soft_rank(scores.float()), expected.float(), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("backend", ["torch", "native"], indirect=True)
def test_ranks_of_groups_that_are_far_apart_keep_their_digits(backend):
    group = torch.tensor([0.0, 1.0, 3.0, 1.5])
    within = anyk.soft_rank(group)
    for offset in (1e6, 1e20, inf):
        scores = torch.cat([group, group + offset])
        ranks = anyk.soft_rank(scores)
        torch.testing.assert_close(ranks[:4], within, rtol=0, atol=1e-5)
        if offset == 1e6:
            torch.testing.assert_close(ranks[4:], 4 + anyk.soft_rank(group + offset), rtol=0, atol=1e-5)


@temperatures
@pytest.mark.parametrize("n", [1, 2, 7, 65, 300])
def test_each_entry_of_the_sort_solves_its_equation(n, t):
    for scores in (scores_of(2, n), torch.zeros(1, n).double(), scores_of(2, n).round(), 40 * scores_of(2, n)):
        ordered = anyk.soft_sort(scores, temperature=t)
        assert (ordered.diff() >= 0).all()
        counts = cdf((ordered[:, :, None] - scores[:, None, :]) / t).sum(-1)
        torch.testing.assert_close(counts, (torch.arange(n) + 0.5).double().expand_as(counts), rtol=1e-9, atol=1e-9)


def test_the_sort_becomes_exact_where_gaps_are_large():
    scores = 100 * torch.tensor([1.54, 0.57, -0.29, -1.08])
    torch.testing.assert_close(anyk.soft_sort(scores, descending=True), scores)
    torch.testing.assert_close(anyk.soft_sort(torch.zeros(2)), torch.tensor([-math.log(2), math.log(2)]))
    torch.testing.assert_close(anyk.soft_sort(torch.tensor([7.0])), torch.tensor([7.0]))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_the_sort_is_in_the_units_of_the_scores_and_in_order_to_the_last_bit(offset):
    scores = scores_of(4, 200, dtype=torch.float32).round(decimals=1) + offset
    ordered = anyk.soft_sort(scores, temperature=0.3)
    assert (ordered.diff() >= 0).all()
    torch.testing.assert_close(anyk.soft_sort(4 * scores + 8, temperature=1.2), 4 * ordered + 8, rtol=1e-6, atol=1e-5)


def test_the_sort_beside_infinity():
    scores = torch.tensor([1.0, inf, 3.0, -inf, 2.0, inf], requires_grad=True)
    ordered = anyk.soft_sort(scores, temperature=0.01)
    torch.testing.assert_close(ordered, torch.tensor([-inf, 1.0, 2.0, 3.0, inf, inf]), rtol=0, atol=1e-3)
    (gradient,) = torch.autograd.grad(ordered[1:4].sum(), scores)
    torch.testing.assert_close(gradient, torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]))
    padded = anyk.soft_sort(scores.detach(), where=torch.tensor([True, False, True, False, False, True]), temperature=0.01)
    torch.testing.assert_close(padded, torch.tensor([1.0, 3.0, inf, inf, inf, inf]), rtol=0, atol=1e-3)


@temperatures
def test_the_gradient_of_the_sort_by_its_formula(t):
    scores, temperature = scores_of(9).requires_grad_(), torch.tensor(t, dtype=torch.double, requires_grad=True)
    ordered = anyk.soft_sort(scores, temperature=temperature)
    differences = scores.detach() - ordered.detach()[:, None]
    weights = (-differences.abs() / t).softmax(-1)
    for entry, weight, difference in zip(ordered, weights, differences, strict=True):
        of_scores, of_t = torch.autograd.grad(entry, (scores, temperature), retain_graph=True)
        torch.testing.assert_close(of_scores, weight)
        torch.testing.assert_close(of_t, -(weight * difference).sum() / t)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("function", [anyk.soft_rank, anyk.soft_sort], ids=["ranks", "sort"])
@pytest.mark.parametrize("shape", [(2, 6), (1, 70)])
def test_derivatives_of_ranks_and_sort(function, shape):
    scores = scores_of(*shape).requires_grad_()
    for t in (torch.tensor(0.8, dtype=torch.double), torch.linspace(0.5, 2, shape[0]).double()):
        inputs = scores, t.requires_grad_()
        assert gradcheck(lambda s, t: function(s, temperature=t), inputs, fast_mode=True, check_forward_ad=True)
        assert gradgradcheck(lambda s, t: function(s, temperature=t), inputs, fast_mode=True)


def test_the_sums_that_all_rest_on():
    """One kind and several, against all pairs; and their derivatives by everything."""
    ordered = scores_of(2, 70).sort(descending=True).values.requires_grad_()
    t = torch.tensor([[0.5], [2.0]], dtype=torch.double, requires_grad=True)
    for kinds in (1, 2, 5):
        values = scores_of(2, 2, 70, kinds, seed=kinds).requires_grad_()
        decay = (-(ordered[:, :, None] - ordered[:, None, :]).abs() / t[..., None]).exp()
        expected = torch.stack([decay.tril(-1) @ values[0], decay.triu(1) @ values[1]])
        actual = running_sums.decayed_sums(ordered, values, t)
        torch.testing.assert_close(actual, expected)
        weight = scores_of(*actual.shape, seed=9)
        both = [torch.autograd.grad((each * weight).sum(), (ordered, values, t)) for each in (actual, expected)]
        torch.testing.assert_close(*both)


# ---- P @ values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "ties", "gaps", "padding", "long"])
def test_the_product_is_that_of_the_matrix(kind):
    n = 150 if kind == "long" else 7
    scores = {
        "ties": scores_of(2, n).round(),
        "gaps": torch.tensor([[0.0, 1e6, -1e6, 3e6, 5.0, 4.0, -2e6]]).double(),
        "padding": scores_of(2, n).masked_fill(torch.arange(n) == 2, -inf),
    }.get(kind, scores_of(2, n))
    scores, t = scores.requires_grad_(), torch.tensor(0.7, dtype=torch.double, requires_grad=True)
    values = scores_of(len(scores), n, 3, seed=1).requires_grad_()
    for k in (1, n // 2, n - (kind == "padding")):
        operator = anyk.LapSum(t)
        results = operator.compute_product(scores, values, k), operator.compute_matrix(scores, k) @ values
        torch.testing.assert_close(*results)
        weight = scores_of(*results[0].shape, seed=2)
        gradients = [torch.autograd.grad((each * weight).sum(), (scores, values, t)) for each in results]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)


# ---- what it costs ---------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Those that are no views; results in float64; the largest result."""

    VIEWS = (
        "view",
        "_unsafe_view",
        "expand",
        "permute",
        "transpose",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "detach",
        "unbind",
    )

    def __init__(self):
        super().__init__()
        self.number, self.doubles, self.largest = 0, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        if function.__name__.split(".")[0] not in self.VIEWS and isinstance(first, torch.Tensor):
            self.number += 1
            self.doubles += first.dtype == torch.double
            self.largest = max(self.largest, first.numel())
        return result


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda s: anyk.soft_topk(s, 32), 45),
        (anyk.soft_rank, 110),
        (anyk.soft_sort, 160),
        (lambda s: anyk.LapSum().log_inclusion(s, s.argmin(-1), 5), 70),
    ],
    ids=["mask", "ranks", "sort", "log T"],
)
def test_few_operations_and_no_float64_off_the_cpu(call, most):
    scores = torch.empty(64, 1000, device="meta", requires_grad=True)
    with Operations() as seen:
        (call(scores) * 2).sum().backward()
    assert seen.number <= most
    assert seen.doubles == 0


def test_selection_makes_no_matrix():
    scores, values = scores_of(1, 4000, dtype=torch.float32).requires_grad_(), scores_of(1, 4000, 3, dtype=torch.float32)
    with Operations() as seen:
        anyk.select_topk(values, scores, 2000)[0].sum().backward()
    assert seen.largest < 4000 * 100
