import json
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from anyk.lab import models, train
from anyk.lab.config import RunConfig
from anyk.lab.errors import LabError
from anyk.lab.folder import read_tensors
from anyk.lab.models import Calibration, ModelSpec

CONFIG = RunConfig(loss="softmax", epochs=2)


@pytest.fixture
def trained(prepared, tmp_path):
    train.train(CONFIG, prepared, tmp_path / "run")
    return tmp_path / "run"


def test_a_trained_model_comes_back_without_its_data(trained, prepared):
    model = models.load(trained)
    scores = model(prepared.examples.take(prepared.split.test))
    ranks = 1 + (scores > scores.gather(1, prepared.labels[prepared.split.test][:, None])).sum(1)
    assert (ranks == read_tensors(trained / "test.safetensors")[0]["ranks"]).float().mean() > 0.99
    [guesses] = model.guesses(prepared.examples.take(torch.tensor([0])), k=3)
    assert len(guesses) == 3 and abs(sum(p for _, p in guesses)) <= 1 and guesses[0][1] >= guesses[1][1]


def test_a_spec_survives_a_way_through_json(trained):
    spec, _ = models.read(trained)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


WRONG = {
    "format": 1, "shape": [-1], "classes": [], "hidden": 0, "dropout": 2.0, "mean": [1.0], "std": [0.0] * 8, "kind": "sounds", "model": "nothing",
    "calibration": {"examples": 1}, "table": {"columns": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_claims_nonsense_is_refused(trained, name):
    weights, spec = read_tensors(trained / "model.safetensors")
    spec[name] = WRONG[name]
    safetensors.torch.save_file(weights, trained / "model.safetensors", {"state": json.dumps(spec)})
    with pytest.raises(LabError, match="cannot be used"):
        models.load(trained)


def test_damaged_and_foreign_files(trained, tmp_path):
    (tmp_path / "noise.safetensors").write_bytes(b"\x07" * 300)
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    for name in ("noise.safetensors", "foreign.safetensors"):
        with pytest.raises(LabError, match="cannot be used"):
            models.load(tmp_path / name)
    with pytest.raises(LabError, match="does not exist"):
        models.load(tmp_path / "nowhere")


def module(folder, monkeypatch, body):
    (folder / "own_model.py").write_text(body)
    monkeypatch.chdir(folder)
    sys.modules.pop("own_model", None)


def test_a_model_of_ones_own(prepared, tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import torch\ndef make(shape, classes):\n    return torch.nn.Sequential(torch.nn.LazyLinear(7), torch.nn.ReLU(), torch.nn.Linear(7, classes))\n")
    train.train(CONFIG.replace(model="own_model:make"), prepared, tmp_path / "own")
    with pytest.raises(LabError, match="does not import"):
        models.load(tmp_path / "own")
    assert len(models.load(tmp_path / "own", trust=True).classes) == 6
    assert len(models.load(tmp_path / "own", model="own_model:make").classes) == 6


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def make(shape, classes): return 3", "nn.Module"),
        ("def make(shape, classes): raise KeyError('oh')", "oh"),
        ("import torch\ndef make(shape, classes): return torch.nn.Linear(shape[0], classes + 1)", "shape"),
        ("import torch\ndef make(shape, classes): return torch.nn.Linear(shape[0], classes).requires_grad_(False)", "trained"),
        ("import torch\ndef make(shape, classes):\n    m = torch.nn.Linear(shape[0], classes)\n    m.weight.data.fill_(float('nan'))\n    return m", "finite"),
        ("make = 3", "function"),
        ("syntax error here", "cannot be imported"),
    ],
)
def test_what_is_wrong_with_it_is_said(prepared, tmp_path, monkeypatch, body, says):
    module(tmp_path, monkeypatch, body)
    with pytest.raises(LabError, match=says):
        train.check(CONFIG.replace(model="own_model:make"), prepared, "cpu")


def test_words_for_functions():
    assert models.word_of("linear") == "linear"
    with pytest.raises(LabError, match="my_models"):
        models.word_of(lambda shape, classes: nn.Linear(1, 1))
    with pytest.raises(LabError, match="Linear"):
        models.word_of(nn.Linear(1, 1))


def test_coverage_is_kept_on_new_examples():
    """Of exchangeable examples, the threshold for 90 % leaves out 10 %; with groups, of examples of new groups."""
    generator = torch.Generator().manual_seed(0)
    held, new = (torch.randn(4000, generator=generator).abs().neg() for _ in range(2))
    found = Calibration.of(held, ())
    assert abs(float((new >= found.threshold(0.9)).float().mean()) - 0.9) < 0.02
    assert Calibration.from_json(json.loads(json.dumps({"examples": found.examples, "chose": [], "thresholds": found.thresholds}))) == found
    with pytest.raises(LabError, match="cannot be promised"):
        Calibration.of(held[:5], ()).threshold(0.95)


def test_coverage_holds_on_new_groups():
    """Examples of a group are nearly alike: counted as if they were independent, the promise would be too bold."""
    generator = torch.Generator().manual_seed(0)
    covered = {"alone": [], "groups": []}
    for _ in range(200):
        sizes = torch.randint(1, 60, (40,), generator=generator)
        hard = -3 * torch.rand(40, generator=generator) ** 2
        groups = torch.arange(40).repeat_interleave(sizes)
        held = hard[groups] - 0.05 * torch.rand(len(groups), generator=generator)
        new = -3 * torch.rand(500, generator=generator) ** 2 - 0.05 * torch.rand(500, generator=generator)
        for name, found in (("alone", Calibration.of(held, ())), ("groups", Calibration.of(held, (), groups))):
            covered[name].append(float((new >= found.threshold(0.9)).float().mean()))
    assert sum(covered["groups"]) / 200 >= 0.89


def test_the_last_layer_of_a_model_without_one():
    with pytest.raises(LabError, match="last layer"):
        models.last_layer(nn.Conv2d(1, 1, 1))
