"""Files are whole or absent, whatever happens while they are written; prepared data survive damage."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from anyk.lab import files
from anyk.lab.data import cache
from anyk.lab.data.sets import Dataset, Split
from anyk.lab.errors import LabError


def test_the_permissions_are_the_usual_ones(tmp_path):
    (tmp_path / "usual").touch()
    files.write_atomically(tmp_path / "a", b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as temporary:  # noqa: PT012
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_in_one_sentence(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with pytest.raises(LabError, match=r"a\.json could not be written because the disk is full.*untouched"):  # noqa: PT012, SIM117
        with files.replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_seen_only_at_the_flush(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match="disk is full"):
        files.write_atomically(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == []


def test_file_and_folder_are_flushed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    files.write_atomically(tmp_path / "a", b"x")
    assert flushed == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


def test_writers_do_not_meet(tmp_path, monkeypatch):
    """All have written before the first one puts its file in place; each finds its own."""
    contents = [bytes([letter]) * 100_000 for letter in b"abcd"]
    path, seen, everybody, replace = tmp_path / "a", [], threading.Barrier(len(contents)), os.replace

    def wait_and_replace(temporary, target):
        everybody.wait(timeout=30)
        seen.append(Path(temporary).read_bytes())
        replace(temporary, target)

    monkeypatch.setattr(os, "replace", wait_and_replace)
    with ThreadPoolExecutor(len(contents)) as threads:
        list(threads.map(lambda content: files.write_atomically(path, content), contents))
    assert sorted(seen) == contents
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["a"]


def _dataset():
    images, labels = torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2), torch.arange(6)
    return Dataset("d", "images", tuple("abcdéf"), Split((images,), labels), None, "", (0.1,), (1 / 3,))


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "new"))
    return tmp_path / "new" / "d.safetensors"


def _refuse():
    raise AssertionError("should have been read, not built")


def test_what_was_built_is_read(cached):
    built = cache.remember("d", _dataset)
    read = cache.remember("d", _refuse)
    assert torch.equal(built.train.parts[0], read.train.parts[0])
    assert torch.equal(built.train.labels, read.train.labels)
    assert (built.name, built.kind, built.classes, built.mean, built.std) == ("d", "images", tuple("abcdéf"), (0.1,), (1 / 3,))
    assert (built.classes, built.mean, built.std, built.test) == (read.classes, read.mean, read.std, None)
    assert built.fingerprint == read.fingerprint != ""


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_file_is_built_again(cached, caplog, damage):
    first = cache.remember("d", _dataset)
    whole = cached.read_bytes()
    cached.write_bytes(
        {"cut": whole[:-5], "flip": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b"", "other": b"hello" * 9}[damage]
    )
    assert cache.remember("d", _dataset).fingerprint == first.fingerprint
    assert "damaged" in caplog.text
    assert cached.read_bytes() == whole


def test_a_cache_that_cannot_be_written_does_not_stop_the_work(tmp_path, cached, caplog):
    (tmp_path / "new").touch()
    dataset = cache.remember("d", _dataset)
    assert len(dataset.train) == 6
    assert "could not be kept" in caplog.text


def test_the_key_follows_the_files(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    before = cache.key_of([tmp_path / "a"], 32)
    assert before == cache.key_of([tmp_path / "a"], 32) != cache.key_of([tmp_path / "a"], 33)
    (tmp_path / "a").write_bytes(b"12")
    assert before != cache.key_of([tmp_path / "a"], 32)
