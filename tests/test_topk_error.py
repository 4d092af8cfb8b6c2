"""The bounded family: its formula, its edges, its conventions, its digits."""

import copy
import pickle

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

import anyk
import oracles
from anyk import TopKErrorLoss, topk_cross_entropy, topk_error
from strategies import batch, distributions, name, operators
from strategies import rows as strategy_rows

SHAPES = [(0.2, 1.0), (0.0, 1.0), (0.5, 0.4), (0.0, 0.0), (0.3, 0.0)]
shapes = pytest.mark.parametrize(("ce_weight", "q"), SHAPES)
both_backends = pytest.mark.usefixtures("backend")  # the others are in float64, which no kernel computes
every_operator = pytest.mark.parametrize("operator", operators(wires=("target", "given")), ids=name)
few_operators = pytest.mark.parametrize(
    "operator", [anyk.LapSum(), anyk.KSubset(0.5), anyk.SortingNetwork(), anyk.SinkhornSort(), anyk.SoftSort()], ids=name
)
P_K = {1: 0.5, 3: 0.2, 5: 0.3}


# ---- the formula --------------------------------------------------------------------------------------------------------


@shapes
@few_operators
@hypothesis_settings(max_examples=6, deadline=None)
@given(row=strategy_rows(min_size=3, max_size=8), data=st.data())
def test_loss_is_the_formula(operator, ce_weight, q, row, data):
    n = len(row.scores)
    p_k = data.draw(distributions(n))
    target = data.draw(st.integers(0, n - 1))
    inclusion = operator.inclusion(row.scores, torch.tensor(target), len(p_k)).tolist()
    expected = oracles.topk_error(inclusion, row.scores.softmax(-1)[target].item(), p_k, ce_weight, q)
    actual = topk_error(row.scores, torch.tensor(target), p_k, operator, ce_weight=ce_weight, q=q)
    assert actual.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert actual >= 0


@both_backends
@every_operator
def test_bounded_without_cross_entropy(operator):
    scores, target = batch(rows=40, n=12)
    scores = scores * 100
    for q in (1.0, 0.5, 0.1):
        losses = topk_error(scores, target, P_K, operator, ce_weight=0, q=q, reduction="none")
        assert (losses >= 0).all()
        assert (losses <= 1 / q * (1 + 1e-6)).all()


@both_backends
def test_a_hopeless_example_pulls_less_the_further_it_is_behind():
    """Under cross-entropy it pulls as hard as it can; -log T harder still."""
    others = torch.linspace(1, 0, 9)
    pulls = []
    for behind in (0.0, 2.0, 5.0, 10.0):
        scores = torch.cat([others, torch.tensor([-behind])]).requires_grad_()
        loss = topk_error(scores, torch.tensor(9), {5: 1.0}, ce_weight=0)
        pulls.append(torch.autograd.grad(loss, scores)[0][9].neg().item())
    assert pulls == sorted(pulls, reverse=True)
    assert pulls[-1] < 1e-3
    kept = torch.autograd.grad(topk_error(scores, torch.tensor(9), {5: 1.0}, ce_weight=0.2), scores)[0][9]
    assert kept.item() == pytest.approx(-0.2, abs=1e-2), "the cross-entropy keeps a pull"


def test_one_k_and_one_subset_is_generalised_cross_entropy():
    """k = 1 with KSubset is softmax: (1 - p^r) / r, the control of the comparisons."""
    scores, target = batch(rows=50, n=30, dtype=torch.float64)
    p = scores.softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    for q in (1.0, 0.7, 0.3):
        actual = topk_error(scores, target, [1.0], anyk.KSubset(), m=None, ce_weight=0.1, q=q, reduction="none")
        torch.testing.assert_close(actual, -0.1 * p.log() + 0.9 * (1 - p**q) / q)


# ---- the edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"weight": torch.rand(30)}, {"reduction": "none"}])
def test_ce_weight_1_is_cross_entropy_and_runs_no_operator(settings):
    class Never(anyk.KSubset):
        def _log_inclusion(self, *args):
            raise AssertionError("the operator ran")

    scores, target = batch(rows=50, n=30)
    target[3] = -100
    for goal in (target, torch.randn(50, 30).softmax(-1)):
        actual = topk_error(scores, goal, P_K, Never(), ce_weight=1, **settings)
        assert torch.equal(actual, cross_entropy(scores, goal, **settings))
    head = anyk.LinearHead(5, 30, TopKErrorLoss(P_K, Never(), ce_weight=1, m=8, **settings))
    x = torch.randn(50, 5)
    torch.testing.assert_close(head(x, target), cross_entropy(head.as_linear()(x), target, **settings))


def test_padding_without_an_operator():
    """ce_weight = 1, and top-1 alone: no share of a smoothed label or of a distribution is on padding."""
    scores, target = batch(n=8, dtype=torch.float64)
    padded = torch.cat([scores, torch.full((6, 2), -torch.inf, dtype=torch.float64)], -1)
    r = torch.rand(6, 8, dtype=torch.float64)
    padded_q = torch.nn.functional.pad(r, (0, 2))
    for settings in ({}, {"label_smoothing": 0.1}):
        for padded_goal, goal in ((target, target), (padded_q, r)):
            expected = cross_entropy(scores, goal, **settings)
            torch.testing.assert_close(topk_error(padded, padded_goal, P_K, ce_weight=1, **settings), expected)
            torch.testing.assert_close(topk_cross_entropy(padded, padded_goal, [1.0], **settings), expected)
    for m in (None, 5):
        with pytest.raises(ValueError, match="target: expected classes that are not padding"):
            topk_error(padded, torch.full((6, 10), 0.1, dtype=torch.float64), [0.5, 0.5], m=m, ce_weight=0)


@both_backends
def test_ce_weight_0_has_no_softmax():
    """Classes outside the candidates have no gradient at all."""
    scores, target = batch(n=20)
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(topk_error(scores, target, P_K, m=6, ce_weight=0), scores)
    assert ((gradient != 0).sum(-1) <= 6).all()
    (gradient,) = torch.autograd.grad(topk_error(scores, target, P_K, m=6, ce_weight=0.1), scores)
    assert (gradient != 0).all()


@every_operator
def test_q_0_is_the_limit(operator):
    scores, target = batch(dtype=torch.float64)
    log_inclusion = operator.log_inclusion(scores, target, 5).clamp(max=0)
    expected = -(log_inclusion * torch.tensor([0.5, 0, 0.2, 0, 0.3], dtype=torch.float64)).sum(-1)
    limit = topk_error(scores, target, P_K, operator, ce_weight=0, q=0, reduction="none")
    torch.testing.assert_close(limit, expected)
    near = topk_error(scores, target, P_K, operator, ce_weight=0, q=1e-7, reduction="none")
    torch.testing.assert_close(near, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operator", [anyk.NeuralSort(), anyk.SoftSort()], ids=name)
def test_inclusion_above_1_counts_as_1(operator):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(400, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(8, (400,), generator=generator)
    inclusion = operator.inclusion(scores, target, 6)[:, -1]
    above = inclusion > 1
    assert above.any()
    scores.requires_grad_()
    losses = topk_error(scores, target, {6: 1.0}, operator, ce_weight=0, reduction="none")
    assert (losses[above] == 0).all()
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    assert (gradient[above] == 0).all()
    torch.testing.assert_close(losses[~above], 1 - inclusion[~above])


# ---- digits -------------------------------------------------------------------------------------------------------------

# The slope of these swaps changes within few roundings of the scores, in the middle of the network too: near ties, float32
# cannot know it better.
STEEP = ("logistic_art", "optimal", "reciprocal")


def spread_out(dtype, k):
    """Rows whose T_k runs from far below 1e-30 to nearly 1: a target that passes all others; and, where several may stand
    before it, others that fall behind."""
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(19, generator=generator)
    walk = torch.linspace(-80, 40, 361)
    passing = torch.cat([others.expand(len(walk), -1), walk[:, None]], -1)
    leaving = torch.cat([others[:2].expand(161, -1), others[2:] - torch.linspace(0, 40, 161)[:, None], torch.zeros(161, 1)], -1)
    scores = (torch.cat([passing, leaving]) if k > 1 else passing).to(dtype)
    return scores, torch.full((len(scores),), 19)


@both_backends
@pytest.mark.parametrize(("k", "q"), [(1, 1.0), (5, 0.5)])
@pytest.mark.parametrize("operator", operators(wires=("target",)), ids=name)
def test_gradients_keep_their_digits_in_float32(operator, k, q):
    """Relative to the largest entry of the row, for T from 1e-30 to 1 - 1e-6; in float64 they are exact beside that."""
    if isinstance(operator, anyk.NeuralSort):
        pytest.skip("its exponents are sums over all scores")
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        scores, target = spread_out(dtype, k)
        scores.requires_grad_()
        loss = topk_error(scores, target, {k: 1.0}, operator, ce_weight=0, q=q, reduction="sum")
        gradients[dtype] = torch.autograd.grad(loss, scores)[0].double()
    inclusion = operator.inclusion(scores, target, k)[:, -1]
    counts = (inclusion > 1e-30) & (inclusion < 1 - 1e-6)
    assert counts.sum() > 10
    exact = gradients[torch.float64]
    wrong = (gradients[torch.float32] - exact).abs().amax(-1) / exact.abs().amax(-1)
    if isinstance(operator, anyk.SoftSort):
        # Where T is a sum of several ranks near 1, what these take from each other is lost in their rounding.
        counts &= inclusion < 0.99
    assert wrong[counts].max() < (1e-3 if getattr(operator, "swap", "") in STEEP else 1e-5)


@both_backends
@pytest.mark.parametrize(
    "operator", [anyk.SortingNetwork(), anyk.SortingNetwork("bitonic"), anyk.KSubset(), anyk.LapSum()], ids=name
)
def test_gradients_keep_their_digits_in_every_form(operator):
    """Written by hand, by torch.func, and where a second derivative may follow."""
    scores, target = spread_out(torch.float32, 5)

    def loss(s):
        return topk_error(s, target, {5: 1.0}, operator, ce_weight=0, reduction="sum")

    exact = torch.autograd.grad(loss(leaf := scores.double().requires_grad_()), leaf)[0]
    inclusion = operator.inclusion(scores.double(), target, 5)[:, -1]
    counts = (inclusion > 1e-30) & (inclusion < 1 - 1e-6)
    leaf = scores.clone().requires_grad_()
    for gradient in (torch.func.grad(loss)(scores), torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].detach()):
        wrong = (gradient.double() - exact).abs().amax(-1) / exact.abs().amax(-1)
        assert wrong[counts].max() < 1e-5


@pytest.mark.parametrize("q", [1.0, 0.3])
@pytest.mark.parametrize("behind", [65.0, 30.0, 3.0, 0.0, -3.0, -14.0])
def test_gradients_in_float64_against_many_digits(behind, q):
    """KSubset and LapSum as their definitions say, in 60 digits."""
    others = [1.3, 0.2, -0.7, -1.1, 0.9, 0.4]
    for make, oracle in ((anyk.KSubset(), oracles.exact_ksubset), (anyk.LapSum(), oracles.exact_lapsum)):
        scores = torch.tensor([*others, -behind], dtype=torch.float64, requires_grad=True)
        loss = topk_error(scores, torch.tensor(6), {2: 1.0}, make, ce_weight=0, q=q)
        (gradient,) = torch.autograd.grad(loss, scores)
        with mpmath.workdps(60):
            step = mpmath.mpf(10) ** -20

            def error(place, sign, step=step, oracle=oracle):
                moved = [mpmath.mpf(s) + (sign * step if i == place else 0) for i, s in enumerate([*others, -behind])]
                return (1 - oracle(moved, 6, 2) ** q) / q

            expected = [float((error(i, 1) - error(i, -1)) / (2 * step)) for i in range(7)]
        torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


# ---- gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "ce_weight", "q"),
    [*((anyk.LapSum(), *shape) for shape in SHAPES), *((each, 0.5, 0.4) for each in operators(wires=("target", "given")))],
)
def test_gradients(operator, ce_weight, q):
    scores, target = batch(rows=2, n=7, dtype=torch.float64, seed=5)
    scores.requires_grad_()

    def loss(s, m):
        return topk_error(s, target, [0.3, 0.1, 0.0, 0.6], operator, m=m, ce_weight=ce_weight, q=q)

    for m in (None, 5):
        assert gradcheck(lambda s, m=m: loss(s, m), (scores,))
    assert gradgradcheck(lambda s: loss(s, 5), (scores,))


def test_gradients_of_probabilities_and_of_p_k():
    """Beside those of both families: probabilities with a smoothed cross-entropy, and P_K itself."""
    scores, target = batch(rows=3, n=6, dtype=torch.float64, seed=6)
    r = torch.rand(3, 6, dtype=torch.float64).softmax(-1)
    assert gradcheck(lambda s: topk_error(s, r, [0.5, 0.5], "lapsum", m=4, label_smoothing=0.3), (scores.requires_grad_(),))
    weights = torch.tensor([0.4, 0.6], dtype=torch.float64, requires_grad=True)
    # finite differences leave the simplex by less than what is accepted
    assert gradcheck(lambda p: topk_error(scores.detach(), target, p, "lapsum"), (weights,), eps=1e-6)


def test_a_learned_temperature_of_1_gets_a_gradient():
    """KSubset at temperature 1 among all classes is the softmax, for which nothing is ranked, unless the 1 may change."""
    temperature = torch.nn.Parameter(torch.tensor(1.0))
    scores, target = torch.randn(6, 9), torch.randint(9, (6,))
    loss = TopKErrorLoss([1.0], anyk.KSubset(temperature), m=None)(scores, target)
    torch.testing.assert_close(loss, TopKErrorLoss([1.0], anyk.KSubset(), m=None)(scores, target))
    loss.backward()
    assert temperature.grad is not None
    assert temperature.grad != 0


# ---- conventions --------------------------------------------------------------------------------------------------------


@shapes
def test_probabilities_outside_the_candidates(ce_weight, q):
    """They cost their cross-entropy in the cross-entropy, and 1 / q in the rest; in the limit of q 0 their cross-entropy."""
    n, m, operator = 10, 4, anyk.LapSum()
    scores = torch.linspace(1, -1, n, dtype=torch.float64)
    r = torch.zeros(n, dtype=torch.float64)
    r[[9, 5, 1, 8, 7]] = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04], dtype=torch.float64)
    kept = [0, 1, 5, 9]  # 9 and 5 are the most probable, then the best scores
    expected = 0.0
    for place, c in enumerate(kept):
        inclusion = operator.inclusion(scores[kept], torch.tensor(place), 2).tolist()
        expected += r[c].item() * oracles.topk_error(inclusion, scores.softmax(-1)[c].item(), [0.4, 0.6], ce_weight, q)
    for c in (8, 7):
        behind = -scores.log_softmax(-1)[c].item()
        expected += r[c].item() * (ce_weight * behind + (1 - ce_weight) * (1 / q if q else behind))
    actual = topk_error(scores, r, [0.4, 0.6], operator, m=m, ce_weight=ce_weight, q=q)
    assert actual.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("m", [None, 5])
def test_label_smoothing_is_the_cross_entropys_alone(m):
    scores, target = batch(n=8, dtype=torch.float64)
    scores[:, 7], target = -torch.inf, target % 7  # smoothing is over the classes that are not padding
    weight = torch.rand(8, dtype=torch.float64)
    call = {"p_k": [0.5, 0.5], "operator": "lapsum", "m": m, "q": 0.7, "reduction": "none"}
    for weights in (None, weight):
        bounded = topk_error(scores, target, ce_weight=0, weight=weights, **call)
        ce_weight = cross_entropy(scores[:, :7], target, weight=None if weights is None else weight[:7],
                              label_smoothing=0.2, reduction="none")  # fmt: skip
        actual = topk_error(scores, target, ce_weight=0.3, label_smoothing=0.2, weight=weights, **call)
        torch.testing.assert_close(actual, 0.3 * ce_weight + 0.7 * bounded)
        mean = topk_error(scores, target, ce_weight=0.3, label_smoothing=0.2, weight=weights, **{**call, "reduction": "mean"})
        torch.testing.assert_close(mean, actual.mean() if weights is None else actual.sum() / weight[target].sum())
    r = torch.rand(6, 8, dtype=torch.float64)
    r[:, 7] = 0
    smoothed = topk_error(scores, r, ce_weight=0.3, label_smoothing=0.2, **{**call, "m": None})
    bounded = topk_error(scores, r, ce_weight=0, **{**call, "m": None})
    plain, uniform = (cross_entropy(scores[:, :7], p[:, :7], reduction="none") for p in (r, torch.full_like(r, 1 / 7)))
    torch.testing.assert_close(smoothed, 0.3 * (0.8 * plain + 0.2 * uniform) + 0.7 * bounded)


@both_backends
@every_operator
def test_one_candidate_far_behind(operator):
    """It is the target, and the best class is not among the candidates."""
    scores = torch.tensor([[0.0, 2e4, 1e4]], requires_grad=True)
    loss = topk_error(scores, torch.tensor([0]), [1.0], operator, m=1)
    assert loss.item() == pytest.approx(0.2 * 2e4)
    (gradient,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(gradient, torch.tensor([[-0.2, 0.2, 0.0]]))


# ---- modules ------------------------------------------------------------------------------------------------------------


@both_backends
def test_module_is_the_function():
    scores, target = batch(rows=5, n=20)
    weight = torch.rand(20)
    settings = {"m": 8, "ce_weight": 0.4, "q": 0.6, "reduction": "sum", "ignore_index": 3, "weight": weight,
                "label_smoothing": 0.1}  # fmt: skip
    criterion = TopKErrorLoss(P_K, anyk.LapSum(0.5), **settings)
    expected = topk_error(scores, target, P_K, anyk.LapSum(0.5), **settings)
    for made in (criterion, copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert torch.equal(made(scores, target), expected)
    criterion.ce_weight = 0.9  # as a schedule does
    assert torch.equal(
        criterion(scores, target), topk_error(scores, target, P_K, anyk.LapSum(0.5), **{**settings, "ce_weight": 0.9})
    )
    for setting in ("p_k=[0.5, 0.0, 0.2, 0.0, 0.3]", "ce_weight=0.9", "q=0.6", "LapSum(temperature=0.5)", "m=8"):
        assert setting in repr(criterion)
    assert "LapSum" in repr(TopKErrorLoss(P_K))


# ---- bad input ----------------------------------------------------------------------------------------------------------

SCORES, TARGET = torch.zeros(2, 4), torch.tensor([0, 1])


def loss(p_k=(0.5, 0.5), **settings):
    return topk_error(SCORES, TARGET, p_k, **settings)


@pytest.mark.parametrize("make", [loss, lambda **settings: TopKErrorLoss([0.5, 0.5], **settings)], ids=["function", "module"])
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"ce_weight": 1.5}, ValueError, "ce_weight: expected a number between 0 and 1, got 1.5"),
        ({"ce_weight": "all"}, TypeError, "ce_weight: expected a number between 0 and 1, got 'all'"),
        ({"q": -0.1}, ValueError, "q: expected a number between 0 and 1, got -0.1"),
        ({"ce_weight": 0, "label_smoothing": 0.1}, ValueError, "label_smoothing: expected 0 with ce_weight = 0, .* got 0.1"),
        ({"top1": "mixed"}, TypeError, "top1"),
    ],
)
def test_bad_input(make, settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


@both_backends
def test_no_p_k_at_all():
    with pytest.raises(ValueError, match="p_k: expected a distribution, or example_p_k at the call, got None for both"):
        loss(p_k=None)
    criterion = TopKErrorLoss(None)
    with pytest.raises(ValueError, match="p_k: expected a distribution"):
        criterion(SCORES, TARGET)
    example = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert criterion(SCORES, TARGET, example_p_k=example) == loss(p_k=None, example_p_k=example)
    assert topk_cross_entropy(SCORES, TARGET, None, example_p_k=example).isfinite()
    with pytest.raises(ValueError, match="p_k: expected probabilities that sum to 1"):
        loss(p_k=[3.0], example_p_k=example)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("n", [20, 300])
def test_a_p_k_for_each_example_replaces_that_of_generalised_cross_entropy(n, backend):
    """Nothing is sorted for k = 1 alone; the examples may ask for more."""
    generator = torch.Generator().manual_seed(0)
    scores, target = torch.randn(6, n, generator=generator), torch.randint(n, (6,), generator=generator)
    p_k = torch.tensor([[0.2, 0.0, 0.0, 0.0, 0.8]]).repeat(6, 1)
    with anyk.backend(backend):
        expected = anyk.topk_error(scores, target, None, m=None, example_p_k=p_k)
        found = anyk.topk_error(scores, target, [1.0], m=None, example_p_k=p_k)
    torch.testing.assert_close(found, expected)
