"""The losses: the paper's three formulae; of both families, what they share with CrossEntropyLoss, P_K, padding, bad input."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

import anyk
import oracles
from anyk import TopKCrossEntropyLoss, topk_cross_entropy, topk_error
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


@pytest.mark.parametrize("top1", ["separate", "mixed"])
@pytest.mark.parametrize("p_k", [[1.0], [1.0, 0.0, 0.0], torch.tensor([1.0, 0.0, 0.0])])
def test_top1_alone_is_cross_entropy_exactly(top1, p_k):
    scores, target = batch(rows=50, n=30)
    target[3] = -100
    weight = torch.rand(30)
    probabilities = torch.randn(50, 30).softmax(-1)
    for kwargs in ({}, {"weight": weight}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}):
        for goal in (target, probabilities):
            if isinstance(p_k, torch.Tensor) and ("label_smoothing" in kwargs or goal is probabilities):
                continue  # a tensor is not searched for zeros: there equal up to rounding only
            ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
            expected = cross_entropy(theirs, goal, **kwargs)
            actual = topk_cross_entropy(ours, goal, p_k, top1=top1, **kwargs)
            tolerance = {"rtol": 1e-6, "atol": 1e-7} if isinstance(p_k, torch.Tensor) else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(actual, expected, **tolerance)
            actual.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)


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
    scores, target = batch(rows=2, n=7, dtype=torch.float64, seed=5)
    scores.requires_grad_()
    p_k = [0.3, 0.1, 0.0, 0.6]
    for m in (None, 5):
        assert gradcheck(lambda s, m=m: topk_cross_entropy(s, target, p_k, operator, m=m, top1=top1), (scores,))
    assert gradgradcheck(lambda s: topk_cross_entropy(s, target, p_k, operator, m=5, top1=top1), (scores,))


@families
def test_gradients_of_the_other_arguments(loss):
    scores, target = batch(rows=3, n=6, dtype=torch.float64, seed=6)
    scores.requires_grad_()
    operator = anyk.LapSum()
    per_class = torch.rand(6, 3, dtype=torch.float64).softmax(-1)
    per_example = torch.rand(3, 3, dtype=torch.float64).softmax(-1)
    q = torch.rand(3, 6, dtype=torch.float64).softmax(-1)
    cases = [
        lambda s: loss(s, target, per_class, operator),
        lambda s: loss(s, target, [1.0], operator, example_p_k=per_example),
        lambda s: loss(s, q, per_class, operator, m=4),
        lambda s: loss(s, target, [0.5, 0.5], operator, m=4, label_smoothing=0.2),
    ]
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


@families
@every_operator
def test_probabilities_against_a_loop_over_classes(operator, loss):
    scores, _ = batch(rows=4, n=6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    q = torch.rand(4, 6, dtype=torch.float64, generator=generator)
    q[0, :4] = 0  # mixup
    q[1] = torch.tensor([1.0, 0, 1, 0, 0, 1])  # K-hot
    weight = torch.rand(6, dtype=torch.float64, generator=generator)
    expected = torch.stack(
        [q[:, c] * weight[c] * loss(scores, torch.full((4,), c), [0.4, 0.6], operator, reduction="none") for c in range(6)]
    ).sum(0)
    actual = loss(scores, q, [0.4, 0.6], operator, weight=weight, reduction="none")
    torch.testing.assert_close(actual, expected)
    mean = loss(scores, q, [0.4, 0.6], operator, weight=weight)
    torch.testing.assert_close(mean, expected.mean())


@modes
@few_operators
def test_probabilities_with_few_candidates(operator, top1):
    """Inside the shared candidate set the top-k loss, outside it softmax cross-entropy."""
    n, m = 10, 4
    scores = torch.linspace(1, -1, n, dtype=torch.float64)
    q = torch.zeros(n, dtype=torch.float64)
    q[[9, 5, 1]] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    kept = [0, 1, 5, 9]  # 9 and 5 are the most probable, then the best scores
    expected = 0.0
    for place, c in enumerate(kept):
        inside = topk_cross_entropy(scores[kept], torch.tensor(place), [0.4, 0.6], operator, top1="operator")
        if top1 != "operator":
            inclusion = operator.inclusion(scores[kept], torch.tensor(place), 2).tolist()
            inside = oracles.topk_loss(inclusion, scores.softmax(-1)[c].item(), [0.4, 0.6], top1)
        expected = expected + q[c] * inside
    actual = topk_cross_entropy(scores, q, [0.4, 0.6], operator, m=m, top1=top1)
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64))
    q[[8, 7]] = 0.05  # outside
    outside = -0.05 * (scores.log_softmax(-1)[8] + scores.log_softmax(-1)[7])
    actual = topk_cross_entropy(scores, q, [0.4, 0.6], operator, m=m, top1=top1)
    torch.testing.assert_close(actual, torch.as_tensor(expected + outside, dtype=torch.float64))


@modes
def test_label_smoothing_is_a_distribution(top1):
    scores, target = batch(n=8, dtype=torch.float64)
    weight = torch.rand(8, dtype=torch.float64)
    q = torch.nn.functional.one_hot(target, 8) * 0.8 + 0.2 / 8
    smoothed = topk_cross_entropy(scores, target, P_K, top1=top1, label_smoothing=0.2, weight=weight, reduction="none")
    torch.testing.assert_close(smoothed, topk_cross_entropy(scores, q, P_K, top1=top1, weight=weight, reduction="none"))
    mean = topk_cross_entropy(scores, target, P_K, top1=top1, label_smoothing=0.2, weight=weight)
    torch.testing.assert_close(mean, smoothed.sum() / weight[target].sum())
    target[2] = -100
    ignored = topk_cross_entropy(scores, target, P_K, top1=top1, label_smoothing=0.2, reduction="none")
    assert ignored[2] == 0


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
@every_operator
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
        smoothed = loss(padded, target, [0.2, 0.3, 0.5], operator, m=m, label_smoothing=0.1)
        assert smoothed.isfinite()
        (gradient,) = torch.autograd.grad(smoothed, padded)
        assert gradient.isfinite().all()


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
@every_operator
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


def test_float64_stays_float64():
    scores, target = batch(dtype=torch.float64)
    padded = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)  # a tensor: goes the general way
    exact = cross_entropy(scores, target, label_smoothing=0.1)
    torch.testing.assert_close(topk_cross_entropy(scores, target, padded, label_smoothing=0.1), exact, rtol=1e-13, atol=0)
    inclusion = anyk.LapSum().inclusion(scores[0], target[0], 3).tolist()
    expected = oracles.topk_loss(inclusion, scores[0].softmax(-1)[target[0]].item(), [0.1, 0.2, 0.7], "separate")
    actual = topk_cross_entropy(scores[0], target[0], [0.1, 0.2, 0.7], anyk.LapSum())
    assert actual.item() == pytest.approx(expected, rel=1e-13)


@both_backends
@families
def test_empty_batch(loss):
    scores, target = torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)
    for kwargs in ({}, {"example_p_k": torch.zeros(0, 2)}, {"m": 3}, {"label_smoothing": 0.1}):
        assert loss(scores, target, [0.5, 0.5], reduction="sum", **kwargs) == 0
        assert loss(scores, target, [0.5, 0.5], **kwargs).isnan()


# ---- modules ------------------------------------------------------------------------------------------------------------


@both_backends
def test_module_is_the_function():
    scores, target = batch(rows=5, n=20)
    weight = torch.rand(20)
    criterion = TopKCrossEntropyLoss(
        [0.5, 0.5], anyk.LapSum(0.5), m=8, top1="mixed", softmax_over="candidates", reduction="sum", ignore_index=3,
        weight=weight, label_smoothing=0.1,
    )  # fmt: skip
    expected = topk_cross_entropy(
        scores, target, [0.5, 0.5], anyk.LapSum(0.5), m=8, top1="mixed", softmax_over="candidates", reduction="sum",
        ignore_index=3, weight=weight, label_smoothing=0.1,
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

SCORES, TARGET = torch.zeros(2, 4), torch.tensor([0, 1])


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
        (lambda: TopKCrossEntropyLoss([1.0], "bubble"), ValueError, "operator: expected one of 'splitter', .*, got 'bubble'"),
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


@pytest.mark.parametrize(
    "make", [partial(anyk.TopKErrorLoss, 5), partial(TopKCrossEntropyLoss, 5), partial(anyk.TopKHingeLoss, 5)]
)
def test_scores_that_look_like_probabilities_are_told_once(make, monkeypatch, recwarn):
    monkeypatch.setattr("anyk.conventions._probabilities_told", False)
    logits, target = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    shifted = logits - logits.min() + 0.1
    for scores in (logits, shifted, shifted / shifted.sum(), torch.eye(20)[:8], logits.exp(), logits.softmax(0)):
        make()(scores, target)
    torch.compile(make(), backend="eager")(logits.softmax(1), target)  # nothing is looked at
    assert not recwarn.list
    criterion = make()
    criterion(logits, target)
    criterion(logits.softmax(1), target)  # only the first scores of a module are
    assert not recwarn.list
    for dtype in (torch.bfloat16, torch.float64):
        make()(logits.to(dtype).softmax(1), target)
    make()(logits.softmax(1)[:, :, None], target[:, None])
    (told,) = recwarn.list
    assert str(told.message).startswith(f"{type(criterion).__name__}: the scores look like probabilities: none is negative")
    assert told.filename == __file__
