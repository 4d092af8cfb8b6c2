"""The search of a comparison: each loss is tuned on validation, all with as many tries; then each is trained with the same
seeds, and only these runs are measured on the test examples.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from anyk import info
from anyk.lab import engines, files
from anyk.lab.comparison import report_page, results, tuning
from anyk.lab.comparison.changed_predictions import count_classes, find_moves
from anyk.lab.comparison.config import ComparisonConfig, metric_of
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, Comparison, Method, SeedRun, Try, contrasts
from anyk.lab.comparison.tuning import TUNING_SEEDS, Axis, Point, Trial, Tuner
from anyk.lab.comparison.verdict import counted
from anyk.lab.data import Dataset, Parts
from anyk.lab.data.tokens import Windows
from anyk.lab.engines.engine import Outcome, Task
from anyk.lab.errors import Failure, LabError, Stopped
from anyk.lab.run import loss_names
from anyk.lab.run.batches import (
    check_seen,
    check_setting,
    describe,
    divide,
    read_data,
    resolved,
    shuffle_of,
    steps_per_epoch,
    windows_in_batch,
    windows_of,
)
from anyk.lab.run.config import Config
from anyk.lab.run.losses import criterion, trained_ks
from anyk.lab.run.run_folder import Run
from anyk.lab.run.summaries import METRICS
from anyk.lab.run.training import Progress
from anyk.lab.tables import duration, title
from anyk.lab.warn_once import warn_once

#: the seeds of the tuning; those of the comparison are 1, 2, …
TUNING_SEED_NUMBERS = (0, 10_001, 10_002)
assert len(TUNING_SEED_NUMBERS) == TUNING_SEEDS
#: the short runs of the first stage have this part of the epochs, if there are enough to divide
SHORT = 4
#: settings that say how far a comparison goes, not what is compared
CAPS = {"seeds", "budget", "time"}
#: what starting a process and reading the data take, roughly: for the plan's time
START_SECONDS = 0.5


def search(
    config: ComparisonConfig,
    *,
    command: str = "",
    on_progress: Callable[[Path, Progress], None] = lambda folder, progress: None,
    on_plan: Callable[[str], None] = lambda sentence: None,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Tune every loss on validation until its best point lies inside what was tried, train it with further seeds, and write
    the report.

    Runs that an earlier call has finished in the same folder are not run again, so a larger cap goes on where a smaller one
    ended.

    Args:
        config: what to compare.
        command: what to type to get the same again.
        on_progress: called with a run's folder and where it stands.
        on_plan: called with a few sentences before the first run, and with the time it will take after its first steps.
        clock: seconds, for the time that the whole may take.
    """
    dataset = read_data(config)
    classes = len(dataset.classes)
    # How the examples are shuffled may depend on a machine's memory: each run finds that out for itself.
    config = resolved(config, dataset).replace(**shuffle_of(config)).with_ks(classes)
    # Before hours of training, not after.
    check_setting(config if config.engine == "local" else config.replace(device="cpu"), dataset)  # the nodes have the GPUs
    config = config.replace(measure=measured_ks(config, classes))
    starts = [started(config.run_config(loss), classes) for loss in config.losses]
    parts = divide(dataset, config)
    for start in starts:
        check_seen(start, dataset, parts, max(trained_ks(criterion(start, classes), start)))
    windows = windows_of(dataset, parts, dataset.train.labels, config)
    jobs = config.jobs or os.cpu_count() or 1
    estimate = _Estimate(config, config.epochs * steps_per_epoch(config, parts, windows), jobs, on_plan)

    def watch(folder: Path, progress: Progress) -> None:
        estimate.see(folder, progress)
        on_progress(folder, progress)

    out = config.folder
    limit = _Limit(config, clock)
    with Run(out).locked(), engines.make(config.engine, config.address, config.jobs, watch, lambda: limit.over) as pool:
        jobs = estimate.jobs = pool.room(config)
        for sentence in _plan(config, dataset, parts, windows, estimate.runs, jobs):
            on_plan(sentence)
        study = _Study(out, dataset.fingerprint, config.seeds, limit)
        searches = [
            Search(
                study,
                start,
                axes(start),
                examples=len(parts.validation),
                shortens=config.epochs >= SHORT,
                budget=config.budget,
                expired=lambda: limit.is_near(estimate.reserve()),
            )
            for start in starts
        ]
        pool.run_tasks([one.make(one.search()) for one in searches])
        while (tries := tuning.behind(searches)) is not None:
            pool.run_tasks([one.make(one.spend(tries)) for one in searches])
        methods = pool.run_tasks([study.method(one) for one in searches])
        outcome = Comparison(
            data=describe(dataset, parts, config),
            command=command,
            settings=config.recorded(),
            methods=tuple(methods),
            ks=config.ks,
            environment=info.environment(),
        )
        outcome = dataclasses.replace(outcome, contrasts=contrasts(outcome, out))
        softmax = methods[0]
        winners = [
            method
            for method in methods
            if outcome.significant(method, 1) and method.config.learning_rate != softmax.config.learning_rate
        ]
        if winners:
            controls = pool.run_tasks([study.control(softmax, winner) for winner in winners])
            outcome = dataclasses.replace(outcome, controls=tuple(controls))
            outcome = dataclasses.replace(outcome, contrasts=contrasts(outcome, out))
        outcome = dataclasses.replace(
            outcome,
            by_class=count_classes(outcome, out, dataset, parts),
            moves=find_moves(outcome, out, dataset, parts),
            unreadable=dataset.unreadable,
            failures=tuple(study.failures),
        )
        _write(outcome, out)
    return outcome


def started(config: Config, classes: int) -> Config:
    """What the search of a config starts with: the same, but for SL@K.

    Below a temperature of about log(n) / 2 that loss pushes untrained targets away, whatever the learning rate: a search that
    starts there has nothing to climb.
    """
    if config.loss != "softmax_at_k":
        return config
    enough = 2.0 ** math.ceil(math.log2(2 * math.log(classes)))
    return config.replace(temperature=max(config.temperature, enough))


def axes(start: Config) -> list[Axis]:
    """What is tuned of a config: the learning rate, then the hyperparameter that the loss has of its own; where it has a share
    of cross-entropy, also whether that is smoothed, as softmax may be.
    """
    loss = loss_names.find(start.loss)
    name, rates = loss.hyperparameter, tuning.learning_rates(start.learning_rate)
    if not loss_names.CANDIDATES[name]:
        # Factors of 4, then 2, and the root of 2 for extra tries; from 1/256 to 256 times the start.
        return [rates, tuning.geometric(name, getattr(start, name), base=2, places=2, powers=8, steps=(4, 2))]
    found = [rates, tuning.listed(name, getattr(start, name), loss_names.CANDIDATES[name])]
    if loss.family in ("error", "gce") and start.ce_weight > 0:
        found.append(tuning.listed("label_smoothing", start.label_smoothing, loss_names.SMOOTHED))
    return found


def expected_runs(config: ComparisonConfig) -> int:
    """How many runs there will be, roughly: it depends on where the best points lie."""
    points = min(tuning.USUAL_POINTS, config.budget or tuning.USUAL_POINTS)
    repeats = min(tuning.USUAL_REPEATS, 4 * (points - 1))  # of one point there is nothing to choose
    shortens = config.epochs == 0 or config.epochs >= SHORT  # 0: by the kind of data, which is not read yet
    return len(config.losses) * (tuning.COARSE_POINTS * shortens + points + repeats + 1 + config.seeds) + config.seeds


class Runs:
    """Runs in folders of their own, which are found again by all that a run depends on.

    Args:
        out: where the folders are, in ``runs``.
        fingerprint: of the data.
        out_of_time: whether runs that were stopped half-way were so because there is no time left.
    """

    def __init__(self, out: Path, fingerprint: str, out_of_time: Callable[[], bool] = lambda: False) -> None:
        self.out, self.fingerprint, self.out_of_time = out, fingerprint, out_of_time
        self.failures: list[Failure] = []

    def run(self, configs: Sequence[Config]) -> Task[list[Outcome]]:
        """Make these runs; those for which there was no time have neither a result nor an error."""
        outcomes = yield {self.folder(config): config for config in configs}
        if any(outcome == Outcome() for outcome in outcomes.values()) and not self.out_of_time():
            raise Stopped
        found = [(folder.name, outcome) for folder, outcome in outcomes.items()]
        # That a rate is too large is what a search finds out; all else is a failure.
        self.failures += [Failure(name, outcome.error) for name, outcome in found if outcome.error and not outcome.diverged]
        return [outcomes[self.folder(config)] for config in configs]

    def folder(self, config: Config) -> Path:
        """A run's folder: its name follows from all that the run depends on, so that the same run is found again."""
        content = json.dumps([self.fingerprint, config.to_json()], sort_keys=True).encode()
        digest = hashlib.blake2b(content, digest_size=5).hexdigest()
        return self.out / "runs" / f"{config.loss}-seed{config.seed}-{digest}"


class Search(Tuner):
    """The tuning of one method: the search, with runs to make its trials.

    Args:
        runs: makes them.
        start: the config to start with.
        axes: the fields of it to tune, the learning rate first.
        settings: as :class:`~anyk.lab.comparison.tuning.Tuner` takes them.
    """

    def __init__(self, runs: Runs, start: Config, axes: Sequence[Axis], **settings: Any) -> None:
        super().__init__(axes, **settings)
        self.runs, self.start = runs, start
        self.failed: list[Failure] = []

    def config(self, trial: Trial) -> Config:
        """What a trial runs. It does not look at the test examples."""
        epochs = self.start.epochs // SHORT if trial.short else self.start.epochs
        return self.at(trial.point).replace(epochs=epochs, seed=TUNING_SEED_NUMBERS[trial.seed], tested=False)

    def at(self, point: Point) -> Config:
        """The config at a point."""
        changes = dict(zip((axis.name for axis in self.axes), self.values(point), strict=True))
        # One number is tuned, and a rate of the head keeps its ratio to it.
        if self.start.head_learning_rate:
            factor = changes["learning_rate"] / self.start.learning_rate
            changes["head_learning_rate"] = self.start.head_learning_rate * factor
        return self.start.replace(**changes)

    def make(self, rounds: Iterator[list[Trial]]) -> Task[None]:
        """Make the trials that the search asks for, as far as there is time."""
        for trials in rounds:
            configs = [self.config(trial) for trial in trials]
            outcomes = yield from self.runs.run(configs)
            for trial, config, outcome in zip(trials, configs, outcomes, strict=True):
                if outcome == Outcome():
                    self.stop()
                    continue
                if outcome.error is not None:
                    self.failed.append(Failure(self.runs.folder(config).name, outcome.error))
                validation = outcome.result["validation"] if outcome.result else {}
                self.tell(trial, validation.get(metric_of(self.start)))
            if any(outcome == Outcome() for outcome in outcomes):
                return

    def record(self) -> Iterator[Try]:
        """The points in the order in which they were tried."""
        for trial in self.scores:
            if trial.seed == 0:
                rate, hyperparameter, *smoothing = self.values(trial.point)
                scores = (self.scores[trial],) if trial.short else tuple(self.seeds(trial.point))
                yield Try(rate, hyperparameter, self.config(trial).epochs, scores, *smoothing)


class _Study(Runs):
    """The runs of a comparison."""

    def __init__(self, out: Path, fingerprint: str, seeds: int, limit: "_Limit") -> None:
        super().__init__(out, fingerprint, lambda: limit.over)
        self.limit, self.seeds = limit, range(1, seeds + 1)

    def method(self, search: Search) -> Task[Method]:
        """Train a loss that was tuned: on every seed, and for twice the epochs on the seed of the tuning."""
        best = search.best
        found = Method(
            name=search.start.loss,
            config=search.start if best is None else search.at(best),
            tries=tuple(search.record()),
            runs=(),
            hyperparameter=search.axes[1].name,
            capped=self.limit.option if search.capped == tuning.TIME else search.capped,
            bounds=search.bounds,
        )
        if best is None:
            self.failures += [failure for failure in search.failed if failure not in self.failures][:1]
            return found
        tuned = found.config
        same = tuned.replace(seed=TUNING_SEED_NUMBERS[0], tested=False)
        again, longer, *seeded = yield from self.run([same, same.replace(epochs=2 * tuned.epochs), *self._seeded(tuned)])
        return dataclasses.replace(
            found,
            runs=self._seed_runs(tuned, seeded),
            capped=found.capped or (self.limit.option if Outcome() in (again, longer, *seeded) else ""),
            longer=longer.result["validation"] if longer.result and again.result else None,
            same_length=again.result["validation"] if longer.result and again.result else None,
        )

    def control(self, softmax: Method, winner: Method) -> Task[Method]:
        """Softmax with another method's learning rate: what that method would gain by its rate alone."""
        rate, head = winner.config.learning_rate, softmax.config.head_learning_rate
        config = softmax.config.replace(learning_rate=rate, head_learning_rate=head * (rate / softmax.config.learning_rate))
        outcomes = yield from self.run(self._seeded(config))
        # That softmax diverges at this rate is an answer, too.
        runs = self._seed_runs(config, outcomes, must_end=False)
        late = self.limit.option if Outcome() in outcomes else ""
        return Method(LEARNING_RATE_OF + winner.name, config, (), runs, softmax.hyperparameter, capped=late)

    def _seeded(self, config: Config) -> list[Config]:
        return [config.replace(seed=seed) for seed in self.seeds]

    def _seed_runs(self, tuned: Config, outcomes: Sequence[Outcome], must_end: bool = True) -> tuple[SeedRun, ...]:
        runs = []
        for config, outcome in zip(self._seeded(tuned), outcomes, strict=True):
            folder = self.folder(config)
            if outcome.error is not None and outcome.diverged and must_end:
                self.failures.append(Failure(folder.name, outcome.error))
            if outcome.result is not None:
                result, curve = outcome.result, tuple(Run(folder).metrics())
                name = folder.relative_to(self.out).as_posix()
                runs.append(SeedRun(config.seed, result["test"], result["validation"], result["seconds"], name, curve))
        return tuple(runs)


class _Limit:
    """The time that the whole may take: at its end the runs write a checkpoint and stop, and no other is started."""

    def __init__(self, config: ComparisonConfig, clock: Callable[[], float]) -> None:
        self.seconds, self.clock = config.seconds, clock
        self.option, self.started = f"--time {config.time}", clock()

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.is_near(0.0)

    def is_near(self, reserve: float) -> bool:
        """Whether less than ``reserve`` seconds are left. At most half of the time is reserved: the tuning gets the rest."""
        if self.seconds is None:
            return False
        return self.clock() - self.started >= self.seconds - min(reserve, self.seconds / 2)


class _Estimate:
    """How long the whole will take, from the first steps of the first run that takes some."""

    def __init__(self, config: ComparisonConfig, steps: int, jobs: int, tell: Callable[[str], None]) -> None:
        self.steps, self.jobs, self.tell = steps, jobs, tell
        self.runs, self.losses, self.seeds = expected_runs(config), len(config.losses), config.seeds
        self.run_seconds: float | None = None
        self._found = 0
        self._first: dict[Path, tuple[float, int]] = {}

    def see(self, folder: Path, progress: Progress) -> None:
        """Take note of where a run stands."""
        now = time.monotonic()
        if self.run_seconds is not None:
            return
        since, step = self._first.setdefault(folder, (now, progress.step))
        if progress.step == step:
            self._found += progress.step == progress.steps  # of an earlier call
            return
        if now - since < 3 and progress.step < progress.steps:
            return
        self.run_seconds = (now - since) / (progress.step - step) * self.steps
        # The short ones cost less than they count, the long one of each method more.
        full = self.runs - self.losses * (tuning.COARSE_POINTS * (1 - 1 / SHORT) - 1)
        left = max(1 - self._found / self.runs, 0.0)
        seconds = left * (full * self.run_seconds + self.runs * START_SECONDS) / self.jobs
        self.tell(f"That will take about {duration(seconds)}, as the first steps show.")

    def reserve(self) -> float:
        """The seconds that the runs after the tuning will take."""
        runs = self.losses * (self.seeds + 2) + self.seeds
        return runs * ((self.run_seconds or 0.0) + START_SECONDS) / self.jobs


def measured_ks(config: ComparisonConfig, classes: int) -> tuple[int, ...]:
    """The k that all methods measure beside the usual ones, so that what one of them trains for is known of all."""
    runs = [config.run_config(loss) for loss in config.losses]
    trained = {k for run in runs for k in trained_ks(criterion(run, classes), run)}
    ks = {*config.measure, *config.ks, *trained}
    return tuple(sorted(k for k in ks if f"top{k}" not in METRICS and k < classes))


def _plan(
    config: ComparisonConfig, dataset: Dataset, parts: Parts, windows: Windows | None, runs: int, jobs: int
) -> Iterator[str]:
    """What will be done, in sentences."""
    shape = tuple(dataset.train.shape)
    kind = f"images of {' x '.join(map(str, shape))}"
    if dataset.kind == "embeddings":
        kind = f"{shape[0]} features, {'standardised' if config.standardize else 'as they are'}"
    elif dataset.kind == "sequences":
        kind = f"each from up to {counted(config.context, 'token')} before it"
    yield (
        f"{dataset.name}: {len(parts.train):,} examples to train with, {len(parts.validation):,} for validation, "
        f"{len(parts.test_index):,} for the test; {len(dataset.classes):,} classes; {kind}."
    )
    yield from dataset.remarks
    batches = f"batches of {config.batch_size}"
    if windows is not None:
        count = counted(windows_in_batch(config, windows), "window")
        batches = f"batches of {count} of {counted(windows.length, 'token')}, of which each place trains"
    at_once = f"{counted(jobs, 'run')} at a time"
    yield f"Model {config.model}, {counted(config.epochs, 'epoch')}, {batches}, on {config.device}, {at_once}."
    metric, shown = metric_of(config), " and ".join(title(f"top{k}") for k in config.ks)
    meaning = title(metric) if metric != "mean" else shown if len(config.ks) == 1 else f"the mean of {shown}"
    yield f"{', '.join(config.losses)}, each tuned on validation for {meaning}: about {runs} runs."


def _write(outcome: Comparison, out: Path) -> None:
    """The report, and the model of the chosen method's best seed; not in the place of an outcome that says more."""
    runs, model, content = outcome.choice.runs, out / "model.safetensors", results.to_json(outcome)
    page = report_page.render(outcome).encode()
    try:
        before = files.read_object(out / "results.json", "")
        earlier = f"the outcome of `{before['command']}`"
        ended, ended_before = (sum(len(method["runs"]) for method in each["methods"]) for each in (content, before))
        same = all(before["settings"].get(name) == content["settings"][name] for name in content["settings"].keys() - CAPS)
    except (LabError, KeyError, TypeError, AttributeError):  # there is none that could be read
        ended, ended_before, same, earlier = 1, 0, True, ""
    if not ended and ended_before:
        warn_once(f"There is nothing to report yet, and {out} keeps {earlier}.")
        return
    if ended_before and not (same and ended >= ended_before):
        warn_once(f"{out} held {earlier}, which is now in {_set_aside(out)}.")
    files.write_object(out / "results.json", content)
    files.write_atomically(out / "report.html", page)
    if runs:
        run = max(runs, key=lambda run: run.validation.get(outcome.settings["metric"], 0.0))
        with files.replacing(model) as temporary:
            shutil.copyfile(out / run.folder / "model.safetensors", temporary)
    else:
        model.unlink(missing_ok=True)  # of an earlier outcome: it must not stand beside this one


def _set_aside(out: Path) -> Path:
    """A new folder with copies of what :func:`_write` has written before."""
    place = next(place for number in itertools.count(1) if not (place := out / f"earlier-{number}").exists())
    place.mkdir()
    for name in ("results.json", "report.html", "model.safetensors"):
        if (out / name).exists():
            with files.replacing(place / name) as temporary:
                shutil.copyfile(out / name, temporary)
    return place
