"""A trained model is read back from its file alone."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import lab_data
import made
from anyk.lab.data import Dataset
from anyk.lab.errors import LabError
from anyk.lab.run import models, training
from anyk.lab.run.config import Config


@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        ("linear", None),
        ("mlp", None),
        ("linear", lab_data.image_set()),
        ("cnn", lab_data.image_set(channels=3)),
        ("resnet18", lab_data.image_set()),
    ],
    ids=("linear", "mlp", "linear on pixels", "cnn", "resnet18"),
)
def test_scores_are_those_of_the_run(
    model: Any, dataset: Dataset | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = lab_data.write_embedding_set(tmp_path / "points")
    if dataset is not None:
        monkeypatch.setattr(training, "read_data", lambda _: dataset)
    config = Config(data=str(points), model=model, hidden=24, dropout=0.2, epochs=1, batch_size=40)
    training.train(config, tmp_path / "run")
    predictor = made.trained(tmp_path / "run")
    shutil.rmtree(points)

    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "run" / "model.safetensors", tmp_path / "elsewhere")
    loaded = models.load(tmp_path / "elsewhere")
    assert loaded.classes == predictor.dataset.classes
    assert not loaded.training
    examples, index = predictor.parts.test, predictor.parts.test_index
    raw = examples.take(index)
    with torch.no_grad():
        scores = predictor.model(predictor.reader(examples, index))
        torch.testing.assert_close(loaded(raw), scores)
    probabilities, classes = scores.softmax(1).topk(3)
    for row, numbers, values in zip(loaded.guesses(raw, 3), classes.tolist(), probabilities.tolist(), strict=True):
        assert [name for name, _ in row] == [loaded.classes[number] for number in numbers]
        assert [p for _, p in row] == pytest.approx(values, rel=1e-4)
    assert len(loaded.guesses(raw[:1], 1000)[0]) == len(loaded.classes)
    with pytest.raises(ValueError, match=r"examples: expected shape \(N, .*got"):
        loaded(raw[..., :5])


def test_the_width_of_the_convolutions(tmp_path: Path) -> None:
    file = lab_data.write_images(tmp_path / "blobs.npz")
    training.train(Config(data=str(file), width=6, epochs=1), tmp_path / "run")
    loaded = models.load(tmp_path / "run")
    convolutions = [module for module in loaded.modules() if isinstance(module, torch.nn.Conv2d)]
    assert [each.out_channels for each in convolutions] == [6, 12, 24]


def test_a_loaded_model_is_a_module_like_others(tmp_path: Path) -> None:
    plan = models.Plan("cnn", (1, 8, 8), ("a", "b", "c"), hidden=4, dropout=0.5, mean=(0.4,), std=(0.2,))
    model = models.Classifier(plan, plan.build().state_dict())
    images = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scores = model(images)
    assert model(images[:0]).shape == (0, 3)
    torch.testing.assert_close(copy.deepcopy(model).double()(images).float(), scores)
    assert copy.deepcopy(model).bfloat16()(images).dtype == torch.bfloat16
    guesses = model.guesses(images, 2)
    assert model.train().guesses(images, 2) == guesses  # and the means of the batch normalisation are as they were
    assert model.training
    torch.testing.assert_close(model.eval()(images), scores, rtol=0, atol=0)
    for wrong, error, problem in (
        (images.numpy(), TypeError, "examples: expected a tensor, got ndarray"),
        (images / 255, TypeError, "examples: expected uint8, pixels from 0 to 255, got torch.float32"),
        (images[0], ValueError, r"examples: expected shape \(N, 1, 8, 8\), got \(1, 8, 8\)"),
    ):
        with pytest.raises(error, match=problem):
            model(wrong)
    for count, expected in ((0, ValueError), (-1, ValueError), ("3", TypeError)):
        with pytest.raises(expected, match="count: expected"):
            model.guesses(images, count)  # type: ignore[arg-type]


def test_guesses_are_ranked_by_scores_where_probabilities_underflow() -> None:
    plan = models.Plan("linear", (3,), ("a", "b", "c"), hidden=4, dropout=0.0)
    weights = {"1.weight": torch.diag(torch.tensor([1e4, 2e4, 3e4])), "1.bias": torch.zeros(3)}
    assert models.Classifier(plan, weights).guesses(torch.ones(1, 3), 3) == [[("c", 1.0), ("b", 0.0), ("a", 0.0)]]


TABLE = {"columns": [{"name": "a", "mean": 0.0, "categories": None}], "label": "y", "others": [], "titled": True}


def test_a_file_of_before_has_no_columns(tmp_path: Path) -> None:
    plan = models.Plan("linear", (1,), ("a", "b"), hidden=4, dropout=0.0)
    weights, file = plan.build().state_dict(), tmp_path / "model.safetensors"
    described = plan.to_json()
    safetensors.torch.save_file(weights, file, {"state": json.dumps({**described, "table": TABLE})})
    assert models.load(file).plan.table.features == ["a"]
    del described["table"]
    safetensors.torch.save_file(weights, file, {"state": json.dumps(described)})
    assert models.load(file).plan.table is None


def test_files_that_are_not_models(tmp_path: Path) -> None:
    plan = models.Plan("linear", (3, 2, 2), ("a", "b"), hidden=4, dropout=0.0, mean=(0.5,) * 3, std=(0.2,) * 3)
    weights = plan.build().state_dict()
    file = tmp_path / "model.safetensors"

    def write(**changes: Any) -> None:
        safetensors.torch.save_file(weights, file, {"state": json.dumps({**plan.to_json(), **changes})})

    write()
    state = torch.get_rng_state()
    assert models.load(file).plan == plan
    assert torch.equal(state, torch.get_rng_state())
    write(classes=["crane", "crane"])
    assert models.load(file).classes == ("crane", "crane")
    for changes, problem in (
        ({"more": 1}, "does not say what model"),
        ({"model": "no such"}, "model should be linear, .*attention, module:function or timm:NAME, but is 'no such'"),
        ({"shape": 3}, "shape should be integers, but is 3"),
        ({"model": "cnn", "shape": [12]}, "shape should be 3 positive numbers"),
        ({"classes": "ab"}, "classes should be texts, but is 'ab'"),
        ({"classes": []}, "classes should be"),
        ({"width": 0}, "width should be a positive number, but is 0"),
        ({"dropout": 1}, "dropout should be"),
        ({"table": []}, "the columns of its table are not described"),
        ({"table": {**TABLE, "label": None}}, "the columns of its table are not described by texts"),
        ({"table": {**TABLE, "columns": [{"name": "a", "mean": 1e301, "categories": None}]}}, "a number as its mean"),
        ({"table": {**TABLE, "columns": [{"name": "a", "mean": 0, "categories": []}]}}, "the categories of a column"),
        ({"table": TABLE}, r"its table has 1 features, but the shape is \[3, 2, 2\]"),
        ({"mean": []}, "mean should be 3 numbers"),
        ({"std": [0.2, 0.2, 0.0]}, "std should be 3 numbers"),
        ({"mean": [0.5, 0.5, float("nan")]}, "mean should be numbers"),
        ({"classes": ["a", "b", "c"]}, r"weights 1.weight should be torch.float32 \[3, 12\], but are torch.float32 \[2, 12\]"),
        ({"model": "mlp", "hidden": 10**12}, "weights 1.weight should be"),
    ):
        write(**changes)
        with pytest.raises(LabError, match=problem) as caught:
            models.load(tmp_path)
        assert str(caught.value).count("\n") == 0
        assert str(caught.value).endswith("train again in another folder.")

    def write_weights(changed: dict[str, torch.Tensor], **metadata: str) -> None:
        safetensors.torch.save_file(changed, file, metadata or {"state": json.dumps(plan.to_json())})

    for changed, problem in (
        ({**weights, "more": torch.ones(1)}, r"weights more should be none, but are torch.float32 \[1\]"),
        ({"1.weight": weights["1.weight"]}, "weights 1.bias should be torch.float32"),
        ({**weights, "1.bias": torch.ones(2, dtype=torch.int64)}, "but are torch.int64"),
    ):
        write_weights(changed)
        with pytest.raises(LabError, match=problem):
            models.load(file)
    for state_text in ("[1]", "{", "[" * 100_000):
        write_weights(weights, state=state_text)
        with pytest.raises(LabError, match=r"model.safetensors cannot be used \(.+\)"):
            models.load(file)
    safetensors.torch.save_file(weights, file)
    with pytest.raises(LabError, match="it has no description"):
        models.load(file)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(LabError, match=r"model.safetensors cannot be used"):
        models.load(file)
    with pytest.raises(LabError, match="does not exist: a run writes it"):
        models.load(tmp_path / "nothing")


@pytest.mark.parametrize(("height", "width", "pad"), [(32, 32, 4), (16, 16, 2), (9, 20, 2), (3, 4, 1)])
def test_a_crop_shifts_by_an_eighth_of_the_side_at_most(height: int, width: int, pad: int) -> None:
    torch.manual_seed(0)
    images = torch.arange(1.0, 1 + height * width).view(1, 1, height, width).repeat(400, 2, 1, 1)
    shown = torch.nn.functional.pad(images[0, 0], (pad,) * 4)
    windows = {
        (down, right): shown[down : down + height, right : right + width]
        for down in range(2 * pad + 1)
        for right in range(2 * pad + 1)
    }
    seen = set()
    for image in models.augment(images, ("crop",)):
        assert torch.equal(image[0], image[1])
        found = {place for place, window in windows.items() if torch.equal(window, image[0])}
        assert found
        seen |= found
    assert len(seen) > 0.9 * len(windows)
