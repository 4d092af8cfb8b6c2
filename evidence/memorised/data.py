"""The sets: frozen features of CIFAR-100, tokens of Python's standard library as features, CIFAR-100 at 16 px."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SHARED = Path(os.environ.get("MEMORISED_DATA", "/work/shared/data"))
CLASSES, CONTEXT, FEATURES, A_CLASS_TEST = 100, 8, 512, 100


@functools.cache
def load(name: str, cache: Path) -> dict[str, Tensor]:
    """x, y, test_x, test_y; clusters of the test examples, where they are not by themselves."""
    if name == "features":
        from safetensors.torch import load_file

        train, test = (load_file(SHARED / "cifar100-effnet-lite0" / f"{part}.safetensors") for part in ("train", "test"))
        return {"x": train["embeddings"], "y": train["labels"], "test_x": test["embeddings"], "test_y": test["labels"]}
    path = cache / "code.pt"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(code(), path)
    return torch.load(path)  # type: ignore[no-any-return]


def code() -> dict[str, Tensor]:
    """The next word of Python's standard library, among the 100 most frequent that are names or keywords and occur a hundred
    times in the test modules, from the eight tokens before: one-hot by place, 512 singular vectors (of 60,000 contexts)."""
    from anyk.lab.data import completion  # version 0.3.0
    from scipy.sparse import csr_matrix
    from sklearn.decomposition import TruncatedSVD

    found, generator = completion.load(2000), torch.Generator().manual_seed(0)
    stream, splits = found.train.parts[0], {"train": found.train, "test": found.test}
    counts = torch.bincount(splits["test"].labels, minlength=2000)
    words = [place for place, token in enumerate(found.classes) if token.isidentifier() and counts[place] >= A_CLASS_TEST]
    number = torch.full((2000,), -1)
    number[words[:CLASSES]] = torch.arange(CLASSES)
    made: dict[str, Tensor] = {}
    chosen: dict[str, Tensor] = {}
    for part, limit in (("train", 600), ("test", A_CLASS_TEST)):
        labels = number[splits[part].labels]
        rows = []
        for each in range(CLASSES):
            own = ((labels == each) & (splits[part].places >= CONTEXT)).nonzero()[:, 0]
            rows.append(own[torch.randperm(len(own), generator=generator)[:limit]])
        chosen[part] = torch.cat(rows)
        made["y" if part == "train" else "test_y"] = labels[chosen[part]]

    def sparse(part: str, index: Tensor) -> csr_matrix:
        place = splits[part].places[index]
        tokens = torch.stack([stream[place - back] for back in range(1, CONTEXT + 1)], 1).long()
        size = int(stream.max()) + 1
        columns = (tokens + size * torch.arange(CONTEXT)).flatten().numpy()
        rows = np.repeat(np.arange(len(index)), CONTEXT)
        return csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), (len(index), size * CONTEXT))

    some = torch.randperm(len(splits["train"].labels), generator=generator)[:60_000]
    vectors = TruncatedSVD(FEATURES, random_state=0).fit(sparse("train", some[splits["train"].places[some] >= CONTEXT]))
    made["x"] = torch.from_numpy(vectors.transform(sparse("train", chosen["train"]))).half()
    made["test_x"] = torch.from_numpy(vectors.transform(sparse("test", chosen["test"]))).half()
    made["clusters"] = splits["test"].groups[chosen["test"]]
    return made


def divide(labels: Tensor, a_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of each class ``a_class`` examples, a fifth of them for validation; 0: all, a tenth for validation."""
    generator = torch.Generator().manual_seed(seed)
    train, validation = [], []
    for each in range(int(labels.max()) + 1):
        own = (labels == each).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=generator)][: a_class or len(own)]
        held = len(own) // (5 if a_class else 10)
        validation.append(own[:held])
        train.append(own[held:])
    return torch.cat(train), torch.cat(validation)


def parts(name: str, a_class: int, seed: int, cache: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Standardised by the training examples."""
    found = load(name, cache)
    train, validation = divide(found["y"], a_class, seed)
    own = found["x"][train].float()
    mean, std = own.mean(0), own.std(0) + 1e-6
    return {
        "train": ((own - mean) / std, found["y"][train]),
        "validation": ((found["x"][validation].float() - mean) / std, found["y"][validation]),
        "test": ((found["test_x"].float() - mean) / std, found["test_y"]),
    }
