"""Losses by the C library with their gradients: eager through an autograd.Function, compiled as operators of torch.library.

Dynamo cannot look into the library, so that compiled code calls ``anyk::loss``, which is the same in one node of the graph. Eager
code has less to do: a small loss takes as long as the way through the dispatcher.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyk import _compat
from anyk.kernels import abi, losses
from anyk.kernels.choice import serve, serve_compiled
from anyk.kernels.losses import Call, Kept, Loss, Prepared, SmoothLoss
from anyk.kernels.native import readable

_WRONG = {
    abi.Status.BAD_TARGET: "target: expected class indices below the number of classes",
    abi.Status.PADDED_TARGET: "target: expected classes that are not padding, got one whose score is -inf",
    abi.Status.TOO_FEW: "scores: expected at least k that are not padding in every row",
    abi.Status.NO_MEMORY: "the native kernels got no memory",
}


def loss(
    description: Loss,
    scores: Tensor,
    target: Tensor,
    p_k: Tensor,
    p_k_of: str = "all",
    reduction: str = "mean",
    ignore_index: int = -100,
    weight: Tensor | None = None,
) -> Tensor | None:
    """The loss, reduced; None where the plain code must compute it, or say what is wrong.

    Args:
        description: which loss.
        scores: (rows, n).
        target: (rows,) class indices.
        p_k: P_K, float64 on the CPU, contiguous: (k,), (n, k) or (rows, k).
        p_k_of: which of these: "all", "class" or "row".
        reduction, ignore_index, weight: as in ``torch.nn.CrossEntropyLoss``.
    """
    return _run(description, scores, (target, p_k, p_k_of, reduction, ignore_index, weight, None))


def smooth_loss(
    scores: Tensor,
    target: Tensor,
    k: int,
    temperature: float,
    margin: float,
    hard_threshold: float | None,
    reduction: str = "mean",
    ignore_index: int = -100,
    weight: Tensor | None = None,
) -> Tensor | None:
    """The smooth top-k loss (:class:`anyk.SmoothTopKLoss`); the rest as of :func:`loss`."""
    description = SmoothLoss(k, temperature, margin, hard_threshold)
    return _run(description, scores, (target, None, "all", reduction, ignore_index, weight, None))


def row_losses(
    description: Loss, scores: Tensor, position: Tensor, cross_entropy: Tensor | None, p_k: Tensor, p_k_of: str = "all"
) -> Tensor | None:
    """The loss of each row whose candidates are known, (rows,); None: the plain code is to compute them.

    Args:
        description: the loss, with m candidates and without a softmax of its own if the cross-entropy is given.
        scores: (rows, m), the candidates'.
        position: (rows,) where the target stands among the candidates.
        cross_entropy: (rows,) over all classes, if the loss has it.
        p_k: P_K, float64 on the CPU, contiguous: (k,) or (rows, k).
        p_k_of: which of these: "all" or "row".
    """
    return _run(description, scores, (position, p_k, p_k_of, "none", -1, None, cross_entropy))


def _run(description: Loss | SmoothLoss, scores: Tensor, call: Call) -> Tensor | None:
    compiles = torch.compiler.is_compiling()
    if not (serve_compiled(scores) if compiles else serve(scores)):
        return None
    rows, n = scores.shape
    target, p_k, p_k_of, reduction, ignore_index, weight, cross_entropy = call
    if not target.is_cpu or target.numel() != rows:
        return None
    if target.dtype is not torch.int64 or not target.is_contiguous():
        target = target.long().contiguous()
    if weight is not None:
        if weight.numel() != n or weight.requires_grad or not weight.is_cpu:
            return None
        weight = weight.float().contiguous()
    if cross_entropy is not None:
        cross_entropy = cross_entropy.float().contiguous()
    wants_gradient = scores.requires_grad or (cross_entropy is not None and cross_entropy.requires_grad)
    wants_gradient = wants_gradient and torch.is_grad_enabled()
    call = (target, p_k, p_k_of, reduction, ignore_index, weight, cross_entropy)
    if compiles:
        return _compiled(description, scores, call, wants_gradient) if losses.has(description, n) else None
    prepared = losses.prepare(description, n)
    if prepared is None or type(target) is not Tensor or not (weight is None or _compat.is_eager(weight)):
        return None
    if wants_gradient:
        result: Tensor | None = _apply(scores, cross_entropy, prepared, call)
        return result
    found = losses.forward(prepared, readable(scores), call)
    return None if isinstance(found, int) else found


# ---- eager ---------------------------------------------------------------------------------------------------------------


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, cross_entropy: Tensor | None, prepared: Prepared, call: Call) -> Tensor | None:
        read = readable(scores)
        # of the dtype of the scores: another one takes longer to ask for
        kept = scores.new_empty(prepared.keeps.bytes(len(scores)) // scores.itemsize)
        grad_cross_entropy = None if cross_entropy is None else torch.empty_like(cross_entropy)
        result = losses.forward(prepared, read, call, kept, grad_cross_entropy)
        if not isinstance(result, Tensor):
            return None
        # The target too, though nothing reads it: who changes it in place before the backward pass is told.
        ctx.save_for_backward(scores, call[0], cross_entropy, kept, grad_cross_entropy, None if read is scores else read)
        ctx.keeps = prepared.keeps
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, _, cross_entropy, kept, grad_cross_entropy, read = ctx.saved_tensors
        read = scores if read is None else read
        if not torch.is_grad_enabled() and _compat.is_eager(grad):
            grad_scores = losses.backward(read, kept, grad, ctx.keeps)
            return grad_scores, None if grad_cross_entropy is None else grad_cross_entropy * grad, None, None
        # A graph is made, or several gradients come in at once: the gradient is linear in what comes in
        one = torch.ones(grad.shape, dtype=torch.float32)
        slope = _Once.apply(losses.backward(read, kept, one, ctx.keeps), scores, cross_entropy)
        grad_scores = slope * (grad if one.ndim == 0 else grad[..., None]).to(slope.dtype)
        if grad_cross_entropy is None:
            return grad_scores, None, None, None
        return grad_scores, _Once.apply(grad_cross_entropy, scores, cross_entropy) * grad, None, None


class _Once(torch.autograd.Function):
    """A gradient that has no further derivative by the inputs of the loss."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _no_second_derivative()


def _no_second_derivative(*_: Any) -> Any:
    raise RuntimeError('the native kernels have no second derivative: compute the loss under anyk.backend("torch")')


_apply = _compat.fast_apply(_Loss)


# ---- compiled ------------------------------------------------------------------------------------------------------------


def _compiled(loss: Loss | SmoothLoss, scores: Tensor, call: Call, wants_gradient: bool) -> Tensor:
    """By the operator, whose arguments are what the dispatcher knows: words and numbers of the description one by one."""
    keeps = losses.keeps(loss, scores.shape[1])
    if isinstance(loss, SmoothLoss):
        words = ["smooth"]
        numbers = [loss.temperature, loss.margin, -1.0 if loss.hard_threshold is None else loss.hard_threshold]
    else:
        name, scale, *network = loss.operator or ("", 0.0)
        words = [name, *network, loss.family, "all" if loss.softmax_over_all else "", "softmax" if loss.uses_softmax else ""]
        numbers = [scale, loss.ce_weight, loss.q, loss.smoothing]
    target, p_k, p_k_of, reduction, ignore_index, weight, cross_entropy = call
    found: tuple[Tensor, ...] = torch.ops.anyk.loss(
        scores, target, p_k, weight, cross_entropy, " ".join(words), numbers, loss.k, *keeps, p_k_of, reduction, ignore_index,
        wants_gradient,
    )  # fmt: skip
    return found[0]


@lru_cache(maxsize=256)
def _described(words: str, numbers: tuple[float, ...], m: int, k: int) -> Loss | SmoothLoss:
    if words == "smooth":
        temperature, margin, hard_threshold = numbers
        return SmoothLoss(k, temperature, margin, None if hard_threshold < 0 else hard_threshold)
    name, *network, family, over, softmax = words.split(" ")
    return Loss((name, numbers[0], *network), family, bool(over), bool(softmax), *numbers[1:], m, k)


_KEPT = "SymInt m, SymInt rest, int powers, float rate"


@torch.library.custom_op(
    "anyk::loss",
    mutates_args=(),
    schema="(Tensor scores, Tensor target, Tensor? p_k, Tensor? weight, Tensor? cross_entropy, str words, float[] numbers, int k, "
    f"{_KEPT}, str p_k_of, str reduction, int ignore_index, bool wants_gradient) -> (Tensor, Tensor, Tensor)",
)
def _loss(
    scores: Tensor, target: Tensor, p_k: Tensor | None, weight: Tensor | None, cross_entropy: Tensor | None, words: str,
    numbers: list[float], k: int, m: int, rest: int, powers: int, rate: float, p_k_of: str, reduction: str, ignore_index: int,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, what the backward pass needs, and the gradient by the cross-entropy."""
    prepared = losses.prepare(_described(words, tuple(numbers), m, k), scores.shape[1])
    assert prepared is not None, "who calls has asked whether the library has this loss"
    call = target, p_k, p_k_of, reduction, ignore_index, weight, cross_entropy
    kept, grad_cross_entropy = _kept(scores, cross_entropy, Kept(m, rest) if wants_gradient else None)
    if wants_gradient:
        result = losses.forward(prepared, readable(scores), call, kept, None if cross_entropy is None else grad_cross_entropy)
    else:
        result = losses.forward(prepared, readable(scores), call)
    if isinstance(result, int):
        raise ValueError(_WRONG[abi.Status(result)])
    return result, kept, grad_cross_entropy


def _kept(scores: Tensor, cross_entropy: Tensor | None, keeps: Kept | None) -> tuple[Tensor, Tensor]:
    kept = scores.new_empty(0 if keeps is None else keeps.bytes(len(scores)) // 4, dtype=torch.float32)
    return kept, kept.new_empty(0 if keeps is None or cross_entropy is None else len(scores))


@_loss.register_fake
def _(
    scores: Tensor, target: Tensor, p_k: Tensor | None, weight: Tensor | None, cross_entropy: Tensor | None, words: str,
    numbers: list[float], k: int, m: int, rest: int, powers: int, rate: float, p_k_of: str, reduction: str, ignore_index: int,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    result = scores.new_empty(len(scores) if reduction == "none" else (), dtype=torch.float32)
    return result, *_kept(scores, cross_entropy, Kept(m, rest) if wants_gradient else None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    scores, target, _, _, cross_entropy = inputs[:5]
    ctx.keeps, ctx.has_cross_entropy = inputs[8:12], cross_entropy is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(scores, *output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    scores, kept, grad_cross_entropy = ctx.saved_tensors
    grad_scores = torch.ops.anyk.loss_backward(scores, kept, grad, *ctx.keeps)
    return grad_scores, None, None, None, grad_cross_entropy * grad if ctx.has_cross_entropy else None, *[None] * 11


_loss.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op(
    "anyk::loss_backward", mutates_args=(), schema=f"(Tensor scores, Tensor kept, Tensor grad, {_KEPT}) -> Tensor"
)
def _loss_backward(scores: Tensor, kept: Tensor, grad: Tensor, m: int, rest: int, powers: int, rate: float) -> Tensor:
    return losses.backward(readable(scores), kept, grad, Kept(m, rest, powers, rate))


@_loss_backward.register_fake
def _(scores: Tensor, kept: Tensor, grad: Tensor, m: int, rest: int, powers: int, rate: float) -> Tensor:
    return scores.new_empty(scores.shape)


_loss_backward.register_autograd(_no_second_derivative)
