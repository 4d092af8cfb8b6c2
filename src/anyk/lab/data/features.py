"""Mean and standard deviation of each feature, in one pass over the examples however large the files are."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.data import embeddings
from anyk.lab.data.cache import cache_folder
from anyk.lab.data.mapped import MappedRows
from anyk.lab.data.sets import Split
from anyk.lab.errors import LabError

_VERSION = 3  # of the numbers: what computes them to other bits needs another, or a run would not go on as it began
#: a deviation below this share of the mean is what rounding leaves of a constant
_CONSTANT = 1e-7

#: what is looked at once
PIECE_BYTES = 1 << 20

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def statistics(examples: Split, index: Tensor, key: object) -> Statistics:
    """Mean and standard deviation of the features (N, d) at some positions; 1 for the deviation of a constant.

    Of memory-mapped files they are remembered in the cache folder.

    Args:
        examples: where the features are.
        index: (B,) positions that count.
        key: all that examples and positions follow from, as JSON values.
    """
    if not examples.maps:
        return _one_pass(examples, index)
    text = json.dumps([_VERSION, key])
    remembered = cache_folder() / "features" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, LabError):
        known = files.parsed(remembered.read_text(encoding="utf-8"))
        if known["key"] == text and len(known["mean"]) == len(known["std"]) == examples.shape[0]:
            return tuple(map(float, known["mean"])), tuple(map(float, known["std"]))
    mean, std = _one_pass(examples, index)
    # Without a place to remember, the next run only takes longer to start.
    with contextlib.suppress(OSError, LabError):
        remembered.parent.mkdir(parents=True, exist_ok=True)
        files.write_object(remembered, {"key": text, "mean": mean, "std": std})
    return mean, std


def _pieces(part: Tensor | MappedRows) -> Iterator[tuple[int, Tensor]]:
    """A part in pieces small enough for copies in float32 not to count, each with its place."""
    for first, block in embeddings.blocks(part):
        rows = max(1, PIECE_BYTES // max(1, block.element_size() * block[:1].numel()))
        for start in range(0, len(block), rows):
            yield first + start, block[start : start + rows]


def _one_pass(examples: Split, index: Tensor) -> Statistics:
    """Of each block by itself, in float32, and put together in float64: no sum grows so large that it forgets what is added."""
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
            left = rows.mean(0).double()  # what float32 had no digits for; of a constant, all that is left
            off = rounded.double() + left - mean
            total = seen + len(rows)
            squares += rows.square_().sum(0).double() - len(rows) * left.square() + off.square() * (seen * len(rows) / total)
            mean += off * (len(rows) / total)
            seen = total
    std = (squares.clamp(min=0) / max(seen, 1)).sqrt()
    std[std <= _CONSTANT * mean.abs()] = 1.0
    return tuple(mean.float().tolist()), tuple(std.float().clamp(min=torch.finfo(torch.float32).tiny).tolist())
