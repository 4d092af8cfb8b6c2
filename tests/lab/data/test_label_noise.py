"""Wrong labels: as many as asked and of the kind asked, where a model learns and is chosen, and nowhere else."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import lab_data
from anyk.lab.data import Dataset, Split, label_noise, split
from anyk.lab.data.tokens import OUT_OF_VOCABULARY
from anyk.lab.errors import LabError
from anyk.lab.run import training
from anyk.lab.run.batches import divide, read_data
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run

CLASSES = ("ant", "bee", "cat")
#: a bee is an ant as often as not, and a cat is never an ant
CONFUSIONS = np.array([[9.0, 1, 0], [5, 5, 0], [0, 3, 1]])


@pytest.fixture
def three() -> Dataset:
    labels = torch.arange(3).repeat(4000)
    examples = Split((torch.zeros(len(labels), 1),), labels)
    return Dataset("three", "embeddings", CLASSES, examples, None, "0123456789abcdef")


@pytest.fixture
def matrix(tmp_path: Path) -> str:
    np.save(tmp_path / "confusions.npy", CONFUSIONS)
    return str(tmp_path / "confusions.npy")


def test_labels_are_drawn_from_the_rows_of_the_matrix(three: Dataset, matrix: str) -> None:
    new = label_noise.drawn(three, matrix, 0)
    for true, row in enumerate(CONFUSIONS):
        counts = torch.bincount(new[three.train.labels == true], minlength=3).numpy()
        assert (counts[row == 0] == 0).all()
        expected = 4000 * row / row.sum()
        assert stats.chisquare(counts[row > 0], expected[row > 0]).pvalue > 1e-4
    assert torch.equal(new, label_noise.drawn(three, matrix, 0))
    assert not torch.equal(new, label_noise.drawn(three, matrix, 1))


def test_a_share_of_wrong_labels_is_spread_over_the_other_classes(three: Dataset) -> None:
    new = label_noise.drawn(three, 0.3, 0)
    for true in range(3):
        counts = torch.bincount(new[three.train.labels == true], minlength=3).numpy()
        expected = 4000 * np.where(np.arange(3) == true, 0.7, 0.15)
        assert stats.chisquare(counts, expected).pvalue > 1e-4
    assert (label_noise.drawn(three, 1.0, 0) != three.train.labels).all()


@pytest.mark.parametrize("own_test", [False, True])
def test_the_test_keeps_its_labels(three: Dataset, matrix: str, own_test: bool) -> None:
    if own_test:
        three = dataclasses.replace(three, test=three.train)
    parts = split(three, 0.1, 0.2, 0)
    noisy = label_noise.noisy(three, parts, matrix, 0)
    changed = noisy.train.labels != three.train.labels
    for index in (parts.train, parts.validation):
        assert 0.3 < float(changed[index].double().mean()) < 0.5
    assert int(changed.sum()) == int(changed[parts.train].sum() + changed[parts.validation].sum())
    assert torch.equal(parts.test.labels[parts.test_index], three.train.labels[parts.test_index])
    fewer = split(three, 0.1, 0.2, 0, train_fraction=0.5)
    same = label_noise.noisy(three, fewer, matrix, 0).train.labels
    assert torch.equal(same[fewer.train], noisy.train.labels[fewer.train])


def test_what_is_no_class_stays(matrix: str) -> None:
    labels = torch.tensor([0, OUT_OF_VOCABULARY, 2] * 50)
    examples = Split((torch.zeros(150, 1),), labels)
    dataset = Dataset("three", "embeddings", CLASSES, examples, None, "")
    for noise in (matrix, 0.9):
        new = label_noise.drawn(dataset, noise, 0)
        assert (new[1::3] == OUT_OF_VOCABULARY).all()
        assert (new[0::3] != 0).any()
        assert int(new.max()) <= 2


def test_the_remark_and_the_fingerprint(three: Dataset, matrix: str, tmp_path: Path) -> None:
    found = label_noise.marked(three, matrix, 0)
    [remark] = found.remarks
    wrong = float((label_noise.drawn(three, matrix, 0) != three.train.labels).double().mean())
    assert f"wrong labels, drawn from confusions.npy, for {wrong:.1%} of the examples" in remark
    assert len(found.fingerprint) == 16
    assert found.fingerprint != three.fingerprint
    np.save(tmp_path / "others.npy", 100 * CONFUSIONS)  # the same shares
    assert label_noise.marked(three, str(tmp_path / "others.npy"), 0).fingerprint == found.fingerprint
    np.save(tmp_path / "confusions.npy", CONFUSIONS + 1)
    assert label_noise.marked(three, matrix, 0).fingerprint != found.fingerprint
    assert label_noise.marked(three, 0.0, 0) is three
    assert "drawn at random" in label_noise.marked(three, 0.2, 0).remarks[0]


@pytest.mark.parametrize(
    "text",
    [
        "9,1,0\n5,5,0\n0,3,1\n",
        ",cat,ant,bee\nbee,0,5,5\ncat,1,0,3\nant,0,9,1\n",
        "\ufeff,ant,bee,cat\r\nant,9,1,0\r\nbee,5,5,0\r\ncat,0,3,1\r\n",
    ],
)
def test_matrices_as_tables(text: str, tmp_path: Path) -> None:
    (tmp_path / "confusions.csv").write_text(text, newline="")
    np.testing.assert_allclose(label_noise.read(tmp_path / "confusions.csv", CLASSES), CONFUSIONS / [[10], [10], [4]])


def test_what_nobody_answered_may_have_no_column(tmp_path: Path) -> None:
    (tmp_path / "confusions.csv").write_text(",bee,cat\nbee,3,1\ncat,1,3\nant,2,2\n")
    np.testing.assert_allclose(
        label_noise.read(tmp_path / "confusions.csv", CLASSES), [[0, 0.5, 0.5], [0, 0.75, 0.25], [0, 0.25, 0.75]]
    )


def test_classes_whose_names_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "confusions.csv").write_text(",1,0\n0,2,8\n1,6,4\n")
    np.testing.assert_allclose(label_noise.read(tmp_path / "confusions.csv", ("0", "1")), [[0.8, 0.2], [0.4, 0.6]])


WRONG: dict[str, tuple[Any, str]] = {
    "shape.npy": (np.ones((2, 3)), r"should be 3 x 3, a row and a column for each class, but is 2 x 3"),
    "vector.npy": (np.ones(3), r"should be 3 x 3.* but is 3"),
    "number.npy": (np.array(1.0), r"is a single number"),
    "below.npy": (np.array([[1.0, 0, 0], [0, 2, -1], [0, 0, 1]]), r"row 1 \(bee\) has -1"),
    "nan.npy": (np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, np.nan]]), r"row 2 \(cat\) has nan"),
    "empty.npy": (np.diag([1.0, 0, 1]), r"row 1 \(bee\) has none above 0"),
    "words.npy": (np.array([["a"]]), "should hold a confusion matrix"),
    "pickle.npy": (np.array([[{}]], dtype=object), "should hold a confusion matrix"),
    "nothing.csv": ("", "it is empty"),
    "ragged.csv": ("1,2,3\n1,2\n", "its lines have 2 to 3 values"),
    "names.csv": (
        ",ant,bee,dog\nant,1,1,1\nbee,1,1,1\ncat,1,1,1\n",
        "first line should name the 3 classes, but has 'dog'",
    ),
    "rows.csv": (
        ",ant,bee,cat\nant,1,1,1\nbee,1,1,1\nbee,1,1,1\n",
        "first column should name the 3 classes, but has no class 'cat'",
    ),
    "twice.csv": (",ant,bee,cat\nant,1,1,1\nbee,1,1,1\ncat,1,1,1\ncat,1,1,1\n", "first column .* but has a class twice"),
    "text.csv": ("1,2,x\n1,2,3\n1,2,3\n", "should"),
    "matrix.txt": ("1", r"a number or a confusion matrix in .npy or .csv, but is .*matrix.txt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_confusion_matrix_is_refused(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    else:
        np.save(tmp_path / name, content)
    with pytest.raises(LabError, match=message):
        label_noise.read(tmp_path / name, CLASSES)


def test_a_missing_matrix_is_named_before_the_first_step(tmp_path: Path) -> None:
    data = lab_data.write_embedding_set(tmp_path / "points")
    with pytest.raises(LabError, match=r"label_noise .*none.npy does not exist"):
        training.check(Config(data=str(data), label_noise=str(tmp_path / "none.npy")))
    with pytest.raises(LabError, match=r"label_noise should be between 0 and 0\.99"):
        Config(data=str(data), label_noise=1.5)


def test_a_run_learns_and_chooses_by_the_wrong_labels_and_is_tested_by_the_right_ones(tmp_path: Path) -> None:
    """Every label is that of the next class: what is learnt is right by validation's wrong labels, and wrong by the test's."""
    data = lab_data.write_embedding_set(tmp_path / "points")
    config = Config(data=str(data), epochs=6, batch_size=32, learning_rate=1e-2)
    classes = len(read_data(config).classes)
    np.save(tmp_path / "next.npy", np.roll(np.eye(classes), 1, axis=1))
    config = config.replace(label_noise=str(tmp_path / "next.npy"))
    result = training.train(config, tmp_path / "run")
    assert result["validation"]["top1"] > 0.6
    assert result["test"]["top1"] < 0.1
    dataset = read_data(config)
    parts = divide(dataset, config)
    saved = Run(tmp_path / "run").load_tensors("test.safetensors")
    assert saved is not None
    assert len(saved[0]["ranks"]) == len(parts.test_index)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data"]["fingerprint"] == dataset.fingerprint
