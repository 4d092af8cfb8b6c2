import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from anyk.lab import embed as module
from anyk.lab.config import DataFields
from anyk.lab.data.prepare import prepare
from anyk.lab.embed import embed
from anyk.lab.errors import LabError

BACKBONE = """
import torch
class Mean(torch.nn.Module):
    def forward(self, images): return torch.cat([images.mean((2, 3)), images.amax((2, 3))], 1)
def make():
    from anyk.lab.embed import centre_crop
    return Mean(), centre_crop(8, 1.0, (0.5,) * 3, (0.5,) * 3)
def broken(): return 3
"""


@pytest.fixture
def photos(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for part, each in (("train", 5), ("test", 2)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for i in range(each):
                pixels = (rng.integers(0, 100, (12, 9, 3)) + 100 * number).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{i}.png")
    (tmp_path / "photos" / "train" / "cat" / "broken.png").write_bytes(b"nothing")
    (tmp_path / "own_backbone.py").write_text(BACKBONE)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("own_backbone", None)
    return tmp_path / "photos"


def test_a_folder_becomes_a_set(photos, tmp_path):
    made = embed(photos, tmp_path / "set", "own_backbone:make")
    assert (made.train, made.test, made.classes, made.dimensions) == (10, 4, 2, 6) and made.skipped[0][0].endswith("broken.png")
    found = prepare(str(tmp_path / "set"), DataFields(), tmp_path)
    assert found.classes == ("cat", "dog") and len(found.split.test) == 4
    own = module.features([photos / "train" / "cat" / "0.png"], "own_backbone:make")
    assert torch.allclose(own[0], found.examples.take(torch.tensor([0]))[0].float(), atol=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir() if "partial" in path.name) == []


def test_a_run_that_was_killed_goes_on_to_the_same_bits(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    embed(photos, tmp_path / "whole", "own_backbone:make")

    def dies(done, total):
        if done > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed(photos, tmp_path / "set", "own_backbone:make", progress=dies)
    assert not (tmp_path / "set").exists()
    embed(photos, tmp_path / "set", "own_backbone:make")
    for name in ("train.safetensors", "test.safetensors"):
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_mistakes(photos, tmp_path):
    for folder, backbone, says in (
        (photos, "nothing", "not known"),
        (photos, "own_backbone:broken", "preprocess"),
        (photos, "own_backbone:none", "no none"),
        (tmp_path / "nowhere", "own_backbone:make", "folder"),
    ):
        with pytest.raises(LabError, match=says):
            embed(folder, tmp_path / "set", backbone)
    embed(photos, tmp_path / "set", "own_backbone:make")
    with pytest.raises(LabError, match="already exists"):
        embed(photos, tmp_path / "set", "own_backbone:make")


def test_photos_are_compared_by_their_embeddings_by_default(photos, tmp_path, monkeypatch):
    """Where the extra is installed; else an error names it and --model cnn."""
    monkeypatch.setattr(module, "is_installed", lambda: False)
    with pytest.raises(LabError, match=r"anyk\[embed\].*--model cnn"):
        module.of_photos(str(photos), "auto", tmp_path / "out")
    assert module.of_photos(str(photos), "cnn", tmp_path / "out") == str(photos)
    monkeypatch.setattr(module, "is_installed", lambda: True)
    monkeypatch.setattr(module, "load_backbone", lambda name: __import__("own_backbone").make())
    place = module.of_photos(str(photos), "auto", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "embeddings" / "dataset.json").read_text())["classes"] == ["cat", "dog"]
    assert prepare(place, DataFields(), tmp_path / "out").shape == (6,) and module.of_photos("glyphs", "auto", tmp_path) == "glyphs"
