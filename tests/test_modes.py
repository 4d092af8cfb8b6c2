"""The whole public surface on every device and under every mode: no host synchronisation, compiled, transformed, autocast,
differentiated twice, the same bits with any number of threads."""

import shutil

import pytest
import torch

import anyk
from strategies import name

P_K = [0.2, 0.3, 0.5]
OPERATORS = [
    *(anyk.NeuralSort(), anyk.SoftSort(power=2.0), anyk.LapSum(), anyk.KSubset()),
    anyk.SinkhornSort(tolerance=1e-3, max_iterations=4),
    *(anyk.SortingNetwork(), anyk.SortingNetwork("bitonic", swap="cauchy", wires="given")),
]
#: functions of scores (rows, n) or (n,) and targets (rows,) or ()
LOSSES = {
    "cross-entropy": lambda s, y: anyk.topk_cross_entropy(s, y, P_K, m=6),
    "cross-entropy, mixed": lambda s, y: anyk.topk_cross_entropy(s, y, P_K, "lapsum", m=6, top1="mixed"),
    "cross-entropy, operator": lambda s, y: anyk.topk_cross_entropy(s, y, P_K, "lapsum", m=6, top1="operator"),
    "cross-entropy, candidates": lambda s, y: anyk.topk_cross_entropy(s, y, P_K, "lapsum", m=6, softmax_over="candidates"),
    "error": lambda s, y: anyk.topk_error(s, y, P_K, m=6),
    "error, q .5": lambda s, y: anyk.topk_error(s, y, P_K, m=6, ce_weight=0, q=0.5),
    "error, smoothed": lambda s, y: anyk.topk_error(s, y, P_K, m=6, label_smoothing=0.1),
    "gce": lambda s, y: anyk.generalized_cross_entropy(s, y, ce_weight=0.3, temperature=0.7),
    "SmoothTopKLoss": lambda s, y: anyk.SmoothTopKLoss(3)(s, y),
    "TopKHingeLoss": lambda s, y: anyk.TopKHingeLoss(3)(s, y),
    "TruncatedTopKEntropyLoss": lambda s, y: anyk.TruncatedTopKEntropyLoss(3)(s, y),
    "SoftmaxAtKLoss": lambda s, y: anyk.SoftmaxAtKLoss(3)(s, y),
}
TOOLS = {
    "soft_topk": lambda s, y: anyk.soft_topk(s, 3),
    "soft_topk, smallest": lambda s, y: anyk.soft_topk(s, 2.5, largest=False),
    "soft_topk, hard": lambda s, y: anyk.soft_topk(s, 3, hard=True),
    "soft_topk, ksubset": lambda s, y: anyk.soft_topk(s, 3, "ksubset"),
    "soft_topk, sinkhorn": lambda s, y: anyk.soft_topk(s, 3, "sinkhorn"),
    "soft_topk, permutahedron": lambda s, y: anyk.soft_topk(s, 3, "permutahedron"),
    "soft_topk, splitter": lambda s, y: anyk.soft_topk(s, 3, "splitter"),
    "soft_rank": lambda s, y: anyk.soft_rank(s),
    "soft_rank, permutahedron": lambda s, y: anyk.soft_rank(s, "permutahedron"),
    "soft_sort": lambda s, y: anyk.soft_sort(s),
    "soft_sort, permutahedron": lambda s, y: anyk.soft_sort(s, "permutahedron"),
    "soft_quantile": lambda s, y: anyk.soft_quantile(s, 0.7),
    "select_topk": lambda s, y: anyk.select_topk(s[..., None] * torch.arange(1.0, 4).to(s), s, 3)[0],
    "select_topk, mask": lambda s, y: anyk.select_topk(s[..., None], s, 3, backward="mask")[0],
    "spearman_loss": lambda s, y: anyk.ranking.spearman_loss(s, relevance(s)),
    "ndcg_loss": lambda s, y: anyk.ranking.ndcg_loss(s, relevance(s), 3),
    "recall_loss": lambda s, y: anyk.ranking.recall_loss(s, relevance(s) > 1, 3),
    "average_precision_loss": lambda s, y: anyk.ranking.average_precision_loss(s, relevance(s) > 1),
}
MATRICES = {
    name(each): lambda s, y, each=each: torch.cat([each(s, 3).flatten(-2), each.log_inclusion(s, y, 3)], -1)
    for each in OPERATORS
}
EVERYTHING = {**LOSSES, **TOOLS, **MATRICES}
everything = pytest.mark.parametrize("function", EVERYTHING.values(), ids=list(EVERYTHING))


def relevance(scores):
    return torch.tensor([2.0, 0, 1, 0, 3, 0, 2, 1], dtype=scores.dtype, device=scores.device).expand(scores.shape)


def batch(rows=4, n=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator, dtype=dtype) * 2, torch.randint(n, (rows,), generator=generator)


def value_and_gradient(function, scores, target):
    leaf = scores.clone().requires_grad_()
    value = function(leaf, target)
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
    (gradient,) = torch.autograd.grad((value * weights).sum(), leaf)
    return value.detach(), gradient


@everything
def test_meta(function):
    """An .item(), a shape that depends on data or a stray CPU tensor would fail."""
    scores, target = batch()
    with anyk.backend("torch"):
        expected = value_and_gradient(function, scores, target)
    actual = value_and_gradient(function, scores.to("meta"), target.to("meta"))
    assert [(each.shape, each.dtype) for each in actual] == [(each.shape, each.dtype) for each in expected]


def test_metrics_on_meta():
    scores, target = (each.to("meta") for each in batch())
    for average in ("micro", "macro"):
        found = [
            *anyk.topk_accuracy(scores, target, average=average).values(),
            *anyk.metrics.topk_hits(scores, target).values(),
        ]
        found += [anyk.metrics.mean_reciprocal_rank(scores, target, average=average), anyk.target_ranks(scores, target)]
        assert all(each.is_meta for each in (*found, *anyk.metrics.ndcg(scores, target, average=average).values()))


@everything
def test_compiled(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected, actual = (value_and_gradient(each, *batch()) for each in (function, compiled))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["cross-entropy", "error", "gce"])
def test_compiled_for_any_batch_size(loss):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(LOSSES[loss], fullgraph=True, backend=backend)
    for rows in (4, 6, 7, 9, 13):
        torch.testing.assert_close(compiled(*batch(rows)), LOSSES[loss](*batch(rows)))
    assert len(graphs) <= 2  # one static, one dynamic


def test_schedules_do_not_compile_again():
    torch._dynamo.reset()
    criterion = anyk.TopKErrorLoss([0.5, 0.5], m=6)
    compiled = torch.compile(criterion, fullgraph=True, backend="eager")
    for step in range(12):
        criterion.p_k = [0.5 + 0.01 * step, 0.5 - 0.01 * step]
        torch.testing.assert_close(compiled(*batch()), criterion(*batch()))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:Skipping serialization of:UserWarning")  # torch 2.6's own
def test_compiled_with_inductor():
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    with anyk.backend("torch"):
        expected = value_and_gradient(LOSSES["error"], *batch())
        actual = value_and_gradient(torch.compile(LOSSES["error"], fullgraph=True), *batch())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@everything
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
def test_functional_transforms(function):
    scores, target = batch()
    each = [value_and_gradient(function, s, y) for s, y in zip(scores, target, strict=True)]
    torch.testing.assert_close(torch.func.vmap(function)(scores, target), torch.stack([value for value, _ in each]))

    def total(s, y):
        value = function(s, y)
        return (value * torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape)).sum()

    gradients = torch.stack([gradient for _, gradient in each])
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(scores, target), gradients, **close)
    direction = torch.linspace(-1, 1, scores.shape[1])
    slope = torch.func.jvp(lambda s: total(s, target[0]), (scores[0],), (direction,))[1]
    torch.testing.assert_close(slope, gradients[0] @ direction, rtol=1e-3, atol=1e-4)


@everything
def test_second_derivatives(function):
    scores, target = batch(2, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda s: function(s, target), (scores.requires_grad_(),), fast_mode=True, atol=1e-4)


@everything
def test_autocast(function):
    scores, target = batch()
    expected = function(scores, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = function(scores, target)
    assert actual.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected)


def test_batched_gradients():
    scores, target = batch()
    for loss in (anyk.topk_cross_entropy, anyk.topk_error):
        leaf = scores.clone().requires_grad_()
        losses = loss(leaf, target, P_K, reduction="none")
        (each,) = torch.autograd.grad(losses, leaf, torch.eye(4), is_grads_batched=True)
        (total,) = torch.autograd.grad(loss(leaf, target, P_K, reduction="sum"), leaf)
        torch.testing.assert_close(each.sum(0), total)


@everything
def test_a_first_call_without_gradients_spoils_nothing(function):
    scores, target = batch(4)
    with torch.inference_mode():
        function(scores, target)
    assert value_and_gradient(function, scores, target)[1].isfinite().all()


@pytest.mark.parametrize("loss", [anyk.topk_cross_entropy, anyk.topk_error])
@pytest.mark.parametrize("operator", [anyk.LapSum(), anyk.KSubset(), anyk.SortingNetwork(), anyk.NeuralSort()], ids=name)
def test_same_bits_with_any_number_of_threads(operator, loss):
    """Of so many rows that the candidates alone are more than torch leaves to one thread: 32,768 numbers."""
    scores, target = batch(2100, 40)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            results.append(value_and_gradient(lambda s, y: loss(s, y, P_K, operator, m=16, reduction="none"), scores, target))
    finally:
        torch.set_num_threads(before)
    for losses, gradient in results[1:]:
        assert torch.equal(losses, results[0][0])
        assert torch.equal(gradient, results[0][1])
