"""Loggers are handed what comes to the run folders, whoever computes the runs."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import lab_data
from anyk.lab import warn_once
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError
from anyk.lab.run import loggers, training
from anyk.lab.run.config import Config
from anyk.lab.run.loggers import Forwarder
from anyk.lab.run.run_folder import Run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    data = lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points")
    return Config(data=str(data), loss="lapsum", epochs=4, batch_size=32, learning_rate=1e-2, m=8)


class Notebook:
    """A logger that remembers."""

    written: ClassVar[list[tuple[str, str, Any]]] = []

    def __init__(self, config: Config, folder: Path, key: str) -> None:
        self.name = folder.name
        self.written.append((self.name, "start", key))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.written.append((self.name, "log", (step, dict(values))))

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self.written.append((self.name, "finish", result))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    monkeypatch.setitem(loggers.LOGGERS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "written", [])
    return Notebook.written


def logged(written: list[tuple[str, str, Any]], what: str, name: str = "run") -> list[Any]:
    return [value for run, kind, value in written if (run, kind) == (name, what)]


def train(config: Config, folder: Path, names: tuple[str, ...] = ("notebook",), **options: Any) -> dict[str, Any]:
    with Forwarder(names) as forwarder:
        return training.train(config, folder, on_progress=lambda progress: forwarder.update(folder, progress), **options)


def test_every_evaluation_is_logged_once_and_the_test_at_the_end(base, notebook, tmp_path):
    result = train(base, tmp_path / "run")
    lines = Run(tmp_path / "run").metrics()
    *evaluations, (last_step, test) = logged(notebook, "log")
    assert [step for step, _ in evaluations] == [line["step"] for line in lines]
    assert evaluations[0][1]["validation/top5"] == lines[0]["validation"]["top5"]
    assert evaluations[0][1]["train_loss"] == lines[0]["train_loss"]
    assert (last_step, test["test/top1"]) == (lines[-1]["step"], result["test"]["top1"])
    assert logged(notebook, "finish") == [result]
    assert [kind for _, kind, _ in notebook] == ["start", *["log"] * 5, "finish"]


def test_a_run_that_goes_on_has_the_key_that_it_had(base, notebook, tmp_path):
    with pytest.raises(training.Stopped):
        train(base, tmp_path / "run", should_stop=iter([*[False] * 15, True]).__next__)
    assert logged(notebook, "finish") == [None]
    result = train(base, tmp_path / "run")
    assert len(set(logged(notebook, "start"))) == 1
    assert logged(notebook, "finish") == [None, result]
    steps = {step for step, values in logged(notebook, "log") if "train_loss" in values}
    assert sorted(steps) == [line["step"] for line in Run(tmp_path / "run").metrics()]


def test_runs_in_other_processes_lose_no_line_to_the_throttle(base, notebook, tmp_path):
    configs = {tmp_path / f"seed{seed}": base.replace(seed=seed, evaluate_every=1) for seed in range(2)}
    configs[tmp_path / "bad"] = base.replace(optimizer="sgd", learning_rate=1e30, weight_decay=1.0)
    with Forwarder(["notebook"]) as forwarder, Pool(2, forwarder.update) as pool:
        pool.run(configs)
    for name in ("seed0", "seed1"):
        steps = [step for step, values in logged(notebook, "log", name) if "train_loss" in values]
        assert steps == [line["step"] for line in Run(tmp_path / name).metrics()] == list(range(1, 29))
        assert logged(notebook, "finish", name) == [Run(tmp_path / name).result()]
    assert logged(notebook, "finish", "bad") in ([], [None])


def test_a_logger_that_fails_is_left_out_and_no_run_ends_for_it(base, notebook, tmp_path, monkeypatch, caplog):
    class Broken(Notebook):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("no server\nat all")

    monkeypatch.setitem(loggers.LOGGERS, "broken", Broken)
    monkeypatch.setattr(warn_once, "_warned", set())
    assert train(base, tmp_path / "run", ("broken", "notebook"))["epochs"] == 4
    (message,) = caplog.messages
    assert message.startswith("--log broken")
    assert message.endswith("no server")
    assert len(logged(notebook, "log")) == 5


def test_values_that_are_no_numbers_are_left_out():
    line = {"step": 1, "train_loss": float("nan"), "temperature": None, "validation": {"top1": 0.5}, "epoch": 1.0}
    assert loggers._values(line) == {"epoch": 1.0, "validation/top1": 0.5}


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_missing_package_is_one_line_before_any_run(base, name, module, anyk, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for command in ("train", "compare"):
        code, out, err = anyk(command, base.data, "--log", name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"--log {name}" in err
        assert f'pip install "anyk[{name}]"' in err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LabError, match="log should be one of tensorboard, wandb, mlflow, but is 'paper'"):
        loggers.check(["paper"])


def test_the_command_hands_on_also_what_had_ended(base, notebook, anyk, tmp_path, monkeypatch):
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", Notebook)
    monkeypatch.setattr(loggers, "check", lambda names: None)
    words = ["train", base.data, "--loss", "lapsum", "--epochs", "2", "--quiet", "--out", "run"]
    assert anyk(*words)[0] == 0
    assert anyk(*words, "--log=tensorboard,tensorboard")[0] == 0
    assert len(logged(notebook, "log")) == 3
    assert "log" not in Run(tmp_path / "run").config().to_json()


# --- the packages themselves, offline: `make test-full` installs them --------------------------------------------------


def logged_by_tensorboard(folder: Path) -> bool:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("validation/top1")]
    return "test/top1" in events.Tags()["scalars"] and steps == [line["step"] for line in Run(folder).metrics()]


def logged_by_mlflow(folder: Path) -> bool:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("anyk").experiment_id])
    steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "validation/top1")}
    named = (run.info.status, run.info.run_name, run.data.params["loss"]) == ("FINISHED", folder.name, "lapsum")
    return named and "test/top1" in run.data.metrics and steps == {line["step"] for line in Run(folder).metrics()}


def logged_by_wandb(folder: Path) -> bool:
    files = [file.read_bytes() for file in (folder / "wandb").glob("offline-run-*/*.wandb")]
    return bool(files) and all(b"validation/top1" in file and b"test/top1" in file for file in files)


LOGGED = {"tensorboard": logged_by_tensorboard, "mlflow": logged_by_mlflow, "wandb": logged_by_wandb}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of the packages, about each other
@pytest.mark.parametrize("name", LOGGED)
def test_the_real_package_offline(name, base, tmp_path):
    """Twice: the second time there is nothing to train, and the same is handed on again."""
    pytest.importorskip(name, reason=f'pip install "anyk[{name}]"')
    environment = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    words = ["train", base.data, "--loss", "lapsum", "--epochs", "3", "--out", str(tmp_path / "run"), "--quiet", "--log", name]
    for _ in range(2):
        command = [sys.executable, "-m", "anyk", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **environment}, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "left out" not in done.stderr
        assert LOGGED[name](tmp_path / "run")
