"""Losses and metrics with the classes sharded over processes: each holds the scores of some of the classes.

Every process picks the m best of its own scores; one all-gather shares them, and each process then continues alone as if
it had seen all classes: (rows x m) numbers from each process, whatever the number of classes. The softmax part needs two
numbers more for each row, the best score and the sum of exponentials. Before it, a second small all-gather, for which the host
waits, exchanges the sizes of the slices and checks that all arguments agree; with ``slices`` given, it is left out.

**Gradients.** Every process computes the same loss and calls ``backward`` on its own copy. What arrives at
``local_scores`` is this process's slice of the gradient that one process with all classes would get: not multiplied or
divided by the number of processes. Everybody knows the loss as a function of all that was gathered, so each takes the
gradient of its own part and the backward pass communicates nothing. What the scores were computed from follows the rules
of tensor parallelism: if every process multiplies the same features with its own rows of the weights, each gets its own
part of the gradient of the features, and the parts are to be added up (a column-wise parallel DTensor layer does so).
Parameters of the loss itself, such as a learned temperature, get the whole gradient in every process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from anyk import candidates, checks, metrics
from anyk.checks import working_dtype
from anyk.conventions import Conventions, Counted
from anyk.docstrings import documented
from anyk.losses import Spec, TopKLoss, check_is_topk_loss, row_losses
from anyk.rows import Rows, smoothed_rows

__all__ = ["Sharded", "topk_accuracy", "topk_hits"]


@documented
class Sharded(nn.Module):
    """A loss of scores whose classes are sharded over the processes of a group.

    The loss is that of ``torch.cat`` of the slices in the order of the ranks, at least float32, the same in every process;
    ``local_scores.grad`` is this process's slice of its gradient (see :mod:`anyk.parallel`). All processes must call it, with
    the same arguments. Only first derivatives are supported. With ``m=None`` every process gets all scores.

    Ties: with ``m=None``, by class index as in one process. Which of equal scores at the edge of the m best are taken is
    unspecified, as in ``torch.topk``; the loss is the same, and the gradient goes to those taken.

    Args:
        loss: a :class:`anyk.TopKLoss`. Its ``weight`` and a P_K by class are those of all classes. A
            :class:`anyk.TopKCrossEntropyLoss` must have a ``label_smoothing`` below 1.
        {group_slices}

    Shape:
        local_scores (B, n_local), or a DTensor; target (B,), indices among all classes; example_p_k (B, k). ``forward`` has
        the details.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> criterion = anyk.parallel.Sharded(anyk.TopKErrorLoss({1: 0.5, 2: 0.5}))
        >>> local_scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> criterion(local_scores, torch.tensor([1, 3]))
        tensor(0.5667)
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, loss: TopKLoss, *, group: dist.ProcessGroup | None = None, slices: Sequence[int] | None = None) -> None:
        super().__init__()
        check_is_topk_loss(loss)
        self.criterion, self.group, self.slices = loss, group, slices

    @documented
    def forward(
        self,
        local_scores: Float[Tensor, "batch n_local"],
        target: Int[Tensor, " batch"],
        *,
        example_p_k: Float[Tensor, "batch k"] | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            {sharded_scores_target}
            example_p_k: (B, k), one distribution for each example, instead of that of the loss; comes like the target.
        """
        spec, conventions = self.criterion.arguments()
        shard = _Shard.of(local_scores, target, self.group)
        if example_p_k is not None:
            example_p_k, spec = shard.local("example_p_k", example_p_k), spec.for_examples()
        if conventions.label_smoothing == 1 and not spec.added_smoothing(1):
            raise ValueError("label_smoothing: expected a number below 1, got 1")
        # The settings are compared only where the slices are asked for: to sum the numbers up waits for the device.
        settings = _settings(spec, conventions, example_p_k) if self.slices is None else ""
        slices = _Slices.of(shard, self.slices, settings)
        scores, n = shard.scores, slices.number
        target = checks.class_indices(shard.target, scores.shape[:1], n, conventions.ignore_index)
        p_k, k, m = spec.fit(scores, n, scores.shape[:1], example_p_k)
        if spec.is_cross_entropy(k):
            m = k = 1  # nothing is ranked
        rows = _rows(spec, scores, target, conventions, slices, None if m == n else m, k)
        return shard.reduce(rows.total(row_losses(spec, rows, k, p_k)), rows.counted)


def _settings(spec: Spec, conventions: Conventions, example_p_k: Tensor | None) -> str:
    """What all processes must have in common: in words, and sums of the numbers."""
    own = {name: value for name, value in vars(spec).items() if name != "p_k"}
    shared = (conventions.reduction, conventions.ignore_index, conventions.label_smoothing)
    p_k = None if spec.p_k is None else spec.p_k.values
    return f"{own} {shared} {[_checksum(numbers) for numbers in (p_k, conventions.weight, example_p_k)]}"


def _checksum(numbers: Tensor | None) -> float | None:
    if numbers is None:
        return None
    place = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    return float((numbers.detach().flatten().double() * place).sum())


def _rows(spec: Spec, scores: Tensor, target: Tensor, conventions: Conventions, slices: _Slices, m: int | None, k: int) -> Rows:
    """What the loss may depend on, from what all processes tell."""
    weight, amount = conventions.class_weights(slices.number, scores), conventions.label_smoothing
    target, counted = conventions.count(target, weight, scores)
    scores = counted.only(scores)
    seen = _exchange(scores, target, slices, m, softmax=spec.uses_softmax or amount > 0, smoothing=amount > 0, weight=weight)
    # Only where everything was sent it is here in the order of the classes.
    kept, position = candidates.choose(seen.scores, seen.target_place, m, sort=spec.sorts or m is not None)
    chosen = seen.scores.gather(-1, kept)
    if not amount:
        cross_entropy = None
        if spec.uses_softmax:
            cross_entropy = seen.cross_entropy(chosen.gather(-1, position[:, None])).squeeze(-1)
        return Rows.of(chosen, position, target, cross_entropy, counted, k)
    assert seen.classes is not None
    assert seen.number is not None
    assert seen.mean is not None
    classes = seen.classes.gather(-1, kept)
    uniform = (chosen != -torch.inf).to(chosen.dtype) / seen.number[:, None]
    if weight is not None:
        uniform = uniform * weight[classes]
    every = seen.cross_entropy(chosen)
    return smoothed_rows(chosen, classes, position, target, counted, every, uniform, seen.mean, spec, k, weight)


@documented
def topk_hits(
    local_scores: Float[Tensor, "batch n_local"],
    target: Int[Tensor, " batch"],
    ks: Iterable[int] = (1, 5),
    *,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    slices: Sequence[int] | None = None,
) -> dict[int, Tensor]:
    """:func:`anyk.topk_hits` of sharded classes: every process counts its classes that are not behind the target.

    Args:
        {sharded_scores_target}
        {ks}
        {ignore_index}
        {group_slices}

    Returns:
        ``{k: count}``, the same in every process.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> scores = torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]])
        >>> anyk.parallel.topk_hits(scores, torch.tensor([1, 2]), ks=(1, 2))
        {1: tensor(0), 2: tensor(1)}
        >>> torch.distributed.destroy_process_group()
    """
    ks = metrics.checked_ks(ks)
    shard = _Shard.of(local_scores, target, group)
    sharded = _Slices.of(shard, slices)
    scores = shard.scores.detach()
    target = checks.class_indices(shard.target, scores.shape[:1], sharded.number, ignore_index)
    counted = target != ignore_index
    target = target * counted
    mine, local_target = sharded.local(target)
    own = scores.new_zeros(len(scores), dtype=working_dtype(scores))
    if scores.shape[-1]:
        own = torch.where(mine, candidates.at(scores, local_target), own)
    of_target = _all_gather(own, shard.group).gather(0, sharded.owner(target)[None]).squeeze(0)
    # As in metrics.target_ranks: "not smaller" counts NaN and the target itself.
    ranks = (~(scores < of_target[:, None])).sum(-1)
    dist.all_reduce(ranks, group=shard.group)
    hits = torch.stack([((ranks <= k) & counted).sum() for k in ks]) if ks else ranks.new_zeros(0)
    if shard.batch_group is not None:
        dist.all_reduce(hits, group=shard.batch_group)
    return dict(zip(ks, hits.unbind(), strict=True))


@documented
def topk_accuracy(
    local_scores: Float[Tensor, "batch n_local"],
    target: Int[Tensor, " batch"],
    ks: Iterable[int] = (1, 5),
    *,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    slices: Sequence[int] | None = None,
) -> dict[int, Tensor]:
    """:func:`anyk.topk_accuracy` of sharded classes.

    Args:
        {sharded_scores_target}
        {ks}
        {ignore_index}
        {group_slices}

    Returns:
        ``{k: fraction}``, the same in every process; NaN for an empty batch.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> scores = torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]])
        >>> anyk.parallel.topk_accuracy(scores, torch.tensor([1, 2]), ks=(1, 2))
        {1: tensor(0.), 2: tensor(0.5000)}
        >>> torch.distributed.destroy_process_group()
    """
    wanted = [*metrics.checked_ks(ks), metrics.EVERY]
    *hits, every = topk_hits(local_scores, target, wanted, ignore_index=ignore_index, group=group, slices=slices).items()
    return {k: count / every[1] for k, count in hits}


# Who holds what ----------------------------------------------------------------------------------------------------------


class _Shard(NamedTuple):
    """This process's part, out of its DTensor if it came in one."""

    scores: Float[Tensor, "batch n_local"]
    target: Tensor
    group: dist.ProcessGroup | None
    """the processes that have the same rows and other classes"""
    place: int
    """the place of this slice among theirs"""
    batch_group: dist.ProcessGroup | None = None
    """the processes that have the same classes and other rows, if any"""
    whole: Any = None
    """the DTensor"""
    batch_placements: tuple[Any, ...] = ()
    """how its rows are placed"""

    @classmethod
    def of(cls, local_scores: Tensor, target: Tensor, group: dist.ProcessGroup | None) -> _Shard:
        local_scores, target = checks.floating("local_scores", local_scores), checks.tensor("target", target)
        if local_scores.ndim != 2:
            raise ValueError(f"local_scores: expected shape (B, n_local), got {tuple(local_scores.shape)}")
        if target.dtype.is_floating_point:
            raise TypeError(
                f"target: expected class indices of an integer dtype, got dtype {target.dtype}; "
                "class probabilities are not supported with sharded classes"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("group: expected an initialised process group; call torch.distributed.init_process_group first")
        # Not isinstance: importing DTensor takes seconds.
        if hasattr(local_scores, "device_mesh"):
            return cls._of_dtensor(local_scores, target, group)
        if hasattr(target, "device_mesh"):
            raise TypeError("target: expected a torch.Tensor to go with local_scores, got a DTensor")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("group: expected one that this process is a member of")
        return cls(local_scores, target, group, rank)

    @classmethod
    def _of_dtensor(cls, whole: Any, target: Tensor, group: dist.ProcessGroup | None) -> _Shard:
        from torch.distributed.tensor import Replicate, Shard

        if group is not None:
            raise ValueError("group: expected None with a DTensor, whose mesh has the groups")
        mesh = whole.device_mesh
        sharded = [placement.dim % 2 if type(placement) is Shard else None for placement in whole.placements]
        known = all(type(placement) in (Shard, Replicate) for placement in whole.placements)
        if not known or sharded.count(1) != 1 or sharded.count(0) > 1:
            raise ValueError(
                "local_scores: expected a DTensor with Shard(1) on one dimension of the mesh, Shard(0) on at most one, and "
                f"Replicate() on the others, got {whole.placements}"
            )
        batch_placements = tuple(Shard(0) if dim == 0 else Replicate() for dim in sharded)
        classes = sharded.index(1)
        shard = cls(
            scores=whole.to_local(),
            target=target,
            group=mesh.get_group(classes),
            place=mesh.get_local_rank(classes),
            batch_group=mesh.get_group(sharded.index(0)) if 0 in sharded else None,
            whole=whole,
            batch_placements=batch_placements,
        )
        return shard._replace(target=shard.local("target", target))

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """This process's rows of a tensor that has something for each."""
        if not hasattr(tensor, "device_mesh"):
            return tensor
        if self.whole is None:
            raise TypeError(f"{name}: expected a torch.Tensor to go with local_scores, got a DTensor")
        return tensor.redistribute(self.whole.device_mesh, self.batch_placements).to_local()  # type: ignore[attr-defined]

    def reduce(self, each: Tensor, counted: Counted) -> Tensor:
        """The losses of the rows as one loss; in a DTensor, over everybody's rows."""
        reduction = counted.conventions.reduction
        if self.batch_group is not None and reduction != "none":
            counts = each.new_tensor(len(each)) if counted.weights is None else counted.weights.sum()
            sums = _gather(torch.stack([each.sum(), counts]), self.batch_group).sum(0)
            each, counted = sums[:1], counted._replace(valid=None, weights=sums[1:])
        loss = counted.reduce(each)
        if self.whole is None:
            return loss
        from torch.distributed.tensor import DTensor, Replicate

        mesh = self.whole.device_mesh
        if reduction != "none":
            return DTensor.from_local(loss, mesh, [Replicate()] * mesh.ndim, run_check=False)
        size = torch.Size([len(self.whole)])
        return DTensor.from_local(loss, mesh, self.batch_placements, run_check=False, shape=size, stride=(1,))


class _Slices(NamedTuple):
    """Which process holds which classes."""

    group: dist.ProcessGroup | None
    place: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shard: _Shard, sizes: Sequence[int] | None, settings: str = "") -> _Slices:
        """As the caller says; or, with None, as all processes say, if they agree in their settings."""
        if sizes is None:
            return cls._asked(shard, settings)
        world, own = dist.get_world_size(shard.group), shard.scores.shape[1]
        if not isinstance(sizes, Sequence):
            raise TypeError(f"slices: expected a sequence of {world} sizes, got {sizes!r}")
        if len(sizes) != world or sizes[shard.place] != own:
            raise ValueError(f"slices: expected {world} sizes, with {own} for rank {shard.place}, got {list(sizes)}")
        return cls(shard.group, shard.place, tuple(sizes))

    @classmethod
    def _asked(cls, shard: _Shard, settings: str) -> _Slices:
        """Asks all processes for the size of their slice, and whether they agree in everything else."""
        scores, target = shard.scores, shard.target.detach()
        kind = zlib.crc32(f"{scores.dtype} {target.shape} {settings}".encode())
        place = torch.arange(1, target.numel() + 1, device=target.device)
        of_targets = (target.long().flatten() * place * place).sum().to(scores.device)  # may wrap around
        own = torch.tensor([scores.shape[1], shard.place, len(scores), kind], device=scores.device)
        told = _all_gather(torch.cat([own, of_targets[None]]), shard.group).t().tolist()
        sizes, places, rows, kinds, targets = told
        if places != list(range(len(places))):
            raise ValueError(f"local_scores: expected ranks in the order of the slices, got the slices {places}")
        if len(set(rows)) > 1:
            raise ValueError(f"local_scores: expected the same number of rows in every process, got {rows}")
        if len(set(kinds)) > 1:
            raise ValueError("m, top1, …: expected the same settings, dtype and number of targets in every process")
        if len(set(targets)) > 1:
            raise ValueError("target: expected the same targets in every process")
        if sum(sizes) < 1:
            raise ValueError("local_scores: expected at least one class in some process, got none")
        return cls(shard.group, shard.place, tuple(sizes))

    @property
    def number(self) -> int:
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        return _starts(self.sizes)

    def widths(self, m: int | None) -> list[int]:
        """How many candidates each process sends."""
        return [size if m is None else min(m, size) for size in self.sizes]

    def owner(self, target: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        ends = torch.tensor(list(accumulate(self.sizes)), device=target.device)
        return torch.searchsorted(ends, target, right=True)

    def local(self, target: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Which targets are among this process's classes, and their indices there (some index for the others)."""
        local = target - self.starts[self.place]
        inside = local.clamp(0, max(0, self.sizes[self.place] - 1))
        return (local == inside) & (self.sizes[self.place] > 0), inside


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate((0, *sizes[:-1])))


# What they tell each other -----------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """What every process knows of all classes: the local candidates of all, slice after slice, and sums over the classes."""

    scores: Float[Tensor, "batch gathered"]
    target_place: Int[Tensor, " batch"]
    """where the target stands among them"""
    best: Float[Tensor, "batch 1"] | None
    """the best score of all"""
    log_sum: Float[Tensor, "batch 1"] | None
    """logarithm of the sum of exponentials of all scores, relative to it"""
    classes: Int[Tensor, "batch gathered"] | None
    """those of the scores, if labels are smoothed"""
    number: Float[Tensor, " batch"] | None
    """of classes that are not padding"""
    mean: Float[Tensor, " batch"] | None
    """of the classes' weighted cross-entropies"""

    def cross_entropy(self, scores: Float[Tensor, "batch some"]) -> Float[Tensor, "batch some"]:
        """Softmax cross-entropy over all classes for targets of these scores."""
        assert self.log_sum is not None
        assert self.best is not None
        return self.log_sum + (self.best - scores)


def _exchange(
    scores: Tensor,
    target: Tensor,
    slices: _Slices,
    m: int | None,
    *,
    softmax: bool,
    smoothing: bool,
    weight: Tensor | None,
) -> _Seen:
    """The one all-gather: local candidates, for the softmax the best score and the sum of exponentials, for smoothing the
    candidates' classes, the number of classes, and the sums of their weights and weighted scores."""
    widths = slices.widths(m)
    width = max(widths)
    local = _local_candidates(scores, target, slices, widths[slices.place])
    columns = []
    if softmax:
        kept, top, total = _summary(scores, local)
        columns = [top[:, None], total[:, None]]
        if smoothing:
            columns += [
                _sums(scores, _finite(top), slices, weight),
                _as_floats(local + slices.starts[slices.place], kept, width),
            ]
    else:
        kept = scores.gather(-1, local).to(working_dtype(scores))
    kept = functional.pad(kept, (0, width - kept.shape[-1]), value=-torch.inf)
    blocks = _gather(torch.cat([kept, *columns], -1), slices.group)
    gathered = _joined(blocks, widths)
    # In a slice that is sent as it is, the target has its place; else it is the last (see _local_candidates).
    last = [start + own - 1 for start, own in zip(_starts(widths), widths, strict=True)]
    shift = [at - start for at, start in zip(_starts(widths), slices.starts, strict=True)]
    whole = [own == size for own, size in zip(widths, slices.sizes, strict=True)]
    owner = slices.owner(target)
    last_place, shifts, as_it_is = (torch.tensor(values, device=target.device)[owner] for values in (last, shift, whole))
    place = torch.where(as_it_is, target + shifts, last_place)
    if not softmax:
        return _Seen(gathered, place, None, None, None, None, None)
    tops = blocks[..., width].detach()
    best = tops.amax(0)
    best = torch.where(best == -torch.inf, 0, best)
    log_sum = (blocks[..., width + 1] * (tops - best).exp()).sum(0).log()
    seen = _Seen(gathered, place, best[:, None], log_sum[:, None], None, None, None)
    if not smoothing:
        return seen
    number, total_weight, behind = blocks[..., width + 2 : width + 5].unbind(-1)
    far = torch.where(total_weight != 0, seen.cross_entropy(tops.t()).t(), 0)  # a slice of padding has no best
    number = number.sum(0)
    classes = _joined(_as_integers(blocks[..., width + 5 :]), widths)
    return seen._replace(classes=classes, number=number, mean=(total_weight * far - behind).sum(0) / number)


def _sums(scores: Tensor, top: Tensor, slices: _Slices, weight: Tensor | None) -> Float[Tensor, "batch 3"]:
    """Of this process's classes that are not padding: how many, the sum of their weights w, and of w (score - best)."""
    start, size = slices.starts[slices.place], slices.sizes[slices.place]
    real = scores.detach() != -torch.inf
    weights = torch.where(real, top.new_ones(size) if weight is None else weight[start : start + size], 0)
    behind = torch.where(weights != 0, scores - top[:, None], 0)
    return torch.stack([real.sum(-1).to(top.dtype), weights.sum(-1), (weights * behind).sum(-1)], -1)


def _as_floats(classes: Int[Tensor, "batch own"], like: Tensor, width: int) -> Float[Tensor, "batch width"]:
    """The bits of integers in the place of floats, so that they travel with these."""
    integers = functional.pad(classes, (0, width - classes.shape[-1]))
    return integers.to(torch.int64 if like.dtype == torch.float64 else torch.int32).view(like.dtype)


def _as_integers(bits: Tensor) -> Int[Tensor, "*shape"]:
    integers = bits.detach().contiguous().view(torch.int64 if bits.dtype == torch.float64 else torch.int32)
    return integers.long()


def _local_candidates(scores: Tensor, target: Tensor, slices: _Slices, m: int) -> Int[Tensor, "batch m"]:
    """The m best of this process's classes, in it the target, if it is one of them: on the last place.

    So everybody knows where the target is without being told. All classes are left in their order.
    """
    if m == scores.shape[-1]:
        return torch.arange(m, device=scores.device).expand(scores.shape)
    best = candidates.best(scores.detach(), m)
    mine, local_target = slices.local(target)
    found, place = (best == local_target[:, None]).int().max(-1)
    place = torch.where(found > 0, place, m - 1)
    with_target = torch.cat([best.scatter(-1, place[:, None], best[:, -1:])[:, :-1], local_target[:, None]], -1)
    return torch.where(mine[:, None], with_target, best)


class _Summary(torch.autograd.Function):
    """Scores of the given classes, the best score, and the sum of exponentials relative to it, with one gradient for all.

    The best score is a constant to whoever differentiates: it cancels in the log-sum-exp.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = working_dtype(rows)
        top = rows.amax(-1).to(dtype) if rows.shape[-1] else rows.new_full(rows.shape[:1], -torch.inf, dtype=dtype)
        exponentials = (rows - _finite(top)[:, None]).exp_()
        ctx.save_for_backward(exponentials, classes)
        ctx.dtype = rows.dtype
        ctx.mark_non_differentiable(top)
        return rows.gather(-1, classes).to(dtype), top, exponentials.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_scores: Tensor, _: Tensor, of_total: Tensor) -> tuple[Tensor, None]:
        exponentials, classes = ctx.saved_tensors
        gradient = exponentials * of_total[:, None]
        gradient.scatter_add_(-1, classes, of_scores)
        return gradient.to(ctx.dtype), None


_summary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _Summary.apply


class _Gather(torch.autograd.Function):
    """The blocks of all processes, (world, …). The gradient takes this process's block and leaves the others to theirs.

    A second derivative would need what the others know.
    """

    @staticmethod
    def forward(ctx: Any, block: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.rank = dist.get_rank(group)
        return _all_gather(block, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_blocks: Tensor) -> tuple[Tensor, None]:
        return of_blocks[ctx.rank], None


_gather: Callable[[Tensor, dist.ProcessGroup | None], Tensor] = _Gather.apply


def _all_gather(block: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    blocks = block.new_empty(dist.get_world_size(group), *block.shape)
    dist.all_gather(list(blocks.unbind()), block.contiguous(), group=group)
    return blocks


def _joined(blocks: Tensor, widths: Sequence[int]) -> Shaped[Tensor, "batch gathered"]:
    """The blocks side by side, without what fills them up."""
    return torch.cat([block[:, :width] for block, width in zip(blocks, widths, strict=True)], -1)


def _finite(top: Tensor) -> Tensor:
    """0 for slices with nothing but padding."""
    return torch.where(top == -torch.inf, 0, top)
