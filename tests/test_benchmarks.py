"""The benchmarks run: small, for their code, not for their figures."""

import pathlib
import re
import subprocess
import sys

import pytest

from anyk.kernels import native

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_torture_finds_nothing():
    result = run("torture.py", "--quick")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_fuzzing_finds_nothing():
    result = run("fuzz.py", "--cases", 150)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_speed_measures(tmp_path):
    result = run("speed.py", "--quick", "--out", tmp_path / "results.md")
    assert result.returncode == 0, result.stderr[-3000:]
    told = (tmp_path / "results.md").read_text()
    assert "nan" not in told
    assert len(re.findall("^## ", told, re.MULTILINE)) == 12
    table = re.search(r"^\| batch, n, m \| operator .*$", told, re.MULTILINE)[0]
    assert "plain default" in table
    assert ("native default" in table) == (not native.status())


def test_the_pages_quote_the_results():
    result = run("quote.py", "--check")
    assert result.returncode == 0, f"run `python benchmarks/quote.py`: {result.stdout}{result.stderr[-3000:]}"


def test_verdicts_are_simulated(tmp_path):
    result = run("verdict_error_rates.py", "--comparisons", 4, "--out", tmp_path / "verdict_error_rates.md")
    assert result.returncode == 0, result.stderr[-3000:]
    told, kept = ((folder / "verdict_error_rates.md").read_text() for folder in (tmp_path, BENCHMARKS))
    assert "nan" not in told
    heads = [[line for line in text.splitlines() if line.startswith(("#", "| the", "| runs"))] for text in (told, kept)]
    assert heads[0] == heads[1]  # what is committed is of this code
    rates = [float(rate) for row in re.findall(r"^\| (?:itself|as good|in groups) .*", kept, re.MULTILINE)
             for cell in row.split("|")[3:] for rate in cell.split("/") if rate.strip()]  # fmt: skip
    assert len(rates) == 78
    assert max(rates) <= 5 + 2 * 0.7


@pytest.mark.full
def test_head_measures(tmp_path):
    result = run("head.py", "--quick", "--out", tmp_path / "head.md")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "SparseAdam" in (tmp_path / "head.md").read_text()


@pytest.mark.parametrize("operator", ["splitter/logistic", "LapSum"])
def test_long_run_ends_finite(operator):
    result = run("long_run.py", "--steps", "50", "--only", operator)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("words", [("kills", "--number", 2), ("soak", "--minutes", 0.5)])
def test_endurance_measures(words, tmp_path):
    result = run("endurance.py", *words, "--out", tmp_path / "endurance.md")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert f"## {words[0]}" in (tmp_path / "endurance.md").read_text()


@pytest.mark.full
@pytest.mark.parametrize("words", [("memory", "--gigabytes", 0.1), ("plan", "--examples", 50_000)])
def test_streaming_measures(words, tmp_path):
    result = run("streaming.py", *words, "--out", tmp_path / "streaming.md")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "first start" in (tmp_path / "streaming.md").read_text()


def test_the_costs_that_the_guide_tells(monkeypatch):
    """docs/scale.md, "On paper": its figures are those of the formulae."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import costs

    page = (BENCHMARKS.parent / "docs" / "scale.md").read_text()
    told = page[page.index("## On paper") :]

    def tells(words, value, figure):
        assert words in told, words
        assert value == pytest.approx(figure, rel=0.1)

    million = 10**6
    tells("move 8 n d bytes for each step, 8 GB at n = 1e6", costs.Job(million, replicas=1024).averaged, 8e9)
    tells("18 MB over 8 GPUs", costs.sharded(million, 8, 1).bytes_moved, 18e6)
    tells("Over 1024 GPUs they are 56 GB a step", costs.sharded(million, 1024, 1).gathered, 56e9)
    tells("32 replicas x 32 shards moves 0.4 GB", costs.sharded(million, 32, 32).bytes_moved, 0.4e9)
    assert costs.best_group(million, 1024) == 32
    tells("8 GPUs take 0.13 s", costs.sharded(10 * million, 8, 1).seconds(costs.GPU), 0.13)
    tells("80 GB hold n = 4 million", costs.Job(4 * million, chunked=False).memory, 74e9)
    single, candidates = costs.Job(million, chunked=False), costs.Job(million, softmax=False)
    tells("6 times quicker at n = 1e6", single.seconds(costs.GPU) / candidates.seconds(costs.GPU), 6.5)
    hundred_million = costs.as_fits(costs.sharded(100 * million, 64, 1))
    tells("fits on 64 GPUs with 64 rows each", hundred_million.rows, 64)
    assert hundred_million.memory < costs.GPU_MEMORY
    group = 2 * 1024 / 52
    tells("g = 2 d / (m+2), 40 here", group, 40)
    job = costs.Job(million, shards=40)
    assert job.gathered == pytest.approx(job.features, rel=0.1)
