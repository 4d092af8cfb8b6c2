"""What tyro makes of the words of a command; and what it cannot make anything of, in one sentence."""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from anyk.lab.errors import LabError
from anyk.lab.nearest import nearest
from anyk.lab.run.recipe import describe


def call(commands: Mapping[str, Callable[..., int]], words: Sequence[str], *, speaks: bool) -> int:
    """Call the command that the first word names with what the others say; its exit code."""

    def refuse(event: Any) -> None:
        with contextlib.suppress(AttributeError):  # tyro's own words are no worse than none
            sentence = _sentence(event, words, arguments(commands[words[0]]))
            if sentence:
                raise LabError(sentence)

    # Experimental in tyro, and thus by name: without it an error is a box, with the same exit code.
    asked = getattr(getattr(tyro, "_errors", None), "on_parse_error", contextlib.nullcontext)
    with asked(refuse):
        return tyro.extras.subcommand_cli_from_dict(dict(commands), prog="anyk", args=words, console_outputs=speaks)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An option, or with ``positional`` what stands without one."""

    kind: Any
    positional: bool


def arguments(source: Any) -> dict[str, Argument]:
    """What a command takes by name, with hyphens; the fields of its groups too."""
    found: dict[str, Argument] = {}
    for name, hint in typing.get_type_hints(source, include_extras=True).items():
        kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        word = name.replace("_", "-")
        if name == "return":
            continue
        if dataclasses.is_dataclass(kind):
            found |= arguments(kind)
            continue
        found[word] = Argument(kind, tyro.conf.Positional in marks)
        if kind is bool and tyro.conf.FlagCreatePairsOff not in marks:
            found[f"no-{word}"] = found[word]
    return found


def _sentence(event: Any, words: Sequence[str], known: Mapping[str, Argument]) -> str | None:
    """What tyro found wrong, or None to leave the words to it."""
    command = f"anyk {words[0]}"
    if unknown := getattr(event, "tokens", None) or getattr(event, "unrecognized_tokens", None):
        return _unknown(unknown, command, known)
    if missing := getattr(event, "missing_arguments", None):
        names = " and ".join(each.arg.display_name().upper() for each in missing)
        return f"{command} needs {names}: {command} --help tells what that is."
    argument = getattr(event, "argument", None)
    if argument is None:
        return None
    name = argument.display_name()
    expected = describe(known[name.removeprefix("--")].kind).replace("nothing", "none")
    given = getattr(event, "value", None) or " ".join(_values(words, name))
    shown = name if name.startswith("-") else name.upper()
    return f"{shown} should be {expected}, but {f'is {given!r}' if given else 'has no value'}."


def _unknown(tokens: Sequence[str], command: str, known: Mapping[str, Argument]) -> str:
    options = [token.partition("=")[0] for token in tokens if token.startswith("-")]
    if options:
        return " ".join(f"{option} is no option of {command}: {_hint(option, command, known)}" for option in options)
    given = " and ".join(map(repr, tokens))
    places = " ".join(name.upper() for name, argument in known.items() if argument.positional)
    return f"{command} has no use for {given}{f' beside {places}' if places else ''}: {command} --help tells what it takes."


def _hint(option: str, command: str, known: Mapping[str, Argument]) -> str:
    near = nearest(option.lstrip("-"), known)
    if not near:
        return f"{command} --help lists them."
    if known[near[0]].positional:
        place = near[0].upper()
        return f"{place} stands by itself, {command} {place}."
    return f"did you mean {' or '.join(f'--{name}' for name in near)}?"


def _values(words: Sequence[str], option: str) -> list[str]:
    """What follows an option, up to the next."""
    values: list[str] = []
    inside = False
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            inside = name.replace("_", "-") == option
            word = value if equals else ""
        if inside and word:
            values.append(word)
    return values
