"""Tables: CSV, TSV, Parquet and Feather files by pyarrow, and frames in memory; and the encoder from columns to features."""

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
from numpy.typing import NDArray

from anyk.lab.config import DataFields
from anyk.lab.errors import LabError, first_line
from anyk.lab.files import shortened
from anyk.lab.options import nearest

SUFFIXES = (".csv", ".tsv", ".parquet", ".feather", ".arrow")
MOST_CATEGORIES = 256
"""of a column that is one-hot encoded"""
OWN_TEXT = "docs/own-data.md#text"
_MISSING = ["", "nan", "NaN", "NAN", "na", "NA", "n/a", "N/A", "#N/A", "<NA>", "null", "NULL", "None"]
_ID = re.compile(r"(^|_)(id|ids|group|groups|user|person|patient|subject|customer|client|session|account|household)(_|$)", re.I)
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__|index|level_\d+")
"""what pandas calls an index that became a column"""
_COMMA = re.compile(r"\s*[-+]?\d+,\d+\s*")

Array = NDArray[Any]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Column:
    """A column that a model takes: a number, or a text that becomes as many numbers as there are categories."""

    name: str
    mean: float = 0.0
    """of numbers: what stands for one that is missing"""
    categories: tuple[str, ...] | None = None
    """of texts: 1 for the one that the cell has, 0 for the others; all are 0 where it is missing, or is any other text"""

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 if self.categories is None else len(self.categories)


@dataclass(frozen=True)
class TableEncoder:
    """From the columns of a table, found by their names, to features (N, width) in float32."""

    columns: tuple[Column, ...]
    label: str = ""
    others: tuple[str, ...] = ()
    """columns that are known and no features: groups, times, and what was left out"""

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(column.width for column in self.columns)

    @property
    def features(self) -> list[str]:
        """A name for each feature: that of its column, of texts with the category, as in ``colour=red``."""
        return [
            name
            for column in self.columns
            for name in ([column.name] if column.categories is None else [f"{column.name}={c}" for c in column.categories])
        ]

    @classmethod
    def fit(
        cls, table: pa.Table, rows: Array, *, label: str, others: Sequence[str] = (), categories: Sequence[str] = ()
    ) -> Self:
        """The encoder of a table whose means and categories come from some of its rows, the training part, alone.

        Args:
            table: all of it.
            rows: positions of the training part.
            label: the column with the labels.
            others: columns that are no features.
            categories: columns of numbers that are categories.
        """
        columns, training = [], table.take(pa.array(rows))
        for name in table.column_names:
            if name == label or name in others:
                continue
            column = training.column(name)
            if name in categories or not _is_number(column.type):
                texts = sorted(text for text in pc.unique(_texts(column)).to_pylist() if text is not None)
                if len(texts) > MOST_CATEGORIES or 2 * len(texts) > max(training.num_rows, 40):
                    raise _too_many(name, len(texts), training.num_rows)
                columns.append(Column(name, categories=tuple(texts)))
            else:
                numbers = _numbers(column, name)
                known = numbers[~np.isnan(numbers)]
                columns.append(Column(name, float(known.mean()) if len(known) else 0.0))
        columns = [column for column in columns if column.width]
        if not columns:
            raise LabError(
                f"the table has no column to learn from beside {label!r}: its columns are {_listed(table.column_names)}."
            )
        return cls(tuple(columns), label, tuple(others))

    def transform(self, table: pa.Table, note: Note = lambda sentence: None) -> NDArray[np.float32]:
        """The features of all rows. Columns that are not known are left out, and named in a note.

        Args:
            table: with all columns of the encoder.
            note: called with remarks.
        """
        names = table.column_names
        known = {column.name for column in self.columns}
        if lacking := [name for name in known if name not in names]:
            near = nearest(lacking[0], names)
            hint = f"did you mean {near[0]!r}?" if near else f"its columns are {_listed(names)}."
            raise LabError(f"the table has no column {lacking[0]!r}, which the model was trained on: {hint}")
        if extra := [name for name in names if name not in known and name not in (*self.others, self.label)]:
            note(f"Left out, since the model was not trained on {'it' if len(extra) == 1 else 'them'}: {_listed(extra)}.")
        out = np.zeros((table.num_rows, self.width), np.float32)
        place, filled, unseen = 0, {}, {}
        for column in self.columns:
            values = table.column(column.name)
            if column.categories is None:
                numbers = _numbers(values, column.name)
                missing = np.isnan(numbers)
                out[:, place] = np.where(missing, column.mean, numbers)
                if missing.any():
                    filled[column.name] = int(missing.sum())
            else:
                found = pc.index_in(_texts(values), value_set=pa.array(column.categories))
                codes = found.to_numpy(zero_copy_only=False) if isinstance(found, pa.Array) else found.to_numpy()
                there = ~np.isnan(codes.astype(float))
                out[np.flatnonzero(there), place + codes[there].astype(int)] = 1.0
                if not there.all():
                    empty = int(_texts(values).null_count)
                    filled |= {column.name: empty} if empty else {}
                    unseen |= {column.name: int((~there).sum()) - empty} if int((~there).sum()) > empty else {}
            place += column.width
        if filled:
            counts = _listed(f"{name!r} {count:,}" for name, count in filled.items())
            note(f"Missing values that are filled, a number with the mean of its column, a text with no category: {counts}.")
        if unseen:
            counts = _listed(f"{name!r} {count:,}" for name, count in unseen.items())
            note(f"Texts that training did not have count as missing: {counts}.")
        return out

    def to_json(self) -> dict[str, Any]:
        """As it stands in a model's file."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """What :meth:`to_json` gave, after a way through JSON; or a ValueError."""
        try:
            columns = tuple(
                Column(
                    str(each["name"]),
                    float(each["mean"]),
                    None if each["categories"] is None else tuple(map(str, each["categories"])),
                )
                for each in value["columns"]
            )
            found = cls(columns, str(value["label"]), tuple(map(str, value["others"])))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"the columns of its table are not described as files of this version of anyk do ({error})"
            ) from None
        if len({column.name for column in columns}) < len(columns) or not all(abs(column.mean) < 1e300 for column in columns):
            raise ValueError("two columns of its table have one name, or a mean is no number")
        return found


@dataclass(frozen=True)
class Labelled:
    """A table with what its columns are."""

    table: pa.Table
    label: str
    others: tuple[str, ...]
    """columns that are no features"""
    labels: Array
    """(N,), integers or texts"""
    groups: Array | None
    times: Array | None
    remarks: tuple[str, ...]


def read(path: Path) -> pa.Table:
    """A file as a table."""
    suffix = path.suffix.lower()
    try:
        if suffix in (".csv", ".tsv"):
            return _read_text(path)
        table = pyarrow.parquet.read_table(path) if suffix == ".parquet" else pyarrow.feather.read_table(path)
    except (pa.ArrowInvalid, pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path} cannot be read ({first_line(error)}).") from None
    return _checked(table, path.name)


def _read_text(path: Path) -> pa.Table:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        lines = [line for _, line in zip(range(20), file, strict=False)]
    if not lines or not lines[0].strip():
        raise LabError(f"{path} is empty.")
    delimiter = max(",;\t", key=lines[0].count)
    cells = [cell.strip().strip('"') for cell in lines[0].rstrip("\r\n").split(delimiter)]
    # A line of titles has no numbers; the last cell may be a label.
    titled = not any(_is_float(cell) for cell in cells[:-1] or cells) or (
        len(set(cells)) == len(cells) and cells == [str(n) for n in range(len(cells))]
    )
    reading = pyarrow.csv.ReadOptions(autogenerate_column_names=not titled)
    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    converting = pyarrow.csv.ConvertOptions(null_values=_MISSING, strings_can_be_null=True)
    table = pyarrow.csv.read_csv(path, reading, parsing, converting)
    if not titled:
        table = table.rename_columns([str(place) for place in range(1, table.num_columns + 1)])
    return _checked(table, path.name)


def of_frame(frame: Any, name: str) -> pa.Table:
    """A frame of pandas, polars or another library as a table."""
    try:
        table = pa.table(frame) if hasattr(frame, "__arrow_c_stream__") else pa.Table.from_pandas(frame)
    except (pa.ArrowException, TypeError, ValueError, ImportError) as error:
        raise LabError(f"{name} cannot be read as a table ({first_line(error)}).") from None
    return _checked(table, name)


def is_frame(value: Any) -> bool:
    """Whether it is a table: a DataFrame of pandas, or what shows several columns as Arrow does."""
    return hasattr(value, "columns") and (hasattr(value, "__arrow_c_stream__") or hasattr(value, "iloc"))


def _checked(table: pa.Table, name: str) -> pa.Table:
    names = [str(each).strip() for each in table.column_names]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise LabError(f"{name} has two columns called {twice[0]!r}: give each a title of its own.")
    if not table.num_rows:
        raise LabError(f"{name} has no rows.")
    columns = [column.cast(pa.string()) if pa.types.is_large_string(column.type) else column for column in table.columns]
    return pa.table(columns, names=names)


def labelled(table: pa.Table, config: DataFields, name: str) -> Labelled:
    """Find the labels, groups and times of a table, and the columns that are no features.

    Args:
        table: the whole table.
        config: which columns are what.
        name: of the data, for messages.
    """
    names, remarks = table.column_names, list[str]()
    for option in ("label_column", "group_column", "time_column"):
        if (given := getattr(config, option)) is not None:
            require(given, names, name, option)
    for option in ("drop", "categories"):
        for given in getattr(config, option):
            require(given, names, name, option)
    index = [each for each in names if _INDEX.fullmatch(each) and each not in (config.label_column, config.group_column)]
    group = config.group_column or ("groups" if "groups" in names and config.label_column != "groups" else None)
    free = [each for each in names if each not in (*index, group, config.time_column, *config.drop)]
    label = config.label_column or (free[-1] if free else names[-1])
    if len(names) < 2:
        raise LabError(f"{name} has one column only: it needs features and a label, with , ; or tab between.")
    if config.label_column is None:
        remarks.append(f"The label is {label!r}, the last column; --label-column names another.")
    others = dict.fromkeys(
        each for each in (*index, group, config.time_column, *config.drop) if each is not None and each != label
    )
    if index:
        remarks.append(f"Left out, since {'it counts' if len(index) == 1 else 'they count'} the rows: {_listed(index)}.")
    groups = None
    if group is not None:
        column = table.column(group)
        if column.null_count:
            raise LabError(
                f"{name} has {column.null_count:,} rows without a value in the group column {group!r}: fill them in."
            )
        groups = column.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    for each in names:
        if each == label or each in others:
            continue
        column = table.column(each)
        kind = column.type
        if pa.types.is_temporal(kind) or (pa.types.is_string(kind) and _are_dates(column)):
            others[each] = None
            remarks.append(
                f"Left out: {each!r} has dates. --time-column {each} takes the newest rows for the test; or make numbers of them."
            )
        elif _is_number(kind) and _counts_rows(column):
            others[each] = None
            remarks.append(f"Left out: {each!r} only numbers the rows.")
        elif groups is None and _looks_like_groups(each, column):
            text = " (as a text it would be too many categories)" if not _is_number(kind) else ""
            remarks.append(
                f"{each!r} looks like it says which rows belong together{text}: --group-column {each} keeps them in one part, "
                f"--drop {each} leaves it out."
            )
            if not _is_number(kind) and len(pc.unique(column)) > MOST_CATEGORIES:
                raise LabError(remarks[-1].rstrip(".") + ": give one of both.")
    table, commas = _with_decimal_points(table, [each for each in names if each != label and each not in others])
    if commas:
        remarks.append(f"Numbers with decimal commas are read as numbers: {_listed(commas)}.")
    return Labelled(
        table,
        label,
        tuple(others),
        _labels(table, label, name, config),
        groups,
        times(table, config.time_column, name),
        tuple(remarks),
    )


def _labels(table: pa.Table, label: str, name: str, config: DataFields) -> Array:
    column = table.column(label)
    if column.null_count:
        raise LabError(f"{name} has {column.null_count:,} rows without a label in {label!r}: remove them, or label them.")
    values = column.to_numpy() if pa.types.is_integer(column.type) else np.array([str(v) for v in column.to_pylist()], object)
    said = f"{label!r} of {name} was taken for the labels" + ("" if config.label_column else " as the last column")
    if pa.types.is_floating(column.type):
        numbers = column.to_numpy()
        if not (numbers == np.floor(numbers)).all():
            example = numbers[numbers != np.floor(numbers)][0]
            raise LabError(
                f"{said}, but holds numbers with a fraction, such as {example:g}: name the right one with --label-column."
            )
        values = numbers.astype(np.int64)
    if len(np.unique(values)) == len(values) and len(values) > 1:
        raise LabError(
            f"{said}, but has no value twice: name the right one with --label-column; the columns are {_listed(table.column_names)}."
        )
    if values.dtype.kind == "i" and values.min() < 0:
        raise LabError(
            f"{said}, but has {int((values < 0).sum()):,} negative labels, which usually mean no label: remove them."
        )
    return values


def times(table: pa.Table, column: str | None, name: str) -> Array | None:
    if column is None:
        return None
    values = table.column(column)
    if values.null_count:
        raise LabError(f"{name} has {values.null_count:,} rows without a time in {column!r}: fill them in.")
    if _is_number(values.type):
        return _numbers(values, column)
    found = []
    for value in values.to_pylist():
        try:
            moment = (
                value if isinstance(value, (datetime.datetime, datetime.date)) else datetime.datetime.fromisoformat(str(value))
            )
        except ValueError:
            raise LabError(
                f"--time-column {column} should have numbers or times such as 2024-05-01 12:30, but has {shortened(str(value))!r}."
            ) from None
        if not isinstance(moment, datetime.datetime):
            moment = datetime.datetime(moment.year, moment.month, moment.day)
        found.append((moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp())
    return np.array(found)


def require(given: str, names: Sequence[str], source: str, option: str) -> None:
    if given not in names:
        near = nearest(given, names)
        ordered = near + [each for each in names if each not in near]
        raise LabError(
            f"--{option.replace('_', '-')} {given}: {source} has no such column; the likeliest first: {_listed(ordered)}."
        )


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    )


def _is_float(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(column: pa.ChunkedArray, name: str) -> NDArray[np.float64]:
    """As float64, with NaN where a value is missing."""
    if not _is_number(column.type):
        texts = [text for text in pc.unique(column).to_pylist() if text is not None and not _is_float(str(text))]
        if texts:
            raise LabError(f"column {name!r} should have numbers, as in training, but has {shortened(str(texts[0]))!r}.")
    numbers = pc.cast(column, pa.float64(), safe=False).to_numpy().astype(np.float64)
    if np.isinf(numbers).any() or (np.abs(numbers[~np.isnan(numbers)]) > 3e38).any():
        raise LabError(
            f"column {name!r} has infinite or too large numbers: remove these rows, or leave it out with --drop {name}."
        )
    return numbers


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_struct(column.type):
        raise LabError("a column has lists or structures, not numbers or texts: spread it over columns, or give arrays (X, y).")
    return column.cast(pa.string())


def _are_dates(column: pa.ChunkedArray) -> bool:
    some = [text for text in column.slice(0, 50).to_pylist() if text]
    return bool(some) and all(re.match(r"\d{4}-\d\d?-\d\d?([ T]|$)|\d\d?[./]\d\d?[./]\d{2,4}([ T]|$)", text) for text in some)


def _counts_rows(column: pa.ChunkedArray) -> bool:
    if not pa.types.is_integer(column.type) or column.null_count or len(column) < 5:
        return False
    return bool((np.diff(column.to_numpy()) == 1).all())


def _looks_like_groups(name: str, column: pa.ChunkedArray) -> bool:
    """Whether values repeat as those of a user or a car do: a name that says so, or texts that are many and repeated."""
    if not (pa.types.is_integer(column.type) or pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return False
    rows, distinct = len(column), len(pc.unique(column))
    repeated = 2 * distinct <= rows
    if pa.types.is_integer(column.type):
        return bool(_ID.search(name)) and distinct > 10 and distinct < rows
    return distinct > 10 and ((bool(_ID.search(name)) and distinct < rows) or (distinct > MOST_CATEGORIES and repeated))


def _with_decimal_points(table: pa.Table, names: Sequence[str]) -> tuple[pa.Table, list[str]]:
    """Columns of texts such as 3,14 as numbers, and their names."""
    found = []
    for name in names:
        column = table.column(name)
        if pa.types.is_string(column.type):
            texts = pc.unique(column).to_pylist()
            some = [text for text in texts if text is not None]
            if (
                some
                and all(_COMMA.fullmatch(text) or _is_float(text) for text in some)
                and any(_COMMA.fullmatch(t) for t in some)
            ):
                numbers = pc.cast(pc.replace_substring(pc.utf8_trim_whitespace(column), ",", "."), pa.float64())
                table = table.set_column(table.column_names.index(name), name, numbers)
                found.append(name)
    return table, found


def _too_many(name: str, distinct: int, rows: int) -> LabError:
    if 2 * distinct > rows:
        return LabError(
            f"column {name!r} is text ({distinct:,} different ones in {rows:,} rows): {OWN_TEXT} says how to make features of "
            f"it; --drop {name} leaves it out."
        )
    return LabError(
        f"column {name!r} has {distinct:,} different texts, more than {MOST_CATEGORIES} categories: --drop {name} leaves it out; "
        f"if it says which rows belong together, --group-column {name}."
    )


def _listed(names: Any, most: int = 8) -> str:
    shown = list(map(str, names))
    return ", ".join(shown if len(shown) <= most else [*shown[:most], f"{len(shown) - most} more"])


def join(table: pa.Table, more: pa.Table) -> pa.Table:
    """The rows of both, with the columns of the first."""
    try:
        return pa.concat_tables([table, more.select(table.column_names)], promote_options="permissive")
    except pa.ArrowException as error:
        raise LabError(f"the training and test tables do not go together ({first_line(error)}).") from None
