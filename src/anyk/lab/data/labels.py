"""Labels and groups as people have them, integers or texts, turned into class numbers and group numbers."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.errors import LabError, first_line

Array = np.ndarray[Any, Any]
Note = Callable[[str], None]

_LONGEST_NAME = 1000  # characters of a class name
_NEGATIVE = 'a negative label, which usually means "no label"'


def number_classes(
    labels: Mapping[str, Array], names: list[str] | None, source: str | Path, note: Note
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The class names, and the labels of each split as 0 … n-1.

    Labels that are 0 … n-1 stay; other values become the class names, in sorted order. With names given, integers are
    places in the list of names and texts are looked up in it.
    """
    plain = {split: _integers_or_texts(values, source) for split, values in labels.items()}
    kinds = {values.dtype.kind for values in plain.values()}
    if len(kinds) > 1:
        raise LabError(f"{source} has numbers as labels in one part and texts in the other: use one kind.")
    train = plain["train"]
    if kinds == {"i"} and (names is not None or (train.min() == 0 and train.max() < len(train) and np.bincount(train).all())):
        classes = map(str, range(int(train.max()) + 1)) if names is None else names
        return tuple(classes), {split: torch.from_numpy(values) for split, values in plain.items()}
    values = np.unique(train).tolist() if kinds == {"i"} else names if names is not None else sorted(set(train))
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
    if kinds == {"i"}:
        note(f"the labels are not 0 to n-1: the {len(values)} values from {values[0]} to {values[-1]} became class names")
    return tuple(str(value) for value in values), numbers


def _integers_or_texts(values: Array, source: str | Path) -> Array:
    """Labels (N,) in int64, or texts in an array of objects."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise LabError(f"labels in {source} should have the shape (examples,), but have {values.shape}.")
    if values.dtype.kind in "US":
        distinct, places = np.unique(values, return_inverse=True)
        values = objects([_text(value) for value in distinct.tolist()])[places.reshape(-1)]
    problem = ""
    if values.dtype.kind == "O":
        kinds = {type(value) for value in values.tolist()}
        if kinds == {str}:
            return _texts(values, source)
        values = np.asarray(values.tolist()) if kinds <= {int, bool} else values
    if values.dtype.kind not in "iubf":
        problem = f"are {values.dtype}"
    elif values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.floor(values)).all()):
        problem = "there are numbers with a fraction or NaN"
    elif values.dtype.kind in "fu" and values.size and values.max().item() >= 2**63:
        problem = f"{values.max():g} is too large for 64 bits"
    if problem:
        raise LabError(f"labels in {source} should be integers or texts, but {problem}.")
    negative = np.flatnonzero(values < 0)
    if len(negative):
        raise missing_labels(len(negative), source, f"row {negative[0]}", negative=True)
    return np.ascontiguousarray(values, dtype=np.int64)


def _texts(values: Array, source: str | Path) -> Array:
    known = dict.fromkeys(values.tolist())
    _check_encodable(known, source)
    blank = {text for text in known if not text.strip()}
    if blank:
        rows = [row for row, text in enumerate(values.tolist()) if text in blank]
        raise missing_labels(len(rows), source, f"row {rows[0]}")
    # Where all texts are integers, "10" comes after "9".
    if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in known):
        return np.fromiter(map(int, values.tolist()), np.int64, len(values))
    return values


def missing_labels(count: int, source: str | Path, first: str, negative: bool = False) -> LabError:
    """The error for examples whose label is empty, or negative; ``first`` says where the first is."""
    these, them = ("1 example", "it") if count == 1 else (f"{count} examples", "them")
    what, remedy = (_NEGATIVE, "number the classes from 0, or remove") if negative else ("an empty label", "remove")
    return LabError(f"{source} has {these} with {what} (the first: {first}): {remedy} {them}.")


def group_numbers(values: Any, count: int, source: str | Path) -> Tensor:
    """Groups (N,), integers or texts, as numbers: equal values have one number."""
    given = to_numpy(values, source)
    if given.shape != (count,):
        raise LabError(f"groups in {source} should have the shape ({count},), as the labels do, but have {given.shape}.")
    if given.dtype.kind not in "iubUS" and not (given.dtype.kind == "O" and {type(value) for value in given} == {str}):
        raise LabError(f"groups in {source} should be integers or texts, but are {given.dtype}.")
    return torch.from_numpy(np.unique(given, return_inverse=True)[1].reshape(-1).astype(np.int64))


# --- class names ------------------------------------------------------------------------------------------------------


def check_names(values: Any, source: Path) -> list[str]:
    """The class names that an array file holds; one error for all that is wrong with them."""
    names = to_numpy(values, source)
    if names.ndim != 1:
        raise LabError(f"class names in {source} should be a list, but have the shape {names.shape}.")
    for name in names.tolist():
        large = isinstance(name, int) and abs(name) > 1 << 64
        if large or not isinstance(name, (str, bytes, int, float)):
            kind = "an integer beyond 64 bits" if large else f"a {type(name).__name__}"
            raise LabError(f"class names in {source} should be texts or numbers, but one is {kind}.")
        # A pickle can refer to one text any number of times.
        if isinstance(name, (str, bytes)) and len(name) > _LONGEST_NAME:
            raise LabError(f"class names in {source} should have at most {_LONGEST_NAME} characters, but one has {len(name)}.")
    texts = [_text(name) for name in names.tolist()]
    _check_encodable(texts, source)
    return texts


def read_names(path: Path) -> list[str]:
    """The class names in a file of their own: one on each line, or a JSON list."""
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


def _check_encodable(texts: Iterable[str], source: str | Path) -> None:
    """Raise where a text could not be written to a file."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise LabError(f"{source} has a text with half of a character in it: {text!r}.") from None


# --- arrays -----------------------------------------------------------------------------------------------------------


def to_numpy(values: Any, source: str | Path) -> Array:
    """A tensor, an array or lists as an array; texts as objects."""
    try:
        if isinstance(values, Tensor):
            return values.detach().cpu().numpy()
        if isinstance(values, (list, tuple)):
            if values and isinstance(values[0], Tensor):
                if not all(value.numel() for value in values):  # one of (N, 0) would become N lists
                    raise ValueError("tensors without numbers")
                return np.asarray([value.tolist() for value in values])
            if any(isinstance(value, (str, bytes)) for value in values):
                return objects([_text(value) for value in values])
            if _has_texts(values):
                raise ValueError("texts in lists")
        array = np.asarray(values)
        if array.dtype.kind == "U" and array.size:
            letters = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1).view(np.uint32)
            if letters.max() > sys.maxunicode:
                raise ValueError("a number that is no character in a text")
        return array
    except (ValueError, TypeError, OverflowError, RuntimeError, AttributeError) as error:
        raise LabError(f"{source} holds what is no array ({first_line(error)}).") from None


def objects(values: Sequence[Any]) -> Array:
    """A list as an array of objects: in an array of texts, each would take the room of the longest."""
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def _has_texts(values: Sequence[Any]) -> bool:
    nested = (value for value in values if isinstance(value, (list, tuple)))
    return any(isinstance(value, (str, bytes)) for value in values) or any(map(_has_texts, nested))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
