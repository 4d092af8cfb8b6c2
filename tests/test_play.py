"""The page to play with, docs/play.html: its numbers against the library's, by Node; its controls, in a real browser."""

import functools
import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import anyk
from anyk import candidates
from anyk.registry import NETWORKS as KINDS
from anyk.registry import SWAPS as LIBRARY_SWAPS

PAGE = Path(__file__).parent.parent / "docs" / "play.html"
NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="no Node here: apt-get install nodejs")

N = 12
SWAPS = tuple(LIBRARY_SWAPS)
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
TEMPERATURES = (0.05, 1, 20)
P_KS = ([1.0, 0, 0, 0, 0], [0.3, 0.2, 0.5, 0, 0], [0.5, 0, 0, 0, 0.5], [0.2] * 5, [0, 0, 0, 0, 1.0])
MODES = ("separate", "mixed", "operator")
CROSS_ENTROPY = [({"top1": top1}, functools.partial(anyk.topk_cross_entropy, top1=top1)) for top1 in MODES]
ERROR = [
    ({"family": "error", "ce_weight": ce_weight, "q": q}, functools.partial(anyk.topk_error, ce_weight=ce_weight, q=q))
    for ce_weight, q in ((0.2, 1.0), (0.0, 0.5), (0.5, 0.25), (0.2, 0.0), (1.0, 1.0))
]
"""the settings of the page, and the function that they are"""


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
    """Random, tied and far apart, and T above 1 by SoftSort, which counts as 1; the target in front, in the middle, behind."""
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
    above_1 = torch.tensor([3.0, 2.7, 2.4, 1.7, 1.3] + [-6.0] * 7, dtype=torch.float64)
    rows = torch.cat([usual, tied, far, outlier[None], above_1[None]])
    targets = torch.tensor([int(usual[0].argmax()), 5, int(usual[2].argmin()), 0, 7, 4, 1, 0, int(far[1].argmin()), 3, 2])
    return rows, targets


def with_scores(settings, rows, targets):
    return [{**settings, "scores": row, "target": y} for row, y in zip(rows.tolist(), targets.tolist(), strict=True)]


def in_node(function, cases):
    """``function`` of every case, by the mathematics of the page, which is its first script."""
    mathematics = re.search(r"<script>(.*?)</script>", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    ask = f"const cases = JSON.parse(require('fs').readFileSync(0)); console.log(JSON.stringify(cases.map({function})));"
    done = subprocess.run(["node", "-e", mathematics + ask], input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def computed(function, cases):
    """``function`` of every case in the page: a row of numbers each, zeros at the end of short ones."""
    # JSON has no NaN and no infinity: they come as null
    rows = [[math.nan if x is None else x for x in row] for row in in_node(function, cases)]
    return stacked([torch.tensor(row, dtype=torch.float64) for row in rows])


def stacked(rows):
    """Rows of different length, with zeros at the end."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def assert_agree(cases, found, expected, tolerance=1e-6):
    """No difference above the tolerance, relative where the numbers are large."""
    assert found.shape == expected.shape == (len(cases), found.shape[1])
    differences = ((found - expected).abs() / expected.abs().clamp(min=1)).nan_to_num(nan=math.inf).amax(1)
    worst = differences.argsort(descending=True)[:5].tolist()
    assert differences.max() < tolerance, [(differences[number].item(), cases[number]) for number in worst]


def losses_and_gradients(loss, rows, targets, op, **keywords):
    scores = rows.clone().requires_grad_()
    losses = loss(scores, targets, operator=op, reduction="none", **keywords)
    (gradients,) = torch.autograd.grad(losses.sum(), scores)
    return torch.cat([losses.detach()[:, None], gradients], 1)


LOSS_AND_GRADIENT = "c => { const { loss, gradient } = anyk.loss(c); return [loss, ...gradient]; }"


def gathered_over_ties(results, rows, targets):
    """Losses and gradients, each class with the sum over the others of equal score.

    Where T has underflowed, the loss follows a tail in the distance to the j-th best of the other classes. With
    ``wires="given"`` the library lets ``torch.topk`` choose it, which takes any of several equal ones.
    """
    is_target = torch.nn.functional.one_hot(targets, N).bool()
    equal = (rows[:, :, None] == rows[:, None, :]) & (is_target[:, :, None] == is_target[:, None, :])
    return torch.cat([results[:, :1], (equal.double() @ results[:, 1:, None]).squeeze(-1)], 1)


@NEEDS_NODE
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("family", [CROSS_ENTROPY, ERROR], ids=["cross_entropy", "error"])
def test_loss_and_gradient_agree_with_the_library(family, temperature):
    rows, targets = score_rows()
    batches = [(p_k, *form) for p_k in ([P_KS[0]], [P_KS[1]], P_KS[2:]) for form in family]  # those of equal k together
    cases, expected, log_t = [], [], []
    for settings in OPERATORS:
        op = operator(settings, temperature)
        for p_ks, form, loss in batches:
            k = max(k for p_k in p_ks for k in range(1, 6) if p_k[k - 1] > 0)
            every_row, every_target = rows.repeat(len(p_ks), 1), targets.repeat(len(p_ks))
            weights = torch.tensor([p_k[:k] for p_k in p_ks], dtype=torch.float64).repeat_interleave(len(rows), 0)
            expected.append(losses_and_gradients(loss, every_row, every_target, op, p_k=weights[0], example_p_k=weights))
            for p_k in p_ks:
                cases += with_scores({**settings, "temperature": temperature, "pK": p_k, **form}, rows, targets)
            if settings["operator"] == "sinkhorn":
                log_t.append(op.log_inclusion(every_row, every_target, k)[:, -1])
            else:
                log_t.append(torch.zeros(len(every_row)))
    found, expected = computed(LOSS_AND_GRADIENT, cases), torch.cat(expected)
    every_row = torch.tensor([case["scores"] for case in cases], dtype=torch.float64)
    every_target = torch.tensor([case["target"] for case in cases])
    given = torch.tensor([case.get("wires") == "given" for case in cases])
    found, expected = (
        torch.where(given[:, None], gathered_over_ties(results, every_row, every_target), results)
        for results in (found, expected)
    )
    far = torch.cat(log_t) < -20
    assert_agree([case for case, is_far in zip(cases, far.tolist(), strict=True) if not is_far], found[~far], expected[~far])
    # Sinkhorn's gradient where T < 1e-9 is made of links between ranks that are lost in rounding: the library's own changes by
    # as much when all scores are shifted by a third.
    difference, size = (found - expected)[far].abs(), expected[far].abs()
    assert (difference[:, 0] <= 1e-4 * size[:, 0].clamp(min=1)).all()
    assert (difference[:, 1:] <= 0.05 * size[:, 1:].amax(1, keepdim=True).clamp(min=1)).all()


ALL_NUMBERS = "c => { const { P, T } = anyk.compute(c); return [...P.flat().map(p => p ?? 0), ...T.flat()]; }"


@NEEDS_NODE
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rank_probabilities_and_inclusion_agree_with_the_library(temperature):
    rows, targets = score_rows()
    everyone = torch.arange(N).expand(len(rows), N)
    cases, expected = [], []
    for settings in OPERATORS:
        op = operator(settings, temperature)
        for p_k in ([1.0], [0.0] * 4 + [1.0]):
            cases += with_scores({**settings, "temperature": temperature, "pK": p_k}, rows, targets)
            inclusion = op.inclusion(rows[:, None, :].expand(-1, N, -1), everyone, len(p_k))
            expected += torch.cat([op(rows, len(p_k)).flatten(1), inclusion.flatten(1)], 1)
    assert_agree(cases, computed(ALL_NUMBERS, cases), stacked(expected))


@NEEDS_NODE
@pytest.mark.parametrize("m", [5, 8])
def test_candidates_agree_with_the_library(m):
    """Untied scores: which of equal ones is kept is for ``torch.topk`` to say."""
    usual_and_far = [part[[0, 1, 2, 3, 7]] for part in score_rows()]
    p_k = [0.2] * 5
    matrices, losses = ([], []), ([], [])
    for settings, temperature in itertools.product(
        [case for case in OPERATORS if case.get("swap", "logistic") == "logistic"], (1, 3)
    ):
        op = operator(settings, temperature)
        rows, targets = (part[:4] if settings["operator"] == "sinkhorn" else part for part in usual_and_far)
        settings = {**settings, "temperature": temperature, "pK": p_k, "m": m}
        classes, _ = candidates.choose(rows, targets, m)
        matrix = torch.zeros(len(rows), 5, N, dtype=torch.float64)
        matrix.scatter_(-1, classes[:, None, :].expand(-1, 5, -1), op(rows.gather(-1, classes), 5))
        each = rows[:, None, :].expand(-1, N, -1)
        each_classes, position = candidates.choose(each, torch.arange(N).expand(len(rows), N), m)
        inclusion = op.candidate_log_inclusion(each.gather(-1, each_classes), position, None, 5).exp()
        matrices[0].extend(with_scores(settings, rows, targets))
        matrices[1].extend(torch.cat([matrix.flatten(1), inclusion.flatten(1)], 1))
        for softmax_over, top1 in itertools.product(("all", "candidates"), MODES):
            keywords = {"m": m, "top1": top1, "softmax_over": softmax_over}
            losses[0].extend(with_scores({**settings, "softmaxOver": softmax_over, "top1": top1}, rows, targets))
            losses[1].extend(losses_and_gradients(anyk.topk_cross_entropy, rows, targets, op, p_k=p_k, **keywords))
        for form, loss in ERROR:
            losses[0].extend(with_scores({**settings, **form}, rows, targets))
            losses[1].extend(losses_and_gradients(loss, rows, targets, op, p_k=p_k, m=m))
    assert_agree(matrices[0], computed(ALL_NUMBERS, matrices[0]), stacked(matrices[1]))
    assert_agree(losses[0], computed(LOSS_AND_GRADIENT, losses[0]), stacked(losses[1]))


MASKS = {
    "lapsum": anyk.LapSum,
    "permutahedron": anyk.Permutahedron,
    "ksubset": anyk.KSubset,
    "sinkhorn": anyk.SinkhornSort,
    "splitter": functools.partial(anyk.SortingNetwork, "splitter"),
}
REAL_K = ("lapsum", "permutahedron", "sinkhorn")


def rows_for_masks():
    """Random, tied in part and wholly, with large gaps. At these levels of ties no mask of Permutahedron has a kink."""
    generator = torch.Generator().manual_seed(2)
    usual = torch.cat([size * torch.randn(4, N, dtype=torch.float64, generator=generator) for size in (0.5, 3, 100)])
    levels = torch.randint(3, (4, N), generator=generator)
    tied = torch.tensor([0.0, 0.7, -2.1], dtype=torch.float64)[torch.cat([levels, torch.zeros_like(levels[:1])])]
    rows = torch.cat([usual, tied, 1e4 * tied[:1]])
    return rows, torch.randint(N, (len(rows),), generator=generator)


@NEEDS_NODE
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_their_gradients_agree_with_the_library(name):
    rows, entries = rows_for_masks()
    cases, expected = [], []
    for temperature, k in itertools.product((0.05, 0.4, 1, 5), (*range(1, N), *((0.3, 4.5, 11.25) if name in REAL_K else ()))):
        scores = rows.clone().requires_grad_()
        mask = anyk.soft_topk(scores, k, MASKS[name](temperature))
        (gradient,) = torch.autograd.grad(mask.gather(1, entries[:, None]).sum(), scores)
        undecided = (mask * (1 - mask)).sum(1, keepdim=True)
        expected.append(torch.cat([undecided, gradient, mask], 1).detach())
        cases += with_scores({"temperature": temperature, "k": k}, rows, entries)
    numbers = f"c => {{ const r = anyk.masks(c).{name}; return [r.undecided, ...r.gradient, ...r.mask]; }}"
    found, expected = computed(numbers, cases), torch.cat(expected)
    if name == "splitter":  # where two scores cross, its mask jumps: only as far as ties move together has it a derivative
        every_row = torch.tensor([case["scores"] for case in cases], dtype=torch.float64)
        equal = (every_row[:, :, None] == every_row[:, None, :]).double()
        for results in (found, expected):
            results[:, 1 : N + 1] = (equal @ results[:, 1 : N + 1, None]).squeeze(-1)
    assert_agree(cases, found, expected)


@NEEDS_NODE
def test_all_numbers_are_finite_wherever_the_controls_go():
    rows = [[6.0] + [-6.0] * 11, [-6.0] + [6.0] * 11, [-6.0, 6.0] * 6, [0.0] * N]
    some = [settings for settings in OPERATORS if settings.get("wires", "target") == "target"]
    forms = ({"top1": "operator"}, {"family": "error", "ce_weight": 0, "q": 0.5})
    cases = [
        {**settings, "temperature": temperature, "pK": p_k, "m": m, **form, "scores": row, "target": target}
        for settings, temperature, p_k, m, form, row, target in itertools.product(
            some, (0.001, 1000), (P_KS[0], P_KS[3]), (5, None), forms, rows, (0, 3)
        )
    ]
    results = "const r = anyk.compute(c); return [r.loss, ...r.gradient, ...r.P.flat().map(p => p ?? 0), ...r.T.flat()]"
    assert computed(f"c => {{ {results}; }}", cases).isfinite().all()
    cases = [
        {"temperature": temperature, "k": k, "scores": row, "target": 3}
        for temperature, k, row in itertools.product((0.001, 1000), (1, 1.25, 6, 10.75, 11), rows)
    ]
    results = "Object.values(anyk.masks(c)).flatMap(r => [r.undecided, ...r.gradient, ...r.mask])"
    assert computed(f"c => {results}", cases).isfinite().all()


@NEEDS_NODE
@pytest.mark.parametrize("name", SWAPS)
def test_soft_comparators_keep_their_digits_in_the_tails(name):
    v = torch.cat([torch.linspace(-35, 35, 701), torch.tensor([0.0, 1e-9, -1e-4, 2.5 * 2**0.5, -2.5 * 2**0.5])]).double()
    swap = f"anyk.SWAPS.{name}"
    found = computed(f"v => [{swap}.value(v), {swap}.slope(v), {swap}.logTail(v)]", v.tolist())
    expected = torch.stack([function(v) for function in (LIBRARY_SWAPS[name].value, LIBRARY_SWAPS[name].derivative)], 1)
    torch.testing.assert_close(found[:, :2], expected, rtol=1e-10, atol=1e-300)
    torch.testing.assert_close(found[:, 2], LIBRARY_SWAPS[name].log_tail(v), rtol=1e-12, atol=1e-15)


@NEEDS_NODE
def test_networks_are_those_of_the_library():
    sizes = [(kind, n, k) for kind in NETWORKS for n in range(1, 14) for k in range(1, n + 1)]
    found = in_node("size => anyk.network(...size)", sizes)
    for (kind, n, k), network in zip(sizes, found, strict=True):
        expected = KINDS[kind].build(n, k).packed()
        assert [sorted(map(tuple, layer)) for layer in network["layers"]] == [sorted(layer) for layer in expected.layers]
        assert tuple(network["outputs"]) == expected.outputs


def test_the_file_needs_nothing_else():
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[^\s\"'<>)]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"\b(?:src|href)\s*=|@import|\bimport\s*\(|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket", text)


# --- the page as a user has it ---


def shown_loss(tab):
    return tab.evaluate("document.querySelector('#formula .result').textContent")


def shown(tab, selector):
    return tab.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def middle(tab, selector):
    """Where an element is, scrolled into view."""
    find = f"document.querySelector({json.dumps(selector)})"
    tab.evaluate(f"{find}.scrollIntoView({{ block: 'center' }})")
    box = tab.evaluate(f"(() => {{ const b = {find}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; }})()")
    return box[0] + box[2] / 2, box[1] + box[3] / 2


def choose(tab, selector, value):
    """Set a control as a user does, events included."""
    tab.evaluate(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)}; "
        "e.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def python_of_the_page(tab):
    """Runs what "The same in Python" says; what it prints: the loss, its gradient, P and T."""
    printed = []
    exec(shown(tab, "#python"), {"print": printed.append})
    return printed


def number(text):
    return float(text.replace("−", "-"))


def numbers(tab, selector, of="textContent"):
    """The number at the end of each element's text."""
    texts = tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.{of})")
    return torch.tensor([number(text.rpartition(" ")[2]) for text in texts], dtype=torch.float64)


def assert_shows_what_python_says(tab):
    loss, gradient, matrix, inclusion = python_of_the_page(tab)
    assert shown_loss(tab) == f"{loss:.3f}"
    assert ((numbers(tab, ".class .step") + gradient).abs() <= 0.0051 * gradient.abs().clamp(min=1)).all()
    # the cells have two digits; what is said when one points at them has three
    assert (numbers(tab, "#heatmap td.P", "dataset.tip").view(N, -1).T - matrix).abs().max() <= 0.00051
    assert (numbers(tab, "#heatmap tr.chosen td.T", "dataset.tip") - inclusion).abs().max() <= 0.00051


@pytest.mark.full
def test_every_control_changes_the_numbers_to_those_of_python(tab):
    tab.open(PAGE)
    assert_shows_what_python_says(tab)
    changes = [
        ("#presets button:nth-child(3)", None),
        ("#top1", "mixed"),
        ("#top1", "operator"),
        ("#swap", "cauchy"),
        ("#wires", "given"),
        ("#operator", "odd_even"),
        ("#heat", "0.5"),
        ("#temperature", "0.7"),
        ("#weight-2", "0.5"),
        ("#operator", "softsort"),
        ("#power", "2"),
        ("#operator", "sinkhorn"),
        ("#anchors", "topk"),
        ("#operator", "neuralsort"),
        ("#operator", "lapsum"),
        ("#operator", "ksubset"),
        ("#presets button:nth-child(2)", None),
        ("#family", "error"),
        ("#ce_weight", "0.4"),
        ("#q", "0.35"),
        ("#q", "0"),
        ("#ce_weight", "0"),
        ("#q", "1"),
        ("#ce_weight", "1"),
        ("#family", "cross_entropy"),
        ("label[for=class-H]", None),
        ("#step", None),
        ("#plain-step", None),
    ]
    before = shown_loss(tab)
    for selector, value in changes:
        if value is None:
            tab.click(*middle(tab, selector))
        else:
            choose(tab, selector, value)
        after = shown_loss(tab)
        assert after != before, selector
        assert_shows_what_python_says(tab)
        before = after
    weights = tab.evaluate("[1, 2, 3, 4, 5].map(k => Number(document.querySelector(`#weight-${k}`).value))")
    assert sum(weights) == pytest.approx(1, abs=0.011)
    choose(tab, "#top1", "separate")
    choose(tab, "#m", "6")
    everything = shown_loss(tab)
    choose(tab, "#softmaxOver", "candidates")
    assert shown_loss(tab) != everything
    assert tab.complaints == []
    assert tab.requests == [PAGE.resolve().as_uri()]


@pytest.mark.full
def test_scores_can_be_dragged_and_typed(tab):
    tab.open(PAGE)
    bar = "#classes .class:nth-child(2) .score"
    score = "#classes .class:nth-child(2) .value"
    x, y = middle(tab, bar)
    before = shown_loss(tab)
    tab.drag((x, y), (x - 60, y))
    assert number(shown(tab, score)) < 1.4
    assert shown_loss(tab) != before
    assert_shows_what_python_says(tab)
    assert tab.evaluate(f"document.activeElement === document.querySelector({json.dumps(bar)})")
    dragged = number(shown(tab, score))
    tab.press("ArrowRight")
    assert number(shown(tab, score)) == pytest.approx(dragged + 0.1, abs=0.006)
    tab.press("End")
    assert shown(tab, score) == "6.00"
    tab.press("ArrowUp")
    assert shown(tab, score) == "6.00"
    tab.press("Home")
    assert shown(tab, score) == "−6.00"
    assert tab.evaluate(f"document.querySelector({json.dumps(bar)}).getAttribute('aria-valuenow')") == "-6.00"
    assert_shows_what_python_says(tab)
    assert tab.complaints == []


@pytest.mark.full
def test_scenes_say_something_and_are_true(tab):
    tab.open(PAGE)
    said = set()
    for scene in range(1, 9):
        tab.click(*middle(tab, f"#scenes button:nth-of-type({scene})"))
        assert tab.evaluate(f"document.querySelector('#scenes button:nth-of-type({scene})').ariaPressed") == "true"
        said.add(shown(tab, "#told"))
        assert_shows_what_python_says(tab)
    assert len(said) == 8
    # the idea of it all: the target is third, and the top-5 loss has let go of it
    tab.click(*middle(tab, "#scenes button:nth-of-type(1)"))
    _, gradient, _, inclusion = python_of_the_page(tab)
    assert inclusion[4] > 0.98
    assert gradient.abs().max() < 0.05
    assert "has let go of it" in shown(tab, "#verdict")
    # a scene that was changed is no longer that scene, and says so; running down the loss brings it down, until one stops it
    tab.click(*middle(tab, "#presets button:nth-child(2)"))
    assert tab.evaluate("document.querySelectorAll('#scenes [aria-pressed=true]').length") == 0
    assert "You have changed the scene" in shown(tab, "#told")
    before = number(shown_loss(tab))
    tab.click(*middle(tab, "#run"))
    assert any(number(shown_loss(tab)) < before - 0.1 for _ in range(1000))
    assert shown(tab, "#run") == "Stop"
    tab.click(*middle(tab, "#run"))
    assert shown(tab, "#run") == "Keep going"
    assert tab.complaints == []


def assert_shows_the_masks_of_python(tab, operators=5):
    masks, gradients, undecided = (torch.stack(python_of_the_page(tab)[kind::3]) for kind in range(3))
    assert len(masks) == operators
    assert (numbers(tab, "#heatmap td.M", "dataset.tip").view(N, -1).T - masks).abs().max() <= 0.00051
    shown_gradients = numbers(tab, "#heatmap td.G", "dataset.tip").view(N, -1).T
    assert ((shown_gradients - gradients).abs() <= 0.0051 * gradients.abs().clamp(min=0.1)).all()
    assert (numbers(tab, "#pulls output") - undecided).abs().max() <= 0.00051


@pytest.mark.full
def test_masks_are_those_of_python_wherever_the_controls_go(tab):
    tab.open(PAGE)
    tab.click(*middle(tab, "#views button:nth-child(2)"))
    assert tab.evaluate("document.querySelectorAll('#scenes button:not([hidden])').length") == 4
    said = set()
    for scene, operators in ((10, 5), (11, 5), (12, 3), (9, 5)):
        tab.click(*middle(tab, f"#scenes button:nth-of-type({scene})"))
        said.add(shown(tab, "#told"))
        assert_shows_the_masks_of_python(tab, operators)
    assert len(said) == 4
    # the idea of it all: who is just outside gets in by rising, and by those at the border falling
    gradients = python_of_the_page(tab)[1::3]
    assert all(gradient[4] >= 0 and gradient[0] <= 0 for gradient in gradients)
    assert not gradients[1].any()  # Permutahedron: a true zero
    changes = [
        ("#k", "7.5", 3),
        ("#k", "3", 5),
        ("#heat", "0.5", 5),
        ("#temperature", "0.2", 5),
        ("label[for=class-D]", None, 5),
    ]
    for selector, value, operators in changes:
        before = tab.evaluate("document.querySelector('#heatmap').innerHTML")
        if value is None:
            tab.click(*middle(tab, selector))
        else:
            choose(tab, selector, value)
        assert tab.evaluate("document.querySelector('#heatmap').innerHTML") != before, selector
        assert_shows_the_masks_of_python(tab, operators)
    x, y = middle(tab, "#classes .class:nth-child(5) .score")
    tab.drag((x, y), (x - 60, y))
    assert_shows_the_masks_of_python(tab)
    choose(tab, "#temperature", "1")
    for place, name in enumerate(MASKS):  # the arrows are the gradient by the chosen operator
        choose(tab, "#arrows", name)
        gradient = python_of_the_page(tab)[1::3][place]
        assert (numbers(tab, ".class .step") - gradient).abs().max() <= 0.0051
    assert tab.complaints == []
    tab.click(*middle(tab, "#views button:nth-child(1)"))
    assert_shows_what_python_says(tab)


@pytest.mark.full
def test_the_network_shows_each_comparator(tab):
    tab.open(PAGE)
    for kind in NETWORKS:
        choose(tab, "#operator", kind)
        swaps = tab.evaluate("[...document.querySelectorAll('.comparator')].map(c => Number(c.dataset.swap))")
        assert len(swaps) == KINDS[kind].build(N, 5).size
        assert all(0 <= swap <= 1 for swap in swaps)
    # the first comparator of the odd-even network by hand: scores in descending order, the target (third) on the fifth wire
    scores = sorted([1.4, 3.2, -0.6, 0.8, -1.8, 2.9, 0.1, -2.6, 1.9, -1.1, -3.4], reverse=True)
    scores.insert(4, 2.5)
    first = KINDS["odd_even"].build(N, 5).layers[0][0]
    expected = 1 / (1 + math.exp((scores[first[0]] - scores[first[1]]) / 0.3))
    assert swaps[0] == pytest.approx(expected, abs=1e-9)
    tab.mouse("mouseMoved", *middle(tab, ".comparator line:nth-of-type(2)"))
    assert "Swaps with probability" in shown(tab, "#tip")
    assert tab.evaluate("!document.querySelector('#tip').hidden")
    choose(tab, "#operator", "lapsum")
    assert tab.evaluate("document.querySelector('#network-box').hidden")
    assert tab.complaints == []


@pytest.mark.full
@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_fits_the_screen_and_every_control_has_a_name(tab, width):
    tab.open(PAGE, width=width, height=800, touch=width < 768, dark=width == 400)
    for kind in ("bitonic", "sinkhorn"):
        choose(tab, "#operator", kind)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.click(*middle(tab, "#views button:nth-child(2)"))
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    nameless = tab.evaluate(
        "[...document.querySelectorAll('input, select, button, [role=slider]')]"
        ".filter(e => !(e.getAttribute('aria-label') || (e.matches('button') ? e.textContent.trim() : e.labels?.length)))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []
    if width == 400:
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
        score = "#classes .class:nth-child(2) .value"
        assert tab.evaluate("getComputedStyle(document.querySelector('.score')).touchAction") == "pan-y"  # or the page scrolls
        x, y = middle(tab, "#classes .class:nth-child(2) .score")
        tab.touch_drag((x, y), (x + 30, y))
        assert number(shown(tab, score)) > 1.4
    assert tab.complaints == []
