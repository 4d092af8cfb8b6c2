"""Make the runs: python evidence/memorised/run.py RUNS [linear mlp ...: how the names of the settings begin]. Each finished run
is a line of RUNS/runs.jsonl and a file in RUNS/bits, and is not made again, so kill it at any moment. Processes beside each
other need settings of their own. The numbers are those of version 0.3.0 of anyk."""

import functools
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
from safetensors.torch import load_file
from torch import Tensor

from memorised import plan
from memorised.train import Outcome, Variant, gradient_of, outcome, ranks, train

SHARED = Path(os.environ.get("MEMORISED_DATA", "/work/shared/data"))
CLASSES, CONTEXT, FEATURES, TESTED = 100, 8, 512, 100


@functools.cache
def load(name: str, cache: Path) -> dict[str, Tensor]:
    """x, y, test_x, test_y; clusters of the test examples, where they are not by themselves."""
    if name == "features":
        train, test = (load_file(SHARED / "cifar100-effnet-lite0" / f"{part}.safetensors") for part in ("train", "test"))
        return {"x": train["embeddings"], "y": train["labels"], "test_x": test["embeddings"], "test_y": test["labels"]}
    if not (cache / "code.pt").exists():
        torch.save(code(), cache / "code.pt")
    return torch.load(cache / "code.pt")


def code() -> dict[str, Tensor]:
    """The next word of Python's standard library, among the 100 most frequent that are names or keywords and occur a hundred
    times in the test modules, from the eight tokens before: one-hot by place, 512 singular vectors (of 60,000 contexts)."""
    from scipy.sparse import csr_matrix
    from sklearn.decomposition import TruncatedSVD

    from anyk.lab.data import completion  # version 0.3.0

    found, generator = completion.load(2000), torch.Generator().manual_seed(0)
    stream, splits = found.train.parts[0], {"train": found.train, "test": found.test}
    counts = torch.bincount(found.test.labels, minlength=2000)
    words = [place for place, token in enumerate(found.classes) if token.isidentifier() and counts[place] >= TESTED]
    number = torch.full((2000,), -1)
    number[words[:CLASSES]] = torch.arange(CLASSES)

    def sparse(part: str, index: Tensor) -> csr_matrix:
        tokens = torch.stack([stream[splits[part].places[index] - back] for back in range(1, CONTEXT + 1)], 1).long()
        size, rows = int(stream.max()) + 1, np.repeat(np.arange(len(index)), CONTEXT)
        columns = (tokens + size * torch.arange(CONTEXT)).flatten().numpy()
        return csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), (len(index), size * CONTEXT))

    chosen = {}
    for part, limit in (("train", 600), ("test", TESTED)):
        labels, late = number[splits[part].labels], splits[part].places >= CONTEXT
        rows = [((labels == each) & late).nonzero()[:, 0] for each in range(CLASSES)]
        chosen[part] = torch.cat([own[torch.randperm(len(own), generator=generator)[:limit]] for own in rows])
    some = torch.randperm(len(found.train.labels), generator=generator)[:60_000]
    vectors = TruncatedSVD(FEATURES, random_state=0).fit(sparse("train", some[found.train.places[some] >= CONTEXT]))
    made = {"clusters": found.test.groups[chosen["test"]]}
    for part, prefix in (("train", ""), ("test", "test_")):
        made[f"{prefix}x"] = torch.from_numpy(vectors.transform(sparse(part, chosen[part]))).half()
        made[f"{prefix}y"] = number[splits[part].labels][chosen[part]]
    return made


def divide(labels: Tensor, a_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of each class ``a_class`` examples, a fifth of them for validation; 0: all, a tenth for validation."""
    generator, train, validation = torch.Generator().manual_seed(seed), [], []
    for each in range(int(labels.max()) + 1):
        own = (labels == each).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=generator)][: a_class or len(own)]
        held = len(own) // (5 if a_class else 10)
        validation.append(own[:held])
        train.append(own[held:])
    return torch.cat(train), torch.cat(validation)


def parts_of(name: str, a_class: int, seed: int, cache: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Standardised by the training examples."""
    found = load(name, cache)
    train, validation = divide(found["y"], a_class, seed)
    rows = {"train": found["x"][train], "validation": found["x"][validation], "test": found["test_x"]}
    labels = {"train": found["y"][train], "validation": found["y"][validation], "test": found["test_y"]}
    mean, std = rows["train"].float().mean(0), rows["train"].float().std(0) + 1e-6
    return {part: ((each.float() - mean) / std, labels[part]) for part, each in rows.items()}


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "bits").mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        path = self.path / "runs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def found(self, cell: str, seed: int) -> plan.Found:
        own = [line for line in self.lines() if (line["cell"], line["seed"]) == (cell, seed)]
        return {plan.key(Variant(**line["v"])): line for line in own}

    def bits(self, cell: str, seed: int, variant: Variant) -> Path:
        digest = hashlib.blake2b(json.dumps(plan.key(variant)).encode(), digest_size=6).hexdigest()
        return self.path / "bits" / f"{cell}-{seed}-{digest}.npy"

    def add(self, cell: str, seed: int, found: Outcome, seconds: float) -> None:
        line, hits = found
        np.save(self.bits(cell, seed, Variant(**line["v"])), np.packbits(hits, axis=1))
        with (self.path / "runs.jsonl").open("a") as file:
            file.write(json.dumps({"cell": cell, "seed": seed, **line, "s": round(seconds, 1)}, separators=(",", ":")) + "\n")


def make(folder: Folder, cell: plan.Cell, seed: int, part: str) -> None:
    """All runs of a setting and seed that are missing: first cross-entropy's grid, then what takes over its rates."""
    while missing := plan.wanted(cell, part, folder.found(cell.name, seed)):
        parts = parts_of(cell.data, cell.a_class, seed, folder.path) if cell.data != "pixels" else {}
        for at in range(0, len(missing), cell.chunk):
            started, chunk = time.perf_counter(), missing[at : at + cell.chunk]
            sizes = {"steps": cell.steps, "batch": cell.batch, "hidden": cell.hidden, "rectify": not cell.decay}
            usual = {"classes": CLASSES, "seed": seed, "ks": cell.ks, "decay": cell.decay}
            for each in train(chunk, parts, **sizes, **usual) if parts else [pixels(chunk[0], seed, cell.steps)]:
                folder.add(cell.name, seed, each, (time.perf_counter() - started) / len(chunk))


def pixels(variant: Variant, seed: int, steps: int, every: int = 200) -> Outcome:
    """ResNet18 of half width from scratch on 50 images a class (40 to train on), Adam 1e-3, crops and flips."""
    from anyk.lab.run.models import ResNet18, augment  # version 0.3.0

    arrays = np.load(SHARED / "cifar100-16px.npz")
    images, tested = (torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2) for part in ("train", "test"))
    labels, target = (torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64)) for part in ("train", "test"))
    own, held = divide(labels, 50, seed)
    raw, y = images[own].float() / 255, labels[own]
    mean, std = raw.mean((0, 2, 3), keepdim=True), raw.std((0, 2, 3), keepdim=True)
    torch.manual_seed(seed)
    model = ResNet18(3, 100, 32)
    for each in model.head.parameters():
        each.data *= variant.start
    optimizer, gradient = torch.optim.Adam(model.parameters(), 1e-3, fused=True), gradient_of([variant])

    @torch.no_grad()
    def hits(pictures: Tensor, target: Tensor) -> dict[int, Tensor]:
        model.eval()
        scores = torch.cat([model((each.float() / 255 - mean) / std) for each in pictures.split(500)])
        model.train()
        return {k: ranks(scores[None], target)[0] <= k for k in (1, 5)}

    best: dict[int, tuple[float, int, dict[str, Tensor]]] = {}
    order = torch.empty(0, dtype=torch.long)
    for step in range(1, steps + 1):
        torch.manual_seed(1_000_000 * seed + step)  # the same order and crops for all arms
        if len(order) < 100:
            order = torch.randperm(len(y))
        chosen, order = order[:100], order[100:]
        scores = model(augment((raw[chosen] - mean) / std, ("crop", "flip")))
        optimizer.zero_grad()
        scores.backward(gradient(scores.detach()[None], y[chosen])[0])
        optimizer.step()
        for k, each in hits(images[held], labels[held]).items() if step % every == 0 else ():
            accuracy = float(each.float().mean())
            if k not in best or accuracy >= best[k][0]:
                best[k] = accuracy, step, {name: value.clone() for name, value in model.state_dict().items()}
    learned, found = float(hits(images[own], y)[1].float().mean()), {}
    for k, (_, _, state) in best.items():
        model.load_state_dict(state)
        found[k] = hits(tested, target)[k]
    return outcome(variant, {k: each[:2] for k, each in best.items()}, found, learned)


def main(path: str, *only: str) -> None:
    torch.set_num_threads(1)
    for name, seed, part in plan.queue():
        if name.startswith(only or ""):
            make(Folder(Path(path)), plan.CELLS[name], seed, part)


if __name__ == "__main__":
    main(*sys.argv[1:])
