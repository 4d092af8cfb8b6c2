"""Text files as sequences: the items on each line (`sequences:FILE`), or the words of a text (`words:FILE_OR_FOLDER`)."""

import codecs
import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from anyk.lab.data import cache as caches
from anyk.lab.data import tokens
from anyk.lab.data.sets import Dataset
from anyk.lab.errors import LabError

_VERSION = 1  # of the cut: a change of anything below that changes the examples needs another number
_SALT = "anyk"
#: of a text, the words to guess: those that occur so often in the training part, and of these so many
LEAST_OCCURRENCES, MOST_WORDS = 3, 50_000
TEXTS = (".txt", ".md")
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def load(path: Path, split: str = "auto", shares: tuple[float, float] = (0.1, 0.2), *, cache: Path | None = None) -> Dataset:
    """The sequences of a text file, one on each line, their items between blanks; the next item is to be guessed.

    Args:
        path: the file.
        split: lines divides whole lines; last, or auto, takes the last item of each line as the test and the one before it for
            validation.
        shares: of the lines, for validation and the test.
        cache: where prepared data are kept.
    """
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise LabError(f"{path} {problem}: sequences:FILE wants a text file, one sequence on each line.")
    if split == "lines":
        check_shares(shares)

    def build() -> Dataset:
        lines = read_text(path).removesuffix("\n").split("\n")
        sequences = [items for line in lines if (items := line.split())]
        if not sequences:
            raise LabError(f"{path} is empty: it should have one sequence on each line.")
        kinds = set().union(*sequences)
        if len(kinds) == 1:
            raise LabError(f"{path} has one kind of item only, {shortened(kinds.pop())!r}: there is nothing to guess.")
        empty = tokens.counted(len(lines) - len(sequences), "line is", "lines are", "empty and left out.")
        return of_items(path.stem, sequences, list(map(str, range(len(sequences)))), split, shares, empty)

    return remembered("sequences", [path], build, cache, split, *([shares] if split == "lines" else []))


def load_words(
    path: Path, split: str = "auto", shares: tuple[float, float] = (0.1, 0.2), *, cache: Path | None = None
) -> Dataset:
    """The words of a text file, or of all .txt and .md files in a folder; the next word is to be guessed.

    The classes are the words that occur at least three times in the training part, the 50,000 most frequent of them.

    Args:
        path: the file or folder.
        split: auto divides whole files, or lines where there are too few files; lines divides lines.
        shares: of the files or lines, for validation and the test.
        cache: where prepared data are kept.
    """
    if split == "last":
        raise LabError("split last is for sequences of items; words are divided by file, or by line with split lines.")
    check_shares(shares)
    files = _text_files(path)
    root = path if path.is_dir() else path.parent

    def build() -> Dataset:
        texts = {file.relative_to(root).as_posix(): read_text(file) for file in files}
        shared: dict[str, str] = {}  # one object for all that are equal: a token costs a pointer
        by_line = {
            name: [[shared.setdefault(word, word) for word in words_of(line)] for line in text.split("\n")]
            for name, text in texts.items()
        }
        by_line = {name: lines for name, lines in by_line.items() if any(lines)}
        if not by_line:
            raise LabError(f"{path} has no words: it should be plain text.")
        remarks = tokens.counted(len(files) - len(by_line), "file without words is", "files without words are", "left out.")
        if split == "auto" and round(min(shares) * len(by_line)) >= 1:
            keys, sequences = list(by_line), [list(itertools.chain(*lines)) for lines in by_line.values()]
        else:
            lines = {f"{name}:{n}": line for name, lines in by_line.items() for n, line in enumerate(lines, 1) if line}
            keys, sequences = list(lines), list(lines.values())
            if split == "auto":
                count = "There is one file" if len(by_line) == 1 else f"{len(by_line)} files are too few to be divided"
                remarks.append(f"{count}: whole lines are for training, validation or the test.")
        parts = parts_by_hash(keys, shares)
        trained = (sequence for sequence, part in zip(sequences, parts, strict=True) if part == 0)
        classes = tokens.vocabulary(itertools.chain.from_iterable(trained), MOST_WORDS, LEAST_OCCURRENCES)
        if len(classes) < 2:
            count = "one word that occurs" if classes else "no word that occurs"
            raise LabError(
                f"{path} has {count} {LEAST_OCCURRENCES} times in its training part, but two are needed: give more text."
            )
        stream, begins = tokens.numbered(sequences, classes)
        name = path.absolute().name if path.is_dir() else path.stem
        return tokens.divided(name, classes, stream, begins, parts, remarks=remarks, tokens="words")

    return remembered("words", files, build, cache, str(path.absolute()), split, shares)


def of_items(
    name: str,
    sequences: Sequence[Sequence[str]],
    keys: Sequence[str],
    split: str,
    shares: tuple[float, float],
    remarks: Iterable[str] = (),
) -> Dataset:
    """A set of sequences of items. The classes are all items of the training part; others are targets that no guess hits.

    Args:
        name: of the set.
        sequences: the items.
        keys: what each sequence is called, which decides where it belongs.
        split: lines, last or auto.
        shares: of the sequences, for validation and the test.
        remarks: what is to be said of the set already.
    """
    if split == "lines":
        parts = parts_by_hash(keys, shares)
        trained = [sequence for sequence, part in zip(sequences, parts, strict=True) if part == 0]
    else:
        trained = [sequence[:-2] if len(sequence) >= 3 else sequence for sequence in sequences]
    classes = tokens.vocabulary(itertools.chain.from_iterable(trained))
    stream, begins = tokens.numbered(sequences, classes)
    if split == "lines":
        return tokens.divided(name, classes, stream, begins, parts, unseen=True, remarks=remarks, tokens="items")
    return tokens.last_of_each(name, classes, stream, begins, remarks=remarks, tokens="items")


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


def remembered(
    name: str, sources: Iterable[Path], build: Callable[[], Dataset], cache: Path | None, *settings: object
) -> Dataset:
    """What was prepared from these files with these settings, now or before."""
    key = caches.key_of(sources, _VERSION, *settings)
    folder = caches.cache_folder() if cache is None else cache
    return caches.remember(folder / f"{name}-{key}.safetensors", build)


# --- text -------------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with plain line ends; an error, if it is anything else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.") from None
    other = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    if other is not None:
        raise LabError(f"{path} is in {other}: save it as UTF-8.")
    data = data.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    nul = data.find(b"\0")
    if nul >= 0:
        line = 1 + data.count(b"\n", 0, nul)
        raise LabError(f"{path} has a NUL byte in line {line}, so it is no text in UTF-8: save it as UTF-8.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        byte = f"the byte 0x{data[error.start]:02X} in line {line}"
        raise LabError(f"{path} is not in UTF-8 ({byte}): save it as UTF-8.") from None


def words_of(text: str) -> list[str]:
    """The words of a text, and each punctuation mark between them.

    >>> words_of("Don't stop: it's 5 o'clock – 'now'!")
    ["Don't", 'stop', ':', "it's", '5', "o'clock", '–', "'", 'now', "'", '!']
    """
    return _word().findall(unicodedata.normalize("NFC", text))


@functools.cache
def _word() -> re.Pattern[str]:
    # An accent or a vowel sign that is a character of its own belongs to its letter, which \w does not know.
    combining = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c).startswith("M"))
    letters = rf"[^\W_]+(?:[{combining}]+[^\W_]*)*"
    return re.compile(rf"{letters}(?:['’]{letters})*|[^\w\s]|_")


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


def shortened(text: str, most: int = 60) -> str:
    """A text for a message."""
    return text if len(text) <= most else f"{text[:most]}…"
