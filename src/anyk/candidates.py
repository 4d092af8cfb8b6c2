"""Step 1: keep the m best scores of each row, the target always among them."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from anyk import _compat, checks, kernels


def number(m: int | Literal["auto"] | None, n: int, k: int) -> int | None:
    """How many of n classes are ranked for the first k; None means all.

    Args:
        m: an integer, None for all, or "auto": min(n, max(64, 4 k)).
        n: the number of classes.
        k: how many are asked for.
    """
    if m == "auto":
        m = max(64, 4 * k)
        return m if m < n else None
    if isinstance(m, str):
        raise ValueError(f'm: expected an integer, "auto", or None for all, got {m!r}')
    return None if m is None else checks.count("m", m, 1, n, "the number of classes")


def choose(
    scores: Float[Tensor, "*batch n"], target: Int[Tensor, "*batch"], m: int | None = None, *, sort: bool = True
) -> tuple[Int[Tensor, "*batch m"], Int[Tensor, "*batch"]]:
    """The classes of the m best scores of every row in descending order, and the target's place among them. Where the target is
    not one of them it takes the last place.

    Args:
        scores: class scores.
        target: class indices.
        m: how many to keep; None keeps all.
        sort: with ``m=None``, False leaves the classes in the order they came in.

    Example:
        >>> choose(torch.tensor([[0.1, 0.9, 0.5, 0.7]]), torch.tensor([0]), m=2)
        (tensor([[1, 0]]), tensor([1]))
    """
    scores = scores.detach()
    n = scores.shape[-1]
    m = n if m is None else checks.count("m", m, 1, n, "the number of classes")
    if m == n and not sort:
        return torch.arange(n, device=scores.device).expand(scores.shape), target
    if m == n:
        classes = _integers(scores).sort(dim=-1, descending=True, stable=True).indices
        return classes, (classes == target[..., None]).int().argmax(-1)
    return with_target(best(scores, m), target)


def with_target(
    classes: Int[Tensor, "*batch m"], target: Int[Tensor, "*batch"]
) -> tuple[Int[Tensor, "*batch m"], Int[Tensor, "*batch"]]:
    """Where the target is missing, the last place is its; the classes after that, and the target's place."""
    # Not the maximum of booleans: inductor writes C++ for it that does not compile.
    found, position = (classes == target[..., None]).int().max(-1)
    position = torch.where(found > 0, position, classes.shape[-1] - 1)
    return classes.scatter(-1, position[..., None], target[..., None]), position


def best(scores: Tensor, m: int, in_order: bool = True) -> Tensor:
    """The classes of the m best scores: ``scores.topk(m).indices``, for less.

    ``topk`` takes a row apart element by element; a maximum is vectorised. The m best lie in the m groups whose maxima are
    the m largest, so find these groups (in the same way), then the best in them. Groups are strided, since a maximum over
    neighbours does not vectorise. Other devices than the CPU have a parallel topk. The native kernels have a faster way yet.
    """
    if (classes := kernels.best(scores, m)) is not None:
        return classes
    n, group = scores.shape[-1], 5
    groups = n // group
    if scores.device.type != "cpu":
        return scores.topk(m, dim=-1, sorted=in_order).indices
    if n < 10 * m or groups < 2 * m:
        return _integers(scores).topk(m, dim=-1, sorted=in_order).indices
    grouped = groups * group
    maxima = scores[..., :grouped].reshape(*scores.shape[:-1], group, groups).amax(-2)
    chosen = best(maxima, m, in_order=False)
    members = torch.arange(0, grouped, groups, device=scores.device)
    classes = (chosen[..., None, :] + members[:, None]).flatten(-2)
    if grouped < n:
        rest = torch.arange(grouped, n, device=scores.device).expand(*scores.shape[:-1], n - grouped)
        classes = torch.cat([classes, rest], -1)
    chosen = _integers(scores.gather(-1, classes)).topk(m, dim=-1, sorted=in_order).indices
    return classes.gather(-1, chosen)


def _integers(scores: Tensor) -> Tensor:
    """Integers in the order of the scores, NaN with +inf: ``topk`` and ``sort`` take two thirds of the time for them.

    The bits of a float are its sign and, read as an integer, a number that grows with its size: here with that sign.
    """
    # Inside vmap bits cannot be viewed as another type: torch has no rule for that before 2.13. Nor in torch.jit.trace.
    if not scores.dtype.is_floating_point or _compat.is_transformed(scores) or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return scores
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[scores.dtype.itemsize]
    bits = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).view(dtype)
    negative = bits >> (8 * dtype.itemsize - 1)  # -1 or 0
    return ((bits & torch.iinfo(dtype).max) ^ negative) - negative


def select_for_probabilities(
    scores: Float[Tensor, "*batch n"],
    probabilities: Float[Tensor, "*batch n"],
    m: int | None = None,
    *,
    sort: bool = True,
) -> tuple[Float[Tensor, "*batch m"], Int[Tensor, "*batch m"]]:
    """One candidate set for a row whose target is a distribution over the classes, and the classes in it.

    The classes of highest probability (those above zero, at most half of m; of equals the better scored), then the best
    scores. In descending order of the scores. m and sort as in :func:`choose`.
    """
    n = scores.shape[-1]
    detached = scores.detach()
    if m is None or m == n:
        classes = torch.arange(n, device=scores.device).expand(scores.shape)
    else:
        most = max(1, m // 2)
        least = probabilities.topk(most, dim=-1).values[..., -1:]
        preference = detached.masked_fill(probabilities < least, -torch.inf).masked_fill(probabilities > least, torch.inf)
        named = preference.topk(most, dim=-1).indices
        forced = torch.where(probabilities.gather(-1, named) > 0, torch.inf, detached.gather(-1, named))
        classes = detached.scatter(-1, named, forced).topk(m, dim=-1).indices
        sort = True
    if sort:
        order = detached.gather(-1, classes).sort(dim=-1, descending=True, stable=True).indices
        classes = classes.gather(-1, order)
    return scores.gather(-1, classes), classes


def others(scores: Shaped[Tensor, "*batch m"], position: Int[Tensor, "*batch"]) -> Shaped[Tensor, "*batch m-1"]:
    """The scores without the one at ``position``, in the same order."""
    place = torch.arange(scores.shape[-1] - 1, device=scores.device)
    return scores.gather(-1, place + (place >= position[..., None]))


def at(scores: Shaped[Tensor, "*batch m"], position: Int[Tensor, "*batch"]) -> Shaped[Tensor, "*batch"]:
    """The score at ``position``."""
    return scores.gather(-1, position[..., None]).squeeze(-1)


def instead_of_padding(position: Int[Tensor, "*batch m"], real: Bool[Tensor, "*batch m"]) -> Int[Tensor, "*batch m"]:
    """Places of targets, with the first real one standing in for padding; nothing may depend on what is computed there."""
    return torch.where(real, position, real.int().argmax(-1, keepdim=True))


def real_mask(scores: Tensor) -> Tensor | None:
    """Which classes are not padding (-inf); None where it can be seen that none is padded."""
    scores = scores.detach()
    if checks.readable(scores) and (scores.numel() == 0 or scores.amin().item() > -torch.inf):
        return None
    real = scores != -torch.inf
    return None if checks.readable(real) and bool(real.all()) else real  # NaN has no minimum
