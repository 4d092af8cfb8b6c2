"""What an operator is: a temperature, and some of five abilities, each of which is a class.

The public methods (``inclusion``, ``mask``, …) check, and are what the functions of :mod:`anyk.functional` call. A subclass
writes the abstract ones (``compute_mask``, …): thin shells around pure functions ``f(scores, …, temperature)``. These take
scores of any floating dtype with the entries of a row in the last dimension, of which -inf is padding, which gets 0 and no
gradient; +inf stands for the largest number; NaN makes its row NaN; and half precision is computed in float32.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyk import candidates, checks

OPERATORS: dict[str, Callable[..., Operator]] = {}
"""Classes of operators, and functions that make one, by name. ``class Mine(Inclusion, name="mine")`` adds one."""


class Operator(nn.Module, ABC):
    """A relaxation of sorting.

    Args:
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element
            or, for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``);
            an ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.
    """

    temperature: float | Tensor

    def __init_subclass__(cls, name: str | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if name is not None:
            register(name, cls)

    def __init__(self, temperature: float | Tensor = 1.0) -> None:
        super().__init__()
        temperature = checks.temperature(temperature)
        if isinstance(temperature, Tensor) and not isinstance(temperature, nn.Parameter):
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature

    def extra_repr(self) -> str:
        value = self.temperature
        learned = isinstance(value, Tensor) and value.requires_grad
        return f"temperature={'learned' if learned else 'tensor' if isinstance(value, Tensor) else value}"

    def require(self, ability: type[Operator]) -> None:
        """Raises an error that names the operators with this ability, if this one does not have it."""
        if not isinstance(self, ability):
            able = sorted(kind.__name__ for kind in _kinds_of(ability) if not inspect.isabstract(kind))
            word = ability.__name__.lower()
            raise TypeError(f"operator: {type(self).__name__} has no {word}: expected one of {', '.join(able)}")


def _kinds_of(ability: type[Operator]) -> set[type[Operator]]:
    return {ability}.union(*map(_kinds_of, ability.__subclasses__()))


class Inclusion(Operator):
    """Rows ``P[r, c]``, the probability that class c has rank r (r = 1 is the best), and for one target class y the
    **inclusion** ``T_j(y) = P[1, y] + … + P[j, y]``, the probability that y is among the first j."""

    descending = True
    """whether :meth:`compute_log_inclusion` wants the candidates in descending order"""
    at_most_1 = False
    """whether T is at most 1, roundings included"""

    def forward(self, scores: Float[Tensor, "*batch n"], k: int, hard: bool = False) -> Float[Tensor, "*batch k n"]:
        """The first k rows of P, in at least float32: ``P[..., r, c]`` is the probability that class c has rank r + 1.

        The running sum of a column is the :meth:`inclusion` of that class. -inf marks padding, which gets probability 0 and no
        gradient. ``hard=True`` gives exact permutation rows in the forward pass, with the gradient of the relaxed ones.
        """
        scores = checks.scores(scores)
        k = checks.count("k", k, 1, scores.shape[-1], "the number of classes")
        checks.enough_entries(scores, k)
        matrix = self.compute_matrix(scores, k)
        if hard:
            best = candidates.best(scores, k)[..., None]
            matrix = torch.zeros_like(matrix).scatter(-1, best, 1) + (matrix - matrix.detach())
        return matrix

    def inclusion(self, scores: Float[Tensor, "*batch n"], target: Int[Tensor, "*batch"], k: int) -> Float[Tensor, "*batch k"]:
        """The probabilities T that the target is among the first 1, …, k classes; -inf marks padding."""
        return self.log_inclusion(scores, target, k).exp()

    def log_inclusion(
        self, scores: Float[Tensor, "*batch n"], target: Int[Tensor, "*batch"], k: int
    ) -> Float[Tensor, "*batch k"]:
        """The logarithm of :meth:`inclusion`, which stays finite, with a gradient, where T itself underflows."""
        scores = checks.scores(scores)
        n = scores.shape[-1]
        k = checks.count("k", k, 1, n, "the number of classes")
        target = checks.class_indices(target, scores.shape[:-1], n)
        checks.enough_entries(scores, k)
        kept, position = candidates.keep(scores, target, n, descending=self.descending)
        return self.compute_log_inclusion(kept, position, k)

    @abstractmethod
    def compute_matrix(self, scores: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        """The first k rows of P, in at least float32."""

    @abstractmethod
    def compute_log_inclusion(
        self, scores: Float[Tensor, "*batch m"], position: Int[Tensor, "*batch"], k: int
    ) -> Float[Tensor, "*batch k"]:
        """log T of the target, the candidate at ``position``, in at least float32. The candidates are in descending order if
        ``descending``; the target is not padding."""

    def compute_product(
        self, scores: Float[Tensor, "*batch n"], values: Float[Tensor, "*batch n d"], k: int
    ) -> Float[Tensor, "*batch k d"]:
        """``P @ values``, in at least float32: the derivatives of :func:`anyk.select_topk` are those of this."""
        matrix = self.compute_matrix(scores, k)
        with no_autocast(scores.device):
            return matrix @ values.to(matrix.dtype)

    def kernel(self, m: int, k: int) -> tuple[Any, ...] | None:
        """What the kernels need to know of the operator for losses over m candidates; None: they do not have it. Not inherited:
        what a subclass computes is its own."""
        return None


class Mask(Operator):
    """A soft choice of k of n."""

    real_k = False
    """whether k may be a real number, or a tensor with one for each row"""

    def mask(self, scores: Float[Tensor, "*batch n"], k: int | float | Tensor) -> Float[Tensor, "*batch n"]:
        """The soft top-k mask, of the dtype of the scores: entries between 0 and 1 that sum to k. See :func:`anyk.soft_topk`.

        -inf is never chosen; a row with fewer than k other entries has all of them. k is between 0 and n: an integer; where
        ``real_k`` is True, also a real number, or a tensor with one for each row.
        """
        scores = checks.scores(scores)
        number = checks.how_many(k, scores)
        if isinstance(number, Tensor) and not self.real_k:
            shown = f"a tensor of shape {tuple(k.shape)}" if isinstance(k, Tensor) else k
            raise TypeError(f"k: expected an integer for {type(self).__name__}, which has no mask for a real k, got {shown}")
        if not scores.numel() or (isinstance(number, int) and number in (0, scores.shape[-1])):
            return _all_or_none(scores, isinstance(number, int) and number > 0)
        return self.compute_mask(scores, number)

    @abstractmethod
    def compute_mask(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch n"]:
        """The mask, in the dtype of the scores. k is an int, 0 < k < n, or (``real_k``) numbers (..., 1), one for each row,
        which may be 0, and as many as there are or more."""


class Threshold(Operator):
    """The threshold that lets k of n through."""

    def threshold(self, scores: Float[Tensor, "*batch n"], k: int | float | Tensor) -> Float[Tensor, "*batch"]:
        """The score at which the mask is one half, at least float32. See :func:`anyk.soft_quantile`."""
        scores = checks.scores(scores)
        return self.compute_threshold(scores, checks.how_many(k, scores))

    @abstractmethod
    def compute_threshold(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch"]:
        """The threshold. k as in :meth:`Mask.compute_mask`, but 0 and n may come too: the largest and the smallest score."""


class Ranks(Operator):
    """Soft ranks."""

    def ranks(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """The rank of each entry, 1 is the *largest*, in at least float32; -inf comes last, in the order in which it stands.
        See :func:`anyk.soft_rank`."""
        return self.compute_ranks(checks.scores(scores))

    @abstractmethod
    def compute_ranks(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """The ranks."""


class Sort(Operator):
    """Soft sorting."""

    def sort(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """The scores in *descending* order, in their dtype; -inf comes last, as it is. See :func:`anyk.soft_sort`."""
        return self.compute_sort(checks.scores(scores))

    @abstractmethod
    def compute_sort(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """The scores in descending order."""


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast would take products in half precision."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext()


def _all_or_none(scores: Tensor, everything: bool) -> Tensor:
    """The mask that needs no operator, with a gradient of zero; NaN for rows with a NaN."""
    mask = (scores > -torch.inf) if everything else torch.zeros_like(scores, dtype=torch.bool)
    nothing = torch.where(scores.isnan().any(-1, keepdim=True), torch.nan, 0.0).to(scores.dtype)
    return mask.to(scores.dtype) + torch.where(mask & ~mask, scores, nothing)


def register(name: str, make: Callable[..., Operator]) -> None:
    """Add an operator to those that can be given by name. The same class once more, from a notebook cell run twice, takes its
    place."""
    other = OPERATORS.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (make.__module__, make.__qualname__):
        raise ValueError(f"name: expected one that is free, got {name!r}, which {other.__qualname__} has")
    OPERATORS[name] = make
    cached.cache_clear()


def by_name(name: str | Operator, **settings: Any) -> Operator:
    """A new operator from its name; an operator is returned as it is.

    Args:
        name: the name of an operator or of a network.
        settings: the arguments of the operator's class, such as ``temperature``.

    Example:
        >>> anyk.operators.by_name("lapsum", temperature=0.5)
        LapSum(temperature=0.5)
    """
    if isinstance(name, Operator):
        return name
    if not isinstance(name, str):
        shown = f"the class {name.__name__}" if isinstance(name, type) else repr(name)
        hint = "; a temperature is given as temperature=" if isinstance(name, numbers.Real) else ""
        raise TypeError(f'operator: expected an operator such as anyk.LapSum(), or a name such as "lapsum", got {shown}{hint}')
    checks.one_of("operator", name, OPERATORS)
    return OPERATORS[name](**settings)


#: for operators that nobody else has: to make one takes longer than a small mask
cached = lru_cache(maxsize=64, typed=True)(by_name)
