import json

import numpy as np
import pytest
import safetensors.numpy
import torch

from anyk.lab.config import DataFields
from anyk.lab.data import embeddings
from anyk.lab.data.prepare import Examples, prepare
from anyk.lab.errors import LabError

ROWS = np.random.default_rng(0).normal(size=(30, 6)).astype(np.float16)
LABELS = np.arange(30) % 3


def make(folder, **parts):
    given = parts or {"train": (ROWS[:20], LABELS[:20], None), "test": (ROWS[20:], LABELS[20:], None)}
    return embeddings.write(folder, ["a", "b", "c"], given, name="set")


def test_a_set_is_mapped_where_it_lies(tmp_path):
    found = prepare(str(make(tmp_path / "set")), DataFields(), tmp_path)
    assert not (found.folder / "examples.npy").exists()
    assert np.array_equal(found.examples.take(torch.tensor([25, 0, 19])).numpy(), ROWS[[25, 0, 19]])
    assert found.labels.tolist() == LABELS.tolist() and found.split.test.tolist() == list(range(20, 30))
    train = ROWS[found.split.train].astype(np.float64)
    assert np.allclose(found.mean, train.mean(0), atol=1e-3) and np.allclose(found.std, train.std(0), atol=1e-3)


def test_several_files_follow_one_another(tmp_path):
    folder = make(tmp_path / "set", train=(ROWS[:20], LABELS[:20], None))
    safetensors.numpy.save_file({"embeddings": ROWS[20:], "labels": LABELS[20:]}, folder / "train2.safetensors")
    found = prepare(str(folder), DataFields(), tmp_path)
    assert np.array_equal(found.examples.take(torch.arange(30)).numpy(), ROWS)


def test_groups_are_kept_together(tmp_path):
    folder = make(tmp_path / "set", train=(ROWS, LABELS, np.arange(30) // 3))
    found = prepare(str(folder), DataFields(), tmp_path)
    assert not set(found.groups[found.split.train].tolist()) & set(found.groups[found.split.test].tolist())


def test_what_is_larger_than_the_memory_is_read_in_blocks(tmp_path, monkeypatch):
    """Such a set is not read through its mapping, whose pages count as memory."""
    rows = np.random.default_rng(0).normal(size=(5000, 64)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    monkeypatch.setattr("anyk.info.usable_memory", lambda: 4 * rows.nbytes - 1)
    examples = Examples([np.load(tmp_path / "rows.npy", mmap_mode="r")], (64,))
    assert examples.is_large
    order = examples.order(torch.arange(100, 4900), torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(100, 4900)) and order.tolist() != sorted(order.tolist())
    for some in order.split(700):
        assert np.array_equal(examples.take(some).numpy(), rows[some.numpy()])


def damaged(folder, how):
    path = folder / "train.safetensors"
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "header":
        path.write_bytes(b"\xff" * 8 + data[8:])
    elif how == "labels":
        safetensors.numpy.save_file({"embeddings": ROWS[:20], "labels": LABELS[:20] + 5}, path)
    elif how == "nan":
        safetensors.numpy.save_file({"embeddings": np.full((20, 6), np.nan, np.float16), "labels": LABELS[:20]}, path)
    elif how == "names":
        safetensors.numpy.save_file({"rows": ROWS[:20]}, path)
    elif how == "description":
        (folder / "dataset.json").write_text(json.dumps({"name": "x"}))
    elif how == "changed later":
        pass


@pytest.mark.parametrize("how", ["cut", "header", "labels", "nan", "names", "description"])
def test_damaged_sets_are_refused_by_name(tmp_path, how):
    folder = make(tmp_path / "set")
    damaged(folder, how)
    with pytest.raises(LabError, match=r"set"):
        prepare(str(folder), DataFields(), tmp_path)


def test_a_set_that_changes_is_noticed(tmp_path):
    folder = make(tmp_path / "set")
    found = prepare(str(folder), DataFields(), tmp_path)
    safetensors.numpy.save_file({"embeddings": ROWS[:10], "labels": LABELS[:10]}, folder / "train.safetensors")
    from anyk.lab.data.prepare import open_prepared

    with pytest.raises(LabError, match="has changed"):
        open_prepared(found.folder)


def test_writing_replaces_only_when_told(tmp_path):
    make(tmp_path / "set")
    with pytest.raises(LabError, match="already exists"):
        make(tmp_path / "set")
    embeddings.write(tmp_path / "set", ["a", "b"], {"train": (ROWS[:4], LABELS[:4] % 2, None)}, name="new", force=True)
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["classes"] == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
