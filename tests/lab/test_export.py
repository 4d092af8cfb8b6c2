"""Exported models: the same guesses by onnxruntime, for every kind of data and batches of any size."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import lab_data
from anyk.lab import export
from anyk.lab.errors import LabError
from anyk.lab.run import models, training
from anyk.lab.run.config import Config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    runs = lab_data.trained_on_every_kind(folder)
    for model in ("mlp", "resnet18"):
        config = Config(data=str(folder / "photos"), loss="softmax", model=model, epochs=1, dropout=0.5)
        training.train(config, folder / "runs" / model)
        runs[model] = folder / "runs" / model
    runs["python"] = lab_data.write_untrained(folder / "python", "context", ("def", "(", ")", ":"), tokens="python")
    return runs


@pytest.mark.parametrize(
    "kind",
    [
        *("embeddings", "table", "photos", "cifar100", "glyphs", "mlp", "items", "words", "python"),
        pytest.param("resnet18", marks=pytest.mark.full),
    ],
)
def test_onnxruntime_gives_the_same_guesses(runs, anyk, kind, tmp_path):
    code, out, err = anyk("export", runs[kind], "-o", "model.onnx", "--k", "3")
    assert (code, err) == (0, "")
    assert out.startswith("model.onnx: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]  # the weights are inside
    model = models.load(runs[kind])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (given,), (classes, probabilities) = session.get_inputs(), session.get_outputs()
    images, tokens = len(model.plan.shape) == 3, bool(model.plan.tokens)
    named = (
        ("images", "tensor(uint8)") if images else ("tokens", "tensor(int64)") if tokens else ("embeddings", "tensor(float)")
    )
    assert (given.name, given.type) == named
    assert out.startswith(f"model.onnx: {named[0]} (N, ")
    assert [(each.name, each.type) for each in (classes, probabilities)] == [
        ("classes", "tensor(int64)"),
        ("probabilities", "tensor(float)"),
    ]
    names = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    assert tuple(names) == model.classes
    if kind == "table":
        assert json.loads(session.get_modelmeta().custom_metadata_map["features"]) == [f"x{n}" for n in range(5)]
        assert out.splitlines()[1] == "the 5 numbers are, in this order: x0, x1, x2, x3, x4"
    random = np.random.default_rng(0)
    for count in (1, 2, 7):
        size = (count, *model.plan.shape)
        x = random.integers(0, 256, size, np.uint8) if images else 3 * random.normal(size=size).astype(np.float32)
        x = random.integers(0, len(names) + 2, size) if tokens else x
        found, p = session.run(None, {given.name: x})
        wanted = model.guesses(torch.from_numpy(x), 3)
        assert found.shape == p.shape == (count, 3)
        if model.plan.mask_seen:
            assert not any(set(x[row]) & set(found[row]) for row in range(count))  # what was seen is no guess
        np.testing.assert_allclose(p, [[each for _, each in row] for row in wanted], atol=1e-5)
        assert [[names[number] for number in row] for row in found] == [[name for name, _ in row] for row in wanted]


def test_a_missing_package_a_file_that_is_there_and_a_bad_k(runs, anyk, tmp_path, monkeypatch):
    (tmp_path / "model.onnx").write_text("mine")
    code, out, err = anyk("export", runs["table"])
    assert (code, out) == (2, "")
    assert err == "anyk: model.onnx already exists: name another file, or give --force to replace it.\n"
    assert anyk("export", runs["table"], "--k", "0", "-o", "other.onnx")[2] == "anyk: k should be at least 1, but is 0.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert anyk("export", runs["table"], "--force", "--k", "99")[1].splitlines()[0].endswith("(N, 4)")  # there are four classes
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    code, _, err = anyk("export", runs["table"], "-o", "new.onnx")
    assert (code, err) == (2, 'anyk: an export to ONNX needs onnxscript: pip install "anyk[onnx]".\n')


def test_what_cannot_be_exported_or_differs_is_told_and_leaves_no_file(runs, tmp_path, monkeypatch):
    model = models.load(runs["table"])
    forward = model.model.forward
    model.model.forward = lambda x: forward(x) if x.sum() > 0 else -forward(x)
    with pytest.raises(LabError, match="the model cannot be exported: "):
        export.export(model, tmp_path / "model.onnx")
    model.model.forward = forward
    monkeypatch.setattr(export, "_TOLERANCE", -1.0)
    with pytest.raises(LabError, match="gives other probabilities than the model, by"):
        export.export(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
