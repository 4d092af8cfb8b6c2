"""What the machine has: it is JSON, it is true where that can be checked, and it never fails for want of something."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import anyk
from anyk import info, kernels
from anyk.lab.data.cache import cache_folder


@pytest.fixture
def embeddings(tmp_path):
    place = tmp_path / "flowers"
    place.mkdir()
    (place / "dataset.json").write_text(json.dumps({"name": "Flowers", "classes": ["rose", "tulip"]}))
    (place / "train.safetensors").write_bytes(b"x" * 100)
    return place


def test_gather_is_json_and_complete(tmp_path, embeddings):
    (tmp_path / "cache" / "downloads").mkdir(parents=True)
    (tmp_path / "cache" / "downloads" / "file").write_bytes(b"12345")
    found = json.loads(json.dumps(info.gather(cache=tmp_path / "cache", folder=tmp_path)))
    assert found["versions"]["anyk"] == anyk.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["machine"]["cores"] >= found["machine"]["usable_cores"] >= 1
    assert found["memory"]["total"] > 2**28
    assert found["memory"]["total"] >= found["memory"]["available"]
    assert found["cache"]["contents"] == [{"name": "downloads", "bytes": 5}]
    assert found["embeddings"] == [{"folder": str(embeddings), "name": "Flowers", "classes": 2, "bytes": 100}]


def test_devices_can_be_used():
    for device in info.devices():
        assert torch.ones(1, device=device["device"]).sum() == 1


@pytest.mark.parametrize(
    ("native", "line"),
    [
        ({"usable": True, "why": "", "variant": "avx512"}, "used: avx512"),
        ({"usable": True, "why": ""}, "used"),
        ({"usable": False, "why": "no compiler when anyk was installed"}, "not used: no compiler when anyk was installed"),
    ],
)
def test_kernels_are_told_with_the_reason_when_one_is_not_used(monkeypatch, native, line):
    report = {"setting": "auto", "native": native, "triton": {"usable": False, "why": "no CUDA device"}}
    monkeypatch.setattr(kernels, "report", lambda: report)
    facts = json.loads(json.dumps(info.gather()))
    assert facts["kernels"] == report
    lines = info.describe(facts).splitlines()
    start = lines.index("kernels")
    assert lines[start + 1 : start + 4] == [
        "  setting      auto",
        f"  native       {line}",
        "  triton       not used: no CUDA device",
    ]


def test_an_embedding_set_is_found_in_the_folder_itself_and_once(embeddings):
    assert [about["name"] for about in info.gather(cache=embeddings, folder=embeddings)["embeddings"]] == ["Flowers"]


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", '{"classes": 3}'])
def test_broken_or_foreign_files_are_no_embedding_sets(tmp_path, content):
    (tmp_path / "dataset.json").write_text(content)
    assert [about["classes"] for about in info.embedding_sets(tmp_path)] == ([None] if "classes" in content else [])


def test_folders_that_do_not_exist_hold_nothing(tmp_path):
    found = info.gather(cache=tmp_path / "no", folder=tmp_path / "nowhere")
    assert found["cache"]["contents"] == found["embeddings"] == []


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("ANYK_CACHE")
    assert cache_folder().name == "anyk"


def test_extras_say_what_is_missing_and_what_to_do(monkeypatch):
    wanted = [
        "torch>=2",
        'torch>=2; extra == "lab"',
        'no-such-thing>=3; extra == "embed"',
        'torch>=999; extra == "tensorboard"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    found = info.extras()
    assert found["lab"] == {"installed": True, "missing": [], "command": 'pip install "anyk[lab]"'}
    assert found["embed"]["missing"] == ["no-such-thing>=3"]
    assert found["tensorboard"]["missing"] == ["torch>=999"]
    assert not found["embed"]["installed"]


def test_extras_of_a_checkout_that_was_never_installed(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert info.extras()["lab"]["installed"] is None


def test_environment_of_a_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anyk", "train", "--seed", "1"])
    found = json.loads(json.dumps(info.environment()))
    assert found["command"] == ["anyk", "train", "--seed", "1"]
    assert found["threads"] == torch.get_num_threads()
    assert found["folder"] == os.getcwd()
    assert found["versions"] == info.versions()


def test_a_system_that_says_little(monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError("no such file")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert info.memory()["available"] is None
    assert info.machine()["processor"]
