"""Comparator networks as data: which wires are compared, in which layer. Pure Python, no torch.

A comparator ``(i, j)`` always has ``i < j`` and puts the larger of its two values on wire ``i``. With that convention
(Knuth's *standard form*) a wire whose value loses every comparison never moves, so a network for n wires is a network
for 2^p >= n wires with the surplus wires left off, and rows that are padded at the end run through it unharmed.

Networks follow the published construction wire by wire: sorting networks are usually drawn ascending; seen from the
other end (wire i becomes wire n-1-i) they are the descending ones that stand here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

__all__ = ["Cascade", "Network", "bitonic", "odd_even", "selection", "splitter", "splitter_cascades"]

Comparator = tuple[int, int]
Layer = tuple[Comparator, ...]


@dataclass(frozen=True, eq=True)
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
            if not all(0 <= i < j < self.n for i, j in layer):
                wrong = next((i, j) for i, j in layer if not 0 <= i < j < self.n)
                raise ValueError(f"layers: expected comparators (i, j) with 0 <= i < j < n={self.n}, got {wrong}")
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

    def top(self, k: int) -> Network:
        """The same network for the first k outputs only.

        Comparators that cannot influence these outputs are pruned; the others stay in the layer where they are.
        """
        _, k = _checked(len(self.outputs), k)
        outputs = self.outputs[:k]
        needed = set(outputs)
        layers: list[Layer] = []
        for layer in reversed(self.layers):
            kept = tuple(pair for pair in layer if pair[0] in needed or pair[1] in needed)
            needed.update(wire for pair in kept for wire in pair)
            layers.append(kept)
        return _trusted(self.n, layers[::-1], outputs)

    def packed(self) -> Network:
        """The same comparators, each in the earliest layer where its wires are free: equal result, least depth."""
        free_from = [0] * self.n
        layers: list[list[Comparator]] = []
        for layer in self.layers:
            for i, j in layer:
                slot = max(free_from[i], free_from[j])
                if slot == len(layers):
                    layers.append([])
                layers[slot].append((i, j))
                free_from[i] = free_from[j] = slot + 1
        return _trusted(self.n, layers, self.outputs)


def _trusted(n: int, layers: Iterable[Iterable[Comparator]], outputs: Iterable[int]) -> Network:
    """A Network from comparators that are right by construction: checking millions of them takes seconds."""
    network = object.__new__(Network)
    object.__setattr__(network, "n", n)
    object.__setattr__(network, "layers", tuple(map(tuple, layers)))
    object.__setattr__(network, "outputs", tuple(outputs))
    return network


def _checked(n: Any, k: Any = 1) -> tuple[int, int]:
    n, k = _integer("n", n), _integer("k", k)
    if n < 1:
        raise ValueError(f"n: expected at least 1 wire, got {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k: expected 1 <= k <= n={n}, got {k}")
    return n, k


def _integer(name: str, number: Any) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {number!r}") from None


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
    return _trusted(n, _below(n, _bitonic_layers(_log2_ceil(n), _log2_ceil(n))), range(n))


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
    cascades = splitter_cascades(n, k)
    layers: list[list[Comparator]] = [[] for _ in range(max((cascade.end for cascade in cascades), default=0))]
    rank_of = dict.fromkeys(range(n), 0)
    for cascade in cascades:
        for depth, comparators in enumerate(cascade.layers, cascade.start):
            layers[depth].extend(comparators)
        rank_of.update(zip(cascade.wires, cascade.ranks, strict=True))
    outputs = {rank: wire for wire, rank in rank_of.items() if rank < k}
    return _trusted(n, layers, [outputs[rank] for rank in range(k)]).top(k)


@dataclass(frozen=True)
class Cascade:
    """A splitter cascade: which comparators it has and what they make known.

    Args:
        wires: the wires it runs over, which had one least rank before.
        start: the first layer it is in.
        layers: its comparators, all of them; :func:`splitter` prunes those that the k best do not need.
        ranks: the least rank, counted from 0, of the value on each of its wires afterwards.

    Example:
        >>> first = anyk.networks.splitter_cascades(16, 5)[0]
        >>> first.start, first.end, first.layers[0][:2]
        (0, 4, ((0, 8), (1, 9)))
    """

    wires: tuple[int, ...]
    start: int
    layers: tuple[Layer, ...]
    ranks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first layer after it."""
        return self.start + len(self.layers)


def splitter_cascades(n: int, k: int) -> tuple[Cascade, ...]:
    """The cascades of :func:`splitter`, in the order in which they are laid out.

    Args:
        n: the number of values, one on each wire.
        k: how many of them are wanted.

    Example:
        >>> anyk.networks.splitter_cascades(4, 2)[0].ranks
        (0, 1, 1, 3)
    """
    n, k = _checked(n, k)
    wires_of_rank: list[list[int]] = [list(range(n))] + [[] for _ in range(k - 1)]
    free_from = [0] * n
    cascades = []
    while any(len(wires) > 1 for wires in wires_of_rank):
        for rank in range(k - 1, -1, -1):
            wires = wires_of_rank[rank]
            if len(wires) < 2:
                continue
            layers = tuple(map(tuple, _splitter_cascade(wires)))
            start = max(free_from[wire] for wire in wires)
            ranks = tuple(rank + (1 << position.bit_count()) - 1 for position in range(len(wires)))
            cascades.append(Cascade(tuple(wires), start, layers, ranks))
            wires_of_rank[rank] = []
            for wire, raised in zip(wires, ranks, strict=True):
                free_from[wire] = start + len(layers)
                if raised < k:
                    wires_of_rank[raised].append(wire)
            for raised in range(rank, k):
                wires_of_rank[raised].sort()
    return tuple(cascades)


def _splitter_cascade(wires: list[int]) -> list[list[Comparator]]:
    """Splitters of halving width; the wire at position i ends below 2^(set bits of i) - 1 others of the list."""
    layers = []
    for exponent in reversed(range(_log2_ceil(len(wires)))):
        width = 1 << exponent
        layers.append([(wires[i], wires[i + width]) for i in range(len(wires) - width) if not i & width])
    return layers


@_cached
def selection(n: int, k: int, kind: str = "bitonic") -> Network:
    """The classical selection networks: sort blocks of 2^ceil(log2 k) wires, then merge the best of two blocks at a time.

    All three have ``L(L+1)/2 + (p-L)(L+1)`` layers, ``L = ceil(log2 k)``, ``p = ceil(log2 n)``.

    Args:
        n: number of wires.
        k: number of outputs, the k largest values in descending order.
        kind: ``"bitonic"`` (Wah and Chen), ``"odd_even_merge"`` or ``"pairwise"`` (Zazon-Ivry and Codish).

    Example:
        >>> [anyk.networks.selection(1024, 5, kind).depth for kind in ("bitonic", "odd_even_merge", "pairwise")]
        [34, 34, 34]
    """
    n, k = _checked(n, k)
    if kind not in _SELECTION_LAYERS:
        raise ValueError(f"kind: expected one of {', '.join(_SELECTION_LAYERS)}, got {kind!r}")
    layers, outputs = _SELECTION_LAYERS[kind](_log2_ceil(n), _log2_ceil(k))
    kept = _below(n, layers)
    return _trusted(n, kept, [wire for wire in outputs if wire < n]).top(k)


def _below(n: int, layers: Iterable[Iterable[Comparator]]) -> list[list[Comparator]]:
    """Leaves off the wires from n on: in standard form they would carry the smallest values and never move."""
    return [[pair for pair in layer if pair[1] < n] for layer in layers]


def _bitonic_layers(p: int, block: int) -> list[list[Comparator]]:
    """Sorts every block of 2^block among 2^p wires. The first layer of a merge folds the block onto its mirror image."""
    layers = []
    for step in range(block):
        size = 2 << step
        layers.append([(start + i, start + size - 1 - i) for start in range(0, 1 << p, size) for i in range(size // 2)])
        for width in (1 << exponent for exponent in reversed(range(step))):
            layers.append([(i, i + width) for i in range(1 << p) if not i & width])
    return layers


def _odd_even_merge_layers(p: int, block: int) -> list[list[Comparator]]:
    """Batcher's odd-even mergesort of every block of 2^block among 2^p wires."""
    layers = []
    for step in range(block):
        half = 1 << step
        for exponent in range(step, -1, -1):
            layers.append(_odd_even_merge_layer(range(1 << p), half, 1 << exponent))
    return layers


def _odd_even_merge_layer(wires: Iterable[int], half: int, width: int) -> list[Comparator]:
    """One layer of the merge of two sorted runs of ``half`` wires: the first (width = half) compares the runs, the later
    ones compare what the layer before left ``width`` apart."""
    wires = list(wires)
    size = 2 * half
    layer = []
    for i in range(len(wires) - width):
        offset = i % size
        compares_runs = width == half and offset < half
        compares_within = width < half and offset + width < size and (offset // width) % 2 == 1
        if compares_runs or compares_within:
            layer.append((wires[i], wires[i + width]))
    return layer


Selected = tuple[list[list[Comparator]], list[int]]


def _bitonic_selection(p: int, block: int) -> Selected:
    layers = _bitonic_layers(p, block)
    for step in range(block, p):
        pairs = _block_pairs(p, block, step)
        layers.append([(a[i], b[-1 - i]) for a, b in pairs for i in range(len(a))])
        for width in (1 << exponent for exponent in reversed(range(block))):
            layers.append([(a[i], a[i + width]) for a, _ in pairs for i in range(len(a)) if not i & width])
    return layers, list(range(1 << block))


def _odd_even_selection(p: int, block: int) -> Selected:
    layers = _odd_even_merge_layers(p, block)
    for step in range(block, p):
        pairs = _block_pairs(p, block, step)
        for exponent in range(block, -1, -1):
            layers.append([pair for a, b in pairs for pair in _odd_even_merge_layer([*a, *b], 1 << block, 1 << exponent)])
    return layers, list(range(1 << block))


def _block_pairs(p: int, block: int, step: int) -> list[tuple[range, range]]:
    """The sorted blocks that the merge after ``step`` doublings brings together; the best stay in the first."""
    size, apart = 1 << block, 1 << step
    return [(range(start, start + size), range(start + apart, start + apart + size)) for start in range(0, 1 << p, 2 * apart)]


def _pairwise_selection(p: int, block: int) -> Selected:
    """Parberry's pairwise network, limited to the best 2^block: pair neighbours, select among the winners and among the
    losers, then merge. Loser i comes after at least i + 1 winners, so half as many losers can be among the best."""

    def select(wires: range, k: int) -> Selected:
        if len(wires) == 1:
            return [], [wires[0]]
        winners, losers = wires[0::2], wires[1::2]
        layers: list[list[Comparator]] = [list(zip(winners, losers, strict=True))]
        upper, best = select(winners, min(k, len(winners)))
        lower, rest = select(losers, min(k // 2, len(losers))) if k > 1 else ([], [])
        for winners_layer, losers_layer in zip_longest(upper, lower, fillvalue=()):
            layers.append([*winners_layer, *losers_layer])
        for width in (1 << exponent for exponent in reversed(range(_log2_ceil(len(best))))):
            layers.append([(loser, best[i + width]) for i, loser in enumerate(rest) if i + width < len(best)])
        merged = [wire for pair in zip_longest(best, rest) for wire in pair if wire is not None]
        return layers, merged[:k]

    return select(range(1 << p), 1 << block)


_SELECTION_LAYERS: dict[str, Callable[[int, int], Selected]] = {
    "bitonic": _bitonic_selection,
    "odd_even_merge": _odd_even_selection,
    "pairwise": _pairwise_selection,
}
