"""`anyk import`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from anyk.lab.cli.words import Flag, Group, say, warn
from anyk.lab.errors import LabError


@dataclass(frozen=True)
class DataOptions:
    """How the file is read."""

    classes: Path | None = None
    """a file with the class names in the order of the labels, one on a line or a JSON list"""
    test: Path | None = None
    """a file of the same form with the test examples"""
    label_column: str | None = None
    """tables: the column with the label; by default the last one"""
    drop: tuple[str, ...] = ()
    """tables: columns to leave out"""
    categories: tuple[str, ...] = ()
    """tables: columns of numbers that are categories, to be one-hot encoded as texts are"""
    missing: Literal["mean", "refuse"] = "mean"
    """tables: missing values: mean fills numbers with the column's mean and gives texts no category; refuse is an error"""
    row_numbers: Flag = False
    """tables: keep columns that only number the rows, such as the index of pandas"""


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Path | None = None
    """the folder of the new set; by default the file's name without its suffix"""
    name: str | None = None
    """what to call it; by default like the file"""
    half: Flag = False
    """store float16"""
    force: Flag = False
    """replace an existing set"""


def command(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE]")],
    *,
    data: Group[DataOptions],
    output: Group[Output],
) -> int:
    """Turn an array file into an embedding set: .npz, .npy, .csv, .parquet, .feather, .p, .pt. Nothing in the file is executed.

    Args:
        files: the file; or two .npy files, the embeddings and the labels.
    """
    from anyk.lab.data import arrays

    if not files:
        raise LabError("give the file to import.")
    folder = arrays.import_file(
        *files,
        out=output.out or files[0].with_suffix(""),
        name=output.name,
        classes_file=data.classes,
        test=data.test,
        label_column=data.label_column,
        drop=data.drop,
        categories=data.categories,
        missing=data.missing,
        row_numbers=data.row_numbers,
        half=output.half,
        force=output.force,
        note=warn,
    )
    say(f"{folder} is ready: anyk compare {shlex.quote(str(folder))}")
    return 0
