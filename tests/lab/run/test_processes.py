"""One run in several processes, started by the real torchrun: it must be the run of one process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lab_data
from anyk.lab import cli
from anyk.lab.data import embeddings
from anyk.lab.run import training
from anyk.lab.run.config import Config
from anyk.lab.run.processes import ProcessGroup
from anyk.lab.run.run_folder import Run

SCRIPT = Path(__file__).parents[2] / "run_in_ranks.py"
FOLDER = {".lock", "config.json", "environment.json", "metrics.jsonl", "model.safetensors", "result.json", "test.safetensors"}


@pytest.fixture
def data(tmp_path: Path) -> str:
    """198 training, 22 validation and 220 test examples: none can be shared out evenly to three, nor the 22 to four."""
    return str(lab_data.write_embedding_set(tmp_path / "points", classes=11))


def torchrun(*words: Any) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).with_name("torchrun")), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, standard output, standard error; a hang is an error."""
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun; its ranks end with it
        raise AssertionError("the ranks hang") from None
    return process.returncode, out, err


def curve(folder: Path) -> tuple[list[float], list[dict[str, float]]]:
    """Training losses and validation accuracies."""
    lines = Run(folder).metrics()
    accuracies = [{name: value for name, value in line["validation"].items() if name != "cross_entropy"} for line in lines]
    return [line["train_loss"] for line in lines], accuracies


def assert_same_run(folder: Path, alone: Path, rtol: float = 1e-5) -> None:
    """The same curve to rounding, the same counts exactly, a folder of the same shape."""
    (losses, accuracies), (expected, expected_accuracies) = curve(folder), curve(alone)
    assert losses == pytest.approx(expected, rel=rtol)
    assert accuracies == expected_accuracies
    result, other = (json.loads((place / "result.json").read_text()) for place in (folder, alone))
    for field in ("config", "data", "parameters", "epochs", "selected"):
        assert result[field] == other[field]
    ranked = {"test.safetensors"} if result["config"]["select"] != "each" else set()
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in alone.iterdir()} == FOLDER - {"test.safetensors"} | ranked
    for name in ranked:
        hits, others = (load_file(place / name)["ranks"] for place in (folder, alone))
        assert len(hits) == result["data"]["test"]
        assert (hits != others).sum() <= 0.01 * len(hits)  # in the same order; rounding may turn a rank
    weights, others = (load_file(place / "model.safetensors") for place in (folder, alone))
    assert list(weights) == list(others)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=0.01, atol=1e-3)


def written(path: Path, *runs: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps([{**run, "folder": str(run["folder"]), "config": run["config"].to_json()} for run in runs]))
    return path


def test_the_command_in_two_processes_is_the_command_in_one(data: str, tmp_path: Path) -> None:
    config = Config(data=data, epochs=4, batch_size=31, learning_rate=1e-2)  # batches of 28 and 29
    training.train(config, tmp_path / "alone")
    words = ("--nproc-per-node", 2, "-m", "anyk", "train", data, "--batch-size", 31, "--learning-rate", 0.01)
    code, out, err = ended(torchrun(*words, "--epochs", 4, "--out", tmp_path / "run"))
    assert code == 0, err
    assert out.count("validation  top1") == 1
    assert err.count("all runs") == 1  # one progress bar
    assert_same_run(tmp_path / "run", tmp_path / "alone")

    code, out, err = ended(torchrun(*words, "--epochs", 5, "--out", tmp_path / "run"))
    assert code == 1
    assert err.count("anyk: ") == err.count("epochs was 4 and is now 5") == 1
    assert err.count("Traceback") == 1  # torchrun's own
    assert {path.name for path in (tmp_path / "run").iterdir()} == FOLDER


@pytest.mark.full
def test_three_processes_and_kills(data: str, tmp_path: Path) -> None:
    base = Config(data=data, epochs=3, batch_size=31, learning_rate=1e-2)
    tokens = base.replace(data="tokens", epochs=1, context=8, embedding=8, hidden=12, dropout=0.0)
    shards = str(lab_data.write_shards(tmp_path / "shards", embeddings.read(data), 37, torch.float16))
    configs = {
        "label smoothing": base.replace(loss="lapsum", label_smoothing=0.1, temperature=0.7, optimizer="sgd"),
        "fewer examples than ranks": base.replace(model="mlp", batch_size=2, epochs=1, clip=0.1, evaluate_every=40),
        "stops early": base.replace(epochs=200, patience=3, learning_rate=0.1, select="each"),
        "streamed": base.replace(data=shards, shuffle="block", shuffle_block=4, shuffle_window=48, evaluate_every=3),
        "batch normalisation": base.replace(data="images", model="cnn", batch_size=25),
        "windows": tokens.replace(model="gru", layers=2, label_noise=0.1),  # four at a time
        "fewer windows than ranks": tokens.replace(
            data="items", model="attention", heads=2, batch_size=8, mask_seen=True, optimizer="sgd"
        ),
        "fewer contexts than ranks": tokens.replace(batch_size=2, evaluate_every=200, train_fraction=0.5),
        "many classes": tokens.replace(model="gru", batch_size=8, tied=True, loss="error"),
    }
    chance = base.replace(model="mlp", hidden=64, dropout=0.1, mixup=0.2, evaluate_every=4, label_noise=0.1)
    images = base.replace(
        data="images", model="cnn", mixup=0.2, dropout=0.1, augment=("crop", "flip", "affine"), batch_size=3, epochs=1
    )
    runs: list[dict[str, Any]] = [
        {"folder": tmp_path / "ranks" / name, "config": config, "most_scores": 2 if name == "many classes" else 20_000}
        for name, config in configs.items()
    ]
    runs += [{"folder": tmp_path / name, "config": config} for name, config in (("chance", chance), ("images", images))]
    code, _, err = ended(torchrun("--nproc-per-node", 3, SCRIPT, written(tmp_path / "runs.json", *runs)))
    assert code == 0, err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "read_data", lab_data.read_or_make)
        for name, config in configs.items():
            training.train(config, tmp_path / "alone" / name)
            assert_same_run(tmp_path / "ranks" / name, tmp_path / "alone" / name)
    stopped = json.loads((tmp_path / "ranks" / "stops early" / "result.json").read_text())
    last = max(stopped["selected"].values())  # after the last improvement, where an evaluation ties with it
    assert last <= stopped["epochs"] <= last + 3 < 200
    assert 0.2 < json.loads((tmp_path / "images" / "result.json").read_text())["test"]["top5"] <= 1

    # A rank dies, and the command is given again; then another dies, and torchrun starts all again.
    killed = {"folder": tmp_path / "killed", "config": chance}
    code, _, err = ended(torchrun("--nproc-per-node", 3, SCRIPT, written(tmp_path / "1.json", {**killed, "kill": [2, 5]})))
    assert code == 1
    assert "SIGKILL" in err  # torchrun's report; the others tell that one has ended only if torchrun leaves them the time
    assert not (tmp_path / "killed" / "result.json").exists()
    spec = written(tmp_path / "2.json", {**killed, "kill": [0, 10]})
    code, _, err = ended(torchrun("--nproc-per-node", 3, "--max-restarts", 1, SCRIPT, spec))
    assert code == 0, err
    assert "(SIGKILL)" in err or "-9" in err
    assert curve(tmp_path / "killed") == curve(tmp_path / "chance")
    assert {path.name for path in (tmp_path / "killed").iterdir()} == FOLDER
    for name in ("model.safetensors", "config.json", "test.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "chance" / name).read_bytes()


def test_ctrl_c_saves_and_one_process_can_go_on(data: str, tmp_path: Path) -> None:
    words = ("train", data, "--epochs", "80", "--batch-size", "31", "--out", str(tmp_path / "run"), "--quiet")
    process = torchrun("--nproc-per-node", 2, "-m", "anyk", *words)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    # As a batch system does: to all processes, and through torchrun a second time to the ranks.
    for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(rank), signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code in (1, -signal.SIGABRT)  # torchrun itself aborts now and then, interrupted while it ends
    assert re.findall(r"Stopped.*", err) == [f"Stopped. To go on: torchrun --nproc-per-node 2 -m anyk {' '.join(words)}"]
    assert err.count("Traceback") <= 1  # torchrun's own
    state = Run(tmp_path / "run").load_tensors("checkpoint.safetensors")
    assert state is not None
    assert 0 < state[1]["step"] < 80 * 7
    config = Run(tmp_path / "run").config()
    training.train(config, tmp_path / "run")
    training.train(config, tmp_path / "alone")
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_parts_are_all_examples_once_and_their_weights_make_the_mean() -> None:
    for world in (1, 2, 3, 5):
        for size in (1, 2, 7, 12):
            index, losses = torch.randperm(size), torch.rand(size, dtype=torch.float64)
            group = [ProcessGroup(rank, world) for rank in range(world)]
            parts = [each.shard(index) for each in group]
            assert torch.equal(torch.cat(parts), index)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            means = [losses[part].mean() if len(part) else torch.zeros(()) for part in parts]
            weights = [each.shard_weight(len(part), size) for each, part in zip(group, parts, strict=True)]
            average = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / world
            assert float(average) == pytest.approx(float(losses.mean()))


@pytest.mark.parametrize("command", ["compare", "report"])
def test_only_train_takes_several_processes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        cli.main([command])
    assert end.value.code == 2
    assert (
        capsys.readouterr().err == f"anyk: anyk {command} is one process: start it without torchrun, which is for anyk train.\n"
    )


@pytest.mark.parametrize("device", ["mps", "cuda:1"])
def test_a_device_that_ranks_cannot_have_is_named(
    device: str, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        cli.main(["train", data, "--device", device])
    assert f"device should be cpu or cuda with several processes, but is '{device}'" in capsys.readouterr().err
