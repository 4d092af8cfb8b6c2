"""Test examples that a method gains or loses against the baseline."""

import dataclasses
import io
from pathlib import Path
from typing import Literal

import torch
from PIL import Image

from anyk.lab.comparison.outcome import BASELINE, Comparison, Example, Guess, Moves, picked
from anyk.lab.run.evaluation import Predictor

GUESSES = 5
SHOWN_EXAMPLES = 12


def find_moves(outcome: Comparison, out: Path) -> Moves | None:
    """Test examples whose target is among the first five guesses of the best other method or of the baseline, not of both."""
    finished = {method.name: {run.seed: run for run in method.runs} for method in outcome.methods}
    baseline = finished.pop(BASELINE)
    others = dataclasses.replace(
        outcome, methods=tuple(method for method in outcome.methods if baseline.keys() & finished.get(method.name, {}).keys())
    )
    if not others.methods or outcome.data["classes"] <= GUESSES:
        return None
    name = picked(others).name
    seed = min(baseline.keys() & finished[name].keys())
    before, after = (Predictor(out / runs[seed].folder, trust=True) for runs in (baseline, finished[name]))
    guesses = [predictor.test_guesses(GUESSES) for predictor in (before, after)]
    target = before.parts.test.labels[before.parts.test_index]
    had, has = ((classes == target[:, None]).any(1) for classes, _ in guesses)
    into, out_of = (has & ~had).nonzero().squeeze(1), (had & ~has).nonzero().squeeze(1)
    names = before.dataset.classes

    def example(place: int, moved: Literal["in", "out"]) -> Example:
        listed = [
            tuple(Guess(names[c], p) for c, p in zip(classes[place].tolist(), probabilities[place].tolist(), strict=True))
            for classes, probabilities in guesses
        ]
        index = int(before.parts.test_index[place])
        image = _png(before.parts.test.take(torch.tensor([index]))[0]) if before.dataset.kind == "images" else None
        return Example(index, names[int(target[place])], moved, listed[0], listed[1], image)

    shown = [example(place, "in") for place in _spread_out(into, SHOWN_EXAMPLES)]
    shown += [example(place, "out") for place in _spread_out(out_of, SHOWN_EXAMPLES // 2)]
    return Moves(name, seed, len(into), len(out_of), tuple(shown))


def _spread_out(places: torch.Tensor, count: int) -> list[int]:
    """Some of the places, evenly over all of them: not those that look best."""
    chosen = torch.linspace(0, len(places) - 1, min(count, len(places))).round().long()
    return [int(place) for place in places[chosen]] if len(places) else []


def _png(image: torch.Tensor) -> bytes:
    pixels = image.permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "png")
    return file.getvalue()
