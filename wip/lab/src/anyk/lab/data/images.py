"""Images: a folder with one folder inside for each class, CIFAR-100, and arrays of pixels at the size that a model takes."""

import dataclasses
import itertools
import os
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.nn import functional

from anyk.lab.data.prepare import Source
from anyk.lab.errors import LabError, first_line

Array = NDArray[Any]
SIZE = 32
"""height and width of decoded images unless asked otherwise"""
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_TEST_NAMES = ("test", "val", "valid", "validation")
"""the first that exists is the test set"""
# Formats that Pillow may try, whatever a file is called. Others are programs (EPS starts Ghostscript) or containers of any.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")
_MOST_PIXELS = 178_956_970
"""twice Pillow's own limit, beyond which it takes a file for an attack"""
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CIFAR_CHECKSUM = "md5:03b5dce01913d631647c71ecec9e9cb8"
_CIFAR = ("train.bin", "test.bin", "fine_label_names.txt")


def read_image(path: str | Path, draft: tuple[int, int] | None = None) -> Image.Image:
    """An image file as RGB: upright, transparent parts white, 16 bits of gray reduced to 8.

    Args:
        path: the file.
        draft: (width, height) that suffice: a larger JPEG may be decoded at a fraction of its size.
    """
    Image.init()
    with Image.open(path, formats=[name for name in _FORMATS if name in Image.OPEN]) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise LabError(f"{path} has {image.width} x {image.height} pixels, which is too many: make it smaller.")
        if draft is not None:
            image.draft("RGB", draft)
        found = ImageOps.exif_transpose(image)
        if found.mode.startswith("I"):  # 16 bits of gray, which Pillow would clip
            found = found.point(lambda value: value * (1 / 256)).convert("L")
        if "transparency" in found.info or "A" in found.getbands():
            found = found.convert("RGBA")
            found = Image.alpha_composite(Image.new("RGBA", found.size, "white"), found)
        return found.convert("RGB")


def read_pixels(path: str | Path, size: int = SIZE) -> Array:
    """An image file as (3, size, size) uint8: resized to fit, and its middle."""
    image = ImageOps.fit(read_image(path, (2 * size, 2 * size)), (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


def decode_all(paths: Iterable[Path], decode: Callable[[Path], Any]) -> Iterator[Any]:
    """Decode files in threads, in order: for each what ``decode`` gives, or as a text the reason why it is no image."""

    def load(path: Path) -> Any:
        try:
            return decode(path)
        except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, …
            return first_line(error).removeprefix(f"{path} ").replace(f" {str(path)!r}", "")

    # Warning filters belong to the process, so they are set here and not in the threads.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\b")  # about odd metadata
        yield from pool.map(load, paths)


# Folders --------------------------------------------------------------------------------------------------------------------


def folder(root: Path, size: int = 0) -> Source:
    """The images at ROOT/CLASS/*, or ROOT/train/CLASS/* and ROOT/test/CLASS/*. Those that cannot be read are left out, by name."""
    train, test, remarks = find(root)
    classes = tuple(train)
    listed = [(path, name, False) for name, paths in train.items() for path in paths]
    listed += [(path, name, True) for name, paths in (test or {}).items() for path in paths]
    if not any(train.values()):
        raise LabError(f"{root} has no images; they should be at {root.name}/CLASS/*.jpg or {root.name}/train/CLASS/*.jpg.")
    pixels, labels, of_test, unreadable = [], [], [], []
    for (path, name, tested), decoded in zip(
        listed, decode_all((path for path, *_ in listed), lambda path: read_pixels(path, size or SIZE)), strict=True
    ):
        if isinstance(decoded, str):
            unreadable.append(f"{path.relative_to(root).as_posix()} ({decoded})")
            continue
        pixels.append(decoded)
        labels.append(classes.index(name))
        of_test.append(tested)
    if not pixels:
        raise LabError(f"{root} has no image that can be read: {unreadable[0]}.")
    if unreadable:
        shown = ", ".join(unreadable[:5]) + ("" if len(unreadable) <= 5 else f" and {len(unreadable) - 5} more")
        remarks.append(f"Images that could not be read and are left out ({len(unreadable)}): {shown}.")
    places = np.flatnonzero(of_test) if any(of_test) else None
    found = Source(root.absolute().name, "images", np.stack(pixels), np.array(labels), classes, places)
    return dataclasses.replace(found, remarks=tuple(remarks), unreadable=tuple(unreadable))


def find(
    root: Path, suffixes: Iterable[str] | None = SUFFIXES
) -> tuple[dict[str, list[Path]], dict[str, list[Path]] | None, list[str]]:
    """The training files, and the test files where there are such, by class; and remarks.

    Args:
        root: ROOT/CLASS/*, or ROOT/train/CLASS/* and ROOT/test/CLASS/*.
        suffixes: of the files that count; None: all that are not hidden.
    """
    remarks, train_root, test_root = [], root, None
    if _subfolders(root / "train"):
        train_root = root / "train"
        present = [root / name for name in _TEST_NAMES if _subfolders(root / name)]
        test_root = present[0] if present else None
        if test_root is not None and test_root.name != "test":
            remarks.append(f"The folder {test_root.name} is taken as the test set, as there is no folder test.")
        if len(present) > 1:
            remarks.append(
                f"Left out, since the test set is {present[0].name}: {', '.join(each.name for each in present[1:])}."
            )
    train, test = _by_class(train_root, suffixes), None if test_root is None else _by_class(test_root, suffixes)
    if test_root is not None and (strangers := sorted(set(test or ()) - set(train))):
        raise LabError(f"{test_root / strangers[0]} is a class that {train_root} does not have: add images or remove it.")
    if nested := [path for path in itertools.chain(*train.values()) if path.parent.parent != train_root]:
        remarks.append(f"Images in folders inside of a class folder count for that class ({len(nested)} of them).")
    return train, test, remarks


def _subfolders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))


def _by_class(root: Path, suffixes: Iterable[str] | None) -> dict[str, list[Path]]:
    return {
        inside.name: sorted(
            path
            for path in inside.rglob("*")
            if (suffixes is None or path.suffix.lower() in suffixes) and not path.name.startswith(".") and path.is_file()
        )
        for inside in _subfolders(root)
    }


# Arrays of pixels -----------------------------------------------------------------------------------------------------------


def resized(source: Source, size: int) -> Source:
    """The source with square images of this size: the shorter side resized, the middle taken; 0: as they are."""
    if not size or source.kind != "images" or source.examples.shape[2:] == (size, size):
        if size and source.kind != "images":
            raise LabError(f"--image-size resizes images, but {source.name} holds {source.kind}: leave it out.")
        return source
    return dataclasses.replace(source, examples=resize(source.examples, size))


def resize(images: Array, size: int) -> Array:
    """The middle square of (N, channels, height, width) uint8 images, in another size."""
    height, width = images.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    out = np.empty((*images.shape[:2], size, size), np.uint8)
    for start in range(0, len(images), 512):
        square = torch.from_numpy(images[start : start + 512, :, top : top + side, left : left + side]).float()
        made = functional.interpolate(square, (size, size), mode="bicubic", antialias=True, align_corners=False)
        out[start : start + 512] = made.round().clamp(0, 255).byte().numpy()
    return out


# CIFAR-100 ------------------------------------------------------------------------------------------------------------------


def cifar100(path: Path | None = None) -> Source:
    """CIFAR-100 with its 100 fine classes: from the official archive in its binary form or the folder in it, or downloaded."""
    path = _download() if path is None else path
    contents = _cifar_files(path)
    if lacking := [name for name in _CIFAR if name not in contents]:
        if any(name in contents for name in ("meta", "train", "test")):
            raise LabError(f"{path} is the Python version, which is a pickle and may run code: give cifar-100-binary.tar.gz.")
        raise LabError(f"{path} is not CIFAR-100: it lacks {lacking[0]}.")
    classes = tuple(contents["fine_label_names.txt"].decode("utf-8", "replace").split())
    tables = []
    for name in _CIFAR[:2]:
        data = np.frombuffer(contents[name], np.uint8)
        if not data.size or data.size % 3074:
            raise LabError(f"{name} in {path} is not a file of CIFAR-100: download it again.")
        tables.append(data.reshape(-1, 3074))
    rows = np.concatenate(tables)
    labels = rows[:, 1].astype(np.int64)
    if labels.max() >= len(classes):
        raise LabError(f"{path} has the label {labels.max()}, but {len(classes)} class names: download it again.")
    test = np.arange(len(tables[0]), len(rows))
    return Source("cifar100", "images", np.ascontiguousarray(rows[:, 2:]).reshape(-1, 3, 32, 32), labels, classes, test)


def _cifar_files(path: Path) -> dict[str, bytes]:
    """The content of the files that matter, by name. Nothing of an archive is written to the disk."""
    if not path.exists():
        raise LabError(f"{path} does not exist; cifar100:PATH wants cifar-100-binary.tar.gz or the folder in it.")
    wanted = (*_CIFAR, "meta", "train", "test")
    if path.is_dir():
        inside = [path / name for name in ("cifar-100-binary", "cifar-100-python") if (path / name).is_dir()]
        root = inside[0] if inside else path
        return {name: (root / name).read_bytes() if name in _CIFAR else b"" for name in wanted if (root / name).is_file()}
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in wanted and member.isfile() and member.size < 1 << 28:
                    file = archive.extractfile(member)
                    found[name] = file.read() if file is not None and name in _CIFAR else b""
    except (tarfile.TarError, OSError, EOFError) as error:
        raise LabError(f"{path} cannot be read as a tar archive ({first_line(error)}): download it again.") from None
    return found


def _download() -> Path:
    import pooch

    try:
        return Path(pooch.retrieve(CIFAR_URL, CIFAR_CHECKSUM, fname="cifar-100-binary.tar.gz", path=pooch.os_cache("anyk")))
    except (OSError, ValueError) as error:
        raise LabError(
            f"{CIFAR_URL} could not be downloaded ({first_line(error)}): run again, or download it by hand and give cifar100:PATH."
        ) from None
