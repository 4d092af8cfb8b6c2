"""The native kernels: plain C for the CPU, called without the GIL. `csrc/` has the code, `build.py` builds it.

A call finds the candidates and computes losses and the candidates' gradients of all rows. The gradient by all scores is
written once, in the backward pass, already scaled: until then it is m numbers for each row, in float32, and what the softmax
needs is made of the scores again. That is less memory, and less time where memory is slow, than to keep (rows, n) of it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyk import checks
from anyk.conventions import Conventions
from anyk.kernels.description import Description
from anyk.p_k import PK

ABI = 1
FILE = "_native.so"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_P_K_OF = {"all": 0, "class": 1, "row": 2}
_REDUCTIONS = {"mean": 0, "sum": 1, "none": 2}
_MOST_MEMORY = 1 << 26
"""of a block of rows, in bytes"""
# The structures of csrc/anyk.h.
_SPEC = struct.Struct("3q6i4dq3P")
_BATCH = struct.Struct("3q4i9P")
_BACK = struct.Struct("6q4i7P")


class _Library(NamedTuple):
    forward: Callable[[bytes, bytes], int]
    backward: Callable[[bytes], int]
    best: Callable[..., int]
    variant: str
    use: Callable[[int], int]


def _load() -> tuple[_Library | None, str]:
    """The library, or why there is none."""
    path = Path(__file__).with_name(FILE)
    if not path.exists():
        return None, "not built: there was no C compiler when anyk was installed"
    try:
        library = ctypes.CDLL(str(path))
        if library.anyk_abi() != ABI:
            return None, "built from other sources: install anyk again"
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}"
    library.anyk_variant.restype = ctypes.c_char_p
    library.anyk_forward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.anyk_backward.argtypes = [ctypes.c_char_p]
    wide, whole, address = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    library.anyk_best.argtypes = [address, whole, wide, wide, wide, wide, whole, address, whole]
    variant = library.anyk_variant().decode()
    return _Library(library.anyk_forward, library.anyk_backward, library.anyk_best, variant, library.anyk_use), ""


_library, _why_not = _load()


def status() -> str:
    """Why the kernels cannot be used; empty: they can."""
    return _why_not


def variant() -> str | None:
    """The instruction set that is used."""
    return None if _library is None else _library.variant


class Prepared(NamedTuple):
    """A description as C has it."""

    spec: bytes
    n: int
    m: int
    k: int
    uses_softmax: bool
    description: Description
    """whose tables the bytes point to"""


def prepare(description: Description) -> Prepared | str:
    """What every call with this description hands over; or why it is not served."""
    d, wiring = description, description.wiring
    # A block of 16 rows keeps every comparator, or k numbers for each candidate, in double precision.
    numbers = 3 * len(wiring.comparators) if wiring else d.m * (d.k + 6)
    if numbers * 128 > _MOST_MEMORY:
        return "it would take too much memory"
    if d.n >= 2**31:
        return "there are too many classes"
    tables = (0, 0, 0, 0)
    if wiring is not None:
        tables = (
            len(wiring.comparators),
            wiring.comparators.data_ptr(),
            wiring.outputs.data_ptr(),
            wiring.rows.data_ptr(),
        )
    spec = _SPEC.pack(
        d.n, d.m, d.k, d.operator, d.swap, d.wires, d.family, d.all_classes, d.uses_softmax,
        d.guide, d.power, d.smoothing, d.scale, *tables,
    )  # fmt: skip
    return Prepared(spec, d.n, d.m, d.k, d.uses_softmax, d)


def loss(
    prepared: Prepared, scores: Tensor, target: Tensor, p_k: PK, conventions: Conventions, plain: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The loss, reduced; None where the plain code must serve, if only to say what is wrong.

    Args:
        prepared: which loss.
        scores: (rows, n), of one of :data:`DTYPES`.
        target: (rows,) int64.
        p_k: P_K, of float64.
        conventions: without label smoothing, but for what the description has.
        plain: the same by the plain code, for second derivatives.
    """
    if scores.requires_grad and torch.is_grad_enabled():
        return _Loss.apply(scores, prepared, target, p_k, conventions, plain)  # type: ignore[no-untyped-call]
    result, status, _, _ = _forward(prepared, scores, target, p_k, conventions, False)
    return None if status else result


def _forward(
    prepared: Prepared, scores: Tensor, target: Tensor, p_k: PK, conventions: Conventions, wants_gradient: bool
) -> tuple[Tensor, int, Tensor, Tensor | None]:
    """The loss, a status that is 0 if all is well, the scores as they were read, and what the backward pass needs."""
    rows, m = len(scores), prepared.m
    row_stride, class_stride = scores.stride()
    if class_stride != 1 and prepared.n > 1:
        scores = scores.contiguous()
        row_stride = scores.stride(0)
    reduction = conventions.reduction
    result = scores.new_empty((rows,) if reduction == "none" else (), dtype=torch.float32)
    weight = conventions.weight
    kept, gradient, classes, of_rest, divisor = None, 0, 0, 0, 0
    if wants_gradient:
        # one tensor: candidates' gradients, their classes, three numbers for the rest, the divisor of the mean
        kept = scores.new_empty(2 * rows * m + 3 * rows + 1, dtype=torch.float32)
        gradient = kept.data_ptr()
        classes = gradient + 4 * rows * m
        of_rest = classes + 4 * rows * m if prepared.uses_softmax and m < prepared.n else 0
        divisor = classes + 4 * rows * (m + 3)
    assert _library is not None
    batch = _BATCH.pack(
        rows, row_stride, conventions.ignore_index,
        DTYPES[scores.dtype], _P_K_OF[p_k.of], _REDUCTIONS[reduction], torch.get_num_threads(),
        scores.data_ptr(), target.data_ptr(), p_k.values.data_ptr(), 0 if weight is None else weight.data_ptr(),
        result.data_ptr(), gradient, classes, of_rest, divisor,
    )  # fmt: skip
    return result, _library.forward(prepared.spec, batch), scores, kept


class _Refused(Exception):
    """C has found something that the plain code is to speak about."""


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        prepared: Prepared,
        target: Tensor,
        p_k: PK,
        conventions: Conventions,
        plain: Callable[[Tensor], Tensor],
    ) -> Tensor | None:
        result, status, read, kept = _forward(prepared, scores, target, p_k, conventions, True)
        if status:
            return None
        ctx.save_for_backward(scores, read, kept)
        ctx.constants = prepared, plain, conventions.reduction
        return result

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        scores, read, kept = ctx.saved_tensors
        prepared, plain, reduction = ctx.constants
        if torch.is_grad_enabled() or not checks.eager(incoming):
            with torch.enable_grad():
                (again,) = torch.autograd.grad(plain(scores), scores, incoming, create_graph=True)
            return again, None, None, None, None, None
        rows, m, n = len(read), prepared.m, prepared.n
        if incoming.dtype != torch.float32:
            incoming = incoming.float()
        out = read.new_empty(rows, n)
        gradient = kept.data_ptr()
        classes = gradient + 4 * rows * m
        rest = classes + 4 * rows * m
        uses_softmax = prepared.uses_softmax and m < n
        single = reduction != "none"
        back = _BACK.pack(
            rows, n, m, read.stride(0), n, 0 if single else incoming.stride(0),
            DTYPES[read.dtype], uses_softmax, torch.get_num_threads(), single,
            read.data_ptr(), gradient, classes, rest if uses_softmax else 0, rest + 12 * rows if single else 0,
            incoming.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        assert _library is not None
        _library.backward(back)
        return out, None, None, None, None, None


def best(scores: Tensor, m: int) -> Tensor | None:
    """The classes of the m best scores of each row, descending, the earlier of equals first; None: NaN is among them."""
    assert _library is not None
    n = scores.shape[-1]
    rows = scores.reshape(-1, n)
    if rows.stride(1) != 1 and n > 1:
        rows = rows.contiguous()
    classes = torch.empty(*scores.shape[:-1], m, dtype=torch.long)
    refused = _library.best(
        rows.data_ptr(), DTYPES[rows.dtype], len(rows), rows.stride(0), n, m, 1, classes.data_ptr(), torch.get_num_threads()
    )
    return None if refused else classes
