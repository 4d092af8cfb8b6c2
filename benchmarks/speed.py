"""Time and memory of a training step, by the native kernels and by the plain code, beside cross-entropy's.

    python benchmarks/speed.py                         the whole run, some minutes; writes benchmarks/results.md
    python benchmarks/speed.py --only threads --out FILE   the sections whose title has this word
    python benchmarks/speed.py --quick --out FILE      everything once, small and short: shows that it runs, no more

Every time is one forward and backward pass, unless it says otherwise, and most are multiples of torch.nn.CrossEntropyLoss on
the same scores, measured in turns with it. See measuring.py for how. Where the native library was not built, the plain code
is measured alone. difftopk is measured beside if it is installed.
Afterwards quote.py brings the figures to the pages that quote them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import (
    Backward,
    Forward,
    Loss,
    Step,
    best_seconds,
    keep_freed_memory,
    least_of,
    machine,
    markdown_table,
    peak_bytes,
    random_scores,
)
from torch import nn

import anyk
from anyk import KSubset, LapSum, NeuralSort, SinkhornSort, SoftSort, SortingNetwork
from anyk.kernels import native

CE = "cross-entropy"
K = 5
WHY_PLAIN = native.status()
BACKENDS = ("torch",) if WHY_PLAIN else ("native", "torch")
FASTEST = BACKENDS[0]
TITLES = {"native": "native", "torch": "plain"}


class Case(NamedTuple):
    """A shape."""

    batch: int
    n: int
    m: int | None

    def __str__(self) -> str:
        return f"{self.batch}, {self.n}, {self.m or 'none'}"


OPERATORS: dict[str, Callable[[], anyk.Operator]] = {
    "splitter": lambda: SortingNetwork("splitter"),
    "LapSum": LapSum,
    "KSubset": KSubset,
    "SoftSort": SoftSort,
    "NeuralSort": NeuralSort,
    "bitonic": lambda: SortingNetwork("bitonic"),
    "odd_even": lambda: SortingNetwork("odd_even"),
    # These have no kernel: what is native is the selection.
    "splitter, learned": lambda: SortingNetwork("splitter", nn.Parameter(torch.ones(()))),
    "SinkhornSort, topk": lambda: SinkhornSort(anchors="topk"),
}
GROWING = ("splitter", "SoftSort", "NeuralSort", "LapSum", "KSubset")


def anyk_loss(kind: str, name: str, m: int | None, k: int = K) -> Loss:
    p_k, operator = [1 / k] * k, OPERATORS[name]()
    if kind == "error":
        return anyk.TopKErrorLoss(p_k, operator, m=m)
    return anyk.TopKCrossEntropyLoss(p_k, operator, m=m, top1={"pure": "operator", "default": "separate"}[kind])


LOSSES = ("pure", "default", "error")
TYPICAL = (("pure", "splitter"), ("default", "splitter"), ("error", "KSubset"))  # where not all operators are shown


@dataclass(frozen=True)
class Plan:
    """What a run measures and how long it takes for it (seconds for each group of steps that take turns)."""

    cases: tuple[Case, ...]
    sweeps: int
    budget: float
    memory_operators: tuple[str, ...]
    examples: int
    epochs: int
    growth_batch: int
    growth: dict[str, tuple[int, ...]]
    processes: int


FULL = Plan(
    cases=(
        Case(500, 1000, 16),
        Case(32, 1000, 16),
        Case(500, 10450, 50),
        Case(100, 100, None),
        Case(128, 100000, 50),
    ),
    sweeps=2,
    budget=1.5,
    memory_operators=("splitter", "KSubset"),
    examples=50_000,
    epochs=8,
    growth_batch=64,
    growth={
        "n": (100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000),
        "m": (8, 16, 32, 64, 128, 256, 512, 1000),
        "k": (1, 2, 3, 5, 8, 12, 16, 20),
    },
    processes=5,
)
QUICK = replace(
    FULL,
    cases=(Case(8, 60, 16), Case(8, 12, None)),
    sweeps=1,
    budget=0.01,
    memory_operators=("splitter",),  # reading the profiler's record takes its time
    examples=1000,
    epochs=1,
    growth_batch=4,
    growth={"n": (100, 1000), "m": (8, 60), "k": (1, 20)},
    processes=1,
)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def progress(text: str) -> None:
    print(f"... {text}", flush=True)


# The sections: each measures and returns Markdown -------------------------------------------------------------------


def losses(plan: Plan) -> str:
    """Every operator in every loss, by both backends."""
    times: dict[Case, dict[str, float]] = {}
    for sweep in range(plan.sweeps):  # again later: a disturbance can outlast one group of steps
        for case in plan.cases:
            progress(f"table, {case}, sweep {sweep + 1} of {plan.sweeps}")
            scores, target = random_scores(case.batch, case.n)
            steps = {CE: Step(nn.CrossEntropyLoss(), scores, target)}
            for name, backend, kind in product(OPERATORS, BACKENDS, LOSSES):
                loss = anyk_loss(kind, name, case.m)
                steps[f"{name} {backend} {kind}"] = Step(loss, scores, target, backend=backend)
            times[case] = least_of(times.get(case), best_seconds(steps, plan.budget * len(OPERATORS)))
    rows = []
    for case, seconds in times.items():
        for name in OPERATORS:
            ratios = [seconds[f"{name} {backend} {kind}"] / seconds[CE] for backend, kind in product(BACKENDS, LOSSES)]
            rows.append([str(case), name, milliseconds(seconds[CE]), *(f"{ratio:.2f}" for ratio in ratios)])
    header = ["batch, n, m", "operator", "CE ms", *(f"{TITLES[backend]} {kind}" for backend in BACKENDS for kind in LOSSES)]
    return (
        f"{markdown_table(header, rows)}\n\n"
        "The last two have no kernel: there the native code finds the candidates, and the plain code does the rest. Learned:\n"
        "the temperature is a parameter."
    )


def as_they_come(plan: Plan) -> str:
    """The line that README shows, with all defaults."""
    times: dict[Case, dict[str, float]] = {}
    p_k: dict[int, float] = {1: 0.5, K: 0.5}
    made: dict[str, Callable[[], Loss]] = {
        "TopKErrorLoss": lambda: anyk.TopKErrorLoss(p_k),
        "TopKCrossEntropyLoss": lambda: anyk.TopKCrossEntropyLoss(p_k),
    }
    for _ in range(plan.sweeps):
        for case in plan.cases:
            progress(f"as they come, {case.batch} x {case.n}")
            scores, target = random_scores(case.batch, case.n)
            steps = {CE: Step(nn.CrossEntropyLoss(), scores, target)}
            for backend, (name, make) in product(BACKENDS, made.items()):
                steps[f"{TITLES[backend]} {name}"] = Step(make(), scores, target, backend=backend)
            times[case] = least_of(times.get(case), best_seconds(steps, 2 * plan.budget))
    header = [name for name in next(iter(times.values())) if name != CE]
    rows = [
        [f"{case.batch} x {case.n:,}", milliseconds(seconds[CE]), *(f"{seconds[name] / seconds[CE]:.2f}" for name in header)]
        for case, seconds in sorted(times.items(), key=lambda item: (item[0].n, item[0].batch))
    ]
    told = f"`TopKErrorLoss({{1: 0.5, {K}: 0.5}})` and the other one as they come: the 64 best scores of a row are ranked."
    return f"{told}\n\n{markdown_table(['batch x classes', 'CE ms', *header], rows)}"


def where_the_time_goes(plan: Plan) -> str:
    """The parts of a step, and the floor."""
    rows, floors = [], []
    small, one = random_scores(1, 20)
    for case in plan.cases:
        progress(f"the parts of a step, {case}")
        scores, target = random_scores(case.batch, case.n)
        fixed = scores.detach()
        m = case.m or case.n
        for kind, name in TYPICAL:
            loss = anyk_loss(kind, name, case.m)
            steps = {
                CE: Step(nn.CrossEntropyLoss(), scores, target),
                "Python": Step(anyk_loss(kind, name, 16), small, one, backend=FASTEST),
                "forward without gradient": Forward(loss, fixed, target, backend=FASTEST),
                "forward": Forward(loss, scores, target, backend=FASTEST),
                "backward": Backward(loss, scores, target, backend=FASTEST),
                "step": Step(loss, scores, target, backend=FASTEST),
            }
            seconds = best_seconds(steps, plan.budget)
            unit = seconds.pop(CE)
            rows.append([str(case), f"{kind}, {name}", milliseconds(unit), *(f"{s / unit:.2f}" for s in seconds.values())])
        steps = {
            CE: Step(nn.CrossEntropyLoss(), scores, target),
            "a maximum of each row": Forward(lambda scores, _: scores.amax(-1), fixed, target),
            "zeros (B, n)": Forward(lambda scores, _: torch.zeros(scores.shape), fixed, target),
        }
        if not WHY_PLAIN:
            steps["native selection"] = Forward(lambda scores, _, m=m: native.best(scores, m), fixed, target)
        steps["plain selection"] = Forward(lambda scores, _, m=m: anyk.candidates.best(scores, m), fixed, target)
        steps["torch.topk"] = Forward(lambda scores, _, m=m: scores.topk(m).indices, fixed, target)
        floor = best_seconds(steps, plan.budget)
        unit = floor.pop(CE)
        both = floor["a maximum of each row"] + floor["zeros (B, n)"]
        floors.append([str(case), milliseconds(unit), *(f"{s / unit:.2f}" for s in (both, *floor.values()))])
    return (
        f"The {TITLES[FASTEST]} code. Python: a step of 1 x 20 scores, where there is nothing else. The forward pass without\n"
        "a gradient finds the candidates, ranks them and, but for pure, sums exponentials; with one it also goes back\n"
        "through the operator. The backward pass writes the gradient of all scores.\n\n"
        f"{markdown_table(['batch, n, m', 'loss', 'CE ms', *seconds], rows)}\n\n"
        "The floor: the scores have to be read once, for which the cheapest is a maximum, and a gradient of their size has to\n"
        "be written. The selections are of the m best, in order.\n\n"
        f"{markdown_table(['batch, n, m', 'CE ms', 'floor: maximum + zeros', *floor], floors)}"
    )


def half_precision(plan: Plan) -> str:
    """Scores of bfloat16 against float32."""
    rows = []
    for case in plan.cases:
        progress(f"bfloat16, {case}")
        for kind, name in TYPICAL:
            loss = anyk_loss(kind, name, case.m)
            steps = {
                str(dtype): Step(loss, *random_scores(case.batch, case.n, dtype), backend=FASTEST)
                for dtype in (torch.float32, torch.bfloat16)
            }
            single, half = best_seconds(steps, plan.budget).values()
            cells = [milliseconds(single), milliseconds(half), f"{half / single:.2f}"]
            rows.append([str(case), f"{kind}, {name}", *cells])
    return markdown_table(["batch, n, m", "loss", "float32 ms", "bfloat16 ms", "bfloat16 / float32"], rows)


def threads(plan: Plan) -> str:
    """Two threads against one."""
    if (os.cpu_count() or 1) < 2:
        return "One core only: skipped."
    rows = []
    for case in plan.cases:
        progress(f"threads, {case}")
        scores, target = random_scores(case.batch, case.n)
        losses = {f"{kind}, {name}": anyk_loss(kind, name, case.m) for kind, name in TYPICAL}
        losses[CE] = nn.CrossEntropyLoss()
        for name, loss in losses.items():
            steps = {str(number): Step(loss, scores, target, number, FASTEST) for number in (1, 2)}
            one, two = best_seconds(steps, plan.budget).values()
            rows.append([str(case), name, milliseconds(one), milliseconds(two), f"{one / two:.2f}"])
    header = ["batch, n, m", "loss", "1 thread ms", "2 threads ms", "faster by"]
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: other work on the second core counts against it."
    return f"{markdown_table(header, rows)}\n\n{load}"


def training_a_head(plan: Plan) -> str:
    """A real loop: gathered batches, a linear layer, SGD."""
    features, classes, batch = 512, 100, 500
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(plan.examples, features, generator=generator)
    y = torch.randint(classes, (plan.examples,), generator=generator)
    p_k = {1: 0.5, 5: 0.5}
    criteria: dict[str, Loss] = {
        "default, splitter, m = 16": anyk.TopKCrossEntropyLoss(p_k, m=16),
        "default, splitter, m = 64": anyk.TopKCrossEntropyLoss(p_k),
        "error, KSubset, m = 64": anyk.TopKErrorLoss(p_k, KSubset()),
    }

    lines = [("softmax", "torch", nn.CrossEntropyLoss())]
    lines += [(name, backend, loss) for name, loss in criteria.items() for backend in BACKENDS]
    layers = [nn.Linear(features, classes) for _ in lines]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    best = [float("inf")] * len(lines)
    for number in range(plan.epochs):
        progress(f"training a head, epoch {number + 1} of {plan.epochs}")
        for turn in torch.randperm(len(x), generator=generator).split(10 * batch):
            for i, (_, backend, loss) in enumerate(lines):
                with anyk.backend(backend):
                    start = time.perf_counter()
                    for rows in turn.split(batch):
                        optimizers[i].zero_grad()
                        loss(layers[i](x[rows]), y[rows]).backward()
                        optimizers[i].step()
                    best[i] = min(best[i], (time.perf_counter() - start) / len(turn) * batch)
    table = [["softmax", "", milliseconds(best[0]), "1.00"]]
    for (name, backend, _), seconds in zip(lines[1:], best[1:], strict=True):
        table.append([name, TITLES[backend], milliseconds(seconds), f"{seconds / best[0]:.2f}"])
    about = f"{plan.examples} embeddings of {features} numbers, {classes} classes, batches of {batch}, SGD, P_K = {p_k}; 64 is"
    return (
        f"{about} what m is by default. Whole training steps, ten at a time in turns, the best of {plan.epochs} epochs.\n\n"
        f"{markdown_table(['loss', 'code', 'ms for a step', 'times softmax'], table)}"
    )


# difftopk's method -> ours to set against it
RIVALS = {
    "bitonic__non_sparse": ("splitter", "bitonic"),
    "odd_even": ("odd_even",),
    "softsort": ("SoftSort",),
    "neuralsort": ("NeuralSort",),
}


def difftopk_losses(case: Case) -> dict[str, Loss]:
    """difftopk's losses for a case, but for those whose dense matrices would not fit into half of the free memory."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints on import
        import difftopk
    m = case.m or case.n
    p = (m - 1).bit_length()
    matrices = {"bitonic__non_sparse": p * (p + 1) // 2, "odd_even": m, "softsort": 1, "neuralsort": 1}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    losses: dict[str, Loss] = {}
    for method, number in matrices.items():
        if 32 * number * case.batch * m * m > free / 2:  # some eight floats are kept for an entry of a matrix
            progress(f"difftopk {method} skipped at {case}: not enough memory")
            continue
        losses[method] = difftopk.TopKCrossEntropyLoss(
            method, 1.0, [1 / K] * K, case.n, m=case.m, distribution="logistic", top1_mode="sort"
        )
    return losses


def beside_difftopk(plan: Plan) -> str:
    """How much faster the pure loss is than difftopk's (mode "sort"), with equal m."""
    if find_spec("difftopk") is None:
        return "difftopk is not installed: skipped."
    rows = []
    for case in plan.cases:
        scores, target = random_scores(case.batch, case.n)
        for method, loss in difftopk_losses(case).items():
            progress(f"difftopk {method}, {case}")
            ours = RIVALS[method]
            steps = {name: Step(anyk_loss("pure", name, case.m), scores, target, backend=FASTEST) for name in ours}
            seconds = best_seconds(steps | {"theirs": Step(loss, scores, target)}, plan.budget)
            for name in ours:
                cells = [milliseconds(seconds["theirs"]), name, milliseconds(seconds[name])]
                rows.append([str(case), method, *cells, f"{seconds['theirs'] / seconds[name]:.2f}"])
    return markdown_table(["batch, n, m", "difftopk", "difftopk ms", "anyk", "anyk ms", "faster by"], rows)


def baselines(plan: Plan) -> str:
    """The competing losses, on the largest shape of the paper."""
    case = max(plan.cases, key=lambda case: case.n if case.n <= 10450 else 0)
    scores, target = random_scores(case.batch, case.n)
    kinds = (anyk.SmoothTopKLoss, anyk.TopKHingeLoss, anyk.TruncatedTopKEntropyLoss, anyk.SoftmaxAtKLoss)
    losses: dict[str, Loss] = {kind.__name__: kind(K) for kind in kinds}
    if find_spec("difftopk") is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            from difftopk.smooth_topk import SmoothTopKLoss
        losses["difftopk's SmoothTopKLoss"] = SmoothTopKLoss(case.n, K)
    rows = []
    for name, loss in losses.items():
        progress(f"{name}, {case.batch} x {case.n}")
        steps = {CE: Step(nn.CrossEntropyLoss(), scores, target)}
        steps |= {backend: Step(loss, scores, target, backend=backend) for backend in BACKENDS}
        seconds = best_seconds(steps, plan.budget)
        rows.append([name, milliseconds(seconds[CE]), *(f"{seconds[backend] / seconds[CE]:.2f}" for backend in BACKENDS)])
    header = ["", "CE ms", *(TITLES[backend] for backend in BACKENDS)]
    return f"batch {case.batch}, n {case.n}, k {K}\n\n" + markdown_table(header, rows)


def memory(plan: Plan) -> str:
    """Peak bytes of a step, as a multiple of the scores'."""
    rows = []
    for case in plan.cases:
        progress(f"memory, {case}")
        scores, target = random_scores(case.batch, case.n)

        def cell(loss: Loss, backend: str = "torch") -> str:
            return f"{peak_bytes(Step(loss, scores, target, backend=backend)) / scores.nbytes:.2f}"  # noqa: B023

        softmax = cell(nn.CrossEntropyLoss())
        for name in plan.memory_operators:
            cells = [cell(anyk_loss(kind, name, case.m), backend) for backend in BACKENDS for kind in LOSSES]
            rows.append([str(case), name, softmax, *cells])
    header = ["batch, n, m", "operator", CE, *(f"{TITLES[backend]} {kind}" for backend in BACKENDS for kind in LOSSES)]
    note = "Beside it a kernel works in some rows at a time, for each thread in at most 64 MiB, which this does not count."
    return f"{markdown_table(header, rows)}\n\n{note}"


def start_up(plan: Plan) -> str:
    """Building a large network and importing the package, in new processes."""
    script = """if True:
        import json, time
        clock = time.perf_counter
        start = clock(); import torch; torch_done = clock(); import anyk; anyk_done = clock()
        anyk.networks.splitter(65536, 8); cold = clock(); anyk.networks.splitter(65536, 8); cached = clock()
        print(json.dumps([torch_done - start, anyk_done - torch_done, cold - anyk_done, cached - cold]))
    """
    runs = []
    for number in range(plan.processes):
        progress(f"start-up, process {number + 1} of {plan.processes}")
        output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(output))
    names = ("import torch", "import anyk after it", "networks.splitter(65536, 8)", "the same again (cached)")
    rows = [[name, f"{min(seconds):.2f}"] for name, seconds in zip(names, zip(*runs, strict=True), strict=True)]
    return markdown_table(["", "best, s"], rows)


# a variable, what is fixed, and the shape (n, m, k) at a point
GROWTHS: dict[str, tuple[str, Callable[[int], tuple[int, int, int]]]] = {
    "n": (f"m 16, k {K}", lambda n: (n, 16, K)),
    "m": (f"n 1000, k {K}", lambda m: (1000, m, K)),
    "k": ("n 1000, m 50", lambda k: (1000, 50, k)),
}


def growth(plan: Plan, variable: str) -> str:
    """How the cost of the pure loss grows."""
    fixed, shape = GROWTHS[variable]
    rows = []
    for point in plan.growth[variable]:
        progress(f"growth, {variable} = {point}")
        n, m, k = shape(point)
        scores, target = random_scores(plan.growth_batch, n)
        steps = {CE: Step(nn.CrossEntropyLoss(), scores, target)}
        steps |= {name: Step(anyk_loss("pure", name, m, k), scores, target, backend=FASTEST) for name in GROWING}
        seconds = best_seconds(steps, plan.budget)
        rows.append([point, milliseconds(seconds[CE]), *(f"{seconds[name] / seconds[CE]:.2f}" for name in GROWING)])
    return f"batch {plan.growth_batch}, {fixed}\n\n" + markdown_table([variable, "CE ms", *GROWING], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, tiny budgets; needs --out")
    parser.add_argument("--only", default="", metavar="WORD", help="the sections whose title has this word; needs --out")
    parser.add_argument("--out", type=Path, help="where the results go")
    arguments = parser.parse_args()
    if (arguments.quick or arguments.only) and arguments.out is None:
        parser.error("--quick and --only need --out: what they measure must not replace the results")
    plan = QUICK if arguments.quick else FULL
    out: Path = arguments.out or Path(__file__).parent / "results.md"

    torch.set_num_threads(1)
    kept = keep_freed_memory()
    start = time.perf_counter()
    load = os.getloadavg()[0]
    fastest = "by the native code" if FASTEST == "native" else "by the plain code"
    sections: list[tuple[str, Callable[[Plan], str]]] = [
        ("As they come (multiples of cross-entropy)", as_they_come),
        ("Losses (multiples of cross-entropy)", losses),
        ("Where the time goes (multiples of cross-entropy)", where_the_time_goes),
        (f"bfloat16 against float32, {fastest}", half_precision),
        (f"Two threads against one, {fastest}", threads),
        ("Training a head", training_a_head),
        (f"Beside difftopk, pure loss {fastest}", beside_difftopk),
        ("Competing losses (multiples of cross-entropy)", baselines),
        ("Peak memory of a step (multiples of the scores' memory)", memory),
        ("Start-up", start_up),
    ]
    for variable in GROWTHS:
        title = f"Growth with {variable}, pure loss {fastest} (multiples of cross-entropy)"
        sections.append((title, partial(growth, variable=variable)))
    parts = []
    for title, measure in sections:
        if arguments.only.lower() in title.lower():
            parts.append(f"## {title}\n\n{measure(plan)}\n")
            print(f"\n{parts[-1]}", flush=True)

    command = shlex.join(["python", "benchmarks/speed.py", *sys.argv[1:]])
    minutes = (time.perf_counter() - start) / 60
    head = [
        "# Speed and memory\n",
        f"{machine()}; load average at the start {load:.2f}; {minutes:.1f} minutes.\n",
        f"Command: `{command}`\n",
        f"A time is the best of many forward and backward passes that took turns; k = {K}, P_K uniform, float32, one thread,\n"
        'unless it says otherwise. Pure is `top1="operator"`, default is `TopKCrossEntropyLoss`, error is `TopKErrorLoss`.\n'
        "Native is the code of anyk's kernels, plain that of PyTorch.\n",
    ]
    if WHY_PLAIN:
        head.append(f"There is no native library here, so that the plain code is measured alone: {WHY_PLAIN}.\n")
    else:
        head.append(f"The kernels use {native.variant()}.\n")
    if kept:
        head.append(
            "Freed memory is kept (measuring.py). With the allocator as it comes the ratios were alike up to n = 10450; at\n"
            "n = 100000 they were lower, since cross-entropy took four times as long.\n"
        )
    if arguments.quick:
        head.append("A quick run: small shapes and too few rounds. The numbers mean nothing.\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([*head, *parts]))
    print(f"{minutes:.1f} minutes; written to {out}")


if __name__ == "__main__":
    main()
