"""How the benchmarks measure: time by the best of interleaved rounds, memory by the allocator's own record."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import anyk

# A fast step is repeated within its turn, so that slow ones beside it do not leave it with a handful of samples.
TURN_SECONDS = 0.02
TURN_REPEATS = 10

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """Forward and backward of a loss on given scores."""

    loss: Loss
    scores: Tensor
    target: Tensor
    threads: int = 1
    backend: Literal["torch", "native"] = "torch"

    def run(self) -> None:
        self.scores.grad = None
        self.loss(self.scores, self.target).backward()

    def seconds(self) -> float:
        # Giving back the last gradient is not part of a step. The memory for the new one is.
        self.scores.grad = None
        start = time.perf_counter()
        self.loss(self.scores, self.target).backward()
        return time.perf_counter() - start


class Forward(Step):
    """The forward pass alone, of anything."""

    def run(self) -> None:
        self.loss(self.scores, self.target)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.loss(self.scores, self.target)
        return time.perf_counter() - start


class Backward(Step):
    """The backward pass alone."""

    def seconds(self) -> float:
        self.scores.grad = None
        result = self.loss(self.scores, self.target)
        start = time.perf_counter()
        result.backward()
        return time.perf_counter() - start


def random_scores(batch: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(batch, n, generator=generator).to(dtype).requires_grad_()
    return scores, torch.randint(n, (batch,), generator=generator)


def keep_freed_memory() -> bool:
    """Lets the C library keep what is freed; False where it cannot be told to (it is not glibc).

    By default glibc returns large blocks to the system or not, depending on what happened before. A block that was
    returned comes back page by page, by page faults, which can cost more than the step itself: the same cross-entropy takes
    one time or several times as long. Kept memory gives the same time in every run.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    m_mmap_max, m_trim_threshold = -4, -1
    return mallopt is not None and bool(mallopt(m_mmap_max, 0) and mallopt(m_trim_threshold, -1))


def best_seconds(steps: Mapping[str, Step], budget: float, least_rounds: int = 2) -> dict[str, float]:
    """The least time of each step, all of them taking turns until the budget (seconds) is spent.

    Other work on the machine only ever adds time, so the minimum is the estimate that it disturbs least; taking turns
    lets a slow minute hit all steps alike.
    """
    gc.collect()
    best = dict.fromkeys(steps, float("inf"))
    rounds = 0
    end = time.perf_counter() + budget
    while rounds < least_rounds or time.perf_counter() < end:
        for name, step in steps.items():
            with anyk.backend(step.backend):
                if torch.get_num_threads() != step.threads:
                    torch.set_num_threads(step.threads)
                    step.run()  # the new number of threads has to be woken first
                repeats = max(1, min(TURN_REPEATS, int(TURN_SECONDS / best[name])))
                best[name] = min(best[name], *(step.seconds() for _ in range(repeats)))
            step.scores.grad = None
        rounds += 1
    torch.set_num_threads(1)
    return best


def least_of(first: Mapping[str, float] | None, second: Mapping[str, float]) -> dict[str, float]:
    """Joins two measurements of the same steps."""
    return dict(second) if first is None else {name: min(first[name], second[name]) for name in second}


def peak_bytes(step: Step) -> int:
    """The most memory that a step holds at once, its gradient included, the scores and the target not.

    The profiler records every allocation and release of torch's CPU allocator, those inside of torch's kernels too. It does
    not see what anyk's native kernels work with: a few blocks of rows for each thread, whatever the batch.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with anyk.backend(step.backend):
        step.run()
        step.scores.grad = None
        gc.collect()
        with _silent_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            step.loss(step.scores, step.target).backward()
    step.scores.grad = None
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hides what C++ code writes: the profiler announces every start and stop there. Exceptions still come through."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine() -> str:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()}; torch {torch.__version__}, "
        f"Python {platform.python_version()}; {now}"
    )


def resident_megabytes(kind: str, process: int | str = "self") -> float:
    """The memory of a process on Linux: VmRSS is all of it, RssAnon what it allocated, RssFile what it mapped."""
    found = re.search(rf"{kind}:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found is not None, kind
    return int(found[1]) / 1024


def record(path: Path, title: str, sections: Sequence[str], section: str, lines: Sequence[str]) -> None:
    """Replaces one section of a page, with the command that made it, and keeps the others."""
    kept = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S)) if path.exists() else {}
    command = " ".join(Path(word).name for word in sys.argv)  # no folder of this machine
    kept[section] = "\n".join([f"`python benchmarks/{command}`, {machine()}.", "", *lines])
    text = "\n\n".join([f"# {title}", *(f"## {name}\n\n{kept[name].strip()}" for name in sections if name in kept)])
    path.write_text(text + "\n")
    print(kept[section])
