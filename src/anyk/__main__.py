"""`python -m anyk` and the command `anyk`."""

import sys


def main() -> None:
    """Start the lab, or say what it needs."""
    try:
        _start()
    except KeyboardInterrupt:  # while it imports; what runs has its own words
        sys.exit(130)


def _start() -> None:
    from anyk.lab.errors import LabError

    try:
        from anyk.lab.cli import main as start
    except ModuleNotFoundError as error:
        sys.stderr.write(f'The lab needs the package {error.name}: pip install "anyk[lab]"\n')
        sys.exit(2)
    except LabError as error:  # a package that extends anyk is broken
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    start()


if __name__ == "__main__":
    main()
