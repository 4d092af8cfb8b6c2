"""Whatever of torch is not public, in one place: each has a reason, and `tests/test_compat.py` names them all."""

from __future__ import annotations

from collections.abc import Callable
from types import new_class
from typing import Any, TypeVar

import torch
from torch import Tensor

Traced = TypeVar("Traced", bound=Callable[..., object])


def is_eager(tensor: Tensor) -> bool:
    """A plain tensor in eager mode: not traced, not inside a functional transform, not in forward-mode differentiation.

    There is no public way to ask for the last two. torch.func has levels while a transform is on, whichever tensors it is of;
    ``torch.autograd.grad(is_grads_batched=True)`` wraps its tensors; ``torch.autograd.forward_ad`` counts its own levels.
    """
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)
    )


def constant_when_traced(function: Traced) -> Traced:
    """``torch.compiler.assume_constant_result`` without its import of all of torch._dynamo, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def is_transformed() -> bool:
    """Whether a functional transform or forward-mode differentiation is on, in eager mode or in the code that Dynamo traces."""
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0


def is_recorded() -> bool:
    """Whether ``torch.jit.trace``, ``make_fx`` or another dispatch mode watches which operations run."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    return tracing or torch._C._len_torch_dispatch_stack() > 0


class Function(torch.autograd.Function):
    """A ``torch.autograd.Function`` for ``vmap``, ``torch.func``, forward mode, second derivatives and ``torch.compile``.

    A subclass has ``forward`` without ``ctx``, ``setup_context``, ``backward`` in differentiable operations of what was saved
    (inputs and outputs alike: that is what makes it differentiable twice) and, for forward mode, ``tangent``, which is ``jvp``
    by another name, as Dynamo refuses functions that have one. It is called by :meth:`run`.
    """

    generate_vmap_rule = True
    _eager: type[torch.autograd.Function]
    _transformed: type[torch.autograd.Function]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "jvp" in cls.__dict__:  # the second class below
            return

        def forward(ctx: Any, *arguments: Any) -> Any:
            result = cls.forward(*arguments)
            cls.setup_context(ctx, arguments, result)
            return result

        # without the wrapping of functional transforms, which takes as long as a small mask
        members = {"forward": staticmethod(forward), "backward": staticmethod(cls.backward)}
        cls._eager = new_class(cls.__name__, (torch.autograd.Function,), exec_body=lambda space: space.update(members))
        cls._transformed = cls
        if hasattr(cls, "tangent"):
            jvp = staticmethod(cls.tangent)
            cls._transformed = new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(jvp=jvp))

    @classmethod
    def run(cls, scores: Tensor, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.apply(scores, *arguments)  # type: ignore[no-untyped-call]
        if is_eager(scores):
            return fast_apply(cls._eager)(scores, *arguments)
        return cls._transformed.apply(scores, *arguments)  # type: ignore[no-untyped-call]


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without what it does for functional transforms, for whoever knows that none is on
    (:func:`is_eager`): more than a microsecond, which in a small loss can be seen."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]
