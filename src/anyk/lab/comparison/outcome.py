"""A comparison of losses: the raw outcome of `anyk compare`, and what follows from it in numbers.

The fields hold what was measured and nothing derived from it; the properties of :class:`Comparison` derive the rest.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anyk.lab import statistics
from anyk.lab.comparison.config import BASELINE, BOUNDED
from anyk.lab.coverage import Coverage
from anyk.lab.errors import Failure
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.summaries import metrics_of
from anyk.lab.statistics import ENOUGH_SEEDS, SIGNIFICANT, Contrast, Paired, holm
from anyk.lab.tables import Difference, Measured

LEARNING_RATE_OF = "softmax, learning rate of "
"""how the name of a control begins, before that of the method whose learning rate it has"""
GOOD_SEEDS = 5
"""what to raise the number of seeds to"""
NOT_COUNTED = "the hits were not counted"
"""why there may be no test"""
MUCH_LONGER = 0.005
"""what twice the epochs may gain in the metric tuned for, before the epochs count as too few"""
ROOM = 0.02
"""a gain that would matter, as a fraction of the test examples"""


@dataclass(frozen=True)
class Try:
    """One point of the tuning, on one or more tuning seeds, at one length."""

    learning_rate: float
    hyperparameter: float | None
    """the value of the method's own hyperparameter, where it has one"""
    epochs: float
    """fewer than the config's own for a short run; of a part of the examples, that part of the epochs"""
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
    """where the best point lies at the end of what is possible, in words: "label smoothing 0, the smallest that is tried\""""
    longer: Mapping[str, float] | None = None
    """the validation metrics of a run of twice the epochs with the tuned config, on the tuning seed"""
    same_length: Mapping[str, float] | None = None
    """those of the tuned config itself, on the same seed: what ``longer`` is to be compared with"""
    half: Mapping[str, float] | None = None
    """those of half the epochs; if they are close, there is no run of twice the epochs"""
    settled: bool = False
    """whether more seeds could hardly have changed the answer, and it was trained on fewer than others"""
    rate_of: str = ""
    """the method whose learning rate this one was given, since that is better for it on validation than what was found"""
    tuned_in: str = ""
    """the folder of the run that was tuned on, on the first tuning seed, of full length if there is one"""

    def measured(self, metric: str) -> Measured | None:
        """A test metric over the seeds, in fractions; None where no run has it."""
        values = tuple(run.test[metric] for run in self.runs if metric in run.test)
        return Measured(values) if values else None


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
    coverages: tuple[Coverage, ...] = ()
    """of every method and control whose runs kept the ranks of the test examples: how many guesses cover how many of them"""
    by_class: ByClass | None = None
    moves: Moves | None = None
    unreadable: tuple[str, ...] = ()
    """files of the data that could not be read and were left out"""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """as in a run's environment.json"""
    failures: tuple[Failure, ...] = ()
    """runs that ended with an error"""

    @property
    def baseline(self) -> Method | None:
        """What the others are measured against."""
        return next((method for method in self.methods if method.name == BASELINE), None)

    @property
    def all_methods(self) -> tuple[Method, ...]:
        """The methods, then the controls."""
        return (*self.methods, *self.controls)

    def shared(self, method: Method) -> list[tuple[SeedRun, SeedRun]]:
        """The runs of the baseline and of a method, with the same seed each."""
        return [] if self.baseline is None else _same_seeds(self.baseline, method)

    def controls_of(self, method: Method) -> list[Method]:
        """What has a part of what the method has, and no more: softmax with its learning rate; of an error loss, gce."""
        found = [control for control in self.controls if control.name == LEARNING_RATE_OF + method.name]
        if loss_names.find(method.config.loss).family == "error":
            found += [other for other in self.methods if other.config.loss == BOUNDED]
        return found

    def pairs(self) -> Iterator[tuple[Method, Method]]:
        """Every method and control with the baseline, and every method with its controls."""
        if self.baseline is not None:
            yield from ((method, self.baseline) for method in self.all_methods if method.name != BASELINE)
        for method in self.methods:
            yield from ((method, control) for control in self.controls_of(method))

    @property
    def metrics(self) -> list[str]:
        """The top-k accuracies of the test that at least one run has, in the order of the report: first those of ``ks``."""
        first = [f"top{k}" for k in self.ks]
        return self._of_a_run(dict.fromkeys([*first, *metrics_of(method.config for method in self.all_methods)]))

    @property
    def others(self) -> list[str]:
        """The further test metrics that at least one run has. They are shown and not tested."""
        ks = sorted(k for k in {*self.ks, 10} if k > 1)
        macro = sorted({1, 5, *self.ks})
        return self._of_a_run(["mrr", *(f"ndcg{k}" for k in ks), *(f"macro_top{k}" for k in macro)])

    def _of_a_run(self, names: Iterable[str]) -> list[str]:
        runs = [run for method in self.all_methods for run in method.runs]
        return [name for name in names if any(name in run.test for run in runs)]

    @property
    def judged_metrics(self) -> list[str]:
        """The metrics that the verdict is about: those of ``ks``, in its order; the first one measured, if none of them was."""
        measured = self.metrics
        return [name for k in self.ks if (name := f"top{k}") in measured] or measured[:1]

    @property
    def differences(self) -> dict[tuple[str, str], Difference]:
        """Every other method and control against the baseline on the seeds that both have, for each (method, metric).

        Only methods in :attr:`judged_metrics` have an interval and a p. The p are corrected by Holm's method over all of them:
        they are one family. There is none where a cap has ended the tuning. What is in :attr:`others` has no hits either.
        """
        found = {
            (method.name, metric): pair
            for method, against in self.pairs()
            for metric in (*self.metrics, *self.others)
            if against.name == BASELINE and (pair := self.difference(method, against, metric)) is not None
        }
        judged = [] if self.capped else [(m.name, k) for m in self.methods for k in self.judged_metrics]
        family = {key: found[key].p for key in judged if key in found}
        corrected = dict(zip(family, holm(list(family.values())), strict=True))
        shown = {}
        for (name, metric), pair in found.items():
            if (name, metric) not in family:
                examples = pair.examples if metric in self.metrics else None
                pair = dataclasses.replace(pair, low=None, high=None, p=None, reason=None, examples=examples)
            shown[name, metric] = Difference(pair, corrected.get((name, metric)))
        return shown

    @property
    def beyond_controls(self) -> dict[tuple[str, str, str], Difference]:
        """Every method against its controls in the judged metrics, for each (method, control, metric): a family of its own."""
        found = {
            (method.name, control.name, metric): pair
            for method in self.methods
            for control in self.controls_of(method)
            for metric in self.judged_metrics
            if (pair := self.difference(method, control, metric)) is not None
        }
        corrected = holm([pair.p for pair in found.values()])
        return {key: Difference(pair, p) for (key, pair), p in zip(found.items(), corrected, strict=True)}

    def difference(self, method: Method, against: Method, metric: str) -> Paired | None:
        """The difference of two methods in one metric on the seeds that both have, and its test if their hits were counted."""
        key = (method.name, against.name, metric)
        for counted in self.contrasts:
            if (counted.method, counted.against, counted.metric) == key:
                return statistics.two_way(counted)
        tests = [(own.test, other.test) for own, other in _same_seeds(method, against)]
        both = [(own, other) for own, other in tests if metric in own and metric in other]
        if not both:
            return None
        mean = statistics.mean([own[metric] - other[metric] for own, other in both])
        return Paired(mean, len(both), reason=NOT_COUNTED, examples=self.data.get("test"))

    @property
    def picked(self) -> Method:
        """The first of :attr:`best_on_validation`. Validation and not test: the test must not choose what it is to judge.

        Where the labels of validation were made wrong, it may rank the losses wrongly, and chooses among what the test
        confirms, if there is anything: Holm's correction is over all of them.
        """
        sure = self.all_confirmed if self.wrong_labels else []
        return max(sure, key=self.validation_score) if sure else self.best_on_validation[0]

    @property
    def wrong_labels(self) -> bool:
        """Whether labels were made wrong, those of validation as well."""
        return any(method.config.label_noise for method in self.methods)

    @property
    def best_on_validation(self) -> list[Method]:
        """The methods with the best mean of the validation metric tuned for, softmax before all others. They are several where
        the means are equal but for rounding. Those that were settled on fewer seeds are not among them, unless all were: on the
        seeds that all have, they were behind."""
        open_ = [method for method in self.methods if not method.settled] or self.methods
        ranked = sorted(open_, key=lambda method: method.name != BASELINE)
        best = max(map(self.validation_score, ranked), default=-math.inf)
        return [method for method in ranked if math.isclose(self.validation_score(method), best, rel_tol=1e-9)]

    @property
    def rival(self) -> Method | None:
        """What is picked, or else the best other method on validation, of those that share a seed with the baseline."""
        others = dataclasses.replace(self, methods=tuple(self.compared))
        if not others.methods:
            return None
        return self.picked if self.picked in others.methods else others.best_on_validation[0]

    @property
    def choice(self) -> Method:
        """What to use: the method that is picked if the test confirms it, otherwise the baseline."""
        best = self.picked
        return best if self.decided and self.confirmed(best) else self.baseline or best

    def confirmed(self, method: Method) -> bool:
        """Whether the test shows that a method gains in a judged metric, and loses in none, on all seeds."""
        return bool(self.significant(method, 1)) and not self.significant(method, -1) and not self.lost_seeds(method)

    @property
    def all_confirmed(self) -> list[Method]:
        """Every method that the test confirms, whether or not validation picks it."""
        return [method for method in self.judged if self.confirmed(method)]

    def lost_seeds(self, method: Method) -> int:
        """On how many seeds a method has no result, though another has: what is left may be the lucky ones."""
        seeds = {run.seed for other in self.methods for run in other.runs}
        return 0 if method.settled else len(seeds - {run.seed for run in method.runs})

    def significant(self, method: Method, sign: int) -> dict[str, Difference]:
        """The judged metrics in which the test shows a gain (sign 1) or a loss (sign -1) against the baseline."""
        found = self.differences
        own = {metric: found[method.name, metric] for metric in self.judged_metrics if (method.name, metric) in found}
        return {
            metric: one
            for metric, one in own.items()
            if one.p is not None and one.p < SIGNIFICANT and sign * one.paired.difference > 0
        }

    def surely_ahead(self, one: Method, other: Method) -> bool:
        """Whether a method is better on validation than another by more than a standard error over the seeds that both have."""
        metric = self.tuned_metric
        both = [(a.validation, b.validation) for a, b in _same_seeds(one, other)]
        leads = [a[metric] - b[metric] for a, b in both if metric in a and metric in b]
        if len(leads) < 2:
            return self.validation_score(one) > self.validation_score(other)
        return statistics.mean(leads) > (statistics.std(leads) or 0.0) / math.sqrt(len(leads))

    def validation_score(self, method: Method) -> float:
        """The mean of the validation metric tuned for; minus infinity where there is none."""
        scores = self._validation_scores(method)
        return statistics.mean(scores) if scores and all(map(math.isfinite, scores)) else -math.inf

    def _validation_scores(self, method: Method) -> list[float]:
        metric = self.tuned_metric
        return [run.validation[metric] for run in method.runs if metric in run.validation]

    @property
    def tuned_metric(self) -> str:
        """The validation metric that the tuning maximised."""
        return str(self.settings.get("metric", "mean"))

    @property
    def decided(self) -> bool:
        """Whether there is an answer; that there is no difference is one, too."""
        return bool(self.judged) and not self.capped and not self.unconfirmed and not self.overtaking

    @property
    def unconfirmed(self) -> list[tuple[Method, str]]:
        """The gains, as method and metric, that a few seeds show and cannot confirm, if nothing is confirmed: the interval is
        above 0, but not after Holm's correction; or, of the method that validation picks, it reaches a gain that would matter.
        """
        if self.all_confirmed:
            return []
        found, pick = self.differences, self.picked

        def may_be_one(method: Method, gain: Paired) -> bool:
            if gain.low is None or gain.high is None:
                return False
            # Of a settled method it is known that more seeds could hardly confirm it.
            matters = method is pick and not method.settled and gain.difference > 0 and gain.high > ROOM
            return gain.low > 0 or matters

        return [
            (method, metric)
            for method in self.judged
            if len(self.shared(method)) < GOOD_SEEDS and not self.significant(method, -1) and not self.lost_seeds(method)
            for metric in self.judged_metrics
            if (one := found.get((method.name, metric))) is not None and may_be_one(method, one.paired)
        ]

    @property
    def compared(self) -> list[Method]:
        """The methods that share a seed and a metric with the baseline, without it."""
        return [
            method
            for method in self.methods
            if method.name != BASELINE and any(own.test.keys() & other.test.keys() for own, other in self.shared(method))
        ]

    @property
    def judged(self) -> list[Method]:
        """Those of the compared methods that have seeds enough for a verdict."""
        return [method for method in self.compared if len(self.shared(method)) >= ENOUGH_SEEDS]

    @property
    def capped(self) -> list[Method]:
        """The methods and controls that a cap has ended.

        One that has no runs although there was time could not be trained: it is not compared, whatever ended its tuning.
        """
        return [m for m in self.all_methods if m.capped and (m.runs or m.capped.startswith("--time"))]

    def tuned_score(self, method: Method) -> float:
        """The best score of the tuning on its first seed, of the longest runs: all that is known before the first seed of the
        comparison; minus infinity where there is none."""
        longest = max((one.epochs for one in method.tries if one.scores[0] is not None), default=0.0)
        scores = [one.scores[0] for one in method.tries if one.epochs == longest]
        return max((score for score in scores if score is not None), default=-math.inf)

    def gain_of_longer(self, method: Method) -> float | None:
        """What twice the epochs gain in the validation metric tuned for; None where that was not tried."""
        metric = self.tuned_metric
        if method.longer is None or method.same_length is None:
            return None if method.half is None else 0.0  # the second half of the epochs gained little: as many again, less
        longer, own = method.longer.get(metric), method.same_length.get(metric)
        return None if longer is None or own is None else longer - own

    @property
    def undertrained(self) -> dict[str, float]:
        """What methods gain by twice the epochs, of those that gain more than half a point or twice the seeds' deviation."""
        gains = {}
        for method in self.methods:
            gain = self.gain_of_longer(method)
            noise = statistics.std(self._validation_scores(method))
            if gain is not None and gain > min(MUCH_LONGER, 2 * noise if noise is not None else math.inf):
                gains[method.name] = gain
        return gains

    @property
    def overtaking(self) -> list[tuple[Method, Method]]:
        """Pairs, one of which is the baseline: the first is behind on validation, but might be ahead after twice the epochs.

        One run each shows what twice the epochs gain. The difference of two such gains must be above four times the seeds'
        deviation, twice its own, to be more than luck.
        """
        baseline, late = self.baseline, self.undertrained
        found = []
        for method in self.judged:
            assert baseline is not None
            pairs = zip(
                (method, baseline), zip(*((own, other) for other, own in self.shared(method)), strict=True), strict=True
            )
            behind, ahead = sorted((dataclasses.replace(one, runs=runs) for one, runs in pairs), key=self.validation_score)
            gains = [self.gain_of_longer(one) for one in (behind, ahead)]
            if behind.name not in late or gains[0] is None or gains[1] is None:
                continue
            noise = max(statistics.std(self._validation_scores(one)) or 0.0 for one in (behind, ahead))
            lead = self.validation_score(ahead) - self.validation_score(behind)
            if gains[0] - gains[1] > max(lead, 4 * noise):
                found.append((behind, ahead))
        return found


def contrasts(comparison: Comparison, out: str | Path) -> tuple[Contrast, ...]:
    """Count the hits that every method and control gains on the baseline, and every method on its controls.

    Reads ``test.safetensors`` of the runs. Runs without it, and pairs without a common seed, have no contrast.

    Args:
        comparison: the methods and controls with their runs.
        out: the folder that the runs' folders are in.
    """
    kept = {run.folder: tested(run, out, "ranks", "groups") for method in comparison.all_methods for run in method.runs}
    found = []
    for method, against in comparison.pairs():
        seeds = [(kept[own.folder], kept[other.folder]) for own, other in _same_seeds(method, against)]
        read = [(own, other) for own, other in seeds if own is not None and other is not None]
        for metric in comparison.metrics if read else ():
            k = int(metric.removeprefix("top"))
            hits = [(own["ranks"] <= k).astype("int8") - (other["ranks"] <= k) for own, other in read]
            clusters = read[0][0].get("groups")
            found.append(statistics.contrast(method.name, against.name, metric, np.stack(hits), clusters))
    return tuple(found)


def coverages(comparison: Comparison, out: str | Path) -> tuple[Coverage, ...]:
    """Count how many guesses of every method and control cover how many test examples. The arguments are those of
    :func:`contrasts`."""
    found = []
    for method in comparison.all_methods:
        kept = [ranks["ranks"] for run in method.runs if (ranks := tested(run, out, "ranks")) is not None]
        if any(map(len, kept)):
            found.append(Coverage.of(method.name, np.concatenate(kept), comparison.data["classes"]))
    return tuple(found)


def tested(run: SeedRun, out: str | Path, *tensors: str) -> dict[str, NDArray[Any]] | None:
    """What a run kept of its test examples, of these tensors; None where it kept nothing."""
    found = Run(Path(out) / run.folder).load_tensors("test.safetensors", tensors)
    return None if found is None else {name: tensor.numpy() for name, tensor in found[0].items()}


def _same_seeds(method: Method, other: Method) -> list[tuple[SeedRun, SeedRun]]:
    """The runs of both with the same seeds."""
    others = {run.seed: run for run in other.runs}
    return [(run, others[run.seed]) for run in sorted(method.runs, key=lambda run: run.seed) if run.seed in others]
