"""A folder of images, one folder inside for each class: decoded once, at one size, and kept."""

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from anyk.lab.data import cache as caches
from anyk.lab.data import limits
from anyk.lab.data.sets import Dataset, Split, with_statistics
from anyk.lab.errors import LabError
from anyk.lab.warn_once import warn_once

SIZE = 32
"""Height and width of the images, where nobody asks for others."""

_VERSION = 3  # of the pixels and what is kept with them: a change of `read_pixels` needs another number
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
# A file is what it is, whatever its name. Of other kinds, some are programs, which Ghostscript would run, or envelopes of any.
_KINDS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")
_FREE_PIXELS = 89_478_485  # of which Pillow itself thinks nothing; a white page at 600 dpi has a third of it
_TEST_NAMES = ("test", "val", "valid", "validation")  # the first that is there is the test set


def load(folder: Path, *, size: int = SIZE, cache: Path | None = None) -> Dataset:
    """The images at FOLDER/CLASS/*, or FOLDER/train/CLASS/* and FOLDER/test/CLASS/*, as (N, 3, size, size).

    Where there is no test folder, val, valid or validation is the test set. The shorter side is resized to ``size`` and the
    middle is taken. Images that cannot be read are named in the log and left out.
    """
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder.")
    train_root, test_root = find_splits(folder)
    train = _files_by_class(train_root)
    test = None if test_root is None else _files_by_class(test_root)
    classes = tuple(train)
    if not any(train.values()):
        raise LabError(f"{folder} has no images; they should be at FOLDER/CLASS/*.jpg or FOLDER/train/CLASS/*.jpg.")
    if test_root is not None and test is not None:
        strangers = sorted(set(test) - set(classes))
        if strangers:
            raise LabError(f"{test_root / strangers[0]} is a class that {train_root} does not have.")
    tell_of_nested((path for paths in train.values() for path in paths), train_root, len(classes))

    def build() -> Dataset:
        unreadable: dict[Path, str] = {}
        train_split = _decode_all(train, classes, size, unreadable)
        test_split = None if test is None else _decode_all(test, classes, size, unreadable)
        counts = torch.bincount(train_split.labels, minlength=len(classes))
        empty = [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]
        if empty:
            raise LabError(
                f"{folder} has no readable training images of the class {empty[0]!r}: add some or remove its folder."
            )
        if test_split is not None and not len(test_split):
            raise LabError(f"{test_root} has no readable images: add some or remove it.")
        left_out = tuple(path.relative_to(folder).as_posix() for path in unreadable)
        name = folder.absolute().name
        dataset = Dataset(name, "images", classes, train_split, test_split, "", unreadable=left_out)
        return with_statistics(dataclasses.replace(dataset, reasons=tuple(unreadable.values())))

    sources = [path for files in (train, test or {}) for paths in files.values() for path in paths]
    # The classes are named too: an empty class has no files.
    key = caches.key_of(sources, classes, None if test is None else tuple(test), size)
    kept = caches.cache_folder() if cache is None else cache
    dataset = caches.remember(kept / f"images-v{_VERSION}-{key}.safetensors", build)
    if dataset.unreadable:
        what = "image could not be read and is" if len(dataset.unreadable) == 1 else "images could not be read and are"
        reasons = itertools.zip_longest(dataset.unreadable, dataset.reasons)
        paths = ", ".join(f"{folder / name} ({reason})" if reason else f"{folder / name}" for name, reason in reasons)
        warn_once(f"{len(dataset.unreadable)} {what} left out: {paths}")
    return dataclasses.replace(dataset, folder=str(folder))


def files(dataset: Dataset) -> tuple[list[str], list[str] | None]:
    """The files of the training and of the test examples, in their order, relative to the folder of the data set."""
    folder, unreadable = Path(dataset.folder), set(dataset.unreadable)

    def inside(root: Path) -> list[str]:
        paths = (path.relative_to(folder).as_posix() for paths in _files_by_class(root).values() for path in paths)
        return [path for path in paths if path not in unreadable]

    train_root, test_root = find_splits(folder)
    return inside(train_root), None if test_root is None else inside(test_root)


def find_splits(folder: Path) -> tuple[Path, Path | None]:
    """Where the class folders of the training and of the test images are. Says in a note what is not a matter of course."""
    # A class may be called train: then there are images in it and no folders.
    if not subfolders(folder / "train"):
        return folder, None
    present = [folder / name for name in _TEST_NAMES if (folder / name).is_dir()]
    test = next((path for path in present if subfolders(path)), None)
    if test is not None and test.name != "test":
        warn_once(f"{test} is taken as the test set, as there is no {folder / 'test'} with class folders in it.")
    unused = [str(path) for path in present if path != test]
    if unused:
        reason = "it has no class folders in it" if test is None else f"the test set is {test}"
        warn_once(f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} left out: {reason}.")
    return folder / "train", test


def tell_of_nested(paths: Iterable[Path], root: Path, classes: int) -> None:
    """Say in a note that images lie deeper than ROOT/CLASS/image, which may be meant as classes of their own."""
    nested = [path for path in paths if path.parent.parent != root]
    if nested:
        inside = nested[0].relative_to(root)
        count = f"{len(nested)} {'image lies' if len(nested) == 1 else 'images lie'}"
        warn_once(
            f"{count} in folders inside of a class folder of {root} and count for that class: {inside} is of the class "
            f"{inside.parts[0]!r}. There {'is 1 class' if classes == 1 else f'are {classes} classes'}."
        )


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, in sorted order, without hidden ones."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    return {
        inside.name: sorted(
            path
            for path in inside.rglob("*")
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
        )
        for inside in subfolders(folder)
    }


def _decode_all(files: dict[str, list[Path]], classes: tuple[str, ...], size: int, unreadable: dict[Path, str]) -> Split:
    paths = [path for name in files for path in files[name]]
    labels = torch.tensor([classes.index(name) for name in files for _ in files[name]], dtype=torch.int64)
    images = torch.zeros(len(paths), 3, size, size, dtype=torch.uint8)
    reasons: list[str | None] = [None] * len(paths)

    def decode(position: int) -> None:
        try:
            images[position] = read_pixels(paths[position], size)
        # Decoders of damaged files raise OSError, SyntaxError, ValueError, struct.error, ...
        except Exception as error:
            reasons[position] = _reason(error, paths[position])

    with ThreadPoolExecutor(os.cpu_count()) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata; the pixels are all we want
        list(pool.map(decode, range(len(paths))))
    unreadable |= {path: reason for path, reason in zip(paths, reasons, strict=True) if reason is not None}
    good = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
    return Split((images[good],), labels[good])


def _reason(error: Exception, path: Path) -> str:
    """Why an image cannot be read, without its name."""
    text = str(error).removeprefix(f"{path} ").replace(f" {str(path)!r}", "")
    return " ".join(text.split())[:200] or type(error).__name__


def opened_image(path: str | Path) -> Image.Image:
    """An image file, of a kind that holds pixels and nothing else."""
    Image.init()
    return Image.open(path, formats=[kind for kind in _KINDS if kind in Image.OPEN])


def refuse_bomb(image: Image.Image, path: str | Path) -> None:
    """Raise where the pixels of an image take much more memory than images of such files do."""
    pixels = image.width * image.height
    if pixels > _FREE_PIXELS:
        limits.refuse_bomb(path, Path(path).stat().st_size, pixels * (1 if image.mode in ("1", "L", "P") else 4))


def read_pixels(path: str | Path, size: int | tuple[int, int] = SIZE) -> Tensor:
    """An image file as (3, height, width) uint8: upright, transparent parts white, resized to fit, the middle taken.

    Args:
        path: the file.
        size: height and width; one number for both.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise ValueError(f"size: expected at least 1, got {size}")
    with opened_image(path) as file:
        file.draft("RGB", (2 * width, 2 * height))  # a JPEG can be decoded at a fraction of its size
        refuse_bomb(file, path)
        ImageOps.exif_transpose(file, in_place=True)  # a large one is not copied
        image: Image.Image = file
        if image.mode.startswith("I"):  # 16 bits of gray, which Pillow would clip
            image = image.point(lambda value: value * (1 / 256)).convert("L")
        if "transparency" in image.info or "A" in image.getbands():
            image = image if image.mode == "RGBA" else image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = ImageOps.fit(image if image.mode == "RGB" else image.convert("RGB"), (width, height), Image.Resampling.BICUBIC)
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)
