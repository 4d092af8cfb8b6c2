"""What a user can mend."""

from collections.abc import Iterable
from dataclasses import dataclass


class LabError(Exception):
    """One sentence that names the file or the argument and says what to do.

    The command line prints it without a traceback and ends with exit code 2.
    """


class Diverged(LabError):
    """Training went to numbers that are none. While tuning that is an answer, not a failure."""


class Stopped(Exception):
    """A run was asked to stop; its checkpoint is written."""


def explain(error: Exception) -> str:
    """An error as a run's outcome tells it."""
    return str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error."""

    run: str
    error: str


def reuse_sentence(runs: int) -> str:
    """Of runs that are not run again."""
    if runs == 1:
        return "1 run had ended before and is taken as it is."
    return f"{runs} runs had ended before and are taken as they are."


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
