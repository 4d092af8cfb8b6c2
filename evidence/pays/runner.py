"""Make the runs of the second study: see ``plan.py`` for what is asked.

    python evidence/pays/runner.py --data embeddings=FOLDER items=FILE pixels=FILE.npz --runs RUNS --jobs 2
    python evidence/pays/runner.py --data embeddings=FOLDER --runs RUNS --only main q3 --on embeddings
    python evidence/pays/runner.py status

A run that has ended is found by its folder and not made again: the command may be stopped or killed at any moment and started
again. The summaries (``evidence/summaries/pays-*``, see ``summaries.py``) are written after every round of runs; a method that
is tuned by them is not tuned again, on another machine either. A set whose data are not given is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import filelock
import numpy as np

from anyk import info
from anyk.lab import statistics
from anyk.lab.comparison.search import Runs, Search
from anyk.lab.coverage import Coverage
from anyk.lab.engines.engine import Outcome, Task
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError, Stopped
from anyk.lab.run.batches import describe, divide, read_data
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.tables import duration
from pays import confusions, plan
from pays.plan import Cell, Set
from pays.summaries import SUMMARIES, Line, Summaries, key, own

#: what the message of a run says that diverged
DIVERGED = "lower the learning rate"
#: the word for the file with what people answered for each class
PEOPLE = "confusions"
#: cells that are worked on at a time
AT_ONCE = 6


class RunsFor(Runs):
    """The runs of one set for one purpose."""

    def __init__(self, study: Study, purpose: str) -> None:
        super().__init__(study.folder, study.fingerprint)
        self.study, self.purpose = study, purpose

    def folder(self, config: Config) -> Path:
        """Named by the fields that differ from the shared config, so that a run is found again when the lab has more fields."""
        content = f"{self.fingerprint} {key(own(config, self.study.shared))}".encode()
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        return self.out / f"{config.loss.replace(':', '-')}-seed{config.seed}-{digest}"

    def run(self, configs: Sequence[Config]) -> Task[list[Outcome]]:
        """Make these runs, and write the summary of each when all have ended."""
        outcomes = {place: outcome for config in configs if (outcome := _diverged(place := self.folder(config)))}
        missing = {place: config for config in configs if (place := self.folder(config)) not in outcomes}
        fresh = {place for place in missing if Run(place).result() is None}
        outcomes |= yield {place: config.replace(**self.study.local) for place, config in missing.items()}
        for config in configs:
            place = self.folder(config)
            outcome = outcomes[place]
            if outcome == Outcome():
                raise Stopped
            if outcome.error is not None and not outcome.diverged:
                print(f"{self.study.set.name}, {self.purpose}: {outcome.error} ({place})", file=sys.stderr, flush=True)
                continue
            _slim(Run(place))
            if place in fresh:
                self.study.report(self.purpose, config, outcome)
            self.study.summaries.add(config, _covered(Run(place), outcome.result), self.purpose)
        return [outcomes[self.folder(config)] for config in configs]


def _covered(run: Run, result: dict[str, Any] | None) -> dict[str, Any] | None:
    """The result with how many guesses cover 90 and 95 % of the test examples, if these were looked at."""
    found = run.load_tensors("test.safetensors", ("ranks",)) if result else None
    if result is None or found is None:
        return result
    needed = Coverage.of("", found[0]["ranks"].numpy(), result["data"]["classes"]).guesses
    guesses = {f"guesses{share}": float(k) for share in (90, 95) if (k := needed[share]) is not None}
    return {**result, "test": {**result["test"], **guesses}}


def _diverged(place: Path) -> Outcome | None:
    error = Run(place).error()
    return Outcome(error=error, diverged=True) if error and DIVERGED in error else None


def _slim(run: Run) -> None:
    """Drop what the study does not read: the weights, and the guesses for each test example."""
    (run.folder / "model.safetensors").unlink(missing_ok=True)
    found = run.load_tensors("test.safetensors")
    if found is not None and "guesses" in found[0]:
        run.save_tensors("test.safetensors", {name: found[0][name] for name in found[0] if name != "guesses"}, {})


class Study:
    """One set of the study. What makes runs is a task for a pool.

    ``noise`` is a file with the confusion matrix of wrong labels; empty if they are right.
    """

    def __init__(self, each: Set, place: str, folder: Path, summaries: Summaries, started: float, noise: str = "") -> None:
        self.set, self.folder, self.summaries = each, folder / each.name, summaries
        #: what is of this machine, and not of the study
        self.local = {"data": place} | ({"label_noise": noise} if noise else {})
        self.shared, self.started = each.config, started
        dataset = read_data(self.shared.replace(**self.local))
        self.fingerprint = dataset.fingerprint
        parts = divide(dataset, self.shared)
        self.validation = len(parts.validation)
        summaries.describe(describe(dataset, parts), self.shared, info.environment())
        self._ranks: dict[Path, tuple[Any, Any]] = {}
        self._tuned: dict[str, Config | None] = {}

    def report(self, purpose: str, config: Config, outcome: Outcome) -> None:
        """Print a line for a run that has ended."""
        result = outcome.result
        words = f"validation {100 * result['validation']['mean']:.2f} {result['seconds']:.0f} s" if result else "diverged"
        fields = [f"{name}={value}" for name, value in own(config, self.shared).items() if name not in ("loss", "seed")]
        after = duration(time.monotonic() - self.started)
        print(
            f"[{after}] {self.set.name}, {purpose}, seed {config.seed}: {words} {' '.join(fields)}", file=sys.stderr, flush=True
        )

    def tuned(self, method: str) -> Task[Config | None]:
        """The tuned config of a method, by the summaries if they have it; None where every run failed."""
        if method not in self._tuned:
            noted = self.summaries.tuned.get(method)
            if noted is None:
                self._tuned[method] = yield from self._tune(method)
            else:
                self._tuned[method] = None if noted.get("failed") else self.set.start(method).replace(**noted["values"])
        return self._tuned[method]

    def _tune(self, method: str) -> Task[Config | None]:
        """Search, and note what was found. Runs that exist already lead it the same way again."""
        each, purpose = self.set, f"tune: {method}"
        search = Search(
            RunsFor(self, purpose),
            each.start(method),
            each.axes(method),
            examples=self.validation,
            shortens=self.shared.epochs >= 4,
            budget=each.budget,
            tuning_seeds=each.tuning_seeds,
        )
        yield from search.make(search.search())
        if plan.METHODS[method].spends:
            yield from search.make(search.spend(each.budget))
        self.summaries.assign(purpose, [search.config(trial) for trial in search.scores])
        best = search.best
        noted: dict[str, Any] = {"tries": search.tries, "capped": search.capped, "bounds": list(search.bounds)}
        if best is None:
            self.summaries.note("tuned", method, noted | {"failed": True})
            return None
        names = [axis.name for axis in search.axes]
        noted |= {"values": dict(zip(names, search.values(best), strict=True)), "score": round(search.mean(best), 6)}
        self.summaries.note("tuned", method, noted)
        return search.at(best)

    def method(self, name: str) -> Task[None]:
        """Tune a method, and train it on every seed."""
        found = yield from self.tuned(name)
        yield from self._seeds(f"main: {name}", found, self.set.seeds)
        self.count("main")

    def cell(self, each: Cell) -> Task[None]:
        """Train a cell on its seeds, from the tuned config of its method; of its choices, the best on validation."""
        tuned = yield from self.tuned(each.method)
        if tuned is None:
            return
        choice: plan.Changes = ()
        if each.choices:
            tried = [each.config(tuned, choice).replace(seed=plan.CHOOSING) for choice in each.choices]
            outcomes = yield from RunsFor(self, f"choose: {each.id}").run(tried)
            self.summaries.assign(f"choose: {each.id}", tried)
            scores = [outcome.result["validation"]["mean"] if outcome.result else -1.0 for outcome in outcomes]
            choice = each.choices[scores.index(max(scores))]
            self.summaries.note("chosen", each.id, dict(choice))
        yield from self._seeds(each.id, each.config(tuned, choice), each.seeds)
        self.count(each.question)

    def _seeds(self, purpose: str, config: Config | None, seeds: Sequence[int]) -> Task[None]:
        configs = [config.replace(seed=seed) for seed in seeds] if config is not None else []
        yield from RunsFor(self, purpose).run(configs)
        self.summaries.assign(purpose, configs)

    def count(self, question: str) -> None:
        """Count the hits of all pairs of a question on their common seeds. A seed that diverged misses everything; a pair of
        which a run's folder is gone keeps the counts that it has."""
        found, gone = [], []
        for one, other in plan.pairs(question, self.set.name):
            rows = [self.summaries.runs(name) for name in (one, other)]
            lines = [[row[seed] for row in rows] for seed in sorted(set(rows[0]) & set(rows[1]))]
            read = [[self._read(line) if line.validation else None for line in pair] for pair in lines]
            ran = [self._read(line) for pair in lines for line in pair if line.validation]
            if not ran:
                gone.append((one, other))
                continue
            if None in ran:
                continue
            ranks, groups = ran[0]
            missed = np.full_like(ranks, 255)
            for k in plan.KS:
                hits = [[(missed if each is None else each[0]) <= k for each in pair] for pair in read]
                differences = np.stack([a.astype("int8") - b for a, b in hits])
                found.append(statistics.contrast(one, other, f"top{k}", differences, groups))
        self.summaries.count(found, gone)

    def _read(self, line: Line) -> tuple[Any, Any] | None:
        """The ranks of the test examples, and their groups if they have some."""
        place = RunsFor(self, "count").folder(config_of(self.shared, line.own))
        if place not in self._ranks:
            found = Run(place).load_tensors("test.safetensors", ("ranks", "groups"))
            if found is None:
                return None
            tensors = {name: tensor.numpy() for name, tensor in found[0].items()}
            self._ranks[place] = np.minimum(tensors["ranks"], 255).astype("uint8"), tensors.get("groups")
        return self._ranks[place]


def config_of(shared: Config, fields: Mapping[str, Any]) -> Config:
    """The config of a run, from the fields that the summaries have of it."""
    return Config.from_json({**shared.to_json(), **fields})


def places(words: Sequence[str], on: Sequence[str]) -> dict[str, str]:
    """The data of the sets that were asked for; without ``on``, of those whose data are given."""
    given = dict(word.partition("=")[::2] for word in words)
    for name in (*given, *on):
        if name not in plan.EVERY and name != PEOPLE:
            raise LabError(f"there is no set {name!r}; there are {', '.join(plan.EVERY)}.")
    given.setdefault("embeddings-mlp", given.get("embeddings", ""))
    found = {}
    for name in on or (plan.EVERY if PEOPLE in given else plan.SETS):
        place, prefix = plan.EVERY[name].place, plan.EVERY[name].place.partition("{}")[0]
        source = name.partition("-wrong")[0]
        if "{}" not in place:
            found[name] = place
        elif given.get(source):
            found[name] = place.format(given[source].removeprefix(prefix))
        elif on:
            raise LabError(f"--data should say where {source} is, as {source}=PLACE.")
    return found


def run(
    sets: Mapping[str, Set],
    data: Mapping[str, str],
    folder: Path,
    out: Path,
    jobs: int,
    only: Sequence[str],
    people: str = "",
) -> None:
    """Make the runs that are missing: the main table on every set, then the questions.

    ``people`` is the file with what people answered for each class.
    """
    for word in only:
        if word not in plan.PARTS:
            raise LabError(f"--only should be of {', '.join(plan.PARTS)}, but is {word!r}.")
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    studies: dict[str, Study] = {}
    with ExitStack() as locks, Pool(jobs) as pool:
        for part in plan.PARTS:
            for name, place in data.items():
                methods = sets[name].methods if part == "main" else ()
                cells = plan.cells(part, name) if part != "main" else []
                if (only and part not in only) or not (methods or cells):
                    continue
                if name not in studies:
                    try:
                        locks.enter_context(filelock.FileLock(folder / f"{name}.lock", timeout=0))
                    except filelock.Timeout:
                        raise LabError(f"another process makes the runs of {name} in {folder}.") from None
                    noise = confusions.write(sets[name], place, folder, people) if sets[name].wrong else ""
                    studies[name] = Study(sets[name], place, folder, Summaries(sets[name], out), started, noise)
                study = studies[name]
                if methods:
                    pool.run_tasks([study.method(method) for method in methods])
                # What cells start from is tuned first: two cells of one method would make the same runs at once.
                for method in dict.fromkeys(cell.method for cell in cells):
                    pool.run_tasks([study.tuned(method)])
                for first in range(0, len(cells), AT_ONCE):
                    pool.run_tasks([study.cell(cell) for cell in cells[first : first + AT_ONCE]])
                print(f"[{duration(time.monotonic() - started)}] {name}: {part} done", file=sys.stderr, flush=True)


def status(out: Path) -> Iterator[str]:
    """What is there, and what is missing."""
    for name, each in plan.EVERY.items():
        summaries = Summaries(each, out)
        for method in each.methods:
            state = "tuned" if method in summaries.tuned else "not tuned"
            seeds = len(summaries.runs(f"main: {method}"))
            yield f"{name:23} main  {method:22} {state:9} {seeds:2} of {len(each.seeds)} seeds"
        for question in plan.QUESTIONS:
            if cells := plan.cells(question, name):
                complete = sum(len(summaries.runs(cell.id)) >= len(cell.seeds) for cell in cells)
                yield f"{name:23} {question}    {complete} of {len(cells)} rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("run", "status"), default="run")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="SET=PLACE", help="where data are: embeddings=FOLDER confusions=FILE.npy …"
    )
    parser.add_argument("--runs", type=Path, help="the run folders")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help=f"parts: {', '.join(plan.PARTS)}")
    parser.add_argument("--on", nargs="*", default=[], help=f"sets, the most important first: {', '.join(plan.EVERY)}")
    parser.add_argument("--summaries", type=Path, help="where the summaries are; by default evidence/summaries")
    parser.add_argument("--rehearse", action="store_true", help="one epoch and few tries, the summaries beside the runs")
    arguments = parser.parse_args()
    try:
        if arguments.command == "status":
            print("\n".join(status(arguments.summaries or SUMMARIES)))
            return
        if arguments.runs is None:
            raise LabError("--runs should say where the run folders are.")
        sets = {name: each.rehearsed() if arguments.rehearse else each for name, each in plan.EVERY.items()}
        out = arguments.summaries or (arguments.runs / "summaries" if arguments.rehearse else SUMMARIES)
        people = dict(word.partition("=")[::2] for word in arguments.data).get(PEOPLE, "")
        run(sets, places(arguments.data, arguments.on), arguments.runs, out, arguments.jobs, arguments.only, people)
    except (LabError, Stopped) as error:
        sys.exit(str(error) or "stopped")


if __name__ == "__main__":
    main()
