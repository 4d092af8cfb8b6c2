"""Brings the figures of benchmarks/results.md, and of files beside it, to the pages that quote them.

    python benchmarks/quote.py             writes the pages; `make bench` does so after measuring
    python benchmarks/quote.py --check     writes nothing and ends with 1 if a page tells something else

A page says where and what: what stands between ``<!-- bench: NAME -->`` and ``<!-- end -->`` is what has that name in
QUOTES below, mostly a table made of the tables of the results.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from measuring import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.md"
PLACE = re.compile(r"(?<=<!-- bench: )([\w -]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

Row = dict[str, str]


def tables(title: str, results: str) -> list[list[Row]]:
    """The tables of the section whose title begins so; a row by the words of its header."""
    section = re.search(rf"^## {title}.*?(?=^## |\Z)", results, re.MULTILINE | re.DOTALL)
    if section is None:
        raise SystemExit(f"benchmarks/results.md has no section {title!r}")
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", section[0], re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def figure(cell: str) -> str:
    """In about two digits."""
    value = float(cell)
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def machine(results: str) -> str:
    """On what it was measured, and how busy that was."""
    return f"Measured on {results.splitlines()[2]}"


def cost(results: str) -> str:
    """A line for each shape, and the losses and operators that people start with."""
    shapes: dict[str, dict[str, Row]] = {}
    for row in tables("Losses", results)[0]:
        shapes.setdefault(row["batch, n, m"], {})[row["operator"]] = row
    columns = {
        "splitter": ("splitter", "native default"),
        "LapSum": ("LapSum", "native default"),
        "splitter, pure": ("splitter", "native pure"),
        "LapSum, error": ("LapSum", "native error"),
        "splitter, plain code": ("splitter", "plain default"),
    }
    rows = []
    for shape, operators in shapes.items():
        cells = [figure(operators[operator][column]) for operator, column in columns.values()]
        rows.append([shape, operators["splitter"]["CE ms"], *cells])
    return markdown_table(["batch, classes, m", "cross-entropy, ms", *columns], rows)


def front(results: str) -> str:
    """What README shows of the losses."""
    columns = {
        "`TopKErrorLoss`": "native TopKErrorLoss",
        "`TopKCrossEntropyLoss`": "native TopKCrossEntropyLoss",
        "`TopKErrorLoss` without C": "plain TopKErrorLoss",
    }
    rows = [
        [row["batch x classes"], row["CE ms"], *(figure(row[name]) for name in columns.values())]
        for row in tables("As they come", results)[0]
    ]
    return markdown_table(["batch x classes", "cross-entropy, ms", *columns], rows)


def part(title: str, *, only: tuple[str, str] = ("", ""), without: tuple[str, ...] = ()) -> Callable[[str], str]:
    """The first table of a section: the rows that have this in this column, all columns but that one and some."""

    def quote(results: str) -> str:
        column, value = only
        rows = [row for row in tables(title, results)[0] if row.get(column, value) == value]
        header = [name for name in rows[0] if name not in (column, *without)]
        return markdown_table(header, [[row[name] for name in header] for row in rows])

    return quote


def of(file: str, quote: Callable[[str], str]) -> Callable[[str], str]:
    """The same of other results."""
    return lambda results: quote((RESULTS.parent / file).read_text(encoding="utf-8"))


#: of the table of temperatures
LEFT_OUT = ("undecided at the start", "undecided at the half", "undecided at the end", "recall, sd over seeds")
QUOTES: dict[str, Callable[[str], str]] = {
    "machine": machine,
    "cost": cost,
    "front": front,
    "head": part("Training a head"),
    "start": of("temperature.md", part("By the temperature at the start", without=LEFT_OUT)),
    "difftopk": part("Beside difftopk", only=("anyk", "splitter"), without=("difftopk",)),
}


def quoted(page: str, results: str) -> str:
    """The page with the tables of these results."""
    return PLACE.sub(lambda place: f"{place[1]}{place[2]}\n{QUOTES[place[1]](results)}\n\n", page)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page tells something else")
    check = parser.parse_args(arguments).check
    results = RESULTS.read_text(encoding="utf-8")
    if "| native pure |" not in results:
        print("these results are those of the plain code alone: the pages keep what they have")
        return 0
    stale = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        new = quoted(text, results)
        if new != text:
            stale = 1
            print(f"{page.relative_to(ROOT)} {'tells something else' if check else 'written'}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return stale if check else 0


if __name__ == "__main__":
    raise SystemExit(main())
