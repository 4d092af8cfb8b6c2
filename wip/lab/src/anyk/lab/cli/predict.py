"""`anyk predict`."""

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from anyk.lab import models
from anyk.lab.cli.parsing import Parser
from anyk.lab.errors import Stopped
from anyk.lab.files import refuse_to_overwrite, replacing
from anyk.lab.predict import Prediction, predict

DESCRIPTION = """Write a trained model's first k guesses for new data, or as many as a coverage needs, with probabilities, as CSV or JSON.
A file that cannot be read is reported and skipped; the exit code is then 1. The columns of a table are found by their names."""


def run(words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Predict new data."""
    parser = Parser("predict", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run's or a comparison's folder, or a model.safetensors")
    parser.add_argument("files", metavar="FILE", nargs="+", help="images, tables, files of arrays, texts; or folders of such")
    parser.add_argument("--k", type=int, help="guesses for each example; by default 5")
    parser.add_argument("--coverage", type=float, help="instead of k: how often the right class should be among the guesses")
    parser.add_argument("--backbone", help="for images, where the model was trained on embeddings of them: what made those")
    parser.add_argument("--model", help="for a model of your own, the function that made it, module:function")
    parser.add_argument("--batch-size", type=int, default=256, help="examples at once")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps")
    parser.add_argument("--json", action="store_true", help="JSON instead of CSV")
    parser.add_argument("--out", "-o", type=Path, help="the file to write; by default standard output")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    given = parser.parse_args(words)
    if given.out is not None:
        refuse_to_overwrite(given.out, given.force)
    failed: list[str] = []

    def unreadable(sentence: str) -> None:
        failed.append(sentence)
        sys.stderr.write(f"anyk: {sentence}\n")

    classifier = models.load(given.run, model=given.model)
    found = predict(
        classifier,
        given.files,
        k=given.k,
        coverage=given.coverage,
        batch_size=given.batch_size,
        backbone=given.backbone,
        device=given.device,
        unreadable=unreadable,
        note=lambda sentence: print(f"anyk: {sentence}", file=sys.stderr),
    )
    with _output(given.out) as file:
        _write(found, file, given.json, should_stop)
    return 1 if failed else 0


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        yield file


def _write(found: Iterator[Prediction], file: TextIO, as_json: bool, should_stop: Callable[[], bool]) -> None:
    writer = csv.writer(file)
    if not as_json:
        writer.writerow(["file", "row", "rank", "class", "probability"])
    for number, one in enumerate(found):
        if should_stop():
            raise Stopped
        if as_json:
            guesses = [{"class": name, "probability": round(p, 6)} for name, p in one.guesses]
            line = json.dumps({"file": str(one.file), "row": one.row, "guesses": guesses}, ensure_ascii=False)
            file.write(f"{'[' if not number else ','}\n {line}")
        else:
            row = "" if one.row is None else one.row
            writer.writerows([one.file, row, rank, name, f"{p:.6f}"] for rank, (name, p) in enumerate(one.guesses, start=1))
    if as_json:
        file.write("\n]\n")
