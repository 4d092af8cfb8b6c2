"""Predictions of a trained model for new examples: images, tables and arrays, and sequences."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data import images
from anyk.lab.data.readers import ARRAYS, TABLES
from anyk.lab.errors import LabError
from anyk.lab.models import Classifier
from anyk.lab.train import find_device

_GRAY = np.array([0.299, 0.587, 0.114], np.float32)
"""of red, green and blue, as Pillow has it"""
_FILES = frozenset((*ARRAYS, *TABLES))
_BACKBONE = "for a model of embeddings name the --backbone that made them, such as efficientnet-lite0"


@dataclass(frozen=True)
class Prediction:
    """The first guesses for one example, by class name and softmax probability, best first."""

    file: Path
    row: int | None
    """in the file, from 0, of a text its line; None: the file is one example"""
    guesses: list[tuple[str, float]]


def predict(
    model: Classifier,
    files: Sequence[str | Path],
    *,
    k: int | None = None,
    coverage: float | None = None,
    batch_size: int = 256,
    backbone: str | None = None,
    device: str = "cpu",
    unreadable: Callable[[str], None],
    note: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Prediction]:
    """The first guesses for every example of some files, in their order.

    Args:
        model: from :func:`anyk.lab.models.load`.
        files: images, tables, files of arrays, or folders of such. For a model of sequences, texts, one sequence a line; if its
            tokens are those of Python, source files, of which the end is to be continued.
        k: guesses for each; by default 5, unless ``coverage`` is given.
        coverage: how often the right class should be among the guesses, of which each example then gets its own number.
        batch_size: examples at once.
        backbone: for images, where the model takes embeddings of them: the one that made those it was trained on.
        device: where to compute.
        unreadable: called with a sentence for each file that cannot be used; the others are predicted all the same.
        note: called with remarks about the data.
    """
    if k is not None and coverage is not None:
        raise LabError("k and coverage contradict each other: with coverage each example gets its own number of guesses.")
    if (k is not None and k < 1) or batch_size < 1:
        raise LabError(f"k and batch_size should be at least 1, but are {k} and {batch_size}.")
    if not files:
        raise LabError("give the files to predict: images, tables, files of arrays, or folders of such.")
    threshold = None if coverage is None else model.threshold(coverage)  # which may refuse it
    where = find_device(device)
    model = model.to(where)
    read = _reader(model, backbone, device, note)
    for path in _expanded([Path(file) for file in files], read.suffixes, unreadable, read.any_suffix):
        try:
            for rows, examples in read(path, batch_size):
                guessed = model.guesses(examples.to(where), k or 5, threshold)
                for row, guesses in zip(rows, guessed, strict=True):
                    yield Prediction(path, row, guesses)
        except LabError as error:
            unreadable(str(error))
        except OSError as error:
            unreadable(f"{path} cannot be read ({error.strerror or error}).")


def _expanded(
    paths: Sequence[Path], suffixes: Collection[str], unreadable: Callable[[str], None], any_suffix: bool
) -> Iterator[Path]:
    """The files, with those of the right suffix in place of a folder."""
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
            inside = [each for each in inside if each.suffix.lower() in suffixes and not each.name.endswith("_labels.npy")]
            if not inside:
                unreadable(f"{path} has no files that end in {', '.join(sorted(suffixes))}.")
            yield from inside
        elif not path.exists():
            unreadable(f"{path} does not exist.")
        elif not any_suffix and path.suffix.lower() not in suffixes:
            hint = f"; {_BACKBONE}" if path.suffix.lower() in images.SUFFIXES else ""
            unreadable(f"{path} is of another kind: give files that end in {', '.join(sorted(suffixes))}{hint}.")
        else:
            yield path


class _Reader:
    """From a file to examples as a model takes them, in batches with their rows."""

    any_suffix = False

    def __init__(self, suffixes: Collection[str]) -> None:
        self.suffixes = frozenset(suffixes)

    def __call__(self, path: Path, size: int) -> Iterator[tuple[list[int | None], Tensor]]:
        raise NotImplementedError


def _reader(model: Classifier, backbone: str | None, device: str, note: Callable[[str], None]) -> _Reader:
    spec = model.spec
    if spec.kind == "sequences":
        if backbone is not None:
            raise LabError("backbone is for images, but this model takes sequences of tokens: leave it out.")
        return _Sequences(model)
    if spec.kind == "images":
        if backbone is not None:
            raise LabError("backbone is for a model of embeddings, but this one takes the pixels themselves: leave it out.")
        return _Pixels(model)
    if backbone is not None:
        return _Embedded(model, backbone, device)
    return _Rows(model, note)


class _Rows(_Reader):
    """Tables by the names of their columns, and arrays."""

    def __init__(self, model: Classifier, note: Callable[[str], None]) -> None:
        super().__init__(_FILES)
        self.table, self.width, self.note = model.spec.table, model.spec.shape[0], note

    def __call__(self, path: Path, size: int) -> Iterator[tuple[list[int | None], Tensor]]:
        rows = self._of_table(path) if path.suffix.lower() in TABLES else self._of_arrays(path)
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            yield list(range(start, start + len(block))), torch.from_numpy(np.ascontiguousarray(block))

    def _of_table(self, path: Path) -> Any:
        from anyk.lab.data import tables

        table = tables.read(path)
        if self.table is not None:
            return self.table.transform(table, lambda sentence: self.note(f"{path}: {sentence}"))
        names = table.column_names
        if len(names) == self.width + 1:  # with labels, which are the last
            names = names[:-1]
        if len(names) != self.width:
            raise LabError(f"{path} has {len(names)} columns, but the model takes {self.width} numbers.")
        columns = [tables.Column(name) for name in names]
        return tables.TableEncoder(tuple(columns), others=tuple(table.column_names[len(names) :])).transform(table, self.note)

    def _of_arrays(self, path: Path) -> Any:
        from anyk.lab.data import readers

        if path.suffix.lower() == ".npy":
            rows = np.load(path, allow_pickle=False)
        else:
            arrays = readers.arrays(path)
            named = [arrays[key] for key in ("x", "x_test", "embeddings", "features", "data", "inputs") if key in arrays]
            if not named:
                raise LabError(f"{path} should have an array X (or embeddings), but has {', '.join(arrays) or 'none'}.")
            rows = named[0]
        if self.table is not None:
            raise LabError(f"{path} has no names for its columns, but the model knows those of its table: give a table.")
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise LabError(f"{path} should have rows of {self.width} numbers, but has the shape {rows.shape}.")
        if not np.isfinite(rows).all():
            raise LabError(f"{path} has NaN or infinite numbers: fill them in.")
        return rows.astype(np.float32)


class _Pixels(_Reader):
    """Image files, and arrays of pixels."""

    def __init__(self, model: Classifier) -> None:
        super().__init__(images.SUFFIXES | frozenset(ARRAYS))
        self.shape = model.spec.shape

    def __call__(self, path: Path, size: int) -> Iterator[tuple[list[int | None], Tensor]]:
        channels, height, width = self.shape
        if path.suffix.lower() in ARRAYS:
            from anyk.lab.data import readers

            array = (
                np.load(path, allow_pickle=False)
                if path.suffix.lower() == ".npy"
                else next(iter(readers.arrays(path).values()))
            )
            pixels = readers.examples(array, str(path))
            pixels = images.resize(pixels, height) if pixels.ndim == 4 and height == width else pixels
            if pixels.shape[1:] != self.shape:
                raise LabError(f"{path} should have images of the shape {self.shape}, but has {pixels.shape[1:]}.")
            for start in range(0, len(pixels), size):
                block = pixels[start : start + size]
                yield list(range(start, start + len(block))), torch.from_numpy(block)
            return
        if height != width or channels not in (1, 3):
            raise LabError(f"the model takes arrays of the shape {self.shape}: give these instead of {path}.")
        [found] = images.decode_all([path], lambda each: images.read_pixels(each, height))
        if isinstance(found, str):
            raise LabError(f"{path} cannot be read as an image ({found}).")
        if channels == 1:
            found = np.rint(np.einsum("chw,c->hw", found.astype(np.float32), _GRAY)).astype(np.uint8)[None]
        yield [None], torch.from_numpy(np.ascontiguousarray(found))[None]


class _Embedded(_Reader):
    """Image files through the backbone that made the embeddings."""

    def __init__(self, model: Classifier, backbone: str, device: str) -> None:
        from anyk.lab.embed import Encoder

        super().__init__(images.SUFFIXES)
        self.encoder, self.width, self.backbone = Encoder(backbone, device), model.spec.shape[0], backbone

    def __call__(self, path: Path, size: int) -> Iterator[tuple[list[int | None], Tensor]]:
        [found] = images.decode_all([path], images.read_image)
        if isinstance(found, str):
            raise LabError(f"{path} cannot be read as an image ({found}).")
        features = self.encoder.run([self.encoder.preprocess(found)])
        if features.shape[1] != self.width:
            raise LabError(
                f"the backbone {self.backbone} gives {features.shape[1]} numbers for an image, but the model takes {self.width}: "
                "give the one that made its data."
            )
        yield [None], features


class _Sequences(_Reader):
    """Texts, one sequence a line; or Python source."""

    def __init__(self, model: Classifier) -> None:
        self.python = model.spec.tokens == "python"
        super().__init__((".py", ".pyi") if self.python else (".txt", ".md"))
        self.any_suffix = True
        self.numbers = {name: place for place, name in enumerate(model.classes)}
        self.length = model.spec.shape[0]

    def __call__(self, path: Path, size: int) -> Iterator[tuple[list[int | None], Tensor]]:
        from anyk.lab.data import sequences

        found: list[tuple[int | None, list[str]]]
        if self.python:
            found = [(None, list(sequences.python_tokens(path.read_bytes(), unfinished=True)))]
        else:
            found = list(enumerate(sequences.lines(path)))
        if not found or not found[0][1]:
            raise LabError(f"{path} has no tokens to go on from.")
        some = iter(found)
        while batch := list(itertools.islice(some, size)):
            yield [row for row, _ in batch], torch.stack([self._tokens(tokens) for _, tokens in batch])

    def _tokens(self, tokens: Sequence[str]) -> Tensor:
        last = [self.numbers.get(token, len(self.numbers)) for token in tokens[-self.length :]]
        return torch.tensor([len(self.numbers) + 1] * (self.length - len(last)) + last)
