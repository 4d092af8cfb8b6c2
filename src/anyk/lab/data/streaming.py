"""Data sets larger than the memory: a shuffled order that moves through the files window by window, and a reader for it.

torch.utils.data has shuffle buffers for streams, but no order that is a permutation of the whole set, follows from a seed
and can be resumed at any batch.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data.sets import Split
from anyk.lab.errors import LabError

#: rows are prefetched so many times as fast as they are used
_HASTE = 4
#: after so many batches, a piece that was prefetched and not used may be prefetched again
_FORGOTTEN = 1000
#: fewer positions than this may be in ascending order by chance
_SCAN = 16

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


def block_order(index: Tensor, starts: Tensor, block: int, window: int, generator: torch.Generator) -> Tensor:
    """Shuffle positions so that only a small part of the examples is in use at any time.

    The examples of each part are cut into blocks, which are contiguous on the disk. Each window of about ``window`` examples
    gets one block from every stretch of the set, drawn at random, and the examples of each window are shuffled. Each position
    comes exactly once, and where the set is stored class by class, every window has a mixture of the classes.

    Args:
        index: (N,) positions in ascending order; some may be missing
        starts: the first position of each part, and the end of the last one
        block: examples in a block; the last one of a part may have fewer
        window: examples in a window, those that are missing in ``index`` included. Windows are made of whole blocks, so that
            some are larger than others by a block
        generator: the source of randomness

    Returns:
        (N,) the same positions in another order.

    >>> order = block_order(torch.arange(12), torch.tensor([0, 7, 12]), 2, 6, torch.Generator().manual_seed(0))
    >>> order[:6].tolist(), order[6:].tolist()
    ([1, 5, 8, 4, 7, 0], [2, 11, 10, 3, 6, 9])
    """
    edges = torch.cat([torch.arange(first, end, block) for first, end in starts.unfold(0, 2, 1).tolist()] + [starts[-1:]])
    places = torch.searchsorted(index, edges)
    firsts, counts = places[:-1], places.diff()
    windows = min(_windows(int(starts[-1]), window), len(counts))
    stretches = len(counts) // windows
    # A row for each stretch and a column for each window; the blocks left over go to different windows.
    table = torch.rand(stretches, windows, generator=generator).argsort(1)
    table += torch.arange(0, stretches * windows, windows)[:, None]
    extra = torch.arange(stretches * windows, len(counts)).tolist()
    lucky = dict(zip(torch.randperm(windows, generator=generator).tolist(), extra, strict=False))
    out = torch.empty_like(index)
    filled = 0
    for number in range(windows):
        blocks = torch.cat([table[:, number], torch.tensor([lucky[number]])]) if number in lucky else table[:, number]
        here = counts[blocks]
        rows = (firsts[blocks] - (here.cumsum(0) - here)).repeat_interleave(here)
        rows += torch.arange(len(rows))
        out[filled : filled + len(rows)] = index[rows[torch.randperm(len(rows), generator=generator)]]
        filled += len(rows)
    return out


def _windows(examples: int, window: int) -> int:
    return max(1, -(-examples // window))


def _is_scan(rows: _Numbers) -> bool:
    return len(rows) >= _SCAN and bool((rows[1:] > rows[:-1]).all())


class Stream:
    """Batches of a memory-mapped split, of which a window is cached in memory.

    The files are read in pieces of one block. A piece is copied to the store when one of its rows is first needed, in place
    of the least recently used one, and its pages are released. Batches are then taken from one tensor in memory, however
    many files there are. Any positions may be asked for at any time: those in :func:`block_order` find their pieces in the
    store. Rows in ascending order, as in an evaluation, will not be needed again soon: they are taken from the files
    directly, and only their pages are read from the disk.

    Args:
        examples: a split with ``maps``, whose read-ahead is turned off
        block: rows of a piece; as many as the longest part has are enough
        window: examples that are in use at a time, about; the store holds an eighth more

    Raises:
        LabError: where the store does not fit into the memory.
    """

    def __init__(self, examples: Split, block: int, window: int) -> None:
        self._examples = examples
        for part in examples.maps:
            part.fetched_by_hand()
        asked, block = block, min(block, max(map(len, examples.parts)))
        self._block = block
        self._first_rows = examples.starts.numpy()
        pieces = -(-np.diff(self._first_rows) // block)
        self._first_pieces = np.concatenate([[0], pieces.cumsum()])
        # Plain integers, because they are looked at one by one.
        self._lengths = np.diff(self._first_rows).tolist()
        self._piece_limits = self._first_pieces.tolist()
        total = self._piece_limits[-1]
        slots = min(total, -(-total * 9 // (8 * _windows(len(examples), window))) + 1)
        try:
            self._store = torch.empty(slots * block, *examples.shape, dtype=examples.parts[0].dtype)
        except RuntimeError:
            size = slots * block * examples.example_bytes / 2**20
            raise LabError(
                f"there is no room for {size:,.0f} MiB of examples in use: lower shuffle_window ({window}) or "
                f"shuffle_block ({asked})."
            ) from None
        # Where each piece is in the store, or -1; which piece each slot holds, or -1; and when the slot was used last.
        self._slot = np.full(total, -1)
        self._held = np.full(slots, -1)
        self._used = np.zeros(slots, dtype=np.int64)
        self._asked = np.full(total, -_FORGOTTEN)
        self._waiting: deque[int] = deque()
        # Rows of a scan that are being prefetched: the next batch, and the one after it.
        self._announced: deque[_Numbers] = deque(maxlen=2)
        self._time = 0

    def take(self, index: Tensor) -> Tensor:
        """The examples at (B,) positions, in that order, as they are stored."""
        rows = index.numpy()
        piece, within = self._places(rows)
        wanted = np.unique(piece)
        self._time += 1
        if _is_scan(rows) or len(wanted) > len(self._held):
            return self._scan(index, wanted)
        slots = self._slot[wanted]
        self._used[slots[slots >= 0]] = self._time
        self._load(wanted[slots < 0])
        return self._store.index_select(0, torch.from_numpy(self._slot[piece] * self._block + within))

    def expect(self, index: Tensor) -> None:
        """Prefetch the rows (B,) that will be needed, a few at a time."""
        rows = index.numpy()
        if _is_scan(rows):
            self._announced.append(rows)
            self._fetch_rows(rows)
            return
        pieces = np.unique(self._places(rows)[0])
        fresh = pieces[(self._slot[pieces] < 0) & (self._asked[pieces] <= self._time - _FORGOTTEN)]
        self._asked[fresh] = self._time
        self._waiting.extend(fresh.tolist())
        count = min(len(self._waiting), 1 + _HASTE * len(rows) // self._block)
        for part, first, end in self._runs([self._waiting.popleft() for _ in range(count)]):
            self._examples.maps[part].fetch(first, end)

    def _places(self, rows: _Numbers) -> tuple[_Numbers, _Numbers]:
        """The pieces of some rows, and the places in them."""
        part = self._first_rows.searchsorted(rows, side="right") - 1
        piece, within = np.divmod(rows - self._first_rows[part], self._block)
        return piece + self._first_pieces[part], within

    def _load(self, missing: _Numbers) -> None:
        """Put pieces into the slots that were used longest ago."""
        if not len(missing):
            return
        slots = np.argpartition(self._used, len(missing) - 1)[: len(missing)]
        dropped = self._held[slots]
        self._slot[dropped[dropped >= 0]] = -1
        self._slot[missing] = slots
        self._held[slots] = missing
        self._used[slots] = self._time
        # Pieces that were not prefetched are requested as a whole, and not page by page.
        for number, begin, stop in self._runs(missing[self._asked[missing] <= self._time - _FORGOTTEN].tolist()):
            self._examples.maps[number].fetch(begin, stop)
        self._asked[missing] = -_FORGOTTEN
        # Everything is computed for all pieces at once that can be: the loop below is most of the cost of streaming.
        part = self._first_pieces.searchsorted(missing, side="right") - 1
        first = (missing - self._first_pieces[part]) * self._block
        end = np.minimum(first + self._block, np.diff(self._first_rows)[part])
        into = slots * self._block
        store, arrays, maps = self._store.numpy(), self._examples.arrays, self._examples.maps
        for number, place, begin, stop in zip(part.tolist(), into.tolist(), first.tolist(), end.tolist(), strict=True):
            store[place : place + stop - begin] = arrays[number][begin:stop]
            maps[number].release(begin, stop)

    def _scan(self, index: Tensor, wanted: _Numbers) -> Tensor:
        """Rows that are taken from the files directly."""
        rows = index.numpy()
        others = [announced for announced in self._announced if not np.array_equal(rows, announced)]
        if len(others) == len(self._announced):
            self._fetch_rows(np.unique(rows))
        self._announced = deque(others, maxlen=2)
        out = self._examples.take(index)
        for part, first, end in self._runs(wanted.tolist()):
            self._examples.maps[part].release(first, end)
        return out

    def _fetch_rows(self, rows: _Numbers) -> None:
        """Prefetch rows in ascending order, and no others."""
        limits = rows.searchsorted(self._first_rows)
        for part in np.flatnonzero(np.diff(limits)).tolist():
            self._examples.maps[part].fetch_rows(rows[limits[part] : limits[part + 1]] - self._first_rows[part])

    def _runs(self, pieces: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Part, first row and end of some pieces; neighbours in one."""
        at = 0
        while at < len(pieces):
            begin = pieces[at]
            part = bisect_right(self._piece_limits, begin) - 1
            end, limit = begin, self._piece_limits[part + 1]
            while at < len(pieces) and pieces[at] == end < limit:
                at, end = at + 1, end + 1
            first = begin - self._piece_limits[part]
            last = end - self._piece_limits[part]
            yield part, first * self._block, min(last * self._block, self._lengths[part])
