"""The second study: its plan, its runner on small data, its rule and its page on made summaries, and the committed page."""

import dataclasses
import doctest
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import lab_data
from anyk import registry
from anyk.lab import statistics
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.losses import criterion

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "evidence"))

from pays import heads, page, plan, rule, runner  # noqa: E402
from pays.kept import SUMMARIES, Kept, Line, own  # noqa: E402
from pays.plan import BASE, DECIDE, METHODS, SETS  # noqa: E402

CLASSES = {"completion": 2000, "items": 3416, "pixels": 100, "embeddings": 100, "embeddings-mlp": 100, "glyphs": 200}


def known(method):
    """Whether this version of the library has the loss of a method."""
    return METHODS[method].loss != "softmax_at_k" or "softmax_at_k" in registry.LOSSES


# The plan ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_every_config_of_the_plan_can_be_made(name):
    each = SETS[name]
    assert set(each.methods) <= set(METHODS)
    for method in filter(known, each.methods):
        start = each.start(method)
        assert start.data == name  # no path
        rate, *axes = each.axes(method)
        assert rate.name == "learning_rate"
        assert [axis.name for axis in axes] == list(METHODS[method].hyperparameters)
        for point in itertools.product(*([axis.values[axis.start]] for axis in (rate, *axes))):
            criterion(start.replace(**dict(zip([axis.name for axis in (rate, *axes)], point, strict=True))), CLASSES[name])
    for question in plan.QUESTIONS:
        cells = plan.cells(question, name)
        assert len({cell.id for cell in cells}) == len(cells)
        for cell in cells:
            assert cell.method in each.methods
            for choice in cell.choices or ((),):
                config = cell.config(each.start(cell.method).replace(label_smoothing=0.1), choice)
                criterion(config, CLASSES[name])
                assert cell.cost() > 0


def test_what_is_compared_is_there_and_the_seeds_are_fresh():
    for name, each in SETS.items():
        rows = {f"main: {method}" for method in each.methods}
        for question in ("main", *plan.QUESTIONS):
            rows |= {cell.id for cell in (plan.cells(question, name) if question != "main" else [])}
            pairs = plan.pairs(question, name)
            assert {row for pair in pairs for row in pair} <= rows
            assert len(set(pairs)) == len(pairs)
            assert all(one != other for one, other in pairs)
        for *_, one, other in page.claims(name):
            assert {one, other} <= rows
            assert any((one, other) in plan.pairs(question, name) for question in ("main", *plan.QUESTIONS)), (one, other)
        chosen_by = {plan.CHOOSING, *plan.FRESH, *heads.SEEDS}
        assert not chosen_by & set(each.seeds)
    assert plan.CHOOSING not in (*plan.FRESH, *heads.SEEDS)


def test_the_waves_hold_every_method_once_in_the_order_of_the_plan():
    assert list(itertools.chain(*plan.waves(list(METHODS)))) == list(METHODS)
    assert plan.waves(("gce", "softmax"))[0] == ["softmax", "gce"]
    parts = list(runner.steps([]))
    assert sorted(wave for part, wave in parts if part == "main") == [1, 2, 3, 4]
    assert {part for part, _ in parts} == {"main", *plan.QUESTIONS}
    assert list(runner.steps(["main:2", "q3"])) == [("main", 2), ("q3", 0)]
    with pytest.raises(LabError, match="--only should be of main"):
        list(runner.steps(["q9"]))


def test_a_change_of_the_rate_is_a_factor_and_without_a_guide_nothing_is_smoothed():
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
    runner.run({"embeddings": each}, {"embeddings": str(data)}, folder / "runs", folder / "summaries", 2, ["main:1"])


def test_the_runner_keeps_what_the_pages_need(small):
    each, data, folder = small
    kept = Kept(each, folder / "summaries")
    assert set(kept.tuned) == set(each.methods)
    for method in each.methods:
        runs = kept.runs(f"main: {method}")
        assert list(runs) == [1, 2, 3]
        values = kept.tuned[method]["values"]
        assert {"learning_rate", *METHODS[method].hyperparameters} == set(values)
        assert kept.tuned[method]["tries"] == 2
        assert all(run.own["loss"] == METHODS[method].loss for run in runs.values())
        assert {"top1", "top3", "top5", "top10"} <= set(runs[1].test)
    # The counts are those of the accuracies.
    counted = kept.contrast(f"main: {BASE}", "main: softmax", "top5")
    expected = [
        round(360 * (one - other))
        for one, other in zip(
            kept.values(f"main: {BASE}", "top5").values(), kept.values("main: softmax", "top5").values(), strict=True
        )
    ]
    assert list(counted.by_seed) == expected
    assert counted.examples == 360
    text = "".join(path.read_text() for path in (folder / "summaries").iterdir())
    assert str(data) not in text
    assert str(folder) not in text
    assert not list((folder / "runs").rglob("model.safetensors"))  # the study does not read them


def test_what_has_ended_is_not_made_again(small, capsys):
    each, data, folder = small
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("result.json")}
    summaries = {path: path.read_text() for path in (folder / "summaries").iterdir()}
    gone = next(iter(before)).parent
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


def test_another_search_takes_the_purpose_from_the_runs_of_the_former(small, tmp_path):
    each, _, folder = small
    kept = Kept(each, folder / "summaries")
    kept.path, kept.contrasts_path = tmp_path / "a.jsonl", tmp_path / "a.json"
    [first, *rest] = [line for line in kept.lines.values() if "main: gce" in line.purposes]
    wanted = [runner._config(each.config, line.own) for line in rest]
    kept.assign("main: gce", wanted)
    assert list(kept.runs("main: gce")) == [line.seed for line in sorted(rest, key=lambda line: line.seed)]
    assert first not in kept.lines.values()


def test_other_data_under_the_same_name_are_refused(small):
    each, _, folder = small
    other = lab_data.write_embedding_set(folder / "others", classes=13, per_class=30)
    with pytest.raises(LabError, match="the data of embeddings have changed"):
        make(each, other, folder)


def test_the_status_says_what_is_missing(small):
    _, _, folder = small
    lines = list(runner.status(folder / "summaries"))
    assert any("embeddings" in line and "softmax" in line and "3 of 10 seeds" in line for line in lines)
    assert any(line.startswith("completion") and "0 of 10 seeds" in line for line in lines)
    assert "core-seconds" in lines[-1]


def test_counts_take_a_seed_that_diverged_as_missing_everything_and_forget_rows_without_runs(small, tmp_path):
    each, data, folder = small
    shutil.copytree(folder / "summaries", tmp_path / "summaries")
    kept = Kept(each, tmp_path / "summaries")
    kept.count([dataclasses.replace(counts(5, 3), method="main: smooth", against="main: softmax", metric="top1")])
    one, other = (kept.runs(f"main: {method}") for method in ("gce", "softmax"))
    before = kept.contrast("main: gce", "main: softmax", "top5").by_seed
    one[2].test, one[2].validation = {}, {}
    with Pool(1) as pool:
        study = runner.Study(each, str(data), folder / "runs", pool, kept, 0.0)
        study.count("main")
        after = kept.contrast("main: gce", "main: softmax", "top5").by_seed
        assert kept.contrast("main: smooth", "main: softmax", "top1") is None
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] == -round(360 * other[2].test["top5"])
        # a pair of which a folder is gone keeps what it has
        study.folder = tmp_path
        study._ranks.clear()
        study.count("main")
        assert kept.contrast("main: gce", "main: softmax", "top5").by_seed == after
    # a row that is no longer there is forgotten
    for line in one.values():
        line.purposes.remove("main: gce")
    study.count("main")
    assert kept.contrast("main: gce", "main: softmax", "top5") is None


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
        kept = Kept(SETS[name], folder)
        kept.head["data"] = {"classes": 100, "train": 1, "validation": 1, "test": 10_000, "fingerprint": "f", "kind": "made"}
        pairs = []
        for method in SETS[name].methods if name in gains else ():
            for k, gain in zip((1, SETS[name].k), gains[name], strict=True):
                own = gain if method == BASE else round(0.5 * gain)
                pairs += [counted(f"main: {method}", "main: softmax", f"top{k}", own)] if method != "softmax" else []
                pairs += [counted(f"main: {method}", "main: gce", f"top{k}", gce)] if method != "gce" else []
        kept.count(pairs)
        found[name] = kept
    return found


GAINS = dict.fromkeys(DECIDE, (60, 60))


def judged(tmp_path, gains, **settings):
    found = rule.judge(made(tmp_path, gains, **settings))
    return next(one for one in found if one.method == BASE), found


def test_what_gains_everywhere_passes(tmp_path):
    base, every = judged(tmp_path, GAINS, gce=5)
    assert base.passes, base.reasons
    assert base.gained == DECIDE
    assert rule.default(every) is base
    # The others have no runs on pixels, so they cannot pass.
    assert [one.passes for one in every if one is not base] == [False] * (len(every) - 1)


def test_the_list_must_be_gained_on_three_sets(tmp_path):
    base, _ = judged(tmp_path / "three", {**GAINS, "items": (60, 0)}, gce=5)
    assert base.passes
    base, every = judged(tmp_path / "two", {**GAINS, "items": (60, 0), "pixels": (60, 0)}, gce=5)
    assert base.passes is False
    assert "gained on 2 of the four" in base.reasons[0]
    # Nothing passes: the best by the mean of both stays.
    assert rule.default(every) is base


def test_top_1_must_not_lose_on_any_set(tmp_path):
    base, _ = judged(tmp_path / "little", {**GAINS, "pixels": (-2, 60)}, gce=5)
    assert base.passes, base.reasons
    base, _ = judged(tmp_path / "more", {**GAINS, "pixels": (-30, 60)}, gce=5)
    assert base.passes is False
    assert base.reasons == ("pixels: top-1 may lose 0.2 points",)


def test_nothing_passes_before_all_methods_of_a_set_are_there(tmp_path):
    sets = made(tmp_path, GAINS, gce=5)
    late = ("main: error:ksubset pure", "main: softmax", "top1")
    assert late in sets["completion"].contrasts
    del sets["completion"].contrasts[late]
    base = next(one for one in rule.judge(sets) if one.method == BASE)
    assert (base.passes, base.reasons) == (None, ("completion: not measured",))


def test_gce_must_not_be_better(tmp_path):
    base, _ = judged(tmp_path, GAINS, gce=-60)
    assert base.passes is False
    assert base.reasons == ("the mean of both is below gce's",)


def test_while_a_set_is_missing_nothing_is_decided(tmp_path):
    base, every = judged(tmp_path, {name: GAINS[name] for name in DECIDE if name != "pixels"}, gce=5)
    assert base.passes is None
    assert base.reasons == ("pixels: not measured",)
    assert rule.default(every) is None


# The page ------------------------------------------------------------------------------------------------------------------


def summarised(folder):
    """Summaries of every set, with all that the page can show."""
    sets = made(folder, GAINS, gce=5)
    for name, kept in sets.items():
        rows = [f"main: {method}" for method in SETS[name].methods]
        ids = [cell.id for question in plan.QUESTIONS for cell in plan.cells(question, name)]
        for number, purpose in enumerate([*rows, *ids]):
            for seed in SETS[name].seeds if purpose in rows else plan.FRESH:
                accuracies = {f"top{k}": 0.4 + k / 100 + number / 1000 + seed / 1e4 for k in plan.KS}
                line = Line({"loss": "softmax", "seed": seed, "hidden": number}, 2.0, 1.0, 1.0, accuracies, {"mean": 0.5})
                kept.lines[f"{purpose} {seed}"] = dataclasses.replace(line, purposes=[purpose])
        pairs = [pair for question in plan.QUESTIONS for pair in plan.pairs(question, name)]
        kept.count([counted(*pair, f"top{k}", 10 * k % 70, seeds=3) for pair in pairs for k in plan.KS])
        for method in SETS[name].methods:
            found = {"score": 0.5, "tries": 10, "capped": "", "bounds": ["ce_weight 0.1, the smallest"]}
            kept.tuned[method] = {"values": {"learning_rate": 0.01}, **found}
        for cell in (cell for question in plan.QUESTIONS for cell in plan.cells(question, name) if cell.choices):
            kept.head["chosen"][cell.id] = dict(cell.choices[0])
        kept.save()
    return page.Evidence(folder)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return summarised(tmp_path_factory.mktemp("full"))


def test_the_page_tells_what_is_there(full, tmp_path):
    text = page.page(full, tmp_path / "images")
    assert f"**`{BASE}` passes the rule that was set before the runs**" in text
    assert "+0.60" in text
    assert "By the rule the default is" in text
    for name in page.FIGURES:
        assert f"images/{name}.svg" in text
        first = (tmp_path / "images" / f"{name}.svg").read_bytes()
        page.page(full, tmp_path / "images")
        assert (tmp_path / "images" / f"{name}.svg").read_bytes() == first, "the same runs are the same picture"
    missing = [line for line in text.splitlines() if "No run yet" in line or line.startswith("Missing")]
    assert len(missing) == len(plan.HEADS)  # those are not among the made ones
    for line in text.splitlines():
        assert not line.startswith("|") or line.count("|") - line.count("\\|") == len(header(text, line)), line


def header(text, line):
    """The separators of the table that a line is in."""
    lines = text.splitlines()
    place = lines.index(line)
    while lines[place - 1].startswith("|"):
        place -= 1
    return lines[place].replace("\\|", "").split("|")[1:]


def test_the_diagonal_is_told(full):
    text = page.page(full)
    assert "At top-5 the best single k is 20; {5} against {1} +0.49" in " ".join(text.split())


def test_a_page_without_runs_says_how_to_make_them(tmp_path):
    evidence = page.Evidence(tmp_path)
    text = page.page(evidence, tmp_path)
    assert "**Not decided yet**" in text
    for name in SETS:
        assert page.command("main", name) in text
    assert not list(tmp_path.glob("*.svg"))
    assert page.fragment(evidence).startswith("Not measured yet")


def test_what_the_readme_quotes_stands_between_its_marks(full):
    text = "before\n<!-- pays: main -->\nformer\n<!-- end -->\nafter <!-- bench: cost -->\nkept\n<!-- end -->\n"
    new = page.quoted(text, full)
    assert new.startswith("before\n<!-- pays: main -->\n\n| top-1 \\| top-K |")
    assert "former" not in new
    assert new.endswith("<!-- end -->\nafter <!-- bench: cost -->\nkept\n<!-- end -->\n")
    assert page.quoted(new, full) == new
    assert "(docs/pays.md)" in new
    assert "(pays.md)" in page.quoted(text, full, guide=True)


def test_the_committed_pages_are_what_the_summaries_say():
    evidence = page.Evidence()
    assert (ROOT / "docs" / "pays.md").read_text() == page.page(evidence), "run `make evidence`"
    for path, text in page.pages(ROOT, evidence).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make evidence`"


def test_the_committed_summaries_hold_no_paths():
    for path in SUMMARIES.glob("pays-*"):
        text = path.read_text()
        for place in ("/work", "/home", "/tmp", "/root"):
            assert place not in text, path


def test_the_commands_say_what_they_take():
    for name in ("run", "write"):
        shown = subprocess.run(
            [sys.executable, ROOT / "evidence" / "pays" / f"{name}.py", "--help"],
            **{"capture_output": True, "text": True, "check": True},
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert "--summaries" in shown.stdout


def test_doctests():
    for module in (plan, page, heads):
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
    kept = Kept(each, tmp_path)
    kept.head["tuned"] = {method: {"values": {"learning_rate": 0.003}} for method in METHODS}
    body = heads.Body(each, str(data), kept)
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
        heads.Body(SETS["embeddings-mlp"], str(data), Kept(SETS["embeddings-mlp"], tmp_path))
