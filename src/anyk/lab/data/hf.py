"""Data sets of the Hugging Face library `datasets`: images with a label each, or the columns of a table."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyk.lab.data import arrays, images, labels, table_files, tables
from anyk.lab.data.sets import Dataset
from anyk.lab.errors import LabError, first_line

_TEST = ("test", "validation", "valid", "val", "dev")
_LARGEST = 1 << 60  # the library has unpacked it already


def load(word: str, size: int, options: tables.Options) -> Dataset:
    """A data set that ``save_to_disk`` wrote, or one of the hub by name.

    The split ``train`` is to train with, ``test`` is the test. A validation split is that of images beside a test, and the test
    where there is no other. What is missing the lab splits off.

    Args:
        word: the folder, or the name, with ``:CONFIGURATION`` if it has several.
        size: height and width of images; 0: 32.
        options: which column has the labels, by default the one that has class names, or is called label; and what those of a
            table are.
    """
    found = _splits(word)
    features, name = found["train"].features, Path(word.partition(":")[0]).name or word
    pictures = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    label = options.label_column if options.label_column is not None else _label(features, word)
    if label not in features:
        raise LabError(f"hf:{word} has no column {label!r}: its columns are {', '.join(features)}.")
    names = getattr(features[label], "names", None)
    if len(pictures) > 1:
        raise LabError(f"hf:{word} has several columns of images, {' and '.join(pictures)}: keep one.")
    if pictures:
        for option in ("drop", "categories", "row_numbers"):
            if getattr(options, option):
                raise LabError(f"{option} is for a table, but hf:{word} holds images: leave it out.")
        dataset = _images(found, pictures[0], label, size or images.SIZE, name, names, word)
    else:
        dataset = _table(found, dataclasses.replace(options, label_column=label), name, names, word)
    return arrays.finished(dataset)


def _splits(word: str) -> dict[str, Any]:
    """The parts of a data set by what they are for: train, and perhaps test and validation."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise LabError(f'hf:{word} needs datasets: pip install "anyk[hf]"') from None
    folder = Path(word).expanduser()
    try:
        with _quiet(datasets):
            if folder.is_dir() and any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
                found: Any = datasets.load_from_disk(str(folder))
            else:
                name, _, configuration = word.partition(":")
                found = datasets.load_dataset(
                    str(folder) if folder.is_dir() else name, *([configuration] if configuration else [])
                )
    except Exception as error:  # no network, no such name, a damaged file
        raise LabError(f"hf:{word} cannot be read ({type(error).__name__}: {first_line(error)}).") from None
    if not isinstance(found, Mapping):
        return {"train": found}
    if "train" not in found:
        raise LabError(f"hf:{word} has no split train: it has {', '.join(found)}.")
    parts = {"train": found["train"]}
    called = [split for split in _TEST if split in found]
    if called:
        parts["test"] = found[called[0]]
    if called[:1] == ["test"] and len(called) > 1:
        parts["validation"] = found[called[1]]
    return parts


def _label(features: Mapping[str, Any], word: str) -> str:
    """The column with the labels: the one that has class names, or is called so."""
    named = [column for column, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    called = [column for column in features if column.lower() in tables.LABEL_WORDS]
    for candidates in (named, [column for column in named if column in called], called):
        if len(candidates) == 1:
            return candidates[0]
    raise LabError(f"hf:{word} does not say which column has the labels ({', '.join(features)}): give --label-column.")


def _images(
    found: Mapping[str, Any], column: str, label: str, size: int, name: str, names: list[str] | None, word: str
) -> Dataset:
    """Images, resized to fit, and the middle of each."""
    pairs = {}
    for split, part in found.items():
        pixels = torch.empty(len(part), 3, size, size, dtype=torch.uint8)
        given: list[Any] = []
        try:
            for place, row in enumerate(part.select_columns([column, label])):
                pixels[place] = images.fitted(images.upright(row[column]), size)
                given.append(row[label])
        except Exception as error:  # an image that is damaged, or none
            raise LabError(f"hf:{word} has no image in row {len(given)} of {split} ({first_line(error)}): remove it.") from None
        pairs[split] = arrays.Pair(pixels, labels.to_numpy(given, f"hf:{word}"))
    return arrays.dataset_of(pairs, names, name, dict.fromkeys(("train", "test"), f"hf:{word}"), lambda _: None)


def _table(found: Mapping[str, Any], options: tables.Options, name: str, names: list[str] | None, word: str) -> Dataset:
    remarks: list[str] = []
    if "validation" in found:
        remarks.append("The split validation is left out: test is the test, and the lab takes a part of train for validation.")
    pairs, schema = {}, None
    for split in (split for split in ("train", "test") if split in found):
        part = found[split].with_format("arrow")
        batches = functools.partial(_batches, part)
        frame = table_files.Frame(f"hf:{word} ({split})", part.features.arrow_schema, batches, _LARGEST)
        table = tables.read(frame, options, schema)
        read = arrays.found_in_table(table, frame.name)
        pairs[split], schema = read.pairs["train"], table.schema
        remarks += read.remarks
    if names is not None:  # the table has their numbers
        pairs = {
            split: pair._replace(labels=np.array([int(number) for number in pair.labels])) for split, pair in pairs.items()
        }
    sources = dict.fromkeys(("train", "test"), f"hf:{word}")
    dataset = arrays.dataset_of(pairs, names, name, sources, lambda _: None)
    return dataclasses.replace(dataset, table=schema, remarks=tuple(remarks))


def _batches(part: Any, rows: int) -> Iterator[Any]:
    for table in part.iter(rows):
        yield from table.to_batches()


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without the bars of the library."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
