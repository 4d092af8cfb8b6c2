"""What a training step of a head of n classes costs: flops, bytes moved, messages. Formulae, checked here, applied elsewhere.

    python benchmarks/costs.py [--out benchmarks/costs.md]

The terms of the formulae are measured on this machine: the speed of the matrix product, of selecting the candidates, of the
loss on them, and of the exchange between processes (gloo). Predictions made of these are then held against measured whole
steps. For GPUs nothing is measured: the same formulae are applied with the rates of a data sheet.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import keep_freed_memory, machine, markdown_table

import anyk

P_K, K = [0.5, 0, 0, 0, 0.5], 5
FLOAT = 4


@dataclass(frozen=True)
class Rates:
    """What a device does in a second."""

    flops: float
    memory: float
    """bytes read or written"""
    wire: float
    """bytes that one process sends or receives"""
    latency: float
    """seconds for one message"""


#: 40 % of the dense bfloat16 peak, 80 % of the memory bandwidth, 200 Gbit/s of network for each GPU
GPU = Rates(flops=0.4 * 312e12, memory=0.8 * 2.0e12, wire=0.8 * 25e9, latency=10e-6)
GPU_MEMORY = 80e9


@dataclass(frozen=True)
class Job:
    """One step. ``shards`` processes share the classes, ``replicas`` such groups share the batch."""

    n: int
    d: int = 1024
    rows: int = 256
    """examples for each process"""
    m: int = 50
    replicas: int = 1
    shards: int = 1
    softmax: bool = True
    """the softmax covers all classes; otherwise the candidates alone, with sparse gradients"""
    chunked: bool = True
    """the scores are not stored (LinearHead)"""

    @property
    def group_rows(self) -> int:
        """All processes that share the classes see the examples of their whole group."""
        return self.rows * self.shards

    @property
    def local(self) -> int:
        return math.ceil(self.n / self.shards)

    @property
    def flops(self) -> float:
        """Scores; with the whole softmax both gradients, and the scores once more where they were not stored."""
        products = 1 + (2 + self.chunked if self.softmax else 0)
        return 2.0 * products * self.group_rows * self.local * self.d

    @property
    def memory(self) -> float:
        """Bytes held: parameters, gradient, two moments of Adam, and the scores with their gradient where stored."""
        copies = 4 if self.softmax else 3
        scores = 0 if self.chunked else 2 * self.group_rows * self.local * FLOAT
        return copies * self.local * self.d * FLOAT + scores

    @property
    def touched(self) -> float:
        """Bytes read and written in the device's memory: the weights in each product, and what the optimiser changes."""
        products = 1 + (2 + self.chunked if self.softmax else 0)
        changed = self.local if self.softmax else min(self.local, self.group_rows * self.m)
        scores = 0 if self.chunked else 4 * self.group_rows * self.local * FLOAT
        return (products * self.local + 7 * changed) * self.d * FLOAT + scores

    @property
    def gathered(self) -> float:
        """Bytes that a process gets for the loss: the candidates of all, and two numbers for the softmax."""
        return (self.shards - 1) * self.group_rows * (self.m + 2) * FLOAT if self.shards > 1 else 0.0

    @property
    def features(self) -> float:
        """Bytes that a process gets of features, and of their gradient."""
        return 2.0 * (self.shards - 1) * self.rows * self.d * FLOAT

    @property
    def averaged(self) -> float:
        """Bytes that a process sends for the average of the weights' gradients over the replicas."""
        if self.replicas == 1:
            return 0.0
        if self.softmax:
            return 2.0 * (self.replicas - 1) / self.replicas * self.local * self.d * FLOAT
        return (self.replicas - 1) * min(self.local, self.group_rows * self.m) * (self.d * FLOAT + 8)

    @property
    def bytes_moved(self) -> float:
        return self.gathered + self.features + self.averaged

    @property
    def messages(self) -> int:
        """Rounds of messages: three collectives among the shards and the exchange of sizes, one among the replicas."""
        return (4 * (self.shards - 1) if self.shards > 1 else 0) + (2 * (self.replicas - 1) if self.replicas > 1 else 0)

    def seconds(self, rates: Rates) -> float:
        """Nothing overlaps: an upper bound of the formulae, not of the world."""
        compute = max(self.flops / rates.flops, self.touched / rates.memory)
        return compute + self.bytes_moved / rates.wire + self.messages * rates.latency


# Measured here -----------------------------------------------------------------------------------------------------------


def best_of(run: Callable[[], object], budget: float = 1.0) -> float:
    run()
    best, end = math.inf, time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def measured_rates() -> tuple[Rates, dict[str, float]]:
    torch.manual_seed(0)
    x, weight = torch.randn(256, 512), torch.randn(8192, 512)
    flops = 2 * x.shape[0] * weight.numel() / best_of(lambda: x @ weight.t())
    long = torch.randn(1 << 25)
    memory = 2 * long.nbytes / best_of(lambda: long.add_(1.0))
    wire, latency = exchange()
    scores = torch.randn(128, 100_000)
    selection = best_of(lambda: anyk.candidates.best(scores, 50)) / scores.numel()
    few, target = torch.randn(512, 50, requires_grad=True), torch.randint(50, (512,))

    def loss() -> None:
        anyk.topk_cross_entropy(few, target, P_K, top1="operator").backward()

    return Rates(flops, memory, wire, latency), {"selection": selection, "loss": best_of(loss) / len(few)}


def exchange() -> tuple[float, float]:
    """Bytes a second and seconds a message of an all-gather between two processes of this machine."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29591")
    workers = [context.Process(target=_gather_worker, args=(rank, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    result: tuple[float, float] = queue.get()
    for worker in workers:
        worker.join()
    return result


def _gather_worker(rank: int, queue: torch.multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    times = {}
    for numbers in (1, 1 << 22):
        block = torch.zeros(numbers)
        blocks = [torch.zeros(numbers) for _ in range(2)]
        dist.all_gather(blocks, block)
        samples = []
        for _ in range(20):
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather(blocks, block)
            samples.append(time.perf_counter() - start)
        times[numbers] = min(samples)
    if rank == 0:
        queue.put(((1 << 22) * FLOAT / times[1 << 22], times[1]))
    dist.destroy_process_group()


def measured_step(job: Job) -> float:
    """Forward and backward of the head on this machine, without an optimiser."""
    torch.manual_seed(0)
    x, target = torch.randn(job.rows, job.d), torch.randint(job.n, (job.rows,))
    criterion = anyk.TopKCrossEntropyLoss(P_K, m=job.m, softmax_over="all" if job.softmax else "candidates")
    head = anyk.LinearHead(job.d, job.n, criterion, sparse=not job.softmax)

    def step() -> None:
        head.zero_grad()
        loss = head(x, target) if job.chunked else criterion(head.linear(x), target)
        loss.backward()

    return best_of(step, 2.0)


def predicted_step(job: Job, rates: Rates, parts: dict[str, float]) -> float:
    return job.flops / rates.flops + job.rows * (job.n * parts["selection"] + parts["loss"])


# The page ----------------------------------------------------------------------------------------------------------------


def amount(value: float, unit: str) -> str:
    """
    >>> amount(2.1e9, "B"), amount(0, "B")
    ('2.1 GB', '0')
    """
    if value == 0:
        return "0"
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.1e} {unit}"


def designs(n: int, processes: int) -> dict[str, Job]:
    """The ways to spread a head; a class group of more processes than pays is split into replicas."""
    group = min(processes, best_group(n, processes))
    found = {
        "Linear + loss": Job(n, replicas=processes, chunked=False),
        "fused head": Job(n, replicas=processes),
        "fused, candidates only": Job(n, replicas=processes, softmax=False),
    }
    if processes > 1:
        found["sharded over all"] = sharded(n, processes, 1)
        found["2-D mesh"] = sharded(n, group, processes // group)
    return found


def sharded(n: int, shards: int, replicas: int) -> Job:
    """anyk.parallel takes scores: they are stored, and so is their gradient."""
    return Job(n, shards=shards, replicas=replicas, chunked=False)


def best_group(n: int, processes: int) -> int:
    """The number of class shards for which a row costs least by these formulae, of those that fit in memory."""
    sizes = [2**exponent for exponent in range(int(math.log2(processes)) + 1)]
    fitting = [size for size in sizes if as_fits(sharded(n, size, 1)).memory < GPU_MEMORY] or [processes]

    def seconds_a_row(size: int) -> float:
        job = as_fits(sharded(n, size, processes // size))
        return job.seconds(GPU) / job.rows

    return min(fitting, key=seconds_a_row)


def page() -> str:
    rates, parts = measured_rates()
    terms = [
        ["matrix product, float32", f"{rates.flops / 1e9:.0f} Gflop/s"],
        ["memory, read and write", f"{rates.memory / 1e9:.1f} GB/s"],
        ["finding the 50 best", f"{parts['selection'] * 1e9:.2f} ns for each score"],
        ["loss and gradient on 50 candidates, splitter", f"{parts['loss'] * 1e6:.1f} µs for each row"],
        ["all-gather between two processes, gloo", f"{rates.wire / 1e9:.2f} GB/s, {rates.latency * 1e6:.0f} µs for a message"],
    ]
    return f"""# What a step costs

{machine()}. One thread. Written by `benchmarks/costs.py`, which has the formulae.

## The terms, measured here

{markdown_table(["term", "rate"], terms)}

## Steps predicted from them, and measured

Forward and backward, d = 512, 128 rows, m = 50. Predicted: products / rate + rows x (n x finding + loss).

{markdown_table(["n", "design", "predicted", "measured", "measured / predicted"], checked(rates, parts))}

## On GPUs, derived

Nothing of this was measured. d = 1024, 256 rows for each GPU, or as many as fit; m = 50, float32 in memory and on the wire.
Rates: 125 Tflop/s (40 % of 312), memory 1.6 TB/s (80 % of 2.0), 20 GB/s of network for each GPU (80 % of 200 Gbit/s), 10 µs for
a message, 80 GB. Flops, bytes and messages are for one GPU and one step; nothing is taken to overlap. A dash: does not fit with
16 rows either. In bold, the quickest with the whole softmax and as many rows ("candidates only" is another loss). The mesh is
(replicas x class shards).

{markdown_table(["n", "GPUs", "design", "rows", "flops", "bytes moved", "messages", "memory", "step"], derived())}
"""


def checked(rates: Rates, parts: dict[str, float]) -> list[list[str]]:
    rows = []
    for n in (10_000, 100_000):
        for name, job in (
            ("Linear + loss", Job(n, 512, 128, chunked=False)),
            ("fused head", Job(n, 512, 128)),
            ("fused, candidates only", Job(n, 512, 128, softmax=False)),
        ):
            guess, real = predicted_step(job, rates, parts), measured_step(job)
            rows.append([f"{n:,}", name, f"{guess * 1e3:.0f} ms", f"{real * 1e3:.0f} ms", f"{real / guess:.2f}"])
    return rows


def derived() -> list[list[str]]:
    rows = []
    for exponent in range(3, 9):
        for processes in (1, 8, 64, 1024):
            jobs = {name: as_fits(job) for name, job in designs(10**exponent, processes).items()}
            most = max(job.rows for job in jobs.values())
            times = {name: job.seconds(GPU) for name, job in jobs.items() if job.memory < GPU_MEMORY}
            whole = [name for name in times if jobs[name].softmax and jobs[name].rows == most]
            quickest = min(whole, key=lambda name: times[name]) if whole else None
            for name, job in jobs.items():
                label = f"{name} ({job.replicas} x {job.shards})" if name == "2-D mesh" else name
                counts = [amount(job.flops, "flop"), amount(job.bytes_moved, "B"), str(job.messages), amount(job.memory, "B")]
                shown = amount(times[name], "s") if name in times else "–"
                step = f"**{shown}**" if name == quickest else shown
                rows.append([f"1e{exponent}", str(processes), label, str(job.rows), *counts, step])
    return rows


def as_fits(job: Job) -> Job:
    """With fewer rows where the scores of all do not fit."""
    while job.memory >= GPU_MEMORY and job.rows > 16:
        job = replace(job, rows=job.rows // 2)
    return job


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "costs.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    arguments.out.write_text(page())
