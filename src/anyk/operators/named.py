"""Operators by name."""

from __future__ import annotations

from typing import Any

from anyk import checks
from anyk.operators.base import Operator
from anyk.operators.sorting_network import SortingNetwork
from anyk.registry import NETWORKS, OPERATORS


def names(*, with_probabilities: bool = False) -> tuple[str, ...]:
    """The names that :func:`by_name` knows: those of the networks and of the other operators.

    Args:
        with_probabilities: only of those that have a probability for each rank, and so serve the losses.
    """
    return (*NETWORKS, *(name for name, kind in OPERATORS.items() if kind.has_probabilities or not with_probabilities))


def by_name(name: str, **settings: Any) -> Operator:
    """A new operator.

    Args:
        name: the name of an operator or of a network.
        settings: the arguments of the operator's class, such as ``temperature``.

    Example:
        >>> anyk.operators.by_name("lapsum", temperature=0.5)
        LapSum(temperature=0.5)
        >>> anyk.operators.by_name("bitonic", temperature=2.0, swap="cauchy")
        SortingNetwork('bitonic', temperature=2.0, swap='cauchy', wires='target')
    """
    if not isinstance(name, str):
        shown = f"the class {name.__name__}" if isinstance(name, type) else repr(name)
        raise TypeError(f'operator: expected an anyk.Operator such as anyk.LapSum(), or a name such as "lapsum", got {shown}')
    checks.one_of("operator", name, names())
    if name in NETWORKS:
        return SortingNetwork(name, **settings)
    made: Operator = OPERATORS[name](**settings)
    return made
