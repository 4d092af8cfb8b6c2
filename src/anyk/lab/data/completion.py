"""Code completion on Python's own standard library, a set of many ambiguous classes that every machine already has.

The next token is predicted from those before it. Names and operators are tokens as they are written; a number, a string, the
end of a line, an indent and a dedent are one token each; comments are dropped. Whole modules belong to training, validation or
the test, by a hash of their name, so that another version of Python moves none of them.
"""

import io
import platform
import sysconfig
import token as kinds
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from anyk.lab.data import cache as caches
from anyk.lab.data import tokens
from anyk.lab.data.sets import Dataset
from anyk.lab.errors import LabError

DEFAULT_CLASSES, MOST_CLASSES = 2000, 20_000
_VERSION = 3  # of the examples: whatever changes them below needs another number
#: folders whose files are not code as people write it: test data, tables, an application
_LEFT_OUT = frozenset(("test", "tests", "idle_test", "encodings", "idlelib", "pydoc_data", "site-packages", "dist-packages"))
#: percent of the modules, by the hash of their names, for the test and for validation
_TEST, _VALIDATION = 14, 10

_MARKS = {
    kinds.NUMBER: "<number>",
    kinds.STRING: "<string>",
    kinds.NEWLINE: "<newline>",
    kinds.INDENT: "<indent>",
    kinds.DEDENT: "<dedent>",
}
_TAKEN = frozenset((kinds.NAME, kinds.OP))
#: what the tokenizer adds where a file ends, beside an empty end of the line
_AT_THE_END = frozenset((kinds.ENDMARKER, kinds.DEDENT, kinds.NL, kinds.COMMENT))
# From Python 3.12 an f-string is several tokens; it is one here, as it was before.
_F_STRING_START = getattr(kinds, "FSTRING_START", -1), getattr(kinds, "TSTRING_START", -1)
_F_STRING_END = getattr(kinds, "FSTRING_END", -1), getattr(kinds, "TSTRING_END", -1)


def load(classes: int = DEFAULT_CLASSES, *, library: Path | None = None) -> Dataset:
    """The completion data set: the next of the ``classes`` most frequent tokens.

    Args:
        classes: how many.
        library: the folder of the standard library.
    """
    if not 2 <= classes <= MOST_CLASSES:
        raise LabError(f"completion has 2 to {MOST_CLASSES:,} classes, but {classes:,} were asked for.")
    library = Path(sysconfig.get_paths()["stdlib"]) if library is None else library
    version = f"{platform.python_implementation()}-{platform.python_version()}"
    key = caches.key_of([library], _VERSION)

    def build() -> Dataset:
        modules, corpus = list[str](), tokens.Corpus()
        for path in _files(library):
            found = list(python_tokens(path.read_bytes()))
            if found:
                modules.append(path.relative_to(library).parts[0].removesuffix(".py"))
                corpus.add(found)
        if not modules:
            raise LabError(f"completion reads the source of Python's standard library, but {library} has no .py files.")
        begins = corpus.begins
        part = tokens.parts_of_tokens([_part(module) for module in modules], begins)
        vocabulary, stream = corpus.encode(part == 0, classes)
        numbers = {module: place for place, module in enumerate(dict.fromkeys(modules))}
        groups = torch.tensor([numbers[module] for module in modules])
        return tokens.dataset_of(f"completion:{classes}", vocabulary, stream, begins, part, groups, tokens="python")

    return caches.remember(f"completion-v{_VERSION}-{classes}-{version}-{key}", build)


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
    shared: dict[str, str] = {}  # one text for all tokens that are equal: a file may have millions
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
        elif not inside and kind in _TAKEN:
            found.append(shared.setdefault(text, text))
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
    except Exception:  # some files are there to be wrong, and name encodings that decode to anything, or nothing
        if not unfinished:
            return
    if not unfinished:
        for kind in waiting:
            take(kind, "")
    yield from found


def _files(library: Path) -> list[Path]:
    paths = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = (path for path in paths if not _LEFT_OUT.intersection(path.parts) and not path.name.startswith("test_"))
    return [library / path for path in sorted(kept, key=lambda path: path.as_posix())]


def _part(module: str) -> int:
    place = tokens.number([module])
    return 2 if place < _TEST else 1 if place < _TEST + _VALIDATION else 0
