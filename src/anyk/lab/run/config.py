"""A config: everything that one training run depends on, as plain data.

The same fields are the options of `anyk train`, in groups as they are written here, the `config.json` of a run folder and the
columns of `anyk report`. Two runs with equal configs on the same machine end with the same bits.
"""

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro

from anyk import p_k as p_ks
from anyk.lab.data.tables import Log, Options
from anyk.lab.did_you_mean import nearest
from anyk.lab.errors import LabError
from anyk.lab.run import loss_names, own_models

Metric = Literal["top1", "top5", "top10", "mean", "mrr", "ndcg10", "macro_top1", "macro_top5"]
Augmentation = Literal["auto", "crop", "flip", "affine"]


@dataclass(frozen=True)
class DataFields:
    """What to learn from."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]")] = "glyphs"
    """completion, completion:CLASSES, glyphs, glyphs:CLASSES, cifar100, cifar100:PATH, sequences:FILE, movielens:PATH,
    words:PATH, hf:PATH, a folder of embeddings, a folder of images, a table or an array file"""
    validation: float = 0.1
    """fraction of the training examples kept for validation, stratified, where the data have no split for it"""
    test: float = 0.2
    """fraction kept for the test, where the data have no split for it"""
    split_seed: int = 0
    """seed of these splits"""
    train_fraction: float = 1.0
    """fraction of the training examples that is used, stratified"""
    split: Literal["auto", "last", "lines"] = "auto"
    """sequences: last takes the last of each for the test and the one before it for validation; lines takes whole sequences by
    the two fractions; auto: last, and for words:PATH whole files"""
    mask_seen: bool = False
    """sequences: do not guess what the sequence already contains"""
    image_size: int = 0
    """height and width that images are resized to; 0: 32 for a folder of images and hf:PATH, others as they are"""
    standardize: bool = True
    """features of embeddings and tables: subtract the mean and divide by the standard deviation of the training part"""
    label_column: str | None = None
    """tables: the column with the label; by default the last one, for hf:PATH the one with class names or called label"""
    drop: tuple[str, ...] = ()
    """tables: columns to leave out"""
    categories: tuple[str, ...] = ()
    """tables: columns of numbers that are categories, to be one-hot encoded as texts are"""
    missing: Literal["mean", "refuse"] = "mean"
    """tables: missing values: mean fills numbers with the column's mean and gives texts no category; refuse is an error"""
    row_numbers: bool = False
    """tables: keep columns that only number the rows, such as the index of pandas"""
    user: str | None = None
    """sequences:LOG.csv: the column with the user; the items of a user are one sequence"""
    item: str | None = None
    """sequences:LOG.csv: the column with the item"""
    order: str | None = None
    """sequences:LOG.csv: the column of numbers or times that orders the items of a user; by default the order of the rows"""


@dataclass(frozen=True)
class ModelFields:
    """Which model to train."""

    model: str = "auto"
    """linear, mlp; cnn, resnet18; context, gru, attention for sequences; module:function, a function of yours that is called
    with the shape of one example and the number of classes and returns an nn.Module; timm:NAME or timm:NAME:pretrained; auto:
    linear on embeddings, cnn on images, context on sequences"""
    hidden: int = 0
    """width of the hidden layer (mlp, context, gru); 0: 512, or 96 on sequences"""
    dropout: float | None = None
    """dropout before the last layer (mlp, cnn) and in the models of sequences; none: 0, or 0.2 on sequences"""
    width: int = 32
    """cnn: channels of the first convolution; the next have twice and four times as many. resnet18: half of the channels of its
    first convolution"""
    context: int = 0
    """sequences: how many tokens the model sees; 0: 6 (context), 50 (attention) or 32 (gru, and models of yours)"""
    embedding: int = 0
    """sequences: size of the embedding of a token; 0: 48"""
    layers: int = 0
    """layers of the gru or the attention; 0 means 1 for the gru, 2 for the attention"""
    heads: int = 1
    """heads of the attention; the size of the embedding should be a multiple of this"""
    tied: bool = False
    """sequences: the last layer has the weights of the embedding"""


@dataclass(frozen=True)
class LossFields:
    """What to train for."""

    ks: tuple[int, ...] = ()
    """the k that you will show to people; by default 1 and 5; in `anyk compare` with fewer than 9 classes, 1 and half of them.
    The metric "mean" is over these. `anyk compare` judges by them, and trains for them unless P_K is given"""
    p_k: tuple[float, ...] = (0.5, 0.0, 0.0, 0.0, 0.5)
    """P_K: the weight of top-1, top-2, ...; by default top-1 and top-5, of fewer than 9 classes top-1 and half of them"""
    p_k_end: tuple[float, ...] | None = None
    """P_K moves from p_k to this, linearly over the run"""
    p_k_file: str | None = None
    """a JSON or CSV file with one P_K for each class, instead of p_k"""
    temperature: float = 1.0
    """how soft the ranking is: smaller is closer to hard top-k"""
    temperature_end: float | None = None
    """the temperature moves from temperature to this, geometrically over the run"""
    m: int | Literal["auto"] | None = "auto"
    """rank only the m best scores of a row; auto: 64, or four times the k of P_K if that is more; none: all"""
    top1: Literal["separate", "mixed", "operator"] = "separate"
    """the top-1 part: softmax cross-entropy as a separate term, softmax mixed into the logarithm, or the operator's own"""
    softmax_over: Literal["all", "candidates"] = "all"
    """which classes the softmax of the top-1 part covers"""
    ce_weight: float = 0.2
    """error losses: the share of softmax cross-entropy"""
    ce_weight_end: float | None = None
    """ce_weight moves to this, linearly over the run"""
    q: float = 1.0
    """error losses: the exponent in (1 - T^q) / q: 1 is the expected top-k error, 0 the limit -log T"""
    swap: str = "logistic"
    """the soft comparator of the networks: logistic, logistic_art, cauchy, gaussian, reciprocal, optimal"""
    wires: Literal["target", "given", "sorted"] = "target"
    """where the classes enter a network"""
    anchors: Literal["all", "topk"] = "all"
    """the rank anchors of sinkhorn"""
    label_smoothing: float = 0.0
    """as in torch.nn.CrossEntropyLoss; of error losses, in the cross-entropy alone"""


@dataclass(frozen=True)
class TrainingFields:
    """How to train, and what is measured on the way."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """sgd has momentum 0.9"""
    learning_rate: float = 0.0
    """the largest learning rate of the run; 0: by the kind of data"""
    schedule: Literal["auto", "constant", "cosine", "onecycle"] = "auto"
    """the learning rate over the run; auto: by the kind of data"""
    head_learning_rate: float = 0.0
    """the largest learning rate of the last layer, to fine-tune a backbone with another; 0: the same as the rest"""
    weight_decay: float = 0.0
    """as the optimizer defines it"""
    clip: float | None = None
    """largest norm of the gradient"""
    batch_size: int = 0
    """examples in a step; 0: by the kind of data"""
    epochs: int = 0
    """passes over the training examples; 0: by the kind of data"""
    shuffle: Literal["auto", "full", "block"] = "auto"
    """order of the examples: full, or block by block and window by window, for sets larger than the memory; auto: block where
    the files of the training examples are larger than a quarter of the memory"""
    shuffle_block: int = 0
    """examples that lie together and are read at once; 0: 128 KiB of them, fewer where a window would not have a block for
    each class"""
    shuffle_window: int = 0
    """examples that are in memory and mixed at a time; 0: 256 MiB of them"""
    evaluate_every: int = 0
    """steps between evaluations on validation; 0: once an epoch"""
    select: Metric | Literal["each", "last"] = "mean"
    """the evaluation that counts: the best on validation by this metric (mean: of the ks); each: every metric has
    its own, as in the paper; last: the last"""
    patience: int = 0
    """stop after this many evaluations without improvement; 0: never"""
    measure: tuple[int, ...] = ()
    """further k to measure, beside 1, 5, 10, 20 and those that P_K trains for"""

    augment: tuple[Augmentation, ...] = ("auto",)
    """images: crop (pad by an eighth and crop), flip (left-right), affine (turn, scale, shift); auto: none"""
    mixup: float = 0.0
    """alpha of mixup's Beta distribution; 0: none"""
    label_noise: float | str = 0.0
    """wrong labels for training and validation, to see what they cost: the share that is replaced by another class, or a file
    with a confusion matrix to draw them from (.npy, .csv; row c: what people said for class c); the test keeps its own"""
    noise_seed: int = 0
    """which draw of wrong labels; all losses and seeds have the same"""

    device: str = "cpu"
    """cpu, cuda, cuda:1, mps"""
    amp: bool = False
    """bfloat16 autocast"""
    threads: int = 1
    """CPU threads; another number may change the last digits of the results"""


@dataclass(frozen=True)
class Setting(TrainingFields, LossFields, ModelFields, DataFields):  # the fields of the last come first
    """What the runs of a comparison share: a :class:`Config` without the loss and the seed.

    Zeros and "auto" leave a field to the data; :meth:`resolved` fills them in.
    """

    def __post_init__(self) -> None:
        for name, kind in _types(type(self)).items():  # type: ignore[arg-type]  # which takes the class for its instances
            accepted, value = accept(getattr(self, name), kind)
            if not accepted:
                raise LabError(f"{name} should be {describe(kind)}, but is {value!r}.")
            object.__setattr__(self, name, value)
            if type(value) in (int, float):
                low, high = _RANGES.get(name, (0, 1e12 if type(value) is int else 1e30))
                if not low <= value <= high:
                    raise LabError(f"{name} should be between {low:g} and {high:g}, but is {reprlib.repr(value)}.")
        for name in ("p_k", "p_k_end"):
            try:
                if getattr(self, name) is not None:
                    p_ks.read(getattr(self, name), name)
            except ValueError as error:
                raise LabError(f"{error}.") from None
        if self.p_k_end is not None and len(self.p_k_end) != len(self.p_k):
            raise LabError(f"p_k_end should be as long as p_k ({len(self.p_k)}), but has length {len(self.p_k_end)}.")
        if self.p_k_file is not None and self.p_k_end is not None:
            raise LabError("p_k_end moves the one p_k of all classes; it cannot be combined with p_k_file.")
        for name, ks in (("measure", self.measure), ("ks", self.ks)):
            if any(k < 1 for k in ks):
                raise LabError(f"{name} should be k of at least 1, but is {list(ks)}.")
        if (self.user is None) != (self.item is None) or (self.order is not None and self.user is None):
            given = [
                f"{name} {value!r}"
                for name, value in (("user", self.user), ("item", self.item), ("order", self.order))
                if value
            ]
            raise LabError(
                f"user and item should both be given for a log, order too if there is one; given was {', '.join(given)}."
            )
        loss_names.check_swap(self.swap)
        if self.model != "auto" and not own_models.is_word(self.model):
            known = ", ".join(("auto", *own_models.BUILT_IN))
            raise LabError(f"model should be {known}, module:function or timm:NAME, but is {self.model!r}.")

    def resolved(self, kind: str, examples: int, classes: int = 1, example_bytes: int = 1, memory: float = math.inf) -> Self:
        """The same with every zero and "auto" that stands for "by the data" filled in.

        The batch is at most a twentieth of the examples: an epoch of one step trains nothing. The examples are shuffled in
        blocks if they, with ``example_bytes`` each on the disk, take more than a quarter of the ``memory``: in a full shuffle,
        every row comes from anywhere, and is read from the disk at its turn unless the system can keep all of them.

        Args:
            kind: embeddings, images or sequences
            examples: how many there are to train with
            classes: of how many classes
            example_bytes: the stored size of one
            memory: bytes; infinite where the examples are in memory already
        """
        values = {**BY_KIND[kind], "batch_size": max(1, min(BY_KIND[kind]["batch_size"], examples // 20))}
        if kind == "sequences":
            values |= BY_MODEL.get(self.model if self.model != "auto" else values["model"], {"context": 32})
        shuffle = self.shuffle if self.shuffle != "auto" else "block" if examples * example_bytes > memory / 4 else "full"
        values["shuffle"] = shuffle
        if shuffle == "block":
            values["shuffle_window"] = max(1, WINDOW_BYTES // example_bytes)
            window = self.shuffle_window or values["shuffle_window"]
            values["shuffle_block"] = max(1, min(BLOCK_BYTES // example_bytes, window // classes))
        return self.replace(**{name: value for name, value in values.items() if _open(name, getattr(self, name))})

    def fitted(self, classes: int) -> Self:
        """The same with the usual P_K shortened for few classes, where neither P_K nor ks were given.

        With ks of your own, P_K changes only if it is too long.
        """
        if self.gives_p_k or (self.ks and len(self.p_k) <= classes):
            return self
        # Other ks are refused in the end, and may be so large that there is no room for their P_K.
        within = tuple(k for k in self.ks if k < classes)
        return self.replace(p_k=even_p_k(within or usual_ks(classes)))

    @property
    def gives_p_k(self) -> bool:
        """Whether P_K is another than the usual one."""
        usual = Setting()
        return (self.p_k, self.p_k_end, self.p_k_file) != (usual.p_k, usual.p_k_end, usual.p_k_file)

    @property
    def table_options(self) -> Options:
        """How a table is read."""
        return Options(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Options)})

    @property
    def log_columns(self) -> Log | None:
        """Which columns of a log are what."""
        return None if self.user is None or self.item is None else Log(self.user, self.item, self.order)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], source: str = "the config") -> Self:
        """The config with these fields; the others have their defaults."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            near = nearest(unknown[0], sorted(known))
            hint = f"did you mean {' or '.join(near)}?" if near else f"the fields are {', '.join(sorted(known))}."
            raise LabError(f"{source} has the unknown field {unknown[0]!r}: {hint}")
        try:
            return cls(**fields)
        except LabError as error:
            raise LabError(f"{source}: {error}") from None

    def replace(self, **changes: Any) -> Self:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)

    def differences(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """The fields in which two configs differ, with both values."""
        return {name: (value, vars(other)[name]) for name, value in vars(self).items() if value != vars(other)[name]}


@dataclass(frozen=True)
class LossName:
    """Which loss."""

    loss: str = "error"
    """softmax; gce; error or error:OPERATOR; an operator (splitter, bitonic, odd_even, neuralsort, softsort, sinkhorn, lapsum,
    ksubset) for the cross-entropy with it; or smooth, hinge, truncated, softmax_at_k, for the one k = length of P_K"""


@dataclass(frozen=True)
class Seed:
    """Which of several runs."""

    seed: int = 0
    """initial weights, order of the examples, augmentation"""
    tested: bool = True
    """measure the test examples when the run ends; without it they stay unseen, as they do while `anyk compare` tunes"""


@dataclass(frozen=True)
class Config(Seed, LossName, Setting):
    """Everything that one training run depends on: a :class:`Setting`, the loss and the seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        loss = loss_names.find(self.loss)
        if loss.family in ("error", "gce") and self.label_smoothing > 0 and self.ce_weight == 0:
            raise LabError(
                "label_smoothing is that of the cross-entropy, but ce_weight is 0: give a larger one, or no smoothing."
            )


def usual_ks(classes: int) -> tuple[int, ...]:
    """The k that are wanted where nobody says which. Of few classes, the right one is nearly always among the first five: half
    of them say more.

    >>> usual_ks(100), usual_ks(8), usual_ks(3), usual_ks(2)
    ((1, 5), (1, 4), (1, 2), (1,))
    """
    return tuple(sorted({1, min(5, (classes + 1) // 2)}))


def even_p_k(ks: Collection[int]) -> tuple[float, ...]:
    """P_K with the same weight for each of these k.

    >>> even_p_k((1, 3))
    (0.5, 0.0, 0.5)
    """
    return tuple(1 / len(ks) if k in ks else 0.0 for k in range(1, max(ks) + 1))


#: what the zeros and "auto" of a setting stand for
BY_KIND: dict[str, dict[str, Any]] = {
    "embeddings": {
        **{"model": "linear", "hidden": 512, "dropout": 0.0, "augment": ()},
        **{"learning_rate": 1e-3, "schedule": "cosine", "batch_size": 500, "epochs": 20},
    },
    "images": {
        **{"model": "cnn", "hidden": 512, "dropout": 0.0, "augment": ()},
        **{"learning_rate": 2e-3, "schedule": "onecycle", "batch_size": 50, "epochs": 20},
    },
    "sequences": {
        **{"model": "context", "hidden": 96, "dropout": 0.2, "embedding": 48, "augment": ()},
        **{"learning_rate": 4e-3, "schedule": "cosine", "batch_size": 500, "epochs": 4},
    },
}

#: the same by the model of sequences
BY_MODEL: dict[str, dict[str, Any]] = {
    "context": {"context": 6, "layers": 1},
    "gru": {"context": 32, "layers": 1},
    "attention": {"context": 50, "layers": 2},
}


def _open(name: str, value: Any) -> bool:
    """Whether a field is left to the data. A dropout of 0 is not."""
    return value is None if name == "dropout" else value in (0, "auto", ("auto",))


#: what is read at once; larger blocks are read faster, and more of them make a better mixture
BLOCK_BYTES = 1 << 17
#: what is mixed at a time
WINDOW_BYTES = 1 << 28


_types = functools.lru_cache(typing.get_type_hints)
#: pixels on a side, and tokens before a target
LARGEST_IMAGE, LONGEST_CONTEXT = 8192, 10**6
_POSITIVE = (1e-30, 1e30)
#: the least and the largest value of a number, where that is not 0 to 1e30 or, of integers, 0 to 1e12
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("validation", "test"), (0.0, 0.9)),
    **dict.fromkeys(("ce_weight", "ce_weight_end", "q", "label_smoothing"), (0.0, 1.0)),
    "label_noise": (0.0, 0.99),
    **dict.fromkeys(("temperature", "temperature_end", "clip"), _POSITIVE),
    **dict.fromkeys(("seed", "split_seed", "noise_seed"), (0, 2**32 - 1)),
    "train_fraction": (1e-9, 1.0),
    "image_size": (0, LARGEST_IMAGE),
    "context": (0, LONGEST_CONTEXT),
    "dropout": (0.0, 0.99),
    "width": (1, 1e9),
    "layers": (0, 1000),
    "heads": (1, 1000),
    "m": (1, 1e12),
    "threads": (1, 4096),
}


def accept(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether a value is of a field's type, and the value in that type: JSON has lists for tuples and 1 for 1.0."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            accepted, converted = accept(value, option)
            if accepted:
                return True, converted
        return False, value
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind), value
    if typing.get_origin(kind) is tuple:
        items = (
            [accept(item, typing.get_args(kind)[0]) for item in value] if isinstance(value, (list, tuple)) else [(False, value)]
        )
        accepted = all(fits for fits, _ in items)
        return accepted, tuple(item for _, item in items) if accepted else value
    if kind is float and type(value) is int:
        try:
            return True, float(value)
        except OverflowError:
            return False, value
    # A NaN is of the type float and passes every comparison the wrong way round.
    return type(value) is kind and value == value, value


def describe(kind: Any) -> str:
    """What a value of a type is, in words."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return {int: "integers", float: "numbers", str: "texts"}.get(item) or f"some of {describe(item)}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path", type(None): "nothing"}
    return words[kind]
