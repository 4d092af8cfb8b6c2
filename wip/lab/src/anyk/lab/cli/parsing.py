"""Command lines from dataclasses of fields: their names are the options, the texts below them the help."""

import argparse
import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NoReturn

from anyk.lab.errors import LabError
from anyk.lab.options import accept, describe, nearest


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion for a misspelt option."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"anyk {command}", description=description, allow_abbrev=False, add_help=True)
        self.kinds: dict[str, Any] = {}

    def add_fields(self, cls: type, positional: Sequence[str] = (), leave_out: Sequence[str] = ()) -> None:
        """An option for each field of a dataclass, in a group of its own.

        Args:
            cls: the dataclass.
            positional: fields that stand without an option.
            leave_out: fields that are no options.
        """
        helps, hints = _helps(cls), typing.get_type_hints(cls)
        group = self.add_argument_group(title=(inspect.getdoc(cls) or "").splitlines()[0].rstrip("."))
        own = [each for each in dataclasses.fields(cls) if each.name in vars(cls).get("__annotations__", {})]
        for each in own:
            if each.name in leave_out:
                continue
            kind, word = hints[each.name], each.name.replace("_", "-")
            self.kinds[each.name] = kind
            text = _with_default(helps.get(each.name, ""), each.default)
            if each.name in positional:
                self.add_argument(each.name, nargs="?", metavar=each.name.upper(), help=text, default=argparse.SUPPRESS)
            elif kind is bool:
                group.add_argument(f"--{word}", action=argparse.BooleanOptionalAction, help=text, default=argparse.SUPPRESS)
            else:
                many = {"nargs": "*"} if typing.get_origin(kind) is tuple else {}
                group.add_argument(f"--{word}", metavar=_metavar(kind), help=text, default=argparse.SUPPRESS, **many)

    def fields(self, words: Sequence[str]) -> dict[str, Any]:
        """What the words say, by field and in its type; fields that they do not name are not there."""
        given = vars(self.parse_args(_dashed(words)))
        return {name: self._value(name, value) if name in self.kinds else value for name, value in given.items()}

    def _value(self, name: str, given: Any) -> Any:
        kind = self.kinds[name]
        if kind is bool:
            return given
        if isinstance(given, list):
            given = [piece for word in given for piece in word.split(",") if piece.strip()]
        accepted, value = _read(given, kind)
        if not accepted:
            shown = " ".join(given) if isinstance(given, list) else given
            raise LabError(f"--{name.replace('_', '-')} should be {describe(kind)}, but is {shown!r}.")
        return value

    def error(self, message: str) -> NoReturn:
        """One line, with what may have been meant."""
        if message.startswith("unrecognized arguments: "):
            word = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
            near = nearest(word.removeprefix("--"), [option.removeprefix("--") for option in options])
            hint = (
                f"did you mean {' or '.join(f'--{one}' for one in near)}?" if near else f"{self.prog} --help lists the options."
            )
            what = "is not an option of" if word.startswith("-") else "is more than is expected by"
            raise LabError(f"{word} {what} {self.prog}: {hint}")
        raise LabError(f"{self.prog}: {message}; --help says more.")


def _read(given: Any, kind: Any) -> tuple[bool, Any]:
    """A text, or a list of texts, in the type of a field."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in options and given == "none":
            return True, None
        for option in sorted(options, key=lambda one: one is str):
            accepted, value = _read(given, option) if option is not type(None) else (False, None)
            if accepted:
                return True, value
        return False, given
    if origin is tuple:
        found = [_read(one, options[0]) for one in given]
        return all(fits for fits, _ in found), tuple(value for _, value in found)
    if kind in (int, float):
        try:
            return accept(kind(given), kind)
        except ValueError:
            return False, given
    return accept(given, kind) if origin is Literal or kind is str else (False, given)


def _dashed(words: Sequence[str]) -> list[str]:
    """Options may be written with underscores; a negative number is no option."""
    return [
        f"--{word[2:].partition('=')[0].replace('_', '-')}{word[len(word.partition('=')[0]) :]}"
        if word.startswith("--")
        else word
        for word in words
    ]


def _metavar(kind: Any) -> str:
    options = [each for each in typing.get_args(kind) if each is not type(None)]
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, options)) + "}"
    if typing.get_origin(kind) is tuple:
        return _metavar(options[0])
    if options:
        return "|".join(_metavar(each) for each in options)
    return {int: "INT", float: "NUMBER", str: "TEXT"}.get(kind, "VALUE") if not isinstance(kind, str) else str(kind)


def _with_default(text: str, default: Any) -> str:
    shown = "" if default in (None, "", (), False) or default is dataclasses.MISSING else f" (default {_shown(default)})"
    return (text + shown).replace("%", "%%")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@lru_cache(maxsize=32)
def _helps(cls: type) -> Mapping[str, str]:
    """The texts below the fields of a class, from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        said = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and said:
            found[field.target.id] = " ".join(inspect.cleandoc(text.value.value).split())  # type: ignore[attr-defined]
    return found


def say(text: str = "") -> None:
    """A line on standard output."""
    print(text)


def command_line(command: str, words: Sequence[str]) -> str:
    """What was typed, to be typed again."""
    return " ".join(["anyk", command, *(f"'{word}'" if " " in word or not word else word for word in words)])
