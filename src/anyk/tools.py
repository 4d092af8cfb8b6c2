"""Differentiable top-k, rank, sort, quantile and sampling: scores in, a tensor of the same shape out.

Each function brings the scores into one form (the dimension last, excluded entries at -inf, the best first) and asks an
operator, which does the work: :mod:`anyk.operators`.
"""

from __future__ import annotations

import contextlib
import numbers
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyk import autograd, checks, kernels
from anyk.candidates import real_mask
from anyk.operators import KSubset, Operator, by_name
from anyk.registry import NETWORKS, OPERATORS

__all__ = ["sample_k_subset", "select_topk", "soft_quantile", "soft_rank", "soft_sort", "soft_topk"]

Method = Literal["exact", "gumbel"]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def soft_topk(
    scores: Float[Tensor, "..."],
    k: int | float | Tensor,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    *,
    dim: int = -1,
    largest: bool = True,
    hard: bool = False,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """A mask that picks k of n, differentiable in the scores.

    Entries lie between 0 and 1 and sum to k. The smaller the temperature t, the closer they are to 0 and 1. With LapSum,
    ``mask_c = F((s_c - b) / t)``, with F the Laplace distribution function and b such that the mask sums to k.

    Args:
        scores: of any shape. -inf is never chosen (with ``largest=False``, +inf), and has no gradient; NaN makes its row NaN.
        k: how many, between 0 and n: an integer; for LapSum, Permutahedron and SinkhornSort also a real number or a tensor of
            the shape of the rows, which has a gradient. A row with fewer entries that may be chosen gets all of them.
        operator: the relaxation, or its name: LapSum, Permutahedron (sparse: true zeros and ones), KSubset, SinkhornSort or
            SortingNetwork.
        temperature: t, for an operator given by name; an ``Operator`` has its own.
        dim: the dimension along which k are chosen.
        largest: False picks the k smallest.
        hard: True gives k ones and otherwise zeros in the forward pass, ties going to the lower index, and the gradient of
            the soft mask. k must be an integer.
        where: which entries may be chosen; None means all. Of a shape that broadcasts to that of ``scores``.

    Returns:
        The mask, of the shape and dtype of ``scores``.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> anyk.soft_topk(scores, 2)
        tensor([0.3033, 0.8884, 0.6967, 0.1116])
        >>> anyk.soft_topk(scores, 2, hard=True)
        tensor([0., 1., 1., 0.])
    """
    operator = _operator(operator, temperature)
    if checks.flag("hard", hard) and not (k.dtype in _INTEGERS if isinstance(k, Tensor) else isinstance(k, numbers.Integral)):
        raise TypeError(f"k: expected an integer with hard=True, got {k!r}")
    rows = _rows(scores, dim, where, checks.flag("largest", largest))
    mask = operator.mask(rows, k)
    if hard:
        exact = _k_hot(rows, k).to(mask.dtype)  # type: ignore[arg-type]
        mask = exact + (mask - mask.detach())
    return _moved(mask.to(scores.dtype), -1, dim)


def soft_rank(
    scores: Float[Tensor, "..."],
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    *,
    dim: int = -1,
    descending: bool = True,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """The rank of each entry, starting at 1, differentiable in the scores.

    With LapSum, ``rank_c = 1 + sum_(j != c) F((s_j - s_c) / t)``, with F the Laplace distribution function; the ranks sum to
    n (n + 1) / 2.

    Args:
        scores: of any shape. -inf (+inf if ascending) and what ``where`` excludes come after all others.
        operator: the relaxation, or its name: LapSum or Permutahedron; SinkhornSort or SortingNetwork, which build the n x n
            matrix P and cost O(n^2) or more.
        temperature: t, for an operator given by name; an ``Operator`` has its own.
        dim: the dimension that is ranked.
        descending: True gives rank 1 to the largest.
        where: which entries are ranked; None means all.

    Returns:
        The ranks, of the shape of ``scores``, in at least float32.

    Example:
        >>> anyk.soft_rank(torch.tensor([1.0, 3.0, 2.0, 0.0]), temperature=0.1)
        tensor([3.0000, 1.0000, 2.0000, 4.0000])
    """
    rows = _rows(scores, dim, where, checks.flag("descending", descending))
    return _moved(_operator(operator, temperature).ranks(rows), -1, dim)


def soft_sort(
    scores: Float[Tensor, "..."],
    operator: Operator | str = "permutahedron",
    temperature: float | Tensor = 1.0,
    *,
    dim: int = -1,
    descending: bool = True,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """The scores in sorted order, differentiable.

    Permutahedron projects onto the hull of all permutations of the scores, see there; all others give ``P @ scores``, the mean
    score of each rank.

    Args:
        scores: of any shape. -inf (+inf if ascending) and what ``where`` excludes come last.
        operator: the relaxation, or its name: Permutahedron; NeuralSort, SoftSort, SinkhornSort or SortingNetwork, which
            build the n x n matrix P and cost O(n^2) or more.
        temperature: t, for an operator given by name; an ``Operator`` has its own. With Permutahedron the result is exact if no
            two neighbours are more than 1 / t apart.
        dim: the dimension that is sorted.
        descending: False sorts in ascending order.
        where: which entries are sorted; None means all.

    Returns:
        The sorted scores, of the shape and dtype of ``scores``.

    Example:
        >>> anyk.soft_sort(torch.tensor([1.0, 3.0, 2.9, 0.0]), temperature=0.5)
        tensor([3.0000, 2.9000, 1.0000, 0.0000])
    """
    rows = _rows(scores, dim, where, checks.flag("descending", descending))
    ordered = _operator(operator, temperature).sort(rows)
    return _moved((ordered if descending else -ordered).to(scores.dtype), -1, dim)


def soft_quantile(
    scores: Float[Tensor, "..."],
    q: float | Tensor,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    *,
    dim: int = -1,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """The q-quantile of the scores, differentiable: the threshold of a soft top-k mask that sums to (1 - q) n.

    Its limit for small temperatures is numpy's ``"averaged_inverted_cdf"``: where (1 - q) n is an integer, midway between two
    scores. q = 0 and q = 1 are the minimum and the maximum. Near them the threshold of a soft mask lies outside the range of
    the scores, by some temperatures: a tail wants a temperature far below the gaps between the scores.

    Args:
        scores: of any shape. -inf and what ``where`` excludes do not count.
        q: between 0 and 1; a tensor has one value for each row, and gets a gradient.
        operator: one with a unique threshold, or its name: LapSum.
        temperature: t, for an operator given by name; an ``Operator`` has its own.
        dim: the dimension to reduce.
        where: which entries count; None means all.

    Returns:
        The quantiles, of the shape of ``scores`` without ``dim``, in the dtype of ``scores``.

    Example:
        >>> anyk.soft_quantile(torch.tensor([1.0, 3.0, 2.0, 0.0, 4.0]), 0.5, temperature=0.1)
        tensor(2.)
    """
    rows = _rows(scores, dim, where, True)
    if isinstance(q, Tensor):
        q = checks.one_for_each_row("q", q, rows.shape[:-1], 0, 1, "1")
    else:
        checks.between("q", q, 0, 1)
    real = real_mask(rows)
    number: Any = rows.shape[-1] if real is None else real.sum(-1).to(checks.working_dtype(rows))
    k = number - q * number  # not (1 - q) number: 1 - 0.9 is not a tenth, and k would miss its integer
    return _operator(operator, temperature).threshold(rows, k).to(scores.dtype)


def select_topk(
    values: Float[Tensor, "*batch n d"],
    scores: Float[Tensor, "*batch n"],
    k: int,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    *,
    where: Bool[Tensor, "*batch n"] | None = None,
) -> tuple[Float[Tensor, "*batch k d"], Int[Tensor, "*batch k"]]:
    """The k rows of ``values`` with the best scores, best first, with a gradient to the scores.

    The forward pass selects exactly. The backward pass is that of ``P @ values``, with P the operator's rank probabilities,
    recomputed in chunks of the batch. So entries that were not selected get a gradient, too.

    Args:
        values: (..., n, d), the rows to select from.
        scores: (..., n), one for each row of ``values``. -inf is never chosen; at least k must be above it.
        k: how many, between 1 and n.
        operator: the relaxation, or its name; any but Permutahedron.
        temperature: t, for an operator given by name; an ``Operator`` has its own.
        where: which rows may be chosen; None means all. There must be k of them.

    Returns:
        The selected rows, (..., k, d), of the dtype of ``values``, and their indices, (..., k).

    Example:
        >>> values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        >>> chosen, indices = anyk.select_topk(values, torch.tensor([0.5, 2.0, 1.0]), 2)
        >>> chosen, indices
        (tensor([[ 2., 20.],
                [ 3., 30.]]), tensor([1, 2]))
    """
    operator = _operator(operator, temperature)
    if not operator.has_probabilities:
        raise TypeError(f"operator: {type(operator).__name__} has no probability for each rank: expected another operator")
    values, rows = checks.floating("values", values), _rows(scores, -1, where, True)
    if values.shape[:-1] != rows.shape:
        raise ValueError(
            f"values: expected shape (..., n, d) with (..., n) = {tuple(rows.shape)} of scores, got {tuple(values.shape)}"
        )
    k = checks.count("k", k, 1, rows.shape[-1], "n")
    checks.real_classes(real_mask(rows), k, of="entries")
    indices = _best(rows, k)
    learned = operator.temperature if isinstance(operator.temperature, Tensor) else None
    if checks.eager(values) and checks.eager(rows):
        return _Select.apply(values, rows, learned, indices, operator), indices  # type: ignore[no-untyped-call]
    with _no_autocast(values.device):
        soft = operator(rows, k).to(values.dtype) @ values
    return _chosen(values, rows, indices).detach() + (soft - soft.detach()), indices


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast would take a product in half precision."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else contextlib.nullcontext()


def _chosen(values: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    """The rows of values; NaN where the scores have one."""
    chosen = values.gather(-2, indices[..., None].expand(*indices.shape, values.shape[-1]))
    return torch.where(scores.isnan().any(-1)[..., None, None], torch.nan, chosen)


_MOST_NUMBERS = 1 << 22  # of P at a time


class _Select(torch.autograd.Function):
    """Exact selection; backward as ``P @ values``."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, scores: Tensor, temperature: Tensor | None, indices: Tensor, operator: Operator
    ) -> Tensor:
        ctx.save_for_backward(values, scores, temperature)
        ctx.operator, ctx.k = operator, indices.shape[-1]
        return _chosen(values, scores, indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        k, again = ctx.k, torch.is_grad_enabled()
        values, scores, temperature = ctx.saved_tensors
        n, d = values.shape[-2:]
        number = scores[..., 0].numel()
        chunk = max(1, number if again else min(number, _MOST_NUMBERS // (k * n)))
        found: list[Any] = []
        for start in range(0, max(number, 1), chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad(), _no_autocast(values.device):
                # views, by which the gradient is: that by the values does not run through scores that were made from them
                some = values.reshape(-1, n, d)[part], scores.reshape(-1, n)[part]
                learned = None if temperature is None else temperature.view_as(temperature)
                operator = ctx.operator if learned is None else ctx.operator.at(learned)
                soft = operator(some[1], k).to(values.dtype) @ some[0]
                found.append(autograd.wanted_gradients(soft, (*some, learned), gradient.reshape(-1, k, d)[part], again))
        of_values, of_scores, of_temperature = zip(*found, strict=True)
        return (
            None if of_values[0] is None else torch.cat(of_values).reshape(values.shape),
            None if of_scores[0] is None else torch.cat(of_scores).reshape(scores.shape),
            None if of_temperature[0] is None else sum(of_temperature),
            None,
            None,
        )


def sample_k_subset(
    scores: Float[Tensor, "..."],
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    dim: int = -1,
    where: Bool[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
    method: Method = "exact",
    operator: Operator | str = "lapsum",
) -> Float[Tensor, "..."]:
    """A random k-hot mask, with a gradient.

    ``"exact"`` draws a subset S of size k with probability proportional to exp(sum of its scores / t); the backward pass is
    that of its exact inclusion probabilities, the mask of :class:`anyk.KSubset` (the estimator known as SIMPLE). ``"gumbel"``
    adds Gumbel noise to scores / t and takes the k largest, one after the other without replacement (Plackett-Luce: another
    distribution); the backward pass is that of the operator's mask of the perturbed scores.

    Args:
        scores: of any shape. -inf is never drawn.
        k: how many, between 0 and n. A row with fewer entries that may be drawn gets all of them.
        temperature: t; the smaller, the more often the k largest are drawn.
        dim: the dimension along which k are drawn.
        where: which entries may be drawn; None means all.
        generator: a ``torch.Generator`` for the random numbers; None means torch's default.
        method: ``"exact"`` or ``"gumbel"``.
        operator: with ``"gumbel"``, the operator whose mask gives the gradient; given by name, its temperature is 1.

    Returns:
        The mask, of zeros and ones, of the shape and dtype of ``scores``.

    Example:
        >>> sample = anyk.sample_k_subset(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2)
        >>> sample.sum()
        tensor(2.)

    Reference: Ahmed et al., "SIMPLE: A Gradient Estimator for k-Subset Sampling", ICLR 2023.
    """
    checks.one_of("method", method, get_args(Method))
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")
    if method == "exact" and operator != "lapsum":  # the default
        raise ValueError(f'operator: expected none with method="exact", whose gradient is that of KSubset, got {operator!r}')
    operator = _operator(operator, 1.0)
    rows = _rows(scores, dim, where, True)
    k = checks.count("k", k, 0, rows.shape[-1], "n")
    kind = KSubset(temperature)
    if method == "gumbel":
        # contiguous: what is drawn must not depend on how the scores lie in memory
        noise = torch.empty_like(rows, dtype=checks.working_dtype(rows), memory_format=torch.contiguous_format)
        noise = -noise.exponential_(generator=generator).log()
        real = real_mask(rows)
        # not -inf: the temperature's gradient has this as a factor, and 0 times -inf is NaN
        finite = (rows if real is None else rows.masked_fill(~real, 0)).to(noise.dtype)
        perturbed = kind._relative(finite, torch.zeros_like(noise)) + noise
        if real is not None:
            perturbed = perturbed.masked_fill(~real, -torch.inf)
        sample = soft_topk(perturbed, k, operator, hard=True)
        return _moved(sample.to(scores.dtype), -1, dim)
    mask = kind.mask(rows, k)
    with torch.no_grad():
        drawn = kind.draw(rows, k, generator).to(mask.dtype)
    return _moved((drawn + (mask - mask.detach())).to(scores.dtype), -1, dim)


def _operator(operator: Operator | str, temperature: float | Tensor) -> Operator:
    if isinstance(operator, Operator):
        if isinstance(temperature, bool) or not (isinstance(temperature, (int, float)) and temperature == 1.0):
            raise TypeError(
                "temperature: expected none beside an operator, which has its own; set it there, as in LapSum(temperature=0.5)"
            )
        return operator
    if type(temperature) is float and isinstance(operator, str) and not torch.compiler.is_compiling():
        return _kept(operator, temperature, OPERATORS.get(operator) or NETWORKS.get(operator))
    return by_name(operator, temperature=temperature)


@lru_cache(maxsize=64)
def _kept(name: str, temperature: float, kind: object) -> Operator:
    """An operator that nobody else has: to make one takes longer than a small mask. By its kind too: names are taken over."""
    return by_name(name, temperature=temperature)


def _rows(scores: Tensor, dim: int, where: Tensor | None, largest: bool) -> Tensor:
    """The scores with the dimension last, the best first, and -inf for what may not be chosen."""
    scores = checks.floating("scores", scores)
    dim = checks.dimension(dim, scores)
    if not largest:
        scores = -scores
    if where is not None:
        scores = scores.masked_fill(~checks.where(where, scores), -torch.inf)
    return checks.scores(_moved(scores, dim, -1))


def _moved(tensor: Tensor, source: int, target: int) -> Tensor:
    """``movedim``, which for the last dimension would leave a node in the graph for nothing."""
    return tensor if (source - target) % tensor.ndim == 0 else tensor.movedim(source, target)


def _best(rows: Tensor, k: int) -> Tensor:
    """The indices of the k best, best first, of equals the lower first."""
    found = kernels.best(rows.detach(), k) if k else None
    return rows.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k] if found is None else found


def _k_hot(rows: Tensor, k: int | Tensor) -> Tensor:
    """1 for the k best of each row that may be chosen, of equals those with the lower index; NaN where the row has one."""
    if isinstance(k, Tensor):
        n = rows.shape[-1]
        chosen = (torch.arange(n, device=rows.device) < k[..., None]).expand(rows.shape).to(rows.dtype)
        hot = torch.zeros_like(rows).scatter(-1, _best(rows, n), chosen)
    else:
        hot = torch.zeros_like(rows).scatter(-1, _best(rows, k), 1)
    hot = hot.masked_fill(rows.detach() == -torch.inf, 0)
    return torch.where(rows.detach().isnan().any(-1, keepdim=True), torch.nan, hot)
