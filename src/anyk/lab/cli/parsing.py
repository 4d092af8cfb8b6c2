"""What tyro makes of the words of a command; and what it cannot make anything of, in one sentence."""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from anyk.lab.did_you_mean import nearest
from anyk.lab.errors import LabError
from anyk.lab.run.config import describe


def call(commands: Mapping[str, Callable[..., int]], words: Sequence[str], *, is_main: bool) -> int:
    """Call the command that the first word names with what the others say; its exit code."""
    if words[0] in commands and not {"-h", "--help"} & set(words):
        _refuse_unknown(words, arguments(commands[words[0]]))

    def refuse(event: Any) -> None:
        with contextlib.suppress(AttributeError, KeyError):  # tyro's insides have changed: it has words of its own
            raise LabError(_sentence(event, words, arguments(commands[words[0]])))

    # Experimental in tyro, and thus by name: without it, a value that cannot be read is told in a box.
    asked = getattr(getattr(tyro, "_errors", None), "on_parse_error", contextlib.nullcontext)
    with asked(refuse):
        return tyro.extras.subcommand_cli_from_dict(dict(commands), prog="anyk", args=words, console_outputs=is_main)


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


def _refuse_unknown(words: Sequence[str], known: Mapping[str, Argument]) -> None:
    """Raise if there are options that the command does not have. Here, since tyro may take them for values."""
    command = f"anyk {words[0]}"
    names = [word.partition("=")[0] for word in words[1:] if word.startswith("--") and word != "--"]
    options = {f"--{name}" for name, argument in known.items() if not argument.positional}
    unknown = [name for name in names if name.replace("_", "-") not in options]
    if unknown:
        raise LabError(" ".join(f"{name} is no option of {command}: {_hint(name, command, known)}" for name in unknown))


def _hint(option: str, command: str, known: Mapping[str, Argument]) -> str:
    near = nearest(option.removeprefix("--"), known)
    if not near:
        return f"{command} --help lists them."
    if known[near[0]].positional:
        place = near[0].upper()
        return f"{place} stands by itself, {command} {place}."
    return f"did you mean {' or '.join(f'--{name}' for name in near)}?"


def _sentence(event: Any, words: Sequence[str], known: Mapping[str, Argument]) -> str:
    """What tyro found wrong; an AttributeError or a KeyError if this does not say it."""
    command = f"anyk {words[0]}"
    if hasattr(event, "tokens"):
        places = " ".join(name.upper() for name, argument in known.items() if argument.positional)
        given = f"{' and '.join(map(repr, event.tokens))}{f' beside {places}' if places else ''}"
        return f"there is no use for {given}: {command} --help tells what it takes."
    if hasattr(event, "missing_arguments"):
        names = " and ".join(each.arg.display_name().upper() for each in event.missing_arguments)
        return f"{names} should be given: {command} --help tells what that is."
    name = event.argument.display_name().split("/")[-1]  # -o/--out
    expected = describe(known[name.removeprefix("--")].kind).replace("nothing", "none")
    given = getattr(event, "value", None) or " ".join(_values(words, name))
    shown = name if name.startswith("-") else name.upper()
    return f"{shown} should be {expected}, but {f'is {given!r}' if given else 'has no value'}."


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
