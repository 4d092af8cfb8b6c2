"""Outcomes and run folders as the lab would write them, made up."""

import dataclasses
import io
import json
import math
import random
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from anyk.lab.comparison.outcome import ByClass, Comparison, Example, Guess, Method, Moves, SeedRun, Try
from anyk.lab.coverage import Coverage
from anyk.lab.run import batches, loss_names, models, training
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.statistics import contrast


def png(number=0):
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (17 * number % 256, 90, 160)).save(out, "PNG")
    return out.getvalue()


def run(seed, test, epochs=0):
    validation = {**test, "mean": (test.get("top1", 0.0) + test.get("top5", 0.0)) / 2}
    curve = tuple(
        {
            "step": 10 * epoch,
            "epoch": epoch,
            "train_loss": 1 / epoch,
            "validation": {name: value * (1 - 0.8 / epoch) for name, value in validation.items()},
        }
        for epoch in range(1, epochs + 1)
    )
    return SeedRun(seed, test, validation, 12.5 + seed, f"runs/{seed}", curve)


def method(name, tests, *, epochs=0, config=None, tries=None):
    """A method from the test accuracies of seeds 0, 1, ...; tuned in the middle of its grid."""
    config = config or Config(loss=name if name in LOSSES else "splitter", learning_rate=1e-3, temperature=0.5, m=16)
    if tries is None:
        grid = [(rate, t) for rate in (1e-4, 1e-3, 1e-2) for t in (0.25, 0.5, 1.0)]
        tries = tuple(Try(rate, t, 20, (0.5 + (rate == 1e-3) / 10 + (t == 0.5) / 20,)) for rate, t in grid)
    return Method(name, config, tries, tuple(run(seed, test, epochs) for seed, test in enumerate(tests)))


LOSSES = ["error:lapsum" if name == "error:OPERATOR" else name for name in loss_names.names()]


def accuracies(top1, top5, top10=None, seeds=5, noise=0.002, salt=0):
    """Test accuracies around these, for each seed, the same every time."""
    chance = random.Random(f"{top1} {top5} {salt}")
    centers = {"top1": top1, "top5": top5, **({"top10": top10} if top10 is not None else {})}
    return [{name: center + chance.uniform(-noise, noise) for name, center in centers.items()} for _ in range(seeds)]


def comparison(*methods, classes=100, **changes):
    given = {
        "data": {
            "name": "cifar100",
            "kind": "images",
            "classes": classes,
            "train": 45000,
            "validation": 5000,
            "test": 10000,
            "fingerprint": "9f86d081884c7d65",
        },
        "command": "anyk compare cifar100 --seeds 5 --budget 9",
        "settings": {"budget": 9, "seeds": [0, 1, 2, 3, 4], "metric": "mean", "p_k": [0.5, 0.0, 0.0, 0.0, 0.5], "m": 16},
        "environment": {"anyk": "0.1.0", "torch": "2.9.0", "cpu": "2 cores"},
    }
    return Comparison(methods=methods, **{**given, **changes})


def moves(count=2, name="splitter", image=True, context=()):
    examples = tuple(
        Example(
            f"row {number}",
            "beaver",
            "in" if number % 2 == 0 else "out",
            tuple(Guess(label, 0.4 / (place + 1)) for place, label in enumerate(("otter", "seal", "shrew", "mouse", "bear"))),
            tuple(map(Guess, ("otter", "seal", "beaver", "shrew", "mouse"))),
            (7, 3),
            png(number) if image else None,
            tuple(context),
        )
        for number in range(count)
    )
    return Moves(name, 5, 0, 312, 145, examples)


def coverage(name, *guesses, classes=100):
    """How many guesses of a method cover 50, 80, 90, 95 and 99 %."""
    curve = tuple((k, sum(need is not None and need <= k for need in guesses) / 5) for k in (1, 10, classes))
    return Coverage(name, dict(zip((50, 80, 90, 95, 99), guesses, strict=True)), curve)


def with_guesses(out, method, labels, guessed):
    """The method with runs in ``out`` that have kept these guesses: for each seed, for each example, classes, best first."""
    runs = []
    for run, rows in zip(method.runs, guessed, strict=True):
        run = dataclasses.replace(run, folder=f"runs/{method.name}-{run.seed}")
        ranks = [row.index(label) + 1 if label in row else 1000 for label, row in zip(labels, rows, strict=True)]
        (out / run.folder).mkdir(parents=True, exist_ok=True)
        tensors = {"ranks": torch.tensor(ranks, dtype=torch.int32), "guesses": torch.tensor(rows, dtype=torch.int32)}
        Run(out / run.folder).save_tensors("test.safetensors", tensors, {})
        runs.append(run)
    return dataclasses.replace(method, runs=tuple(runs))


def by_class(before, after, examples=10, name="splitter", confusions=()):
    """Hits of classes called class 0, class 1, …, the same in every metric."""
    names = tuple(f"class {number}" for number in range(len(before)))
    hits = [{metric: tuple(side) for metric in ("top1", "top5")} for side in (before, after)]
    return ByClass(name, (0, 1, 2), names, (examples,) * len(names), *hits, tuple(confusions))


def run_folder(folder, config, test=None, *, error=None, fingerprint="abc", seconds=10.0):
    """A run folder: finished with a test result, failed with an error, else unfinished."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "environment.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("")
    if error is not None:
        (folder / "error.txt").write_text(error)
    if test is not None:
        result = {
            "format": 1,
            "config": config.to_json(),
            "data": {"name": config.data, "fingerprint": fingerprint, "classes": 100},
            "seconds": seconds,
            "validation": {**test, "mean": 0.5},
            "test": test,
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def trained(folder):
    """The data of a run that has ended, their parts, what reads them, and the model."""
    config, classifier = Run(folder).config(), models.load(folder, trust=True)
    means = {name: getattr(classifier.plan, name) for name in ("feature_mean", "feature_std")}
    dataset = dataclasses.replace(training.read_data(config), **means)
    config = batches.resolved(config, dataset)
    reader = batches.Reader(dataset, torch.device("cpu"), config)
    return SimpleNamespace(dataset=dataset, parts=batches.divide(dataset, config), reader=reader, model=classifier.model)


SOFTMAX = method("softmax", accuracies(0.60, 0.80, 0.90))


def shifted(**shifts):
    """Softmax's accuracies with each metric moved, and a little noise so that there is a variance."""
    noise = [0.0003, -0.0002, 0.0001, -0.0003, 0.0002]
    runs = [run.test for run in SOFTMAX.runs]
    return [
        {name: value + shifts.get(name, 0.0) + noise[(seed + len(name)) % 5] for name, value in test.items()}
        for seed, test in enumerate(runs)
    ]


def counted(method, metric, shift, *, against="softmax", seeds=5, examples=10_000, swaps=100):
    """Hits of a method against another: some examples are won or lost by luck on each seed, the shift on every seed."""
    chance = np.random.default_rng([*f"{method} {metric}".encode()])
    d = np.zeros((seeds, examples), dtype=int)
    for row in d:  # as many won as lost
        row[: 2 * swaps] = chance.permutation([-1, 1] * swaps)
    gained = round(abs(shift) * examples)
    d[:, 2 * swaps : 2 * swaps + gained] = math.copysign(1, shift)
    return contrast(method, against, metric, d)


def measured(*methods, controls=(), between=(), examples=10_000, **changes):
    """A comparison whose hits were counted: the differences between the methods' mean accuracies, and a little luck.

    ``between`` holds pairs of names, a method and its control, that were counted too.
    """
    everything = {method.name: method for method in (*methods, *controls)}
    pairs = [(name, "softmax") for name in everything if name != "softmax"] + list(between)
    found = []
    for name, against in pairs if "softmax" in everything else ():
        seeds = {run.seed for run in everything[name].runs} & {run.seed for run in everything[against].runs}
        for metric in everything[name].runs[0].test if seeds else ():
            means = [fmean(run.test[metric] for run in everything[one].runs) for one in (name, against)]
            found.append(counted(name, metric, means[0] - means[1], against=against, seeds=len(seeds), examples=examples))
    return comparison(*methods, controls=tuple(controls), contrasts=tuple(found), **changes)


def with_others(comparison):
    """The same with metrics that are shown and not tested: each seed's are its top-1 and a tenth."""

    def more(method):
        runs = []
        for run in method.runs:
            other = ("mrr", "ndcg5", "ndcg10", "ndcg20", "macro_top1", "macro_top5", "macro_top20")
            extra = dict.fromkeys(other, run.test["top1"] + 0.1)
            runs.append(dataclasses.replace(run, test={**run.test, **extra}))
        return dataclasses.replace(method, runs=tuple(runs))

    both = {part: tuple(map(more, getattr(comparison, part))) for part in ("methods", "controls")}
    return dataclasses.replace(comparison, **both)


def with_validation(method, value, spread=1e-4):
    """The same method with this score on validation, a little more for each seed."""
    runs = [dataclasses.replace(run, validation={"mean": value + spread * run.seed}) for run in method.runs]
    return dataclasses.replace(method, runs=tuple(runs))


def longer(method, gain):
    """The same method with this gain by twice the epochs."""
    return dataclasses.replace(method, same_length={"mean": 0.7}, longer={"mean": 0.7 + gain})
