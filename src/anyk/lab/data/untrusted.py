"""Limits for files that come from elsewhere: sizes that a file claims are checked before memory is allocated for them."""

import gzip
import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from anyk.lab.errors import LabError

FREE = 64 << 20
"""Bytes that any compressed file may unpack to."""
MOST = 100
"""Times its own size that a file may unpack to beyond that. Images and features come to less, zip bombs to a thousand."""
_PIECE = 1 << 20


def refuse_bomb(path: str | Path, packed: int, unpacked: int) -> None:
    """Raise where a file of ``packed`` bytes would unpack to many times as much."""
    if unpacked > max(FREE, MOST * packed):
        raise LabError(
            f"{path} would unpack to {unpacked / 1e6:,.0f} MB, {unpacked / max(packed, 1):,.0f} times its size, but at most "
            f"{MOST} times are taken: if you trust it, save it unpacked."
        )


def unpacked(path: Path) -> io.BytesIO:
    """The content of a file, unpacked where it is a gzip file; refused where it unpacks to many times its size."""
    packed, out = path.stat().st_size, io.BytesIO()
    with open(path, "rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file: Any = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        while piece := file.read(_PIECE):
            refuse_bomb(path, packed, out.tell() + len(piece))
            out.write(piece)
    out.seek(0)
    return out


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip file whose members are inside of it, stored or deflated, and small enough to be read into memory together."""
    with zipfile.ZipFile(path) as archive:
        members, size = archive.infolist(), path.stat().st_size
        refuse_bomb(path, size, sum(member.file_size for member in members))
        for member in members:
            if not 0 <= member.header_offset <= size - member.compress_size:
                raise ValueError(f"{member.filename!r} in it claims to be longer than the file")
            if member.flag_bits & 1:
                raise ValueError(f"{member.filename!r} in it is encrypted")
            # Other methods allocate memory of their own, and neither numpy nor torch writes them.
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{member.filename!r} in it is packed in an uncommon way")
        yield archive


def check_npy(file: Any, size: int) -> None:
    """Raise ValueError where a .npy file of ``size`` bytes is too short for the array in its header, or holds objects."""
    file = SizedFile(file, size)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it is of version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds objects, which would need allow_pickle")
    left = size - file.tell()
    if not dtype.itemsize or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > left:
        raise ValueError(f"it claims to be {shape} of {dtype}, but has {max(left, 0)} bytes")


class SizedFile:
    """A file of ``size`` bytes whose reads allocate no memory for bytes that are not there."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.readline, self.tell = file.readline, file.tell

    def read(self, count: int) -> bytes:
        """Exactly ``count`` bytes, or EOFError."""
        # The position is asked for long reads alone: a pickle has millions of short ones.
        if 0 <= count <= _PIECE or 0 <= count <= self._size - self._file.tell():
            content = self._file.read(count)
            if len(content) == count:
                return content
        raise EOFError("Ran out of input")
