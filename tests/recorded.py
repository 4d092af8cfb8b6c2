"""Losses and gradients of every loss at fixed scores, in float64. `python tests/recorded.py` writes recorded.json again.

A change of the code that is meant to change no number is held against the file by test_recorded.py. The file is written again
only for a change that is meant to change numbers, and the commit says which and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anyk

FILE = Path(__file__).with_name("recorded.json")
P_K = [0.4, 0.0, 0.1, 0.5]


def data() -> dict[str, Tensor]:
    """Made of nothing but sines: no generator may change."""
    place = torch.arange(40, dtype=torch.float64).reshape(4, 10)
    scores = 3 * torch.sin(12.9 * place + 0.5) + torch.cos(4.1 * place)
    probabilities = torch.sin(7.7 * place + 1).abs()
    return {
        "scores": scores,
        "padded": scores.masked_fill(torch.arange(10) > 7, -torch.inf),
        "target": torch.tensor([3, 0, 7, 4]),
        "ignored": torch.tensor([3, -100, 7, 4]),
        "probabilities": probabilities / probabilities.sum(-1, keepdim=True),
        "weight": 0.5 + torch.sin(place[0] + 2).abs(),
        "by_class": torch.softmax(torch.sin(place.reshape(10, 4) * 3.3), -1),
        "by_example": torch.softmax(torch.cos(place[:, :3] * 2.1), -1),
    }


def operators() -> dict[str, anyk.Operator]:
    network = anyk.SortingNetwork
    return {
        "neuralsort": anyk.NeuralSort(2.0),
        "softsort": anyk.SoftSort(0.8),
        "softsort squared": anyk.SoftSort(1.5, power=2.0),
        "sinkhorn": anyk.SinkhornSort(1.3),
        "sinkhorn topk": anyk.SinkhornSort(1.3, anchors="topk"),
        "lapsum": anyk.LapSum(0.7),
        "ksubset": anyk.KSubset(1.2),
        **{f"{kind} {wires}": network(kind, 1.1, wires=wires)
           for kind in ("splitter", "bitonic", "odd_even") for wires in ("target", "sorted", "given")},
        **{f"splitter {swap}": network("splitter", 0.9, swap)
           for swap in ("logistic_art", "cauchy", "gaussian", "reciprocal", "optimal")},
    }  # fmt: skip


def losses() -> Iterator[tuple[str, Callable[[Tensor], Tensor], str]]:
    """Name, the loss as a function of the scores, and which scores."""
    d = data()
    settings: dict[str, dict[str, Any]] = {
        "": {},
        "ignored, weighted": {"target": d["ignored"], "weight": d["weight"]},
        "smoothed": {"target": d["ignored"], "label_smoothing": 0.1, "weight": d["weight"]},
        "probabilities": {"target": d["probabilities"]},
        "by class": {"p_k": d["by_class"]},
        "by example": {"example_p_k": d["by_example"]},
    }
    families = {
        **{f"cross-entropy {top1}": (anyk.topk_cross_entropy, {"top1": top1}) for top1 in ("separate", "mixed", "operator")},
        "cross-entropy candidates": (anyk.topk_cross_entropy, {"softmax_over": "candidates"}),
        "error": (anyk.topk_error, {}),
        "error q .5 ce_weight .6": (anyk.topk_error, {"q": 0.5, "ce_weight": 0.6}),
    }
    for name, operator in operators().items():
        for family, (loss, own) in families.items():
            for words, more in settings.items() if name in ("lapsum", "splitter target") else [("", {})]:
                given = {"target": d["target"], "p_k": P_K, "operator": operator, "m": 6, "reduction": "none", **own, **more}
                yield f"{name} {family} {words}".strip(), lambda s, loss=loss, given=given: loss(s, **given), "scores"
        whole = {"target": d["target"], "p_k": P_K, "operator": operator, "m": None, "reduction": "none"}
        yield f"{name} padded", lambda s, given=whole: anyk.topk_cross_entropy(s, **given), "padded"
    for criterion in (
        anyk.SmoothTopKLoss(3), anyk.TopKHingeLoss(3), anyk.TopKHingeLoss(3, "beta"), anyk.TruncatedTopKEntropyLoss(3),
        anyk.SoftmaxAtKLoss(3, 2.0),
    ):  # fmt: skip
        criterion.reduction = "none"
        yield repr(criterion), lambda s, criterion=criterion: criterion(s, d["target"]), "scores"


def measured() -> dict[str, list[list[float]]]:
    """For each loss: the losses of the rows, and the gradient of their weighted sum."""
    found = {}
    for name, loss, which in losses():
        scores = data()[which].requires_grad_()
        values = loss(scores)
        (gradient,) = torch.autograd.grad((values * torch.linspace(1, 2, len(values), dtype=torch.float64)).sum(), scores)
        found[name] = [values.tolist(), *gradient.tolist()]
    return found


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps([[float(f'{v:.12g}') for v in row] for row in rows])}"
             for name, rows in measured().items())  # fmt: skip
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
