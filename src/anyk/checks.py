"""What every public function checks about its arguments.

Shapes and dtypes are checked always. Values are checked only where looking at them is free of side effects: on CPU
tensors in eager mode. Elsewhere a look would stall the device or break the graph.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection

import torch
from torch import Tensor

from anyk._compat import is_eager


def readable(tensor: Tensor) -> bool:
    """Whether the values may be looked at."""
    return tensor.device.type == "cpu" and is_eager(tensor)


def working_dtype(scores: Tensor) -> torch.dtype:
    """Half precision is computed in float32."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def one_of(name: str, value: object, known: Collection[object]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def number(name: str, value: object, expected: str) -> float:
    """A Python or NumPy number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def between(name: str, value: object, low: float, high: float) -> float:
    """A number between low and high, both included."""
    result = value if type(value) is float else number(name, value, f"a number between {low:g} and {high:g}")
    if not low <= result <= high:
        raise ValueError(f"{name}: expected a number between {low:g} and {high:g}, got {value}")
    return result


def at_least(name: str, value: object, low: float) -> float:
    result = number(name, value, f"a finite number of at least {low:g}")
    if not low <= result < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least {low:g}, got {value}")
    return result


def positive(name: str, value: object) -> float:
    result = number(name, value, "a positive, finite number")
    if not 0 < result < math.inf:
        raise ValueError(f"{name}: expected a positive, finite number, got {value}")
    return result


def integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None


def at_least_one(name: str, value: object) -> int:
    """An integer whose upper limit is not known yet."""
    result = integer(name, value)
    if result < 1:
        raise ValueError(f"{name}: expected at least 1, got {result}")
    return result


def count(name: str, value: object, low: int, high: int, high_name: str) -> int:
    """An integer between low and high."""
    if isinstance(value, torch.SymInt):  # in a trace with symbolic sizes there is nothing to look at
        return value  # type: ignore[return-value]
    result = value if type(value) is int else integer(name, value)
    if not low <= result <= high:
        raise ValueError(f"{name}: expected {low} <= {name} <= {high_name} = {high}, got {result}")
    return result


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    return value


def floating(name: str, value: object) -> Tensor:
    value = tensor(name, value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating-point tensor, got dtype {value.dtype}")
    return value


def scores(value: object) -> Tensor:
    value = floating("scores", value)
    if value.ndim < 1 or value.shape[-1] < 1:
        raise ValueError(f"scores: expected at least one class in the last dimension, got shape {tuple(value.shape)}")
    return value


def dimension(value: object, scores: Tensor) -> int:
    """One of the dimensions of the scores, counted from either end."""
    dim = integer("dim", value)
    if scores.ndim == 0:
        raise ValueError("scores: expected at least one dimension, got a scalar")
    if not -scores.ndim <= dim < scores.ndim:
        raise ValueError(f"dim: expected a dimension of scores of shape {tuple(scores.shape)}, got {dim}")
    return dim


def where(value: object, scores: Tensor) -> Tensor:
    """Which scores count, of their shape."""
    value = tensor("where", value)
    if value.dtype != torch.bool:
        raise TypeError(f"where: expected a bool tensor, got dtype {value.dtype}")
    return _expanded("where", value, scores.shape, "a shape that broadcasts to that of scores")


def _expanded(name: str, value: Tensor, shape: torch.Size, expected: str) -> Tensor:
    try:
        return value.expand(shape)
    except RuntimeError:  # only here are sizes put into words: in a trace that makes them constants
        raise ValueError(f"{name}: expected {expected}, {tuple(shape)}, got {tuple(value.shape)}") from None


def _for_rows(name: str, value: Tensor, rows: torch.Size) -> Tensor:
    """A tensor that broadcasts to the rows, maybe with the last dimension kept as 1: without that."""
    value = value.squeeze(-1) if value.shape == (*rows, 1) else value
    _expanded(name, value, rows, "one number, or the shape of the rows")
    return value


def one_for_each_row(name: str, value: Tensor, rows: torch.Size, low: float, high: float, high_name: str) -> Tensor:
    """Numbers between low and high, of a shape that broadcasts to that of the rows."""
    if value.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"{name}: expected numbers, got dtype {value.dtype}")
    value = _for_rows(name, value, rows)
    if readable(value) and not bool((inside := (value >= low) & (value <= high)).all()):
        raise ValueError(f"{name}: expected {low:g} <= {name} <= {high_name}, got {value[~inside][0].item()}")
    return value


def how_many(k: object, scores: Tensor) -> int | Tensor:
    """How many of the n entries of a row are chosen: an integer, or numbers of shape (..., 1), one for each row."""
    n, dtype = scores.shape[-1], torch.promote_types(scores.dtype, torch.float32)
    if isinstance(k, Tensor):
        return one_for_each_row("k", k, scores.shape[:-1], 0, n, "n").to(scores.device, dtype)[..., None]
    if isinstance(k, (numbers.Integral, torch.SymInt)):
        return count("k", k, 0, n, "n")
    value = number("k", k, "a number or a tensor")
    if not 0 <= value <= n:
        raise ValueError(f"k: expected 0 <= k <= n = {n}, got {value:g}")
    return torch.full((1,), value, dtype=dtype, device=scores.device)


def temperature(value: object) -> float | Tensor:
    """A positive float, or a floating-point tensor."""
    if not isinstance(value, Tensor):
        return value if type(value) is float and 0 < value < math.inf else positive("temperature", value)
    if not value.dtype.is_floating_point or value.numel() == 0:
        got = f"dtype {value.dtype} and shape {tuple(value.shape)}"
        raise ValueError(f"temperature: expected a floating-point tensor with one element, or one for each row, got {got}")
    if readable(value) and not bool(((value > 0) & value.isfinite()).all()):
        raise ValueError(f"temperature: expected positive, finite numbers, got {value.min().item()}")
    return value


def temperature_for(value: float | Tensor, scores: Tensor) -> float | Tensor:
    """The temperature of rows of scores: a float, a tensor of no dimension, or one of shape (..., 1) with one for each row."""
    value = temperature(value)
    if not isinstance(value, Tensor):
        return value
    value = value.to(scores.device, working_dtype(scores))
    rows = scores.shape[:-1]
    return value.reshape(()) if value.numel() == 1 else _for_rows("temperature", value, rows).expand(rows)[..., None]


def class_indices(target: object, batch_shape: torch.Size, n: int, ignore_index: int | None = None) -> Tensor:
    """Integer targets of the batch's shape, each in 0 … n-1 (or ignored)."""
    target = tensor("target", target)
    if target.dtype.is_floating_point or target.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"target: expected class indices of an integer dtype, got dtype {target.dtype}")
    if target.shape != batch_shape:
        hint = ""
        if len(batch_shape) > 1 and target.shape == (*batch_shape[:1], n, *batch_shape[1:-1]):
            hint = "; if the classes are in the last dimension, give scores.movedim(-1, 1)"
        raise ValueError(f"target: expected shape {tuple(batch_shape)} to fit scores, got {tuple(target.shape)}{hint}")
    target = target.long()
    if readable(target) and (wrong := target != target.clamp(0, n - 1)).any():
        if ignore_index is not None:
            wrong &= target != ignore_index
        if wrong.any():
            raise ValueError(f"target: expected class indices from 0 to {n - 1}, got {target[wrong][0].item()}")
    return target


def enough_entries(scores: Tensor, k: int) -> None:
    """Every row has at least k entries that are not padding."""
    if readable(scores) and scores.numel() and not scores.detach().amin() > -math.inf:
        fewest = (scores.detach() != -math.inf).sum(-1).min()
        if fewest < k:
            raise ValueError(f"scores: expected at least k = {k} classes above -inf in every row, got {fewest.item()}")
