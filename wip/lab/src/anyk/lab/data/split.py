"""Training, validation and test: stratified by class, by groups that stay together, or by time."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyk.lab.errors import LabError

Array = NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Positions of the examples of each part, ascending."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split(
    labels: Array,
    *,
    validation: float,
    test: float,
    seed: int,
    groups: Array | None = None,
    times: Array | None = None,
    own_test: Array | None = None,
    own_validation: Array | None = None,
) -> Split:
    """Split examples into three parts; the same seed gives the same split.

    Without groups and times, each class is divided by the shares, and keeps at least one training example. With groups, all
    examples of a group are in one part, and the parts come near the shares of each class. With times, the newest examples are the
    test and the next newest are for validation, whole groups together where there are such.

    Args:
        labels: (N,) integers.
        validation: the share of the examples that is kept for validation, of what is not for the test.
        test: the share that is kept for the test.
        seed: of what is drawn.
        groups: (N,) integers: equal ones belong together.
        times: (N,) numbers, larger ones are newer.
        own_test: positions that the data themselves keep for the test.
        own_validation: positions that they keep for validation.

    Example:
        >>> found = split(np.arange(40) // 10, validation=0.1, test=0.2, seed=0)
        >>> len(found.train), len(found.validation), len(found.test)
        (29, 3, 8)
    """
    rest = np.arange(len(labels))
    if own_test is not None:
        test_part = np.sort(own_test)
        rest = np.setdiff1d(rest, test_part)
        if groups is not None and np.isin(groups[rest], np.unique(groups[test_part])).any():
            raise LabError("the data's own test set shares groups with its training examples: give one without, or no groups.")
    else:
        rest, test_part = divide(rest, labels, test, seed, groups, times)
    if own_validation is not None:
        validation_part = np.sort(own_validation)
        rest = np.setdiff1d(rest, validation_part)
    else:
        rest, validation_part = divide(rest, labels, validation, seed + 1, groups, times)
    for name, part in (("training", rest), ("validation", validation_part), ("test", test_part)):
        if not len(part):
            what = "examples" if groups is None else f"groups (there are {len(np.unique(groups))})"
            raise LabError(f"no example is left for {name}: give more {what}, or larger --validation and --test.")
    return Split(*(torch.from_numpy(part.astype(np.int64)) for part in (rest, validation_part, test_part)))


def divide(
    index: Array, labels: Array, share: float, seed: int, groups: Array | None = None, times: Array | None = None
) -> tuple[Array, Array]:
    """Positions without and with a share of them; both ascending."""
    if share <= 0:
        return index, index[:0]
    if times is not None:
        taken = _newest(index, share, groups, times)
    elif groups is not None:
        taken = _whole_groups(labels[index], groups[index], share, np.random.default_rng(seed))
    else:
        taken = _stratified(labels[index], share, np.random.default_rng(seed))
    return index[~taken], index[taken]


def _stratified(labels: Array, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A share of each class; what rounding leaves over is taken from random classes."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    wanted = counts * share
    number = np.floor(wanted).astype(np.int64)
    left = round(float(wanted.sum())) - int(number.sum())
    if left > 0:
        chance = np.where(wanted > number, rng.random(len(counts)), -1.0)
        number[np.argsort(-chance)[:left]] += 1
    number = np.minimum(number, counts - 1)
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(codes[order], kind="stable")]
    starts = np.cumsum(counts) - counts
    place = np.arange(len(labels)) - np.repeat(starts, counts)
    taken = np.zeros(len(labels), bool)
    taken[by_class[place < np.repeat(number, counts)]] = True
    return taken


def _whole_groups(labels: Array, groups: Array, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Groups with about a share of each class: the large ones first, each to the part that lacks most of its classes."""
    _, classes = np.unique(labels, return_inverse=True)
    _, whose, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    lacks = np.bincount(classes) * np.array([[1 - share], [share]])  # of each part and class
    order = np.argsort(whose, kind="stable")
    members = np.split(order, np.cumsum(sizes)[:-1])
    chosen = np.zeros(len(sizes), bool)
    for group in sorted(rng.permutation(len(sizes)).tolist(), key=lambda each: -sizes[each]):
        own, counts = np.unique(classes[members[group]], return_counts=True)
        # by how much the squares of what is lacking fall, in proportion to what the part wants in all
        falls = ((2 * lacks[:, own] - counts) * counts).sum(1) / np.array([1 - share, share])
        part = int(falls[1] > falls[0])
        lacks[part, own] -= counts
        chosen[group] = bool(part)
    if not chosen.any() and len(sizes) > 1:
        chosen[int(np.argmin(sizes))] = True
    if chosen.all():
        chosen[int(np.argmax(sizes))] = False
    return chosen[whose]


def _newest(index: Array, share: float, groups: Array | None, times: Array) -> NDArray[np.bool_]:
    """The newest share; of groups, by their newest example."""
    when = times[index]
    if groups is not None:
        _, whose = np.unique(groups[index], return_inverse=True)
        newest = np.full(int(whose.max()) + 1, -np.inf)
        np.maximum.at(newest, whose, when)
        when = newest[whose]
    number = max(1, round(share * len(index)))
    # equal times, and the examples of a group, are not torn apart
    since = np.sort(when)[-min(number, len(index))]
    taken = when >= since
    return taken if not taken.all() else when > when.min()
