"""Configurations as plain data: of one run, and of a comparison.

The same fields are the options of the commands, the keywords of :func:`anyk.lab.compare` and the `config.json` of a run
folder. A text below a field is its help; the range of a number stands in its metadata.
"""

import dataclasses
import re
import reprlib
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from anyk.lab import files
from anyk.lab.errors import LabError
from anyk.lab.options import accept, describe, nearest

Metric = Literal["top1", "top5", "top10", "mean", "mrr", "ndcg10", "macro_top1", "macro_top5"]
BASELINE = "softmax"
"""what the other losses are measured against"""
BOUNDED = "gce"
"""the control of the error losses: bounded as they are, but without k"""
_SHARE, _SEED = {"range": (0.0, 0.9)}, {"range": (0, 2**32 - 1)}
_UNIT, _POSITIVE = {"range": (0.0, 1.0)}, {"range": (1e-30, 1e30)}


@dataclass(frozen=True)
class Fields:
    """Checks the types and ranges of a subclass's fields, and makes JSON of them."""

    def __post_init__(self) -> None:
        kinds = _types(type(self))
        for each in dataclasses.fields(self):
            name, value = each.name, getattr(self, each.name)
            accepted, value = accept(value, kinds[name])
            if not accepted:
                raise LabError(f"{name} should be {describe(kinds[name])}, but is {value!r}.")
            object.__setattr__(self, name, value)
            if type(value) in (int, float):
                low, high = each.metadata.get("range", (0, 1e12 if type(value) is int else 1e30))
                if not low <= value <= high:
                    raise LabError(f"{name} should be between {low:g} and {high:g}, but is {reprlib.repr(value)}.")

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], source: str = "the config") -> Self:
        """What has these fields; the others have their defaults."""
        known = [each.name for each in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            near = nearest(unknown[0], known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the fields are {', '.join(known)}."
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


@lru_cache(maxsize=32)
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@dataclass(frozen=True)
class DataFields(Fields):
    """What to learn from."""

    data: str = "glyphs"
    """completion, glyphs, glyphs:CLASSES, cifar100, cifar100:PATH, sequences:FILE, a folder of images, a folder of embeddings, a
    table or an array file"""
    label_column: str | None = None
    """tables: the column with the label, by default the last one; sequences:LOG.csv: the column with the item"""
    group_column: str | None = None
    """tables: the column that says which rows belong together (patient, user, car): all rows of a group are for training, for
    validation or for the test; sequences:LOG.csv: the column with the user"""
    time_column: str | None = None
    """tables: the column with the time of a row: the newest rows are the test; sequences:LOG.csv: what orders a user's items"""
    drop: tuple[str, ...] = ()
    """tables: columns to leave out"""
    categories: tuple[str, ...] = ()
    """tables: columns of numbers that are categories"""
    validation: float = field(default=0.1, metadata=_SHARE)
    """share of the training examples that is kept for validation"""
    test: float = field(default=0.2, metadata=_SHARE)
    """share that is kept for the test, where the data have no test set"""
    split_seed: int = field(default=0, metadata=_SEED)
    """seed of these splits"""
    image_size: int = field(default=0, metadata={"range": (0, 8192)})
    """height and width that images are resized to; 0: by the model"""
    label_noise: float | str = field(default=0.0, metadata={"range": (0.0, 0.99)})
    """wrong labels for training and validation, to see what they cost: a share, or a file with a confusion matrix (.npy, .csv; row
    c: what people said for class c)"""
    mask_seen: bool = False
    """sequences: do not guess what the sequence already contains"""


@dataclass(frozen=True)
class ModelFields(Fields):
    """Which model to train."""

    model: str = "auto"
    """linear, mlp; cnn, resnet18; context, gru for sequences; module:function, a function of yours that is called with the shape of
    one example and the number of classes; timm:NAME or timm:NAME:pretrained; auto: by the data"""
    hidden: int = 0
    """width of the hidden layer; 0: 512, or 96 on sequences"""
    dropout: float | None = field(default=None, metadata={"range": (0.0, 0.99)})
    """dropout before the last layer; none: 0, or 0.2 on sequences"""
    start: Literal["auto", "zero", "torch"] = "auto"
    """the weights of the last layer at the start: zero, or as torch draws them; auto: zero for linear, torch for all others"""


@dataclass(frozen=True)
class LossFields(Fields):
    """What to train for."""

    ks: tuple[int, ...] = ()
    """the k that you will show to people; by default 1 and 5, with fewer than 9 classes 1 and half of them"""
    p_k: tuple[float, ...] = ()
    """P_K, the weights of top-1, top-2, ...; by default even over --ks"""
    temperature: float = field(default=1.0, metadata=_POSITIVE)
    """of an operator: how soft the ranking is; of softmax and gce: what the scores are divided by"""
    m: int | Literal["auto"] | None = "auto"
    """rank only the m best scores of a row; auto: 64, or four times the k of P_K if that is more; none: all"""
    top1: Literal["separate", "mixed", "operator"] = "separate"
    """the paper's losses, the top-1 part: softmax cross-entropy as a term of its own, mixed into the logarithm, or none"""
    swap: str = "logistic"
    """networks: the soft comparator, such as logistic_art"""
    wires: Literal["target", "given"] = "target"
    """networks: where the classes start"""
    ce_weight: float = field(default=0.2, metadata=_UNIT)
    """error and gce: the share of softmax cross-entropy"""
    q: float = field(default=1.0, metadata=_UNIT)
    """error and gce: the exponent; 1 is the expected error, 0 the limit, a logarithm"""
    label_smoothing: float = field(default=0.0, metadata=_UNIT)
    """as in torch.nn.CrossEntropyLoss; of other losses, in their cross-entropy alone"""


@dataclass(frozen=True)
class TrainingFields(Fields):
    """How to train."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    """sgd has momentum 0.9"""
    learning_rate: float = 0.0
    """the largest learning rate of a run; 0: by the kind of data"""
    schedule: Literal["auto", "constant", "cosine", "onecycle"] = "auto"
    """the learning rate over a run; auto: by the kind of data"""
    weight_decay: float = 0.0
    """as the optimizer defines it"""
    batch_size: int = 0
    """examples in a step; 0: by the kind of data"""
    epochs: int = 0
    """passes over the training examples; 0: by the kind of data"""
    select: Metric | Literal["each", "last"] = "mean"
    """the evaluation that counts: the best on validation by this metric (mean: of --ks); each: each metric has its own, as in the
    paper; last: the last"""
    augment: tuple[Literal["crop", "flip", "affine"], ...] = ()
    """images: crop (pad by an eighth and crop), flip (left-right), affine (turn, scale, shift)"""
    amp: bool = False
    """bfloat16 autocast"""


@dataclass(frozen=True)
class Setting(TrainingFields, LossFields, ModelFields):
    """What the runs of a comparison share. Zeros, "auto" and empty tuples leave a field to the data: see :meth:`resolved`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(k < 1 for k in self.ks):
            raise LabError(f"ks should be at least 1, but is {list(self.ks)}.")
        if self.p_k and (min(self.p_k) < 0 or abs(sum(self.p_k) - 1) > 1e-4):
            raise LabError(f"p_k should be weights of at least 0 that sum to 1, but is {list(self.p_k)}.")

    def resolved(self, kind: str, examples: int, classes: int) -> Self:
        """The same with every field that is left to the data filled in.

        A batch is at most a twentieth of the examples: an epoch of one step trains nothing. Of one example it would be too
        small for batch normalisation.

        Args:
            kind: features, images or sequences.
            examples: how many there are to train with.
            classes: of how many classes.
        """
        usual = {**BY_KIND[kind], "batch_size": max(4, min(BY_KIND[kind]["batch_size"], examples // 20))}
        own = {name: value for name, value in usual.items() if getattr(self, name) in (0, "auto", None)}
        if self.dropout == 0:
            own.pop("dropout", None)
        ks, p_k = self.ks, self.p_k
        if not ks:
            ks = tuple(k for k, weight in enumerate(p_k, start=1) if weight > 0 and k < classes) or usual_ks(classes)
        found = self.replace(**own, ks=ks, p_k=p_k or even_p_k(ks))
        if found.start == "auto":
            found = found.replace(start="zero" if found.model == "linear" else "torch")
        return found


@dataclass(frozen=True)
class RunConfig(Setting):
    """Everything that the result of one training run depends on, beside the prepared data."""

    loss: str = "error"
    """softmax; gce; error or error:OPERATOR; an operator (splitter, bitonic, odd_even, neuralsort, softsort, sinkhorn, lapsum,
    ksubset) for the paper's loss with it; or smooth, hinge, truncated, softmax_at_k, for the one k = length of P_K"""
    seed: int = field(default=0, metadata=_SEED)
    """initial weights, order of the examples, augmentation"""
    split: int = 0
    """0: the validation examples of the prepared set; 1, 2, ...: drawn anew from training and validation together"""
    length: float = field(default=1.0, metadata={"range": (1e-6, 1e6)})
    """the part of the epochs that is trained, with the whole schedule"""
    measure: tuple[int, ...] = ()
    """further k to measure, beside 1, 5, 10, 20, --ks and those that P_K trains for"""
    tested: bool = True
    """measure the test examples when the run ends; without it they stay unseen, as they do while a comparison tunes"""

    def identity(self) -> dict[str, Any]:
        """What a run is found again by: the fields that differ from their defaults, so that a new field renames no folder."""
        usual = type(self)()
        return {name: value for name, value in self.to_json().items() if value != usual.to_json()[name]}


@dataclass(frozen=True)
class ComparisonFields(Fields):
    """What to compare, and how long that may take."""

    losses: tuple[str, ...] = (BASELINE, BOUNDED, "error", "splitter")
    """what to compare; softmax is always included, and gce if there are error losses"""
    effort: Literal["quick", "normal", "thorough"] = "normal"
    """how thoroughly to tune"""
    seeds: int | None = field(default=None, metadata={"range": (1, 1000)})
    """seeds to train each tuned loss with; none: by the effort"""
    time: str | float | None = None
    """time limit of the whole comparison, such as 90s, 10m or 2h, shared out between the losses; by default there is none"""
    jobs: int = 0
    """runs at a time; 0: one for each GPU, or on the CPU one for each core"""
    threads: int = 0
    """CPU threads of all runs together; 0: one for each core; another number for each run may change the last digits"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps"""
    engine: Literal["local", "ray"] = "local"
    """where to run: in processes of this machine, or on a Ray cluster"""
    address: str | None = None
    """ray: HOST:PORT of the cluster; by default RAY_ADDRESS, or a Ray on this machine, started for the command"""
    out: str | None = None
    """folder for the results; by default anyk-runs/compare-DATA"""
    with_paths: bool = False
    """write the command line and the names of folders into the report"""
    quiet: bool = False
    """show no progress"""


@dataclass(frozen=True)
class ComparisonConfig(ComparisonFields, Setting, DataFields):
    """A comparison: the data, what its runs have in common, which is where the tuning starts, and the fields above."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and not self.seconds > 0:
            raise LabError(f"time should be above 0 seconds, but is {self.seconds:g}.")
        if self.select == "each":
            raise LabError(
                "select each has several models for each run, and a comparison needs one: choose another, such as mean."
            )
        losses = tuple(dict.fromkeys((BASELINE, *self.losses)))
        if len(losses) == 1:
            raise LabError(
                f"losses should name something to compare with {BASELINE}, such as splitter, but {BASELINE} is alone."
            )
        if any(loss.partition(":")[0] == "error" for loss in losses) and BOUNDED not in losses:
            losses = (BASELINE, BOUNDED, *losses[1:])
        object.__setattr__(self, "losses", losses)

    @property
    def seconds(self) -> float | None:
        """The time that the whole may take."""
        return seconds_of(self.time) if isinstance(self.time, str) else self.time

    @property
    def folder(self) -> Path:
        """Where the outcome goes."""
        return Path(self.out) if self.out is not None else Path("anyk-runs") / f"compare-{files.slug(self.data)}"

    def run_config(self, loss: str, **changes: Any) -> RunConfig:
        """One run with a loss, before anything is tuned."""
        shared = {each.name: getattr(self, each.name) for each in dataclasses.fields(Setting)}
        return RunConfig(**{**shared, "loss": loss, **changes})

    def data_fields(self) -> DataFields:
        """The part that says what to learn from."""
        return DataFields(**{each.name: getattr(self, each.name) for each in dataclasses.fields(DataFields)})


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


def seconds_of(word: str) -> float:
    """A time such as 90s, 10m or 2h in seconds.

    >>> seconds_of("10m"), seconds_of("1.5h"), seconds_of("45")
    (600.0, 5400.0, 45.0)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|m|min|h)?", word.strip().lower())
    if match is None:
        raise LabError(f"time should be a number of seconds, minutes or hours such as 90s, 10m or 2h, but is {word!r}.")
    return float(match[1]) * {"h": 3600, "m": 60, "min": 60}.get(match[2] or "s", 1)


BY_KIND: dict[str, dict[str, Any]] = {
    "features": {
        **{"model": "linear", "hidden": 512, "dropout": 0.0},
        **{"learning_rate": 1e-3, "schedule": "cosine", "batch_size": 500, "epochs": 20},
    },
    "images": {
        **{"model": "cnn", "hidden": 512, "dropout": 0.0},
        **{"learning_rate": 2e-3, "schedule": "onecycle", "batch_size": 50, "epochs": 20},
    },
    "sequences": {
        **{"model": "context", "hidden": 96, "dropout": 0.2},
        **{"learning_rate": 4e-3, "schedule": "cosine", "batch_size": 500, "epochs": 4},
    },
}
"""what the zeros and "auto" of a setting stand for"""
