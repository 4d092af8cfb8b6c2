"""Tables as they are stored: .csv and .tsv, .parquet, .feather, and frames in memory; opened, and read in blocks of rows.

A block comes in columns: of a text file the cells as they stand there (Python's csv module parses them: numpy.loadtxt could not
name the line to mend), of pyarrow's files numbers or texts, as their types say.
"""

import csv
import itertools
import struct
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from anyk.lab import files
from anyk.lab.data import untrusted
from anyk.lab.errors import LabError, first_line

_TEXT_FILES = (".csv", ".tsv")
_PARQUET = (".parquet", ".pq")
_FEATHER = (".feather", ".arrow")
SUFFIXES = (*_TEXT_FILES, *_PARQUET, *_FEATHER)
CELLS = 1 << 16
"""of a block"""
Cells = Any
"""Of a column of a block: texts as they stand in a file, or an array of numbers with NaN for what is missing."""

_Item = TypeVar("_Item")


class Block(NamedTuple):
    lines: Sequence[int]
    """where the rows stand: lines of a text file, from 1, or rows, from 0"""
    columns: Mapping[int, Cells]
    """by place, those that were asked for"""


class Table(ABC):
    """A table that is open."""

    name: str
    """what to call it in a message"""
    first: list[str]
    """the titles, or of a text file its first line"""
    second: Sequence[str] = ()
    """of a text file, the line after it"""
    titled: bool = True
    typed: bool = True
    """whether the table itself says which columns are texts"""
    index: tuple[str, ...] = ()
    """columns that are the index of a frame of pandas"""
    unit: str = "row"
    size: int = 0
    """bytes of the file"""

    @abstractmethod
    def blocks(self, wanted: Mapping[int, bool], most: int = CELLS) -> Iterator[Block]:
        """All rows, at most so many at a time. Of the columns those at some places; True: as texts, whatever they are."""


@contextmanager
def opened(source: "Path | Frame") -> Iterator[Table]:
    if isinstance(source, Frame):
        yield source
        return
    suffix = source.suffix.lower()
    if suffix in _TEXT_FILES:
        try:
            with open(source, encoding="utf-8-sig", newline="") as file:
                yield _TextTable(source, file)
        except (UnicodeDecodeError, csv.Error) as error:
            raise LabError(f"{source} is not text in columns ({error}): save it as UTF-8 .csv.") from None
        return
    yield Frame.of_file(source)


class _TextTable(Table):
    typed, unit = False, "line"

    def __init__(self, path: Path, file: Any) -> None:
        self.name, self.size = str(path), path.stat().st_size
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        self.reader = csv.reader(file, delimiter=delimiter)
        self.rows = filter(None, self.reader)
        self.begin = [(self.reader.line_num, row) for row in itertools.islice(self.rows, 2)]
        if not self.begin:
            raise LabError(f"{path} has no rows of numbers.")
        self.first, self.second = self.begin[0][1], self.begin[-1][1]

    def blocks(self, wanted: Mapping[int, bool], most: int = CELLS) -> Iterator[Block]:
        width = len(self.first)
        numbered = itertools.chain(self.begin[1:] if self.titled else self.begin, self._rest())
        while rows := list(itertools.islice(numbered, min(most, max(1, CELLS // width)))):
            for line, row in rows:
                if len(row) != width:
                    raise LabError(f"{self.name} has {len(row)} cells in line {line}, but {width} before.")
            columns = list(zip(*(row for _, row in rows), strict=True))
            yield Block([line for line, _ in rows], {place: columns[place] for place in wanted})

    def _rest(self) -> Iterator[tuple[int, list[str]]]:
        for row in self.rows:
            yield self.reader.line_num, row


class Frame(Table):
    """Columns of pyarrow: of a file, of pandas, or of whatever else shows its columns as Arrow does.

    Args:
        name: what to call it in a message.
        schema: its columns, of pyarrow.
        batches: gives its rows, as batches of pyarrow.
        size: bytes that it takes.
    """

    def __init__(self, name: str, schema: Any, batches: Callable[[int], Iterable[Any]], size: int) -> None:
        self.name, self.schema, self.batches, self.size = name, schema, batches, size
        self.first = list(schema.names)
        self.index = _index_of(schema)
        if not self.first:
            raise LabError(f"{name} has no columns.")

    @classmethod
    def of(cls, table: Any, name: str) -> "Frame":
        """A table of pyarrow, a frame of pandas, or what has ``__arrow_c_stream__``."""
        arrow = _pyarrow(name)
        try:
            if not isinstance(table, arrow.Table):
                is_pandas = type(table).__module__.partition(".")[0] == "pandas"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about titles that are no texts, which become such
                    table = arrow.Table.from_pandas(table, preserve_index=False) if is_pandas else arrow.table(table)
        except Exception as error:  # a column of objects of any kind
            raise LabError(f"{name} is no table of numbers and texts ({first_line(error)}).") from None
        return cls(name, table.schema, lambda rows: table.to_batches(max_chunksize=rows), max(table.nbytes, 1))

    @classmethod
    def of_file(cls, path: Path) -> "Frame":
        """A .parquet or .feather file. It is read a batch at a time, and no size that it claims is believed."""
        _pyarrow(str(path))
        opener, size = _parquet if path.suffix.lower() in _PARQUET else _feather, path.stat().st_size
        return next(_told(path, (cls(str(path), schema, batches, size) for schema, batches in opener(path, size))))

    def blocks(self, wanted: Mapping[int, bool], most: int = CELLS) -> Iterator[Block]:
        return _told(self.name, self._blocks(wanted, min(most, max(1, CELLS // len(self.first)))))

    def _blocks(self, wanted: Mapping[int, bool], rows: int) -> Iterator[Block]:
        first = 0
        for batch in self.batches(rows):
            first += len(batch)
            untrusted.refuse_bomb(self.name, self.size, 4 * first * len(wanted))
            columns = {place: self._cells(batch.column(place), place, as_text) for place, as_text in wanted.items()}
            if len(batch):
                yield Block(range(first - len(batch), first), columns)

    def _cells(self, column: Any, place: int, as_text: bool) -> Cells:
        import pyarrow.types as types

        kind = column.type
        if types.is_dictionary(kind):
            column, kind = column.dictionary_decode(), kind.value_type
        is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind)
        if types.is_boolean(kind) or is_text or (as_text and (is_number or types.is_temporal(kind))):
            return [_as_text(value) for value in column.to_pylist()]
        if is_number:
            return np.array(column.cast("float64", safe=False).to_numpy(zero_copy_only=False), np.float64)
        name = self.first[place]
        raise LabError(
            f"{self.name} has in column {name!r} {files.shortened(str(kind))}, which is neither numbers nor texts: leave it "
            f"out, --drop {name!r}, or make numbers of it."
        )


def _as_text(value: Any) -> str:
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _index_of(schema: Any) -> tuple[str, ...]:
    """The columns that pandas has noted as its index."""
    try:
        stored = files.parsed((schema.metadata or {})[b"pandas"].decode())["index_columns"]
        return tuple(name for name in schema.names if isinstance(stored, list) and name in stored)
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()


_Opened = tuple[Any, Callable[[int], Iterable[Any]]]
"""The schema of a file, and what gives its batches of so many rows."""


def _parquet(path: Path, size: int) -> Iterator[_Opened]:
    import pyarrow.parquet

    # Each entry of a list in the description takes a byte at least.
    limits = {"thrift_string_size_limit": max(size, 1000), "thrift_container_size_limit": max(size, 1000)}
    file = pyarrow.parquet.ParquetFile(path, memory_map=True, **limits)
    untrusted.refuse_bomb(path, size, 4 * file.metadata.num_rows * max(1, len(file.schema_arrow.names)))
    yield file.schema_arrow, lambda rows: file.iter_batches(rows, use_threads=False)


def _feather(path: Path, size: int) -> Iterator[_Opened]:
    import pyarrow.ipc

    file = pyarrow.memory_map(str(path))
    # A file is a stream behind eight bytes, with a list of its batches behind it, which is not needed.
    begin = 8 if file.read(6) == b"ARROW1" else 0
    file.seek(begin)
    unpacked = 0
    for message in pyarrow.ipc.MessageReader.open_stream(file):
        unpacked += _unpacked(message)
        untrusted.refuse_bomb(path, size, unpacked)

    def batches(rows: int) -> Iterator[Any]:
        file.seek(begin)
        for batch in pyarrow.ipc.open_stream(file):
            batch.validate(full=True)  # offsets could lie anywhere
            for first in range(0, len(batch), rows):
                yield batch.slice(first, rows)

    file.seek(begin)
    yield pyarrow.ipc.open_stream(file).schema, batches


def _unpacked(message: Any) -> int:
    """The bytes that the compressed buffers of a message claim to have, which pyarrow would allocate.

    Its description is a table of FlatBuffers: a message has its kind and its header as the fields 1 and 2; a batch its buffers,
    of 16 bytes each, and the compression as the fields 2 and 3; a batch of a dictionary another batch as the field 1. A
    compressed buffer begins with its size.
    """
    described, body = bytes(message.metadata), memoryview(message.body) if message.body is not None else memoryview(b"")

    def number(form: str, place: int) -> int:
        return int(struct.unpack_from(form, described, place)[0])

    def field(table: int, which: int) -> int:
        """Where a field of a table is; 0: nowhere."""
        vtable = table - number("<i", table)
        offset = number("<H", vtable + 4 + 2 * which) if 4 + 2 * which < number("<H", vtable) else 0
        return table + offset if offset else 0

    def reference(place: int) -> int:
        return place + number("<I", place)

    root = number("<I", 0)
    kind, header = field(root, 1), field(root, 2)
    if not kind or not header or number("<B", kind) not in (2, 3):
        return 0
    batch = reference(header)
    if number("<B", kind) == 2:
        batch = reference(field(batch, 1))
    if not field(batch, 3) or not field(batch, 2):
        return 0
    buffers = reference(field(batch, 2))
    claimed = 0
    for place in range(buffers + 4, buffers + 4 + 16 * number("<I", buffers), 16):
        offset, length = struct.unpack_from("<qq", described, place)
        if length >= 8:
            claimed += max(0, struct.unpack_from("<q", body, offset)[0])
    return claimed


def _told(path: str | Path, items: Iterator[_Item]) -> Iterator[_Item]:
    """The items; whatever a damaged file makes pyarrow raise is told in one line."""
    while True:
        reason = ""
        try:
            item = next(items)
        except StopIteration:
            return
        except LabError:
            raise
        except MemoryError:  # what it claims was never there: no cause of the error below
            reason = "it claims more than the memory has"
        except Exception as error:
            reason = first_line(error)
        if reason:
            raise LabError(f"{path} is damaged or not a table ({reason}): copy it or make it again.")
        yield item


def _pyarrow(name: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise LabError(f'{name} needs pyarrow: pip install "anyk[lab]"') from None
    return pyarrow
