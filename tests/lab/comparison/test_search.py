"""The whole comparison, from the plan to the report."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import lab_data
from anyk.lab.comparison import results, search
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, Comparison, chosen, decided, metrics
from anyk.lab.comparison.search import _compared, _measured, _wanting, axes, compare, seconds_of, started, time_word
from anyk.lab.comparison.tuning import COARSE_POINTS, Axis
from anyk.lab.comparison.verdict import verdict
from anyk.lab.errors import Diverged, LabError
from anyk.lab.run import training
from anyk.lab.run.config import Config, Setting
from anyk.lab.run.loss_names import CANDIDATES, names


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points"))


def setting(data: str, **changes: Any) -> Setting:
    return Setting(data=data, epochs=4, batch_size=32, learning_rate=1e-2, m=8).replace(**changes)


@pytest.fixture(scope="module")
def finished(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path, list[str]]:
    """A comparison without caps, its folder, and what it said before the first run."""
    out, plan = tmp_path_factory.mktemp("compared") / "out", list[str]()
    done = compare(setting(data), ["lapsum"], out, seeds=3, jobs=2, command="anyk compare points", on_plan=plan.append)
    return done, out, plan


def test_a_comparison_from_end_to_end(finished: tuple[Comparison, Path, list[str]]) -> None:
    done, out, _ = finished
    assert [method.name for method in done.methods] == ["softmax", "lapsum"]
    assert [method.hyperparameter for method in done.methods] == ["label_smoothing", "temperature"]
    assert decided(done)
    assert results.read(out / "results.json") == done
    assert done.contrasts
    for method in done.methods:
        assert method.capped == ""
        assert [run.seed for run in method.runs] == [1, 2, 3]
        assert not {1, 2, 3} & set(search.TUNING_SEED_NUMBERS)
        full = [made for made in method.tries if made.epochs == 4]
        assert {made.epochs for made in method.tries} == {1, 4}  # short ones first
        value = getattr(method.config, method.hyperparameter or "")
        [taken] = [made for made in full if (made.learning_rate, made.hyperparameter) == (method.config.learning_rate, value)]
        best = max(
            (made for made in full if len(made.scores) == len(taken.scores)),
            key=lambda made: sum(made.scores) / len(made.scores),  # type: ignore[arg-type]
        )
        assert sum(best.scores) == pytest.approx(sum(taken.scores))  # type: ignore[arg-type]
        rates = sorted({made.learning_rate for made in full if made.hyperparameter == value})
        assert rates[0] < method.config.learning_rate < rates[-1]
        assert max(rates) / min(made.learning_rate for made in method.tries) >= 100
        for run in method.runs:
            assert run.test == json.loads((out / run.folder / "result.json").read_text())["test"]
        assert method.longer is not None
        assert method.same_length is not None
        assert method.same_length["mean"] == taken.scores[0]
    tuning = [json.loads(file.read_text()) for file in out.glob("runs/*/result.json")]
    assert {bool(run["test"]) for run in tuning if run["config"]["seed"] in search.TUNING_SEED_NUMBERS} == {False}
    assert len({sum(made.epochs == 4 for made in method.tries) for method in done.methods}) == 1  # as many tries
    weights = load_file(out / "model.safetensors")
    assert any(
        all((weights[name] == tensor).all() for name, tensor in load_file(out / run.folder / "model.safetensors").items())
        for run in chosen(done).runs
    )
    assert "<html" in (out / "report.html").read_text()


def test_twice_the_epochs_are_tried_once_for_each_method(finished: tuple[Comparison, Path, list[str]]) -> None:
    _, out, _ = finished
    configs = [json.loads(file.read_text()) for file in out.glob("runs/*/config.json")]
    longer = [config for config in configs if config["epochs"] == 8]
    assert sorted(config["loss"] for config in longer) == ["lapsum", "softmax"]
    assert {config["seed"] for config in longer} == {0}


def test_the_same_again_makes_no_run_and_other_numbers_of_seeds_and_jobs_go_on(
    finished: tuple[Comparison, Path, list[str]], data: str
) -> None:
    done, out, _ = finished

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*") if path.name != ".lock"}

    before = written()
    again = compare(setting(data), ["lapsum"], out, seeds=3, jobs=1, command="anyk compare points")
    assert results.to_json(again)["methods"] == results.to_json(done)["methods"]
    assert written() == before
    fewer = compare(setting(data), ["lapsum"], out, seeds=2, jobs=2)
    assert [run.test for run in fewer.methods[0].runs] == [run.test for run in done.methods[0].runs[:2]]
    assert not decided(fewer)
    capped = compare(setting(data), ["lapsum"], out, seeds=3, budget=4, jobs=2)
    assert [method.capped for method in capped.methods] == ["--budget 4"] * 2
    assert not decided(capped)
    assert {sum(made.epochs == 4 for made in method.tries) for method in capped.methods} == {4}


def test_a_comparison_on_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan, its estimate and its report."""
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    place, plan = lab_data.write_items(tmp_path / "items.txt"), list[str]()
    given = Setting(
        data=f"sequences:{place}", model="gru", context=4, hidden=8, embedding=8, epochs=2, batch_size=16, mask_seen=True,
        ks=(1, 3), m=8, learning_rate=0.05,
    )  # fmt: skip
    out = tmp_path / "out"
    done = compare(given, ["splitter"], out, seeds=2, budget=1, jobs=1, on_plan=plan.append)
    assert plan[0].endswith("60 for validation, 60 for the test; 30 classes; each from up to 4 tokens before it.")
    told = "Model gru, 2 epochs, batches of 4 windows of 4 tokens, of which each place trains, on cpu, 1 run at a time."
    assert told in plan
    assert results.read(out / "results.json") == done
    assert done.moves is not None
    assert {len(example.context) for example in done.moves.examples} <= {2, 3, 4}
    lines = [line.split() for line in place.read_text().splitlines()]
    for example in done.moves.examples:
        line, token = (int(number) for number in re.findall(r"\d+", example.source))
        assert token == len(lines[line - 1])
        assert example.target == lines[line - 1][-1]
        assert example.context == tuple(lines[line - 1][:-1][-4:])
        seen = set(lines[line - 1][:-1])
        assert not seen & {guess.name for guess in (*example.before, *example.after)}
    page = (out / "report.html").read_text()
    assert page.count('<ul class="context">') == len(done.moves.examples) > 0
    with pytest.raises(LabError, match=r"mask_seen leaves \d+ of the 30 classes of items .* P_K reaches to k = 25"):
        compare(given.replace(ks=(1, 25), m="auto"), ["error"], tmp_path / "other", jobs=1)


def test_the_plan_is_said_before_the_first_run(finished: tuple[Comparison, Path, list[str]]) -> None:
    _, _, plan = finished
    assert plan[0] == (
        "points: 216 examples to train with, 24 for validation, 240 for the test; 12 classes; 16 features, standardised."
    )
    assert plan[1] == "Model linear, 4 epochs, batches of 32, on cpu, 2 runs at a time."
    assert re.fullmatch(r"softmax, lapsum, each tuned on validation for the mean of top-1 and top-5: about \d+ runs.", plan[2])
    assert re.fullmatch(r"That will take about [\d.]+ (s|min), as the first steps show.", plan[3])
    assert len(plan) == 4


def test_a_method_that_wins_has_softmax_with_its_rate_as_a_control(
    finished: tuple[Comparison, Path, list[str]], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, out, _ = finished
    monkeypatch.setattr(search, "significant", lambda outcome, method, sign: method.name == "lapsum")
    again = compare(setting(data), ["lapsum"], out, seeds=3, jobs=2)
    rates = [method.config.learning_rate for method in done.methods]
    if rates[0] == rates[1]:
        assert again.controls == ()
        return
    [control] = again.controls
    assert control.name == f"{LEARNING_RATE_OF}lapsum"
    assert control.config == again.methods[0].config.replace(learning_rate=rates[1])
    assert [run.seed for run in control.runs] == [1, 2, 3]
    assert {(one.method, one.against) for one in again.contrasts} >= {(control.name, "softmax"), ("lapsum", control.name)}
    assert results.read(out / "results.json") == again


def test_moved_examples_are_counted(data: str, tmp_path: Path) -> None:
    """Against counts made by hand from the models that the comparison left."""
    from anyk.lab.run.evaluation import Predictor

    done = compare(setting(data, learning_rate=1e-3, epochs=1), ["ksubset"], tmp_path, seeds=1, budget=1, jobs=2)
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
        ({}, {"time": 0}, "time should be above 0 seconds"),
        ({}, {"losses": ["softmax"]}, "losses should name something to compare with softmax"),
        ({}, {"losses": []}, "losses should name something to compare with softmax"),
        ({}, {"losses": ["spliter"]}, "spliter"),
        ({"m": 3}, {}, "only m = 3 are ranked"),
        ({"select": "each"}, {}, "select each has several models"),
        ({"validation": 0.0}, {}, "no example of points is left for validation"),
        ({"ks": (1, 12)}, {}, "--ks 12 needs more than 12 classes, but points has 12"),
        ({"data": "few", "select": "top10"}, {}, "--select top10 needs more than 10 classes"),
        ({"data": "few", "select": "ndcg10"}, {}, "--select ndcg10 needs more than 10 classes"),
    ],
    ids=str,
)
def test_bad_comparisons_end_before_anything_is_trained(
    changes: dict[str, Any], keywords: dict[str, Any], message: str, data: str, tmp_path: Path
) -> None:
    if changes.get("data") == "few":
        changes = {**changes, "data": str(lab_data.write_embedding_set(tmp_path / "few", classes=6))}
    given = {"losses": ["splitter"], "seeds": 1, "budget": 1, "jobs": 1, **keywords}
    with pytest.raises(LabError, match=message):
        compare(setting(data).replace(**changes), out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_loss_that_always_fails_is_reported(data: str, tmp_path: Path) -> None:
    failing = setting(data, optimizer="sgd", learning_rate=1e30, weight_decay=1e30, epochs=1)
    done = compare(failing, ["lapsum"], tmp_path, seeds=1, budget=1, jobs=2)
    assert all(not method.runs for method in done.methods)
    assert len(done.failures) == 2  # one for each method, however many tries
    assert "lower the learning rate" in " ".join(verdict(done))


def test_a_rate_that_diverges_while_tuning_is_an_answer_and_no_failure(data: str, tmp_path: Path) -> None:
    given = setting(data, optimizer="sgd", learning_rate=100.0, weight_decay=100.0)
    done = compare(given, ["lapsum"], tmp_path, seeds=1, budget=8, jobs=2)
    assert any(None in made.scores for method in done.methods for made in method.tries)
    assert [len(method.runs) for method in done.methods] == [1, 1]
    assert done.failures == ()


def test_a_loss_that_refuses_scores_that_are_no_numbers_has_diverged(data: str, tmp_path: Path) -> None:
    given = setting(data, optimizer="sgd", learning_rate=10.0, weight_decay=10.0)
    with pytest.raises(Diverged, match=r"the scores are not finite at step \d+: lower the learning rate \(10\)"):
        training.train(Config(**vars(given), loss="lapsum"), tmp_path)


def test_every_method_measures_what_one_of_them_trains_for(data: str, tmp_path: Path) -> None:
    given = setting(data, p_k=(0.5, 0.0, 0.5), epochs=1, measure=(7,))
    done = compare(given, ["lapsum"], tmp_path / "out", seeds=1, budget=1, jobs=2)
    assert all({"top1", "top3", "top5", "top7", "top10"} <= run.test.keys() for method in done.methods for run in method.runs)
    assert done.ks == (1, 3)
    assert metrics(done) == ["top1", "top3", "top5", "top7", "top10"]
    assert metrics(results.read(tmp_path / "out" / "results.json")) == metrics(done)


def test_what_is_wanted_is_trained_for_tuned_for_and_judged(data: str, tmp_path: Path) -> None:
    done = compare(setting(data, ks=(3,), epochs=1), ["lapsum"], tmp_path, seeds=1, budget=1, jobs=2)
    assert done.ks == (3,)
    assert metrics(done)[0] == "top3"
    for method in done.methods:
        assert method.config.p_k == (0.0, 0.0, 1.0)
        assert all(run.validation["mean"] == run.validation["top3"] for run in method.runs)


@pytest.mark.parametrize(
    ("changes", "classes", "ks", "p_k"),
    [
        ({}, 12, (1, 5), (0.5, 0, 0, 0, 0.5)),
        ({}, 5, (1, 3), (0.5, 0, 0.5)),
        ({}, 3, (1, 2), (0.5, 0.5)),
        ({}, 2, (1,), (1.0,)),
        ({"ks": (3, 1, 3)}, 12, (3, 1), (0.5, 0, 0.5)),  # the order of the verdict
        ({"ks": (10,)}, 12, (10,), (0.0,) * 9 + (1.0,)),
        ({"ks": (1, 10), "p_k": (0.25, 0.75)}, 12, (1, 10), (0.25, 0.75)),
        ({"p_k": (0.0, 1.0)}, 12, (2,), (0.0, 1.0)),
        ({"p_k": (0.5, 0.0, 0.5), "p_k_end": (0.0, 0.5, 0.5)}, 12, (1, 2, 3), (0.5, 0.0, 0.5)),
    ],
)
def test_what_is_wanted_and_p_k_follow_from_each_other(changes, classes, ks, p_k) -> None:
    given = _wanting(Setting(**changes), classes)
    assert (given.ks, given.p_k) == (ks, p_k)


def test_the_usual_k_are_measured_anyway(data: str) -> None:
    assert _measured(setting(data), ["softmax", "lapsum"], 12) == ()


def test_softmax_is_always_there_and_gce_beside_error_losses() -> None:
    assert _compared(["splitter"]) == ["softmax", "splitter"]
    assert _compared(["error:lapsum", "splitter", "error:lapsum"]) == ["softmax", "gce", "error:lapsum", "splitter"]
    assert _compared(["error", "softmax", "gce"]) == ["softmax", "error", "gce"]


def test_sl_at_k_starts_where_it_learns(data: str, tmp_path: Path) -> None:
    """With 12 classes at a temperature of 8, two steps from where targets are pushed away at the start."""
    done = compare(setting(data, learning_rate=0.1), ["softmax_at_k"], tmp_path, seeds=1, budget=1, jobs=2)
    assert {made.hyperparameter for made in done.methods[1].tries} == {8.0}
    assert done.methods[1].runs[0].test["top5"] > 0.8
    assert started(Config(loss="softmax_at_k", temperature=64.0), 2000).temperature == 64
    assert started(Config(loss="softmax_at_k"), 2000).temperature == 16
    assert started(Config(loss="softmax_at_k"), 2).temperature == 2
    assert started(Config(loss="smooth"), 2000) == Config(loss="smooth")


def test_each_loss_tunes_its_learning_rate_and_one_hyperparameter_of_its_own() -> None:
    hyperparameters = {name: axes(Config(loss=name, learning_rate=1e-3)) for name in names() if name != "error:OPERATOR"}
    hyperparameters["error:lapsum"] = axes(Config(loss="error:lapsum", learning_rate=1e-3))
    found = {name: pair[1].name for name, pair in hyperparameters.items()}
    assert {name for name, hyperparameter in found.items() if hyperparameter == "label_smoothing"} == {
        "softmax",
        "hinge",
        "truncated",
    }
    assert {name for name, hyperparameter in found.items() if hyperparameter == "ce_weight"} == {"error", "error:lapsum"}
    assert {name for name, hyperparameter in found.items() if hyperparameter == "q"} == {"gce"}
    smoothed = {name: third.values for name, (_, _, *more) in hyperparameters.items() for third in more}
    assert smoothed == dict.fromkeys(("gce", "error", "error:lapsum"), (0.0, 0.1))  # as softmax may be, so may a ce_weight
    assert len(axes(Config(loss="error", learning_rate=1e-3, ce_weight=0.0))) == 2  # nothing to smooth
    for rate, hyperparameter, *_ in hyperparameters.values():
        assert isinstance(rate, Axis)
        assert (rate.name, rate.values[rate.start]) == ("learning_rate", 1e-3)
        assert hyperparameter.values[hyperparameter.start] == getattr(Config(), hyperparameter.name)
        if CANDIDATES[hyperparameter.name]:
            assert hyperparameter.values == CANDIDATES[hyperparameter.name]


def test_times_are_words() -> None:
    assert [seconds_of(word) for word in ("90s", "10m", "2h", "30", "1.5 min")] == [90, 600, 7200, 30, 90]
    assert [time_word(seconds) for seconds in (90, 600, 7200, 30.5)] == ["90s", "10m", "2h", "30.5s"]
    for word in ("", "soon", "-5m", "10d"):
        with pytest.raises(LabError, match="such as 90s, 10m or 2h"):
            seconds_of(word)


def told(content: dict[str, Any]) -> list[list[Any]]:
    """What a comparison found, without the times."""
    return [
        [method["config"], method["tries"], method["longer"], [(run["test"], run["folder"]) for run in method["runs"]]]
        for method in content["methods"]
    ]


SMALL: dict[str, Any] = {"seeds": 1, "budget": 5, "jobs": 2}


@pytest.fixture(scope="module")
def small(finished: tuple[Comparison, Path, list[str]], data: str) -> Comparison:
    """A smaller comparison that nothing disturbed."""
    return compare(setting(data), ["lapsum"], finished[1], **SMALL)


def test_when_the_time_is_over_the_runs_stop_and_the_same_call_goes_on(small: Comparison, data: str, tmp_path: Path) -> None:
    """By a clock that the runs' progress moves, so that the cap comes in the middle of the tuning."""
    seen = itertools.count()
    now = 0

    def tick(*_: object) -> None:
        nonlocal now
        now = next(seen)

    short = compare(setting(data), ["lapsum"], tmp_path, seeds=3, time=30, jobs=2, on_progress=tick, clock=lambda: float(now))
    assert {method.capped for method in short.methods} == {"--time 30s"}
    assert not decided(short)
    assert not short.failures
    assert verdict(short)[0].startswith("Not decided")
    again = compare(setting(data), ["lapsum"], tmp_path, **SMALL)
    assert told(results.to_json(again)) == told(results.to_json(small))


def test_a_comparison_leaves_a_folder_of_other_files_alone(data: str, tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").touch()
    with pytest.raises(LabError, match=r"holds files that are not of a run \(cat.jpg\): choose another folder with --out"):
        compare(setting(data), ["lapsum"], tmp_path, seeds=1, budget=1, jobs=1)
    assert os.listdir(tmp_path) == ["cat.jpg"]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_command_goes_on_after_it_was_killed_while_it_tuned(
    how: signal.Signals, small: Comparison, data: str, tmp_path: Path
) -> None:
    """Kill the parent alone; its workers must leave the run folders so that the same command comes to the same bits."""
    words = ["--losses", "lapsum", "--seeds", "1", "--budget", "5", "--jobs", "2", "--epochs", "4", "--batch-size", "32"]
    words += ["--m", "8", "--learning-rate", "0.01", "--quiet", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "anyk", "compare", data, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("out/runs/*/result.json"))) < 2 * COARSE_POINTS + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130, errors
        assert errors.startswith("Stopped. To go on: anyk compare")
    assert not (tmp_path / "out" / "results.json").exists()
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 3, again.stderr
    assert told(json.loads(again.stdout)) == told(results.to_json(small))


def test_the_runs_that_are_announced_know_the_cap_and_the_control() -> None:
    """Three losses, for gce comes with error: of one point each nothing is chosen, of two a few seeds more are run."""
    assert search.expected_runs(["softmax", "error"], 1, 1, shortens=False) == 3 * (1 + 1 + 1) + 1
    assert search.expected_runs(["error"], 2, 2, shortens=False) == 3 * (2 + 4 + 1 + 2) + 2
    assert search.expected_runs(["error"], 5, 1000) == search.expected_runs(["error"], 5) > search.expected_runs(["lapsum"], 5)
