"""Outcomes: what follows from them in numbers."""

import dataclasses

import pytest

import made
from anyk.lab.comparison.outcome import best, differences
from anyk.lab.comparison.verdict import notes


def test_holm_is_over_methods_and_metrics():
    methods = [made.SOFTMAX] + [
        made.method(name, made.accuracies(0.601, 0.803, 0.9, salt=name)) for name in ("splitter", "lapsum")
    ]
    compared = made.comparison(*methods)
    found = differences(compared)
    assert len(found) == 6
    smallest = min(found.values(), key=lambda difference: difference.paired.p)
    assert smallest.p == pytest.approx(min(1, 6 * smallest.paired.p))
    assert any("every method and every metric of this report, 6 tests" in note for note in notes(compared))


def test_best_is_chosen_on_validation():
    better = made.method("splitter", made.shifted(top5=0.02))
    assert best(made.comparison(made.SOFTMAX, better)).name == "splitter"
    good_on_test = dataclasses.replace(
        better, runs=tuple(dataclasses.replace(run, validation={"mean": 0.1}) for run in better.runs)
    )
    assert best(made.comparison(made.SOFTMAX, good_on_test)).name == "softmax"
    assert best(made.comparison(dataclasses.replace(made.SOFTMAX, name="splitter"), made.SOFTMAX)).name == "softmax"
