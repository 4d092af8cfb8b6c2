"""Whether two ways to compute a loss give the same numbers, with the plain code in float64 as the judge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import anyk
from anyk.kernels import native

RELATIVE, ABSOLUTE = 2e-6, 1e-7
GOOD = 1e-6
"""what the plain float32 code is within, of float64, where a kernel is held to it"""


class Answer(NamedTuple):
    loss: Tensor
    gradient: Tensor


def answer(loss: Callable[[Tensor], Tensor], scores: Tensor, incoming: Callable[[Tensor], Tensor] | None = None) -> Answer:
    """The loss and its gradient by the scores, with gradient weights that are not all one."""
    leaf = scores.detach().clone().requires_grad_()
    result = loss(leaf)
    weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape) if incoming is None else incoming(result.detach())
    (gradient,) = torch.autograd.grad(result, leaf, weights.to(result.dtype))
    return Answer(result.detach(), gradient)


@contextmanager
def kernel_only():
    """Fails if the kernel leaves a call to the plain code."""
    calls = []

    def spied(*arguments):
        result = computed(*arguments)
        calls.append(result is not None)
        return result

    computed = native.loss
    with anyk.backend("native"), mock.patch.object(native, "loss", spied):
        yield
    assert calls, "the kernel was not asked"
    assert all(calls), "the kernel left it to the plain code"


def by_kernel(loss: Callable[[Tensor], Tensor], scores: Tensor, incoming: Callable[[Tensor], Tensor] | None = None) -> Answer:
    with kernel_only():
        return answer(loss, scores, incoming)


def plain(loss: Callable[[Tensor], Tensor], scores: Tensor, incoming: Callable[[Tensor], Tensor] | None = None) -> Answer:
    with anyk.backend("torch"):
        return answer(loss, scores, incoming)


def assert_same(
    loss: Callable[[Tensor], Tensor],
    scores: Tensor,
    groups: Tensor | None = None,
    incoming: Callable[[Tensor], Tensor] | None = None,
) -> Answer:
    """The kernel's loss and gradient are the plain ones.

    Args:
        loss: of scores of any dtype.
        scores: of the kernel's dtype; float64 gets the same values.
        groups: of the shape of the gradient: which classes of a row may exchange their gradients, because their scores are
            equal (see :func:`ties`). None: none.
        incoming: the gradient that comes in, from the loss.
    """
    ours = by_kernel(loss, scores, incoming)
    theirs = plain(loss, scores, incoming)
    exact = plain(loss, scores.double(), incoming)
    assert ours.loss.dtype == theirs.loss.dtype
    assert ours.loss.shape == theirs.loss.shape
    assert ours.gradient.dtype == scores.dtype
    assert_close("loss", ours.loss, theirs.loss, exact.loss, torch.float32)
    gradients = [a.gradient for a in (ours, theirs, exact)]
    if groups is not None:
        gradients = [arranged(gradient, groups) for gradient in gradients]
    assert_close("gradient", *gradients, scores.dtype)
    return ours


def assert_close(what: str, ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Where the plain code is good, as near to it as was promised; elsewhere no further off than it is."""
    ours, theirs, exact = ours.double(), theirs.double(), exact.double()
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    least = ABSOLUTE if dtype == torch.float32 else max(ABSOLUTE, torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
    off = (theirs - exact).abs().nan_to_num(nan=torch.inf)  # the plain float32 code may have overflown
    good = (off <= (GOOD + rounding) * exact.abs()) | (off <= least / 2)
    near = (ours - theirs).abs() <= ((RELATIVE + 2 * rounding) * theirs.abs()).clamp(min=least)
    better = (ours - exact).abs() <= off + ((RELATIVE + rounding) * exact.abs()).clamp(min=least)
    right = torch.where(good, near, better) | (ours == theirs) | (ours.isnan() & theirs.isnan())
    right &= exact.isnan() <= ours.isnan()
    if not right.all():
        where = (~right).nonzero()[0].tolist()
        place = tuple(where)
        raise AssertionError(
            f"{what} at {where} of {tuple(ours.shape)}: {ours[place]:.9g} by the kernel, {theirs[place]:.9g} by the plain "
            f"code, {exact[place]:.9g} in float64; {int((~right).sum())} such"
        )


def ties(scores: Tensor, target: Tensor) -> Tensor:
    """(rows, n): the same number for the classes of a row, beside the target, that have the same score."""
    groups = torch.stack([row.unique(return_inverse=True)[1] for row in scores.float()]) if len(scores) else scores.long()
    counted = (target >= 0) & (target < scores.shape[1])
    return groups.scatter(-1, target.clamp(0, scores.shape[1] - 1)[:, None], -counted.long()[:, None] - 1)


def arranged(gradient: Tensor, groups: Tensor) -> Tensor:
    """By groups, ascending in each."""
    order = gradient.double().argsort(-1)
    order = order.gather(-1, groups.gather(-1, order).argsort(dim=-1, stable=True))
    return gradient.gather(-1, order)
