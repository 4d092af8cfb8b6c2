"""anyk: differentiable top-k. A loss that trains for "the right class is among the first k", and operators that pick k of n."""

from anyk import _start, networks, parallel, ranking, registry  # noqa: F401  _start is first, before torch
from anyk.baselines import SmoothTopKLoss, SoftmaxAtKLoss, TopKHingeLoss, TruncatedTopKEntropyLoss
from anyk.head import LinearHead
from anyk.kernels import backend
from anyk.losses import TopKCrossEntropyLoss, TopKErrorLoss, TopKLoss, topk_cross_entropy, topk_error
from anyk.metrics import mean_reciprocal_rank, ndcg, target_ranks, topk_accuracy, topk_hits
from anyk.operators import KSubset, LapSum, NeuralSort, Operator, Permutahedron, SinkhornSort, SoftSort, SortingNetwork
from anyk.prediction_sets import PredictionSets
from anyk.tools import sample_k_subset, select_topk, soft_quantile, soft_rank, soft_sort, soft_topk

__version__ = "0.3.0"

__all__ = [
    "KSubset",
    "LapSum",
    "LinearHead",
    "NeuralSort",
    "Operator",
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
    "TopKLoss",
    "TruncatedTopKEntropyLoss",
    "backend",
    "mean_reciprocal_rank",
    "ndcg",
    "networks",
    "parallel",
    "ranking",
    "registry",
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
    "topk_hits",
]
