"""A Ray of one node on this machine that lives as long as the process that has started this one: a program, not a module.

It is a process in a session of its own, so that a signal to a command and all that belongs to it does not end Ray before the
runs are saved. It prints Ray's address, or a space and what is wrong, and ends when its standard input is closed, which the end
of the command does, however that comes. A kill would leave some of Ray's processes behind.
"""

import logging
import sys
import threading


def main() -> None:
    """Start Ray, wait, and end it."""
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    import ray

    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        answer = ray.get_runtime_context().gcs_address
    except Exception as error:
        answer = f" {next(iter(str(error).splitlines()), '') or type(error).__name__}"
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()
    over.wait()
    ray.shutdown()


if __name__ == "__main__":
    main()
