"""Many runs on a real Ray cluster of several nodes on this machine, of which one is killed in mid-run."""

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import anyk
import lab_data
from anyk.lab.engines.local import Pool
from anyk.lab.engines.on_ray import Cluster
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run

linux = pytest.mark.skipif(sys.platform != "linux", reason="loopback addresses, inotify and /proc/locks are Linux's")
PATIENCE = 120


class Nodes:
    """A Ray cluster, each node in a session of its own. All addresses are loopback ones."""

    def __init__(self) -> None:
        self.network = f"127.{random.randrange(1, 255)}.{random.randrange(256)}"
        with socket.socket() as free:
            free.bind((f"{self.network}.1", 0))
            self.address = f"{self.network}.1:{free.getsockname()[1]}"
        # Not a folder of pytest's: the names of Ray's sockets would become too long.
        self.folder = Path(tempfile.mkdtemp(prefix="anyk-ray-"))
        self.sessions: list[int] = []
        port = self.address.split(":")[1]
        self.start(0, "--head", "--port", port, "--include-dashboard=False").wait(PATIENCE)

    def start(self, cpus: int, *words: str) -> "subprocess.Popen[bytes]":
        """Begin to start a node."""
        ray = shutil.which("ray", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "ray"
        number = len(self.sessions) + 1
        own = [
            "--node-ip-address",
            f"{self.network}.{number}",
            "--num-cpus",
            str(cpus),
            "--temp-dir",
            f"{self.folder}/{number}",
        ]
        ports = ["--object-store-memory", "100000000", "--min-worker-port", "0", "--max-worker-port", "0"]
        with (self.folder / f"node {number}.txt").open("w") as log:
            process = subprocess.Popen(
                [ray, "start", *(words or ["--address", self.address]), *own, *ports, "--disable-usage-stats"],
                env={**os.environ, "RAY_worker_niceness": "0", "PYTHONPATH": str(Path(anyk.__file__).parents[1])},
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions.append(process.pid)
        return process

    def add(self, count: int) -> None:
        for process in [self.start(1) for _ in range(count)]:
            assert process.wait(PATIENCE) == 0, [log.read_text() for log in self.folder.glob("*.txt")]

    def signal(self, session: int, number: signal.Signals) -> None:
        """To every process of a node, at once."""
        assert session in self.sessions
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(process.name)) == session:
                    os.kill(int(process.name), number)

    def close(self) -> None:
        for session in reversed(self.sessions):
            self.signal(session, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        nodes.add(3)
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points")


class Finishes:
    """Counts how often a result.json came into being in each folder, as the kernel saw it."""

    MOVED_TO = 0x80

    def __init__(self, folders: list[Path]) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self.libc.inotify_init1(os.O_NONBLOCK)
        assert self.descriptor >= 0
        self.names = {}
        for folder in folders:
            folder.mkdir(parents=True)
            self.names[self.libc.inotify_add_watch(self.descriptor, os.fsencode(folder), self.MOVED_TO)] = folder.name

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        while True:
            try:
                events = os.read(self.descriptor, 1 << 20)
            except BlockingIOError:
                os.close(self.descriptor)
                return found
            while events:
                watch, _, _, length = struct.unpack("iIII", events[:16])
                found[self.names[watch]] += events[16 : 16 + length].rstrip(b"\0") == b"result.json"
                events = events[16 + length :]


DRIVER = """
import json, sys
from pathlib import Path
from anyk.lab.engines.on_ray import Cluster
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run

address, out, configs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
try:
    with Run(out).locked(), Cluster(address, out, on_note=print) as cluster:
        for folder, outcome in cluster.results({out / name: Config(**fields) for name, fields in configs.items()}):
            print(folder.name, outcome.error or "ended")
except KeyboardInterrupt:
    sys.exit(130)
except LabError as error:
    sys.exit(str(error))
"""


def start(configs: dict[str, Config], out: Path, address: str, here: Path) -> "subprocess.Popen[str]":
    """A process in the folder ``here`` that makes these runs; it prints a line for each run that has ended."""
    fields = json.dumps({name: config.to_json() for name, config in configs.items()})
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", DRIVER, address, str(out), fields],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(Path(anyk.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(what: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def lines(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def holder(folder: Path) -> int | None:
    """The process that holds the folder's lock."""
    inode = str((folder / ".lock").stat().st_ino) if (folder / ".lock").exists() else None
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].split(":")[2] == inode:
            return int(words[4])
    return None


def at_work(folders: list[Path], kept: dict[str, list[str]]) -> tuple[Path, int] | None:
    """A run that is at work and some evaluations past those that were kept, and the session of its node."""
    for folder in folders:
        if len(lines(folder)) > len(kept.get(folder.name, [])) + 5 and (process := holder(folder)) is not None:
            return folder, os.getsid(process)
    return None


def substance(folder: Path) -> tuple[Any, ...]:
    """What a run has computed, to the last bit, without the times that it took."""
    result = json.loads((folder / "result.json").read_text())
    metrics = [json.loads(line) for line in lines(folder)]
    for part in (result, *metrics):
        part.pop("seconds")
    return result, metrics, (folder / "model.safetensors").read_bytes()


@linux
@pytest.mark.full
def test_runs_survive_an_interrupt_and_the_death_of_a_node(
    nodes: Nodes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing is run to its end twice, and the bits are those of the local engine."""
    out, local = tmp_path / "cluster", tmp_path / "local"
    base = Config(data=data.name, epochs=250, batch_size=32, learning_rate=1e-2, m=8)  # the data relative to the folder
    good = {f"seed {seed}": base.replace(seed=seed) for seed in range(3)}
    configs = {"bad": base.replace(optimizer="sgd", learning_rate=1e30, weight_decay=1.0), **good}
    folders = [out / name for name in good]
    finishes = Finishes([*folders, out / "bad"])

    # Ctrl-C saves what is at work.
    driver = start(configs, out, nodes.address, data.parent)
    wait_for(lambda: at_work(folders[:-1], {}), driver)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=PATIENCE)
    assert (driver.returncode, errors) == (130, "")  # Ray is quiet
    assert not list(out.glob(".cluster-*"))
    saved = [folder for folder in folders if (folder / "checkpoint.safetensors").exists()]
    assert saved
    kept = {folder.name: lines(folder) for folder in saved}

    # The same goes on. The node of a run that has passed its checkpoint is killed. Another run's folder is still held, as by a
    # process on a node that the cluster believes dead: its task waits, whatever the others do, and then goes on.
    *free, taken = folders
    with Run(taken).locked():
        driver = start(configs, out, nodes.address, data.parent)
        killed, node = wait_for(lambda: at_work([folder for folder in free if folder in saved], kept), driver)
        nodes.signal(node, signal.SIGKILL)
        assert not (killed / "result.json").exists()
        wait_for(lambda: all((folder / "result.json").exists() for folder in free), driver)
        assert lines(taken) == kept.get(taken.name, [])
        assert driver.poll() is None
    ended, errors = driver.communicate(timeout=PATIENCE)
    assert (driver.returncode, errors) == (0, "")
    assert sorted(line[:12] for line in ended.splitlines()) == ["bad the trai", *(f"{name} ended" for name in good)]

    assert finishes.counts() == Counter({"bad": 0, **dict.fromkeys(good, 1)})
    assert "lower the learning rate" in (Run(out / "bad").error() or "")
    # What was evaluated before the interrupt has kept its times: the later attempts went on from there.
    for folder in saved:
        assert lines(folder)[: len(kept[folder.name])] == kept[folder.name]
    monkeypatch.chdir(data.parent)
    with Pool(2) as pool:
        pool.run({local / name: config for name, config in good.items()})
    for folder in folders:
        assert substance(folder) == substance(local / folder.name)


@linux
def test_nodes_find_a_model_of_the_working_folder(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    code = "from torch import nn\ndef make(shape, classes):\n    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 12))\n"
    (data.parent / "my_ray_models.py").write_text(code)
    config = Config(data=data.name, epochs=1, model="my_ray_models:make")
    driver = start({"one": config}, tmp_path / "runs", nodes.address, data.parent)
    _, errors = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, errors
    assert (Run(tmp_path / "runs" / "one").result() or {})["parameters"] == 17 * 24 + 25 * 12


@linux
def test_a_node_that_does_not_see_the_folder_is_named(nodes: Nodes, data: Path) -> None:
    """Under /proc/self/cwd every process sees another folder."""
    config = Config(data=data.name, epochs=1)
    driver = start({"one": config}, Path("/proc/self/cwd/unseen"), nodes.address, data.parent)
    _, errors = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 1, errors
    assert f"the node {socket.gethostname()} ({nodes.network}." in errors
    assert "/proc/self/cwd/unseen" in errors
    assert [path.name for path in (data.parent / "unseen").iterdir()] == [".lock"]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LabError, match=r'pip install "anyk\[cluster\]"'):
        Cluster("127.0.0.1:1", tmp_path)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense", "address should be HOST:PORT"),
        ("ray://127.0.0.1:1", "address should be HOST:PORT"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_bad_addresses(address: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=message), Cluster(address, tmp_path):
        pass


def test_the_cluster_chooses_the_gpu(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"device should be cuda .* cuda:1 \(one\)"):
        Cluster("127.0.0.1:1", tmp_path).run({tmp_path / "one": Config(device="cuda:1")})
