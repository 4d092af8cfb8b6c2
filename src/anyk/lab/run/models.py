"""The classifiers of the lab, and the trained ones read back from their files."""

import contextlib
import dataclasses
import math
import reprlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyk import checks, prediction_sets
from anyk.lab.data import Dataset, table_files, tables
from anyk.lab.data.sets import Tokens
from anyk.lab.data.tables import Schema
from anyk.lab.errors import LabError
from anyk.lab.run import own_models, sequence_models
from anyk.lab.run.calibration import Calibration
from anyk.lab.run.config import LARGEST_IMAGE, LONGEST_CONTEXT, Setting, accept, describe
from anyk.lab.run.own_models import BUILT_IN, SEQUENCE_MODELS, Maker
from anyk.lab.run.run_folder import Run, read_tensors
from anyk.lab.warn_once import warn_once

#: of the description in a model's file
FORMAT = 3


@dataclass(frozen=True)
class Plan:
    """The description of a model that is stored beside its weights: with both it can be used without its data."""

    model: str
    shape: tuple[int, ...]
    """of one example, as the data set has it: (features,) or (channels, height, width), to which
    :func:`anyk.lab.data.images.read_pixels` brings an image file"""
    classes: tuple[str, ...]
    hidden: int
    dropout: float
    mean: tuple[float, ...] = ()
    """of images, for each channel, of pixels between 0 and 1; as ``std``"""
    std: tuple[float, ...] = ()
    feature_mean: tuple[float, ...] = ()
    """of embeddings that were standardised, for each feature, of the training part; as ``feature_std``"""
    feature_std: tuple[float, ...] = ()
    width: int = 32
    """channels of the first convolution of the cnn"""
    tokens: Tokens = ""
    """what the tokens of a model of sequences are; "": it takes none. Its shape is the number of them that it sees"""
    embedding: int = 0
    layers: int = 0
    heads: int = 1
    tied: bool = False
    mask_seen: bool = False
    """whether tokens that a sequence has had before are excluded from the guesses"""
    table: Schema | None = None
    """of features that were a table, its columns"""
    calibration: Calibration | None = None
    """what lists of a promised coverage need"""

    @classmethod
    def of(cls, config: Setting, dataset: Dataset) -> "Plan":
        """The plan of a resolved config for a data set."""
        name, tokens = config.model, dataset.kind == "sequences"
        shape = (config.context,) if tokens else tuple(dataset.train.shape)
        if tokens and name not in SEQUENCE_MODELS and not own_models.is_function(name):
            words = f"choose {', '.join(SEQUENCE_MODELS)} or module:function"
            raise LabError(f"model {name} takes no tokens, but {dataset.name} holds sequences of them: {words}.")
        if name in SEQUENCE_MODELS and not tokens:
            raise LabError(f"model {name} takes sequences of tokens, but {dataset.name} holds {dataset.kind}: choose another.")
        if len(shape) == 3 and shape[1] * shape[2] > LARGEST_IMAGE**2:
            size, most = f"{shape[1]} x {shape[2]}", f"{LARGEST_IMAGE} x {LARGEST_IMAGE}"
            raise LabError(f"{dataset.name} has images of {size} pixels, but models take at most {most}: make them smaller.")
        if name in ("cnn", "resnet18") or own_models.is_timm(name):
            if dataset.kind != "images":
                raise LabError(f"model {name} takes images, but {dataset.name} holds embeddings: choose linear or mlp.")
            if name in BUILT_IN and min(shape[1:]) < 8:
                size = f"{shape[1]} x {shape[2]}"
                raise LabError(f"model {name} needs images of at least 8 x 8 pixels, but {dataset.name} has {size}.")
        of_data: dict[str, Any] = {
            field: getattr(dataset, field)
            for field in ("classes", "mean", "std", "feature_mean", "feature_std", "tokens", "table")
        }
        of_tokens = ("embedding", "layers", "heads", "tied", "mask_seen") if tokens else ()
        of_model = {field: getattr(config, field) for field in ("model", "hidden", "width", *of_tokens)}
        return cls(shape=shape, dropout=config.dropout or 0.0, **of_data, **of_model)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the images that it takes; None: it takes features."""
        return (self.shape[1], self.shape[2]) if len(self.shape) == 3 else None

    def to_json(self) -> dict[str, Any]:
        """The plan as it stands in a model's file."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Plan":
        """What :meth:`to_json` gave, or a ValueError that says what is wrong with it."""
        types = typing.get_type_hints(cls)
        if fields.get("format") == FORMAT:
            fields = {"table": None, "calibration": None, **fields}  # files of before have none
        if fields.get("format") != FORMAT or fields.keys() != {"format", *types}:
            raise ValueError("it does not say what model it is of, as files of this version of anyk do")

        def refuse_unless(fine: bool, name: str, expected: str) -> None:
            if not fine:
                raise ValueError(f"{name} should be {expected}, but is {reprlib.repr(fields[name])}")

        readers = {"table": Schema.from_json, "calibration": Calibration.from_json}
        values: dict[str, Any] = {name: None if fields[name] is None else read(fields[name]) for name, read in readers.items()}
        for name, kind in types.items():
            if name in values:
                continue
            accepted, values[name] = accept(fields[name], kind)
            refuse_unless(accepted, name, describe(kind))
        plan = cls(**values)
        model, shape, largest = plan.model, plan.shape, 2**62
        refuse_unless(own_models.is_word(model), "model", f"{', '.join(BUILT_IN)}, module:function or timm:NAME")
        of_sequences = model in SEQUENCE_MODELS
        fine = own_models.is_function(model) or bool(plan.tokens) == of_sequences
        refuse_unless(fine, "tokens", "items, words or python" if of_sequences else "empty")
        for name in ("hidden", "width", *(("embedding", "layers", "heads") if of_sequences else ())):
            refuse_unless(0 < values[name] < largest, name, "a positive number")
        refuse_unless(plan.layers <= 1000, "layers", "at most 1000")
        refuse_unless(0 <= plan.dropout < 1, "dropout", "at least 0 and below 1")
        refuse_unless(bool(plan.classes), "classes", "some names")
        of_images = model in ("cnn", "resnet18") or own_models.is_timm(model)
        dimensions = (1,) if plan.tokens else (3,) if of_images else (1, 3)
        fine = len(shape) in dimensions and all(0 < size < largest for size in shape)
        refuse_unless(fine, "shape", f"{' or '.join(map(str, dimensions))} positive numbers")
        # Not every model has weights for each pixel or place, which would show that the shape is wrong.
        refuse_unless(not plan.tokens or shape[0] <= LONGEST_CONTEXT, "shape", f"at most {LONGEST_CONTEXT}")
        images = len(shape) == 3
        if plan.table is not None and (plan.tokens or shape != (plan.table.width,)):
            raise ValueError(f"its table has {plan.table.width} features, but the shape is {reprlib.repr(list(shape))}")
        fine = not images or shape[1] * shape[2] <= LARGEST_IMAGE**2
        refuse_unless(fine, "shape", f"of at most {LARGEST_IMAGE} x {LARGEST_IMAGE} pixels")
        for name in ("mean", "std", "feature_mean", "feature_std"):
            of_features = name.startswith("feature")
            # Images have their own; features may have none.
            counts = {shape[0]} if images and not of_features else {0} if images or not of_features else {0, shape[0]}
            fine = len(values[name]) in counts and all(abs(value) < 1e300 for value in values[name])
            fine = fine and ("mean" in name or all(value > 0 for value in values[name]))
            refuse_unless(fine, name, f"{' or '.join(map(str, sorted(counts)))} numbers")
        refuse_unless(len(plan.feature_mean) == len(plan.feature_std), "feature_std", "as many numbers as feature_mean")
        return plan

    def build(self, function: Maker | None = None, *, pretrained: bool = True) -> nn.Module:
        """The model with fresh weights; its inputs are float32, with mean 0 and deviation 1 where the plan has these numbers.

        Args:
            function: what makes it, instead of what ``model`` names.
            pretrained: whether timm may fetch weights, where ``model`` asks for them.
        """
        inputs, classes = math.prod(self.shape), len(self.classes)
        if function is not None or self.model not in BUILT_IN:
            return own_models.make(
                self.model, self.shape, classes, function=function, pretrained=pretrained, tokens=bool(self.tokens)
            )
        if self.model == "linear":
            return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
        if self.model == "mlp":
            hidden = [nn.Linear(inputs, self.hidden), nn.ReLU(), nn.Dropout(self.dropout)]
            return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(self.hidden, classes))
        if self.model in SEQUENCE_MODELS:
            return self._sequence_model()
        cnn = self.model == "cnn"
        model: Any = (
            SmallCNN(self.shape, classes, self.dropout, self.width) if cnn else ResNet18(self.shape[0], classes, 2 * self.width)
        )
        return model.to(memory_format=torch.channels_last)  # faster convolutions, on the CPU too

    def _sequence_model(self) -> nn.Module:
        [length], classes = self.shape, len(self.classes)
        if self.model == "attention":
            if self.embedding % self.heads:
                raise LabError(f"heads should divide the embedding of {self.embedding} numbers, but is {self.heads}.")
            return sequence_models.AttentionModel(
                length, classes, self.embedding, self.layers, self.heads, self.dropout, self.tied
            )
        if self.model == "gru":
            return sequence_models.GRUModel(classes, self.embedding, self.hidden, self.layers, self.dropout, self.tied)
        return sequence_models.ContextModel(length, classes, self.embedding, self.hidden, self.dropout, self.tied)


def build(config: Setting, dataset: Dataset) -> nn.Module:
    """The model of a resolved config for a data set, with fresh weights; its inputs are float32."""
    return Plan.of(config, dataset).build()


def parameter_groups(model: nn.Module, config: Setting) -> list[dict[str, Any]]:
    """The parameters for an optimizer. Those of a head that has a learning rate of its own come last, as a group whose
    ``factor`` is how many times the rate of the others it has."""
    if not config.head_learning_rate:
        return [{"params": list(model.parameters()), "factor": 1.0}]
    head = own_models.head_parameters(model)
    in_head = {id(parameter) for parameter in head}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in in_head]
    groups = [{"params": rest, "factor": 1.0}, {"params": head, "factor": config.head_learning_rate / config.learning_rate}]
    return [group for group in groups if group["params"]]


class Classifier(nn.Module):
    """A trained model of the lab, in evaluation mode, that takes examples as its data set had them. See :func:`load`.

    Args:
        plan: what the model is.
        weights: its state_dict.
        function: what makes the model, instead of what the plan names.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, plan: Plan, weights: Mapping[str, Tensor], function: Maker | None = None) -> None:
        super().__init__()
        self.plan, self.classes = plan, plan.classes
        if function is None and plan.model in BUILT_IN:
            with torch.device("meta"):  # no memory for weights that are replaced at once, and no random numbers
                self.model = plan.build()
        else:  # somebody's code, which may look at its weights, and has buffers that are not saved
            if function is None:  # timm's, whose size follows from a name in the file: first without memory, where it can
                sketch = None
                with contextlib.suppress(Exception), torch.device("meta"):
                    sketch = plan.build(pretrained=False)
                _check_weights(sketch, weights)
            with torch.random.fork_rng(devices=[]):
                self.model = plan.build(function, pretrained=False)
        _check_weights(self.model, weights)
        self.model.load_state_dict(weights, assign=True)
        for name, pixels, features in (("mean", plan.mean, plan.feature_mean), ("std", plan.std, plan.feature_std)):
            numbers = torch.tensor(pixels)[:, None, None] * 255 if pixels else torch.tensor(features) if features else None
            self.register_buffer(name, numbers, persistent=False)
        self.eval()

    def forward(self, examples: Tensor) -> Tensor:
        """Scores (N, classes) of (N, d) embeddings, of (N, channels, height, width) images in uint8, or of (N, length) tokens,
        padded on the left, as :meth:`tokens` gives them; minus infinity for what is no guess, because it was seen."""
        if not isinstance(examples, Tensor):
            raise TypeError(f"examples: expected a tensor, got {type(examples).__name__}")
        if examples.shape[1:] != self.plan.shape:
            raise ValueError(
                f"examples: expected shape (N, {', '.join(map(str, self.plan.shape))}), got {tuple(examples.shape)}"
            )
        if self.plan.tokens:
            tokens = self._checked(examples)
            scores: Tensor = self.model(tokens)
            if not self.plan.mask_seen:
                return scores
            # shape[0], not len(), which an export would take for a constant.
            seen = scores.new_zeros(scores.shape[0], len(self.classes) + sequence_models.OTHERS).scatter(1, tokens, 1.0)
            return scores.masked_fill(seen[:, : len(self.classes)] > 0, -torch.inf)
        inputs = examples.to(next(self.model.parameters()).dtype)
        if self.mean is not None and self.std is not None:
            if self.plan.mean and examples.dtype != torch.uint8:  # pixels between 0 and 1 would all be black
                raise TypeError(f"examples: expected uint8, pixels from 0 to 255, got {examples.dtype}")
            inputs = (inputs - self.mean) / self.std
        return self.model(inputs)

    def tokens(self, sequences: Sequence[Sequence[str]]) -> Tensor:
        """Sequences of tokens as the model takes them: (N, length), int64.

        The last tokens of each, with padding before them where there are too few. What is no class is one token, any other.
        """
        if not self.plan.tokens:
            raise ValueError(f"tokens: expected a model of sequences, got {self.plan.model}, which takes other examples")
        [length], other = self.plan.shape, len(self.classes)
        rows = torch.full((len(sequences), length), other + sequence_models.OTHERS - 1)
        for row, sequence in zip(rows, sequences, strict=True):
            if isinstance(sequence, str):
                raise TypeError(f"sequences: expected lists of tokens, got the text {sequence[:40]!r}")
            last = [self._numbers.get(token, other) for token in sequence[-length:]]
            row[length - len(last) :] = torch.tensor(last, dtype=torch.int64)
        return rows

    def features(self, table: Any) -> Tensor:
        """The rows of a table as the model takes them: (N, features), float32. Columns are found by their names.

        Args:
            table: the path of a file, a DataFrame of pandas, or a table of pyarrow.
        """
        if self.plan.table is None:
            raise ValueError("table: expected a model that was trained on a table with titles, got one that knows no columns")
        source = Path(table) if isinstance(table, (str, Path)) else table_files.Frame.of(table, "table")
        return torch.cat(list(tables.blocks(source, self.plan.table, 1 << 16, note=warn_once)))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def _checked(self, tokens: Tensor) -> Tensor:
        if tokens.dtype.is_floating_point:
            raise TypeError(f"examples: expected integers, got {tokens.dtype}")
        last = len(self.classes) + sequence_models.OTHERS - 1
        if not torch.compiler.is_compiling() and tokens.numel():  # which has no numbers to look at
            low, high = (int(bound) for bound in tokens.aminmax())
            if low < 0 or high > last:
                raise ValueError(f"examples: expected tokens from 0 to {last}, got {low if low < 0 else high}")
        return tokens.long()

    @torch.no_grad()
    def guesses(
        self, examples: Tensor, count: int | None = None, *, seen: Sequence[Sequence[str]] = (), coverage: float | None = None
    ) -> list[list[tuple[str, float]]]:
        """For each example the first classes by name, with their softmax probabilities; fewer, where fewer may be guessed.

        Args:
            examples: as for the scores.
            count: guesses for each; without it, ``coverage``.
            coverage: how often the right class should be among them: each example gets its own number of guesses. See
                :class:`anyk.PredictionSets` for what that promises.
            seen: for a model of sequences that does not guess what it has seen: the whole sequences, where they are longer than
                what it takes.
        """
        if (count is None) == (coverage is None):
            raise LabError("give either the number of guesses or their coverage.")
        threshold = None if coverage is None else self.threshold(coverage)
        count = len(self.classes) if count is None else min(checks.at_least_one("count", count), len(self.classes))
        training = self.training
        try:
            scores = self.eval()(examples).float()
        finally:
            self.train(training)
        if self.plan.mask_seen and seen:
            for row, sequence in zip(scores, seen, strict=True):
                row[[self._numbers[token] for token in set(sequence) if token in self._numbers]] = -torch.inf
        lengths = [count] * len(scores)
        if threshold is not None:
            lengths = prediction_sets.shown(scores, threshold).sum(1).tolist()  # which are the first ones, equal ones together
            count = max(lengths, default=1)
        best = scores.topk(count)
        probabilities = (best.values - scores.logsumexp(1, keepdim=True)).exp()
        rows = zip(best.indices.tolist(), probabilities.tolist(), best.values.tolist(), strict=True)
        return [
            [(self.classes[number], p) for number, p, score in zip(*row, strict=True) if score > -math.inf][:length]
            for row, length in zip(rows, lengths, strict=True)
        ]

    def threshold(self, coverage: float) -> float:
        """The log-probability that a class needs to be shown, so that the right one is shown that often."""
        if self.plan.calibration is None:
            raise LabError(
                "this model was saved without what coverage needs, as one of --label-noise always is: train it again without, "
                "or use anyk.PredictionSets with the scores of examples that it was not trained with."
            )
        return self.plan.calibration.threshold(coverage)


def _check_weights(model: nn.Module | None, weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless these are the weights of the model."""
    if model is None:
        return
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
    plan, weights = read(path)
    function = own_models.maker(plan.model, str(path), model, trust)
    try:
        return Classifier(plan, weights, function)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # torch has no tensors of any size that a file claims
        raise _unusable(_file(path), error) from None


def keep(run: Path, folder: Path, chose: Sequence[str]) -> None:
    """Write a run's model to another folder, with what its validation examples have chosen beside what the run says."""
    plan, weights = read(run)
    if plan.calibration is not None:
        calibration = dataclasses.replace(plan.calibration, chose=(*plan.calibration.chose, *chose))
        plan = dataclasses.replace(plan, calibration=calibration)
    Run(folder).save_tensors("model.safetensors", weights, plan.to_json())


def read(path: str | Path) -> tuple[Plan, dict[str, Tensor]]:
    """What a `model.safetensors`, or the one in a folder, holds: the plan and the weights. Nothing in it is run."""
    file = _file(path)
    if not file.is_file():
        raise LabError(f"{file} does not exist: a run writes it when it ends.")
    try:
        weights, described = read_tensors(file)
        return Plan.from_json(described), weights
    except ValueError as error:
        raise _unusable(file, error) from None


def _file(path: str | Path) -> Path:
    return Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)


def _unusable(file: Path, error: Exception) -> LabError:
    return LabError(f"{file} cannot be used ({error}): train again in another folder.")


def _conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class SmallCNN(nn.Module):
    """Three convolutions and two linear layers, for small images: trains in seconds on a CPU."""

    def __init__(self, shape: Sequence[int], classes: int, dropout: float = 0.0, first: int = 32) -> None:
        super().__init__()
        channels, height, width = shape
        blocks: list[nn.Module] = []
        for outputs in (first, 2 * first, 4 * first):
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
