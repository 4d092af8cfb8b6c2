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

Operator = IntEnum("Operator", "NETWORK LAPSUM KSUBSET SOFTSORT NEURALSORT PERMUTAHEDRON", start=0)
# The soft comparators of anyk.swaps, by their names.
Swap = IntEnum("Swap", "LOGISTIC LOGISTIC_ART CAUCHY GAUSSIAN RECIPROCAL OPTIMAL", start=0)
# Which wires of a network the candidates start on.
Wires = IntEnum("Wires", "TARGET SORTED GIVEN", start=0)
# The cross-entropy family by its `top1`, and the bounded family.
Family = IntEnum("Family", "SEPARATE MIXED OPERATOR ERROR", start=0)
# What is made of scores in descending order.
Ordered = IntEnum("Ordered", "RANKS SORT", start=0)
Dtype = IntEnum("Dtype", "FLOAT32 BFLOAT16 FLOAT16", start=0)
# One P_K for all rows, one for each class, or one for each row.
PKOf = IntEnum("PKOf", "OF_ALL OF_CLASS OF_ROW", start=0)
Reduction = IntEnum("Reduction", "MEAN SUM NONE", start=0)
# What a call returns. Whatever is not FINE is left to the plain code, which computes it or says what is wrong.
Status = IntEnum("Status", "FINE BAD_TARGET PADDED_TARGET TOO_FEW NO_MEMORY STRANGE", start=0)


class Limit(IntEnum):
    MOST_K = 8
    """of the smooth top-k loss: up to here its power sums are exact enough in float32"""
    MOST_SORTED = 128
    """so many scores at most are sorted by a network, many rows at once"""


ENUMERATIONS: tuple[type[IntEnum], ...] = (Operator, Swap, Wires, Family, Ordered, Dtype, PKOf, Reduction, Status, Limit)


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


class Mask(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows n stride"),
        *_fields(ctypes.c_int32, "dtype threads kind unused"),
        *_fields(ctypes.c_double, "k rate"),
        *_fields(ctypes.c_void_p, "scores ks threshold out"),
    )


class MaskBackward(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows n stride incoming_stride"),
        *_fields(ctypes.c_int32, "dtype threads kind of_threshold"),
        *_fields(ctypes.c_double, "rate"),
        *_fields(ctypes.c_void_p, "scores threshold incoming out grad_k grad_rate"),
    )


class Ranking(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows n"),
        *_fields(ctypes.c_int32, "threads operator kind unused"),
        *_fields(ctypes.c_double, "rate"),
        *_fields(ctypes.c_void_p, "scores order incoming out grad_rate"),
    )


class Draw(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows n k stride"),
        *_fields(ctypes.c_int32, "dtype threads"),
        *_fields(ctypes.c_double, "rate"),
        *_fields(ctypes.c_void_p, "scores uniform out"),
    )


class NetworkMask(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows n k size"),
        *_fields(ctypes.c_int32, "threads swap"),
        *_fields(ctypes.c_double, "rate"),
        *_fields(ctypes.c_void_p, "comparators outputs scores order incoming out grad_rate"),
    )


STRUCTURES = (Spec, SmoothSpec, Batch, Backward, Selection, Mask, MaskBackward, Ranking, Draw, NetworkMask)


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
