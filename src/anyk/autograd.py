"""For ``torch.autograd.Function``s: when a backward pass written by hand does not serve, and what does then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anyk import checks


def plain_gradients(
    plain: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...] | None:
    """The gradients by autograd through the plain form of a function; None if those written by hand may be used.

    A backward pass written by hand computes the first derivative of plain tensors. A second derivative, or a batch of gradients
    at once, needs operations that autograd knows.

    Args:
        plain: the function, in operations that autograd differentiates.
        inputs: all of its arguments; the gradients are by these, None for those that need none.
        gradients: those of its results, as the backward pass gets them.
    """
    if not torch.is_grad_enabled() and all(checks.eager(gradient) for gradient in gradients):
        return None
    with torch.enable_grad():
        # views: where one input was computed from another, the gradient by that one must not run through this one as well
        views = [tensor.view_as(tensor) for tensor in inputs]
        return wanted_gradients(plain(*views), views, gradients)


def wanted_gradients(
    results: Tensor | tuple[Tensor, ...],
    inputs: Sequence[Tensor | None],
    gradients: Tensor | Sequence[Tensor],
    create_graph: bool = True,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` by the inputs that need a gradient; None for the others."""
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=create_graph))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs)
