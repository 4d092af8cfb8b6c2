"""Candidates: the m best, the target always among them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyk.candidates import at, choose, others, select_for_probabilities
from strategies import rows


@settings(max_examples=60, deadline=None)
@given(rows(min_size=2, max_size=12), st.data())
def test_choose(row, data):
    n = len(row.scores)
    m = data.draw(st.integers(1, n))
    target = data.draw(st.integers(0, n - 1))
    classes, position = choose(row.scores, torch.tensor(target), m)
    expected = row.order[:m] if target in row.order[:m] else [*row.order[: m - 1], target]
    assert classes.tolist() == expected
    assert position == expected.index(target)
    kept = row.scores[expected]
    assert at(kept, position) == row.scores[target]
    assert torch.equal(others(kept, position), row.scores[[c for c in expected if c != target]])


def test_ties_with_the_target_keep_it_once():
    classes, _ = choose(torch.zeros(3, 6), torch.tensor([0, 3, 5]), 2)
    assert (classes == torch.tensor([0, 3, 5])[:, None]).sum(-1).tolist() == [1, 1, 1]


def test_all_classes_in_given_order():
    classes, position = choose(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]), sort=False)
    assert classes.tolist() == [[0, 1, 2]]
    assert position.tolist() == [2]


@pytest.mark.parametrize("m", [0, 4, 1.5])
def test_bad_m(m):
    with pytest.raises((ValueError, TypeError), match=r"m: expected .* got"):
        choose(torch.zeros(1, 3), torch.tensor([0]), m)


def test_candidates_of_a_distribution():
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    # two classes with probability: both are in, then the best scores
    q = torch.tensor([[0.0, 0.0, 0.0, 0.3, 0.0, 0.7]])
    assert select_for_probabilities(scores, q, 4)[1].tolist() == [[0, 1, 3, 5]]
    # more classes than half of m: the most probable half
    q = torch.tensor([[0.0, 0.1, 0.15, 0.2, 0.25, 0.3]])
    assert select_for_probabilities(scores, q, 4)[1].tolist() == [[0, 1, 4, 5]]
    # of equally probable ones the better scored; classes without probability displace nobody
    q = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.1, 0.5]])
    assert select_for_probabilities(scores, q, 4)[1].tolist() == [[0, 1, 2, 5]]
    q = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    assert select_for_probabilities(scores, q, 4)[1].tolist() == [[0, 1, 2, 5]]
