"""What the search of `anyk compare` costs, and how good the points are that it finds: quick, normal and thorough.

    python benchmarks/search_cost.py run FOLDER [--sets NAME …] [--data NAME=PATH …]     goes on where it was stopped
    python benchmarks/search_cost.py table FOLDER                                         writes the .md file beside it

Each search is made as `anyk compare` makes it, with the same code, on two sets of tuning seeds; a run that several searches
ask for is made once and kept in FOLDER. What a point is worth is the test accuracy, the mean of top-1 and top-5 as it was
tuned for, averaged over eight further seeds. The cost counts a run by its part of a full training: a short one is a quarter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import softmax_against_itself
import torch
from measuring import markdown_table

from anyk.lab.comparison import search as searching
from anyk.lab.comparison.config import ComparisonConfig
from anyk.lab.comparison.search import Runs, measured_ks, shortens, started, tune
from anyk.lab.comparison.tuning import EFFORTS, Effort
from anyk.lab.data import keep
from anyk.lab.engines.engine import Engine, Outcome
from anyk.lab.errors import Diverged
from anyk.lab.run.batches import divide, read_data, resolved, shuffle_of, steps_per_epoch, windows_of
from anyk.lab.run.config import Config, Setting
from anyk.lab.run.training import train

OUT = Path(__file__).with_suffix(".md")
LOSSES = ("softmax", "gce", "error", "splitter")
REPEATS, SEEDS = 2, 8
TUNING_SEEDS = searching.TUNING_SEED_NUMBERS


def table(number: int) -> tuple[np.ndarray, np.ndarray]:
    made = softmax_against_itself.table(number)
    return made["X"], made["y"]


def useless() -> tuple[np.ndarray, np.ndarray]:
    """24 classes, twelve pairs of similar ones; 8 features that tell them apart in part, and one of 60 codes, one-hot, that
    means nothing. On few validation examples, short runs cannot tell rates apart that differ a hundredfold."""
    rng = np.random.default_rng(7)
    centres = 1.1 * np.repeat(rng.normal(size=(12, 8)), 2, 0) + 0.55 * rng.normal(size=(24, 8))
    labels = rng.integers(24, size=3200)
    told = centres[labels] + rng.normal(size=(3200, 8))
    return np.concatenate([told, np.eye(60)[rng.integers(60, size=3200)]], 1).astype(np.float32), labels


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels


#: name -> the data, a word or a function, and settings; a path that is None is given with --data
SETS: dict[str, tuple[str | Callable[[], Any] | None, dict[str, Any]]] = {
    "table1": (lambda: table(1), {}),
    "table2": (lambda: table(2), {}),
    "table3": (lambda: table(3), {}),
    "useless": (useless, {}),
    "digits": (digits, {}),
    "isolet": (None, {"model": "mlp", "epochs": 8}),
    "embeddings": (None, {"train_fraction": 0.2}),
    "completion": (
        "completion",
        {
            "train_fraction": 0.1,
            "epochs": 1,
            "learning_rate": 0.05,
            "context": 4,
            "embedding": 16,
            "hidden": 24,
            "dropout": 0.0,
        },
    ),
    "glyphs": ("glyphs:20", {"epochs": 4, "train_fraction": 0.5}),
}


class Recorded(Engine):
    """Runs made in this process, one at a time, and kept in a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.used, self._ended = file, dict[str, Config](), list[tuple[Path, Outcome]]()
        lines = file.read_text().splitlines() if file.exists() else []
        self.known: dict[str, dict[str, Any]] = {run["key"]: run for run in map(json.loads, lines)}

    def room(self, setting: Setting) -> int:
        return 1

    def _has_room(self) -> bool:
        return True

    def _ended_before(self, folder: Path, config: Config) -> Outcome | None:
        return None

    def _start(self, folder: Path, config: Config) -> None:
        self.used[folder.name] = config
        if folder.name not in self.known:
            with tempfile.TemporaryDirectory() as place:
                start = time.process_time()
                try:
                    result = train(config, Path(place) / "run")
                    found = {"validation": result["validation"], "test": result["test"]}
                except Diverged:
                    found = {}
            self.known[folder.name] = {"key": folder.name, "cpu": round(time.process_time() - start, 2), **found}
            with self.file.open("a") as file:
                file.write(json.dumps(self.known[folder.name]) + "\n")
        run = self.known[folder.name]
        self._ended.append((folder, Outcome(run) if "validation" in run else Outcome(error="diverged", diverged=True)))

    def _wait(self) -> list[tuple[Path, Outcome]]:
        ended, self._ended = self._ended, []
        return ended

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


def run(name: str, folder: Path, word: str | None, efforts: dict[str, Effort]) -> None:
    source, changes = SETS[name]
    if source is None:
        source = word
    if source is None:
        return
    data = source if isinstance(source, str) else keep(source(), folder / "data" / name)
    config = ComparisonConfig(data=data, losses=LOSSES, out=str(folder / "out"), **changes)
    dataset = read_data(config)
    classes = len(dataset.classes)
    config = resolved(config, dataset).replace(**shuffle_of(config)).with_ks(classes)
    config = config.replace(measure=measured_ks(config, classes))
    starts = [started(config.run_config(loss), classes) for loss in config.losses]
    parts = divide(dataset, config)
    windows = windows_of(dataset, parts, config)
    able = shortens(config.epochs * steps_per_epoch(config, parts, windows))
    for repeat in range(REPEATS):
        for level, effort in efforts.items():
            searching.TUNING_SEED_NUMBERS = tuple(100 * repeat + seed for seed in TUNING_SEEDS)
            runs, engine = Runs(folder / "out", dataset.fingerprint), Recorded(folder / f"{name}.jsonl")
            searches = tune(engine, runs, starts, effort=effort, examples=len(parts.validation), shortens=able)
            full = config.epochs * config.train_fraction
            costs = {
                one.start.loss: sum(
                    made.epochs * made.train_fraction / full for made in engine.used.values() if made.loss == one.start.loss
                )
                for one in searches
            }
            for one in searches:
                if one.best is None:
                    continue
                best = one.at(one.best)
                seeded = [best.replace(seed=seed) for seed in range(1, SEEDS + 1)]
                ended = engine.run({runs.folder(each): each for each in seeded}).values()
                tests = [outcome.result["test"]["mean"] for outcome in ended if outcome.result]
                line = {
                    "set": name,
                    "repeat": repeat,
                    "effort": level,
                    "loss": one.start.loss,
                    "cost": costs[one.start.loss],
                    "values": one.values(one.best),
                    "test": 100 * statistics.mean(tests),
                    "bounds": one.bounds,
                }
                with (folder / "searches.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


def report(folder: Path) -> str:
    lines = [json.loads(line) for line in (folder / "searches.jsonl").read_text().splitlines()]
    found = {(one["set"], one["repeat"], one["loss"], one["effort"]): one for one in lines}
    levels = list(dict.fromkeys(one["effort"] for one in lines))
    cells = sorted({key[:3] for key in found if all((*key[:3], level) in found for level in levels)})
    rows = []
    for name in [*dict.fromkeys(cell[0] for cell in cells), "all"]:
        own = [cell for cell in cells if name in (cell[0], "all")]
        row = [name, str(len(own))]
        for level in levels:
            costs = [found[(*cell, level)]["cost"] for cell in own]
            gaps = [found[(*cell, level)]["test"] - found[(*cell, "thorough")]["test"] for cell in own]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
            row.append(f"{statistics.mean(costs):.1f}")
            row.append("" if level == "thorough" else f"{statistics.mean(gaps):+.2f} ± {error:.2f}")
        rows.append(row)
    header = ["set", "searches", *(word for level in levels for word in (f"{level}: trainings", "points"))]
    return "\n\n".join(
        [
            "# What the search of a comparison costs",
            (__doc__ or "").strip(),
            "## Trainings and points",
            "Trainings of a search, without the seeds that follow; points of test accuracy against those of thorough, mean ± "
            "standard error over the searches.",
            markdown_table(header, rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--data", nargs="*", default=[], help="NAME=PATH of isolet and embeddings")
    parser.add_argument("--variants", type=json.loads, default={}, help="further efforts: a name and the fields that differ")
    given = parser.parse_args()
    if given.action == "table":
        OUT.write_text(report(given.folder) + "\n")
        return
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    efforts = dict(EFFORTS)
    for name, changes in given.variants.items():
        efforts[name] = dataclasses.replace(EFFORTS["normal"], **changes)
    words = dict(pair.split("=", 1) for pair in given.data)
    for name in given.sets:
        run(name, given.folder, words.get(name), efforts)
    shutil.rmtree(given.folder / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
