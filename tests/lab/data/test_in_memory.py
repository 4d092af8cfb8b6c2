"""Data from memory, kept in files that runs read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from anyk.lab.data import keep, load
from anyk.lab.errors import LabError

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((30, 5)).astype(np.float32)
Y = np.arange(30) % 3
PIXELS = RANDOM.integers(0, 256, (12, 3, 8, 9), dtype=np.uint8)
COLOURS = np.arange(12) % 4


def test_words_stay_as_they_are(tmp_path: Path) -> None:
    assert keep("glyphs:100", tmp_path / "no") == "glyphs:100"
    assert keep(Path("photos"), tmp_path / "no") == "photos"
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (X.astype(np.float64), Y.astype(np.uint8)),
        {"X": X, "y": Y, "X_test": None},
        {"train": (X, Y)},
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    ],
    ids=("arrays", "list", "tensors", "wide", "mapping", "train", "Dataset"),
)
def test_features(data: Any, tmp_path: Path) -> None:
    word = keep(data, tmp_path / "data")
    read = load(word)
    assert (read.kind, read.classes, read.test) == ("embeddings", ("0", "1", "2"), None)
    assert torch.equal(read.train.parts[0], torch.from_numpy(X))
    assert read.train.labels.tolist() == Y.tolist()
    assert keep(data, tmp_path / "data") == word
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_the_same_data_are_written_once_and_others_beside_them(tmp_path: Path) -> None:
    for first, second in (((X, Y), (X + 1, Y)), ((PIXELS, COLOURS), (PIXELS, COLOURS[::-1].copy()))):
        word = keep(first, tmp_path)
        (file,) = (path for path in Path(word).iterdir() if path.suffix == ".safetensors")
        written = file.stat()
        assert keep(first, tmp_path) == word
        assert file.stat() == written
        other = keep(second, tmp_path)
        assert other != word
        assert load(other).fingerprint != load(word).fingerprint
    assert keep({"X": X, "y": Y, "groups": Y}, tmp_path) not in (keep((X, Y), tmp_path), keep({"X": X, "y": Y[::-1]}, tmp_path))


def test_test_examples_names_and_groups(tmp_path: Path) -> None:
    texts = np.array(["ant", "bee", "cat"])[Y]
    for examples, labels in ((X, texts), (PIXELS, texts[:12])):
        users = np.array([f"user {number % 5}" for number in range(len(labels))])
        data = {"X": examples, "y": labels, "X_test": examples[:6], "y_test": labels[:6], "name": "my animals"}
        read = load(keep({**data, "groups": users, "groups_test": users[:6]}, tmp_path))
        assert read.name == "my animals"
        assert read.classes == ("ant", "bee", "cat")
        assert read.test is not None
        assert read.test.labels.tolist() == Y[:6].tolist()
        assert read.train.groups is not None
        assert read.train.groups.dtype == torch.int64
        assert read.train.groups.tolist() == [number % 5 for number in range(len(labels))]
        assert read.test.groups is not None
        assert read.test.groups.tolist() == [0, 1, 2, 3, 4, 0]
        assert load(keep(data, tmp_path)).test.groups is None  # type: ignore[union-attr]
    named = load(keep({"X": X, "y": Y, "classes": ["red", "green", "blue"]}, tmp_path))
    assert named.classes == ("red", "green", "blue")
    for pairs in ((X, Y, X[:9], Y[:9]), ((X, Y), (X[:9], Y[:9])), {"train": (X, Y), "test": (X[:9], Y[:9])}):
        assert len(load(keep(pairs, tmp_path)).test or ()) == 9


class Pictures(Dataset[Any]):
    """As torchvision's: images of Pillow, or what a transform makes of them."""

    classes = ("a", "b", "c", "d")

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        pixels = torch.from_numpy(PIXELS[place])
        if self.kind == "pillow":
            return Image.fromarray(PIXELS[place].transpose(1, 2, 0)), int(COLOURS[place])
        return (pixels if self.kind == "uint8" else pixels / 255), int(COLOURS[place])


@pytest.mark.parametrize(
    "data",
    [
        (PIXELS, COLOURS),
        (PIXELS.transpose(0, 2, 3, 1), COLOURS),
        (torch.from_numpy(PIXELS), COLOURS),
        (PIXELS / 255, COLOURS),
        Pictures("uint8"),
        Pictures("fractions"),
        Pictures("pillow"),
    ],
    ids=("channels first", "channels last", "tensor", "fractions", "Dataset", "ToTensor", "Pillow"),
)
def test_images(data: Any, tmp_path: Path) -> None:
    read = load(keep(data, tmp_path / "data"))
    assert read.kind == "images"
    assert torch.equal(read.train.parts[0], torch.from_numpy(PIXELS))
    assert read.classes == (("a", "b", "c", "d") if isinstance(data, Dataset) else ("0", "1", "2", "3"))
    assert read.mean == pytest.approx((PIXELS / 255).mean((0, 2, 3)), abs=1e-6)


def test_gray_images_have_one_channel_and_two_datasets_are_train_and_test(tmp_path: Path) -> None:
    assert load(keep((PIXELS[:, 0], COLOURS), tmp_path)).train.shape == (1, 8, 9)
    assert load(keep((PIXELS[:, 0, :, :, None], COLOURS), tmp_path)).train.shape == (1, 8, 9)
    both = load(keep((Pictures("uint8"), Pictures("pillow")), tmp_path))
    assert both.test is not None
    assert torch.equal(both.test.parts[0], both.train.parts[0])
    resized = load(keep(Pictures("uint8"), tmp_path), 16)
    assert resized.train.shape == (3, 16, 16)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(3), 0)])


class Odd(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (3, r"data should be a path, \(X, y\), .* but is a int"),
        ({"X": X}, "data has no y: give both X and y"),
        ({"x": X, "y": Y}, "data has the key 'x'; the keys are X, y"),
        ({"train": X}, r"train of data should be \(X, y\) or a torch Dataset, but is a ndarray"),
        ((X, Y[:9]), "data has 30 embeddings, but labels"),
        ((X[:, 0], Y), r"X should be features .*, but has the shape \(30,\)"),
        ((X[:, None, :, None].repeat(5, 1).repeat(5, 3), Y), "should hold images as uint8, but they are float32 from -"),
        ((np.zeros((4, 6, 7, 8), np.uint8), [0, 1, 0, 1]), "at most 4 channels"),
        ({"X": X, "y": Y, "groups": Y[:3]}, r"groups should have the shape \(30,\), .*, but has \(3,\)"),
        (Stream(), "the train Dataset should be map-style"),
        (Odd([(torch.zeros(3), 0, 1)]), r"should give \(example, label\), but gives a tuple for 0"),
        (Odd([(torch.zeros(3), 0), (torch.zeros(4), 1)]), r"one shape, but gives \(4,\) for 1, and \(3,\) before"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_one_line(data: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=problem) as caught:
        keep(data, tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


def test_a_damaged_file_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    word = keep((PIXELS, COLOURS), tmp_path)
    file = Path(word) / "images.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(LabError, match=r"images.safetensors is damaged \(its checksum is wrong\): delete it"):
        load(word)
    (tmp_path / "taken").touch()
    for data in ((X, Y), (PIXELS, COLOURS)):
        with pytest.raises(LabError, match="cannot be written"):
            keep(data, tmp_path / "taken")
