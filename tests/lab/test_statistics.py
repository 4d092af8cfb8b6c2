"""Statistics over seeds and examples: against scipy and slow, obvious references."""

import itertools
import math
import statistics as reference
from statistics import fmean

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from anyk.lab.statistics import contrast, holm, mean, std, two_way


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10000), min_size=2, max_size=12))
def test_mean_and_std(hits):
    values = [number / 10000 for number in hits]
    assert mean(values) == pytest.approx(reference.mean(values))
    assert std(values) == pytest.approx(reference.stdev(values), abs=1e-12)
    assert std(values[:1]) is None


def slow_holm(p_values):
    """The definition: the corrected p is the smallest level at which the step-down procedure rejects."""

    def rejected(level):
        left = sorted(range(len(p_values)), key=lambda place: p_values[place])
        out = set()
        while left and p_values[left[0]] * len(left) <= level:
            out.add(left.pop(0))
        return out

    levels = sorted({1.0, *(min(1.0, p * count) for p in p_values for count in range(1, len(p_values) + 1))})
    return [next((level for level in levels if place in rejected(level)), 1.0) for place in range(len(p_values))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000).map(lambda number: number / 1000), max_size=9))
def test_holm(p_values):
    corrected = holm(p_values)
    assert corrected == pytest.approx(slow_holm(p_values))
    assert all(p <= q <= 1 for p, q in zip(p_values, corrected, strict=True))
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    assert [corrected[place] for place in order] == sorted(corrected)


def test_holm_passes_over_tests_that_were_not_made():
    assert holm([None, 0.02, None, 0.01]) == [None, 0.02, None, 0.02]
    assert holm([None]) == [None]
    with pytest.raises(ValueError, match="p_values: expected numbers or None, got"):
        holm([0.001, math.nan])


# Seeds and examples --------------------------------------------------------------------------------------------------------


def slow_two_way(d, clusters):
    """Both variances by their definitions, one loop after the other; the interval's half at a level; p by bisection."""
    seeds, examples = len(d), len(d[0])
    center = sum(map(sum, d)) / (seeds * examples)
    means = [sum(row) / examples for row in d]
    of_seeds = sum((mean - center) ** 2 for mean in means) / (seeds - 1) / seeds
    groups = sorted(set(clusters))
    squares = 0.0
    for group in groups:
        members = [i for i in range(examples) if clusters[i] == group]
        squares += sum(d[s][i] - center for s in range(seeds) for i in members) ** 2
    of_examples = len(groups) / (len(groups) - 1) * squares / (examples * seeds) ** 2

    def half(level):
        t, u = (scipy.stats.t.isf(level / 2, freedom) for freedom in (seeds - 1, len(groups) - 1))
        return math.sqrt(t**2 * of_seeds + u**2 * of_examples)

    low, high = 1e-12, 1.0
    for _ in range(200):
        low, high = (low, (low + high) / 2) if half((low + high) / 2) < abs(center) else ((low + high) / 2, high)
    return center, half(0.05), high


@settings(max_examples=60, deadline=None)
@given(
    st.integers(3, 6).flatmap(
        lambda seeds: st.lists(st.lists(st.sampled_from([-1, 0, 1]), min_size=seeds, max_size=seeds), min_size=12, max_size=30)
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_two_way_is_what_it_says(columns, grouped, chance):
    d = [list(row) for row in zip(*columns, strict=True)]
    clusters = [chance.randrange(15) for _ in columns] if grouped else list(range(len(columns)))
    found = two_way(contrast("a", "b", "top1", np.array(d), np.array(clusters) if grouped else None))
    differing = {clusters[i] for i, column in enumerate(columns) if any(column)}
    assert (found.count, found.examples) == (len(d), len(columns))
    assert found.difference == pytest.approx(sum(map(sum, d)) / len(d) / len(columns))
    assert found.hits == pytest.approx(sum(map(sum, d)) / len(d))
    if len(differing) < 10:
        assert found.low is None
        return
    center, half, p = slow_two_way(d, clusters)
    if half > 0:
        assert (found.low, found.high) == (pytest.approx(center - half), pytest.approx(center + half))
        assert found.p == pytest.approx(p, rel=1e-6, abs=1e-9)
        assert (found.p < 0.05) == (abs(center) > half)


def test_copies_of_an_example_are_no_more_examples():
    d = np.random.default_rng(1).choice([-1, 0, 1, 1], (5, 60))
    one = two_way(contrast("a", "b", "top1", d))
    copies = np.repeat(d, 10, axis=1)
    grouped = two_way(contrast("a", "b", "top1", copies, np.repeat(np.arange(60), 10)))
    assert (grouped.low, grouped.high, grouped.p) == pytest.approx((one.low, one.high, one.p))
    careless = two_way(contrast("a", "b", "top1", copies))
    assert careless.p < 0.7 * one.p


def test_the_examples_variance_is_that_of_drawing_them_again():
    """A bootstrap over groups of different sizes, where the seeds agree and only the examples are luck."""
    chance = np.random.default_rng(2)
    groups = np.sort(chance.integers(80, size=600))
    own = (chance.standard_normal(80)[groups] + 0.3 * chance.standard_normal(600)).round().clip(-1, 1).astype(int)
    d = np.tile(own, (3, 1))
    found = two_way(contrast("a", "b", "top1", d, groups))
    sums, sizes = np.bincount(groups, own, 80), np.bincount(groups, minlength=80)
    drawn = chance.integers(80, size=(4000, 80))
    again = sums[drawn].sum(1) / sizes[drawn].sum(1)
    u = scipy.stats.t.ppf(0.975, len(set(groups)) - 1)
    assert (found.high - found.low) / 2 / u == pytest.approx(again.std(), rel=0.05)


@pytest.mark.parametrize(("gained", "lost"), [(6, 0), (7, 1), (8, 1), (9, 0), (5, 4), (6, 1)])
def test_few_examples_are_counted_by_their_signs(gained, lost):
    d = np.zeros((5, 2000), dtype=int)
    d[:, :gained], d[:, gained : gained + lost] = 1, -1
    d[0, 0] = 0  # no example is less sure for a seed that misses it
    found = two_way(contrast("a", "b", "top1", d))
    outcomes = itertools.product((1, -1), repeat=gained + lost)
    brute = fmean(abs(sum(signs)) >= gained - lost for signs in outcomes)
    assert found.p >= brute
    assert found.p == pytest.approx(brute, rel=0.3)
    assert found.low is None
    assert (found.p < 0.05) == (brute < 0.05)


def test_one_lucky_seed_is_no_finding_however_many_examples():
    d = np.zeros((3, 100_000), dtype=int)
    d[0, :5000] = 1
    found = two_way(contrast("a", "b", "top1", d))
    assert found.p > 0.3
    d[:, :5000] = 1  # on every seed it is one
    assert two_way(contrast("a", "b", "top1", d)).p < 1e-6


def test_what_has_no_variance():
    everything = two_way(contrast("a", "b", "top1", np.ones((3, 50), dtype=int)))
    assert everything.p == pytest.approx(2.0**-49)
    nothing = two_way(contrast("a", "b", "top1", np.zeros((3, 50), dtype=int)))
    assert (nothing.p, nothing.reason) == (None, "no test example differs")
    swaps = two_way(contrast("a", "b", "top1", np.tile([1, -1] * 20, (4, 1)) * np.array([[1], [-1], [1], [-1]])))
    assert swaps.p == 1.0
    for seeds, reason in ((1, "there is one seed only"), (2, "2 seeds are too few to tell")):
        assert two_way(contrast("a", "b", "top1", np.ones((seeds, 50), dtype=int))).reason == reason
    one_group = two_way(contrast("a", "b", "top1", np.ones((5, 50), dtype=int), np.zeros(50, dtype=int)))
    assert one_group.reason == "only 1 of the 1 groups of test examples differs: too few to tell"


@pytest.mark.parametrize(("seeds", "examples", "seed_shift"), [(3, 300, 0.0), (3, 4000, 0.3), (5, 1000, 0.15)])
def test_a_method_is_seldom_better_than_itself(seeds, examples, seed_shift):
    """Chances that differ from example to example, and seeds that are better and worse."""
    chance = np.random.default_rng([seeds, examples])
    false, count = 0, 400
    for _ in range(count):
        easy = 2.5 * chance.standard_normal(examples) + 1
        first, second = (
            chance.random((seeds, examples)) < scipy.special.expit(easy + seed_shift * chance.standard_normal((seeds, 1)))
            for _ in range(2)
        )
        found = two_way(contrast("a", "b", "top1", first.astype(int) - second))
        false += found.p is not None and found.p < 0.05
    assert false / count <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / count)


def test_all_seeds_may_agree_on_nearly_all_examples():
    gains = np.zeros((3, 2000), dtype=int)
    gains[:, :1990] = 1
    found = two_way(contrast("a", "b", "top1", gains))
    assert found.p < 1e-100
    assert 0.99 < found.low < found.difference < found.high
