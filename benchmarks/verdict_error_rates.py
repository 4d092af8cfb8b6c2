"""How often the lab's verdict is wrong where there is nothing to find, and what gain it finds: by simulation.

    python benchmarks/verdict_error_rates.py [--comparisons N]                   writes the .md file beside it
    python benchmarks/verdict_error_rates.py --calibrate DATA EPOCHS FOLDER      trains and prints the numbers of a Kind

Takes two to three minutes on one core; docs/lab.md tells the result.

An example i has a chance p(i) to be hit: logit-normal, so that most examples are hit by nearly every run or by nearly none.
A run moves all chances a little (its seed is good or bad), and a loss moves each one for itself (it sees examples in its own
way). With the chances of two runs, d(i, s) is drawn. Two runs that begin with the same seed agree more often: with some
probability, one draw serves both. How much of all that there is was measured on real runs: softmax, error and splitter with
six seeds each on embeddings (CIFAR-100, EfficientNet-Lite0, 5 epochs) and from scratch (glyphs:100, the small CNN, 8 epochs).

Where nothing is to be found, both runs have equal chances on average. Three cases:

itself      one loss twice, with other seeds: they differ by luck only
as good     another loss with the same seeds, which gains here what it loses there
in groups   the same, but the test examples belong together by tens: a group is easier or harder, for each run anew

By default a comparison looks after three of five seeds, and goes on only if the p is below FUTILE.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import quote
from measuring import markdown_table
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import expit, ndtr, ndtri

from anyk.lab.comparison.search import FIRST_LOOK, FUTILE
from anyk.lab.statistics import SIGNIFICANT, contrast, two_way

SIZES = (100, 1_000, 10_000, 100_000)
SEEDS = (3, 5, 10)
#: tests in a default comparison, three losses against softmax in top-1 and top-5: what Holm's first step divides by
TESTS = 6
GROUP = 10
FOUND = 0.8
OUT = Path(__file__).with_suffix(".md")

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """What was measured on real runs."""

    name: str
    accuracy: float
    disagreement: float
    """of two runs of one loss with different seeds: how many examples only one of them hits"""
    seeds: float
    """the standard deviation of the accuracy over the seeds that is not the luck of single examples"""
    views: float
    """the standard deviation over the examples of what one loss hits more often than the other"""
    paired: float
    """how often runs of two losses with one seed decide an example together: 1 - their disagreement over that of two seeds"""

    @cached_property
    def quantiles(self) -> Array:
        """The chances of 4096 examples, from hard to easy."""
        normal = ndtri((np.arange(4096) + 0.5) / 4096)

        def misfit(at: NDArray[Any]) -> list[float]:
            chance = expit(at[0] + math.exp(at[1]) * normal)
            return [chance.mean() - self.accuracy, 2 * (chance * (1 - chance)).mean() - self.disagreement]

        solved = least_squares(misfit, (1.0, 1.0)).x
        return expit(solved[0] + math.exp(solved[1]) * normal).astype(np.float32)

    @property
    def seed_shift(self) -> float:
        """By how much a seed moves the logits, that the accuracy moves so much."""
        return self.seeds / (self.disagreement / 2)

    @property
    def view_shift(self) -> float:
        """By how much a loss moves the logits of single examples."""
        slopes = self.quantiles * (1 - self.quantiles)
        return self.views / math.sqrt(2 * float((slopes**2).mean()))


EMBEDDINGS = Kind("linear head on embeddings, top-1", 0.612, 0.061, 0.0013, 0.048, 0.72)
SCRATCH = Kind("network from scratch, top-1", 0.781, 0.170, 0.0070, 0.020, 0.41)
SCRATCH_5 = Kind("network from scratch, top-5", 0.971, 0.030, 0.0020, 0.007, 0.34)
#: what is simulated; the costly ones once
PLAN = (
    (EMBEDDINGS, "itself", SIZES),
    (EMBEDDINGS, "as good", SIZES),
    (SCRATCH, "itself", SIZES),
    (SCRATCH, "as good", SIZES),
    (SCRATCH, "in groups", SIZES),
    (SCRATCH_5, "itself", SIZES[:3]),
    (SCRATCH_5, "as good", SIZES[:3]),
)


def draw(kind: Kind, case: str, examples: int, seeds: int, chance: np.random.Generator) -> tuple[NDArray[Any], Any]:
    """The d(i, s) of one comparison without a difference, (S, N); and the groups of the examples."""

    def normal(*shape: int) -> Array:
        return chance.standard_normal(shape, dtype=np.float32)

    groups = None
    if case == "in groups":
        groups = np.sort(chance.integers(examples // GROUP, size=examples))
        # Half of what makes an example hard is its group.
        rank = ndtr((normal(examples) + normal(groups.max() + 1)[groups]) / np.float32(math.sqrt(2)))
        p = kind.quantiles[(rank * len(kind.quantiles)).astype(int).clip(max=len(kind.quantiles) - 1)]
    else:
        p = kind.quantiles[chance.integers(len(kind.quantiles), size=examples)]
    slope, together = p * (1 - p), 0.0 if case == "itself" else kind.paired
    common = normal(seeds, 1) * math.sqrt(together)
    both = []
    for _ in range(2):
        shift = kind.seed_shift * (common + normal(seeds, 1) * math.sqrt(1 - together))
        if case != "itself":
            own = normal(examples) if groups is None else normal(groups.max() + 1)[groups]
            shift = shift + kind.view_shift * own
        if groups is not None:
            shift = shift + kind.view_shift * np.take(normal(seeds, groups.max() + 1), groups, axis=1)
        both.append(np.clip(p + slope * shift, 0, 1))
    first, second = both
    gains, losses = (
        together * np.maximum(a - b, 0) + (1 - together) * a * (1 - b) for a, b in ((first, second), (second, first))
    )
    at = chance.random((seeds, examples), dtype=np.float32)
    return (at < gains).view(np.int8) - (at > 1 - losses).view(np.int8), groups


class Cell:
    """The comparisons of one kind, case and size."""

    def __init__(self) -> None:
        self.verdicts = 0
        self.alone: list[float] = []
        """the gain that would have been found, of each comparison"""
        self.in_family: list[float] = []
        """the same where it is one of several tests"""
        self.stopped = 0
        """how many ended at a look"""

    def add(self, d: NDArray[Any], groups: Any, look: int | None = None) -> None:
        counted = contrast("method", "itself", "top1", d, groups)
        found = two_way(counted)
        first = None if look is None else contrast("method", "itself", "top1", d[:look], groups)
        p = found.p if first is None else two_way(first).p
        stopped = first is not None and (p is None or p >= FUTILE)
        self.stopped += stopped
        self.verdicts += not stopped and found.p is not None and found.p < SIGNIFICANT
        for gains, level in ((self.alone, SIGNIFICANT), (self.in_family, SIGNIFICANT / TESTS)):
            # To be found, it must get past the look, too.
            gains.append(max(_needed(counted, level), _needed(first, FUTILE) if first is not None else -math.inf))


def _needed(counted: Any, level: float) -> float:
    """The gain that would be found. One that is spread evenly moves the difference and hardly its interval: it is found if the
    lower end is above 0."""
    found = two_way(counted, 1 - level)
    return math.inf if found.high is None else found.high - 2 * found.difference


def simulate(kind: Kind, case: str, examples: int, comparisons: int) -> dict[int, Cell]:
    """Cells by the number of seeds; 0: five with a look. Fewer seeds are the first of many: the cells are not independent of
    each other."""
    cells = {seeds: Cell() for seeds in (*SEEDS, 0)}
    chance = np.random.Generator(np.random.SFC64([examples, *f"{kind.name} {case}".encode()]))
    for _ in range(comparisons):
        d, groups = draw(kind, case, examples, max(SEEDS), chance)
        for seeds, cell in cells.items():
            cell.add(d[: seeds or 5], groups, None if seeds else FIRST_LOOK)
    return cells


def found_gain(gains: list[float]) -> str:
    """The gain that is found in most of the comparisons, in points."""
    gain = sorted(gains)[math.ceil(FOUND * len(gains)) - 1]
    return "–" if math.isinf(gain) else f"{100 * gain:.1f}" if gain > 0.01 else f"{100 * gain:.2f}"


def report(comparisons: int) -> str:
    """The tables."""
    simulated = {
        (kind.name, case): {examples: simulate(kind, case, examples, comparisons) for examples in sizes}
        for kind, case, sizes in PLAN
    }
    header = [f"{examples:,} examples" for examples in SIZES]

    def row(cells: dict[int, dict[int, Cell]], tell: Callable[[Cell], str]) -> list[str]:
        return [" / ".join(tell(cell) for cell in cells[size].values()) if size in cells else "" for size in SIZES]

    false = [
        [case, kind, *row(cells, lambda cell: f"{100 * cell.verdicts / comparisons:.1f}")]
        for (kind, case), cells in simulated.items()
    ]
    power = [
        [kind, tests, *row(cells, tell)]
        for (kind, case), cells in simulated.items()
        for tests, tell in (("one", lambda cell: found_gain(cell.alone)), (f"{TESTS}", lambda cell: found_gain(cell.in_family)))
        if case == "as good"
    ]
    error = 100 * math.sqrt(SIGNIFICANT * (1 - SIGNIFICANT) / comparisons)
    every = [each for cells in simulated.values() for each in cells.values()]
    rates = [cell.verdicts / comparisons for each in every for cell in each.values()]
    stopped = statistics.mean(each[0].stopped / comparisons for each in every)
    return f"""# What the lab's verdict finds where there is nothing, and where there is something

By `python benchmarks/verdict_error_rates.py`, which says how the runs are simulated. {comparisons:,} comparisons for each size.

## False verdicts

Percent of the comparisons of two equally good methods that end with a difference, in either direction, at the level of 5 %;
with 3 / 5 / 10 seeds / 5 with a look after {FIRST_LOOK}, as by default. Two seeds give no verdict. A rate of 5 % has a
standard error of {error:.1f} here. All {len(rates)} together: {100 * statistics.mean(rates):.1f} %, the largest
{100 * max(rates):.1f} %. Of the last kind, {100 * stopped:.0f} % end at the look.

{markdown_table(["the other method is", "runs", *header], false)}

## Gains that are found

The gain, in points of the metric, that is found in {100 * FOUND:.0f} % of the comparisons; with 3 / 5 / 10 seeds / 5 with a
look. One test, or the first of Holm's {TESTS} (three losses, two metrics). Where there is none, too few examples differ.

{markdown_table(["runs", "tests", *header], power)}
"""


def calibrate(data: str, epochs: int, folder: Path) -> None:
    """Train, and print what a Kind holds."""
    from anyk.lab.run.config import Config
    from anyk.lab.run.run_folder import Run
    from anyk.lab.run.training import train

    ranks: dict[str, NDArray[Any]] = {}
    for loss in ("softmax", "error", "splitter"):
        each = []
        for seed in range(1, 7):
            train(Config(data=data, loss=loss, seed=seed, epochs=epochs), folder / f"{loss}-{seed}")
            tensors, _ = Run(folder / f"{loss}-{seed}").load_tensors("test.safetensors", ["ranks"]) or ({}, {})
            each.append(tensors["ranks"].numpy())
        ranks[loss] = np.stack(each)
    for k in (1, 5):
        hits = {loss: (each <= k).astype(float) for loss, each in ranks.items()}
        base = hits["softmax"]
        count, examples = base.shape
        mean = base.mean(0)
        disagreement = float(2 * (mean * (1 - mean)).mean() * count / (count - 1))
        luck = disagreement / 2 / examples
        views, paired = [], []
        for loss in ("error", "splitter"):
            d = hits[loss] - base
            rest = d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()
            noise = (rest**2).sum() / ((count - 1) * (examples - 1))
            views.append(math.sqrt(max(0.0, d.mean(0).var(ddof=1) - noise / count)))
            paired.append(1 - float((d != 0).mean()) / disagreement)
        seeds = math.sqrt(max(0.0, base.mean(1).var(ddof=1) - luck))
        print(
            f"{data}, top-{k}: {base.mean():.3f}, {disagreement:.3f}, {seeds:.4f}, "
            f"{statistics.mean(views):.3f}, {statistics.mean(paired):.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--calibrate", nargs=3, metavar=("DATA", "EPOCHS", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.calibrate:
        data, epochs, folder = arguments.calibrate
        calibrate(data, int(epochs), Path(folder))
        return 0
    arguments.out.write_text(report(arguments.comparisons), encoding="utf-8")
    return quote.main([]) if arguments.out == OUT else 0


if __name__ == "__main__":
    raise SystemExit(main())
