"""Masks, thresholds, ranks, sorts and draws by the C library: numbers in, numbers out, without autograd.

Scores are (..., n), of one of :data:`anyk.kernels.native.DTYPES`. A temperature is a number or a tensor of one element. What is
``saved`` goes to the backward pass. None: something is unusual (padding where the function knows none, infinity, NaN, scores too
far apart for the digits, a temperature for each row), and the plain code is to compute it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyk.kernels import abi, native
from anyk.kernels.choice import serve
from anyk.kernels.native import DTYPES, address, readable
from anyk.kernels.wiring import wiring

Ordered = tuple[Tensor, Tensor]
"""rows in descending order, in float32, and where each score stood"""
_OPERATORS = {each.name.lower(): int(each) for each in abi.Operator}
_SWAPS = {"logistic": 1.0, "logistic_art": 2.0, "gaussian": 1.0}
"""the scores are divided by temperature ** power (anyk.swaps)"""
_MOST_COMPARATORS = 150_000
"""of a network whose mask is made by a kernel: of 16 rows it keeps three numbers for each"""
_pack = abi.packer(abi.Rows).pack


def _call(
    name: str, scores: Tensor, *, operator: int = 0, gives: int = 0, swap: int = 0, k: float = 0, rate: float = 0,
    ks: Tensor | None = None, order: Tensor | None = None, size: int = 0, comparators: Tensor | None = None,
    outputs: Tensor | None = None, seeds: Tensor | None = None, incoming: Tensor | None = None, saved: Tensor | None = None,
    out: Tensor | None = None, grad_k: Tensor | None = None, grad_rate: Tensor | None = None,
) -> bool:  # fmt: skip
    """Calls a function of the library for rows of scores, with the fields of ``Rows`` in csrc/anyk.h; whether all is fine."""
    rows = scores if scores.ndim == 2 else scores.reshape(-1, scores.shape[-1])
    rows, stride = readable(rows), 0
    if incoming is not None and incoming.shape == scores.shape:
        incoming = readable(incoming if incoming.ndim == 2 else incoming.reshape(rows.shape))
        stride = incoming.stride(0)
    packed = _pack(
        *rows.shape, rows.stride(0), stride, DTYPES[rows.dtype], torch.get_num_threads(), operator, gives, swap, k, rate,
        rows.data_ptr(), address(ks), address(order), size, address(comparators), address(outputs), address(seeds),
        address(incoming), address(saved), address(out), address(grad_k), address(grad_rate),
    )  # fmt: skip
    return not getattr(native.library, name)(packed)


def _number(temperature: float | Tensor) -> float:
    return float(temperature.detach()) if isinstance(temperature, Tensor) else temperature


def _rate(scores: Tensor, temperature: float | Tensor, *others: object) -> float | None:
    """What the scores are multiplied by; None: the kernels do not serve."""
    if not serve(scores) or not scores.numel() or scores.shape[-1] >= 2**30:
        return None
    for other in (temperature, *others):
        if isinstance(other, Tensor) and not (other.is_cpu and type(other) in (Tensor, torch.nn.Parameter)):
            return None
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        return None
    return 1 / _number(temperature)


def _by_row(scores: Tensor, numbers: int = 1) -> Tensor:
    return torch.empty(*scores.shape[:-1], numbers, dtype=torch.float64, device="cpu")


def _like(scores: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _by_temperature(grad_rate: Tensor | None, temperature: float | Tensor, power: float = 1.0) -> Tensor | None:
    return None if grad_rate is None else grad_rate * (-power / _number(temperature))  # C's is by the rate, times the rate


def best(scores: Tensor, m: int) -> Tensor | None:
    """The m best entries of each row, descending, the earlier of equals first; None if there is NaN."""
    if _rate(scores, 1.0) is None:
        return None
    classes = scores.new_empty(*scores.shape[:-1], m, dtype=torch.long)
    return classes if _call("best", scores, k=m, out=classes) else None


def mask(kind: str, scores: Tensor, k: int | Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor] | None:
    """The mask of "lapsum", "permutahedron" or "ksubset", of the shape and dtype of the scores.

    Args:
        k: how many, or (..., 1) numbers, one for each row (not of ksubset).

    Returns:
        The mask; and saved, of float64: the thresholds in the units of the scores, (..., 1), infinite where nothing or everything
        is chosen; of ksubset three numbers, (..., 3).
    """
    return _mask(kind, scores, k, temperature, _like(scores))


def threshold(scores: Tensor, k: int | Tensor, temperature: float | Tensor) -> Tensor | None:
    """The thresholds of LapSum, (..., 1) of float64; None if one is infinite."""
    found = _mask("lapsum", scores, k, temperature, None)
    return None if found is None else found[1]


def _mask(kind: str, scores: Tensor, k: int | Tensor, temperature: float | Tensor, out: Any) -> tuple[Any, Tensor] | None:
    if kind not in ("lapsum", "permutahedron", "ksubset") or (rate := _rate(scores, temperature, k)) is None:
        return None
    saved = _by_row(scores, 3 if kind == "ksubset" else 1)
    numbers = {"k": k} if isinstance(k, int) else {"ks": k.to(torch.float64).expand(*scores.shape[:-1], 1).contiguous()}
    fine = _call("mask", scores, operator=_OPERATORS[kind], rate=rate, saved=saved, out=out, **numbers)
    return (out, saved) if fine else None


def mask_backward(
    kind: str, scores: Tensor, saved: Tensor, temperature: float | Tensor, grad: Tensor, wants_k: bool, wants_temperature: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients by the scores, and, if wanted, by k and by the temperature: of float64, (..., 1), one for each row."""
    return _mask_backward(kind, abi.Gives.MASK, scores, saved, temperature, grad.to(scores.dtype), wants_k, wants_temperature)


def threshold_backward(
    scores: Tensor, saved: Tensor, temperature: float | Tensor, grad: Tensor, wants_k: bool, wants_temperature: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same for the thresholds, which are ``saved``; grad is (..., 1)."""
    grad = grad.to(torch.float64).contiguous()
    return _mask_backward("lapsum", abi.Gives.THRESHOLD, scores, saved, temperature, grad, wants_k, wants_temperature)


def _mask_backward(
    kind: str, gives: int, scores: Tensor, saved: Tensor, temperature: float | Tensor, grad: Tensor, *wants: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    out, (grad_k, grad_rate) = _like(scores), (_by_row(scores) if wanted else None for wanted in wants)
    _call(
        "mask_backward", scores, operator=_OPERATORS[kind], gives=gives, rate=1 / _number(temperature), incoming=grad, saved=saved,
        out=out, grad_k=grad_k, grad_rate=grad_rate,
    )  # fmt: skip
    return out, grad_k, _by_temperature(grad_rate, temperature)


def ranks(kind: str, scores: Tensor, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    """Soft ranks of "lapsum" or "permutahedron", 1 for the largest, of float32; and what is saved."""
    return _order(kind, abi.Gives.RANKS, scores, temperature)


def ranks_backward(
    kind: str, saved: Ordered, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the scores, of float32, and, if wanted, by the temperature: of float64, (..., 1), one for each row."""
    return _order_backward(kind, abi.Gives.RANKS, saved, temperature, grad, wants_temperature)


def sort(kind: str, scores: Tensor, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    """The soft sort of "permutahedron", descending, of float32; and what is saved. That of "lapsum" is the plain code's."""
    return None if kind == "lapsum" else _order(kind, abi.Gives.SORT, scores, temperature)


def sort_backward(
    kind: str, saved: Ordered, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`ranks_backward`."""
    return _order_backward(kind, abi.Gives.SORT, saved, temperature, grad, wants_temperature)


def _in_order(scores: Tensor, rate: float, most: float) -> Ordered | None:
    ordered, order = scores.float().contiguous().sort(dim=-1, descending=True, stable=True)
    edges = ordered[..., :: max(ordered.shape[-1] - 1, 1)]
    # NaN sorts first, padding last; far from 0 digits are lacking
    return (ordered, order) if bool((edges.abs().double() * rate < most).all()) else None


def _order(kind: str, gives: int, scores: Tensor, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    if (rate := _rate(scores, temperature)) is None or (saved := _in_order(scores, rate, 1e9)) is None:
        return None
    ordered, order = saved
    out = torch.empty_like(ordered)
    return (out, saved) if _call("order", ordered, operator=_OPERATORS[kind], gives=gives, rate=rate, order=order, out=out) else None


def _order_backward(
    kind: str, gives: int, saved: Ordered, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    ordered, order = saved
    out, grad_rate = torch.empty_like(ordered), _by_row(ordered) if wants_temperature else None
    _call(
        "order", ordered, operator=_OPERATORS[kind], gives=gives, rate=1 / _number(temperature), order=order, incoming=grad.float(),
        out=out, grad_rate=grad_rate,
    )  # fmt: skip
    return out, _by_temperature(grad_rate, temperature)


def network_mask(kind: str, swap: str, scores: Tensor, k: int, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    """The mask of a sorting network, 0 < k < n, of the shape and dtype of the scores; and what is saved."""
    n = scores.shape[-1]
    if swap not in _SWAPS or n > 4096 or _rate(scores, temperature) is None:
        return None
    if len(wiring(kind, n, k).comparators) > _MOST_COMPARATORS or (saved := _in_order(scores, 1.0, abi.OUT_OF_REACH)) is None:
        return None
    out = _network_mask(kind, swap, saved, k, temperature, None, None)
    return None if out is None else (out.to(scores.dtype), saved)


def network_mask_backward(
    kind: str, swap: str, saved: Ordered, k: int, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the scores, of float32, and, if wanted, by the temperature: of float64, (..., 1), one for each row."""
    grad_rate = _by_row(saved[0]) if wants_temperature else None
    grad_scores = _network_mask(kind, swap, saved, k, temperature, grad.float(), grad_rate)
    assert grad_scores is not None
    return grad_scores, _by_temperature(grad_rate, temperature, _SWAPS[swap])


def _network_mask(
    kind: str, swap: str, saved: Ordered, k: int, temperature: float | Tensor, grad: Tensor | None, grad_rate: Tensor | None
) -> Tensor | None:
    ordered, order = saved
    out, (comparators, outputs, _) = torch.empty_like(ordered), wiring(kind, ordered.shape[-1], k)
    fine = _call(
        "network_mask", ordered, swap=int(abi.Swap[swap.upper()]), rate=_number(temperature) ** -_SWAPS[swap], k=k, order=order,
        size=len(comparators), comparators=comparators, outputs=outputs, incoming=grad, out=out, grad_rate=grad_rate,
    )  # fmt: skip
    return out if fine else None


def draw(scores: Tensor, k: int, temperature: float | Tensor, seeds: Tensor) -> Tensor | None:
    """Random subsets of size k with the weights of KSubset, as zeros and ones of the shape and dtype of the scores.

    Args:
        seeds: (...) random int64, one for each row.
    """
    if (rate := _rate(scores, temperature, seeds)) is None:
        return None
    out = _like(scores)
    return out if _call("draw", scores, k=k, rate=rate, seeds=seeds.contiguous(), out=out) else None
