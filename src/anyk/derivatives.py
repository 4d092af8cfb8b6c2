"""Derivatives written by hand, beside the plain form that has all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anyk import checks


def of_plain(
    plain: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...] | None:
    """The gradients of the plain form, where the hand-written ones do not serve; None where they do.

    A backward pass written by hand serves the first derivative of plain tensors. A second derivative, or many gradients at
    once, come from differentiating the plain form; None for an input that needs no gradient.

    Args:
        plain: the function, in operations that torch differentiates.
        inputs: what it is differentiated by, all of its arguments.
        gradients: those of its results.
    """
    if not torch.is_grad_enabled() and all(checks.eager(gradient) for gradient in gradients):
        return None
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(plain(*inputs), wanted, gradients, create_graph=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)
