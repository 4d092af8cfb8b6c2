"""The command `anyk`: words in, words out. What it does is done elsewhere.

Each command is a file, and imports what it needs when it is called: `anyk --help` should not wait for it.
"""

import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import tyro

import anyk
from anyk.lab.cli import compare, draw, embed, export, import_arrays, info, predict, report, reproduce, sweep, train
from anyk.lab.cli.signals import interrupt, no_more_signals
from anyk.lab.cli.words import command_line, say, understood, warn
from anyk.lab.errors import LabError, Stopped
from anyk.lab.run import processes

COMMANDS: dict[str, Callable[..., int]] = {
    "compare": compare.command,
    "train": train.command,
    "sweep": sweep.command,
    "report": report.command,
    "predict": predict.command,
    "export": export.command,
    "reproduce": reproduce.command,
    "embed": embed.command,
    "import": import_arrays.command,
    "draw": draw.command,
    "info": info.command,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process."""
    former = signal.signal(signal.SIGTERM, interrupt)
    words = understood(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["--version"]:
            say(f"anyk {anyk.__version__}")
            sys.exit(0)
        if words and words[0] not in COMMANDS and not words[0].startswith("-"):
            near = difflib.get_close_matches(words[0], COMMANDS, n=1)
            hint = f"did you mean anyk {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
            raise LabError(f"there is no command {words[0]!r}: {hint}")
        if processes.launched() > 1 and words and words[0] in COMMANDS and words[0] != "train":
            raise LabError(f"anyk {words[0]} is one process: start it without torchrun, which is for anyk train.")
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="anyk",
            description="Train for 'the right class is among the first k', and find out whether it helps.",
            args=words,
            console_outputs=processes.speaks(),
        )
    except LabError as error:
        if not processes.speaks() and not isinstance(error, (processes.Agreed, processes.OwnError)):
            processes.wait_to_be_ended()
        no_more_signals()
        if processes.speaks() or not isinstance(error, processes.Agreed):
            warn(f"anyk: {error}")
        code = 2
    except SystemExit as ended:  # of the parser
        if ended.code and not processes.speaks():
            processes.wait_to_be_ended()
        raise
    except (KeyboardInterrupt, Stopped):
        no_more_signals()
        if processes.speaks():
            warn(f"Stopped. To go on: {command_line()}")
        code = 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    finally:
        signal.signal(signal.SIGTERM, former)
    if processes.still_joined():  # after an error; what their threads could do while Python ends: see there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
