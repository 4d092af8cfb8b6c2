"""The losses of the lab by name, as `--loss` and `--losses` take them. They are looked up when a name is used:

softmax            plain cross-entropy, what all others are measured against
splitter, lapsum   the name of an operator or of a network: TopKCrossEntropyLoss with it
error              TopKErrorLoss with its own operator
error:lapsum       TopKErrorLoss with another one
gce                generalised cross-entropy, the error for k = 1 by softmax: bounded too, but it knows no k
smooth, hinge      the name of a loss for one k: also truncated, softmax_at_k
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

import anyk
from anyk import operators, registry
from anyk.lab.errors import LabError
from anyk.lab.run.own_models import working_folder_on_path

#: the values that are tried of a hyperparameter, as far as the best of them moves; of the temperature, no range is known before
CANDIDATES: dict[str, tuple[float, ...]] = {
    "label_smoothing": (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8),
    "q": (0.06, 0.12, 0.25, 0.5, 0.75, 1.0),
    "ce_weight": (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95),
    "temperature": (),
}
#: the label smoothing that is tried beside the hyperparameter of a loss with a share of cross-entropy
SMOOTHED = (0.0, 0.1)
Family = Literal["softmax", "cross_entropy", "error", "gce", "one k"]

#: the modules that were imported for their losses; the processes of runs import them too
imported: list[str] = []


def import_modules(modules: Iterable[str]) -> None:
    """Import modules that register losses, operators, networks or swaps: `--import` of the command line.

    In a script, call this instead of importing them: the lab's runs are processes of their own, which import them as well.

    Args:
        modules: their names; modules in the working folder are found.
    """
    for module in modules:
        with working_folder_on_path():
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever the module does while it is imported
                raise LabError(f"the import of {module} failed ({type(error).__name__}: {error}).") from None
        if module not in imported:
            imported.append(module)


@dataclass(frozen=True)
class Loss:
    """What a name stands for.

    Args:
        name: as it was given.
        family: which loss of the core it is.
        operator: the name of its operator, if it has one to choose.
    """

    name: str
    family: Family
    operator: str | None = None

    @property
    def make(self) -> type[nn.Module]:
        """The class of the loss."""
        if self.family == "one k":
            registered: type[nn.Module] = registry.LOSSES[self.name]
            return registered
        if self.family == "softmax":
            return nn.CrossEntropyLoss
        return anyk.TopKCrossEntropyLoss if self.family == "cross_entropy" else anyk.TopKErrorLoss

    @property
    def words(self) -> str:
        """What it is, for somebody who has read nothing else."""
        known = {
            "softmax": "cross-entropy",
            "gce": "generalised cross-entropy, for the first guess, bounded but for a share of cross-entropy",
            "error": "TopKErrorLoss, the expected top-k error, bounded but for a share of cross-entropy",
            "cross_entropy": "TopKCrossEntropyLoss, the paper's loss",
        }
        return known.get(self.family) or f"{self.make.__name__}, for one k"

    @property
    def operator_class(self) -> type[anyk.Operator]:
        """The class of the operator. That of a network has the kind among its arguments."""
        found: type[anyk.Operator] = registry.OPERATORS.get(self.operator or "", anyk.SortingNetwork)
        return found

    @property
    def hyperparameter(self) -> str:
        """The field of a config that is tuned beside the learning rate."""
        if self.family in ("gce", "error"):
            return "q" if self.family == "gce" else "ce_weight"
        makes = self.operator_class if self.operator is not None else self.make
        return "temperature" if "temperature" in inspect.signature(makes).parameters else "label_smoothing"

    def operator_settings(self, config: object) -> dict[str, Any]:
        """The arguments of the operator that a config gives."""
        kind = {"kind": self.operator} if self.operator in registry.NETWORKS else {}
        return kind | _given(self.operator_class, config, ("temperature", "swap", "wires", "anchors"))

    def settings(self, config: object) -> dict[str, Any]:
        """The arguments of the loss that a config gives, other than P_K, m and the operator."""
        own = ("temperature",) if self.family == "one k" else ("top1", "softmax_over", "ce_weight", "q")
        return _given(self.make, config, own) | _given(nn.CrossEntropyLoss, config, ("label_smoothing",))


def _given(make: Callable[..., Any], config: object, fields: Sequence[str]) -> dict[str, Any]:
    """Those of the fields that it has arguments for."""
    parameters = inspect.signature(make).parameters
    return {name: getattr(config, name) for name in fields if name in parameters}


def find(name: str) -> Loss:
    """The loss of a name.

    >>> find("error:lapsum")
    Loss(name='error:lapsum', family='error', operator='lapsum')
    """
    family, colon, operator = name.partition(":")
    if name in ("softmax", "gce"):
        return Loss(name, name)  # type: ignore[arg-type]
    if family == "error" and (not colon or operator in operators.names(with_probabilities=True)):
        return Loss(name, "error", operator or "lapsum")
    if name in operators.names(with_probabilities=True):
        return Loss(name, "cross_entropy", name)
    if name in registry.LOSSES:
        return Loss(name, "one k")
    raise _unknown("loss", names(), name)


def names() -> tuple[str, ...]:
    """All names, the errors with other operators in one word."""
    return ("softmax", "gce", "error", "error:OPERATOR", *operators.names(with_probabilities=True), *registry.LOSSES)


def check_swap(name: str) -> None:
    """Raise if there is no such swap."""
    if name not in registry.SWAPS:
        raise _unknown("swap", registry.SWAPS, name)


def _unknown(field: str, known: Iterable[str], name: str) -> LabError:
    listed = ", ".join(map(repr, known))
    return LabError(f"{field}: expected one of {listed}, got {name!r}; --import MODULE brings those of another package.")
