"""Evaluation: the metrics of a model on some examples."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import anyk
from anyk import candidates, metrics, prediction_sets
from anyk.lab.data import Split
from anyk.lab.data.tokens import SequenceSplit
from anyk.lab.run.batches import Reader, mask_seen
from anyk.lab.run.config import BY_KIND
from anyk.lab.run.processes import ALONE, ProcessGroup

KS = (1, 5, 10, 20)
#: of these, and of those that are judged, also the mean over the classes
MACRO_KS = (1, 5)
#: guesses that are kept of each test example
GUESSES = 20
#: the share of all that training gained on validation; a run is unfinished if its second half made more than this
LATE = 0.05
#: a learning rate above so many times the usual one is not too low
FAR = 10


@dataclass(frozen=True)
class Examined:
    """What a model does with each of some examples, and the metrics that follow from it."""

    ranks: Tensor
    """(N,), int32: the rank of the target, 1 for the best, as :func:`anyk.target_ranks` counts; behind all classes where the
    target is none of them"""
    labels: Tensor
    """(N,): the target; below 0 where it is none of the classes, because it was never seen in training"""
    guesses: Tensor
    """(N, g), int32: the first classes, best first; g = 0 where nobody asked"""
    cross_entropy: float
    """its mean over the targets that are classes"""

    def accuracies(self, ks: Iterable[int], judged: Iterable[int] = ()) -> dict[str, float]:
        """Top-k accuracies, the mean of those that are judged (by default of top-1 and top-5), the mean reciprocal rank, the
        NDCG of every k above 1, some accuracies as the mean over the classes of the examples ("macro"), and the cross-entropy.
        """
        ks, judged = list(ks), tuple(judged)
        # All targets that are no class are one more class, which no guess hits.
        classes = self.labels.clamp(min=-1) + 1
        ranks = self.ranks.double().where(self.labels >= 0, math.inf)
        ranked = metrics.Ranked(classes, ranks, torch.ones_like(classes, dtype=torch.bool), int(classes.max()) + 1)
        accuracies = {f"top{k}": float(ranked.accuracy(k, "micro")) for k in ks}
        counted = [accuracies[metric] for k in judged or (1, 5) if (metric := f"top{k}") in accuracies]
        return {
            **accuracies,
            "mrr": float(ranked.mean_reciprocal_rank("micro")),
            **{f"ndcg{k}": float(ranked.ndcg(k, "micro")) for k in ks if k > 1},
            **{f"macro_top{k}": float(ranked.accuracy(k, "macro")) for k in ks if k in (*MACRO_KS, *judged)},
            "mean": sum(counted) / len(counted),
            "cross_entropy": self.cross_entropy,
        }


@torch.no_grad()
def examine(
    model: nn.Module,
    examples: Split,
    index: Tensor,
    reader: Reader,
    guesses: int = 0,
    amp: bool = False,
    group: ProcessGroup = ALONE,
) -> Examined:
    """Evaluate a model on the examples at some positions. Each process has its part of them; all get the whole result.

    A label below 0 is a miss: the model has no such class.
    """
    nothing = torch.empty(0, guesses, dtype=torch.int32, device=reader.device)
    found = [(nothing.new_empty(0), nothing)]  # all that a rank without examples has
    cross_entropy = torch.zeros((), device=reader.device)
    model.eval()
    for block in reader.blocks(examples, group.shard(index)):
        target = examples.labels[block].to(reader.device)
        with torch.autocast(reader.device.type, torch.bfloat16, enabled=amp):
            scores = reader.mask(model(reader(examples, block)), examples, block)
        first = candidates.best(scores, guesses) if guesses else scores.new_empty(len(scores), 0)
        known = target >= 0
        places = torch.where(known, anyk.target_ranks(scores, target.clamp(min=0)), scores.shape[1] + 1)
        found.append((places.int(), first.int()))
        cross_entropy += functional.cross_entropy(scores.float(), target.where(known, -100), reduction="sum")
    model.train()
    own = [torch.cat(tensors).cpu() for tensors in zip(*found, strict=True)]
    every_rank, every_guess = (torch.cat(tensors) for tensors in zip(*group.all_gather(own), strict=True))
    labels = examples.labels[index]
    known_targets = int((labels >= 0).sum())
    mean = float(group.all_reduce(cross_entropy)) / known_targets if known_targets else math.nan
    return Examined(every_rank, labels, every_guess, mean)


@torch.no_grad()
def conformity(model: nn.Module, examples: Split, index: Tensor, reader: Reader, group: ProcessGroup = ALONE) -> Tensor:
    """How well the targets at some positions go with the scores: see :func:`anyk.prediction_sets.conformity`.

    As `anyk predict` computes them: in full precision, and where the config masks what was seen, a target that was is no guess.
    """
    found = [torch.empty(0, device=reader.device)]
    model.eval()
    for block in reader.blocks(examples, group.shard(index)):
        target = examples.labels[block]
        scores = model(reader(examples, block)).float()
        if reader.mask_seen and isinstance(examples, SequenceSplit):
            scores = mask_seen(scores, examples, examples.places[block], torch.full_like(target, -1))
        known = (target >= 0).to(reader.device)
        found.append(prediction_sets.conformity(scores, target.clamp(min=0).to(reader.device)).where(known, -torch.inf))
    model.train()
    return torch.cat(group.all_gather(torch.cat(found).cpu()))


def unfinished(result: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on a run that may need more training, or "": it ended near chance, or its second half still made much of what
    it gained.

    That is measured by the cross-entropy on validation: of few examples, the accuracies move in large steps or not at all. What
    was gained counts from the cross-entropy of chance, or from that of the first evaluation if that was worse.

    None of a run that lost patience: it did not improve any more.

    Args:
        result: the content of its ``result.json``.
        evaluations: the lines of its ``metrics.jsonl``.
    """
    config, data = result["config"], result["data"]
    if result["epochs"] < config["epochs"]:
        return ""
    chance = 1 / data["classes"]
    far = config["learning_rate"] > FAR * BY_KIND[data["kind"]]["learning_rate"]
    advice = f"raise --epochs or {'lower ' if far else ''}--learning-rate."
    # Of thousands of items, a tenth is more than anyone guesses right; ten times chance is no chance.
    if result["validation"]["top1"] - chance < min(0.1 * (1 - chance), 9 * chance):
        return f"It was still near chance when it ended: {advice}"
    losses = [line["validation"]["cross_entropy"] for line in evaluations]
    if len(losses) < 2:
        return ""
    half, end = min(losses[: (len(losses) + 1) // 2]), min(losses)
    gained = max(losses[0], -math.log(chance)) - end
    return f"It was still improving when it ended: {advice}" if half - end > LATE * gained else ""
