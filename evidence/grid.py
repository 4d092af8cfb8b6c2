"""The search with which the study's runs were tuned: a grid of factor 2, a fixed number of tries.

`anyk compare` has another one now, which has an end of its own (anyk.lab.comparison.tuning). The summaries were found by this.
"""

import itertools
from collections.abc import Mapping

from anyk.lab.run.config import Config

ROUND = 2
"""tries that are made at once"""

Point = tuple[int, ...]


def at(start: Config, point: Point) -> Config:
    """The config at a point of the grid: so many factors of 2 in the learning rate and in the temperature."""
    changes: dict[str, float] = {"learning_rate": start.learning_rate * 2.0 ** point[0]}
    if len(point) > 1:
        changes["temperature"] = start.temperature * 2.0 ** point[1]
    return start.replace(**changes)


def best_point(scores: Mapping[Point, float | None]) -> Point:
    """The point with the best score, the first tried among equals; failed tries are worse than any score."""
    return max(scores, key=lambda point: -1.0 if (score := scores[point]) is None else score)


def next_points(scores: Mapping[Point, float | None], dimensions: int) -> list[Point]:
    """The points to try next, in order: those nearest to the best so far that have not been tried.

    >>> next_points({}, 2)[:2]
    [(0, 0), (1, 0)]
    >>> next_points({(0, 0): 0.5, (1, 0): 0.7}, 2)[:3]
    [(1, 1), (1, -1), (2, 0)]
    """
    if not scores:
        first: Point = (0,) * dimensions
        return [first, (1, *first[1:])]
    centre, reach = best_point(scores), len(scores) + 2
    explored = [len({point[axis] for point in scores}) for axis in range(dimensions)]

    def order(offset: Point) -> tuple[int, int, list[int]]:
        """Nearest first; then along the axis of which less is known; then upwards before downwards."""
        longest = max(range(dimensions), key=lambda axis: (abs(offset[axis]), axis))
        return sum(map(abs, offset)), explored[longest], [-step for step in offset]

    offsets = sorted(itertools.product(range(-reach, reach + 1), repeat=dimensions), key=order)
    points = [tuple(c + step for c, step in zip(centre, offset, strict=True)) for offset in offsets]
    return [point for point in points if point not in scores]
