"""What a comparison has found: every number that the verdict, the report, the terminal and results.json show, computed once."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anyk.lab import statistics
from anyk.lab.config import BOUNDED, RunConfig
from anyk.lab.statistics import Difference
from anyk.lab.tune import Trial

Role = Literal["baseline", "method", "control", "reference"]
FORMAT = 3
"""of results.json"""
SHARES = (50, 80, 90, 95, 99)
"""percent of the test examples that lists of guesses should cover"""
LATE = 0.005
"""what the second half of training may gain before the epochs count as too few"""


@dataclass(frozen=True)
class SeedRun:
    """One final run of a method: measured on the test examples."""

    seed: int
    point: Mapping[str, Any]
    """what the tuning of this seed has chosen"""
    test: Mapping[str, float]
    validation: Mapping[str, float]
    train: Mapping[str, float]
    """accuracies on the training examples (on some of them, where they are many)"""
    seconds: float
    epochs: float
    folder: str = ""
    ranks: NDArray[Any] | None = None
    """of each test example's class; not in results.json"""


@dataclass(frozen=True)
class Method:
    """A loss with its final runs, or a reference to measure it by."""

    name: str
    role: Role
    words: str
    """what it is, for somebody who has read nothing else"""
    config: RunConfig | None
    """the config to paste; None: not a loss"""
    runs: tuple[SeedRun, ...] = ()
    trials: tuple[Trial, ...] = ()
    at_bounds: tuple[str, ...] = ()
    late_gain: float | None = None
    """what the second half of training gained in the metric tuned for, on validation"""
    ended: str = ""
    """what ended its tuning or its seeds too early, in words"""
    of: str = ""
    """of a control, the method that it is a control of"""

    def mean(self, metric: str, of: Literal["test", "validation", "train"] = "test") -> float | None:
        """The mean over the seeds; None where no run has it."""
        values = [getattr(run, of)[metric] for run in self.runs if metric in getattr(run, of)]
        return statistics.mean(values) if values else None

    def std(self, metric: str) -> float | None:
        """The standard deviation over the seeds on the test."""
        values = [run.test[metric] for run in self.runs if metric in run.test]
        return statistics.std(values) if values else None


@dataclass(frozen=True)
class Findings:
    """The outcome of a comparison. What is not a field follows from the fields."""

    methods: tuple[Method, ...]
    """softmax first, then the other losses in their order, their controls, and the references"""
    ks: tuple[int, ...]
    metric: str
    """the validation metric that is tuned for"""
    data: Mapping[str, Any]
    """name, kind, classes, examples of each part, fingerprint, balance, how it was split, remarks"""
    settings: Mapping[str, Any]
    look: int = 1
    """how often this test set has been looked at in this comparison, this time included"""
    looks: tuple[Mapping[str, Any], ...] = ()
    """the looks before: seeds and settings of each"""
    groups: NDArray[Any] | None = None
    """of the test examples; not in results.json"""
    labels: NDArray[Any] | None = None
    """of the test examples; not in results.json"""
    class_names: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    command: str = ""
    """with --with-paths, what to type to get the same again"""

    # Who is who ------------------------------------------------------------------------------------------------------------

    @property
    def baseline(self) -> Method:
        """Softmax."""
        return self.methods[0]

    @property
    def losses(self) -> list[Method]:
        """Softmax and the losses that are compared with it."""
        return [method for method in self.methods if method.role in ("baseline", "method")]

    def method(self, name: str) -> Method:
        """The method of this name."""
        return next(method for method in self.methods if method.name == name)

    @property
    def judged(self) -> list[str]:
        """The metrics that are tested: those of --ks."""
        return [f"top{k}" for k in self.ks]

    @property
    def level(self) -> float:
        """The level of the tests of this look."""
        return statistics.level_of(self.look)

    # Differences -----------------------------------------------------------------------------------------------------------

    @cached_property
    def differences(self) -> dict[tuple[str, str], Difference]:
        """Every method against softmax, for each (name, metric), over the seeds that both have; of the losses, in the judged
        metrics, with a test, corrected by Holm's method over all of them."""
        found: dict[tuple[str, str], Difference] = {}
        for method in self.methods[1:]:
            for metric in self.metrics:
                one = self.difference(method, self.baseline, metric)
                if one is not None:
                    found[method.name, metric] = one
        family = [key for key in found if key[1] in self.judged and self.method(key[0]).role == "method"]
        for key, p in zip(family, statistics.holm([found[key].p for key in family]), strict=True):
            found[key] = dataclasses.replace(found[key], p_holm=p)
        return found

    @cached_property
    def beyond_controls(self) -> dict[tuple[str, str, str], Difference]:
        """Every loss against its controls, for each (name, control, metric): a family of its own."""
        found: dict[tuple[str, str, str], Difference] = {}
        for method in self.losses[1:]:
            for control in self.controls_of(method):
                for metric in self.judged:
                    one = self.difference(method, control, metric)
                    if one is not None:
                        found[method.name, control.name, metric] = one
        corrected = statistics.holm([one.p for one in found.values()])
        return {key: dataclasses.replace(one, p_holm=p) for (key, one), p in zip(found.items(), corrected, strict=True)}

    def controls_of(self, method: Method) -> list[Method]:
        """What has a part of what the method has, and no more: softmax trained as it was; of an error loss, gce."""
        own = [other for other in self.methods if other.of == method.name]
        if method.config is not None and method.config.loss.partition(":")[0] == "error":
            own += [other for other in self.methods if other.name == BOUNDED]
        return own

    def difference(self, method: Method, against: Method, metric: str) -> Difference | None:
        """The difference of two methods in one metric; of hits (top1, top5, …), with its test."""
        pairs = _same_seeds(method, against)
        values = [(own.test[metric], other.test[metric]) for own, other in pairs if metric in own.test and metric in other.test]
        if not values:
            return None
        if metric.startswith("top") and all(own.ranks is not None and other.ranks is not None for own, other in pairs):
            k = int(metric.removeprefix("top"))
            hits = [(np.asarray(own.ranks) <= k).astype(np.int8) - (np.asarray(other.ranks) <= k) for own, other in pairs]
            return statistics.two_way(
                statistics.contrast(method.name, against.name, metric, np.stack(hits), self.groups), confidence=1 - self.level
            )
        mean = statistics.mean([own - other for own, other in values])
        return Difference(mean, len(values), reason="the hits were not counted", examples=self.data.get("test"))

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics of the test that at least one run has, those of --ks first."""
        measured = {name for method in self.methods for run in method.runs for name in run.test}
        order = {"mrr": 1, "ndcg": 2, "macro": 3, "mean": 4, "cross": 5}
        rest = sorted(measured - set(self.judged), key=lambda name: (_kind_of(name, order), _number_in(name), name))
        return [name for name in self.judged if name in measured] + rest

    def significant(self, method: Method, sign: int) -> dict[str, Difference]:
        """The judged metrics in which the test shows a gain (sign 1) or a loss (sign -1) against softmax."""
        found = {metric: self.differences.get((method.name, metric)) for metric in self.judged}
        return {
            metric: one
            for metric, one in found.items()
            if one is not None and one.p_holm is not None and one.p_holm < self.level and sign * one.difference > 0
        }

    # The answer ------------------------------------------------------------------------------------------------------------

    @cached_property
    def confirmed(self) -> list[Method]:
        """The losses that gain in a judged metric and lose in none, on all seeds."""
        seeds = {run.seed for method in self.losses for run in method.runs}
        return [
            method
            for method in self.losses[1:]
            if self.significant(method, 1) and not self.significant(method, -1) and len(method.runs) == len(seeds)
        ]

    @cached_property
    def picked(self) -> Method:
        """The best loss on validation: the test must not choose what it is to judge. Where the labels of validation were made
        wrong, the best of those that the test confirms, if there are any: Holm's correction is over all of them."""
        among = self.confirmed if self.settings.get("label_noise") and self.confirmed else self.losses
        scores = {method.name: method.mean(self.metric, "validation") for method in among}
        best = max((score for score in scores.values() if score is not None), default=None)
        if best is None:
            return self.baseline
        return next(method for method in among if (score := scores[method.name]) is not None and score >= best - 1e-9)

    @cached_property
    def chosen(self) -> Method:
        """What to use: the loss that is picked if the test confirms it, otherwise softmax."""
        return self.picked if self.decided and self.picked in self.confirmed else self.baseline

    @property
    def decided(self) -> bool:
        """Whether there is an answer; that there is no difference is one, too."""
        return not self.why_undecided

    @cached_property
    def why_undecided(self) -> str:
        """What is missing for an answer, in words; "" if nothing is."""
        if ended := [method for method in self.losses if method.ended]:
            return f"{ended[0].ended}; run the same command with more --time, or without, to go on"
        if not self.baseline.runs:
            return "there is no finished run of softmax to measure the others against"
        if not any(_same_seeds(method, self.baseline) for method in self.losses[1:]):
            return "no other loss has a finished run"
        seeds = max(len(_same_seeds(method, self.baseline)) for method in self.losses[1:])
        if seeds < statistics.ENOUGH_SEEDS:
            count = "one seed" if seeds == 1 else f"{seeds} seeds"
            return f"{count} cannot tell a gain from luck; run the same command with --seeds 5 to go on"
        open_ = [
            (one.difference, method.name, metric)
            for method in self.losses[1:]
            for metric in self.judged
            if (one := self.differences.get((method.name, metric))) is not None and one.low is not None and one.low > 0
        ]
        if open_ and not self.confirmed and seeds < 5 and not self.too_few_examples:
            gain, name, metric = max(open_)
            return f"{name} gains {100 * gain:.2f} points of {metric}, which {seeds} seeds cannot confirm; run with --seeds 5"
        return ""

    @cached_property
    def too_few_examples(self) -> str:
        """That no number of seeds can decide, in words; "" if it can."""
        units = int(self.data.get("test_groups") or self.data["test"])
        tests = max(1, len(self.judged) * (len(self.losses) - 1))
        needed = statistics.fewest_units(tests)
        what = "groups of test examples" if self.data.get("test_groups") else "test examples"
        return (
            f"{units} {what} are too few for any seed to decide: {tests} tests need at least {needed}" if units < needed else ""
        )

    @cached_property
    def nothing_learned(self) -> bool:
        """Whether no loss is surely better than always the most frequent class."""
        share, examples = float(self.data["most_frequent"]), int(self.data["test"])
        error = math.sqrt(max(share * (1 - share), 1e-9) / max(examples, 1))
        best = max((method.mean("top1") or 0.0 for method in self.losses), default=0.0)
        return bool(self.baseline.runs) and best < share + 2 * error

    # Lists of guesses, classes, examples -----------------------------------------------------------------------------------

    def guesses_for(self, method: Method) -> dict[int, int | None]:
        """For each of some percentages, the smallest k whose first k guesses hold the class of as many test examples, over all
        seeds; None where all classes are not enough."""
        ranks = [np.asarray(run.ranks) for run in method.runs if run.ranks is not None]
        if not ranks:
            return {}
        ordered = np.sort(np.concatenate(ranks))
        classes = int(self.data["classes"])
        needed = {share: int(ordered[-(-share * len(ordered) // 100) - 1]) for share in SHARES}
        return {share: k if k <= classes else None for share, k in needed.items()}

    def by_class(self, method: Method, metric: str) -> list[tuple[str, int, float, float]]:
        """For each class with test examples: its name, their number, and the accuracy of softmax and of the method over the
        seeds that both have; those that differ most first."""
        pairs = [pair for pair in _same_seeds(method, self.baseline) if pair[0].ranks is not None and pair[1].ranks is not None]
        if self.labels is None or not pairs:
            return []
        k, rows = int(metric.removeprefix("top")), []
        for number, name in enumerate(self.class_names):
            own = self.labels == number
            if own.any():
                before = float(np.mean([(np.asarray(other.ranks)[own] <= k).mean() for _, other in pairs]))
                after = float(np.mean([(np.asarray(one.ranks)[own] <= k).mean() for one, _ in pairs]))
                rows.append((name, int(own.sum()), before, after))
        return sorted(rows, key=lambda row: -abs(row[3] - row[2]) * row[1])

    # For programs ----------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The content of results.json."""
        methods = []
        for method in self.methods:
            row = {
                "name": method.name,
                "role": method.role,
                "words": method.words,
                "of": method.of,
                "config": None if method.config is None else method.config.to_json(),
                "test": {metric: _measured(method, metric) for metric in self.metrics if method.mean(metric) is not None},
                "difference": {
                    metric: dataclasses.asdict(one) for (name, metric), one in self.differences.items() if name == method.name
                },
                "beyond": {
                    f"{control} {metric}": dataclasses.asdict(one)
                    for (name, control, metric), one in self.beyond_controls.items()
                    if name == method.name
                },
                "guesses": self.guesses_for(method),
                "at_bounds": list(method.at_bounds),
                "late_gain": method.late_gain,
                "ended": method.ended,
                "runs": [
                    {each.name: getattr(run, each.name) for each in dataclasses.fields(run) if each.name != "ranks"}
                    for run in method.runs
                ],
                "trials": [dataclasses.asdict(trial) for trial in method.trials],
            }
            methods.append(row)
        return _json_value(
            {
                "format": FORMAT,
                "chosen": self.chosen.name,
                "picked": self.picked.name,
                "decided": self.decided,
                "why_undecided": self.why_undecided,
                "level": self.level,
                "look": self.look,
                "looks": [*self.looks, self.this_look],
                "ks": self.ks,
                "metric": self.metric,
                "data": self.data,
                "settings": self.settings,
                "methods": methods,
                "environment": self.environment,
                "failures": self.failures,
                **({"command": self.command} if self.command else {}),
            }
        )

    @property
    def this_look(self) -> dict[str, Any]:
        """What makes this look another than the last."""
        return {
            "seeds": {method.name: len(method.runs) for method in self.losses},
            "settings": {name: value for name, value in self.settings.items() if value is not None},
        }


def _same_seeds(method: Method, against: Method) -> list[tuple[SeedRun, SeedRun]]:
    others = {run.seed: run for run in against.runs}
    return [(run, others[run.seed]) for run in method.runs if run.seed in others]


def _kind_of(name: str, order: Mapping[str, int]) -> int:
    return next((place for prefix, place in order.items() if name.startswith(prefix)), 0)


def _number_in(name: str) -> int:
    return int("".join(filter(str.isdigit, name)) or 0)


def _measured(method: Method, metric: str) -> dict[str, Any]:
    return {"mean": method.mean(metric), "std": method.std(metric), "seeds": len(method.runs)}


def _json_value(value: Any) -> Any:
    """Tuples as lists, keys as texts, and null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
