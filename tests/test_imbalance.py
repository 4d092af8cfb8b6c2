"""The comparison on imbalanced classes: its cut, losses and search, and docs/imbalance.md against the committed summary."""

import doctest
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import anyk

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "evidence"))

import imbalance


def test_doctests():
    assert doctest.testmod(imbalance, extraglobs={"torch": torch}).failed == 0


def test_the_cut_is_drawn_for_each_seed_and_leaves_validation_out():
    labels = torch.arange(3).repeat(110)
    train, aside = imbalance.cut(labels, seed=1, validation=10)
    assert labels[train].bincount().tolist() == [100, 10, 1]
    assert labels[aside].bincount().tolist() == [10] * 3
    assert not set(train.tolist()) & set(aside.tolist())
    assert imbalance.cut(labels, seed=1, validation=10)[0].equal(train)
    assert not imbalance.cut(labels, seed=2, validation=10)[0].equal(train)


def test_the_losses_are_what_they_are_called():
    counts = torch.tensor([90.0, 9.0, 4.0, 3.0, 2.0, 1.0])
    scores, target = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 6
    made = {
        name: method.make(counts, method.values[1])(scores, target)
        for name, method in imbalance.METHODS.items()
        if not name.startswith("noised") or importlib.util.find_spec("pytopk")
    }
    assert all(loss.isfinite() for loss in made.values())
    frequent = counts / counts.sum()
    # p(y) n_y / sum_c p(c) n_c, of probabilities instead of scores
    shares = scores.exp() * frequent
    adjusted = -(shares[torch.arange(8), target] / shares.sum(1)).log().mean()
    torch.testing.assert_close(made["adjusted"], adjusted)
    weight = counts[target] ** -0.5
    weighted = (weight * functional.cross_entropy(scores, target, reduction="none")).sum() / weight.sum()
    torch.testing.assert_close(made["weighted"], weighted)
    p_k = imbalance.per_class(counts, 0.25)
    torch.testing.assert_close(p_k.sum(1), torch.ones(6))
    assert p_k[0, 0] == 0.75
    assert p_k[-1, 0] == 0.25
    rows = anyk.TopKErrorLoss(None, anyk.KSubset())(scores, target, example_p_k=p_k[target])
    torch.testing.assert_close(made["error_per_class"], rows)
    shifted = anyk.TopKErrorLoss({1: 0.5, 5: 0.5}, anyk.LapSum())(scores + frequent.log(), target)
    torch.testing.assert_close(made["lapsum_adjusted"], shifted)


def test_accuracies_by_classes():
    counts = torch.tensor([101, 100, 20, 19])
    labels = torch.tensor([0, 0, 1, 2, 3])
    scores = torch.eye(4)[[0, 1, 1, 2, 0]]
    found = imbalance.accuracies(scores, labels, counts)
    assert found["top1"] == pytest.approx(3 / 5)
    assert found["macro_top1"] == pytest.approx((0.5 + 1 + 1 + 0) / 4)
    assert (found["many_top1"], found["medium_top1"], found["few_top1"]) == (0.5, 1.0, 0.0)
    assert found["frequent_top1"] == pytest.approx((50.5 + 100 + 20) / 240)
    assert found["top5"] == 1


def test_tuning_goes_past_the_ends_of_the_rates_and_comes_to_the_best():
    best = (-1.5, 0.8)  # a rate beyond the grid
    asked = []

    def run(name, exponent, value, seed, tuning):
        asked.append((name, exponent, value, seed, tuning))
        top = 1 - abs(exponent - best[0]) / 10 - abs(value - best[1]) / 10
        return {"top1": top, "top5": top}

    found = imbalance.tune("error", run)
    assert (found["exponent"], found["hyperparameter"]) == best
    assert len(asked) == len(set(asked)) == found["tries"] * len(imbalance.TUNING_SEEDS)
    assert max(exponent for _, exponent, *_ in asked) == -1.0
    assert {call[3:] for call in asked} == {(seed, True) for seed in imbalance.TUNING_SEEDS}
    assert not set(imbalance.TUNING_SEEDS) & set(imbalance.SEEDS)


def test_runs_learn_are_kept_and_not_made_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(imbalance, "VALIDATION", 5)
    torch.manual_seed(0)
    labels = torch.arange(3).repeat(110)
    train = imbalance.Examples(3 * torch.eye(3)[labels] + 0.1 * torch.randn(330, 3), labels)
    runs = imbalance.Runs(tmp_path / "runs.jsonl", train, train)
    for name in ("softmax", "adjusted"):
        for tuning in (True, False):
            assert runs(name, -1.0, 0.5, 1, tuning)["top1"] > 0.9
    again = imbalance.Runs(tmp_path / "runs.jsonl", train, train)
    assert again.known == runs.known
    monkeypatch.setattr(imbalance, "trained", None)
    again("softmax", -1.0, 0.5, 1, tuning=True)


def made_summary():
    """Three methods on three seeds: one far ahead, one the same but for luck."""
    ahead = {"adjusted": (0.0, 0.0, 0.0), "softmax": (0.1, 0.1001, 0.0999), "error": (0.01, -0.02, 0.011)}
    metrics = [f"{group}_top{k}" for group in ("macro", *imbalance.GROUPS, "frequent") for k in (1, 5)]
    methods = {
        name: {
            "tuned": {"exponent": -3.0, "hyperparameter": imbalance.METHODS[name].values[1], "validation": 0.5, "tries": 9},
            "test": {metric: [0.5 + lead for lead in leads] for metric in ("top1", "top5", *metrics)},
        }
        for name, leads in ahead.items()
    }
    return {"seeds": [1, 2, 3], "methods": methods}


def test_the_tables_say_what_is_sure():
    lines = imbalance.tables(made_summary()).splitlines()
    first = {line.split(" | ")[0].removeprefix("| "): line for line in lines[:5]}
    assert "| 50.00 ± 0.00 | – |" in first["logit-adjusted softmax"]
    assert "60.00 ± 0.01 | **+10.00** (+9.98 to +10.02)" in first["softmax"]
    assert "**" not in first["TopKErrorLoss"]
    assert "0.001, guide 0.2 |" in lines[-1]


def test_the_steps_are_differences_of_one_row_to_the_next(monkeypatch):
    monkeypatch.setattr(imbalance, "STEPS", ("adjusted", "softmax"))
    _, _, first, second = imbalance.steps(made_summary()).splitlines()
    assert first == "| logit-adjusted softmax | 50.00 | 50.00 | 50.00 | 50.00 |"
    assert second == f"| softmax {'| 60.00 (+10.00) ' * 4}|"


def test_the_losses_are_compared_on_the_same_seeds(monkeypatch):
    monkeypatch.setattr(imbalance, "PAIRS", {"nothing": ("softmax", "adjusted")})
    *_, row = imbalance.losses(made_summary()).splitlines()
    assert row == f"| nothing {'| +10.00 (+9.98 to +10.02) ' * 2}|"


def test_rows_that_were_added_do_not_change_what_was_found(monkeypatch):
    """Of one pair the p is .02: found alone, not among more."""
    summary = made_summary()
    summary["methods"]["weighted"] = json.loads(json.dumps(summary["methods"]["adjusted"]))
    summary["methods"]["weighted"]["test"]["top1"] = [0.5 + lead for lead in (0.05, 0.08, 0.05)]
    del summary["methods"]["error"], summary["methods"]["softmax"]
    (row,) = [line for line in imbalance.tables(summary).splitlines() if "weight 1" in line and "±" in line]
    assert "**+6.00**" in row
    more = made_summary()["methods"]["error"]
    summary["methods"] |= dict.fromkeys(imbalance.ADDED, more)
    assert row in imbalance.tables(summary)
    monkeypatch.setattr(imbalance, "ADDED", ())
    assert row not in imbalance.tables(summary)


def test_tables_stand_between_their_marks():
    page = "a\n<!-- imbalance: {} -->\n\n{}\n\n<!-- end -->\nb"
    assert imbalance.placed(page.format("all", "old"), "all", "new") == page.format("all", "new")
    assert imbalance.placed(page.format("steps", "old"), "all", "new") == page.format("steps", "old")


def test_the_page_has_the_tables_of_the_summary():
    page = imbalance.PAGE.read_text()
    summary = json.loads(imbalance.SUMMARY.read_text())
    assert set(summary["methods"]) == set(imbalance.METHODS)
    assert all(len(each["test"]["top5"]) == len(imbalance.SEEDS) for each in summary["methods"].values())
    assert page == imbalance.written(page, summary)
    assert imbalance.steps(summary) in page
    assert imbalance.losses(summary) in page
    assert imbalance.tables(summary) in page
