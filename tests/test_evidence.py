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
from anyk.lab import statistics
from anyk.lab.errors import LabError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "evidence"))

import measure  # noqa: E402
import study  # noqa: E402
import write  # noqa: E402

SETTING = study.SETTINGS["embeddings"]


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
    """Make the tries that the search asks for, in a world where ``score`` tells the validation accuracy of a recipe."""
    while missing := study.tuning(known.setting.name, method, known).missing:
        for recipe in missing:
            known.add(recipe, result(score(recipe)))
    return study.tuning(known.setting.name, method, known)


def made(folder, truth, noise=0.001, seeds=10):
    """Summaries of embeddings in which ``truth(cell, metric)`` is the accuracy of a cell, plus noise that a seed shares."""
    known = study.read("embeddings", folder)
    for method in study.METHODS:
        tune(known, method, lambda recipe: 0.5)
    random_numbers = random.Random(0)
    common = [random_numbers.gauss(0, 0.01) for _ in range(seeds)]
    for name in study.SECTIONS:
        for each in study.section(name, "embeddings"):
            tuned = study.tuning("embeddings", each.method, known).best
            for place, recipe in enumerate(each.recipes(tuned)[:seeds]):
                top1, top5, top20 = (truth(each, metric) + common[place] for metric in ("top1", "top5", "top20"))
                wobble = [random_numbers.gauss(0, noise) for _ in range(3)]
                if known.find(recipe) is None:
                    known.add(recipe, result(top1 + wobble[0], top5 + wobble[1], top20 + wobble[2]))
    known.save()
    return write.Evidence(folder)


def test_the_page_is_what_the_committed_summaries_say():
    assert (ROOT / "docs" / "results.md").read_text() == write.page(write.Evidence()), "run `make evidence`"


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


def test_every_cell_is_a_valid_recipe_with_at_least_five_seeds_and_ten_in_the_main_rows():
    for data, setting in study.SETTINGS.items():
        classes = {"embeddings": 100, "glyphs": 200}[data]
        for name in study.SECTIONS:
            for each in study.section(name, data):
                assert each.seeds >= (10 if name == "main" else 5)
                tuned = setting.recipe.but(
                    **study.METHODS[each.method], **setting.fields.get(each.method, {}), p_k=study.PKS["half"]
                )
                recipes = each.recipes(tuned)
                assert len({recipe.seed for recipe in recipes}) == each.seeds
                assert not set(study.TUNING_SEEDS) & {recipe.seed for recipe in recipes}
                study.criteria.criterion(recipes[0], classes)


def test_the_same_run_is_found_under_every_name(tmp_path):
    known = study.read("embeddings", tmp_path)
    tuned = tune(known, "splitter", lambda recipe: 0.5).best
    written_out = study.Cell("embeddings", "splitter", "half", 5, (("m", 16), ("wires", "target")))
    for plain, other in zip(study.cell("embeddings", "splitter").recipes(tuned), written_out.recipes(tuned), strict=True):
        assert study.key(plain, SETTING.recipe) == study.key(other, SETTING.recipe)
    sizes = [each for each in study.section("m", "embeddings") if (each.method, each.p_k) == ("splitter", "quarter")]
    assert sum(each.changes == () for each in sizes) == 1, "m = 16 is the setting's own"


@pytest.mark.parametrize(("rate", "temperature"), [(0.002, 1.0), (0.004, 2.0), (0.001, 0.25), (0.002, 4.0), (0.002, 0.125)])
def test_the_search_finds_a_best_point_within_its_reach(tmp_path, rate, temperature):
    def score(recipe):
        return (
            0.6
            - 0.01 * abs(torch.log2(torch.tensor(recipe.learning_rate / rate)))
            - 0.01 * abs(torch.log2(torch.tensor(recipe.temperature / temperature)))
        )

    known = study.read("embeddings", tmp_path)
    tuned = tune(known, "splitter", lambda recipe: float(score(recipe)))
    assert len(tuned.tries) == SETTING.budget
    assert tuned.best.learning_rate == rate
    assert tuned.best.temperature == temperature


def test_tuning_gives_every_method_the_same_number_of_runs(tmp_path):
    known = study.read("embeddings", tmp_path)
    for method in study.METHODS:
        tune(known, method, lambda recipe: 0.5)
        assert len(study.tuning("embeddings", method, known).tries) == SETTING.budget
    assert len(known.runs) == SETTING.budget * len(study.METHODS)


def test_tuning_takes_the_mean_over_its_seeds(tmp_path):
    """Of two temperatures, the first is better on one seed and worse on the other two."""
    known = study.read("glyphs", tmp_path)
    first = study.SETTINGS["glyphs"].temperatures.get("splitter", 1.0)
    rate = 2 * study.SETTINGS["glyphs"].recipe.learning_rate
    tune(known, "softmax", lambda recipe: 0.5 if recipe.learning_rate == rate else 0.4)

    def score(recipe):
        if recipe.temperature not in (first, 4 * first):
            return 0.1
        if recipe.temperature == first:
            return 0.9 if recipe.seed == 0 else 0.3
        return 0.6

    tuned = tune(known, "splitter", score)
    assert tuned.best.temperature == 4 * first
    assert {recipe.learning_rate for recipe, _ in tuned.tries} == {rate}, "the one that softmax found"
    assert tuned.best.epochs == study.SETTINGS["glyphs"].recipe.epochs
    assert len(tuned.tries) == study.SETTINGS["glyphs"].budget
    assert len(known.runs) == 2 * 3 * study.SETTINGS["glyphs"].budget


def test_a_diverged_try_is_the_worst(tmp_path):
    known = study.read("embeddings", tmp_path)
    for recipe in study.tuning("embeddings", "lapsum", known).missing:
        known.add_diverged(recipe) if recipe.temperature == 1.0 else known.add(recipe, result(0.1))
    tuned = tune(known, "lapsum", lambda recipe: 0.1)
    assert (tuned.best.temperature, tuned.best.learning_rate) != (1.0, SETTING.recipe.learning_rate)


def test_summaries_are_read_as_they_were_written(tmp_path):
    known = study.read("embeddings", tmp_path)
    recipe = SETTING.recipe.but(loss="lapsum", seed=3, data="/somewhere/else")
    known.add(recipe, result(0.123456))
    known.save()
    again = study.read("embeddings", tmp_path)
    assert again.find(recipe) == known.find(recipe)
    assert again.find(recipe).test["top1"] == 0.12346
    assert "somewhere" not in (tmp_path / "embeddings.jsonl").read_text()
    head = json.loads((tmp_path / "embeddings.jsonl").read_text().splitlines()[0])
    head["shared"]["epochs"] = 99
    (tmp_path / "embeddings.jsonl").write_text(json.dumps(head) + "\n")
    with pytest.raises(LabError, match="another shared recipe"):
        study.read("embeddings", tmp_path)


def test_waves_tune_first_and_ask_for_nothing_twice(tmp_path):
    known = {name: study.read(name, tmp_path) for name in study.SETTINGS}
    asked = []
    for wave in study.waves(study.plan(["embeddings"], ["main"], 2), known, 10):
        for data, recipe in wave:
            asked.append((data, study.key(recipe, study.SETTINGS[data].recipe)))
            if recipe.loss != "ksubset":  # a method that always fails does not hold up the others
                known[data].add(recipe, result(0.5))
    assert len(asked) == len(set(asked))
    first = [json.loads(name).get("seed", 0) for _, name in asked]
    assert first == sorted(first, key=bool), "tuning comes before the seeds"
    for each in study.section("main", "embeddings"):
        runs = study.runs_of(each, known["embeddings"])
        assert runs is None if each.method == "ksubset" else len(runs) == 2
    for data in known:
        known[data].save()
    again = {name: study.read(name, tmp_path) for name in study.SETTINGS}
    left = [recipe.loss for wave in study.waves(study.plan(["embeddings"], ["main"], 2), again, 10) for _, recipe in wave]
    assert set(left) == {"ksubset"}


def test_a_real_run_becomes_a_summary_and_is_not_made_again(tmp_path, monkeypatch):
    small = dataclasses.replace(
        study.SETTINGS["glyphs"],
        recipe=study.SETTINGS["glyphs"].recipe.but(data="glyphs:12", epochs=1, model="linear", augment=()),
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
    for module in (study, write, measure):
        assert doctest.testmod(module, extraglobs={"statistics": statistics, "torch": torch}).failed == 0


def test_verdicts():
    paired = statistics.Paired
    cases = [
        ("more", paired(0.01, 5, 0.005, 0.015, 0.001), 0.002, "holds"),
        ("more", paired(-0.01, 5, -0.015, -0.005, 0.001), 0.002, "does not hold: the opposite"),
        ("more", paired(0.01, 5, -0.005, 0.025, 0.2), 0.4, "undecided"),
        ("more", paired(0.0005, 5, -0.001, 0.002, 0.2), 0.4, "not seen"),
        ("less", paired(-0.01, 5, -0.015, -0.005, 0.001), 0.002, "holds"),
        ("no less", paired(-0.001, 5, -0.0029, 0.001, 0.3), 0.6, "holds"),
        ("no less", paired(0.05, 5, 0.04, 0.06, 0.001), 0.001, "holds"),
        ("no less", paired(-0.02, 5, -0.03, -0.01, 0.001), 0.001, "does not hold"),
        ("no less", paired(-0.001, 5, -0.02, 0.018, 0.8), 1.0, "undecided"),
        ("same", paired(0.001, 5, -0.001, 0.0025, 0.3), 0.6, "holds"),
        ("same", paired(0.02, 5, 0.01, 0.03, 0.001), 0.001, "does not hold"),
        ("same", None, None, "not measured"),
    ]
    for expected, found, p, answer in cases:
        assert write.verdict(expected, found, p) == answer


def papers_world(each, metric):
    """A world in which the paper is right."""
    base = {"top1": 0.6, "top5": 0.88, "top20": 0.97}[metric]
    if each.method == "softmax":
        return base
    if each.p_k == "pure":
        cost = {"neuralsort": 0.3, "softsort": 0.25, "sinkhorn": 0.02}.get(each.method, 0.1)
        return base - (cost if metric == "top1" else 0.01)
    if each.p_k == "top20":
        return base - 0.02
    return base + (0.01 if metric == "top1" else 0.02) - (0.01 if each.method == "neuralsort" else 0.0)


def test_claims_that_are_true_by_construction_hold(tmp_path):
    judged = [each for each in write.judge(made(tmp_path, papers_world)) if each.claim.data == "embeddings"]
    wrong = [each.claim.text for each in judged if each.verdict != "holds" and "large m" not in each.claim.text]
    assert wrong == []
    (large,) = [each for each in judged if "large m" in each.claim.text]
    assert large.verdict in ("not seen", "undecided")
    assert abs(next(e.found.difference for e in judged if "improves top-5" in e.claim.text) - (0.02 - 0.01 / 7)) < 0.002
    assert {each.methods for each in judged if each.claim.text == "pure top-5 costs top-1"} == {"7 of 7"}


def test_claims_that_are_false_by_construction_do_not_hold(tmp_path):
    def world(each, metric):
        base = {"top1": 0.6, "top5": 0.88, "top20": 0.97}[metric]
        return base if each.method == "softmax" else 2 * base - papers_world(each, metric)

    judged = [each for each in write.judge(made(tmp_path, world)) if each.claim.data == "embeddings"]
    for each in judged:
        alike = each.claim.expected == "same" or "matches" in each.claim.text  # no difference in this world either
        if alike or "large m" in each.claim.text or each.claim.contrast.metric == "top20":
            continue
        assert each.verdict.startswith("does not hold"), each.claim.text


def test_a_default_may_lose_no_top1_and_must_gain_top5():
    paired = statistics.Paired
    gain, loss, nothing = (
        paired(0.01, 5, 0.005, 0.015, 0.001),
        paired(-0.01, 5, -0.015, -0.005, 0.001),
        paired(0, 5, -1, 1, 0.9),
    )
    assert write.qualifies(nothing, gain) == "yes"
    assert write.qualifies(gain, gain) == "yes"
    assert write.qualifies(loss, gain) == "no: loses top-1"
    assert write.qualifies(nothing, nothing) == "open: top-5 within noise"
    assert write.qualifies(nothing, loss) == "no: loses top-5"


def test_nothing_is_claimed_where_nothing_is(tmp_path):
    judged = [each for each in write.judge(made(tmp_path, lambda each, metric: 0.5)) if each.claim.data == "embeddings"]
    for each in judged:
        told = ("holds",) if each.claim.expected in ("same", "no less") else ("not seen", "undecided")
        assert each.verdict in told, each.claim.text


def test_a_part_of_the_methods_is_judged_as_such(tmp_path):
    evidence = made(tmp_path, papers_world)
    known = evidence.known["embeddings"]
    known.runs = {
        name: run
        for name, run in known.runs.items()
        if run.own.get("loss") not in ("lapsum", "bitonic") or not run.own.get("seed")
    }
    known.save()
    judged = write.judge(write.Evidence(tmp_path))
    found = next(each for each in judged if each.claim.text == "pure top-5 costs top-1")
    assert (found.verdict, found.methods) == ("holds", "5 of 5 (7 planned)")
    assert next(each for each in judged if "splitter matches" in each.claim.text).verdict == "not measured"


def test_the_page_shows_what_is_missing_and_draws_what_is_there(tmp_path):
    empty = write.page(write.Evidence(tmp_path / "empty"))
    assert "No run yet" in empty
    assert "**holds**" not in empty
    evidence = made(tmp_path, papers_world)
    page = write.page(evidence, tmp_path / "images")
    for name in ("alpha-embeddings.svg", "m-embeddings.svg"):
        assert f"images/{name}" in page
        first = (tmp_path / "images" / name).read_bytes()
        write.page(evidence, tmp_path / "images")
        assert (tmp_path / "images" / name).read_bytes() == first
    assert not (tmp_path / "images" / "alpha-glyphs.svg").exists()
    assert "images/alpha-glyphs.svg" not in page
    assert "| softmax | top-1 |" in page
    known = evidence.known["embeddings"]
    gone = next(name for name, run in known.runs.items() if run.own.get("loss") == "lapsum" and run.own.get("seed") == 10)
    del known.runs[gone]
    known.save()
    assert "229 of 230 runs of this part are there" in write.page(write.Evidence(tmp_path))


def test_differences_in_a_table_are_paired_and_corrected(tmp_path):
    evidence = made(tmp_path, papers_world)
    cells = [study.cell("embeddings", "softmax", seeds=10), study.cell("embeddings", "lapsum", "half", 10)]
    table = write.section_table(evidence, cells, lambda each: cells[0], {"method": lambda each: each.method})
    top1, top5 = table.rows[1][2], table.rows[1][4]
    values = [evidence.values(each, "top1") for each in reversed(cells)]
    by_hand = statistics.paired(list(values[0].values()), list(values[1].values()))
    assert top1.paired == by_hand
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


def test_the_readme_tells_what_the_results_tell() -> None:
    """Its table of evidence is typed in: these are the figures of the page that is written from the runs."""
    root = Path(__file__).parent.parent
    results, readme = (root / "docs" / "results.md").read_text(), (root / "README.md").read_text()
    for told, method in (("splitter", "network, splitter"), ("LapSum", "LapSum")):
        row = re.search(rf"^\| {told} \| ([-+].*) \|$", readme, re.MULTILINE)
        start = re.escape(f"| {method} | [.5, 0, 0, 0, .5] | the setting's |")
        measured = re.search(rf"^{start} (.*)$", results, re.MULTILINE)
        assert row is not None
        assert measured is not None
        cells = [cell.strip() for cell in measured[1].split("|")[:4]]
        for short, full in zip(row[1].split(" | "), cells, strict=True):
            value, p = re.fullmatch(r"(\S+) \(p ([=<]) (\.\d+)\)", short), re.fullmatch(r"(\S+) \(p ([=<]) (\S+)\)", full)
            assert value is not None
            assert p is not None
            assert (value[1], value[2]) == (p[1], p[2])
            assert float(value[3]) == pytest.approx(float(p[3]), abs=0.0051)
