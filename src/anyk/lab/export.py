"""A trained model as an ONNX file that includes its preprocessing and gives the k best classes."""

import dataclasses
import importlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anyk
from anyk.lab import files
from anyk.lab.errors import LabError, first_line
from anyk.lab.run.models import Classifier, Plan
from anyk.lab.run.sequence_models import OTHERS

_TOLERANCE = 1e-3  # of probabilities: above the effect of another summation order, below that of any wrong operator


class _FirstGuesses(nn.Module):
    def __init__(self, model: Classifier, k: int) -> None:
        super().__init__()
        self.model, self.k = model, k

    def forward(self, examples: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.model(examples).float().softmax(1)
        if self.model.plan.mask_seen:  # perhaps all, which leaves no probability
            probabilities = probabilities.nan_to_num(0.0)
        best = probabilities.topk(self.k)
        return best.indices, best.values


def export(model: Classifier, path: Path, k: int = 5) -> None:
    """Write a model as ONNX, and compare what onnxruntime makes of the file with the model itself.

    The input, ``embeddings`` (N, d) in float32, ``images`` (N, channels, height, width) in uint8 or ``tokens`` (N, length) in
    int64, is as the model's data set had it; N may be any number. Tokens are numbers of classes, n for any other and n + 1 for
    padding on the left. The outputs are ``classes`` (N, k) in int64 and ``probabilities`` (N, k) in float32, best first; 0 for
    what is no guess because the tokens have it. The metadata of the file hold the class names under ``classes``, as a JSON
    list; of a table also ``features``, a name for each of the d numbers in their order (``colour=red`` is 1 where the text in
    column ``colour`` is ``red``), and ``table``, its columns with what stands for missing numbers.

    Args:
        model: from :func:`anyk.lab.run.models.load`.
        path: the file.
        k: guesses for each example; at most as many as there are classes.
    """
    check_packages()
    if k < 1:
        raise LabError(f"k should be at least 1, but is {k}.")
    name, examples = _examples(model)
    module = _FirstGuesses(model.eval(), min(k, len(model.classes))).eval()
    try:
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            batch = torch.export.Dim("batch")
            program = torch.export.export(module, (examples,), dynamic_shapes=({0: batch},), strict=False)
            names = {"input_names": [name], "output_names": ["classes", "probabilities"]}
            exported: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)  # type: ignore[arg-type]
    except Exception as error:  # a network of one's own may hold anything
        raise LabError(f"the model cannot be exported: {first_line(error)}") from None
    about: dict[str, Any] = {"classes": list(model.classes), "shape": list(model.plan.shape), "anyk": anyk.__version__}
    if model.plan.table is not None:
        about |= {"features": model.plan.table.features, "table": dataclasses.asdict(model.plan.table)}
    exported.model.metadata_props.update(
        {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for name, value in about.items()}
    )
    with files.replacing(path) as temporary:
        exported.save(temporary)
        _compare(temporary, module, torch.cat([examples, examples.flip(0)[:1]]))


def input_of(plan: Plan) -> tuple[str, str]:
    """What a model's inputs are called, and their dtype."""
    if plan.tokens:
        return "tokens", "int64"
    return ("images", "uint8") if len(plan.shape) == 3 else ("embeddings", "float32")


def _examples(model: Classifier) -> tuple[str, Tensor]:
    """The name of the inputs, and two of them: torch.export takes a batch of one for a constant."""
    name, _ = input_of(model.plan)
    size, generator = (2, *model.plan.shape), torch.Generator().manual_seed(0)
    if name == "embeddings":
        return name, torch.randn(*size, generator=generator)
    if name == "images":
        return name, torch.randint(256, size, generator=generator, dtype=torch.uint8)
    classes = len(model.classes)
    # Where classes that were seen are no guesses, half of the classes: some should be left.
    return name, torch.randint(max(classes // 2, 1) if model.plan.mask_seen else classes + OTHERS, size, generator=generator)


def check_packages() -> None:
    """Raise if what an export needs is not installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(f'an export to ONNX needs {", ".join(missing)}: pip install "anyk[onnx]".')


def _compare(path: Path, module: nn.Module, examples: Tensor) -> None:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    _, found = session.run(None, {session.get_inputs()[0].name: examples.numpy()})
    with torch.no_grad():
        _, wanted = module(examples)
    difference = float((torch.from_numpy(found) - wanted).abs().max())
    if not difference <= _TOLERANCE:
        raise LabError(
            f"nothing was written: the exported model gives other probabilities than the model, by {difference:.1g}."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporter logs about operators that are not used."""
    former = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(former)
