"""Comparator networks as tables of int32, as the C code reads them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyk import networks


class Wiring(NamedTuple):
    comparators: Tensor
    """(size, 3): upper wire, lower wire, layer, in the order of the layers"""
    outputs: Tensor
    """(k,) the wires that the best, the second best, … end on"""
    rows: Tensor
    """(m + 1, 3), by the number of classes of a row that are not padding: the wire that the target starts on, and the first
    and the last + 1 layer that the row runs through"""


@lru_cache(maxsize=128)
def wiring(kind: str, m: int, k: int) -> Wiring:
    """The network of a kind for m scores and their k best."""
    family = networks.KINDS[kind] if hasattr(networks, "KINDS") else _old_kind(kind)
    network = family.build(m, k)
    comparators = [(i, j, layer) for layer, pairs in enumerate(network.layers) for i, j in pairs]
    rows = []
    for number in range(m + 1):
        first, end = (0, len(network.layers)) if family.active is None else family.active(m, number)
        rows.append((family.target_wire(number), first, end))
    return Wiring(_table(comparators).reshape(-1, 3), _table(list(network.outputs[:k])), _table(rows))


@lru_cache(maxsize=128)
def sorter(n: int) -> Tensor:
    """The comparators of a (hard) network that sorts n numbers, (size, 2)."""
    network = networks.selection(n, n, kind="pairwise")
    return _table([pair for layer in network.layers for pair in layer])


def _table(numbers: list[int] | list[tuple[int, ...]]) -> Tensor:
    with torch.inference_mode(False):  # a first call without gradients must not spoil the later ones
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")  # not the default device: C reads it


def _old_kind(kind: str) -> Any:  # until anyk.networks has KINDS
    from types import SimpleNamespace

    def blocks(number: int) -> int:
        return max(number - 1, 0).bit_length()

    return {
        "splitter": SimpleNamespace(
            build=lambda n, k: networks.splitter(n, k).packed(), target_wire=lambda number: min(number // 2, 1), active=None
        ),
        "bitonic": SimpleNamespace(
            build=lambda n, k: networks.bitonic(n).top(k),
            target_wire=lambda number: min(number // 2, 4),
            active=lambda n, number: (0, blocks(number) * (blocks(number) + 1) // 2),
        ),
        "odd_even": SimpleNamespace(
            build=lambda n, k: networks.odd_even(n).top(k),
            target_wire=lambda number: min(number // 2, 4),
            active=lambda n, number: ((n - number) % 2, (n - number) % 2 + number),
        ),
    }[kind]
