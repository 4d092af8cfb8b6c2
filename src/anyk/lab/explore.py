"""The page to play with: drag scores, see P, T, loss and gradient. One HTML file with everything in it, no network needed.

The mathematics stands in the page once more, in JavaScript: src/anyk/lab/templates/explore.html. The tests compare the two.
"""

from importlib import resources
from pathlib import Path

import anyk
from anyk.lab import files
from anyk.lab.errors import LabError

SUFFIXES = (".html", ".htm")


def write(path: str | Path) -> Path:
    """Write the page.

    Args:
        path: the .html file.

    Returns:
        The path.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise LabError(f"{path} should end in .html: the interactive picture is a page.")
    if not path.parent.is_dir():
        raise LabError(f"{path.parent} should be a folder that exists; make it first.")
    try:
        files.write_atomically(path, render().encode())
    except OSError as error:
        raise LabError(f"{path} could not be written: {error.strerror or error}.") from None
    return path


def render() -> str:
    """The page as text."""
    template = resources.files("anyk.lab").joinpath("templates/explore.html").read_text(encoding="utf-8")
    return template.replace("@version@", anyk.__version__)
