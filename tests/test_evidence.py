"""The study's plan, its statistics on made summaries, and docs/results.md against the committed summaries."""

import dataclasses
import doctest
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch

import anyk
import lab_data
from anyk.lab import statistics
from anyk.lab.errors import LabError
from anyk.lab.run import training
from anyk.lab.run.config import Config
from anyk.lab.run.losses import criterion

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "evidence"))

import claims  # noqa: E402
import layout  # noqa: E402
import measure  # noqa: E402
import results_page  # noqa: E402
import study  # noqa: E402
import tables_page  # noqa: E402

SETTING = study.SETTINGS["embeddings"]
METRICS = ("top1", "top5", "top20")
DIFFERENCE = r"[-+]\d+\.\d\d \([^)]*\)"  # with its interval


def result(top1, top5=0.9, top20=0.99):
    """A result.json as a run leaves it, with what the study takes from it."""
    data = {"name": "made", "kind": "embeddings", "classes": 100, "train": 1, "validation": 1, "test": 1, "fingerprint": "f"}
    measured = {"top1": top1, "top5": top5, "top20": top20, "mean": (top1 + top5) / 2, "cross_entropy": 1.0}
    return {
        "data": data,
        "test": measured,
        "validation": measured,
        "selected": {"mean": 3.0},
        "epochs": 10.0,
        "seconds_in_model": 1.25,
    }


def tune(known, method, score):
    """Make the tries that the search asks for, in a world where ``score`` tells the validation accuracy of a config."""
    while missing := study.tuning(known.setting.name, method, known).missing:
        for config in missing:
            known.add(config, result(score(config)))
    return study.tuning(known.setting.name, method, known)


def made(folder, truth, noise=0.0003):
    """Summaries of both data sets in which ``truth(cell, metric)`` is the accuracy of a cell, plus noise."""
    random_numbers = random.Random(0)
    both = {data: study.read(data, folder) for data in study.SETTINGS}

    best = {}

    def add(known, each):
        for config in each.configs(best[each.data, each.method]):
            common = random.Random(config.seed).gauss(0, 0.01)
            if known.find(config) is None:
                known.add(
                    config, result(*(truth(each, metric) + common + random_numbers.gauss(0, noise) for metric in METRICS))
                )

    for data, known in both.items():
        for method in study.METHODS:
            best[data, method] = tune(known, method, lambda config: 0.5).best
        for name in study.SECTIONS:
            for each in study.section(name, data):
                add(known, each)
    for data, known in both.items():
        for each in study.confirmation(data, both):
            add(known, each)
        known.save()
    return claims.Evidence(folder)


def judged(evidence):
    """All claims with what is seen of them, by data set."""
    return [(claim, data, claims.judge(claim, data, evidence)) for claim in claims.claims() for data in claim.parts]


def test_the_page_is_what_the_committed_summaries_say():
    evidence = claims.Evidence()
    assert (ROOT / "docs" / "results.md").read_text() == results_page.page(evidence), "run `make evidence`"
    assert (ROOT / "docs" / "results-tables.md").read_text() == tables_page.page(evidence), "run `make evidence`"


def test_committed_summaries_hold_no_paths():
    for path in study.SUMMARIES.glob("*.jsonl"):
        text = path.read_text()
        assert "/work" not in text
        assert "/home" not in text
        assert "/tmp" not in text
        for line in text.splitlines()[1:]:
            run = json.loads(line)
            assert "data" not in run["own"]
            assert not run["test"] or 0 <= run["test"]["top1"] <= run["test"]["top5"] <= 1


def test_every_cell_is_a_valid_config_with_at_least_five_seeds_and_ten_in_the_main_rows():
    for data, setting in study.SETTINGS.items():
        classes = {"embeddings": 100, "glyphs": 200}[data]
        for name in study.SECTIONS:
            for each in study.section(name, data):
                assert each.seeds >= (10 if name == "main" else 5)
                tuned = setting.config.replace(
                    **study.METHODS[each.method], **setting.fields.get(each.method, {}), p_k=study.PKS["half"]
                )
                configs = each.configs(tuned)
                assert len({config.seed for config in configs}) == each.seeds
                assert not set(study.TUNING_SEEDS) & {config.seed for config in configs}
                if configs[0].temperature != "auto":  # on record; there is no such temperature any more
                    criterion(configs[0], classes)


def test_the_same_run_is_found_under_every_name(tmp_path):
    known = study.read("embeddings", tmp_path)
    tuned = tune(known, "splitter", lambda config: 0.5).best
    written_out = study.Cell("embeddings", "splitter", "half", 5, (("m", 16), ("wires", "target")))
    for plain, other in zip(study.cell("embeddings", "splitter").configs(tuned), written_out.configs(tuned), strict=True):
        assert study.key(plain, SETTING.config) == study.key(other, SETTING.config)
    sizes = [each for each in study.section("m", "embeddings") if (each.method, each.p_k) == ("splitter", "quarter")]
    assert sum(each.changes == () for each in sizes) == 1, "m = 16 is the setting's own"


@pytest.mark.parametrize(("rate", "temperature"), [(0.002, 1.0), (0.004, 2.0), (0.001, 0.25), (0.002, 4.0), (0.002, 0.125)])
def test_the_search_finds_a_best_point_within_its_reach(tmp_path, rate, temperature):
    def score(config):
        return (
            0.6
            - 0.01 * abs(torch.log2(torch.tensor(config.learning_rate / rate)))
            - 0.01 * abs(torch.log2(torch.tensor(config.temperature / temperature)))
        )

    known = study.read("embeddings", tmp_path)
    tuned = tune(known, "splitter", lambda config: float(score(config)))
    assert len(tuned.tries) == SETTING.budget
    assert tuned.best.learning_rate == rate
    assert tuned.best.temperature == temperature


def test_tuning_gives_every_method_the_same_number_of_runs(tmp_path):
    known = study.read("embeddings", tmp_path)
    for method in (name for name in study.METHODS if name not in study.DROPINS):
        tune(known, method, lambda config: 0.5)
        assert len(study.tuning("embeddings", method, known).tries) == SETTING.budget
    assert len(known.runs) == SETTING.budget * (len(study.METHODS) - len(study.DROPINS))


def test_tuning_takes_the_mean_over_its_seeds(tmp_path):
    """Of two temperatures, the first is better on one seed and worse on the other two."""
    known = study.read("glyphs", tmp_path)
    first = study.SETTINGS["glyphs"].temperatures.get("splitter", 1.0)
    rate = 2 * study.SETTINGS["glyphs"].config.learning_rate
    tune(known, "softmax", lambda config: 0.5 if config.learning_rate == rate else 0.4)

    def score(config):
        if config.temperature not in (first, 4 * first):
            return 0.1
        if config.temperature == first:
            return 0.9 if config.seed == 0 else 0.3
        return 0.6

    tuned = tune(known, "splitter", score)
    assert tuned.best.temperature == 4 * first
    assert {config.learning_rate for config, _ in tuned.tries} == {rate}, "the one that softmax found"
    assert tuned.best.epochs == study.SETTINGS["glyphs"].config.epochs
    assert len(tuned.tries) == study.SETTINGS["glyphs"].budget
    assert len(known.runs) == 2 * 3 * study.SETTINGS["glyphs"].budget


def test_a_diverged_try_is_the_worst(tmp_path):
    known = study.read("embeddings", tmp_path)
    for config in study.tuning("embeddings", "lapsum", known).missing:
        known.add_diverged(config) if config.temperature == 1.0 else known.add(config, result(0.1))
    tuned = tune(known, "lapsum", lambda config: 0.1)
    assert (tuned.best.temperature, tuned.best.learning_rate) != (1.0, SETTING.config.learning_rate)


def test_summaries_are_read_as_they_were_written(tmp_path):
    known = study.read("embeddings", tmp_path)
    config = SETTING.config.replace(loss="lapsum", seed=3, data="/somewhere/else")
    known.add(config, result(0.123456))
    known.save()
    again = study.read("embeddings", tmp_path)
    assert again.find(config) == known.find(config)
    assert again.find(config).test["top1"] == 0.12346
    assert "somewhere" not in (tmp_path / "embeddings.jsonl").read_text()
    head = json.loads((tmp_path / "embeddings.jsonl").read_text().splitlines()[0])
    head["shared"]["epochs"] = 99
    (tmp_path / "embeddings.jsonl").write_text(json.dumps(head) + "\n")
    with pytest.raises(LabError, match="another shared config"):
        study.read("embeddings", tmp_path)


def test_waves_tune_first_and_ask_for_nothing_twice(tmp_path):
    known = {name: study.read(name, tmp_path) for name in study.SETTINGS}
    asked = []
    for wave in study.waves(study.plan(["embeddings"], ["main"], 2), known, 10):
        for data, config in wave:
            asked.append((data, study.key(config, study.SETTINGS[data].config)))
            if config.loss != "ksubset":  # a method that always fails does not hold up the others
                known[data].add(config, result(0.5))
    assert len(asked) == len(set(asked))
    first = [json.loads(name).get("seed", 0) for _, name in asked]
    assert first == sorted(first, key=bool), "tuning comes before the seeds"
    for each in study.section("main", "embeddings"):
        runs = study.runs_of(each, known["embeddings"])
        assert runs is None if each.method == "ksubset" else len(runs) == 2
    for data in known:
        known[data].save()
    again = {name: study.read(name, tmp_path) for name in study.SETTINGS}
    left = [config.loss for wave in study.waves(study.plan(["embeddings"], ["main"], 2), again, 10) for _, config in wave]
    assert set(left) == {"ksubset"}


def test_a_real_run_becomes_a_summary_and_is_not_made_again(tmp_path, monkeypatch):
    small = dataclasses.replace(
        study.SETTINGS["glyphs"],
        config=study.SETTINGS["glyphs"].config.replace(data="glyphs:12", epochs=1, model="linear", augment=()),
        budget=1,
        tuning_seeds=1,
        tuning={},
    )
    monkeypatch.setitem(study.SETTINGS, "glyphs", small)
    monkeypatch.setattr(study, "section", lambda name, data: [study.cell(data, "softmax", seeds=10)])
    for expected in (5, 0):
        made = study.run({"glyphs": "glyphs:12"}, tmp_path / "runs", jobs=2, only=["main"], seeds=2, out=tmp_path)
        assert made == expected  # three tries and two seeds
    known = study.read("glyphs", tmp_path)
    assert study.collect(tmp_path / "runs", tmp_path / "again") == 5
    assert study.read("glyphs", tmp_path / "again").runs == known.runs
    assert known.head["data"]["classes"] == 12
    assert [run.own["seed"] for run in study.runs_of(study.cell("glyphs", "softmax", seeds=2), known)] == [1, 2]


# Statistics ------------------------------------------------------------------------------------------------------------------


def test_examples_in_the_docstrings():
    for module in (study, claims, layout, results_page, tables_page, measure):
        assert doctest.testmod(module, extraglobs={"statistics": statistics, "torch": torch}).failed == 0


def test_verdicts():
    """Each world is a mean difference and the half of its interval; the margin is 0.003."""
    cases = [
        ("more", 0.01, 0.005, "holds"),
        ("more", -0.01, 0.005, "the opposite"),
        ("more", 0.01, 0.015, "undecided"),
        ("more", 0.0005, 0.002, "not seen"),
        ("more", -0.004, 0.006, "not seen"),
        ("less", -0.01, 0.005, "holds"),
        ("less", 0.01, 0.005, "the opposite"),
        ("no less", -0.0005, 0.001, "holds"),
        ("no less", 0.05, 0.01, "holds"),
        ("no less", -0.001, 0.0005, "within the margin"),
        ("no less", -0.02, 0.01, "does not hold"),
        ("no less", -0.001, 0.02, "undecided"),
        ("no more", 0.0005, 0.001, "holds"),
        ("no more", 0.02, 0.01, "does not hold"),
        ("same", 0.0005, 0.001, "holds"),
        ("same", 0.001, 0.0005, "within the margin"),
        ("same", -0.02, 0.01, "does not hold"),
        ("same", 0.002, 0.01, "undecided"),
    ]
    for expected, difference, half, answer in cases:
        # the p of the two-sided test follows from the interval: 5 seeds
        two_sided = 0.001 if abs(difference) > half else 0.5
        found = statistics.Paired(difference, 5, difference - half, difference + half, two_sided)
        p = claims.p_of(expected, found, 0.003)
        assert claims.verdict(expected, found, p, found.p, 0.003) == answer, (expected, difference)
    assert claims.verdict("same", None, None, None, 0.003) == "not measured"


def test_one_sided_p_agree_with_the_two_sided_one():
    found = statistics.paired([0.3, 0.5, 0.9, 0.4], [0.1, 0.45, 0.6, 0.5])
    assert statistics.exceeds(found) == pytest.approx(found.p / 2)
    mirrored = statistics.paired([0.1, 0.45, 0.6, 0.5], [0.3, 0.5, 0.9, 0.4])
    assert claims.p_of("less", mirrored, 0.0) == pytest.approx(found.p / 2)
    assert statistics.exceeds(found, found.high) == pytest.approx(0.975)


def papers_world(each, metric):
    """A world in which the paper is right."""
    base = {"top1": 0.6, "top5": 0.88, "top20": 0.97}[metric]
    if each.method == "softmax":
        return base
    if each.p_k == "pure":
        cost = {"neuralsort": 0.3, "softsort": 0.25, "sinkhorn": 0.02}.get(each.method, 0.1)
        return base - (cost if metric == "top1" else 0.01)
    if each.p_k in ("top10", "top20"):
        return base - 0.02
    weights = study.PKS.get(each.p_k) or tuple(float(p) for p in each.p_k.split("/"))
    rise = 0.02 * min(weights[-1], 0.6) if metric == "top1" else 0.02
    hard = 0.02 if each.method in ("neuralsort", "softsort") and each.p_k != "half" else 0.0
    return base + rise - hard - (0.01 if each.method == "neuralsort" else 0.0)


def test_claims_that_are_true_by_construction_hold(tmp_path):
    evidence = made(tmp_path, papers_world)
    # what NeuralSort and SoftSort lose in that world by other P_K is a loss against softmax too
    apart = ("top-1 does not suffer against softmax: [.2", "top-5 improves over softmax (the single k = 1): [.2")
    wrong = [
        (claim.text, data, found.verdict)
        for claim, data, found in judged(evidence)
        if found.verdict != "holds" and not claim.text.startswith(apart) and "top-1 does not suffer" not in claim.text
    ]
    assert wrong == []
    suffers = next(found for claim, _, found in judged(evidence) if claim.text.startswith("top-1 does not suffer"))
    assert suffers.verdict in ("holds", "holds for 6 of 7, undecided for 1")
    assert suffers.parts["network, splitter"][0].difference == pytest.approx(0.01, abs=0.001)


def test_claims_that_are_false_by_construction_do_not_hold(tmp_path):
    def world(each, metric):
        base = {"top1": 0.6, "top5": 0.88, "top20": 0.97}[metric]
        return base if each.method == "softmax" else 2 * base - papers_world(each, metric)

    for claim, data, found in judged(made(tmp_path, world)):
        alike = claim.expected == "same" or "match full sorting" in claim.text  # no difference in this world either
        if not alike and "[.2" not in claim.text and "suffer" not in claim.text:
            assert found.verdict.startswith("does not hold"), (claim.text, data, found.verdict)


def test_nothing_is_claimed_where_nothing_is(tmp_path):
    found = judged(made(tmp_path, lambda each, metric: 0.5))
    false = [
        (claim.text, data, one.verdict)
        for claim, data, one in found
        if any(word in one.verdict for word in ("holds", "not hold", "opposite")) == (claim.expected in ("more", "less"))
    ]
    # each claim errs with a chance of one in twenty to each side, and many share their runs
    assert len(false) <= 0.1 * len(found), false


def test_one_method_does_not_carry_a_claim_of_all(tmp_path):
    def world(each, metric):
        return 0.5 + (0.07 if each.method == "neuralsort" and each.p_k == "half" and metric == "top5" else 0.0)

    for claim, _, found in judged(made(tmp_path, world)):
        if claim.text.startswith("top-5 improves over softmax (the single k = 1): [.5"):
            assert found.parts["NeuralSort"][2] == "holds"
            assert sum(word == "holds" for _, _, word in found.parts.values()) <= 2


def test_what_lacks_runs_is_told_apart(tmp_path):
    evidence = made(tmp_path, papers_world)
    for known in evidence.known.values():
        known.runs = {
            name: run
            for name, run in known.runs.items()
            if run.own.get("loss") not in ("lapsum", "bitonic") or run.own.get("seed", 0) in study.TUNING_SEEDS
        }
        known.path.unlink()
        known.save()
    found = {(claim.text, data): one.verdict for claim, data, one in judged(claims.Evidence(tmp_path))}
    assert found["pure top-5 costs top-1 everywhere", "glyphs"] == "holds for 5 of 5 (2 not measured)"
    assert found["splitter networks match full sorting (bitonic): top-1", "embeddings"] == "not measured"


def test_a_diverged_run_guesses(tmp_path):
    evidence = made(tmp_path, papers_world)
    known = evidence.known["embeddings"]
    each = study.cell("embeddings", "splitter", "half", 10)
    configs = each.configs(study.tuning("embeddings", "splitter", known).best)
    for config in configs[:5]:
        known.add_diverged(config)
    known.save()
    evidence = claims.Evidence(tmp_path)
    values = evidence.values(each, "top5")
    assert (len(values), values[1]) == (10, 0.05)
    assert evidence.diverged(each) == 5
    assert "10 (5 diverged)" in results_page.page(evidence)
    found = next(one for claim, _, one in judged(evidence) if claim.text.startswith("top-1 does not suffer"))
    assert found.parts["network, splitter"][2] != "holds"


def paired(difference, half):
    return statistics.Paired(difference, 20, difference - half, difference + half, 0.001 if abs(difference) > half else 0.5)


def test_the_rule_for_the_default():
    gain, nothing, loss = paired(0.004, 0.002), paired(0.0, 0.0005), paired(-0.004, 0.002)
    assert results_page.passes(nothing, gain, 0.001, 0.001) == "passes"
    assert results_page.passes(gain, gain, 0.001, 0.001) == "passes"
    assert results_page.passes(nothing, gain, 0.1, 0.001) == "no: no top-5 gain is seen"
    assert results_page.passes(loss, gain, 0.001, 0.001) == "no: top-1 loses"
    assert results_page.passes(paired(0.0, 0.01), gain, 0.001, 0.001) == "no: top-1 may lose"
    fails = {(data, method): "no" for data in study.SETTINGS for method in study.DROPINS}
    lapsum = {("embeddings", "lapsum-dropin"): "passes", ("glyphs", "lapsum-dropin"): "passes"}
    assert "the default is LapSum" in results_page.ruled({**fails, **lapsum}, {"embeddings": loss, "glyphs": loss})
    assert "the default is LapSum" in results_page.ruled(fails, {"embeddings": gain, "glyphs": nothing})
    assert "the default is the splitter" in results_page.ruled(fails, {"embeddings": gain, "glyphs": loss})
    assert "the default is the splitter" in results_page.ruled(fails, {"embeddings": nothing, "glyphs": nothing})
    assert "needs both" in results_page.ruled(fails, {"embeddings": gain, "glyphs": None})


def test_finalists_are_chosen_on_validation_of_both_data_sets(tmp_path):
    def world(each, metric):
        """Temperature 4 wins by little on embeddings and loses by more on glyphs."""
        warm = dict(each.changes).get("temperature") == 4.0
        return 0.5 + ({"embeddings": 0.05, "glyphs": -0.1}[each.data] if warm else 0.0)

    evidence = made(tmp_path, world)
    assert all(value != 4.0 for value in study.finalists(evidence.known).values())
    for data in study.SETTINGS:
        cells = study.confirmation(data, evidence.known)
        assert [each.method for each in cells][:3] == ["softmax", *study.DROPINS]
        tuned = {each.method: study.tuning(data, each.method, evidence.known[data]).best for each in cells}
        configs = [config for each in cells for config in each.configs(tuned[each.method])]
        assert {config.seed for config in configs} == set(range(11, 31))
        assert {config.split_seed for config in configs} == {1}
        assert len({config.learning_rate for config in configs}) == 1
    known = evidence.known["glyphs"]
    known.runs = {name: run for name, run in known.runs.items() if run.own.get("temperature") != "auto"}
    assert study.finalists(evidence.known) == {}, "one candidate is missing"


def test_the_page_shows_what_is_missing_and_draws_what_is_there(tmp_path):
    empty = claims.Evidence(tmp_path / "empty")
    assert "Not measured yet" in results_page.page(empty)
    assert "**holds**;" not in results_page.page(empty)
    assert "No run yet" in tables_page.page(empty)
    evidence = made(tmp_path, papers_world)
    page = results_page.page(evidence, tmp_path / "images")
    assert "Not complete yet" not in page
    assert "By the rule the default is" in " ".join(page.split())
    for name in ("alpha-embeddings.svg", "m-embeddings.svg"):
        assert f"images/{name}" in page
        first = (tmp_path / "images" / name).read_bytes()
        results_page.page(evidence, tmp_path / "images")
        assert (tmp_path / "images" / name).read_bytes() == first
    assert "| softmax | top-1 |" in page
    assert "missing" not in tables_page.page(evidence)
    known = evidence.known["embeddings"]
    gone = next(
        name
        for name, run in known.runs.items()
        if (run.own.get("loss"), run.own.get("seed"), run.own.get("p_k")) == ("lapsum", 10, [0.2] * 5)
    )
    del known.runs[gone]
    known.path.unlink()
    known.save()
    assert "main on embeddings (229 of 230 runs)" in results_page.page(claims.Evidence(tmp_path))


def test_differences_in_a_table_are_paired_and_corrected(tmp_path):
    evidence = made(tmp_path, papers_world)
    cells = [study.cell("embeddings", "softmax", seeds=10), study.cell("embeddings", "lapsum", "half", 10)]
    table = layout.section_table(evidence, cells, lambda each: cells[0], {"method": lambda each: each.method})
    top1, top5 = table.rows[1][2], table.rows[1][4]
    values = [evidence.values(each, "top1") for each in reversed(cells)]
    by_hand = statistics.paired(list(values[0].values()), list(values[1].values()))
    assert top1.paired.p == pytest.approx(by_hand.p)
    assert (top1.paired.low, top1.paired.high) == pytest.approx((by_hand.low, by_hand.high))
    assert max(top1.p, top5.p) >= max(top1.paired.p, top5.paired.p)
    assert min(top1.p, top5.p) == pytest.approx(2 * min(top1.paired.p, top5.paired.p))
    assert table.rows[0][2] is None, "softmax is not compared with itself"


# Measured beside the runs ----------------------------------------------------------------------------------------------------


def test_plain_sinkhorn_needs_more_iterations_for_scores_further_apart():
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    close, error_close = measure.plain_sinkhorn(scores, 1.0)
    far, error_far = measure.plain_sinkhorn(4 * scores, 1.0)
    assert bool((far > close).all())
    assert bool((error_far > error_close).all())


def test_plain_sinkhorn_ends_at_the_librarys_plan():
    scores = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    plan, _ = measure.plan_after(scores, 1.0, 400)
    assert torch.allclose(plan.float(), anyk.SinkhornSort(1.0)(scores, 6).float(), atol=1e-6)


def test_the_share_of_runs_that_have_an_example_right(tmp_path):
    config = Config(data=str(lab_data.write_embedding_set(tmp_path / "points")), epochs=1, batch_size=32)
    places = [tmp_path / str(seed) for seed in (1, 2, 3)]
    results = [training.train(config.replace(seed=seed), place) for seed, place in enumerate(places)]
    found = measure.mean_hits(places)
    for metric in ("top1", "top5"):
        assert float(found[metric].mean()) == pytest.approx(statistics.mean([result["test"][metric] for result in results]))
        assert set((3 * found[metric]).round(decimals=4).tolist()) <= {0.0, 1.0, 2.0, 3.0}


def test_the_typed_table_tells_what_the_results_tell():
    """The table of confirmed differences is typed in: these are the figures of the page that is written from the runs."""
    results = (ROOT / "docs" / "results.md").read_text()
    told = (ROOT / "docs" / "settings.md").read_text()
    for title, method, temperature in (("splitter", "splitter", "2"), ("LapSum", "LapSum", "4")):
        row = re.search(rf"^\| {title}, temperature {temperature} \| (.*) \|$", told, re.MULTILINE)
        assert row is not None
        shown = re.findall(DIFFERENCE, row[1])
        measured = [
            difference
            for data in study.SETTINGS
            for line in re.findall(rf"^\| {data} \| {method} \| {temperature}\.0 \| (.*)$", results, re.MULTILINE)
            for difference in re.findall(DIFFERENCE, line)
        ]
        assert shown == measured
        assert len(shown) == 4
    (row,) = re.findall(r"^\| splitter, temperature 1, the default \| (.*) \|$", told, re.MULTILINE)
    (sentence,) = re.findall(r"The default as it is(.*?) The finalist against it", " ".join(results.split()))
    assert re.findall(DIFFERENCE, row) == re.findall(DIFFERENCE, sentence)
    assert len(re.findall(DIFFERENCE, row)) == 4


def test_the_figures_in_the_guides_sentences_are_those_of_the_runs():
    """They are typed in too: when the runs change, this names what docs/settings.md has to tell anew."""
    evidence = claims.Evidence()
    cell, plain = study.cell, study.plain
    operators, dropins = study.OPERATORS, study.DROPINS

    def points(cells, against):
        """The differences of top-1 and of top-5 in points: two lists."""
        return [
            [100 * claims.difference(metric, [each], [against(each)]).paired(evidence).difference for each in cells]
            for metric in ("top1", "top5")
        ]

    def span(values, digits=1):
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    def loss(cells, against, digits=1):
        return span([-value for value in points(cells, against)[0]], digits)

    def both(each, against):
        (top1,), (top5,) = points([each], lambda _: against)
        return f"{top1:+.2f} | {top5:+.2f}"

    def softmax(each):
        return cell(each.data, "softmax", seeds=each.seeds)

    def unchanged(each):
        return dataclasses.replace(each, changes=())

    def modes(data, name):
        return [each for each in study.section("top1", data) if dict(each.changes).get("top1") == name]

    def contest(first, second):
        found = results_page.contest(first, second, evidence)
        return f"{100 * found.difference:+.2f}, p = {f'{found.p:.2f}'.lstrip('0')}"

    half, pure = ({data: [cell(data, m, p_k, 10) for m in operators] for data in study.SETTINGS} for p_k in ("half", "pure"))
    auto = {data: [cell(data, m, temperature="auto") for m in dropins] for data in study.SETTINGS}
    few, many = (
        points(
            [plain(cell("embeddings", m, "quarter", m=size)) for m in ("splitter", "lapsum", "sinkhorn")],
            lambda each: cell("embeddings", each.method, "quarter"),
        )[0]
        for size in (10, 40)
    )
    noisy, scratch = (study.section("noisy", data) for data in study.SETTINGS)
    tuned_rate, slow, fast = study.section("rates", "embeddings")
    collapsed = [100 * value for value in evidence.values(plain(cell("glyphs", "splitter", "fifth", m=16)), "top1").values()]
    tuned = evidence.tuning("embeddings", "splitter").best.temperature
    (warmer,), (less,) = points(
        [cell("embeddings", "splitter", factor=32 / tuned)], lambda each: cell("embeddings", "splitter", factor=1 / tuned)
    )
    art = points(study.section("swap", "embeddings"), lambda each: cell("embeddings", "splitter", each.p_k))
    wires = points(study.section("wires", "embeddings"), unchanged)
    lapsum_against_splitter, splitter_against_default = [], []
    for data in study.SETTINGS:
        plainly, splitter, lapsum, ksubset, default = study.confirmation(data, evidence.known)
        lapsum_against_splitter.append(contest(lapsum, splitter))
        splitter_against_default.append(contest(splitter, default))
        followed = both(ksubset, plainly)  # on glyphs, which come last
    expected = [
        f"gain {span(points(half['embeddings'], softmax)[1], 2)} points of top-5 and lose "
        f"{loss(half['embeddings'], softmax, 2)} of top-1",
        "from scratch they are between {:+.2f} and {:+.2f} in top-1 and between {:+.2f} and {:+.2f} in top-5".format(
            *(end(values) for values in points(half["glyphs"], softmax) for end in (min, max))
        ),
        f"among the tuned rows ({both(cell('glyphs', 'ksubset', 'half', 10), cell('glyphs', 'softmax', seeds=10))}, 10 seeds",
        f"on 20 fresh seeds it does not ({followed})",
        f"From scratch the splitter and LapSum lose {loss(modes('glyphs', 'mixed'), unchanged)} and "
        f"{loss(modes('glyphs', 'operator'), unchanged)} points",
        f"LapSum is not better by the mean of top-1 and top-5 ({', and '.join(lapsum_against_splitter)})",
        f"no difference is seen by the mean of top-1 and top-5 ({', and '.join(splitter_against_default)})",
        f"it costs {loss(auto['embeddings'], softmax)} points of top-1 on the embeddings and "
        f"{loss(auto['glyphs'], softmax)} from scratch",
        f'On the embeddings `"mixed"` costs {loss(modes("embeddings", "mixed"), unchanged)} points of top-1 and `"operator"` '
        f"{loss(modes('embeddings', 'operator'), unchanged)}",
        f"SinkhornSort have {span(few)} points more top-1 than with 16 at about the same top-5, with 40 they lose "
        f"{span([-value for value in many])}",
        f"the splitter from 1 to 32: top-1 up by {warmer:.1f} points, top-5 down by {-less:.1f}",
        f"softmax with half its tuned rate has {both(slow, tuned_rate)} on the embeddings, with twice the rate "
        f"{both(fast, tuned_rate)}",
        f"the splitter has {both(noisy[1], noisy[0])} against softmax and LapSum {both(noisy[2], noisy[0])} on the embeddings",
        f"softmax with half of it has {both(noisy[5], noisy[0])}",
        f"From scratch the splitter has {both(scratch[1], scratch[0])}, within noise, "
        f"and LapSum {both(scratch[2], scratch[0])}",
        f"{statistics.mean(collapsed):.0f} ± {statistics.std(collapsed):.0f} % with 16",
        f"has {art[1][0]:.2f} points more top-5",
        f"with top-5 alone {art[0][2]:.2f} more top-1 and {art[1][2]:.2f} more top-5, and {-art[0][1]:.2f} less top-1 with",
        f"at most {max(abs(value) for values in wires for value in values):.2f} points",
    ]
    costs = {data: sorted(-value for value in points(pure[data], softmax)[0]) for data in study.SETTINGS}
    expected += [
        f"{costs['embeddings'][0]:.1f} (SinkhornSort) to {costs['embeddings'][-1]:.0f} points (SoftSort) on the embeddings, "
        f"{costs['glyphs'][0]:.0f} (SinkhornSort, LapSum, splitter) to {costs['glyphs'][-1]:.0f} from scratch"
    ]
    main, swap, noise = (
        layout.section_table(evidence, study.section(name, data), baseline, {"method": layout.title_of})
        for name, data, baseline in (
            ("main", "glyphs", softmax),
            ("swap", "embeddings", lambda each: cell("embeddings", "splitter", each.p_k)),
            ("noisy", "embeddings", lambda each: noisy[0]),
        )
    )
    (ksubset,) = (
        row for row, each in zip(main.rows, study.section("main", "glyphs"), strict=True) if each == half["glyphs"][-1]
    )
    expected += [
        f"10 seeds, p = {f'{ksubset[4].p:.3f}'.lstrip('0')} for top-5",
        f"points more top-5 (p = {f'{swap.rows[0][4].p:.3f}'.lstrip('0')})",
    ]
    assert all(row[place].p < 0.001 for row in noise.rows[1:3] for place in (2, 4))  # "each with p below .001"
    told = figures((ROOT / "docs" / "settings.md").read_text())
    assert [sentence for sentence in expected if f" {figures(sentence)} " not in f" {told} "] == []


def figures(text):
    """The numbers of a text one after the other: these are held against the runs, whatever words stand between them."""
    return " ".join(re.findall(r"[+-]?\d*\.?\d+", re.sub(r"top-\d+|`[^`]*`|P_K = \[.*?\]", "", text)))


def test_the_claims_that_the_guide_calls_held_are_held():
    """If one of them changes, the paragraph of docs/settings.md on the paper's claims is to be written anew."""
    evidence = claims.Evidence()
    verdicts = {
        claim.text: claims.judge(claim, "embeddings", evidence).verdict.partition(":")[0]
        for claim in claims.claims()
        if "embeddings" in claim.parts
    }
    for verdict, beginnings in {
        "holds": [
            "top-5 improves over softmax (the single k = 1): [.5, 0",
            "k from a distribution beats the single k = 5: [.5, 0, 0, 0, .5], top-1",
            "pure top-5 costs top-1",
            "pure top-5 costs NeuralSort and SoftSort the most",
            "pure top-5 costs Sinkhorn the least",
            "Sinkhorn and networks are the most robust",
            "splitter networks match full sorting",
        ],
        "does not hold": [
            "top-1 does not suffer",
            "top-1 rises with the top-5 weight",
            "m between 10 and 40 matters little: 40 against 10, top-1",
        ],
    }.items():
        for beginning in beginnings:
            assert {found for text, found in verdicts.items() if text.startswith(beginning)} == {verdict}, beginning
