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
    """The functions of csrc/anyk.c, which take structures as bytes. All but the last two return a status: 0 is fine."""

    forward: Callable[[bytes, bytes], int]
    backward: Callable[[bytes], int]
    best: Callable[[bytes], int]
    mask: Callable[[bytes], int]
    mask_backward: Callable[[bytes], int]
    draw: Callable[[bytes], int]
    order: Callable[[bytes], int]
    network_mask: Callable[[bytes], int]
    use: Callable[[int], int]
    variant: Callable[[], bytes]


def load() -> tuple[Library | None, str]:
    """The library, or why there is none."""
    path = Path(__file__).parent / FILE
    if not path.exists():
        return None, "not in this installation: it is of a wheel for any machine, or there was no C compiler"
    try:
        library = ctypes.CDLL(str(path))
        size = ctypes.c_int64.in_dll(library, "anyk_layout_size").value
        if [*(ctypes.c_int64 * size).in_dll(library, "anyk_layout")] != abi.layout():
            return None, "built for another version of anyk, with other constants or structures: install anyk again"
        found = Library(**{name: getattr(library, f"anyk_{name}") for name in Library._fields})
    except (OSError, AttributeError, ValueError) as error:
        return None, f"cannot be loaded: {error}"
    for function in found:
        function.argtypes = [ctypes.c_char_p]  # type: ignore[attr-defined]
    found.forward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]  # type: ignore[attr-defined]
    found.use.argtypes = [ctypes.c_int]  # type: ignore[attr-defined]
    found.variant.argtypes, found.variant.restype = [], ctypes.c_char_p  # type: ignore[attr-defined]
    return found, ""


library, why_not = load()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def readable(scores: Tensor) -> Tensor:
    """(rows, n), the entries of a row side by side; rows may be anywhere."""
    return scores if scores.stride(1) == 1 or scores.shape[1] == 1 else scores.contiguous()
