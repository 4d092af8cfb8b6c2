"""The metrics of runs for TensorBoard, Weights & Biases and MLflow, beside what the run folders hold.

A run knows nothing of loggers, and its folder's name and config do not depend on them. They follow the folder: what comes to
metrics.jsonl is handed on, by the process that shows the progress. So it is all the same which process, or which machine of a
cluster, computes the run; and a run that has ended is logged too, if it was not before. logged.json in the folder says what
has been handed on. A run that goes on from a checkpoint makes some evaluations again, bit for bit: these are not told twice.
"""

import contextlib
import importlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, get_args

from anyk.lab import files
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.warn_once import warn_once

LoggerName = Literal["tensorboard", "wandb", "mlflow"]
#: seconds between looks into the folders
POLL_SECONDS = 0.5


class Logger(Protocol):
    """Where the metrics of one run go."""

    def start(self, config: Config, folder: Path, key: str) -> None:
        """Begin, or go on with what an earlier process began under the same key."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics by name, after so many steps."""

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """The run has ended with this result; None: it has failed, or was stopped and may go on later."""


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run."""

    def start(self, config: Config, folder: Path, key: str) -> None:
        writer: Any = _module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill would lose what is not on the disk

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, in the project WANDB_PROJECT or anyk. Its own files are in the run folder."""

    def start(self, config: Config, folder: Path, key: str) -> None:
        wandb: Any = _module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "anyk",
            dir=str(folder),
            id=key,
            name=folder.name,
            config=config.to_json(),
            resume="allow",
            reinit="create_new",  # several runs are at work at a time
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._run.finish(exit_code=0 if result is not None else 1)


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, in the experiment MLFLOW_EXPERIMENT_NAME or anyk."""

    def start(self, config: Config, folder: Path, key: str) -> None:
        mlflow: Any = _module("mlflow")
        self._entities: Any = _module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "anyk"
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        # The server chooses the run's name for itself, so ours is a tag.
        found = self._client.search_runs([place], f"tags.anyk = '{key}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(place, run_name=folder.name, tags={"anyk": key}).info.run_id
        parameter = self._entities.Param
        self._client.log_batch(self._run, params=[parameter(name, str(value)) for name, value in config.to_json().items()])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        metric, now = self._entities.Metric, round(1000 * time.time())
        self._client.log_batch(self._run, metrics=[metric(name, value, now, step) for name, value in values.items()])

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._client.set_terminated(self._run, "FINISHED" if result is not None else "KILLED")


LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check(names: Sequence[str]) -> None:
    """Raise if a logger is unknown, its package is not installed, or it cannot be used."""
    for name in names:
        if name not in LOGGERS:
            raise LabError(f"log should be one of {', '.join(LOGGERS)}, but is {name!r}.")
        if name in get_args(LoggerName):
            module = _module("torch.utils.tensorboard" if name == "tensorboard" else name)
            if name == "wandb":
                _log_in(module)


def _log_in(wandb: Any) -> None:
    """Before the first run and in the main thread: it may ask for a key."""
    try:
        wandb.login()
    except Exception as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise LabError(f"Weights & Biases cannot be used ({told[0]}): wandb login, or WANDB_MODE=offline.") from None


def _module(name: str) -> Any:
    extra = "tensorboard" if "tensorboard" in name else name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError:
        raise LabError(f'--log {extra} needs a package that is not installed: pip install "anyk[{extra}]".') from None


class Following:
    """Hands on what runs write to their folders, while they are at work.

    >>> with Following(["tensorboard"]) as following:  # doctest: +SKIP
    ...     train(config, folder, on_progress=lambda progress: following.note(folder))

    A logger that fails is left out from then on, and told in a note: no run ends for it.

    Args:
        names: of :data:`LOGGERS`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        check(names)
        self._names = list(dict.fromkeys(names))
        self._open: dict[tuple[Path, str], Logger] = {}
        self._folders: dict[Path, None] = {}
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="loggers", daemon=True)

    def __enter__(self) -> "Following":
        if self._names:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._names:
            return
        self._over.set()
        self._thread.join()
        self._look()
        for (folder, name), logger in list(self._open.items()):  # stopped half-way
            with self._caught(name):
                self._close(folder, name, logger, None)

    def note(self, folder: Path) -> None:
        """There is a run in this folder. May be called from any thread, and often."""
        if self._names:
            with self._guard:
                self._folders[folder] = None

    def _follow(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        with self._guard:
            folders = list(self._folders)
        for folder in folders:
            ended = [self._catch_up(folder, name) for name in list(self._names)]
            if all(ended):
                with self._guard:
                    self._folders.pop(folder, None)

    def _catch_up(self, folder: Path, name: str) -> bool:
        """Hand on what is new in a folder; whether there will be no more."""
        with self._caught(name):
            run = Run(folder)
            # In this order: what is measured before the end is in the file when the end is.
            result, failed = run.result(), run.error() is not None
            lines = run.metrics()
            told = _read(folder, name)
            if len(lines) > told["lines"] or (result is not None and not told["ended"]):
                logger = self._started(run, name)
                for number in range(told["lines"], len(lines)):
                    # Noted first: a kill in between loses a line here, and metrics.jsonl has it. Else it would be twice.
                    _write(folder, name, lines=number + 1)
                    logger.log(lines[number]["step"], _values(lines[number]))
                if result is not None and not told["ended"]:
                    _write(folder, name, ended=True)
                    steps = lines[-1]["step"] if lines else 0
                    logger.log(steps, {f"test/{metric}": value for metric, value in result["test"].items()})
            over = result is not None or failed
            if over and (logger_open := self._open.get((folder, name))) is not None:
                self._close(folder, name, logger_open, result)
            return over
        return False

    def _started(self, run: Run, name: str) -> Logger:
        if (run.folder, name) not in self._open:
            logger = LOGGERS[name]()
            logger.start(run.config(), run.folder, _key(run.folder))
            self._open[run.folder, name] = logger
        return self._open[run.folder, name]

    def _close(self, folder: Path, name: str, logger: Logger, result: Mapping[str, Any] | None) -> None:
        del self._open[folder, name]
        logger.finish(result)

    @contextlib.contextmanager
    def _caught(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a package that talks to a server, anything
            told = str(error).strip().splitlines() or [type(error).__name__]
            warn_once(f"--log {name} is left out from here on: {told[0]}")
            if name in self._names:
                self._names.remove(name)
            for place in [place for place in self._open if place[1] == name]:
                del self._open[place]


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation as names and numbers."""
    numbers = {name: line.get(name) for name in ("epoch", "train_loss", "learning_rate", "temperature")}
    numbers |= {f"validation/{name}": value for name, value in line["validation"].items()}
    return {name: value for name, value in numbers.items() if isinstance(value, (int, float)) and math.isfinite(value)}


# --- logged.json ------------------------------------------------------------------------------------------------------


def _content(folder: Path) -> dict[str, Any]:
    path = folder / "logged.json"
    return files.read_object(path, "delete it, and all is logged again") if path.exists() else {"key": secrets.token_hex(6)}


def _read(folder: Path, name: str) -> dict[str, Any]:
    return {"lines": 0, "ended": False, **_content(folder).get(name, {})}


def _key(folder: Path) -> str:
    content = _content(folder)
    if not (folder / "logged.json").exists():
        files.write_object(folder / "logged.json", content)
    return str(content["key"])


def _write(folder: Path, name: str, **changes: Any) -> None:
    content = _content(folder)
    files.write_object(folder / "logged.json", {**content, name: {**content.get(name, {}), **changes}})
