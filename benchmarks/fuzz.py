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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import save

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import hostile
import lab_data
from anyk.lab import data as datasets
from anyk.lab import embed, prediction
from anyk.lab.data import arrays, cifar, in_memory, labels, sequences, tables, tokens
from anyk.lab.data.sets import Dataset
from anyk.lab.errors import LabError
from anyk.lab.run import losses, models, summaries
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from hostile import Files, npy, saved, tarred

FLOOR = 64 << 20
"""Memory that any reading may take beside three times its file: buffers, threads, the smallest pieces that are worked on."""
PACKED_FLOOR = 256 << 20
"""The same for compressed files: 64 MB may come from a file of any size."""
IMAGE_FLOOR = 1200 << 20
"""The same for images, which may have 89 million pixels: three times four bytes each, where they are transparent."""
SPARE = 512 << 20  # between what is a finding, and where the system refuses more
SECONDS = 10.0  # of computing, and one more for each megabyte
WALL_SECONDS = 120.0  # the machine may be busy
RENEWED = 5000  # cases after which a process is replaced: what libraries keep should not look like a leak
BOMB = 320  # megabytes


# Changes --------------------------------------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 10**6, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**40]
NUMBERS += [2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
TEXTS = ["", "nan", "inf", "-inf", "1e999", "1e-400", "-1", "0x10", "1_0", "9" * 20, "9" * 5000, "x" * 100_000]
TEXTS += ["\u0661", "\0", "\ufeff", "\u2028", "\x85", "\U0001f600", "\t", "\r", "\n", '"', "'", "::", ",", ";", "#"]
TEXTS += ["../../x", "/dev/zero", "a\0b"]
VALUES: list[Any] = [None, True, False, -1, 1.5, 10**30, 10**400, math.nan, math.inf, "\ud800"]
VALUES += [[], {}, [[]], [None], {"": None}, hostile.DEEP, [1] * 2000, *NUMBERS, *TEXTS]


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
    return json.dumps(value).replace(f'"{hostile.DEEP}"', hostile.DEEP)


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


def change_member(members: list[tuple[str, bytes]], draw: random.Random) -> list[tuple[str, bytes]]:
    """The members of an archive, of which one is gone, renamed or changed."""
    place = draw.randrange(len(members))
    name, content = members[place]
    names = ("../../x.npy", "/x.npy", "x.npy", "y.npy", "\0.npy", "a/" * 300 + "x.npy", "", "../../train", "/train", "train")
    match draw.randrange(8):
        case 0:
            members[place] = draw.choice(names), content
        case 1:
            del members[place]
        case _:
            members[place] = name, changed(content, form_of(name), draw)
    return members


def change_zip(content: bytes, draw: random.Random) -> bytes:
    """A member, or what the directory claims of one."""
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
        method = archive.infolist()[0].compress_type
        members = change_member([(name, archive.read(name)) for name in archive.namelist()], draw)
    return hostile.zipped(dict(members), method)


def change_tar_gz(content: bytes, draw: random.Random) -> bytes:
    """A member; or the size or the kind of one, with its checksum set right."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [(member.name, archive.extractfile(member).read()) for member in archive if member.isfile()]  # type: ignore[union-attr]
    if draw.random() < 0.7:
        return tarred(dict(change_member(members, draw)))
    (name, first), *_ = members
    kind = draw.choice((tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE, b"\xff"))
    link = draw.choice(("/etc/passwd", "train", "../../x"))
    header = hostile.member(name, size=abs(draw.choice(NUMBERS)), type=kind, linkname=link)
    return gzip.compress(header + first + gzip.decompress(tarred(dict(members[1:]))), 1)


PIECES = [*hostile.LENGTHS.values(), *hostile.MEMO, b"(lp0\n" + b"(lp1\ng0\na" * 50, b"]" * 5000 + b"a" * 4999]
PIECES += [b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R", b"cos\nsystem\n", b"2" * 1000, b"0"]


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
    "gz": change_tar_gz,
    **dict.fromkeys(("csv", "tsv", "txt", "md", "dat", "data", "item", "py", "jsonl"), change_text),
}


# Readers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """Files that are changed, and what reads them.

    Args:
        files: sets of sound files, of so many rows.
        read: reads the files in a folder, in one way or in several.
        hostile: sets of files that may be refused.
        rows: of a megabyte, with which the first of the files grows; 0: it does not.
        floor: of memory.
    """

    files: Callable[[int], Iterable[Files]]
    read: Callable[[Path], Iterable[Callable[[], Any]]]
    hostile: Callable[[], Iterable[Files]] = list
    rows: int = 0
    floor: int = FLOOR


def used(dataset: Dataset) -> None:
    """As a run begins: the parts, and a batch of each."""
    parts = datasets.split(dataset, 0.2, 0.2, 0)
    for split, index in ((dataset.train, parts.train), (parts.test, parts.test_index)):
        if not isinstance(split, tokens.SequenceSplit):
            split.take(index[:5])
        elif len(index):
            split.contexts(index[:5], 6)


def loaded(spec: object) -> Callable[[], None]:
    return lambda: used(datasets.load(str(spec)))


def all_of(made: hostile.Hostile) -> list[Files]:
    return [files for files, _ in made.values()]


def written_by(write: Callable[[Path], Any], under: str = "") -> Files:
    """What a function writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"{under}{path.relative_to(folder).as_posix()}": path.read_bytes() for path in found}


def table(rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.random.default_rng(0).standard_normal((rows, 64), dtype=np.float32), np.arange(rows) % 4


IMAGES = np.random.default_rng(1).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
COLOURS = np.arange(24) % 4


def npz_files(rows: int) -> Iterator[Files]:
    x, y = table(rows)
    names = np.array(["a", "b", "c", "d"])
    sets: list[dict[str, Any]] = [{"x": x, "y": y, "classes": names}]
    sets += [{"X_train": x.astype(np.float64), "y_train": names[y], "X_test": x[:9], "y_test": names[y[:9]], "groups": y // 2}]
    for each in sets:
        for save_as in (np.savez, np.savez_compressed):
            yield {"data.npz": saved(lambda out, each=each, save_as=save_as: save_as(out, **each))}
    yield written_by(lambda folder: lab_data.write_images(folder / "data.npz", size=8))


def npy_files(rows: int) -> Iterator[Files]:
    for x, y in (table(rows), (IMAGES, COLOURS)):
        yield {"data.npy": npy(x), "data_labels.npy": npy(y)}


def text_of(write: Callable[[Path], Any], rows: int = 40) -> bytes:
    """What a function writes to one file, again and again for more than 40 rows."""
    return next(iter(written_by(lambda folder: write(folder / "file")).values())) * (rows // 40)


def csv_files(rows: int) -> Iterator[Files]:
    title, _, plain = text_of(lab_data.write_table).partition(b"\n")
    plain = title + b"\n" + plain * (rows // 40)
    grouped = b"groups," + plain.strip().replace(b"\n", b"\n7,")
    texts = b"colour," + plain.strip().replace(b"\n", b"\nred,").replace(b"red", b"blue", 7).replace(b"blue", b"", 1)
    for content in (plain, grouped, plain.replace(b",", b";"), plain.replace(b",", b"\t"), texts):
        yield {"data.csv": content}


def csv_hostile() -> Iterator[Files]:
    plain = next(csv_files(400))["data.csv"]
    wide = plain + b"1," * 5 + b"x" * 120_000  # in an array of texts, each would be as long
    for content in (wide, plain + b'1,2,3,4,"', b"," * 100_000 + b"\n" + b"1," * 100_000):
        yield {"data.csv": content}


def frames(rows: int) -> Iterator[pa.Table]:
    """Tables of pyarrow: of numbers alone, and of every type that is taken, with gaps."""
    x, y = table(rows)
    yield pa.table({**{f"x{n}": x[:, n] for n in range(64)}, "kind": y})
    colours = pa.array([None if n % 9 == 8 else "rgb"[n % 3] for n in range(rows)])
    numbers = pa.array([None if n % 7 == 6 else n % 5 for n in range(rows)], pa.int16())
    flags = pa.array([n % 2 == 0 for n in range(rows)])
    yield pa.table(
        {"a": x[:, 0], "b": numbers, "c": colours, "d": colours.dictionary_encode(), "e": flags, "kind": y.astype(str)}
    )


def parquet_files(rows: int) -> Iterator[Files]:
    for made in frames(rows):
        for compression in ("none", "snappy", "zstd"):
            dictionary = compression == "snappy"
            write = functools.partial(pyarrow.parquet.write_table, made, compression=compression, use_dictionary=dictionary)
            yield {"data.parquet": saved(write)}


def feather_files(rows: int) -> Iterator[Files]:
    for made in frames(rows):
        for compression in ("uncompressed", "lz4", "zstd"):
            write = functools.partial(pyarrow.feather.write_feather, made, compression=compression)
            yield {"data.feather": saved(write)}


def bomb_files(name: str, write: Callable[..., None]) -> list[Files]:
    """Many rows of one value, in a few bytes."""
    zeros = pa.table({f"x{n}": np.zeros(BOMB << 16, np.float32) for n in range(4)})
    return [{name: saved(lambda out: write(zeros, out, compression="zstd"))}]


def log_files(rows: int) -> Iterator[Files]:
    events = "".join(f"{n % 10},{('tea', 'milk', 'bread')[n % 3]},{n * 7 % 31}\n" for n in range(rows))
    yield {"log.csv": f"who,what,when\n{events}".encode()}
    dated = "".join(f"{n % 10};item {n % 4};2024-0{n % 9 + 1}-01\n" for n in range(rows))
    yield {"log.csv": f"who;what;when\n{dated}".encode()}


def read_log(folder: Path) -> Iterable[Callable[[], Any]]:
    for order in ("when", None):
        log = tables.Log("who", "what", order)
        yield lambda log=log: used(datasets.load(f"sequences:{folder / 'log.csv'}", log=log))


def trees(rows: int) -> Iterator[Any]:
    x, y = table(rows)
    yield {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    yield {"x": x, "y": y, "about": {"counts": Counter("ab"), "set": {1}}}
    yield {"features": x.tolist(), "labels": y.tolist(), "class_names": ["a", "b", "c", "d"]}
    yield (x, y, x[:9], y[:9])
    yield {"x": IMAGES.transpose(0, 3, 1, 2), "y": COLOURS, "device": torch.device("cpu"), "dtype": torch.float32}


def pickle_files(rows: int) -> Iterator[Files]:
    for tree in trees(rows):
        for protocol in (5, 0, 2, 4):
            yield {"data.p": pickle.dumps(tree, protocol)}


def torch_files(rows: int) -> Iterator[Files]:
    for tree in trees(rows):
        yield {"data.pt": saved(lambda out, tree=tree: torch.save(tree, out))}
        yield {"data.pt": saved(lambda out, tree=tree: torch.save(tree, out, _use_new_zipfile_serialization=False))}


def read_arrays(name: str) -> Callable[[Path], Iterable[Callable[[], Any]]]:
    def read(folder: Path) -> Iterable[Callable[[], Any]]:
        yield loaded(folder / name)
        for shape in ((64,), (5,), (3, 8, 8)):
            yield lambda shape=shape: list(arrays.blocks(folder / name, shape, 16))

    return read


def embedding_set(rows: int) -> Files:
    x, y = map(torch.from_numpy, table(rows))
    described = json.dumps({"name": "small", "classes": ["a", "b", "c", "d"], "files": ["train.safetensors"]}).encode()
    return {"set/train.safetensors": save({"embeddings": x, "labels": y, "groups": y // 2}), "set/dataset.json": described}


def safetensors_files(rows: int) -> Iterator[Files]:
    yield embedding_set(rows)
    (kept,) = written_by(lambda folder: in_memory.keep((IMAGES, COLOURS), folder)).values()
    yield {"kept/images.safetensors": kept}


def read_safetensors(folder: Path) -> Iterable[Callable[[], Any]]:
    if (folder / "set").exists():
        yield loaded(folder / "set")
        yield lambda: list(arrays.blocks(folder / "set/train.safetensors", (64,), 16))
    else:
        yield loaded(folder / "kept")


def plans(inputs: int = 4) -> list[models.Plan]:
    return [hostile.plan(model, inputs) for model in ("linear", "mlp", "cnn", "context", "gru", "attention")]


def model_file(plan: models.Plan, described: str) -> Files:
    torch.manual_seed(0)
    weights = {name: value.contiguous() for name, value in plan.build().state_dict().items()}
    return {"model.safetensors": save(weights, {"state": described})}


def model_files(rows: int) -> Iterator[Files]:
    for plan in plans(rows):
        yield model_file(plan, json.dumps(plan.to_json()))


def model_hostile() -> Iterator[Files]:
    for plan, lie, _ in hostile.model_lies():
        yield model_file(plan, written({**plan.to_json(), **lie}))


def read_model(folder: Path) -> Iterable[Callable[[], Any]]:
    def guess() -> None:
        model = models.load(folder / "model.safetensors")
        if model.plan.tokens:
            model.guesses(model.tokens([["a", "b", "?"]]), 3, seen=[["a"]])
        else:
            dtype = torch.uint8 if len(model.plan.shape) == 3 else torch.float32
            model.guesses(torch.zeros(2, *model.plan.shape, dtype=dtype), 3)
        json.dumps(model.classes, ensure_ascii=False).encode()  # as predict writes them

    yield guess


def json_files(_: int) -> Iterator[Files]:
    config = Config(data="glyphs:10", epochs=1).to_json()
    scores = {"top1": 0.5, "top5": 0.9}
    result = {"format": 1, "config": config, "data": {"fingerprint": "0", "classes": 10}, "validation": scores, "test": scores}
    line = json.dumps({"step": 1, "epoch": 1.0, "validation": scores}) + "\n"
    run = {"config": config, "result": {**result, "seconds": 1.0}, "environment": {"python": "3"}}
    made = {f"run/{name}.json": json.dumps(value).encode() for name, value in run.items()}
    yield {**made, "run/metrics.jsonl": line.encode() * 3}
    yield {"p_k.json": json.dumps([[0.5, 0.5], [1.0, 0.0]]).encode()}
    yield {"p_k.csv": b"0.5,0.5\n1,0\n"}
    yield {"classes.json": json.dumps(["a", "b"]).encode()}
    yield {**embedding_set(40), "set/dataset.json": json.dumps({"name": "small", "classes": ["a", "b", "c", "d"]}).encode()}


def json_hostile() -> Iterator[Files]:
    for name in ("p_k.json", "classes.json"):
        yield {name: hostile.DEEP.encode()}
    for about in ({"classes": ["a"] * 4, "files": ["../train.safetensors"]}, {"classes": ["\ud800", "b", "c", "d"]}):
        yield {**embedding_set(40), "set/dataset.json": json.dumps(about).encode()}
    yield {"run/config.json": b'{"seed": 1' + b"0" * 4000 + b"}", "run/environment.json": b"{}"}


def read_json(folder: Path) -> Iterable[Callable[[], Any]]:
    ways: dict[str, list[Callable[[Path], Any]]] = {
        "run": [
            lambda path: Run(path).config(),
            lambda path: Run(path).metrics(),
            lambda _: summaries.table(summaries.collect([folder])),
            lambda _: summaries.curves(summaries.collect([folder])),
        ],
        "p_k.json": [lambda path: losses.read_p_k(path, 2)],
        "p_k.csv": [lambda path: losses.read_p_k(path, 2)],
        "classes.json": [labels.read_names],
        "set": [lambda path: used(datasets.load(str(path)))],
    }
    for name, calls in ways.items():
        if (folder / name).exists():
            for call in calls:
                yield lambda call=call, name=name: call(folder / name)


def sequence_files(rows: int) -> Iterator[Files]:
    yield {"data.txt": text_of(lab_data.write_items, rows)}


def sequence_hostile() -> Iterator[Files]:
    wide = text_of(lab_data.write_items) + " \U0001f600".encode() + b" x" * 200_000
    for content in (wide, b"\n" * 10**6, b"a b\n" * 200_000, b"\xff\xfea\0", b"a" * 10**6 + b" b c d"):
        yield {"data.txt": content}


def continued(file: Path, kind: str) -> Callable[[], Any]:
    """As predict reads a text."""
    return lambda: prediction._sequences(file, dataclasses.replace(plans()[-1], tokens=kind))


def read_sequences(folder: Path) -> Iterable[Callable[[], Any]]:
    for split in ("last", "lines"):
        yield lambda split=split: used(sequences.load(folder / "data.txt", split))
    yield continued(folder / "data.txt", "items")


def word_files(rows: int) -> Iterator[Files]:
    text = text_of(lab_data.write_words)
    yield {"data.txt": text_of(lab_data.write_words, rows)}
    yield {"text/a.txt": text, "text/b.md": text[:500], "text/c.txt": text[-200:]}


def word_hostile() -> Iterator[Files]:
    for more in (" \U0001f600".encode() + b" x" * 200_000, ("a" + "\u0316\u0301" * 100_000).encode()):
        yield {"data.txt": text_of(lab_data.write_words) + more}


def read_words(folder: Path) -> Iterable[Callable[[], Any]]:
    path = folder / "text" if (folder / "text").exists() else folder / "data.txt"
    yield loaded(f"words:{path}")
    yield continued(next(path.iterdir()) if path.is_dir() else path, "words")


def movielens_files(rows: int) -> Iterator[Files]:
    draw = np.random.default_rng(0)
    rated = np.stack([np.arange(rows) // 10 + 1, *(draw.integers(1, high, rows) for high in (10, 6, 1000))], 1).tolist()
    titles = [(number, f"Film {number} (199{number})") for number in range(1, 10)]

    def joined(separator: str, rows: Iterable[Iterable[object]]) -> bytes:
        return "".join(separator.join(map(str, row)) + "\n" for row in rows).encode()

    yield {"ratings.dat": joined("::", rated), "movies.dat": joined("::", titles)}
    yield {"u.data": joined("\t", rated), "u.item": joined("|", titles)}
    quoted = [(number, f'"{title}, The"') for number, title in titles]
    header = b"userId,movieId,rating,timestamp\n"
    yield {"ratings.csv": header + joined(",", rated), "movies.csv": b"movieId,title\n" + joined(",", quoted)}


def cifar_files(rows: int) -> Iterator[Files]:
    yield written_by(lambda folder: cifar.write_small(folder, rows, 4), "cifar-100-python/")
    record = b"".join(bytes([0, label]) + bytes(3072) for label in range(4))
    yield {"train.bin": record * 2, "test.bin": record, "fine_label_names.txt": b"a\nb\nc\nd\n"}


def archive_files(rows: int) -> Iterator[Files]:
    for files in cifar_files(rows):
        yield {"cifar.tar.gz": tarred(files)}


def read_cifar(folder: Path) -> Iterable[Callable[[], Any]]:
    yield loaded(f"cifar100:{folder / 'cifar.tar.gz' if (folder / 'cifar.tar.gz').exists() else folder}")


OTHERS = {"data/a/2.png": hostile.picture("PNG"), "data/b/1.png": hostile.picture("PNG")}


def image_files(_: int) -> Iterator[Files]:
    modes = {"PNG": ("RGB", "L", "RGBA", "P", "I;16", "1", "LA"), "TIFF": ("RGB", "L"), "GIF": ("P",)}
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        for mode in modes.get(kind, ("RGB",)):
            yield {f"data/a/1.{kind.lower()}": hostile.picture(kind, mode), **OTHERS}
    page = Image.new("1", (4960, 7016), 1)  # white, at 600 dpi
    yield {"data/a/1.tif": saved(lambda out: page.save(out, "TIFF", compression="group4")), **OTHERS}


def image_hostile() -> Iterator[Files]:
    contents = [files["1.png"] for files in all_of(hostile.image_files())]
    for content in (*contents, hostile.png_of_zeros(9_500, 9_500), hostile.picture("PNG")[:33] + b"\xff" * 100):
        yield {"data/a/1.png": content, **OTHERS}


def read_images(folder: Path) -> Iterable[Callable[[], Any]]:
    def one(path: Path) -> None:
        read = prediction._image_reader((1, 16, 16), None, "cpu")
        assert read is not None
        list(prediction._image_batches(iter([path]), read, 4, lambda _: None))
        preprocess = embed.centre_crop(8, 1.0, (0.5,) * 3, (0.5,) * 3)
        encoder = embed.Encoder(torch.nn.Flatten(), preprocess, "cpu")
        encoder.embed(folder, [(str(path.relative_to(folder)), 0)], 4, lambda _: None)

    yield lambda: datasets.load(str(folder / "data"))
    for path in sorted((folder / "data").rglob("*.*")):
        yield lambda path=path: one(path)


SOURCE = (
    b"# -*- coding: utf-8 -*-\ndef f(x, *, y=1):\n    '''Text.'''\n    return [f'{x!r:>{y}}', 0x1, x if y else None]\n\nf(1"
)


def python_hostile() -> Iterator[Files]:
    cookies = ("hex", "zlib", "utf-16", "idna", "unicode_escape", "rot13", "undefined", "x")
    made = [f"# -*- coding: {name} -*-\nx = '\\ud800'\n".encode() for name in cookies]
    for content in (*made, b"(" * 10_000, b"f'" + b"{f'" * 200, b"\0", b"x = 1" + b"0" * 10_000):
        yield {"data.py": content}


def archive_hostile() -> list[Files]:
    return [each for sound in cifar_files(3) for each in all_of(hostile.archive_files(sound, BOMB))]


READERS = {
    "npz": Reader(npz_files, read_arrays("data.npz"), lambda: all_of(hostile.npz_files(BOMB)), 4096, PACKED_FLOOR),
    "npy": Reader(npy_files, read_arrays("data.npy"), lambda: all_of(hostile.npy_files()), 4096),
    "csv": Reader(csv_files, read_arrays("data.csv"), csv_hostile, 25_000),
    "parquet": Reader(
        parquet_files,
        read_arrays("data.parquet"),
        lambda: bomb_files("data.parquet", pyarrow.parquet.write_table),
        4096,
        PACKED_FLOOR,
    ),
    "feather": Reader(
        feather_files,
        read_arrays("data.feather"),
        lambda: bomb_files("data.feather", pyarrow.feather.write_feather),
        4096,
        PACKED_FLOOR,
    ),
    "log": Reader(log_files, read_log, rows=75_000),
    "pickle": Reader(pickle_files, read_arrays("data.p"), lambda: all_of(hostile.pickle_files()), 4096),
    "torch": Reader(torch_files, read_arrays("data.pt"), lambda: all_of(hostile.torch_files(BOMB)), 4096, PACKED_FLOOR),
    "safetensors": Reader(safetensors_files, read_safetensors, rows=4096),
    "model": Reader(model_files, read_model, model_hostile, 65536),
    "json": Reader(json_files, read_json, json_hostile),
    "sequences": Reader(sequence_files, read_sequences, sequence_hostile, 32_000),
    "words": Reader(word_files, read_words, word_hostile, 24_000),
    "movielens": Reader(movielens_files, lambda folder: [loaded(f"movielens:{folder}")], rows=70_000),
    "cifar": Reader(cifar_files, read_cifar, rows=71),
    "archives": Reader(archive_files, read_cifar, archive_hostile, 71, PACKED_FLOOR),
    "images": Reader(image_files, read_images, image_hostile, floor=IMAGE_FLOOR),
    "python": Reader(lambda _: [{"data.py": SOURCE}], lambda folder: [continued(folder / "data.py", "python")], python_hostile),
}
ROWS = {"model": 4, "cifar": 3, "archives": 3}  # of the small files that are changed; 40 of all others


def sound_files(name: str) -> list[Files]:
    return list(READERS[name].files(ROWS.get(name, 40)))


# One case -------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What became of one case."""

    outcome: str  # read, refused, or a finding
    message: str = ""
    seconds: float = 0.0
    memory: int = 0  # more than before
    size: int = 0  # of its files


FINDINGS = ("traceback", "warning", "message", "memory", "hang", "crash", "unread")


def files_of(seed: int, name: str, number: int, known: list[Files]) -> Files:
    """The files of a case: the first are the sound ones as they are, then the hostile ones, then all with changes."""
    if number < len(known):
        return known[number]
    draw = random.Random(f"{seed} {name} {number}")
    # Large hostile files take long to change, and are what they are.
    chosen = dict(draw.choice([each for each in known if sum(map(len, each.values())) < 300_000]))
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
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                call()
            except LabError as refused:
                error = refused
                if not count:  # the others read it as something else, which it may not be
                    case.outcome = "refused"
                if "\n" in str(refused) or len(str(refused)) > 2000:
                    case.outcome, case.message = "message", f"{len(str(refused))} characters: {str(refused)[:80]!r}"
            except Exception as failure:
                error = failure
                inner = [frame for frame in traceback.extract_tb(failure.__traceback__) if "/anyk/" in frame.filename]
                where = f"{Path(inner[-1].filename).name}:{inner[-1].lineno}" if inner else "?"
                case.outcome, case.message = "traceback", f"{type(failure).__name__} at {where}: {str(failure)[:100]}"
        if shown and error is not None:
            traceback.print_exception(error)
        while error is not None:
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                case.outcome, case.message = "memory", f"{type(error).__name__}: {str(error)[:100]}"
            error = error.__cause__ or error.__context__
        if warned and case.outcome not in FINDINGS:
            case.outcome, case.message = "warning", f"{warned[0].category.__name__}: {str(warned[0].message)[:100]}"
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    case.seconds, case.memory = time.process_time() - began, max(0, status("VmHWM") - before)
    if case.memory > allowed and case.outcome != "memory":
        case.outcome, case.message = "memory", f"{case.memory / 1e6:.0f} MB for {case.size / 1e6:.3f} MB"
    if case.seconds > SECONDS + case.size / 1e6 and case.outcome not in FINDINGS:
        case.outcome, case.message = "hang", f"{case.seconds:.0f} s of computing"
    return case


@functools.cache
def known_files(name: str, folder: Path) -> tuple[int, list[Files]]:
    """The files of a reader, and how many of them are sound. These are read once, so that imports are no part of a case."""
    os.environ["ANYK_CACHE"] = str(folder / "cache")
    sound = sound_files(name)
    for files in sound:
        attempt(READERS[name], files, folder)
    found = [*sound, *READERS[name].hostile()]
    hostile.zeros.cache_clear()
    return len(sound), found


def case_of(name: str, seed: int, number: int, folder: Path) -> tuple[Case, int]:
    """One case in a process of its own kind, and how many cases there are without changes."""
    sound, known = known_files(name, folder)
    case = attempt(READERS[name], files_of(seed, name, number, known), folder)
    if number < sound and case.outcome == "refused":
        case.outcome, case.message = "unread", f"the sound file {number} is refused"
    return case, len(known)


def large(name: str, megabytes: int, folder: Path) -> Case:
    """A sound file of so many megabytes."""
    known_files(name, folder)
    reader = READERS[name]
    only = dataclasses.replace(reader, read=lambda place: list(reader.read(place))[:1], floor=64 << 30)
    return attempt(only, next(iter(reader.files(megabytes * reader.rows))), folder)


def cases_of(name: str, seed: int, count: int, seconds: float, folder: Path) -> Iterator[Case]:
    """All cases of a reader: so many, or for so long."""
    until, unchanged, number = time.time() + seconds, 1, 0
    while number < count if count else number < unchanged or time.time() < until:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            for _ in range(RENEWED):
                if not (number < count if count else number < unchanged or time.time() < until):
                    break
                number += 1
                try:
                    case, unchanged = pool.submit(case_of, name, seed, number - 1, folder).result(WALL_SECONDS)
                    yield case
                except BrokenProcessPool:
                    yield Case("crash", "the process ended")
                    break
                except TimeoutError:
                    yield Case("hang", f"more than {WALL_SECONDS:.0f} s", WALL_SECONDS)
                    for process in pool._processes.values():
                        process.kill()
                    break


# All ------------------------------------------------------------------------------------------------------------------


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
        files = files_of(given.seed, name, given.case, [*sound_files(name), *reader.hostile()])
        print(attempt(reader, files, folder, shown=True), folder / "case")
        return 0
    print("| reader | cases | read | refused | findings | most memory, MB | longest, s |\n|---|---|---|---|---|---|---|")
    failed: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    with tempfile.TemporaryDirectory(prefix="anyk-fuzz-") as folder:
        for name in given.only:
            cases = list(cases_of(name, given.seed, given.cases, given.seconds, Path(folder)))
            counts = Counter(case.outcome for case in cases)
            findings = sum(counts[outcome] for outcome in FINDINGS)
            most, longest = max(case.memory for case in cases), max(case.seconds for case in cases)
            numbers = f"{len(cases)} | {counts['read']} | {counts['refused']} | {findings}"
            print(f"| {name} | {numbers} | {most / 1e6:.0f} | {longest:.1f} |", flush=True)
            for number, case in enumerate(cases):
                if case.outcome in FINDINGS:
                    kind = case.message[:45] if case.outcome == "traceback" else case.message.partition(":")[0]
                    failed.setdefault((name, case.outcome, kind), []).append((number, case.message))
        for (name, outcome, _), found in failed.items():
            number, message = found[0]
            again = f"--only {name} --seed {given.seed} --case {number}"
            print(f"{name}: {outcome}, {len(found)} times; {again}: {message}")
        if given.large:
            print("\n| reader | file, MB | memory, MB | times the file |\n|---|---|---|---|")
        for name in (name for name in given.only if given.large and READERS[name].rows):
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                case = pool.submit(large, name, given.large, Path(folder)).result()
            finding = "" if case.outcome == "read" else f" {case.outcome}: {case.message}"
            size, memory = case.size / 1e6, case.memory / 1e6
            print(f"| {name} | {size:.0f} | {memory:.0f} | {memory / size:.1f} |{finding}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
