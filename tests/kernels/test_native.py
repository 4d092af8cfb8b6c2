"""The native kernels give the plain code's numbers, for every loss, shape, dtype, layout and number of threads.

How near is in judge.py. That nothing outside is read or written is in test_sanitized.py.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anyk
from anyk import kernels, topk_cross_entropy, topk_error
from anyk.kernels import native
from anyk.registry import SWAPS
from judge import answer, arranged, assert_close, assert_same, by_kernel, kernel_only, plain, ties

if native.status():
    pytest.skip(f"the native library: {native.status()}", allow_module_level=True)

KINDS, WIRES = ("splitter", "bitonic", "odd_even"), ("target", "sorted", "given")
OPERATORS = {
    "neuralsort": anyk.NeuralSort,
    "softsort": anyk.SoftSort,
    "lapsum": anyk.LapSum,
    "ksubset": anyk.KSubset,
    **{
        f"{kind}-{swap}-{wires}": lambda t, kind=kind, swap=swap, wires=wires: anyk.SortingNetwork(kind, t, swap, wires)
        for kind in KINDS
        for swap in SWAPS
        for wires in WIRES
    },
}
FAMILIES = {
    "separate": {"top1": "separate"},
    "separate-candidates": {"top1": "separate", "softmax_over": "candidates"},
    "mixed": {"top1": "mixed"},
    "mixed-candidates": {"top1": "mixed", "softmax_over": "candidates"},
    "operator": {"top1": "operator"},
    "error": {"ce_weight": 0.2},
    "error-bare": {"ce_weight": 0.0, "q": 0.5},
    "error-log": {"ce_weight": 0.3, "q": 0.0},
    "error-smoothed": {"ce_weight": 0.4, "q": 0.7, "label_smoothing": 0.1},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_family = pytest.mark.parametrize("family", FAMILIES)
few_operators = pytest.mark.parametrize(
    "name", ["neuralsort", "softsort", "lapsum", "ksubset", "splitter-logistic-target", "odd_even-cauchy-given"]
)
# All pairs take minutes: what a family does with T does not depend on how a network came to it.
every_pair = pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family)
        for name in OPERATORS
        for family in FAMILIES
        if "-" not in name or name == "splitter-logistic-target" or family in ("mixed-candidates", "error-smoothed")
    ],
)
P_K = [0.3, 0.1, 0.0, 0.2, 0.4]


def loss_of(family: str, target: Tensor, p_k, operator: anyk.Operator, **settings):
    """The loss as a function of the scores."""
    which = topk_error if "ce_weight" in FAMILIES[family] else topk_cross_entropy
    return lambda scores: which(scores, target, p_k, operator, **FAMILIES[family], **settings)


def batch(rows=40, n=30, seed=0, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(rows, n, generator=generator) * 2).to(dtype)
    return scores, torch.randint(n, (rows,), generator=generator)


def random_order(scores: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """Places of the classes in a random order of each row that starts with its target."""
    drawn = torch.rand(scores.shape, generator=generator).scatter(-1, target[:, None], -1)
    return drawn.argsort(-1).argsort(-1)


# ---- the numbers --------------------------------------------------------------------------------------------------------


@every_pair
def test_every_loss(name, family):
    """40 rows are two blocks and a half."""
    operator = OPERATORS[name](0.7)
    scores, target = batch()
    for m in (None, 13):
        assert_same(loss_of(family, target, P_K, operator, m=m, reduction="none"), scores)
    scores, target = batch(n=7, dtype=torch.bfloat16, seed=1)
    groups = ties(scores, target)
    if not name.endswith(("sorted", "given")):  # there the place of a target among equals counts
        assert_same(loss_of(family, target, P_K, operator, m=6, reduction="mean"), scores, groups)


@every_pair
def test_padding(name, family):
    """From none to exactly k real classes, in one block of rows."""
    operator = OPERATORS[name](1.3)
    scores, target = batch(rows=24, n=12, seed=2)
    order = random_order(scores, target, torch.Generator().manual_seed(3))
    left = torch.arange(24) % 8 + 5
    scores = scores.masked_fill(order >= left[:, None], -torch.inf)
    for m in (None, 9):
        ours = assert_same(loss_of(family, target, P_K, operator, m=m, reduction="sum"), scores)
        assert (ours.gradient[scores == -torch.inf] == 0).all()
    whole = torch.where(order < 5, scores, -torch.inf)  # every row has k
    assert_same(loss_of(family, target, P_K, operator, reduction="none"), whole)


class Case:
    """A batch and a loss, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.seed = seed
        self.dtype = draw.choice((torch.float32, torch.float32, *DTYPES))
        self.family = draw.choice(list(FAMILIES))
        self.name = draw.choice([*OPERATORS, *[name for name in OPERATORS if "-" not in name] * 8])
        n = draw.choice([draw.randint(1, 5), draw.randint(6, 40), draw.choice([63, 64, 65, 130, 257, 600])])
        k = draw.randint(1, min(n, 8))
        self.m = draw.choice([None, "auto", draw.randint(k, min(n, 70))])
        rows = draw.choice([1, 2, 15, 16, 17, 33])

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        target = torch.randint(n, (rows,), generator=generator)
        self.kind = draw.choice(["normal", "wide", "ties", "equal", "ahead", "behind", "outlier", "padded", "shifted"])
        scores = normal(rows, n)
        if self.kind == "wide":
            scores = scores * 20
        elif self.kind == "ties":
            scores = scores.round()
        elif self.kind == "equal":
            scores = scores[:, :1].expand(rows, n)
        elif self.kind in ("ahead", "behind"):
            far = 10 ** torch.rand(rows, 1, generator=generator).mul(4)
            scores = scores.scatter(-1, target[:, None], far if self.kind == "ahead" else -far)
        elif self.kind == "outlier":
            scores = scores.scatter(-1, (target[:, None] + 1) % n, normal(rows, 1) * 1e4)
        elif self.kind == "padded":
            order = random_order(scores, target, generator)
            left = torch.randint(k, n + 1, (rows, 1), generator=generator)
            scores = scores.masked_fill(order >= left, -torch.inf)
        elif self.kind == "shifted":
            scores = scores + 100
        self.scores = scores.to(self.dtype)
        self.groups = ties(self.scores, target)
        self.ignore = draw.choice([-100, -100, 0, n - 1])
        self.weight = draw.choice([None, None, torch.float32, torch.float64, torch.bfloat16])
        weight = None if self.weight is None else torch.rand(n, generator=generator).to(self.weight)
        if self.family == "error-smoothed":
            weight = None  # the plain code's
        shares = torch.rand(k, generator=generator).add(0.01)
        p_k: object = (shares / shares.sum()).tolist()
        if draw.random() < 0.5:
            p_k = [0.0] * (k - 1) + [1.0]
        example = None
        self.p_k_of = draw.choice(["all", "all", "class", "row"])
        if self.p_k_of != "all":
            several = torch.rand(n if self.p_k_of == "class" else rows, k, generator=generator).softmax(-1)
            several[0] = torch.tensor([1.0] + [0.0] * (k - 1))
            p_k, example = (several, None) if self.p_k_of == "class" else (None, several)
        self.reduction = draw.choice(["mean", "sum", "none"])
        self.temperature = draw.choice([0.1, 1.0, 3.7])
        self.k, self.n = k, n
        self.target = target.to(draw.choice([torch.int64, torch.int32, torch.uint8]) if n < 256 else torch.int64)
        self.loss = loss_of(
            self.family, self.target, p_k, OPERATORS[self.name](self.temperature), m=self.m, ignore_index=self.ignore,
            weight=weight, example_p_k=example, reduction=self.reduction,
        )  # fmt: skip

    @property
    def is_cross_entropy(self) -> bool:
        return self.k == 1 and self.family in ("separate", "mixed")

    @property
    def has_ties(self) -> bool:
        by_score = self.scores.float().sort(-1).values
        return bool((by_score[:, 1:] == by_score[:, :-1]).any())

    @property
    def keeps_all(self) -> bool:
        return self.m is None or self.n <= (64 if self.m == "auto" else self.m)

    def __repr__(self) -> str:
        return str({name: value for name, value in vars(self).items() if name != "loss"})


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_generated(seed):
    case = Case(seed)
    if case.is_cross_entropy:
        return
    if not case.has_ties or case.name in ("lapsum", "ksubset") or case.name.endswith("target"):
        assert_same(case.loss, case.scores, case.groups)
        return
    # Which of equals is named first decides where the target starts in these networks, and which side of a kink the slope of
    # the others is taken on. The plain code names the first class first, if all are kept.
    ours, theirs, exact = (which(case.loss, case.scores) for which in (by_kernel, plain, plain_double))
    if case.keeps_all or not case.name.endswith(("sorted", "given")):
        assert_close("loss", ours.loss, theirs.loss, exact.loss, torch.float32)
    assert torch.equal(ours.loss.isfinite(), theirs.loss.isfinite())
    assert torch.equal(ours.gradient.isfinite(), theirs.gradient.isfinite())


def plain_double(loss, scores):
    return plain(loss, scores.double())


@every_operator
@pytest.mark.parametrize("family", ["separate", "mixed", "operator", "error"])
def test_far_behind(name, family):
    """The loss goes on growing, and the gradient is not dead, to 1e4 temperatures."""
    temperature = 0.5
    operator = OPERATORS[name](temperature)
    trails = torch.tensor([1.0, 10, 100, 1e3, 1e4])
    others = torch.arange(4, -11, -1) * 0.5
    scores = torch.cat([others.expand(5, 15), -trails[:, None]], -1) * temperature
    loss = loss_of(family, torch.full((5,), 15), [0.2] * 5, operator, reduction="none")
    ours = assert_same(loss, scores)
    assert (ours.loss.diff() > 0).all()
    assert (ours.gradient[1:, 15] < 0).all()


@few_operators
@every_family
def test_nan(name, family):
    """NaN in, NaN out, in its row alone; with a gradient of NaN, as the plain code has it for the candidates."""
    scores, target = batch(rows=20, n=300)
    for n, m in ((300, 8), (300, 100), (12, None)):
        row = scores[:, :n].clone()
        row[3, 5], row[7, n - 1], row[9], row[11, 0] = math.nan, math.nan, math.nan, -math.nan
        row[13, target[13] % n] = math.nan
        ours = by_kernel(loss_of(family, target % n, P_K, OPERATORS[name](1.0), m=m, reduction="none"), row)
        bad = [3, 7, 9, 11, 13]
        assert ours.loss.isnan().nonzero().flatten().tolist() == bad
        assert ours.gradient.isnan().any(-1).nonzero().flatten().tolist() == bad
        assert by_kernel(loss_of(family, target % n, P_K, OPERATORS[name](1.0), m=m), row).loss.isnan()


@few_operators
@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_infinite_scores(name, family, dtype):
    """What has overflown gives NaN, as in the plain code: a GradScaler must see it."""
    scores, target = batch(rows=20, n=40, dtype=dtype)
    scores[3, target[3]] = torch.inf
    scores[5, (target[5] + 1) % 40] = torch.inf
    for m in (None, 9):
        loss = loss_of(family, target, P_K, OPERATORS[name](1.0), m=m, reduction="none")
        ours, theirs = by_kernel(loss, scores), plain(loss, scores)
        assert ours.loss.isnan().nonzero().flatten().tolist() == [3, 5]
        assert torch.equal(theirs.loss.isnan(), ours.loss.isnan())
        assert torch.equal(theirs.gradient.isnan().any(-1), ours.gradient.isnan().any(-1))


@every_operator
def test_inclusion_through_the_loss(name):
    """T itself, as the operator has it in float64, also beside far outliers: 1 - T_j and -log T_j are losses."""
    scores, target = batch(rows=60, n=16)
    generator = torch.Generator().manual_seed(1)
    far = torch.rand(30, 16, generator=generator).argsort(-1)[:, :3]
    scores[30:] = scores[30:].scatter(-1, far, torch.randn(30, 3, generator=generator).sign() * 1e5)
    operator = OPERATORS[name](1.0)
    for k in (1, 2, 5):
        p_k = [0.0] * (k - 1) + [1.0]
        log_inclusion = operator.log_inclusion(scores.double(), target, k)[:, -1].clamp(max=0)
        with kernel_only():
            by_error = 1 - topk_error(scores, target, p_k, operator, ce_weight=0, reduction="none").double()
            by_log = topk_error(scores, target, p_k, operator, ce_weight=0, q=0, reduction="none").double()
        torch.testing.assert_close(by_error, log_inclusion.exp(), rtol=0, atol=1e-7)
        torch.testing.assert_close(by_log, -log_inclusion, rtol=1e-6, atol=1e-7)


@every_operator
def test_the_largest_scores(name):
    """As large as float32 has them, over small temperatures."""
    scores, target = batch(rows=16, n=12)
    scores = scores.clamp(-1, 1)
    padded = scores.masked_fill(torch.arange(12) > 8, -torch.inf)
    largest = 3e32 if name == "lapsum" else 3e38  # it holds its thresholds to 1e36
    for temperature, size in ((1e-3, largest), (1e-12, 3e20), (1.0, largest), (1e10, 1e-38)):
        for family in ("separate-candidates", "error-log"):
            for made, goal in ((scores * size, target), (padded * size, target % 9)):
                loss = loss_of(family, goal, P_K, OPERATORS[name](temperature), reduction="none")
                with kernel_only():
                    ours = loss(made)
                with anyk.backend("torch"):
                    assert_close("loss", ours, loss(made), loss(made.double()), torch.float32)


@few_operators
@pytest.mark.parametrize("family", ["separate", "operator", "error"])  # smoothed, the cross-entropy is infinite
@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_padding_with_the_least_number(name, family, temperature):
    """finfo.min, over a small temperature as well: no NaN in the plain code either."""
    scores, target = batch(rows=16, n=12)
    scores = scores.masked_fill(torch.arange(12) > 8, torch.finfo(torch.float32).min)
    loss = loss_of(family, target % 9, P_K, OPERATORS[name](temperature), reduction="none")
    ours, theirs = by_kernel(loss, scores), plain(loss, scores)
    torch.testing.assert_close(theirs.loss, ours.loss, rtol=1e-4, atol=1e-5)
    assert theirs.gradient.isfinite().all()


@pytest.mark.parametrize("n", [64, 257, 1000])
@pytest.mark.parametrize("smoothed", [False, True])
def test_a_target_that_is_well_ahead(n, smoothed):
    """Its softmax is near 1, and what is missing to 1 is its gradient."""
    scores, target = batch(rows=1000, n=n)
    rest = scores.scatter(-1, target[:, None], -torch.inf).logsumexp(-1)
    lead = torch.linspace(1, 8, 1000)
    scores = scores.scatter(-1, target[:, None], (rest + lead)[:, None])
    family = "error-smoothed" if smoothed else "error"
    loss = loss_of(family, target, [0.5, 0.5], anyk.KSubset(), m=20, reduction="sum")
    assert_same(loss, scores)


@pytest.mark.parametrize(
    ("operator", "m", "k"), [(anyk.KSubset(), 400, 100), *((anyk.SortingNetwork(kind), 600, 5) for kind in KINDS[:2])], ids=str
)
def test_many_candidates(operator, m, k):
    scores, target = batch(rows=17, n=1000)
    assert_same(loss_of("error", target, [0.0] * (k - 1) + [1.0], operator, m=m, reduction="none"), scores)


@pytest.mark.parametrize("family", ["operator", "separate", "error-smoothed"])
@pytest.mark.parametrize("n", [2 * 8192, 3 * 8192 + 21])
def test_rows_of_several_chunks(family, n):
    """The sums of a long row are made in chunks, each by the largest score so far."""
    scores, target = batch(rows=7, n=n)
    scores[1] = scores[1].sort().values  # the largest comes last, and in every chunk a larger one
    scores[2, : n // 2] = -math.inf  # a first chunk without any score
    target[2] = n - 1
    scores[3, -1] += 300  # all the sums before are nothing beside it
    scores[4] = scores[4].sort(descending=True).values
    scores[5, n // 3 :] = -math.inf
    target[5] = 5
    for operator in (anyk.LapSum(), anyk.SortingNetwork("splitter")):
        assert_same(loss_of(family, target, P_K, operator, m=16, reduction="none"), scores)
    scores[6, 9000] = math.nan
    loss = by_kernel(loss_of(family, target, P_K, anyk.LapSum(), m=16, reduction="none"), scores).loss
    assert loss.isnan().tolist() == [False] * 6 + [True]


@pytest.mark.parametrize("family", ["operator", "separate"])
def test_a_gradient_that_is_larger_than_the_caches(family):
    """It is written past them; rows of odd sizes start anywhere in a vector."""
    scores, target = batch(rows=129, n=65_537)
    loss = loss_of(family, target, P_K, anyk.LapSum(), m=16, reduction="sum")
    large = by_kernel(loss, scores).gradient
    for rows in (slice(0, 3), slice(126, 129)):
        part = loss_of(family, target[rows], P_K, anyk.LapSum(), m=16, reduction="sum")
        assert torch.equal(large[rows], by_kernel(part, scores[rows]).gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 2.0**14])
def test_half_precision_is_rounded_once(dtype, size):
    """Of the same scores in float32 the gradient is the same, but for its rounding, to the nearest, subnormals too. It is
    scaled before: 2^-20 would be nothing in float16, and what a GradScaler multiplies a loss with it must find there."""
    scores, target = batch(rows=33, n=75, dtype=dtype)
    for m in (None, 20):
        loss = loss_of("error-smoothed", target, P_K, anyk.LapSum(), m=m, reduction="none")
        half, whole = (by_kernel(loss, made, lambda result: torch.full_like(result, size)) for made in (scores, scores.float()))
        # The exponentials may be summed in another order.
        torch.testing.assert_close(half.loss, whole.loss, rtol=5e-7, atol=1e-7)
        spacing = torch.finfo(dtype).eps * whole.gradient.abs().clamp(min=torch.finfo(dtype).smallest_normal)
        assert ((half.gradient.float() - whole.gradient).abs() <= 0.5001 * spacing).all()


# ---- conventions --------------------------------------------------------------------------------------------------------


LAYOUTS = {
    "transposed": lambda s: s.t().contiguous().t(),
    "sliced": lambda s: torch.nn.functional.pad(s, (3, 2), value=math.nan)[:, 3:-2],
    "strided": lambda s: torch.stack([s, torch.full_like(s, math.nan)], -1)[..., 0],
    "every other row": lambda s: torch.stack([s, torch.full_like(s, math.nan)], 1)[:, 0],
    "offset": lambda s: torch.cat([s.new_full((1,), math.nan), s.flatten()])[1:].view(s.shape),
    "one row for all": lambda s: s[3].expand(s.shape),
    "flipped": lambda s: s.flip(0),
    "three dimensions": lambda s: s.reshape(4, -1, s.shape[1]).movedim(-1, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    """NaN lies beside what may be read."""
    scores, target = batch(rows=20, n=33, dtype=dtype)
    goal = target.reshape(4, 5) if layout == "three dimensions" else target
    for name in ("ksubset", "splitter-logistic-target", "lapsum"):
        for m, family in ((None, "separate"), (9, "error")):
            inner = loss_of(family, goal, P_K, OPERATORS[name](1.0), m=m, reduction="none")
            loss = lambda s, inner=inner: inner(LAYOUTS[layout](s))  # noqa: E731
            ours = by_kernel(loss, scores)
            assert ours.loss.isfinite().all()
            assert ours.gradient.isfinite().all()
            theirs, exact = plain(loss, scores), plain(loss, scores.double())
            assert_close("loss", ours.loss, theirs.loss, exact.loss, torch.float32)
            if layout != "one row for all":  # whose gradients are added up, in half precision too
                groups = ties(scores, target.flip(0) if layout == "flipped" else target)
                assert_close("gradient", *(arranged(a.gradient, groups) for a in (ours, theirs, exact)), dtype)
            elif dtype == torch.float32:
                torch.testing.assert_close(ours.gradient, exact.gradient.float(), rtol=1e-5, atol=1e-5)


def test_targets_in_every_layout():
    scores, target = batch(rows=20, n=33)
    expected = by_kernel(loss_of("error", target, P_K, anyk.LapSum(), reduction="none"), scores)
    wide = torch.full((20, 3), 10**6)
    wide[:, 1] = target
    for goal in (wide[:, 1], target.int(), target.short(), target.to(torch.uint8), wide[:, 1].int()):
        actual = by_kernel(loss_of("error", goal, P_K, anyk.LapSum(), reduction="none"), scores)
        assert torch.equal(actual.loss, expected.loss)
        assert torch.equal(actual.gradient, expected.gradient)
    same = loss_of("error", target[:1].expand(20), P_K, anyk.LapSum(), reduction="none")
    assert_same(same, scores)


# ---- gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [None, 9])
def test_incoming_gradients(m, dtype):
    scores, target = batch(n=20, dtype=dtype)
    groups = ties(scores, target)
    loss = loss_of("separate", target, P_K, anyk.KSubset(), m=m, reduction="none")
    wide = torch.linspace(-2, 2, 120).reshape(40, 3)
    for incoming in (
        lambda result: torch.ones(()).expand(40),
        lambda result: wide[:, 1],
        lambda result: torch.zeros(40),
        lambda result: wide.t().contiguous()[1].double().float(),
    ):
        assert_same(loss, scores, groups, incoming)
    huge = by_kernel(loss, scores, lambda result: torch.full((40,), 1e30))
    theirs = plain(loss, scores, lambda result: torch.full((40,), 1e30))
    torch.testing.assert_close(arranged(huge.gradient, groups), arranged(theirs.gradient, groups), rtol=1e-2, atol=1e24)
    assert (by_kernel(loss, scores, lambda result: torch.zeros(40)).gradient == 0).all()
    with kernel_only():
        leaf = scores.clone().requires_grad_()
        loss(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, by_kernel(loss, scores, torch.ones_like).gradient, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_retained_graph(dtype, reduction):
    """Twice the same bits: what was kept is not scaled in place."""
    scores, target = batch(n=50, dtype=dtype)
    leaf = scores.requires_grad_()
    with kernel_only():
        loss = loss_of("error", target, P_K, anyk.SortingNetwork(), m=20, reduction=reduction)(leaf)
    weights = torch.rand_like(loss)
    (first,) = torch.autograd.grad(loss, leaf, weights, retain_graph=True)
    kept = first.clone()
    (other,) = torch.autograd.grad(loss, leaf, 3 * weights, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf, weights)
    assert torch.equal(first, second)
    assert torch.equal(first, kept)
    assert not torch.equal(first, other)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaf, weights)


@few_operators
@pytest.mark.parametrize("family", ["separate", "mixed", "operator", "error", "error-smoothed"])
def test_second_derivatives_are_the_plain_ones(name, family):
    scores, target = batch(rows=4, n=9)
    direction = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    found = []
    for backend in ("torch", "native"):
        with anyk.backend(backend):
            leaf = scores.clone().requires_grad_()
            loss = loss_of(family, target, P_K, OPERATORS[name](1.0), m=7)(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
            (second,) = torch.autograd.grad((gradient * direction).sum(), leaf)
            found.append((gradient.detach(), second))
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1])


def test_scores_changed_in_between():
    scores, target = batch()
    scores.requires_grad_()
    for transposed in (False, True):
        between = (scores.t() if transposed else scores) * 1.0
        with kernel_only():
            loss = loss_of("error", target, P_K, anyk.LapSum(), m=9)(between.t() if transposed else between)
        between[0, 0] = 5
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_without_a_gradient():
    """The same loss, and nothing is kept for a backward pass."""
    scores, target = batch()
    loss = loss_of("error", target, P_K, anyk.KSubset(), m=9)
    leaf = scores.clone().requires_grad_()
    expected = loss(leaf)
    assert expected.requires_grad
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, kernel_only():
            actual = loss(leaf)
            assert torch.equal(actual, expected)
            assert not actual.requires_grad
    with kernel_only():
        assert loss(scores).grad_fn is None
        assert torch.equal(loss(torch.nn.Parameter(scores.clone())), expected)
    with torch.inference_mode():
        inside = scores.clone()
        assert torch.equal(loss(inside), expected)


# ---- what is wrong ------------------------------------------------------------------------------------------------------

_SCORES = torch.tensor([[0.0, 1, 2, 3], [3, -torch.inf, 1, -torch.inf]])
WRONG = {
    "too large": lambda: topk_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 4]), [0.5, 0.5]),
    "of bool": lambda: topk_error(torch.zeros(2, 4), torch.tensor([True, False]), [0.5, 0.5]),
    "padded": lambda: topk_error(_SCORES, torch.tensor([0, 1]), [0.5, 0.5]),
    "few classes": lambda: topk_error(_SCORES, torch.tensor([0, 0]), [0.3, 0.3, 0.4]),
    "example_p_k": lambda: topk_error(torch.zeros(2, 4), torch.tensor([0, 1]), None, example_p_k=torch.full((3, 2), 0.5)),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_the_plain_ones(case):
    with anyk.backend("torch"), pytest.raises((ValueError, TypeError)) as plain_error:
        WRONG[case]()
    with anyk.backend("native"), pytest.raises(type(plain_error.value)) as native_error:
        WRONG[case]()
    assert str(native_error.value) == str(plain_error.value)


# ---- the setting --------------------------------------------------------------------------------------------------------


def test_backend_as_a_setting_and_as_a_context():
    before = kernels._setting
    with anyk.backend("torch") as outer:
        assert kernels._setting == "torch"
        assert repr(outer) == "anyk.backend('torch')"
        with anyk.backend("native"):
            with pytest.raises(ZeroDivisionError), anyk.backend("auto"):
                _ = 1 / len(kernels._setting.removeprefix("auto"))
            assert kernels._setting == "native"
        assert kernels._setting == "torch"
    assert kernels._setting == before
    with outer:  # the same object again
        assert kernels._setting == "torch"
    assert kernels._setting == before
    try:
        anyk.backend("torch")
        assert kernels._setting == "torch"
    finally:
        anyk.backend(before)
    with pytest.raises(ValueError, match="name: expected one of 'auto', 'torch', 'native', 'triton', got 'cuda'"):
        anyk.backend("cuda")
    assert kernels._setting == before


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = Path(anyk.__file__).parent.parent
    surroundings = {**os.environ, "PYTHONPATH": str(source), **environment}
    return subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("native", "native"),
        ("", "auto"),
        ("fast", "ANYK_BACKEND: expected one of 'auto', 'torch', 'native', 'triton', got 'fast'"),
        ("triton", "ANYK_BACKEND=triton: anyk's triton kernels cannot be used: "),
    ],
)
def test_backend_of_the_environment(value, told):
    if value == "triton" and torch.cuda.is_available():
        pytest.skip("triton may be usable here")
    code = (
        "import torch, anyk\nanyk.topk_error(torch.randn(2, 9), torch.tensor([1, 2]), {3: 1.0})\nprint(anyk.kernels._setting)"
    )
    done = run(code, ANYK_BACKEND=value, TRITON_INTERPRET="0")
    assert told in done.stdout + done.stderr
    assert (done.returncode == 0) == (value in ("native", ""))


# ---- the best scores ----------------------------------------------------------------------------------------------------

SIZES = (*range(1, 71), 127, 128, 129, 130, 255, 256, 257, 258, 259, 260, 1000)


def assert_best(scores: Tensor, m: int, exact_classes: bool = True) -> None:
    classes = native.best(scores, m)
    assert classes is not None
    assert classes.shape == (*scores.shape[:-1], m)
    assert classes.dtype == torch.long
    expected = scores.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(scores.gather(-1, classes).float(), expected.values[..., :m])
    assert (classes.sort(-1).values.diff(dim=-1) > 0).all(), "a class twice"
    if exact_classes:  # the earlier of equals
        assert torch.equal(classes, expected.indices[..., :m])


def _partly_infinite(scores: Tensor) -> Tensor:
    chosen = torch.rand(scores.shape, generator=torch.Generator().manual_seed(3))
    return scores.masked_fill(chosen < 0.3, torch.inf).masked_fill(chosen > 0.6, -torch.inf)


PATTERNS = {
    "normal": lambda scores: scores,
    "ties": torch.round,
    "equal": lambda scores: torch.full_like(scores, -1.5),
    "ascending": lambda scores: scores.sort(-1).values,
    "descending": lambda scores: scores.sort(-1, descending=True).values,
    "infinite": _partly_infinite,
    "far apart": lambda scores: scores * 1e4,
    "largest last": lambda scores: torch.cat([scores[:, :-1], torch.full_like(scores[:, :1], 100)], -1),  # in no group
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_best(pattern, dtype):
    generator = torch.Generator().manual_seed(0)
    for n in SIZES:
        scores = PATTERNS[pattern](torch.randn(3, n, generator=generator)).to(dtype)
        for m in {1, 2, n // 8, n // 3, n // 2, n - 1, n} | ({5, 16, 64} if n > 70 else set()):
            if 0 < m <= n:
                assert_best(scores, m)
    scores = PATTERNS[pattern](torch.randn(2, 10450, generator=generator)).to(dtype)
    for m in (1, 5, 16, 17, 64, 65, 100, 205, 255, 257, 1000, 5000, 10450):
        assert_best(scores, m)
    for place in (0, 7, 8, 15, 16, 10440, 10449):  # one ahead, anywhere
        row = torch.randn(10450, generator=generator)
        row[place] = 50
        assert native.best(row.to(dtype), 1).item() == place


def test_best_of_zeros_and_subnormals():
    generator = torch.Generator().manual_seed(2)
    for n in (3, 16, 50, 300, 2000):
        signs = torch.randint(0, 2, (4, n), generator=generator).bool()
        zeros = torch.where(signs, torch.tensor(0.0), torch.tensor(-0.0))
        small = torch.randint(-3, 4, (4, n), generator=generator) * 2.0**-149
        for m in (1, 2, 3, n // 2, n - 1, n):
            if m:
                assert_best(zeros, m, exact_classes=False)
                assert_best(torch.where(signs, small, zeros), m, exact_classes=False)


def test_best_refuses_nan():
    for n in (1, 5, 64, 300, 5000):
        for place in (0, n // 2, n - 1):
            for value in (math.nan, -math.nan):
                scores = torch.randn(3, n)
                scores[1, place] = value
                for m in (1, n // 3, n):
                    if m:
                        assert native.best(scores, m) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_best_of_every_layout(dtype):
    scores = torch.randn(6, 100).to(dtype)
    cube = scores.reshape(2, 3, 100)
    for made in (scores.t().contiguous().t(), scores[:, 10:90], scores[::2], scores[0].expand(5, 100), scores[:, :1], scores[0],
                 scores[:0], cube, cube.transpose(0, 1)):  # fmt: skip
        assert_best(made, min(7, made.shape[-1]))


# ---- threads, processes, instruction sets -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ksubset", "lapsum", "splitter-logistic-target", "neuralsort", "softsort"])
def test_bits_do_not_depend_on_the_number_of_threads(name):
    scores, target = batch(rows=1000, n=700)
    scores[5, 3:] = -torch.inf  # one block of rows has padding
    target[5] = 0
    loss = loss_of("error", target, [0.5, 0.0, 0.5], OPERATORS[name](1.0), m=50)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found += [(*by_kernel(loss, scores), native.best(scores, 20)) for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for first, second in zip(found[0], other, strict=True):
            assert torch.equal(first, second)


def test_many_threads_at_once():
    cases = []
    for seed in range(8):
        scores, target = batch(rows=150 + seed, n=400, seed=seed)
        names = list(OPERATORS)
        cases.append((loss_of("separate", target, P_K, OPERATORS[names[seed * 7 % len(names)]](1.0), m=30 + seed), scores))
    before = torch.get_num_threads()
    with anyk.backend("native"):
        expected = [answer(*case) for case in cases]
        try:
            torch.set_num_threads(3)
            with ThreadPoolExecutor(8) as pool:
                for _ in range(5):
                    for one, other in zip(pool.map(lambda case: answer(*case), cases), expected, strict=True):
                        assert torch.equal(one.loss, other.loss)
                        assert torch.equal(one.gradient, other.gradient)
        finally:
            torch.set_num_threads(before)


FORKED = """
import multiprocessing, os, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of every fork of a process with threads
import torch, anyk
torch.set_num_threads(1)
scores = torch.randn(2000, 300, generator=torch.Generator().manual_seed(0)).requires_grad_()
target = torch.arange(2000) % 300

def compute(threads=4):
    # Several threads for the kernel alone: those of torch itself (OpenMP) do not survive a fork.
    torch.set_num_threads(threads)
    loss = anyk.topk_error(scores, target, {1: 0.5, 5: 0.5}, m=40)
    (gradient,) = torch.autograd.grad(loss, scores)
    torch.set_num_threads(1)
    return loss.item(), gradient.sum().item(), gradient[7, 7].item()

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
expected = compute(1)
assert threads() == before, "one thread starts no others"
torch.set_num_threads(4)
anyk.topk_error(scores[:100, :100], target[:100], {1: 0.5, 5: 0.5}, m=None)
torch.set_num_threads(1)
assert threads() == before, "so little work is not worth a thread"
assert compute() == expected
assert threads() == before + 3, "the parent has a pool"
for _ in range(5):
    child = os.fork()
    if not child:
        right = [threads() == 1, *(compute() == expected for _ in range(3)), threads() == 4]
        grandchild = os.fork()
        if not grandchild:
            os._exit(0 if compute() == expected else 3)
        right.append(os.waitpid(grandchild, 0)[1] == 0)
        os._exit(0 if all(right) else 3)
    assert compute() == expected
    assert os.waitpid(child, 0)[1] == 0, "a child"
with multiprocessing.get_context("fork").Pool(3) as pool:
    waiting = pool.map_async(compute, [4] * 12)
    assert all(compute() == expected for _ in range(5))
    assert waiting.get(60) == [expected] * 12
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and fork are Linux's")
def test_forked_processes():
    done = run(FORKED, ANYK_BACKEND="native")
    assert done.stdout == "done\n", done.stdout + done.stderr


@pytest.fixture
def variants():
    """Sets the instruction set by its number, 0 being the fastest; whether it runs here."""
    library = native._library
    assert library is not None
    yield library.use
    number = 0
    while not library.use(number):
        number += 1


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_every_instruction_set(variants, number):
    if not variants(number):
        pytest.skip("this machine has not got it")
    for name in OPERATORS:
        scores, target = batch(rows=20, n=70, seed=number)
        scores[2, 20:], target[2] = -torch.inf, 3
        for family in ("mixed-candidates", "error-smoothed"):
            assert_same(loss_of(family, target, P_K, OPERATORS[name](1.0), m=19, reduction="none"), scores)
    for dtype in DTYPES:
        scores, target = batch(rows=20, n=333, dtype=dtype)
        assert_same(loss_of("error", target, P_K, anyk.LapSum(), m=19, reduction="none"), scores, ties(scores, target))
        for n, m in ((1, 1), (5, 2), (33, 7), (64, 64), (333, 19), (333, 200), (5000, 64)):
            for made in (torch.randn(3, n), torch.randn(3, n).round(), torch.zeros(3, n)):
                assert_best(made.to(dtype), m)
