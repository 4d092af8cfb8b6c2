"""A run is a folder. What is in it is whole at any moment, so that a run that was killed can go on.

config.json             the config
environment.json        versions and machine
metrics.jsonl           one line for each evaluation
checkpoint.safetensors  weights, optimizer, and where the run stands
best-*.safetensors      the weights that the validation examples liked best
model.safetensors       the same, when the run has ended, what model it is, and its calibration: see models.load
test.safetensors        of each test example the rank of its class, the first guesses, its group; not with select=each
result.json             the outcome; its presence says that the run has ended
error.txt               why the run failed
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import safetensors
import safetensors.torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config

FORMAT = 1
#: what tells that a folder is a run's, of many runs or a comparison's; all have one of the first two, unless copied without it
TRACES = (".lock", "runs/.lock", "environment.json", "*/environment.json", "runs/*/environment.json")
#: a run's files, in an order in which they can be copied: whatever is missing at its end was not needed before
CONTENT = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "best-*.safetensors",
    "checkpoint.safetensors",
    "error.txt",
    "model.safetensors",
    "test.safetensors",
    "result.json",
)


class FolderTaken(LabError):
    """Another process holds the folder's lock."""


class Run:
    """One run folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Keep other processes off the folder. The lock dies with the process, however that ends."""
        self.refuse_other_files()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"the run folder {self.folder} cannot be made: {error.strerror}.") from None
        lock = filelock.FileLock(self.folder / ".lock", timeout=patience)
        try:
            lock.acquire(poll_interval=0.02)
        except filelock.Timeout:
            raise FolderTaken(f"another process is at work in {self.folder}: wait for it, or choose another folder.") from None
        try:
            yield
        finally:
            lock.release()

    def refuse_other_files(self) -> None:
        """Raise if the folder, of a run or of many, holds files but nothing that the lab has written."""
        if not self.folder.is_dir() or any(any(self.folder.glob(trace)) for trace in TRACES):
            return
        shown = (path for path in self.folder.iterdir() if not path.name.startswith("."))
        # Empty folders are nobody's.
        names = sorted(path.name for path in shown if not path.is_dir() or any(not inner.is_dir() for inner in path.rglob("*")))
        if names:
            shown_names = ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])
            raise LabError(
                f"{self.folder} holds files that are not of a run ({shown_names}): choose another folder with --out."
            )

    def refuse_other_config(self, config: Config) -> None:
        """Raise if the folder holds a run of another config, unless that came to nothing."""
        if not (self.folder / "config.json").exists():
            return
        differences = self.config().differences(config)
        if differences and self._has_begun():
            changes = "; ".join(f"{name} was {old!r} and is now {new!r}" for name, (old, new) in differences.items())
            raise LabError(f"{self.folder} holds a run of another config ({changes}): choose another folder with --out.")

    def _has_begun(self) -> bool:
        """Whether there is anything to lose: a run that failed before its first evaluation leaves only its error."""
        return any((self.folder / name).exists() for name in ("checkpoint.safetensors", "result.json")) or bool(self.metrics())

    def begin(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Write the config down, or check that the folder was begun with the same."""
        self.refuse_other_config(config)
        anew = not (self.folder / "config.json").exists() or bool(self.config().differences(config))
        if anew:
            files.write_object(self.folder / "config.json", config.to_json())
        if anew or not (self.folder / "environment.json").exists():
            files.write_object(self.folder / "environment.json", environment)
        (self.folder / "error.txt").unlink(missing_ok=True)
        # What a kill left behind. (safetensors writes to a temporary file of its own.)
        for leftover in (*self.folder.glob(".*.tmp"), *self.folder.glob(".tmp*")):
            leftover.unlink(missing_ok=True)
        if self.result() is not None:
            self._tidy()

    def config(self) -> Config:
        """The config that the run was begun with."""
        return Config.from_json(self._read("config.json"), str(self.folder / "config.json"))

    def result(self) -> dict[str, Any] | None:
        """The outcome, or None while there is none."""
        return self._read("result.json") if (self.folder / "result.json").exists() else None

    def error(self) -> str | None:
        """Why the run failed, or None."""
        path = self.folder / "error.txt"
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None

    def fail(self, message: str) -> None:
        """Note why the run failed; a later start begins where it stood."""
        self.folder.mkdir(parents=True, exist_ok=True)  # its process may have died before it made it
        files.write_atomically(self.folder / "error.txt", (message.strip() + "\n").encode())

    def finish(
        self, result: Mapping[str, Any], weights: Mapping[str, Tensor], plan: Mapping[str, Any], test: Mapping[str, Tensor]
    ) -> None:
        """Write the model with its plan, what it does with each test example and the outcome; drop what only a running run
        needs."""
        self.save_tensors("model.safetensors", weights, plan)
        if test:
            self.save_tensors("test.safetensors", test, {})
        files.write_object(self.folder / "result.json", {"format": FORMAT, **result})
        self._tidy()

    def _tidy(self) -> None:
        for leftover in (*self.folder.glob("best-*.safetensors"), self.folder / "checkpoint.safetensors"):
            leftover.unlink(missing_ok=True)

    # Copies ----------------------------------------------------------------------------------------------------------------

    def content(self, names: Sequence[str] = CONTENT) -> dict[str, bytes]:
        """The run's files of these names, for :meth:`write`."""
        return {path.name: path.read_bytes() for name in names for path in sorted(self.folder.glob(name))}

    def write(self, content: Mapping[str, bytes]) -> None:
        """Make these the run's files, in their order; a checkpoint goes when there is a result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, data in content.items():
            files.write_atomically(self.folder / name, data)
        if "error.txt" not in content:
            (self.folder / "error.txt").unlink(missing_ok=True)
        if "result.json" in content:
            self._tidy()

    # Metrics ---------------------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """The evaluations so far; a line that a crash left half-written is left out."""
        path = self.folder / "metrics.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            found = [files.parsed(line) for line in lines]
            if not all(isinstance(line, dict) for line in found):
                raise ValueError
            return found
        except ValueError:
            raise LabError(f"{path} is damaged: delete {self.folder} and run again.") from None

    def keep_metrics(self, count: int) -> None:
        """Forget the evaluations after the first ``count``: they will be made again."""
        lines = [json.dumps(line) + "\n" for line in self.metrics()[:count]]
        if len(lines) < count:
            raise LabError(f"{self.folder / 'metrics.jsonl'} has lost lines: delete {self.folder} and run again.")
        files.write_atomically(self.folder / "metrics.jsonl", "".join(lines).encode())

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation. It is on the disk before a checkpoint that counts on it."""
        path = self.folder / "metrics.jsonl"
        with files.disk_full_is_an_error(path), path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    # Tensors ---------------------------------------------------------------------------------------------------------------

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace a file of tensors, with a few JSON values beside them."""
        own: dict[str, Tensor] = {}
        stored: set[int] = set()
        for key, tensor in tensors.items():
            alone = tensor.detach().cpu().contiguous()
            memory = alone.untyped_storage().data_ptr()
            own[key] = alone.clone() if memory in stored else alone  # two names of one tensor, as of tied weights
            stored.add(memory)
        with files.replacing(self.folder / name) as path:
            safetensors.torch.save_file(own, path, {"state": json.dumps(state)})

    def load_tensors(self, name: str, only: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What :meth:`save_tensors` wrote, or those of it that are named; None where there is no such file."""
        path = self.folder / name
        if not path.exists():
            return None
        try:
            return read_tensors(path, only)
        except ValueError as error:
            raise LabError(f"{path} is damaged ({error}): delete {self.folder} and run again.") from None

    def _read(self, name: str) -> dict[str, Any]:
        return files.read_object(self.folder / name, f"delete {self.folder} and run again")


def read_tensors(path: Path, only: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :meth:`Run.save_tensors` wrote, or those of it that are named; a ValueError says what is wrong with the file."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            state = files.parsed((file.metadata() or {}).get("state", "null"))
            # clone: a later save replaces the file that would otherwise stay mapped
            wanted = [key for key in file.keys() if only is None or key in only]  # noqa: SIM118
            tensors = {key: file.get_tensor(key).clone() for key in wanted}
    except Exception as error:  # of a damaged file, or of a kind of number that torch does not have
        raise ValueError(str(error) or type(error).__name__) from None
    if not isinstance(state, dict):
        raise ValueError("it has no description beside its tensors")
    return tensors, state
