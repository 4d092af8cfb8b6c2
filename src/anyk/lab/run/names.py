"""The losses of the lab by name.

The names come from where operators, networks and losses are defined: whatever is entered there can be trained, tuned,
compared and drawn. Packages can bring more: a module named in the entry points of the group "anyk" is imported here.
"""

import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

import anyk
from anyk import baselines, operators
from anyk.lab.errors import LabError
from anyk.swaps import SWAPS


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

    def arguments(self, recipe: object) -> dict[str, Any]:
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

if TYPE_CHECKING:
    LossName = str
    NetworkName = str
    SwapName = str
else:  # as many as there are
    LossName = Literal[tuple(LOSSES)]
    NetworkName = Literal[tuple(operators.KINDS)]
    SwapName = Literal[tuple(SWAPS)]


def operator(name: str, temperature: float) -> anyk.Operator:
    """An operator by its name in the lab."""
    loss = LOSSES[name]
    made = loss.make(**loss.given, temperature=temperature)
    assert isinstance(made, anyk.Operator)
    return made
