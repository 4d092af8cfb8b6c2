"""A comparison of losses: the raw outcome of `anyk compare`, and what follows from it in numbers.

The dataclasses hold what was measured and nothing derived from it; the functions below derive the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anyk.lab import statistics
from anyk.lab.errors import Failure
from anyk.lab.run.recipe import Recipe
from anyk.lab.run.summaries import metrics_of
from anyk.lab.statistics import Paired, holm, paired
from anyk.lab.tables import Difference, Measured

BASELINE = "softmax"
"""what the other losses are measured against"""


@dataclass(frozen=True)
class Try:
    """One point of the tuning, on one or more tuning seeds, at one length."""

    learning_rate: float
    knob: float | None
    """the value of the method's own knob, where it has one"""
    epochs: int
    """shorter than the recipe's own in the first, cheap stage"""
    scores: tuple[float | None, ...]
    """the validation metric tuned for, of each tuning seed; None where training diverged"""


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
    knob: str | None = None
    """the field of the recipe that was tuned beside the learning rate"""
    capped: str = ""
    """what ended the tuning before the best point lay inside what was tried, in words; "" if nothing did"""
    bounds: tuple[str, ...] = ()
    """where the best point lies at the end of what is possible, in words: "label smoothing 0, the smallest there is\""""
    longer: Mapping[str, float] | None = None
    """the validation metrics of a run of twice the epochs with the tuned recipe, on the tuning seed"""
    same_length: Mapping[str, float] | None = None
    """those of the tuned recipe itself, on the same seed: what ``longer`` is to be compared with"""


@dataclass(frozen=True)
class Contrast:
    """Hits of a method minus hits of another on the same test examples and seeds, for one k.

    With d(i, s) in {-1, 0, 1} for example i and seed s: what a two-way test needs, and no more.
    """

    method: str
    against: str
    metric: str
    """top1, top5, ..."""
    by_seed: tuple[int, ...]
    """sum over the examples of d(i, s), for each seed"""
    examples: int
    """N"""
    differing: int
    """examples with d(i, s) != 0 for at least one s"""
    totals: Mapping[int, int]
    """of sums over the seeds of d(i, s), added up in each cluster: how many clusters have that sum"""
    clusters: int
    """G; N where every example stands for itself"""
    squared_sizes: int
    """sum over the clusters of their squared number of examples; N where every example stands for itself"""


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
    controls: tuple[Method, ...] = ()
    """softmax once more with the learning rate of a method that wins, named ``softmax, learning rate of METHOD``; no tries"""
    contrasts: tuple[Contrast, ...] = ()
    """every method and control against the baseline, every top-k that was measured"""
    want: tuple[int, ...] = (1, 5)
    """the k that the user will show to people: the verdict is about these"""
    moves: Moves | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    """as in a run's environment.json"""
    failures: tuple[Failure, ...] = ()
    """runs that ended with an error"""


def metrics(comparison: Comparison) -> list[str]:
    """The test metrics that at least one run has, in the order of the report."""
    names = metrics_of(method.recipe for method in comparison.methods)
    return [name for name in names if any(name in run.test for method in comparison.methods for run in method.runs)]


def measured(method: Method, metric: str) -> Measured | None:
    """A test metric over the seeds, in fractions; None where no run has it."""
    values = tuple(run.test[metric] for run in method.runs if metric in run.test)
    return Measured(values) if values else None


def differences(comparison: Comparison) -> dict[tuple[str, str], Difference]:
    """Every other method against the baseline on the seeds that both have, for each (method, metric).

    The p are corrected by Holm's method over all of them: they are one family.
    """
    baseline = next((method for method in comparison.methods if method.name == BASELINE), None)
    if baseline is None:
        return {}
    found: dict[tuple[str, str], Paired] = {}
    for method in comparison.methods:
        for metric in metrics(comparison) if method is not baseline else ():
            base = {run.seed: run.test[metric] for run in baseline.runs if metric in run.test}
            own = {run.seed: run.test[metric] for run in method.runs if metric in run.test}
            seeds = sorted(base.keys() & own.keys())
            if seeds:
                found[method.name, metric] = paired([own[seed] for seed in seeds], [base[seed] for seed in seeds])
    corrected = holm([pair.p for pair in found.values()])
    return {key: Difference(pair, p) for (key, pair), p in zip(found.items(), corrected, strict=True)}


def best(comparison: Comparison) -> Method:
    """The method with the best mean, over the seeds, of the validation metric tuned for; the first one of equals.

    Validation and not test: the test must not choose what it is to judge.
    """
    ranked = sorted(comparison.methods, key=lambda method: method.name != BASELINE)
    return max(ranked, key=lambda method: validation_score(comparison, method))


def validation_score(comparison: Comparison, method: Method) -> float:
    """The mean of the validation metric tuned for; minus infinity where there is none."""
    metric = comparison.settings.get("metric", "mean")
    scores = [run.validation[metric] for run in method.runs if metric in run.validation]
    return statistics.mean(scores) if scores and all(map(math.isfinite, scores)) else -math.inf
