"""The same numbers, faster: a kernel computes losses and gradient of a batch in one call.

The plain code is the definition and serves everything that no kernel does: second derivatives, traces and functional
transforms, float64, a temperature or a P_K that is learned, class probabilities. Which code is used is decided here, once a
call:

    native    C, on the CPU             :mod:`anyk.kernels.native`
    triton    on CUDA devices           :mod:`anyk.kernels.triton`
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from anyk import candidates, checks
from anyk import p_k as p_ks
from anyk.kernels import native
from anyk.kernels.description import describe
from anyk.operators.sorting_network import SortingNetwork
from anyk.p_k import PK
from anyk.registry import NETWORKS, SWAPS

if TYPE_CHECKING:
    from anyk.conventions import Conventions
    from anyk.losses import Spec

__all__ = ["backend", "report"]

Backend = Literal["auto", "torch", "native", "triton"]
_BACKENDS = get_args(Backend)


def _unusable(name: str) -> str:
    """Why a backend cannot be used; empty: it can."""
    if name == "native":
        return native.status()
    if name == "triton":
        from anyk.kernels import triton

        return triton.status()
    return ""


class backend:  # noqa: N801  # it is called, like torch.no_grad
    """Which code computes the losses, from here on or in a ``with`` block. The setting is the whole process's.

    The variable ANYK_BACKEND has the setting that a process starts with; without it that is ``"auto"``. ``anyk info`` tells
    what there is.

    Args:
        name: ``"auto"``: the fastest that applies. ``"torch"``: the plain PyTorch code alone. ``"native"`` or ``"triton"``:
            this one, and the plain code for what it does not compute; a RuntimeError if it cannot be used here.

    Example:
        >>> scores, target = torch.randn(8, 100), torch.randint(100, (8,))
        >>> with anyk.backend("torch"):
        ...     plain = anyk.topk_error(scores, target, {1: 0.5, 5: 0.5})
        >>> torch.testing.assert_close(plain, anyk.topk_error(scores, target, {1: 0.5, 5: 0.5}))
    """

    def __init__(self, name: Backend) -> None:
        global _setting
        checks.one_of("name", name, _BACKENDS)
        if why := _unusable(name):
            raise RuntimeError(f"anyk's {name} kernels cannot be used: {why}")
        self.name = name
        self._before = _setting
        _setting = name

    def __enter__(self) -> backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _setting
        _setting = self._before

    def __repr__(self) -> str:
        return f"anyk.backend({self.name!r})"


def _from_environment() -> str:
    name = os.environ.get("ANYK_BACKEND", "auto") or "auto"
    if name not in _BACKENDS:
        raise ValueError(f"ANYK_BACKEND: expected one of {', '.join(map(repr, _BACKENDS))}, got {name!r}")
    return name


_setting = _from_environment()


def report() -> dict[str, Any]:
    """What is set, which kernels there are, and why some are not used."""
    found: dict[str, Any] = {"setting": _setting}
    for name in ("native", "triton"):
        why = _unusable(name)
        if not why and _setting not in ("auto", name):
            why = f'the setting is "{_setting}"'
        found[name] = {"usable": not why, "why": why}
    found["native"]["variant"] = native.variant()
    return found


_NATIVE = not native.status()
_INDICES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def uses_native(scores: Tensor) -> bool:
    """Whether the native kernels may read these scores."""
    return (
        checks.eager(scores)  # first: while a trace looks at this, nothing else may happen
        and _NATIVE
        and (_setting == "auto" or _setting == "native")
        and scores.is_cpu
        and scores.dtype in native.DTYPES
    )


def _uses_triton(scores: Tensor) -> bool:
    if not (checks.eager(scores) and (_setting == "auto" or _setting == "triton") and scores.dtype in native.DTYPES):
        return False
    if not scores.is_cuda and _setting != "triton":
        return False
    return not _unusable("triton")


def loss(
    spec: Spec, scores: Tensor, target: Tensor, conventions: Conventions, example_p_k: Tensor | None
) -> Tensor | None:
    """What :func:`anyk.losses.topk_loss` returns, by a kernel; None: the plain code is to compute it.

    Whatever is unusual goes there too: it has the words for what is wrong.
    """
    by_native = uses_native(scores)
    if not (by_native or _uses_triton(scores)) or not isinstance(target, Tensor) or target.device != scores.device:
        return None
    shape = scores.shape
    if len(shape) < 2 or target.dtype not in _INDICES or not shape[1] or target.shape != shape[:1] + shape[2:]:
        return None
    if conventions.label_smoothing and (not spec.smoothing or conventions.weight is not None):
        return None
    p_k = spec.p_k if example_p_k is None else p_ks.read_rows(example_p_k, target.shape)
    if p_k is None or p_k.values.requires_grad:
        return None
    n, k = shape[1], p_k.values.shape[-1]
    if (p_k.of == "class" and len(p_k.values) != n) or spec.is_cross_entropy(k):
        return None
    m = candidates.number(spec.m, n, k)
    if k > (m or n):
        return None
    prepared = _prepared(spec, n, k, m)
    if isinstance(prepared, str):
        return None
    weight = conventions.weight
    if weight is not None:
        if weight.shape != (n,) or weight.requires_grad or weight.device != scores.device:
            return None
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            conventions = type(conventions)(
                conventions.reduction, conventions.ignore_index, weight.float().contiguous(), conventions.label_smoothing
            )
    values = p_k.values
    if values.dtype != torch.float64 or not values.is_contiguous() or values.device != scores.device:
        p_k = PK(values.to(scores.device, torch.float64).contiguous(), p_k.of)
    flat = scores
    if len(shape) > 2:
        flat = scores.movedim(1, -1).reshape(-1, n)
    goal = target if target.dtype == torch.int64 else target.long()
    if len(shape) > 2 or not goal.is_contiguous():
        goal = goal.reshape(-1).contiguous()

    def plain(flat: Tensor) -> Tensor:
        """From the rows: the second derivative is wanted by them."""
        from anyk.losses import plain_loss

        rows = None if example_p_k is None else p_k.values
        return plain_loss(spec, flat, goal, conventions, rows)

    if by_native:
        result = native.loss(prepared, flat, goal, p_k, conventions, plain)
    else:
        from anyk.kernels import triton

        result = triton.loss(prepared.description, flat, goal, p_k, conventions, plain)
    if result is None or len(shape) == 2 or not result.ndim:
        return result
    return result.reshape(target.shape)


_known: dict[tuple[Any, ...], native.Prepared | str] = {}


def _prepared(spec: Spec, n: int, k: int, m: int | None) -> native.Prepared | str:
    """What the kernels are told of a loss, from memory; or why they do not compute it."""
    operator = spec.operator
    temperature = operator.temperature
    if isinstance(temperature, Tensor):
        return "its temperature is a tensor"
    key = (type(spec), spec.kernel_key, type(operator), temperature, n, k, m)
    if type(operator) is SortingNetwork:
        # Under the same name another network or swap may be entered.
        kind, swap = operator.kind, operator.swap
        key = (*key, kind, swap, operator.wires, id(NETWORKS[kind]), id(SWAPS[swap]))
    elif not isinstance(getattr(operator, "power", None), nn.Module):
        key = (*key, getattr(operator, "power", None))
    found = _known.get(key)
    if found is None:
        if len(_known) > 1000:
            _known.clear()
        described = describe(spec, n, k, m)
        found = _known[key] = described if isinstance(described, str) else native.prepare(described)
    return found
