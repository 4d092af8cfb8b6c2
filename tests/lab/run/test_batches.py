"""Batches as the models want them, and what is said of the data."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import lab_data
import made
from anyk.lab.data import Parts, load, split
from anyk.lab.errors import LabError
from anyk.lab.run import batches, models, training
from anyk.lab.run.config import Config, Setting


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Features of which one is far off and wide, and one is constant."""
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    folder = lab_data.write_embedding_set(tmp_path / "points")
    for name in ("train", "test"):
        file = folder / f"{name}.safetensors"
        tensors = safetensors.torch.load_file(file)
        tensors["embeddings"][:, 0] = tensors["embeddings"][:, 0] * 100 + 1000
        tensors["embeddings"][:, 1] = 7.0
        safetensors.torch.save_file(tensors, file)
    return str(folder)


def config(data: str, **changes: Any) -> Config:
    return Config(data=data, epochs=4, batch_size=32, learning_rate=1e-2, m=8).replace(**changes)


def test_features_are_standardised_on_the_training_part(points: str, tmp_path: Path) -> None:
    result = training.train(config(points), tmp_path / "run")
    assert result["data"]["standardized"] is True
    assert result["data"]["features"] == 16
    predictor = made.trained(tmp_path / "run")
    train = predictor.reader(predictor.dataset.train, predictor.parts.train)
    torch.testing.assert_close(train.mean(0), torch.zeros(16), atol=1e-4, rtol=0)
    std = train.std(0, correction=0)
    torch.testing.assert_close(std, torch.where(torch.arange(16) == 1, 0.0, 1.0), atol=1e-4, rtol=0)
    held = predictor.reader(predictor.dataset.train, predictor.parts.validation)
    assert float(held.mean(0).abs().max()) > 0.05  # they had no say in it

    loaded = models.load(tmp_path / "run")
    examples, index = predictor.parts.test, predictor.parts.test_index
    raw = examples.take(index)
    torch.testing.assert_close(loaded(raw), predictor.model(predictor.reader(examples, index)))
    assert loaded.plan.feature_mean[0] == pytest.approx(1000, rel=0.1)
    assert loaded.plan.image_size is None
    plain = training.train(config(points, standardize=False), tmp_path / "plain")
    assert plain["data"]["standardized"] is False
    assert models.load(tmp_path / "plain").plan.feature_mean == ()
    assert result["test"]["top1"] > plain["test"]["top1"] + 0.1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"feature_mean": [0.0] * 3}, "feature_mean should be 0 or 16 numbers"),
        ({"feature_std": [0.0] * 16}, "feature_std should be 0 or 16 numbers"),
        ({"feature_std": []}, "feature_std should be as many numbers as feature_mean"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], problem: str) -> None:
    plan = models.Plan("linear", (16,), ("a", "b"), 4, 0.0, feature_mean=(0.0,) * 16, feature_std=(1.0,) * 16)
    assert models.Plan.from_json({**plan.to_json(), "feature_std": [1] * 16}) == plan
    with pytest.raises(ValueError, match=problem):
        models.Plan.from_json({**plan.to_json(), **changes})


def test_the_size_of_images_is_said_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    result = training.train(Config(data="glyphs:12", image_size=16, epochs=1, model="linear"), tmp_path / "run")
    assert result["data"]["image_size"] == [16, 16]
    assert "standardized" not in result["data"]
    loaded = models.load(tmp_path / "run")
    assert loaded.plan.shape == (1, 16, 16)
    assert loaded.plan.image_size == (16, 16)
    usual = load("glyphs:12")
    assert batches.describe(usual, split(usual, 0.1, 0.2, 0))["image_size"] == [20, 20]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"device": "cuda:7"}, "device 'cuda:7' cannot be used here"),
        ({"model": "cnn"}, "model cnn takes images, but points holds embeddings"),
        ({"augment": ("flip",)}, "augment changes images, but points holds embeddings"),
        ({"model": "no_such_module:make"}, "cannot be imported"),
    ],
    ids=str,
)
def test_contradictions_are_one_line(changes: dict[str, Any], problem: str, points: str) -> None:
    dataset = load(points)
    batches.check_setting(config(points), dataset)
    batches.check_setting(Setting(data=points), dataset)
    with pytest.raises(LabError, match=problem) as caught:
        batches.check_setting(Setting(data=points).replace(**changes), dataset)
    assert "\n" not in str(caught.value)
    few = dataclasses.replace(dataset, name="few", classes=("a", "b", "c"))
    with pytest.raises(LabError, match="--select top10 needs more than 10 classes, but few has 3"):
        batches.check_setting(Setting(data=points, select="top10"), few)


def test_a_check_leaves_the_random_numbers_alone(points: str) -> None:
    state = torch.get_rng_state()
    batches.check_setting(config(points, head_learning_rate=0.1, model="mlp"), load(points))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("model", "limit"), [("cnn", 15), ("resnet18", 16)])
def test_a_single_example_is_refused_exactly_where_the_networks_cannot_take_it(model: str, limit: int) -> None:
    for size in (8, limit, limit + 1):
        images = lab_data.image_set(classes=2, per_class=2, size=size)
        for count, batch in ((1, 1), (1, 9), (3, 2), (7, 2), (4, 3), (5, 3), (2, 2)):
            parts = Parts(torch.arange(count), torch.arange(1), images.train, torch.arange(1))
            setting = Config(model=model, batch_size=batch)
            steps = -(-count // batch)
            smallest = min((place + 1) * count // steps - place * count // steps for place in range(steps))
            network = models.build(setting, images).train()
            try:
                network(torch.zeros(smallest, 1, size, size))
            except ValueError:
                with pytest.raises(LabError, match=f"model {model} needs two examples in each step for images of {size} x"):
                    batches.check_batches(setting, images, parts)
            else:
                batches.check_batches(setting, images, parts)
