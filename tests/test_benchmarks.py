"""The benchmarks run: small, for their code, not for their figures."""

import pathlib
import re
import subprocess
import sys

import pytest

from anyk.kernels import native

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def run(script, *arguments):
    """Run a benchmark to its end."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.parametrize(
    "words",
    [
        ("torture.py", "--quick"),
        ("quote.py", "--check"),  # a page that quotes something else than the results: run `python benchmarks/quote.py`
        pytest.param(("fuzz.py", "--cases", 150), marks=[
            pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")]),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_nothing_is_found(words):
    run(*words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((("endurance.py", "steps", "--steps", 50, "--only", name), name) for name in ("splitter/logistic", "LapSum")),
        pytest.param(("endurance.py", "kills", "--number", 2), "## kills", marks=pytest.mark.full),
        pytest.param(("endurance.py", "signals", "--cases", 2, "--only", "train"), "## signals", marks=pytest.mark.full),
        pytest.param(("endurance.py", "soak", "--minutes", 0.5), "## soak", marks=pytest.mark.full),
        pytest.param(("head.py", "--quick"), "SparseAdam", marks=pytest.mark.full),
        pytest.param(("streaming.py", "memory", "--gigabytes", 0.1), "first start", marks=pytest.mark.full),
        pytest.param(("streaming.py", "plan", "--examples", 50_000), "first start", marks=pytest.mark.full),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else "",
)
def test_a_page_is_written(words, told, tmp_path):
    run(*words, "--out", tmp_path / "page.md")
    assert told in (tmp_path / "page.md").read_text()


def test_speed_measures(tmp_path):
    run("speed.py", "--quick", "--out", tmp_path / "results.md")
    told = (tmp_path / "results.md").read_text()
    assert "nan" not in told
    assert len(re.findall("^## ", told, re.MULTILINE)) == 13
    table = re.search(r"^\| batch, n, m \| operator .*$", told, re.MULTILINE)[0]
    assert "plain default" in table
    assert ("native default" in table) == (not native.status())


def test_the_page_of_the_tools(tmp_path):
    run("tools.py", "--quick", "--out", tmp_path / "page.md")
    told = (tmp_path / "page.md").read_text()
    assert re.findall("^## (.*)", told, re.MULTILINE) == ["Time", "Two threads", "Memory", "Sums", "Launches"]
    launched = told.partition("## Launches")[2]
    assert len(re.findall(r"^\| (?:soft|sample).*\| 0 \| (?:1|–) \|$", launched, re.MULTILINE)) == 12  # no waits, one graph
    for row in ("splitter network", "q = 0.5", "budget_bisect", "subset operator", "perturbed", "straight-through"):
        assert row in told


def test_verdicts_are_simulated(tmp_path):
    run("verdict_error_rates.py", "--comparisons", 4, "--out", tmp_path / "page.md")
    assert "nan" not in (tmp_path / "page.md").read_text()
    kept = (BENCHMARKS / "verdict_error_rates.md").read_text()
    rates = [float(rate) for row in re.findall(r"^\| (?:itself|as good|in groups) .*", kept, re.MULTILINE)
             for cell in row.split("|")[3:] for rate in cell.split("/") if rate.strip()]  # fmt: skip
    assert len(rates) == 104
    assert max(rates) <= 5 + 2 * 0.7


def test_the_formulae_of_the_costs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import costs

    million = 10**6
    about = {
        8e9: costs.Job(million, replicas=1024).averaged,
        18e6: costs.sharded(million, 8, 1).bytes_moved,
        56e9: costs.sharded(million, 1024, 1).gathered,
        0.4e9: costs.sharded(million, 32, 32).bytes_moved,
        74e9: costs.Job(4 * million, chunked=False).memory,
        0.13: costs.sharded(10 * million, 8, 1).seconds(costs.GPU),
    }
    assert list(about.values()) == pytest.approx(list(about), rel=0.1)
    assert costs.best_group(million, 1024) == 32
    fitting = costs.as_fits(costs.sharded(100 * million, 64, 1))
    assert (fitting.rows, fitting.memory < costs.GPU_MEMORY) == (64, True)
