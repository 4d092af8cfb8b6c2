"""The paper's experiments: transcribed as printed, valid as configs, mapped to the same losses, laid beside our numbers."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import anyk
from anyk.lab.errors import LabError
from anyk.lab.paper import experiments, numbers
from anyk.lab.run import losses
from anyk.lab.run.config import Config

EXPERIMENTS = experiments.EXPERIMENTS
TRAINED = [name for name in EXPERIMENTS if name != "depths"]
PAPER = next((text for above in Path(__file__).resolve().parents for text in above.glob("shared/seeds/*.txt")), None)
with_paper = pytest.mark.skipif(PAPER is None, reason="the paper's text is not in shared/seeds above this checkout")


def places(name):
    return {need: f"/data/{need}" for need in EXPERIMENTS[name].needs}


# --- the transcription ---


def latex_rows(label):
    """The rows of the table with this label, as plain text."""
    before, _ = PAPER.read_text(encoding="utf-8").split(rf"\label{{{label}}}", 1)
    body = before[before.rindex(r"\begin{table") :]
    body = re.sub(r"(?<!\\)%.*", "", body)
    body = re.sub(r"\\kern-?[\d.]+em|\\,|\\pmb|[${}]|\\small", "", body)
    return [row for row in body.split("\\\\") if re.search(r"\d\s*&|\|", row)]


def entries(label, count=2):
    """For each row its entries of ``count`` numbers with bars between."""
    pattern = re.compile(r"\|".join([r"(\d+\.\d+)"] * count))
    rows = [[tuple(map(float, found)) for found in pattern.findall(row)] for row in latex_rows(label)]
    return [row for row in rows if row]


@with_paper
@pytest.mark.parametrize(
    ("name", "label", "by_column"),
    [
        ("table1", "tab:cifar100-main", False),
        ("table2", "tab:imagenet-main", True),
        ("table3", "tab:imagenet-different-PK", False),
        ("table4", "tab:cifar100-different-PK", False),
        ("table6", "tab:imagenet-21k-p-top-10-top-20", False),
    ],
)
def test_tables_are_as_printed(name, label, by_column):
    rows = entries(label, len(EXPERIMENTS[name].metrics))
    rows = zip(*rows, strict=True) if by_column else rows
    assert [cell.paper for cell in EXPERIMENTS[name].cells] == [entry for row in rows for entry in row]


@with_paper
def test_table_5():
    rows = [re.sub(r"[^\d.&]", "", row).split("&") for row in latex_rows("tab:sota")]
    pairs = [(float(top1), float(top5 or "nan")) for *_, top1, top5 in rows if re.fullmatch(r"\d+\.\d+", top1)]
    assert [cell.paper for cell in EXPERIMENTS["table5"].cells] == pairs[-6:]


@with_paper
def test_depth_numbers():
    text = PAPER.read_text(encoding="utf-8")
    for n, (full, classical, splitter) in numbers.DEPTHS.items():
        row = re.search(rf"\n\t{n} &[^\\]*", text)[0]
        assert [int(number) for number in re.findall(r"\d+", row)] == [n, full, *classical, *splitter]


def test_methods_and_distributions_of_the_main_table():
    cells = [(cell.method, cell.p_k) for cell in EXPERIMENTS["table1"].cells]
    top5, even = (0, 0, 0, 0, 1), (0.2,) * 5
    methods = ["neuralsort", "softsort", "sinkhorn", "diffsortnets"]
    assert cells == [("softmax", (1,)), ("smooth", top5), *((m, top5) for m in methods), *((m, even) for m in methods)]
    assert [cell.p_k for cell in EXPERIMENTS["table4"].cells[:4]] == [
        (0.5, 0, 0, 0, 0.5),
        (0.25, 0, 0, 0, 0.75),
        (0.1, 0, 0, 0, 0.9),
        even,
    ]


# --- configs ---


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("source", ["paper", "official"])
def test_configs_are_valid(name, smoke, source):
    runs = EXPERIMENTS[name].configs(places(name), smoke=smoke, source=source)
    for run, config in runs.items():
        assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
        assert re.fullmatch(r"[\w.-]+", run), "fit for a folder"
        assert config.select == "each"
        assert sum(config.p_k) == pytest.approx(1)
        assert config.m is None or len(config.p_k) <= config.m
    distinct = {json.dumps(config.to_json()) for config in runs.values()}
    assert len(distinct) == len(runs)


def test_seeds_of_the_paper():
    counts = {name: len(EXPERIMENTS[name].configs(places(name))) for name in TRAINED}
    assert counts["table1"] == 10 * 2
    assert counts["table1-small"] == (8 + 4) * 5 + 2 * 3
    assert counts["table2"] == 10 * 10 + 10 * 2
    assert counts["table3"] == 16 * 10 + 16 * 2
    assert counts["table4"] == 16 * 2
    assert counts["table5"] == 6 * 10
    assert counts["table6"] == (36 + 1) * 2  # the softmax runs serve three times
    assert counts["alpha"] == 12 * 5
    assert counts["set-size"] == 8 * 5
    assert len(EXPERIMENTS["table1"].configs(seeds=3)) == 30


def test_hyperparameters_of_the_paper_and_the_official_code():
    cifar = EXPERIMENTS["table1"].configs(seeds=1)["cifar100-diffsortnets-top1to5-seed0"]
    assert cifar == Config(
        data="cifar100",
        model="resnet18",
        validation=0.05,
        loss="splitter",
        p_k=(0.2,) * 5,
        temperature=2.0,
        swap="logistic_art",
        wires="given",
        learning_rate=1e-3,
        schedule="constant",
        batch_size=100,
        epochs=200,
        select="each",
        augment=("crop", "flip"),
        m=None,
    )
    official = EXPERIMENTS["table1"].configs(seeds=1, source="official")["cifar100-diffsortnets-top1to5-seed0"]
    assert cifar.differences(official) == {"batch_size": (100, 128)}

    runs = EXPERIMENTS["table2"].configs(places("table2"), seeds=1)
    head = runs["imagenet1k-diffsortnets-top1x50-top5x50-seed0"]
    assert (head.model, head.batch_size, head.epochs, head.m, head.evaluate_every) == ("linear", 500, 100, 16, 100)
    assert head.learning_rate == pytest.approx(10**-4.5)
    assert head.schedule == "constant"
    assert (head.top1, head.softmax_over, head.temperature, head.swap) == ("mixed", "candidates", 1.0, "logistic_art")
    assert head.data == "/data/imagenet1k"
    large = runs["imagenet21kp-diffsortnets-top1x50-top5x50-seed0"]
    assert set(head.differences(large)) == {"data", "validation", "learning_rate", "epochs", "m"}
    assert (large.learning_rate, large.epochs, large.m) == (1e-4, 40, 50)
    assert runs["imagenet1k-neuralsort-top5x100-seed0"].temperature == 2.0
    assert runs["imagenet1k-smooth-top5x100-seed0"].m is None
    efficientnet = EXPERIMENTS["table5"].configs(places("table5"), seeds=1)[
        "efficientnet-l2-diffsortnets-top1x25-top5x75-seed0"
    ]
    assert (efficientnet.swap, efficientnet.temperature) == ("logistic", 2.0)


def test_data_sets_can_be_left_out_and_others_added():
    runs = EXPERIMENTS["table2"].configs({"imagenet21kp": "/large"}, seeds=1)
    assert {config.data for config in runs.values()} == {"/large"}
    assert len(runs) == 10
    runs = EXPERIMENTS["backbones"].configs({"my-model": "/mine"}, seeds=1)
    assert sorted(runs) == ["my-model-diffsortnets-top1to5-seed0", "my-model-softmax-seed0"]
    assert EXPERIMENTS["alpha"].configs("/one", seeds=1)["imagenet1k-softmax-seed0"].data == "/one"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: experiments.experiment("table9"), "there is none called 'table9'"),
        (lambda: EXPERIMENTS["table2"].configs(), "table2 needs data that only you can give. imagenet1k: ImageNet-1K through"),
        (lambda: EXPERIMENTS["table2"].configs({"imagenet": "/x"}), "knows no data set 'imagenet'"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(LabError, match=message):
        call()


# --- temperatures ---


def official_losses(method, config, scores, target):
    with contextlib.redirect_stdout(io.StringIO()):  # difftopk prints on import
        difftopk = pytest.importorskip("difftopk")
    inverse = experiments._regime(config.data.split("/")[-1]).inverse_temperatures[method]
    names = {"diffsortnets": {"bitonic": "bitonic__non_sparse", "odd_even": "odd_even"}.get(config.loss)}
    loss = difftopk.TopKCrossEntropyLoss(
        names.get(method, method),
        inverse_temperature=inverse,
        p_k=list(config.p_k),
        n=scores.shape[1],
        m=config.m,
        distribution={"logistic_art": "logistic_phi", "logistic": "logistic"}[config.swap],
        art_lambda=0.5,
        top1_mode={"separate": "smce", "mixed": "sm"}[config.top1],
    )
    return torch.stack([loss(row[None], y[None]) for row, y in zip(scores, target, strict=True)])


def our_losses(config, scores, target):
    loss = losses.criterion(config, scores.shape[1])
    return torch.stack([loss(row[None], y[None]) for row, y in zip(scores, target, strict=True)])


def cases():
    for data, method in [
        ("cifar100", "neuralsort"),
        ("cifar100", "softsort"),
        ("cifar100", "diffsortnets"),
        ("imagenet1k", "neuralsort"),
        ("imagenet1k", "softsort"),
    ]:
        for p_k in (numbers.EVEN, numbers.HALF, numbers.TENTH):
            yield pytest.param(data, method, p_k, id=f"{data}-{method}-{numbers._short(p_k)}")


@pytest.mark.parametrize(("data", "method", "p_k"), list(cases()))
def test_temperatures_give_the_official_loss(data, method, p_k):
    """The same values on random scores; the network on as many wires as the official bitonic network can take."""
    cell = numbers.Cell(data, method, p_k, (None, None))
    config = experiments._config(cell, data, "official", False)
    if method == "diffsortnets":
        config = config.replace(loss="bitonic")
    n = 16 if method == "diffsortnets" else 100
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, n, generator=generator) * 2
    target = scores.topk(8).indices.gather(1, torch.randint(8, (12, 1), generator=generator)).squeeze(1)
    ours = our_losses(config, scores, target)
    theirs = official_losses(method, config, scores, target)
    if config.top1 == "separate":
        rest = torch.tensor(1 - p_k[0])
        theirs = theirs + rest * rest.log()  # published without the division by 1 - P_K(1)
    # Ours counts T above 1 as 1, rounds ART off at ties, and has no floor under the logarithm.
    torch.testing.assert_close(ours, theirs.clamp(min=0), rtol=0, atol=3e-2 if method == "diffsortnets" else 2e-3)
    colder = our_losses(config.replace(temperature=config.temperature / 2), scores, target)
    assert (colder - theirs).abs().max() > 0.1, "the comparison must notice a wrong temperature"


@pytest.mark.parametrize("swap", ["logistic", "logistic_art"])
def test_logistic_temperatures(swap):
    """Of two scores the better one is first with the swap's probability."""
    b, d = 0.5, torch.tensor([0.3, 1.0, 4.0])
    scores = torch.stack([d, torch.zeros(3)], 1)
    t = experiments.temperature("diffsortnets", b, 2)
    first = anyk.SortingNetwork("bitonic", t, swap)(scores, 1)[:, 0, 0]
    expected = torch.sigmoid(b * d if swap == "logistic" else b * d / d.abs().sqrt())
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-5)


def test_sinkhorn_temperature():
    """Ranks between 0 and 1 with epsilon = 1/b, solved by plain iterations."""
    n, b = 16, 8.0
    scores = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.5
    ranks = torch.linspace(1, 0, n, dtype=torch.float64)
    log_plan = -b * (ranks[:, None] - scores).square()
    for _ in range(3000):
        log_plan = log_plan.log_softmax(1)
        log_plan = log_plan.log_softmax(0)
    ours = anyk.SinkhornSort(experiments.temperature("sinkhorn", b, n))(scores, n)
    torch.testing.assert_close(ours, log_plan.exp(), rtol=0, atol=1e-6)


# --- smoke data ---


def test_smoke_data_fit_the_smoke_configs(tmp_path):
    for name in ("table3", "table6", "set-size"):
        experiment = EXPERIMENTS[name]
        runs = experiment.configs(experiment.write_smoke_data(tmp_path / name), smoke=True)
        for config in runs.values():
            classes = json.loads((Path(config.data) / "dataset.json").read_text())["classes"]
            train = load_file(Path(config.data) / "train.safetensors")
            assert config.seed == 0
            assert len(classes) > (config.m or 0)
            assert len(train["labels"]) * config.epochs < 5000


# --- the tables ---


def made_results(name, accuracies, **options):
    """result.json for every run; accuracies: run -> (top1, top5)."""
    runs = EXPERIMENTS[name].configs(places(name), **options)
    return {
        run: {"test": dict(zip(("top1", "top5"), accuracies(run), strict=True)), "config": r.to_json()}
        for run, r in runs.items()
    }


def test_compare_puts_our_numbers_beside_the_papers():
    results = made_results("table1", lambda run: (0.60 + 0.02 * run.endswith("seed1"), 0.85))
    table = EXPERIMENTS["table1"].compare(results)
    titles = [column.title for column in table.columns]
    assert titles[:9] == ["data", "method", "P_K", "m", "runs", "top1", "std", "paper", "difference"]
    row = dict(zip(titles[:9], table.rows[-1][:9], strict=True))
    assert (row["data"], row["method"], row["P_K"], row["runs"]) == ("cifar100", "DiffSortNets", "[.2,.2,.2,.2,.2]", 2)
    assert (row["top1"], row["paper"]) == (pytest.approx(61.0), 62.00)
    assert row["difference"] == pytest.approx(-1.0)
    assert row["std"] == pytest.approx(2**0.5)
    assert table.rows[-1][9:] == (pytest.approx(85.0), pytest.approx(0), 86.73, pytest.approx(-1.73))
    assert all(len(row) == len(titles) for row in table.rows)
    smoke = EXPERIMENTS["table1"].compare(results, smoke=True)
    assert "synthetic data" in smoke.notes[0]
    assert [column.title for column in smoke.columns[5:]] == ["top1", "std", "paper", "top5", "std", "paper"]
    assert all(len(row) == len(smoke.columns) for row in smoke.rows)


def test_the_small_table_compares_the_differences_to_softmax():
    experiment = EXPERIMENTS["table1-small"]
    large = EXPERIMENTS["table1"].configs(seeds=1)["cifar100-diffsortnets-top1to5-seed0"]
    small = experiment.configs(seeds=1)["cifar100-16px-diffsortnets-top1to5-seed0"]
    assert set(large.differences(small)) == {"image_size", "width", "epochs", "patience"}
    smoothed = experiment.configs("images.npz", seeds=1)["cifar100-16px-diffsortnets-top1to5-smoothing10-seed0"]
    assert set(small.differences(smoothed)) == {"data", "label_smoothing"}

    gained = {"softmax": 0.0, "diffsortnets": 0.02}

    def accuracies(run):
        gain = next((value for name, value in gained.items() if name in run), -0.1)
        return (0.4 + gain, 0.7) if "smoothing" not in run else (0.42 + gain / 2, 0.71)

    table = experiment.compare(made_results("table1-small", accuracies))
    titles = [column.title for column in table.columns]
    assert titles[5:] == ["top1", "std", "paper", "Δ", "Δ paper", "top5", "std", "paper", "Δ", "Δ paper"]
    rows = {(row[1], row[2]): row[5:] for row in table.rows}
    assert rows["Softmax", "[1]"] == (40.0, 0.0, 61.27, None, None, 70.0, 0.0, 85.31, None, None)
    even = "[.2,.2,.2,.2,.2]"
    assert rows["DiffSortNets", even] == pytest.approx((42, 0, 62, 2, 0.73, 70, 0, 86.73, 0, 1.42), abs=1e-9)
    assert rows["DiffSortNets, smoothing 0.1", even][0] == pytest.approx(43.0)
    assert rows["DiffSortNets, smoothing 0.1", even][2:5] == (None, pytest.approx(1.0), None)
    assert len(experiment.compare(made_results("table1-small", accuracies), smoke=True).columns) == 11


@pytest.mark.parametrize("name", TRAINED)
def test_compare_without_results_is_what_the_paper_says(name):
    table = EXPERIMENTS[name].compare({"something-else-seed0": {"test": {"top1": 1.0}}})
    assert len(table.rows) == len(EXPERIMENTS[name].cells)
    for cell, row in zip(EXPERIMENTS[name].cells, table.rows, strict=True):
        assert row[4] == 0
        assert row[7 :: 5 if EXPERIMENTS[name].small else 4] == cell.paper


def test_compare_of_a_part_and_of_an_unknown_backbone():
    results = {"mine-softmax-seed0": {"test": {"top1": 0.5, "top5": 0.7}}}
    table = EXPERIMENTS["backbones"].compare(results)
    row = next(row for row in table.rows if row[0] == "mine" and row[1] == "Softmax")
    assert row[4:9] == (1, 50.0, None, None, None)


def test_the_metrics_of_table_6_may_be_missing():
    results = {"imagenet21kp-softmax-seed0": {"test": {"top1": 0.4, "top5": 0.7, "top10": 0.8}}}
    table = EXPERIMENTS["table6"].compare(results)
    softmax = [row for row in table.rows if row[1] == "Softmax"]
    assert len(softmax) == 3
    assert softmax[1][2] == "[1,0,...,0,0] (10)"
    assert all(row[13] == 80.0 and row[17] is None and row[19] in (85.33, 85.36) for row in softmax)


def test_depths(monkeypatch):
    # The two largest take seconds; test_networks.py has them all.
    monkeypatch.setattr(numbers, "DEPTHS", {n: numbers.DEPTHS[n] for n in (16, 1024)})
    table = EXPERIMENTS["depths"].compare({})
    assert EXPERIMENTS["depths"].configs() == {}
    assert len(table.rows) == 10
    assert all(row[-1] == "yes" for row in table.rows)
    assert table.rows[-1][:10] == (1024, "splitter selection", 10, 14, 16, 18, 22, 25, 27, 29)
    wrong = {16: (11, numbers.DEPTHS[16][1], numbers.DEPTHS[16][2])}
    monkeypatch.setattr(numbers, "DEPTHS", wrong)
    assert EXPERIMENTS["depths"].compare({}).rows[0][-1] == "no"
