"""Draws a splitter network as the paper draws it; pictures.py calls it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from anyk import networks
from anyk.lab import plots
from anyk.lab.plots import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION

STYLE = {
    **plots.STYLE,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
}
"""of the guide's drawings"""

Comparator = tuple[int, int]

CASCADE_COLOURS = ("#7B4EA3", BLUE, ORANGE, GREEN, "#A6611A", SKY, PURPLE, "#4D4D4D")
FAINT, BAND, GREY = "#B8B8B8", "#F4F4F2", "#777777"
GAP = 1.7
"""between layers; the least rank of a wire is written there"""


@dataclass
class Facts:
    """What is known about the wires; times are layers, an event at t comes right before layer t."""

    cascade: dict[tuple[int, Comparator], int] = field(default_factory=dict)
    """(layer, comparator) -> the number of its cascade"""
    pruned: list[tuple[int, Comparator]] = field(default_factory=list)
    """comparators of full cascades that the outputs do not need"""
    ranks: dict[tuple[int, int], int] = field(default_factory=dict)
    """(time, wire) -> least rank, where it has changed"""
    dropped: dict[int, int] = field(default_factory=dict)
    """wire -> time from which nothing needs it"""
    settled: dict[int, int] = field(default_factory=dict)
    """wire -> time from which its rank is certain"""


def facts_of(n: int, k: int) -> Facts:
    """From the construction: ranks rise at the end of a cascade, wires drop out at rank k."""
    facts = Facts()
    rank_of = dict.fromkeys(range(n), 0)
    kept = [set(layer) for layer in networks.splitter(n, k).layers]
    for number, cascade in enumerate(networks.splitter_cascades(n, k)):
        for layer, comparators in enumerate(cascade.layers, cascade.start):
            for pair in comparators:
                if pair in kept[layer]:
                    facts.cascade[layer, pair] = number
                else:
                    facts.pruned.append((layer, pair))
        for wire, rank in zip(cascade.wires, cascade.ranks, strict=True):
            rank_of[wire] = rank
            facts.ranks[cascade.end, wire] = rank
            if rank >= k:
                facts.dropped[wire] = cascade.end
        for rank in range(k):
            wires = [wire for wire in rank_of if rank_of[wire] == rank]
            if len(wires) != 1:
                break
            facts.settled.setdefault(wires[0], cascade.end)
    return facts


def network(n: int, k: int, path: Path) -> None:
    """Draw the splitter network for the k largest of n.

    Wires run from left to right, a comparator joins two of them and puts the larger value on the upper one. A column band is
    a layer; comparators of a layer that would overlap stand side by side. Colours tell the cascades apart. A cross marks where
    a wire drops out, a check mark where a rank is settled. The unit of y is one wire, that of x the place of one comparator.
    """
    built, facts = networks.splitter(n, k), facts_of(n, k)
    placed = [
        side_by_side([*layer, *(pair for place, pair in facts.pruned if place == number)])
        for number, layer in enumerate(built.layers)
    ]
    starts = [1.0]
    for columns in placed:
        starts.append(starts[-1] + len(columns) - 1 + GAP)
    right = starts[-1]
    with matplotlib.rc_context(STYLE):
        # Margins in inches: a legend below, two lines of title above. A narrow network keeps its scale; the page stays wide.
        wide, high = (right + 4) * min(0.2, 14 / right), (n + 1.4) * 0.26
        page_width, page_height = max(wide + 0.2, 6.4), high + 1.25
        figure = Figure(figsize=(page_width, page_height))
        axes = figure.add_axes((0.1 / page_width, 0.65 / page_height, wide / page_width, high / page_height))
        axes.set(xlim=(-0.8, right + 3.2), ylim=(n - 0.3, -1.7))
        axes.axis("off")

        def before(layer: int) -> float:
            """Where something stands that is true from this layer on."""
            return starts[layer] - GAP / 2

        def text(x: float, y: float, words: object, **style: object) -> None:
            axes.text(x, y, str(words), **{"va": "center", "fontsize": 7.5, "color": INK, **style})

        for layer in range(built.depth):
            if layer % 2 == 0:
                axes.axvspan(before(layer), before(layer + 1), color=BAND, zorder=0, lw=0)
            text((before(layer) + before(layer + 1)) / 2, -0.9, layer + 1, ha="center", va="bottom", color=GREY)
        for wire in range(n):
            end = before(facts.dropped[wire]) if wire in facts.dropped else right + 0.3
            axes.plot([0, end], [wire, wire], color=INK, lw=0.7, zorder=1, solid_capstyle="butt", gid=f"wire-{wire}")
            text(-0.3, wire, wire, ha="right", color=GREY)
        for layer, columns in enumerate(placed):
            for number, pairs in enumerate(columns):
                for i, j in pairs:
                    axes.add_line(comparator(facts.cascade.get((layer, (i, j))), starts[layer] + number, layer, i, j))
        for (time, wire), rank in facts.ranks.items():
            leaves = facts.dropped.get(wire) == time
            shift = -0.32 if leaves or facts.settled.get(wire) == time else 0
            box = {"boxstyle": "square,pad=0.08", "fc": BAND if time % 2 == 0 else "white", "ec": "none"}
            colour = VERMILLION if leaves else INK
            text(before(time) + shift, wire, rank, ha="center", fontsize=6.6, color=colour, zorder=4, bbox=box)
        for wire, time in facts.dropped.items():
            axes.plot(before(time) + 0.4, wire, "x", color=VERMILLION, ms=4.08, mew=1.2, zorder=5)
        for wire, time in facts.settled.items():
            check = {"marker": "$\u2713$", "color": GREEN, "ms": 6.46, "mew": 0.3}
            axes.plot(before(time) + 0.42, wire - 0.02, **check, zorder=5, gid=f"settled-{wire}")
        for rank, wire in enumerate(built.outputs, 1):
            text(right + 0.55, wire, ordinal(rank), ha="left")
        axes.set_title(f"Splitter network: the {k} largest of {n}", loc="left", weight="bold", pad=16)
        counts = f"{built.depth} layers, {built.size} comparators; the larger value goes to the upper wire"
        text(0, 1.0, counts, transform=axes.transAxes, fontsize=8, color="#555555", va="bottom")
        legend(figure)
        plots.save(figure, path)


def side_by_side(comparators: Sequence[Comparator]) -> list[list[Comparator]]:
    """Columns in which no two comparators touch."""
    columns: list[list[Comparator]] = []
    for pair in sorted(comparators):
        free = next((column for column in columns if column[-1][1] < pair[0]), None)
        if free is None:
            columns.append([pair])
        else:
            free.append(pair)
    return columns


def comparator(cascade: int | None, x: float, layer: int, i: int, j: int) -> Line2D:
    """A line between two wires; faint, if it belongs to no cascade because the outputs do not need it."""
    if cascade is None:
        style = {"color": FAINT, "lw": 0.91, "ls": (0, (2, 1.5)), "ms": 2.04, "zorder": 2, "gid": f"pruned-{layer}-{i}-{j}"}
    else:
        colour = CASCADE_COLOURS[cascade % len(CASCADE_COLOURS)]
        style = {"color": colour, "lw": 1.3, "ms": 3.4, "zorder": 3, "gid": f"comparator-{layer}-{i}-{j}"}
    return Line2D([x, x], [i, j], marker="o", mew=0, **style)


def legend(figure: Figure) -> None:
    faint = {"color": FAINT, "ls": (0, (2, 1.5)), "ms": 2}
    cascades = tuple(Line2D([], [], color=colour, lw=1.3, marker="o", ms=3.4, mew=0) for colour in CASCADE_COLOURS[:3])
    samples = {
        "comparator (a colour: a cascade)": cascades,
        "not needed for these outputs": Line2D([], [], lw=1.3, marker="o", mew=0, **faint),
        "wire drops out": Line2D([], [], ls="", marker="x", color=VERMILLION, ms=5, mew=1.3),
        "rank is settled": Line2D([], [], ls="", marker="$\u2713$", color=GREEN, ms=7, mew=0.3),
        "least rank from here on (0 is the best)": Line2D([], [], ls="", marker="$3$", color=INK, ms=5, mew=0.2),
    }
    figure.legend(
        samples.values(),
        samples.keys(),
        loc="lower left",
        ncols=3 if figure.get_figwidth() > 7 else 2,
        frameon=False,
        fontsize=8,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.6)},
    )


def ordinal(rank: int) -> str:
    """1st, 2nd, 3rd, …"""
    suffix = "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{suffix}"
