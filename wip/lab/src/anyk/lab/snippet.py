"""The lines of Python to paste for a loss that was found."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

import anyk
from anyk.lab import losses
from anyk.lab.config import RunConfig


def code(config: RunConfig, classes: int | None = None) -> str:
    """The lines of Python that make the config's loss, called ``criterion``.

    Args:
        config: the tuned config.
        classes: their number, where known: the loss refuses an m above it, and an m of all of them says nothing.

    >>> code(RunConfig(loss="lapsum", p_k=(0.5, 0.5), temperature=0.1)).splitlines()[-1]
    'criterion = anyk.TopKCrossEntropyLoss([0.5, 0.5], anyk.LapSum(temperature=0.1))'
    """
    loss = losses.criterion(config.replace(p_k=config.p_k or (1.0,)), max(classes or 10**6, 2))
    how = f"# tuned with {config.optimizer}, learning rate {config.learning_rate:g}, weight decay {config.weight_decay:g}"
    start = (
        ["# the last layer starts at zero: torch.nn.init.zeros_(layer.weight), and its bias"] if config.start == "zero" else []
    )
    return "\n".join(
        ["import anyk" if _is_ours(loss) else "import torch", "", how, *start, f"criterion = {_call(loss, config)}", ""]
    )


def _call(loss: Any, config: RunConfig) -> str:
    name = type(loss).__name__
    if not _is_ours(loss):
        given = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
        return (
            f"{'torch.nn' if type(loss).__module__.startswith('torch') else type(loss).__module__}.{name}({_arguments(given)})"
        )
    parameters = inspect.signature(type(loss)).parameters
    first: list[str] = []
    given: dict[str, Any] = {}
    if name in ("TopKCrossEntropyLoss", "TopKErrorLoss"):
        operator = loss.operator
        own = {key: getattr(operator, key) for key in inspect.signature(type(operator)).parameters if key != "power"}
        usual = {key: each.default for key, each in inspect.signature(type(operator)).parameters.items()}
        shown = {key: value for key, value in own.items() if key == "temperature" or value != usual[key]}
        first = [_weights(config.p_k), f"anyk.{type(operator).__name__}({_arguments(shown)})"]
        given = {"m": config.m} if config.m != "auto" else {}
    elif "k" in parameters:
        first = [f"k={len(config.p_k)}"]
    for key in ("top1", "ce_weight", "q", "temperature", "label_smoothing"):
        if key in parameters and getattr(config, key) != parameters[key].default:
            given[key] = getattr(config, key)
    return f"anyk.{name}({', '.join([*first, *([_arguments(given)] if given else [])])})"


def _weights(p_k: tuple[float, ...]) -> str:
    """As a mapping where most are 0."""
    there = {k: weight for k, weight in enumerate(p_k, start=1) if weight}
    return repr(there) if 2 * len(there) < len(p_k) else repr(list(p_k))


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}" for name, value in values.items())


def _is_ours(loss: Any) -> bool:
    return getattr(anyk, type(loss).__name__, None) is type(loss)
