"""What operators share: scores over the temperature, and results that a kernel makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from anyk._compat import Function

# Differences over the temperature that are as good as infinite. They, and their differences, are numbers in float32.
OUT_OF_REACH = 1e30


def relative(scores: Tensor, reference: Tensor, temperature: float | Tensor) -> Tensor:
    """The difference of finite scores over the temperature, bounded: before, as an infinite quotient has no derivative by the
    temperature."""
    if isinstance(temperature, Tensor):
        most = (OUT_OF_REACH * temperature.detach()).clamp(max=1e38)
        return (scores - reference).clamp(-most, most) / temperature
    limit = min(OUT_OF_REACH * temperature, 1e38)
    return hardtanh(scores - reference, -limit, limit) / temperature


class FromKernel(Function):
    """What a kernel has made, together with the tensors that it has saved. ``gradients(saved, grad, wants_temperature)`` is its
    backward pass. For second derivatives there is the plain code, ``plain(scores, temperature)``."""

    @staticmethod
    def forward(scores: Tensor, temperature: float | Tensor, made: Any, gradients: Any, plain: Callable[..., Tensor]) -> Tensor:
        result: Tensor = made[0]
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, temperature, (_, saved), ctx.gradients, ctx.plain = inputs
        ctx.temperature = None if isinstance(temperature, Tensor) else temperature
        ctx.save_for_backward(scores, temperature if ctx.temperature is None else None, *saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, temperature, *saved = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        if not torch.is_grad_enabled():
            by_scores, by_rows = ctx.gradients(tuple(saved), grad, wants[1])
            by_temperature = None if by_rows is None else by_rows.to(temperature.dtype).sum_to_size(temperature.shape)
            return by_scores.to(scores.dtype), by_temperature, None, None, None
        # views: where the temperature comes from the scores, the gradient by the scores alone must not run through it
        inputs = [None if each is None else each.view_as(each) for each in (scores, temperature)]
        result = ctx.plain(inputs[0], ctx.temperature if temperature is None else inputs[1])
        wanted: list[Any] = [each for each, want in zip(inputs, wants, strict=True) if want]
        grads = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
        return *(next(grads) if want else None for want in wants), None, None, None
