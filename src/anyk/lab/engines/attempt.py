"""One run as every engine makes it: where it stands is told, and how it ends is a value."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyk.lab.errors import Diverged, Failure, LabError, Stopped, explain
from anyk.lab.run import loss_names, training
from anyk.lab.run.config import Config
from anyk.lab.run.folder import FolderTaken, Run
from anyk.lab.run.training import Progress


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result, with an error (it may have diverged), or stopped half-way (neither)."""

    result: dict[str, Any] | None = None
    error: str | None = None
    diverged: bool = False


def ended(folder: Path, config: Config) -> Outcome | None:
    """The outcome of a run that had ended before, or whose folder cannot be read; None: it is to be run."""
    try:
        finished = Run(folder).result()
        if finished is not None and not Run(folder).differences(config):
            return Outcome(result=finished)
    except LabError as error:
        return Outcome(error=str(error))
    return None


def failures(outcomes: Mapping[str, Outcome]) -> list[Failure]:
    """The runs that failed, of outcomes by name."""
    return [Failure(name, outcome.error) for name, outcome in outcomes.items() if outcome.error]


def attempt(
    fields: Mapping[str, Any],
    folder: str | Path,
    tell: Callable[[Progress], None],
    stop: threading.Event,
    leaving_seconds: float,
    imports: Sequence[str] = (),
) -> Outcome:
    """Import the modules, run the config with these fields to its end, or until ``stop`` is set.

    A former process of the same run, which may live although it seemed dead, has so many seconds to leave the folder.
    """
    deadline = time.monotonic() + leaving_seconds
    try:
        loss_names.import_modules(imports)
        config = Config.from_json(fields)
        while True:
            try:
                return Outcome(training.train(config, folder, on_progress=tell, should_stop=stop.is_set, patience=1.0))
            except FolderTaken:
                if stop.is_set():
                    return Outcome()
                if time.monotonic() > deadline:
                    raise
    except Stopped:
        return Outcome()
    except Exception as error:
        return Outcome(error=explain(error), diverged=isinstance(error, Diverged))


def throttled(tell: Callable[[Progress], None], seconds: float) -> Callable[[Progress], None]:
    """The same, called at most once in so many seconds; an evaluation waits a fifth of them, the end not at all."""
    told_at = 0.0

    def tell_now_and_then(progress: Progress) -> None:
        nonlocal told_at
        now = time.monotonic()
        if progress.step == progress.steps or now - told_at > (seconds if progress.line is None else seconds / 5):
            told_at = now
            tell(progress)

    return tell_now_and_then
