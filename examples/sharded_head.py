"""Data parallelism and a head with sharded classes, together on a 2-D mesh of processes.

Four processes as 2 x 2: the rows of the mesh have different examples, its columns different classes. The loss curve is that
of one process, to rounding.

    torchrun --nproc-per-node 4 examples/sharded_head.py --class-shards 2
    torchrun --nproc-per-node 1 examples/sharded_head.py
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is made: DDP would import it later, and its functions would keep the group alive
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import anyk

WIDTH, HIDDEN, CLASSES, EXAMPLES, BATCH = 16, 32, 101, 400, 40


class Classifier(nn.Module):
    """The whole body, and the rows of the head for one slice of the classes."""

    def __init__(self, classes: slice, group: dist.ProcessGroup) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the same in every process: the bodies are alike, the slices fit together
        self.body = nn.Parameter(torch.randn(HIDDEN, WIDTH, generator=generator) / WIDTH**0.5)
        self.head = nn.Parameter((torch.randn(CLASSES, HIDDEN, generator=generator) / HIDDEN**0.5)[classes].clone())
        self.group = group

    def forward(self, inputs: Tensor) -> Tensor:
        features = torch.relu(inputs @ self.body.t())
        return ForAllShards.apply(features, self.group) @ self.head.t()


class ForAllShards(torch.autograd.Function):
    """The features go to every shard of the head; each sends back the part of the gradient that came through its classes."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def part(size: int, number: int, count: int) -> slice:
    return slice(number * size // count, (number + 1) * size // count)


def train(mesh: DeviceMesh, steps: int) -> tuple[list[float], float, Classifier, slice]:
    """The loss at every step, the top-5 accuracy on the training examples, this process's model and its classes."""
    rows, columns = mesh.size(0), mesh.size(1)
    row, column = mesh.get_coordinate()
    classes = part(CLASSES, column, columns)
    model = Classifier(classes, mesh.get_group("classes"))
    replica = DistributedDataParallel(model, process_group=mesh.get_group("data"))  # averages over different examples
    loss = anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5], m=16)
    criterion = anyk.parallel.Sharded(loss, group=mesh.get_group("classes"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    inputs = torch.randn(CLASSES, WIDTH, generator=generator)[labels]
    curve = []
    for _ in range(steps):
        batch = torch.randint(EXAMPLES, (BATCH,), generator=generator)
        mine = batch[part(BATCH, row, rows)]
        optimizer.zero_grad()
        loss = criterion(replica(inputs[mine]), labels[mine]) * (len(mine) * rows / BATCH)  # parts may differ in size
        loss.backward()
        optimizer.step()
        mean = loss.detach() / rows
        dist.all_reduce(mean, group=mesh.get_group("data"))
        curve.append(float(mean))

    mine = torch.arange(EXAMPLES)[part(EXAMPLES, row, rows)]
    with torch.no_grad():
        hits = anyk.parallel.topk_hits(model(inputs[mine]), labels[mine], (5,), group=mesh.get_group("classes"))[5]
    dist.all_reduce(hits, group=mesh.get_group("data"))
    return curve, int(hits) / EXAMPLES, model, classes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--class-shards", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 4 examples/sharded_head.py --class-shards 2")
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // arguments.class_shards, arguments.class_shards)
    curve, accuracy, *_ = train(init_device_mesh("cpu", shape, mesh_dim_names=("data", "classes")), arguments.steps)
    if dist.get_rank() == 0:
        print(f"{shape[0]} parts of the examples x {shape[1]} parts of the classes")
        print("loss", *(f"{loss:.4f}" for loss in curve[:: max(1, len(curve) // 5)]), f"top-5 {100 * accuracy:.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
