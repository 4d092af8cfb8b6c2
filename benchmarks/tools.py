"""Speed of masks, ranks and sorts, forward and backward of sum(w * result), beside torch.topk and torch.sort in the same run.

python benchmarks/tools.py [--quick] [--out benchmarks/tools.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import Step, best_seconds, keep_freed_memory, machine, markdown_table
from torch import Tensor

import anyk

SHAPES = (((64, 1000), 32), ((8, 16384), 256), ((1, 1_000_000), 1000))
MOST_OF_KSUBSET = 200_000
"""numbers of a shape: for more, its plain code takes seconds"""
MOST_OF_NETWORK = 4096
"""entries of a row: a network of more wires takes minutes to build"""


def tools(k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "soft_topk, LapSum": lambda scores: anyk.soft_topk(scores, k),
        "soft_topk, Permutahedron": lambda scores: anyk.soft_topk(scores, k, "permutahedron"),
        "soft_topk, SinkhornSort": lambda scores: anyk.soft_topk(scores, k, "sinkhorn"),
        "soft_topk, KSubset": lambda scores: anyk.soft_topk(scores, k, "ksubset"),
        "sample_k_subset": lambda scores: anyk.sample_k_subset(scores, k),
        "soft_topk, splitter network": lambda scores: anyk.soft_topk(scores, k, "splitter"),
        "soft_quantile": lambda scores: anyk.soft_quantile(scores, 1 - k / scores.shape[-1]),
        "soft_quantile, median": lambda scores: anyk.soft_quantile(scores, 0.5),
        "soft_rank, LapSum": lambda scores: anyk.soft_rank(scores),
        "soft_rank, Permutahedron": lambda scores: anyk.soft_rank(scores, "permutahedron"),
        "soft_sort": lambda scores: anyk.soft_sort(scores),
    }


def measure(shape: tuple[int, int], k: int, budget: float) -> dict[str, float]:
    """Multiples of torch.topk, for ranks and sort of torch.sort."""
    torch.manual_seed(0)
    scores, weight = torch.randn(shape, requires_grad=True), torch.randn(shape)
    half = scores.detach().bfloat16().requires_grad_()

    def step(make: Callable[[Tensor], Tensor], scores: Tensor = scores, **more: object) -> Step:
        def loss(scores: Tensor, weight: Tensor) -> Tensor:
            result = make(scores)
            return (result * weight[..., : result.shape[-1]]).sum() if result.ndim == 2 else result.sum()

        return Step(loss, scores, weight.to(scores.dtype), **more)  # type: ignore[arg-type]

    steps = {"torch.topk": step(lambda scores: scores.topk(k).values), "torch.sort": step(lambda scores: scores.sort().values)}
    for name, make in tools(k).items():
        if scores.numel() > MOST_OF_KSUBSET and ("KSubset" in name or "sample" in name):
            continue
        if scores.shape[-1] > MOST_OF_NETWORK and "network" in name:
            continue
        steps[name] = step(make, backend="native")
        steps[f"{name} (plain)"] = step(make)
    for name in ("soft_topk, LapSum", "soft_topk, Permutahedron", "soft_quantile"):
        make = tools(k)[name]
        steps[f"{name}, bfloat16"] = step(make, half, backend="native")
        steps[f"{name}, two threads"] = step(make, backend="native", threads=2)
    seconds = best_seconds(steps, budget)
    sorts = ("soft_rank", "soft_sort")
    return {
        name: value / seconds["torch.sort" if name.startswith(sorts) else "torch.topk"]
        for name, value in seconds.items()
        if not name.startswith("torch.")
    } | {"torch.topk, ms": 1e3 * seconds["torch.topk"], "torch.sort, ms": 1e3 * seconds["torch.sort"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, for the code and not for the figures")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    shapes = [((4, 50), 5)] if given.quick else SHAPES
    columns = [measure(shape, k, 0.1 if given.quick else 25.0) for shape, k in shapes]
    names = list(dict.fromkeys(name for column in columns for name in column))
    header = ["multiples of torch.topk; ranks and sort, of torch.sort", *(f"{b} x {n}, k {k}" for (b, n), k in shapes)]
    rows = [[name, *(f"{column[name]:.2f}" if name in column else "–" for column in columns)] for name in names]
    page = f"# Masks, ranks, sorts and samples\n\n{__doc__}\n{machine()}\n\n{markdown_table(header, rows)}\n"
    if given.out:
        given.out.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
