"""Tables as plots."""

from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from anyk.lab import figures
from anyk.lab.errors import LabError
from anyk.lab.figures import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from anyk.lab.tables import Column, Measured, Table, order, percent, text


def plot(table: Table, path: str | Path) -> None:
    """Draw the accuracies with their standard deviations: over the field, where one numeric field differs, else as bars.

    Args:
        table: with a column of accuracies.
        path: a file that ends in .png, .svg or .pdf.
    """
    path = Path(path)
    figures.check_suffix(path)
    measures = [(place, column) for place, column in enumerate(table.columns) if column.kind == "accuracy"]
    if not table.rows or not measures:
        raise LabError("There is nothing to plot: no finished run has a test accuracy.")
    fields = [place for place, column in enumerate(table.columns) if column.kind == "field"]
    fields = [place for place in fields if len({row[place] for row in table.rows}) > 1]
    draw: Callable[..., Figure] = _bars
    if len(fields) == 1:
        along = [row[fields[0]] for row in table.rows]
        if all(type(value) in (int, float) for value in along) and len(set(along)) == len(along):
            draw = _lines
    with matplotlib.rc_context(figures.STYLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        figures.save(draw(table, fields, measures), path, dpi=150)


_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
_MARKERS = "osD^vP"


def _lines(table: Table, fields: list[int], measures: list[tuple[int, Column]]) -> Figure:
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    place = fields[0]
    rows = sorted(table.rows, key=lambda row: order(row[place]))
    along = [float(row[place]) for row in rows]  # type: ignore[arg-type]
    for number, (column_place, column) in enumerate(measures):
        points = zip(along, (row[column_place] for row in rows), strict=True)
        drawn = [(x, value.mean, value.std or 0.0) for x, value in points if isinstance(value, Measured)]
        axes.errorbar(
            [x for x, _, _ in drawn],
            [100 * mean for _, mean, _ in drawn],
            [100 * std for _, _, std in drawn],
            label=column.title,
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            capsize=3,
        )
    if min(along) > 0 and max(along) >= 20 * min(along):
        axes.set_xscale("log")
    if len(along) <= 10:
        axes.set_xticks(along, [f"{x:g}" for x in along])
        axes.minorticks_off()
    axes.set_xlabel(table.columns[place].title)
    axes.set_ylabel("accuracy in %, mean ± std")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper right", ncols=len(measures), frameon=False)
    return figure


def _bars(table: Table, fields: list[int], measures: list[tuple[int, Column]]) -> Figure:
    names = [", ".join(text(row[place], "field") for place in fields) or "all runs" for row in table.rows]
    thickness = 0.8 / len(measures)
    figure = Figure(figsize=(7, 1.2 + 0.3 * len(names) * (len(measures) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for number, (place, column) in enumerate(measures):
        drawn = [(row_number, row[place]) for row_number, row in enumerate(table.rows)]
        values = [(row_number, value.mean, value.std or 0.0) for row_number, value in drawn if isinstance(value, Measured)]
        heights = [row_number + (number - (len(measures) - 1) / 2) * thickness for row_number, _, _ in values]
        axes.barh(
            heights,
            [100 * mean for _, mean, _ in values],
            thickness * 0.9,
            xerr=[100 * std for _, _, std in values],
            label=column.title,
            color=_COLORS[number % len(_COLORS)],
            error_kw={"capsize": 2, "elinewidth": 1},
        )
        for height, (_, mean, std) in zip(heights, values, strict=True):
            axes.text(100 * (mean + std) + 0.7, height, percent(mean), va="center", fontsize=8)
    # A name is text: a dollar sign in it does not begin a formula.
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylabel(", ".join(table.columns[place].title for place in fields))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])  # room for the numbers
    axes.set_xlabel("accuracy in %, mean ± std")
    figure.legend(loc="outside upper right", ncols=len(measures), frameon=False)
    return figure
