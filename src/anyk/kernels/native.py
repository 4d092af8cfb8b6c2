"""The native kernels: plain C for the CPU, called without the GIL. `csrc/` has the code, `build.py` builds it.

A call finds the candidates and computes losses and the candidates' gradients of all rows. The gradient by all scores is
written once, in the backward pass, already scaled: until then it is m numbers for each row, in float32, and what the softmax
needs is made of the scores again. That is less memory, and less time where memory is slow, than to keep (rows, n) of it.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyk import _compat, checks
from anyk.conventions import Conventions
from anyk.kernels.loss_description import Description
from anyk.p_k import PK

ABI = 2
FILE = "_native.so"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_P_K_OF = {"all": 0, "class": 1, "row": 2}
_REDUCTIONS = {"mean": 0, "sum": 1, "none": 2}
_MOST_MEMORY = 1 << 26
"""of a block of rows, in bytes"""
MOST_K = 8
"""of the smooth top-k loss"""
# The structures of csrc/anyk.h.
_SPEC = struct.Struct("3q6i4dq3PqP")
_BATCH = struct.Struct("3q4i11P")
_SMOOTH = struct.Struct("2q3d")
_BACK = struct.Struct("6q4id7P")


class _Library(NamedTuple):
    forward: Callable[[bytes, bytes], int]
    smooth: Callable[[bytes, bytes], int]
    backward: Callable[[bytes], int]
    best: Callable[..., int]
    variant: str
    use: Callable[[int], int]


def _load() -> tuple[_Library | None, str]:
    """The library, or why there is none."""
    path = Path(__file__).with_name(FILE)
    if not path.exists():
        return None, "not in this installation: it is of a wheel for any machine, or there was no C compiler"
    try:
        library = ctypes.CDLL(str(path))
        if library.anyk_abi() != ABI:
            return None, "built from other sources: install anyk again"
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}"
    library.anyk_variant.restype = ctypes.c_char_p
    library.anyk_forward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.anyk_smooth.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.anyk_backward.argtypes = [ctypes.c_char_p]
    wide, whole, address = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    library.anyk_best.argtypes = [address, whole, wide, wide, wide, wide, address, whole]
    variant = library.anyk_variant().decode()
    return (
        _Library(
            library.anyk_forward, library.anyk_smooth, library.anyk_backward, library.anyk_best, variant, library.anyk_use
        ),
        "",
    )


_library, _why_not = _load()


def status() -> str:
    """Why the kernels cannot be used; empty: they can."""
    return _why_not


def variant() -> str | None:
    """The instruction set that is used."""
    return None if _library is None else _library.variant


class Prepared(NamedTuple):
    """A loss as C has it."""

    run: Callable[[bytes, bytes], int]
    spec: bytes
    n: int
    m: int
    """how many classes of a row have a gradient of their own"""
    rest: int
    """how many numbers the gradient of the others is made of; 0: it is zero"""
    powers: int
    rate: float
    description: Description | None
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
        d.ce_weight, d.q, d.smoothing, d.scale, *tables,
        *((0, 0) if d.sorting is None else (len(d.sorting), d.sorting.data_ptr())),
    )  # fmt: skip
    assert _library is not None
    return Prepared(_library.forward, spec, d.n, d.m, 3 if d.uses_softmax and d.m < d.n else 0, 0, 0.0, d)


def prepare_smooth(n: int, k: int, temperature: float, margin: float, hard_threshold: float | None) -> Prepared | str:
    """The same for the smooth top-k loss."""
    if k > MOST_K or n <= k:
        return "power sums in float32 are not exact enough" if k > MOST_K else "there are no more than k classes"
    gap = math.inf if hard_threshold is None else k * temperature * math.log(hard_threshold)
    assert _library is not None
    spec = _SMOOTH.pack(n, k, temperature, margin, gap)
    return Prepared(_library.smooth, spec, n, k + 1, k + 1, k, 1 / (k * temperature), None)


def loss(
    prepared: Prepared,
    scores: Tensor,
    target: Tensor,
    p_k: PK | None,
    conventions: Conventions,
    plain: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """The loss, reduced; None where the plain code must serve, if only to say what is wrong.

    Args:
        prepared: which loss.
        scores: (rows, n), of one of :data:`DTYPES`.
        target: (rows,) int64, contiguous.
        p_k: P_K, of float64, contiguous; None: the loss has none.
        conventions: without label smoothing, but for what the description has.
        plain: the same by the plain code, for second derivatives.
    """
    if scores.requires_grad and torch.is_grad_enabled():
        result: Tensor | None = _apply(scores, (prepared, target, p_k, conventions, plain))
        return result
    read = _readable(scores)
    return _forward(prepared, read, target, p_k, conventions, 0)


def _readable(scores: Tensor) -> Tensor:
    """The classes of a row stand side by side; rows may be anywhere."""
    return scores if scores.stride(1) == 1 or scores.shape[1] == 1 else scores.contiguous()


def _forward(
    prepared: Prepared,
    scores: Tensor,
    target: Tensor,
    p_k: PK | None,
    conventions: Conventions,
    kept: int,
    given: int = 0,
    of_given: int = 0,
) -> Tensor | None:
    """The loss, and at the address ``kept``, if it is not 0, what :func:`_kept` has room for; None if something is wrong."""
    rows, single, weight = scores.shape[0], conventions.reduction != "none", conventions.weight
    size = () if single else (rows,)
    result = scores.new_empty(size) if scores.dtype is torch.float32 else scores.new_empty(size, dtype=torch.float32)
    gradient, classes, of_rest, divisor = _parts(prepared, rows, kept) if kept else (0, 0, 0, 0)
    p_k_of, values = (0, 0) if p_k is None else (_P_K_OF[p_k.of], p_k.values.data_ptr())
    batch = _BATCH.pack(
        rows, scores.stride(0), conventions.ignore_index,
        DTYPES[scores.dtype], p_k_of, _REDUCTIONS[conventions.reduction], torch.get_num_threads(),
        scores.data_ptr(), target.data_ptr(), values, 0 if weight is None else weight.data_ptr(),
        given, result.data_ptr(), gradient, classes, of_rest, divisor, of_given,
    )  # fmt: skip
    return None if prepared.run(prepared.spec, batch) else result


def _kept(prepared: Prepared, scores: Tensor) -> Tensor:
    """Room for what the backward pass needs, in one tensor: see :func:`_parts`."""
    size = 4 * (scores.shape[0] * (2 * prepared.m + prepared.rest) + 1)
    return scores.new_empty(size // scores.itemsize)  # of any dtype: another one than the scores' takes longer to ask for


def _parts(prepared: Prepared, rows: int, start: int) -> tuple[int, int, int, int]:
    """Addresses of the candidates' gradients and classes, of the numbers for the other classes, of the mean's divisor."""
    classes = start + 4 * rows * prepared.m
    of_rest = classes + 4 * rows * prepared.m
    return start, classes, of_rest if prepared.rest else 0, of_rest + 4 * rows * prepared.rest


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, call: tuple[Any, ...]) -> Tensor | None:
        prepared, target, p_k, conventions, plain = call
        read = _readable(scores)
        kept = _kept(prepared, read)
        result = _forward(prepared, read, target, p_k, conventions, kept.data_ptr())
        if result is None:
            return None
        if read is scores:
            ctx.save_for_backward(scores, target)
        else:
            ctx.save_for_backward(scores, target, read)
        ctx.call = prepared, plain, kept
        return result

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors
        prepared, plain, kept = ctx.call
        if torch.is_grad_enabled() or not checks.eager(incoming):
            with torch.enable_grad():
                (again,) = torch.autograd.grad(plain(saved[0]), saved[:1], incoming, create_graph=True)
            return again, None
        return _backward(prepared, saved[2] if len(saved) > 2 else saved[0], kept, incoming), None


_apply = _compat.apply_of(_Loss)


def _backward(prepared: Prepared, read: Tensor, kept: Tensor, incoming: Tensor) -> Tensor:
    """The gradient by the scores."""
    if incoming.dtype is not torch.float32:
        incoming = incoming.float()
    rows, n = read.shape
    gradient, classes, of_rest, divisor = _parts(prepared, rows, kept.data_ptr())
    single = incoming.ndim == 0
    out = read.new_empty(rows, n)
    back = _BACK.pack(
        rows, n, prepared.m, read.stride(0), n, 0 if single else incoming.stride(0),
        DTYPES[read.dtype], prepared.powers, torch.get_num_threads(), single, prepared.rate,
        read.data_ptr(), gradient, classes, of_rest, divisor if single else 0, incoming.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    _library.backward(back)  # type: ignore[union-attr]
    return out


_EACH = Conventions(reduction="none", ignore_index=-1)


def row_losses(
    prepared: Prepared,
    scores: Tensor,
    cross_entropy: Tensor | None,
    position: Tensor,
    p_k: PK,
    plain: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor | None:
    """The loss of each row of candidates, with the cross-entropy over all classes beside them if the loss has one."""
    if cross_entropy is not None:
        cross_entropy = cross_entropy.contiguous()
    result: Tensor | None = _RowLosses.apply(  # type: ignore[no-untyped-call]
        scores, cross_entropy, (prepared, position, p_k, plain)
    )
    return result


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, cross_entropy: Tensor | None, call: tuple[Any, ...]) -> Tensor | None:
        prepared, position, p_k, plain = call
        read = _readable(scores)
        wanted = any(ctx.needs_input_grad)
        kept = _kept(prepared, read) if wanted else None
        of_given = torch.empty_like(cross_entropy) if wanted and cross_entropy is not None else None
        result = _forward(
            prepared, read, position, p_k, _EACH, 0 if kept is None else kept.data_ptr(),
            0 if cross_entropy is None else cross_entropy.data_ptr(), 0 if of_given is None else of_given.data_ptr(),
        )  # fmt: skip
        if result is None:
            return None
        ctx.save_for_backward(scores, read, cross_entropy)
        ctx.call = prepared, plain, kept, of_given
        return result

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scores, read, cross_entropy = ctx.saved_tensors
        prepared, plain, kept, of_given = ctx.call
        if torch.is_grad_enabled() or not checks.eager(incoming):
            inputs = [tensor for tensor in (scores, cross_entropy) if tensor is not None and tensor.requires_grad]
            with torch.enable_grad():
                again = iter(torch.autograd.grad(plain(scores, cross_entropy), inputs, incoming, create_graph=True))
            found = [next(again) if tensor is not None and tensor.requires_grad else None for tensor in (scores, cross_entropy)]
            return found[0], found[1], None
        return _backward(prepared, read, kept, incoming), None if of_given is None else of_given * incoming, None


def best(scores: Tensor, m: int) -> Tensor | None:
    """The classes of the m best scores of each row, descending, the earlier of equals first; None: NaN is among them."""
    assert _library is not None
    n = scores.shape[-1]
    rows = scores.reshape(-1, n)
    if rows.stride(1) != 1 and n > 1:
        rows = rows.contiguous()
    classes = scores.new_empty(*scores.shape[:-1], m, dtype=torch.long)
    refused = _library.best(
        rows.data_ptr(), DTYPES[rows.dtype], len(rows), rows.stride(0), n, m, classes.data_ptr(), torch.get_num_threads()
    )
    return None if refused else classes
