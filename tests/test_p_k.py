"""P_K: what is accepted, and that nothing that becomes of a module touches it."""

import copy
import pickle

import numpy as np
import pytest
import torch

import anyk
from anyk import TopKCrossEntropyLoss, TopKErrorLoss, p_k, topk_cross_entropy

SCORES = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([0, 8, 3, 3, 1, 7])


@pytest.mark.parametrize(
    "given",
    [
        [0.5, 0, 0, 0, 0.5],
        (0.5, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0),
        {1: 0.5, 5: 0.5},
        {5: 0.5, 1: 0.5, 7: 0.0},
        np.array([0.5, 0, 0, 0, 0.5]),
        torch.tensor([0.5, 0, 0, 0, 0.5]),
        torch.tensor([0.5, 0, 0, 0, 0.5], dtype=torch.float16),
        {np.int64(1): np.float32(0.5), np.int64(5): 0.5},
    ],
    ids=str,
)
def test_the_same_in_all_forms(given):
    assert p_k.read(given).values.tolist() == [0.5, 0, 0, 0, 0.5]
    expected = topk_cross_entropy(SCORES, TARGET, [0.5, 0, 0, 0, 0.5])
    assert torch.equal(topk_cross_entropy(SCORES, TARGET, given), expected)
    assert torch.equal(TopKCrossEntropyLoss(given)(SCORES, TARGET), expected)


@pytest.mark.parametrize("k", [3, np.int64(3)])
def test_an_integer_is_that_k_alone(k):
    assert p_k.read(k).values.tolist() == [0, 0, 1]
    expected = topk_cross_entropy(SCORES, TARGET, {3: 1.0})
    assert torch.equal(topk_cross_entropy(SCORES, TARGET, k), expected)
    assert torch.equal(TopKCrossEntropyLoss(k)(SCORES, TARGET), expected)
    assert torch.equal(TopKErrorLoss(k)(SCORES, TARGET), TopKErrorLoss({3: 1.0})(SCORES, TARGET))


@pytest.mark.parametrize("make", [TopKCrossEntropyLoss, TopKErrorLoss])
def test_a_setting_and_no_state(make):
    """In bfloat16 these weights sum to 1.0015."""
    given = [0.1, 0.2, 0.3, 0.4]
    criterion = make(given)
    expected = criterion(SCORES, TARGET)
    half = SCORES.bfloat16()
    expected_half = criterion(half, TARGET)
    changes = [
        lambda c: c.bfloat16(),
        lambda c: c.half(),
        lambda c: c.double(),
        lambda c: c.to(torch.float16),
        lambda c: c.to("meta").to_empty(device="cpu"),
        copy.deepcopy,
        lambda c: pickle.loads(pickle.dumps(c)),
    ]
    for change in changes:
        changed = change(copy.deepcopy(criterion))
        assert changed.p_k.tolist() == given
        assert torch.equal(changed(SCORES, TARGET), expected)
        assert torch.equal(changed(half, TARGET), expected_half)
    assert not criterion.state_dict()
    exact = anyk.topk_cross_entropy(SCORES.double(), TARGET, given)
    torch.testing.assert_close(TopKCrossEntropyLoss(given)(SCORES.double(), TARGET), exact, rtol=1e-14, atol=0)


def test_may_be_assigned():
    criterion = TopKCrossEntropyLoss([0.5, 0.5], m=5)
    criterion.p_k = {3: 1.0}
    assert torch.equal(criterion(SCORES, TARGET), topk_cross_entropy(SCORES, TARGET, [0, 0, 1.0], m=5))
    with pytest.raises(ValueError, match="p_k: expected probabilities that sum to 1"):
        criterion.p_k = [0.5]
    with pytest.raises(ValueError, match="p_k: expected no k above m = 5, got k = 6"):
        criterion.p_k = {6: 1.0}
    assert criterion.p_k.tolist() == [0, 0, 1], "what was refused changed nothing"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "p_k: expected at least one probability, got {}"),
        ({0: 1.0}, ValueError, "p_k: every k: expected at least 1, got 0"),
        (True, TypeError, "p_k: expected an integer k, a sequence of numbers, .* got True"),
        ({"5": 1.0}, TypeError, "p_k: every k: expected an integer, got '5'"),
        ({1: "a"}, TypeError, "p_k: expected numbers as the weights of the k, got 'a'"),
        ({1: 0.5}, ValueError, "p_k: expected probabilities that sum to 1 .within 0.0001., such as .*, got the sum 0.5"),
        ({10**9: 1.0}, ValueError, "p_k: expected k of at most a million, got 1000000000"),
        ([float("inf"), float("-inf")], ValueError, "p_k: expected probabilities of at least 0, got -inf"),
        ([[0.5, 0.5], [1.0]], ValueError, "p_k: expected one distribution of the same length for each class"),
        (torch.ones(2, 2, 2), ValueError, r"p_k: expected shape \(k,\) or \(n, k\), got \(2, 2, 2\)"),
        (torch.tensor([0.6, 0.6], dtype=torch.bfloat16), ValueError, "p_k: expected probabilities that sum to 1"),
    ],
    ids=str,
)
def test_bad_input(given, error, message):
    with pytest.raises(error, match=message):
        TopKCrossEntropyLoss(given)


@pytest.mark.parametrize("given", ["nonsense", {1: 1.0}, [[0.5, 0.5], [1.0]]])
def test_one_for_each_example(given):
    with pytest.raises(TypeError, match="example_p_k: expected a tensor, or nested lists of numbers, got"):
        topk_cross_entropy(SCORES, TARGET, None, example_p_k=given)
    listed = topk_cross_entropy(SCORES, TARGET, None, example_p_k=[[0.3, 0.7]] * 6)
    assert torch.equal(listed, topk_cross_entropy(SCORES, TARGET, [0.3, 0.7]))


def test_nobody_else_changes_it():
    table = torch.full((9, 2), 0.5)
    criterion = TopKErrorLoss(table)
    expected = criterion(SCORES, TARGET)
    table.fill_(7.0)
    criterion.p_k.fill_(7.0)
    assert torch.equal(criterion(SCORES, TARGET), expected)


def test_a_parameter_is_learned_through_the_module():
    weights = torch.nn.Parameter(torch.tensor([0.4, 0.6]))
    given = TopKErrorLoss(weights)
    assigned = TopKErrorLoss([1.0])
    assigned.p_k = weights
    for criterion in (given, assigned):
        weights.grad = None
        criterion(SCORES, TARGET).backward()
        assert (weights.grad != 0).all()


def test_without_numbers():
    with pytest.raises(ValueError, match="p_k: expected numbers, got a tensor without any, on the device meta: give a list"):
        TopKErrorLoss(torch.tensor([0.5, 0.5], device="meta"))
    with torch.device("meta"):
        criterion = TopKErrorLoss({2: 1.0})
    assert torch.equal(criterion.to_empty(device="cpu")(SCORES, TARGET), TopKErrorLoss({2: 1.0})(SCORES, TARGET))
