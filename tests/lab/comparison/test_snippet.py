"""The lines to paste run, and have the config in them."""

import json

import pytest
import torch

import made
from anyk.lab.comparison.snippet import code
from anyk.lab.run import losses
from anyk.lab.run.config import Config

CONFIGS = [Config(loss=loss) for loss in made.LOSSES]
CONFIGS += [Config(loss=loss, label_smoothing=0.1) for loss in ("splitter", "softmax", "hinge", "error", "gce")]
CONFIGS += [Config(loss="error:softsort", ce_weight=0.5, ce_weight_end=0.1, q=0.7, m=None), Config(loss="gce", q=0.4)]
CONFIGS += [
    Config(loss="bitonic", swap="cauchy", wires="sorted", top1="mixed", softmax_over="candidates", m=8),
    Config(loss="sinkhorn", anchors="topk", m=10**6),
    Config(p_k=(1 / 3, 1 / 3, 1 / 3), p_k_end=(0.0, 0.0, 1.0), temperature_end=0.25),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.loss)
def test_the_code_runs(config):
    names = {}
    exec(code(config, classes=20), names)
    scores = torch.randn(4, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = names["criterion"](scores, torch.tensor([0, 1, 2, 19]))
    loss.backward()
    assert loss.isfinite()
    assert scores.grad.abs().sum() > 0


def test_the_code_has_the_config_in_it():
    lines = code(
        Config(loss="odd_even", temperature=0.125, swap="gaussian", m=16, label_smoothing=0.1, learning_rate=0.001), classes=100
    )
    criterion = (
        "criterion = anyk.TopKCrossEntropyLoss([0.5, 0.0, 0.0, 0.0, 0.5], "
        'anyk.SortingNetwork(kind="odd_even", temperature=0.125, swap="gaussian"), m=16, label_smoothing=0.1)'
    )
    assert lines == f"import anyk\n\n# tuned with adam, learning rate 0.001\n{criterion}\n"
    assert code(Config(loss="error:lapsum", ce_weight=0.5, m=None)).splitlines()[-1] == (
        "criterion = anyk.TopKErrorLoss([0.5, 0.0, 0.0, 0.0, 0.5], anyk.LapSum(temperature=1.0), m=None, ce_weight=0.5)"
    )
    assert code(Config(loss="gce", q=0.4)).splitlines()[-1] == (
        "criterion = anyk.TopKErrorLoss({1: 1.0}, anyk.KSubset(), m=None, q=0.4)"
    )
    assert "k=3, temperature=0.5" in code(Config(loss="smooth", p_k=(0.5, 0.0, 0.5, 0.0), temperature=0.5))


@pytest.mark.parametrize("loss", ["softmax", "gce", "error", "splitter"])
def test_the_code_of_a_comparison_on_sequences(loss):
    """The same loss as the lab's, of what it was given."""
    config = Config(loss=loss, model="gru", mask_seen=True, label_smoothing=0.1, learning_rate=0.004, m=8)
    lines = code(config, classes=20)
    assert "# scores (places, n) and target (places,): every place of a sequence that has a target" in lines
    assert "# scores: -inf for what the sequence has had before, but never for the target" in lines
    names = {}
    exec(lines, names)
    scores, target = torch.randn(4, 20, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 19])
    scores[:, 5:9] = -torch.inf
    found = names["criterion"](scores, target)
    assert found.isfinite()
    torch.testing.assert_close(found, losses.criterion(config, 20)(scores, target))

    plain = code(config.replace(mask_seen=False, model="context"), classes=20)
    assert "places" not in plain
    assert "-inf" not in plain
    assert ("torch.nn.CrossEntropyLoss" in plain) == (loss == "softmax")
    assert "LinearHead" not in plain
    many = code(config.replace(mask_seen=False, model="context"), classes=30_000)
    assert "# 30,000 classes: anyk.LinearHead(d, 30000, criterion) takes the place of the last layer" in many
    assert "LinearHead" not in code(config.replace(mask_seen=False, model="mlp"), classes=30_000)
    assert "LinearHead" not in code(config.replace(mask_seen=False, model="gru", loss="hinge"), classes=30_000)


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_the_code_reads_p_k_for_each_class(tmp_path, suffix):
    file, rows = tmp_path / f"p_k.{suffix}", [[0.5, 0.5], [1.0, 0.0]]
    file.write_text(json.dumps(rows) if suffix == "json" else "0.5,0.5\n1.0,0.0\n")
    names = {}
    exec(code(Config(p_k_file=str(file))), names)
    assert names["criterion"].p_k.tolist() == rows
    exec(code(Config(loss="hinge", p_k_file=str(file))), names)
    assert names["criterion"].k == 2
