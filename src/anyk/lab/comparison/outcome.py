"""A comparison of losses: the raw outcome of `anyk compare`, and what follows from it in numbers.

The dataclasses hold what was measured and nothing derived from it; the functions below derive the rest.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from anyk.lab import statistics
from anyk.lab.errors import Failure
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.folder import Run
from anyk.lab.run.summaries import metrics_of
from anyk.lab.statistics import ENOUGH_SEEDS, SIGNIFICANT, Contrast, Paired, holm
from anyk.lab.tables import Difference, Measured

BASELINE = "softmax"
"""what the other losses are measured against"""
LEARNING_RATE_OF = "softmax, learning rate of "
"""how the name of a control begins, before that of the method whose learning rate it has"""
BOUNDED = "gce"
"""the loss that is a control of the error losses: bounded as they are, but it knows no k"""
MUCH_LONGER = 0.005
"""what twice the epochs may gain in the metric tuned for, before the epochs count as too few"""


@dataclass(frozen=True)
class Try:
    """One point of the tuning, on one or more tuning seeds, at one length."""

    learning_rate: float
    hyperparameter: float | None
    """the value of the method's own hyperparameter, where it has one"""
    epochs: int
    """shorter than the config's own in the first, cheap stage"""
    scores: tuple[float | None, ...]
    """the validation metric tuned for, of each tuning seed; None where training diverged"""
    label_smoothing: float | None = None
    """of an error loss, that of its cross-entropy"""


@dataclass(frozen=True)
class SeedRun:
    """One run of the tuned config. ``curve`` holds the lines of its metrics.jsonl."""

    seed: int
    test: Mapping[str, float]
    validation: Mapping[str, float]
    seconds: float
    folder: str = ""
    curve: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Method:
    """A loss with its tuned config, the tries that tuned it and one run for each seed."""

    name: str
    config: Config
    tries: tuple[Try, ...]
    runs: tuple[SeedRun, ...]
    hyperparameter: str | None = None
    """the field of the config that was tuned beside the learning rate"""
    capped: str = ""
    """what ended the tuning before the best point lay inside what was tried, an option: "--budget 14\"; "" if nothing did"""
    bounds: tuple[str, ...] = ()
    """where the best point lies at the end of what is possible, in words: "label smoothing 0, the smallest there is\""""
    longer: Mapping[str, float] | None = None
    """the validation metrics of a run of twice the epochs with the tuned config, on the tuning seed"""
    same_length: Mapping[str, float] | None = None
    """those of the tuned config itself, on the same seed: what ``longer`` is to be compared with"""


@dataclass(frozen=True)
class Guess:
    """A class that a model proposes."""

    name: str
    probability: float | None = None


@dataclass(frozen=True)
class Example:
    """A test example whose target moved into, or out of, the first k guesses. The guesses are best first."""

    source: str
    """where to find it: the file of an image folder, relative to it; of sequences, "sequence 3, token 14", counted from 1;
    otherwise "row 12", counted from 0"""
    target: str
    moved: Literal["in", "out"]
    before: tuple[Guess, ...]
    """of the baseline"""
    after: tuple[Guess, ...]
    """of the method"""
    ranks: tuple[int, int]
    """of the target, 1 for the best: for the baseline, and for the method"""
    image: bytes | None = None
    """a PNG file"""
    context: tuple[str, ...] = ()
    """of sequences, the last tokens before the target that the models saw; :data:`anyk.lab.data.tokens.OTHER` for any that is
    no class"""


@dataclass(frozen=True)
class Moves:
    """How many test examples have their target in the first k guesses of one method only, of one seed; some of them."""

    method: str
    k: int
    seed: int
    into: int
    out_of: int
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Confusion:
    """How often a class was the first guess for examples of another, over the seeds."""

    target: str
    guess: str
    before: int
    """by the baseline"""
    after: int
    """by the method"""


@dataclass(frozen=True)
class ByClass:
    """Hits of the baseline and of a method for each class that has test examples, added up over the seeds that both have."""

    method: str
    seeds: tuple[int, ...]
    names: tuple[str, ...]
    examples: tuple[int, ...]
    """test examples of each class; each counts once for every seed in the hits"""
    before: Mapping[str, tuple[int, ...]]
    """the baseline's hits in each class, by metric"""
    after: Mapping[str, tuple[int, ...]]
    """the method's"""
    confusions: tuple[Confusion, ...] = ()
    """the most frequent ones of the baseline and of the method"""


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
    """every method and control against the baseline, and methods against their controls: every top-k that was measured"""
    ks: tuple[int, ...] = (1, 5)
    """the k that the user will show to people: the verdict is about these"""
    by_class: ByClass | None = None
    moves: Moves | None = None
    unreadable: tuple[str, ...] = ()
    """files of the data that could not be read and were left out"""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """as in a run's environment.json"""
    failures: tuple[Failure, ...] = ()
    """runs that ended with an error"""


# What is measured against what ---------------------------------------------------------------------------------------------


def contrasts(comparison: Comparison, out: str | Path) -> tuple[Contrast, ...]:
    """Count the hits that every method and control gains on the baseline, and every method on its controls.

    Reads ``test.safetensors`` of the runs. Runs without it, and pairs without a common seed, have no contrast.

    Args:
        comparison: the methods and controls with their runs.
        out: the folder that the runs' folders are in.
    """
    ranks: dict[str, dict[str, Any]] = {}

    def of(run: SeedRun) -> dict[str, Any] | None:
        if run.folder not in ranks:
            found = Run(Path(out) / run.folder).load_tensors("test.safetensors", ("ranks", "groups"))
            ranks[run.folder] = {} if found is None else {name: tensor.numpy() for name, tensor in found[0].items()}
        return ranks[run.folder] or None

    found = []
    for method, against in _pairs(comparison):
        seeds = [(of(own), of(other)) for own, other in _shared(method, against)]
        read = [(own, other) for own, other in seeds if own is not None and other is not None]
        for metric in metrics(comparison) if read else ():
            k = int(metric.removeprefix("top"))
            hits = [(own["ranks"] <= k).astype("int8") - (other["ranks"] <= k) for own, other in read]
            clusters = read[0][0].get("groups")
            found.append(statistics.contrast(method.name, against.name, metric, np.stack(hits), clusters))
    return tuple(found)


def _pairs(comparison: Comparison) -> Iterator[tuple[Method, Method]]:
    """Every method and control with the baseline, and every method with its controls."""
    baseline = _baseline(comparison)
    if baseline is not None:
        yield from ((method, baseline) for method in (*comparison.methods, *comparison.controls) if method is not baseline)
    for method in comparison.methods:
        yield from ((method, control) for control in controls_of(comparison, method))


def controls_of(comparison: Comparison, method: Method) -> list[Method]:
    """What has a part of what the method has, and no more: softmax with its learning rate; of an error loss, gce."""
    found = [control for control in comparison.controls if control.name == LEARNING_RATE_OF + method.name]
    if loss_names.find(method.config.loss).family == "error":
        found += [other for other in comparison.methods if other.config.loss == BOUNDED]
    return found


def _baseline(comparison: Comparison) -> Method | None:
    return next((method for method in comparison.methods if method.name == BASELINE), None)


def _shared(method: Method, other: Method) -> list[tuple[SeedRun, SeedRun]]:
    """The runs of both with the same seeds."""
    others = {run.seed: run for run in other.runs}
    return [(run, others[run.seed]) for run in sorted(method.runs, key=lambda run: run.seed) if run.seed in others]


# What follows --------------------------------------------------------------------------------------------------------------


def metrics(comparison: Comparison) -> list[str]:
    """The top-k accuracies of the test that at least one run has, in the order of the report: first what the user wants."""
    first = [f"top{k}" for k in comparison.ks]
    configs = (method.config for method in (*comparison.methods, *comparison.controls))
    return _of_a_run(comparison, dict.fromkeys([*first, *metrics_of(configs)]))


def others(comparison: Comparison) -> list[str]:
    """The further test metrics that at least one run has. They are shown and not tested."""
    ks = sorted(k for k in {*comparison.ks, 10} if k > 1)
    macro = sorted({1, 5, *comparison.ks})
    return _of_a_run(comparison, ["mrr", *(f"ndcg{k}" for k in ks), *(f"macro_top{k}" for k in macro)])


def _of_a_run(comparison: Comparison, names: Iterable[str]) -> list[str]:
    runs = [run for method in (*comparison.methods, *comparison.controls) for run in method.runs]
    return [name for name in names if any(name in run.test for run in runs)]


def wanted(comparison: Comparison) -> list[str]:
    """The metrics that the verdict is about, in the order of the wish; the first one measured, if none of them was."""
    measured = metrics(comparison)
    return [name for k in comparison.ks if (name := f"top{k}") in measured] or measured[:1]


def measured(method: Method, metric: str) -> Measured | None:
    """A test metric over the seeds, in fractions; None where no run has it."""
    values = tuple(run.test[metric] for run in method.runs if metric in run.test)
    return Measured(values) if values else None


def differences(comparison: Comparison) -> dict[tuple[str, str], Difference]:
    """Every other method and control against the baseline on the seeds that both have, for each (method, metric).

    Only methods in metrics that are wanted have an interval and a p. The p are corrected by Holm's method over all of them:
    they are one family. There is none where a cap has ended the tuning.
    """
    found = {
        (method.name, metric): pair
        for method, against in _pairs(comparison)
        for metric in metrics(comparison)
        if against.name == BASELINE and (pair := difference(comparison, method, against, metric)) is not None
    }
    judged = [] if capped(comparison) else [(m.name, k) for m in comparison.methods for k in wanted(comparison)]
    family = {key: found[key].p for key in judged if key in found}
    corrected = dict(zip(family, holm(list(family.values())), strict=True))
    shown = {key: pair if key in family else _untested(pair) for key, pair in found.items()}
    return {key: Difference(pair, corrected.get(key)) for key, pair in shown.items()}


def other_differences(comparison: Comparison) -> dict[tuple[str, str], Difference]:
    """The same for :func:`others`, each without hits, interval and p."""
    baseline, found = _baseline(comparison), {}
    for method in (*comparison.methods, *comparison.controls):
        for metric in others(comparison) if baseline is not None and method is not baseline else ():
            assert baseline is not None
            pair = difference(comparison, method, baseline, metric)
            if pair is not None:
                found[method.name, metric] = Difference(dataclasses.replace(_untested(pair), examples=None), None)
    return found


def difference(comparison: Comparison, method: Method, against: Method, metric: str) -> Paired | None:
    """The difference of two methods in one metric on the seeds that both have, and its test if their hits were counted."""
    key = (method.name, against.name, metric)
    for counted in comparison.contrasts:
        if (counted.method, counted.against, counted.metric) == key:
            return statistics.two_way(counted)
    both = [(own.test, other.test) for own, other in _shared(method, against) if metric in own.test and metric in other.test]
    if not both:
        return None
    mean = statistics.mean([own[metric] - other[metric] for own, other in both])
    return Paired(mean, len(both), reason="the hits were not counted", examples=comparison.data.get("test"))


def _untested(pair: Paired) -> Paired:
    return dataclasses.replace(pair, low=None, high=None, p=None, reason=None)


def picked(comparison: Comparison) -> Method:
    """The method with the best mean, over the seeds, of the validation metric tuned for; the first one of equals, softmax
    before all.

    Validation and not test: the test must not choose what it is to judge.
    """
    ranked = sorted(comparison.methods, key=lambda method: method.name != BASELINE)
    return max(ranked, key=lambda method: validation_score(comparison, method))


def rival(comparison: Comparison) -> Method | None:
    """The other method that is best on validation, of those that share a seed with the baseline: what is looked at closely."""
    others = dataclasses.replace(comparison, methods=tuple(compared(comparison)))
    return picked(others) if others.methods else None


def shared(comparison: Comparison, method: Method) -> list[tuple[SeedRun, SeedRun]]:
    """The runs of the baseline and of a method, with the same seed each."""
    baseline = _baseline(comparison)
    return [] if baseline is None else _shared(baseline, method)


def chosen(comparison: Comparison) -> Method:
    """What to use: the method that validation picks if the test confirms it, otherwise the baseline."""
    best = picked(comparison)
    return best if decided(comparison) and confirmed(comparison, best) else _baseline(comparison) or best


def confirmed(comparison: Comparison, method: Method) -> bool:
    """Whether the test shows that a method gains in a metric that is wanted, and no loss in another."""
    return bool(significant(comparison, method, 1)) and not significant(comparison, method, -1)


def significant(comparison: Comparison, method: Method, sign: int) -> dict[str, Difference]:
    """The wanted metrics in which the test shows a gain (sign 1) or a loss (sign -1) against the baseline."""
    found = differences(comparison)
    own = {metric: found[method.name, metric] for metric in wanted(comparison) if (method.name, metric) in found}
    return {
        metric: one
        for metric, one in own.items()
        if one.p is not None and one.p < SIGNIFICANT and sign * one.paired.difference > 0
    }


def validation_score(comparison: Comparison, method: Method) -> float:
    """The mean of the validation metric tuned for; minus infinity where there is none."""
    scores = _validation_scores(comparison, method)
    return statistics.mean(scores) if scores and all(map(math.isfinite, scores)) else -math.inf


def _validation_scores(comparison: Comparison, method: Method) -> list[float]:
    metric = tuned_metric(comparison)
    return [run.validation[metric] for run in method.runs if metric in run.validation]


def tuned_metric(comparison: Comparison) -> str:
    """The validation metric that the tuning maximised."""
    return str(comparison.settings.get("metric", "mean"))


# Whether it is decided -----------------------------------------------------------------------------------------------------


def decided(comparison: Comparison) -> bool:
    """Whether the comparison has an answer; that there is no difference is one, too."""
    return bool(judged(comparison)) and not capped(comparison) and not overtaking(comparison)


def compared(comparison: Comparison) -> list[Method]:
    """The methods that share a seed and a metric with the baseline, without it."""
    baseline = _baseline(comparison)
    return [
        method
        for method in comparison.methods
        if baseline is not None and method is not baseline
        for both in [_shared(method, baseline)]
        if any(own.test.keys() & other.test.keys() for own, other in both)
    ]


def judged(comparison: Comparison) -> list[Method]:
    """Those of the compared methods that have seeds enough for a verdict."""
    baseline = _baseline(comparison)
    return [m for m in compared(comparison) if baseline is not None and len(_shared(m, baseline)) >= ENOUGH_SEEDS]


def capped(comparison: Comparison) -> list[Method]:
    """The methods and controls that a cap has ended. One that has no runs although there was time could not be trained: it is
    not compared, whatever ended its tuning."""
    methods = (*comparison.methods, *comparison.controls)
    return [m for m in methods if m.capped and (m.runs or m.capped.startswith("--time"))]


def gain_of_longer(comparison: Comparison, method: Method) -> float | None:
    """What twice the epochs gain in the validation metric tuned for; None where that was not tried."""
    metric = tuned_metric(comparison)
    if method.longer is None or method.same_length is None:
        return None
    longer, own = method.longer.get(metric), method.same_length.get(metric)
    return None if longer is None or own is None else longer - own


def undertrained(comparison: Comparison) -> dict[str, float]:
    """The methods that gain more than half a point, or than twice the seeds' deviation, by twice the epochs; and how much."""
    gains = {}
    for method in comparison.methods:
        gain = gain_of_longer(comparison, method)
        noise = statistics.std(_validation_scores(comparison, method))
        if gain is not None and gain > min(MUCH_LONGER, 2 * noise if noise is not None else math.inf):
            gains[method.name] = gain
    return gains


def overtaking(comparison: Comparison) -> list[tuple[Method, Method]]:
    """Pairs, one of which is the baseline: the first is behind on validation, but might be ahead after twice the epochs.

    One run each shows what twice the epochs gain. The difference of two such gains must be above four times the seeds'
    deviation, twice its own, to be more than luck.
    """
    baseline, late = _baseline(comparison), undertrained(comparison)
    found = []
    for method in judged(comparison):
        assert baseline is not None
        behind, ahead = sorted((method, baseline), key=lambda one: validation_score(comparison, one))
        gains = [gain_of_longer(comparison, one) for one in (behind, ahead)]
        if behind.name not in late or gains[0] is None or gains[1] is None:
            continue
        noise = max(statistics.std(_validation_scores(comparison, one)) or 0.0 for one in (behind, ahead))
        lead = validation_score(comparison, ahead) - validation_score(comparison, behind)
        if gains[0] - gains[1] > max(lead, 4 * noise):
            found.append((behind, ahead))
    return found
