"""Charts, all drawn by matplotlib: a table as a file of plots, and the charts of a comparison's report.

The suffix of a file of plots chooses its format: png, svg or pdf. The charts of a report are SVG images inside the page, which
take the colour of their text from the reader's light or dark scheme.
"""

import base64
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anyk.lab.errors import LabError
from anyk.lab.tables import Column, Measured, Table, Value, order, percent, text, title

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which the colour-blind can tell apart
BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
INK = "#222222"

STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "anyk",  # the same chart is the same file
}
_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
_MARKERS = "osD^vP"

# --- tables as plots --------------------------------------------------------------------------------------------------


def plot(table: Table, path: str | Path, *, without: Collection[str] = ()) -> None:
    """Draw the accuracies with their standard deviations.

    Lines over the field, where one field of numbers was swept, with a line for each value of the other fields. Else top-1
    against top-k, where the loss differs. Else bars.

    Args:
        table: with a column of accuracies.
        path: a file that ends in .png, .svg or .pdf.
        without: keys of columns that are for the table alone.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise LabError(f"{path} should end in {', '.join(SUFFIXES)}: the suffix is the format.")
    shown = {place for row in table.rows for place, value in enumerate(row) if isinstance(value, Measured)}
    measures = [
        place
        for place, column in enumerate(table.columns)
        if place in shown and column.kind == "accuracy" and column.key not in without
    ]
    if not measures:
        raise LabError("There is nothing to plot: no finished run has a test accuracy.")
    fields = [place for place, column in enumerate(table.columns) if column.kind == "field"]
    fields = [place for place in fields if len({row[place] for row in table.rows} - {None}) > 1]
    with matplotlib.rc_context(STYLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        save(_draw(table, fields, measures), path, dpi=150)


def save(figure: Figure, path: Path, dpi: int = 200) -> None:
    """Write a figure, without the date: the same chart is the same file."""
    FigureCanvasAgg(figure)
    dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())
    try:
        figure.savefig(path, dpi=dpi, metadata={dated: None} if dated else None, facecolor="white")
    except OSError as error:
        raise LabError(f"{path} could not be written: {error.strerror or error}.") from None


def _draw(table: Table, fields: list[int], measures: list[int]) -> Figure:
    numeric = [place for place in fields if all(type(row[place]) in (int, float, type(None)) for row in table.rows)]
    if len(numeric) == 1:
        series = _series(table, numeric[0], [place for place in fields if place != numeric[0]])
        # A line has two points: methods that were each tuned to a rate of their own make none.
        if len(series) <= len(_COLORS) and any(len(each.rows) > 1 for each in series):
            return _lines(table, numeric[0], series, measures)
    if len(measures) > 1 and "loss" in {table.columns[place].key for place in fields}:
        return _trade(table, fields, measures)
    return _bars(table, fields, measures)


def _words(column: Column, value: Value) -> str:
    """A value of a field beside a point or a line."""
    written = f"{value:.3g}" if isinstance(value, float) else text(value, "field")
    # The names of losses and data say what they are; a number or a switch does not.
    return written if column.key in ("loss", "data", "model") else f"{column.title.replace('_', ' ')} {written}"


def _label(table: Table, row: tuple[Value, ...], fields: Sequence[int]) -> str:
    """What tells a row from the others, the loss first."""
    ordered = sorted(fields, key=lambda place: table.columns[place].key != "loss")
    return ", ".join(_words(table.columns[place], row[place]) for place in ordered if row[place] is not None)


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Series:
    """Rows that differ in the number alone; those of a loss that does not take it are a level."""

    name: str
    rows: list[tuple[Value, ...]]
    level: tuple[Value, ...] | None = None


def _series(table: Table, along: int, others: list[int]) -> list[_Series]:
    groups: dict[tuple[Value, ...], list[tuple[Value, ...]]] = {}
    for row in table.rows:
        groups.setdefault(tuple(row[place] for place in others), []).append(row)
    series = []
    for rows in groups.values():
        points = sorted((row for row in rows if row[along] is not None), key=lambda row: order(row[along]))
        level = next((row for row in rows if row[along] is None), None)
        series.append(_Series(_label(table, rows[0], others), points, level))
    return series


def _lines(table: Table, along: int, series: list[_Series], measures: list[int]) -> Figure:
    """A panel for each metric: lines of top-1 and of top-10 in one would leave both flat."""
    figure = Figure(figsize=(max(4.8, 3.6 * len(measures)), 3.8), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    values = sorted({float(row[along]) for each in series for row in each.rows})  # type: ignore[arg-type]
    for axes, place in zip(panels, measures, strict=True):
        for number, each in enumerate(series):
            style = {"color": _COLORS[number], "label": each.name or None}
            points = [(row[along], value) for row in each.rows if isinstance(value := row[place], Measured)]
            if points:
                axes.errorbar(
                    [float(x) for x, _ in points],  # type: ignore[arg-type]
                    [100 * value.mean for _, value in points],
                    [100 * (value.std or 0.0) for _, value in points],
                    marker=_MARKERS[number],
                    capsize=3,
                    **style,
                )
            level = None if each.level is None else each.level[place]
            if isinstance(level, Measured):
                axes.axhline(100 * level.mean, linestyle="--", **(style if not points else {"color": _COLORS[number]}))
                if level.std:
                    axes.axhspan(
                        100 * (level.mean - level.std), 100 * (level.mean + level.std), color=_COLORS[number], alpha=0.12
                    )
        if values[0] > 0 and values[-1] >= 20 * values[0]:
            axes.set_xscale("log")
        if len(values) <= 8:
            axes.set_xticks(values, [f"{x:g}" for x in values], rotation=45 if len(values) > 5 else 0)
            axes.minorticks_off()
        axes.set_title(table.columns[place].title, fontsize=10)
        axes.set_xlabel(table.columns[along].title.replace("_", " "))
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("accuracy in %, mean ± std")
    handles, names = panels[0].get_legend_handles_labels()
    if names:
        figure.legend(handles, map(_no_math, names), loc="outside upper center", ncols=min(len(names), 4), frameon=False)
    return figure


# --- top-1 against top-k ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A method in the plane of two metrics, in percent."""

    name: str
    center: tuple[float, float]
    errors: tuple[float | None, float | None]
    """half the length of its bars in each of the two metrics"""
    seeds: Sequence[tuple[float, float]] = ()


def _look(number: int) -> dict[str, str]:
    """A colour with a shape: shapes tell methods apart where colours do not."""
    count = len(_COLORS)
    return {"color": _COLORS[number % count], "marker": _MARKERS[(number + number // count) % len(_MARKERS)]}


def _draw_mark(axes: Axes, mark: Mark, **look: Any) -> None:
    across, up = mark.errors
    axes.errorbar([mark.center[0]], [mark.center[1]], up, across, linestyle="none", elinewidth=0.8, **look)


def _trade(table: Table, fields: list[int], measures: list[int]) -> Figure:
    """Top-1 against the first other metric, with deviations; a dotted line joins the points that no other beats in both."""
    across, up = measures[0], next((place for place in measures if table.columns[place].key == "top5"), measures[1])
    marks = []
    for row in table.rows:
        x, y = row[across], row[up]
        if isinstance(x, Measured) and isinstance(y, Measured):
            errors = (100 * (x.std or 0.0), 100 * (y.std or 0.0))
            marks.append(Mark(_label(table, row, fields), (100 * x.mean, 100 * y.mean), errors))
    front = [mark for mark in marks if not any(_beats(other, mark) for other in marks)]
    figure = Figure(figsize=(6.4, 4.4 + 0.2 * len(marks)), layout="constrained")
    axes = figure.add_subplot()
    for number, mark in enumerate(marks):
        _draw_mark(axes, mark, **_look(number), label=_no_math(mark.name))
    steps = sorted(mark.center for mark in front)
    axes.step([x for x, _ in steps], [y for _, y in steps], where="pre", color=INK, lw=0.8, ls=":")
    axes.set_xlabel(f"{table.columns[across].title} in %, mean ± std")
    axes.set_ylabel(f"{table.columns[up].title} in %, mean ± std")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower left", fontsize=8, frameon=False)
    return figure


def _beats(one: Mark, other: Mark) -> bool:
    return one.center != other.center and all(a >= b for a, b in zip(one.center, other.center, strict=True))


# --- bars -------------------------------------------------------------------------------------------------------------


def _bars(table: Table, fields: list[int], measures: list[int]) -> Figure:
    names = [_label(table, row, fields) or "all runs" for row in table.rows]
    thickness = 0.8 / len(measures)
    figure = Figure(figsize=(7, 1.2 + 0.3 * len(names) * (len(measures) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for number, place in enumerate(measures):
        drawn = [(row_number, row[place]) for row_number, row in enumerate(table.rows)]
        values = [(row_number, value.mean, value.std or 0.0) for row_number, value in drawn if isinstance(value, Measured)]
        heights = [row_number + (number - (len(measures) - 1) / 2) * thickness for row_number, _, _ in values]
        axes.barh(
            heights,
            [100 * mean for _, mean, _ in values],
            thickness * 0.9,
            xerr=[100 * std for _, _, std in values],
            label=table.columns[place].title,
            color=_COLORS[number % len(_COLORS)],
            error_kw={"capsize": 2, "elinewidth": 1},
        )
        for height, (_, mean, std) in zip(heights, values, strict=True):
            axes.text(100 * (mean + std) + 0.7, height, percent(mean), va="center", fontsize=8)
    # A name is text: a dollar sign in it does not begin a formula.
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])  # room for the numbers
    axes.set_xlabel("accuracy in %, mean ± std")
    figure.legend(loc="outside upper right", ncols=len(measures), frameon=False)
    return figure


def _no_math(name: str) -> str:
    """A name in a legend, which has no switch for it: a dollar sign in it does not begin a formula."""
    return name.replace("$", r"\$")


# --- the charts of a report -------------------------------------------------------------------------------------------

Curve = list[tuple[float, float]]
"""epochs and percent"""
#: the colour of text on a light and on a dark page
_INKS = ("#1c2127", "#e6eaee")
_REPORT: dict[Any, Any] = {
    **STYLE,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",  # text stays text
}


def trade_chart(metric: str, marks: Sequence[Mark]) -> str:
    """Top-1 (across) against another metric: a mark for each method, with its seeds and the intervals of its differences.

    The first method is the one that the others are compared with.
    """
    with matplotlib.rc_context(_REPORT):
        figure = Figure(figsize=(5.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for number, mark in enumerate(marks):
            look = _look(number)
            _draw_mark(axes, mark, **look, label=_no_math(mark.name))
            across, up = zip(*mark.seeds, strict=True)
            axes.scatter(across, up, s=6, color=look["color"], alpha=0.6)
        axes.axvline(marks[0].center[0], color=_look(0)["color"], lw=0.8, ls="--")
        axes.axhline(marks[0].center[1], color=_look(0)["color"], lw=0.8, ls="--")
        axes.set_xlabel("top-1 in %")
        axes.set_ylabel(f"{title(metric)} in %")
        axes.grid(alpha=0.25)
        figure.legend(loc="outside lower left", ncols=2, fontsize=9, frameon=False)
        return _data_uri(figure)


def coverage_chart(methods: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """How many percent of the test examples have their target among the first k guesses (up), for each k (across)."""
    with matplotlib.rc_context(_REPORT):
        figure = Figure(figsize=(5.6, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, curve) in enumerate(methods.items()):
            look: dict[str, Any] = dict(_look(number))
            axes.plot(*zip(*curve, strict=True), **look, markevery=0.1, markersize=4, label=_no_math(name))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("guesses")
        axes.set_ylabel("test examples covered in %")
        axes.grid(alpha=0.25)
        figure.legend(loc="outside lower left", ncols=2, fontsize=9, frameon=False)
        return _data_uri(figure)


def curve_chart(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> str:
    """Validation accuracy over the epochs, for each metric and method: the curves of the seeds thin, their mean thick."""
    with matplotlib.rc_context(_REPORT):
        figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
        for axes, (metric, methods) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for number, (name, curves) in enumerate(methods.items()):
                color = _look(number)["color"]
                for curve in curves if len(curves) > 1 else ():
                    axes.plot(*zip(*curve, strict=True), color=color, lw=0.6, alpha=0.45)
                mean = mean_curve(curves)
                axes.plot(
                    [x for x, _ in mean],
                    [y for _, y in mean],
                    **_look(number),
                    markevery=[-1] if mean else None,
                    label=_no_math(name),
                )
            # The first evaluations are far below the rest; without them the end of the curves can be read. All ends are shown.
            every = [curve for curves in methods.values() for curve in curves]
            heights = sorted(y for curve in every for _, y in curve)
            low, high = min(heights[len(heights) // 5], *(curve[-1][1] for curve in every)), heights[-1]
            margin = 0.06 * (high - low) or 0.5
            axes.set_ylim(max(low - margin, 0.0), min(high + margin, 100.0))
            axes.set_title(f"validation {title(metric)} in %", fontsize=10)
            axes.set_xlabel("epoch")
            axes.grid(axis="y", alpha=0.25)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=3, fontsize=9, frameon=False)
        return _data_uri(figure)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean where all seeds have a point: a seed that stopped early must not bend it."""
    heights = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(height) for height in heights)))
    return [(x, math.fsum(height[x] for height in heights) / len(heights)) for x in shared]


def _data_uri(figure: Figure) -> str:
    """A figure as the source of an image, with text in the colour of a light or of a dark page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    light, dark = (f"svg {{ color: {ink} }}" for ink in _INKS)
    style = f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"
    written = re.sub(r"<svg[^>]*>", lambda tag: tag[0] + style, out.getvalue(), count=1).replace(INK, "currentColor")
    return "data:image/svg+xml;base64," + base64.b64encode(written.encode()).decode("ascii")
