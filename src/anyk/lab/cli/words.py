"""What the commands share: types of options, and what is printed."""

import sys
from dataclasses import dataclass
from json import dumps
from typing import Annotated, Any, TypeVar

import tyro

from anyk.lab.run.config import Config, DataFields, LossFields, LossName, ModelFields, Seed, TrainingFields

T = TypeVar("T")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
#: a dataclass whose fields are options that `--help` shows together
Group = Annotated[T, tyro.conf.OmitArgPrefixes]


@dataclass(frozen=True)
class _LossOfRun(LossFields, LossName):
    """What to train for."""


@dataclass(frozen=True)
class _TrainingOfRun(TrainingFields, Seed):
    """How to train, and what is measured on the way."""


def _config(data: DataFields, model: ModelFields, loss: _LossOfRun, training: _TrainingOfRun) -> Config:
    return Config(**vars(data), **vars(model), **vars(loss), **vars(training))


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
