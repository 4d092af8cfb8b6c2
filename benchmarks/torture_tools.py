"""Masks, ranks, sorts, quantiles, samples and selections of scores meant to break them; a part of ``torture.py``.

A case is one row of scores, one function of one operator, k, temperature and dtype. See :func:`broken` for what is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import anyk
from anyk.operators.base import has

N = 12
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TEMPERATURES = (1e-3, 0.1, 1.0, 30.0, 1e3)
OPERATORS: dict[str, Callable[[float], anyk.Operator]] = {
    "LapSum": anyk.LapSum,
    "Permutahedron": anyk.Permutahedron,
    "KSubset": anyk.KSubset,
    "SinkhornSort": anyk.SinkhornSort,
    "splitter": lambda t: anyk.SortingNetwork("splitter", t),
    "bitonic": lambda t: anyk.SortingNetwork("bitonic", t),
    "SoftSort": anyk.SoftSort,
    "NeuralSort": anyk.NeuralSort,
}
THRESHOLD = ("LapSum", "Permutahedron", "SinkhornSort", "KSubset")
"""operators whose mask is a continuous function, so that rounding moves it little"""
MASKS = ("mask", "hard", "exact", "gumbel")


def kinds(draw: torch.Generator, rows: int) -> Iterator[tuple[str, Tensor]]:
    """Scores (rows, N) in float64."""

    def normal() -> Tensor:
        return torch.randn(rows, N, generator=draw, dtype=torch.float64)

    def integers(high: int) -> Tensor:
        return torch.randint(high, (rows, N), generator=draw)

    yield "ordinary", normal()
    yield "spread", normal() * 10 ** (4 * torch.rand(rows, 1, generator=draw, dtype=torch.float64) - 2)
    yield "ties", integers(3).double()
    yield "all equal", normal()[:, :1].expand(-1, N)
    yield "zero", torch.zeros(rows, N, dtype=torch.float64)
    yield "gaps of 1e6", integers(4) * 1e6 + normal()
    yield "offset 1e6", 1e6 + 4 * normal()
    yield "offset -1e6", -1e6 + 4 * normal()
    place, size = integers(N)[:, :1], torch.rand(rows, 1, generator=draw, dtype=torch.float64)
    yield "outlier", normal().scatter(-1, place, 10 ** (6 * size))
    yield "outlier below", normal().scatter(-1, place, -(10 ** (6 * size)))
    yield "far outlier", normal().scatter(-1, place, (10 ** (20 * size)) * torch.where(size < 0.5, 1.0, -1.0))
    yield "tiny", normal() * 1e-30
    yield "-inf", normal().masked_fill(integers(3) == 0, -torch.inf)
    yield "-inf but one", normal().masked_fill(torch.arange(N) != 3, -torch.inf)
    yield "-inf all", torch.full((rows, N), -torch.inf, dtype=torch.float64)
    yield "NaN", normal().masked_fill(integers(20) == 0, torch.nan)


@dataclass(frozen=True)
class Call:
    function: str
    operator: str
    temperature: float
    k: float = 0

    def __str__(self) -> str:
        return f"{self.function} of {self.operator}, temperature {self.temperature:g}, k {self.k:g}"

    def __call__(self, scores: Tensor) -> Tensor:
        operator = OPERATORS[self.operator](self.temperature)
        generator = torch.Generator().manual_seed(7)
        match self.function:
            case "mask":
                return anyk.soft_topk(scores, self.k if self.k % 1 else int(self.k), operator)
            case "hard":
                return anyk.soft_topk(scores, int(self.k), operator, hard=True)
            case "ranks":
                return anyk.soft_rank(scores, operator)
            case "sort":
                return anyk.soft_sort(scores, operator)
            case "quantile":
                return anyk.soft_quantile(scores, self.k / N, operator)
            case "select":
                values = torch.linspace(-1, 1, N, dtype=scores.dtype)[:, None].expand(*scores.shape, 1)
                return anyk.select_topk(values, scores, int(self.k), operator)[0].squeeze(-1)
            case "exact":
                return anyk.sample_k_subset(scores, int(self.k), temperature=self.temperature, generator=generator)
        return anyk.sample_k_subset(
            scores,
            int(self.k),
            temperature=self.temperature,
            generator=generator,
            method="gumbel",
            operator=OPERATORS[self.operator](1.0),
        )


def calls() -> Iterator[Call]:
    for name, make in OPERATORS.items():
        kind = type(make(1.0))
        for temperature in TEMPERATURES:
            if has(kind, "mask"):
                real = (0.3, 2.5, N - 0.01) if kind.real_k else ()
                yield from (Call("mask", name, temperature, k) for k in (0, 1, 5, N - 1, N, *real))
                yield from (Call("hard", name, temperature, k) for k in (0, 1, 5, N))
                yield Call("gumbel", name, temperature, 4)
            for function in ("ranks", "sort"):
                if has(kind, function):
                    yield Call(function, name, temperature)
            if has(kind, "threshold"):
                yield from (Call("quantile", name, temperature, k) for k in (0, 1, 6, 2.7, N))
            if kind.has_probabilities:
                yield Call("select", name, temperature, 1)
            if name == "KSubset":
                yield from (Call("exact", name, temperature, k) for k in (0, 1, 5, N - 1, N))


def run(call: Call, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of a weighted sum of its finite entries."""
    scores = scores.clone().requires_grad_()
    result = call(scores)
    weight = torch.linspace(-1, 1, N, dtype=result.dtype)[: result.shape[-1]] if result.ndim == 2 else 1.0
    (result.masked_fill(result.detach().isinf(), 0) * weight).sum().backward()
    assert scores.grad is not None
    return result.detach(), scores.grad


def broken(call: Call, scores: Tensor, backend: str) -> dict[str, Tensor]:
    """The name of each check, and the rows (rows,) in which it failed.

    Entries between 0 and 1, the right sum, exact zeros and ones of hard masks and samples, ranks between 1 and n, sorts in
    order; the gradient is finite, and 0 for what is -inf; NaN in a row is NaN in all of it, and in no other. Each backend gives
    what the plain code gives in float64, as far as rounding of the scores allows.
    """
    dtype = scores.dtype
    result, gradient = run(call, scores)
    with_nan, number = scores.isnan().any(-1), (scores > -torch.inf).sum(-1)
    clean = ~with_nan
    wide = result.double()
    failed = {
        "NaN stays in its row": (wide.reshape(len(wide), -1).isnan().all(-1) != with_nan)
        | (clean & wide.reshape(len(wide), -1).isnan().any(-1)),
        "gradient finite": clean & ~gradient.isfinite().all(-1),
        "no gradient of -inf": clean & ((scores == -torch.inf) & (gradient != 0)).any(-1),
        "dtype": torch.full_like(
            clean, result.dtype != (torch.promote_types(dtype, torch.float32) if call.function == "ranks" else dtype)
        ),
    }
    rounding = max(1e-5, torch.finfo(dtype).eps)
    if call.function in MASKS:
        total = number.clamp(max=call.k).double()
        failed["0 <= entry <= 1"] = clean & ((wide < 0) | (wide > 1 + 1e-6)).any(-1)
        failed["sum"] = clean & ((wide.sum(-1) - total).abs() > rounding * N)
        failed["-inf is never chosen"] = clean & ((scores == -torch.inf) & (wide != 0)).any(-1)
    if call.function in ("hard", "exact", "gumbel"):
        failed["0 or 1"] = clean & ((wide != 0) & (wide != 1)).any(-1)
    if call.function == "ranks":
        failed["1 <= rank <= n"] = clean & ((wide < 1 - 1e-4) | (wide > N + 1e-4)).any(-1)
        failed["sum of ranks"] = clean & ((wide.sum(-1) - N * (N + 1) / 2).abs() > 1e-3)
    if call.function == "sort" and call.operator in ("Permutahedron", "SinkhornSort"):
        slack = 4 * rounding * wide.masked_fill(wide.isinf(), 0).abs().amax(-1, keepdim=True)
        failed["descending"] = clean & (wide[:, 1:] > wide[:, :-1] + slack).any(-1)
    if call.function == "quantile":
        real = scores.double().masked_fill(scores == -torch.inf, torch.nan)
        low, high = real.nan_to_num(nan=torch.inf).amin(-1), real.nan_to_num(nan=-torch.inf).amax(-1)
        slack = 1e-3 + 40 * call.temperature + rounding * torch.maximum(low.abs(), high.abs())
        failed["among the scores"] = clean & (number > 0) & ((wide < low - slack) | (wide > high + slack))
    if call.function not in ("exact", "gumbel") and (backend == "native" or dtype != torch.float64):
        failed["as in float64"] = clean & ~close(call, scores, wide)
    return failed


def close(call: Call, scores: Tensor, wide: Tensor) -> Tensor:
    """Whether a result is that of the plain code in float64, within what one rounding of the scores changes there."""
    with anyk.backend("torch"):
        exact = call(scores.double())
        network = call.operator in ("splitter", "bitonic") and call.function != "hard"
        if network or call.operator in ("NeuralSort", "SoftSort"):
            return torch.ones(len(scores), dtype=torch.bool)  # differences of large intermediate values: not held to it
        size = scores.double().masked_fill(scores.isinf(), 0).abs()
        step = torch.finfo(torch.float32).eps * size * (1 if call.operator in THRESHOLD else 4)
        moved = torch.zeros_like(exact)
        for sign in (1, -1):
            moved = torch.maximum(moved, (call(scores.double() + sign * step * torch.linspace(-1, 1, N)) - exact).abs())
    unit = torch.finfo(scores.dtype).eps if wide.dtype != scores.dtype or call.function not in ("ranks",) else 1e-5
    scale = exact.masked_fill(exact.isinf(), 0).abs().clamp(min=1)
    same = (wide == exact) | ((wide - exact).abs() <= 4 * moved + (2e-5 + 2 * unit) * scale)
    return same.reshape(len(same), -1).all(-1)


@dataclass
class Tally:
    cases: Counter[str] = field(default_factory=Counter)
    groups: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, str, str], str] = field(default_factory=dict)


def torture(seed: int, quick: bool, backend: str) -> int:
    """Prints how many cases there were and what failed; returns how many kinds of failure there are."""
    tally = Tally()
    drawn = list(kinds(torch.Generator().manual_seed(seed), 2 if quick else 50))
    names = [kind for kind, scores in drawn for _ in scores]
    together = torch.cat([scores for _, scores in drawn])
    for number, call in enumerate(calls()):
        for dtype in FLOATS if not quick else FLOATS[number % 4 :][:1]:
            # a dtype that cannot hold them, and too few to choose from, are no cases
            keep = (together.abs() < torch.finfo(dtype).max) | together.isinf() | together.isnan()
            keep = keep.all(-1) & ((call.function != "select") | ((together > -torch.inf).sum(-1) >= call.k))
            if backend == "native":  # its thresholds are numbers in the unit of the scores: they lack the digits
                keep &= torch.tensor([name != "far outlier" for name in names])
            given, of_kind = together[keep].to(dtype), [name for name, kept in zip(names, keep.tolist(), strict=True) if kept]
            try:
                failed = broken(call, given, backend)
            except Exception as error:
                failed = {f"raised {type(error).__name__}: {error}": torch.ones(len(given), dtype=torch.bool)}
            tally.cases[call.function] += len(given)
            for check, wrong in failed.items():
                for row in wrong.nonzero().flatten().tolist():
                    group = (call.operator, call.function, of_kind[row], check)
                    tally.groups[group] += 1
                    shown = f"{call}, {str(dtype).removeprefix('torch.')}: {given[row].tolist()}"
                    tally.examples.setdefault(group, shown)
    print("\ntools: cases by function: " + ", ".join(f"{name} {cases:,}" for name, cases in tally.cases.items()))
    print(f"tools: {tally.cases.total():,} cases, {tally.groups.total():,} failed")
    for group, number in sorted(tally.groups.items()):
        print(f"{', '.join(group)}: {number}\n    {tally.examples[group]}")
    return len(tally.groups)
