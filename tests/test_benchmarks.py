"""The benchmarks run: small, for their code, not for their figures."""

import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_torture_finds_nothing():
    result = run("torture.py", "--quick")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_speed_measures(tmp_path):
    result = run("speed.py", "--quick", "--out", tmp_path / "results.md")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "cross-entropy" in (tmp_path / "results.md").read_text()


def test_head_measures(tmp_path):
    result = run("head.py", "--quick", "--out", tmp_path / "head.md")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "SparseAdam" in (tmp_path / "head.md").read_text()


@pytest.mark.parametrize("operator", ["splitter/logistic", "LapSum"])
def test_long_run_ends_finite(operator):
    result = run("long_run.py", "--steps", "50", "--only", operator)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
