"""Many runs on the nodes of a Ray cluster.

Ray decides where a run is computed. The node works in a temporary folder of its own; what it has written comes back through the
object store, and the driver alone writes into the run folders: the nodes need not share a file system. The prepared data go to each
node through the object store, once.
"""

import importlib.util
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyk.lab import files
from anyk.lab.config import RunConfig
from anyk.lab.engines import Engine, Outcome, Work, ended
from anyk.lab.errors import LabError, first_line

TRIES = 3
"""how often a run is started whose node dies"""
STOPPING_SECONDS = 15.0
"""for the runs to send their checkpoints after they were told to stop"""
ASK_SECONDS = 1.0
"""how often a run asks whether it should stop"""
MOST_BYTES = 4 << 30
"""of data that go through the object store; larger sets need a path that all nodes have"""
LAST = ("model.safetensors", "test.safetensors", "result.json")
"""what is written last, in this order: its presence says that the rest is there"""


class Cluster(Engine):
    """Runs as tasks of a Ray cluster, each with a CPU and, on "cuda", one GPU.

    Args:
        work: what makes a run; of a module that the nodes have.
        device: where the runs compute.
        jobs: runs at a time; 0: as many as there is room for.
        address: HOST:PORT; None: RAY_ADDRESS, or a Ray on this machine.
        imports: modules that each run imports first.
    """

    def __init__(
        self, work: Work, *, device: str = "cpu", jobs: int = 0, address: str | None = None, imports: Sequence[str] = ()
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LabError('--engine ray needs Ray: pip install "anyk[cluster]"')
        import ray

        self.ray, self.work, self.device, self.imports = ray, work, device, tuple(imports)
        self._own = not ray.is_initialized()
        if self._own:
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            found = address or os.environ.get("RAY_ADDRESS")
            try:
                ray.init(address=found, log_to_driver=False, logging_level="error", include_dashboard=False if found is None else None)
            except Exception as error:  # whatever the cluster's version, address or network makes it raise
                raise LabError(f"no Ray cluster at {found or 'this machine'} ({first_line(error)}).") from None
        of = "GPU" if device.startswith("cuda") else "CPU"
        room = int(ray.cluster_resources().get(of, 0))
        if not room:
            raise LabError(f"the Ray cluster has no {of}: add a node, or choose another --device.")
        self.jobs = min(jobs or room, room)
        self._flag = ray.remote(num_cpus=0)(_Flag).remote()
        options = {"num_cpus": 1, "num_gpus": int(of == "GPU"), "max_retries": TRIES - 1}
        self._task = ray.remote(**options)(_run)

    def close(self) -> None:
        if self._own:
            self.ray.shutdown()

    def run(
        self,
        configs: Mapping[Path, RunConfig],
        data: Path,
        *,
        on_end: Callable[[RunConfig], None] = lambda config: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[Path, Outcome]:
        waiting, found, running = deque(configs.items()), dict[Path, Outcome](), dict[Any, Path]()
        prepared = self.ray.put(_content(data))
        deadline: float | None = None
        self.ray.get(self._flag.set.remote(False))
        while waiting or running:
            if deadline is None and should_stop():
                deadline = time.monotonic() + STOPPING_SECONDS
                self.ray.get(self._flag.set.remote(True))
            while waiting and (deadline is not None or len(running) < self.jobs):
                folder, config = waiting.popleft()
                outcome = ended(folder, config)
                if outcome is None and deadline is None:
                    begun = _content(folder) if folder.exists() else {}
                    arguments = self.work, begun, config.to_json(), prepared, self.device, self._flag, self.imports
                    running[self._task.remote(*arguments)] = folder
                    continue
                found[folder] = outcome or Outcome()
                on_end(config)
            ready, _ = self.ray.wait(list(running), timeout=0.2) if running else ([], [])
            for reference in ready:
                folder = running.pop(reference)
                found[folder] = self._taken(reference, folder)
                on_end(configs[folder])
            if deadline is not None and time.monotonic() > deadline:
                for reference, folder in running.items():
                    self.ray.cancel(reference, force=True)
                    found[folder] = Outcome()
                running.clear()
        return {folder: found[folder] for folder in configs}

    def _taken(self, reference: Any, folder: Path) -> Outcome:
        """The outcome of a task that has ended, whose files are written into the run's folder."""
        try:
            outcome, content = self.ray.get(reference)
        except Exception as error:  # of a node or a worker that died too often
            return Outcome(error=f"its node failed {TRIES} times ({first_line(error)})")
        folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(content, key=lambda each: (each in LAST, LAST.index(each) if each in LAST else 0)):
            files.write_atomically(folder / name, content[name])
        if "result.json" in content:
            for leftover in (*folder.glob("best-*.safetensors"), folder / "checkpoint.safetensors"):
                leftover.unlink(missing_ok=True)
        result: Outcome = outcome
        return result


class _Flag:
    """An actor that the runs ask whether they should stop."""

    def __init__(self) -> None:
        self.value = False

    def set(self, value: bool) -> None:
        self.value = value

    def get(self) -> bool:
        return self.value


def _run(
    work: Work,
    begun: Mapping[str, bytes],
    fields: Mapping[str, Any],
    data: Mapping[str, bytes],
    device: str,
    flag: Any,
    imports: Sequence[str],
) -> tuple[Outcome, dict[str, bytes]]:
    """One run, on a node: its outcome, and the files that it has written."""
    import ray

    asked, answer = 0.0, False

    def should_stop() -> bool:
        nonlocal asked, answer
        if time.monotonic() - asked > ASK_SECONDS:
            asked, answer = time.monotonic(), bool(ray.get(flag.get.remote()))
        return answer

    place = Path(tempfile.mkdtemp(prefix="anyk-"))
    try:
        for folder, content in (("run", begun), ("data", data)):
            (place / folder).mkdir()
            for name, written in content.items():
                (place / folder / name).write_bytes(written)
        outcome = work(
            str(place / "run"), fields, str(place / "data"), device, 1, lambda step, steps: None, should_stop, imports
        )
        return outcome, _content(place / "run")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _content(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name."""
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    if sum(path.stat().st_size for path in found) > MOST_BYTES:
        raise LabError(f"{folder} is too large for Ray's object store: put an embedding set on a path that all nodes have.")
    return {path.name: path.read_bytes() for path in found}
