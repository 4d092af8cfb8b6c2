"""The processes of one run: who they are, and how they communicate.

`torchrun --nproc-per-node N -m anyk train …` starts the same program N times. Each process, a rank, takes its part of every
batch and of every evaluation. The first one alone writes files and prints. A run of one process has the group `ALONE`, in which
nothing is communicated.
"""

import gc
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from anyk.lab.errors import LabError, Stopped

Answer = TypeVar("Answer")


class Agreed(LabError):
    """An error that every rank has: the first one prints it."""


class OwnError(LabError):
    """An error that only this rank has, whichever it is: it prints it itself."""


def launched() -> int:
    """How many processes torchrun (or what sets the same variables) has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def is_main() -> bool:
    """Whether this is the process that prints what all of them know."""
    return launched() == 1 or os.environ["RANK"] == "0"


def command_line() -> str:
    """The command line, for the user to give it again."""
    here = os.environ.get("LOCAL_WORLD_SIZE", str(launched()))
    started = ["torchrun", "--nproc-per-node", here, "-m"] if launched() > 1 else []
    return shlex.join([*started, "anyk", *sys.argv[1:]])


class ProcessGroup:
    """This process, a rank, and the others of its run.

    What all ranks must call (``broadcast``, ``all_gather``, ``all_reduce``, ``run_on_all``) returns the same everywhere, or
    raises the same error everywhere.

    Args:
        rank: the number of this process.
        world_size: the number of processes.
        local_rank: the number of this process on its machine.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.first = rank == 0

    # Sharing the work ------------------------------------------------------------------------------------------------------

    def shard(self, index: Tensor) -> Tensor:
        """This rank's part of a list of examples. The shards follow each other, nearly of one size; some may be empty."""
        if self.world_size == 1:
            return index
        start, end = (number * len(index) // self.world_size for number in (self.rank, self.rank + 1))
        return index[start:end]

    def shard_weight(self, shard: int, whole: int) -> float:
        """The factor of a shard's mean loss that makes the average over the ranks the mean over all targets."""
        return shard * self.world_size / max(whole, 1)

    def device(self, name: str) -> str:
        """The device of this rank: `cuda` is a different one for each rank of a machine."""
        return f"{name}:{self.local_rank}" if self.world_size > 1 and name == "cuda" else name

    def replicate(self, model: nn.Module, inputs: Tensor) -> nn.Module:
        """The same model, with gradients that are averaged over the ranks in the backward pass.

        Args:
            model: what all ranks have, with the same weights.
            inputs: an example batch. DDP puts the gradients into another order after its first backward pass. That pass is
                made here: otherwise the first step after a restart would add up in another order than without one.
        """
        if self.world_size == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        replica = DistributedDataParallel(model)
        training = model.training
        model.eval()  # batch normalisation must not remember this batch
        replica(inputs).sum().backward()
        model.train(training)
        model.zero_grad()
        return replica

    # Communication ---------------------------------------------------------------------------------------------------------

    def all_reduce_any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is True in any rank."""
        if self.world_size == 1:
            return list(flags)
        raised = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return [bool(flag) for flag in raised.tolist()]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def all_gather(self, value: Any) -> list[Any]:
        """What the ranks have, in their order."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, function: Callable[[], Answer]) -> Answer:
        """What the function returns in the first rank, for all; it is called there alone."""
        if self.world_size == 1:
            return function()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = function()
            except LabError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, group_src=0, device=torch.device("cpu"))
        if answer[1] is not None:
            raise Agreed(answer[1])
        return answer[0]

    def run_on_all(self, function: Callable[[], Answer]) -> Answer:
        """Call a function in every rank; a LabError in one of them is raised in all."""
        if self.world_size == 1:
            return function()
        answer, problem = None, None
        try:
            answer = function()
        except Agreed:
            raise
        except LabError as error:
            problem = str(error)
        problems = [each for each in self.all_gather(problem) if each is not None]
        if problems:
            raise Agreed(problems[0])
        return answer  # type: ignore[return-value]

    @contextmanager
    def readable_errors(self) -> Iterator[None]:
        """What torch raises when another rank has ended, as a message for the user."""
        try:
            yield
        except RuntimeError as error:
            if self.world_size > 1 and (type(error).__name__.startswith("Dist") or "gloo" in str(error)):
                raise Agreed(
                    "another process of this run has ended; the same command goes on from the last checkpoint."
                ) from None
            raise

    def local_first(self, function: Callable[[], Answer]) -> Answer:
        """Call a function in every rank, but first in one of each machine: it may fill a cache that the others then read."""
        if self.world_size == 1:
            return function()
        early = self.run_on_all(lambda: [function()] if self.local_rank == 0 else [])
        return self.run_on_all(lambda: early or [function()])[0]


ALONE = ProcessGroup()


@contextmanager
def joined(device: str) -> Iterator[ProcessGroup]:
    """The ranks that torchrun has started, for as long as they work together; `ALONE` without it.

    Args:
        device: where they compute; decides how they communicate.
    """
    if launched() == 1:
        yield ALONE
        return
    # Its functions keep, as their default, the group there is when they are imported; DDP imports them. A group that is kept
    # is not ended by destroying it, see below.
    import torch.distributed.nn
    from torch.distributed.rendezvous import rendezvous

    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda") or ":" in device:
        raise LabError(f"device should be cpu or cuda with several processes, but is {device!r}.")
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if kind == "cuda" and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    # What the ranks communicate beside gradients is on the CPU, so that it does not make a GPU wait.
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    store, rank, world = next(rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        # On one machine, torchrun --max-restarts hands out the store of the former start, with addresses that are gone.
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store
        )
    # Long: one rank may read fifty gigabytes through while the others wait. That a rank has died is seen at once anyway.
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(days=1))
    group = ProcessGroup(rank, world, local)
    die_with_parent()
    try:
        with group.readable_errors():
            yield group
    except (Agreed, Stopped):
        _let_the_first_go_first(group)
        raise
    except LabError as error:
        raise OwnError(f"rank {group.rank}: {error}") from None
    else:
        # The threads of the group are waited for when the last reference to it goes; DDP, which has one, goes with the garbage.
        gc.collect()
        dist.destroy_process_group()


def ignore_signals() -> None:
    """Before the ranks end: torchrun hands a signal on to processes that may have had it already, and ends all when one has
    failed."""
    if launched() > 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def still_joined() -> bool:
    """Whether there is a process group: an error leaves it, as ending it could mean to wait for ranks that are gone.

    A thread of the group that frees a tensor while Python ends aborts the process.
    """
    return launched() > 1 and torch.distributed.is_available() and torch.distributed.is_initialized()


def wait_to_be_ended() -> None:
    """Before the ranks know each other, wait until torchrun has noticed that the first one has failed, and printed why.

    Returns after half a minute: then the first one has not."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(30)


def _let_the_first_go_first(group: ProcessGroup) -> None:
    """Wait until the first rank has ended: it has something to say, and torchrun ends all as soon as one has failed."""
    if not group.first:
        try:
            dist.recv(torch.empty(1), 0)  # which is never sent
        except RuntimeError:
            return


def die_with_parent() -> None:
    """From now on, end this process when the one that started it ends: nobody waits for it, and a new start of the same command
    would find its folder taken."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# Batch normalisation -------------------------------------------------------------------------------------------------------


def synchronise_batch_norm(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Let batch normalisation see the whole batch, not only this rank's part. Names and shapes of the weights stay."""
    if group.world_size > 1:
        for module in model.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, _BatchNorm(child))
    return model


class _BatchNorm(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` over the examples of all ranks, on any device. (`torch.nn.SyncBatchNorm` needs a GPU.)"""

    def __init__(self, alike: nn.BatchNorm2d) -> None:
        super().__init__(alike.num_features, alike.eps, alike.momentum)
        self.to(alike.weight)
        self.load_state_dict(alike.state_dict())

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)
        values = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        each = (0, 2, 3)
        own_count = values.new_full((1,), values.numel() / self.num_features)
        sums = _sum_over_ranks(torch.cat([values.sum(each), own_count]))
        count = sums[-1].detach()
        deviations = values - _per_channel(sums[:-1] / count)
        variance = _sum_over_ranks(deviations.square().sum(each)) / count
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.running_mean.lerp_(sums[:-1] / count, self.momentum or 0.0)
            self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), self.momentum or 0.0)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        return (deviations * _per_channel(scale) + _per_channel(self.bias)).to(inputs.dtype)


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]


def _sum_over_ranks(own: Tensor) -> Tensor:
    """What depends on the sum depends on it in every rank, so the gradients are added up as well."""
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(own)  # type: ignore[no-untyped-call]
