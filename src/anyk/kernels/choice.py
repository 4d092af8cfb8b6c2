"""Which code computes: the setting, and what there is."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from anyk import _compat, checks
from anyk.kernels import native

Backend = Literal["auto", "torch", "native"]
_BACKENDS = get_args(Backend)


class backend:  # noqa: N801  # it is called, like torch.no_grad
    """Sets which code computes losses and operators, from here on or in a ``with`` block, for the whole process.

    The environment variable ANYK_BACKEND has the initial setting; without it, that is ``"auto"``. ``anyk info`` shows what is
    available.

    Args:
        name: ``"auto"``: the fastest that applies. ``"torch"``: only the plain PyTorch code. ``"native"``: the C kernels for the
            CPU, and the plain code where they do not apply; raises a RuntimeError if they are not available.

    Example:
        >>> scores, target = torch.randn(8, 100), torch.randint(100, (8,))
        >>> with anyk.backend("torch"):
        ...     plain = anyk.topk_error(scores, target, {1: 0.5, 5: 0.5})
        >>> torch.testing.assert_close(plain, anyk.topk_error(scores, target, {1: 0.5, 5: 0.5}))
    """

    def __init__(self, name: Backend) -> None:
        global _setting
        checks.one_of("name", name, _BACKENDS)
        if name == "native" and native.why_not:
            raise RuntimeError(f"anyk's native kernels cannot be used: {native.why_not}")
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
    if name == "native" and native.why_not:
        raise RuntimeError(f"ANYK_BACKEND=native: anyk's native kernels cannot be used: {native.why_not}")
    return name


_setting = _from_environment()
_THERE = not native.why_not


def report() -> dict[str, Any]:
    """What is set, and whether the native kernels are used, or why not."""
    why = native.why_not or ('the setting is "torch"' if _setting == "torch" else "")
    variant = None if native.library is None else native.library.variant
    return {"setting": _setting, "native": {"usable": not why, "why": why, "variant": variant}}


def serve(scores: Tensor) -> bool:
    """Whether the native kernels may read these scores."""
    return (
        _compat.is_eager(scores)  # first: while a trace looks at this, nothing else may happen
        and _THERE
        and _setting != "torch"
        and scores.is_cpu
        and scores.dtype in native.DTYPES
        and not _compat.is_recorded()
    )


def serve_compiled(scores: Tensor) -> bool:
    """Whether code that is being compiled for these scores may call the native kernels."""
    return (
        _THERE
        and _setting != "torch"
        and scores.device.type == "cpu"
        and scores.dtype in native.DTYPES
        and not torch.compiler.is_exporting()
        and not _compat.is_transformed()
    )
