"""Write docs/results.md and its figures from the summaries in the repository.

    python evidence/write.py          # or: make evidence

Nothing is trained here and no data are needed. A cell without runs is shown as missing, a claim without its runs as not
measured.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import study
from anyk import networks
from anyk.lab import report, statistics
from anyk.lab.recipes import Recipe
from anyk.lab.report import Column, Difference, Measured, Table
from study import Cell, cell, mix

ROOT = Path(__file__).resolve().parent.parent
#: a difference in accuracy that nobody would mind: 0.3 points
MARGIN = 0.003
COMMAND = "python evidence/study.py run --data embeddings=FOLDER --runs RUNS"
TITLES = {
    "softmax": "softmax",
    "smooth": "smooth top-k",
    "neuralsort": "NeuralSort",
    "softsort": "SoftSort",
    "sinkhorn": "SinkhornSort",
    "bitonic": "network, bitonic",
    "splitter": "network, splitter",
    "lapsum": "LapSum",
    "ksubset": "KSubset",
    "splitter-art": "network, splitter (logistic_art)",
}
P_K_TITLES = {"softmax": "top-1", "top10": "[.5, 0 …, .5] (10)", "top20": "[.5, 0 …, .5] (20)"}
PAPERS_OPERATORS = ("neuralsort", "softsort", "sinkhorn", "bitonic", "splitter")


def paragraph(text: str) -> list[str]:
    """Lines of a width that is read with ease."""
    return textwrap.wrap(" ".join(text.split()), 125, break_long_words=False, break_on_hyphens=False)


INTRODUCTION = paragraph(
    """Written by `make evidence` from the run summaries in `evidence/summaries`; do not edit. What is planned and how it is run
    is in `evidence/study.py`. A run is found by its recipe, so the command goes on where it stopped:"""
)
METHOD = paragraph(
    """Each method is tuned once on each data set, on validation, with the same number of runs: the learning rate and the
    temperature, so far as it has them to choose (the values stand at the end). P_K is [.5, 0, 0, 0, .5] then, k = 5 for
    smooth top-k; what was found serves every other P_K. Then come seeds that the tuning has not seen. The epoch is chosen on
    validation by the mean of top-1 and top-5. All numbers are test accuracies in percent, mean ± standard deviation over the
    seeds. Differences are taken on the same seeds; p is of the paired t-test, after Holm's correction over the table. What
    this cannot tell: another data set, another architecture."""
)
CHANGES = paragraph(
    """Changed after a look at first results, test accuracies among them: on glyphs the tuning began with one seed for
    each point and a learning rate for each method; LapSum and the splitter then got half of softmax's rate, in turn,
    by differences within noise (LapSum lost 1.7 points of top-1 with it, four seeds), so the tuning got three seeds
    and softmax's rate for all. The small m with P_K = [.5, 0, 0, 0, .5], and LapSum in the sweep of the weight, were
    added after the sweep of m had begun: read these as found by search, to be confirmed."""
)
VERDICTS = paragraph(
    f"""An effect is the mean over the methods on each seed, with the paired t-test over the seeds and Holm's correction over
    the claims of the data set. *Methods alike*: how many of the methods by themselves differ to the same side. *holds*:
    significant to the claimed side, or, for claims of no difference or no loss, the interval lies within {100 * MARGIN:g}
    points. *not seen*: not significant, and the interval excludes {100 * MARGIN:g} points. *undecided*: the interval is too
    wide. Sinkhorn's iterations and the networks' cost are further down, under *Measured beside the runs*."""
)


class Evidence:
    """The summaries of all data sets, asked by cells."""

    def __init__(self, folder: Path = study.SUMMARIES) -> None:
        self.known = {name: study.read(name, folder) for name in study.SETTINGS}
        path = folder / "measured.json"
        self.measured: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.tuning = lru_cache(maxsize=None)(lambda data, method: study.tuning(data, method, self.known[data]))
        self.runs = lru_cache(maxsize=None)(self._runs)

    def _runs(self, each: Cell) -> dict[int, study.Summary]:
        """What a cell has of its runs, by seed."""
        tuned = self.tuning(each.data, each.method).best
        found = {recipe.seed: self.known[each.data].find(recipe) for recipe in (each.recipes(tuned) if tuned else ())}
        return {seed: run for seed, run in found.items() if run is not None}

    def values(self, each: Cell, metric: str) -> dict[int, float]:
        """The test accuracy by seed."""
        return {seed: run.test[metric] for seed, run in self.runs(each).items() if metric in run.test}

    def diverged(self, each: Cell) -> int:
        """How many seeds ended with a loss that was not finite."""
        return sum(not run.test for run in self.runs(each).values())


# Contrasts and claims ------------------------------------------------------------------------------------------------------

Side = Sequence[Cell]


@dataclass(frozen=True)
class Contrast:
    """On each seed: the mean of a metric over some cells, minus the mean over some others."""

    metric: str
    cells: Side
    against: Side

    def paired(self, evidence: Evidence) -> statistics.Paired | None:
        """The paired comparison over the seeds that all the cells have; None where there are fewer than two."""
        sides = [[evidence.values(each, self.metric) for each in side] for side in (self.cells, self.against)]
        seeds = sorted(set.intersection(*(set(values) for side in sides for values in side)))
        if len(seeds) < 2:
            return None
        first, second = ([statistics.mean([values[seed] for values in side]) for seed in seeds] for side in sides)
        return statistics.paired(first, second)

    def by_method(self) -> dict[str, Contrast]:
        """The same for each method by itself; a side that has a method of its own is common to all."""
        methods = list(dict.fromkeys(each.method for each in self.cells))

        def own(side: Side, method: str) -> list[Cell]:
            return [each for each in side if each.method == method] or list(side)

        return {method: Contrast(self.metric, own(self.cells, method), own(self.against, method)) for method in methods}

    def measured_part(self, evidence: Evidence) -> Contrast | None:
        """Without the methods that lack runs; None if none is left."""
        there = {name for name, part in self.by_method().items() if part.paired(evidence) is not None}
        mentioned = {each.method for each in self.cells}
        cells = [each for each in self.cells if each.method in there]
        against = [each for each in self.against if each.method in there or each.method not in mentioned]
        return Contrast(self.metric, cells, against) if cells else None


@dataclass(frozen=True)
class Claim:
    """What the paper says, as a contrast. ``expected``: "more", "less", "no less" (by more than the margin), "same"."""

    text: str
    data: str
    contrast: Contrast
    expected: str
    section: str
    each_method: bool = False
    """whether it is about every method by itself, so that a part of them tells something too"""


def verdict(expected: str, found: statistics.Paired | None, p: float | None, margin: float = MARGIN) -> str:
    """Judge a claim by the paired difference and its corrected p.

    >>> verdict("more", statistics.Paired(0.01, 5, 0.005, 0.015, 0.001), 0.003)
    'holds'
    >>> verdict("more", statistics.Paired(-0.01, 5, -0.015, -0.005, 0.001), 0.003)
    'does not hold: the opposite'
    >>> verdict("no less", statistics.Paired(-0.001, 5, -0.002, 0.000, 0.07), 0.07)
    'holds'
    """
    if found is None:
        return "not measured"
    low = found.difference if found.low is None else found.low
    high = found.difference if found.high is None else found.high
    significant = p is not None and p < statistics.SIGNIFICANT
    if expected in ("more", "less"):
        sign = 1 if expected == "more" else -1
        if significant:
            return "holds" if sign * found.difference > 0 else "does not hold: the opposite"
        return "not seen" if max(abs(low), abs(high)) <= margin else "undecided"
    if low > -margin and (expected == "no less" or high < margin):
        return "holds"
    if significant and (found.difference < 0 or expected == "same"):
        return "does not hold"
    return "undecided"


def claims() -> list[Claim]:
    """The paper's claims, in the order of the table."""
    found: list[Claim] = []
    for data in study.SETTINGS:
        softmax = [cell(data, "softmax", seeds=10)]
        half, pure, fifth = ([cell(data, m, p_k, 10) for m in study.OPERATORS] for p_k in ("half", "pure", "fifth"))

        def first(p_k: str, methods: Sequence[str], data: str = data) -> list[Cell]:
            return [cell(data, method, p_k, 10) for method in methods]

        def claim(
            text: str, metric: str, cells: Side, against: Side, expected: str, section: str = "main", data: str = data
        ) -> None:
            each_method = len({each.method for each in cells}) > 3
            found.append(Claim(text, data, Contrast(metric, cells, against), expected, section, each_method))

        for metric in ("top1", "top5"):
            title = report.title(metric)
            claim(f"k from a distribution ([.5, 0, 0, 0, .5]) beats the single k = 5 in {title}", metric, half, pure, "more")
        claim("[.5, 0, 0, 0, .5] improves top-5 over softmax", "top5", half, softmax, "more")
        claim("[.2] * 5 improves top-5 over softmax", "top5", fifth, softmax, "more")
        claim("[.5, 0, 0, 0, .5] does not lose top-1 against softmax", "top1", half, softmax, "no less")
        claim("[.2] * 5 does not lose top-1 against softmax", "top1", fifth, softmax, "no less")
        claim("pure top-5 costs top-1", "top1", pure, softmax, "less")
        claim(
            "pure top-5 costs NeuralSort and SoftSort the most top-1 (against Sinkhorn and networks)",
            "top1",
            first("pure", ("neuralsort", "softsort")),
            first("pure", ("sinkhorn", "bitonic", "splitter")),
            "less",
        )
        claim(
            "pure top-5 costs Sinkhorn the least top-1 (against the paper's other methods)",
            "top1",
            first("pure", ("sinkhorn",)),
            first("pure", ("neuralsort", "softsort", "bitonic", "splitter")),
            "more",
        )
        for alpha in (0.2, 0.4, 0.6):
            claim(
                f"top-1 rises with the top-5 weight up to about 60 %: Sinkhorn, weight {alpha:g} against softmax",
                "top1",
                [cell(data, "sinkhorn", mix(alpha))],
                [cell(data, "softmax")],
                "more",
                "alpha",
            )
        every = ("half", "quarter", "tenth", "fifth", "pure")
        claim(
            "Sinkhorn and networks are the most robust over P_K: top-1 over all five P_K, against NeuralSort and SoftSort",
            "top1",
            [cell(data, m, p_k) for m in ("sinkhorn", "bitonic", "splitter") for p_k in every],
            [cell(data, m, p_k) for m in ("neuralsort", "softsort") for p_k in every],
            "more",
            "p_k",
        )
        for metric in ("top1", "top5"):
            mixed = ("half", "quarter", "tenth", "fifth")
            claim(
                f"SoftSort beats NeuralSort in {report.title(metric)} (four mixed P_K)",
                metric,
                [cell(data, "softsort", p_k) for p_k in mixed],
                [cell(data, "neuralsort", p_k) for p_k in mixed],
                "more",
                "p_k",
            )
        for metric in ("top1", "top5"):
            claim(
                f"the splitter matches full sorting (is no worse than bitonic) in {report.title(metric)}",
                metric,
                [c for p_k in ("half", "fifth") for c in first(p_k, ("splitter",))],
                [c for p_k in ("half", "fifth") for c in first(p_k, ("bitonic",))],
                "no less",
            )
        if data == "embeddings":
            for metric in ("top1", "top5"):
                for m, other in ((40, 10), (25, 16)):
                    claim(
                        f"m between 10 and 40 matters little in {report.title(metric)}: m = {m} against {other}",
                        metric,
                        [cell(data, method, "quarter", m=m) for method in ("splitter", "neuralsort", "lapsum")],
                        [cell(data, method, "quarter", m=other) for method in ("splitter", "neuralsort", "lapsum")],
                        "same",
                        "m",
                    )
            claim(
                "large m is unstable: all 100 classes against m = 16, top-1",
                "top1",
                [cell(data, method, "quarter", m=None) for method in ("splitter", "neuralsort", "lapsum")],
                [cell(data, method, "quarter", m=16) for method in ("splitter", "neuralsort", "lapsum")],
                "less",
                "m",
            )
        else:
            claim(
                "large m is unstable: all 200 classes against m = 16, [.2] * 5, splitter, top-1",
                "top1",
                [cell(data, "splitter", "fifth", m=None)],
                [cell(data, "splitter", "fifth", m=16)],
                "less",
                "m",
            )
        size: dict[str, Any] = {} if data == "glyphs" else {"m": 40}
        for metric in ("top1", "top5", "top20"):
            trio = ("splitter", "neuralsort", "lapsum")
            claim(
                f"top-20 components do not pay in {report.title(metric)} (against top-5 components)",
                metric,
                [cell(data, m, "top20", **size) for m in trio],
                [cell(data, m, "half", **size) for m in trio],
                "less",
                "top20",
            )
    normal = [
        replace(each, contrast=replace(each.contrast, cells=_plain(each.contrast.cells), against=_plain(each.contrast.against)))
        for each in found
    ]
    return sorted(normal, key=lambda each: list(study.SETTINGS).index(each.data))


def _plain(cells: Side) -> list[Cell]:
    """Cells without changes that change nothing."""
    return [
        replace(each, changes=tuple((k, v) for k, v in each.changes if getattr(study.SETTINGS[each.data].recipe, k) != v))
        for each in cells
    ]


@dataclass(frozen=True)
class Judged:
    """A claim with what was seen."""

    claim: Claim
    found: statistics.Paired | None
    p: float | None
    verdict: str
    methods: str
    """how many of the methods by themselves, and of how many that were measured, have a difference of the same sign"""


def judge(evidence: Evidence) -> list[Judged]:
    """All claims; Holm's correction over the claims of a data set."""
    judged = []
    for data in study.SETTINGS:
        family = [each for each in claims() if each.data == data]
        contrasts = [each.contrast.measured_part(evidence) if each.each_method else each.contrast for each in family]
        found = [None if contrast is None else contrast.paired(evidence) for contrast in contrasts]
        corrected = statistics.holm([None if one is None else one.p for one in found])
        for each, contrast, one, p in zip(family, contrasts, found, corrected, strict=True):
            methods = ""
            if each.each_method and contrast is not None and one is not None:
                parts = [part.paired(evidence) for part in contrast.by_method().values()]
                alike = sum(part is not None and part.difference * one.difference > 0 for part in parts)
                planned = len(each.contrast.by_method())
                methods = f"{alike} of {len(parts)}" + (f" ({planned} planned)" if planned > len(parts) else "")
            judged.append(Judged(each, one, p, verdict(each.expected, one, p), methods))
    return judged


# Tables --------------------------------------------------------------------------------------------------------------------


def p_k_title(name: str) -> str:
    if name in P_K_TITLES:
        return P_K_TITLES[name]
    weights = study.PKS.get(name) or tuple(float(p) for p in name.split("/"))
    return "[" + ", ".join(f"{p:g}".lstrip("0") or "0" for p in weights) + "]"


def section_table(
    evidence: Evidence,
    cells: Sequence[Cell],
    baseline: Callable[[Cell], Cell],
    fields: Mapping[str, Callable[[Cell], Any]],
    metrics: Sequence[str] = ("top1", "top5"),
) -> Table:
    """One row a cell: accuracies, and the differences to the cell's baseline on the same seeds, with Holm over the table."""
    tests: list[statistics.Paired | None] = []
    for each in cells:
        other = baseline(each)
        tests += [None if other == each else Contrast(metric, [each], [other]).paired(evidence) for metric in metrics]
    corrected = iter(statistics.holm([None if test is None else test.p for test in tests]))
    pairs = iter(tests)
    rows = []
    for each in cells:
        row: list[Any] = [tell(each) for tell in fields.values()]
        for metric in metrics:
            values = tuple(evidence.values(each, metric).values())
            test, p = next(pairs), next(corrected)
            row += [Measured(values) if values else None, None if test is None else Difference(test, p)]
        seeds = len(evidence.values(each, metrics[0]))
        diverged = evidence.diverged(each)
        row.append(f"{seeds}" + (f" ({diverged} diverged)" if diverged else "") if seeds or diverged else "missing")
        rows.append(tuple(row))
    columns = [Column(name, name, "field") for name in fields]
    for metric in metrics:
        title = report.title(metric)
        columns += [
            Column(metric, title, "accuracy"),
            Column(f"{metric}_difference", f"{title} difference (95 % interval)", "difference"),
        ]
    columns.append(Column("seeds", "seeds", "count"))
    return Table(tuple(columns), tuple(rows))


def grid_table(evidence: Evidence, data: str, p_ks: Sequence[str], methods: Sequence[str]) -> list[str]:
    """The paper's layout: a method in a row, a P_K in a column, top-1 | top-5 in a cell."""
    lines = ["| | " + " | ".join(p_k_title(p_k) for p_k in p_ks) + " |", "| :-- |" + " --: |" * len(p_ks)]
    for method in methods:
        words = []
        for p_k in p_ks:
            each = cell(data, method, p_k, 10)
            top1, top5 = (tuple(evidence.values(each, metric).values()) for metric in ("top1", "top5"))
            own = (method in study.TUNED_WITH) == (p_k == each.p_k and method in study.TUNED_WITH)
            shown = f"{100 * statistics.mean(top1):.2f} / {100 * statistics.mean(top5):.2f}" if top1 and own else "–"
            words.append(shown if not 0 < len(top1) < 5 or not own else f"{shown} ({len(top1)})")
        lines.append(f"| {TITLES[method]} | " + " | ".join(words) + " |")
    return lines


def missing(evidence: Evidence, cells: Sequence[Cell]) -> tuple[int, int]:
    """Runs that are there, and runs that were planned."""
    have = sum(len(evidence.values(each, "top1")) + evidence.diverged(each) for each in cells)
    return have, sum(each.seeds for each in cells)


def markdown(table: Table) -> str:
    """The table, its differences with their confidence intervals."""

    def words(value: Any) -> Any:
        if not isinstance(value, Difference):
            return value
        found = value.paired
        interval = "" if found.low is None or found.high is None else f" ({100 * found.low:+.2f} … {100 * found.high:+.2f})"
        return f"{100 * found.difference:+.2f}{interval}, {report.p_text(value.p)}"

    columns = tuple(replace(each, kind="count") if each.kind == "difference" else each for each in table.columns)
    rows = tuple(tuple(words(value) for value in row) for row in table.rows)
    return report.render(Table(columns, rows, table.notes), "markdown")


def shown(evidence: Evidence, name: str, data: str, table: Table) -> list[str]:
    """A table with what is missing from it; without any run, that alone."""
    told = completeness(evidence, name, data)
    if missing(evidence, study.section(name, data))[0] == 0:
        return [f"### {data.capitalize()}", "", f"No run yet: `{COMMAND} --on {data} --only {name}`", ""]
    return [f"### {data.capitalize()}", "", markdown(table), *([told, ""] if told else [])]


def completeness(evidence: Evidence, name: str, data: str) -> str:
    have, planned = missing(evidence, study.section(name, data))
    if have == planned:
        return ""
    return f"{have} of {planned} runs of this part are there. The others: `{COMMAND} --on {data} --only {name}`"


# Figures -------------------------------------------------------------------------------------------------------------------


Series = Mapping[str, Sequence[tuple[float, Cell]]]


def drawable(evidence: Evidence, series: Series) -> bool:
    """Whether any series has three points of two seeds or more."""
    return any(sum(len(evidence.values(each, "top1")) > 1 for _, each in points) > 2 for points in series.values())


def curves(evidence: Evidence, series: Series, xlabel: str, path: Path, ticks: Mapping[float, str]) -> None:
    """Draw top-1 and top-5 over something, one line a series, with the standard error over the seeds."""
    import matplotlib
    from matplotlib.figure import Figure

    if not drawable(evidence, series):
        path.unlink(missing_ok=True)
        return
    drawn = {}
    for name, points in series.items():
        both = [(x, [list(evidence.values(each, metric).values()) for metric in ("top1", "top5")]) for x, each in points]
        drawn[name] = [(x, values) for x, values in both if len(values[0]) > 1]
    # The same summaries give the same file: no date, and ids that are not random.
    style = {"svg.hashsalt": "anyk", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        for place, metric in enumerate(("top-1", "top-5")):
            axes = figure.add_subplot(1, 2, place + 1)
            for number, (name, points) in enumerate(drawn.items()):
                samples = [values[place] for _, values in points]
                axes.errorbar(
                    [x for x, _ in points],
                    [100 * statistics.mean(sample) for sample in samples],
                    [100 * (statistics.std(sample) or 0.0) / len(sample) ** 0.5 for sample in samples],
                    label=name if place == 0 else None,
                    color=("#0072B2", "#D55E00", "#009E73", "#CC79A7")[number % 4],
                    marker="osD^"[number % 4],
                    markersize=4,
                    capsize=2,
                )
            axes.set_xlabel(xlabel)
            axes.set_ylabel(f"{metric} accuracy in %")
            if ticks:
                axes.set_xticks(list(ticks), list(ticks.values()))
                axes.minorticks_off()
            axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


# The page ------------------------------------------------------------------------------------------------------------------


def page(evidence: Evidence, images: Path | None = None) -> str:
    """The whole of docs/results.md. Figures are drawn to ``images`` if it is given."""
    judged = judge(evidence)
    lines = [
        "# Results on real data",
        "",
        *INTRODUCTION,
        "",
        f"    {COMMAND} --jobs 2",
        "",
        *_settings(evidence),
        *_defaults(evidence),
        *_claims(judged),
        *_main(evidence),
        *_p_k(evidence),
        *_alpha(evidence, images),
        *_sizes(evidence, images),
        *_collapse(evidence),
        *_temperature(evidence),
        *_choices(evidence),
        *_measured(evidence),
        *_tuned(evidence),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _settings(evidence: Evidence) -> list[str]:
    lines = ["## How it was measured", ""]
    for data, setting in study.SETTINGS.items():
        known = evidence.known[data]
        if known.head["data"] is None:
            lines += [f"- **{data}**: no run yet."]
            continue
        recipe, found = setting.recipe, known.head["data"]
        ranked = "all classes ranked" if recipe.m is None else f"m = {recipe.m}"
        own = "".join(f"{TITLES[name]} has {_assignments(fields)} here. " for name, fields in setting.fields.items())
        augmented = f", augmentation {', '.join(recipe.augment)}" if recipe.augment else ""
        model = "a linear head on frozen features" if recipe.model == "linear" else "a small CNN from scratch"
        lines.append(
            f"- **{data}**: {found['name']}, {found['classes']} classes, {found['train']} training, {found['validation']} "
            f"validation and {found['test']} test examples; {model}, Adam, {recipe.schedule} schedule, "
            f"batch {recipe.batch_size}, {recipe.epochs} epochs{augmented}, {ranked}. Tuning: {setting.budget} points of the "
            f"grid, {setting.tuning_seeds} seed{'s' * (setting.tuning_seeds > 1)} each, "
            f"{recipe.but(**setting.tuning).epochs} epochs"
            f"{'' if setting.tunes_rate else '; all methods take the learning rate that was best for softmax'}. "
            f"{own}{len(known.runs)} runs."
        )
    return [*lines, "", *METHOD, "", *CHANGES, ""]


def qualifies(top1: statistics.Paired, top5: statistics.Paired) -> str:
    """Whether a setting may be a default by one data set: it loses no top-1 beyond noise, and gains top-5.

    >>> qualifies(statistics.Paired(-0.001, 5, -0.004, 0.002, 0.4), statistics.Paired(0.004, 5, 0.002, 0.006, 0.01))
    'yes'
    """
    if top1.p is not None and top1.p < statistics.SIGNIFICANT and top1.difference < 0:
        return "no: loses top-1"
    if top5.p is not None and top5.p < statistics.SIGNIFICANT and top5.difference > 0:
        return "yes"
    return "no: loses top-5" if top5.p is not None and top5.p < statistics.SIGNIFICANT else "open: top-5 within noise"


SMALL = (("half", 6), ("half", 8), ("quarter", 6))
DEFAULTS = paragraph(
    """A default should lose no top-1 beyond noise and gain top-5, on both data sets. Differences to softmax on the same seeds;
    here each p stands for itself, without a correction, so that a loss is rather seen than missed (a gain, too: among so many
    rows some are lucky). m is the setting's (16 on embeddings, all classes on glyphs) unless it is named."""
)


def _defaults(evidence: Evidence) -> list[str]:
    lines = ["## Which setting", "", *DEFAULTS, ""]
    heads = [f"{data} {metric}" for data in study.SETTINGS for metric in ("top-1", "top-5")]
    lines += [
        f"| method | P_K | m | {' | '.join(heads)} | {' | '.join(study.SETTINGS)} |",
        "| :-- | :-- | :-- |" + " --: |" * len(heads) + " :-- |" * len(study.SETTINGS),
    ]
    rows: list[tuple[float, str]] = []
    settings = [(method, p_k, {}) for method in (*study.OPERATORS, "splitter-art") for p_k in ("half", "fifth")]
    settings += [(method, mix(alpha), {}) for method in study.ALPHA_METHODS for alpha in (0.2, 0.4)]
    settings += [(method, p_k, {"m": m}) for method in ("splitter", "lapsum") for p_k, m in SMALL]
    for method, p_k, changes in settings:
        words, verdicts, gains = [], [], []
        for data in study.SETTINGS:
            (each,) = _plain([cell(data, method, p_k, 10, **changes)])
            softmax = cell(data, "softmax", seeds=10)
            top1, top5 = (Contrast(metric, [each], [softmax]).paired(evidence) for metric in ("top1", "top5"))
            if top1 is None or top5 is None:
                words += ["–", "–"]
                verdicts.append("not measured")
                continue
            words += [f"{100 * one.difference:+.2f} ({report.p_text(one.p)})" for one in (top1, top5)]
            verdicts.append(qualifies(top1, top5))
            gains.append(top5.difference)
        if gains:
            # First the settings that nothing speaks against, among them those that gain the most where they gain the least.
            order = -min(gains) + sum(one.startswith("no:") for one in verdicts)
            size = f"m = {changes['m']}" if changes else "the setting's"
            rows.append((order, f"| {TITLES[method]} | {p_k_title(p_k)} | {size} | {' | '.join([*words, *verdicts])} |"))
    if not rows:
        return [*lines[:-2], "No main row has been measured yet.", ""]
    return [*lines, *(row for _, row in sorted(rows)), ""]


def _assignments(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


def _claims(judged: Sequence[Judged]) -> list[str]:
    lines = ["## The paper's claims", ""]
    for data in study.SETTINGS:
        lines += [
            f"### On {data}",
            "",
            "| claim | verdict | effect, points | 95 % interval | p | methods alike | seeds |",
            "| :-- | :-- | --: | --: | --: | --: | --: |",
        ]
        for each in (one for one in judged if one.claim.data == data):
            found = each.found
            if found is None:
                command = f"`--on {data} --only {each.claim.section}`"
                lines.append(f"| {_cell(each.claim.text)} | {each.verdict}: {command} | | | | | |")
                continue
            interval = "–" if found.low is None or found.high is None else f"{100 * found.low:+.2f} … {100 * found.high:+.2f}"
            p = report.p_text(each.p)
            words = [_cell(each.claim.text), f"**{each.verdict}**", f"{100 * found.difference:+.2f}", interval, p]
            lines.append(f"| {' | '.join([*words, each.methods, str(found.count)])} |")
        lines.append("")
    return [
        *lines,
        *VERDICTS,
        "",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _titles(each: Cell) -> str:
    return TITLES[each.method]


def _main(evidence: Evidence) -> list[str]:
    lines = ["## Main rows", ""]
    for data in study.SETTINGS:
        table = section_table(
            evidence,
            study.section("main", data),
            lambda each: cell(each.data, "softmax", seeds=10),
            {"method": _titles, "P_K": lambda each: p_k_title(each.p_k)},
        )
        lines += shown(evidence, "main", data, table)
    return lines


def _p_k(evidence: Evidence) -> list[str]:
    p_ks = ("half", "quarter", "tenth", "fifth", "pure")
    lines = [
        "## Distributions",
        "",
        "Top-1 / top-5; in brackets the number of seeds where it is below 5. The layout of the paper's tables 3 and 4.",
        "",
    ]
    for data in study.SETTINGS:
        table = section_table(
            evidence,
            study.section("p_k", data),
            lambda each: cell(each.data, "softmax", seeds=each.seeds),
            {"method": _titles, "P_K": lambda each: p_k_title(each.p_k)},
        )
        head, *rest = shown(evidence, "p_k", data, table)
        lines += [
            head,
            "",
            *grid_table(evidence, data, p_ks, study.OPERATORS),
            "",
            "Against softmax, the P_K that are not among the main rows:",
            *rest,
        ]
    return lines


def _alpha(evidence: Evidence, images: Path | None) -> list[str]:
    lines = ["## The weight of top-5", "", "P_K = [1 - α, 0, 0, 0, α]; α = 0 is softmax. The paper's figure 2, left.", ""]
    for data in study.SETTINGS:
        series = {
            TITLES[method]: [(0.0, cell(data, "softmax")), *((alpha, cell(data, method, mix(alpha))) for alpha in study.ALPHAS)]
            for method in study.ALPHA_METHODS
        }
        name = f"alpha-{data}.svg"
        figure = []
        if images is not None:
            curves(evidence, series, "α, the weight of top-5", images / name, {})
        if drawable(evidence, series):
            figure = ["", f"![top-1 and top-5 over the weight of top-5](images/{name})"]
        table = section_table(
            evidence,
            study.section("alpha", data),
            lambda each: cell(each.data, "softmax"),
            {"method": _titles, "P_K": lambda each: p_k_title(each.p_k)},
        )
        head, *rest = shown(evidence, "alpha", data, table)
        lines += [head, *figure, *rest]
    return lines


def _sizes(evidence: Evidence, images: Path | None) -> list[str]:
    lines = [
        "## The number of ranked classes, m",
        "",
        "On embeddings P_K = [.25, 0, 0, 0, .75], as in the paper's figure 2, right.",
        "",
    ]
    for data in study.SETTINGS:
        cells = study.section("m", data)
        classes = 100 if data == "embeddings" else int(study.SETTINGS[data].recipe.data.partition(":")[2])
        shared = study.SETTINGS[data].recipe.m

        def size(each: Cell, shared: int | None = shared, classes: int = classes) -> int:
            return dict(each.changes).get("m", shared) or classes

        names = list(dict.fromkeys((each.method, each.p_k) for each in cells))
        series = {
            f"{TITLES[method]} {p_k_title(p_k)}": [
                (float(size(each)), each) for each in cells if (each.method, each.p_k) == (method, p_k)
            ]
            for method, p_k in names
        }
        name = f"m-{data}.svg"
        if images is not None:
            sizes = sorted({size(each) for each in cells})
            curves(evidence, series, "m", images / name, {} if len(sizes) > 8 else {float(m): str(m) for m in sizes if m != 6})
        figure = []
        if drawable(evidence, series):
            figure = ["", f"![top-1 and top-5 over m](images/{name})"]
        table = section_table(
            evidence,
            cells,
            lambda each: replace(each, changes=tuple(change for change in each.changes if change[0] != "m")),
            {"method": _titles, "P_K": lambda each: p_k_title(each.p_k), "m": size},
        )
        base = f"m = {shared}" if shared else "all classes"
        head, *rest = shown(evidence, "m", data, table)
        lines += [head, "", f"Differences to {base}.", *figure, *rest]
    return lines


TRUNCATION = paragraph(
    """With m < n the candidates of an example are the classes with its highest scores, and the target among them even where
    it stands far behind. While all scores are nearly equal, as at the start of a training from scratch, the cheapest way down
    is not to raise the target but to make all candidates equal: T_k is then k/m. The scores of all classes run together and the
    hidden units die. The softmax part, which sees all classes, works against it, the more the larger P_K(1) is. An "auto"
    temperature makes it worse: it shrinks with the scores, and the gradient grows. Whether and when a training recovers
    depends on the rest of the setting. Below, the splitter (logistic, temperature 1 unless it says auto) in the lab's own
    setting for glyphs, six epochs (300 classes, batches of 50, learning rate 2e-3, one cycle, one seed). *Spread* is the
    standard deviation of an example's scores, *alive* the share of hidden units that are not zero for the whole batch, *ratio*
    the norm of the top-k part's gradient over that of softmax (with respect to the scores, both unweighted)."""
)


def _collapse(evidence: Evidence) -> list[str]:
    lines = ["## Truncation from scratch", "", *TRUNCATION, ""]
    found = evidence.measured.get("collapse")
    if found is None:
        return [*lines, "Not measured: `python evidence/measure.py collapse`", ""]
    lines += [
        "| P_K | m | temperature | step | spread | alive | ratio | top-5 of the batch |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in found["rows"]:
        title = "[" + ", ".join(f"{p:g}".lstrip("0") or "0" for p in row["p_k"]) + "]"
        for place, step in enumerate(found["steps"]):
            seen = row["seen"]
            words = [
                f"{seen['spread'][place]:g}",
                f"{seen['alive'][place]:.2f}",
                f"{seen['ratio'][place]:g}",
                f"{100 * seen['top5'][place]:.0f} %",
            ]
            first = [title, str(row["m"] or "all"), str(row["temperature"])] if place == 0 else ["", "", ""]
            lines.append(f"| {' | '.join([*first, str(step), *words])} |")
    return [*lines, ""]


def _temperature(evidence: Evidence) -> list[str]:
    lines = [
        "## Temperature",
        "",
        'Multiples of the tuned one, and "auto"; P_K = [.5, 0, 0, 0, .5]. Differences to the tuned one.',
        "",
    ]
    for data in study.SETTINGS:

        def value(each: Cell) -> str:
            tuned = evidence.tuning(each.data, each.method).best
            if dict(each.changes).get("temperature") == "auto":
                return "auto"
            return "" if tuned is None else f"{each.factor:g} × {tuned.temperature:g}"

        table = section_table(
            evidence,
            study.section("temperature", data),
            lambda each: replace(each, factor=1.0, changes=()),
            {"method": _titles, "temperature": value},
        )
        lines += shown(evidence, "temperature", data, table)
    return lines


def _choices(evidence: Evidence) -> list[str]:
    """The small sweeps, all alike."""
    parts: list[tuple[str, str, str, Mapping[str, Callable[[Cell], Any]], Callable[[Cell], Cell], Sequence[str]]] = [
        (
            "swap",
            "Swap",
            "The splitter with logistic_art, tuned by itself, against logistic.",
            {"method": _titles, "P_K": lambda each: p_k_title(each.p_k)},
            lambda each: cell(each.data, "splitter", each.p_k),
            ("top1", "top5"),
        ),
        (
            "wires",
            "Where the classes enter a network",
            'P_K = [.5, 0, 0, 0, .5]. Differences to `wires="target"`.',
            {"method": _titles, "wires": lambda each: dict(each.changes).get("wires", "target")},
            lambda each: replace(each, changes=()),
            ("top1", "top5"),
        ),
        (
            "top1",
            "How the top-1 part is measured",
            'Differences to `top1="separate"`.',
            {
                "method": _titles,
                "P_K": lambda each: p_k_title(each.p_k),
                "top1": lambda each: dict(each.changes).get("top1", "separate"),
            },
            lambda each: replace(each, changes=()),
            ("top1", "top5"),
        ),
        (
            "noise",
            "Label noise",
            "A share of the training labels is replaced. Differences to softmax with the same noise.",
            {
                "method": _titles,
                "P_K": lambda each: p_k_title(each.p_k),
                "noise": lambda each: dict(each.changes).get("label_noise", 0.0),
            },
            lambda each: replace(each, method="softmax", p_k="softmax"),
            ("top1", "top5"),
        ),
        (
            "top20",
            "Top-10 and top-20 components",
            "On embeddings with m = 40. Differences to the method's own top-5 component.",
            {"method": _titles, "P_K": lambda each: p_k_title(each.p_k)},
            lambda each: each if each.method == "softmax" else replace(each, p_k="half"),
            ("top1", "top5", "top20"),
        ),
        (
            "epochs",
            "Longer training",
            "Twice the epochs, all else as tuned: what the settings leave to gain. Differences to the setting's own epochs.",
            {
                "method": _titles,
                "P_K": lambda each: p_k_title(each.p_k),
                "epochs": lambda each: dict(each.changes).get("epochs", study.SETTINGS[each.data].recipe.epochs),
            },
            lambda each: replace(each, changes=()),
            ("top1", "top5"),
        ),
    ]
    lines = []
    for name, title, told, fields, baseline, metrics in parts:
        lines += [f"## {title}", "", told, ""]
        for data in study.SETTINGS:
            table = section_table(evidence, study.section(name, data), baseline, fields, metrics)
            lines += shown(evidence, name, data, table)
    return lines


def _measured(evidence: Evidence) -> list[str]:
    lines = ["## Measured beside the runs", "", "### Sinkhorn's iterations over training", ""]
    found = evidence.measured.get("iterations")
    if found is None:
        lines += ["Not measured: `python evidence/measure.py iterations --data embeddings=FOLDER`", ""]
    else:
        lines += _iterations(found)
    lines += [
        "### What a network costs",
        "",
        "| classes | k | network | comparators | layers |",
        "| --: | --: | :-- | --: | --: |",
    ]
    for n in (16, 100, 1000):
        for name, network in (
            ("splitter", networks.splitter(n, 5)),
            ("bitonic, cut to 5 outputs", networks.bitonic(n).top(5)),
            ("bitonic", networks.bitonic(n)),
        ):
            lines.append(f"| {n} | 5 | {name} | {network.size} | {network.depth} |")
    lines.append("")
    cost = evidence.measured.get("cost")
    if cost is None:
        lines += ["Time: not measured, `python evidence/measure.py cost`", ""]
    else:
        lines += ["Forward and backward of the loss, in turns in one process, one thread; the time of bitonic is 1:", ""]
        lines += ["| batch, n, m | splitter | bitonic | odd-even |", "| :-- | --: | --: | --: |"]
        for row in cost:
            lines.append(
                f"| {row['batch']}, {row['n']}, {row['m'] or 'all'} | {row['splitter']:.2f} | 1 | {row['odd_even']:.2f} |"
            )
        lines.append("")
    return lines


def _iterations(found: Mapping[str, Any]) -> list[str]:
    stages = found["stages"]
    lines = [
        f"Plain Sinkhorn iterations until every row sum is right to {found['tolerance']:g}, at most {found['most']} (mean over "
        f"{found['rows']} validation examples), and the error that {found['fixed']} iterations leave, with the head as it is "
        f"after so many epochs; tuned temperature {found['temperature']:g}, {len(found['seeds'])} seeds.",
        "",
        "| epochs | iterations | error after fixed iterations | spread of the scores |",
        "| --: | --: | --: | --: |",
    ]
    for place, stage in enumerate(stages):
        means = [statistics.mean([seed[name][place] for seed in found["seeds"]]) for name in ("iterations", "error", "spread")]
        lines.append(f"| {stage:g} | {means[0]:.1f} | {means[1]:.2e} | {means[2]:.2f} |")
    test = statistics.paired(
        [seed["iterations"][-1] for seed in found["seeds"]], [seed["iterations"][1] for seed in found["seeds"]]
    )
    judged = "holds" if test.p is not None and test.p < statistics.SIGNIFICANT and test.difference > 0 else "is not seen"
    p = f" ({report.p_text(test.p)})" if test.p is not None else ""
    return [
        *lines,
        "",
        f"From epoch {stages[1]:g} to the last the number of iterations changes by {test.difference:+.1f}{p}: the claim that "
        f"Sinkhorn needs more iterations late in training **{judged}**.",
        "",
    ]


def _tuned(evidence: Evidence) -> list[str]:
    lines = ["## Tuned values", "", "The best of so many tries on validation.", ""]
    lines += ["| data | method | learning rate | temperature | tries |", "| :-- | :-- | --: | --: | --: |"]
    for data in study.SETTINGS:
        for method in study.METHODS:
            tuned = evidence.tuning(data, method)
            if tuned.best is None:
                lines.append(f"| {data} | {TITLES[method]} | not tuned | | {len(tuned.tries)} |")
                continue
            best: Recipe = tuned.best
            warm = f"{best.temperature:g}" if study.criteria.LOSSES[best.loss].has_temperature else "–"
            lines.append(f"| {data} | {TITLES[method]} | {best.learning_rate:g} | {warm} | {len(tuned.tries)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summaries", type=Path, default=study.SUMMARIES)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md")
    arguments = parser.parse_args()
    text = page(Evidence(arguments.summaries), arguments.out.parent / "images")
    arguments.out.write_text(text)


if __name__ == "__main__":
    main()
