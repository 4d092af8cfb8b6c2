"""What others can add, by a table or a public function: operators, swaps and families of networks."""

import pytest
import torch

import anyk
from anyk import networks
from anyk.networks import KINDS
from anyk.operators import OPERATORS, Inclusion, register
from anyk.operators.network import add_kind
from anyk.swaps import SWAPS, Swap

SCORES, TARGET = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(4)


@pytest.fixture(autouse=True)
def _tables():
    """What a test enters is gone afterwards."""
    kept = [(table, dict(table)) for table in (OPERATORS, KINDS, SWAPS)]
    yield
    for table, entries in kept:
        table.clear()
        table.update(entries)


def algebraic(v):
    """(1 + v / sqrt(1 + v^2)) / 2, without cancellation for v < 0."""
    length = torch.hypot(v, torch.ones_like(v))
    return torch.where(v < 0, 0.5 / (length * (length + v.abs())), (1 + v / length) / 2)


ALGEBRAIC = Swap(algebraic, lambda v: 0.5 * (1 + v.square()) ** -1.5, lambda v: -torch.log1p((-v).clamp(min=0)))


def test_a_swap():
    with pytest.raises(ValueError, match="swap: expected one of"):
        anyk.SortingNetwork(swap="algebraic")
    SWAPS["algebraic"] = ALGEBRAIC
    operator = anyk.SortingNetwork("bitonic", swap="algebraic")
    assert operator.kernel(9, 3) is None
    scores = SCORES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: operator.log_inclusion(s, TARGET, 3), scores)
    assert torch.autograd.gradcheck(lambda s: operator.mask(s, 3), scores)
    sums = operator(scores, 3).cumsum(-2).gather(-1, TARGET[:, None, None].expand(4, 3, 1)).squeeze(-1)
    torch.testing.assert_close(sums, operator.inclusion(scores, TARGET, 3), rtol=0, atol=1e-9)
    loss = anyk.topk_cross_entropy(SCORES.float(), TARGET, {1: 0.5, 3: 0.5}, operator)
    torch.testing.assert_close(
        loss.double(), anyk.topk_cross_entropy(SCORES, TARGET, {1: 0.5, 3: 0.5}, operator), rtol=1e-5, atol=0
    )


def test_a_family_of_networks():
    add_kind("published_splitter", networks.Kind(networks.splitter, lambda number: min(1, number // 2)))
    operator = anyk.operators.by_name("published_splitter", temperature=2.0)
    assert repr(operator) == "SortingNetwork('published_splitter', temperature=2.0, swap='logistic', wires='target')"
    packed = anyk.SortingNetwork("splitter", 2.0)
    torch.testing.assert_close(operator.inclusion(SCORES, TARGET, 4), packed.inclusion(SCORES, TARGET, 4))
    torch.testing.assert_close(anyk.soft_topk(SCORES, 4, "published_splitter"), anyk.soft_topk(SCORES, 4, "splitter"))
    loss = anyk.topk_cross_entropy(SCORES.float(), TARGET, [0.5, 0.5], "published_splitter")
    torch.testing.assert_close(loss, anyk.topk_cross_entropy(SCORES.float(), TARGET, [0.5, 0.5], "splitter"))
    with pytest.raises(ValueError, match="name: expected one that is free, got 'ksubset'"):
        add_kind("ksubset", KINDS["splitter"])


def test_a_name_that_is_given_to_another_is_looked_up_anew():
    """Neither the tables of the network nor the kernels may still be those of the first."""
    add_kind("mine", KINDS["splitter"])
    loss, scores = anyk.TopKCrossEntropyLoss([0.5, 0.5], "mine"), SCORES.float()
    assert torch.equal(loss(scores, TARGET), anyk.TopKCrossEntropyLoss([0.5, 0.5], anyk.SortingNetwork("mine"))(scores, TARGET))
    mask, operator = anyk.SortingNetwork("mine").mask(scores, 3), anyk.SortingNetwork("splitter")
    torch.testing.assert_close(mask, operator.mask(scores, 3))
    KINDS["mine"] = KINDS["odd_even"]
    KINDS["splitter"] = KINDS["odd_even"]
    SWAPS["gaussian"] = SWAPS["cauchy"]
    torch.testing.assert_close(
        loss(scores, TARGET), anyk.TopKCrossEntropyLoss([0.5, 0.5], "odd_even")(scores, TARGET), msg="loss"
    )
    expected = anyk.SortingNetwork("odd_even").mask(scores, 3)
    torch.testing.assert_close(anyk.SortingNetwork("mine").mask(scores, 3), expected)
    torch.testing.assert_close(operator.mask(scores, 3), expected)
    torch.testing.assert_close(
        anyk.SortingNetwork("odd_even", swap="gaussian").mask(scores, 3),
        anyk.SortingNetwork("odd_even", swap="cauchy").mask(scores, 3),
    )


def test_an_operator():
    class Later(anyk.KSubset, name="later"):
        pass

    assert type(anyk.TopKCrossEntropyLoss([1.0], "later").operator) is Later
    assert type(anyk.operators.by_name("later", temperature=0.5)) is Later
    with pytest.raises(ValueError, match="name: expected one that is free, got 'lapsum'"):
        type("Mine", (Inclusion,), {}, name="lapsum")
    again = type("LapSum", (anyk.LapSum,), {"__module__": anyk.LapSum.__module__, "__qualname__": "LapSum"})
    register("lapsum", again)  # as from a notebook cell that is run twice
    assert OPERATORS["lapsum"] is again
