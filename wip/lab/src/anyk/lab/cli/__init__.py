"""The commands. `anyk_cli`, which needs no torch, starts them; each is a file of its own: words in, words out."""

import importlib
import logging
import sys
from collections.abc import Sequence

from anyk.lab import losses
from anyk.lab.engines import ended_by_signals
from anyk.lab.errors import LabError, Stopped

COMMANDS = ("compare", "train", "predict", "embed", "import", "reproduce", "info")


def main(words: Sequence[str]) -> int:
    """Run a command; its exit code.

    Args:
        words: its name, and what follows it.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        name, *rest = _import_modules(words)
        command = importlib.import_module(f"anyk.lab.cli.{name.replace('import', 'import_arrays')}")
        with ended_by_signals() as should_stop:
            return int(command.run(rest, should_stop))
    except LabError as error:
        sys.stderr.write(f"anyk: {error}\n")
        return 2
    except Stopped:
        sys.stderr.write("Stopped; the same command goes on where it was.\n")
        return 130


def _import_modules(words: Sequence[str]) -> list[str]:
    """The words without each `--import MODULE`, after these modules were imported: they bring losses for every command."""
    rest: list[str] = []
    given = iter(words)
    for word in given:
        option, equals, module = word.partition("=")
        if option != "--import":
            rest.append(word)
            continue
        module = module if equals else next(given, "")
        if not module or module.startswith("-"):
            raise LabError("--import should be followed by the name of a module.")
        losses.import_modules([module])
    return rest
