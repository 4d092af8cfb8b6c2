"""Verdicts: true in every case."""

import dataclasses

import pytest

import made
from anyk.lab import tables
from anyk.lab.comparison.outcome import Try, metrics
from anyk.lab.comparison.verdict import table, verdict
from anyk.lab.errors import Failure
from anyk.lab.run.recipe import Recipe


def against_softmax(tests, **changes):
    return verdict(made.comparison(made.SOFTMAX, made.method("splitter", tests), **changes))


def test_gain_without_loss():
    headline, sentence, *rest = against_softmax(made.shifted(top5=0.02))
    told, risk = headline.split(" The intervals ")
    assert told == "Better than softmax without a significant loss: splitter in top-5."
    assert risk == "do not exclude that splitter loses 0.03 points of top-1."
    assert sentence.startswith("splitter gains top-5 (+2.00 points, p < 0.001) against softmax; not significant: top-1 (")
    assert len(rest) == 1
    assert rest[0].startswith("On validation, splitter is best (the mean of top-1 and top-5, 7")


def test_gain_and_loss():
    headline, sentence, *_ = against_softmax(made.shifted(top5=0.02, top1=-0.03))
    assert headline == "A trade against softmax: splitter gains in one metric and loses in another."
    assert "gains top-5 (+2.00" in sentence
    assert "loses top-1 (−3.00" in sentence


def test_softmax_is_better():
    headline, sentence, *_ = against_softmax(made.shifted(top1=-0.03))
    assert headline == "Nothing beats softmax; it is significantly better than splitter."
    assert sentence.startswith("splitter loses top-1")


def test_no_difference():
    headline, sentence, *_ = against_softmax(made.shifted())
    assert headline == "Nothing beats softmax: no difference in any metric is significant."
    assert sentence.startswith("splitter does not differ significantly from softmax: top-1 (")


def test_ties():
    sentences = against_softmax([run.test for run in made.SOFTMAX.runs])
    assert sentences[0] == "Nothing beats softmax: no difference in any metric is significant."
    assert sentences[1] == "splitter and softmax are tied: the same mean test accuracy."
    assert sentences[2].startswith("softmax and splitter are tied on validation")
    constant = against_softmax([{name: value + 0.01 for name, value in run.test.items()} for run in made.SOFTMAX.runs])
    assert "(+1.00 points, no test: the difference is the same on every seed)" in constant[1]


def test_few_seeds_are_not_judged():
    softmax = made.method("softmax", made.accuracies(0.6, 0.8, seeds=1))
    one = verdict(made.comparison(softmax, made.method("splitter", made.accuracies(0.6, 0.9, seeds=1))))
    assert one[0] == "One seed cannot tell a gain from chance: raise --seeds."
    assert one[1].startswith("splitter against softmax on 1 seed, not judged: top-1 ")
    softmax = made.method("softmax", made.accuracies(0.6, 0.8, seeds=2, noise=1e-6))
    two = verdict(made.comparison(softmax, made.method("splitter", made.accuracies(0.7, 0.9, seeds=2, noise=1e-6))))
    assert two[0].startswith("2 seeds are too few to judge significance")
    assert not any("Better" in sentence or "gains top" in sentence for sentence in two)


def test_a_method_with_failed_runs_is_judged_apart():
    methods = made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)), made.method("lapsum", made.shifted(top5=0.02)[:2])
    sentences = verdict(made.comparison(*methods, failures=(Failure("lapsum with seed 2", "out of memory."),)))
    assert sentences[0].startswith("Of the methods with at least 3 seeds: Better than softmax")
    assert "lapsum" not in sentences[0]
    assert any(sentence.startswith("lapsum against softmax on 2 seeds, not judged") for sentence in sentences)
    assert "lapsum and softmax do not have the same seeds; differences use those that both have." in sentences
    assert sentences[-1] == "lapsum with seed 2 failed: out of memory."


def test_border_of_the_tuning_grid():
    tries = tuple(Try(rate, t, 0.5) for rate in (1e-4, 1e-3) for t in (0.5, 1.0))
    recipe = Recipe(loss="splitter", learning_rate=1e-3, temperature=0.5)
    splitter = made.method("splitter", made.shifted(), recipe=recipe, tries=tries)
    sentences = verdict(made.comparison(made.SOFTMAX, splitter))
    assert sentences[0] == (
        "Not tuned to the end: splitter was best at the border of what was tried; raise --budget, or start elsewhere with "
        "--learning-rate or --temperature. So far: Nothing beats softmax: no difference in any metric is significant."
    )
    border = "(learning rate 0.001, the largest tried and temperature 0.5, the smallest tried): raise --budget."
    assert f"splitter was best at the border of the tuning grid {border}" in sentences
    assert "The methods were not tuned equally; tries: softmax 9 and splitter 4." in sentences
    # The temperature means nothing to softmax, and a single value has no border.
    softmax = made.method("softmax", made.shifted(), recipe=recipe.but(loss="softmax"), tries=tries)
    assert "temperature" not in "".join(verdict(made.comparison(softmax)))
    alone = made.method("splitter", made.shifted(), recipe=recipe, tries=(Try(1e-3, 0.5, 0.5),))
    assert not any("border" in sentence for sentence in verdict(made.comparison(alone)))


def test_the_headline_judges_no_baseline_at_the_border_without_a_word():
    tries = tuple(Try(rate, 1.0, 0.5) for rate in (1e-4, 1e-3))
    softmax = dataclasses.replace(made.SOFTMAX, recipe=Recipe(loss="softmax", learning_rate=1e-3), tries=tries)
    headline = verdict(made.comparison(softmax, made.method("splitter", made.shifted(top1=-0.03))))[0]
    assert headline.startswith("Not tuned to the end: softmax was best at the border")
    assert "with --learning-rate. So far: Nothing beats softmax; it is significantly better than splitter." in headline
    # Two seeds are not judged, so nothing is to be doubted.
    few = dataclasses.replace(softmax, runs=softmax.runs[:2])
    assert verdict(made.comparison(few, made.method("splitter", made.shifted())))[0].startswith("2 seeds are too few")


def test_the_k_that_are_trained_for_are_judged():
    tests = [{**test, "top3": test["top1"] + 0.1, "top20": 0.99} for test in made.accuracies(0.6, 0.8, 0.9)]
    gained = [{**test, "top3": test["top3"] + 0.02 + seed / 1e4} for seed, test in enumerate(tests)]
    recipe = Recipe(learning_rate=1e-3, temperature=0.5, p_k=(0.5, 0.0, 0.5), measure=(3,))
    methods = [made.method(name, t, recipe=recipe.but(loss=name)) for name, t in (("softmax", tests), ("splitter", gained))]
    compared = made.comparison(*methods)
    assert metrics(compared) == ["top1", "top3", "top5", "top10"]
    assert verdict(compared)[0] == "Better than softmax without a significant loss: splitter in top-3."
    assert "Δ top-3 points" in tables.render(table(compared), "markdown")


def test_what_rounds_to_nothing_has_no_sign():
    nothing = [{**test, "top1": test["top1"] - 1e-5} for test in made.shifted(top5=0.02)]
    runs = [run.test for run in made.method("softmax", made.shifted(top5=0.02)).runs]
    softmax, splitter = made.method("softmax", runs), made.method("splitter", nothing)
    said = " ".join(verdict(made.comparison(softmax, splitter)))
    assert "top-1 (0.00 points" in said
    assert "−0.00" not in said
    assert "loses 0.00" not in said
    assert "-0.00" not in tables.render(table(made.comparison(softmax, splitter)), "terminal")


def test_few_classes_have_no_top_5():
    methods = [made.method(name, [{"top1": 0.9}] * 3) for name in ("softmax", "splitter")]
    said = " ".join(verdict(made.comparison(*methods, classes=3)))
    assert "tied on validation (top-1, " in said
    assert "top-5" not in said


def test_equal_failures_are_told_once():
    failed = [Failure(f"{loss}-seed0-{number}", "out of memory.") for loss in ("splitter", "lapsum") for number in range(2)]
    said = verdict(made.comparison(made.SOFTMAX, failures=(*failed, Failure("hinge-seed0", "lost."))))
    assert said[-2:] == [
        "4 runs failed (splitter-seed0-0, splitter-seed0-1 and 2 more): out of memory.",
        "hinge-seed0 failed: lost.",
    ]


def test_missing_parts():
    without = made.method("softmax", [{"top1": run.test["top1"]} for run in made.SOFTMAX.runs])
    sentences = verdict(made.comparison(without, made.method("splitter", made.shifted(top1=0.05))))
    assert sentences[0] == "Better than softmax without a significant loss: splitter in top-1."
    assert "softmax has no top-5 and top-10, so there is no difference to give." in sentences
    assert verdict(made.comparison(made.SOFTMAX))[0].startswith("Only softmax has finished runs")
    assert verdict(made.comparison(made.method("splitter", made.shifted())))[0].startswith(
        "There is no finished run of softmax"
    )
    assert verdict(made.comparison(made.SOFTMAX, made.method("splitter", [])))[-1] == "splitter has no finished run."
    other_seeds = dataclasses.replace(made.SOFTMAX, name="lapsum", runs=(made.run(77, made.SOFTMAX.runs[0].test),))
    assert verdict(made.comparison(made.SOFTMAX, other_seeds))[0].startswith("No method shares a seed")


def test_table():
    compared = made.comparison(made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)))
    made_table = table(compared)
    shown = tables.render(made_table, "terminal")
    assert "+2.00 (p < 0.001)" in shown
    assert "Holm" in shown
    heads, softmax, splitter = tables.render(made_table, "csv").splitlines()
    row = dict(zip(heads.split(","), splitter.split(","), strict=True))
    assert float(row["difference_top5"]) == pytest.approx(0.02, abs=1e-3)
    assert float(row["difference_top5_low"]) < 0.02 < float(row["difference_top5_high"])
    assert float(row["difference_top5_p"]) < float(row["difference_top5_p_holm"])
    assert len(softmax.split(",")) == len(heads.split(","))
