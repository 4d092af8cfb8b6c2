"""For ``torch.autograd.Function``s: when a backward pass written by hand does not serve, and what does then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anyk import checks


def plain_gradients(
    plain: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """The gradients by autograd through the plain form of a function; None if those written by hand may be used.

    A backward pass written by hand computes the first derivative of plain tensors. A second derivative, or a batch of gradients
    at once, needs operations that autograd knows.

    Args:
        plain: the function, in operations that autograd differentiates.
        inputs: all of its arguments; the gradients are by these.
        gradients: those of its results, as the backward pass gets them.
    """
    if not torch.is_grad_enabled() and all(checks.eager(gradient) for gradient in gradients):
        return None
    with torch.enable_grad():
        return torch.autograd.grad(plain(*inputs), inputs, gradients, create_graph=True)
