"""Files that are whole or not there."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anyk.lab.errors import LabError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``; what was written there takes its place at the end, at once and for good.

    The file is on the disk before it gets its name, so that neither a kill nor a power cut leaves half a file. After an
    error the temporary file is removed and the former version is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_full_is_an_error(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def disk_full_is_an_error(path: Path) -> Iterator[None]:
    """Say in one sentence that a file could not be written."""
    try:
        yield
    except Exception as error:
        # Libraries that write files wrap the system's error in their own.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or "No space left" in str(error) or "File too large" in str(error):
            raise LabError(f"the disk is full: {path} could not be written, its former version is untouched.") from None
        if isinstance(error, OSError):
            raise LabError(f"{path} could not be written: {error.strerror or error}.") from None
        raise


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
