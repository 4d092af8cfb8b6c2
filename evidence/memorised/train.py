"""Many small models trained at once on the same batches, each as a plain loop with torch.optim.AdamW would train it: a linear
layer, with or without a hidden one before it. They share the examples, the random weights and the order of the batches."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anyk

Outcome = tuple[dict[str, Any], Any]  # a line of runs.jsonl, the test hits
Q, SHARE = 0.7, 0.1  # of the bounded loss without a k
EVALUATED = (25, 50, 75, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1250, 1500, 1750, 2000)
P_K: dict[str, Any] = {"1": 1, "5": 5, "10": 10, "1+5": {1: 0.5, 5: 0.5}, "1-5": [0.2] * 5}


@dataclass(frozen=True)
class Variant:
    """One model of many. ``start`` multiplies the last layer's random start; ``rate`` its rate, and divides its decay."""

    arm: str
    t: float = 1.0
    lr: float = 1e-3
    wd: float = 0.01
    smooth: float = 0.0
    start: float = 1.0
    rate: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}


@functools.cache
def loss_of(arm: str, t: float) -> torch.nn.Module:
    """``operator P_K``: net (the paper's), lap (LapSum), logistic (anyk's default swap), error (anyk's error loss, LapSum)."""
    name, _, p_k = arm.partition(" ")
    if name == "error":
        return anyk.TopKErrorLoss(P_K[p_k], anyk.LapSum(t), m=None, reduction="none")
    network = functools.partial(anyk.SortingNetwork, "splitter", t)
    operator = anyk.LapSum(t) if name == "lap" else network() if name == "logistic" else network("logistic_art", wires="given")
    top1 = "operator" if p_k == "1" else "separate"  # separate with k = 1 is cross-entropy
    return anyk.TopKCrossEntropyLoss(P_K[p_k], operator, m=None, top1=top1, reduction="none")


def softmax_family_gradient(scores: Tensor, target: Tensor, t: Tensor, smooth: Tensor, share: Tensor) -> Tensor:
    """Of the mean over the batch of share CE + (1 - share)(1 - p^q)/q, of scores (H, B, C) / t; share = 1 is cross-entropy."""
    p = (scores / t).softmax(-1)
    index = target.expand(scores.shape[:-1])[..., None]
    weight = share + (1 - share) * p.gather(-1, index).pow(Q)
    aim = (smooth / scores.shape[-1]).expand_as(p).scatter_add(-1, index, (1 - smooth).expand(index.shape))
    return (p - aim) * weight / (t * scores.shape[-2])


def gradient_of(variants: list[Variant]) -> Callable[[Tensor, Tensor], Tensor]:
    """d loss / d scores for all models, (H, B, C)."""
    softmax = [place for place, one in enumerate(variants) if one.arm in ("ce", "gce")]
    others = [(place, loss_of(one.arm, one.t)) for place, one in enumerate(variants) if place not in softmax]
    own = [variants[place] for place in softmax]
    columns = torch.tensor([(one.t, one.smooth, SHARE if one.arm == "gce" else 1.0) for one in own])

    def gradient(scores: Tensor, target: Tensor) -> Tensor:
        found = torch.empty_like(scores)
        if softmax:
            found[softmax] = softmax_family_gradient(scores[softmax], target, *columns.T[..., None, None])
        for place, loss in others:
            one = scores[place].requires_grad_()
            found[place] = torch.autograd.grad(loss(one, target).mean(), one)[0]
        return found

    return gradient


class Models:
    """H models: features -> (hidden ->) classes; ``rectify`` puts a ReLU behind the hidden layer."""

    def __init__(self, variants: list[Variant], features: int, classes: int, hidden: int, rectify: bool, seed: int) -> None:
        self.rectify, self.gradient = rectify, gradient_of(variants)
        generator, sizes = torch.Generator().manual_seed(seed), [features, *([hidden] if hidden else []), classes]
        self.weights = []
        for inputs, outputs in itertools.pairwise(sizes):  # as torch starts nn.Linear
            for shape in ((outputs, inputs), (outputs,)):
                drawn = (2 * torch.rand(shape, generator=generator) - 1) * (1 / math.sqrt(inputs))
                self.weights.append(drawn.expand(len(variants), *shape).clone())
        self.gradients = [torch.zeros_like(each) for each in self.weights]
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for depth, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True)):
            for one, parameter, slope in zip(variants, weight, gradient, strict=True):
                last = depth >= len(self.weights) - 2
                parameter *= one.start if last else 1.0
                parameter.grad, rate = slope, one.rate if last else 1.0
                groups.setdefault((one.lr * rate, one.wd / rate), []).append(parameter)
        every = [{"params": each, "lr": lr, "weight_decay": wd} for (lr, wd), each in groups.items()]
        self.optimizer = torch.optim.AdamW(every, fused=True)

    def scores(self, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """(H, B, C), and of the hidden layer (H, B, hidden)."""
        *first, last, bias = weights
        if not first:
            return ((x @ last.flatten(0, 1).T).view(len(x), *bias.shape) + bias).transpose(0, 1).contiguous(), None
        hidden = (x @ first[0].flatten(0, 1).T).view(len(x), *first[1].shape).transpose(0, 1) + first[1][:, None]
        hidden = hidden.relu_() if self.rectify else hidden
        return torch.baddbmm(bias[:, None], hidden, last.transpose(1, 2)), hidden

    def step(self, x: Tensor, target: Tensor) -> None:
        scores, hidden = self.scores(x, self.weights)
        slope = self.gradient(scores, target)
        if hidden is not None:
            torch.bmm(slope.transpose(1, 2), hidden, out=self.gradients[2])
            self.gradients[3].copy_(slope.sum(1))
            slope = torch.bmm(slope, self.weights[2])
            slope = slope.mul_(hidden > 0) if self.rectify else slope
        torch.mm(slope.transpose(0, 1).flatten(1).T, x, out=self.gradients[0].view(-1, x.shape[1]))
        self.gradients[1].copy_(slope.sum(1))
        self.optimizer.step()


def outcome(variant: Variant, best: dict[int, tuple[float, int]], hits: dict[int, Tensor], learned: float) -> Outcome:
    """A line of runs.jsonl and the test hits, by k: of the evaluation that is best by it on validation (accuracy, step)."""
    tested = np.stack([each.numpy() for each in hits.values()])
    val, test = ([round(float(each), 4) for each in one] for one in ([each for each, _ in best.values()], tested.mean(1)))
    steps = [step for _, step in best.values()]
    return {"v": variant.to_json(), "val": val, "test": test, "learned": round(learned, 4), "step": steps}, tested


def ranks(scores: Tensor, target: Tensor) -> Tensor:
    """How many classes score at least as much as the target, itself included: a tie counts against it. (H, B)."""
    return (scores >= scores.gather(-1, target.expand(scores.shape[:-1])[..., None])).sum(-1)


def train(
    variants: list[Variant], parts: dict[str, tuple[Tensor, Tensor]], *, classes: int, steps: int, seed: int,
    hidden: int = 0, rectify: bool = True, batch: int = 100, ks: tuple[int, ...] = (1, 5), decay: bool = False,
) -> list[Outcome]:  # fmt: skip
    """Train all of them; of each, and for each k, the test hits of the evaluation that is best on validation (of equal ones
    the last). ``decay``: the rate falls to 0 in a straight line."""
    x, y = parts["train"]
    models = Models(variants, x.shape[1], classes, hidden, rectify, seed)
    order, index = torch.Generator().manual_seed(1000 + seed), torch.empty(0, dtype=torch.long)
    kept = {k: [each.clone() for each in models.weights] for k in ks}
    best = [dict.fromkeys(ks, (-1.0, 0)) for _ in variants]
    batch = min(batch, len(x))

    def ranked(weights: list[Tensor], part: str) -> Tensor:
        blocks = zip(*(each.split(2000) for each in parts[part]), strict=True)
        return torch.cat([ranks(models.scores(xs, weights)[0], ys) for xs, ys in blocks], 1)

    for step in range(1, steps + 1):
        if len(index) < batch:
            index = torch.randperm(len(x), generator=order)
        chosen, index = index[:batch], index[batch:]
        if decay:
            for group in models.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - (step - 1) / steps)
        models.step(x[chosen], y[chosen])
        if step in EVALUATED or step == steps:
            found = ranked(models.weights, "validation")
            for k in ks:
                for place, accuracy in enumerate((found <= k).float().mean(1).tolist()):
                    if accuracy >= best[place][k][0]:
                        best[place][k] = accuracy, step
                        for each, weight in zip(kept[k], models.weights, strict=True):
                            each[place].copy_(weight[place])
    hits = {k: ranked(kept[k], "test") <= k for k in ks}
    learned = (ranked(models.weights, "train") == 1).float().mean(1).tolist()
    of_one = ({k: each[place] for k, each in hits.items()} for place in range(len(variants)))
    return [outcome(*each) for each in zip(variants, best, of_one, learned, strict=True)]
