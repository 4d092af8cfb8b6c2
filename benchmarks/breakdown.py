"""Where the time of a training step goes, and what of it no loss that ranks the best classes can go below.

    python benchmarks/breakdown.py [--seconds 3]       prints the tables; speed.py has them in benchmarks/results.md too

All in multiples of torch.nn.CrossEntropyLoss, forward and backward, measured in turns with it: float32, one thread, k = 5,
P_K uniform. The parts are what the loss calls, each on its own with its input in place. In the whole step they find the
caches and the branch predictor less well prepared: that difference is in the rest, with the checks of the arguments.

(Not profile.py: the standard library has a module of that name, which torch imports by way of cProfile.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measuring import Loss, Step, best_seconds, keep_freed_memory, machine, markdown_table, random_scores
from torch import Tensor

import anyk
from anyk import SoftSort, SortingNetwork, candidates
from anyk.losses import _log_mean

K = 5


class Shape(NamedTuple):
    batch: int
    n: int
    m: int | None

    def __str__(self) -> str:
        return f"{self.batch}, {self.n}, {self.m or 'none'}"


SHAPES = (Shape(500, 1000, 16), Shape(500, 10450, 50), Shape(100, 100, None), Shape(128, 100000, 50))
OPERATORS: dict[str, Callable[[], anyk.Operator]] = {"splitter": lambda: SortingNetwork("splitter"), "SoftSort": SoftSort}


@dataclass(frozen=True)
class Forward(Step):
    """The forward pass alone, of anything."""

    def run(self) -> None:
        self.loss(self.scores, self.target)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.loss(self.scores, self.target)
        return time.perf_counter() - start


@dataclass(frozen=True)
class Backward(Step):
    """The backward pass alone."""

    def seconds(self) -> float:
        self.scores.grad = None
        result = self.loss(self.scores, self.target)
        start = time.perf_counter()
        result.backward()
        return time.perf_counter() - start


def breakdown(shapes: Sequence[Shape] = SHAPES, budget: float = 3.0) -> str:
    """Two tables as Markdown; ``budget`` is in seconds for each line of the first, and for each of the second."""
    header = ["batch, n, m", "operator", "CE ms", "selection", "operator forward", "backward", "P_K and log", "(B, n) gradient"]
    header += ["rest", "pure", "cross-entropy part", "default"]
    parts = [parts_of(shape, name, budget) for shape in shapes for name in OPERATORS]
    floors = [floor_of(shape, budget) for shape in shapes]
    floor_header = [
        "batch, n, m",
        "torch.topk",
        "our selection",
        "maximum of each row",
        "(B, n) gradient",
        "selection + gradient",
    ]
    return (
        f"{markdown_table(header, parts)}\n\n"
        "The same unit. The selection and the gradient of all scores are there whatever ranks the candidates; torch.topk is\n"
        "what the selection replaces, one maximum is what a pass over the scores costs.\n\n"
        f"{markdown_table(floor_header, floors)}"
    )


def parts_of(shape: Shape, name: str, budget: float) -> list[str]:
    batch, n, m = shape
    scores, target = random_scores(batch, n)
    operator = OPERATORS[name]()
    kept = candidates.select(scores.detach(), target, m)
    best = kept.scores.requires_grad_()
    p_k = torch.full((K,), 1 / K)

    def log_inclusion(best: Tensor, position: Tensor) -> Tensor:
        return operator.candidate_log_inclusion(best, position, None, K)

    result = log_inclusion(best, kept.position).detach()
    steps = {
        "CE": Step(torch.nn.CrossEntropyLoss(), scores, target),
        "selection": selection(shape, scores, target),
        "forward": Forward(log_inclusion, best, kept.position),
        "backward": Backward(lambda *inputs: log_inclusion(*inputs).mean(), best, kept.position),
        "log": Step(lambda log_t, _: -_log_mean(p_k, log_t).mean(), result.requires_grad_(), target),
        "gradient": gradient(scores, kept.classes),
    }
    for top1 in ("operator", "separate"):
        steps[top1] = Step(anyk.TopKCrossEntropyLoss(p_k, operator, m=m, top1=top1), scores, target)
    seconds = best_seconds(steps, budget)
    unit = seconds.pop("CE")
    pure, default = seconds.pop("operator"), seconds.pop("separate")
    cells = [*seconds.values(), pure - sum(seconds.values()), pure, default - pure, default]
    return [str(shape), name, f"{unit * 1e3:.3f}", *(f"{cell / unit:.2f}" for cell in cells)]


def floor_of(shape: Shape, budget: float) -> list[str]:
    batch, n, m = shape
    scores, target = random_scores(batch, n)
    steps = {
        "CE": Step(torch.nn.CrossEntropyLoss(), scores, target),
        "topk": Forward(lambda scores, _: scores.detach().topk(m or n).values, scores, target),
        "selection": selection(shape, scores, target),
        "maximum": Forward(lambda scores, _: scores.detach().amax(-1), scores, target),
        "gradient": gradient(scores, candidates.select(scores.detach(), target, m).classes),
    }
    seconds = best_seconds(steps, budget)
    unit = seconds.pop("CE")
    cells = [*seconds.values(), seconds["selection"] + seconds["gradient"]]
    return [str(shape), *(f"{cell / unit:.2f}" for cell in cells)]


def selection(shape: Shape, scores: Tensor, target: Tensor) -> Step:
    return Forward(lambda scores, target: candidates.choose(scores, target, shape.m)[0], scores, target)


def gradient(scores: Tensor, classes: Tensor) -> Step:
    """The candidates' scores, and what comes back for them as a gradient of all scores."""
    taken: Loss = lambda scores, classes: scores.gather(-1, classes).mean()  # noqa: E731
    return Step(taken, scores, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{machine()}\n\n{breakdown(budget=arguments.seconds)}")


if __name__ == "__main__":
    main()
