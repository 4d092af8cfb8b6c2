"""Many small models trained at once on the same batches: a linear layer, or one hidden layer or a thin one before it.

The models differ in their loss, temperature, rate, weight decay, smoothing and start. They share the examples, the random
weights that they start from and the order of the batches, so that one product of matrices serves them all. Each is trained as
a plain loop with torch.optim.AdamW would train it (tests/evidence/test_memorised.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import anyk

Q, SHARE = 0.7, 0.1  # of the bounded loss without a k
EVALUATED = (25, 50, 75, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1250, 1500, 1750, 2000)


@dataclass(frozen=True)
class Variant:
    """One model of a batch."""

    arm: str
    t: float = 1.0
    """temperature"""
    lr: float = 1e-3
    wd: float = 0.01
    smooth: float = 0.0
    start: float = 1.0
    """what the last layer's random start is multiplied by"""
    rate: float = 1.0
    """what the last layer's rate is multiplied by, and its weight decay divided by"""

    def to_json(self) -> dict[str, Any]:
        """Without what is as usual."""
        usual = Variant(self.arm)
        return {name: value for name, value in dataclasses.asdict(self).items() if name == "arm" or value != getattr(usual, name)}


P_K: dict[str, Any] = {"1": 1, "5": 5, "10": 10, "1+5": {1: 0.5, 5: 0.5}, "1-5": [0.2] * 5}
SOFTMAX = ("ce", "gce")  # computed here, in one go


@functools.cache
def loss_of(arm: str, t: float) -> torch.nn.Module:
    """``operator P_K``: net (the paper's), lap (LapSum), logistic (anyk's default swap), error (anyk's error loss, LapSum)."""
    name, _, p_k = arm.partition(" ")
    if name == "error":
        return anyk.TopKErrorLoss(P_K[p_k], anyk.LapSum(t), m=None, reduction="none")
    operators = {
        "net": lambda: anyk.SortingNetwork("splitter", t, "logistic_art", wires="given"),
        "lap": lambda: anyk.LapSum(t),
        "logistic": lambda: anyk.SortingNetwork("splitter", t),
    }
    top1 = "operator" if p_k == "1" else "separate"  # separate with k = 1 is cross-entropy
    return anyk.TopKCrossEntropyLoss(P_K[p_k], operators[name](), m=None, top1=top1, reduction="none")


def softmax_family_gradient(scores: Tensor, target: Tensor, t: Tensor, smooth: Tensor, share: Tensor) -> Tensor:
    """Of the mean over the batch of share CE + (1 - share)(1 - p^q)/q, of scores (H, B, C) / t; share = 1 is cross-entropy."""
    p = (scores / t).softmax(-1)
    index = target.expand(scores.shape[:-1])[..., None]
    weight = share + (1 - share) * p.gather(-1, index).pow(Q)
    aim = (smooth / scores.shape[-1]).expand_as(p).scatter_add(-1, index, (1 - smooth).expand(index.shape))
    return (p - aim) * weight / (t * scores.shape[-2])


class Gradient:
    """d loss / d scores for all models of a batch, (H, B, C)."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self.softmax = [place for place, one in enumerate(variants) if one.arm in SOFTMAX]
        own = [variants[place] for place in self.softmax]
        column = functools.partial(torch.tensor, dtype=torch.float32)
        self.t, self.smooth, self.share = (
            column(values)[:, None, None]
            for values in (
                [one.t for one in own],
                [one.smooth for one in own],
                [SHARE if one.arm == "gce" else 1.0 for one in own],
            )
        )
        self.others = [(place, loss_of(one.arm, one.t)) for place, one in enumerate(variants) if one.arm not in SOFTMAX]

    def __call__(self, scores: Tensor, target: Tensor) -> Tensor:
        found = torch.empty_like(scores)
        if self.softmax:
            found[self.softmax] = softmax_family_gradient(scores[self.softmax], target, self.t, self.smooth, self.share)
        for place, loss in self.others:
            own = scores[place].requires_grad_()
            found[place] = torch.autograd.grad(loss(own, target).mean(), own)[0]
        return found


class Models:
    """H models: (features ->) hidden -> classes. ``hidden`` is 0 for a linear layer; ``rectify`` puts a ReLU behind it."""

    def __init__(self, variants: Sequence[Variant], features: int, classes: int, hidden: int, rectify: bool, seed: int) -> None:
        self.variants, self.rectify = list(variants), rectify
        generator, count = torch.Generator().manual_seed(seed), len(variants)

        def layer(inputs: int, outputs: int) -> list[Tensor]:  # as torch starts nn.Linear
            bound = 1 / math.sqrt(inputs)
            sizes = ((outputs, inputs), (outputs,))
            drawn = [(2 * torch.rand(size, generator=generator) - 1) * bound for size in sizes]
            return [each.expand(count, *each.shape).clone() for each in drawn]

        self.weights = [*(layer(features, hidden) if hidden else ()), *layer(hidden or features, classes)]
        for place, one in enumerate(variants):
            for each in self.weights[-2:]:
                each[place] *= one.start
        self.gradients = [torch.zeros_like(each) for each in self.weights]
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for depth, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True)):
            for place, one in enumerate(variants):
                rate = one.rate if depth >= len(self.weights) - 2 else 1.0
                parameter = weight[place]
                parameter.grad = gradient[place]
                groups.setdefault((one.lr * rate, one.wd / rate), []).append(parameter)
        self.optimizer = torch.optim.AdamW([{"params": p, "lr": lr, "weight_decay": wd} for (lr, wd), p in groups.items()], fused=True)
        self.gradient = Gradient(variants)

    def hidden(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """(H, B, hidden)."""
        first, bias = weights[0], weights[1]
        made = x @ first.flatten(0, 1).T
        made = made.view(len(x), *bias.shape).transpose(0, 1) + bias[:, None]
        return made.relu_() if self.rectify else made

    def scores(self, x: Tensor, weights: Sequence[Tensor], hidden: Tensor | None = None) -> Tensor:
        """(H, B, C)."""
        last, bias = weights[-2], weights[-1]
        if len(weights) == 2:
            return ((x @ last.flatten(0, 1).T).view(len(x), *bias.shape) + bias).transpose(0, 1).contiguous()
        return torch.baddbmm(bias[:, None], self.hidden(x, weights) if hidden is None else hidden, last.transpose(1, 2))

    def step(self, x: Tensor, target: Tensor) -> None:
        deep = len(self.weights) == 4
        hidden = self.hidden(x, self.weights) if deep else None
        slope = self.gradient(self.scores(x, self.weights, hidden), target)
        last, bias = self.gradients[-2:]
        bias.copy_(slope.sum(1))
        if hidden is None:
            torch.mm(slope.transpose(0, 1).flatten(1).T, x, out=last.view(-1, x.shape[1]))
        else:
            torch.bmm(slope.transpose(1, 2), hidden, out=last)
            back = torch.bmm(slope, self.weights[-2])
            if self.rectify:
                back.mul_(hidden > 0)
            self.gradients[1].copy_(back.sum(1))
            torch.mm(back.transpose(0, 1).flatten(1).T, x, out=self.gradients[0].view(-1, x.shape[1]))
        self.optimizer.step()


def ranks(scores: Tensor, target: Tensor) -> Tensor:
    """How many classes score at least as much as the target, itself included: a tie counts against it. (H, B)."""
    own = scores.gather(-1, target.expand(scores.shape[:-1])[..., None])
    return (scores >= own).sum(-1)


@torch.no_grad()
def all_ranks(models: Models, weights: Sequence[Tensor], x: Tensor, target: Tensor) -> Tensor:
    found = [ranks(models.scores(xs, weights), ys) for xs, ys in zip(x.split(2000), target.split(2000), strict=True)]
    return torch.cat(found, 1)


@dataclass
class Outcome:
    """Of one model."""

    variant: Variant
    validation: dict[int, float]
    """by k, of the evaluation that is best by this metric"""
    step: dict[int, int]
    hits: dict[int, Tensor]
    """by k, on the test examples"""
    learned: float
    """accuracy on the training examples, at the end"""


def train(
    variants: Sequence[Variant],
    parts: dict[str, tuple[Tensor, Tensor]],
    *,
    classes: int,
    hidden: int = 0,
    rectify: bool = True,
    steps: int,
    batch: int = 100,
    seed: int,
    ks: Sequence[int] = (1, 5),
    decay: bool = False,
) -> list[Outcome]:
    """Train all of them; of each, and for each k, the test hits of the evaluation that is best on validation (of equal ones
    the last). ``decay``: the rate falls to 0 in a straight line."""
    x, y = parts["train"]
    models = Models(variants, x.shape[1], classes, hidden, rectify, seed)
    order = torch.Generator().manual_seed(1000 + seed)
    best = {k: [each.clone() for each in models.weights] for k in ks}
    top = {k: torch.full((len(variants),), -1.0) for k in ks}
    at = {k: torch.zeros(len(variants), dtype=torch.long) for k in ks}
    index = torch.empty(0, dtype=torch.long)
    batch = min(batch, len(x))
    for step in range(1, steps + 1):
        if len(index) < batch:
            index = torch.randperm(len(x), generator=order)
        chosen, index = index[:batch], index[batch:]
        if decay:
            for group in models.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - (step - 1) / steps)
        models.step(x[chosen], y[chosen])
        if step in EVALUATED or step == steps:
            found = all_ranks(models, models.weights, *parts["validation"])
            for k in ks:
                accuracy = (found <= k).float().mean(1)
                for place in (accuracy >= top[k]).nonzero()[:, 0].tolist():
                    top[k][place], at[k][place] = accuracy[place], step
                    for kept, weight in zip(best[k], models.weights, strict=True):
                        kept[place].copy_(weight[place])
    learned = (all_ranks(models, models.weights, x, y) == 1).float().mean(1)
    hits = {k: all_ranks(models, best[k], *parts["test"]) <= k for k in ks}
    return [
        Outcome(
            one,
            {k: float(top[k][place]) for k in ks},
            {k: int(at[k][place]) for k in ks},
            {k: hits[k][place] for k in ks},
            float(learned[place]),
        )
        for place, one in enumerate(variants)
    ]
