"""The study of README.md as data: cells, arms, grids, methods, comparisons, the order of the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memorised.train import Variant

Key = tuple[tuple[str, Any], ...]
Found = Mapping[Key, Mapping[str, Any]]
"""lines of runs.jsonl of one cell and seed, by variant"""

SEEDS = tuple(range(1, 11))
TEMPERATURES = (1.0, 2.0, 4.0, 8.0)
SMOOTHING = (0.1, 0.3)
UNTUNED = 4.0


@dataclass(frozen=True)
class Cell:
    """A setting: a set, a model, and how many examples a class there are (a fifth of them for validation)."""

    name: str
    data: str
    a_class: int
    """0: all there are"""
    hidden: int = 0
    rectify: bool = True
    steps: int = 1500
    batch: int = 100
    ks: tuple[int, ...] = (1, 5)
    lrs: tuple[float, ...] = (1e-3, 3e-4, 3e-3)
    wds: tuple[float, ...] = (0.01, 0.1, 1.0)
    chunk: int = 12
    decay: bool = False


def _cells() -> Iterator[Cell]:
    for size in (5, 10, 20, 50, 100, 450):
        batch = 500 if size == 450 else 100
        yield Cell(f"linear-{size}", "features", size, batch=batch)
        yield Cell(f"mlp-{size}", "features", size, 512, steps=1000, batch=batch, chunk=4)
    for size in (5, 20, 100):
        yield Cell(f"code-linear-{size}", "code", size)
        yield Cell(f"code-mlp-{size}", "code", size, 512, steps=1000, chunk=4)
    for rank in (2, 8, 32):
        yield Cell(f"rank-{rank}", "features", 0, rank, False, 2000, 250, (1, 5, 10), (3e-2, 1e-2, 1e-1), (0.01,), decay=True)


CELLS = {cell.name: cell for cell in _cells()}
PIXELS = {  # from scratch, nothing tuned: loss, temperature, what the last layer's start is multiplied by
    "ce": Variant("ce"),
    "start": Variant("ce", start=0.0),
    "soft": Variant("ce", t=UNTUNED),
    "tail": Variant("net 1", t=2.0),
    "k5": Variant("net 5", t=2.0),
    "k1-5": Variant("net 1-5", t=2.0),
}

#: method: arm, temperatures, start
METHODS: dict[str, tuple[str, tuple[float, ...], float]] = {
    "start": ("ce", (1.0,), 0.0),
    "soft": ("ce", (*TEMPERATURES, 16.0), 1.0),
    "bound": ("gce", TEMPERATURES, 1.0),
    "tail": ("net 1", TEMPERATURES, 1.0),
    "k5": ("net 5", TEMPERATURES, 1.0),
    "k1-5": ("net 1-5", TEMPERATURES, 1.0),
    **{f"{name}, start": (arm, (1.0, 4.0), 0.0) for name, arm in
       (("soft", "ce"), ("bound", "gce"), ("tail", "net 1"), ("k5", "net 5"), ("k1-5", "net 1-5"))},
}  # fmt: skip
EXTRA: dict[str, tuple[str, tuple[float, ...], float]] = {
    "k10": ("net 10", TEMPERATURES, 1.0),
    "k1+5": ("net 1+5", TEMPERATURES, 1.0),
    "lap tail": ("lap 1", TEMPERATURES, 1.0),
    "lap k5": ("lap 5", TEMPERATURES, 1.0),
    "lap k1-5": ("lap 1-5", TEMPERATURES, 1.0),
    "logistic k1+5": ("logistic 1+5", TEMPERATURES, 1.0),
    "error k1+5": ("error 1+5", TEMPERATURES, 1.0),
}
#: a model that is too small has nothing to memorise: no start, and both rates for every temperature
RANK = {name: each for name, each in {**METHODS, **EXTRA}.items() if name in ("soft", "bound", "tail", "k5", "k10", "k1-5", "k1+5")}
RANK_TEMPERATURES = (1.0, 2.0, 4.0)
#: start and rate of the last layer, of plain cross-entropy, against CE / 8; the first is the same thing as CE / 8
IDENTITY = {"start/8, rate/8": (1 / 8, 1 / 8), "start/8": (1 / 8, 1.0), "start 0, rate/8": (0.0, 1 / 8), "rate/8": (1.0, 1 / 8)}
UNTUNED_ARMS = {"start": (1.0, 0.0), "soft": (UNTUNED, 1.0), **{name: (UNTUNED, 1.0) for name in ("bound", "tail", "k5", "k1-5")}}
#: what a method is compared with, beside tuned cross-entropy
AGAINST = [
    *(("soft", "start"), ("soft, start", "soft"), ("soft, start", "start")),
    *(("bound", "soft"), ("tail", "soft"), ("tail", "start"), ("tail, start", "soft, start")),
    *((name, "tail") for name in ("k5", "k1-5", "k10", "k1+5")),
    *((name, "soft") for name in ("k5", "k1-5")),
    *((name, "start") for name in ("k5", "k1-5")),
    *((f"{name}, start", name) for name in ("bound", "tail", "k5", "k1-5")),
    *((f"{name}, start", "tail, start") for name in ("k5", "k1-5")),
    *(("lap k5", "lap tail"), ("lap k1-5", "lap tail"), ("lap tail", "tail"), ("lap k1-5", "k1-5")),
    *((name, "soft") for name in ("logistic k1+5", "error k1+5")),
    *((name, "soft: t=8") for name in IDENTITY),
]


def key(variant: Variant) -> Key:
    return tuple(sorted(variant.to_json().items()))


def score(line: Mapping[str, Any]) -> float:
    """What all tuning goes by: the mean of top-1 and top-5 on validation."""
    return float(line["val"][0] + line["val"][1])


def best(variants: Sequence[Variant], found: Found) -> Variant | None:
    """The first of the best; None while one is missing."""
    if any(key(one) not in found for one in variants):
        return None
    return max(variants, key=lambda one: score(found[key(one)]))


def grid(cell: Cell) -> list[Variant]:
    return [Variant("ce", lr=lr, wd=wd) for lr in cell.lrs for wd in cell.wds]


def base(cell: Cell, found: Found) -> Variant | None:
    """Cross-entropy with its tuned rate and weight decay, which all arms take over."""
    return best(grid(cell), found)


def candidates(cell: Cell, method: str, tuned: Variant) -> list[Variant]:
    """What a method chooses from on validation."""
    own = {**METHODS, **EXTRA}
    if method == "ce":
        return [tuned, *(replace(tuned, smooth=each) for each in SMOOTHING)]
    if method.startswith("untuned "):
        usual, name = Variant("ce", lr=cell.lrs[0], wd=cell.wds[0]), method.removeprefix("untuned ")
        if name == "ce":
            return [usual]
        t, start = UNTUNED_ARMS[name]
        return [replace(usual, arm=own[name][0], t=t, start=start)]
    if method in IDENTITY:
        start, rate = IDENTITY[method]
        return [replace(tuned, start=start, rate=rate)]
    name, _, fixed = method.partition(": t=")
    arm, temperatures, start = own[name]
    if cell.decay:
        return [replace(tuned, arm=arm, t=t, lr=lr) for t in RANK_TEMPERATURES for lr in cell.lrs]
    return [replace(tuned, arm=arm, t=t, start=start) for t in ((float(fixed),) if fixed else temperatures)]


def methods(cell: Cell, part: str) -> list[str]:
    """What is asked of a cell; part is main or extra."""
    if cell.decay:
        return ["ce", *RANK] if part == "main" else []
    if part == "extra":
        return list(EXTRA)
    return ["ce", *METHODS, *(f"untuned {name}" for name in ("ce", *UNTUNED_ARMS)), *IDENTITY]


def wanted(cell: Cell, part: str, found: Found) -> list[Variant]:
    """The runs that are missing and can be made now."""
    tuned = base(cell, found)
    if tuned is None:
        every = grid(cell)
    else:
        every = [one for method in methods(cell, part) for one in candidates(cell, method, tuned)]
    missing = {key(one): one for one in every if key(one) not in found}
    return sorted(missing.values(), key=lambda one: (one.arm, one.t))


def queue() -> Iterator[tuple[str, int, str]]:
    """(cell, seed, part), the most important first: five seeds of all that matters most, then five more, then the rest."""
    first, second = SEEDS[:5], SEEDS[5:]
    sizes = (20, 5, 100)

    def some(names: Sequence[str], seeds: Sequence[int], *parts: str) -> Iterator[tuple[str, int, str]]:
        yield from ((name, seed, part) for name in names for seed in seeds for part in parts)

    linear, mlp = [f"linear-{size}" for size in sizes], [f"mlp-{size}" for size in sizes]
    yield from some(linear, first, "main", "extra")
    yield from some(mlp, first, "main")
    yield from some(linear, second, "main", "extra")
    yield from some(["code-linear-20"], first, "main")
    yield from some(["rank-8", "rank-2", "rank-32"], first[:3], "main")
    yield from some(mlp, second, "main")
    yield from some(["code-mlp-20"], first, "main")
    yield from some(["linear-450"], first[:3], "main", "extra")
    yield from some(["linear-10", "linear-50"], first, "main")
    yield from some(["mlp-20"], first, "extra")
    yield from some(["code-linear-20", "code-mlp-20"], second, "main")
    yield from some(["code-linear-5", "code-linear-100", "mlp-10", "mlp-50", "code-mlp-5", "code-mlp-100"], first, "main")
    yield from some(["linear-450", "mlp-450"], first, "main", "extra")
    yield from some(["rank-8", "rank-2", "rank-32"], first, "main")
    yield from some(["linear-10", "linear-50"], second, "main")


Reader = Callable[[str, int], Found]
