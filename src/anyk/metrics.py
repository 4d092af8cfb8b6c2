"""Ranks of the targets, and what follows from them: top-k hits, reciprocal ranks, NDCG. Ties count against the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from anyk import candidates, checks
from anyk.cross_entropy import ClassIndices, Scores, as_rows, batch_shape

__all__ = ["mean_reciprocal_rank", "ndcg", "target_ranks", "topk_accuracy", "topk_hits"]

Average = Literal["micro", "macro"]


def target_ranks(scores: Scores, target: ClassIndices) -> ClassIndices:
    """The rank of the target, 1 for the best: one more than the number of other classes with a score as high or higher.

    A NaN score counts as higher than any; a target whose own score is NaN is ranked last.

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), with the classes in the same dimension as for the losses.
        target: class indices, (B,), () or (B, d1, …).

    Example:
        >>> anyk.target_ranks(torch.tensor([[0.1, 0.7, 0.7], [0.5, 0.3, 0.2]]), torch.tensor([1, 0]))
        tensor([2, 1])
    """
    shape = batch_shape(scores)
    rows = as_rows(scores.detach())
    target = checks.class_indices(target, shape, rows.shape[1])
    # "Not smaller" counts NaN and the target itself, which makes the best rank 1. In int32: six times as fast as int64.
    ranks = (~(rows < candidates.at(rows, target.reshape(-1))[:, None])).sum(-1, dtype=torch.int32)
    return ranks.long().reshape(shape)


def topk_hits(
    scores: Scores, target: ClassIndices, ks: Iterable[int] | int = (1, 5), *, ignore_index: int = -100
) -> dict[int, Tensor]:
    """``{k: count}``, how many targets are among the first k classes: counts, which add up over batches and processes.

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), with the classes in the same dimension as for the losses.
        target: class indices, (B,), () or (B, d1, …).
        ks: one k or several; a k above the number of classes counts every target.
        ignore_index: a target value that is ignored.

    Example:
        >>> scores = torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]])
        >>> anyk.metrics.topk_hits(scores, torch.tensor([1, 2]), ks=(1, 2))
        {1: tensor(0), 2: tensor(1)}
    """
    ranked = Ranked.of(scores, target, ignore_index)
    return {k: ((ranked.ranks <= k) & ranked.counted).sum() for k in as_list(ks)}


def topk_accuracy(
    scores: Scores,
    target: ClassIndices,
    ks: Iterable[int] | int = (1, 5),
    *,
    ignore_index: int = -100,
    average: Average = "micro",
) -> dict[int, Tensor]:
    """``{k: fraction}``, the share of targets among the first k classes; NaN for an empty batch.

    Ties count against the target: see :func:`target_ranks`.

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), with the classes in the same dimension as for the losses.
        target: class indices, (B,), () or (B, d1, …).
        ks: one k or several; a k above the number of classes counts every target.
        ignore_index: a target value that is ignored.
        average: ``"micro"``, the mean over the targets; ``"macro"``, the mean over the classes that occur, of the mean in each.

    Example:
        >>> scores, target = torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2], [0.2, 0.4, 0.1]]), torch.tensor([1, 2, 1])
        >>> anyk.topk_accuracy(scores, target, 2)
        {2: tensor(0.6667)}
        >>> anyk.topk_accuracy(scores, target, ks=(1, 2), average="macro")
        {1: tensor(0.2500), 2: tensor(0.5000)}
    """
    ranked = Ranked.of(scores, target, ignore_index)
    return {k: ranked.accuracy(k, average) for k in as_list(ks)}


def mean_reciprocal_rank(
    scores: Scores, target: ClassIndices, *, ignore_index: int = -100, average: Average = "micro"
) -> Tensor:
    """The mean of 1 / r over the targets, r the rank of each (MRR); NaN for an empty batch.

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), with the classes in the same dimension as for the losses.
        target: class indices, (B,), () or (B, d1, …).
        ignore_index: a target value that is ignored.
        average: ``"micro"``, the mean over the targets; ``"macro"``, the mean over the classes that occur, of the mean in each.

    Example:
        >>> anyk.metrics.mean_reciprocal_rank(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]))
        tensor(0.4167)
    """
    return Ranked.of(scores, target, ignore_index).mean_reciprocal_rank(average)


def ndcg(
    scores: Scores,
    target: ClassIndices,
    ks: Iterable[int] | int = (5, 10),
    *,
    ignore_index: int = -100,
    average: Average = "micro",
) -> dict[int, Tensor]:
    """``{k: NDCG@k}`` with one relevant class for each target, NaN for an empty batch: the mean over the targets of

        1 / log2(1 + r) if r <= k, otherwise 0,    r the rank of the target.

    Args:
        scores: (B, n), (n,) or (B, n, d1, …), with the classes in the same dimension as for the losses.
        target: class indices, (B,), () or (B, d1, …).
        ks: one k or several; a k above the number of classes counts every target.
        ignore_index: a target value that is ignored.
        average: ``"micro"``, the mean over the targets; ``"macro"``, the mean over the classes that occur, of the mean in each.

    Example:
        >>> anyk.metrics.ndcg(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]), ks=(2, 3))
        {2: tensor(0.3155), 3: tensor(0.5655)}
    """
    ranked = Ranked.of(scores, target, ignore_index)
    return {k: ranked.ndcg(k, average) for k in as_list(ks)}


def as_list(ks: Iterable[int] | int) -> list[int]:
    return [checks.at_least_one("ks", k) for k in (ks if isinstance(ks, Iterable) else [ks])]


class Ranked(NamedTuple):
    """Targets with their ranks, in one dimension, in the dtype in which the metrics are computed."""

    target: Tensor
    """class 0 where a target is ignored"""
    ranks: Tensor
    counted: Tensor
    classes: int

    @classmethod
    def of(cls, scores: Tensor, target: Tensor, ignore_index: int) -> Ranked:
        counted = checks.tensor("target", target) != ignore_index
        target = target * counted
        ranks = target_ranks(scores, target)
        return cls(target.reshape(-1).long(), ranks.reshape(-1), counted.reshape(-1), as_rows(scores).shape[1])

    def accuracy(self, k: int, average: Average) -> Tensor:
        return self.mean((self.ranks <= k).to(self.ranks.dtype), average)

    def mean_reciprocal_rank(self, average: Average) -> Tensor:
        return self.mean(1 / self.ranks, average)

    def ndcg(self, k: int, average: Average) -> Tensor:
        return self.mean(torch.where(self.ranks <= k, 1 / (1 + self.ranks).log2(), 0), average)

    def mean(self, values: Tensor, average: Average) -> Tensor:
        """The mean of what each target has. No size depends on the data: it does not wait for the device."""
        checks.one_of("average", average, get_args(Average))
        values = torch.where(self.counted, values, 0)
        if average == "micro":
            return values.sum() / self.counted.sum()
        sums = values.new_zeros(self.classes).scatter_add(0, self.target, values)
        counts = self.target.new_zeros(self.classes).scatter_add(0, self.target, self.counted.long())
        occurs = counts > 0
        return torch.where(occurs, sums / counts, 0).sum() / occurs.sum()
