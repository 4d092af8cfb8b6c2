"""`anyk train`."""

import itertools
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyk.lab.cli.signals import stop_signal
from anyk.lab.cli.words import Flag, WholeRecipe, say, say_json, slug
from anyk.lab.errors import LabError
from anyk.lab.run import processes
from anyk.lab.run.recipe import Recipe


def command(
    recipe: WholeRecipe,
    *,
    out: Path | None = None,
    tensorboard: Flag = False,
    quiet: Flag = False,
    json: Flag = False,
) -> int:
    """One run with every knob. Killed or stopped, the same command goes on where it stood.

    torchrun --nproc-per-node N -m anyk train … is the same run in N processes.

    Args:
        recipe: what to train.
        out: the run folder; by default anyk-runs/DATA-LOSS-seedSEED.
        tensorboard: also write the metrics for TensorBoard, into the run folder.
        quiet: show no progress.
        json: print the result as JSON instead of words.
    """
    from anyk.lab.progress import Display
    from anyk.lab.run import evaluation, training
    from anyk.lab.tables import percent

    out = out or Path("anyk-runs") / f"{slug(recipe.data)}-{recipe.loss}-seed{recipe.seed}"
    with processes.joined(recipe.device) as together:
        training.check(recipe, together)
        together.broadcast(lambda: _check_folder(out, recipe))
        with (
            Display(1, quiet or not together.first) as display,
            _tensorboard(out if tensorboard and together.first else None) as write,
            stop_signal(together.world_size > 1) as stopped,
        ):

            def show(progress: training.Progress) -> None:
                display.show(out, progress)
                write(progress)

            result = training.train(recipe, out, on_progress=show, should_stop=stopped, ranks=together)
    if not together.first:
        return 0
    if json:
        say_json(result)
        return 0
    for part in ("validation", "test"):
        accuracies = (f"{name} {percent(value)} %" for name, value in result[part].items() if name.startswith("top"))
        say(f"{part:10}  {'  '.join(accuracies)}")
    used = result["recipe"]
    say(f"learning rate {used['learning_rate']:g} ({used['schedule']}), batch size {used['batch_size']}, model {used['model']}")
    say(f"epochs: {result['epochs']:g}; {result['seconds']:.1f} s; folder: {out}")
    sign = evaluation.unfinished(result)
    if sign and not (recipe.epochs and recipe.learning_rate):  # who gives both has chosen them
        say(
            f"It was still {sign} when it ended: raise --epochs or --learning-rate. "
            "`anyk train` does not tune, `anyk compare` does."
        )
    return 0


@contextmanager
def _tensorboard(folder: Path | None) -> Iterator[Callable[[Any], None]]:
    """A function that writes an evaluation for TensorBoard, or does nothing."""
    if folder is None:
        yield lambda progress: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise LabError('TensorBoard is not installed: pip install "anyk[tensorboard]".') from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(progress: Any) -> None:
        if progress.line is not None:
            writer.add_scalar("train_loss", progress.line["train_loss"], progress.step)
            for name, value in progress.line["validation"].items():
                writer.add_scalar(f"validation/{name}", value, progress.step)

    try:
        yield write
    finally:
        writer.close()


def _check_folder(folder: Path, recipe: Recipe) -> None:
    """Raise if the run cannot have this folder, with one that it can have."""
    from anyk.lab.run.folder import FolderRefused, Run

    try:
        Run(folder).refuse_other_files()
        Run(folder).refuse_other_recipe(recipe)
    except FolderRefused as error:
        named = folder if folder.name not in ("", "..") else Path("run")
        names = (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))
        free = next(name for name in names if not name.exists())
        raise LabError(f"{error.why}: choose another folder, such as --out {shlex.quote(str(free))}") from None
