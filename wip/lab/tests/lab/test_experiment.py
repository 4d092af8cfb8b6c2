import json

import numpy as np
import pytest

from anyk import lab
from anyk.lab import experiment, references
from anyk.lab.config import ComparisonConfig, DataFields
from anyk.lab.data.prepare import prepare
from anyk.lab.errors import LabError, Stopped

from lab_data import blobs


def config(folder, **more):
    return ComparisonConfig(losses=("error",), effort="quick", epochs=4, jobs=2, out=str(folder), data="memory", **more)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """One comparison from end to end, and the sentences that it said."""
    folder, told = tmp_path_factory.mktemp("compared") / "out", []
    found = experiment.run(config(folder), blobs(each=50), tell=told.append, command="anyk compare secret/path")
    return folder, found, told


def test_a_comparison_from_end_to_end(compared):
    folder, found, told = compared
    assert found.decided and [method.name for method in found.losses] == ["softmax", "gce", "error"]
    assert all(len(method.runs) == 3 for method in found.losses)
    assert {path.name for path in folder.iterdir()} >= {"results.json", "report.html", "model.safetensors", "runs", "data"}
    assert any("about" in sentence and "trainings" in sentence for sentence in told)
    content = json.loads((folder / "results.json").read_text())
    assert content["look"] == 1 and "secret" not in (folder / "results.json").read_text() + (folder / "report.html").read_text()


def test_every_loss_is_tuned_with_as_many_trials_and_each_seed_by_itself(compared):
    _, found, _ = compared
    counts = {method.name: len(method.trials) for method in found.losses}
    assert len(set(counts.values())) == 1
    for method in found.losses:
        assert {trial.split for trial in method.trials} == {0, 1, 2, 3} and {run.seed for run in method.runs} == {1, 2, 3}


def test_references_and_controls(compared):
    _, found, _ = compared
    roles = {method.name: method.role for method in found.methods}
    assert roles["most frequent"] == roles["logistic regression"] == "reference"
    assert found.method("logistic regression").mean("top1") > found.method("most frequent").mean("top1")
    if found.picked is not found.baseline:
        assert any(method.of == found.picked.name for method in found.methods)


def test_the_same_again_makes_no_run_and_no_new_look(compared):
    folder, found, _ = compared
    times = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}
    again = experiment.run(config(folder), blobs(each=50))
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")} == times
    assert again.look == 1 and again.differences == found.differences


def test_more_seeds_are_another_look(compared):
    folder, _, _ = compared
    more = experiment.run(config(folder, seeds=4), blobs(each=50))
    assert more.look == 2 and more.level < 0.04 and len(json.loads((folder / "results.json").read_text())["looks"]) == 2


def test_group_labels_by_chance_come_out_at_chance(tmp_path):
    """300 groups of 10 rows whose label belongs to the group by chance: for new groups nothing can be known."""
    rng = np.random.default_rng(0)
    who = np.arange(300).repeat(10)
    rows = rng.normal(size=(300, 8))[who] + 0.01 * rng.normal(size=(3000, 8))
    data = {"X": rows, "y": rng.integers(0, 15, 300)[who], "groups": who}
    found = experiment.run(config(tmp_path / "out", model="mlp", seeds=3).replace(epochs=2), data)
    assert found.baseline.mean("top1") < 0.2 and "no group is in two parts" in found.data["how_split"]


def test_time_that_is_too_little_is_said_at_once(tmp_path):
    with pytest.raises(LabError, match="too little"):
        experiment.run(config(tmp_path / "out", time="3s"), blobs(each=50))


def test_time_is_shared_out_and_ends_in_a_comparison(tmp_path):
    now = iter(np.arange(0, 1e6, 0.001))
    found = experiment.run(config(tmp_path / "out", time=10_000), blobs(), clock=lambda: float(next(now)))
    assert found.decided and all(method.runs for method in found.losses)


def test_a_stop_leaves_what_is_finished(tmp_path):
    counted = []
    with pytest.raises(Stopped):
        experiment.run(
            config(tmp_path / "out"), blobs(), on_progress=lambda done, total: counted.append(done), should_stop=lambda: len(counted) > 3
        )
    done = len(list((tmp_path / "out").glob("runs/*/result.json")))
    assert done > 0 and not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"ks": (1, 9)}, "--ks 9"), ({"device": "nonsense"}, "device"), ({"model": "cnn"}, "takes images"), ({"swap": "odd"}, "swap")],
)
def test_mistakes_are_told_before_any_run(tmp_path, fields, says):
    losses = {"losses": ("splitter",)} if "swap" in fields else {}
    with pytest.raises(LabError, match=says):
        experiment.run(config(tmp_path / "out", **fields).replace(**losses), blobs())
    assert not (tmp_path / "out" / "runs").exists()


def test_the_function(tmp_path, capsys):
    report = lab.compare(blobs(each=20), losses="error", effort="quick", epochs=2, seeds=3, jobs=2, out=tmp_path / "out", quiet=True)
    assert report.chosen in ("softmax", "gce", "error") and "criterion = " in report.code and report.verdict[0] in str(report)
    frame = report.to_frame()
    assert {"method", "metric", "mean", "difference", "p_holm"} <= set(frame.columns) and (frame["method"] == "softmax").any()
    assert "<html" in report._repr_html_() and capsys.readouterr().out == ""
    with pytest.raises(LabError, match="did you mean epochs"):
        lab.compare(blobs(), epoch=3)


def test_logistic_regression_is_left_out_where_it_would_take_long(points, tmp_path, monkeypatch):
    data = prepare(points, DataFields(), tmp_path)
    assert len(references.logistic_regression(data, config(tmp_path, ks=(1,)), 3)) == 1
    monkeypatch.setattr(references, "MOST_ROWS", 10)
    assert references.logistic_regression(data, config(tmp_path, ks=(1,)), 3) == []
