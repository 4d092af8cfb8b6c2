"""P_K, the distribution of k: what is accepted, how it is checked, how it is kept.

It is a setting and no state. It is kept in the precision that it was given in, numbers in float64, whatever becomes of the
module around it; only at the call it takes the scores' precision.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyk import checks

Distribution = Tensor | Sequence[float] | Sequence[Sequence[float]] | Mapping[int, float] | int
"""What a user may give: [.5, 0, 0, 0, .5], {1: .5, 5: .5}, k for {k: 1}, a tensor (k,), or one for each class, (n, k)."""
TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class PK:
    """P_K, checked.

    Args:
        values: the weights of top-1, …, top-k: (k,), (n, k) or (rows, k).
        of: whether there is one distribution for all examples, one for each class, or one for each row.
    """

    values: Float[Tensor, "*number k"]
    of: Literal["all", "class", "row"] = "all"

    @property
    def k(self) -> int:
        k = self.values.shape[-1]
        # A definite number, also in a trace with symbolic sizes.
        return len(list(range(k))) if torch.compiler.is_compiling() else k

    def at(self, target: Int[Tensor, "*rows"]) -> Float[Tensor, "*#rows k"]:
        """The weights for each row, of the shape of the targets, or (k,) where they are the same for all."""
        if self.of == "class":
            return self.values[target]
        return self.values[:, None] if self.of == "row" and target.ndim > 1 else self.values

    def positive(self) -> list[int]:
        """The k with a weight above zero for some class or row."""
        weighted = (self.values.detach().reshape(-1, self.k) > 0).any(0)
        return [int(place) + 1 for place in weighted.nonzero()]

    def __repr__(self) -> str:
        if self.values.ndim > 1 or self.values.is_meta:
            return str(tuple(self.values.shape))
        return str([float(f"{weight:.6g}") for weight in self.values.tolist()])


def read(given: Distribution, name: str = "p_k") -> PK:
    """P_K from what a user gives: one distribution, or one for each class.

    Zeros at the end of a list are dropped, since k is the largest k that counts; a tensor keeps its k. A tensor of half
    precision does not sum to 1 by far: it is taken in float32 and made to.
    """
    if isinstance(given, Tensor):
        if given.ndim > 2:
            raise ValueError(f"{name}: expected shape (k,) or (n, k), got {tuple(given.shape)}")
        return PK(_checked(given, name), "class" if given.ndim == 2 else "all")
    rows, nested = _rows(given, name)
    if nested:
        return PK(_checked(_tensor(rows), name), "class")
    _check_values(min(rows[0]), sum(rows[0]), name)
    return PK(_tensor(rows[0]))


def _tensor(weights: list[Any]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64, device="cpu")  # not the default device, which may be "meta"


def read_rows(given: object, batch: torch.Size, name: str = "example_p_k") -> PK:
    """One P_K for each row, from one for each example (B, k) or for each position (B, d1, …, k)."""
    if not isinstance(given, Tensor):
        try:
            given = _tensor(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise TypeError(f"{name}: expected a tensor, or nested lists of numbers, got {given!r}") from None
    p_k = _checked(given, name)
    k = p_k.shape[-1]
    if p_k.shape[:-1] == batch:
        return PK(p_k.reshape(-1, k), "row")
    if len(batch) > 0 and p_k.shape[:-1] == batch[:1]:
        return PK(p_k.reshape(-1, *[1] * (len(batch) - 1), k).expand(*batch, k).reshape(-1, k), "row")
    raise ValueError(f"{name}: expected shape {(*batch[:1], k)} to fit scores, got {tuple(p_k.shape)}")


def _rows(given: Any, name: str) -> tuple[list[list[float]], bool]:
    """Lists of numbers without the zeros at their ends, and whether there were several."""
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        given = {given: 1.0}
    if isinstance(given, Mapping):
        given = _from_mapping(given, name)
    given = given.tolist() if hasattr(given, "tolist") else given  # an array
    nested = isinstance(given, (list, tuple)) and len(given) > 0 and isinstance(given[0], (list, tuple))
    try:
        if isinstance(given, str | Set):  # a set has no order
            raise TypeError
        rows = [[float(p) for p in row] for row in (given if nested else [given])]
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: expected an integer k, a sequence of numbers, a mapping such as {{1: 0.5, 5: 0.5}}, or a tensor, "
            f"got {given!r}"
        ) from None
    if not all(rows):
        raise ValueError(f"{name}: expected at least one probability, got {given!r}")
    k = max(len(row) for row in rows)
    if any(len(row) < k for row in rows):
        raise ValueError(f"{name}: expected one distribution of the same length for each class, got {given!r}")
    while k > 1 and all(row[k - 1] == 0 for row in rows):
        k -= 1
    return [row[:k] for row in rows], nested


def _from_mapping(given: Mapping[Any, Any], name: str) -> list[float]:
    ks = [checks.at_least_one(f"{name}: every k", k) for k in given]
    if not ks:
        raise ValueError(f"{name}: expected at least one probability, got {given!r}")
    if max(ks) > 10**6:
        raise ValueError(f"{name}: expected k of at most a million, got {max(ks)}")
    weights = [0.0] * max(ks)
    for k, weight in zip(ks, given.values(), strict=True):
        weights[k - 1] = checks.number(name, weight, "numbers as the weights of the k")
    return weights


def _checked(p_k: Tensor, name: str) -> Tensor:
    if not p_k.dtype.is_floating_point:
        raise TypeError(f"{name}: expected floating-point numbers, got dtype {p_k.dtype}")
    if p_k.ndim < 1 or p_k.shape[-1] == 0:
        raise ValueError(f"{name}: expected at least one probability, got shape {tuple(p_k.shape)}")
    if p_k.dtype.itemsize < 4:
        p_k = p_k.float()
        total = p_k.sum(-1, keepdim=True)
        p_k = torch.where((total - 1).abs() < 1e-2, p_k / total, p_k)
    if checks.readable(p_k) and p_k.numel():
        sums = p_k.double().sum(-1)
        _check_values(p_k.min().item(), sums.flatten()[(sums - 1).abs().argmax()].item(), name)
    return p_k


def _check_values(least: float, total: float, name: str) -> None:
    if not least >= 0:
        raise ValueError(f"{name}: expected probabilities of at least 0, got {least:.6g}")
    if not abs(total - 1) <= TOLERANCE:
        raise ValueError(
            f"{name}: expected probabilities that sum to 1 (within {TOLERANCE:g}), such as {{1: 0.5, 5: 0.5}} for top-1 and "
            f"top-5, got the sum {total:.6g}"
        )
