"""The data of a comparison, read once: split, encoded by what the training part shows, and written to files that all runs map.

A reader makes a :class:`Source` of whatever DATA names; :func:`prepare` writes it into a folder; :func:`open_prepared` maps that,
which costs a run next to nothing.

    data.json       what the data are, how they were split, means and deviations
    examples.npy    features (N, d) in float32 or float16, images (N, channels, height, width) in uint8, or the stream of tokens;
                    embedding sets stay where they are, and are mapped there
    labels.npy, train.npy, validation.npy, test.npy, and groups.npy, times.npy, places.npy, begins.npy where there are such
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyk import info
from anyk.lab import files
from anyk.lab.config import DataFields
from anyk.lab.data import noise, split
from anyk.lab.data.split import Split
from anyk.lab.data.tables import Labelled, TableEncoder
from anyk.lab.errors import LabError
from anyk.lab.options import warn_once

Array = NDArray[Any]
Kind = Literal["features", "images", "sequences"]
FORMAT = 1
BLOCK_BYTES, WINDOW_BYTES = 1 << 17, 1 << 28
"""of sets larger than a quarter of the memory: what is read at once, and what is mixed at a time"""
ROWS_AT_ONCE = 4096
UNKNOWN = "…"
"""of sequences, the name of what is no class"""


@dataclass(frozen=True)
class Source:
    """What a reader found, before split and encoding."""

    name: str
    kind: Kind
    examples: Any
    """features: a :class:`Labelled` table, or arrays (N, d) that follow one another; images: an array (N, channels, height, width) in
    uint8; sequences: the stream of tokens"""
    labels: Array
    """(N,) integers from 0, places in ``classes``"""
    classes: tuple[str, ...]
    test: Array | None = None
    """positions that the data themselves keep for the test; None: a share is taken"""
    validation: Array | None = None
    groups: Array | None = None
    times: Array | None = None
    remarks: tuple[str, ...] = ()
    files: tuple[tuple[str, int, int], ...] = ()
    """of an embedding set, which is mapped where it lies: path, offset of the rows, their number"""
    dtype: str = "float32"
    width: int = 0
    places: Array | None = None
    """of sequences: where in the stream the targets are"""
    begins: Array | None = None
    """and where the sequences begin, and the end of the stream"""
    length: int = 0
    """and how many tokens before a target a model sees"""
    tokens: str = ""
    unreadable: tuple[str, ...] = ()


class Examples:
    """The examples of a prepared set, mapped from its files: what is not used takes no memory."""

    def __init__(self, parts: Sequence[Array], row_shape: tuple[int, ...]) -> None:
        self.parts, self.shape = list(parts), row_shape
        self.starts = np.cumsum([0, *map(len, self.parts)])
        self.row_bytes = int(np.prod(row_shape, dtype=np.int64)) * self.parts[0].itemsize
        memory = info.usable_memory() or math.inf
        self.is_large = len(self) * self.row_bytes > memory / 4
        self._files = {}
        for number, part in enumerate(self.parts):
            if self.is_large and isinstance(part, np.memmap) and part.filename is not None:
                self._files[number] = (os.open(part.filename, os.O_RDONLY), part.offset)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, positions: Tensor) -> Tensor:
        """The examples at these positions, in their order."""
        wanted = positions.numpy()
        order = wanted.argsort(kind="stable")
        ascending = wanted[order]
        out = np.empty((len(wanted), *self.shape), self.parts[0].dtype)
        ends = ascending.searchsorted(self.starts)
        for number, part in enumerate(self.parts):
            first, end = ends[number], ends[number + 1]
            if first < end:
                rows = ascending[first:end] - self.starts[number]
                if number in self._files:
                    self._read(number, rows, out[first:end])
                else:
                    out[first:end] = part[rows]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return torch.from_numpy(out[back])

    def _read(self, number: int, rows: Array, out: Array) -> None:
        """Read from the file, not from the mapping, whose pages would count as memory of this process."""
        descriptor, offset = self._files[number]
        runs = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
        for first, end in zip(runs, [*runs[1:], len(rows)], strict=True):
            size = int(end - first) * self.row_bytes
            data = os.pread(descriptor, size, offset + int(rows[first]) * self.row_bytes)
            if len(data) < size:
                raise LabError("a file of the data has become shorter while it was read: give the data again.")
            out[first:end] = np.frombuffer(data, out.dtype).reshape(-1, *self.shape)

    def order(self, positions: Tensor, generator: torch.Generator) -> Tensor:
        """The order of an epoch: shuffled; of sets larger than a quarter of the memory, blocks that lie together, mixed window by
        window."""
        if not self.is_large:
            return positions[torch.randperm(len(positions), generator=generator)]
        block = max(1, BLOCK_BYTES // self.row_bytes)
        blocks = list(positions.split(block))
        shuffled = torch.cat([blocks[number] for number in torch.randperm(len(blocks), generator=generator).tolist()])
        windows = shuffled.split(max(1, WINDOW_BYTES // self.row_bytes))
        return torch.cat([window[torch.randperm(len(window), generator=generator)] for window in windows])

    def seen(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of sequences, what stands before each target: rows and classes."""
        raise LabError("--mask-seen is for sequences: leave it out.")


class Sequences(Examples):
    """Places in a stream of tokens: an example is the tokens before one, of the same sequence."""

    def __init__(self, stream: Array, places: Array, begins: Array, length: int, classes: int) -> None:
        super().__init__([stream], ())
        self.stream, self.length, self.classes = torch.from_numpy(np.array(stream)), length, classes
        self.places, self.begins = torch.from_numpy(np.asarray(places)), torch.from_numpy(np.asarray(begins))

    def __len__(self) -> int:
        return len(self.places) if hasattr(self, "places") else super().__len__()

    def take(self, positions: Tensor) -> Tensor:
        """(B, length) tokens, padded on the left by n + 1."""
        where = self.places[positions]
        begin = self.begins[torch.searchsorted(self.begins, where, right=True) - 1]
        index = where[:, None] + torch.arange(-self.length, 0)
        tokens = self.stream[index.clamp(min=0)].long()
        return tokens.masked_fill(index < begin[:, None], self.classes + 1)

    def order(self, positions: Tensor, generator: torch.Generator) -> Tensor:
        return positions[torch.randperm(len(positions), generator=generator)]

    def seen(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows, classes = [], []
        for row, where in enumerate(self.places[positions].tolist()):
            begin = int(self.begins[int(torch.searchsorted(self.begins, where, right=True)) - 1])
            found = self.stream[begin:where].long().unique()
            found = found[found < self.classes]
            rows.append(torch.full_like(found, row))
            classes.append(found)
        return torch.cat(rows), torch.cat(classes)


@dataclass(frozen=True)
class Prepared:
    """A data set that is ready for runs."""

    folder: Path
    name: str
    kind: Kind
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    """of one example"""
    fingerprint: str
    """of its content and split"""
    examples: Examples
    labels: Tensor
    """(N,), int64; below 0: a class that training does not have, which no guess hits"""
    split: Split
    how_split: str
    """in a sentence"""
    balance: dict[str, float]
    """``most_frequent``: the share of the test examples that are of training's most frequent class; ``smallest`` and ``largest``
    class of the training part"""
    fields: DataFields
    groups: Tensor | None = None
    times: Tensor | None = None
    mean: Tensor | None = None
    """of the training part: for each feature, or for each channel of pixels from 0 to 1"""
    std: Tensor | None = None
    table: TableEncoder | None = None
    tokens: str = ""
    own_validation: bool = False
    remarks: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = field(default=())

    @property
    def label_noise(self) -> float | str:
        """The share or the confusion matrix of wrong labels in training and validation."""
        return self.fields.label_noise

    @property
    def mask_seen(self) -> bool:
        """Whether what a sequence already has is no guess."""
        return self.fields.mask_seen

    def split_again(self, number: int) -> Split:
        """The same test, and validation drawn anew from what is left, by the same rules. Where time or the data themselves say what
        validation is, there is only one."""
        if self.own_validation or self.times is not None:
            return self.split
        pool = torch.cat([self.split.train, self.split.validation]).sort().values.numpy()
        share = len(self.split.validation) / len(pool)
        groups = None if self.groups is None else self.groups.numpy()
        train, held = split.divide(pool, self.labels.numpy(), share, 1000 * number + self.fields.split_seed, groups)
        return Split(torch.from_numpy(train), torch.from_numpy(held), self.split.test)

    @cached_property
    def _noisy(self) -> Tensor:
        return noise.noisy(self.labels, self.classes, self.label_noise)

    def noisy_labels(self, parts: Split) -> Tensor:
        """The labels, where the options say so with wrong ones for training and validation; those of the test are as they are."""
        if not self.label_noise:
            return self.labels
        labels = self.labels.clone()
        for index in (parts.train, parts.validation):
            labels[index] = self._noisy[index]
        return labels


def prepare(data: Any, config: DataFields, folder: Path) -> Prepared:
    """Read the data, unless the folder has them already, and write them there.

    Args:
        data: a word or path that :mod:`anyk.lab.data.readers` knows, or what a caller has in memory.
        config: how it is read and split.
        folder: of the comparison or run; the data go into ``data`` in there.
    """
    from anyk.lab.data import readers

    wanted = json.dumps([FORMAT, readers.stamp(data, config), config.to_json()], sort_keys=True)
    key = hashlib.blake2b(wanted.encode(), digest_size=8).hexdigest()
    place = folder / "data" / key
    if not (place / "data.json").is_file():
        source = readers.read(data, config)
        _write(source, config, place)
    prepared = open_prepared(place)
    for remark in prepared.remarks:
        warn_once(remark)
    return prepared


def open_prepared(folder: Path) -> Prepared:
    """Map a prepared set."""
    found = files.read_object(folder / "data.json", "give the data again")
    if found.get("format") != FORMAT:
        raise LabError(f"{folder} was prepared by another version of anyk: delete it, and give the data again.")

    def load(name: str, mapped: bool = False) -> Array | None:
        path = folder / f"{name}.npy"
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False) if path.exists() else None

    def tensor(name: str) -> Tensor | None:
        array = load(name)
        return None if array is None else torch.from_numpy(array)

    parts = [tensor(name) for name in ("train", "validation", "test")]
    labels = tensor("labels")
    if labels is None or None in parts:
        raise LabError(f"{folder} is damaged: delete it, and give the data again.")
    shape = tuple(found["shape"])
    if found["kind"] == "sequences":
        stream, places, begins = load("examples", True), load("places"), load("begins")
        assert stream is not None and places is not None and begins is not None
        examples: Examples = Sequences(stream, places, begins, shape[0], len(found["classes"]))
    elif found["files"]:
        mapped = [
            np.memmap(path, found["dtype"], "r", offset, (rows, *shape)) for path, offset, rows in _unchanged(found["files"])
        ]
        examples = Examples(mapped, shape)
    else:
        array = load("examples", True)
        assert array is not None
        examples = Examples([array], shape)
    numbers = {name: None if found[name] is None else torch.tensor(found[name]) for name in ("mean", "std")}
    return Prepared(
        folder=folder,
        classes=tuple(found["classes"]),
        shape=shape,
        examples=examples,
        labels=labels,
        split=Split(*parts),  # type: ignore[arg-type]
        fields=DataFields.from_json(found["fields"]),
        groups=tensor("groups"),
        times=tensor("times"),
        table=None if found["table"] is None else TableEncoder.from_json(found["table"]),
        remarks=tuple(found["remarks"]),
        unreadable=tuple(found["unreadable"]),
        **numbers,
        **{name: found[name] for name in ("name", "kind", "fingerprint", "how_split", "balance", "tokens", "own_validation")},
    )


def _unchanged(listed: Sequence[Sequence[Any]]) -> list[tuple[str, int, int]]:
    for path, _, _, size in listed:
        if not Path(path).is_file() or Path(path).stat().st_size != size:
            raise LabError(f"{path} has changed or is gone since the comparison began: choose another folder with --out.")
    return [(path, offset, rows) for path, offset, rows, _ in listed]


def _write(source: Source, config: DataFields, place: Path) -> None:
    """Everything into a folder that appears when it is whole."""
    if len(source.classes) < 2:
        raise LabError(f"{source.name} has one class only, which leaves nothing to classify: give data with at least two.")
    parts = split.split(
        source.labels,
        validation=config.validation,
        test=config.test,
        seed=config.split_seed,
        groups=source.groups,
        times=source.times,
        own_test=source.test,
        own_validation=source.validation,
    )
    train = parts.train.numpy()
    labels, classes, missing = _known_classes(source, train)
    remarks = list(source.remarks)
    if missing:
        shown = ", ".join(missing[:5]) + ("" if len(missing) <= 5 else f" and {len(missing) - 5} more")
        remarks.append(f"Classes that training does not have, and that count as misses: {shown}.")
    building = files.temporary_folder(place)
    try:
        table, numbers, shape, dtype = _write_examples(source, config, train, building, remarks)
        kept: dict[str, Array | None] = {
            "labels": labels,
            "train": train,
            "validation": parts.validation.numpy(),
            "test": parts.test.numpy(),
            "groups": source.groups,
            "times": source.times,
            "places": source.places,
            "begins": source.begins,
        }
        for name, array in kept.items():
            if array is not None:
                np.save(building / f"{name}.npy", array)
        if copies := _copies(building, source, kept):
            share = 100 * copies / len(parts.test)
            remarks.append(f"{copies:,} test rows ({share:.0f} %) occur in training, too: the test flatters all models.")
        listed = [[path, offset, rows, Path(path).stat().st_size] for path, offset, rows in source.files]
        described = {
            "format": FORMAT,
            "name": source.name,
            "kind": source.kind,
            "classes": classes,
            "shape": shape,
            "dtype": dtype,
            "fingerprint": _digest(building, listed, classes),
            "files": listed,
            "how_split": _how_split(source, config, kept),
            "balance": _balance(labels, kept),
            "fields": config.to_json(),
            "own_validation": source.validation is not None,
            "table": None if table is None else table.to_json(),
            "tokens": source.tokens,
            "remarks": remarks,
            "unreadable": list(source.unreadable),
            **numbers,
        }
        files.write_object(building / "data.json", described)
        files.put_in_place(building, place)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _known_classes(source: Source, train: Array) -> tuple[Array, list[str], list[str]]:
    """The labels as places among the classes that training has, -1 for others; these classes, and the others."""
    if source.kind == "sequences":  # whose tokens are numbered already; what is no class has the last name
        known = [name for name in source.classes if name != UNKNOWN]
        return np.where(source.labels < len(known), source.labels, -1), known, []
    there = np.bincount(source.labels[train], minlength=len(source.classes)) > 0
    if there.sum() < 2:
        raise LabError(f"the training part of {source.name} has one class only: give more examples, or another split.")
    place = np.where(there, np.cumsum(there) - 1, -1)
    known = [name for name, has in zip(source.classes, there, strict=True) if has]
    used = np.bincount(source.labels, minlength=len(source.classes)) > 0
    missing = [name for name, has, seen in zip(source.classes, there, used, strict=True) if seen and not has]
    return place[source.labels].astype(np.int64), known, missing


def _write_examples(
    source: Source, config: DataFields, train: Array, building: Path, remarks: list[str]
) -> tuple[TableEncoder | None, dict[str, Any], list[int], str]:
    """The examples, encoded by the training part; and the mean and deviation of that."""
    table = None
    if source.kind == "sequences":
        np.save(building / "examples.npy", source.examples)
        return None, {"mean": None, "std": None}, [source.length], "int32"
    if isinstance(source.examples, Labelled):
        found = source.examples
        table = TableEncoder.fit(found.table, train, label=found.label, others=found.others, categories=config.categories)
        array = table.transform(found.table, remarks.append)
        np.save(building / "examples.npy", array)
        parts: list[Array] = [array]
    elif source.files:
        parts = [np.memmap(path, source.dtype, "r", offset, (rows, source.width)) for path, offset, rows in source.files]
    else:
        parts = [np.ascontiguousarray(source.examples)]
        if parts[0].dtype.kind == "f" and not np.isfinite(parts[0]).all():
            raise LabError(f"{source.name} has NaN or infinite features: remove these rows, or fill them in.")
        np.save(building / "examples.npy", parts[0])
    shape = list(parts[0].shape[1:])
    mean, std = _statistics(Examples(parts, tuple(shape)), torch.from_numpy(train), source.kind)
    return table, {"mean": mean.tolist(), "std": std.tolist()}, shape, str(parts[0].dtype)


def _statistics(examples: Examples, index: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature, or of each channel, of the training part; 1 for the deviation of a constant."""
    width, count = examples.shape[0], 0
    mean, squares = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    rows = max(1, min(ROWS_AT_ONCE, (1 << 26) // max(1, examples.row_bytes)))
    for some in index.split(rows):
        block = examples.take(some).double()
        if kind == "images":
            block = block.div_(255).transpose(0, 1).flatten(1).t()
        own = block.mean(0)
        total = count + len(block)
        squares += (block - own).square().sum(0) + (own - mean).square() * (count * len(block) / total)
        mean += (own - mean) * (len(block) / total)
        count = total
    std = (squares / max(count, 1)).sqrt()
    constant = std <= 1e-6 * mean.abs() + 1e-12
    return mean.float(), std.masked_fill(constant, 1.0).float()


def _copies(building: Path, source: Source, kept: dict[str, Array | None]) -> int:
    """How many test rows occur in training, to the bit; of small sets of features and images."""
    path = building / "examples.npy"
    if source.kind == "sequences" or not path.exists() or path.stat().st_size > 1 << 30:
        return 0
    array = np.load(path, mmap_mode="r")

    def digests(index: Array) -> list[bytes]:
        return [
            hashlib.blake2b(np.ascontiguousarray(array[place]).tobytes(), digest_size=8).digest() for place in index.tolist()
        ]

    train, test = kept["train"], kept["test"]
    assert train is not None and test is not None
    known = set(digests(train))
    return sum(digest in known for digest in digests(test))


def _how_split(source: Source, config: DataFields, kept: dict[str, Array | None]) -> str:
    """What a reader of the results should know."""
    if source.test is not None:
        return "the test is the data's own" + (
            ", and so is validation." if source.validation is not None else "; validation is drawn."
        )
    groups = None if source.groups is None else len(np.unique(source.groups))
    if source.times is not None:
        return "the newest are the test" + (", whole groups together." if groups else ".")
    if groups is not None:
        return f"no group is in two parts ({groups:,} groups in all)."
    return "split at random, stratified by class."


def _balance(labels: Array, kept: dict[str, Array | None]) -> dict[str, float]:
    train, test = kept["train"], kept["test"]
    assert train is not None and test is not None
    counts = np.bincount(labels[train])
    return {
        "most_frequent": float((labels[test] == int(counts.argmax())).mean()),
        "smallest": int(counts.min()),
        "largest": int(counts.max()),
    }


def _digest(building: Path, listed: Any, classes: list[str]) -> str:
    """Of the files, and of the names and sizes of what stays elsewhere."""
    digest = hashlib.blake2b(json.dumps([classes, listed]).encode(), digest_size=8)
    for path in sorted(building.glob("*.npy")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
