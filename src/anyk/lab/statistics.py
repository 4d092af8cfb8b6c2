"""Means over seeds, and whether two methods differ on the same seeds by more than chance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
SIGNIFICANT = 0.05


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

    ``low`` and ``high`` bound its confidence interval, ``p`` is of the two-sided paired t-test. Where there is no test,
    these three are None and ``reason`` says why.
    """

    difference: float
    count: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    reason: str | None = None


def paired(values: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE) -> Paired:
    """Compare two equally long lists, the same seed at the same place.

    >>> result = paired([3.0, 4.0, 6.0], [1.0, 3.0, 3.0])
    >>> round(result.difference, 6), round(result.p, 4)
    (2.0, 0.0742)
    """
    from scipy.special import stdtr, stdtrit  # a third of a second, which a table without tests need not wait for

    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    difference, count = mean(differences), len(differences)
    spread = std(differences)
    if spread is None:
        return Paired(difference, count, reason="there is one seed only")
    # Equal differences are not exactly equal in floating point; their rounding errors must not pass for a tiny variance.
    if spread <= 1e-12 * max(map(abs, (*values, *baseline))):
        return Paired(difference, count, reason="the difference is the same on every seed")
    error = spread / math.sqrt(count)
    half = float(stdtrit(count - 1, (1 + confidence) / 2)) * error
    p = 2 * float(stdtr(count - 1, -abs(difference) / error))
    return Paired(difference, count, difference - half, difference + half, p)


def exceeds(found: Paired, bound: float = 0.0) -> float:
    """The p of the one-sided test that the mean difference is above ``bound``.

    >>> result = paired([3.0, 4.0, 6.0], [1.0, 3.0, 3.0])
    >>> round(exceeds(result), 4), round(exceeds(result, bound=2.0), 4)
    (0.0371, 0.5)
    """
    from scipy.special import stdtr, stdtrit

    if found.low is None or found.high is None:
        return 0.0 if found.difference > bound else 1.0
    error = (found.high - found.low) / 2 / float(stdtrit(found.count - 1, (1 + CONFIDENCE) / 2))
    return float(stdtr(found.count - 1, (bound - found.difference) / error))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct the p of a family of tests by Holm's method: the chance of even one false finding stays below the level.

    The smallest p is multiplied by the number of tests, the next by one less, and so on, never falling and never above 1.
    None stands for a test that could not be made: it stays None and does not count.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    tested = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for step, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - step) * p))
        corrected[place] = largest
    return corrected
