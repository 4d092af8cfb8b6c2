"""How the runs of the second study are made: see ``run.py`` for the command, ``plan.py`` for what is asked."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics as plain_statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from anyk import info
from anyk.lab import statistics
from anyk.lab.comparison.search import Runs, Search, together
from anyk.lab.comparison.tuning import COARSE_POINTS
from anyk.lab.data import load
from anyk.lab.engines.engine import Outcome
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError, Stopped
from anyk.lab.run.batches import describe, divide
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.tables import duration
from pays import plan
from pays.kept import SUMMARIES, Kept, key, own
from pays.plan import Cell, Set

#: what the message of a run says that diverged
DIVERGED = "lower the learning rate"
#: cells that are worked on together
AT_ONCE = 6


class Made(Runs):
    """The runs of one set for one purpose."""

    def __init__(self, study: Study, purpose: str) -> None:
        super().__init__(study.pool, study.folder, study.fingerprint)
        self.study, self.purpose = study, purpose

    def folder(self, config: Config) -> Path:
        """Named by what the config has of its own, so that a run is found again when the lab has more fields."""
        content = f"{self.fingerprint} {key(own(config, self.study.shared))}".encode()
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        return self.out / f"{config.loss.replace(':', '-')}-seed{config.seed}-{digest}"

    def run(self, configs: Sequence[Config]) -> list[Outcome]:
        """Make these runs, and keep the summary of each when it ends."""
        return together(self.pool, self._one, configs) if configs else []

    def _one(self, config: Config) -> Outcome:
        place = self.folder(config)
        with self.study.alone(place):  # two cells may want the same run
            outcome, there = _diverged(place), Run(place).result() is not None
            fresh = outcome is None and not there
            outcome = outcome or self.pool.run({place: config.replace(data=self.study.place)})[place]
            if outcome == Outcome():
                raise Stopped
            if outcome.error is not None and not outcome.diverged:
                print(f"{self.study.set.name}, {self.purpose}: {outcome.error} ({place})", file=sys.stderr, flush=True)
                return outcome
            if fresh:
                _slim(Run(place))
                self.study.tell(self.purpose, config, outcome)
            self.study.kept.add(config, outcome.result, self.purpose)
        return outcome


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
    """One set of the study, with a pool to make its runs."""

    def __init__(self, each: Set, place: str, folder: Path, pool: Pool, kept: Kept, started: float) -> None:
        self.set, self.place, self.folder, self.pool, self.kept = each, place, folder / each.name, pool, kept
        self.shared, self.started = each.config, started
        dataset = load(place, self.shared.image_size)
        self.fingerprint = dataset.fingerprint
        parts = divide(dataset, self.shared)
        self.validation = len(parts.validation)
        kept.describe(describe(dataset, parts), self.shared, info.environment())
        self._ranks: dict[Path, tuple[Any, Any]] = {}
        self._tuned: dict[str, Config | None] = {}
        self._alone: dict[Path, threading.Lock] = {}

    def alone(self, place: Path) -> threading.Lock:
        """To be held by who makes a run."""
        return self._alone.setdefault(place, threading.Lock())

    def tell(self, purpose: str, config: Config, outcome: Outcome) -> None:
        """A line for a run that has ended."""
        found = outcome.result["validation"]["mean"] if outcome.result else None
        words = f"validation {100 * found:.2f}" if found is not None else "diverged"
        fields = {name: value for name, value in own(config, self.shared).items() if name not in ("loss", "seed")}
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        seconds = f"{outcome.result['seconds']:.0f} s" if outcome.result else ""
        run = f"{self.set.name}, {purpose}, seed {config.seed}"
        print(f"[{duration(time.monotonic() - self.started)}] {run}: {words} {seconds} {told}", file=sys.stderr, flush=True)

    # Main table --------------------------------------------------------------------------------------------------------------

    def tuned(self, method: str) -> Config | None:
        """The tuned config of a method; None where every run failed."""
        if method not in self._tuned:
            self._tuned[method] = self._tune(method)
        return self._tuned[method]

    def _tune(self, method: str) -> Config | None:
        """Search, with the runs that are there: they lead the same way again."""
        each, purpose = self.set, f"tune: {method}"
        search = Search(
            Made(self, purpose),
            each.start(method),
            each.axes(method),
            examples=self.validation,
            shortens=self.shared.epochs >= 4,
            budget=each.budget,
            tuning_seeds=each.tuning_seeds,
        )
        search.make(search.search())
        if plan.METHODS[method].spends:
            search.make(search.spend(each.budget))
        self.kept.assign(purpose, [search.config(trial) for trial in search.scores])
        best = search.best
        noted: dict[str, Any] = {"tries": search.tries, "capped": search.capped, "bounds": list(search.bounds)}
        if best is None:
            self.kept.note("tuned", method, noted | {"failed": True})
            return None
        names = [axis.name for axis in search.axes]
        noted |= {"values": dict(zip(names, search.values(best), strict=True)), "score": round(search.mean(best), 6)}
        self.kept.note("tuned", method, noted)
        return search.at(best)

    def method(self, name: str) -> None:
        """Tune a method, and train it on every seed."""
        purpose, found = f"main: {name}", self.tuned(name)
        configs = [found.replace(seed=seed) for seed in self.set.seeds] if found is not None else []
        Made(self, purpose).run(configs)
        self.kept.assign(purpose, configs)
        self.count("main")

    # Questions ---------------------------------------------------------------------------------------------------------------

    def cell(self, each: Cell) -> None:
        """Train a cell on its seeds, from the tuned config of its method; of its choices, the best on validation."""
        tuned = self.tuned(each.method)
        if tuned is None:
            return
        choice: plan.Changes = ()
        if each.choices:
            tried = [each.config(tuned, choice).replace(seed=plan.CHOOSING) for choice in each.choices]
            outcomes = Made(self, f"choose: {each.id}").run(tried)
            self.kept.assign(f"choose: {each.id}", tried)
            scores = [outcome.result["validation"]["mean"] if outcome.result else -1.0 for outcome in outcomes]
            choice = each.choices[scores.index(max(scores))]
            self.kept.note("chosen", each.id, dict(choice))
        configs = [each.config(tuned, choice).replace(seed=seed) for seed in each.seeds]
        Made(self, each.id).run(configs)
        self.kept.assign(each.id, configs)
        self.count(each.question)

    # Counts ------------------------------------------------------------------------------------------------------------------

    def count(self, question: str) -> None:
        """Count the hits of all pairs of a question on their common seeds. A seed that diverged misses everything; a pair of
        which a run's folder is gone keeps the counts that it has."""
        found, gone = [], []
        made = Made(self, "count")
        for one, other in plan.pairs(question, self.set.name):
            rows = [self.kept.runs(name) for name in (one, other)]
            seeds = sorted(set(rows[0]) & set(rows[1]))
            lines = [[row[seed] for row in rows] for seed in seeds]
            both = [
                [self._read(made.folder(_config(self.shared, line.own))) if line.validation else None for line in pair]
                for pair in lines
            ]
            if not any(line.validation for pair in lines for line in pair):
                gone.append((one, other))
                continue
            if any(
                line.validation and ranks is None
                for pair, read in zip(lines, both, strict=True)
                for line, ranks in zip(pair, read, strict=True)
            ):
                continue
            ranks, groups = next(read for pair in both for read in pair if read is not None)
            missed = np.full_like(ranks, 255)
            for k in plan.KS:
                hits = [[(missed if read is None else read[0]) <= k for read in pair] for pair in both]
                found.append(
                    statistics.contrast(one, other, f"top{k}", np.stack([a.astype("int8") - b for a, b in hits]), groups)
                )
        self.kept.count(found, gone)

    def _read(self, place: Path) -> tuple[Any, Any] | None:
        """The ranks of the test examples, and their groups if they have some."""
        if place not in self._ranks:
            found = Run(place).load_tensors("test.safetensors", ("ranks", "groups"))
            if found is None:
                return None
            tensors = {name: tensor.numpy() for name, tensor in found[0].items()}
            self._ranks[place] = np.minimum(tensors["ranks"], 255).astype("uint8"), tensors.get("groups")
        return self._ranks[place]


def _config(shared: Config, fields: Mapping[str, Any]) -> Config:
    return Config.from_json({**shared.to_json(), **fields})


# The command ---------------------------------------------------------------------------------------------------------------


def steps(only: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The parts that were asked for, and of the main table its waves, in the order in which they are made."""
    known = {f"main:{number}": ("main", number) for number in range(1, len(plan.WAVES) + 1)}
    known |= {question: (question, 0) for question in plan.QUESTIONS}
    for word in only:
        if word not in (*known, "main"):
            raise LabError(f"--only should be of main, {', '.join(known)}, but is {word!r}.")
    order = ["main:1", "main:2", *plan.QUESTIONS, *(f"main:{number}" for number in range(3, len(plan.WAVES) + 1))]
    for word in order:
        if not only or word in only or word.partition(":")[0] in only:
            yield known[word]


def places(words: Sequence[str], on: Sequence[str]) -> dict[str, str]:
    """The data of the sets that were asked for and have a place."""
    given = dict(word.partition("=")[::2] for word in words)
    for name in (*given, *on):
        if name not in plan.SETS:
            raise LabError(f"there is no set {name!r}; there are {', '.join(plan.SETS)}.")
    given.setdefault("embeddings-mlp", given.get("embeddings", ""))
    found = {}
    for name, each in plan.SETS.items():
        if on and name not in on:
            continue
        place = given.get(name, "")
        if "{}" not in each.place:
            found[name] = each.place
        elif place:
            prefix = each.place.partition("{}")[0]
            found[name] = place if prefix and place.startswith(prefix) else each.place.format(place)
        elif on:
            raise LabError(f"--data should say where {name} is, as {name}=PLACE.")
    return {name: found[name] for name in (on or found) if name in found}


def run(sets: Mapping[str, Set], data: Mapping[str, str], folder: Path, out: Path, jobs: int, only: Sequence[str]) -> None:
    """Make the runs that are missing."""
    started, wanted = time.monotonic(), list(steps(only))
    folder.mkdir(parents=True, exist_ok=True)
    studies: dict[str, Study] = {}
    locks = []
    with Pool(jobs) as pool:
        for part, wave in wanted:
            for name, place in data.items():
                each = sets[name]
                methods = plan.waves(each.methods)[wave - 1] if part == "main" else []
                cells = plan.cells(part, name) if part != "main" else []
                if not methods and not cells:
                    continue
                if name not in studies:
                    lock = filelock.FileLock(folder / f"{name}.lock", timeout=0)
                    try:
                        lock.acquire()
                    except filelock.Timeout:
                        raise LabError(f"another process makes the runs of {name} in {folder}.") from None
                    locks.append(lock)
                    studies[name] = Study(each, place, folder, pool, Kept(each, out), started)
                study = studies[name]
                if methods:
                    together(pool, study.method, methods)
                # What they start from is tuned first: two cells of one method would make the same runs at once.
                for method in dict.fromkeys(cell.method for cell in cells):
                    study.tuned(method)
                for first in range(0, len(cells), AT_ONCE):
                    together(pool, study.cell, cells[first : first + AT_ONCE])
                after = duration(time.monotonic() - started)
                told = ", ".join(methods) or part
                print(f"[{after}] {name}: {told} done", file=sys.stderr, flush=True)


def status(out: Path) -> Iterator[str]:
    """What is there, what is missing, and the seconds of a core that it will take, roughly."""
    total = 0.0
    for name, each in plan.SETS.items():
        kept = Kept(each, out)
        full = [line.seconds for line in kept.lines.values() if line.own.get("epochs", 0) == 0 and line.validation]
        seconds = plain_statistics.median(full) if full else each.seconds
        left = 0.0
        for method in each.methods:
            there, tries = len(kept.runs(f"main: {method}")), len(tried(kept, method))
            expected = each.budget + COARSE_POINTS / 4 + 2 * (each.tuning_seeds - 1)
            tuning = 0.0 if method in kept.tuned else max(expected - tries, 1.0)
            runs = len(each.seeds) - there
            left += seconds * (tuning + runs)
            state = "tuned" if method in kept.tuned else f"{tries} tries"
            yield f"{name:15} main  {method:22} {state:9} {there:2} of {len(each.seeds)} seeds"
        for question in plan.QUESTIONS:
            cells = plan.cells(question, name)
            there = [min(len(kept.runs(cell.id)), len(cell.seeds)) for cell in cells]
            for cell, made in zip(cells, there, strict=True):
                choices = len(cell.choices) if cell.id not in kept.head["chosen"] else 0
                left += seconds * cell.cost() * (len(cell.seeds) - made + choices)
            if cells:
                complete = sum(made == len(cell.seeds) for cell, made in zip(cells, there, strict=True))
                yield f"{name:15} {question}    {complete} of {len(cells)} rows"
        yield f"{name:15} a run {seconds:.0f} s, left about {left:.0f} core-seconds"
        total += left
    yield f"all: left about {total:.0f} core-seconds ({duration(total)})"


def tried(kept: Kept, method: str) -> dict[str, Any]:
    """The runs of a method's tuning."""
    return {name: line for name, line in kept.lines.items() if f"tune: {method}" in line.purposes}


def main(description: str) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("run", "status"), default="run")
    parser.add_argument("--data", nargs="+", default=[], metavar="SET=PLACE", help="where data are: embeddings=FOLDER …")
    parser.add_argument("--runs", type=Path, help="the run folders")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help=f"parts: {', '.join(plan.PARTS)}, main:1 …")
    parser.add_argument("--on", nargs="*", default=[], help=f"sets, the most important first: {', '.join(plan.SETS)}")
    parser.add_argument("--seeds", type=int, help="at most so many seeds in the main table")
    parser.add_argument("--summaries", type=Path, help="where the summaries are; by default evidence/summaries")
    parser.add_argument("--rehearse", action="store_true", help="one epoch and few tries, the summaries beside the runs")
    arguments = parser.parse_args()
    try:
        if arguments.command == "status":
            print("\n".join(status(arguments.summaries or SUMMARIES)))
            return
        if arguments.runs is None:
            raise LabError("--runs should say where the run folders are.")
        sets: dict[str, Set] = dict(plan.SETS)
        if arguments.rehearse:
            sets = {name: each.rehearsed() for name, each in sets.items()}
        if arguments.seeds:
            sets = {name: dataclasses.replace(each, seeds=each.seeds[: arguments.seeds]) for name, each in sets.items()}
        out = arguments.summaries or (arguments.runs / "summaries" if arguments.rehearse else SUMMARIES)
        data = places(arguments.data, arguments.on)
        run(sets, data, arguments.runs, out, arguments.jobs, arguments.only)
    except (LabError, Stopped) as error:
        sys.exit(str(error) or "stopped")
