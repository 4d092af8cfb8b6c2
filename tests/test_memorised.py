"""The study "Memorised or not": its trainer of many models is the plain loop; its evaluation says what made runs say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence"))

from memorised import evaluate, plan
from memorised.run import Folder, divide
from memorised.train import Models, Variant, loss_of, softmax_family_gradient, train

CLASSES, FEATURES, BATCH = 10, 7, 20


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return torch.randn(count, FEATURES, generator=generator) + nn.functional.one_hot(y, CLASSES)[:, :FEATURES], y


TEST = examples(200, 2)
PARTS = {"train": examples(60, 0), "validation": TEST, "test": TEST}


def plain_loss(one: Variant, scores: Tensor, target: Tensor) -> Tensor:
    if one.arm == "ce":
        return nn.functional.cross_entropy(scores / one.t, target, label_smoothing=one.smooth)
    if one.arm == "gce":
        loss = nn.functional.cross_entropy(scores / one.t, target, reduction="none")
        return (0.1 * loss + 0.9 * (1 - (-0.7 * loss).exp()) / 0.7).mean()
    return loss_of(one.arm, one.t)(scores, target).mean()


@pytest.mark.parametrize("hidden", [0, 6])
def test_many_models_are_trained_as_a_plain_loop_trains_one(hidden: int) -> None:
    variants = [
        Variant("ce", smooth=0.1, wd=1.0), Variant("ce", t=4, lr=3e-2), Variant("gce", t=2), Variant("net 5", t=2),
        Variant("lap 1-5", start=0.0), Variant("ce", start=1 / 8, rate=1 / 8),
    ]  # fmt: skip
    found = train(variants, PARTS, classes=CLASSES, hidden=hidden, steps=20, batch=BATCH, seed=3)
    for place, one in enumerate(variants):
        last = nn.Linear(hidden or FEATURES, CLASSES)
        model = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), last) if hidden else nn.Sequential(last)
        start = Models(variants, FEATURES, CLASSES, hidden, True, 3).weights
        for parameter, each in zip(model.parameters(), start, strict=True):
            parameter.data = each[place].clone()
        rates = [{"params": list(last.parameters()), "lr": one.lr * one.rate, "weight_decay": one.wd / one.rate}]
        if hidden:
            rates.append({"params": list(model[0].parameters()), "lr": one.lr, "weight_decay": one.wd})
        optimizer, order = torch.optim.AdamW(rates), torch.Generator().manual_seed(1003)
        x, y = PARTS["train"]
        for step in range(20):
            if step % 3 == 0:
                index = torch.randperm(60, generator=order)
            chosen = index[step % 3 * BATCH :][:BATCH]
            optimizer.zero_grad()
            plain_loss(one, model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        line, hits = found[place]
        assert line["v"] == one.to_json()
        assert np.array_equal(hits[0], (model(TEST[0]).argmax(1) == TEST[1]).numpy())
        assert line["learned"] == pytest.approx(float((model(x).argmax(1) == y).float().mean()), abs=1e-4)


def test_the_gradient_of_the_softmax_family_is_autograd_s() -> None:
    x, y = torch.randn(2, 20, CLASSES, dtype=torch.float64, requires_grad=True), TEST[1][:20]
    variants = [Variant("ce", t=3, smooth=0.2), Variant("gce", t=2)]
    t, smooth, share = torch.tensor([[3, 2], [0.2, 0], [1, 0.1]], dtype=torch.float64)[..., None, None]
    loss = sum(plain_loss(one, scores, y) for one, scores in zip(variants, x, strict=True))
    torch.testing.assert_close(softmax_family_gradient(x.detach(), y, t, smooth, share), torch.autograd.grad(loss, x)[0])


def test_cross_entropy_at_a_temperature_is_another_start_and_rate() -> None:
    models = Models([Variant("ce", t=8), Variant("ce", start=1 / 8, rate=1 / 8)], FEATURES, CLASSES, 6, True, 0)
    for _ in range(50):
        models.step(*PARTS["train"])
    for divided, each in zip((1, 1, 8, 8), models.weights, strict=True):
        torch.testing.assert_close(each[0] / divided, each[1], rtol=1e-3, atol=1e-5)


def test_a_fifth_of_each_class_is_held_out() -> None:
    labels = torch.arange(CLASSES).repeat(30)
    train_, held = divide(labels, 10, 0)
    assert labels[train_].bincount().tolist() == [8] * CLASSES
    assert labels[held].bincount().tolist() == [2] * CLASSES
    assert not set(train_.tolist()) & set(held.tolist())


def test_the_evaluation_compares_what_each_method_chooses_on_validation(tmp_path: Path) -> None:
    cell, folder, generator = plan.CELLS["linear-20"], Folder(tmp_path), np.random.default_rng(0)
    for seed in (1, 2, 3):
        plain = generator.random((2, 10_000)) < 0.4
        while missing := plan.wanted(cell, "main", folder.found("linear-20", seed)):
            for one in missing:
                good = one.lr == 3e-3 and one.wd == 0.1  # the best of the grid, and what takes over its rate
                gained = one.t == 8 and one.arm == "net 5"  # 2 points, at the temperature that validation prefers
                hits = plain | (generator.random((2, 10_000)) < 0.02 / 0.6) if gained else plain
                line = {"v": one.to_json(), "val": [0.4 + 0.1 * good + 0.1 * gained] * 2, "test": [0.4, 0.4], "step": [1, 1]}
                folder.add("linear-20", seed, ({**line, "learned": 1.0}, hits), 1.0)
    lines = evaluate.read(folder.lines())
    tested = {(row["a"], row["b"], row["k"]): row for row in evaluate.test(folder, lines)}
    k5 = tested["k5", "ce", 5]
    assert k5["points"] == pytest.approx(2, abs=0.4)
    assert k5["seeds"] == 3
    assert k5["p"] <= k5["holm"] < 0.05
    assert tested["tail", "ce", 5]["points"] == 0
    [[one], *_] = evaluate.chosen(lines, "linear-20", "k5")
    assert one["v"] == {"arm": "net 5", "t": 8.0, "lr": 3e-3, "wd": 0.1}
    page = evaluate.page(lines, {("linear-20", *pair): row for pair, row in tested.items()})
    assert f"| k5 - ce | **{tested['k5', 'ce', 1]['points']:+.1f}**" in page
