"""Damaged and hostile files through every reader of the lab: no traceback, no hang, no memory beyond three times the file.

A *case* is a small valid file, or one made to do harm, with a few changes drawn from ``--seed``: bits, lengths, numbers, sizes
that a header claims, members of archives, values of a description. It is read in a process of its own kind, with a limit on
memory and on time. A reader may give data or refuse in one line (LabError). Everything else is a finding.

    python benchmarks/fuzz.py [--seconds 60] [--cases 0] [--seed 0] [--only npz json] [--large 32]
    python benchmarks/fuzz.py --only npz --case 17 --keep FOLDER

``--seconds`` is for each reader; with ``--cases``, so many of each instead, which are the same on every machine. ``--large``
reads a sound file of so many megabytes of each kind and tells how many times its size the reading takes. ``--case`` repeats
one, with its traceback, and leaves its files in a folder. For Linux. Exit code 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import io
import json
import logging
import math
import multiprocessing
import os
import pickle
import pickletools
import random
import re
import resource
import shutil
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from anyk.lab import data as datasets
from anyk.lab import embed as embedding
from anyk.lab import prediction
from anyk.lab.comparison import results
from anyk.lab.data import arrays, cifar, in_memory, labels, sequences, tokens
from anyk.lab.data.sets import Dataset
from anyk.lab.engines import sweep
from anyk.lab.errors import LabError
from anyk.lab.run import losses, models, summaries
from anyk.lab.run.config import Config
from anyk.lab.run.folder import Run

Files = dict[str, bytes]
"""by their paths in the folder of a case"""

FLOOR = 64 << 20
"""memory that any reading may take, beside three times its file: buffers, threads, the smallest pieces that are worked on"""
PACKED_FLOOR = 256 << 20
"""the same where a file is packed: what it unpacks to counts, and 64 MB may come from a file of any size"""
IMAGE_FLOOR = 1200 << 20
"""the same for images, which may have 89 million pixels: three times four bytes each, where they are transparent"""
SPARE = 512 << 20  # between what is a finding, and where the system refuses more: what is reserved and not used
SECONDS = 10.0  # of computing, and one for each megabyte
WALL_SECONDS = 120.0  # this machine may have more to do
RENEWED = 5000  # cases after which a process is replaced: what libraries keep should not look like a leak


# Changes --------------------------------------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 10**6, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**40]
NUMBERS += [2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
TEXTS = ["", "nan", "inf", "-inf", "1e999", "1e-400", "-1", "0x10", "1_0", "9" * 20, "9" * 5000, "x" * 100_000]
TEXTS += ["\u0661", "\0", "\ufeff", "\u2028", "\x85", "\U0001f600", "\t", "\r", "\n", '"', "'", "::", ",", ";", "#"]
TEXTS += ["../../x", "/dev/zero", "a\0b"]
DEEP = "@deep@"
VALUES: list[Any] = [None, True, False, -1, 1.5, 10**30, 10**400, math.nan, math.inf, "\ud800"]
VALUES += [[], {}, [[]], [None], {"": None}, DEEP, [1] * 2000, *NUMBERS, *TEXTS]


def changed(content: bytes, form: str, draw: random.Random) -> bytes:
    """Some bytes after one to four changes, of which most know the form."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        change = FORMS.get(form, change_bytes) if draw.random() < 0.75 else change_bytes
        try:
            content = change(content, draw)
        except Exception:  # an earlier change has left it without its form
            content = change_bytes(content, draw)
    return content


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """One change that knows nothing of the form."""
    made, size = bytearray(content), max(1, len(content))
    place, length = draw.randrange(size), min(size, int(2 ** draw.uniform(0, 10)))
    match draw.randrange(8):
        case 0 if made:
            made[place] ^= 1 << draw.randrange(8)
        case 1 if made:
            made[place] = draw.randrange(256)
        case 2:
            made[place : place + length] = b""
        case 3:
            made[place:place] = made[draw.randrange(size) :][:length]
        case 4:
            made = made[:place]
        case 5:
            made[place : place + length] = draw.randbytes(length)
        case 6:
            number = draw.choice(NUMBERS) % 2**64
            width = draw.choice((1, 2, 4, 8))
            made[place : place + width] = (number % 2 ** (8 * width)).to_bytes(width, draw.choice(("little", "big")))
        case _:
            made += draw.randbytes(length)
    return bytes(made)


def change_text(content: bytes, draw: random.Random) -> bytes:
    """Words, numbers and lines."""
    text = content.decode("latin-1")
    words = re.split(r"(\s+|[,;:|\"]+)", text)
    place = draw.randrange(len(words))
    match draw.randrange(6):
        case 0:
            words[place] = str(draw.choice(NUMBERS))
        case 1 | 2:
            return "".join([*words[:place], draw.choice(TEXTS), *words[place + draw.randrange(2) :]]).encode("utf-8", "replace")
        case 3:
            words[place], words[-1 - place] = words[-1 - place], words[place]
        case _:
            lines = text.split("\n")
            row = draw.randrange(len(lines))
            times = draw.choice((0, 2, 1000 if len(lines[row]) < 1000 else 3))
            return "\n".join(lines[:row] + [lines[row]] * times + lines[row + 1 :]).encode("latin-1")
    return "".join(words).encode("latin-1", "replace")


def change_value(value: Any, draw: random.Random) -> Any:
    """A JSON value with one of its parts changed."""
    if draw.random() < 0.15 or not value or not isinstance(value, (dict, list)):
        return draw.choice(VALUES)
    if isinstance(value, dict):
        key, made = draw.choice(list(value)), dict(value)
        match draw.randrange(6):
            case 0:
                del made[key]
            case 1:
                made[draw.choice(("", "x", "../x", *made))] = made[key]
            case _:
                made[key] = change_value(value[key], draw)
        return made
    place, made = draw.randrange(len(value)), list(value)
    match draw.randrange(6):
        case 0:
            del made[place]
        case 1:
            made *= 2
        case _:
            made[place] = change_value(value[place], draw)
    return made


def written(value: Any) -> str:
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 20_000 + "]" * 20_000)


def change_json(content: bytes, draw: random.Random) -> bytes:
    """A value, or the text."""
    if draw.random() < 0.2:
        return change_text(content, draw)
    return written(change_value(json.loads(content), draw)).encode()


def change_safetensors(content: bytes, draw: random.Random) -> bytes:
    """What the header says of the tensors, or the description that it carries, with the length of the header set right."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    about = header.get("__metadata__", {})
    if about and draw.random() < 0.7:
        key = draw.choice(list(about))
        about[key] = written(change_value(json.loads(about[key]), draw))
    else:
        header = change_value(header, draw)
    text = written(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


SHAPES = ["(10**12,)", "(1000000000000, 4)", "(1000000000000,)", "(-1,)", "()", "(0, 4)", "(4, 0)", "(1000000000000, 0)"]
SHAPES += ["(9223372036854775807, 9223372036854775807)", "(True,)", "(1, 1, 1, 1, 1)", "(2,)", "(1.0,)", "(" * 500 + ")" * 500]
DTYPES = ["'|O'", "'<U1000000'", "'|S0'", "'<U0'", "'<f2'", "'>f4'", "'<c8'", "'<M8[s]'", "'|V8'", "'|V0'", "'<f16'", "'|b1'"]
DTYPES += ["'|u1'", "'<u8'", "'<i8'", "'|S3'", "[('a', '<f4')]", "[('a', '<f4', (1000000000,))]", "'" + "(9999,)" * 9 + "f4'"]


def change_npy(content: bytes, draw: random.Random) -> bytes:
    """The header of an array, with its length set right."""
    (length,) = struct.unpack("<H", content[8:10])
    header = content[10 : 10 + length].decode("latin-1").rstrip()
    if draw.random() < 0.6:
        header = re.sub(r"'shape': \([^)]*\)", f"'shape': {draw.choice(SHAPES)}", header)
    else:
        header = re.sub(r"'descr': ('[^']*')", f"'descr': {draw.choice(DTYPES)}", header)
    if draw.random() < 0.1:
        header = change_text(header.encode(), draw).decode("latin-1")
    text = (header + "\n").encode("latin-1")
    return content[:6] + b"\x01\x00" + struct.pack("<H", len(text) % 65536) + text + content[10 + length :]


def form_of(name: str) -> str:
    """The form of a file, by its name."""
    if name.endswith(("data.pkl", ".p")) or Path(name).name in ("train", "test", "meta"):
        return "pickle"
    return Path(name).suffix.removeprefix(".")


def change_zip(content: bytes, draw: random.Random) -> bytes:
    """A member, a name, or what the directory claims of one."""
    if draw.random() < 0.4:
        place = draw.choice([match.start() for match in re.finditer(rb"PK\x01\x02|PK\x03\x04", content)])
        made = bytearray(content)
        # version, flags, method, checksum, packed and unpacked size, lengths, offset
        offset, width = draw.choice(((4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4)))
        offset -= 0 if made[place + 2] == 1 else 2
        number = draw.choice([*NUMBERS, draw.randrange(16)])
        made[place + offset : place + offset + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
        return bytes(made)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    chosen = draw.randrange(len(members))
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as archive:
        warnings.simplefilter("ignore")  # of two members with one name
        for place, (info, data) in enumerate(members):
            name = info.filename
            if place == chosen:
                match draw.randrange(8):
                    case 0:
                        name = draw.choice(("../../x.npy", "/x.npy", "x.npy", "y.npy", "\0.npy", "a/" * 300 + "x.npy", ""))
                    case 1:
                        continue
                    case _:
                        data = changed(data, form_of(name), draw)
            archive.writestr(name, data, info.compress_type)
    return out.getvalue()


def change_tar(content: bytes, draw: random.Random) -> bytes:
    """The size, the kind or the name of a member, with its checksum set right; or the content of one."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive if member.isfile()]  # type: ignore[union-attr]
    chosen = draw.randrange(len(members))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for place, (member, data) in enumerate(members):
            if place != chosen:
                archive.addfile(member, io.BytesIO(data))
                continue
            match draw.randrange(6):
                case 0:
                    member.size = abs(draw.choice(NUMBERS))
                    archive.fileobj.write(member.tobuf())  # type: ignore[union-attr]
                    archive.fileobj.write(data)  # type: ignore[union-attr]
                case 1:
                    member.type = draw.choice(
                        (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE, b"\xff")
                    )
                    member.linkname = draw.choice(("/etc/passwd", "train", "../../x"))
                    archive.addfile(member)
                case 2:
                    member.name = draw.choice(("../../train", "/train", "train", "a/" * 200 + "test"))
                    archive.addfile(member, io.BytesIO(data))
                case _:
                    data = changed(data, form_of(member.name), draw)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def change_gzip(content: bytes, draw: random.Random) -> bytes:
    return gzip.compress(changed(gzip.decompress(content), "tar", draw), 1)


PIECES = [
    b"r" + struct.pack("<I", 2**28),  # remember under a large number, for which C Python makes room
    b"r" + struct.pack("<I", 2**32 - 1),
    b"p400000000\n",
    b"\x96" + struct.pack("<Q", 2**33),  # a bytearray, bytes, text, a frame, a number of so many bytes
    b"\x8e" + struct.pack("<Q", 2**40),
    b"\x8d" + struct.pack("<Q", 2**33),
    b"\x95" + struct.pack("<Q", 2**34),
    b"\x8b" + struct.pack("<i", 2**31 - 1),
    b"B" + struct.pack("<I", 2**32 - 1),
    b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R",
    b"(lp0\n" + b"(lp1\ng0\na" * 50,
    b"]" * 5000 + b"a" * 4999,
    b"cos\nsystem\n",
    b"2" * 1000,
    b"0",
]


def change_pickle(content: bytes, draw: random.Random) -> bytes:
    """An instruction more, one less, or another number in one."""
    places = [place for _, _, place in pickletools.genops(content) if place is not None]
    place = draw.choice(places)
    match draw.randrange(4):
        case 0:
            return content[:place] + draw.choice(PIECES) + content[place:]
        case 1:
            end = next((each for each in places if each > place), len(content))
            return content[:place] + content[end:]
        case 2:
            return content[:place] + change_bytes(content[place : place + 8], draw) + content[place + 8 :]
        case _:
            start = draw.choice(places)
            return content[:place] + content[start : start + draw.randrange(1, 200)] + content[place:]


FORMS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "npz": change_zip,
    "pt": change_zip,
    "npy": change_npy,
    "pickle": change_pickle,
    "json": change_json,
    "safetensors": change_safetensors,
    "gz": change_gzip,
    "tar": change_tar,
    **dict.fromkeys(("csv", "tsv", "txt", "md", "dat", "data", "item", "py", "jsonl"), change_text),
}


# Readers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """Files that are changed, and what reads them.

    Args:
        files: sets of files of which each is read.
        read: reads the files in a folder, once or in several ways.
        hostile: sets of files that may be refused.
        large: files of so many megabytes.
        floor: of memory.
    """

    files: Callable[[], list[Files]]
    read: Callable[[Path], Iterable[Callable[[], Any]]]
    hostile: Callable[[], list[Files]] = list
    large: Callable[[int], Files] | None = None
    floor: int = FLOOR


def used(dataset: Dataset) -> None:
    """As a run begins: the parts, and a batch of each."""
    parts = datasets.split(dataset, 0.2, 0.2, 0)
    for split, index in ((dataset.train, parts.train), (parts.test, parts.test_index)):
        if not isinstance(split, tokens.SequenceSplit):
            split.take(index[:5])
        elif len(index):
            split.contexts(index[:5], 6)


def loaded(spec: str) -> Callable[[], None]:
    return lambda: used(datasets.load(spec))


def table(rows: int = 40, width: int = 4) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    made = np.random.default_rng(0)
    return made.standard_normal((rows, width), dtype=np.float32), np.arange(rows) % 4


def images(rows: int = 24, side: int = 8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, (rows, side, side, 3), dtype=np.uint8)


def saved(save_to: Callable[[Any], Any]) -> bytes:
    out = io.BytesIO()
    save_to(out)
    return out.getvalue()


def npz_files() -> list[Files]:
    x, y = table()
    names = np.array(["a", "b", "c", "d"])
    many = images()
    sets = [
        {"x": x, "y": y, "classes": names},
        {"X_train": x.astype(np.float64), "y_train": names[y], "X_test": x[:9], "y_test": names[y[:9]], "groups": y // 2},
        {"train_images": many, "train_labels": y[:24, None], "val_images": many[:8], "val_labels": y[:8, None]},
    ]
    return [{"data.npz": saved(lambda out, kind=kind, each=each: kind(out, **each))}
            for each in sets for kind in (np.savez, np.savez_compressed)]  # fmt: skip


def stored_zip(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    def write(out: Any) -> None:
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, content in members.items():
                archive.writestr(name, content, compresslevel=1)

    return saved(write)


@functools.cache
def zeros(megabytes: int) -> bytes:
    return bytes(megabytes << 20)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    return saved(lambda out: np.save(out, array))


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    return saved(
        lambda out: np.lib.format.write_array_header_1_0(out, {"shape": shape, "fortran_order": False, "descr": dtype})
    )


def npz_hostile() -> list[Files]:
    x, y = table()
    labels = npy(y)
    bomb = stored_zip({"x.npy": npy_header((20 << 20, 4), "<f4") + zeros(320), "y.npy": labels})
    claims = stored_zip({"x.npy": npy_header((10**12, 4), "<f4"), "y.npy": labels})
    locked = bytearray(stored_zip({"x.npy": npy(x), "y.npy": labels}))
    for match in list(re.finditer(rb"PK\x01\x02|PK\x03\x04", bytes(locked))):
        locked[match.start() + (8 if locked[match.start() + 2] == 1 else 6)] |= 1
    lzma = stored_zip({"x.npy": npy(x), "y.npy": labels}, zipfile.ZIP_LZMA)
    return [{"data.npz": each} for each in (bomb, claims, bytes(locked), lzma)]


def read_arrays(name: str) -> Callable[[Path], Iterable[Callable[[], Any]]]:
    def read(folder: Path) -> Iterable[Callable[[], Any]]:
        yield loaded(str(folder / name))
        for shape in ((4,), (3, 8, 8)):
            yield lambda shape=shape: list(arrays.blocks(folder / name, shape, 16))

    return read


def csv_rows(rows: int, width: int = 4) -> bytes:
    x, y = table(rows, width)
    head = ",".join([*(f"f{place}" for place in range(width)), "label"])
    return "\n".join(
        [head, *(",".join([*(f"{v:.4f}" for v in row), f"kind {label}"]) for row, label in zip(x, y, strict=True))]
    ).encode()


def csv_files() -> list[Files]:
    plain = csv_rows(40)
    grouped = b"groups," + plain.replace(b"\n", b"\n7,")
    return [{"data.csv": each} for each in (plain, grouped, plain.replace(b",", b";"), plain.replace(b",", b"\t"))]


def csv_hostile() -> list[Files]:
    wide = csv_rows(2000) + b"\n1,2,3,4," + b"x" * 120_000  # in an array of texts, each would be as long
    return [{"data.csv": each} for each in (wide, csv_rows(8) + b'\n1,2,3,4,"', b"," * 100_000 + b"\n" + b"1," * 100_000)]


def trees() -> list[Any]:
    x, y = table()
    lists = {"features": x.tolist(), "labels": y.tolist(), "class_names": ["a", "b", "c", "d"]}
    return [{"x": x, "y": y}, lists, (x, y, x[:9], y[:9]), {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}]


def pickle_files() -> list[Files]:
    made = [pickle.dumps(tree, protocol) for tree in trees() for protocol in (0, 2, 4, 5)]
    permuted = images().transpose(0, 3, 1, 2)
    made += [pickle.dumps({"x": permuted, "y": np.arange(24) % 4, "about": {"counts": Counter("ab"), "set": {1}}}, 5)]
    return [{"data.p": each} for each in made]


def laughs(kind: Callable[[Any], Any]) -> bytes:
    nested: Any = kind([0] * 10)
    for _ in range(11):
        nested = kind([nested] * 10)
    return pickle.dumps({"x": nested, "y": [0, 1]})


def pickle_hostile() -> list[Files]:
    x, y = table()
    valid = pickle.dumps({"x": x, "y": y}, 2)
    many = [np.frombuffer(bytes(1 << 20), np.uint8)] * 3000
    made = [valid[:2] + piece + valid[2:] for piece in PIECES]
    made += [laughs(list), laughs(lambda items: dict(enumerate(items))), pickle.dumps({"x": many, "y": list(range(3000))})]
    expanded = torch.zeros(1).expand(20_000, 20_000)
    made += [pickle.dumps({"x": expanded, "y": [0, 1]}), pickle.dumps({"x": x, "y": ["a"] * 10**5 + ["b" * 10**5]})]
    made += [pickle.dumps({"x": x, "y": y, "about": {"k" * 100_000: dict.fromkeys(range(2000))}})]  # a name for all below it
    for names in (["s" * 100_000] * 2000, [10**5000, 1, 2, 3]):
        made.append(pickle.dumps({"x": x, "y": y, "classes": names}))
    made.append(pickle.dumps({"x": x, "y": [torch.empty(3_000_000, 0)] * 40}))
    made.append(pickle.dumps(dict.fromkeys(n * (2**61 - 1) for n in range(20_000))))  # of one hash
    pairs = b"]q\x00(" + b"".join(b"M" + struct.pack("<H", n) + b"N\x86" for n in range(2000)) + b"e0"
    for call in (b"ccollections\nOrderedDict\nh\x00\x85R", b"c__builtin__\nset\nh\x00\x85R"):
        made.append(b"\x80\x02" + pairs + b"](" + call * 20_000 + b"e.")  # one list, and much that is made of it
    return [{"data.p": each} for each in made]


def torch_files() -> list[Files]:
    about = {"device": torch.device("cpu"), "dtype": torch.float32, "set": {1, "a"}, "counts": Counter("ab")}
    made = [saved(lambda out, tree=tree: torch.save(tree, out)) for tree in (trees()[1], trees()[3], trees()[3] | about)]
    made += [saved(lambda out: torch.save(trees()[3], out, _use_new_zipfile_serialization=False))]
    return [{"data.pt": each} for each in made]


def torch_hostile() -> list[Files]:
    nested: Any = torch.zeros(4, 4)
    for _ in range(12):
        nested = dict.fromkeys(range(10), nested)
    made = [{"x": torch.zeros(1).expand(20_000, 20_000), "y": torch.zeros(20_000)}, {"x": nested, "y": [0, 1]}]
    made += [
        {"x": torch.eye(4).to_sparse(), "y": torch.arange(4)},
        {"x": torch.zeros(4, 4, device="meta"), "y": torch.arange(4)},
    ]
    packed = [saved(lambda out, tree=tree: torch.save(tree, out)) for tree in made]
    old = saved(lambda out: torch.save(made[0], out, _use_new_zipfile_serialization=False))
    call = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R."
    called = stored_zip({"a/data.pkl": call, "a/version": b"3\n", "a/byteorder": b"little"}, zipfile.ZIP_STORED)
    bomb = stored_zip({"a/data.pkl": b"\x80\x02X\x00\x00\x00\x13" + zeros(304), "a/version": b"3\n"})
    # What is packed is longer than it says, and opens a million lists.
    liar = bytearray(stored_zip({"a/data.pkl": b"\x80\x02" + b"]" * (50 << 20), "a/version": b"3\n"}))
    for match in list(re.finditer(rb"PK\x01\x02|PK\x03\x04", bytes(liar)))[::2]:
        place = match.start() + (24 if liar[match.start() + 2] == 1 else 22)
        liar[place : place + 4] = struct.pack("<I", 64)
    return [{"data.pt": each} for each in (*packed, old, called, bomb, bytes(liar))]


def embedding_set() -> Files:
    x, y = torch.from_numpy(table()[0]), torch.from_numpy(table()[1])
    described = json.dumps({"name": "small", "classes": ["a", "b", "c", "d"], "files": ["train.safetensors"]}).encode()
    return {"set/train.safetensors": save({"embeddings": x, "labels": y, "groups": y // 2}), "set/dataset.json": described}


def kept_images() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(in_memory.keep((images(), np.arange(24) % 4), folder))
        return {"kept/images.safetensors": (place / in_memory.IMAGES).read_bytes()}


def read_safetensors(folder: Path) -> Iterable[Callable[[], Any]]:
    if (folder / "set").exists():
        yield loaded(str(folder / "set"))
        yield lambda: list(prediction._array_blocks(folder / "set/train.safetensors", (4,), 16, None))
    else:
        yield loaded(str(folder / "kept"))


def plans() -> list[models.Plan]:
    names = ("a", "b", "c", "d")
    shape = {"classes": names, "hidden": 6, "dropout": 0.0}
    pixels = {"mean": (0.5,) * 3, "std": (0.2,) * 3}
    token = {"tokens": "items", "embedding": 4, "layers": 1}
    made = [models.Plan("linear", (4,), feature_mean=(0.0,) * 4, feature_std=(1.0,) * 4, **shape)]
    made += [models.Plan("mlp", (4,), **shape), models.Plan("cnn", (3, 8, 8), width=2, **shape, **pixels)]
    made += [models.Plan(name, (5,), **shape, **token) for name in ("context", "gru")]  # type: ignore[arg-type]
    made += [models.Plan("attention", (5,), heads=2, tied=True, mask_seen=True, **shape, **token)]  # type: ignore[arg-type]
    return made


def model_file(plan: models.Plan, described: dict[str, Any] | None = None) -> bytes:
    weights = plan.build().state_dict()
    return save({name: value.contiguous() for name, value in weights.items()}, {"state": written(described or plan.to_json())})


def model_files() -> list[Files]:
    torch.manual_seed(0)
    return [{"model.safetensors": model_file(plan)} for plan in plans()]


def model_hostile() -> list[Files]:
    linear, _, cnn, context, gru, attention = plans()
    resnet = models.Plan("resnet18", (3, 8, 8), ("a", "b"), 6, 0.0, (0.5,) * 3, (0.2,) * 3)
    lies = [
        (linear, {"classes": ["\ud800", "b", "c", "d"]}),
        (linear, {"shape": [2**61], "feature_mean": [], "feature_std": []}),
        (cnn, {"width": 10**9}),
        (gru, {"shape": [2**61]}),
        (gru, {"hidden": 10**9, "layers": 1000}),
        (attention, {"layers": 1000}),
        (attention, {"heads": 10**9, "embedding": 10**9}),
        (context, {"model": "os:system"}),
        (cnn, {"model": "timm:resnet50", "shape": [3, 10**6, 10**6]}),
        (resnet, {"shape": [3, 10**6, 10**6]}),
        (linear, {"dropout": DEEP}),
    ]
    return [{"model.safetensors": model_file(plan, {**plan.to_json(), **lie})} for plan, lie in lies]


def read_model(folder: Path) -> Iterable[Callable[[], Any]]:
    def guess() -> None:
        model = models.load(folder / "model.safetensors")
        dtype = torch.int64 if model.plan.tokens else torch.uint8 if len(model.plan.shape) == 3 else torch.float32
        if model.plan.tokens:
            model.guesses(model.tokens([["a", "b", "?"]]), 3, seen=[["a"]])
        else:
            model.guesses(torch.zeros(2, *model.plan.shape, dtype=dtype), 3)
        json.dumps(model.classes, ensure_ascii=False).encode()  # as predict writes them

    yield guess


def json_files() -> list[Files]:
    config = Config(data="glyphs:10", epochs=1).to_json()
    scores = {"top1": 0.5, "top5": 0.9}
    result = {"format": 1, "config": config, "data": {"fingerprint": "0", "classes": 10}, "validation": scores, "test": scores}
    line = json.dumps({"step": 1, "epoch": 1.0, "validation": scores}) + "\n"
    swept = {"base": {"epochs": 2}, "grid": {"loss": ["softmax", "splitter"], "m": [16, None]}, "runs": {"one": {"seed": 3}}}
    plan = {"format": models.FORMAT, **dataclasses.asdict(plans()[0])}
    described = json.dumps({"name": "small", "classes": ["a", "b", "c", "d"]}).encode()
    run = {"run/config.json": config, "run/result.json": {**result, "seconds": 1.0}, "run/environment.json": {"python": "3"}}
    return [
        {**{name: json.dumps(value).encode() for name, value in run.items()}, "run/metrics.jsonl": line.encode() * 3},
        {"sweep.json": json.dumps(swept).encode()},
        {"plan.json": json.dumps(plan).encode()},
        {"p_k.json": json.dumps([[0.5, 0.5], [1.0, 0.0]]).encode()},
        {"p_k.csv": b"0.5,0.5\n1,0\n"},
        {"classes.json": json.dumps(["a", "b"]).encode()},
        {**embedding_set(), "set/dataset.json": described},
        {"out.partial/plan.json": json.dumps({"backbone": "b", "half": True}).encode(), "out.partial/train-000000.shard": b""},
    ]


def json_hostile() -> list[Files]:
    lists = ("methods", "controls", "contrasts", "ks", "unreadable", "failures")
    comparison: dict[str, Any] = {"format": results.FORMAT, "command": "anyk compare", "by_class": None, "moves": None}
    comparison |= {key: {} for key in ("data", "settings", "environment")} | {key: [] for key in lists}
    deep = written(DEEP).encode()
    paths = {"name": "small", "classes": ["a", "b", "c", "d"], "files": ["../train.safetensors"]}
    surrogate = {"name": "small", "classes": ["\ud800", "b", "c", "d"]}
    made = [{name: deep} for name in ("sweep.json", "p_k.json", "classes.json", "results.json")]
    made += [{**embedding_set(), "set/dataset.json": json.dumps(each).encode()} for each in (paths, surrogate)]
    return [
        *made,
        {"results.json": json.dumps(comparison).encode()},
        {"sweep.json": b'{"base": {"seed": 1' + b"0" * 4000 + b"}}"},
    ]


def read_json(folder: Path) -> Iterable[Callable[[], Any]]:
    if (folder / "run").exists():
        run = Run(folder / "run")
        yield run.config
        yield run.metrics
        yield lambda: summaries.table(summaries.collect([folder]))
        yield lambda: summaries.curves(summaries.collect([folder]))
    if (folder / "sweep.json").exists():
        yield lambda: sweep.read(folder / "sweep.json", Config())
    if (folder / "plan.json").exists():
        yield lambda: _plan(folder / "plan.json")
    for name in ("p_k.json", "p_k.csv"):
        if (folder / name).exists():
            yield lambda name=name: losses.read_p_k(folder / name, 2)
    if (folder / "classes.json").exists():
        yield lambda: labels.read_names(folder / "classes.json")
    if (folder / "results.json").exists():
        yield lambda: results.read(folder / "results.json")
    if (folder / "set").exists():
        yield loaded(str(folder / "set"))
    if (folder / "out.partial").exists():
        yield lambda: embedding._enter(folder / "out.partial", {"backbone": "b", "half": True})


def _plan(file: Path) -> None:
    """As a model's file carries it."""
    torch.manual_seed(0)
    weights = plans()[0].build().state_dict()
    text = file.read_bytes().decode("utf-8", "replace")
    model = file.with_suffix(".safetensors")
    model.write_bytes(save({name: value.contiguous() for name, value in weights.items()}, {"state": text}))
    models.load(model)


def sequence_lines(rows: int = 30) -> bytes:
    draw = random.Random(0)
    return "\n".join(" ".join(f"item{draw.randrange(12)}" for _ in range(draw.randrange(3, 9))) for _ in range(rows)).encode()


def sequence_hostile() -> list[Files]:
    wide = sequence_lines() + " \U0001f600".encode() + b" x" * 200_000
    return [{"data.txt": each} for each in (wide, b"\n" * 10**6, b"a b\n" * 200_000, b"\xff\xfea\0", b"a" * 10**6 + b" b c d")]


def read_sequences(folder: Path) -> Iterable[Callable[[], Any]]:
    file = folder / "data.txt"
    for split in ("last", "lines"):
        yield lambda split=split: used(sequences.load(file, split))
    yield lambda: prediction._sequences(file, plans()[-1])


def word_text(lines: int = 60) -> bytes:
    draw = random.Random(0)
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "dog's", "d\u00e9j\u00e0", "vu", "42", "3.14")
    return "\n".join(" ".join(draw.choice(words) for _ in range(9)) + "." for _ in range(lines)).encode()


def read_words(folder: Path) -> Iterable[Callable[[], Any]]:
    spec = folder / "text" if (folder / "text").exists() else folder / "data.txt"
    yield loaded(f"words:{spec}")
    yield lambda: prediction._sequences(
        next(spec.iterdir()) if spec.is_dir() else spec, dataclasses.replace(plans()[-1], tokens="words")
    )


def ratings(rows: int = 60) -> list[tuple[int, int, int, int]]:
    draw = random.Random(0)
    return [
        (1 + row % 6, 1 + draw.randrange(9), 1 + draw.randrange(5), 978300000 + draw.randrange(1000)) for row in range(rows)
    ]


def movielens_files() -> list[Files]:
    titles = [(number, f"Film {number} (199{number})") for number in range(1, 10)]

    def lines(separator: str, rows: Iterable[Iterable[object]]) -> str:
        return "".join(separator.join(map(str, row)) + "\n" for row in rows)

    return [
        {"ratings.dat": lines("::", ratings()).encode(), "movies.dat": lines("::", [(*t, "Drama") for t in titles]).encode()},
        {"u.data": lines("\t", ratings()).encode(), "u.item": lines("|", titles).encode("latin-1")},
        {
            "ratings.csv": b"userId,movieId,rating,timestamp\n" + lines(",", ratings()).encode(),
            "movies.csv": b"movieId,title,genres\n" + lines(",", [(n, f'"{t}, The"', "Drama") for n, t in titles]).encode(),
        },
    ]


def cifar_folder(classes: int = 4, each: int = 3) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        made = cifar.write_small(Path(folder), each, classes)
        return {f"cifar-100-python/{path.name}": path.read_bytes() for path in sorted(made.iterdir())}


def cifar_binary() -> Files:
    record = b"".join(bytes([0, label]) + bytes(3072) for label in range(4))
    return {"train.bin": record * 2, "test.bin": record, "fine_label_names.txt": b"a\nb\nc\nd\n"}


def tarred(members: Files) -> bytes:
    def write(out: Any) -> None:
        with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))

    return saved(write)


def cifar_files() -> list[Files]:
    return [cifar_folder(), cifar_binary()]


def archive_files() -> list[Files]:
    return [{"cifar.tar.gz": tarred(cifar_folder())}, {"cifar.tar.gz": tarred(cifar_binary())}]


def archive_hostile() -> list[Files]:
    python, binary = cifar_folder(), cifar_binary()
    bombs = [
        {**python, "cifar-100-python/train": zeros(320)},
        {**binary, "rest": zeros(320)},
        {**binary, "train.bin": zeros(320)},
    ]
    return [{"cifar.tar.gz": tarred(bomb)} for bomb in bombs]


def read_cifar(folder: Path) -> Iterable[Callable[[], Any]]:
    yield loaded(f"cifar100:{folder / 'cifar.tar.gz' if (folder / 'cifar.tar.gz').exists() else folder}")


PICTURES = ("png", "jpg", "gif", "bmp", "webp", "tif", "ppm")


def picture(kind: str, mode: str = "RGB", side: int = 20) -> bytes:
    pixels = Image.fromarray(images(1, side)[0]).convert(mode)
    return saved(lambda out: pixels.save(out, {"jpg": "JPEG", "tif": "TIFF"}.get(kind, kind.upper())))


def image_files() -> list[Files]:
    modes = {"png": ("RGB", "L", "RGBA", "P", "I;16", "1", "LA"), "tif": ("RGB", "L"), "gif": ("P",)}
    others = {"data/a/2.png": picture("png"), "data/b/1.png": picture("png")}
    made = [{f"data/a/1.{kind}": picture(kind, mode), **others} for kind in PICTURES for mode in modes.get(kind, ("RGB",))]
    page = Image.new("1", (4960, 7016), 1)  # white, at 600 dpi
    return [*made, {"data/a/1.tif": saved(lambda out: page.save(out, "TIFF", compression="group4")), **others}]


def png_claiming(width: int, height: int, colours: int = 2) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    row = bytes(1 + width * {2: 3, 6: 4}[colours])
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def envelope(inner: bytes) -> bytes:
    """An image of IPTC, which Pillow tries on any file, and which holds another image."""
    fields = {(3, 60): b"\x01\x00", (3, 20): b"\x00\x09", (3, 30): b"\x00\x09", (3, 120): b"\x05", (8, 10): inner}
    return b"".join(bytes([0x1C, *place]) + struct.pack(">H", len(value)) + value for place, value in fields.items())


def image_hostile() -> list[Files]:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) print\n%%EOF\n"
    made = [png_claiming(9_500, 9_500, 6), script, picture("png")[:33] + b"\xff" * 100]
    made += [
        envelope(script),
        envelope(png_claiming(3_000, 3_000)[:30_000]),
        saved(lambda out: Image.new("RGB", (32, 32)).save(out, "ICO")),
    ]
    return [{"data/a/1.png": each, "data/a/2.png": picture("png"), "data/b/1.png": picture("png")} for each in made]


def read_images(folder: Path) -> Iterable[Callable[[], Any]]:
    def one(path: Path) -> None:
        read = prediction._image_reader((1, 16, 16), None, "cpu")
        assert read is not None
        list(prediction._image_batches(iter([path]), read, 4, lambda _: None))
        encoder = embedding.Encoder(
            torch.nn.Flatten(), embedding.centre_crop(8, 1.0, (0.5,) * 3, (0.5,) * 3), "cpu", torch.float32
        )
        encoder.embed(folder, [(str(path.relative_to(folder)), 0)], 4, lambda _: None)

    yield lambda: datasets.load(str(folder / "data"))
    for path in sorted((folder / "data").rglob("*.*")):
        yield lambda path=path: one(path)


def read_python(folder: Path) -> Iterable[Callable[[], Any]]:
    yield lambda: prediction._sequences(folder / "data.py", dataclasses.replace(plans()[-1], tokens="python"))


def python_hostile() -> list[Files]:
    cookies = ["hex", "zlib", "utf-16", "idna", "unicode_escape", "rot13", "undefined", "x"]
    made = [f"# -*- coding: {name} -*-\nx = '\\ud800'\n".encode() for name in cookies]
    return [{"data.py": each} for each in (*made, b"(" * 10_000, b"f'" + b"{f'" * 200, b"\0", b"x = 1" + b"0" * 10_000)]


SOURCE = (
    b"# -*- coding: utf-8 -*-\ndef f(x, *, y=1):\n    '''Text.'''\n    return [f'{x!r:>{y}}', 0x1, x if y else None]\n\nf(1"
)


def large_arrays(kind: Callable[..., Any]) -> Callable[[int], Files]:
    def make(megabytes: int) -> Files:
        x, y = table(megabytes * 4096, 64)
        return {"data.npz": saved(lambda out: kind(out, x=x, y=y))}

    return make


def large_npy(megabytes: int) -> Files:
    x, y = table(megabytes * 4096, 64)
    return {"data.npy": npy(x), "data_labels.npy": npy(y)}


def large_tree(dump: Callable[[Any, Any], Any], name: str) -> Callable[[int], Files]:
    def make(megabytes: int) -> Files:
        x, y = table(megabytes * 4096, 64)
        return {name: saved(lambda out: dump({"x": torch.from_numpy(x) if name == "data.pt" else x, "y": y.tolist()}, out))}

    return make


def large_set(megabytes: int) -> Files:
    x, y = table(megabytes * 4096, 64)
    return {
        **embedding_set(),
        "set/train.safetensors": save({"embeddings": torch.from_numpy(x), "labels": torch.from_numpy(y)}),
    }


def large_ratings(megabytes: int) -> Files:
    draw = np.random.default_rng(0)
    rows = zip(*(draw.integers(1, high, megabytes * 45_000).tolist() for high in (6041, 3953, 6)), strict=True)
    return {"ratings.dat": "".join(f"{u}::{m}::{r}::978300{u + m:04}\n" for u, m, r in rows).encode()}


def large_model(megabytes: int) -> Files:
    return {"model.safetensors": model_file(models.Plan("linear", (65536,), tuple(map(str, range(4 * megabytes))), 6, 0.0))}


def repeated(make: Callable[[int], bytes], name: str, rows: int) -> Callable[[int], Files]:
    return lambda megabytes: {name: make(megabytes * rows)}


READERS = {
    "npz": Reader(npz_files, read_arrays("data.npz"), npz_hostile, large_arrays(np.savez), PACKED_FLOOR),
    "npy": Reader(
        lambda: [{"data.npy": npy(x), "data_labels.npy": npy(y)} for x, y in (table(), (images(), np.arange(24) % 4))],
        read_arrays("data.npy"),
        lambda: [{"data.npy": npy_header((10**12, 4), "<f4"), "data_labels.npy": npy_header((10**12,), "|S0")}],
        large_npy,
    ),
    "csv": Reader(csv_files, read_arrays("data.csv"), csv_hostile, repeated(lambda rows: csv_rows(rows, 20), "data.csv", 6600)),
    "pickle": Reader(pickle_files, read_arrays("data.p"), pickle_hostile, large_tree(pickle.dump, "data.p")),
    "torch": Reader(torch_files, read_arrays("data.pt"), torch_hostile, large_tree(torch.save, "data.pt"), PACKED_FLOOR),
    "safetensors": Reader(lambda: [embedding_set(), kept_images()], read_safetensors, large=large_set),
    "model": Reader(model_files, read_model, model_hostile, large_model),
    "json": Reader(json_files, read_json, json_hostile),
    "sequences": Reader(
        lambda: [{"data.txt": sequence_lines()}], read_sequences, sequence_hostile, repeated(sequence_lines, "data.txt", 28_000)
    ),
    "words": Reader(
        lambda: [
            {"data.txt": word_text()},
            {"text/a.txt": word_text(30), "text/b.md": word_text(20), "text/c.txt": word_text(9)},
        ],
        read_words,
        lambda: [
            {"data.txt": word_text() + " \U0001f600".encode() + b" x" * 200_000},
            {"data.txt": word_text() + ("a" + "\u0316\u0301" * 100_000).encode()},
        ],
        repeated(word_text, "data.txt", 27_000),
    ),
    "movielens": Reader(movielens_files, lambda folder: [loaded(f"movielens:{folder}")], large=large_ratings),
    "cifar": Reader(cifar_files, read_cifar, large=lambda size: cifar_folder(4, size * 71)),
    "archives": Reader(
        archive_files,
        read_cifar,
        archive_hostile,
        lambda size: {"cifar.tar.gz": tarred(cifar_folder(4, size * 71))},
        PACKED_FLOOR,
    ),
    "images": Reader(image_files, read_images, image_hostile, floor=IMAGE_FLOOR),
    "python": Reader(lambda: [{"data.py": SOURCE}], read_python, python_hostile),
}


# One case -------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What became of one case."""

    outcome: str  # read, refused, or a finding: traceback, warning, long message, memory, hang, crash
    told: str = ""
    seconds: float = 0.0
    memory: int = 0  # more than before
    size: int = 0  # of its files


FINDINGS = ("traceback", "warning", "message", "memory", "hang", "crash", "unread")


def files_of(reader: Reader, seed: int, name: str, number: int, sound: list[Files], hostile: list[Files]) -> Files:
    """The files of a case: the first are the sound ones as they are, then the hostile ones, then all with changes."""
    together = sound + hostile
    if number < len(together):
        return together[number]
    draw = random.Random(f"{seed} {name} {number}")
    # Of hostile files, small ones: the large ones take long to change, and are what they are.
    chosen = dict(draw.choice([each for each in together if sum(map(len, each.values())) < 300_000]))
    file = draw.choice(list(chosen))
    chosen[file] = changed(chosen[file], form_of(file), draw)
    return chosen


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def attempt(reader: Reader, files: Files, folder: Path, shown: bool = False) -> Case:
    """Read the files of a case."""
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    case = Case("read", size=sum(map(len, files.values())))
    allowed = 3 * case.size + reader.floor
    Path("/proc/self/clear_refs").write_text("5")  # the highest use from here on
    before, began = status("VmRSS"), time.process_time()
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + allowed + SPARE, resource.RLIM_INFINITY))
    for count, call in enumerate(reader.read(place)):
        error: BaseException | None = None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                call()
            except LabError as refused:
                error = refused
                if not count:  # the others read it as something else, which it may not be
                    case.outcome = "refused"
                if "\n" in str(refused) or len(str(refused)) > 2000:
                    case.outcome, case.told = "message", f"{len(str(refused))} characters: {str(refused)[:80]!r}"
            except Exception as failure:
                error = failure
                inner = [frame for frame in traceback.extract_tb(failure.__traceback__) if "/anyk/" in frame.filename]
                where = f"{Path(inner[-1].filename).name}:{inner[-1].lineno}" if inner else "?"
                case.outcome, case.told = "traceback", f"{type(failure).__name__} at {where}: {str(failure)[:100]}"
        if shown and error is not None:
            traceback.print_exception(error)
        while error is not None:
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                case.outcome, case.told = "memory", f"{type(error).__name__}: {str(error)[:100]}"
            error = error.__cause__ or error.__context__
        if told and case.outcome not in FINDINGS:
            case.outcome, case.told = "warning", f"{told[0].category.__name__}: {str(told[0].message)[:100]}"
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    case.seconds, case.memory = time.process_time() - began, max(0, status("VmHWM") - before)
    if case.memory > allowed and case.outcome != "memory":
        case.outcome, case.told = "memory", f"{case.memory / 1e6:.0f} MB for {case.size / 1e6:.3f} MB"
    if case.seconds > SECONDS + case.size / 1e6 and case.outcome not in FINDINGS:
        case.outcome, case.told = "hang", f"{case.seconds:.0f} s of computing"
    return case


def work(name: str, seed: int, first: int, last: float, until: float, pipe: Any) -> None:
    """A process that reads one case after the other."""
    reader = READERS[name]
    sound, hostile = reader.files(), reader.hostile()
    zeros.cache_clear()
    with tempfile.TemporaryDirectory(prefix="anyk-fuzz-") as folder:
        os.environ["ANYK_CACHE"] = f"{folder}/cache"
        for files in sound:  # what is imported and made on first use is no part of a case
            attempt(reader, files, Path(folder))
        number = first
        while number < min(last, first + RENEWED) and (time.time() < until or number < len(sound) + len(hostile)):
            files = files_of(reader, seed, name, number, sound, hostile)
            pipe.send((number, None))
            case = attempt(reader, files, Path(folder))
            if number < len(sound) and case.outcome == "refused":
                case.outcome, case.told = "unread", f"the sound file {number} is refused"
            pipe.send((number, case))
            number += 1
    pipe.send((number, "stopped"))


def cases_of(name: str, seed: int, count: int, seconds: float) -> dict[int, Case]:
    """All cases of a reader, each with what became of it."""
    found: dict[int, Case] = {}
    until = math.inf if count else time.time() + seconds
    last = count or math.inf
    first, stopped = 0, False
    while not stopped and first < last:
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=work, args=(name, seed, first, last, until, there))
        process.start()
        there.close()
        began = first - 1
        try:
            while True:
                if not here.poll(WALL_SECONDS):
                    found[began] = Case("hang", f"more than {WALL_SECONDS:.0f} s", WALL_SECONDS)
                    break
                first, case = here.recv()
                if case == "stopped":
                    stopped = first - began - 1 < RENEWED and (time.time() >= until or first >= last)
                    break
                began = first
                if case is not None:
                    found[first] = case
        except EOFError:
            process.join()
            found[began] = Case("crash", f"the process ended with {process.exitcode}")
        process.kill()
        process.join()
        first = max(found, default=-1) + 1
    return found


# All ------------------------------------------------------------------------------------------------------------------


def large(name: str, megabytes: int) -> str:
    """Memory for a sound large file, as a line of a table."""
    reader = READERS[name]
    if reader.large is None:
        return ""
    here, there = multiprocessing.Pipe(duplex=False)

    def measure() -> None:
        assert reader.large is not None
        with tempfile.TemporaryDirectory(prefix="anyk-fuzz-") as folder:
            os.environ["ANYK_CACHE"] = f"{folder}/cache"
            attempt(reader, reader.files()[0], Path(folder))
            only = dataclasses.replace(reader, read=lambda place: list(reader.read(place))[:1], floor=64 << 30)
            there.send(attempt(only, reader.large(megabytes), Path(folder)))

    process = multiprocessing.get_context("fork").Process(target=measure)
    process.start()
    there.close()
    try:
        case = here.recv()
    except EOFError:
        return f"| {name} | crash | | |"
    finally:
        process.join()
    told = "" if case.outcome == "read" else f" {case.outcome}: {case.told}"
    return f"| {name} | {case.size / 1e6:.0f} | {case.memory / 1e6:.0f} | {case.memory / case.size:.1f} |{told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--large", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # the readers tell what they leave out
    if given.case is not None:
        name = given.only[0]
        reader = READERS[name]
        folder = given.keep or Path(tempfile.mkdtemp(prefix="anyk-fuzz-"))
        os.environ["ANYK_CACHE"] = f"{folder}/cache"
        files = files_of(reader, given.seed, name, given.case, reader.files(), reader.hostile())
        print(attempt(reader, files, folder, shown=True), folder / "case")
        return 0
    print("| reader | cases | read | refused | findings | most memory, MB | longest, s |\n|---|---|---|---|---|---|---|")
    failed: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], tuple[int, str]] = {}
    for name in given.only:
        cases = cases_of(name, given.seed, given.cases, given.seconds)
        counts = Counter(case.outcome for case in cases.values())
        findings = sum(counts[outcome] for outcome in FINDINGS)
        most, longest = max(case.memory for case in cases.values()), max(case.seconds for case in cases.values())
        numbers = f"{len(cases)} | {counts['read']} | {counts['refused']} | {findings}"
        print(f"| {name} | {numbers} | {most / 1e6:.0f} | {longest:.1f} |", flush=True)
        for number, case in cases.items():
            if case.outcome in FINDINGS:
                key = (name, case.outcome, case.told.partition(":")[0] if case.outcome != "traceback" else case.told[:45])
                failed[key] += 1
                examples.setdefault(key, (number, case.told))
    for key, count in failed.most_common():
        number, told = examples[key]
        print(f"{key[0]}: {key[1]}, {count} times; --only {key[0]} --seed {given.seed} --case {number}: {told}")
    if given.large:
        print("\n| reader | file, MB | memory, MB | times the file |\n|---|---|---|---|")
        for name in given.only:
            line = large(name, given.large)
            if line:
                print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
