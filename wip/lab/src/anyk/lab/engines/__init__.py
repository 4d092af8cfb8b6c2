"""Many runs: on this machine, or on a Ray cluster. What a run does is given as a function; an engine only gets it done."""

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from anyk.lab.config import RunConfig
from anyk.lab.errors import LabError
from anyk.lab.files import read_object

Work = Callable[..., "Outcome"]
"""(folder, fields, data, device, threads, on_step, should_stop, imports) -> Outcome, in a process of its own"""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
received = 0
"""how often this process was told to end"""
to_kill: set[int] = set()
"""the processes that end with this one"""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    result: dict[str, Any] | None = None
    error: str = ""
    diverged: bool = False

    @property
    def stopped(self) -> bool:
        """Whether it was stopped, and can go on."""
        return self.result is None and not self.error


class Engine(ABC):
    """Makes runs, several at a time; a context manager, which at its end waits for what is at work."""

    jobs: int
    """how many runs are at work at a time"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let what is at work write a checkpoint and end."""

    @abstractmethod
    def run(
        self,
        configs: Mapping[Path, RunConfig],
        data: Path,
        *,
        on_end: Callable[[RunConfig], None] = lambda config: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[Path, Outcome]:
        """Make these runs and wait for them.

        Args:
            configs: by their folders; those that ended there before are not made again.
            data: the folder of the prepared data.
            on_end: called when a run has ended.
            should_stop: asked again and again; True lets all runs write a checkpoint and starts no more.
        """


def make(
    name: str,
    work: Work,
    *,
    device: str = "cpu",
    jobs: int = 0,
    threads: int = 0,
    address: str | None = None,
    imports: Sequence[str] = (),
) -> Engine:
    """An engine.

    Args:
        name: local or ray.
        work: what makes a run.
        device: where runs compute.
        jobs: runs at a time; 0: one for each GPU, or on the CPU one for each core.
        threads: of all runs together; 0: one for each core that this process may use.
        address: of a Ray cluster.
        imports: modules that each process imports first.
    """
    if name == "ray":
        from anyk.lab.engines.ray import Cluster

        return Cluster(work, device=device, jobs=jobs, address=address, imports=imports)
    if address is not None:
        raise LabError("address is of a Ray cluster: give it with --engine ray.")
    from anyk.lab.engines.local import Pool

    return Pool(work, device=device, jobs=jobs, threads=threads, imports=imports)


def ended(folder: Path, config: RunConfig) -> Outcome | None:
    """The outcome of a run that had ended before in its folder; None: it is to be made."""
    if not (folder / "result.json").exists():
        return None
    try:
        result = read_object(folder / "result.json", f"delete {folder}")
        before = RunConfig.from_json(read_object(folder / "config.json", f"delete {folder}"))
    except LabError as error:
        return Outcome(error=str(error))
    # its fields are filled in, those that were asked for are among them
    same = all(vars(before)[name] == value for name, value in vars(config).items() if value not in (0, "auto", None, ()))
    return Outcome(result=result) if same else None


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], bool]]:
    """While this lasts, Ctrl-C or SIGTERM asks for an end: yields what tells whether it did. A second one ends at once."""
    global received
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        global received
        received += 1
        if received == 1:
            sys.stderr.write("\nStopping: what is at work writes a checkpoint. Once more ends at once.\n")
            return
        for process in list(to_kill):
            try:
                os.kill(process, getattr(signal, "SIGKILL", signal.SIGTERM))
            except ProcessLookupError:
                continue
        os._exit(128 + number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: received > 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
