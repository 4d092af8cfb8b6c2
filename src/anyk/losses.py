"""The losses: candidates -> operator -> P_K and shape -> loss. All of them take one path, :func:`topk_loss`.

What the loss of a row is, is a :class:`RowLoss`. The head and the sharded loss find the candidates themselves and go on with
:func:`loss_of_candidates`. What all losses share with ``torch.nn.CrossEntropyLoss`` is in :mod:`anyk.cross_entropy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from anyk import _compat, candidates, checks, kernels
from anyk import p_k as p_ks
from anyk.candidates import M
from anyk.cross_entropy import (
    ClassIndices,
    CrossEntropyModule,
    Options,
    Reduction,
    Rows,
    Scores,
    SoftmaxOver,
    batch_shape,
    indexed_rows,
)
from anyk.operators.base import Inclusion, Operator, by_name
from anyk.p_k import PK, Distribution, remembered

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "GeneralizedCrossEntropyLoss",
    "TopKCrossEntropyLoss",
    "TopKErrorLoss",
    "generalized_cross_entropy",
    "topk_cross_entropy",
    "topk_error",
]

Top1 = Literal["separate", "mixed", "operator"]


def topk_loss(row_loss: RowLoss, p_k: PK | None, scores: Tensor, target: Tensor, options: Options) -> Tensor:
    """The data path of all losses, in four steps. Where a kernel serves, it takes them at once."""
    row_loss.check(options)
    if row_loss.temperature != 1:
        scores = checks.floating("scores", scores).to(checks.working_dtype(scores)) / row_loss.temperature
    if (loss := _loss_by_kernel(row_loss, p_k, scores, target, options)) is not None:
        return loss
    rows = Rows.of(scores, target, options, keep_rest=row_loss.smooths)
    k, m = row_loss.sizes(p_k, rows.scores.shape[-1])
    kept, position, cross_entropy = rows.keep(m, k, row_loss.descending, row_loss.softmax == "all")  # 1. candidates
    everywhere = rows.everywhere() if options.label_smoothing else None
    return loss_of_candidates(row_loss, rows._replace(scores=kept), position, cross_entropy, everywhere, p_k)


def loss_of_candidates(
    row_loss: RowLoss,
    rows: Rows,
    position: Int[Tensor, "*rows"],
    cross_entropy: Float[Tensor, "*rows"] | None,
    everywhere: Float[Tensor, " batch"] | None,
    p_k: PK | None,
) -> Tensor:
    """The other three steps, for whoever has found the candidates: ``rows.scores`` are theirs, in descending order if
    ``row_loss.descending``, and ``position`` is where among them the target stands; its cross-entropy over all classes is given
    where ``row_loss.softmax`` is "all", and where labels are smoothed :meth:`Rows.everywhere`."""
    kept, weights = rows.scores, None if p_k is None else p_k.rows(rows.target, rows.scores)
    losses = _losses_by_kernel(row_loss, p_k, weights, kept, position, cross_entropy)
    if losses is None:
        log_inclusion = row_loss.log_inclusion(kept, position, p_k)  # 2. operator
        if row_loss.softmax == "candidates":
            cross_entropy = -candidates.at(kept.log_softmax(-1, dtype=checks.working_dtype(kept)), position)
        losses = row_loss.losses(log_inclusion, cross_entropy, weights)  # 3. P_K and shape
    if everywhere is None or cross_entropy is None:
        return rows.reduce(losses)  # 4. loss
    return rows.reduce(losses, rows.smoothing(row_loss.ce_share(weights), cross_entropy, everywhere))


@dataclass(frozen=True, eq=False)
class RowLoss:
    """What the loss of a row is: a function of its candidates' scores, of the target's place among them, of its softmax
    cross-entropy, and of its P_K."""

    operator: Inclusion | None
    """None: nothing is ranked, the softmax is T_1"""
    m: M
    family: Literal["separate", "mixed", "operator", "error"]
    softmax: SoftmaxOver | None
    """what the softmax cross-entropy is over, if it uses one"""
    ce_weight: float = 0.0
    q: float = 1.0
    temperature: float = 1.0
    """what the scores are divided by before anything else"""

    @property
    def smooths(self) -> bool:
        """Whether cross-entropy over all classes is a term of its own, which label smoothing acts on."""
        if self.family == "error":
            return self.ce_weight > 0 or (self.operator is None and self.q == 0)
        return self.family == "separate" and self.softmax == "all"

    def ce_share(self, p_k: Float[Tensor, "*#rows k"] | None) -> float | Float[Tensor, "*#rows"]:
        """The weight of this term."""
        if self.family == "separate" and p_k is not None:
            return p_k[..., 0]
        return 1.0 if self.operator is None and self.q == 0 else self.ce_weight

    def check(self, options: Options) -> None:
        if options.label_smoothing and not self.smooths:
            loss = "ce_weight = 0" if self.family == "error" else 'top1="mixed" or "operator", or softmax_over="candidates"'
            given = f"{loss}, where cross-entropy over all classes is no term of its own, got {options.label_smoothing}"
            raise ValueError(f"label_smoothing: expected 0 with {given}")

    def sizes(self, p_k: PK | None, n: int) -> tuple[int, int]:
        """k, and how many of n classes are candidates; 0 where nothing is ranked."""
        if self.operator is None:
            return 1, 0
        if p_k is None:
            raise ValueError("p_k: expected a distribution, or example_p_k at the call, got None for both")
        k = p_k.k
        m = candidates.number(self.m, n, k)
        if k > m:
            limit = f"the number of classes = {n}" if m == n else f"m = {m}"
            raise ValueError(f"{'example_p_k' if p_k.of == 'row' else 'p_k'}: expected no k above {limit}, got k = {k}")
        if p_k.of == "class" and len(p_k.values) != n:
            raise ValueError(f"p_k: expected shape (k,) or (n, k) with n = {n} classes, got {tuple(p_k.values.shape)}")
        return k, m if self.ranks(k) or self.softmax == "candidates" else 0

    def ranks(self, k: int) -> bool:
        """Whether the operator is asked."""
        return self.operator is not None and self.ce_weight < 1 and (k > 1 or self.family in ("operator", "error"))

    @property
    def descending(self) -> bool:
        return self.operator is not None and self.operator.descending

    def log_inclusion(self, kept: Tensor, position: Tensor, p_k: PK | None) -> Float[Tensor, "*rows k"] | None:
        """Step 2."""
        if self.operator is None or p_k is None or not self.ranks(p_k.k):
            return None
        log_inclusion = self.operator.compute_log_inclusion(kept, position, p_k.k)
        return _at_most_0(log_inclusion) if self.family == "error" and not self.operator.at_most_1 else log_inclusion

    def losses(self, log_inclusion: Tensor | None, cross_entropy: Any, p_k: Any) -> Float[Tensor, "*rows"]:
        """Step 3: the loss of each target, from log T (..., k), cross-entropy (...) and P_K (..., k)."""
        if self.operator is None and self.q > 0:
            misses: Tensor = _PowerLess1.run(cross_entropy, -self.q)
            return misses if self.ce_weight == 0 else misses.lerp(cross_entropy, self.ce_weight)
        if log_inclusion is None:
            return cross_entropy
        if self.family == "error":
            hits = (p_k * (_PowerLess1.run(log_inclusion, self.q) if self.q > 0 else log_inclusion)).sum(-1)
            return -hits if cross_entropy is None else torch.add(self.ce_weight * cross_entropy, hits, alpha=self.ce_weight - 1)
        if self.family == "operator":
            return -_log_mean(p_k, log_inclusion)
        if self.family == "mixed":
            return -_log_mean(p_k, torch.cat([-cross_entropy[..., None], log_inclusion[..., 1:]], -1))
        first, rest = p_k[..., 0], p_k[..., 1:]
        later = rest.sum(-1, keepdim=True)
        # Where P_K(1) = 1 the second term is 0 times something: let it be something finite.
        rest = (rest / later).nan_to_num(nan=1.0)
        return first * cross_entropy - later.squeeze(-1) * _log_mean(rest, log_inclusion[..., 1:])

    def describe(self, m: int, k: int, smoothing: float = 0.0, softmax_is_given: bool = False) -> kernels.Loss | None:
        """The loss in plain numbers, for the kernels; None: they do not have it."""
        known = self.operator.kernel(m, k) if self.operator is not None and self.ranks(k) else None
        if known is None:
            return None
        over_all, computed = self.softmax != "candidates", self.softmax == "all" and not softmax_is_given
        return kernels.Loss(known, self.family, over_all, computed, self.ce_weight, self.q, smoothing, m, k)


def _log_mean(p_k: Tensor, log_inclusion: Tensor) -> Tensor:
    """log sum_j P_K(j) T_j, at most 0: the T of operators that are only row-stochastic can pass 1."""
    return _at_most_0((p_k.log() + log_inclusion).logsumexp(-1))


def _at_most_0(logarithm: Tensor) -> Tensor:
    """``clamp(max=0)``, whose gradient takes one operation instead of three."""
    return functional.hardtanh(logarithm, -torch.inf, 0.0)


class _PowerLess1(_compat.Function):
    """(e^(q x) - 1) / q, with all digits of itself and of its slope."""

    @staticmethod
    def forward(x: Tensor, q: float) -> Tensor:
        return x.expm1() if q == 1 else (q * x).expm1() / q

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.q = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x if ctx.q == 1 else ctx.q * x).exp(), None

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _PowerLess1.backward(ctx, tangent)[0]


def _loss_by_kernel(row_loss: RowLoss, p_k: PK | None, scores: Tensor, target: Tensor, options: Options) -> Tensor | None:
    """The loss of class indices by a kernel; None: the plain code is to compute it, or to say what is wrong."""
    reduction, ignore_index, weight, smoothing = options
    rows = None if smoothing and (row_loss.family != "error" or weight is not None) else indexed_rows(scores, target)
    if p_k is None or rows is None:
        return None
    k, m = row_loss.sizes(p_k, rows[0].shape[1])
    description = row_loss.describe(m, k, smoothing)
    if description is None:
        return None
    loss = kernels.loss(description, *rows, p_k.for_kernels, p_k.of, reduction, ignore_index, weight)
    return loss.view(target.shape) if target.ndim > 1 and loss is not None and loss.ndim else loss


def _losses_by_kernel(
    row_loss: RowLoss, p_k: PK | None, weights: Tensor | None, kept: Tensor, position: Tensor, cross_entropy: Tensor | None
) -> Tensor | None:
    """Steps 2 and 3 by a kernel."""
    m, k = kept.shape[-1], 0 if p_k is None else p_k.k
    description = row_loss.describe(m, k, softmax_is_given=cross_entropy is not None)
    if p_k is None or weights is None or description is None:
        return None
    numbers, of = p_k.for_kernels, "all"
    if p_k.of != "all":
        numbers, of = weights.expand(*position.shape, k).reshape(-1, k).to("cpu", torch.float64), "row"
    flat = None if cross_entropy is None else cross_entropy.reshape(-1)
    losses = kernels.row_losses(description, kept.reshape(-1, m), position.reshape(-1), flat, numbers, of)
    return losses.view(position.shape) if losses is not None and position.ndim > 1 else losses


# The functions and modules ------------------------------------------------------------------------------------------------


@remembered
def _cross_entropy(operator: Inclusion, m: M, top1: Top1, softmax_over: SoftmaxOver) -> RowLoss:
    candidates.check(m)
    checks.one_of("top1", top1, get_args(Top1))
    checks.one_of("softmax_over", softmax_over, get_args(SoftmaxOver))
    return RowLoss(operator, m, top1, None if top1 == "operator" else softmax_over)


@remembered
def _error(operator: Inclusion | None, m: M, ce_weight: float, q: float, temperature: float = 1.0) -> RowLoss:
    """Without an operator, generalised cross-entropy."""
    candidates.check(m)
    checks.between("ce_weight", ce_weight, 0, 1)
    checks.between("q", q, 0, 1)
    checks.positive("temperature", temperature)
    softmax: SoftmaxOver | None = "all" if ce_weight > 0 or operator is None else None
    return RowLoss(operator, m, "error", softmax, ce_weight, q, temperature)


def _inclusion(operator: Operator | str) -> Inclusion:
    """An operator that serves a loss, by itself or by its name."""
    operator = by_name(operator)
    operator.require(Inclusion)
    return operator  # type: ignore[return-value]


_shared = remembered(_inclusion)  # to make an nn.Module takes as long as a small loss


def _read(p_k: Distribution | None, example_p_k: object, scores: Tensor) -> PK | None:
    """P_K of a call of a function."""
    own = None if p_k is None else p_ks.read(p_k)
    return own if example_p_k is None else p_ks.read_rows(example_p_k, batch_shape(scores))


def topk_cross_entropy(
    scores: Scores,
    target: ClassIndices | Scores,
    p_k: Distribution | None,
    operator: Operator | str | None = None,
    *,
    m: M = "auto",
    top1: Top1 = "separate",
    softmax_over: SoftmaxOver = "all",
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    weight: Float[Tensor, " n"] | None = None,
    label_smoothing: float = 0.0,
    example_p_k: Float[Tensor, "*examples k"] | None = None,
) -> Tensor:
    """Cross-entropy of "the target is among the first k classes", for k drawn from P_K.

    With T_j the probability that the target y is among the first j of the scores s, as the operator sees it, the loss of an
    example is, for the three values of ``top1``,

        separate    P_K(1) CE(s, y) - (1 - P_K(1)) log( sum_{j>=2} P_K(j) T_j / (1 - P_K(1)) )
        mixed       -log( P_K(1) softmax_y(s) + sum_{j>=2} P_K(j) T_j )
        operator    -log( sum_j P_K(j) T_j )

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), as for ``torch.nn.functional.cross_entropy``. -inf marks padding.
        target: class indices (B,), () or (B, d1, …), or class probabilities of the shape of the scores: a row's 8 largest
            are ranked, the rest costs cross-entropy or, where that is no term of its own, is divided among them.
        p_k: P_K: a list ``[.5, 0, 0, 0, .5]``, a mapping ``{1: .5, 5: .5}``, an integer k for ``{k: 1}``, or a tensor (k,), or
            (n, k) with one distribution for each class. None if each call has ``example_p_k``.
        operator: the relaxation of sorting, or its name such as ``"lapsum"``; None: ``SortingNetwork()``, as published.
        m: how many of a row's best scores are ranked, the target's among them; ``"auto"``: min(n, max(64, 4 k)); None: all.
        top1: the top-1 part: softmax cross-entropy as its own term (``"separate"``) or inside the logarithm (``"mixed"``),
            or the operator's own T_1 (``"operator"``).
        softmax_over: what the softmax is taken over: ``"all"`` classes, or the m ``"candidates"``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.
        example_p_k: (B, k), (k,) or (B, d1, …, k): P_K of each example, in place of ``p_k``.

    Returns:
        The loss, at least float32: a scalar, or with ``reduction="none"`` of the shape of the class indices.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> anyk.topk_cross_entropy(scores, torch.tensor([1, 3]), [0.5, 0.5], anyk.LapSum())
        tensor(0.7022)

    Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022, equations 2 and 4.
    """
    row_loss = _cross_entropy(_shared("splitter") if operator is None else _inclusion(operator), m, top1, softmax_over)
    options = Options(reduction, ignore_index, weight, label_smoothing).checked()
    return topk_loss(row_loss, _read(p_k, example_p_k, scores), scores, target, options)


def topk_error(
    scores: Scores,
    target: ClassIndices | Scores,
    p_k: Distribution | None,
    operator: Operator | str | None = None,
    *,
    m: M = "auto",
    ce_weight: float = 0.2,
    q: float = 1.0,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    weight: Float[Tensor, " n"] | None = None,
    label_smoothing: float = 0.0,
    example_p_k: Float[Tensor, "*examples k"] | None = None,
) -> Tensor:
    """The expected top-k error for k drawn from P_K, which is bounded if q > 0, plus a share of softmax cross-entropy.

    With T_j the probability that the target y is among the first j of the scores s, as the operator sees it,

        L = ce_weight CE(s, y) + (1 - ce_weight) sum_j P_K(j) (1 - T_j^q) / q

    ``q=1`` is the expected error itself. Its gradient does not grow the further behind the target is; the cross-entropy keeps
    some where T has vanished. T above 1 (SoftSort, NeuralSort) counts as 1.

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), as for ``torch.nn.functional.cross_entropy``. -inf marks padding.
        target: class indices (B,), () or (B, d1, …), or class probabilities of the shape of the scores: a row's 8 largest
            are ranked, the rest costs cross-entropy or, where that is no term of its own, is divided among them.
        p_k: P_K: a list ``[.5, 0, 0, 0, .5]``, a mapping ``{1: .5, 5: .5}``, an integer k for ``{k: 1}``, or a tensor (k,), or
            (n, k) with one distribution for each class. None if each call has ``example_p_k``.
        operator: the relaxation of sorting, or its name such as ``"splitter"``; None: ``LapSum()``.
        m: how many of a row's best scores are ranked, the target's among them; ``"auto"``: min(n, max(64, 4 k)); None: all.
        ce_weight: the share of softmax cross-entropy, from 0 (none) to 1 (nothing else).
        q: the exponent, from 0 to 1, which bounds the loss by 1 / q; 0 is the limit, a logarithm.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.
        example_p_k: (B, k), (k,) or (B, d1, …, k): P_K of each example, in place of ``p_k``.

    Returns:
        The loss, at least float32: a scalar, or with ``reduction="none"`` of the shape of the class indices.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> anyk.topk_error(scores, torch.tensor([1, 3]), {1: 0.5, 2: 0.5})
        tensor(0.5667)
    """
    row_loss = _error(_shared("lapsum") if operator is None else _inclusion(operator), m, ce_weight, q)
    options = Options(reduction, ignore_index, weight, label_smoothing).checked()
    return topk_loss(row_loss, _read(p_k, example_p_k, scores), scores, target, options)


def generalized_cross_entropy(
    scores: Scores,
    target: ClassIndices | Scores,
    q: float = 0.7,
    *,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    weight: Float[Tensor, " n"] | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Generalised cross-entropy, bounded, for labels of which some are wrong; plus a share of softmax cross-entropy.

    With p the softmax of scores / temperature at the target, which is T_1 in :func:`topk_error`,

        L = ce_weight (-log p) + (1 - ce_weight) (1 - p^q) / q

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), as for ``torch.nn.functional.cross_entropy``. -inf marks padding.
        target: class indices (B,), () or (B, d1, …), or class probabilities of the shape of the scores: a row's 8 largest
            are ranked, the rest costs cross-entropy or, where that is no term of its own, is divided among them.
        q: the exponent, from 0 to 1, which bounds the loss by 1 / q; 0 is the limit, a logarithm.
        ce_weight: the share of softmax cross-entropy, from 0 (none) to 1 (nothing else).
        temperature: what the scores are divided by, in both terms.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Returns:
        The loss, at least float32: a scalar, or with ``reduction="none"`` of the shape of the class indices.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> anyk.generalized_cross_entropy(scores, torch.tensor([1, 3]))
        tensor(0.6991)

    Reference: Zhang and Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels", 2018.
    """
    options = Options(reduction, ignore_index, weight, label_smoothing).checked()
    return topk_loss(_error(None, None, ce_weight, q, temperature), None, scores, target, options)


class Loss(CrossEntropyModule, ABC):
    """The losses of this module: what :class:`LinearHead` and :class:`anyk.parallel.Sharded` accept."""

    p_k: Tensor | None = None

    @property
    @abstractmethod
    def row_loss(self) -> RowLoss:
        """What the loss of a row is, by the arguments as they are now, checked."""

    def distribution(self, batch: Callable[[], torch.Size], example_p_k: object = None) -> PK | None:
        """P_K of a call, for examples of the shape ``batch()``."""
        if example_p_k is not None:
            raise TypeError(f"example_p_k: expected none with {type(self).__name__}, which has no P_K")
        return None

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        self.look_at(input)
        return topk_loss(self.row_loss, None, input, target, self.options)


def check_is_loss(loss: object) -> None:
    if not isinstance(loss, Loss):
        expected = "a TopKCrossEntropyLoss, TopKErrorLoss or GeneralizedCrossEntropyLoss"
        raise TypeError(f"loss: expected {expected}, got {type(loss).__name__}")


class TopKLoss(Loss):
    """The losses over P_K. P_K is a setting and no state: loading a checkpoint does not change it, and one of
    ``torch.nn.CrossEntropyLoss`` fits; neither does converting the module to another precision."""

    operator: Any  # an Inclusion; its name may be assigned
    m: M

    def __init__(self, p_k: Distribution | None, operator: Operator | str, m: M, options: Options) -> None:
        super().__init__(options)
        self.p_k = p_k
        self.operator = operator
        self.m = m

    @property
    def p_k(self) -> Tensor | None:
        """A copy of P_K, (k,) or (n, k); to change it, assign whatever the class accepts."""
        return None if self._p_k is None else self._p_k.values.clone()

    @p_k.setter
    def p_k(self, given: Distribution | None) -> None:
        if isinstance(given, Tensor) and given.is_meta:
            raise ValueError("p_k: expected numbers, got a tensor without any, on the device meta: give a list")
        self._p_k = None if given is None else p_ks.read(given.clone() if isinstance(given, Tensor) else given)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "p_k":  # not nn.Module's, which would take a parameter for one of its own
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, _inclusion(value) if name == "operator" else value)

    def distribution(self, batch: Callable[[], torch.Size], example_p_k: object = None) -> PK | None:
        return self._p_k if example_p_k is None else p_ks.read_rows(example_p_k, batch())

    def forward(self, input: Tensor, target: Tensor, *, example_p_k: Tensor | None = None) -> Tensor:
        self.look_at(input)
        p_k = self._p_k if example_p_k is None else self.distribution(lambda: batch_shape(input), example_p_k)
        return topk_loss(self.row_loss, p_k, input, target, self.options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert; P_K moves along, and keeps its values."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._p_k = None if self._p_k is None else self._p_k.to(fn(torch.empty(0, device="cpu")).device)
        return self

    def extra_repr(self) -> str:
        return f"p_k={self._p_k}, m={self.m!r}, {super().extra_repr()}"


class TopKCrossEntropyLoss(TopKLoss):
    """:func:`topk_cross_entropy` as a module, a drop-in for ``torch.nn.CrossEntropyLoss``. The arguments are attributes, which
    may be assigned at any time.

    Args:
        p_k: P_K: a list ``[.5, 0, 0, 0, .5]``, a mapping ``{1: .5, 5: .5}``, an integer k for ``{k: 1}``, or a tensor (k,), or
            (n, k) with one distribution for each class. None if each call has ``example_p_k``.
        operator: the relaxation of sorting, or its name such as ``"lapsum"``; None: ``SortingNetwork()``, as published.
        m: how many of a row's best scores are ranked, the target's among them; ``"auto"``: min(n, max(64, 4 k)); None: all.
        top1: the top-1 part: softmax cross-entropy as its own term (``"separate"``) or inside the logarithm (``"mixed"``),
            or the operator's own T_1 (``"operator"``).
        softmax_over: what the softmax is taken over: ``"all"`` classes, or the m ``"candidates"``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Shape:
        As of ``torch.nn.CrossEntropyLoss``; :func:`topk_cross_entropy` has the details. A call may have ``example_p_k``, too.

    Example:
        >>> criterion = anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5])
        >>> scores = torch.randn(8, 100, requires_grad=True)
        >>> criterion(scores, torch.randint(100, (8,))).backward()
    """

    def __init__(
        self,
        p_k: Distribution | None,
        operator: Operator | str | None = None,
        *,
        m: M = "auto",
        top1: Top1 = "separate",
        softmax_over: SoftmaxOver = "all",
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        weight: Float[Tensor, " n"] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        options = Options(reduction, ignore_index, weight, label_smoothing)
        super().__init__(p_k, "splitter" if operator is None else operator, m, options)
        self.top1, self.softmax_over = top1, softmax_over
        self.row_loss.check(options)

    @property
    def row_loss(self) -> RowLoss:
        operator: Any = self._modules["operator"]  # by its name it takes a microsecond
        return _cross_entropy(operator, self.m, self.top1, self.softmax_over)

    def extra_repr(self) -> str:
        return f"top1={self.top1!r}, softmax_over={self.softmax_over!r}, {super().extra_repr()}"


class TopKErrorLoss(TopKLoss):
    """:func:`topk_error` as a module, a drop-in for ``torch.nn.CrossEntropyLoss``. The arguments are attributes, which may be
    assigned at any time: ``ce_weight`` may change during training.

    Args:
        p_k: P_K: a list ``[.5, 0, 0, 0, .5]``, a mapping ``{1: .5, 5: .5}``, an integer k for ``{k: 1}``, or a tensor (k,), or
            (n, k) with one distribution for each class. None if each call has ``example_p_k``.
        operator: the relaxation of sorting, or its name such as ``"splitter"``; None: ``LapSum()``.
        m: how many of a row's best scores are ranked, the target's among them; ``"auto"``: min(n, max(64, 4 k)); None: all.
        ce_weight: the share of softmax cross-entropy, from 0 (none) to 1 (nothing else).
        q: the exponent, from 0 to 1, which bounds the loss by 1 / q; 0 is the limit, a logarithm.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Shape:
        As of ``torch.nn.CrossEntropyLoss``; :func:`topk_error` has the details. A call may have ``example_p_k``, too.

    Example:
        >>> criterion = anyk.TopKErrorLoss({1: 0.5, 5: 0.5})
        >>> scores = torch.randn(8, 100, requires_grad=True)
        >>> criterion(scores, torch.randint(100, (8,))).backward()
    """

    def __init__(
        self,
        p_k: Distribution | None,
        operator: Operator | str | None = None,
        *,
        m: M = "auto",
        ce_weight: float = 0.2,
        q: float = 1.0,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        weight: Float[Tensor, " n"] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        options = Options(reduction, ignore_index, weight, label_smoothing)
        super().__init__(p_k, "lapsum" if operator is None else operator, m, options)
        self.ce_weight, self.q = ce_weight, q
        self.row_loss.check(options)

    @property
    def row_loss(self) -> RowLoss:
        operator: Any = self._modules["operator"]  # by its name it takes a microsecond
        return _error(operator, self.m, self.ce_weight, self.q)

    def extra_repr(self) -> str:
        return f"ce_weight={self.ce_weight}, q={self.q}, {super().extra_repr()}"


class GeneralizedCrossEntropyLoss(Loss):
    """:func:`generalized_cross_entropy` as a module, a drop-in for ``torch.nn.CrossEntropyLoss``. The arguments are attributes,
    which may be assigned at any time.

    Args:
        q: the exponent, from 0 to 1, which bounds the loss by 1 / q; 0 is the limit, a logarithm.
        ce_weight: the share of softmax cross-entropy, from 0 (none) to 1 (nothing else).
        temperature: what the scores are divided by, in both terms.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a target value that is ignored, in the loss and in its gradient.
        weight: (n,) weight of each class.
        label_smoothing: between 0 and 1, of the cross-entropy over all classes; 0 where that is no term of its own.

    Shape:
        As of ``torch.nn.CrossEntropyLoss``; :func:`generalized_cross_entropy` has the details.

    Example:
        >>> criterion = anyk.GeneralizedCrossEntropyLoss(q=0.5)
        >>> scores = torch.randn(8, 100, requires_grad=True)
        >>> criterion(scores, torch.randint(100, (8,))).backward()
    """

    def __init__(
        self,
        q: float = 0.7,
        *,
        ce_weight: float = 0.0,
        temperature: float = 1.0,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        weight: Float[Tensor, " n"] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        options = Options(reduction, ignore_index, weight, label_smoothing)
        super().__init__(options)
        self.q, self.ce_weight, self.temperature = q, ce_weight, temperature
        self.row_loss.check(options)

    @property
    def row_loss(self) -> RowLoss:
        return _error(None, None, self.ce_weight, self.q, self.temperature)

    def extra_repr(self) -> str:
        return f"q={self.q}, ce_weight={self.ce_weight}, temperature={self.temperature}, {super().extra_repr()}"
