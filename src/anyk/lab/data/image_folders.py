"""A folder of images, one folder inside for each class: decoded once, at one size, and cached."""

import dataclasses
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from anyk.lab.data import cache as caches
from anyk.lab.data import images
from anyk.lab.data.sets import Dataset, Split, with_statistics
from anyk.lab.errors import LabError
from anyk.lab.warn_once import warn_once

_VERSION = 3  # of the pixels and what is stored with them: a change of `images.read_pixels` needs another number
_TEST_NAMES = ("test", "val", "valid", "validation")  # the first that exists is the test set

Found = dict[str, list[Path]]
"""the files of each class, by its name"""


def load(folder: Path, *, size: int = images.SIZE) -> Dataset:
    """The images at FOLDER/CLASS/*, or FOLDER/train/CLASS/* and FOLDER/test/CLASS/*, as (N, 3, size, size).

    Where there is no test folder, val, valid or validation is the test set. The shorter side is resized to ``size`` and the
    middle is taken. Images that cannot be read are named in the log and left out.
    """
    train, test = find(folder)
    classes = tuple(train)
    if not any(train.values()):
        raise LabError(f"{folder} has no images; they should be at FOLDER/CLASS/*.jpg or FOLDER/train/CLASS/*.jpg.")

    def build() -> Dataset:
        unreadable: dict[Path, str] = {}
        train_split = _decode(train, classes, size, unreadable)
        test_split = None if test is None else _decode(test, classes, size, unreadable)
        counts = torch.bincount(train_split.labels, minlength=len(classes))
        empty = [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]
        if empty:
            raise LabError(
                f"{folder} has no readable training images of the class {empty[0]!r}: add some or remove its folder."
            )
        if test_split is not None and not len(test_split):
            raise LabError(f"{find_splits(folder)[1]} has no readable images: add some or remove it.")
        left_out = tuple(path.relative_to(folder).as_posix() for path in unreadable)
        dataset = Dataset(folder.absolute().name, "images", classes, train_split, test_split, "", unreadable=left_out)
        return with_statistics(dataclasses.replace(dataset, reasons=tuple(unreadable.values())))

    sources = [path for files in (train, test or {}) for paths in files.values() for path in paths]
    # The classes are a part of the key too: an empty class has no files.
    key = caches.key_of(sources, classes, None if test is None else tuple(test), size)
    dataset = caches.remember(f"images-v{_VERSION}-{key}", build)
    if dataset.unreadable:
        reasons = zip(dataset.unreadable, dataset.reasons, strict=True)
        paths = ", ".join(f"{folder / name} ({reason})" for name, reason in reasons)
        warn_once(f"Images that could not be read and are left out ({len(dataset.unreadable)}): {paths}")
    return dataclasses.replace(dataset, folder=str(folder))


def files(dataset: Dataset) -> tuple[list[str], list[str] | None]:
    """The files of the training and of the test examples, in their order, relative to the folder of the data set."""
    folder, unreadable = Path(dataset.folder), set(dataset.unreadable)

    def names(found: Found) -> list[str]:
        paths = (path.relative_to(folder).as_posix() for path in itertools.chain(*found.values()))
        return [path for path in paths if path not in unreadable]

    train, test = find(folder)
    return names(train), None if test is None else names(test)


def find(folder: Path, suffixes: Iterable[str] | None = images.SUFFIXES) -> tuple[Found, Found | None]:
    """The training files, and the test files where there are such, by class.

    Args:
        folder: FOLDER/CLASS/*, or FOLDER/train/CLASS/* and FOLDER/test/CLASS/*.
        suffixes: of the files that count; None: all that are not hidden.
    """
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder: name a folder with a folder of images for each class.")
    train_root, test_root = find_splits(folder)
    train = _by_class(train_root, suffixes)
    test = None if test_root is None else _by_class(test_root, suffixes)
    strangers = sorted(set(test or ()) - set(train))
    if test_root is not None and strangers:
        raise LabError(f"{test_root / strangers[0]} is a class that {train_root} does not have: add images or remove it.")
    nested = [path for path in itertools.chain(*train.values()) if path.parent.parent != train_root]
    if nested:
        first = nested[0].relative_to(train_root)
        warn_once(
            f"Images in folders inside of a class folder of {train_root} count for that class ({len(nested)} of them): "
            f"{first} is of the class {first.parts[0]!r}, one of {len(train)}."
        )
    return train, test


def find_splits(folder: Path) -> tuple[Path, Path | None]:
    """Where the class folders of the training and of the test images are. A note says what is not obvious."""
    # A class may be called train: then it holds images and no folders.
    if not _subfolders(folder / "train"):
        return folder, None
    present = [folder / name for name in _TEST_NAMES if (folder / name).is_dir()]
    test = next((path for path in present if _subfolders(path)), None)
    if test is not None and test.name != "test":
        warn_once(f"{test} is taken as the test set, as there is no {folder / 'test'} with class folders in it.")
    unused = [str(path) for path in present if path != test]
    if unused:
        reason = "it has no class folders in it" if test is None else f"the test set is {test}"
        warn_once(f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} left out: {reason}.")
    return folder / "train", test


def _subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _by_class(folder: Path, suffixes: Iterable[str] | None) -> Found:
    return {
        inside.name: sorted(
            path
            for path in inside.rglob("*")
            if (suffixes is None or path.suffix.lower() in suffixes) and not path.name.startswith(".") and path.is_file()
        )
        for inside in _subfolders(folder)
    }


def _decode(found: Found, classes: tuple[str, ...], size: int, unreadable: dict[Path, str]) -> Split:
    """All images of a split; those that cannot be read go to ``unreadable``, with the reason."""
    paths = list(itertools.chain(*found.values()))
    labels = torch.tensor([classes.index(name) for name in found for _ in found[name]], dtype=torch.int64)
    pixels = torch.zeros(len(paths), 3, size, size, dtype=torch.uint8)
    good = torch.ones(len(paths), dtype=torch.bool)
    for place, decoded in enumerate(images.decode_all(paths, partial(images.read_pixels, size=size))):
        if isinstance(decoded, str):
            unreadable[paths[place]], good[place] = decoded, False
        else:
            pixels[place] = decoded
    return Split((pixels[good],), labels[good])
