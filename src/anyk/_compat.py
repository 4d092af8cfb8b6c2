"""Whatever of torch is not public, in one place: each has a reason, and is looked at again with each new torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])


def eager(tensor: Tensor) -> bool:
    """A plain tensor in eager mode: not traced, not inside a functional transform, not in forward-mode differentiation.

    There is no public way to ask for the last two. torch.func has levels while a transform is on, whichever tensors it is of;
    ``torch.autograd.grad(is_grads_batched=True)`` wraps its tensors; ``torch.autograd.forward_ad`` counts its own levels.
    """
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)
        and torch.autograd.forward_ad._current_level < 0
    )


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is inside vmap, grad or another functional transform; never while it is traced."""
    functorch = torch._C._functorch
    return not torch.compiler.is_compiling() and (
        functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


def is_recorded() -> bool:
    """Whether ``torch.jit.trace``, ``make_fx`` or another dispatch mode watches which operations run: a kernel is none."""
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def version_of(tensor: Tensor) -> int:
    """A number that changes with every change in place, as far as torch counts them."""
    return 0 if tensor.is_inference() else tensor._version


def constant_when_traced(function: Function) -> Function:
    """Let torch.compile call the function while it traces, and take what it returns as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports all of torch._dynamo, a second, for those as well who
    do not compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, without what it does for functional transforms: for whoever knows that none is on (:func:`eager`).

    That takes more than a microsecond, which in a small loss can be seen.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def gamma(alpha: float, count: int, generator: torch.Generator) -> list[float]:
    """Gamma variables from a generator: ``torch.distributions.Gamma`` takes none."""
    return torch._standard_gamma(torch.full((count,), alpha, dtype=torch.float64), generator=generator).tolist()


SLOW_TO_IMPORT = "torch._dynamo"
"""What optimizers import when they are made: a second in each process that did not inherit it."""
