"""Tables as plain data, written for the terminal, Markdown, LaTeX or CSV; and how numbers are written anywhere.

People read a true minus sign; CSV, which programs read, has a hyphen.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from anyk.lab import statistics
from anyk.lab.coverage import SHARES
from anyk.lab.errors import LabError

Format = Literal["terminal", "markdown", "latex", "csv"]
_MISSING = "–"
_MINUS = "−"


@dataclass(frozen=True)
class Measured:
    """The same quantity of several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def std(self) -> float | None:
        return statistics.std(self.values)


@dataclass(frozen=True)
class Difference:
    """A difference to the baseline, and its p after the correction for the family of tests."""

    paired: statistics.Paired
    p: float | None


@dataclass(frozen=True)
class Column:
    """A column: ``field`` is what tells the rows apart, ``accuracy`` is a fraction shown in percent.

    A :class:`Difference` is shown in parts, one a column: ``points``, ``hits``, ``interval`` and ``p``.
    ``number`` and ``signed`` are shown as they are, with two digits after the point. ``guesses`` are several counts.
    """

    key: str
    title: str
    kind: Literal["field", "accuracy", "points", "hits", "interval", "p", "seconds", "count", "number", "signed", "guesses"]


Value = Measured | Difference | str | int | float | bool | tuple[float, ...] | tuple[str, ...] | tuple[int | None, ...] | None


@dataclass(frozen=True)
class Table:
    """Rows of values, and sentences that belong below them."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    title: str = ""


def title(metric: str) -> str:
    """The heading of a metric.

    >>> title("top5"), title("validation_top1"), title("ndcg10"), title("mrr")
    ('top-5', 'validation top-1', 'NDCG@10', 'MRR')
    """
    words = metric.replace("_", " ").replace("top", "top-").replace("mrr", "MRR")
    return re.sub(r"\bndcg(?=\d)", "NDCG@", words)


def order(value: Value) -> tuple[bool, float, str]:
    """A key to sort values by: numbers before texts."""
    if isinstance(value, Measured):
        return False, value.mean, ""
    return (False, value, "") if isinstance(value, (int, float)) else (True, 0.0, str(value))


def text(value: Value, kind: str) -> str:
    """A cell as people read it.

    >>> text(Measured((0.5, 0.75)), "accuracy"), text(Measured((75.0,)), "seconds"), text((0.5, 0.0, 0.5), "field")
    ('62.50 ± 17.68', '1.2 min', '0.5, 0, 0.5')
    """
    if isinstance(value, Measured):
        if kind == "seconds":
            return duration(value.mean)
        return percent(value.mean) + (f" ± {percent(value.std)}" if value.std is not None else "")
    if isinstance(value, Difference):
        return _difference_text(value, kind)
    if isinstance(value, tuple):
        return ", ".join(text(item, kind) for item in value)
    if isinstance(value, float):
        return signed(value) if kind == "signed" else f"{value:.2f}" if kind == "number" else f"{value:g}"
    return _MISSING if value is None else str(value)


def _difference_text(value: Difference, kind: str) -> str:
    found = value.paired
    if kind == "points":
        return points(found.difference)
    if kind == "hits":
        return _MISSING if found.hits is None else hits(found.hits)
    if kind == "interval":
        return _MISSING if found.low is None or found.high is None else interval(found.low, found.high)
    return _MISSING if value.p is None else p_text(value.p).removeprefix("p ").removeprefix("= ")


def percent(fraction: float) -> str:
    """A fraction in percent, without the sign for it.

    >>> percent(0.12345)
    '12.35'
    """
    return f"{100 * fraction:.2f}"


def points(difference: float) -> str:
    """A difference of fractions in percentage points.

    >>> points(0.0123)
    '+1.23'
    """
    return signed(100 * difference)


def interval(low: float, high: float) -> str:
    """The bounds of a difference of fractions in percentage points.

    >>> interval(-0.001, 0.0123)
    '−0.10 to +1.23'
    """
    return f"{points(low)} to {points(high)}"


def hits(number: float) -> str:
    """A number of examples more or less; the mean of some seeds may be a fraction, which matters where it is small.

    >>> hits(1234.5), hits(-2.4), hits(3.0), hits(0.01)
    ('+1,234', '−2.4', '+3', '0')
    """
    digits = 0 if abs(number) >= 9.95 or round(number, 1).is_integer() else 1
    return f"{number:+,.{digits}f}".replace("-", _MINUS) if round(number, digits) else "0"


def signed(number: float) -> str:
    """A number with its sign; what rounds to nothing has none.

    >>> signed(1.234), signed(-0.5), signed(-0.001)
    ('+1.23', '−0.50', '0.00')
    """
    return f"{number:+.2f}".replace("-", _MINUS) if round(number, 2) else "0.00"


def p_text(p: float) -> str:
    """A p as people read it.

    >>> p_text(0.0123), p_text(1e-9)
    ('p = 0.012', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def duration(seconds: float) -> str:
    """A time as people read it.

    >>> duration(2.345), duration(600), duration(7200)
    ('2.3 s', '10.0 min', '2.0 h')
    """
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def render(table: Table, format: Format = "terminal") -> str:
    """The table as text.

    The notes follow the table, as comments in LaTeX. CSV has no place for them: it holds numbers to compute with
    (fractions, not percent; mean and std apart), so show ``table.notes`` elsewhere.

    Args:
        table: what to render.
        format: terminal, markdown, latex or csv.
    """
    if format not in get_args(Format):
        raise LabError(f"There is no format {format!r}; there are {', '.join(get_args(Format))}.")
    if format == "csv":
        return _csv(table)
    heads = [_head(column) for column in table.columns]
    cells = [[text(value, column.kind) for value, column in zip(row, table.columns, strict=True)] for row in table.rows]
    left = [column.kind == "field" for column in table.columns]
    return {"terminal": _terminal, "markdown": _markdown, "latex": _latex}[format](heads, cells, left, table.notes)


def _head(column: Column) -> str:
    return column.title + {"accuracy": " %", "points": " points", "hits": " examples"}.get(column.kind, "")


def _terminal(heads: list[str], cells: list[list[str]], left: list[bool], notes: Sequence[str]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    # Text, not str: a name such as [red] is a name and not markup.
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for head, is_left in zip(heads, left, strict=True):
        grid.add_column(Text(head), justify="left" if is_left else "right", overflow="fold")
    for row in cells:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(file=out, width=10_000, color_system=None, legacy_windows=False)
    console.print(grid)
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"


def _markdown(heads: list[str], cells: list[list[str]], left: list[bool], notes: Sequence[str]) -> str:
    lines = [heads, [":--" if is_left else "--:" for is_left in left], *cells]
    written = [f"| {' | '.join(map(_markdown_escape, line))} |" for line in lines]
    return "\n".join(written) + "\n" + "".join(f"\n{_markdown_escape(note)}\n" for note in notes)


def _markdown_escape(name: str) -> str:
    for sign in "\\|<*_`[":
        name = name.replace(sign, f"\\{sign}")
    return " ".join(name.split())


def _latex(heads: list[str], cells: list[list[str]], left: list[bool], notes: Sequence[str]) -> str:
    lines = [f"\\begin{{tabular}}{{{''.join('l' if is_left else 'r' for is_left in left)}}}", "\\toprule"]
    lines += [" & ".join(map(_latex_escape, heads)) + r" \\", "\\midrule"]
    lines += [" & ".join(map(_latex_escape, row)) + r" \\" for row in cells]
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {' '.join(note.split())}" for note in notes)]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _latex_escape(name: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(name.split()))


def _csv(table: Table) -> str:
    heads = [f"{column.key}{part}" for column in table.columns for part in _csv_parts(column.kind)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    for row in table.rows:
        cells = [_csv_cells(value, column.kind) for value, column in zip(row, table.columns, strict=True)]
        writer.writerow([cell for each in cells for cell in each])
    return out.getvalue()


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of plain values as CSV, with a column for every key, in the order in which they come."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_parts(kind: str) -> tuple[str, ...]:
    """What follows the key of a column in the heads of its parts."""
    if kind in ("accuracy", "seconds"):
        return "_mean", "_std"
    parts = {"interval": ("_low", "_high"), "p": ("", "_holm"), "guesses": tuple(f"_{share}" for share in SHARES)}
    return parts.get(kind, ("",))


def _csv_cells(value: Value, kind: str) -> list[Any]:
    if value is None:
        return [None] * len(_csv_parts(kind))
    if kind == "guesses" and isinstance(value, tuple):
        return list(value)
    if isinstance(value, Measured):
        return [value.mean, value.std]
    if isinstance(value, Difference):
        found = value.paired
        cells: dict[str, list[float | None]] = {
            "points": [found.difference],
            "hits": [found.hits],
            "interval": [found.low, found.high],
            "p": [found.p, value.p],
        }
        return cells[kind]
    return [text(value, kind).replace(_MINUS, "-") if kind == "signed" else text(value, kind)]
