"""What a person sees while runs are at work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from anyk.lab.run.training import Progress


@contextmanager
def count_up(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar for one long task, moved by calling what this yields with the numbers done and in all."""
    bars = _bars(quiet)
    task = bars.add_task(what, total=None, count="", left="left")

    def show(done: int, total: int) -> None:
        bars.start()  # not before: an error at once should not stand below an empty bar
        bars.update(task, completed=done, total=total, count=f"{done}/{total}")

    try:
        yield show
    finally:
        if bars.live.is_started:
            bars.stop()


def _bars(quiet: bool) -> Bars:
    return Bars(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
    )


class Display:
    """A bar for all runs, with the time left, and a line for each run that is at work. Written to standard error.

    Args:
        runs: how many runs there will be.
        quiet: True shows nothing.
    """

    def __init__(self, runs: int, quiet: bool = False) -> None:
        self._bars = _bars(quiet)
        self._all = self._bars.add_task("all runs", total=float(runs), count=f"0/{runs}", left="left")
        self._runs = runs
        self._tasks: dict[Path, TaskID] = {}
        self._parts: dict[Path, float] = {}
        self._guard = threading.Lock()

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def tell(self, sentence: str) -> None:
        """Say something above the bars. May be called from any thread."""
        if not self._bars.disable:
            self._bars.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def show(self, folder: Path, progress: Progress) -> None:
        """Take note of where a run stands. May be called from any thread."""
        with self._guard:
            self._bars.start()  # not before: an error at once should not stand below an empty bar
            self._parts[folder] = progress.step / max(progress.steps, 1)
            if folder not in self._tasks:
                self._tasks[folder] = self._bars.add_task(f"  {folder.name}", total=1.0, count="", left="")
            task = self._tasks[folder]
            count = f"{progress.step}/{progress.steps} steps"
            if progress.line is not None:
                validation = progress.line["validation"]
                accuracies = " | ".join(f"{100 * validation[name]:.1f}" for name in ("top1", "top5") if name in validation)
                self._bars.update(task, description=f"  {folder.name}  {accuracies}")
            self._bars.update(task, completed=self._parts[folder], count=count)
            finished = sum(part >= 1 for part in self._parts.values())
            self._bars.update(self._all, completed=sum(self._parts.values()), count=f"{finished}/{self._runs}")
            if self._parts[folder] >= 1:
                self._bars.update(task, visible=False)
