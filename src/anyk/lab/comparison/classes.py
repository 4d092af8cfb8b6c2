"""What each class gains and loses: hits and confusions of the closest rival and of the baseline, over the seeds."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyk.lab.comparison.outcome import ByClass, Comparison, Confusion, SeedRun, metrics, rival, shared
from anyk.lab.data import Dataset, Parts
from anyk.lab.run.run_folder import Run

#: confusions that are kept of each of the two
KEPT_CONFUSIONS = 20

Tensors = dict[str, NDArray[Any]]


def tested(run: SeedRun, out: Path) -> Tensors | None:
    """The ``ranks`` and ``guesses`` of a run's test examples; None where the run kept none."""
    found = Run(out / run.folder).load_tensors("test.safetensors", ("ranks", "guesses"))
    return None if found is None else {name: tensor.numpy() for name, tensor in found[0].items()}


def count_classes(comparison: Comparison, out: Path, dataset: Dataset, parts: Parts) -> ByClass | None:
    """Count the hits of the baseline and of its rival in each class; None where there is nothing to count.

    Args:
        comparison: the methods with their runs.
        out: the folder that the runs' folders are in.
        dataset: the data of the runs.
        parts: their split of it.
    """
    method = rival(comparison)
    if method is None:
        return None
    target = parts.test.labels[parts.test_index].numpy()
    known = target >= 0  # the others are none of the classes
    examples = np.bincount(target[known], minlength=len(dataset.classes))
    present = np.flatnonzero(examples)
    names = metrics(comparison)
    hits = np.zeros((2, len(names), len(examples)), dtype=np.int64)
    confusions: tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]] = (Counter(), Counter())
    seeds = []
    for runs in shared(comparison, method):
        both = [tested(run, out) for run in runs]
        if any(one is None or len(one["ranks"]) != len(target) for one in both):
            continue
        seeds.append(runs[0].seed)
        for side, one in enumerate(both):
            assert one is not None
            for row, metric in enumerate(names):
                hit = one["ranks"] <= int(metric.removeprefix("top"))
                hits[side, row] += np.bincount(target[hit], minlength=len(examples))
            confusions[side].update(_confusions(target[known], one["guesses"][known, 0]))
    if not seeds:
        return None
    before, after = ({metric: tuple(hits[side, row, present].tolist()) for row, metric in enumerate(names)} for side in (0, 1))
    return ByClass(
        method.name,
        tuple(seeds),
        tuple(dataset.classes[place] for place in present),
        tuple(examples[present].tolist()),
        before,
        after,
        tuple(
            Confusion(dataset.classes[right], dataset.classes[wrong], confusions[0][right, wrong], confusions[1][right, wrong])
            for right, wrong in _most_frequent(confusions)
        ),
    )


def _confusions(target: NDArray[Any], guess: NDArray[Any]) -> dict[tuple[int, int], int]:
    """How often each (target, other class) was guessed."""
    wrong = guess != target
    pairs, counts = np.unique(np.stack([target[wrong], guess[wrong]], 1), axis=0, return_counts=True)
    return {(int(right), int(other)): int(count) for (right, other), count in zip(pairs, counts, strict=True)}


def _most_frequent(confusions: Iterable[Counter[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The pairs most frequent in one of the two, those of the first one first; of equally frequent ones in their order."""
    found: dict[tuple[int, int], None] = {}
    for counter in confusions:
        ranked = sorted(counter, key=lambda pair: (-counter[pair], pair))
        found |= dict.fromkeys(ranked[:KEPT_CONFUSIONS])
    return list(found)
