"""Other people's implementations of the same formulae: difftopk, diffsort, POT."""

import contextlib
import io

import pytest
import torch

import anyk

with contextlib.redirect_stdout(io.StringIO()):  # difftopk prints on import
    difftopk = pytest.importorskip("difftopk")
ot = pytest.importorskip("ot")

SWAP_NAMES = {
    "logistic": "logistic",
    "logistic_art": "logistic_phi",
    "cauchy": "cauchy",
    "gaussian": "gaussian",
    "reciprocal": "reciprocal",
    "optimal": "optimal",
}
swaps = pytest.mark.parametrize("swap", SWAP_NAMES)
kinds = pytest.mark.parametrize("kind", ["odd_even", "bitonic"])


def random_rows(batch, n, seed=0):
    return torch.randn(batch, n, generator=torch.Generator().manual_seed(seed)) * 2


@swaps
@kinds
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_networks_against_difftopk(kind, swap, temperature):
    for n in (8, 16) if kind == "bitonic" else (7, 16):
        scores = random_rows(20, n)
        peer = difftopk.DiffTopkNet(kind, n, 5, steepness=1 / temperature, art_lambda=0.5, distribution=SWAP_NAMES[swap])
        expected = peer(scores)[1].flip(-1).transpose(-1, -2)  # there the best rank is the last column
        actual = anyk.SortingNetwork(kind, temperature, swap, wires="given")(scores, 5)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-2 if swap == "logistic_art" else 1e-5)


def test_neuralsort_against_difftopk():
    scores = random_rows(20, 12, seed=2)
    expected = difftopk.NeuralSort(tau=1.7)(scores).flip(-1).transpose(-1, -2)
    torch.testing.assert_close(anyk.NeuralSort(1.7)(scores, 12), expected, rtol=0, atol=1e-5)


def test_softsort_against_difftopk():
    scores = random_rows(20, 12, seed=3)
    expected = difftopk.SoftSort(tau=0.6)(scores)
    torch.testing.assert_close(anyk.SoftSort(0.6)(scores, 12), expected, rtol=0, atol=1e-5)


METHODS = {
    "odd_even": lambda t: anyk.SortingNetwork("odd_even", t, wires="given"),
    "bitonic__non_sparse": lambda t: anyk.SortingNetwork("bitonic", t, wires="given"),
    "neuralsort": anyk.NeuralSort,
    "softsort": anyk.SoftSort,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("mode", "top1"), [("sort", "operator"), ("sm", "mixed"), ("smce", "separate")])
@pytest.mark.parametrize("p_k", [[0.2] * 5, [0.5, 0, 0, 0, 0.5], [0.1, 0.2, 0.7]])
def test_losses_against_difftopk(method, mode, top1, p_k):
    n, t = 16, 2.0
    peer = difftopk.TopKCrossEntropyLoss(
        method, inverse_temperature=1 / t, p_k=p_k, n=n, distribution="logistic", top1_mode=mode
    )
    compared = 0
    weights, rest = torch.tensor(p_k), sum(p_k[1:])
    for seed in range(60):
        scores = random_rows(1, n, seed)
        target = torch.tensor([seed % n])
        operator = METHODS[method](t)
        inclusion = operator.inclusion(scores, target, len(p_k)).squeeze(0)
        p = (weights[1:] * inclusion[1:]).sum()
        if mode == "sort":
            p = (weights * inclusion).sum()
        elif mode == "sm":
            p = p + p_k[0] * scores.softmax(-1)[0, target[0]]
        limit = rest if mode == "smce" else 1.0
        if not 1e-3 <= p <= limit:  # its T above 1 is not ours
            continue
        # Its floor under the logarithm is not ours either: take exactly that off.
        floor = (p.double() * (1 - 2e-7) + 1e-7).log() - p.double().log()
        expected = peer(scores, target).double() + (rest if mode == "smce" else 1.0) * floor
        if mode == "smce":
            expected = expected + rest * torch.tensor(rest).log()  # published without the division by 1 - P_K(1)
        actual = anyk.topk_cross_entropy(scores, target, p_k, operator, top1=top1).double()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize("t", [0.5, 1.0, 10.0])
def test_sinkhorn_plan_against_pot(t):
    n = 9
    scores = random_rows(1, n, seed=4).double().squeeze(0) * 0.5
    anchors = -torch.arange(1, n + 1, dtype=torch.float64)
    cost = (scores[None, :] - anchors[:, None]) ** 2
    mass = torch.full((n,), 1 / n, dtype=torch.float64)
    plan = ot.sinkhorn(
        mass.numpy(), mass.numpy(), cost.numpy(), reg=t, method="sinkhorn_log", numItermax=200_000, stopThr=1e-12
    )
    torch.testing.assert_close(anyk.SinkhornSort(t)(scores, n), n * torch.from_numpy(plan), rtol=1e-5, atol=1e-7)


def test_sinkhorn_topk_plan_against_pot():
    n, k, t = 9, 3, 1.0
    scores = random_rows(1, n, seed=5).double().squeeze(0) * 0.5
    anchors = -torch.tensor([1.0, 2.0, 3.0, (4 + 9) / 2], dtype=torch.float64)
    masses = torch.tensor([1, 1, 1, n - k], dtype=torch.float64) / n
    cost = (scores[None, :] - anchors[:, None]) ** 2
    mass = torch.full((n,), 1 / n, dtype=torch.float64)
    plan = ot.sinkhorn(
        masses.numpy(), mass.numpy(), cost.numpy(), reg=t, method="sinkhorn_log", numItermax=200_000, stopThr=1e-12
    )
    expected = n * torch.from_numpy(plan)[:k]
    torch.testing.assert_close(anyk.SinkhornSort(t, anchors="topk")(scores, k), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("k", [2, 3, 5])
def test_smooth_topk_against_difftopk(k):
    from difftopk.smooth_topk import SmoothHardTopKLoss

    scores = random_rows(30, 12, seed=6)
    target = torch.arange(30) % 12
    for temperature in (0.5, 1.0):
        for scale in (1.0, 10.0):
            expected = SmoothHardTopKLoss(12, k, tau=temperature)(scores.clone() * scale, target)
            actual = anyk.SmoothTopKLoss(k, temperature)(scores * scale, target)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
