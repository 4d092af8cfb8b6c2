"""The triton kernels without a GPU: run by triton's interpreter, and compiled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyk.conventions import Conventions
from anyk.kernels import triton as kernel
from anyk.losses import CrossEntropySpec

INTERPRETED = Path(__file__).parent / "triton_interpreted.py"
BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
MISSING = importlib.util.find_spec("triton") is None

needs_triton = pytest.mark.skipif(MISSING, reason="triton is not installed")


def test_status(monkeypatch):
    if not MISSING and not torch.cuda.is_available():
        assert kernel.status() == "no CUDA device"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel.status.__wrapped__() == "triton is not installed"


def test_without_a_device_it_does_not_serve():
    scores, target = torch.randn(6, 12), torch.randint(12, (6,))
    spec = CrossEntropySpec.of([0.5, 0.5], "splitter", None, "separate", "all")
    p_k, k, m = spec.fit(scores, 12, scores.shape[:1], None)
    description = spec.describe(12, k, m)
    assert kernel.loss(description, scores, target, p_k, Conventions(), lambda scores: scores.sum()) is None


def test_triton_is_not_imported():
    command = "import sys, anyk, anyk.kernels.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


@needs_triton
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(INTERPRETED)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@needs_triton
def test_they_compile_without_a_gpu(tmp_path):
    """Some here; benchmarks/triton.md has all."""
    script, out = BENCHMARKS / "triton_compile.py", tmp_path / "triton.md"
    command = [sys.executable, str(script), "--quick", "--out", str(out)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "8.0" in out.read_text()
    assert "9.0" in out.read_text()
