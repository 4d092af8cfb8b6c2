"""Runs as tables: collect run folders, group them by what differs, and show mean ± std over the seeds.

A `Table` is plain data; `render` writes it for the terminal, Markdown, LaTeX or CSV, and `plot` draws it. The table of
`anyk compare` is made of the same parts.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anyk.lab import statistics
from anyk.lab.errors import LabError
from anyk.lab.run.recipe import Recipe

METRICS = ("top1", "top5", "top10")
FORMATS = ("terminal", "markdown", "latex", "csv")
Format = Literal["terminal", "markdown", "latex", "csv"]
State = Literal["finished", "failed", "unfinished"]
_MISSING = "–"


@dataclass(frozen=True)
class RunSummary:
    """What a run folder says. ``result`` is its result.json, empty while there is none; ``error`` is why it failed."""

    folder: Path
    state: State
    recipe: Recipe
    result: dict[str, Any]
    error: str = ""


@dataclass(frozen=True)
class Measured:
    """The same quantity of several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def std(self) -> float | None:
        return statistics.std(self.values)


@dataclass(frozen=True)
class Difference:
    """A difference to the baseline, and its p after the correction for the family of tests."""

    paired: statistics.Paired
    p: float | None


@dataclass(frozen=True)
class Column:
    """A column: ``field`` is what tells the rows apart, ``accuracy`` and ``difference`` are fractions shown in percent."""

    key: str
    title: str
    kind: Literal["field", "accuracy", "difference", "seconds", "count"]


Value = Measured | Difference | str | int | float | bool | tuple[float, ...] | tuple[str, ...] | None


@dataclass(frozen=True)
class Table:
    """Rows of values, and sentences that belong below them."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


def collect(folders: Iterable[str | Path]) -> list[RunSummary]:
    """The runs in and below these folders, in the order of their paths, each once."""
    searched = [Path(folder) for folder in folders]
    found: dict[Path, RunSummary] = {}
    for folder in searched:
        if not folder.is_dir():
            raise LabError(f"{folder} is not a folder.")
        for place in sorted({file.parent for name in ("result.json", "config.json") for file in folder.rglob(name)}):
            # Other programs write a config.json too; a run has more than that.
            if any((place / name).exists() for name in ("result.json", "error.txt", "environment.json", "metrics.jsonl")):
                found.setdefault(place.resolve(), _summary(place))
    if not found:
        raise LabError(f"There is no run in {', '.join(map(str, searched))}: `anyk train` and `anyk sweep` write them.")
    return list(found.values())


def _summary(folder: Path) -> RunSummary:
    if (folder / "result.json").exists():
        result = _read_object(folder / "result.json")
        if result.get("format") != 1:
            raise LabError(f"{folder / 'result.json'} has the format {result.get('format')!r}; this version reads format 1.")
        for part in ("recipe", "test"):
            if not isinstance(result.get(part), dict):
                raise LabError(f"{folder / 'result.json'} has no {part!r}: train the run again.")
        if not all(isinstance(value, (int, float)) for value in result["test"].values()):
            raise LabError(f"{folder / 'result.json'} has a test value that is not a number: train the run again.")
        return RunSummary(folder, "finished", Recipe.from_json(result["recipe"], str(folder / "result.json")), result)
    recipe = Recipe.from_json(_read_object(folder / "config.json"), str(folder / "config.json"))
    if (folder / "error.txt").exists():
        # A traceback ends with what went wrong.
        lines = (folder / "error.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return RunSummary(folder, "failed", recipe, {}, lines[-1].strip() if lines else "error.txt is empty")
    return RunSummary(folder, "unfinished", recipe, {})


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{file} cannot be read as JSON ({error}): remove it or train the run again.") from None
    if not isinstance(content, dict):
        raise LabError(f"{file} should hold a JSON object: remove it or train the run again.")
    return content


def table(
    summaries: Sequence[RunSummary],
    *,
    fields: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    sort: str | None = None,
) -> Table:
    """One row for each setting: the runs whose recipes differ in the seed only.

    Args:
        summaries: from :func:`collect`.
        fields: the recipe's fields to show; None shows those that differ. The grouping does not depend on it.
        metrics: top1, top5, ... of the test, or validation_top1, ...; None takes those that were measured.
        sort: a field (ascending) or a metric (best first); a minus in front turns the order round.
    """
    finished = [run for run in summaries if run.state == "finished"]
    differing = _differing(finished)
    shown = _known("field", fields, ("fingerprint", *vars(Recipe()))) if fields is not None else differing
    measured = sorted({name for run in finished for name in _metrics(run)}, key=_metric_order)
    # Metrics nobody measured are an error only when there are runs that could have measured them.
    shown_metrics = metrics_of(run.recipe for run in finished)
    wanted = metrics if metrics is not None else [name for name in shown_metrics if name in measured]
    wanted = _known("metric", wanted, measured) if finished else list(wanted)

    groups: dict[tuple[Any, ...], dict[int, RunSummary]] = {}
    repeated = 0
    for run in finished:
        seeds = groups.setdefault(tuple(_field(run, name) for name in differing), {})
        repeated += run.recipe.seed in seeds
        seeds.setdefault(run.recipe.seed, run)
    rows = []
    for seeds in groups.values():
        runs = [seeds[seed] for seed in sorted(seeds)]
        measures = [tuple(_metrics(run)[name] for run in runs if name in _metrics(run)) for name in wanted]
        times = tuple(float(run.result["seconds"]) for run in runs if "seconds" in run.result)
        rows.append(
            (
                *(_field(runs[0], name) for name in shown),
                *(Measured(values) if values else None for values in measures),
                len(runs),
                Measured(times) if times else None,
            )
        )
    columns = (
        *(Column(name, name, "field") for name in shown),
        *(Column(name, title(name), "accuracy") for name in wanted),
        Column("seeds", "seeds", "count"),
        Column("seconds", "time", "seconds"),
    )
    notes = _notes(summaries, repeated)
    hidden = [name for name in differing if name not in shown]
    if len({row[: len(shown)] for row in rows}) < len(rows):
        notes.insert(0, f"Rows that look equal differ in {', '.join(hidden)}.")
    return Table(columns, tuple(_sorted(columns, rows, sort)), tuple(notes))


def metrics_of(recipes: Iterable[Recipe]) -> list[str]:
    """The metrics to show of runs with these recipes.

    >>> metrics_of([Recipe(), Recipe(measure=(3, 5))])
    ['top1', 'top3', 'top5', 'top10']
    """
    names = {*METRICS, *(f"top{k}" for recipe in recipes for k in recipe.measure)}
    return sorted(names, key=_metric_order)


def title(metric: str) -> str:
    """The heading of a metric.

    >>> title("top5"), title("validation_top1")
    ('top-5', 'validation top-1')
    """
    return metric.replace("_", " ").replace("top", "top-")


def _metrics(run: RunSummary) -> dict[str, float]:
    validation = run.result.get("validation") or {}
    return {**run.result["test"], **{f"validation_{name}": value for name, value in validation.items()}}


def _metric_order(name: str) -> tuple[bool, int, str]:
    digits = "".join(filter(str.isdigit, name))
    return name.startswith("validation"), int(digits or 0), name


def _field(run: RunSummary, name: str) -> Any:
    return (run.result.get("data") or {}).get("fingerprint") if name == "fingerprint" else vars(run.recipe)[name]


def _differing(runs: Sequence[RunSummary]) -> list[str]:
    """The fields with more than one value, without the seed; the data's fingerprint where equal names hide other data."""
    differing = [name for name in vars(Recipe()) if name != "seed" and len({_field(run, name) for run in runs}) > 1]
    if len({(run.recipe.data, _field(run, "fingerprint")) for run in runs}) > len({run.recipe.data for run in runs}):
        differing.insert(0, "fingerprint")
    return differing


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise LabError(f"There is no {what} {name!r}; there are {', '.join(known)}.")
    return list(names)


def _notes(summaries: Sequence[RunSummary], repeated: int) -> list[str]:
    left_out = [run for run in summaries if run.state != "finished"]
    notes = []
    if repeated:
        notes.append(f"{_count(repeated, 'run repeats', 'runs repeat')} a seed of the same setting; the first one counts.")
    if left_out:
        counts = [
            f"{number} {state}" for state in ("failed", "unfinished") if (number := sum(r.state == state for r in left_out))
        ]
        notes.append(f"{_count(len(left_out), 'run is', 'runs are')} not in the table: {', '.join(counts)}.")
        notes += [f"{run.state}: {run.folder}{': ' + run.error if run.error else ''}" for run in left_out]
    return notes


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _sorted(columns: Sequence[Column], rows: list[tuple[Value, ...]], sort: str | None) -> list[tuple[Value, ...]]:
    keys = [column.key for column in columns]
    # Without a wish: by the fields from right to left, so that the first one is the slowest.
    for name in [sort] if sort is not None else [column.key for column in reversed(columns) if column.kind == "field"]:
        reverse = name.startswith("-")
        place = keys.index(_known("column", [name.removeprefix("-")], keys)[0])
        best_first = columns[place].kind == "accuracy"
        present = [row for row in rows if row[place] is not None]
        absent = [row for row in rows if row[place] is None]
        rows = sorted(present, key=lambda row: _order(row[place]), reverse=reverse != best_first) + absent
    return rows


def _order(value: Value) -> tuple[bool, float, str]:
    """Numbers before texts."""
    if isinstance(value, Measured):
        return False, value.mean, ""
    return (False, value, "") if isinstance(value, (int, float)) else (True, 0.0, str(value))


def text(value: Value, kind: str) -> str:
    """A cell as people read it.

    >>> text(Measured((0.5, 0.75)), "accuracy"), text(Measured((75.0,)), "seconds"), text((0.5, 0.0, 0.5), "field")
    ('62.50 ± 17.68', '1.2 min', '0.5, 0, 0.5')
    """
    if isinstance(value, Measured):
        if kind == "seconds":
            return duration(value.mean)
        return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.std is not None else "")
    if isinstance(value, Difference):
        return f"{points(value.paired.difference)} ({p_text(value.p)})"
    if isinstance(value, tuple):
        return ", ".join(text(item, kind) for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    return _MISSING if value is None else str(value)


def points(difference: float) -> str:
    """A difference of fractions in percentage points; what rounds to nothing has no sign.

    >>> points(0.0123), points(-0.00001)
    ('+1.23', '0.00')
    """
    said = f"{100 * difference:+.2f}"
    return said[1:] if float(said) == 0 else said


def p_text(p: float | None) -> str:
    """A p as people read it.

    >>> p_text(0.0123), p_text(1e-9), p_text(None)
    ('p = 0.012', 'p < 0.001', 'no test')
    """
    if p is None:
        return "no test"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def duration(seconds: float) -> str:
    """A time as people read it.

    >>> duration(2.345), duration(600), duration(7200)
    ('2.3 s', '10.0 min', '2.0 h')
    """
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def render(table: Table, format: Format = "terminal", *, width: int | None = None) -> str:
    """The table as text.

    The notes follow the table, as comments in LaTeX. CSV has no place for them: it holds numbers to compute with
    (fractions, not percent; mean and std apart), so show ``table.notes`` elsewhere.

    Args:
        table: what to render.
        format: terminal, markdown, latex or csv.
        width: of the terminal; None takes as much as the table needs.
    """
    if format not in FORMATS:
        raise LabError(f"There is no format {format!r}; there are {', '.join(FORMATS)}.")
    if format == "csv":
        return _csv(table)
    heads = [_head(column) for column in table.columns]
    cells = [[text(value, column.kind) for value, column in zip(row, table.columns, strict=True)] for row in table.rows]
    left = [column.kind == "field" for column in table.columns]
    return {"terminal": _terminal, "markdown": _markdown, "latex": _latex}[format](heads, cells, left, table.notes, width)


def _head(column: Column) -> str:
    return column.title + {"accuracy": " %", "difference": " points"}.get(column.kind, "")


def _terminal(heads: list[str], cells: list[list[str]], left: list[bool], notes: Sequence[str], width: int | None) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    # Text, not str: a name such as [red] is a name and not markup.
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for head, is_left in zip(heads, left, strict=True):
        grid.add_column(Text(head), justify="left" if is_left else "right", overflow="fold")
    for row in cells:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(file=out, width=width or 10_000, color_system=None, legacy_windows=False)
    console.print(grid)
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"


def _markdown(heads: list[str], cells: list[list[str]], left: list[bool], notes: Sequence[str], width: int | None) -> str:
    lines = [heads, [":--" if is_left else "--:" for is_left in left], *cells]
    written = [f"| {' | '.join(map(_markdown_escape, line))} |" for line in lines]
    return "\n".join(written) + "\n" + "".join(f"\n{_markdown_escape(note)}\n" for note in notes)


def _markdown_escape(name: str) -> str:
    for sign in "\\|<*_`[":
        name = name.replace(sign, f"\\{sign}")
    return " ".join(name.split())


def _latex(heads: list[str], cells: list[list[str]], left: list[bool], notes: Sequence[str], width: int | None) -> str:
    lines = [f"\\begin{{tabular}}{{{''.join('l' if is_left else 'r' for is_left in left)}}}", "\\toprule"]
    lines += [" & ".join(map(_latex_escape, heads)) + r" \\", "\\midrule"]
    lines += [" & ".join(map(_latex_escape, row)) + r" \\" for row in cells]
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {' '.join(note.split())}" for note in notes)]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _latex_escape(name: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(name.split()))


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([head for column in table.columns for head in _csv_heads(column)])
    for row in table.rows:
        writer.writerow(
            [cell for value, column in zip(row, table.columns, strict=True) for cell in _csv_cells(value, column.kind)]
        )
    return out.getvalue()


def _csv_heads(column: Column) -> list[str]:
    if column.kind in ("accuracy", "seconds"):
        return [f"{column.key}_mean", f"{column.key}_std"]
    if column.kind == "difference":
        return [f"{column.key}{part}" for part in ("", "_low", "_high", "_p", "_p_holm")]
    return [column.key]


def _csv_cells(value: Value, kind: str) -> list[Any]:
    if isinstance(value, Measured):
        return [value.mean, value.std]
    if isinstance(value, Difference):
        return [value.paired.difference, value.paired.low, value.paired.high, value.paired.p, value.p]
    if value is None:
        return [None] * {"accuracy": 2, "seconds": 2, "difference": 5}.get(kind, 1)
    return [text(value, kind)]


def plot(table: Table, path: str | Path) -> None:
    """Draw the accuracies with their standard deviations: over the field, where one numeric field differs, else as bars.

    Args:
        table: from :func:`table`.
        path: a file that ends in .png, .svg or .pdf.
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise LabError(f"A plot is a .png, .svg or .pdf file, but {path} was asked for.")
    measures = [(place, column) for place, column in enumerate(table.columns) if column.kind == "accuracy"]
    if not table.rows or not measures:
        raise LabError("There is nothing to plot: no finished run has a test accuracy.")
    import matplotlib
    from matplotlib.figure import Figure

    fields = [place for place, column in enumerate(table.columns) if column.kind == "field"]
    fields = [place for place in fields if len({row[place] for row in table.rows}) > 1]
    draw: Callable[..., Figure] = _bars
    if len(fields) == 1:
        along = [row[fields[0]] for row in table.rows]
        if all(type(value) in (int, float) for value in along) and len(set(along)) == len(along):
            draw = _lines
    # The same table gives the same file: no date, and ids that are not random.
    with matplotlib.rc_context({"svg.hashsalt": "anyk", "axes.spines.top": False, "axes.spines.right": False}):
        figure = draw(table, fields, measures)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata=metadata)


# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vP"


def _lines(table: Table, fields: list[int], measures: list[tuple[int, Column]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    place = fields[0]
    rows = sorted(table.rows, key=lambda row: _order(row[place]))
    along = [float(row[place]) for row in rows]  # type: ignore[arg-type]
    for number, (column_place, column) in enumerate(measures):
        points = zip(along, (row[column_place] for row in rows), strict=True)
        drawn = [(x, value.mean, value.std or 0.0) for x, value in points if isinstance(value, Measured)]
        axes.errorbar(
            [x for x, _, _ in drawn],
            [100 * mean for _, mean, _ in drawn],
            [100 * std for _, _, std in drawn],
            label=column.title,
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            capsize=3,
        )
    if min(along) > 0 and max(along) >= 20 * min(along):
        axes.set_xscale("log")
    if len(along) <= 10:
        axes.set_xticks(along, [f"{x:g}" for x in along])
        axes.minorticks_off()
    axes.set_xlabel(table.columns[place].title)
    axes.set_ylabel("accuracy in %, mean ± std")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper right", ncols=len(measures), frameon=False)
    return figure


def _bars(table: Table, fields: list[int], measures: list[tuple[int, Column]]) -> Any:
    from matplotlib.figure import Figure

    names = [", ".join(text(row[place], "field") for place in fields) or "all runs" for row in table.rows]
    thickness = 0.8 / len(measures)
    figure = Figure(figsize=(7, 1.2 + 0.3 * len(names) * (len(measures) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for number, (place, column) in enumerate(measures):
        drawn = [(row_number, row[place]) for row_number, row in enumerate(table.rows)]
        values = [(row_number, value.mean, value.std or 0.0) for row_number, value in drawn if isinstance(value, Measured)]
        heights = [row_number + (number - (len(measures) - 1) / 2) * thickness for row_number, _, _ in values]
        axes.barh(
            heights,
            [100 * mean for _, mean, _ in values],
            thickness * 0.9,
            xerr=[100 * std for _, _, std in values],
            label=column.title,
            color=_COLORS[number % len(_COLORS)],
            error_kw={"capsize": 2, "elinewidth": 1},
        )
        for height, (_, mean, std) in zip(heights, values, strict=True):
            axes.text(100 * (mean + std) + 0.7, height, f"{100 * mean:.2f}", va="center", fontsize=8)
    # A name is text: a dollar sign in it does not begin a formula.
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylabel(", ".join(table.columns[place].title for place in fields))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])  # room for the numbers
    axes.set_xlabel("accuracy in %, mean ± std")
    figure.legend(loc="outside upper right", ncols=len(measures), frameon=False)
    return figure
