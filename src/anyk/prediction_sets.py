"""Split conformal prediction: for each example the classes to show, so that the right one is among them as often as asked."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from jaxtyping import Bool
from torch import Tensor

from anyk import checks
from anyk.conventions import ClassIndices, Scores, Shape
from anyk.docstrings import documented

__all__ = ["PredictionSets"]


@documented
class PredictionSets:
    """Split conformal prediction: for each example a set of classes, as small as possible, that contains the right one as often
    as asked.

    With p the softmax of the scores, and n examples that the model was neither trained nor chosen with, it shows

        C(x) = {j : p_j(x) >= q, or j is the first guess},
        q = the ceil((n + 1) coverage)-th largest p_y(x) of the n examples, infinite where y is the first guess

    so that for one more example, if all n + 1 are exchangeable,

        coverage <= P(y in C(x)) < coverage + 1 / (n + 1)

    whatever the model. The upper bound holds if no two p_y(x) are equal and the first guess alone is not enough. P is a mean:
    over draws of the n examples, over easy and hard examples, and over classes. For one draw the coverage is off by about
    sqrt(coverage (1 - coverage) / n). Where p is right, no sets with this guarantee and at least one class each are smaller
    on average.

    Equal scores are included together. In rows with NaN or +inf all classes are included. A class at -inf is
    included only if so many targets were at -inf that the guarantee needs all classes.

    Args:
        scores: (n, classes) or (n, classes, d1, …), of examples that were held out; each position is one of them.
        target: class indices, (n,) or (n, d1, …).
        coverage: how often the right class is shown, above 0 and below 1. It needs at least coverage / (1 - coverage) examples.

    Attributes:
        coverage: as given.
        threshold: log q.

    Shape:
        called with scores (B, classes), (classes,) or (B, classes, d1, …), it returns a bool tensor of the same shape.

    Example:
        >>> held_out, target = torch.tensor([[2.0, 1.0, 0.0]] * 9), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2])
        >>> show = anyk.PredictionSets(held_out, target, coverage=0.8)
        >>> show(torch.tensor([[2.0, 1.0, 0.0], [9.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))
        tensor([[ True,  True, False],
                [ True, False, False],
                [ True,  True,  True]])

    Reference:
        Vovk, Gammerman, Shafer, "Algorithmic learning in a random world" (2005); Sadinle, Lei, Wasserman, "Least ambiguous
        set-valued classifiers with bounded error levels" (2019), whose sets may be empty.
    """

    def __init__(self, scores: Scores, target: ClassIndices, coverage: float = 0.9) -> None:
        share = checked_coverage(coverage)
        shape = Shape.of(scores)
        found = conformity(scores, checks.class_indices(target, shape.batch, shape.classes))
        self.coverage, self.threshold = float(share), threshold(found, share)

    def __call__(self, scores: Scores) -> Bool[Tensor, "batch n *positions"] | Bool[Tensor, " n"]:
        Shape.of(scores)
        return shown(scores, self.threshold)

    def __repr__(self) -> str:
        return f"PredictionSets(coverage={self.coverage:g}, threshold={self.threshold:g})"


def checked_coverage(coverage: object) -> Fraction:
    """The coverage as it was written: 0.55 times 100 is 55, which in binary it is not."""
    value = checks.number("coverage", coverage, "a number above 0 and below 1")
    if not 0 < value < 1:
        raise ValueError(f"coverage: expected a number above 0 and below 1, got {value:g}")
    return Fraction(str(value))


def conformity(scores: Tensor, target: Tensor) -> Tensor:
    """How well each target goes with its scores, as one row: its log-probability, infinite for a first guess."""
    scores, dim = scores.detach().to(checks.working_dtype(scores)), min(1, scores.ndim - 1)
    own = scores.log_softmax(dim).gather(dim, target.unsqueeze(dim)).squeeze(dim)
    first = scores.gather(dim, target.unsqueeze(dim)).squeeze(dim) == scores.amax(dim)
    return own.masked_fill(first & ~own.isnan(), torch.inf).reshape(-1)


def threshold(conformity: Tensor, coverage: Fraction) -> float:
    """What a class needs to be shown: the ceil((n + 1) coverage)-th largest of n."""
    n, place = len(conformity), math.ceil((len(conformity) + 1) * coverage)
    if place > n:
        needed = math.ceil(coverage / (1 - coverage))
        raise ValueError(
            f"scores: expected at least {needed} examples for a coverage of {float(coverage):g}, got {n}: with fewer, only "
            "the set of all classes is sure to reach it"
        )
    if bool((unknown := conformity.isnan()).any()):
        raise ValueError(
            f"scores: expected no NaN, no inf and no row of -inf alone, got them in {int(unknown.sum())} of {n} rows"
        )
    return float(conformity.sort(descending=True).values[place - 1])


def shown(scores: Tensor, threshold: float) -> Tensor:
    """The set of each row."""
    scores, dim = scores.detach().to(checks.working_dtype(scores)), min(1, scores.ndim - 1)
    # "Not below" shows all of a row with NaN.
    return ~(scores.log_softmax(dim) < threshold) | (scores == scores.amax(dim, keepdim=True))
