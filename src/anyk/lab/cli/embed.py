"""`anyk embed`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from anyk.lab.cli.words import Flag, Group, say, warn


@dataclass(frozen=True)
class ModelOptions:
    """What makes the embeddings."""

    backbone: str = "efficientnet-lite0"
    """efficientnet-lite0, timm:NAME, or module:function that returns an nn.Module and its preprocessing"""
    batch_size: int | None = None
    """images at once; by default 4 on a CPU, 64 elsewhere"""
    device: str = "cpu"
    """cpu, cuda, mps"""


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Path | None = None
    """the folder of the new set; by default FOLDER-embeddings"""
    float32: Flag = False
    """store float32 instead of float16"""
    force: Flag = False
    """replace an existing set"""
    quiet: Flag = False
    """show no progress"""


def command(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    *,
    model: Group[ModelOptions],
    output: Group[Output],
) -> int:
    """Turn images in class folders into an embedding set. After an interruption, the same command goes on.

    Args:
        folder: FOLDER/class/* or FOLDER/train/class/* and FOLDER/test/class/*; without a test folder val is the test.
    """
    from anyk.lab import embed
    from anyk.lab.progress import count_up

    with count_up("images", output.quiet) as progress:
        summary = embed.embed(
            folder,
            output.out or folder.with_name(f"{folder.name}-embeddings"),
            model.backbone,
            batch_size=model.batch_size,
            device=model.device,
            half=not output.float32,
            progress=progress,
            force=output.force,
        )
    for name, reason in summary.skipped:
        warn(f"skipped {name}: {reason}")
    split = f"{summary.train} training and {summary.test} test examples" if summary.test else f"{summary.train} examples"
    say(f"{summary.folder}: {split}, {summary.classes} classes, {summary.dimensions} dimensions")
    return 0
