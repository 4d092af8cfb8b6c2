"""Verdicts: true in every case."""

import dataclasses
import re

import numpy as np
import pytest

import made
from anyk.lab import tables
from anyk.lab.comparison.outcome import metrics
from anyk.lab.comparison.verdict import notes, table, verdict
from anyk.lab.errors import Failure
from anyk.lab.run.config import Config
from anyk.lab.statistics import contrast


def against_softmax(tests, **changes):
    return verdict(made.measured(made.SOFTMAX, made.method("splitter", tests), **changes))


def picked(method, value=0.95):
    """The same method, liked by validation."""
    runs = [dataclasses.replace(run, validation={"mean": value + run.seed / 1e4}) for run in method.runs]
    return dataclasses.replace(method, runs=tuple(runs))


# Decided -------------------------------------------------------------------------------------------------------------------


def test_a_gain_that_the_test_confirms():
    headline, sentence, choice = against_softmax(made.shifted(top5=0.02))
    assert re.fullmatch(
        r"splitter is better than softmax: \d\.\d\d points of top-5 \(\d+ of 10,000 test examples\)\.", headline
    )
    assert re.fullmatch(
        r"splitter against softmax: top-1 \S+ points \(\S+ of 10,000 test examples, 95 % interval \S+ to \S+, p = \d\.\d{3}\); "
        r"top-5 \+\S+ points \(\+\d+ of 10,000 test examples, 95 % interval \+\S+ to \+\S+, p < 0\.001\)\.",
        sentence,
    )
    assert choice.startswith("On validation, splitter is best (the mean of top-1 and top-5, 7")


def test_the_order_is_that_of_the_wish():
    both = made.shifted(top5=0.02, top1=0.02, top10=0.02)
    assert re.search("of top-1 .* of top-5 ", against_softmax(both)[0])
    assert "top-10" not in " ".join(against_softmax(both))
    assert re.search("of top-10 .* of top-1 ", against_softmax(both, ks=(10, 1))[0])
    assert "top-5 " not in " ".join(against_softmax(both, ks=(10, 1))[:2])


def test_gain_and_loss():
    headline = against_softmax(made.shifted(top5=0.05, top1=-0.03))[0]
    assert re.fullmatch(
        r"A trade: splitter gains \S+ points of top-5 \(\d+ of 10,000 test examples\) and loses \S+ points of top-1 "
        r"\(\d+ of 10,000 test examples\) against softmax\.",
        headline,
    )
    assert against_softmax(made.shifted(top5=0.05, top1=-0.03), ks=(5,))[0].startswith("splitter is better than softmax: ")


def test_softmax_is_better():
    assert against_softmax(made.shifted(top1=-0.03))[0] == "Nothing beats softmax; it is better than splitter."
    assert against_softmax(made.shifted(top1=-0.03, top5=0.02))[0] == (
        "Nothing beats softmax: splitter gains in one metric and loses in another."
    )


def test_no_difference():
    nothing = picked(made.method("splitter", made.shifted()), 0.5)
    said = verdict(made.measured(made.SOFTMAX, nothing))
    assert said[0] == "Nothing beats softmax: no difference in top-1 or top-5 is more than luck."
    assert "significantly" not in " ".join(said)


def test_what_the_test_does_not_confirm():
    lucky = picked(made.method("splitter", made.shifted()))
    assert verdict(made.measured(made.SOFTMAX, lucky))[0] == (
        "Nothing beats softmax: splitter is best on validation, but the test does not confirm it."
    )
    contradicted = picked(made.method("splitter", made.shifted(top1=-0.03)))
    assert verdict(made.measured(made.SOFTMAX, contradicted))[0] == (
        "Nothing beats softmax: splitter is best on validation, but the test says the opposite."
    )
    # Another one is better on the test; had the test chosen it, the test could not judge it.
    other = picked(made.method("lapsum", made.shifted(top5=0.02)), 0.1)
    headline, *rest = verdict(made.measured(made.SOFTMAX, lucky, other))
    assert headline == "Nothing beats softmax: splitter is best on validation, but the test does not confirm it."
    assert any(sentence.startswith("On the test lapsum is significantly better than softmax; validation") for sentence in rest)
    assert verdict(made.measured(made.SOFTMAX, other))[0] == (
        "Nothing beats softmax on validation, which does not bear out what lapsum gains on the test."
    )
    few = picked(made.method("hinge", made.shifted()[:2]))
    assert verdict(made.measured(made.SOFTMAX, few, picked(lucky, 0.1)))[0] == (
        "Nothing beats softmax: hinge is best on validation, but has too few seeds to confirm it."
    )


def one_of_400(examples=1):
    d = np.zeros((5, 400), dtype=int)
    d[:, :examples] = 1
    better = picked(made.method("splitter", made.shifted(top1=0.0025)), 0.5)
    return made.comparison(made.SOFTMAX, better, contrasts=(contrast("splitter", "softmax", "top1", d),), ks=(1,))


def test_one_example_of_400_is_no_finding_and_no_missing_test():
    headline, sentence, *_ = verdict(one_of_400())
    assert headline == "Nothing beats softmax: too few test examples differ to tell."
    assert sentence == (
        "splitter against softmax: top-1 +0.25 points (+1 of 400 test examples, "
        "no test: only 1 of the 400 test examples differs: too few to tell)."
    )
    assert "(+7 of 400 test examples, p = 0.016)" in verdict(one_of_400(7))[1]


# Not decided ---------------------------------------------------------------------------------------------------------------


def assert_not_decided(compared, words):
    headline, *rest = verdict(compared)
    assert headline == f"Not decided: {words}"
    assert headline.count(". ") == 0
    everything = " ".join([headline, *rest, *notes(compared), tables.render(table(compared), "terminal")])
    assert "significant" not in everything
    return everything


@pytest.mark.parametrize("caps", [("", "--budget 14"), ("--budget 14", ""), ("--budget 14", "--budget 14")])
def test_a_cap_leaves_no_p_and_no_significance(caps):
    methods = (made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)))
    methods = [dataclasses.replace(method, capped=cap) for method, cap in zip(methods, caps, strict=True)]
    named = " and ".join(method.name for method in methods if method.capped)
    everything = assert_not_decided(
        made.measured(*methods),
        f"--budget 14 ended the tuning of {named} before it was done; the same command with a larger --budget, or without, "
        "goes on.",
    )
    assert not re.search(r"\bp [=<]|interval|Holm", everything)
    assert re.search(r"top-5 \+2\.\d\d points \(\+2\d\d of 10,000 test examples\)\.", everything)


def test_two_caps():
    methods = [
        dataclasses.replace(method, capped=cap)
        for method, cap in ((made.SOFTMAX, "--time 10m"), (made.method("splitter", made.shifted()), "--budget 3"))
    ]
    assert verdict(made.measured(*methods))[0] == (
        "Not decided: --time 10m ended the tuning of softmax and --budget 3 ended the tuning of splitter before it was done; "
        "the same command with a larger --time and --budget, or without, goes on."
    )


@pytest.mark.parametrize(("seeds", "words"), [(1, "one seed"), (2, "2 seeds")])
def test_few_seeds_are_not_judged(seeds, words):
    methods = [made.method(name, made.accuracies(top, 0.9, seeds=seeds)) for name, top in (("softmax", 0.6), ("splitter", 0.7))]
    everything = assert_not_decided(
        made.measured(*methods), f"{words} cannot tell a gain from luck; the same command with --seeds 5 goes on."
    )
    assert f"splitter against softmax on {seeds} seed" in everything
    assert "not judged: top-1 +10." in everything


def longer(method, gain):
    return dataclasses.replace(method, same_length={"mean": 0.7}, longer={"mean": 0.7 + gain})


def test_runs_that_are_too_short():
    splitter = picked(made.method("splitter", made.shifted(top5=0.02)))
    said = verdict(made.measured(longer(made.SOFTMAX, 0.012), longer(splitter, 0.011)))
    assert said[0].startswith("splitter is better than softmax")
    assert said[-1] == (
        "The runs may be too short: twice the epochs gain, in points of the mean of top-1 and top-5 on validation, "
        "softmax 1.20 and splitter 1.10. Raise --epochs."
    )
    level = picked(splitter, 0.701), picked(made.SOFTMAX, 0.7)
    config = level[0].config.replace(epochs=20)
    turned = made.measured(longer(level[1], 0.02), dataclasses.replace(longer(level[0], 0.001), config=config))
    assert verdict(turned)[0] == (
        "Not decided: with twice the epochs softmax gains 2.00 points on validation and splitter 0.10, which may turn their "
        "order round; run it again with --epochs 40."
    )


def test_nothing_to_compare():
    assert verdict(made.comparison(made.SOFTMAX))[0] == (
        "Not decided: only softmax has finished runs, so there is nothing to compare."
    )
    assert verdict(made.comparison(made.method("splitter", made.shifted())))[0] == (
        "Not decided: there is no finished run of softmax to measure the others against."
    )
    assert verdict(made.comparison(made.SOFTMAX, made.method("splitter", [])))[-1] == "splitter has no finished run."
    other_seeds = dataclasses.replace(made.SOFTMAX, name="lapsum", runs=(made.run(77, made.SOFTMAX.runs[0].test),))
    assert verdict(made.comparison(made.SOFTMAX, other_seeds))[0] == (
        "Not decided: no method shares a seed and a metric with softmax."
    )
    assert verdict(made.comparison())[0].startswith("Not decided: ")


# Controls ------------------------------------------------------------------------------------------------------------------


def error(shift):
    return picked(made.method("error", made.shifted(top1=shift)))


def test_a_gain_that_gce_has_too_is_not_due_to_k():
    gce = made.method("gce", made.shifted(top1=0.02))
    said = verdict(made.measured(made.SOFTMAX, gce, error(0.02), between=[("error", "gce")]))
    assert said[0].startswith("error is better than softmax: ")
    assert said[0].endswith(" test examples), but gce, which is bounded and knows no k, gains half of it or more.")
    assert not any("control" in sentence for sentence in said)


def test_a_gain_above_the_control():
    gce = made.method("gce", made.shifted(top1=0.012))
    said = verdict(made.measured(made.SOFTMAX, gce, error(0.04), between=[("error", "gce")]))
    assert "half of it" not in " ".join(said)
    [sentence] = [sentence for sentence in said if sentence.startswith("Against the control gce, error gains top-1 +")]
    assert sentence.endswith("p < 0.001): more than luck.")


def test_a_control_that_has_a_part_of_the_gain():
    most = made.method("gce", made.shifted(top1=0.03))
    said = verdict(made.measured(made.SOFTMAX, most, error(0.04), between=[("error", "gce")]))
    assert "half of it" not in " ".join(said)
    little = made.method("gce", made.shifted(top1=0.005))
    said = verdict(made.measured(made.SOFTMAX, little, error(0.02)))  # error and gce were not counted against each other
    assert "half of it" not in " ".join(said)
    assert any(s.startswith("Against the control gce, error gains") and s.endswith("which may be luck.") for s in said)


def test_a_gain_that_comes_from_the_learning_rate():
    name = "softmax, learning rate of splitter"
    control = made.method(name, made.shifted(top5=0.019), config=Config(loss="softmax", learning_rate=0.016))
    splitter = made.method("splitter", made.shifted(top5=0.02))
    said = verdict(made.measured(made.SOFTMAX, splitter, controls=[control], between=[("splitter", name)]))
    assert said[0].endswith(", but softmax with the learning rate 0.016 gains half of it or more.")
    weak = made.method(name, made.shifted(top5=0.0), config=Config(loss="softmax", learning_rate=0.016))
    said = verdict(made.measured(made.SOFTMAX, splitter, controls=[weak], between=[("splitter", name)]))
    assert "learning rate:" not in said[0]
    # A gain that validation has not picked is called by its name below.
    unpicked = picked(splitter, 0.1)
    said = verdict(made.measured(made.SOFTMAX, unpicked, controls=[control], between=[("splitter", name)]))
    assert "splitter gains top-5, but softmax with the learning rate 0.016 gains half of it or more." in said


# What else is said ---------------------------------------------------------------------------------------------------------


def test_a_method_with_failed_runs_is_judged_apart():
    methods = made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)), made.method("lapsum", made.shifted(top5=0.02)[:2])
    failed = (Failure("lapsum with seed 2", "out of memory."),)
    sentences = verdict(made.measured(*methods, failures=failed))
    assert sentences[0].startswith("splitter is better than softmax")
    assert any(sentence.startswith("lapsum against softmax on 2 seeds, not judged: ") for sentence in sentences)
    assert "lapsum and softmax do not have the same seeds; differences use those that both have." in sentences
    assert sentences[-1] == "lapsum with seed 2 failed: out of memory."


def test_bounds_and_unequal_tuning_are_told():
    softmax = dataclasses.replace(
        made.SOFTMAX, bounds=("label smoothing 0, the smallest there is",), tries=made.SOFTMAX.tries[:4]
    )
    sentences = verdict(made.measured(softmax, made.method("splitter", made.shifted())))
    assert "softmax is best at label smoothing 0, the smallest there is." in sentences
    assert "The methods were not tuned equally; tries: softmax 4 and splitter 9." in sentences


def test_ties_on_validation():
    methods = [picked(made.method(name, made.shifted()), 0.5) for name in ("softmax", "splitter")]
    assert any(s.startswith("On validation, softmax and splitter are tied (") for s in verdict(made.measured(*methods)))


def test_what_rounds_to_nothing_has_no_sign():
    nothing = [{**test, "top1": test["top1"] - 1e-5} for test in made.shifted(top5=0.02)]
    softmax, splitter = made.method("softmax", made.shifted(top5=0.02)), made.method("splitter", nothing)
    compared = made.comparison(softmax, splitter)
    said = " ".join(verdict(compared))
    assert "top-1 0.00 points" in said
    assert not re.search("[−-]0[.]00|[−-]0 of", said + tables.render(table(compared), "terminal"))


def test_few_classes_have_no_top_5():
    methods = [made.method(name, [{"top1": 0.9}] * 3) for name in ("softmax", "splitter")]
    said = " ".join(verdict(made.comparison(*methods, classes=3)))
    assert "are tied (top-1, " in said
    assert "top-5" not in said


def test_equal_failures_are_told_once():
    failed = [Failure(f"{loss}-seed0-{number}", "out of memory.") for loss in ("splitter", "lapsum") for number in range(2)]
    said = verdict(made.comparison(made.SOFTMAX, failures=(*failed, Failure("hinge-seed0", "lost."))))
    assert said[-2:] == [
        "4 runs failed (splitter-seed0-0, splitter-seed0-1 and 2 more): out of memory.",
        "hinge-seed0 failed: lost.",
    ]


def test_missing_metrics():
    without = made.method("softmax", [{"top1": run.test["top1"]} for run in made.SOFTMAX.runs])
    splitter = made.method("splitter", [{"top1": test["top1"]} for test in made.shifted(top1=0.05)])
    sentences = verdict(made.measured(without, splitter))
    assert sentences[0].startswith("splitter is better than softmax: ")
    more = made.comparison(without, made.method("splitter", made.shifted(top1=0.05)))
    assert "softmax has no top-5 and top-10, so there is no difference to give." in verdict(more)


# The table -----------------------------------------------------------------------------------------------------------------


def test_the_table_has_points_examples_interval_and_p_of_what_is_wanted():
    compared = made.measured(made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)))
    shown = tables.render(table(compared), "terminal")
    lines = {tuple(line.split()[:2]): line for line in shown.splitlines() if line.startswith(" top-")}
    assert list(lines) == [(metric, name) for metric in ("top-1", "top-5", "top-10") for name in ("softmax", "splitter")]
    assert re.search(r" \+\d\.\d\d +\+\d+ +\+\S+ to \+\S+ +< 0.001 ", lines["top-5", "splitter"])
    assert re.search(r" [+−0]\S* +\S+ +– +– ", lines["top-10", "splitter"])
    assert "Holm" in shown
    heads, *rows = [line.split(",") for line in tables.render(table(compared), "csv").splitlines()]
    found = {(row[0], row[1]): dict(zip(heads, row, strict=True)) for row in rows}
    row = found["top-5", "splitter"]
    assert float(row["difference"]) == pytest.approx(0.02, abs=2e-3)
    assert float(row["hits"]) == pytest.approx(10_000 * float(row["difference"]))
    assert float(row["difference_low"]) < 0.02 < float(row["difference_high"])
    assert float(row["p"]) < float(row["p_holm"])
    assert found["top-10", "splitter"]["p"] == found["top-10", "splitter"]["difference_low"] == ""
    assert found["top-5", "softmax"]["difference"] == ""


def test_the_k_that_are_trained_for_are_shown():
    tests = [{**test, "top3": test["top1"] + 0.1, "top20": 0.99} for test in made.accuracies(0.6, 0.8, 0.9)]
    gained = [{**test, "top3": test["top3"] + 0.02} for test in tests]
    config = Config(learning_rate=1e-3, p_k=(0.5, 0.0, 0.5), measure=(3,))
    softmax, splitter = (made.method(name, t, config=config) for name, t in (("softmax", tests), ("splitter", gained)))
    compared = made.measured(softmax, picked(splitter), ks=(3, 1))
    assert metrics(compared) == ["top3", "top1", "top5", "top10"]
    assert re.match(r"splitter is better than softmax: \S+ points of top-3 \(", verdict(compared)[0])
    assert "| top-3 | splitter |" in tables.render(table(compared), "markdown")


def test_a_metric_that_is_not_tested_is_in_the_table_if_it_was_tuned_for():
    compared = made.with_others(made.measured(made.SOFTMAX, made.method("splitter", made.shifted(top1=0.01))))
    assert [row[0] for row in table(compared).rows[::2]] == ["top-1", "top-5", "top-10"]
    tuned = dataclasses.replace(compared, settings={**compared.settings, "metric": "ndcg10"})
    shown = table(tuned)
    assert [row[0] for row in shown.rows[::2]] == ["top-1", "top-5", "top-10", "NDCG@10"]
    line = tables.render(shown, "markdown").splitlines()[-5:]
    assert any(re.match(r"\| NDCG@10 \| splitter \| 7\S+ ± \S+ \| \+1\.\d\d \| – \| – \| – \| 5 \|", each) for each in line)
    assert notes(tuned) == notes(compared)


def test_groups_are_told():
    d = np.random.default_rng(0).choice([-1, 0, 1], (5, 400))
    counted = contrast("splitter", "softmax", "top1", d, np.arange(400) // 4)
    methods = made.SOFTMAX, made.method("splitter", made.shifted())
    assert "which come in groups" in " ".join(notes(made.comparison(*methods, contrasts=(counted,))))
    assert "groups" not in " ".join(notes(made.measured(*methods)))
