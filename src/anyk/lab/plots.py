"""Charts: how they look, where their labels go, tables as files of plots, and the charts of a report as SVG.

Plots are drawn by matplotlib; the file's suffix chooses the format: png, svg or pdf. The charts of a report are plain SVG, so
that they take their colours from the page, light or dark, and have texts that a browser shows under the pointer.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D

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
_LABELS = 12  # beside points; more would hide them
_LETTERS_BESIDE = 40  # of such a label; longer ones do not fit

# --- labels -----------------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]
"""two opposite corners: the smaller x and y, then the larger ones"""
#: a label so far from its point gets a line to it
FAR = 12.0


def place_label(x: float, y: float, width: float, height: float, obstacles: Sequence[tuple[Box, float]], frame: Box) -> Box:
    """Where a label beside a point hides the least; of equally good places the nearest, to the right first.

    Args:
        x: of the point.
        y: of the point.
        width: of the label, in pixels or in what else all of these are.
        height: of the label.
        obstacles: what should not be hidden, each with how much that matters.
        frame: what the label should not leave.
    """
    best: tuple[float, Box] | None = None
    for ring, distance in enumerate((9.0, 18.0, 30.0, 45.0, 62.0)):
        for across, along in ((1, 0), (-1, 0), (0.7, -0.7), (0.7, 0.7), (-0.7, -0.7), (-0.7, 0.7), (0, -1), (0, 1)):
            left = x + across * (distance + width / 2) - width / 2
            top = y + along * (distance + height / 2) - height / 2
            box = (left, top, left + width, top + height)
            overhang = [frame[0] - box[0], frame[1] - box[1], box[2] - frame[2], box[3] - frame[3]]
            outside = sum(100 + part for part in overhang if part > 0)
            cost = ring + outside + sum(weight for other, weight in obstacles if overlap(box, other))
            if best is None or cost < best[0]:
                best = (cost, box)
    assert best is not None
    return best[1]


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes have a point in common that is not on their edges."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def nearest_point(x: float, y: float, box: Box) -> tuple[float, float]:
    """The point of a box that is nearest to another."""
    return min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])


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
    if column.key in ("p_k", "p_k_end") and isinstance(value, tuple):
        parts = [f"top-{place} {p:g}" for place, p in enumerate(value, 1) if isinstance(p, float) and p]
        return f"{_title(column)} {' + '.join(parts)}"
    written = f"{value:.3g}" if isinstance(value, float) else text(value, "field")
    # The names of losses and data say what they are; a number or a switch does not.
    return written if column.key in ("loss", "data", "model") else f"{_title(column)} {written}"


def _title(column: Column) -> str:
    return {"p_k": "P_K", "p_k_end": "P_K at the end"}.get(column.key, column.title.replace("_", " "))


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
        axes.set_xlabel(_title(table.columns[along]))
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("accuracy in %, mean ± std")
    handles, names = panels[0].get_legend_handles_labels()
    if names:
        figure.legend(handles, map(_no_math, names), loc="outside upper center", ncols=min(len(names), 4), frameon=False)
    return figure


# --- top-1 against top-k ----------------------------------------------------------------------------------------------


def _trade(table: Table, fields: list[int], measures: list[int]) -> Figure:
    """Top-1 against the first other metric, as points; those that no other one beats in both are joined and named."""
    across, up = measures[0], next((place for place in measures if table.columns[place].key == "top5"), measures[1])
    loss = next(place for place in fields if table.columns[place].key == "loss")
    points = [
        (row, x, y) for row in table.rows if isinstance(x := row[across], Measured) and isinstance(y := row[up], Measured)
    ]
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(text(row[loss], "field") for row, _, _ in points))
    for number, name in enumerate(names):
        own = [(x, y) for row, x, y in points if text(row[loss], "field") == name]
        axes.errorbar(
            [100 * x.mean for x, _ in own],
            [100 * y.mean for _, y in own],
            [100 * (y.std or 0.0) for _, y in own],
            [100 * (x.std or 0.0) for x, _ in own],
            linestyle="none",
            marker=_MARKERS[number // len(_COLORS) % len(_MARKERS)],
            color=_COLORS[number % len(_COLORS)],
            elinewidth=0.8,
            label=_no_math(name),
        )
    front = [
        (row, x, y)
        for row, x, y in points
        if not any(a.mean >= x.mean and b.mean >= y.mean and (a.mean, b.mean) != (x.mean, y.mean) for _, a, b in points)
    ]
    front.sort(key=lambda point: point[1].mean)
    steps = [(100 * x.mean, 100 * y.mean) for _, x, y in front]
    axes.step([x for x, _ in steps], [y for _, y in steps], where="pre", color=INK, lw=0.8, ls=":")
    axes.set_xlabel(f"{table.columns[across].title} in %, mean ± std")
    axes.set_ylabel(f"{table.columns[up].title} in %, mean ± std")
    axes.margins(0.12)
    axes.grid(alpha=0.25)
    # Of few, all are named; of many, those that are not beaten. Long names stand below, under a number.
    named = points if len(points) <= _LABELS else front[:_LABELS]
    labels = [_label(table, row, fields) for row, _, _ in named]
    numbered = len(points) > len(names) or max(map(len, labels)) > _LETTERS_BESIDE
    if numbered:
        figure.legend(loc="outside upper center", ncols=min(len(names), 6), frameon=False)
        below = [Line2D([], [], linestyle="none", label=_no_math(f"{n}  {label}")) for n, label in enumerate(labels, 1)]
        figure.legend(handles=below, loc="outside lower left", handlelength=0, handletextpad=0, fontsize=8, frameon=False)
        labels = [str(number) for number in range(1, 1 + len(labels))]
    figure.set_figheight(4.8 + 0.17 * (len(labels) if numbered else 0))
    drawn = [(100 * x.mean, 100 * y.mean, 100 * (x.std or 0.0), 100 * (y.std or 0.0)) for _, x, y in points]
    at: dict[tuple[float, float], str] = {}
    for (_, x, y), label in zip(named, labels, strict=True):
        place = (100 * x.mean, 100 * y.mean)
        at[place] = f"{at[place]}, {label}" if place in at else label
    _name_points(figure, axes, at, drawn, steps)
    return figure


def _name_points(
    figure: Figure,
    axes: Axes,
    named: Mapping[tuple[float, float], str],
    points: Sequence[tuple[float, float, float, float]],
    steps: Sequence[tuple[float, float]],
) -> None:
    """A label beside each point that has a name, away from the points with their bars, from the steps and other labels."""
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # the layout decides where the points are
    figure.set_layout_engine("none")  # and labels should not move them

    def box(ends: Sequence[tuple[float, float]], margin: float) -> Box:
        (x, y), (other_x, other_y) = axes.transData.transform(ends)
        low, high = (min(x, other_x), min(y, other_y)), (max(x, other_x), max(y, other_y))
        return low[0] - margin, low[1] - margin, high[0] + margin, high[1] + margin

    obstacles = []
    for x, y, x_std, y_std in points:
        for dx, dy in ((x_std, 0.0), (0.0, y_std)):
            obstacles.append((box([(x - dx, y - dy), (x + dx, y + dy)], 5), 2.0))
    for (x, y), (next_x, next_y) in itertools.pairwise(steps):
        obstacles += [(box([(x, next_y), (x, y)], 0), 2.0), (box([(x, next_y), (next_x, next_y)], 0), 2.0)]
    for (x, y), name in named.items():
        at_x, at_y = axes.transData.transform((x, y))
        width, height, _ = renderer.get_text_width_height_descent(name, FontProperties(size=8), ismath=False)
        label = place_label(at_x, at_y, width, height, obstacles, axes.bbox.extents)
        obstacles.append((label, 20.0))
        near = nearest_point(at_x, at_y, label)
        far = math.hypot(near[0] - at_x, near[1] - at_y) > FAR
        middle = ((label[0] + label[2]) / 2 - at_x, (label[1] + label[3]) / 2 - at_y)
        axes.annotate(
            name,
            (x, y),
            (middle[0] * 72 / figure.dpi, middle[1] * 72 / figure.dpi),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
            color=INK,
            parse_math=False,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#999999", "shrinkB": 3} if far else None,
        )


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
#
# All sizes are in the units of the viewBox; a chart is as wide as a phone and scales up from there. The page has the colours:
# --c0 for the baseline, and after --c6 the same ones again with other dashes.

COLORS = 7
_DASHES = ("", "6 3", "2 3")
_WIDTH = 340
_LETTERS, _LETTER = 18, 6.2
"""the longest label, and about how wide a letter is"""

Curve = list[tuple[float, float]]
"""epochs and percent"""


@dataclass(frozen=True)
class Series:
    """A method in the charts of a report: its colour and shape by number, and its name."""

    number: int
    name: str
    short: str = ""
    """another name, for a label"""

    @property
    def label(self) -> str:
        """A name that is short enough for a chart."""
        name = self.short or self.name
        return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"

    @property
    def color(self) -> str:
        """A variable of the page's style."""
        return f"--c:var(--c{self.number if self.number < COLORS else 1 + (self.number - 1) % (COLORS - 1)})"

    @property
    def dash(self) -> str:
        """Of its lines."""
        return _DASHES[0 if self.number < COLORS else 1 + ((self.number - COLORS) // (COLORS - 1)) % 2]


@dataclass(frozen=True)
class Spot:
    """A method in the plane of two metrics, in percent: its mean, its seeds, and the intervals of its differences."""

    series: Series
    center: tuple[float, float]
    seeds: Mapping[int, tuple[float, float]]
    spans: tuple[tuple[float, float] | None, tuple[float, float] | None] = (None, None)
    """around the mean, in each of the two metrics; None where there is no test"""
    is_baseline: bool = False

    def along(self, way: int) -> list[float]:
        """All that is drawn of it in one of the metrics."""
        return [self.center[way], *(self.spans[way] or ()), *(values[way] for values in self.seeds.values())]

    @property
    def words(self) -> str:
        """For people who do not see it."""
        return f"{self.series.name} {self.center[0]:.2f} and {self.center[1]:.2f}"


@dataclass(frozen=True)
class Axis:
    """Maps values to places, with ticks at round numbers."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> "Axis":
        """An axis of percentages, a little wider than these are."""
        low, high = min(values), max(values)
        margin = 0.06 * (high - low) or 0.5
        return cls(max(low - margin, 0.0), min(high + margin, 100.0), start, end)

    @property
    def ticks(self) -> list[float]:
        """Five or a few more or less."""
        step = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(size for size in (step / 5, step / 2, step, 2 * step, 5 * step) if (self.high - self.low) / size <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def accuracy_chart(metric: str, rows: Sequence[tuple[Series, Mapping[int, float]]]) -> Markup:
    """A line for each method, whose accuracies are given by seed: small marks, their mean and its standard deviation."""
    measured = [(series, seeds, Measured(tuple(seeds.values()))) for series, seeds in rows]
    bounds = [bound for _, _, value in measured for bound in (*_spread(value), *(100 * one for one in value.values))]
    left = 10 + _LETTER * max(len(series.label) for series, _ in rows)
    axis, bottom = Axis.around(bounds, left, _WIDTH - 12), 26.0 + 30 * len(rows)
    parts = [_heading(title(metric)), *_ticks_below(axis, bottom), *_lines_up(axis, 26, bottom)]
    for row, (series, seeds, value) in enumerate(measured):
        y = 41 + 30 * row
        parts.append(_text(left - 8, y + 4, _tag("title", series.name), series.label, class_="name"))
        if value.std:
            parts.append(_whisker(series, axis(_spread(value)[0]), axis(_spread(value)[1]), y))
        parts += [_dot(series, axis(100 * one), y + 8, 2.4, f"seed {seed}: {percent(one)} %") for seed, one in seeds.items()]
        parts.append(_marker(series, axis(100 * value.mean), y, 4.5, f"{series.name}: {text(value, 'accuracy')} %"))
    described = "; ".join(f"{series.name} {text(value, 'accuracy')}" for series, _, value in measured)
    return _svg(bottom + 20, f"{title(metric)} accuracy in percent: {described}", parts)


def trade_chart(metric: str, spots: Sequence[Spot]) -> Markup:
    """Top-1 (across) against another metric: a mark for each method, with its seeds and the intervals of its differences."""
    frame = left, top, right, bottom = (40.0, 30.0, _WIDTH - 10.0, 250.0)
    horizontal = Axis.around([value for spot in spots for value in spot.along(0)], left, right)
    vertical = Axis.around([value for spot in spots for value in spot.along(1)], bottom, top)
    parts = [_heading(f"{title(metric)} against top-1")]
    parts += [*_lines_up(horizontal, top, bottom), *_ticks_below(horizontal, bottom), *_lines_across(vertical, left, right)]
    parts.append(_text(right, bottom + 28, "top-1", class_="tick end"))
    obstacles: list[tuple[Box, float]] = []
    for spot in spots:
        x, y = horizontal(spot.center[0]), vertical(spot.center[1])
        obstacles.append(((x - 6, y - 6, x + 6, y + 6), 20.0))
        if spot.is_baseline:
            lines = f"M{x} {top}V{bottom}M{left} {y}H{right}"
            parts.append(_tag("path", d=lines, class_="baseline", style=spot.series.color))
            obstacles += [((x - 1, top, x + 1, bottom), 5.0), ((left, y - 1, right, y + 1), 5.0)]
        if spot.spans[0] is not None:
            low, high = map(horizontal, spot.spans[0])
            parts.append(_whisker(spot.series, low, high, y))
            obstacles.append(((low, y - 3, high, y + 3), 10.0))
        if spot.spans[1] is not None:
            low, high = map(vertical, spot.spans[1])
            parts.append(_whisker(spot.series, low, high, x, upright=True))
            obstacles.append(((x - 3, high, x + 3, low), 10.0))
        for seed, values in spot.seeds.items():
            at = horizontal(values[0]), vertical(values[1])
            message = f"{spot.series.name}, seed {seed}: {values[0]:.2f} and {values[1]:.2f}"
            parts.append(_dot(spot.series, *at, 2.2, message))
            obstacles.append(((at[0] - 2, at[1] - 2, at[0] + 2, at[1] + 2), 2.0))
    labels: list[Markup] = []
    for spot in spots:
        x, y, series = horizontal(spot.center[0]), vertical(spot.center[1]), spot.series
        parts.append(_marker(series, x, y, 5, spot.words))
        box = place_label(x, y, _LETTER * len(series.label), 13.0, obstacles, frame)
        obstacles.append((box, 20.0))
        near = nearest_point(x, y, box)
        if math.hypot(near[0] - x, near[1] - y) > FAR:
            labels.append(_line(x, y, *near, class_="leader", style=series.color))
        name = _tag("title", series.name), series.label
        labels.append(_text((box[0] + box[2]) / 2, box[3] - 3, *name, class_="middle label", style=series.color))
    described = "; ".join(spot.words for spot in spots)
    return _svg(bottom + 32, f"top-1 and {title(metric)} accuracy in percent: {described}", [*parts, *labels])


def curve_chart(metric: str, drawn: Sequence[tuple[Series, Sequence[Curve]]]) -> Markup:
    """Validation accuracy over the epochs: the curves of the seeds thin, their mean thick."""
    left, right, top, bottom = 34, _WIDTH - 10, 26, 182
    epochs, heights = zip(*(point for _, curves in drawn for curve in curves for point in curve), strict=True)
    # The first evaluations are far below the rest; without them the end of the curves can be read. All ends are shown.
    ends = [curve[-1][1] for _, curves in drawn for curve in curves]
    vertical = Axis.around([min(sorted(heights)[len(heights) // 5], *ends), max(heights)], bottom, top)
    horizontal = Axis(min(epochs), max(epochs) if max(epochs) > min(epochs) else min(epochs) + 1, left, right)
    parts = [_heading(f"validation {title(metric)}"), *_lines_across(vertical, left, right)]
    whole = horizontal.high - horizontal.low >= 2
    parts += _ticks_below(horizontal, bottom + 2, [tick for tick in horizontal.ticks if tick.is_integer() or not whole])
    parts.append(_text((_WIDTH + 24) / 2, 212, "epoch", class_="tick middle"))

    def line(series: Series, curve: Curve, style: str) -> Markup:
        points = " ".join(f"{horizontal(x):g},{vertical(y):g}" for x, y in curve)
        return _tag("polyline", points=points, class_=style, style=series.color, stroke_dasharray=series.dash)

    lines = [line(series, curve, "thin") for series, curves in drawn if len(curves) > 1 for curve in curves]
    lines += [line(series, mean_curve(curves), "mean") for series, curves in drawn]
    window = _tag("rect", x=left, y=top - 2, width=right - left, height=bottom - top + 4)
    parts += [_tag("clipPath", window, id=f"clip-{metric}"), _tag("g", *lines, clip_path=f"url(#clip-{metric})")]
    for series, curves in drawn:
        for x, y in mean_curve(curves)[-1:]:
            if y >= vertical.low:
                parts.append(_marker(series, horizontal(x), vertical(y), 3.5, f"{series.name}: {y:.2f} %"))
    names = ", ".join(series.name for series, _ in drawn)
    return _svg(216, f"validation {title(metric)} in percent over the epochs, for {names}", parts)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean where all seeds have a point: a seed that stopped early must not bend it."""
    heights = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(height) for height in heights)))
    return [(x, math.fsum(height[x] for height in heights) / len(heights)) for x in shared]


def swatch(series: Series) -> Markup:
    """The sign of a method in a legend."""
    line = _line(1, 8, 27, 8, class_="mean", style=series.color, stroke_dasharray=series.dash)
    return _tag("svg", line, _marker(series, 14, 8, 4, ""), viewBox="0 0 28 16", class_="swatch", aria_hidden="true")


def _spread(value: Measured) -> tuple[float, float]:
    """Mean minus and plus standard deviation in percent, as far as there are percentages."""
    center, std = 100 * value.mean, 100 * (value.std or 0.0)
    return max(center - std, 0.0), min(center + std, 100.0)


def _tag(name: str, *inside: str, **attributes: Any) -> Markup:
    """An element; ``class_`` is its class, and other underscores are hyphens. What is no Markup is escaped."""
    written = (Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(written), Markup("").join(inside))


def _svg(height: float, label: str, parts: Sequence[Markup]) -> Markup:
    return _tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=label)


def _text(x: float, y: float, *inside: str, **attributes: str) -> Markup:
    return _tag("text", *inside, x=round(x, 1), y=round(y, 1), **attributes)


def _line(x: float, y: float, end_x: float, end_y: float, **attributes: str) -> Markup:
    return _tag("line", x1=round(x, 1), y1=round(y, 1), x2=round(end_x, 1), y2=round(end_y, 1), **attributes)


def _heading(words: str) -> Markup:
    return _text(2, 14, f"{words} ", _tag("tspan", "%", class_="unit"), class_="heading")


def _lines_up(axis: Axis, top: float, bottom: float) -> list[Markup]:
    return [_line(axis(tick), top, axis(tick), bottom, class_="grid") for tick in axis.ticks]


def _ticks_below(axis: Axis, bottom: float, ticks: Sequence[float] | None = None) -> list[Markup]:
    ticks = axis.ticks if ticks is None else ticks
    return [_text(axis(tick), bottom + 14, f"{tick:.10g}", class_="tick middle") for tick in ticks]


def _lines_across(axis: Axis, left: float, right: float) -> list[Markup]:
    """Of a vertical axis, with its ticks."""
    lines = [_line(left, axis(tick), right, axis(tick), class_="grid") for tick in axis.ticks]
    return lines + [_text(left - 4, axis(tick) + 3.5, f"{tick:.10g}", class_="tick end") for tick in axis.ticks]


def _whisker(series: Series, low: float, high: float, at: float, upright: bool = False) -> Markup:
    near = round(at - 4, 1)
    path = f"M{near} {low}h8m-4 0V{high}m-4 0h8" if upright else f"M{low} {near}v8m0 -4H{high}m0 -4v8"
    return _tag("path", d=path, class_="whisker", style=series.color)


def _dot(series: Series, x: float, y: float, radius: float, message: str) -> Markup:
    """A seed, with what is shown under the pointer."""
    return _tag("circle", _tag("title", message), cx=x, cy=y, r=radius, class_="seed", style=series.color)


def _marker(series: Series, x: float, y: float, size: float, message: str) -> Markup:
    """A dot, a square, a diamond or a triangle: shapes tell the methods apart where colours do not."""
    outline = (
        [(math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)) for turn in range(16)],
        [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
    )[series.number % 4]
    corners = " ".join(f"{x + size * right:.1f},{y + size * down:.1f}" for right, down in outline)
    return _tag("polygon", _tag("title", message), points=corners, class_="dot", style=series.color)
