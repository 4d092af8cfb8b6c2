"""Folders of images: layout, sizes and modes, damaged files, empty classes."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from anyk.lab import data
from anyk.lab.data import image_folders, images
from anyk.lab.errors import LabError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def save(path, color=RED, size=(40, 50), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        save(tmp_path / "set" / "red" / f"{number}.png", RED)
        save(tmp_path / "set" / "blue" / f"{number}.jpg", BLUE, (64, 30))
    return tmp_path / "set"


def test_one_folder_a_class(folder):
    dataset = image_folders.load(folder)
    assert dataset.name == "set"
    assert dataset.classes == ("blue", "red")
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.train.parts[0].shape == (6, 3, 32, 32)
    assert dataset.train.parts[0][-1, :, 5, 5].tolist() == [255, 0, 0]
    assert dataset.train.parts[0][0, :, 5, 5].tolist() == pytest.approx([0, 0, 254], abs=3)
    assert dataset.test is None
    assert dataset.mean == pytest.approx((0.5, 0.0, 0.5), abs=0.01)
    assert image_folders.load(folder, size=8).train.parts[0].shape == (6, 3, 8, 8)


def test_train_and_test(folder, tmp_path, caplog):
    (tmp_path / "both").mkdir()
    folder.rename(tmp_path / "both" / "train")
    save(tmp_path / "both" / "test" / "red" / "a.png")
    save(tmp_path / "both" / "val" / "red" / "a.png")
    dataset = image_folders.load(tmp_path / "both")
    assert dataset.classes == ("blue", "red")
    assert len(dataset.train) == 6
    assert dataset.test.labels.tolist() == [1]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/both/val is left out: the test set is {tmp_path}/both/test."
    ]


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_validation_images_are_the_test_where_there_is_no_other(folder, tmp_path, caplog, name):
    (tmp_path / "both").mkdir()
    folder.rename(tmp_path / "both" / "train")
    save(tmp_path / "both" / name / "red" / "a.png")
    for _ in range(2):  # the note comes once
        assert image_folders.load(tmp_path / "both").test.labels.tolist() == [1]
    (note,) = (record.getMessage() for record in caplog.records)
    assert note.startswith(f"{tmp_path}/both/{name} is taken as the test set, as there is no {tmp_path}/both/test")


def test_folders_inside_of_a_class_are_named(folder, tmp_path, caplog):
    save(folder / "red" / "dark" / "a.png")
    save(folder / "red" / "light" / "a.png")
    assert image_folders.load(folder).train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    (message,) = caplog.messages
    assert "red/dark/a.png is of the class 'red'" in message


def test_decoded_once_and_again_after_a_change(folder, monkeypatch):
    before = image_folders.load(folder)
    monkeypatch.setattr(images, "read_pixels", lambda path, size: torch.full((3, size, size), 7, dtype=torch.uint8))
    assert image_folders.load(folder).fingerprint == before.fingerprint
    os.utime(folder / "red" / "0.png", ns=(1, 1))
    assert image_folders.load(folder).fingerprint != before.fingerprint


def test_unreadable_images_are_named_and_skipped(folder, caplog):
    whole = (folder / "blue" / "0.jpg").read_bytes()
    (folder / "blue" / "0.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "red" / "0.png").write_bytes(b"")
    (folder / "red" / "text.png").write_text("not an image")
    (folder / "red" / "notes.txt").write_text("not meant as an image")
    (folder / "red" / "._0.png").write_text("the Mac was here")
    dataset = image_folders.load(folder)
    assert dataset.train.labels.tolist() == [0, 0, 1, 1]
    assert "left out (3): " in caplog.text
    for name in ("0.jpg", "0.png", "text.png"):
        assert name in caplog.text


def test_unreadable_images_are_known_again_from_the_cache(folder, monkeypatch):
    (folder / "red" / "0.png").write_bytes(b"")
    first = image_folders.load(folder)
    assert first.unreadable == ("red/0.png",)
    monkeypatch.setattr(images, "read_pixels", None)
    again = image_folders.load(folder)
    assert (again.unreadable, again.fingerprint) == (first.unreadable, first.fingerprint)
    assert image_folders.files(again) == (["blue/0.jpg", "blue/1.jpg", "blue/2.jpg", "red/1.png", "red/2.png"], None)


def test_a_cache_that_cannot_be_written_is_told_once(folder, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert len(image_folders.load(folder).train) == 6
    (message,) = caplog.messages
    assert message.startswith(f"The prepared data could not be kept in {tmp_path}/file/cache for the next run: Not a directory")


def test_all_kinds_of_pixels(tmp_path):
    folder = tmp_path / "kinds"
    save(folder / "a" / "0-gray.png", 100, mode="L")
    Image.fromarray(np.full((40, 40), 100 * 256, np.uint16)).save(folder / "a" / "1-deep.png")
    save(folder / "a" / "2-clear.png", (9, 9, 9, 0), mode="RGBA")
    palette = Image.new("P", (40, 40), 0)
    palette.putpalette([10, 20, 30])
    palette.save(folder / "a" / "3-palette.png", transparency=bytes([255]))
    save(folder / "a" / "4-tiny.png", RED, (1, 1))
    save(folder / "a" / "5-cmyk.jpg", (0, 255, 255, 0), mode="CMYK")
    sideways = Image.new("RGB", (64, 32), RED)
    sideways.paste(BLUE, (32, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to see it upright
    sideways.save(folder / "a" / "6-turned.png", exif=exif)
    images = image_folders.load(folder).train.parts[0]
    assert images[:6, :, 16, 16].tolist() == [
        [100] * 3,
        [100] * 3,
        [255] * 3,
        [10, 20, 30],
        [255, 0, 0],
        pytest.approx([255, 0, 0], abs=4),
    ]
    assert images[6, :, 2, 16].tolist() == [255, 0, 0]
    assert images[6, :, 29, 16].tolist() == [0, 0, 255]


def test_errors(folder, tmp_path):
    with pytest.raises(LabError, match="nowhere is not a folder"):
        image_folders.load(tmp_path / "nowhere")
    (folder / "green").mkdir()
    with pytest.raises(LabError, match="no readable training images of the class 'green'"):
        image_folders.load(folder)
    (folder / "green" / "0.png").write_text("not an image")
    with pytest.raises(LabError, match="class 'green'"):
        image_folders.load(folder)
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(LabError, match="empty has no images"):
        image_folders.load(tmp_path / "empty")
    with pytest.raises(LabError, match="no images"):
        data.load(str(tmp_path / "empty"))


def test_test_classes_are_training_classes(folder, tmp_path):
    (tmp_path / "both").mkdir()
    folder.rename(tmp_path / "both" / "train")
    (tmp_path / "both" / "test" / "red").mkdir(parents=True)
    with pytest.raises(LabError, match=r"test has no readable images"):
        image_folders.load(tmp_path / "both")
    save(tmp_path / "both" / "test" / "green" / "a.png")
    with pytest.raises(LabError, match=r"green is a class that .*train does not have"):
        image_folders.load(tmp_path / "both")
