"""The page of a comparison: one HTML file with everything in it, for a browser without a network.

The template says what is on the page and how it looks; here are the numbers it needs and the drawings. These are plain SVG,
so that they take their colours from the page, light or dark, and their text stays text.
"""

import base64
import html
import keyword
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from anyk.lab import files
from anyk.lab.comparison.outcome import (
    BASELINE,
    LEARNING_RATE_OF,
    ByClass,
    Comparison,
    Confusion,
    Method,
    Try,
    chosen,
    differences,
    measured,
    metrics,
    other_differences,
    others,
    wanted,
)
from anyk.lab.comparison.snippet import code
from anyk.lab.comparison.verdict import notes, verdict
from anyk.lab.data.tokens import OTHER
from anyk.lab.statistics import CONFIDENCE, SIGNIFICANT, mean
from anyk.lab.tables import Difference, Measured, duration, hits, interval, p_text, percent, points, text, title

COLORS = 7
"""colours in the template, --c0 for the baseline; after them come the same with other dashes"""
_DASHES = ("", "6 3", "2 3")
_CURVE_POINTS = 150
#: classes that gained, as many that lost, and pairs that were confused
SHOWN_CLASSES = 10
#: files that could not be read
SHOWN_FILES = 50


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
    environment.filters |= {"title": title, "data_uri": _data_uri, "is_small": _is_small, "words": _words, "whole": _whole}
    environment.filters["joined"] = joined
    headline, *sentences = verdict(comparison)
    return environment.get_template("report.html").render(
        comparison=comparison,
        headline=headline,
        sentences=sentences,
        notes=notes(comparison),
        metrics=metrics(comparison),
        rows=_rows(comparison, metrics(comparison), differences(comparison)),
        others=others(comparison),
        other_rows=_rows(comparison, others(comparison), other_differences(comparison)),
        trade=_trade_chart(comparison),
        accuracies=_accuracy_charts(comparison),
        curves=_curve_charts(comparison),
        keys=[(method.name, _swatch(number)) for number, method in enumerate(_ordered(comparison)) if method.tries],
        tunings=[_tuning(method) for method in comparison.methods if method.tries],
        classes=_classes(comparison),
        confusions=_confusions(comparison),
        baseline=BASELINE,
        best=chosen(comparison).name if comparison.methods else None,
        codes=[(method.name, code(method.config, comparison.data.get("classes"))) for method in comparison.methods],
        shown_classes=SHOWN_CLASSES,
        shown_files=SHOWN_FILES,
        other=OTHER,
        intervals=any(one.paired.low is not None for one in differences(comparison).values()),
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


def _ordered(comparison: Comparison) -> list[Method]:
    """The methods with the baseline first, whose colour is the quiet one; then the controls."""
    return [*sorted(comparison.methods, key=lambda method: method.name != BASELINE), *comparison.controls]


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def _is_small(image: bytes) -> bool:
    """Whether a PNG has fewer pixels than it is shown with: then they may be seen."""
    return bool(max(struct.unpack(">II", image[16:24])) < 64)


def _words(value: Any) -> str:
    """A setting as people read it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    return ", ".join(map(_words, value)) or "–" if isinstance(value, (list, tuple)) else text(value, "field")


#: the ends of lines and blocks of Python source, in a line
_MARKS = {"<newline>": "⏎", "<indent>": "⇥", "<dedent>": "⇤"}
_AFTER_NO_SPACE = frozenset("([{.")
_BEFORE_NO_SPACE = frozenset((*".,:;)]}", "!", "?"))


def joined(tokens: Sequence[str], kind: str) -> str:
    """The tokens of a text, or of Python source, as people write them.

    >>> joined(["<newline>", "<indent>", "return", "self", ".", "f", "(", "x", ")", "[", "<number>", ":", "]"], "python")
    '⏎ ⇥ return self.f(x)[<number>:]'
    >>> joined(["if", "(", "…", "=", "-", "x", ")", ":"], "python")
    'if (… = - x):'
    >>> joined(["Stop", ",", "he", "said", "(", "twice", ")", "."], "words")
    'Stop, he said (twice).'
    """
    text, before = "", ""
    for token in tokens:
        # What is called or looked into stands close to its bracket, in Python.
        follows = (before.isidentifier() and not keyword.iskeyword(before)) or before in (")", "]", OTHER)
        called = kind == "python" and token in ("(", "[") and follows
        close = token in _BEFORE_NO_SPACE or before in _AFTER_NO_SPACE or called
        text += ("" if close or not text else " ") + (_MARKS.get(token, token) if kind == "python" else token)
        before = token
    return text


_NUMBER = r"[+−]?\d[\d,.]*"
_WHOLE = re.compile(
    "|".join(
        (
            r"(?<![\w-])--[a-z][\w-]*(?: \d\w*(?:\.\d+)?)?",  # an option, and its number
            r"\btop-\d+",
            rf"\bp [=<] {_NUMBER}(?<![,.])",
            rf"{_NUMBER} to {_NUMBER}(?<![,.])",
            rf"{_NUMBER} ± {_NUMBER}(?: %)?(?<![,.])",
            rf"{_NUMBER} (?:%|(?:s|min|h|points?|seeds?|epochs?|(?:test )?examples?|tests?|hits?)\b)",
        )
    )
)


def _whole(sentence: str) -> Markup:
    """Text in which no line ends inside an option or between a number and its unit."""
    parts, end = [], 0
    for match in _WHOLE.finditer(sentence):
        kept = Markup('<span class="whole">{}</span>').format(match[0])
        parts += [Markup("{}").format(sentence[end : match.start()]), kept]
        end = match.end()
    return Markup("").join([*parts, Markup("{}").format(sentence[end:])])


def _rows(comparison: Comparison, names: Sequence[str], found: Mapping[tuple[str, str], Difference]) -> list[dict[str, Any]]:
    """A table: for each method its cells, one for each metric."""
    rows = []
    for method in (*comparison.methods, *comparison.controls):
        cells = []
        for metric in names:
            cell = {"metric": metric, "value": text(measured(method, metric), "accuracy"), "difference": "", "test": ""}
            difference = found.get((method.name, metric))
            if difference is not None:
                cell |= {"difference": _difference(difference), "effect": _effect(difference), "test": _test(difference)}
            cells.append(cell)
        times = [run.seconds for run in method.runs]
        rows.append({"name": method.name, "cells": cells, "time": duration(mean(times)) if times else "–"})
    return rows


def _difference(one: Difference) -> str:
    counted = "" if one.paired.hits is None else hits(one.paired.hits)
    counted = counted and f" ({counted} {'example' if counted[1:] == '1' else 'examples'})"
    return f"{points(one.paired.difference)} points{counted}"


def _test(one: Difference) -> str:
    """Interval and p, or why there are none."""
    pair, parts = one.paired, []
    if pair.low is not None and pair.high is not None:
        parts.append(interval(pair.low, pair.high))
    if one.p is not None:
        parts.append(p_text(one.p))
    return ", ".join(parts) or pair.reason or ""


def _effect(one: Difference) -> str:
    if one.p is None or one.p >= SIGNIFICANT:
        return ""
    return "better" if one.paired.difference > 0 else "worse"


# Classes -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """What a class gains or loses: hits over the seeds."""

    name: str
    examples: int
    before: int
    after: int

    @property
    def difference(self) -> int:
        return self.after - self.before

    @property
    def text(self) -> str:
        return hits(float(self.difference))


@dataclass(frozen=True)
class _Changes:
    """The classes that gain and those that lose in a metric, the largest differences first."""

    metric: str
    gains: list[_Change]
    losses: list[_Change]

    @property
    def summary(self) -> str:
        """
        >>> _Changes("top1", [_Change("a", 9, 1, 3)], []).summary
        '1 class gains 2 hits, no class loses.'
        """
        if not self.gains and not self.losses:
            return "No class gains or loses."
        gained, lost = (abs(sum(one.difference for one in side)) for side in (self.gains, self.losses))
        words = f"{_count(self.gains, gained, 'gain')}, {_count(self.losses, lost, 'lose')}."
        return words[0].upper() + words[1:]


def _count(side: Sequence[_Change], total: int, verb: str) -> str:
    if not side:
        return f"no class {verb}s"
    these = f"1 class {verb}s" if len(side) == 1 else f"{len(side):,} classes {verb}"
    return f"{these} {total:,} {'hit' if total == 1 else 'hits'}"


def _classes(comparison: Comparison) -> list[_Changes]:
    """What the classes gain and lose, at the largest k that is wanted and at 1."""
    counted = comparison.by_class
    if counted is None:
        return []
    return [_changes(counted, metric) for metric in _looked_at(comparison) if metric in counted.before]


def _changes(counted: ByClass, metric: str) -> _Changes:
    columns = (counted.names, counted.examples, counted.before[metric], counted.after[metric])
    every = [_Change(name, len(counted.seeds) * many, *both) for name, many, *both in zip(*columns, strict=True)]
    ranked = sorted(every, key=lambda one: -one.difference)
    losses = sorted(every, key=lambda one: one.difference)
    return _Changes(metric, [one for one in ranked if one.difference > 0], [one for one in losses if one.difference < 0])


def _confusions(comparison: Comparison) -> list[Confusion]:
    """The pairs that one of the two confuses most, both together first."""
    if comparison.by_class is None:
        return []
    found: dict[Confusion, None] = {}
    for count in map(attrgetter, ("before", "after")):
        most = sorted((pair for pair in comparison.by_class.confusions if count(pair)), key=count, reverse=True)
        found |= dict.fromkeys(most[:SHOWN_CLASSES])
    return sorted(found, key=lambda pair: -pair.before - pair.after)


def _looked_at(comparison: Comparison) -> list[str]:
    """The largest k that is wanted, and 1."""
    largest = max(wanted(comparison), key=_k, default="top1")
    return list(dict.fromkeys((largest, "top1")))


def _k(metric: str) -> int:
    return int(metric.removeprefix("top"))


#: tries this much below the best have no colour
_COLOURED = 0.05


@dataclass(frozen=True)
class _Grid:
    """A method's tries at full length: mean scores by learning rate (rows) and by its own hyperparameter (columns)."""

    name: str
    hyperparameter: str
    columns: list[str]
    rows: list[tuple[str, list[dict[str, Any]]]]
    chosen: str


def _tuning(method: Method) -> _Grid:
    config, hyperparameter = method.config, method.hyperparameter or ""
    full = [point for point in method.tries if point.epochs >= config.epochs]
    scores: dict[tuple[float, float | None], float | None] = {}
    for point in full:  # of two that differ in the smoothing of the cross-entropy, the better one
        place, score = (point.learning_rate, point.hyperparameter), _mean_score(point)
        known = scores.get(place)
        scores[place] = known if score is None or (known is not None and known >= score) else score
    high = max((score for score in scores.values() if score is not None), default=0.0)
    rates = sorted({point.learning_rate for point in full})
    values = sorted({point.hyperparameter for point in full}, key=lambda value: -math.inf if value is None else value)
    taken = (config.learning_rate, getattr(config, hyperparameter, None))

    def cell(place: tuple[float, float | None]) -> dict[str, Any]:
        if place not in scores:
            return {"text": "", "share": 0, "chosen": False}
        score = scores[place]
        share = 0 if score is None else max(0, round(100 * (1 - (high - score) / _COLOURED)))
        return {"text": "diverged" if score is None else percent(score), "share": share, "chosen": place == taken}

    words = hyperparameter.replace("_", " ")
    tuned = any(point.label_smoothing is not None for point in full)
    smoothed = f", label smoothing of the cross-entropy {config.label_smoothing:g}" if tuned else ""
    return _Grid(
        method.name,
        words,
        [text(value, "field") for value in values],
        [(f"{rate:g}", [cell((rate, value)) for value in values]) for rate in rates],
        f"learning rate {taken[0]:g}" + (f", {words} {taken[1]:g}" if taken[1] is not None else "") + smoothed,
    )


def _mean_score(point: Try) -> float | None:
    """Over the tuning seeds; None where one diverged."""
    scores = [score for score in point.scores if score is not None and math.isfinite(score)]
    return mean(scores) if scores and len(scores) == len(point.scores) else None


# Drawings. All sizes are in the units of the viewBox; a drawing is as wide as a phone and scales up from there.

_WIDTH = 340
_LETTERS, _LETTER = 18, 6.2
"""of a name, and about how wide one is"""


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
        step = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(size for size in (step / 5, step / 2, step, 2 * step, 5 * step) if (self.high - self.low) / size <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _axis(values: Sequence[float], start: float, end: float) -> _Axis:
    """An axis around percentages, a little wider than they are."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.5
    return _Axis(max(low - margin, 0.0), min(high + margin, 100.0), start, end)


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


def _accuracy_charts(comparison: Comparison) -> list[Markup]:
    """One drawing a metric: a line a method with its seeds as small marks, their mean and its standard deviation."""
    charts = []
    for metric in metrics(comparison):
        rows, described = _measured_rows(comparison, metric)
        spans = [bound for _, _, value in rows for bound in _spread(value)]
        start = 10 + _LETTER * max((len(_label(method)) for _, method, _ in rows), default=0)
        axis = _axis([*spans, *(100 * seed for _, _, value in rows for seed in value.values)], start, _WIDTH - 12)
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


def _label(method: Method) -> str:
    """A name that is short enough for a drawing."""
    name = f"{BASELINE} at {method.config.learning_rate:g}" if method.name.startswith(LEARNING_RATE_OF) else method.name
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"


def _name(method: Method, x: float, y: float) -> Markup:
    label = Markup('<text x="{}" y="{}" class="name"><title>{}</title>{}</text>')
    return label.format(x, y + 4, method.name, _label(method))


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
    parts = [_name(method, axis.start - 8, y)]
    if value.std:
        low, high = map(axis, _spread(value))
        parts.append(_whisker(number, low, high, y))
    for seed, one in seeds.items():
        parts.append(
            Markup('<circle cx="{}" cy="{}" r="2.4" class="seed" style="--c:{}"><title>{}</title></circle>').format(
                axis(100 * one), y + 8, _color(number), f"seed {seed}: {percent(one)} %"
            )
        )
    said = f"{method.name}: {text(value, 'accuracy')} %"
    return [*parts, _marker(number, axis(100 * value.mean), y, 4.5, said, "dot")]


def _spread(value: Measured) -> tuple[float, float]:
    """Mean minus and plus standard deviation in percent, as far as there are percentages."""
    center, std = 100 * value.mean, 100 * (value.std or 0.0)
    return max(center - std, 0.0), min(center + std, 100.0)


_Box = tuple[float, float, float, float]
"""left, top, right, bottom"""


@dataclass(frozen=True)
class _Spot:
    """A method in the plane of two metrics, in percent: its mean, its seeds, and the intervals of its differences."""

    number: int
    method: Method
    center: tuple[float, float]
    seeds: list[tuple[int, tuple[float, float]]]
    spans: tuple[tuple[float, float] | None, tuple[float, float] | None]
    """around the mean, in each of the two metrics; None where there is no test"""

    def along(self, way: int) -> list[float]:
        """All that is drawn of it in one of the metrics."""
        return [self.center[way], *(self.spans[way] or ()), *(values[way] for _, values in self.seeds)]

    @property
    def words(self) -> str:
        return f"{self.method.name} {self.center[0]:.2f} and {self.center[1]:.2f}"


def _spots(comparison: Comparison, across: str, up: str) -> list[_Spot]:
    """The methods that have both metrics."""
    found, spots = differences(comparison), []

    def span(method: Method, metric: str, center: float) -> tuple[float, float] | None:
        pair = found[method.name, metric].paired if (method.name, metric) in found else None
        if pair is None or pair.low is None or pair.high is None:
            return None
        low, high = (center + 100 * (bound - pair.difference) for bound in (pair.low, pair.high))
        return max(low, 0.0), min(high, 100.0)

    for number, method in enumerate(_ordered(comparison)):
        both = [run for run in method.runs if across in run.test and up in run.test]
        if both:
            seeds = [(run.seed, (100 * run.test[across], 100 * run.test[up])) for run in both]
            x, y = (mean([values[way] for _, values in seeds]) for way in (0, 1))
            spots.append(_Spot(number, method, (x, y), seeds, (span(method, across, x), span(method, up, y))))
    return spots


def _trade_chart(comparison: Comparison) -> Markup | None:
    """Top-1 against the largest k that is wanted: a mark for each method, with its seeds and the interval of its difference."""
    up = next((metric for metric in (_looked_at(comparison)[0], *metrics(comparison)) if metric != "top1"), None)
    spots = _spots(comparison, "top1", up) if up is not None else []
    if up is None or len(spots) < 2:
        return None
    frame = left, top, right, bottom = (40.0, 30.0, _WIDTH - 10.0, 250.0)
    horizontal = _axis([value for spot in spots for value in spot.along(0)], left, right)
    vertical = _axis([value for spot in spots for value in spot.along(1)], bottom, top)
    parts = [_heading(f"{title(up)} against top-1", "%"), *_trade_grid(horizontal, vertical, frame)]
    taken: list[tuple[_Box, float]] = []
    for spot in spots:
        drawn, boxes = _trade_spot(spot, horizontal, vertical, frame)
        parts += drawn
        taken += boxes
    names: list[Markup] = []
    for spot in spots:
        x, y = horizontal(spot.center[0]), vertical(spot.center[1])
        parts.append(_marker(spot.number, x, y, 5, spot.words, "dot"))
        box = _place_label(x, y, _LETTER * len(_label(spot.method)), taken, frame)
        taken.append((box, 20.0))
        names += _trade_label(spot, x, y, box)
    described = "; ".join(spot.words for spot in spots)
    return _svg(bottom + 32, f"top-1 and {title(up)} accuracy in percent: {described}", [*parts, *names])


def _trade_grid(horizontal: _Axis, vertical: _Axis, frame: _Box) -> Iterator[Markup]:
    left, top, right, bottom = frame
    for tick in horizontal.ticks:
        yield Markup('<line x1="{0}" y1="{1}" x2="{0}" y2="{2}" class="grid"/>').format(horizontal(tick), top, bottom)
        yield Markup('<text x="{}" y="{}" class="tick middle">{:.10g}</text>').format(horizontal(tick), bottom + 14, tick)
    for tick in vertical.ticks:
        y = vertical(tick)
        yield Markup('<line x1="{0}" y1="{2}" x2="{1}" y2="{2}" class="grid"/>').format(left, right, y)
        yield Markup('<text x="{}" y="{:.1f}" class="tick end">{:.10g}</text>').format(left - 4, y + 3.5, tick)
    yield Markup('<text x="{}" y="{}" class="tick end">top-1</text>').format(right, bottom + 28)


def _trade_spot(spot: _Spot, horizontal: _Axis, vertical: _Axis, frame: _Box) -> tuple[list[Markup], list[tuple[_Box, float]]]:
    """What is drawn of a method below its mark; and the boxes that a name should not hide, with how much that matters."""
    left, top, right, bottom = frame
    x, y, color = horizontal(spot.center[0]), vertical(spot.center[1]), _color(spot.number)
    parts: list[Markup] = []
    boxes: list[tuple[_Box, float]] = [((x - 6, y - 6, x + 6, y + 6), 20.0)]
    if spot.method.name == BASELINE:
        line = Markup('<path d="M{0} {1}V{2}M{3} {5}H{4}" class="baseline" style="--c:{6}"/>')
        parts.append(line.format(x, top, bottom, left, right, y, color))
        boxes += [((x - 1, top, x + 1, bottom), 5.0), ((left, y - 1, right, y + 1), 5.0)]
    if spot.spans[0] is not None:
        low, high = map(horizontal, spot.spans[0])
        parts.append(_whisker(spot.number, low, high, y))
        boxes.append(((low, y - 3, high, y + 3), 10.0))
    if spot.spans[1] is not None:
        low, high = map(vertical, spot.spans[1])
        path = Markup('<path d="M{2} {0}h8m-4 0V{1}m-4 0h8" class="whisker" style="--c:{3}"/>')
        parts.append(path.format(low, high, round(x - 4, 1), color))
        boxes.append(((x - 3, high, x + 3, low), 10.0))
    for seed, values in spot.seeds:
        at = horizontal(values[0]), vertical(values[1])
        said = f"{spot.method.name}, seed {seed}: {values[0]:.2f} and {values[1]:.2f}"
        dot = Markup('<circle cx="{}" cy="{}" r="2.2" class="seed" style="--c:{}"><title>{}</title></circle>')
        parts.append(dot.format(*at, color, said))
        boxes.append(((at[0] - 2, at[1] - 2, at[0] + 2, at[1] + 2), 2.0))
    return parts, boxes


def _place_label(x: float, y: float, width: float, obstacles: Sequence[tuple[_Box, float]], frame: _Box) -> _Box:
    """Where a name beside a mark hides the least; of equally good places the nearest, to the right first."""
    height, best = 13.0, None
    for ring, distance in enumerate((9.0, 18.0, 30.0, 45.0, 62.0)):
        for across, down in ((1, 0), (-1, 0), (0.7, -0.7), (0.7, 0.7), (-0.7, -0.7), (-0.7, 0.7), (0, -1), (0, 1)):
            center = (x + across * (distance + width / 2), y + down * (distance + height / 2))
            box = (center[0] - width / 2, center[1] - height / 2, center[0] + width / 2, center[1] + height / 2)
            outside = box[0] < frame[0] or box[1] < frame[1] or box[2] > frame[2] or box[3] > frame[3]
            cost = ring + 100 * outside + sum(weight for other, weight in obstacles if _overlap(box, other))
            if best is None or cost < best[0]:
                best = (cost, box)
    assert best is not None
    return best[1]


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _trade_label(spot: _Spot, x: float, y: float, box: _Box) -> Iterator[Markup]:
    """A name in its place, with a line to its mark if that is far."""
    near = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
    if math.hypot(near[0] - x, near[1] - y) > 12:
        line = Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="leader" style="--c:{}"/>')
        yield line.format(x, y, *near, _color(spot.number))
    label = Markup('<text x="{:.1f}" y="{:.1f}" class="middle label" style="--c:{}"><title>{}</title>{}</text>')
    name = spot.method.name, _label(spot.method)
    yield label.format((box[0] + box[2]) / 2, box[3] - 3, _color(spot.number), *name)


def _heading(words: str, unit: str) -> Markup:
    return Markup('<text x="2" y="14" class="heading">{} <tspan class="unit">{}</tspan></text>').format(words, unit)


def _curve_charts(comparison: Comparison) -> list[Markup]:
    """Validation accuracy over the epochs: seeds thin, their mean thick."""
    charts = []
    for metric in reversed(_looked_at(comparison)):
        tuned = [(number, method) for number, method in enumerate(_ordered(comparison)) if method.tries]
        drawn = [(number, curves) for number, method in tuned if (curves := _curves(method, metric))]
        if not drawn:
            continue
        everything = [point for _, curves in drawn for curve in curves for point in curve]
        # The first evaluations are far below the rest; without them the end of the curves can be read. All ends are shown.
        heights = sorted(y for _, y in everything)
        floor = min(heights[len(heights) // 5], *(curve[-1][1] for _, curves in drawn for curve in curves))
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
            if not tick.is_integer() and horizontal.high - horizontal.low >= 2:
                continue
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
