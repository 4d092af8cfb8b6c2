"""Rows of a file that may be larger than the memory: mapped read-only, prefetched before their use and released after it.

numpy.memmap and torch.from_file map files as well, but give no access to madvise, which tells the system what to read ahead and
what to drop; torch's and safetensors' mappings are private and writable besides, and count as memory that the process may need.
A released page stays in the system's page cache as long as there is room. Without madvise all works, and the system decides.
"""

import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: an access may map this much around it, which is released with it
_SURROUNDINGS = 1 << 21
#: Linux cuts a longer request to the read-ahead of the device, by default this much
_FETCH_BYTES = 1 << 17


class MappedRows:
    """The tensor (N, …) at an offset of a file, mapped read-only. Writing to ``rows`` would end the process."""

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

    def fetched_by_hand(self) -> None:
        """Turn the system's own read-ahead off: an access reads its page alone, and the caller prefetches what it will need.

        With read-ahead, an access reads up to megabytes around it: good where the file fits into the memory and is needed as
        a whole, but scattered rows of a larger file would read all of it.
        """
        option = getattr(mmap, "MADV_RANDOM", None)
        if option is not None:
            self._map.madvise(option)

    def fetch(self, first: int, end: int) -> None:
        """Ask the system to read these rows, without waiting for it."""
        if first < end:
            self._fetch_pages(*self._pages(first, end, mmap.PAGESIZE))

    def fetch_rows(self, rows: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        """The same for single rows (B,) in ascending order: their pages, and nothing between them."""
        if not len(rows):
            return
        starts, stops = self._pages(rows, rows + 1, mmap.PAGESIZE)
        apart = starts[1:] > stops[:-1]
        firsts = starts[np.append(True, apart)].tolist()
        for start, stop in zip(firsts, stops[np.append(apart, True)].tolist(), strict=True):
            self._fetch_pages(start, stop)

    def release(self, first: int, end: int) -> None:
        """Release the pages of these rows; they may be used again at any time."""
        option = getattr(mmap, "MADV_DONTNEED", None)
        if option is not None and first < end:
            start, stop = self._pages(first, end, max(_SURROUNDINGS, mmap.PAGESIZE))
            self._map.madvise(option, start, stop - start)

    def _fetch_pages(self, start: int, stop: int) -> None:
        option = getattr(mmap, "MADV_WILLNEED", None)
        if option is not None:
            for place in range(start, stop, _FETCH_BYTES):
                self._map.madvise(option, place, min(_FETCH_BYTES, stop - place))

    def _pages(self, first: Any, end: Any, grain: int) -> tuple[Any, Any]:
        """Where rows begin and end in the map, rounded outward to multiples of ``grain``: of two numbers or two arrays."""
        start = (self._offset + first * self._row_bytes) // grain * grain
        stop = -(-(self._offset + end * self._row_bytes) // grain) * grain
        # madvise itself stops at the end of the map.
        return start, stop
