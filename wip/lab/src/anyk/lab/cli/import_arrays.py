"""`anyk import`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from anyk.lab.cli.parsing import Parser, say
from anyk.lab.config import DataFields
from anyk.lab.data import embeddings, readers
from anyk.lab.errors import LabError


def run(words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Make an embedding set of a file of arrays."""
    parser = Parser(
        "import", "Make an embedding set of a file of arrays, for sets that are used often or are larger than the memory."
    )
    parser.add_argument("source", metavar="FILE", type=Path, help=".npz, .npy with _labels.npy, or .pt")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder of the new set")
    parser.add_argument("--name", help="what to call it; by default like the file")
    parser.add_argument("--half", action="store_true", help="store float16")
    parser.add_argument("--force", action="store_true", help="replace a set that is there")
    given = parser.parse_args(words)
    if given.source.suffix.lower() not in readers.ARRAYS:
        raise LabError(
            f"{given.source} should be a file of {', '.join(readers.ARRAYS)}; a table can be given to compare as it is."
        )
    found = readers.read(given.source, DataFields())
    if found.kind != "features":
        raise LabError(
            f"{given.source} holds {found.kind}, but import makes sets of features: give the file itself to compare."
        )
    rows = found.examples.astype(np.float16) if given.half else found.examples
    tested = np.zeros(len(rows), bool)
    if found.test is not None:
        tested[found.test] = True
    parts = {}
    for part, own in (("train", ~tested), ("test", tested)):
        if own.any():
            parts[part] = rows[own], found.labels[own], None if found.groups is None else found.groups[own]
    embeddings.write(given.out, found.classes, parts, name=given.name or given.source.stem, force=given.force)
    say(f"{given.out}: {len(rows):,} examples of {len(found.classes)} classes, {rows.shape[1]} numbers each.")
    return 0
