"""A folder of images, one folder inside for each class: decoded once, at one size, and kept."""

import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from anyk.lab.data import cache as caches
from anyk.lab.data.sets import Dataset, Split, channel_statistics
from anyk.lab.errors import LabError

_VERSION = 1  # of the pixels: a change of `_decode` needs another number
_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_HELD_OUT = ("val", "valid", "validation")

_log = logging.getLogger(__name__)


def load(folder: Path, *, size: int = 32, cache: Path | None = None) -> Dataset:
    """The images at FOLDER/CLASS/*, or FOLDER/train/CLASS/* and FOLDER/test/CLASS/*, as (N, 3, size, size).

    The shorter side is resized to ``size`` and the middle is taken. Images that cannot be read are named in the log and
    left out.
    """
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder.")
    train, test = _files_by_class(folder), None
    if _subfolders(folder / "train"):
        train = _files_by_class(folder / "train")
        if (folder / "test").is_dir():
            test = _files_by_class(folder / "test")
        for name in _HELD_OUT:
            if (folder / name).is_dir():
                _log.warning("%s is not used: validation examples are taken from train.", folder / name)
    classes = tuple(train)
    if not any(train.values()):
        raise LabError(f"{folder} has no images; they should be at FOLDER/CLASS/*.jpg or FOLDER/train/CLASS/*.jpg.")
    strangers = sorted(set(test or ()) - set(classes))
    if strangers:
        raise LabError(f"{folder / 'test' / strangers[0]} is a class that {folder / 'train'} does not have.")

    def build() -> Dataset:
        unreadable: list[Path] = []
        train_split = _decode_all(train, classes, size, unreadable)
        test_split = None if test is None else _decode_all(test, classes, size, unreadable)
        if unreadable:
            _log.warning(
                "%d of the images could not be read and are left out: %s", len(unreadable), ", ".join(map(str, unreadable))
            )
        counts = torch.bincount(train_split.labels, minlength=len(classes))
        empty = [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]
        if empty:
            raise LabError(
                f"{folder} has no readable training images of the class {empty[0]!r}: add some or remove its folder."
            )
        if test_split is not None and not len(test_split):
            raise LabError(f"{folder / 'test'} has no readable images: add some or remove it.")
        mean, std = channel_statistics(train_split.parts[0])
        return Dataset(folder.absolute().name, "images", classes, train_split, test_split, "", mean, std)

    sources = [path for files in (train, test or {}) for paths in files.values() for path in paths]
    # The classes are named too: an empty class has no files.
    key = caches.key_of(sources, classes, None if test is None else tuple(test), size)
    kept = caches.cache_folder() if cache is None else cache
    return caches.remember(kept / f"images-v{_VERSION}-{key}.safetensors", build)


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    return {
        inside.name: sorted(
            path
            for path in inside.rglob("*")
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()
        )
        for inside in _subfolders(folder)
    }


def _decode_all(files: dict[str, list[Path]], classes: tuple[str, ...], size: int, unreadable: list[Path]) -> Split:
    paths = [path for name in files for path in files[name]]
    labels = torch.tensor([classes.index(name) for name in files for _ in files[name]], dtype=torch.int64)
    images = torch.zeros(len(paths), 3, size, size, dtype=torch.uint8)
    good = torch.ones(len(paths), dtype=torch.bool)

    def decode(position: int) -> None:
        try:
            images[position] = _decode(paths[position], size)
        # Decoders of damaged files raise OSError, SyntaxError, ValueError, struct.error, ...
        except Exception:
            good[position] = False

    with ThreadPoolExecutor(os.cpu_count()) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata; the pixels are all we want
        list(pool.map(decode, range(len(paths))))
    unreadable += [path for path, fine in zip(paths, good.tolist(), strict=True) if not fine]
    return Split((images[good],), labels[good])


def _decode(path: Path, size: int) -> Tensor:
    """An image as (3, size, size) uint8, upright, transparent parts white."""
    with Image.open(path) as file:
        file.draft("RGB", (2 * size, 2 * size))  # a JPEG can be decoded at a fraction of its size
        image: Image.Image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):  # 16 bits of gray, which Pillow would clip
            image = image.point(lambda value: value * (1 / 256)).convert("L")
        if "transparency" in image.info or "A" in image.getbands():
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)
