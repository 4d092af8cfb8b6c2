"""Hypothesis generators of rows of scores that know the right answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import anyk
from anyk.registry import SWAPS

KINDS = ("splitter", "bitonic", "odd_even")
WIRES = ("target", "sorted", "given")


def operators(temperature: object = 1.0, wires: tuple[str, ...] = WIRES) -> list[anyk.Operator]:
    """Every operator, every kind of network, every swap (with one kind), every wire policy."""
    networks = [anyk.SortingNetwork(kind, temperature, "logistic", where) for kind in KINDS for where in wires]
    networks += [anyk.SortingNetwork("splitter", temperature, swap, wires[0]) for swap in SWAPS if swap != "logistic"]
    networks += [anyk.SortingNetwork("bitonic", temperature, swap, wires[-1]) for swap in SWAPS if swap != "logistic"]
    return [
        anyk.NeuralSort(temperature),
        anyk.SoftSort(temperature),
        anyk.SoftSort(temperature, power=2.0),
        anyk.SinkhornSort(temperature),
        anyk.SinkhornSort(temperature, anchors="topk"),
        anyk.LapSum(temperature),
        anyk.KSubset(temperature),
        *networks,
    ]


def name(operator: object) -> str:
    return repr(operator).replace("temperature=", "")


def is_doubly_stochastic(operator: anyk.Operator) -> bool:
    return not isinstance(operator, (anyk.NeuralSort, anyk.SoftSort))


@dataclass(frozen=True)
class Row:
    """Scores with a known order: ``order`` lists the classes from the best to the worst."""

    scores: Tensor
    order: list[int]


@st.composite
def rows(draw: st.DrawFn, min_size: int = 2, max_size: int = 12, min_gap: float = 0.01, max_gap: float = 3.0) -> Row:
    """A row built from its sorted order: gaps first, then a shuffle of the classes."""
    n = draw(st.integers(min_size, max_size))
    gaps = draw(st.lists(st.floats(min_gap, max_gap), min_size=n, max_size=n))
    order = draw(st.permutations(range(n)))
    top = draw(st.floats(-5, 5))
    scores = torch.empty(n, dtype=torch.float64)
    for place, c in enumerate(order):
        top -= gaps[place]
        scores[c] = top
    return Row(scores, list(order))


@st.composite
def distributions(draw: st.DrawFn, max_k: int) -> list[float]:
    """P_K with some zeros; the last entry is positive."""
    k = draw(st.integers(1, max_k))
    raw = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 3.0]), min_size=k, max_size=k))
    raw[-1] = raw[-1] or 1.0
    return [p / sum(raw) for p in raw]


def batch(rows: int = 6, n: int = 9, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores and targets, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, n, dtype=dtype, generator=generator) * 1.5
    return scores, torch.randint(n, (rows,), generator=generator)
