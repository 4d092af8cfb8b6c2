"""The study of README.md as data: cells, arms, grids, methods, comparisons, the order of the runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memorised.train import Variant

Key = tuple[tuple[str, Any], ...]
Found = Mapping[Key, Mapping[str, Any]]  # lines of runs.jsonl of one cell and seed, by variant

TEMPERATURES, RANK_TEMPERATURES, SMOOTHING, UNTUNED = (1.0, 2.0, 4.0, 8.0), (1.0, 2.0, 4.0), (0.1, 0.3), 4.0


@dataclass(frozen=True)
class Cell:
    """A setting: a set, a model, and how many examples a class there are (a fifth of them for validation; 0: all)."""

    name: str
    data: str
    a_class: int
    hidden: int = 0
    steps: int = 1500
    batch: int = 100
    ks: tuple[int, ...] = (1, 5)
    lrs: tuple[float, ...] = (1e-3, 3e-4, 3e-3)
    wds: tuple[float, ...] = (0.01, 0.1, 1.0)
    chunk: int = 12
    decay: bool = False


SIZES = (5, 10, 20, 50, 100, 450)
SETS = [
    (size, data, prefix, 500 if size == 450 else 100)
    for size in SIZES
    for data, prefix in (("features", ""), ("code", "code-"))
]
_CELLS = [
    *(Cell(f"{prefix}linear-{size}", data, size, batch=batch) for size, data, prefix, batch in SETS),
    *(Cell(f"{prefix}mlp-{size}", data, size, 512, 1000, batch, chunk=4) for size, data, prefix, batch in SETS),
    Cell("pixels-50", "pixels", 50, steps=4000, lrs=(1e-3,), wds=(0.01,), chunk=1),
    *(Cell(f"rank-{r}", "features", 0, r, 2000, 250, (1, 5, 10), (3e-2, 1e-2, 1e-1), (0.01,), decay=True) for r in (2, 8, 32)),
]
CELLS = {cell.name: cell for cell in _CELLS}
PIXELS = {  # from scratch, nothing tuned
    "ce": Variant("ce"),
    "start": Variant("ce", start=0.0),
    "soft": Variant("ce", t=UNTUNED),
    **{name: Variant(f"net {p_k}", t=2.0) for name, p_k in (("tail", "1"), ("k5", "5"), ("k1-5", "1-5"))},
}
ARMS = {"soft": "ce", "bound": "gce", "tail": "net 1", "k5": "net 5", "k1-5": "net 1-5"}
EXTRA = {"k10": "net 10", "k1+5": "net 1+5", "lap tail": "lap 1", "lap k5": "lap 5", "lap k1-5": "lap 1-5"}
EXTRA |= {"logistic k1+5": "logistic 1+5", "error k1+5": "error 1+5"}
METHODS: dict[str, tuple[str, tuple[float, ...], float]] = {  # arm, temperatures, start
    "start": ("ce", (1.0,), 0.0),
    **{name: (arm, TEMPERATURES + (16.0,) * (name == "soft"), 1.0) for name, arm in (ARMS | EXTRA).items()},
    **{f"{name}, start": (arm, (1.0, 4.0), 0.0) for name, arm in ARMS.items()},
}
RANK = ("soft", "bound", "tail", "k5", "k1-5", "k10", "k1+5")
#: start and rate of the last layer, of plain cross-entropy, against CE / 8; the first is the same thing as CE / 8
IDENTITY = {"start/8, rate/8": (1 / 8, 1 / 8), "start/8": (1 / 8, 1.0), "start 0, rate/8": (0.0, 1 / 8), "rate/8": (1.0, 1 / 8)}
LISTS = ("k5", "k1-5")
#: what a method is compared with, beside tuned cross-entropy
AGAINST = [
    *(("soft", "start"), ("soft, start", "soft"), ("soft, start", "start"), ("bound", "soft")),
    *(("tail", "soft"), ("tail", "start"), ("tail, start", "soft, start")),
    *((name, "tail") for name in (*LISTS, "k10", "k1+5")),
    *((name, other) for other in ("soft", "start") for name in LISTS),
    *((f"{name}, start", name) for name in ("bound", "tail", *LISTS)),
    *((f"{name}, start", "tail, start") for name in LISTS),
    *(("lap k5", "lap tail"), ("lap k1-5", "lap tail"), ("lap tail", "tail"), ("lap k1-5", "k1-5")),
    *(("logistic k1+5", "soft"), ("error k1+5", "soft"), *((name, "soft: t=8") for name in IDENTITY)),
]


def key(variant: Variant) -> Key:
    return tuple(sorted(variant.to_json().items()))


def best(variants: list[Variant], found: Found) -> Variant | None:
    """The first of the best by the mean of top-1 and top-5 on validation; None while one is missing."""
    missing = not variants or any(key(one) not in found for one in variants)
    return None if missing else max(variants, key=lambda one: sum(found[key(one)]["val"][:2]))


def grid(cell: Cell) -> list[Variant]:
    """What cross-entropy's rate and weight decay, which all methods take over, are chosen from."""
    return [Variant("ce", lr=lr, wd=wd) for lr in cell.lrs for wd in cell.wds]


def candidates(cell: Cell, method: str, tuned: Variant | None) -> list[Variant]:
    """What a method chooses from on validation; ``tuned`` is the best of the grid."""
    if cell.data == "pixels":
        return [PIXELS[method]]
    if method == "untuned ce":
        return [Variant("ce")]
    if method.startswith("untuned "):
        arm, _, start = METHODS[method.removeprefix("untuned ")]
        return [Variant(arm, t=UNTUNED if start else 1.0, start=start)]
    if tuned is None:
        return []
    if method == "ce":
        return [tuned, *(replace(tuned, smooth=each) for each in SMOOTHING)]
    if method in IDENTITY:
        start, rate = IDENTITY[method]
        return [replace(tuned, start=start, rate=rate)]
    name, _, fixed = method.partition(": t=")
    arm, temperatures, start = METHODS[name]
    if cell.decay:
        return [replace(tuned, arm=arm, t=t, lr=lr) for t in RANK_TEMPERATURES for lr in cell.lrs]
    return [replace(tuned, arm=arm, t=t, start=start) for t in ((float(fixed),) if fixed else temperatures)]


def methods(cell: Cell, part: str) -> list[str]:
    """What is asked of a cell, in its parts. A model that is too small has nothing to memorise: no start."""
    if cell.data == "pixels":
        return {"main": list(PIXELS)[:5], "extra": list(PIXELS)[5:]}.get(part, [])
    if cell.decay:
        return ["ce", *RANK] if part == "main" else []
    main = ["ce", *(name for name in METHODS if name not in EXTRA), *IDENTITY]
    return {"main": main, "untuned": [f"untuned {name}" for name in ("ce", "start", *ARMS)], "extra": list(EXTRA)}[part]


def wanted(cell: Cell, part: str, found: Found) -> list[Variant]:
    """The runs that are missing and can be made now: first the grid."""
    tuned = best(grid(cell), found)
    every = [one for method in methods(cell, part) for one in candidates(cell, method, tuned)]
    every += [] if tuned or part == "untuned" else grid(cell)
    missing = {key(one): one for one in every if key(one) not in found}
    return sorted(missing.values(), key=lambda one: (one.arm, one.t))


def queue() -> Iterator[tuple[str, int, str]]:
    """(cell, seed, part), the most important first. Changed for time: see "What was changed" in README.md."""
    three, two, first, second = (1, 2, 3), (4, 5), range(1, 6), range(6, 11)
    order = (
        ("linear-20 linear-5 linear-100 mlp-20 code-linear-20", first, "untuned main"), ("linear-20", first, "extra"),
        ("mlp-20 mlp-5 mlp-100", (*first, *second), "untuned"), ("mlp-5 mlp-100 rank-8", three, "main"),
        ("linear-20 linear-5 linear-100", second, "untuned main"), ("pixels-50 rank-2", three, "main"),
        ("mlp-5 mlp-100", two, "main"), ("rank-32", three, "main"), ("pixels-50", three, "extra"),
        ("linear-5 linear-100", first, "extra"), ("linear-450", three, "untuned main extra"),
        ("code-mlp-20", first, "untuned main"), ("mlp-20 mlp-5 mlp-100", second, "main"),
        ("linear-10 linear-50 mlp-10 mlp-50", first, "untuned main"), ("mlp-20", first, "extra"),
        ("code-linear-20 code-mlp-20", second, "untuned main"), ("pixels-50", two, "main extra"),
        ("code-linear-5 code-linear-100 code-mlp-5 code-mlp-100 linear-450 mlp-450", first, "untuned main"),
        ("rank-8 rank-2 rank-32", two, "main"), ("linear-20 linear-5 linear-100", second, "extra"),
    )  # fmt: skip
    for names, seeds, parts in order:
        yield from ((name, seed, part) for name in names.split() for seed in seeds for part in parts.split())
