"""Comparator networks, drawn as the paper draws them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from torch import Tensor

from anyk import networks as comparator_networks
from anyk.lab import figures
from anyk.lab.figures import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from anyk.networks import Comparator, Network
from anyk.registry import NETWORKS

MOST_WIRES = 128
"""more would not be legible on any page"""
GROUP_COLOURS = ("#7B4EA3", BLUE, ORANGE, GREEN, "#A6611A", SKY, PURPLE, "#4D4D4D")
FAINT, BAND = "#B8B8B8", "#F4F4F2"

SELECTIONS: dict[str, tuple[str, Callable[[int, int], Network]]] = {
    "selection_bitonic": ("Bitonic selection network", lambda n, k: comparator_networks.selection(n, k, "bitonic")),
    "selection_odd_even_merge": (
        "Odd-even merge selection network",
        lambda n, k: comparator_networks.selection(n, k, "odd_even_merge"),
    ),
    "selection_pairwise": ("Pairwise selection network", lambda n, k: comparator_networks.selection(n, k, "pairwise")),
}
"""The classical selection networks, which are no operators, by name."""


def drawable() -> dict[str, tuple[str, Callable[[int, int], Network]]]:
    """All networks that can be drawn, by name: their titles, and what builds them."""
    known = {name: NETWORKS[name] for name in NETWORKS}
    return {name: (kind.title, kind.build) for name, kind in known.items()} | SELECTIONS


def network(kind: str, n: int, k: int, path: str | Path, *, packed: bool = False, ranks: bool | None = None) -> Path:
    """Draw a comparator network as the paper draws it.

    Wires run from left to right, a comparator joins two of them and puts the larger value on the upper one. A column band is
    a layer; comparators of a layer that would overlap stand side by side. Colours tell the splitter cascades apart, or the
    merge steps of the other networks. A cross marks where a wire drops out, a check mark where a rank is settled.

    Args:
        kind: the name of a network, or of one of ``SELECTIONS``.
        n: number of wires.
        k: number of outputs.
        path: the file; its suffix is the format.
        packed: each comparator as early as it can go, instead of in the layer where the construction puts it.
        ranks: write the least rank (0 is the best) of the wires where it changes; None: up to 32 wires.

    Returns:
        The path.
    """
    path = figures.checked_path(path)
    title, build = figures.choose("kind", kind, drawable())
    figures.check_number("n", n, 1, MOST_WIRES)
    figures.check_number("k", k, 1, n)
    drawn = build(n, k)
    facts = _splitter_facts(n, k, drawn) if kind == "splitter" else _general_facts(kind, n, k, drawn)
    if packed:
        facts = facts.packed(drawn)
        drawn = drawn.packed()
    show_ranks = n <= 32 if ranks is None else ranks
    with matplotlib.rc_context(figures.PICTURE_STYLE):
        figure = _network_figure(title, drawn, facts, k, show_ranks)
        return figures.save(figure, path)


@dataclass
class _Facts:
    """What is known about the wires of a network; times are layers, an event at t comes right before layer t."""

    group: dict[tuple[int, Comparator], int]
    """(layer, comparator) -> the cascade or merge step it belongs to"""
    pruned: list[tuple[int, Comparator]] = field(default_factory=list)
    """comparators of full cascades that the outputs do not need"""
    ranks: dict[tuple[int, int], int] = field(default_factory=dict)
    """(time, wire) -> least rank, where it has changed"""
    dropped: dict[int, int] = field(default_factory=dict)
    """wire -> time from which nothing needs it"""
    settled: dict[int, int] = field(default_factory=dict)
    """wire -> time from which its rank is certain"""
    group_name: str = "cascade"

    def packed(self, network: Network) -> "_Facts":
        """The same in the layers of the packed network; ranks and pruned comparators belong to the given layers only."""
        free_from = [0] * network.n
        group = {}
        for layer, comparators in enumerate(network.layers):
            for pair in comparators:
                slot = max(free_from[wire] for wire in pair)
                group[slot, pair] = self.group[layer, pair]
                for wire in pair:
                    free_from[wire] = slot + 1
        dropped = {wire: free_from[wire] for wire in self.dropped}
        settled = {wire: free_from[wire] for wire in self.settled}
        return _Facts(group, [], {}, dropped, settled, self.group_name)


def _splitter_facts(n: int, k: int, network: Network) -> _Facts:
    """From the construction: ranks rise at the end of a cascade, wires drop out at rank k."""
    facts = _Facts({})
    rank_of = dict.fromkeys(range(n), 0)
    kept = [set(layer) for layer in network.layers]
    for number, cascade in enumerate(comparator_networks.splitter_cascades(n, k)):
        for layer, comparators in enumerate(cascade.layers, cascade.start):
            for pair in comparators:
                if pair in kept[layer]:
                    facts.group[layer, pair] = number
                else:
                    facts.pruned.append((layer, pair))
        for wire, rank in zip(cascade.wires, cascade.ranks, strict=True):
            rank_of[wire] = rank
            facts.ranks[cascade.end, wire] = rank
            if rank >= k:
                facts.dropped[wire] = cascade.end
        wires_of = {rank: [wire for wire in rank_of if rank_of[wire] == rank] for rank in range(k)}
        for rank in range(k):
            if len(wires_of[rank]) != 1:
                break
            facts.settled.setdefault(wires_of[rank][0], cascade.end)
    for wire in network.outputs:  # a network of one wire has no cascade
        facts.settled.setdefault(wire, 0)
    return facts


def _general_facts(kind: str, n: int, k: int, network: Network) -> _Facts:
    """From the transitive closure of the comparisons: which wires are known to carry no less, which no more."""
    group = {
        (layer, pair): step for layer, step in enumerate(_merge_steps(kind, n, k, network)) for pair in network.layers[layer]
    }
    facts = _Facts(group, group_name="parity of the layer" if kind == "odd_even" else "merge step")
    known = [0] * n
    last_use = [0] * n
    for layer, (pairs, order) in enumerate(zip(network.layers, _known_order(network), strict=True), 1):
        for pair in pairs:
            last_use[pair[0]] = last_use[pair[1]] = layer
        no_less, no_more = order.sum(0).tolist(), order.sum(1).tolist()  # each wire itself among them
        for wire in range(n):
            least, most = no_less[wire] - 1, n - no_more[wire]
            if least != known[wire]:
                known[wire] = facts.ranks[layer, wire] = least
            if least == most and wire in network.outputs:
                facts.settled.setdefault(wire, layer)
    facts.dropped = {wire: last_use[wire] for wire in range(n) if wire not in network.outputs}
    for wire in network.outputs:
        facts.settled.setdefault(wire, network.depth)
    return facts


def _known_order(network: Network) -> Iterator[Tensor]:
    """After each layer (n, n): entry (x, y) says that wire x is known to carry no less than wire y.

    A new value is the maximum or the minimum of two old ones. A minimum is no less than y if both are; a maximum is if one
    is; no less than a maximum means no less than both, no less than a minimum means no less than one.
    """
    order = torch.eye(network.n, dtype=torch.bool)
    for comparators in network.layers:
        first, second = torch.arange(network.n), torch.arange(network.n)
        is_larger = torch.zeros(network.n, dtype=torch.bool)
        for i, j in comparators:
            second[i], first[j] = j, i
            is_larger[i] = True
        both, either = order[:, first] & order[:, second], order[:, first] | order[:, second]
        columns = torch.where(is_larger, both, either)
        rows = torch.where(is_larger[:, None], columns[first] | columns[second], columns[first] & columns[second])
        # Each of two values may be no more than another one of the two of a maximum.
        covers = order[first] | order[second]
        order = torch.where(is_larger[:, None] & is_larger, covers[:, first] & covers[:, second], rows)
        yield order


def _merge_steps(kind: str, n: int, k: int, network: Network) -> Iterator[int]:
    """The merge step of each layer. A sorting network's step doubles the sorted blocks in 1, 2, 3, … layers; a selection
    network sorts blocks like that and then merges their best in equally many layers each time."""
    if kind in ("odd_even", "selection_pairwise"):
        yield from (layer % 2 if kind == "odd_even" else 0 for layer in range(network.depth))
        return
    block = (n - 1).bit_length() if kind == "bitonic" else (k - 1).bit_length()
    layer, step = 0, 0
    while layer < network.depth:
        length = min(step, block) + 1
        yield from [step] * min(length, network.depth - layer)
        layer, step = layer + length, step + 1


def _network_figure(title: str, drawn: Network, facts: _Facts, k: int, show_ranks: bool) -> Figure:
    """Unit of y is one wire, unit of x the place of one comparator."""
    n = drawn.n
    placed = [
        _side_by_side([*layer, *(pair for place, pair in facts.pruned if place == number)])
        for number, layer in enumerate(drawn.layers)
    ]
    gap = 1.7 if show_ranks else 0.9  # between layers; a rank stands in it
    starts, x = [], 1.0
    for columns in placed:
        starts.append(x)
        x += len(columns) - 1 + gap
    starts.append(x)

    def before(layer: int) -> float:
        """Where something stands that is true from this layer on."""
        return starts[layer] - gap / 2

    row = min(0.26, max(0.11, 9 / n))
    column = min(0.2, max(0.085, 14 / x))
    small = min(7.5, row * 34)
    # Margins in inches: a legend below, two lines of title above. A narrow network keeps its scale; the page stays wide.
    wide, high = (x + 4) * column, (n + 1.4) * row
    page_width, page_height = max(wide + 0.2, 6.4), high + 1.25
    figure = Figure(figsize=(page_width, page_height))
    axes = figure.add_axes((0.1 / page_width, 0.65 / page_height, wide / page_width, high / page_height))
    axes.set(xlim=(-0.8, x + 3.2), ylim=(n - 0.3, -1.7))
    axes.axis("off")
    for layer in range(drawn.depth):
        if layer % 2 == 0:
            axes.axvspan(before(layer), before(layer + 1), color=BAND, zorder=0, lw=0)
        if drawn.depth <= 40 or layer % 4 == 3:
            place = (before(layer) + before(layer + 1)) / 2
            axes.text(place, -0.9, str(layer + 1), ha="center", va="bottom", fontsize=small, color="#777777")
    for wire in range(n):
        end = before(facts.dropped[wire]) if wire in facts.dropped else x + 0.3
        axes.plot([0, end], [wire, wire], color=INK, lw=0.7, zorder=1, solid_capstyle="butt", gid=f"wire-{wire}")
        axes.text(-0.3, wire, str(wire), ha="right", va="center", fontsize=small, color="#777777")
    size, weight = (3.4, 1.3) if n <= 32 else (2.5, 0.9)
    for layer, columns in enumerate(placed):
        for number, pairs in enumerate(columns):
            for i, j in pairs:
                group = facts.group.get((layer, (i, j)))
                needed = group is not None
                colour = FAINT if group is None else GROUP_COLOURS[group % len(GROUP_COLOURS)]
                axes.plot(
                    [starts[layer] + number] * 2,
                    [i, j],
                    color=colour,
                    lw=weight if needed else weight * 0.7,
                    ls="-" if needed else (0, (2, 1.5)),
                    marker="o",
                    ms=size if needed else size * 0.6,
                    mew=0,
                    zorder=3 if needed else 2,
                    gid=f"{'comparator' if needed else 'pruned'}-{layer}-{i}-{j}",
                )
    if show_ranks:
        for (time, wire), rank in facts.ranks.items():
            leaves = facts.dropped.get(wire) == time
            shift = -0.32 if leaves or facts.settled.get(wire) == time else 0
            axes.text(
                before(time) + shift,
                wire,
                str(rank),
                ha="center",
                va="center",
                fontsize=small * 0.88,
                color=VERMILLION if leaves else INK,
                zorder=4,
                bbox={"boxstyle": "square,pad=0.08", "fc": BAND if time % 2 == 0 else "white", "ec": "none"},
            )
    for wire, time in facts.dropped.items():
        axes.plot(before(time) + (0.4 if show_ranks else 0), wire, "x", color=VERMILLION, ms=size * 1.2, mew=1.2, zorder=5)
    for wire, time in facts.settled.items():
        place = before(time) + (0.42 if show_ranks else 0)
        axes.plot(place, wire - 0.02, marker="$\u2713$", color=GREEN, ms=size * 1.9, mew=0.3, zorder=5, gid=f"settled-{wire}")
    for rank, wire in enumerate(drawn.outputs, 1):
        if n <= 32 or drawn.outputs == tuple(range(k)) or k <= 16:
            axes.text(x + 0.55, wire, figures.ordinal(rank), ha="left", va="center", fontsize=small, color=INK)
    axes.set_title(
        f"{title}: the {k} largest of {n}" if k < n else f"{title}: {n} wires" if n > 1 else f"{title}: 1 wire",
        loc="left",
        weight="bold",
        pad=16,
    )
    counts = f"{drawn.depth} layers, {drawn.size} comparators; the larger value goes to the upper wire"
    axes.text(0, 1.0, counts, transform=axes.transAxes, fontsize=8, color="#555555", va="bottom")
    _network_legend(figure, facts, show_ranks)
    return figure


def _side_by_side(comparators: Sequence[Comparator]) -> list[list[Comparator]]:
    """Columns in which no two comparators touch."""
    columns: list[list[Comparator]] = []
    for pair in sorted(comparators):
        free = next((column for column in columns if column[-1][1] < pair[0]), None)
        if free is None:
            columns.append([pair])
        else:
            free.append(pair)
    return columns


def _network_legend(figure: Figure, facts: _Facts, show_ranks: bool) -> None:
    colours = [GROUP_COLOURS[group % len(GROUP_COLOURS)] for group in sorted(set(facts.group.values()))[:3]]
    handles: list[Any] = [tuple(_sample(colour) for colour in colours)] if colours else []
    labels = [f"comparator (a colour: a {facts.group_name})" if len(colours) > 1 else "comparator"] if colours else []
    if facts.pruned:
        handles.append(_sample(FAINT, ls=(0, (2, 1.5)), ms=2))
        labels.append("not needed for these outputs")
    if facts.dropped:
        handles.append(Line2D([], [], ls="", marker="x", color=VERMILLION, ms=5, mew=1.3))
        labels.append("wire drops out")
    handles.append(Line2D([], [], ls="", marker="$\u2713$", color=GREEN, ms=7, mew=0.3))
    labels.append("rank is settled")
    if show_ranks and facts.ranks:
        handles.append(Line2D([], [], ls="", marker="$3$", color=INK, ms=5, mew=0.2))
        labels.append("least rank from here on (0 is the best)")
    figure.legend(
        handles,
        labels,
        loc="lower left",
        ncols=len(handles) if figure.get_figwidth() > 10 else 3 if figure.get_figwidth() > 7 else 2,
        frameon=False,
        fontsize=8,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.6)},
    )


def _sample(colour: str, **style: Any) -> Line2D:
    return Line2D([], [], **{"color": colour, "lw": 1.3, "marker": "o", "ms": 3.4, "mew": 0, **style})
