"""From a recipe's words to a loss of the core: one table row for each name."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import anyk
from anyk.lab.errors import LabError
from anyk.lab.recipes import Recipe

OPERATORS: dict[str, Callable[[Recipe], anyk.Operator]] = {
    "splitter": lambda r: anyk.SortingNetwork("splitter", r.temperature, r.swap, r.wires),
    "bitonic": lambda r: anyk.SortingNetwork("bitonic", r.temperature, r.swap, r.wires),
    "odd_even": lambda r: anyk.SortingNetwork("odd_even", r.temperature, r.swap, r.wires),
    "neuralsort": lambda r: anyk.NeuralSort(r.temperature),
    "softsort": lambda r: anyk.SoftSort(r.temperature),
    "sinkhorn": lambda r: anyk.SinkhornSort(r.temperature, anchors=r.anchors),
    "lapsum": lambda r: anyk.LapSum(r.temperature),
    "ksubset": lambda r: anyk.KSubset(r.temperature),
}
ONE_K: dict[str, Callable[[Recipe, int], nn.Module]] = {
    "smooth": lambda r, k: anyk.SmoothTopKLoss(k, _number(r), label_smoothing=r.label_smoothing),
    "hinge": lambda r, k: anyk.TopKHingeLoss(k, label_smoothing=r.label_smoothing),
    "truncated": lambda r, k: anyk.TruncatedTopKEntropyLoss(k, label_smoothing=r.label_smoothing),
}
#: losses without a temperature
COLD = ("softmax", "hinge", "truncated")


def criterion(recipe: Recipe, classes: int) -> nn.Module:
    """The loss of a recipe for so many classes."""
    if recipe.loss == "softmax":
        return nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    p_k = read_p_k(Path(recipe.p_k_file), classes) if recipe.p_k_file else torch.tensor(recipe.p_k)
    if recipe.p_k_end is None:
        k = int((p_k.reshape(-1, p_k.shape[-1]) > 0).any(0).nonzero().max()) + 1
        p_k = p_k[..., :k]
    k = p_k.shape[-1]
    ranked = classes if recipe.m is None else min(recipe.m, classes)
    if k > ranked:
        if ranked == classes:
            raise LabError(
                f"P_K reaches to k = {k}, but there are only {classes} classes: give a shorter --p-k, such as .5 .5."
            )
        raise LabError(f"P_K reaches to k = {k}, but only m = {recipe.m} are ranked: give a larger --m or a shorter --p-k.")
    if recipe.loss in ONE_K:
        return ONE_K[recipe.loss](recipe, k)
    return anyk.TopKCrossEntropyLoss(
        p_k,
        OPERATORS[recipe.loss](recipe),
        m=recipe.m,
        top1=recipe.top1,
        softmax_over=recipe.softmax_over,
        label_smoothing=recipe.label_smoothing,
    )


def trained_ks(loss: nn.Module) -> list[int]:
    """The k that a loss trains for."""
    if isinstance(loss, anyk.TopKCrossEntropyLoss):
        weighted = (loss.p_k.reshape(-1, loss.p_k.shape[-1]) > 0).any(0)
        return [k + 1 for k in weighted.nonzero().flatten().tolist()]
    return [int(getattr(loss, "k", 1))]


def reschedule(loss: nn.Module, recipe: Recipe, progress: float) -> None:
    """Move the temperature and P_K to where they stand after this fraction of the run."""
    if not isinstance(loss, anyk.TopKCrossEntropyLoss):
        return
    if recipe.temperature_end is not None:
        start = _number(recipe)
        loss.operator.temperature = start * (recipe.temperature_end / start) ** progress
    if recipe.p_k_end is not None:
        start_p_k, end_p_k = torch.tensor(recipe.p_k), torch.tensor(recipe.p_k_end)
        loss.p_k = torch.lerp(start_p_k, end_p_k, progress).to(loss.p_k)


def learning_rate(recipe: Recipe, progress: float) -> float:
    """The learning rate after this fraction of the run."""
    if recipe.schedule == "constant":
        return recipe.learning_rate
    warm = 0.3 if recipe.schedule == "onecycle" else 0.0
    if progress < warm:
        low = 0.04
        return recipe.learning_rate * (low + (1 - low) * (1 - math.cos(math.pi * progress / warm)) / 2)
    return recipe.learning_rate * (1 + math.cos(math.pi * (progress - warm) / (1 - warm))) / 2


def read_p_k(path: Path, classes: int) -> torch.Tensor:
    """One P_K for each class, from a JSON list of lists or from lines of a CSV file without a header."""
    if not path.exists():
        raise LabError(f"p_k_file {path} does not exist.")
    try:
        text = path.read_text()
        rows = json.loads(text) if path.suffix == ".json" else [row for row in csv.reader(text.splitlines()) if row]
        p_k = torch.tensor([[float(p) for p in row] for row in rows])
    except (OSError, ValueError, TypeError) as error:
        raise LabError(f"p_k_file {path} should hold one row of weights for each class, all of one length: {error}.") from None
    if p_k.ndim != 2 or len(p_k) != classes:
        raise LabError(f"p_k_file {path} has {len(p_k)} rows, but there are {classes} classes: write one row for each.")
    sums = p_k.sum(1)
    if not bool(((p_k >= 0).all(1) & ((sums - 1).abs() < 1e-4)).all()):
        row = int(((p_k < 0).any(1) | ~((sums - 1).abs() < 1e-4)).nonzero()[0])
        raise LabError(f"row {row + 1} of p_k_file {path} should be weights of at least 0 that sum to 1.")
    return p_k


def _number(recipe: Recipe) -> float:
    if isinstance(recipe.temperature, str):
        raise LabError(f'loss {recipe.loss} needs a number as temperature, not "auto".')
    return recipe.temperature
