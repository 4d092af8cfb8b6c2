"""The page of a comparison: one HTML file with everything in it, for a browser without a network.

The template says what is on the page and how it looks; here are the numbers it needs and the drawings. These are plain SVG,
so that they take their colours from the page, light or dark, and their text stays text.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from anyk.lab import files
from anyk.lab.comparison.outcome import BASELINE, Comparison, Method, Try, chosen, differences, measured, metrics
from anyk.lab.comparison.snippet import code
from anyk.lab.comparison.verdict import notes, verdict
from anyk.lab.statistics import CONFIDENCE, SIGNIFICANT, mean
from anyk.lab.tables import Measured, duration, p_text, percent, points, text, title

COLORS = 7
"""colours in the template, --c0 for the baseline; after them come the same with other dashes"""
_DASHES = ("", "6 3", "2 3")
_CURVE_POINTS = 150


def write(comparison: Comparison, file: str | Path) -> None:
    """Write the page."""
    files.write_atomically(Path(file), render(comparison).encode())


def render(comparison: Comparison) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("anyk.lab"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"title": title, "data_uri": _data_uri, "words": _words}
    headline, *sentences = verdict(comparison)
    return environment.get_template("report.html").render(
        comparison=comparison,
        headline=headline,
        sentences=sentences,
        notes=notes(comparison),
        metrics=metrics(comparison),
        rows=_rows(comparison),
        bars=_bar_charts(comparison),
        accuracies=_accuracy_charts(comparison),
        curves=_curve_charts(comparison),
        keys=[(method.name, _swatch(number)) for number, method in enumerate(_ordered(comparison))],
        tunings=[_tuning(method) for method in comparison.methods if method.tries],
        baseline=BASELINE,
        best=chosen(comparison).name if comparison.methods else None,
        codes=[(method.name, code(method.recipe, comparison.data.get("classes"))) for method in comparison.methods],
        seeds=max((len(method.runs) for method in comparison.methods), default=0),
        confidence=f"{CONFIDENCE:.0%}",
    )


def _ordered(comparison: Comparison) -> list[Method]:
    """The methods with the baseline first, whose colour is the quiet one."""
    return sorted(comparison.methods, key=lambda method: method.name != BASELINE)


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def _words(value: Any) -> str:
    """A setting as people read it."""
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return ", ".join(map(_words, value)) if isinstance(value, (list, tuple)) else text(value, "field")


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    """The table: for each method its cells, one for each metric."""
    found = differences(comparison)
    rows = []
    for method in comparison.methods:
        cells = []
        for metric in metrics(comparison):
            value, difference = measured(method, metric), found.get((method.name, metric))
            cell: dict[str, Any] = {"metric": metric, "value": text(value, "accuracy"), "difference": None}
            if difference is not None:
                pair = difference.paired
                cell |= {
                    "difference": points(pair.difference),
                    "interval": f"{points(pair.low)} to {points(pair.high)}"
                    if pair.low is not None and pair.high is not None
                    else None,
                    "p": p_text(difference.p),
                    "reason": pair.reason,
                    "effect": ("better" if pair.difference > 0 else "worse")
                    if difference.p is not None and difference.p < SIGNIFICANT
                    else "",
                }
            cells.append(cell)
        times = [run.seconds for run in method.runs]
        rows.append({"name": method.name, "cells": cells, "time": duration(mean(times)) if times else "–"})
    return rows


@dataclass(frozen=True)
class _Grid:
    """A method's tries at full length: their mean scores by the method's own knob (rows) and learning rate (columns)."""

    name: str
    knob: str
    learning_rates: list[str]
    rows: list[tuple[str, list[dict[str, Any]]]]
    chosen: str


def _tuning(method: Method) -> _Grid:
    recipe, knob = method.recipe, method.knob or ""
    full = [point for point in method.tries if point.epochs >= recipe.epochs]
    scores = {(point.knob, point.learning_rate): _mean_score(point) for point in full}
    finite = [score for score in scores.values() if score is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    rates, values = (sorted({value for value in side if value is not None}) for side in _sides(full))
    taken = (getattr(recipe, knob, None), recipe.learning_rate)

    def cell(place: tuple[float | None, float]) -> dict[str, Any]:
        if place not in scores:
            return {"text": "", "share": 0, "chosen": False}
        score = scores[place]
        share = 0 if score is None else round(100 * (score - low) / (high - low)) if high > low else 50
        return {"text": "diverged" if score is None else percent(score), "share": share, "chosen": place == taken}

    words = knob.replace("_", " ")
    return _Grid(
        method.name,
        words,
        [f"{rate:g}" for rate in rates],
        [(text(value, "field"), [cell((value, rate)) for rate in rates]) for value in values],
        f"learning rate {recipe.learning_rate:g}, {words} {taken[0]:g}" if taken[0] is not None else "",
    )


def _sides(tries: Sequence[Try]) -> tuple[list[float], list[float | None]]:
    return [point.learning_rate for point in tries], [point.knob for point in tries]


def _mean_score(point: Try) -> float | None:
    """Over the tuning seeds; None where one diverged."""
    scores = [score for score in point.scores if score is not None and math.isfinite(score)]
    return mean(scores) if scores and len(scores) == len(point.scores) else None


# Drawings. All sizes are in the units of the viewBox; a drawing is as wide as a phone and scales up from there.

_WIDTH = 340


@dataclass(frozen=True)
class _Axis:
    """Maps values to places, with ticks at round numbers."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        step = 10 ** math.floor(math.log10(self.high - self.low))
        step = next(size for size in (step / 5, step / 2, step, 2 * step, 5 * step) if (self.high - self.low) / size <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _axis(values: Sequence[float], start: float, end: float) -> _Axis:
    """An axis around the values, a little wider than they are."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or max(abs(high) * 0.01, 0.5)
    return _Axis(low - margin, high + margin, start, end)


def _svg(height: float, label: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, height, label, Markup("").join(parts)
    )


def _color(number: int) -> Markup:
    return Markup("var(--c{})").format(number % COLORS if number < COLORS else 1 + (number - 1) % (COLORS - 1))


def _dash(number: int) -> str:
    return _DASHES[0 if number < COLORS else 1 + ((number - COLORS) // (COLORS - 1)) % 2]


def _marker(number: int, x: float, y: float, size: float, title: str, style: str) -> Markup:
    """A dot, a square, a diamond or a triangle: shapes tell the methods apart where colours do not."""
    outline = (
        [(math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)) for turn in range(16)],
        [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
    )[number % 4]
    corners = " ".join(f"{x + size * right:.1f},{y + size * down:.1f}" for right, down in outline)
    return Markup('<polygon points="{}" class="{}" style="--c:{}"><title>{}</title></polygon>').format(
        corners, style, _color(number), title
    )


def _swatch(number: int) -> Markup:
    """The sign of a method in a legend."""
    line = Markup('<line x1="1" y1="8" x2="27" y2="8" class="mean" style="--c:{}" stroke-dasharray="{}"/>')
    return Markup('<svg viewBox="0 0 28 16" class="swatch" aria-hidden="true">{}{}</svg>').format(
        line.format(_color(number), _dash(number)), _marker(number, 14, 8, 4, "", "dot")
    )


def _bar_charts(comparison: Comparison) -> list[Markup]:
    """One drawing a metric, from 0 to 100 percent: a bar a method, with the standard deviation at its end."""
    axis = _Axis(0, 100, 88, _WIDTH - 12)
    bar = Markup('<rect x="{}" y="{}" width="{}" height="14" class="bar" style="--c:{}"><title>{}</title></rect>')
    charts = []
    for metric in metrics(comparison):
        rows, described = _measured_rows(comparison, metric)
        bottom = 26 + 24 * len(rows)
        parts = _accuracy_frame(metric, axis, bottom)
        for line, (number, method, value) in enumerate(rows):
            y, end, spread = 38 + 24 * line, 100 * value.mean, 100 * (value.std or 0.0)
            said = f"{method.name}: {text(value, 'accuracy')} %"
            parts += [
                _name(method, y),
                bar.format(axis(0), y - 7, round(axis(end) - axis(0), 1), _color(number), said),
                _whisker(number, axis(max(end - spread, 0)), axis(min(end + spread, 100)), y),
            ]
        charts.append(_svg(bottom + 20, f"{title(metric)} accuracy in percent, from 0: {described}", parts))
    return charts


def _accuracy_charts(comparison: Comparison) -> list[Markup]:
    """One drawing a metric: a line a method with its seeds as small marks, their mean and its standard deviation."""
    charts = []
    for metric in metrics(comparison):
        rows, described = _measured_rows(comparison, metric)
        spans = [100 * value.mean + sign * 100 * (value.std or 0.0) for _, _, value in rows for sign in (-1, 1)]
        axis = _axis([*spans, *(100 * seed for _, _, value in rows for seed in value.values)], 88, _WIDTH - 12)
        bottom = 26 + 30 * len(rows)
        parts = _accuracy_frame(metric, axis, bottom)
        for line, (number, method, _) in enumerate(rows):
            parts += _accuracy_line(number, method, metric, axis, 41 + 30 * line)
        charts.append(_svg(bottom + 20, f"{title(metric)} accuracy in percent: {described}", parts))
    return charts


def _measured_rows(comparison: Comparison, metric: str) -> tuple[list[tuple[int, Method, Measured]], str]:
    """The methods that have a metric, with their numbers; and all of them in words."""
    methods = enumerate(_ordered(comparison))
    rows = [(number, method, value) for number, method in methods if (value := measured(method, metric))]
    return rows, "; ".join(f"{method.name} {text(value, 'accuracy')}" for _, method, value in rows)


def _name(method: Method, y: float) -> Markup:
    label = Markup('<text x="80" y="{}" class="name"><title>{}</title>{}</text>')
    return label.format(y + 4, method.name, _short(method.name, 13))


def _whisker(number: int, start: float, end: float, y: float) -> Markup:
    path = Markup('<path d="M{0} {2}v8m0 -4H{1}m0 -4v8" class="whisker" style="--c:{3}"/>')
    return path.format(start, end, y - 4, _color(number))


def _accuracy_frame(metric: str, axis: _Axis, bottom: float) -> list[Markup]:
    """The heading of a drawing, and its grid."""
    parts = [_heading(title(metric), "%")]
    for tick in axis.ticks:
        parts += [
            Markup('<line x1="{0}" y1="26" x2="{0}" y2="{1}" class="grid"/>').format(axis(tick), bottom),
            Markup('<text x="{}" y="{}" class="tick middle">{:.10g}</text>').format(axis(tick), bottom + 14, tick),
        ]
    return parts


def _accuracy_line(number: int, method: Method, metric: str, axis: _Axis, y: float) -> list[Markup]:
    seeds = {run.seed: run.test[metric] for run in method.runs if metric in run.test}
    value = Measured(tuple(seeds.values()))
    center, spread = 100 * value.mean, 100 * (value.std or 0.0)
    parts = [_name(method, y)]
    if spread:
        parts.append(_whisker(number, axis(center - spread), axis(center + spread), y))
    for seed, one in seeds.items():
        parts.append(
            Markup('<circle cx="{}" cy="{}" r="2.4" class="seed" style="--c:{}"><title>{}</title></circle>').format(
                axis(100 * one), y + 8, _color(number), f"seed {seed}: {percent(one)} %"
            )
        )
    said = f"{method.name}: {text(value, 'accuracy')} %"
    return [*parts, _marker(number, axis(center), y, 4.5, said, "dot")]


def _heading(words: str, unit: str) -> Markup:
    return Markup('<text x="2" y="14" class="heading">{} <tspan class="unit">{}</tspan></text>').format(words, unit)


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _curve_charts(comparison: Comparison) -> list[Markup]:
    """Validation accuracy over the epochs: seeds thin, their mean thick."""
    charts = []
    for metric in ("top1", "top5"):
        drawn = [(number, curves) for number, method in enumerate(_ordered(comparison)) if (curves := _curves(method, metric))]
        if not drawn:
            continue
        everything = [point for _, curves in drawn for curve in curves for point in curve]
        # The first evaluations are far below the rest; without them the end of the curves can be read.
        heights = sorted(y for _, y in everything)
        floor = heights[len(heights) // 5]
        horizontal = _axis_exact([x for x, _ in everything], 34, _WIDTH - 10)
        vertical = _axis([floor, heights[-1]], 182, 26)
        parts = [_heading(f"validation {title(metric)}", "%")]
        for tick in vertical.ticks:
            y = vertical(tick)
            parts += [
                Markup('<line x1="34" y1="{0}" x2="{1}" y2="{0}" class="grid"/>').format(y, _WIDTH - 10),
                Markup('<text x="30" y="{:.1f}" class="tick end">{:.10g}</text>').format(y + 3.5, tick),
            ]
        for tick in horizontal.ticks:
            parts.append(Markup('<text x="{}" y="198" class="tick middle">{:.10g}</text>').format(horizontal(tick), tick))
        parts.append(Markup('<text x="{}" y="212" class="tick middle">epoch</text>').format((_WIDTH + 24) / 2))
        lines = []
        for number, curves in drawn:
            if len(curves) > 1:
                lines += [_curve(number, curve, horizontal, vertical, "thin") for curve in curves]
        lines += [_curve(number, _mean_curve(curves), horizontal, vertical, "mean") for number, curves in drawn]
        frame = Markup('<clipPath id="clip-{0}"><rect x="34" y="24" width="{1}" height="160"/></clipPath>')
        inside = Markup('<g clip-path="url(#clip-{0})">{1}</g>')
        parts += [frame.format(metric, _WIDTH - 40), inside.format(metric, Markup("").join(lines))]
        for number, curves in drawn:
            if ends := _mean_curve(curves)[-1:]:
                x, y = ends[0]
                if y >= vertical.low:
                    name = _ordered(comparison)[number].name
                    parts.append(_marker(number, horizontal(x), vertical(y), 3.5, f"{name}: {y:.2f} %", "dot"))
        names = ", ".join(_ordered(comparison)[number].name for number, _ in drawn)
        charts.append(_svg(216, f"validation {title(metric)} in percent over the epochs, for {names}", parts))
    return charts


def _axis_exact(values: Sequence[float], start: float, end: float) -> _Axis:
    low, high = min(values), max(values)
    return _Axis(low, high if high > low else low + 1, start, end)


Curve = list[tuple[float, float]]


def _curves(method: Method, metric: str) -> list[Curve]:
    """The curve of each seed, in percent, thinned to what can be seen."""
    curves = []
    for run in method.runs:
        points = [(float(line["epoch"]), line.get("validation", {}).get(metric)) for line in run.curve if "epoch" in line]
        curve = [(x, 100 * y) for x, y in points if y is not None and math.isfinite(y)]
        every = max(1, math.ceil(len(curve) / _CURVE_POINTS))
        curves.append(curve[(len(curve) - 1) % every :: every] if curve else [])
    return [curve for curve in curves if curve]


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean where all seeds have a point: a seed that stopped early must not bend it."""
    heights = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(height) for height in heights)))
    return [(x, mean([height[x] for height in heights])) for x in shared]


def _curve(number: int, curve: Curve, horizontal: _Axis, vertical: _Axis, style: str) -> Markup:
    points = " ".join(f"{horizontal(x):g},{vertical(y):g}" for x, y in curve)
    return Markup('<polyline points="{}" class="{}" style="--c:{}" stroke-dasharray="{}"/>').format(
        points, style, _color(number), _dash(number)
    )
