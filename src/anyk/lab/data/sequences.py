"""Text files as sequences: the items on each line (`sequences:FILE`), or the words of a text (`words:FILE_OR_FOLDER`)."""

import array
import functools
import re
import sys
import unicodedata
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

import torch

from anyk.lab import files
from anyk.lab.data import cache as caches
from anyk.lab.data import tables, tokens
from anyk.lab.data.sets import Dataset
from anyk.lab.errors import LabError

_VERSION = 1  # of the examples: whatever changes them below needs another number
_SALT = "anyk"
#: the classes of a text: words that occur at least so often in the training part, and at most so many of them
LEAST_OCCURRENCES, MOST_WORDS = 3, 50_000
TEXTS = (".txt", ".md")


def load(path: Path, split: str = "auto", shares: tuple[float, float] = (0.1, 0.2)) -> Dataset:
    """The sequences of a text file, one on each line, their items separated by spaces; the next item is to be guessed.

    Args:
        path: the file.
        split: lines divides whole lines; last, or auto, takes the last item of each line as the test and the one before it for
            validation.
        shares: of the lines, for validation and the test.
    """
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise LabError(f"{path} {problem}: sequences:FILE wants a text file, one sequence on each line.")
    if split == "lines":
        check_shares(shares)

    def build() -> Dataset:
        corpus, empty = tokens.Corpus(), 0
        for line in read_lines(path):
            items = line.split()
            if items:
                corpus.add(items)
            else:
                empty += 1
        if not len(corpus):
            raise LabError(f"{path} is empty: it should have one sequence on each line.")
        if len(corpus.vocabulary) == 1:
            only = files.shortened(next(iter(corpus.vocabulary)))
            raise LabError(f"{path} has one kind of item only, {only!r}: there is nothing to guess.")
        remarks = [f"Empty lines that are left out: {empty:,}."] if empty else []
        return of_items(path.stem, corpus, lambda: list(map(str, range(len(corpus)))), split, shares, remarks)

    return remembered("sequences", [path], build, split, *([shares] if split == "lines" else []))


def load_log(path: Path, log: tables.Log | None, split: str = "auto", shares: tuple[float, float] = (0.1, 0.2)) -> Dataset:
    """The sequences of a log in a table, a row for each event: the items of each user in the order of the times.

    Args:
        path: the file.
        log: which columns are the user, the item and the order.
        split: as for :func:`load`, with the users as the lines.
        shares: of the users, for validation and the test.
    """
    if not path.is_file():
        raise LabError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: sequences:FILE wants a text file or a log."
        )
    if not path.stat().st_size:
        raise LabError(f"{path} is empty: copy it or make it again.")
    if log is None:
        titles = ", ".join(map(files.shortened, tables.titles(path)[:20]))
        raise LabError(
            f"{path} is a table ({titles}): name the columns that make the sequences, --user COLUMN --item COLUMN --order "
            "COLUMN, or give a text file of another suffix, one sequence on each line."
        )
    if split == "lines":
        check_shares(shares)

    def build() -> Dataset:
        users, found = tables.sequences(path, log)
        corpus = tokens.Corpus()
        for items in found:
            corpus.add(items)
        if len(corpus.vocabulary) == 1:
            only = files.shortened(next(iter(corpus.vocabulary)))
            raise LabError(f"{path} has one kind of item only in column {log.item!r}, {only!r}: there is nothing to guess.")
        longest = max(map(len, found))
        if split != "lines" and longest < 3:
            raise LabError(
                f"no user of {path} has three items, but the last is for the test and the one before it for validation: "
                f"is {log.user!r} the column of the users? ({len(users):,} of them have at most {longest} each)"
            )
        remarks = (
            [] if log.order is not None else ["The items of each user are in the order of the rows: --order was not given."]
        )
        return of_items(path.stem, corpus, lambda: users, split, shares, remarks)

    return remembered("log", [path], build, tuple(log), split, *([shares] if split == "lines" else []))


def load_words(path: Path, split: str = "auto", shares: tuple[float, float] = (0.1, 0.2)) -> Dataset:
    """The words of a text file, or of all .txt and .md files in a folder; the next word is to be guessed.

    The classes are the words that occur at least three times in the training part, the 50,000 most frequent of them.

    Args:
        path: the file or folder.
        split: auto divides whole files, or lines where there are too few files; lines divides lines.
        shares: of the files or lines, for validation and the test.
    """
    if split == "last":
        raise LabError("split last is for sequences of items; words are divided by file, or by line with split lines.")
    check_shares(shares)
    texts = _text_files(path)
    root = path if path.is_dir() else path.parent

    def build() -> Dataset:
        # The lines that have words, and where they are.
        corpus, names, numbers = tokens.Corpus(), list[str](), array.array("q")
        for file in texts:
            name = file.relative_to(root).as_posix()
            for number, line in enumerate(read_lines(file), 1):
                words = words_of(line)
                if words:
                    corpus.add(words)
                    names.append(name)
                    numbers.append(number)
        if not names:
            raise LabError(f"{path} has no words: it should be plain text.")
        with_words = list(dict.fromkeys(names))
        without = len(texts) - len(with_words)
        remarks = [f"Files without words that are left out: {without:,}."] if without else []
        begins = corpus.begins
        if split == "auto" and round(min(shares) * len(with_words)) >= 1:
            keys = with_words
            first = torch.tensor([not place or names[place - 1] != name for place, name in enumerate(names)])
            begins = torch.cat((begins[:-1][first], begins[-1:]))
        else:
            keys = [f"{name}:{number}" for name, number in zip(names, numbers, strict=True)]
            if split == "auto":
                count = "There is one file" if len(with_words) == 1 else f"{len(with_words)} files are too few to be divided"
                remarks.append(f"{count}: whole lines are for training, validation or the test.")
        part = tokens.parts_of_tokens(parts_by_hash(keys, shares), begins)
        classes, stream = corpus.encode(part == 0, MOST_WORDS, LEAST_OCCURRENCES)
        if len(classes) < 2:
            count = "one word that occurs" if classes else "no word that occurs"
            raise LabError(
                f"{path} has {count} {LEAST_OCCURRENCES} times in its training part, but two are needed: give more text."
            )
        name = path.absolute().name if path.is_dir() else path.stem
        return tokens.dataset_of(name, classes, stream, begins, part, remarks=remarks, tokens="words")

    return remembered("words", texts, build, str(path.absolute()), split, shares)


def of_items(
    name: str,
    corpus: tokens.Corpus,
    keys: Callable[[], Sequence[str]],
    split: str,
    shares: tuple[float, float],
    remarks: Iterable[str] = (),
) -> Dataset:
    """A data set of sequences of items. The classes are all items of the training part; a target that is none of them is
    out of the vocabulary: no guess is right.

    Args:
        name: of the data set.
        corpus: the sequences.
        keys: what each sequence is called, which decides where it belongs; asked for where whole sequences are divided.
        split: lines, last or auto.
        shares: of the sequences, for validation and the test.
        remarks: sentences about the data for whoever reads the results.
    """
    begins, remarks = corpus.begins, list(remarks)
    if split == "lines":
        part = tokens.parts_of_tokens(parts_by_hash(keys(), shares), begins)
    else:
        part = tokens.last_parts(begins)
        if short := int((begins.diff() < 3).sum()):
            remarks.append(f"Sequences of fewer than three tokens, which are for training alone: {short:,}.")
    classes, stream = corpus.encode(part == 0)
    return tokens.dataset_of(name, classes, stream, begins, part, tokens="items", out_of_vocabulary=True, remarks=remarks)


def parts_by_hash(keys: Sequence[str], shares: tuple[float, float]) -> list[int]:
    """For each key 0 (training), 1 (validation) or 2 (test): the shares of them, those with the smallest hashes, at least one.

    >>> parts_by_hash([f"line {n}" for n in range(10)], (0.1, 0.2))
    [1, 2, 0, 0, 0, 0, 0, 0, 0, 2]
    """
    validation, test = (max(1, round(share * len(keys))) for share in shares)
    ranked = sorted(range(len(keys)), key=lambda place: tokens.number((_SALT, keys[place]), 1 << 64))
    parts = [0] * len(keys)
    for rank, place in enumerate(ranked[: test + validation]):
        parts[place] = 2 if rank < test else 1
    return parts


def check_shares(shares: tuple[float, float]) -> None:
    """Raise if nothing would be left for one of the parts."""
    if min(shares) <= 0 or sum(shares) >= 1:
        raise LabError(
            f"validation and test should be above 0 and leave a part for training, but are {shares[0]:g} and {shares[1]:g}."
        )


def remembered(name: str, sources: Iterable[Path], build: Callable[[], Dataset], *settings: object) -> Dataset:
    """The data set that ``build`` makes of these files with these settings, cached."""
    return caches.remember(f"{name}-{caches.key_of(sources, _VERSION, *settings)}", build)


# --- text -------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Generator[str, None, None]:
    """The lines of a file in UTF-8. Raises LabError for any other encoding, and names the line."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = raw.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in line:
                    raise LabError(f"{path} has a NUL byte in line {number}, so it is no text in UTF-8: save it as UTF-8.")
                yield line
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        byte = f"the byte 0x{raw[error.start]:02X} in line {number}"
        raise LabError(f"{path} is not in UTF-8 ({byte}): save it as UTF-8.") from None


def words_of(text: str) -> list[str]:
    """The words of a text, and each punctuation mark between them.

    >>> words_of("Don't stop: it's 5 o'clock – 'now'!")
    ["Don't", 'stop', ':', "it's", '5', "o'clock", '–', "'", 'now', "'", '!']
    """
    word, marks = _patterns()
    # Normalisation sorts combining marks in quadratic time: a text with a thousand in a row is left as it is.
    if not text.isascii() and not marks.search(text):
        text = unicodedata.normalize("NFC", text)
    return word.findall(text)


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The patterns of a word, and of a thousand combining marks in a row."""
    # An accent or a vowel sign may be a character of its own, which \w does not match.
    combining = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c).startswith("M"))
    letters = rf"[^\W_]+(?:[{combining}]+[^\W_]*)*"
    return re.compile(rf"{letters}(?:['’]{letters})*|[^\w\s]|_"), re.compile(rf"[{combining}]{{1000}}")


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise LabError(f"{path} does not exist: words:PATH wants a text file, or a folder of {' and '.join(TEXTS)} files.")
    found = (file.relative_to(path) for file in path.rglob("*") if file.suffix.lower() in TEXTS and file.is_file())
    kept = [file for file in found if not any(part.startswith(".") for part in file.parts)]
    if not kept:
        raise LabError(f"{path} has no {' or '.join(TEXTS)} files.")
    return [path / file for file in sorted(kept, key=lambda file: file.as_posix())]
