"""`anyk info`."""

import json
from collections.abc import Callable, Sequence

from anyk import info
from anyk.lab.cli.parsing import Parser, say


def run(words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Say which versions and devices there are, and whether the native kernels are used."""
    parser = Parser("info", "Versions, devices, and whether the native kernels are used: for a report of a problem.")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    given = parser.parse_args(words)
    facts = info.gather()
    say(json.dumps(facts, indent=1) if given.json else info.describe(facts))
    return 0
