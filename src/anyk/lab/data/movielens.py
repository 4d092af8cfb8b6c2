"""MovieLens' own files: the movies that a user has rated, in the order of the times, are a sequence."""

import array
import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anyk.lab import files
from anyk.lab.data import sequences, tokens
from anyk.lab.data.sets import Dataset
from anyk.lab.errors import LabError

_VERSION = 1  # of the examples: whatever changes them below needs another number
_COLUMNS = ("userId", "movieId", "rating", "timestamp")

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class _Form(NamedTuple):
    """How one of the releases writes its files."""

    ratings: str
    titles: str
    separator: str
    title_separator: str
    header: bool = False


_FORMS = (
    _Form("ratings.dat", "movies.dat", "::", "::"),
    _Form("u.data", "u.item", "\t", "|"),
    _Form("ratings.csv", "movies.csv", ",", ",", header=True),
)


def load(path: Path, split: str = "auto", shares: tuple[float, float] = (0.1, 0.2)) -> Dataset:
    """The next movie that a user rates, from those before. The classes are titles, where their file lies beside the ratings.

    Args:
        path: ratings.dat, u.data or ratings.csv, or the folder of one.
        split: lines divides the users; last, or auto, takes the last movie of each user as the test and the one before it for
            validation.
        shares: of the users, for validation and the test.
    """
    if split == "lines":
        sequences.check_shares(shares)
    ratings = _find(path)
    form = _form_of(ratings)
    titles = [file] if (file := ratings.with_name(form.titles)).is_file() else []

    def build() -> Dataset:
        users, movies, times = _read_ratings(ratings, form)
        order = np.lexsort((times, users))  # by user, then by time; of equal times, as in the file
        users, movies = users[order], movies[order]
        known = {movie: title for file in titles for movie, title in _read_titles(file, form)}
        names = _unique(np.unique(movies).tolist(), known)
        begins = [0, *(np.flatnonzero(np.diff(users)) + 1).tolist()]
        corpus = tokens.Corpus()
        for begin, end in zip(begins, [*begins[1:], len(movies)], strict=True):
            corpus.add(names[movie] for movie in movies[begin:end].tolist())
        name = ratings.absolute().parent.name or ratings.stem
        return sequences.of_items(name, corpus, lambda: list(map(str, users[begins].tolist())), split, shares)

    settings = (_VERSION, split, *([shares] if split == "lines" else []))
    return sequences.remembered("movielens", [ratings, *titles], build, *settings)


def _find(path: Path) -> Path:
    names = [form.ratings for form in _FORMS]
    if path.is_file():
        return path
    if not path.is_dir():
        raise LabError(f"{path} does not exist: movielens:PATH wants {', '.join(names)}, or the folder of one.")
    found = [path / name for name in names if (path / name).is_file()]
    if len(found) != 1:
        what = " and ".join(file.name for file in found) or f"none of {', '.join(names)}"
        raise LabError(f"{path} has {what}: name {'the file' if found else 'a folder that has one'}.")
    return found[0]


def _form_of(file: Path) -> _Form:
    """The form of a file of ratings, by its first line: files are renamed, and the folds of MovieLens have other names."""
    with closing(sequences.read_lines(file)) as lines:
        first = next(filter(None, lines), "")
    if not first:
        raise LabError(f"{file} is empty: it should have ratings.")
    form = next((form for form in _FORMS if form.separator in first), None)
    if form is None:
        raise _malformed(file, 1, "user, movie, rating and timestamp between ::, tabs or commas", first)
    return form


def _malformed(file: Path, line: int, expected: str, got: str) -> LabError:
    return LabError(f"{file}, line {line}: expected {expected}, got {files.shortened(got)!r}.")


def _read_ratings(file: Path, form: _Form) -> tuple[Numbers, Numbers, Numbers]:
    """Users, movies and times, in the order of the file."""
    whole = r"(\d{1,18})"  # what is longer does not fit into 64 bits
    pattern = re.compile(re.escape(form.separator).join((whole, whole, r"\d+(?:\.\d+)?", whole)), re.ASCII)
    users, movies, times = (array.array("q") for _ in range(3))
    with closing(sequences.read_lines(file)) as text:
        lines = enumerate(text, 1)
        if form.header:
            _, header = next(lines)
            if header != ",".join(_COLUMNS):
                raise _malformed(file, 1, f"the header {','.join(_COLUMNS)}", header)
        for number, line in lines:
            if not line:
                continue
            match = pattern.fullmatch(line)
            if match is None:
                raise _malformed(file, number, f"numbers as {form.separator.join(_COLUMNS)!r}", line)
            user, movie, time = match.groups()
            users.append(int(user))
            movies.append(int(movie))
            times.append(int(time))
    if not users:
        raise LabError(f"{file} is empty: it should have ratings.")
    return np.array(users), np.array(movies), np.array(times)


def _read_titles(file: Path, form: _Form) -> Iterator[tuple[int, str]]:
    """The numbers of the movies and their titles."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise LabError(f"{file} cannot be read: {error.strerror}.") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # The releases of 100,000 and of a million are in Latin-1, the later ones in UTF-8.
        if form.header:
            raise LabError(f"{file} is not in UTF-8: save it as UTF-8.") from None
        text = data.decode("latin-1")
    lines = text.replace("\r\n", "\n").split("\n")
    expected = f"the number of a movie, {form.title_separator!r} and its title"
    for number, row in _rows(file, lines, form):
        if len(row) < 2 or not re.fullmatch(r"[0-9]{1,18}", row[0]):
            raise _malformed(file, number, expected, lines[number - 1])
        yield int(row[0]), row[1].strip()


def _rows(file: Path, lines: list[str], form: _Form) -> Iterator[tuple[int, list[str]]]:
    """The fields of the lines that are not empty, with the lines' numbers."""
    if not form.header:
        yield from ((number, line.split(form.title_separator)) for number, line in enumerate(lines, 1) if line)
        return
    rows = csv.reader(lines, strict=True)  # titles with a comma in them are quoted
    try:
        if next(rows)[:2] != ["movieId", "title"]:
            raise _malformed(file, 1, "a header that begins with movieId,title", lines[0])
        yield from ((rows.line_num, row) for row in rows if row)
    except csv.Error as error:
        raise LabError(f"{file}, line {rows.line_num}: {error}.") from None


def _unique(movies: Iterable[int], titles: dict[int, str]) -> dict[int, str]:
    """A name for each movie: its title, or its number where it has none; titles of several movies have the number with them.

    >>> _unique([1, 2, 3], {1: "Emma (1996)", 3: "Emma (1996)"})
    {1: 'Emma (1996) [1]', 2: '2', 3: 'Emma (1996) [3]'}
    """
    names = {movie: titles.get(movie) or str(movie) for movie in movies}
    counts = Counter(names.values())
    return {movie: name if counts[name] == 1 else f"{name} [{movie}]" for movie, name in names.items()}
