"""Words in, words out: what all commands share."""

import os
import shlex
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from typing import Annotated, Any, TypeVar

import tyro

from anyk.lab.errors import Failure, failure_sentences
from anyk.lab.files import slug as slug
from anyk.lab.run import processes
from anyk.lab.run.config import (
    TYPES,
    Config,
    DataFields,
    LossFields,
    LossName,
    ModelFields,
    Seed,
    Setting,
    TrainingFields,
)
from anyk.lab.run.loggers import LoggerName

T = TypeVar("T")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Loggers = tuple[LoggerName, ...]
#: a dataclass whose fields are options that `--help` shows together
Group = Annotated[T, tyro.conf.OmitArgPrefixes]


@dataclass(frozen=True)
class _LossOfRun(LossFields, LossName):
    """What to train for."""


@dataclass(frozen=True)
class _TrainingOfRun(TrainingFields, Seed):
    """How to train, and what is measured on the way."""


def _setting(data: DataFields, model: ModelFields, loss: LossFields, training: TrainingFields) -> Setting:
    return Setting(**vars(data), **vars(model), **vars(loss), **vars(training))


def _config(data: DataFields, model: ModelFields, loss: _LossOfRun, training: _TrainingOfRun) -> Config:
    return Config(**vars(data), **vars(model), **vars(loss), **vars(training))


CommonSetting = Annotated[Setting, tyro.conf.OmitArgPrefixes, tyro.conf.arg(constructor=_setting, name="")]
WholeConfig = Annotated[Config, tyro.conf.OmitArgPrefixes, tyro.conf.arg(constructor=_config, name="")]


def say(words: str) -> None:
    """To standard output."""
    sys.stdout.write(words.rstrip("\n") + "\n")


def say_json(value: Any) -> None:
    """To standard output, as JSON."""
    say(dumps(value, indent=1))


def warn(words: str) -> None:
    """To standard error."""
    sys.stderr.write(words.rstrip("\n") + "\n")


def tell_failures(failures: Sequence[Failure]) -> int:
    """Name the runs that failed; the exit code."""
    for sentence in failure_sentences(failures):
        warn(sentence)
    return 1 if failures else 0


def command_line() -> str:
    """What was typed."""
    here = os.environ.get("LOCAL_WORLD_SIZE", str(processes.launched()))
    started = ["torchrun", "--nproc-per-node", here, "-m"] if processes.launched() > 1 else []
    return shlex.join([*started, "anyk", *sys.argv[1:]])


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


_NONE_OPTIONS = {_option(name) for name, kind in TYPES.items() if type(None) in typing.get_args(kind)}
_LIST_OPTIONS = {
    *(_option(name) for name, kind in TYPES.items() if "tuple" in str(kind)),
    *("--losses", "--operators", "--scores", "--temperatures", "--fields", "--metrics", "--log"),
}


def understood(words: Sequence[str]) -> list[str]:
    """The words of a command as the parser wants them: None with a capital, lists with spaces, --sort=-top5 with its sign.

    Here and not by tyro's constructors: these see a value when it has been told apart from options, which is too late for
    -top5, and a rule for tuples and for None would have to do again what tyro does with every type inside them.

    >>> understood(["train", "--m", "none", "--p-k=.5,0,.5", "--p-k-end", "0,", "0,1"])
    ['train', '--m', 'None', '--p-k', '.5', '0', '.5', '--p-k-end', '0', '0', '1']
    >>> understood(["report", "runs", "--sort", "-top5"])
    ['report', 'runs', '--sort=-top5']
    """
    result: list[str] = []
    option = ""
    for given in words:
        word = given
        if word.startswith("--"):
            option, equals, word = word.partition("=")
            option = option.replace("_", "-")
            if not equals or option not in _NONE_OPTIONS | _LIST_OPTIONS:
                result.append(given)
                continue
            result.append(option)
        follows = bool(result) and result[-1].replace("_", "-") == option
        if follows and option in _NONE_OPTIONS and word.lower() == "none":
            result.append("None")
        elif follows and option == "--sort" and word.startswith("-"):
            result[-1] = f"--sort={word}"
        elif option in _LIST_OPTIONS and "," in word:
            result += [piece for piece in word.split(",") if piece.strip()]
        else:
            result.append(word)
    return result
