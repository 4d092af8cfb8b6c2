"""Data that were in memory, written to files: runs are processes of their own and may go on tomorrow, so they read files."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data.sets import Dataset, Split, with_statistics
from anyk.lab.errors import LabError

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

IMAGES = "images.safetensors"
"""The file of kept images. Features are kept as an embedding set."""

_KEYS = ("X", "y", "X_test", "y_test", "train", "test", "classes", "groups", "groups_test", "name")
#: an image has no more channels than this, which tells them from height and width
_CHANNELS = 4


def keep(data: Any, folder: str | Path) -> str:
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

            Images are uint8, (N, channels, height, width) or (N, height, width, channels), or numbers from 0 to 1 that are
            whole 255ths; features are (N, d) numbers.
        folder: where to put the files; made where it is not there.
    """
    if isinstance(data, (str, Path)):
        return str(data)
    from anyk.lab.data import cache, embeddings

    dataset = _dataset(_named(data))
    dataset = dataclasses.replace(dataset, fingerprint=cache.fingerprint(dataset))
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in dataset.name)
    place = Path(folder) / f"{name}-{dataset.fingerprint[:12]}"
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
    except Exception as error:  # whatever a damaged file makes the parsers raise
        raise LabError(f"{file} is damaged ({error}): delete it, and give the data once more.") from None


# --- what was given ---------------------------------------------------------------------------------------------------


def _named(data: Any) -> dict[str, Any]:
    """The data by the names of ``_KEYS``; pairs of examples and labels as ``train`` and ``test``."""
    if isinstance(data, Mapping):
        strange = next((key for key in data if key not in _KEYS), None)
        if strange is not None:
            raise LabError(f"data has the key {strange!r}; the keys are {', '.join(_KEYS)}.")
        named = {key: value for key, value in data.items() if value is not None}
        for pair, own in (("train", ("X", "y")), ("test", ("X_test", "y_test"))):
            if pair not in named and any(key in named for key in own):
                lacking = next((key for key in own if key not in named), None)
                if lacking is not None:
                    raise LabError(f"data has no {lacking}: give both {own[0]} and {own[1]}.")
                named[pair] = (named.pop(own[0]), named.pop(own[1]))
        surplus = next((key for key in ("X", "y", "X_test", "y_test") if key in named), None)
        if surplus is not None or "train" not in named:
            raise LabError(f"data should have X and y, or train; it has {', '.join(data) or 'nothing'}.")
        return named
    if _is_dataset(data):
        return {"train": data}
    if isinstance(data, (list, tuple)):
        if len(data) == 4:
            return {"train": tuple(data[:2]), "test": tuple(data[2:])}
        if len(data) == 2:
            both = all(_is_dataset(item) or _is_pair(item) for item in data)
            return {"train": data[0], "test": data[1]} if both else {"train": tuple(data)}
    told = f"{type(data).__name__} of {len(data)}" if isinstance(data, (list, tuple)) else type(data).__name__
    raise LabError(f"data should be a path, (X, y), (X, y, X_test, y_test), a mapping or a torch Dataset, but is a {told}.")


def _is_dataset(value: Any) -> bool:
    if isinstance(value, torch.utils.data.Dataset):
        return True
    plain = isinstance(value, (list, tuple, Mapping, str, bytes, Tensor)) or hasattr(value, "__array__")
    return not plain and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(hasattr(item, "shape") for item in value)


def _dataset(named: Mapping[str, Any]) -> Dataset:
    from anyk.lab.data import arrays

    examples: dict[str, Tensor] = {}
    labels: dict[str, Array] = {}
    for split in ("train", "test"):
        if split in named:
            given, source = named[split], _source(named[split], split)
            rows, own = _read(given, source) if _is_dataset(given) else (given[0], _array(given[1], "y"))
            examples[split], labels[split] = _examples(rows, "X" if source == "data" else source), own
            if own.ndim and len(examples[split]) != len(own):
                raise LabError(f"{source} has {len(examples[split])} examples for {split}, but {len(own)} labels.")
    kind = "images" if examples["train"].dim() == 4 else "embeddings"
    if "test" in examples and examples["test"].shape[1:] != examples["train"].shape[1:]:
        shapes = [tuple(examples[split].shape[1:]) for split in ("train", "test")]
        raise LabError(f"the test examples of data have the shape {shapes[1]}, but those to train with {shapes[0]}.")
    listed = named.get("classes", getattr(named["train"], "classes", None))
    names = [str(name) for name in listed] if isinstance(listed, (list, tuple, np.ndarray)) else None
    classes, numbers = arrays.number_classes(labels, names, "data", lambda _: None)
    _check_classes(numbers, classes)
    groups = _groups(named, {split: len(rows) for split, rows in examples.items()})
    splits = {split: Split((examples[split],), numbers[split], groups=groups.get(split)) for split in examples}
    name = str(named.get("name") or (type(named["train"]).__name__ if _is_dataset(named["train"]) else "arrays"))
    dataset = Dataset(name, kind, classes, splits["train"], splits.get("test"), "")  # type: ignore[arg-type]
    return with_statistics(dataset) if kind == "images" else dataset


def _source(given: Any, split: str) -> str:
    """What to call the examples in a message."""
    if _is_dataset(given):
        return f"the {split} Dataset"
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        raise LabError(f"{split} of data should be (X, y) or a torch Dataset, but is a {type(given).__name__}.")
    return "data"


def _check_classes(labels: Mapping[str, Tensor], classes: Sequence[str]) -> None:
    for split, values in labels.items():
        highest = int(values.max())
        if highest >= len(classes):
            raise LabError(f"data has the label {highest} in {split}, but there are {len(classes)} classes.")
    missing = (torch.bincount(labels["train"], minlength=len(classes)) == 0).nonzero().flatten().tolist()
    if missing:
        name = classes[missing[0]]
        raise LabError(f"data has no training example of class {missing[0]} ({name}): add some, or leave the class out.")


def _groups(named: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Numbers for the values of ``groups`` and ``groups_test``, the same for the same value in both."""
    given = {}
    for split, key in (("train", "groups"), ("test", "groups_test")):
        if key in named:
            values = _array(named[key], key)
            count = counts.get(split, 0)
            if values.shape != (count,):
                raise LabError(f"{key} should have the shape ({count},), one value for each example, but has {values.shape}.")
            given[split] = values
    if not given:
        return {}
    _, numbers = np.unique(np.concatenate(list(given.values())), return_inverse=True)
    cut = np.split(numbers.astype(np.int64).reshape(-1), np.cumsum([len(values) for values in given.values()])[:-1])
    return {split: torch.from_numpy(own.copy()) for split, own in zip(given, cut, strict=True)}


# --- arrays and Datasets ----------------------------------------------------------------------------------------------


def _array(values: Any, source: str) -> "Array":
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, TypeError) as error:
        raise LabError(f"{source} should be an array, but is not ({error}).") from None


def _tensor(values: Any, source: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    numbers = _array(values, source)
    if numbers.dtype.kind not in "fiub":
        raise LabError(f"{source} should be numbers, but is {numbers.dtype}.")
    if numbers.dtype != np.uint8 and numbers.dtype.kind != "f":
        numbers = numbers.astype(np.float32)
    return torch.from_numpy(np.array(numbers.astype(numbers.dtype.newbyteorder("="), copy=False)))


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
    images = _pixels(rows, source)
    if images.dim() == 3:
        return images[:, None]
    if images.shape[1] <= _CHANNELS:
        return images
    if images.shape[3] <= _CHANNELS:
        return images.permute(0, 3, 1, 2).contiguous()
    raise LabError(f"{source} should have at most {_CHANNELS} channels, first or last, but has the shape {tuple(rows.shape)}.")


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


def _read(dataset: Any, source: str) -> tuple[Tensor, "Array"]:
    """All examples of a map-style Dataset, and their labels."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise LabError(f"{source} should be map-style, with a length and an item for each number, but is iterable.")
    if not len(dataset):
        raise LabError(f"{source} has no examples.")
    rows = torch.empty(0)
    labels = []
    for place in range(len(dataset)):
        item = dataset[place]
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise LabError(f"{source} should give (example, label), but gives a {type(item).__name__} for {place}.")
        example = _example(item[0], source)
        if not place:
            rows = torch.empty(len(dataset), *example.shape, dtype=example.dtype)
        elif example.shape != rows.shape[1:]:
            shapes = f"{tuple(example.shape)} for {place}, and {tuple(rows.shape[1:])} before"
            raise LabError(f"{source} should give examples of one shape, but gives {shapes}.")
        rows[place] = example
        labels.append(item[1].item() if hasattr(item[1], "item") else item[1])
    return rows, _array(labels, "the labels")


def _example(value: Any, source: str) -> Tensor:
    if hasattr(value, "getbands"):  # an image of Pillow
        value = value if value.mode in ("L", "RGB") else value.convert("RGB")
    example = _tensor(value, source)
    if example.dim() in (2, 3):
        return _pixels(example, source)  # at once: a quarter of the memory
    return example if example.dtype in (torch.float16, torch.float32) else example.float()
