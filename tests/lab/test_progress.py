"""What a person sees while runs are at work: what each run is, not how its folder is called."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from anyk.lab import progress
from anyk.lab.run.config import Config
from anyk.lab.run.training import Progress

LINE = {"learning_rate": 0.0005, "validation": {"top1": 0.612, "top5": 0.83, "top10": 0.9, "mean": 0.721}}


@pytest.fixture
def screen(monkeypatch):
    """What stands on a terminal of so many columns at the end."""

    def make(width: int) -> io.StringIO:
        out = io.StringIO()
        monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out, width=width))  # no terminal: the end alone
        return out

    return make


def write(folder: Path, config: Config) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder


def test_runs_are_named_by_method_hyperparameters_seed_and_metrics(screen, tmp_path):
    out = screen(160)
    first = write(
        tmp_path / "softmax-seed0-1a2b3c", Config(loss="softmax", learning_rate=0.016, label_smoothing=0.1, select="top10")
    )
    second = write(tmp_path / "splitter-seed1-4d5e6f", Config(loss="splitter", temperature=0.5, m=8, seed=1, select="top10"))
    with progress.Display(7) as display:
        for folder in (first, second):
            display.show(folder, Progress(40, 400, LINE))
        display.show(first, Progress(41, 400))
        display.show(tmp_path / "unreadable", Progress(1, 9))
    shown = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "all runs" in shown[0]
    assert "0/7" in shown[0]
    assert shown[1] == (
        "softmax learning rate 0.016 label smoothing 0.1 seed 0 top-10 90.0 % top-1 61.2 % top-5 83.0 % 41/400 steps"
    )
    # The rate that follows from the data is the current one.
    assert shown[2] == (
        "splitter learning rate 0.0005 temperature 0.5 seed 1 top-10 90.0 % top-1 61.2 % top-5 83.0 % 40/400 steps"
    )
    assert shown[3] == "unreadable 1/9 steps"
    assert out.getvalue().endswith("\n")  # what follows begins on a line of its own


def test_ended_runs_leave_and_are_counted(screen, tmp_path):
    out = screen(100)
    with progress.Display(2) as display:
        display.show(write(tmp_path / "a", Config(data="$[red]")), Progress(5, 5, LINE))
        display.show(write(tmp_path / "b", Config(data="b")), Progress(1, 5))
    assert "1/2" in out.getvalue()
    assert out.getvalue().count("steps") == 1
    quiet = screen(100)
    with progress.watched(3, quiet=True) as display:
        display.show(tmp_path / "a", Progress(1, 5))
    assert quiet.getvalue() == ""


def test_trainings_are_counted_as_they_are_told(screen, tmp_path):
    out = screen(100)
    with progress.Display(40.4, unit="trainings") as display:
        display.count(0.25, 40.4)
        display.show(tmp_path / "a", Progress(9, 9))
        display.count(12.5, 44.0)
    line = " ".join(out.getvalue().splitlines()[0].split())
    assert "all trainings" in line
    assert "12/44" in line
