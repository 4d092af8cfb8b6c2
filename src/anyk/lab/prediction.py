"""Predictions of a trained model for new examples: image files, array files and tables, with labels or without, and texts."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from anyk.lab.data import arrays, completion, images, sequences, tables
from anyk.lab.embed import Encoder, load_backbone
from anyk.lab.errors import LabError
from anyk.lab.files import shortened
from anyk.lab.run.batches import find_device
from anyk.lab.run.models import Classifier, Plan

_GRAY = torch.tensor([0.299, 0.587, 0.114])  # of red, green and blue, as Pillow has it
_ARRAYS = frozenset((*arrays.SUFFIXES, ".safetensors"))
_SOURCES = (".py", ".pyi")
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
    label_column: str | None = None,
    drop: Sequence[str] = (),
    missing: Literal["mean", "refuse"] = "mean",
    device: str = "cpu",
    unreadable: Callable[[str], None],
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Prediction]:
    """The first guesses for every example of some files, in their order. A batch is in memory at a time, not a file.

    Args:
        model: from :func:`anyk.lab.run.models.load`.
        files: images, files of arrays, or folders of such. For a model of sequences, texts, one sequence a line; if its tokens
            are those of Python, source files, of which the end is to be continued.
        k: guesses for each; by default 5, unless ``coverage`` is given.
        coverage: how often the right class should be among the guesses, of which each example then gets its own number.
        batch_size: examples at once.
        backbone: for images, where the model takes embeddings of them: the backbone that made those it was trained on.
        label_column: of tables, the column with the labels, which is left out.
        drop: of tables, other columns to leave out.
        missing: of tables, what becomes of missing values: the mean of their column in the training table, or a refusal.
        device: where to compute.
        unreadable: called with a sentence for each file that cannot be used; the others are predicted all the same.
        note: called with remarks about the data, of which the guesses may suffer.
    """
    if k is not None and coverage is not None:
        raise LabError("k and coverage contradict each other: with coverage each example gets its own number of guesses.")
    if coverage is not None:
        model.threshold(coverage)  # which may refuse it
    elif k is None:
        k = 5
    for name, number in (("k", 1 if k is None else k), ("batch_size", batch_size)):
        if number < 1:
            raise LabError(f"{name} should be at least 1, but is {number}.")
    if not files:
        raise LabError("give the files to predict: images, files of arrays, or folders of such.")
    shape = model.plan.shape
    lists: dict[str, Any] = {"count": k, "coverage": coverage}
    if model.plan.tokens:
        for name, value in (("backbone", backbone), ("label_column", label_column), ("drop", drop or None)):
            if value is not None:
                raise LabError(f"{name} is for other data, but this model takes sequences of tokens: leave it out.")
        paths = [Path(file) for file in files]
        return _continued(model.to(find_device(device)), paths, lists, batch_size, device, unreadable, note)
    read = _image_reader(shape, backbone, device)
    model = model.to(find_device(device))
    kinds = "images" if read is not None else f"files of arrays ({', '.join(sorted(_ARRAYS))})"
    suffixes = images.SUFFIXES if read is not None else _ARRAYS
    found = list(_expanded([Path(file) for file in files], suffixes, kinds, unreadable))
    if read is None and (image := next((path for path in found if _is_image(path)), None)) is not None:
        raise LabError(f"{image} is an image, but the model takes arrays of the shape {shape}: give these; {_BACKBONE}.")

    options = tables.Options(label_column, tuple(drop), missing=missing)

    def guess(examples: Tensor) -> list[list[tuple[str, float]]]:
        return model.guesses(examples.to(find_device(device)), **lists)

    def predictions() -> Iterator[Prediction]:
        for are_images, group in itertools.groupby(found, _is_image):
            if are_images and read is not None:
                for paths, examples in _image_batches(group, read, batch_size, unreadable):
                    for path, guesses in zip(paths, guess(examples), strict=True):
                        yield Prediction(path, None, guesses)
                continue
            for path in group:
                row = itertools.count()
                try:
                    for block in arrays.blocks(path, shape, batch_size, options, model.plan.table, note):
                        for guesses in guess(block):
                            yield Prediction(path, next(row), guesses)
                except LabError as error:
                    unreadable(str(error))
                except OSError as error:
                    unreadable(f"{path} cannot be read ({error.strerror or error}).")

    return predictions()


def _continued(
    model: Classifier,
    paths: Sequence[Path],
    lists: dict[str, Any],
    batch_size: int,
    device: str,
    unreadable: Callable[[str], None],
    note: Callable[[str], None],
) -> Iterator[Prediction]:
    """Predictions for what follows each sequence of some files."""
    known, [length] = set(model.classes), model.plan.shape
    suffixes = _SOURCES if model.plan.tokens == "python" else sequences.TEXTS
    kinds = f"files that end in {' or '.join(suffixes)}"
    for path in _expanded(paths, suffixes, kinds, unreadable, texts=True):
        try:
            read = _sequences(path, model.plan)
            strange = [tokens for _, tokens in read if known.isdisjoint(tokens[-length:])]
            found = iter(read)
            while batch := list(itertools.islice(found, batch_size)):
                given = [tokens for _, tokens in batch]
                guessed = model.guesses(model.tokens(given).to(find_device(device)), **lists, seen=given)
                for (row, _), guesses in zip(batch, guessed, strict=True):
                    yield Prediction(path, row, guesses)
            if strange:
                note(
                    f"{path}: of {len(read):,} sequences, {len(strange):,} have nothing that the model knows, such as "
                    f"{shortened(strange[0][-1])!r}: their guesses are the same whatever they hold."
                )
        except LabError as error:
            unreadable(str(error))


def _sequences(path: Path, plan: Plan) -> list[tuple[int | None, list[str]]]:
    """The sequences of a file with the numbers of their lines; of Python source one, without."""
    if plan.tokens == "python":
        try:
            tokens = list(completion.python_tokens(path.read_bytes(), unfinished=True))
        except OSError as error:
            raise LabError(f"{path} cannot be read: {error.strerror}.") from None
        if not tokens:
            raise LabError(f"{path} has no tokens of Python in it.")
        return [(None, tokens)]
    cut: Callable[[str], list[str]] = str.split
    if plan.tokens == "words":
        cut = sequences.words_of
    elif any(" " in name for name in plan.classes):  # as titles have them
        cut = _between_tabs
    lines = enumerate(sequences.read_lines(path))
    found: list[tuple[int | None, list[str]]] = [(row, tokens) for row, line in lines if (tokens := cut(line))]
    if not found:
        raise LabError(f"{path} is empty: it should have one sequence on each line.")
    return found


def _between_tabs(line: str) -> list[str]:
    return [item for part in line.split("\t") if (item := part.strip())]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in images.SUFFIXES


def _expanded(
    paths: Sequence[Path], suffixes: Collection[str], kinds: str, unreadable: Callable[[str], None], *, texts: bool = False
) -> Iterator[Path]:
    """The files, with those of the right suffix in place of a folder.

    Where the model takes ``texts``, a file that is named itself may have any suffix.
    """
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
            inside = [each for each in inside if each.suffix.lower() in suffixes and not _is_labels(each)]
            if not inside:
                pictures = suffixes is _ARRAYS and any(_is_image(each) for each in path.rglob("*"))
                hint = f", but images: {_BACKBONE}" if pictures else ""
                unreadable(f"{path} has no {kinds} in it{hint}.")
            yield from inside
        elif not path.exists():
            unreadable(f"{path} does not exist.")
        elif not texts and not _is_image(path) and path.suffix.lower() not in _ARRAYS:
            unreadable(f"{path} has an unknown format: give images or files that end in {', '.join(sorted(_ARRAYS))}.")
        else:
            yield path


def _is_labels(path: Path) -> bool:
    """Whether these are the labels of embeddings beside them."""
    return path.name.endswith("_labels.npy") and path.with_name(f"{path.name.removesuffix('_labels.npy')}.npy").exists()


# --- images -----------------------------------------------------------------------------------------------------------


class _ImageReader(NamedTuple):
    decode: Callable[[Path], Any]
    prepare: Callable[[Any], Tensor] | None
    """from what ``decode`` gives to what ``batch`` takes"""
    batch: Callable[[list[Tensor]], Tensor]


def _image_reader(shape: tuple[int, ...], backbone: str | None, device: str) -> _ImageReader | None:
    """How images become examples of this shape; None where they do not."""
    if len(shape) == 1:
        if backbone is None:
            return None
        encoder = Encoder(*load_backbone(backbone), device)

        def features(pixels: list[Tensor]) -> Tensor:
            found = encoder.run(pixels)
            if found.shape[1] != shape[0]:
                message = f"{found.shape[1]} numbers for an image, but the model takes {shape[0]}"
                raise LabError(f"the backbone {backbone} gives {message}: give the one that made its data.")
            return found

        return _ImageReader(images.read_image, encoder.preprocess, features)
    if backbone is not None:
        raise LabError("backbone is for a model of embeddings, but this one takes the pixels themselves: leave it out.")
    channels, height, width = shape
    if height != width or channels not in (1, 3):
        return None

    def pixels(path: Path) -> Tensor:
        colours = images.read_pixels(path, height)
        return colours if channels == 3 else torch.einsum("chw,c->hw", colours.float(), _GRAY).round().to(torch.uint8)[None]

    return _ImageReader(pixels, None, torch.stack)


def _image_batches(
    paths: Iterator[Path], read: _ImageReader, batch_size: int, unreadable: Callable[[str], None]
) -> Iterator[tuple[list[Path], Tensor]]:
    listed = list(paths)
    decoded = zip(listed, images.decode_all(listed, read.decode, read.prepare, 2 * batch_size), strict=True)
    while batch := list(itertools.islice(decoded, batch_size)):
        for path, found in batch:
            if isinstance(found, str):
                unreadable(f"{path} cannot be read as an image ({found}).")
        fine = [(path, found) for path, found in batch if isinstance(found, Tensor)]
        if fine:
            yield [path for path, _ in fine], read.batch([found for _, found in fine])
