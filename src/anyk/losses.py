"""Steps 3 and 4: average the inclusion over P_K, take the logarithm, and treat the top-1 part as asked.

The data path is :func:`topk_cross_entropy`. Everything that a loss shares with ``torch.nn.CrossEntropyLoss``, whatever it
measures, is :func:`over_targets`; the baselines use it too.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from anyk import candidates, checks
from anyk.operators import Operator, SortingNetwork
from anyk.operators.base import real_mask

if TYPE_CHECKING:
    from typing import Self

__all__ = ["TopKCrossEntropyLoss", "topk_cross_entropy"]

TOP1_MODES = ("separate", "mixed", "operator")
REDUCTIONS = ("mean", "sum", "none")
Distribution = Tensor | Sequence[float] | Sequence[Sequence[float]]


def topk_cross_entropy(
    scores: Float[Tensor, "batch n ..."],
    target: Int[Tensor, "batch ..."] | Float[Tensor, "batch n ..."],
    p_k: Distribution,
    operator: Operator | None = None,
    *,
    m: int | None = None,
    top1: str = "separate",
    softmax_over: str = "all",
    reduction: str = "mean",
    ignore_index: int = -100,
    weight: Float[Tensor, " n"] | None = None,
    label_smoothing: float = 0.0,
    example_p_k: Float[Tensor, "batch k"] | None = None,
) -> Tensor:
    """Cross-entropy of "the target is among the first k classes", for k drawn from P_K.

    With T_j the probability that the target y is among the first j of the scores s, as the operator sees it, the loss of an
    example is, for the three values of ``top1``,

        separate    P_K(1) CE(s, y) - (1 - P_K(1)) log( sum_{j>=2} P_K(j) T_j / (1 - P_K(1)) )
        mixed       -log( P_K(1) softmax_y(s) + sum_{j>=2} P_K(j) T_j )
        operator    -log( sum_j P_K(j) T_j )

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), as for ``torch.nn.functional.cross_entropy``. -inf marks padding.
        target: class indices without the class dimension, or class probabilities of the shape of ``scores``. For
            probabilities q the loss is ``sum_c q_c L(s, c)``; q outside the candidates goes to softmax cross-entropy. Each
            row is then ranked once for each candidate (the same holds for label smoothing): set m.
        p_k: the weights of top-1, …, top-k, summing to 1: (k,), or (n, k) with one distribution for each class. Zeros at the
            end of a list are dropped, since k is the largest k that counts; a tensor is taken as it is.
        operator: the relaxation of sorting; None means ``SortingNetwork("splitter")``.
        m: rank only the m best scores of each row, the target always among them; None means all.
        top1: how the top-1 part is measured, see above.
        softmax_over: ``"all"`` classes or the ``"candidates"``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: class index of examples that do not count.
        weight: (n,) weight of each class.
        label_smoothing: mixes the target with the uniform distribution over the classes that are not padding.
        example_p_k: (B, k) or (B, d1, …, k), one distribution for each example, instead of ``p_k``.

    Returns:
        The loss, at least float32; of the shape of the class indices with ``reduction="none"``.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> anyk.topk_cross_entropy(scores, torch.tensor([1, 3]), [0.5, 0.5], anyk.LapSum())
        tensor(0.7022)

    Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022, equations 2 and 4.
    """
    example_losses, view = topk_measure(Shape.of(scores), scores, p_k, operator, m, top1, softmax_over, example_p_k)
    return over_targets(
        scores,
        target,
        example_losses,
        view,
        reduction=reduction,
        ignore_index=ignore_index,
        weight=weight,
        label_smoothing=label_smoothing,
        is_cross_entropy=view.is_cross_entropy,
    )


def candidate_loss(
    kept: candidates.Candidates,
    target: Int[Tensor, "*batch"],
    log_sum_exp: Float[Tensor, " rows"] | None,
    p_k: Distribution,
    operator: Operator,
    *,
    n: int,
    top1: str = "separate",
    softmax_over: str = "all",
    reduction: str = "mean",
    ignore_index: int = -100,
    weight: Float[Tensor, " n"] | None = None,
    example_p_k: Float[Tensor, "*batch k"] | None = None,
    smoothed: tuple[Float[Tensor, "rows m"], Float[Tensor, " rows"]] | None = None,
) -> Tensor:
    """:func:`topk_cross_entropy` for whoever has the candidates and the log-sum-exp, but not the scores of all n classes.

    Only differences count: taking the same number from a row's scores and from its log_sum_exp changes nothing, and taking
    the row's best score saves digits.

    Args:
        kept: what :func:`candidates.select` would give for the flattened batch, with any class as the target of ignored rows.
        target: class indices, checked by the caller.
        log_sum_exp: over all classes; None if neither the loss (``softmax_over="candidates"`` or ``top1="operator"``) nor
            ``smoothed`` needs it.
        n: number of classes.
        smoothed: for label smoothing, where every class c is a target with a share q_c: the q_c w_c of the candidates, and
            what the classes outside add to the loss, the sum of q_c w_c (log_sum_exp - s_c).
        p_k, operator, top1, softmax_over, reduction, ignore_index, weight, example_p_k: as there.

    Example:
        >>> scores, target = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]]), torch.tensor([1, 3])
        >>> kept = candidates.select(scores, target, m=3)
        >>> candidate_loss(kept, target, scores.logsumexp(-1), [0.5, 0.5], anyk.LapSum(), n=4)
        tensor(0.6569)
    """
    check_shared(reduction, ignore_index, weight, 0.0)
    scores, position = kept.scores, kept.position
    shape = Shape(n, target.shape, target.ndim > 0)
    example_losses, view = topk_measure(shape, scores, p_k, operator, scores.shape[-1], top1, softmax_over, example_p_k)
    weight = class_weights(weight, n, scores)
    valid, safe, weights = counted(target.reshape(-1), ignore_index, weight, working_dtype(scores))
    cross_entropies = None if log_sum_exp is None or top1 == "operator" else log_sum_exp[:, None] - scores
    if smoothed is None:
        cross_entropy = None if cross_entropies is None else candidates.at(cross_entropies, position)
        rows = Rows(scores, position, real_mask(scores), safe, cross_entropy)
        losses = candidate_losses(rows, valid, example_losses, view)
        losses = losses if weights is None else weights * losses
    else:
        share, outside = smoothed
        losses = shared_losses(scores, kept.classes, share, cross_entropies, valid, example_losses, view) + outside
        losses = losses if valid is None else torch.where(valid, losses, 0)
    return reduced(losses, weights, reduction, target.shape)


def topk_measure(
    shape: Shape,
    like: Tensor,
    p_k: Distribution,
    operator: Operator | None,
    m: int | None,
    top1: str,
    softmax_over: str,
    example_p_k: Tensor | None,
) -> tuple[Callable[[Rows], Tensor], View]:
    """The arguments of :func:`topk_cross_entropy`, checked, as a loss of rows and what it wants to see of them.

    ``shape`` is that of the scores of all classes; ``like`` has their dtype and device.
    """
    operator = _checked_operator(operator, top1, softmax_over)
    n = shape.classes
    if m is not None:
        m = checks.count("m", m, 1, n, "the number of classes")
    name = "p_k" if example_p_k is None else "example_p_k"
    p_k = distribution(p_k if example_p_k is None else example_p_k, name)
    k = p_k.shape[-1]
    if k > (m or n):
        limit = f"the number of classes = {n}" if m is None else f"m = {m}"
        raise ValueError(f"{name}: expected at most as many entries as {limit}, got {k}")
    if example_p_k is not None:
        p_k = shape.example_rows(p_k)
    elif p_k.ndim == 2 and len(p_k) != n:
        raise ValueError(f"p_k: expected shape (k,) or (n, k) with n = {n} classes, got {tuple(p_k.shape)}")
    p_k = p_k.to(device=like.device, dtype=working_dtype(like))
    softmax_over_all = top1 != "operator" and softmax_over == "all"

    def example_losses(rows: Rows) -> Tensor:
        p = p_k
        if p_k.ndim == 2:
            p = p_k[rows.target] if example_p_k is None else rows.for_each_target(p_k)
        cross_entropy = rows.cross_entropy
        if top1 != "operator" and not softmax_over_all:
            cross_entropy = rows.candidate_cross_entropy()
        if k == 1 and cross_entropy is not None:
            return cross_entropy
        log_inclusion = operator.candidate_log_inclusion(rows.scores, rows.position, rows.real, k)
        return _example_losses(log_inclusion, p, cross_entropy, top1)

    is_cross_entropy = k == 1 and softmax_over_all
    return example_losses, View(m, k, operator.sorts, cross_entropy=softmax_over_all, is_cross_entropy=is_cross_entropy)


def _checked_operator(operator: Operator | None, top1: str, softmax_over: str) -> Operator:
    operator = SortingNetwork("splitter") if operator is None else operator
    if not isinstance(operator, Operator):
        given = f"the class {operator.__name__}" if isinstance(operator, type) else repr(operator)
        raise TypeError(f"operator: expected an anyk.Operator such as anyk.LapSum(), got {given}")
    checks.one_of("top1", top1, TOP1_MODES)
    checks.one_of("softmax_over", softmax_over, ("all", "candidates"))
    return operator


def _example_losses(log_inclusion: Tensor, p: Tensor, cross_entropy: Tensor | None, top1: str) -> Tensor:
    """From log T (..., k), P_K (..., k) and softmax cross-entropy (...) to the loss (...)."""
    if cross_entropy is None:
        return -_log_mean(p, log_inclusion)
    if top1 == "mixed":
        return -_log_mean(p, torch.cat([-cross_entropy[..., None], log_inclusion[..., 1:]], -1))
    later = p[..., 1:].sum(-1, keepdim=True)
    # Where P_K(1) = 1 the second term is 0 times something: let it be something finite.
    p_later = torch.where(later > 0, p[..., 1:] / torch.where(later > 0, later, 1), 1 / (p.shape[-1] - 1))
    return p[..., 0] * cross_entropy - later.squeeze(-1) * _log_mean(p_later, log_inclusion[..., 1:])


def _log_mean(p: Tensor, log_inclusion: Tensor) -> Tensor:
    """log sum_j p_j T_j, at most 0: the T of operators that are only row-stochastic can pass 1."""
    # The slope of log(0), if anyone asks for it, is taken as 0.
    constant = checks.eager(p) and not p.requires_grad
    log_p = p.log() if constant else torch.where(p > 0, torch.where(p > 0, p, 1).log(), -torch.inf)
    return (log_p + log_inclusion).logsumexp(-1).clamp(max=0)


class TopKCrossEntropyLoss(nn.Module):
    """:func:`topk_cross_entropy` as a module: a drop-in for ``torch.nn.CrossEntropyLoss``.

    Args:
        p_k: weights of top-1, …, top-k, shape (k,) or (n, k).
        operator: the relaxation of sorting; None means ``SortingNetwork("splitter")``.
        m, top1, softmax_over, reduction, ignore_index, weight, label_smoothing: see :func:`topk_cross_entropy`.

    Shape:
        scores (B, n), (n,) or (B, n, d1, …); target class indices (B,), (), (B, d1, …), or probabilities like scores.

    Example:
        >>> criterion = anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5], m=16)
        >>> scores = torch.randn(8, 100, requires_grad=True)
        >>> criterion(scores, torch.randint(100, (8,))).backward()
    """

    p_k: Tensor
    weight: Tensor | None

    def __init__(
        self,
        p_k: Distribution,
        operator: Operator | None = None,
        *,
        m: int | None = None,
        top1: str = "separate",
        softmax_over: str = "all",
        reduction: str = "mean",
        ignore_index: int = -100,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_shared(reduction, ignore_index, weight, label_smoothing)
        # Where modules are made without memory, by a default device "meta", the weights are kept all the same.
        # (torch.get_default_device does not see "with torch.device(…)" before 2.8.)
        with torch.device("cpu") if torch.empty(0).is_meta else nullcontext():
            p_k = distribution(p_k)
        # Not float64: some devices do not have it.
        p_k = p_k if p_k.dtype != torch.float64 else p_k.to(torch.get_default_dtype())
        # A setting and no state: a checkpoint does not bring back an old P_K, and one of torch.nn.CrossEntropyLoss fits.
        self.register_buffer("p_k", p_k, persistent=False)
        self.register_buffer("weight", weight)
        self.operator = _checked_operator(operator, top1, softmax_over)
        k = self.p_k.shape[-1]
        if m is not None and checks.at_least_one("m", m) < k:
            raise ValueError(f"p_k: expected at most as many entries as m = {m}, got {k}")
        self.m = m
        self.top1 = top1
        self.softmax_over = softmax_over
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, scores: Tensor, target: Tensor, *, example_p_k: Tensor | None = None) -> Tensor:
        return topk_cross_entropy(scores, target, **self._arguments(), example_p_k=example_p_k)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert; P_K keeps its values also through ``to_empty``, after which no checkpoint brings them back."""
        before = self.p_k
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not (before.is_meta or self.p_k.is_meta):
            self.p_k = before.to(self.p_k)
        return self

    def _arguments(self) -> dict[str, Any]:
        """What the function takes besides scores and targets."""
        names = ("p_k", "operator", "m", "top1", "softmax_over", "reduction", "ignore_index", "weight", "label_smoothing")
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        p_k = self.p_k.tolist() if self.p_k.ndim == 1 and self.p_k.device.type != "meta" else tuple(self.p_k.shape)
        if isinstance(p_k, list):
            p_k = [float(f"{p:.6g}") for p in p_k]
        settings = f"p_k={p_k}, m={self.m}, top1={self.top1!r}, softmax_over={self.softmax_over!r}"
        return f"{settings}, {shared_repr(self)}"


# What a loss shares with torch.nn.CrossEntropyLoss -----------------------------------------------------------------------


def working_dtype(scores: Tensor) -> torch.dtype:
    """Half precision is computed in float32."""
    return torch.promote_types(scores.dtype, torch.float32)


class Shape(NamedTuple):
    """(B, n, d1, …) or (n,) as rows of classes, and back."""

    classes: int
    batch: torch.Size
    batched: bool

    @classmethod
    def of(cls, scores: Tensor) -> Shape:
        scores = checks.tensor("scores", scores)
        if not scores.dtype.is_floating_point:
            raise TypeError(f"scores: expected a floating-point tensor, got dtype {scores.dtype}")
        if scores.ndim == 0 or scores.shape[min(1, scores.ndim - 1)] < 1:
            raise ValueError(f"scores: expected shape (B, n), (n,) or (B, n, d1, …), got {tuple(scores.shape)}")
        if scores.ndim == 1:
            return cls(len(scores), torch.Size(), False)
        return cls(scores.shape[1], scores.shape[:1] + scores.shape[2:], True)

    def rows(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 2:
            return tensor  # a view, even a trivial one, makes autograd copy the gradient once more
        return (tensor.movedim(1, -1) if self.batched else tensor).reshape(-1, self.classes)

    def example_rows(self, p_k: Tensor) -> Tensor:
        """One distribution for each row, from one for each example or each position."""
        k = p_k.shape[-1]
        if p_k.shape[:-1] == self.batch:
            return p_k.reshape(-1, k)
        if self.batched and p_k.shape[:-1] == self.batch[:1]:
            positions = len(self.batch) - 1
            return p_k.reshape(-1, *[1] * positions, k).expand(*self.batch, k).reshape(-1, k)
        raise ValueError(f"example_p_k: expected shape {(*self.batch[:1], k)} to fit scores, got {tuple(p_k.shape)}")


class View(NamedTuple):
    """What a loss wants to see of a row."""

    m: int | None = None
    """number of candidates; None means all"""
    least: int = 1
    """number of classes that every row must have beside padding"""
    sort: bool = True
    """whether the candidates shall come in descending order even if all are kept"""
    cross_entropy: bool = False
    """whether it uses the softmax cross-entropy over all classes"""
    is_cross_entropy: bool = False
    """whether it is that cross-entropy and nothing else"""


class Rows(NamedTuple):
    """What an example's loss may depend on. The leading shape is (rows,), or (rows, m) with each candidate as target."""

    scores: Float[Tensor, "*rows m"]
    """the candidates' scores"""
    position: Int[Tensor, "*rows"]
    """where among them the target stands"""
    real: Bool[Tensor, "*rows m"] | None
    """which are not padding; None means all"""
    target: Int[Tensor, "*rows"]
    """the target class"""
    cross_entropy: Float[Tensor, "*rows"] | None
    """softmax cross-entropy over all classes, if asked for"""

    def candidate_cross_entropy(self) -> Float[Tensor, "*rows"]:
        log_softmax = self.scores.to(working_dtype(self.scores)).log_softmax(-1)
        return -candidates.at(log_softmax, self.position)

    def for_each_target(self, of_rows: Tensor) -> Tensor:
        """Broadcasts (rows, …) to the leading shape."""
        return of_rows if self.target.ndim == 1 else of_rows[:, None]


def over_targets(
    scores: Tensor,
    target: Tensor,
    example_losses: Callable[[Rows], Tensor],
    view: View,
    *,
    reduction: str,
    ignore_index: int,
    weight: Tensor | None,
    label_smoothing: float,
    is_cross_entropy: bool = False,
) -> Tensor:
    """Applies a loss of (scores of a row, target class) with the conventions of ``torch.nn.functional.cross_entropy``.

    Args:
        scores, target, reduction, ignore_index, weight, label_smoothing: as there.
        example_losses: the loss of each row.
        view: what it wants to see of a row.
        is_cross_entropy: the loss is known to be softmax cross-entropy: use torch's own.
    """
    check_shared(reduction, ignore_index, weight, label_smoothing)
    shape = Shape.of(scores)
    target = checks.tensor("target", target)
    weight = class_weights(weight, shape.classes, scores)
    if target.dtype.is_floating_point:
        _check_probabilities(target, scores, ignore_index)
    else:
        target = checks.class_indices(target, shape.batch, shape.classes, ignore_index)
    if is_cross_entropy:
        return functional.cross_entropy(
            scores.to(working_dtype(scores)),
            target.to(working_dtype(scores)) if target.dtype.is_floating_point else target,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    rows = shape.rows(scores)
    weights: Tensor | None
    if target.dtype.is_floating_point:
        probabilities = shape.rows(target).to(working_dtype(scores))
        if label_smoothing:
            probabilities = probabilities * (1 - label_smoothing) + label_smoothing * _uniform(rows)
        losses = _expected_losses(rows, probabilities, example_losses, view, weight, None)
        weights = None
    else:
        valid, safe, weights = counted(target.reshape(-1), ignore_index, weight, working_dtype(scores))
        if label_smoothing:
            one_hot = (safe[:, None] == torch.arange(shape.classes, device=safe.device)).to(working_dtype(scores))
            probabilities = one_hot * (1 - label_smoothing) + label_smoothing * _uniform(rows)
            losses = _expected_losses(rows, probabilities, example_losses, view, weight, valid)
        else:
            losses = _index_losses(rows, safe, valid, example_losses, view)
            losses = losses if weights is None else weights * losses
    return reduced(losses, weights, reduction, shape.batch)


def class_weights(weight: Tensor | None, n: int, scores: Tensor) -> Tensor | None:
    """The weights of the n classes, checked, in the dtype that the scores are computed in."""
    if weight is None:
        return None
    if weight.shape != (n,):
        raise ValueError(f"weight: expected shape ({n},), one for each class, got {tuple(weight.shape)}")
    return weight.to(dtype=working_dtype(scores))


def counted(
    target: Tensor, ignore_index: int, weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Which rows count (None: all), the targets with class 0 for those that do not, and what each counts (None: 1)."""
    counts = target != ignore_index
    if checks.readable(counts) and bool(counts.all()):
        return None, target, None if weight is None else weight[target]
    safe = torch.where(counts, target, 0)
    return counts, safe, counts.to(dtype) if weight is None else torch.where(counts, weight[safe], 0)


def _index_losses(
    rows: Tensor, target: Tensor, valid: Tensor | None, example_losses: Callable[[Rows], Tensor], view: View
) -> Tensor:
    if valid is not None:
        # Whatever an ignored row holds, NaN included, must not reach a gradient.
        rows = torch.where(valid[:, None], rows, 0)
    classes, position = candidates.choose(rows, target, view.m, sort=view.sort)
    if view.cross_entropy:
        gather = _ScoresAndCrossEntropy.apply if checks.eager(rows) else _scores_and_cross_entropy
        scores, cross_entropy = gather(rows, classes, target)
    else:
        whole = view.m is None and not view.sort  # all classes as they come
        scores, cross_entropy = rows if whole else rows.gather(-1, classes), None
    return candidate_losses(Rows(scores, position, real_mask(scores), target, cross_entropy), valid, example_losses, view)


def candidate_losses(
    rows: Rows, valid: Tensor | None, example_losses: Callable[[Rows], Tensor], view: View
) -> Float[Tensor, " rows"]:
    """The loss of each row from its candidates alone: checks, padding, and rows that do not count (``valid``; None: all do)."""
    real, position = rows.real, rows.position
    checks.real_classes(real, view.least, valid)
    if real is not None:
        padded = ~candidates.at(real, position)
        _check_targets_are_real(padded if valid is None else padded & valid)
        position = torch.where(padded, 0, position)
    # Written out: torch 2.8 and older cannot trace _replace.
    losses = example_losses(Rows(rows.scores, position, rows.real, rows.target, rows.cross_entropy))
    if real is not None:
        losses = torch.where(padded, torch.inf, losses)  # as cross-entropy has it
    return losses if valid is None else torch.where(valid, losses, 0)


def _check_targets_are_real(padded: Tensor) -> None:
    if checks.readable(padded) and bool(padded.any()):
        raise ValueError("target: expected classes that are not padding, got one whose score is -inf")


def _scores_and_cross_entropy(rows: Tensor, classes: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates' scores and the softmax cross-entropy over all classes."""
    log_softmax = rows.to(working_dtype(rows)).log_softmax(-1)
    return rows.gather(-1, classes), -candidates.at(log_softmax, target)


class _ScoresAndCrossEntropy(torch.autograd.Function):
    """:func:`_scores_and_cross_entropy` with one (rows, n) gradient for both results instead of two that are added up.

    The gradient takes one pass over the softmax. The logarithm comes from the best class, which is among the candidates and
    has a softmax of at least 1/n: log softmax_y = s_y - s_best + log softmax_best.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = rows.gather(-1, classes)
        softmax = rows.to(working_dtype(rows)).softmax(-1)
        behind = scores.amax(-1).to(softmax.dtype) - candidates.at(rows, target)
        ctx.save_for_backward(rows, classes, target, softmax)
        return scores, behind - softmax.gather(-1, classes).amax(-1).log()

    @staticmethod
    def backward(ctx: Any, of_scores: Tensor, of_cross_entropy: Tensor) -> tuple[Tensor, None, None]:
        rows, classes, target, softmax = ctx.saved_tensors
        if torch.is_grad_enabled() or not (checks.eager(of_scores) and checks.eager(of_cross_entropy)):
            # A second derivative, or many gradients at once: differentiate the plain form.
            with torch.enable_grad():
                results = _scores_and_cross_entropy(rows, classes, target)
                gradients = (of_scores, of_cross_entropy)
                (gradient,) = torch.autograd.grad(results, rows, gradients, create_graph=True)
            return gradient, None, None
        gradient = softmax * of_cross_entropy[:, None]
        gradient.scatter_add_(-1, target[:, None], -of_cross_entropy[:, None])
        gradient.scatter_add_(-1, classes, of_scores.to(gradient.dtype))
        return gradient.to(rows.dtype), None, None


def _expected_losses(
    rows: Tensor,
    probabilities: Tensor,
    example_losses: Callable[[Rows], Tensor],
    view: View,
    weight: Tensor | None,
    valid: Tensor | None,
) -> Tensor:
    """sum_c q_c w_c L(s, c): the candidates each in turn as the target, the rest by softmax cross-entropy."""
    if valid is not None:
        rows = torch.where(valid[:, None], rows, 0)
    scores, classes = candidates.select_for_probabilities(rows, probabilities, view.m, sort=view.sort)
    share = (probabilities if weight is None else probabilities * weight).gather(-1, classes)
    log_softmax = rows.to(working_dtype(rows)).log_softmax(-1)
    cross_entropy = -log_softmax.gather(-1, classes) if view.cross_entropy else None
    losses = shared_losses(scores, classes, share, cross_entropy, valid, example_losses, view)
    if scores.shape[-1] < rows.shape[-1]:
        outside = (probabilities if weight is None else probabilities * weight).scatter(-1, classes, 0)
        losses = losses - (outside * torch.where(outside != 0, log_softmax, 0)).sum(-1)
    return losses if valid is None else torch.where(valid, losses, 0)


def shared_losses(
    scores: Float[Tensor, "rows m"],
    classes: Int[Tensor, "rows m"],
    share: Float[Tensor, "rows m"],
    cross_entropy: Float[Tensor, "rows m"] | None,
    valid: Bool[Tensor, " rows"] | None,
    example_losses: Callable[[Rows], Tensor],
    view: View,
) -> Float[Tensor, " rows"]:
    """Each candidate in turn as the target, with its share. ``cross_entropy`` is that of each, over all classes."""
    kept = scores.shape[-1]
    place = torch.arange(kept, device=scores.device).expand_as(classes)
    real = real_mask(scores)
    checks.real_classes(real, view.least, valid)
    if real is not None:
        _check_targets_are_real(~real & (share != 0))
        place = place.where(real, 0)  # padding as a target: any other stands in for it, nothing may depend on it
        cross_entropy = None if cross_entropy is None else cross_entropy.gather(-1, place)
    everyone = None if real is None else real[:, None, :].expand(-1, kept, -1)
    each = example_losses(Rows(scores[:, None, :].expand(-1, kept, -1), place, everyone, classes, cross_entropy))
    if real is not None:
        each = torch.where(real, each, torch.inf)
    return torch.where(share != 0, share * torch.where(share != 0, each, 0), 0).sum(-1)


def _uniform(rows: Tensor) -> Tensor:
    """The uniform distribution over the classes of each row that are not padding."""
    real = rows.detach() != -torch.inf
    return real.to(working_dtype(rows)) / real.sum(-1, keepdim=True)


def reduced(losses: Tensor, weights: Tensor | None, reduction: str, batch: torch.Size) -> Tensor:
    """The weights are in the losses already; None means 1 for all."""
    if reduction == "none":
        return losses.reshape(batch)
    if reduction == "sum":
        return losses.sum()
    if weights is None:
        return losses.mean()
    # Nothing counted: NaN, as torch has it, but with a gradient of zero.
    counted = weights.sum()
    something = counted != 0
    return torch.where(something, losses.sum() / torch.where(something, counted, 1), torch.nan)


def distribution(p_k: Distribution, name: str = "p_k") -> Tensor:
    """P_K as a tensor of shape (k,) or (rows, k), checked; the zeros at the end of a list are dropped."""
    if not isinstance(p_k, Tensor):
        p_k = _list_to_tensor(p_k, name)
    if not p_k.dtype.is_floating_point:
        raise TypeError(f"{name}: expected floating-point numbers, got dtype {p_k.dtype}")
    if p_k.ndim < 1 or p_k.shape[-1] == 0:
        raise ValueError(f"{name}: expected at least one probability, got shape {tuple(p_k.shape)}")
    if name == "p_k" and p_k.ndim > 2:
        raise ValueError(f"{name}: expected shape (k,) or (n, k), got {tuple(p_k.shape)}")
    if checks.readable(p_k) and p_k.numel():
        if p_k.ndim == 1:  # every call comes by here: a few numbers are quicker looked at one by one
            values = p_k.tolist()
            least, worst = min(values), sum(values)
            if any(value != value for value in values):
                least = math.nan
        else:
            sums = p_k.double().sum(-1)
            least, worst = p_k.min().item(), sums.flatten()[(sums - 1).abs().argmax()].item()
        if not least >= 0:
            raise ValueError(f"{name}: expected probabilities of at least 0, got {least:.6g}")
        tolerance = 1e-4 if p_k.dtype.itemsize > 2 else 1e-2
        if not abs(worst - 1) <= tolerance:
            raise ValueError(f"{name}: expected probabilities that sum to 1 (within {tolerance:g}), got the sum {worst:.6g}")
    return p_k


def _list_to_tensor(p_k: Any, name: str) -> Tensor:
    if isinstance(p_k, Mapping):
        raise TypeError(f"{name}: expected a sequence, the weights of top-1, top-2, and so on, got {p_k!r}")
    given = p_k.tolist() if hasattr(p_k, "tolist") else p_k
    nested = isinstance(given, (list, tuple)) and len(given) > 0 and isinstance(given[0], (list, tuple))
    rows = given if nested else [given]
    try:
        rows = [[float(p) for p in row] for row in rows]
        k = max(len(row) for row in rows)
        while k > 1 and all(len(row) < k or row[k - 1] == 0 for row in rows):
            k -= 1
        rows = [row[:k] for row in rows]
        return torch.tensor(rows if nested else rows[0], dtype=torch.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a sequence of numbers or a tensor, got {p_k!r}") from None


def _check_probabilities(target: Tensor, scores: Tensor, ignore_index: int) -> None:
    if target.shape != scores.shape:
        raise ValueError(
            f"target: expected class indices of an integer dtype, or class probabilities of the shape of scores "
            f"{tuple(scores.shape)}, got dtype {target.dtype} and shape {tuple(target.shape)}"
        )
    if ignore_index >= 0:
        raise ValueError("ignore_index: expected class indices as targets to go with it, got probabilities")
    if checks.readable(target) and bool((target < 0).any()):
        raise ValueError(f"target: expected class probabilities of at least 0, got {target.min().item():.6g}")


def check_shared(reduction: str, ignore_index: int, weight: Tensor | None, label_smoothing: float) -> None:
    checks.one_of("reduction", reduction, REDUCTIONS)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise TypeError(f"ignore_index: expected an integer, got {ignore_index!r}")
    if weight is not None:
        weight = checks.tensor("weight", weight)
        if not weight.dtype.is_floating_point or weight.ndim != 1:
            raise ValueError(
                f"weight: expected a floating-point tensor of shape (n,), "
                f"got dtype {weight.dtype} and shape {tuple(weight.shape)}"
            )
    label_smoothing = checks.number("label_smoothing", label_smoothing, "a number between 0 and 1")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected a number between 0 and 1, got {label_smoothing}")


def shared_repr(module: Any) -> str:
    weight = "None" if module.weight is None else f"tensor of {len(module.weight)}"
    return (
        f"reduction={module.reduction!r}, ignore_index={module.ignore_index}, weight={weight}, "
        f"label_smoothing={module.label_smoothing}"
    )
