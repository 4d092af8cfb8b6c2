"""Candidates: the m best, the target always among them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyk import candidates
from strategies import rows


@settings(max_examples=60, deadline=None)
@given(rows(min_size=2, max_size=12), st.data())
def test_keep(row, data):
    n = len(row.scores)
    m = data.draw(st.integers(1, n))
    target = data.draw(st.integers(0, n - 1))
    classes, position = candidates.insert(candidates.best(row.scores, m), torch.tensor(target))
    expected = row.order[:m] if target in row.order[:m] else [*row.order[: m - 1], target]
    assert classes.tolist() == expected
    kept, place = candidates.keep(row.scores, torch.tensor(target), m)
    assert place == position == expected.index(target)
    assert torch.equal(kept, row.scores[expected])
    assert candidates.at(kept, position) == row.scores[target]
    assert torch.equal(candidates.others(kept, position), row.scores[[c for c in expected if c != target]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties(dtype):
    """On the CPU the earlier come first; a target among them is there once."""
    scores = torch.zeros(3, 6, dtype=dtype)
    assert candidates.best(scores, 4).tolist() == [[0, 1, 2, 3]] * 3
    target = torch.tensor([0, 3, 5])
    classes, _ = candidates.insert(candidates.best(scores, 2), target)
    assert (classes == target[:, None]).sum(-1).tolist() == [1, 1, 1]


def test_all_classes_in_given_order():
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    kept, position = candidates.keep(scores, torch.tensor([2]), 3, descending=False)
    assert kept is scores
    assert position.tolist() == [2]


@pytest.mark.parametrize(("m", "number"), [(None, 1000), ("auto", 64), (7, 7)])
def test_number(m, number):
    assert candidates.number(m, 1000, 5) == number
    assert candidates.number("auto", 1000, 40) == 160
    assert candidates.number("auto", 20, 5) == 20


@pytest.mark.parametrize("m", [0, 4, 1.5, "all"])
def test_bad_m(m):
    with pytest.raises((ValueError, TypeError), match=r"m: expected .* got"):
        candidates.check(m) if m == "all" else candidates.number(m, 3, 1)


def test_padding():
    inf = torch.inf
    candidates.check_padding(torch.tensor([[1.0, -inf, 0.0]]), torch.tensor([2]), 2)
    with pytest.raises(ValueError, match="scores: expected at least k = 3"):
        candidates.check_padding(torch.tensor([[1.0, -inf, 0.0]]), torch.tensor([2]), 3)
    with pytest.raises(ValueError, match="target: expected classes that are not padding"):
        candidates.check_padding(torch.tensor([[1.0, -inf, 0.0]]), torch.tensor([1]), 2)
