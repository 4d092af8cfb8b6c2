"""What a model is worth, against slow definitions; and targets that the model has no class for."""

import math

import pytest
import torch
from torch import Tensor, nn

import oracles
from anyk.lab.data import Dataset, Split
from anyk.lab.run.batches import Reader
from anyk.lab.run.evaluation import KS, Examined, examine

CLASSES = 30


class Answers(nn.Module):
    """A model whose scores are its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def made(unseen: bool) -> tuple[Tensor, Tensor]:
    """Scores and labels of classes of very different size; every fifth label may be one that was never seen."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(200, CLASSES, generator=generator)
    labels = (torch.rand(200, generator=generator) ** 3 * (CLASSES - 2)).long()
    if unseen:
        labels[::5] = -1
    return scores, labels


def examined(scores: Tensor, labels: Tensor, guesses: int = 0) -> Examined:
    examples = Split((scores,), labels)
    dataset = Dataset("made", "embeddings", tuple(map(str, range(CLASSES))), examples, None, "")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return examine(Answers(), examples, order, Reader(dataset, torch.device("cpu")), guesses)


@pytest.mark.parametrize("unseen", [False, True])
def test_every_number_against_its_definition(unseen: bool) -> None:
    scores, labels = made(unseen)
    # A class behind all others, which is the target where there is none.
    rows = [[*row, -math.inf] for row in scores.tolist()]
    targets = [label if label >= 0 else CLASSES for label in labels.tolist()]

    def expected(gain: object, average: str = "micro") -> object:
        return pytest.approx(oracles.ranking_metric(rows, targets, gain, average), rel=1e-6)

    found = examined(scores, labels)
    measured = found.accuracies(KS)
    for k in KS:
        assert measured[f"top{k}"] == expected(lambda rank, k=k: rank <= k)
        if k > 1:
            assert measured[f"ndcg{k}"] == expected(lambda rank, k=k: (rank <= k) / math.log2(1 + rank))
    assert measured["mrr"] == expected(lambda rank: 1 / rank if rank <= CLASSES else 0.0)
    for k in (1, 5):
        assert measured[f"macro_top{k}"] == expected(lambda rank, k=k: rank <= k, "macro")
    assert measured["mean"] == (measured["top1"] + measured["top5"]) / 2
    known = labels >= 0
    cross_entropy = nn.functional.cross_entropy(scores[known], labels[known]).item()
    assert measured["cross_entropy"] == pytest.approx(cross_entropy, rel=1e-5)
    assert set(measured) == {
        *("top1", "top5", "top10", "top20", "mrr", "ndcg5", "ndcg10", "ndcg20", "macro_top1", "macro_top5", "mean"),
        "cross_entropy",
    }
    assert examined(scores, labels).accuracies([1])["mean"] == measured["top1"]
    wanted = found.accuracies(iter((1, 3, 10)), judged=iter((3,)))
    assert wanted.keys() >= {"ndcg3", "mrr", "macro_top1"}
    assert wanted["macro_top3"] == expected(lambda rank: rank <= 3, "macro")
    assert "macro_top10" not in wanted


def test_a_target_that_is_no_class_is_behind_all() -> None:
    scores, labels = made(True)
    found = examined(scores, labels, guesses=3)
    assert (found.labels < 0).sum() == 40
    assert (found.ranks[found.labels < 0] == CLASSES + 1).all()
    assert (found.ranks[found.labels >= 0] <= CLASSES).all()
    assert found.guesses.shape == (200, 3)
    nothing = examined(scores, torch.full_like(labels, -1)).accuracies(KS)
    assert nothing["top20"] == nothing["ndcg20"] == nothing["macro_top5"] == 0
    assert math.isnan(nothing["cross_entropy"])
