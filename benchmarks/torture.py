"""Generated torture: scores meant to break a loss, through every operator, top-1 mode and dtype, all of them counted.

A *case* is one row of scores with its target, in one operator, mode and dtype. Rows of one shape and temperature run as
one batch; all is drawn from ``--seed``. What is checked is in :func:`broken_inclusion` and :func:`broken_loss`, and for masks,
ranks, sorts, quantiles, samples and selections in ``torture_tools.py``.

    python benchmarks/torture.py [--quick] [--seed 0] [--only splitter/logistic] [--backend torch]

All of it runs once for each backend, with those cases alone that the backend computes. The native kernels are also held to the
plain code's losses, with its float64 as the judge. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
import torture_tools
from torch import Tensor

import anyk
from anyk.kernels import native
from anyk.registry import SWAPS

MODES = ("operator", "mixed", "separate", "error", "bounded")
"""those of topk_cross_entropy; topk_error with its defaults; topk_error without cross-entropy, with q = 1/2"""
BOUNDED = {"error": {}, "bounded": {"ce_weight": 0.0, "q": 0.5}}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
BACKENDS = ("torch", "native")
BATCHES, ROWS = 10, 20  # for each kind and dtype: 200 cases for each operator and mode
QUICK_BATCHES, QUICK_ROWS = 1, 8


# Operators ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """An operator under test, as ``make(temperature)``.

    ``tie_slope(temperature, m)`` bounds the gradient on equal scores; it is also the size of gradient beside which
    rounding is judged.
    """

    name: str
    make: Callable[[float], anyk.Operator]
    tie_slope: Callable[[float, int], float] = lambda temperature, m: 10 / temperature
    row_stochastic_only: bool = False
    exponential_tail: bool = True
    has_kernel: bool = True


def _art_tie_slope(temperature: float, m: int) -> float:
    # logistic_art is a function of d / t^2 and, at a tie, steeper than logistic by 4 times its slope there (31.6).
    zero = torch.zeros((), dtype=torch.float64)
    return 10 * 4 * SWAPS["logistic_art"].derivative(zero).item() / temperature**2


def _sinkhorn_tie_slope(temperature: float, m: int) -> float:
    # On equal scores the formula's slope is twice the distance of the first ranks' anchors from the mean anchor: m - 1 for
    # the first rank, which passes 10 from m = 11 on.
    return max(10, m) / temperature


def _network(kind: str, swap: str, **rest: object) -> Subject:
    return Subject(f"{kind}/{swap}", lambda t: anyk.SortingNetwork(kind, t, swap), **rest)  # type: ignore[arg-type]


SUBJECTS = (
    Subject("NeuralSort", lambda t: anyk.NeuralSort(t), lambda t, m: 2 * m / t, row_stochastic_only=True),
    Subject("SoftSort", lambda t: anyk.SoftSort(t), row_stochastic_only=True),
    Subject("Sinkhorn/all", lambda t: anyk.SinkhornSort(t), _sinkhorn_tie_slope, has_kernel=False),
    Subject("Sinkhorn/topk", lambda t: anyk.SinkhornSort(t, anchors="topk"), _sinkhorn_tie_slope, has_kernel=False),
    Subject("LapSum", lambda t: anyk.LapSum(t)),
    Subject("KSubset", lambda t: anyk.KSubset(t)),
    _network("splitter", "logistic"),
    _network("bitonic", "logistic"),
    _network("odd_even", "logistic"),
    _network("splitter", "logistic_art", tie_slope=_art_tie_slope, exponential_tail=False),
    *(_network("splitter", swap, exponential_tail=False) for swap in ("cauchy", "gaussian", "reciprocal", "optimal")),
)


# Cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    scores: Tensor  # already of the dtype under test
    target: Tensor
    p_k: list[float]
    m: int | None
    temperature: float
    flat: bool = False  # every row has equal scores

    @property
    def k(self) -> int:
        return len(self.p_k)


class Draw:
    """Seeded random numbers, in float64, within the range of the dtype they are meant for."""

    def __init__(self, seed: str, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        info = torch.finfo(dtype)
        self.dtype = dtype
        self.largest = min(30.0, math.log10(info.max) - 0.02)  # as exponents of ten
        self.smallest = max(-30.0, math.log10(info.tiny))
        self.subnormal = math.log10(info.tiny) + math.log10(info.eps) + 0.02

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integer(self, low: int, high: int) -> int:
        """low <= result < high"""
        return int(torch.randint(low, high, (), generator=self.generator))

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def permutations(self, rows: int, n: int) -> Tensor:
        return torch.rand(rows, n, generator=self.generator).argsort(-1)

    def magnitudes(self, low: float, high: float, *shape: int) -> Tensor:
        """Of either sign, the exponent uniform."""
        return 10 ** self.uniform(low, high, *shape) * (self.integers(2, *shape) * 2 - 1)

    def temperature(self) -> float:
        return 10 ** self.uniform(-3, 3).item()

    def p_k(self, k: int) -> list[float]:
        choice = self.integer(0, 4)
        if choice == 0 or k == 1:
            return [1 / k] * k
        if choice == 1:
            return [0.0] * (k - 1) + [1.0]
        if choice == 2:
            return [0.5] + [0.0] * (k - 2) + [0.5]
        weights = self.uniform(0.01, 1, k)
        return (weights / weights.sum()).tolist()

    def targets(self, rows: int, n: int) -> Tensor:
        return self.integers(n, rows)


# A pattern: (draw, number of the batch, target, n, k, temperature) -> scores (rows, n) in float64
Pattern = Callable[[Draw, int, Tensor, int, int, float], Tensor]


def huge(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    rows = len(target)
    if number % 2:
        return draw.magnitudes(draw.largest - 3, draw.largest, rows, n)
    size = 10 ** draw.uniform(4, draw.largest, rows, 1)
    return (size * draw.normal(rows, n) / 4).clamp(-(10**draw.largest), 10**draw.largest)


def tiny(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    return draw.magnitudes(draw.subnormal, draw.smallest, len(target), n)


def mixed(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    return draw.magnitudes(max(-30.0, draw.subnormal), draw.largest, len(target), n)


def ties(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    rows = len(target)
    scores = draw.normal(rows, n) * temperature
    if number % 4 == 0:  # pairs
        return scores.gather(-1, draw.permutations(rows, n) // 2)
    if number % 4 == 1:  # blocks of three values
        return scores.gather(-1, draw.integers(min(3, n), rows, n))
    # The target tied with any other class, or with the one on the border between in and out.
    border = scores.argsort(-1, descending=True)[:, min(k, n - 1)] if number % 4 == 2 else draw.integers(n, rows)
    return scores.scatter(-1, target[:, None], scores.gather(-1, border[:, None]))


def equal(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    return draw.magnitudes(max(-30.0, draw.subnormal), draw.largest, len(target), 1).expand(-1, n)


def zero(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    return torch.zeros(len(target), n, dtype=torch.float64)


def outlier_target(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    outlier = draw.magnitudes(2, draw.largest, len(target), 1)
    return draw.normal(len(target), n).scatter(-1, target[:, None], outlier)


def outlier_other(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    other = (target + draw.integer(1, max(n, 2))) % n
    return outlier_target(draw, number, other, n, k, temperature)


def padding(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    """From no padding to exactly k classes left, the target among them."""
    rows = len(target)
    left = torch.tensor([draw.integer(k, n + 1) for _ in range(rows)])
    left[0] = k
    order = draw.uniform(0, 1, rows, n).scatter(-1, target[:, None], -1.0).argsort(-1).argsort(-1)
    scores = draw.normal(rows, n) * 10 ** draw.uniform(-2, 2, rows, 1)
    return scores.masked_fill(order >= left[:, None], -torch.inf)


def gaps(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    jitter = draw.normal(len(target), n) if number % 2 else 0
    return (draw.permutations(len(target), n).double() * 1e4 + jitter) * temperature


def ordinary(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    return draw.normal(len(target), n) * 10 ** draw.uniform(-2, 2, len(target), 1)


def anything(draw: Draw, number: int, target: Tensor, n: int, k: int, temperature: float) -> Tensor:
    patterns = (ordinary, ties, huge, mixed, gaps, zero, outlier_target, tiny, padding, outlier_other, equal)
    return patterns[number % len(patterns)](draw, number // len(patterns), target, n, k, temperature)


Shape = tuple[int, int, int | None]  # n, k, m
SHAPES: tuple[Shape, ...] = ((7, 4, 6), (12, 3, None), (40, 5, 16), (16, 5, 16), (9, 8, None), (64, 10, 20))
WHOLE: tuple[Shape, ...] = tuple((n, n, n) for n in (5, 2, 9, 3, 16, 7, 8, 12, 4, 6))
SMALL: tuple[Shape, ...] = tuple(
    (n, k, m) for n in range(1, 6) for k in range(1, n + 1) for m in sorted({k, n}) if k in (1, 2, n - 1, n)
)
KINDS: dict[str, tuple[Pattern, tuple[Shape, ...]]] = {
    "huge": (huge, SHAPES),
    "tiny, subnormal": (tiny, SHAPES),
    "mixed magnitudes": (mixed, SHAPES),
    "ties": (ties, SHAPES),
    "all equal": (equal, SHAPES),
    "all zero": (zero, SHAPES),
    "outlier: target": (outlier_target, SHAPES),
    "outlier: other": (outlier_other, SHAPES),
    "-inf padding": (padding, SHAPES),
    "gaps of 1e4 t": (gaps, SHAPES),
    "k = m = n": (anything, WHOLE),
    "n = 1..5": (anything, SMALL),
    "t from 1e-3 to 1e3": (ordinary, SHAPES),
}


def batches(kind: str, dtype: torch.dtype, seed: int, number_of_batches: int, rows: int) -> Iterator[Batch]:
    draw = Draw(f"{seed}/{kind}/{dtype}", dtype)
    pattern, shapes = KINDS[kind]
    if kind == "n = 1..5" and number_of_batches > len(SMALL) // 4:  # all shapes, the same number of rows
        number_of_batches, rows = len(SMALL), math.ceil(number_of_batches * rows / len(SMALL))
    for number in range(number_of_batches):
        n, k, m = shapes[number % len(shapes)]
        temperature: float = draw.temperature() if number % 2 else 1.0
        if kind == "t from 1e-3 to 1e3":
            temperature = (1e-3, 1e3)[number] if number < 2 else draw.temperature()
        if kind == "gaps of 1e4 t" and dtype == torch.float16:
            temperature = min(temperature, 6e4 / 1e4 / n)  # else the scores are not finite in float16
        target = draw.targets(rows, n)
        scores = pattern(draw, number, target, n, k, temperature)
        bound = torch.finfo(dtype).max
        scores = torch.where(scores == -torch.inf, scores, scores.clamp(-bound, bound)).to(dtype)
        flat = bool((scores == scores[:, :1]).all())
        yield Batch(scores, target, draw.p_k(k), m, temperature, flat)


# Checks ---------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    losses: Tensor
    gradients: Tensor


def run(subject: Subject, batch: Batch, mode: str, scores: Tensor) -> Result:
    scores = scores.clone().requires_grad_()
    arguments = (scores, batch.target, batch.p_k, subject.make(batch.temperature))
    if mode in BOUNDED:
        losses = anyk.topk_error(*arguments, m=batch.m, reduction="none", **BOUNDED[mode])
    else:
        losses = anyk.topk_cross_entropy(*arguments, m=batch.m, top1=mode, reduction="none")
    losses.sum().backward()
    assert scores.grad is not None
    return Result(losses.detach(), scores.grad)


Broken = dict[str, Tensor]  # name of the check -> (rows,) True where it failed


def broken_inclusion(subject: Subject, batch: Batch) -> Broken:
    operator = subject.make(batch.temperature)
    inclusion = operator.inclusion(batch.scores, batch.target, batch.k)
    rounding = 1e-9 if inclusion.dtype == torch.float64 else 1e-5
    broken = {
        "T finite": ~inclusion.isfinite().all(-1),
        "T grows with k": (inclusion[:, 1:] < inclusion[:, :-1] * (1 - rounding)).any(-1),
    }
    if not subject.row_stochastic_only:
        broken["T in [0, 1]"] = ((inclusion < 0) | (inclusion > 1 + rounding)).any(-1)
    if batch.scores.dtype in HALF:
        exact = operator.inclusion(batch.scores.float(), batch.target, batch.k)
        broken["half T = float32 T"] = ~torch.isclose(inclusion, exact, rtol=1e-6, atol=0, equal_nan=True).all(-1)
    return broken


def broken_parity(subject: Subject, batch: Batch, mode: str, losses: Tensor) -> Tensor:
    """Where the kernel's loss is not the plain one: within 2e-6, where the plain one is within 1e-6 of float64."""
    with anyk.backend("torch"):
        plain = run(subject, batch, mode, batch.scores).losses.double()
        exact = run(subject, batch, mode, batch.scores.double()).losses
    apart = (losses.double() - plain).abs()
    held = (plain - exact).abs() <= 1e-6 * exact.abs()
    return held & ~((apart <= 2e-6 * plain.abs()) | (apart <= 1e-7))


def broken_loss(subject: Subject, batch: Batch, mode: str, backend: str) -> Broken:
    dtype = batch.scores.dtype
    result = run(subject, batch, mode, batch.scores)
    working = torch.promote_types(dtype, torch.float32)
    gradients = result.gradients.to(working)
    n = gradients.shape[-1]
    info = torch.finfo(dtype)
    broken = {
        "loss finite": ~result.losses.isfinite(),
        "loss >= 0": result.losses < 0,
        "loss <= 1 / q": result.losses > (2 * (1 + 1e-6) if mode == "bounded" else torch.inf),
        "dtypes": torch.full_like(batch.target, result.losses.dtype != working or result.gradients.dtype != dtype).bool(),
        "no gradient on padding": ((batch.scores == -torch.inf) & (gradients != 0)).any(-1),
    }
    if backend != "torch":
        broken["kernel loss = plain loss"] = broken_parity(subject, batch, mode, result.losses)
    fits = torch.ones_like(batch.target, dtype=torch.bool)
    if dtype in HALF:
        exact = run(subject, batch, mode, batch.scores.float())
        fits = ~exact.gradients.isfinite().all(-1) | (exact.gradients.abs().amax(-1) <= info.max)
        broken["half loss = float32 loss"] = ~torch.isclose(result.losses, exact.losses, rtol=1e-6, atol=1e-7, equal_nan=True)
        # The two parts of a loss may be rounded one by one: some units in the last place of the largest entry.
        near = 4 * info.eps * exact.gradients.abs().amax(-1) + 4 * info.tiny * info.eps
        apart = (gradients - exact.gradients).abs().amax(-1)
        broken["half gradient = float32 gradient"] = fits & exact.gradients.isfinite().all(-1) & ~(apart <= near)
    broken["gradient finite"] = fits & ~gradients.isfinite().all(-1)

    # A common shift of the scores changes nothing, so a row's gradient sums to zero.
    unit = subject.tie_slope(batch.temperature, n)
    largest = gradients.abs().amax(-1)
    relative = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, n * info.eps)
    allowed = relative * largest + torch.finfo(working).eps * (unit + 1) + n * info.tiny * info.eps
    broken["gradient sums to 0"] = fits & (gradients.double().sum(-1).abs() > allowed)

    if batch.flat:
        bound = subject.tie_slope(batch.temperature, batch.m or n)
        bound += 0.0 if mode in ("operator", "bounded") else 1.0  # the softmax part, which knows no temperature
        broken["gradient at ties"] = fits & (largest > bound)
    return broken


# The run --------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    cases: Counter[str] = field(default_factory=Counter)  # by kind
    failed: Counter[str] = field(default_factory=Counter)
    groups: Counter[tuple[str, str, str, str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, str, str, str], tuple[int, str]] = field(default_factory=dict)
    fewest: int = sys.maxsize
    calls: int = 0  # of a kernel
    left: int = 0  # by it to the plain code

    def note(self, subject: Subject, kind: str, mode: str, batch: Batch, broken: Broken) -> None:
        dtype = str(batch.scores.dtype).removeprefix("torch.")
        n = batch.scores.shape[-1]
        for check, rows in broken.items():
            if not rows.any():
                continue
            group = (subject.name, kind, mode, dtype, check)
            self.groups[group] += int(rows.sum())
            if group not in self.examples or n < self.examples[group][0]:
                self.examples[group] = (n, example(subject, batch, mode, int(rows.int().argmax())))


def example(subject: Subject, batch: Batch, mode: str, row: int) -> str:
    operator = subject.make(batch.temperature)
    values = str(batch.scores[row].tolist()).replace("inf", "float('inf')")
    scores = f"torch.tensor([{values}], dtype={batch.scores.dtype})"
    target = f"torch.tensor([{int(batch.target[row])}])"
    if mode == "T":
        return f"{operator}.inclusion({scores}, {target}, {batch.k})"
    if mode in BOUNDED:
        return f"topk_error({scores}, {target}, {batch.p_k}, {operator}, m={batch.m}, **{BOUNDED[mode]})"
    return f"topk_cross_entropy({scores}, {target}, {batch.p_k}, {operator}, m={batch.m}, top1={mode!r})"


def caught(check: Callable[[], Broken], batch: Batch) -> Broken:
    """An exception is a failure of the whole batch."""
    try:
        return check()
    except Exception as error:
        return {f"raised {type(error).__name__}: {error}": torch.ones_like(batch.target, dtype=torch.bool)}


def any_row(broken: Broken, batch: Batch) -> Tensor:
    return functools.reduce(torch.logical_or, broken.values(), torch.zeros_like(batch.target, dtype=torch.bool))


@contextlib.contextmanager
def counted(tally: Tally) -> Iterator[None]:
    """Counts what the native kernels were asked, and what they left to the plain code."""
    computed = native.loss

    def counting(*arguments: object) -> Tensor | None:
        result = computed(*arguments)  # type: ignore[arg-type]
        tally.calls += 1
        tally.left += result is None
        return result

    with mock.patch.object(native, "loss", counting):
        yield


def torture(tally: Tally, subjects: list[Subject], seed: int, quick: bool, backend: str) -> None:
    plain = backend == "torch"
    number_of_batches, rows = (QUICK_BATCHES, QUICK_ROWS) if quick else (BATCHES, ROWS)
    for number, (kind, dtype) in enumerate(itertools.product(KINDS, DTYPES)):
        if quick and (number + number // len(DTYPES)) % 2:  # two of the four dtypes, in turn
            continue
        if not plain and dtype not in native.DTYPES:
            continue
        drawn = list(batches(kind, dtype, seed, number_of_batches, rows))
        tally.fewest = min(tally.fewest, sum(len(batch.target) for batch in drawn))
        for subject, batch in itertools.product(subjects, drawn):
            # T itself is the plain code's in any case.
            inclusion = caught(functools.partial(broken_inclusion, subject, batch), batch) if plain else {}
            tally.note(subject, kind, "T", batch, inclusion)
            for mode in MODES:
                broken = caught(functools.partial(broken_loss, subject, batch, mode, backend), batch)
                tally.note(subject, kind, mode, batch, broken)
                tally.cases[kind] += len(batch.target)
                tally.failed[kind] += int((any_row(inclusion, batch) | any_row(broken, batch)).sum())


def print_tally(tally: Tally) -> None:
    print(f"at least {tally.fewest} cases for every operator, kind, mode and dtype that ran")
    print(f"\n{'kind':<20}{'cases':>12}{'failed':>9}")
    for kind in KINDS:
        print(f"{kind:<20}{tally.cases[kind]:>12,}{tally.failed[kind]:>9,}")
    print(f"{'all':<20}{tally.cases.total():>12,}{tally.failed.total():>9,}")
    if tally.calls:
        print(f"native kernels: {tally.calls:,} batches, of which {tally.left:,} were left to the plain code")
    if tally.groups:
        print("\nfailures: operator, kind, mode, dtype, check: cases")
    for group, number in sorted(tally.groups.items()):
        print(f"{', '.join(group)}: {number}\n    {tally.examples[group][1]}")


# Dead gradients -------------------------------------------------------------------------------------------------------

TRAILS = (10.0, 100.0, 1e3, 1e4)
TRAIL_P_K = ([0.2] * 5, [0.0, 0.0, 0.0, 0.0, 1.0])


def trailing(trail: float, temperature: float) -> Tensor:
    """Fifteen classes half a temperature apart, and the target (class 15) so many temperatures behind the fifth."""
    others = torch.arange(4, -11, -1) * 0.5
    return (torch.cat([others, torch.tensor([-trail])]) * temperature)[None]


def dead_gradients(subjects: list[Subject], temperature: float = 1.0) -> int:
    """Prints loss and gradient on a target that trails far behind, and returns how many lines failed."""
    print(f"\nDead gradients: m=16, k=5, float32, temperature {temperature:g}")
    print("(loss / gradient on the target times temperature)")
    print(f"{'operator':<22}{'mode':<10}{'P_K':<12}" + "".join(f"{f'{trail:g} behind':>22}" for trail in TRAILS))
    target, failures = torch.tensor([15]), 0
    unbounded = [mode for mode in MODES if mode != "bounded"]  # a bounded loss without cross-entropy lets go by design
    for subject, mode, p_k in itertools.product(subjects, unbounded, TRAIL_P_K):
        losses, slopes = [], []
        for trail in TRAILS:
            scores = trailing(trail, temperature)
            result = run(subject, Batch(scores, target, p_k, 16, temperature), mode, scores)
            losses.append(result.losses.item())
            slopes.append(result.gradients[0, 15].item() * temperature)
        grows = all(a < b < math.inf for a, b in itertools.pairwise(losses))
        alive = all(slope <= -1e-3 if subject.exponential_tail else slope < 0 for slope in slopes)
        failures += not (grows and alive)
        cells = "".join(f"{f'{loss:.4g} / {slope:.2g}':>22}" for loss, slope in zip(losses, slopes, strict=True))
        wrong = ["the loss does not grow"] * (not grows) + ["the gradient is dead"] * (not alive)
        verdict = f"   FAILED: {' and '.join(wrong)}" if wrong else ""
        print(f"{subject.name:<22}{mode:<10}{'[.2]*5' if p_k[0] else '[0,0,0,0,1]':<12}{cells}{verdict}")
    return failures


def small_inclusion(subjects: list[Subject], seed: int, rows: int) -> int:
    """Prints how far the float32 T is from the float64 one where that is above 1e-6; returns how many operators failed.

    The limit is 1e-5 relative, or the change of T when the scores move by one rounding of the largest, if that is more. A third
    of the rows have three classes far ahead or behind. These must cost nothing in a network whose swap has a light tail; other
    operators mix or add them to the rest, and there they count as the largest. NeuralSort is not held to it:
    its exponents are up to 2 (m + k) times a score, and float32 has no digits left for the rest.
    """
    print("\nT above 1e-6: largest relative difference of float32 from float64, over trailing and random rows (m=16, k=5)")
    draw = Draw(f"{seed}/small", torch.float32)
    size = 10 ** draw.uniform(-1, 1, rows, 1)
    ahead = torch.cat([trailing(trail, 1.0) for trail in torch.linspace(0, 40, 81).tolist()])
    far = draw.uniform(0, 1, rows, 16).argsort(-1)[:, :3]
    lead = 10 ** draw.uniform(2, 6, rows, 3) * draw.uniform(-1, 1, rows, 3).sign()
    random = (draw.normal(rows, 16) * size).float()
    scores = torch.cat([ahead, random, random.scatter(-1, far, lead.float())])
    target = torch.cat([torch.full((len(ahead),), 15), draw.targets(2 * rows, 16)])
    sizes = scores.double().abs().sort(-1).values
    failures = 0
    for subject in subjects:
        operator = subject.make(1.0)
        exact = scores.double().requires_grad_()
        log_formula = operator.log_inclusion(exact, target, 5)
        slopes = [torch.autograd.grad(column.sum(), exact, retain_graph=True)[0] for column in log_formula.unbind(-1)]
        counts = sizes[:, 12] if subject.name.split("/")[-1] in ("logistic", "logistic_art", "gaussian") else sizes[:, -1]
        rounding = torch.finfo(torch.float32).eps * counts
        moved = torch.stack([slope.abs().sum(-1) * rounding for slope in slopes], -1)
        formula = log_formula.detach().exp()
        counted = formula > 1e-6
        if subject.name == "NeuralSort":
            counted[-rows:] = False
        error = (operator.inclusion(scores, target, 5) - formula).abs() / formula
        over = int((counted & ~(error <= moved.expm1().clamp(min=1e-5))).sum())
        failures += over > 0
        verdict = f"   FAILED: {over} values" if over else ""
        print(
            f"{subject.name:<22}{error[counted].max().item():10.1e}   above 1e-5: {int((counted & (error > 1e-5)).sum())} of "
            f"{int(counted.sum())}   smallest T {formula[counted].min().item():.1e}{verdict}"
        )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small share of the cases, some 20 s")
    parser.add_argument("--only", choices=[subject.name for subject in SUBJECTS], help="one operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=BACKENDS, help="one of them; without it both in turn")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "SinkhornSort: .* did not converge")
    failures = 0
    for backend in BACKENDS if arguments.backend is None else (arguments.backend,):
        if backend == "native" and native.status():
            print(f"\nno native kernels: {native.status()}")
            failures += arguments.backend is not None
            continue
        with anyk.backend(backend):
            failures += one_backend(backend, arguments.only, arguments.seed, arguments.quick)
    print("no failure" if failures == 0 else f"{failures} kinds of failure, see above")
    return int(failures > 0)


def one_backend(backend: str, only: str | None, seed: int, quick: bool) -> int:
    """How many kinds of failure there are."""
    print(f"\nbackend: {backend}")
    started = time.perf_counter()
    subjects = [subject for subject in SUBJECTS if only in (None, subject.name) and (backend == "torch" or subject.has_kernel)]
    if not subjects:
        print(f"{only} has no kernel")
        return 0
    tally = Tally()
    with counted(tally):
        torture(tally, subjects, seed, quick, backend)
    print_tally(tally)
    failures = len(tally.groups) + sum(dead_gradients(subjects, temperature) for temperature in (0.01, 1.0, 100.0))
    if backend == "torch":
        failures += small_inclusion(subjects, seed, 200 if quick else 2000)
    if only is None:
        failures += torture_tools.torture(seed, quick, backend)
    print(f"\nseed {seed}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s")
    return failures


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
