"""The same numbers, faster: a kernel computes losses and gradient of a batch in one call.

The plain code is the definition and serves everything that no kernel does: second derivatives, traces and functional
transforms, float64, a temperature or a P_K that is learned, class probabilities. Which code is used is decided here, once a
call:

    native    C, on the CPU             :mod:`anyk.kernels.native`
    triton    on CUDA devices           :mod:`anyk.kernels.triton`
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from anyk import _compat, candidates, checks
from anyk import p_k as p_ks
from anyk.kernels import native
from anyk.kernels.description import Description, describe
from anyk.p_k import PK
from anyk.registry import NETWORKS, SWAPS

if TYPE_CHECKING:
    from anyk.conventions import Conventions, Rows
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
#: a loss that needs no ranks is computed by the kernels all the same, up to so many classes: there they cost less than a call
MOST_RANKED_FOR_NOTHING = 256
_INDICES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


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


def loss(spec: Spec, scores: Tensor, target: Tensor, conventions: Conventions, example_p_k: Tensor | None) -> Tensor | None:
    """What :func:`anyk.losses.topk_loss` returns, by a kernel; None: the plain code is to compute it.

    Whatever is unusual goes there too: it has the words for what is wrong.
    """
    by_native = uses_native(scores)
    if not (by_native or _uses_triton(scores)) or not isinstance(target, Tensor):
        return None
    n, flat, goal = _as_rows(scores, target)
    if flat is None or (conventions.label_smoothing and (not spec.smoothing or conventions.weight is not None)):
        return None
    fitted = _fitted(spec, n) if example_p_k is None else _fit(spec, n, p_ks.read_rows(example_p_k, target.shape))
    if fitted is None:
        return None
    prepared, p_k = fitted
    if conventions.weight is not None and (conventions := _with_weight(conventions, n, scores)) is None:  # type: ignore[assignment]
        return None

    def plain(flat: Tensor) -> Tensor:
        """From the rows: the second derivative is wanted by them."""
        from anyk.losses import plain_loss

        k = p_k.values.shape[-1]
        now = _prepared(spec, n, k, candidates.number(spec.m, n, k))
        if isinstance(now, str) or not _same(now.description, prepared.description):
            raise RuntimeError("operator: expected as it was in the forward pass, got one that was changed before the backward")
        return plain_loss(spec, flat, goal, conventions, None if example_p_k is None else p_k.values)

    if by_native:
        result = native.loss(prepared, flat, goal, p_k, conventions, plain)
    else:
        from anyk.kernels import triton

        assert prepared.description is not None
        there = PK(p_k.values.to(scores.device), p_k.of)
        result = triton.loss(prepared.description, flat, goal, there, conventions, plain)
    if scores.ndim > 2 and result is not None and result.ndim:
        return result.reshape(target.shape)
    return result


def _same(one: Description | None, other: Description | None) -> bool:
    """Whether two descriptions tell of the same loss."""
    assert one is not None
    assert other is not None
    numbers = len(one) - 2  # all but the tables
    sizes = [0 if each.wiring is None else len(each.wiring.comparators) for each in (one, other)]
    return one[:numbers] == other[:numbers] and sizes[0] == sizes[1]


def _with_weight(conventions: Conventions, n: int, like: Tensor) -> Conventions | None:
    """With the weights as the kernels read them; None: they are not as they should be."""
    weight = conventions.weight
    assert weight is not None
    if weight.shape != (n,) or weight.requires_grad or weight.device != like.device or not checks.eager(weight):
        return None
    if weight.dtype == torch.float32 and weight.is_contiguous():
        return conventions
    weight = weight.float().contiguous()
    return type(conventions)(conventions.reduction, conventions.ignore_index, weight, conventions.label_smoothing)


def smooth_loss(
    prepared: native.Prepared | str,
    scores: Tensor,
    target: Tensor,
    conventions: Conventions,
    plain: Callable[[Tensor, Tensor], Tensor],
) -> Tensor | None:
    """The smooth top-k loss; None: the plain code is to compute it, from scores (rows, n) and targets."""
    n, flat, goal = _as_rows(scores, target)
    if flat is None or isinstance(prepared, str) or conventions.label_smoothing:
        return None
    wanted = conventions if conventions.weight is None else _with_weight(conventions, n, scores)
    if wanted is None:
        return None
    result = native.loss(prepared, flat, goal, None, wanted, lambda flat: plain(flat, goal))
    return result.reshape(target.shape) if scores.ndim > 2 and result is not None and result.ndim else result


def _fitted(spec: Spec, n: int) -> tuple[native.Prepared, PK] | None:
    """:func:`_fit`, from the last call unless something was assigned since."""
    own = spec.operator.__dict__
    if spec.p_k is None or spec.p_k.values.requires_grad:
        return None
    state = (
        # P_K may have been learned before, and be the user's own tensor
        *(n, _compat.version_of(spec.p_k.values), NETWORKS.version, SWAPS.version),
        *(own.get("temperature"), own.get("kind"), own.get("swap"), own.get("wires"), own.get("power")),
    )
    last = spec.__dict__.get("_fitted")
    if last is None or last[0] != state:
        last = state, _fit(spec, n, spec.p_k)
        if own.get("temperature") is not None:  # a tensor is none of them, and may change
            spec.__dict__["_fitted"] = last
    return last[1]


def _fit(spec: Spec, n: int, p_k: PK) -> tuple[native.Prepared, PK] | None:
    """What the kernels are told of a loss, and its P_K, for rows of n scores; None: they do not compute it."""
    values = p_k.values
    k = values.shape[-1]
    m = candidates.number(spec.m, n, k)
    if values.requires_grad or k > (m or n) or (p_k.of == "class" and len(values) != n) or spec.is_cross_entropy(k):
        return None
    if not spec.ranks and n > MOST_RANKED_FOR_NOTHING:
        return None
    prepared = _prepared(spec, n, k, m)
    if isinstance(prepared, str):
        return None
    return prepared, PK(values.detach().to("cpu", torch.float64).contiguous(), p_k.of)


def _as_rows(scores: Tensor, target: Tensor) -> tuple[int, Tensor | None, Tensor]:
    """Number of classes, scores (rows, n) and targets (rows,) as the kernels read them; None for what is not as it should be.
    The usual case costs next to nothing."""
    shape, dtype = scores.shape, target.dtype
    # The scores are known to be a plain tensor, and no transform to be on.
    if dtype not in _INDICES or len(shape) < 2 or not shape[1] or type(target) is not Tensor:
        return 0, None, target
    if not target.is_cpu if scores.is_cpu else target.device != scores.device:  # to compare devices takes longer
        return 0, None, target
    if target.shape != (shape[:1] if len(shape) == 2 else shape[:1] + shape[2:]):
        return 0, None, target
    if dtype is not torch.int64:
        target = target.long()
    if len(shape) == 2:
        return shape[1], scores, target if target.is_contiguous() else target.contiguous()
    return shape[1], scores.movedim(1, -1).reshape(-1, shape[1]), target.reshape(-1).contiguous()


def best(scores: Tensor, m: int) -> Tensor | None:
    """The classes of the m best scores of each row, descending; None: the plain code is to find them."""
    return native.best(scores, m) if uses_native(scores) and scores.numel() else None


def row_losses(spec: Spec, rows: Rows, k: int, p_k: PK) -> Tensor | None:
    """The losses of rows whose candidates are known already; None: the plain code is to compute them."""
    scores = rows.scores
    if scores.ndim != 2 or rows.shares is not None or rows.padded is not None or not uses_native(scores):
        return None
    if p_k.values.requires_grad or (k == 1 and rows.cross_entropy is not None and spec.is_cross_entropy(k)):
        return None
    prepared = _prepared(spec, scores.shape[-1], k, None, rows.cross_entropy is not None)
    if isinstance(prepared, str):
        return None
    values = p_k.at(rows.target).to(torch.float64).contiguous()
    wanted = PK(values, "all" if values.ndim == 1 else "row")

    def plain(scores: Tensor, cross_entropy: Tensor | None) -> Tensor:
        again = rows._replace(scores=scores, cross_entropy=cross_entropy)
        return spec.losses(again, spec.log_inclusion(again, k), p_k.at(rows.target))

    return native.row_losses(prepared, scores, rows.cross_entropy, rows.position.contiguous(), wanted, plain)


_known: dict[tuple[Any, ...], native.Prepared | str] = {}


def _prepared(spec: Spec, n: int, k: int, m: int | None, given: bool = False) -> native.Prepared | str:
    """What the kernels are told of a loss, from memory; or why they do not compute it.

    Args:
        spec: the loss.
        n, k, m: its sizes.
        given: the cross-entropy over all classes is not to be computed.
    """
    operator = spec.operator
    if isinstance(operator.temperature, Tensor):
        return "its temperature is a tensor"
    own = operator.__dict__
    settings = [own.get(name) for name in ("temperature", "kind", "swap", "wires", "power")]
    key = (type(spec), spec.kernel_key, type(operator), *settings, NETWORKS.version, SWAPS.version, n, k, m, given)
    found = _known.get(key)
    if found is None:
        if len(_known) > 1000:
            _known.clear()
        described = describe(spec, n, k, m, given)
        found = _known[key] = described if isinstance(described, str) else native.prepare(described)
    return found
