"""Sequences of tokens, of which the next is predicted: lines of items, logs of user, item and time, and Python source.

Code completion on Python's own standard library is a set of many ambiguous classes that every machine already has. Names and
operators are tokens as they are written; a number, a string, the end of a line, an indent and a dedent are one token each;
comments are dropped. Whole modules belong to training, validation or the test, by a hash of their name.
"""

import array
import hashlib
import io
import sysconfig
import token as kinds
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyk.lab.config import DataFields
from anyk.lab.data.prepare import UNKNOWN, Source
from anyk.lab.errors import LabError

Array = NDArray[Any]
LENGTH = 6
"""tokens that a model sees"""
MOST_CLASSES = 20_000
TABLES = (".csv", ".tsv", ".parquet", ".feather", ".arrow")
_LEFT_OUT = frozenset(("test", "tests", "idle_test", "encodings", "idlelib", "pydoc_data", "site-packages", "dist-packages"))
"""folders whose files are not code as people write it: test data, tables, an application"""
_TEST, _VALIDATION = 14, 10
"""percent of the modules, by the hash of their names"""
_MARKS = {
    kinds.NUMBER: "<number>",
    kinds.STRING: "<string>",
    kinds.NEWLINE: "<newline>",
    kinds.INDENT: "<indent>",
    kinds.DEDENT: "<dedent>",
}
_AT_THE_END = frozenset((kinds.ENDMARKER, kinds.DEDENT, kinds.NL, kinds.COMMENT))
"""what the tokenizer adds where a file ends, beside an empty end of the line"""
# From Python 3.12 an f-string is several tokens; it is one here, as it was before.
_F_STRING_START = getattr(kinds, "FSTRING_START", -1), getattr(kinds, "TSTRING_START", -1)
_F_STRING_END = getattr(kinds, "FSTRING_END", -1), getattr(kinds, "TSTRING_END", -1)


class Corpus:
    """Sequences of tokens as texts. In memory a token takes four bytes, and each text of the vocabulary is stored once."""

    def __init__(self) -> None:
        self.vocabulary: dict[str, int] = {}
        self._items, self._begins = array.array("i"), array.array("q", [0])

    def __len__(self) -> int:
        return len(self._begins) - 1

    def add(self, sequence: Iterable[str]) -> None:
        """Append a sequence."""
        known = self.vocabulary
        self._items.extend([known.setdefault(token, len(known)) for token in sequence])
        self._begins.append(len(self._items))

    def source(
        self, name: str, part: Array, tokens: str, *, most: int | None, unknown_targets: bool, remarks: Sequence[str] = ()
    ) -> Source:
        """The examples: every token that has one before it in its sequence.

        Args:
            name: of the data.
            part: (T,) of each token: 0 (training), 1 (validation) or 2 (test).
            tokens: what they are: items or python.
            most: the number of classes, the most frequent tokens of training; None: all of these.
            unknown_targets: whether tokens that are no class are targets of validation and test, which no guess hits;
                otherwise they are only read.
            remarks: sentences about the data.
        """
        items, begins = np.frombuffer(self._items, np.int32), np.frombuffer(self._begins, np.int64)
        counts = np.bincount(items[part == 0], minlength=len(self.vocabulary)).tolist()
        kept = sorted((-count, token) for token, count in zip(self.vocabulary, counts, strict=True) if count)
        classes = tuple(token for _, token in kept[:most])
        numbers = np.full(len(self.vocabulary), len(classes), np.int32)
        numbers[[self.vocabulary[token] for token in classes]] = np.arange(len(classes))
        stream = numbers[items]
        target = np.ones(len(stream), bool)
        target[begins[:-1][np.diff(begins) > 0]] = False  # there is nothing before the first token of a sequence
        outside = stream == len(classes)
        target &= ~outside | (part > 0) if unknown_targets else ~outside
        places = np.flatnonzero(target)
        labels = stream[places].astype(np.int64)
        # One name more, for what is none of the classes: training does not have it, so that no guess hits it.
        names = (*classes, UNKNOWN) if unknown_targets else classes
        for number, what in enumerate(("training", "validation", "the test")):
            if not (part[places] == number).any():
                raise LabError(f"{name} has no token to guess for {what}: give more or longer sequences.")
        return Source(
            name=name,
            kind="sequences",
            examples=stream,
            labels=labels,
            classes=names,
            test=np.flatnonzero(part[places] == 2),
            validation=np.flatnonzero(part[places] == 1),
            remarks=tuple(remarks),
            places=places,
            begins=begins.copy(),
            length=LENGTH,
            tokens=tokens,
        )

    @property
    def lengths(self) -> Array:
        """Of each sequence."""
        return np.diff(np.frombuffer(self._begins, np.int64))


def load(path: Path, config: DataFields) -> Source:
    """The sequences of a text file, one on each line, their items separated by spaces; or of a log in a table. The last item of each
    sequence is the test, and the one before it validation."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise LabError(
            f"{path} {problem}: sequences:FILE wants a text file, one sequence on each line, or a log such as LOG.csv."
        )
    corpus, remarks = Corpus(), list[str]()
    if path.suffix.lower() in TABLES:
        for items in _users(path, config, remarks):
            corpus.add(items)
    else:
        for option in ("label_column", "group_column", "time_column"):
            if getattr(config, option) is not None:
                raise LabError(f"--{option.replace('_', '-')} is for a log such as sequences:LOG.csv, but {path.name} is text.")
        for items in lines(path):
            corpus.add(items)
    if not len(corpus):
        raise LabError(f"{path} is empty: it should have one sequence on each line.")
    lengths = corpus.lengths
    if lengths.max() < 3:
        raise LabError(
            f"no sequence of {path} has three items, but the last is for the test and the one before it for validation."
        )
    part = np.zeros(int(lengths.sum()), np.int8)
    ends = lengths.cumsum()[lengths >= 3]
    part[ends - 1], part[ends - 2] = 2, 1
    if short := int((lengths < 3).sum()):
        remarks.append(f"Sequences of fewer than three items, which are for training alone: {short:,}.")
    return corpus.source(path.stem, part, "items", most=None, unknown_targets=True, remarks=remarks)


def lines(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                if "\0" in line:
                    raise LabError(f"{path} has a NUL byte, so it is no text in UTF-8: save it as UTF-8.")
                if items := line.split():
                    yield items
    except UnicodeDecodeError:
        raise LabError(f"{path} is not in UTF-8: save it as UTF-8.") from None


def _users(path: Path, config: DataFields, remarks: list[str]) -> Iterator[list[str]]:
    """The items of each user of a log, the oldest first."""
    from anyk.lab.data import tables

    table = tables.read(path)
    if config.group_column is None or config.label_column is None:
        raise LabError(
            f"{path} is a log ({', '.join(table.column_names[:20])}): name the columns that make the sequences, --group-column "
            "USER --label-column ITEM --time-column TIME."
        )
    for option in ("group_column", "label_column", "time_column"):
        if getattr(config, option) is not None:
            tables.require(getattr(config, option), table.column_names, path.name, option)
    users = table.column(config.group_column).combine_chunks().dictionary_encode().indices.to_numpy()
    items = np.array([str(each) for each in table.column(config.label_column).to_pylist()], object)
    times = tables.times(table, config.time_column, path.name)
    if times is None:
        remarks.append("The items of each user are in the order of the rows: --time-column was not given.")
    order = np.argsort(users, kind="stable") if times is None else np.lexsort((times, users))
    for some in np.split(items[order], np.cumsum(np.bincount(users))[:-1]):
        yield some.tolist()


# Code completion ------------------------------------------------------------------------------------------------------------


def completion(classes: int = 2000, library: Path | None = None) -> Source:
    """The next of the most frequent tokens of Python's standard library.

    Args:
        classes: how many.
        library: the folder of the standard library.
    """
    if not 2 <= classes <= MOST_CLASSES:
        raise LabError(f"completion has 2 to {MOST_CLASSES:,} classes, but {classes:,} were asked for.")
    library = Path(sysconfig.get_paths()["stdlib"]) if library is None else library
    corpus, parts = Corpus(), list[int]()
    for path in _source_files(library):
        if found := list(python_tokens(path.read_bytes())):
            corpus.add(found)
            parts.append(_part_of(path.relative_to(library).parts[0].removesuffix(".py")))
    if not parts:
        raise LabError(f"completion reads the source of Python's standard library, but {library} has no .py files.")
    part = np.repeat(np.array(parts, np.int8), corpus.lengths)
    return corpus.source(f"completion:{classes}", part, "python", most=classes, unknown_targets=False)


def python_tokens(source: bytes, *, unfinished: bool = False) -> Iterator[str]:
    """The tokens of a file of Python source; nothing of a file that is not Python.

    Args:
        source: as it is in the file.
        unfinished: the source may end anywhere, and its end is none of a line or a block.

    >>> list(python_tokens(b"def f(x):\\n    return x + 1  # more\\n"))
    ['def', 'f', '(', 'x', ')', ':', '<newline>', '<indent>', 'return', 'x', '+', '<number>', '<newline>', '<dedent>']
    >>> list(python_tokens(b"def f(x):\\n    return g(x", unfinished=True))[-4:]
    ['return', 'g', '(', 'x']
    """
    found: list[str] = []
    waiting: list[int] = []  # the end, as long as nothing else follows
    inside = 0  # of f-strings, which may stand in one another

    def take(kind: int, text: str) -> None:
        nonlocal inside
        if kind in _F_STRING_START:
            if not inside:
                found.append(_MARKS[kinds.STRING])
            inside += 1
        elif kind in _F_STRING_END:
            inside -= 1
        elif not inside and kind in (kinds.NAME, kinds.OP):
            found.append(text)
        elif not inside and kind in _MARKS:
            found.append(_MARKS[kind])

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of encodings that a file names
            for each in tokenize.tokenize(io.BytesIO(source).readline):
                if each.type in _AT_THE_END or not each.string:
                    waiting.append(each.type)
                    continue
                for kind in waiting:
                    take(kind, "")
                waiting.clear()
                take(each.type, each.string)
    except (tokenize.TokenError, SyntaxError, UnicodeError, LookupError, ValueError):  # some files are there to be wrong
        if not unfinished:
            return
    if not unfinished:
        for kind in waiting:
            take(kind, "")
    yield from found


def _source_files(library: Path) -> list[Path]:
    paths = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = (path for path in paths if not _LEFT_OUT.intersection(path.parts) and not path.name.startswith("test_"))
    return [library / path for path in sorted(kept, key=lambda path: path.as_posix())]


def _part_of(module: str) -> int:
    place = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") % 100
    return 2 if place < _TEST else 1 if place < _TEST + _VALIDATION else 0
