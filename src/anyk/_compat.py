"""Whatever of torch is not public, in one place: each has a reason, and is looked at again with each new torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])


def is_transformed(tensor: Tensor) -> bool:
    """Whether torch.func or a batched gradient has wrapped the tensor: its values are not to be looked at.

    There is no public way to ask. The second kind comes from ``torch.autograd.grad(is_grads_batched=True)``.
    """
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is going on (``torch.autograd.forward_ad``): there is no public way to ask."""
    return torch.autograd.forward_ad._current_level >= 0


def constant_when_traced(function: Function) -> Function:
    """Let torch.compile call the function while it traces, and take what it returns as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports all of torch._dynamo, a second, for those as well who
    do not compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def gamma(alpha: float, count: int, generator: torch.Generator) -> list[float]:
    """Gamma variables from a generator: ``torch.distributions.Gamma`` takes none."""
    return torch._standard_gamma(torch.full((count,), alpha, dtype=torch.float64), generator=generator).tolist()
