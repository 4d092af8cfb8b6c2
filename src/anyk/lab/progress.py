"""Progress bars: what is shown on the terminal while runs are at work."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column

from anyk.lab.errors import LabError
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.loggers import Forwarder
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import OnProgress, Progress
from anyk.lab.tables import title


@contextmanager
def count_up(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar for one long task, moved by calling what this yields with the numbers done and in all."""
    bars = _bars(quiet)
    task = bars.add_task(what, total=None, count="")

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
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
    )


@contextmanager
def watched(total: float, quiet: bool = False, log: Sequence[str] = (), unit: str = "runs") -> Iterator["Display"]:
    """A display of runs that also hands on the metrics of those it is shown.

    Args:
        total: how many there will be.
        quiet: True shows nothing.
        log: where the metrics go, by name of :data:`anyk.lab.run.loggers.LOGGERS`.
        unit: what is counted: runs, as they end; or something else, by :meth:`Display.count`.
    """
    with Forwarder(log) as forwarder, Display(total, quiet, forwarder.update, unit) as display:
        yield display


class Display:
    """A bar for all runs, with the time left, and a line for each run that is at work. Written to standard error.

    Args:
        total: how many runs there will be, or of what is counted.
        quiet: True shows nothing.
        on_show: called as :meth:`show` is.
        unit: what is counted: runs, as they end; or something else, by :meth:`count`.
    """

    def __init__(
        self,
        total: float,
        quiet: bool = False,
        on_show: OnProgress = lambda folder, progress: None,
        unit: str = "runs",
    ) -> None:
        self._bars = _bars(quiet)
        self._all = self._bars.add_task(f"all {unit}", total=total, count=f"0/{total:.0f}")
        # Apart from the bar: its columns would take the room that the words need.
        words = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._each = Bars(TextColumn("{task.description}", table_column=words), TextColumn("{task.fields[count]}"), expand=True)
        self._live = Live(Group(self._bars, self._each), console=self._bars.console)
        self._on_show = on_show
        self._runs = total if unit == "runs" else None
        self._tasks: dict[Path, TaskID] = {}
        self._parts: dict[Path, float] = {}
        self._configs: dict[Path, Config] = {}
        self._lines: dict[Path, Mapping[str, Any]] = {}
        self._guard = threading.Lock()

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live.is_started:
            self._live.stop()
            console = self._live.console
            if not (console.is_terminal or console.is_jupyter):  # rich leaves the last line open: results would begin on it
                console.line()

    def tell(self, message: str) -> None:
        """Print a message above the bars. May be called from any thread."""
        if not self._bars.disable:
            self._bars.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def show(self, folder: Path, progress: Progress) -> None:
        """Take note of where a run stands. May be called from any thread."""
        self._on_show(folder, progress)
        if self._bars.disable:
            return
        with self._guard:
            self._live.start()  # not before: an error at once should not stand below an empty bar
            if folder not in self._tasks:
                self._tasks[folder] = self._each.add_task("", count="")
                with suppress(LabError, OSError):  # a run that cannot be read has a name all the same
                    self._configs[folder] = Run(folder).config()
            self._parts[folder] = progress.step / max(progress.steps, 1)
            if progress.line is not None:
                self._lines[folder] = progress.line
            self._each.update(
                self._tasks[folder],
                description=f"  {escape(self._name(folder))}",
                count=f"{progress.step}/{progress.steps} steps",
                visible=self._parts[folder] < 1,
            )
            if self._runs is not None:
                finished = sum(part >= 1 for part in self._parts.values())
                self._bars.update(self._all, completed=sum(self._parts.values()), count=f"{finished}/{self._runs:.0f}")

    def count(self, done: float, total: float) -> None:
        """Take note of how much is done, and how much there will be."""
        self._bars.update(self._all, completed=done, total=total, count=f"{done:.0f}/{total:.0f}")

    def _name(self, folder: Path) -> str:
        """The line of a run: its loss and learning rate, its own hyperparameter, its seed and its accuracies so far."""
        config, line = self._configs.get(folder), self._lines.get(folder, {})
        if config is None:
            return folder.name
        # By the kind of data, unless it was given: the current one then tells more than nothing.
        rate = config.learning_rate or line.get("learning_rate")
        own = loss_names.find(config.loss).hyperparameter
        words = [config.loss, f"learning rate {rate:.2g}" if rate else "", f"{own.replace('_', ' ')} {getattr(config, own):g}"]
        words.append(f"seed {config.seed}")
        measured = line.get("validation", {})
        shown = dict.fromkeys(metric for metric in (config.select, "top1", "top5") if metric in measured)
        words += [f"{title(metric)} {100 * measured[metric]:.1f} %" for metric in shown if metric != "mean"]
        return "  ".join(filter(None, words))
