"""Run by torchrun in the tests: trains the configs of a JSON file, one after the other, in all ranks together.

The file is a list of {"folder", "config", "kill", "most_scores"}: "kill" is [rank, step], where that rank kills itself on the
first start; of more classes than "most_scores" the scores are made in pieces.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import lab_data
from anyk.lab.errors import LabError
from anyk.lab.run import losses, processes, training
from anyk.lab.run.config import Config


def kill(number, step, rank, progress):
    if (progress.step, rank) == (step, number) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def batch_norm_is_that_of_the_whole_batch(group):
    generator = torch.Generator().manual_seed(0)
    for size in (7, 2):  # two images are too few for three ranks
        images = torch.randn(size, 4, 3, 2, generator=generator, dtype=torch.float64) + 5
        factors = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        alone, models = images.clone().requires_grad_(), [nn.Sequential(nn.BatchNorm2d(4).double()) for _ in range(2)]
        expected = models[0](alone)
        (expected * factors).sum().backward()
        part = group.shard(torch.arange(size))
        mine = images[part].requires_grad_()
        model = processes.synchronise_batch_norm(models[1], group)
        output = model(mine)
        (output * factors[part]).sum().backward()
        assert_close(output, expected[part])
        assert_close(mine.grad, alone.grad[part])
        for own, whole in zip(model.parameters(), models[0].parameters(), strict=True):
            assert_close(group.all_reduce(own.grad), whole.grad)
        assert_close(model.state_dict(), models[0].state_dict())
        assert_close(model.eval()(images), models[0].eval()(images))


def an_error_of_one_rank_is_raised_in_all(group):
    def load():
        if group.rank == group.world_size - 1:
            raise LabError("a file that only this rank misses")

    with pytest.raises(LabError, match="a file that only this rank misses"):
        group.local_first(load)


def threads_of_the_group():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    training.read_data = lab_data.read_or_make
    with processes.joined("cpu") as group:
        an_error_of_one_rank_is_raised_in_all(group)
        batch_norm_is_that_of_the_whole_batch(group)
        assert threads_of_the_group() or torch.__version__ < "2.13"  # 2.8 and older do not name them
        for run in json.loads(Path(sys.argv[1]).read_text()):
            training.CHECKPOINT_SECONDS = training.CHECKPOINT_SHARE = 0.0 if "kill" in run else 10.0
            watch = partial(kill, *run["kill"], group.rank) if "kill" in run else lambda progress: None
            losses.MOST_SCORES = run.get("most_scores", 20_000)
            training.train(Config.from_json(run["config"]), run["folder"], on_progress=watch, group=group)
    # One could free a tensor while Python ends, which aborts the process: once in a few hundred ends on a busy machine.
    assert not threads_of_the_group()
