"""The C library: plain C for the CPU, called without the GIL. `csrc/` has the code, `build.py` builds it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anyk.kernels import abi

FILE = "_native.so"
DTYPES = {torch.float32: int(abi.Dtype.FLOAT32), torch.bfloat16: int(abi.Dtype.BFLOAT16), torch.float16: int(abi.Dtype.FLOAT16)}


class Library(NamedTuple):
    """The functions of csrc/anyk.c. All but the last return a :class:`~anyk.kernels.abi.Status`."""

    forward: Callable[[bytes, bytes], int]
    smooth: Callable[[bytes, bytes], int]
    backward: Callable[[bytes], int]
    best: Callable[[bytes], int]
    mask: Callable[[bytes], int]
    mask_backward: Callable[[bytes], int]
    ranking: Callable[[bytes], int]
    draw: Callable[[bytes], int]
    network_mask: Callable[[bytes], int]
    use: Callable[[int], int]
    variant: str


def load() -> tuple[Library | None, str]:
    """The library, or why there is none."""
    path = Path(__file__).parent / FILE
    if not path.exists():
        return None, "not in this installation: it is of a wheel for any machine, or there was no C compiler"
    try:
        library = ctypes.CDLL(str(path))
        size = ctypes.c_int64.in_dll(library, "anyk_layout_size").value
        layout = (ctypes.c_int64 * size).in_dll(library, "anyk_layout")
        if [*layout] != abi.layout():
            return None, "built for another version of anyk, with other constants or structures: install anyk again"
        functions = {name: getattr(library, f"anyk_{name}") for name in Library._fields}
    except (OSError, AttributeError, ValueError) as error:
        return None, f"cannot be loaded: {error}"
    structure = ctypes.c_char_p  # as bytes
    for name, function in functions.items():
        function.argtypes = {"forward": [structure, structure], "smooth": [structure, structure], "use": [ctypes.c_int]}.get(
            name, [structure]
        )
    variant = functions.pop("variant")
    variant.argtypes, variant.restype = [], ctypes.c_char_p
    return Library(**functions, variant=variant().decode()), ""


library, why_not = load()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def readable(scores: Tensor) -> Tensor:
    """(rows, n), the entries of a row side by side; rows may be anywhere."""
    return scores if scores.stride(1) == 1 or scores.shape[1] == 1 else scores.contiguous()


def as_rows(scores: Tensor) -> Tensor:
    return readable(scores.reshape(-1, scores.shape[-1]))
