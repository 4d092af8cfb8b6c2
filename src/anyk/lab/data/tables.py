"""The one reader of tables: .csv and .tsv files of numbers, with a label in each row or without.

Python's csv module parses them. numpy.loadtxt and genfromtxt would give every label the room of the longest one, and count
rows without the lines between them, so that an error could not name the line to mend. Numbers go straight into float32: four
bytes a cell, whatever the file. Another format of tables needs what :func:`_rows` gives, and the titles for :class:`_Columns`.
"""

import array
import csv
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.data import labels
from anyk.lab.did_you_mean import nearest
from anyk.lab.errors import LabError

SUFFIXES = (".csv", ".tsv")
GROUPS = "groups"
"""The column, or the array of other files, that tells which examples belong together."""
LABEL_WORDS = frozenset(("y", "label", "labels", "target", "targets"))


class _Columns(NamedTuple):
    """What the columns hold: all that are neither label nor group are the numbers of an example."""

    titles: list[str] | None
    label: int | None
    group: int | None


class _Row(NamedTuple):
    line: int
    """in the file, from 1"""
    numbers: list[float]
    label: str
    group: str


class Labelled(NamedTuple):
    """All rows of a table: (N, d) float32, the label of each, and the group of each where there is such a column."""

    examples: Tensor
    labels: labels.Array
    groups: list[str] | None


def read(path: Path, label_column: str | None, is_test: bool) -> Labelled:
    """A table of numbers with a label in each row.

    Args:
        path: the file.
        label_column: the title of the column with the labels; None: the last column.
        is_test: the classes are known from another file, so one example of each may do.
    """
    chosen: _Columns | None = None

    def choose(first: list[str]) -> _Columns:
        nonlocal chosen
        if len(first) < 2:
            raise LabError(f"{path} has one column only: it needs numbers and a label, with , ; or tab between.")
        label = len(first) - 1 if label_column is None else _place(label_column, first, path)
        titles = [title.strip() for title in first] if label_column is not None or _is_header(first, label) else None
        group = next((place for place, title in enumerate(titles or ()) if title == GROUPS and place != label), None)
        chosen = _Columns(titles, label, group)
        return chosen

    values, codes, groups = array.array("f"), array.array("q"), list[str]()
    names: dict[str, int] = {}
    lines: list[int] = []  # of the first example of each class
    for row in _rows(path, choose):
        values.extend(row.numbers)
        groups.append(row.group)
        codes.append(names.setdefault(row.label, len(names)))
        if len(lines) < len(names):
            lines.append(row.line)
    assert chosen is not None
    numbers = np.frombuffer(codes, dtype=np.int64)
    counts = np.bincount(numbers)
    if "" in names:
        raise labels.missing_labels(counts[names[""]], path, f"line {lines[names['']]}")
    _refuse_measurements(path, chosen, names, is_test or counts.max() > 1)
    negative = [place for name, place in names.items() if re.fullmatch(r"-[0-9]+", name)]
    if negative and all(re.fullmatch(r"-?[0-9]+", name) for name in names):
        raise labels.missing_labels(int(counts[negative].sum()), path, f"line {lines[negative[0]]}", negative=True)
    examples = torch.from_numpy(np.frombuffer(values, dtype=np.float32)).view(len(codes), -1)
    return Labelled(examples, labels.objects(list(names))[numbers], groups if chosen.group is not None else None)


def blocks(path: Path, width: int, rows: int, label_column: str | None = None) -> Iterator[Tensor]:
    """The numbers of a table in blocks of at most ``rows``, read as they are asked for.

    Args:
        path: the file.
        width: the numbers of an example.
        rows: of a block.
        label_column: the title of a column to leave out; None: the last one, where there is one more than ``width``.
    """

    def choose(first: list[str]) -> _Columns:
        has_titles = label_column is not None or _is_header(first, len(first) - 1 if len(first) > width else None)
        titles = [title.strip() for title in first] if has_titles else None
        group = titles.index(GROUPS) if titles and len(first) > width and GROUPS in titles else None
        label = None if label_column is None else _place(label_column, first, path)
        if label is None and len(first) - (group is not None) == width + 1:
            label = max(place for place in range(len(first)) if place != group)
        found = len(first) - (label is not None) - (group is not None)
        if found != width:
            raise LabError(f"{path} has {found} columns of numbers, but the model takes {width}.")
        return _Columns(titles, label, group)

    records = _rows(path, choose)
    while block := list(itertools.islice(records, rows)):
        values = array.array("f", itertools.chain.from_iterable(row.numbers for row in block))
        yield torch.from_numpy(np.frombuffer(values, dtype=np.float32)).view(len(block), -1)


def _rows(path: Path, choose: Callable[[list[str]], _Columns]) -> Iterator[_Row]:
    """The rows of a table; ``choose`` decides from the first one which columns are what."""
    found = False
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            cells = filter(None, reader)
            first = next(cells, None)
            if first is not None:
                columns = choose(first)
                width = len(first)
                left_out = sorted((place for place in columns[1:] if place is not None), reverse=True)
                for row in itertools.chain([first] if columns.titles is None else [], cells):
                    if len(row) != width:
                        raise LabError(f"{path} has {len(row)} cells in line {reader.line_num}, but {width} before.")
                    label, group = ("" if place is None else row[place].strip() for place in columns[1:])
                    for place in left_out:
                        del row[place]
                    try:
                        numbers = list(map(float, row))
                    except ValueError as error:
                        raise LabError(
                            f"{path} has a cell that is not a number in line {reader.line_num} ({error}): "
                            "mend it, or name the label column with --label-column."
                        ) from None
                    found = True
                    yield _Row(reader.line_num, numbers, label, group)
    except (UnicodeDecodeError, csv.Error) as error:
        raise LabError(f"{path} is not text in columns ({error}): save it as UTF-8 .csv.") from None
    if not found:
        raise LabError(f"{path} has no rows of numbers.")


def _place(title: str, first: list[str], path: Path) -> int:
    """The column of this title."""
    titles = [each.strip() for each in first]
    if title not in titles:
        near = nearest(title, titles)
        ordered = near + [each for each in titles if each not in near]
        raise LabError(f"{path} has no column {title!r}: its columns are, the likeliest first, {', '.join(ordered)}.")
    return titles.index(title)


def _is_header(first: list[str], label: int | None) -> bool:
    """Whether the first line has titles: a cell that is no number, or 0, 1, 2, … as pandas numbers its columns."""
    cells = [cell.strip() for place, cell in enumerate(first) if place != label]
    if cells == [str(number) for number in range(len(cells))] and len(cells) > 1:
        return True
    return any(_number(cell) is None for cell in cells)


def _refuse_measurements(path: Path, columns: _Columns, names: Iterable[str], repeated: bool) -> None:
    """Raise where a column of measurements was taken for the labels."""
    numbers = ((name, _number(name)) for name in names)
    fraction = next((name for name, value in numbers if value is not None and value % 1 and math.isfinite(value)), None)
    if fraction is None and repeated:
        return
    problem = f"holds numbers with a fraction, such as {fraction}" if fraction is not None else "has no value twice"
    taken, others = "the last column", "after a line of titles"
    if columns.titles is not None and columns.label is not None:
        taken = f"the column {files.shortened(columns.titles[columns.label])!r}"
        others = f"the others are {', '.join(title for title in columns.titles if title != columns.titles[columns.label])}"
    remedy = f"name the right one with anyk import --label-column; {others}"
    raise LabError(f"{taken} of {path} was taken for the labels, but {problem}: {remedy}.")


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
