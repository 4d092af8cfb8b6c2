"""From a recipe's words to a loss of the core."""

import csv
import json
from pathlib import Path

import torch
from torch import nn

import anyk
from anyk.lab.errors import LabError
from anyk.lab.run.names import LOSSES
from anyk.lab.run.recipe import Recipe


def criterion(recipe: Recipe, classes: int) -> nn.Module:
    """The loss of a recipe for so many classes."""
    if classes < 2:
        raise LabError("the data have one class only, which leaves nothing to classify: give data with at least two.")
    loss = LOSSES[recipe.loss]
    if not loss.is_operator and not loss.has_k:
        return loss.make(**loss.arguments(recipe))
    p_k = read_p_k(Path(recipe.p_k_file), classes) if recipe.p_k_file else torch.tensor(recipe.p_k)
    if recipe.p_k_end is None:
        k = int((p_k.reshape(-1, p_k.shape[-1]) > 0).any(0).nonzero().max()) + 1
        p_k = p_k[..., :k]
    k = p_k.shape[-1]
    m = None if recipe.m is None else min(recipe.m, classes)
    if k > (m or classes):
        if m is None or m == classes:
            shorter = ".5 .5" if classes > 2 else "1"
            raise LabError(
                f"P_K reaches to k = {k}, but there are only {classes} classes: give a shorter --p-k, such as {shorter}."
            )
        raise LabError(f"P_K reaches to k = {k}, but only m = {recipe.m} are ranked: give a larger --m or a shorter --p-k.")
    if loss.has_k:
        if loss.has_temperature and isinstance(recipe.temperature, str):
            raise LabError(f'loss {recipe.loss} needs a number as temperature, not "auto".')
        return loss.make(k=k, **loss.arguments(recipe))
    made = loss.make(**loss.arguments(recipe))
    assert isinstance(made, anyk.Operator)
    return anyk.TopKCrossEntropyLoss(
        p_k,
        made,
        m=m,
        top1=recipe.top1,
        softmax_over=recipe.softmax_over,
        label_smoothing=recipe.label_smoothing,
    )


def trained_ks(loss: nn.Module, recipe: Recipe) -> list[int]:
    """The k that a recipe's loss trains for, at any time of the run."""
    if not isinstance(loss, anyk.TopKCrossEntropyLoss):
        return [int(getattr(loss, "k", 1))]
    weighted = (loss.p_k.reshape(-1, loss.p_k.shape[-1]) > 0).any(0).cpu()
    if recipe.p_k_end is not None:
        weighted |= torch.tensor(recipe.p_k_end) > 0
    return [k + 1 for k in weighted.nonzero().flatten().tolist()]


def reschedule(loss: nn.Module, recipe: Recipe, progress: float) -> None:
    """Move the temperature and P_K to where they stand after this fraction of the run."""
    if not isinstance(loss, anyk.TopKCrossEntropyLoss):
        return
    if recipe.temperature_end is not None and not isinstance(recipe.temperature, str):
        start = recipe.temperature
        loss.operator.temperature = start * (recipe.temperature_end / start) ** progress
    if recipe.p_k_end is not None:
        start_p_k, end_p_k = torch.tensor(recipe.p_k), torch.tensor(recipe.p_k_end)
        loss.p_k = torch.lerp(start_p_k, end_p_k, progress).to(loss.p_k)


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
