"""The metrics of runs for TensorBoard, Weights & Biases and MLflow, beside what the run folders hold.

A run knows nothing of loggers, and its folder's name and config do not depend on them. The process that shows the progress
hands on what comes to a run folder's metrics.jsonl, so it does not matter which process, or which machine of a cluster,
computes the run. A command that is given again hands on all of a run again: the loggers keep one point for each step, but for
MLflow, whose curves then have the same points twice.
"""

import hashlib
import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from anyk.lab.errors import LabError, first_line
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import Progress
from anyk.lab.warn_once import warn_once

LoggerName = Literal["tensorboard", "wandb", "mlflow"]
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class Logger(Protocol):
    """Where the metrics of one run go. It is made from the config, the folder and a key: an earlier process of the same run has
    the same key."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics by name, after so many steps."""

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """The run has ended with this result; None: it has failed, or was stopped and may go on later."""


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run."""

    def __init__(self, config: Config, folder: Path, key: str) -> None:
        writer: Any = _module("tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"), purge_step=0)  # in the place of what an earlier process wrote

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, in the project WANDB_PROJECT or anyk. Its own files are in the run folder."""

    def __init__(self, config: Config, folder: Path, key: str) -> None:
        wandb: Any = _module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "anyk",
            dir=str(folder),
            id=key,
            name=folder.name,
            config=config.to_json(),
            resume="allow",  # which drops the steps that it has
            reinit="create_new",  # several runs are at work at a time
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._run.finish(exit_code=0 if result is not None else 1)


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, in the experiment MLFLOW_EXPERIMENT_NAME or anyk."""

    def __init__(self, config: Config, folder: Path, key: str) -> None:
        mlflow: Any = _module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "anyk"
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        # The server chooses the run's id for itself, so ours is a tag.
        found = self._client.search_runs([place], f"tags.anyk = '{key}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            return
        self._run = self._client.create_run(place, run_name=folder.name, tags={"anyk": key}).info.run_id
        parameter = self._entities.Param
        self._client.log_batch(self._run, params=[parameter(name, str(value)) for name, value in config.to_json().items()])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        metric, now = self._entities.Metric, round(1000 * time.time())
        self._client.log_batch(self._run, metrics=[metric(name, value, now, step) for name, value in values.items()])

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._client.set_terminated(self._run, "FINISHED" if result is not None else "KILLED")


LOGGERS: dict[str, Callable[[Config, Path, str], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check(names: Sequence[str]) -> None:
    """Raise if a logger is unknown, its package is not installed, or it cannot be used."""
    for name in names:
        if name not in LOGGERS:
            raise LabError(f"log should be one of {', '.join(LOGGERS)}, but is {name!r}.")
        module = _module(name) if name in _MODULES else None
        if name == "wandb" and module is not None:
            try:
                module.login()  # before the first run and in the main thread: it may ask for a key
            except Exception as error:
                raise LabError(
                    f"Weights & Biases cannot be used ({first_line(error)}): run `wandb login`, or set WANDB_MODE=offline."
                ) from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError:
        raise LabError(f'--log {name} needs a package that is not installed: pip install "anyk[{name}]".') from None


class Forwarder:
    """Hands on what runs write to their folders, while they are at work.

    >>> with Forwarder(["tensorboard"]) as forwarder:  # doctest: +SKIP
    ...     train(config, folder, on_progress=lambda progress: forwarder.update(folder, progress))

    A logger that fails is left out from then on, with a warning: no run ends for it.

    Args:
        names: of :data:`LOGGERS`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        check(names)
        self._names = list(dict.fromkeys(names))
        self._loggers: dict[tuple[Path, str], Logger] = {}
        self._lines: dict[Path, int] = {}  # handed on, for each run that has not ended
        self._ended: set[Path] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> "Forwarder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for folder in list(self._lines):
            self._forward(folder, leaving=True)

    def update(self, folder: Path, progress: Progress) -> None:
        """Hand on what is new in the folder of a run, if there is an evaluation or the end. May be called from any thread."""
        if not self._names or (progress.line is None and progress.step < progress.steps):
            return
        with self._lock:
            if folder not in self._ended:
                self._lines.setdefault(folder, 0)
            for each in list(self._lines):  # the others too: nobody reports that a run has written its result
                self._forward(each)

    def _forward(self, folder: Path, leaving: bool = False) -> None:
        run = Run(folder)
        with suppress(LabError, OSError):  # a folder that cannot be read is an error of the run itself
            # In this order: what is measured before the end is in the file when the end is.
            result, failed = run.result(), run.error() is not None
            lines = run.metrics()
            new, self._lines[folder] = lines[self._lines[folder] :], len(lines)
            over = leaving or failed or result is not None
            for name in list(self._names):
                try:
                    logger = self._loggers.get((folder, name)) or self._started(run, name)
                    for line in new:
                        logger.log(line["step"], _values(line))
                    if result is not None:
                        test = {f"test/{metric}": value for metric, value in result["test"].items()}
                        logger.log(lines[-1]["step"] if lines else 0, test)
                    if over:
                        logger.finish(result)
                except Exception as error:  # of a package that talks to a server, anything
                    warn_once(f"--log {name} is left out from here on: {first_line(error)}")
                    self._names.remove(name)
            if over:
                del self._lines[folder]
                self._ended.add(folder)

    def _started(self, run: Run, name: str) -> Logger:
        # The config is written once, when a run begins: its time tells this run from others in folders of the same name.
        begun = f"{run.folder.absolute()} {(run.folder / 'config.json').stat().st_mtime_ns}"
        key = hashlib.blake2b(begun.encode(), digest_size=6).hexdigest()
        self._loggers[run.folder, name] = LOGGERS[name](run.config(), run.folder, key)
        return self._loggers[run.folder, name]


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation as names and numbers."""
    numbers = {name: line.get(name) for name in ("epoch", "train_loss", "learning_rate", "temperature")}
    numbers |= {f"validation/{name}": value for name, value in line["validation"].items()}
    return {name: value for name, value in numbers.items() if isinstance(value, (int, float)) and math.isfinite(value)}
