"""Test examples that a method gains or loses against the baseline."""

import io
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from anyk.lab.comparison.classes import tested
from anyk.lab.comparison.outcome import Comparison, Example, Guess, Moves, rival, shared, wanted
from anyk.lab.data import Dataset, Parts, Split, image_folders
from anyk.lab.data.tokens import OTHER, SequenceSplit
from anyk.lab.run import own_models
from anyk.lab.run.evaluation import Predictor

#: examples that are shown of those that were gained, and as many of those that were lost
SHOWN_EXAMPLES = 8
#: guesses that are shown of an example, where k is larger
SHOWN_GUESSES = 10
#: tokens before the target that are shown of an example, and items, whose names are longer
SHOWN_TOKENS, SHOWN_ITEMS = 32, 8
#: the longer side of an image that is shown, at most
THUMBNAIL = 96


def find_moves(comparison: Comparison, out: Path, dataset: Dataset, parts: Parts) -> Moves | None:
    """Test examples whose target is among the first k guesses of the baseline or of its rival, not of both.

    k is the largest that is wanted. The runs have kept ranks and guesses; their models are asked for probabilities of the
    examples that are shown, and of no others.

    Args:
        comparison: the methods with their runs.
        out: the folder that the runs' folders are in.
        dataset: the data of the runs.
        parts: their split of it.
    """
    method = rival(comparison)
    runs = shared(comparison, method)[0] if method is not None else None
    if method is None or runs is None:
        return None
    k = max(int(metric.removeprefix("top")) for metric in wanted(comparison))
    before, after = (tested(run, out) for run in runs)
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
    guesses = [
        _guesses(
            out / run.folder,
            torch.from_numpy(one["guesses"])[places, : min(k, SHOWN_GUESSES)].long(),
            places,
            dataset,
            method.config.model,
        )
        for run, one in zip(runs, (before, after), strict=True)
    ]
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


def _spread_out(places: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> list[int]:
    """Some of the places, evenly over all of them: not those that look best."""
    taken = np.linspace(0, len(places) - 1, min(SHOWN_EXAMPLES, len(places))).round().astype(int)
    return [int(place) for place in places[taken]]


def _guesses(
    folder: Path, classes: torch.Tensor, places: torch.Tensor, dataset: Dataset, model: str
) -> list[tuple[Guess, ...]]:
    """The classes that a run has guessed for some test examples, with the probabilities that its model gives them."""
    try:
        # By the word of this comparison: a file's own word imports nothing.
        predictor = Predictor(folder, model=model if own_models.is_function(model) else None)
        chances: list[list[float | None]] = predictor.test_probabilities(places).gather(1, classes).tolist()
    except Exception:  # a model that cannot be made any more, by whatever is wrong with its code, has still made its guesses
        chances = [[None] * classes.shape[1]] * len(places)
    rows = zip(classes.tolist(), chances, strict=True)
    return [tuple(Guess(dataset.classes[c], p) for c, p in zip(*row, strict=True)) for row in rows]


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
