"""The one decoder of image files, and arrays of pixels in the shape and size that a model takes."""

import dataclasses
import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from anyk.lab.data import cache as caches
from anyk.lab.data import untrusted
from anyk.lab.data.sets import Dataset, Split, with_statistics
from anyk.lab.errors import LabError, first_line

SIZE = 32
"""Height and width of decoded images unless asked otherwise."""
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
# Formats that Pillow may try, whatever a file is called. Others are programs (EPS starts Ghostscript) or containers of any.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")
_FREE_PIXELS = 89_478_485  # Pillow's own limit; a white page at 600 dpi has a third of it
_CHANNELS = (1, 3)  # gray or colour

_Decoded = TypeVar("_Decoded")


def read_image(path: str | Path, draft: tuple[int, int] | None = None) -> Image.Image:
    """An image file as RGB: upright, transparent parts white, 16 bits of gray reduced to 8.

    Args:
        path: the file.
        draft: (width, height) that suffice: a larger JPEG may be decoded at a fraction of its size.
    """
    Image.init()
    with Image.open(path, formats=[name for name in _FORMATS if name in Image.OPEN]) as file:
        if draft is not None:
            file.draft("RGB", draft)
        pixels = file.width * file.height
        if pixels > _FREE_PIXELS:
            bytes_of_one = 1 if file.mode in ("1", "L", "P") else 4
            untrusted.refuse_bomb(path, Path(path).stat().st_size, pixels * bytes_of_one)
        return upright(file)


def upright(image: Image.Image) -> Image.Image:
    """An image of Pillow as RGB: upright, transparent parts white, 16 bits of gray reduced to 8. It is changed where it can."""
    ImageOps.exif_transpose(image, in_place=True)  # a large image is not copied
    if image.mode.startswith("I"):  # 16 bits of gray, which Pillow would clip
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    if "transparency" in image.info or "A" in image.getbands():
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def read_pixels(path: str | Path, size: int = SIZE) -> Tensor:
    """An image file as (3, size, size) uint8: the image resized to fit, and its middle."""
    return fitted(read_image(path, (2 * size, 2 * size)), size)


def fitted(image: Image.Image, size: int) -> Tensor:
    """An RGB image of Pillow as (3, size, size) uint8: resized to fit, and its middle."""
    image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


def decode_all(
    paths: Iterable[Path],
    decode: Callable[[Path], _Decoded],
    prepare: Callable[[_Decoded], Tensor] | None = None,
    ahead: int = 64,
) -> Iterator[Tensor | str]:
    """Decode files in threads, in order: for each a tensor, or the reason why it is no image.

    Args:
        paths: the files.
        decode: from a file to an image; its errors are the file's.
        prepare: from an image to a tensor; its errors are raised. None: ``decode`` gives the tensor.
        ahead: files that are decoded before their results are asked for.
    """

    def load(path: Path) -> Tensor | str:
        try:
            decoded = decode(path)
        except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, …
            return first_line(error, 2000).removeprefix(f"{path} ").replace(f" {str(path)!r}", "")[:200]
        return decoded if prepare is None else prepare(decoded)  # type: ignore[return-value]

    # Warning filters belong to the process, so they are set here and not in the threads.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\b")  # about odd metadata
        coming = (pool.submit(load, path) for path in paths)
        waiting = deque(itertools.islice(coming, ahead))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(itertools.islice(coming, 1))


# --- arrays of pixels -------------------------------------------------------------------------------------------------


def image_shape(shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Channels, height and width of images in an array of this shape; None: it holds none.

    >>> image_shape((100, 28, 28)), image_shape((100, 28, 20, 3)), image_shape((100, 3, 28, 20)), image_shape((100, 28, 28, 4))
    ((1, 28, 28), (3, 28, 20), (3, 28, 20), None)
    """
    if len(shape) == 3:
        return 1, shape[1], shape[2]
    if len(shape) == 4 and shape[3] in _CHANNELS:
        return shape[3], shape[1], shape[2]
    return (shape[1], shape[2], shape[3]) if len(shape) == 4 and shape[1] in _CHANNELS else None


def channels_first(images: Tensor, source: str | Path) -> Tensor:
    """uint8 images as (N, channels, height, width), from an array with channels last, first or without."""
    shape = image_shape(images.shape)
    if images.dtype != torch.uint8:
        dtype = str(images.dtype).removeprefix("torch.")
        raise LabError(f"images in {source} should be uint8, pixels from 0 to 255, but are {dtype}.")
    if shape is None:
        raise LabError(
            f"images in {source} should have the shape (N, height, width) or (N, height, width, 1 or 3), "
            f"but have {tuple(images.shape)}."
        )
    last = images.dim() == 4 and images.shape[3] in _CHANNELS
    # Contiguous: batches are taken from it, and of other arrays NumPy would copy the whole each time.
    return (images.permute(0, 3, 1, 2) if last else images.view(len(images), *shape)).contiguous()


def resized(dataset: Dataset, size: int) -> Dataset:
    """The data set with square images of this size: the shorter side resized, the middle taken. Cached."""
    if dataset.kind != "images":
        raise LabError(f"image_size resizes images, but {dataset.name} holds {dataset.kind}: leave it out.")
    if tuple(dataset.train.shape[1:]) == (size, size):
        return dataset

    def resize_all(examples: Split) -> Split:
        pieces = [resize(block, size) for part in examples.parts for block in torch.split(part, 512)]
        return dataclasses.replace(examples, parts=(torch.cat(pieces),))

    def build() -> Dataset:
        test = None if dataset.test is None else resize_all(dataset.test)
        return with_statistics(dataclasses.replace(dataset, train=resize_all(dataset.train), test=test))

    return caches.remember(f"resized-{dataset.fingerprint[:32]}-{size}", build)


def resize(images: Tensor, size: int) -> Tensor:
    """The middle square of (N, channels, height, width) uint8 images, in another size."""
    height, width = images.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = images[:, :, top : top + side, left : left + side].float()
    made = functional.interpolate(square, (size, size), mode="bicubic", antialias=True, align_corners=False)
    return made.round().clamp(0, 255).to(torch.uint8)
