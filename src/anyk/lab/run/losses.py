"""From a recipe's words to a loss of the core.

The names come from where operators, networks and losses are defined: whatever is entered there can be trained, tuned,
compared and drawn. Packages can bring more: a module named in the entry points of the group "anyk" is imported here.
"""

from __future__ import annotations

import csv
import importlib.metadata
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import anyk
from anyk import baselines, operators
from anyk.lab.errors import LabError

if TYPE_CHECKING:
    from anyk.lab.run.recipe import Recipe


@dataclass(frozen=True)
class Loss:
    """A loss of the lab.

    Args:
        title: what to call it.
        make: an operator, or a loss. Of a recipe it gets the fields that it has arguments for.
        given: further arguments.
    """

    title: str
    make: type[nn.Module]
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_operator(self) -> bool:
        """Whether it is a part of TopKCrossEntropyLoss and not a loss by itself."""
        return issubclass(self.make, anyk.Operator)

    @property
    def has_k(self) -> bool:
        """Whether it is a loss for one k."""
        return "k" in self._parameters()

    @property
    def has_temperature(self) -> bool:
        """Whether there is a temperature to tune."""
        return "temperature" in self._parameters()

    def arguments(self, recipe: Recipe) -> dict[str, Any]:
        """The arguments that a recipe gives."""
        named = {name: getattr(recipe, name) for name in self._parameters() if hasattr(recipe, name) and name not in self.given}
        return {**self.given, **named}

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.make).parameters


def _load_plugins() -> None:
    for plugin in importlib.metadata.entry_points(group="anyk"):
        try:
            plugin.load()
        except Exception as error:  # whatever the package does wrong, it should be named
            raise LabError(
                f"{plugin.value}, an extension of anyk, cannot be loaded: {type(error).__name__}: {error}."
            ) from error


def _merged(*tables: dict[str, Loss]) -> dict[str, Loss]:
    merged: dict[str, Loss] = {}
    for table in tables:
        for name in table.keys() & merged.keys():
            raise LabError(f"two losses have the name {name}: give one of them another.")
        merged.update(table)
    return merged


_load_plugins()
LOSSES = _merged(
    {"softmax": Loss("Softmax", nn.CrossEntropyLoss)},
    {kind: Loss(entry.title, anyk.SortingNetwork, {"kind": kind}) for kind, entry in operators.KINDS.items()},
    {name: Loss(make.__name__, make) for name, make in operators.OPERATORS.items()},
    {name: Loss(make.__name__, make) for name, make in baselines.LOSSES.items()},
)
"""All losses by their names."""


def operator(name: str, temperature: float) -> anyk.Operator:
    """An operator by its name in the lab."""
    loss = LOSSES[name]
    made = loss.make(**loss.given, temperature=temperature)
    assert isinstance(made, anyk.Operator)
    return made


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
