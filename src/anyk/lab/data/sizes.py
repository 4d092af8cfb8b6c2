"""Images of another size than the data have them in."""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from anyk.lab.data import cache as caches
from anyk.lab.data.sets import Dataset, Split, with_statistics
from anyk.lab.errors import LabError


def resized(dataset: Dataset, size: int) -> Dataset:
    """The data set with square images of this size: the shorter side resized, the middle taken. Made once and kept."""
    if dataset.kind != "images":
        raise LabError(f"image_size resizes images, but {dataset.name} holds {dataset.kind}: leave it out.")
    if tuple(dataset.train.shape[1:]) == (size, size):
        return dataset

    def build() -> Dataset:
        train = _resize_all(dataset.train, size)
        test = None if dataset.test is None else _resize_all(dataset.test, size)
        return with_statistics(dataclasses.replace(dataset, train=train, test=test))

    name = f"resized-{dataset.fingerprint[:32]}-{size}.safetensors"
    return caches.remember(caches.cache_folder() / name, build)


def _resize_all(examples: Split, size: int) -> Split:
    pieces = [resize(block, size) for part in examples.parts for block in torch.split(part, 512)]
    return dataclasses.replace(examples, parts=(torch.cat(pieces),))


def resize(images: Tensor, size: int) -> Tensor:
    """The middle square of (N, channels, height, width) uint8 images, in another size."""
    height, width = images.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = images[:, :, top : top + side, left : left + side].float()
    made = functional.interpolate(square, (size, size), mode="bicubic", antialias=True, align_corners=False)
    return made.round().clamp(0, 255).to(torch.uint8)
