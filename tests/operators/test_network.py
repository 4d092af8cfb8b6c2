"""SortingNetwork: comparator by comparator, in far tails, with padding, and as a mask, as ranks and as a sort."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck, gradgradcheck

import anyk
import oracles
from anyk.networks import bitonic, odd_even, splitter
from anyk.swaps import SWAPS
from strategies import KINDS, rows

inf, nan = torch.inf, torch.nan
every_kind = pytest.mark.parametrize("kind", KINDS)
every_swap = pytest.mark.parametrize("swap", SWAPS)
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
KERNEL_SWAPS = ("logistic", "logistic_art", "gaussian")


def build(kind, n, k):
    return {"splitter": lambda: splitter(n, k), "bitonic": lambda: bitonic(n), "odd_even": lambda: odd_even(n)}[kind]()


def shares(kind, swap, t, arranged, k):
    """P of these scores, which start on the wires as they stand, from the oracle."""

    def value(v):
        return SWAPS[swap].value(torch.tensor(v, dtype=torch.float64)).item()

    found = oracles.soft_network(build(kind, len(arranged), k), arranged, value, t ** SWAPS[swap].power)
    return torch.tensor(found, dtype=torch.float64)


def double(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- the formula ---------------------------------------------------------------------------------------------------------


@every_swap
@every_kind
def test_comparator_by_comparator(kind, swap):
    t = 0.8
    for n, k in ((1, 1), (2, 1), (3, 3), (5, 2), (8, 5), (11, 4)):
        scores = double(n, seed=n)
        # "given": the last class starts on the first wire
        expected = shares(kind, swap, t, scores.flip(0).tolist(), k)[:k].flip(-1)
        given = anyk.SortingNetwork(kind, t, swap, wires="given")
        torch.testing.assert_close(given(scores, k), expected, rtol=1e-9, atol=1e-12)
        # "target": the target on its wire, the others in descending order on the rest
        wire = min({"splitter": 1, "bitonic": 4, "odd_even": 4}[kind], n // 2)
        operator, columns = anyk.SortingNetwork(kind, t, swap), []
        for target in range(n):
            others = sorted((s for c, s in enumerate(scores.tolist()) if c != target), reverse=True)
            arranged = [*others[:wire], scores[target].item(), *others[wire:]]
            columns.append(shares(kind, swap, t, arranged, k)[:k, wire])
            inclusion = operator.inclusion(scores, torch.tensor(target), k)
            torch.testing.assert_close(inclusion, columns[-1].cumsum(0), rtol=1e-9, atol=1e-12)
            column = expected[:, target].cumsum(0)
            torch.testing.assert_close(given.inclusion(scores, torch.tensor(target), k), column, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(operator(scores, k), torch.stack(columns, -1), rtol=1e-9, atol=1e-12)


@every_swap
@every_kind
def test_mask_ranks_and_sort_are_of_the_matrix_of_sorted_scores(kind, swap, backend):
    scores, t = double(4, 9), 0.6
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-6)):
        operator, own = anyk.SortingNetwork(kind, t, swap, wires="given"), scores.to(dtype)
        for row, score in zip(scores, own, strict=True):
            ordered, order = row.sort(descending=True)
            back = order.argsort()
            whole = shares(kind, swap, t, ordered.tolist(), 9)
            first = shares(kind, swap, t, ordered.tolist(), 4)[:4]
            expected = {
                "mask": first.sum(0)[back],
                "ranks": (torch.arange(1, 10).double() @ whole)[back],
                "sort": whole @ ordered,
            }
            found = {"mask": operator.mask(score, 4), "ranks": operator.ranks(score), "sort": operator.sort(score)}
            for name, value in expected.items():
                torch.testing.assert_close(found[name].double(), value, rtol=0, atol=10 * tolerance, msg=name)


def test_the_scores_of_a_comparator_are_mixed_as_their_classes_are():
    """Two of them, by hand: a = 1, b = 0 at t = 1/2."""
    alpha = 1 / (1 + math.exp(-2))
    matrix = anyk.SortingNetwork("odd_even", 0.5, wires="given")(torch.tensor([0.0, 1.0]), 2)
    torch.testing.assert_close(matrix, torch.tensor([[1 - alpha, alpha], [alpha, 1 - alpha]]))
    torch.testing.assert_close(
        anyk.SortingNetwork("odd_even", 0.5).sort(torch.tensor([0.0, 1.0])), torch.tensor([alpha, 1 - alpha])
    )


# ---- T -------------------------------------------------------------------------------------------------------------------


@every_kind
def test_rows_sum_to_one_only_as_given(kind):
    scores = double(6, 16)
    given = anyk.SortingNetwork(kind, wires="given")(scores, 16)
    torch.testing.assert_close(given.sum(-1), torch.ones(6, 16, dtype=torch.float64), rtol=0, atol=1e-9)
    own = anyk.SortingNetwork(kind)(scores, 16)
    torch.testing.assert_close(own.sum(-2), torch.ones(6, 16, dtype=torch.float64), rtol=0, atol=1e-9)
    assert (own.sum(-1) - 1).abs().max() > 0.05


@every_kind
def test_inclusion_is_continuous_in_the_scores(kind):
    """Walk the target across all its neighbours in small steps: no step may jump. In the order of the classes it would."""
    others = double(9, seed=2)
    walk = torch.linspace(-3, 3, 3001, dtype=torch.float64)
    scores, target = torch.cat([walk[:, None], others.expand(3001, 9)], -1), torch.zeros(3001, dtype=torch.long)
    inclusion = anyk.SortingNetwork(kind).inclusion(scores, target, 4)
    assert inclusion.diff(dim=0).abs().max() < 0.005
    ordered, order = scores.sort(dim=-1, descending=True)
    jumps = anyk.SortingNetwork(kind, wires="given").inclusion(ordered.flip(-1), 9 - order.argsort(-1)[:, 0], 4)
    assert jumps.diff(dim=0).abs().max() > 0.01


@settings(max_examples=5, deadline=None)
@given(row=rows(min_size=2, max_size=9, min_gap=0.2))
def test_cold_limit_is_sorting(row):
    n = len(row.scores)
    expected = torch.zeros(n, n, dtype=torch.float64)
    expected[torch.arange(n), torch.tensor(row.order)] = 1
    for kind, swap in itertools.product(KINDS, SWAPS):
        operator = anyk.SortingNetwork(kind, 1e-6, swap)
        torch.testing.assert_close(operator(row.scores, n), expected, rtol=0, atol=1e-3 if SWAPS[swap].heavy else 1e-6)


@every_swap
def test_log_inclusion_outlives_inclusion(swap):
    """A hopeless target keeps a slope, and log T has the digits of the tail of the swap."""
    scores = torch.tensor([[0.0, 10.0, 11.0, 12.0], [0.0, 1e3, 1e3, 1e3], [0.0, 1e5, 2e5, 3e5]], requires_grad=True)
    operator = anyk.SortingNetwork("splitter", 1.0, swap)
    log_inclusion = operator.log_inclusion(scores, torch.zeros(3, dtype=torch.long), 2)
    assert log_inclusion.isfinite().all()
    (grad,) = torch.autograd.grad(log_inclusion.sum(), scores)
    assert (grad[:, 0] > 0).all()
    torch.testing.assert_close(grad.sum(-1), torch.zeros(3), rtol=0, atol=1e-5)
    exact = scores.detach().double().requires_grad_()
    expected = operator.log_inclusion(exact, torch.zeros(3, dtype=torch.long), 2)
    torch.testing.assert_close(log_inclusion.double(), expected, rtol=1e-5, atol=1e-5)
    (right,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(grad[:, 0].double(), right[:, 0], rtol=1e-3, atol=1e-7)


@forward_mode
def test_near_one_the_slope_is_that_of_what_is_missing():
    """1 - T is e^-10 to e^-40, far below what float32 can tell from 1."""
    for lead in (10.0, 20.0, 40.0):
        scores = torch.tensor([lead, 0.0, -0.5, -1.0])
        grads = []
        for dtype in (torch.float32, torch.float64):
            own = scores.clone().to(dtype).requires_grad_()
            anyk.SortingNetwork().inclusion(own, torch.tensor(0), 2).sum().backward()
            grads.append(own.grad.double())
            (jvp,) = torch.func.jacfwd(lambda s: anyk.SortingNetwork().inclusion(s, torch.tensor(0), 2).sum()[None])(
                own.detach()
            )
            torch.testing.assert_close(jvp.double(), grads[-1], rtol=1e-4, atol=0)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=0)
        assert grads[0][0] > 0


@pytest.mark.parametrize("wires", ["given", "target"])
@pytest.mark.parametrize("swap", KERNEL_SWAPS)
@every_kind
def test_digits_beside_far_outliers(kind, swap, wires):
    """In a mixture with an outlier nothing may round by as much as it is away."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 16, generator=generator)
    far = torch.rand(64, 16, generator=generator).argsort(-1)[:, :3]
    scores.scatter_(-1, far, 1e6 * (torch.randint(2, (64, 3), generator=generator) * 2.0 - 1))
    target = torch.randint(16, (64,), generator=generator)
    operator, results = anyk.SortingNetwork(kind, 0.7, swap, wires), []
    torch.testing.assert_close(operator(scores, 5), operator(scores.double(), 5).float(), rtol=1e-5, atol=1e-5)
    for dtype in (torch.float32, torch.float64):
        own = scores.clone().to(dtype).requires_grad_()
        inclusion = operator.inclusion(own, target, 5)
        inclusion.sum().backward()
        results.append((inclusion.float(), own.grad.float()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    # the slope of logistic_art near ties is steep: it multiplies the rounding of the scores
    tolerance = 1e-3 if swap == "logistic_art" else 1e-5
    torch.testing.assert_close(results[0][1], results[1][1], rtol=tolerance, atol=tolerance)


# ---- padding, infinity, NaN ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wires", ["given", "target"])
@every_swap
@every_kind
def test_a_padded_row_is_the_shorter_row(kind, swap, wires):
    operator = anyk.SortingNetwork(kind, 0.8, swap, wires)
    for size, place in ((9, [1, 2, 3, 4, 7, 8, 9, 10, 12]), (5, [0, 4, 5, 6, 12]), (2, [3, 9])):
        scores, k = double(3, size), min(size, 4)
        padded = torch.full((3, 13), -inf, dtype=torch.float64)
        padded[:, place] = scores
        whole = torch.cat([padded, double(2, 13)]).requires_grad_()  # beside rows without padding
        target = torch.tensor([0, 1, size - 1])
        places = torch.tensor(place)[target]
        log_inclusion = operator.log_inclusion(whole, torch.cat([places, target[:2]]), k)[:3]
        torch.testing.assert_close(log_inclusion, operator.log_inclusion(scores, target, k))
        for function in (lambda s, k=k: operator(s, k), lambda s, k=k: operator.mask(s, k), operator.ranks):
            torch.testing.assert_close(function(whole)[:3][..., place], function(scores))
        torch.testing.assert_close(operator.sort(whole)[:3, :size], operator.sort(scores))
        assert (operator.sort(whole)[:3, size:] == -inf).all()
        hidden = [c for c in range(13) if c not in place]
        assert (operator(whole, k)[:3, :, hidden] == 0).all()
        assert (operator.mask(whole, k)[:3, hidden] == 0).all()
        assert operator.ranks(whole)[0, hidden].tolist() == list(range(size + 1, 14))
        results = operator(whole, k).square()[:3].sum() + log_inclusion.sum() + operator.mask(whole, k)[:3, :9].sum()
        (grad,) = torch.autograd.grad(results + operator.ranks(whole)[:3, :7].sum(), whole)
        assert grad.isfinite().all()
        assert (grad[:3, hidden] == 0).all()


@every_kind
def test_infinity_and_nan(kind, backend):
    operator = anyk.SortingNetwork(kind)
    scores = torch.tensor([[0.5, inf, 0.0, 1.0], [0.5, nan, 0.0, 1.0], [-inf, 0.3, -inf, -inf], [inf, inf, 0.0, -inf]])
    scores.requires_grad_()
    for result in (operator.mask(scores, 2), operator.ranks(scores), operator.sort(scores)):
        assert result.isnan().all(-1).tolist() == [False, True, False, False]
        assert not result[[0, 2, 3]].isnan().any()
    assert operator.mask(scores, 2)[2].tolist() == [0, 1, 0, 0]  # all there is
    torch.testing.assert_close(operator.mask(scores, 2)[[0, 3]].sum(-1), torch.full((2,), 2.0))
    assert operator.mask(scores, 2)[0, 1] == 1
    torch.testing.assert_close(operator.mask(scores, 1)[3], torch.tensor([0.5, 0.5, 0, 0]))
    assert operator.sort(scores)[0, 0] == inf
    (grad,) = torch.autograd.grad(operator.mask(scores, 2).square().sum() + operator.ranks(scores).square().sum(), scores)
    assert grad[[0, 2, 3]].isfinite().all()
    assert operator.inclusion(scores, torch.tensor([0, 0, 1, 2]), 1)[1].isnan().all()


# ---- the mask ------------------------------------------------------------------------------------------------------------


@every_swap
@every_kind
def test_mask_does_not_depend_on_the_order(kind, swap, backend):
    operator = anyk.SortingNetwork(kind, 0.5, swap)
    scores = torch.randn(5, 12).mul(2).round().requires_grad_()  # with ties
    order, weight = torch.randperm(12), torch.randn(5, 12)
    mask = operator.mask(scores, 5)
    torch.testing.assert_close(operator.mask(scores[:, order], 5), mask[:, order])
    for row, ties in zip(mask, scores, strict=True):
        for score in ties.unique():
            assert row[ties == score].unique().numel() == 1
    (grad,) = torch.autograd.grad((mask * weight).sum(), scores)
    (moved,) = torch.autograd.grad((operator.mask(scores[:, order], 5) * weight[:, order]).sum(), scores)
    torch.testing.assert_close(moved.sum(-1), grad.sum(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
@every_kind
def test_mask_sums_to_k(kind, temperature, backend):
    operator = anyk.SortingNetwork(kind, temperature)
    for dtype, n, tolerance in ((torch.float32, 200, 1e-5), (torch.bfloat16, 40, 1e-2)):
        scores = torch.randn(4, n) + torch.tensor([[0.0], [1e6], [-30.0], [0.0]])
        scores[3] *= 1e6
        for k in (1, 5, n // 2, n - 1):
            mask = operator.mask(scores.to(dtype), k)
            assert mask.dtype == dtype
            assert ((mask >= 0) & (mask <= 1)).all()
            torch.testing.assert_close(mask.float().sum(-1), torch.full((4,), float(k)), rtol=tolerance, atol=0)


@pytest.mark.parametrize("swap", KERNEL_SWAPS)
@every_kind
def test_the_kernel_is_the_plain_code(kind, swap):
    results = []
    for backend in ("native", "torch"):
        with anyk.backend(backend):
            for n, k in ((2, 1), (17, 5), (100, 30)):
                scores = torch.randn(6, n, generator=torch.Generator().manual_seed(n))
                scores[0] = scores[0].round()
                scores.requires_grad_()
                temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
                mask = anyk.SortingNetwork(kind, temperature, swap).mask(scores, k)
                loss = (mask * torch.linspace(-1, 1, n)).sum()
                grads = torch.autograd.grad(loss, (scores, temperature), create_graph=True)
                (second,) = torch.autograd.grad(grads[0].square().sum(), scores, retain_graph=True)
                first = torch.autograd.grad(mask.square().sum(), (scores, temperature))
                results.append((mask, *first, second))
    half = len(results) // 2
    for found, expected in zip(results[:half], results[half:], strict=True):
        for one, other in zip(found, expected, strict=True):
            scale = other.detach().abs().max().item()
            torch.testing.assert_close(
                one, other, rtol=0, atol=max(2e-4 if swap == "logistic_art" else 2e-5, 1e-6) * max(scale, 1)
            )


def test_what_the_kernels_may_not_compute():
    class Mine(anyk.SortingNetwork):
        pass

    assert anyk.SortingNetwork().kernel(16, 5) == ("network", 1.0, "splitter", "logistic", "target")
    assert anyk.SortingNetwork("bitonic", 0.5, "logistic_art", "given").kernel(16, 5)[1] == 0.25
    assert Mine().kernel(16, 5) is None
    assert anyk.SortingNetwork(temperature=torch.tensor(1.0)).kernel(16, 5) is None
    assert anyk.SortingNetwork(temperature=1e-26).kernel(16, 5) is None
    assert anyk.SortingNetwork().kernel(5000, 5) is None


# ---- gradients -----------------------------------------------------------------------------------------------------------


@forward_mode
@every_swap
@every_kind
def test_gradients(kind, swap):
    scores = (double(2, 6) * 1.5).requires_grad_()
    temperature = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4])
    for wires in ("target", "given"):

        def everything(scores, temperature, wires=wires):
            operator = anyk.SortingNetwork(kind, temperature, swap, wires)
            return torch.cat([operator.log_inclusion(scores, target, 4), operator.mask(scores, 3)], -1)

        fast = (kind, swap) != ("splitter", "logistic")
        assert gradcheck(everything, (scores, temperature), check_forward_ad=True, check_batched_grad=not fast, fast_mode=fast)
        if swap != "optimal":  # whose derivative has a bend
            assert gradgradcheck(everything, (scores, temperature), fast_mode=True)


@forward_mode
@every_kind
def test_gradients_of_ranks_sort_and_matrix(kind):
    scores, operator = double(2, 6).requires_grad_(), anyk.SortingNetwork(kind, 0.8)
    for function in (operator.ranks, operator.sort, lambda s: operator(s, 3)):
        assert gradcheck(function, (scores,), check_forward_ad=True)
        assert gradgradcheck(function, (scores,), fast_mode=True)


@forward_mode
@every_kind
def test_functional_transforms(kind):
    operator, scores = anyk.SortingNetwork(kind), double(3, 7)
    target = torch.tensor([1, 5, 2])
    expected = operator.log_inclusion(scores, target, 3)
    torch.testing.assert_close(torch.vmap(lambda s, y: operator.log_inclusion(s, y, 3))(scores, target), expected)
    torch.testing.assert_close(torch.vmap(lambda s: operator.mask(s, 3))(scores), operator.mask(scores, 3))

    def total(s):
        return operator.log_inclusion(s, torch.tensor(1), 3).sum() + operator.mask(s, 3)[2]

    hessian = torch.autograd.functional.hessian(total, scores[0])
    torch.testing.assert_close(torch.func.hessian(total)(scores[0]), hessian)


def test_a_temperature_for_each_row():
    scores, temperature = double(3, 8), torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    operator, target = anyk.SortingNetwork(temperature=temperature), torch.tensor([1, 4, 2])
    results = [operator.mask(scores, 3), operator.ranks(scores), operator.sort(scores)]
    results += [operator.inclusion(scores, target, 3), operator(scores, 3)]
    for row, t in enumerate(temperature.tolist()):
        one, score = anyk.SortingNetwork(temperature=t), scores[row]
        expected = [one.mask(score, 3), one.ranks(score), one.sort(score), one.inclusion(score, target[row], 3), one(score, 3)]
        for found, right in zip(results, expected, strict=True):
            torch.testing.assert_close(found[row], right)


# ---- compiled ------------------------------------------------------------------------------------------------------------


def test_compiled():
    torch._dynamo.reset()
    operator, target = anyk.SortingNetwork("bitonic"), torch.tensor([0, 4])

    def everything(scores, target):
        return torch.cat([operator.log_inclusion(scores, target, 3), operator.mask(scores, 2)], -1)

    found = torch.randn(2, 5, requires_grad=True)
    expected = found.detach().clone().requires_grad_()
    results = [
        function(s, target)
        for function, s in ((torch.compile(everything, fullgraph=True, backend="aot_eager"), found), (everything, expected))
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_what_a_trace_makes_does_not_outlive_it():
    from torch.fx.experimental.proxy_tensor import make_fx

    operator, scores = anyk.SortingNetwork(), torch.randn(2, 23)
    make_fx(lambda s: operator.ranks(s), tracing_mode="fake")(scores)
    torch.vmap(operator.ranks)(scores)
    with torch.inference_mode():
        operator.ranks(scores)
    own = scores.clone().requires_grad_()
    operator.ranks(own).square().sum().backward()
    assert own.grad.isfinite().all()


# ---- words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "known"), [("kind", "'splitter'"), ("swap", "'logistic'"), ("wires", "'target', 'given'")])
def test_words_are_checked(name, known):
    operator = anyk.SortingNetwork()
    with pytest.raises(ValueError, match=f"{name}: expected one of {known}.*, got 'nosuch'"):
        setattr(operator, name, "nosuch")
    with pytest.raises(ValueError, match=f"{name}: expected one of"):
        anyk.SortingNetwork(**{name: "nosuch"})
    assert repr(operator) == "SortingNetwork('splitter', temperature=1.0, swap='logistic', wires='target')"
