"""`anyk predict`."""

import contextlib
import csv
import itertools
import json as jsons
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import tyro

from anyk.lab.cli.words import Flag, Group, warn

if TYPE_CHECKING:
    from anyk.lab.prediction import Prediction
    from anyk.lab.run.models import Classifier


@dataclass(frozen=True)
class DataOptions:
    """How the files are read."""

    backbone: str | None = None
    """for images, where the model was trained on embeddings of images: what made them, as for anyk embed"""
    label_column: str | None = None
    """tables: the column with the labels, which is left out; by default that of the training table"""
    drop: tuple[str, ...] = ()
    """tables: other columns to leave out"""
    missing: Literal["mean", "refuse"] = "mean"
    """tables: missing values: mean fills them as in training; refuse is an error"""


@dataclass(frozen=True)
class ModelOptions:
    """Which model predicts."""

    model: str | None = None
    """for a model of your own, the function that made it: module:function. A file alone imports no code"""
    batch_size: int = 256
    """examples at once"""
    device: str = "cpu"
    """cpu, cuda, mps"""


@dataclass(frozen=True)
class Output:
    """What is written."""

    k: int | None = None
    """guesses for each example; by default 5"""
    coverage: float | None = None
    """instead of k: how often the right class should be among the guesses, such as 0.95. Each example gets its own list, as
    short as it can be with that promise"""
    json: Flag = False
    """JSON instead of CSV"""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """the file to write; by default standard output"""
    force: Flag = False
    """replace an existing file"""


def command(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE ...]")],
    *,
    data: Group[DataOptions],
    model: Group[ModelOptions],
    output: Group[Output],
) -> int:
    """Write a trained model's first k guesses for new data, or as many as a coverage needs, with probabilities, as CSV or JSON.

    A file that cannot be read is reported and skipped; the exit code is then 1.

    Args:
        run: a run's or a comparison's folder, or a model.safetensors.
        files: images, files of arrays or tables (.npz, .npy, .csv, .parquet, .feather, .pt, .safetensors), with labels or
            without; or folders. The columns of a table are found by their names. For a model of sequences, texts, one sequence
            a line: words, or items separated by spaces (by tabs, if names have spaces). For code completion, Python
            source: what follows its end is guessed.
    """
    from anyk.lab.files import refuse_to_overwrite
    from anyk.lab.prediction import predict
    from anyk.lab.run import models

    if output.out is not None:
        refuse_to_overwrite(output.out, output.force)
    classifier = models.load(run, model=model.model)
    failed = []

    def unreadable(sentence: str) -> None:
        failed.append(sentence)
        warn(sentence)

    found = predict(
        classifier,
        files,
        k=output.k,
        coverage=output.coverage,
        batch_size=model.batch_size,
        backbone=data.backbone,
        label_column=data.label_column,
        drop=data.drop,
        missing=data.missing,
        device=model.device,
        unreadable=unreadable,
        note=warn,
    )
    first = next(found, None)
    if first is None and failed and output.out is not None:
        return 1  # an empty file would stand in the way of the next try
    found = itertools.chain([] if first is None else [first], found)
    with _opened(output.out) as file:
        if output.json:
            _write_json(found, file)
        else:
            _write_csv(found, min(output.k or 5, len(classifier.classes)) if output.coverage is None else None, file)
    if output.coverage is not None:
        warn(_promise(output.coverage, classifier))
    return 1 if failed else 0


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    from anyk.lab import files

    if out is None:
        yield sys.stdout
        return
    with files.replacing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file


def _promise(coverage: float, classifier: "Classifier") -> str:
    """What the lists promise, in a line."""
    calibration = classifier.plan.calibration
    assert calibration is not None
    *first, last = calibration.chose or ("",)
    chosen = f"{', '.join(first)} and {last}" if first else last
    weaker = f" The same examples were used to choose {chosen}, so it may be a little less." if chosen else ""
    luck = 100 * (coverage * (1 - coverage) / calibration.examples) ** 0.5
    return (
        f"For examples like the {calibration.examples:,} that the model had for validation, the right class is in "
        f"{100 * coverage:g} % of the lists, give or take {luck:.1f} points (one standard deviation).{weaker}"
    )


def _write_csv(found: "Iterator[Prediction]", k: int | None, file: TextIO) -> None:
    if k is None:  # the longest list tells the number of columns, and is known at the end
        with tempfile.SpooledTemporaryFile(1 << 26, "w+", encoding="utf-8", newline="") as kept:
            lists, k = csv.writer(kept), 1
            for each in found:
                k = max(k, len(each.guesses))
                lists.writerow([each.file, each.row, *(cell for guess in each.guesses for cell in guess)])
            kept.seek(0)
            _write_csv(map(_parsed, csv.reader(kept)), k, file)
        return
    writer = csv.writer(file, lineterminator="\n")
    heads = [f"{what}_{place}" for place in range(1, k + 1) for what in ("guess", "probability")]
    writer.writerow(["file", "row", *heads])
    for each in found:
        cells = [cell for name, p in each.guesses for cell in (name, f"{p:.6g}")]
        writer.writerow([each.file, each.row, *cells, *[""] * (2 * k - len(cells))])


def _parsed(cells: list[str]) -> "Prediction":
    from anyk.lab.prediction import Prediction

    file, row, *guesses = cells
    return Prediction(Path(file), int(row) if row else None, list(zip(guesses[::2], map(float, guesses[1::2]), strict=True)))


def _write_json(found: "Iterator[Prediction]", file: TextIO) -> None:
    """A list, an example a line: as many as there are need not be in memory."""
    before = "[\n"
    for each in found:
        guesses = [{"class": name, "probability": float(f"{p:.6g}")} for name, p in each.guesses]
        row = {} if each.row is None else {"row": each.row}
        file.write(before + jsons.dumps({"file": str(each.file), **row, "guesses": guesses}, ensure_ascii=False))
        before = ",\n"
    file.write("[]\n" if before == "[\n" else "\n]\n")
