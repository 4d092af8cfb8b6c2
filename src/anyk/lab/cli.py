"""The command `anyk`: words in, words out. What it does is done elsewhere."""

import difflib
import itertools
import json as json_module
import os
import shlex
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import anyk
from anyk.lab import ranks
from anyk.lab.errors import LabError, Stopped, failures
from anyk.lab.recipes import TYPES, LossName, Recipe, Setting
from anyk.lab.reproduce import Network

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
CommonSetting = Annotated[Setting, tyro.conf.OmitArgPrefixes]
Format = Literal["terminal", "markdown", "latex", "csv"]
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
    # A try that diverges while tuning is no failure: others were better.
    code = 1 if any(len(method.runs) < seeds for method in outcome.methods) else 0
    if json:
        _say(json_module.dumps(comparison.to_json(outcome), indent=1))
        return code
    _say(report.render(comparison.table(outcome), "terminal"))
    _say("\n".join(comparison.verdict(outcome)))
    best = comparison.best(outcome)
    _say(f"\nTo paste: {best.name}, the best on validation (of equals the first)\n")
    _say(comparison.code(best.recipe, outcome.data["classes"]))
    _say(f"Report: {out / 'report.html'}")
    return code


def train(
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
    from anyk.lab import training
    from anyk.lab.progress import Display

    out = out or Path("anyk-runs") / f"{_slug(recipe.data)}-{recipe.loss}-seed{recipe.seed}"
    with ranks.joined(recipe.device) as together:
        training.check(recipe, together)
        together.from_first(lambda: _check_folder(out, recipe))
        with (
            Display(1, quiet or not together.first) as display,
            _tensorboard(out if tensorboard and together.first else None) as write,
            _stop_signal(together.world > 1) as stopped,
        ):

            def show(progress: training.Progress) -> None:
                display.show(out, progress)
                write(progress)

            result = training.train(recipe, out, on_progress=show, should_stop=stopped, ranks=together)
    if not together.first:
        return 0
    if json:
        _say(json_module.dumps(result, indent=1))
        return 0
    for part in ("validation", "test"):
        accuracies = (f"{name} {100 * value:.2f} %" for name, value in result[part].items() if name.startswith("top"))
        _say(f"{part:10}  {'  '.join(accuracies)}")
    used = result["recipe"]
    _say(
        f"learning rate {used['learning_rate']:g} ({used['schedule']}), batch size {used['batch_size']}, model {used['model']}"
    )
    _say(f"epochs: {result['epochs']:g}; {result['seconds']:.1f} s; folder: {out}")
    sign = training.unfinished(result)
    if sign and not (recipe.epochs and recipe.learning_rate):  # who gives both has chosen them
        _say(
            f"It was still {sign} when it ended: raise --epochs or --learning-rate. "
            "`anyk train` does not tune, `anyk compare` does."
        )
    return 0


def sweep(
    base: WholeRecipe,
    *,
    grid: tuple[str, ...] = (),
    file: Path | None = None,
    out: Path = Path("anyk-runs/sweep"),
    jobs: int = 0,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    quiet: Flag = False,
) -> int:
    """Many runs, in parallel processes or on a cluster.

    Interrupted, the same command goes on; a run that fails does not stop the others.

    Args:
        base: what all runs have in common.
        grid: axes such as loss=softmax,splitter seed=0,1,2 m=16,none p_k=1,.5/.5; every combination is a run.
        file: a JSON file with "grid" or "runs", and "base", instead of --grid.
        out: folder for the runs.
        jobs: runs at a time; 0 is one for each core, or on a cluster as many as it has room for.
        engine: local is this machine; ray is a Ray cluster, whose nodes must see the folders of data and runs.
        address: HOST:PORT of the Ray cluster; by default the environment variable RAY_ADDRESS.
        quiet: show no progress.
    """
    from anyk.lab import report, sweeps
    from anyk.lab.progress import Display

    if file is not None and grid:
        raise LabError("give --grid or --file, not both.")
    if engine == "local" and address is not None:
        raise LabError("--address is for a cluster: add --engine ray.")
    if engine == "ray":
        address = address or os.environ.get("RAY_ADDRESS")
        if not address:
            raise LabError("--engine ray needs --address HOST:PORT, which `ray start --head` tells.")
    recipes = sweeps.read(file, base) if file is not None else sweeps.grid(base, sweeps.parse_axes(grid))
    with Display(len(recipes), quiet) as display:
        outcomes = sweeps.run_all(recipes, out, jobs=jobs, address=address, on_progress=display.show, on_note=_warn)
    _say(report.render(report.table(report.collect([out])), "terminal"))
    return _tell_failures(outcomes)


def report(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = (Path("anyk-runs"),),
    *,
    format: Format = "terminal",
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
        sort: a field or a metric; --sort=-top1 for the worst first.
        plot: also draw to this .png, .svg or .pdf file.
    """
    from anyk.lab import report as reports

    table = reports.table(reports.collect(folders), fields=fields, metrics=metrics, sort=sort)
    if plot is not None:
        reports.plot(table, plot)
    _say(reports.render(table, format))
    if format == "csv":  # which has no place for them
        for note in table.notes:
            _warn(note)
    return 0


def reproduce(
    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")],
    *,
    data: tuple[str, ...] = (),
    smoke: Flag = False,
    seeds: int | None = None,
    source: Literal["paper", "official"] = "paper",
    network: Network = "splitter",
    grid: tuple[float, ...] = (1.0,),
    out: Path | None = None,
    jobs: int = 0,
    format: Format = "terminal",
    quiet: Flag = False,
) -> int:
    """A table or a figure of the paper, our numbers beside its own.

    Args:
        experiment: table1, table2, table3, table4, table5, table6, alpha, set-size, backbones or depths.
        data: where the data sets are that it needs: a path, or NAME=PATH for each.
        smoke: the same path in a minute, on small made data in the same formats.
        seeds: how many; by default as many as in the paper.
        source: the paper's settings or the official code's, where they differ.
        network: of the rows called DiffSortNets.
        grid: factors of the published temperature to try; validation chooses.
        out: folder for the runs; by default anyk-runs/EXPERIMENT.
        jobs: runs at a time; 0 is one for each core.
        format: of the table.
        quiet: show no progress.
    """
    from anyk.lab import reproduce as reproducing
    from anyk.lab import sweeps
    from anyk.lab.progress import Display
    from anyk.lab.runs import Run

    chosen = reproducing.experiment(experiment)
    out = out or Path("anyk-runs") / (f"{experiment}-smoke" if smoke else experiment)
    places: str | dict[str, str] | None
    if smoke:
        with Run(out).locked():
            places = chosen.write_smoke_data(out / "data")
    elif len(data) == 1 and "=" not in data[0]:
        places = data[0]
    else:
        places = dict(_name_and_path(word) for word in data) or None
    Run(out).refuse_other_files()
    outcomes = {}
    recipes = chosen.recipes(places, smoke=smoke, seeds=seeds, source=source, network=network, grid=grid)
    _check_data(recipes, out / "runs")
    if recipes:
        with Display(len(recipes), quiet) as display:
            outcomes = sweeps.run_all(recipes, out / "runs", jobs=jobs, on_progress=display.show)
    results = {name: outcome.result for name, outcome in outcomes.items() if outcome.result is not None}
    table = chosen.compare(results, smoke=smoke)
    for part in (table, *table.also):
        _say(f"{part.title}\n")
        _say(_render_plain(part.header, part.rows, part.notes, format) + "\n")
    return _tell_failures(outcomes)


def embed(
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
    from anyk.lab import embed as embedding
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
        _warn(f"skipped {name}: {reason}")
    split = f"{summary.train} training and {summary.test} test examples" if summary.test else f"{summary.train} examples"
    _say(f"{summary.folder}: {split}, {summary.classes} classes, {summary.dimensions} dimensions")
    return 0


def import_arrays(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE]")],
    *,
    out: Path | None = None,
    name: str | None = None,
    classes: Path | None = None,
    test: Path | None = None,
    label_column: str | None = None,
    half: Flag = False,
    force: Flag = False,
) -> int:
    """An array file to an embedding set: .npz, .npy, .csv, .p, .pt. Nothing in the file is executed.

    Args:
        files: the file; or two .npy files, the embeddings and the labels.
        out: the folder of the new set; by default the file's name without its suffix.
        name: what to call it; by default like the file.
        classes: a file with the class names in the order of the labels, one on a line or a JSON list.
        test: a file of the same form with the test examples.
        label_column: .csv: the column with the label; by default the last one.
        half: store float16.
        force: replace a set that is there.
    """
    from anyk.lab.data import arrays

    if not files:
        raise LabError("give the file to import.")
    folder = arrays.import_file(
        *files,
        out=out or files[0].with_suffix(""),
        name=name,
        classes_file=classes,
        test=test,
        label_column=label_column,
        half=half,
        force=force,
        note=_warn,
    )
    _say(f"{folder} is ready: anyk compare {shlex.quote(str(folder))}")
    return 0


def draw(
    what: Annotated[Literal["network", "matrix", "loss"], tyro.conf.Positional] = "network",
    *,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
    interactive: Flag = False,
    kind: str = "splitter",
    n: int = 16,
    k: int = 5,
    packed: Flag = False,
    operators: tuple[str, ...] = (),
    scores: tuple[float, ...] = (3.0, 2.5, 2.2, 1.5, 1.0, 0.5, 0.0, -1.0),
    temperatures: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0),
    p_k: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 1.0),
    temperature: float = 0.5,
) -> int:
    """Pictures: a network; P as heat maps over temperatures; the loss over the target's score; or a page to play with.

    Args:
        what: the picture.
        out: the .png, .svg or .pdf file; by default WHAT.svg. The .html file of --interactive; by default explore.html.
        interactive: instead of a picture, one page with everything: drag scores, choose operator, temperature and P_K there.
        kind: network: odd_even, bitonic, splitter, or a selection network.
        n: network: wires.
        k: network and matrix: ranks.
        packed: network: each comparator as early as it can go.
        operators: matrix and loss: which; by default all.
        scores: matrix: of the classes.
        temperatures: matrix: the columns.
        p_k: loss: P_K.
        temperature: loss: of all operators.
    """
    if interactive:
        from anyk.lab import explore

        _say(f"{explore.write(out or Path('explore.html'))}")
        return 0
    from anyk.lab import draw as drawing

    path = out or Path(f"{what}.svg")
    chosen = operators or tuple(drawing.OPERATORS)
    if what == "network":
        drawing.network(kind, n, k, path, packed=packed)
    elif what == "matrix":
        drawing.matrix(chosen, scores, k, temperatures, path)
    else:
        drawing.loss_curves(path, operators=chosen, p_k=p_k, temperature=temperature)
    _say(f"{path}")
    return 0


def info(*, json: Flag = False) -> int:
    """Versions, devices, data sets found, and extras that are missing, with the command that adds them.

    Args:
        json: print JSON instead of words.
    """
    from anyk import info as about

    facts = about.gather()
    _say(json_module.dumps(facts, indent=1) if json else about.describe(facts))
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "compare": compare,
    "train": train,
    "sweep": sweep,
    "report": report,
    "reproduce": reproduce,
    "embed": embed,
    "import": import_arrays,
    "draw": draw,
    "info": info,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process."""
    former = signal.signal(signal.SIGTERM, _interrupt)
    words = _understood(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["--version"]:
            _say(f"anyk {anyk.__version__}")
            sys.exit(0)
        if words and words[0] not in COMMANDS and not words[0].startswith("-"):
            near = difflib.get_close_matches(words[0], COMMANDS, n=1)
            hint = f"did you mean anyk {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
            raise LabError(f"there is no command {words[0]!r}: {hint}")
        if ranks.launched() > 1 and words and words[0] in COMMANDS and words[0] != "train":
            raise LabError(f"anyk {words[0]} is one process: start it without torchrun, which is for anyk train.")
        with _registry():
            code = tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="anyk",
                description="Train for 'the right class is among the first k', and find out whether it helps.",
                args=words,
                console_outputs=ranks.speaks(),
            )
    except LabError as error:
        if not ranks.speaks() and not isinstance(error, (ranks.Agreed, ranks.OwnError)):
            ranks.wait_to_be_ended()
        _no_more_signals()
        if ranks.speaks() or not isinstance(error, ranks.Agreed):
            _warn(f"anyk: {error}")
        code = 2
    except SystemExit as ended:  # of the parser
        if ended.code and not ranks.speaks():
            ranks.wait_to_be_ended()
        raise
    except (KeyboardInterrupt, Stopped):
        _no_more_signals()
        if ranks.speaks():
            _warn(f"Stopped. To go on: {_command()}")
        code = 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    finally:
        signal.signal(signal.SIGTERM, former)
    if ranks.still_joined():  # after an error; what their threads could do while Python ends: see there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


_NONE_OPTIONS = {_option(name) for name, kind in TYPES.items() if type(None) in typing.get_args(kind)}
_LIST_OPTIONS = {
    *(_option(name) for name, kind in TYPES.items() if "tuple" in str(kind)),
    *("--losses", "--operators", "--scores", "--temperatures", "--fields", "--metrics"),
}


def _understood(words: Sequence[str]) -> list[str]:
    """The words of a command as the parser wants them: None with a capital, lists with spaces, --sort=-top5 with its sign.

    >>> _understood(["train", "--m", "none", "--p-k=.5,0,.5", "--p-k-end", "0,", "0,1"])
    ['train', '--m', 'None', '--p-k', '.5', '0', '.5', '--p-k-end', '0', '0', '1']
    >>> _understood(["report", "runs", "--sort", "-top5"])
    ['report', 'runs', '--sort=-top5']
    """
    result: list[str] = []
    option = ""
    for given in words:
        word = given
        if word.startswith("--"):
            option, equals, word = word.partition("=")
            option = option.replace("_", "-")
            if not equals or option not in _NONE_OPTIONS | _LIST_OPTIONS:
                result.append(given)
                continue
            result.append(option)
        follows = bool(result) and result[-1].replace("_", "-") == option
        if follows and option in _NONE_OPTIONS and word.lower() == "none":
            result.append("None")
        elif follows and option == "--sort" and word.startswith("-"):
            result[-1] = f"--sort={word}"
        elif option in _LIST_OPTIONS and "," in word:
            result += [piece for piece in word.split(",") if piece.strip()]
        else:
            result.append(word)
    return result


def _registry() -> tyro.constructors.ConstructorRegistry:
    """How words become values where that is not the parser's own way."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def data(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[str] | None:
        if info.type is not str or tyro.conf.Positional not in info.markers:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="DATA",
            instance_from_str=lambda words: words[0],
            is_instance=lambda value: isinstance(value, str),
            str_from_instance=lambda value: [value],
        )

    return registry


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _no_more_signals() -> None:
    """torchrun hands a signal on to processes that may have had it already, and ends all when one has failed."""
    if ranks.launched() > 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def _stop_signal(patient: bool) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM as a flag, so that a step ends before the run does; a second one ends it at once.

    Not so if patient: torchrun hands a signal on to processes that may have had it already, and kills after half a minute."""
    stop = threading.Event()

    def note(number: int, frame: Any) -> None:
        if stop.is_set() and not patient:
            raise KeyboardInterrupt
        stop.set()

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop.is_set
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_IGN if patient and stop.is_set() else handler)


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
    from anyk.lab.runs import FolderRefused, Run

    try:
        Run(folder).refuse_other_files()
        Run(folder).refuse_other_recipe(recipe)
    except FolderRefused as error:
        named = folder if folder.name not in ("", "..") else Path("run")
        names = (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))
        free = next(name for name in names if not name.exists())
        raise LabError(f"{error.why}: choose another folder, such as --out {shlex.quote(str(free))}") from None


def _tell_failures(outcomes: Mapping[str, Any]) -> int:
    """Name the runs that failed; the exit code."""
    failed = failures((name, outcome.error) for name, outcome in outcomes.items() if outcome.error)
    for sentence in failed:
        _warn(sentence)
    return 1 if failed else 0


def _check_data(recipes: Mapping[str, Recipe], out: Path) -> None:
    """Load each data set that runs will need once: what is wrong with it is told once, before anything starts."""
    from anyk.lab import data, pool

    for place in sorted({recipe.data for name, recipe in recipes.items() if pool.ended(out / name, recipe) is None}):
        data.load(place)


def _name_and_path(word: str) -> tuple[str, str]:
    name, equals, path = word.partition("=")
    if not equals:
        raise LabError(f"--data should be NAME=PATH for each data set, but is {word!r}.")
    return name, path


def _render_plain(header: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str], format: Format) -> str:
    """A table of words and numbers, the numbers with two digits after the point."""
    from anyk.lab import report as reports

    def kind(place: int) -> Literal["field", "count"]:
        return "field" if any(isinstance(row[place], str) for row in rows) else "count"

    columns = tuple(reports.Column(title, title, kind(place)) for place, title in enumerate(header))
    cells = tuple(tuple(f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row) for row in rows)
    return reports.render(reports.Table(columns, cells, tuple(notes)), format)


def _warn(words: str) -> None:
    sys.stderr.write(words.rstrip("\n") + "\n")


def _say(words: str) -> None:
    sys.stdout.write(words.rstrip("\n") + "\n")


def _command() -> str:
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.launched()))
    started = ["torchrun", "--nproc-per-node", here, "-m"] if ranks.launched() > 1 else []
    return shlex.join([*started, "anyk", *sys.argv[1:]])


def _slug(data: str) -> str:
    """A data set's name as a part of a folder's name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(data).name or data)
