"""Hits and confusions of each class against counts made by hand; examples that moved, each with where to find it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import lab_data
import made
from anyk.lab.comparison import changed_predictions
from anyk.lab.comparison.changed_predictions import SHOWN_EXAMPLES, THUMBNAIL, count_classes, find_moves
from anyk.lab.comparison.outcome import Confusion
from anyk.lab.data import Dataset, Split, image_folders, split, tokens
from anyk.lab.run.config import Config

CLASSES = tuple("abcdefgh")


def dataset(labels, **changes):
    train = Split((torch.zeros(16, 2),), torch.arange(8).repeat(2))
    test = Split((torch.zeros(len(labels), 2),), torch.tensor(labels))
    return Dataset("made", "embeddings", CLASSES, train, changes.pop("test", test), "", **changes)


# Classes -----------------------------------------------------------------------------------------------------------------


def counted(out, labels, runs):
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
    assert found.names == ("a", "b", "d")  # there is no c to test
    assert found.examples == (2, 2, 1)
    assert found.before == {"top1": (2, 3, 2), "top2": (4, 3, 2)}
    assert found.after == {"top1": (2, 3, 1), "top2": (2, 4, 2)}
    assert set(found.confusions) == {
        Confusion("a", "b", 2, 1),
        Confusion("b", "a", 1, 1),
        Confusion("a", "d", 0, 1),
        Confusion("d", "a", 0, 1),
    }


def test_targets_that_are_no_class_belong_to_none(tmp_path):
    rows = [[0, 1], [3, 1], [1, 0]]
    found = counted(tmp_path, [0, -1, 1], {"softmax": [rows], "splitter": [rows]})
    assert found is not None
    assert (found.names, found.examples) == (("a", "b"), (1, 1))
    assert found.before == found.after == {"top1": (1, 1), "top2": (1, 1)}
    assert found.confusions == ()


def test_only_the_most_frequent_confusions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(changed_predictions, "KEPT_CONFUSIONS", 1)
    labels = [0, 0, 1, 2]
    runs = {"softmax": [[[1, 0], [1, 0], [2, 1], [2, 0]]], "splitter": [[[0, 1], [1, 0], [0, 1], [0, 2]]]}
    found = counted(tmp_path, labels, runs)
    assert found is not None
    # The first of each; of equally frequent ones the first class.
    assert found.confusions == (Confusion("a", "b", 2, 1),)


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
    softmax, splitter = (made.method(name, [{"top1": 0.5}] * 2) for name in ("softmax", "splitter"))
    right, wrong = [[0, 1], [1, 0]], [[1, 0], [1, 0]]
    softmax = made.with_guesses(tmp_path, softmax, labels, [right, right])
    splitter = made.with_guesses(tmp_path, splitter, labels, [right, wrong])
    (tmp_path / splitter.runs[0].folder / "test.safetensors").unlink()
    found = count_classes(made.comparison(softmax, splitter), tmp_path, data, parts)
    assert found is not None
    assert found.seeds == (1,)
    assert found.after["top1"] == (0, 1)
    assert np.sum(found.before["top1"]) == 2


# Examples ----------------------------------------------------------------------------------------------------------------


def moved(out, data, before, after, config=None, **changes):
    """The moves between two methods of one seed, of which the guesses are given."""
    parts = split(data, 0.25, 0.25, 0)
    labels = parts.test.labels[parts.test_index].tolist()
    accuracies = [{"top1": 0.5, "top2": 0.5, "top5": 0.5}]
    compared = [
        made.with_guesses(out, made.method(name, accuracies, config=config), labels, [guesses])
        for name, guesses in (("softmax", before), ("splitter", after))
    ]
    return find_moves(made.comparison(*compared, **{"ks": (1, 2), **changes}), out, data, parts)


FIRST, SECOND, THIRD = [0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 0, 3]  # the guesses for class a


def test_wins_and_losses_are_counted_at_the_largest_k(tmp_path):
    labels = [0] * 6
    before = [FIRST, SECOND, THIRD, THIRD, SECOND, THIRD]
    after = [SECOND, THIRD, FIRST, SECOND, THIRD, THIRD]
    found = moved(tmp_path, dataset(labels), before, after)
    assert (found.method, found.k, found.seed, found.into, found.out_of) == ("splitter", 2, 0, 2, 2)
    assert [(one.source, one.moved, one.ranks) for one in found.examples] == [
        ("row 2", "in", (3, 1)),
        ("row 3", "in", (3, 2)),
        ("row 1", "out", (2, 3)),
        ("row 4", "out", (2, 3)),
    ]
    assert [guess.name for guess in found.examples[0].after] == ["a", "b"]
    assert {one.target for one in found.examples} == {"a"}
    found = moved(tmp_path, dataset(labels), before, after, ks=(1,))
    assert (found.k, found.into, found.out_of) == (1, 1, 1)


def test_as_many_losses_as_wins_are_shown(tmp_path):
    labels = [0] * 90
    found = moved(tmp_path, dataset(labels), [THIRD] * 60 + [FIRST] * 30, [FIRST] * 60 + [THIRD] * 30)
    assert (found.into, found.out_of) == (60, 30)
    shown = [one.moved for one in found.examples]
    assert shown == ["in"] * SHOWN_EXAMPLES + ["out"] * SHOWN_EXAMPLES
    rows = [int(one.source.split()[1]) for one in found.examples]
    # From the first to the last of them.
    assert (rows[0], rows[SHOWN_EXAMPLES - 1], rows[SHOWN_EXAMPLES], rows[-1]) == (0, 59, 60, 89)
    assert len(set(rows)) == len(rows)


def test_probabilities_are_asked_for_what_is_shown_only(tmp_path, monkeypatch):
    asked = []

    def probabilities(folder, dataset, examples, index, config):
        asked.append(index.tolist())
        return torch.arange(8.0).expand(len(index), 8) / 10

    monkeypatch.setattr(changed_predictions, "_probabilities", probabilities)
    found = moved(tmp_path, dataset([0] * 3), [FIRST, THIRD, FIRST], [FIRST, SECOND, FIRST])
    assert asked == [[1], [1]]
    [example] = found.examples
    assert [guess.probability for guess in example.before] == pytest.approx([0.1, 0.2])  # of the classes b and c
    assert [guess.name for guess in example.after] == ["b", "a"]


def test_a_model_that_cannot_be_made_has_still_guessed(tmp_path):
    found = moved(tmp_path, dataset([0]), [THIRD], [FIRST])
    assert [guess.probability for guess in found.examples[0].before] == [None, None]


def test_rows_are_those_of_the_data_where_there_is_no_test_split(tmp_path):
    data = dataset([], test=None)
    index = split(data, 0.25, 0.25, 0).test_index
    labels = data.train.labels[index].tolist()
    wrong = [[(label + 1) % 8, (label + 2) % 8, label] for label in labels]
    found = moved(tmp_path, data, wrong, [row[::-1] for row in wrong])
    assert {one.source for one in found.examples} <= {f"row {place}" for place in index.tolist()}
    assert [one.target for one in found.examples] == [CLASSES[label] for label in labels][: len(found.examples)]


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_small_and_have_rows(tmp_path, channels):
    data = lab_data.image_set(classes=4, per_class=2, channels=channels, size=200)
    wrong = [[(label + 1) % 4, (label + 2) % 4, label] for label in data.test.labels.tolist()]
    found = moved(tmp_path, data, wrong, [row[::-1] for row in wrong])
    image = Image.open(io.BytesIO(found.examples[3].image))
    assert image.size == (THUMBNAIL, THUMBNAIL)
    assert image.mode == ("L" if channels == 1 else "RGB")
    assert found.examples[3].source == "row 3"


def test_examples_of_a_folder_of_images_are_files(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    for number, name in enumerate(CLASSES):
        for part in ("train", "train2", "test"):
            folder = tmp_path / "images" / part.rstrip("2") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (30 * number, 0, 0)).save(folder / f"{part}.png")
    (tmp_path / "images" / "test" / "b" / "a broken one.png").write_bytes(b"")
    data = image_folders.load(tmp_path / "images")
    wrong = [[(label + 1) % 8, (label + 2) % 8, label] for label in range(8)]
    after = [row[::-1] for row in wrong]
    found = moved(tmp_path, data, wrong, after)
    assert [one.source for one in found.examples] == [f"test/{name}/test.png" for name in CLASSES]
    assert [one.target for one in found.examples] == list(CLASSES)
    # A file that has gone would put the others in the wrong places.
    (tmp_path / "images" / "test" / "a" / "test.png").unlink()
    assert [one.source for one in moved(tmp_path, data, wrong, after).examples] == [f"row {row}" for row in range(8)]


@pytest.mark.parametrize(("kind", "most"), [("python", 32), ("items", 8)])
def test_of_sequences_the_tokens_before_are_shown(tmp_path, kind, most):
    sequences = [["a", "b", "a", "b"], ["b", "z", "a", "b", "a"], ["a", "b"] * 40, ["b", "a"]]
    stream, begins = lab_data.numbered(sequences, CLASSES)
    data = tokens.dataset_of("made", CLASSES, stream, begins, tokens.last_parts(begins), out_of_vocabulary=True, tokens=kind)
    right, wrong = [[1, 2, 0], [0, 2, 1], [1, 2, 0]], [[3, 2, 1], [3, 2, 0], [3, 2, 1]]
    found = moved(tmp_path, data, wrong, right, Config(context=3))
    assert [one.source for one in found.examples] == ["sequence 1, token 4", "sequence 2, token 5", "sequence 3, token 80"]
    assert [one.context for one in found.examples] == [("a", "b", "a"), ("…", "a", "b"), ("a", "b", "a")]
    assert [one.target for one in found.examples] == ["b", "a", "b"]
    found = moved(tmp_path, data, wrong, right, Config(context=50))
    assert [len(one.context) for one in found.examples] == [3, 4, most]
    assert found.examples[1].context == ("b", "…", "a", "b")
    # A target that is no class is in nobody's list, so it does not move.
    stream[-1 - len(sequences[3])] = 8
    unseen = tokens.dataset_of("made", CLASSES, stream, begins, tokens.last_parts(begins), out_of_vocabulary=True, tokens=kind)
    assert unseen.test.labels.tolist() == [1, 0, tokens.OUT_OF_VOCABULARY]
    assert moved(tmp_path, unseen, wrong, right, Config(context=3)).into == 2


def test_nothing_to_compare_with(tmp_path):
    data = dataset([0])
    parts = split(data, 0.25, 0.25, 0)
    softmax, without = (made.method(name, [{"top1": 0.5}]) for name in ("softmax", "splitter"))
    for find in (find_moves, count_classes):
        assert find(made.comparison(softmax), tmp_path, data, parts) is None
        assert find(made.comparison(softmax, without), tmp_path, data, parts) is None
