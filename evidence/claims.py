"""The runs asked by cells, and the paper's claims as contrasts between cells with what the runs say of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import study
from anyk.lab import statistics, tables
from anyk.lab.statistics import SIGNIFICANT, Paired, exceeds
from study import MARGINS, Cell, cell, mix, plain

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
    "splitter-dropin": "splitter",
    "lapsum-dropin": "LapSum",
}
P_K_TITLES = {"softmax": "top-1", "top10": "[.5, 0 …, .5] (10)", "top20": "[.5, 0 …, .5] (20)"}
PAPERS = ("neuralsort", "softsort", "sinkhorn", "bitonic", "splitter")
MIXED = ("half", "quarter", "tenth", "fifth")


def p_k_title(name: str) -> str:
    if name in P_K_TITLES:
        return P_K_TITLES[name]
    weights = study.PKS.get(name) or tuple(float(p) for p in name.split("/"))
    return "[" + ", ".join(f"{p:g}".lstrip("0") or "0" for p in weights) + "]"


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
        found = {config.seed: self.known[each.data].find(config) for config in (each.configs(tuned) if tuned else ())}
        return {seed: run for seed, run in found.items() if run is not None}

    def values(self, each: Cell, metric: str) -> dict[int, float]:
        """The test accuracy by seed. A run whose loss was not finite guesses, so that it cannot pass for missing."""
        runs = self.runs(each)
        if all(run.test for run in runs.values()):
            return {seed: run.test[metric] for seed, run in runs.items()}
        guess = int(metric.removeprefix("top")) / self.known[each.data].head["data"]["classes"]
        return {seed: run.test.get(metric, guess) for seed, run in runs.items()}

    def diverged(self, each: Cell) -> int:
        """How many seeds ended with a loss that was not finite."""
        return sum(not run.test for run in self.runs(each).values())


@dataclass(frozen=True)
class Contrast:
    """On each seed: a weighted sum of a metric over cells."""

    metric: str
    terms: tuple[tuple[float, Cell], ...]

    def paired(self, evidence: Evidence) -> Paired | None:
        """The comparison with zero over the seeds that all the cells have; None where there are fewer than two."""
        terms = [(weight, evidence.values(each, self.metric)) for weight, each in self.terms]
        seeds = sorted(set.intersection(*(set(values) for _, values in terms)))
        if len(seeds) < 2:
            return None
        sums = [math.fsum(weight * values[seed] for weight, values in terms) for seed in seeds]
        return statistics.paired(sums, [0.0] * len(sums))


def difference(metric: str, cells: Sequence[Cell], against: Sequence[Cell]) -> Contrast:
    """The mean over some cells minus the mean over some others."""
    terms = [(1 / len(cells), plain(each)) for each in cells] + [(-1 / len(against), plain(each)) for each in against]
    return Contrast(metric, tuple(terms))


# One contrast -----------------------------------------------------------------------------------------------------------------


def p_of(expected: str, found: Paired, margin: float) -> float:
    """The p of the one-sided test for what is expected.

    "more" and "less" are against no difference, "no less", "no more" and "same" against a difference of the margin.

    >>> found = Paired(-0.001, 5, -0.004, 0.002, 0.4)
    >>> round(p_of("no less", found, 0.005), 3), round(p_of("less", found, 0.005), 3)
    (0.01, 0.204)
    """
    mirrored = _mirrored(found)
    if expected == "same":
        return max(exceeds(found, -margin), exceeds(mirrored, -margin))
    side = found if expected in ("more", "no less") else mirrored
    return exceeds(side, -margin if expected.startswith("no ") else 0.0)


def _mirrored(found: Paired) -> Paired:
    low, high = (None if bound is None else -bound for bound in (found.high, found.low))
    return Paired(-found.difference, found.count, low, high, found.p, found.reason)


def verdict(expected: str, found: Paired | None, p: float | None, two_sided: float | None, margin: float) -> str:
    """Judge one contrast by its difference, the p of :func:`p_of`, and that of any difference, both corrected.

    >>> verdict("more", Paired(0.01, 5, 0.005, 0.015, 0.001), 0.001, 0.001, 0.003)
    'holds'
    >>> verdict("more", Paired(-0.01, 5, -0.015, -0.005, 0.001), 0.999, 0.001, 0.003)
    'the opposite'
    >>> verdict("no less", Paired(-0.001, 5, -0.0015, -0.0005, 0.01), 0.01, 0.01, 0.003)
    'within the margin'
    """
    if found is None or p is None:
        return "not measured"
    differs = two_sided is not None and two_sided < SIGNIFICANT
    claimed = found if expected in ("more", "no less", "same") else _mirrored(found)
    against = differs and (claimed.difference < 0 or expected == "same")
    if p < SIGNIFICANT:
        # A loss that is sure and small is told apart from none.
        return "within the margin" if against else "holds"
    if against:
        return "the opposite" if expected in ("more", "less") else "does not hold"
    if expected in ("more", "less") and claimed.high is not None and claimed.high < margin:
        return "not seen"
    return "undecided"


# Claims -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """What the paper says, as one contrast or several on each data set.

    ``expected``: see :func:`p_of`. ``every`` tells whether the contrasts belong together, so that all must be as expected
    (the largest p counts); otherwise each is about a method or a P_K by itself (Holm over them).
    """

    text: str
    expected: str
    section: str
    parts: Mapping[str, Mapping[str, Contrast]]
    """by data set, then by what a contrast is about"""
    every: bool = False


@dataclass(frozen=True)
class Judged:
    """A claim on one data set with what was seen: for each part the difference, its p, its verdict; and the sum of it."""

    parts: Mapping[str, tuple[Paired | None, float | None, str]]
    verdict: str


def claims() -> list[Claim]:
    """The paper's claims, in the order of the table."""
    found: list[Claim] = []
    both = tuple(study.SETTINGS)
    operators = study.OPERATORS

    def main(data: str, method: str, p_k: str) -> Cell:
        return cell(data, method, p_k, 10)

    def softmax(data: str) -> Cell:
        return cell(data, "softmax", seeds=10)

    def by_method(
        metric: str, first: str, second: str | None, methods: Sequence[str] = operators
    ) -> dict[str, dict[str, Contrast]]:
        return {
            data: {
                TITLES[m]: difference(metric, [main(data, m, first)], [main(data, m, second) if second else softmax(data)])
                for m in methods
            }
            for data in both
        }

    def pairs(metric: str, p_k: str, methods: Sequence[str], others: Sequence[str]) -> dict[str, dict[str, Contrast]]:
        return {
            data: {
                f"{TITLES[m]} against {TITLES[other]}": difference(metric, [main(data, m, p_k)], [main(data, other, p_k)])
                for m in methods
                for other in others
            }
            for data in both
        }

    for metric in ("top1", "top5"):
        text = f"k from a distribution beats the single k = 5: [.5, 0, 0, 0, .5], {tables.title(metric)}"
        found.append(Claim(text, "more", "main", by_method(metric, "half", "pure")))
    for p_k in ("half", "fifth"):
        text = f"top-5 improves over softmax (the single k = 1): {p_k_title(p_k)}"
        found.append(Claim(text, "more", "main", by_method("top5", p_k, None)))
    for p_k in ("half", "fifth"):
        text = f"top-1 does not suffer against softmax: {p_k_title(p_k)}"
        found.append(Claim(text, "no less", "main", by_method("top1", p_k, None)))
    found.append(Claim("pure top-5 costs top-1 everywhere", "less", "main", by_method("top1", "pure", None)))
    hard, soft = ("neuralsort", "softsort"), ("sinkhorn", "bitonic", "splitter")
    text = "pure top-5 costs NeuralSort and SoftSort the most top-1: each against Sinkhorn, bitonic, splitter"
    found.append(Claim(text, "less", "main", pairs("top1", "pure", hard, soft), every=True))
    text = "pure top-5 costs Sinkhorn the least top-1: against each other method of the paper"
    others = [m for m in PAPERS if m != "sinkhorn"]
    found.append(Claim(text, "more", "main", pairs("top1", "pure", ["sinkhorn"], others), every=True))

    embeddings = "embeddings"
    # The slope over the weights 0, .2, .4, .6, told as the rise from 0 to .6.
    weights = {0.0: -0.9, 0.2: -0.3, 0.4: 0.3, 0.6: 0.9}

    def at(method: str, alpha: float) -> Cell:
        return cell(embeddings, method, mix(alpha)) if alpha else cell(embeddings, "softmax")

    rises = {
        TITLES[m]: Contrast("top1", tuple((weight, plain(at(m, alpha))) for alpha, weight in weights.items()))
        for m in study.ALPHA_METHODS
    }
    text = "top-1 rises with the top-5 weight up to about 60 %: the slope from 0 to .6"
    found.append(Claim(text, "more", "alpha", {embeddings: rises}))
    falls = {TITLES[m]: difference("top1", [at(m, 1.0)], [at(m, 0.6)]) for m in study.ALPHA_METHODS}
    found.append(Claim("top-1 falls after that: weight 1 against .6", "less", "alpha", {embeddings: falls}))

    def drop(data: str, method: str, sign: float) -> list[tuple[float, Cell]]:
        terms = [(sign / 3, cell(data, method, p_k)) for p_k in MIXED[1:]]
        return [*terms, (-sign, cell(data, method, "half"))]

    robust = {
        data: {
            f"{TITLES[m]} against {TITLES[other]}": Contrast("top1", (*drop(data, m, 1.0), *drop(data, other, -1.0)))
            for m in soft
            for other in hard
        }
        for data in both
    }
    text = "Sinkhorn and networks are the most robust: they lose less top-1 from [.5, 0, 0, 0, .5] to the other mixed P_K"
    found.append(Claim(text, "more", "p_k", robust, every=True))
    for metric in ("top1", "top5"):
        beats = {
            data: {
                p_k_title(p_k): difference(metric, [cell(data, "softsort", p_k)], [cell(data, "neuralsort", p_k)])
                for p_k in MIXED
            }
            for data in both
        }
        found.append(Claim(f"SoftSort beats NeuralSort: {tables.title(metric)}", "more", "p_k", beats))
    for metric in ("top1", "top5"):
        matches = {
            data: {
                p_k_title(p_k): difference(metric, [main(data, "splitter", p_k)], [main(data, "bitonic", p_k)])
                for p_k in ("half", "fifth", "pure")
            }
            for data in both
        }
        text = f"splitter networks match full sorting (bitonic): {tables.title(metric)}"
        found.append(Claim(text, "no less", "main", matches))
    ranked = ("sinkhorn", "neuralsort", "splitter", "lapsum")
    for metric in ("top1", "top5"):
        little = {
            TITLES[m]: difference(metric, [cell(embeddings, m, "quarter", m=40)], [cell(embeddings, m, "quarter", m=10)])
            for m in ranked
        }
        text = f"m between 10 and 40 matters little: 40 against 10, {tables.title(metric)}"
        found.append(Claim(text, "same", "m", {embeddings: little}))
    for p_k, metrics in (("top10", ("top1", "top5")), ("top20", ("top1", "top5", "top20"))):
        for metric in metrics:
            pays = {
                TITLES[m]: difference(metric, [cell(embeddings, m, p_k, m=40)], [cell(embeddings, m, "half", m=40)])
                for m in ranked[1:]
            }
            text = f"{tables.title(p_k)} components do not pay, beside top-5 components: {tables.title(metric)}"
            found.append(Claim(text, "no more", "top20", {embeddings: pays}))
    return found


def judge(claim: Claim, data: str, evidence: Evidence) -> Judged:
    """What the runs of one data set say of a claim."""
    margin = MARGINS[data]
    contrasts = claim.parts[data]
    found = {name: contrast.paired(evidence) for name, contrast in contrasts.items()}
    raw = [None if one is None else p_of(claim.expected, one, margin) for one in found.values()]
    two_sided = [None if one is None else one.p for one in found.values()]
    if not claim.every:
        raw, two_sided = statistics.holm(raw), statistics.holm(two_sided)
    parts = {
        name: (one, p, verdict(claim.expected, one, p, any_side, margin))
        for (name, one), p, any_side in zip(found.items(), raw, two_sided, strict=True)
    }
    return Judged(parts, _together([word for _, _, word in parts.values()], claim.every))


def _together(words: Sequence[str], every: bool) -> str:
    """One verdict of several.

    >>> _together(["holds", "holds", "the opposite"], every=False)
    'holds for 2 of 3, the opposite for 1'
    >>> _together(["holds", "holds", "undecided"], every=True)
    'undecided'
    >>> _together(["holds", "not measured"], every=False)
    'holds for 1 of 1 (1 not measured)'
    """
    there = [word for word in words if word != "not measured"]
    if not there or (every and len(there) < len(words)):
        return "not measured"
    missing = f" ({len(words) - len(there)} not measured)" if len(there) < len(words) else ""
    kinds = list(dict.fromkeys(there))
    if len(kinds) == 1 and not missing:
        return {"the opposite": "does not hold: the opposite"}.get(kinds[0], kinds[0])
    if every:
        bad = [kind for kind in ("the opposite", "does not hold") if kind in kinds]
        return "does not hold" if bad else "undecided"
    order = ("holds", "within the margin", "does not hold", "the opposite", "not seen", "undecided")
    counts = [(kind, there.count(kind)) for kind in order if kind in there]
    (first, count), *rest = counts
    told = [f"{first} for {count} of {len(there)}", *(f"{kind} for {number}" for kind, number in rest)]
    return ", ".join(told) + missing
