"""Time and memory of a training step, beside cross-entropy's and, where it is installed, difftopk's.

    python benchmarks/speed.py                         the whole run, some minutes; writes benchmarks/results.md
    python benchmarks/speed.py --quick --out FILE      everything once, small and short: shows that it runs, no more

Every time is one forward and backward pass, float32, as a multiple of torch.nn.CrossEntropyLoss on the same scores,
measured in turns with it. See measuring.py for how. matplotlib draws the plots; without it there are none.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import breakdown
import torch
from measuring import (
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

import anyk
from anyk import KSubset, LapSum, NeuralSort, SinkhornSort, SoftSort, SortingNetwork

CE = "cross-entropy"
PURE, DEFAULT = "operator", "separate"
K = 5
TABLE = "Losses against their targets (one thread, multiples of cross-entropy)"
NOISE = 1.05  # two threads count as slower than one from here on


@dataclass(frozen=True)
class Case:
    """A shape of the table and the splitter network's targets on it."""

    batch: int
    n: int
    m: int | None
    pure: float
    default: float

    def __str__(self) -> str:
        return f"{self.batch}, {self.n}, {self.m or 'none'}"


@dataclass(frozen=True)
class Contender:
    """An operator, and how many times the splitter network's target it may take (None: no target)."""

    operator: Callable[[], anyk.Operator]
    allowance: float | None
    allowance_untruncated: float | None


CONTENDERS = {
    "splitter": Contender(lambda: SortingNetwork("splitter"), 1, 1),
    "bitonic": Contender(lambda: SortingNetwork("bitonic"), 1.5, 1.5),
    "odd_even": Contender(lambda: SortingNetwork("odd_even"), None, None),
    "SoftSort": Contender(SoftSort, 1.5, 1.5),
    "NeuralSort": Contender(NeuralSort, 1.5, 1.5),
    "LapSum": Contender(LapSum, 1.5, 1.5),
    "KSubset": Contender(KSubset, 1.5, 1.5),
    "SinkhornSort, all": Contender(lambda: SinkhornSort(anchors="all"), 10, None),
    "SinkhornSort, topk": Contender(lambda: SinkhornSort(anchors="topk"), 10, None),
}


@dataclass(frozen=True)
class Plan:
    """What a run measures and how long it takes for it (seconds for each group of steps that take turns)."""

    cases: tuple[Case, ...]
    table_budget: float
    sweeps: int
    budget: float
    memory_operators: tuple[str, ...]
    growth_budget: float
    growth_batch: int
    growth_n: tuple[int, ...]
    growth_m: tuple[int, ...]
    growth_k: tuple[int, ...]
    processes: int


FULL = Plan(
    cases=(
        Case(500, 1000, 16, 2.5, 3.5),
        Case(500, 10450, 50, 1.2, 2.0),
        Case(100, 100, None, 25, 26),
        Case(128, 100000, 50, 0.5, 1.4),
    ),
    table_budget=1.5,
    sweeps=2,
    budget=2.5,
    memory_operators=tuple(CONTENDERS),
    growth_budget=1.5,
    growth_batch=64,
    growth_n=(100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000),
    growth_m=(8, 16, 32, 64, 128, 256, 512, 1000),
    growth_k=(1, 2, 3, 5, 8, 12, 16, 20),
    processes=5,
)
QUICK = Plan(
    cases=(Case(8, 60, 16, 2.5, 3.5), Case(8, 12, None, 25, 26)),
    table_budget=0.01,
    sweeps=1,
    budget=0.01,
    memory_operators=("splitter", "KSubset"),  # reading the profiler's record takes its time
    growth_budget=0.01,
    growth_batch=4,
    growth_n=(100, 1000),
    growth_m=(8, 60),
    growth_k=(1, 20),
    processes=1,
)

GROWING = ("splitter", "SoftSort", "NeuralSort", "LapSum", "KSubset")

# difftopk's method -> ours to set against it, and the factor that ours shall be faster by
RIVALS = {
    "bitonic__non_sparse": (("splitter", "bitonic"), 10),
    "odd_even": (("odd_even",), 10),
    "softsort": (("SoftSort",), 5),
    "neuralsort": (("NeuralSort",), 5),
}


def anyk_loss(name: str, m: int | None, top1: str, k: int = K) -> Loss:
    return anyk.TopKCrossEntropyLoss([1 / k] * k, CONTENDERS[name].operator(), m=m, top1=top1)


def verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def compared(reached: float, target: float | None) -> list[str]:
    """Cells: target, reached, met or not."""
    if target is None:
        return ["–", f"{reached:.2f}", "–"]
    return [f"≤ {target:.4g}", f"{reached:.2f}", verdict(reached <= target)]


def progress(text: str) -> None:
    print(f"... {text}", flush=True)


# The sections: each measures and returns Markdown -------------------------------------------------------------------


def table_with_memory_kept(plan: Plan) -> str:
    """The same table, and from here on the same allocator for all sections."""
    if not keep_freed_memory():
        return "The C library cannot be told to keep freed memory: all sections use the allocator as it comes."
    return table(plan)


def table(plan: Plan) -> str:
    """The pure and the default loss of every operator against their targets."""
    times: dict[tuple[Case, str], dict[str, float]] = {}
    for sweep in range(plan.sweeps):  # again later: a disturbance can outlast one group of steps
        for case in plan.cases:
            progress(f"table, {case}, sweep {sweep + 1} of {plan.sweeps}")
            scores, target = random_scores(case.batch, case.n)
            for name in CONTENDERS:
                steps = {CE: Step(torch.nn.CrossEntropyLoss(), scores, target)}
                for top1 in (PURE, DEFAULT):
                    steps[top1] = Step(anyk_loss(name, case.m, top1), scores, target)
                times[case, name] = least_of(times.get((case, name)), best_seconds(steps, plan.table_budget))
    rows, judged = [], []
    for (case, name), seconds in times.items():
        contender = CONTENDERS[name]
        allowance = contender.allowance if case.m else contender.allowance_untruncated
        cells: list[str] = []
        for top1, target in ((PURE, case.pure), (DEFAULT, case.default)):
            cells += compared(seconds[top1] / seconds[CE], allowance and allowance * target)
        judged += [cell for cell in cells if cell in (verdict(True), verdict(False))]
        rows.append([str(case), name, f"{seconds[CE] * 1e3:.3f}", *cells])
    header = ["batch, n, m", "operator", "CE ms", "pure ≤", "pure", "", "default ≤", "default", ""]
    met = judged.count(verdict(True))
    summary = f"{met} of {len(judged)} targets met. odd_even, and Sinkhorn without truncation, have none."
    return f"{markdown_table(header, rows)}\n\n{summary}"


def where_the_time_goes(plan: Plan) -> str:
    """The parts of a step, and the floor."""
    progress("the parts of a step")
    return breakdown.breakdown([breakdown.Shape(case.batch, case.n, case.m) for case in plan.cases], plan.table_budget)


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
            ours, factor = RIVALS[method]
            steps = {name: Step(anyk_loss(name, case.m, PURE), scores, target) for name in ours}
            steps |= {CE: Step(torch.nn.CrossEntropyLoss(), scores, target), "theirs": Step(loss, scores, target)}
            seconds = best_seconds(steps, plan.budget)
            for name in ours:
                faster = seconds["theirs"] / seconds[name]
                ratios = [f"{seconds[step] / seconds[CE]:.1f}" for step in ("theirs", name)]
                rows.append([str(case), method, ratios[0], name, ratios[1], f"{faster:.1f}", f"≥ {factor}"])
                rows[-1].append(verdict(faster >= factor))
    return markdown_table(["batch, n, m", "difftopk", "its ratio", "anyk", "our ratio", "faster by", "target", ""], rows)


def threads(plan: Plan) -> str:
    """Two threads against one, default loss with the splitter network."""
    if (os.cpu_count() or 1) < 2:
        return "One core only: skipped."
    rows = []
    for case in plan.cases:
        progress(f"threads, {case}")
        scores, target = random_scores(case.batch, case.n)
        losses = {"ours": anyk_loss("splitter", case.m, DEFAULT), CE: torch.nn.CrossEntropyLoss()}
        steps = {f"{name}{n}": Step(loss, scores, target, n) for name, loss in losses.items() for n in (1, 2)}
        seconds = best_seconds(steps, plan.budget * 2)
        ratio = seconds["ours2"] / seconds["ours1"]
        one, two = (f"{seconds[name] * 1e3:.3f}" for name in ("ours1", "ours2"))
        beside = f"{seconds[CE + '2'] / seconds[CE + '1']:.2f}"
        rows.append([str(case), one, two, f"{ratio:.2f}", f"≤ {NOISE}", verdict(ratio <= NOISE), beside])
    header = ["batch, n, m", "1 thread ms", "2 threads ms", "2 / 1", "target", "", "CE 2 / 1"]
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: other work on the second core counts against it."
    return f"{markdown_table(header, rows)}\n\n{load}"


def memory(plan: Plan) -> str:
    """Peak bytes of a step; what is beyond cross-entropy's peak also as a multiple of the candidates' scores."""
    rows = []
    for case in plan.cases:
        progress(f"memory, {case}")
        scores, target = random_scores(case.batch, case.n)
        all_scores, candidates = case.batch * case.n * 4, case.batch * (case.m or case.n) * 4
        cross_entropy = peak_bytes(Step(torch.nn.CrossEntropyLoss(), scores, target))
        rows.append([str(case), CE, f"{cross_entropy / all_scores:.2f}", "", "", ""])
        for name in plan.memory_operators:
            cells = []
            for top1 in (PURE, DEFAULT):
                peak = peak_bytes(Step(anyk_loss(name, case.m, top1), scores, target))
                cells += [f"{peak / all_scores:.2f}", f"{max(0, peak - cross_entropy) / candidates:.1f}"]
            rows.append([str(case), name, *cells])
    header = ["batch, n, m", "", "pure / Bn4", "beyond CE / Bm4", "default / Bn4", "beyond CE / Bm4"]
    return markdown_table(header, rows)


def baselines(plan: Plan) -> str:
    """The competing losses, on the largest shape of the paper."""
    case = plan.cases[1]
    scores, target = random_scores(case.batch, case.n)
    losses: dict[str, tuple[Loss, float | None]] = {
        "SmoothTopKLoss": (anyk.SmoothTopKLoss(K), 20),
        "TopKHingeLoss": (anyk.TopKHingeLoss(K), None),
        "TruncatedTopKEntropyLoss": (anyk.TruncatedTopKEntropyLoss(K), None),
    }
    if find_spec("difftopk") is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            from difftopk.smooth_topk import SmoothTopKLoss
        losses["difftopk's SmoothTopKLoss"] = (SmoothTopKLoss(case.n, K), None)
    rows = []
    for name, (loss, limit) in losses.items():
        progress(f"{name}, {case.batch} x {case.n}")
        steps = {CE: Step(torch.nn.CrossEntropyLoss(), scores, target), name: Step(loss, scores, target)}
        seconds = best_seconds(steps, plan.budget)
        rows.append([name, f"{seconds[CE] * 1e3:.3f}", *compared(seconds[name] / seconds[CE], limit)])
    return f"batch {case.batch}, n {case.n}, k {K}\n\n" + markdown_table(["", "CE ms", "target", "ratio", ""], rows)


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
    best = [min(run[i] for run in runs) for i in range(4)]
    names = ["import torch", "import anyk after it", "networks.splitter(65536, 8)", "the same again (cached)"]
    limits = [None, 0.3, 1.0, None]
    rows = []
    for name, seconds, limit in zip(names, best, limits, strict=True):
        judged = ["–", "–"] if limit is None else [f"< {limit} s", verdict(seconds < limit)]
        rows.append([name, f"{seconds:.3g} s", *judged])
    return markdown_table(["", "best", "target", ""], rows)


@dataclass(frozen=True)
class Growth:
    """One curve for each operator: milliseconds of the pure loss over a variable."""

    variable: str
    title: str
    points: tuple[int, ...]
    shape: Callable[[int], tuple[int, int, int]]  # point -> n, m, k


def growths(plan: Plan) -> list[Growth]:
    batch, n = plan.growth_batch, max(plan.growth_m)
    return [
        Growth("n", f"batch {batch}, m 16, k {K}", plan.growth_n, lambda n: (n, 16, K)),
        Growth("m", f"batch {batch}, n {n}, k {K}", plan.growth_m, lambda m: (n, m, K)),
        Growth("k", f"batch {batch}, n {n}, m 50", plan.growth_k, lambda k: (n, 50, k)),
    ]


def growth(plan: Plan, curve: Growth, plots: Path | None) -> str:
    """How the cost of the pure loss grows."""
    measured: list[dict[str, float]] = []
    for point in curve.points:
        progress(f"growth, {curve.variable} = {point}")
        n, m, k = curve.shape(point)
        scores, target = random_scores(plan.growth_batch, n)
        steps = {CE: Step(torch.nn.CrossEntropyLoss(), scores, target)}
        steps |= {name: Step(anyk_loss(name, m, PURE, k), scores, target) for name in GROWING}
        measured.append(best_seconds(steps, plan.growth_budget))
    rows = []
    for point, seconds in zip(curve.points, measured, strict=True):
        ratios = [f"{seconds[name] / seconds[CE]:.2f}" for name in GROWING]
        rows.append([point, f"{seconds[CE] * 1e3:.3f}", *ratios])
    text = f"{curve.title}\n\n" + markdown_table([curve.variable, "CE ms", *GROWING], rows)
    if plots is None:
        return text
    draw(curve, measured, plots / f"{curve.variable}.png")
    return f"{text}\n\n![time over {curve.variable}]({plots.name}/{curve.variable}.png)"


def draw(curve: Growth, measured: Sequence[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 4), layout="constrained")
    for name in (CE, *GROWING):
        style = "k--" if name == CE else "o-"
        axes.plot(curve.points, [seconds[name] * 1e3 for seconds in measured], style, label=name, markersize=3)
    axes.set(xscale="log", yscale="log", xlabel=curve.variable, ylabel="ms for a step", title=curve.title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, tiny budgets; needs --out")
    parser.add_argument("--out", type=Path, help="where the results go, with plots/ beside them")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out is None:
        parser.error("--quick needs --out: its numbers must not replace the results")
    plan = QUICK if arguments.quick else FULL
    out: Path = arguments.out or Path(__file__).parent / "results.md"
    plots = out.parent / "plots" if find_spec("matplotlib") is not None else None
    if plots is None:
        progress("matplotlib is not installed: no plots")

    torch.set_num_threads(1)
    start = time.perf_counter()
    load = os.getloadavg()[0]
    sections: list[tuple[str, Callable[[], str]]] = [
        (f"{TABLE}, allocator as it comes", lambda: table(plan)),
        (f"{TABLE}, freed memory kept", lambda: table_with_memory_kept(plan)),
        ("Where the time goes (one thread, multiples of cross-entropy)", lambda: where_the_time_goes(plan)),
        ("Beside difftopk (pure loss, one thread)", lambda: beside_difftopk(plan)),
        ("Two threads against one (default loss, splitter)", lambda: threads(plan)),
        ("Peak memory of a step (B batch, n classes, m candidates, 4 bytes each)", lambda: memory(plan)),
        ("Competing losses (one thread, multiples of cross-entropy)", lambda: baselines(plan)),
        ("Start-up", lambda: start_up(plan)),
    ]
    for curve in growths(plan):
        title = f"Growth with {curve.variable} (pure loss, one thread, multiples of cross-entropy)"
        sections.append((title, lambda curve=curve: growth(plan, curve, plots)))
    parts = []
    for title, measure in sections:
        parts.append(f"## {title}\n\n{measure()}\n")
        print(f"\n{parts[-1]}", flush=True)

    command = shlex.join(["python", "benchmarks/speed.py", *sys.argv[1:]])
    minutes = (time.perf_counter() - start) / 60
    head = [
        "# Speed and memory\n",
        f"{machine()}; load average at the start {load:.2f}; {minutes:.1f} minutes.\n",
        f"Command: `{command}`\n",
        f"A time is the best of many forward and backward passes in turns with cross-entropy; k = {K}, P_K uniform, float32.\n",
        "The first table comes twice. With the allocator as it comes, large blocks may go back to the system after a step and\n"
        "return by page faults, in cross-entropy too, and the ratios depend on it. Everything after the first table was\n"
        "measured with freed memory kept (measuring.py, keep_freed_memory), unless the second table says otherwise.\n",
    ]
    if arguments.quick:
        head.append("A quick run: small shapes and too few rounds. The numbers mean nothing, nor does met or not.\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([*head, *parts]))
    print(f"{minutes:.1f} minutes; written to {out}")


if __name__ == "__main__":
    main()
