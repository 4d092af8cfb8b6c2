"""Differentiable top-k, rank, sort, quantile and sampling: scores in, a tensor of the same shape out.

Each function brings the scores into one form, the dimension last, the best first, excluded entries at -inf; an operator does
the work.
"""

from __future__ import annotations

import numbers
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyk import checks, kernels
from anyk.operators import Inclusion, KSubset, Mask, Operator, Ranks, Sort, Threshold, by_name
from anyk.operators.base import cached

__all__ = ["sample_k_subset", "select_topk", "soft_quantile", "soft_rank", "soft_sort", "soft_topk"]

Method = Literal["exact", "gumbel"]
Backward = Literal["full", "mask"]


def soft_topk(
    scores: Float[Tensor, "..."],
    k: int | float | Tensor,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor | None = None,
    *,
    dim: int = -1,
    largest: bool = True,
    hard: bool = False,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """A mask that picks k of n, differentiable in the scores: of their shape and dtype.

    Entries lie between 0 and 1 and sum to k. The smaller the temperature t, the closer they are to 0 and 1. With LapSum,
    ``mask_c = F((s_c - b) / t)``, with F the Laplace distribution function and b such that the mask sums to k.

    Args:
        scores: of any shape. -inf is never chosen (with ``largest=False``, +inf), and has no gradient; NaN makes its row NaN.
        k: how many, between 0 and n: an integer; for LapSum, Permutahedron and SinkhornSort also a real number or a tensor of
            the shape of the rows, which has a gradient. A row with fewer entries that may be chosen gets all of them.
        operator: the relaxation, or its name: LapSum, Permutahedron (sparse: true zeros and ones), KSubset, SinkhornSort or
            SortingNetwork.
        temperature: t of an operator given by name, a number or a tensor, one for each row; None: 1. An object has its own.
        dim: the dimension along which k are chosen.
        largest: False picks the k smallest.
        hard: True gives k ones and otherwise zeros in the forward pass, ties going to the lower index, and the gradient of
            the soft mask. k must be an integer.
        where: which entries may be chosen; None means all. Of a shape that broadcasts to that of ``scores``.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> anyk.soft_topk(scores, 2)
        tensor([0.3033, 0.8884, 0.6967, 0.1116])
        >>> anyk.soft_topk(scores, 2, hard=True)
        tensor([0., 1., 1., 0.])
    """
    relaxation = _able(operator, temperature, Mask)
    rows = _as_rows(scores, dim, where, checks.flag("largest", largest))
    exact = _k_hot(rows, k) if checks.flag("hard", hard) else None
    if exact is not None and not _is_recorded():
        return _moved(exact, -1, dim)
    mask = relaxation.mask(rows, k)
    return _moved(mask if exact is None else exact + (mask - mask.detach()), -1, dim)


def soft_rank(
    scores: Float[Tensor, "..."],
    operator: Operator | str = "lapsum",
    temperature: float | Tensor | None = None,
    *,
    dim: int = -1,
    descending: bool = False,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """The rank of each entry, 1 for the smallest, differentiable in the scores: of their shape, in at least float32.

    Pad by ``where=``: in ascending order, -inf is an ordinary score, and +inf comes last. With LapSum,
    ``rank_c = 1 + sum_(j != c) F((s_c - s_j) / t)``, with F the Laplace distribution function; the ranks sum to n (n + 1) / 2.

    Args:
        scores: of any shape. +inf (with ``descending=True``, -inf) and what ``where`` excludes come after all others.
        operator: the relaxation, or its name: LapSum or Permutahedron; SinkhornSort or SortingNetwork, in O(n^2) or more.
        temperature: t of an operator given by name, a number or a tensor, one for each row; None: 1. An object has its own.
        dim: the dimension that is ranked.
        descending: True gives rank 1 to the largest.
        where: which entries are ranked; None means all. Of a shape that broadcasts to that of ``scores``.

    Example:
        >>> anyk.soft_rank(torch.tensor([1.0, 3.0, 2.0, 0.0]), temperature=0.1)
        tensor([2.0000, 4.0000, 3.0000, 1.0000])
    """
    relaxation = _able(operator, temperature, Ranks)
    rows = _as_rows(scores, dim, where, checks.flag("descending", descending))
    return _moved(relaxation.ranks(rows), -1, dim)


def soft_sort(
    scores: Float[Tensor, "..."],
    operator: Operator | str = "lapsum",
    temperature: float | Tensor | None = None,
    *,
    dim: int = -1,
    descending: bool = False,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """The scores in ascending order, differentiable: of their shape and dtype. Choose t below the gaps between them.

    With LapSum, entry r is a quantile of the scores plus Laplace noise of size t: the b_r with ``sum_c F((b_r - s_c) / t) =
    r - 1/2``, F the Laplace distribution function. It becomes exact as t falls. At larger t the ends leave the range of the
    scores, by up to t ln n; two tied scores become their value ± t ln 2; the sum is not kept. The order always is, and
    ``soft_sort(a s + b, temperature=a t) = a soft_sort(s, temperature=t) + b`` for a > 0. Permutahedron stays in the range, and
    is exact where gaps are *small*. All others give ``P @ scores``, the mean score of each rank.

    Pad by ``where=``: in ascending order, -inf is an ordinary score, and +inf comes last.

    Args:
        scores: of any shape. +inf (with ``descending=True``, -inf) and what ``where`` excludes come last, as ±inf.
        operator: the relaxation, or its name: LapSum or Permutahedron; NeuralSort, SoftSort, SinkhornSort or SortingNetwork,
            in O(n^2) or more.
        temperature: t of an operator given by name, a number or a tensor, one for each row; None: 1. An object has its own.
        dim: the dimension that is sorted.
        descending: True puts the largest first.
        where: which entries are sorted; None means all. Of a shape that broadcasts to that of ``scores``.

    Example:
        >>> anyk.soft_sort(torch.tensor([1.0, 3.0, 2.0, 0.0]), temperature=0.3)
        tensor([-0.0109,  0.9996,  2.0004,  3.0109])
    """
    relaxation = _able(operator, temperature, Sort)
    ordered = relaxation.sort(_as_rows(scores, dim, where, checks.flag("descending", descending)))
    return _moved(ordered if descending else -ordered, -1, dim)


def soft_quantile(
    scores: Float[Tensor, "..."],
    q: float | Tensor,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor | None = None,
    *,
    dim: int = -1,
    where: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """The q-quantile of the scores, differentiable: of their shape without ``dim``, in their dtype.

    It is the threshold b of a soft top-k mask: ``sum_c F((s_c - b) / t) = (1 - q) n``, F the Laplace distribution function. Its
    limit for small t is numpy's ``"averaged_inverted_cdf"``: where (1 - q) n is an integer, midway between two scores. q = 0
    and q = 1 are the minimum and the maximum. Near them b lies outside the range of the scores, by some t: a tail wants a t far
    below the gaps between the scores.

    Args:
        scores: of any shape. -inf and what ``where`` excludes do not count.
        q: between 0 and 1; a tensor has one value for each row, and gets a gradient.
        operator: one with a unique threshold, or its name: LapSum.
        temperature: t of an operator given by name, a number or a tensor, one for each row; None: 1. An object has its own.
        dim: the dimension to reduce.
        where: which entries count; None means all. Of a shape that broadcasts to that of ``scores``.

    Example:
        >>> anyk.soft_quantile(torch.tensor([1.0, 3.0, 2.0, 0.0, 4.0]), 0.5, temperature=0.1)
        tensor(2.)
    """
    relaxation = _able(operator, temperature, Threshold)
    rows = _as_rows(scores, dim, where, True)
    if isinstance(q, Tensor):
        q = checks.one_for_each_row("q", q, rows.shape[:-1], 0, 1, "1")
    else:
        checks.between("q", q, 0, 1)
    number: Any = rows.shape[-1]
    if not checks.readable(rows) or not rows.numel() or rows.detach().amin() == -torch.inf:
        number = (rows.detach() != -torch.inf).sum(-1).to(checks.working_dtype(rows))
    k = number - q * number  # not (1 - q) number: 1 - 0.9 is not a tenth, and k would miss its integer
    return relaxation.threshold(rows, k).to(scores.dtype)


def select_topk(
    values: Float[Tensor, "*batch n d"],
    scores: Float[Tensor, "*batch n"],
    k: int,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor | None = None,
    *,
    largest: bool = True,
    where: Bool[Tensor, "*batch n"] | None = None,
    backward: Backward = "full",
) -> tuple[Float[Tensor, "*batch k d"], Int[Tensor, "*batch k"]]:
    """The k rows of ``values`` with the best scores, best first, (..., k, d), and their indices, (..., k).

    The forward pass selects exactly; there is a gradient to the scores as well. The backward pass is, with P the operator's
    probabilities of the ranks and m its mask,

        full    that of ``P @ values``: values and scores that were not selected learn, too. O(n k d); LapSum: O((n + k) d)
        mask    that of ``values[index] * (1 + m - m.detach())[index]``: only values that were selected learn. O(n + k d)

    Args:
        values: (..., n, d), the rows to select from.
        scores: (..., n), one for each row of ``values``. -inf (with ``largest=False``, +inf) is never chosen.
        k: how many, between 1 and n. Where fewer may be chosen, the rest are zeros with the index -1; as an index that is the
            last row, so look for it.
        operator: the relaxation, or its name: with ``"full"`` any but Permutahedron, with ``"mask"`` one that has a mask.
        temperature: t of an operator given by name, a number or a tensor, one for each row; None: 1. An object has its own.
        largest: False selects the k smallest scores, smallest first.
        where: which rows may be chosen; None means all. Of a shape that broadcasts to that of ``scores``.
        backward: ``"full"`` or ``"mask"``.

    Example:
        >>> values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        >>> anyk.select_topk(values, torch.tensor([0.5, 2.0, 1.0]), 2)
        (tensor([[ 2., 20.],
                [ 3., 30.]]), tensor([1, 2]))
    """
    checks.one_of("backward", backward, get_args(Backward))
    relaxation = _able(operator, temperature, Inclusion if backward == "full" else Mask)
    values = checks.floating("values", values)
    rows = _as_rows(scores, -1, where, checks.flag("largest", largest))
    if values.shape[:-1] != rows.shape:
        raise ValueError(f"values: expected shape (..., n, d) for scores of {tuple(rows.shape)}, got {tuple(values.shape)}")
    k = checks.count("k", k, 1, rows.shape[-1], "n")
    indices = _k_best(rows, k)
    excluded = rows.detach().gather(-1, indices) == -torch.inf
    chosen = values.gather(-2, indices[..., None].expand(*indices.shape, values.shape[-1]))
    chosen = chosen.masked_fill(excluded[..., None], 0).masked_fill(rows.isnan().any(-1)[..., None, None], torch.nan)
    if _is_recorded() and backward == "mask":
        gate = relaxation.mask(rows, k).gather(-1, indices)[..., None].to(values.dtype)
        chosen = chosen * (1 + (gate - gate.detach()))
    elif _is_recorded():
        finite = values.nan_to_num(posinf=0.0, neginf=0.0)  # whatever there is in what is not selected
        soft = relaxation.compute_product(rows, finite, k).to(values.dtype)
        chosen = chosen.detach() + (soft - soft.detach())
    return chosen, indices.masked_fill(excluded, -1)


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
    """A random k-hot mask, of zeros and ones, with a gradient: of the shape and dtype of the scores.

    ``"exact"`` draws a subset S of size k with probability proportional to exp(sum of its scores / t); the backward pass is
    that of its exact inclusion probabilities, the mask of :class:`anyk.KSubset` (the estimator known as SIMPLE). ``"gumbel"``
    adds Gumbel noise to scores / t and takes the k largest, one after the other without replacement (Plackett-Luce: another
    distribution); the backward pass is that of the operator's mask of the perturbed scores.

    Args:
        scores: of any shape. -inf is never drawn.
        k: how many, between 0 and n. A row with fewer entries that may be drawn gets all of them.
        temperature: t, a number or a tensor, one for each row; the smaller, the more often the k largest are drawn.
        dim: the dimension along which k are drawn.
        where: which entries may be drawn; None means all. Of a shape that broadcasts to that of ``scores``.
        generator: a ``torch.Generator`` for the random numbers; None means torch's default.
        method: ``"exact"`` or ``"gumbel"``.
        operator: with ``"gumbel"``, the operator whose mask gives the gradient; given by name, its temperature is 1.

    Example:
        >>> anyk.sample_k_subset(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2).sum()
        tensor(2.)

    Reference: Ahmed et al., "SIMPLE: A Gradient Estimator for k-Subset Sampling", ICLR 2023.
    """
    checks.one_of("method", method, get_args(Method))
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")
    if method == "exact" and operator != "lapsum":  # the default
        raise ValueError(f'operator: expected none with method="exact", whose gradient is that of KSubset, got {operator!r}')
    rows = _as_rows(scores, dim, where, True)
    k = checks.count("k", k, 0, rows.shape[-1], "n")
    if method == "exact":
        subset = _able("ksubset", temperature, KSubset)
        drawn = subset.draw(rows, k, generator)
        if _is_recorded():
            mask = subset.mask(rows, k)
            drawn = drawn + (mask - mask.detach())
        return _moved(drawn, -1, dim)
    excluded = rows.detach() == -torch.inf
    # not -inf over t: the gradient by t would be 0 times that
    finite = rows.masked_fill(excluded, 0).to(checks.working_dtype(rows))
    # contiguous: what is drawn must not depend on how the scores lie in memory
    noise = torch.empty_like(finite, memory_format=torch.contiguous_format).exponential_(generator=generator).log()
    perturbed = (finite / checks.temperature_for(temperature, rows) - noise).masked_fill(excluded, -torch.inf)
    return _moved(soft_topk(perturbed, k, operator, hard=True).to(scores.dtype), -1, dim)


def _able(operator: Operator | str, temperature: float | Tensor | None, ability: type[Operator]) -> Any:
    """The operator with this temperature, which must have the ability."""
    if isinstance(operator, Operator):
        if temperature is not None:
            raise TypeError(f"temperature: expected none beside an operator, which has its own, got {temperature!r}")
        found = operator
    else:
        simple = isinstance(operator, str) and isinstance(temperature, float | int | None) and not torch.compiler.is_compiling()
        found = (cached if simple else by_name)(operator, temperature=1.0 if temperature is None else temperature)
    found.require(ability)
    return found


def _as_rows(scores: Tensor, dim: int, where: Tensor | None, largest: bool) -> Tensor:
    """The scores with the dimension last, the best first, and -inf for what may not be chosen."""
    scores = checks.floating("scores", scores)
    dim = checks.dimension(dim, scores)
    scores = scores if largest else -scores
    if where is not None:
        scores = scores.masked_fill(~checks.where(where, scores), -torch.inf)
    return checks.scores(_moved(scores, dim, -1))


def _moved(tensor: Tensor, source: int, target: int) -> Tensor:
    """``movedim``, which for the last dimension would leave a node in the graph for nothing."""
    return tensor if (source - target) % tensor.ndim == 0 else tensor.movedim(source, target)


def _k_best(rows: Tensor, k: int) -> Tensor:
    """The indices of the k best, best first, of equals the lower first."""
    rows = rows.detach()
    found = kernels.best(rows, k) if k and rows.numel() else None
    if found is not None:
        return found
    if torch.compiler.is_exporting():  # ONNX's TopK takes the lower index of equals, and has no stable sort
        return rows.topk(k, dim=-1).indices
    return rows.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _k_hot(rows: Tensor, k: int | float | Tensor) -> Tensor:
    """1 for the k best of each row that may be chosen, of equals those with the lower index; NaN where the row has one."""
    of_rows = isinstance(k, Tensor) and not (k.is_floating_point() or k.is_complex())
    if not of_rows and (isinstance(k, bool) or not isinstance(k, (numbers.Integral, torch.SymInt))):
        raise TypeError(f"k: expected an integer with hard=True, got {k!r}")
    number, rows = checks.how_many(k, rows), rows.detach()
    best = _k_best(rows, rows.shape[-1] if of_rows else number)
    ones = (torch.arange(rows.shape[-1], device=rows.device) < number).to(rows.dtype).expand(rows.shape) if of_rows else 1
    hot = torch.zeros_like(rows).scatter(-1, best, ones).masked_fill(rows == -torch.inf, 0)
    return hot.masked_fill(rows.isnan().any(-1, keepdim=True), torch.nan)


def _is_recorded() -> bool:
    """Whether a gradient may be asked for, which exported programs have none of."""
    return torch.is_grad_enabled() and not torch.compiler.is_exporting()
