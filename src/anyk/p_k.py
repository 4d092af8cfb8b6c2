"""P_K, the distribution of k: a setting and no state, which nothing that becomes of a module changes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyk import _compat, checks

Distribution = Tensor | Sequence[float] | Mapping[int, float] | int
"""What a user may give: [.5, 0, 0, 0, .5], {1: .5, 5: .5}, k for {k: 1}, a tensor (k,) or, with one for each class, (n, k)."""
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class PK:
    """P_K, checked: one distribution for all examples, (k,), one for each class, (n, k), or one for each row, (rows, k)."""

    values: Float[Tensor, "*number k"]
    of: Literal["all", "class", "row"] = "all"
    weights: tuple[float, ...] | None = None
    """those of all examples, if they could be read"""

    @property
    def k(self) -> int:
        return self.values.shape[-1]

    def rows(self, target: Int[Tensor, "*rows"], like: Tensor) -> Float[Tensor, "*#rows k"]:
        """The weights for targets, in the precision that such scores are computed in; (k,) if they are the same for all."""
        dtype, device, compiling = checks.working_dtype(like), like.device, torch.compiler.is_compiling()
        if not (compiling and self.values.device == device) and self.weights is not None:
            return (_constant if compiling else _remembered_constant)(self.weights, device, dtype)
        if self.of == "class":
            return self.values.to(device)[target].to(dtype)
        values = self.values.to(device, dtype)  # an input of the compiled code: it may change from step to step
        return values[:, None] if self.of == "row" and target.ndim > 1 else values

    @property
    def for_kernels(self) -> Float[Tensor, "*number k"]:
        if not torch.compiler.is_compiling() and self.weights is not None:
            return _remembered_constant(self.weights)
        return self.values.to("cpu", torch.float64).contiguous()

    def to(self, device: torch.device) -> PK:
        """On another device, in the same precision, unless the device does not have it."""
        dtype = torch.float32 if device.type == "mps" else self.values.dtype
        return self if device.type == "meta" else PK(self.values.to(device, dtype), self.of, self.weights)

    def __repr__(self) -> str:
        return str(tuple(self.values.shape)) if self.weights is None else str([float(f"{p:.6g}") for p in self.weights])


@_compat.constant_when_traced
def _constant(weights: object, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    with torch.inference_mode(False):  # not on the default device, which may be "meta"
        return torch.tensor(weights, dtype=torch.float64, device="cpu").to(device, dtype)


_remembered_constant = lru_cache(maxsize=256)(_constant)


def remembered(function: Callable[..., _T]) -> Callable[..., _T]:
    """``functools.lru_cache`` for what is made of plain values, and checks them. Dynamo sees the function itself, and so does
    what cannot be hashed."""
    cached = lru_cache(maxsize=256, typed=True)(function)

    @wraps(function)
    def call(*arguments: Any) -> _T:
        if torch.compiler.is_compiling():
            return function(*arguments)
        try:
            return cached(*arguments)
        except TypeError:
            return function(*arguments)

    return call


def read(given: object) -> PK:
    """P_K from what a user gives. Zeros at the end of a list are dropped, since k is the largest k that counts; a tensor keeps
    its k."""
    if isinstance(given, Tensor):
        values = _checked(given, "p_k", (1, 2))
        weights = tuple(values.tolist()) if given.ndim == 1 and checks.readable(given) else None
        return PK(values, "class" if given.ndim == 2 else "all", weights)
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        given = {given: 1.0}
    if isinstance(given, Mapping):
        return _read_mapping(tuple(given.items()))
    return _read_list(tuple(given) if type(given) is list else given)


@remembered
def _read_mapping(items: tuple[tuple[Any, Any], ...]) -> PK:
    weights = {
        checks.at_least_one("p_k: every k", k): checks.number("p_k", weight, "numbers as weights") for k, weight in items
    }
    if max(weights, default=1) > 10**6:
        raise ValueError(f"p_k: expected k of at most a million, got {max(weights)}")
    return _read_list(tuple(weights.get(k, 0.0) for k in range(1, max(weights, default=0) + 1)))


@remembered
def _read_list(given: Any) -> PK:
    """A list, a tuple or an array of numbers."""
    try:
        weights = [float(weight) for weight in given]
    except (TypeError, ValueError):
        expected = "an integer k, a sequence of numbers, a mapping such as {1: 0.5, 5: 0.5}, or a tensor"
        raise TypeError(f"p_k: expected {expected}, got {given!r}") from None
    k = max([1, *[place + 1 for place, weight in enumerate(weights) if weight]])
    return PK(_checked(_constant(weights[:k]), "p_k", (1,)), "all", tuple(weights[:k]))


def read_rows(given: object, batch: torch.Size) -> PK:
    """One P_K for each row, from one for each example (B, k) or for each position (B, d1, …, k)."""
    if not isinstance(given, Tensor):
        try:
            given = _constant(given)
        except (TypeError, ValueError):
            raise TypeError(f"example_p_k: expected a tensor, or nested lists of numbers, got {given!r}") from None
    p_k, size = _checked(given, "example_p_k", range(1, 9)), (*batch, given.shape[-1])
    if p_k.shape[:-1] == batch[:1]:
        p_k = p_k.reshape(*batch[:1], *[1] * (len(batch) - 1), size[-1]).expand(size)
    if p_k.shape != size:
        raise ValueError(f"example_p_k: expected shape {(*batch[:1], size[-1])} to fit scores, got {tuple(given.shape)}")
    return PK(p_k.reshape(-1, size[-1]), "row")


def _checked(p_k: Tensor, name: str, dimensions: Sequence[int]) -> Tensor:
    if not p_k.dtype.is_floating_point:
        raise TypeError(f"{name}: expected floating-point numbers, got dtype {p_k.dtype}")
    if p_k.ndim not in dimensions or p_k.shape[-1] == 0:
        raise ValueError(f"{name}: expected at least one probability in shape (k,) or (n, k), got {tuple(p_k.shape)}")
    if not torch.compiler.is_compiling() and p_k.requires_grad:  # Dynamo cannot tell, of a constant
        raise ValueError(f"{name}: expected constants, got a tensor that requires a gradient: P_K is not learned")
    if p_k.dtype.itemsize < 4:  # in half precision they do not sum to 1 by far
        p_k = p_k.float()
        total = p_k.sum(-1, keepdim=True)
        p_k = torch.where((total - 1).abs() < 1e-2, p_k / total, p_k)
    if checks.readable(p_k) and p_k.numel():
        totals = p_k.double().sum(-1).flatten()
        total = totals[(totals - 1).abs().argmax()]
        if not p_k.min() >= 0:
            raise ValueError(f"{name}: expected probabilities of at least 0, got {p_k.min().item():.6g}")
        if not (total - 1).abs() <= 1e-4:
            expected = "probabilities that sum to 1 (within 0.0001), such as {1: 0.5, 5: 0.5} for top-1 and top-5"
            raise ValueError(f"{name}: expected {expected}, got the sum {total.item():.6g}")
    return p_k
