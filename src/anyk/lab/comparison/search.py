"""`anyk compare`: every loss is tuned to its end, with as many tries as the others; then the same seeds, then the truth."""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import threading
import time as clocks
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from anyk import info
from anyk.lab import files
from anyk.lab.comparison import page, results, tuning
from anyk.lab.comparison.classes import count_classes
from anyk.lab.comparison.moves import find_moves
from anyk.lab.comparison.outcome import (
    BASELINE,
    BOUNDED,
    LEARNING_RATE_OF,
    Comparison,
    Method,
    SeedRun,
    Try,
    chosen,
    contrasts,
    significant,
)
from anyk.lab.comparison.tuning import TUNING_SEEDS, Axis, Point, Trial, Tuner
from anyk.lab.data import Dataset, Parts
from anyk.lab.data.tokens import Windows
from anyk.lab.engines.attempt import Outcome
from anyk.lab.engines.local import Pool, wait_in_turns
from anyk.lab.errors import Failure, LabError, Stopped
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config, Setting
from anyk.lab.run.folder import Run
from anyk.lab.run.losses import criterion, trained_ks
from anyk.lab.run.reading import (
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
from anyk.lab.run.summaries import METRICS
from anyk.lab.run.training import Progress
from anyk.lab.tables import duration, title

LOSSES = (BASELINE, BOUNDED, "error", "splitter")
SEEDS = 5
#: the seeds of the tuning; those of the comparison are 1, 2, …
TUNING_SEED_NUMBERS = (0, 10_001, 10_002)
assert len(TUNING_SEED_NUMBERS) == TUNING_SEEDS
#: the short runs of the first stage have this part of the epochs, if there are enough to divide
SHORT = 4
#: what starting a process and reading the data take, roughly: for the plan's time
START_SECONDS = 0.5

Item = TypeVar("Item")
Result = TypeVar("Result")


def compare(
    setting: Setting,
    losses: Sequence[str],
    out: Path,
    *,
    jobs: int,
    seeds: int = SEEDS,
    budget: int | None = None,
    time: float | None = None,
    command: str = "",
    on_progress: Callable[[Path, Progress], None] = lambda folder, progress: None,
    on_plan: Callable[[str], None] = lambda sentence: None,
    clock: Callable[[], float] = clocks.monotonic,
) -> Comparison:
    """Tune every loss on validation until its best point lies inside what was tried, train it with further seeds, and write
    the report.

    Runs that an earlier call with the same setting has finished in ``out`` are not run again, so a larger cap goes on where a
    smaller one ended.

    Args:
        setting: what the runs have in common; the tuning starts at its values.
        losses: softmax, against which the others are measured, is always among them, and gce beside error losses.
        out: the folder for the outcome.
        jobs: runs at a time.
        seeds: runs of each tuned loss.
        budget: the most points of a loss to try at full length.
        time: seconds that the whole may take.
        command: what to type to get the same again.
        on_progress: called with a run's folder and where it stands.
        on_plan: called with a few sentences before the first run, and with the time it will take after its first steps.
        clock: seconds, for ``time``.
    """
    for name, value in (("seeds", seeds), ("budget", budget), ("jobs", jobs)):
        if value is not None and value < 1:
            raise LabError(f"{name} should be at least 1, but is {value}.")
    if time is not None and not time > 0:
        raise LabError(f"time should be above 0 seconds, but is {time:g}.")
    losses = _compared(losses)
    dataset = read_data(setting)
    # How the examples are shuffled may depend on a machine's memory: each run finds that out for itself.
    setting = resolved(setting, dataset).replace(**shuffle_of(setting))
    setting = _wanting(setting, len(dataset.classes))
    # Before hours of training, not after.
    check_setting(setting, dataset)
    if setting.select == "each":
        raise LabError("select each has several models for each run, and a comparison wants one: choose another, such as mean.")
    setting = setting.replace(measure=_measured(setting, losses, len(dataset.classes)))
    configs = [started(Config(**vars(setting), loss=loss), len(dataset.classes)) for loss in losses]
    parts = divide(dataset, setting)
    for config in configs:
        check_seen(config, dataset, parts, max(trained_ks(criterion(config, len(dataset.classes)), config)))
    windows = windows_of(dataset, parts, dataset.train.labels, setting)
    steps = setting.epochs * steps_per_epoch(setting, parts, windows)
    runs = expected_runs(losses, seeds, budget, shortens=setting.epochs >= SHORT)
    estimate = _Estimate(steps, runs, len(losses), seeds, jobs, on_plan)

    def watch(folder: Path, progress: Progress) -> None:
        estimate.see(folder, progress)
        on_progress(folder, progress)

    with Run(out).locked(), Pool(jobs, watch) as pool, _Limit(time, clock, pool) as limit:
        for sentence in _plan(setting, dataset, parts, windows, losses, runs, jobs):
            on_plan(sentence)
        study = _Study(pool, out, dataset.fingerprint, seeds, limit)
        searches = [
            Search(
                study,
                config,
                axes(config),
                examples=len(parts.validation),
                shortens=setting.epochs >= SHORT,
                budget=budget,
                expired=lambda: limit.is_near(estimate.reserve()),
            )
            for config in configs
        ]
        together(pool, lambda search: search.make(search.search()), searches)
        while (tries := tuning.behind(searches)) is not None:
            spend = [search.spend(tries) for search in searches]
            together(pool, lambda pair: pair[0].make(pair[1]), list(zip(searches, spend, strict=True)))
        methods = together(pool, study.method, searches)
        outcome = Comparison(
            data=describe(dataset, parts, setting),
            command=command,
            settings={"budget": budget, "time": time, "seeds": seeds, "metric": _metric(setting), **setting.to_json()},
            methods=tuple(methods),
            ks=setting.ks,
            environment=info.environment(),
        )
        outcome = dataclasses.replace(outcome, contrasts=contrasts(outcome, out))
        softmax = methods[0]
        winners = [
            method
            for method in methods
            if significant(outcome, method, 1) and method.config.learning_rate != softmax.config.learning_rate
        ]
        if winners:
            # One after the other: winners of one learning rate have the same control, whose runs are then there.
            controls = [study.control(softmax, winner) for winner in winners]
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


def together(pool: Pool, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The work on all items, each in a thread that mostly waits for runs."""
    with ThreadPoolExecutor(len(items)) as threads:
        try:
            futures = [threads.submit(work, item) for item in items]
            wait_in_turns(futures)
            return [future.result() for future in futures]
        except BaseException:
            pool.stop()  # or the threads would wait for the runs
            raise


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
    """What is tuned of a config: its learning rate, and the hyperparameter that its loss has of its own; of a loss with a
    share of cross-entropy, also
    whether that is smoothed, as softmax may be."""
    loss = loss_names.find(start.loss)
    value = getattr(start, hyperparameter := loss.hyperparameter)
    if tried := loss_names.CANDIDATES[hyperparameter]:
        own = [tuning.learning_rates(start.learning_rate), tuning.listed(hyperparameter, value, tried)]
        guided = loss.family in ("error", "gce") and start.ce_weight > 0
        return own + ([tuning.listed("label_smoothing", start.label_smoothing, loss_names.SMOOTHED)] if guided else [])
    # Factors of 4, then 2, and the root of 2 for extra tries; from 1/256 to 256 times the start.
    return [
        tuning.learning_rates(start.learning_rate),
        tuning.geometric(hyperparameter, value, base=2, places=2, powers=8, steps=(4, 2)),
    ]


def expected_runs(losses: Sequence[str], seeds: int, budget: int | None = None, *, shortens: bool = True) -> int:
    """How many runs there will be, roughly: it depends on where the best points lie.

    Args:
        losses: as they were named; what they are compared with counts too.
        seeds: runs of each tuned loss.
        budget: the most points of each to try at full length.
        shortens: whether the search begins with short runs.
    """
    points = min(tuning.USUAL_POINTS, budget or tuning.USUAL_POINTS)
    repeats = min(tuning.USUAL_REPEATS, 4 * (points - 1))  # of one point there is nothing to choose
    return len(_compared(losses)) * (tuning.COARSE_POINTS * shortens + points + repeats + 1 + seeds) + seeds


class Runs:
    """Runs in folders of their own, which are found again by all that a run depends on.

    Args:
        pool: makes them.
        out: where the folders are, in ``runs``.
        fingerprint: of the data.
        out_of_time: whether runs that were stopped half-way were so because there is no time left.
    """

    def __init__(self, pool: Pool, out: Path, fingerprint: str, out_of_time: Callable[[], bool] = lambda: False) -> None:
        self.pool, self.out, self.fingerprint, self.out_of_time = pool, out, fingerprint, out_of_time
        self.failures: list[Failure] = []

    def run(self, configs: Sequence[Config]) -> list[Outcome]:
        """Make these runs; those for which there was no time have neither a result nor an error."""
        outcomes = self.pool.run({self.folder(config): config for config in configs})
        if any(outcome == Outcome() for outcome in outcomes.values()) and not self.out_of_time():
            raise Stopped
        found = [(folder.name, outcome) for folder, outcome in outcomes.items()]
        # That a rate is too large is what a search finds out; all else is a failure.
        self.failures += [Failure(name, outcome.error) for name, outcome in found if outcome.error and not outcome.diverged]
        return [outcomes[self.folder(config)] for config in configs]

    def folder(self, config: Config) -> Path:
        """A run's folder: its name follows from all that the run depends on, so that the same run is found again."""
        content = json.dumps([self.fingerprint, config.identity], sort_keys=True).encode()
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
        epochs = self.short_epochs if trial.short else self.start.epochs
        return self.at(trial.point).replace(epochs=epochs, seed=TUNING_SEED_NUMBERS[trial.seed], tested=False)

    @property
    def short_epochs(self) -> int:
        return self.start.epochs // SHORT

    def at(self, point: Point) -> Config:
        """The config at a point."""
        changes = dict(zip((axis.name for axis in self.axes), self.values(point), strict=True))
        # One number is tuned, and a rate of the head keeps its ratio to it.
        if self.start.head_learning_rate:
            factor = changes["learning_rate"] / self.start.learning_rate
            changes["head_learning_rate"] = self.start.head_learning_rate * factor
        return self.start.replace(**changes)

    def make(self, rounds: Iterator[list[Trial]]) -> None:
        """Make the trials that the search asks for, as far as there is time."""
        for trials in rounds:
            configs = [self.config(trial) for trial in trials]
            outcomes = self.runs.run(configs)
            for trial, config, outcome in zip(trials, configs, outcomes, strict=True):
                if outcome == Outcome():
                    self.stop()
                    continue
                if outcome.error is not None:
                    self.failed.append(Failure(self.runs.folder(config).name, outcome.error))
                validation = outcome.result["validation"] if outcome.result else {}
                self.tell(trial, validation.get(_metric(self.start)))
            if any(outcome == Outcome() for outcome in outcomes):
                return

    def record(self) -> Iterator[tuple[tuple[float, ...], int, tuple[float | None, ...]]]:
        """The points in the order in which they were tried: the values on the axes, the epochs, the scores seed by seed."""
        for trial in self.scores:
            if trial.seed == 0:
                scores = (self.scores[trial],) if trial.short else tuple(self.seeds(trial.point))
                yield self.values(trial.point), self.short_epochs if trial.short else self.start.epochs, scores


class _Study(Runs):
    """The runs of a comparison."""

    def __init__(self, pool: Pool, out: Path, fingerprint: str, seeds: int, limit: "_Limit") -> None:
        super().__init__(pool, out, fingerprint, lambda: limit.over)
        self.limit, self.seeds = limit, range(1, seeds + 1)

    def method(self, search: Search) -> Method:
        """Train a loss that was tuned: on every seed, and for twice the epochs on the seed of the tuning."""
        best = search.best
        found = Method(
            name=search.start.loss,
            config=search.start if best is None else search.at(best),
            tries=tuple(
                Try(rate, hyperparameter, epochs, scores, *smoothing)
                for (rate, hyperparameter, *smoothing), epochs, scores in search.record()
            ),
            runs=(),
            hyperparameter=search.axes[1].name,
            capped=self.limit.words if search.capped == tuning.TIME else search.capped,
            bounds=search.bounds,
        )
        if best is None:
            self.failures += [failure for failure in search.failed if failure not in self.failures][:1]
            return found
        tuned = found.config
        same = tuned.replace(seed=TUNING_SEED_NUMBERS[0], tested=False)
        again, longer, *seeded = self.run([same, same.replace(epochs=2 * tuned.epochs), *self._seeded(tuned)])
        return dataclasses.replace(
            found,
            runs=self._seed_runs(tuned, seeded),
            capped=found.capped or (self.limit.words if Outcome() in (again, longer, *seeded) else ""),
            longer=longer.result["validation"] if longer.result and again.result else None,
            same_length=again.result["validation"] if longer.result and again.result else None,
        )

    def control(self, softmax: Method, winner: Method) -> Method:
        """Softmax with another method's learning rate: what that method would gain by its rate alone."""
        rate, head = winner.config.learning_rate, softmax.config.head_learning_rate
        config = softmax.config.replace(learning_rate=rate, head_learning_rate=head * (rate / softmax.config.learning_rate))
        outcomes = self.run(self._seeded(config))
        # That softmax diverges at this rate is an answer, too.
        runs = self._seed_runs(config, outcomes, must_end=False)
        late = self.limit.words if Outcome() in outcomes else ""
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

    def __init__(self, seconds: float | None, clock: Callable[[], float], pool: Pool) -> None:
        self.seconds, self.clock, self.pool = seconds, clock, pool
        self.started = clock()
        self._left = threading.Event()

    def __enter__(self) -> "_Limit":
        if self.seconds is not None:
            threading.Thread(target=self._watch, name="time limit", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(0.1):
            if self.over:
                self.pool.stop()
                return

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.is_near(0.0)

    def is_near(self, reserve: float) -> bool:
        """Whether less than ``reserve`` seconds are left; of more than half of the time, the other half counts."""
        if self.seconds is None:
            return False
        return self.clock() - self.started >= self.seconds - min(reserve, self.seconds / 2)

    @property
    def words(self) -> str:
        """The option that set the limit."""
        return f"--time {time_word(self.seconds or 0.0)}"


class _Estimate:
    """How long the whole will take, from the first steps of the first run that takes some."""

    def __init__(self, steps: int, runs: int, losses: int, seeds: int, jobs: int, tell: Callable[[str], None]) -> None:
        self.steps, self.runs, self.losses, self.seeds, self.jobs, self.tell = steps, runs, losses, seeds, jobs, tell
        self.run_seconds: float | None = None
        self._found = 0
        self._first: dict[Path, tuple[float, int]] = {}
        self._guard = threading.Lock()

    def see(self, folder: Path, progress: Progress) -> None:
        """Take note of where a run stands."""
        now = clocks.monotonic()
        with self._guard:
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


def _compared(losses: Sequence[str]) -> list[str]:
    """Softmax first, each once, and the control of what is there."""
    found = {loss: loss_names.find(loss) for loss in (BASELINE, *losses)}
    if len(found) == 1:
        raise LabError(f"losses should name something to compare with {BASELINE}, such as splitter, but {BASELINE} is alone.")
    listed = list(found)
    if any(loss.family == "error" for loss in found.values()) and BOUNDED not in found:
        listed.insert(1, BOUNDED)
    return listed


def _wanting(setting: Setting, classes: int) -> Setting:
    """The setting with what is wanted filled in, and P_K with the same weight on each, unless the user gave another."""
    usual = Setting()
    own = (setting.p_k, setting.p_k_end, setting.p_k_file) != (usual.p_k, usual.p_k_end, usual.p_k_file)
    ks = tuple(dict.fromkeys(setting.ks))
    if not ks and own and setting.p_k_file is None:
        moved = setting.p_k_end or setting.p_k
        weights = [max(pair) for pair in zip(setting.p_k, moved, strict=True)]
        ks = tuple(k for k, weight in enumerate(weights, start=1) if weight > 0 and k < classes)
    # Of five classes or fewer, the first five guesses are always right: half of them say more.
    ks = ks or ((1, 5) if classes > 5 else tuple(sorted({1, max((classes + 1) // 2, 1)})))
    p_k = setting.p_k if own else tuple(1 / len(ks) if k in ks else 0.0 for k in range(1, max(ks) + 1))
    return setting.replace(ks=ks, p_k=p_k)


def _measured(setting: Setting, losses: Sequence[str], classes: int) -> tuple[int, ...]:
    """The k that all methods must measure, beside the usual ones: what one of them trains for is judged in all."""
    trained = {
        k
        for config in (Config(**vars(setting), loss=loss) for loss in losses)
        for k in trained_ks(criterion(config, classes), config)
    }
    ks = {*setting.measure, *setting.ks, *trained}
    return tuple(sorted(k for k in ks if f"top{k}" not in METRICS and k < classes))


def _metric(setting: Setting) -> str:
    return setting.select if setting.select != "last" else "mean"


def _plan(
    setting: Setting,
    dataset: Dataset,
    parts: Parts,
    windows: Windows | None,
    losses: Sequence[str],
    runs: int,
    jobs: int,
) -> Iterator[str]:
    """What will be done, in sentences."""
    shape = tuple(dataset.train.shape)
    kind = f"images of {' x '.join(map(str, shape))}"
    if dataset.kind == "embeddings":
        kind = f"{shape[0]} features, {'standardised' if setting.standardize else 'as they are'}"
    elif dataset.kind == "sequences":
        kind = f"each from up to {setting.context} {'token' if setting.context == 1 else 'tokens'} before it"
    numbers = (len(parts.train), len(parts.validation), len(parts.test_index), len(dataset.classes))
    yield "{}: {:,} examples to train with, {:,} for validation, {:,} for the test; {:,} classes; {}.".format(
        dataset.name, *numbers, kind
    )
    yield from dataset.remarks
    epochs = f"{setting.epochs} {'epoch' if setting.epochs == 1 else 'epochs'}"
    at_once = f"{jobs} {'run' if jobs == 1 else 'runs'} at a time"
    batches = f"batches of {setting.batch_size}"
    if windows is not None:
        count = windows_in_batch(setting, windows)
        tokens = f"{windows.length} {'token' if windows.length == 1 else 'tokens'}"
        batches = f"batches of {count} {'window' if count == 1 else 'windows'} of {tokens}, of which each place trains"
    yield f"Model {setting.model}, {epochs}, {batches}, on {setting.device}, {at_once}."
    metric = _metric(setting)
    wanted = " and ".join(title(f"top{k}") for k in setting.ks)
    meaning = title(metric) if metric != "mean" else wanted if len(setting.ks) == 1 else f"the mean of {wanted}"
    yield f"{', '.join(losses)}, each tuned on validation for {meaning}: about {runs} runs."


def seconds_of(word: str) -> float:
    """A time such as 90s, 10m or 2h in seconds.

    >>> seconds_of("10m"), seconds_of("1.5h"), seconds_of("45")
    (600.0, 5400.0, 45.0)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|m|min|h)?", word.strip().lower())
    if match is None:
        raise LabError(f"time should be a number of seconds, minutes or hours such as 90s, 10m or 2h, but is {word!r}.")
    return float(match[1]) * {"h": 3600, "m": 60, "min": 60}.get(match[2] or "s", 1)


def time_word(seconds: float) -> str:
    """The shortest word for a time.

    >>> time_word(600), time_word(5400), time_word(0.5)
    ('10m', '90m', '0.5s')
    """
    unit, length = next(((u, n) for u, n in (("h", 3600), ("m", 60)) if seconds >= n and seconds % n == 0), ("s", 1))
    return f"{seconds / length:g}{unit}"


def _write(outcome: Comparison, out: Path) -> None:
    """The report, and the model of the chosen method's best seed."""
    runs, model = chosen(outcome).runs, out / "model.safetensors"
    model.unlink(missing_ok=True)  # of an earlier outcome: it must not stand beside this one
    results.write(outcome, out / "results.json")
    page.write(outcome, out / "report.html")
    if runs:
        run = max(runs, key=lambda run: run.validation.get(outcome.settings["metric"], 0.0))
        with files.replacing(model) as temporary:
            shutil.copyfile(out / run.folder / "model.safetensors", temporary)
