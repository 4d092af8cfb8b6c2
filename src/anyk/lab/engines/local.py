"""Many runs in processes of their own, a few at a time: a run that crashes takes no other with it."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from anyk import _compat
from anyk.lab import notes
from anyk.lab.engines.attempt import Outcome, attempt, ended, throttled
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.folder import Run
from anyk.lab.run.training import Progress

#: seconds for a run's former process to leave its folder
LEAVING_SECONDS = 10.0


class Pool:
    """At most ``jobs`` runs at a time. Used by several threads, the runs queue up.

    >>> with Pool(jobs=2) as pool:  # doctest: +SKIP
    ...     outcomes = pool.run({Path("runs/a"): Config(seed=1), Path("runs/b"): Config(seed=2)})
    """

    def __init__(self, jobs: int, on_progress: Callable[[Path, Progress], None] = lambda folder, progress: None) -> None:
        # A fork of a process that has loaded torch, but used none of its threads, starts in milliseconds.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([__name__, _compat.SLOW_TO_IMPORT])
        self._threads = ThreadPoolExecutor(jobs, "run")
        self._on_progress = on_progress
        self._stopping = threading.Event()
        self._running: set[Any] = set()
        self._guard = threading.Lock()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
        self._threads.shutdown(cancel_futures=kind is not None)

    def stop(self) -> None:
        """Let the runs write a checkpoint and end, and start no more."""
        with self._guard:
            self._stopping.set()
            for process in self._running:
                process.terminate()

    def run(self, configs: Mapping[Path, Config]) -> dict[Path, Outcome]:
        """Run all, wait for all. Runs that had ended before are not run again."""
        futures = {folder: self._threads.submit(self._run_one, folder, config) for folder, config in configs.items()}
        wait_in_turns(list(futures.values()))
        return {folder: future.result() for folder, future in futures.items()}

    def _run_one(self, folder: Path, config: Config) -> Outcome:
        before = ended(folder, config)
        if before is not None:
            if before.result is not None:
                self._on_progress(folder, Progress(1, 1))
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
                    notes.tell(message)
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


def wait_in_turns(futures: Sequence[Future[Any]]) -> None:
    """Wait for all, or for the first that fails. In short turns: a signal that another thread received is seen between them."""
    while True:
        done, waiting = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
        if not waiting or any(future.exception() for future in done):
            return


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
    notes.hand_on(parent.send)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    outcome = attempt(fields, folder, throttled(parent.send, 0.2), stop, LEAVING_SECONDS, imports)
    try:
        parent.send(outcome)
    except OSError:
        sys.exit(1)


def _die_with_parent() -> None:
    """A run must not go on when nobody waits for it: a new start of the same command would find its folder taken."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
