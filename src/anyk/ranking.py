"""Rank metrics as losses: Spearman's correlation, NDCG, recall, average precision. The last dimension has a query's items."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyk import checks
from anyk.docstrings import documented
from anyk.operators import Operator
from anyk.tools import soft_rank, soft_topk

__all__ = ["average_precision_loss", "ndcg_loss", "recall_loss", "spearman_loss"]

Reduction = Literal["mean", "sum", "none"]


def spearman_loss(
    prediction: Float[Tensor, "*batch n"],
    target: Float[Tensor, "*batch n"],
    *,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    where: Bool[Tensor, "*batch n"] | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """1 minus Spearman's rank correlation: between 0 and 2, and 1 for a constant prediction or target.

    Correlates the soft ranks of the prediction with the exact ranks of the target, where ties share their mean rank.

    Args:
        prediction: scores; the last dimension is ranked. Of a layer with one output, ``output.squeeze(-1)``.
        target: numbers of the same shape, whose order counts.
        operator: the relaxation of ranking, or its name.
        temperature: t, for an operator given by name; an ``Operator`` has its own.
        where: which entries count, for rows of different lengths; None means all.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, over the rows.

    Returns:
        The loss, of at least float32; for each row with ``reduction="none"``.

    Example:
        >>> anyk.ranking.spearman_loss(torch.tensor([0.1, 2.0, 30.0]), torch.tensor([1.0, 2.0, 3.0]), temperature=0.1)
        tensor(0.)
    """
    where = _checked("target", target, prediction, where, name="prediction")
    if prediction.shape[-1] == 1 and prediction.ndim > 1:  # as a layer of one output has it: no error would mean no gradient
        shape = tuple(prediction.shape)
        raise ValueError(f"prediction: expected at least two entries in the last dimension, which is ranked, got shape {shape}")
    soft = soft_rank(prediction, operator, temperature, where=where)
    exact = _mean_ranks(target.to(soft.dtype), where)
    count = _count(soft, where)
    # as shares of the number: squares of ranks sum to about n^3 / 12, and two such sums are multiplied
    one, other = _centred(soft, where, count) / count, _centred(exact, where, count) / count
    scale = one.square().sum(-1) * other.square().sum(-1)
    flat = scale <= torch.finfo(scale.dtype).eps ** 2  # a constant has no correlation: 0, and no gradient
    correlation = (one * other).sum(-1) / torch.where(flat, 1, scale).sqrt()
    return _reduce(1 - torch.where(flat, 0 * correlation, correlation), None, reduction)


@documented
def ndcg_loss(
    scores: Float[Tensor, "*batch n"],
    relevance: Float[Tensor, "*batch n"],
    k: int | None = None,
    *,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    where: Bool[Tensor, "*batch n"] | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """1 minus NDCG@k: ``1 - sum_c m_c (2^rel_c - 1) / log2(1 + rank_c) / ideal``, with a soft mask m and soft ranks.

    Tied scores share their mean rank, so that the loss of tied items of the same relevance is above 0 at any temperature.

    Args:
        {query_scores}
        relevance: at least 0, of the same shape.
        k: how many items count; None, or more than there are, means all.
        operator: the relaxation of ranking (and of the mask), or its name.
        {temperature_where_reduction_of_queries}

    Returns:
        {loss_of_queries}

    Example:
        >>> anyk.ranking.ndcg_loss(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([2.0, 0.0, 1.0]), temperature=0.01)
        tensor(0.)
    """
    where = _checked("relevance", relevance, scores, where)
    if where is not None:
        relevance = relevance.masked_fill(~where, 0)
    if checks.readable(relevance) and bool((relevance < 0).any()):
        raise ValueError(f"relevance: expected at least 0, got {relevance.min().item():g}")
    n = scores.shape[-1]
    k = n if k is None else min(checks.at_least_one("k", k), n)
    ranks = soft_rank(scores, operator, temperature, where=where)
    gains = torch.expm1(relevance.to(ranks.dtype) * math.log(2))
    gained = gains / torch.log2(1 + ranks)
    if k < n:
        gained = gained * soft_topk(scores.to(ranks.dtype), k, operator, temperature, where=where)
    place = torch.arange(1, k + 1, dtype=ranks.dtype, device=ranks.device)
    ideal = (gains.topk(k, dim=-1).values / torch.log2(1 + place)).sum(-1)
    return _reduce(*_share(gained.sum(-1), ideal), reduction)


@documented
def recall_loss(
    scores: Float[Tensor, "*batch n"],
    relevant: Bool[Tensor, "*batch n"],
    k: int,
    *,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    where: Bool[Tensor, "*batch n"] | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """1 minus recall@k: ``1 - sum_c m_c rel_c / sum_c rel_c``, with a soft mask m of the first k items.

    Args:
        {query_scores}
        {relevant}
        k: how many items are shown; more than there are means all.
        operator: the relaxation, or its name; one with a mask.
        {temperature_where_reduction_of_queries}

    Returns:
        {loss_of_queries}

    Example:
        >>> anyk.ranking.recall_loss(torch.tensor([9.0, 0.0, 5.0]), torch.tensor([True, True, False]), 2, temperature=0.1)
        tensor(0.5000)
    """
    relevant, where = _relevant(relevant, scores, where)
    k = min(checks.at_least_one("k", k), scores.shape[-1])
    mask = soft_topk(scores.to(checks.working_dtype(scores)), k, operator, temperature, where=where)
    return _reduce(*_share((mask * relevant).sum(-1), relevant.to(mask.dtype).sum(-1)), reduction)


@documented
def average_precision_loss(
    scores: Float[Tensor, "*batch n"],
    relevant: Bool[Tensor, "*batch n"],
    *,
    operator: Operator | str = "lapsum",
    temperature: float | Tensor = 1.0,
    where: Bool[Tensor, "*batch n"] | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """1 minus average precision: ``1 - mean_c (rank_c among the relevant / rank_c among all)`` over the relevant c, with soft
    ranks.

    Args:
        {query_scores}
        {relevant}
        operator: the relaxation of ranking, or its name.
        {temperature_where_reduction_of_queries}

    Returns:
        {loss_of_queries}

    Example:
        >>> relevant = torch.tensor([False, True, True])
        >>> anyk.ranking.average_precision_loss(torch.tensor([9.0, 0.0, 5.0]), relevant, temperature=0.1)
        tensor(0.4167)
    """
    relevant, where = _relevant(relevant, scores, where)
    among_all = soft_rank(scores, operator, temperature, where=where)
    among_relevant = soft_rank(scores, operator, temperature, where=relevant)
    precision = torch.where(relevant, among_relevant / among_all, 0)
    return _reduce(*_share(precision.sum(-1), relevant.to(precision.dtype).sum(-1)), reduction)


def _share(part: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """1 minus a share of each row, 0 for rows that have nothing; and which rows have something."""
    some = whole > 0
    return torch.where(some, 1 - part / torch.where(some, whole, 1), 0 * part), some


def _reduce(losses: Tensor, counted: Tensor | None, reduction: Reduction) -> Tensor:
    checks.one_of("reduction", reduction, get_args(Reduction))
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    number = max(losses.numel(), 1) if counted is None else counted.sum().clamp(min=1)
    return losses.sum() / number


def _checked(what: str, value: Tensor, scores: Tensor, where: Tensor | None, name: str = "scores") -> Tensor | None:
    """``where`` of the shape of the scores, once all three fit together."""
    checks.floating(name, scores)
    if scores.ndim < 1 or scores.shape[-1] < 1:
        raise ValueError(f"{name}: expected at least one item in the last dimension, got shape {tuple(scores.shape)}")
    if checks.tensor(what, value).dtype.is_complex:
        raise TypeError(f"{what}: expected real numbers, got dtype {value.dtype}")
    if value.shape != scores.shape:
        raise ValueError(f"{what}: expected the shape {tuple(scores.shape)} of the {name}, got {tuple(value.shape)}")
    return None if where is None else checks.where(where, scores)


def _relevant(relevant: Tensor, scores: Tensor, where: Tensor | None) -> tuple[Tensor, Tensor | None]:
    where = _checked("relevant", relevant, scores, where)
    if relevant.dtype != torch.bool:
        raise TypeError(f"relevant: expected a bool tensor, got dtype {relevant.dtype}")
    return relevant if where is None else relevant & where, where


def _count(values: Tensor, where: Tensor | None) -> Tensor:
    """How many entries of each row count, (..., 1)."""
    if where is None:
        return torch.full_like(values[..., :1], values.shape[-1])
    return where.sum(-1, keepdim=True).to(values.dtype).clamp(min=1)


def _centred(values: Tensor, where: Tensor | None, count: Tensor) -> Tensor:
    """Less the mean; 0 for entries that do not count."""
    if where is not None:
        values = torch.where(where, values, 0)
    centred = values - values.sum(-1, keepdim=True) / count
    return centred if where is None else torch.where(where, centred, 0)


def _mean_ranks(values: Tensor, where: Tensor | None) -> Tensor:
    """Exact ranks, 1 is the largest; equals share the mean of theirs."""
    keys = values if where is None else values.masked_fill(~where, -torch.inf)
    ordered, order = keys.sort(dim=-1, descending=True)
    n = values.shape[-1]
    apart = torch.nn.functional.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0), value=True)
    group = apart.long().cumsum(-1) - 1
    place = torch.arange(1, n + 1, dtype=values.dtype, device=values.device).expand(values.shape)
    totals = torch.zeros_like(values).scatter_add(-1, group, place)
    counts = torch.zeros_like(values).scatter_add(-1, group, torch.ones_like(values))
    ranks = torch.zeros_like(values).scatter(-1, order, (totals / counts.clamp(min=1)).gather(-1, group))
    return ranks.masked_fill(keys.isnan().any(-1, keepdim=True), torch.nan)
