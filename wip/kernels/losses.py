"""Losses by the C library: numbers in, numbers out, without autograd, which :mod:`anyk.kernels.ops` adds.

The forward pass finds the candidates of each row, and computes its loss and the gradient by the candidates. The gradient by all
scores is written once, by the backward pass, already scaled: until then m numbers of a row are kept in float32, and the softmax
over all classes is computed again from the scores. That takes less memory than to keep (rows, n) numbers, and less time where
memory is slow.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyk.kernels import abi, native
from anyk.kernels.native import DTYPES, address
from anyk.kernels.wiring import Wiring, wiring

_OPERATORS, _FAMILIES, _SWAPS, _WIRES = (
    {each.name.lower(): int(each) for each in names} for names in (abi.Operator, abi.Family, abi.Swap, abi.Wires)
)
_P_K_OF = {"all": int(abi.PKOf.OF_ALL), "class": int(abi.PKOf.OF_CLASS), "row": int(abi.PKOf.OF_ROW)}
_REDUCTIONS = {each.name.lower(): int(each) for each in abi.Reduction}
# What a block of 16 rows keeps in double precision shall fit into 64 MB: k numbers for each candidate, or three for each
# comparator of a network.
_MOST_NUMBERS = 1 << 19
_MOST_WIRES = {"splitter": 4096, "bitonic": 4096, "odd_even": 590}
_NOTHING_KEPT = (0, 0, 0, 0)
_pack_spec, _pack_batch, _pack_backward = (abi.packer(each).pack for each in (abi.Spec, abi.Batch, abi.Backward))


class Loss(NamedTuple):
    """A top-k loss in plain numbers."""

    operator: tuple[Any, ...] | None
    """what ``Inclusion.kernel(m, k)`` returns: a name, what the scores are divided by, and of a network kind, swap and wires"""
    family: str
    """"separate", "mixed", "operator" or "error\""""
    softmax_over_all: bool
    """the softmax, if the loss has one, is over all classes and not over the candidates"""
    uses_softmax: bool
    """a softmax over all classes must be computed"""
    ce_weight: float
    q: float
    smoothing: float
    """of the cross-entropy of the family "error\""""
    m: int
    """number of candidates"""
    k: int


class SmoothLoss(NamedTuple):
    """The smooth top-k loss: see :class:`anyk.SmoothTopKLoss`."""

    k: int
    temperature: float
    margin: float
    hard_threshold: float | None


class Kept(NamedTuple):
    """What the forward pass keeps of a row: see ``Batch`` in csrc/anyk.h."""

    m: int
    """the number of classes that get a gradient of their own: the candidates"""
    rest: int
    """the number of coefficients that give the gradient by the other classes; 0: it is zero"""
    powers: int = 0
    rate: float = 0.0

    def bytes(self, rows: int) -> int:
        return 4 * (rows * (2 * self.m + self.rest) + 1)

    def addresses(self, rows: int, kept: Tensor) -> tuple[int, int, int, int]:
        """Where the candidates' gradients and classes are, the coefficients for the other classes, and the divisor of the mean."""
        gradient = kept.data_ptr()
        classes = gradient + 4 * rows * self.m
        rest = classes + 4 * rows * self.m
        return gradient, classes, rest if self.rest else 0, rest + 4 * rows * self.rest


class Prepared(NamedTuple):
    """A loss of n classes as the library takes it."""

    spec: bytes
    n: int
    keeps: Kept
    tables: Wiring | None
    """what the bytes of ``spec`` point to"""


Call = tuple[Tensor, Tensor | None, str, str, int, Tensor | None, Tensor | None]
"""target, P_K, p_k_of, reduction, ignore_index, weight and cross-entropy, as :func:`anyk.kernels.loss` has them"""


def has(loss: Loss | SmoothLoss, n: int) -> bool:
    """Whether the library has the loss, for n classes."""
    if native.library is None:
        return False
    if isinstance(loss, SmoothLoss):
        # power sums of more are not exact enough in float32
        return loss.k <= abi.MOST_K and loss.k < n < 2**31 and 1e-25 < loss.temperature < 1e25
    if loss.operator is None:
        return False
    name, scale, *network = loss.operator
    # the scale: C has -1e30 for padding, which must not come back into reach
    if name not in _OPERATORS or not 1e-25 < scale < 1e25 or n >= 2**31 or not loss.k <= loss.m <= n:
        return False
    if network:
        kind, swap, wires = network
        return swap in _SWAPS and wires in _WIRES and loss.m <= _MOST_WIRES.get(kind, 0)
    return loss.m * (loss.k + 6) <= _MOST_NUMBERS


def keeps(loss: Loss | SmoothLoss, n: int) -> Kept:
    if isinstance(loss, SmoothLoss):
        return Kept(loss.k + 1, loss.k + 1, loss.k, 1 / (loss.k * loss.temperature))
    return Kept(loss.m, 3 if loss.uses_softmax and loss.m < n else 0)


@lru_cache(maxsize=256)
def prepare(loss: Loss | SmoothLoss, n: int) -> Prepared | None:
    """What every call hands over; None: the library does not compute it."""
    if not has(loss, n):
        return None
    if isinstance(loss, SmoothLoss):
        k, temperature, margin, hard_threshold = loss
        gap = math.inf if hard_threshold is None else k * temperature * math.log(hard_threshold)
        numbers = 0, 0, 0, temperature, margin, gap
        return Prepared(_pack_spec(n, k + 1, k, abi.Operator.SMOOTH, *[0] * 5, *numbers, *[0] * 4), n, keeps(loss, n), None)
    assert loss.operator is not None
    (name, scale, *network), m, k = loss.operator, loss.m, loss.k
    kind, swap, wires = network or (None, "logistic", "target")
    tables = wiring(kind, m, k) if kind else None
    spec = _pack_spec(
        n, m, k, _OPERATORS[name], _SWAPS[swap], _WIRES[wires], _FAMILIES[loss.family], loss.softmax_over_all,
        loss.uses_softmax, loss.ce_weight, loss.q, loss.smoothing, scale, 0.0, 0.0,
        *((0, 0, 0, 0) if tables is None else (len(tables.comparators), *map(address, tables))),
    )  # fmt: skip
    return Prepared(spec, n, keeps(loss, n), tables)


def forward(
    prepared: Prepared, scores: Tensor, call: Call, kept: Tensor | None = None, grad_cross_entropy: Tensor | None = None
) -> Tensor | int:
    """The loss, and in ``kept`` what the backward pass needs; a status if something is wrong."""
    target, p_k, p_k_of, reduction, ignore_index, weight, cross_entropy = call
    rows, n = scores.shape
    assert n == prepared.n
    size = (rows,) if reduction == "none" else ()
    result = scores.new_empty(size) if scores.dtype is torch.float32 else scores.new_empty(size, dtype=torch.float32)
    batch = _pack_batch(
        rows, scores.stride(0), ignore_index, DTYPES[scores.dtype], _P_K_OF[p_k_of], _REDUCTIONS[reduction],
        torch.get_num_threads(), scores.data_ptr(), target.data_ptr(), address(p_k), address(weight), address(cross_entropy),
        result.data_ptr(), *_NOTHING_KEPT if kept is None else prepared.keeps.addresses(rows, kept), address(grad_cross_entropy),
    )  # fmt: skip
    status: int = native.library.forward(prepared.spec, batch)  # type: ignore[union-attr]
    return status or result


def backward(scores: Tensor, kept: Tensor, grad: Tensor, keeps: Kept) -> Tensor:
    """The gradient by the scores, from that by the loss."""
    if grad.dtype is not torch.float32:
        grad = grad.float()
    rows, n = scores.shape
    gradient, classes, rest, divisor = keeps.addresses(rows, kept)
    single = grad.ndim == 0
    out = scores.new_empty(rows, n)
    back = _pack_backward(
        rows, n, keeps.m, scores.stride(0), 0 if single else grad.stride(0),
        DTYPES[scores.dtype], keeps.powers, torch.get_num_threads(), single, keeps.rate,
        scores.data_ptr(), gradient, classes, rest, divisor, grad.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    native.library.backward(back)  # type: ignore[union-attr]
    return out
