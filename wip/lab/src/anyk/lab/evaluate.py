"""Evaluation: the metrics of a model on some examples."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import anyk
from anyk import prediction_sets

KS = (1, 5, 10, 20)
MACRO_KS = (1, 5)
"""of these, and of those that are judged, also the mean over the classes"""
GUESSES = 20
"""guesses that are kept of each test example"""
BATCH = 2048

Inputs = Callable[[Tensor], Tensor]
"""positions of examples -> what the model takes"""
Mask = Callable[[Tensor, Tensor], Tensor]
"""scores, positions -> scores with -inf for what is no guess"""


@dataclass(frozen=True)
class Evaluation:
    """What a model does with each of some examples, and the metrics that follow from it."""

    ranks: Tensor
    """(N,), int32: the rank of the target, 1 for the best, ties count against the model; behind all classes where training had
    no such class"""
    labels: Tensor
    """(N,): the target; below 0 where training had no such class"""
    guesses: Tensor
    """(N, g), int32: the first classes, best first"""
    cross_entropy: float
    """its mean over the targets that training had"""

    def metrics(self, ks: Iterable[int], judged: Iterable[int]) -> dict[str, float]:
        """Top-k accuracies, their mean over those that are judged, the mean reciprocal rank, NDCG, some accuracies as the mean
        over the classes of the examples ("macro"), and the cross-entropy."""
        ks, judged = sorted(set(ks)), tuple(judged)
        ranks = self.ranks.double().where(self.labels >= 0, math.inf)
        _, classes = self.labels.clamp(min=-1).unique(return_inverse=True)
        counts = torch.bincount(classes).double()
        found = {f"top{k}": float((ranks <= k).double().mean()) for k in ks}
        found["mean"] = sum(found[f"top{k}"] for k in judged) / len(judged)
        found["mrr"] = float((1 / ranks).mean())
        gains = (1 / torch.log2(1 + ranks)).where(ranks.isfinite(), 0.0)
        found |= {f"ndcg{k}": float(gains.where(ranks <= k, 0.0).mean()) for k in ks if k > 1}
        for k in sorted({*MACRO_KS, *judged} & set(ks)):
            hits = torch.bincount(classes, (ranks <= k).double(), minlength=len(counts))
            found[f"macro_top{k}"] = float((hits / counts).mean())
        return {**found, "cross_entropy": self.cross_entropy}


@torch.no_grad()
def evaluate(
    model: nn.Module, inputs: Inputs, labels: Tensor, positions: Tensor, mask: Mask, guesses: int = 0, amp: bool = False
) -> Evaluation:
    """Evaluate a model on the examples at some positions. A label below 0 is a miss: the model has no such class."""
    device = next(model.parameters()).device
    ranks, first, total, known_targets = [], [], 0.0, 0
    model.eval()
    for block in positions.split(BATCH):
        target = labels[block].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            scores = mask(model(inputs(block)), block)
        known = target >= 0
        places = anyk.target_ranks(scores, target.clamp(min=0)).where(known, scores.shape[1] + 1)
        ranks.append(places.int().cpu())
        first.append(scores.topk(guesses).indices.int().cpu())
        total += float(functional.cross_entropy(scores.float(), target.where(known, -100), reduction="sum"))
        known_targets += int(known.sum())
    model.train()
    mean = total / known_targets if known_targets else math.nan
    return Evaluation(torch.cat(ranks), labels[positions], torch.cat(first), mean)


@torch.no_grad()
def conformity(model: nn.Module, inputs: Inputs, labels: Tensor, positions: Tensor, mask: Mask) -> Tensor:
    """How well the targets at some positions go with the scores, as :class:`anyk.PredictionSets` has it; -inf for a class that
    training did not have."""
    found = []
    model.eval()
    for block in positions.split(BATCH):
        target = labels[block]
        scores = mask(model(inputs(block)).float(), block).cpu()
        found.append(prediction_sets.conformity(scores, target.clamp(min=0)).where(target >= 0, -torch.inf))
    model.train()
    return torch.cat(found)
