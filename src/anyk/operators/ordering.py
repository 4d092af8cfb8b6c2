"""What operators that sort share: the order, its inverse, infinite scores, and soft ranks and sorts by a function of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import hardtanh

from anyk import checks, kernels
from anyk.operators.masks import FromKernel

Solve = Callable[[Tensor, Any], Tensor]
"""(ordered, temperature) -> the ranks of the scores, or what they are sorted to, in differentiable operations. The scores are
finite and in descending order: padding stands at the end, at the lowest number there is, and what it gets does not count."""


def ranks(name: str, solve: Solve, scores: Float[Tensor, "*batch n"], temperature: float | Tensor) -> Tensor:
    """The ranks of the scores, at least float32; those of padding are the last, in the order in which it stands. The kernels
    know the operator by its name."""

    def plain(scores: Tensor, temperature: float | Tensor) -> Tensor:
        ordered, order = descending(scores)
        result = torch.where(is_padding(ordered), places(ordered), solve(ordered, temperature))
        # padding keeps its place; NaN is the first, and there for the whole row
        return unsorted(result + 0 * ordered[..., :1].detach(), order)

    return _by_kernel(kernels.ranks, kernels.ranks_backward, plain, name, scores, temperature)


def sort(name: str, solve: Solve, scores: Float[Tensor, "*batch n"], temperature: float | Tensor) -> Tensor:
    """The scores in descending order, to the last bit, in their dtype; infinite ones stay as they are. As :func:`ranks`."""

    def plain(scores: Tensor, temperature: float | Tensor) -> Tensor:
        given, order = in_order(scores)
        result = solve(finite(scores.to(given.dtype)).gather(-1, order), temperature)
        exact = result.detach()  # ONNX has no cummin
        falling = exact.sort(-1, descending=True) if torch.compiler.is_exporting() else exact.cummin(-1)
        result = result + (falling.values - exact)
        return torch.where(given.isinf(), given, result)

    return _by_kernel(kernels.sort, kernels.sort_backward, plain, name, scores, temperature).to(scores.dtype)


def _by_kernel(
    forward: Any, backward: Any, plain: Callable[..., Tensor], name: str, scores: Tensor, temperature: float | Tensor
) -> Tensor:
    t = temperature.detach() if isinstance(temperature, Tensor) else temperature
    made = forward(name, scores.detach(), t) if kernels.serve(scores) else None
    if made is None:
        return plain(scores, temperature)

    def gradients(saved: Any, grad: Tensor, wants_temperature: bool) -> tuple[Tensor, Tensor | None]:
        return backward(name, saved, t, grad, wants_temperature)

    return FromKernel.run(scores, temperature, made, gradients, plain)


def in_order(scores: Float[Tensor, "*batch n"]) -> tuple[Float[Tensor, "*batch n"], Int[Tensor, "*batch n"]]:
    """The scores in descending order, in at least float32, and where each stood. Equal ones keep their order; NaN is first."""
    scores = scores.detach().to(checks.working_dtype(scores))
    if torch.compiler.is_exporting():  # ONNX has no other than its own, which keeps it
        return torch.sort(scores, dim=-1, descending=True)
    return torch.sort(scores, dim=-1, descending=True, stable=True)


def descending(scores: Float[Tensor, "*batch n"]) -> tuple[Float[Tensor, "*batch n"], Int[Tensor, "*batch n"]]:
    """The same with finite scores, which have their graph."""
    order = in_order(scores)[1]
    return finite(scores.to(checks.working_dtype(scores))).gather(-1, order), order


def finite(scores: Tensor) -> Tensor:
    """Infinite scores become the largest and the smallest number; NaN stays."""
    most = torch.finfo(scores.dtype).max
    return hardtanh(scores, -most, most)


def places(ordered: Tensor) -> Tensor:
    """1 … n"""
    return torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device)


def is_padding(ordered: Tensor) -> Tensor:
    return ordered <= torch.finfo(ordered.dtype).min


def unsorted(values: Tensor, order: Tensor) -> Tensor:
    """Values of the sorted scores, where the scores stood."""
    return torch.zeros_like(values).scatter(-1, order, values)
