"""The loss of a config: which class of the core, with which arguments, and how they change over a run."""

import csv
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anyk
from anyk import p_k as p_ks
from anyk.lab import files
from anyk.lab.data.sets import ONE_CLASS
from anyk.lab.errors import LabError
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.sequence_models import SequenceModel
from anyk.losses import TopKLoss

#: of more classes than these, the scores are made and used in pieces
MOST_SCORES = 20_000


def criterion(config: Config, classes: int) -> nn.Module:
    """The loss of a config for so many classes."""
    if classes < 2:
        raise LabError(ONE_CLASS)
    loss = loss_names.find(config.loss)
    if loss.family == "softmax":
        settings = loss.settings(config)
        # Where some classes are no guess, torch's own would smooth towards their scores of minus infinity.
        return anyk.TopKErrorLoss([1.0], ce_weight=1.0, **settings) if config.mask_seen else loss.make(**settings)
    if loss.family == "gce":
        return anyk.TopKErrorLoss([1.0], anyk.KSubset(1.0), m=None, **loss.settings(config))
    p_k = read_p_k(Path(config.p_k_file), classes) if config.p_k_file else torch.tensor(config.p_k)
    if config.p_k_end is None:
        p_k = p_k[..., : p_ks.read(p_k).positive()[-1]]
    k = p_k.shape[-1]
    m = min(config.m, classes) if isinstance(config.m, int) else config.m
    if k > classes or (isinstance(m, int) and k > m):
        if not isinstance(m, int) or m == classes:
            shorter = ".5 .5" if classes > 2 else "1"
            raise LabError(
                f"P_K reaches to k = {k}, but there are only {classes} classes: give a shorter --p-k, such as {shorter}."
            )
        raise LabError(f"P_K reaches to k = {k}, but only m = {config.m} are ranked: give a larger --m or a shorter --p-k.")
    if loss.family == "one k":
        return loss.make(k=k, **loss.settings(config))
    return loss.make(p_k, loss.operator_class(**loss.operator_settings(config)), m=m, **loss.settings(config))


def head(loss: nn.Module, model: nn.Module, config: Config) -> anyk.LinearHead | None:
    """The loss and the last layer of a model of sequences in one, where the classes are so many that their scores should not be
    stored; None: the model makes the scores."""
    if not isinstance(model, SequenceModel) or model.output.out_features <= MOST_SCORES or config.mask_seen:
        return None
    if isinstance(loss, nn.CrossEntropyLoss):
        loss = anyk.TopKErrorLoss([1.0], ce_weight=1.0, label_smoothing=loss.label_smoothing)
    if not isinstance(loss, TopKLoss):
        return None
    layer: Any = model.output
    with torch.device("meta"):
        made = anyk.LinearHead(layer.in_features, layer.out_features, loss)
    made.linear = layer
    return made


#: the fields of a config that a loss may take
SETTINGS = (
    *("p_k", "p_k_end", "p_k_file", "m", "temperature", "temperature_end", "top1", "softmax_over"),
    *("ce_weight", "ce_weight_end", "q", "swap", "wires", "anchors", "label_smoothing"),
)


def settings_of(name: str) -> frozenset[str]:
    """Those of :data:`SETTINGS` that the loss of this name takes: runs that differ in the others alone are the same run.

    >>> sorted(settings_of("softmax")), sorted(settings_of("hinge"))
    (['label_smoothing'], ['label_smoothing', 'p_k', 'p_k_file'])
    """
    loss, config = loss_names.find(name), Config()
    taken = set(loss.settings(config))
    if loss.family in ("softmax", "gce"):
        taken &= {"label_smoothing", "ce_weight", "q"}
    else:
        taken |= {"p_k", "p_k_file"}
    if loss.operator is not None:
        taken |= {*loss.operator_settings(config), "m", "p_k_end"} - {"kind"}
        taken |= {"temperature_end"} & {f"{each}_end" for each in taken}
    return frozenset(taken | ({"ce_weight_end"} if "ce_weight" in taken else set()))


def trained_ks(loss: nn.Module, config: Config) -> list[int]:
    """The k that a config's loss trains for, at any time of the run."""
    if not isinstance(loss, TopKLoss):
        return [int(getattr(loss, "k", 1))]
    assert loss.spec.p_k is not None
    trained = set(loss.spec.p_k.positive())
    if config.p_k_end is not None and loss_names.find(config.loss).operator is not None:
        trained |= set(p_ks.read(list(config.p_k_end)).positive())
    return sorted(trained)


def reschedule(loss: nn.Module, config: Config, progress: float) -> None:
    """Move the temperature, P_K and the ce_weight to where they stand after this fraction of the run."""
    if (config.temperature_end, config.p_k_end, config.ce_weight_end) == (None, None, None) or not isinstance(loss, TopKLoss):
        return
    moves = loss_names.find(config.loss).operator is not None  # gce has one k, and no temperature to move
    if config.temperature_end is not None and moves:
        start = config.temperature
        loss.operator.temperature = start * (config.temperature_end / start) ** progress
    if config.p_k_end is not None and moves:
        loss.p_k = torch.lerp(torch.tensor(config.p_k), torch.tensor(config.p_k_end), progress)
    # Softmax may be this class too, with ce_weight 1, where some classes are no guess.
    if config.ce_weight_end is not None and isinstance(loss, anyk.TopKErrorLoss) and config.loss != "softmax":
        loss.ce_weight = config.ce_weight + (config.ce_weight_end - config.ce_weight) * progress


def read_p_k(path: Path, classes: int) -> torch.Tensor:
    """One P_K for each class, from a JSON list of lists or from lines of a CSV file without a header."""
    if not path.exists():
        raise LabError(f"p_k_file {path} does not exist: name a JSON or CSV file with one row of weights for each class.")
    try:
        text = path.read_text()
        rows = files.parsed(text) if path.suffix == ".json" else [row for row in csv.reader(text.splitlines()) if row]
        p_k = torch.tensor([[float(p) for p in row] for row in rows])
    except (OSError, ValueError, TypeError, OverflowError, csv.Error) as error:
        raise LabError(f"p_k_file {path} should hold one row of weights for each class, all of one length: {error}.") from None
    if p_k.ndim != 2 or len(p_k) != classes:
        raise LabError(f"p_k_file {path} has {len(p_k)} rows, but there are {classes} classes: write one row for each.")
    try:
        return p_ks.read(p_k, f"p_k_file {path}").values
    except ValueError as error:
        raise LabError(f"{error}.") from None
