"""SinkhornSort: an entropic transport plan from the ranks to the classes; and its mask, a plan for two anchors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from anyk import checks
from anyk._compat import Function
from anyk.operators import threshold
from anyk.operators.base import Mask, Ranks, no_autocast
from anyk.operators.ordering import descending, is_padding, places, unsorted
from anyk.operators.rowsoftmax import LogMatrix
from anyk.operators.threshold import FAR, LAWS, Law, for_each, over


class SinkhornSort(LogMatrix, Mask, Ranks, name="sinkhorn"):
    """Entropic optimal transport between n rank anchors -1, …, -n and the scores.

    P minimises ``sum_rc P[r, c] (s_c - a_r)^2 + t sum_rc P[r, c] log P[r, c]`` with all rows and columns summing to 1; it
    is n times the plan of the transport problem with equal masses 1/n. A shift of the scores changes nothing.

    Damped Newton steps on the dual find it (on the CPU in double precision), from a start that is exact both for small and
    for large temperatures. Rows of the batch that have met the tolerance are frozen; where one has not met it, a warning is
    given (in eager mode on the CPU), and ``sum_r P[r, c] = 1`` all the same. The gradient is that of the exact solution.

    The mask is another operator, with two anchors, "in" of mass k and "out" of mass n - k: ``m_c = sigmoid((s_c - b) / t)``, b
    such that it sums to k, also for a real k. It is not T_k.

    Cost: O(n^3) for each of a few Newton steps; O(n log n) for the mask.

    Args:
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element
            or, for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``);
            an ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.
        tolerance: the largest error of a row sum of P that is accepted; in float32 at least 1e-6.
        max_iterations: the largest number of Newton steps; one or two are usual.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.SinkhornSort()(scores, k=3)
        tensor([[0.0138, 0.7530, 0.2332],
                [0.2332, 0.2332, 0.5336],
                [0.7530, 0.0138, 0.2332]])

    Reference: Cuturi et al., "Differentiable Ranking and Sorting using Optimal Transport", NeurIPS 2019.
    """

    real_k = True

    def __init__(self, temperature: float | Tensor = 1.0, *, tolerance: float = 1e-9, max_iterations: int = 15) -> None:
        super().__init__(temperature)
        self.tolerance = checks.number("tolerance", tolerance, "a number between 0 and 1")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance: expected a number between 0 and 1, got {tolerance}")
        self.max_iterations = checks.at_least_one("max_iterations", max_iterations)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tolerance={self.tolerance}, max_iterations={self.max_iterations}"

    def compute_mask(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch n"]:
        return threshold.mask(scores, k, checks.temperature_for(self.temperature, scores), "sinkhorn")

    def compute_ranks(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        ordered, order = descending(self.precise(scores))
        place = places(ordered)
        ranks = (place[:, None] * self.log_matrix(ordered, scores.shape[-1]).exp()).sum(-2)
        return unsorted(torch.where(is_padding(ordered), place, ranks), order).to(checks.working_dtype(scores))

    def log_matrix(self, ordered: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        temperature = checks.temperature_for(self.temperature, ordered)
        return transport(ordered, temperature, self.tolerance, self.max_iterations).log_softmax(-2)[..., :k, :]

    def precise(self, scores: Tensor) -> Tensor:
        return scores.double() if scores.device.type == "cpu" else super().precise(scores)


# ---- the plan ------------------------------------------------------------------------------------------------------------


def transport(
    ordered: Float[Tensor, "*batch n"], temperature: float | Tensor, tolerance: float, max_iterations: int
) -> Float[Tensor, "*batch n n"]:
    """Logits (..., ranks, classes) whose softmax over the ranks is P, for finite scores in descending order.

    They are ``2 a_r s_c / t`` and a potential for each rank. The start puts the border between two ranks midway between the
    scores that hold them when t -> 0: from rank i to the next, the logit of class c rises by ``(s_i + s_(i+1) - 2 s_c) / t``.
    Summed from rank c outwards, all terms have one sign: no digit is lost.
    """
    gaps = over((ordered[..., :, None] - ordered[..., None, :]).clamp(-FAR, FAR), for_each(temperature))
    rises = gaps[..., :-1, :] + gaps[..., 1:, :]
    before = rises.triu(1).flip(-2).cumsum(-2).flip(-2)
    start = pad(rises.tril().cumsum(-2), (0, 0, 1, 0)) - pad(before, (0, 0, 0, 1))
    tolerance = max(tolerance, 16 * torch.finfo(start.dtype).eps)
    potentials, error = _Potentials.run(start, tolerance, max_iterations)
    if checks.readable(error) and bool((error > tolerance).any()):
        steps = f"max_iterations = {max_iterations} steps"
        warnings.warn(f"SinkhornSort: a row did not converge in {steps}: increase it or the temperature", stacklevel=2)
    return start + potentials[..., None]


class _Potentials(Function):
    """What to add to the logits of each rank, so that the rows of P sum to 1; and the largest error of a row."""

    @staticmethod
    def forward(start: Tensor, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor]:
        """Each row of the batch goes on by its own error alone, so that it does not matter what else is in it."""
        potentials = torch.zeros_like(start[..., 0])
        for _ in range(2):  # Sinkhorn's iterations take off the rough part
            potentials = potentials - _plan(start, potentials).sum(-1).log().clamp(-1, 1)
        for iteration in range(max_iterations + 1):
            matrix = _plan(start, potentials)
            missing = 1 - matrix.sum(-1)
            error = _largest(missing)
            is_open = error > tolerance
            if iteration == max_iterations or (checks.readable(error) and not bool(is_open.any())):
                break
            divided = _divided(matrix)
            step = divided(missing)
            # far from the solution a full step overshoots; this length is safe for log-sum-exp functions and tends to 1
            reach = (step.amax(-1, keepdim=True) - step.amin(-1, keepdim=True)).clamp(min=1e-12)
            moved = step * (torch.log1p(reach) / reach)
            missing = _missing(matrix, moved)
            for _ in range(6):  # further steps with the same Laplacian: making and factoring it is most of the work
                there = moved + divided(missing)
                missing_there = _missing(matrix, there)
                nearer = _largest(missing_there) < _largest(missing)
                moved, missing = torch.where(nearer, there, moved), torch.where(nearer, missing_there, missing)
            potentials = torch.where(is_open & moved.isfinite(), potentials + moved, potentials)
        return potentials, error

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[0])
        ctx.save_for_forward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        matrix = _plan(*ctx.saved_tensors)
        return -_by_logits(matrix, _divided(matrix)(grad)[..., None]), None, None

    @staticmethod
    def tangent(ctx: Any, start: Tensor, *_: None) -> tuple[Tensor, None]:
        matrix = _plan(*ctx.saved_tensors)
        return -_divided(matrix)(_by_logits(matrix, start).sum(-1)), None


def _plan(start: Tensor, potentials: Tensor) -> Tensor:
    """Columns are normalised exactly, rows as far as the potentials do it."""
    return (start + potentials[..., None]).softmax(-2)


def _by_logits(matrix: Tensor, logits: Tensor) -> Tensor:
    """The derivative of the plan by its logits, a symmetric map."""
    return matrix * (logits - (matrix * logits).sum(-2, keepdim=True))


def _missing(matrix: Tensor, moved: Tensor) -> Tensor:
    """What the ranks lack when their potentials have moved since the plan was made: two products, no new plan."""
    factors = moved.exp()[..., None, :]
    with no_autocast(matrix.device):
        return (1 - factors * ((1 / (factors @ matrix)) @ matrix.mT)).squeeze(-2)


def _largest(missing: Tensor) -> Tensor:
    return missing.abs().amax(-1, keepdim=True)


def _divided(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Division by the derivative of the row sums by the potentials: the graph Laplacian diag(row sums) - P P'.

    Its null vector, a common shift of all potentials, is fixed by adding ones. The diagonal is made from the off-diagonal
    entries, so that nearly separate groups of ranks keep their weak links exactly; it gets as much more as rounding may take
    off, so that the matrix stays positive definite where there are no links at all.
    """
    with no_autocast(matrix.device):
        links = matrix @ matrix.mT
    links = links - links.diagonal(dim1=-2, dim2=-1).diag_embed()
    degrees = links.sum(-1)
    rounding = 64 * torch.finfo(links.dtype).eps * degrees.detach().amax(-1, keepdim=True).clamp(min=1)
    laplacian = (degrees + rounding).diag_embed() + 1 / links.shape[-1] - links
    factor, failed = torch.linalg.cholesky_ex(laplacian, upper=True)
    # a matrix that rounding has made indefinite would give finite nonsense
    nothing = torch.zeros_like(degrees).masked_fill(failed[..., None] > 0, torch.nan)
    return lambda right: torch.cholesky_solve(right[..., None], factor, upper=True).squeeze(-1) + nothing


# ---- the mask ------------------------------------------------------------------------------------------------------------


def _refined(x: Tensor, b: Tensor, k: int | Tensor) -> Tensor:
    """From Laplace's threshold to the logistic one, which is log 2 away at most: six of Newton's steps make 1e-24 of that.

    The sums are of differences to a mask of zeros and ones, so that what is small has its digits.
    """
    for _ in range(6):
        distance = x - b
        above = distance > 0
        less = (-distance.abs()).sigmoid()
        excess = above.sum(-1, keepdim=True) - k + torch.where(above, -less, less).sum(-1, keepdim=True)
        slope = (less * (1 - less)).sum(-1, keepdim=True)
        b = b + (excess / slope.clamp(min=torch.finfo(x.dtype).tiny)).clamp(-1.0, 1.0)
    return b


LAWS["sinkhorn"] = Law(torch.sigmoid, lambda x: logsigmoid(x) + logsigmoid(-x), 1.0, refine=_refined)
