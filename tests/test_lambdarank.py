"""The study of learning to rank: its reader and its measure, and what the guide quotes of it."""

import json
import pathlib
import sys

import pytest
import sklearn.metrics
import torch

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "evidence"))

import lambdarank  # noqa: E402


@pytest.fixture
def data(tmp_path):
    (tmp_path / "rank.train").write_text("2 1:0.5 4:1\n0 4:2\n1 1:3\n")
    (tmp_path / "rank.train.query").write_text("2\n1\n")
    (tmp_path / "rank.test").write_text("0 4:0.25\n0 1:1\n0 1:2\n")
    (tmp_path / "rank.test.query").write_text("3\n")
    return lambdarank.read(tmp_path)


def test_reading(data):
    assert data.features.tolist() == [[[0.5, 1], [0, 2], [0, 0]], [[3, 0], [0, 0], [0, 0]], [[0, 0.25], [1, 0], [2, 0]]]
    assert data.relevance.tolist() == [[2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert data.there.tolist() == [[True, True, False], [True, False, False], [True, True, True]]


def test_ndcg_is_that_of_scikit_learn(data):
    scores = torch.tensor([[1.0, 2.0, 9.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])  # 9: of a document that is not there
    assert lambdarank.ndcg(scores, data).nan_to_num(-1).tolist() == pytest.approx([1 / torch.tensor(3.0).log2().item(), 1, -1])
    generator = torch.Generator().manual_seed(0)
    relevance, scores = torch.randint(5, (20, 25), generator=generator).float(), torch.randn(20, 25, generator=generator)
    many = lambdarank.Queries(torch.zeros(20, 25, 1), relevance, torch.ones(20, 25, dtype=torch.bool))
    expected = sklearn.metrics.ndcg_score(2 ** relevance.numpy() - 1, scores.numpy(), k=10)
    assert lambdarank.ndcg(scores, many).mean().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("method", lambdarank.NETWORKS)
def test_every_loss_prefers_the_right_order(method):
    relevance = torch.zeros(3, 12)  # the last query has nothing relevant
    relevance[0, :3], relevance[1, 0] = torch.tensor([4.0, 1.0, 2.0]), 1
    data = lambdarank.Queries(torch.zeros(3, 12, 1), relevance, (torch.arange(12) < torch.tensor([[12], [2], [3]])))
    right = relevance.clone().requires_grad_()
    settings = {"temperature": 0.5, "target": "gains"}
    loss = lambdarank.loss_of(method, right, data, settings)
    loss.backward()
    assert right.grad.isfinite().all()
    assert not right.grad[~data.there].any()
    assert loss < lambdarank.loss_of(method, -right.detach(), data, settings)


def test_the_guide_quotes_the_summary():
    summary = json.loads(lambdarank.SUMMARY.read_text())
    quoted = f"<!-- lambdarank -->\n{lambdarank.table(summary)}\n<!-- end -->"
    assert quoted in lambdarank.GUIDE.read_text(encoding="utf-8"), "run `python evidence/lambdarank.py`"
