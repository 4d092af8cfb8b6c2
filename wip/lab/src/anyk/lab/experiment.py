"""A comparison from end to end: prepare the data, tune every loss, train it with several seeds, add controls, judge.

The stages are made for all losses at once, each as one set of runs: an engine makes them, a few at a time, and leaves out those
that have ended before. So the same call goes on where an earlier one stopped.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyk import info
from anyk.lab import embed, engines, files, losses, references, report, train, tune
from anyk.lab.config import BASELINE, ComparisonConfig, RunConfig
from anyk.lab.data.prepare import Prepared, prepare
from anyk.lab.engines import Outcome
from anyk.lab.errors import LabError, Stopped
from anyk.lab.findings import FORMAT, LATE, Findings, Method, SeedRun
from anyk.lab.folder import Run
from anyk.lab.tune import COARSE, COARSE_SEED, EFFORTS, HALF, LAST, QUARTER, Effort, Point, Trial

LEAST = Effort(3, False)
"""the least effort that can give an answer: what --time falls back to"""
START_SECONDS = 1.0
"""what starting a process takes, roughly"""


def run(
    config: ComparisonConfig,
    data: Any = None,
    *,
    tell: Callable[[str], None] = lambda sentence: None,
    on_progress: Callable[[float, float], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
    command: str = "",
    should_stop: Callable[[], bool] = lambda: False,
) -> Findings:
    """Make a comparison, and write results.json, report.html and the model to use into its folder.

    Args:
        config: what to compare.
        data: what the caller has in memory; None: what ``config.data`` names is read.
        tell: called with sentences about what is going to be done.
        on_progress: called with how many trainings are done, and how many there will be.
        clock: seconds, for --time.
        command: what to type to get the same again.
        should_stop: asked again and again; True lets what is at work write a checkpoint, and raises :class:`Stopped`.
    """
    started = clock()
    out = config.folder
    with Run(out).locked():
        given = embed.of_photos(config.data, config.model, out) if data is None else data
        prepared = prepare(given, config.data_fields(), out)
        config = config.replace(**shared_fields(config, prepared))
        experiment = Experiment(config, prepared, lambda: clock() - started, tell, on_progress, should_stop)
        for sentence in experiment.plan():
            tell(sentence)
        findings = dataclasses.replace(experiment.findings(), command=command if config.with_paths else "")
        write(findings, experiment)
    return findings


def shared_fields(config: ComparisonConfig, data: Prepared) -> dict[str, Any]:
    """What the runs have in common, filled in for the data; checked, as no run would end otherwise."""
    resolved = config.run_config(BASELINE).resolved(data.kind, len(data.split.train), len(data.classes))
    for k in resolved.ks:
        if k >= len(data.classes):
            raise LabError(
                f"--ks {k} needs more than {k} classes, but {data.name} has {len(data.classes)}: the first {k} guesses of so few "
                "are always right."
            )
    train.check(resolved, data, config.device)
    return {field.name: getattr(resolved, field.name) for field in dataclasses.fields(config) if hasattr(resolved, field.name)}


class Experiment:
    """The runs of a comparison, stage by stage."""

    def __init__(
        self,
        config: ComparisonConfig,
        data: Prepared,
        elapsed: Callable[[], float],
        tell: Callable[[str], None],
        on_progress: Callable[[float, float], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.config, self.data, self.elapsed, self.tell, self.on_progress = config, data, elapsed, tell, on_progress
        self.should_stop = should_stop
        self.effort = EFFORTS[config.effort]
        self.seeds = config.seeds or self.effort.seeds
        self.metric = config.select if config.select != "last" else "mean"
        self.hidden = config.model != "linear"
        self.measured = tuple(sorted({k for loss in config.losses for k in losses.trained_ks(config.run_config(loss))}))
        self.trials: dict[str, list[Trial]] = {loss: [] for loss in config.losses}
        self.points: dict[str, list[Point]] = {}
        self.ended: dict[str, str] = {}
        self.failures: list[str] = []
        self.done = 0.0
        self.seconds_of_training: float | None = None

    # What it will take -----------------------------------------------------------------------------------------------------

    @property
    def total(self) -> float:
        """All trainings, those of the final runs among them."""
        return len(self.config.losses) * self.effort.trainings(self.seeds)

    def plan(self) -> list[str]:
        """What will be done, in sentences."""
        data, config = self.data, self.config
        sizes = [f"{len(part):,}" for part in (data.split.train, data.split.validation, data.split.test)]
        yours = f"{data.name}: {sizes[0]} examples to train with, {sizes[1]} for validation, {sizes[2]} for the test; "
        return [
            f"{yours}{len(data.classes):,} classes; {data.how_split}",
            f"Model {config.model}, {config.epochs} epochs, batches of {config.batch_size}, on {config.device}.",
            f"{', '.join(config.losses)}: each tuned, then trained with {self.seeds} seeds; about {self.total:.0f} trainings.",
        ]

    def fit_into_time(self, engine: engines.Engine) -> None:
        """Choose what ends in time, from a short run of every loss; or say that nothing does."""
        limit = self.config.seconds
        if limit is None:
            return
        probes = [self.short(loss, {}, COARSE, 0) for loss in self.config.losses]
        started = self.elapsed()
        self.outcomes(engine, probes)
        made = math.fsum(config.length for config in probes)
        each = max(self.elapsed() - started, 1e-3) / made + START_SECONDS / engine.jobs  # of a training, at this many at once
        left = limit - self.elapsed()
        for effort, seeds in ((self.effort, self.seeds), (self.effort, 3), (LEAST, 3)):
            needed = each * len(self.config.losses) * effort.trainings(seeds)
            if needed <= left or seeds > self.seeds:
                self.effort, self.seeds = effort, min(seeds, self.seeds)
                return
        least = math.ceil(limit - left + needed)
        raise LabError(
            f"--time {self.config.time} is too little for {len(self.config.losses)} losses: the least is about {least} seconds "
            f"here; give that, fewer --losses, or fewer --epochs than {self.config.epochs}."
        )

    # Runs ------------------------------------------------------------------------------------------------------------------

    def folder(self, config: RunConfig) -> Path:
        """Where a run is, by all that its result depends on."""
        identity = json.dumps([self.data.fingerprint, losses.relevant(config)], sort_keys=True)
        digest = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
        return self.config.folder / "runs" / f"{files.slug(config.loss)}-{config.seed}-{digest}"

    def base(self, loss: str, point: Point, **changes: Any) -> RunConfig:
        """The config of a loss at a point."""
        return self.config.run_config(loss, measure=self.measured, **{**point, **changes})

    def short(self, loss: str, point: Point, length: float, split: int) -> RunConfig:
        """A run of the tuning."""
        steps = self.config.epochs * math.ceil(len(self.data.split.train) / self.config.batch_size)
        return tune.shortened(self.base(loss, point, split=split, seed=COARSE_SEED + split), length, steps)

    def out_of_time(self) -> bool:
        """Whether the time is over."""
        return self.config.seconds is not None and self.elapsed() >= self.config.seconds

    def outcomes(self, engine: engines.Engine, configs: Iterable[RunConfig]) -> dict[RunConfig, Outcome]:
        """Make these runs."""
        listed = list(dict.fromkeys(configs))
        found = engine.run(
            {self.folder(config): config for config in listed},
            self.data.folder,
            on_end=self.count,
            should_stop=self.out_of_time,
        )
        for config in listed:
            outcome = found[self.folder(config)]
            if outcome.error and not outcome.diverged:
                self.failures.append(f"{self.folder(config).name}: {outcome.error}")
            if outcome.stopped and (self.should_stop() or not self.out_of_time()):
                raise Stopped
        return {config: found[self.folder(config)] for config in listed}

    def count(self, config: RunConfig) -> None:
        """Take note that a run has ended."""
        self.done += config.length
        self.on_progress(self.done, max(self.total, self.done))

    def tried(self, engine: engines.Engine, asked: Mapping[str, Sequence[tuple[Point, float, int]]]) -> None:
        """Make runs of the tuning for several losses at once: (point, length, split) of each."""
        configs = {(loss, number): self.short(loss, *one) for loss, some in asked.items() for number, one in enumerate(some)}
        found = self.outcomes(engine, configs.values())
        for loss, some in asked.items():
            for number, (point, length, split) in enumerate(some):
                outcome = found[configs[loss, number]]
                score = outcome.result["validation"].get(self.metric) if outcome.result else None
                if outcome.stopped:
                    self.ended[loss] = f"--time {self.config.time} ended the tuning of {loss}"
                else:
                    self.trials[loss].append(Trial(point, length, split, score))

    def noise(self, loss: str, length: float) -> float:
        """The standard error of the best score of these runs."""
        scores = [trial.score for trial in self.trials[loss] if trial.length == length and trial.score is not None]
        return tune.noise_of(max(scores, default=0.5), len(self.data.split.validation))

    # The stages ------------------------------------------------------------------------------------------------------------

    def coarse(self, engine: engines.Engine) -> None:
        """Find the region of each loss: learning rates, then its settings with rates around the best."""
        settings = {loss: tune.settings_of(loss, self.hidden) for loss in self.config.losses}
        start = {loss: self.base(loss, {}) for loss in self.config.losses}
        self.tried(engine, {loss: _all(tune.rate_points(start[loss], settings[loss]), COARSE) for loss in settings})
        second = {}
        for loss, trials in self.trials.items():
            if best := tune.ranked(trials, self.noise(loss, COARSE), self.config.learning_rate):
                second[loss] = _all(tune.setting_points(best[0], settings[loss], self.effort.settings), COARSE)
        self.tried(engine, second)
        for loss, trials in self.trials.items():
            self.points[loss] = tune.finalists(trials, self.noise(loss, COARSE), self.config.learning_rate)

    def refine(self, engine: engines.Engine) -> dict[str, dict[int, Point]]:
        """The point of each loss for each seed: the finalists at a quarter of the length, and the best of them at half."""
        seeds = range(1, self.seeds + 1)
        self.tried(
            engine, {loss: [one for s in seeds for one in _all(points, QUARTER, s)] for loss, points in self.points.items()}
        )
        halves = {
            loss: [one for s in seeds for one in _all(self.best_of(loss, QUARTER, s)[:LAST], HALF, s)] for loss in self.points
        }
        self.tried(engine, halves)
        return {loss: {s: best[0] for s in seeds if (best := self.best_of(loss, HALF, s))} for loss in self.points}

    def best_of(self, loss: str, length: float, split: int) -> list[Point]:
        """The points that were tried at a length on a split, the best first."""
        trials = [trial for trial in self.trials[loss] if trial.length == length and trial.split == split]
        return tune.ranked(trials, self.noise(loss, length), self.config.learning_rate)

    def final(self, engine: engines.Engine, points: Mapping[str, Mapping[int, Point]]) -> dict[str, tuple[SeedRun, ...]]:
        """The final runs: each seed at its own point, measured on the test. Seed by seed, so that what is there when the time is
        over can be compared."""
        configs = {
            (loss, seed): self.base(loss, point, split=seed, seed=seed)
            for seed in range(1, self.seeds + 1)
            for loss in points
            if (point := points[loss].get(seed)) is not None
        }
        found = self.outcomes(engine, configs.values())
        runs: dict[str, list[SeedRun]] = {loss: [] for loss in points}
        for (loss, seed), config in configs.items():
            outcome = found[config]
            if outcome.result is not None:
                runs[loss].append(self.seed_run(config, points[loss][seed], outcome.result))
            elif outcome.stopped:
                self.ended.setdefault(loss, f"--time {self.config.time} ended the runs of {loss}")
        return {loss: tuple(some) for loss, some in runs.items()}

    def seed_run(self, config: RunConfig, point: Point, result: Mapping[str, Any]) -> SeedRun:
        """What is kept of a final run."""
        folder = self.folder(config)
        kept = {name: result[name] for name in ("test", "validation", "train", "seconds", "epochs")}
        ranks = Run(folder).test()["ranks"].numpy()
        return SeedRun(
            seed=config.seed, point=dict(point), folder=folder.relative_to(self.config.folder).as_posix(), ranks=ranks, **kept
        )

    def findings(self) -> Findings:
        """All stages, and what they found."""
        config = self.config
        with engines.make(
            config.engine,
            train.work,
            device=config.device,
            jobs=config.jobs,
            threads=config.threads,
            address=config.address,
            imports=losses.imported,
        ) as engine:
            self.fit_into_time(engine)
            self.coarse(engine)
            points = self.refine(engine)
            runs = self.final(engine, points)
            found = self.collected([self.method(loss, points[loss], runs[loss]) for loss in config.losses])
            winners = found.confirmed or [found.picked]
            controls = [self.control(engine, found.baseline, winner) for winner in winners if winner.role == "method"]
        return self.collected([*found.methods, *controls, *references.all_of(self.data, config, self.seeds)])

    def collected(self, methods: Sequence[Method]) -> Findings:
        """The findings with these methods."""
        earlier = earlier_looks(self.config.folder, self.data.fingerprint)
        described = {
            **train.describe(self.data),
            "most_frequent": self.data.balance["most_frequent"],
            "how_split": self.data.how_split,
        }
        test = self.data.split.test
        groups = None if self.data.groups is None else self.data.groups[test].numpy()
        settings = {
            name: value
            for name, value in self.config.to_json().items()
            if self.config.with_paths or name not in ("data", "out", "address")
        }
        found = Findings(
            methods=tuple(methods),
            ks=self.config.ks,
            metric=self.metric,
            data={**described, "balance": dict(self.data.balance), "remarks": list(self.data.remarks)}
            | ({} if groups is None else {"test_groups": len(set(groups.tolist()))}),
            settings={**settings, "seeds": self.seeds},
            groups=groups,
            labels=self.data.labels[test].numpy(),
            class_names=self.data.classes,
            environment={
                name: value for name, value in info.environment().items() if self.config.with_paths or name not in ("command", "folder")
            },
            failures=tuple(dict.fromkeys(self.failures)),
        )
        new = [look for look in earlier if look != found.this_look]
        return dataclasses.replace(found, looks=tuple(new), look=len(new) + 1)

    def method(self, loss: str, points: Mapping[int, Point], runs: tuple[SeedRun, ...]) -> Method:
        """A loss with what was found. The point to paste is the one with the best mean over the seeds."""
        trials = self.trials[loss]
        ranked = tune.ranked((trial for trial in trials if trial.length == QUARTER), 0.0, self.config.learning_rate) or self.points.get(loss, [])
        best = ranked[0] if ranked else {}
        settings = tune.settings_of(loss, self.hidden)
        rates = [trial.point["learning_rate"] for trial in trials]
        halves = {
            trial.split: trial.score for trial in trials if trial.length == HALF and trial.point == points.get(trial.split)
        }
        gains = [run.validation[self.metric] - score for run in runs if (score := halves.get(run.seed)) is not None]
        return Method(
            name=loss,
            role="baseline" if loss == BASELINE else "method",
            words=losses.words(loss),
            config=self.base(loss, best),
            runs=runs,
            trials=tuple(trials),
            at_bounds=tuple(tune.at_bounds(best, rates, settings)) if best else (),
            late_gain=math.fsum(gains) / len(gains) if gains else None,
            ended=self.ended.get(loss, "" if runs else f"no run of {loss} has ended"),
        )

    def control(self, engine: engines.Engine, softmax: Method, winner: Method) -> Method:
        """Softmax trained as a winner was: what that gains by its learning rate and weight decay alone."""
        points = {}
        for run in winner.runs:
            own = next((other.point for other in softmax.runs if other.seed == run.seed), {})
            how = {name: run.point[name] for name in ("learning_rate", "weight_decay") if name in run.point}
            points[run.seed] = {**own, "weight_decay": 0.0, **how}
        runs = self.final(engine, {BASELINE: points})[BASELINE]
        name = f"{BASELINE}, trained as {winner.name}"
        words = f"cross-entropy with the learning rate and weight decay of {winner.name}"
        return Method(name, "control", words, self.base(BASELINE, {}), runs, of=winner.name)


def _all(points: Iterable[Point], length: float, split: int = 0) -> list[tuple[Point, float, int]]:
    return [(point, length, split) for point in points]


def longer(findings: Findings) -> bool:
    """Whether more epochs may change the answer: softmax or the choice still gained much in the second half."""
    return any((method.late_gain or 0.0) > LATE for method in (findings.baseline, findings.picked))


def earlier_looks(folder: Path, fingerprint: str) -> list[dict[str, Any]]:
    """The looks at the same test set that results.json in a folder has recorded."""
    try:
        before = files.read_object(folder / "results.json", "")
        return list(before["looks"]) if before["format"] == FORMAT and before["data"]["fingerprint"] == fingerprint else []
    except (LabError, KeyError, TypeError):
        return []


def write(findings: Findings, experiment: Experiment) -> None:
    """results.json, report.html and the model to use: the chosen loss's best seed on validation."""
    out = experiment.config.folder
    method = findings.chosen if findings.decided else findings.picked
    best = max(method.runs, key=lambda one: one.validation.get(findings.metric, 0.0), default=None)
    files.write_object(out / "results.json", findings.to_json())
    files.write_atomically(out / "report.html", report.render(findings).encode())
    if best is not None:
        train.keep_model(out / best.folder, out, ("the hyperparameters", "the loss", "the seed"))
