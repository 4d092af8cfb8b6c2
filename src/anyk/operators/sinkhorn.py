"""SinkhornSort: an entropic transport plan from the ranks to the classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyk import candidates, checks
from anyk.operators.base import Operator, by_class, in_order, log_cumulative


class SinkhornSort(Operator):
    r"""Entropic optimal transport between n rank anchors -1, …, -n and the scores.

    P minimises ``sum_rc P[r, c] (s_c - a_r)^2 + t sum_rc P[r, c] log P[r, c]`` with all rows and columns summing to 1; it
    is n times the plan of the transport problem with equal masses 1/n. A shift of the scores changes nothing.

    The plan is found by damped Newton steps on the dual, in double precision, from a start that is exact both for small
    and for large temperatures. Rows of the batch that have met the tolerance are frozen. Rows that have not after
    ``max_iterations`` steps are counted in ``unconverged``, and like all others they satisfy ``sum_r P[r, c] = 1``. The
    gradient follows from the implicit function theorem.

    Cost: O(n^3) for each of a few Newton steps, with ``anchors="topk"`` O(k^2 n).

    Args:
        temperature: t, a positive number, a one-element tensor, or ``"auto"`` (see :class:`Operator`).
        anchors: ``"all"`` n ranks; ``"topk"`` merges the ranks past k into one anchor of mass (n-k)/n at their mean. That
            is cheaper and a different operator: T_j then depends on k.
        tolerance: largest error of a row sum of P.
        max_iterations: number of Newton steps.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.SinkhornSort()(scores, k=3)
        tensor([[0.0138, 0.7530, 0.2332],
                [0.2332, 0.2332, 0.5336],
                [0.7530, 0.0138, 0.2332]])

    Reference: Cuturi et al., "Differentiable Ranking and Sorting using Optimal Transport", NeurIPS 2019.
    """

    dtype = torch.float64
    unconverged: Tensor

    def __init__(
        self,
        temperature: float | Tensor | str = 1.0,
        *,
        anchors: str = "all",
        tolerance: float = 1e-9,
        max_iterations: int = 30,
    ) -> None:
        checks.one_of("anchors", anchors, ("all", "topk"))
        tolerance = checks.number("tolerance", tolerance, "a number between 0 and 1")
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance: expected a number between 0 and 1, got {tolerance}")
        super().__init__(temperature)
        self.anchors = anchors
        self.tolerance = tolerance
        self.max_iterations = checks.at_least_one("max_iterations", max_iterations)
        #: how many rows of the last eager call had not met the tolerance (a tensor: reading it may wait for the device)
        self.register_buffer("unconverged", torch.zeros((), dtype=torch.long), persistent=False)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, anchors={self.anchors!r}, "
            f"tolerance={self.tolerance}, max_iterations={self.max_iterations}"
        )

    def _matrix(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        ordered, ordered_real, classes = in_order(scores, real)
        start = torch.zeros_like(classes[..., 0])
        logits = self._log_kernel(ordered, start, ordered_real, k)
        return by_class(logits.softmax(-2)[..., :k, :], classes)

    def _log_inclusion(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        logits = self._log_kernel(scores, position, real, k)
        place = position[..., None, None].expand(*logits.shape[:-1], 1)
        return log_cumulative(logits.gather(-1, place).squeeze(-1).log_softmax(-1)[..., :k])

    def _log_kernel(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        """Logits whose softmax over the ranks (dim -2) is the plan; the scores are in descending order."""
        n = scores.shape[-1]
        number = torch.full_like(position, n) if real is None else real.sum(-1)
        anchors, masses, used = self._ranks(number[..., None], n, k)
        rows = anchors.shape[-1]
        # Everything is measured from the target's place outwards, so that far outliers do not cost the digits near it.
        home = position.clamp(max=rows - 1)
        anchors = anchors - candidates.at(anchors, home)[..., None]
        kernel = 2 * anchors[..., :, None] * scores[..., None, :]
        present = torch.ones_like(scores)
        if real is not None:
            # Ranks that a shorter row does not have take no mass; padding gives none.
            kernel = kernel.masked_fill(~used[..., :, None], -torch.inf)
            present = real.to(scores.dtype)
        start = _start(scores, anchors, home, used)
        with torch.no_grad():
            solved, missed = self._solve(kernel.detach(), _Sides(masses, used, present), start.detach())
            if checks.eager(missed):
                self.unconverged = missed
        attach = _Potentials.apply if checks.eager(kernel) else _attached_potentials
        potentials = attach(kernel, start, solved, _Sides(masses, used, present))
        return potentials[..., :, None] + kernel

    def _ranks(self, number: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Anchors, masses, and which ranks are used, each (..., rows), for rows of ``number`` (..., 1) classes."""
        if self.anchors == "all" or k == n:
            rank = torch.arange(1, n + 1, device=number.device)
            used = rank <= number
            return -rank.double().expand(used.shape), torch.ones_like(used, dtype=torch.double), used
        rank = torch.arange(1, k + 1, device=number.device).double().expand(*number.shape[:-1], k)
        rest = (number - k).double()
        anchors = -torch.cat([rank, (k + 1 + number.double()) / 2], -1)
        masses = torch.cat([torch.ones_like(rank), rest], -1)
        return anchors, masses, masses > 0

    def _solve(self, kernel: Tensor, sides: _Sides, potentials: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.max_iterations):
            plan = _plan(kernel, sides, potentials)
            missing = _missing(plan, sides)
            open_rows = missing.abs().amax(-1) > self.tolerance
            if checks.readable(open_rows) and not bool(open_rows.any()):
                return potentials, open_rows.sum()
            step = _solve_laplacian(plan, sides, missing)
            # Far from the solution a full step overshoots; this length is safe for log-sum-exp functions and tends to 1.
            reach = (step.amax(-1, keepdim=True) - step.amin(-1, keepdim=True)).clamp(min=1e-12)
            step = step * (torch.log1p(reach) / reach)
            potentials = torch.where(open_rows[..., None], potentials + step, potentials)
        missing = _missing(_plan(kernel, sides, potentials), sides)
        return potentials, (missing.abs().amax(-1) > self.tolerance).sum()


def _start(scores: Tensor, anchors: Tensor, home: Tensor, used: Tensor) -> Tensor:
    """Potentials that put the border between two ranks midway between the scores that hold them when t -> 0."""
    rows, n = anchors.shape[-1], scores.shape[-1]
    border = torch.arange(rows - 1, device=scores.device)
    below = (border + 1).clamp(max=n - 1)
    midway = (scores[..., border] + scores[..., below]) / 2
    rise = 2 * (anchors[..., :-1] - anchors[..., 1:]) * midway
    rise = rise.masked_fill(~used[..., 1:], 0)
    after = border >= home[..., None]
    up = rise.masked_fill(~after, 0).cumsum(-1)
    down = rise.masked_fill(after, 0).flip(-1).cumsum(-1).flip(-1)
    pad = torch.nn.functional.pad
    return pad(up, (1, 0)) - pad(down, (0, 1))


class _Sides(NamedTuple):
    """The two sides of the transport: what each rank takes, which ranks there are, which classes there are."""

    masses: Tensor
    used: Tensor
    present: Tensor


def _plan(kernel: Tensor, sides: _Sides, potentials: Tensor) -> Tensor:
    """P (..., ranks, classes): columns are normalised exactly, rows as far as the potentials do it."""
    return (potentials[..., :, None] + kernel).softmax(-2) * sides.present[..., None, :]


def _missing(plan: Tensor, sides: _Sides) -> Tensor:
    return (sides.masses - plan.sum(-1)).masked_fill(~sides.used, 0)


def _solve_laplacian(plan: Tensor, sides: _Sides, right: Tensor) -> Tensor:
    """Solves D x = right, D the derivative of the row sums by the potentials: the graph Laplacian diag(row sums) - P P'.

    Its null vector, a common shift of all potentials, is fixed by adding ones. The diagonal is made from the off-diagonal
    entries, so that nearly separate groups of ranks keep their weak links exactly.
    """
    links = torch.einsum("...rc,...qc->...rq", plan, plan)
    links = links - torch.diag_embed(links.diagonal(dim1=-2, dim2=-1))
    laplacian = torch.diag_embed(links.sum(-1) + ~sides.used + 1e-14) - links + 1 / links.shape[-1]
    return torch.linalg.solve_ex(laplacian, right[..., None])[0].squeeze(-1)


def _attached_potentials(kernel: Tensor, start: Tensor, solved: Tensor, sides: _Sides) -> Tensor:
    """The solution as a function of kernel and start: its value, and exact first and second derivatives.

    Newton doubles the order of contact with the solution: one step carries the first derivative, two the second. Where the
    links between ranks underflow, Newton steps carry no derivative: the start's is the limit for t -> 0.
    """
    potentials = solved + (start - start.detach())
    for _ in range(2):
        plan = _plan(kernel, sides, potentials)
        potentials = potentials + _solve_laplacian(plan, sides, _missing(plan, sides))
    return solved + (potentials - potentials.detach())


class _Potentials(torch.autograd.Function):
    """:func:`_attached_potentials` with the first derivative by the implicit function theorem: one linear system."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, start: Tensor, solved: Tensor, sides: _Sides) -> Tensor:
        ctx.save_for_backward(kernel, start, solved, *sides)
        return solved.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        kernel, start, solved, *rest = ctx.saved_tensors
        sides = _Sides(*rest)
        if torch.is_grad_enabled() or not checks.eager(gradient):
            # A second derivative, or many gradients at once: differentiate the plain form.
            with torch.enable_grad():
                result = _attached_potentials(kernel, start, solved, sides)
                wanted = (kernel, start)
                of_kernel, of_start = torch.autograd.grad(result, wanted, gradient, create_graph=True)
            return of_kernel, of_start, None, None
        plan = _plan(kernel, sides, solved)
        weights = _solve_laplacian(plan, sides, gradient)
        # the transposed derivative of the row sums by the logits, applied to the weights
        pull = plan * (weights[..., :, None] - (plan * weights[..., :, None]).sum(-2, keepdim=True))
        return -pull, gradient - pull.sum(-1), None, None
