"""A data set in memory or memory-mapped, and its split into train, validation and test."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data.mapped import MappedRows
from anyk.lab.data.tables import Schema
from anyk.lab.errors import LabError

Kind = Literal["embeddings", "images", "sequences"]
#: what the tokens of sequences are: what stands between spaces, words of a text, or those of Python source
Tokens = Literal["", "items", "words", "python"]


_STATISTICS_BYTES = 1 << 26  # of images whose statistics are taken at once


@dataclass(frozen=True)
class Split:
    """Examples and their classes.

    ``parts`` are one or more tensors that follow one another, so that a set in many memory-mapped files needs no copy:
    embeddings (N, d) in float16 or float32, or images (N, channels, height, width) in uint8. ``labels`` is (N,), int64.
    """

    parts: tuple[Tensor, ...]
    labels: Tensor
    maps: tuple[MappedRows, ...] = ()
    """where the parts are memory-mapped, the mapping of each"""
    groups: Tensor | None = None
    """(N,), int64: examples with the same number, as of one user or file, are not independent of each other"""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> torch.Size:
        """The shape of one example."""
        return self.parts[0].shape[1:]

    @property
    def example_bytes(self) -> int:
        """The size of one example as it is stored."""
        return self.shape.numel() * self.parts[0].dtype.itemsize

    @cached_property
    def starts(self) -> Tensor:
        """The position of the first example of each part, and the end: (parts + 1,)."""
        return torch.tensor([0, *(len(part) for part in self.parts)]).cumsum(0)

    @cached_property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The parts as NumPy arrays, over the same memory."""
        return [part.numpy() for part in self.parts]

    def take(self, index: Tensor) -> Tensor:
        """The examples at (B,) positions, in that order, as they are stored."""
        if len(self.parts) == 1:
            return self.parts[0].index_select(0, index)
        # Sorted, each part fills a contiguous stretch of the result. NumPy, because a batch may take a few rows of each of
        # hundreds of parts, and a call of torch costs several times as much as such rows.
        wanted = index.numpy()
        order = wanted.argsort()
        wanted = wanted[order]
        starts = self.starts.numpy()
        ends = wanted.searchsorted(starts)
        if ends[-1] - ends[0] != len(wanted):
            raise IndexError(f"positions should be 0 to {len(self) - 1}, but are {wanted[0]} to {wanted[-1]}")
        wanted -= starts[:-1].repeat(np.diff(ends))
        out = np.empty((len(wanted), *self.shape), self.arrays[0].dtype)
        for array, first, end in zip(self.arrays, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            if first < end:
                # mode="raise" would copy the rows to a buffer first; the positions are known to be valid.
                np.take(array, wanted[first:end], axis=0, out=out[first:end], mode="clip")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return torch.from_numpy(out).index_select(0, torch.from_numpy(back))


@dataclass(frozen=True)
class Dataset:
    """A classification data set.

    ``test`` is None where the source has no split of its own. ``mean`` and ``std`` belong to images: a value for each
    channel, of pixels between 0 and 1. ``feature_mean`` and ``feature_std`` belong to embeddings that are to be standardised: a
    value for each feature. ``fingerprint`` changes when the data change.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    train: Split
    test: Split | None
    fingerprint: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    feature_mean: tuple[float, ...] = ()
    feature_std: tuple[float, ...] = ()
    folder: str = ""
    """of image files, where it was made of one"""
    unreadable: tuple[str, ...] = ()
    """files in it that could not be read and were left out"""
    reasons: tuple[str, ...] = ()
    """why, for each of these"""
    validation: Tensor | None = None
    """(V,) positions in ``train`` that the source keeps for validation; None: :func:`split` takes a part"""
    remarks: tuple[str, ...] = ()
    """what a reader of the results should know of the data, in sentences"""
    tokens: Tokens = ""
    """of sequences, what their tokens are"""
    table: Schema | None = None
    """of features that were a table, its columns"""

    @property
    def splits(self) -> dict[str, Split]:
        """The training examples, and the test examples where there are such, by name."""
        return {"train": self.train} | ({} if self.test is None else {"test": self.test})

    @property
    def training(self) -> Tensor:
        """Positions in ``train``, in ascending order, without those that the source keeps for validation."""
        kept = torch.ones(len(self.train), dtype=torch.bool)
        if self.validation is not None:
            kept[self.validation] = False
        return kept.nonzero().flatten()


@dataclass(frozen=True)
class Parts:
    """Positions of the train and validation examples in ``dataset.train``, and the test examples."""

    train: Tensor
    validation: Tensor
    test: Split
    test_index: Tensor


ONE_CLASS = "the data have one class only, which leaves nothing to classify: give data with at least two."


def split(dataset: Dataset, validation: float, test: float, seed: int, train_fraction: float = 1.0) -> Parts:
    """Split into train, validation and test, stratified by class; a split that the source has is left as it is.

    Of what is divided here, every class keeps at least one training example; or, where the examples have groups, no group is in
    two parts. The same seed gives the same split. With ``train_fraction`` below 1, only so much of the training examples is
    used, of each class.

    >>> labels = torch.arange(4).repeat_interleave(10)
    >>> examples = Split((torch.zeros(40, 3),), labels)
    >>> parts = split(Dataset("four", "embeddings", tuple("abcd"), examples, None, ""), validation=0.1, test=0.2, seed=0)
    >>> len(parts.train), len(parts.validation), len(parts.test_index)
    (29, 3, 8)
    >>> given = Dataset("four", "embeddings", tuple("abcd"), examples, None, "", validation=torch.tensor([0, 10, 20, 30]))
    >>> parts = split(given, validation=0.1, test=0.25, seed=0)
    >>> parts.validation.tolist(), len(parts.train), len(parts.test_index)
    ([0, 10, 20, 30], 27, 9)
    """
    generator = torch.Generator().manual_seed(seed)
    rest = dataset.training
    if dataset.test is not None:
        test_split, test_index = dataset.test, torch.arange(len(dataset.test))
    else:
        rest, test_index = _divide(rest, dataset.train.labels, test, generator, dataset.train.groups)
        test_split = dataset.train
    if dataset.validation is not None:
        train, held = rest, dataset.validation.sort().values
    else:
        train, held = _divide(rest, dataset.train.labels, validation, generator, dataset.train.groups)
    if train_fraction < 1:
        train, _ = _divide(train, dataset.train.labels, 1 - train_fraction, generator)
    for name, examples in (("validation", held), ("test", test_index)):
        if not len(examples) and len(dataset.classes) == 1:
            raise LabError(ONE_CLASS)
        if not len(examples):
            if dataset.train.groups is not None:
                count = len(torch.unique(dataset.train.groups))
                raise LabError(f"no group of {dataset.name} is left for {name}: there are {count}, and none is in two parts.")
            least = 1 + (dataset.validation is None) + (dataset.test is None)
            raise LabError(
                f"no example of {dataset.name} is left for {name}: --{name} should be above 0, and classes need "
                f"at least {least} examples (there are {len(dataset.train)} in {len(dataset.classes)} classes)."
            )
    return Parts(train, held, test_split, test_index)


def _divide(
    index: Tensor, labels: Tensor, fraction: float, generator: torch.Generator, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Positions in ascending order, without and with a random ``fraction`` of each class; what rounding leaves over is put
    aside from random classes. With groups, whole groups."""
    if not len(index):
        return index, index
    if groups is not None:
        return _divide_groups(index, labels, fraction, generator, groups)
    shuffled = index[torch.randperm(len(index), generator=generator)]
    # Of millions of examples, uint16 is sorted in a fraction of the time and memory.
    classes = labels[shuffled].numpy()
    classes = classes.astype(np.uint16 if int(classes.max()) < 1 << 16 else np.int64)
    by_class = torch.from_numpy(classes.argsort(kind="stable"))
    count = torch.from_numpy(np.bincount(classes))
    # The whole part of each class's share, and the fractional parts given to random classes so that the total is right.
    share = count.double() * fraction
    aside = share.floor().long()
    left = round(float(share.sum())) - int(aside.sum())
    chance = torch.where(share > aside, torch.rand(len(count), generator=generator), -1.0)
    if left > 0:
        aside[chance.topk(min(left, len(count))).indices] += 1
    aside = torch.minimum(aside, (count - 1).clamp(min=0))
    # The first of each class in the shuffled order.
    first = (count.cumsum(0) - count - (aside.cumsum(0) - aside)).repeat_interleave(aside)
    held = shuffled[by_class[first + torch.arange(len(first))]].sort().values
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[held] = False
    return index[kept[index]], held


def _divide_groups(
    index: Tensor, labels: Tensor, fraction: float, generator: torch.Generator, groups: Tensor
) -> tuple[Tensor, Tensor]:
    """The large groups first, each to the side that lacks most of its classes; both sides get at least one."""
    classes = np.unique(labels[index].numpy(), return_inverse=True)[1]
    whose, sizes = np.unique(groups[index].numpy(), return_inverse=True, return_counts=True)[1:]
    members = np.split(np.argsort(whose, kind="stable"), np.cumsum(sizes)[:-1])
    shares = np.array([[1 - fraction], [fraction]])
    lacks = np.bincount(classes) * shares  # of each side and class
    aside = np.zeros(len(sizes), bool)
    drawn = torch.randperm(len(sizes), generator=generator).tolist()
    for group in sorted(drawn, key=lambda each: -sizes[each]) if fraction else ():
        own, counts = np.unique(classes[members[group]], return_counts=True)
        falls = ((2 * lacks[:, own] - counts) * counts).sum(1) / shares[:, 0]  # of the squares of what is lacking
        aside[group] = falls[1] > falls[0]
        lacks[int(aside[group]), own] -= counts
    if len(sizes) > 1 and fraction:
        if not aside.any():
            aside[int(sizes.argmin())] = True
        elif aside.all():
            aside[int(sizes.argmax())] = False
    chosen = torch.from_numpy(aside[whose])
    return index[~chosen], index[chosen]


def with_statistics(dataset: Dataset) -> Dataset:
    """A set of images with mean and standard deviation of each channel, of pixels in 0 … 1, of ``dataset.training``."""
    images, index = dataset.train, dataset.training
    channels, height, width = images.shape
    sums = torch.zeros(channels, dtype=torch.float64)
    squares = torch.zeros(channels, dtype=torch.float64)
    # Few large images at a time: a pixel takes nine bytes here. At most 4096: another number would change the last digit.
    at_once = max(1, min(4096, _STATISTICS_BYTES // max(1, images.example_bytes)))
    for positions in torch.split(index, at_once):
        pixels = images.take(positions).double().div_(255)
        sums += pixels.sum((0, 2, 3))
        squares += pixels.square_().sum((0, 2, 3))
    count = len(index) * height * width
    mean = sums / count
    std = (squares / count - mean.square()).clamp(min=1e-12).sqrt()
    return dataclasses.replace(dataset, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def check_classes(dataset: Dataset, sources: Mapping[str, str]) -> None:
    """Raise where a label has no class, or a class no training example.

    Args:
        dataset: its labels and classes.
        sources: for "train" and "test", what to call it in a message.
    """
    for split, examples in dataset.splits.items():
        low, high = (int(value) for value in examples.labels.aminmax())
        if low < 0 or high >= len(dataset.classes):
            wrong = low if low < 0 else high
            raise LabError(
                f"{sources[split]} has the label {wrong}, but there are {len(dataset.classes)} classes: "
                f"labels should be 0 to {len(dataset.classes) - 1}, in the order of the class names."
            )
    labels = dataset.train.labels if dataset.validation is None else dataset.train.labels[dataset.training]
    missing = (torch.bincount(labels, minlength=len(dataset.classes)) == 0).nonzero().flatten().tolist()
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LabError(
            f"{sources['train']} has no training example of class {missing[0]} ({dataset.classes[missing[0]]}){others}: "
            "add examples, or remove the class and renumber the labels."
        )
