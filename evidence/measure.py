"""What is not an accuracy is measured here, into evidence/summaries/measured.json.

    python evidence/measure.py iterations --data embeddings=FOLDER
    python evidence/measure.py cost
    python evidence/measure.py collapse
    python evidence/measure.py sampling --runs RUNS

iterations: how many plain Sinkhorn iterations the scores of a head need as it trains. cost: what a selection network costs
beside full sorting. collapse: what a loss over few candidates does to scores that begin nearly equal. sampling: how much
the confirmed differences would vary with other test examples, from the models in the run folders.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anyk
import study
from anyk import candidates
from anyk.lab.data import load, split
from anyk.lab.errors import LabError
from anyk.lab.files import write_atomically
from anyk.lab.run import models
from anyk.lab.run.batches import Reader
from anyk.lab.run.config import Config
from anyk.lab.run.evaluation import Predictor
from anyk.lab.run.losses import criterion
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import learning_rate

STAGES = (0, 1, 2, 4, 7, 10)
TOLERANCE, MOST, FIXED, ROWS = 1e-3, 2000, 20, 500


def plain_sinkhorn(scores: Tensor, temperature: float, most: int = MOST, tolerance: float = TOLERANCE) -> tuple[Tensor, Tensor]:
    """How many plain Sinkhorn iterations (rows, n) scores need.

    Returns, for each row of the batch, the number of iterations until all row sums of P are right to ``tolerance`` (``most`` if
    never), and the largest error after ``FIXED`` iterations.

    >>> plain_sinkhorn(torch.tensor([[1.0, 1.0, 1.0]]), temperature=10.0)[1] < 1e-3
    tensor([True])
    """
    needed = torch.full((len(scores),), float(most))
    error_fixed = torch.zeros(len(scores), dtype=torch.double)
    state = None
    for count in range(1, most + 1):
        plan, state = plan_after(scores, temperature, 1, state)
        error = (plan.sum(-1) - 1).abs().amax(-1)
        needed = torch.where((error <= tolerance) & (needed == most), float(count), needed)
        if count == FIXED:
            error_fixed = error
        if count >= FIXED and bool((needed < most).all()):
            break
    return needed, error_fixed


def plan_after(scores: Tensor, temperature: float, count: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """P (batch, n ranks, n classes) between rank anchors -1 … -n and the scores after ``count`` further iterations from the
    row potentials ``rows``, and the new row potentials; in double precision. The columns of P sum to 1."""
    scores = scores.double()
    n = scores.shape[-1]
    anchors = (n + 1) / 2 - torch.arange(1, n + 1, dtype=torch.double)
    logits = -(anchors[:, None] - (scores - scores.mean(-1, keepdim=True))[:, None, :]).square() / temperature
    rows = torch.zeros_like(scores) if rows is None else rows
    for _ in range(count):
        columns = -(logits + rows[:, :, None]).logsumexp(1)
        rows = -(logits + columns[:, None, :]).logsumexp(2)
    return (logits + rows[:, :, None]).softmax(1), rows


def spread(scores: Tensor, position: Tensor) -> Tensor:
    """Mean absolute deviation of each row's scores other than the target's.

    >>> spread(torch.tensor([[9.0, 1.0, 3.0]]), torch.tensor([0]))
    tensor([1.])
    """
    others = candidates.others(scores, position)
    return (others - others.mean(-1, keepdim=True)).abs().mean(-1)


def iterations(place: str, seeds: int) -> dict[str, Any]:
    """Train Sinkhorn heads as the study does and look at their scores on validation from time to time."""
    tuned = study.tuning("embeddings", "sinkhorn", study.read("embeddings")).best
    if tuned is None:
        raise LabError("sinkhorn is not tuned on embeddings yet: run study.py first.")
    dataset = load(place)
    parts = split(dataset, tuned.validation, tuned.test, tuned.split_seed)
    reader = Reader(dataset, torch.device("cpu"))
    shown = parts.validation[torch.randperm(len(parts.validation), generator=torch.Generator().manual_seed(0))[:ROWS]]
    assert isinstance(tuned.temperature, float)
    found = []
    for seed in range(1, seeds + 1):
        torch.manual_seed(seed)
        model = models.build(tuned, dataset)
        loss = criterion(tuned, len(dataset.classes))
        optimizer = torch.optim.Adam(model.parameters(), tuned.learning_rate)
        steps = math.ceil(len(parts.train) / tuned.batch_size)
        seen: dict[str, list[float]] = {"iterations": [], "error": [], "spread": []}
        for epoch in range(tuned.epochs + 1):
            if epoch in STAGES:
                with torch.no_grad():
                    scores = model(reader(dataset.train, shown))
                    kept = candidates.select(scores, dataset.train.labels[shown], m=tuned.m)
                    needed, error = plain_sinkhorn(kept.scores, tuned.temperature)
                    seen["iterations"].append(round(float(needed.mean()), 2))
                    seen["error"].append(float(f"{float(error.mean()):.4g}"))
                    seen["spread"].append(round(float(spread(kept.scores, kept.position).mean()), 3))
            if epoch < tuned.epochs:
                order = parts.train[torch.randperm(len(parts.train))]
                for number, index in enumerate(order.chunk(steps)):
                    progress = (epoch + number / steps) / tuned.epochs
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate(tuned, progress)
                    optimizer.zero_grad()
                    loss(model(reader(dataset.train, index)), dataset.train.labels[index]).backward()
                    optimizer.step()
        found.append(seen)
    return {
        "stages": STAGES,
        "tolerance": TOLERANCE,
        "most": MOST,
        "fixed": FIXED,
        "rows": ROWS,
        "temperature": tuned.temperature,
        "seeds": found,
    }


def cost(turns: int = 30) -> list[dict[str, Any]]:
    """Forward and backward of the loss with each network, in turns; the best time of each, over that of bitonic."""
    torch.set_num_threads(1)
    rows = []
    for batch, n, m in ((500, 100, 16), (500, 1000, 16), (100, 100, None), (100, 1000, None)):
        scores = torch.randn(batch, n, generator=torch.Generator().manual_seed(0)).requires_grad_()
        target = torch.arange(batch) % n
        best = {}
        losses = {
            kind: anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5], anyk.SortingNetwork(kind), m=m)
            for kind in ("splitter", "bitonic", "odd_even")
        }
        for _ in range(turns if n * (m or n) < 10**6 else max(2, turns // 10)):
            for kind, loss in losses.items():
                started = time.perf_counter()
                loss(scores, target).backward()
                best[kind] = min(best.get(kind, math.inf), time.perf_counter() - started)
        ratios = {kind: round(best[kind] / best["bitonic"], 3) for kind in ("splitter", "odd_even")}
        rows.append({"batch": batch, "n": n, "m": m, **ratios})
    return rows


COLLAPSE_STEPS = (0, 50, 100, 200, 400, 780)
COLLAPSE: tuple[dict[str, Any], ...] = (
    {"p_k": study.PKS["half"], "m": None},
    {"p_k": study.PKS["half"], "m": 16},
    {"p_k": study.PKS["fifth"], "m": None},
    {"p_k": study.PKS["fifth"], "m": 16},
)


def collapse() -> dict[str, Any]:
    """Six epochs of the lab's own setting for glyphs (300 classes, batches of 50) with the splitter, seen from the scores."""
    torch.set_num_threads(1)
    dataset = load("glyphs")
    shared = Config(data="glyphs", loss="splitter", epochs=6).resolved(dataset.kind, len(dataset.train))
    parts = split(dataset, shared.validation, shared.test, shared.split_seed)
    reader = Reader(dataset, torch.device("cpu"))
    rows = []
    for changes in COLLAPSE:
        config = shared.replace(**changes)
        torch.manual_seed(1)
        model = models.build(config, dataset)
        loss = criterion(config, len(dataset.classes))
        assert isinstance(loss, anyk.TopKCrossEntropyLoss)
        later = loss.p_k.clone()
        later[0] = 0
        part = anyk.TopKCrossEntropyLoss(later / later.sum(), loss.operator, m=config.m)
        hidden: list[Tensor] = []
        model.head[1].register_forward_hook(lambda module, inputs, output, hidden=hidden: hidden.append(output.detach()))
        optimizer = torch.optim.Adam(model.parameters(), config.learning_rate)
        seen: dict[str, list[float]] = {"spread": [], "alive": [], "ratio": [], "top5": []}
        for step in range(COLLAPSE_STEPS[-1] + 1):
            index = parts.train[torch.randint(len(parts.train), (config.batch_size,))]
            target = dataset.train.labels[index]
            hidden.clear()
            scores = model(reader(dataset.train, index))
            if step in COLLAPSE_STEPS:
                leaf = scores.detach().requires_grad_()
                (of_part,) = torch.autograd.grad(part(leaf, target), leaf)
                (of_softmax,) = torch.autograd.grad(torch.nn.functional.cross_entropy(leaf, target), leaf)
                seen["spread"].append(float(f"{float(leaf.detach().std(1).mean()):.3g}"))
                seen["alive"].append(round(float((hidden[0] > 0).any(0).float().mean()), 2))
                seen["ratio"].append(float(f"{float(of_part.norm() / of_softmax.norm()):.3g}"))
                seen["top5"].append(round(float(anyk.topk_accuracy(leaf.detach(), target, (5,))[5]), 3))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step / COLLAPSE_STEPS[-1])
            optimizer.zero_grad()
            loss(scores, target).backward()
            optimizer.step()
        rows.append({"p_k": config.p_k, "m": config.m, "temperature": config.temperature, "seen": seen})
    return {"steps": COLLAPSE_STEPS, "rows": rows}


def sampling(folder: Path) -> dict[str, Any]:
    """The standard error of each confirmed difference over the draw of the test examples."""
    known = {name: study.read(name) for name in study.SETTINGS}
    found: dict[str, Any] = {}
    for data in study.SETTINGS:
        shared = study.SETTINGS[data].config
        ended = sorted(file.parent for file in (folder / data).glob("*/result.json"))
        places = {study.key(Run(place).config(), shared): place for place in ended}
        hits: dict[str, dict[str, Tensor]] = {}
        for each in study.confirmation(data, known):
            tuned = study.tuning(data, each.method, known[data]).best
            assert tuned is not None
            names = [study.key(config, shared) for config in each.configs(tuned)]
            title = each.method if each.method == "softmax" else f"{each.method} {dict(each.changes).get('temperature', 1.0)}"
            hits[title] = mean_hits([places[name] for name in names if name in places])
        found[data] = {
            title: {
                metric: float(f"{standard_error(hits[title][metric] - hits['softmax'][metric]):.3g}")
                for metric in ("top1", "top5")
            }
            for title in hits
            if title != "softmax"
        }
    return found


def mean_hits(places: Sequence[Path]) -> dict[str, Tensor]:
    """For each test example the share of the runs that have it among the first and among the first five guesses."""
    sums = {"top1": torch.zeros(()), "top5": torch.zeros(())}
    for place in places:
        predictor = Predictor(place)
        guesses, _ = predictor.test_guesses(5)
        target = predictor.parts.test.labels[predictor.parts.test_index]
        right = guesses == target[:, None]
        sums = {"top1": sums["top1"] + right[:, 0], "top5": sums["top5"] + right.any(1)}
    return {name: total / len(places) for name, total in sums.items()}


def standard_error(values: Tensor) -> float:
    """Of the mean over examples.

    >>> round(standard_error(torch.tensor([0.0, 1.0, 0.0, 1.0])), 4)
    0.2887
    """
    return float(values.std() / len(values) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("iterations", "cost", "collapse", "sampling"))
    parser.add_argument("--data", default="", metavar="embeddings=FOLDER")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the run folders of study.py")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=study.SUMMARIES / "measured.json")
    arguments = parser.parse_args()
    content = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.what == "iterations":
        content["iterations"] = iterations(arguments.data.partition("=")[2], arguments.seeds)
    elif arguments.what == "sampling":
        content["sampling"] = sampling(arguments.runs)
    elif arguments.what == "collapse":
        # There was a temperature "auto" once; its rows stay on record.
        former = [row for row in content.get("collapse", {"rows": []})["rows"] if row["temperature"] == "auto"]
        content["collapse"] = collapse()
        content["collapse"]["rows"] += former
    else:
        content["cost"] = cost()
    write_atomically(arguments.out, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


if __name__ == "__main__":
    main()
