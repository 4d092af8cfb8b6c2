"""Comparator networks as data: which wires are compared, in which layer. Pure Python, no torch.

A comparator ``(i, j)`` always has ``i < j`` and puts the larger of its two values on wire ``i``. With that convention
(Knuth's *standard form*) a wire whose value loses every comparison never moves, so a network for n wires is a network
for 2^p >= n wires with the surplus wires left off, and rows that are padded at the end run through it unharmed.

Networks follow the published construction wire by wire: sorting networks are usually drawn ascending; seen from the
other end (wire i becomes wire n-1-i) they are the descending ones that stand here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

__all__ = ["KINDS", "Kind", "Network", "bitonic", "odd_even", "splitter"]

Comparator = tuple[int, int]
Layer = tuple[Comparator, ...]
Layers = list[list[Comparator]]


@dataclass(frozen=True)
class Network:
    """A comparator network: an immutable value.

    Args:
        n: number of wires.
        layers: one tuple of comparators ``(i, j)``, ``i < j``, for every layer; the wires of one layer are disjoint.
        outputs: the wires on which the best, the second best, … value ends.

    Example:
        >>> net = anyk.networks.splitter(16, 5)
        >>> net.depth, net.size, net.outputs[:2]
        (10, 48, (0, 1))
    """

    n: int
    layers: tuple[Layer, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(tuple(map(tuple, layer)) for layer in self.layers))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        for number, layer in enumerate(self.layers):
            wires = [wire for comparator in layer for wire in comparator]
            if len(set(wires)) != len(wires):
                raise ValueError(f"layers: expected disjoint comparators, got a wire twice in layer {number}")
            if wrong := [(i, j) for i, j in layer if not 0 <= i < j < self.n]:
                raise ValueError(f"layers: expected comparators (i, j) with 0 <= i < j < n={self.n}, got {wrong[0]}")
        if len(set(self.outputs)) != len(self.outputs) or not all(0 <= wire < self.n for wire in self.outputs):
            raise ValueError(f"outputs: expected distinct wires below n={self.n}, got {self.outputs}")

    def __hash__(self) -> int:  # a network can hold millions of comparators: do not walk them for every look-up
        return hash((self.n, self.outputs, self.depth, self.size))

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def size(self) -> int:
        """Number of comparators."""
        return sum(map(len, self.layers))

    def partners(self) -> list[list[int]]:
        """The table that is run: for each layer, the wire that each of the n wires is compared with, itself if with none. The
        lower number is to get the larger value."""
        table = []
        for layer in self.layers:
            row = list(range(self.n))
            for i, j in layer:
                row[i], row[j] = j, i
            table.append(row)
        return table

    def top(self, k: int) -> Network:
        """The same network for the first k outputs only.

        Comparators that cannot influence these outputs are pruned; the others stay in the layer where they are.
        """
        _, k = _checked(len(self.outputs), k)
        needed = set(self.outputs[:k])
        layers: list[Layer] = []
        for layer in reversed(self.layers):
            kept = tuple(pair for pair in layer if pair[0] in needed or pair[1] in needed)
            needed.update(wire for pair in kept for wire in pair)
            layers.append(kept)
        return _trusted(self.n, layers[::-1], self.outputs[:k])

    def packed(self) -> Network:
        """The same comparators, each in the earliest layer where its wires are free: equal result, least depth."""
        free_from = [0] * self.n
        layers: Layers = []
        for i, j in (pair for layer in self.layers for pair in layer):
            number = max(free_from[i], free_from[j])
            if number == len(layers):
                layers.append([])
            layers[number].append((i, j))
            free_from[i] = free_from[j] = number + 1
        return _trusted(self.n, layers, self.outputs)


def _trusted(n: int, layers: Iterable[Iterable[Comparator]], outputs: Iterable[int]) -> Network:
    """A Network from comparators that are right by construction: checking millions of them takes seconds."""
    network = object.__new__(Network)
    network.__dict__.update(n=n, layers=tuple(map(tuple, layers)), outputs=tuple(outputs))
    return network


def _checked(n: Any, k: Any = 1) -> tuple[int, int]:
    for name, number in (("n", n), ("k", k)):
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise TypeError(f"{name}: expected an integer, got {number!r}")
    n, k = operator.index(n), operator.index(k)
    if n < 1:
        raise ValueError(f"n: expected at least 1 wire, got {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k: expected 1 <= k <= n={n}, got {k}")
    return n, k


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


# typed: 2.0 and True must not find the networks of 2 and 1
_cached = lru_cache(maxsize=64, typed=True)


@_cached
def odd_even(n: int) -> Network:
    """Odd-even transposition sort: n layers of neighbours, alternating.

    Args:
        n: the number of values, one on each wire.

    Example:
        >>> anyk.networks.odd_even(4).layers[0]
        ((0, 1), (2, 3))
    """
    n, _ = _checked(n)
    # The published network starts its pairs at the worst wire, which is wire n-1 here.
    layers = (tuple((i, i + 1) for i in range((n - layer) % 2, n - 1, 2)) for layer in range(n))
    return _trusted(n, [layer for layer in layers if layer], range(n))


@_cached
def bitonic(n: int) -> Network:
    """Batcher's bitonic sorting network, for any n: p(p+1)/2 layers with p = ceil(log2 n).

    Args:
        n: the number of values, one on each wire.

    Example:
        >>> anyk.networks.bitonic(10450).depth
        105
    """
    n, _ = _checked(n)
    p = _log2_ceil(n)
    return _trusted(n, _below(n, _merges(p, p, _bitonic_merge)), range(n))


@_cached
def splitter(n: int, k: int) -> Network:
    """Splitter selection network: moves the k largest of n values, sorted, to the first k wires.

    Every wire carries the least rank that its value can still have. Wires of equal least rank r know nothing of each
    other; a splitter cascade over them raises the i-th to r + 2^(set bits of i) - 1. A wire that reaches k drops out.
    This is repeated, from rank k-1 down to 0, until every rank below k has one wire.

    Args:
        n: the number of values, one on each wire.
        k: how many of them are wanted.

    Example:
        >>> anyk.networks.splitter(1024, 5).depth, anyk.networks.splitter(1024, 5).packed().depth
        (22, 21)

    Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022, appendix B.
    """
    n, k = _checked(n, k)
    layers: Layers = []
    rank_of = dict.fromkeys(range(n), 0)
    for wires, start, cascade, ranks in splitter_cascades(n, k):
        layers += [[] for _ in range(start + len(cascade) - len(layers))]
        for number, comparators in enumerate(cascade, start):
            layers[number].extend(comparators)
        rank_of.update(zip(wires, ranks, strict=True))
    outputs = {rank: wire for wire, rank in rank_of.items()}
    return _trusted(n, layers, [outputs[rank] for rank in range(k)]).top(k)


def splitter_cascades(n: int, k: int) -> Iterator[tuple[list[int], int, Layers, list[int]]]:
    """The cascades of :func:`splitter`, in the order in which they are laid out: the wires, which had one least rank before; the
    first layer; the comparators; and the least ranks, counted from 0, of the values on these wires afterwards."""
    wires_of_rank: list[list[int]] = [list(range(n))] + [[] for _ in range(k - 1)]
    free_from = [0] * n
    while any(len(wires) > 1 for wires in wires_of_rank):
        for rank in range(k - 1, -1, -1):
            wires = sorted(wires_of_rank[rank])
            if len(wires) < 2:
                continue
            ranks = [rank + (1 << position.bit_count()) - 1 for position in range(len(wires))]
            start = max(free_from[wire] for wire in wires)
            # splitters of halving width: the wire at position i ends below 2^(set bits of i) - 1 others
            layers = _halvings(wires, _log2_ceil(len(wires)))
            yield wires, start, layers, ranks
            wires_of_rank[rank] = []
            for wire, raised in zip(wires, ranks, strict=True):
                free_from[wire] = start + len(layers)
                if raised < k:
                    wires_of_rank[raised].append(wire)


@_cached
def selection(n: int, k: int, kind: str = "bitonic") -> Network:
    """The classical selection networks: sort blocks of 2^L wires, L = ceil(log2 k), then merge the best of two blocks at a time.

    All three have ``L (L + 1) / 2 + (p - L) (L + 1)`` layers, ``p = ceil(log2 n)``.

    Args:
        n: number of wires.
        k: number of outputs, the k largest values in descending order.
        kind: ``"bitonic"`` (Wah and Chen), ``"odd_even_merge"`` or ``"pairwise"`` (Zazon-Ivry and Codish).
    """
    n, k = _checked(n, k)
    p, block = _log2_ceil(n), _log2_ceil(k)
    merge = {"bitonic": _bitonic_merge, "odd_even_merge": _odd_even_merge, "pairwise": None}[kind]
    layers, outputs = _pairwise(range(1 << p), 1 << block) if merge is None else (_merges(p, block, merge), range(1 << block))
    return _trusted(n, _below(n, layers), [wire for wire in outputs if wire < n]).top(k)


def _below(n: int, layers: Layers) -> Layers:
    """Leaves off the wires from n on: in standard form they would carry the smallest values and never move."""
    return [[pair for pair in layer if pair[1] < n] for layer in layers]


def _merges(p: int, block: int, merge: Callable[[list[int]], Layers]) -> Layers:
    """Of 2^p wires, merges sorted runs into twice as long ones, up to 2^block wires, and from then on the best 2^block of two."""
    layers = []
    for step in range(p):
        size, apart = 1 << min(step, block), 1 << step
        starts = range(0, 1 << p, 2 * apart)
        layers += _side_by_side(merge([*range(i, i + size), *range(i + apart, i + apart + size)]) for i in starts)
    return layers


def _side_by_side(parts: Iterable[Layers]) -> Layers:
    return [[pair for layer in layers for pair in layer] for layers in zip_longest(*parts, fillvalue=[])]


def _halvings(wires: Sequence[int], widths: int) -> Layers:
    """Layers that compare what is 2^(widths-1), …, 2, 1 places apart."""
    layers = []
    for width in (1 << exponent for exponent in reversed(range(widths))):
        layers.append([(wires[i], wires[i + width]) for i in range(len(wires) - width) if not i & width])
    return layers


def _bitonic_merge(wires: list[int]) -> Layers:
    """Of two sorted halves: folds the one onto the mirror image of the other."""
    half = len(wires) // 2
    return [list(zip(wires[:half], reversed(wires[half:]), strict=True)), *_halvings(wires, _log2_ceil(half))]


def _odd_even_merge(wires: list[int]) -> Layers:
    """Batcher's merge of two sorted halves: the later layers compare what the one before left twice their width apart."""
    half, layers = len(wires) // 2, []
    for width in (1 << exponent for exponent in range(_log2_ceil(half), -1, -1)):
        starts = range(half) if width == half else (i for i in range(len(wires) - width) if i // width % 2)
        layers.append([(wires[i], wires[i + width]) for i in starts])
    return layers


def _pairwise(wires: range, k: int) -> tuple[Layers, list[int]]:
    """Parberry's pairwise network, limited to the best k: pair neighbours, select among the winners and among the losers, then
    merge. Loser i comes after at least i + 1 winners, so half as many losers can be among the best."""
    if len(wires) == 1:
        return [], [wires[0]]
    winners, losers = wires[0::2], wires[1::2]
    upper, best = _pairwise(winners, min(k, len(winners)))
    lower, rest = _pairwise(losers, min(k // 2, len(losers))) if k > 1 else ([], [])
    layers = [list(zip(winners, losers, strict=True)), *_side_by_side([upper, lower])]
    for width in (1 << exponent for exponent in reversed(range(_log2_ceil(len(best))))):
        layers.append([(loser, best[i + width]) for i, loser in enumerate(rest) if i + width < len(best)])
    return layers, [wire for pair in zip_longest(best, rest) for wire in pair if wire is not None][:k]


@dataclass(frozen=True)
class Kind:
    """A family of networks, as :class:`anyk.SortingNetwork` runs them.

    Args:
        build: (n, k) -> network with the k best on its outputs.
        target_wire: number of classes -> the wire on which ``wires="target"`` starts the target; at most half their number.
        active: (n, number) -> first and last + 1 layer that a row of ``number`` <= n classes runs through, so that a padded
            row is treated as the network for its own number would; None when all layers fit anyway.
    """

    build: Callable[[int, int], Network]
    target_wire: Callable[[int], int]
    active: Callable[[int, int], tuple[int, int]] | None = None


def _active_bitonic(n: int, number: int) -> tuple[int, int]:
    p = _log2_ceil(max(number, 1))
    return 0, p * (p + 1) // 2


def _active_odd_even(n: int, number: int) -> tuple[int, int]:
    first = (n - number) % 2
    return first, first + number


# The start wires are those that shift T least against the sorted order; benchmarks/wires.py measures them.
KINDS = {
    "splitter": Kind(lambda n, k: splitter(n, k).packed(), lambda number: min(1, number // 2)),
    "bitonic": Kind(lambda n, k: bitonic(n).top(k), lambda number: min(4, number // 2), _active_bitonic),
    "odd_even": Kind(lambda n, k: odd_even(n).top(k), lambda number: min(4, number // 2), _active_odd_even),
}
"""The known ones by name; :func:`anyk.operators.network.add_kind` adds one."""
