"""The search of a comparison: each loss is tuned on validation, all with as many tries; then each is trained with the same
seeds, and only these runs are measured on the test examples.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyk import info
from anyk.lab import engines, files, statistics
from anyk.lab.comparison import report_page, results, tuning
from anyk.lab.comparison.changed_predictions import count_classes, find_moves
from anyk.lab.comparison.config import BASELINE, ComparisonConfig, metric_of
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, MUCH_LONGER, Comparison, Method, SeedRun, Try, contrasts, coverages
from anyk.lab.comparison.tuning import EFFORTS, Axis, Effort, Point, Trial, Tuner
from anyk.lab.comparison.verdict import counted
from anyk.lab.data import Dataset, Parts
from anyk.lab.data.tokens import Windows
from anyk.lab.engines.engine import Engine, Outcome, Task
from anyk.lab.errors import Failure, LabError, Stopped
from anyk.lab.run import loss_names, models
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
#: a short run has this part of the epochs, or of the training examples if there are too few epochs to divide
SHORT = 4
#: a short run of fewer steps would tell nothing
FEWEST_STEPS = 5
#: settings that say how far a comparison goes, not what is compared
CAPS = {"effort", "seeds", "budget", "time"}
#: what starting a process and reading the data take, roughly, and how long to look before the time is told
START_SECONDS, LOOK_SECONDS = 0.5, 30.0
#: a run of half the epochs, in trainings
HALF = 0.5
#: after so many seeds, those whose p is above this in every metric are not trained on further ones
FIRST_LOOK, FUTILE = 3, 0.3


def search(
    config: ComparisonConfig,
    *,
    command: str = "",
    on_progress: Callable[[Path, Progress], None] = lambda folder, progress: None,
    on_plan: Callable[[str], None] = lambda sentence: None,
    on_cost: Callable[[float, float], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Tune every loss on validation, all with as many tries, train it with further seeds, and write the report.

    Runs that an earlier call has finished in the same folder are not run again, so a larger cap goes on where a smaller one
    ended.

    Args:
        config: what to compare.
        command: what to type to get the same again.
        on_progress: called with a run's folder and where it stands.
        on_plan: called with a few sentences before the first run, and with the time it will take after the first steps.
        on_cost: called with how many full trainings are done, and how many there will be as far as is known.
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
    windows = windows_of(dataset, parts, config)
    steps = config.epochs * steps_per_epoch(config, parts, windows)
    # On a GPU of this machine one run at a time: several would share its memory. The nodes of a cluster know their own.
    at_once = config.jobs or int(config.engine == "local" and config.device.startswith("cuda"))
    jobs = at_once or engines.usable_cores()
    # A look at an example takes about a third of a step with it; that at the test comes with the seeds alone.
    tested = len(parts.test_index) / (3 * config.epochs * len(parts.train) + len(parts.validation))
    cost = _Cost(config, steps, jobs, tested, on_plan, on_cost)

    def watch(folder: Path, progress: Progress) -> None:
        cost.see(folder, progress)
        on_progress(folder, progress)

    out = config.folder
    limit = _Limit(config, clock)
    with Run(out).locked(), engines.make(config.engine, config.address, at_once, watch, lambda: limit.over) as pool:
        jobs = cost.jobs = pool.room(config)
        for sentence in _plan(config, dataset, parts, windows, jobs):
            on_plan(sentence)
        study = _Study(out, dataset.fingerprint, limit)
        searches = tune(
            pool,
            study,
            starts,
            effort=config.level,
            examples=len(parts.validation),
            shortens=shortens(steps),
            budget=config.budget,
            expired=lambda: limit.is_near(cost.reserve()),
        )

        check = 0.0 if config.effort == "quick" else (2.0 if config.epochs == 1 else HALF) * len(searches)

        def judge(seeds: Mapping[str, int]) -> Comparison:
            """The comparison with so many seeds of each method."""
            tuned = [(one.at(one.best), seeds[one.start.loss]) for one in searches if one.best is not None]
            runs = [study.folder(config) for start, count in tuned for config in _seeded(start, count)]
            cost.expect(sum(not cost.has(folder) for folder in runs) + check)
            methods = pool.run_tasks([study.method(one, seeds[one.start.loss]) for one in searches])
            found = Comparison(
                data=describe(dataset, parts, config),
                command=command,
                settings=config.recorded(),
                methods=tuple(methods),
                ks=config.ks,
                environment=info.environment(),
            )
            return dataclasses.replace(found, contrasts=contrasts(found, out))

        if config.seconds is not None:  # one of each before the next: what is there when the time is over can be compared
            judge(dict.fromkeys(config.losses, 1))
        seeds = dict.fromkeys(config.losses, config.most_seeds)
        if config.seeds is None and config.most_seeds > FIRST_LOOK:
            early = futile(judge(dict.fromkeys(config.losses, FIRST_LOOK)))
            seeds |= dict.fromkeys(early, FIRST_LOOK)
        outcome = judge(seeds)
        settled = {name for name, count in seeds.items() if count < config.most_seeds and not outcome.capped}
        methods = [dataclasses.replace(one, settled=one.name in settled) for one in outcome.methods]
        outcome = dataclasses.replace(outcome, methods=tuple(methods))
        asked: set[str] = set()
        while winners := [one for one in uncontrolled(outcome) if one.name not in asked]:
            softmax, asked = outcome.methods[0], asked | {one.name for one in winners}
            cost.expect(len(winners) * seeds[softmax.name] + check)
            controls = pool.run_tasks([study.control(softmax, winner, seeds[softmax.name]) for winner in winners])
            outcome = with_better_baseline(dataclasses.replace(outcome, controls=(*outcome.controls, *controls)))
            outcome = dataclasses.replace(outcome, contrasts=contrasts(outcome, out))
        if check:
            methods = pool.run_tasks([study.check_length(one) for one in outcome.methods])
            outcome = dataclasses.replace(outcome, methods=tuple(methods))
        outcome = dataclasses.replace(
            outcome,
            coverages=coverages(outcome, out),
            by_class=count_classes(outcome, out, dataset, parts),
            moves=find_moves(outcome, out, dataset, parts),
            unreadable=dataset.unreadable,
            failures=tuple(study.failures),
        )
        _write(outcome, out)
    return outcome


def tune(engine: Engine, runs: "Runs", starts: Sequence[Config], **settings: Any) -> list["Search"]:
    """The searches of these configs, at their end: all with as many tries.

    A search in short runs is made for the first method before the others, which begin at its best learning rate.

    Args:
        engine: makes the runs.
        runs: their folders.
        starts: what the searches start with; the first is softmax.
        settings: as :class:`~anyk.lab.comparison.tuning.Tuner` takes them.
    """
    searches = [Search(runs, start, axes(start), **settings) for start in starts]
    first, *others = searches
    if first.short:
        engine.run_tasks([first.make(first.search())])
        for one in others:
            one.rate = None if first.best is None else first.best[0]
    engine.run_tasks([one.make(one.search()) for one in (others if first.short else searches)])
    while (looks := tuning.behind(searches)) is not None:
        engine.run_tasks([one.make(one.spend(looks)) for one in searches])
    engine.run_tasks([one.make(one.promote()) for one in searches])
    return searches


def shortens(steps: int) -> bool:
    """Whether there can be short runs, where a run has so many steps."""
    return steps >= SHORT * FEWEST_STEPS


def shortened(config: Config) -> Config:
    """A short run of a config."""
    if config.epochs >= SHORT:
        return config.replace(epochs=config.epochs // SHORT)
    return config.replace(train_fraction=config.train_fraction / SHORT)


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


def expected_trainings(config: ComparisonConfig, effort: Effort | None = None, short_runs: bool = True) -> float:
    """What a comparison costs, roughly, in trainings of full length: it depends on where the best points lie.

    Args:
        config: what to compare.
        effort: another than the config's.
        short_runs: whether there can be such.
    """
    level = effort or config.level
    short, points, repeats = level.usual
    if not short_runs:  # all points are tried at full length
        first, others, _ = EFFORTS["thorough"].usual
        short, points = 0, first + others
    if effort is None and config.budget is not None:
        points, repeats = min(points, config.budget), min(repeats, 4 * (config.budget - 1))  # of one, nothing is chosen
    seeds = config.seeds or level.seeds
    check = 0.0 if level is EFFORTS["quick"] else 2.0 if config.epochs == 1 else HALF  # of one epoch there is no half
    return len(config.losses) * (short / SHORT + points + repeats + seeds + check)


def uncontrolled(comparison: Comparison) -> list[Method]:
    """The methods that gain something, with another learning rate than softmax."""
    rate = comparison.methods[0].config.learning_rate
    return [one for one in comparison.methods if comparison.significant(one, 1) and one.config.learning_rate != rate]


def with_better_baseline(comparison: Comparison) -> Comparison:
    """The comparison with softmax at another method's learning rate, where that is better for it on validation than what its
    own search has found, by more than a standard error over the seeds: one more try of softmax. A gain over a softmax that
    missed its best rate is none. What it was before becomes a control."""
    softmax, *others = comparison.methods
    whole = [control for control in comparison.controls if len(control.runs) >= len(softmax.runs)]
    better = max(whole, key=comparison.validation_score, default=None)
    if better is None or not comparison.surely_ahead(better, softmax):
        return comparison
    controls = [control for control in comparison.controls if control.config != better.config]
    rate, source = softmax.config.learning_rate, better.name.removeprefix(LEARNING_RATE_OF)
    controls.append(Method(f"{BASELINE}, learning rate {rate:g}", softmax.config, (), softmax.runs, softmax.hyperparameter))
    bounds = tuple(bound for bound in softmax.bounds if not bound.startswith("learning rate"))
    softmax = dataclasses.replace(softmax, config=better.config, runs=better.runs, bounds=bounds, tuned_in="", rate_of=source)
    return dataclasses.replace(comparison, methods=(softmax, *others), controls=tuple(controls))


def futile(comparison: Comparison) -> set[str]:
    """The methods for which more seeds could hardly change the answer: so far, the difference to the baseline is within luck in
    every metric that is judged.

    To stop there can only make false findings rarer, since nothing is found there. What it costs in true ones stands in
    benchmarks/verdict_error_rates.md. The baseline, and gce beside an error loss, are needed as long as another goes on.
    """
    open_: set[str] = set()
    for method in comparison.compared:
        for metric in comparison.judged_metrics:
            found = comparison.difference(method, comparison.methods[0], metric)
            few = found is None or found.count < statistics.ENOUGH_SEEDS  # nothing is known, as after a seed that diverged
            if few or (found is not None and found.p is not None and found.p < FUTILE):
                open_ |= {method.name, BASELINE, *(control.name for control in comparison.controls_of(method))}
    if open_:  # one of both is picked in the end: it must not be that by the luck of fewer seeds
        open_ |= {comparison.picked.name, comparison.best_on_validation[0].name}
    return {method.name for method in comparison.methods} - open_


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
        self.fail(*(Failure(name, outcome.error) for name, outcome in found if outcome.error and not outcome.diverged))
        return [outcomes[self.folder(config)] for config in configs]

    def fail(self, *failures: Failure) -> None:
        """Take note of failures, of each once."""
        self.failures += [failure for failure in failures if failure not in self.failures]

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
        config = self.at(trial.point).replace(seed=TUNING_SEED_NUMBERS[trial.seed], tested=False)
        return shortened(config) if trial.short else config

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
                config = self.config(trial)
                epochs = config.epochs * (config.train_fraction / self.start.train_fraction)
                yield Try(rate, hyperparameter, epochs, scores, *smoothing)


class _Study(Runs):
    """The runs of a comparison."""

    def __init__(self, out: Path, fingerprint: str, limit: "_Limit") -> None:
        super().__init__(out, fingerprint, lambda: limit.over)
        self.limit = limit

    def method(self, search: Search, seeds: int) -> Task[Method]:
        """Train a loss that was tuned on so many seeds."""
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
            self.fail(*search.failed[:1])
            return found
        tuned = found.config
        trial = max((trial for trial in search.scores if trial.point == best), key=lambda trial: (not trial.short, -trial.seed))
        folder = self.folder(search.config(trial)).relative_to(self.out).as_posix()
        outcomes = yield from self.run(_seeded(tuned, seeds))
        late = self.limit.option if Outcome() in outcomes else ""
        runs = self._seed_runs(_seeded(tuned, seeds), outcomes)
        return dataclasses.replace(found, runs=runs, capped=found.capped or late, tuned_in=folder)

    def check_length(self, method: Method) -> Task[Method]:
        """Find out whether more epochs would gain something.

        What each further epoch gains becomes less: if the second half of them gained little, as many again will gain less. Only
        otherwise there is a run of twice the epochs.
        """
        if not method.runs:
            return method
        same = method.config.replace(seed=TUNING_SEED_NUMBERS[0], tested=False)
        metric, epochs = metric_of(same), same.epochs

        def late(*outcomes: Outcome) -> str:
            return self.limit.option if Outcome() in outcomes else ""

        if epochs > 1:
            own, half = yield from self.run([same, same.replace(epochs=epochs // 2)])
            if own.result is None or half.result is None:
                return dataclasses.replace(method, capped=method.capped or late(own, half))
            if own.result["validation"][metric] - half.result["validation"][metric] <= MUCH_LONGER:
                return dataclasses.replace(method, half=half.result["validation"])
        own, longer = yield from self.run([same, same.replace(epochs=2 * epochs)])
        if own.result is None or longer.result is None:
            return dataclasses.replace(method, capped=method.capped or late(own, longer))
        return dataclasses.replace(method, longer=longer.result["validation"], same_length=own.result["validation"])

    def control(self, softmax: Method, winner: Method, seeds: int) -> Task[Method]:
        """Softmax with another method's learning rate: what that method would gain by its rate alone."""
        rate, head = winner.config.learning_rate, softmax.config.head_learning_rate
        config = softmax.config.replace(learning_rate=rate, head_learning_rate=head * (rate / softmax.config.learning_rate))
        outcomes = yield from self.run(_seeded(config, seeds))
        # That softmax diverges at this rate is an answer, too.
        runs = self._seed_runs(_seeded(config, seeds), outcomes, must_end=False)
        late = self.limit.option if Outcome() in outcomes else ""
        return Method(LEARNING_RATE_OF + winner.name, config, (), runs, softmax.hyperparameter, capped=late)

    def _seed_runs(self, configs: Sequence[Config], outcomes: Sequence[Outcome], must_end: bool = True) -> tuple[SeedRun, ...]:
        runs = []
        for config, outcome in zip(configs, outcomes, strict=True):
            folder = self.folder(config)
            if outcome.error is not None and outcome.diverged and must_end:
                self.fail(Failure(folder.name, outcome.error))
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


def _seeded(config: Config, seeds: int) -> list[Config]:
    return [config.replace(seed=seed) for seed in range(1, seeds + 1)]


class _Cost:
    """What is done and what is left, in trainings of full length; and how long that will take, once the first runs show it."""

    def __init__(
        self,
        config: ComparisonConfig,
        steps: int,
        jobs: int,
        tested: float,
        tell: Callable[[str], None],
        show: Callable[[float, float], None],
    ) -> None:
        self.config, self.steps, self.jobs, self.tell, self.show = config, max(steps, 1), jobs, tell, show
        self.total = expected_trainings(config, short_runs=shortens(steps))
        self.after = len(config.losses) * (config.most_seeds + HALF)
        self.tested = len(config.losses) * config.most_seeds * tested
        self.training_seconds: float | None = None
        self._done: dict[Path, float] = {}
        self._found: dict[Path, float] = {}
        self._started: float | None = None

    @property
    def done(self) -> float:
        """Trainings so far."""
        return math.fsum(self._done.values())

    def has(self, folder: Path) -> bool:
        """Whether a run has begun."""
        return folder in self._done

    def expect(self, trainings: float) -> None:
        """So much is left."""
        self.total = self.done + trainings
        self.show(self.done, self.total)

    def see(self, folder: Path, progress: Progress) -> None:
        """Take note of where a run stands."""
        now = time.monotonic()
        if folder not in self._done and progress.step == progress.steps:  # of an earlier call
            config, full = Run(folder).config(), self.config.epochs * self.config.train_fraction
            self._done[folder] = self._found[folder] = config.epochs * config.train_fraction / full
        elif folder not in self._found:
            self._started = now if self._started is None else self._started
            self._done[folder] = max(self._done.get(folder, 0.0), progress.step / self.steps)
        self.total = max(self.total, self.done)
        self.show(self.done, self.total)
        if self.training_seconds is not None or self._started is None:
            return
        made, seconds = self.done - math.fsum(self._found.values()), now - self._started
        if made > 0 and (made >= 1 or seconds >= LOOK_SECONDS):
            started = (len(self._done) - len(self._found)) * START_SECONDS / self.jobs
            self.training_seconds = max(seconds - started, seconds / 2) / made
            self.tell(f"That will take about {self._duration(self.total - self.done + self.tested)}, as the first runs show.")

    def _duration(self, trainings: float) -> str:
        """So many trainings, of which about half are short."""
        return duration(trainings * ((self.training_seconds or 0.0) + 2 * START_SECONDS / self.jobs))

    def reserve(self) -> float:
        """The seconds that the runs after the tuning will take."""
        return self.after * ((self.training_seconds or 0.0) + START_SECONDS / self.jobs)


def measured_ks(config: ComparisonConfig, classes: int) -> tuple[int, ...]:
    """The k that all methods measure beside the usual ones, so that what one of them trains for is known of all."""
    runs = [config.run_config(loss) for loss in config.losses]
    trained = {k for run in runs for k in trained_ks(criterion(run, classes), run)}
    ks = {*config.measure, *config.ks, *trained}
    return tuple(sorted(k for k in ks if f"top{k}" not in METRICS and k < classes))


def _plan(config: ComparisonConfig, dataset: Dataset, parts: Parts, windows: Windows | None, jobs: int) -> Iterator[str]:
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
    if dataset.train.groups is not None and dataset.test is None:
        yield "All examples of a group are for training, for validation or for the test."
    # Known now, and not only when all has been trained.
    groups, units = parts.test.groups, len(parts.test_index)
    if groups is not None:
        units = len(set(groups[parts.test_index].tolist()))
    tests = len(config.ks) * (len(config.losses) - 1)
    if units < (needed := statistics.fewest_units(tests)):
        what = f"{counted(units, 'test example')}" if groups is None else f"test examples in {counted(units, 'group')}"
        yield (
            f"With {what} no difference will count as significant: {counted(tests, 'test')} need at least {needed}. Give more, "
            "or go by what validation shows."
        )
    batches = f"batches of {config.batch_size}"
    if windows is not None:
        count = counted(windows_in_batch(config, windows), "window")
        batches = f"batches of {count} of {counted(windows.length, 'token')}, of which each place trains"
    at_once = f"{counted(jobs, 'run')} at a time"
    yield f"Model {config.model}, {counted(config.epochs, 'epoch')}, {batches}, on {config.device}, {at_once}."
    metric, shown = metric_of(config), " and ".join(title(f"top{k}") for k in config.ks)
    meaning = title(metric) if metric != "mean" else shown if len(config.ks) == 1 else f"the mean of {shown}"
    steps = config.epochs * steps_per_epoch(config, parts, windows)
    cost = functools.partial(expected_trainings, config, short_runs=shortens(steps))
    costs = {name: cost(effort) for name, effort in EFFORTS.items() if name != config.effort}
    others = [f"--effort {name} takes {trainings:.0f}" for name, trainings in costs.items()]
    yield (
        f"{', '.join(config.losses)}, each tuned on validation for {meaning}: about {cost():.0f} trainings "
        f"({', '.join(others)})."
    )


def _write(outcome: Comparison, out: Path) -> None:
    """The report, and the model of the chosen method's best seed, or the best so far where nothing is decided; not in the place
    of an outcome that says more."""
    model, content = out / "model.safetensors", results.to_json(outcome)
    page = report_page.render(outcome).encode()
    try:
        before = files.read_object(out / "results.json", "")
        earlier = f"the outcome of `{before['command']}`"
        ended, ended_before = (sum(len(method["runs"]) for method in each["methods"]) for each in (content, before))
        decided_before = before["derived"]["decided"]
        same = all(before["settings"].get(name) == content["settings"][name] for name in content["settings"].keys() - CAPS)
    except (LabError, KeyError, TypeError, AttributeError):  # there is none that could be read
        ended, ended_before, same, earlier, decided_before = 1, 0, True, "", False
    best = _best_run(outcome, out)
    if ended_before and not ended:
        warn_once(f"There is nothing to report yet, and {out} keeps {earlier}.")
        return
    if ended_before and not (same and ended >= ended_before and (outcome.decided or not decided_before)):
        warn_once(f"{out} held {earlier}, which is now in {_set_aside(out)}.")
    files.write_object(out / "results.json", content)
    files.write_atomically(out / "report.html", page)
    if best is not None:
        models.keep(best, out, ("the hyperparameters", "the loss", "the seed"))
    else:
        model.unlink(missing_ok=True)  # of an earlier outcome: it must not stand beside this one


def _best_run(outcome: Comparison, out: Path) -> Path | None:
    """The run whose model is kept: the best seed of the chosen method; as long as nothing is decided, the best of all."""
    methods = [outcome.choice] if outcome.decided else outcome.methods
    found = [(run.validation.get(outcome.tuned_metric, 0.0), run.folder) for method in methods for run in method.runs]
    found = found or [(outcome.tuned_score(method), method.tuned_in) for method in methods if method.tuned_in]
    places = [out / folder for _, folder in sorted(found, reverse=True)]
    return next((place for place in places if (place / "model.safetensors").is_file()), None)


def _set_aside(out: Path) -> Path:
    """A new folder with copies of what :func:`_write` has written before."""
    place = next(place for number in itertools.count(1) if not (place := out / f"earlier-{number}").exists())
    place.mkdir()
    for name in ("results.json", "report.html", "model.safetensors"):
        if (out / name).exists():
            with files.replacing(place / name) as temporary:
                shutil.copyfile(out / name, temporary)
    return place
