"""`anyk embed`."""

from pathlib import Path
from typing import Annotated

import tyro

from anyk.lab.cli.words import Flag, say, warn


def command(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    *,
    out: Path | None = None,
    backbone: str = "efficientnet-lite0",
    batch_size: int = 64,
    device: str = "cpu",
    float32: Flag = False,
    force: Flag = False,
    quiet: Flag = False,
) -> int:
    """Images in class folders to an embedding set. Interrupted, the same command goes on.

    Args:
        folder: FOLDER/class/* or FOLDER/train/class/* and FOLDER/test/class/*; without a test folder val is the test.
        out: the folder of the new set; by default FOLDER-embeddings.
        backbone: efficientnet-lite0, timm:NAME, or module:function that returns an nn.Module and its preprocessing.
        batch_size: images at once.
        device: cpu, cuda, mps.
        float32: store float32 instead of float16.
        force: replace a set that is there.
        quiet: show no progress.
    """
    from anyk.lab import embedding
    from anyk.lab.progress import count_up

    out = out or folder.with_name(f"{folder.name}-embeddings")
    with count_up("images", quiet) as progress:
        summary = embedding.embed(
            folder,
            out,
            backbone,
            batch_size=batch_size,
            device=device,
            half=not float32,
            progress=progress,
            force=force,
        )
    for name, reason in summary.skipped:
        warn(f"skipped {name}: {reason}")
    split = f"{summary.train} training and {summary.test} test examples" if summary.test else f"{summary.train} examples"
    say(f"{summary.folder}: {split}, {summary.classes} classes, {summary.dimensions} dimensions")
    return 0
