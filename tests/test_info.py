"""What a bug report needs: it is JSON, it is true where that can be checked, and it never fails for want of something."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import anyk
from anyk import info, kernels


def test_gather_is_json_and_true():
    found = json.loads(json.dumps(info.gather()))
    assert found["versions"]["anyk"] == anyk.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["memory"] > 2**28
    for device in found["devices"]:
        assert torch.ones(1, device=device).sum() == 1


def test_it_fits_a_screen():
    lines = info.describe(info.gather()).splitlines()
    assert len(lines) <= 24
    assert any(line.startswith("torch ") and line.endswith(torch.__version__) for line in lines)


@pytest.mark.parametrize(
    ("native", "line"),
    [
        ({"usable": True, "why": "", "variant": "avx512"}, "used avx512"),
        ({"usable": True, "why": ""}, "used"),
        ({"usable": False, "why": "no compiler when anyk was installed"}, "not used: no compiler when anyk was installed"),
    ],
)
def test_kernels_are_shown_with_the_reason_when_one_is_not_used(monkeypatch, native, line):
    report = {"setting": "auto", "native": native, "triton": {"usable": False, "why": "no CUDA device"}}
    monkeypatch.setattr(kernels, "report", lambda: report)
    facts = info.gather()
    assert facts["kernels"] == report
    lines = [" ".join(line.split()) for line in info.describe(facts).splitlines()]
    assert {"backend auto", f"native {line}", "triton not used: no CUDA device"} <= set(lines)


def test_extras_say_what_is_missing_and_what_to_do(monkeypatch):
    wanted = [
        "torch>=2",
        'torch>=2; extra == "lab"',
        'anyk[lab]; extra == "embed"',
        'no-such-thing[more]>=3; extra == "embed"',
        'torch>=999; extra == "tensorboard"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    facts = info.gather()
    found = facts["extras"]
    assert (found["lab"], found["embed"], found["tensorboard"]) == ([], ["no-such-thing[more]>=3"], ["torch>=999"])
    assert 'missing no-such-thing[more]>=3: pip install "anyk[embed]"' in info.describe(facts)


def test_environment_of_a_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anyk", "train", "--seed", "1"])
    found = json.loads(json.dumps(info.environment()))
    assert found["command"] == ["anyk", "train", "--seed", "1"]
    assert found["folder"] == os.getcwd()
    assert found["versions"] == info.versions()


def test_a_system_that_says_little(monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError("no such file")

    facts = info.gather()
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "sysconf_names", {})
    machine = info.machine()
    assert machine["memory"] is None
    assert machine["processor"]
    assert "an unknown amount of memory" in info.describe({**facts, "machine": machine})
