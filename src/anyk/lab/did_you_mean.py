"""Suggestions for a misspelt or abbreviated name: the options and fields that may have been meant."""

import difflib
from collections.abc import Iterable


def nearest(typed: str, names: Iterable[str]) -> list[str]:
    """The names that may have been meant, at most three, the likeliest first; none where nothing is like it.

    Found by the initials of their words, by the beginning of a word, or by most of their letters:

    >>> options = ["epochs", "learning_rate", "batch_size", "weight_decay", "optimizer", "schedule"]
    >>> [nearest(word, options) for word in ("lr", "bs", "num-epochs", "opt", "batchsize", "wieght-decay")]
    [['learning_rate'], ['batch_size'], ['epochs'], ['optimizer'], ['batch_size'], ['weight_decay']]
    >>> nearest("size", ["batch_size", "image_size"]), nearest("gpu", options)
    (['batch_size', 'image_size'], [])
    """
    typed, spelled = _hyphened(typed), {name: _hyphened(name) for name in names}
    initials = [name for name, own in spelled.items() if "".join(word[:1] for word in own.split("-")) == typed]
    if initials:
        return initials[:3]
    alike = {}
    for name, own in spelled.items():
        ratio = difflib.SequenceMatcher(a=typed, b=own).ratio()
        pairs = ((word, other) for word in typed.split("-") for other in own.split("-"))
        begins = any(len(word) > 2 and other.startswith(word) for word, other in pairs)
        if ratio >= 0.75 or begins:
            alike[name] = ratio + begins  # "temp" is the beginning of temperature before it is a misspelt item
    best = max(alike.values(), default=0.0)
    return sorted((name for name in alike if alike[name] >= best - 0.15), key=lambda name: -alike[name])[:3]


def _hyphened(name: str) -> str:
    return name.lower().replace("_", "-")
