"""Calls of every public name with many shapes. Run by test_shapes.py, with the annotations of anyk checked at each call.

An entry may wait for a name that does not exist yet; a name without an entry is an error.
"""

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

import anyk
from anyk.operators.base import has

B, N, D, K = 3, 7, 4, 2
P_K = [0.5, 0.5]
SHAPES = [(B, N), (N,), (B, N, D), (B, N, 2, 2), (0, N)]
#: metrics that have the classes second, and ones that have them last, take these
SQUARE = [(B, N), (N,), (B, N, N), (0, N)]
LEADING = [(N,), (B, N), (2, B, N), (0, N)]


def with_dtypes(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The dtype has a say in which code runs, but not together with the shape."""
    return [*((shape, torch.float32) for shape in shapes), ((B, N), torch.float64), ((B, N), torch.bfloat16)]


def classes_of(shape: tuple[int, ...], low: int = 0) -> Tensor:
    return torch.randint(low, N, shape[:1] + shape[2:] if len(shape) > 1 else ())


def scores_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, last: float | None = None) -> Tensor:
    scores = torch.randn(shape, dtype=dtype)
    if last is not None:
        scores.select(min(1, len(shape) - 1), N - 1).fill_(last)
    return scores.requires_grad_()


def finish(result: Any) -> None:
    """Backward passes have shapes too."""
    if isinstance(result, Tensor) and result.requires_grad:
        result.double().sum().backward()


def call_loss(criterion: Callable[..., Any], *, probabilities: bool = True, **more: Any) -> None:
    for shape, dtype in with_dtypes(SHAPES):
        target = classes_of(shape)
        finish(criterion(scores_of(shape, dtype), target, **more))
        padded = scores_of(shape, dtype, last=-torch.inf)
        finish(criterion(padded, torch.where(target == N - 1, -100, target), **more))
        if probabilities:
            distribution = scores_of(shape).detach().softmax(min(1, len(shape) - 1)).to(dtype)
            finish(criterion(scores_of(shape, dtype), distribution, **more))


def call_family(make: Callable[..., Any]) -> None:
    """A loss with P_K, in every setting that changes which code runs."""
    for settings in (
        {},
        {"m": 4},
        {"m": None, "reduction": "none"},
        {"m": 4, "weight": torch.rand(N), "reduction": "sum"},
        {"m": 4, "label_smoothing": 0.1},
        {"p_k": torch.tensor(P_K).expand(N, K)},
        *({"operator": operator} for operator in operators() if operator.has_probabilities),
    ):
        call_loss(make(**{"p_k": P_K, **settings}), probabilities="p_k" not in settings)


def call_cross_entropy_family(make: Callable[..., Any]) -> None:
    call_family(make)
    for top1, softmax_over in itertools.product(("separate", "mixed", "operator"), ("all", "candidates")):
        call_loss(make(P_K, top1=top1, softmax_over=softmax_over, m=4))
    call_loss(make([1.0]))
    for shape in SHAPES:
        for batch in {shape[:1] if len(shape) > 1 else (), classes_of(shape).shape}:  # an example, a position
            rows = torch.tensor(P_K).expand(*batch, K)
            finish(make(P_K)(scores_of(shape), classes_of(shape), example_p_k=rows))


def operators() -> list[anyk.Operator]:
    found = [getattr(anyk, name) for name in anyk.__all__]
    kinds = [kind for kind in found if inspect.isclass(kind) and issubclass(kind, anyk.Operator) and kind is not anyk.Operator]
    networks = [anyk.SortingNetwork(kind, wires=wires) for kind in ("odd_even", "bitonic") for wires in ("given", "sorted")]
    return [*(kind() for kind in kinds), *networks, anyk.SinkhornSort(anchors="topk")]


def call_operator(kind: type[anyk.Operator]) -> None:
    for operator in [each for each in operators() if type(each) is kind]:
        for (shape, dtype), last in itertools.product(with_dtypes(LEADING), [1.0, -torch.inf]):
            target = torch.randint(N - 1, shape[:-1])
            for what, arguments in (("mask", (K,)), ("ranks", ()), ("sort", ())):
                if has(kind, what):
                    finish(getattr(operator, what)(padded(shape, dtype, last), *arguments))
            if not operator.has_probabilities:
                continue
            finish(operator(padded(shape, dtype, last), K))
            finish(operator(padded(shape, dtype, last), K, hard=True))
            finish(operator.inclusion(padded(shape, dtype, last), target, K))
            finish(operator.inclusion(padded(shape, dtype, last), target, N - 1))


def call_tool(function: Callable[..., Any], *arguments: Any) -> None:
    for (shape, dtype), last in itertools.product(with_dtypes(LEADING), [1.0, -torch.inf]):
        finish(function(padded(shape, dtype, last), *arguments))
    finish(function(torch.randn(N, B, requires_grad=True), *arguments, dim=0))
    where = torch.ones(B, N, dtype=torch.bool)
    finish(function(torch.randn(B, N, requires_grad=True), *arguments, where=where))


RANKING = {
    "spearman_loss": lambda: anyk.ranking.spearman_loss(torch.randn(B, N), torch.randn(B, N)),
    "ndcg_loss": lambda: anyk.ranking.ndcg_loss(torch.randn(B, N), torch.rand(B, N), K),
    "recall_loss": lambda: anyk.ranking.recall_loss(torch.randn(N), torch.rand(N) > 0.5, K),
    "average_precision_loss": lambda: anyk.ranking.average_precision_loss(torch.randn(B, N), torch.rand(B, N) > 0.5),
}


def padded(shape: tuple[int, ...], dtype: torch.dtype, last: float) -> Tensor:
    scores = torch.randn(shape, dtype=dtype)
    scores[..., -1] = last
    return scores.requires_grad_()


def call_metric(metric: Callable[..., Any], **more: Any) -> None:
    for shape, dtype in with_dtypes(SQUARE):
        metric(scores_of(shape, dtype).detach(), classes_of(shape), **more)


def call_prediction_sets() -> None:
    for calibrated, (shape, dtype) in itertools.product(((B, N), (B, N, N)), with_dtypes(SQUARE)):
        show = anyk.PredictionSets(scores_of(calibrated), classes_of(calibrated), coverage=0.5)
        assert show(scores_of(shape, dtype)).shape == shape


def call_averages(metric: Callable[..., Any], **more: Any) -> None:
    for average in ("micro", "macro"):
        call_metric(metric, average=average, **more)


def call_head(make: Callable[..., Any]) -> None:
    for settings, shape in itertools.product(
        (
            {},
            {"bias": False},
            {"chunk_size": 2},
            {"chunk_size": 2, "weight": torch.rand(N)},
            {"chunk_size": 2, "label_smoothing": 0.1},
        ),
        ((B, D), (D,), (2, B, D)),
    ):
        for m in (4, None):
            head = make(m=m, **settings)
            finish(head(torch.randn(shape, requires_grad=True), torch.randint(N, shape[:-1])))
            finish(head.predict(torch.randn(shape), K)[0])
            finish(head.as_linear()(torch.randn(shape)))


LOSSES = {name: (lambda name=name: call_loss(getattr(anyk, name)(K), probabilities=True)) for name in (
    "SmoothTopKLoss", "SoftmaxAtKLoss", "TopKHingeLoss", "TruncatedTopKEntropyLoss",
)}  # fmt: skip
#: the modules call the functions, so these need one call
FAMILIES = {
    "TopKCrossEntropyLoss": lambda: call_cross_entropy_family(anyk.TopKCrossEntropyLoss),
    "topk_cross_entropy": lambda: call_loss(partial(anyk.topk_cross_entropy, p_k=P_K)),
    "TopKErrorLoss": lambda: call_family(anyk.TopKErrorLoss),
    "topk_error": lambda: call_loss(partial(anyk.topk_error, p_k=P_K)),
}
OPERATORS = {
    name: (lambda name=name: call_operator(getattr(anyk, name)))
    for name in ("KSubset", "LapSum", "NeuralSort", "Permutahedron", "SinkhornSort", "SoftSort", "SortingNetwork")
}
TOOLS = {
    "soft_topk": lambda: call_tool(anyk.soft_topk, K),
    "soft_rank": lambda: call_tool(anyk.soft_rank),
    "soft_sort": lambda: call_tool(anyk.soft_sort),
    "soft_quantile": lambda: call_tool(anyk.soft_quantile, 0.3),
    "sample_k_subset": lambda: call_tool(anyk.sample_k_subset, K),
    "select_topk": lambda: [
        finish(anyk.select_topk(torch.randn(*shape, D), padded(shape, dtype, 1.0), K)[0])
        for shape, dtype in with_dtypes(LEADING)
    ],
}
METRICS = {
    "PredictionSets": lambda: call_prediction_sets(),
    "target_ranks": lambda: call_metric(anyk.target_ranks),
    "topk_hits": lambda: call_metric(anyk.topk_hits, ks=(1, 5)),
    "topk_accuracy": lambda: call_averages(anyk.topk_accuracy, ks=(1, 5)),
    "mean_reciprocal_rank": lambda: call_averages(anyk.mean_reciprocal_rank),
    "ndcg": lambda: call_averages(anyk.ndcg, ks=(1, 5)),
}
HEADS = {
    "LinearHead": lambda: call_head(linear_head),
}
CALLS = {**LOSSES, **FAMILIES, **OPERATORS, **TOOLS, **METRICS, **HEADS}
NOTHING_TO_CALL = {"backend", "Operator", "TopKLoss", "networks", "parallel", "ranking", "registry"}

PARALLEL = {
    "Sharded": lambda: [call_parallel(loss) for loss in (anyk.TopKCrossEntropyLoss, anyk.TopKErrorLoss)],
    "topk_hits": lambda: anyk.parallel.topk_hits(scores_of((B, N)).detach(), classes_of((B, N))),
    "topk_accuracy": lambda: anyk.parallel.topk_accuracy(scores_of((B, N)).detach(), classes_of((B, N))),
}


def linear_head(m: int | None, weight: Tensor | None = None, label_smoothing: float = 0.0, **more: Any) -> Any:
    loss = anyk.TopKCrossEntropyLoss(P_K, m=m, weight=weight, label_smoothing=label_smoothing)
    return anyk.LinearHead(D, N, loss, **more)


def call_parallel(loss: Callable[..., Any]) -> None:
    for settings in ({}, {"m": 4}, {"m": 4, "weight": torch.rand(N)}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        for dtype in (torch.float32, torch.float64):
            sharded = anyk.parallel.Sharded(loss(P_K, **settings))
            finish(sharded(scores_of((B, N), dtype), classes_of((B, N))))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def _group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", [name for name in anyk.__all__ if name not in NOTHING_TO_CALL])
def test_shapes(name):
    CALLS[name]()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("name", anyk.parallel.__all__)
def test_shapes_in_parallel(name):
    PARALLEL[name]()


@pytest.mark.parametrize("name", anyk.ranking.__all__)
def test_shapes_of_ranking_losses(name):
    RANKING[name]()


def test_a_wrong_shape_is_noticed():
    """Otherwise the hook does nothing, and neither do the tests above."""
    with pytest.raises(TypeCheckError, match="target"):
        anyk.KSubset().inclusion(torch.randn(B, N), torch.zeros(B + 1, dtype=torch.long), K)
