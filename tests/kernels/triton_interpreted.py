"""The triton kernels under triton's interpreter against the plain code, in float64 where digits are compared.

The interpreter must be chosen before triton is imported, and whatever else a test process has imported may have done so:
test_triton.py runs this file in a process of its own, with TRITON_INTERPRET=1.
"""

import warnings

import pytest
import torch

import anyk
from anyk import checks, swaps
from anyk.conventions import Conventions
from anyk.kernels import triton as kernel
from anyk.losses import CrossEntropySpec, ErrorSpec
from anyk.losses import plain_loss as topk_loss
from anyk.operators import base, sorting_network

# The interpreter's numpy warns of the infinities and NaN on lanes that do not count.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow|underflow) encountered:RuntimeWarning")

NETWORKS = [
    anyk.SortingNetwork(kind, swap=swap, wires=wires)
    for kind, swap, wires in (
        ("splitter", "logistic", "target"),
        ("splitter", "logistic_art", "sorted"),
        ("splitter", "optimal", "given"),
        ("bitonic", "cauchy", "given"),
        ("bitonic", "reciprocal", "target"),
        ("bitonic", "logistic", "sorted"),
        ("odd_even", "gaussian", "target"),
        ("odd_even", "logistic", "given"),
    )
]
OTHERS = [anyk.LapSum(), anyk.KSubset(), anyk.SoftSort(), anyk.NeuralSort()]
OPERATORS = NETWORKS + OTHERS
FEW = [NETWORKS[0], NETWORKS[3], *OTHERS]
NONE = Conventions("none")
# logistic_art bends within a thousandth of a tie: there its slope is as good as the scores are rounded. NeuralSort multiplies
# by ranks and places, and takes differences of that.
ROUNDING = {"logistic_art": 60, "NeuralSort": 20}
P_K = [0.3, 0.1, 0.0, 0.2, 0.4]


@pytest.fixture(autouse=True)
def _quicker(monkeypatch):
    """The interpreter patches triton's language at each call of a helper, again and again: half of its time."""
    from triton.runtime import interpreter

    patch, run, seen = interpreter._patch_lang, interpreter.GridExecutor.__call__, {}

    def once(function):
        of = id(function.__globals__)
        if of not in seen:
            seen[of] = patch(function)
        return seen[of]

    def launch(*arguments, **keywords):
        seen.clear()  # what it has patched it takes back after each launch
        return run(*arguments, **keywords)

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)


def name(value):
    if isinstance(value, anyk.SortingNetwork):
        return f"{value.kind}-{value.swap}-{value.wires}"
    return type(value).__name__ if isinstance(value, anyk.Operator) else None


def cross_entropy(operator="splitter", top1="separate", over="all", m=None, p_k=P_K):
    return CrossEntropySpec.of(p_k, operator, m, top1, over)


def error(operator="lapsum", ce_weight=0.2, q=0.7, m=None, p_k=P_K):
    return ErrorSpec.of(p_k, operator, m, ce_weight, q)


def batch(rows=6, n=12, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator) * spread, torch.randint(n, (rows,), generator=generator)


def fused(spec, scores, target, conventions, example_p_k=None):
    """The kernels' loss; they must serve."""
    p_k, k, m = spec.fit(scores, scores.shape[1], scores.shape[:1], example_p_k)
    description = spec.describe(scores.shape[1], k, m, conventions.label_smoothing)
    assert not isinstance(description, str), description
    plain = lambda scores: topk_loss(spec, scores, target, conventions, example_p_k)  # noqa: E731
    result = kernel.loss(description, scores, target, p_k, conventions, plain)
    assert result is not None
    return result


def both(function, scores, incoming=None):
    scores = scores.detach().clone().requires_grad_()
    result = function(scores)
    result.backward(torch.ones_like(result) if incoming is None else incoming.to(result.dtype))
    return result.detach(), scores.grad


def agree(spec, scores, target, conventions=NONE, example_p_k=None, incoming=None):
    """Loss and gradient are off by at most 2e-6 of their size, 1e-6 of the largest in their row, or five times the plain code.

    ROUNDING has other factors than five. The plain code, in float32 here, is lucky at times, on some processors more than on
    others: hence the row's size.
    """

    def plain(scores):
        return topk_loss(spec, scores, target, conventions, example_p_k)

    results = both(lambda scores: fused(spec, scores, target, conventions, example_p_k), scores, incoming)
    for result, single, exact in zip(
        results, both(plain, scores, incoming), both(plain, scores.double(), incoming), strict=True
    ):
        assert result.dtype == torch.float32
        assert torch.equal(result.isnan(), exact.isnan())
        error, own = ((value.double() - exact).abs().nan_to_num(0, 0) for value in (result, single))
        size = exact.abs().nan_to_num(0, 0)
        # A row that the plain code rounds by much is rounded by much in other places here.
        own, largest = (value.amax(-1, keepdim=True) if value.ndim else value for value in (own, size))
        factor = ROUNDING.get(getattr(spec.operator, "swap", None) or type(spec.operator).__name__, 5)
        allowed = torch.maximum((2e-6 * size).clamp(min=1e-7), torch.maximum(1e-6 * largest, factor * own))
        assert (error <= allowed).all(), (error / allowed).max()
        assert torch.equal(result.isinf(), exact.isinf())


def test_the_constants_are_those_of_the_plain_code():
    from anyk.kernels import triton_kernels as code

    def value(constant):
        return getattr(constant, "value", constant)

    assert value(code.LOG_ZERO) == base.LOG_ZERO
    assert value(code.LOG_TAIL_WEIGHT) == sorting_network.LOG_TAIL_WEIGHT


@pytest.mark.parametrize("operator", OPERATORS, ids=name)
@pytest.mark.parametrize("m", [None, 6])
def test_every_operator(operator, m):
    scores, target = batch()
    agree(cross_entropy(operator, "operator") if m is None else error(operator, m=m), scores, target)


@pytest.mark.parametrize("operator", [anyk.LapSum(), anyk.KSubset()], ids=name)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (cross_entropy, {"top1": "separate"}),
        (cross_entropy, {"top1": "mixed"}),
        (cross_entropy, {"top1": "separate", "over": "candidates"}),
        (cross_entropy, {"top1": "separate", "over": "candidates", "p_k": [1.0]}),
        (cross_entropy, {"top1": "separate", "p_k": torch.tensor([1.0, 0.0])}),
        (error, {"ce_weight": 0.0}),
        (error, {"q": 0.0}),
        (error, {"q": 1.0}),
        (error, {"conventions": Conventions(label_smoothing=0.1)}),
    ],
)
def test_every_family(operator, make, options):
    scores, target = batch(seed=1)
    scores[2, 3:5] = -torch.inf
    target[2] = 1
    options = dict(options)
    conventions = options.pop("conventions", NONE)
    agree(make(operator, m=6, **options), scores, target, conventions)


@pytest.mark.parametrize("swap", swaps.SWAPS)
def test_every_swap_at_another_temperature(swap):
    scores, target = batch(n=6)
    agree(cross_entropy(anyk.SortingNetwork(swap=swap, temperature=0.05), p_k=[0.5, 0.5]), scores, target)


@pytest.mark.parametrize("operator", OPERATORS, ids=name)
def test_padding(operator):
    scores, target = batch(n=9)
    scores[0, 5:] = -torch.inf
    scores[1, :4] = -torch.inf
    scores[2, [1, 3, 4]] = -torch.inf
    target[:3] = torch.tensor([4, 6, 0])
    for m in (None, 7) if operator in FEW else (None,):
        agree(cross_entropy(operator, m=m), scores, target)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions_ignored_rows_and_weights(reduction, weighted):
    scores, target = batch(rows=9)
    target[[2, 5]] = -100
    scores[2] = torch.nan  # nothing of it may be seen
    weight = torch.rand(12) if weighted else None
    conventions = Conventions(reduction, weight=weight)
    agree(cross_entropy(NETWORKS[0], m=6), scores, target, conventions)
    incoming = torch.randn(9) if reduction == "none" else torch.tensor(3.0)
    conventions = Conventions(reduction, weight=weight, label_smoothing=0 if weighted else 0.1)
    agree(error(anyk.KSubset(), m=6), scores, target, conventions, incoming=incoming)


def test_nothing_counts():
    scores, target = batch(rows=3)
    result, gradient = both(
        lambda scores: fused(cross_entropy(m=6), scores, torch.full_like(target, 4), Conventions(ignore_index=4)), scores
    )
    assert result.isnan()
    assert (gradient == 0).all()


@pytest.mark.parametrize("operator", [NETWORKS[0], anyk.LapSum()], ids=name)
def test_p_k_of_classes_and_examples(operator):
    scores, target = batch()
    target[3] = -100
    classes, rows = torch.rand(12, 4), torch.rand(6, 3)
    classes[2] = torch.tensor([1.0, 0, 0, 0])
    target[1] = 2
    agree(cross_entropy(operator, p_k=classes / classes.sum(-1, keepdim=True)), scores, target)
    example_p_k = rows / rows.sum(-1, keepdim=True)
    agree(error(operator, m=6, p_k=None), scores, target, example_p_k=example_p_k)
    agree(cross_entropy(operator, "mixed", m=6, p_k=None), scores, target, example_p_k=example_p_k)


@pytest.mark.parametrize("operator", FEW, ids=name)
def test_what_devices_do_not_refuse(operator, monkeypatch):
    """A target that is padding costs infinity; fewer classes than k are as many as there are."""
    monkeypatch.setattr(checks, "readable", lambda tensor: False)
    scores, target = batch(rows=3, n=8)
    scores[1, 4:] = -torch.inf
    target[1] = 6
    agree(cross_entropy(operator, m=5, p_k=[0.5, 0.5]), scores, target)
    scores[1, 2:] = -torch.inf
    target[1] = 0
    agree(cross_entropy(operator), scores, target)


@pytest.mark.parametrize("operator", OPERATORS, ids=name)
def test_few_classes(operator):
    for n in (1, 2, 5):
        scores, target = batch(rows=2, n=n, seed=n)
        agree(cross_entropy(operator, "operator", p_k=torch.full((n,), 1 / n)), scores, target)


@pytest.mark.parametrize("operator", OPERATORS, ids=name)
def test_far_behind_and_ties(operator):
    """No dead gradient ten thousand temperatures behind; equals, all and some."""
    scores, target = batch(rows=6, n=9)
    scores[0, target[0]] = -1e4
    scores[1, target[1]] = 1e4
    scores[2] = 0.25
    scores[3] = scores[3].round()
    scores[4] *= 30
    spec = cross_entropy(operator, "operator")
    agree(spec, scores, target)
    _, gradient = both(lambda scores: fused(spec, scores, target, Conventions()), scores)
    assert gradient[0, target[0]] < 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("operator", FEW, ids=name)
def test_nan_and_infinity_in_give_nan_out(operator):
    scores, target = batch(rows=4, n=8)
    scores[1, 3] = torch.nan
    scores[2, target[2]] = torch.nan
    for m in (None, 5):
        result, gradient = both(
            lambda scores, m=m: fused(cross_entropy(operator, m=m), scores, target, Conventions("none")), scores
        )
        assert result.isnan().tolist() == [False, True, True, False]
        assert gradient[1].isnan().any()
        assert gradient[[0, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", [NETWORKS[0], anyk.KSubset()], ids=name)
def test_half_precision(dtype, operator):
    scores, target = batch()
    scores = scores.to(dtype)
    spec = error(operator, m=6)
    result, gradient = both(lambda scores: fused(spec, scores, target, Conventions()), scores)
    exact, exact_gradient = both(lambda scores: topk_loss(spec, scores, target, Conventions()), scores.double())
    assert (result.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(result, exact.float(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(gradient, exact_gradient.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_strides():
    scores, target = batch()
    wide = torch.randn(12, 12)
    wide[:, ::2] = scores.t()
    strided = wide[:, ::2].t().detach().requires_grad_()
    fused(cross_entropy(m=6), strided, target, Conventions()).backward()
    _, gradient = both(lambda scores: fused(cross_entropy(m=6), scores, target, Conventions()), scores)
    torch.testing.assert_close(strided.grad, gradient)


def test_more_classes_than_a_block_and_more_rows_than_scratch(monkeypatch):
    monkeypatch.setattr(kernel, "MOST_SCRATCH", 4096)
    monkeypatch.setattr(kernel, "LEAST_ROWS", 1)
    scores, target = batch(rows=20, n=4500)
    agree(error(NETWORKS[0], m=6), scores, target, Conventions(label_smoothing=0.1))
    agree(error(anyk.KSubset(), m=6), scores, target, Conventions())


@pytest.mark.parametrize("operator", [NETWORKS[0], NETWORKS[2], *OTHERS], ids=name)
def test_more_candidates_than_registers(operator):
    scores, target = batch(rows=2, n=270)
    scores[1, 100:] = -torch.inf
    target[1] = 30
    agree(cross_entropy(operator), scores, target)


def test_sums_beyond_float32():
    scores, target = batch(rows=2, n=100, spread=0.1)
    agree(cross_entropy(anyk.KSubset(), "operator", p_k=[0.0] * 44 + [1.0]), scores, target)


def test_the_gradient_is_kept():
    """retain_graph: the second backward pass gives what the first one gave, the incoming gradient is not written to."""
    scores, target = batch()
    scores.requires_grad_()
    result = fused(cross_entropy(m=6), scores, target, Conventions("none"))
    incoming = torch.full((6,), 2.0)
    first = torch.autograd.grad(result, scores, incoming, retain_graph=True)[0]
    second = torch.autograd.grad(result, scores, incoming / 2)[0]
    torch.testing.assert_close(first, 2 * second)
    assert (incoming == 2).all()


def test_second_derivative():
    scores, target = batch(rows=3, n=6)
    spec, conventions = cross_entropy(p_k=[0.5, 0.5]), Conventions()

    def second(function, scores):
        scores = scores.clone().requires_grad_()
        gradient = torch.autograd.grad(function(scores), scores, create_graph=True)[0]
        return torch.autograd.grad(gradient.square().sum(), scores)[0]

    result = second(lambda scores: fused(spec, scores, target, conventions), scores)
    exact = second(lambda scores: topk_loss(spec, scores, target, conventions), scores.double())
    torch.testing.assert_close(result, exact.float(), rtol=1e-4, atol=1e-6)


def test_what_it_does_not_serve():
    def served(scores, spec):
        p_k, k, m = spec.fit(scores, scores.shape[1], scores.shape[:1], None)
        description = spec.describe(scores.shape[1], k, m)
        target = torch.zeros(len(scores), dtype=torch.long)
        return kernel.loss(description, scores, target, p_k, Conventions(), lambda scores: scores.sum()) is not None

    assert served(torch.zeros(2, 8), cross_entropy())
    assert not served(torch.zeros(2, 8, dtype=torch.float64), cross_entropy())
    assert not served(torch.zeros(0, 8), cross_entropy())
    assert not served(torch.zeros(2, 5000), cross_entropy(anyk.LapSum()))
    assert not served(torch.zeros(2, 1000), cross_entropy(anyk.SortingNetwork("odd_even")))


def test_the_first_use_is_compared(monkeypatch):
    scores, target = batch()
    scores.requires_grad_()
    spec, calls = cross_entropy(NETWORKS[0], m=6), []
    p_k, k, m = spec.fit(scores, 12, scores.shape[:1], None)
    description = spec.describe(12, k, m)

    def plain(scores):
        calls.append(len(scores))
        return topk_loss(spec, scores, target, Conventions())

    def loss(scores=scores):
        return kernel.loss(description, scores, target, p_k, Conventions(), plain)

    monkeypatch.setattr(kernel, "_must_check", lambda scores: True)
    monkeypatch.setattr(kernel, "_checked", {})
    endless = scores.detach().clone()
    endless[0, 0] = torch.inf
    assert loss(endless.requires_grad_()) is None  # nothing to compare
    assert loss() is not None
    assert loss() is not None
    assert len(calls) == 2
    loss().backward()
    expected = torch.autograd.grad(plain(scores), scores)[0]
    torch.testing.assert_close(scores.grad, expected)

    monkeypatch.setattr(kernel, "_checked", {})
    backward = kernel._Call.backward
    monkeypatch.setattr(kernel._Call, "backward", lambda *arguments: 1.01 * backward(*arguments))
    with pytest.warns(RuntimeWarning, match=r"plain PyTorch is used \(the gradient is .* off"):
        assert loss() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss() is None  # without another warning

    def broken(*arguments):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernel, "_checked", {})
    monkeypatch.setattr(kernel._Call, "forward", broken)
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert loss() is None
