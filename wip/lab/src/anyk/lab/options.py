"""What all commands share: values of options checked and described, suggestions for misspelt names, warnings said once."""

import difflib
import logging
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

_log = logging.getLogger("anyk.lab")
_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, unless this process has given it before."""
    if message not in _warned:
        _warned.add(message)
        _log.warning("%s", message)


def accept(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether a value is of a field's type, and the value in that type: JSON has lists for tuples and 1 for 1.0.

    >>> accept([1, 5], tuple[int, ...]), accept("a", float | str), accept(True, int)
    ((True, (1, 5)), (True, 'a'), (False, True))
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in options:
            accepted, converted = accept(value, option)
            if accepted:
                return True, converted
        return False, value
    if origin is Literal:
        return value in options, value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return False, value
        items = [accept(item, options[0]) for item in value]
        accepted = all(fits for fits, _ in items)
        return accepted, tuple(item for _, item in items) if accepted else value
    if kind is float and type(value) is int:
        try:
            return True, float(value)
        except OverflowError:
            return False, value
    # NaN is of the type float and passes every comparison the wrong way round
    return type(value) is kind and value == value, value


def describe(kind: Any) -> str:
    """What a value of a type is, in words.

    >>> describe(int | None), describe(tuple[float, ...])
    ('an integer or none', 'numbers')
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in options)
    if origin is Literal:
        return ", ".join(map(str, options))
    if origin is tuple:
        return {int: "integers", float: "numbers", str: "texts"}.get(options[0]) or f"some of {describe(options[0])}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path", type(None): "none"}
    return words[kind]


def nearest(typed: str, names: Iterable[str]) -> list[str]:
    """The names that may have been meant, at most three, the likeliest first: by the initials of their words, by the beginning
    of a word, or by most of their letters.

    >>> options = ["epochs", "learning_rate", "batch_size", "weight_decay", "optimizer"]
    >>> [nearest(word, options) for word in ("lr", "num-epochs", "opt", "wieght-decay", "gpu")]
    [['learning_rate'], ['epochs'], ['optimizer'], ['weight_decay'], []]
    """
    typed, spelled = _hyphened(typed), {name: _hyphened(name) for name in names}
    initials = [name for name, own in spelled.items() if "".join(word[:1] for word in own.split("-")) == typed]
    if initials:
        return initials[:3]
    alike = {}
    for name, own in spelled.items():
        ratio = difflib.SequenceMatcher(a=typed, b=own).ratio()
        pairs = ((word, other) for word in typed.split("-") for other in own.split("-"))
        begins = any(len(word) > 2 and other.startswith(word) for word, other in pairs)
        if ratio >= 0.75 or begins:
            alike[name] = ratio + begins
    best = max(alike.values(), default=0.0)
    return sorted((name for name in alike if alike[name] >= best - 0.15), key=lambda name: -alike[name])[:3]


def _hyphened(name: str) -> str:
    return name.lower().replace("_", "-")
