"""The binary interface of the C library: the constants and structures that C and Python share.

build.py writes the constants into ``abi.h``, which csrc/anyk.h includes, so that they stand here alone. The structures stand in
csrc/anyk.h as well, with what each field means. The library exports its constants and where the compiler put each field, and
:mod:`anyk.kernels.native` does not use one that differs from this module.

Nothing outside the standard library is imported here: build.py runs this file before anyk is installed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any


class Operator(IntEnum):
    NETWORK = 0
    LAPSUM = 1
    KSUBSET = 2
    SOFTSORT = 3
    NEURALSORT = 4


class Swap(IntEnum):
    """The soft comparators of :mod:`anyk.swaps`, by their names."""

    LOGISTIC = 0
    LOGISTIC_ART = 1
    CAUCHY = 2
    GAUSSIAN = 3
    RECIPROCAL = 4
    OPTIMAL = 5


class Wires(IntEnum):
    """Which wires of a network the candidates start on."""

    TARGET = 0
    SORTED = 1
    GIVEN = 2


class Family(IntEnum):
    """What becomes of log T: the cross-entropy family by its ``top1``, or the bounded family."""

    SEPARATE = 0
    MIXED = 1
    OPERATOR = 2
    ERROR = 3


class Dtype(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class PKOf(IntEnum):
    """Whose P_K it is: one for all rows, one for each class, one for each row."""

    OF_ALL = 0
    OF_CLASS = 1
    OF_ROW = 2


class Reduction(IntEnum):
    MEAN = 0
    SUM = 1
    NONE = 2


class Status(IntEnum):
    """What a call returns. Whatever is not FINE is left to the plain code, which computes it or says what is wrong."""

    FINE = 0
    BAD_TARGET = 1
    PADDED_TARGET = 2
    TOO_FEW = 3
    NO_MEMORY = 4
    STRANGE = 5


class Limit(IntEnum):
    MOST_K = 8
    """of the smooth top-k loss: up to here its power sums are exact enough in float32"""
    MOST_SORTED = 128
    """so many scores at most are sorted by a network, many rows at once"""


ENUMERATIONS = (Operator, Swap, Wires, Family, Dtype, PKOf, Reduction, Status, Limit)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Spec(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "n m k"),
        *_fields(ctypes.c_int32, "operator swap wires family all_classes uses_softmax"),
        *_fields(ctypes.c_double, "ce_weight q smoothing scale"),
        *_fields(ctypes.c_int64, "size"),
        *_fields(ctypes.c_void_p, "comparators outputs starts"),
        *_fields(ctypes.c_int64, "sorter_size"),
        *_fields(ctypes.c_void_p, "sorter"),
    )


class SmoothSpec(ctypes.Structure):
    _fields_ = (*_fields(ctypes.c_int64, "n k"), *_fields(ctypes.c_double, "temperature margin gap"))


class Batch(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows stride ignore_index"),
        *_fields(ctypes.c_int32, "dtype p_k_of reduction threads"),
        *_fields(ctypes.c_void_p, "scores target p_k weight cross_entropy loss"),
        *_fields(ctypes.c_void_p, "gradient classes rest divisor grad_cross_entropy"),
    )


class Backward(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows n m stride out_stride incoming_stride"),
        *_fields(ctypes.c_int32, "dtype powers threads single"),
        *_fields(ctypes.c_double, "rate"),
        *_fields(ctypes.c_void_p, "scores gradient classes rest divisor incoming out"),
    )


class Selection(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows n m stride"),
        *_fields(ctypes.c_int32, "dtype threads"),
        *_fields(ctypes.c_void_p, "scores classes"),
    )


STRUCTURES = (Spec, SmoothSpec, Batch, Backward, Selection)


def packer(structure: type[ctypes.Structure]) -> struct.Struct:
    """Makes the bytes of a structure from its fields in order, in a quarter of the time that ctypes takes."""
    types: list[Any] = [kind for _, kind in structure._fields_]  # type: ignore[misc]
    made = struct.Struct("".join(each._type_ for each in types))  # the letter that both modules know a type by
    assert made.size == ctypes.sizeof(structure)
    return made


def _agreed() -> Iterator[tuple[str, int]]:
    """Everything that C and Python must agree on: an expression of C, and its value here."""
    for enumeration in ENUMERATIONS:
        for constant in enumeration:
            yield constant.name, constant.value
    for structure in STRUCTURES:
        yield f"sizeof({structure.__name__})", ctypes.sizeof(structure)
        for name, *_ in structure._fields_:
            yield f"offsetof({structure.__name__}, {name})", getattr(structure, name).offset


def layout() -> list[int]:
    """What a library must export as ``anyk_layout`` to be used."""
    return [value for _, value in sorted(_agreed())]


def header() -> str:
    """abi.h: the constants, and the expressions whose values the library exports."""
    constants = [f"{constant.name} = {constant.value}" for enumeration in ENUMERATIONS for constant in enumeration]
    lines = ["/* Written by build.py from abi.py. */", f"enum {{ {', '.join(constants)} }};"]
    return "\n".join([*lines, f"#define ANYK_LAYOUT {', '.join(expression for expression, _ in sorted(_agreed()))}", ""])
