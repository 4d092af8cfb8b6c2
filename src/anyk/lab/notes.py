"""Remarks about the data that a user should know, each told once however many processes of one command load the data."""

import logging
from collections.abc import Callable

from anyk.lab.run import processes

_log = logging.getLogger(__name__)
_told: set[str] = set()
_listeners: list[Callable[[str], None]] = []


def tell(sentence: str) -> None:
    """Log a remark as a warning, unless this process has told it before or hands its remarks on."""
    if sentence in _told or not processes.speaks():
        return
    _told.add(sentence)
    if _listeners:
        _listeners[-1](sentence)
    else:
        _log.warning("%s", sentence)


def hand_on(listener: Callable[[str], None]) -> None:
    """From now on, call this with each remark instead: in a worker, whose parent knows what was told already."""
    _listeners.append(listener)
