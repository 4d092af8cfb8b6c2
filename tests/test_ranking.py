"""Ranking losses: scikit-learn's, scipy's and torchmetrics' metrics in the hard limit, rows of different lengths, gradients."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, ndcg_score
from torchmetrics.functional.retrieval import retrieval_average_precision, retrieval_normalized_dcg, retrieval_recall

import anyk
from anyk.ranking import average_precision_loss, ndcg_loss, recall_loss, spearman_loss

SCORES = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
RELEVANCE = torch.randint(0, 4, (6, 12), generator=torch.Generator().manual_seed(1)).float()
RELEVANT = RELEVANCE == 3
LOSSES = {
    "spearman": lambda scores, **more: spearman_loss(scores, RELEVANCE, **more),
    "ndcg": lambda scores, **more: ndcg_loss(scores, RELEVANCE, **more),
    "ndcg@5": lambda scores, **more: ndcg_loss(scores, RELEVANCE, 5, **more),
    "recall@5": lambda scores, **more: recall_loss(scores, RELEVANT, 5, **more),
    "average precision": lambda scores, **more: average_precision_loss(scores, RELEVANT, **more),
}


def metric(name, scores, relevance):
    """Of one query, as others compute it."""
    relevant = relevance == 3
    if name == "spearman":
        return spearmanr(scores, relevance)[0]
    if name.startswith("ndcg"):
        return ndcg_score([2**relevance - 1], [scores], k=5 if "@" in name else None)
    if name == "recall@5":
        return relevant[np.argsort(-scores)[:5]].sum() / relevant.sum()
    return average_precision_score(relevant, scores)


@pytest.mark.parametrize("operator", ["lapsum", "permutahedron"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_hard_limit_is_the_metric(name, operator):
    actual = LOSSES[name](SCORES, operator=operator, temperature=1e-4, reduction="none")
    expected = [1 - metric(name, *row) for row in zip(SCORES.double().numpy(), RELEVANCE.numpy(), strict=True)]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", ["lapsum", "permutahedron"])
def test_the_hard_limit_is_that_of_torchmetrics(operator):
    """Also for k beyond the number of items. Of relevance it takes the gains, and of scores only positive ones: an item with
    another counts as not found, in recall and average precision. Its average precision for some k is another metric: the mean
    over the relevant items that are found, not over all."""
    scores, soft = SCORES.sigmoid(), {"operator": operator, "temperature": 1e-5, "reduction": "none"}
    for k in (1, 5, 12, 20):
        for loss, metric, relevance in (
            (ndcg_loss, retrieval_normalized_dcg, RELEVANCE),
            (recall_loss, retrieval_recall, RELEVANCE >= 2),
        ):
            targets = relevance if relevance.dtype == torch.bool else 2**relevance - 1
            expected = torch.stack([1 - metric(*row, top_k=k) for row in zip(scores, targets, strict=True)])
            torch.testing.assert_close(loss(scores, relevance, k, **soft), expected, rtol=1e-4, atol=1e-4)
    expected = torch.stack([1 - retrieval_average_precision(*row) for row in zip(scores, RELEVANCE >= 2, strict=True)])
    torch.testing.assert_close(average_precision_loss(scores, RELEVANCE >= 2, **soft), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_different_lengths_are_as_if_alone(name):
    where = torch.arange(12) < torch.tensor([12, 9, 7, 12, 8, 6])[:, None]
    together = LOSSES[name](SCORES, where=where, reduction="none")
    loss = {"spearman": spearman_loss, "ndcg": ndcg_loss, "average precision": average_precision_loss}.get(name)
    for row, (scores, relevance, real) in enumerate(zip(SCORES, RELEVANCE, where, strict=True)):
        scores, relevance = scores[real], relevance[real]
        if name == "ndcg@5":
            alone = ndcg_loss(scores, relevance, 5)
        elif name == "recall@5":
            alone = recall_loss(scores, relevance == 3, 5)
        else:
            alone = loss(scores, relevance == 3 if name == "average precision" else relevance)
        torch.testing.assert_close(together[row], alone)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_and_half_precision(name):
    assert torch.autograd.gradcheck(LOSSES[name], (SCORES.double().requires_grad_(),))
    assert LOSSES[name](SCORES.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(LOSSES[name](SCORES, reduction="sum"), LOSSES[name](SCORES, reduction="none").sum())


def test_queries_without_a_relevant_item_are_left_out_of_the_mean():
    relevant = RELEVANT.clone()
    relevant[2] = False
    losses = recall_loss(SCORES, relevant, 5, reduction="none")
    assert losses[2] == 0
    torch.testing.assert_close(recall_loss(SCORES, relevant, 5), losses.sum() / 5)
    assert ndcg_loss(SCORES, torch.zeros(6, 12)) == 0


def test_padding_may_hold_anything():
    """A relevance of -1 or NaN where ``where`` says that nothing is. NaN that counts makes its row NaN."""
    where = torch.arange(12) < 8
    expected = ndcg_loss(SCORES[:, :8], RELEVANCE[:, :8], 5)
    for value in (-1.0, torch.nan):
        torch.testing.assert_close(ndcg_loss(SCORES, RELEVANCE.masked_fill(~where, value), 5, where=where), expected)
        padded = torch.where(where, RELEVANCE, value)
        torch.testing.assert_close(
            spearman_loss(torch.where(where, SCORES, value), padded, where=where),
            spearman_loss(SCORES[:, :8], RELEVANCE[:, :8]),
        )
    target = RELEVANCE.clone()
    target[1, 3] = torch.nan
    assert spearman_loss(SCORES, target, reduction="none").isnan().tolist() == [False, True, False, False, False, False]


def test_the_smallest_batches():
    """No query, and one item."""
    assert spearman_loss(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
    assert ndcg_loss(torch.zeros(0, 4), torch.zeros(0, 4), 2) == 0
    one = torch.tensor([[2.0]])
    assert ndcg_loss(one, one) == 0
    assert recall_loss(one, one > 0, 1) == 0
    assert average_precision_loss(one, one > 0) == 0


@pytest.mark.parametrize("operator", ["lapsum", "permutahedron"])
@pytest.mark.parametrize("n", [2, 5, 100, 5000])
def test_a_constant_prediction_of_any_size(operator, n):
    for value in (0.0, 1.7, -1e6):
        loss = spearman_loss(
            torch.full((n,), value), torch.randn(n, generator=torch.Generator().manual_seed(n)), operator=operator
        )
        assert loss == 1


def test_a_constant_prediction_has_no_correlation():
    scores = torch.zeros(2, 5, requires_grad=True)
    loss = spearman_loss(scores, torch.randn(2, 5))
    assert loss == 1
    loss.backward()
    assert bool(scores.grad.isfinite().all())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ndcg_loss(SCORES, -RELEVANCE), ValueError, "relevance: expected at least 0"),
        (lambda: ndcg_loss(SCORES, RELEVANCE[:, :3]), ValueError, "relevance: expected the shape"),
        (lambda: recall_loss(SCORES, RELEVANCE, 3), TypeError, "relevant: expected a bool tensor"),
        (lambda: recall_loss(SCORES, RELEVANT, 0), ValueError, "k: expected at least 1, got 0"),
        (lambda: ndcg_loss(SCORES, RELEVANCE, 0), ValueError, "k: expected at least 1, got 0"),
        (lambda: spearman_loss(SCORES, RELEVANCE, reduction="all"), ValueError, "reduction: expected one of"),
        (lambda: spearman_loss(SCORES, RELEVANCE, operator="ksubset"), TypeError, "KSubset has no ranks"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_it_is_a_part_of_anyk():
    assert anyk.ranking.ndcg_loss is ndcg_loss


def test_a_single_item_has_no_correlation():
    one = torch.tensor([0.3], requires_grad=True)
    loss = anyk.ranking.spearman_loss(one, torch.tensor([2.0]))
    loss.backward()
    assert loss == 1
    assert one.grad == 0
