"""How a comparison goes, on standard error: what will be done, and how much of it is."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress

Tell = Callable[[str], None]
OnProgress = Callable[[float, float], None]


@contextmanager
def shown(quiet: bool) -> Iterator[tuple[Tell, OnProgress]]:
    """Yields what says a sentence, and what says how many trainings are done of how many; in a terminal, with a bar."""
    if quiet:
        yield lambda sentence: None, lambda done, total: None
        return
    console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
    if not sys.stderr.isatty():
        last = time.monotonic()

        def count(done: float, total: float) -> None:
            nonlocal last
            if time.monotonic() - last > 30:
                last = time.monotonic()
                console.print(f"{done:.0f} of about {total:.0f} trainings.")

        yield console.print, count
        return
    columns = (
        rich.progress.BarColumn(),
        "{task.completed:.0f} of about {task.total:.0f} trainings",
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield bar.console.print, lambda done, total: bar.update(task, completed=done, total=total)
