"""The command `anyk`: from the words of the command line to a call, and from an error to a message and an exit code.

Each command is a file, and imports what it needs when it is called: `anyk --help` should not wait for it.
"""

import os
import sys
from collections.abc import Callable, Sequence

import anyk
from anyk.lab import stopping
from anyk.lab.cli import compare, embed, export, import_arrays, info, parsing, predict, report, reproduce, train
from anyk.lab.cli.words import say, warn
from anyk.lab.did_you_mean import nearest
from anyk.lab.errors import LabError, Stopped
from anyk.lab.run import loss_names, processes

COMMANDS: dict[str, Callable[..., int]] = {
    "compare": compare.command,
    "train": train.command,
    "report": report.command,
    "predict": predict.command,
    "export": export.command,
    "reproduce": reproduce.command,
    "embed": embed.command,
    "import": import_arrays.command,
    "info": info.command,
}

DESCRIPTION = f"""Train for 'the right class is among the first k', and find out whether it helps.

anyk COMMAND --help lists the options of a command. With any command, --import MODULE first imports a module of yours that
registers losses. anyk --version prints the version: {anyk.__version__}."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    except LabError as error:
        if not processes.is_main() and not isinstance(error, (processes.Agreed, processes.OwnError)):
            processes.wait_to_be_ended()
        processes.ignore_signals()
        if processes.is_main() or not isinstance(error, processes.Agreed):
            warn(f"anyk: {error}")
        code = 2
    except SystemExit as ended:  # of the parser
        if ended.code and not processes.is_main():
            processes.wait_to_be_ended()
        raise
    except (KeyboardInterrupt, Stopped):
        processes.ignore_signals()
        sys.stderr.write(stopping.farewell())
        code = stopping.exit_code()
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if stopping.requested() or processes.still_joined():  # after an error; what their threads could do: see there
        stopping.exit_now(code)
    sys.exit(code)


def _run(words: Sequence[str]) -> int:
    words = _import_modules(words)
    first = words[0] if words else None
    if first == "--version":
        if processes.is_main():
            say(f"anyk {anyk.__version__}")
        return 0
    if first is None:
        raise LabError(f"a command should be given: {_names()} anyk --help tells what they do.")
    # --tyro-… writes completions for a shell.
    if first not in COMMANDS and first not in ("-h", "--help") and not first.startswith("--tyro-"):
        if first.startswith("-"):
            raise LabError(f"{first} should stand after a command, or be --help or --version: {_names()}")
        near = nearest(first, COMMANDS)
        raise LabError(f"there is no command {first!r}: {f'did you mean anyk {near[0]}?' if near else _names()}")
    if processes.launched() > 1 and first in COMMANDS and first != "train":
        raise LabError(f"anyk {first} is one process: start it without torchrun, which is for anyk train.")
    return parsing.call(COMMANDS, words, DESCRIPTION, is_main=processes.is_main())


def _import_modules(words: Sequence[str]) -> list[str]:
    """The words without each `--import MODULE`, after these modules were imported: they bring names for every command."""
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
        loss_names.import_modules([module])
    return rest


def _names() -> str:
    return f"the commands are {', '.join(COMMANDS)}."
