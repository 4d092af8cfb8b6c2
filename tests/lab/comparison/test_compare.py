"""`anyk.lab.compare`: what it takes, and what it gives back."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import anyk.lab
import lab_data
import made
from anyk.lab import cli
from anyk.lab.cli import parsing
from anyk.lab.comparison.config import ComparisonConfig
from anyk.lab.errors import LabError
from anyk.lab.run import models

QUICK = {"losses": ["lapsum"], "seeds": 1, "budget": 1, "epochs": 1, "batch_size": 32, "m": 8, "jobs": 2, "quiet": True}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(*methods, **changes):
    return anyk.lab.Report(**vars(made.comparison(*methods, **changes)), folder="out")


def test_it_takes_arrays_and_returns_what_the_files_say(here):
    inputs, labels = (tensor.numpy() for tensor in lab_data.examples(12, 20, 16, seed=0))
    outcome = anyk.lab.compare((inputs, labels), ks=3, **QUICK)
    assert isinstance(outcome, anyk.lab.Report)
    assert outcome.ks == (3,)
    assert [method.name for method in outcome.methods] == ["softmax", "lapsum"]
    assert Path(outcome.folder).parent == Path("anyk-runs")
    assert json.loads((Path(outcome.folder) / "results.json").read_text()) == outcome.to_json()
    assert not outcome.decided
    assert outcome.command.startswith("anyk.lab.compare('")
    folders = sorted(os.listdir(Path(outcome.folder) / "runs"))
    again = eval(outcome.command.replace(")", ", jobs=2, quiet=True)"), {"anyk": anyk})  # what to type to get the same again
    assert again.methods == outcome.methods
    assert again.reused == len(folders)
    assert sorted(os.listdir(Path(outcome.folder) / "runs")) == folders


def test_it_takes_datasets_and_functions_that_make_models(here, monkeypatch):
    name = "my_makers"
    (here / f"{name}.py").write_text(
        "from torch import nn\ndef make(shape, classes):\n    return nn.Sequential(nn.Linear(shape[0], classes))\n"
    )
    monkeypatch.syspath_prepend(str(here))
    my_makers = importlib.import_module(name)
    examples = TensorDataset(*lab_data.examples(12, 20, 16, seed=0))
    outcome = anyk.lab.compare(examples, my_makers.make, out="out", **QUICK)
    assert {method.config.model for method in outcome.methods} == {"my_makers:make"}
    assert all(len(method.runs) == 1 for method in outcome.methods)
    assert outcome.folder == "out"
    with pytest.raises(LabError, match="move it into a file"):
        anyk.lab.compare(examples, lambda shape, classes: torch.nn.Linear(shape[0], classes), **QUICK)


def test_it_takes_a_frame_of_pandas(here):
    pandas = pytest.importorskip("pandas")
    inputs, labels = lab_data.examples(12, 20, 4, seed=0)
    frame = pandas.DataFrame(inputs.numpy(), columns=list("wxyz"))
    frame.insert(0, "kind", [f"kind {label}" for label in labels.tolist()])
    frame.insert(1, "id", range(len(frame)))
    outcome = anyk.lab.compare(frame, label_column="kind", drop=["w"], out="out", **QUICK)
    table = models.load("out").plan.table
    assert (table.features, table.label, table.others) == (["x", "y", "z"], "kind", ("w", "id"))
    again = eval(outcome.command.replace(")", ", out='out', quiet=True)"), {"anyk": anyk})  # what to type to get the same again
    assert again.methods == outcome.methods
    with pytest.raises(LabError, match="data has no column 'sort'"):
        anyk.lab.compare(frame, label_column="sort", out="other", **QUICK)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epoch": 3}, "unknown field 'epoch'"),
        ({"time": "soon"}, "such as 90s, 10m or 2h"),
        ({"ks": [12]}, "--ks 12 needs more than 12 classes"),
    ],
)
def test_what_a_user_can_mend_is_said_before_any_run(here, given, message):
    data = str(lab_data.write_embedding_set(here / "points"))
    with pytest.raises(LabError, match=message):
        anyk.lab.compare(data, **{**QUICK, **given})
    assert not (here / "anyk-runs").exists()


@pytest.mark.full
def test_a_script_needs_no_guard(here):
    """The processes of the runs do not import the script that started them, which would start it again in each."""
    lab_data.write_embedding_set(here / "points")
    (here / "script.py").write_text(
        f"print('begin')\nimport anyk.lab\nprint(anyk.lab.compare('points', out='out', **{QUICK!r}).verdict[0])\n"
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begin") == 1
    assert "Not decided: --budget 1 ended the tuning" in done.stdout
    assert done.stderr == ""


def test_what_it_shows():
    better = dataclasses.replace(made.method("splitter", made.shifted(top1=0.01)), hyperparameter="temperature")
    outcome = shown(made.SOFTMAX, better, controls=(dataclasses.replace(made.SOFTMAX, name="control"),))
    assert outcome.verdict[0] in str(outcome)
    assert outcome.table() in str(outcome)
    assert outcome.table("csv").count("\n") > 3
    assert "splitter was tuned to learning rate 0.001, temperature 0.5." in str(outcome)
    assert outcome.chosen == "softmax"
    assert "CrossEntropyLoss" in outcome.code
    page = outcome._repr_html_()
    assert page.startswith("<iframe ")
    assert "<html" not in page  # escaped: the notebook's own page stays whole
    assert "&lt;html" in page


def test_a_frame_has_a_row_for_each_method_and_metric():
    pandas = pytest.importorskip("pandas")
    frame = shown(made.SOFTMAX, made.method("splitter", made.shifted(top1=0.01))).to_frame()
    assert list(frame.columns) == ["method", "metric", "mean", "std", "seeds", "difference", "low", "high", "p"]
    assert len(frame) == 6
    row = frame[(frame.method == "splitter") & (frame.metric == "top1")].iloc[0]
    assert row["difference"] == pytest.approx(0.01, abs=1e-3)
    assert row["mean"] == pytest.approx(np.mean([run.test["top1"] for run in made.SOFTMAX.runs]) + 0.01, abs=1e-3)
    assert pandas.isna(frame[frame.method == "softmax"].difference).all()
    more = shown(*made.with_others(made.comparison(made.SOFTMAX, made.method("splitter", made.shifted(top1=0.01)))).methods)
    row = more.to_frame().set_index(["method", "metric"]).loc["splitter", "mrr"]
    assert row["difference"] == pytest.approx(0.01, abs=1e-3)
    assert pandas.isna(row["p"])
    assert "MRR" not in more.table()


def test_a_field_of_the_config_is_an_option_of_the_command():
    options = parsing.arguments(cli.COMMANDS["compare"])
    assert {field.name.replace("_", "-") for field in dataclasses.fields(ComparisonConfig)} <= set(options)
