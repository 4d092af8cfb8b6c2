"""Many runs in processes of their own, a few at a time: a run that crashes takes no other with it."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from anyk import _compat
from anyk.lab.engines.engine import Engine, Outcome, attempt, throttled
from anyk.lab.run import loss_names, processes
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import OnProgress
from anyk.lab.warn_once import forward_to, warn_once

#: seconds for a run's former process to leave its folder
LEAVING_SECONDS = 10.0

Result = TypeVar("Result")


class Pool(Engine):
    """Processes of this machine, at most ``jobs`` at a time. Used by several threads, the runs queue up.

    >>> with Pool(jobs=2) as pool:  # doctest: +SKIP
    ...     for folder, outcome in pool.results({Path("runs/a"): Config(seed=1), Path("runs/b"): Config(seed=2)}):
    ...         print(folder, outcome.error or outcome.result["test"])
    """

    def __init__(self, jobs: int, on_progress: OnProgress = lambda folder, progress: None) -> None:
        super().__init__(on_progress)
        # A fork of a process that has loaded torch, but used none of its threads, starts in milliseconds.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([__name__, _compat.SLOW_TO_IMPORT])
        self._threads = ThreadPoolExecutor(jobs, "run")
        self._running: set[Any] = set()
        self._guard = threading.Lock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
        self._threads.shutdown(cancel_futures=kind is not None)

    def stop(self) -> None:
        with self._guard:
            self._stopping.set()
            for process in self._running:
                process.terminate()

    def results(self, configs: Mapping[Path, Config]) -> Iterator[tuple[Path, Outcome]]:
        folders = {self._threads.submit(self._run_one, folder, config): folder for folder, config in configs.items()}
        for future in as_completed(folders):
            yield folders[future], future.result()

    def _run_one(self, folder: Path, config: Config) -> Outcome:
        before = self._ended_before(folder, config)
        if before is not None:
            return before
        here, there = self._context.Pipe(duplex=False)
        with self._guard:
            if self._stopping.is_set():
                return Outcome()
            arguments = (there, os.fspath(folder), config.to_json(), loss_names.imported)
            process = self._context.Process(target=_work, args=arguments, daemon=True)
            with _interrupts_wait(), _without_main():
                process.start()
            self._running.add(process)
        there.close()
        outcome = None
        try:
            while outcome is None:
                message = here.recv()
                if isinstance(message, Outcome):
                    outcome = message
                elif isinstance(message, str):
                    warn_once(message)
                else:
                    self._on_progress(folder, message)
        except (EOFError, OSError):
            pass
        process.join()
        with self._guard:
            self._running.discard(process)
        if outcome is None and self._stopping.is_set():  # it may end before it listens
            return Outcome()
        if outcome is None:
            outcome = Outcome(error=f"the process of this run ended with exit code {process.exitcode}")
            Run(folder).fail(outcome.error or "")
        return outcome


def as_completed(futures: Collection[Future[Result]]) -> Iterator[Future[Result]]:
    """The futures as they end. Waits in short turns: a signal that another thread received is seen between them."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
        yield from done


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Start a process in which Ctrl-C waits until it asks for it: before, while it imports, it could only show a traceback.

    The process that forks the others is started with the first of them, and hands this on.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # another helper of Python's, whose start would let the signal through again
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
    """One run, in a process of its own."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    forward_to(parent.send)
    processes.die_with_parent()
    outcome = attempt(fields, folder, throttled(parent.send, 0.2), stop, LEAVING_SECONDS, imports)
    try:
        parent.send(outcome)
    except OSError:
        sys.exit(1)
