"""Files that claim more than they hold, unpack to more than they should, or call what they should not.

Each is for one reader and refused by it; the tests of the data look at how, and `benchmarks/fuzz.py` changes them further.
"""

import functools
import gzip
import io
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from anyk.lab.run.models import Plan

Files = dict[str, bytes]
"""Contents by path, in the folder of a case."""
Hostile = dict[str, tuple[Files, str]]
"""By what is wrong: the files, and a pattern in the sentence that refuses them."""

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8) % 2
DEEP = "[" * 50_000 + "]" * 50_000

# Instructions of a pickle that ask for more than the file holds.
LENGTHS = {
    "a long name to remember by": b"p" + b"9" * 5000 + b"\n",
    "bytearray": b"\x96" + struct.pack("<Q", 2**40),
    "bytes": b"\x8e" + struct.pack("<Q", 2**40),
    "text": b"\x8d" + struct.pack("<Q", 2**33),
    "frame": b"\x95" + struct.pack("<Q", 2**40),
    "a number": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "a negative number": b"\x8b" + struct.pack("<i", -1),
    "short text": b"T" + struct.pack("<i", 2**31 - 1),
    "short bytes": b"B" + struct.pack("<I", 2**32 - 1),
}
#: the unpickler in C would make room for as many things as these numbers say
MEMO = (b"r" + struct.pack("<I", 2**32 - 1), b"r" + struct.pack("<I", 2**28), b"p4000000000\n")
_CALLS = {
    "zeros": b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R.",  # of 2^30 zeros
    "a dict as bytes": b"c_codecs\nencode\n}\x85R.",
    "a method's name": b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00items}sb.",
    "a change": b"c_codecs\nencode\nX\x01\x00\x00\x00a\x85R}X\x07\x00\x00\x00contentNsb.",
    "a storage of a number": b"ctorch.storage\n_load_from_bytes\nJ\x00\x00\x00\x40\x85R.",
    "a storage from nowhere": b"X\x01\x00\x00\x00a" * 3 + b"\x87Q.",
    "a device of a number": b"ctorch\ndevice\nJ\x00\x00\x00\x40\x85R.",
    "a device of a list": b"ctorch\ndevice\n](tR.",
    "a change of a dtype": b"ctorch\nfloat32\n}X\x01\x00\x00\x00ais}b.",
    "a change of the reader": b"cnumpy\ndtype\n}b.",
    "a call of a dtype": b"ctorch\nfloat32\n)R.",
    "a set of a number": b"c__builtin__\nset\nJ\x00\x00\x00\x40\x85R.",
    "a set of lists": b"c__builtin__\nset\n]])ae\x85R.",
    "a counter of a number": b"ccollections\nCounter\nJ\x00\x00\x00\x40\x85R.",
    "a program": b"cos\nsystem\nX\x01\x00\x00\x00a\x85R.",
}
SCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) print\n%%EOF\n"


def saved(save_to: Callable[[Any], Any]) -> bytes:
    """What a function writes to an open file."""
    out = io.BytesIO()
    save_to(out)
    return out.getvalue()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    return saved(lambda out: np.save(out, array))


def npy_header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    return saved(
        lambda out: np.lib.format.write_array_header_1_0(out, {"shape": shape, "fortran_order": False, "descr": dtype})
    )


def zipped(members: Files, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    def write(out: Any) -> None:
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, content in members.items():
                archive.writestr(name, content, compresslevel=1)

    return saved(write)


def tarred(members: Files) -> bytes:
    def write(out: Any) -> None:
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))

    return gzip.compress(saved(write), 1)


def edited(archive: bytes, place: int, content: bytes, local: int | None = None) -> bytes:
    """A zip file with other bytes at a place in the directory entry of each member, and at ``local`` in its own header."""
    made = bytearray(archive)
    for match in re.finditer(rb"PK\x01\x02|PK\x03\x04", archive):
        offset = place if archive[match.start() + 2] == 1 else local
        if offset is not None:
            made[match.start() + offset : match.start() + offset + len(content)] = content
    return bytes(made)


@functools.cache
def zeros(megabytes: int) -> bytes:
    return bytes(megabytes << 20)


def npz_files(megabytes: int) -> Hostile:
    """Of .npz, with a bomb of so many megabytes."""
    sound = {"x.npy": npy(X), "y.npy": npy(Y)}
    rows = (megabytes << 20) // 12
    bomb = npy_header((rows, 3)) + zeros(megabytes)
    made = {
        "bomb": (zipped({**sound, "x.npy": bomb}), "would unpack to .* times its size"),
        "encrypted": (edited(zipped(sound), 8, b"\x01\x00", 6), "in it is encrypted"),
        "longer than the file": (edited(zipped(sound), 20, struct.pack("<I", 2**31)), "claims to be longer than the file"),
        "lzma": (zipped(sound, zipfile.ZIP_LZMA), "packed in an uncommon way"),
    }
    for shape, dtype in (((10**12, 3), "<f4"), ((2**62, 2**62), "<f4"), ((-1,), "<f4"), ((10**12,), "|S0")):
        claim = npy_header(shape, dtype) + bytes(100)
        made[f"{shape} {dtype}"] = zipped({**sound, "x.npy": claim}), "it claims to be .* but has 100 bytes"
    labels = {
        "no character": (np.full(8, 0x110000, np.uint32).view("<U1"), "a number that is no character in a text"),
        "half a character": (np.full(8, 0xD800, np.uint32).view("<U1"), "half of a character"),
        "a large float": (np.full(8, 1e300), r"1e\+300 is too large for 64 bits"),
        "a large integer": (np.full(8, 2**63, np.uint64), r"9.22337e\+18 is too large for 64 bits"),
        "one label": (np.array(3), r"should have the shape \(examples,\), but have \(\)"),
    }
    made |= {name: (zipped({**sound, "y.npy": npy(array)}), message) for name, (array, message) in labels.items()}
    return {name: ({"data.npz": content}, message) for name, (content, message) in made.items()}


def npy_files() -> Hostile:
    long = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{'descr': '<f4'}"
    made = {"long header": (long, "Ran out of input")}
    for shape in ((10**12, 3), (2**62, 2**62), (-1,)):
        made[str(shape)] = npy_header(shape) + bytes(100), "it claims to be .* but has 100 bytes"
    return {name: ({"data.npy": content, "data_labels.npy": npy(Y)}, message) for name, (content, message) in made.items()}


def nested(kind: Callable[[Any], Any], times: int = 12) -> Any:
    made = kind([0] * 10)
    for _ in range(times):
        made = kind([made] * 10)
    return made


def holding_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def of_one_list(before: bytes, after: bytes, items: bytes, times: int = 20_000) -> bytes:
    """A pickle in which something is made of the same list again and again."""
    return b"\x80\x02]q\x00(" + items + b"e0](" + (before + b"h\x00" + after) * times + b"e."


def trees() -> dict[str, tuple[Any, str]]:
    """Trees that unfold to more than their file, or that no program wrote."""
    large = "unfolds to more"
    empty = [torch.empty(3_000_000, 0)] * 8
    return {
        "lists": ({"x": nested(list), "y": Y}, large),
        "dicts": ({"x": nested(lambda items: dict(enumerate(items))), "y": Y}, large),
        "arrays": ({"x": [np.zeros(1 << 16)] * 100, "y": list(range(100))}, large),
        "itself": ({"x": holding_itself(), "y": Y}, "holds itself"),
        "a tuple as a key": ({nested(tuple, 3): X, "y": Y}, "as a key, which is not data"),
        "large keys": (dict.fromkeys(n * (2**61 - 1) for n in range(2000)), "an integer beyond 64 bits as a key"),
        "expanded": ({"x": torch.zeros(1).expand(10**5, 10**5), "y": Y}, "save a copy"),
        "empty examples": ({"x": empty, "y": Y}, "tensors without numbers|has no examples"),
        "empty labels": ({"x": X, "y": empty}, "tensors without numbers"),
        "texts in lists": ({"x": [["c" * 100_000]] * 10_001, "y": Y}, "texts in lists"),
        "long names": ({"x": X, "y": Y, "classes": ["s" * 100_000] * 2000}, "at most 1000 characters, but one has 100000"),
        "large names": ({"x": X, "y": Y, "classes": [10**5000, 1]}, "one is an integer beyond 64 bits"),
        "no names": ({"x": X, "y": Y, "classes": [None, 1]}, "one is a NoneType"),
        "sparse": ({"x": torch.eye(4).to_sparse(), "y": torch.arange(4)}, "which is not data: nothing was run"),
        "meta": ({"x": torch.zeros(4, 4, device="meta"), "y": torch.arange(4)}, "which is not data: nothing was run"),
    }


def pickle_files() -> Hostile:
    whole = pickle.dumps({"x": X, "y": Y}, protocol=2)
    made = {
        name: (whole[:2] + b"N" + piece + b"0" + whole[2:], "is damaged or not a file of torch or pickle")
        for name, piece in LENGTHS.items()
    }
    made |= {name: (b"\x80\x02" + call, "holds|is damaged|has no embeddings") for name, call in _CALLS.items()}
    numbers = b"".join(b"M" + struct.pack("<H", n) for n in range(256))
    objects = b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01M\xd0\x07\x85cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R\x89"
    made["many sets of one list"] = of_one_list(b"cbuiltins\nset\n", b"\x85R", numbers), "unfolds to more"
    made["many arrays of one list"] = of_one_list(objects, b"tb", b"NN\x86" * 2000), "unfolds to more"
    made |= {name: (pickle.dumps(tree), message) for name, (tree, message) in trees().items() if name not in ("sparse", "meta")}
    return {name: ({"data.p": content}, message) for name, (content, message) in made.items()}


def torch_files(megabytes: int) -> Hostile:
    """Of torch.save, now and before it wrote zip files, with a bomb of so many megabytes."""
    made: dict[str, tuple[bytes, str]] = {}
    for name, (tree, message) in trees().items():
        if name not in ("lists", "arrays", "itself", "empty examples", "empty labels"):
            made[name] = saved(lambda out, tree=tree: torch.save(tree, out)), message
            made[f"{name}, old"] = (
                saved(lambda out, tree=tree: torch.save(tree, out, _use_new_zipfile_serialization=False)), message
            )  # fmt: skip
    sound = {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}
    with zipfile.ZipFile(io.BytesIO(saved(lambda out: torch.save(sound, out)))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    prefix = next(name for name in members if name.endswith("data.pkl")).removesuffix("data.pkl")
    stored = functools.partial(zipped, method=zipfile.ZIP_STORED)
    liar = zipped({"a/data.pkl": b"\x80\x02" + b"]" * (1 << 20)})
    bomb = zipped({"a/data.pkl": b"\x80\x02X" + struct.pack("<I", megabytes << 20) + zeros(megabytes)})
    made |= {
        "short storage": (stored({**members, f"{prefix}data/0": members[f"{prefix}data/0"][:-4]}), "claims 24 numbers"),
        "another byte order": (stored({**members, f"{prefix}byteorder": b"big"}), "the byte order of another machine"),
        "two trees": (stored({**members, "b/data.pkl": b"N."}), "it should have one data.pkl"),
        "packed": (zipped(members), "is packed, which torch never does"),
        "bomb": (bomb, "would unpack to|is packed, which torch never does"),
        # What is packed is longer than the directory says.
        "longer than it says": (edited(liar, 24, struct.pack("<I", 64), 22), "packed"),
        "a call": (stored({"a/data.pkl": b"\x80\x02" + _CALLS["zeros"], "a/version": b"3\n"}), "which is not data"),
    }  # fmt: skip
    old = saved(lambda out: torch.save(sound, out, _use_new_zipfile_serialization=False))
    place = old.index(struct.pack("<q", 24) + X.tobytes()[:8])
    made["a long storage, old"] = old[:place] + struct.pack("<q", 2**40) + old[place + 8 :], "claims 1099511627776 numbers"
    return {name: ({"data.pt": content}, message) for name, (content, message) in made.items()}


def member(name: str, **facts: Any) -> bytes:
    """The header of a member of a tar archive."""
    info = tarfile.TarInfo(name)
    for fact, value in facts.items():
        setattr(info, fact, value)
    return info.tobuf()


def archive_files(sound: Files, megabytes: int) -> Hostile:
    """Of CIFAR-100 in an archive, with a bomb of so many megabytes beside what is sound, or in its place."""
    first = next(iter(sound))
    sparse = bytearray(tarfile.TarInfo("train").tobuf(tarfile.GNU_FORMAT))  # as long as it says, without content
    sparse[156:157], sparse[483:495], sparse[148:156] = tarfile.GNUTYPE_SPARSE, b"77777777777\0", b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    made = {
        "bomb beside": (tarred({"rest": zeros(megabytes), **sound}), "would unpack to [0-9]+ MB, [0-9,]+ times its size"),
        "bomb inside": (tarred({**sound, first: zeros(megabytes)}), "would unpack to"),
        "long": (gzip.compress(member("train", size=8 << 30) + bytes(1000)), "train in it is cut short"),
        "cut": (member("train", size=1 << 20) + bytes(1000), "cannot be read as a tar archive"),
        "sparse": (bytes(sparse) + bytes(1024), "not CIFAR-100: .* but holds none of them"),
    }
    return {name: ({"cifar.tar.gz": content}, message) for name, (content, message) in made.items()}


def iptc(inner: bytes) -> bytes:
    """An image in an envelope of no known beginning: Pillow tries it on any file, and opens what is inside as any kind."""
    fields = {(3, 60): b"\x01\x00", (3, 20): b"\x00\x09", (3, 30): b"\x00\x09", (3, 120): b"\x05", (8, 10): inner}
    return b"".join(bytes([0x1C, *place]) + struct.pack(">H", len(value)) + value for place, value in fields.items())


def picture(kind: str, mode: str = "RGB", side: int = 20) -> bytes:
    """An image file of noise."""
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return saved(lambda out: Image.fromarray(pixels).convert(mode).save(out, kind))


def png_of_zeros(width: int, height: int) -> bytes:
    """A small file of many transparent pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(bytes(1 + 4 * width)) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def image_files() -> Hostile:
    """No images: programs, which Pillow would run, and envelopes of others."""
    made = {"a program": SCRIPT, "a program in an envelope": iptc(SCRIPT), "an icon": picture("ICO", side=32)}
    made |= {"an image in an envelope": iptc(saved(lambda out: Image.new("1", (3000, 3000)).save(out, "PNG")))}
    return {name: ({"1.png": content}, "cannot identify image file") for name, content in made.items()}


def plan(model: str, inputs: int = 4) -> Plan:
    """A small model of four classes."""
    common: dict[str, Any] = {"classes": ("a", "b", "c", "d"), "hidden": 6, "dropout": 0.0}
    pixels = {"mean": (0.5,) * 3, "std": (0.2,) * 3}
    token: dict[str, Any] = {"tokens": "items", "embedding": 4, "layers": 1}
    if model in ("cnn", "resnet18"):
        return Plan(model, (3, 8, 8), **common, **pixels, **({"width": 2} if model == "cnn" else {}))
    if model in ("context", "gru"):
        return Plan(model, (5,), **common, **token)
    if model == "attention":
        return Plan(model, (5,), heads=2, tied=True, mask_seen=True, **common, **token)
    return Plan(model, (inputs,), **common)


def model_lies() -> list[tuple[Plan, dict[str, Any], str]]:
    """Descriptions of a model file that do not fit its weights: the plan, what is changed, and a pattern of the refusal."""
    linear, cnn, gru, attention = map(plan, ("linear", "cnn", "gru", "attention"))
    refused = r"model\.safetensors"
    code = "which is code that reading a file does not import"
    return [
        (linear, {"shape": [5]}, r"the weights 1.weight should be torch.float32 \[4, 5\], but are torch.float32 \[4, 4\]"),
        (linear, {"classes": ["a", "b", "c"]}, r"should be torch.float32 \[3, 4\], but are torch.float32 \[4, 4\]"),
        (linear, {"model": "mlp"}, r"the weights 1.weight should be torch.float32 \[6, 4\]"),
        (linear, {"classes": ["a", "b", "c", "\ud800"]}, "surrogates not allowed"),
        (linear, {"classes": DEEP}, "nested too deeply"),
        (linear, {"dropout": DEEP}, "nested too deeply"),
        (linear, {"shape": [2**61]}, "cannot be used"),
        (linear, {"model": "mlp", "hidden": 2**61}, "cannot be used"),
        (linear, {"feature_mean": [10**400] * 4}, "feature_mean should be"),
        (linear, {"model": "os:system", "tokens": "items", "layers": 0}, code),
        (linear, {"model": "os:system"}, code),
        (cnn, {"width": 10**9}, refused),
        (cnn, {"model": "timm:resnet50", "shape": [3, 10**6, 10**6]}, refused),
        (gru, {"shape": [2**40]}, r"shape should be at most 1000000, but is \[1099511627776\]"),
        (gru, {"hidden": 10**9, "layers": 1000}, refused),
        (attention, {"layers": 1000}, refused),
        (attention, {"heads": 10**9, "embedding": 10**9}, refused),
        (plan("resnet18"), {"shape": [3, 8, 2**40]}, "shape should be of at most 8192 x 8192 pixels"),
    ]
