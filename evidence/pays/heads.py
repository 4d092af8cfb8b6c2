"""Question 5: one head for each k. A shared body with two heads, one trained for the first guess and one for the list.

    python evidence/pays/heads.py --data embeddings=FOLDER --runs RUNS --on completion embeddings-mlp

The guesses are merged: the first of the one head, then those of the other without it. So top-1 is that of the first head. Both
losses count the same. Against the mixture, one head on the same body with half of P_K on 1 and half on K. The losses have the
values tuned for the main table, which must be there; each row takes the best of half, once and twice the mixture's tuned rate
on validation (seed 0), then seeds 11 to 15. Written down before the runs: two heads beat the mixture if on validation, on both
sets, the two-way 95 % interval of the top-1 difference lies above -0.2 points and top-K is gained with p < .01 after Holm over
the rows and both k.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor, nn

import anyk
from anyk.lab import statistics
from anyk.lab.data import Split, load
from anyk.lab.errors import LabError
from anyk.lab.files import write_object
from anyk.lab.run import losses, models, training
from anyk.lab.run.batches import Reader, divide, resolved, standardization
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from pays import plan
from pays.plan import BASE, SETS, Set
from pays.summaries import SUMMARIES, Summaries

SEEDS = (11, 12, 13, 14, 15)
MIXTURE = "mixture"
#: a row's losses: of the only head, or of the first guess and of the list
ROWS: Mapping[str, tuple[str, ...]] = {
    MIXTURE: (BASE,),
    "cross-entropy, then the list": ("softmax", "error:ksubset pure"),
    "gce, then the list": ("gce", "error:ksubset pure"),
}


class Heads(nn.Module):
    """Two linear layers in the place of one; their scores side by side."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.first, self.rest = first, nn.Linear(first.in_features, first.out_features)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([self.first(rows), self.rest(rows)], 1)


def with_two_heads(model: nn.Module, classes: int) -> nn.Module:
    """The model with its last layer doubled."""
    found = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each.out_features == classes]
    if not found:
        raise LabError("two heads need a model that ends in a linear layer.")
    parent, _, name = found[-1].rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, name, Heads(getattr(owner, name)))
    return model


def merged_ranks(first: Tensor, rest: Tensor, target: Tensor) -> Tensor:
    """The rank of the target where the first guess comes from one head, and the others, without it, from another.

    >>> first, rest = torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    >>> [int(merged_ranks(first, rest, torch.tensor([target]))) for target in range(4)]
    [1, 2, 3, 4]
    """
    guess = first.argmax(1)
    before = rest.gather(1, guess[:, None]) > rest.gather(1, target[:, None])
    ranks = anyk.target_ranks(rest, target) + 1 - before[:, 0].long()
    return torch.where(guess == target, torch.ones_like(ranks), ranks)


class Body:
    """A data set with the tuned configs of the main table, and the loop that trains a body with one or two heads."""

    def __init__(self, each: Set, place: str, summaries: Summaries) -> None:
        self.set = each
        shared = each.config
        dataset = load(place, shared.image_size)
        self.shared = resolved(shared, dataset)
        self.parts = divide(dataset, self.shared)
        mean, std = standardization(dataset, self.parts, self.shared)
        self.dataset = dataclasses.replace(dataset, feature_mean=mean, feature_std=std)
        self.reader = Reader(self.dataset, torch.device("cpu"), self.shared)
        self.tuned: dict[str, Config] = {}
        for method in dict.fromkeys(method for methods in ROWS.values() for method in methods):
            if "values" not in summaries.tuned.get(method, {}):
                raise LabError(f"{method} is not tuned yet on {each.name}: make the main table first.")
            self.tuned[method] = each.start(method).replace(**summaries.tuned[method]["values"])

    def train(self, row: str, factor: float, seed: int) -> tuple[dict[str, Tensor], float]:
        """The ranks of the validation and test examples, of the evaluation that is best on validation, and the seconds."""
        started = time.perf_counter()
        rate = plan.changed(self.tuned[BASE], (("rate", factor),)).learning_rate
        config = self.shared.replace(learning_rate=rate, seed=seed)
        classes, methods = len(self.dataset.classes), ROWS[row]
        criteria = [losses.criterion(self.tuned[method], classes) for method in methods]
        torch.manual_seed(seed)
        model = models.build(config, self.dataset)
        if len(methods) == 2:
            model = with_two_heads(model, classes)
        optimizer = torch.optim.Adam(model.parameters(), config.learning_rate, fused=True)
        train, steps = self.parts.train, math.ceil(len(self.parts.train) / config.batch_size)
        best: dict[str, Tensor] = {}
        top = -math.inf
        for epoch in range(config.epochs):
            order = train[torch.randperm(len(train))]
            for step, index in enumerate(order.tensor_split(steps)):
                for group in optimizer.param_groups:
                    group["lr"] = training.learning_rate(config, (epoch + step / steps) / config.epochs)
                optimizer.zero_grad()
                scores = model(self.reader(self.dataset.train, index)).split(classes, 1)
                target = self.dataset.train.labels[index]
                loss = torch.stack([each(own, target) for each, own in zip(criteria, scores, strict=True)]).mean()
                loss.backward()
                optimizer.step()
            ranks = self._ranks(model, "validation", self.dataset.train, self.parts.validation, classes)
            mean = self.accuracies(ranks["validation"])["mean"]
            if mean > top:
                test = self._ranks(model, "test", self.parts.test, self.parts.test_index, classes)
                top, best = mean, {**ranks, **test}
        return best, time.perf_counter() - started

    def accuracies(self, ranks: Tensor) -> dict[str, float]:
        """Top-1, top-K and their mean."""
        found = {f"top{k}": float((ranks <= k).double().mean()) for k in (1, self.set.k)}
        return {**found, "mean": statistics.mean(list(found.values()))}

    @torch.no_grad()
    def _ranks(self, model: nn.Module, part: str, examples: Split, index: Tensor, classes: int) -> dict[str, Tensor]:
        """Merged, and of two heads each by itself."""
        model.eval()
        found: dict[str, list[Tensor]] = {}
        for block in self.reader.blocks(examples, index):
            target = examples.labels[block]
            scores = model(self.reader(examples, block)).split(classes, 1)
            own = [anyk.target_ranks(each, target) for each in scores]
            merged = merged_ranks(*scores, target) if len(scores) == 2 else own[0]
            names = ("", " first", " rest") if len(scores) == 2 else ("",)
            for name, ranks in zip(names, (merged, *own), strict=False):
                found.setdefault(f"{part}{name}", []).append(ranks.int())
        model.train()
        return {name: torch.cat(ranks) for name, ranks in found.items()}


def run_once(body: Body, row: str, factor: float, seed: int, folder: Path) -> dict[str, Tensor]:
    """Train a row, or read its ranks if that was done before."""
    run = Run(folder / f"{row.replace(' ', '-').replace(',', '')}-{factor:g}-seed{seed}")
    before = run.load_tensors("ranks.safetensors")
    if before is not None:
        return before[0]
    ranks, seconds = body.train(row, factor, seed)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.save_tensors("ranks.safetensors", ranks, {"seconds": round(seconds, 1)})
    mean = 100 * body.accuracies(ranks["validation"])["mean"]
    words = f"{body.set.name}, {row}, rate x {factor:g}, seed {seed}: validation {mean:.2f} {seconds:.0f} s"
    print(words, file=sys.stderr, flush=True)
    return ranks


def study(body: Body, folder: Path, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """All rows of a set, as the page wants them."""
    rows: dict[str, dict[str, Any]] = {}
    ranks: dict[str, list[dict[str, Tensor]]] = {}
    for row in ROWS:
        tried = {factor: run_once(body, row, factor, plan.CHOOSING, folder) for factor in plan.RATES}
        factor = max(tried, key=lambda factor: body.accuracies(tried[factor]["validation"])["mean"])
        ranks[row] = [run_once(body, row, factor, seed, folder) for seed in seeds]
        titles = {"": row, " first": f"{row}: the first head alone", " rest": f"{row}: the list's head alone"}
        for name in titles if len(ROWS[row]) == 2 else ("",):
            rows[titles[name]] = {
                part: [body.accuracies(found[f"{part}{name}"]) for found in ranks[row]] for part in ("validation", "test")
            }
        rows[row]["rate"] = factor
    parts, groups = body.parts, dict[str, Any]()
    for part, examples, index in (("validation", body.dataset.train, parts.validation), ("test", parts.test, parts.test_index)):
        groups[part] = None if examples.groups is None else examples.groups[index].numpy()
    contrasts = {part: _contrasts(ranks, part, body.set.k, groups[part]) for part in groups}
    return {"seeds": list(seeds), "rows": rows, "contrasts": contrasts}


def _contrasts(ranks: Mapping[str, Sequence[Mapping[str, Tensor]]], part: str, k: int, groups: Any) -> list[dict[str, Any]]:
    found = []
    for row in ROWS:
        if row != MIXTURE:
            pairs = [(own[part].numpy(), base[part].numpy()) for own, base in zip(ranks[row], ranks[MIXTURE], strict=True)]
            for each in (1, k):
                hits = np.stack([(own <= each).astype("int8") - (base <= each) for own, base in pairs])
                found.append(dataclasses.asdict(statistics.contrast(row, MIXTURE, f"top{each}", hits, groups)))
    return found


def main() -> None:
    from pays.runner import places

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=[], metavar="SET=PLACE", help="where data are: embeddings=FOLDER")
    parser.add_argument("--runs", type=Path, required=True, help="the run folders")
    parser.add_argument("--on", nargs="*", default=list(plan.HEADS), help=f"sets: {', '.join(plan.HEADS)}")
    parser.add_argument("--summaries", type=Path, default=SUMMARIES)
    parser.add_argument("--rehearse", action="store_true", help="one epoch and three seeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        for name, place in places(arguments.data, arguments.on).items():
            each = SETS[name].rehearsed() if arguments.rehearse else SETS[name]
            body = Body(each, place, Summaries(each, arguments.summaries))
            found = study(body, arguments.runs / f"heads-{name}", SEEDS[:3] if arguments.rehearse else SEEDS)
            write_object(arguments.summaries / f"pays-{name}-heads.json", found)
    except LabError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
