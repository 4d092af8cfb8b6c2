"""Hits and confusions of each class, against counts made by hand."""

import numpy as np
import torch

import made
from anyk.lab.comparison import classes
from anyk.lab.comparison.classes import count_classes
from anyk.lab.comparison.outcome import Confusion
from anyk.lab.data import Dataset, Split, split

NAMES = ("ant", "bee", "cow", "<dog>")


def dataset(labels):
    train = Split((torch.zeros(8, 2),), torch.arange(4).repeat(2))
    return Dataset("made", "embeddings", NAMES, train, Split((torch.zeros(len(labels), 2),), torch.tensor(labels)), "")


def counted(out, labels, runs, seeds=None):
    """The counts for methods of which the guesses are given: for each method, for each seed, rows of classes, best first."""
    compared = []
    for name, guessed in runs.items():
        method = made.method(name, [{"top1": 0.5, "top2": 0.5}] * len(guessed))
        compared.append(made.with_guesses(out, method, labels, guessed))
    data = dataset(labels)
    return count_classes(made.comparison(*compared, ks=(1, 2)), out, data, split(data, 0.25, 0.25, 0))


def test_hits_and_confusions_by_hand(tmp_path):
    labels = [0, 0, 1, 1, 3]
    right = [[0, 1], [0, 1], [1, 0], [1, 0], [3, 0]]
    found = counted(
        tmp_path,
        labels,
        {
            "softmax": [right, [[1, 0], [1, 0], [1, 0], [0, 2], [3, 0]]],
            "splitter": [[[0, 1], [3, 2], [1, 0], [0, 1], [3, 0]], [[0, 1], [1, 2], [1, 0], [1, 2], [0, 3]]],
        },
    )
    assert found is not None
    assert (found.method, found.seeds) == ("splitter", (0, 1))
    assert found.names == ("ant", "bee", "<dog>")  # there is no cow to test
    assert found.examples == (2, 2, 1)
    assert found.before == {"top1": (2, 3, 2), "top2": (4, 3, 2)}
    assert found.after == {"top1": (2, 3, 1), "top2": (2, 4, 2)}
    assert set(found.confusions) == {
        Confusion("ant", "bee", 2, 1),
        Confusion("bee", "ant", 1, 1),
        Confusion("ant", "<dog>", 0, 1),
        Confusion("<dog>", "ant", 0, 1),
    }


def test_targets_that_are_no_class_belong_to_none(tmp_path):
    rows = [[0, 1], [3, 1], [1, 0]]
    found = counted(tmp_path, [0, -1, 1], {"softmax": [rows], "splitter": [rows]})
    assert found is not None
    assert (found.names, found.examples) == (("ant", "bee"), (1, 1))
    assert found.before == found.after == {"top1": (1, 1), "top2": (1, 1)}
    assert found.confusions == ()


def test_only_the_most_frequent_confusions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(classes, "KEPT_CONFUSIONS", 1)
    labels = [0, 0, 1, 2]
    runs = {"softmax": [[[1, 0], [1, 0], [2, 1], [2, 0]]], "splitter": [[[0, 1], [1, 0], [0, 1], [0, 2]]]}
    found = counted(tmp_path, labels, runs)
    assert found is not None
    # The first of each; of equally frequent ones the first class.
    assert found.confusions == (Confusion("ant", "bee", 2, 1),)


def test_no_mistakes_are_no_confusions(tmp_path):
    right = [[0, 1], [1, 0]]
    found = counted(tmp_path, [0, 1], {"softmax": [right], "splitter": [right]})
    assert found is not None
    assert found.confusions == ()


def test_the_rival_is_the_best_on_validation_even_where_softmax_is_better(tmp_path):
    right = [[0, 1], [1, 0]]
    labels, data = [0, 1], dataset([0, 1])
    compared = [
        made.with_guesses(tmp_path, made.method(name, [{"top1": score, "top5": score}]), labels, [right])
        for name, score in (("softmax", 0.9), ("lapsum", 0.5), ("splitter", 0.7))
    ]
    found = count_classes(made.comparison(*compared), tmp_path, data, split(data, 0.25, 0.25, 0))
    assert found is not None
    assert found.method == "splitter"


def test_runs_that_kept_nothing_are_not_counted(tmp_path):
    labels, data = [0, 1], dataset([0, 1])
    parts = split(data, 0.25, 0.25, 0)
    tests = [{"top1": 0.5}] * 2
    softmax, splitter = made.method("softmax", tests), made.method("splitter", tests)
    assert count_classes(made.comparison(softmax), tmp_path, data, parts) is None
    assert count_classes(made.comparison(softmax, splitter), tmp_path, data, parts) is None
    right, wrong = [[0, 1], [1, 0]], [[1, 0], [1, 0]]
    softmax = made.with_guesses(tmp_path, softmax, labels, [right, right])
    splitter = made.with_guesses(tmp_path, splitter, labels, [right, wrong])
    (tmp_path / splitter.runs[0].folder / "test.safetensors").unlink()
    found = count_classes(made.comparison(softmax, splitter), tmp_path, data, parts)
    assert found is not None
    assert found.seeds == (1,)
    assert found.after["top1"] == (0, 1)
    assert np.sum(found.before["top1"]) == 2
