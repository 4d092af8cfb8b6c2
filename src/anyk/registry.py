"""Operators, swaps, networks and losses by name, for the core, the lab and the scikit-learn estimator alike.

Each is entered where it is defined, and looked up when its name is used: what is defined later is known as well. A package can
bring more: the modules in its entry points of the group "anyk" are imported as soon as a name is asked for that is not here, or
all names are.

Example:
    >>> sorted(anyk.registry.NETWORKS)
    ['bitonic', 'odd_even', 'splitter']
    >>> anyk.TopKCrossEntropyLoss([0.5, 0.5], "lapsum").operator
    LapSum(temperature=1.0)
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from anyk.operators.base import Operator
    from anyk.operators.sorting_network import Kind
    from anyk.swaps import Swap

__all__ = ["LOSSES", "NETWORKS", "OPERATORS", "SWAPS", "ExtensionError", "Registry", "operator", "operator_names"]

Entry = TypeVar("Entry")


class ExtensionError(ValueError):
    """A name is not known, and a package that extends anyk, and might have brought it, cannot be imported."""


#: what the lab and the estimator call their losses
RESERVED = ("softmax", "gce", "error")


class Registry(Generic[Entry]):
    """Entries by name.

    A class keeps its name to itself, but for the same class again, as from a notebook cell run twice. A value, such as a swap,
    that is entered again takes the former's place.
    """

    # Not a dict by inheritance: torch 2.6 cannot compile what looks something up in such a one.
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.version = 0
        """changes with every entry"""

    def __setitem__(self, name: str, entry: Entry) -> None:
        if name in RESERVED or ":" in name:
            raise ValueError(f"name: expected one without a colon, and none of {', '.join(RESERVED)}, got {name!r}")
        # Operators, networks and losses are all asked for as losses.
        neighbours = (OPERATORS, NETWORKS, LOSSES) if any(self is one for one in (OPERATORS, NETWORKS, LOSSES)) else (self,)
        for registry in neighbours:
            holder = registry._entries.get(name)
            if holder is not None and (registry is not self or (isinstance(holder, type) and _place(holder) != _place(entry))):
                raise ValueError(f"name: expected one that is free, got {name!r}, which {'.'.join(_place(holder))} has")
        self._entries[name] = entry
        self.version += 1

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            import_extensions()
        return self._entries[name]

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self.version += 1

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> tuple[str, ...]:
        """All names, those of extensions included."""
        import_extensions()
        return tuple(self._entries)

    def look_up(self, argument: str, name: object) -> Entry:
        """The entry that an argument names, or an error that lists what it could have named."""
        if isinstance(name, str):
            try:
                return self[name]
            except KeyError:
                pass
        raise unknown(argument, self.names(), name)


def _place(entry: object) -> tuple[str, str]:
    kind = entry if isinstance(entry, type) else type(entry)
    return kind.__module__, kind.__qualname__


OPERATORS: Registry[type[Operator]] = Registry()
"""``class Mine(Operator, name="mine")`` enters itself. The networks are operators too, see :func:`operator`."""
SWAPS: Registry[Swap] = Registry()
"""``SWAPS["mine"] = Swap(…)``"""
NETWORKS: Registry[Kind] = Registry()
"""``NETWORKS["mine"] = Kind(…)``"""
LOSSES: Registry[type[Any]] = Registry()
"""Losses that are no operator with a P_K. ``class Mine(TopKLoss, name="mine")`` enters itself."""


def operator(given: Operator | str, **settings: Any) -> Operator:
    """An operator as it comes, or made with these settings by its name or the name of its network.

    Args:
        given: an operator, which needs no settings, or a name.
        settings: the arguments of the operator's class, such as ``temperature``.

    Example:
        >>> anyk.registry.operator("lapsum", temperature=0.5)
        LapSum(temperature=0.5)
        >>> anyk.registry.operator("bitonic", temperature=2.0, swap="cauchy")
        SortingNetwork('bitonic', temperature=2.0, swap='cauchy', wires='target')
    """
    from anyk.operators import Operator, SortingNetwork

    if isinstance(given, Operator):
        return given
    if not isinstance(given, str):
        shown = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        raise TypeError(f'operator: expected an anyk.Operator such as anyk.LapSum(), or a name such as "lapsum", got {shown}')
    if not is_operator(given):
        raise unknown("operator", operator_names(), given)
    return SortingNetwork(given, **settings) if given in NETWORKS else OPERATORS[given](**settings)


def is_operator(name: str) -> bool:
    """Whether :func:`operator` knows the name. Extensions are imported only if it is not one of anyk's own."""
    if name not in NETWORKS and name not in OPERATORS:
        import_extensions()
    return name in NETWORKS or name in OPERATORS


def operator_names() -> tuple[str, ...]:
    """The names that :func:`operator` knows, those of extensions included."""
    return (*NETWORKS.names(), *OPERATORS.names())


def unknown(argument: str, known: Iterable[str], name: object) -> ValueError:
    """The error for a name that is not known: what could have been meant, and which extensions could not be imported."""
    message = f"{argument}: expected one of {', '.join(map(repr, known))}, got {name!r}"
    return ExtensionError("; ".join([message, *_failures])) if _failures else ValueError(message)


_guard = threading.Lock()
_to_import: list[importlib.metadata.EntryPoint] | None = None
_failures: list[str] = []


def import_extensions() -> None:
    """Import what other packages name in their entry points of the group "anyk", once. One that fails stops no other."""
    global _to_import
    while True:
        # Not while it imports: another thread may have begun to import the same, and ask for a name there.
        with _guard:
            if _to_import is None:
                _to_import = list(importlib.metadata.entry_points(group="anyk"))
            if not _to_import:
                return
            extension = _to_import.pop(0)
        try:
            extension.load()
        except Exception as error:  # whatever the package does wrong, it should be named
            problem = f"{type(error).__name__}: {error}"
            _failures.append(f"{extension.value}, an extension of anyk, cannot be loaded: {problem}")
