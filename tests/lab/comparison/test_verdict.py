"""Verdicts: which case it is, who is named, and with which numbers."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import made
from anyk.lab import tables
from anyk.lab.comparison.outcome import Try
from anyk.lab.comparison.verdict import coverage_table, notes, table, verdict
from anyk.lab.errors import Failure
from anyk.lab.run.config import Config
from anyk.lab.statistics import contrast, holm


def against_softmax(tests, **changes):
    return verdict(made.measured(made.SOFTMAX, made.method("splitter", tests), **changes))


def splitter(score=0.95, **shifts):
    """A method that gains so much on the test, and has this score on validation."""
    return made.with_validation(made.method("splitter", made.shifted(**shifts)), score)


# Decided -------------------------------------------------------------------------------------------------------------------


def test_a_gain_that_the_test_confirms():
    headline, choice = against_softmax(made.shifted(top5=0.02))  # what the table shows is not said again
    assert re.match(r"splitter is better than softmax: \d\.\d\d points of top-5 \(\d+ of 10,000 test examples\)", headline)
    assert "splitter is best (the mean of top-1 and top-5, 7" in choice


def test_the_order_is_that_of_ks():
    both = made.shifted(top5=0.02, top1=0.02, top10=0.02)
    assert re.search("of top-1 .* of top-5 ", against_softmax(both)[0])
    assert "top-10" not in " ".join(against_softmax(both))
    assert re.search("of top-10 .* of top-1 ", against_softmax(both, ks=(10, 1))[0])
    assert "top-5 " not in " ".join(against_softmax(both, ks=(10, 1))[:2])


OTHER = dataclasses.replace(splitter(0.1, top5=0.02), name="lapsum")


@pytest.mark.parametrize(
    ("methods", "headline"),
    [
        ([splitter(top5=0.05, top1=-0.03)], "A trade: splitter gains .* of top-5 .* and loses .* of top-1 .* against softmax"),
        ([splitter(0.1, top1=-0.03)], "No gain over softmax is shown: softmax is better than splitter"),
        ([splitter(0.1, top1=-0.03, top5=0.02)], "No gain over softmax is shown: splitter gains in one metric and loses in"),
        ([splitter(0.1)], "No gain over softmax is shown: every difference in top-1 and top-5 may be luck"),
        ([splitter()], "No gain over softmax is shown: splitter is best on validation, but the test does not confirm it"),
        (
            [splitter(top1=-0.03)],
            "No gain over softmax is shown: splitter is best on validation, but on the test it loses [23]",
        ),
        (
            [splitter(), OTHER],
            r"lapsum \(\+[12]\.\d\d points of top-5\) is better than softmax on the test; but splitter is best on validation, "
            "and the test does not confirm splitter",
        ),
        (
            [OTHER, dataclasses.replace(OTHER, name="ksubset"), splitter(top1=-0.03)],
            r"lapsum \(.*\) and ksubset \(.*\) are better .*; but splitter is best .*, and on the test splitter loses",
        ),
        ([OTHER], r"Nothing is ahead of softmax on validation, .* lapsum \(\+[12]\.\d\d points of top-5\) gains on the test"),
        (
            [made.with_validation(made.method("hinge", made.shifted()[:2]), 0.95), splitter(0.1)],
            "No gain over softmax is shown: hinge is best on validation, but has too few seeds",
        ),
    ],
)
def test_headlines(methods, headline):
    assert re.match(headline, verdict(made.measured(made.SOFTMAX, *methods))[0])


def test_a_headline_tells_of_all_that_lose_or_trade():
    trade, loser = splitter(0.1, top5=0.05, top1=-0.003), dataclasses.replace(splitter(0.1, top1=-0.03), name="lapsum")
    [headline, *_] = verdict(made.measured(made.SOFTMAX, trade, loser))
    assert headline == (
        "No gain over softmax is shown: softmax is better than lapsum, and splitter gains in one metric and loses in another."
    )


def test_a_headline_tells_what_may_be_lost_beside_a_gain():
    compared = made.measured(made.SOFTMAX, splitter(top5=0.003))
    d = np.zeros((5, 10_000), dtype=int)
    for seed, (hits, sign) in enumerate([(900, -1), (600, -1), (100, 1), (500, -1), (200, -1)]):
        d[seed, np.random.default_rng(seed).permutation(10_000)[:hits]] = sign
    counted = tuple(one for one in compared.contrasts if one.metric != "top1")
    compared = dataclasses.replace(compared, contrasts=(*counted, contrast("splitter", "softmax", "top1", d)))
    [headline, *_] = verdict(compared)
    assert headline.startswith("splitter is better than softmax: 0.30 points of top-5 (")
    assert headline.endswith("; it loses 4.20 points of top-1, which may be luck.")


def test_what_failed_on_a_seed_does_not_win_on_the_others():
    survivor = splitter(top5=0.02)
    survivor = dataclasses.replace(survivor, runs=survivor.runs[:3])
    compared = made.measured(made.SOFTMAX, survivor)
    [headline, *_] = verdict(compared)
    assert "but it has no result on 2 of 5 seeds, so it does not count as better." in headline
    assert compared.choice.name == "softmax"
    settled = dataclasses.replace(survivor, settled=True)
    assert made.measured(made.SOFTMAX, settled).lost_seeds(settled) == 0


def test_seeds_are_counted_that_both_have():
    few = dataclasses.replace(made.SOFTMAX, runs=made.SOFTMAX.runs[:2])
    headline, sentence, *_ = verdict(made.measured(few, splitter(top5=0.02)))
    assert headline == "Not decided: no method shares more than 2 seeds with softmax, which cannot tell a gain from luck."
    assert sentence.startswith("splitter against softmax on 2 seeds, not judged: ")


def test_hits_that_were_not_counted_are_no_finding():
    [headline, *_] = verdict(made.comparison(made.SOFTMAX, splitter(0.1, top5=0.02)))
    assert headline == "No gain over softmax is shown: no test, the hits were not counted."


def test_the_test_does_not_choose_what_it_judges():
    rest = verdict(made.measured(made.SOFTMAX, splitter(), OTHER))[1:]
    assert any("On the test lapsum is significantly better than softmax; validation decides" in sentence for sentence in rest)
    assert "significantly" not in " ".join(verdict(made.measured(made.SOFTMAX, splitter(0.1))))


@pytest.mark.parametrize(("examples", "found"), [(1, "only 1 of the 400 test examples differs"), (7, "p = 0.016")])
def test_few_examples_of_400_are_no_missing_test(examples, found):
    d = np.zeros((5, 400), dtype=int)
    d[:, :examples] = 1
    counted = (contrast("splitter", "softmax", "top1", d),)
    compared = made.comparison(made.SOFTMAX, splitter(0.1, top1=0.0025), contrasts=counted, ks=(1,))
    headline, sentence, *_ = verdict(compared)
    assert ("too few test examples differ" in headline) == (examples == 1)
    if examples == 1:
        assert f"(+{examples} of 400 test examples, " in sentence
        assert found in sentence
        return
    [p] = [one.p for (name, _), one in compared.differences.items() if name == "splitter" and one.p is not None]
    assert f"p = {p:.3f}" == found


# Not decided ---------------------------------------------------------------------------------------------------------------


def assert_not_decided(compared, *words):
    headline, *rest = verdict(compared)
    assert headline.startswith("Not decided: ")
    for each in words:
        assert each in headline
    everything = " ".join([headline, *rest, *notes(compared), tables.render(table(compared), "terminal")])
    assert "significant" not in everything
    return everything


def test_a_gain_that_few_seeds_show_and_cannot_confirm():
    """Eight seeds turned "no gain" into ten points: three could not have found them."""

    def compared(seeds, **shifts):
        softmax, method = made.SOFTMAX, splitter(**{"top5": 0.04, **shifts})
        parts = [dataclasses.replace(one, runs=one.runs[:seeds]) for one in (softmax, method)]
        compared = made.measured(*parts)
        d = np.zeros((seeds, 10_000), dtype=int)
        for seed, hits in enumerate((530, 400, 270, 450, 350)[:seeds]):
            d[seed, np.random.default_rng(seed).permutation(10_000)[:hits]] = 1
        others = tuple(one for one in compared.contrasts if one.metric != "top5")
        return dataclasses.replace(compared, contrasts=(*others, contrast("splitter", "softmax", "top5", d)))

    few = compared(3)
    [(method, metric)] = few.unconfirmed
    assert (method.name, metric) == ("splitter", "top5")
    one = few.differences["splitter", "top5"]
    assert one.paired.low > 0
    assert one.p > 0.05
    [headline, *_] = verdict(few)
    assert headline.startswith("Not decided: splitter gains top-5 +4.00 points (95 % interval +")
    assert headline.endswith(", which 3 seeds cannot confirm; run the same command with --seeds 5 to go on.")
    assert few.choice.name == "softmax"
    assert not compared(3, top1=-0.03).unconfirmed  # it loses for certain
    assert not compared(5).unconfirmed


def with_seeds(hits, score=0.95, examples=400):
    """A comparison on top-1, with so many hits gained on each seed by a method with this score on validation."""
    d = np.zeros((len(hits), examples), dtype=int)
    for seed, gained in enumerate(hits):
        moved = np.random.default_rng(seed).permutation(examples)[: abs(gained) + 60]
        d[seed, moved] = np.where(np.arange(len(moved)) < abs(gained), np.sign(gained), (-1) ** np.arange(len(moved)))
    found = made.with_validation(made.method("splitter", made.shifted(top1=sum(hits) / len(hits) / examples)), score)
    parts = [dataclasses.replace(one, runs=one.runs[: len(hits)]) for one in (made.SOFTMAX, found)]
    return made.comparison(*parts, contrasts=(contrast("splitter", "softmax", "top1", d),), ks=(1,))


def test_a_gain_that_few_seeds_leave_open():
    """Three seeds gave +2.6 points, with an interval from -0.1 to +5.3; five confirmed it."""
    few = with_seeds((14, 6, 10))
    one = few.differences["splitter", "top1"]
    assert one.paired.low < 0 < 0.02 < one.paired.high
    [headline, *_] = verdict(few)
    assert headline.startswith("Not decided: splitter gains top-1 +2.50 points (95 % interval \u2212")
    assert headline.endswith(", which 3 seeds cannot confirm; run the same command with --seeds 5 to go on.")
    assert not few.decided


@pytest.mark.parametrize(
    "found",
    [
        with_seeds((14, 6, 10, 4, 1)),  # five seeds are an answer
        with_seeds((14, 6, 10), score=0.1),  # validation picks softmax
        with_seeds((-14, -6, 10)),  # it is behind on the test
        with_seeds((14, 6, 10), examples=10_000),  # the interval ends below what would matter
    ],
)
def test_what_more_seeds_are_not_asked_for(found):
    assert found.decided
    assert verdict(found)[0].startswith("No gain over softmax is shown: ")


def test_more_seeds_are_not_asked_for_where_they_could_hardly_confirm_it():
    open_ = with_seeds((14, 6, 10))
    settled = tuple(dataclasses.replace(one, settled=True) for one in open_.methods)
    assert not open_.decided
    assert dataclasses.replace(open_, methods=settled).decided


@pytest.mark.parametrize("caps", [("", "--budget 14"), ("--budget 14", ""), ("--budget 14", "--budget 14")])
def test_a_cap_leaves_no_p_and_no_significance(caps):
    methods = (made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)))
    methods = [dataclasses.replace(method, capped=cap) for method, cap in zip(methods, caps, strict=True)]
    named = " and ".join(method.name for method in methods if method.capped)
    everything = assert_not_decided(made.measured(*methods), f"--budget 14 ended the tuning of {named}", "larger --budget")
    assert not re.search(r"\bp [=<]|interval|Holm", everything)
    assert re.search(r"top-5 \+2\.\d\d points \(\+2\d\d of 10,000 test examples\)\.", everything)


@pytest.mark.parametrize(("seeds", "words"), [(1, "one seed"), (2, "2 seeds")])
def test_few_seeds_are_not_judged(seeds, words):
    methods = [made.method(name, made.accuracies(top, 0.9, seeds=seeds)) for name, top in (("softmax", 0.6), ("splitter", 0.7))]
    everything = assert_not_decided(made.measured(*methods), words, "--seeds 5")
    assert f"splitter against softmax on {seeds} seed" in everything
    assert "not judged: top-1 +10." in everything


def test_runs_that_are_too_short():
    said = verdict(made.measured(made.longer(made.SOFTMAX, 0.012), made.longer(splitter(top5=0.02), 0.011)))
    assert said[0].startswith("splitter is better than softmax")
    assert re.search(r"too short: .*softmax 1\.20 and splitter 1\.10\. Raise --epochs", said[-1])
    ahead = dataclasses.replace(made.longer(splitter(0.701, top5=0.02), 0.001), config=Config(loss="splitter", epochs=20))
    turned = made.measured(made.longer(made.with_validation(made.SOFTMAX, 0.7), 0.02), ahead)
    assert re.match(r"Not decided: .*softmax gains 2\.00 points .* and splitter 0\.10.* --epochs 40", verdict(turned)[0])
    # The one ahead may have been found to have converged, without a run of twice the epochs.
    converged = dataclasses.replace(ahead, longer=None, same_length=None, half={"mean": 0.7})
    turned = made.measured(made.longer(made.with_validation(made.SOFTMAX, 0.7), 0.02), converged)
    assert re.match(r"Not decided: .*softmax gains 2\.00 points .* and splitter 0\.00", verdict(turned)[0])


def test_before_the_first_seed_the_tuning_tells_what_is_known():
    """Nothing to paste and no bound that was met: the best score so far of each, and that it is preliminary."""
    methods = [dataclasses.replace(made.method(name, []), capped="--time 4m") for name in ("softmax", "splitter")]
    methods[1] = dataclasses.replace(methods[1], bounds=("temperature 256, the largest that is tried",))
    failed = dataclasses.replace(methods[1], name="lapsum", tries=(Try(1e-3, 0.5, 20, (None,)), Try(1e-3, 1.0, 5, (0.9,))))
    compared = made.comparison(*methods, failed)
    everything = assert_not_decided(compared, "--time 4m ended the runs of softmax, splitter and lapsum", "larger --time")
    shown = tables.render(table(compared), "csv").splitlines()
    assert shown[0].startswith("method,")
    assert [line.split(",")[1] for line in shown[1:4]] == ["0.65", "0.65", "0.9"]  # the longest run of lapsum has diverged
    assert "Preliminary" in everything
    assert "best at" not in everything


def test_a_method_that_stopped_after_fewer_seeds_is_said_to_be_settled():
    few = dataclasses.replace(made.method("lapsum", made.shifted()[:3]), settled=True)
    said = verdict(made.measured(made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)), few))
    assert said[0].startswith("splitter is better than softmax")
    [sentence] = [one for one in said if "seeds" in one and "--seeds N" in one]
    assert sentence.startswith("lapsum was trained on 3 seeds")
    assert not any("same seeds;" in one for one in said)


def test_nothing_to_compare():
    other_seeds = dataclasses.replace(made.SOFTMAX, name="lapsum", runs=(made.run(77, made.SOFTMAX.runs[0].test),))
    for methods, words in (
        ([], ""),
        ([made.SOFTMAX], "only softmax"),
        ([made.SOFTMAX, made.method("splitter", [])], "only softmax"),
        ([made.method("splitter", made.shifted())], "no finished run of softmax"),
        ([made.SOFTMAX, other_seeds], "no method shares a seed"),
    ):
        assert_not_decided(made.comparison(*methods), words)
    assert verdict(made.comparison(made.SOFTMAX, made.method("splitter", [])))[-1] == "splitter has no finished run."


# Controls ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gce", "error", "counted", "end"),
    [
        (0.02, 0.02, True, "as much or more"),
        (0.012, 0.04, True, "more than luck."),
        (0.03, 0.04, True, "more than luck."),
        (0.005, 0.02, False, "which may be luck."),  # error and gce were not counted against each other
    ],
)
def test_what_gce_gains_too_is_not_due_to_k(gce, error, counted, end):
    methods = made.method("gce", made.shifted(top1=gce)), made.method("error", made.shifted(top1=error))
    methods = made.SOFTMAX, methods[0], made.with_validation(methods[1], 0.95)
    headline, *rest = verdict(made.measured(*methods, between=[("error", "gce")] if counted else []))
    assert headline.startswith("error is better than softmax: ")
    beside = [sentence for sentence in rest if sentence.startswith("Against the control gce, error gains top-1 +")]
    if end == "as much or more":
        assert "but gce" in headline
        assert end in headline
        assert beside == []
    else:
        assert "gce" not in headline
        assert beside[0].endswith(end)


def test_one_sentence_for_a_control_and_without_the_counts_that_the_table_has():
    gce, error = (made.method(name, made.shifted(top1=gain, top5=gain)) for name, gain in (("gce", 0.005), ("error", 0.03)))
    compared = made.measured(made.SOFTMAX, gce, made.with_validation(error, 0.95), between=[("error", "gce")])
    [sentence] = [sentence for sentence in verdict(compared) if sentence.startswith("Against the control gce")]
    assert re.search(r"gains top-1 \+2\.\d\d points \(.*\) and top-5 \+2\.\d\d points \(.*\): more than luck\.$", sentence)
    assert "test examples" not in sentence


def test_differences_to_controls_are_a_family_of_their_own():
    gains = {"gce": 0.005, "error": 0.01, "error:ksubset": 0.008}
    methods = [made.method(name, made.shifted(top1=gain, top5=gain), config=Config(loss=name)) for name, gain in gains.items()]
    compared = made.measured(made.SOFTMAX, *methods, between=[("error", "gce"), ("error:ksubset", "gce")])
    found = compared.beyond_controls
    assert {key[:2] for key in found} == {("error", "gce"), ("error:ksubset", "gce")}
    assert [one.p for one in found.values()] == holm([one.paired.p for one in found.values()])
    assert any(one.p > one.paired.p for one in found.values())


def test_behind_a_control_is_no_gain():
    gce, error = made.method("gce", made.shifted(top1=0.05)[:2]), made.method("error", made.shifted(top1=0.02))
    compared = made.measured(made.SOFTMAX, gce, made.with_validation(error, 0.95), between=[("error", "gce")])
    said = " ".join(verdict(compared))
    assert "gains top-1 \u2212" not in said
    assert re.search("It is behind gce in top-1 \u2212[23]", said)


@pytest.mark.parametrize("examples", [10_000, 300])
def test_what_the_intervals_leave_room_for(examples):
    """On few examples a gain of points may hide behind luck, and that is said."""
    one = made.method("splitter", made.shifted(top1=0.0003, top5=0.0003))
    said = verdict(made.measured(made.SOFTMAX, one, examples=examples))
    found = [
        sentence for sentence in said if sentence.startswith("A real gain is not ruled out: the intervals still allow up to ")
    ]
    assert said[0].startswith("No gain over softmax is shown")
    assert len(found) == (examples == 300)


def test_a_gain_that_comes_from_the_learning_rate():
    name, config = "softmax, learning rate of splitter", Config(loss="softmax", learning_rate=0.016)

    def said(method, gain):
        control = made.method(name, made.shifted(top5=gain), config=config)
        return verdict(made.measured(made.SOFTMAX, method, controls=[control], between=[("splitter", name)]))

    same = "softmax with the learning rate 0.016 gains half of it or more"
    assert same in said(splitter(top5=0.02), 0.019)[0]
    assert same not in said(splitter(top5=0.02), 0.0)[0]
    # With that rate softmax is worse: then it explains nothing, and no word is lost about it.
    control = f"Against the control {name}, splitter gains top-5"
    assert any(line.startswith(control) for line in said(splitter(top5=0.02), 0.005))
    assert not any(line.startswith(control) for line in said(splitter(top5=0.02), -0.02))
    # A gain that validation has not picked is called by its name below.
    assert any(line.startswith("splitter gains top-5, but") and same in line for line in said(splitter(0.1, top5=0.02), 0.019))


# What else is said ---------------------------------------------------------------------------------------------------------


def test_a_method_with_failed_runs_is_judged_apart():
    methods = made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)), made.method("lapsum", made.shifted(top5=0.02)[:2])
    failed = (Failure("lapsum with seed 2", "out of memory."),)
    sentences = verdict(made.measured(*methods, failures=failed))
    assert sentences[0].startswith("splitter is better than softmax")
    assert any(sentence.startswith("lapsum against softmax on 2 seeds, not judged: ") for sentence in sentences)
    assert any(sentence.startswith("lapsum and softmax do not have the same seeds") for sentence in sentences)
    assert sentences[-1] == "lapsum with seed 2 failed: out of memory."


def test_bounds_and_unequal_tuning_are_mentioned():
    softmax = dataclasses.replace(made.SOFTMAX, bounds=("label smoothing 0, the smallest",), tries=made.SOFTMAX.tries[:4])
    said = " ".join(verdict(made.measured(softmax, made.method("splitter", made.shifted()))))
    assert "softmax is best at label smoothing 0, the smallest." in said
    assert "not tuned equally; tries: softmax 4 and splitter 9." in said


def test_ties_on_validation():
    methods = [made.with_validation(made.method(name, made.shifted()), 0.5) for name in ("softmax", "splitter")]
    assert "softmax and splitter are tied" in " ".join(verdict(made.measured(*methods)))


@given(
    hits=st.lists(st.integers(50, 900), min_size=3, max_size=7),
    moved=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    more=st.lists(st.sampled_from([0, 0, 0, 1, 5]), min_size=2, max_size=2),
)
def test_all_that_is_said_of_validation_agrees(hits, moved, more):
    """As many hits, on other seeds, are means that may differ in their last bit: that is a tie, in every sentence."""
    methods, extras = [], dict(zip(("softmax", "splitter", "lapsum"), (0, *more), strict=True))
    for (name, extra), change in zip(extras.items(), moved, strict=True):
        scores = [(each + extra) / 997 for each in (hits[0] - change, hits[1] + change, *hits[2:])]
        tests = [test for test, _ in zip(made.shifted() * 2, scores, strict=False)]
        method = made.method(name, tests)
        runs = [dataclasses.replace(run, validation={"mean": each}) for run, each in zip(method.runs, scores, strict=True)]
        methods.append(dataclasses.replace(method, runs=tuple(runs)))
    said = verdict(made.comparison(*methods))
    best = [name for name, extra in extras.items() if extra == max(extras.values())]
    [choice] = [sentence for sentence in said if sentence.startswith("On validation, ")]
    assert ("are tied" in choice) == (len(best) > 1)
    assert all(name in choice for name in best)
    assert ("is best on validation" in said[0]) == ("softmax" not in best)
    assert made.comparison(*methods).picked.name == best[0]


def test_metrics_that_were_not_measured():
    few = [made.method(name, [{"top1": 0.9}] * 3) for name in ("softmax", "splitter")]
    assert "top-5" not in " ".join(verdict(made.comparison(*few, classes=3)))
    without = made.method("softmax", [{"top1": run.test["top1"]} for run in made.SOFTMAX.runs])
    gained = [{"top1": test["top1"]} for test in made.shifted(top1=0.05)]
    assert verdict(made.measured(without, made.method("splitter", gained)))[0].startswith("splitter is better than softmax: ")
    more = made.comparison(without, made.method("splitter", made.shifted(top1=0.05)))
    assert "softmax has no top-5 and top-10" in " ".join(verdict(more))


# The table -----------------------------------------------------------------------------------------------------------------


def test_the_table_has_points_examples_interval_and_p_of_what_is_judged():
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


def test_a_metric_that_is_not_tested_is_in_the_table_if_it_was_tuned_for():
    compared = made.with_others(made.measured(made.SOFTMAX, made.method("splitter", made.shifted(top1=0.01))))
    assert [row[0] for row in table(compared).rows[::2]] == ["top-1", "top-5", "top-10"]
    tuned = dataclasses.replace(compared, settings={**compared.settings, "metric": "ndcg10"})
    shown = table(tuned)
    assert [row[0] for row in shown.rows[::2]] == ["top-1", "top-5", "top-10", "NDCG@10"]
    line = tables.render(shown, "markdown").splitlines()
    assert any(re.match(r"\| NDCG@10 \| splitter \| 7\S+ ± \S+ \| \+1\.\d\d \| – \| – \| – \| 5 \|", each) for each in line)
    assert notes(tuned) == notes(compared)


def test_an_interval_without_0_beside_a_large_p_is_explained():
    sentence = "The intervals are not corrected: one that leaves out 0 is no finding where p is 0.05 or more."
    base = with_seeds((10, 7, 13, 6, 9), score=0.1)
    [counted] = base.contrasts
    others = [
        dataclasses.replace(base.methods[1], name=name) for name in ("lapsum", "ksubset", "softsort", "neuralsort", "sinkhorn")
    ]
    more = tuple(dataclasses.replace(counted, method=one.name) for one in others)
    many = dataclasses.replace(base, methods=(*base.methods, *others), contrasts=(*base.contrasts, *more))
    assert base.differences["splitter", "top1"].p < 0.05
    one = many.differences["splitter", "top1"]
    assert one.p >= 0.05
    assert one.paired.low > 0
    assert sentence not in notes(base)
    assert sentence in notes(many)


def test_the_notes_say_what_the_losses_are():
    names = ("splitter", "lapsum", "gce", "error")
    compared = made.measured(made.SOFTMAX, *(made.method(name, made.shifted(top1=0.01)) for name in names))
    assert notes(compared)[-1] == (
        "softmax: cross-entropy; splitter, lapsum: TopKCrossEntropyLoss, the paper's loss; gce: generalised cross-entropy, "
        "for the first guess, bounded but for a share of cross-entropy; error: TopKErrorLoss, the expected top-k error, "
        "bounded but for a share of cross-entropy."
    )


# How long the list must be -------------------------------------------------------------------------------------------------


def test_how_many_guesses_to_show_is_one_line():
    lists = (made.coverage("softmax", 1, 2, 4, 8, 21), made.coverage("splitter", 1, 2, 3, 7, 1200))
    compared = made.measured(made.SOFTMAX, splitter(top5=0.02), coverages=lists)
    assert compared.choice.name == "splitter"
    said = "To be right 95 % of the time on the test, show 7 guesses with splitter; with softmax 8."
    assert verdict(compared).count(said) == 1
    rows = tables.render(coverage_table(compared), "csv").splitlines()
    assert rows == ["method,50,80,90,95,99", "softmax,1,2,4,8,21", "splitter,1,2,3,7,1200"]
    alone = made.measured(made.SOFTMAX, splitter(0.1), coverages=(made.coverage("softmax", 1, 1, 1, 1, 2),))
    assert "To be right 95 % of the time on the test, show 1 guess with softmax." in verdict(alone)
    assert not any("of the time" in sentence for sentence in verdict(made.measured(made.SOFTMAX, splitter(0.1))))


def test_a_share_that_no_list_covers_is_said():
    lists = tuple(made.coverage(name, 1, 2, 30, None, None) for name in ("softmax", "splitter"))
    compared = made.measured(made.SOFTMAX, splitter(0.1), coverages=lists)
    [said] = [sentence for sentence in verdict(compared) if "of the time" in sentence]
    assert said.startswith("No number of guesses is right 95 % of the time: 40.00 % of the test examples have a target that is")
    assert "30      –      –" in tables.render(coverage_table(compared), "terminal")
