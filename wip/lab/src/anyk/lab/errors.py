"""Errors that a user can correct, and how they are written."""

from collections.abc import Iterable
from dataclasses import dataclass

_LONGEST = 1500


class LabError(Exception):
    """An error that the user can correct: its message names the file or the argument, and says what to do.

    The command line prints it without a traceback and ends with exit code 2. What it quotes of a file may be of any length and
    hold any character; the message is one line all the same.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_one_line(message))


class Diverged(LabError):
    """The loss or the scores became NaN or infinite. A search of the learning rate expects that of some runs."""


class Stopped(Exception):
    """A run was asked to stop; its checkpoint is written."""


def _one_line(text: str) -> str:
    """A text without line ends and other characters that are not printed, and without the middle of a very long one.

    >>> _one_line("a" * 700 + "\\n" + "b" * 4000)[695:708]
    'aaaaa\\\\nbbbbbb'
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 300]} … {text[-300:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def explain(error: Exception) -> str:
    """The message of any error: of one that is not ours, with its type."""
    return str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's message that is not empty, cut to ``most`` characters; or the name of its type."""
    return next((line.strip()[:most] for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error."""

    run: str
    error: str


def reuse_sentence(runs: int) -> str:
    """Says how many runs are not made again."""
    return f"Runs that had already finished and are reused: {runs}."


def failure_sentences(failures: Iterable[Failure]) -> list[str]:
    """Runs that failed, as sentences: equal errors once, with the number of runs.

    >>> failure_sentences([Failure("a", "no room."), Failure("b", "no power."), Failure("c", "no room.")])
    ['2 runs failed (a and c): no room.', 'b failed: no power.']
    """
    names: dict[str, list[str]] = {}
    for failure in failures:
        names.setdefault(failure.error, []).append(failure.run)
    sentences = []
    for error, failed in names.items():
        *first, last = failed if len(failed) <= 3 else [*failed[:2], f"{len(failed) - 2} more"]
        count = f"{len(failed)} runs failed ({', '.join(first)} and {last})" if first else f"{last} failed"
        sentences.append(f"{count}: {error}")
    return sentences
