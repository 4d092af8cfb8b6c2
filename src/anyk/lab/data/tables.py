"""The one reader of tables: .csv, .tsv, .parquet and .feather files, and frames in memory; with a label in each row or without.

A table comes in blocks of rows (:mod:`anyk.lab.data.table_files`); what follows is the same for all. A column of texts is
one-hot encoded, a missing number is the mean of its column, one that only counts the rows is left out, and each of these is
told. The :class:`Schema` that comes out of it goes with the model: new tables are matched by the names of their columns.
Numbers go straight into float32: four bytes a cell, whatever the file.
"""

import array
import datetime
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.data import labels, untrusted
from anyk.lab.data.table_files import Block, Cells, Frame, Table, opened
from anyk.lab.did_you_mean import nearest
from anyk.lab.errors import LabError

GROUPS = "groups"
"""The column, or the array of other files, that tells which examples belong together."""
LABEL_WORDS = frozenset(("y", "label", "labels", "target", "targets"))
MOST_CATEGORIES = 256
"""Different texts of a column that is one-hot encoded."""

_SHOWN = 8  # names in a message
#: fewer rows may be counted by chance
_FEWEST_COUNTED = 5
#: above, float32 does not have every integer
_MOST_COUNTED = 1 << 24
_MISSING = frozenset(("", "nan", "na", "n/a", "#n/a", "<na>", "null"))
_NO_NUMBERS = _MISSING | {"none"}  # of a column of texts, it may be one of them
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__|index|level_\d+")
"""What pandas calls an index that became a column."""


@dataclass(frozen=True)
class Options:
    """How a table is read. The fields are those of :class:`anyk.lab.run.config.DataFields`, which tells what they mean."""

    label_column: str | None = None
    drop: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    missing: Literal["mean", "refuse"] = "mean"
    row_numbers: bool = False


@dataclass(frozen=True)
class Column:
    """A column that a model takes: a number, or a text that becomes as many numbers as there are categories."""

    name: str
    mean: float = 0.0
    """of numbers: what stands for one that is missing; NaN: nothing does"""
    categories: tuple[str, ...] | None = None
    """of texts: 1 for the one that the cell has, 0 for the others; all are 0 for any other text, and where it is missing"""

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 if self.categories is None else len(self.categories)


@dataclass(frozen=True)
class Schema:
    """The columns of the table that a model was trained on, in its order. It stands in a model's file as JSON."""

    columns: tuple[Column, ...]
    label: str = ""
    """the title of the column with the labels"""
    others: tuple[str, ...] = ()
    """titles of columns that are no features: groups, and what was left out"""
    titled: bool = True
    """False: the table had no titles, and a column is called by its place, from 1"""

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(column.width for column in self.columns)

    @property
    def features(self) -> list[str]:
        """A name for each feature: that of its column, of texts with the category, as in ``colour=red``."""
        named = (
            [column.name] if column.categories is None else [f"{column.name}={c}" for c in column.categories]
            for column in self.columns
        )
        return list(itertools.chain.from_iterable(named))

    @classmethod
    def from_json(cls, value: Any) -> "Schema":
        """What :func:`dataclasses.asdict` gave, after a way through JSON; or a ValueError."""
        if not isinstance(value, dict) or value.keys() != {"columns", "label", "others", "titled"}:
            raise ValueError("the columns of its table are not described as files of this version of anyk do")
        columns, label, others, titled = value["columns"], value["label"], value["others"], value["titled"]
        if not (isinstance(label, str) and type(titled) is bool and _are_texts(others) and isinstance(columns, list)):
            raise ValueError("the columns of its table are not described by texts")
        found = []
        for column in columns:
            if not isinstance(column, dict) or column.keys() != {"name", "mean", "categories"}:
                raise ValueError("a column of its table should have a name, a mean and categories")
            name, mean, categories = column["name"], column["mean"], column["categories"]
            if not isinstance(name, str) or type(mean) not in (int, float) or not abs(mean) < 1e300:
                raise ValueError("a column of its table should have a text as its name and a number as its mean")
            if categories is not None and not (_are_texts(categories) and categories):
                raise ValueError("the categories of a column of its table should be texts")
            found.append(Column(name, float(mean), None if categories is None else tuple(categories)))
        if len({column.name for column in found}) < len(found):
            raise ValueError("two columns of its table have one name")
        return cls(tuple(found), label, tuple(others), titled)


class Labelled(NamedTuple):
    """All rows of a table: (N, d) float32, the label of each, the group of each where there is such a column, what the columns
    are, and remarks about what was done to them."""

    examples: Tensor
    labels: labels.Array
    groups: list[str] | None
    schema: Schema
    remarks: list[str]


def read(source: "Path | Frame", options: Options, like: Schema | None = None, *, is_test: bool = False) -> Labelled:
    """A table with a label in each row.

    Args:
        source: the file, or a frame.
        options: what the columns are; by default the last has the labels.
        like: of a test table, the columns of the training table, which have to be there.
        is_test: the classes are known from elsewhere, so one example of each may do.
    """
    with opened(source) as table:
        names = _names(table, options, like)
        label, group = _label_and_group(table, names, options, like)
        remarks: list[str] = []
        if like is None and options.label_column is None and table.titled:
            remarks.append(f"The label is {names[label]!r}, the last column; --label-column names another.")
        labelled = _Labels(names[label])
        if like is not None:
            reader: _Encoder | _Learner = _Encoder(table, names, like, options, remarks.append)
        else:
            reader = _Learner(table, names, {label, group}, options, remarks.append)
        values = array.array("f")
        for block in table.blocks(reader.places | {label: True} | ({} if group is None else {group: True})):
            values.frombytes(reader.numbers(block).tobytes())
            labelled.add(block.lines, block.columns[label], None if group is None else block.columns[group])
        if not labelled.codes:
            raise LabError(f"{table.name} has no rows of numbers.")
        labelled.check(table, names, is_test or like is not None)
        matrix = np.frombuffer(values, dtype=np.float32).reshape(len(labelled.codes), -1)
        examples, schema = reader.finished(matrix, names[label])
        return Labelled(torch.from_numpy(examples), labelled.values(), labelled.groups or None, schema, remarks)


def blocks(
    source: "Path | Frame",
    schema: "Schema | int",
    rows: int,
    options: Options | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Tensor]:
    """The features of a table in blocks of at most ``rows``, read as they are asked for.

    Args:
        source: the file, or a frame.
        schema: the columns that a model takes, which are found by their names; or how many numbers it takes, if it knows none.
        rows: of a block.
        options: ``label_column`` and ``drop`` are left out; ``missing`` tells what becomes of missing numbers.
        note: called at the end with remarks about what was done to the data.
    """
    options = options or Options()
    with opened(source) as table:
        known = schema if isinstance(schema, Schema) else None
        names = _names(table, options, known, schema if isinstance(schema, int) else None)
        if isinstance(schema, int):
            schema = _by_place(table, names, schema, options)
        encoder = _Encoder(table, names, schema, options, note)
        found = False
        for block in table.blocks(encoder.places, rows):
            found = True
            yield torch.from_numpy(encoder.numbers(block))
        if not found:
            raise LabError(f"{table.name} has no rows of numbers.")
        encoder.tell()


class Log(NamedTuple):
    """Which columns of a log are what."""

    user: str
    item: str
    order: str | None = None


def sequences(source: Path, log: Log) -> tuple[list[str], list[list[str]]]:
    """The users of a log, in the order in which they come, and the items of each, the oldest first."""
    with opened(source) as table:
        names = _names(table, Options(label_column=log.item), None)
        user, item, *order = (_place(name, names, table.name) for name in log if name is not None)
        users: dict[str, int] = {}
        items: dict[str, int] = {}
        user_codes, item_codes, times = array.array("q"), array.array("q"), array.array("d")
        for block in table.blocks({user: True, item: True} | ({order[0]: True} if order else {})):
            for column, codes, known in ((user, user_codes, users), (item, item_codes, items)):
                cells = _stripped(block.columns[column])
                if "" in cells:
                    where = f"{table.unit} {block.lines[cells.index('')]}"
                    raise LabError(
                        f"{table.name} has an empty cell in column {names[column]!r}, {where}: fill it or remove the row."
                    )
                codes.extend([known.setdefault(cell, len(known)) for cell in cells])
            if order:
                times.extend(_moments(_stripped(block.columns[order[0]]), block.lines, table, names[order[0]]))
        if not user_codes:
            raise LabError(f"{table.name} has no rows of numbers.")
        whose = np.frombuffer(user_codes, np.int64)
        # Of one user, by time; of equal times, as in the file.
        by_user = np.lexsort((np.frombuffer(times, np.float64), whose)) if order else np.argsort(whose, kind="stable")
        ends = np.bincount(whose).cumsum().tolist()
        texts = list(items)
        ordered = [texts[code] for code in np.frombuffer(item_codes, np.int64)[by_user].tolist()]
        return list(users), [ordered[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def titles(source: Path) -> list[str]:
    """The first line of a text file, or the names of the columns of another."""
    with opened(source) as table:
        return [title.strip() for title in table.first]


def _moments(cells: list[str], lines: Sequence[int], table: "Table", name: str) -> list[float]:
    """Numbers, or times such as 2024-05-01 12:30, as numbers."""
    found = []
    for line, cell in zip(lines, cells, strict=True):
        value = _number(cell)
        if value is None:
            try:
                moment = datetime.datetime.fromisoformat(cell)
                value = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
            except (ValueError, OverflowError):
                value = math.nan
        if not math.isfinite(value):
            raise LabError(
                f"{table.name} should have numbers or times such as 2024-05-01 12:30 in column {name!r}, but has "
                f"{files.shortened(cell)!r} in {table.unit} {line}."
            )
        found.append(value)
    return found


# --- what the columns are ---------------------------------------------------------------------------------------------


def _names(table: "Table", options: Options, like: Schema | None, width: int | None = None) -> list[str]:
    """The names of all columns: their titles, or their places from 1. Sets ``table.titled`` of a text file."""
    first = [title.strip() for title in table.first]
    known = [column.name for column in like.columns] if like is not None and like.titled else []
    if not table.typed:
        named = options.label_column is not None or bool(options.drop or options.categories)
        if known:
            named |= not set(known).isdisjoint(first) or all(_number(title) is None for title in first)
        label: int | None = len(first) - 1
        if (width is not None and len(first) <= width) or (like is not None and like.label != str(len(first))):
            label = None
        table.titled = named or (not known and _is_header(table, label))
    if known and not table.titled:
        raise LabError(
            f"{table.name} has no line of titles, but the model knows its columns by name ({_listed(known)}): add the titles."
        )
    if not table.titled or (like is not None and not like.titled):
        return [str(place) for place in range(1, len(first) + 1)]
    twice = next((name for place, name in enumerate(first) if name in first[:place]), None)
    if twice is not None and (like is not None or width is None):
        raise LabError(f"{table.name} has two columns called {twice!r}: give each a title of its own.")
    return first


def _label_and_group(table: "Table", names: list[str], options: Options, like: Schema | None) -> tuple[int, int | None]:
    if len(names) < 2:
        raise LabError(f"{table.name} has one column only: it needs numbers and a label, with , ; or tab between.")
    if like is not None:
        label = _place(options.label_column if options.label_column is not None else like.label, names, table.name)
    elif options.label_column is not None:
        label = _place(options.label_column, names, table.name)
    else:
        label = max((place for place, name in enumerate(names) if name not in table.index), default=len(names) - 1)
    for option in ("drop", "categories"):
        for name in getattr(options, option):
            if _place(name, names, table.name) == label:
                raise LabError(f"--{option} names {name!r}, but that is the column with the labels of {table.name}.")
    group = next((place for place, name in enumerate(names) if table.titled and name == GROUPS and place != label), None)
    return label, group


def _by_place(table: "Table", names: list[str], width: int, options: Options) -> Schema:
    """All columns of numbers, for a model that knows no names; without the last, where there is one more than it takes."""
    left_out = {_place(name, names, table.name) for name in options.drop} | {names.index(name) for name in table.index}
    if options.label_column is not None:
        left_out.add(_place(options.label_column, names, table.name))
    if table.titled and len(names) - len(left_out) > width and GROUPS in names:
        left_out.add(names.index(GROUPS))
    taken = [place for place in range(len(names)) if place not in left_out]
    if options.label_column is None and len(taken) == width + 1:
        left_out.add(taken.pop())
    if len(taken) != width:
        raise LabError(f"{table.name} has {len(taken)} columns of numbers, but the model takes {width}.")
    names[:] = [str(place) for place in range(1, len(names) + 1)]  # titles may be there twice
    others = tuple(names[place] for place in left_out)
    return Schema(tuple(Column(names[place], math.nan) for place in taken), others=others, titled=False)


def _is_header(table: "Table", label: int | None) -> bool:
    """Whether the first line has titles: a cell that is no number, or 0, 1, 2, … as pandas numbers its columns."""
    cells = {place: cell.strip() for place, cell in enumerate(table.first) if place != label}
    if list(cells.values()) == [str(number) for number in range(len(cells))] and len(cells) > 1:
        return True
    texts = [place for place, cell in cells.items() if _number(cell) is None and cell.lower() not in _NO_NUMBERS]
    below = [table.second[place].strip() if place < len(table.second) else "" for place in texts]
    numbers = any(_number(cell) is not None for cell in cells.values())
    if texts and numbers and below and all(cell and _number(cell) is None for cell in below):
        raise LabError(
            f"the first line of {table.name} may be titles or an example ({files.shortened(cells[texts[0]])!r} is no number, "
            f"and nor is {files.shortened(below[0])!r} below it): put a line of titles above it, or name the label column, "
            "--label-column, which says that it is one."
        )
    return bool(texts) or (len(cells) > 0 and not numbers)


def _place(name: str, names: list[str], source: str) -> int:
    """The column of this name."""
    if name not in names:
        near = nearest(name, names)
        ordered = near + [each for each in names if each not in near]
        raise LabError(f"{source} has no column {name!r}: its columns are, the likeliest first, {', '.join(ordered)}.")
    return names.index(name)


class _Labels:
    """The labels of a table, and the groups."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.names: dict[str, int] = {}
        self.codes = array.array("q")
        self.lines: list[int] = []  # of the first example of each class
        self.groups: list[str] = []

    def add(self, lines: Sequence[int], cells: Sequence[str], groups: Sequence[str] | None) -> None:
        for line, cell in zip(lines, _stripped(cells), strict=True):
            self.codes.append(self.names.setdefault(cell, len(self.names)))
            if len(self.lines) < len(self.names):
                self.lines.append(line)
        self.groups += [] if groups is None else _stripped(groups)

    def values(self) -> labels.Array:
        return labels.objects(list(self.names))[np.frombuffer(self.codes, dtype=np.int64)]

    def check(self, table: "Table", names: list[str], is_test: bool) -> None:
        """Raise where a label is missing, or a column of measurements was taken for the labels."""
        counts = np.bincount(np.frombuffer(self.codes, dtype=np.int64))
        if "" in self.names:
            where = f"{table.unit} {self.lines[self.names['']]}"
            raise labels.missing_labels(counts[self.names[""]], table.name, where)
        self._refuse_measurements(table, names, is_test or counts.max() > 1)
        negative = [place for name, place in self.names.items() if re.fullmatch(r"-[0-9]+", name)]
        if negative and all(re.fullmatch(r"-?[0-9]+", name) for name in self.names):
            where = f"{table.unit} {self.lines[negative[0]]}"
            raise labels.missing_labels(int(counts[negative].sum()), table.name, where, negative=True)

    def _refuse_measurements(self, table: "Table", names: list[str], repeated: bool) -> None:
        numbers = ((name, _number(name)) for name in self.names)
        fraction = next((name for name, value in numbers if value is not None and value % 1 and math.isfinite(value)), None)
        if fraction is None and repeated:
            return
        problem = f"holds numbers with a fraction, such as {fraction}" if fraction is not None else "has no value twice"
        taken, others = "the last column", "after a line of titles"
        if table.titled:
            taken = f"the column {files.shortened(self.name)!r}"
            others = f"the others are {', '.join(title for title in names if title != self.name)}"
        raise LabError(
            f"{taken} of {table.name} was taken for the labels, but {problem}: "
            f"name the right one with --label-column; {others}."
        )


class _Missing:
    """Cells that are missing, by column: how many, and where the first is."""

    def __init__(self, table: "Table", options: Options) -> None:
        self.table, self.refuse = table, options.missing == "refuse"
        self.found: dict[str, int] = {}

    def note(self, name: str, missing: Any, lines: Sequence[int], *, refuse: bool = False) -> None:
        if not missing.any():
            return
        if self.refuse or refuse:
            where = f"{self.table.unit} {lines[int(missing.argmax())]}"
            remedy = "" if refuse else ", or give --missing mean"
            raise LabError(
                f"{self.table.name} has no value in column {name!r}, {where}: fill it in, or remove the row{remedy}."
            )
        self.found[name] = self.found.get(name, 0) + int(missing.sum())

    def sentence(self) -> list[str]:
        if not self.found:
            return []
        counts = _listed(f"{name!r} {count:,}" for name, count in self.found.items())
        return [f"Missing values that are filled, a number with the mean of its column, a text with no category: {counts}."]


class _Learner:
    """The features of a training table: what their columns hold is found out on the way."""

    def __init__(
        self, table: "Table", names: list[str], left_out: set[int | None], options: Options, note: Callable[[str], None]
    ) -> None:
        self.table, self.options, self.note = table, options, note
        self.missing = _Missing(table, options)
        dropped = {names.index(name) for name in options.drop}
        indices = {names.index(name) for name in table.index if name not in options.categories and not options.row_numbers}
        if told := [names[place] for place in sorted(indices - dropped - left_out)]:
            note(f"The index of {table.name} is left out: {_listed(map(repr, told))}; --row-numbers takes it.")
        self.others = [names[place] for place in range(len(names)) if place in (left_out | dropped | indices)]
        taken = [place for place in range(len(names)) if names[place] not in self.others]
        if not taken:
            raise LabError(f"{table.name} has no columns beside the label: it needs at least one.")
        forced = {names.index(name) for name in options.categories}
        self.columns = {place: _Learned(names[place], table, place in forced) for place in taken}
        self.places = {place: place in forced for place in taken}

    def numbers(self, block: "Block") -> Any:
        """(rows, columns): numbers, or the numbers of the categories; NaN where there is none."""
        matrix = np.empty((len(block.lines), len(self.columns)), np.float32)
        for into, (place, column) in enumerate(self.columns.items()):
            matrix[:, into] = column.numbers(block.columns[place], block.lines)
            self.missing.note(column.name, np.isnan(matrix[:, into]), block.lines)
        return matrix

    def finished(self, matrix: Any, label: str) -> tuple[Any, Schema]:
        """The features, and what the columns are."""
        columns = list(self.columns.values())
        counting = [] if self.options.row_numbers else [place for place in range(len(columns)) if self._counts(matrix, place)]
        if counting:
            told = [columns[place].name for place in counting]
            self.note(f"Only the rows are counted in {_listed(map(repr, told))}, so it is left out; --row-numbers takes it.")
        kept = [place for place in range(len(columns)) if place not in counting]
        named = [columns[place].name for place in kept if self._names_rows(matrix, place)]
        if named and not self.options.row_numbers:
            self.note(
                f"{_listed(map(repr, named))} has another whole number in every row. If that only names the row, leave it out: "
                f"--drop {named[0]!r}."
            )
        if not kept:
            raise LabError(f"{self.table.name} has no columns beside the label and what counts the rows.")
        described = [columns[place].described(matrix[:, place], self.options) for place in kept]
        if self.table.titled and all(each.categories is not None and each.name in each.categories for each in described):
            raise LabError(
                f"the first line of {self.table.name} was taken for titles, but {described[0].name!r} and the others stand "
                "below too: put a line of titles above it."
            )
        if texts := [f"{each.name!r} {len(each.categories)}" for each in described if each.categories is not None]:
            self.note(f"Columns of texts that are one-hot encoded, with the number of their categories: {_listed(texts)}.")
        for sentence in self.missing.sentence():
            self.note(sentence)
        others = (*(name for name in self.others if name != label), *(columns[place].name for place in counting))
        schema = Schema(tuple(described), label, others, self.table.titled)
        self._refuse_too_wide(len(matrix), schema)
        if len(kept) == len(columns) == schema.width and not self.missing.found and not texts:
            return matrix, schema
        return np.concatenate(
            [_encoded(matrix[:, place], each) for place, each in zip(kept, described, strict=True)], 1
        ), schema

    def _counts(self, matrix: Any, place: int) -> bool:
        """Whether a column has whole numbers that follow one another, each once and in any order; or whole numbers, none twice,
        under the title that pandas gives to an index."""
        column, name = matrix[:, place], list(self.columns.values())[place].name
        if not self._names_rows(matrix, place):
            return False
        low, high = float(column.min()), float(column.max())
        is_index = self.table.titled and _INDEX.fullmatch(name) and low >= 0 and high < _MOST_COUNTED
        return bool(is_index) or high == low + len(column) - 1

    def _names_rows(self, matrix: Any, place: int) -> bool:
        """Whether a column has whole numbers, none twice. In float32: beyond 2^24 two of them may look alike."""
        column = matrix[:, place]
        if list(self.columns.values())[place].categories is not None or not _FEWEST_COUNTED <= len(column) <= _MOST_COUNTED:
            return False
        return bool((column % 1 == 0).all()) and len(np.unique(column)) == len(column)

    def _refuse_too_wide(self, rows: int, schema: Schema) -> None:
        if rows * schema.width * 4 <= max(untrusted.FREE, untrusted.MOST * self.table.size):
            return
        widest = max(schema.columns, key=lambda column: column.width)
        raise LabError(
            f"{self.table.name} would become {rows:,} x {schema.width:,} numbers by one-hot encoding: leave columns of texts "
            f"out, such as --drop {widest.name!r} with {widest.width:,} categories."
        )


class _Learned:
    """One column of a training table: numbers or texts, as its first cells show."""

    def __init__(self, name: str, table: "Table", forced: bool) -> None:
        self.name, self.table, self.forced = name, table, forced
        self.categories: dict[str, int] | None = {} if forced else None
        self.are_numbers = False
        self.rows = 0

    def numbers(self, cells: "Cells", lines: Sequence[int]) -> Any:
        """What the cells hold as numbers: those of a text are the places of the categories."""
        self.rows += len(lines)
        if self.table.typed and not isinstance(cells, np.ndarray) and self.categories is None:
            self.categories = {}
        if self.categories is None:
            values, wrong = _numbers(cells)
            if wrong is None:
                self.are_numbers |= not bool(np.isnan(values).all())
                return _finite(values, self.name, lines, self.table)
            if self.are_numbers or not np.isnan(values).all():
                self._refuse_mixture(str(cells[wrong]), lines[wrong])
            self.categories = {}
        texts = _stripped(cells)
        known = self.categories
        for line, text in zip(lines, texts, strict=True):
            if text in known or text.lower() in _MISSING:
                continue
            if not self.forced and not self.table.typed and _number(text) is not None:
                self._refuse_mixture(text, line)
            known[text] = len(known)
            if len(known) > MOST_CATEGORIES:
                self._refuse_many(f"more than {MOST_CATEGORIES}")
        return np.array([known.get(text, math.nan) for text in texts], np.float32)

    def described(self, column: Any, options: Options) -> Column:
        if self.categories is not None:
            if not self.categories:
                raise LabError(
                    f"{self.table.name} has no value at all in column {self.name!r}: leave it out, --drop {self.name!r}."
                )
            if len(self.categories) > max(10, self.rows / 2):
                self._refuse_many(f"{len(self.categories):,}")
            return Column(self.name, categories=tuple(self.categories))
        if not self.are_numbers:
            raise LabError(
                f"{self.table.name} has no value at all in column {self.name!r}: leave it out, --drop {self.name!r}."
            )
        return Column(self.name, float(np.nanmean(column, dtype=np.float64)))

    def _refuse_mixture(self, text: str, line: int) -> None:
        raise LabError(
            f"{self.table.name} has numbers and texts in column {self.name!r}, such as {files.shortened(text.strip())!r} in "
            f"{self.table.unit} {line}: mend it, leave it out (--drop {self.name!r}), name the right label column "
            f"(--label-column), or give --categories {self.name!r} if each is a category."
        )

    def _refuse_many(self, many: str) -> None:
        assert self.categories is not None
        shown = ", ".join(repr(files.shortened(text, 30)) for text in itertools.islice(self.categories, 3))
        raise LabError(
            f"{self.table.name} has {many} different texts in {self.rows:,} rows of column {self.name!r} ({shown}, …), too "
            f"many to be one-hot encoded: leave it out, --drop {self.name!r}, or name it as the label column."
        )


class _Encoder:
    """The features of a table whose columns are known, found by their names."""

    def __init__(self, table: "Table", names: list[str], schema: Schema, options: Options, note: Callable[[str], None]) -> None:
        self.table, self.schema, self.note = table, schema, note
        self.missing = _Missing(table, options)
        self.unknown: dict[str, tuple[int, str]] = {}
        wanted = [column.name for column in schema.columns]
        left_out = {*schema.others, schema.label, GROUPS, *options.drop, *table.index, options.label_column}
        missing = [name for name in wanted if name not in names]
        more = [name for name in names if name not in wanted and name not in left_out]
        indices = [name for name in more if schema.titled and _INDEX.fullmatch(name)]
        more = [name for name in more if name not in indices]
        if missing or more:
            problems = [f"has no column {_listed(map(repr, missing))}"] if missing else []
            problems += [f"has {_listed(map(repr, more))}, which the training table had not"] if more else []
            remedy = "--drop leaves columns out" if more and not missing else f"the columns are {_listed(wanted, 100)}"
            raise LabError(f"{table.name} {', and '.join(problems)}: {remedy}.")
        if indices:
            note(f"{table.name} has a column {_listed(map(repr, indices))} more, as pandas calls an index; it is left out.")
        self.columns = {names.index(column.name): column for column in schema.columns}
        self.places = {place: column.categories is not None for place, column in self.columns.items()}
        self.codes = {
            place: {text: code for code, text in enumerate(column.categories)}
            for place, column in self.columns.items()
            if column.categories is not None
        }

    def numbers(self, block: "Block") -> Any:
        """(rows, features)."""
        parts = []
        for place, column in self.columns.items():
            cells = block.columns[place]
            if column.categories is None:
                values, wrong = _numbers(cells)
                if wrong is not None:
                    raise LabError(
                        f"{self.table.name} should have numbers in column {column.name!r}, but has "
                        f"{files.shortened(str(cells[wrong]).strip())!r} in {self.table.unit} {block.lines[wrong]}."
                    )
                values = _finite(values, column.name, block.lines, self.table)
                self.missing.note(column.name, np.isnan(values), block.lines, refuse=math.isnan(column.mean))
            else:
                texts, codes = _stripped(cells), self.codes[place]
                values = np.array([codes.get(text, math.nan) for text in texts], np.float32)
                missing = np.array([text.lower() in _MISSING and text not in codes for text in texts], bool)
                self.missing.note(column.name, missing, block.lines)
                for text in itertools.compress(texts, np.isnan(values) & ~missing):
                    count, first = self.unknown.get(column.name, (0, text))
                    self.unknown[column.name] = count + 1, first
            parts.append(_encoded(values, column))
        return np.ascontiguousarray(np.concatenate(parts, 1))

    def finished(self, matrix: Any, label: str) -> tuple[Any, Schema]:
        """The features as they are, and what the columns are."""
        self.tell()
        return matrix, self.schema

    def tell(self) -> None:
        """Remarks about what was done to the data."""
        for sentence in self.missing.sentence():
            self.note(f"{self.table.name}: {sentence}")
        for name, (count, first) in self.unknown.items():
            rows = "1 row has a text" if count == 1 else f"{count:,} rows have texts"
            self.note(
                f"{self.table.name}: {rows} in column {name!r} that the training table had not, such as "
                f"{files.shortened(first)!r}: none of its categories."
            )


def _encoded(values: Any, column: Column) -> Any:
    """(rows, features) of one column, from its numbers or the places of its categories; NaN where there is none."""
    if column.categories is None:
        return np.where(np.isnan(values), np.float32(column.mean), values).astype(np.float32)[:, None]
    made = np.zeros((len(values), len(column.categories)), np.float32)
    rows = np.flatnonzero(~np.isnan(values))
    made[rows, values[rows].astype(np.int64)] = 1
    return made


# --- cells ------------------------------------------------------------------------------------------------------------


def _numbers(cells: Cells) -> tuple[Any, int | None]:
    """Cells as float64, NaN where one is missing or no number; and which is the first that is a text."""
    if isinstance(cells, np.ndarray):
        return cells, None
    try:
        return np.array(list(map(float, cells)), np.float64), None
    except ValueError:
        pass
    values, wrong = np.full(len(cells), math.nan), None
    for place, cell in enumerate(cells):
        value = _number(cell)
        if value is not None:
            values[place] = value
        elif wrong is None and cell.strip().lower() not in _NO_NUMBERS:
            wrong = place
    return values, wrong


def _finite(values: Any, name: str, lines: Sequence[int], table: "Table") -> Any:
    """The numbers; raises where one is infinite, or would be in float32."""
    wrong = np.abs(values) > np.finfo(np.float32).max
    if wrong.any():
        place = int(wrong.argmax())
        raise LabError(
            f"{table.name} has the number {values[place]:g} in column {name!r}, {table.unit} {lines[place]}, but float32 ends "
            "at 3.4e38: scale it, or remove the row."
        )
    gaps = np.isnan(values)
    return np.where(gaps, math.nan, values) if gaps.any() else values  # of one kind: some NaN warn where they are converted


def _stripped(cells: Cells) -> list[str]:
    return [cell.strip() for cell in cells]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _listed(names: Iterable[str], most: int = _SHOWN) -> str:
    """Some names, and how many more there are."""
    shown = [files.shortened(name) for name in names]
    return ", ".join(shown if len(shown) <= most else [*shown[:most], f"and {len(shown) - most} more"])


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
