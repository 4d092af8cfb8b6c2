"""Speed, memory and launches of masks, ranks, sorts, quantiles and samples, beside what people use today.

    python benchmarks/tools.py [--quick] [--out benchmarks/tools.md]

Forward and backward of sum(w * result), as multiples of torch.topk (ranks and sort: of torch.sort) in the same run; one thread
and float32, unless a row says otherwise. The plain code in brackets. Memory is the most that is held at once beside the scores,
the result and the gradient, in bytes a score; the native kernels take a few blocks of rows for each thread more.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from measuring import Step, best_seconds, keep_freed_memory, machine, markdown_table, peak_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import anyk
from anyk import checks

SHAPES = (((64, 1000), 32), ((8, 16384), 256), ((1, 1_000_000), 1000))
MOST = {"KSubset": 200_000, "sample": 200_000, "network": 64_000, "subset operator": 140_000, "perturbed": 140_000}
"""numbers of scores up to which a row is measured: beyond it takes seconds, or more memory than there is"""
Tool = Callable[[Tensor], Tensor]


# What people copy, from the papers ------------------------------------------------------------------------------------


def straight_through(scores: Tensor, k: int) -> Tensor:
    """A hard mask with the gradient of the softmax."""
    soft = scores.softmax(-1)
    hard = torch.zeros_like(soft).scatter(-1, scores.topk(k).indices, 1.0)
    return hard + soft - soft.detach()


def subset_operator(scores: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """The relaxed top-k of "Reparameterizable Subset Sampling via Continuous Relaxations" (2019), without its noise."""
    mask, softmax = torch.zeros_like(scores), torch.zeros_like(scores)
    for _ in range(k):
        scores = scores + torch.log((1 - softmax).clamp(min=torch.finfo(scores.dtype).tiny))
        softmax = (scores / temperature).softmax(-1)
        mask = mask + softmax
    return mask


class _Perturbed(torch.autograd.Function):
    """The mean of the hard masks of perturbed scores; the gradient is a mean over the same noise."""

    @staticmethod
    def forward(ctx, scores, k, samples, sigma):  # type: ignore[no-untyped-def]
        noise = torch.randn(samples, *scores.shape)
        chosen = (scores + sigma * noise).topk(k).indices
        hot = torch.zeros_like(noise).scatter(-1, chosen, 1.0)
        ctx.save_for_backward(noise, hot)
        ctx.sigma = sigma
        return hot.mean(0)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        noise, hot = ctx.saved_tensors
        return ((hot * gradient).sum(-1, keepdim=True) * noise).mean(0) / ctx.sigma, None, None, None


def perturbed(scores: Tensor, k: int, samples: int = 100, sigma: float = 0.5) -> Tensor:
    """ "Differentiable Patch Selection for Image Recognition" (2021), as a mask."""
    result: Tensor = _Perturbed.apply(scores, k, samples, sigma)  # type: ignore[no-untyped-call]
    return result


def peers(k: int) -> dict[str, Tool]:
    found: dict[str, Tool] = {
        "hard mask, softmax straight-through": lambda scores: straight_through(scores, k),
        "subset operator (relaxed top-k)": lambda scores: subset_operator(scores, k),
        "perturbed top-k, 100 samples": lambda scores: perturbed(scores, k),
    }
    if importlib.util.find_spec("entmax"):
        from entmax import budget_bisect

        found["entmax.budget_bisect, 24 iterations"] = lambda scores: budget_bisect(scores, budget=k, dim=-1, n_iter=24)
    return found


def tools(k: int) -> dict[str, Tool]:
    return {
        "soft_topk, LapSum": lambda scores: anyk.soft_topk(scores, k),
        "soft_topk, Permutahedron": lambda scores: anyk.soft_topk(scores, k, "permutahedron"),
        "soft_topk, SinkhornSort": lambda scores: anyk.soft_topk(scores, k, "sinkhorn"),
        "soft_topk, KSubset": lambda scores: anyk.soft_topk(scores, k, "ksubset"),
        "soft_topk, splitter network": lambda scores: anyk.soft_topk(scores, k, "splitter"),
        "sample_k_subset, exact": lambda scores: anyk.sample_k_subset(scores, k),
        "sample_k_subset, gumbel": lambda scores: anyk.sample_k_subset(scores, k, method="gumbel"),
        "soft_quantile, q = 1 - k/n": lambda scores: anyk.soft_quantile(scores, 1 - k / scores.shape[-1]),
        "soft_quantile, q = 0.5": lambda scores: anyk.soft_quantile(scores, 0.5),
        "soft_rank, LapSum": lambda scores: anyk.soft_rank(scores),
        "soft_rank, Permutahedron": lambda scores: anyk.soft_rank(scores, "permutahedron"),
        "soft_sort, Permutahedron": lambda scores: anyk.soft_sort(scores),
    }


def fits(name: str, scores: Tensor) -> bool:
    return all(part not in name or scores.numel() <= most for part, most in MOST.items())


def step(make: Tool, scores: Tensor, **more: object) -> Step:
    weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores.dtype)

    def loss(scores: Tensor, weight: Tensor) -> Tensor:
        result = make(scores)
        return (result * weight[..., : result.shape[-1]].to(result.dtype)).sum() if result.ndim == 2 else result.sum()

    return Step(loss, scores, weight, **more)  # type: ignore[arg-type]


# Speed and memory -----------------------------------------------------------------------------------------------------


def measure(shape: tuple[int, int], k: int, budget: float) -> dict[str, str]:
    """The cells of one shape: multiples and bytes."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    half = scores.detach().bfloat16().requires_grad_()
    steps = {
        "torch.topk": step(lambda scores: scores.topk(k).values, scores),
        "torch.sort": step(lambda scores: scores.sort().values, scores),
    }
    ours = {name: make for name, make in tools(k).items() if fits(name, scores)}
    theirs = {name: make for name, make in peers(k).items() if fits(name, scores)}
    for name, make in ours.items():
        steps[name] = step(make, scores, backend="native")
        steps[f"{name} (plain)"] = step(make, scores)
        if name.startswith(
            ("soft_topk, LapSum", "soft_topk, Perm", "soft_rank", "soft_sort", "soft_topk, KS", "sample_k_subset, e")
        ):
            steps[f"{name}, bfloat16"] = step(make, half, backend="native")
            steps[f"{name}, two threads"] = step(make, scores, backend="native", threads=2)
    steps |= {name: step(make, scores) for name, make in theirs.items()}
    seconds = best_seconds(steps, budget)
    cells: dict[str, str] = {f"torch.{name}, ms": f"{1e3 * seconds[f'torch.{name}']:.2f}" for name in ("topk", "sort")}
    for name in steps:
        if name.startswith("torch.") or name.endswith("(plain)"):
            continue
        of = seconds["torch.sort" if name.startswith(("soft_rank", "soft_sort")) else "torch.topk"]
        plain = f" ({seconds[f'{name} (plain)'] / of:.2g})" if f"{name} (plain)" in seconds else ""
        cells[name] = f"{seconds[name] / of:.2f}{plain}"
        if "threads" in name or "bfloat16" in name:
            continue
        # result and gradient are what any implementation has to hold; a mask is as large as the scores
        outputs = (2 if "quantile" not in name else 1) * scores.numel() * 4
        bytes_each = [
            max(0, peak_bytes(steps[each]) - outputs) / scores.numel() for each in (name, f"{name} (plain)") if each in steps
        ]
        plain = f" ({bytes_each[1]:.0f})" if len(bytes_each) > 1 else ""
        cells[f"{name}, bytes a score"] = f"{bytes_each[0]:.0f}{plain}"
    return cells


def sums(k: int) -> Iterator[list[str]]:
    """Whether a mask is one: its sum and its largest entry, on ordinary scores and where two are far ahead."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.randn(4, 50, generator=generator)
    ahead = ordinary.clone()
    ahead[:, :2] += 100
    masks = {name: make for name, make in tools(k).items() if name.startswith(("soft_topk", "sample"))}
    for name, make in (masks | peers(k)).items():
        cells = [name]
        for scores in (ordinary, ahead, ordinary.masked_fill(torch.arange(50) > 40, -torch.inf)):
            mask = make(scores.clone().requires_grad_()).detach().double()
            cells.append(f"{mask.sum(-1).min():.4g} to {mask.sum(-1).max():.4g}, {mask.max():.3g}")
        yield cells


class _Given(torch.autograd.Function):
    """A mask and its gradient that are there already: what is left of a step without the work of the mask."""

    @staticmethod
    def forward(ctx, scores):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(scores)
        return torch.empty_like(scores)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (scores,) = ctx.saved_tensors
        return torch.empty_like(scores)


def threads(shape: tuple[int, int], k: int, budget: float) -> Iterator[list[str]]:
    """Where the time of a mask goes with one thread and with two, in microseconds: the step; the same step with a mask that
    costs nothing; the mask, which is the difference. And how much faster two threads could be if they halved the mask alone."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    masks = {name: make for name, make in tools(k).items() if name.startswith(("soft_topk, LapSum", "soft_topk, Perm"))}
    rest: Tool = lambda scores: _Given.apply(scores)  # type: ignore[no-untyped-call]  # noqa: E731
    steps = {
        f"{name} {count}": step(make, scores, backend="native", threads=count)
        for name, make in (masks | {"rest": rest}).items()
        for count in (1, 2)
    }
    found = {name: 1e6 * seconds for name, seconds in best_seconds(steps, budget).items()}
    one, two = found["rest 1"], found["rest 2"]
    for name in masks:
        alone, both = found[f"{name} 1"], found[f"{name} 2"]
        pairs = [(alone, both), (one, two), (alone - one, both - two)]
        cells = [f"{first:.0f}, {second:.0f} ({first / second:.2f})" for first, second in pairs]
        yield [f"{name}, {shape[0]} x {shape[1]}", *cells, f"{alone / ((alone - one) / 2 + two):.2f}"]


# Launches -------------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts the operators that are dispatched, but for those that only make a view, and what makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        name = function.__name__.split(".")[0]
        self.waits += name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
        self.launches += not function.is_view and name not in ("detach", "empty", "_local_scalar_dense")
        return function(*arguments, **(keywords or {}))


def launches(make: Tool, shape: tuple[int, int]) -> tuple[int, int, int]:
    """Of forward and backward, as on a device whose values may not be looked at; and the host's waits."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with mock.patch.object(checks, "readable", return_value=False):
        with Counting() as forward:
            result = make(scores)
        with Counting() as backward:
            result.sum().backward()
    return forward.launches, backward.launches, forward.waits + backward.waits


def graphs(make: Tool, shape: tuple[int, int]) -> int:
    made = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(make, fullgraph=True, backend=backend)(torch.randn(shape, requires_grad=True))
    return len(made)


def launch_rows(quick: bool) -> Iterator[list[str]]:
    k = 5
    for name, make in tools(k).items():
        small, large = launches(make, (4, 50)), launches(make, (16, 1000))
        number = [f"{a}" if a == b else f"{a} at 50, {b} at 1000" for a, b in zip(small, large, strict=True)]
        traced = "–" if quick and "LapSum" not in name else str(graphs(make, (4, 50)))
        yield [name, *number, traced]


# The page -------------------------------------------------------------------------------------------------------------


NOT_MEASURED = "Not measured: SoftTorch asks for Python 3.12 or newer; torchsort wants a compiler and CUDA_HOME."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, for the code and not for the figures")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    shapes = [((4, 50), 5)] if given.quick else SHAPES
    columns = [measure(shape, k, 0.2 if given.quick else 60.0) for shape, k in shapes]
    parts = [list(threads(shape, k, 0.2 if given.quick else 20.0)) for shape, k in shapes[-2:]]
    names = list(dict.fromkeys(name for column in columns for name in column))
    names.sort(key=lambda name: name.endswith("bytes a score"))
    titles = [f"{b} x {n}, k {k}" for (b, n), k in shapes]
    timed = [[name, *(column.get(name, "–") for column in columns)] for name in names if not name.endswith("bytes a score")]
    held = [
        [name.removesuffix(", bytes a score"), *(column.get(name, "–") for column in columns)]
        for name in names
        if name.endswith("bytes a score")
    ]
    page = "\n\n".join(
        [
            "# Masks, ranks, sorts and samples",
            (__doc__ or "").strip(),
            f"{machine()}. {NOT_MEASURED}".strip(),
            "## Time\n\n" + markdown_table(["multiples of torch.topk; ranks and sort, of torch.sort", *titles], timed),
            "## Two threads\n\nMicroseconds with one thread, with two, and the ratio. Most: the ratio of the step if "
            "two threads halved the mask and nothing else.\n\n"
            + markdown_table(["", "step", "step without the mask", "mask", "most"], [row for each in parts for row in each]),
            "## Memory\n\n" + markdown_table(["bytes a score beside input, result and gradient (plain code)", *titles], held),
            "## Sums\n\nThe least and the largest sum of a row, and the largest entry: 4 x 50, k 5.\n\n"
            + markdown_table(["", "ordinary scores", "two 100 ahead", "-inf after the 41st"], sums(5)),
            "## Launches\n\nOperators that the plain code dispatches, views not counted, as on a device whose values are not "
            "looked at: that many kernels are launched on CUDA. Times that the host waits. Graphs of "
            "`torch.compile(fullgraph=True)`.\n\n"
            + markdown_table(["", "forward", "backward", "host waits", "graphs"], launch_rows(given.quick)),
        ]
    )
    if given.out:
        given.out.write_text(page + "\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
