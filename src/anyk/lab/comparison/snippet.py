"""The lines of Python to paste for a loss that was found."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

import anyk
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.losses import MOST_SCORES
from anyk.lab.run.sequence_models import CAUSAL


def code(config: Config, classes: int | None = None) -> str:
    """The lines of Python that make the config's loss, called ``criterion``.

    Args:
        config: the tuned config.
        classes: their number, where known: the loss refuses an m above it, and an m of all of them says nothing.

    >>> code(Config(loss="lapsum", p_k=(0.5, 0.5), temperature=0.1)).splitlines()[-1]
    'criterion = anyk.TopKCrossEntropyLoss([0.5, 0.5], anyk.LapSum(temperature=0.1))'
    """
    imports, comments = ["import anyk"], [f"# tuned with {config.optimizer}, learning rate {config.learning_rate:g}"]
    loss = loss_names.find(config.loss)
    settings = _arguments(loss.make, loss.settings(config))
    made = [loss.make]
    if loss.family == "softmax" and config.mask_seen:  # torch's own would smooth towards minus infinity
        call = f"anyk.TopKErrorLoss({', '.join(['{1: 1.0}', 'ce_weight=1.0', *settings])})"
    elif loss.family == "softmax":
        imports, call = ["import torch"], f"torch.nn.{loss.make.__name__}({', '.join(settings)})"
    elif loss.family == "gce":
        call = f"anyk.TopKErrorLoss({', '.join(['{1: 1.0}', 'anyk.KSubset()', 'm=None', *settings])})"
    elif loss.family == "one k":
        k = str(max(place for place, weight in enumerate(config.p_k, start=1) if weight > 0))
        if config.p_k_file is not None:
            imports, rows = _read_p_k(config.p_k_file)
            k = f"max(place for row in {rows} for place, weight in enumerate(row, start=1) if weight > 0)"
        call = f"{_qualified(loss.make)}({', '.join([f'k={k}', *settings])})"
    else:
        weights = str(list(config.p_k))
        if config.p_k_file is not None:
            imports, weights = _read_p_k(config.p_k_file)
        if config.p_k_end is not None:
            comments.append(f"# P_K moved from these weights to {list(config.p_k_end)}, linearly over the run")
        if config.temperature_end is not None:
            comments.append(f"# the temperature moved to {config.temperature_end!r}, geometrically over the run")
        limit = [f"m={config.m}"] if config.m != "auto" else []
        if isinstance(config.m, int) and classes is not None and config.m >= classes:
            limit = ["m=None"]
        made.append(loss.operator_class)
        operator = f"{_qualified(made[1])}({', '.join(_arguments(made[1], loss.operator_settings(config)))})"
        call = f"{_qualified(loss.make)}({', '.join([weights, operator, *limit, *settings])})"
    if config.ce_weight_end is not None and loss.family in ("error", "gce"):
        comments.append(f"# the ce_weight moved to {config.ce_weight_end!r}, linearly over the run")
    comments += _of_sequences(config, classes, of_head=loss.family in ("softmax", "gce") or loss.operator is not None)
    imports += [f"import {kind.__module__}" for kind in made if not _qualified(kind).startswith(("anyk.", "torch."))]
    return "\n".join([*imports, "", *comments, f"criterion = {call}", ""])


def _of_sequences(config: Config, classes: int | None, of_head: bool) -> list[str]:
    """What the loss was given, where that is not one row of scores for each example of a batch."""
    comments = []
    if CAUSAL.get(config.model, False):
        comments.append("# scores (places, n) and target (places,): every place of a sequence that has a target, of the batch")
    if config.mask_seen:
        comments.append("# scores: -inf for what the sequence has had before, but never for the target")
    elif of_head and config.model in CAUSAL and (classes or 0) > MOST_SCORES:
        comments.append(f"# {classes:,} classes: anyk.LinearHead(d, {classes}, criterion) takes the place of the last layer")
    return comments


def _arguments(make: type, values: Mapping[str, Any]) -> list[str]:
    """Keyword arguments: the temperature always, the others where they are not what the class takes by itself."""
    parameters = inspect.signature(make).parameters
    usual = {name: parameter.default for name, parameter in parameters.items()} | {"label_smoothing": 0.0}
    given = {name: value for name, value in values.items() if name == "temperature" or value != usual[name]}
    return [f"{name}={_quoted(value)}" for name, value in given.items()]


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
