"""The search for a method's best point, on landscapes that are made up."""

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyk.lab.comparison.tuning import EFFORTS, Axis, Point, Trial, Tuner, behind, geometric, learning_rates, listed

TUNING_SEEDS = EFFORTS["thorough"].tuning_seeds
Landscape = Callable[[Trial], float | None]
SMOOTHING = listed("label_smoothing", 0.0, (0.0, 0.05, 0.1, 0.2))
TEMPERATURE = geometric("temperature", 1.0, base=2, places=2, powers=8, steps=(4, 2))


def hill(axes: list[Axis], top: list[float], *, noise: float = 0.0, salt: int = 0, cliff: float = math.inf) -> Landscape:
    """Highest at ``top`` (in coarse steps from the start), with noise by the trial; beyond the cliff it diverges."""

    def score(trial: Trial) -> float | None:
        offsets = [(place - axis.start) / axis.step(0) for axis, place in zip(axes, trial.point, strict=True)]
        if offsets[0] > cliff:
            return None
        height = 0.9 - sum(abs(offset - at) ** 1.5 for offset, at in zip(offsets, top, strict=True)) / 40
        return min(max(height + noise * random.Random(repr((trial, salt))).gauss(), 0.0), 1.0)

    return score


def make(rounds: Iterator[list[Trial]], tuner: Tuner, landscape: Landscape) -> None:
    for trials in rounds:
        assert trials, "a round without a trial would never end"
        assert len(set(trials)) == len(trials)
        assert not set(trials) & tuner.scores.keys(), "nothing is tried twice"
        for trial in trials:
            tuner.tell(trial, landscape(trial))


def surrounded(tuner: Tuner) -> bool:
    """Whether the best point has a tried point on both sides along each axis, not far off, or lies at a bound that is named."""
    best = tuner.best
    assert best is not None
    tried = {trial.point for trial in tuner.scores if not trial.short}
    named = " ".join(tuner.bounds)
    for number, axis in enumerate(tuner.axes):
        line = [point[number] - best[number] for point in tried if _without(point, number) == _without(best, number)]
        for sign, end in ((1, len(axis.values) - 1), (-1, 0)):
            near = any(0 < sign * offset <= axis.steps[-1] for offset in line)
            natural = axis.values[end] in (0.0, 1.0)  # beyond it there is nothing
            if not near and not (best[number] == end and (natural or axis.name.replace("_", " ") in named)):
                return False
    return True


def _without(point: Point, number: int) -> Point:
    return point[:number] + point[number + 1 :]


axes = st.sampled_from([[learning_rates(1e-3), SMOOTHING], [learning_rates(0.1), TEMPERATURE], [learning_rates(2e-3)]])
places = st.floats(-9, 9)
landscapes = st.fixed_dictionaries(
    {"noise": st.sampled_from([0.0, 0.003, 0.02, 0.1]), "salt": st.integers(0, 99), "cliff": st.floats(-3, 9)}
)


@settings(deadline=None)
@given(axes, st.tuples(places, places), landscapes, st.booleans(), st.sampled_from([50, 1000, 10**6]))
def test_it_ends_with_the_best_point_inside(given_axes, top, shape, shortens, examples):
    landscape = hill(given_axes, list(top[: len(given_axes)]), **shape)
    tuner = Tuner(given_axes, examples=examples, shortens=shortens)
    make(tuner.search(), tuner, landscape)
    assert tuner.capped == ""
    assert surrounded(tuner)
    best = tuner.best
    assert best is not None
    for other in {trial.point for trial in tuner.scores if not trial.short} - {best}:
        if len(tuner.seeds(other)) == TUNING_SEEDS == len(tuner.seeds(best)):  # the same number of looks decides by the mean
            assert tuner.mean(other) <= tuner.mean(best)
    again = Tuner(given_axes, examples=examples, shortens=shortens)
    make(again.search(), again, landscape)
    assert list(again.scores.items()) == list(tuner.scores.items())  # in the same order


@settings(deadline=None)
@given(st.tuples(st.floats(-5, 5), st.floats(-3, 3)), st.booleans())
def test_it_finds_the_top_of_a_hill(top, shortens):
    given_axes = [learning_rates(1e-3), TEMPERATURE]
    tuner = Tuner(given_axes, examples=10**12, shortens=shortens)
    make(tuner.search(), tuner, hill(given_axes, list(top)))
    assert tuner.best is not None
    for place, axis, at in zip(tuner.best, given_axes, top, strict=True):
        assert abs(place - axis.start - at * axis.step(0)) <= axis.steps[-1]  # a finest step
    assert tuner.tries < 40


def test_the_first_stage_covers_four_powers_of_ten_in_short_runs_and_goes_on_beyond():
    given_axes = [learning_rates(1e-3), SMOOTHING]
    tuner = Tuner(given_axes, examples=1000)
    make(tuner.search(), tuner, hill(given_axes, [3.0, 0.0]))
    short = {tuner.values(trial.point)[0] for trial in tuner.scores if trial.short}
    assert {1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0} == short
    full = [tuner.values(trial.point)[0] for trial in tuner.scores if not trial.short]
    assert min(full) >= 0.09  # what was hopeless is not trained to its end


def test_points_within_noise_are_decided_by_more_seeds():
    """The point that is lucky on the first seed is not the one with the best mean."""
    given_axes = [learning_rates(1e-3)]
    lucky = given_axes[0].start + 2

    def landscape(trial: Trial) -> float | None:
        height = 0.5 - abs(trial.point[0] - given_axes[0].start) / 1000
        return height + 0.005 if trial == Trial((lucky,)) else height

    tuner = Tuner(given_axes, examples=200)
    make(tuner.search(), tuner, landscape)
    assert tuner.best == (given_axes[0].start,)
    assert len(tuner.seeds((lucky,))) == TUNING_SEEDS
    far_apart = Tuner(given_axes, examples=10**6)
    make(far_apart.search(), far_apart, hill(given_axes, [0.0]))
    assert all(trial.seed == 0 for trial in far_apart.scores)  # no seeds where there is no doubt


def test_with_one_tuning_seed_the_first_decides():
    axes = [learning_rates(1e-3), SMOOTHING, listed("ce_weight", 0.2, (0.1, 0.2, 0.5))]
    tuner = Tuner(axes, examples=50, tuning_seeds=1)  # all are within noise
    landscape = hill(axes, [0.0, 1.0, 1.0])
    make(tuner.search(), tuner, landscape)
    assert {trial.seed for trial in tuner.scores} == {0}
    full = [trial for trial in tuner.scores if not trial.short]
    assert tuner.best == max(full, key=lambda trial: tuner.scores[trial] or 0.0).point
    assert surrounded(tuner)


def test_a_point_that_diverges_on_another_seed_is_out():
    given_axes = [learning_rates(1e-3)]
    first = hill(given_axes, [0.0])
    tuner = Tuner(given_axes, examples=10)
    make(tuner.search(), tuner, lambda trial: None if trial.seed and abs(trial.point[0] - 64) < 5 else first(trial))
    assert tuner.best is not None
    assert abs(tuner.best[0] - 64) >= 5
    assert surrounded(tuner)


def test_what_diverges_at_full_length_only_is_left_for_lower_rates():
    given_axes = [learning_rates(1e-3), SMOOTHING]
    early, late = hill(given_axes, [0.0, 0.0]), hill(given_axes, [-3.0, 0.0], cliff=-2.5)
    tuner = Tuner(given_axes, examples=500)
    make(tuner.search(), tuner, lambda trial: early(trial) if trial.short else late(trial))
    assert tuner.best is not None
    assert tuner.values(tuner.best)[0] == 1e-6
    assert surrounded(tuner)


def test_if_all_diverges_it_goes_down_and_ends():
    tuner = Tuner([learning_rates(1e-3), SMOOTHING], examples=100)
    make(tuner.search(), tuner, lambda trial: None)
    assert tuner.best is None
    assert tuner.tries == 0
    assert {tuner.values(trial.point)[0] for trial in tuner.scores} >= {1e-11, 1e-1}


def test_a_bound_is_named_unless_nothing_can_lie_beyond_it():
    axes = [learning_rates(1e-3), SMOOTHING]
    for top, words in ((9.0, ("label smoothing 0.2, the largest that is tried",)), (-1.0, ())):
        tuner = Tuner(axes, examples=10**6)
        make(tuner.search(), tuner, hill(axes, [0.0, top]))
        assert tuner.bounds == words
    alone = Tuner(axes, examples=10**6, budget=1, shortens=False)
    make(alone.search(), alone, hill(axes, [0.0, -1.0]))
    assert alone.tries == 1
    assert alone.bounds == ()


tops = st.lists(st.tuples(places, places), min_size=2, max_size=4)


@settings(deadline=None, max_examples=30)
@given(tops, landscapes, st.sampled_from([50, 1000, 10**6]), st.none() | st.integers(1, 30))
def test_all_methods_get_as_many_tries(given_tops, shape, examples, budget):
    kinds = itertools.cycle([[learning_rates(1e-3), SMOOTHING], [learning_rates(1e-3), TEMPERATURE]])
    shape = {**shape, "cliff": math.inf}
    searches = []
    for top, kind in zip(given_tops, kinds, strict=False):
        searches.append((Tuner(kind, examples=examples, budget=budget), hill(kind, list(top), **shape)))
    for tuner, landscape in searches:
        make(tuner.search(), tuner, landscape)
    tuners = [tuner for tuner, _ in searches]
    while (tries := behind(tuners)) is not None:
        for tuner, landscape in searches:
            make(tuner.spend(tries), tuner, landscape)
    assert len({tuner.tries for tuner in tuners}) == 1
    for tuner in tuners:
        assert budget is None or tuner.tries <= budget
        assert (tuner.capped == "") == surrounded(tuner)


def test_extra_tries_look_at_the_diagonals_and_may_move_the_best():
    """A ridge between the axes: along each of them, the start is the best."""
    given_axes = [learning_rates(1e-3), TEMPERATURE]

    def ridge(trial: Trial) -> float | None:
        x, y = ((place - axis.start) / axis.steps[-1] for place, axis in zip(trial.point, given_axes, strict=True))
        return 0.5 + min(x + y, 2) / 100 - abs(x - y) / 10

    tuner = Tuner(given_axes, examples=10**9)
    make(tuner.search(), tuner, ridge)
    assert tuner.best == tuple(axis.start for axis in given_axes)
    make(tuner.spend(tuner.tries + 4), tuner, ridge)
    assert tuner.best == tuple(axis.start + axis.steps[-1] for axis in given_axes)
    assert surrounded(tuner)


@settings(deadline=None)
@given(st.integers(1, 40), st.tuples(places, places), landscapes)
def test_a_budget_is_kept_and_a_larger_one_continues(budget, top, shape):
    given_axes = [learning_rates(1e-3), SMOOTHING]
    landscape = hill(given_axes, list(top), **{**shape, "cliff": math.inf})
    small, large = (Tuner(given_axes, examples=500, budget=most) for most in (budget, None))
    for tuner in (small, large):
        make(tuner.search(), tuner, landscape)
    assert small.tries <= budget
    assert bool(small.capped) == (not surrounded(small))
    if small.capped:
        assert small.capped == f"--budget {budget}"
        shared = [trial for trial in small.scores if trial.seed == 0]
        assert shared[: budget // 2] == [trial for trial in large.scores if trial.seed == 0][: budget // 2]  # the same way
    else:
        assert small.best == large.best


def test_when_the_time_is_over_it_ends_and_says_so():
    given_axes = [learning_rates(1e-3), TEMPERATURE]
    landscape, needed = hill(given_axes, [3.0, 2.0], noise=0.01), 0
    for rounds in itertools.count():
        made = []
        tuner = Tuner(given_axes, examples=500, expired=lambda made=made, rounds=rounds: len(made) >= rounds)
        for trials in tuner.search():
            made.append(trials)
            for trial in trials:
                tuner.tell(trial, landscape(trial))
        assert len(made) <= rounds
        assert (tuner.best is None) == (rounds == 0)
        if not tuner.capped:
            needed = rounds
            break
        assert tuner.capped == "--time"
    assert needed > 8
    assert surrounded(tuner)
    tuner.expired = lambda: True  # between the last point and the tries that the others had more
    make(tuner.spend(tuner.tries + 1), tuner, landscape)
    assert tuner.capped == "--time"


# --- in short runs -----------------------------------------------------------------------------------------------------


def find(kind: list[Axis], landscape: Landscape, **settings_: object) -> Tuner:
    tuner = Tuner(kind, **{"examples": 1000, "effort": EFFORTS["normal"], **settings_})  # type: ignore[arg-type]
    make(tuner.search(), tuner, landscape)
    make(tuner.promote(), tuner, landscape)
    return tuner


@settings(deadline=None)
@given(st.tuples(st.floats(-3, 3), st.floats(0, 3)), landscapes, st.sampled_from(["quick", "normal"]))
def test_the_search_is_in_short_runs_and_as_many_points_of_every_method_are_tried_at_full_length(top, shape, level):
    kind = [learning_rates(1e-3), SMOOTHING]
    tuner = find(kind, hill(kind, list(top), **{**shape, "cliff": math.inf}), effort=EFFORTS[level])
    assert tuner.tries == EFFORTS[level].points
    assert tuner.best in {trial.point for trial in tuner.scores if not trial.short}
    assert tuner.capped == ""
    assert {trial.seed for trial in tuner.scores} == {0}


@settings(deadline=None)
@given(st.floats(-2, 2), st.floats(0, 1), st.sampled_from([0.0, 1.0, 2.0, 3.0]))
def test_a_long_run_may_want_a_lower_rate_than_a_short_one(short, shift, smoothing):
    """Up to a power of ten lower: what is found is within the step of the finest stage."""
    kind = [learning_rates(1e-3), SMOOTHING]
    early, late = (hill(kind, [top, smoothing]) for top in (short, short - shift))
    tuner = find(kind, lambda trial: early(trial) if trial.short else late(trial))
    assert tuner.best is not None
    offset = (tuner.best[0] - kind[0].start) / kind[0].step(0) - (short - shift)
    assert abs(offset) <= kind[0].step(1) / kind[0].step(0) + 1e-9


def test_of_short_runs_within_half_a_standard_error_the_lowest_rate_and_the_best_are_tried_at_full_length():
    """At 0.8 of 100 examples, half a standard error is 0.02; a rate that is three times lower lies in it, or not."""
    kind = [learning_rates(1e-3), SMOOTHING]
    start, lower = kind[0].start, kind[0].start - kind[0].step(1)
    for gap in (0.019, 0.021):

        def landscape(trial: Trial, gap: float = gap) -> float:
            short = {start: 0.8, lower: 0.8 - gap}.get(trial.point[0], 0.5)
            return (short if trial.short else 0.7 + trial.point[0] / 1000) - trial.point[1] / 10

        tuner = find(kind, landscape, effort=EFFORTS["quick"], examples=100)
        tried = [trial.point[0] for trial in tuner.scores if not trial.short]
        assert (tried == [lower, start]) == (gap < 0.02)
        assert start in tried
        assert tuner.best == (start, 0)


@pytest.mark.parametrize("effort", ["quick", "normal", "thorough"])
def test_on_a_plateau_of_short_runs_it_does_not_walk_away_to_huge_rates(effort):
    """By short runs on 256 examples, all rates from 0.1 on are alike but for luck; in long ones 0.1 is the best."""
    kind = [learning_rates(0.1), SMOOTHING]
    start = kind[0].start

    def landscape(trial: Trial) -> float:
        above = (trial.point[0] - start) / 8
        if trial.short:
            return 0.69 + above / 10 if above < 0 else 0.69 + 0.01 * min(above, 1.5)
        return 0.77 - abs(above) / 15 - abs(trial.point[1] - 1) / 100

    tuner = find(kind, landscape, effort=EFFORTS[effort], examples=256)
    assert abs(kind[0].values[tuner.best[0]] / 0.1 - 1) < 0.9


@pytest.mark.parametrize("hits", [0.0, 1.0, 0.2])
@pytest.mark.parametrize("known", [None, 64])
def test_short_runs_that_tell_nothing_move_nothing(hits, known):
    kind = [learning_rates(1e-3), SMOOTHING]

    def landscape(trial: Trial) -> float:
        return hits if trial.short else 0.4 - abs(trial.point[0] - kind[0].start) / 100

    tuner = find(kind, landscape, examples=100, rate=known)
    assert tuner.best == (kind[0].start, 0)


def test_what_diverges_in_every_long_run_that_was_good_in_a_short_one_is_left_for_lower_rates():
    kind = [learning_rates(1e-3), SMOOTHING]
    early, late = hill(kind, [0.0, 0.0]), hill(kind, [-5.0, 0.0], cliff=-4.5)
    tuner = find(kind, lambda trial: early(trial) if trial.short else late(trial))
    assert tuner.best is not None
    assert tuner.values(tuner.best)[0] <= 1e-3 * 10**-4.5
    nothing = find(kind, lambda trial: early(trial) if trial.short else None)
    assert nothing.tries > 5
    assert nothing.best is None or Trial(nothing.best) not in nothing.scores or nothing.scores[Trial(nothing.best)] is None


def test_the_others_begin_at_the_rate_that_is_known_to_be_good():
    kind = [learning_rates(1e-3), SMOOTHING]
    tuner = find(kind, hill(kind, [2.0, 1.0]), rate=kind[0].start + 2 * kind[0].step(0))
    first = [tuner.values(trial.point)[0] for trial in list(tuner.scores)[:3]]
    assert sorted(first) == [0.03162, 0.1, 0.3162]
    assert tuner.looks < find(kind, hill(kind, [2.0, 1.0])).looks


def test_a_budget_below_the_points_of_the_effort_is_a_cap():
    kind = [learning_rates(1e-3), SMOOTHING]
    assert find(kind, hill(kind, [0.0, 1.0]), budget=3).capped == "--budget 3"
    assert find(kind, hill(kind, [0.0, 1.0]), budget=4).capped == ""
