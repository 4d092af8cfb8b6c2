"""The `anyk` command. Help and version answer without loading torch; an early Ctrl-C ends it quietly."""

import sys

COMMANDS = {
    "compare": "find out whether a top-k loss helps on your data",
    "train": "train one loss",
    "predict": "a trained model's first guesses for new data",
    "embed": "images to an embedding set, through a frozen backbone",
    "import": "arrays to an embedding set",
    "reproduce": "the paper's experiments",
    "info": "versions, devices, kernels",
}


def main() -> None:
    """Run the command that the words name, and exit with its code."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except KeyboardInterrupt:  # before the command has set up its own way of ending
        sys.exit(130)
    except BrokenPipeError:  # as of `anyk … | head`
        sys.stderr.close()
        sys.exit(1)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        listed = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        sys.stdout.write(f"anyk: differentiable top-k.\n\n{listed}\n\nanyk COMMAND --help says more.\n")
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"anyk {version('anyk')}\n")
        return 0
    if words[0] not in COMMANDS and not words[0].startswith("--import"):
        import difflib

        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"did you mean anyk {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
        sys.stderr.write(f"anyk: there is no command {words[0]!r}: {hint}\n")
        return 2
    try:
        from anyk.lab.cli import main as run_command
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "anyk":
            raise
        sys.stderr.write(f"anyk: {error}\n")
        return 2
    return run_command(words)


if __name__ == "__main__":
    main()
