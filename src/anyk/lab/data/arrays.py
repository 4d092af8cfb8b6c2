"""Array files as data sets: .npz, pairs of .npy, .csv, and the .p and .pt files of pickle and torch.

Rows of numbers are features. Arrays of uint8 with three or four dimensions are images, as MedMNIST has them.

No code from a file is ever run: what pickle and torch wrote goes through an unpickler that knows containers, numpy arrays and
torch tensors, and nothing else. No size that a file claims is believed before it is held against the file.
"""

import array
import csv
import dataclasses
import hashlib
import json
import math
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.data import embeddings, limits, pickles
from anyk.lab.data.sets import Dataset, Split, check_classes, class_names, with_statistics
from anyk.lab.did_you_mean import nearest
from anyk.lab.errors import LabError

SUFFIXES = (".npz", ".npy", ".csv", ".tsv", ".p", ".pkl", ".pickle", ".pt", ".pth")
"""The files that `read` and `import_file` take."""

_EMBEDDING_WORDS = {"x", "embedding", "embeddings", "feature", "features", "data", "inputs", "image", "images"}
_LABEL_WORDS = {"y", "label", "labels", "target", "targets"}
_LABEL_TITLES = {"class", "category", "kind"}
"""what a column of labels may be called besides"""
_TITLES_SHOWN = 100
_CLASS_WORDS = {"classes", "class_names", "names"}
_GROUP_WORD = "groups"
"""the array, or the column of a .csv file, that tells which examples belong together"""
_VALIDATION_WORDS = ("val", "valid", "validation")
_TEST_WORDS = ("test", *_VALIDATION_WORDS)
_LONGEST_NAME, _LONGEST_PREFIX = 1000, 250
"""characters of a class name, and of the names of dicts around an array"""
_CHANNELS = (1, 3)
"""of images: gray or colour"""

_Note = Callable[[str], None]


class _Pair(NamedTuple):
    """Examples and their labels; where it is known, which of them belong together."""

    examples: Tensor
    labels: "np.ndarray[Any, Any]"
    groups: Tensor | None = None


def import_file(
    source: str | Path,
    *more: str | Path,
    out: str | Path,
    name: str | None = None,
    classes_file: str | Path | None = None,
    test: str | Path | None = None,
    label_column: str | None = None,
    half: bool = False,
    force: bool = False,
    note: _Note | None = None,
) -> Path:
    """Make an embedding set of an array file.

    Args:
        source: .npz, .npy, .csv, .p or .pt; `name.npy` goes with `name_labels.npy`
        more: the labels, where embeddings and labels are two .npy files
        out: the folder of the new set
        name: what to call it; None: like the file
        classes_file: the class names in the order of the labels, one on a line or a JSON list
        test: a file of the same form with the test examples
        label_column: .csv: the column with the label; None: the last one
        half: store float16
        force: replace a set that is there
        note: called with each remark about what was done to the data

    Returns:
        The folder.
    """
    embeddings.refuse_to_overwrite(Path(out), force)
    notes: list[str] = []
    dataset = _load(Path(source), [Path(path) for path in more], name, classes_file, test, label_column, notes.append)
    if dataset.kind == "images":
        raise LabError(f"{source} holds images, but import makes embedding sets: give the file itself to train or compare.")
    stored = dataset.train.parts[0].dtype
    if stored not in (torch.float16, torch.float32):
        notes.append(f"{str(stored).removeprefix('torch.')} was converted to {'float16' if half else 'float32'}")
    if dataset.train.groups is not None:
        notes.append("the groups were left out: an embedding set has none, so compare the file itself")
    if note is not None:
        for remark in notes:
            note(remark)
    about = {"source": Path(source).name, "notes": notes}
    return embeddings.write(out, dataset, dtype=torch.float16 if half else None, about=about, force=force)


def read(source: str | Path) -> Dataset:
    """An array file as a data set, in memory."""
    dataset = _load(Path(source), [], None, None, None, None, lambda _: None)
    splits = {"train": dataset.train} | ({"test": dataset.test} if dataset.test is not None else {})
    hashed = hashlib.sha256(json.dumps(dataset.classes).encode())
    for split, examples in splits.items():
        if dataset.kind == "embeddings":
            rows = (part if part.dtype in (torch.float16, torch.float32) else part.float() for part in examples.parts)
            splits[split] = examples = dataclasses.replace(examples, parts=tuple(rows))
        stored = [*examples.parts, examples.labels, *([examples.groups] if examples.groups is not None else [])]
        hashed.update("".join(embeddings.digest(tensor, dataset.name) for tensor in stored).encode())
    if dataset.validation is not None:
        hashed.update(embeddings.digest(dataset.validation, dataset.name).encode())
    fingerprint = hashed.hexdigest()[:16]
    return dataclasses.replace(dataset, train=splits["train"], test=splits.get("test"), fingerprint=fingerprint)


def _load(
    source: Path,
    more: list[Path],
    name: str | None,
    classes_file: str | Path | None,
    test: str | Path | None,
    label_column: str | None,
    note: _Note,
) -> Dataset:
    pairs, names = _read_pairs(source, more, label_column, note)
    if test is not None:
        if "test" in pairs:
            raise LabError(f"{source} has test examples of its own: leave out {test}.")
        pairs["test"] = _read_pairs(Path(test), [], label_column, note, is_test=True)[0]["train"]
    if classes_file is not None:
        names = _read_class_names(Path(classes_file))
    classes, labels = number_classes({split: pair[1] for split, pair in pairs.items()}, names, source, note)
    if _are_images(pairs["train"].examples):
        return _images(pairs, labels, classes, name or source.stem, source)
    for pair in pairs.values():
        if pair.examples.dim() in (3, 4):
            shape, dtype = tuple(pair.examples.shape), str(pair.examples.dtype).removeprefix("torch.")
            raise LabError(
                f"embeddings in {source} should have the shape (examples, dimensions), but have {shape}; "
                f"images should be uint8, pixels from 0 to 255, but these are {dtype}."
            )
    splits = {split: Split((pair.examples,), labels[split], groups=pair.groups) for split, pair in pairs.items()}
    dataset = Dataset(name or source.stem, "embeddings", classes, splits["train"], splits.get("test"), "")
    embeddings.check(dataset, {"train": [str(source)], "test": [str(test or source)]}, strict=False)
    return dataset


def _read_pairs(
    source: Path, more: list[Path], label_column: str | None, note: _Note, is_test: bool = False
) -> tuple[dict[str, _Pair], list[str] | None]:
    """Examples and labels for "train" and perhaps "test" and "validation", and the class names if the file has them."""
    if not source.is_file():
        raise LabError(f"{source} is not a file: name a file that ends in {', '.join(SUFFIXES)}.")
    if not source.stat().st_size:
        raise LabError(f"{source} is empty: copy it or make it again.")
    if more and (source.suffix != ".npy" or len(more) > 1):
        raise LabError(f"{source} was given with {more[0]}: only a pair of .npy files takes two paths.")
    if source.suffix in (".csv", ".tsv"):
        return {"train": _read_csv(source, label_column, is_test)}, None
    if label_column is not None:
        raise LabError(f"{source} has no columns with names: a label column goes with a .csv file.")
    if source.suffix == ".npy":
        labels = more[0] if more else source.with_name(f"{source.stem}_labels.npy")
        if not labels.is_file():
            raise LabError(f"{source} needs its labels: give a second .npy file, or name it {labels.name}.")
        return {"train": _pair(_read_numpy(source), _read_numpy(labels), source)}, None
    if source.suffix == ".npz":
        return _find_pairs(_read_numpy(source), source, note)
    if source.suffix in SUFFIXES:
        return _find_pairs(_read_pickle(source), source, note)
    raise LabError(f"{source} is of no known kind: name a file that ends in {', '.join(SUFFIXES)}.")


# --- which array is what ----------------------------------------------------------------------------------------------


def _find_pairs(tree: Any, source: Path, note: _Note) -> tuple[dict[str, _Pair], list[str] | None]:
    """The arrays of train and test in a dict or a sequence, by the words in their names or by their places.

    Images may have a validation split beside them, as published sets do. Of features, it is the test where there is no other.

    >>> found, _ = _find_pairs({"X_train": torch.zeros(2, 3), "y_train": [0, 1]}, Path("some.npz"), print)
    >>> found["train"][0].shape
    torch.Size([2, 3])
    """
    if isinstance(tree, (list, tuple)):
        tree = _name_places(tree)
    if not isinstance(tree, Mapping):
        raise LabError(f"{source} holds a {type(tree).__name__}: save a dict with embeddings and labels.")
    arrays = dict(_flatten(tree))
    # (split, role) -> key. What is called neither train nor test is train.
    found: dict[tuple[str, str], str] = {}
    for key in arrays:
        words = set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()))
        split = next((word for word in _TEST_WORDS if word in words), "train")
        for role, vocabulary in (("embeddings", _EMBEDDING_WORDS), ("labels", _LABEL_WORDS), ("groups", {_GROUP_WORD})):
            if words & vocabulary:
                if (split, role) in found:
                    raise LabError(f"{source} has {found[split, role]} and {key}: keep one array of {role} for {split}.")
                found[split, role] = key
    keys = ", ".join(map(_shown, arrays)) or "nothing"
    pairs = {}
    for split in ("train", *_TEST_WORDS):
        given = [role for role in ("embeddings", "labels") if (split, role) in found]
        if len(given) == 1 or (split == "train" and not given):
            lacking = "embeddings and labels" if not given else "labels" if given == ["embeddings"] else "embeddings"
            raise LabError(
                f"{source} has no {lacking} for {split} (it has {keys}): "
                "name the arrays x and y, or embeddings and labels, or X_train, y_train, X_test and y_test."
            )
        if given:
            pair = _pair(arrays[found[split, "embeddings"]], arrays[found[split, "labels"]], source, f" for {split}")
            together = arrays[found[split, "groups"]] if (split, "groups") in found else None
            pairs[split] = pair._replace(groups=_groups(together, len(pair.labels), source))
    images = _are_images(pairs["train"].examples)
    called = {"test": ("test",), "validation": _VALIDATION_WORDS} if images else {"test": _TEST_WORDS}
    result = {"train": pairs["train"]}
    for split, words_for_it in called.items():
        present = [word for word in words_for_it if word in pairs]
        if present:
            result[split] = pairs[present[0]]
        for left_out in present[1:]:
            note(f"the examples called {left_out} were left out: those called {present[0]} are the {split}")
    names = next((arrays[key] for key in arrays if key.lower() in _CLASS_WORDS), None)
    return result, None if names is None else _listed_names(names, source)


def _listed_names(values: Any, source: Path) -> list[str]:
    names = _to_numpy(values, source)
    if names.ndim != 1:
        raise LabError(f"class names in {source} should be a list, but have the shape {names.shape}.")
    for name in names.tolist():
        large = isinstance(name, int) and abs(name) > 1 << 64
        if large or not isinstance(name, (str, bytes, int, float)):
            kind = "an integer beyond 64 bits" if large else f"a {type(name).__name__}"
            raise LabError(f"class names in {source} should be texts or numbers, but one is {kind}.")
        # A pickle can name one text any number of times.
        if isinstance(name, (str, bytes)) and len(name) > _LONGEST_NAME:
            raise LabError(f"class names in {source} should have at most {_LONGEST_NAME} characters, but one has {len(name)}.")
    texts = [_text(name) for name in names.tolist()]
    _check_texts(texts, source)
    return texts


def _check_texts(texts: Iterable[str], source: str | Path) -> None:
    """Raise where one could not be written to a file."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise LabError(f"{source} has a text with half of a character in it: {text!r}.") from None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _objects(values: Sequence[Any]) -> "np.ndarray[Any, Any]":
    """A list as an array of what is in it. In an array of texts, each would take the room of the longest."""
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def _name_places(items: list[Any] | tuple[Any, ...]) -> Any:
    """(x, y), (x, y, x_test, y_test) and ((x, y), (x_test, y_test)) as a dict."""
    if len(items) == 2 and all(isinstance(item, (list, tuple)) and len(item) == 2 for item in items):
        items = [*items[0], *items[1]]
    if len(items) in (2, 4):
        return dict(zip(("x_train", "y_train", "x_test", "y_test"), items, strict=False))
    return items


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        # A long name is not repeated for all that is below it: there may be millions, and nothing there is looked for.
        if isinstance(value, Mapping) and len(name) <= _LONGEST_PREFIX:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _pair(examples: Any, labels: Any, source: Path, for_split: str = "") -> _Pair:
    if isinstance(examples, (list, tuple)) and examples and isinstance(examples[0], Tensor):
        examples = torch.stack(tuple(examples)) if examples[0].dim() == 1 else torch.cat(tuple(examples))
    if not isinstance(examples, Tensor):
        numbers = _to_numpy(examples, source)
        if numbers.dtype.kind not in "fiub" or numbers.dtype.itemsize > 8:
            raise LabError(f"embeddings in {source} should be numbers, but are {numbers.dtype}.")
        if numbers.dtype.kind == "u" and numbers.dtype.itemsize > 1 and numbers.ndim < 3:
            numbers = numbers.astype(np.float32)
        # torch has no other byte order than the machine's.
        examples = torch.from_numpy(numbers if numbers.dtype.isnative else numbers.astype(numbers.dtype.newbyteorder("=")))
    labels = _to_numpy(labels, source)
    if not labels.ndim:
        raise LabError(f"labels in {source} should have the shape (examples,), but have ().")
    if not examples.numel() or not labels.size:
        raise LabError(f"{source} has no examples{for_split}: copy it or make it again.")
    return _Pair(examples.detach(), labels)


def _groups(values: Any, count: int, source: Path) -> Tensor | None:
    """Numbers of groups from whatever names them."""
    if values is None:
        return None
    given = _to_numpy(values, source)
    if given.shape != (count,):
        raise LabError(f"groups in {source} should have the shape ({count},), as the labels do, but have {given.shape}.")
    if given.dtype.kind not in "iubUS" and not (given.dtype.kind == "O" and {type(value) for value in given} == {str}):
        raise LabError(f"groups in {source} should be integers or texts, but are {given.dtype}.")
    return torch.from_numpy(np.unique(given, return_inverse=True)[1].reshape(-1).astype(np.int64))


def _to_numpy(values: Any, source: Path) -> "np.ndarray[Any, Any]":
    try:
        if isinstance(values, Tensor):
            return values.detach().numpy()
        if isinstance(values, (list, tuple)):
            if values and isinstance(values[0], Tensor):
                if not all(value.numel() for value in values):  # one of (N, 0) would become N lists
                    raise ValueError("tensors without numbers")
                return np.asarray([value.tolist() for value in values])
            if any(isinstance(value, (str, bytes)) for value in values):
                return _objects([_text(value) for value in values])
            if _has_texts(values):
                raise ValueError("texts in lists")
        array = np.asarray(values)
        if array.dtype.kind == "U" and array.size:
            letters = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1).view(np.uint32)
            if letters.max() > sys.maxunicode:
                raise ValueError("a number that is no character in a text")
        return array
    except (ValueError, TypeError, OverflowError, RuntimeError, AttributeError) as error:
        raise LabError(f"{source} holds what is no array ({' '.join(str(error).split())[:150]}).") from None


def _has_texts(values: Sequence[Any]) -> bool:
    nested = (value for value in values if isinstance(value, (list, tuple)))
    return any(isinstance(value, (str, bytes)) for value in values) or any(map(_has_texts, nested))


def _shown(text: str) -> str:
    """A name from a file, fit for a message of one line."""
    return text[:100] if text.isprintable() else repr(text[:100])


# --- images -----------------------------------------------------------------------------------------------------------


def _are_images(examples: Tensor) -> bool:
    return examples.dtype == torch.uint8 and examples.dim() in (3, 4)


def image_shape(shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Channels, height and width of images in an array of this shape; None: it holds none.

    >>> image_shape((100, 28, 28)), image_shape((100, 28, 20, 3)), image_shape((100, 3, 28, 20)), image_shape((100, 28, 28, 4))
    ((1, 28, 28), (3, 28, 20), (3, 28, 20), None)
    """
    if len(shape) == 3:
        return 1, shape[1], shape[2]
    if len(shape) == 4 and shape[3] in _CHANNELS:
        return shape[3], shape[1], shape[2]
    return (shape[1], shape[2], shape[3]) if len(shape) == 4 and shape[1] in _CHANNELS else None


def pixels(images: Tensor, source: str | Path) -> Tensor:
    """Images as (N, channels, height, width), of an array that has them with the channels last, or first, or without."""
    shape = image_shape(images.shape)
    if images.dtype != torch.uint8:
        dtype = str(images.dtype).removeprefix("torch.")
        raise LabError(f"images in {source} should be uint8, pixels from 0 to 255, but are {dtype}.")
    if shape is None:
        raise LabError(
            f"images in {source} should have the shape (N, height, width) or (N, height, width, 1 or 3), "
            f"but have {tuple(images.shape)}."
        )
    last = images.dim() == 4 and images.shape[3] in _CHANNELS
    # Lying together: batches are taken from it, and of other arrays NumPy would copy the whole each time.
    return (images.permute(0, 3, 1, 2) if last else images.view(len(images), *shape)).contiguous()


def _images(
    pairs: Mapping[str, _Pair], labels: Mapping[str, Tensor], classes: tuple[str, ...], name: str, source: Path
) -> Dataset:
    """A set of images. Those for validation follow those to train with, as a part of their own: no copy is made for it."""
    shaped: dict[str, Tensor] = {}
    for split, pair in pairs.items():
        shaped[split] = images = pixels(pair.examples, f"{source} ({split})")
        if len(images) != len(labels[split]):
            raise LabError(f"{source} has {len(images)} images for {split}, but {len(labels[split])} labels.")
        first, here = (tuple(part.shape[1:]) for part in (shaped["train"], images))
        if here != first:
            told = f"{here} for {split}, but {first} for train, as (channels, height, width)"
            raise LabError(f"images in {source} should all have one shape, but it is {told}.")
    groups = pairs["train"].groups
    parts, numbers, validation = [shaped["train"]], [labels["train"]], None
    if "validation" in shaped:
        count, held = len(shaped["train"]), len(shaped["validation"])
        parts.append(shaped["validation"])
        numbers.append(labels["validation"])
        validation = torch.arange(count, count + held)
        if groups is not None:  # of the others each is by itself: nothing is measured by their groups
            groups = torch.cat([groups, int(groups.max()) + 1 + torch.arange(held)])
    train = Split(tuple(parts), torch.cat(numbers), groups=groups)
    test = Split((shaped["test"],), labels["test"], groups=pairs["test"].groups) if "test" in shaped else None
    dataset = Dataset(name, "images", classes, train, test, "", validation=validation)
    check_classes(dataset, {"train": str(source), "test": str(source)})
    return with_statistics(dataset)


# --- classes ----------------------------------------------------------------------------------------------------------


def number_classes(
    labels: Mapping[str, "np.ndarray[Any, Any]"], names: list[str] | None, source: str | Path, note: _Note
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Labels as 0 … n-1, and the class names.

    Labels that are 0 … n-1 stay; other values become the class names, in sorted order. With names given, integers are
    places in the list of names and texts are looked up in it.
    """
    plain = {split: _integers_or_texts(values, source) for split, values in labels.items()}
    kinds = {values.dtype.kind for values in plain.values()}
    if len(kinds) > 1:
        raise LabError(f"{source} has numbers as labels in one part and texts in the other: use one kind.")
    if "i" in kinds:
        train = plain["train"]
        if names is not None or (train.min() == 0 and train.max() < len(train) and np.bincount(train).all()):
            classes = class_names(names, int(train.max()) + 1)
            return classes, {split: torch.from_numpy(values) for split, values in plain.items()}
    values = np.unique(plain["train"]).tolist() if "i" in kinds else names if names is not None else sorted(set(plain["train"]))
    places: dict[Any, int] = {}
    for place, value in enumerate(values):
        places.setdefault(value, place)
    numbers = {}
    for split, given in plain.items():
        unknown = next((value for value in given.tolist() if value not in places), None)
        if unknown is not None:
            where = "no class name" if names is not None else "no training example"
            raise LabError(f"{source} has the label {str(unknown)!r} in {split}, which {where} has.")
        numbers[split] = torch.from_numpy(np.fromiter((places[value] for value in given.tolist()), np.int64, len(given)))
    if "i" in kinds:
        note(f"the labels are not 0 to n-1: the {len(values)} values from {values[0]} to {values[-1]} became class names")
    return tuple(str(value) for value in values), numbers


def _integers_or_texts(values: "np.ndarray[Any, Any]", source: str | Path) -> "np.ndarray[Any, Any]":
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise LabError(f"labels in {source} should have the shape (examples,), but have {values.shape}.")
    if values.dtype.kind in "US":
        distinct, places = np.unique(values, return_inverse=True)
        values = _objects([_text(value) for value in distinct.tolist()])[places.reshape(-1)]
    if values.dtype.kind == "O":
        kinds = {type(value) for value in values.tolist()}
        if kinds <= {int, bool}:
            values = np.asarray(values.tolist())
        elif kinds != {str}:
            raise LabError(f"labels in {source} should be integers or texts, but hold {sorted(k.__name__ for k in kinds)[0]}.")
    if values.dtype.kind == "O":
        if not {str} >= {type(value) for value in values.tolist()}:
            raise LabError(f"labels in {source} should be integers or texts, but are too large for 64 bits.")
        known = dict.fromkeys(values.tolist())
        _check_texts(known, source)
        empty = {text for text in known if not text.strip()}
        if empty:
            _refuse_unlabeled(
                np.fromiter((text in empty for text in values.tolist()), bool, len(values)), "an empty label", source
            )
        # "10" comes after "9" where all texts are integers.
        if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in known):
            return np.fromiter(map(int, values.tolist()), np.int64, len(values))
        return values
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.floor(values)).all()):
        raise LabError(f"labels in {source} should be integers or texts, but there are numbers with a fraction or NaN.")
    if values.dtype.kind in "fu" and values.size and values.max().item() >= 2**63:
        raise LabError(f"labels in {source} should be integers or texts, but {values.max():g} is too large for 64 bits.")
    if values.dtype.kind not in "iubf":
        raise LabError(f"labels in {source} should be integers or texts, but are {values.dtype}.")
    _refuse_unlabeled(values < 0, _NEGATIVE, source)
    return np.ascontiguousarray(values, dtype=np.int64)


_NEGATIVE = 'a negative label, which usually means "no label"'


def _refuse_unlabeled(unlabeled: "np.ndarray[Any, Any]", what: str, source: str | Path) -> None:
    rows = np.flatnonzero(unlabeled)
    if len(rows):
        raise _unlabeled(len(rows), what, f"{source}", f"row {rows[0]}")


def _unlabeled(count: int, what: str, source: str, first: str) -> LabError:
    these = "1 example" if count == 1 else f"{count} examples"
    way = "remove" if what != _NEGATIVE else "number the classes from 0, or remove"
    return LabError(f"{source} has {these} with {what} (the first: {first}): {way} {'it' if count == 1 else 'them'}.")


def _read_class_names(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        names = files.parsed(text) if text.lstrip().startswith("[") else text.splitlines()
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read as a list of class names ({error}).") from None
    names = [str(name).strip() for name in names]
    while names and not names[-1]:
        names.pop()
    if not names:
        raise LabError(f"{path} has no class names: write one on each line, in the order of the labels.")
    return names


# --- numpy and text files ---------------------------------------------------------------------------------------------


def _read_numpy(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that an old Python wrote
            if path.suffix.lower() == ".npy":
                with open(path, "rb") as file:
                    limits.check_array(file, path.stat().st_size)
                # Copy on write: nothing is read before it is needed, and torch wants memory that could be written to.
                return np.load(path, mmap_mode="c", allow_pickle=False)
            with limits.opened_zip(path) as archive:
                members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
                return {member.filename.removesuffix(".npy"): _member(archive, member) for member in members}
    except LabError:
        raise
    except Exception as error:  # damaged files make zip, zlib and numpy raise a dozen kinds
        hint = "save text as numpy strings, not objects" if "allow_pickle" in str(error) else "copy it or make it again"
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise LabError(f"{path} cannot be read by numpy ({reason}): {hint}.") from None


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    with archive.open(member) as file:
        limits.check_array(file, member.file_size)
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _read_csv(path: Path, label_column: str | None, is_test: bool) -> _Pair:
    """Numbers and one label a row. Values go straight into an array of float32: four bytes a cell, whatever the file."""
    values = array.array("f")
    codes = array.array("q")
    names: dict[str, int] = {}
    lines: list[int] = []  # of the first example of each class
    titles: list[str] | None = None
    width = column = group = -1
    together: list[str] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            start = file.readline()
            delimiter = max(",;\t", key=start.count)
            file.seek(0)
            rows = csv.reader(file, delimiter=delimiter)
            for row in rows:
                if not row:
                    continue
                if width < 0:
                    width, column = len(row), _label_place(row, label_column, path, rows)
                    if width < 2:
                        raise LabError(f"{path} has one column only: it needs numbers and a label, with , ; or tab between.")
                    if label_column is not None or _is_header(row, column):
                        titles = [title.strip() for title in row]
                        group = titles.index(_GROUP_WORD) if _GROUP_WORD in titles[:column] + titles[column + 1 :] else -1
                        continue
                if len(row) != width:
                    raise LabError(f"{path} has {len(row)} cells in line {rows.line_num}, but {width} before.")
                label = row.pop(column)
                if group >= 0:
                    together.append(row.pop(group - (group > column)).strip())
                try:
                    values.extend(map(float, row))
                except ValueError as error:
                    raise LabError(
                        f"{path} has a cell that is not a number in line {rows.line_num} ({error}): "
                        "mend it, or name the label column with anyk import --label-column if it is not the last."
                    ) from None
                codes.append(names.setdefault(label.strip(), len(names)))
                if len(lines) < len(names):
                    lines.append(rows.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise LabError(f"{path} is not text in columns ({error}): save it as UTF-8 .csv.") from None
    if not codes:
        raise LabError(f"{path} has no rows of numbers.")
    counts = np.bincount(np.frombuffer(codes, dtype=np.int64))
    if "" in names:
        raise _unlabeled(counts[names[""]], "an empty label", f"{path}", f"line {lines[names['']]}")
    _refuse_wrong_column(path, titles, column, names, is_test or counts.max() > 1)
    negative = [place for name, place in names.items() if re.fullmatch(r"-[0-9]+", name)]
    if negative and all(re.fullmatch(r"-?[0-9]+", name) for name in names):
        raise _unlabeled(int(counts[negative].sum()), _NEGATIVE, f"{path}", f"line {lines[negative[0]]}")
    table = torch.from_numpy(np.frombuffer(values, dtype=np.float32)).view(len(codes), -1)
    groups = _groups(together, len(codes), path) if group >= 0 else None
    return _Pair(table, _objects(list(names))[np.frombuffer(codes, dtype=np.int64)], groups)


def _refuse_wrong_column(path: Path, titles: list[str] | None, column: int, names: Iterable[str], repeated: bool) -> None:
    """Raise where a column of measurements was taken for the labels."""
    fraction = next((name for name in names if _has_fraction(name)), None)
    if fraction is None and repeated:
        return
    problem = f"holds numbers with a fraction, such as {fraction}" if fraction is not None else "has no value twice"
    if titles is None:
        taken, way = (
            f"the last column of {path}",
            "add a line of titles, and name the right one with anyk import --label-column",
        )
    else:
        others = _listed(_likeliest_first([*titles[:column], *titles[column + 1 :]]))
        taken = f"the column {_shown(titles[column])!r} of {path}"
        way = f"name the right one with anyk import --label-column; the others are {others}"
    raise LabError(f"{taken} was taken for the labels, but {problem}: {way}.")


def _has_fraction(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return not value.is_integer() if math.isfinite(value) else False


def _label_place(first: list[str], label_column: str | None, path: Path, following: Iterable[list[str]] = ()) -> int:
    if label_column is None:
        return len(first) - 1
    titles = [title.strip() for title in first]
    if label_column not in titles:
        ordered = _likeliest_first(titles, label_column, next(iter(following), []))
        raise LabError(f"{path} has no column {label_column!r}: its columns are, the likeliest first, {_listed(ordered)}.")
    return titles.index(label_column)


def _likeliest_first(titles: list[str], typed: str = "", cells: Sequence[str] = ()) -> list[str]:
    """Titles with the ones first that may be the labels': like what was typed, called so, or above what is no number."""
    near = nearest(typed, titles) if typed else []
    values = dict(zip(titles, cells, strict=False))

    def unlikely(title: str) -> tuple[bool, ...]:
        return title not in near, title.lower() not in _LABEL_WORDS | _LABEL_TITLES, _is_number(values.get(title, "0"))

    return sorted(titles, key=unlikely)


def _listed(titles: list[str]) -> str:
    shown = [_shown(title) for title in titles[:_TITLES_SHOWN]]
    return ", ".join(shown) + (f" and {len(titles) - len(shown)} more" if len(titles) > len(shown) else "")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_header(first: list[str], column: int) -> bool:
    """Whether the first line has titles: a cell that is no number, or 0, 1, 2, … as pandas numbers its columns."""
    cells = [cell.strip() for place, cell in enumerate(first) if place != column]
    if cells == [str(number) for number in range(len(cells))] and len(cells) > 1:
        return True
    return not all(map(_is_number, cells))


# --- pickles ----------------------------------------------------------------------------------------------------------


def _read_pickle(path: Path) -> Any:
    """What torch.save or pickle.dump wrote, if it is data and nothing else."""
    try:
        return pickles.read(path)
    except LabError:
        raise
    except pickles.NotDataError as error:
        raise LabError(
            f"{path} holds {_shown(str(error))}, which is not data: nothing was run; save plain arrays or tensors."
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way
        reason = f"{' '.join(str(error).split())[:150] or type(error).__name__}"
        raise LabError(f"{path} is damaged or not a file of torch or pickle ({reason}): copy it or make it again.") from None
