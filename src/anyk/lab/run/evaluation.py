"""What a model is worth: its accuracies, and the guesses of a trained one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import anyk
from anyk.lab.data import Split, load, split
from anyk.lab.errors import LabError
from anyk.lab.run import models
from anyk.lab.run.folder import Run
from anyk.lab.run.processes import ALONE, Ranks
from anyk.lab.run.reading import Reader, find_device, resolved

KS = (1, 5, 10, 20)


@torch.no_grad()
def accuracies(
    model: nn.Module,
    examples: Split,
    index: Tensor,
    reader: Reader,
    classes: int,
    ks: Sequence[int] = KS,
    amp: bool = False,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Top-k accuracies, their mean over top-1 and top-5, and the cross-entropy, in evaluation mode.

    Each rank counts in its part of the examples; the counts are added up."""
    ks = [k for k in ks if k < classes] or [1]
    hits = torch.zeros(len(ks), dtype=torch.int64, device=reader.device)
    cross_entropy = torch.zeros((), device=reader.device)
    model.eval()
    for block in reader.blocks(examples, ranks.shard(index)):
        target = examples.labels[block].to(reader.device)
        with torch.autocast(reader.device.type, torch.bfloat16, enabled=amp):
            scores = model(reader(examples, block))
        hits += torch.stack(list(anyk.topk_hits(scores, target, ks).values()))
        cross_entropy += functional.cross_entropy(scores.float(), target, reduction="sum")
    model.train()
    hits, cross_entropy = ranks.all_reduce(hits), ranks.all_reduce(cross_entropy)
    measured = {f"top{k}": count / len(index) for k, count in zip(ks, hits.tolist(), strict=True)}
    counted = [measured[metric] for metric in ("top1", "top5") if metric in measured]
    return {**measured, "mean": sum(counted) / len(counted), "cross_entropy": float(cross_entropy) / len(index)}


class Predictor:
    """The model of a run that has ended, with its data."""

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        run = Run(folder)
        weights = run.load_tensors("model.safetensors")
        if weights is None:
            raise LabError(f"{folder} has no model.safetensors: its run has not ended.")
        recipe = run.recipe()
        self.dataset = load(recipe.data)
        recipe = resolved(recipe, self.dataset)
        self.parts = split(self.dataset, recipe.validation, recipe.test, recipe.split_seed)
        self.reader = Reader(self.dataset, find_device(device), recipe)
        self.model = models.build(recipe, self.dataset).to(device)
        self.model.load_state_dict(weights[0])
        self.model.eval()

    @torch.no_grad()
    def test_guesses(self, count: int) -> tuple[Tensor, Tensor]:
        """The first ``count`` classes of every test example, and their softmax probabilities: (N, count) each."""
        classes, probabilities = [], []
        for block in self.reader.blocks(self.parts.test, self.parts.test_index):
            best = self.model(self.reader(self.parts.test, block)).float().softmax(1).topk(count)
            classes.append(best.indices.cpu())
            probabilities.append(best.values.cpu())
        return torch.cat(classes), torch.cat(probabilities)


def unfinished(result: Mapping[str, Any]) -> str:
    """The sign, if any, that a run might have come further: near chance at its end, or the best evaluation in its last tenth.

    None of a run that lost patience: it did not improve any more.
    """
    recipe, epochs, chance = result["recipe"], result["epochs"], 1 / result["data"]["classes"]
    if epochs < recipe["epochs"]:
        return ""
    if result["validation"]["top1"] - chance < 0.1 * (1 - chance):
        return "near chance"
    if recipe["select"] != "last" and max(result["selected"].values()) > 0.9 * epochs:
        return "improving"
    return ""
