"""Pickles that people exchange, read as data: no name in them is imported and no code of theirs is run.

The unpickler knows containers, numpy arrays and torch tensors, and builds them with functions of its own.
"""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch

from anyk import _compat


def load(file: BinaryIO) -> Any:
    """The containers, arrays and tensors in a pickle; bytes of Python 2 become text. Raises NotDataError for anything else."""
    return _unwrap(_DataUnpickler(file, encoding="latin1").load())


class NotDataError(pickle.UnpicklingError):
    """A pickle asks for a name that is not on the list."""


class _DataUnpickler(pickle.Unpickler):
    """Builds containers, numpy arrays and torch tensors. Every other name is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        make = _MAKERS.get(f"{module.replace('numpy.core', 'numpy._core')}.{name}")
        if make is None:
            raise NotDataError(f"{module}.{name}")
        return make


class _Maker:
    """A function that a pickle may call and may not change: pickles can set attributes of what they are given."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]):
        object.__setattr__(self, "_make", make)

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotDataError("a change of the reader")


class _Dtype:
    """A numpy dtype of plain numbers or text. numpy's own would take flags and sizes from the pickle unchecked."""

    def __init__(self, code: str, *_: Any):
        if not re.fullmatch(r"[fiu][1248]|b1|[US]\d{1,6}|O8?", code):
            raise NotDataError(f"an array of {code}")
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in ("<", ">") else "="

    def numpy(self) -> "np.dtype[Any]":
        return np.dtype(self.order + self.code.removesuffix("8") if self.code == "O8" else self.order + self.code)


class _Array:
    """An array whose content follows in the pickle."""

    value: "np.ndarray[Any, Any] | None" = None

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, content = state
        if isinstance(content, list):
            self.value = np.empty(len(content), dtype=object)
            self.value[:] = content
            self.value = self.value.reshape(shape)
        else:
            self.value = _array_of_bytes(content, dtype, shape, "F" if by_columns else "C")


def _array_of_bytes(content: Any, dtype: _Dtype, shape: Any, order: str, axes: Any = None) -> "np.ndarray[Any, Any]":
    if dtype.code.startswith("O") or axes is not None:
        raise NotDataError("an array of objects")
    # Files of Python 2 have text where bytes are meant.
    buffer = content.encode("latin1") if isinstance(content, str) else content
    values = np.frombuffer(buffer, dtype=dtype.numpy()).reshape(shape, order="F" if order == "F" else "C")
    # torch wants memory that could be written to.
    return values if values.flags.writeable else values.copy(order="K")


def _scalar(dtype: _Dtype, content: Any = None) -> Any:
    return content if dtype.code.startswith("O") else _array_of_bytes(content, dtype, (), "C").item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def _storage(content: bytes) -> Any:
    """torch's own function for this reads the bytes as an unrestricted pickle."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _not_called(*_: Any) -> Any:
    raise NotDataError("a call of numpy.ndarray")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _encode,
    "builtins.bytearray": bytearray,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _not_called,  # only named, as the kind of array to make
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _array_of_bytes,
    "torch._utils._rebuild_tensor_v2": _compat.rebuild_tensor,
    "torch.storage._load_from_bytes": _storage,
}
_MAKERS = {name: _Maker(make) for name, make in _FUNCTIONS.items()}


def _unwrap(tree: Any) -> Any:
    """The same containers with the finished arrays in them."""
    if isinstance(tree, _Array):
        return _unwrap(tree.value.tolist()) if tree.value is not None and tree.value.dtype == object else tree.value
    if isinstance(tree, Mapping):
        return {key: _unwrap(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_unwrap(value) for value in tree]
    return tree
