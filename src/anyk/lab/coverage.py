"""How long a list of guesses must be: how many of them cover a share of the test examples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: percent of the test examples
SHARES = (50, 80, 90, 95, 99)
#: points of a curve, at most
_POINTS = 60


@dataclass(frozen=True)
class Coverage:
    """How often the target is among the first k guesses, as a mean over the runs of a method."""

    method: str
    guesses: Mapping[int, int | None]
    """for each of some percentages the smallest k at which the mean over the runs is as large; None where all classes are not
    enough, because targets are none of them"""
    curve: tuple[tuple[int, float], ...]
    """k, from 1 to the number of classes, and the mean over the runs of the fraction that k guesses cover"""

    @classmethod
    def of(cls, method: str, ranks: NDArray[Any], classes: int) -> "Coverage":
        """From the ranks of the targets, 1 for the best: of all runs together, each with the same test examples.

        >>> Coverage.of("softmax", np.array([1, 1, 2, 5]), classes=4).guesses
        {50: 1, 80: None, 90: None, 95: None, 99: None}
        """
        ordered = np.sort(ranks, axis=None)
        # The first that so many percent do not exceed, in whole numbers: 0.95 times 100 is not 95 in binary.
        needed = {share: int(ordered[-(-share * len(ordered) // 100) - 1]) for share in SHARES}
        some = np.arange(1, classes + 1) if classes <= _POINTS else np.geomspace(1, classes, _POINTS)
        ks = np.unique(some.round().astype(int))
        covered = np.searchsorted(ordered, ks, side="right") / len(ordered)
        return cls(
            method,
            {share: k if k <= classes else None for share, k in needed.items()},
            tuple(zip(ks.tolist(), covered.tolist(), strict=True)),
        )
