"""Comparator networks as tables of int32, as the C code reads them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

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
    family = networks.KINDS[kind]
    network = family.build(m, k)
    comparators = [(i, j, layer) for layer, pairs in enumerate(network.layers) for i, j in pairs]
    everything = (0, len(network.layers))
    layers = [everything if family.active is None else family.active(m, number) for number in range(m + 1)]
    rows = [(family.target_wire(number), *active) for number, active in enumerate(layers)]
    return Wiring(_table(comparators).reshape(-1, 3), _table(list(network.outputs[:k])), _table(rows))


def _table(numbers: list[int] | list[tuple[int, ...]]) -> Tensor:
    with torch.inference_mode(False):  # a first call without gradients must not spoil the later ones
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")  # not the default device: C reads it
