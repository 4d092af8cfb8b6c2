"""Ctrl-C while the command `anyk` still imports torch, which takes seconds and comes before any line of its own."""

import os
import signal
import sys
import threading


def _end(*_: object) -> None:
    os._exit(130)  # an exception could not pass through torch's C++ code, which aborts


def _is_command() -> bool:
    if sys.argv[:1] == ["-m"]:  # as long as Python looks for the module's main file
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["anyk"]
    return os.path.basename(sys.argv[0] if sys.argv else "") in ("anyk", "anyk.exe")


def importing_is_done() -> None:
    """Make Ctrl-C an exception again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if (
    _is_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where the shell has it ignored
):
    signal.signal(signal.SIGINT, _end)
