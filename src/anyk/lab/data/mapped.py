"""Rows of a file that may be larger than the memory: mapped read-only, fetched ahead of their use, given back after it.

A mapped page is the system's own copy of the file, shared by all processes, and no memory of ours. Giving it back leaves it in
that copy for as long as there is room. Where a system takes no such advice, all works as well, and it alone decides what stays.
"""

import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

#: the use of one byte may map so much around it, which has to be given back with it
_SURROUNDINGS = 1 << 21


class MappedRows:
    """The tensor (N, …) at an offset of a file, mapped read-only.

    A private writable mapping, as torch and safetensors make it, counts against the memory that the system can promise: one
    file larger than the memory could not be opened at all. Writing to ``rows`` would end the process.
    """

    def __init__(self, path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        count = torch.Size(shape).numel()
        if count:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self.rows: Tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(*shape)
        else:
            self.rows = torch.empty(*shape, dtype=dtype)
        self._offset = offset
        self._row_bytes = count * dtype.itemsize // max(1, shape[0])

    def fetch(self, first: int, end: int) -> None:
        """Ask the system to read these rows soon; it does so while we go on."""
        self._advise("MADV_WILLNEED", first, end, mmap.PAGESIZE)

    def release(self, first: int, end: int) -> None:
        """Give these rows' pages back; they may be used again at any time."""
        self._advise("MADV_DONTNEED", first, end, max(_SURROUNDINGS, mmap.PAGESIZE))

    def _advise(self, advice: str, first: int, end: int, grain: int) -> None:
        option = getattr(mmap, advice, None)
        if option is None or first >= end:
            return
        start = (self._offset + first * self._row_bytes) // grain * grain
        stop = min(-(-(self._offset + end * self._row_bytes) // grain) * grain, len(self._map))
        self._map.madvise(option, start, stop - start)
