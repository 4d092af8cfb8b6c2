"""SinkhornSort: the plan against plain iterations, convergence, its derivatives, and the mask of two anchors."""

import math
import warnings

import mpmath
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import anyk
import oracles
from anyk.operators.sinkhorn import transport
from strategies import rows

inf, nan = torch.inf, torch.nan
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own


# ---- the plan ------------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(rows(max_size=7, max_gap=1.0), st.sampled_from([0.5, 1.0, 5.0]))
def test_plan_against_plain_iterations(row, t):
    expected = oracles.sinkhorn_plan(row.scores, t, 5000)
    assume((expected.sum(0) - 1).abs().max() < 1e-7 and (expected.sum(1) - 1).abs().max() < 1e-7)
    torch.testing.assert_close(anyk.SinkhornSort(t)(row.scores, len(expected)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("t", [1e-3, 0.1, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_it_converges_in_a_few_steps(t, scale):
    """Warnings are errors."""
    operator = anyk.SinkhornSort(t, max_iterations=4)
    for n in (2, 16, 50):
        operator.inclusion(scale * torch.randn(100, n), torch.randint(n, (100,)), 2)
        matrix = operator((scale * torch.randn(100, n)).round().double(), n)  # with ties
        for dim in (-1, -2):
            torch.testing.assert_close(matrix.sum(dim), torch.ones(100, n).double(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("t", [1.0, 12.0, 100.0])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_one_newton_step_is_usual(t, spread):
    operator = anyk.SinkhornSort(t, max_iterations=1)
    operator.inclusion(spread * torch.randn(50, 40), torch.randint(40, (50,)), 5)


def test_rows_that_do_not_converge():
    operator = anyk.SinkhornSort(0.3, tolerance=1e-14, max_iterations=1)
    scores = torch.randn(10, 8)
    with pytest.warns(UserWarning, match="SinkhornSort: .* did not converge in max_iterations = 1"):
        matrix = operator(scores, 8)
    torch.testing.assert_close(matrix.sum(-2), torch.ones(10, 8))  # on the class side it is normalised all the same
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            operator(scores, 8)
    assert len(caught) == 1


@pytest.mark.parametrize(("t", "tolerance"), [(0.05, 1e-9), (0.3, 1e-3), (1.0, 1e-9), (1.0, 1e-2)])
def test_a_row_does_not_depend_on_its_batch(t, tolerance):
    """One that has met the tolerance is frozen while the others go on."""
    scores = (torch.randn(32, 20).double() * torch.logspace(-2, 1, 32)[:, None]).requires_grad_()
    target, operator = torch.randint(20, (32,)), anyk.SinkhornSort(t, tolerance=tolerance)
    together = operator.log_inclusion(scores, target, 5)
    alone = torch.cat([operator.log_inclusion(scores[i : i + 1], target[i : i + 1], 5) for i in range(32)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(each.sum(), scores)[0] for each in (together, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_the_inclusion_is_the_running_sum_of_a_column():
    scores = (2 * torch.randn(6, 9, dtype=torch.double)).round()  # with ties
    scores[1, 7:] = scores[2, 0] = -inf
    sums = anyk.SinkhornSort()(scores, 4).cumsum(-2)
    for c in range(1, 7):
        target = torch.full((6,), c)
        inclusion = anyk.SinkhornSort().inclusion(scores, target, 4)
        torch.testing.assert_close(inclusion, sums[..., c], rtol=0, atol=1e-8)
        torch.testing.assert_close(anyk.SinkhornSort().inclusion(scores + 17, target, 4), inclusion, rtol=0, atol=1e-8)


def test_padding_is_as_if_it_were_not_there():
    scores = 2 * torch.randn(4, 8, dtype=torch.double)
    scores[:, [1, 4, 5]] = -inf
    scores.requires_grad_()
    present, operator = scores > -inf, anyk.SinkhornSort(0.5)
    few = scores.detach()[present].reshape(4, 5)
    matrix, target = operator(scores, 5), torch.tensor([0, 2, 7, 6])
    assert (matrix[..., [1, 4, 5]] == 0).all()
    torch.testing.assert_close(matrix[..., [0, 2, 3, 6, 7]].detach(), operator(few, 5))
    inclusion = operator.log_inclusion(scores, target, 5)
    torch.testing.assert_close(inclusion.detach(), operator.log_inclusion(few, torch.tensor([0, 1, 4, 3]), 5))
    ranks, ordered = operator.ranks(scores), operator.sort(scores)
    assert ranks[:, [1, 4, 5]].tolist() == [[6, 7, 8]] * 4
    assert (ordered[:, 5:] == -inf).all()
    torch.testing.assert_close(ranks[present].reshape(4, 5).detach(), operator.ranks(few))
    torch.testing.assert_close(ordered[:, :5].detach(), operator.sort(few))
    for result in (matrix, inclusion, ranks, ordered[:, :5]):
        (grad,) = torch.autograd.grad(result.square().sum(), scores, retain_graph=True)
        assert grad.isfinite().all()
        assert (grad[~present] == 0).all()


@pytest.mark.parametrize("outlier", [1e6, -1e8, 1e20, inf])
def test_far_outliers_leave_the_others_alone(outlier):
    group = torch.tensor([[0.3, -0.4, 1.1, 0.2]])
    scores = torch.cat([group, torch.tensor([[outlier]])], -1)
    ranks, within = anyk.SinkhornSort().ranks(scores), anyk.SinkhornSort().ranks(group)
    torch.testing.assert_close(ranks[:, :4], within + (outlier > 0))
    matrix = anyk.SinkhornSort()(scores, 5)
    assert matrix[0, 0 if outlier > 0 else 4, 4] == 1
    assert anyk.SinkhornSort().sort(scores)[0, 0 if outlier > 0 else 4] == outlier


def test_a_class_that_is_hopeless_has_a_gradient():
    scores = torch.tensor([[0.0, -1e4, 1.0, 0.5]], requires_grad=True)
    log_inclusion = anyk.SinkhornSort().log_inclusion(scores, torch.tensor([1]), 2)
    assert (log_inclusion < -9e3).all()
    (grad,) = torch.autograd.grad(log_inclusion.sum(), scores)
    assert grad.isfinite().all()
    assert grad[0, 1] > 0.9


def test_ranks_and_sort_from_the_matrix():
    scores, place = torch.randn(3, 7, dtype=torch.double), torch.arange(1, 8).double()
    matrix = anyk.SinkhornSort(0.4)(scores, 7)
    torch.testing.assert_close(anyk.SinkhornSort(0.4).ranks(scores), place @ matrix)
    torch.testing.assert_close(anyk.SinkhornSort(0.4).sort(scores), (matrix @ scores[..., None]).squeeze(-1))
    torch.testing.assert_close(anyk.SinkhornSort(1e-4).ranks(scores), 8 - (1 + scores.argsort().argsort()).double())
    temperatures = torch.tensor([0.1, 0.5, 2.0], dtype=torch.double)
    by_row = torch.stack([anyk.SinkhornSort(t.item()).ranks(row) for t, row in zip(temperatures, scores, strict=True)])
    torch.testing.assert_close(anyk.SinkhornSort(temperatures).ranks(scores), by_row)


FUNCTIONS = {
    "matrix": lambda operator, s: operator(s, 4),
    "log inclusion": lambda operator, s: operator.log_inclusion(s, torch.tensor([1, 4]), 3),
    "ranks": lambda operator, s: operator.ranks(s),
    "sort": lambda operator, s: operator.sort(s),
    "mask": lambda operator, s: operator.mask(s, 2),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@functions
@forward_mode
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_derivatives(function, temperature):
    scores = torch.randn(2, 6, dtype=torch.double, requires_grad=True)
    t = torch.tensor(temperature, dtype=torch.double, requires_grad=True)

    def value(scores, t):
        return function(anyk.SinkhornSort(t, tolerance=1e-13), scores)

    assert gradcheck(value, (scores, t), check_forward_ad=True)
    assert gradgradcheck(value, (scores, t))


def test_the_gradient_where_no_rank_is_linked_to_another():
    """e to minus the gaps underflows: what remains is that of the start, the limit for small temperatures."""
    scores = torch.tensor([[300.0, 100.0, -200.0]], dtype=torch.double, requires_grad=True)
    (grad,) = torch.autograd.grad(anyk.SinkhornSort(0.1).log_inclusion(scores, torch.tensor([1]), 1), scores)
    # from rank 1 to 2 the target rises by (s_1 + s_2 - 2 s_2) / t
    torch.testing.assert_close(grad, torch.tensor([[-10.0, 10.0, 0.0]]).double())


@pytest.mark.parametrize("t", [0.1, 1.0, 20.0])
def test_float32_where_there_is_no_double_precision(t):
    """What runs on other devices, in the dtype that is given."""
    scores = (2 * torch.randn(50, 30)).sort(descending=True).values
    with torch.autocast("cpu", torch.bfloat16):
        narrow = transport(scores, t, 1e-9, 15)
    assert narrow.dtype == torch.float32
    matrix = narrow.softmax(-2)
    torch.testing.assert_close(matrix, transport(scores.double(), t, 1e-9, 15).softmax(-2).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(50, 30), rtol=0, atol=1e-5)


class Float64(TorchDispatchMode):
    """Whether there was such a result."""

    found = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            self.found |= isinstance(each, torch.Tensor) and each.dtype == torch.float64
        return result


@functions
def test_no_float64_off_the_cpu(function):
    scores = torch.randn(2, 40, device="meta", requires_grad=True)
    with Float64() as mode, torch.device("meta"):
        function(anyk.SinkhornSort(max_iterations=2), scores).sum().backward()
    assert not mode.found


@functions
def test_forms_of_a_call(function):
    scores = torch.randn(2, 7)
    expected = function(anyk.SinkhornSort(), scores)
    if function is not FUNCTIONS["log inclusion"]:
        torch.testing.assert_close(torch.func.vmap(lambda row: function(anyk.SinkhornSort(), row))(scores), expected)
    half = function(anyk.SinkhornSort(), scores.half())
    assert half.dtype == (torch.float16 if function in (FUNCTIONS["sort"], FUNCTIONS["mask"]) else torch.float32)
    torch.testing.assert_close(half.float(), function(anyk.SinkhornSort(), scores.half().float()), rtol=1e-3, atol=1e-3)
    scores[1, 2] = nan
    result = function(anyk.SinkhornSort(), scores)
    assert result[1].isnan().all()
    assert result[0].isfinite().all()


def test_few_graphs():
    graphs, operator = [], anyk.SinkhornSort(max_iterations=1)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(operator.ranks, fullgraph=True, backend=backend)
    for shape in ((2, 5), (3, 7), (4, 9)):
        scores = torch.randn(shape)
        torch.testing.assert_close(compiled(scores), anyk.SinkhornSort().ranks(scores))
    assert len(graphs) <= 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: anyk.SinkhornSort(tolerance=0), ValueError, "tolerance: expected a number between 0 and 1, got 0"),
        (lambda: anyk.SinkhornSort(tolerance="x"), TypeError, "tolerance: expected a number between 0 and 1, got 'x'"),
        (lambda: anyk.SinkhornSort(max_iterations=0), ValueError, "max_iterations: expected at least 1, got 0"),
    ],
)
def test_bad_settings(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- the mask ------------------------------------------------------------------------------------------------------------


def exact_mask(row, k, t):
    """By bisection with 60 digits."""
    with mpmath.workdps(60):
        row = [mpmath.mpf(value) / mpmath.mpf(t) for value in row]

        def value(x):
            return mpmath.exp(x) / (1 + mpmath.exp(x)) if x < 0 else 1 / (1 + mpmath.exp(-x))

        low, high = min(row) - 100, max(row) + 100
        for _ in range(220):
            b = (low + high) / 2
            low, high = (b, high) if sum(value(s - b) for s in row) > k else (low, b)
        return torch.tensor([float(value(s - low)) for s in row], dtype=torch.double)


@pytest.mark.parametrize("setting", ["torch", "auto"])
@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    row=st.lists(st.floats(-20, 20, width=32) | st.integers(-3, 3).map(float), min_size=2, max_size=8),
    t=st.sampled_from([0.3, 1.0, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_masks_against_mpmath(setting, data, row, t, dtype):
    """Entries that are small have their digits."""
    for k in (data.draw(st.integers(1, len(row) - 1)), data.draw(st.floats(0.02, 0.98)) * len(row)):
        with anyk.backend(setting):
            mask = anyk.SinkhornSort(t).mask(torch.tensor(row, dtype=dtype), k).double()
        tolerance = 1e-4 if dtype == torch.float32 else 1e-10
        torch.testing.assert_close(mask, exact_mask(row, k, t), rtol=tolerance, atol=1e-37)


def test_the_gradient_of_the_mask_by_its_formula(backend):
    scores, k = torch.randn(3, 9, dtype=torch.double, requires_grad=True), torch.tensor([1.5, 4.0, 7.2], requires_grad=True)
    mask, weight = anyk.SinkhornSort(0.7).mask(scores, k), torch.randn(3, 9, dtype=torch.double)
    of_scores, of_k = torch.autograd.grad((mask * weight).sum(), (scores, k))
    density = (mask * (1 - mask)).detach()
    share = density / density.sum(-1, keepdim=True)
    mean = (share * weight).sum(-1, keepdim=True)
    torch.testing.assert_close(of_scores, density * (weight - mean) / 0.7)
    torch.testing.assert_close(of_k.double(), mean.squeeze(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "row", [[0.0] * 6, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 1e6, -1e6, 3e6, 5.0, 4.0], [inf, inf, 1.0, -inf, -inf, 3e38]]
)
@pytest.mark.parametrize("t", [1e-3, 1.0, 100.0])
def test_masks_of_hard_rows(backend, row, t):
    scores = torch.tensor(row, requires_grad=True)
    for k in range(1, 6):
        mask = anyk.SinkhornSort(t).mask(scores, k)
        assert mask.sum().item() == pytest.approx(min(k, (scores > -inf).sum().item()), rel=1e-5)
        assert ((mask >= 0) & (mask <= 1)).all()
        (grad,) = torch.autograd.grad((mask * torch.linspace(-1, 1, 6)).sum(), scores)
        assert grad.isfinite().all()
    large = torch.randn(2, 50_000)
    assert anyk.SinkhornSort(t).mask(large, 300).double().sum(-1).tolist() == pytest.approx([300] * 2, rel=1e-5)


def test_two_anchors_are_the_transport_of_two_anchors():
    """m_c = sigmoid((s_c - b) / t) for k = 1 of two: b is the mean."""
    mask = anyk.SinkhornSort(2.0).mask(torch.tensor([0.0, 3.0]), 1)
    assert mask[1].item() == pytest.approx(1 / (1 + math.exp(-0.75)))
