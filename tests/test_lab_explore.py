"""The page to play with: its numbers against the library's, and its controls, in a real browser."""

import itertools
import json

import pytest
import torch

import anyk
import browser
from anyk import candidates
from anyk.lab import explore

NEEDS_BROWSER = pytest.mark.skipif(browser.find() is None, reason="no Chromium here: apt-get install chromium")

N = 12
SWAPS = ("logistic", "logistic_art", "cauchy", "gaussian", "reciprocal", "optimal")
NETWORKS = ("splitter", "bitonic", "odd_even")
WIRES = ("target", "sorted", "given")
OPERATORS = [
    *({"operator": kind, "swap": swap, "wires": wires} for kind, swap, wires in itertools.product(NETWORKS, SWAPS, WIRES)),
    {"operator": "neuralsort"},
    {"operator": "softsort", "power": 1},
    {"operator": "softsort", "power": 2},
    {"operator": "sinkhorn", "anchors": "all"},
    {"operator": "sinkhorn", "anchors": "topk"},
    {"operator": "lapsum"},
    {"operator": "ksubset"},
]
TEMPERATURES = (0.05, 1, 20, "auto")
P_KS = ([1.0], [0.5, 0, 0, 0, 0.5], [0.2] * 5, [0, 0, 0, 0, 1.0], [0.3, 0.2, 0.5, 0, 0])
MODES = ("separate", "mixed", "operator")


def operator(case, temperature):
    name = case["operator"]
    if name in NETWORKS:
        return anyk.SortingNetwork(name, temperature, case["swap"], case["wires"])
    if name == "softsort":
        return anyk.SoftSort(temperature, case["power"])
    if name == "sinkhorn":
        return anyk.SinkhornSort(temperature, anchors=case["anchors"])
    return {"neuralsort": anyk.NeuralSort, "lapsum": anyk.LapSum, "ksubset": anyk.KSubset}[name](temperature)


def score_rows():
    """Random, tied and far apart; the target in front, in the middle, behind."""
    generator = torch.Generator().manual_seed(1)
    usual = 2 * torch.randn(4, N, dtype=torch.float64, generator=generator)
    tied = torch.tensor(
        [
            [0.0] * N,
            [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, -2.0, -2.0, -2.0, -2.0, -2.0, -2.0],
            [2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0],
        ],
        dtype=torch.float64,
    )
    far = 60 * torch.randn(2, N, dtype=torch.float64, generator=generator)
    outlier = usual[0].clone()
    outlier[3] = -40.0
    rows = torch.cat([usual, tied, far, outlier[None]])
    targets = torch.tensor([int(usual[0].argmax()), 5, int(usual[2].argmin()), 0, 7, 4, 1, 0, int(far[1].argmin()), 3])
    return rows, targets


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    return explore.write(tmp_path_factory.mktemp("explore") / "explore.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


def computed(page, function, cases):
    """``function`` of every case in the page, as nested lists."""
    return json.loads(page.evaluate(f"JSON.stringify({json.dumps(cases)}.map({function}))"))


def deviation(found, expected):
    """The largest difference, relative where the numbers are large."""
    found, expected = torch.tensor(found, dtype=torch.float64), expected.detach()
    assert found.shape == expected.shape
    return ((found - expected).abs() / expected.abs().clamp(min=1)).amax().nan_to_num(nan=torch.inf).item()


@NEEDS_BROWSER
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_loss_and_gradient_agree_with_the_library(page, page_file, temperature):
    page.open(page_file)
    rows, targets = score_rows()
    worst = {}
    for case in OPERATORS:
        cases, losses, gradients = [], [], []
        for p_k, top1 in itertools.product(P_KS, MODES):
            scores = rows.clone().requires_grad_()
            loss = anyk.topk_cross_entropy(scores, targets, p_k, operator(case, temperature), top1=top1, reduction="none")
            losses.append(loss)
            gradients.append(torch.autograd.grad(loss.sum(), scores)[0])
            settings = {**case, "temperature": temperature, "pK": p_k, "top1": top1}
            cases += [
                {**settings, "scores": row, "target": y} for row, y in zip(rows.tolist(), targets.tolist(), strict=True)
            ]
        found = computed(page, "c => { const { loss, gradient } = anyk.loss(c); return [loss, ...gradient]; }", cases)
        worst[tuple(case.values())] = deviation(found, torch.cat([torch.cat(losses)[:, None], torch.cat(gradients)], 1))
    assert max(worst.values()) < 1e-6, sorted(worst.items(), key=lambda item: -item[1])[:10]


@NEEDS_BROWSER
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rank_probabilities_and_inclusion_agree_with_the_library(page, page_file, temperature):
    page.open(page_file)
    rows, targets = score_rows()
    everyone = torch.arange(N).expand(len(rows), N)
    worst = {}
    for case in OPERATORS:
        op = operator(case, temperature)
        for p_k in ([1.0], [0.0] * 4 + [1.0]):
            settings = {**case, "temperature": temperature, "pK": p_k}
            cases = [{**settings, "scores": row, "target": y} for row, y in zip(rows.tolist(), targets.tolist(), strict=True)]
            matrix = op(rows, len(p_k))
            inclusion = op.inclusion(rows[:, None, :].expand(-1, N, -1), everyone, len(p_k))
            found = computed(page, "c => { const { P, T } = anykCompute(c); return [...P.flat(), ...T.flat()]; }", cases)
            expected = torch.cat([matrix.flatten(1), inclusion.flatten(1)], 1)
            worst[tuple(case.values()), len(p_k)] = deviation(found, expected)
    assert max(worst.values()) < 1e-6, sorted(worst.items(), key=lambda item: -item[1])[:10]
