"""Mean and standard deviation of each feature, in one pass over the examples however large the files are."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anyk.lab.data import embeddings
from anyk.lab.data.cache import remember_object
from anyk.lab.data.mapped import MappedRows
from anyk.lab.data.sets import Split

_VERSION = 3  # of the computation: one with other bits needs another number, or a resumed run would not continue as it began
#: a deviation below this fraction of the mean is the rounding error of a constant
_CONSTANT = 1e-7

#: of the rows that are worked on at once
PIECE_BYTES = 1 << 20

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def statistics(examples: Split, index: Tensor, key: object) -> Statistics:
    """Mean and standard deviation of the features (N, d) at some positions; 1 for the deviation of a constant.

    Those of memory-mapped files are cached.

    Args:
        examples: where the features are.
        index: (B,) positions that count.
        key: everything that examples and positions depend on, as JSON values.
    """
    if not examples.maps:
        return _one_pass(examples, index)

    def compute() -> dict[str, tuple[float, ...]]:
        return dict(zip(("mean", "std"), _one_pass(examples, index), strict=True))

    found = remember_object("features", [_VERSION, key], compute)
    return tuple(found["mean"]), tuple(found["std"])


def _pieces(part: Tensor | MappedRows) -> Iterator[tuple[int, Tensor]]:
    """A part in pieces, with the position of each, so small that their copies in float32 do not matter."""
    for first, block in embeddings.blocks(part):
        rows = max(1, PIECE_BYTES // max(1, block.element_size() * block[:1].numel()))
        for start in range(0, len(block), rows):
            yield first + start, block[start : start + rows]


def _one_pass(examples: Split, index: Tensor) -> Statistics:
    """The statistics of each piece in float32, combined in float64, so that no sum is too large for what is added to it."""
    counts = torch.zeros(len(examples), dtype=torch.bool)
    counts[index] = True
    seen = 0
    mean, squares = (torch.zeros(examples.shape, dtype=torch.float64) for _ in range(2))
    stored: Sequence[Tensor | MappedRows] = examples.maps or examples.parts
    for part, start in zip(stored, examples.starts.tolist(), strict=False):
        for place, piece in _pieces(part):
            rows = piece[counts[start + place : start + place + len(piece)]].float()  # a copy, which may be changed
            if not len(rows):
                continue
            rounded = rows.mean(0)
            rows -= rounded
            left = rows.mean(0).double()  # the rounding error of the mean in float32
            off = rounded.double() + left - mean
            total = seen + len(rows)
            squares += rows.square_().sum(0).double() - len(rows) * left.square() + off.square() * (seen * len(rows) / total)
            mean += off * (len(rows) / total)
            seen = total
    std = (squares.clamp(min=0) / max(seen, 1)).sqrt()
    std[std <= _CONSTANT * mean.abs()] = 1.0
    return tuple(mean.float().tolist()), tuple(std.float().clamp(min=torch.finfo(torch.float32).tiny).tolist())
