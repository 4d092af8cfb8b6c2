"""The search on the grid, and the whole comparison."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import lab_data
from anyk.lab.comparison import results
from anyk.lab.comparison.outcome import best, metrics
from anyk.lab.comparison.search import _measured, at, best_point, compare, next_points
from anyk.lab.comparison.verdict import verdict
from anyk.lab.errors import LabError
from anyk.lab.run.recipe import Recipe, Setting


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points"))


def setting(data: str, **changes: Any) -> Setting:
    return Setting(data=data, epochs=3, batch_size=32, learning_rate=1e-2, m=8).but(**changes)


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("optimum", [(0, 0), (3, -2), (-2, 3)])
def test_the_search_finds_the_top_of_a_hill(dimensions: int, optimum: tuple[int, int]) -> None:
    scores: dict[tuple[int, ...], float | None] = {}
    for _ in range(15):
        for point in next_points(scores, dimensions)[:2]:
            distance = sum(abs(a - b) for a, b in zip(point, optimum[:dimensions], strict=True))
            scores[point] = 1 / (1 + distance)
    assert best_point(scores) == optimum[:dimensions]
    assert len(scores) == 30  # nothing is tried twice


def test_failed_tries_are_worse_than_any_score() -> None:
    assert best_point({(0,): None, (1,): 0.0, (2,): None}) == (1,)
    assert next_points({(0,): None}, 1)[0] == (1,)


def test_points_are_factors_of_two() -> None:
    start = Recipe(learning_rate=1e-3, temperature=2.0)
    assert at(start, (2, -1)) == start.but(learning_rate=4e-3, temperature=1.0)
    assert at(start, (-1,)) == start.but(learning_rate=5e-4)


def test_a_comparison_from_end_to_end(data: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = compare(setting(data), ["lapsum"], out, seeds=2, budget=3, jobs=2, command="anyk compare points")
    assert [method.name for method in done.methods] == ["softmax", "lapsum"]
    assert results.read(out / "results.json") == done
    for method in done.methods:
        assert len(method.tries) == 3  # equal budgets
        assert [run.seed for run in method.runs] == [1, 2]  # not the seed that was tuned on
        highest = max(made.score or 0 for made in method.tries)
        chosen = (method.recipe.learning_rate, method.recipe.temperature)
        assert any((made.learning_rate, made.temperature, made.score) == (*chosen, highest) for made in method.tries)
        for run in method.runs:
            assert run.test == json.loads((out / run.folder / "result.json").read_text())["test"]
    assert {made.temperature for made in done.methods[0].tries} == {1.0}  # softmax has none
    assert len({made.temperature for made in done.methods[1].tries}) > 1
    best_method = best(done)
    weights = load_file(out / "model.safetensors")
    assert any(
        all((weights[name] == tensor).all() for name, tensor in load_file(out / run.folder / "model.safetensors").items())
        for run in best_method.runs
    )
    assert "<html" in (out / "report.html").read_text()

    written = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*") if path.name != ".lock"}
    again = compare(setting(data), ["lapsum"], out, seeds=2, budget=3, jobs=2, command="anyk compare points")
    assert results.to_json(again)["methods"] == results.to_json(done)["methods"]
    assert written == {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*") if path.name != ".lock"}  # no run again
    more = compare(setting(data), ["lapsum"], out, seeds=3, budget=3, jobs=2)
    assert [run.test for run in more.methods[0].runs[:2]] == [run.test for run in done.methods[0].runs]


def test_moved_examples_are_counted(data: str, tmp_path: Path) -> None:
    """Against counts made by hand from the models that the comparison left."""
    from anyk.lab.run.evaluation import Predictor

    done = compare(setting(data, learning_rate=1e-3), ["ksubset"], tmp_path, seeds=1, budget=1, jobs=2)
    predictors = [Predictor(tmp_path / method.runs[0].folder) for method in done.methods]
    target = predictors[0].parts.test.labels
    before, after = ((predictor.test_guesses(5)[0] == target[:, None]).any(1) for predictor in predictors)
    assert done.moves is not None
    assert (done.moves.into, done.moves.out_of) == (int((after & ~before).sum()), int((before & ~after).sum()))
    for example in done.moves.examples:
        names = [[guess.name for guess in guesses] for guesses in (example.before, example.after)]
        assert (example.target in names[1]) == (example.moved == "in")
        assert (example.target in names[0]) == (example.moved == "out")


@pytest.mark.parametrize(
    ("changes", "keywords", "message"),
    [
        ({}, {"seeds": 0}, "seeds should be at least 1"),
        ({}, {"budget": 0}, "budget should be at least 1"),
        ({"m": 3}, {}, "only m = 3 are ranked"),
        ({"data": "few", "select": "top10"}, {}, "--select top10 needs more than 10 classes"),
    ],
    ids=str,
)
def test_bad_comparisons_end_before_anything_is_trained(
    changes: dict[str, Any], keywords: dict[str, int], message: str, data: str, tmp_path: Path
) -> None:
    if changes.get("data") == "few":
        changes = {**changes, "data": str(lab_data.write_embedding_set(tmp_path / "few", classes=6))}
    with pytest.raises(LabError, match=message):
        compare(
            setting(data).but(**changes), ["splitter"], tmp_path / "out", **{"seeds": 1, "budget": 1, "jobs": 1, **keywords}
        )
    assert not (tmp_path / "out").exists()


def test_a_loss_that_always_fails_is_reported_and_the_others_finish(data: str, tmp_path: Path) -> None:
    failing = setting(data, optimizer="sgd", learning_rate=1e30, weight_decay=1.0)
    done = compare(failing, ["lapsum"], tmp_path, seeds=1, budget=1, jobs=2)
    assert all(not method.runs for method in done.methods)
    assert len(done.failures) == 2
    assert "lower the learning rate" in " ".join(verdict(done))


def test_every_method_measures_what_one_of_them_trains_for(data: str, tmp_path: Path) -> None:
    given = setting(data, p_k=(0.5, 0.0, 0.5), epochs=1, measure=(7,))
    done = compare(given, ["lapsum"], tmp_path / "out", seeds=1, budget=1, jobs=2)
    assert all({"top1", "top3", "top5", "top7", "top10"} <= run.test.keys() for method in done.methods for run in method.runs)
    assert metrics(done) == ["top1", "top3", "top5", "top7", "top10"]
    assert metrics(results.read(tmp_path / "out" / "results.json")) == metrics(done)


def test_the_usual_k_are_measured_anyway(data: str) -> None:
    assert _measured(setting(data), ["softmax", "lapsum"], 12) == ()


def test_a_comparison_leaves_a_folder_of_other_files_alone(data: str, tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").touch()
    with pytest.raises(LabError, match=r"holds files that are not of a run \(cat.jpg\): choose another folder with --out"):
        compare(setting(data), ["lapsum"], tmp_path, seeds=1, budget=1, jobs=1)
    assert os.listdir(tmp_path) == ["cat.jpg"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_command_goes_on_after_it_was_killed(how: signal.Signals, data: str, tmp_path: Path) -> None:
    """Kill the parent alone; its workers must leave the run folders so that the same command can go on."""
    words = ["--losses", "lapsum", "--seeds", "1", "--budget", "1", "--jobs", "2", "--epochs", "120", "--quiet"]
    command = [sys.executable, "-m", "anyk", "compare", data, *words, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/runs/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130, errors
        assert errors.startswith("Stopped. To go on: anyk compare")
    finished = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    results = json.loads(finished.stdout)
    assert [len(method["runs"]) for method in results["methods"]] == [1, 1]
