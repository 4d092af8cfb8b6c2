"""Pickles that people exchange, read as data: no name in them is imported and no code of theirs is run.

The unpickler knows containers, numpy arrays and torch tensors. It collects notes of what is to be made; the objects are made at
the end, while their size is counted: a small pickle can refer to one list so often that it fills every memory.

`torch.load(weights_only=True)` does less: it reads no plain pickles, wants numpy's own functions allowed, which trust the sizes
and dtypes in the file, sets no limit to memory, and ran code of files in the old format up to torch 2.5.
"""

import io
import math
import pickle
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from anyk.lab.data import untrusted

_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch.save began before they were zip files."""

PersistentLoad = Callable[[Any], Any]


class NotDataError(pickle.UnpicklingError):
    """A pickle asks for a name that is not on the list."""


def read(path: Path) -> Any:
    """What pickle.dump or torch.save wrote to a file, in dicts and lists; of a zip file, the tensors are memory-mapped.

    Raises NotDataError for what is not data, and whatever a damaged file makes the parsers raise.
    """
    with open(path, "rb") as file:
        start = file.read(len(_TORCH_MAGIC))
        if start.startswith(b"PK"):
            return _of_zip(path)
        file.seek(0)
        size = path.stat().st_size
        if start == _TORCH_MAGIC:
            return _Making(size).made(_of_old_torch(file.read()))
        return _Making(size).made(_DataUnpickler(untrusted.SizedFile(file, size)).load())


def load(content: bytes) -> Any:
    """The same of the bytes of a plain pickle."""
    return _Making(len(content)).made(_unpickled(content))


def _unpickled(content: bytes, storage: PersistentLoad | None = None) -> Any:
    return _DataUnpickler(untrusted.SizedFile(io.BytesIO(content), len(content)), storage).load()


# --- what is to be made -----------------------------------------------------------------------------------------------


class _Note:
    """Something that is to be made at the end."""


class _DataUnpickler(pickle._Unpickler):
    """Notes down containers, numpy arrays and torch tensors. Every other name is refused before it is imported.

    Python's own unpickler in Python: the one in C makes room for as many things as a number in the file says. Instructions that
    would hash keys, set attributes or allocate memory before anything is checked are replaced.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: untrusted.SizedFile, storage: PersistentLoad | None = None) -> None:
        super().__init__(file, encoding="latin1")  # bytes of Python 2 become text
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        make = _MAKERS.get(f"{module.replace('numpy.core', 'numpy._core')}.{name}")
        if make is None:
            raise NotDataError(f"{module}.{name}")
        return make

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise NotDataError("a storage")
        return self._storage(pid)

    def load_empty_dict(self: Any) -> None:
        self.append(_Dict())

    def load_dict(self: Any) -> None:
        items = self.pop_mark()  # which changes what append appends to
        self.append(_Dict(items))

    def load_empty_set(self: Any) -> None:
        self.append(_Set())

    def load_frozenset(self: Any) -> None:
        items = self.pop_mark()
        self.append(_Set(items))

    def load_bytearray8(self: Any) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    def load_build(self: Any) -> None:
        """Set the state of what is written in two steps, and of nothing else."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, (_Dtype, _Array)):
            made.set_state(state)
        elif not isinstance(made, _Dict):  # the attributes of a dict, as state_dict() gives it, are left out
            raise NotDataError("a change of the reader")

    for _code, _load in (
        (pickle.EMPTY_DICT, load_empty_dict),
        (pickle.DICT, load_dict),
        (pickle.EMPTY_SET, load_empty_set),
        (pickle.FROZENSET, load_frozenset),
        (pickle.BYTEARRAY8, load_bytearray8),
        (pickle.BUILD, load_build),
    ):
        dispatch[_code[0]] = _load


class _Dtype(_Note):
    """A numpy dtype of plain numbers or text. numpy's own would take flags and sizes from the pickle unchecked."""

    def __init__(self, code: str, *_: Any):
        if not re.fullmatch(r"[fiu][1248]|b1|[US]\d{1,6}|O8?", code):
            raise NotDataError(f"an array of {code}")
        self.code, self.order = code, "="

    def set_state(self, state: Any) -> None:
        self.order = state[1] if state[1] in ("<", ">") else "="

    def numpy(self) -> "np.dtype[Any]":
        """The dtype, of anything but objects."""
        if self.code.startswith("O"):
            raise NotDataError("an array of objects")
        return np.dtype(self.order + self.code)


class _Array(_Note):
    """An array whose content follows in the pickle."""

    def __init__(self, *_: Any):
        self.state: Any = None
        self.axes: Any = None  # the order of them, where another one than in memory

    def set_state(self, state: Any) -> None:
        self.state = state


def _of_buffer(content: Any, dtype: Any, shape: Any, order: str, axes: Any = None) -> _Array:
    array = _Array()
    array.state, array.axes = (None, shape, dtype, order == "F", content), axes
    return array


class _Bytes(_Note):
    """Bytes that are written as a text, or inside of another object."""

    def __init__(self, content: Any = b"", encoding: str = "latin1"):
        if not isinstance(content, (bytes, bytearray, str, _Bytes)):
            raise NotDataError("bytes of a given length")
        self.content = content


def _plain_bytes(content: Any) -> bytes | bytearray:
    while isinstance(content, _Bytes):
        content = content.content
    if isinstance(content, str):
        return content.encode("latin1")
    if not isinstance(content, (bytes, bytearray)):
        raise NotDataError(f"a {type(content).__name__} as bytes")
    return content


class _Dict(_Note):
    """A dict as the list of its keys and values in turn: keys that are slow to hash are refused before they are hashed."""

    def __init__(self, items: list[Any] | None = None):
        self.items = [] if items is None else items

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items += key, value


class _Set(_Note):
    """A set as the list of its items."""

    def __init__(self, items: Any = None):
        self.items = [] if items is None else items

    def add(self, item: Any) -> None:
        self.items.append(item)


class _Storage(_Note):
    """The memory of tensors: bytes, a part of a mapped file, or, where the dtype is None, a whole file of torch."""

    def __init__(self, content: Any, dtype: torch.dtype | None = None):
        self.content, self.dtype = content, dtype


class _Tensor(_Note):
    """A tensor in a storage."""

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any):
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride
        self.dtype = next((value for value in rest if isinstance(value, torch.dtype)), None)


def _scalar(dtype: _Dtype, content: Any = None) -> Any:
    if dtype.code.startswith("O"):
        return content
    if len(value := _plain_bytes(content)) > 4096:
        raise NotDataError("a long text as one value")
    return np.frombuffer(value, dtype=dtype.numpy()).reshape(()).item()


_FUNCTIONS: dict[str, Any] = {
    "collections.OrderedDict": lambda: _Dict(),
    "collections.Counter": lambda counts: counts,
    "builtins.set": _Set,
    "__builtin__.set": _Set,
    "_codecs.encode": _Bytes,
    "builtins.bytearray": _Bytes,
    "__builtin__.bytearray": _Bytes,
    "__builtin__.bytes": _Bytes,  # how older pickles have none
    "numpy.dtype": _Dtype,
    "numpy.ndarray": "the kind of array to make, which is not called",
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _of_buffer,
    "torch._utils._rebuild_tensor_v2": _Tensor,
    "torch._utils._rebuild_tensor_v3": _Tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.storage._load_from_bytes": lambda content: _Storage(content),
    "torch.Size": lambda size=(): size,
    "torch.device": lambda kind, *_: kind,
}
_STORAGES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "Untyped": torch.uint8},
}
_MAKERS: dict[str, Any] = {
    **_FUNCTIONS,
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


# --- files of torch ---------------------------------------------------------------------------------------------------


def _of_zip(path: Path) -> Any:
    with untrusted.opened_zip(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        tree = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(tree) != 1:
            raise ValueError("it should have one data.pkl, as torch.save writes it")
        prefix = tree[0].removesuffix("data.pkl")
        order = members.get(f"{prefix}byteorder")
        for member in (members[tree[0]], order):
            if member and member.compress_type:  # zipfile would unpack all of it, whatever its size says
                raise ValueError(f"{member.filename!r} in it is packed, which torch never does")
        if order and archive.read(order).decode() != sys.byteorder:
            raise ValueError("it has the byte order of another machine")
        instructions = archive.read(tree[0])
    size = path.stat().st_size
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    storages: dict[str, Tensor] = {}

    def storage(pid: Any) -> _Storage:
        _, dtype, key, _, count = pid
        if key not in storages:
            member = members[f"{prefix}data/{key}"]
            # Its own header has other lengths than the directory.
            header = bytes(mapped[member.header_offset : member.header_offset + 30].tolist())
            name, extra = struct.unpack("<HH", header[26:30])
            begin = member.header_offset + 30 + name + extra
            if member.compress_type or begin + member.file_size > size:
                raise ValueError(f"{member.filename!r} in it is packed, or cut short")
            storages[key] = mapped[begin : begin + member.file_size]
        if count * dtype.itemsize > len(storages[key]):
            raise ValueError(f"it claims {count} numbers for the storage {key!r}, which has {len(storages[key])} bytes")
        return _Storage(storages[key], dtype)

    return _Making(size).made(_unpickled(instructions, storage))


def _of_old_torch(content: bytes) -> Any:
    """A file of torch.save before it wrote zip files: pickles one behind the other, then the storages."""
    storages: dict[Any, _Storage] = {}

    def storage(pid: Any) -> _Storage:
        _, dtype, key, _, _, view = pid
        if view is not None:
            raise NotDataError("a view of a storage")
        return storages.setdefault(key, _Storage(None, dtype))

    file = io.BytesIO(content)
    known = untrusted.SizedFile(file, len(content))
    for _ in range(3):  # magic, version, machine
        _DataUnpickler(known).load()
    tree, keys = _DataUnpickler(known, storage).load(), _DataUnpickler(known).load()
    place, whole = file.tell(), memoryview(content)
    for key in keys:
        (count,) = struct.unpack("<q", whole[place : place + 8])
        place += 8
        dtype = storages[key].dtype
        end = place + count * (1 if dtype is None else dtype.itemsize)
        if not place <= end <= len(content):
            raise ValueError(f"it claims {count} numbers for the storage {key!r}, which are not there")
        storages[key].content, place = whole[place:end], end
    return tree


# --- making -----------------------------------------------------------------------------------------------------------


def _key(key: Any) -> Any:
    """A key of a dict or a set. Those that are slow to hash or to compare are refused: nested tuples, and large integers, which
    can all have one hash."""
    if isinstance(key, _Bytes):
        key = bytes(_plain_bytes(key))
    if key is not None and not isinstance(key, (str, bytes, int, float)):
        raise NotDataError(f"a {type(key).__name__.strip('_').lower()} as a key")
    if isinstance(key, int) and abs(key) > 1 << 64:
        raise NotDataError("an integer beyond 64 bits as a key")
    return key


class _Making:
    """Makes what was noted, each object once; raises ValueError where the result would be much larger than the file.

    An object counts as often as it is referred to, for lists become arrays: ten lists of the same ten lists, and so on, are
    a small file that would fill every memory.
    """

    def __init__(self, size: int) -> None:
        self._most = self._left = 3 * size + (1 << 20)
        self._known: dict[int, tuple[Any, int]] = {}
        self._used: set[int] = set()

    def made(self, tree: Any) -> Any:
        """The containers, arrays and tensors."""
        return self._make(tree)[0]

    def _take(self, count: int) -> None:
        """Count bytes that are allocated."""
        self._left -= count
        if self._left < 0:
            raise ValueError(f"it unfolds to more than {self._most} bytes, three times its size")

    def _use(self, items: Any) -> Any:
        """A list that an object is made of. Its first use is paid for by the file, each further one counts."""
        if id(items) in self._used:
            self._take(64 * len(items))
        self._used.add(id(items))
        return items

    def _make(self, value: Any) -> tuple[Any, int]:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value, 1
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = (None, -1)
            known = self._known[id(value)] = self._new(value)
            if known[1] > self._most:
                raise ValueError(f"it unfolds to more than {self._most} bytes, three times its size")
        elif known[1] < 0:
            raise ValueError("it holds itself")
        return known

    def _new(self, value: Any) -> tuple[Any, int]:
        if isinstance(value, _Dict):
            made, total = {}, 1
            for key, item in zip(value.items[::2], value.items[1::2], strict=True):
                key = _key(key)
                made[key], size = self._make(item)
                total += size + len(key) if isinstance(key, (str, bytes)) else size + 1
            return made, total
        if isinstance(value, _Set):
            keys = [_key(key) for key in self._use(value.items)]
            return set(keys), 1 + len(keys)
        if isinstance(value, (list, tuple)):
            items = [self._make(item) for item in value]
            return [item for item, _ in items], 1 + sum(size for _, size in items)
        if isinstance(value, (bytes, bytearray, _Bytes)):
            plain = _plain_bytes(value)
            self._take(len(plain))
            return plain, 1 + len(plain)
        if isinstance(value, _Array):
            return self._array(value)
        if isinstance(value, _Tensor):
            tensor = self._tensor(value)
            return tensor, 1 + tensor.nbytes
        if isinstance(value, _Storage):
            whole, _ = self._bytes_of(value)
            return whole, 1 + len(whole)
        if isinstance(value, (complex, torch.dtype)):
            return value, 1
        raise NotDataError(f"a {type(value).__name__.strip('_').lower()}")

    def _array(self, value: _Array) -> tuple[Any, int]:
        _, shape, dtype, by_columns, content = value.state
        if isinstance(content, list):
            items, size = self._make(self._use(content))
            if not items:
                return [], size  # whatever the shape says: of (N, 0), N lists would come
            if min(shape, default=1) < 1:
                raise ValueError(f"it has {len(items)} objects of the shape {shape}")
            objects = np.empty(len(items), dtype=object)
            objects[:] = items
            return objects.reshape(shape).tolist(), size
        if not isinstance(dtype, _Dtype):
            raise NotDataError("an array of something else")
        buffer = _plain_bytes(content)
        self._take(len(buffer))
        array = np.frombuffer(buffer, dtype=dtype.numpy()).reshape(shape, order="F" if by_columns else "C")
        array = array if value.axes is None else array.transpose(value.axes)
        # torch wants memory that could be written to.
        return array if array.flags.writeable else array.copy(order="K"), 1 + array.nbytes

    def _bytes_of(self, storage: Any) -> tuple[Tensor, torch.dtype]:
        """The memory of a storage, and what it holds; made once for all its tensors."""
        if not isinstance(storage, _Storage):
            raise NotDataError(f"a {type(storage).__name__} as a storage")
        if storage.dtype is None:  # of one tensor, a file of torch in the pickle
            content = bytes(_plain_bytes(storage.content))
            self._take(len(content))
            inner = _of_old_torch(content)
            if not isinstance(inner, _Storage) or inner.dtype is None:
                raise NotDataError("something else than a storage")
            storage.content, storage.dtype = inner.content, inner.dtype
        if not isinstance(storage.content, Tensor):
            self._take(len(storage.content))
            # frombuffer takes no empty buffer
            held = torch.frombuffer(bytearray(storage.content), dtype=torch.uint8) if len(storage.content) else torch.empty(0)
            storage.content = held.to(torch.uint8)
        return storage.content, storage.dtype

    def _tensor(self, value: _Tensor) -> Tensor:
        content, dtype = self._bytes_of(value.storage)
        dtype = value.dtype or dtype
        offset, size, stride = value.offset, tuple(value.size), tuple(value.stride)
        if len(size) > 64:  # as many as numpy takes
            raise ValueError(f"it has a tensor of {len(size)} dimensions")
        whole = [offset, *size, *stride]
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in whole) or len(size) != len(stride):
            raise ValueError(f"it has a tensor of the shape {size}")
        count = len(content) // dtype.itemsize
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) > count or (math.prod(size) and last >= count):
            raise ValueError(f"it has a tensor of the shape {size}, but {count} numbers for it (expanded ones: save a copy)")
        if not math.prod(size):
            return torch.empty(size, dtype=dtype)
        numbers = content[: count * dtype.itemsize].view(dtype)
        return numbers.as_strided(size, stride, numbers.storage_offset() + offset)
