"""Outcomes: what follows from them in numbers."""

import dataclasses

import numpy as np
import pytest
import safetensors.torch
import torch

import made
from anyk.lab.comparison import search
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, Method, SeedRun, contrasts
from anyk.lab.comparison.verdict import verdict
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config

# Counting ------------------------------------------------------------------------------------------------------------------


def kept(folder, loss, ranks, *, groups=None, name=None):
    """A method whose runs left ranks behind, seeds 0, 1, ... in this order."""
    runs = []
    for seed, own in enumerate(ranks):
        path = folder / f"{name or loss}{seed}"
        path.mkdir()
        tensors = {"ranks": torch.tensor(own, dtype=torch.int32), "guesses": torch.zeros(len(own), 2, dtype=torch.int32)}
        if groups is not None:
            tensors["groups"] = torch.tensor(groups)
        safetensors.torch.save_file(tensors, path / "test.safetensors", {"state": "{}"})
        test = {f"top{k}": float(np.mean(np.array(own) <= k)) for k in (1, 5, 10)}
        runs.append(SeedRun(seed, test, {"mean": 0.5}, 1.0, path.name))
    return Method(name or loss, Config(loss=loss), (), tuple(runs))


@pytest.mark.parametrize("grouped", [False, True])
def test_hits_are_counted_from_what_the_runs_kept(tmp_path, grouped):
    chance = np.random.default_rng(0)
    ranks = {name: chance.integers(1, 13, (3, 50)).tolist() for name in ("softmax", "gce", "error", "control")}
    groups = chance.integers(20, size=50).tolist() if grouped else None
    methods = [kept(tmp_path, name, ranks[name], groups=groups) for name in ("softmax", "gce", "error")]
    control = kept(tmp_path, "softmax", ranks["control"], groups=groups, name="softmax, learning rate of error")
    compared = made.comparison(*methods, controls=(control,))
    ranks[control.name] = ranks["control"]
    found = {(one.method, one.against, one.metric): one for one in contrasts(compared, tmp_path)}
    pairs = [
        ("gce", "softmax"), ("error", "softmax"), (control.name, "softmax"), ("error", control.name), ("error", "gce")
    ]  # fmt: skip
    assert set(found) == {(*pair, metric) for pair in pairs for metric in ("top1", "top5", "top10")}
    for (name, against, metric), one in found.items():
        k = int(metric.removeprefix("top"))
        d = [
            [(a <= k) - (b <= k) for a, b in zip(*rows, strict=True)] for rows in zip(ranks[name], ranks[against], strict=True)
        ]
        assert one.by_seed == tuple(map(sum, d))
        members = groups or range(50)
        totals = {g: sum(row[i] for row in d for i in range(50) if members[i] == g) for g in set(members)}
        sizes = {g: sum(member == g for member in members) for g in totals}
        differ = {members[i] for i in range(50) if any(row[i] for row in d)}
        assert (one.examples, one.clusters, one.differing) == (50, len(totals), len(differ))
        assert (one.gained, one.lost) == (sum(t > 0 for t in totals.values()), sum(t < 0 for t in totals.values()))
        assert one.squared_totals == sum(t**2 for t in totals.values())
        assert one.sized_totals == sum(totals[g] * sizes[g] for g in totals)
        assert one.squared_sizes == sum(size**2 for size in sizes.values())
    judged = dataclasses.replace(compared, contrasts=tuple(found.values()))
    for (name, metric), one in judged.differences.items():
        means = [
            np.mean([run.test[metric] for run in each.runs]) for each in (*methods, control) if each.name in (name, "softmax")
        ]
        assert abs(one.paired.difference) == pytest.approx(abs(means[0] - means[-1]))


def test_seeds_that_only_one_has_do_not_count(tmp_path):
    ranks = np.random.default_rng(0).integers(1, 13, (4, 50)).tolist()
    softmax, splitter = kept(tmp_path, "softmax", ranks[:3]), kept(tmp_path, "splitter", ranks)
    splitter = dataclasses.replace(splitter, runs=splitter.runs[1:])
    [first, *_] = contrasts(made.comparison(softmax, splitter), tmp_path)
    assert first.by_seed == (0, 0)


def test_runs_that_kept_nothing_have_no_contrast_and_no_test(tmp_path):
    compared = made.comparison(made.SOFTMAX, made.method("splitter", made.shifted(top5=0.02)))
    assert contrasts(compared, tmp_path) == ()
    found = compared.differences["splitter", "top5"]
    assert found.paired.difference == pytest.approx(0.02, abs=1e-3)
    assert found.paired.hits == pytest.approx(200, abs=10)
    assert (found.p, found.paired.reason) == (None, "the hits were not counted")
    damaged = kept(tmp_path, "lapsum", [[1, 2]])
    (tmp_path / "lapsum0" / "test.safetensors").write_bytes(b"no")
    with pytest.raises(LabError, match=r"test.safetensors is damaged"):
        contrasts(made.comparison(kept(tmp_path, "softmax", [[1, 2]]), damaged), tmp_path)


# Tests ---------------------------------------------------------------------------------------------------------------------


def three(**changes):
    methods = [made.SOFTMAX] + [
        made.method(name, made.shifted(top1=shift, top5=shift)) for name, shift in (("splitter", 0.0), ("lapsum", 0.003))
    ]
    return made.measured(*methods, **changes)


def test_holm_is_over_methods_and_judged_metrics():
    compared = three()
    found = compared.differences
    assert len(found) == 6
    tested = {key: one for key, one in found.items() if one.p is not None}
    assert set(tested) == {(name, metric) for name in ("splitter", "lapsum") for metric in ("top1", "top5")}
    smallest = min(tested.values(), key=lambda one: one.paired.p)
    assert smallest.p == pytest.approx(min(1, 4 * smallest.paired.p))
    shown = found["lapsum", "top10"].paired
    assert (shown.low, shown.high, shown.p, shown.reason) == (None, None, None, None)
    alone = three(ks=(10,))
    assert {key for key, one in alone.differences.items() if one.p is not None} == {("splitter", "top10"), ("lapsum", "top10")}


def test_controls_are_not_tested():
    control = made.method("softmax, learning rate of lapsum", made.shifted(top1=0.01))
    found = three(controls=(control,)).differences
    assert found[control.name, "top1"].paired.difference > 0.005
    assert found[control.name, "top1"].p is None
    assert three().differences["lapsum", "top1"].p == three(controls=(control,)).differences["lapsum", "top1"].p


def test_the_ks_come_first():
    assert three(ks=(10, 1)).metrics == ["top10", "top1", "top5"]
    assert three(ks=(10, 1)).judged_metrics == ["top10", "top1"]
    assert three(ks=(7, 5)).judged_metrics == ["top5"]
    assert three(ks=(7,)).judged_metrics == ["top1"]
    assert made.comparison().judged_metrics == []


def test_other_metrics_are_shown_and_not_tested():
    control = made.method("softmax, learning rate of lapsum", made.shifted(top1=0.01))
    plain, compared = three(controls=(control,)), made.with_others(three(controls=(control,)))
    assert compared.metrics == plain.metrics
    assert plain.others == []
    assert compared.others == ["mrr", "ndcg5", "ndcg10", "macro_top1", "macro_top5"]
    macro = ["macro_top1", "macro_top5", "macro_top20"]
    assert dataclasses.replace(compared, ks=(1, 20)).others == ["mrr", "ndcg10", "ndcg20", *macro]
    found = compared.differences
    assert {key: one for key, one in found.items() if key[1] in plain.metrics} == plain.differences
    for name in ("splitter", "lapsum", control.name):
        for metric in compared.others:
            one = found[name, metric]
            mine = next(method for method in compared.all_methods if method.name == name)
            both = zip(mine.runs, compared.methods[0].runs, strict=True)
            expected = np.mean([own.test[metric] - other.test[metric] for own, other in both])
            assert one.paired.difference == pytest.approx(expected)
            assert (one.p, one.paired.p, one.paired.low, one.paired.hits) == (None,) * 4
    assert dataclasses.replace(compared, methods=compared.methods[1:]).differences == {}


# What to use ---------------------------------------------------------------------------------------------------------------


def test_validation_picks_and_the_test_confirms():
    better = made.method("splitter", made.shifted(top5=0.02))
    compared = made.measured(made.SOFTMAX, better)
    assert compared.picked.name == compared.choice.name == "splitter"
    assert compared.confirmed(better)
    assert compared.decided
    # Good on the test, but validation has not picked it.
    assert made.measured(made.SOFTMAX, made.with_validation(better, 0.1)).choice.name == "softmax"
    # Picked by validation, but no better on the test.
    lucky = made.measured(made.SOFTMAX, made.with_validation(made.method("splitter", made.shifted()), 0.95))
    assert (lucky.picked.name, lucky.choice.name) == ("splitter", "softmax")
    assert lucky.decided
    # A gain and a loss in what is judged is no confirmation; where the loss is not judged, it is.
    trade = made.method("splitter", made.shifted(top5=0.03, top1=-0.02))
    assert made.measured(made.SOFTMAX, trade).choice.name == "softmax"
    assert made.measured(made.SOFTMAX, trade, ks=(5,)).choice.name == "splitter"
    # The first of equals, softmax before all.
    assert made.comparison(dataclasses.replace(made.SOFTMAX, name="splitter"), made.SOFTMAX).picked.name == "softmax"


def test_wrong_labels_of_validation_choose_only_among_what_the_test_confirms():
    def wrong(method, score):
        noisy = dataclasses.replace(method, config=method.config.replace(label_noise=0.4))
        return made.with_validation(noisy, score)

    names = {"gce": made.shifted(top5=0.03), "error": made.shifted(top5=0.02), "splitter": made.shifted()}
    scores = {"gce": 0.3, "error": 0.5, "splitter": 0.7}
    methods = [wrong(made.method(name, shifted), scores[name]) for name, shifted in names.items()]
    compared = made.measured(wrong(made.SOFTMAX, 0.6), *methods)
    assert (compared.best_on_validation[0].name, compared.picked.name, compared.choice.name) == ("splitter", "error", "error")
    said = verdict(compared)
    assert said[0].startswith("error is better than softmax: ")
    assert (
        said[1]
        == "40 % of the labels for training and validation were replaced by wrong ones on purpose; those of the test were not."
    )
    [place] = [place for place, sentence in enumerate(said) if sentence.startswith("On validation, splitter is best")]
    assert said[place + 1].startswith("The labels of validation are wrong, too, so only methods that the test confirms")
    assert said[place + 2] == "On the test gce is also significantly better than softmax."
    # The report shows what was picked, and neither that nor the best on validation ends with fewer seeds.
    assert compared.rival.name == "error"
    assert search.futile(compared) == set()
    # Nothing is confirmed: as ever.
    nothing = made.measured(wrong(made.SOFTMAX, 0.6), methods[2])
    assert (nothing.picked.name, nothing.choice.name, nothing.rival.name) == ("splitter", "softmax", "splitter")
    # Right labels: validation alone picks.
    right = made.measured(
        made.with_validation(made.SOFTMAX, 0.6), *(made.with_validation(made.method(n, names[n]), scores[n]) for n in names)
    )
    assert (right.picked.name, right.choice.name) == ("splitter", "softmax")


def softmax_and_its_control(validation, spread=1e-4):
    """Softmax with 0.6 on validation, an error loss that gains, and softmax with the rate of that."""
    config = made.SOFTMAX.config.replace(learning_rate=0.05)
    error = made.method("error", made.shifted(top5=0.03), config=config.replace(loss="error:lapsum"))
    control = made.method(LEARNING_RATE_OF + "error", made.shifted(top5=0.029), config=config, tries=())
    softmax = dataclasses.replace(made.SOFTMAX, bounds=("learning rate 1e-11, the smallest that is tried", "q 3, the largest"))
    error, softmax = made.with_validation(error, 0.66), made.with_validation(softmax, 0.6)
    return softmax, error, made.with_validation(control, validation, spread)


def test_a_softmax_that_missed_its_best_rate_takes_that_of_another_method():
    softmax, error, control = softmax_and_its_control(0.65)
    same = dataclasses.replace(control, name=LEARNING_RATE_OF + "gce")
    found = search.with_better_baseline(made.measured(softmax, error, controls=[control, same]))
    taken, [before] = found.methods[0], found.controls
    assert (taken.name, taken.config, taken.runs, taken.rate_of) == ("softmax", control.config, control.runs, "error")
    assert taken.bounds == ("q 3, the largest",)
    assert (before.name, before.runs) == (f"softmax, learning rate {softmax.config.learning_rate:g}", softmax.runs)
    found = made.measured(*found.methods, controls=found.controls)
    assert found.choice.name == "softmax"
    assert "softmax has the learning rate of error, 0.05: on validation, over the seeds," in " ".join(verdict(found))


def test_a_softmax_that_diverged_on_a_seed_is_replaced_too():
    softmax, error, control = softmax_and_its_control(0.65)
    softmax = dataclasses.replace(softmax, runs=softmax.runs[1:])
    assert search.with_better_baseline(made.measured(softmax, error, controls=[control])).methods[0].runs == control.runs


@pytest.mark.parametrize(("validation", "spread", "seeds"), [(0.59, 1e-4, 5), (0.601, -0.002, 5), (0.65, 1e-4, 4)])
def test_softmax_stays_where_the_other_rate_is_worse_or_ahead_by_luck_or_diverged(validation, spread, seeds):
    softmax, error, control = softmax_and_its_control(validation, spread)
    control = dataclasses.replace(control, runs=control.runs[:seeds])
    compared = made.measured(softmax, error, controls=[control])
    assert search.with_better_baseline(compared) is compared


def test_a_cap_leaves_no_test():
    better = made.method("splitter", made.shifted(top5=0.02))
    for methods in ((dataclasses.replace(made.SOFTMAX, capped="--budget 3"), better),
                    (made.SOFTMAX, dataclasses.replace(better, capped="--time 10m"))):  # fmt: skip
        compared = made.measured(*methods)
        assert not compared.decided
        assert compared.choice.name == "softmax"
        assert all((one.p, one.paired.p, one.paired.low) == (None, None, None) for one in compared.differences.values())
    # Out of time before its first run, or in a control: there is no verdict on the others either.
    late = dataclasses.replace(made.method("lapsum", []), capped="--time 10m")
    assert not made.measured(made.SOFTMAX, better, late).decided
    control = dataclasses.replace(made.SOFTMAX, name=LEARNING_RATE_OF + "splitter", runs=(), capped="--time 10m")
    assert not dataclasses.replace(made.measured(made.SOFTMAX, better), controls=(control,)).decided
    # A method that could not be trained is not compared, whatever ended its tuning.
    failed = dataclasses.replace(made.method("lapsum", []), capped="--budget 3")
    assert made.measured(made.SOFTMAX, better, failed).decided


# Longer runs ---------------------------------------------------------------------------------------------------------------


def test_twice_the_epochs():
    softmax, splitter = (made.with_validation(one, 0.7) for one in (made.SOFTMAX, made.method("splitter", made.shifted())))
    noise = 2 * np.std([run.validation["mean"] for run in softmax.runs], ddof=1)  # 0.0003
    assert made.measured(made.longer(softmax, 0.9 * noise), splitter).undertrained == {}
    assert set(made.measured(made.longer(softmax, 1.1 * noise), splitter).undertrained) == {"softmax"}
    wild = made.with_validation(splitter, 0.7, spread=1 / 50)
    assert made.measured(softmax, made.longer(wild, 0.0049)).undertrained == {}
    assert made.measured(softmax, made.longer(wild, 0.0051)).undertrained == pytest.approx({"splitter": 0.0051})


def test_an_order_that_longer_runs_may_turn_round_is_not_decided():
    splitter = made.method("splitter", made.shifted(top5=0.02))
    ahead, behind = made.with_validation(splitter, 0.71), made.with_validation(made.SOFTMAX, 0.70)

    def turned(first, second):
        return [
            (one.name, other.name)
            for one, other in made.measured(made.longer(behind, second), made.longer(ahead, first)).overtaking
        ]

    assert turned(0.0, 0.02) == [("softmax", "splitter")]
    assert turned(0.02, 0.02) == []  # both gain as much
    assert turned(0.02, 0.0) == []  # the one ahead gains
    assert turned(0.0, 0.009) == []  # not enough to come past
    assert not made.measured(made.longer(behind, 0.02), made.longer(ahead, 0.0)).decided
    assert made.measured(made.longer(behind, 0.02), made.longer(ahead, 0.02)).decided
    assert turned(0.0, 0.0004) == []
    level = made.with_validation(made.SOFTMAX, 0.71)  # no lead at all: a difference that may be luck is none
    assert made.measured(made.longer(level, 0.0), made.longer(ahead, 0.0005)).overtaking == []
    assert made.measured(made.longer(level, 0.0), made.longer(ahead, 0.0008)).overtaking != []
