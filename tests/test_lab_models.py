"""A trained model is read back from its file alone."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import lab_data
from anyk.lab import models, training
from anyk.lab.data import Dataset
from anyk.lab.errors import LabError
from anyk.lab.recipes import Recipe


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
        monkeypatch.setattr(training, "load", lambda spec: dataset)
    recipe = Recipe(data=str(points), model=model, hidden=24, dropout=0.2, epochs=1, batch_size=40)
    training.train(recipe, tmp_path / "run")
    predictor = training.Predictor(tmp_path / "run")
    shutil.rmtree(points)

    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "run" / "model.safetensors", tmp_path / "elsewhere")
    loaded = models.load(tmp_path / "elsewhere")
    assert loaded.classes == predictor.dataset.classes
    assert not loaded.training
    examples, index = predictor.parts.test, predictor.parts.test_index
    raw = examples.take(index)
    with torch.no_grad():
        torch.testing.assert_close(loaded(raw), predictor.model(predictor.reader(examples, index)))
    classes, probabilities = predictor.test_guesses(3)
    for row, numbers, values in zip(loaded.guesses(raw, 3), classes.tolist(), probabilities.tolist(), strict=True):
        assert [name for name, _ in row] == [loaded.classes[number] for number in numbers]
        assert [p for _, p in row] == pytest.approx(values, rel=1e-4)
    assert len(loaded.guesses(raw[:1], 1000)[0]) == len(loaded.classes)
    with pytest.raises(ValueError, match=r"examples: expected shape \(N, .*got"):
        loaded(raw[..., :5])


def test_files_that_are_not_models(tmp_path: Path) -> None:
    plan = models.Plan("linear", (3,), ("a", "b"), hidden=4, dropout=0.0)
    weights = {name: tensor.contiguous() for name, tensor in plan.build().state_dict().items()}
    file = tmp_path / "model.safetensors"

    def write(**changes: Any) -> None:
        state = json.dumps({**dataclasses.asdict(plan), **changes})
        safetensors.torch.save_file(weights, file, {"state": state})

    write()
    assert models.load(file).plan == plan
    for changes, problem in (
        ({"more": 1}, "does not say what model"),
        ({"model": "no such"}, "no model 'no such'"),
        ({"classes": ["a"]}, "is damaged"),
        ({"shape": 3}, "is damaged"),
    ):
        write(**changes)
        with pytest.raises(LabError, match=problem):
            models.load(tmp_path)
    safetensors.torch.save_file(weights, file)
    with pytest.raises(LabError, match="does not say what model"):
        models.load(file)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(LabError, match=r"model.safetensors cannot be read"):
        models.load(file)
    with pytest.raises(LabError, match="is not there: a run writes it"):
        models.load(tmp_path / "nothing")
