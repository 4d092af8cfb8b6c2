"""Characters in many fonts, an image set of up to two thousand classes that every machine already has.

The letters come from the fonts that matplotlib brings, each in several fonts, turned, scaled, sheared, shifted and with
noise on them. Latin A, Greek Alpha and Cyrillic A are different classes that look the same, and the test shows fonts
that were not trained on: the first guess cannot always be right, the first five nearly can.
"""

import math
import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from anyk.lab.data.prepare import Source
from anyk.lab.errors import LabError

DEFAULT_CLASSES = 300
_SIZE = 20  # pixels
_TRAIN_FONTS = (
    "DejaVuSans",
    "DejaVuSans-BoldOblique",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-BoldItalic",
    "STIXGeneralBol",
    "STIXGeneralBolIta",
    "STIXGeneralItalic",
)
_TEST_FONTS = ("DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif-Italic", "STIXGeneral")
_TRAIN_PICTURES, _TEST_PICTURES = 2, 4  # of a class in one font

_EM, _BASELINE = 0.75, 0.7  # the font's size and the baseline's height from above, relative to the picture
_FINE = 2  # drawn and distorted at so many times the size
_BLANK = frozenset("\ufffc\u1d3d")  # named in the fonts, without ink in some

_TURN, _SHEAR = 12.0, 0.15  # degrees, and horizontal shift by height
_SCALE, _SHIFT = 0.15, 0.08  # relative to 1, and to the picture's width
_NOISE = 0.2  # standard deviation, of pixels between 0 and 1


def load(classes: int = DEFAULT_CLASSES) -> Source:
    """The glyphs data set: (N, 1, 20, 20) pictures of ``classes`` characters, test pictures in fonts of their own.

    The same number of classes gives the same pictures, and a smaller set holds a part of a larger one's classes.
    """
    fonts = {name: _font_path(name) for name in _TRAIN_FONTS + _TEST_FONTS}
    available = {name: frozenset(map(chr, FT2Font(path).get_charmap())) for name, path in fonts.items()}
    characters = _characters(available)
    if not 2 <= classes <= len(characters):
        raise LabError(f"glyphs has 2 to {len(characters)} classes, but {classes} were asked for.")
    characters = characters[:classes]

    def pictures(names: tuple[str, ...], each: int, seed: int) -> tuple[Tensor, Tensor]:
        drawn, labels = [], []
        for name in names:
            font = ImageFont.truetype(fonts[name], round(_EM * _FINE * _SIZE), layout_engine=ImageFont.Layout.BASIC)
            present = [number for number, character in enumerate(characters) if character in available[name]]
            drawn += [_draw(characters[number], font) for number in present]
            labels += present
        order = torch.arange(len(labels)).repeat(each)
        generator = torch.Generator().manual_seed(seed)
        return _distort(torch.stack(drawn), order, generator), torch.tensor(labels)[order]

    train, test = pictures(_TRAIN_FONTS, _TRAIN_PICTURES, 0), pictures(_TEST_FONTS, _TEST_PICTURES, 1)
    names = tuple(f"{character} {unicodedata.name(character, f'U+{ord(character):04X}')}" for character in characters)
    images, labels = (torch.cat(both).numpy() for both in zip(train, test, strict=True))
    places = np.arange(len(train[1]), len(labels))
    return Source(f"glyphs:{classes}", "images", images, labels, names, places)


def _font_path(name: str) -> Path:
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
    if not path.is_file():
        raise LabError(f"glyphs needs the font {path}, which this matplotlib does not bring: reinstall matplotlib.")
    return path


def _characters(available: dict[str, frozenset[str]]) -> list[str]:
    """The characters that enough fonts have: first those of the most fonts, among them ASCII, Greek and Cyrillic first."""
    counts = {
        character: sum(character in font for font in available.values())
        for character in frozenset.union(*available.values())
        if unicodedata.category(character)[0] in "LNPS"  # letters, numbers, punctuation, symbols: visible by themselves
        and unicodedata.normalize("NFC", character) == character  # the Kelvin sign is by definition the letter K
        and character not in _BLANK
    }
    enough = [
        character
        for character, count in counts.items()
        if count >= 8 and sum(character in available[name] for name in _TEST_FONTS) >= 3
    ]

    # Scripts that look alike come first, so that a small set has the ambiguity too.
    def order(character: str) -> tuple[int, int, int]:
        code = ord(character)
        script = 0 if code < 0x80 else 1 if 0x370 <= code < 0x400 else 2 if 0x400 <= code < 0x500 else 3
        return -counts[character], script, code

    return sorted(enough, key=order)


def _draw(character: str, font: ImageFont.FreeTypeFont) -> Tensor:
    """A character in its natural size on the baseline, moved or shrunk where it would not fit: (side, side), 0 … 1."""
    side = _FINE * _SIZE
    left, top, right, bottom = map(int, font.getbbox(character, anchor="ms"))
    room = max(side, right - left, bottom - top)
    x, y = room // 2, round(_BASELINE * room)
    x += max(0, -(x + left)) - max(0, x + right - room)
    y += max(0, -(y + top)) - max(0, y + bottom - room)
    image = Image.new("L", (room, room))
    ImageDraw.Draw(image).text((x, y), character, fill=255, font=font, anchor="ms")
    if room > side:
        image = image.resize((side, side), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(side, side)


def _distort(drawn: Tensor, order: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, scale, shear and shift the drawings ``order`` at random, and add noise: (N, 1, size, size) uint8."""

    def between(low: float, high: float) -> Tensor:
        return torch.rand(len(order), generator=generator) * (high - low) + low

    turn = between(-_TURN, _TURN) * (math.pi / 180)
    width, height = between(1 - _SCALE, 1 + _SCALE), between(1 - _SCALE, 1 + _SCALE)
    shear = between(-_SHEAR, _SHEAR)
    cos, sin = turn.cos(), turn.sin()
    # Where each pixel comes from; the grid's coordinates run from -1 to 1, hence the doubled shift.
    rows = [
        torch.stack([cos * width, (shear * cos - sin) * height, between(-2 * _SHIFT, 2 * _SHIFT)], 1),
        torch.stack([sin * width, (shear * sin + cos) * height, between(-2 * _SHIFT, 2 * _SHIFT)], 1),
    ]
    maps = torch.stack(rows, 1)
    pictures = torch.empty(len(order), 1, _SIZE, _SIZE, dtype=torch.uint8)
    for start in range(0, len(order), 1024):
        batch = slice(start, start + 1024)
        fine = drawn[order[batch]].unsqueeze(1) / 255
        grid = functional.affine_grid(maps[batch], list(fine.shape), align_corners=False)
        coarse = functional.avg_pool2d(functional.grid_sample(fine, grid, align_corners=False), _FINE)
        noisy = coarse + _NOISE * torch.randn(coarse.shape, generator=generator)
        pictures[batch] = (noisy * 255).round().clamp(0, 255).to(torch.uint8)
    return pictures
