"""Array files of new examples, a block at a time: the files that :mod:`anyk.lab.data.arrays` reads, with labels or without."""

import array
import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data import arrays, sizes
from anyk.lab.errors import LabError

_GROUPS = "groups"  # which examples belong together, where the training data tell


def blocks(source: Path, shape: tuple[int, ...], rows: int, label_column: str | None = None) -> Iterator[Tensor]:
    """The examples of a file in blocks of at most ``rows``.

    Args:
        source: a file as `arrays.read` takes; .npz and pickles may hold one array only
        shape: of one example
        rows: of a block
        label_column: .csv: a column to leave out; None: where there is one more than the examples have, the last
    """
    if not source.stat().st_size:
        raise LabError(f"{source} is empty: copy it or make it again.")
    if source.suffix.lower() in (".csv", ".tsv"):
        if len(shape) != 1:
            raise LabError(f"{source} has rows of numbers, but the model takes examples of the shape {shape}.")
        yield from _of_csv(source, shape[0], rows, label_column)
        return
    found = _find(source, shape)
    for first in range(0, len(found), rows):
        block = found[first : first + rows]
        yield _shaped(block, shape, source) if len(shape) == 3 else _finite(block, first, source)


def _shaped(images: Tensor, shape: tuple[int, ...], source: Path) -> Tensor:
    """Images in the shape that the model takes."""
    if images.dtype == torch.uint8 and images.shape[1:] == shape:
        return images
    images = arrays.pixels(images, source)
    return images if images.shape[1:] == shape else sizes.resize(images, shape[1])


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape holds examples for the model: images may have another size, if its are squares."""
    if found[1:] == shape:
        return True
    images = arrays.image_shape(found) if len(shape) == 3 else None
    return images is not None and images[0] == shape[0] and (images == shape or shape[1] == shape[2])


def _find(source: Path, shape: tuple[int, ...]) -> Tensor:
    """The one array of the file that holds examples of this shape, of several the one that is called test."""
    is_numpy = source.suffix.lower() in (".npy", ".npz")
    tree = arrays._read_numpy(source) if is_numpy else arrays._read_pickle(source)
    if isinstance(tree, (list, tuple)):
        tree = arrays._name_places(tree)
    held = dict(arrays._flatten(tree)) if isinstance(tree, Mapping) else {"": tree}
    # A list of class names is no array of examples.
    shapes = {key: tuple(value.shape) for key, value in held.items() if hasattr(value, "shape")}
    fitting = [key for key, found in shapes.items() if _fits(found, shape)]
    if len(fitting) > 1:
        fitting = [key for key in fitting if "test" in re.split(r"[^a-z]+", key.lower())] or fitting
    if len(fitting) != 1:
        wanted = f"(examples, {', '.join(map(str, shape))})"
        told = ", ".join(f"{arrays._shown(key)} {found}".strip() for key, found in shapes.items()) or "no array"
        raise LabError(f"{source} should have one array of the shape {wanted}, but has {told}.")
    return arrays._pair(held[fitting[0]], [0], source)[0]


def _of_csv(path: Path, width: int, rows: int, label_column: str | None) -> Iterator[Tensor]:
    values, first = array.array("f"), 0
    cells, left_out = -1, list[int]()

    def block() -> Tensor:
        nonlocal values, first
        found = _finite(torch.from_numpy(np.array(values, dtype=np.float32)).view(-1, width), first, path)
        values, first = array.array("f"), first + len(found)
        return found

    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            lines = csv.reader(file, delimiter=delimiter)
            for row in filter(None, lines):
                if cells < 0:
                    cells = len(row)
                    is_header = label_column is not None or arrays._is_header(row, cells - 1 if cells > width else -1)
                    left_out = _left_out(row if is_header else [""] * cells, width, label_column, path)
                    if cells - len(left_out) != width:
                        raise LabError(f"{path} has {cells - len(left_out)} columns of numbers, but the model takes {width}.")
                    if is_header:
                        continue
                if len(row) != cells:
                    raise LabError(f"{path} has {len(row)} cells in line {lines.line_num}, but {cells} before.")
                try:
                    values.extend(float(cell) for place, cell in enumerate(row) if place not in left_out)
                except ValueError as error:
                    raise LabError(
                        f"{path} has a cell that is not a number in line {lines.line_num} ({error}): name its "
                        "column with --label-column if it is the label."
                    ) from None
                if len(values) == rows * width:
                    yield block()
    except (UnicodeDecodeError, csv.Error) as error:
        raise LabError(f"{path} is not text in columns ({error}): save it as UTF-8 .csv.") from None
    if values:
        yield block()
    elif not first:
        raise LabError(f"{path} has no rows of numbers.")


def _left_out(titles: list[str], width: int, label_column: str | None, path: Path) -> list[int]:
    """The columns that are no numbers of an example: groups, and the label."""
    found = [place for place, title in enumerate(titles) if title.strip() == _GROUPS and len(titles) > width]
    if label_column is not None:
        found.append(arrays._label_place(titles, label_column, path))
    elif len(titles) - len(found) == width + 1:
        found.append(max(place for place in range(len(titles)) if place not in found))
    return found


def _finite(block: Tensor, first: int, source: Path) -> Tensor:
    fine = block.float().isfinite().flatten(1).all(1)
    if not bool(fine.all()):
        raise LabError(f"{source} has a NaN or an infinite number in row {first + int((~fine).nonzero()[0])}.")
    return block
