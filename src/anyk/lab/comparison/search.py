"""`anyk compare`: the same tuning budget for every loss, then the same seeds, then the truth."""

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from anyk import info
from anyk.lab import files
from anyk.lab.comparison import page, results
from anyk.lab.comparison.moves import find_moves
from anyk.lab.comparison.outcome import BASELINE, Comparison, Method, SeedRun, Try, best
from anyk.lab.data import load, split
from anyk.lab.engines.attempt import Outcome, failures
from anyk.lab.engines.local import Pool, wait_in_turns
from anyk.lab.errors import Failure, LabError, Stopped
from anyk.lab.run import names
from anyk.lab.run.folder import Run
from anyk.lab.run.losses import criterion, trained_ks
from anyk.lab.run.reading import check_select, describe, resolved, shuffle_of
from anyk.lab.run.recipe import Recipe, Setting
from anyk.lab.run.summaries import METRICS
from anyk.lab.run.training import Progress

TUNING_SEED = 0
#: tries that are made at once; not the number of jobs, so that the outcome does not depend on the machine
ROUND = 2

Point = tuple[int, ...]


def compare(
    setting: Setting,
    losses: Sequence[str],
    out: Path,
    *,
    seeds: int,
    budget: int,
    jobs: int,
    command: str = "",
    on_progress: Callable[[Path, Progress], None] = lambda folder, progress: None,
) -> Comparison:
    """Tune every loss with ``budget`` runs on validation, train it with ``seeds`` further seeds, and write the report.

    The learning rate and, where a loss has one, the temperature are searched on a grid of factor 2 that starts at the
    setting's own values. Softmax, against which the others are measured, is always among the losses. Runs that an earlier
    call with the same setting has finished in ``out`` are not run again.
    """
    for name, value in (("seeds", seeds), ("budget", budget), ("jobs", jobs)):
        if value < 1:
            raise LabError(f"{name} should be at least 1, but is {value}.")
    dataset = load(setting.data)
    # How the examples are shuffled may depend on a machine's memory: each run finds that out for itself.
    setting = resolved(setting, dataset).but(**shuffle_of(setting))
    losses = list(dict.fromkeys([BASELINE, *losses]))
    # Before hours of training, not after.
    check_select(setting, dataset)
    setting = setting.but(measure=_measured(setting, losses, len(dataset.classes)))
    recipes = {loss: Recipe(**vars(setting), loss=loss) for loss in losses}
    parts = split(dataset, setting.validation, setting.test, setting.split_seed)
    study = _Study(out, dataset.fingerprint, seeds, budget)
    with Run(out).locked(), Pool(jobs, on_progress) as pool:
        with ThreadPoolExecutor(len(losses)) as threads:
            try:
                futures = [threads.submit(study.method, pool, recipes[loss]) for loss in losses]
                wait_in_turns(futures)
                found = [future.result() for future in futures]
            except BaseException:
                pool.stop()  # or the threads would wait for the runs
                raise
        methods = [method for method, _ in found]
        outcome = Comparison(
            data=describe(dataset, parts),
            command=command,
            settings={"budget": budget, "seeds": seeds, "metric": _metric(setting), **setting.to_json()},
            methods=tuple(methods),
            environment=info.environment(),
            failures=tuple(failure for _, failed in found for failure in failed),
        )
        outcome = dataclasses.replace(outcome, moves=find_moves(outcome, out))
        _write(outcome, out)
    return outcome


class _Study:
    def __init__(self, out: Path, fingerprint: str, seeds: int, budget: int) -> None:
        self.out, self.fingerprint, self.seeds, self.budget = out, fingerprint, seeds, budget

    def method(self, pool: Pool, start: Recipe) -> tuple[Method, list[Failure]]:
        """Tune one loss and train it; with the runs that failed."""
        failed: list[Failure] = []

        def run(recipes: list[Recipe]) -> list[Outcome]:
            folders = {self.folder(recipe): recipe for recipe in recipes}
            outcomes = pool.run(folders)
            if any(outcome == Outcome() for outcome in outcomes.values()):
                raise Stopped
            failed.extend(failures({folder.name: outcome for folder, outcome in outcomes.items()}))
            return [outcomes[self.folder(recipe)] for recipe in recipes]

        tunes_temperature = names.find(start.loss).has_temperature
        tries: dict[Point, Try] = {}
        while len(tries) < self.budget:
            points = next_points({point: made.score for point, made in tries.items()}, 2 if tunes_temperature else 1)
            points = points[: min(ROUND, self.budget - len(tries))]
            recipes = [at(start, point).but(seed=TUNING_SEED) for point in points]
            for point, recipe, outcome in zip(points, recipes, run(recipes), strict=True):
                validation = outcome.result["validation"] if outcome.result else {}
                score = validation.get(_metric(start))
                tries[point] = Try(recipe.learning_rate, recipe.temperature, score, validation)
        highest = best_point({point: made.score for point, made in tries.items()})
        tuned = at(start, highest)
        runs = []
        if tries[highest].score is not None:
            seeded = [tuned.but(seed=TUNING_SEED + 1 + number) for number in range(self.seeds)]
            for recipe, outcome in zip(seeded, run(seeded), strict=True):
                if outcome.result is not None:
                    result, folder = outcome.result, self.folder(recipe)
                    curve = tuple(Run(folder).metrics())
                    name = folder.relative_to(self.out).as_posix()
                    runs.append(SeedRun(recipe.seed, result["test"], result["validation"], result["seconds"], name, curve))
        return Method(start.loss, tuned, tuple(tries.values()), tuple(runs)), failed

    def folder(self, recipe: Recipe) -> Path:
        """A run's folder: its name follows from all that the run depends on, so that the same run is found again."""
        content = json.dumps([self.fingerprint, recipe.to_json()], sort_keys=True).encode()
        digest = hashlib.blake2b(content, digest_size=5).hexdigest()
        return self.out / "runs" / f"{recipe.loss}-seed{recipe.seed}-{digest}"


def at(start: Recipe, point: Point) -> Recipe:
    """The recipe at a point of the grid: so many factors of 2 in the learning rate and in the temperature."""
    changes: dict[str, float] = {"learning_rate": start.learning_rate * 2.0 ** point[0]}
    if len(point) > 1:
        changes["temperature"] = start.temperature * 2.0 ** point[1]
    return start.but(**changes)


def best_point(scores: Mapping[Point, float | None]) -> Point:
    """The point with the best score, the first tried among equals; failed tries are worse than any score."""
    return max(scores, key=lambda point: -1.0 if (score := scores[point]) is None else score)


def next_points(scores: Mapping[Point, float | None], dimensions: int) -> list[Point]:
    """The points to try next, in order: those nearest to the best so far that have not been tried.

    >>> next_points({}, 2)[:2]
    [(0, 0), (1, 0)]
    >>> next_points({(0, 0): 0.5, (1, 0): 0.7}, 2)[:3]
    [(1, 1), (1, -1), (2, 0)]
    """
    if not scores:
        first: Point = (0,) * dimensions
        return [first, (1, *first[1:])]
    centre, reach = best_point(scores), len(scores) + 2
    explored = [len({point[axis] for point in scores}) for axis in range(dimensions)]

    def order(offset: Point) -> tuple[int, int, list[int]]:
        """Nearest first; then along the axis of which less is known; then upwards before downwards."""
        longest = max(range(dimensions), key=lambda axis: (abs(offset[axis]), axis))
        return sum(map(abs, offset)), explored[longest], [-step for step in offset]

    offsets = sorted(itertools.product(range(-reach, reach + 1), repeat=dimensions), key=order)
    points = [tuple(c + step for c, step in zip(centre, offset, strict=True)) for offset in offsets]
    return [point for point in points if point not in scores]


def _measured(setting: Setting, losses: Sequence[str], classes: int) -> tuple[int, ...]:
    """The k that all methods must measure, beside the usual ones: what one of them trains for is judged in all."""
    trained = {
        k
        for recipe in (Recipe(**vars(setting), loss=loss) for loss in losses)
        for k in trained_ks(criterion(recipe, classes), recipe)
    }
    return tuple(sorted(k for k in {*setting.measure, *trained} if f"top{k}" not in METRICS and k < classes))


def _metric(setting: Setting) -> str:
    return setting.select if setting.select not in ("each", "last") else "mean"


def _write(outcome: Comparison, out: Path) -> None:
    """The report, and the model of the best method's best seed."""
    results.write(outcome, out / "results.json")
    page.write(outcome, out / "report.html")
    chosen = best(outcome)
    if chosen.runs:
        run = max(chosen.runs, key=lambda run: run.validation.get(outcome.settings["metric"], 0.0))
        with files.replacing(out / "model.safetensors") as temporary:
            shutil.copyfile(out / run.folder / "model.safetensors", temporary)
