"""Long run: many optimisation steps on one small problem with each operator, ending finite and with flat memory.

A linear model on a problem that it can separate, two wrong labels included: those are far behind at first, and later the
loss reaches zero while the scores keep growing, which is where losses go bad late in training. Adam at a high rate gets
there early.

    python benchmarks/long_run.py [--steps 20000] [--only splitter/logistic] [--out benchmarks/long_run.md]

With --out the table is written there too. Lines that it has already for the same number of steps and the same torch stay
unless their operator runs again, so operators may run one by one.

Exit code 1 if a parameter or a loss is not finite, or memory grew by more than ALLOWED_GROWTH in the second half.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

import torch
from measuring import machine
from torch import nn
from torture import SUBJECTS, Subject

import anyk

CLASSES, FEATURES, EXAMPLES, K = 8, 6, 32, 3
ALLOWED_GROWTH = 8.0  # MB; the allocator's own coming and going is smaller


def memory() -> float:
    """Resident memory in MB: the present one on Linux, elsewhere the peak."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    labels = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
    labels[:2] = (labels[:2] + 3) % CLASSES
    return inputs, labels


def train(subject: Subject, steps: int) -> tuple[str, bool]:
    """One line of the table, and whether all went well."""
    torch.manual_seed(1)
    inputs, labels = problem()
    model = nn.Linear(FEATURES, CLASSES)
    criterion = anyk.TopKCrossEntropyLoss([1 / K] * K, subject.make(1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    total, started, used = torch.zeros(()), time.perf_counter(), []
    for step in range(steps):
        # Measured after the warm-up: the first steps fill caches.
        if step in (min(100, steps // 4), steps // 2):
            used.append(memory())
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()  # one number that is not finite stays so
    used.append(memory())
    finite = bool(total.isfinite()) and all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    flat = used[-1] - used[-2] <= ALLOWED_GROWTH
    largest = max(parameter.abs().max().item() for parameter in model.parameters())
    verdict = "" if finite and flat else "   FAILED: " + ("memory grew" if finite else "not finite")
    sizes = " ".join(f"{size:8.1f}" for size in used)
    seconds = time.perf_counter() - started
    return f"{subject.name:<22}{loss.item():>10.4f}{largest:>12.3g}   {sizes}{seconds:>8.0f}{verdict}", finite and flat


def record(path: Path, head: list[str], line: str) -> None:
    """Puts the operator's line into the table, in the order of SUBJECTS."""
    old = path.read_text().splitlines() if path.exists() else []
    kept = old[old.index(head[-1]) + 1 :] if head[-1] in old and head[0] in old else []
    lines = {entry.split()[0]: entry for entry in [*kept, line] if entry and not entry.startswith("`")}
    ordered = [lines[subject.name] for subject in SUBJECTS if subject.name in lines]
    command = f"Last command: `python benchmarks/long_run.py {' '.join(sys.argv[1:])}`; other operators may have run before."
    intro = ["# Long run", "", command, "", f"{machine()}; one thread", ""]
    path.write_text("\n".join([*intro, "```text", *head, *ordered, "```", ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--only", choices=[subject.name for subject in SUBJECTS], help="one operator")
    parser.add_argument("--out", type=Path, help="where the table goes")
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error("--steps: expected at least 4")
    head = [
        f"{arguments.steps} steps of Adam, {EXAMPLES} examples, {CLASSES} classes, k = {K}, float32, torch {torch.__version__}",
        f"{'operator':<22}{'last loss':>10}{'largest w':>12}   {'MB start':>8} {'middle':>8} {'end':>8}{'s':>8}",
    ]
    print("\n".join(head), flush=True)
    all_well = True
    for subject in SUBJECTS:
        if arguments.only not in (None, subject.name):
            continue
        line, well = train(subject, arguments.steps)
        print(line, flush=True)
        all_well &= well
        if arguments.out is not None:
            record(arguments.out, head, line)
    return int(not all_well)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
