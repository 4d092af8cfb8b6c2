"""Means over seeds, and whether two methods differ by more than chance: on the same seeds, and on the same examples too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
SIGNIFICANT = 0.05
#: with fewer seeds there is no test
ENOUGH_SEEDS = 3
#: with fewer examples (or groups of them) that differ, a variance says little: their signs are counted
ENOUGH_DIFFERING = 10


def mean(values: Sequence[float]) -> float:
    """The mean.

    >>> mean([1, 2, 4])
    2.3333333333333335
    """
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float | None:
    """The standard deviation of the sample (n - 1 in the denominator); None for a single value.

    >>> std([1, 2, 3])
    1.0
    """
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class Paired:
    """The mean difference of two methods over the same seeds.

    ``low`` and ``high`` bound its confidence interval, ``p`` is of the two-sided test. Where there is no interval, or no
    test, they are None; ``reason`` says why there is no test.
    """

    difference: float
    count: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    reason: str | None = None
    examples: int | None = None
    """the number of test examples, where the difference is one of hits"""

    @property
    def hits(self) -> float | None:
        """The difference as a number of test examples, the mean over the seeds."""
        return None if self.examples is None else self.difference * self.examples


@dataclass(frozen=True)
class Contrast:
    """Hits of a method minus hits of another on the same test examples and seeds, for one k.

    With d(i, s) in {-1, 0, 1} for example i and seed s: what :func:`two_way` needs, and no more. Examples that belong
    together are a cluster; without clusters, each example is its own. T is the sum of d over the seeds and the examples of a
    cluster, n the number of its examples.
    """

    method: str
    against: str
    metric: str
    """top1, top5, ..."""
    by_seed: tuple[int, ...]
    """the sum of d(i, s) over the examples, for each seed"""
    examples: int
    """N"""
    clusters: int
    """G; N where every example stands for itself"""
    differing: int
    """clusters with a d(i, s) that is not 0"""
    gained: int
    """clusters with T > 0"""
    lost: int
    """clusters with T < 0"""
    squared_totals: int
    """the sum of T²"""
    sized_totals: int
    """the sum of T n"""
    squared_sizes: int
    """the sum of n²"""


def contrast(
    method: str, against: str, metric: str, differences: NDArray[Any], clusters: NDArray[Any] | None = None
) -> Contrast:
    """Count what the test needs.

    Args:
        method: whose hits count as 1.
        against: whose hits count as -1.
        metric: which hits.
        differences: (S, N), the d(i, s).
        clusters: (N,), to which cluster each example belongs, as integers; None: each to its own.

    >>> found = contrast("a", "b", "top1", np.array([[1, 0, -1], [1, 0, 0]]))
    >>> found.by_seed, found.differing, found.gained, found.lost
    ((0, 1), 2, 1, 1)
    """
    differences = np.asarray(differences)
    totals, differing = differences.sum(0, dtype=np.int64), (differences != 0).any(0)
    sizes = np.ones_like(totals)
    if clusters is not None:
        _, place = np.unique(clusters, return_inverse=True)
        # bincount adds in float64, which holds these counts exactly.
        totals, sizes, differing = (np.bincount(place, each).astype(np.int64) for each in (totals, sizes, differing))
    return Contrast(
        method,
        against,
        metric,
        by_seed=tuple(int(total) for total in differences.sum(1, dtype=np.int64)),
        examples=differences.shape[1],
        clusters=len(totals),
        differing=int((differing > 0).sum()),
        gained=int((totals > 0).sum()),
        lost=int((totals < 0).sum()),
        squared_totals=int((totals**2).sum()),
        sized_totals=int((totals * sizes).sum()),
        squared_sizes=int((sizes**2).sum()),
    )


def two_way(counted: Contrast, confidence: float = CONFIDENCE) -> Paired:
    """Whether a difference in hits is more than the luck of the seeds and of the test examples.

    The variance of the mean of d is V + W: that of the seeds' means over S, plus that of the examples' means over N (of the
    clusters', as of a ratio). Together they count twice what is of neither alone, so they are not too small. The interval's
    half is the root of t² V + u² W, with the quantiles t and u of Student's t with S - 1 and G - 1 degrees of freedom; p is
    the level at which it ends at 0. That holds its level whatever the two variances are (Banerjee, Sankhyā 23, 1961).
    One t with Satterthwaite's degrees of freedom does not: three seeds that happen to agree make them many. It finds
    something in up to 7.8 % of comparisons where nothing is at the level of 5 %, in 3.2 % at that of 0.83 %.

    Where fewer than ten examples differ, their signs must say the same: p is then the larger of that and the exact sign
    test's over the examples, and there is no interval.

    >>> gains = np.zeros((3, 400), dtype=int)
    >>> gains[:, 7] = 1  # one example of 400, on every seed
    >>> two_way(contrast("a", "b", "top1", gains)).reason
    'only 1 of the 400 test examples differs: too few to tell'
    """
    seeds, examples, groups = len(counted.by_seed), counted.examples, counted.clusters
    total = sum(counted.by_seed)
    difference = total / (seeds * examples)

    def untested(reason: str) -> Paired:
        return Paired(difference, seeds, reason=reason, examples=examples)

    what = "test examples" if groups == examples else "groups of test examples"
    if seeds < ENOUGH_SEEDS:
        return untested("there is one seed only" if seeds == 1 else f"{seeds} seeds are too few to tell")
    if not counted.differing:
        return untested("no test example differs")
    few = counted.differing < ENOUGH_DIFFERING
    if few and _sign_test(counted.gained + counted.lost, 0) >= SIGNIFICANT:
        verb = "differs" if counted.differing == 1 else "differ"
        return untested(f"only {counted.differing} of the {groups:,} {what} {verb}: too few to tell")
    of_seeds = (std([hits / examples for hits in counted.by_seed]) or 0.0) ** 2 / seeds
    # The sum of (T - n S D)², in whole numbers as far as they go: S D = total / N.
    squares = counted.squared_totals * examples**2 - 2 * total * examples * counted.sized_totals
    squares += total**2 * counted.squared_sizes
    of_examples = groups / (groups - 1) * squares / (examples**2 * seeds) ** 2
    if not of_seeds + of_examples:  # all examples differ, in the same way on every seed
        return Paired(difference, seeds, p=_sign_test(counted.gained, counted.lost), examples=examples)
    parts = ((of_seeds, seeds - 1), (of_examples, groups - 1))
    p = _level(abs(difference), parts)
    if few:
        return Paired(difference, seeds, p=max(p, _sign_test(counted.gained, counted.lost)), examples=examples)
    half = _half(1 - confidence, parts)
    return Paired(difference, seeds, difference - half, difference + half, p, examples=examples)


Parts = Sequence[tuple[float, int]]
"""variances that add up, each with its degrees of freedom"""


def _half(level: float, parts: Parts) -> float:
    """Half the interval that misses the truth with at most this probability."""
    from scipy.special import stdtrit  # a third of a second, which a table without tests need not wait for

    return math.sqrt(math.fsum(variance * float(stdtrit(freedom, level / 2)) ** 2 for variance, freedom in parts))


def _level(difference: float, parts: Parts) -> float:
    """The level at which half the interval is the difference."""
    from scipy.optimize import brentq
    from scipy.special import stdtr

    error = math.sqrt(math.fsum(variance for variance, _ in parts))
    # Between those of one t with the most and with the fewest degrees of freedom.
    low, high = sorted(2 * float(stdtr(freedom, -difference / error)) for _, freedom in parts)
    if high - low < 1e-12:
        return high
    low, high = max(low * (1 - 1e-9), 1e-300), min(high * (1 + 1e-9), 1.0)  # one of them may be it

    def excess(level: float) -> float:
        return _half(level, parts) - difference

    if excess(low) <= 0:  # beyond all that can be told, as where all seeds agree on nearly all examples
        return low
    return high if excess(high) >= 0 else float(brentq(excess, low, high, xtol=1e-13))


def _sign_test(gained: int, lost: int) -> float:
    """The two-sided p of so many signs, if both are equally likely.

    >>> _sign_test(5, 1), _sign_test(6, 0)
    (0.21875, 0.03125)
    """
    count, fewer = gained + lost, min(gained, lost)
    return min(1.0, 2 * sum(math.comb(count, hits) for hits in range(fewer + 1)) / 2**count)


def fewest_units(tests: int) -> int:
    """How many test examples, or groups of them, must differ for the smallest p of so many tests to be able to be significant.

    From :data:`ENOUGH_DIFFERING` on, there is no such bound.

    >>> fewest_units(1), fewest_units(4), fewest_units(1000)
    (6, 8, 10)
    """
    return next((n for n in range(1, ENOUGH_DIFFERING) if tests * _sign_test(n, 0) < SIGNIFICANT), ENOUGH_DIFFERING)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct the p of a family of tests by Holm's method: the chance of even one false finding stays below the level.

    The smallest p is multiplied by the number of tests, the next by one less, and so on, never falling and never above 1.
    None stands for a test that could not be made: it stays None and does not count.

    Raises:
        ValueError: one is NaN.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    if any(p is not None and math.isnan(p) for p in p_values):
        raise ValueError(f"p_values: expected numbers or None, got {list(p_values)}")
    tested = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for step, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - step) * p))
        corrected[place] = largest
    return corrected
