"""Real comparisons of softmax with softmax, tuned and trained with other seeds: how many end with a finding?

    python benchmarks/softmax_against_itself.py [--tables 30] [--first 0] [--effort normal] [--folder FOLDER]

There is nothing to find. Each table is made anew: 1,000 to 2,000 rows, 12 to 32 features, 10 to 40 classes. Both sides are
tuned as `anyk compare` does it, each on seeds of its own, and trained with five seeds of its own; the test is the verdict's,
over top-1 and top-5. Writes the .md file beside it. Takes some five minutes on a core; a second call goes on in the same
folder.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from measuring import markdown_table
from safetensors.torch import load_file

from anyk.lab.comparison.search import axes
from anyk.lab.comparison.tuning import EFFORTS, Effort, Tuner
from anyk.lab.data import keep, load, split
from anyk.lab.run.batches import resolved
from anyk.lab.run.config import Config
from anyk.lab.run.training import train
from anyk.lab.statistics import SIGNIFICANT, contrast, holm, two_way

SEEDS = 5
METRICS = {"top1": 1, "top5": 5}
OUT = Path(__file__).with_suffix(".md")


def table(number: int) -> dict[str, np.ndarray]:
    """Classes around centres that are too close to tell them all apart."""
    random = np.random.default_rng(number)
    rows, features, classes = random.integers(1000, 2001), random.integers(12, 33), random.integers(10, 41)
    labels = np.arange(rows) % classes
    centres = random.normal(size=(classes, features))
    return {"X": (centres[labels] + random.normal(size=(rows, features)) * 1.5).astype(np.float32), "y": labels}


def side(start: Config, examples: int, folder: Path, offset: int, effort: Effort) -> list[torch.Tensor]:
    """The ranks of the test examples' targets, for each seed, of softmax tuned on seeds from ``offset`` on."""

    def made(config: Config) -> dict[str, object] | None:
        name = f"{config.seed}-{config.learning_rate:g}-{config.label_smoothing:g}-{config.epochs}"
        try:
            return train(config, folder / name) | {"folder": folder / name}
        except Exception:  # a learning rate that is too large
            return None

    tuner = Tuner(axes(start), examples=examples, effort=effort)
    for trials in itertools.chain(tuner.search(), tuner.promote()):
        for trial in trials:
            rate, smoothing = tuner.values(trial.point)
            config = start.replace(
                learning_rate=rate,
                label_smoothing=smoothing,
                seed=offset + 1000 + trial.seed,
                epochs=start.epochs // 4 if trial.short else start.epochs,
            )
            result = made(config)
            tuner.tell(trial, None if result is None else result["validation"]["mean"])  # type: ignore[index]
    rate, smoothing = tuner.values(tuner.best)  # type: ignore[arg-type]
    runs = [made(start.replace(learning_rate=rate, label_smoothing=smoothing, seed=offset + 1 + seed)) for seed in range(SEEDS)]
    return [load_file(run["folder"] / "test.safetensors")["ranks"] for run in runs if run is not None]  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first table")
    parser.add_argument("--effort", choices=EFFORTS, default="normal")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="anyk-itself-"))
    rows, findings = [], 0
    for number in range(given.first, given.first + given.tables):
        data = table(number)
        word = keep((data["X"], data["y"]), folder / str(number) / "data")
        dataset = load(word)
        start = resolved(Config(data=word, loss="softmax"), dataset)
        examples = len(split(dataset, start.validation, start.test, start.split_seed).validation)
        places = [(folder / str(number) / f"from-{offset}", offset) for offset in (0, 100)]
        first, second = (side(start, examples, *place, EFFORTS[given.effort]) for place in places)
        pairs = list(zip(first, second, strict=True))
        found = []
        for metric, k in METRICS.items():
            hits = np.stack([(one <= k).numpy().astype("int8") - (two <= k).numpy() for one, two in pairs])
            found.append(two_way(contrast("again", "softmax", metric, hits, None)))
        corrected = holm([pair.p for pair in found])
        finding = any(p is not None and p < SIGNIFICANT for p in corrected)
        findings += finding
        shape = f"{len(data['X'])} x {data['X'].shape[1]}, {len(dataset.classes)} classes"
        points = [f"{100 * pair.difference:+.2f}" for pair in found]
        rows.append((shape, *points, *("-" if p is None else f"{p:.3f}" for p in corrected), "finding" if finding else ""))
    header = ("table", "Δ top-1, points", "Δ top-5, points", "p, top-1", "p, top-5", "")
    options = f"--tables {given.tables} --first {given.first} --effort {given.effort}"
    command = f"Command: `python benchmarks/{Path(__file__).name} {options}`"
    parts = ["# Softmax against itself", __doc__.splitlines()[0], command, f"{findings} of {given.tables}."]
    OUT.write_text("\n\n".join([*parts, markdown_table(header, rows)]) + "\n")


if __name__ == "__main__":
    main()
