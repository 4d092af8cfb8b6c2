"""anyk: differentiable top-k. A loss that trains for "the right class is among the first k", and operators that pick k of n."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anyk import metrics, networks, operators, parallel, ranking, swaps  # noqa: F401
from anyk.baselines import SmoothTopKLoss, SoftmaxAtKLoss, TopKHingeLoss, TruncatedTopKEntropyLoss
from anyk.functional import sample_k_subset, select_topk, soft_quantile, soft_rank, soft_sort, soft_topk
from anyk.head import LinearHead
from anyk.kernels import backend
from anyk.losses import (
    GeneralizedCrossEntropyLoss,
    TopKCrossEntropyLoss,
    TopKErrorLoss,
    generalized_cross_entropy,
    topk_cross_entropy,
    topk_error,
)
from anyk.metrics import target_ranks, topk_accuracy
from anyk.operators import KSubset, LapSum, NeuralSort, Permutahedron, SinkhornSort, SoftSort, SortingNetwork
from anyk.prediction_sets import PredictionSets

__version__ = "0.3.0"

__all__ = [
    "GeneralizedCrossEntropyLoss",
    "KSubset",
    "LapSum",
    "LinearHead",
    "NeuralSort",
    "Permutahedron",
    "PredictionSets",
    "SinkhornSort",
    "SmoothTopKLoss",
    "SoftSort",
    "SoftmaxAtKLoss",
    "SortingNetwork",
    "TopKCrossEntropyLoss",
    "TopKErrorLoss",
    "TopKHingeLoss",
    "TruncatedTopKEntropyLoss",
    "backend",
    "generalized_cross_entropy",
    "sample_k_subset",
    "select_topk",
    "soft_quantile",
    "soft_rank",
    "soft_sort",
    "soft_topk",
    "target_ranks",
    "topk_accuracy",
    "topk_cross_entropy",
    "topk_error",
]

_LAZY = ("lab", "sklearn")  # they need the packages of an extra
_MODULES = ("metrics", "networks", "operators", "parallel", "ranking", "swaps", *_LAZY)
_ELSEWHERE = {
    **dict.fromkeys(("mean_reciprocal_rank", "ndcg", "topk_hits"), "anyk.metrics"),
    **dict.fromkeys(("average_precision_loss", "ndcg_loss", "recall_loss", "spearman_loss"), "anyk.ranking"),
    **dict.fromkeys(("Operator", "OPERATORS", "by_name", "register"), "anyk.operators"),
    **dict.fromkeys(("bitonic", "odd_even", "splitter"), "anyk.networks"),
    **dict.fromkeys(("TopKSelector", "topk_score", "topk_scorer"), "anyk.sklearn"),
    "Sharded": "anyk.parallel",
    "SWAPS": "anyk.swaps",
    "TopKLoss": "anyk.losses",
}
_GONE = {
    "TopKClassifier": "skorch does it, as examples/skorch_classifier.py shows",
    "registry": "use anyk.operators.OPERATORS and register, and anyk.swaps.SWAPS",
    "tools": "its functions are in anyk itself",
}


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            try:
                return import_module(f"anyk.{name}")
            except ImportError as error:  # whoever lists what is here expects nothing but attribute errors
                raise AttributeError(str(error), name=name) from error
        where = f": it is {_ELSEWHERE[name]}.{name}" if name in _ELSEWHERE else f": {_GONE[name]}" if name in _GONE else ""
        raise AttributeError(f"module 'anyk' has no attribute {name!r}{where}", name=name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
