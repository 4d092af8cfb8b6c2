"""How a command ends when it is told to, by Ctrl-C or SIGTERM: the one place that knows of signals.

A signal interrupts nothing: a thread reads them from a socket. While there is something at work that wants to be asked first
(workers, a training loop), the first signal only sets a flag, and what is at work saves and ends. A second one, or no end in
time, ends the process at once, as does the first while there is nothing to save: the workers are killed, what is half-written
is removed. Whatever the main thread does or waits for meanwhile does not matter.
"""

import atexit
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from anyk.lab import files
from anyk.lab.run import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: seconds for what is at work to save and end, the command with it
SECONDS = 8.0
#: seconds for what must not be interrupted
MOMENT = 1.0
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has the second alone, which kills

_guard = threading.Lock()
_at_work: set[int] = set()
_received = 0
_said = False


def listen() -> None:
    """From now on, SIGINT and SIGTERM end this process as described above. To be called once, by the main thread."""
    here, there = socket.socketpair()
    there.setblocking(False)
    # Python writes the numbers of signals there as they come, also while the main thread is inside of a long call of torch's.
    signal.set_wakeup_fd(there.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, ignore)
    threading.Thread(target=_watch, args=(here,), name="signals", daemon=True).start()
    atexit.register(_deafen)


def ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. Unlike SIG_IGN, it is not handed on to programs that the process starts."""


def requested() -> bool:
    """Whether the process was told to end."""
    return _received != 0


@contextmanager
def asked_first() -> Iterator[None]:
    """While this lasts, a first signal sets the flag and does no more: somebody looks at :func:`requested` again and again."""
    begin(os.getpid())
    try:
        yield
    finally:
        end(os.getpid())


def begin(pid: int) -> None:
    """Take note of a process, a worker or this one, that is asked before it ends. Workers are killed with this process."""
    with _guard:
        _at_work.add(pid)


def end(pid: int) -> None:
    """Take note that it has ended."""
    with _guard:
        _at_work.discard(pid)


def kill(pid: int) -> None:
    """End a process that does not end by itself."""
    with suppress(OSError):
        os.kill(pid, _KILL)


def exit_code() -> int:
    """Of a command that was stopped: 130 after SIGINT, 143 after SIGTERM."""
    return 128 + (_received or signal.SIGINT)


def farewell() -> str:
    """What is said at the end, "" if it was said already."""
    global _said
    with _guard:
        _said, before = True, _said
    return "" if before or not processes.is_main() else f"Stopped. To go on: {processes.command_line()}\n"


def exit_now(code: int) -> None:
    """End the process without what Python does at its end, which takes seconds on a machine that is busy."""
    sys.stdout.flush()
    sys.stderr.flush()
    _kill_helpers()
    os._exit(code)


def finish(code: int) -> None:
    """All is done: end the process. Not as Python does it, which takes apart what torch has made, ten seconds of a machine that
    is busy, in which nobody listens."""
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # the reader of a pipe has seen enough
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _deafen() -> None:
    """All is done: from here on a signal should not change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _kill_helpers()


def _kill_helpers() -> None:
    # For good: the process ends. So that no helper is just being started, or is started again as soon as it is killed.
    files.uninterrupted.acquire(timeout=MOMENT)
    # The process that forks the workers would notice by itself, but late, that there is nobody to work for.
    server = getattr(getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None), "_forkserver_pid", None)
    for pid in {*_at_work, server or os.getpid()} - {os.getpid()}:
        kill(pid)


def _watch(signals: socket.socket) -> None:
    global _received
    number = _next(signals)
    with _guard:
        _received, ask = number, bool(_at_work)
    if ask:
        while processes.launched() > 1:  # torchrun hands a signal on to processes that may have had it, and kills in time
            _next(signals)
        signals.settimeout(SECONDS)
        with suppress(OSError):  # a timeout
            _next(signals)
    _end_now()


def _next(signals: socket.socket) -> int:
    """Wait for a signal that means the end: other parts of a process may have handlers for others."""
    while (number := signals.recv(1)[0]) not in SIGNALS:
        pass
    return number


def _end_now() -> None:
    try:
        _kill_helpers()
        for path in list(files.unfinished):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        said = farewell()
        # Below a progress bar, which hides the cursor. Not through sys.stderr, on which the main thread may wait.
        if os.isatty(2):
            said = f"\n\x1b[?25h{said}"
        if select.select([], [2], [], 1.0)[1]:  # a pipe that nobody reads may be full
            os.write(2, said.encode())
    finally:
        os._exit(exit_code())
