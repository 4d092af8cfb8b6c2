"""One run: it learns with every hyperparameter, survives what kills processes, and ends with the same bits."""

import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lab_data
import made
from anyk.lab.errors import LabError
from anyk.lab.run import evaluation, loss_names, losses, summaries, training
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["anyk.lab.run.training", "torch._dynamo"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points"))


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "read_data", lambda _: lab_data.image_set())


def quick(data: str, **changes: Any) -> Config:
    return Config(data=data, epochs=6, batch_size=32, learning_rate=1e-2).replace(**changes)


def outcome(folder: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    """All that a run leaves behind, but for times."""
    metrics = [{**line, "seconds": 0} for line in Run(folder).metrics()]
    result = {**json.loads((folder / "result.json").read_text()), "seconds": 0}
    tensors = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    assert len(tensors) == (1 if result["config"]["select"] == "each" else 2)
    return b"".join(tensors), metrics, result


@pytest.mark.parametrize("loss", [*loss_names.names()[:3], "error:splitter", *loss_names.names()[4:]])
def test_every_loss_learns(loss: str, data: str, tmp_path: Path) -> None:
    # SL@K with less pushes all targets away before it has begun.
    temperature = 8.0 if loss == "softmax_at_k" else 1.0
    result = training.train(quick(data, loss=loss, m=8, temperature=temperature), tmp_path)
    assert result["test"]["top5"] > 0.8  # chance is 5/12
    assert result["epochs"] == 6
    assert len(Run(tmp_path).metrics()) == 6
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == result["parameters"] == 12 * 17


def test_a_finished_run_is_not_run_again(data: str, tmp_path: Path) -> None:
    first = training.train(quick(data, epochs=1), tmp_path)
    again = training.train(quick(data, epochs=1), tmp_path, should_stop=lambda: pytest.fail("it was run again"))
    assert again == first
    with pytest.raises(LabError, match="epochs was 1 and is now 2"):
        training.train(quick(data, epochs=2), tmp_path)


@pytest.mark.parametrize("select", ["mean", "each", "last"])
def test_a_run_stopped_at_any_step_ends_with_the_same_bits(
    select: Any, data: str, tmp_path: Path, train_in_parts: Callable[[Config, Path], int]
) -> None:
    config = quick(
        data, select=select, model="mlp", dropout=0.3, mixup=0.2, label_noise=0.1, schedule="onecycle", temperature_end=0.5,
        p_k_end=(0.2, 0.2, 0.2, 0.2, 0.2), m=8, epochs=3, evaluate_every=5,
    )  # fmt: skip
    training.train(config, tmp_path / "whole")
    assert train_in_parts(config, tmp_path / "parts") > 5
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def _train_with_many_checkpoints(config: Config, folder: Path) -> None:
    training.CHECKPOINT_SECONDS = training.CHECKPOINT_SHARE = 0.005
    training.train(config, folder)


def test_killed_at_random_moments_it_ends_with_the_same_bits(data: str, tmp_path: Path) -> None:
    config = quick(data, epochs=60, select="each", m=8, evaluate_every=3)

    def started(folder: str) -> Any:
        process = FORKS.Process(target=_train_with_many_checkpoints, args=(config, tmp_path / folder))
        process.start()
        return process

    started("first").join()  # the server of the forks starts with it, which takes seconds
    start = time.monotonic()
    started("whole").join()
    seconds = time.monotonic() - start  # the first three waits together are less, on a fast machine and on a busy one
    chance = random.Random(0)
    kills = 0
    while not (tmp_path / "killed" / "result.json").exists():
        process = started("killed")
        process.join(chance.uniform(0.0, 0.2) * seconds * (1 + kills / 5))  # longer and longer, so that it comes to an end
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        assert kills < 100, "the run makes no progress between kills"
    assert kills >= 3
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    training.train(config, tmp_path / "killed")  # the last kill may have come between the result and the tidying up
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left == {".lock", "config.json", "environment.json", "metrics.jsonl", "model.safetensors", "result.json"}


def test_the_command_goes_on_after_ctrl_c(data: str, tmp_path: Path) -> None:
    """The real command, a real SIGINT, and the message that says how to go on."""
    command = ["train", data, "--epochs", "400", "--batch-size", "32", "--out", str(tmp_path / "run"), "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "anyk", *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip() == f"Stopped. To go on: anyk {' '.join(command)}"
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert training.train(Run(tmp_path / "run").config(), tmp_path / "run")["epochs"] == 400


def _hold(folder: Path, ready: Any) -> None:
    with Run(folder).locked():
        ready.send(None)
        time.sleep(60)


def test_a_second_process_is_refused_until_the_first_dies(data: str, tmp_path: Path) -> None:
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=_hold, args=(tmp_path, there))
    process.start()
    here.recv()
    with pytest.raises(LabError, match="another process is at work"):
        training.train(quick(data), tmp_path)
    assert not (tmp_path / "config.json").exists()
    process.kill()
    process.join()
    training.train(quick(data, epochs=1), tmp_path)


def _train_until_the_disk_is_full(config: Config, folder: Path, answer: Any) -> None:
    """A limit on the size of files stands in for a full disk: every write fails from half-way on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    training.CHECKPOINT_SECONDS = training.CHECKPOINT_SHARE = 0.0

    def fill(progress: training.Progress) -> None:
        if progress.step == 20:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))

    try:
        training.train(config, folder, on_progress=fill)
    except LabError as error:
        answer.send(str(error))


def test_a_full_disk_leaves_the_last_good_checkpoint(data: str, tmp_path: Path) -> None:
    config = quick(data, epochs=20)
    training.train(config, tmp_path / "whole")
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=_train_until_the_disk_is_full, args=(config, tmp_path / "full", there))
    process.start()
    assert "the disk is full" in here.recv()
    process.join()
    state = Run(tmp_path / "full").load_tensors("checkpoint.safetensors")
    assert state is not None
    assert state[1]["step"] == 20
    training.train(config, tmp_path / "full")
    assert outcome(tmp_path / "full") == outcome(tmp_path / "whole")


def test_a_damaged_checkpoint_is_an_error_that_names_it(data: str, tmp_path: Path) -> None:
    with pytest.raises(training.Stopped):
        training.train(quick(data), tmp_path, should_stop=iter([False, True]).__next__)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LabError, match=r"checkpoint\.safetensors is damaged"):
        training.train(quick(data), tmp_path)


def test_changed_data_are_noticed(tmp_path: Path) -> None:
    folder = lab_data.write_embedding_set(tmp_path / "points")
    with pytest.raises(training.Stopped):
        training.train(quick(str(folder)), tmp_path / "run", should_stop=iter([False, True]).__next__)
    lab_data.write_embedding_set(folder, per_class=21)
    with pytest.raises(LabError, match="has changed since"):
        training.train(quick(str(folder)), tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "cnn", "augment": ("crop", "flip", "affine")},
        {"model": "cnn", "amp": True, "clip": 1.0},
        {"model": "resnet18", "epochs": 1, "batch_size": 24},
        {"model": "linear", "optimizer": "sgd", "schedule": "cosine", "weight_decay": 1e-3},
        {"model": "mlp", "optimizer": "adamw", "label_smoothing": 0.1, "m": 5},
    ],
    ids=lambda changes: changes["model"] + "-" + list(changes)[1],
)
@pytest.mark.usefixtures("images")
def test_models_and_hyperparameters_on_images(changes: dict[str, Any], tmp_path: Path) -> None:
    result = training.train(quick("images", **changes), tmp_path)
    assert result["data"]["kind"] == "images"
    assert 0 <= result["test"]["top1"] <= result["test"]["top5"] <= 1
    if changes["model"] != "resnet18" and "augment" not in changes:  # one epoch; noise that was turned is other noise
        assert result["test"]["top1"] > 2 / 6


def test_selection_patience_and_schedules(data: str, tmp_path: Path) -> None:
    result = training.train(quick(data, epochs=200, patience=3, learning_rate=0.1), tmp_path / "patient")
    assert result["epochs"] < 200
    lines = [line["validation"] for line in Run(tmp_path / "patient").metrics()]
    assert result["validation"] == max(lines, key=lambda line: (line["mean"], line["mrr"]))
    means = [line["mean"] for line in lines]
    assert result["epochs"] == means.index(max(means)) + 1 + 3

    for metric in ("mrr", "ndcg10", "macro_top5"):
        result = training.train(quick(data, epochs=4, select=metric, learning_rate=0.3), tmp_path / metric)
        lines = Run(tmp_path / metric).metrics()
        assert list(result["selected"]) == [metric]
        assert result["validation"][metric] == max(line["validation"][metric] for line in lines)

    each = training.train(quick(data, select="each"), tmp_path / "each")
    lines = Run(tmp_path / "each").metrics()
    for metric in ("top1", "top5", "top10"):
        assert each["validation"][metric] == max(line["validation"][metric] for line in lines)

    moving = quick(data, temperature=4.0, temperature_end=0.25, schedule="cosine", epochs=4, learning_rate=1e-3)
    training.train(moving, tmp_path / "moving")
    temperatures = [line["temperature"] for line in Run(tmp_path / "moving").metrics()]
    assert temperatures == sorted(temperatures, reverse=True)
    assert 0.25 < temperatures[-1] < 0.5
    rates = [line["learning_rate"] for line in Run(tmp_path / "moving").metrics()]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 1e-3


def test_p_k_of_each_class_from_a_file(data: str, tmp_path: Path) -> None:
    rows = [[0.5, 0.5, 0.0]] * 6 + [[0.0, 0.0, 1.0]] * 6
    (tmp_path / "p_k.json").write_text(json.dumps(rows))
    (tmp_path / "p_k.csv").write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    made = [losses.criterion(quick(data, p_k_file=str(tmp_path / name)), 12) for name in ("p_k.json", "p_k.csv")]
    assert torch.equal(made[0].p_k, made[1].p_k)
    assert made[0].p_k.shape == (12, 3)
    assert training.train(quick(data, p_k_file=str(tmp_path / "p_k.json")), tmp_path / "run")["test"]["top5"] > 0.8
    for content, message in (("[[1.0]]", "has 1 rows"), ("[[0.5, 0.6]]", "has 1 rows"), ("nonsense", "one row of weights")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(LabError, match=message):
            losses.read_p_k(tmp_path / "bad.json", 12)
    (tmp_path / "bad.csv").write_text("0.5,0.5\n0.5,0.6\n")
    with pytest.raises(LabError, match=r"p_k_file .*bad\.csv: expected probabilities that sum to 1"):
        losses.read_p_k(tmp_path / "bad.csv", 2)


def test_what_p_k_trains_for_is_measured(data: str, tmp_path: Path) -> None:
    result = training.train(quick(data, p_k=(0.5, 0.0, 0.5), epochs=1), tmp_path)
    assert list(result["test"])[:4] == ["top1", "top3", "top5", "top10"]
    moving = quick(data, p_k=(0.5, 0.5, 0.0), p_k_end=(0.5, 0.0, 0.5), measure=(7, 12), epochs=1, evaluate_every=1)
    result = training.train(moving, tmp_path / "moving")
    assert list(result["test"])[:6] == ["top1", "top2", "top3", "top5", "top7", "top10"]  # not 12 of 12
    assert all(line["validation"].keys() == result["validation"].keys() for line in Run(tmp_path / "moving").metrics())


def test_a_run_leaves_the_callers_generator_and_threads_alone(data: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    training.train(quick(data, mixup=0.5, threads=1), tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_an_m_above_the_number_of_classes_ranks_all(data: str, tmp_path: Path) -> None:
    results = [training.train(quick(data, epochs=1, m=m), tmp_path / str(m)) for m in (12, 30)]
    assert results[0]["validation"] == results[1]["validation"]
    assert losses.criterion(quick(data, m=30), 12).m == 12


@pytest.mark.parametrize("loss", ["softmax", "splitter"])
def test_one_class_is_nothing_to_classify(loss: str) -> None:
    with pytest.raises(LabError, match="one class only, which leaves nothing to classify"):
        losses.criterion(Config(loss=loss), 1)
    for config, classes, message in (
        (
            Config(),
            2,
            r"k = 5, but there are only 2 classes: .* --p-k, such as 1\.",
        ),
        (Config(m=3), 12, "only m = 3 are ranked"),
    ):
        with pytest.raises(LabError, match=message):
            losses.criterion(config, classes)


def test_the_folder_of_a_run_that_came_to_nothing_is_taken_over(data: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="lower the learning rate"):
        training.train(quick(data, optimizer="sgd", learning_rate=1e30, weight_decay=1.0, loss="softmax"), tmp_path)
    mended = quick(data, epochs=1)
    assert training.train(mended, tmp_path)["epochs"] == 1
    assert Run(tmp_path).config() == mended
    assert Run(tmp_path).error() is None


def test_a_run_that_has_a_checkpoint_or_an_evaluation_keeps_its_folder(data: str, tmp_path: Path) -> None:
    with pytest.raises(training.Stopped):
        training.train(quick(data), tmp_path / "stopped", should_stop=iter([False, True]).__next__)
    with pytest.raises(LabError, match="epochs was 6 and is now 2"):
        training.train(quick(data, epochs=2), tmp_path / "stopped")
    run = Run(tmp_path / "evaluated")
    with run.locked():
        run.begin(quick(data), {})
        run.add_metrics({"step": 1})
    with pytest.raises(LabError, match="epochs was 6 and is now 2"):
        training.train(quick(data, epochs=2), tmp_path / "evaluated")


def test_a_folder_of_other_files_is_left_alone(data: str, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / ".DS_Store").touch()
    training.train(quick(data, epochs=1), photos)  # empty but for this
    (photos / "notes.txt").touch()
    (photos / ".lock").unlink()  # a copy without hidden files is still a run
    assert training.train(quick(data, epochs=1), photos)["epochs"] == 1
    mine = tmp_path / "mine"
    for name in ("a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg"):
        mine.mkdir(exist_ok=True)
        (mine / name).touch()
    before = sorted(mine.iterdir())
    with pytest.raises(
        LabError, match=r"mine holds files that are not of a run \(a.jpg, b.jpg, c.jpg, 2 more\): choose another"
    ):
        training.train(quick(data, epochs=1), mine)
    assert sorted(mine.iterdir()) == before


def test_the_files_of_a_run_have_the_usual_permissions(data: str, tmp_path: Path) -> None:
    training.train(quick(data, epochs=1), tmp_path / "run")
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    assert {path.name: path.stat().st_mode for path in (tmp_path / "run").glob("[!.]*")} == dict.fromkeys(
        ["config.json", "environment.json", "metrics.jsonl", "model.safetensors", "result.json", "test.safetensors"], usual
    )


SLOW = [2.4, 2.2, 2.1, 2.0]
"""cross-entropies of ten classes that still fall; chance is 2.3"""
FLAT = [1.2, 1.02, 1.0, 1.01]


@pytest.mark.parametrize(
    ("changes", "epochs", "losses", "top1", "advice"),
    [
        ({}, 20.0, SLOW, 0.5, "still improving when it ended: raise --epochs or --learning-rate."),
        ({}, 20.0, FLAT, 0.5, ""),
        ({}, 20.0, [1.0, 0.9, 1.1, 1.3], 0.5, ""),  # more would fit the training examples alone
        ({}, 20.0, [2.5], 0.5, ""),
        ({}, 20.0, [math.nan] * 4, 0.5, ""),  # training has seen none of the targets
        ({}, 20.0, FLAT, 0.15, "still near chance when it ended: raise --epochs or --learning-rate."),
        ({"select": "last"}, 20.0, SLOW, 0.5, "raise --epochs or --learning-rate."),
        ({"patience": 1}, 11.0, SLOW, 0.15, ""),
        ({"learning_rate": 0.01}, 20.0, SLOW, 0.5, "raise --epochs or --learning-rate."),
        ({"learning_rate": 1000.0}, 20.0, [900.0, 700.0, 400.0, 90.0], 0.5, "raise --epochs or lower --learning-rate."),
    ],
    ids=str,
)
def test_the_sign_that_a_run_might_have_come_further(
    changes: dict[str, Any], epochs: float, losses: list[float], top1: float, advice: str
) -> None:
    config = Config(epochs=20, learning_rate=1e-3).replace(**changes)
    data = {"classes": 10, "kind": "embeddings"}
    result = {"config": config.to_json(), "epochs": epochs, "data": data, "validation": {"top1": top1}}
    found = evaluation.unfinished(result, [{"validation": {"cross_entropy": loss}} for loss in losses])
    assert found.endswith(advice)
    assert bool(found) == bool(advice)


def evaluated(monkeypatch: pytest.MonkeyPatch, scores: list[tuple[float, float]]) -> None:
    """Let the evaluations of a run find these mean accuracies and reciprocal ranks, one after the other."""
    coming = iter(scores)

    def accuracies(*_: Any) -> dict[str, float]:
        mean, mrr = next(coming, scores[-1])
        return {"mean": mean, "mrr": mrr, "top1": mean, "cross_entropy": 1.0}

    monkeypatch.setattr(evaluation.Examined, "accuracies", accuracies)


@pytest.mark.parametrize(
    ("scores", "selected"),
    [
        ([(0.5, 0.6), (0.9, 0.90), (0.9, 0.92), (0.9, 0.91)], 3),  # the better reciprocal rank
        ([(0.5, 0.6), (0.9, 0.92), (0.9, 0.92), (0.8, 0.99)], 3),  # as good in both: the later one
        ([(0.5, 0.6), (0.9, 0.92), (0.9, 0.91), (0.9, 0.90)], 2),
        ([(0.5, 0.6), (0.9, 0.92), (0.7, 0.99), (0.8, 0.99)], 2),
    ],
)
def test_of_evaluations_that_tie_the_last_of_the_best_reciprocal_ranks_counts(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: list[tuple[float, float]], selected: int
) -> None:
    evaluated(monkeypatch, scores)
    result = training.train(quick(data, epochs=4, tested=False), tmp_path)
    assert result["selected"] == {"mean": selected}
    assert result["validation"]["mrr"] == scores[selected - 1][1]


def test_a_tie_is_no_improvement_to_be_patient_for(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated(monkeypatch, [(0.5, 0.6), (0.9, 0.90)] + [(0.9, 0.91)] * 20)
    result = training.train(quick(data, epochs=20, patience=3, tested=False), tmp_path)
    assert (result["epochs"], result["selected"]) == (5, {"mean": 5})


@pytest.mark.parametrize(
    ("given", "p_k"),
    [
        ({}, (0.5, 0.5)),
        ({"ks": (2,)}, (0.0, 1.0)),  # the usual P_K is too long for it
        ({"p_k": (1.0,)}, (1.0,)),
    ],
)
def test_the_usual_p_k_fits_few_classes(tmp_path: Path, given: dict[str, Any], p_k: tuple[float, ...]) -> None:
    inputs, labels = lab_data.examples(3, 20, 4, seed=0)
    np.savez(tmp_path / "points.npz", x=inputs.numpy(), y=labels.numpy())
    config = quick(str(tmp_path / "points.npz"), epochs=1, **given)
    result = training.train(config, tmp_path / "run")
    assert tuple(result["config"]["p_k"]) == p_k
    assert training.train(config, tmp_path / "run") == result
    with pytest.raises(LabError, match="--ks 1000000000000 needs more than"):
        training.train(config.replace(p_k=Config().p_k, ks=(10**12,)), tmp_path / "refused")


def test_a_run_keeps_what_it_does_with_each_test_example(tmp_path: Path) -> None:
    """Against the model, asked again; the test examples are those that the lab split off, with their groups."""
    inputs, labels = lab_data.examples(30, 8, 16, seed=0)
    groups = torch.arange(len(labels)) // 3
    np.savez(tmp_path / "points.npz", x=inputs.numpy(), y=labels.numpy(), groups=[f"file {group}" for group in groups.tolist()])
    result = training.train(quick(str(tmp_path / "points.npz"), epochs=2, measure=(3,)), tmp_path / "run")
    kept = load_file(tmp_path / "run" / "test.safetensors")
    predictor = made.trained(tmp_path / "run")
    test, index = predictor.parts.test, predictor.parts.test_index
    with torch.no_grad():
        scores = predictor.model(predictor.reader(test, index))
    target = test.labels[index]
    ranks = [1 + sum(bool(row[c] >= row[t]) for c in range(30) if c != t) for row, t in zip(scores, target, strict=True)]
    assert kept["ranks"].tolist() == ranks
    assert kept["guesses"].shape == (len(index), 20)
    assert torch.equal(kept["guesses"].long(), scores.topk(20).indices)
    assert {kept[name].dtype for name in ("ranks", "guesses")} == {torch.int32}
    names = sorted({f"file {group}" for group in groups.tolist()})
    assert [names[group] for group in kept["groups"].tolist()] == [f"file {group}" for group in groups[index].tolist()]
    for k in (1, 3, 5, 10, 20):
        assert result["test"][f"top{k}"] == (kept["ranks"] <= k).sum().item() / len(index)


@pytest.mark.parametrize("select", ["mean", "each"])
def test_a_run_that_is_not_tested_is_the_same_run_without_a_test(data: str, tmp_path: Path, select: str) -> None:
    tested, untested = (
        training.train(quick(data, epochs=2, select=select, tested=tested), tmp_path / str(tested)) for tested in (True, False)
    )
    assert untested["test"] == {}
    assert not (tmp_path / "False" / "test.safetensors").exists()
    assert untested["validation"] == tested["validation"]
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("True", "False")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    shown = summaries.table(summaries.collect([tmp_path]), metrics=["validation_top1"])
    assert len(shown.rows) == 2


def test_checkpoints_take_a_small_share_of_the_time(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written, save = [0.0], [], Run.save_tensors

    def write(run: Run, name: str, *what: Any) -> None:
        save(run, name, *what)
        if name == "checkpoint.safetensors":
            clock[0] += 1.0
            written.append(clock[0])

    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Run, "save_tensors", write)

    def step(_: training.Progress) -> None:
        clock[0] += 4.0

    training.train(quick(data, epochs=8, select="last", evaluate_every=1000), tmp_path / "run", on_progress=step)
    pauses = [later - earlier for earlier, later in itertools.pairwise(written)]
    assert 10 < written[0] < 20
    assert pauses
    assert min(pauses) > training.CHECKPOINT_SHARE
