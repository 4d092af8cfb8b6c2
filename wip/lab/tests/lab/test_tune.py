import math

import pytest

from anyk.lab import tune
from anyk.lab.config import RunConfig
from anyk.lab.tune import EFFORTS, Trial

LOSSES = ["softmax", "gce", "error", "error:ksubset", "splitter", "lapsum", "smooth", "hinge", "softmax_at_k"]


@pytest.mark.parametrize("hidden", [False, True])
def test_every_loss_has_as_many_settings(hidden):
    assert {len(tune.settings_of(loss, hidden)) for loss in LOSSES} == {tune.SETTINGS}
    for loss in LOSSES:
        for setting in tune.settings_of(loss, hidden):
            RunConfig(loss=loss, **setting)


def test_softmax_is_a_rival_behind_hidden_layers_too():
    fields = {name for setting in tune.settings_of("softmax", True) for name in setting}
    assert fields == {"weight_decay", "label_smoothing", "temperature"}


def test_a_loss_costs_at_most_fifteen_trainings_beside_the_final_ones():
    for name in ("quick", "normal"):
        assert EFFORTS[name].trainings() - EFFORTS[name].seeds <= 15


def trials(scores, length=0.125, split=0):
    return [Trial({"learning_rate": rate}, length, split, score) for rate, score in scores.items()]


def test_of_equal_scores_the_rate_nearest_to_the_usual_leads_and_what_diverged_is_out():
    scores = trials({1e-3: 0.5, 1e-2: 0.505, 1e-1: 0.3, 1.0: None})
    assert [point["learning_rate"] for point in tune.ranked(scores, 0.02, 1e-3)] == [1e-3, 1e-2, 1e-1]
    assert [point["learning_rate"] for point in tune.ranked(scores, 0.02, 1e-1)] == [1e-2, 1e-3, 1e-1]
    assert tune.ranked(trials({1e-3: 0.5, 1e-2: 0.7, 1e-1: 0.3}), 0.02, 1e-3)[0]["learning_rate"] == 1e-2
    assert tune.ranked(trials({1.0: None}), 0.0, 1.0) == []


def test_points_that_were_tried_more_often_are_compared_by_their_mean():
    some = [*trials({1e-3: 0.5, 1e-2: 0.9}, split=1), *trials({1e-3: 0.8}, split=2)]
    assert tune.ranked(some, 0.0, 1.0) == [{"learning_rate": 1e-3}]


def test_the_finalists_have_a_lower_rate_than_the_best_of_short_runs():
    found = tune.finalists(trials({1e-3: 0.2, 1e-2: 0.7, 1e-1: 0.6, 3e-2: 0.5, 3e-3: 0.4, 1.0: 0.1}), 0.0, 1e-3)
    assert len(found) == tune.FINALISTS and found[0]["learning_rate"] == 1e-2 and found[1]["learning_rate"] == 5e-3


def test_short_runs_have_enough_steps_and_see_no_test():
    assert tune.shortened(RunConfig(), 1 / 8, 1000).length == 1 / 8
    short = tune.shortened(RunConfig(), 1 / 8, 40)
    assert short.length == 0.5 and not short.tested
    assert tune.shortened(RunConfig(), 1 / 8, 5).length == 1.0


def test_bounds_are_told():
    settings = tune.settings_of("splitter", False)
    assert "temperature 8" in tune.at_bounds({"learning_rate": 1.0, "temperature": 8.0}, [0.1, 1.0, 10.0], settings)[0]
    assert tune.at_bounds({"learning_rate": 1.0, "temperature": 2.0}, [0.1, 1.0, 10.0], settings) == []
    assert tune.at_bounds({"learning_rate": 1.0, "q": 1.0}, [0.1, 1.0, 10.0], tune.settings_of("gce", False)) == []


def test_noise_of_a_share():
    assert math.isclose(tune.noise_of(0.5, 100), 0.05) and 0 < tune.noise_of(1.0, 100) < 0.02
