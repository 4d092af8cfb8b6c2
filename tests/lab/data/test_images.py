"""Images of a size that was asked for."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import lab_data
from anyk.lab.data import images, load
from anyk.lab.errors import LabError


def test_a_folder_is_read_at_the_size(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(3):
            Image.effect_noise((90, 60), 60).save(tmp_path / "set" / name / f"{number}.png")
    spec = str(tmp_path / "set")
    usual, asked = load(spec), load(spec, 48)
    assert tuple(usual.train.shape) == (3, 32, 32)
    assert tuple(asked.train.shape) == (3, 48, 48)
    assert usual.fingerprint != asked.fingerprint
    assert torch.equal(asked.train.parts[0][0], images.read_pixels(tmp_path / "set" / "a" / "0.png", 48))


def test_other_images_are_resized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = lab_data.image_set(size=12)
    half = images.resized(dataset, 6)
    assert tuple(half.train.shape) == (1, 6, 6)
    assert half.test is not None
    assert len(half.test) == len(dataset.test or ())
    # Half the size: near the means of four pixels, and with statistics of its own.
    means = torch.nn.functional.avg_pool2d(dataset.train.parts[0].float(), 2)
    assert float((half.train.parts[0].float() - means).abs().mean()) < 12
    assert half.std != dataset.std
    assert half.fingerprint != dataset.fingerprint
    assert images.resized(dataset, 12) is dataset
    monkeypatch.setattr(images, "resize", lambda *_: pytest.fail("it was made again"))
    assert torch.equal(images.resized(dataset, 6).train.parts[0], half.train.parts[0])


def test_of_images_that_are_no_squares_the_middle_is_taken() -> None:
    wide = torch.zeros(2, 1, 8, 16, dtype=torch.uint8)
    wide[..., 4:12] = 200
    assert bool((images.resize(wide, 8) == 200).all())


def test_shapes_that_hold_no_images() -> None:
    for shape in ((5,), (5, 3), (5, 4, 4, 4), (5, 4, 4, 4, 3)):
        assert images.image_shape(shape) is None


def test_features_have_no_size(tmp_path: Path) -> None:
    points = lab_data.write_embedding_set(tmp_path / "points")
    with pytest.raises(LabError, match="image_size resizes images, but points holds embeddings: leave it out"):
        load(str(points), 64)
