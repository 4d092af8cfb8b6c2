"""Tuning: which points are tried, at which length, and which of them goes on. No training and no files in here.

Successive halving on a fixed grid, with as many points for every loss. A coarse stage, once for each loss, finds the region;
then every final seed repeats the rest on its own draw of validation, so that the variance between the seeds has the luck of
tuning in it. What is best on average over the seeds is the point to paste.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyk.lab.config import RunConfig

RATES = tuple(10 ** (step / 2) for step in range(-3, 4))
"""the learning rates of the coarse stage, as multiples of the usual one"""
NEAR = (0.5, 1.0, 2.0)
"""those that the settings of a loss are tried with, as multiples of the best"""
COARSE, QUARTER, HALF = 1 / 8, 1 / 4, 1 / 2
"""the lengths of the short runs"""
FINALISTS, LAST = 5, 2
"""so many points go on from the coarse stage, and to half the length"""
FEWEST_STEPS = 20
"""a run of fewer steps tells nothing"""
COARSE_SEED = 10_000
"""beyond those of the final runs"""

Point = Mapping[str, Any]
"""the fields of a config that are tuned, with their values"""


@dataclass(frozen=True)
class Trial:
    """One run of the tuning, or of the choice."""

    point: Point
    length: float
    """of a whole training"""
    split: int
    score: float | None
    """the validation metric that is tuned for; None: training diverged, or there was no time for it"""


@dataclass(frozen=True)
class Effort:
    """How thoroughly a loss is tuned, and on how many seeds it is judged."""

    seeds: int
    settings: bool
    """whether settings of the loss are tried with several learning rates, or with the best alone"""

    def trainings(self, seeds: int | None = None) -> float:
        """What a loss costs, in trainings of full length, the final runs among them."""
        seeds = self.seeds if seeds is None else seeds
        settings = SETTINGS * len(NEAR) if self.settings else SETTINGS
        return (len(RATES) + settings) * COARSE + seeds * (FINALISTS * QUARTER + LAST * HALF + 1)


SETTINGS = 6
"""how many combinations every loss has of its own"""
EFFORTS = {"quick": Effort(3, False), "normal": Effort(5, True), "thorough": Effort(10, True)}


def settings_of(loss: str, hidden: bool) -> list[dict[str, Any]]:
    """What is tried of a loss beside its learning rate, the usual first: as many combinations for every loss.

    Args:
        loss: its name.
        hidden: whether the model has hidden layers. Without them, softmax at a temperature is softmax at another learning rate.
    """
    decay = {"weight_decay": 0.1}
    family = loss.partition(":")[0]
    if family == "softmax":
        smoothed = [{"label_smoothing": 0.1}, {"label_smoothing": 0.3}]
        others = [{"temperature": 4.0}, {"temperature": 8.0}] if hidden else [{"weight_decay": 1.0}, {**decay, **smoothed[0]}]
        return [{}, decay, *smoothed, *others]
    if family == "gce":
        return [{"q": 0.5}, {"q": 0.25}, {"q": 0.75}, {"q": 1.0}, {"q": 0.5, **decay}, {"q": 0.75, "label_smoothing": 0.1}]
    if family == "error":
        shares = [{"ce_weight": share} for share in (0.2, 0.1, 0.5, 0.8)]
        return [*shares, {"ce_weight": 0.2, **decay}, {"ce_weight": 0.5, "label_smoothing": 0.1}]
    if family in ("hinge", "truncated"):  # have no temperature
        return [{}, decay, {"weight_decay": 0.01}, {"weight_decay": 0.03}, {"weight_decay": 0.3}, {"weight_decay": 1.0}]
    temperatures = [{"temperature": t} for t in (1.0, 0.5, 2.0, 4.0, 8.0)]
    return [*temperatures, {"temperature": 2.0, **decay}]


def rate_points(config: RunConfig, settings: Sequence[Point]) -> list[Point]:
    """The first part of the coarse stage: learning rates, with the loss's usual setting."""
    return [{**settings[0], "learning_rate": _rounded(config.learning_rate * factor)} for factor in RATES]


def setting_points(best: Point, settings: Sequence[Point], several_rates: bool) -> list[Point]:
    """The second part: the settings of the loss, with learning rates around the best."""
    rate = best["learning_rate"]
    return [
        {**setting, "learning_rate": _rounded(rate * factor)}
        for setting in settings
        for factor in (NEAR if several_rates else (1.0,))
    ]


def finalists(trials: Iterable[Trial], noise: float, usual: float) -> list[Point]:
    """The points that go on from the coarse stage, the best first; one of them is the best at a lower learning rate, since short
    runs like rates that are too high."""
    found = ranked(trials, noise, usual)
    if not found:
        return []
    best = found[0]
    lower = {**best, "learning_rate": _rounded(best["learning_rate"] / 2)}
    others = [point for point in found[1:] if point != lower]
    return [best, lower, *others][:FINALISTS]


def ranked(trials: Iterable[Trial], noise: float, usual: float) -> list[Point]:
    """The points by their mean score, the best first; those of which a run diverged are not among them. The best is, of those
    within half of the ``noise`` of the top, the one whose learning rate is nearest to the usual one.

    Args:
        trials: of one loss and length.
        noise: the standard error of a score.
        usual: the learning rate to prefer where scores tell nothing.
    """
    scores: dict[tuple[tuple[str, Any], ...], list[float | None]] = {}
    for trial in trials:
        scores.setdefault(tuple(sorted(trial.point.items())), []).append(trial.score)
    most = max(map(len, scores.values()), default=0)
    means = {
        key: math.fsum(score for score in found if score is not None) / len(found)
        for key, found in scores.items()
        if None not in found and len(found) == most
    }
    order = sorted(means, key=lambda key: -means[key])
    if not order:
        return []
    near = [key for key in order if means[key] >= means[order[0]] - noise / 2]
    best = min(near, key=lambda key: abs(math.log(dict(key)["learning_rate"] / usual)))
    return [dict(key) for key in (best, *(key for key in order if key != best))]


def noise_of(score: float, examples: int) -> float:
    """The standard error of a share of so many validation examples."""
    share = min(max(score, 1 / (examples + 1)), 1 - 1 / (examples + 1))
    return math.sqrt(share * (1 - share) / max(examples, 1))


def shortened(config: RunConfig, length: float, steps: int) -> RunConfig:
    """A run of a part of the length, of at least some steps, whose test examples stay unseen."""
    enough = max(length, min(1.0, FEWEST_STEPS / max(steps, 1)))
    return config.replace(length=enough, tested=False)


def at_bounds(point: Point, rates: Sequence[float], settings: Sequence[Point]) -> list[str]:
    """Where the best point lies at the end of what was tried, in words."""
    found = []
    for name, value in point.items():
        tried = sorted({each[name] for each in settings if name in each}) if name != "learning_rate" else sorted(rates)
        if len(tried) > 2 and value in (tried[0], tried[-1]) and value not in (0.0, 1.0):
            end = "smallest" if value == tried[0] else "largest"
            found.append(f"{name.replace('_', ' ')} {value:g}, the {end} that is tried")
    return found


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
