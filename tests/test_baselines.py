"""Baselines: against enumeration and against their formulae, with CrossEntropyLoss's manners."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import oracles
from anyk import SmoothTopKLoss, SoftmaxAtKLoss, TopKHingeLoss, TruncatedTopKEntropyLoss
from strategies import rows

LOSSES = [
    SmoothTopKLoss(3, 0.7),
    SmoothTopKLoss(2, hard_threshold=None),
    TopKHingeLoss(3),
    TopKHingeLoss(3, "beta"),
    TruncatedTopKEntropyLoss(3),
    SoftmaxAtKLoss(3, 2.0),
]
every_loss = pytest.mark.parametrize("criterion", LOSSES, ids=lambda c: repr(c).split(", reduction")[0])
#: those whose gradient is that of their value, and that pull the harder the further the target is behind
every_full_loss = pytest.mark.parametrize(
    "criterion", [c for c in LOSSES if not isinstance(c, SoftmaxAtKLoss)], ids=lambda c: repr(c).split(", reduction")[0]
)


@settings(max_examples=50, deadline=None)
@given(rows(min_size=2, max_size=8), st.data())
def test_smooth_topk_against_enumeration(row, data):
    n = len(row.scores)
    k, y = data.draw(st.integers(1, n)), data.draw(st.integers(0, n - 1))
    t = data.draw(st.sampled_from([0.1, 1.0, 3.0]))
    expected = oracles.smooth_topk(row.scores.tolist(), y, k, t)
    actual = SmoothTopKLoss(k, t, hard_threshold=None)(row.scores, torch.tensor(y))
    assert actual.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_smooth_topk_switches_to_the_hard_loss():
    target = torch.tensor([3])
    near = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    far = torch.tensor([[50.0, 40.0, -9.0, -9.5]])
    smooth = SmoothTopKLoss(2, hard_threshold=None)
    switching = SmoothTopKLoss(2)
    assert smooth(near, target) == switching(near, target)
    assert switching(far, target) == 1 + (40.0 + 9.5) / 2
    torch.testing.assert_close(switching(far, target), smooth(far, target), rtol=0, atol=0.01)


@settings(max_examples=50, deadline=None)
@given(rows(min_size=2, max_size=8), st.data())
def test_hinge_and_entropy_against_their_formulae(row, data):
    n = len(row.scores)
    k, y = data.draw(st.integers(1, n)), data.draw(st.integers(0, n - 1))
    scores = row.scores.tolist()
    margins = sorted((s - scores[y] + (c != y) for c, s in enumerate(scores)), reverse=True)
    target = torch.tensor(y)
    assert TopKHingeLoss(k)(row.scores, target).item() == pytest.approx(max(0, sum(margins[:k]) / k))
    assert TopKHingeLoss(k, "beta")(row.scores, target).item() == pytest.approx(sum(max(0, b) for b in margins[:k]) / k)
    others = sorted((s for c, s in enumerate(scores) if c != y), reverse=True)
    leads = [0.0, *(s - scores[y] for s in others[k - 1 :])]
    expected = torch.tensor(leads, dtype=torch.float64).logsumexp(0)
    assert TruncatedTopKEntropyLoss(k)(row.scores, target).item() == pytest.approx(expected.item(), rel=1e-5)


def row_of(kind, n, k):
    """A float32 row of n classes, at least k of them real, and a real class."""
    scores = torch.randn(n) * (5 if kind == "random" else 1)
    if kind == "tied":
        scores = torch.randint(0, 3, (n,)).float()
    if kind == "padded":
        scores[torch.randperm(n)[: torch.randint(0, n - k + 1, ())]] = -torch.inf
    if kind == "far":  # the first k stand apart
        scores[torch.randperm(n)[:k]] += 1e3
    return scores, int(torch.where(scores == -torch.inf, -torch.inf, torch.rand(n)).argmax())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 60])
@pytest.mark.parametrize("kind", ["random", "tied", "padded", "far"])
def test_only_the_best_in_order_is_as_good_as_all(kind, n):
    """float32 against formulae in float64 that sort all classes; the gradient too, where it is one."""
    torch.manual_seed(n)
    for k in {1, 2, 3, 5, 8, 9, 20, 58, n} & set(range(1, n + 1)):
        pairs = [
            (SmoothTopKLoss(k), lambda s, y, k=k: oracles.smooth_topk_by_recursion(s, y, k, 1.0)),
            (SmoothTopKLoss(k, 0.1), lambda s, y, k=k: oracles.smooth_topk_by_recursion(s, y, k, 0.1)),
            (TopKHingeLoss(k), lambda s, y, k=k: oracles.topk_hinge(s, y, k, "alpha")),
            (TopKHingeLoss(k, "beta"), lambda s, y, k=k: oracles.topk_hinge(s, y, k, "beta")),
            (TruncatedTopKEntropyLoss(k), lambda s, y, k=k: oracles.truncated_topk_entropy(s, y, k)),
            (SoftmaxAtKLoss(k), lambda s, y, k=k: oracles.softmax_at_k(s, y, k)),
            (SoftmaxAtKLoss(k, 8.0), lambda s, y, k=k: oracles.softmax_at_k(s, y, k, 8.0)),
        ]
        for criterion, oracle in pairs:
            for _ in range(3):
                row, y = row_of(kind, n, k)
                single, double = row.clone().requires_grad_(), row.double().requires_grad_()
                actual, expected = criterion(single, torch.tensor(y)), oracle(double, y)
                torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=1e-6)
                (gradient,) = torch.autograd.grad(actual, single)
                (exact,) = torch.autograd.grad(expected, double)
                if kind != "tied" or isinstance(criterion, (SmoothTopKLoss, SoftmaxAtKLoss)):
                    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-6)
                # the same through probabilities, each class once the target
                q = torch.nn.functional.one_hot(torch.tensor(y), n).float()
                torch.testing.assert_close(criterion(row, q), actual.detach())


@pytest.mark.parametrize("k", [1, 5, 8])
def test_smooth_topk_of_many_classes(k):
    """The power sums of ten thousand classes, and both ways of the polynomials."""
    scores = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(k))
    scores[1] = scores[1].round()
    for row, y in zip(scores, (0, 5000), strict=True):
        expected = oracles.smooth_topk_by_recursion(row.double(), y, k, 1.0)
        actual = SmoothTopKLoss(k)(row, torch.tensor(y))
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


def test_label_smoothing_is_the_mean_over_classes():
    scores = torch.randn(3, 9, dtype=torch.float64)
    target = torch.tensor([0, 4, 8])
    for criterion in LOSSES:
        each = torch.stack([criterion(scores, torch.full((3,), c)) for c in range(9)]).mean()
        smoothed = copy.deepcopy(criterion)
        smoothed.label_smoothing = 0.3
        torch.testing.assert_close(smoothed(scores, target), 0.7 * criterion(scores, target) + 0.3 * each)


@every_loss
def test_manners(criterion):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 6, 2, dtype=torch.float64, generator=generator)
    target = torch.randint(6, (4, 2), generator=generator)
    weight = torch.rand(6, dtype=torch.float64, generator=generator)

    def variant(**settings):
        other = copy.deepcopy(criterion)
        for key, value in settings.items():
            setattr(other, key, value)
        return other

    plain = variant(reduction="none")(scores, target)
    assert plain.shape == (4, 2)
    assert (plain >= 0).all()
    torch.testing.assert_close(criterion(scores, target), plain.mean())
    torch.testing.assert_close(plain[1, 1], criterion(scores[1, :, 1], target[1, 1]))
    torch.testing.assert_close(variant(reduction="none", weight=weight)(scores, target), plain * weight[target])
    ignoring = target.clone()
    ignoring[0, 0] = -100
    assert variant(reduction="none")(scores, ignoring)[0, 0] == 0
    q = torch.nn.functional.one_hot(target, 6).movedim(-1, 1).double()
    torch.testing.assert_close(variant(reduction="none")(scores, q), plain)
    padded = torch.cat([scores, torch.full((4, 2, 2), -torch.inf, dtype=torch.float64)], 1).requires_grad_()
    losses = variant(reduction="none")(padded, target)
    torch.testing.assert_close(losses, plain)
    (gradient,) = torch.autograd.grad(losses.sum(), padded)
    assert gradient.isfinite().all()
    assert torch.equal(pickle.loads(pickle.dumps(criterion))(scores, target), criterion(scores, target))
    assert criterion(scores.half(), target).dtype == torch.float32


def test_as_many_real_classes_as_k():
    """The target is always among the first k of k classes."""
    scores = torch.tensor([[1.0, 5.0, -torch.inf, -torch.inf]])
    assert SmoothTopKLoss(2)(scores, torch.tensor([0])) == SmoothTopKLoss(2)(scores[:, :2], torch.tensor([0])) == 0


@pytest.mark.parametrize("n", [5, 50])
def test_softmax_at_k_pulls_untrained_targets_from_half_the_logarithm_on(n):
    """As its page says: below, everything is pushed away at the start."""
    half = math.log(n) / (2 * (1 - 1 / n))
    for t, pulls in ((0.95 * half, False), (1.05 * half, True)):
        scores = torch.zeros(1, n, requires_grad=True)
        SoftmaxAtKLoss(3, t)(scores, torch.tensor([1])).backward()
        assert bool(scores.grad[0, 1] < 0) == pulls


@every_loss
def test_padding_anywhere_and_smoothing(criterion):
    """Padding is no class: neither its place nor its number changes anything, the gradient included."""
    scores, target = torch.randn(3, 6, dtype=torch.float64), torch.tensor([0, 3, 5])
    smoothed = copy.deepcopy(criterion)
    smoothed.label_smoothing = 0.2
    plain = scores.clone().requires_grad_()
    expected = smoothed(plain, target)
    padding = torch.full((3, 2), -torch.inf, dtype=torch.float64)
    padded = torch.cat([padding, scores, padding], 1).requires_grad_()
    actual = smoothed(padded, target + 2)
    torch.testing.assert_close(actual, expected)
    (own,), (other,) = torch.autograd.grad(actual, padded), torch.autograd.grad(expected, plain)
    torch.testing.assert_close(own[:, 2:8], other)
    assert (own[:, [0, 1, 8, 9]] == 0).all()


@every_full_loss
def test_gradients(criterion):
    scores = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    target = torch.tensor([0, 3, 6])
    assert gradcheck(lambda s: criterion(s, target), (scores,))
    assert gradgradcheck(lambda s: criterion(s, target), (scores,))


@every_full_loss
def test_far_behind_still_pulls(criterion):
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, -1e4]]).requires_grad_()
    (gradient,) = torch.autograd.grad(criterion(scores, torch.tensor([4])), scores)
    assert gradient[0, 4] <= -1e-3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SmoothTopKLoss(0), ValueError, "k: .* got 0"),
        (lambda: SmoothTopKLoss(2, hard_threshold=0.5), ValueError, "hard_threshold: .* got 0.5"),
        (lambda: TopKHingeLoss(2, "gamma"), ValueError, "variant: expected one of 'alpha', 'beta', got 'gamma'"),
        (lambda: TruncatedTopKEntropyLoss(5)(torch.zeros(1, 4), torch.tensor([0])), ValueError, "k: .* = 4, got 5"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
