"""The losses: candidates -> operator -> P_K and shape -> loss. Both families take one path, :func:`topk_loss`.

What an example's loss is, is a :class:`Spec`: a frozen value that the head and the sharded losses take as well. What all losses
share with ``torch.nn.CrossEntropyLoss`` is in :mod:`anyk.conventions` and :mod:`anyk.rows`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from anyk import _compat, candidates, checks, kernels
from anyk import p_k as p_ks
from anyk.conventions import ClassIndices, Conventions, CrossEntropyModule, Reduction, Scores
from anyk.docstrings import documented
from anyk.kernels.loss_description import ERROR, MIXED, OPERATOR, SEPARATE, Description, sorting_of
from anyk.operators import KSubset, LapSum, Operator, SortingNetwork, by_name
from anyk.p_k import PK, Distribution
from anyk.rows import Batch, Measure, Rows

if TYPE_CHECKING:
    from typing import Self

__all__ = ["TopKCrossEntropyLoss", "TopKErrorLoss", "TopKLoss", "topk_cross_entropy", "topk_error"]

Top1 = Literal["separate", "mixed", "operator"]
SoftmaxOver = Literal["all", "candidates"]
M = int | Literal["auto"] | None
_TOP1, _SOFTMAX_OVER = get_args(Top1), get_args(SoftmaxOver)
_FAMILIES = {"separate": SEPARATE, "mixed": MIXED, "operator": OPERATOR}
# Up to so many classes the kernels also compute a loss that needs no operator: there they cost less than the calls of torch.
MOST_CLASSES_WITHOUT_OPERATOR = 256


def topk_loss(
    spec: Spec,
    scores: Tensor,
    target: Tensor,
    conventions: Conventions,
    example_p_k: Tensor | None = None,
    last: Last | None = None,
) -> Tensor:
    """The data path of both families: by a kernel, or by the plain code, which is the definition."""
    if example_p_k is not None:
        spec = spec.for_examples()
    loss = _kernel_loss(spec, scores, target, conventions, example_p_k, last)
    return plain_loss(spec, scores, target, conventions, example_p_k) if loss is None else loss


def plain_loss(
    spec: Spec, scores: Tensor, target: Tensor, conventions: Conventions, example_p_k: Tensor | None = None
) -> Tensor:
    """The data path in four steps."""
    batch = Batch.of(scores, target, conventions)
    p_k, k, m = spec.fit(scores, batch.shape.classes, batch.shape.batch, example_p_k)
    if spec.is_cross_entropy(k) and not batch.shares_with_padding():
        return batch.cross_entropy()
    rows = batch.rows(spec, m, k)  # 1. candidates
    log_inclusion = spec.log_inclusion(rows, k)  # 2. operator
    losses = spec.losses(rows, log_inclusion, p_k.at(rows.target))  # 3. P_K and shape
    return rows.reduce(losses)  # 4. loss


@dataclass(frozen=True, eq=False)
class Spec(Measure, ABC):
    """What is measured of an example, checked: P_K, the operator, how many candidates; and, in the subclasses, the shape."""

    p_k: PK | None
    """None: one for each example comes with the call"""
    operator: Operator
    m: M

    @classmethod
    def of(cls, p_k: Distribution | None, operator: Operator | str, m: M, *own: Any) -> Self:
        """From the arguments of the losses, in their order; ``own`` are those of the family."""
        return cls(_read(p_k, m), _operator(operator), m, *own)

    def fit(self, like: Tensor, n: int, batch: torch.Size, example_p_k: Tensor | None) -> tuple[PK, int, int | None]:
        """P_K as a tensor, its k, and the number of candidates (None: all), for scores like these, of n classes."""
        if example_p_k is not None:
            name, p_k = "example_p_k", p_ks.read_rows(example_p_k, batch)
        elif self.p_k is not None:
            name, p_k = "p_k", self.p_k
        else:
            raise ValueError("p_k: expected a distribution, or example_p_k at the call, got None for both")
        k = p_k.k
        m = candidates.number(self.m, n, k)
        if k > (m or n):
            limit = f"the number of classes = {n}" if m is None else f"m = {m}"
            raise ValueError(f"{name}: expected no k above {limit}, got k = {k}")
        if p_k.of == "class" and len(p_k.values) != n:
            raise ValueError(f"p_k: expected shape (k,) or (n, k) with n = {n} classes, got {tuple(p_k.values.shape)}")
        return PK(p_k.values.to(device=like.device, dtype=checks.working_dtype(like)), p_k.of), k, m

    def for_examples(self) -> Self:
        """The same where every example brings its own P_K: nothing may follow from the one that was given."""
        return self if self.uses_operator else dataclasses.replace(self, p_k=None)

    @property
    def sorts(self) -> bool:
        return self.operator.sorts

    def check(self, conventions: Conventions) -> None:
        """Raises an error where the two do not go together."""

    def log_inclusion(self, rows: Rows, k: int) -> Float[Tensor, "*rows k"] | None:
        """log T of the targets; None if the loss does not ask for it."""
        if rows.shares is not None:  # every candidate is a target, of the same scores
            every = self.operator.every_log_inclusion(rows.scores[:, 0], None if rows.real is None else rows.real[:, 0], k)
            return every if rows.real is None else every.gather(-2, rows.position[..., None].expand_as(every))
        return self.operator.candidate_log_inclusion(rows.scores, rows.position, rows.real, k)

    @abstractmethod
    def is_cross_entropy(self, k: int) -> bool:
        """Whether it is softmax cross-entropy over all classes and nothing else."""

    @abstractmethod
    def losses(
        self, rows: Rows, log_inclusion: Float[Tensor, "*rows k"] | None, p_k: Float[Tensor, "*#rows k"]
    ) -> Float[Tensor, "*rows"]:
        """The loss of each target."""

    def describe(
        self, n: int, k: int, m: int | None, label_smoothing: float = 0.0, softmax_is_given: bool = False
    ) -> Description | str:
        """The loss in plain numbers, for the kernels; or why there is no kernel for it.

        Args:
            n: number of classes.
            k: number of entries of P_K.
            m: number of candidates; None means all.
            label_smoothing: how much of the cross-entropy is smoothed.
            softmax_is_given: whether the cross-entropy over all classes is given, not computed.
        """
        m = n if m is None else m
        operator, family = self.operator.kernel_description(m, k), self._family()
        if isinstance(operator, str):
            return operator
        if family is None:
            return f"the loss {type(self).__name__} has none"
        code, all_classes, ce_weight, q = family
        return Description(
            operator.operator, operator.swap, operator.wires, code, all_classes, self.uses_softmax and not softmax_is_given,
            ce_weight, q, float(label_smoothing), operator.scale, n, m, k, operator.wiring, sorting_of(n, m),
        )  # fmt: skip

    @abstractmethod
    def _family(self) -> tuple[int, bool, float, float] | None:
        """Its number, whether its softmax is over all classes, ce_weight and q; None for a subclass of one that the kernels
        know: what it computes, they do not."""


@dataclass(frozen=True, eq=False)
class CrossEntropySpec(Spec):
    """-log of the inclusion: see :func:`topk_cross_entropy`."""

    top1: Top1 = "separate"
    softmax_over: SoftmaxOver = "all"

    def __post_init__(self) -> None:
        checks.one_of("top1", self.top1, _TOP1)
        checks.one_of("softmax_over", self.softmax_over, _SOFTMAX_OVER)

    @property
    def uses_softmax(self) -> bool:
        return self.top1 != "operator" and self.softmax_over == "all"

    def is_cross_entropy(self, k: int) -> bool:
        return k == 1 and self.uses_softmax

    def _family(self) -> tuple[int, bool, float, float] | None:
        return (_FAMILIES[self.top1], self.softmax_over == "all", 0.0, 1.0) if type(self) is CrossEntropySpec else None

    def log_inclusion(self, rows: Rows, k: int) -> Tensor | None:
        return None if k == 1 and self.top1 != "operator" else super().log_inclusion(rows, k)

    def losses(self, rows: Rows, log_inclusion: Tensor | None, p_k: Tensor) -> Tensor:
        cross_entropy = rows.cross_entropy
        if self.top1 != "operator" and self.softmax_over == "candidates":
            cross_entropy = rows.candidate_cross_entropy()
        if log_inclusion is None:
            assert cross_entropy is not None
            return cross_entropy
        if cross_entropy is None:
            return -_log_mean(p_k, log_inclusion)
        if self.top1 == "mixed":
            return -_log_mean(p_k, torch.cat([-cross_entropy[..., None], log_inclusion[..., 1:]], -1))
        later = p_k[..., 1:].sum(-1, keepdim=True)
        # Where P_K(1) = 1 the second term is 0 times something: let it be something finite.
        p_later = torch.where(later > 0, p_k[..., 1:] / torch.where(later > 0, later, 1), 1 / (p_k.shape[-1] - 1))
        return p_k[..., 0] * cross_entropy - later.squeeze(-1) * _log_mean(p_later, log_inclusion[..., 1:])


def _log_mean(p_k: Tensor, log_inclusion: Tensor) -> Tensor:
    """log sum_j P_K(j) T_j, at most 0: the T of operators that are only row-stochastic can pass 1."""
    # The slope of log(0), if anyone asks for it, is taken as 0.
    constant = checks.eager(p_k) and not p_k.requires_grad
    log_p = p_k.log() if constant else torch.where(p_k > 0, torch.where(p_k > 0, p_k, 1).log(), -torch.inf)
    return (log_p + log_inclusion).logsumexp(-1).clamp(max=0)


@dataclass(frozen=True, eq=False)
class ErrorSpec(Spec):
    """The expected top-k error: see :func:`topk_error`."""

    ce_weight: float = 0.2
    q: float = 1.0

    def __post_init__(self) -> None:
        checks.between("ce_weight", self.ce_weight, 0, 1)
        checks.between("q", self.q, 0, 1)

    def check(self, conventions: Conventions) -> None:
        amount = conventions.label_smoothing
        if self.ce_weight == 0 and amount > 0:
            raise ValueError(f"label_smoothing: expected 0 with ce_weight = 0, which leaves no softmax to smooth, got {amount}")

    @property
    def uses_operator(self) -> bool:
        # The T_1 of KSubset among all classes is softmax: generalised cross-entropy, for which nothing is sorted.
        if type(self.operator) is not KSubset or self.m is not None or self.p_k is None or self.p_k.k > 1:
            return True
        temperature = self.operator.temperature
        return isinstance(temperature, Tensor) or temperature != 1  # a tensor may be learned

    @property
    def uses_softmax(self) -> bool:
        return self.ce_weight > 0 or not self.uses_operator

    def added_smoothing(self, label_smoothing: float) -> float:
        return self.ce_weight * label_smoothing

    def is_cross_entropy(self, k: int) -> bool:
        return self.ce_weight == 1

    def outside(self, cross_entropy: Tensor, label_smoothing: float) -> Tensor:
        bounded = cross_entropy if self.q == 0 else torch.full_like(cross_entropy, 1 / self.q)
        if self.ce_weight == 0:
            return bounded
        return self.ce_weight * (1 - label_smoothing) * cross_entropy + (1 - self.ce_weight) * bounded

    def _family(self) -> tuple[int, bool, float, float] | None:
        return (ERROR, True, float(self.ce_weight), float(self.q)) if type(self) is ErrorSpec else None

    def log_inclusion(self, rows: Rows, k: int) -> Tensor | None:
        if self.ce_weight == 1:
            return None
        if self.uses_operator or rows.cross_entropy is None:
            return super().log_inclusion(rows, k)
        return -rows.cross_entropy[..., None]

    def losses(self, rows: Rows, log_inclusion: Tensor | None, p_k: Tensor) -> Tensor:
        parts = []
        if rows.cross_entropy is not None:
            parts.append(self.ce_weight * (1 - rows.label_smoothing) * rows.cross_entropy)
        if log_inclusion is not None:
            parts.append((1 - self.ce_weight) * (p_k * _errors(log_inclusion, self.q)).sum(-1))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _errors(log_inclusion: Tensor, q: float) -> Tensor:
    """(1 - T^q) / q, with all digits of itself and of its slope -T^q for any T."""
    log_inclusion = log_inclusion.clamp(max=0)  # the T of operators that are only row-stochastic can pass 1
    if q == 0:
        return -log_inclusion
    exponent = q * log_inclusion
    # Near T = 1 the value would lose digits by exp; elsewhere the slope by expm1, which autograd takes as its result + 1.
    return torch.where(exponent > -0.5, -torch.expm1(exponent), 1 - exponent.exp()) / q


class Last:
    """What a module remembers of its last call until something is assigned: its arguments, checked, and the kernel for them.

    To find these out takes as long as a small loss.
    """

    __slots__ = ("conventions", "kernel", "spec", "state")

    def __init__(self, spec: Spec, conventions: Conventions) -> None:
        self.spec, self.conventions = spec, conventions
        self.state: tuple[object, ...] | None = None
        """what the kernel was prepared for"""
        self.kernel: tuple[kernels.Prepared, PK] | None = None


def _kernel_loss(
    spec: Spec,
    scores: Tensor,
    target: Tensor,
    conventions: Conventions,
    example_p_k: Tensor | None,
    last: Last | None,
) -> Tensor | None:
    """The loss by a kernel; None: the plain code is to compute it, or has the words for what is wrong."""
    backend = kernels.serving(scores)
    if backend is None or not isinstance(target, Tensor):
        return None
    rows = kernels.as_rows(scores, target)
    if rows is None:
        return None
    n = scores.shape[1]
    p_k = spec.p_k if example_p_k is None else p_ks.read_rows(example_p_k, target.shape)
    if p_k is None or p_k.values.requires_grad:
        return None
    settings = spec.operator.kernel_settings()
    if last is None or example_p_k is not None:
        kernel = _prepared(spec, conventions, n, p_k, backend)
    else:
        state = (backend, n, _compat.version_of(p_k.values), settings)  # P_K may be the user's own tensor
        if last.state != state:
            last.state, last.kernel = state, _prepared(spec, conventions, n, p_k, backend)
        kernel = last.kernel
    if kernel is None:
        return None

    def plain(scores: Tensor, target: Tensor, conventions: Conventions) -> Tensor:
        if spec.operator.kernel_settings() != settings:
            raise RuntimeError("operator: expected as it was in the forward pass, got one that was changed before the backward")
        return plain_loss(spec, scores, target, conventions, None if example_p_k is None else p_k.values)

    loss = kernels.loss(*kernel, *rows, conventions, plain)
    return loss.reshape(target.shape) if scores.ndim > 2 and loss is not None and loss.ndim else loss


def _prepared(
    spec: Spec, conventions: Conventions, n: int, p_k: PK, backend: kernels.Backend
) -> tuple[kernels.Prepared, PK] | None:
    """What a kernel is told of a loss of n classes, and P_K as it reads it; None: there is no kernel for it."""
    k, smoothing = p_k.values.shape[-1], conventions.label_smoothing
    m = candidates.number(spec.m, n, k)
    if k > (m or n) or (p_k.of == "class" and len(p_k.values) != n) or spec.is_cross_entropy(k):
        return None
    if smoothing and (conventions.weight is not None or not spec.added_smoothing(smoothing)):
        return None
    if not spec.uses_operator and n > MOST_CLASSES_WITHOUT_OPERATOR:
        return None
    description = spec.describe(n, k, m, smoothing)
    prepared = description if isinstance(description, str) else kernels.prepare(description, backend)
    return None if isinstance(prepared, str) else (prepared, kernels.readable_p_k(p_k))


def row_losses(spec: Spec, rows: Rows, k: int, p_k: PK) -> Float[Tensor, "*rows"]:
    """Steps 2 and 3 for whoever has found the candidates: the loss of each target, by a kernel or by the plain code."""

    def plain(scores: Tensor, cross_entropy: Tensor | None) -> Tensor:
        now = rows._replace(scores=scores, cross_entropy=cross_entropy)
        return spec.losses(now, spec.log_inclusion(now, k), p_k.at(rows.target))

    scores, cross_entropy = rows.scores, rows.cross_entropy
    one_target = scores.ndim == 2 and rows.shares is None and rows.padded is None
    needs_kernel = not spec.is_cross_entropy(k) or cross_entropy is None
    if one_target and needs_kernel and kernels.uses_native(scores) and not p_k.values.requires_grad:
        description = spec.describe(scores.shape[-1], k, None, rows.label_smoothing, cross_entropy is not None)
        if not isinstance(description, str):
            weights = p_k.at(rows.target)
            readable = kernels.readable_p_k(PK(weights, "all" if weights.ndim == 1 else "row"))
            losses = kernels.row_losses(description, scores, cross_entropy, rows.position, readable, plain)
            if losses is not None:
                return losses
    return plain(scores, cross_entropy)


@documented
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
        {scores}
        target: class indices without the class dimension, or class probabilities of the shape of ``scores``. For
            probabilities r the loss is ``sum_c r_c L(s, c)``; outside the candidates, L is softmax cross-entropy. With
            KSubset and networks with ``wires="target"`` each row is then ranked once for each candidate (the same holds for
            label smoothing).
        {p_k}
        {operator_network}
        {m}
        {top1_softmax_over}
        {reduction_ignore_index_weight}
        {label_smoothing}
        {example_p_k}

    Returns:
        {loss}

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> anyk.topk_cross_entropy(scores, torch.tensor([1, 3]), [0.5, 0.5], anyk.LapSum())
        tensor(0.7022)

    Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022, equations 2 and 4.
    """
    spec = CrossEntropySpec.of(p_k, _NETWORK if operator is None else operator, m, top1, softmax_over)
    return topk_loss(spec, scores, target, Conventions(reduction, ignore_index, weight, label_smoothing), example_p_k)


@documented
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

    Besides its cross-entropy an example costs at most 1 / q, and its gradient does not grow the further behind it is; the
    cross-entropy keeps some gradient where T has vanished. ``q=1`` is the expected error itself, ``q=0`` the limit
    ``-sum_j P_K(j) log T_j``. T above 1 (SoftSort, NeuralSort) counts as 1.

    Args:
        {scores}
        target: class indices without the class dimension, or class probabilities of the shape of ``scores``. For
            probabilities r the loss is ``sum_c r_c L(s, c)``; outside the candidates, L has its share of cross-entropy,
            and 1 / q in place of the sum (cross-entropy if q is 0).
        {p_k}
        {operator_lapsum}
        {m}
        {ce_weight_q}
        {reduction_ignore_index_weight}
        {ce_smoothing}
        {example_p_k}

    Returns:
        {loss}

    Example:
        >>> scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> anyk.topk_error(scores, torch.tensor([1, 3]), {1: 0.5, 2: 0.5})
        tensor(0.5667)
    """
    spec = ErrorSpec.of(p_k, _LAPSUM if operator is None else operator, m, ce_weight, q)
    conventions = Conventions(reduction, ignore_index, weight, label_smoothing)
    spec.check(conventions)
    return topk_loss(spec, scores, target, conventions, example_p_k)


def _read(given: Distribution | None, m: M) -> PK | None:
    p_k = None if given is None else p_ks.read(given)
    least = 1 if p_k is None else p_k.k
    if isinstance(m, str) and m != "auto":
        raise ValueError(f'm: expected an integer, "auto", or None for all, got {m!r}')
    if isinstance(m, str) or m is None:
        return p_k
    if checks.at_least_one("m", m) < least:
        raise ValueError(f"p_k: expected no k above m = {m}, got k = {least}")
    return p_k


def _own(p_k: PK | None) -> PK | None:
    """A copy that nobody else changes, unless it is learned."""
    if p_k is None or p_k.values.requires_grad:
        return p_k
    if p_k.values.is_meta:
        raise ValueError("p_k: expected numbers, got a tensor without any, on the device meta: give a list")
    return PK(p_k.values.clone(), p_k.of)


def _operator(given: Operator | str) -> Operator:
    """An operator that serves a loss, by itself or by its name."""
    operator = given if isinstance(given, Operator) else by_name(given)
    if not operator.has_probabilities:
        raise TypeError(f"operator: expected one with a probability for each rank, got {operator!r}, which has none")
    return operator


# Of the functions, made once: to make an nn.Module takes as long as a small loss.
_NETWORK, _LAPSUM = SortingNetwork("splitter"), LapSum()


class TopKLoss(CrossEntropyModule, ABC):
    """The losses over P_K, :class:`TopKCrossEntropyLoss` and :class:`TopKErrorLoss`: what :class:`LinearHead` and
    :class:`anyk.parallel.Sharded` accept.

    The arguments are attributes, and may be assigned at any time. P_K is not part of the ``state_dict``: loading a
    checkpoint does not change it, and one of ``torch.nn.CrossEntropyLoss`` fits. Converting the module to another precision
    does not change it either.

    Args:
        spec: internal, made by the subclasses from their arguments.
        conventions: internal as well: reduction, ignore_index, weight and label_smoothing.

    Example:
        >>> isinstance(anyk.TopKErrorLoss(5), anyk.TopKLoss)
        True
    """

    operator: Operator

    def __init__(self, spec: Spec, conventions: Conventions) -> None:
        super().__init__(conventions)
        spec.check(conventions)
        self._p_k = _own(spec.p_k)
        self.operator = spec.operator
        self.m = spec.m

    @property
    def p_k(self) -> Tensor | None:
        """A copy of P_K, (k,) or (n, k); to change it, assign whatever the class accepts."""
        return None if self._p_k is None else self._p_k.values.detach().clone()

    @p_k.setter
    def p_k(self, given: Distribution | None) -> None:
        self._p_k = _own(_read(given, self.m))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_last"}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "operator" and isinstance(value, str):
            value = _operator(value)
        self.__dict__.pop("_last", None)
        if name == "p_k":  # not nn.Module's: it would take a parameter for one of its own
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """What is measured of an example."""

    def arguments(self) -> tuple[Spec, Conventions]:
        """The arguments as they are now, checked."""
        spec, conventions = self.spec, self.conventions
        spec.check(conventions)
        return spec, conventions

    def forward(self, scores: Tensor, target: Tensor, *, example_p_k: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            spec, conventions = self.arguments()
            return topk_loss(spec, scores, target, conventions, example_p_k)
        last = self.__dict__.get("_last")
        # torch.func.functional_call changes these two behind the back of __setattr__. From where nn.Module keeps them: by
        # their names they take a microsecond.
        operator, weight = self._modules.get("operator"), self._buffers.get("weight")
        if last is None or last.spec.operator is not operator or last.conventions.weight is not weight:
            last = self.__dict__["_last"] = Last(*self.arguments())
            self._look_at(scores)
        return topk_loss(last.spec, scores, target, last.conventions, example_p_k, last)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert; P_K moves along, and keeps its values and its precision."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, device="cpu")).device
        if self._p_k is not None and device.type != "meta":
            dtype = torch.float32 if device.type == "mps" else self._p_k.values.dtype  # which has no float64
            self._p_k = PK(self._p_k.values.to(device, dtype), self._p_k.of)
        return self

    def extra_repr(self) -> str:
        own = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("m", *self._own_arguments))
        return f"p_k={self._p_k}, {own}, {super().extra_repr()}"

    #: the names of the arguments that only this family has
    _own_arguments: ClassVar[tuple[str, ...]]


def check_is_topk_loss(loss: object) -> None:
    if not isinstance(loss, TopKLoss):
        raise TypeError(f"loss: expected an anyk.TopKLoss, TopKCrossEntropyLoss or TopKErrorLoss, got {loss!r}")


@documented
class TopKCrossEntropyLoss(TopKLoss):
    """:func:`topk_cross_entropy` as a module: a drop-in for ``torch.nn.CrossEntropyLoss``.

    Args:
        {p_k}
        {operator_network}
        {m}
        {top1_softmax_over}
        {reduction_ignore_index_weight}
        {label_smoothing}

    {shape}

    Example:
        >>> criterion = anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5])
        >>> scores = torch.randn(8, 100, requires_grad=True)
        >>> criterion(scores, torch.randint(100, (8,))).backward()
    """

    _own_arguments = ("top1", "softmax_over")

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
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        spec = CrossEntropySpec.of(p_k, SortingNetwork("splitter") if operator is None else operator, m, top1, softmax_over)
        super().__init__(spec, Conventions(reduction, ignore_index, weight, label_smoothing))
        self.top1, self.softmax_over = top1, softmax_over

    @property
    def spec(self) -> CrossEntropySpec:
        return CrossEntropySpec(self._p_k, self.operator, self.m, self.top1, self.softmax_over)


@documented
class TopKErrorLoss(TopKLoss):
    """:func:`topk_error` as a module: a drop-in for ``torch.nn.CrossEntropyLoss``, bounded but for its share of cross-entropy.

    ``ce_weight`` may change during training: like every argument, it can be assigned at any time.

    Args:
        {p_k}
        {operator_lapsum}
        {m}
        {ce_weight_q}
        {reduction_ignore_index_weight}
        {ce_smoothing}

    {shape}

    Example:
        >>> criterion = anyk.TopKErrorLoss({1: 0.5, 5: 0.5})
        >>> scores = torch.randn(8, 100, requires_grad=True)
        >>> criterion(scores, torch.randint(100, (8,))).backward()
    """

    _own_arguments = ("ce_weight", "q")

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
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        spec = ErrorSpec.of(p_k, LapSum() if operator is None else operator, m, ce_weight, q)
        super().__init__(spec, Conventions(reduction, ignore_index, weight, label_smoothing))
        self.ce_weight, self.q = ce_weight, q

    @property
    def spec(self) -> ErrorSpec:
        return ErrorSpec(self._p_k, self.operator, self.m, self.ce_weight, self.q)
