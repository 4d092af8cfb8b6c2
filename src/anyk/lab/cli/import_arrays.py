"""`anyk import`."""

import shlex
from pathlib import Path
from typing import Annotated

import tyro

from anyk.lab.cli.words import Flag, say, warn
from anyk.lab.errors import LabError


def command(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE]")],
    *,
    out: Path | None = None,
    name: str | None = None,
    classes: Path | None = None,
    test: Path | None = None,
    label_column: str | None = None,
    half: Flag = False,
    force: Flag = False,
) -> int:
    """An array file to an embedding set: .npz, .npy, .csv, .p, .pt. Nothing in the file is executed.

    Args:
        files: the file; or two .npy files, the embeddings and the labels.
        out: the folder of the new set; by default the file's name without its suffix.
        name: what to call it; by default like the file.
        classes: a file with the class names in the order of the labels, one on a line or a JSON list.
        test: a file of the same form with the test examples.
        label_column: .csv: the column with the label; by default the last one.
        half: store float16.
        force: replace a set that is there.
    """
    from anyk.lab.data import arrays

    if not files:
        raise LabError("give the file to import.")
    folder = arrays.import_file(
        *files,
        out=out or files[0].with_suffix(""),
        name=name,
        classes_file=classes,
        test=test,
        label_column=label_column,
        half=half,
        force=force,
        note=warn,
    )
    say(f"{folder} is ready: anyk compare {shlex.quote(str(folder))}")
    return 0
