"""results.json reads back, and a broken one is named."""

import json

import pytest

import made
from anyk.lab.comparison import results
from anyk.lab.comparison.outcome import Try
from anyk.lab.comparison.verdict import verdict
from anyk.lab.errors import Failure, LabError


def test_the_file_reads_back(tmp_path):
    compared = made.comparison(
        made.SOFTMAX, made.method("splitter", made.shifted(), epochs=3), moves=made.moves(), failures=(Failure("a", "lost."),)
    )
    results.write(compared, tmp_path / "results.json")
    again = results.read(tmp_path / "results.json")
    assert again == compared
    assert verdict(again) == verdict(compared)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["derived"]["verdict"] == verdict(compared)
    assert content["derived"]["table"][1]["difference"]["top5"]["p_holm"] is not None


def test_numbers_that_json_does_not_have(tmp_path):
    diverged = made.method("splitter", made.shifted(), tries=(Try(1.0, 1.0, float("nan")),))
    results.write(made.comparison(diverged), tmp_path / "results.json")
    assert results.read(tmp_path / "results.json").methods[0].tries[0].score is None


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "methods": 3}'])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(LabError, match=r"results\.json"):
        results.read(tmp_path / "results.json")
