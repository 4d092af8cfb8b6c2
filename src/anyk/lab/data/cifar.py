"""CIFAR-100 from the official archives, read without running anything that is in them."""

import hashlib
import pickle
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pooch
import torch
from torch.nn import functional

from anyk.lab.data import cache as caches
from anyk.lab.data import pickles, untrusted
from anyk.lab.data.sets import Dataset, Split, with_statistics
from anyk.lab.errors import LabError, first_line

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
CHECKSUM = "md5:eb9058c3a382ffc7106e4002c42a8d85"

_VERSION = 1  # of the prepared file
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_PYTHON_FILES = ("train", "test", "meta")
_BINARY_FILES = ("train.bin", "test.bin", "fine_label_names.txt")


def load(path: Path | None = None, *, url: str = URL, checksum: str = CHECKSUM) -> Dataset:
    """CIFAR-100 with its 100 fine classes, from an archive or folder at ``path``, or downloaded.

    ``path`` is cifar-100-python.tar.gz, cifar-100-binary.tar.gz or the folder extracted from one of them. Without a path
    the archive at ``url`` is downloaded once into the cache.
    """
    if path is None:
        key = hashlib.sha256(checksum.encode()).hexdigest()[:12]
        return caches.remember(f"cifar100-v{_VERSION}-{key}", lambda: read(_download(url, checksum)))
    if not path.exists():
        raise LabError(f"{path} does not exist; cifar100:PATH wants the official archive or the folder extracted from it.")
    inside = [path / name for name in ("cifar-100-python", "cifar-100-binary") if (path / name).is_dir()]
    path = inside[0] if inside else path
    sources = [file for name in _PYTHON_FILES + _BINARY_FILES if (file := path / name).is_file()] if path.is_dir() else [path]
    key = caches.key_of(sources)
    return caches.remember(f"cifar100-v{_VERSION}-{key}", lambda: read(path))


def read(path: Path) -> Dataset:
    """The data set in an archive or folder, python or binary version."""
    contents = _contents(path)
    if all(name in contents for name in _PYTHON_FILES):
        with _blaming(path, "meta"):
            classes = tuple(map(_text, _unpickle(contents["meta"])["fine_label_names"]))
        train, test = (_read_python(path, name, contents[name], len(classes)) for name in ("train", "test"))
    elif all(name in contents for name in _BINARY_FILES):
        with _blaming(path, "fine_label_names.txt"):
            classes = tuple(contents["fine_label_names.txt"].decode().split())
        train, test = (_read_binary(path, name, contents[name], len(classes)) for name in ("train.bin", "test.bin"))
    else:
        raise LabError(
            f"{path} is not CIFAR-100: it should hold {', '.join(_PYTHON_FILES)} (python version) "
            f"or {', '.join(_BINARY_FILES)} (binary version), but holds {', '.join(sorted(contents)) or 'none of them'}."
        )
    return with_statistics(Dataset("cifar100", "images", classes, train, test, ""))


def write_small(folder: Path, examples_per_class: int, classes: int = 100) -> Path:
    """Write made-up pictures in the layout of the official python archive, each class with a pattern of its own.

    There are ``examples_per_class`` training examples of each class, and a fifth of that, at least one, for the test.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    patterns = functional.interpolate(torch.rand(classes, 3, 4, 4, generator=generator), size=32, mode="bilinear")
    names = [f"class_{number:02}" for number in range(classes)]
    for part, each in (("train", examples_per_class), ("test", max(1, examples_per_class // 5))):
        labels = torch.arange(classes).repeat(each)
        noise = torch.rand(len(labels), *_SHAPE, generator=generator)
        pixels = ((0.6 * patterns[labels] + 0.4 * noise) * 255).to(torch.uint8).view(-1, _PIXELS).numpy()
        batch = {"fine_labels": labels.tolist(), "coarse_labels": (labels // 5).tolist(), "data": pixels}
        (folder / part).write_bytes(pickle.dumps(batch, protocol=4))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, protocol=4))
    return folder


def _contents(path: Path) -> dict[str, bytes]:
    """The content of the files that matter, by name. Nothing of an archive is written to the disk."""
    wanted = _PYTHON_FILES + _BINARY_FILES
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in wanted if (path / name).is_file()}
    contents = {}
    try:
        with tarfile.open(fileobj=untrusted.unpacked(path), mode="r:") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                # A sparse member claims any number of zeros.
                if name in wanted and member.isfile() and member.sparse is None:
                    archive.fileobj.seek(member.offset_data)
                    contents[name] = archive.fileobj.read(member.size)
                    if len(contents[name]) < member.size:
                        raise EOFError(f"{name} in it is cut short")
    except LabError:
        raise
    except Exception as error:  # damaged archives make tarfile, gzip and zlib raise half a dozen kinds
        reason = first_line(error).strip(":")
        raise LabError(f"{path} cannot be read as a tar archive ({reason}): it is damaged; download it again.") from error
    return contents


@contextmanager
def _blaming(path: Path, name: str) -> Iterator[None]:
    """Turn any error in the body into a LabError about this file."""
    try:
        yield
    except pickles.NotDataError as error:
        raise LabError(f"{name} in {path} asks for {error}, which does not belong there and was not run.") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = first_line(error)
        raise LabError(f"{name} in {path} is not a file of CIFAR-100 ({reason}); download it again.") from error


def _read_python(path: Path, name: str, data: bytes, classes: int) -> Split:
    with _blaming(path, name):
        batch = _unpickle(data)
        pixels, labels = batch["data"], batch["fine_labels"]
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
            kind = getattr(pixels, "dtype", type(pixels).__name__)
            raise ValueError(f"its data are not an array of bytes but {kind}")
        return _split(np.array(pixels), np.array(labels, dtype=np.int64), classes)


def _unpickle(data: bytes) -> dict[str, Any]:
    return {_text(key): value for key, value in pickles.load(data).items()}


def _text(word: str | bytes) -> str:
    """The official files were written by Python 2, whose texts can be read as either type."""
    return word.decode() if isinstance(word, bytes) else word


def _read_binary(path: Path, name: str, data: bytes, classes: int) -> Split:
    with _blaming(path, name):
        record = 2 + _PIXELS
        if len(data) % record:
            raise ValueError(f"its {len(data)} bytes are not whole records of {record}")
        table = np.frombuffer(data, np.uint8).reshape(-1, record)
        return _split(table[:, 2:].copy(), table[:, 1].astype(np.int64), classes)


def _split(pixels: "np.ndarray[Any, Any]", labels: "np.ndarray[Any, Any]", classes: int) -> Split:
    if not len(labels) or pixels.shape != (len(labels), _PIXELS):
        raise ValueError(f"it has {len(labels)} labels for pixels of shape {pixels.shape}")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"its labels run from {labels.min()} to {labels.max()}, but there are {classes} classes")
    return Split((torch.from_numpy(pixels).view(-1, *_SHAPE),), torch.from_numpy(labels))


def _download(url: str, checksum: str) -> Path:
    import requests

    folder = caches.cache_folder()
    name = PurePosixPath(url).name
    by_hand = f"download {name} by hand and pass cifar100:PATH to it"
    try:
        return Path(pooch.retrieve(url, checksum, fname=name, path=folder))
    except requests.RequestException as error:
        raise LabError(f"{url} could not be downloaded ({first_line(error, 500)}): run again, or {by_hand}.") from error
    except ValueError as error:
        raise LabError(f"{url} arrived with a wrong checksum and was thrown away: run again, or {by_hand}.") from error
    except OSError as error:
        raise LabError(f"{url} could not be stored in {folder} ({error}).") from error
