"""The command `anyk`: words in, words out. What it does is done elsewhere."""

import json as json_module
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from anyk.lab.errors import LabError
from anyk.lab.recipes import LossName, Recipe, Setting

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
CommonSetting = Annotated[Setting, tyro.conf.OmitArgPrefixes]
WholeRecipe = Annotated[Recipe, tyro.conf.OmitArgPrefixes]


def compare(
    setting: CommonSetting,
    *,
    losses: tuple[LossName, ...] = ("softmax", "splitter"),
    seeds: int = 5,
    budget: int = 6,
    jobs: int = 0,
    out: Path | None = None,
    quiet: Flag = False,
    json: Flag = False,
) -> int:
    """Does top-k training help on your data, which variant, by how much, and is that luck?

    Tunes every loss with the same number of tries on validation, trains it with several seeds, and tells what the test
    says. Writes results.json, report.html and the best model.

    Args:
        setting: what the runs have in common; learning_rate and temperature are where the tuning starts.
        losses: what to compare; softmax is always among them.
        seeds: runs of each tuned loss.
        budget: tries that each loss has for tuning.
        jobs: runs at a time; 0 is one for each core.
        out: folder for the outcome; by default anyk-runs/compare-DATA.
        quiet: show no progress.
        json: print the results as JSON instead of words.
    """
    from anyk.lab import comparison, report
    from anyk.lab.compare import compare as run_comparison
    from anyk.lab.progress import Display

    out = out or Path("anyk-runs") / f"compare-{_slug(setting.data)}"
    count = len({"softmax", *losses}) * (budget + seeds)
    with Display(count, quiet) as display:
        outcome = run_comparison(
            setting,
            losses,
            out,
            seeds=seeds,
            budget=budget,
            jobs=jobs or os.cpu_count() or 1,
            command=_command(),
            on_progress=display.show,
        )
    if json:
        _say(json_module.dumps(comparison.to_json(outcome), indent=1))
        return 0
    _say(report.render(comparison.table(outcome), "terminal"))
    _say("\n".join(comparison.verdict(outcome)))
    best = comparison.best(outcome)
    _say(f"\nThe loss that validation prefers ({best.name}), to paste:\n")
    _say(comparison.code(best.recipe, outcome.data["classes"]))
    _say(f"Report: {out / 'report.html'}")
    return 0


def train(
    recipe: WholeRecipe,
    *,
    out: Path | None = None,
    tensorboard: Flag = False,
    quiet: Flag = False,
    json: Flag = False,
) -> int:
    """One run with every knob. Killed or stopped, the same command goes on where it stood.

    Args:
        recipe: what to train.
        out: the run folder; by default anyk-runs/DATA-LOSS-seedSEED.
        tensorboard: also write the metrics for TensorBoard, into the run folder.
        quiet: show no progress.
        json: print the result as JSON instead of words.
    """
    from anyk.lab import training
    from anyk.lab.progress import Display

    out = out or Path("anyk-runs") / f"{_slug(recipe.data)}-{recipe.loss}-seed{recipe.seed}"
    with Display(1, quiet) as display, _tensorboard(out if tensorboard else None) as write, _stop_signal() as stopped:

        def show(progress: training.Progress) -> None:
            display.show(out, progress)
            write(progress)

        result = training.train(recipe, out, on_progress=show, should_stop=stopped)
    if json:
        _say(json_module.dumps(result, indent=1))
        return 0
    for part in ("validation", "test"):
        accuracies = (f"{name} {100 * value:.2f} %" for name, value in result[part].items() if name.startswith("top"))
        _say(f"{part:10}  {'  '.join(accuracies)}")
    _say(f"{result['epochs']:g} epochs in {result['seconds']:.1f} s, in {out}")
    return 0


def sweep(
    base: WholeRecipe,
    *,
    grid: tuple[str, ...] = (),
    file: Path | None = None,
    out: Path = Path("anyk-runs/sweep"),
    jobs: int = 0,
    quiet: Flag = False,
) -> int:
    """Many runs, in parallel processes. Interrupted, the same command goes on; a run that fails does not stop the others.

    Args:
        base: what all runs have in common.
        grid: axes such as loss=softmax,splitter seed=0,1,2 m=16,none p_k=1,.5/.5; every combination is a run.
        file: a JSON file with "grid" or "runs", and "base", instead of --grid.
        out: folder for the runs.
        jobs: runs at a time; 0 is one for each core.
        quiet: show no progress.
    """
    from anyk.lab import report, sweeps
    from anyk.lab.progress import Display

    if file is not None and grid:
        raise LabError("give --grid or --file, not both.")
    recipes = sweeps.read(file, base) if file is not None else sweeps.grid(base, sweeps.parse_axes(grid))
    with Display(len(recipes), quiet) as display:
        outcomes = sweeps.run_all(recipes, out, jobs=jobs or os.cpu_count() or 1, on_progress=display.show)
    _say(report.render(report.table(report.collect([out])), "terminal"))
    return 1 if any(outcome.error for outcome in outcomes.values()) else 0


def report(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional],
    *,
    format: Literal["terminal", "markdown", "latex", "csv"] = "terminal",
    fields: tuple[str, ...] | None = None,
    metrics: tuple[str, ...] | None = None,
    sort: str | None = None,
    plot: Path | None = None,
) -> int:
    """Any set of runs as a table, and as a plot.

    Args:
        folders: run folders, or folders that hold some.
        format: of the table.
        fields: the recipe's fields to show; by default those that differ.
        metrics: top1, top5, validation_top1, ...; by default those that were measured.
        sort: a field or a metric; -metric for the worst first.
        plot: also draw to this .png, .svg or .pdf file.
    """
    from anyk.lab import report as reports

    table = reports.table(reports.collect(folders), fields=fields, metrics=metrics, sort=sort)
    _say(reports.render(table, format))
    if plot is not None:
        reports.plot(table, plot)
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "compare": compare,
    "train": train,
    "sweep": sweep,
    "report": report,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="anyk",
            description="Train for 'the right class is among the first k', and find out whether it helps.",
            args=arguments,
        )
    except LabError as error:
        Console(stderr=True).print(f"anyk: {error}", markup=False, highlight=False, soft_wrap=True)
        code = 2
    except (KeyboardInterrupt, _stopped()):
        Console(stderr=True).print(f"Stopped. To go on: {_command()}", markup=False, highlight=False, soft_wrap=True)
        code = 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _stopped() -> type[Exception]:
    from anyk.lab.training import Stopped

    return Stopped


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM as a flag, so that a step ends before the run does; a second one ends it at once."""
    stop = threading.Event()

    def note(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop.is_set
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


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


def _say(words: str) -> None:
    sys.stdout.write(words.rstrip("\n") + "\n")


def _command() -> str:
    return shlex.join(["anyk", *sys.argv[1:]])


def _slug(data: str) -> str:
    """A data set's name as a part of a folder's name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(data).name or data)
