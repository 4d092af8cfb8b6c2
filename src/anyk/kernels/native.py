"""The native kernels: plain C for the CPU, called without the GIL. `csrc/` has the code, `build.py` builds it.

The forward pass finds the candidates of each row, and computes its loss and the gradient by the candidates. The gradient by all
scores is written once, by the backward pass, already scaled: until then m numbers of a row are kept in float32, and the softmax
over all classes is computed again from the scores. That takes less memory than to keep (rows, n) numbers, and less time where
memory is slow.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyk import _compat, autograd, checks
from anyk.conventions import Conventions
from anyk.kernels import abi
from anyk.kernels.loss_description import Description, OperatorDescription
from anyk.p_k import PK

FILE = "_native.so"
DTYPES = {torch.float32: int(abi.Dtype.FLOAT32), torch.bfloat16: int(abi.Dtype.BFLOAT16), torch.float16: int(abi.Dtype.FLOAT16)}
_P_K_OF = {"all": int(abi.PKOf.OF_ALL), "class": int(abi.PKOf.OF_CLASS), "row": int(abi.PKOf.OF_ROW)}
_REDUCTIONS = {"mean": int(abi.Reduction.MEAN), "sum": int(abi.Reduction.SUM), "none": int(abi.Reduction.NONE)}
_MOST_MEMORY = 1 << 26
"""of a block of rows, in bytes"""
_pack_spec, _pack_smooth, _pack_batch, _pack_backward, _pack_selection, _pack_mask, _pack_mask_backward, *_packs = (
    abi.packer(each).pack for each in abi.STRUCTURES
)
_pack_ranking, _pack_draw, _pack_network_mask = _packs


class _Library(NamedTuple):
    """The functions of csrc/anyk.c. All but the last return a :class:`~anyk.kernels.abi.Status`."""

    forward: Callable[[bytes, bytes], int]
    smooth: Callable[[bytes, bytes], int]
    backward: Callable[[bytes], int]
    best: Callable[[bytes], int]
    mask: Callable[[bytes], int]
    mask_backward: Callable[[bytes], int]
    ranking: Callable[[bytes], int]
    draw: Callable[[bytes], int]
    network_mask: Callable[[bytes], int]
    variant: str
    use: Callable[[int], int]


def _load() -> tuple[_Library | None, str]:
    """The library, or why there is none."""
    path = Path(__file__).parent / FILE
    if not path.exists():
        return None, "not in this installation: it is of a wheel for any machine, or there was no C compiler"
    try:
        library = ctypes.CDLL(str(path))
        size = ctypes.c_int64.in_dll(library, "anyk_layout_size").value
        layout = (ctypes.c_int64 * size).in_dll(library, "anyk_layout")
        if [*layout] != abi.layout():
            return None, "built for another version of anyk, with other constants or structures: install anyk again"
    except (OSError, AttributeError, ValueError) as error:
        return None, f"cannot be loaded: {error}"
    structure = ctypes.c_char_p  # as bytes
    library.anyk_forward.argtypes = library.anyk_smooth.argtypes = [structure, structure]
    library.anyk_backward.argtypes = library.anyk_best.argtypes = [structure]
    library.anyk_mask.argtypes = library.anyk_mask_backward.argtypes = library.anyk_ranking.argtypes = [structure]
    library.anyk_draw.argtypes = library.anyk_network_mask.argtypes = [structure]
    library.anyk_variant.restype = ctypes.c_char_p
    return _Library(
        library.anyk_forward,
        library.anyk_smooth,
        library.anyk_backward,
        library.anyk_best,
        library.anyk_mask,
        library.anyk_mask_backward,
        library.anyk_ranking,
        library.anyk_draw,
        library.anyk_network_mask,
        library.anyk_variant().decode(),
        library.anyk_use,
    ), ""


_library, _why_not = _load()


def status() -> str:
    """Why the kernels cannot be used; empty: they can."""
    return _why_not


def variant() -> str | None:
    """The instruction set that is used."""
    return None if _library is None else _library.variant


class Prepared(NamedTuple):
    """A loss as the library takes it."""

    run: Callable[[bytes, bytes], int]
    spec: bytes
    n: int
    m: int
    """the number of classes of a row that get a gradient of their own: the candidates"""
    rest: int
    """the number of coefficients that give the gradient by a row's other classes (``Batch`` in csrc/anyk.h); 0: it is zero"""
    powers: int
    rate: float
    description: Description | None
    """what ``spec`` was made of: it holds the tables that the bytes point to"""


def prepare(description: Description) -> Prepared | str:
    """What every call with this description hands over; or why the library does not compute it."""
    d, wiring = description, description.wiring
    # A block of 16 rows keeps every comparator, or k numbers for each candidate, in double precision.
    numbers = 3 * len(wiring.comparators) if wiring else d.m * (d.k + 6)
    if numbers * 128 > _MOST_MEMORY:
        return "it would take too much memory"
    if d.n >= 2**31:
        return "there are too many classes"
    network = (0, 0, 0, 0) if wiring is None else (len(wiring.comparators), *(table.data_ptr() for table in wiring))
    sorter = (0, 0) if d.sorting is None else (len(d.sorting), d.sorting.data_ptr())
    spec = _pack_spec(
        d.n, d.m, d.k, d.operator, d.swap, d.wires, d.family, d.all_classes, d.uses_softmax,
        d.ce_weight, d.q, d.smoothing, d.scale, *network, *sorter,
    )  # fmt: skip
    assert _library is not None
    return Prepared(_library.forward, spec, d.n, d.m, 3 if d.uses_softmax and d.m < d.n else 0, 0, 0.0, d)


def prepare_smooth(n: int, k: int, temperature: float, margin: float, hard_threshold: float | None) -> Prepared | str:
    """The same for the smooth top-k loss."""
    if k > abi.Limit.MOST_K:
        return "power sums in float32 are not exact enough"
    if n <= k:
        return "there are no more than k classes"
    gap = math.inf if hard_threshold is None else k * temperature * math.log(hard_threshold)
    assert _library is not None
    return Prepared(
        _library.smooth, _pack_smooth(n, k, temperature, margin, gap), n, k + 1, k + 1, k, 1 / (k * temperature), None
    )


def loss(
    prepared: Prepared,
    scores: Tensor,
    target: Tensor,
    p_k: PK | None,
    conventions: Conventions,
    plain: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """The loss, reduced; None where the plain code must compute it, or say what is wrong.

    Args:
        prepared: which loss.
        scores: (rows, n), of one of :data:`DTYPES`.
        target: (rows,) int64, contiguous.
        p_k: P_K, of float64, contiguous; None: the loss has none.
        conventions: without label smoothing, but for what the description has.
        plain: the same by the plain code, for second derivatives.
    """
    if scores.requires_grad and torch.is_grad_enabled():
        result: Tensor | None = _apply(scores, None, (prepared, target, p_k, conventions, plain))
        return result
    return _forward(prepared, _readable(scores), target, p_k, conventions)


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
    inputs = [scores]
    if cross_entropy is not None:
        inputs.append(cross_entropy := cross_entropy.contiguous())
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        by_inputs = (lambda scores: plain(scores, None)) if cross_entropy is None else plain
        result: Tensor | None = _apply(scores, cross_entropy, (prepared, position, p_k, _EACH, by_inputs))
        return result
    return _forward(prepared, _readable(scores), position, p_k, _EACH, cross_entropy)


def _readable(scores: Tensor) -> Tensor:
    """The classes of a row stand side by side; rows may be anywhere."""
    return scores if scores.stride(1) == 1 or scores.shape[1] == 1 else scores.contiguous()


def _forward(
    prepared: Prepared,
    scores: Tensor,
    target: Tensor,
    p_k: PK | None,
    conventions: Conventions,
    cross_entropy: Tensor | None = None,
    kept: Tensor | None = None,
    grad_cross_entropy: Tensor | None = None,
) -> Tensor | None:
    """The loss, and in ``kept`` what the backward pass needs; None if something is wrong."""
    rows, weight = scores.shape[0], conventions.weight
    size = (rows,) if conventions.reduction == "none" else ()
    result = scores.new_empty(size) if scores.dtype is torch.float32 else scores.new_empty(size, dtype=torch.float32)
    batch = _pack_batch(
        rows, scores.stride(0), conventions.ignore_index,
        DTYPES[scores.dtype], 0 if p_k is None else _P_K_OF[p_k.of], _REDUCTIONS[conventions.reduction],
        torch.get_num_threads(), scores.data_ptr(), target.data_ptr(), 0 if p_k is None else p_k.values.data_ptr(),
        0 if weight is None else weight.data_ptr(), 0 if cross_entropy is None else cross_entropy.data_ptr(),
        result.data_ptr(), *((0, 0, 0, 0) if kept is None else _parts(prepared, rows, kept)),
        0 if grad_cross_entropy is None else grad_cross_entropy.data_ptr(),
    )  # fmt: skip
    return None if prepared.run(prepared.spec, batch) else result


def _room(prepared: Prepared, scores: Tensor) -> Tensor:
    """Room for what the backward pass needs, in one tensor: see :func:`_parts`."""
    size = 4 * (scores.shape[0] * (2 * prepared.m + prepared.rest) + 1)
    return scores.new_empty(size // scores.itemsize)  # of any dtype: another one than the scores' takes longer to ask for


def _parts(prepared: Prepared, rows: int, kept: Tensor) -> tuple[int, int, int, int]:
    """Addresses of the candidates' gradients and classes, of the coefficients for the other classes, and of the divisor of the
    mean: ``gradient``, ``classes``, ``rest`` and ``divisor`` of the structures in csrc/anyk.h."""
    gradient = kept.data_ptr()
    classes = gradient + 4 * rows * prepared.m
    rest = classes + 4 * rows * prepared.m
    return gradient, classes, rest if prepared.rest else 0, rest + 4 * rows * prepared.rest


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, cross_entropy: Tensor | None, call: tuple[Any, ...]) -> Tensor | None:
        prepared, target, p_k, conventions, plain = call
        read = _readable(scores)
        kept = _room(prepared, read)
        grad_cross_entropy = None if cross_entropy is None else torch.empty_like(cross_entropy)
        result = _forward(prepared, read, target, p_k, conventions, cross_entropy, kept, grad_cross_entropy)
        if result is None:
            return None
        # The target too, though nothing reads it: who changes it in place before the backward pass is told.
        ctx.save_for_backward(scores, target, cross_entropy, None if read is scores else read)
        ctx.call = prepared, plain, kept, grad_cross_entropy
        return result

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scores, _, cross_entropy, read = ctx.saved_tensors
        prepared, plain, kept, grad_cross_entropy = ctx.call
        if torch.is_grad_enabled() or not checks.eager(incoming):
            given = (scores,) if cross_entropy is None else (scores, cross_entropy)
            with torch.enable_grad():
                gradients = autograd.wanted_gradients(plain(*given), given, incoming)
            return gradients[0], gradients[1] if len(given) > 1 else None, None
        gradient = _backward(prepared, scores if read is None else read, kept, incoming)
        return gradient, None if grad_cross_entropy is None else grad_cross_entropy * incoming, None


_apply = _compat.apply_of(_Loss)


def _backward(prepared: Prepared, read: Tensor, kept: Tensor, incoming: Tensor) -> Tensor:
    """The gradient by the scores."""
    if incoming.dtype is not torch.float32:
        incoming = incoming.float()
    rows, n = read.shape
    gradient, classes, rest, divisor = _parts(prepared, rows, kept)
    single = incoming.ndim == 0
    out = read.new_empty(rows, n)
    back = _pack_backward(
        rows, n, prepared.m, read.stride(0), n, 0 if single else incoming.stride(0),
        DTYPES[read.dtype], prepared.powers, torch.get_num_threads(), single, prepared.rate,
        read.data_ptr(), gradient, classes, rest, divisor if single else 0, incoming.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    _library.backward(back)  # type: ignore[union-attr]
    return out


def best(scores: Tensor, m: int) -> Tensor | None:
    """The classes of the m best scores of each row, descending, the earlier of equals first; None: NaN is among them."""
    assert _library is not None
    n = scores.shape[-1]
    rows = _readable(scores.reshape(-1, n))
    classes = scores.new_empty(*scores.shape[:-1], m, dtype=torch.long)
    selection = _pack_selection(
        len(rows), n, m, rows.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), rows.data_ptr(), classes.data_ptr()
    )
    return None if _library.best(selection) else classes


def _by_plain(plain: Callable[[], Tensor], inputs: tuple[Tensor | None, ...], incoming: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by the plain code, which has further derivatives; None for what needs none."""
    with torch.enable_grad():
        return autograd.wanted_gradients(plain(), inputs, incoming)


def mask(
    kind: int,
    scores: Tensor,
    k: int | Tensor,
    temperature: float | Tensor,
    plain: Callable[[], Tensor],
    of_threshold: bool = False,
) -> Tensor | None:
    """The mask of an operator, of the shape and dtype of the scores; None: the plain code is to compute it.

    Args:
        kind: which operator.
        scores: (..., n), of one of :data:`DTYPES`.
        k: how many, or (..., 1) numbers, one for each row.
        temperature: a number, or a tensor of one element.
        plain: the same by the plain code, for second derivatives.
        of_threshold: gives the thresholds instead, (...), in float32; of LapSum.
    """
    own_k = k if isinstance(k, Tensor) else None
    own_temperature = temperature if isinstance(temperature, Tensor) else None
    call = kind, k, temperature, plain, of_threshold
    result: Tensor | None = _Mask.apply(scores, own_k, own_temperature, call)  # type: ignore[no-untyped-call]
    return result


class _Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, own_k: Tensor | None, own_temperature: Tensor | None, call: Any) -> Tensor | None:
        kind, k, temperature, plain, of_threshold = call
        assert _library is not None
        n = scores.shape[-1]
        rows = _readable(scores.reshape(-1, n))
        rate = 1 / (temperature if own_temperature is None else float(own_temperature))
        ks = None if own_k is None else own_k.to(torch.float64).expand(*scores.shape[:-1], 1).reshape(-1).contiguous()
        number = rows.shape[0]
        threshold = torch.empty(number, 3 if kind == abi.Operator.KSUBSET else 1, dtype=torch.float64, device="cpu")
        # in its final shape: a view that is made in here could not be changed in place
        out = None if of_threshold else rows.new_empty(scores.shape)
        packed = _pack_mask(
            number, n, rows.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), kind, 0,
            k if ks is None else 0.0, rate,
            rows.data_ptr(), 0 if ks is None else ks.data_ptr(), threshold.data_ptr(), 0 if out is None else out.data_ptr(),
        )  # fmt: skip
        if _library.mask(packed):
            return None
        ctx.save_for_backward(scores, own_k, own_temperature, rows, threshold)
        ctx.call = kind, rate, plain
        return threshold.reshape(scores.shape[:-1]).float() if out is None else out

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        scores, own_k, own_temperature, rows, threshold = ctx.saved_tensors
        kind, rate, plain = ctx.call
        inputs = (scores, own_k, own_temperature)
        if torch.is_grad_enabled() or not checks.eager(incoming):
            return *_by_plain(plain, inputs, incoming), None
        assert _library is not None
        number, n = rows.shape
        of_threshold = incoming.ndim < scores.ndim
        if of_threshold:
            incoming = incoming.reshape(number, 1).to(torch.float64, memory_format=torch.contiguous_format)
        else:
            incoming = _readable(incoming.reshape(number, n).to(rows.dtype))
        out = rows.new_empty(number, n)
        of_k = torch.empty(number, dtype=torch.float64, device="cpu") if ctx.needs_input_grad[1] else None
        of_rate = torch.empty(number, dtype=torch.float64, device="cpu") if ctx.needs_input_grad[2] else None
        packed = _pack_mask_backward(
            number, n, rows.stride(0), incoming.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), kind, of_threshold,
            rate, rows.data_ptr(), threshold.data_ptr(), incoming.data_ptr(), out.data_ptr(),
            0 if of_k is None else of_k.data_ptr(), 0 if of_rate is None else of_rate.data_ptr(),
        )  # fmt: skip
        _library.mask_backward(packed)
        grad_k = grad_temperature = None
        if of_k is not None:
            grad_k = of_k.reshape(*scores.shape[:-1], 1).sum_to_size(own_k.shape).to(own_k.dtype)
        if of_rate is not None:  # d(1/t) = -dt / t^2
            grad_temperature = (-of_rate.sum() * rate).reshape(own_temperature.shape).to(own_temperature.dtype)
        return out.reshape(scores.shape), grad_k, grad_temperature, None


def _in_order(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in descending order, in float32, and where each score stood."""
    rows = scores.reshape(-1, scores.shape[-1]).float().contiguous()  # sort keeps strides, and the kernels know none
    ordered, order = rows.sort(dim=-1, descending=True, stable=True)
    return ordered, order


def ranking(
    operator: int, kind: abi.Ordered, scores: Tensor, temperature: float | Tensor, plain: Callable[[], Tensor]
) -> Tensor | None:
    """Soft ranks, or the soft sort, of scores without padding, in float32; None: the plain code is to compute it."""
    learned = temperature if isinstance(temperature, Tensor) else None
    result: Tensor | None = _Ranking.apply(scores, learned, (operator, kind, temperature, plain))  # type: ignore[no-untyped-call]
    return result


class _Ranking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, learned: Tensor | None, call: Any) -> Tensor | None:
        operator, kind, temperature, plain = call
        rate = 1 / (temperature if learned is None else float(learned))
        ordered, order = _in_order(scores)
        edges = ordered[:, [0, -1]]
        if not bool((edges.abs().double() * rate < 1e9).all()):  # NaN sorts first, padding last; the rest lacks digits
            return None
        out = ordered.new_empty(scores.shape)
        _run_ranking(operator, kind, rate, ordered, order, None, out, None)
        ctx.save_for_backward(scores, learned, ordered, order)
        ctx.call = operator, kind, rate, plain
        return out

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scores, learned, ordered, order = ctx.saved_tensors
        operator, kind, rate, plain = ctx.call
        if torch.is_grad_enabled() or not checks.eager(incoming):
            of_scores, of_temperature = _by_plain(plain, (scores, learned), incoming)
            return of_scores, of_temperature, None
        out = ordered.new_empty(ordered.shape)
        of_rate = torch.empty(len(ordered), dtype=torch.float64, device="cpu") if ctx.needs_input_grad[1] else None
        _run_ranking(operator, kind, rate, ordered, order, incoming.reshape(ordered.shape).float().contiguous(), out, of_rate)
        of_temperature = None
        if of_rate is not None:  # d(1/t) = -dt / t^2
            of_temperature = (-of_rate.sum() * rate * rate).reshape(learned.shape).to(learned.dtype)
        return out.reshape(scores.shape).to(scores.dtype), of_temperature, None


def _run_ranking(
    operator: int,
    kind: int,
    rate: float,
    ordered: Tensor,
    order: Tensor,
    incoming: Tensor | None,
    out: Tensor,
    of_rate: Tensor | None,
) -> None:
    assert _library is not None
    addresses = (0 if each is None else each.data_ptr() for each in (ordered, order, incoming, out, of_rate))
    _library.ranking(_pack_ranking(*ordered.shape, torch.get_num_threads(), operator, kind, 0, rate, *addresses))


def draw(scores: Tensor, k: int, temperature: float, uniform: Tensor) -> Tensor | None:
    """Random subsets of size k, of the shape and dtype of the scores; None: the plain code is to draw them.

    Args:
        scores: (..., n), of one of :data:`DTYPES`.
        k: how many.
        temperature: of KSubset.
        uniform: (..., size - 1) random numbers between 0 and 1, float64; size is the least power of 2 that is not below n.
    """
    assert _library is not None
    n = scores.shape[-1]
    rows, uniform = _readable(scores.reshape(-1, n)), uniform.contiguous()
    out = rows.new_empty(len(rows), n)
    packed = _pack_draw(
        len(rows), n, k, rows.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), 1 / temperature,
        rows.data_ptr(), uniform.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return None if _library.draw(packed) else out.reshape(scores.shape)


def network_mask(
    described: OperatorDescription,
    power: float,
    scores: Tensor,
    temperature: float | Tensor,
    k: int,
    plain: Callable[[], Tensor],
) -> Tensor | None:
    """The mask of a sorting network, of the shape and dtype of the scores; None: the plain code is to compute it.

    Args:
        described: swap and network.
        power: the scores are divided by ``temperature ** power``.
        scores: (..., n), of one of :data:`DTYPES`.
        temperature: a number, or a tensor of one element.
        k: how many, 0 < k < n.
        plain: the same by the plain code, for second derivatives.
    """
    learned = temperature if isinstance(temperature, Tensor) else None
    call = described, power, temperature, k, plain
    result: Tensor | None = _NetworkMask.apply(scores, learned, call)  # type: ignore[no-untyped-call]
    return result


class _NetworkMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, learned: Tensor | None, call: Any) -> Tensor | None:
        described, power, temperature, k, plain = call
        temperature = temperature if learned is None else float(learned)
        ordered, order = _in_order(scores)
        edges = ordered[:, [0, -1]]
        if not bool((edges.isfinite() & (edges.abs() < 1e30)).all()):  # NaN sorts first, and padding last
            return None
        ctx.save_for_backward(scores, learned, ordered, order)
        ctx.call = described, power, temperature, k, plain
        out = ordered.new_empty(scores.shape)
        if not _run_network_mask(described, temperature**-power, k, ordered, order, None, out, None):
            return None
        return out.to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scores, learned, ordered, order = ctx.saved_tensors
        described, power, temperature, k, plain = ctx.call
        if torch.is_grad_enabled() or not checks.eager(incoming):
            of_scores, of_temperature = _by_plain(plain, (scores, learned), incoming)
            return of_scores, of_temperature, None
        out = torch.empty_like(ordered)
        of_rate = torch.empty(len(ordered), dtype=torch.float64, device="cpu") if ctx.needs_input_grad[1] else None
        incoming = incoming.reshape(ordered.shape).float().contiguous()
        _run_network_mask(described, temperature**-power, k, ordered, order, incoming, out, of_rate)
        of_temperature = None
        if of_rate is not None:  # the rate is t^-power
            of_temperature = (-power / temperature * of_rate.sum()).reshape(learned.shape).to(learned.dtype)
        return out.view(scores.shape).to(scores.dtype), of_temperature, None


def _run_network_mask(
    described: OperatorDescription,
    rate: float,
    k: int,
    ordered: Tensor,
    order: Tensor,
    incoming: Tensor | None,
    out: Tensor,
    of_rate: Tensor | None,
) -> bool:
    assert _library is not None
    assert described.wiring is not None
    comparators, outputs, _ = described.wiring
    addresses = (
        0 if each is None else each.data_ptr() for each in (comparators, outputs, ordered, order, incoming, out, of_rate)
    )
    packed = _pack_network_mask(*ordered.shape, k, len(comparators), torch.get_num_threads(), described.swap, rate, *addresses)
    return not _library.network_mask(packed)
