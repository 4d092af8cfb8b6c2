"""Metrics: ranks, hits, ties against the model, counts that add up."""

import math

import pytest
import torch
from hypothesis import given, settings

import anyk
import oracles
from strategies import rows


@settings(max_examples=50, deadline=None)
@given(rows())
def test_ranks_are_the_known_order(row):
    n = len(row.scores)
    ranks = anyk.target_ranks(row.scores.expand(n, n), torch.tensor(row.order))
    assert ranks.tolist() == list(range(1, n + 1))


def test_ties_count_against_the_model():
    assert anyk.target_ranks(torch.zeros(3, 5), torch.tensor([0, 2, 4])).tolist() == [5, 5, 5]
    assert anyk.target_ranks(torch.tensor([2.0, 1.0, 1.0]), torch.tensor(1)) == 3


def test_broken_models_do_not_look_good():
    nan = torch.full((1, 4), float("nan"))
    assert anyk.target_ranks(nan, torch.tensor([0])) == 4
    assert anyk.target_ranks(torch.tensor([[1.0, float("nan"), 0.0]]), torch.tensor([0])) == 2


def test_hits_and_accuracy():
    generator = torch.Generator().manual_seed(0)
    scores, target = torch.randn(200, 30, generator=generator), torch.randint(30, (200,), generator=generator)
    hits = anyk.topk_hits(scores, target, ks=(1, 5, 10, 99))
    for k in (1, 5, 10):
        expected = (scores.topk(k).indices == target[:, None]).any(-1).sum()
        assert hits[k] == expected
        assert anyk.topk_accuracy(scores, target, (k,))[k].item() == pytest.approx(expected.item() / 200)
    assert hits[99] == 200
    halves = [anyk.topk_hits(scores[half], target[half]) for half in (slice(0, 70), slice(70, None))]
    assert halves[0][5] + halves[1][5] == hits[5]
    assert hits[5].dtype == torch.int64


@pytest.mark.parametrize("average", ["micro", "macro"])
@pytest.mark.parametrize("ties", [False, True])
def test_averages_against_the_definition(average, ties):
    """Classes of very different size, some that never occur, targets that do not count."""
    generator = torch.Generator().manual_seed(int(ties))
    scores = torch.randn(300, 12, generator=generator)
    scores = scores.round() if ties else scores
    target = (torch.rand(300, generator=generator) ** 3 * 10).long()  # 0 often, 9 seldom, 10 and 11 never
    target[::7] = -5

    def expected(gain):
        return pytest.approx(oracles.ranking_metric(scores.tolist(), target.tolist(), gain, average, -5), rel=1e-5)

    given = {"ignore_index": -5, "average": average}
    accuracy, gains = anyk.topk_accuracy(scores, target, (1, 3, 99), **given), anyk.ndcg(scores, target, (1, 3, 99), **given)
    for k in (1, 3, 99):
        assert accuracy[k].item() == expected(lambda rank, k=k: rank <= k)
        assert gains[k].item() == expected(lambda rank, k=k: 1 / math.log2(1 + rank) if rank <= k else 0.0)
    assert anyk.mean_reciprocal_rank(scores, target, **given).item() == expected(lambda rank: 1 / rank)
    # the same for positions of a sequence, and for smaller integers
    folded, labels = scores.reshape(30, 10, 12).movedim(-1, 1), target.reshape(30, 10).int()
    assert anyk.ndcg(folded, labels, (3,), **given)[3].item() == pytest.approx(gains[3].item())
    assert anyk.mean_reciprocal_rank(folded, labels, **given).item() == expected(lambda rank: 1 / rank)


@pytest.mark.parametrize("average", ["micro", "macro"])
def test_nothing_to_average(average):
    for scores, target in ((torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)), (torch.zeros(1, 4), torch.tensor([-100]))):
        assert anyk.mean_reciprocal_rank(scores, target, average=average).isnan()
        assert anyk.ndcg(scores, target, average=average)[5].isnan()
        assert anyk.topk_accuracy(scores, target, average=average)[5].isnan()


def test_defaults_and_gradients():
    scores, target = torch.randn(4, 12, requires_grad=True), torch.zeros(4, dtype=torch.long)
    assert set(anyk.ndcg(scores, target)) == {5, 10}
    assert not anyk.mean_reciprocal_rank(scores, target).requires_grad
    assert anyk.ndcg(scores, target, ()) == {}
    one = scores[0].detach()
    assert anyk.mean_reciprocal_rank(one, one.argmax()) == anyk.ndcg(one, one.argmax(), (1,))[1] == 1


def test_bad_input():
    scores = torch.zeros(2, 4)
    for metric in (anyk.topk_accuracy, anyk.mean_reciprocal_rank, anyk.ndcg):
        with pytest.raises(ValueError, match=r"average: expected one of 'micro', 'macro', got 'weighted'"):
            metric(scores, torch.tensor([0, 1]), average="weighted")
    with pytest.raises(ValueError, match=r"ks: .* got 0"):
        anyk.ndcg(scores, torch.tensor([0, 1]), (0,))
    with pytest.raises(ValueError, match=r"target: .* got 4"):
        anyk.target_ranks(scores, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"target: expected shape \(2, 7\) to fit scores, got .*movedim"):
        anyk.topk_accuracy(torch.zeros(2, 20, 7), torch.zeros(2, 20, dtype=torch.long))


def test_the_classes_stand_where_the_loss_has_them():
    """(3, 4, 4) with targets (3, 4) fits both conventions: there is one meaning, that of the loss."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 4, 4, generator=generator)
    target = torch.randint(4, (3, 4), generator=generator)
    flat, flat_target = scores.movedim(1, -1).reshape(-1, 4), target.reshape(-1)
    assert torch.equal(anyk.target_ranks(scores, target).reshape(-1), anyk.target_ranks(flat, flat_target))
    assert anyk.topk_hits(scores, target, (1, 2)) == anyk.topk_hits(flat, flat_target, (1, 2))
    best = torch.nn.functional.cross_entropy(scores, target, reduction="none") < 0.5
    assert (anyk.target_ranks(scores, target)[best] == 1).all()
    assert anyk.target_ranks(scores[0, :, 0], target[0, 0]) == anyk.target_ranks(scores, target)[0, 0]
