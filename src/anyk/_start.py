"""Ctrl-C while the command ``anyk`` still imports torch, which takes seconds: it ends as other programs do, without a
traceback. Imported before all else; in any other program it does nothing.
"""

import os
import signal
import sys
import threading


def is_command(words: list[str]) -> bool:
    """Whether a process that was started with these words, ``sys.orig_argv``, is the command, or ``python -m anyk``.

    >>> is_command(["python", "/usr/bin/anyk", "info"]), is_command(["python", "-u", "-m", "anyk", "info"])
    (True, True)
    >>> is_command(["python", "train.py", "-m", "anyk"]), is_command(["python", "-c", "import anyk"])
    (False, False)
    """
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word == "-m":
            return following == "anyk"
        if word == "-c" or not word.startswith("-"):
            return os.path.splitext(os.path.basename(word))[0] == "anyk"
    return False


if (
    is_command(sys.orig_argv)
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    # Until anyk.lab.stopping listens. At once: a handler of Python's would wait until torch's libraries are loaded.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
