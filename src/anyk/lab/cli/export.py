"""`anyk export`."""

from pathlib import Path
from typing import Annotated

import tyro

from anyk.lab.cli.words import Flag, say


def command(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    *,
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("model.onnx"),
    k: int = 5,
    model: str | None = None,
    force: Flag = False,
) -> int:
    """A trained model as an ONNX file, with the normalisation of its inputs and the first k guesses inside.

    Args:
        run: a run's or a comparison's folder, or a model.safetensors.
        out: the file to write.
        k: guesses for each example.
        model: for a model of your own, the function that made it: module:function. A file alone imports no code.
        force: replace a file that is there.
    """
    from anyk.lab import export, files
    from anyk.lab.run import models

    export.check_packages()
    files.refuse_to_overwrite(out, force)
    classifier = models.load(run, model=model)
    export.export(classifier, out, k)
    shape = ", ".join(map(str, classifier.plan.shape))
    name, dtype = export.input_of(classifier.plan)
    say(f"{out}: {name} (N, {shape}) in {dtype} to classes and probabilities (N, {min(k, len(classifier.classes))})")
    return 0
