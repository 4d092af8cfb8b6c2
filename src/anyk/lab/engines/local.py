"""Many runs in processes of their own, a few at a time: a run that crashes takes no other with it."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from anyk import _compat
from anyk.lab import files, stopping
from anyk.lab.engines.engine import Engine, Outcome, attempt, throttled
from anyk.lab.errors import LabError, explain
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config, Setting
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import OnProgress
from anyk.lab.warn_once import forward_to, warn_once

#: seconds for a run's former process to leave its folder
LEAVING_SECONDS = 10.0
#: seconds for a run to write a checkpoint after it was told to stop; then it is killed, and will go on from the last one
STOPPING_SECONDS = 6.0
#: how often a run is started whose process dies, and how often a process if the one that forks it does
TRIES = 3


class _Worker(NamedTuple):
    folder: Path
    config: Config
    process: Any


class Pool(Engine):
    """Processes of this machine, at most ``jobs`` at a time. All that waits for them is one loop of the calling thread.

    >>> with Pool(jobs=2) as pool:  # doctest: +SKIP
    ...     for folder, outcome in pool.results({Path("runs/a"): Config(seed=1), Path("runs/b"): Config(seed=2)}):
    ...         print(folder, outcome.error or outcome.result["test"])
    """

    def __init__(self, jobs: int, on_progress: OnProgress = lambda folder, progress: None, **settings: Any) -> None:
        super().__init__(on_progress, **settings)
        # A fork of a process that has loaded torch, but used none of its threads, starts in milliseconds.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([__name__, _compat.SLOW_TO_IMPORT])
        self._jobs = jobs
        self._running: dict[Any, _Worker] = {}  # by connection
        self._deadline = 0.0
        self._deaths: Counter[Path] = Counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None:
                self._waiting.clear()
                self.stop()
            while self._waiting or self._running:
                self._turn() if kind is None else self._wait()
        finally:  # a second Ctrl-C in Python
            for worker in self._running.values():
                stopping.kill(worker.process.pid)
                stopping.end(worker.process.pid)

    def room(self, config: Setting) -> int:
        return self._jobs

    def stop(self) -> None:
        super().stop()
        self._deadline = time.monotonic() + STOPPING_SECONDS
        for connection in self._running:
            with suppress(OSError):
                connection.send("stop")

    def _has_room(self) -> bool:
        return len(self._running) < self._jobs

    def _start(self, folder: Path, config: Config) -> None:
        for number in range(TRIES):
            here, there = self._context.Pipe()
            arguments = (there, os.fspath(folder), config.to_json(), loss_names.imported)
            process = self._context.Process(target=_work, args=arguments, daemon=True)
            try:
                with _signals_wait(), _without_main():
                    if self._context.get_start_method() == "forkserver":
                        with files.uninterrupted:  # until its number is known, by which it is killed with this process
                            forkserver.ensure_running()
                    process.start()
            except (OSError, EOFError) as error:  # as when the process that forks was killed just now
                here.close()
                if number == TRIES - 1:
                    raise LabError(f"no process could be started for {folder} ({explain(error)}).") from None
                time.sleep(0.1 * 4**number)  # until the system knows that it is gone, and another can be started
                continue
            finally:
                there.close()
            stopping.begin(process.pid)
            self._running[here] = _Worker(folder, config, process)
            return

    def _wait(self) -> list[tuple[Path, Outcome]]:
        if self._stopping and time.monotonic() > self._deadline:
            for worker in self._running.values():
                stopping.kill(worker.process.pid)
        ended = []
        ready: list[Any] = wait(list(self._running), 0.2) if self._running else []
        for connection in ready:
            folder = self._running[connection].folder
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = None
            if isinstance(message, str):
                warn_once(message)
            elif message is None or isinstance(message, Outcome):
                ended += self._ended(connection, message)
            else:
                self._on_progress(folder, message)
        return ended

    def _ended(self, connection: Any, outcome: Outcome | None) -> list[tuple[Path, Outcome]]:
        """The outcome of a run that has told it, or whose process is gone; nothing, if it is started again."""
        connection.close()  # a worker that is left alone ends
        folder, config, process = self._running.pop(connection)
        process.join(1.0)
        if process.is_alive():
            stopping.kill(process.pid)
        stopping.end(process.pid)
        if outcome is None and not self._stopping:
            self._deaths[folder] += 1
            if self._deaths[folder] < TRIES:  # from its last checkpoint
                self._waiting.appendleft((folder, config))
                return []
            outcome = Outcome(error=f"the process of this run ended {TRIES} times, at last with exit code {process.exitcode}")
            Run(folder).fail(outcome.error or "")
        return [(folder, outcome or Outcome())]


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Start a process in which signals wait until it asks for them: before, while it imports, they could only end it.

    The process that forks the others is started with the first of them, hands this on, and lives until nobody needs it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # another helper of Python's, whose start would let the signals through again
    former = signal.pthread_sigmask(signal.SIG_BLOCK, stopping.SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the program that started it: a script that calls :func:`anyk.lab.compare` without
    a guard would do so again there. What a run needs it imports by name."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(parent: Connection, folder: str, fields: dict[str, Any], imports: Sequence[str]) -> None:
    """One run, in a process of its own. Signals, which a terminal sends to all processes, are the parent's business."""
    for number in stopping.SIGNALS:
        signal.signal(number, stopping.ignore)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping.SIGNALS)
    stop = threading.Event()

    def obey() -> None:
        """Stop when the parent says so, and end when it is gone: a new start of its command would find the folder taken."""
        try:
            while parent.recv():
                stop.set()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=obey, daemon=True).start()
    forward_to(parent.send)
    outcome = attempt(fields, folder, throttled(parent.send, 0.2), stop, LEAVING_SECONDS, imports)
    with suppress(OSError):
        parent.send(outcome)
