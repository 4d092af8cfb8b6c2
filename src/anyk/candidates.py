"""Step 1: keep the m best scores of each row, the target always among them."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from anyk import checks, kernels

M = int | Literal["auto"] | None


def number(m: M, n: int, k: int) -> int:
    """How many of n classes are kept for the first k: m, all of them for None, min(n, max(64, 4 k)) for "auto"."""
    if m is None:
        return n
    return min(n, max(64, 4 * k)) if m == "auto" else checks.count("m", m, 1, n, "the number of classes")


def check(m: object) -> None:
    """Raises an error for what is no number of candidates, whatever n may be."""
    if isinstance(m, str) and m != "auto":
        raise ValueError(f'm: expected an integer, "auto", or None for all, got {m!r}')
    if m is not None and not isinstance(m, str):
        checks.at_least_one("m", m)


def best(scores: Float[Tensor, "*batch n"], m: int) -> Int[Tensor, "*batch m"]:
    """The indices of the m best scores of each row, descending; on the CPU the earlier of equals first."""
    scores = scores.detach()
    if (found := kernels.best(scores, m)) is not None:
        return found
    values, indices = scores.topk(m, dim=-1)
    if checks.readable(scores) and m > 0:
        tied = (values[..., 1:] == values[..., :-1]).any() or (scores >= values[..., -1:]).sum() > indices.numel()
        if tied or values.isnan().any():
            return scores.sort(dim=-1, descending=True, stable=True).indices[..., :m]
    return indices


def insert(
    classes: Int[Tensor, "*batch m"], target: Int[Tensor, "*batch"]
) -> tuple[Int[Tensor, "*batch m"], Int[Tensor, "*batch"]]:
    """The classes with the target among them, in the last place if it was missing; and its place."""
    before = (classes[..., :-1] != target[..., None]).cumprod(-1)  # 1 as long as it has not come
    position = before.sum(-1)
    return classes.scatter(-1, position[..., None], target[..., None]), position


def keep(
    scores: Float[Tensor, "*batch n"], target: Int[Tensor, "*batch"], m: int, *, descending: bool = True
) -> tuple[Float[Tensor, "*batch m"], Int[Tensor, "*batch"]]:
    """The m best scores of each row, and where the target stands among them; with ``descending=False`` and m = n all of them as
    they came.

    Example:
        >>> keep(torch.tensor([[0.1, 0.9, 0.5, 0.7]]), torch.tensor([0]), m=2)
        (tensor([[0.9000, 0.1000]]), tensor([1]))
    """
    if m == scores.shape[-1] and not descending:
        return scores, target
    classes, position = insert(best(scores, m), target)
    return scores.gather(-1, classes), position


def at(scores: Shaped[Tensor, "*batch m"], position: Int[Tensor, "*batch"]) -> Shaped[Tensor, "*batch"]:
    return scores.gather(-1, position[..., None]).squeeze(-1)


def others(scores: Shaped[Tensor, "*batch m"], position: Int[Tensor, "*batch"]) -> Shaped[Tensor, "*batch m-1"]:
    """The scores without the one at ``position``, in the same order."""
    place = torch.arange(scores.shape[-1] - 1, device=scores.device)
    return scores.gather(-1, place + (place >= position[..., None]))


def check_padding(kept: Float[Tensor, "*batch m"], position: Int[Tensor, "*batch"], k: int) -> None:
    """Where the scores can be read: every row has at least k that are not padding, and the target is none."""
    if not checks.readable(kept) or not kept.numel() or kept.detach().amin() > -torch.inf:
        return
    checks.enough_entries(kept, k)
    if bool((at(kept.detach(), position) == -torch.inf).any()):
        raise ValueError("target: expected classes that are not padding, got one whose score is -inf")
