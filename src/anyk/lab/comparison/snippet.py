"""The lines of Python to paste for a loss that was found."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

import anyk
from anyk.lab.run.names import LOSSES
from anyk.lab.run.recipe import Recipe


def code(recipe: Recipe, classes: int | None = None) -> str:
    """The lines of Python that make the recipe's loss, called ``criterion``.

    Args:
        recipe: the tuned recipe.
        classes: their number, where known: the loss refuses an m above it, and an m of all of them says nothing.

    >>> code(Recipe(loss="lapsum", p_k=(0.5, 0.5), temperature=0.1)).splitlines()[-1]
    'criterion = anyk.TopKCrossEntropyLoss([0.5, 0.5], anyk.LapSum(temperature=0.1))'
    """
    imports, comments = ["import anyk"], [f"# tuned with {recipe.optimizer}, learning rate {recipe.learning_rate:g}"]
    loss = LOSSES[recipe.loss]
    made, own = _qualified(loss.make), _arguments(loss.make, loss.arguments(recipe))
    if not loss.is_operator and not loss.has_k:
        imports, call = ["import torch"], f"torch.nn.{loss.make.__name__}({', '.join(own)})"
    elif loss.has_k:
        k = str(max(place for place, weight in enumerate(recipe.p_k, start=1) if weight > 0))
        if recipe.p_k_file is not None:
            imports, rows = _read_p_k(recipe.p_k_file)
            k = f"max(place for row in {rows} for place, weight in enumerate(row, start=1) if weight > 0)"
        call = f"{made}({', '.join([f'k={k}', *own])})"
    else:
        weights = str(list(recipe.p_k))
        if recipe.p_k_file is not None:
            imports, weights = _read_p_k(recipe.p_k_file)
        if recipe.p_k_end is not None:
            comments.append(f"# P_K moved from these weights to {list(recipe.p_k_end)}, linearly over the run")
        if recipe.temperature_end is not None:
            comments.append(f"# the temperature moved to {recipe.temperature_end!r}, geometrically over the run")
        limit = [f"m={recipe.m}"] if recipe.m is not None and (classes is None or recipe.m < classes) else []
        settings = {name: getattr(recipe, name) for name in ("top1", "softmax_over", "label_smoothing")}
        others = _arguments(anyk.TopKCrossEntropyLoss, settings)
        operator = f"{made}({', '.join(own)})"
        call = f"anyk.TopKCrossEntropyLoss({', '.join([weights, operator, *limit, *others])})"
    if not made.startswith(("anyk.", "torch.")):
        imports = [*imports, f"import {loss.make.__module__}"]
    return "\n".join([*imports, "", *comments, f"criterion = {call}", ""])


def _arguments(make: type, values: Mapping[str, Any]) -> list[str]:
    """Keyword arguments: the temperature always, the others where they are not what the class takes by itself."""
    parameters = inspect.signature(make).parameters
    said = {name: value for name, value in values.items() if name == "temperature" or value != parameters[name].default}
    return [f"{name}={_quoted(value)}" for name, value in said.items()]


def _qualified(make: type) -> str:
    """How a class is called in code: those of anyk by the library's name."""
    package = "anyk" if getattr(anyk, make.__name__, None) is make else make.__module__
    return f"{package}.{make.__name__}"


def _quoted(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _read_p_k(file: str) -> tuple[list[str], str]:
    """Imports and the expression that reads one P_K for each class."""
    text = f"Path({_quoted(file)}).read_text()"
    if file.endswith(".json"):
        return ["import json", "from pathlib import Path", "", "import anyk"], f"json.loads({text})"
    rows = f"[[float(p) for p in row] for row in csv.reader({text}.splitlines()) if row]"
    return ["import csv", "from pathlib import Path", "", "import anyk"], rows
