"""Rows of a file that may be larger than the memory: mapped read-only, fetched ahead of their use, given back after it.

A mapped page is the system's own copy of the file, shared by all processes, and no memory of ours. Giving it back leaves it in
that copy for as long as there is room. Where a system takes no such advice, all works as well, and it alone decides what stays.
"""

import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: the use of one byte may map so much around it, which has to be given back with it
_SURROUNDINGS = 1 << 21
#: Linux cuts a longer fetch to the read-ahead of the device, which is this much where nobody has changed it
_FETCH_BYTES = 1 << 17


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

    def fetched_by_hand(self) -> None:
        """From now on a use reads from the disk no more than the page that it needs: whoever knows what comes fetches it.

        Otherwise the use of one page reads all around it, up to megabytes, and of scattered rows the whole file. Where the
        file fits into the memory and all of it is wanted in the end, that is better than a read for each page.
        """
        option = getattr(mmap, "MADV_RANDOM", None)
        if option is not None:
            self._map.madvise(option)

    def fetch(self, first: int, end: int) -> None:
        """Ask the system to read these rows soon; it does so while we go on."""
        if first < end:
            self._fetch_pages(*self._pages(first, end, mmap.PAGESIZE))

    def fetch_rows(self, rows: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        """The same for single rows (B,), in ascending order: their pages, and nothing between them."""
        if not len(rows):
            return
        starts, stops = self._pages(rows, rows + 1, mmap.PAGESIZE)
        apart = starts[1:] > stops[:-1]
        firsts = starts[np.append(True, apart)].tolist()
        for start, stop in zip(firsts, stops[np.append(apart, True)].tolist(), strict=True):
            self._fetch_pages(start, stop)

    def release(self, first: int, end: int) -> None:
        """Give these rows' pages back; they may be used again at any time."""
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
        """Where the rows begin and end in the map, out to multiples of ``grain``; of two numbers, or of two arrays of them."""
        start = (self._offset + first * self._row_bytes) // grain * grain
        stop = -(-(self._offset + end * self._row_bytes) // grain) * grain
        # madvise itself stops at the end of the map.
        return start, stop
