"""What an operator is: scores in, the probability that a class has rank r (or is among the first j) out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyk import candidates, checks, kernels
from anyk.candidates import real_mask
from anyk.kernels.loss_description import OperatorDescription
from anyk.registry import OPERATORS, register

# Scores so many temperatures apart are out of each other's reach.
FARTHEST = 1e30
# Stands in for log(0) where a true -inf would give inf - inf in a backward pass; far below any log-probability.
LOG_ZERO = -1e37


class Operator(nn.Module, ABC):
    """A relaxation of "sort descending".

    For scores s it gives rows ``P[r, c]``, the probability that class c has rank r (r = 1 is the best), and for one
    target class y the **inclusion** ``T_j(y) = P[1, y] + … + P[j, y]``, the probability that y is among the first j.

    A subclass implements both for temperature 1 and plain rows, as ``_matrix`` and ``_log_inclusion``. This class
    divides the scores by the temperature, shifts them, checks them, and takes care of half precision and of padding.
    ``class Mine(Operator, name="mine")`` registers it: wherever an operator is expected, ``"mine"`` can be given.

    Args:
        temperature: the smaller, the closer to exact sorting. A positive number, or a one-element tensor (an ``nn.Parameter``
            is learned). May be assigned at any time.
    """

    #: False when the operator wants the classes in the order they come in.
    sorts = True
    #: scores are divided by ``temperature ** scale_power``
    scale_power = 1.0
    #: whether it has P and T, and so serves the losses
    has_probabilities = True
    #: whether k of a mask may be a real number or a tensor
    real_k = False
    #: the number by which the kernels know its mask, ranks and sort (not inherited, as what a subclass computes is its own)
    mask_code: int | None = None
    #: the least precision to compute in
    dtype = torch.float32
    #: the number by which the kernels know the operator in a loss (not inherited either)
    kernel_code: int | None = None

    def __init_subclass__(cls, name: str | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if name is not None:
            register(OPERATORS, name, cls)

    def __init__(self, temperature: float | Tensor = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "temperature":
            return super().__setattr__(name, value)
        value = checks.temperature(value)
        for registry in (self._parameters, self._buffers):
            registry.pop("temperature", None)
        if "temperature" in self.__dict__:
            object.__delattr__(self, "temperature")
        if isinstance(value, nn.Parameter):
            self.register_parameter("temperature", value)
        elif isinstance(value, Tensor):
            self.register_buffer("temperature", value)
        else:
            object.__setattr__(self, "temperature", value)

    def at(self, temperature: float | Tensor) -> Operator:
        """The same operator at another temperature."""
        other = copy.copy(self)
        other._parameters, other._buffers = dict(self._parameters), dict(self._buffers)
        other.temperature = temperature
        return other

    def extra_repr(self) -> str:
        value = self.temperature
        if not isinstance(value, Tensor):
            return f"temperature={value}"
        return f"temperature={'learned' if value.requires_grad else 'tensor'}"

    def forward(self, scores: Float[Tensor, "*batch n"], k: int, hard: bool = False) -> Float[Tensor, "*batch k n"]:
        """The first k rows of P. The running sum of a column is the :meth:`inclusion` of that class.

        Args:
            scores: class scores; -inf marks padding, which gets probability 0 and no gradient.
            k: number of ranks.
            hard: True gives exact permutation rows in the forward pass and the gradient of the relaxed ones.

        Returns:
            P: ``P[..., r, c]`` is the probability that class c has rank r + 1. At least float32.
        """
        scores = checks.scores(scores)
        k = checks.count("k", k, 1, scores.shape[-1], "the number of classes")
        real = real_mask(scores)
        checks.real_classes(real, k)
        scaled = self._scaled(scores, None, real)
        probabilities = self._matrix(scaled, real, k).to(checks.working_dtype(scores))
        if real is not None:
            probabilities = probabilities.masked_fill(~real[..., None, :], 0)
        if hard:
            best = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k, None]
            exact = torch.zeros_like(probabilities).scatter(-1, best, 1)
            probabilities = exact + (probabilities - probabilities.detach())
        return probabilities

    def inclusion(self, scores: Float[Tensor, "*batch n"], target: Int[Tensor, "*batch"], k: int) -> Float[Tensor, "*batch k"]:
        """The probability that the target is among the first 1, …, k classes.

        Args:
            scores: class scores; -inf marks padding.
            target: class indices.
            k: number of ranks.

        Returns:
            T: ``T[..., j]`` is the running sum of the target's column of P over the first j + 1 ranks.
        """
        return self.log_inclusion(scores, target, k).exp()

    def log_inclusion(
        self, scores: Float[Tensor, "*batch n"], target: Int[Tensor, "*batch"], k: int
    ) -> Float[Tensor, "*batch k"]:
        """The logarithm of :meth:`inclusion`, which stays finite, with a gradient, where T itself underflows."""
        scores = checks.scores(scores)
        n = scores.shape[-1]
        k = checks.count("k", k, 1, n, "the number of classes")
        target = checks.class_indices(target, scores.shape[:-1], n)
        classes, position = candidates.choose(scores, target, sort=self.sorts)
        scores = scores.gather(-1, classes)
        real = real_mask(scores)
        checks.real_classes(real, k)
        return self.candidate_log_inclusion(scores, position, real, k)

    def candidate_log_inclusion(
        self,
        scores: Float[Tensor, "*batch m"],
        position: Int[Tensor, "*batch"],
        real: Bool[Tensor, "*batch m"] | None,
        k: int,
    ) -> Float[Tensor, "*batch k"]:
        """:meth:`log_inclusion` for scores that are in descending order already (if ``sorts``).

        Args:
            scores: the candidates' scores.
            position: where the target stands among them.
            real: which are not padding; None means all.
            k: number of ranks.
        """
        return self._log_inclusion(self._scaled(scores, position, real), position, real, k).to(checks.working_dtype(scores))

    def every_log_inclusion(
        self, scores: Float[Tensor, "*batch m"], real: Bool[Tensor, "*batch m"] | None, k: int
    ) -> Float[Tensor, "*batch m k"]:
        """:meth:`candidate_log_inclusion` of every candidate, for targets with shares; that of padding is any number.

        Where one ranking of the row serves all of them, a subclass writes ``_every_log_inclusion``.
        """
        if self._ranks_all_at_once():
            # All of them are targets, far ones as well: float64 has the digits of all.
            exact = scores if scores.device.type == "mps" else scores.double()
            found = self._every_log_inclusion(self._scaled(exact, None, real), real, k)
            dtype = checks.working_dtype(scores)
            # In float32 what is farther would be -inf, and a share of 0 times that is not a number.
            return found.clamp(min=torch.finfo(dtype).min).to(dtype)
        position = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        if real is not None:
            position = candidates.instead_of_padding(position, real)
            real = real[..., None, :].expand(*real.shape, real.shape[-1])
        return self.candidate_log_inclusion(scores[..., None, :].expand(*scores.shape, scores.shape[-1]), position, real, k)

    def kernel_description(self, m: int, k: int) -> OperatorDescription | str:
        """The operator in plain numbers, for the kernels; or why there is no kernel for it."""
        code = vars(type(self)).get("kernel_code")
        if code is None:
            return f"the operator {type(self).__name__} has none"
        if isinstance(self.temperature, Tensor):
            return "its temperature is a tensor"
        scale = float(self.temperature) ** self.scale_power
        if not 1e-25 < scale < 1e25:  # a kernel has -1e30 for padding, which must not come back into reach
            return "its temperature is too extreme"
        return OperatorDescription(code, scale)

    def kernel_settings(self) -> tuple[object, ...]:
        """What :meth:`kernel_description` depends on: to notice that something was assigned."""
        return (self.__dict__.get("temperature"),)  # a tensor is not there

    def mask(self, scores: Float[Tensor, "*batch n"], k: int | float | Tensor) -> Float[Tensor, "*batch n"]:
        """The soft top-k mask: entries between 0 and 1 that sum to k. See :func:`anyk.soft_topk`.

        Args:
            scores: -inf marks padding, which is never chosen.
            k: between 0 and n: an integer; where ``real_k`` is True, also a real number, or a tensor with one for each row.

        Returns:
            The mask, of the dtype of the scores. A row with fewer than k entries that are not padding has all of them.
        """
        self._require("mask")
        scores = checks.scores(scores)
        given, k = k, checks.how_many(k, scores)
        if isinstance(k, Tensor) and not self.real_k:
            shown = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else given
            raise TypeError(
                f"k: expected an integer for {type(self).__name__}, which has no mask for a real k or a tensor, got {shown}"
            )
        mask = self._mask_by_kernel(scores, k)
        return self._plain_mask(scores, k) if mask is None else mask

    def _mask_by_kernel(self, scores: Tensor, k: int | Tensor) -> Tensor | None:
        """The mask by a kernel; None: there is none."""
        code = vars(type(self)).get("mask_code")
        if code is None or not kernels.uses_native(scores):
            return None
        operator, scores = self._apart(scores, k)
        return kernels.mask(code, scores, k, operator.temperature, lambda: operator._plain_mask(scores, k))

    def _apart(self, scores: Tensor, k: int | Tensor = 0) -> tuple[Operator, Tensor]:
        """The operator and the scores for a kernel, whose second derivative is that of the plain code.

        Where k or the temperature are tensors, all are views: if one was computed from another, the gradient by that one must
        not run through this one as well.
        """
        temperature = checks.temperature(self.temperature)
        if not isinstance(temperature, Tensor):
            return self, scores.view_as(scores) if isinstance(k, Tensor) else scores
        return self.at(temperature.view_as(temperature)), scores.view_as(scores)

    def _plain_mask(self, scores: Tensor, k: int | Tensor) -> Tensor:
        dtype = scores.dtype
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.clamp(max=torch.finfo(scores.dtype).max)  # +inf is a score, too; the difference of two is not
        real = real_mask(scores)
        trivial = isinstance(k, int) and k in (0, scores.shape[-1])
        mask = torch.full_like(scores, float(k > 0)) if trivial else self._mask(scores, real, k)
        if real is not None:
            mask = mask.masked_fill(~real, 0)
        if trivial or real is not None:
            mask = mask + _nothing(scores, real)
        return mask.to(dtype)

    def ranks(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """The rank of each entry, 1 is the largest. See :func:`anyk.soft_rank`. Padding (-inf) comes after all others."""
        self._require("ranks")
        scores = checks.scores(scores)
        ranks = self._by_kernel("ranks", scores)
        return self._plain_ranks(scores) if ranks is None else ranks

    def _by_kernel(self, kind: Literal["ranks", "sort"], scores: Tensor) -> Tensor | None:
        """Ranks or sort by a kernel, in float32; None: there is none."""
        code = vars(type(self)).get("mask_code")
        if code is None or not has(type(self), kind) or not kernels.uses_native(scores):
            return None
        operator, scores = self._apart(scores)
        plain = operator._plain_ranks if kind == "ranks" else operator._plain_sort
        return kernels.ranking(code, kind, scores, operator.temperature, lambda: plain(scores))

    def _plain_ranks(self, scores: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        # +inf is a score, too
        scores = scores.clamp(max=torch.finfo(scores.dtype).max)
        real = real_mask(scores)
        ranks = self._ranks(scores, real).to(scores.dtype)
        if real is None:
            return ranks
        number = real.sum(-1, keepdim=True)
        last = number + (~real).cumsum(-1)  # in the order in which they come
        return torch.where(real, ranks, last.to(ranks.dtype))

    def sort(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """The scores in descending order. See :func:`anyk.soft_sort`. Padding (-inf) comes last, as it is."""
        self._require("sort")
        scores = checks.scores(scores)
        ordered = self._by_kernel("sort", scores)
        return self._plain_sort(scores) if ordered is None else ordered

    def _plain_sort(self, scores: Tensor) -> Tensor:
        dtype = torch.promote_types(scores.dtype, torch.float32)
        real = real_mask(scores)
        ordered = self._sort(scores.to(dtype), real)
        if real is None:
            return ordered
        place = torch.arange(scores.shape[-1], device=scores.device)
        return torch.where(place < real.sum(-1, keepdim=True), ordered, -torch.inf)

    def threshold(self, scores: Float[Tensor, "*batch n"], k: int | float | Tensor) -> Float[Tensor, "*batch"]:
        """The score at which the mask is one half. See :func:`anyk.soft_quantile`."""
        self._require("threshold")
        scores = checks.scores(scores)
        k = checks.how_many(k, scores)
        code = vars(type(self)).get("mask_code")
        if code is not None and kernels.uses_native(scores):
            operator, scores = self._apart(scores, k)
            found = kernels.mask(code, scores, k, operator.temperature, lambda: operator._plain_threshold(scores, k), True)
            if found is not None:
                return found
        return self._plain_threshold(scores, k)

    def _plain_threshold(self, scores: Tensor, k: int | Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return self._threshold(scores, real_mask(scores), k)

    def _require(self, what: str) -> None:
        """Raise if the operator has no such function, with those that have it."""
        if has(type(self), what):
            return
        able = sorted(kind.__name__ for kind in Operator.__subclasses__() if has(kind, what))
        raise TypeError(f"operator: {type(self).__name__} has no {what}: expected one of {', '.join(able)}")

    def _mask(self, scores: Tensor, real: Tensor | None, k: int | Tensor) -> Tensor:
        """The mask, from scores of at least float32 and 0 < k < n; what it says of padding is not looked at."""
        raise NotImplementedError

    def _ranks(self, scores: Tensor, real: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _sort(self, scores: Tensor, real: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _threshold(self, scores: Tensor, real: Tensor | None, k: int | Tensor) -> Tensor:
        raise NotImplementedError

    def _relative(self, scores: Tensor, reference: Tensor, clamp: bool = True) -> Tensor:
        """Scores less a reference, over the temperature; not ``clamp``: -inf where that overflows."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            checks.temperature(temperature)
            temperature = temperature.to(scores.dtype).reshape(())
        relative, most = (scores - reference) / temperature, farthest(scores.dtype)
        return relative.clamp(-most, most) if clamp else relative

    def _overflows(self, best: Tensor) -> bool:
        """Whether relative scores may overflow so that it matters, as far as can be seen by ``best``, those of the best of each
        row: upwards, or anywhere if the temperature is learned. To clamp them all takes a tenth of the time of a mask."""
        if isinstance(self.temperature, Tensor) or not checks.readable(best):
            return True
        return not bool((best < farthest(best.dtype)).all())

    def _close(self, ordered: Tensor, most: float) -> Tensor:
        """Scores in descending order, over the temperature, from 0 downwards, with no two neighbours more than ``most`` apart.

        In float64, so that each group of scores has its digits, however far apart the groups are.
        """
        ordered = ordered.double()
        steps = self._relative(ordered[..., :-1], ordered[..., 1:]).clamp(max=most)
        return -torch.nn.functional.pad(steps.cumsum(-1), (1, 0))

    def _scaled(self, scores: Tensor, position: Tensor | None, real: Tensor | None) -> Tensor:
        """Scores over temperature, shifted so that what matters is near zero, where floats are dense."""
        scores = scores.to(torch.promote_types(scores.dtype, self.dtype))
        reference = scores.detach()
        if position is not None:
            reference = candidates.at(reference, position)
        else:  # not the maximum: one class far ahead would cost the others their digits
            reference = (reference if real is None else reference.masked_fill(~real, torch.nan)).nanmedian(-1).values
        shifted = scores - reference[..., None]
        if real is not None:
            shifted = shifted.masked_fill(~real, 0)
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            checks.temperature(temperature)  # an optimiser may have taken it below zero
            temperature = temperature.to(scores.dtype).reshape(())
        scaled = shifted / temperature**self.scale_power
        # A low score over a small temperature is a number. Not clamp, which would stop the NaN of a score that has overflown.
        least = torch.finfo(scaled.dtype).min
        return torch.where(scaled < least, least, scaled)

    @abstractmethod
    def _matrix(
        self, scores: Float[Tensor, "*batch n"], real: Bool[Tensor, "*batch n"] | None, k: int
    ) -> Float[Tensor, "*batch k n"]:
        """P at temperature 1. ``real`` marks the classes that are not padding; None means all of them."""

    @abstractmethod
    def _log_inclusion(
        self,
        scores: Float[Tensor, "*batch m"],
        position: Int[Tensor, "*batch"],
        real: Bool[Tensor, "*batch m"] | None,
        k: int,
    ) -> Float[Tensor, "*batch k"]:
        """log T at temperature 1. The scores come in descending order (if ``sorts``), relative to the target's."""

    def _ranks_all_at_once(self) -> bool:
        """Whether it has an ``_every_log_inclusion``: its own, not an inherited one, as what a subclass computes is its own."""
        return "_every_log_inclusion" in vars(type(self))

    def _every_log_inclusion(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        """log T of every class, (..., m, k), at temperature 1."""
        raise NotImplementedError


def log_running_sum(log_probabilities: Float[Tensor, "*batch k m"], position: Int[Tensor, "*batch"]) -> Tensor:
    """log T from log P: the target's column, summed over the ranks."""
    place = position[..., None, None].expand(*log_probabilities.shape[:-1], 1)
    return log_cumulative(log_probabilities.gather(-1, place).squeeze(-1))


def log_running_sums(log_probabilities: Float[Tensor, "*batch k m"], real: Tensor | None) -> Float[Tensor, "*batch m k"]:
    """log T of all classes from log P; 0 for padding."""
    columns = log_probabilities.mT
    return log_cumulative(columns if real is None else columns.masked_fill(~real[..., None], 0))


def log_cumulative(column: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """The logarithm of the running sum. Not logcumsumexp: its second derivative is NaN where a gradient is zero."""
    k = column.shape[-1]
    later = torch.full((k, k), -torch.inf, dtype=column.dtype, device=column.device).triu(1)
    return (column[..., None, :] + later).logsumexp(-1)


def rows_from_inclusion(inclusion: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch k n"]:
    """P[r] = T_r - T_(r-1)."""
    return inclusion - torch.nn.functional.pad(inclusion[..., :-1, :], (0, 0, 1, 0))


def in_order(
    scores: Float[Tensor, "*batch n"], real: Bool[Tensor, "*batch n"] | None
) -> tuple[Float[Tensor, "*batch n"], Bool[Tensor, "*batch n"] | None, Int[Tensor, "*batch n"]]:
    """Scores in descending order, padding last; with the mask in the same order, and the classes that stand there."""
    keys = scores.detach() if real is None else scores.detach().masked_fill(~real, -torch.inf)
    classes = keys.sort(dim=-1, descending=True, stable=True).indices
    return scores.gather(-1, classes), None if real is None else real.gather(-1, classes), classes


def by_class(rows: Float[Tensor, "*batch k n"], classes: Int[Tensor, "*batch n"]) -> Float[Tensor, "*batch k n"]:
    """Undoes :func:`in_order` for the columns of P."""
    return torch.zeros_like(rows).scatter(-1, classes[..., None, :].expand_as(rows), rows)


def has(kind: type[Operator], what: str) -> bool:
    """Whether a kind of operator has ``"mask"``, ``"ranks"``, ``"sort"`` or ``"threshold"``."""
    return getattr(kind, f"_{what}") is not getattr(Operator, f"_{what}")


def _nothing(scores: Tensor, real: Tensor | None) -> Tensor:
    """0 with a graph; NaN for rows with a NaN."""
    # not 0 times the sum, which may overflow
    return (0 * (scores if real is None else scores.masked_fill(~real, 0))).sum(-1, keepdim=True)


def farthest(dtype: torch.dtype) -> float:
    """How far apart scores over a small temperature may be: differences and short sums are numbers, too."""
    return float(torch.finfo(dtype).max ** 0.9)


def expected_ranks(matrix: Tensor) -> Tensor:
    """The mean rank of each class, from all rows of P."""
    rank = torch.arange(1, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device)
    return (rank[:, None] * matrix).sum(-2)


def expected_sort(operator: Operator, scores: Tensor, real: Tensor | None) -> Tensor:
    """Each rank's mean score under P: O(n^2)."""
    return expected_scores(operator._matrix(operator._scaled(scores, None, real), real, scores.shape[-1]), scores, real)


def expected_scores(matrix: Tensor, scores: Tensor, real: Tensor | None) -> Tensor:
    """P times the scores."""
    matrix = matrix.to(scores.dtype)
    if real is not None:
        matrix, scores = matrix.masked_fill(~real[..., None, :], 0), scores.masked_fill(~real, 0)
    return (matrix * scores[..., None, :]).sum(-1)  # not @, which autocast would do in half precision
