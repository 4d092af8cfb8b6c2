"""Many runs on the nodes of a Ray cluster.

Ray decides where a run is computed. The node works in a temporary folder of its own and sends what it has written to this
process, the driver, which alone writes into the run folders: the nodes need not share a file system, and a node that was
believed dead and was not can do no harm. A run whose node died starts again elsewhere from the last checkpoint that came.

The data are read by the driver and sent, once to each node, through Ray's object store, where all runs of the node share them;
sets too large for that are read by every node from their path.
"""

import importlib.util
import io
import itertools
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

import torch
from torch import Tensor

from anyk import info
from anyk.lab import stopping
from anyk.lab.data import Dataset
from anyk.lab.engines.engine import Engine, Outcome, attempt, throttled
from anyk.lab.errors import LabError, Stopped, explain, first_line
from anyk.lab.run import loss_names
from anyk.lab.run.batches import read_data
from anyk.lab.run.config import Config, DataFields, Setting
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import OnProgress, Progress
from anyk.lab.warn_once import forward_to, warn_once

#: how often a run is started whose node, or process, dies
TRIES = 5
#: seconds for another process of this machine to leave a run's folder
LEAVING_SECONDS = 10.0
#: seconds for the runs to send their checkpoints after they were told to stop, and to end after they were killed
STOPPING_SECONDS, KILLING_SECONDS = 5.0, 1.0
#: seconds for a node to answer at the start, which includes importing torch
ANSWER_SECONDS = 120.0
#: seconds for a Ray that is started here, and for its end
STARTING_SECONDS, ENDING_SECONDS = 120.0, 10.0
#: the versions that every node must share
SAME = ("anyk", "torch", "numpy")
#: data go through the object store if they take at most this part of the smallest one
STORE_SHARE = 0.25
#: the word for a Ray of one's own, for which RAY_ADDRESS is not asked
OWN = "local"


class _DataNotThere(LabError):
    """A node does not have the data under their path."""


class _Work(NamedTuple):
    """A run at work, and what makes it again."""

    number: int
    folder: Path
    config: Config
    lock: ExitStack


class Cluster(Engine):
    """Runs as tasks of a Ray cluster, each with its CPUs and, on ``cuda``, one GPU.

    >>> with Cluster("10.0.0.1:6379") as cluster:  # doctest: +SKIP
    ...     outcomes = cluster.run({Path("runs/a"): Config(seed=1), Path("runs/b"): Config(seed=2)})

    Args:
        address: HOST:PORT of the cluster's head; this process must run on one of its nodes. None: what RAY_ADDRESS says, or
            else a Ray on this machine that is started for this and ends with it, as ``"local"`` does in any case.
        jobs: runs at a time; 0: as many as the cluster has room for.
        on_progress: called with a run's folder and where it stands.
        settings: as :class:`~anyk.lab.engines.engine.Engine` takes them.
    """

    def __init__(
        self,
        address: str | None = None,
        jobs: int = 0,
        on_progress: OnProgress = lambda folder, progress: None,
        **settings: Any,
    ) -> None:
        super().__init__(on_progress, **settings)
        check(address)
        self._address = address
        self._jobs = jobs
        self._running: dict[Any, _Work] = {}  # by task
        self._over: list[tuple[Path, Outcome]] = []
        self._numbers = itertools.count()
        self._deaths: Counter[Path] = Counter()
        self._data: dict[tuple[Any, ...], Any] = {}
        self._asked_for: set[tuple[int, int]] = set()
        self._news: Any = None
        self._deadline = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as leave:
            self._ray = leave.enter_context(_joined(self._address))
            leave.enter_context(redirect_stdout(_WithoutRay(sys.stdout)))
            # On this node: it lives as long as there is somebody to read it.
            here = self._on(self._ray.get_runtime_context().get_node_id())
            lasting = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
            self._board = self._ray.remote(_board()).options(**lasting).remote()
            self._news = self._board.read.remote()
            self._check_nodes()
            self._ray.wait([self._news], timeout=ANSWER_SECONDS)  # so that no run ends before its process has started
            leave.enter_context(stopping.asked_first())
            self._leave = leave.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._leave:
            if kind is not None:
                self._waiting.clear()
                self.stop()
            while self._waiting or self._running:
                self._turn() if kind is None else self._wait()
            if self._news is not None:  # a question that is open when it leaves, Ray would complain about
                self._ray.wait([self._news], timeout=KILLING_SECONDS)

    def room(self, config: Setting) -> int:
        places = [
            min(node["Resources"]["CPU"] // config.threads, node["Resources"].get("GPU", 0) if _gpus(config) else 1e9)
            for node in self._nodes()
        ]
        return max(1, min(int(sum(places)), self._jobs or 10**9))

    def stop(self) -> None:
        super().stop()
        self._deadline = time.monotonic() + STOPPING_SECONDS
        self._cancel(force=False)  # an interrupt for a task at work; one that waits is not begun

    def _cancel(self, force: bool) -> None:
        for task in list(self._running):
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(task, force=force, recursive=False)

    def _submit(self, folder: Path, config: Config) -> None:
        if config.device.startswith("cuda:"):
            raise LabError(
                f"device should be cuda on a cluster, which chooses the GPU, but is {config.device} ({folder.name})."
            )
        super()._submit(folder, config)

    def _has_room(self) -> bool:
        # Some more than there is room for: Ray starts the next by itself, and a cluster that grows by demand sees some.
        most = self._jobs or max(8, 2 * int(self._ray.cluster_resources().get("CPU", 0)))
        return len(self._running) < most

    def _start(self, folder: Path, config: Config) -> None:
        self._note_if_there_is_no_room(config.threads, _gpus(config))
        with ExitStack() as lock:
            try:
                lock.enter_context(Run(folder).locked(LEAVING_SECONDS))
                data = self._data_of(config)
            except _DataNotThere:  # which is so for all runs
                raise
            except LabError as error:
                self._over.append((folder, Outcome(error=str(error))))
                return
            work = _Work(next(self._numbers), folder, config, lock.pop_all())
        order = _Order(
            number=work.number,
            folder=os.fspath(folder),
            content=Run(folder).content(),
            fields=config.to_json(),
            imports=tuple(loss_names.imported),
            versions=info.versions(),
            started_in=os.getcwd(),
            command=tuple(sys.argv),
        )
        task = self._ray.remote(_work).options(
            name=folder.name,
            num_cpus=config.threads,
            num_gpus=_gpus(config),
            max_retries=0,  # here, where the last checkpoint is known
            scheduling_strategy="SPREAD",
        )
        self._running[task.remote(order, data, self._board)] = work

    def _wait(self) -> list[tuple[Path, Outcome]]:
        if self._stopping and time.monotonic() > self._deadline:
            self._cancel(force=True)
            if time.monotonic() > self._deadline + KILLING_SECONDS:  # the cluster itself does not answer
                for work in self._running.values():
                    self._over.append((work.folder, Outcome()))
                    work.lock.close()
                self._running.clear()
        # In short turns, so that an interrupt is seen between them.
        done, _ = self._ray.wait(list(self._running), timeout=0.2) if self._running else ([], [])
        self._read_news()
        for task in done:
            work = self._running.pop(task)
            with work.lock:
                outcome = self._outcome(task, work)
            if outcome is not None:
                self._over.append((work.folder, outcome))
        over, self._over = self._over, []
        for folder, outcome in over:
            if outcome.result is not None:
                self._on_progress(folder, Progress(1, 1))
        return over

    def _outcome(self, task: Any, work: _Work) -> Outcome | None:
        """How a task has ended; None, if its run is started again."""
        errors = self._ray.exceptions
        try:
            outcome, content, notes = self._ray.get(task)
        except errors.TaskCancelledError:
            return Outcome()
        except errors.RayTaskError as error:
            outcome, content, notes = Outcome(error=f"the node could not make this run: {first_line(error.cause)}"), {}, ()
        except errors.RayError as error:
            if self._stopping:
                return Outcome()
            self._deaths[work.folder] += 1
            if self._deaths[work.folder] < TRIES:
                self._waiting.appendleft((work.folder, work.config))
                return None
            why = f"{type(error).__name__}: {first_line(error)}"
            outcome, content, notes = Outcome(error=f"the nodes of this run died {TRIES} times, at last {why}"), {}, ()
        for note in notes:
            warn_once(note)
        try:
            Run(work.folder).write(content)
            if outcome.error is not None:
                Run(work.folder).fail(outcome.error)
        except (OSError, LabError) as error:
            return Outcome(error=explain(error))
        return outcome

    def _read_news(self) -> None:
        """Take in what the runs have sent, as far as it has come."""
        if self._news is not None:
            if not self._ray.wait([self._news], timeout=0)[0]:
                return
            with suppress(self._ray.exceptions.RayError):  # it is started again, and the runs send the next
                news = self._ray.get(self._news)
                for work in self._running.values():
                    if work.number in news:
                        where, content = news[work.number]
                        with suppress(OSError, LabError):  # if it lasts, the end of the run meets it too
                            Run(work.folder).write(content)
                        self._on_progress(work.folder, Progress(*where))
        self._news = self._board.read.remote() if self._running else None

    # The data --------------------------------------------------------------------------------------------------------------

    def _data_of(self, config: Config) -> Any:
        """What a run is given for its data: the set, as a reference into the object store, or its fingerprint."""
        key = tuple(getattr(config, name) for name in DataFields.__dataclass_fields__)
        if key not in self._data:
            dataset = read_data(config)
            packed = _pack(dataset)
            smallest = min(node["Resources"].get("object_store_memory", 0) for node in self._ray.nodes() if node["Alive"])
            if sum(array.nbytes for array in packed.arrays) <= STORE_SHARE * smallest:
                self._data[key] = self._ray.put(packed)
            else:
                self._check_data(config, dataset.fingerprint)
                self._data[key] = dataset.fingerprint
        return self._data[key]

    def _check_data(self, config: Config, fingerprint: str) -> None:
        """Ask every node whether it has the same data: before hours of training, not after."""
        for name, seen in self._ask(_find_data, fingerprint, config.to_json(), os.getcwd()):
            if isinstance(seen, str):
                raise _DataNotThere(
                    f"the node {name} {seen} The data are too large for Ray's object store: every node should see them under "
                    "the same path."
                )

    # The nodes -------------------------------------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Ask every node that can compute for what would spoil the runs."""
        own = info.versions()
        for name, seen in self._ask(_look(), os.getcwd(), list(loss_names.imported), seconds=ANSWER_SECONDS):
            problem = seen if isinstance(seen, str) else _difference(own, seen)
            if problem:
                raise LabError(f"the node {name} {problem}")

    def _ask(self, question: Callable[..., Any], *arguments: Any, seconds: float = 1e9) -> Iterator[tuple[str, Any]]:
        """What a function returns on each node, with the node's name. A node that dies meanwhile is passed over."""
        asked = {}
        for node in self._nodes():
            there = self._ray.remote(question).options(num_cpus=0, max_retries=0, scheduling_strategy=self._on(node["NodeID"]))
            asked[there.remote(*arguments)] = node
        deadline = time.monotonic() + seconds
        while asked:
            if stopping.requested():
                raise Stopped
            done, _ = self._ray.wait(list(asked), timeout=0.2)
            for task in done:
                name = _name(asked.pop(task))
                try:
                    yield name, self._ray.get(task)
                except self._ray.exceptions.RayError as error:
                    warn_once(f"The node {name} gave no answer: {first_line(error)}")
            if asked and time.monotonic() > deadline:
                raise LabError(f"the node {_name(next(iter(asked.values())))} did not answer within {seconds:.0f} s.")

    def _note_if_there_is_no_room(self, threads: int, gpus: int) -> None:
        if (threads, gpus) in self._asked_for:
            return
        self._asked_for.add((threads, gpus))
        rooms = [(node["Resources"]["CPU"], node["Resources"].get("GPU", 0)) for node in self._nodes()]
        if not any(room[0] >= threads and room[1] >= gpus for room in rooms):
            warn_once(f"No node has {threads} CPUs and {gpus} GPUs: the runs that need them wait until one joins.")

    def _nodes(self) -> list[dict[str, Any]]:
        """The nodes that live and have CPUs to give."""
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]

    def _on(self, node: str) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)


# The driver ----------------------------------------------------------------------------------------------------------------


def check(address: str | None) -> None:
    """Raise if there is no Ray here, or nobody answers at the address."""
    if importlib.util.find_spec("ray") is None:
        raise LabError('the engine ray needs Ray: pip install "anyk[cluster]".')
    _find(address)


def _find(address: str | None) -> str:
    """The address of a cluster that answers; "local" if one is to be started."""
    source = "address" if address is not None else "RAY_ADDRESS"
    address = address if address is not None else os.environ.get("RAY_ADDRESS") or OWN
    if address == OWN:
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or "/" in address:
        raise LabError(f"{source} should be HOST:PORT as `ray start --head` tells it, but is {address!r}.")
    try:  # Ray itself would try for minutes, loudly
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise LabError(f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`.") from None
    return address


@contextmanager
def _joined(address: str | None) -> Iterator[Any]:
    """Ray, with the cluster joined as a quiet driver; one that is started for it goes down at the end."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # a notebook has joined a cluster, and goes on with it afterwards
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody outside of the cluster
    address = _find(address)
    with ExitStack() as leave:
        if address == OWN:
            address = leave.enter_context(_host())
        ray = importlib.import_module("ray")
        former = signal.getsignal(signal.SIGTERM)
        leave.callback(ray.shutdown)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
            hint = "" if "RAY_AUTH_MODE" in os.environ else " (if it wants a token: RAY_AUTH_MODE=token)"
            raise LabError(f"the Ray cluster at {address} cannot be joined: {first_line(error)}{hint}") from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, former)  # which Ray has replaced
        yield ray


@contextmanager
def _host() -> Iterator[str]:
    """The address of a Ray on this machine, which ends with this process: see ray_host.py."""
    if "RAY_AUTH_MODE" not in os.environ:
        # Whoever reaches Ray's ports can run code. Ray reads these when it is imported: later is too late for a token.
        with_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ.update({"RAY_AUTH_MODE": "disabled"} if "ray" in sys.modules else with_token)
    # Runs have the priority that they have in the local pool; Ray would lower it.
    environment = {"RAY_worker_niceness": "0", **os.environ}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, os.fspath(Path(__file__).with_name("ray_host.py"))],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(STARTING_SECONDS, process.kill)
        late.start()
        try:
            answer = process.stdout.readline().rstrip("\n")
            late.cancel()
            if not answer or answer.startswith(" "):
                raise LabError(f"no Ray could be started on this machine: {answer.strip() or 'it gave no address'}")
            yield answer
        finally:
            late.cancel()
            process.stdin.close()
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


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


def _gpus(config: Setting) -> int:
    return 1 if config.device == "cuda" else 0


# What is sent --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """A data set, with the memory of its tensors apart from all else, as Ray shares it between the processes of a node."""

    rest: bytes
    arrays: tuple[Any, ...]


def _pack(dataset: Dataset) -> _Packed:
    tensors: dict[int, Tensor] = {}
    places: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            place = places.setdefault(id(value), len(places))  # two splits may share one stream
            tensors[place] = value
            return place, value.dtype, tuple(value.shape)

    # Without what they hold of the files, and what they have computed for themselves.
    train, test = replace(dataset.train, maps=()), dataset.test and replace(dataset.test, maps=())
    file = io.BytesIO()
    Pickler(file).dump(replace(dataset, train=train, test=test))
    arrays = (tensors[place].contiguous().flatten().view(torch.uint8).numpy() for place in range(len(tensors)))
    return _Packed(file.getvalue(), tuple(arrays))


def _unpack(packed: _Packed) -> Dataset:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key: Any) -> Tensor:
            place, dtype, shape = key
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes
                return torch.from_numpy(packed.arrays[place]).view(dtype).view(shape)

    found: Dataset = Unpickler(io.BytesIO(packed.rest)).load()
    return found


@dataclass(frozen=True)
class _Order:
    """One run, as a node is told of it."""

    number: int
    folder: str
    content: Mapping[str, bytes]
    """what the folder holds"""
    fields: dict[str, Any]
    imports: Sequence[str]
    versions: Mapping[str, str | None]
    started_in: str
    command: Sequence[str]


# On the nodes --------------------------------------------------------------------------------------------------------------
#
# What is defined inside a function is sent to the node whole: it works without anyk there, and does not wait for torch.


def _board() -> type:
    class Board:
        """Where every run stands and what it has written, for the driver to read."""

        def __init__(self) -> None:
            self.news: dict[int, tuple[Any, dict[str, bytes]]] = {}

        def write(self, number: int, where: Any, content: dict[str, bytes]) -> None:
            before = self.news.get(number, (None, {}))[1]
            self.news[number] = (where, {**before, **content})

        def read(self) -> dict[int, tuple[Any, dict[str, bytes]]]:
            news, self.news = self.news, {}
            return news

    return Board


def _look() -> Callable[[str, list[str]], Any]:
    def look(started_in: str, imports: list[str]) -> Any:
        """The versions that a node has, or what it lacks."""
        import os
        from contextlib import suppress

        with suppress(OSError):
            os.chdir(started_in)
        try:
            from anyk import info
            from anyk.lab.errors import LabError
            from anyk.lab.run import loss_names
        except ImportError as error:
            return f'cannot import {error.name}: pip install "anyk[cluster]" there.'
        try:
            loss_names.import_modules(imports)
        except LabError as error:
            return f"lacks something: {error}"
        return info.versions()

    return look


def _difference(own: Mapping[str, str | None], seen: Mapping[str, str | None]) -> str:
    """What is wrong with a node's versions; "" if nothing is."""
    for package in SAME:
        if seen.get(package) != own[package]:
            return f"has {package} {seen.get(package)}, but the driver {own[package]}: install the same on all nodes."
    return ""


def _find_data(fingerprint: str, fields: dict[str, Any], started_in: str) -> Dataset | str | None:
    """Whether a node has these data: None, or what is wrong."""
    found = _read_there(Config.from_json(fields), fingerprint, started_in)
    return found if isinstance(found, str) else None


def _read_there(config: Config, fingerprint: str, started_in: str) -> Dataset | str:
    """The data on this node, or what is wrong with them."""
    with suppress(OSError):
        os.chdir(started_in)  # they may be named relative to it
    try:
        dataset = read_data(config)
    except (LabError, OSError) as error:
        return f"cannot read the data: {explain(error)}"
    return dataset if dataset.fingerprint == fingerprint else f"has other data under {config.data}."


def _work(order: _Order, data: _Packed | str, board: Any) -> tuple[Outcome, dict[str, bytes], list[str]]:
    """One run: how it ended, what is in its folder now, and warnings. Only the death of this process makes it start again."""
    import ray

    config = Config.from_json(order.fields)
    problem = _difference(order.versions, info.versions())  # of a node that joined after the check
    with suppress(OSError):
        os.chdir(order.started_in)  # a model of the user's may be there
    dataset = _unpack(data) if not isinstance(data, str) else _read_there(config, data, order.started_in)
    if problem or isinstance(dataset, str):
        return Outcome(error=f"the node {socket.gethostname()} {problem or dataset}"), {}, []
    sys.argv[:] = order.command  # for environment.json: what the user typed, not how Ray starts a process
    notes: list[str] = []
    forward_to(notes.append)
    stop = threading.Event()
    # Cancelling a task is an interrupt of its process, which here ends a step before it ends the run.
    former = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        with tempfile.TemporaryDirectory(prefix="anyk-run-") as place:
            run, sending, sent = Run(place), None, None

            def report(progress: Progress) -> None:
                """Send where the run stands, and what is new in its folder; nothing while the former is still on its way."""
                nonlocal sending, sent
                if sending is not None and not ray.wait([sending], timeout=0)[0]:
                    return
                saved = Path(place, "checkpoint.safetensors")
                state = saved.stat().st_mtime_ns if saved.exists() else 0
                content = run.content() if state != sent else run.content(["metrics.jsonl"] if progress.line else [])
                # Plain values: the process of the board need not import torch.
                where = progress.step, progress.steps, progress.line
                sending, sent = board.write.remote(order.number, where, content), state

            run.write(order.content)
            outcome = attempt(order.fields, place, throttled(report, 0.5), stop, 0.0, order.imports, dataset)
            if outcome.error is not None:
                outcome = replace(outcome, error=outcome.error.replace(place, order.folder))
            return outcome, run.content(), notes
    finally:
        signal.signal(signal.SIGINT, former)
