"""Wrong labels on purpose, as people make them: drawn from a confusion matrix, or another class at random."""

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyk.lab.errors import LabError


def noisy(labels: Tensor, classes: tuple[str, ...], noise: float | str, seed: int = 0) -> Tensor:
    """A label for every example, given its true one; what is no class (below 0) stays.

    Args:
        labels: (N,).
        classes: their names.
        noise: the share that is replaced by another class, or a file with a confusion matrix.
        seed: which draw; there is one number for each example, so that every split has the same wrong labels.
    """
    chance = torch.rand(len(labels), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if not isinstance(noise, str):
        shift = 1 + (chance / noise * (len(classes) - 1)).long()
        return torch.where((chance < noise) & (labels >= 0), (labels + shift) % len(classes), labels)
    sums = torch.from_numpy(read(Path(noise).expanduser(), classes)).cumsum(1)
    new = labels.clone()
    for each in range(len(classes)):
        here = (labels == each).nonzero().flatten()
        # The sum of a row is 1 up to rounding, and no class beyond the last that has a share is drawn.
        last = int((sums[each] < sums[each, -1]).sum())
        new[here] = torch.searchsorted(sums[each], chance[here], right=True).clamp(max=last)
    return new


def read(path: Path, classes: tuple[str, ...]) -> np.ndarray:
    """A confusion matrix (n, n) whose rows sum to 1: row c is what people said for class c.

    A .npy file, or a .csv of numbers whose first line and first column may be the names of the classes.
    """
    if not path.exists():
        raise LabError(f"--label-noise {path} does not exist: give a share, or a .npy or .csv file with a confusion matrix.")
    try:
        if path.suffix.lower() == ".npy":
            matrix = np.load(path, allow_pickle=False)
        else:
            rows = [row for row in csv.reader(path.read_text(encoding="utf-8").splitlines()) if row]
            if not _is_number(rows[0][-1]):
                rows = rows[1:]
            matrix = np.array([[float(cell) for cell in (row if _is_number(row[0]) else row[1:])] for row in rows])
        matrix = np.asarray(matrix, dtype=np.float64)
    except (OSError, ValueError, IndexError) as error:
        raise LabError(f"--label-noise {path} cannot be read as a confusion matrix ({error}).") from None
    n = len(classes)
    if matrix.shape != (n, n):
        raise LabError(f"--label-noise {path} should have the shape ({n}, {n}), a row for each class, but has {matrix.shape}.")
    if not np.isfinite(matrix).all() or (matrix < 0).any() or (matrix.sum(1) <= 0).any():
        raise LabError(f"--label-noise {path} should have counts or shares of at least 0, and some in each row.")
    return matrix / matrix.sum(1, keepdims=True)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
