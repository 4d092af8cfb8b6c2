"""The losses of the lab by name, and the loss of a config.

softmax            cross-entropy, what all others are measured against
gce                generalised cross-entropy, bounded, without k
error              TopKErrorLoss with its own operator; error:lapsum with another
splitter, lapsum   the name of an operator: TopKCrossEntropyLoss with it
smooth, hinge      losses for one k, the length of P_K: also truncated, softmax_at_k
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

import anyk
from anyk import operators
from anyk.lab.config import RunConfig
from anyk.lab.errors import LabError

ONE_K: dict[str, type[nn.Module]] = {
    "smooth": anyk.SmoothTopKLoss,
    "hinge": anyk.TopKHingeLoss,
    "truncated": anyk.TruncatedTopKEntropyLoss,
    "softmax_at_k": anyk.SoftmaxAtKLoss,
}
OWN: dict[str, Callable[[RunConfig, int], nn.Module]] = {}
"""losses of others by name: what makes one of a config and the number of classes; :func:`import_modules` brings them to all runs"""
WORDS = {
    "softmax": "cross-entropy",
    "gce": "generalised cross-entropy, bounded, without k",
    "error": "TopKErrorLoss, the expected top-k error, bounded",
    "paper": "TopKCrossEntropyLoss, the paper's loss",
}
imported: list[str] = []
"""the modules that were imported for their losses; the processes of runs import them too"""


def import_modules(modules: Iterable[str]) -> None:
    """Import modules that add losses or operators: `--import` of the command line. The processes of runs import them as well.

    Args:
        modules: their names; modules in the working folder are found.
    """
    from anyk.lab.models import working_folder_on_path

    for module in modules:
        with working_folder_on_path():
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever the module does while it is imported
                raise LabError(f"the import of {module} failed ({type(error).__name__}: {error}).") from None
        if module not in imported:
            imported.append(module)


def names() -> tuple[str, ...]:
    """All names; errors with other operators are one of them."""
    return ("softmax", "gce", "error", "error:OPERATOR", *_operators(), *ONE_K, *OWN)


def check(name: str) -> None:
    """Raise if there is no loss of this name."""
    family, _, operator = name.partition(":")
    known = name in ("softmax", "gce", "error", *ONE_K, *OWN, *_operators()) or (family == "error" and operator in _operators())
    if not known:
        raise LabError(
            f"loss should be one of {', '.join(names())}, but is {name!r}; --import MODULE brings those of another package."
        )


def words(name: str) -> str:
    """What a loss is, for somebody who has read nothing else."""
    check(name)
    if name in ONE_K:
        return f"{ONE_K[name].__name__}, for one k"
    return WORDS.get(name.partition(":")[0]) or (WORDS["paper"] if name in _operators() else name)


def criterion(config: RunConfig, classes: int) -> nn.Module:
    """The loss of a config, all of whose fields are filled in, for so many classes."""
    check(config.loss)
    family, _, operator = config.loss.partition(":")
    smoothing = config.label_smoothing
    if config.loss in OWN:
        return OWN[config.loss](config, classes)
    if config.loss == "softmax":  # with q = 0: cross-entropy of the scores over the temperature
        if config.temperature == 1:
            return nn.CrossEntropyLoss(label_smoothing=smoothing)
        return anyk.GeneralizedCrossEntropyLoss(q=0.0, temperature=config.temperature, label_smoothing=smoothing)
    if config.loss == "gce":
        return anyk.GeneralizedCrossEntropyLoss(
            q=config.q, ce_weight=config.ce_weight, temperature=config.temperature, label_smoothing=smoothing
        )
    k = len(config.p_k)
    m = min(config.m, classes) if isinstance(config.m, int) else config.m
    if k > classes or (isinstance(m, int) and k > m):
        limit = f"only m = {m} are ranked" if isinstance(m, int) and m < classes else f"there are only {classes} classes"
        raise LabError(f"P_K reaches to k = {k}, but {limit}: give a shorter --p-k.")
    if config.loss in ONE_K:
        make = ONE_K[config.loss]
        own = {"temperature": config.temperature} if "temperature" in inspect.signature(make).parameters else {}
        return make(k, **own)
    made = _operator(config, operator or ("lapsum" if family == "error" else family))
    if family == "error":
        return anyk.TopKErrorLoss(
            list(config.p_k), made, m=m, ce_weight=config.ce_weight, q=config.q, label_smoothing=smoothing
        )
    return anyk.TopKCrossEntropyLoss(list(config.p_k), made, m=m, top1=config.top1, label_smoothing=smoothing)


def trained_ks(config: RunConfig) -> list[int]:
    """The k that the loss of a config trains for."""
    if config.loss in ("softmax", "gce") or not config.p_k:
        return [1]
    if config.loss in ONE_K:
        return [len(config.p_k)]
    return [k for k, weight in enumerate(config.p_k, start=1) if weight > 0]


def relevant(config: RunConfig) -> dict[str, Any]:
    """What the result of a run depends on: the identity of its config, without what its loss does not take."""
    check(config.loss)
    fields = {"p_k", "temperature", "m", "top1", "swap", "wires", "ce_weight", "q", "label_smoothing"}
    family = config.loss.partition(":")[0]
    if config.loss == "softmax":
        taken = {"temperature", "label_smoothing"}
    elif config.loss == "gce":
        taken = {"temperature", "label_smoothing", "ce_weight", "q"}
    elif config.loss in ONE_K:
        taken = {"p_k", "temperature"}
    elif family == "error":
        taken = fields - {"top1"}
    else:
        taken = fields - {"ce_weight", "q"}
    return {name: value for name, value in config.identity().items() if name not in fields - taken}


def _operators() -> list[str]:
    """The operators that a loss can have, by name."""
    kinds = operators.OPERATORS
    return [name for name, make in kinds.items() if not isinstance(make, type) or issubclass(make, operators.Inclusion)]


def _operator(config: RunConfig, name: str) -> nn.Module:
    make = operators.OPERATORS[name]
    if isinstance(make, type):
        return operators.by_name(name, temperature=config.temperature)
    return operators.by_name(name, temperature=config.temperature, swap=config.swap, wires=config.wires)
