"""Data sets of the Hugging Face library: images and columns, saved to the disk here; nothing is downloaded."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from anyk.lab import data as datasets
from anyk.lab.data.tables import Options
from anyk.lab.errors import LabError

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason='needs datasets: pip install "anyk[hf]"'
)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LabError, match=r'hf:some/set needs datasets: pip install "anyk\[hf\]"'):
        datasets.load("hf:some/set")
    with pytest.raises(LabError, match=r"hf: wants a path or a name"):
        datasets.load("hf:")


@pytest.fixture
def hf():
    return pytest.importorskip("datasets")


@needs_datasets
def test_columns(tmp_path, hf, caplog):
    labels = hf.ClassLabel(names=["cat", "dog", "bird"])
    features = hf.Features(
        {"label": labels, "size": hf.Value("float64"), "colour": hf.Value("string"), "id": hf.Value("int64")}
    )
    rows = {
        "label": [0, 1, 2] * 10,
        "size": [float(n % 7) for n in range(30)],
        "colour": ["r", "g"] * 15,
        "id": list(range(30)),
    }
    whole = hf.Dataset.from_dict(rows, features=features)
    hf.DatasetDict({"train": whole, "test": whole.select([2, 0, 1])}).save_to_disk(tmp_path / "set")
    dataset = datasets.load(f"hf:{tmp_path / 'set'}")
    assert (dataset.kind, dataset.classes, dataset.name) == ("embeddings", ("cat", "dog", "bird"), "set")
    assert dataset.table.features == ["size", "colour=r", "colour=g"]
    assert dataset.test.labels.tolist() == [2, 0, 1]
    torch.testing.assert_close(dataset.test.parts[0], dataset.train.parts[0][[2, 0, 1]])
    assert len(caplog.messages) == 2
    whole.save_to_disk(tmp_path / "one")
    assert datasets.load(f"hf:{tmp_path / 'one'}", options=Options(drop=("id",))).test is None
    for options, message in (
        (Options(label_column="kind"), r"hf:.*one has no column 'kind': its columns are label, size, colour, id"),
        (Options(missing="refuse", drop=("is",)), r"has no column 'is'"),
    ):
        with pytest.raises(LabError, match=message):
            datasets.load(f"hf:{tmp_path / 'one'}", options=options)
    whole.remove_columns("label").save_to_disk(tmp_path / "none")
    with pytest.raises(LabError, match=r"does not say which column has the labels \(size, colour, id\): give --label-column"):
        datasets.load(f"hf:{tmp_path / 'none'}")


@needs_datasets
def test_images(tmp_path, hf):
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (20, 24 + n, 3), dtype=np.uint8)) for n in range(12)]
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["a", "b"])})
    whole = hf.Dataset.from_dict({"image": pictures, "label": [0, 1] * 6}, features=features)
    parts = {"train": whole, "validation": whole.select(range(2)), "test": whole.select(range(4))}
    hf.DatasetDict(parts).save_to_disk(tmp_path / "set")
    dataset = datasets.load(f"hf:{tmp_path / 'set'}", image_size=16)
    assert (dataset.kind, dataset.classes, tuple(dataset.train.shape)) == ("images", ("a", "b"), (3, 16, 16))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (14, 2, 4)
    assert dataset.train.parts[0].float().std() > 10
    with pytest.raises(LabError, match=r"drop is for a table, but hf:.*set holds images"):
        datasets.load(f"hf:{tmp_path / 'set'}", options=Options(drop=("label",)))


@needs_datasets
def test_what_is_not_there(tmp_path, hf, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match=r"hf:.*empty cannot be read \("):
        datasets.load(f"hf:{tmp_path / 'empty'}")
