"""Sets larger than the memory: each example once and well mixed, the right rows, little memory, the same bits after a stop."""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lab_data
from anyk import info
from anyk.lab.data import Dataset, Split, embeddings
from anyk.lab.data.streaming import Stream, block_order
from anyk.lab.errors import LabError
from anyk.lab.run import batches, evaluation, training
from anyk.lab.run.config import BLOCK_BYTES, WINDOW_BYTES, Config

UNEVEN = (37, 1, 100, 64, 5, 83)
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def order_of(
    count: int, parts: tuple[int, ...], block: int, window: int, seed: int = 0, index: torch.Tensor | None = None
) -> torch.Tensor:
    starts = torch.tensor([0, *parts]).cumsum(0)
    assert int(starts[-1]) == count
    generator = torch.Generator().manual_seed(seed)
    return block_order(torch.arange(count) if index is None else index, starts, block, window, generator)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Classes one after the other in files of uneven sizes, the number of the row in the first column."""
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    first = 0
    for number, rows in enumerate(UNEVEN):
        values = torch.arange(first, first + rows)
        inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(number)).half()
        inputs[:, 0] = values.half()
        with open(folder / f"train-{number}.safetensors", "wb") as file:
            embeddings.write_split(file, Split((inputs,), values * 5 // sum(UNEVEN)), None, "made")
        first += rows
    (folder / "dataset.json").write_text(json.dumps({"classes": list("abcde")}))
    return folder


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "window"), [(8, 40), (1, 7), (1000, 1000), (3, 1), (8, 10**9)])
@pytest.mark.parametrize("held_out", [0.0, 0.95, 0.999])
def test_every_position_comes_exactly_once(block: int, window: int, held_out: float) -> None:
    count = sum(UNEVEN)
    index = torch.arange(count)[torch.rand(count, generator=torch.Generator().manual_seed(1)) >= held_out]
    order = order_of(count, UNEVEN, block, window, index=index)
    assert order.sort().values.tolist() == index.tolist()
    assert order.tolist() != index.tolist() or len(index) == 1


def test_where_classes_are_stored_together_every_window_has_all_of_them_in_proportion() -> None:
    classes, per_class, block, window = 20, 100, 5, 200
    labels = torch.arange(classes).repeat_interleave(per_class)
    order = order_of(2000, (700, 1300), block, window)
    counts = torch.stack([torch.bincount(labels[part], minlength=classes) for part in order.split(window)]).double()
    # Ten of each class are due. Blocks drawn without regard to their place would deviate by 7 (the root of two blocks of five).
    assert float((counts - window / classes).square().mean().sqrt()) < 3.6
    assert int(counts.min()) > 0
    # Within a window, neighbours know nothing of one another: of equal class as often as by chance.
    same = float((labels[order[1:]] == labels[order[:-1]]).double().mean())
    assert same == pytest.approx(1 / classes, abs=0.03)
    # Over the epochs, any two rows that are not neighbours meet in a window.
    together = [
        torch.isin(torch.tensor([0, 1500]), order_of(2000, (700, 1300), block, 500, seed=seed)[:500]) for seed in range(99)
    ]
    assert any(bool(both.all()) for both in together)


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_rows_of_many_parts_equal_the_rows_of_all_of_them_together(shards: Path) -> None:
    train = embeddings.read(shards).train
    whole = torch.cat([load_file(path)["embeddings"] for path in sorted(shards.glob("train-*"))])
    generator = torch.Generator().manual_seed(0)
    stream = Stream(train, 8, 64)
    for size in (0, 1, 2, 17, 200, 290):
        for index in (torch.randint(len(whole), (size,), generator=generator), torch.arange(size), torch.arange(size).flip(0)):
            for taken in (train.take(index), stream.take(index)):
                assert taken.dtype == torch.float16
                assert torch.equal(taken, whole[index])
    for wrong in (torch.tensor([0, len(whole)]), torch.tensor([-1, 3])):
        with pytest.raises(IndexError, match="positions should be 0 to 289"):
            train.take(wrong)


def test_following_the_order_each_block_is_read_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = embeddings.read(shards).train
    index = torch.arange(len(train))[torch.rand(len(train), generator=torch.Generator().manual_seed(1)) > 0.3]
    stream = Stream(train, 8, 100)
    loaded: list[int] = []
    load = Stream._load
    monkeypatch.setattr(Stream, "_load", lambda self, missing: (loaded.extend(missing.tolist()), load(self, missing))[1])
    for seed in range(3):
        loaded.clear()
        order = block_order(index, train.starts, 8, 100, torch.Generator().manual_seed(seed))
        for batch in order.split(2):
            stream.expect(batch)
            assert torch.equal(stream.take(batch)[:, 0].long(), batch)
        # A few may still be there from the epoch before.
        assert len(loaded) == len(set(loaded))
        assert len(loaded) > 25


def test_batches_are_cast_one_by_one(shards: Path) -> None:
    dataset = embeddings.read(shards)
    config = Config(data=str(shards), shuffle="block", shuffle_block=8, shuffle_window=64)
    reader = batches.Reader(dataset, torch.device("cpu"), config)
    batch = torch.tensor([200, 3, 77])
    inputs = reader(dataset.train, batch)
    assert inputs.dtype == torch.float32
    assert inputs[:, 0].tolist() == batch.tolist()
    assert all(part.dtype == torch.float16 for part in dataset.train.parts)
    (stream,) = reader.streams.values()
    assert stream._store.dtype == torch.float16
    assert len(stream._store) < len(dataset.train) / 2


def test_without_advice_to_the_system_all_works(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for advice in ("MADV_WILLNEED", "MADV_DONTNEED", "MADV_RANDOM"):
        monkeypatch.delattr(mmap, advice, raising=False)
    train = embeddings.read(shards).train
    stream = Stream(train, 8, 64)
    for rows in (torch.tensor([250, 1]), torch.arange(100)):
        stream.expect(rows)
        assert stream.take(rows)[:, 0].tolist() == rows.tolist()


def test_blocks_larger_than_any_file_are_the_files(points: Path, tmp_path: Path) -> None:
    train = embeddings.read(points).train
    longest = max(map(len, train.parts))
    assert len(Stream(train, 10**12, 48)._store) == len(Stream(train, longest, 48)._store)
    for block in (10**12, longest):
        training.train(streamed(points, epochs=1, shuffle_block=block), tmp_path / str(block))
    assert outcome(tmp_path / str(10**12)) == outcome(tmp_path / str(longest))


@LINUX
def test_a_window_that_does_not_fit_into_the_memory_is_named(points: Path) -> None:
    import resource

    # Rows that all lie in the same place: 8 TiB, which nobody has.
    train = embeddings.read(points).train
    wide = Split((torch.zeros(1, 1 << 20).expand(1 << 21, -1),), torch.zeros(1 << 21, dtype=torch.int64), train.maps[:1])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.ExitStack() as undo:
        undo.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 42, hard))  # a system that promises everything would promise this, too
        with pytest.raises(
            LabError, match=r"no room for 8,388,608 MiB .* lower shuffle_window \(3000000\) or shuffle_block \(8\)"
        ):
            Stream(wide, 8, 3_000_000)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="needs the size of the memory")
def test_one_file_larger_than_the_memory_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private writable mapping of it would be refused. (The file is a hole: it takes no room on the disk.)"""
    monkeypatch.setattr(embeddings, "_inspected", lambda *_: "")
    width = 4096
    rows = 2 * (info.usable_memory() or 1 << 36) // (2 * width)
    tensors = {"labels": ("I64", [rows], 8 * rows), "embeddings": ("F16", [rows, width], 2 * width * rows)}
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    try:
        with open(tmp_path / "train.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    except OSError:
        pytest.skip("the file system has no holes, or no room for this one")
    (tmp_path / "dataset.json").write_text(json.dumps({"classes": ["a"]}))
    dataset = embeddings.read(tmp_path)
    assert dataset.train.take(torch.tensor([rows - 1, 0])).count_nonzero() == 0
    resolved = batches.resolved(Config(data=str(tmp_path)), dataset)
    assert resolved.shuffle == "block"


# --- runs -------------------------------------------------------------------------------------------------------------


def streamed(data: Path, **changes: Any) -> Config:
    fields = {"epochs": 3, "batch_size": 16, "learning_rate": 1e-2, "shuffle_block": 4, "shuffle_window": 48}
    return Config(data=str(data), shuffle="block", loss="softmax").replace(**fields).replace(**changes)


def outcome(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    metrics = [{**json.loads(line), "seconds": 0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (folder / "model.safetensors").read_bytes(), metrics


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The set of the other training tests, in seven files."""
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    dataset = embeddings.read(lab_data.write_embedding_set(tmp_path / "whole"))
    return lab_data.write_shards(tmp_path / "points", dataset, 37, torch.float16)


def test_a_run_stopped_in_the_middle_of_an_epoch_ends_with_the_same_bits(
    points: Path, tmp_path: Path, train_in_parts: Callable[[Config, Path], int]
) -> None:
    config = streamed(points, evaluate_every=5)
    training.train(config, tmp_path / "one")
    assert train_in_parts(config, tmp_path / "parts") > 3
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "one")


def test_the_stream_changes_nothing_but_where_rows_come_from(
    points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = training.train(streamed(points), tmp_path / "streamed")
    assert result["test"]["top5"] > 0.8
    assert (result["shuffle"]["shuffle"], result["shuffle"]["shuffle_block"], result["shuffle"]["shuffle_window"]) == (
        "block",
        4,
        48,
    )
    dataset = embeddings.read(points)
    assert dataset.test is not None
    in_memory = Dataset(
        dataset.name, "embeddings", dataset.classes,
        Split(tuple(part.clone() for part in dataset.train.parts), dataset.train.labels),
        Split(tuple(part.clone() for part in dataset.test.parts), dataset.test.labels), dataset.fingerprint,
    )  # fmt: skip
    monkeypatch.setattr(training, "read_data", lambda _: in_memory)
    training.train(streamed(points), tmp_path / "in memory")
    assert outcome(tmp_path / "streamed") == outcome(tmp_path / "in memory")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_run_killed_in_the_middle_of_an_epoch_ends_with_the_same_bits(points: Path, tmp_path: Path) -> None:
    config = streamed(points, epochs=2)
    code = """
        import json, os, signal, sys
        from anyk.lab.run import evaluation, batches, training
        from anyk.lab.run.config import Config
        training.CHECKPOINT_SECONDS = training.CHECKPOINT_SHARE = 0.0
        def kill(progress):
            if progress.step == int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)
        training.train(Config.from_json(json.loads(sys.argv[1])), sys.argv[2], on_progress=kill)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), json.dumps(config.to_json()), str(tmp_path / "killed")]
    killed = subprocess.run([*arguments, "8"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "killed" / "result.json").exists()
    training.train(config, tmp_path / "killed")
    training.train(config, tmp_path / "one")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "one")


def test_another_machine_goes_on_with_the_order_that_was_begun(
    points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = streamed(points, shuffle="auto")
    monkeypatch.setattr(info, "usable_memory", lambda: 10_000)
    training.train(config, tmp_path / "small machine")
    with pytest.raises(training.Stopped):
        training.train(config, tmp_path / "moved", should_stop=iter([False] * 7 + [True]).__next__)
    monkeypatch.setattr(info, "usable_memory", lambda: 10**12)
    result = training.train(config, tmp_path / "moved")
    assert result["shuffle"]["shuffle"] == "block"
    assert result["config"]["shuffle"] == "auto"  # a machine with other memory makes no other config
    assert outcome(tmp_path / "moved") == outcome(tmp_path / "small machine")
    assert training.train(config, tmp_path / "large machine")["shuffle"]["shuffle"] == "full"
    assert outcome(tmp_path / "large machine") != outcome(tmp_path / "small machine")


def test_what_auto_stands_for() -> None:
    def resolved(classes: int = 10, memory: float = 4e9, **fields: Any) -> tuple[Any, ...]:
        config = Config(**fields).resolved("embeddings", 1_000_000, classes, 1024, memory)
        return config.shuffle, config.shuffle_block, config.shuffle_window

    block, window = BLOCK_BYTES // 1024, WINDOW_BYTES // 1024
    assert resolved() == ("block", block, window)
    assert resolved(memory=4.1e9) == ("full", 0, 0)  # a quarter of the memory is more than the 1.02 GB of the examples
    assert resolved(memory=1e12, shuffle="block") == ("block", block, window)
    assert resolved(shuffle="full") == ("full", 0, 0)
    assert resolved(classes=10_000) == ("block", window // 10_000, window)  # a block for each class
    assert resolved(shuffle_window=100) == ("block", 10, 100)
    assert resolved(shuffle_window=100, shuffle_block=7) == ("block", 7, 100)
    assert resolved(classes=10**9)[1] == 1


# --- memory -----------------------------------------------------------------------------------------------------------


@LINUX
def test_an_epoch_over_a_large_set_takes_little_memory(tmp_path: Path) -> None:
    """300 MB in nine files, read for the digest, trained on and evaluated: what is ours and what is mapped stay small."""
    rows, width = 16_384, 1024
    folder = tmp_path / "set"
    folder.mkdir()
    inputs = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).half()
    for name, count in [*((f"train-{number}", rows) for number in range(9)), ("test", 100)]:
        with open(folder / f"{name}.safetensors", "wb") as file:
            embeddings.write_split(file, Split((inputs[:count],), torch.arange(count) * 4 // count), None, "made")
    (folder / "dataset.json").write_text(json.dumps({"classes": list("abcd")}))
    code = """
        import re, sys, torch
        from anyk.lab.run import evaluation, batches, training
        from anyk.lab.run.config import Config
        def memory():
            status = open("/proc/self/status").read()
            return [int(re.search(name + r":\\s+(\\d+)", status)[1]) / 1024 for name in ("RssAnon", "RssFile")]
        peak = [0.0, 0.0]
        def look(*_):
            peak[:] = map(max, peak, memory())
        def config(data, **changes):
            return Config(data=data, loss="softmax", epochs=1, batch_size=1000, shuffle="block", **changes)
        training.train(config(sys.argv[2]), sys.argv[3] + "/warm")  # whatever torch and others need anyway
        before = memory()
        reader = batches.Reader.__call__
        batches.Reader.__call__ = lambda *arguments: (look(), reader(*arguments), look())[1]
        inspected = training.read_data
        training.read_data = lambda setting: (inspected(setting), look())[0]
        training.train(config(sys.argv[1], shuffle_window=8192), sys.argv[3] + "/run", on_progress=look)
        print(*(most - least for most, least in zip(peak, before)))
    """
    small = lab_data.write_embedding_set(tmp_path / "small", width=width, classes=4, per_class=500)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder), str(small), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "ANYK_CACHE": str(tmp_path / "cache"), "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    anonymous, mapped = map(float, result.stdout.split())
    # A window is 16 MB, a batch 2 MB in float16 and 4 MB in float32; the rest is what the allocator keeps, 40 to 80 MB.
    assert anonymous < 150
    assert mapped < 150


# --- the disk ---------------------------------------------------------------------------------------------------------


def cached(path: Path) -> int:
    """How many bytes of a file the system holds in memory."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        flags = np.zeros(-(-len(mapping) // mmap.PAGESIZE), dtype=np.uint8)
        place = np.frombuffer(mapping, dtype=np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        where, into = ctypes.c_void_p(place.ctypes.data), ctypes.c_void_p(flags.ctypes.data)
        assert libc.mincore(where, ctypes.c_size_t(len(mapping)), into) == 0
        del place
    return int((flags & 1).sum()) * mmap.PAGESIZE


def make_cold(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path) > 1 << 20:
        pytest.skip("this file system keeps its files in memory")


@LINUX
def test_no_more_is_read_than_was_asked_for_and_no_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    rows, width = 12_288, 2048  # 48 MiB
    path = tmp_path / "train.safetensors"
    with open(path, "wb") as file:
        part = Split((torch.ones(rows, width, dtype=torch.float16),), torch.arange(rows) % 2)
        embeddings.write_split(file, part, None, "made")
    (tmp_path / "dataset.json").write_text(json.dumps({"classes": ["a", "b"]}))
    dataset = embeddings.read(tmp_path)
    size = rows * width * 2

    # One request for all of it, of which Linux would do the first part only.
    make_cold(path)
    dataset.train.maps[0].fetch(0, rows)
    patience = time.monotonic() + 60
    while cached(path) < 0.9 * size and time.monotonic() < patience:
        time.sleep(0.05)
    assert cached(path) >= 0.9 * size  # not all: a system that is short of memory takes some of it back at once

    # An evaluation on every hundredth row, of which each lies on two pages.
    make_cold(path)
    monkeypatch.setattr(batches, "EVALUATION_BATCH", 32)
    reader = batches.Reader(dataset, torch.device("cpu"), Config(shuffle="block", shuffle_block=32, shuffle_window=1024))
    index = torch.arange(0, rows, 100)
    evaluation.examine(torch.nn.Linear(width, 2), dataset.train, index, reader)
    wanted = len(index) * 2 * mmap.PAGESIZE
    assert wanted * 0.9 < cached(path) < wanted + (1 << 20)

    # A row that was not announced reads its own pages, and not all around it.
    make_cold(path)
    before = cached(path)
    dataset.train.take(torch.tensor([5000]))
    assert cached(path) - before <= 4 * mmap.PAGESIZE

    # Training reads the blocks of its batch, announced or not.
    make_cold(path)
    reader(dataset.train, torch.tensor([9000, 10, 3000]))
    assert 3 * 32 * width * 2 <= cached(path) < 1 << 20
