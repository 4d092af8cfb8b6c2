"""The whole comparison, from the plan to the report."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lab_data
import made
from anyk.lab.comparison import results, search
from anyk.lab.comparison.config import ComparisonConfig
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, Comparison, Method
from anyk.lab.comparison.search import axes, expected_trainings, started
from anyk.lab.comparison.tuning import COARSE_POINTS, EFFORTS, Axis
from anyk.lab.comparison.verdict import table, verdict
from anyk.lab.engines.engine import Engine, Outcome
from anyk.lab.errors import Diverged, LabError
from anyk.lab.run import models, training
from anyk.lab.run.config import Config
from anyk.lab.run.loss_names import CANDIDATES, names
from anyk.lab.run.training import Progress


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points"))


def config(data, out: Path | str = "out", **changes: Any) -> ComparisonConfig:
    given: dict[str, Any] = {"epochs": 4, "batch_size": 32, "learning_rate": 1e-2, "m": 8, "losses": ("lapsum",), "jobs": 2}
    return ComparisonConfig(**{"data": data, "out": str(out), **given, **changes})


#: of one loss with one point: what a comparison does beside the tuning
SHORT: dict[str, Any] = {"seeds": 1, "budget": 1}


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A comparison without caps, its folder, and what it said before the first run."""
    out, plan = tmp_path_factory.mktemp("compared") / "out", list[str]()
    done = search.search(config(data, out, seeds=3), command="anyk compare points", on_plan=plan.append)
    return done, out, plan


def test_a_comparison_from_end_to_end(finished):
    done, out, _ = finished
    assert [method.name for method in done.methods] == ["softmax", "lapsum"]
    assert [method.hyperparameter for method in done.methods] == ["label_smoothing", "temperature"]
    assert done.decided
    assert json.loads((out / "results.json").read_text()) == results.to_json(done)
    assert done.contrasts
    for method in done.methods:
        assert method.capped == ""
        assert [run.seed for run in method.runs] == [1, 2, 3]
        assert not {1, 2, 3} & set(search.TUNING_SEED_NUMBERS)
        full = [tried for tried in method.tries if tried.epochs == 4]
        assert {tried.epochs for tried in method.tries} == {1, 4}  # short ones first
        assert len(full) == EFFORTS["normal"].points
        value = getattr(method.config, method.hyperparameter or "")
        [taken] = [
            tried for tried in full if (tried.learning_rate, tried.hyperparameter) == (method.config.learning_rate, value)
        ]
        best = max(
            (tried for tried in full if len(tried.scores) == len(taken.scores)),
            key=lambda tried: sum(tried.scores) / len(tried.scores),
        )
        assert best.scores[0] - 0.5 * math.sqrt(0.25 / 24) <= taken.scores[0] <= best.scores[0]  # of 24, within noise
        rates = sorted({tried.learning_rate for tried in method.tries})
        assert rates[0] <= method.config.learning_rate <= rates[-1]
        for run in method.runs:
            assert run.test == json.loads((out / run.folder / "result.json").read_text())["test"]
        assert method.tuned_in
        assert method.same_length is None or method.same_length["mean"] == taken.scores[0]
    tuning = [json.loads(file.read_text()) for file in out.glob("runs/*/result.json")]
    assert {bool(run["test"]) for run in tuning if run["config"]["seed"] in search.TUNING_SEED_NUMBERS} == {False}
    longer = {run["config"]["loss"] for run in tuning if run["config"]["epochs"] == 8}
    half = {run["config"]["loss"]: run["validation"]["mean"] for run in tuning if run["config"]["epochs"] == 2}
    for method in done.methods:  # twice the epochs are tried if the second half of them gained something
        assert (method.name in longer) == (method.longer is not None)
    assert half.keys() == {"softmax", "lapsum"}
    assert len({len(method.tries) for method in done.methods}) == 1  # as many tries
    for method, lists in zip(done.methods, done.coverages, strict=True):
        assert lists.method == method.name
        ranks = torch.stack([load_file(out / run.folder / "test.safetensors")["ranks"] for run in method.runs])
        for share, k in lists.guesses.items():
            means = [float((ranks <= guesses).double().mean()) for guesses in (k - 1, k)]
            assert means[0] < share / 100 <= means[1] + 1e-12
        assert dict(lists.curve)[1] == pytest.approx(method.measured("top1").mean)
    assert models.read(out)[0].calibration.chose == ("the epoch", "the hyperparameters", "the loss", "the seed")
    weights = load_file(out / "model.safetensors")
    assert any(
        all((weights[name] == tensor).all() for name, tensor in load_file(out / run.folder / "model.safetensors").items())
        for run in done.choice.runs
    )
    assert "<html" in (out / "report.html").read_text()


def test_the_same_again_makes_no_run_and_other_numbers_of_seeds_and_jobs_go_on(finished, data):
    done, out, _ = finished

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*") if path.name != ".lock"}

    before = written()
    again = search.search(config(data, out, seeds=3, jobs=1))
    assert results.to_json(again)["methods"] == results.to_json(done)["methods"]
    assert written() == before
    fewer = search.search(config(data, out, seeds=2))
    assert [run.test for run in fewer.methods[0].runs] == [run.test for run in done.methods[0].runs[:2]]
    assert not fewer.decided
    capped = search.search(config(data, out, seeds=3, budget=2))
    assert [method.capped for method in capped.methods] == ["--budget 2"] * 2
    assert not capped.decided
    assert {sum(tried.epochs == 4 for tried in method.tries) for method in capped.methods} == {2}


def test_what_another_comparison_has_written_is_not_lost(finished, data, tmp_path, caplog):
    out = tmp_path / "out"
    shutil.copytree(finished[1], out, ignore=shutil.ignore_patterns("earlier-*"))
    files = ("results.json", "report.html", "model.safetensors")

    def written(place: Path = out) -> list[bytes]:
        return [(place / name).read_bytes() for name in files]

    search.search(config(data, out, seeds=3), command="anyk compare points")
    before = written()
    caplog.clear()
    # One that has nothing to show for itself leaves all as it is.
    ticks = itertools.count()
    nothing = search.search(config(data, out, epochs=5, time=1), command="anyk compare hasty", clock=lambda: float(next(ticks)))
    assert not any(method.runs for method in nothing.methods)
    assert written() == before
    assert caplog.messages == [f"There is nothing to report yet, and {out} keeps the outcome of `anyk compare points`."]
    # The same goes on without a word; another puts it aside.
    search.search(config(data, out, seeds=3), command="anyk compare points")
    assert not list(out.glob("earlier-*"))
    assert len(caplog.messages) == 1
    before = written()
    search.search(config(data, out, epochs=1, **SHORT), command="anyk compare other")
    assert written(out / "earlier-1") == before
    assert caplog.messages[1:] == [f"{out} held the outcome of `anyk compare points`, which is now in {out / 'earlier-1'}."]
    assert json.loads((out / "results.json").read_text())["command"] == "anyk compare other"
    # So does the first with fewer seeds, which knows less.
    search.search(config(data, out, seeds=2), command="anyk compare points --seeds 2")
    search.search(config(data, out, seeds=1), command="anyk compare points --seeds 1")
    assert sorted(place.name for place in out.glob("earlier-*")) == ["earlier-1", "earlier-2", "earlier-3"]


def test_an_outcome_that_decides_nothing_puts_one_that_does_aside(finished, data, tmp_path):
    """Though it has as many runs."""
    out = tmp_path / "out"
    shutil.copytree(finished[1], out, ignore=shutil.ignore_patterns("earlier-*"))
    decided = search.search(config(data, out, seeds=3), command="anyk compare points")
    before = (out / "results.json").read_bytes()
    capped = search.search(config(data, out, seeds=3, budget=2), command="anyk compare points --budget 2")
    assert (decided.decided, capped.decided) == (True, False)
    assert [len(method.runs) for method in decided.methods] == [len(method.runs) for method in capped.methods]
    assert (out / "earlier-1" / "results.json").read_bytes() == before


def test_a_comparison_on_sequences(tmp_path, monkeypatch):
    """Its plan, its estimate and its report."""
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    place, plan = lab_data.write_items(tmp_path / "items.txt"), list[str]()
    out = tmp_path / "out"
    given = config(
        f"sequences:{place}", out, model="gru", context=4, hidden=8, embedding=8, epochs=2, batch_size=16, mask_seen=True,
        ks=(1, 3), learning_rate=0.05, losses=("splitter",), seeds=2, budget=1, jobs=1,
    )  # fmt: skip
    done = search.search(given, on_plan=plan.append)
    assert "30 classes; each from up to 4 tokens before it" in plan[0]
    assert "batches of 4 windows of 4 tokens" in " ".join(plan)
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
    assert page.count('<p class="context items">') == len(done.moves.examples) > 0
    with pytest.raises(LabError, match=r"mask_seen leaves \d+ of the 30 classes of items .* P_K reaches to k = 25"):
        search.search(given.replace(ks=(1, 25), m="auto", losses=("error",), out=str(tmp_path / "other")))


def test_the_plan_is_said_before_the_first_run(finished):
    data, model, losses, time = finished[2]
    for fact in ("216 examples", "24 for validation", "240 for the test", "12 classes", "16 features, standardised"):
        assert fact in data
    assert model == "Model linear, 4 epochs, batches of 32, on cpu, 2 runs at a time."
    assert re.match(r"softmax, lapsum, .* top-1 and top-5: about \d+ trainings \(--effort quick takes \d+, ", losses)
    assert re.search(r"about [\d.]+ (s|min)", time)


@pytest.mark.parametrize(("groups", "said"), [(2, True), (7, False)])
def test_that_no_test_can_find_anything_is_said_before_the_first_run(groups, said, tmp_path):
    """Of two tests, one for each k."""
    inputs, labels = lab_data.examples(4, 20, 5, seed=0)
    arrays = {"X_train": inputs, "y_train": labels, "X_test": inputs, "y_test": labels}
    arrays["groups_test"] = np.arange(80) % groups
    np.savez(tmp_path / "points.npz", **{name: np.asarray(array) for name, array in arrays.items()})

    class EnoughSeen(Exception):
        pass

    plan = []

    def tell(sentence):
        plan.append(sentence)
        if "about" in sentence:
            raise EnoughSeen

    with pytest.raises(EnoughSeen):
        search.search(config(str(tmp_path / "points.npz"), tmp_path / "out"), on_plan=tell)
    warnings = [sentence for sentence in plan if "test examples in 2 groups no difference will count" in sentence]
    assert len(warnings) == said
    assert not (tmp_path / "out" / "runs").exists()


def test_a_method_that_wins_has_softmax_with_its_rate_as_a_control(finished, data, monkeypatch):
    done, out, _ = finished

    def significant(self: Comparison, method: Method, sign: int) -> dict[str, Any]:
        return {"top1": self.differences["lapsum", "top1"]} if (method.name, sign) == ("lapsum", 1) else {}

    monkeypatch.setattr(Comparison, "significant", significant)
    rates = [method.config.learning_rate for method in done.methods]
    better = search.search(config(data, out, seeds=3))
    if rates[0] == rates[1]:
        assert better.controls == ()
        return
    monkeypatch.setattr(search, "with_better_baseline", lambda comparison: comparison)
    again = search.search(config(data, out, seeds=3))
    [control] = again.controls
    # On validation the better of the two is softmax.
    assert better.methods[0].runs == max(again.methods[0], control, key=again.validation_score).runs
    assert control.name == f"{LEARNING_RATE_OF}lapsum"
    assert control.config == again.methods[0].config.replace(learning_rate=rates[1])
    assert [run.seed for run in control.runs] == [1, 2, 3]
    assert {(one.method, one.against) for one in again.contrasts} >= {(control.name, "softmax"), ("lapsum", control.name)}


def test_more_seeds_are_trained_only_where_they_could_change_the_answer():
    """After three of five seeds: a loss that differs by luck stops; one that may differ goes on, with its controls."""
    softmax = dataclasses.replace(made.SOFTMAX, runs=made.SOFTMAX.runs[:3])
    same, better = (made.method(name, made.shifted(top5=gain)[:3]) for name, gain in (("splitter", 0.0), ("lapsum", 0.05)))
    error = dataclasses.replace(better, name="error", config=better.config.replace(loss="error"))
    gce = dataclasses.replace(same, name="gce", config=same.config.replace(loss="gce"))

    def stopped(*methods: Method) -> set[str]:
        return search.futile(made.measured(softmax, *methods))

    assert stopped(same) == {"softmax", "splitter"}
    assert stopped(same, better) == {"splitter"}
    assert stopped(gce, error) == set()  # the control of an error loss goes on with it
    assert stopped(gce, same) == {"softmax", "gce", "splitter"}
    # The leader on validation goes on with the others, so that it is not picked by the luck of three seeds.
    ahead = made.with_validation(same, 0.99)
    assert stopped(ahead, better) == set()
    # A seed that diverged says nothing.
    assert stopped(dataclasses.replace(same, runs=same.runs[:2])) == set()


def test_by_default_the_seeds_end_where_more_could_not_change_the_answer(data, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "futile", lambda comparison: {"lapsum"})
    done = search.search(config(data, tmp_path, effort="normal"))
    assert [len(method.runs) for method in done.methods] == [5, 3]
    assert [method.settled for method in done.methods] == [False, True]
    quick = search.search(config(data, tmp_path, effort="quick"))
    assert [len(method.runs) for method in quick.methods] == [3, 3]
    assert not any(method.settled for method in quick.methods)


class Ended(Engine):
    """Runs that end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[Path, Outcome]] = []

    def room(self, config: Any) -> int:
        return 1

    def _has_room(self) -> bool:
        return True

    def _wait(self) -> list[tuple[Path, Outcome]]:
        ended, self.ended = self.ended, []
        return ended

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("gain", [0.004, 0.006])
def test_twice_the_epochs_are_tried_only_if_the_second_half_of_them_gained_something(gain, data, tmp_path):
    study = search._Study(tmp_path, "abc", search._Limit(config(data), time.monotonic))
    tuned = config(data).run_config("softmax").replace(epochs=6)
    task, asked = study.check_length(made.method("softmax", made.shifted(), config=tuned)), []
    scores = {3: 0.5, 6: 0.5 + gain, 12: 0.51}

    class Made(Ended):
        def _start(self, folder: Path, config: Config) -> None:
            asked.append(config.epochs)
            self.ended.append((folder, Outcome({"validation": {"mean": scores[config.epochs]}})))

    [checked] = Made().run_tasks([task])
    assert set(asked) == ({3, 6} if gain < 0.005 else {3, 6, 12})
    assert checked.longer == (None if gain < 0.005 else {"mean": 0.51})
    assert checked.half == ({"mean": 0.5} if gain < 0.005 else None)


def test_a_check_of_the_length_for_which_there_was_no_time_leaves_nothing_decided(data, tmp_path):
    class Late(Ended):
        def _start(self, folder: Path, config: Config) -> None:
            self.ended.append((folder, Outcome()))

    study = search._Study(tmp_path, "abc", search._Limit(config(data, time="1s"), itertools.count().__next__))
    [checked] = Late().run_tasks([study.check_length(made.method("softmax", made.shifted(), config=Config(epochs=6)))])
    assert checked.capped == "--time 1s"


def test_a_run_counts_by_its_part_of_a_training_and_once(tmp_path):
    told: list[str] = []
    shown: list[tuple[float, float]] = []
    setting = config("points", epochs=8, effort="quick")
    cost = search._Cost(setting, 100, 1, 0.0, told.append, lambda done, total: shown.append((done, total)))
    cost.see(tmp_path / "a", Progress(10, 25))
    cost.see(tmp_path / "a", Progress(25, 25))
    cost.see(tmp_path / "a", Progress(1, 1))  # a run that has ended may say so once more
    assert cost.done == 0.25
    made.run_folder(tmp_path / "before", Config(epochs=4))
    cost.see(tmp_path / "before", Progress(1, 1))  # of an earlier call: half of the epochs
    assert cost.done == 0.75
    cost.expect(3)
    assert shown[-1] == (0.75, 3.75)
    assert cost.has(tmp_path / "a")


def test_where_there_are_too_few_epochs_a_short_run_has_a_part_of_the_examples():
    start = config("points").run_config("softmax")
    assert search.shortened(start.replace(epochs=9)) == start.replace(epochs=2)
    assert search.shortened(start.replace(epochs=3)) == start.replace(epochs=3, train_fraction=0.25)
    assert search.shortens(20)
    assert not search.shortens(19)


def test_moved_examples_are_counted(data, tmp_path):
    """Against counts made by hand from the models that the comparison left."""
    done = search.search(config(data, tmp_path, ks=(2,), epochs=1, losses=("ksubset",), **SHORT))
    runs = [made.trained(tmp_path / method.runs[0].folder) for method in done.methods]
    test, index = runs[0].parts.test, runs[0].parts.test_index
    scores = [run.model(run.reader(test, index)) for run in runs]
    before, after = ((each.topk(2).indices == test.labels[index, None]).any(1) for each in scores)
    assert (done.moves.into, done.moves.out_of) == (int((after & ~before).sum()), int((before & ~after).sum()))
    assert done.moves.examples
    for example in done.moves.examples:
        names = [[guess.name for guess in guesses] for guesses in (example.before, example.after)]
        assert (example.target in names[1]) == (example.moved == "in")
        assert (example.target in names[0]) == (example.moved == "out")
        row = int((index == int(example.source.removeprefix("row "))).nonzero())
        for guesses, each in zip((example.before, example.after), scores, strict=True):
            assert [guess.probability for guess in guesses] == pytest.approx(each.softmax(1)[row].topk(2).values.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds should be at least 1"),
        ({"jobs": -1}, "jobs should be between 0 and"),
        ({"time": 0}, "time should be above 0 seconds"),
        ({"losses": ("softmax",)}, "losses should name something to compare with softmax"),
        ({"m": 3}, "only m = 3 are ranked"),
        ({"select": "each"}, "select each has several models"),
        ({"validation": 0.0}, "no example of points is left for validation"),
        ({"ks": (1, 12)}, "--ks 12 needs more than 12 classes, but points has 12"),
        ({"data": "few", "select": "top10"}, "--select top10 needs more than 10 classes"),
    ],
    ids=str,
)
def test_bad_comparisons_end_before_anything_is_trained(changes, message, data, tmp_path):
    if changes.get("data") == "few":
        changes = {**changes, "data": str(lab_data.write_embedding_set(tmp_path / "few", classes=6))}
    with pytest.raises(LabError, match=message):
        search.search(config(**{"data": data, "out": tmp_path / "out", **changes}))
    assert not (tmp_path / "out").exists()


def test_a_loss_that_always_fails_is_reported(data, tmp_path):
    failing = {"optimizer": "sgd", "learning_rate": 1e30, "weight_decay": 1e30, "epochs": 1}
    done = search.search(config(data, tmp_path, **failing, **SHORT))
    assert all(not method.runs for method in done.methods)
    assert len(done.failures) == 2  # one for each method, however many tries
    assert "lower the learning rate" in " ".join(verdict(done))


def test_a_rate_that_diverges_while_tuning_is_an_answer_and_no_failure(data, tmp_path):
    done = search.search(config(data, tmp_path, optimizer="sgd", learning_rate=1e4, weight_decay=1e4, seeds=1, budget=8))
    assert any(None in tried.scores for method in done.methods for tried in method.tries)
    assert [len(method.runs) for method in done.methods] == [1, 1]
    assert done.failures == ()


def test_a_loss_that_refuses_scores_that_are_no_numbers_has_diverged(data, tmp_path):
    given = config(data, optimizer="sgd", learning_rate=10.0, weight_decay=10.0).run_config("lapsum")
    with pytest.raises(Diverged, match=r"the scores are not finite at step \d+: lower the learning rate \(10\)"):
        training.train(given, tmp_path)


def test_ks_are_trained_for_tuned_for_and_judged_and_all_methods_measure_the_same(data, tmp_path):
    done = search.search(config(data, tmp_path, ks=(3,), epochs=1, measure=(7,), **SHORT))
    assert done.ks == (3,)
    assert done.metrics == ["top3", "top1", "top5", "top7", "top10"]
    for method in done.methods:
        assert method.config.p_k == (0.0, 0.0, 1.0)
        for run in method.runs:
            assert set(done.metrics) <= run.test.keys()
            assert run.validation["mean"] == run.validation["top3"]


@pytest.mark.parametrize(
    ("changes", "classes", "ks", "p_k"),
    [
        ({}, 12, (1, 5), (0.5, 0, 0, 0, 0.5)),
        ({}, 9, (1, 5), (0.5, 0, 0, 0, 0.5)),
        ({}, 6, (1, 3), (0.5, 0, 0.5)),
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
def test_ks_and_p_k_follow_from_each_other(changes, classes, ks, p_k):
    given = ComparisonConfig(**changes).with_ks(classes)
    assert (given.ks, given.p_k) == (ks, p_k)


def test_softmax_is_always_there_and_gce_beside_error_losses():
    for given, found in (
        (("splitter",), ("softmax", "splitter")),
        (("error:lapsum", "splitter", "error:lapsum"), ("softmax", "gce", "error:lapsum", "splitter")),
        (("error", "softmax", "gce"), ("softmax", "error", "gce")),
    ):
        assert ComparisonConfig(losses=given).losses == ComparisonConfig(losses=found).losses == found


def test_sl_at_k_starts_where_it_learns(data, tmp_path):
    """With 12 classes at a temperature of 8, two steps from where targets are pushed away at the start."""
    done = search.search(config(data, tmp_path, learning_rate=0.1, losses=("softmax_at_k",), **SHORT))
    assert done.methods[1].tries[0].hyperparameter == 8.0
    assert done.methods[1].runs[0].test["top5"] > 0.8
    assert started(Config(loss="softmax_at_k", temperature=64.0), 2000).temperature == 64
    assert started(Config(loss="softmax_at_k"), 2000).temperature == 16
    assert started(Config(loss="softmax_at_k"), 2).temperature == 2
    assert started(Config(loss="smooth"), 2000) == Config(loss="smooth")


def test_each_loss_tunes_its_learning_rate_and_one_hyperparameter_of_its_own():
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


def without_times(content: dict[str, Any]) -> list[list[Any]]:
    """What a comparison found, without the times."""
    return [
        [method["config"], method["tries"], method["longer"], [(run["test"], run["folder"]) for run in method["runs"]]]
        for method in content["methods"]
    ]


@pytest.fixture(scope="module")
def small(finished, data):
    """A smaller comparison that nothing disturbed."""
    return search.search(config(data, finished[1], seeds=1, budget=2))


def test_when_the_time_is_over_the_runs_stop_and_the_same_call_goes_on(small, data, tmp_path):
    """By a clock that the runs' progress moves, so that the cap comes in the middle of the tuning."""
    seen = itertools.count()
    now = 0

    def tick(*_: object):
        nonlocal now
        now = next(seen)

    short = search.search(config(data, tmp_path, seeds=3, time=30), on_progress=tick, clock=lambda: float(now))
    assert {method.capped for method in short.methods} == {"--time 30.0"}
    assert not short.decided
    assert not short.failures
    assert verdict(short)[0].startswith("Not decided")
    # The best model so far; on a busy machine the clock may leave time for a run of the seeds.
    seeds = [(run.validation["mean"], run.folder) for method in short.methods for run in method.runs]
    best = max(seeds)[1] if seeds else max(short.methods, key=short.tuned_score).tuned_in
    kept, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / best))
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)
    assert str(table(short).rows[0][1]) != "None"
    again = search.search(config(data, tmp_path, seeds=1, budget=2))
    assert without_times(results.to_json(again)) == without_times(results.to_json(small))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_command_goes_on_after_it_was_killed_while_it_tuned(how, small, data, tmp_path):
    """Kill the parent alone; its workers must leave the run folders so that the same command comes to the same bits."""
    words = ["--losses", "lapsum", "--seeds", "1", "--budget", "2", "--jobs", "2", "--epochs", "4", "--batch-size", "32"]
    words += ["--m", "8", "--learning-rate", "0.01", "--quiet", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "anyk", "compare", data, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("out/runs/*/result.json"))) < COARSE_POINTS + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130, errors
        assert errors.startswith("Stopped. To go on: anyk compare")
    assert not (tmp_path / "out" / "results.json").exists()
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 3, again.stderr
    assert without_times(json.loads(again.stdout)) == without_times(results.to_json(small))


def test_the_cost_that_is_announced_knows_the_effort_the_caps_and_the_control():
    """Three losses, for gce comes with error."""

    def expected(*losses: str, **changes: Any) -> float:
        return expected_trainings(config("points", losses=losses, **changes))

    short, points, _ = EFFORTS["normal"].usual
    assert expected("softmax", "error", seeds=1, budget=1) == 3 * (short / 4 + 1 + 1 + 0.5)
    assert expected("error") == 3 * (short / 4 + points + 5 + 0.5) <= 3 * 15
    assert expected("error", effort="quick") < expected("error") < expected("error", effort="thorough") / 2
    assert expected("error", budget=1000) == expected("error") > expected("lapsum")
    # Without short runs all points are tried at full length.
    long = expected_trainings(config("points", losses=("lapsum",)), short_runs=False)
    assert long == 2 * (sum(EFFORTS["thorough"].usual[:2]) + 5 + 0.5)
