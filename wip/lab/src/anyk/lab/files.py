"""Writing files so that they are either complete or absent, JSON files, and words for messages about files."""

import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyk.lab.errors import LabError

# EFBIG is a limit on the size of files, which is as full as a disk can be.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: files and folders that are being written under another name, to be removed if the process ends before they are whole
unfinished: set[Path] = set()
#: held for moments in which a signal must not end the process
uninterrupted = threading.Lock()


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; the error message ends with the remedy."""
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read as JSON ({error}): {remedy}.") from None
    if not isinstance(content, dict):
        raise LabError(f"{path} should hold a JSON object: {remedy}.")
    return content


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for whatever is wrong with it, lone surrogates included."""
    try:
        value = json.loads(text)
        if "\\u" in text:  # an escape may be half of a surrogate pair, which cannot be written to a file again
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
    """Raise if a file cannot be written there, or one exists that ``force`` does not give up."""
    if not path.parent.is_dir():
        raise LabError(f"{path.parent} should be a folder that exists: make it first.")
    if path.is_dir():
        raise LabError(f"{path} is a folder: name a file.")
    refuse_existing(path, force)


def refuse_existing(path: Path, force: bool) -> None:
    """Raise if something is at ``path`` that ``force`` does not give up; an empty folder counts as nothing."""
    if path.exists() and not force and not (path.is_dir() and not any(path.iterdir())):
        kind = "folder" if path.is_dir() else "file"
        raise LabError(f"{path} already exists: name another {kind}, or give --force to replace it.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; what was written there replaces ``path`` at the end.

    A reader sees the former file or the new one, never a part of it. Of several writers the last one wins. After an error or
    a crash at any moment the former file is untouched.
    """
    # A random name, so that two writers of one file do not collide; not tempfile, whose files only their owner can read.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    unfinished.add(temporary)
    try:
        with disk_full_is_an_error(path):
            temporary.touch()
            usual = temporary.stat().st_mode
            yield temporary
            if temporary.stat().st_mode != usual:  # safetensors replaces it by a file that only its owner can read
                temporary.chmod(usual)
            flush(temporary)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        unfinished.discard(temporary)
    flush(path.parent)


@contextmanager
def disk_full_is_an_error(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into a LabError that names the file."""
    try:
        yield
    except Exception as error:
        # safetensors raises its own exception, which quotes the system's error.
        if getattr(error, "errno", None) in _FULL or any(os.strerror(code) in str(error) for code in _FULL):
            raise LabError(
                f"{path} could not be written because the disk is full; its former version, if any, is untouched. "
                "Free some space and run again."
            ) from error
        raise


def flush(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
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


def shortened(text: str, most: int = 100) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= most else f"{text[:most]}…"


def temporary_folder(path: Path) -> Path:
    """A new folder beside ``path``, whose content :func:`put_in_place` puts there; leftovers of a kill are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    temporary.mkdir()
    return temporary


def put_in_place(temporary: Path, path: Path, replace: bool = False) -> None:
    """Give a whole folder its name, with everything in it on the disk. What is replaced keeps a name of its own until then."""
    for each in temporary.rglob("*"):
        if each.is_file():
            flush(each)
    flush(temporary)
    before = path.with_name(f".{path.name}.before")
    if replace and path.exists():
        os.replace(path, before)
    try:
        os.replace(temporary, path)
    except OSError:
        if before.exists():
            os.replace(before, path)
        raise
    flush(path.parent)
    shutil.rmtree(before, ignore_errors=True)
