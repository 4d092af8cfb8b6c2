"""Make the runs: python evidence/memorised/run.py --out RUNS [--pixels 1 2 3] [--until 23:50]

Each finished run is a line of RUNS/runs.jsonl, its test hits a file in RUNS/bits. Several processes may work on the same folder;
what is done is not made again. Version 0.3.0 of anyk made the numbers (PYTHONPATH to its src).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from memorised import data, plan
from memorised.train import Gradient, Outcome, Variant, ranks, train

PIXEL_STEPS, PIXEL_EVERY = 4000, 200


def digest(variant: Variant) -> str:
    return hashlib.blake2b(json.dumps(plan.key(variant)).encode(), digest_size=6).hexdigest()


class Folder:
    """Where the runs are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for each in ("bits", "claims"):
            (path / each).mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        path = self.path / "runs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def found(self, cell: str, seed: int) -> dict[plan.Key, dict[str, Any]]:
        own = [line for line in self.lines() if (line["cell"], line["seed"]) == (cell, seed)]
        return {plan.key(Variant(**line["v"])): line for line in own}

    def bits(self, cell: str, seed: int, variant: Variant) -> Path:
        return self.path / "bits" / f"{cell}-{seed}-{digest(variant)}.npy"

    def add(self, cell: str, seed: int, found: Outcome, seconds: float) -> None:
        hits = np.stack([found.hits[k].numpy() for k in found.hits])
        np.save(self.bits(cell, seed, found.variant), np.packbits(hits, axis=1))
        line = {
            "cell": cell, "seed": seed, "v": found.variant.to_json(),
            "val": [round(each, 4) for each in found.validation.values()],
            "test": [round(float(each), 4) for each in hits.mean(1)],
            "learned": round(found.learned, 4), "step": list(found.step.values()), "s": round(seconds, 1),
        }  # fmt: skip
        with (self.path / "runs.jsonl").open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def claim(self, name: str) -> bool:
        """Whether this process may make it: no other that lives does."""
        path = self.path / "claims" / name
        if path.exists() and Path(f"/proc/{path.read_text() or 0}").exists():
            return False
        path.write_text(str(os.getpid()))
        return path.read_text() == str(os.getpid())


def make(folder: Folder, cell: plan.Cell, seed: int, part: str, over: Any) -> None:
    """All runs of a cell and seed that are missing: first cross-entropy's grid, then what takes over its rates."""
    divided: dict[str, Any] = {}
    while missing := plan.wanted(cell, part, folder.found(cell.name, seed)):
        divided = divided or data.parts(cell.data, cell.a_class, seed, folder.path)
        for at in range(0, len(missing), cell.chunk):
            if over():
                return
            started, chunk = time.perf_counter(), missing[at : at + cell.chunk]
            found = train(
                chunk, divided, classes=100, hidden=cell.hidden, rectify=cell.rectify,
                steps=cell.steps, batch=cell.batch, seed=seed, ks=cell.ks, decay=cell.decay,
            )  # fmt: skip
            for each in found:
                folder.add(cell.name, seed, each, (time.perf_counter() - started) / len(chunk))


def pixels(variant: Variant, seed: int) -> Outcome:
    """ResNet18 of half width from scratch on 50 images a class (40 to train on), Adam 1e-3, crops and flips."""
    from anyk.lab.run.models import ResNet18, augment  # version 0.3.0

    arrays = np.load(data.SHARED / "cifar100-16px.npz")
    images = {part: torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2) for part in ("train", "test")}
    labels = {part: torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64)) for part in ("train", "test")}
    own, held = data.divide(labels["train"], 50, seed)
    raw = images["train"][own].float() / 255
    mean, std = raw.mean((0, 2, 3), keepdim=True), raw.std((0, 2, 3), keepdim=True)
    x, y = (raw - mean) / std, labels["train"][own]
    torch.manual_seed(seed)
    model = ResNet18(3, 100, 32)
    with torch.no_grad():
        for each in model.head.parameters():
            each *= variant.start
    optimizer, gradient = torch.optim.Adam(model.parameters(), 1e-3, fused=True), Gradient([variant])

    @torch.no_grad()
    def hits(pictures: torch.Tensor, target: torch.Tensor) -> dict[int, torch.Tensor]:
        model.eval()
        scores = torch.cat([model((each.float() / 255 - mean) / std) for each in pictures.split(500)])
        model.train()
        return {k: ranks(scores[None], target)[0] <= k for k in (1, 5)}

    best: dict[int, tuple[float, int, dict[str, torch.Tensor]]] = {}
    order = torch.empty(0, dtype=torch.long)
    for step in range(1, PIXEL_STEPS + 1):
        torch.manual_seed(1_000_000 * seed + step)  # the same order and crops for all arms
        if len(order) < 100:
            order = torch.randperm(len(x))
        chosen, order = order[:100], order[100:]
        scores = model(augment(x[chosen], ("crop", "flip")))
        optimizer.zero_grad()
        scores.backward(gradient(scores.detach()[None], y[chosen])[0])
        optimizer.step()
        if step % PIXEL_EVERY == 0:
            for k, each in hits(images["train"][held], labels["train"][held]).items():
                accuracy = float(each.float().mean())
                if k not in best or accuracy >= best[k][0]:
                    best[k] = accuracy, step, {name: value.clone() for name, value in model.state_dict().items()}
    learned = float(hits(images["train"][own], y)[1].float().mean())
    tested = {}
    for k in (1, 5):
        model.load_state_dict(best[k][2])
        tested[k] = hits(images["test"], labels["test"])[k]
    return Outcome(variant, {k: best[k][0] for k in best}, {k: best[k][1] for k in best}, tested, learned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pixels", type=int, nargs="*", default=[], help="seeds of the runs from scratch, made first")
    parser.add_argument("--until", help="HH:MM: no run starts after it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder, began = Folder(arguments.out), time.strftime("%H:%M")

    def over() -> bool:
        return arguments.until is not None and began <= arguments.until <= time.strftime("%H:%M")

    for seed in arguments.pixels:
        for variant in plan.PIXELS.values():
            done = plan.key(variant) in folder.found("pixels-50", seed)
            if not done and not over() and folder.claim(f"pixels-{seed}-{digest(variant)}"):
                started = time.perf_counter()
                folder.add("pixels-50", seed, pixels(variant, seed), time.perf_counter() - started)
    for name, seed, part in plan.queue():
        if not over() and folder.claim(f"{name}-{seed}"):
            make(folder, plan.CELLS[name], seed, part, over)
            (folder.path / "claims" / f"{name}-{seed}").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
