"""Comparisons and runs on a real Ray cluster of several nodes on this machine, of which one is killed in mid-run."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import anyk
import lab_data
from anyk.lab import engines
from anyk.lab.data import Dataset, load
from anyk.lab.engines import on_ray
from anyk.lab.engines.local import Pool
from anyk.lab.engines.on_ray import Cluster
from anyk.lab.errors import LabError, Stopped
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import train

linux = pytest.mark.skipif(sys.platform != "linux", reason="loopback addresses, /proc and unshare are Linux's")
PATIENCE = 240
#: what hides the driver's folder from a node
ALONE = ["unshare", "--mount"] if hasattr(os, "geteuid") and os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


class Nodes:
    """A Ray cluster, each node in a session of its own. All addresses are loopback ones. The nodes do not see ``unseen``: what
    the driver has there, they do not."""

    def __init__(self) -> None:
        self.network = f"127.{random.randrange(1, 255)}.{random.randrange(256)}"
        with socket.socket() as free:
            free.bind((f"{self.network}.1", 0))
            self.address = f"{self.network}.1:{free.getsockname()[1]}"
        # Not a folder of pytest's: the names of Ray's sockets would become too long.
        self.folder = Path(tempfile.mkdtemp(prefix="anyk-ray-"))
        self.unseen = self.folder / "unseen"
        self.unseen.mkdir()
        hide = f'mount -t tmpfs none "{self.unseen}"'
        self.hidden = subprocess.run([*ALONE, "sh", "-c", hide], capture_output=True, check=False).returncode == 0
        self.prefix = [*ALONE, "sh", "-c", f'{hide} && exec "$@"', "sh"] if self.hidden else []
        self.sessions: list[int] = []
        port = self.address.split(":")[1]
        self.start(0, "--head", "--port", port, "--include-dashboard=False").wait(PATIENCE)

    def start(self, cpus: int, *words: str) -> "subprocess.Popen[bytes]":
        """Begin to start a node; the head sees all, as the driver does."""
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
        prefix = [] if words else self.prefix
        with (self.folder / f"node {number}.txt").open("w") as log:
            process = subprocess.Popen(
                [*prefix, ray, "start", *(words or ["--address", self.address]), *own, *ports, "--disable-usage-stats"],
                env={**environment(), "RAY_worker_niceness": "0"},
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
        for process in in_session(session):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def runs(self) -> dict[str, int]:
        """The runs at work, by name, and the sessions of their nodes."""
        found = {}
        for session in self.sessions:
            for process in in_session(session):
                with suppress(OSError):
                    title = Path(f"/proc/{process}/cmdline").read_bytes().strip(b"\0").decode()
                    if "seed" in title and title.startswith("ray::"):
                        found[title.removeprefix("ray::")] = session
        return found

    def close(self) -> None:
        for session in reversed(self.sessions):
            self.signal(session, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def environment() -> dict[str, str]:
    """For processes that join the cluster: no token of the machine's, and this anyk."""
    return {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(Path(anyk.__file__).parents[1])}


def in_session(session: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == session:
                found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        nodes.add(1)
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def three(nodes: Nodes) -> Nodes:
    """Three nodes, and a head that computes nothing."""
    nodes.add(2)
    return nodes


@pytest.fixture
def unseen(nodes: Nodes, request: pytest.FixtureRequest) -> Path:
    """A folder that only the driver sees."""
    if not nodes.hidden:
        pytest.skip("unshare --mount is not allowed here")
    folder = nodes.unseen / request.node.name[:40]
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points")


def start(here: Path, *words: object, code: str = "", mark: str = "A=B") -> "subprocess.Popen[str]":
    """The command, or a script, in a folder and a process group of its own."""
    program = ["-c", code] if code else ["-m", "anyk"]
    return subprocess.Popen(
        [sys.executable, "-W", "error", *program, *map(str, words)],
        cwd=here,
        env={**environment(), **dict([mark.split("=")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


RUNS = """
import json, sys
from pathlib import Path
from anyk.lab.engines import on_ray
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config

address, out, configs, changes = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
vars(on_ray).update(changes)
try:
    with on_ray.Cluster(address) as cluster:
        for folder, outcome in cluster.results({out / name: Config(**fields) for name, fields in configs.items()}):
            print(folder.name, outcome.error or "ended")
except LabError as error:
    sys.exit(str(error))
"""


def start_runs(nodes: Nodes, here: Path, out: Path, configs: dict[str, Config], **changes: Any) -> "subprocess.Popen[str]":
    """A process in the folder ``here`` that makes these runs; ``changes`` of the constants."""
    fields = json.dumps({name: config.to_json() for name, config in configs.items()})
    return start(here, nodes.address, out, fields, json.dumps(changes), code=RUNS)


def end(driver: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, output and errors."""
    output, errors = driver.communicate(timeout=PATIENCE)
    return driver.returncode, output, errors


def make_runs(*given: Any, **changes: Any) -> tuple[int, str, str]:
    return end(start_runs(*given, **changes))


def wait_for(what: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def substance(folder: Path) -> tuple[Any, ...]:
    """What a run has computed, to the last bit, without the times that it took."""
    result = json.loads((folder / "result.json").read_text())
    metrics = Run(folder).metrics()
    for part in (result, *metrics):
        part.pop("seconds")
    return result, metrics, *(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def answer(out: Path) -> Any:
    """The content of results.json without times and machine."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            left_out = ("seconds", "environment", "command")
            return {key: without(inner) for key, inner in value.items() if key not in left_out}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    return without(json.loads((out / "results.json").read_text()))


# Comparisons ---------------------------------------------------------------------------------------------------------------


SMALL = ("--losses", "lapsum", "--budget", "1", "--seeds", "1", "--batch-size", "32", "--quiet")


@linux
@pytest.mark.full
def test_a_comparison_is_that_of_one_machine_though_a_node_dies_and_another_comes(
    three: Nodes, data: Path, unseen: Path
) -> None:
    """Data and folder are the driver's alone."""
    shutil.copytree(data, unseen / "points")
    words = ("compare", "points", *SMALL, "--epochs", "200")
    local = start(unseen, *words, "--out", "local")
    _, errors = local.communicate(timeout=PATIENCE)
    assert local.returncode == 3, errors  # a budget of 1 decides nothing

    ray = start(unseen, *words, "--out", "ray", "--engine", "ray", "--address", three.address)
    runs = unseen / "ray" / "runs"
    name, session = wait_for(lambda: next(iter(three.runs().items()), None), ray)
    wait_for(lambda: (runs / name / "metrics.jsonl").exists(), ray)
    three.signal(session, signal.SIGKILL)
    assert not (runs / name / "result.json").exists()
    three.add(1)
    back = three.sessions[-1]
    wait_for(lambda: back in three.runs().values(), ray)
    output, errors = ray.communicate(timeout=PATIENCE)
    assert (ray.returncode, errors) == (3, ""), output  # Ray is quiet
    assert answer(unseen / "ray") == answer(unseen / "local")
    for folder in sorted((unseen / "local" / "runs").iterdir()):
        assert substance(runs / folder.name) == substance(folder)
        assert {path.name for path in (runs / folder.name).iterdir()} == {path.name for path in folder.iterdir()}


FROM_PYTHON = """
import sys
import numpy as np
import anyk.lab

random = np.random.default_rng(0)
y = np.arange(240) % 8
x = random.standard_normal((8, 5))[y] + random.standard_normal((240, 5))
options = dict(losses=["lapsum"], budget=1, seeds=1, epochs=20, quiet=True)
report = anyk.lab.compare((x, y), out=sys.argv[1], **options, **dict(word.split("=") for word in sys.argv[2:]))
print(report.verdict[0])
"""


@linux
@pytest.mark.full
def test_two_comparisons_at_a_time_one_of_them_pythons_with_arrays_in_memory(three: Nodes, data: Path, unseen: Path) -> None:
    shutil.copytree(data, unseen / "points")
    words = ("compare", "points", *SMALL, "--epochs", "20")
    python = {name: unseen / name for name in ("local arrays", "ray arrays")}
    for folder in python.values():
        folder.mkdir()
    local = [start(unseen, *words, "--out", "local"), start(python["local arrays"], "out", code=FROM_PYTHON)]
    codes = [end(driver)[0] for driver in local]
    assert codes == [3, 0]
    on_cluster = [
        start(unseen, *words, "--out", "ray", "--engine", "ray", "--address", three.address),
        start(python["ray arrays"], "out", "engine=ray", f"address={three.address}", code=FROM_PYTHON),
    ]
    for driver, code in zip(on_cluster, codes, strict=True):
        ended, output, errors = end(driver)
        assert (ended, errors) == (code, ""), output
    assert answer(unseen / "ray") == answer(unseen / "local")
    assert answer(python["ray arrays"] / "out") == answer(python["local arrays"] / "out")


@linux
@pytest.mark.full
def test_a_table_of_the_paper_is_that_of_one_machine(three: Nodes, tmp_path: Path) -> None:
    words = ("reproduce", "alpha", "--smoke", "--seeds", "1", "--format", "csv", "--quiet")
    tables = [end(start(tmp_path, *words, "--out", "local"))]
    tables.append(end(start(tmp_path, *words, "--out", "ray", "--engine", "ray", "--address", three.address)))
    assert tables[0][0] == 0
    assert tables[0] == tables[1]
    for folder in sorted((tmp_path / "local" / "runs").glob("*/")):
        assert substance(tmp_path / "ray" / "runs" / folder.name)[1:] == substance(folder)[1:]


@linux
@pytest.mark.full
@pytest.mark.parametrize(
    ("own", "signals", "to_group", "code"),
    [
        (False, (signal.SIGINT,), False, 130),
        (False, (signal.SIGTERM, signal.SIGTERM), True, 143),
        (True, (signal.SIGINT,), True, 130),
        (True, (signal.SIGTERM,) * 3, True, 143),
    ],
)
def test_signals_end_the_command_and_its_runs_and_not_a_cluster_that_was_there(
    own: bool, signals: tuple[signal.Signals, ...], to_group: bool, code: int, nodes: Nodes, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("reproduce", "table2", "--smoke", "--seeds", "1", "--out", out, "--engine", "ray", "--quiet")
    mark = f"ANYK_MARK={random.random()}"
    driver = start(data.parent, *words, "--address", "local" if own else nodes.address, mark=mark)
    wait_for(lambda: any(out.glob("runs/*/metrics.jsonl")), driver)
    for number in signals:
        (os.killpg if to_group else os.kill)(driver.pid, number)
        time.sleep(random.uniform(0, 0.2))
    _, errors = driver.communicate(timeout=10)
    assert driver.returncode == code
    assert errors.startswith("Stopped. To go on: anyk reproduce table2")
    assert not list(out.rglob("*.tmp"))
    if len(signals) == 1:
        assert list(out.glob("runs/*/checkpoint.safetensors"))
    if not own:
        wait_until(lambda: not nodes.runs())
        assert all(in_session(session) for session in nodes.sessions[:1])
    else:
        wait_until(lambda: not with_mark(mark))


def with_mark(mark: str) -> list[str]:
    """The processes whose environment has it: all that a command has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# Runs ----------------------------------------------------------------------------------------------------------------------


@linux
def test_runs_need_nothing_of_the_drivers_disk_and_one_that_was_interrupted_goes_on(
    nodes: Nodes, data: Path, unseen: Path
) -> None:
    """One was stopped on this machine, one diverges."""
    shutil.copytree(data, unseen / "points")
    base = Config(data="points", epochs=3, batch_size=32, learning_rate=1e-2, m=8)
    configs = {
        "seed 1": base,
        "seed 2": base.replace(seed=2),
        "bad seed": base.replace(optimizer="sgd", learning_rate=1e30, weight_decay=1.0),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(unseen)
        with Pool(2) as pool:
            pool.run({Path("local") / name: config for name, config in configs.items()})
        stopped = iter([False] * 7 + [True])
        with pytest.raises(Stopped, match="stopped at step 7"):
            train(base, "ray/seed 1", should_stop=lambda: next(stopped))
    kept = Run(unseen / "ray" / "seed 1").metrics()
    assert kept
    code, output, errors = make_runs(nodes, unseen, Path("ray"), configs)
    assert (code, errors) == (0, "")
    assert Run(unseen / "ray" / "seed 1").metrics()[: len(kept)] == kept  # with the times that they took
    lines = sorted(line.partition(" the training")[0] for line in output.splitlines())
    assert lines == ["bad seed", "seed 1 ended", "seed 2 ended"]
    for name in ("seed 1", "seed 2"):
        assert substance(unseen / "ray" / name) == substance(unseen / "local" / name)
    assert Run(unseen / "ray" / "bad seed").error() == Run(unseen / "local" / "bad seed").error()


@linux
@pytest.mark.full
def test_a_run_whose_process_dies_again_and_again_is_given_up(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    (data.parent / "my_deadly_model.py").write_text("import os\ndef make(shape, classes):\n    os._exit(1)\n")
    configs = {"seed": Config(data=data.name, epochs=1, model="my_deadly_model:make")}
    code, output, errors = make_runs(nodes, data.parent, tmp_path, configs, TRIES=2)
    assert (code, errors) == (0, "")
    assert output.startswith("seed the nodes of this run died 2 times, at last WorkerCrashedError")
    assert Run(tmp_path / "seed").error() == output.removeprefix("seed ").strip()


@linux
@pytest.mark.full
def test_two_drivers_share_a_cluster_and_the_nodes_find_a_model_of_the_working_folder(
    nodes: Nodes, data: Path, tmp_path: Path
) -> None:
    code = "from torch import nn\ndef make(shape, classes):\n    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 12))\n"
    (data.parent / "my_ray_models.py").write_text(code)
    config = Config(data=data.name, epochs=1, model="my_ray_models:make")
    drivers = [start_runs(nodes, data.parent, tmp_path / out, {"one": config}) for out in ("first", "second")]
    for driver in drivers:
        assert end(driver) == (0, "one ended\n", "")
    assert substance(tmp_path / "first" / "one") == substance(tmp_path / "second" / "one")
    assert (Run(tmp_path / "first" / "one").result() or {})["parameters"] == 17 * 24 + 25 * 12


@linux
@pytest.mark.full
def test_data_too_large_for_the_object_store_are_read_from_their_path(
    nodes: Nodes, data: Path, tmp_path: Path, unseen: Path
) -> None:
    config = Config(data=os.fspath(data), epochs=1)
    assert make_runs(nodes, tmp_path, tmp_path / "runs", {"one": config}, STORE_SHARE=0.0) == (0, "one ended\n", "")

    shutil.copytree(data, unseen / "points")
    config = config.replace(data=os.fspath(unseen / "points"))
    code, output, errors = make_runs(nodes, tmp_path, tmp_path / "runs", {"two": config}, STORE_SHARE=0.0)
    assert (code, output) == (1, "")
    assert errors.startswith(f"the node {socket.gethostname()} ({nodes.network}.")
    assert f"cannot read the data: {unseen / 'points'} does not exist" in errors


# The driver ----------------------------------------------------------------------------------------------------------------


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LabError, match=r'pip install "anyk\[cluster\]"'):
        engines.make("ray", "127.0.0.1:1", 0)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense", "should be HOST:PORT"),
        ("ray://127.0.0.1:1", "should be HOST:PORT"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_bad_addresses(address: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LabError, match=message):
        engines.make("ray", address, 0)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(LabError, match=message):
        engines.make("ray", None, 0)


def test_bad_engines_end_a_command_before_the_data_are_read(anyk: Any) -> None:
    assert anyk("compare", "nothing", "--address", "127.0.0.1:1")[::2] == (
        2,
        "anyk: address is for the engine ray, but the engine is local and the address 127.0.0.1:1: leave one out.\n",
    )
    for command in ("compare", "reproduce"):
        code, _, errors = anyk(command, "table2", "--engine", "ray", "--address", "127.0.0.1:1")
        assert code == 2
        assert errors.startswith("anyk: no Ray cluster answers at 127.0.0.1:1")


def test_the_cluster_chooses_the_gpu(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"device should be cuda .* cuda:1 \(one\)"):
        Cluster("local").run({tmp_path / "one": Config(device="cuda:1")})


def nodes_of(*resources: dict[str, float]) -> list[dict[str, Any]]:
    return [{"Resources": each} for each in resources]


def test_the_room_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_nodes", lambda self: nodes_of({"CPU": 4.0}, {"CPU": 3.0, "GPU": 2.0}))
    assert Cluster("local").room(Config()) == 7
    assert Cluster("local").room(Config(threads=2)) == 3
    assert Cluster("local").room(Config(device="cuda")) == 2
    assert Cluster("local", jobs=2).room(Config()) == 2
    assert Cluster("local").room(Config(threads=8)) == 1  # which waits for a node


@pytest.mark.parametrize("kind", ["embeddings", "sequences", "images"])
def test_a_data_set_is_the_same_after_it_was_sent(kind: str, data: Path, tmp_path: Path) -> None:
    if kind == "embeddings":
        dataset = load(str(data))
    elif kind == "images":
        dataset = lab_data.image_set()
    else:
        (tmp_path / "lines.txt").write_text("\n".join("a b c d e f g a c b" for _ in range(30)))
        dataset = load(f"sequences:{tmp_path / 'lines.txt'}")
    packed = on_ray._pack(dataset)
    for array in packed.arrays:
        array.setflags(write=False)  # as it is in the object store
    sent = on_ray._unpack(packed)
    assert flat(sent) == flat(dataset)
    assert len(packed.rest) < 10_000  # the tensors are apart


def flat(dataset: Dataset) -> Any:
    """Comparable: without maps."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.shape, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return {name: plain(inner) for name, inner in vars(value).items()} if hasattr(value, "parts") else value

    found = {name: plain(value) for name, value in vars(dataset).items()}
    for split in ("train", "test"):
        if found[split] is not None:
            found[split] = {name: value for name, value in found[split].items() if name not in ("maps", "starts", "arrays")}
    return found
