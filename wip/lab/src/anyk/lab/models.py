"""The classifiers of the lab, models of your own, and the trained ones read back from their files."""

import contextlib
import dataclasses
import importlib
import itertools
import math
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyk import prediction_sets
from anyk.lab.config import RunConfig
from anyk.lab.data.prepare import Prepared
from anyk.lab.data.tables import TableEncoder
from anyk.lab.errors import LabError, first_line
from anyk.lab.folder import read_tensors
from anyk.lab.options import accept, describe

FORMAT = 4
"""of the description in a model's file"""
BUILT_IN = ("linear", "mlp", "cnn", "resnet18", "context")
Maker = Callable[[tuple[int, ...], int], nn.Module]
"""what makes a model: gets the shape of one example and the number of classes"""
LARGEST_IMAGE, LONGEST_CONTEXT = 8192, 10**6

# No second colon and no slash: timm's hf-hub:… and local-dir:… would bring code and weights from elsewhere.
_TIMM = re.compile(r"timm:([\w.-]+)(:pretrained)?", re.ASCII)
_FUNCTION = re.compile(r"(?!timm:)([^\W\d][\w.]*):([^\W\d][\w.]*)")


# Lists of a promised coverage -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """The log-probabilities that a class needs to be shown, by coverage: split conformal prediction without the data.

    See :class:`anyk.PredictionSets` for what is promised.
    """

    examples: int
    """validation examples that it follows from"""
    chose: tuple[str, ...]
    """what the same examples had chosen before, such as "the epoch": the promise is weaker then"""
    thresholds: tuple[float, ...]
    """for 1, 2, … thousandths, as far as something can be promised; 0 where the first guess is enough"""

    @classmethod
    def of(cls, conformity: Tensor, chose: tuple[str, ...], groups: Tensor | None = None) -> "Calibration":
        """From what :func:`anyk.prediction_sets.conformity` gives of held-out examples; NaN counts as no guess at all.

        With groups, what is promised is of examples of new groups: each group counts once, by one of its examples.
        """
        values = torch.where(conformity.isnan(), -torch.inf, conformity.double()).clamp(max=0.0)
        if groups is not None:  # one example of each group, at random but the same each time: they are exchangeable
            order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
            _, whose = groups[order].unique(return_inverse=True)
            first = torch.full((int(whose.max()) + 1,), len(values)).scatter_reduce(0, whose, torch.arange(len(order)), "amin")
            values = values[order[first]]
        ordered = values.sort(descending=True).values
        examples, thresholds = len(ordered), []
        for step in range(1, 1000):
            place = -(-(examples + 1) * step // 1000)  # rounded up
            if place > examples or not math.isfinite(value := float(ordered[place - 1])):
                break
            thresholds.append(math.floor(value * 10**4) / 10**4)  # down: above what another batch size changes
        return cls(examples, chose, tuple(thresholds))

    def threshold(self, coverage: float) -> float:
        """The threshold for a coverage, of which a part of a thousandth counts as a whole one; a LabError says why not."""
        try:
            share = prediction_sets.checked_coverage(coverage)
        except (TypeError, ValueError) as error:
            raise LabError(f"{error}.") from None
        step = math.ceil(share * 1000)
        if step <= len(self.thresholds):
            return self.thresholds[step - 1]
        needed = math.ceil(Fraction(step, 1000 - step)) if step < 1000 else None
        reason = f"it was calibrated with {self.examples:,} validation examples (or groups of them)"
        if needed is None:
            reason = "nothing is kept beyond 0.999"
        elif needed > self.examples:
            reason += f", and needs {needed:,}"
        else:
            reason += ", too many of which have a target that it never guesses"
        most = f"ask for at most {len(self.thresholds) / 1000:g}" if self.thresholds else "train it with more of them"
        raise LabError(f"coverage {float(share):g} cannot be promised by this model: {reason}; {most}.")

    @classmethod
    def from_json(cls, fields: Any) -> "Calibration":
        """What a model's file has, or a ValueError that says what is wrong with it."""
        types, values = typing.get_type_hints(cls), {}
        if not isinstance(fields, Mapping) or fields.keys() != types.keys():
            raise ValueError(f"calibration should have {', '.join(types)}")
        for name, kind in types.items():
            accepted, values[name] = accept(fields[name], kind)
            if not accepted:
                raise ValueError(f"{name} of the calibration should be {describe(kind)}")
        found = cls(**values)
        falling = all(-math.inf < low <= high for high, low in itertools.pairwise((0.0, *found.thresholds)))
        if not (0 <= found.examples < 2**62 and len(found.thresholds) < 1000 and falling):
            raise ValueError("thresholds of the calibration should be numbers that fall from 0, fewer than 1000")
        return found


# What a model is ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSpec:
    """The description of a model that is stored beside its weights: with both it can be used without its data."""

    model: str
    kind: str
    """features, images or sequences"""
    shape: tuple[int, ...]
    """of one example: (features,), (channels, height, width), or (tokens,) before the target"""
    classes: tuple[str, ...]
    hidden: int
    dropout: float
    start: str = "torch"
    mean: tuple[float, ...] = ()
    """of the training examples: for each feature, or for each channel of pixels between 0 and 1; as ``std``"""
    std: tuple[float, ...] = ()
    tokens: str = ""
    """of sequences, what their tokens are: items or python"""
    mask_seen: bool = False
    """whether tokens that a sequence has had before are excluded from the guesses"""
    table: TableEncoder | None = None
    """of features that were a table, its columns"""
    calibration: Calibration | None = None

    @classmethod
    def of(cls, config: RunConfig, data: Prepared) -> "ModelSpec":
        """The spec of a resolved config for a data set."""
        name, kind, shape = config.model, data.kind, tuple(data.shape)
        if name in BUILT_IN:
            wanted = {"cnn": ("images",), "resnet18": ("images",), "context": ("sequences",)}.get(name, ("features", "images"))
            if kind not in wanted:
                raise LabError(f"model {name} takes {' or '.join(wanted)}, but {data.name} holds {kind}: choose another.")
        elif not is_word(name):
            raise LabError(f"model should be {', '.join(('auto', *BUILT_IN))}, module:function or timm:NAME, but is {name!r}.")
        if len(shape) == 3 and shape[1] * shape[2] > LARGEST_IMAGE**2:
            raise LabError(f"{data.name} has images of {shape[1]} x {shape[2]} pixels: give a smaller --image-size.")
        if name in ("cnn", "resnet18") and min(shape[1:]) < 8:
            raise LabError(f"model {name} needs images of at least 8 x 8 pixels, but {data.name} has {shape[1]} x {shape[2]}.")
        numbers = (
            {}
            if data.mean is None or data.std is None
            else {"mean": tuple(data.mean.tolist()), "std": tuple(data.std.tolist())}
        )
        return cls(
            model=name,
            kind=kind,
            shape=shape,
            classes=data.classes,
            hidden=config.hidden,
            dropout=config.dropout or 0.0,
            start=config.start,
            tokens=data.tokens,
            mask_seen=data.mask_seen,
            table=data.table,
            **numbers,
        )

    def to_json(self) -> dict[str, Any]:
        """The spec as it stands in a model's file."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        fields["table"] = None if self.table is None else self.table.to_json()
        fields["calibration"] = None if self.calibration is None else dataclasses.asdict(self.calibration)
        return {"format": FORMAT, **fields}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModelSpec":
        """What :meth:`to_json` gave, or a ValueError that says what is wrong with it."""
        types = typing.get_type_hints(cls)
        if fields.get("format") != FORMAT or fields.keys() != {"format", *types}:
            raise ValueError("it does not say what model it is of, as files of this version of anyk do")
        readers = {"table": TableEncoder.from_json, "calibration": Calibration.from_json}
        values: dict[str, Any] = {name: None if fields[name] is None else read(fields[name]) for name, read in readers.items()}
        for name, kind in types.items():
            if name not in values:
                accepted, values[name] = accept(fields[name], kind)
                _require(accepted, name, describe(kind))
        spec = cls(**values)
        shape, largest = spec.shape, 2**62
        _require(is_word(spec.model), "model", f"{', '.join(BUILT_IN)}, module:function or timm:NAME")
        dimensions = {"features": 1, "images": 3, "sequences": 1}.get(spec.kind)
        _require(dimensions is not None, "kind", "features, images or sequences")
        _require(
            len(shape) == dimensions and all(0 < size < largest for size in shape), "shape", f"{dimensions} positive numbers"
        )
        _require(spec.kind != "images" or shape[1] * shape[2] <= LARGEST_IMAGE**2, "shape", "of smaller images")
        _require(spec.kind != "sequences" or shape[0] <= LONGEST_CONTEXT, "shape", f"at most {LONGEST_CONTEXT}")
        _require(0 < spec.hidden < largest, "hidden", "a positive number")
        _require(0 <= spec.dropout < 1, "dropout", "at least 0 and below 1")
        _require(bool(spec.classes), "classes", "some names")
        _require(spec.table is None or shape == (spec.table.width,), "table", f"one of {shape[0]} features")
        for name in ("mean", "std"):
            numbers = getattr(spec, name)
            fine = len(numbers) in (0, shape[0]) and all(
                abs(value) < 1e300 and (name == "mean" or value > 0) for value in numbers
            )
            _require(fine, name, f"{shape[0]} numbers")
        _require(len(spec.mean) == len(spec.std), "std", "as many numbers as mean")
        return spec

    def build(self, function: Maker | None = None, *, pretrained: bool = True) -> nn.Module:
        """The model with fresh weights; its inputs are float32 with mean 0 and deviation 1, or tokens.

        Args:
            function: what makes it, instead of what ``model`` names.
            pretrained: whether timm may fetch weights, where ``model`` asks for them.
        """
        inputs, classes = math.prod(self.shape), len(self.classes)
        model: nn.Module
        if function is not None or self.model not in BUILT_IN:
            model = _own_model(self.model, self.shape, classes, function, pretrained, self.kind == "sequences")
        elif self.model == "linear":
            model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
        elif self.model == "mlp":
            hidden = [nn.Linear(inputs, self.hidden), nn.ReLU(), nn.Dropout(self.dropout)]
            model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(self.hidden, classes))
        elif self.model == "context":
            model = ContextModel(self.shape[0], classes, self.hidden, self.dropout)
        else:
            cnn = self.model == "cnn"
            model = SmallCNN(self.shape, classes, self.dropout) if cnn else ResNet18(self.shape[0], classes)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster, on the CPU too
        if self.start == "zero":
            for parameter in last_layer(model):
                nn.init.zeros_(parameter)
        return model


def _require(fine: bool, name: str, expected: str) -> None:
    if not fine:
        raise ValueError(f"{name} should be {expected}")


def last_layer(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model's last layer: of timm's ``get_classifier()``, or of the last nn.Linear in it."""
    if hasattr(model, "get_classifier"):
        classifier: Any = model.get_classifier
        return list(classifier().parameters())
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise LabError("--start zero needs a last layer, but the model has no nn.Linear: leave it out.")
    return list(linear[-1].parameters())


# Trained models -------------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A trained model of the lab, in evaluation mode, that takes examples as its data set had them. See :func:`load`.

    Args:
        spec: what the model is.
        weights: its state_dict.
        function: what makes the model, instead of what the spec names.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], function: Maker | None = None) -> None:
        super().__init__()
        self.spec, self.classes = spec, spec.classes
        if function is None and spec.model in BUILT_IN:
            with torch.device("meta"):  # no memory for weights that are replaced at once, and no random numbers
                self.model = spec.build()
        else:  # somebody's code, which may look at its weights, and has buffers that are not saved
            if function is None:  # timm's, whose size follows from a name in the file: first without memory, where it can
                with contextlib.suppress(RuntimeError, NotImplementedError, LabError), torch.device("meta"):
                    _check_weights(spec.build(pretrained=False), weights)
            with torch.random.fork_rng(devices=[]):
                self.model = spec.build(function, pretrained=False)
        _check_weights(self.model, weights)
        self.model.load_state_dict(weights, assign=True)
        for name in ("mean", "std"):
            numbers = torch.tensor(getattr(spec, name)) if spec.mean else None
            if numbers is not None and spec.kind == "images":
                numbers = numbers[:, None, None] * 255
            self.register_buffer(name, numbers, persistent=False)
        self.eval()

    def forward(self, examples: Tensor) -> Tensor:
        """Scores (N, classes) of (N, d) features, of (N, channels, height, width) images in uint8, or of (N, length) tokens; -inf
        for what is no guess, because it was seen."""
        if examples.shape[1:] != self.spec.shape:
            raise ValueError(
                f"examples: expected shape (N, {', '.join(map(str, self.spec.shape))}), got {tuple(examples.shape)}"
            )
        if self.spec.kind == "sequences":
            scores: Tensor = self.model(examples)
            if not self.spec.mask_seen:
                return scores
            seen = scores.new_zeros(len(scores), len(self.classes) + 2).scatter(1, examples, 1.0)
            return scores.masked_fill(seen[:, : len(self.classes)] > 0, -torch.inf)
        if self.spec.kind == "images" and examples.dtype != torch.uint8:  # pixels between 0 and 1 would all be black
            raise TypeError(f"examples: expected uint8, pixels from 0 to 255, got {examples.dtype}")
        inputs = examples.to(next(self.model.parameters()).dtype)
        if self.mean is not None and self.std is not None:
            inputs = (inputs - self.mean) / self.std
        return self.model(inputs)

    @torch.no_grad()
    def guesses(self, examples: Tensor, k: int = 5, threshold: float | None = None) -> list[list[tuple[str, float]]]:
        """The first guesses for each example, by class name and softmax probability: k of them, or all whose log-probability
        reaches a threshold (at least one)."""
        scores = self(examples).float()
        count = min(k, len(self.classes))
        lengths = [count] * len(scores)
        if threshold is not None:
            lengths = prediction_sets.shown(scores, threshold).sum(1).tolist()  # the first ones, equal ones together
            count = max(lengths, default=1)
        best = scores.topk(count)
        probabilities = (best.values - scores.logsumexp(1, keepdim=True)).exp()
        rows = zip(best.indices.tolist(), probabilities.tolist(), best.values.tolist(), lengths, strict=True)
        return [
            [(self.classes[number], p) for number, p, score in zip(*row, strict=True) if score > -math.inf][:length]
            for *row, length in rows
        ]

    def threshold(self, coverage: float) -> float:
        """The log-probability that a class needs to be shown, so that the right one is shown that often."""
        if self.spec.calibration is None:
            raise LabError(
                "this model was saved without what coverage needs, as one of --label-noise always is: train it again without, "
                "or use anyk.PredictionSets with the scores of examples that it was not trained with."
            )
        return self.spec.calibration.threshold(coverage)


def _check_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless these are the weights of the model."""
    wanted = {name: (tensor.dtype, tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    for name in [*wanted, *given]:
        if wanted.get(name) != given.get(name):
            expected, found = (f"{each[0]} {list(each[1])}" if each else "none" for each in (wanted.get(name), given.get(name)))
            raise ValueError(f"the weights {name} should be {expected}, but are {found}")


def load(path: str | Path, *, model: str | Maker | None = None, trust: bool = False) -> Classifier:
    """The trained model of a run or of a comparison, from its `model.safetensors`; the data need not be there.

    A file cannot make this import code: where it names a function (``module:function``), the caller passes that function or
    says that the file is to be trusted.

    Args:
        path: the file, or the folder that holds it.
        model: the function that made the model, or its word; for a model of your own.
        trust: import the function that the file names.
    """
    spec, weights = read(path)
    function: Maker | None = None
    if model is not None:
        function = find(model) if isinstance(model, str) else model
    elif is_function(spec.model):
        if not trust:
            raise LabError(
                f"{path} names the model {spec.model}, which is code that reading a file does not import: name the function "
                f"(--model {spec.model}, in Python model={spec.model!r} or trust=True) if the file is yours."
            )
        function = find(spec.model)
    try:
        return Classifier(spec, weights, function)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # torch has no tensors of any size that a file claims
        raise _unusable(_file(path), error) from None


def read(path: str | Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """What a `model.safetensors`, or the one in a folder, holds: the spec and the weights. Nothing in it is run."""
    file = _file(path)
    if not file.is_file():
        raise LabError(f"{file} does not exist: a run writes it when it ends.")
    try:
        weights, described = read_tensors(file)
        return ModelSpec.from_json(described), weights
    except ValueError as error:
        raise _unusable(file, error) from None


def _file(path: str | Path) -> Path:
    return Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)


def _unusable(file: Path, error: Exception) -> LabError:
    return LabError(f"{file} cannot be used ({error}): train again in another folder.")


# Models of your own ---------------------------------------------------------------------------------------------------------


def is_word(word: str) -> bool:
    """Whether this can name a model: one of the lab's, `module:function`, `timm:NAME` or `timm:NAME:pretrained`."""
    return word in BUILT_IN or bool(_TIMM.fullmatch(word)) or is_function(word)


def is_function(word: str) -> bool:
    """Whether the word names a function, which has to be imported: code that somebody wrote."""
    return bool(_FUNCTION.fullmatch(word))


def word_of(model: str | Maker) -> str:
    """The word for ``model`` that names it: a word as it is, a function of a module as ``module:function``."""
    if isinstance(model, str):
        return model
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", None)
    if isinstance(model, nn.Module) or not callable(model) or not module or not name:
        raise LabError(
            f"model should be a word or a function that makes a new model for each run, but is a {type(model).__name__}."
        )
    word = f"{module}:{name}"
    same = False
    with contextlib.suppress(LabError):
        same = module != "__main__" and is_function(word) and find(word) is model
    if not same:
        raise LabError(
            f"model {name} of {module} is not found under its name there; runs are processes of their own that import it, also "
            "after a kill: move it into a file such as my_models.py, at the top level, and import it from there."
        )
    return word


def find(word: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules in the working folder are found."""
    module, _, name = word.partition(":")
    with working_folder_on_path():
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:  # whatever the module does while it is imported
            raise LabError(f"model {word} cannot be imported ({_message(error, sys.modules.get(module))}).") from None
        for part in name.split("."):
            if not hasattr(found, part):
                raise LabError(f"model {word} is not found: {module} has no {name}.")
            found = getattr(found, part)
    if not callable(found):
        raise LabError(f"model {word} should be a function, but is a {type(found).__name__}.")
    return found


def _own_model(
    word: str, shape: tuple[int, ...], classes: int, function: Maker | None, pretrained: bool, tokens: bool
) -> nn.Module:
    """A new model that was seen to work: two examples give two rows of finite scores."""
    match = _TIMM.fullmatch(word)
    if function is None and match is not None:
        try:
            timm = importlib.import_module("timm")
            model: Any = timm.create_model(
                match[1], pretrained=bool(match[2]) and pretrained, num_classes=classes, in_chans=shape[0]
            )
        except Exception as error:  # not installed, or not for this torch; unknown names, failed downloads
            raise LabError(f"timm cannot make {match[1]} ({_message(error)}): pip install timm, or choose another.") from None
        if not pretrained:  # the weights of a file follow, and its shape may be any
            return model  # type: ignore[no-any-return]
    else:
        function = function or find(word)
        with working_folder_on_path():
            try:
                model = function(shape, classes)
            except Exception as error:
                source = sys.modules.get(getattr(function, "__module__", ""))
                raise LabError(
                    f"model {word} failed when called with {shape}, {classes} ({_message(error, source)})."
                ) from None
    _try(model, word, shape, classes, tokens)
    return model  # type: ignore[no-any-return]


def _try(model: Any, word: str, shape: tuple[int, ...], classes: int, tokens: bool) -> None:
    """Raise unless the model can be trained and saved. Lazy layers learn their sizes here, before an optimizer asks."""
    if not isinstance(model, nn.Module):
        raise LabError(f"model {word} should return an nn.Module, but returned a {type(model).__name__}.")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, *shape, generator=generator)
    if tokens:
        inputs = torch.randint(classes + 2, (2, *shape), generator=generator)
    training = model.training
    try:
        with torch.no_grad():
            scores: Any = model.eval()(inputs)
    except Exception as error:
        source = sys.modules.get(type(model).__module__)
        raise LabError(f"model {word} failed on two examples of shape {shape} ({_message(error, source)}).") from None
    finally:
        model.train(training)
    if not isinstance(scores, Tensor) or scores.shape != (2, classes):
        came = f"the shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise LabError(f"model {word} should give scores of shape (2, {classes}) for two examples, but gives {came}.")
    if not scores.is_floating_point() or not bool(scores.isfinite().all()):
        raise LabError(f"model {word} should give finite scores, but gives {scores.dtype} with {scores.flatten()[0].item()}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise LabError(f"model {word} has no parameter that can be trained: requires_grad is False for all.")


@contextlib.contextmanager
def working_folder_on_path() -> Iterator[None]:
    """As `python -m` does: a module beside the user is found."""
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _message(error: Exception, module: ModuleType | None = None) -> str:
    """An error of somebody's code in one line, with the line of the module that it came from."""
    kind, line = type(error).__name__, first_line(error)
    text = kind if line == kind else f"{kind}: {line[:200]}"
    file = getattr(module, "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{text}, line {lines[-1]} of {os.path.basename(str(file))}" if lines else text


# The lab's own models -------------------------------------------------------------------------------------------------------


class ContextModel(nn.Module):
    """Scores (B, n) of what follows the tokens (B, length): a hidden layer over their embeddings, side by side.

    0 … n-1 are the classes, n any other token, n + 1 padding, on the left.
    """

    def __init__(self, length: int, classes: int, hidden: int, dropout: float, size: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes + 2, size)
        nn.init.normal_(self.embedding.weight, std=size**-0.5)
        self.body = nn.Sequential(nn.Linear(length * size, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.output = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.body(self.embedding(tokens).flatten(1)))


def _conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class SmallCNN(nn.Module):
    """Three convolutions and two linear layers, for small images: trains in seconds on a CPU."""

    def __init__(self, shape: Sequence[int], classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, width = shape
        blocks: list[nn.Module] = []
        for outputs in (32, 64, 128):
            # Pooling first: normalising a quarter of the pixels is cheaper and, before a ReLU, as good.
            blocks += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.MaxPool2d(2),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
            channels, height, width = outputs, height // 2, width // 2
        self.features = nn.Sequential(*blocks, nn.Flatten())
        hidden = nn.Linear(channels * height * width, 256)
        self.head = nn.Sequential(hidden, nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images.contiguous(memory_format=torch.channels_last)))


class ResNet18(nn.Module):
    """ResNet18 as the paper trains it on CIFAR: a 3 x 3 stem of stride 1, then max-pooling and the usual four stages.

    ``width`` is the number of channels of the stem and the first stage, 64 in the paper.
    """

    def __init__(self, channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(channels, width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = (width, width, 2 * width, 4 * width, 8 * width)
        stages = []
        for inputs, outputs, stride in zip(widths, widths[1:], (1, 2, 2, 2), strict=False):
            stages += [_Residual(inputs, outputs, stride), _Residual(outputs, outputs, 1)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(inputs, outputs, stride), nn.ReLU(), _conv(outputs, outputs))
        self.shortcut = nn.Identity() if inputs == outputs and stride == 1 else _conv(inputs, outputs, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


# Augmentation: on whole batches, from torch's global generator, which the trainer seeds at each step -----------------------


def augment(images: Tensor, names: tuple[str, ...]) -> Tensor:
    """Random changes to (B, channels, height, width) images that have mean 0."""
    for name in names:
        images = AUGMENTATIONS[name](images)
    return images


def _crop(images: Tensor) -> Tensor:
    """Pad with zeros on all sides, by 4 pixels for images of 32 x 32, and cut out a random window of the old size."""
    batch, _, height, width = images.shape
    pad = max(1, max(height, width) // 8)
    padded = functional.pad(images, (pad, pad, pad, pad))
    down = torch.randint(2 * pad + 1, (batch, 1, 1, 1), device=images.device)
    right = torch.randint(2 * pad + 1, (batch, 1, 1, 1), device=images.device)
    rows = torch.arange(height, device=images.device)[:, None] + down
    columns = torch.arange(width, device=images.device) + right
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    example = torch.arange(batch, device=images.device)[:, None, None, None]
    return padded[example, channel, rows, columns]


def _flip(images: Tensor) -> Tensor:
    """Mirror every second image, at random."""
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(3), images)


def _affine(images: Tensor, turn: float = 0.2, scale: float = 0.15, shift: float = 0.15) -> Tensor:
    """Turn by up to ``turn`` (radians), scale by up to ``scale`` and shift by up to ``shift`` of half the width."""
    batch = len(images)
    angle, size, down, right = (2 * torch.rand(4, batch, device=images.device) - 1) * torch.tensor(
        [[turn], [scale], [shift], [shift]], device=images.device
    )
    size = 1 + size
    rows = torch.stack([angle.cos() * size, -angle.sin() * size, right, angle.sin() * size, angle.cos() * size, down], 1)
    grid = functional.affine_grid(rows.reshape(batch, 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


AUGMENTATIONS = {"crop": _crop, "flip": _flip, "affine": _affine}
