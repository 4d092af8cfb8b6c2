"""On every device, under every mode: no host synchronisation, compiled, transformed, autocast, deterministic."""

import shutil

import pytest
import torch

import anyk
from anyk import TopKCrossEntropyLoss, topk_cross_entropy
from strategies import name, operators

P_K = [0.2] * 5
OPERATORS = operators(wires=("target", "given"))
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=name)
BASELINES = [anyk.SmoothTopKLoss(3), anyk.TopKHingeLoss(3), anyk.TruncatedTopKEntropyLoss(3), anyk.SoftmaxAtKLoss(3)]


def batch(rows=6, n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator), torch.randint(n, (rows,), generator=generator)


# ---- meta tensors: an .item(), a data-dependent shape or a stray CPU tensor would fail ----------------------------------


@every_operator
def test_meta(operator):
    criterion = TopKCrossEntropyLoss(P_K, operator).to("meta")
    scores = torch.empty(6, 12, device="meta", requires_grad=True)
    target = torch.empty(6, dtype=torch.long, device="meta")
    for m in (None, 8):
        criterion.m = m
        for smoothing in (0.0, 0.1):
            criterion.label_smoothing = smoothing
            criterion(scores, target).backward()
            assert scores.grad.shape == scores.shape
        criterion(scores, scores.detach()).backward()  # class probabilities
    anyk.topk_error(scores, target, P_K, operator, m=8, label_smoothing=0.1).backward()
    per_class = TopKCrossEntropyLoss(torch.full((12, 4), 0.25), operator, top1="mixed").to("meta")
    per_class(scores, target, example_p_k=torch.empty(6, 3, device="meta")).backward()
    per_class(scores, target).backward()
    operator(scores, 5, hard=True).sum().backward()
    operator.inclusion(scores, target, 5).sum().backward()


@pytest.mark.parametrize("criterion", BASELINES, ids=lambda c: type(c).__name__)
def test_meta_baselines(criterion):
    scores = torch.empty(6, 12, device="meta", requires_grad=True)
    target = torch.empty(6, dtype=torch.long, device="meta")
    criterion(scores, target).backward()
    assert anyk.topk_hits(scores, target)[5].device.type == "meta"
    for average in ("micro", "macro"):
        found = [*anyk.topk_accuracy(scores, target, average=average).values(), *anyk.ndcg(scores, target).values()]
        assert all(one.device.type == "meta" for one in (*found, anyk.mean_reciprocal_rank(scores, target, average=average)))


# ---- torch.compile ------------------------------------------------------------------------------------------------------


def assert_compiled_is_eager(function, inputs, backend="aot_eager"):
    """The same values and gradients; for inputs of several sizes by one graph with symbolic sizes, slower to trace."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=len(inputs) > 1, backend=backend)
    for scores, target in inputs:
        ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
        expected, actual = function(ours, target), compiled(theirs, target)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        weights = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape)
        (expected * weights).sum().backward()
        (actual * weights).sum().backward()
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-5)


SHORT = [0.5, 0.2, 0.3]


# one of each code path, few candidates and a small k: tracing takes seconds, by the operations in the graph
@pytest.mark.parametrize(
    "operator",
    [
        anyk.NeuralSort(),
        anyk.SoftSort(power=2.0),
        anyk.SinkhornSort(anchors="topk", max_iterations=3),
        anyk.LapSum(),
        anyk.KSubset(),
        anyk.SortingNetwork(),
        anyk.SortingNetwork("bitonic", wires="given"),
    ],
    ids=name,
)
def test_compiled_loss_and_operator(operator):
    def both(scores, target):  # in one graph: each compilation takes seconds
        losses = topk_cross_entropy(scores, target, SHORT, operator, m=4, reduction="none")
        return torch.cat([operator(scores, 3).flatten(1), losses[:, None]], dim=-1)

    assert_compiled_is_eager(both, [batch(6, n=6)])


@pytest.mark.parametrize("operator", [anyk.LapSum(), anyk.SortingNetwork()], ids=name)
def test_compiled_for_any_batch_size(operator):
    assert_compiled_is_eager(TopKCrossEntropyLoss(SHORT, operator, m=6), [batch(6), batch(9, seed=1)])


@pytest.mark.parametrize("top1", ["mixed", "operator"])
def test_compiled_modes(top1):
    assert_compiled_is_eager(TopKCrossEntropyLoss(SHORT, anyk.LapSum(), m=6, top1=top1), [batch(6)])


@pytest.mark.parametrize("settings", [{}, {"ce_weight": 0, "q": 0.5}, {"label_smoothing": 0.1}], ids=str)
def test_compiled_error_loss(settings):
    assert_compiled_is_eager(anyk.TopKErrorLoss(SHORT, m=6, **settings), [batch(6)])


@pytest.mark.parametrize("criterion", BASELINES, ids=lambda c: type(c).__name__)
def test_compiled_baselines(criterion):
    assert_compiled_is_eager(criterion, [batch(6)])


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:Skipping serialization of:UserWarning")  # torch 2.6's own
def test_compiled_with_inductor():
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    assert_compiled_is_eager(TopKCrossEntropyLoss(SHORT, m=6), [batch(6)], backend="inductor")


def test_no_recompilation_storm():
    torch._dynamo.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(1)
        return graph

    criterion = torch.compile(TopKCrossEntropyLoss(P_K, m=8), fullgraph=True, backend=backend)
    for rows in (6, 7, 9, 13, 20):
        criterion(*batch(rows))
    assert len(compilations) <= 2  # one static, one dynamic


def test_schedules_do_not_compile_again():
    torch._dynamo.reset()
    criterion = anyk.TopKErrorLoss([0.5, 0.5], m=8)
    compiled = torch.compile(criterion, fullgraph=True, backend="eager")
    for step in range(12):
        criterion.p_k = [0.5 + 0.01 * step, 0.5 - 0.01 * step]
        torch.testing.assert_close(compiled(*batch(6)), criterion(*batch(6)))


# ---- functional transforms ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize(
    ("operator", "top1"),
    [*((each, "separate") for each in OPERATORS), *((anyk.LapSum(), top1) for top1 in ("mixed", "operator", "error"))],
)
def test_functional_transforms(operator, top1):
    scores, target = batch()

    def loss(s, y):
        if top1 == "error":
            return anyk.topk_error(s, y, P_K, operator, m=8)
        return topk_cross_entropy(s, y, P_K, operator, m=8, top1=top1)

    expected = torch.stack([loss(s, y) for s, y in zip(scores, target, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(scores, target), expected)
    gradient = torch.func.grad(loss)(scores, target)
    reference = scores.clone().requires_grad_()
    loss(reference, target).backward()
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-4, atol=1e-6)
    each = torch.func.vmap(torch.func.grad(loss))(scores, target)
    torch.testing.assert_close(each / len(scores), reference.grad, rtol=1e-4, atol=1e-6)
    direction = torch.ones_like(scores) * torch.linspace(-1, 1, 12)
    _, slope = torch.func.jvp(lambda s: loss(s, target), (scores,), (direction,))
    torch.testing.assert_close(slope, (reference.grad * direction).sum(), rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("top1", ["separate", "mixed", "operator"])
def test_forward_mode_through_p_k_with_a_zero(top1):
    scores, target = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 4, 2])
    p_k, direction = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64), torch.tensor([0.1, 0.0, -0.1], dtype=torch.float64)

    def loss(p):
        return anyk.topk_cross_entropy(scores, target, p, anyk.LapSum(), top1=top1)

    slope = torch.func.jvp(loss, (p_k,), (direction,))[1]
    apart = loss(p_k + 1e-6 * direction) - loss(p_k - 1e-6 * direction)
    torch.testing.assert_close(slope, apart / 2e-6, rtol=1e-6, atol=1e-9)


def test_transforms_of_other_arguments():
    """The scores are plain there, and must not be taken for it."""
    scores, target = batch()
    p_ks = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    for operator in (anyk.LapSum(), anyk.SortingNetwork(), anyk.SinkhornSort()):
        each = torch.func.vmap(lambda p, op=operator: topk_cross_entropy(scores, target, p, op, m=8))(p_ks)
        torch.testing.assert_close(each, torch.stack([topk_cross_entropy(scores, target, p, operator, m=8) for p in p_ks]))


def test_forward_mode_and_batched_gradients():
    scores, target = batch()
    for operator in (anyk.LapSum(), anyk.SortingNetwork()):
        leaf = scores.clone().requires_grad_()
        losses = topk_cross_entropy(leaf, target, P_K, operator, reduction="none")
        (each,) = torch.autograd.grad(losses, leaf, torch.eye(6), is_grads_batched=True)
        (total,) = torch.autograd.grad(topk_cross_entropy(leaf, target, P_K, operator, reduction="sum"), leaf)
        torch.testing.assert_close(each.sum(0), total)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(scores, total)
            loss = topk_cross_entropy(dual, target, P_K, operator, reduction="sum")
            slope = torch.autograd.forward_ad.unpack_dual(loss).tangent
        torch.testing.assert_close(slope, total.square().sum(), rtol=1e-4, atol=1e-5)


@every_operator
def test_a_first_call_without_gradients_spoils_nothing(operator):
    scores, target = batch(4, 11)  # a size that no other test has cached
    with torch.inference_mode():
        topk_cross_entropy(scores, target, P_K, operator)
    leaf = scores.clone().requires_grad_()
    topk_cross_entropy(leaf, target, P_K, operator).backward()
    assert leaf.grad.isfinite().all()


# ---- precision and determinism ------------------------------------------------------------------------------------------


@every_operator
def test_autocast(operator):
    scores, target = batch()
    expected = topk_cross_entropy(scores, target, P_K, operator, m=8)
    bounded = anyk.topk_error(scores, target, P_K, operator, m=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = topk_cross_entropy(scores, target, P_K, operator, m=8)
        torch.testing.assert_close(anyk.topk_error(scores, target, P_K, operator, m=8), bounded)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("loss", [topk_cross_entropy, anyk.topk_error])
@pytest.mark.parametrize("operator", operators(wires=("target",)), ids=name)
def test_same_bits_with_any_number_of_threads(operator, loss):
    """Of so many rows that the candidates alone are more than torch leaves to one thread: 32,768 numbers."""
    scores, target = batch(2100, 40)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            leaf = scores.clone().requires_grad_()
            losses = loss(leaf, target, P_K, operator, m=16, reduction="none")
            losses.sum().backward()
            results.append((losses.detach(), leaf.grad))
    finally:
        torch.set_num_threads(before)
    for losses, gradient in results[1:]:
        assert torch.equal(losses, results[0][0])
        assert torch.equal(gradient, results[0][1])
