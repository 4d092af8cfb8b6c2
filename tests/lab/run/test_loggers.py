"""Loggers follow the run folders: every evaluation once, whoever computes the run and however often it is begun."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import lab_data
from anyk.lab import cli, warn_once
from anyk.lab.engines import sweep
from anyk.lab.errors import LabError
from anyk.lab.run import loggers, training
from anyk.lab.run.config import Config
from anyk.lab.run.loggers import Following
from anyk.lab.run.run_folder import Run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    data = lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points")
    return Config(data=str(data), loss="lapsum", epochs=4, batch_size=32, learning_rate=1e-2, m=8)


class Notebook:
    """A logger that remembers, over processes that were killed too."""

    written: ClassVar[list[tuple[str, str, Any]]] = []

    def start(self, config: Config, folder: Path, key: str) -> None:
        self.name, self.key = folder.name, key
        self.written.append((self.name, "start", key))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.written.append((self.name, "log", (step, dict(values))))

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self.written.append((self.name, "finish", result))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    monkeypatch.setitem(loggers.LOGGERS, "notebook", Notebook)
    monkeypatch.setattr(loggers, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(Notebook, "written", [])
    return Notebook.written


def logged(written: list[tuple[str, str, Any]], what: str, name: str = "run") -> list[Any]:
    return [value for run, kind, value in written if (run, kind) == (name, what)]


def train(config: Config, folder: Path, stop_after: int | None = None, **options: Any) -> None:
    """A run that a kill ends after so many steps, if any."""

    def tell(progress: training.Progress) -> None:
        following.note(folder)
        if progress.step == stop_after:
            while len(logged(Notebook.written, "log")) < len(Run(folder).metrics()):
                time.sleep(0.01)
            raise KeyboardInterrupt  # before any checkpoint

    with Following(["notebook"]) as following:
        training.train(config, folder, on_progress=tell, **options)


def test_every_evaluation_is_logged_once_and_the_test_at_the_end(base, notebook, tmp_path):
    train(base, tmp_path / "run")
    lines, result = Run(tmp_path / "run").metrics(), Run(tmp_path / "run").result()
    *evaluations, (last_step, test) = logged(notebook, "log")
    assert [step for step, _ in evaluations] == [line["step"] for line in lines]
    assert evaluations[0][1]["validation/top5"] == lines[0]["validation"]["top5"]
    assert evaluations[0][1]["train_loss"] == lines[0]["train_loss"]
    assert (last_step, test["test/top1"]) == (lines[-1]["step"], result["test"]["top1"])
    assert logged(notebook, "finish") == [result]
    assert [kind for _, kind, _ in notebook] == ["start", *["log"] * 5, "finish"]
    before = list(notebook)
    with Following(["notebook"]) as following:  # once more
        following.note(tmp_path / "run")
    assert notebook == before


def test_a_run_that_was_killed_logs_no_line_twice(base, notebook, tmp_path):
    per_epoch = 7
    for stop_after in (2 * per_epoch, 3 * per_epoch + 1):
        with pytest.raises(KeyboardInterrupt):
            train(base, tmp_path / "run", stop_after)
        assert not (tmp_path / "run" / "checkpoint.safetensors").exists()  # all begins anew
    train(base, tmp_path / "run")
    steps = [step for step, values in logged(notebook, "log") if "train_loss" in values]
    assert steps == [per_epoch, 2 * per_epoch, 3 * per_epoch, 4 * per_epoch]
    assert len(set(logged(notebook, "start"))) == 1  # the same key: the same run there
    assert [value is None for value in logged(notebook, "finish")] == [True, True, False]


def test_runs_in_other_processes_lose_no_line_to_the_throttle(base, notebook, tmp_path):
    configs = {f"seed{seed}": base.replace(seed=seed, evaluate_every=1) for seed in range(2)}
    configs["bad"] = base.replace(optimizer="sgd", learning_rate=1e30, weight_decay=1.0)
    with Following(["notebook"]) as following:
        sweep.run_all(configs, tmp_path, jobs=2, on_progress=lambda folder, progress: following.note(folder))
    for name in ("seed0", "seed1"):
        steps = [step for step, values in logged(notebook, "log", name) if "train_loss" in values]
        assert steps == [line["step"] for line in Run(tmp_path / name).metrics()] == list(range(1, 29))
        assert logged(notebook, "finish", name) == [Run(tmp_path / name).result()]
    assert logged(notebook, "finish", "bad") in ([], [None])
    assert Run(tmp_path / "seed0").config() == configs["seed0"]  # which knows nothing of it


def test_a_run_that_had_ended_is_logged_afterwards(base, notebook, tmp_path):
    training.train(base, tmp_path / "run")
    train(base, tmp_path / "run")
    assert notebook == []  # it made no progress; the command tells of it all the same:
    with Following(["notebook"]) as following:
        following.note(tmp_path / "run")
    assert len(logged(notebook, "log")) == 5
    assert logged(notebook, "finish") == [Run(tmp_path / "run").result()]


def test_a_logger_that_fails_is_left_out_and_no_run_ends_for_it(base, notebook, tmp_path, monkeypatch, caplog):
    class Broken(Notebook):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("no server\nat all")

    monkeypatch.setitem(loggers.LOGGERS, "broken", Broken)
    monkeypatch.setattr(warn_once, "_warned", set())
    with Following(["broken", "notebook"]) as following:
        result = training.train(base, tmp_path / "run", on_progress=lambda progress: following.note(tmp_path / "run"))
    assert result["epochs"] == 4
    assert caplog.messages == ["--log broken is left out from here on: no server"]
    assert len(logged(notebook, "log")) == 5


def test_values_that_are_no_numbers_are_left_out():
    line = {"step": 1, "train_loss": float("nan"), "temperature": None, "validation": {"top1": 0.5}, "epoch": 1.0}
    assert loggers._values(line) == {"epoch": 1.0, "validation/top1": 0.5}


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
@pytest.mark.parametrize("command", ["train", "sweep", "compare"])
def test_a_missing_package_is_one_line_before_any_run(base, name, module, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as ended:
        cli.main([command, base.data, "--log", name])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err == f'anyk: --log {name} needs a package that is not installed: pip install "anyk[{name}]".\n'
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LabError, match="log should be one of tensorboard, wandb, mlflow, but is 'paper'"):
        loggers.check(["paper"])


def test_the_command_hands_on_also_what_had_ended(base, notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", Notebook)
    monkeypatch.setattr(loggers, "check", lambda names: None)
    words = ["train", base.data, "--loss", "lapsum", "--epochs", "2", "--quiet", "--out", str(tmp_path / "run")]
    for more in ([], ["--log", "tensorboard"], ["--log=tensorboard,tensorboard"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, *more])
        assert ended.value.code == 0, capsys.readouterr().err
    assert len(logged(notebook, "log")) == 3
    assert "log" not in json.loads((tmp_path / "run" / "config.json").read_text())


# --- the packages themselves, offline: `make test-full` installs them --------------------------------------------------


def steps_in_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    assert "test/top1" in events.Tags()["scalars"]
    return [event.step for event in events.Scalars("validation/top1")]


def steps_in_mlflow(folder: Path) -> list[int]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("anyk").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.params["loss"]) == ("FINISHED", folder.name, "lapsum")
    assert len(client.get_metric_history(run.info.run_id, "test/top1")) == 1
    return [metric.step for metric in client.get_metric_history(run.info.run_id, "validation/top1")]


def records(file: Path) -> Iterator[bytes]:
    """What is in a log of LevelDB's form: blocks of 32 KiB, in them pieces with checksum, length and kind."""
    data = file.read_bytes()
    place, piece = 7, b""
    while place + 7 <= len(data):
        left = -place % 32768
        if 0 < left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        piece += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last
            yield piece
            piece = b""


def steps_in_wandb(folder: Path) -> list[int]:
    from wandb.proto.wandb_internal_pb2 import Record

    found, ids = [], set()
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        ids.add(file.stem)
        for record in records(file):
            read = Record.FromString(record)
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in read.history.item}
            if "validation/top1" in items:
                found.append(items["_step"])
    assert ids == {f"run-{json.loads((folder / 'logged.json').read_text())['key']}"}
    return found


READERS = {"tensorboard": steps_in_tensorboard, "mlflow": steps_in_mlflow, "wandb": steps_in_wandb}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of the packages, about each other
@pytest.mark.parametrize("name", READERS)
def test_the_real_package_offline_with_a_kill(name, base, tmp_path):
    pytest.importorskip(name, reason=f'pip install "anyk[{name}]"')
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    folder = tmp_path / "run"
    words = ["train", base.data, "--loss", "lapsum", "--epochs", "600", "--evaluate-every", "300", "--out", str(folder)]
    command = [sys.executable, "-m", "anyk", *words, "--quiet", "--log", name]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stdout=-1, stderr=-1)

    first = start()
    deadline = time.monotonic() + 120
    while first.poll() is None and time.monotonic() < deadline:
        marked = folder / "logged.json"
        if marked.exists() and json.loads(marked.read_text()).get(name, {}).get("lines", 0) >= 3:
            break
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (folder / "result.json").exists(), "it was over before the kill"
    second = start()
    _, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert "left out" not in err
    assert "Traceback" not in err
    steps = READERS[name](folder)
    assert max(Counter(steps).values()) == 1
    lines = [line["step"] for line in Run(folder).metrics()]
    # A kill loses the line on its way; of Weights & Biases also what its own process had not written yet.
    lost = [step for step in lines if step not in steps]
    assert len(lost) <= (len(lines) // 2 if name == "wandb" else 1)
    assert steps == [step for step in lines if step not in lost]
    assert steps[-1] == lines[-1]
