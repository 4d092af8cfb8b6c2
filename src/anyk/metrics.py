"""Ranks of the targets, and what follows from them: top-k hits, reciprocal ranks, NDCG. Ties count against the model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from anyk import candidates, checks
from anyk.conventions import ClassIndices, Scores, Shape
from anyk.docstrings import documented

#: as a k it counts every target that is not ignored
EVERY = sys.maxsize

__all__ = ["mean_reciprocal_rank", "ndcg", "target_ranks", "topk_accuracy", "topk_hits"]

Average = Literal["micro", "macro"]


@documented
def target_ranks(scores: Scores, target: ClassIndices) -> ClassIndices:
    """The rank of the target, 1 for the best: one more than the number of other classes with a score as high or higher.

    A NaN score counts as higher than any; a target whose own score is NaN is ranked last.

    Args:
        {metric_scores_target}

    Example:
        >>> anyk.target_ranks(torch.tensor([[0.1, 0.7, 0.7], [0.5, 0.3, 0.2]]), torch.tensor([1, 0]))
        tensor([2, 1])
    """
    shape = Shape.of(scores)
    target = checks.class_indices(target, shape.batch, shape.classes)
    rows = shape.rows(scores.detach())
    # "Not smaller" counts NaN and the target itself, which makes the best rank 1.
    # Counted in int32, which is six times as fast as torch's own choice.
    ranks = (~(rows < candidates.at(rows, target.reshape(-1))[:, None])).sum(-1, dtype=torch.int32)
    return ranks.long().reshape(shape.batch)


@documented
def topk_hits(
    scores: Scores,
    target: ClassIndices,
    ks: Iterable[int] = (1, 5),
    *,
    ignore_index: int = -100,
) -> dict[int, Tensor]:
    """How many targets are among the first k classes, for each k: counts, which add up over batches and processes.

    Ties count against the target: see :func:`anyk.target_ranks`.

    Args:
        {metric_scores_target}
        {ks}
        {ignore_index}

    Returns:
        ``{k: count}``, each a tensor with one integer, on the device of the scores.

    Example:
        >>> anyk.topk_hits(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]), ks=(1, 2))
        {1: tensor(0), 2: tensor(1)}
    """
    ks = checked_ks(ks)
    ranked = Ranked.of(scores, target, ignore_index)
    return {k: ranked.hits(k).sum() for k in ks}


def checked_ks(ks: Iterable[int]) -> list[int]:
    if not isinstance(ks, Iterable):
        raise TypeError(f"ks: expected a sequence of integers, got {ks!r}")
    return [checks.at_least_one("ks", k) for k in ks]


@documented
def topk_accuracy(
    scores: Scores,
    target: ClassIndices,
    ks: Iterable[int] = (1, 5),
    *,
    ignore_index: int = -100,
    average: Average = "micro",
) -> dict[int, Tensor]:
    """The fraction of targets among the first k classes, for each k.

    Ties count against the target: see :func:`anyk.target_ranks`.

    Args:
        {metric_scores_target}
        {ks}
        {ignore_index}
        {average}

    Returns:
        ``{k: fraction}``, each a tensor with one number; NaN for an empty batch.

    Example:
        >>> scores, target = torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2], [0.2, 0.4, 0.1]]), torch.tensor([1, 2, 1])
        >>> anyk.topk_accuracy(scores, target, ks=(1, 2))
        {1: tensor(0.3333), 2: tensor(0.6667)}
        >>> anyk.topk_accuracy(scores, target, ks=(1, 2), average="macro")
        {1: tensor(0.2500), 2: tensor(0.5000)}
    """
    ks = checked_ks(ks)
    ranked = Ranked.of(scores, target, ignore_index)
    return {k: ranked.accuracy(k, average) for k in ks}


@documented
def mean_reciprocal_rank(
    scores: Scores, target: ClassIndices, *, ignore_index: int = -100, average: Average = "micro"
) -> Tensor:
    """The mean of 1 / r over the targets, r the rank of each (MRR): 1 if every target comes first.

    Args:
        {metric_scores_target}
        {ignore_index}
        {average}

    Returns:
        A tensor with one number; NaN for an empty batch.

    Example:
        >>> anyk.mean_reciprocal_rank(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]))
        tensor(0.4167)
    """
    return Ranked.of(scores, target, ignore_index).mean_reciprocal_rank(average)


@documented
def ndcg(
    scores: Scores,
    target: ClassIndices,
    ks: Iterable[int] = (5, 10),
    *,
    ignore_index: int = -100,
    average: Average = "micro",
) -> dict[int, Tensor]:
    """The normalised discounted cumulative gain of the first k classes, for each k: the mean over the targets of

        1 / log2(1 + r) if r <= k, otherwise 0,    r the rank of the target.

    There is one relevant class for each example, so that the best possible gain, by which it is divided, is 1.

    Args:
        {metric_scores_target}
        {ks}
        {ignore_index}
        {average}

    Returns:
        ``{k: gain}``, each a tensor with one number; NaN for an empty batch.

    Example:
        >>> anyk.ndcg(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]), ks=(2, 3))
        {2: tensor(0.3155), 3: tensor(0.5655)}
    """
    ks = checked_ks(ks)
    ranked = Ranked.of(scores, target, ignore_index)
    return {k: ranked.ndcg(k, average) for k in ks}


class Ranked(NamedTuple):
    """Targets with their ranks, as one row: what the metrics are computed from, in the precision of the ranks."""

    target: Tensor
    """class 0 in the place of those that do not count"""
    ranks: Tensor
    counted: Tensor
    """which count"""
    classes: int

    @classmethod
    def of(cls, scores: Tensor, target: Tensor, ignore_index: int) -> Ranked:
        target = checks.tensor("target", target)
        counted = target != ignore_index
        target = target * counted
        ranks = target_ranks(scores, target)
        return cls(target.reshape(-1).long(), ranks.reshape(-1), counted.reshape(-1), Shape.of(scores).classes)

    def hits(self, k: int) -> Tensor:
        return (self.ranks <= k) & self.counted

    def accuracy(self, k: int, average: Average) -> Tensor:
        return self.mean(self.hits(k).to(self.ranks.dtype), average)

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
