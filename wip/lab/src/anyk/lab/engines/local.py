"""Many runs on this machine, each in a process of its own, a few at a time: a run that crashes takes no other with it."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from anyk.lab.config import RunConfig
from anyk.lab.engines import SIGNALS, Engine, Outcome, Work, ended, to_kill
from anyk.lab.errors import LabError, explain

STOPPING_SECONDS = 6.0
"""for a run to write a checkpoint after it was told to stop; then it is killed, and will go on from the last one"""
TRIES = 3
"""how often a run is started whose process dies"""


@dataclass(frozen=True)
class _Task:
    folder: Path
    config: RunConfig
    device: str
    tries: int


@dataclass
class _Worker:
    process: Any
    task: _Task | None = None


class Pool(Engine):
    """Processes of this machine, each of which makes one run after the other.

    Args:
        work: what makes a run; of a module, since other processes import it.
        device: "cuda" stands for all GPUs, of which each has one run at a time unless ``jobs`` says otherwise.
        jobs: runs at a time.
        threads: of all runs together.
        imports: modules that each process imports first.
    """

    def __init__(
        self, work: Work, *, device: str = "cpu", jobs: int = 0, threads: int = 0, imports: Sequence[str] = ()
    ) -> None:
        cores = cores_of_this_process()
        self.work, self.imports = work, tuple(imports)
        self.devices = devices_of(device)
        self.jobs = jobs or (cores if self.devices == ["cpu"] else len(self.devices))
        self.threads = max(1, (threads or cores) // self.jobs)
        # A fork of a process that has loaded torch, but used none of its threads, starts in milliseconds.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([work.__module__])
        self._workers: dict[Connection, _Worker] = {}
        self._deadline: float | None = None

    def close(self) -> None:
        self._stop()
        while any(worker.task for worker in self._workers.values()):
            self._wait()
        for connection, worker in self._workers.items():
            connection.close()  # which ends the process
            worker.process.join(1.0)
            self._bury(worker)
        self._workers.clear()

    def run(
        self,
        configs: Mapping[Path, RunConfig],
        data: Path,
        *,
        on_end: Callable[[RunConfig], None] = lambda config: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[Path, Outcome]:
        waiting = deque((folder, config, 1) for folder, config in configs.items())
        found: dict[Path, Outcome] = {}
        self._deadline = None
        while waiting or self._busy():
            if self._deadline is None and should_stop():
                self._stop()
            while waiting and (self._deadline is not None or self._busy() < self.jobs):
                folder, config, tries = waiting.popleft()
                outcome = ended(folder, config)
                if outcome is None and self._deadline is None:
                    self._start(folder, config, data, tries)
                    continue
                found[folder] = outcome or Outcome()
                on_end(config)
            for task, outcome, exitcode in self._wait():
                if outcome is None and self._deadline is None and task.tries < TRIES:  # it died; from its last checkpoint
                    waiting.appendleft((task.folder, task.config, task.tries + 1))
                    continue
                died = Outcome(error=f"the process of this run ended {TRIES} times, at last with exit code {exitcode}")
                found[task.folder] = outcome or (Outcome() if self._deadline is not None else died)
                on_end(task.config)
        return {folder: found[folder] for folder in configs}

    def _busy(self) -> int:
        return sum(worker.task is not None for worker in self._workers.values())

    def _start(self, folder: Path, config: RunConfig, data: Path, tries: int) -> None:
        busy = [worker.task.device for worker in self._workers.values() if worker.task is not None]
        task = _Task(folder, config, min(self.devices, key=busy.count), tries)
        idle = [connection for connection, worker in self._workers.items() if worker.task is None]
        connection = idle[0] if idle else self._new_worker()
        self._workers[connection].task = task
        with suppress(OSError):  # a process that died meanwhile is noticed when it is waited for
            connection.send((os.fspath(folder), config.to_json(), os.fspath(data), task.device, self.threads))

    def _new_worker(self) -> Connection:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_work, args=(there, self.work, self.imports), daemon=True)
        try:
            with _signals_blocked(), _without_main():
                process.start()
        except OSError as error:
            here.close()
            raise LabError(f"no process could be started for the runs ({explain(error)}).") from None
        finally:
            there.close()
        to_kill.add(process.pid)
        self._workers[here] = _Worker(process)
        return here

    def _stop(self) -> None:
        self._deadline = time.monotonic() + STOPPING_SECONDS
        for connection, worker in self._workers.items():
            if worker.task is not None:
                with suppress(OSError):
                    connection.send("stop")

    def _wait(self) -> list[tuple[_Task, Outcome | None, int | None]]:
        """The runs that end within a moment, with their outcome; None and an exit code: the process died."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            for worker in self._workers.values():
                if worker.task is not None:
                    worker.process.kill()
        busy = [connection for connection, worker in self._workers.items() if worker.task is not None]
        ready: list[Any] = wait(busy, 0.2) if busy else []
        found = []
        for connection in ready:
            worker, outcome = self._workers[connection], None
            task, worker.task = worker.task, None
            assert task is not None
            try:
                outcome = connection.recv()
            except (EOFError, OSError):
                del self._workers[connection]
                connection.close()
                worker.process.join(1.0)
                self._bury(worker)
            found.append((task, outcome, worker.process.exitcode))
        return found

    def _bury(self, worker: _Worker) -> None:
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        to_kill.discard(worker.process.pid)


def cores_of_this_process() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_of(device: str) -> list[str]:
    """The devices that runs are handed out to.

    >>> devices_of("cpu"), devices_of("cuda:1")
    (['cpu'], ['cuda:1'])
    """
    if device != "cuda":
        return [device]
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cuda"]


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start a process in which signals wait until it asks for them: before, while it imports, they could only end it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the program that started it: a script that calls :func:`anyk.lab.compare` without
    a guard would do so again there. What a run needs is imported by name."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(parent: Connection, work: Work, imports: Sequence[str]) -> None:
    """Runs, in a process of their own. Signals, which a terminal sends to all processes, are the parent's business."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    stop, tasks = threading.Event(), queue.SimpleQueue[Any]()

    def listen() -> None:
        """Take what the parent says, and end when it is gone: a new start of its command would find the folder taken."""
        try:
            while message := parent.recv():
                if message == "stop":
                    stop.set()
                else:
                    stop.clear()
                    tasks.put(message)
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        outcome = work(*tasks.get(), lambda step, steps: None, stop.is_set, imports)
        with suppress(OSError):
            parent.send(outcome)
