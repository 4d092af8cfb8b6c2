"""Embedding sets: a folder of safetensors files that are mapped where they lie, and written whole or not at all.

dataset.json          {"name": "...", "classes": ["...", ...]}
train*.safetensors    ``embeddings`` (N, d) in float16 or float32 and ``labels`` (N,) in int64; several follow in sorted order;
                      ``groups`` (N,) in int64, if they are there: examples with the same number belong together
test*.safetensors     the same; may be absent
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from anyk.lab import files
from anyk.lab.data.prepare import Source
from anyk.lab.errors import LabError, first_line

Array = NDArray[Any]
_DTYPES = {"F16": "float16", "F32": "float32", "I64": "int64"}
_LONGEST_HEADER = 100 << 20
ROWS_AT_ONCE = 1 << 14


def read(folder: Path) -> Source:
    """The embedding set in a folder: its labels in memory, its rows on the disk.

    Raises:
        LabError: where something is missing, cut short or does not fit together; it names the file.
    """
    description = files.read_object(folder / "dataset.json", "an embedding set needs it, with name and classes")
    classes = description.get("classes")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise LabError(f"{folder / 'dataset.json'} should have classes, a list of names.")
    mapped, labels, groups, of_test, kinds = [], [], [], [], set()
    for part in ("train", "test"):
        for path in sorted(folder.glob(f"{part}*.safetensors")):
            offset, shape, dtype = _rows(path)
            own = _small(path)
            if own["labels"].shape != shape[:1]:
                raise LabError(f"{path} has {shape[0]} embeddings, but {own['labels'].shape} labels.")
            if own["labels"].min() < 0 or own["labels"].max() >= len(classes):
                raise LabError(f"{path} has labels outside of 0 to {len(classes) - 1}, the classes of dataset.json.")
            mapped.append((str(path.absolute()), offset, shape[0]))
            labels.append(own["labels"])
            groups.append(own.get("groups"))
            of_test.append(np.full(shape[0], part == "test"))
            kinds.add((shape[1], dtype))
            _check_numbers(path, offset, shape, dtype)
    if not mapped or of_test[0].all():
        raise LabError(f"{folder} has no train*.safetensors.")
    if len(kinds) > 1:
        raise LabError(f"the files of {folder} have embeddings of several widths or dtypes: save all alike.")
    if len({each is None for each in groups}) > 1:
        raise LabError(f'some files of {folder} have "groups" and others have none: give them to all or to none.')
    [(width, dtype)] = kinds
    places = np.flatnonzero(np.concatenate(of_test))
    return Source(
        name=str(description.get("name") or folder.resolve().name),
        kind="features",
        examples=None,
        labels=np.concatenate(labels),
        classes=tuple(classes),
        test=places if len(places) else None,
        groups=None if groups[0] is None else np.concatenate([each for each in groups if each is not None]),
        files=tuple(mapped),
        dtype=dtype,
        width=width,
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, and where they begin."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LONGEST_HEADER, path.stat().st_size - 8):
                raise ValueError("its header is longer than the file")
            header = files.parsed(file.read(length).decode("utf-8"))
        end = max((each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"), default=0)
        if path.stat().st_size < 8 + length + end:
            raise ValueError("it is cut short")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LabError(f"{path} cannot be read ({first_line(error)}): copy it or make it again.") from None
    return header, 8 + length


def _rows(path: Path) -> tuple[int, tuple[int, int], str]:
    """Where the embeddings of a file are, their shape and dtype."""
    header, start = _header(path)
    found = header.get("embeddings")
    if not isinstance(found, dict) or "labels" not in header:
        raise LabError(f"{path} should have embeddings and labels, but has {', '.join(sorted(header)) or 'nothing'}.")
    shape, dtype = found.get("shape"), _DTYPES.get(str(found.get("dtype")))
    if dtype not in ("float16", "float32") or not isinstance(shape, list) or len(shape) != 2 or min(shape) < 1:
        raise LabError(f"{path} should have embeddings (N, d) in float16 or float32, but has {found.get('dtype')} {shape}.")
    begin, end = found["data_offsets"]
    if end - begin != shape[0] * shape[1] * np.dtype(dtype).itemsize:
        raise LabError(f"{path} is damaged: its embeddings do not have the size that it says.")
    return start + begin, (shape[0], shape[1]), dtype


def _small(path: Path) -> dict[str, Array]:
    """The labels of a file, and its groups."""
    header, start = _header(path)
    found = {}
    for name in ("labels", "groups"):
        if name in header:
            if header[name].get("dtype") != "I64":
                raise LabError(f"{name} of {path} should be int64, but are {header[name].get('dtype')}.")
            begin, end = header[name]["data_offsets"]
            found[name] = np.fromfile(path, np.int64, (end - begin) // 8, offset=start + begin).reshape(header[name]["shape"])
    return found


def _check_numbers(path: Path, offset: int, shape: tuple[int, int], dtype: str) -> None:
    """Raise where a row has NaN or infinity."""
    size = shape[1] * np.dtype(dtype).itemsize
    with path.open("rb") as file:
        for start in range(0, shape[0], ROWS_AT_ONCE):
            file.seek(offset + start * size)
            rows = np.frombuffer(file.read(min(ROWS_AT_ONCE, shape[0] - start) * size), dtype).reshape(-1, shape[1])
            bad = ~np.isfinite(rows.sum(1, dtype=np.float64))
            if bad.any() and not np.isfinite(rows[bad]).all():
                raise LabError(f"{path} has NaN or infinity in row {start + int(bad.argmax())}: make it again without.")


def write(
    folder: Path,
    classes: Sequence[str],
    parts: Mapping[str, tuple[Array, Array, Array | None]],
    *,
    name: str,
    about: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Write an embedding set; the folder appears when everything in it is on the disk, and not before.

    Args:
        folder: the new set.
        classes: their names.
        parts: for train, and perhaps test: embeddings, labels and groups.
        name: of the set.
        about: more entries of dataset.json.
        force: replace a set that is there.
    """
    files.refuse_existing(folder, force)
    building = files.temporary_folder(folder)
    for part, (rows, labels, groups) in parts.items():
        tensors = {"embeddings": np.ascontiguousarray(rows), "labels": np.ascontiguousarray(labels, np.int64)}
        if groups is not None:
            tensors["groups"] = np.ascontiguousarray(groups, np.int64)
        safetensors.numpy.save_file(tensors, building / f"{part}.safetensors")
    described = {**(about or {}), "name": name, "classes": list(classes)}
    (building / "dataset.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    files.put_in_place(building, folder, replace=force)
    return folder


def blocks(folder: Path, part: str) -> Iterator[Array]:
    """The rows of a part of a set, some at a time."""
    for path in sorted(folder.glob(f"{part}*.safetensors")):
        offset, shape, dtype = _rows(path)
        mapped = np.memmap(path, dtype, "r", offset, shape)
        for start in range(0, shape[0], ROWS_AT_ONCE):
            yield np.array(mapped[start : start + ROWS_AT_ONCE])
