"""The search for the best point of one method: which runs to make next, and when to stop. No training in here, and no files.

An axis is a list of numbers; a point has a place on each axis. The caller makes the trials that it is asked for and tells
their scores; which trials come next follows from the scores alone, so that the same scores lead the same way again.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Point = tuple[int, ...]

#: learning rates of the first stage, those around one that is known to be good, and how many are tried at full length at once
COARSE_POINTS, KNOWN_POINTS, SURVIVORS = 5, 3, 3
#: short runs of a method, at most: on a plateau, a search goes on for long and finds nothing
MOST_LOOKS = 20
#: extra points that are tried at once; not the number of jobs, so that the outcome does not depend on the machine
ROUND = 4
#: what a config takes
SMALLEST, LARGEST = 1e-30, 1e30
#: the option that ended a search which was out of time
TIME = "--time"


@dataclass(frozen=True)
class Effort:
    """How thoroughly each method is tuned, and on how many seeds it is then judged."""

    points: int | None
    """searched is in short runs, and so many of the best points are tried at full length; None: all are"""
    finalists: int
    """how many of the points that noise could have put in another order are tried on further seeds"""
    tuning_seeds: int
    """and on how many in all; 1: the first decides"""
    seeds: int
    """runs of the tuned method"""
    usual: tuple[int, int, int]
    """what a method usually needs: short runs, points at full length, runs on further seeds. For the plan alone."""


EFFORTS = {
    "quick": Effort(points=2, finalists=1, tuning_seeds=1, seeds=3, usual=(13, 2, 0)),
    "normal": Effort(points=4, finalists=1, tuning_seeds=1, seeds=5, usual=(13, 4, 0)),
    "thorough": Effort(points=None, finalists=4, tuning_seeds=3, seeds=5, usual=(5, 16, 8)),
}


@dataclass(frozen=True)
class Axis:
    """One number to tune.

    Args:
        name: the field of the config.
        values: all that can be tried, ascending; the ends are bounds.
        start: the place of the value to start with.
        steps: so many places apart are the points of a stage, coarse to fine.
    """

    name: str
    values: tuple[float, ...]
    start: int
    steps: tuple[int, ...]

    def step(self, stage: int) -> int:
        """The places between the points of a stage; the last step serves all further stages."""
        return self.steps[min(stage, len(self.steps) - 1)]


def geometric(name: str, start: float, *, base: float, places: int, powers: int, steps: tuple[int, ...]) -> Axis:
    """Values around ``start`` in equal ratios: ``places`` of them for each factor of ``base``, ``powers`` of it either way.

    >>> geometric("temperature", 1.0, base=2, places=1, powers=2, steps=(1,)).values
    (0.25, 0.5, 1.0, 2.0, 4.0)
    """
    exponents = range(-powers * places, powers * places + 1)
    # Four digits: they are read by people, and the start stays what it was.
    values = [float(f"{start * base ** (exponent / places):.4g}") if exponent else start for exponent in exponents]
    possible = tuple(value for value in values if SMALLEST <= value <= LARGEST)
    return Axis(name, possible, possible.index(start), steps)


def listed(name: str, start: float, values: Iterable[float]) -> Axis:
    """These values and the start, if it is none of them.

    >>> listed("ce_weight", 0.3, (0.1, 0.2, 0.5)).values
    (0.1, 0.2, 0.3, 0.5)
    """
    ordered = tuple(sorted({*values, start}))
    return Axis(name, ordered, ordered.index(start), (1,))


def learning_rates(start: float) -> Axis:
    """Steps of 10, of the root of 10, of 1.8, and 1.3 for extra tries; eight powers of ten either way, which training
    leaves long before: there it stands still, or diverges."""
    return geometric("learning_rate", start, base=10, places=8, powers=8, steps=(8, 4, 2))


class Trial(NamedTuple):
    """One run: a point, whether it is a short one of the first stage, and the number of the tuning seed."""

    point: Point
    short: bool = False
    seed: int = 0


class Tuner:
    """The search for the best point of one method.

    >>> tuner = Tuner([learning_rates(1e-3)], examples=1000)
    >>> for trials in tuner.search():
    ...     for trial in trials:
    ...         tuner.tell(trial, 0.9 - abs(math.log10(tuner.values(trial.point)[0]) + 1) / 10)
    >>> tuner.values(tuner.best)
    (0.1,)

    Args:
        axes: the learning rate first.
        examples: how many the scores, which are shares of hits, were counted on: the noise follows from it.
        effort: how thoroughly to search.
        shortens: whether there can be short runs.
        budget: the most points to try at full length.
        tuning_seeds: on so many seeds those within noise of the best are tried; None: by the effort.
        rate: the place of a learning rate that is known to be good, of another method: it is where the search begins.
        expired: whether there is no time for more; asked before each round.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        *,
        examples: int,
        effort: Effort = EFFORTS["thorough"],
        shortens: bool = True,
        budget: int | None = None,
        tuning_seeds: int | None = None,
        rate: int | None = None,
        expired: Callable[[], bool] = lambda: False,
    ) -> None:
        self.axes, self.examples, self.shortens, self.effort = tuple(axes), examples, shortens, effort
        self.budget, self.tuning_seeds, self.expired = budget, tuning_seeds or effort.tuning_seeds, expired
        self.rate = rate
        #: whether the search is in short runs
        self.short = shortens and effort.points is not None
        self.scores: dict[Trial, float | None] = {}
        self._cap = ""
        self._finalists: dict[Point, None] = {}  # in the order in which they came

    # What was found --------------------------------------------------------------------------------------------------------

    def values(self, point: Point) -> tuple[float, ...]:
        """The numbers at a point."""
        return tuple(axis.values[place] for axis, place in zip(self.axes, point, strict=True))

    @property
    def tries(self) -> int:
        """Points that were tried at full length."""
        return len(self._tried())

    @property
    def looks(self) -> int:
        """Points that were tried at the length of the search."""
        return len(self._tried(self.short))

    @property
    def best(self) -> Point | None:
        """The best point so far: of those tried on all seeds, if there are any; None if every run diverged."""
        complete = [point for point in self._finalists if len(self.seeds(point)) == self.tuning_seeds]
        top = max(complete, key=self.mean, default=None)
        if top is not None and self.mean(top) > -math.inf:
            return top
        return self._top(short=False) or self._top(short=True)

    @property
    def capped(self) -> str:
        """The option that ended the search before it was at its end; "" if none did."""
        done = not self.short and self.best in self._tried() and not self._missing_neighbours(self.best, self._last)
        return "" if done and self._cap != TIME else self._cap

    @property
    def bounds(self) -> tuple[str, ...]:
        """Where the best point lies at the end of an axis, in words."""
        best, words = self.best, []
        if self.tries == 1:  # nothing was looked for
            return ()
        for axis, place in zip(self.axes, best, strict=True) if best is not None else ():
            # Of two values one is always at an end; and beyond no smoothing, or a q of 1, there is nothing.
            if len(axis.values) > 2 and place in (0, len(axis.values) - 1) and axis.values[place] not in (0.0, 1.0):
                end = "smallest" if place == 0 else "largest"
                words.append(f"{axis.name.replace('_', ' ')} {axis.values[place]:g}, the {end} that is tried")
        return tuple(words)

    def seeds(self, point: Point) -> list[float | None]:
        """The scores of a point at full length, seed by seed."""
        trials = (Trial(point, seed=seed) for seed in range(self.tuning_seeds))
        return [self.scores[trial] for trial in trials if trial in self.scores]

    def mean(self, point: Point) -> float:
        """The mean score of a point; minus infinity where a run diverged."""
        scores = [score for score in self.seeds(point) if score is not None]
        return math.fsum(scores) / len(scores) if len(scores) == len(self.seeds(point)) else -math.inf

    def _tried(self, short: bool = False) -> list[Point]:
        return [trial.point for trial in self.scores if trial.short == short and trial.seed == 0]

    def _first(self, point: Point, short: bool = False) -> float:
        """The score on the first seed: all points have that one, so it compares them as equals. A point that diverged on a
        further seed is out."""
        score = self.scores[Trial(point, short)]
        return -math.inf if score is None or (not short and None in self.seeds(point)) else score

    def _top(self, short: bool) -> Point | None:
        """The best on the first seed, the first tried among equals.

        In short runs, of the points within half a standard error the one with the lowest learning rate. On few validation
        examples the scores of rates that differ a hundredfold may be alike but for luck, and a long run wants a lower one.
        """
        ranked = self._ranked(short)
        if not ranked or not short:
            return next(iter(ranked), None)
        near = self._within(ranked, 0.5 * self._noise(ranked[0], short), short)
        if len(near) == len(ranked):  # they tell nothing
            return ranked[0]
        return min(near, key=lambda point: (point[0], ranked.index(point)))

    def _ranked(self, short: bool) -> list[Point]:
        """Those that did not diverge, by their score on the first seed."""
        finite = [point for point in self._tried(short) if self._first(point, short) > -math.inf]
        return sorted(finite, key=lambda point: -self._first(point, short))

    def _from_top(self) -> list[Point]:
        """Those of the short runs that did not diverge: the top, then by their score."""
        top = self._top(short=True)
        return sorted(self._ranked(short=True), key=lambda point: point != top)

    # The search ------------------------------------------------------------------------------------------------------------

    def tell(self, trial: Trial, score: float | None) -> None:
        """Take note of a score; None: it diverged."""
        self.scores[trial] = score if score is not None and math.isfinite(score) else None

    def stop(self) -> None:
        """Take note that there is no time for the trials that were asked for."""
        self._cap = TIME

    def search(self) -> Iterator[list[Trial]]:
        """Rounds of trials, until the best point has worse neighbours on both sides in every dimension, or lies at a bound.

        It ends because the axes do: every round has a trial that was not made before, and there are finitely many.
        """
        yield from self._coarse()
        for stage in range(self._last + 1):
            yield from self._climb(stage)
        if not self.short:
            yield from self._settle()

    def spend(self, looks: int) -> Iterator[list[Trial]]:
        """Rounds until so many points were tried: the nearest to the best, which may move it.

        After a move the best must have its neighbours again, so that there can be more tries than asked for: see
        :func:`behind`.
        """
        while self.looks < looks:
            made = self._allowed(self._extras()[: min(ROUND, looks - self.looks)], self.short)
            if not made:
                return
            yield [Trial(point, self.short) for point in made]
            yield from self._climb(self._last) if self.short else self._settle()

    def promote(self) -> Iterator[list[Trial]]:
        """After a search in short runs: the best of them at full length, and what lies around the best of those. As many points
        for every method."""
        points = self.effort.points
        if not self.short or points is None:
            return
        while (top := self._top(short=False)) is None or self.tries < points:
            ranked, tried = self._from_top(), set(self._tried())
            if top is None and tried:  # what is fine for a while may diverge later: then lower rates
                lowest = min(tried)
                place = lowest[0] - self.axes[0].step(0)
                ranked = [point for point in ranked if point[0] < lowest[0]] + [(place, *lowest[1:])] * (place >= 0)
            start = top or next(iter(ranked), None)
            # First both ends of what is alike in short runs: the lowest rate, and the one with the best score.
            ends = [] if tried else self._ranked(short=True)[:1]
            ends = [] if start is None else [*ends, start] if self.budget == 1 else [start, *ends]
            wanted = [] if start is None else [*ends, *self._around(start)]
            untried = [point for point in dict.fromkeys([*wanted, *ranked]) if point not in tried]
            made = self._allowed(untried[: max(1, min(2, points - self.tries))])
            if not made:
                break
            yield [Trial(point) for point in made]

    def _around(self, point: Point) -> list[Point]:
        """What may be better at full length than a point that was good in short runs, most likely first: lower learning rates,
        since the best rate of a short run is larger, then a higher one, then other values on the other axes."""
        rate, *others = self.axes
        line = [other[0] - point[0] for other in self._tried() if other[1:] == point[1:]]
        found = []
        for sign, far in ((-1, rate.step(1)), (1, rate.steps[-1])):
            near = min((sign * offset for offset in line if sign * offset > 0), default=far + 1)
            if near > rate.steps[-1]:
                place = point[0] + sign * (far if near > far else rate.steps[-1])
                found += [(place, *point[1:])] if 0 <= place < len(rate.values) else []
        beside = []
        for number, axis in enumerate(others, start=1):
            for place in (point[number] - axis.steps[-1], point[number] + axis.steps[-1]):
                if 0 <= place < len(axis.values):
                    beside.append((*point[:number], place, *point[number + 1 :]))
        return found + sorted(beside, key=lambda other: -self._first_or_nothing(other))

    def _first_or_nothing(self, point: Point) -> float:
        return self._first(point, short=True) if Trial(point, True) in self.scores else -math.inf

    def _coarse(self) -> Iterator[list[Trial]]:
        """Learning rates over four powers of ten or more, in short runs; the best few are tried at full length.

        Around a rate that is known to be good, fewer and nearer ones."""
        rate, *others = self.axes
        known = self.rate is not None
        step, rest = rate.step(int(known)), tuple(axis.start for axis in others)
        half = (KNOWN_POINTS if known else COARSE_POINTS) // 2
        start = rate.start if self.rate is None else self.rate
        asked = [start + offset * step for offset in sorted(range(-half, half + 1), key=abs)]
        short = self.shortens
        while asked := [place for place in asked if 0 <= place < len(rate.values)]:
            points = [(place, *rest) for place in asked]
            made = self._allowed(points, short)
            if made:
                yield [Trial(point, short) for point in made]
            if len(made) < len(points):
                break
            places, top = [point[0] for point in self._tried(short)], self._top(short)
            if top is None or top[0] == min(places):  # all diverged: no larger rate will help
                asked = [min(places) - step]
            elif top[0] == max(places):
                asked = [max(places) + step]
            else:
                break
        if short and not self.short:
            ranked = self._from_top()
            lower = range(min((point[0] for point in ranked), default=0) - step, -1, -step)
            rounds = [ranked[:SURVIVORS], *([point] for point in (*ranked[SURVIVORS:], *((place, *rest) for place in lower)))]
            # What is fine for a while may diverge later: then the next, and lower rates.
            while rounds and self._top(short=False) is None and (made := self._allowed(rounds.pop(0))):
                yield [Trial(point) for point in made]

    def _climb(self, stage: int) -> Iterator[list[Trial]]:
        """Rounds until the best has its neighbours of a stage."""
        while (top := self._top(self.short)) is not None:
            made = self._allowed(self._missing_neighbours(top, stage), self.short)
            if not made:
                return
            yield [Trial(point, self.short) for point in made]

    def _settle(self) -> Iterator[list[Trial]]:
        """Let further seeds decide between points that are within noise, until the best of them has its neighbours."""
        while (top := self._top(short=False)) is not None:
            known = len(self.scores), len(self._finalists)
            self._finalists |= dict.fromkeys(self._contenders(top))
            repeats = [
                trial
                for point in (self._finalists if len(self._finalists) > 1 else ())
                for seed in range(1, self.tuning_seeds)
                if (trial := Trial(point, seed=seed)) not in self.scores
            ]
            if repeats and not self._out_of_time():
                yield repeats
            best = self.best
            if best is None:  # on a further seed, all have failed
                return
            if made := self._allowed(self._missing_neighbours(best, self._last)):
                yield [Trial(point) for point in made]
            if known == (len(self.scores), len(self._finalists)):
                return

    def _contenders(self, top: Point) -> list[Point]:
        """The points that noise alone could have put behind the top, the best few."""
        return self._within(self._ranked(short=False)[: self.effort.finalists], self._noise(top))

    def _noise(self, point: Point, short: bool = False) -> float:
        """A standard error of the hits counted."""
        score = self._first(point, short)
        return math.sqrt(max(score * (1 - score), 0.0) / self.examples)

    def _within(self, ranked: list[Point], noise: float, short: bool = False) -> list[Point]:
        return [point for point in ranked if self._first(point, short) >= self._first(ranked[0], short) - noise]

    def _neighbours(self, point: Point, stage: int) -> list[Point]:
        """On both sides along each axis, a step of the stage away or less: the nearest that was tried, or else one to try.

        Before the finest stage it may lie off the line through the point: what a rate of a tenth is worth need not be found
        out again for each value of the other axis.
        """
        found, tried = [], self._tried(self.short)
        for number, axis in enumerate(self.axes):
            for sign in (1, -1):
                places = [point[number] + sign * distance for distance in range(1, axis.step(stage) + 1)]
                places = [place for place in places if 0 <= place < len(axis.values)]
                line = [(*point[:number], place, *point[number + 1 :]) for place in places]
                near = [other for other in tried if (other[number] in places if stage < self._last else other in line)]
                if line:
                    found.append(min(near, key=lambda other: abs(other[number] - point[number]), default=line[-1]))
        return found

    def _missing_neighbours(self, point: Point, stage: int) -> list[Point]:
        tried = set(self._tried(self.short))
        return [other for other in self._neighbours(point, stage) if other not in tried]

    def _extras(self) -> list[Point]:
        """Untried points around the best: the diagonals, which a search along the axes does not see, then the nearest."""
        best = self.best
        if best is None:
            return []
        steps, tried = [axis.steps[-1] for axis in self.axes], set(self._tried(self.short))

        def order(point: Point) -> tuple[bool, float]:
            offsets = [(place - own) / step for place, own, step in zip(point, best, steps, strict=True)]
            return {abs(offset) for offset in offsets} != {1.0}, math.hypot(*offsets)

        everywhere = itertools.product(*(range(len(axis.values)) for axis in self.axes))
        return sorted((point for point in everywhere if point not in tried), key=order)

    @property
    def _last(self) -> int:
        """The finest stage."""
        return max(len(axis.steps) for axis in self.axes) - 1

    # Caps ------------------------------------------------------------------------------------------------------------------

    def _allowed(self, points: list[Point], short: bool = False) -> list[Point]:
        """As many of the points as the caps allow."""
        if not points or self._out_of_time():
            return []
        if short == self.short and self.effort.points is not None:
            points = points[: max(MOST_LOOKS - self.looks, 0)]
        if short or self.budget is None:
            return points
        left = max(self.budget - self.tries, 0)
        if left < len(points):
            self._cap = f"--budget {self.budget}"
        return points[:left]

    def _out_of_time(self) -> bool:
        if self.expired():
            self._cap = TIME
        return self._cap == TIME


def behind(tuners: Sequence[Tuner]) -> int | None:
    """The tries that each search should have because one of them had as many; None if all have.

    To be asked again after they were spent, because an extra try may move a best point and cost more tries than the others
    had. That comes to an end: each turn tries a new point of one of them, and the points are finitely many. It ends soon,
    because the more points were tried, the rarer one more is the best.
    """
    most = max(tuner.looks for tuner in tuners)
    able = [tuner for tuner in tuners if not tuner.capped and tuner._extras()]
    return most if any(tuner.looks < most for tuner in able) else None
