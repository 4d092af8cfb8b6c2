"""Suggestions for a misspelt or abbreviated name: the options and fields that may have been meant."""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence


def nearest(typed: str, names: Iterable[str]) -> list[str]:
    """The names that may have been meant, at most three, the likeliest first; none where nothing is like it.

    Names are words between hyphens or underscores. Some of them may be left out or added, be shortened or misspelt, or stand
    there with their initials alone:

    >>> options = ["epochs", "learning_rate", "head_learning_rate", "batch_size", "weight_decay", "temperature", "schedule"]
    >>> [nearest(word, options) for word in ("lr", "bs", "wd", "head-lr", "num-epochs", "temp", "batchsize", "wieght-decay")]
    [['learning_rate'], ['batch_size'], ['weight_decay'], ['head_learning_rate'], ['epochs'], ['temperature'], ['batch_size'],
    ['weight_decay']]
    >>> nearest("size", ["batch_size", "image_size"]), nearest("gpu", options)
    (['batch_size', 'image_size'], [])
    """
    scores = {name: _likeness(_words(typed), _words(name)) for name in names}
    best = max(scores.values(), default=0.0)
    near = sorted((name for name in scores if scores[name] >= max(0.5, best - 0.1)), key=lambda name: -scores[name])
    return near[:3]


def _words(name: str) -> list[str]:
    return name.lower().replace("_", "-").split("-")


def _likeness(typed: Sequence[str], words: Sequence[str]) -> float:
    """How alike two names are, from 0 to 1: the share of words with a similar word in the other name, or the similarity of all
    letters, whichever is larger."""
    shares = (
        2 * sum(max(_alike(one, other) for other in spelling) for one in typed) / (len(typed) + len(spelling))
        for spelling in _spellings(words)
    )
    return max(*shares, _ratio("".join(typed), "".join(words)))


def _spellings(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of a name, and the same with neighbouring words replaced by their initials: learning rate, lr."""
    yield list(words)
    for first, end in itertools.combinations(range(len(words) + 1), 2):
        if end - first > 1:
            yield [*words[:first], "".join(word[:1] for word in words[first:end]), *words[end:]]


def _alike(one: str, other: str) -> float:
    shorter, longer = sorted((one, other), key=len)
    return 0.9 if 2 < len(shorter) < len(longer) and longer.startswith(shorter) else _ratio(one, other)


def _ratio(one: str, other: str) -> float:
    if min(len(one), len(other)) < 3:  # initials: two of them are never far from two others
        return float(one == other)
    ratio = difflib.SequenceMatcher(a=one, b=other).ratio()
    return ratio if ratio >= 0.75 else 0.0
