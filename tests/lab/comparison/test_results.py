"""results.json reads back, and a broken one is named."""

import dataclasses
import json

import numpy as np
import pytest

import made
from anyk.lab.comparison import results
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, Confusion, Try, chosen
from anyk.lab.comparison.verdict import verdict
from anyk.lab.errors import Failure, LabError
from anyk.lab.statistics import contrast


def counted(method, metric):
    """Fifty of a thousand test examples differ, thirty for the method."""
    return contrast(method, "softmax", metric, np.array([[1] * 30 + [-1] * 20 + [0] * 950] * 5))


def test_the_file_reads_back(tmp_path):
    tuned = dataclasses.replace(
        made.method("splitter", made.shifted(), epochs=3),
        hyperparameter="temperature",
        capped="",
        bounds=("temperature 64, the largest that is tried",),
        longer={"mean": 0.6},
        same_length={"mean": 0.5},
    )
    control = dataclasses.replace(made.SOFTMAX, name=f"{LEARNING_RATE_OF}splitter", tries=())
    compared = made.comparison(
        made.SOFTMAX,
        tuned,
        controls=(control,),
        contrasts=tuple(counted("splitter", metric) for metric in ("top1", "top5", "top10")),
        ks=(5, 1),
        moves=made.moves(context=("def", "…", "<newline>")),
        by_class=made.by_class([3, 4], [5, 2], confusions=[Confusion("a", "b", 2, 1)]),
        unreadable=("broken.jpg",),
        failures=(Failure("a", "lost."),),
    )
    results.write(compared, tmp_path / "results.json")
    again = results.read(tmp_path / "results.json")
    assert again == compared
    assert verdict(again) == verdict(compared)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["format"] == 2
    derived = content["derived"]
    assert derived["verdict"] == verdict(compared)
    assert (derived["chosen"], derived["decided"]) == (chosen(compared).name, True)
    assert derived["table"][1]["difference"]["top5"]["p_holm"] is not None
    assert derived["table"][1]["difference"]["top10"]["p_holm"] is None  # not wanted, not tested
    assert derived["table"][2]["method"] == control.name


def test_what_is_not_tested_is_written_too(tmp_path):
    compared = made.with_others(made.measured(made.SOFTMAX, made.method("splitter", made.shifted())))
    results.write(compared, tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == compared
    row = json.loads((tmp_path / "results.json").read_text())["derived"]["table"][1]
    assert row["test"]["ndcg10"]["mean"] == pytest.approx(row["test"]["top1"]["mean"] + 0.1)
    assert row["difference"]["mrr"]["p"] is row["difference"]["mrr"]["p_holm"] is None


def test_a_file_from_before_there_were_sequences_reads_back(tmp_path):
    compared = made.comparison(made.SOFTMAX, moves=made.moves())
    results.write(compared, tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    for example in content["moves"]["examples"]:
        assert example.pop("context") == []
    assert results.from_json(content) == compared


def test_numbers_that_json_does_not_have(tmp_path):
    diverged = made.method("splitter", made.shifted(), tries=(Try(1.0, 1.0, 20, (0.5, float("nan"))),))
    results.write(made.comparison(diverged), tmp_path / "results.json")
    assert results.read(tmp_path / "results.json").methods[0].tries[0].scores == (0.5, None)


def test_a_file_of_the_format_before_is_named(tmp_path):
    (tmp_path / "results.json").write_text('{"format": 1, "methods": []}')
    with pytest.raises(LabError, match=r"results\.json is of an older version of anyk.*: run `anyk compare` again"):
        results.read(tmp_path / "results.json")


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 3}', '{"format": 2}', '{"format": 2, "methods": 3}'])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(LabError, match=r"results\.json"):
        results.read(tmp_path / "results.json")
