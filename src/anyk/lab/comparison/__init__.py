"""Which loss is best on some data: search, outcome, verdict, snippet, page."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyk.lab.comparison.outcome import Comparison
    from anyk.lab.comparison.search import compare

__all__ = ["Comparison", "compare"]
_HOMES = {"Comparison": "anyk.lab.comparison.outcome", "compare": "anyk.lab.comparison.search"}


def __getattr__(name: str) -> Any:
    # Only when asked for: whoever reads an outcome need not load what makes one.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
