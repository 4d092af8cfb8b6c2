import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from anyk.lab.config import DataFields
from anyk.lab.data import glyphs, images
from anyk.lab.data.prepare import prepare
from anyk.lab.errors import LabError


def photos(root, classes=("cat", "dog"), each=6, size=(20, 14)):
    rng = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 120, (size[1], size[0], 3), dtype=np.uint8) + 100 * number
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i}.png")
    return root


def test_a_folder_of_photos_with_a_corrupt_file(tmp_path):
    root = photos(tmp_path / "photos")
    (root / "cat" / "broken.jpg").write_bytes(b"\xff\xd8 not an image")
    found = prepare(str(root), DataFields(image_size=8, test=0.3, validation=0.2), tmp_path)
    assert found.shape == (3, 8, 8) and found.classes == ("cat", "dog") and len(found.labels) == 12
    assert "broken.jpg" in found.unreadable[0] and any("broken.jpg" in one for one in found.remarks)


def test_folders_for_training_and_test(tmp_path):
    root = tmp_path / "photos"
    photos(root / "train")
    photos(root / "val", each=3)
    found = prepare(str(root), DataFields(image_size=8), tmp_path)
    assert len(found.split.test) == 6 and any("val is taken as the test" in one for one in found.remarks)
    photos(root / "test", ("cat", "bird"))
    with pytest.raises(LabError, match="bird"):
        images.folder(root)


def test_odd_images_become_rgb(tmp_path):
    Image.new("LA", (5, 5), (0, 0)).save(tmp_path / "clear.png")
    Image.fromarray(np.full((5, 5), 65535, np.uint16)).save(tmp_path / "deep.png")
    for name in ("clear.png", "deep.png"):
        assert images.read_image(tmp_path / name).mode == "RGB"
        assert np.asarray(images.read_image(tmp_path / name)).min() > 250  # transparent is white, and white is white


def test_folders_without_images(tmp_path):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(LabError, match="no images"):
        images.folder(tmp_path / "empty")


def cifar(path, classes=3, each=4):
    rng = np.random.default_rng(0)
    names = "\n".join(f"thing{i}" for i in range(classes)).encode()

    def records(number):
        labels = np.arange(classes).repeat(number).astype(np.uint8)[:, None]
        return np.hstack([labels // 2, labels, rng.integers(0, 256, (len(labels), 3072), dtype=np.uint8)]).tobytes()

    content = {"train.bin": records(each), "test.bin": records(2), "fine_label_names.txt": names}
    with tarfile.open(path, "w:gz") as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content


def test_cifar_in_its_binary_form(tmp_path):
    cifar(tmp_path / "c.tar.gz")
    found = images.cifar100(tmp_path / "c.tar.gz")
    assert found.examples.shape == (18, 3, 32, 32) and found.classes == ("thing0", "thing1", "thing2")
    assert found.test.tolist() == list(range(12, 18)) and found.labels[:5].tolist() == [0, 0, 0, 0, 1]


def test_cifars_python_form_and_damage_are_refused_by_name(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    for name in ("train", "test", "meta"):
        (tmp_path / "cifar-100-python" / name).write_bytes(b"\x80\x04.")
    with pytest.raises(LabError, match="Python version"):
        images.cifar100(tmp_path)
    (tmp_path / "bad.tar.gz").write_bytes(b"\x1f\x8b nonsense")
    with pytest.raises(LabError, match="tar archive"):
        images.cifar100(tmp_path / "bad.tar.gz")
    with pytest.raises(LabError, match="does not exist"):
        images.cifar100(tmp_path / "nowhere")


def test_glyphs_show_test_fonts_that_training_does_not():
    found = glyphs.load(5)
    assert found.examples.shape[1:] == (1, 20, 20) and len(found.classes) == 5
    assert len(found.test) == 4 * 4 * 5 and np.array_equal(found.examples, glyphs.load(5).examples)
    with pytest.raises(LabError, match="classes"):
        glyphs.load(10**6)


def test_resize_takes_the_middle():
    array = np.zeros((2, 1, 4, 8), np.uint8)
    array[:, :, :, 2:6] = 200
    assert (images.resize(array, 4) == 200).all()
