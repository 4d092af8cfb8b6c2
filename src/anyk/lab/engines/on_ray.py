"""Many runs on the nodes of a Ray cluster.

Ray decides where a run is computed, and starts it again when its node died. The run folder, on a file system that all nodes
see, says what is left to do: its checkpoint is where a second attempt goes on, its lock keeps the second attempt out until the
first has left, and a run that has ended is not run again. So a node that was believed dead and was not can do no harm.
"""

import importlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from anyk import info
from anyk.lab.engines.engine import Engine, Outcome, attempt, throttled
from anyk.lab.errors import LabError, first_line
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import OnProgress, Progress

#: how often a run is started again after its node, or its process alone, has died
RETRIES = 10
#: seconds for a run's former process to leave its folder: longer than NFS keeps the locks of a dead machine (90)
LEAVING_SECONDS = 300.0
#: seconds for the runs to write their checkpoints after an interrupt
STOPPING_SECONDS = 60.0
#: seconds for a node to answer at the start, which includes importing torch
ANSWER_SECONDS = 120.0
#: the versions that every node must share
SAME = ("anyk", "torch")


class Cluster(Engine):
    """Runs as tasks of a Ray cluster, each with its CPUs and, on ``cuda``, one GPU.

    >>> with Run(Path("/shared/runs")).locked(), Cluster("10.0.0.1:6379", Path("/shared/runs")) as cluster:  # doctest: +SKIP
    ...     outcomes = cluster.run({Path("/shared/runs/a"): Config(seed=1), Path("/shared/runs/b"): Config(seed=2)})

    Args:
        address: HOST:PORT of the cluster's head; this process must run on one of its nodes.
        folder: the folder of all runs, locked by the caller. Every node must see it under the same path.
        jobs: runs at a time; 0: as many as the cluster has room for.
        on_progress: called with a run's folder and where it stands.
        on_note: called with a message that the user should see.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        jobs: int = 0,
        on_progress: OnProgress = lambda folder, progress: None,
        on_note: Callable[[str], None] = lambda message: None,
    ) -> None:
        super().__init__(on_progress)
        self._ray = _import_ray()
        self._address = address
        self._folder = folder.absolute()
        self._marker = self._folder / f".cluster-{secrets.token_hex(6)}"
        self._jobs = jobs
        self._on_note = on_note
        self._running: dict[Any, Path] = {}
        self._asked_for: set[tuple[int, int]] = set()

    def __enter__(self) -> Self:
        _connect(self._ray, self._address)
        self._quiet = redirect_stdout(_WithoutRay(sys.stdout))
        self._quiet.__enter__()
        try:
            self._marker.touch()
            # On this node: it lives as long as there is somebody to read it.
            here = self._on(self._ray.get_runtime_context().get_node_id())
            self._board = self._ray.remote(_board()).options(num_cpus=0, scheduling_strategy=here).remote()
            self._check_nodes()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None:
                self.stop()
                if self._running:
                    self._ray.wait(list(self._running), num_returns=len(self._running), timeout=STOPPING_SECONDS)
        finally:
            self._leave()

    def stop(self) -> None:
        super().stop()
        for task in list(self._running):
            self._ray.cancel(task)  # an interrupt for a task at work; one that waits is not begun

    def _submit(self, folder: Path, config: Config) -> None:
        if config.device.startswith("cuda:"):
            raise LabError(
                f"device should be cuda on a cluster, which chooses the GPU, but is {config.device} ({folder.name})."
            )
        self._note_if_there_is_no_room(config.threads, _gpus(config))
        super()._submit(folder, config)

    def _has_room(self) -> bool:
        return not self._jobs or len(self._running) < self._jobs

    def _start(self, folder: Path, config: Config) -> None:
        task = self._ray.remote(_work).options(
            name=folder.name,
            num_cpus=config.threads,
            num_gpus=_gpus(config),
            max_retries=RETRIES,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )
        place = (os.fspath(folder.absolute()), os.fspath(self._marker), os.getcwd(), list(sys.argv))
        self._running[task.remote(*place, config.to_json(), loss_names.imported, self._board)] = folder

    def _wait(self) -> list[tuple[Path, Outcome]]:
        # In short turns, so that an interrupt is seen between them.
        done, _ = self._ray.wait(list(self._running), timeout=0.3) if self._running else ([], [])
        self._show_progress()
        ended = []
        for task in done:
            folder = self._running.pop(task)
            outcome = self._outcome(task, folder)
            if outcome.result is not None:
                self._on_progress(folder, Progress(1, 1))
            ended.append((folder, outcome))
        return ended

    def _outcome(self, task: Any, folder: Path) -> Outcome:
        try:
            return self._ray.get(task)
        except self._ray.exceptions.TaskCancelledError:
            return Outcome()
        except self._ray.exceptions.RayError as error:
            outcome = Outcome(error=f"the cluster gave this run up: {type(error).__name__}: {first_line(error)}")
            with suppress(OSError):
                Run(folder).fail(outcome.error or "")
            return outcome

    def _show_progress(self) -> None:
        """What the runs have reported since the last turn. If the process of the board dies, the runs go on without it."""
        with suppress(self._ray.exceptions.RayError):
            news = self._ray.get(self._board.read.remote(), timeout=5)
            for folder in self._running.values():
                if (progress := news.get(os.fspath(folder.absolute()))) is not None:
                    self._on_progress(folder, Progress(*progress))

    # The nodes -------------------------------------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Ask every node that can compute for what would spoil the runs: before hours of training, not after."""
        nodes = {node["NodeID"]: node for node in self._nodes()}
        look = self._ray.remote(_look())
        asked = {}
        for key, node in nodes.items():
            there = look.options(num_cpus=0, max_retries=0, scheduling_strategy=self._on(key))
            asked[there.remote(os.fspath(self._folder), os.fspath(self._marker))] = node
        answered, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS) if asked else ([], [])
        for question in silent:
            raise LabError(f"the node {_name(asked[question])} did not answer within {ANSWER_SECONDS:.0f} s.")
        lockless, own = [], info.versions()
        for question in answered:
            name = _name(asked[question])
            try:
                seen = self._ray.get(question)
            except self._ray.exceptions.RayError as error:
                self._on_note(f"note: the node {name} gave no answer: {first_line(error)}")
                continue
            if "problem" in seen:
                raise LabError(f"the node {name} {seen['problem']}")
            for package in SAME:
                if seen["versions"][package] != own[package]:
                    found = f"{package} {seen['versions'][package]}, but here it is {own[package]}"
                    raise LabError(f"the node {name} has {found}: install the same version on all nodes.")
            if not seen["locks"]:
                lockless.append(name)
        if lockless:
            self._on_note(
                f"note: locks in {self._folder} do not hold between this node and {', '.join(lockless)}: a run whose node "
                "seems dead, but is not, could be run twice. Mount the file system with locks."
            )

    def _note_if_there_is_no_room(self, threads: int, gpus: int) -> None:
        if (threads, gpus) in self._asked_for:
            return
        self._asked_for.add((threads, gpus))
        rooms = [(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)) for node in self._nodes()]
        if not any(room[0] >= threads and room[1] >= gpus for room in rooms):
            self._on_note(f"note: no node has {threads} CPUs and {gpus} GPUs; the runs that need them wait until one joins.")

    def _nodes(self) -> list[dict[str, Any]]:
        """The nodes that live and have CPUs to give."""
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]

    def _on(self, node: str) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _leave(self) -> None:
        self._ray.shutdown()
        self._quiet.__exit__(None, None, None)
        self._marker.unlink(missing_ok=True)


# The driver ----------------------------------------------------------------------------------------------------------------


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody outside of the cluster
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise LabError('the engine ray needs Ray: pip install "anyk[cluster]".') from None


def _connect(ray: Any, address: str) -> None:
    """Join the cluster as a quiet driver."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or "/" in address:
        raise LabError(f"address should be HOST:PORT as `ray start --head` tells it, but is {address!r}.")
    try:  # Ray itself would try for minutes, loudly
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise LabError(f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`.") from None
    former = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise LabError(f"the Ray cluster at {address} cannot be joined: {first_line(error)}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, former)  # which Ray has replaced


class _WithoutRay:
    """A stream without what Ray's own threads print: it reports the death of a node on standard output, with stack traces,
    whatever log_to_driver says, and has no setting for that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Pass on what any other thread writes."""
        return len(text) if threading.current_thread().name.startswith("ray_") else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _gpus(config: Config) -> int:
    return 1 if config.device == "cuda" else 0


# On the nodes --------------------------------------------------------------------------------------------------------------
#
# What is defined inside a function is sent to the node whole: it works without anyk there, and does not wait for torch.


def _board() -> type:
    class Board:
        """Where every run stands, for the driver to read."""

        def __init__(self) -> None:
            self.news: dict[str, tuple[int, int, Any]] = {}

        def write(self, folder: str, step: int, steps: int, line: Any) -> None:
            self.news[folder] = (step, steps, line or self.news.get(folder, (0, 0, None))[2])

        def read(self) -> dict[str, tuple[int, int, Any]]:
            news, self.news = self.news, {}
            return news

    return Board


def _look() -> Callable[[str, str], dict[str, Any]]:
    def look(folder: str, marker: str) -> dict[str, Any]:
        """What a node sees of the folder, whose lock the driver holds, and which versions it has."""
        import os

        if not os.path.exists(marker):
            return {"problem": f"does not see the folder {folder}: choose one on a file system that all nodes share."}
        try:
            from anyk import info
            from anyk.lab.run.run_folder import FolderTaken, Run
        except ImportError as error:
            return {"problem": f'cannot import {error.name}: pip install "anyk[cluster]" there.'}
        try:
            with Run(folder).locked():
                locks = False
        except FolderTaken:
            locks = True
        return {"versions": info.versions(), "locks": locks}

    return look


def _work(
    folder: str,
    marker: str,
    started_in: str,
    command: list[str],
    fields: dict[str, Any],
    imports: Sequence[str],
    board: Any,
) -> Outcome:
    """One run. What it raises is its outcome, and only the death of this process makes Ray start it again."""
    if not os.path.exists(marker):  # a node that joined after the check
        return Outcome(error=f"the node {socket.gethostname()} does not see the folder {os.path.dirname(folder)}")
    with suppress(OSError):
        os.chdir(started_in)  # the data may be named relative to it
    sys.argv[:] = command  # for environment.json: what the user typed, not how Ray starts a process
    stop = threading.Event()
    # Cancelling a task is an interrupt of its process, which here ends a step before it ends the run.
    former = signal.signal(signal.SIGINT, lambda *_: stop.set())

    def report(progress: Progress) -> None:
        board.write.remote(folder, progress.step, progress.steps, progress.line)

    try:
        return attempt(fields, folder, throttled(report, 0.5), stop, LEAVING_SECONDS, imports)
    finally:
        signal.signal(signal.SIGINT, former)
