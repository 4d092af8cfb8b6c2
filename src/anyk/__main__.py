"""`python -m anyk` and the command `anyk`."""

import json
import sys


def main() -> None:
    """Start the lab, or say what it needs."""
    try:
        from anyk.lab import stopping

        stopping.listen()
        from anyk.lab.cli import main as start
    except ModuleNotFoundError as error:  # anyk.lab says what it misses; one of its packages may miss another
        said = str(error)
        _start_without_lab(said if "anyk[lab]" in said else f'The lab needs the package {error.name}: pip install "anyk[lab]"')
        return
    try:
        start()
    except SystemExit as ended:
        if isinstance(ended.code, str):  # a message, which Python prints
            raise
        stopping.finish(ended.code or 0)


def _start_without_lab(reason: str) -> None:
    """What a report of a bug needs, and what tells which packages are missing, do not need these packages."""
    words = sys.argv[1:]
    if words == ["--version"]:
        import anyk

        sys.stdout.write(f"anyk {anyk.__version__}\n")
    elif words in (["info"], ["info", "--json"]):
        from anyk import info

        facts = info.gather()
        sys.stdout.write((json.dumps(facts, indent=1) if "--json" in words else info.describe(facts)) + "\n")
    else:
        sys.stderr.write(f"{reason}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
