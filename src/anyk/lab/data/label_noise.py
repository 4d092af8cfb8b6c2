"""Wrong labels on purpose, as people make them: drawn from a confusion matrix, or another class at random.

What a model is trained with and chosen by has them; what it is tested with is right. One draw serves every loss and seed.
"""

import csv
import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data.sets import Dataset, Parts
from anyk.lab.errors import LabError

SUFFIXES = (".npy", ".csv")


def marked(dataset: Dataset, noise: float | str, seed: int) -> Dataset:
    """The set with a remark on its wrong labels, and with a fingerprint of its own if they are drawn from a file.

    Raises:
        LabError: the file is missing, or is no confusion matrix of these classes.
    """
    if not noise:
        return dataset
    fingerprint = dataset.fingerprint
    if isinstance(noise, str):
        digest = hashlib.sha256(np.ascontiguousarray(read(Path(noise).expanduser(), dataset.classes)).tobytes()).hexdigest()
        fingerprint = hashlib.sha256(f"{fingerprint} {digest}".encode()).hexdigest()[: len(fingerprint) or 16]
    labels = dataset.train.labels
    wrong = float((drawn(dataset, noise, seed) != labels)[labels >= 0].double().mean())
    source = f"drawn from {Path(noise).name}" if isinstance(noise, str) else "drawn at random"
    remark = f"Training and validation have wrong labels, {source}, for {wrong:.1%} of the examples; the test has its own."
    return dataclasses.replace(dataset, fingerprint=fingerprint, remarks=(*dataset.remarks, remark))


def noisy(dataset: Dataset, parts: Parts, noise: float | str, seed: int) -> Dataset:
    """The set with wrong labels for training and validation. ``parts.test`` keeps its own, also where it is of ``train``."""
    if not noise:
        return dataset
    labels, new = dataset.train.labels.clone(), drawn(dataset, noise, seed)
    for index in (parts.train, parts.validation):
        labels[index] = new[index]
    return dataclasses.replace(dataset, train=dataclasses.replace(dataset.train, labels=labels))


def drawn(dataset: Dataset, noise: float | str, seed: int) -> Tensor:
    """A label for every example of ``dataset.train``, given its true one; what is no class stays."""
    labels, classes = dataset.train.labels, len(dataset.classes)
    # One number for each example, whatever part it is in: another split or a smaller part has the same wrong labels.
    chance = torch.rand(len(labels), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if not isinstance(noise, str):
        shift = 1 + (chance / noise * (classes - 1)).long()
        return torch.where((chance < noise) & (labels >= 0), (labels + shift) % classes, labels)
    sums = torch.from_numpy(read(Path(noise).expanduser(), dataset.classes)).cumsum(1)
    new = labels.clone()
    # The examples class by class: to look for those of each in all of them would take minutes with many classes.
    found, counts = torch.unique(labels, return_counts=True)
    by_class = torch.split(labels.argsort(stable=True), counts.tolist())
    for each, here in zip(found.tolist(), by_class, strict=True):
        if each < 0:
            continue
        # The sum of a row is 1 up to rounding, and no class beyond the last that has a share is drawn.
        last = int((sums[each] < sums[each, -1]).sum())
        new[here] = torch.searchsorted(sums[each], chance[here], right=True).clamp(max=last)
    return new


def read(path: Path, classes: tuple[str, ...]) -> np.ndarray:
    """A confusion matrix, its rows divided by their sums: (n, n) in float64.

    ``.npy``, or ``.csv`` of numbers alone, in the order of the classes; or ``.csv`` with the names of the classes in the first
    line and the first column, in any order.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise LabError(
            f"label_noise should be a number or a confusion matrix in {' or '.join(SUFFIXES)}, but is {str(path)!r}."
        )
    if not path.is_file():
        raise LabError(f"label_noise {path} does not exist: give a number, or a file with a confusion matrix.")
    try:
        if path.suffix.lower() == ".npy":
            matrix = np.load(path, allow_pickle=False).astype(np.float64)
        else:
            matrix = _from_csv(path, classes)
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise LabError(f"label_noise {path} should hold a confusion matrix: {error}.") from None
    n = len(classes)
    if matrix.shape != (n, n):
        shape = " x ".join(map(str, matrix.shape)) or "a single number"
        raise LabError(f"label_noise {path} should be {n} x {n}, a row and a column for each class, but is {shape}.")
    wrong = ~(np.isfinite(matrix) & (matrix >= 0)).all(1) | ~(matrix.sum(1) > 0)
    if wrong.any():
        row = int(wrong.argmax())
        raise LabError(
            f"label_noise {path} should have counts or shares, none below 0, in every row, but row {row} ({classes[row]}) has "
            f"{_seen(matrix[row])}."
        )
    return matrix / matrix.sum(1, keepdims=True)


def _seen(row: np.ndarray) -> str:
    strange = row[~(np.isfinite(row) & (row >= 0))]
    return f"{strange[0]:g}" if len(strange) else "none above 0"


def _from_csv(path: Path, classes: tuple[str, ...]) -> np.ndarray:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = [row for row in csv.reader(lines) if row]
    if not rows:
        raise ValueError("it is empty")
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise ValueError(f"its lines have {min(lengths)} to {max(lengths)} values")
    if not _is_number(rows[0][-1]) or len(rows) == len(classes) + 1:
        columns, names = rows[0][1:], [row[0] for row in rows[1:]]
        for what, found in (("first line", columns), ("first column", names)):
            unknown, missing = sorted(set(found) - set(classes)), sorted(set(classes) - set(found))
            # What nobody answered may have no column, as in a crosstab.
            if unknown or len(set(found)) < len(found) or (missing and what == "first column"):
                problem = f"{unknown[0]!r}" if unknown else f"no class {missing[0]!r}" if missing else "a class twice"
                raise ValueError(f"its {what} should name the {len(classes)} classes, but has {problem}")
        place = {name: number for number, name in enumerate(classes)}
        matrix = np.zeros((len(classes), len(classes)))
        for name, row in zip(names, rows[1:], strict=True):
            matrix[place[name], [place[column] for column in columns]] = [float(value) for value in row[1:]]
        return matrix
    return np.array([[float(value) for value in row] for row in rows])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
