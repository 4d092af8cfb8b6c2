"""A loss in plain numbers, as the kernels take it.

An operator describes itself (:meth:`anyk.Operator.kernel_description`), and a loss puts the rest around it
(:meth:`anyk.losses.Spec.describe`). With that a kernel computes what the plain code defines, for scores (rows, n).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anyk import networks
from anyk.kernels import abi

NETWORK, LAPSUM, KSUBSET, SOFTSORT, NEURALSORT, PERMUTAHEDRON = abi.Operator
SEPARATE, MIXED, OPERATOR, ERROR = abi.Family
TARGET, SORTED, GIVEN = abi.Wires
SWAPS = tuple(swap.name.lower() for swap in abi.Swap)
"""the swaps that the kernels have, by their numbers"""
MOST_WIRES = 4096
"""of a network; a kernel keeps every comparator of a row at hand"""
FEWEST_SORTED, MOST_SORTED = 24, abi.Limit.MOST_SORTED
"""so many scores are sorted by a (hard) network, many rows at once"""
# of the triton kernels
NO_OPERATOR = -1
NO_SOFTMAX, OVER_ALL, OVER_CANDIDATES = range(3)
MOST_IN_REGISTERS = 256
"""candidates of a row; more are in memory"""


class Wiring(NamedTuple):
    """A network as tables of int32."""

    comparators: Tensor
    """(size, 3): upper wire, lower wire, layer, in the order of the layers"""
    outputs: Tensor
    """(k,) the wires that the best, the second best, … end on"""
    rows: Tensor
    """(m + 1, 3), by the number of classes of a row that are not padding: the wire that the target starts on, and the first
    and the last + 1 layer that the row runs through"""


class OperatorDescription(NamedTuple):
    """An operator for m candidates and the first k ranks."""

    operator: int
    scale: float
    """the scores are divided by it"""
    swap: int = 0
    wires: int = TARGET
    wiring: Wiring | None = None


class Description(NamedTuple):
    """A loss for rows of n scores."""

    operator: int
    swap: int
    wires: int
    family: int
    all_classes: bool
    """the softmax, if the loss has one, is over all classes and not over the candidates"""
    uses_softmax: bool
    """the loss has a softmax over all classes"""
    ce_weight: float
    q: float
    smoothing: float
    """of the cross-entropy"""
    scale: float
    """the scores are divided by it"""
    n: int
    m: int
    k: int
    wiring: Wiring | None
    sorting: Tensor | None
    """(size, 2) of int32: a network that sorts all scores, where all are kept and they are few"""


def sorting_of(n: int, m: int) -> Tensor | None:
    """The comparators of a network that sorts n numbers, if all are kept and they are few."""
    return _sorting(n) if m == n and FEWEST_SORTED <= n <= MOST_SORTED else None


@lru_cache(maxsize=128)
def _sorting(n: int) -> Tensor:
    network = networks.selection(n, n, kind="pairwise")
    with torch.inference_mode(False):
        return torch.tensor([pair for layer in network.layers for pair in layer], dtype=torch.int32, device="cpu")
