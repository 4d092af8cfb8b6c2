"""What a kernel is told of a loss: a :class:`Description`, plain numbers made once of a :class:`~anyk.losses.Spec`.

A kernel computes with it, for scores (rows, n) and targets (rows,), what the plain code defines: see
:func:`anyk.losses.topk_loss`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from anyk import networks
from anyk.kernels import abi
from anyk.operators import KSubset, LapSum, NeuralSort, Operator, SoftSort, SortingNetwork
from anyk.operators.sorting_network import Kind
from anyk.registry import NETWORKS, SWAPS

if TYPE_CHECKING:
    from anyk.losses import Spec

_OPERATORS: dict[type[Operator], int] = {
    SortingNetwork: abi.Operator.NETWORK,
    LapSum: abi.Operator.LAPSUM,
    KSubset: abi.Operator.KSUBSET,
    SoftSort: abi.Operator.SOFTSORT,
    NeuralSort: abi.Operator.NEURALSORT,
}
_BUILT_IN = {swap.name.lower(): (swap, SWAPS[swap.name.lower()]) for swap in abi.Swap}
MOST_WIRES = 4096
"""of a network; a kernel keeps every comparator of a row at hand"""
FEWEST_SORTED, MOST_SORTED = 24, abi.Limit.MOST_SORTED
"""so many scores are sorted by a (hard) network, many rows at once"""


class Wiring(NamedTuple):
    """A network as tables of int32."""

    comparators: Tensor
    """(size, 3): upper wire, lower wire, layer, in the order of the layers"""
    outputs: Tensor
    """(k,) the wires that the best, the second best, … end on"""
    rows: Tensor
    """(m + 1, 3), by the number of classes of a row that are not padding: the wire that the target starts on, and the first
    and the last + 1 layer that the row runs through"""


class Description(NamedTuple):
    """A loss for rows of n scores, in plain numbers."""

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


def describe(spec: Spec, n: int, k: int, m: int | None, given: bool = False) -> Description | str:
    """The description, or why no kernel computes this loss.

    Args:
        spec: the loss.
        n: number of classes.
        k: number of entries of P_K.
        m: number of candidates; None means all.
        given: the cross-entropy over all classes is given, not computed.
    """
    from anyk.losses import CrossEntropySpec, ErrorSpec

    operator = spec.operator
    code = _OPERATORS.get(type(operator))
    if code is None:
        return f"the operator {type(operator).__name__} has none"
    temperature = operator.temperature
    if isinstance(temperature, Tensor):
        return "its temperature is a tensor"
    m = n if m is None else m
    swap, wires, wiring = 0, int(abi.Wires.TARGET), None
    if isinstance(operator, SoftSort) and operator.power != 1:
        return "SoftSort has another power than 1"
    if code == abi.Operator.KSUBSET:
        # Its sums grow to the number of subsets, which float64 must hold.
        size = min(k, m // 2)
        if math.lgamma(m + 1) - math.lgamma(size + 1) - math.lgamma(m - size + 1) > 600:
            return "there are too many subsets"
    if isinstance(operator, SortingNetwork):
        number, known = _BUILT_IN.get(operator.swap, (0, None))
        if known is not SWAPS[operator.swap]:
            return f"the swap {operator.swap!r} is not one of anyk's own"
        if m > MOST_WIRES:
            return f"a network of {m} wires is too large"
        swap, wires = number, abi.Wires[operator.wires.upper()]
        wiring = wiring_of(operator.kind, NETWORKS[operator.kind], m, k)
    ce_weight, q, smoothing = 0.0, 1.0, 0.0
    if type(spec) is CrossEntropySpec:  # what a subclass computes is not known here
        family, all_classes = abi.Family[spec.top1.upper()], spec.softmax_over == "all"
    elif type(spec) is ErrorSpec:
        family, all_classes = abi.Family.ERROR, True
        ce_weight, q, smoothing = float(spec.ce_weight), float(spec.q), float(spec.label_smoothing)
    else:
        return f"the loss {type(spec).__name__} has none"
    scale = float(temperature) ** operator.scale_power
    if not 1e-25 < scale < 1e25:  # a kernel has -1e30 for padding, which must not come back into reach
        return "its temperature is too extreme"
    return Description(
        code, swap, wires, family, all_classes, spec.uses_softmax and not given, ce_weight, q, smoothing, scale, n, m, k,
        wiring, sorting_of(n) if m == n and FEWEST_SORTED <= n <= MOST_SORTED else None,
    )  # fmt: skip


@lru_cache(maxsize=128)
def sorting_of(n: int) -> Tensor:
    """The comparators of a network that sorts n numbers."""
    network = networks.selection(n, n, kind="pairwise")
    with torch.inference_mode(False):
        return torch.tensor([pair for layer in network.layers for pair in layer], dtype=torch.int32, device="cpu")


@lru_cache(maxsize=128)
def wiring_of(name: str, kind: Kind, m: int, k: int) -> Wiring:
    """The tables of a network; ``kind`` too is what it is remembered by, since another may have taken its name."""
    network = kind.build(m, k)
    if kind.active is None:  # nothing counts its layers
        network = network.packed()
    comparators = [(i, j, layer) for layer, pairs in enumerate(network.layers) for i, j in pairs]
    with torch.inference_mode(False):
        number = torch.arange(m + 1, device="cpu")  # not the default device: the kernels read these tables
        first, end = (0, torch.full_like(number, len(network.layers))) if kind.active is None else kind.active(m, number)
        starts = [kind.target_wire(number), torch.as_tensor(first, device="cpu").expand_as(number), end]
        return Wiring(
            torch.tensor(comparators, dtype=torch.int32, device="cpu").reshape(-1, 3),
            torch.tensor(network.outputs[:k], dtype=torch.int32, device="cpu"),
            torch.stack([column.to(torch.int32) for column in starts], -1).contiguous(),
        )
