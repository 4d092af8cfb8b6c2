"""Embedding sets: round trips, memory mapping, whole or not at all, and every damage named in one sentence."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import lab_data
from anyk.lab.data import Dataset, Split, embeddings
from anyk.lab.errors import LabError

ROOT = pathlib.Path(__file__).parents[3]


def numbers(rows=12, width=5, dtype=torch.float32, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small(dtype=torch.float32, test=True):
    labels = torch.arange(12) % 3
    held = Split((numbers(6, dtype=dtype, seed=1),), labels[:6]) if test else None
    return Dataset("small", "embeddings", ("ant", "bee", "cat"), Split((numbers(dtype=dtype),), labels), held, "")


@pytest.fixture
def folder(tmp_path):
    return embeddings.write(tmp_path / "small", small())


def save(folder, split="train", **tensors):
    save_file(tensors, folder / f"{split}.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_round_trip(tmp_path, dtype):
    wrote = small(dtype)
    read = embeddings.read(embeddings.write(tmp_path / "set", wrote, about={"backbone": "none"}, texts={"note.txt": "hello"}))
    assert (read.name, read.kind, read.classes) == ("small", "embeddings", ("ant", "bee", "cat"))
    for ours, theirs in ((read.train, wrote.train), (read.test, wrote.test)):
        torch.testing.assert_close(ours.parts[0], theirs.parts[0], rtol=0, atol=0)
        assert torch.equal(ours.labels, theirs.labels)
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["backbone"] == "none"
    assert (tmp_path / "set" / "note.txt").read_text() == "hello"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_files_of_the_safetensors_library_are_read_and_ours_are_read_by_it(tmp_path, folder):
    from safetensors.torch import load_file

    ours = load_file(folder / "train.safetensors")
    assert torch.equal(ours["embeddings"], numbers())
    save(folder, embeddings=numbers(), labels=torch.arange(12) % 3)
    assert torch.equal(embeddings.read(folder).train.parts[0], numbers())


def test_shards_follow_in_sorted_order_and_a_test_split_is_optional(tmp_path):
    (tmp_path / "dataset.json").write_text(json.dumps({"classes": ["a", "b"]}))
    for number in (2, 0, 1):
        save(tmp_path, f"train-{number}", embeddings=torch.full((2, 3), float(number)), labels=torch.tensor([0, 1]))
    dataset = embeddings.read(tmp_path)
    assert dataset.test is None
    assert dataset.name == tmp_path.name
    assert [part[0, 0].item() for part in dataset.train.parts] == [0, 1, 2]
    assert dataset.train.take(torch.tensor([5, 0]))[:, 0].tolist() == [2, 0]


def test_other_dtypes_are_stored_as_float32_and_parts_are_joined(tmp_path):
    parts = (numbers(5).double(), numbers(7, seed=3).double())
    dataset = Dataset("two", "embeddings", ("a", "b"), Split(parts, torch.arange(12) % 2), None, "")
    read = embeddings.read(embeddings.write(tmp_path / "set", dataset))
    assert torch.equal(read.train.parts[0], torch.cat(parts).float())
    read = embeddings.read(embeddings.write(tmp_path / "half", dataset, dtype=torch.float16))
    assert read.train.parts[0].dtype == torch.float16


def test_a_file_is_read_through_once(folder, monkeypatch):
    calls = []
    digest = embeddings.digest
    monkeypatch.setattr(embeddings, "digest", lambda part, source: calls.append(source) or digest(part, source))
    first = embeddings.read(folder).fingerprint
    assert len(calls) == 4  # embeddings and labels of two files
    assert embeddings.read(folder).fingerprint == first
    assert len(calls) == 4
    os.utime(folder / "train.safetensors", ns=(1, 1))
    assert embeddings.read(folder).fingerprint == first
    assert len(calls) == 6


@pytest.mark.parametrize("rename", [True, False])
def test_a_file_with_another_content_of_the_same_size_and_time_is_read_again(folder, rename):
    before = embeddings.read(folder).fingerprint
    path = folder / "train.safetensors"
    status = path.stat()
    content = path.read_bytes()
    # The file system's clock ticks every few milliseconds only.
    time.sleep(0.05)
    place = folder / "fresh" if rename else path
    place.write_bytes(content[:-4] + bytes(4))
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(place, path)
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert embeddings.read(folder).fingerprint != before


def test_of_a_set_that_lists_its_files_no_others_are_read(tmp_path):
    folder = lab_data.write_shards(tmp_path / "set", small(test=False), 5)
    before = embeddings.read(folder)
    for name in ("train-old", "test-old"):
        save(folder, name, embeddings=numbers(seed=9), labels=LABELS)
    after = embeddings.read(folder)
    assert (len(after.train), after.test, after.fingerprint) == (12, None, before.fingerprint)


def test_reading_works_without_a_place_for_the_cache(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "file"))
    assert embeddings.read(folder).fingerprint == embeddings.read(folder).fingerprint


def test_fingerprint_changes_with_every_value_label_and_name(folder):
    seen = {embeddings.read(folder).fingerprint}
    changed = numbers()
    changed[7, 3] += 1e-3
    save(folder, embeddings=changed, labels=torch.arange(12) % 3)
    seen.add(embeddings.read(folder).fingerprint)
    save(folder, embeddings=changed, labels=(torch.arange(12) + 1) % 3)
    seen.add(embeddings.read(folder).fingerprint)
    (folder / "dataset.json").write_text(json.dumps({"name": "small", "classes": ["x", "y", "z"]}))
    seen.add(embeddings.read(folder).fingerprint)
    assert len(seen) == 4


# --- damage -----------------------------------------------------------------------------------------------------------

LABELS = torch.arange(12) % 3


def _cut(folder):
    path = folder / "train.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _list_files(files):
    return lambda f: (f / "dataset.json").write_text(json.dumps({"classes": ["ant", "bee", "cat"], "files": files}))


DAMAGES = {
    "no dataset.json": (lambda f: (f / "dataset.json").unlink(), r"small has no dataset.json: write one"),
    "not JSON": (lambda f: (f / "dataset.json").write_text("{'a'"), r"dataset.json cannot be read as JSON .* mend it"),
    "no classes": (lambda f: (f / "dataset.json").write_text('{"name": "x"}'), r'dataset.json should have "classes"'),
    "files 5": (_list_files(5), r'"files" in .*dataset.json should be a list'),
    "files elsewhere": (_list_files(["../small/train.safetensors"]), "should be a list of files in its folder"),
    "files lost": (_list_files(["train.safetensors", "train-2.safetensors"]), r"small has lost train-2.safetensors, which"),
    "files no train": (_list_files(["test.safetensors"]), r'no train.safetensors in the "files" of dataset.json'),
    "no train": (lambda f: (f / "train.safetensors").unlink(), r"small has no train.safetensors"),
    "cut": (_cut, r"train.safetensors is damaged .* copy it or make it again"),
    "no rows": (
        lambda f: save(f, "test", embeddings=torch.zeros(0, 5), labels=torch.zeros(0, dtype=torch.int64)),
        r"test.safetensors has no examples",
    ),
    "no labels": (lambda f: save(f, embeddings=numbers()), r'train.safetensors has no tensor "labels" \(it has embeddings\)'),
    "float64": (lambda f: save(f, embeddings=numbers().double(), labels=LABELS), r"are F64: save them as float16"),
    "int32": (lambda f: save(f, embeddings=numbers(), labels=LABELS.int()), r"labels in .*train.safetensors are int32"),
    "shape": (lambda f: save(f, embeddings=torch.zeros(12, 5, 1), labels=LABELS), r"but has \(12, 5, 1\) and \(12,\)"),
    "rows": (lambda f: save(f, embeddings=numbers(), labels=LABELS[:9]), r"train.safetensors should .* \(12, 5\) and \(9,\)"),
    "width": (
        lambda f: save(f, "test", embeddings=numbers(6, 4), labels=LABELS[:6]),
        r"test.safetensors have 4 dimensions, but 5 in .*train.safetensors",
    ),
    "mixed": (
        lambda f: save(f, "train-2", embeddings=numbers().half(), labels=LABELS),
        r"in float16, and others in float32",
    ),
    "no class": (lambda f: save(f, embeddings=numbers(), labels=LABELS % 2), r"no training example of class 2 \(cat\): add"),
    "beyond": (lambda f: save(f, embeddings=numbers(), labels=LABELS + 1), r"label 3, but there are 3 classes: .* 0 to 2"),
    "negative": (lambda f: save(f, "test", embeddings=numbers(), labels=LABELS - 1), r"test.safetensors has the label -1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(folder, damage):
    harm, message = DAMAGES[damage]
    embeddings.read(folder)
    harm(folder)
    with pytest.raises(LabError, match=message) as raised:
        embeddings.read(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "nan"), (float("-inf"), "-inf")])
def test_a_value_that_is_no_number_is_found_in_its_row(folder, value, name, monkeypatch, tmp_path):
    monkeypatch.setattr(embeddings, "_BLOCK_BYTES", 5 * 4 * 4)  # blocks of four rows
    broken = numbers()
    broken[9, 2] = value
    save(folder, embeddings=broken, labels=LABELS)
    with pytest.raises(LabError, match=rf"train.safetensors has the value {name} in row 9, column 2 \(from 0\): fill it in"):
        embeddings.read(folder)
    with pytest.raises(LabError, match=rf"the value {name} in row 9, column 2"):
        embeddings.write(tmp_path / "new", Dataset("x", "embeddings", ("a", "b", "c"), Split((broken,), LABELS), None, ""))
    assert not (tmp_path / "new").exists()


def test_flipped_bits_never_give_a_traceback(folder):
    """Each byte of the header changed: the set is refused in one sentence, or is still sound."""
    path = folder / "train.safetensors"
    whole = path.read_bytes()
    refused = []
    for place in range(8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 7)]) + whole[place + 1 :])
        try:
            embeddings.read(folder)
        except LabError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("train.safetensors" in message and "\n" not in message for message in refused)


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_a_set_is_replaced_only_when_asked(folder):
    before = embeddings.read(folder).fingerprint
    other = small(torch.float16, test=False)
    with pytest.raises(LabError, match=r"small already exists: .* --force"):
        embeddings.write(folder, other)
    assert embeddings.read(folder).fingerprint == before
    embeddings.write(folder, other, force=True)
    assert sorted(path.name for path in folder.iterdir()) == ["dataset.json", "train.safetensors"]
    assert embeddings.read(folder).train.parts[0].dtype == torch.float16
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


def test_other_files_are_never_replaced(tmp_path, folder):
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(LabError, match=r"holds thesis.tex"):
        embeddings.write(folder, small(), force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=r"file is a file"):
        embeddings.write(tmp_path / "file", small(), force=True)
    with pytest.raises(LabError, match=r"cannot be written"):
        embeddings.write(tmp_path / "file" / "below", small())


def test_an_exception_while_writing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "_bytes", lambda block: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(LabError, match=r"cannot be written \(No space left on device\): make room"):
        embeddings.write(tmp_path / "set", small())
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_kill_while_writing_leaves_the_old_set(folder):
    before = embeddings.read(folder).fingerprint
    code = """
        import os, signal, sys, torch
        from anyk.lab.data import Dataset, Split, embeddings
        blocks = embeddings.blocks
        def killed(part):
            for number, block in enumerate(blocks(part)):
                if number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield block
        embeddings.blocks = killed
        embeddings._BLOCK_BYTES = 40
        data = Split((torch.zeros(12, 5),), torch.arange(12) % 3)
        embeddings.write(sys.argv[1], Dataset("new", "embeddings", ("a", "b", "c"), data, None, ""), force=True)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(folder)])
    assert killed.returncode == -9
    assert embeddings.read(folder).fingerprint == before
    (left,) = [path for path in folder.parent.iterdir() if path.name != "small"]
    assert re.fullmatch(r"\.small\.\d+\.writing", left.name)
    # The next write removes what a kill left, once it cannot belong to a living writer.
    embeddings.write(folder, small(), force=True)
    assert left.exists()
    for path in (*left.iterdir(), left):
        os.utime(path, (time.time() - 7200,) * 2)
    embeddings.write(folder, small(), force=True)
    assert not left.exists()


def test_groups_are_of_all_files_or_of_none(tmp_path):
    groups = torch.arange(12) // 2
    data = Dataset("small", "embeddings", ("ant", "bee", "cat"), Split((numbers(),), LABELS, groups=groups), None, "")
    folder = lab_data.write_shards(tmp_path / "set", data, 5)
    read = embeddings.read(folder)
    assert torch.equal(read.train.groups, groups)
    other = Split((numbers(),), LABELS, groups=groups.flip(0))
    changed = embeddings.read(lab_data.write_shards(folder, dataclasses.replace(data, train=other), 5))
    assert changed.fingerprint != read.fingerprint
    file = folder / "train-00001.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "groups": tensors["groups"].float()}, file)
    with pytest.raises(LabError, match=r"groups in .*train-00001.safetensors are float32: save them as int64"):
        embeddings.read(folder)
    save_file({**tensors, "groups": tensors["groups"][:2]}, file)
    with pytest.raises(LabError, match=r"should have embeddings \(N, d\) and groups \(N,\), but has \(5, \d+\) and \(2,\)"):
        embeddings.read(folder)
    del tensors["groups"]
    save_file(tensors, file)
    with pytest.raises(LabError, match='have "groups" in some and not in others'):
        embeddings.read(folder)
