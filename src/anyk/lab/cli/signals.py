"""Ctrl-C and SIGTERM."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anyk.lab.run import processes


def interrupt(*_: Any) -> None:
    """A signal as Ctrl-C."""
    raise KeyboardInterrupt


def no_more_signals() -> None:
    """torchrun hands a signal on to processes that may have had it already, and ends all when one has failed."""
    if processes.launched() > 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_signal(patient: bool) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM as a flag, so that a step ends before the run does; a second one ends it at once.

    Not so if patient: torchrun hands a signal on to processes that may have had it already, and kills after half a minute."""
    stop = threading.Event()

    def note(number: int, frame: Any) -> None:
        if stop.is_set() and not patient:
            raise KeyboardInterrupt
        stop.set()

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop.is_set
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_IGN if patient and stop.is_set() else handler)
