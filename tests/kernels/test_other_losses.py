"""What else the native kernels compute: the smooth top-k loss, and the losses of candidates that a head has found."""

import itertools

import pytest
import torch

import anyk
from anyk import kernels
from anyk.kernels import native

pytestmark = pytest.mark.skipif(bool(native.status()), reason=f"native kernels: {native.status()}")


def smooth_scores(kind: str, n: int, k: int, target: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(target), n, generator=generator)
    if kind == "far apart":
        return scores * 1000
    if kind == "close":
        return scores * 0.1
    if kind == "ahead":
        return scores.scatter(1, target[:, None], scores.amax(1, keepdim=True) + 1)
    if kind == "padded":
        left = torch.rand(scores.shape, generator=generator).scatter(1, target[:, None], 2.0).topk(min(n, k + 2), 1).indices
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).scatter(1, left, False), -torch.inf)
    return scores


def both(loss, scores, target):
    """(loss, gradient) by the kernel, by the plain code, and by the plain code in float64."""
    found = []
    for backend, dtype in (("native", torch.float32), ("torch", torch.float32), ("torch", torch.float64)):
        leaf = scores.detach().clone().to(dtype).requires_grad_()
        with anyk.backend(backend):
            value = loss(leaf, target)
            value.sum().backward()
        found.append((value.detach().double(), leaf.grad.double()))
    return found


@pytest.mark.parametrize("kind", ["plain", "close", "far apart", "ahead", "padded"])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_smooth_is_the_plain_one(kind, k):
    for number, (n, temperature, threshold, reduction) in enumerate(
        itertools.product((k + 1, k + 2, 20, 300), (1.0, 0.1), (1e3, None), ("none", "mean"))
    ):
        target = torch.randint(n, (9,), generator=torch.Generator().manual_seed(number))
        scores = smooth_scores(kind, n, k, target, number)
        weight = torch.rand(n) if number % 2 else None
        loss = anyk.SmoothTopKLoss(k, temperature, hard_threshold=threshold, reduction=reduction, weight=weight, ignore_index=3)
        kernel, plain, exact = both(loss, scores, target)
        for ours, theirs, truth in zip(kernel, plain, exact, strict=True):
            # k = 8 is at the end of what q sums in float32 can do
            limit = 2e-6 * truth.abs() * (2 if k == 8 else 1) + 1e-7
            judged = (theirs - truth).abs() <= 1e-6 * truth.abs() + 5e-8
            assert ((ours - truth).abs() <= limit)[judged].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smooth_is_computed_by_the_kernel(dtype, monkeypatch):
    """In every shape; NaN and what is no top-k problem are the plain code's."""
    plain = []
    monkeypatch.setattr(anyk.SmoothTopKLoss, "_loss", lambda *_: plain.append(1) or torch.zeros(()))
    loss = anyk.SmoothTopKLoss(5)
    for shape, goal in (((4, 30), (4,)), ((2, 30, 3), (2, 3)), ((4, 6), (4,)), ((0, 30), (0,))):
        loss(torch.randn(shape).to(dtype), torch.zeros(goal, dtype=torch.long))
    assert not plain
    strange = torch.randn(4, 30).to(dtype)
    strange[1, 2] = torch.nan
    for scores in (strange, torch.randn(4, 5).to(dtype)):
        loss(scores, torch.zeros(4, dtype=torch.long))
    anyk.SmoothTopKLoss(9)(torch.randn(4, 30), torch.zeros(4, dtype=torch.long))
    assert len(plain) == 3


def test_smooth_shapes_and_second_derivatives():
    loss = anyk.SmoothTopKLoss(3, reduction="none")
    scores, target = torch.randn(4, 20, 3, requires_grad=True), torch.randint(20, (4, 3))
    values = loss(scores, target)
    assert values.shape == (4, 3)
    with anyk.backend("torch"):
        torch.testing.assert_close(values, loss(scores, target), rtol=1e-5, atol=1e-6)
    (first,) = torch.autograd.grad(values.sum(), scores, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), scores)
    with anyk.backend("torch"):
        (first,) = torch.autograd.grad(loss(scores, target).sum(), scores, create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum(), scores)
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-6)


LOSSES = {
    "separate": lambda: anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5], m=16),
    "mixed": lambda: anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5], anyk.LapSum(), m=16, top1="mixed"),
    "candidates": lambda: anyk.TopKCrossEntropyLoss([0.5, 0.5], anyk.SoftSort(), m=16, softmax_over="candidates"),
    "operator": lambda: anyk.TopKCrossEntropyLoss([0.5, 0.5], anyk.NeuralSort(), m=16, top1="operator"),
    "error": lambda: anyk.TopKErrorLoss({1: 0.5, 5: 0.5}, m=16, weight=torch.rand(200), ignore_index=5),
    "smoothed": lambda: anyk.TopKErrorLoss({1: 0.5, 5: 0.5}, m=16, label_smoothing=0.1),
    "by class": lambda: anyk.TopKErrorLoss(torch.rand(200, 3).softmax(-1), m=16, q=0.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_head_is_the_plain_one(name, monkeypatch):
    torch.manual_seed(0)
    head = anyk.LinearHead(12, 200, LOSSES[name](), chunk_size=64)
    x, target = torch.randn(33, 12), torch.randint(200, (33,))
    target[2] = 5
    results = []
    for backend in ("native", "torch"):
        leaf = x.clone().requires_grad_()
        head.zero_grad()
        with anyk.backend(backend):
            value = head(leaf, target)
            value.backward()
        results.append([value.detach(), leaf.grad, head.linear.weight.grad.clone()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-7)
    calls = []
    real = kernels.native.row_losses
    monkeypatch.setattr(kernels.native, "row_losses", lambda *given: calls.append(1) or real(*given))
    with torch.no_grad():
        head(x, target)
    assert calls
