"""The losses on CUDA devices, in a handful of launches: ``torch.topk``, then kernels for the softmax's sums, for loss and
gradient of the candidates, and in the backward pass for the gradient of all classes.

It was never timed, nor run on a GPU: there was none. Its kernels were run by triton's interpreter against the plain code, and
compiled for compute capability 8.0 and 9.0 (``benchmarks/triton.md``). Therefore the first use of each kind of loss on a GPU is
compared with the plain code; where they differ the plain code serves, with a warning.
"""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyk import autograd, checks
from anyk.conventions import Conventions
from anyk.kernels.abi import Family, Operator, PKOf, Wires
from anyk.kernels.loss_description import (
    MOST_IN_REGISTERS,
    NO_OPERATOR,
    NO_SOFTMAX,
    OVER_ALL,
    OVER_CANDIDATES,
    Description,
    Wiring,
)
from anyk.p_k import PK

MOST_CANDIDATES = 4096
"""in one row: a row is one block"""
MOST_SCRATCH = 2**27
"""bytes, of all rows that are computed at once"""
LEAST_ROWS = 64
"""that must fit into it"""
_BLOCK = 128
# Nothing depends on whether a product and a sum are rounded once or twice, but triton warns of its default, which will change.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def status() -> str:
    """Why no loss can be computed here; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted():
        return ""
    if torch.version.hip is not None:
        return "it was never tried on ROCm"
    return "" if torch.cuda.is_available() else "no CUDA device"


def interpreted() -> bool:
    """Whether triton's interpreter runs the kernels, on the CPU: ``TRITON_INTERPRET=1``, set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def loss(
    description: Description,
    scores: Tensor,
    target: Tensor,
    p_k: PK,
    conventions: Conventions,
    plain: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """The loss; None if it is not for these kernels.

    Args:
        description: what is measured.
        scores: (rows, n) in float32, bfloat16 or float16.
        target: (rows,) class indices, or ``ignore_index``.
        p_k: P_K.
        conventions: reduction, ignored rows and class weights.
        plain: the same loss as a function of the scores, by the plain code.
    """
    if scores.device.type != ("cpu" if interpreted() else "cuda") or status():
        return None
    if not checks.eager(scores) or scores.dtype not in _DTYPES or scores.ndim != 2 or not scores.numel():
        return None
    sizes = _sizes(description)
    if sizes is None:
        return None
    values = p_k.values.detach().to(device=scores.device, dtype=torch.float32).contiguous()
    weight = conventions.class_weights(description.n, scores)
    if weight is not None:
        weight = weight.detach().to(device=scores.device, dtype=torch.float32).contiguous()
    call = _Call(description, sizes, target.contiguous(), PK(values, p_k.of), conventions, weight, plain)
    if not _agrees(call, scores):
        return None
    if torch.is_grad_enabled() and scores.requires_grad:
        return _Loss.apply(scores, call)  # type: ignore[no-untyped-call]
    return call.forward(scores, gradient=False)[0]


class _Sizes(NamedTuple):
    """How a description is laid out."""

    operator: int
    softmax: int
    lanes: int
    rows: int
    """in one block"""
    wide: bool
    """sums in float64"""
    slots: int
    """rows of lanes to keep for the way back"""
    depth: int
    """layers of the network"""

    def width(self, gradient: bool) -> int:
        """The numbers that a row keeps in memory."""
        # A network arranges its wires there in any case.
        slots = self.slots if gradient else 2 * (self.operator == Operator.NETWORK)
        return (slots + (self.lanes > MOST_IN_REGISTERS)) * self.lanes

    def bytes(self, gradient: bool) -> int:
        return self.width(gradient) * (8 if self.wide else 4)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _sizes(description: Description) -> _Sizes | None:
    """None if a row is too large."""
    operator, family, m, k = description.operator, description.family, description.m, description.k
    softmax = NO_SOFTMAX
    if family in (Family.SEPARATE, Family.MIXED):
        softmax = OVER_ALL if description.all_classes else OVER_CANDIDATES
        operator = NO_OPERATOR if k == 1 else operator
    elif family == Family.ERROR and description.uses_softmax:
        softmax = OVER_ALL
    if m > MOST_CANDIDATES or (family == Family.ERROR and description.ce_weight == 1):
        return None
    lanes = max(_power_of_two(m), 2)
    slots, depth, wide = 0, 0, False
    if operator == Operator.NETWORK:
        assert description.wiring is not None
        depth = _depth(description.wiring)
        slots = 2 * max(depth, 1)
    elif operator == Operator.KSUBSET:
        # As log_polynomial_ratios, which says why.
        size = min(k, (m - 1) // 2)
        wide = math.lgamma(m) - math.lgamma(size + 1) - math.lgamma(m - size) > 60
        slots = min(k, m - 1)
    sizes = _Sizes(operator, softmax, lanes, max(1, min(16, _BLOCK // lanes)), wide, slots, depth)
    return None if sizes.bytes(True) * LEAST_ROWS > MOST_SCRATCH else sizes


@lru_cache(maxsize=128)
def _depth(wiring: Wiring) -> int:
    return int(wiring.comparators[:, 2].max()) + 1 if len(wiring.comparators) else 0


@lru_cache(maxsize=128)
def _tables(wiring: Wiring, lanes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each layer and wire twice the partner (itself if it has none), and 1 if it gets the smaller value; where rows start;
    the output of each rank; the rank of each wire (k if it is no output)."""
    with torch.inference_mode(False), torch.device("cpu"):  # not the default device
        k = len(wiring.outputs)
        upper, lower, layer = wiring.comparators.long().unbind(-1)
        table = (2 * torch.arange(lanes, dtype=torch.int32)).repeat(_depth(wiring), 1)
        table[layer, upper] = (2 * lower).int()
        table[layer, lower] = (2 * upper + 1).int()
        outputs = torch.zeros(lanes, dtype=torch.int32)
        outputs[:k] = wiring.outputs
        ranks = torch.full((lanes,), k, dtype=torch.int32)
        ranks[wiring.outputs.long()] = torch.arange(k, dtype=torch.int32)
        return table.to(device), wiring.rows.contiguous().to(device), outputs.to(device), ranks.to(device)


class _Saved(NamedTuple):
    """What the backward pass needs."""

    target: Tensor
    classes: Tensor | None
    sums: Tensor | None
    gradients: Tensor
    """(rows, m) of the candidates' scores, in float32"""
    coefficients: Tensor | None
    divisor: Tensor | None


@dataclass(frozen=True, eq=False)
class _Call:
    """A loss for one batch, as the kernels take it."""

    description: Description
    sizes: _Sizes
    target: Tensor
    p_k: PK
    conventions: Conventions
    class_weight: Tensor | None
    plain: Callable[[Tensor], Tensor]

    @property
    def smoothing(self) -> float:
        return self.description.ce_weight * self.description.smoothing

    def forward(self, scores: Tensor, gradient: bool) -> tuple[Tensor, _Saved | None]:
        """The loss and, if wanted, what its gradient needs."""
        from anyk.kernels import triton_kernels as kernels

        description, sizes, smoothed = self.description, self.sizes, self.smoothing > 0
        rows, n = scores.shape
        m, k = description.m, description.k
        scores = scores.detach()
        new = scores.new_empty
        sums = new(rows, 4, dtype=torch.float32) if sizes.softmax == OVER_ALL else None
        losses = new(2, rows, dtype=torch.float32)
        gradients = new(rows, m, dtype=torch.float32) if gradient else None
        coefficients = new(rows, dtype=torch.float32) if gradient and sums is not None else None
        classes, leaders = self._selected(scores)
        network = sizes.operator == Operator.NETWORK
        assert description.wiring is not None or not network
        tables = _tables(description.wiring, sizes.lanes, scores.device) if network else (None,) * 4
        width = sizes.width(gradient)
        blocks = -(-rows // sizes.rows)
        if width:
            blocks = min(blocks, max(1, MOST_SCRATCH // (sizes.bytes(gradient) * sizes.rows)))
        at_once = blocks * sizes.rows
        scratch = new(max(at_once * width, 1), dtype=torch.float64 if sizes.wide else torch.float32)
        with _on(scores.device):
            if sums is not None:
                block = min(_power_of_two(n), 4096)
                kernels.softmax_kernel[(rows,)](
                    *(scores, *scores.stride(), n, sums),
                    **{"SMOOTHED": smoothed, "BLOCK": block, "num_warps": 8 if block > 1024 else 4},
                    **COMPILE_OPTIONS,
                )
            for first in range(0, rows, at_once):
                kernels.candidates_kernel[(-(-min(at_once, rows - first) // sizes.rows),)](
                    *(scores, *scores.stride(), self.target, self.conventions.ignore_index, classes, leaders),
                    *(self.p_k.values, self.class_weight, sums, *tables, scratch, losses, gradients, coefficients),
                    *(first, rows, m, k, sizes.depth, width, 0 if leaders is None else leaders.shape[1]),
                    *(description.scale, description.ce_weight * (1 - description.smoothing), 1 - description.ce_weight),
                    *(description.q, self.smoothing),
                    **candidate_constants(description, self.p_k.of, self.class_weight is not None, gradient),
                    **COMPILE_OPTIONS,
                )
        reduction = self.conventions.reduction
        divisor = None
        if reduction == "mean":
            total, divisor = losses.sum(1).unbind()
            result = total / divisor  # nothing counted: NaN, as torch has it
        else:
            result = losses[0] if reduction == "none" else losses[0].sum()
        if gradients is None:
            return result, None
        return result, _Saved(self.target, classes, sums, gradients, coefficients, divisor)

    def _selected(self, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The best classes, in order; and for a network that does not want them in order, the best beside."""
        n, m = self.description.n, self.description.m
        if _as_given(self.description):
            return None, scores.topk(min(self.description.k + 1, n), dim=-1).indices
        if m == n:
            return scores.sort(dim=-1, descending=True, stable=True).indices, None
        return scores.topk(m, dim=-1).indices.contiguous(), None

    def backward(self, scores: Tensor, saved: _Saved, incoming: Tensor) -> Tensor:
        """The gradient of the scores."""
        from anyk.kernels import triton_kernels as kernels

        rows, n = scores.shape
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        block = min(_power_of_two(n), 1024)
        with _on(scores.device):
            kernels.gradient_kernel[(rows,)](
                *(scores, *scores.stride(), n, saved.target, self.conventions.ignore_index, saved.sums, saved.classes),
                *(saved.gradients, saved.coefficients, self.description.m, incoming),
                *(incoming.stride(0) if incoming.ndim else 0, saved.divisor, self.smoothing, result),
                USES_SOFTMAX=saved.sums is not None,
                SMOOTHED=self.smoothing > 0,
                AS_GIVEN=saved.classes is None,
                MEAN=saved.divisor is not None,
                BLOCK=block,
                **COMPILE_OPTIONS,
            )
        return result


def _as_given(description: Description) -> bool:
    """Whether all classes are candidates, in the order that they come in."""
    return description.m == description.n and description.operator == Operator.NETWORK and description.wires == Wires.GIVEN


def candidate_constants(description: Description, of: str, weighted: bool, gradient: bool) -> dict[str, Any]:
    """What the kernel of the candidates is compiled for."""
    sizes = _sizes(description)
    assert sizes is not None
    return {
        "OPERATOR": int(sizes.operator),
        "SWAP": int(description.swap),
        "WIRES": int(description.wires),
        "FAMILY": int(description.family),
        "SOFTMAX": sizes.softmax,
        "OF": int(PKOf[f"OF_{of.upper()}"]),
        "LIMIT": description.q == 0,
        "AS_GIVEN": _as_given(description),
        "WEIGHTED": weighted,
        "SMOOTHED": description.ce_weight * description.smoothing > 0,
        "WIDE": sizes.wide,
        "GRADIENT": gradient,
        "ROWS": sizes.rows,
        "M": sizes.lanes,
        "num_warps": min(8, max(1, sizes.rows * sizes.lanes // 128)),
    }


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Loss(torch.autograd.Function):
    """The loss with the gradient of the candidates from the forward pass; the backward pass adds the softmax's and scales."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, call: _Call) -> Tensor:
        result, saved = call.forward(scores, gradient=True)
        assert saved is not None
        ctx.call = call
        ctx.save_for_backward(scores, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        call: _Call = ctx.call
        scores, *saved = ctx.saved_tensors
        plain = autograd.plain_gradients(call.plain, [scores], [gradient])
        if plain is not None:
            return plain[0], None
        return call.backward(scores, _Saved(*saved), gradient), None


_checked: dict[tuple[object, ...], bool] = {}


def _must_check(scores: Tensor) -> bool:
    return scores.is_cuda


def _agrees(call: _Call, scores: Tensor) -> bool:
    """Whether the kernels may serve: at the first use of a kind of loss on a GPU, whether they agree with the plain code."""
    if not _must_check(scores):
        return True
    description, conventions = call.description, call.conventions
    gradient = torch.is_grad_enabled() and scores.requires_grad
    # Numbers that may move over a run (ce_weight, temperature) are none of the kind.
    key = (
        *description._replace(ce_weight=0, q=float(description.q == 0), smoothing=0, scale=0, wiring=None),
        *(None if description.wiring is None else id(description.wiring.comparators), call.smoothing > 0),
        *(call.p_k.of, call.class_weight is None, conventions.reduction, scores.dtype, scores.device, gradient),
    )
    if key not in _checked:
        if scores.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be compared in there
        try:
            difference = _difference(call, scores, gradient)
        except Exception as error:  # whatever a compiler or a driver raises: the plain code needs neither
            difference = f"{type(error).__name__}: {error}"
        if difference is None:
            return False
        _checked[key] = not difference
        if difference:
            warnings.warn(
                f"anyk: the triton kernel of this loss cannot be used on this device; plain PyTorch is used ({difference})",
                RuntimeWarning,
                stacklevel=2,
            )
    return _checked[key]


def _difference(call: _Call, scores: Tensor, gradient: bool) -> str | None:
    """How kernel and plain code differ on these scores; empty if they do not, None if that cannot be told from them."""
    given = scores.detach()
    with torch.enable_grad():
        attached = given.clone().requires_grad_()
        expected = call.plain(attached)
        expected_gradient = torch.autograd.grad(expected.sum(), attached)[0] if gradient else None
    if not bool(expected.isfinite().all()):
        return None
    result, saved = call.forward(given, gradient)
    differences = [_apart("loss", result, expected.detach(), 1e-4)]
    if expected_gradient is not None:
        assert saved is not None
        one = result.new_ones(()).expand_as(result)
        precision = max(1e-4, 2 * torch.finfo(scores.dtype).eps)
        differences.append(_apart("gradient", call.backward(given, saved, one), expected_gradient, precision))
    return ", ".join(filter(None, differences))


def _apart(name: str, result: Tensor, expected: Tensor, tolerance: float) -> str:
    distance = (result.double() - expected.double()).abs().max().item()
    size = expected.double().abs().max().item()
    return "" if distance <= tolerance * size + 1e-6 else f"the {name} is {distance:.2g} off, of {size:.2g}"
