"""Names: one place for all, looked up when they are used."""

import pytest
import torch

import anyk
from anyk import baselines, operators, registry
from anyk.operators.sorting_network import Kind

SCORES, TARGET = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), torch.arange(4)


@pytest.mark.parametrize("name", operators.names(with_probabilities=True))
def test_strings_name_operators_everywhere(name):
    operator = operators.by_name(name)
    expected = anyk.topk_cross_entropy(SCORES, TARGET, [0.5, 0.5], operator)
    assert torch.equal(anyk.TopKCrossEntropyLoss([0.5, 0.5], name)(SCORES, TARGET), expected)
    assert torch.equal(anyk.topk_cross_entropy(SCORES, TARGET, [0.5, 0.5], name), expected)
    assert torch.equal(
        anyk.TopKErrorLoss([0.5, 0.5], name)(SCORES, TARGET), anyk.topk_error(SCORES, TARGET, [0.5, 0.5], operator)
    )


@pytest.fixture
def tables():
    """Tables that the test may write to: what it enters is gone afterwards."""
    kept = [(table, dict(table)) for table in (registry.OPERATORS, registry.NETWORKS, registry.SWAPS, registry.LOSSES)]
    yield
    for table, entries in kept:
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("tables")
def test_what_is_defined_later_is_known():
    class Later(anyk.KSubset, name="later"):
        pass

    registry.register(registry.NETWORKS, "later_network", Kind("Mine", anyk.networks.splitter, lambda number: number // 2))
    registry.register(registry.SWAPS, "later_swap", registry.SWAPS["logistic"])
    assert type(anyk.TopKCrossEntropyLoss([1.0], "later").operator) is Later
    assert anyk.SortingNetwork("later_network", swap="later_swap").inclusion(SCORES, TARGET, 2).isfinite().all()
    assert {"later", "later_network"} <= set(operators.names())


@pytest.mark.usefixtures("tables")
def test_a_network_registered_anew_is_used_by_a_loss_that_ran_before():
    registry.register(registry.NETWORKS, "mine", registry.NETWORKS["splitter"])
    loss = anyk.TopKCrossEntropyLoss([0.5, 0.5], "mine")
    before = loss(SCORES, TARGET)
    with pytest.raises(ValueError, match="name: expected one that is free, got 'mine'"):
        registry.register(registry.NETWORKS, "mine", registry.NETWORKS["odd_even"])
    registry.NETWORKS["mine"] = registry.NETWORKS["odd_even"]
    after = loss(SCORES, TARGET)
    assert torch.equal(before, anyk.TopKCrossEntropyLoss([0.5, 0.5], "splitter")(SCORES, TARGET))
    assert torch.equal(after, anyk.TopKCrossEntropyLoss([0.5, 0.5], "odd_even")(SCORES, TARGET))


@pytest.mark.usefixtures("tables")
def test_names_are_given_once():
    for base, taken in (
        (anyk.Operator, "lapsum"), (baselines.FixedKLoss, "hinge"), (anyk.Operator, "splitter"), (anyk.Operator, "hinge"),
        (baselines.FixedKLoss, "lapsum"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"name: expected one that is free, got '{taken}', which anyk"):
            type("Mine", (base,), {}, name=taken)
    with pytest.raises(ValueError, match="name: expected one that is free, got 'ksubset'"):
        registry.register(registry.NETWORKS, "ksubset", registry.NETWORKS["splitter"])
    again = type("LapSum", (anyk.LapSum,), {"__module__": anyk.LapSum.__module__, "__qualname__": "LapSum"})
    registry.register(registry.OPERATORS, "lapsum", again)  # as from a notebook cell that is run twice
    assert registry.OPERATORS["lapsum"] is again
