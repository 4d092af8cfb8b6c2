"""Glyphs: the same bits every time, fonts kept apart, look-alikes kept, nothing blank; and DATA by name."""

import unicodedata

import pytest
import torch
from matplotlib.ft2font import FT2Font

from anyk.lab import data
from anyk.lab.data import glyphs
from anyk.lab.errors import LabError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYK_CACHE", str(tmp_path_factory.mktemp("cache")))
        return glyphs.load(100)


def characters():
    fonts = glyphs._TRAIN_FONTS + glyphs._TEST_FONTS
    return glyphs._characters({name: frozenset(map(chr, FT2Font(glyphs._font_path(name)).get_charmap())) for name in fonts})


def test_the_contract(dataset):
    assert dataset.kind == "images"
    assert dataset.name == "glyphs:100"
    assert len(set(dataset.classes)) == 100
    assert "A LATIN CAPITAL LETTER A" in dataset.classes
    for split, each in ((dataset.train, 24), (dataset.test, 16)):
        images = split.parts[0]
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (1, 20, 20)
        assert split.labels.dtype == torch.int64
        assert torch.bincount(split.labels, minlength=100).tolist() == [each] * 100
    pixels = dataset.train.parts[0].double() / 255
    assert dataset.mean[0] == pytest.approx(pixels.mean().item())
    assert dataset.std[0] == pytest.approx(pixels.std(correction=0).item())


def test_the_same_bits_built_or_read(dataset):
    again, read = glyphs.load(100), glyphs.load(100)
    assert again.fingerprint == read.fingerprint == dataset.fingerprint
    assert torch.equal(again.train.parts[0], dataset.train.parts[0])
    assert torch.equal(read.test.parts[0], dataset.test.parts[0])
    assert glyphs.load(99).fingerprint != dataset.fingerprint


def test_look_alikes_stay_and_duplicates_go():
    chosen = characters()
    assert len(chosen) >= 2000
    assert {"A", "\N{GREEK CAPITAL LETTER ALPHA}", "\N{CYRILLIC CAPITAL LETTER A}"} <= set(chosen[:300])
    assert not {"\N{ANGSTROM SIGN}", "\N{OHM SIGN}", "\N{KELVIN SIGN}", " ", "\N{SOFT HYPHEN}"} & set(chosen)
    assert len({unicodedata.normalize("NFC", character) for character in chosen}) == len(chosen)
    assert len({unicodedata.normalize("NFD", character) for character in chosen}) == len(chosen)
    assert chosen[:100] == characters()[:100]


def test_every_character_has_ink_of_its_own():
    from PIL import ImageFont

    for name in ("DejaVuSans", "DejaVuSansMono-Oblique", "STIXGeneral"):
        path = glyphs._font_path(name)
        font = ImageFont.truetype(path, 30, layout_engine=ImageFont.Layout.BASIC)
        missing = glyphs._draw("\U0010fffe", font)
        present = set(map(chr, FT2Font(path).get_charmap()))
        for character in characters():
            if character in present:
                drawing = glyphs._draw(character, font)
                assert drawing.max() > 100, f"{name} {character!r}"
                assert not torch.equal(drawing, missing), f"{name} {character!r}"


@pytest.mark.parametrize(
    ("name", "characters"),
    [
        ("DejaVuSans-Bold", "Wg_\N{PER TEN THOUSAND SIGN}\N{LATIN CAPITAL LETTER A WITH RING ABOVE AND ACUTE}"),
        ("DejaVuSansMono-Bold", "\N{GREEK CAPITAL LETTER ETA WITH PSILI AND VARIA}"),  # sticks out on the left
    ],
)
def test_nothing_is_cut_off(name, characters):
    from PIL import ImageFont

    font = ImageFont.truetype(glyphs._font_path(name), 30, layout_engine=ImageFont.Layout.BASIC)
    for character in characters:
        left, top, right, bottom = font.getbbox(character)
        shrunk = max(1.0, (right - left) / 40, (bottom - top) / 40)
        ink = sum(font.getmask(character)) / shrunk**2
        assert glyphs._draw(character, font).sum().item() == pytest.approx(ink, rel=0.05 if shrunk > 1 else 0)


def test_pictures_of_a_class_resemble_one_another(dataset):
    mean = torch.stack([dataset.train.parts[0][dataset.train.labels == label].float().mean(0) for label in range(100)])
    test = dataset.test.parts[0].float()
    distance = torch.cdist(test.flatten(1), mean.flatten(1))
    hits = (distance.topk(5, largest=False).indices == dataset.test.labels[:, None]).any(1)
    assert 0.4 < hits.float().mean() < 0.95  # the nearest class mean: far above 5 / 100, far from easy


@pytest.mark.parametrize("classes", [1, 99999])
def test_too_many_or_too_few_classes(classes):
    with pytest.raises(LabError, match=rf"2 to {len(characters())} classes, but {classes} were"):
        glyphs.load(classes)


def test_a_missing_font(monkeypatch, tmp_path):
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(LabError, match=r"DejaVuSans\.ttf.*reinstall matplotlib"):
        glyphs.load(10)


def test_data_by_name(tmp_path):
    assert data.load("glyphs:5").name == "glyphs:5"
    with pytest.raises(LabError, match="glyphs:CLASSES wants a number"):
        data.load("glyphs:many")
    with pytest.raises(LabError, match=r"nowhere does not exist; DATA may be glyphs, .*cifar100:PATH.*\.npz"):
        data.load("nowhere")
    (tmp_path / "a.txt").touch()
    with pytest.raises(LabError, match=r"a\.txt is a file of another kind; DATA may be"):
        data.load(str(tmp_path / "a.txt"))
    with pytest.raises(LabError, match="no images"):
        data.load(str(tmp_path))
