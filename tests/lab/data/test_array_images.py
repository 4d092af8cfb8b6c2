"""Images in an array file: MedMNIST's layout, plain X and y, what does not fit, and the commands from one end to the other."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lab_data
from anyk.lab.data import load, split
from anyk.lab.errors import LabError
from anyk.lab.run import models

RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 256, (12, 9, 8, 3), dtype=np.uint8)
GRAY = RANDOM.integers(0, 256, (12, 9, 8), dtype=np.uint8)
Y = np.arange(12) % 4


def test_the_layout_of_medmnist(tmp_path: Path) -> None:
    file = lab_data.write_images(tmp_path / "blobs.npz")
    stored = np.load(file)
    dataset = load(str(file))
    assert (dataset.name, dataset.kind, dataset.classes[5]) == ("blobs", "images", "kind 5")
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.test)) == (60 + 18, 24)
    parts = split(dataset, 0.5, 0.5, 0)
    assert parts.validation.tolist() == list(range(60, 78))
    assert parts.test is dataset.test
    for name, examples, index in (
        ("train", dataset.train, parts.train),
        ("val", dataset.train, parts.validation),
        ("test", dataset.test, parts.test_index),
    ):
        taken = examples.take(index)
        assert taken.is_contiguous()
        assert np.array_equal(taken.permute(0, 2, 3, 1).numpy(), stored[f"{name}_images"])
        assert examples.labels[index].tolist() == stored[f"{name}_labels"][:, 0].tolist()
    # Of the images to train with, and of no others.
    shares = stored["train_images"] / 255
    assert dataset.mean == pytest.approx(shares.mean((0, 1, 2)))
    assert dataset.std == pytest.approx(shares.std((0, 1, 2)))
    # A batch with images of both parts comes in the order that was asked for.
    index = torch.tensor([61, 3, 77, 0])
    both = np.concatenate([stored["train_images"], stored["val_images"]])
    assert np.array_equal(dataset.train.take(index).permute(0, 2, 3, 1).numpy(), both[index])


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".npy"])
@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        (GRAY, (1, 9, 8)),
        (GRAY[..., None], (1, 9, 8)),
        (COLOUR, (3, 9, 8)),
        (np.asfortranarray(COLOUR), (3, 9, 8)),
        (COLOUR.transpose(0, 3, 1, 2), (3, 9, 8)),
    ],
    ids=["gray", "one channel", "colour", "other strides", "channels first"],
)
def test_examples_of_bytes_in_three_or_four_dimensions(
    tmp_path: Path, stored: Any, shape: tuple[int, ...], suffix: str
) -> None:
    file = tmp_path / f"a{suffix}"
    if suffix == ".npz":
        np.savez(file, X=stored, y=Y)
    elif suffix == ".npy":
        np.save(file, stored)
        np.save(tmp_path / "a_labels.npy", Y)
    else:
        torch.save({"images": torch.tensor(stored), "labels": torch.tensor(Y)}, file)
    dataset = load(str(file))
    assert (dataset.kind, dataset.test, dataset.validation) == ("images", None, None)
    assert tuple(dataset.train.shape) == shape
    plain = GRAY[:, None] if shape[0] == 1 else COLOUR.transpose(0, 3, 1, 2)
    assert np.array_equal(dataset.train.parts[0].numpy(), plain)
    assert dataset.train.parts[0].is_contiguous()
    parts = split(dataset, 0.25, 0.25, 0)
    assert (len(parts.train), len(parts.validation), len(parts.test_index)) == (7, 2, 3)


def test_the_test_is_divided_off_where_there_is_a_validation_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=COLOUR, y=Y, groups=Y, X_valid=COLOUR[:5], y_valid=Y[:5])
    dataset = load(str(tmp_path / "a.npz"))
    parts = split(dataset, 0.1, 0.25, 0)
    assert parts.validation.tolist() == [12, 13, 14, 15, 16]
    assert sorted([*parts.train.tolist(), *parts.test_index.tolist()]) == list(range(12))
    assert len(parts.test_index) == 3
    assert dataset.train.groups is not None
    assert dataset.train.groups.tolist() == [*Y, 4, 5, 6, 7, 8]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    def fingerprint(**arrays_: Any) -> str:
        np.savez(tmp_path / "a.npz", **{"X": COLOUR, "y": Y, **arrays_})
        return load(str(tmp_path / "a.npz")).fingerprint

    held = {"X_val": COLOUR[:3], "y_val": Y[:3]}
    given = [{}, {"y": Y[::-1]}, {"X": COLOUR[::-1]}, held, {**held, "y_val": Y[1:4]}, {**held, "X_val": COLOUR[1:4]}]
    given += [{"X_test": COLOUR[:3], "y_test": Y[:3]}, {"classes": list("abcd")}]
    given += [{"X": np.concatenate([COLOUR, COLOUR[:3]]), "y": np.concatenate([Y, Y[:3]])}]
    assert len({fingerprint(**each) for each in given}) == len(given)
    assert fingerprint() == fingerprint()


PAIR = {"train_images": COLOUR, "train_labels": Y}
TEST = {"test_images": COLOUR[:4], "test_labels": Y[:4]}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({**PAIR, "train_images": COLOUR / 255}, r"have \(12, 9, 8, 3\) in float64; images are uint8"),
        ({**PAIR, **TEST, "test_images": COLOUR[:4] / 255}, r"\(test\) should be uint8, .* but are float64"),
        ({**PAIR, **TEST, "test_images": GRAY[:4].reshape(4, -1)}, r"\(test\) should have the shape .* have \(4, 72\)"),
        ({**PAIR, "train_images": np.repeat(COLOUR, 2, 3)[..., :4]}, r"width, 1 or 3\), but have \(12, 9, 8, 4\)"),
        ({**PAIR, "train_images": COLOUR[..., None]}, r"should have the shape .*, but have \(12, 9, 8, 3, 1\)"),
        ({**PAIR, "train_labels": Y[:11]}, "has 12 images for train, but 11 labels"),
        ({**PAIR, "val_images": COLOUR[:0], "val_labels": Y[:0]}, "has no examples for val"),
        ({**PAIR, **TEST, "test_images": COLOUR[:4, 1:]}, r"it is \(3, 8, 8\) for test, but \(3, 9, 8\) for train"),
        ({**PAIR, "class_names": "abcd"}, r"class names in .* should be a list, but have the shape \(\)"),
        ({**PAIR, "val_images": COLOUR[:4], "val_labels": Y[:4] + 1}, "has the label 4, but there are 4 classes"),
        ({**PAIR, **TEST, "test_labels": np.array(list("abcd"))}, "numbers as labels in one part and texts in the other"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, stored: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **stored)
    with pytest.raises(LabError, match=message) as caught:
        load(str(tmp_path / "a.npz"))
    assert "a.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_commands_refuse_what_they_cannot_do(anyk: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", X=COLOUR[:1], y=Y[:1])
    np.savez(tmp_path / "small.npz", X=COLOUR[:, :4, :4], y=Y)
    np.savez(tmp_path / "few.npz", X=COLOUR, y=Y)
    two = {f"{name}{part}": values for name, values in (("X", COLOUR[:2]), ("y", [0, 1])) for part in ("", "_val", "_test")}
    np.savez(tmp_path / "lonely.npz", **two)
    lab_data.write_images(tmp_path / "blobs.npz")
    for words, message in (
        (("import", "blobs.npz"), "blobs.npz holds images, but import makes embedding sets: give the file itself to train"),
        (("train", "one.npz"), "one has one class only (0): there is nothing to tell apart"),
        (("train", "small.npz"), "model cnn needs images of at least 8 x 8 pixels, but small has 4 x 4"),
        (("train", "blobs.npz", "--width", "0"), "width should be between 1 and"),
        (
            ("train", "few.npz", "--p-k", ".5", ".5"),
            "two examples in each step for images of 9 x 8 pixels, but there are 9 train",
        ),
        (("train", "lonely.npz", "--loss", "softmax", "--p-k", "1"), "there are 2 training examples in batches of 1"),
    ):
        code, out, err = anyk(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
        assert message in err
    assert not (tmp_path / "blobs").exists()


def test_from_a_file_to_a_report_and_guesses(anyk: Any, tmp_path: Path) -> None:
    lab_data.write_images(tmp_path / "blobs.npz")
    quick = ("--epochs", "1", "--batch-size", "20", "--budget", "1", "--seeds", "1", "--width", "4", "--ks", "1,3")
    code, out, err = anyk("compare", "blobs.npz", "--losses", "ksubset", *quick, "--out", "out", "--quiet")
    assert (code, err) == (3, "")  # cut short, nothing is decided
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"]["width"] == 4
    told = next((tmp_path / "out" / "runs").rglob("result.json"))
    facts = json.loads(told.read_text())["data"]
    assert (facts["kind"], facts["image_size"]) == ("images", [10, 10])
    assert (facts["train"], facts["validation"], facts["test"]) == (60, 18, 24)
    assert "data:image/png;base64," in (tmp_path / "out" / "report.html").read_text()
    model = models.load(tmp_path / "out")
    assert (model.plan.model, model.plan.width, model.plan.shape) == ("cnn", 4, (3, 10, 10))
    code, out, err = anyk("predict", "out", "blobs.npz", "--k", "2")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    pixels = torch.from_numpy(np.load(tmp_path / "blobs.npz")["test_images"]).permute(0, 3, 1, 2)
    assert [row["guess_1"] for row in rows] == [guesses[0][0] for guesses in model.guesses(pixels, 2)]


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_another_size(anyk: Any, channels: int, tmp_path: Path) -> None:
    """The model takes images as the file has them, and brings them to its size as the training did."""
    lab_data.write_images(tmp_path / "blobs.npz", size=12, channels=channels)
    words = ("--image-size", "8", "--augment", "crop", "flip", "--epochs", "1", "--width", "4", "--out", "run", "--quiet")
    assert anyk("train", "blobs.npz", *words)[0] == 0
    resized = load("blobs.npz", 8)
    assert tuple(resized.train.shape) == (channels, 8, 8)
    assert resized.validation is not None
    assert resized.validation.tolist() == list(range(60, 78))
    assert resized.mean == pytest.approx((resized.train.take(resized.training) / 255).mean((0, 2, 3)).tolist(), abs=1e-6)
    assert resized.test is not None
    want = models.load(tmp_path / "run").guesses(resized.test.parts[0], 3)
    code, out, err = anyk("predict", "run", "blobs.npz", "--k", "3", "--batch-size", "5")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [[row[f"guess_{n}"] for n in (1, 2, 3)] for row in rows] == [[name for name, _ in each] for each in want]
    for wrong, message in (
        (np.zeros((2, 12, 12, 4 - channels), np.uint8), "should have one array of the shape"),
        (
            np.zeros((2, 12, 12, channels), np.float32),
            "images in wrong.npy should be uint8, pixels from 0 to 255, but are float32",
        ),
        (np.zeros((0, 12, 12, channels), np.uint8), "wrong.npy has no examples"),
    ):
        np.save(tmp_path / "wrong.npy", wrong)
        code, out, err = anyk("predict", "run", "wrong.npy")
        assert (code, err.count("\n")) == (1, 1)
        assert message in err
