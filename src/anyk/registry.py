"""Operators, swaps, networks and losses by name, for the core, the lab and the scikit-learn estimator alike.

Each is registered by the module that defines it and looked up when its name is used. Importing your own module that calls
:func:`register`, or names a class (``class Mine(Operator, name="mine")``), is all it takes to add to them.

Example:
    >>> sorted(anyk.registry.NETWORKS)
    ['bitonic', 'odd_even', 'splitter']
    >>> anyk.TopKCrossEntropyLoss([0.5, 0.5], "lapsum").operator
    LapSum(temperature=1.0)
"""

from __future__ import annotations

from typing import Any

__all__ = ["LOSSES", "NETWORKS", "OPERATORS", "SWAPS", "register"]

# The entries are not typed here: this module would have to import those that fill it.
OPERATORS: dict[str, Any] = {}
"""Subclasses of ``anyk.Operator``; ``class Mine(Operator, name="mine")`` registers itself. The networks are operators too, see
``anyk.operators.by_name``."""
SWAPS: dict[str, Any] = {}
"""Instances of ``anyk.swaps.Swap``."""
NETWORKS: dict[str, Any] = {}
"""Instances of ``anyk.operators.sorting_network.Kind``."""
LOSSES: dict[str, Any] = {}
"""Losses for one k, which have neither a P_K nor an operator; ``class Mine(anyk.baselines.FixedKLoss,
name="mine")`` registers itself."""


def register(table: dict[str, Any], name: str, entry: Any) -> None:
    """Register an entry under a name. Operators, networks and losses share one namespace.

    Args:
        table: one of the four tables of this module.
        name: the name; one that is taken is an error, unless it is the same entry, or the same class once more, from a
            notebook cell run twice. To replace an entry on purpose, assign to the table, which is a dict.
        entry: the class of an operator or of a loss, a ``Kind`` of network or a ``Swap``.

    Example:
        >>> anyk.registry.register(anyk.registry.SWAPS, "logistic", anyk.registry.SWAPS["logistic"])
    """
    for other in (SWAPS,) if table is SWAPS else (OPERATORS, NETWORKS, LOSSES):
        holder = other.get(name)
        if holder is not None and (other is not table or not _is_same(holder, entry)):
            raise ValueError(f"name: expected one that is free, got {name!r}, which {_origin(holder)} has")
    table[name] = entry


def _is_same(holder: Any, entry: Any) -> bool:
    return holder is entry or (isinstance(holder, type) and isinstance(entry, type) and _origin(holder) == _origin(entry))


def _origin(entry: Any) -> str:
    kind = entry if isinstance(entry, type) else type(entry)
    return f"{kind.__module__}.{kind.__qualname__}"
