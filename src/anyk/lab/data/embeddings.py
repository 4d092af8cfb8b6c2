"""Embedding sets: a folder of safetensors files that is read memory-mapped and written whole or not at all.

    dataset.json          {"name": "...", "classes": ["...", ...]} and whatever else is worth knowing; "files", where it is
                          given, lists the files of the set: these have to be there, and no others are read
    train*.safetensors    `embeddings` (N, d) in float16 or float32 and `labels` (N,) in int64; several follow in sorted order;
                          `groups` (N,) in int64, if they are there: examples with the same number belong together
    test*.safetensors     the same; may be absent

A file is read through once, to look for NaN and to compute its digest. The digest is cached under the file's path, inode, size
and times of change: a run on fifty gigabytes starts at once, and the fingerprint still covers every byte.

Files are mapped by :mod:`anyk.lab.data.mapped` and written here, not by safetensors: its tensors are private writable mappings,
which a set larger than the memory cannot have, and its writer wants them whole in memory.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from anyk.lab import files
from anyk.lab.data.cache import remember_object
from anyk.lab.data.mapped import MappedRows
from anyk.lab.data.sets import Dataset, Split, check_classes
from anyk.lab.data.tables import Schema
from anyk.lab.errors import LabError, first_line

_BLOCK_BYTES = 1 << 24
_STALE_SECONDS = 3600
_NAMES = {torch.float16: "F16", torch.float32: "F32", torch.int64: "I64"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items() if dtype.is_floating_point}


def read(folder: str | Path) -> Dataset:
    """The embedding set in a folder, memory-mapped: its size in memory does not depend on its size on disk.

    Raises:
        LabError: where something is missing, cut short or does not fit together; it names the file.
    """
    folder = Path(folder)
    description = _read_description(folder / "dataset.json")
    found = _files(folder, description)
    splits, digests = {}, []
    for split, paths in found.items():
        opened = [read_split(path)[0] for path in paths]
        digests += [[path.name, _inspected(path, part)] for path, part in zip(paths, opened, strict=True)]
        if paths:
            splits[split] = joined(opened, f"the {split} files of {folder}")
    fingerprint = hashlib.sha256(json.dumps([description["classes"], digests]).encode()).hexdigest()[:16]
    dataset = Dataset(
        name=str(description.get("name") or folder.resolve().name),
        kind="embeddings",
        classes=tuple(description["classes"]),
        train=splits["train"],
        test=splits.get("test"),
        fingerprint=fingerprint,
        table=_read_table(description.get("table"), splits["train"], folder / "dataset.json"),
    )
    check(dataset, {split: [str(path) for path in paths] for split, paths in found.items()})
    if len({part.dtype for examples in splits.values() for part in examples.parts}) > 1:
        raise LabError(f"some files of {folder} have embeddings in float16, and others in float32: save all in one dtype.")
    return dataset


def joined(parts: Sequence[Split], source: str) -> Split:
    """Memory-mapped examples that follow one another as one split."""
    grouped = [part.groups for part in parts if part.groups is not None]
    if len(grouped) not in (0, len(parts)):
        raise LabError(f'{source} have "groups" in some and not in others: give them to all or to none.')
    maps = tuple(each for part in parts for each in part.maps)
    labels = torch.cat([part.labels for part in parts])
    return Split(tuple(part.rows for part in maps), labels, maps, torch.cat(grouped) if grouped else None)


def write(
    folder: str | Path,
    dataset: Dataset,
    *,
    dtype: torch.dtype | None = None,
    about: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write an embedding set; the folder appears when everything in it is on the disk, and not before.

    Rows are converted and written block by block, so that the parts of the dataset may be memory-mapped files larger than
    the memory.

    Args:
        folder: the new set
        dataset: what is written; its embeddings may have any real dtype
        dtype: float16 or float32; None keeps float16 and makes float32 of all others
        about: more entries of dataset.json
        texts: more text files, name to content
        force: replace a set that is there

    Raises:
        LabError: where the folder holds something already, or the dataset is not sound.
    """
    folder = Path(folder)
    refuse_to_overwrite(folder, force)
    check(dataset)
    description = {**(about or {}), "name": dataset.name, "classes": list(dataset.classes)}
    if dataset.table is not None:
        description["table"] = dataclasses.asdict(dataset.table)
    with _appears_whole(folder) as building:
        for split, examples in dataset.splits.items():
            with open(building / f"{split}.safetensors", "wb") as file:
                write_split(file, examples, dtype, source=dataset.name)
        for name, text in {**(texts or {}), "dataset.json": json.dumps(description, indent=1)}.items():
            (building / name).write_bytes(text.encode())
    return folder


def write_split(
    file: BinaryIO, examples: Split, dtype: torch.dtype | None, source: str, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file of embeddings, labels and perhaps groups, block by block.

    Args:
        file: open for writing.
        examples: what is written.
        dtype: of the embeddings; None: float16 stays, all others become float32.
        source: what to call the examples in a message.
        metadata: texts that go with the tensors.
    """
    if dtype is None:
        dtype = torch.float16 if examples.parts[0].dtype == torch.float16 else torch.float32
    name = str(dtype).removeprefix("torch.")
    # These first: eight-byte values stay aligned whatever follows them.
    numbers = {"labels": examples.labels} | ({} if examples.groups is None else {"groups": examples.groups})
    shapes = {name: [len(examples)] for name in numbers} | {"embeddings": [len(examples), *examples.shape]}
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor, shape in shapes.items():
        kind = dtype if tensor == "embeddings" else torch.int64
        begin, end = end, end + math.prod(shape) * kind.itemsize
        described[tensor] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    for values in numbers.values():
        file.write(_bytes(values.to(torch.int64)))
    for part in examples.maps or examples.parts:
        for first, block in blocks(part):
            stored = block.to(dtype)
            if not _is_finite(stored):
                if _is_finite(block):
                    fits = dtype == torch.float16 and _is_finite(block.float())
                    remedy = "store float32 instead" if fits else "scale the embeddings down"
                    raise LabError(f"{source} has values beyond {torch.finfo(dtype).max:g}, the largest of {name}: {remedy}.")
                _raise_not_finite(block, first, source)
            file.write(_bytes(stored))


def refuse_to_overwrite(folder: Path, force: bool) -> None:
    """Raise where a set cannot be put into the folder; ``force`` gives up an embedding set, and never other files."""
    if folder.is_file():
        raise LabError(f"{folder} is a file: name a new folder for the embedding set.")
    files.refuse_existing(folder, force)
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not present:
        return
    foreign = [name for name in present if not name.endswith((".safetensors", ".txt")) and name != "dataset.json"]
    if foreign or "dataset.json" not in present:
        raise LabError(f"{folder} is not only an embedding set, it holds {(foreign or present)[0]}: name another folder.")


def check(dataset: Dataset, sources: Mapping[str, list[str]] | None = None) -> None:
    """Raise where embeddings, labels and classes do not fit together.

    Args:
        dataset: embeddings and labels
        sources: for "train" and "test", what to call each part in a message; None: the dataset's name
    """
    splits = dataset.splits
    if sources is None:
        sources = {split: [f"{dataset.name} ({split})"] * len(examples.parts) for split, examples in splits.items()}
    first = dataset.train.parts[0]
    for split, examples in splits.items():
        for source, part in zip(sources[split], examples.parts, strict=True):
            if part.dim() != 2 or not part.shape[1]:
                kind = f"{tuple(part.shape)} in {str(part.dtype).removeprefix('torch.')}"
                raise LabError(
                    f"embeddings in {source} should have the shape (examples, dimensions), but have {kind}; images are uint8."
                )
            if not len(part):
                raise LabError(f"{source} has no examples: remove it or make it again.")
            if part.shape[1] != first.shape[1]:
                raise LabError(
                    f"embeddings in {source} have {part.shape[1]} dimensions, but {first.shape[1]} in {sources['train'][0]}: "
                    "all parts should come from one backbone."
                )
        source = sources[split][0]
        rows = sum(len(part) for part in examples.parts)
        if examples.labels.dim() != 1 or len(examples.labels) != rows:
            raise LabError(
                f"{source} has {rows} embeddings, but labels of shape {tuple(examples.labels.shape)}: one label for each row."
            )
    check_classes(dataset, {split: sources[split][0] for split in splits})


def digest(part: Tensor | MappedRows, source: str) -> str:
    """A digest of every value of a tensor (N, …); raises where one is NaN or infinite."""
    rows = part.rows if isinstance(part, MappedRows) else part
    hashed = hashlib.sha1(f"{rows.dtype} {list(rows.shape)}".encode(), usedforsecurity=False)
    for first, block in blocks(part):
        if block.is_floating_point() and not _is_finite(block):
            _raise_not_finite(block, first, source)
        hashed.update(_bytes(block))
    return hashed.hexdigest()


def _read_description(path: Path) -> dict[str, Any]:
    folder = path.parent
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder: name the folder of an embedding set.")
    if not path.is_file():
        raise LabError(f'{folder} has no dataset.json: write one with {{"name": "...", "classes": ["...", ...]}}.')
    description = files.read_object(path, "mend it or make the set again")
    classes = description.get("classes")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise LabError(f'{path} should have "classes", the list of class names in the order of the labels.')
    return description


def _read_table(described: Any, train: Split, path: Path) -> Schema | None:
    """The columns of the table that a set was made of."""
    if described is None:
        return None
    try:
        schema = Schema.from_json(described)
    except ValueError as error:
        raise LabError(f"{path} cannot be used ({error}): make the set again.") from None
    if train.shape != (schema.width,):
        raise LabError(
            f"{path} describes a table of {schema.width} features, but train has {tuple(train.shape)}: make the set again."
        )
    return schema


def _files(folder: Path, description: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The files of each split in sorted order: those that the description lists, or all that there are."""
    if "files" in description:
        names = description["files"]
        if not isinstance(names, list) or not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise LabError(f'"files" in {folder / "dataset.json"} should be a list of files in its folder.')
        for name in names:
            if len(name) > 255 or not (folder / name).is_file():  # is_file raises for a longer name
                raise LabError(f"{folder} has lost {name}, which dataset.json lists: copy it again.")
        paths = sorted({folder / name for name in names})
    else:
        paths = sorted(folder.glob("*.safetensors"))
    found = {split: [path for path in paths if path.match(f"{split}*.safetensors")] for split in ("train", "test")}
    if not found["train"]:
        listed = ' in the "files" of dataset.json' if "files" in description else ""
        raise LabError(
            f"{folder} has no train.safetensors{listed}: an embedding set needs at least one file train*.safetensors."
        )
    return found


def read_split(path: Path) -> tuple[Split, dict[str, str]]:
    """What :func:`write_split` wrote, or another safetensors file of embeddings: memory-mapped, labels and groups in memory.

    The second is the metadata of the file.
    """
    try:
        # safetensors checks that header and size agree, so that a short file cannot end a run by a signal later.
        with safe_open(path, framework="np") as file:
            names, metadata = set(file.keys()), file.metadata() or {}
            for name in ("embeddings", "labels"):
                if name not in names:
                    found = ", ".join(sorted(names)) or "nothing"
                    raise LabError(f'{path} has no tensor "{name}" (it has {found}): save it with "embeddings" and "labels".')
            numbers = {name: torch.from_numpy(file.get_tensor(name)) for name in sorted({"labels", "groups"} & names)}
        with open(path, "rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            about = json.loads(raw.read(length))["embeddings"]
        if about["dtype"] not in _DTYPES:
            raise LabError(f"embeddings in {path} are {about['dtype']}: save them as float16 or float32.")
        part = MappedRows(path, 8 + length + about["data_offsets"][0], about["shape"], _DTYPES[about["dtype"]])
    except LabError:
        raise
    except Exception as error:  # a damaged header makes the parsers raise anything
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise LabError(
                f"{path} is one file too many for this process: raise `ulimit -n`, or use fewer, larger files."
            ) from None
        reason = first_line(error)
        raise LabError(f"{path} is damaged or not a safetensors file ({reason}): copy it or make it again.") from None
    for name, values in numbers.items():
        if values.dtype != torch.int64:
            raise LabError(f"{name} in {path} are {str(values.dtype).removeprefix('torch.')}: save them as int64.")
        if values.dim() != 1 or part.rows.dim() != 2 or len(values) != len(part.rows):
            shapes = f"{tuple(part.rows.shape)} and {tuple(values.shape)}"
            raise LabError(f"{path} should have embeddings (N, d) and {name} (N,), but has {shapes}.")
    return Split((part.rows,), numbers["labels"], (part,), numbers.get("groups")), metadata


def _inspected(path: Path, part: Split) -> str:
    """The digest of a file, from the cache where the file has not changed since it was read through."""
    status = path.stat()
    # Copies and archives set mtime back to that of their source; ctime and the inode they cannot set.
    stamp = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]

    def compute() -> dict[str, str]:
        stored: list[Tensor | MappedRows] = [part.maps[0], part.labels, *([] if part.groups is None else [part.groups])]
        return {"digest": "".join(digest(tensor, str(path)) for tensor in stored)}

    return str(remember_object("inspected", stamp, compute)["digest"])


def blocks(part: Tensor | MappedRows) -> Iterator[tuple[int, Tensor]]:
    """Consecutive rows, and the number of the first, a few megabytes at a time; mapped rows are released after their use."""
    whole = part.rows if isinstance(part, MappedRows) else part
    rows = max(1, _BLOCK_BYTES // max(1, whole.nbytes // max(1, len(whole))))
    for first in range(0, len(whole), rows):
        block = whole[first : first + rows]
        if isinstance(part, MappedRows):
            part.fetch(first if not first else first + rows, min(first + 2 * rows, len(whole)))
        yield first, block
        if isinstance(part, MappedRows):
            part.release(first, first + len(block))


def _bytes(block: Tensor) -> Any:
    """The values as a flat buffer, without a copy where they are contiguous."""
    return block.detach().contiguous().flatten().view(torch.uint8).numpy()


def _is_finite(block: Tensor) -> bool:
    """Whether no value is NaN or infinite: then the extremes are neither. Ten times as fast as isfinite on float16."""
    if not block.is_floating_point() or not block.numel():
        return True
    return all(bool(extreme.isfinite()) for extreme in block.aminmax())


def _raise_not_finite(block: Tensor, first: int, source: str) -> None:
    row, *place = (~block.isfinite()).nonzero()[0].tolist()
    value, column = block[(row, *place)].item(), f", column {place[0]}" if place else ""
    raise LabError(f"{source} has the value {value} in row {first + row}{column} (from 0): fill it in, or remove such rows.")


@contextlib.contextmanager
def _appears_whole(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that is renamed to ``folder`` at the end; an exception removes it, a kill leaves it hidden."""
    folder = Path(os.path.abspath(folder))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in folder.parent.glob(f".{folder.name}.*.writing"):
            # A living writer keeps changing its files; what has not changed for long was left by a kill.
            if time.time() - max(path.stat().st_mtime for path in (leftover, *leftover.iterdir())) > _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
        building = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
        building.mkdir()
        files.unfinished.add(building)
    except OSError as error:
        raise LabError(f"{folder} cannot be written ({error.strerror}): name another folder.") from None
    try:
        yield building
        for path in building.iterdir():
            files.flush(path)
        retired = folder.with_name(f".{folder.name}.{os.getpid()}.replaced")
        with files.uninterrupted:
            if folder.exists():
                os.rename(folder, retired)
            os.rename(building, folder)
            files.unfinished.add(retired)
        shutil.rmtree(retired, ignore_errors=True)
        files.unfinished.discard(retired)
        files.flush(folder.parent)
    except OSError as error:
        raise LabError(f"{folder} cannot be written ({error.strerror}): make room or name another folder.") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
        files.unfinished.discard(building)
