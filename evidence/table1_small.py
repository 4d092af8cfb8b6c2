"""Table 1 of the paper in small: do its signs come out, and what is left of them with label smoothing on both sides?

    python evidence/table1_small.py --data FILE.npz --runs RUNS --jobs 2
    python evidence/table1_small.py

FILE.npz has CIFAR-100 at 16 px, as an array file; without it, the tables are written from the runs that are there. What is
trained is `anyk reproduce table1-small`, in another order: seed by seed, SinkhornSort last. A run that has ended is in
evidence/summaries/table1-small.jsonl and is not made again, on another machine either; the command may be killed at any
moment. Some 19 hours of a core.

Written before the runs:

What is trained. The paper's protocol (Adam at a constant 10^-3, batches of 100, no label smoothing, crops and flips, the best
epoch on validation for each metric by itself, the paper's P_K and temperatures), in a size for two cores: images of 16 px,
ResNet18 at a quarter of its width, up to 60 epochs, the end when no metric has improved for 10. Five seeds. Nothing is tuned,
as in the paper. Then softmax, NeuralSort, SoftSort, SinkhornSort and DiffSortNets with the mixed P_K once more, all with label
smoothing 0.1. A run that diverges counts as guessing.

What is asked. 1. Of the paper's 18 differences to softmax (nine rows, two metrics), how many have the same sign here? A
difference is *sure* if the p of the paired t test over the seeds is below 0.05 after Holm's correction over all 18; a sign is
*contradicted* if the difference is sure and the other way. 2. With label smoothing on both sides: the eight differences to
softmax with smoothing, tested in the same way, as a family of their own.

Changed since: see AMENDMENT.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scipy.stats

from anyk.lab.engines.engine import Outcome, Task
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError, Stopped
from anyk.lab.files import write_atomically
from anyk.lab.paper import numbers
from anyk.lab.paper.experiments import experiment
from anyk.lab.paper.numbers import Cell
from anyk.lab.run.config import Config
from anyk.lab.statistics import holm, mean
from anyk.lab.tables import signed

ROOT = Path(__file__).parents[1]
SUMMARY = ROOT / "evidence" / "summaries" / "table1-small.jsonl"
TABLE = ROOT / "evidence" / "tables" / "table1-small.md"
METRICS = ("top1", "top5")
SURE = 0.05
AMENDMENT = (
    "Cut for time: SinkhornSort, which takes three times as long as the others, has no row with smoothing (which leaves six "
    "differences there) and three seeds, decided after nine runs of other methods. For a while the plan had one seed of it; "
    "three again was decided before any of its runs had ended."
)
CELLS = experiment("table1-small").cells
LIMIT = numbers.REGIMES["cifar100-16px"].config.epochs
#: which method is trained first: the expensive ones come last
ORDER = ("softmax", "diffsortnets", "softsort", "neuralsort", "smooth", "sinkhorn")

Results = Mapping[str, Mapping[str, Any]]


def in_order(configs: Mapping[str, Config]) -> list[str]:
    """The runs, seed by seed, those of SinkhornSort, which take three times as long, last."""
    cells = {cell.name: cell for cell in CELLS}

    def place(name: str) -> tuple[bool, int, bool, int]:
        cell = cells[name.rpartition("-seed")[0]]
        return cell.method == "sinkhorn", configs[name].seed, cell.p_k == numbers.TOP5, ORDER.index(cell.method)

    return sorted(configs, key=place)


def read(path: Path = SUMMARY) -> dict[str, dict[str, Any]]:
    """The runs that have ended, by name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line.pop("name"): line for line in map(json.loads, lines)}


def write(results: Results, path: Path = SUMMARY) -> None:
    lines = [json.dumps({"name": name, **results[name]}, sort_keys=True) for name in sorted(results)]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def run(data: str, folder: Path, jobs: int, path: Path = SUMMARY, **changes: Any) -> None:
    """Make the runs that are missing; ``changes`` are for rehearsals."""
    configs = {name: config.replace(**changes) for name, config in experiment("table1-small").configs(data).items()}
    results = read(path)
    for name in results:
        if name not in configs:
            raise LabError(f"{name} in {path} is not in the plan: move the file away, or take this line out.")
        if results[name]["config"] != shared(configs[name]):
            raise LabError(f"{name} in {path} was trained by another config: move the file away.")

    def make(name: str) -> Task[None]:
        outcome = (yield {folder / name: configs[name]})[folder / name]
        if outcome == Outcome():
            raise Stopped
        if outcome.result is None and not outcome.diverged:
            raise LabError(f"{name}: {outcome.error}")
        # What diverged guesses, and is not tried again.
        guesses = {"epochs": 0.0, "seconds": 0.0, "selected": {}, "test": {"top1": 0.01, "top5": 0.05}, "diverged": True}
        found = outcome.result or guesses
        kept = {field: found[field] for field in guesses if field in found}
        results[name] = {**kept, "config": shared(configs[name])}
        write(results, path)
        print(name, kept["test"], f"{kept['seconds']:.0f} s", file=sys.stderr, flush=True)

    with Pool(jobs) as pool:
        pool.run_tasks([make(name) for name in in_order(configs) if name not in results])


def shared(config: Config) -> str:
    """What must be the same on every machine: all of the config but the place of the data."""
    fields = {name: value for name, value in config.to_json().items() if name != "data"}
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=6).hexdigest()


# Tables --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """To softmax with the same label smoothing, in percent points, over the seeds that both have."""

    cell: Cell
    metric: str
    ours: float
    paper: float | None
    whole: bool
    """whether all seeds are there"""
    p: float | None = None
    """after Holm"""

    @property
    def sure(self) -> bool:
        return self.p is not None and self.p < SURE

    @property
    def text(self) -> str:
        return f"**{signed(self.ours)}**" if self.sure else signed(self.ours)


def values(cell: Cell, metric: str, results: Results) -> dict[int, float]:
    """A metric by seed, in percent."""
    marks = {name.removeprefix(f"{cell.name}-seed"): name for name in results if name.startswith(f"{cell.name}-seed")}
    return {int(seed): 100 * results[name]["test"][metric] for seed, name in marks.items()}


def paper_difference(cell: Cell, metric: str) -> float | None:
    """What a method gains on softmax in the paper."""
    place = METRICS.index(metric)
    own, softmax = cell.paper[place], CELLS[0].paper[place]
    return None if own is None or softmax is None else own - softmax


def differences(results: Results, smoothed: bool) -> list[Difference]:
    """One family of tests: the rows without label smoothing, or those with it."""
    softmax, *cells = (cell for cell in CELLS if bool(cell.label_smoothing) == smoothed)
    found: list[Difference | None] = []
    p_values: list[float] = []
    for cell in cells:
        for metric in METRICS:
            ours, base = values(cell, metric, results), values(softmax, metric, results)
            each = [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]
            # Tested when all seeds are there, and not at each look. What is missing counts in the correction.
            whole = len(each) == cell.seeds
            found.append(Difference(cell, metric, mean(each), paper_difference(cell, metric), whole) if each else None)
            # There is no test where nothing differs: both may have diverged on every seed.
            tested = whole and any(each)
            p_values.append(float(scipy.stats.ttest_1samp(each, 0).pvalue) if tested else 1.0)
    tested = zip(found, holm(p_values), strict=True)
    return [dataclasses.replace(one, p=p if one.whole else None) for one, p in tested if one]


def signs(found: Sequence[Difference], paper: int) -> tuple[int, int, int]:
    """Of the paper's gains (1) or losses (-1): of how many there are runs, how many come out, and how many are significantly
    the other way."""
    known = [paper * one.ours for one in found if one.paper is not None and one.paper * paper > 0]
    contradicted = sum(one.sure and one.ours * paper < 0 < (one.paper or 0) * paper for one in found)
    return len(known), sum(ours > 0 for ours in known), contradicted


def rows(results: Results, smoothed: bool) -> list[tuple[str, ...]]:
    """Of each method its name, what P_K trains for, what it has or gains, the same in the paper, the seeds."""
    found = {(one.cell.name, one.metric): one for one in differences(results, smoothed)}
    told = []
    for cell in CELLS:
        if bool(cell.label_smoothing) != smoothed:
            continue
        trained = {numbers.TOP1: "top-1", numbers.TOP5: "top-5"}.get(cell.p_k, "top-1 to 5")
        seeds = len(values(cell, "top1", results))
        if cell.method == "softmax":
            own = [list(values(cell, metric, results).values()) for metric in METRICS]
            pair = [both(each and f"{mean(each):.2f}" for each in own), both(one and f"{one:.2f}" for one in cell.paper)]
            told.append((numbers.METHODS[cell.method], trained, *(f"{words} %" for words in pair), str(seeds)))
            continue
        own = [found.get((cell.name, metric)) for metric in METRICS]
        gains = [paper_difference(cell, metric) for metric in METRICS]
        ours = both(one.text if one else None for one in own)
        paper = both(None if gain is None else signed(gain) for gain in gains)
        told.append((numbers.METHODS[cell.method], trained, ours, paper, str(seeds)))
    return told


def both(words: Iterable[object]) -> str:
    """Top-1 | top-5, a dash for what is not known."""
    return " \\| ".join(str(word or "–") for word in words)


def table(results: Results, smoothed: bool) -> list[str]:
    """In Markdown, top-1 | top-5."""
    head = ["method", "trained for", "here", "the paper", "seeds"]
    lines = [head, [":--", ":--", "--:", "--:", "--:"], *rows(results, smoothed)]
    if smoothed:  # the paper has none
        lines = [[*line[:3], line[4]] for line in lines]
    return [f"| {' | '.join(line)} |" for line in lines]


def sentence(results: Results) -> str:
    """The answer to the first question."""
    found = differences(results, False)
    (gains, gained, against), (losses, lost, turned) = (signs(found, paper) for paper in (1, -1))
    if not found:
        return "Not run yet."
    whole, runs = sum(one.whole for one in found), sum(cell.seeds for cell in CELLS)
    begun = "" if len(results) == runs else f"So far, {len(results)} of {runs} runs; {whole} differences have all seeds. "
    return (
        f"{begun}Of {gains} gains over softmax in the paper, {gained} come out as gains here, and {against} as significant "
        f"losses; of {losses} losses, {lost} come out as losses, and {turned} as significant gains."
    )


def smoothed_sentence(results: Results) -> str:
    """The answer to the second question."""
    found = differences(results, True)
    if not found:
        return "Not run yet."
    below, above = (sum(one.sure and one.ours * sign > 0 for one in found) for sign in (-1, 1))
    told = f"{below} of {len(found)} differences are significant losses, {above} significant gains"
    return f"With label smoothing 0.1 on both sides, {told}."


def page(results: Results) -> str:
    """The whole file."""
    epochs = [run["epochs"] for run in results.values()]
    hours = sum(run["seconds"] for run in results.values()) / 3600
    whole = sum(cell.seeds for cell in CELLS)
    last = sum(each >= LIMIT for each in epochs)
    spent = (
        f"{len(results)} of {whole} runs, {hours:.1f} hours of a core. {last} runs went to the last epoch, {LIMIT}: some "
        "metric had improved within the ten before."
        if results
        else ""
    )
    return "\n".join(
        [
            *("# The paper's table 1 in small", ""),
            "Written by `python evidence/table1_small.py` from `evidence/summaries/table1-small.jsonl`; do not edit. What is",
            "trained and asked was written down in that script before the runs. Images of 16 px, ResNet18 at a quarter of its",
            "width, Adam at a constant 1e-3, no label smoothing, the best epoch for each metric by itself, nothing tuned.",
            *("", AMENDMENT),
            *("", "Softmax in percent, the others as points against it, top-1 | top-5; bold: p < .05 after Holm.", ""),
            *table(results, False),
            *("", sentence(results), spent, ""),
            *("## With label smoothing 0.1 on both sides", ""),
            *table(results, True),
            *("", smoothed_sentence(results), ""),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-100 at 16 px")
    parser.add_argument("--runs", type=Path, help="the run folders")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    try:
        if arguments.data:
            if arguments.runs is None:
                raise LabError("--runs should say where the run folders are.")
            run(arguments.data, arguments.runs, arguments.jobs)
    except (LabError, Stopped) as error:
        sys.exit(str(error) or "stopped")
    TABLE.write_text(page(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
