"""Plots: bars, or lines over one number; the same table gives the same file."""

import pytest

import made
from anyk.lab import plots
from anyk.lab.errors import LabError
from anyk.lab.run.recipe import Recipe
from anyk.lab.run.summaries import collect, table

BASE = Recipe(data="some_data")


def test_plots(tmp_path):
    for loss in ("softmax", "splitter"):
        made.run_folder(tmp_path / loss, BASE.but(loss=loss), {"top1": 0.5, "top5": 0.9})
    found = table(collect([tmp_path]))
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        file = tmp_path / "plots" / f"bars.{suffix}"
        plots.plot(found, file)
        first = file.read_bytes()
        assert first.startswith(start)
        plots.plot(found, file)
        assert file.read_bytes() == first
    with pytest.raises(LabError, match=r"bars\.gif"):
        plots.plot(found, tmp_path / "bars.gif")


def test_a_line_over_one_number(tmp_path, monkeypatch):
    drawn = []
    for name in ("_bars", "_lines"):
        draw = getattr(plots, name)
        monkeypatch.setattr(plots, name, lambda *given, name=name, draw=draw: drawn.append(name) or draw(*given))
    for number, temperature in enumerate((0.1, 1.0, 10.0)):
        made.run_folder(tmp_path / str(number), BASE.but(temperature=temperature), {"top1": 0.5})
    plots.plot(table(collect([tmp_path])), tmp_path / "plot.svg")
    made.run_folder(tmp_path / "other", BASE.but(loss="lapsum"), {"top1": 0.5})
    plots.plot(table(collect([tmp_path])), tmp_path / "plot.svg")
    assert drawn == ["_lines", "_bars"]
