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
from anyk.kernels.native import DTYPES, address, as_rows
from anyk.kernels.wiring import wiring

Ordered = tuple[Tensor, Tensor]
"""rows in descending order, in float32, and where each score stood"""
_KINDS = {"lapsum": abi.Operator.LAPSUM, "permutahedron": abi.Operator.PERMUTAHEDRON, "ksubset": abi.Operator.KSUBSET}
_POWERS = {"logistic": 1.0, "logistic_art": 2.0, "gaussian": 1.0}
"""the swaps that the kernels have: the scores are divided by temperature ** power (anyk.swaps)"""
_MOST_COMPARATORS = 150_000
"""of a network whose mask is made by a kernel: of 16 rows it keeps three numbers for each"""
_packers = {each: abi.packer(each).pack for each in abi.STRUCTURES}


def _call(name: str, structure: type, *fields: Any) -> bool:
    """Calls a function of the library with a structure; whether all is fine."""
    return not getattr(native.library, name)(_packers[structure](*fields))


def _served(scores: Tensor, *others: object) -> bool:
    return serve(scores) and scores.numel() > 0 and scores.shape[-1] < 2**30 and all(
        not isinstance(other, Tensor) or serve_any(other) for other in others
    )


def serve_any(tensor: Tensor) -> bool:
    return tensor.is_cpu and type(tensor) in (Tensor, torch.nn.Parameter)


def _number(temperature: float | Tensor) -> float:
    """0 for a temperature of each row."""
    if not isinstance(temperature, Tensor):
        return temperature
    return float(temperature.detach()) if temperature.numel() == 1 else 0.0


def _by_row(scores: Tensor, numbers: int = 1) -> Tensor:
    return torch.empty(*scores.shape[:-1], numbers, dtype=torch.float64, device="cpu")


def best(scores: Tensor, m: int) -> Tensor | None:
    """The m best entries of each row, descending, the earlier of equals first; None if there is NaN."""
    if not _served(scores):
        return None
    rows = as_rows(scores)
    classes = scores.new_empty(*scores.shape[:-1], m, dtype=torch.long)
    fields = *rows.shape, m, rows.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), rows.data_ptr(), classes.data_ptr()
    return classes if _call("best", abi.Selection, *fields) else None


def mask(kind: str, scores: Tensor, k: int | Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor] | None:
    """The mask of "lapsum", "permutahedron" or "ksubset", of the shape and dtype of the scores.

    Args:
        k: how many, or (..., 1) numbers, one for each row (not of ksubset).

    Returns:
        The mask; and saved, of float64: the thresholds in the units of the scores, (..., 1), infinite where nothing or everything
        is chosen; of ksubset three numbers, (..., 3).
    """
    return _mask(kind, scores, k, temperature, torch.empty_like(scores, memory_format=torch.contiguous_format))


def threshold(scores: Tensor, k: int | Tensor, temperature: float | Tensor) -> Tensor | None:
    """The thresholds of LapSum, (..., 1) of float64; None if one is infinite."""
    found = _mask("lapsum", scores, k, temperature, None)
    return None if found is None else found[1]


def _mask(kind: str, scores: Tensor, k: int | Tensor, temperature: float | Tensor, out: Any) -> tuple[Any, Tensor] | None:
    t = _number(temperature)
    if not t or kind not in _KINDS or not _served(scores, k, temperature):
        return None
    rows = as_rows(scores)
    ks = None if isinstance(k, int) else k.to(torch.float64).expand(*scores.shape[:-1], 1).reshape(-1).contiguous()
    saved = _by_row(scores, 3 if kind == "ksubset" else 1)
    fields = (
        *rows.shape, rows.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), _KINDS[kind], 0, k if ks is None else 0.0, 1 / t,
        rows.data_ptr(), address(ks), saved.data_ptr(), address(out),
    )  # fmt: skip
    return (out, saved) if _call("mask", abi.Mask, *fields) else None


def mask_backward(
    kind: str, scores: Tensor, saved: Tensor, temperature: float | Tensor, grad: Tensor, wants_k: bool, wants_temperature: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients by the scores, and, if wanted, by k and by the temperature: of float64, (..., 1), one for each row."""
    grad = as_rows(grad.to(scores.dtype))
    return _mask_backward(kind, scores, saved, temperature, grad, False, wants_k, wants_temperature)


def threshold_backward(
    scores: Tensor, saved: Tensor, temperature: float | Tensor, grad: Tensor, wants_k: bool, wants_temperature: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same for the thresholds, which are ``saved``; grad is (..., 1)."""
    grad = grad.to(torch.float64).reshape(-1, 1).contiguous()
    return _mask_backward("lapsum", scores, saved, temperature, grad, True, wants_k, wants_temperature)


def _mask_backward(
    kind: str, scores: Tensor, saved: Tensor, temperature: float | Tensor, grad: Tensor, of_threshold: bool, *wants: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows, rate = as_rows(scores), 1 / _number(temperature)
    grad_scores = torch.empty_like(scores, memory_format=torch.contiguous_format)
    grad_k, grad_rate = (_by_row(scores) if wanted else None for wanted in wants)
    fields = (
        *rows.shape, rows.stride(0), grad.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), _KINDS[kind], of_threshold, rate,
        rows.data_ptr(), saved.data_ptr(), grad.data_ptr(), grad_scores.data_ptr(), address(grad_k), address(grad_rate),
    )  # fmt: skip
    _call("mask_backward", abi.MaskBackward, *fields)
    return grad_scores, grad_k, None if grad_rate is None else grad_rate * -rate  # C's is by the rate, times the rate


def ranks(kind: str, scores: Tensor, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    """Soft ranks of "lapsum" or "permutahedron", 1 for the largest, of float32; and what is saved."""
    return _ranking(kind, abi.Ordered.RANKS, scores, temperature)


def ranks_backward(
    kind: str, saved: Ordered, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the scores, of float32, and, if wanted, by the temperature: of float64, (..., 1), one for each row."""
    return _ranking_backward(kind, abi.Ordered.RANKS, saved, temperature, grad, wants_temperature)


def sort(kind: str, scores: Tensor, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    """The soft sort of "lapsum" or "permutahedron", descending, of float32; and what is saved."""
    return None if kind == "lapsum" else _ranking(kind, abi.Ordered.SORT, scores, temperature)


def sort_backward(
    kind: str, saved: Ordered, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`ranks_backward`."""
    return _ranking_backward(kind, abi.Ordered.SORT, saved, temperature, grad, wants_temperature)


def _in_order(scores: Tensor, rate: float, most: float) -> Ordered | None:
    ordered, order = scores.float().contiguous().sort(dim=-1, descending=True, stable=True)
    edges = ordered[..., :: max(ordered.shape[-1] - 1, 1)]
    # NaN sorts first, padding last; far from 0 digits are lacking
    return (ordered, order) if bool((edges.abs().double() * rate < most).all()) else None


def _ranking(kind: str, what: int, scores: Tensor, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    t = _number(temperature)
    if not t or not _served(scores, temperature):
        return None
    saved = _in_order(scores, 1 / t, 1e9)
    if saved is None:
        return None
    return _run_ranking(kind, what, saved, 1 / t, None, None), saved


def _ranking_backward(
    kind: str, what: int, saved: Ordered, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    rate = 1 / _number(temperature)
    grad_rate = _by_row(saved[0]) if wants_temperature else None
    grad_scores = _run_ranking(kind, what, saved, rate, grad.float().contiguous(), grad_rate)
    return grad_scores, None if grad_rate is None else grad_rate * -(rate * rate)


def _run_ranking(
    kind: str, what: int, saved: Ordered, rate: float, grad: Tensor | None, grad_rate: Tensor | None
) -> Tensor:
    ordered, order = saved
    out = torch.empty_like(ordered)
    n = ordered.shape[-1]
    addresses = map(address, (ordered, order, grad, out, grad_rate))
    _call("ranking", abi.Ranking, ordered.numel() // n, n, torch.get_num_threads(), _KINDS[kind], what, 0, rate, *addresses)
    return out


def network_mask(kind: str, swap: str, scores: Tensor, k: int, temperature: float | Tensor) -> tuple[Tensor, Ordered] | None:
    """The mask of a sorting network, 0 < k < n, of the shape and dtype of the scores; and what is saved."""
    t, n = _number(temperature), scores.shape[-1]
    if not t or swap not in _POWERS or not _served(scores, temperature) or n > 4096:
        return None
    if len(wiring(kind, n, k).comparators) > _MOST_COMPARATORS:
        return None
    saved = _in_order(scores, 1.0, 1e30)
    if saved is None:
        return None
    out = _run_network_mask(kind, swap, saved, k, t, None, None)
    return None if out is None else (out.to(scores.dtype), saved)


def network_mask_backward(
    kind: str, swap: str, saved: Ordered, k: int, temperature: float | Tensor, grad: Tensor, wants_temperature: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the scores, of float32, and, if wanted, by the temperature: of float64, (..., 1), one for each row."""
    t = _number(temperature)
    grad_rate = _by_row(saved[0]) if wants_temperature else None
    grad_scores = _run_network_mask(kind, swap, saved, k, t, grad.float().contiguous(), grad_rate)
    assert grad_scores is not None
    return grad_scores, None if grad_rate is None else grad_rate * (-_POWERS[swap] / t)  # C's is by the rate, times the rate


def _run_network_mask(
    kind: str, swap: str, saved: Ordered, k: int, t: float, grad: Tensor | None, grad_rate: Tensor | None
) -> Tensor | None:
    ordered, order = saved
    n, out = ordered.shape[-1], torch.empty_like(ordered)
    comparators, outputs, _ = wiring(kind, n, k)
    fields = (
        ordered.numel() // n, n, k, len(comparators), torch.get_num_threads(), abi.Swap[swap.upper()], t ** -_POWERS[swap],
        *map(address, (comparators, outputs, ordered, order, grad, out, grad_rate)),
    )  # fmt: skip
    return out if _call("network_mask", abi.NetworkMask, *fields) else None


def draw(scores: Tensor, k: int, temperature: float | Tensor, uniform: Tensor) -> Tensor | None:
    """Random subsets of size k with the weights of KSubset, as zeros and ones of the shape and dtype of the scores.

    Args:
        uniform: (..., size - 1) random numbers between 0 and 1, float64; size is the least power of 2 that is not below n.
    """
    t = _number(temperature)
    if not t or not _served(scores, temperature, uniform):
        return None
    rows, uniform = as_rows(scores), uniform.contiguous()
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    fields = (
        *rows.shape, k, rows.stride(0), DTYPES[rows.dtype], torch.get_num_threads(), 1 / t,
        rows.data_ptr(), uniform.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out if _call("draw", abi.Draw, *fields) else None
