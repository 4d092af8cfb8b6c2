"""Statistics over seeds: against scipy and slow, obvious references."""

import math
import statistics as reference

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from anyk.lab.statistics import holm, mean, paired, std

ACCURACIES = st.lists(st.tuples(st.integers(0, 10000), st.integers(0, 10000)), min_size=2, max_size=12)


@settings(max_examples=100, deadline=None)
@given(ACCURACIES)
def test_mean_and_std(pairs):
    values = [value / 10000 for value, _ in pairs]
    assert mean(values) == pytest.approx(reference.mean(values))
    assert std(values) == pytest.approx(reference.stdev(values), abs=1e-12)
    assert std(values[:1]) is None


@settings(max_examples=100, deadline=None)
@given(ACCURACIES)
def test_paired_is_the_paired_t_test(pairs):
    values, baseline = ([pair[side] / 10000 for pair in pairs] for side in (0, 1))
    ours = paired(values, baseline)
    if len({value - base for value, base in pairs}) == 1:
        assert ours.p is None
        assert ours.low is None
        assert ours.reason == "the difference is the same on every seed"
        return
    theirs = scipy.stats.ttest_rel(values, baseline)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)
    interval = theirs.confidence_interval(0.95)
    assert (ours.low, ours.high) == (pytest.approx(interval.low, abs=1e-9), pytest.approx(interval.high, abs=1e-9))
    assert ours.difference == pytest.approx(mean(values) - mean(baseline))


def test_no_test_without_variance():
    one = paired([0.6], [0.5])
    assert one.difference == pytest.approx(0.1)
    assert (one.p, one.low, one.high, one.reason) == (None, None, None, "there is one seed only")
    assert paired([0.5, 0.6, 0.7], [0.5, 0.6, 0.7]).p is None
    # 0.1 apart in decimals; in floating point the three differences are not equal.
    assert len({0.4 - 0.3, 0.3 - 0.2, 0.8 - 0.7}) > 1
    assert paired([0.4, 0.3, 0.8], [0.3, 0.2, 0.7]).p is None
    with pytest.raises(ValueError):
        paired([0.5], [0.5, 0.6])


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
    assert not any(math.isnan(p) for p in holm([0.0, 1.0]))
