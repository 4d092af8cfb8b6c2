"""The second study: its plan, its runner on small data, its rule on made summaries, and the committed page."""

import dataclasses
import doctest
import functools
import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import lab_data
from anyk.lab import statistics
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.losses import criterion

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "evidence"))

from pays import confusions, heads, page, plan, rule, runner  # noqa: E402
from pays.plan import BASE, DECIDE, METHODS, SETS  # noqa: E402
from pays.summaries import SUMMARIES, Summaries, own  # noqa: E402

CLASSES = {"completion": 2000, "items": 3416, "pixels": 100, "embeddings": 100, "embeddings-mlp": 100, "glyphs": 200}


# The plan ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plan.EVERY)
def test_every_config_of_the_plan_can_be_made(name):
    each, classes = plan.EVERY[name], CLASSES[name.partition("-wrong")[0]]
    assert set(each.methods) <= set(METHODS)
    for method in each.methods:
        start = each.start(method)
        assert start.data == name  # no path
        rate, *axes = each.axes(method)
        assert rate.name == "learning_rate"
        assert [axis.name for axis in axes] == list(METHODS[method].hyperparameters)
        for point in itertools.product(*([axis.values[axis.start]] for axis in (rate, *axes))):
            criterion(start.replace(**dict(zip([axis.name for axis in (rate, *axes)], point, strict=True))), classes)
    for question in plan.QUESTIONS:
        cells = plan.cells(question, name)
        assert len({cell.id for cell in cells}) == len(cells)
        for cell in cells:
            assert cell.method in each.methods
            for choice in cell.choices or ((),):
                config = cell.config(each.start(cell.method).replace(label_smoothing=0.1), choice)
                criterion(config, classes)


def test_what_is_compared_is_there_and_the_seeds_are_fresh():
    for name, each in plan.EVERY.items():
        rows = {f"main: {method}" for method in each.methods}
        for question in ("main", *plan.QUESTIONS):
            rows |= {cell.id for cell in (plan.cells(question, name) if question != "main" else [])}
            pairs = plan.pairs(question, name)
            assert {row for pair in pairs for row in pair} <= rows
            assert len(set(pairs)) == len(pairs)
            assert all(one != other for one, other in pairs)
        for *_, one, other in page.claims(name) if name in SETS else ():
            assert {one, other} <= rows
            assert any((one, other) in plan.pairs(question, name) for question in ("main", *plan.QUESTIONS)), (one, other)
        chosen_by = {plan.CHOOSING, *plan.FRESH, *heads.SEEDS}
        assert not chosen_by & set(each.seeds)
    assert plan.CHOOSING not in (*plan.FRESH, *heads.SEEDS)


def test_a_change_of_the_rate_is_a_factor_and_without_cross_entropy_nothing_is_smoothed():
    tuned = Config(loss="error:ksubset", learning_rate=0.003, label_smoothing=0.1)
    assert plan.changed(tuned, (("rate", 2.0),)).learning_rate == 0.006
    assert plan.changed(tuned, (("ce_weight", 0.0),)).label_smoothing == 0


def test_places_are_those_that_were_given():
    found = runner.places(["embeddings=a", "items=b.txt"], [])
    assert found == {
        **{"completion": "completion:2000", "items": "sequences:b.txt"},
        **{"embeddings": "a", "embeddings-mlp": "a", "glyphs": "glyphs:200"},
    }
    assert runner.places(["items=sequences:b"], ["items"]) == {"items": "sequences:b"}
    noisy = runner.places(["embeddings=a", "confusions=c.npy"], [])
    assert {name: place for name, place in noisy.items() if "-wrong" in name} == {
        **dict.fromkeys(("completion-wrong40", "completion-wrong20"), "completion:2000"),
        **dict.fromkeys([f"{name}-wrong{wrong}" for name in ("embeddings", "embeddings-mlp") for wrong in (40, 20)], "a"),
    }
    with pytest.raises(LabError, match="--data should say where pixels is"):
        runner.places([], ["pixels-wrong40"])
    with pytest.raises(LabError, match="--data should say where pixels is"):
        runner.places([], ["pixels"])
    with pytest.raises(LabError, match="there is no set 'pixel'"):
        runner.places(["pixel=a"], [])


# The runs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A set of the study on a few points, run to its end: the set, where its data, its runs and its summaries are."""
    folder = tmp_path_factory.mktemp("pays")
    data = lab_data.write_embedding_set(folder / "points", classes=12, per_class=30)
    each = dataclasses.replace(
        SETS["embeddings"],
        fields={**SETS["embeddings"].fields, "epochs": 1, "batch_size": 60},
        methods=("softmax", "gce", BASE),
        **{"budget": 2, "tuning_seeds": 1, "seeds": (1, 2, 3)},
    )
    make(each, data, folder)
    return each, data, folder


def make(each, data, folder):
    runner.run({"embeddings": each}, {"embeddings": str(data)}, folder / "runs", folder / "summaries", 2, ["main"])


def test_the_runner_keeps_what_the_pages_need(small):
    each, data, folder = small
    summaries = Summaries(each, folder / "summaries")
    assert set(summaries.tuned) == set(each.methods)
    for method in each.methods:
        runs = summaries.runs(f"main: {method}")
        assert list(runs) == [1, 2, 3]
        values = summaries.tuned[method]["values"]
        assert {"learning_rate", *METHODS[method].hyperparameters} == set(values)
        assert summaries.tuned[method]["tries"] == 2
        assert all(run.own["loss"] == METHODS[method].loss for run in runs.values())
        assert {"top1", "top3", "top5", "top10"} <= set(runs[1].test)
    # The counts are those of the accuracies.
    counted = summaries.contrast(f"main: {BASE}", "main: softmax", "top5")
    expected = [
        round(360 * (one - other))
        for one, other in zip(
            summaries.values(f"main: {BASE}", "top5").values(), summaries.values("main: softmax", "top5").values(), strict=True
        )
    ]
    assert list(counted.by_seed) == expected
    assert counted.examples == 360
    text = "".join(path.read_text() for path in (folder / "summaries").iterdir())
    assert str(data) not in text
    assert str(folder) not in text
    assert not list((folder / "runs").rglob("model.safetensors"))  # the study does not read them


def test_wrong_labels_are_those_of_the_matrix(small, tmp_path):
    clean, data, _ = small
    changes = {"wrong": 0.4, "methods": ("softmax",), "seeds": (1,), "fields": {**clean.fields, "epochs": 8}}
    each = dataclasses.replace(clean, name="embeddings-wrong40", **changes)
    np.save(tmp_path / "people.npy", np.eye(12) + 9 * np.roll(np.eye(12), 1, axis=1))
    for people, message in (("", "confusions=FILE.npy"), (str(tmp_path / "people.npy"), "")):
        arguments = ({each.name: each}, {each.name: str(data)}, tmp_path / "runs", tmp_path, 1, ["main"], people)
        if message:
            with pytest.raises(LabError, match=message):
                runner.run(*arguments)
        else:
            runner.run(*arguments)
    matrix = np.load(tmp_path / "runs" / "embeddings-wrong40-confusions.npy")
    np.testing.assert_allclose(matrix, 0.6 * np.eye(12) + 0.4 * np.roll(np.eye(12), 1, axis=1))
    summaries = Summaries(each, tmp_path)
    [line] = summaries.runs("main: softmax").values()
    results = [json.loads(path.read_text()) for path in (tmp_path / "runs" / each.name).glob("*/result.json")]
    assert len(results) == len(summaries.lines)
    assert all(result["config"]["label_noise"].endswith("embeddings-wrong40-confusions.npy") for result in results)
    assert line.test["guesses90"] <= line.test["guesses95"]
    assert str(tmp_path) not in summaries.path.read_text()
    assert summaries.data["fingerprint"] != Summaries(clean, small[2] / "summaries").data["fingerprint"]


def test_confusions_have_the_share_that_was_asked_for():
    generator = np.random.default_rng(0)
    matrix = generator.exponential(size=(9, 9)) + 9 * np.eye(9)
    some = confusions.with_share(matrix, 0.2)
    np.testing.assert_allclose(some.sum(1), 1)
    assert 1 - np.diag(some).mean() == pytest.approx(0.2)
    ratios = (some / (matrix / matrix.sum(1, keepdims=True)))[~np.eye(9, dtype=bool)]
    np.testing.assert_allclose(ratios, ratios[0])
    with pytest.raises(LabError, match="would leave a class none"):
        confusions.with_share(matrix, 0.99)
    matrix[3] = np.eye(9)[3]  # a class that is never taken for another
    same = confusions.same_share(matrix, 0.4)
    np.testing.assert_allclose(same.sum(1), 1)
    np.testing.assert_allclose(np.diag(same), 0.6)


def test_what_has_ended_is_not_made_again(small, capsys):
    each, data, folder = small
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("result.json")}
    summaries = {path: path.read_text() for path in (folder / "summaries").iterdir()}
    gone = next(path.parent for path in before if "-seed2-" in path.parent.name)
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    make(each, data, folder)
    after = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("result.json")}
    assert before.keys() == after.keys()
    assert [path.parent for path in before if before[path] != after[path]] == [gone]
    for path, text in summaries.items():
        mended = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else []
        for line, former in zip(mended, map(json.loads, text.splitlines()), strict=False):
            assert {**line, "seconds": 0} == {**former, "seconds": 0}
    told = capsys.readouterr().err
    assert told.count("validation") == 1


def test_what_is_tuned_by_the_summaries_is_not_tuned_again_elsewhere(small, tmp_path):
    each, data, folder = small
    shutil.copytree(folder / "summaries", tmp_path / "summaries")
    make(each, data, tmp_path)
    configs = [json.loads(path.read_text())["config"] for path in (tmp_path / "runs").rglob("result.json")]
    assert sorted(config["seed"] for config in configs) == sorted(3 * each.seeds)
    for path in (folder / "summaries").glob("*-contrasts.json"):
        assert (tmp_path / "summaries" / path.name).read_text() == path.read_text()


def test_another_search_takes_the_purpose_from_the_runs_of_the_former(small, tmp_path):
    each, _, folder = small
    summaries = Summaries(each, folder / "summaries")
    summaries.path, summaries.contrasts_path = tmp_path / "a.jsonl", tmp_path / "a.json"
    [first, *rest] = [line for line in summaries.lines.values() if "main: gce" in line.purposes]
    wanted = [runner.config_of(each.config, line.own) for line in rest]
    summaries.assign("main: gce", wanted)
    assert list(summaries.runs("main: gce")) == [line.seed for line in sorted(rest, key=lambda line: line.seed)]
    assert first not in summaries.lines.values()


def test_other_data_under_the_same_name_are_refused(small):
    each, _, folder = small
    other = lab_data.write_embedding_set(folder / "others", classes=13, per_class=30)
    with pytest.raises(LabError, match="the data of embeddings have changed"):
        make(each, other, folder)
    with pytest.raises(LabError, match="--only should be of main"):
        runner.run({}, {}, folder / "runs", folder, 2, ["q9"])


def test_the_status_says_what_is_missing(small):
    _, _, folder = small
    lines = list(runner.status(folder / "summaries"))
    assert any("embeddings" in line and "softmax" in line and "3 of 10 seeds" in line for line in lines)
    assert any(line.startswith("completion") and "0 of 10 seeds" in line for line in lines)


def test_counts_take_a_seed_that_diverged_as_missing_everything_and_forget_rows_without_runs(small, tmp_path):
    each, data, folder = small
    shutil.copytree(folder / "summaries", tmp_path / "summaries")
    summaries = Summaries(each, tmp_path / "summaries")
    summaries.count([dataclasses.replace(counts(5, 3), method="main: smooth", against="main: softmax", metric="top1")])
    one, other = (summaries.runs(f"main: {method}") for method in ("gce", "softmax"))
    before = summaries.contrast("main: gce", "main: softmax", "top5").by_seed
    one[2].test, one[2].validation = {}, {}
    study = runner.Study(each, str(data), folder / "runs", summaries, 0.0)
    study.count("main")
    after = summaries.contrast("main: gce", "main: softmax", "top5").by_seed
    assert summaries.contrast("main: smooth", "main: softmax", "top1") is None
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] == -round(360 * other[2].test["top5"])
    # a pair of which a folder is gone keeps what it has
    study.folder = tmp_path
    study._ranks.clear()
    study.count("main")
    assert summaries.contrast("main: gce", "main: softmax", "top5").by_seed == after
    # a row that is no longer there is forgotten
    for line in one.values():
        line.purposes.remove("main: gce")
    study.count("main")
    assert summaries.contrast("main: gce", "main: softmax", "top5") is None


def test_a_run_that_diverged_is_not_tried_again(small, tmp_path):
    run = runner.Run(tmp_path / "run")
    run.folder.mkdir()
    run.fail("the scores are not finite at step 3: lower the learning rate (9) or raise the temperature.")
    assert runner._diverged(run.folder).diverged
    run.fail("out of memory")
    assert runner._diverged(run.folder) is None


def test_a_config_is_named_by_what_it_has_of_its_own():
    each = SETS["embeddings"]
    config = each.start(BASE).replace(seed=4, ce_weight=0.5, data="/somewhere")
    assert own(config, each.config) == {"loss": "error:ksubset", "seed": 4, "ce_weight": 0.5}


# The rule ------------------------------------------------------------------------------------------------------------------


def counted(one, other, metric, gains, seeds=10):
    """Counts of a difference in hits of about ``gains``, the same examples on every seed and a few that vary."""
    return dataclasses.replace(counts(gains, seeds), method=one, against=other, metric=metric)


@functools.cache
def counts(gains, seeds, examples=10_000, spread=3):
    differences = np.zeros((seeds, examples), dtype=np.int8)
    places = np.random.default_rng(abs(gains)).permutation(examples)
    differences[:, places[: abs(gains)]] = np.sign(gains)
    for seed in range(seeds):
        differences[seed, places[-40 + (seed % spread) :]] = 1
        differences[seed, places[-80 : -40 - (seed % 2)]] = -1
    return statistics.contrast("", "", "", differences)


def made(folder, gains, gce=0):
    """The four sets with these gains (top-1, top-K) of the candidate on softmax, in examples of 10,000, and on gce."""
    found = {}
    for name in SETS:
        summaries = Summaries(SETS[name], folder)
        summaries.head["data"] = {
            "classes": 100,
            "train": 1,
            "validation": 1,
            "test": 10_000,
            "fingerprint": "f",
            "kind": "made",
        }
        pairs = []
        for method in SETS[name].methods if name in gains else ():
            for k, gain in zip((1, SETS[name].k), gains[name], strict=True):
                own = gain if method == BASE else round(0.5 * gain)
                pairs += [counted(f"main: {method}", "main: softmax", f"top{k}", own)] if method != "softmax" else []
                pairs += [counted(f"main: {method}", "main: gce", f"top{k}", gce)] if method != "gce" else []
        summaries.count(pairs)
        found[name] = summaries
    return found


GAINS = dict.fromkeys(DECIDE, (60, 60))


SETTLED = [
    # gains (top-1, top-K) on some sets, and on gce; whether the candidate passes, and what stands in the way
    ({}, 5, True, ()),
    ({"items": (60, 0)}, 5, True, ()),
    ({"items": (60, 0), "pixels": (60, 0)}, 5, False, ("the list is gained on 2 of the four sets only",)),
    ({"pixels": (-2, 60)}, 5, True, ()),
    ({"pixels": (-30, 60)}, 5, False, ("pixels: top-1 may lose 0.2 points",)),
    ({}, -60, False, ("the mean of both is below gce's",)),
]


@pytest.mark.parametrize(("changes", "gce", "passes", "reasons"), SETTLED)
def test_the_rule_for_the_default(changes, gce, passes, reasons, tmp_path):
    every = rule.judge(made(tmp_path, {**GAINS, **changes}, gce))
    base, *others = sorted(every, key=lambda one: one.method != BASE)
    assert (base.passes, base.reasons) == (passes, reasons)
    # The others have no runs on pixels, so they cannot pass; where nothing passes, the best by the mean of both stays.
    assert not any(one.passes for one in others)
    assert rule.default(every) is base


def test_nothing_is_decided_while_runs_are_missing(tmp_path):
    sets = made(tmp_path / "a method", GAINS, gce=5)
    del sets["completion"].contrasts["main: error:ksubset pure", "main: softmax", "top1"]
    without = made(tmp_path / "a set", {name: GAINS[name] for name in DECIDE if name != "pixels"}, gce=5)
    for summaries, missing in ((sets, "completion"), (without, "pixels")):
        every = rule.judge(summaries)
        base = next(one for one in every if one.method == BASE)
        assert (base.passes, base.reasons) == (None, (f"{missing}: not measured",))
        assert rule.default(every) is None


def wrong_labels(folder, gains, gce):
    """The sets of the rule for wrong labels, with the gains (top-1, top-K) of the methods on softmax; and on gce."""
    sets = {}
    for name in rule.WRONG:
        summaries = sets[name] = Summaries(plan.NOISY[name], folder)
        pairs = []
        for method in summaries.set.methods:
            for k, gain in zip(summaries.set.ks, gains(method, name), strict=True):
                pairs += [counted(f"main: {method}", "main: softmax", f"top{k}", gain)] if method != "softmax" else []
                pairs += [counted(f"main: {method}", "main: gce", f"top{k}", gce)] if method != "gce" else []
        summaries.count(pairs)
    return sets


MIX = "error:lapsum mix"
LINES = [
    # what the methods gain; what is gained on gce; the line for wrong labels, and whether it goes beyond gce
    (lambda method, name: (90, 60) if method == MIX else (60, 0), 60, MIX, True),
    (lambda method, name: (90, 60) if method == MIX else (60, 0), 0, MIX, False),
    (lambda method, name: (90, 90) if method == "gce" else (60, 60), 0, "gce", False),
    (lambda method, name: (90, -90 if name == "completion-wrong20" else 60) if method == MIX else (0, 60), 0, "gce", False),
    (lambda method, name: (90, 90) if name.startswith("embeddings-mlp") else (0, 0), 0, None, False),
]


@pytest.mark.parametrize(("gains", "gce", "line", "beyond"), LINES)
def test_the_rule_for_wrong_labels(gains, gce, line, beyond, tmp_path):
    judged = rule.judge_wrong(wrong_labels(tmp_path, gains, gce))
    found = rule.line_for_wrong_labels(judged)
    assert (found and found.method) == line
    assert line is None or bool(found.beyond_gce) == beyond
    assert {one.method for one in judged} == {"gce", "splitter mix", MIX, "error:lapsum pure"}
    evidence = page.Evidence(tmp_path)
    words = {
        "gce": "Being bounded is what helps, and not k: the bounded loss without k is significantly better than cross-entropy "
        "on 6 of 6 settings and worse on none",
        None: "No loss helps",
        MIX: "`TopKErrorLoss({1: .5, 5: .5})` is significantly better than cross-entropy on 6 of 6 settings",
    }
    told = page.wrong_sentence(evidence)
    assert told.startswith(words[line])
    if line == MIX:
        assert told.endswith("on 6 of them than without k, too." if beyond else "on none than without k.")


def test_nothing_is_bold_before_all_methods_of_a_set_were_measured(tmp_path):
    sets = wrong_labels(tmp_path, lambda method, name: (90, 90), 0)
    evidence = page.Evidence(tmp_path)
    assert page.both_text(evidence, "completion-wrong40", "gce") == "**+0.90** \\| **+0.90**"
    summaries = sets["completion-wrong40"]
    summaries.count([], gone=[("main: splitter mix", "main: softmax")])
    evidence = page.Evidence(tmp_path)
    assert page.both_text(evidence, "completion-wrong40", "gce") == "–"
    assert "runs are missing" in page.wrong_sentence(evidence)


def test_the_line_for_wrong_labels_is_open_while_runs_are_missing(tmp_path):
    sets = wrong_labels(tmp_path, LINES[0][0], 60)
    del sets["completion-wrong20"].contrasts["main: splitter mix", "main: softmax", "top5"]
    judged = rule.judge_wrong(sets)
    assert [one.helps for one in judged if one.method == "splitter mix"] == [None]
    assert rule.line_for_wrong_labels(judged) is None


# The page ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evidence():
    return page.Evidence()


def test_the_committed_pages_are_what_the_summaries_say(evidence):
    assert (page.TABLES / "pays.md").read_text(encoding="utf-8") == page.page(evidence), "run `make evidence`"
    for path, text in page.pages(ROOT, evidence).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make evidence`"


def test_the_same_runs_are_the_same_picture(evidence, tmp_path):
    name, dimensions = next(iter(page.FIGURES.items()))
    for folder in ("first", "second"):
        page.draw(evidence, page.FIGURED, dimensions, tmp_path / folder / f"{name}.svg")
    assert (tmp_path / "first" / f"{name}.svg").read_bytes() == (tmp_path / "second" / f"{name}.svg").read_bytes()


def test_a_page_without_runs_is_one_of_dashes(tmp_path):
    nothing = page.Evidence(tmp_path)
    assert page.sentence(nothing).startswith("**Not decided yet**")
    text = page.page(nothing)
    cells = [cell.strip() for line in text.splitlines() if line.startswith("| softmax |") for cell in line.split("|")[2:-1]]
    assert set(cells) == {"–", "0"}
    assert all(f"(`{name}`): no run yet" in text for name in SETS)


def test_what_a_page_quotes_stands_between_its_marks(evidence):
    text = "before\n<!-- pays: main -->\nformer\n<!-- end -->\nafter <!-- bench: cost -->\nkept\n<!-- end -->\n"
    new = page.quoted(text, evidence)
    assert new.startswith("before\n<!-- pays: main -->\n\n| top-1 \\| top-K |")
    assert "former" not in new
    assert new.endswith("<!-- end -->\nafter <!-- bench: cost -->\nkept\n<!-- end -->\n")
    assert page.quoted(new, evidence) == new
    assert "(evidence/tables/pays.md)" in new
    assert "(../evidence/tables/pays.md)" in page.quoted(text, evidence, guide=True)


def test_the_committed_summaries_hold_no_paths():
    for path in SUMMARIES.iterdir():
        text = path.read_text()
        for place in ("/work", "/home", "/tmp", "/root"):
            assert place not in text, path


def test_doctests():
    for module in (plan, page, heads, confusions):
        found = doctest.testmod(module, extraglobs={"torch": torch})
        assert found.attempted > 0
        assert found.failed == 0


# One head for each k -------------------------------------------------------------------------------------------------------


def test_merged_ranks_are_those_of_the_merged_list():
    generator = torch.Generator().manual_seed(0)
    first, rest = torch.randn(200, 6, generator=generator), torch.randn(200, 6, generator=generator)
    target = torch.randint(6, (200,), generator=generator)
    expected = []
    for one, other, label in zip(first.tolist(), rest.tolist(), target.tolist(), strict=True):
        guess = max(range(6), key=one.__getitem__)
        others = [each for each in sorted(range(6), key=lambda each: -other[each]) if each != guess]
        expected.append([guess, *others].index(label) + 1)
    assert heads.merged_ranks(first, rest, target).tolist() == expected


def test_two_heads_share_all_but_the_last_layer(small, tmp_path):
    _, data, _ = small
    name = "embeddings-mlp"
    each = dataclasses.replace(SETS[name], fields={**SETS[name].fields, "epochs": 1, "batch_size": 60})
    summaries = Summaries(each, tmp_path)
    summaries.head["tuned"] = {method: {"values": {"learning_rate": 0.003}} for method in METHODS}
    body = heads.Body(each, str(data), summaries)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 12))
    assert heads.with_two_heads(model, 12)(torch.randn(5, 4)).shape == (5, 24)
    found = heads.study(body, tmp_path / "runs", seeds=(11, 12, 13))
    for row in heads.ROWS:
        assert [set(seed) for seed in found["rows"][row]["test"]] == [{"top1", "top5", "mean"}] * 3
    for row in list(heads.ROWS)[1:]:  # by construction
        alone = found["rows"][f"{row}: the first head alone"]["test"]
        assert [seed["top1"] for seed in found["rows"][row]["test"]] == [seed["top1"] for seed in alone]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.safetensors")}
    assert heads.study(body, tmp_path / "runs", seeds=(11, 12, 13)) == found
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.safetensors")} == before
    (tmp_path / f"pays-{name}-heads.json").write_text(json.dumps(found))
    text = page.page(page.Evidence(tmp_path))
    assert "| cross-entropy, then the list |" in text


def test_two_heads_want_the_main_table(small, tmp_path):
    _, data, _ = small
    with pytest.raises(LabError, match="not tuned yet on embeddings-mlp"):
        heads.Body(SETS["embeddings-mlp"], str(data), Summaries(SETS["embeddings-mlp"], tmp_path))
