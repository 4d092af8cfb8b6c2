"""The interface of an engine, which runs many configs, and how every engine makes one run."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from anyk.lab import stopping
from anyk.lab.data import Dataset
from anyk.lab.errors import Diverged, LabError, Stopped, explain
from anyk.lab.run import loss_names, training
from anyk.lab.run.config import Config, Setting
from anyk.lab.run.run_folder import FolderTaken, Run
from anyk.lab.run.training import OnProgress, Progress


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result, with an error (it may have diverged), or with neither, stopped half-way."""

    result: dict[str, Any] | None = None
    error: str | None = None
    diverged: bool = False


Result = TypeVar("Result")
Task = Generator[Mapping[Path, Config], dict[Path, Outcome], Result]
"""Yields configs by folder to have them run, is sent their outcomes, and returns what it is for."""


class Engine(ABC):
    """Runs configs, each in its folder. Used as a context manager, by one thread; an exception inside it stops the runs.

    A run that has ended in its folder is not run again, and one that was interrupted there goes on. A run that fails does not
    stop the others. Told to end (see :mod:`anyk.lab.stopping`), it raises :class:`~anyk.lab.errors.Stopped`.

    Args:
        on_progress: called with a run's folder and where it stands.
        out_of_time: asked again and again; True is as :meth:`stop`.
    """

    def __init__(
        self,
        on_progress: OnProgress = lambda folder, progress: None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_progress, self._out_of_time = on_progress, out_of_time
        self._stopping = False
        self._waiting: deque[tuple[Path, Config]] = deque()

    def results(self, configs: Mapping[Path, Config]) -> Iterator[tuple[Path, Outcome]]:
        """Run all, and yield each folder with its outcome as it ends."""
        left = set(configs)
        for folder, config in configs.items():
            self._submit(folder, config)
        while left:
            for folder, outcome in self._turn():
                left.discard(folder)
                yield folder, outcome

    def run(self, configs: Mapping[Path, Config]) -> dict[Path, Outcome]:
        """Run all, wait for all; the outcomes in the order of the configs."""
        found = dict(self.results(configs))
        return {folder: found[folder] for folder in configs}

    def run_tasks(self, tasks: Sequence[Task[Result]]) -> list[Result]:
        """What the tasks return. Their runs share the engine; a run that several of them ask for is made once."""
        found: dict[int, Result] = {}
        asked: dict[int, Mapping[Path, Config]] = {}
        outcomes: dict[Path, Outcome | None] = {}

        def advance(number: int, given: dict[Path, Outcome] | None) -> None:
            try:
                asked[number] = tasks[number].send(given)  # type: ignore[arg-type]  # None starts it
            except StopIteration as ended:
                asked.pop(number, None)
                found[number] = ended.value
                return
            for folder, config in asked[number].items():
                if folder not in outcomes:
                    outcomes[folder] = None
                    self._submit(folder, config)

        for number in range(len(tasks)):
            advance(number, None)
        while asked:
            outcomes.update(self._turn())
            for number, wanted in list(asked.items()):
                given = {folder: outcome for folder in wanted if (outcome := outcomes[folder]) is not None}
                if len(given) == len(wanted):
                    advance(number, given)
        return [found[number] for number in range(len(tasks))]

    @abstractmethod
    def room(self, config: Setting) -> int:
        """How many runs of such a config can be at work at a time."""

    def stop(self) -> None:
        """Let the runs write a checkpoint and end, and start no more."""
        self._stopping = True

    def __enter__(self) -> Self:
        return self

    def _submit(self, folder: Path, config: Config) -> None:
        self._waiting.append((folder, config))

    def _turn(self) -> list[tuple[Path, Outcome]]:
        """The runs that end within a moment."""
        if stopping.requested():
            raise Stopped
        if self._out_of_time() and not self._stopping:
            self.stop()
        while self._waiting and (self._stopping or self._has_room()):
            folder, config = self._waiting.popleft()
            before = self._ended_before(folder, config)
            if before is not None or self._stopping:
                return [(folder, before or Outcome())]
            self._start(folder, config)
        return self._wait()

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether one more run can be started."""

    @abstractmethod
    def _start(self, folder: Path, config: Config) -> None:
        """Start a run."""

    @abstractmethod
    def _wait(self) -> list[tuple[Path, Outcome]]:
        """Wait a moment for the runs that were started, if there are any: those that have ended."""

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the runs that have begun."""

    def _ended_before(self, folder: Path, config: Config) -> Outcome | None:
        """The outcome of a run that need not be started, which counts as progress; None: it is to be run."""
        before = ended(folder, config)
        if before is not None and before.result is not None:
            self._on_progress(folder, Progress(1, 1))
        return before


def ended(folder: Path, config: Config) -> Outcome | None:
    """The outcome of a run that had ended before, or whose folder cannot be read; None: it is to be run."""
    try:
        finished = Run(folder).result()
        if finished is not None and not Run(folder).config().differences(config):
            return Outcome(result=finished)
    except LabError as error:
        return Outcome(error=str(error))
    return None


def attempt(
    fields: Mapping[str, Any],
    folder: str | Path,
    report: Callable[[Progress], None],
    stop: threading.Event,
    leaving_seconds: float,
    imports: Sequence[str] = (),
    dataset: Dataset | None = None,
) -> Outcome:
    """Run the config with these fields to its end, or until ``stop`` is set. Every error becomes an outcome.

    Args:
        fields: of the config, as JSON values.
        folder: of the run.
        report: called with where the run stands.
        stop: set it to end the run with a checkpoint.
        leaving_seconds: how long to wait for a former process of the same run, which may live although it seemed dead, to
            leave the folder.
        imports: modules that bring losses, imported first.
        dataset: the config's data, if they need not be read.
    """
    deadline = time.monotonic() + leaving_seconds
    try:
        loss_names.import_modules(imports)
        config = Config.from_json(fields)
        while True:
            try:
                result = training.train(
                    config, folder, on_progress=report, should_stop=stop.is_set, patience=1.0, dataset=dataset
                )
                return Outcome(result)
            except FolderTaken:
                if stop.is_set():
                    return Outcome()
                if time.monotonic() > deadline:
                    raise
    except Stopped:
        return Outcome()
    except Exception as error:
        return Outcome(error=explain(error), diverged=isinstance(error, Diverged))


def throttled(report: Callable[[Progress], None], seconds: float) -> Callable[[Progress], None]:
    """The same, called at most once in so many seconds; an evaluation waits a fifth of them, the end not at all."""
    last = 0.0

    def report_now_and_then(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.step == progress.steps or now - last > (seconds if progress.line is None else seconds / 5):
            last = now
            report(progress)

    return report_now_and_then
