"""From the words of a command line to a call, by tyro; and what tyro cannot read, as one line that names the option.

tyro makes the options and the pages of help from the signatures. What is added here it does not do: it suggests no option
for `--lr`, reports errors in boxes of many lines, and takes neither `none` nor lists with commas.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any

import tyro

from anyk.lab.did_you_mean import nearest
from anyk.lab.errors import LabError
from anyk.lab.run.config import describe


def call(commands: Mapping[str, Callable[..., int]], words: Sequence[str], description: str, *, is_main: bool) -> int:
    """Call the command that the first word names with what the others say; its exit code."""
    known = arguments(commands[words[0]]) if words[0] in commands else {}
    words = normalized(words, known)
    if known and not {"-h", "--help"} & set(words):
        _refuse_unknown(words, known)

    def refuse(event: Any) -> None:
        with contextlib.suppress(AttributeError, KeyError):  # tyro's insides have changed: it has words of its own
            raise LabError(_message(event, words, known))

    # Experimental in tyro, and thus by name: without it, a value that cannot be read is reported in a box.
    on_error = getattr(getattr(tyro, "_errors", None), "on_parse_error", contextlib.nullcontext)
    with on_error(refuse):
        return tyro.extras.subcommand_cli_from_dict(
            dict(commands), prog="anyk", description=description, args=words, console_outputs=is_main
        )


class Argument(typing.NamedTuple):
    """An option, or with ``positional`` what stands without one."""

    kind: Any
    positional: bool = False

    @property
    def listed(self) -> bool:
        """Whether it takes several values."""
        return "tuple" in str(self.kind)

    @property
    def optional(self) -> bool:
        """Whether `none` is one of its values, and not a name."""
        return NoneType in (options := typing.get_args(self.kind)) and str not in options


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


def normalized(words: Sequence[str], known: Mapping[str, Argument]) -> list[str]:
    """The words of a command as tyro wants them: None with a capital and lists with spaces.

    Here and not by tyro's constructors: a rule for tuples and for None would have to do again what tyro does with every type
    inside them.

    >>> options = {"m": Argument(int | None), "p-k": Argument(tuple[float, ...])}
    >>> normalized(["train", "--m", "none", "--p-k=.5,0,.5"], options)
    ['train', '--m', 'None', '--p-k', '.5', '0', '.5']
    """
    result: list[str] = []
    option, argument = "", Argument(None)
    for given in words:
        word = given
        if word.startswith("--"):
            option, equals, word = word.partition("=")
            option = option.replace("_", "-")
            argument = known.get(option.removeprefix("--"), Argument(None))
            if not equals or not (argument.listed or argument.optional):
                result.append(given)
                continue
            result.append(option)
        follows = bool(result) and result[-1].replace("_", "-") == option
        if follows and argument.optional and word.lower() == "none":
            result.append("None")
        elif argument.listed and "," in word:
            result += [piece for piece in word.split(",") if piece.strip()]
        else:
            result.append(word)
    return result


def _refuse_unknown(words: Sequence[str], known: Mapping[str, Argument]) -> None:
    """Raise if there are options that the command does not have. Here, since tyro may take them for values."""
    command = f"anyk {words[0]}"
    names = [word.partition("=")[0] for word in words[1:] if word.startswith("--") and word != "--"]
    options = {f"--{name}" for name, argument in known.items() if not argument.positional}
    unknown = [name for name in names if name.replace("_", "-") not in options]
    if unknown:
        raise LabError(" ".join(f"{name} is not an option of {command}: {_hint(name, command, known)}" for name in unknown))


def _hint(option: str, command: str, known: Mapping[str, Argument]) -> str:
    near = nearest(option.removeprefix("--"), known)
    if not near:
        return f"{command} --help lists the options."
    if known[near[0]].positional:
        place = near[0].upper()
        return f"{place} is given without an option, {command} {place}."
    return f"did you mean {' or '.join(f'--{name}' for name in near)}?"


def _message(event: Any, words: Sequence[str], known: Mapping[str, Argument]) -> str:
    """What tyro found wrong; an AttributeError or a KeyError if it is of a kind that is not known here."""
    command = f"anyk {words[0]}"
    if hasattr(event, "tokens"):
        places = " ".join(name.upper() for name, argument in known.items() if argument.positional)
        given = f"{' and '.join(map(repr, event.tokens))}{f' besides {places}' if places else ''}"
        return f"unexpected {given}: {command} --help says what it takes."
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
