"""The data of a config: reading and splitting them, checking the config against them, and batches for the models."""

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from anyk import info
from anyk.lab.data import Dataset, Parts, Split, label_noise, load, split
from anyk.lab.data.features import Statistics, statistics
from anyk.lab.data.streaming import Stream
from anyk.lab.data.tokens import SequenceSplit, Windows
from anyk.lab.errors import LabError, first_line
from anyk.lab.run import models, own_models
from anyk.lab.run.config import Config, Setting
from anyk.lab.run.sequence_models import CAUSAL

EVALUATION_BATCH = 2048
#: the fields of a config that the order of the examples follows from, beside the seed
SHUFFLE = ("shuffle", "shuffle_block", "shuffle_window")

AnySetting = TypeVar("AnySetting", bound=Setting)


def read_data(setting: Setting) -> Dataset:
    """The data set of a setting."""
    columns, log = setting.table_options, setting.log_columns
    dataset = load(setting.data, setting.image_size, setting.split, (setting.validation, setting.test), columns, log)
    return label_noise.marked(dataset, setting.label_noise, setting.noise_seed)


def divide(dataset: Dataset, setting: Setting) -> Parts:
    """The training, validation and test parts of a data set."""
    return split(dataset, setting.validation, setting.test, setting.split_seed, setting.train_fraction)


def check_setting(setting: Setting, dataset: Dataset) -> None:
    """Raise if the setting contradicts itself or its data: once, before the first run.

    A model of the user's is made and tried with two examples.

    Args:
        setting: what the runs have in common, or a config; resolved or not.
        dataset: its data.
    """
    find_device(setting.device)
    setting = resolved(setting, dataset)
    check_data(setting, dataset)
    check_batches(setting, dataset, divide(dataset, setting))
    if setting.model not in own_models.BUILT_IN or setting.head_learning_rate:
        with torch.random.fork_rng(devices=[]):
            models.parameter_groups(models.build(setting, dataset), setting)


def check_data(setting: Setting, dataset: Dataset) -> None:
    """Raise if a resolved setting does not go with the data: the part of :func:`check_setting` that costs nothing."""
    if len(dataset.classes) == 1:
        raise LabError(f"{dataset.name} has one class only ({dataset.classes[0]}): there is nothing to tell apart.")
    for k in setting.ks:
        if k >= len(dataset.classes):
            raise LabError(
                f"--ks {k} needs more than {k} classes, but {dataset.name} has {len(dataset.classes)}: the first {k} guesses "
                f"of so few are always right."
            )
    digits = "".join(filter(str.isdigit, setting.select))
    if digits and int(digits) >= len(dataset.classes):
        raise LabError(
            f"--select {setting.select} needs more than {digits} classes, but {dataset.name} has "
            f"{len(dataset.classes)}: choose another, such as --select top1."
        )
    if setting.augment and dataset.kind != "images":
        raise LabError(f"augment changes images, but {dataset.name} holds {dataset.kind}: leave it out.")
    if dataset.kind == "sequences":
        if setting.mixup:
            raise LabError(f"mixup mixes numbers, but {dataset.name} holds sequences of tokens: leave it out.")
    elif setting.mask_seen or setting.split != "auto":
        name = "mask_seen" if setting.mask_seen else "split"
        raise LabError(f"{name} is for sequences, but {dataset.name} holds {dataset.kind}: leave it out.")
    models.Plan.of(setting, dataset)


def check_seen(setting: Setting, dataset: Dataset, parts: Parts, k: int) -> None:
    """Raise if ``mask_seen`` leaves some example fewer classes than the largest k of the loss."""
    train = dataset.train
    if not setting.mask_seen or not isinstance(train, SequenceSplit):
        return
    classes = len(dataset.classes)
    sequence = torch.arange(len(train.begins) - 1).repeat_interleave(train.begins.diff())
    # Where a sequence has a class for the first time: as many are masked as there were of these before a place.
    _, first = np.unique((sequence * train.padding + train.stream).numpy(), return_index=True)
    had = torch.zeros(len(train.stream) + 1, dtype=torch.int64)
    had[torch.from_numpy(first) + 1] = 1
    had[1:][train.stream >= classes] = 0
    had = had.cumsum(0)
    places = train.places[parts.train]
    left = classes - int((had[places] - had[train.begin(places)]).max())
    if k > max(left, 1):  # the target is one that is left always
        raise LabError(
            f"mask_seen leaves {max(left, 1)} of the {classes} classes of {dataset.name} where a sequence has had the others, "
            f"but P_K reaches to k = {k}: give a shorter --p-k, or do not mask."
        )


def check_batches(setting: Setting, dataset: Dataset, parts: Parts) -> None:
    """Raise if a step would leave batch normalisation a single value: one image, shrunk to one pixel."""
    shrinks = {"cnn": 15, "resnet18": 16}  # the largest images of which one pixel is left
    smallest = len(parts.train) // math.ceil(len(parts.train) / setting.batch_size)
    if smallest == 1 and setting.model in shrinks and max(dataset.train.shape[1:]) <= shrinks[setting.model]:
        size = " x ".join(map(str, dataset.train.shape[1:]))
        found = f"{len(parts.train)} training examples in batches of {setting.batch_size}"
        raise LabError(
            f"model {setting.model} needs two examples in each step for images of {size} pixels, but there are {found}: "
            "--batch-size 3 is enough for two or more."
        )


def shuffle_of(setting: Setting) -> dict[str, Any]:
    """The fields that say how the examples are shuffled."""
    return {name: getattr(setting, name) for name in SHUFFLE}


def resolved(setting: AnySetting, dataset: Dataset) -> AnySetting:
    """The setting with what it leaves open filled in for the data set and this machine."""
    train = dataset.train
    memory = (info.usable_memory() or math.inf) if train.maps else math.inf
    classes = len(dataset.classes)
    return setting.resolved(dataset.kind, len(train), classes, train.example_bytes, memory).fitted(classes)


def standardization(dataset: Dataset, parts: Parts, setting: Setting) -> Statistics:
    """The ``feature_mean`` and ``feature_std`` of a data set, over its training part; empty if the setting does not ask."""
    if not setting.standardize or dataset.kind != "embeddings":
        return (), ()
    key = [dataset.fingerprint, setting.validation, setting.test, setting.split_seed]
    key += [setting.train_fraction] if setting.train_fraction < 1 else []
    return statistics(dataset.train, parts.train, key)


def describe(dataset: Dataset, parts: Parts, setting: Setting | None = None) -> dict[str, Any]:
    """What a result says of its data; with the setting, also whether the features are standardised."""
    shape = list(dataset.train.shape)
    of_kind: dict[str, Any] = {}
    if dataset.kind == "images":
        of_kind["image_size"] = shape[1:]
    elif dataset.kind == "embeddings":
        of_kind["features"] = shape[0]
        if setting is not None:
            of_kind["standardized"] = setting.standardize
    elif setting is not None:
        of_kind |= {"context": setting.context, "tokens": dataset.tokens}
    return {
        "name": dataset.name,
        "kind": dataset.kind,
        "classes": len(dataset.classes),
        "train": len(parts.train),
        "validation": len(parts.validation),
        "test": len(parts.test_index),
        "fingerprint": dataset.fingerprint,
        **of_kind,
    }


def windows_of(dataset: Dataset, parts: Parts, setting: Setting) -> Windows | None:
    """For a causal model of sequences, the windows it trains on, with a target at every position; None for other models, of
    which an example is one position.

    Args:
        dataset: its data.
        parts: the split of it.
        setting: resolved.
    """
    train = dataset.train
    if not isinstance(train, SequenceSplit) or not CAUSAL.get(setting.model, False):
        return None
    return Windows(train, parts.train, setting.context)


def steps_per_epoch(setting: Setting, parts: Parts, windows: Windows | None) -> int:
    """How many batches an epoch has. A batch of windows has about ``batch_size`` positions in all."""
    if windows is None:
        return math.ceil(len(parts.train) / setting.batch_size)
    return math.ceil(len(windows) / windows_in_batch(setting, windows))


def windows_in_batch(setting: Setting, windows: Windows) -> int:
    """How many windows a batch has at most."""
    return max(1, round(setting.batch_size / windows.length))


def find_device(name: str) -> torch.device:
    """The device of this name, if it can be used here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LabError(f"device {name!r} cannot be used here ({first_line(error)}): try cpu.") from None
    return device


class Reader:
    """Batches of a data set as the models want them: float32 on the device, with mean 0 and deviation 1 where the data set has
    these numbers (images for each channel, embeddings for each feature).

    With a config that shuffles block by block, a memory-mapped set is streamed, evaluations too. Of sequences, a batch is the
    tokens before the targets, as many as the config's models see.
    """

    def __init__(self, dataset: Dataset, device: torch.device, config: Config | None = None) -> None:
        self.device = device
        self.streams: dict[int, Stream] = {}
        if config is not None and config.shuffle == "block":
            for examples in (dataset.train, dataset.test):
                if examples is not None and examples.maps:
                    self.streams[id(examples)] = Stream(examples, config.shuffle_block, config.shuffle_window)
        self.context = 0 if config is None else config.context
        self.mask_seen = config is not None and config.mask_seen
        self.mean: Tensor | None = None
        if dataset.kind == "images":
            self.mean = torch.tensor(dataset.mean, device=device)[:, None, None] * 255
            self.scale = 1 / (torch.tensor(dataset.std, device=device)[:, None, None] * 255)
        elif dataset.feature_mean:
            self.mean = torch.tensor(dataset.feature_mean, device=device)
            self.scale = 1 / torch.tensor(dataset.feature_std, device=device)

    def __call__(self, examples: Split, index: Tensor) -> Tensor:
        if isinstance(examples, SequenceSplit):
            return examples.contexts(index, self.context).to(self.device)
        inputs = self.streams.get(id(examples), examples).take(index).to(self.device, torch.float32)
        # In place: what was taken is a copy, and batches of long rows are large.
        return inputs if self.mean is None else inputs.sub_(self.mean).mul_(self.scale)

    def mask(self, scores: Tensor, examples: Split, index: Tensor) -> Tensor:
        """The scores of the examples at some positions; where the config says so, minus infinity for what was seen before."""
        if not self.mask_seen or not isinstance(examples, SequenceSplit):
            return scores
        return mask_seen(scores, examples, examples.places[index], examples.labels[index])

    def expect(self, examples: Split, index: Tensor) -> None:
        """Announce what will be wanted, so that it can be read from the disk meanwhile."""
        if id(examples) in self.streams:
            self.streams[id(examples)].expect(index)

    def blocks(self, examples: Split, index: Tensor) -> Iterator[Tensor]:
        """Positions in pieces of a size that suits evaluation; each is announced while the one before it is worked on."""
        self.expect(examples, index[:EVALUATION_BATCH])
        for start in range(0, len(index), EVALUATION_BATCH):
            end = start + EVALUATION_BATCH
            self.expect(examples, index[end : end + EVALUATION_BATCH])
            yield index[start:end]


def mask_seen(scores: Tensor, examples: SequenceSplit, places: Tensor, target: Tensor) -> Tensor:
    """Scores (rows, n) with minus infinity for what the sequences have before the places (rows,), but never for the target."""
    rows, classes = examples.seen(places)
    others = classes != target[rows]
    seen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    seen[rows[others].to(scores.device), classes[others].to(scores.device)] = True
    return scores.masked_fill(seen, -torch.inf)
