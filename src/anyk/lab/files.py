"""Files that are either whole or absent: written under another name, flushed to the disk, then renamed. And JSON in them."""

import errno
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyk.lab.errors import LabError

# EFBIG is a limit on the size of files, which is as full as a disk can be.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; where there is none, the error ends with the remedy."""
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read as JSON ({error}): {remedy}.") from None
    if not isinstance(content, dict):
        raise LabError(f"{path} should hold a JSON object: {remedy}.")
    return content


def parsed(text: str) -> Any:
    """The value of a JSON text; a ValueError for all that is wrong with it, and for texts that no file could hold."""
    try:
        value = json.loads(text)
        if "\\u" in text:  # half of a character can be written so
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the content of a file by a JSON object."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of a file in one step."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def refuse_to_overwrite(path: Path, force: bool) -> None:
    """Raise if a file cannot be written there without loss."""
    if not path.parent.is_dir():
        raise LabError(f"{path.parent} should be a folder that exists: make it first.")
    if path.is_dir():
        raise LabError(f"{path} is a folder: name a file.")
    if path.exists() and not force:
        raise LabError(f"{path} is there already: name another file, or give --force to replace it.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; what was written there takes the place of ``path`` at the end.

    A reader sees the former file or the new one, never a part. Of several writers the last one wins. After an error, or a
    crash at any moment, the former file is untouched.
    """
    # Its own random name, so that writers of the same file do not meet; not tempfile, which makes files private.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with disk_full_is_an_error(path):
            temporary.touch()
            usual = temporary.stat().st_mode
            yield temporary
            if temporary.stat().st_mode != usual:  # safetensors puts a private file in its place
                temporary.chmod(usual)
            flush(temporary)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def disk_full_is_an_error(path: Path) -> Iterator[None]:
    """Say in one sentence which file a full disk kept from being written."""
    try:
        yield
    except Exception as error:
        # safetensors has its own exception, with the text of the system's error in it.
        if getattr(error, "errno", None) in _FULL or any(os.strerror(code) in str(error) for code in _FULL):
            raise LabError(
                f"{path} could not be written because the disk is full; its former version, if any, is untouched. "
                "Free some space and run again."
            ) from error
        raise


def flush(path: Path) -> None:
    """Wait until a file, or what is in a folder, is on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # a folder can only be opened on POSIX systems
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def slug(data: str) -> str:
    """A data set's name as a part of a folder's name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(data).name or data)
