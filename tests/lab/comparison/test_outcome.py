"""Comparisons: the verdict is true in every case, the code runs, the file reads back."""

import dataclasses
import json

import pytest
import torch

import made
from anyk.lab import tables
from anyk.lab.comparison import outcome
from anyk.lab.comparison.outcome import Try
from anyk.lab.errors import LabError
from anyk.lab.run.recipe import Recipe

SOFTMAX = made.method("softmax", made.accuracies(0.60, 0.80, 0.90))


def against_softmax(tests, **changes):
    return outcome.verdict(made.comparison(SOFTMAX, made.method("splitter", tests), **changes))


def shifted(**shifts):
    """Softmax's accuracies with each metric moved, and a little noise so that there is a variance."""
    noise = [0.0003, -0.0002, 0.0001, -0.0003, 0.0002]
    runs = [run.test for run in SOFTMAX.runs]
    return [
        {name: value + shifts.get(name, 0.0) + noise[(seed + len(name)) % 5] for name, value in test.items()}
        for seed, test in enumerate(runs)
    ]


def test_gain_without_loss():
    headline, sentence, *rest = against_softmax(shifted(top5=0.02))
    told, risk = headline.split(" The intervals ")
    assert told == "Better than softmax without a significant loss: splitter in top-5."
    assert risk == "do not exclude that splitter loses 0.03 points of top-1."
    assert sentence.startswith("splitter gains top-5 (+2.00 points, p < 0.001) against softmax; not significant: top-1 (")
    assert len(rest) == 1
    assert rest[0].startswith("On validation, splitter is best (the mean of top-1 and top-5, 7")


def test_gain_and_loss():
    headline, sentence, *_ = against_softmax(shifted(top5=0.02, top1=-0.03))
    assert headline == "A trade against softmax: splitter gains in one metric and loses in another."
    assert "gains top-5 (+2.00" in sentence
    assert "loses top-1 (−3.00" in sentence


def test_softmax_is_better():
    headline, sentence, *_ = against_softmax(shifted(top1=-0.03))
    assert headline == "Nothing beats softmax; it is significantly better than splitter."
    assert sentence.startswith("splitter loses top-1")


def test_no_difference():
    headline, sentence, *_ = against_softmax(shifted())
    assert headline == "Nothing beats softmax: no difference in any metric is significant."
    assert sentence.startswith("splitter does not differ significantly from softmax: top-1 (")


def test_ties():
    sentences = against_softmax([run.test for run in SOFTMAX.runs])
    assert sentences[0] == "Nothing beats softmax: no difference in any metric is significant."
    assert sentences[1] == "splitter and softmax are tied: the same mean test accuracy."
    assert sentences[2].startswith("softmax and splitter are tied on validation")
    constant = against_softmax([{name: value + 0.01 for name, value in run.test.items()} for run in SOFTMAX.runs])
    assert "(+1.00 points, no test: the difference is the same on every seed)" in constant[1]


def test_few_seeds_are_not_judged():
    softmax = made.method("softmax", made.accuracies(0.6, 0.8, seeds=1))
    one = outcome.verdict(made.comparison(softmax, made.method("splitter", made.accuracies(0.6, 0.9, seeds=1))))
    assert one[0] == "One seed cannot tell a gain from chance: raise --seeds."
    assert one[1].startswith("splitter against softmax on 1 seed, not judged: top-1 ")
    softmax = made.method("softmax", made.accuracies(0.6, 0.8, seeds=2, noise=1e-6))
    two = outcome.verdict(made.comparison(softmax, made.method("splitter", made.accuracies(0.7, 0.9, seeds=2, noise=1e-6))))
    assert two[0].startswith("2 seeds are too few to judge significance")
    assert not any("Better" in sentence or "gains top" in sentence for sentence in two)


def test_a_method_with_failed_runs_is_judged_apart():
    methods = SOFTMAX, made.method("splitter", shifted(top5=0.02)), made.method("lapsum", shifted(top5=0.02)[:2])
    sentences = outcome.verdict(made.comparison(*methods, failures=("lapsum with seed 2 failed: out of memory.",)))
    assert sentences[0].startswith("Of the methods with at least 3 seeds: Better than softmax")
    assert "lapsum" not in sentences[0]
    assert any(sentence.startswith("lapsum against softmax on 2 seeds, not judged") for sentence in sentences)
    assert "lapsum and softmax do not have the same seeds; differences use those that both have." in sentences
    assert sentences[-1] == "lapsum with seed 2 failed: out of memory."


def test_border_of_the_tuning_grid():
    tries = tuple(Try(rate, t, 0.5) for rate in (1e-4, 1e-3) for t in (0.5, 1.0))
    recipe = Recipe(loss="splitter", learning_rate=1e-3, temperature=0.5)
    splitter = made.method("splitter", shifted(), recipe=recipe, tries=tries)
    sentences = outcome.verdict(made.comparison(SOFTMAX, splitter))
    assert sentences[0] == (
        "Not tuned to the end: splitter was best at the border of what was tried; raise --budget, or start elsewhere with "
        "--learning-rate or --temperature. So far: Nothing beats softmax: no difference in any metric is significant."
    )
    border = "(learning rate 0.001, the largest tried and temperature 0.5, the smallest tried): raise --budget."
    assert f"splitter was best at the border of the tuning grid {border}" in sentences
    assert "The methods were not tuned equally; tries: softmax 9 and splitter 4." in sentences
    # The temperature means nothing to softmax, and a single value has no border.
    softmax = made.method("softmax", shifted(), recipe=recipe.but(loss="softmax"), tries=tries)
    assert "temperature" not in "".join(outcome.verdict(made.comparison(softmax)))
    alone = made.method("splitter", shifted(), recipe=recipe, tries=(Try(1e-3, 0.5, 0.5),))
    assert not any("border" in sentence for sentence in outcome.verdict(made.comparison(alone)))


def test_the_headline_judges_no_baseline_at_the_border_without_a_word():
    tries = tuple(Try(rate, 1.0, 0.5) for rate in (1e-4, 1e-3))
    softmax = dataclasses.replace(SOFTMAX, recipe=Recipe(loss="softmax", learning_rate=1e-3), tries=tries)
    headline = outcome.verdict(made.comparison(softmax, made.method("splitter", shifted(top1=-0.03))))[0]
    assert headline.startswith("Not tuned to the end: softmax was best at the border")
    assert "with --learning-rate. So far: Nothing beats softmax; it is significantly better than splitter." in headline
    # Two seeds are not judged, so nothing is to be doubted.
    few = dataclasses.replace(softmax, runs=softmax.runs[:2])
    assert outcome.verdict(made.comparison(few, made.method("splitter", shifted())))[0].startswith("2 seeds are too few")


def test_the_k_that_are_trained_for_are_judged():
    tests = [{**test, "top3": test["top1"] + 0.1, "top20": 0.99} for test in made.accuracies(0.6, 0.8, 0.9)]
    gained = [{**test, "top3": test["top3"] + 0.02 + seed / 1e4} for seed, test in enumerate(tests)]
    recipe = Recipe(learning_rate=1e-3, temperature=0.5, p_k=(0.5, 0.0, 0.5), measure=(3,))
    methods = [made.method(name, t, recipe=recipe.but(loss=name)) for name, t in (("softmax", tests), ("splitter", gained))]
    compared = made.comparison(*methods)
    assert outcome.metrics(compared) == ["top1", "top3", "top5", "top10"]
    assert outcome.verdict(compared)[0] == "Better than softmax without a significant loss: splitter in top-3."
    assert "Δ top-3 points" in tables.render(outcome.table(compared), "markdown")


def test_what_rounds_to_nothing_has_no_sign():
    nothing = [{**test, "top1": test["top1"] - 1e-5} for test in shifted(top5=0.02)]
    runs = [run.test for run in made.method("softmax", shifted(top5=0.02)).runs]
    softmax, splitter = made.method("softmax", runs), made.method("splitter", nothing)
    said = " ".join(outcome.verdict(made.comparison(softmax, splitter)))
    assert "top-1 (0.00 points" in said
    assert "−0.00" not in said
    assert "loses 0.00" not in said
    assert "-0.00" not in tables.render(outcome.table(made.comparison(softmax, splitter)), "terminal")


def test_few_classes_have_no_top_5():
    methods = [made.method(name, [{"top1": 0.9}] * 3) for name in ("softmax", "splitter")]
    said = " ".join(outcome.verdict(made.comparison(*methods, classes=3)))
    assert "tied on validation (top-1, " in said
    assert "top-5" not in said


def test_equal_failures_are_told_once():
    failed = [f"{loss}-seed0-{number} failed: out of memory." for loss in ("splitter", "lapsum") for number in range(2)]
    said = outcome.verdict(made.comparison(SOFTMAX, failures=(*failed, "hinge-seed0 failed: lost.")))
    assert said[-2:] == [
        "4 runs failed (splitter-seed0-0, splitter-seed0-1 and 2 more): out of memory.",
        "hinge-seed0 failed: lost.",
    ]


def test_missing_parts():
    without = made.method("softmax", [{"top1": run.test["top1"]} for run in SOFTMAX.runs])
    sentences = outcome.verdict(made.comparison(without, made.method("splitter", shifted(top1=0.05))))
    assert sentences[0] == "Better than softmax without a significant loss: splitter in top-1."
    assert "softmax has no top-5 and top-10, so there is no difference to give." in sentences
    assert outcome.verdict(made.comparison(SOFTMAX))[0].startswith("Only softmax has finished runs")
    assert outcome.verdict(made.comparison(made.method("splitter", shifted())))[0].startswith(
        "There is no finished run of softmax"
    )
    assert outcome.verdict(made.comparison(SOFTMAX, made.method("splitter", [])))[-1] == "splitter has no finished run."
    other_seeds = dataclasses.replace(SOFTMAX, name="lapsum", runs=(made.run(77, SOFTMAX.runs[0].test),))
    assert outcome.verdict(made.comparison(SOFTMAX, other_seeds))[0].startswith("No method shares a seed")


def test_holm_is_over_methods_and_metrics():
    methods = [SOFTMAX] + [made.method(name, made.accuracies(0.601, 0.803, 0.9, salt=name)) for name in ("splitter", "lapsum")]
    compared = made.comparison(*methods)
    found = outcome.differences(compared)
    assert len(found) == 6
    smallest = min(found.values(), key=lambda difference: difference.paired.p)
    assert smallest.p == pytest.approx(min(1, 6 * smallest.paired.p))
    assert any("every method and every metric of this report, 6 tests" in note for note in outcome.notes(compared))


def test_best_is_chosen_on_validation():
    better = made.method("splitter", shifted(top5=0.02))
    assert outcome.best(made.comparison(SOFTMAX, better)).name == "splitter"
    good_on_test = dataclasses.replace(
        better, runs=tuple(dataclasses.replace(run, validation={"mean": 0.1}) for run in better.runs)
    )
    assert outcome.best(made.comparison(SOFTMAX, good_on_test)).name == "softmax"
    assert outcome.best(made.comparison(dataclasses.replace(SOFTMAX, name="splitter"), SOFTMAX)).name == "softmax"


def test_table():
    compared = made.comparison(SOFTMAX, made.method("splitter", shifted(top5=0.02)))
    table = outcome.table(compared)
    shown = tables.render(table, "terminal")
    assert "+2.00 (p < 0.001)" in shown
    assert "Holm" in shown
    heads, softmax, splitter = tables.render(table, "csv").splitlines()
    row = dict(zip(heads.split(","), splitter.split(","), strict=True))
    assert float(row["difference_top5"]) == pytest.approx(0.02, abs=1e-3)
    assert float(row["difference_top5_low"]) < 0.02 < float(row["difference_top5_high"])
    assert float(row["difference_top5_p"]) < float(row["difference_top5_p_holm"])
    assert len(softmax.split(",")) == len(heads.split(","))


RECIPES = [Recipe(loss=loss) for loss in made.LOSSES]
RECIPES += [Recipe(loss=loss, temperature="auto", label_smoothing=0.1) for loss in ("splitter", "softmax", "hinge")]
RECIPES += [
    Recipe(loss="bitonic", swap="cauchy", wires="sorted", top1="mixed", softmax_over="candidates", m=8),
    Recipe(loss="sinkhorn", anchors="topk", m=10**6),
    Recipe(p_k=(1 / 3, 1 / 3, 1 / 3), p_k_end=(0.0, 0.0, 1.0), temperature_end=0.25),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.loss)
def test_the_code_runs(recipe):
    names = {}
    exec(outcome.code(recipe, classes=20), names)
    scores = torch.randn(4, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = names["criterion"](scores, torch.tensor([0, 1, 2, 19]))
    loss.backward()
    assert loss.isfinite()
    assert scores.grad.abs().sum() > 0


def test_the_code_has_the_recipe_in_it():
    lines = outcome.code(
        Recipe(loss="odd_even", temperature=0.125, swap="gaussian", m=16, label_smoothing=0.1, learning_rate=0.001), classes=100
    )
    criterion = (
        "criterion = anyk.TopKCrossEntropyLoss([0.5, 0.0, 0.0, 0.0, 0.5], "
        'anyk.SortingNetwork(kind="odd_even", temperature=0.125, swap="gaussian"), m=16, label_smoothing=0.1)'
    )
    assert lines == f"import anyk\n\n# tuned with adam, learning rate 0.001\n{criterion}\n"
    assert "k=3, temperature=0.5" in outcome.code(Recipe(loss="smooth", p_k=(0.5, 0.0, 0.5, 0.0), temperature=0.5))


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_the_code_reads_p_k_for_each_class(tmp_path, suffix):
    file, rows = tmp_path / f"p_k.{suffix}", [[0.5, 0.5], [1.0, 0.0]]
    file.write_text(json.dumps(rows) if suffix == "json" else "0.5,0.5\n1.0,0.0\n")
    names = {}
    exec(outcome.code(Recipe(p_k_file=str(file))), names)
    assert names["criterion"].p_k.tolist() == rows
    exec(outcome.code(Recipe(loss="hinge", p_k_file=str(file))), names)
    assert names["criterion"].k == 2


def test_the_file_reads_back(tmp_path):
    compared = made.comparison(SOFTMAX, made.method("splitter", shifted(), epochs=3), moves=made.moves(), failures=("x",))
    outcome.write(compared, tmp_path / "results.json")
    again = outcome.read(tmp_path / "results.json")
    assert again == compared
    assert outcome.verdict(again) == outcome.verdict(compared)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["derived"]["verdict"] == outcome.verdict(compared)
    assert content["derived"]["table"][1]["difference"]["top5"]["p_holm"] is not None


def test_numbers_that_json_does_not_have(tmp_path):
    diverged = made.method("splitter", shifted(), tries=(Try(1.0, 1.0, float("nan")),))
    outcome.write(made.comparison(diverged), tmp_path / "results.json")
    assert outcome.read(tmp_path / "results.json").methods[0].tries[0].score is None


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "methods": 3}'])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(LabError, match=r"results\.json"):
        outcome.read(tmp_path / "results.json")
