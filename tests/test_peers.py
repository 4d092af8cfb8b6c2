"""Other people's implementations of the same formulae: difftopk, diffsort, POT, entmax; of others, the formulae."""

import contextlib
import io
import re
from pathlib import Path

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


# --- "you have X, write Y" of docs/operators.md ------------------------------------------------------------------------


def isotonic(values):
    from scipy.optimize import isotonic_regression

    return torch.from_numpy(isotonic_regression(values.numpy(), increasing=False).x.copy())


def permutahedron_ranks(x, r):
    """As torchsort and fast-soft-sort have them: the projection of x / r onto the permutations of (n, …, 1)."""
    ordered, order = (x / r).sort(descending=True)
    return torch.zeros_like(x).scatter(0, order, ordered - isotonic(ordered - torch.arange(len(x), 0, -1)))


def permutahedron_sort(x, r):
    """As torchsort has it: less the projection of (n, …, 1) / r onto the permutations of -x."""
    anchors = torch.arange(len(x), 0, -1) / r
    return isotonic(anchors - (-x).sort(descending=True).values) - anchors


def threshold_mask(x, k, probability):
    low, high = x.min() - 100, x.max() + 100
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(x - middle).sum() > k else (low, middle)
    return probability(x - middle)


def transported(x, k, epsilon):
    """Two anchors, 0 and 1."""
    n, cost = len(x), (x[:, None] - torch.tensor([0.0, 1.0])) ** 2
    masses = [torch.ones(n).double() / n, torch.tensor([n - k, k]).double() / n]
    plan = ot.sinkhorn(*(mass.numpy() for mass in masses), cost.numpy(), reg=epsilon, method="sinkhorn_log", numItermax=100_000,
                       stopThr=1e-10)  # fmt: skip
    return n * torch.from_numpy(plan)[:, 1]


def laplace_ranks(x, alpha):
    gaps = torch.distributions.Laplace(torch.zeros(()).double(), alpha).cdf(x[:, None] - x)
    return gaps.sum(1) - 0.5


def marginals(x, k):
    subsets = torch.combinations(torch.arange(len(x)), k)
    chosen = torch.zeros(len(subsets), len(x)).double().scatter(1, subsets, 1)
    return x[subsets].sum(1).softmax(0) @ chosen


def entmax():
    return pytest.importorskip("entmax")


PEERS = {
    "torchsort.soft_rank": lambda x, k, t: permutahedron_ranks(x, t),
    "torchsort.soft_sort": lambda x, k, t: permutahedron_sort(x, t),
    "softtorch.topk": lambda x, k, t: (-(x.sort(descending=True).values[:k, None] - x).abs() / t).softmax(-1),
    "entmax.budget_bisect": lambda x, k, t: entmax().budget_bisect(x / t, budget=k),
    "entmax.sparsemax": lambda x, k, t: entmax().sparsemax(x / t, dim=-1),
    "lapsum.soft_topk": lambda x, k, t: threshold_mask(x, k, torch.distributions.Laplace(torch.zeros(()).double(), t).cdf),
    "lapsum.soft_rank": lambda x, k, t: laplace_ranks(x, t),
    "LML": lambda x, k, t: threshold_mask(x, k, torch.sigmoid),
    "SOFT top-k": lambda x, k, t: transported(x, k, t),
    "SIMPLE, its marginals": lambda x, k, t: marginals(x, k),
}
"""what the page calls equal -> the same number by the peer, or by its formula"""


def lines_to_write():
    page = (Path(__file__).parent.parent / "docs" / "operators.md").read_text()
    table = page.partition("| you have |")[2].partition("\n\n")[0]
    return {
        cells[1].split("(")[0].strip(" `"): (re.findall("`([^`]+)`", cells[2]), cells[3].strip())
        for cells in (row.split("|") for row in table.splitlines()[2:])
    }


@pytest.mark.parametrize("t", [0.7, 3.0])
@pytest.mark.parametrize("peer", lines_to_write())
def test_you_have_x_write_y(peer, t):
    lines, differs = lines_to_write()[peer]
    x, k = random_rows(1, 9, seed=7).double().squeeze(0), 3
    x.requires_grad_()
    names = {
        "torch": torch,
        "anyk": anyk,
        "x": x,
        "k": k,
        "t": t,
        "values": torch.randn(9, 2).double(),
        "target": torch.randn(9),
    }
    for line in lines:
        result = eval(line, names)
        result = result[0] if isinstance(result, tuple) else result
        assert torch.autograd.grad(result.square().sum(), x)[0].isfinite().all()
    assert differs.startswith("equal") == (peer in PEERS)
    if peer in PEERS:
        torch.testing.assert_close(eval(lines[0], names).detach(), PEERS[peer](x.detach(), k, t), rtol=0, atol=1e-7)


def test_every_peer_is_on_the_page():
    assert set(PEERS) <= set(lines_to_write())


def test_temperature_nearest_to_perturbed_topk():
    """Gaussian noise of deviation sigma, and the mean of many exact top-k: the mask of LapSum at sigma is near."""
    torch.manual_seed(0)
    x, sigma = random_rows(5, 20, seed=8), 0.5
    noisy = x + sigma * torch.randn(20_000, 5, 20)
    expected = (noisy >= noisy.topk(5).values[..., -1:]).float().mean(0)
    assert (anyk.soft_topk(x, 5, temperature=sigma) - expected).abs().max() < 0.11
