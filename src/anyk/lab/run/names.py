"""The losses of the lab by name. They are looked up when a name is used, in the registry of the core:

softmax            plain cross-entropy, what all others are measured against
splitter, lapsum   the name of an operator or of a network: TopKCrossEntropyLoss with it
error              TopKErrorLoss with its own operator
error:lapsum       TopKErrorLoss with another one
gce                generalised cross-entropy, the error for k = 1 by softmax: bounded too, but it knows no k
smooth, hinge      the name of a loss for one k: also truncated, softmax_at_k
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

import anyk
from anyk import registry
from anyk.lab.errors import LabError

#: the values that are tried of a hyperparameter; the temperature has no end that is known before
KNOBS: dict[str, tuple[float, ...]] = {
    "label_smoothing": (0.0, 0.05, 0.1, 0.2),
    "q": (0.25, 0.5, 0.75, 1.0),
    "ce_weight": (0.1, 0.2, 0.5, 0.8),
    "temperature": (),
}
#: the label smoothing of a share of cross-entropy that is tried
SMOOTHED = (0.0, 0.1)
Family = Literal["softmax", "cross_entropy", "error", "gce", "one k"]


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
    def title(self) -> str:
        """What to call it."""
        if self.operator is None:
            return {"softmax": "Softmax", "gce": "Generalised cross-entropy"}.get(self.family) or self.make.__name__
        network = self.operator in registry.NETWORKS
        title = registry.NETWORKS[self.operator].title if network else registry.OPERATORS[self.operator].__name__
        return title if self.family == "cross_entropy" else f"Top-k error, {title}"

    @property
    def make(self) -> type[nn.Module]:
        """The class of the loss."""
        if self.family == "one k":
            return registry.LOSSES[self.name]
        if self.family == "softmax":
            return nn.CrossEntropyLoss
        return anyk.TopKCrossEntropyLoss if self.family == "cross_entropy" else anyk.TopKErrorLoss

    @property
    def operator_class(self) -> Callable[..., anyk.Operator]:
        """What makes the operator: gets the settings, and before them the kind if it is a network."""
        assert self.operator is not None
        return anyk.SortingNetwork if self.operator in registry.NETWORKS else registry.OPERATORS[self.operator]

    @property
    def has_temperature(self) -> bool:
        """Whether there is a temperature to tune."""
        makes = self.operator_class if self.operator is not None else self.make
        return self.family != "gce" and "temperature" in inspect.signature(makes).parameters

    @property
    def hyperparameter(self) -> str:
        """The field of a config that is tuned beside the learning rate: what the loss has of its own."""
        if self.family in ("gce", "error"):
            return "q" if self.family == "gce" else "ce_weight"
        return "temperature" if self.has_temperature else "label_smoothing"

    def operator_settings(self, config: object) -> dict[str, Any]:
        """The arguments of the operator that a config gives."""
        kind = {"kind": self.operator} if self.operator in registry.NETWORKS else {}
        return kind | _given(self.operator_class, config, ("temperature", "swap", "wires", "anchors"))

    def settings(self, config: object) -> dict[str, Any]:
        """The arguments of the loss that a config gives, other than P_K, m and the operator."""
        own = ("temperature",) if self.family == "one k" else ("top1", "softmax_over", "ce_weight", "q")
        return _given(self.make, config, own) | _given(nn.CrossEntropyLoss, config, ("label_smoothing",))

    def make_operator(self, **settings: Any) -> anyk.Operator:
        """The operator with these settings."""
        return self.operator_class(**settings)


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
    if family == "error" and (not colon or registry.is_operator(operator)):
        return Loss(name, "error", operator or "lapsum")
    if name in registry.LOSSES:
        return Loss(name, "one k")
    if registry.is_operator(name):
        return Loss(name, "cross_entropy", name)
    if name in registry.LOSSES:  # of an extension that was imported just now
        return Loss(name, "one k")
    raise LabError(f"{registry.unknown('loss', names(), name)}.")


def operators() -> tuple[str, ...]:
    """The names of all operators and networks."""
    return registry.operator_names()


def names() -> tuple[str, ...]:
    """All names, the errors with other operators in one word."""
    return ("softmax", "gce", "error", "error:OPERATOR", *operators(), *registry.LOSSES.names())


def check_network(name: str) -> None:
    """Raise if there is no such network."""
    _check(registry.NETWORKS, "network", name)


def check_swap(name: str) -> None:
    """Raise if there is no such swap."""
    _check(registry.SWAPS, "swap", name)


def _check(known: registry.Registry[Any], field: str, name: str) -> None:
    try:
        known.look_up(field, name)
    except ValueError as error:
        raise LabError(f"{error}.") from None
