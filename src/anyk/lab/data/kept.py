"""Data that were in memory, written to files: runs are processes of their own and may go on tomorrow, so they read files."""

from pathlib import Path
from typing import Any


def keep(data: Any, folder: str | Path) -> str:
    """The word for ``Setting.data`` that names these data: files in ``folder`` that hold what was in memory.

    The files are named by their content. The same data again are not written again; other data get files of their own.

    Args:
        data: one of

            - a word or a path that ``Setting.data`` takes: returned as it is
            - ``(X, y)`` or ``(X, y, X_test, y_test)``, NumPy arrays or tensors
            - a mapping of these names, and perhaps ``classes`` (names in the order of the labels), ``groups`` and
              ``groups_test`` (what belongs together has one value), ``name``
            - a map-style torch Dataset of (example, label), read once; or two of them, train and test; or a mapping with
              ``train`` and perhaps ``test``, ``classes``, ``groups``, ``groups_test``, ``name``

            Images are uint8, (N, channels, height, width) or (N, height, width, channels); features are (N, d) numbers.
        folder: where to put the files; made where it is not there.
    """
    raise NotImplementedError
