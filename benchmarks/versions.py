"""Two versions of anyk side by side: forward and backward of everyday calls, new time over old.

    python benchmarks/versions.py OLD/src NEW/src [--rounds 7] [--only WORD]

Each version runs in a process of its own, in turns, with one thread; the least time of all rounds counts. Both folders need
their native library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 0.4  # that a case may take in a round
LONGEST = {"soft_topk, splitter": 1000, "soft_topk, ksubset": 16384, "sample_k_subset": 16384}  # rows that are measured


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """What is measured: a name, and one forward and backward pass."""
    import torch

    import anyk

    def step(call: Callable[..., Any], scores: torch.Tensor, *more: Any) -> Callable[[], None]:
        def run() -> None:
            scores.grad = None
            call(scores, *more).sum().backward()

        return run

    losses = {
        "TopKErrorLoss": anyk.TopKErrorLoss({1: 0.5, 5: 0.5}),
        "TopKCrossEntropyLoss": anyk.TopKCrossEntropyLoss({1: 0.5, 5: 0.5}),
        "error, KSubset": anyk.TopKErrorLoss({1: 0.5, 5: 0.5}, anyk.KSubset()),
        "SmoothTopKLoss": anyk.SmoothTopKLoss(5),
    }
    tools = {
        "soft_topk": lambda s, k: anyk.soft_topk(s, k),
        "soft_topk, permutahedron": lambda s, k: anyk.soft_topk(s, k, "permutahedron"),
        "soft_topk, sinkhorn": lambda s, k: anyk.soft_topk(s, k, "sinkhorn"),
        "soft_topk, ksubset": lambda s, k: anyk.soft_topk(s, k, "ksubset"),
        "soft_topk, splitter": lambda s, k: anyk.soft_topk(s, k, "splitter"),
        "soft_topk, bfloat16": lambda s, k: anyk.soft_topk(s.bfloat16(), k),
        "hard": lambda s, k: anyk.soft_topk(s, k, hard=True),
        "soft_quantile": lambda s, k: anyk.soft_quantile(s, 0.9),
        "soft_rank": lambda s, k: anyk.soft_rank(s),
        "soft_rank, permutahedron": lambda s, k: anyk.soft_rank(s, "permutahedron"),
        "soft_sort, permutahedron": lambda s, k: anyk.soft_sort(s, "permutahedron"),
        "sample_k_subset": lambda s, k: anyk.sample_k_subset(s, k),
    }
    generator = torch.Generator().manual_seed(0)
    for batch, n in ((100, 100), (32, 1000), (500, 1000), (500, 10450), (128, 100_000)):
        scores = torch.randn(batch, n, generator=generator, requires_grad=True)
        target = torch.randint(n, (batch,), generator=generator)
        for name, loss in losses.items():
            if n <= 10450 or name == "TopKErrorLoss":
                yield f"{name} {batch} x {n}", step(loss, scores, target)
    pixels = torch.randn(2, 21, 128, 128, generator=generator, requires_grad=True)
    labels = torch.randint(21, (2, 128, 128), generator=generator)
    yield "TopKErrorLoss 2 x 21 x 128 x 128", step(losses["TopKErrorLoss"], pixels, labels)
    for batch, n, k in ((64, 1000, 32), (8, 16384, 256), (1, 1_000_000, 1000)):
        scores = torch.randn(batch, n, generator=generator, requires_grad=True)
        for name, tool in tools.items():
            if n <= LONGEST.get(name, n):
                yield f"{name} {batch} x {n}, k {k}", step(tool, scores, k)


def measure(only: str) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    found = {}
    for name, run in cases():
        if only not in name:
            continue
        run()
        least, until = float("inf"), time.perf_counter() + SECONDS
        while time.perf_counter() < until or least == float("inf"):
            start = time.perf_counter()
            run()
            least = min(least, time.perf_counter() - start)
        found[name] = least
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.only)))
        return
    least: dict[Path, dict[str, float]] = {arguments.old: {}, arguments.new: {}}
    for _ in range(arguments.rounds):
        for source, times in least.items():
            command = [sys.executable, __file__, str(source), str(source), "--measure", "--only", arguments.only]
            environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            for name, seconds in json.loads(output).items():
                times[name] = min(seconds, times.get(name, seconds))
    print("| call | old, ms | new, ms | new / old |\n|---|--:|--:|--:|")
    for name, old in least[arguments.old].items():
        new = least[arguments.new][name]
        print(f"| {name} | {1e3 * old:.3f} | {1e3 * new:.3f} | {new / old:.2f} |")


if __name__ == "__main__":
    main()
