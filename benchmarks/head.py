"""The fused head beside nn.Linear and a loss: memory of a training step, time of forward and backward. One thread.

    python benchmarks/head.py [--quick] [--out benchmarks/head.md]

Memory: each line is a process of its own. It makes the parameters, their gradients and the optimiser's state and takes the
peak of its resident memory; then it gives the gradients back, makes two training steps, and takes the peak again. The
difference is what the step needs beyond them. Sparse gradients count as such a need; nothing is set aside for them.

Time: the least of several rounds, all lines taking turns in one process, freed memory kept (see measuring.py).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import keep_freed_memory, machine, markdown_table
from torch import Tensor, nn

import anyk

P_K, M = [0.5, 0, 0, 0, 0.5], 50
LINES = {
    "Linear + CrossEntropyLoss": {},
    "Linear + TopKCrossEntropyLoss": {},
    "head": {},
    "head, top-1 alone": {"p_k": [1.0]},
    "head, label_smoothing=0.1": {"m": 10, "label_smoothing": 0.1},
    "head, softmax_over='candidates'": {"softmax_over": "candidates"},
    "head, softmax_over='candidates', sparse": {"softmax_over": "candidates", "sparse": True},
}


@dataclass(frozen=True)
class Size:
    batch: int
    n: int
    d: int

    def __str__(self) -> str:
        return f"B = {self.batch}, n = {self.n:,}, d = {self.d}"


def loss_of(name: str, linear: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    if not name.startswith("head"):
        criterion = nn.CrossEntropyLoss() if "+ Cross" in name else anyk.TopKCrossEntropyLoss(P_K, m=M)
        return lambda x, target: criterion(linear(x), target)
    settings = {"p_k": P_K, "m": M, **LINES[name]}
    sparse = settings.pop("sparse", False)
    head = anyk.LinearHead(1, linear.out_features, anyk.TopKCrossEntropyLoss(**settings), sparse=sparse)
    head.linear = linear
    return head


def inputs(size: Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size.batch, size.d, generator=generator).requires_grad_()
    return x, torch.randint(size.n, (size.batch,), generator=generator)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_memory(name: str, size: Size) -> int:
    """Bytes of a step beyond parameters, gradients and optimiser state."""
    linear = nn.Linear(size.d, size.n)
    parameters = list(linear.parameters())
    x, target = inputs(size)
    sparse = bool(LINES[name].get("sparse"))
    # Two steps: SparseAdam makes its state, two tensors a parameter, in the first. SGD has none.
    optimizer = torch.optim.SparseAdam(parameters) if sparse else torch.optim.SGD(parameters, lr=0.1)
    held = [torch.ones_like(p) for p in parameters for _ in range(2 if sparse else 1)]
    before = peak()
    del held
    loss_of_step = loss_of(name, linear)
    for _ in range(2):
        optimizer.zero_grad()
        x.grad = None
        loss = loss_of_step(x, target)
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    return peak() - before


def memory_table(size: Size) -> str:
    logits = 4 * size.batch * size.n
    rows = []
    for name, settings in LINES.items():
        command = [sys.executable, __file__, "--memory", name, *map(str, (size.batch, size.n, size.d))]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found = int(result.stdout)
        optimizer = "SparseAdam" if settings.get("sparse") else "SGD"
        rows.append((name, optimizer, f"{found / 1e6:.0f} MB", f"{found / logits:.1%}"))
        print(*rows[-1], sep="  ", flush=True)
    header = ("step", "optimiser", "memory beyond parameters, gradients, state", "of the scores' size")
    return f"## Memory: {size}, scores {logits / 1e6:.0f} MB\n\n" + markdown_table(header, rows)


def time_table(size: Size, rounds: int) -> str:
    linear = nn.Linear(size.d, size.n)
    x, target = inputs(size)
    steps = {name: loss_of(name, linear) for name in LINES}
    best = {name: [float("inf"), float("inf")] for name in LINES}
    for _ in range(rounds):
        for name, step in steps.items():
            x.grad = linear.weight.grad = linear.bias.grad = None
            start = time.perf_counter()
            loss = step(x, target)
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            best[name] = [min(best[name][0], middle - start), min(best[name][1], end - start)]
    whole = best["Linear + CrossEntropyLoss"][1]
    rows = [
        (name, f"{forward * 1e3:.0f}", f"{both * 1e3:.0f}", f"{both / whole:.2f}") for name, (forward, both) in best.items()
    ]
    header = ("step", "forward, ms", "forward + backward, ms", "times Linear + CrossEntropyLoss")
    return f"## Time: {size}\n\n" + markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "head.md")
    parser.add_argument("--memory", nargs=4, metavar=("LINE", "B", "N", "D"), help="measure one line of the memory table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.memory:
        name, *numbers = options.memory
        print(measure_memory(name, Size(*map(int, numbers))))
        return
    of_memory = Size(16, 20_000, 8) if options.quick else Size(256, 1_000_000, 256)
    of_time = Size(16, 20_000, 8) if options.quick else Size(128, 100_000, 512)
    parts = [
        "# The fused head",
        f"{machine()}. One thread, float32, P_K = {P_K}, m = {M} (10 with label smoothing). Written by `benchmarks/head.py`.",
        memory_table(of_memory),
    ]
    keep_freed_memory()
    parts.append(time_table(of_time, 2 if options.quick else 8))
    page = "\n\n".join(parts) + "\n"
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
