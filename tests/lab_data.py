"""Small data sets for the lab's tests."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from anyk.lab.data import Dataset, Split, cifar, embeddings, tokens
from anyk.lab.data.sets import Tokens
from anyk.lab.run import models, training
from anyk.lab.run.batches import read_data
from anyk.lab.run.config import Config, Setting
from anyk.lab.run.run_folder import Run


def examples(classes: int, per_class: int, width: int, seed: int, noise: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around one centre for each class; the centres depend on the number of classes and the width alone."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(classes * 1000 + width))
    labels = torch.arange(classes).repeat_interleave(per_class)
    return centres[labels] + noise * torch.randn(len(labels), width, generator=torch.Generator().manual_seed(seed)), labels


def write_embedding_set(folder: Path, *, classes: int = 12, per_class: int = 20, width: int = 16, test: bool = True) -> Path:
    """An embedding set on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, part in enumerate(("train", "test") if test else ("train",)):
        inputs, labels = examples(classes, per_class, width, seed)
        safetensors.torch.save_file({"embeddings": inputs, "labels": labels}, folder / f"{part}.safetensors")
    names = [f"class {number}" for number in range(classes)]
    (folder / "dataset.json").write_text(json.dumps({"name": folder.name, "classes": names}))
    return folder


def write_shards(folder: Path, dataset: Dataset, rows: int, dtype: torch.dtype | None = None) -> Path:
    """An embedding set of which each file has so many rows, and dataset.json lists the files."""
    folder.mkdir(exist_ok=True)
    names = []
    for split, examples in (("train", dataset.train), ("test", dataset.test)):
        for number, index in enumerate(() if examples is None else torch.arange(len(examples)).split(rows)):
            groups = None if examples.groups is None else examples.groups[index]
            names.append(f"{split}-{number:05d}.safetensors")
            with open(folder / names[-1], "wb") as file:
                part = Split((examples.take(index),), examples.labels[index], groups=groups)
                embeddings.write_split(file, part, dtype, "made")
    described = {"name": dataset.name, "classes": dataset.classes, "files": names}
    (folder / "dataset.json").write_text(json.dumps(described))
    return folder


def image_set(*, classes: int = 6, per_class: int = 12, channels: int = 1, size: int = 12) -> Dataset:
    """A set of images in memory, with a test split."""
    splits = []
    for seed in range(2):
        inputs, labels = examples(classes, per_class, channels * size * size, seed, noise=0.5)
        pixels = (inputs.sigmoid() * 255).to(torch.uint8).reshape(-1, channels, size, size)
        splits.append(Split((pixels,), labels))
    names = tuple(f"class {number}" for number in range(classes))
    return Dataset("made images", "images", names, splits[0], splits[1], "made", (0.5,) * channels, (0.25,) * channels)


def sequence_set(
    *,
    classes: int = 8,
    others: int = 0,
    sequences: int = 60,
    length: int = 50,
    noise: float = 0.1,
    last: bool = False,
) -> Dataset:
    """Sequences in memory: a token is the one after that before the last, in a circle; with the chance ``noise`` it is any.

    No model guesses more than 1 - noise + noise / classes of them. Some are shorter than others. With ``last``, the last of
    each is the test; otherwise one sequence in five, and one in five for validation. Of the kinds of token, so many ``others``
    are no classes.
    """
    kinds = classes + others
    random = np.random.default_rng(0)
    made = []
    for _ in range(sequences):
        sequence = random.integers(0, kinds, 2).tolist()
        for _ in range(int(random.integers(2, length))):
            sequence.append((sequence[-2] + 1) % kinds if random.random() >= noise else int(random.integers(0, kinds)))
        made.append([f"t{token}" for token in sequence])
    names = tuple(f"t{token}" for token in range(classes))
    stream, begins = numbered(made, names)
    if last:
        made_set = tokens.dataset_of(
            "made items", names, stream, begins, tokens.last_parts(begins), out_of_vocabulary=True, tokens="items"
        )
    else:
        parts = [{0: 1, 1: 2}.get(place % 5, 0) for place in range(sequences)]
        made_set = tokens.dataset_of("made items", names, stream, begins, tokens.parts_of_tokens(parts, begins), tokens="items")
    return dataclasses.replace(made_set, fingerprint="made")


def numbered(sequences: Sequence[Sequence[str]], classes: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream of all sequences in the numbers of these classes, and where they begin, with the end."""
    numbers = {token: place for place, token in enumerate(classes)}
    stream = [numbers.get(token, len(classes)) for sequence in sequences for token in sequence]
    begins = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    return torch.tensor(stream, dtype=torch.int32), begins


def read_or_make(setting: Setting) -> Dataset:
    """The data set of a setting; "images", "tokens" and "items" (whose test is the last of each, some new) are made."""
    if setting.data in ("tokens", "items"):
        return sequence_set() if setting.data == "tokens" else sequence_set(classes=55, others=5, last=True)
    return image_set() if setting.data == "images" else read_data(setting)


def write_photos(folder: Path, *, classes: int = 4, per_class: int = 6, size: tuple[int, int] = (20, 16)) -> Path:
    """A folder of images, of one colour and noise for each class."""
    random = np.random.default_rng(0)
    for number in range(classes):
        (folder / f"kind {number}").mkdir(parents=True)
        for copy in range(per_class):
            pixels = (50 * number + random.integers(0, 40, (size[1], size[0], 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"kind {number}" / f"{copy}.png")
    return folder


def write_images(file: Path, *, classes: int = 6, size: int = 10, channels: int = 3, validation: bool = True) -> Path:
    """A .npz file of images in the layout of MedMNIST: of each class ten to train with, three for validation, four to test."""
    arrays: dict[str, np.ndarray] = {"class_names": np.array([f"kind {number}" for number in range(classes)])}
    splits = (("train", 10), ("val", 3), ("test", 4))
    for seed, (split, per_class) in enumerate(splits):
        inputs, labels = examples(classes, per_class, size * size * channels, seed, noise=0.7)
        pixels = (inputs.sigmoid() * 255).to(torch.uint8).reshape(-1, size, size, channels)
        if split != "val" or validation:
            arrays[f"{split}_images"] = (pixels if channels == 3 else pixels[..., 0]).numpy()
            arrays[f"{split}_labels"] = labels.numpy().astype(np.uint8)[:, None]
    np.savez_compressed(file, **arrays)
    return file


def write_table(file: Path, *, classes: int = 4, per_class: int = 10, width: int = 5) -> Path:
    """A .csv file with titles, the label in its last column."""
    inputs, labels = examples(classes, per_class, width, seed=0)
    lines = [",".join([*(f"{x:.4f}" for x in row), f"kind {label}"]) for row, label in zip(inputs, labels, strict=True)]
    file.write_text("\n".join([",".join([*(f"x{n}" for n in range(width)), "kind"]), *lines]) + "\n")
    return file


#: what :func:`trained_on_every_kind` asks for, beside the data
OF_KIND: dict[str, dict[str, Any]] = {
    "cifar100": {"model": "linear"},
    "items": {"model": "attention", "context": 5, "embedding": 8, "heads": 2, "mask_seen": True},
    "words": {"model": "gru", "context": 6, "embedding": 8, "hidden": 12, "tied": True},
}


def write_items(file: Path) -> Path:
    """A sequence of items on each line, none twice."""
    random = np.random.default_rng(0)
    file.write_text("".join(" ".join(map(str, random.permutation(30)[: 4 + line % 9])) + "\n" for line in range(60)))
    return file


def write_words(file: Path) -> Path:
    """A text of a few words."""
    random = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", ",", "and", "he", "said", "it's", "good", "."]
    file.write_text("".join(" ".join(words[place] for place in random.integers(0, 12, 9)) + "\n" for _ in range(50)))
    return file


def write_untrained(folder: Path, model: str, classes: Sequence[str], *, tokens: Tokens, context: int = 6) -> Path:
    """The model of a run on sequences that has not learned anything."""
    folder.mkdir()
    size = {"hidden": 12, "dropout": 0.2, "embedding": 8, "layers": 1}
    plan = models.Plan(model, (context,), tuple(classes), tokens=tokens, **size)
    torch.manual_seed(0)
    Run(folder).save_tensors("model.safetensors", plan.build().state_dict(), plan.to_json())
    return folder


def trained_on_every_kind(folder: Path) -> dict[str, Path]:
    """A short run on each kind of data that the lab reads, by kind: its folder. The data lie beside the runs."""
    data = {
        "items": f"sequences:{write_items(folder / 'items.txt')}",
        "words": f"words:{write_words(folder / 'words.txt')}",
        "embeddings": str(write_embedding_set(folder / "points", classes=6)),
        "table": str(write_table(folder / "table.csv")),
        "photos": str(write_photos(folder / "photos")),
        "cifar100": f"cifar100:{cifar.write_small(folder / 'cifar', 6, classes=4)}",
        "glyphs": "glyphs:8",
    }
    for kind, place in data.items():
        config = Config(data=place, loss="softmax", epochs=1, batch_size=16)
        training.train(config.replace(**OF_KIND.get(kind, {})), folder / "runs" / kind)
    return {kind: folder / "runs" / kind for kind in data}
