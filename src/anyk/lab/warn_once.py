"""Warnings, mostly about the data: each is logged once per command, however many of its processes load the data."""

import logging
from collections.abc import Callable

from anyk.lab.run import processes

_log = logging.getLogger(__name__)
_warned: set[str] = set()
_forward: Callable[[str], None] | None = None


def warn_once(message: str) -> None:
    """Log a warning, unless this process has given it before; a worker sends it to its parent instead."""
    if message in _warned or not processes.is_main():
        return
    _warned.add(message)
    if _forward is not None:
        _forward(message)
    else:
        _log.warning("%s", message)


def forward_to(receiver: Callable[[str], None]) -> None:
    """From now on, call this with each warning instead of logging it: the parent of many workers logs equal ones once."""
    global _forward
    _forward = receiver
