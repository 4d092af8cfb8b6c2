"""What all figures share: colours, style, how they are written.

The file's suffix chooses the format: png, svg or pdf. Colours are Okabe and Ito's, which the colour-blind can tell apart.
"""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anyk.lab.errors import LabError

SUFFIXES = (".png", ".svg", ".pdf")

BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
INK = "#222222"

STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "anyk",  # the same picture is the same file
}
PICTURE_STYLE: dict[Any, Any] = {
    **STYLE,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
}


def check_suffix(path: Path) -> None:
    """Raise if the file's suffix is no format."""
    if path.suffix.lower() not in SUFFIXES:
        raise LabError(f"{path} should end in {', '.join(SUFFIXES)}: the suffix is the format.")


def checked_path(path: str | Path) -> Path:
    """The path of a picture, whose folder is there."""
    path = Path(path)
    check_suffix(path)
    if not path.parent.is_dir():
        raise LabError(f"{path.parent} should be a folder that exists; make it first.")
    return path


def choose(argument: str, name: str, table: dict[str, Any]) -> Any:
    """The entry of this name."""
    if name not in table:
        raise LabError(f"{argument} should be one of {', '.join(table)}, but is {name!r}.")
    return table[name]


def check_number(argument: str, number: int, low: int, high: int) -> None:
    """Raise if an argument is not an integer in this range."""
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise LabError(f"{argument} should be an integer between {low} and {high}, but is {number!r}.")


def ordinal(rank: int) -> str:
    """1st, 2nd, 3rd, …"""
    suffix = "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{suffix}"


def save(figure: Figure, path: Path, dpi: int = 200) -> Path:
    """Write a figure."""
    FigureCanvasAgg(figure)
    # No date: the same picture is the same file.
    dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())
    try:
        figure.savefig(path, dpi=dpi, metadata={dated: None} if dated else None, facecolor="white")
    except OSError as error:
        raise LabError(f"{path} could not be written: {error.strerror or error}.") from None
    return path
