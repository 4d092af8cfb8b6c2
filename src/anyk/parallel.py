"""Losses and metrics with the classes sharded over processes: each holds the scores of some of the classes.

Every process picks the m best of its own scores; one all-gather shares them, and each process then continues alone as if
it had seen all classes: m numbers for each row from each process, whatever the number of classes, and two more for the
softmax. Before it, a small all-gather, for which the host waits, exchanges the sizes of the slices and checks that all
arguments agree; with ``slices`` given, it is left out.

**Gradients.** Every process computes the same loss and calls ``backward`` on its own copy. What arrives at
``local_scores`` is this process's slice of the gradient that one process with all classes would get: not multiplied or
divided by the number of processes. Everybody knows the loss as a function of all that was gathered, so each takes the
gradient of its own part and the backward pass communicates nothing. If every process multiplies the same features with its
own rows of the weights, each gets its own part of the gradient of the features, and the parts are to be added up (a
column-wise parallel DTensor layer does so). Parameters of the loss itself get the whole gradient in every process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from anyk import candidates, checks, metrics
from anyk.checks import working_dtype
from anyk.cross_entropy import Rows
from anyk.losses import Loss, check_is_loss, loss_of_candidates

__all__ = ["Sharded", "topk_accuracy", "topk_hits"]


class Sharded(nn.Module):
    """A loss of scores whose classes are sharded over the processes of a group.

    The loss is that of ``torch.cat`` of the slices in the order of the ranks, at least float32, the same in every process;
    ``local_scores.grad`` is this process's slice of its gradient (see :mod:`anyk.parallel`). All processes must call it, with
    the same arguments. Only first derivatives are supported. With ``m=None`` every process gets all scores.

    Which of equal scores at the edge of the m best are taken is unspecified, as in ``torch.topk``; the loss is the same.

    Args:
        loss: a :class:`TopKCrossEntropyLoss`, :class:`TopKErrorLoss` or :class:`GeneralizedCrossEntropyLoss`, whose ``weight``
            and P_K by class are those of all classes.
        group: the processes that share the classes; None: all, or those of the DTensor's mesh.
        slices: how many classes each process has, by rank; None: the processes tell each other, and check that they agree.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> criterion = anyk.parallel.Sharded(anyk.TopKErrorLoss({1: 0.5, 2: 0.5}))
        >>> local_scores = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.5, 1.0, 2.0]])
        >>> criterion(local_scores, torch.tensor([1, 3]))
        tensor(0.5667)
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, loss: Loss, *, group: dist.ProcessGroup | None = None, slices: Sequence[int] | None = None) -> None:
        super().__init__()
        check_is_loss(loss)
        self.criterion, self.group, self.slices = loss, group, slices

    def forward(
        self,
        local_scores: Float[Tensor, "batch n_local"],
        target: Int[Tensor, " batch"],
        *,
        example_p_k: Float[Tensor, "batch k"] | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            local_scores: (B, n_local), this process's slice of the scores, which may be empty; or a ``DTensor`` with
                ``Shard(1)`` on one dimension of its mesh, ``Shard(0)`` on at most one and ``Replicate()`` on the others.
            target: (B,), indices among all classes, the same in every process; of a sharded batch a DTensor, or the own part.
            example_p_k: (B, k), one distribution for each example, which takes the place of ``p_k``; comes like the target.
        """
        row_loss, options = self.criterion.row_loss, self.criterion.options
        row_loss.check(options)
        shard = _Shard.of(local_scores, target, self.group)
        if example_p_k is not None:
            example_p_k = shard.local("example_p_k", example_p_k)
        numbers = [_checksum(each) for each in (self.criterion.p_k, options.weight, example_p_k)] if self.slices is None else []
        shard = shard.with_sizes(self.slices, f"{row_loss} {options._replace(weight=None)} {numbers}")
        n = sum(shard.sizes)
        target = checks.class_indices(shard.target, shard.scores.shape[:1], n, options.ignore_index)
        p_k = self.criterion.distribution(lambda: target.shape, example_p_k)
        k, m = row_loss.sizes(p_k, n)
        weight = options.class_weights(n, shard.scores)
        ignored = target == options.ignore_index
        target, scores = target.masked_fill(ignored, 0), shard.scores
        if not checks.readable(ignored) or ignored.any():
            scores = scores.masked_fill(ignored[:, None], 0)
        if row_loss.temperature != 1:
            scores = scores.to(working_dtype(scores)) / row_loss.temperature
        gathered, own, cross_entropy, everywhere = _exchange(
            scores, target, shard, m, row_loss.softmax == "all", options.label_smoothing > 0, weight
        )
        if m == n:
            kept, position = candidates.keep(gathered, target, n, descending=row_loss.descending)
        else:
            kept, position = candidates.keep(torch.cat([own[:, None], gathered], -1), torch.zeros_like(target), max(m, 1))
        if m > 0:
            candidates.check_padding(kept, position, k)
        rows = Rows(kept, target, ignored, None, None, target.shape, options)
        spread = shard.batch_group is not None and options.reduction != "none"
        rows = rows._replace(options=options._replace(reduction="sum")) if spread else rows
        loss = loss_of_candidates(row_loss, rows, position, cross_entropy, everywhere, p_k)
        if spread:
            counts = torch.ones_like(own) if rows.weights is None else rows.weights
            loss, count = _gather(torch.stack([loss, counts.masked_fill(ignored, 0).sum()]), shard.batch_group).sum(0)
            loss = loss if options.reduction == "sum" else loss / count
        return shard.as_dtensor(loss)


def topk_hits(
    local_scores: Float[Tensor, "batch n_local"],
    target: Int[Tensor, " batch"],
    ks: Iterable[int] | int = (1, 5),
    *,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    slices: Sequence[int] | None = None,
) -> dict[int, Tensor]:
    """:func:`anyk.metrics.topk_hits` of sharded classes, the same in every process.

    Args:
        local_scores: (B, n_local), this process's slice of the scores, which may be empty; or a ``DTensor`` with ``Shard(1)``
            on one dimension of its mesh, ``Shard(0)`` on at most one and ``Replicate()`` on the others.
        target: (B,), indices among all classes, the same in every process; of a sharded batch a DTensor, or the own part.
        ks: one k or several; a k above the number of classes counts every target.
        ignore_index: a target value that is ignored.
        group: the processes that share the classes; None: all, or those of the DTensor's mesh.
        slices: how many classes each process has, by rank; None: the processes tell each other, and check that they agree.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> scores = torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]])
        >>> anyk.parallel.topk_hits(scores, torch.tensor([1, 2]), ks=(1, 2))
        {1: tensor(0), 2: tensor(1)}
        >>> torch.distributed.destroy_process_group()
    """
    return _hits(local_scores, target, ks, ignore_index, group, slices)[0]


def topk_accuracy(
    local_scores: Float[Tensor, "batch n_local"],
    target: Int[Tensor, " batch"],
    ks: Iterable[int] | int = (1, 5),
    *,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    slices: Sequence[int] | None = None,
) -> dict[int, Tensor]:
    """:func:`anyk.topk_accuracy` of sharded classes, the same in every process.

    Args:
        local_scores: (B, n_local), this process's slice of the scores, which may be empty; or a ``DTensor`` with ``Shard(1)``
            on one dimension of its mesh, ``Shard(0)`` on at most one and ``Replicate()`` on the others.
        target: (B,), indices among all classes, the same in every process; of a sharded batch a DTensor, or the own part.
        ks: one k or several; a k above the number of classes counts every target.
        ignore_index: a target value that is ignored.
        group: the processes that share the classes; None: all, or those of the DTensor's mesh.
        slices: how many classes each process has, by rank; None: the processes tell each other, and check that they agree.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> scores = torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.3, 0.2]])
        >>> anyk.parallel.topk_accuracy(scores, torch.tensor([1, 2]), ks=(1, 2))
        {1: tensor(0.), 2: tensor(0.5000)}
        >>> torch.distributed.destroy_process_group()
    """
    hits, counted = _hits(local_scores, target, ks, ignore_index, group, slices)
    return {k: count / counted for k, count in hits.items()}


def _hits(
    local_scores: Tensor,
    target: Tensor,
    ks: Iterable[int] | int,
    ignore_index: int,
    group: dist.ProcessGroup | None,
    sizes: Sequence[int] | None,
) -> tuple[dict[int, Tensor], Tensor]:
    """How many targets are among the first k, for each k, and how many count."""
    ks = metrics.as_list(ks)
    shard = _Shard.of(local_scores, target, group).with_sizes(sizes)
    scores = shard.scores.detach()
    target = checks.class_indices(shard.target, scores.shape[:1], sum(shard.sizes), ignore_index)
    counted = target != ignore_index
    scores, mine, place = shard.find(scores, target * counted)
    own = torch.where(mine, candidates.at(scores, place).to(working_dtype(scores)), 0)
    dist.all_reduce(own, group=shard.group)
    # As in metrics.target_ranks: "not smaller" counts NaN and the target itself.
    ranks = (~(shard.scores.detach() < own[:, None])).sum(-1)
    dist.all_reduce(ranks, group=shard.group)
    hits = torch.stack([*(((ranks <= k) & counted).sum() for k in ks), counted.sum()])
    if shard.batch_group is not None:
        dist.all_reduce(hits, group=shard.batch_group)
    return dict(zip(ks, hits[:-1], strict=True)), hits[-1]


class _Shard(NamedTuple):
    """This process's part, out of its DTensor if it came in one."""

    scores: Float[Tensor, "batch n_local"]
    target: Tensor
    group: dist.ProcessGroup | None
    """the processes that have the same rows and other classes"""
    rank: int
    """the place of this slice among theirs"""
    batch_group: dist.ProcessGroup | None = None
    """the processes that have the same classes and other rows, if any"""
    whole: Any = None
    """the DTensor"""
    placements: tuple[Any, ...] = ()
    """of its rows"""
    sizes: tuple[int, ...] = ()
    """of the slices of all processes of the group"""

    @classmethod
    def of(cls, local_scores: Tensor, target: Tensor, group: dist.ProcessGroup | None) -> _Shard:
        local_scores, target = checks.floating("local_scores", local_scores), checks.tensor("target", target)
        if local_scores.ndim != 2:
            raise ValueError(f"local_scores: expected shape (B, n_local), got {tuple(local_scores.shape)}")
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("group: expected an initialised process group; call torch.distributed.init_process_group first")
        if hasattr(local_scores, "device_mesh"):  # not isinstance: importing DTensor takes seconds
            shard = cls._of_dtensor(local_scores, target, group)
        else:
            shard = cls(local_scores, target, group, dist.get_rank(group))
        if shard.rank < 0:
            raise ValueError("group: expected one that this process is a member of")
        return shard._replace(target=shard.local("target", target))

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
        classes, batch_group = sharded.index(1), mesh.get_group(sharded.index(0)) if 0 in sharded else None
        placements = tuple(Shard(0) if dim == 0 else Replicate() for dim in sharded)
        rank = mesh.get_local_rank(classes)
        return cls(whole.to_local(), target, mesh.get_group(classes), rank, batch_group, whole, placements)

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """This process's rows of a tensor that has something for each."""
        if not hasattr(tensor, "device_mesh"):
            return tensor
        if self.whole is None:
            raise TypeError(f"{name}: expected a torch.Tensor to go with local_scores, got a DTensor")
        return tensor.redistribute(self.whole.device_mesh, self.placements).to_local()  # type: ignore[attr-defined]

    def as_dtensor(self, loss: Tensor) -> Tensor:
        """The loss as a DTensor, if the scores are one."""
        if self.whole is None:
            return loss
        from torch.distributed.tensor import DTensor, Replicate

        mesh = self.whole.device_mesh
        if loss.ndim == 0:
            return DTensor.from_local(loss, mesh, [Replicate()] * mesh.ndim, run_check=False)
        size = torch.Size([len(self.whole)])
        return DTensor.from_local(loss, mesh, self.placements, run_check=False, shape=size, stride=(1,))

    def with_sizes(self, sizes: Sequence[int] | None, settings: str = "") -> _Shard:
        """With the sizes of all slices: as the caller says; or, with None, as all processes say, if they agree in all else."""
        scores, target, world = self.scores, self.target.detach(), dist.get_world_size(self.group)
        if sizes is not None:
            if not isinstance(sizes, Sequence):
                raise TypeError(f"slices: expected a sequence of {world} sizes, got {sizes!r}")
            if len(sizes) != world or sizes[self.rank] != scores.shape[1]:
                mine = f"with {scores.shape[1]} for rank {self.rank}"
                raise ValueError(f"slices: expected {world} sizes, {mine}, got {list(sizes)}")
            return self._replace(sizes=tuple(sizes))
        kind = zlib.crc32(f"{scores.dtype} {target.shape} {settings}".encode())
        place = torch.arange(1, target.numel() + 1, device=target.device)
        of_targets = (target.long().flatten() * place * place).sum().to(scores.device)  # may wrap around
        own = torch.tensor([scores.shape[1], self.rank, len(scores), kind], device=scores.device)
        sizes, ranks, rows, kinds, targets = _all_gather(torch.cat([own, of_targets[None]]), self.group).t().tolist()
        if ranks != list(range(world)):
            raise ValueError(f"local_scores: expected ranks in the order of the slices, got the slices {ranks}")
        if len(set(rows)) > 1:
            raise ValueError(f"local_scores: expected the same number of rows in every process, got {rows}")
        if len(set(kinds)) > 1:
            raise ValueError("m, top1, …: expected the same settings, dtype and number of targets in every process")
        if len(set(targets)) > 1:
            raise ValueError("target: expected the same targets in every process")
        if sum(sizes) < 1:
            raise ValueError("local_scores: expected at least one class in some process, got none")
        return self._replace(sizes=tuple(sizes))

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    def find(self, scores: Tensor, target: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor, Tensor]:
        """The scores, with one of padding if there is none; which targets are among them, and where (0 for the others)."""
        place = target - self.start
        mine = (place >= 0) & (place < scores.shape[1])
        scores = scores if scores.shape[1] else functional.pad(scores, (0, 1), value=-torch.inf)
        return scores, mine, place.masked_fill(~mine, 0)


def _checksum(numbers: Tensor | None) -> float | None:
    if numbers is None:
        return None
    place = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    return float((numbers.detach().flatten().float() * place).sum())


def _exchange(
    scores: Tensor, target: Tensor, shard: _Shard, m: int, softmax: bool, smoothing: bool, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What every process knows of all classes, by one all-gather.

    Sent are the local candidates and the target's score; for the softmax the best score and the sum of exponentials; for
    smoothing the number of classes that are no padding, the sum of their weights, and of their weighted scores.

    Returns:
        The candidates of all processes, slice after slice (without the target, unless all scores are here); the targets'
        scores; their cross-entropy over all classes; and its mean over these classes, each with its weight.
    """
    some = m < sum(shard.sizes)  # then they are sent without the target
    widths = [min(max(m - 1, 0), size) if some else size for size in shard.sizes]
    most, width, size = max(widths), widths[shard.rank], scores.shape[1]
    scores, mine, place = shard.find(scores, target)
    index = torch.arange(width, device=scores.device).expand(len(scores), width)
    if 0 < width < size:
        index = candidates.best(scores, width + 1)
        hit = mine[:, None] & (index == place[:, None])
        index = candidates.others(index, torch.where(hit.any(-1), hit.int().argmax(-1), width))
    if softmax:
        found, top, total = _with_sum(scores, torch.cat([index, place[:, None]], -1))
    else:
        found = scores.gather(-1, torch.cat([index, place[:, None]], -1)).to(working_dtype(scores))
    kept, own = found[:, :-1], torch.where(mine, found[:, -1], 0)
    if some:
        kept = kept.masked_fill(mine[:, None] & (index == place[:, None]), -torch.inf)
    columns = [functional.pad(kept, (0, most - width), value=-torch.inf), own[:, None]]
    if softmax:
        columns += [top[:, None], total[:, None]]
    if smoothing:
        weights = (scores.detach() != -torch.inf).to(top.dtype)
        number = weights.sum(-1)
        if weight is not None:
            weights = weights * functional.pad(weight[shard.start :][:size], (0, scores.shape[1] - size))
        behind = torch.where(weights != 0, weights * (scores - _finite(top)[:, None]), 0).sum(-1)
        columns.append(torch.stack([number, weights.sum(-1), behind], -1))
    blocks = _gather(torch.cat(columns, -1), shard.group)
    gathered = torch.cat([block[:, :each] for block, each in zip(blocks, widths, strict=True)], -1)
    own, cross_entropy, everywhere = blocks[..., most].sum(0), None, None
    if softmax:
        tops = blocks[..., most + 1].detach()
        best = _finite(tops.amax(0))
        log_sum = (blocks[..., most + 2] * (tops - best).exp()).sum(0).log()
        cross_entropy = log_sum + (best - own)
        if smoothing:
            number, weights, behind = blocks[..., most + 3 :].unbind(-1)
            far = torch.where(weights != 0, log_sum + (best - tops), 0)  # a slice of padding has no best
            everywhere = (weights * far - behind).sum(0) / number.sum(0)
    return gathered, own, cross_entropy, everywhere


class _WithSum(torch.autograd.Function):
    """Scores of the given classes, the best score, and the sum of exponentials relative to it, with one gradient for all.

    The best score is a constant to whoever differentiates: it cancels in the log-sum-exp.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = rows.amax(-1).to(working_dtype(rows))
        exponentials = (rows - _finite(top)[:, None]).exp_()
        ctx.save_for_backward(exponentials, classes)
        ctx.dtype = rows.dtype
        ctx.mark_non_differentiable(top)
        return rows.gather(-1, classes).to(top.dtype), top, exponentials.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor, _: Tensor, grad_total: Tensor) -> tuple[Tensor, None]:
        exponentials, classes = ctx.saved_tensors
        return (exponentials * grad_total[:, None]).scatter_add_(-1, classes, grad_scores).to(ctx.dtype), None


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
    def backward(ctx: Any, grad_blocks: Tensor) -> tuple[Tensor, None]:
        return grad_blocks[ctx.rank], None


_with_sum: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _WithSum.apply
_gather: Callable[[Tensor, dist.ProcessGroup | None], Tensor] = _Gather.apply


def _all_gather(block: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    blocks = block.new_empty(dist.get_world_size(group), *block.shape)
    dist.all_gather(list(blocks.unbind()), block.contiguous(), group=group)
    return blocks


def _finite(top: Tensor) -> Tensor:
    """0 for slices with nothing but padding."""
    return top.masked_fill(top == -torch.inf, 0)
