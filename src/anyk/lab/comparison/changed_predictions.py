"""What the best rival of the baseline predicts differently: hits and confusions of each class, and single test examples."""

import dataclasses
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from anyk.lab.comparison.outcome import ByClass, Comparison, Confusion, Example, Guess, Moves, tested
from anyk.lab.data import Dataset, Parts, Split, image_folders
from anyk.lab.data.tokens import OTHER, SequenceSplit
from anyk.lab.run import models, own_models
from anyk.lab.run.batches import Reader
from anyk.lab.run.config import Config

#: confusions that are kept of each of the two
KEPT_CONFUSIONS = 10
#: examples that are shown of those that were gained, and as many of those that were lost
SHOWN_EXAMPLES = 8
#: guesses that are shown of an example, where k is larger
SHOWN_GUESSES = 10
#: tokens before the target that are shown of an example, and items, whose names are longer
SHOWN_TOKENS, SHOWN_ITEMS = 32, 8
#: the longer side of an image that is shown, at most
THUMBNAIL = 96

Tensors = dict[str, NDArray[Any]]


def count_classes(comparison: Comparison, out: Path, dataset: Dataset, parts: Parts) -> ByClass | None:
    """Count the hits of the baseline and of its rival in each class; None where there is nothing to count.

    Args:
        comparison: the methods with their runs.
        out: the folder that the runs' folders are in.
        dataset: the data of the runs.
        parts: their split of it.
    """
    method = comparison.rival
    if method is None:
        return None
    target = parts.test.labels[parts.test_index].numpy()
    known = target >= 0  # the others are none of the classes
    examples = np.bincount(target[known], minlength=len(dataset.classes))
    present = np.flatnonzero(examples)
    seeds, sides = [], (list[Tensors](), list[Tensors]())
    for runs in comparison.shared(method):
        both = [tested(run, out, "ranks", "guesses") for run in runs]
        complete = [one for one in both if one is not None and len(one["ranks"]) == len(target)]
        if len(complete) == 2:
            seeds.append(runs[0].seed)
            for side, one in zip(sides, complete, strict=True):
                side.append(one)
    if not seeds:
        return None

    def hits(side: list[Tensors], metric: str) -> tuple[int, ...]:
        hit = [target[one["ranks"] <= int(metric.removeprefix("top"))] for one in side]
        return tuple(np.bincount(np.concatenate(hit), minlength=len(examples))[present].tolist())

    before, after = ({metric: hits(side, metric) for metric in comparison.metrics} for side in sides)
    confusions = [_confusions(target[known], [one["guesses"][known, 0] for one in side]) for side in sides]
    return ByClass(
        method.name,
        tuple(seeds),
        tuple(dataset.classes[place] for place in present),
        tuple(examples[present].tolist()),
        before,
        after,
        tuple(
            Confusion(dataset.classes[right], dataset.classes[wrong], *(found[right, wrong] for found in confusions))
            for right, wrong in dict.fromkeys(pair for found in confusions for pair in _most_frequent(found))
        ),
    )


def _confusions(target: NDArray[Any], guesses: Iterable[NDArray[Any]]) -> Counter[tuple[int, int]]:
    """How often each (target, other class) was guessed, by several runs."""
    found: Counter[tuple[int, int]] = Counter()
    for guess in guesses:
        wrong = guess != target
        found.update(zip(target[wrong].tolist(), guess[wrong].tolist(), strict=True))
    return found


def _most_frequent(found: Counter[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(found, key=lambda pair: (-found[pair], pair))[:KEPT_CONFUSIONS]


def find_moves(comparison: Comparison, out: Path, dataset: Dataset, parts: Parts) -> Moves | None:
    """Test examples whose target is among the first k guesses of the baseline or of its rival, not of both.

    k is the largest of the comparison. The runs have kept ranks and guesses; their models are asked for probabilities of the
    examples that are shown, and of no others. The arguments are those of :func:`count_classes`.
    """
    method = comparison.rival
    runs = comparison.shared(method)[0] if method is not None else None
    if method is None or runs is None:
        return None
    k = max(int(metric.removeprefix("top")) for metric in comparison.judged_metrics)
    before, after = (tested(run, out, "ranks", "guesses") for run in runs)
    if before is None or after is None or len(before["ranks"]) != len(parts.test_index):
        return None
    had, has = (one["ranks"] <= k for one in (before, after))
    into, out_of = np.flatnonzero(has & ~had), np.flatnonzero(had & ~has)
    moved: list[tuple[int, Literal["in", "out"]]] = [(place, "in") for place in _spread_out(into)]
    moved += [(place, "out") for place in _spread_out(out_of)]
    if not moved:
        return Moves(method.name, k, runs[0].seed, 0, 0)
    places = torch.tensor([place for place, _ in moved])
    index = parts.test_index[places]
    guesses = []
    for run, one in zip(runs, (before, after), strict=True):
        classes = torch.from_numpy(one["guesses"])[places, : min(k, SHOWN_GUESSES)].long()
        guesses.append(_guesses(out / run.folder, classes, dataset, parts.test, index, method.config))
    images = parts.test.take(index) if dataset.kind == "images" else None
    sources, contexts = _sources(dataset, parts.test, index), _contexts(dataset, parts.test, index, method.config.context)
    examples = tuple(
        Example(
            source=sources[row],
            target=dataset.classes[int(parts.test.labels[index[row]])],
            moved=way,
            before=guesses[0][row],
            after=guesses[1][row],
            ranks=(int(before["ranks"][place]), int(after["ranks"][place])),
            image=None if images is None else _png(images[row]),
            context=contexts[row],
        )
        for row, (place, way) in enumerate(moved)
    )
    return Moves(method.name, k, runs[0].seed, len(into), len(out_of), examples)


def _spread_out(places: NDArray[Any]) -> list[int]:
    """Some of the places, evenly over all of them: not those that look best."""
    taken = np.linspace(0, len(places) - 1, min(SHOWN_EXAMPLES, len(places))).round().astype(int)
    return [int(place) for place in places[taken]]


def _guesses(
    folder: Path, classes: torch.Tensor, dataset: Dataset, examples: Split, index: torch.Tensor, config: Config
) -> list[tuple[Guess, ...]]:
    """The classes that a run has guessed for some test examples, with the probabilities that its model gives them."""
    try:
        chances: list[list[float | None]] = _probabilities(folder, dataset, examples, index, config).gather(1, classes).tolist()
    except Exception:  # a model that cannot be made any more, by whatever is wrong with its code, has still made its guesses
        chances = [[None] * classes.shape[1]] * len(index)
    rows = zip(classes.tolist(), chances, strict=True)
    return [tuple(Guess(dataset.classes[c], p) for c, p in zip(*row, strict=True)) for row in rows]


@torch.no_grad()
def _probabilities(folder: Path, dataset: Dataset, examples: Split, index: torch.Tensor, config: Config) -> torch.Tensor:
    """The softmax probabilities of some examples, (n, classes), by the model of a run."""
    # By the word of this comparison: a file's own word imports nothing.
    classifier = models.load(folder, model=config.model if own_models.is_function(config.model) else None)
    plan = classifier.plan
    dataset = dataclasses.replace(dataset, feature_mean=plan.feature_mean, feature_std=plan.feature_std)
    reader = Reader(dataset, torch.device("cpu"), config.replace(shuffle="full"))
    return reader.mask(classifier.model(reader(examples, index)), examples, index).float().softmax(1)


def _sources(dataset: Dataset, examples: Split, index: torch.Tensor) -> list[str]:
    """Where test examples are to be found: their files, their places in sequences, or their rows."""
    if isinstance(examples, SequenceSplit):
        places = examples.places[index]
        sequences = torch.searchsorted(examples.begins, places, right=True)
        tokens = places - examples.begin(places) + 1
        return [f"sequence {each:,}, token {token:,}" for each, token in zip(sequences.tolist(), tokens.tolist(), strict=True)]
    if dataset.folder:
        train, test = image_folders.files(dataset)
        files = train if dataset.test is None else test
        if files is not None and len(files) == len(dataset.test or dataset.train):  # no file has come or gone meanwhile
            return [files[place] for place in index.tolist()]
    return [f"row {place}" for place in index.tolist()]


def _contexts(dataset: Dataset, examples: Split, index: torch.Tensor, length: int) -> list[tuple[str, ...]]:
    """The last of so many tokens before each example by name; of what is no sequence, none."""
    if not isinstance(examples, SequenceSplit):
        return [()] * len(index)
    names = (*dataset.classes, OTHER)
    rows = examples.contexts(index, min(length, SHOWN_ITEMS if dataset.tokens == "items" else SHOWN_TOKENS)).tolist()
    return [tuple(names[token] for token in row if token < examples.padding) for row in rows]


def _png(image: torch.Tensor) -> bytes:
    pixels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()
