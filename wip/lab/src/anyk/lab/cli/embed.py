"""`anyk embed`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from anyk.lab.cli.parsing import Parser, say
from anyk.lab.embed import embed
from anyk.lab.errors import Stopped
from anyk.lab.progress import shown


def run(words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Make an embedding set of a folder of images."""
    parser = Parser(
        "embed", "Make an embedding set of a folder of images, through a frozen backbone. A run that was killed goes on."
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="FOLDER/CLASS/*, or FOLDER/train/CLASS/* and FOLDER/test/CLASS/*"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder of the new set")
    parser.add_argument("--backbone", default="efficientnet-lite0", help="efficientnet-lite0, timm:NAME or module:function")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps")
    parser.add_argument("--full", action="store_true", help="store float32 instead of float16")
    parser.add_argument("--force", action="store_true", help="replace a set that is there")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    given = parser.parse_args(words)
    with shown(given.quiet) as (_, on_progress):

        def progress(done: int, total: int) -> None:
            on_progress(done, total)
            if should_stop():
                raise Stopped

        made = embed(
            given.folder,
            given.out,
            given.backbone,
            device=given.device,
            half=not given.full,
            progress=progress,
            force=given.force,
        )
    say(
        f"{made.folder}: {made.train:,} training and {made.test:,} test examples of {made.classes} classes, {made.dimensions} numbers each."
    )
    for name, reason in made.skipped[:5]:
        say(f"Left out: {name} ({reason})")
    if len(made.skipped) > 5:
        say(f"Left out: {len(made.skipped) - 5} more, listed in dataset.json.")
    return 0
