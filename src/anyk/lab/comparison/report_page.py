"""report.html, the page of a comparison: one file with everything in it, for a browser without a network.

The template says what is on the page and how it looks; here are the numbers it needs.
"""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from anyk.lab import plots
from anyk.lab.comparison.config import BASELINE
from anyk.lab.comparison.outcome import Comparison, Method, Try
from anyk.lab.comparison.snippet import code
from anyk.lab.comparison.verdict import notes, verdict
from anyk.lab.coverage import SHARES
from anyk.lab.data.tokens import OTHER
from anyk.lab.plots import Mark
from anyk.lab.statistics import CONFIDENCE, SIGNIFICANT, mean
from anyk.lab.tables import Difference, duration, hits, interval, p_text, percent, points, text, title

#: classes that gained, and as many that lost
SHOWN_CLASSES = 10


def render(comparison: Comparison) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("anyk.lab"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"title": title, "hits": hits, "words": _words, "data_uri": _data_uri}
    (headline, *sentences), by_class = verdict(comparison), comparison.by_class
    return environment.get_template("report.html").render(
        comparison=comparison,
        headline=headline,
        sentences=sentences,
        notes=notes(comparison),
        metrics=comparison.metrics,
        rows=_rows(comparison, comparison.metrics),
        others=comparison.others,
        other_rows=_rows(comparison, comparison.others),
        trade=_trade_chart(comparison),
        shares=SHARES,
        coverage=_coverage_chart(comparison),
        curves=_curve_chart(comparison),
        tunings=[grid for method in comparison.methods for grid in _tunings(method)],
        classes=_classes(comparison),
        confusions=sorted(by_class.confusions, key=lambda pair: -pair.before - pair.after) if by_class else [],
        baseline=BASELINE,
        best=comparison.choice.name if comparison.methods else None,
        codes=[(method.name, code(method.config, comparison.data.get("classes"))) for method in comparison.methods]
        if comparison.decided
        else [],
        shown_classes=SHOWN_CLASSES,
        other=OTHER,
        intervals=any(one.paired.low is not None for one in comparison.differences.values()),
        confidence=f"{100 * CONFIDENCE:.0f} %",
    )


def embed(comparison: Comparison) -> str:
    """The page for a cell of a notebook.

    In a frame of its own: the page has rules for a whole document, and a notebook has others. A script, if one ever came into
    the page, would not run in it.
    """
    style = "width: 100%; height: 85vh; min-height: 30rem; border: 0; border-radius: 6px"
    page = html.escape(render(comparison))
    return f'<iframe title="anyk compare" sandbox srcdoc="{page}" style="{style}"></iframe>'


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def _words(value: Any) -> str:
    """A setting as people read it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    return ", ".join(map(_words, value)) or "–" if isinstance(value, (list, tuple)) else text(value, "field")


def _rows(comparison: Comparison, names: Sequence[str]) -> list[dict[str, Any]]:
    """A table: for each method its cells, one for each metric."""
    rows, found = [], comparison.differences
    for method in comparison.all_methods:
        cells = []
        for metric in names:
            cell = {"metric": metric, "value": text(method.measured(metric), "accuracy"), "difference": "", "test": ""}
            difference = found.get((method.name, metric))
            cells.append(cell | (_cell(difference) if difference is not None else {}))
        times = [run.seconds for run in method.runs]
        rows.append({"name": method.name, "cells": cells, "time": duration(mean(times)) if times else "–"})
    return rows


def _cell(one: Difference) -> dict[str, str]:
    """A difference; its interval and p, or why there are none; and whether it is a finding."""
    pair, tested, effect = one.paired, [], ""
    if pair.low is not None and pair.high is not None:
        tested.append(interval(pair.low, pair.high))
    if one.p is not None:
        tested.append(p_text(one.p))
        if one.p < SIGNIFICANT:
            effect = "better" if pair.difference > 0 else "worse"
    gained = "" if pair.hits is None else hits(pair.hits)
    gained = gained and f" ({gained} {'example' if gained[1:] == '1' else 'examples'})"
    return {
        "difference": f"{points(pair.difference)} points{gained}",
        "test": ", ".join(tested) or pair.reason or "",
        "effect": effect,
    }


# Classes -------------------------------------------------------------------------------------------------------------------


class _Change(NamedTuple):
    """The hits on the test examples of a class, added up over the seeds."""

    name: str
    difference: int
    before: int
    after: int
    examples: int


def _classes(comparison: Comparison) -> list[dict[str, Any]]:
    """The classes that gain and those that lose, at the largest k and at 1, the largest differences first."""
    by_class, found = comparison.by_class, []
    if by_class is None:
        return []
    for metric in (metric for metric in _largest_and_first(comparison) if metric in by_class.before):
        columns = zip(by_class.names, by_class.before[metric], by_class.after[metric], by_class.examples, strict=True)
        changes = [_Change(name, new - old, old, new, len(by_class.seeds) * many) for name, old, new, many in columns]
        gains, losses = (
            sorted((one for one in changes if sign * one.difference > 0), key=lambda one: -abs(one.difference))
            for sign in (1, -1)
        )
        hits = [sum(abs(one.difference) for one in side) for side in (gains, losses)]
        summary = f"Classes that gain: {len(gains):,}, by {hits[0]:,} hits. Classes that lose: {len(losses):,}, by {hits[1]:,}."
        found.append({"metric": metric, "gains": gains, "losses": losses, "summary": summary})
    return found


def _largest_and_first(comparison: Comparison) -> list[str]:
    """The metrics of the largest k that is judged, and of 1."""
    largest = max((int(metric.removeprefix("top")) for metric in comparison.judged_metrics), default=1)
    return list(dict.fromkeys((f"top{largest}", "top1")))


#: tries this much below the best have no colour
_COLOURED = 0.05


def _tunings(method: Method) -> list[dict[str, Any]]:
    """A method's tries, those of the longest runs first."""
    lengths = sorted({point.epochs for point in method.tries}, reverse=True)
    return [_tuning(method, [point for point in method.tries if point.epochs == length]) for length in lengths]


def _tuning(method: Method, full: Sequence[Try]) -> dict[str, Any]:
    """Tries of one length: mean scores by learning rate (rows) and by the method's own hyperparameter (columns)."""
    scores: dict[tuple[float, float | None], float | None] = {}
    for point in full:  # of two that differ in the smoothing of the cross-entropy, the better one
        place, score = (point.learning_rate, point.hyperparameter), _mean_score(point)
        known = scores.get(place)
        scores[place] = known if score is None or (known is not None and known >= score) else score
    high = max((score for score in scores.values() if score is not None), default=0.0)
    rates = sorted({point.learning_rate for point in full})
    values = sorted({point.hyperparameter for point in full}, key=lambda value: -math.inf if value is None else value)
    taken = _taken(method)

    def cell(place: tuple[float, float | None]) -> dict[str, Any]:
        if place not in scores:
            return {"text": "", "share": 0, "chosen": False}
        score = scores[place]
        share = 0 if score is None else max(0, round(100 * (1 - (high - score) / _COLOURED)))
        return {"text": "diverged" if score is None else percent(score), "share": share, "chosen": place == taken}

    return {
        "name": method.name,
        "epochs": f"{full[0].epochs:g}",
        "hyperparameter": (method.hyperparameter or "").replace("_", " "),
        "columns": [text(value, "field") for value in values],
        "rows": [(f"{rate:g}", [cell((rate, value)) for value in values]) for rate in rates],
        "chosen": tuned_values(method),
    }


def tuned_values(method: Method) -> str:
    """The values that the tuning chose, in words."""
    rate, value = _taken(method)
    words = [f"learning rate {rate:g}"]
    if value is not None:
        words.append(f"{(method.hyperparameter or '').replace('_', ' ')} {value:g}")
    if any(point.label_smoothing is not None for point in method.tries):
        words.append(f"label smoothing of the cross-entropy {method.config.label_smoothing:g}")
    return ", ".join(words)


def _taken(method: Method) -> tuple[float, float | None]:
    """The learning rate and the method's own hyperparameter."""
    return method.config.learning_rate, getattr(method.config, method.hyperparameter or "", None)


def _mean_score(point: Try) -> float | None:
    """Over the tuning seeds; None where one diverged."""
    scores = [score for score in point.scores if score is not None and math.isfinite(score)]
    return mean(scores) if scores and len(scores) == len(point.scores) else None


# Charts --------------------------------------------------------------------------------------------------------------------


def _baseline_first(methods: Sequence[Method]) -> list[Method]:
    return sorted(methods, key=lambda method: method.name != BASELINE)


def _trade_chart(comparison: Comparison) -> str | None:
    """Top-1 against the largest k; None where the baseline has no two metrics, or nothing to be compared with."""
    up = next((metric for metric in (_largest_and_first(comparison)[0], *comparison.metrics) if metric != "top1"), None)
    if up is None:
        return None
    found, marks = comparison.differences, []

    def half_interval(method: Method, metric: str) -> float | None:
        high = found[method.name, metric].paired.high if (method.name, metric) in found else None
        return None if high is None else 100 * (high - found[method.name, metric].paired.difference)

    for method in (*_baseline_first(comparison.methods), *comparison.controls):
        both = [run for run in method.runs if "top1" in run.test and up in run.test]
        if both:
            seeds = [(100 * run.test["top1"], 100 * run.test[up]) for run in both]
            x, y = (mean([values[way] for values in seeds]) for way in (0, 1))
            marks.append(Mark(method.name, (x, y), (half_interval(method, "top1"), half_interval(method, up)), seeds))
    return plots.trade_chart(up, marks) if len(marks) > 1 and marks[0].name == BASELINE else None


def _coverage_chart(comparison: Comparison) -> str | None:
    """How often the target is among the first k guesses, over k: a line for each method."""
    first = sorted(comparison.coverages, key=lambda one: one.method != BASELINE)
    return plots.coverage_chart({one.method: [(k, 100 * share) for k, share in one.curve] for one in first}) if first else None


def _curve_chart(comparison: Comparison) -> str | None:
    """Validation accuracy over the epochs, a panel for each metric."""
    methods = [method for method in _baseline_first(comparison.methods) if method.tries]
    panels = {}
    for metric in reversed(_largest_and_first(comparison)):
        drawn = {method.name: curves for method in methods if (curves := _curves(method, metric))}
        if drawn:
            panels[metric] = drawn
    return plots.curve_chart(panels) if panels else None


def _curves(method: Method, metric: str) -> list[plots.Curve]:
    """The curve of each seed, in percent."""
    curves = []
    for run in method.runs:
        points = [(float(line["epoch"]), line.get("validation", {}).get(metric)) for line in run.curve if "epoch" in line]
        curves.append([(x, 100 * y) for x, y in points if y is not None and math.isfinite(y)])
    return [curve for curve in curves if curve]
