"""The losses: the paper's three formulae; of both families, what they share with CrossEntropyLoss, P_K, padding, bad input."""

import copy
import inspect
import itertools
import math
import pickle
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import anyk
import oracles
from anyk import TopKCrossEntropyLoss, baselines, losses, topk_cross_entropy, topk_error
from anyk import generalized_cross_entropy as gce
from anyk.cross_entropy import Keywords
from strategies import batch, distributions, is_doubly_stochastic, name, operators, rows

MODES = ("separate", "mixed", "operator")
modes = pytest.mark.parametrize("top1", MODES)
LOSSES = {top1: partial(topk_cross_entropy, top1=top1) for top1 in MODES} | {"error": partial(topk_error, ce_weight=0.3, q=0.6)}
families = pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
both_backends = pytest.mark.usefixtures("backend")  # the others are in float64, which no kernel computes
every_operator = pytest.mark.parametrize("operator", operators(wires=("target", "given")), ids=name)
few_operators = pytest.mark.parametrize(
    "operator", [anyk.LapSum(), anyk.KSubset(0.5), anyk.SortingNetwork(), anyk.SinkhornSort()], ids=name
)
P_K = [0.2] * 5
SCORES, TARGET = torch.zeros(2, 4), torch.tensor([0, 1])


# ---- the formulae -------------------------------------------------------------------------------------------------------


@modes
@every_operator
@settings(max_examples=4, deadline=None)
@given(row=rows(min_size=3, max_size=8), data=st.data())
def test_loss_is_the_formula(operator, top1, row, data):
    n = len(row.scores)
    p_k = data.draw(distributions(n))
    target = data.draw(st.integers(0, n - 1))
    inclusion = operator.inclusion(row.scores, torch.tensor(target), len(p_k)).tolist()
    softmax = row.scores.softmax(-1)[target].item()
    expected = oracles.topk_loss(inclusion, softmax, p_k, top1)
    actual = topk_cross_entropy(row.scores, torch.tensor(target), p_k, operator, top1=top1)
    assert actual.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert actual >= 0


@modes
@few_operators
def test_truncated_loss_is_the_loss_of_the_candidates(operator, top1):
    scores, target = batch(n=20, dtype=torch.float64)
    losses = topk_cross_entropy(scores, target, P_K, operator, m=8, top1=top1, softmax_over="candidates", reduction="none")
    for row, y, loss in zip(scores, target.tolist(), losses, strict=True):
        kept = [c for c in row.argsort(descending=True).tolist() if c != y][:7]
        short = row[[*kept, y]]
        expected = topk_cross_entropy(short, torch.tensor(7), P_K, operator, top1=top1)
        torch.testing.assert_close(loss, expected)
    if top1 != "operator":
        over_all = topk_cross_entropy(scores, target, P_K, operator, m=8, top1=top1, reduction="none")
        assert (over_all > losses).all()  # more classes in the softmax
    whole = topk_cross_entropy(scores, target, P_K, operator, m=20, top1=top1)
    torch.testing.assert_close(whole, topk_cross_entropy(scores, target, P_K, operator, top1=top1))


@both_backends
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    "loss",
    [
        partial(topk_cross_entropy, p_k=[1.0]),
        partial(topk_cross_entropy, p_k=[1.0], softmax_over="candidates", m=None),
        partial(topk_cross_entropy, p_k=[1.0, 0.0, 0.0]),
        partial(topk_cross_entropy, p_k=torch.tensor([1.0, 0.0, 0.0]), operator="lapsum"),
        partial(topk_cross_entropy, p_k=[1.0], top1="mixed"),
        partial(topk_error, p_k=[0.5, 0.5], ce_weight=1),
        partial(gce, q=0),
        partial(gce, q=0.5, ce_weight=1),
    ],
    ids=range(8),
)
def test_cross_entropy_alone(loss, padding):
    """No share of a smoothed label or of a distribution is on padding."""
    scores, target = batch(rows=50, n=30)
    target[3] = -100
    weight, probabilities = torch.rand(30), torch.randn(50, 30).softmax(-1)
    for kwargs in ({}, {"weight": weight}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}):
        if "label_smoothing" in kwargs and {"mixed", "candidates"} & set(map(str, loss.keywords.values())):
            continue  # cross-entropy is no term of its own
        for goal in (target, probabilities):
            if goal is probabilities and {"mixed", "candidates"} & set(map(str, loss.keywords.values())):
                continue  # only the 8 largest shares count
            ours = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf).requires_grad_()
            theirs = scores.clone().requires_grad_()
            expected = cross_entropy(theirs, goal, **kwargs)
            padded = goal if goal is target else torch.nn.functional.pad(goal, (0, padding))
            own = {**kwargs, "weight": torch.nn.functional.pad(weight, (0, padding))} if "weight" in kwargs else kwargs
            actual = loss(ours, padded, **own)
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
            actual.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(ours.grad[:, :30], theirs.grad, rtol=1e-5, atol=1e-7)
            assert (ours.grad[:, 30:] == 0).all()


@families
@every_operator
def test_loss_depends_neither_on_the_order_of_the_classes_nor_on_a_shift(operator, loss):
    scores, target = batch(n=12, dtype=torch.float64)
    order = torch.randperm(12)
    for m in (None, 7):
        expected = loss(scores, target, P_K, operator, m=m)
        torch.testing.assert_close(loss(scores + 31.0, target, P_K, operator, m=m), expected)
        if getattr(operator, "wires", "") != "given":  # the given order is what this policy is about
            torch.testing.assert_close(loss(scores[:, order], order.argsort()[target], P_K, operator, m=m), expected)


@both_backends
@families
@every_operator
def test_perfect_prediction_costs_nothing(operator, loss):
    cold = copy.deepcopy(operator)
    cold.temperature = 1e-3
    scores = torch.eye(7) * 1e4
    value = loss(scores, torch.arange(7), [0.3, 0.0, 0.7], cold)
    assert 0 <= value <= 1e-3


@families
@few_operators
def test_loss_is_continuous_where_the_candidates_change(operator, loss):
    """Walk the target down through all others and out of the m best."""
    others = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    walk = torch.linspace(3, -3, 6001, dtype=torch.float64)
    scores = torch.cat([others.expand(len(walk), -1), walk[:, None]], -1)
    target = torch.full((len(walk),), 11)
    losses = loss(scores, target, P_K, operator, m=6, reduction="none")
    assert losses.diff().abs().max() < 0.02


# ---- gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "top1"),
    [
        *((each, "separate") for each in operators(wires=("target", "given"))),
        (anyk.LapSum(), "mixed"),
        (anyk.KSubset(), "operator"),
    ],
)
def test_gradients(operator, top1):
    scores, target = batch(rows=2, n=6, dtype=torch.float64, seed=5)
    scores.requires_grad_()
    p_k = [0.3, 0.0, 0.7]
    for m in (None, 4):
        assert gradcheck(lambda s, m=m: topk_cross_entropy(s, target, p_k, operator, m=m, top1=top1), (scores,))
    assert gradgradcheck(lambda s: topk_cross_entropy(s, target, p_k, operator, m=4, top1=top1), (scores,))


@families
def test_gradients_of_the_other_arguments(loss):
    scores, target = batch(rows=2, n=5, dtype=torch.float64, seed=6)
    scores.requires_grad_()
    operator = anyk.LapSum()
    per_class = torch.rand(5, 3, dtype=torch.float64).softmax(-1)
    per_example = torch.rand(2, 3, dtype=torch.float64).softmax(-1)
    q = torch.rand(2, 5, dtype=torch.float64).softmax(-1)
    cases = [
        lambda s: loss(s, target, per_class, operator),
        lambda s: loss(s, target, [1.0], operator, example_p_k=per_example),
        lambda s: loss(s, q, per_class, operator, m=4),
    ]
    if loss.keywords.get("top1", "separate") == "separate":
        cases.append(lambda s: loss(s, target, [0.5, 0.5], operator, m=4, label_smoothing=0.2))
    if "top1" in loss.keywords:
        cases.append(lambda s: loss(s, target, [0.5, 0.5], operator, softmax_over="candidates", m=4))
    for case in cases:
        assert gradcheck(case, (scores,))
        assert gradgradcheck(case, (scores,))


# ---- P_K ----------------------------------------------------------------------------------------------------------------


@families
@few_operators
def test_p_k_by_class_and_by_example(operator, loss):
    scores, target = batch(rows=8, n=6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    per_class = torch.rand(6, 4, dtype=torch.float64, generator=generator).softmax(-1)
    per_class[2] = torch.tensor([1.0, 0, 0, 0])
    per_class[3] = torch.tensor([0.0, 0, 0, 1])
    losses = loss(scores, target, per_class, operator, reduction="none")
    for i, y in enumerate(target):
        expected = loss(scores[i], y, per_class[y], operator)
        torch.testing.assert_close(losses[i], expected)
    by_example = loss(scores, target, [1.0], operator, reduction="none", example_p_k=per_class[target])
    torch.testing.assert_close(by_example, losses)


# ---- class probabilities ------------------------------------------------------------------------------------------------


def by_loop(loss, scores, q, **call):
    """sum_c q_c L(s, c), class by class."""
    classes = q.any(0).nonzero()[:, 0].tolist()
    return sum(q[:, c] * loss(scores, torch.full((len(q),), c), reduction="none", **call) for c in classes)


@families
@few_operators
def test_probabilities_against_a_loop_over_classes(operator, loss):
    scores, _ = batch(rows=5, n=12, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    q = torch.zeros(5, 12, dtype=torch.float64)
    q[:, 3:9] = torch.rand(5, 6, dtype=torch.float64, generator=generator)
    q[0] = torch.nn.functional.one_hot(torch.tensor(4), 12)
    q[1, [2, 7, 11]] = 1.0  # K-hot
    q[2] = 0
    weight = torch.rand(12, dtype=torch.float64, generator=generator)
    for m in (None, 6):
        if m == 6 and getattr(operator, "wires", "") == "given":
            continue  # another order of the candidates
        call = {"p_k": [0.4, 0.6], "operator": operator, "m": m, "weight": weight}
        expected = by_loop(loss, scores, q, **call)
        torch.testing.assert_close(loss(scores, q, **call, reduction="none"), expected)
        torch.testing.assert_close(loss(scores, q, **call), expected.mean())


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("loss", [*LOSSES.values(), gce], ids=[*LOSSES, "gce"])
def test_more_probabilities_than_are_ranked(loss, readable, monkeypatch):
    """The 8 largest are ranked. What is left costs cross-entropy where that is a term of its own, and else enlarges the 8."""
    if not readable:
        monkeypatch.setattr("anyk.checks.readable", lambda tensor: False)
    scores, _ = batch(rows=4, n=15, dtype=torch.float64)
    scores[:, 14] = -torch.inf
    q = torch.rand(4, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q[:, 14] = 0
    q[0, 4:] = 0  # few
    weight = torch.rand(15, dtype=torch.float64)
    largest = q * (q >= q.topk(8).values[:, -1:])
    has_a_term = loss is not gce and loss.keywords.get("top1", "separate") == "separate"
    for weights in (None, weight):
        call = {"weight": weights} if loss is gce else {"weight": weights, "p_k": [0.4, 0.6], "operator": anyk.LapSum(), "m": 9}
        if has_a_term:
            short = None if weights is None else weights[:14]
            rest = cross_entropy(scores[:, :14], (q - largest)[:, :14], weight=short, reduction="none")
            expected = by_loop(loss, scores, largest, **call) + rest
        else:
            expected = by_loop(loss, scores, largest * (q.sum(-1) / largest.sum(-1))[:, None], **call)
        torch.testing.assert_close(loss(scores, q, **call, reduction="none"), expected)


# ---- label smoothing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [LOSSES["separate"], LOSSES["error"], partial(gce, ce_weight=0.3)])
@pytest.mark.parametrize("m", [None, 5])
def test_label_smoothing_is_the_cross_entropys_alone(loss, m):
    scores, target = batch(n=8, dtype=torch.float64)
    scores[:, 7], target = -torch.inf, target % 7  # smoothing is over the classes that are not padding
    weight = torch.rand(8, dtype=torch.float64)
    call = {"reduction": "none"} | ({} if loss.func is gce else {"p_k": [0.3, 0.7], "operator": "lapsum", "m": m})
    r = torch.cat([torch.rand(6, 7, dtype=torch.float64).softmax(-1), torch.zeros(6, 1, dtype=torch.float64)], -1)
    for weights, goal in itertools.product((None, weight), (target, r)):
        short = None if weights is None else weights[:7]
        plain, smoothed = (
            cross_entropy(
                scores[:, :7], goal if goal is target else r[:, :7], weight=short, label_smoothing=a, reduction="none"
            )
            for a in (0.0, 0.2)
        )
        expected = loss(scores, goal, weight=weights, **call) + 0.3 * (smoothed - plain)
        actual = loss(scores, goal, weight=weights, label_smoothing=0.2, **call)
        torch.testing.assert_close(actual, expected)
        mean = loss(scores, goal, weight=weights, label_smoothing=0.2, **{**call, "reduction": "mean"})
        counts = torch.ones(6) if weights is None or goal is r else weights[target]
        torch.testing.assert_close(mean, expected.sum() / counts.sum())


@pytest.mark.parametrize(
    "settings", [{"top1": "mixed"}, {"top1": "operator"}, {"softmax_over": "candidates"}, {"ce_weight": 0}], ids=str
)
def test_nothing_to_smooth(settings):
    make, call = (anyk.TopKErrorLoss, topk_error) if "ce_weight" in settings else (TopKCrossEntropyLoss, topk_cross_entropy)
    with pytest.raises(ValueError, match=r"label_smoothing: expected 0 with .*, got 0\.1"):
        call(SCORES, TARGET, [0.5, 0.5], label_smoothing=0.1, **settings)
    with pytest.raises(ValueError, match=r"label_smoothing: expected 0 with .*, got 0\.1"):
        make([0.5, 0.5], label_smoothing=0.1, **settings)
    criterion = make([0.5, 0.5], **settings)
    criterion.label_smoothing = 0.1
    with pytest.raises(ValueError, match=r"label_smoothing: expected 0 with .*, got 0\.1"):
        criterion(SCORES, TARGET)


# ---- what CrossEntropyLoss offers ---------------------------------------------------------------------------------------


@families
@few_operators
def test_reductions_and_weights(operator, loss):
    scores, target = batch(dtype=torch.float64)
    weight = torch.rand(9, dtype=torch.float64)
    call = {"p_k": P_K, "operator": operator, "m": 7}
    plain = loss(scores, target, **call, reduction="none")
    weighted = loss(scores, target, **call, reduction="none", weight=weight)
    torch.testing.assert_close(weighted, plain * weight[target])
    torch.testing.assert_close(loss(scores, target, **call, reduction="sum"), plain.sum())
    torch.testing.assert_close(loss(scores, target, **call), plain.mean())
    expected = (plain * weight[target]).sum() / weight[target].sum()
    torch.testing.assert_close(loss(scores, target, **call, weight=weight), expected)


@both_backends
@families
@few_operators
def test_ignored_examples(operator, loss):
    scores, target = batch()
    scores[1] = float("nan")  # what is ignored may be anything
    scores[4, :7] = -torch.inf  # even fewer classes than k
    target[[1, 4]] = 3
    keep = torch.tensor([0, 2, 3, 5])
    target[keep[target[keep] == 3]] = 2
    scores.requires_grad_()
    losses = loss(scores, target, P_K, operator, ignore_index=3, reduction="none")
    assert losses[[1, 4]].tolist() == [0, 0]
    mean = loss(scores, target, P_K, operator, ignore_index=3)
    torch.testing.assert_close(mean, losses.sum() / 4)
    torch.testing.assert_close(mean, loss(scores[keep], target[keep], P_K, operator))
    (gradient,) = torch.autograd.grad(mean, scores)
    assert gradient.isfinite().all()
    assert (gradient[[1, 4]] == 0).all()


@both_backends
@families
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_everything_ignored(loss, reduction):
    scores, target = batch()
    ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    target = torch.full_like(target, -100)
    actual = loss(ours, target, P_K, reduction=reduction)
    expected = cross_entropy(theirs, target, reduction=reduction)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    actual.sum().backward()
    assert (ours.grad == 0).all()


@both_backends
@families
@few_operators
def test_shapes(operator, loss):
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(2, 7, 3, 4, generator=generator)
    target = torch.randint(7, (2, 3, 4), generator=generator)
    target[0, 1, 1] = -100
    call = {"p_k": [0.5, 0.2, 0.3], "operator": operator, "m": 5}
    losses = loss(scores, target, **call, reduction="none")
    assert losses.shape == target.shape
    flat = loss(scores.movedim(1, -1).reshape(-1, 7), target.reshape(-1), **call, reduction="none")
    torch.testing.assert_close(losses.reshape(-1), flat)
    torch.testing.assert_close(loss(scores, target, **call), flat.sum() / 23)
    single = loss(scores[1, :, 2, 3], target[1, 2, 3], **call, reduction="none")
    assert single.shape == ()
    torch.testing.assert_close(single, losses[1, 2, 3])
    q = scores.softmax(1)
    assert loss(scores, q, **call, reduction="none").shape == (2, 3, 4)
    per_example = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    by_example = loss(scores, target, **call, reduction="none", example_p_k=per_example)
    by_position = loss(scores, target, **call, reduction="none", example_p_k=per_example[:, None, None].expand(2, 3, 4, 2))
    torch.testing.assert_close(by_example, by_position)
    expected = loss(scores[1, :, 0, 0], target[1, 0, 0], [0.1, 0.9], operator, m=5)
    torch.testing.assert_close(by_example[1, 0, 0], expected)


@both_backends
@families
@few_operators
def test_two_classes_and_m_equal_n(operator, loss):
    scores = torch.tensor([[0.3, -0.2], [1.0, 2.0]], requires_grad=True)
    for p_k in ([0.4, 0.6], [1.0]):
        value = loss(scores, torch.tensor([0, 0]), p_k, operator, m=2)
        (gradient,) = torch.autograd.grad(value, scores)
        assert value.isfinite()
        assert gradient.isfinite().all()
    one = loss(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), [1.0], operator)
    assert one.item() == pytest.approx(0, abs=1e-6)


@families
@every_operator
def test_padded_rows(operator, loss):
    scores, target = batch(n=6, dtype=torch.float64)
    padded = torch.cat([scores, torch.full((6, 3), -torch.inf, dtype=torch.float64)], -1).requires_grad_()
    for m in (None, 8):
        value = loss(padded, target, [0.2, 0.3, 0.5], operator, m=m)
        expected = loss(scores, target, [0.2, 0.3, 0.5], operator)
        if m is None or getattr(operator, "wires", "") != "given":
            torch.testing.assert_close(value, expected)
        (gradient,) = torch.autograd.grad(value, padded)
        assert gradient.isfinite().all()
        assert (gradient[:, 6:] == 0).all()


@both_backends
@families
@every_operator
def test_nan_scores_give_a_nan_loss(operator, loss):
    scores, target = batch()
    scores[2, 4] = float("nan")
    losses = loss(scores, target, P_K, operator, m=7, reduction="none")
    assert losses.isnan().tolist() == [False, False, True, False, False, False]


@both_backends
@families
@few_operators
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(operator, loss, dtype):
    scores, target = batch()
    half = scores.to(dtype).requires_grad_()
    value = loss(half, target, P_K, operator, m=7)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(half.float(), target, P_K, operator, m=7))
    (gradient,) = torch.autograd.grad(value, half)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


@both_backends
@modes
@pytest.mark.parametrize("operator", operators(wires=("target",)), ids=name)
def test_a_target_far_behind_still_pulls(operator, top1):
    gaps = [10.0, 100.0, 1e3, 1e4]
    losses, pulls = [], []
    for gap in gaps:
        scores = torch.cat([torch.linspace(1, 0, 15), torch.tensor([-gap])])[None].requires_grad_()
        loss = topk_cross_entropy(scores, torch.tensor([15]), P_K, operator, m=16, top1=top1)
        (gradient,) = torch.autograd.grad(loss, scores)
        losses.append(loss.item())
        pulls.append(gradient[0, 15].item())
        assert gradient.isfinite().all()
    assert all(math.isfinite(loss) for loss in losses)
    assert losses == sorted(losses)
    light_tailed = getattr(operator, "swap", "logistic") in ("logistic", "gaussian")
    assert all(pull <= (-1e-3 if light_tailed else 0) for pull in pulls), pulls
    if not is_doubly_stochastic(operator):
        assert min(losses) >= 0


def test_sinkhorn_far_behind_has_the_gradient_of_the_limit():
    """The loss is linear in the gap there, although every link between the ranks has underflowed."""
    scores = torch.tensor([[1e4, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = topk_cross_entropy(scores, torch.tensor([1]), [1.0], anyk.SinkhornSort(), top1="operator")
    (gradient,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(loss, torch.tensor(1e4, dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([[1.0, -1.0]], dtype=torch.float64))


@both_backends
@every_operator
def test_padding_among_far_scores(operator):
    inf = torch.inf
    scores = torch.tensor([[-inf, 83.4446, -12.2053, -inf, -inf, 157.4091, 82.6165]], requires_grad=True)
    loss = topk_cross_entropy(scores, torch.tensor([5]), [0, 0, 0, 1.0], operator, m=6, top1="operator")
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_probability_of_padding():
    scores = torch.tensor([[3.0, 0.0, -torch.inf, 1.0]])
    with pytest.raises(ValueError, match="target: expected classes that are not padding"):
        topk_cross_entropy(scores, torch.tensor([[0.0, 0.5, 0.5, 0.0]]), [0.5, 0.5])
    with pytest.raises(ValueError, match="target: expected classes that are not padding"):
        anyk.TopKHingeLoss(2)(scores, torch.tensor([[0.0, 0.5, 0.5, 0.0]]))
    assert topk_cross_entropy(scores, torch.tensor([[0.0, 0.5, 0.0, 0.5]]), [0.5, 0.5]).isfinite()


@both_backends
@families
def test_empty_batch(loss):
    scores, target = torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)
    for kwargs in ({}, {"example_p_k": torch.zeros(0, 2)}, {"m": 3}):
        assert loss(scores, target, [0.5, 0.5], reduction="sum", **kwargs) == 0
        assert loss(scores, target, [0.5, 0.5], **kwargs).isnan()


# ---- modules ------------------------------------------------------------------------------------------------------------


@both_backends
def test_module_is_the_function():
    scores, target = batch(rows=5, n=20)
    weight = torch.rand(20)
    criterion = TopKCrossEntropyLoss(
        [0.5, 0.5], anyk.LapSum(0.5), m=8, top1="mixed", softmax_over="candidates", reduction="sum", ignore_index=3,
        weight=weight,
    )  # fmt: skip
    expected = topk_cross_entropy(
        scores, target, [0.5, 0.5], anyk.LapSum(0.5), m=8, top1="mixed", softmax_over="candidates", reduction="sum",
        ignore_index=3, weight=weight,
    )  # fmt: skip
    torch.testing.assert_close(criterion(scores, target), expected)
    example = torch.tensor([[0.2, 0.8]]).expand(5, 2)
    assert criterion(scores, target, example_p_k=example) != expected


@both_backends
def test_module_state():
    criterion = TopKCrossEntropyLoss([0.5, 0, 0.5], weight=torch.ones(9))
    scores, target = batch()
    expected = criterion(scores, target)
    for copied in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        torch.testing.assert_close(copied(scores, target), expected)
    other = TopKCrossEntropyLoss([0.1, 0, 0.9], weight=torch.zeros(9))
    other.load_state_dict(criterion.state_dict())
    assert other.weight.tolist() == [1.0] * 9
    assert other.p_k.tolist() == [0.1, 0, 0.9], "P_K is a setting, not a state"
    TopKCrossEntropyLoss([0.5, 0, 0.5]).load_state_dict(torch.nn.CrossEntropyLoss().state_dict())
    with torch.device("meta"):
        bare = TopKCrossEntropyLoss([0.1, 0, 0.9], weight=torch.zeros(9))
    bare = bare.to_empty(device="cpu")
    bare.load_state_dict(criterion.state_dict())
    assert bare.p_k.tolist() == [0.1, 0, 0.9]
    assert copy.deepcopy(criterion).to("meta").weight.is_meta
    for setting in ("p_k=[0.5, 0.0, 0.5]", "m='auto'", "top1='separate'", "SortingNetwork('splitter'", "weight=tensor of 9"):
        assert setting in repr(criterion)


# ---- bad input ----------------------------------------------------------------------------------------------------------


def loss(scores=SCORES, target=TARGET, p_k=(0.5, 0.5), operator=None, **kwargs):
    return topk_cross_entropy(scores, target, p_k, operator, **kwargs)


@both_backends
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: loss(p_k=[1.5, -0.5]), ValueError, "p_k: expected probabilities of at least 0, got -0.5"),
        (lambda: loss(p_k=[0.5, 0.4]), ValueError, "p_k: expected probabilities that sum to 1 .*, got the sum 0.9"),
        (lambda: loss(p_k=0.5), TypeError, "p_k: expected an integer k, a sequence .* or a tensor, got 0.5"),
        (lambda: loss(p_k=[0.2] * 5), ValueError, "p_k: expected no k above the number of classes = 4, got k = 5"),
        (lambda: loss(p_k=torch.ones(2, 1)), ValueError, r"p_k: expected shape \(k,\) or \(n, k\) with n = 4 .* got \(2, 1\)"),
        (lambda: loss(m=5), ValueError, "m: expected 1 <= m <= the number of classes = 4, got 5"),
        (lambda: loss(m=2.0), TypeError, "m: expected an integer, got 2.0"),
        (lambda: loss(target=torch.tensor([0, 4])), ValueError, "target: expected class indices from 0 to 3, got 4"),
        (lambda: loss(target=torch.tensor([0.0, 1.0])), ValueError, r"target: .* got dtype torch.float32 and shape \(2,\)"),
        (lambda: loss(target=torch.zeros(2, 4) - 1), ValueError, "target: expected class probabilities of at least 0, got -1"),
        (lambda: loss(target=torch.tensor([0])), ValueError, r"target: expected shape \(2,\) to fit scores, got \(1,\)"),
        (lambda: loss(scores=torch.tensor(1.0)), ValueError, "scores: expected shape"),
        (lambda: TopKCrossEntropyLoss([1.0], "bubble"), ValueError, "operator: expected one of .*'splitter', .*, got 'bubble'"),
        (lambda: loss(operator=anyk.LapSum), TypeError, "operator: expected .* such as .*, got the class LapSum"),
        (lambda: loss(top1="both"), ValueError, "top1: expected one of 'separate', 'mixed', 'operator', got 'both'"),
        (lambda: loss(reduction="max"), ValueError, "reduction: expected one of 'mean', 'sum', 'none', got 'max'"),
        (lambda: loss(weight=torch.ones(3)), ValueError, r"weight: expected shape \(4,\), one for each class, got \(3,\)"),
        (lambda: loss(label_smoothing=1.5), ValueError, "label_smoothing: expected a number between 0 and 1, got 1.5"),
        (lambda: loss(target=torch.ones(2, 4), ignore_index=2), ValueError, "ignore_index: expected class indices"),
        (lambda: loss(example_p_k=torch.ones(3, 1)), ValueError, r"example_p_k: expected shape \(2, 1\) .* got \(3, 1\)"),
        (lambda: TopKCrossEntropyLoss([1.0], m=-1), ValueError, "m: expected at least 1, got -1"),
        (
            lambda: loss(scores=torch.tensor([[0.0, 1, 2, 3], [0, -torch.inf, -torch.inf, -torch.inf]])),
            ValueError,
            "scores: expected at least k = 2 classes above -inf",
        ),
        (
            lambda: loss(scores=torch.tensor([[0.0, 1, 2, 3], [0, -torch.inf, 1, 2]])),
            ValueError,
            "target: expected classes that are not padding",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_scores_that_look_like_probabilities_are_told_once(monkeypatch, recwarn):
    monkeypatch.setattr("anyk.cross_entropy._probabilities_seen", False)
    logits, target = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    shifted = logits - logits.min() + 0.1
    make = partial(anyk.TopKErrorLoss, 5)
    for scores in (logits, shifted, shifted / shifted.sum(), torch.eye(20)[:8], logits.exp(), logits.softmax(0)):
        make()(scores, target)
    torch.compile(make(), backend="eager")(logits.softmax(1), target)  # nothing is looked at
    criterion = make()
    criterion(logits, target)
    criterion(logits.softmax(1), target)  # only the first scores of a module are
    assert not recwarn.list
    for dtype in (torch.bfloat16, torch.float64):
        anyk.TopKHingeLoss(5)(logits.to(dtype).softmax(1), target)
    make()(logits.softmax(1)[:, :, None], target[:, None])
    (told,) = recwarn.list
    assert str(told.message).startswith("TopKHingeLoss: the scores look like probabilities: none is negative")
    assert told.filename == __file__


@pytest.mark.parametrize("make", [partial(anyk.TopKErrorLoss, 5), partial(anyk.GeneralizedCrossEntropyLoss, 0.5)])
def test_a_schedule_does_not_look_for_probabilities_again(make, monkeypatch):
    looks = []
    monkeypatch.setattr("anyk.cross_entropy._probabilities_seen", False)
    aminmax = torch.Tensor.aminmax
    monkeypatch.setattr("torch.Tensor.aminmax", lambda scores: looks.append(1) or aminmax(scores))
    criterion = make()
    for step in range(10):
        criterion.ce_weight = step / 10
        criterion(torch.randn(4, 20), torch.arange(4))
    assert len(looks) == 1
    assert not any("look" in name for name in pickle.loads(pickle.dumps(criterion)).__dict__)


# ---- modules and functions, both families -------------------------------------------------------------------------------

NAMES = [*losses.__all__, *baselines.__all__]


def arguments(public):
    """What a docstring says of each argument."""
    words = inspect.getdoc(public).split("Args:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", words, re.MULTILINE)
    return {name: " ".join(line.strip() for line in text.split("\n")) for name, text in entries}


def test_every_argument_is_told_and_in_the_same_words():
    seen = {}
    for public in (getattr(anyk, each) for each in NAMES):
        told = arguments(public)
        parameters = list(inspect.signature(public).parameters)
        if "options" in parameters:
            parameters = [*parameters[:-1], *Keywords.__annotations__]
        assert list(told) == parameters, public
        for argument, text in told.items():
            # of the operator, the two families have another default; what a loss for one k adds is its own
            where = public if public.__module__ == "anyk.baselines" and argument not in Keywords.__annotations__ else None
            where = text[-40:] if argument == "operator" else where
            assert seen.setdefault((argument, where), text) == text, (public, argument)
    assert sum(argument == "operator" for argument, _ in seen) == 2


MAKES = [partial(TopKCrossEntropyLoss, 2), partial(anyk.TopKErrorLoss, 2), anyk.GeneralizedCrossEntropyLoss,
         partial(anyk.TopKHingeLoss, 2)]  # fmt: skip


@pytest.mark.parametrize("make", MAKES)
def test_called_by_the_keywords_of_torch(make):
    scores, target = batch()
    assert torch.equal(make()(input=scores, target=target), make()(scores, target))


def test_p_k_and_m_may_be_assigned_in_any_order():
    scores, target = batch(n=30)
    criterion = anyk.TopKErrorLoss([0.5, 0.5], m=5)
    criterion.p_k = {10: 1.0}
    with pytest.raises(ValueError, match="p_k: expected no k above m = 5, got k = 10"):
        criterion(scores, target)
    criterion.m = 20
    assert torch.equal(criterion(scores, target), topk_error(scores, target, {10: 1.0}, m=20))
    criterion.operator = "ksubset"
    assert torch.equal(criterion(scores, target), topk_error(scores, target, {10: 1.0}, "ksubset", m=20))


@both_backends
@pytest.mark.parametrize("m", [None, 16])
def test_a_loss_keeps_no_memory_after_its_backward_pass(m):
    """A user may keep the losses of an epoch."""
    scores = torch.randn(16, 1000, requires_grad=True)
    value = anyk.TopKErrorLoss({1: 0.5, 5: 0.5}, m=m)(scores, torch.arange(16))
    value.backward()
    nodes = [value.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following is not None]
    held = [each for node in nodes for each in tree_leaves([*getattr(node, "__dict__", {}).values()])]
    assert sum(each.numel() for each in held if isinstance(each, torch.Tensor)) < 1000
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


@families
def test_p_k_is_a_constant_of_the_device_of_the_scores(loss):
    """Of the device meta, here: nothing of the CPU takes part, not even a number of no dimension."""
    scores = torch.randn(4, 9, device="meta", requires_grad=True)
    target = torch.zeros(4, dtype=torch.long, device="meta")
    seen = set()

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "copy" in function.name():
                seen.update(each.device.type for each in args if isinstance(each, torch.Tensor))
            return function(*args, **(kwargs or {}))

    loss(scores, target, {1: 0.5, 5: 0.5}, anyk.LapSum())  # makes the constant
    with Devices():
        loss(scores, target, {1: 0.5, 5: 0.5}, anyk.LapSum()).backward()
    assert seen <= {"meta"}
