"""A comparison of losses: the raw outcome of `anyk compare`, what follows from it, and how to say it.

The dataclasses hold what was measured and nothing derived from it; the functions below derive the rest.
"""

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from anyk.lab.errors import LabError
from anyk.lab.recipes import Recipe

BASELINE = "softmax"


@dataclass(frozen=True)
class Try:
    """One point of the tuning grid. ``score`` is the validation metric tuned for; None where training diverged."""

    learning_rate: float
    temperature: float | str
    score: float | None
    validation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SeedRun:
    """One run of the tuned recipe. ``curve`` holds the lines of its metrics.jsonl."""

    seed: int
    test: Mapping[str, float]
    validation: Mapping[str, float]
    seconds: float
    folder: str = ""
    curve: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Method:
    """A loss with its tuned recipe, the tries that tuned it and one run for each seed."""

    name: str
    recipe: Recipe
    tries: tuple[Try, ...]
    runs: tuple[SeedRun, ...]


@dataclass(frozen=True)
class Guess:
    """A class that a model proposes."""

    name: str
    probability: float | None = None


@dataclass(frozen=True)
class Example:
    """A test example whose target moved into, or out of, the first five guesses. The guesses are best first."""

    index: int
    target: str
    moved: Literal["in", "out"]
    before: tuple[Guess, ...]
    """of the baseline"""
    after: tuple[Guess, ...]
    """of the method"""
    image: bytes | None = None
    """a PNG file"""


@dataclass(frozen=True)
class Moves:
    """How many test examples have their target in the first five guesses of one method only, of one seed; some of them."""

    method: str
    seed: int
    into: int
    out_of: int
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The raw outcome of `anyk compare`."""

    data: Mapping[str, Any]
    """name, kind, classes, train, validation, test, fingerprint: as in a run's result.json"""
    command: str
    """what to type to get the same again"""
    settings: Mapping[str, Any]
    """budget, seeds, metric (the validation metric tuned for), p_k, m, ...: shown as they are"""
    methods: tuple[Method, ...]
    """in the order of the report, the baseline (softmax) among them"""
    moves: Moves | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    """as in a run's environment.json"""
    failures: tuple[str, ...] = ()
    """runs that ended with an error, a sentence each"""
