"""Charts: what all of them share, and tables as plots: lines over a number, top-1 against top-k, or bars.

The file's suffix chooses the format: png, svg or pdf.
"""

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from anyk.lab.errors import LabError
from anyk.lab.tables import Column, Measured, Table, Value, order, percent, text

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
    measures = [place for place, column in enumerate(table.columns) if column.kind == "accuracy"]
    measures = [place for place in measures if table.columns[place].key not in without]
    measures = [place for place in measures if any(isinstance(row[place], Measured) for row in table.rows)]
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
    numeric = [place for place in fields if all(_is_number(row[place]) for row in table.rows if row[place] is not None)]
    if len(numeric) == 1:
        series = _series(table, numeric[0], [place for place in fields if place != numeric[0]])
        # A line has two points: methods that were each tuned to a rate of their own make none.
        if len(series) <= len(_COLORS) and any(len(each.rows) > 1 for each in series):
            return _lines(table, numeric[0], series, measures)
    if len(measures) > 1 and "loss" in {table.columns[place].key for place in fields}:
        return _trade(table, fields, measures)
    return _bars(table, fields, measures)


def _is_number(value: Value) -> bool:
    return type(value) in (int, float)


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
    if len(points) > _LABELS:
        _leave_worst_out(axes, [(100 * x.mean, 100 * y.mean) for _, x, y in points])
    # Of few, all are named; of many, those that are not beaten. Long names stand below, under a number.
    named = points if len(points) <= _LABELS else front[:_LABELS]
    labels = [_label(table, row, fields) for row, _, _ in named]
    if len(points) > len(names):
        figure.legend(loc="outside upper center", ncols=min(len(names), 6), frameon=False)
        told = [Line2D([], [], linestyle="none", label=_no_math(f"{n}  {label}")) for n, label in enumerate(labels, 1)]
        figure.legend(handles=told, loc="outside lower left", handlelength=0, handletextpad=0, fontsize=8, frameon=False)
        labels = [str(number) for number in range(1, 1 + len(labels))]
    figure.set_figheight(4.8 + 0.17 * (len(labels) if len(points) > len(names) else 0))
    drawn = [(100 * x.mean, 100 * y.mean, 100 * (x.std or 0.0), 100 * (y.std or 0.0)) for _, x, y in points]
    at: dict[tuple[float, float], str] = {}
    for (_, x, y), label in zip(named, labels, strict=True):
        place = (100 * x.mean, 100 * y.mean)
        at[place] = f"{at[place]}, {label}" if place in at else label
    _name_points(figure, axes, at, drawn, steps)
    return figure


def _leave_worst_out(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Cut off what is below the median in either: among many runs some are hopeless, and would press the others together."""
    low = [statistics.median(values) for values in zip(*points, strict=True)]
    shown = [point for point in points if point[0] >= low[0] and point[1] >= low[1]]
    if not shown:
        return
    # The best of one metric is shown whatever it is in the other.
    shown += [max(points, key=lambda point: point[place]) for place in (0, 1)]
    for place, limit in ((0, axes.set_xlim), (1, axes.set_ylim)):
        values = [point[place] for point in shown]
        margin = 0.12 * (max(values) - min(values)) or 0.5
        limit(min(values) - margin, max(values) + margin)
    corner = (axes.get_xlim()[0], axes.get_ylim()[0])
    outside = sum(point[0] < corner[0] or point[1] < corner[1] for point in points)
    if outside:
        axes.set_title(f"{outside} of {len(points)} are worse and outside of the picture", fontsize=9, color="#666666")


def _name_points(
    figure: Figure,
    axes: Axes,
    named: Mapping[tuple[float, float], str],
    points: Sequence[tuple[float, float, float, float]],
    steps: Sequence[tuple[float, float]],
) -> None:
    """A label beside each point, on the side where it covers the fewest labels, points with their bars, and steps."""
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # the layout decides where the points are
    figure.set_layout_engine("none")  # and labels should not move them
    taken, labels = [], list[Bbox]()
    for x, y, x_std, y_std in points:
        for dx, dy in ((x_std, 0.0), (0.0, y_std)):
            low, high = axes.transData.transform([(x - dx, y - dy), (x + dx, y + dy)])
            taken.append(Bbox([low - 5, high + 5]))
    for (x, y), (next_x, next_y) in itertools.pairwise(steps):
        for ends in ([(x, next_y), (x, y)], [(x, next_y), (next_x, next_y)]):
            taken.append(Bbox(axes.transData.transform(ends)))
    sides = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
    for (x, y), name in named.items():
        tried: list[tuple[float, int, Annotation, Bbox]] = []
        for reach in (8, 16, 28, 44):
            for dx, dy in sides:
                label = axes.annotate(
                    name,
                    (x, y),
                    (reach * dx, reach * dy),
                    textcoords="offset points",
                    ha=("center", "left", "right")[dx],
                    va=("center", "bottom", "top")[dy],
                    fontsize=8,
                    color=INK,
                    parse_math=False,
                    arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#999999", "shrinkB": 3} if reach > 8 else None,
                )
                label.update_positions(renderer)
                box = Text.get_window_extent(label, renderer)  # without the arrow
                outside = sum(not axes.bbox.contains(*corner) for corner in box.corners())
                covered = sum(box.overlaps(other) for other in taken)
                unreadable = outside + sum(box.overlaps(other) for other in labels)  # a bar behind a label is not as bad
                tried.append((covered + 10 * unreadable, len(tried), label, box))
        _, _, chosen, box = min(tried, key=lambda each: each[:2])
        for _, _, label, _ in tried:
            if label is not chosen:
                label.remove()
        labels.append(box)


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
