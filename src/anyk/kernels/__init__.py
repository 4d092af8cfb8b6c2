"""The same numbers, faster: a kernel computes losses and gradient of a batch in one call.

The plain code is the definition and serves everything that no kernel does: second derivatives, traces and functional
transforms, float64, a temperature or a P_K that is learned, class probabilities. Losses and operators ask here, with plain
numbers (:mod:`anyk.kernels.loss_description`) and tensors; which code is used is decided once a call:

    native    C, on the CPU             :mod:`anyk.kernels.native`
    triton    on CUDA devices           :mod:`anyk.kernels.triton`
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from anyk import _compat, checks
from anyk.conventions import Conventions
from anyk.kernels import native
from anyk.kernels.abi import Ordered
from anyk.kernels.loss_description import Description, OperatorDescription
from anyk.p_k import PK

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
    """Sets which code computes losses and operators, from here on or in a ``with`` block, for the whole process.

    The environment variable ANYK_BACKEND has the initial setting; without it, that is ``"auto"``. ``anyk info`` shows what is
    available.

    Args:
        name: ``"auto"``: the fastest that applies. ``"torch"``: only the plain PyTorch code. ``"native"`` or ``"triton"``:
            this one, and the plain code where it does not apply; raises a RuntimeError if it is not available.

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
        global _setting
        _setting = self.name  # again: the same object may have been used before
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
if _setting == "native" and native.status():
    raise RuntimeError(f"ANYK_BACKEND=native: anyk's native kernels cannot be used: {native.status()}")


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

Prepared = native.Prepared | Description
"""a loss for rows of n scores as a kernel takes it"""


def serving(scores: Tensor) -> Backend | None:
    """Which kernels may read these scores; None: none."""
    return "native" if uses_native(scores) else "triton" if _uses_triton(scores) else None


def uses_native(scores: Tensor) -> bool:
    """Whether the native kernels may read these scores."""
    return (
        checks.eager(scores)  # first: while a trace looks at this, nothing else may happen
        and _NATIVE
        and not _compat.is_recorded()
        and (_setting == "auto" or _setting == "native")
        and scores.is_cpu
        and scores.dtype in native.DTYPES
    )


def _uses_triton(scores: Tensor) -> bool:
    if not (
        checks.eager(scores)
        and not _compat.is_recorded()
        and (_setting == "auto" or _setting == "triton")
        and scores.dtype in native.DTYPES
    ):
        return False
    if not scores.is_cuda and _setting != "triton":
        return False
    why = _unusable("triton")
    if why and _setting == "triton":  # by ANYK_BACKEND: anyk.backend has refused it
        raise RuntimeError(f"ANYK_BACKEND=triton: anyk's triton kernels cannot be used: {why}")
    return not why


def prepare(description: Description, backend: Backend) -> Prepared | str:
    """A loss as the kernels of this backend take it; or why they do not."""
    return native.prepare(description) if backend == "native" else description


prepare_smooth = native.prepare_smooth


def loss(
    prepared: Prepared,
    p_k: PK | None,
    scores: Tensor,
    target: Tensor,
    conventions: Conventions,
    plain: Callable[[Tensor, Tensor, Conventions], Tensor],
) -> Tensor | None:
    """The loss by a kernel. None: something is unusual, and the plain code has the words for it.

    Args:
        prepared: which loss.
        p_k: P_K, as :func:`readable_p_k` has it; None for a loss without one.
        scores: (rows, n), as :func:`as_rows` has them.
        target: (rows,).
        conventions: without label smoothing, but for what the description has.
        plain: the same by the plain code, for second derivatives.
    """
    if conventions.weight is not None:
        weighted = _with_weight(conventions, scores)
        if weighted is None:
            return None
        conventions = weighted

    def of_scores(scores: Tensor) -> Tensor:
        return plain(scores, target, conventions)

    if isinstance(prepared, native.Prepared):
        return native.loss(prepared, scores, target, p_k, conventions, of_scores)
    from anyk.kernels import triton

    assert p_k is not None
    return triton.loss(prepared, scores, target, p_k, conventions, of_scores)


def readable_p_k(p_k: PK) -> PK:
    """P_K as the kernels read it."""
    return PK(p_k.values.detach().to("cpu", torch.float64).contiguous(), p_k.of)


def as_rows(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scores (rows, n) and targets (rows,) as the kernels read them; None for what is not as it should be.
    The usual case costs next to nothing."""
    shape, dtype = scores.shape, target.dtype
    # The scores are known to be a plain tensor, and no transform to be on.
    if dtype not in _INDICES or len(shape) < 2 or not shape[1] or type(target) is not Tensor:
        return None
    if not target.is_cpu if scores.is_cpu else target.device != scores.device:  # to compare devices takes longer
        return None
    if target.shape != (shape[:1] if len(shape) == 2 else shape[:1] + shape[2:]):
        return None
    if dtype is not torch.int64:
        target = target.long()
    if len(shape) == 2:
        return scores, target if target.is_contiguous() else target.contiguous()
    return scores.movedim(1, -1).reshape(-1, shape[1]), target.reshape(-1).contiguous()


def _with_weight(conventions: Conventions, like: Tensor) -> Conventions | None:
    """With the weights as the kernels read them; None: they are not as they should be."""
    weight = conventions.weight
    assert weight is not None
    if weight.shape != like.shape[1:] or weight.requires_grad or weight.device != like.device or not checks.eager(weight):
        return None
    if weight.dtype == torch.float32 and weight.is_contiguous():
        return conventions
    return dataclasses.replace(conventions, weight=weight.float().contiguous())


def best(scores: Tensor, m: int) -> Tensor | None:
    """The classes of the m best scores of each row, descending; None: the plain code is to find them."""
    return native.best(scores, m) if uses_native(scores) and scores.numel() else None


def row_losses(
    description: Description,
    scores: Tensor,
    cross_entropy: Tensor | None,
    position: Tensor,
    p_k: PK,
    plain: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor | None:
    """The losses of rows whose candidates are known already; None: the plain code is to compute them.

    Args:
        description: the loss, of rows that have nothing but the candidates.
        scores: (rows, m) of the candidates, which the native kernels serve.
        cross_entropy: (rows,) over all classes, if the loss has it.
        position: (rows,) where the target stands among the candidates.
        p_k: P_K, as :func:`readable_p_k` has it.
        plain: the same by the plain code, for second derivatives.
    """
    prepared = native.prepare(description)
    if isinstance(prepared, str):
        return None
    return native.row_losses(prepared, scores, cross_entropy, position.contiguous(), p_k, plain)


def mask(
    kind: int,
    scores: Tensor,
    k: int | Tensor,
    temperature: float | Tensor,
    plain: Callable[[], Tensor],
    of_threshold: bool = False,
) -> Tensor | None:
    """The mask of an operator with a threshold, or the threshold (``native.mask``); None: the plain code is to compute it."""
    if not uses_native(scores) or not scores.numel() or scores.shape[-1] >= 2**31:
        return None
    if not all(checks.eager(tensor) for tensor in (k, temperature) if isinstance(tensor, Tensor)):
        return None
    return native.mask(kind, scores, k, temperature, plain, of_threshold)


def network_mask(
    described: OperatorDescription,
    power: float,
    scores: Tensor,
    temperature: float | Tensor,
    k: int,
    plain: Callable[[], Tensor],
) -> Tensor | None:
    """The mask of a sorting network (``native.network_mask``); None: the plain code is to compute it."""
    if not uses_native(scores) or not scores.numel() or (isinstance(temperature, Tensor) and not checks.eager(temperature)):
        return None
    return native.network_mask(described, power, scores, temperature, k, plain)


def draw(scores: Tensor, k: int, temperature: float | Tensor, uniform: Tensor) -> Tensor | None:
    """Random subsets of size k (``native.draw``); None: the plain code is to draw them."""
    if not uses_native(scores) or not scores.numel() or scores.shape[-1] >= 2**30 or not checks.eager(uniform):
        return None
    if isinstance(temperature, Tensor) and not checks.eager(temperature):
        return None
    return native.draw(scores, k, float(temperature), uniform)


def ranking(
    operator: int, kind: Literal["ranks", "sort"], scores: Tensor, temperature: float | Tensor, plain: Callable[[], Tensor]
) -> Tensor | None:
    """Soft ranks, or the soft sort (``native.ranking``); None: the plain code is to compute it."""
    if not uses_native(scores) or not scores.numel() or (isinstance(temperature, Tensor) and not checks.eager(temperature)):
        return None
    return native.ranking(operator, Ordered[kind.upper()], scores, temperature, plain)
