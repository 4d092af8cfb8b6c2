"""The classifiers of the lab."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyk.lab.data import Dataset
from anyk.lab.errors import LabError
from anyk.lab.recipes import Recipe


def build(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """The model of a resolved recipe for a data set; its inputs are float32."""
    name = recipe.model
    classes, shape = len(dataset.classes), dataset.train.shape
    if name in ("cnn", "resnet18") and dataset.kind != "images":
        raise LabError(f"model {name} takes images, but {dataset.name} holds embeddings: choose linear or mlp.")
    if name == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), classes))
    if name == "mlp":
        hidden = [nn.Linear(shape.numel(), recipe.hidden), nn.ReLU(), nn.Dropout(recipe.dropout)]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(recipe.hidden, classes))
    if min(shape[1:]) < 8:
        raise LabError(f"model {name} needs images of at least 8 x 8 pixels, but {dataset.name} has {shape[1]} x {shape[2]}.")
    model: Any = SmallCNN(shape, classes, recipe.dropout) if name == "cnn" else ResNet18(shape[0], classes)
    return model.to(memory_format=torch.channels_last)  # faster convolutions, on the CPU too


def _conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class SmallCNN(nn.Module):
    """Three convolutions and two linear layers, for small images: trains in seconds on a CPU."""

    def __init__(self, shape: Sequence[int], classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, width = shape
        blocks: list[nn.Module] = []
        for outputs in (32, 64, 128):
            # Pooling first: normalising a quarter of the pixels is cheaper and, before a ReLU, as good.
            blocks += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.MaxPool2d(2),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
            channels, height, width = outputs, height // 2, width // 2
        self.features = nn.Sequential(*blocks, nn.Flatten())
        hidden = nn.Linear(channels * height * width, 256)
        self.head = nn.Sequential(hidden, nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images.contiguous(memory_format=torch.channels_last)))


class ResNet18(nn.Module):
    """ResNet18 as the paper trains it on CIFAR: a 3 x 3 stem of stride 1, then max-pooling and the usual four stages."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(channels, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = (64, 64, 128, 256, 512)
        stages = []
        for inputs, outputs, stride in zip(widths, widths[1:], (1, 2, 2, 2), strict=False):
            stages += [_Residual(inputs, outputs, stride), _Residual(outputs, outputs, 1)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(inputs, outputs, stride), nn.ReLU(), _conv(outputs, outputs))
        self.shortcut = nn.Identity() if inputs == outputs and stride == 1 else _conv(inputs, outputs, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


# Augmentation: on whole batches, from torch's global generator, which the trainer seeds at each step -----------------------


def augment(images: Tensor, names: tuple[str, ...]) -> Tensor:
    """Random changes to (B, channels, height, width) images that have mean 0."""
    for name in names:
        images = AUGMENTATIONS[name](images)
    return images


def _crop(images: Tensor, pad: int = 4) -> Tensor:
    """Pad with zeros on all sides and cut out a random window of the old size."""
    batch, _, height, width = images.shape
    padded = functional.pad(images, (pad, pad, pad, pad))
    down = torch.randint(2 * pad + 1, (batch, 1, 1, 1), device=images.device)
    right = torch.randint(2 * pad + 1, (batch, 1, 1, 1), device=images.device)
    rows = torch.arange(height, device=images.device)[:, None] + down
    columns = torch.arange(width, device=images.device) + right
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    example = torch.arange(batch, device=images.device)[:, None, None, None]
    return padded[example, channel, rows, columns]


def _flip(images: Tensor) -> Tensor:
    """Mirror every second image, at random."""
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(3), images)


def _affine(images: Tensor, turn: float = 0.2, scale: float = 0.15, shift: float = 0.15) -> Tensor:
    """Turn by up to ``turn`` (radians), scale by up to ``scale`` and shift by up to ``shift`` of half the width."""
    batch = len(images)
    angle, size, down, right = (2 * torch.rand(4, batch, device=images.device) - 1) * torch.tensor(
        [[turn], [scale], [shift], [shift]], device=images.device
    )
    size = 1 + size
    rows = torch.stack([angle.cos() * size, -angle.sin() * size, right, angle.sin() * size, angle.cos() * size, down], 1)
    grid = functional.affine_grid(rows.reshape(batch, 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


AUGMENTATIONS = {"crop": _crop, "flip": _flip, "affine": _affine}
