"""Data that a caller has in memory, written to files: runs are processes of their own and may be resumed later."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.data import table_files, tables
from anyk.lab.data.sets import Dataset
from anyk.lab.errors import LabError
from anyk.lab.warn_once import warn_once

IMAGES = "images.safetensors"
"""The file of kept images. Features are kept as an embedding set."""

_KEYS = ("X", "y", "X_test", "y_test", "train", "test", "classes", "groups", "groups_test", "name")
#: images have no more channels than this, which tells the channels from height and width
_MOST_CHANNELS = 4


def keep(data: Any, folder: str | Path, options: tables.Options | None = None) -> str:
    """The word for ``Setting.data`` that names these data: files in ``folder`` that hold what was in memory.

    The files are named by their content. The same data again are not written again; other data get files of their own.

    Args:
        data: one of

            - a word or a path that ``Setting.data`` takes: returned as it is
            - ``(X, y)`` or ``(X, y, X_test, y_test)``, NumPy arrays or tensors
            - a mapping of these names, and perhaps ``classes`` (names in the order of the labels), ``groups`` and
              ``groups_test`` (what belongs together has one value), ``name``
            - a map-style torch Dataset of (example, label), read once; or two of them, train and test; or a mapping with
              ``train`` and perhaps ``test``, ``classes``, ``groups``, ``groups_test``, ``name``
            - a DataFrame of pandas, or another table that shows its columns as Arrow does, with the labels in a column of its
              own; or two of them, train and test; or a mapping with ``train`` and perhaps ``test``, ``classes``, ``name``

            Images are uint8, (N, channels, height, width) or (N, height, width, channels), or numbers from 0 to 1 that are
            whole 255ths; features are (N, d) numbers.
        folder: where to put the files; made where it is not there.
        options: of a table, what its columns are; by default the last has the labels.
    """
    if isinstance(data, (str, Path)):
        return str(data)
    from anyk.lab.data import cache, embeddings

    options = options or tables.Options()
    named = _named(data)
    if _is_frame(named["train"]):
        dataset = _of_frames(named, options)
    elif options == tables.Options():
        dataset = _dataset(named)
    else:
        raise LabError("label_column and the like are for a table, but data has no columns with names: leave them out.")
    dataset = dataclasses.replace(dataset, fingerprint=cache.fingerprint(dataset))
    place = Path(folder) / f"{files.slug(dataset.name)}-{dataset.fingerprint[:12]}"
    if dataset.kind == "embeddings":
        if not (place / "dataset.json").is_file():
            embeddings.write(place, dataset, force=True)
    elif not (place / IMAGES).is_file():
        try:
            cache.write(place / IMAGES, dataset)
        except OSError as error:
            raise LabError(f"{place} cannot be written ({error.strerror}): name another folder.") from None
    return str(place)


def read_images(file: Path) -> Dataset:
    """The images that :func:`keep` wrote."""
    from anyk.lab.data import cache

    try:
        return cache.read(file)
    except Exception as error:  # a damaged file makes the parsers raise anything
        raise LabError(f"{file} is damaged ({error}): delete it, and give the data once more.") from None


def _named(data: Any) -> dict[str, Any]:
    """The data by the names of ``_KEYS``; pairs of examples and labels as ``train`` and ``test``."""
    if isinstance(data, Mapping):
        unknown = next((key for key in data if key not in _KEYS), None)
        if unknown is not None:
            raise LabError(f"data has the key {unknown!r}; the keys are {', '.join(_KEYS)}.")
        named = {key: value for key, value in data.items() if value is not None}
        for pair, own in (("train", ("X", "y")), ("test", ("X_test", "y_test"))):
            if pair not in named and any(key in named for key in own):
                lacking = next((key for key in own if key not in named), None)
                if lacking is not None:
                    raise LabError(f"data has no {lacking}: give both {own[0]} and {own[1]}.")
                named[pair] = (named.pop(own[0]), named.pop(own[1]))
        if "train" not in named or any(key in named for key in ("X", "y", "X_test", "y_test")):
            raise LabError(f"data should have X and y, or train; it has {', '.join(data) or 'nothing'}.")
        return named
    if _is_dataset(data) or _is_frame(data):
        return {"train": data}
    if isinstance(data, (list, tuple)) and len(data) == 4:
        return {"train": tuple(data[:2]), "test": tuple(data[2:])}
    if isinstance(data, (list, tuple)) and len(data) == 2:
        both = all(_is_dataset(item) or _is_pair(item) or _is_frame(item) for item in data)
        return {"train": data[0], "test": data[1]} if both else {"train": tuple(data)}
    kind = f"{type(data).__name__} of {len(data)}" if isinstance(data, (list, tuple)) else type(data).__name__
    raise LabError(
        f"data should be a path, (X, y), (X, y, X_test, y_test), a mapping, a DataFrame or a torch Dataset, but is a {kind}."
    )


def _is_frame(value: Any) -> bool:
    """Whether it is a table: a DataFrame of pandas, or what shows several columns as Arrow does."""
    return hasattr(value, "columns") and (hasattr(value, "__arrow_c_stream__") or hasattr(value, "iloc"))


def _of_frames(named: Mapping[str, Any], options: tables.Options) -> Dataset:
    from anyk.lab.data import arrays

    for key in ("groups", "groups_test"):
        if key in named:
            raise LabError(f"data has {key} beside a table: give its rows a column {tables.GROUPS!r} instead.")
    found = arrays.found_in_table(tables.read(table_files.Frame.of(named["train"], "data"), options), "data")
    pairs, remarks = found.pairs, list(found.remarks)
    if "test" in named:
        if not _is_frame(named["test"]):
            raise LabError(f"test of data should be a table as train is, but is a {type(named['test']).__name__}.")
        frame = table_files.Frame.of(named["test"], "test of data")
        tested = arrays.found_in_table(tables.read(frame, options, found.schema), "test of data")
        pairs["test"], remarks = tested.pairs["train"], [*remarks, *tested.remarks]
    for remark in remarks:
        warn_once(remark)
    names = [str(name) for name in named["classes"]] if "classes" in named else None
    name = str(named.get("name") or "table")
    dataset = arrays.dataset_of(pairs, names, name, {"train": "data", "test": "test of data"}, lambda _: None)
    return dataclasses.replace(dataset, table=found.schema)


def _is_dataset(value: Any) -> bool:
    if isinstance(value, torch.utils.data.Dataset):
        return True
    plain = isinstance(value, (list, tuple, Mapping, str, bytes, Tensor)) or hasattr(value, "__array__")
    return not plain and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(hasattr(item, "shape") for item in value)


def _dataset(named: Mapping[str, Any]) -> Dataset:
    from anyk.lab.data import arrays, labels

    pairs: dict[str, arrays.Pair] = {}
    for split in (split for split in ("train", "test") if split in named):
        given = named[split]
        if _is_dataset(given):
            rows, own = _read(given, f"the {split} Dataset")
        elif isinstance(given, (list, tuple)) and len(given) == 2:
            rows, own = given
        else:
            raise LabError(f"{split} of data should be (X, y) or a torch Dataset, but is a {type(given).__name__}.")
        pairs[split] = arrays.Pair(_examples(rows, "X"), labels.to_numpy(own, "y"))
    keys = [(split, key) for split, key in (("train", "groups"), ("test", "groups_test")) if key in named]
    if keys:
        values = [labels.to_numpy(named[key], key) for _, key in keys]
        for (split, key), given in zip(keys, values, strict=True):
            count = len(pairs[split].labels) if split in pairs else 0
            if given.shape != (count,):
                raise LabError(f"{key} should have the shape ({count},), one value for each example, but has {given.shape}.")
        # Numbered together: the same value in both has the same number.
        numbers = labels.group_numbers(np.concatenate(values), sum(map(len, values)), "data")
        for (split, _), part in zip(keys, torch.split(numbers, list(map(len, values))), strict=True):
            pairs[split] = pairs[split]._replace(groups=part.clone())
    listed = named.get("classes", getattr(named["train"], "classes", None))
    names = [str(name) for name in listed] if isinstance(listed, (list, tuple, np.ndarray)) else None
    name = str(named.get("name") or (type(named["train"]).__name__ if _is_dataset(named["train"]) else "arrays"))
    return arrays.dataset_of(pairs, names, name, {"train": "data", "test": "data"}, lambda _: None)


def _examples(values: Any, source: str) -> Tensor:
    """Features (N, d) in float16 or float32, or images (N, channels, height, width) in uint8."""
    rows = _tensor(values, source)
    if rows.dim() not in (2, 3, 4) or not rows.numel():
        raise LabError(
            f"{source} should be features (N, d) or images (N, channels, height, width) or (N, height, width, channels), "
            f"but has the shape {tuple(rows.shape)}."
        )
    if rows.dim() == 2:
        return rows if rows.dtype in (torch.float16, torch.float32) else rows.float()
    images = _pixels(rows if rows.dim() == 4 else rows[:, None], source)
    if images.shape[1] <= _MOST_CHANNELS:
        return images
    if images.shape[3] <= _MOST_CHANNELS:
        return images.permute(0, 3, 1, 2).contiguous()
    shape = tuple(rows.shape)
    raise LabError(f"{source} should have at most {_MOST_CHANNELS} channels, first or last, but has the shape {shape}.")


def _tensor(values: Any, source: str) -> Tensor:
    from anyk.lab.data import arrays, labels

    if isinstance(values, Tensor):
        return values.detach().cpu()
    return arrays.to_tensor(np.array(labels.to_numpy(values, source)), source)


def _pixels(images: Tensor, source: str) -> Tensor:
    """Images as uint8, where that loses nothing."""
    if images.dtype == torch.uint8:
        return images
    scaled = images.float() * 255
    whole = scaled.round()
    if not bool((scaled - whole).abs().max() < 1e-2) or not bool((whole >= 0).all() & (whole <= 255).all()):
        kind, low, high = str(images.dtype).removeprefix("torch."), float(images.min()), float(images.max())
        raise LabError(
            f"{source} should hold images as uint8, but they are {kind} from {low:g} to {high:g}: "
            "leave it to the lab to normalise and to augment them."
        )
    return whole.to(torch.uint8)


def _read(dataset: Any, source: str) -> tuple[Tensor, list[Any]]:
    """All examples of a map-style Dataset, and their labels."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise LabError(f"{source} should be map-style, with a length and an item for each number, but is iterable.")
    if not len(dataset):
        raise LabError(f"{source} has no examples.")
    rows, labels = torch.empty(0), []
    for place in range(len(dataset)):
        item = dataset[place]
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise LabError(f"{source} should give (example, label), but gives a {type(item).__name__} for {place}.")
        example, label = item
        if hasattr(example, "getbands") and example.mode not in ("L", "RGB"):  # an image of Pillow
            example = example.convert("RGB")
        example = _tensor(example, source)
        if example.dim() in (2, 3):
            example = _pixels(example, source)  # at once: a quarter of the memory
        elif example.dtype not in (torch.float16, torch.float32):
            example = example.float()
        if not place:
            rows = torch.empty(len(dataset), *example.shape, dtype=example.dtype)
        elif example.shape != rows.shape[1:]:
            shapes = f"{tuple(example.shape)} for {place}, and {tuple(rows.shape[1:])} before"
            raise LabError(f"{source} should give examples of one shape, but gives {shapes}.")
        rows[place] = example
        labels.append(label.item() if hasattr(label, "item") else label)
    return rows, labels
