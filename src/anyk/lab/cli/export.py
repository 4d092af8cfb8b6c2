"""`anyk export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from anyk.lab.cli.words import Flag, Group, say


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("model.onnx")
    """the file to write"""
    k: int = 5
    """guesses for each example"""
    force: Flag = False
    """replace an existing file"""


def command(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    *,
    model: str | None = None,
    output: Group[Output],
) -> int:
    """Write a trained model as an ONNX file, with the normalisation of its inputs and the first k guesses inside.

    Args:
        run: a run's or a comparison's folder, or a model.safetensors.
        model: for a model of your own, the function that made it: module:function. A file alone imports no code.
    """
    from anyk.lab import export, files
    from anyk.lab.run import models

    out, k = output.out, output.k
    export.check_packages()
    files.refuse_to_overwrite(out, output.force)
    classifier = models.load(run, model=model)
    export.export(classifier, out, k)
    shape = ", ".join(map(str, classifier.plan.shape))
    name, dtype = export.input_of(classifier.plan)
    say(f"{out}: {name} (N, {shape}) in {dtype} to classes and probabilities (N, {min(k, len(classifier.classes))})")
    if classifier.plan.table is not None:
        say(f"the {shape} numbers are, in this order: {', '.join(classifier.plan.table.features)}")
    return 0
