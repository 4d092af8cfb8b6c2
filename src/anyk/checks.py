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

from anyk._compat import eager as eager  # what the rest of the core asks for here


def readable(tensor: Tensor) -> bool:
    """Whether the values may be looked at."""
    return tensor.device.type == "cpu" and eager(tensor)


def working_dtype(scores: Tensor) -> torch.dtype:
    """Half precision is computed in float32."""
    return torch.promote_types(scores.dtype, torch.float32)


def one_of(name: str, value: object, known: Collection[object]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")


def number(name: str, value: object, expected: str) -> float:
    """A Python or NumPy number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def at_least_one(name: str, value: object) -> int:
    """An integer whose upper limit is not known yet."""
    result = _integer(name, value)
    if result < 1:
        raise ValueError(f"{name}: expected at least 1, got {result}")
    return result


def count(name: str, value: object, low: int, high: int, high_name: str) -> int:
    """An integer between low and high."""
    result = value if type(value) is int else _integer(name, value)
    if not low <= result <= high:
        raise ValueError(f"{name}: expected {low} <= {name} <= {high_name} = {high}, got {result}")
    return result


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def dimension(value: object, scores: Tensor) -> int:
    """One of the dimensions of the scores, counted from either end."""
    dim = _integer("dim", value)
    if scores.ndim == 0:
        raise ValueError("scores: expected at least one dimension, got a scalar")
    if not -scores.ndim <= dim < scores.ndim:
        raise ValueError(f"dim: expected a dimension of scores of shape {tuple(scores.shape)}, got {dim}")
    return dim


def one_for_each_row(name: str, value: Tensor, rows: torch.Size, low: float, high: float, high_name: str) -> Tensor:
    """Numbers between low and high, of a shape that broadcasts to that of the rows, maybe with the last dimension kept as 1."""
    if value.shape == (*rows, 1):
        value = value.squeeze(-1)
    if value.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"{name}: expected numbers, got dtype {value.dtype}")
    try:
        value.expand(rows)
    except RuntimeError:
        raise ValueError(
            f"{name}: expected one number, or the shape {tuple(rows)} of the rows, got {tuple(value.shape)}"
        ) from None
    if readable(value) and not bool((inside := (value >= low) & (value <= high)).all()):
        raise ValueError(f"{name}: expected {low:g} <= {name} <= {high_name}, got {value[~inside][0].item()}")
    return value


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    return value


def floating(name: str, value: object) -> Tensor:
    value = tensor(name, value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating-point tensor, got dtype {value.dtype}")
    return value


def where(value: object, scores: Tensor) -> Tensor:
    """Which scores count, of their shape."""
    value = tensor("where", value)
    if value.dtype != torch.bool:
        raise TypeError(f"where: expected a bool tensor, got dtype {value.dtype}")
    try:
        return value.expand(scores.shape)
    except RuntimeError:
        raise ValueError(
            f"where: expected a shape that broadcasts to {tuple(scores.shape)} of scores, got {tuple(value.shape)}"
        ) from None


def scores(value: object) -> Tensor:
    value = floating("scores", value)
    if value.ndim < 1 or value.shape[-1] < 1:
        raise ValueError(f"scores: expected at least one class in the last dimension, got shape {tuple(value.shape)}")
    return value


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


def real_classes(real: Tensor | None, k: int, rows: Tensor | None = None, of: str = "classes") -> None:
    """Every row (of those marked in ``rows``) has at least k classes that are not padding; ``of`` is what they are called."""
    if real is None or not readable(real):
        return
    counts = real.sum(-1)
    if rows is not None:
        counts = counts[rows]
    if counts.numel() and counts.min() < k:
        raise ValueError(f"scores: expected at least k = {k} {of} above -inf in every row, got {counts.min().item()}")


def how_many(k: object, scores: Tensor) -> int | Tensor:
    """How many of the n entries of a row are chosen: an integer, or numbers of shape (..., 1), one for each row."""
    n = scores.shape[-1]
    if isinstance(k, Tensor):
        k = one_for_each_row("k", k, scores.shape[:-1], 0, n, f"n = {n}")
        return k.to(scores.device, torch.promote_types(scores.dtype, torch.float32))[..., None]
    if isinstance(k, numbers.Integral):
        return count("k", k, 0, n, "n")
    value = number("k", k, "a number or a tensor")
    if not 0 <= value <= n:
        raise ValueError(f"k: expected 0 <= k <= n = {n}, got {value:g}")
    return torch.full((1,), value, dtype=torch.promote_types(scores.dtype, torch.float32), device=scores.device)


def between(name: str, value: object, low: float, high: float) -> float:
    """A number between low and high, both included."""
    result = value if type(value) is float else number(name, value, f"a number between {low:g} and {high:g}")
    if not low <= result <= high:
        raise ValueError(f"{name}: expected a number between {low:g} and {high:g}, got {value}")
    return result


def at_least(name: str, value: object, low: float) -> float:
    """A finite number of at least low."""
    result = number(name, value, f"a finite number of at least {low:g}")
    if not low <= result < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least {low:g}, got {value}")
    return result


def positive(name: str, value: object) -> float:
    """A positive, finite number."""
    result = number(name, value, "a positive number")
    if not 0 < result < math.inf:
        raise ValueError(f"{name}: expected a positive, finite number, got {result:g}")
    return result


def temperature(value: object) -> float | Tensor:
    """A positive float, or a one-element floating-point tensor."""
    if isinstance(value, Tensor):
        if not value.dtype.is_floating_point or value.numel() != 1:
            raise ValueError(
                "temperature: expected a floating-point tensor with one element, "
                f"got dtype {value.dtype} and shape {tuple(value.shape)}"
            )
        if readable(value) and not (value.item() > 0 and value.isfinite().item()):
            raise ValueError(f"temperature: expected a positive, finite number, got {value.item()}")
        return value
    return positive("temperature", value)
