"""anyk: train classifiers so that the right class is among the first k guesses, for several k at once."""

from anyk import networks, parallel, registry
from anyk.baselines import SmoothTopKLoss, SoftmaxAtKLoss, TopKHingeLoss, TruncatedTopKEntropyLoss
from anyk.head import LinearHead
from anyk.kernels import backend
from anyk.losses import TopKCrossEntropyLoss, TopKErrorLoss, TopKLoss, topk_cross_entropy, topk_error
from anyk.metrics import mean_reciprocal_rank, ndcg, target_ranks, topk_accuracy, topk_hits
from anyk.operators import KSubset, LapSum, NeuralSort, Operator, SinkhornSort, SoftSort, SortingNetwork

__version__ = "0.2.0"

__all__ = [
    "KSubset",
    "LapSum",
    "LinearHead",
    "NeuralSort",
    "Operator",
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
    "registry",
    "target_ranks",
    "topk_accuracy",
    "topk_cross_entropy",
    "topk_error",
    "topk_hits",
]
