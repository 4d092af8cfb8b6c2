"""anyk: train classifiers so that the right class is among the first k guesses, for several k at once."""

from anyk import networks, parallel
from anyk.baselines import SmoothTopKLoss, TopKHingeLoss, TruncatedTopKEntropyLoss
from anyk.head import LinearTopKCrossEntropy
from anyk.losses import TopKCrossEntropyLoss, topk_cross_entropy
from anyk.metrics import target_ranks, topk_accuracy, topk_hits
from anyk.operators import KSubset, LapSum, NeuralSort, Operator, SinkhornSort, SoftSort, SortingNetwork

__version__ = "0.1.0"

__all__ = [
    "KSubset",
    "LapSum",
    "LinearTopKCrossEntropy",
    "NeuralSort",
    "Operator",
    "SinkhornSort",
    "SmoothTopKLoss",
    "SoftSort",
    "SortingNetwork",
    "TopKCrossEntropyLoss",
    "TopKHingeLoss",
    "TruncatedTopKEntropyLoss",
    "networks",
    "parallel",
    "target_ranks",
    "topk_accuracy",
    "topk_cross_entropy",
    "topk_hits",
]
