import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyk.lab.data.split import split
from anyk.lab.errors import LabError


def parts_of(found):
    return [part.numpy() for part in (found.train, found.validation, found.test)]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(20, 40), st.floats(0.05, 0.4), st.floats(0.05, 0.4), st.integers(0, 5))
def test_without_groups_every_class_has_its_share(classes, each, validation, test, seed):
    labels = np.random.default_rng(seed).permutation(np.arange(classes).repeat(each))
    train, held, tested = parts_of(split(labels, validation=validation, test=test, seed=seed))
    assert sorted([*train, *held, *tested]) == list(range(len(labels)))
    for name in range(classes):
        assert abs((labels[tested] == name).sum() - test * each) < 1.001
        assert (labels[train] == name).any()


@settings(max_examples=40, deadline=None)
@given(st.integers(12, 40), st.integers(1, 12), st.integers(2, 5), st.integers(0, 9))
def test_no_group_is_in_two_parts(groups, most, classes, seed):
    rng = np.random.default_rng(seed)
    whose = np.arange(groups).repeat(rng.integers(1, most + 1, groups))
    labels = rng.integers(0, classes, len(whose))
    train, held, tested = (set(whose[part]) for part in parts_of(split(labels, validation=0.2, test=0.25, seed=seed, groups=whose)))
    assert not train & held and not train & tested and not held & tested
    assert train and held and tested


def test_groups_come_near_the_shares_of_each_class():
    rng = np.random.default_rng(0)
    whose = np.arange(400).repeat(5)
    labels = rng.integers(0, 8, 400)[whose]
    _, _, tested = parts_of(split(labels, validation=0.1, test=0.2, seed=0, groups=whose))
    shares = np.bincount(labels[tested], minlength=8) / np.bincount(labels)
    assert shares.min() > 0.1 and shares.max() < 0.3


def test_the_newest_are_the_test_and_the_next_newest_validation():
    times = np.random.default_rng(0).permutation(100).astype(float)
    train, held, tested = parts_of(split(np.arange(100) % 3, validation=0.25, test=0.2, seed=0, times=times))
    assert times[train].max() < times[held].min() <= times[held].max() < times[tested].min()
    assert len(tested) == 20 and len(held) == 20


def test_with_times_and_groups_whole_groups_are_the_newest():
    whose = np.arange(50).repeat(4)
    times = whose + np.tile([0.0, 0.1, 0.2, 0.3], 50)
    train, held, tested = (set(whose[part]) for part in parts_of(split(whose % 3, validation=0.2, test=0.2, seed=0, groups=whose, times=times)))
    assert min(tested) > max(held) > max(train)


def test_the_same_seed_gives_the_same_split_and_another_another():
    labels = np.arange(60) % 3
    first, same, other = (split(labels, validation=0.2, test=0.2, seed=seed).test for seed in (1, 1, 2))
    assert first.equal(same) and not first.equal(other)


def test_a_split_of_the_data_stays():
    found = split(np.arange(40) % 4, validation=0.1, test=0.5, seed=0, own_test=np.array([3, 1]), own_validation=np.array([5]))
    assert found.test.tolist() == [1, 3] and found.validation.tolist() == [5] and len(found.train) == 37


def test_groups_across_a_given_test_set_are_refused():
    with pytest.raises(LabError, match="shares groups"):
        split(np.arange(8) % 2, validation=0.1, test=0.5, seed=0, own_test=np.array([0, 1]), groups=np.array([0] * 4 + [1] * 4))


def test_too_few_groups_for_three_parts():
    with pytest.raises(LabError, match="groups"):
        split(np.arange(20) % 2, validation=0.1, test=0.2, seed=0, groups=np.arange(20) // 10)
