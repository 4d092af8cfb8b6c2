"""Small data sets for the lab's tests."""

import json
from pathlib import Path

import safetensors.torch
import torch

from anyk.lab.data import Dataset, Split


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


def image_set(*, classes: int = 6, per_class: int = 12, channels: int = 1, size: int = 12) -> Dataset:
    """A set of images in memory, with a test split."""
    splits = []
    for seed in range(2):
        inputs, labels = examples(classes, per_class, channels * size * size, seed, noise=0.5)
        pixels = (inputs.sigmoid() * 255).to(torch.uint8).reshape(-1, channels, size, size)
        splits.append(Split((pixels,), labels))
    names = tuple(f"class {number}" for number in range(classes))
    return Dataset("made images", "images", names, splits[0], splits[1], "made", (0.5,) * channels, (0.25,) * channels)
