"""results.json holds what was measured and what follows from it, in what JSON has."""

import dataclasses
import json

import pytest

import made
from anyk.lab.comparison import results
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, Confusion, Try
from anyk.lab.comparison.verdict import verdict
from anyk.lab.errors import Failure


def written(compared):
    return json.loads(json.dumps(results.to_json(compared)))


def test_the_file_holds_the_outcome_and_what_follows():
    splitter = dataclasses.replace(made.method("splitter", made.shifted(), epochs=3), longer={"mean": 0.6})
    control = dataclasses.replace(made.SOFTMAX, name=f"{LEARNING_RATE_OF}splitter", tries=())
    compared = made.measured(
        made.SOFTMAX,
        splitter,
        controls=[control],
        ks=(5, 1),
        moves=made.moves(context=("def", "…", "<newline>")),
        by_class=made.by_class([3, 4], [5, 2], confusions=[Confusion("a", "b", 2, 1)]),
        failures=(Failure("a", "lost."),),
        coverages=(made.coverage("splitter", 1, 2, 3, 7, None),),
    )
    content = written(made.with_others(compared))
    assert content["format"] == 2
    assert content["ks"] == [5, 1]
    assert content["methods"][1]["config"] == splitter.config.to_json()
    assert content["methods"][1]["longer"] == {"mean": 0.6}
    assert content["methods"][1]["runs"][0]["seed"] == 0
    assert content["by_class"]["confusions"] == [{"target": "a", "guess": "b", "before": 2, "after": 1}]
    assert content["moves"]["examples"][0]["context"] == ["def", "…", "<newline>"]
    assert content["failures"] == [{"run": "a", "error": "lost."}]
    derived = content["derived"]
    assert derived["verdict"] == verdict(compared)
    assert (derived["chosen"], derived["decided"]) == (compared.choice.name, True)
    row = derived["table"][1]
    assert row["difference"]["top5"]["p_holm"] == compared.differences["splitter", "top5"].p
    assert row["difference"]["top10"]["p_holm"] is None  # not in ks, not tested
    assert row["difference"]["mrr"]["p"] is row["difference"]["mrr"]["p_holm"] is None
    assert row["test"]["ndcg10"]["mean"] == pytest.approx(row["test"]["top1"]["mean"] + 0.1)
    assert derived["table"][2]["method"] == control.name
    assert row["guesses"] == {"50": 1, "80": 2, "90": 3, "95": 7, "99": None}
    assert derived["table"][0]["guesses"] is None
    assert content["coverages"][0]["curve"] == [[1, 0.2], [10, 0.8], [100, 0.8]]


def test_numbers_that_json_does_not_have():
    diverged = made.method("splitter", made.shifted(), tries=(Try(1.0, 1.0, 20, (0.5, float("nan"))),))
    assert written(made.comparison(diverged))["methods"][0]["tries"][0]["scores"] == [0.5, None]
