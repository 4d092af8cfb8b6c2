"""Run folders as tables: collect them, group them by what differs, and show mean ± std over the seeds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from anyk.lab.coverage import SHARES, Coverage
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.losses import SETTINGS, settings_of
from anyk.lab.run.run_folder import FORMAT, Run
from anyk.lab.tables import Column, Measured, Table, Value, order, text, title

METRICS = ("top1", "top5", "top10")
#: shown after these
RANKING = ("mrr", "ndcg10")
State = Literal["finished", "failed", "unfinished"]


@dataclass(frozen=True)
class RunSummary:
    """What a run folder says. ``result`` is its result.json, empty while there is none; ``error`` is why it failed."""

    folder: Path
    state: State
    config: Config
    result: dict[str, Any]
    error: str = ""

    @cached_property
    def idle(self) -> frozenset[str]:
        """The fields of the config that its loss does not take."""
        return frozenset(SETTINGS) - settings_of(self.config.loss)


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
        raise LabError(f"There is no run in {', '.join(map(str, searched))}: `anyk train` and `anyk compare` make them.")
    return list(found.values())


def _summary(folder: Path) -> RunSummary:
    run, file = Run(folder), folder / "result.json"
    result, error = run.result(), run.error()
    if result is not None:
        if result.get("format") != FORMAT:
            found = f"{file} has the format {result.get('format')!r}"
            raise LabError(f"{found}, but this version of anyk reads format {FORMAT}: train the run again.")
        for part in ("config", "data", "validation", "test"):
            if not isinstance(result.get(part), dict):
                raise LabError(f"{file} has no {part!r}: train the run again.")
        for part in ("validation", "test"):
            if not all(_is_number(value) for value in result[part].values()):
                raise LabError(f"{file} has a {part} value that is not a number: train the run again.")
        if not _is_number(result.get("seconds")) or not isinstance(result["data"].get("fingerprint"), str):
            raise LabError(f"{file} does not say how long the run took, and on what data: train the run again.")
        return RunSummary(folder, "finished", Config.from_json(result["config"], str(file)), result)
    if error is not None:
        # A traceback ends with what went wrong.
        return RunSummary(folder, "failed", run.config(), {}, error.rpartition("\n")[2].strip() or "error.txt is empty")
    return RunSummary(folder, "unfinished", run.config(), {})


def _is_number(value: Any) -> bool:
    # A loss may be NaN or infinite, but an integer in a file may be longer than any number.
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**62)


def table(
    summaries: Sequence[RunSummary],
    *,
    fields: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    sort: str | None = None,
) -> Table:
    """One row for each setting: the runs whose configs differ in the seed only.

    Args:
        summaries: from :func:`collect`.
        fields: the config's fields to show; None shows those that differ. The grouping does not depend on it.
        metrics: top1, top5, mrr, ndcg10, ... of the test, or validation_top1, ...; None takes those that were measured. Without
            one of validation, the runs of a tuning, which are not tested, are left out where others are.
        sort: a field (ascending) or a metric (best first); a minus in front turns the order round.
    """
    finished = [run for run in summaries if run.state == "finished"]
    tested = [run for run in finished if run.config.tested]
    validated = any(name.startswith("validation_") for name in metrics or ())
    untested = 0 if validated or not tested else len(finished) - len(tested)
    finished = tested if untested else finished
    differing = _differing(finished)
    shown = _known("field", fields, ("fingerprint", *vars(Config()))) if fields is not None else differing
    measured = sorted({name for run in finished for name in _metrics(run)}, key=_metric_order)
    # Metrics nobody measured are an error only when there are runs that could have measured them.
    shown_metrics = [*metrics_of(run.config for run in finished), *RANKING]
    wanted = metrics if metrics is not None else [name for name in shown_metrics if name in measured]
    wanted = _known("metric", wanted, measured) if finished else list(wanted)

    groups: dict[tuple[Any, ...], dict[int, RunSummary]] = {}
    repeated = 0
    for run in finished:
        seeds = groups.setdefault(tuple(_field(run, name) for name in differing), {})
        repeated += run.config.seed in seeds
        seeds.setdefault(run.config.seed, run)
    rows = []
    grouped = [[seeds[seed] for seed in sorted(seeds)] for seeds in groups.values()]
    lists = [_guesses(runs) if metrics is None else None for runs in grouped]
    listed = any(lists)
    for runs, guesses in zip(grouped, lists, strict=True):
        measures = [tuple(_metrics(run)[name] for run in runs if name in _metrics(run)) for name in wanted]
        times = tuple(float(run.result["seconds"]) for run in runs)
        rows.append(
            (
                *(_field(runs[0], name) for name in shown),
                *(Measured(values) if values else None for values in measures),
                *([guesses] if listed else []),
                len(runs),
                Measured(times),
            )
        )
    columns = (
        *(Column(name, name, "field") for name in shown),
        *(Column(name, title(name), "accuracy") for name in wanted),
        *([Column("guesses", f"guesses for {', '.join(map(str, SHARES))} %", "guesses")] if listed else []),
        Column("seeds", "seeds", "count"),
        Column("seconds", "time", "seconds"),
    )
    notes = _notes(summaries, repeated)
    if untested:
        told = f"Runs of a tuning, which are not tested, are left out: {untested}."
        notes.insert(0, f"{told} --metrics validation_top1 shows all.")
    hidden = [name for name in differing if name not in shown]
    if len({row[: len(shown)] for row in rows}) < len(rows):
        notes.insert(0, f"Rows that look equal differ in {', '.join(hidden)}.")
    return Table(columns, tuple(_sorted(columns, rows, sort)), tuple(notes))


def curves(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """One row for each evaluation of each run, finished or not: the run, what tells it from the others, and what was measured.

    Args:
        summaries: from :func:`collect`.
    """
    fields = dict.fromkeys(["loss", "seed", *_varied(summaries)])
    rows = []
    for run in summaries:
        own = {name: _field(run, name) for name in fields}
        about = {"run": str(run.folder), **{name: "" if own[name] is None else text(own[name], "field") for name in own}}
        for line in Run(run.folder).metrics():
            if not isinstance(line.get("validation"), dict):
                raise LabError(f"{run.folder / 'metrics.jsonl'} has a line without validation: train the run again.")
            validation = {f"validation_{name}": value for name, value in line["validation"].items()}
            now = {f"{name}_now": line.get(name) for name in ("learning_rate", "temperature")}
            measured = {name: line.get(name) for name in ("step", "epoch", "train_loss")}
            rows.append({**about, **measured, **validation, **now, "seconds": line.get("seconds")})
    return rows


def metrics_of(configs: Iterable[Config]) -> list[str]:
    """The top-k accuracies to show of runs with these configs.

    >>> metrics_of([Config(), Config(measure=(3, 5))])
    ['top1', 'top3', 'top5', 'top10']
    """
    names = {*METRICS, *(f"top{k}" for config in configs for k in config.measure)}
    return sorted(names, key=_metric_order)


def _guesses(runs: Sequence[RunSummary]) -> tuple[int | None, ...] | None:
    """How many guesses cover each of some shares of the test examples, as a mean over the runs; None where none kept ranks."""
    classes = runs[0].result["data"].get("classes")
    read = [Run(run.folder).load_tensors("test.safetensors", ("ranks",)) for run in runs]
    kept = [found[0]["ranks"].numpy() for found in read if found is not None and "ranks" in found[0]]
    if not any(map(len, kept)) or not isinstance(classes, int):
        return None
    return tuple(Coverage.of("", np.concatenate(kept), classes).guesses.values())


def _metrics(run: RunSummary) -> dict[str, float]:
    validation = {f"validation_{name}": value for name, value in run.result["validation"].items()}
    return {**run.result["test"], **validation}


def _metric_order(name: str) -> tuple[bool, bool, int, str]:
    """Those of the test first, of these top-k, and by k."""
    digits = "".join(filter(str.isdecimal, name))[:9]
    own = name.removeprefix("validation_")
    return name != own, not own.startswith("top"), int(digits or 0), name


def _field(run: RunSummary, name: str) -> Any:
    """The value of a field, in words where it is nothing; None where the run does not depend on it."""
    if name == "fingerprint":
        return run.result["data"]["fingerprint"]
    if name in run.idle:
        return None
    value = vars(run.config)[name]
    return "none" if value is None else value


def _differing(runs: Sequence[RunSummary]) -> list[str]:
    """The fields with more than one value, without the seed; the data's fingerprint where equal names hide other data."""
    differing = _varied(runs)
    if len({(run.config.data, _field(run, "fingerprint")) for run in runs}) > len({run.config.data for run in runs}):
        differing.insert(0, "fingerprint")
    return differing


def _varied(runs: Sequence[RunSummary]) -> list[str]:
    """The fields of the configs with more than one value, without the seed; that some do not depend on one is no value."""
    return [name for name in vars(Config()) if name != "seed" and len({_field(run, name) for run in runs} - {None}) > 1]


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise LabError(f"There is no {what} {name!r}; there are {', '.join(known)}.")
    return list(names)


def _notes(summaries: Sequence[RunSummary], repeated: int) -> list[str]:
    left_out = [run for run in summaries if run.state != "finished"]
    notes = []
    if repeated:
        notes.append(f"Runs that repeat a seed of the same setting: {repeated}; the first one counts.")
    if left_out:
        failed = sum(run.state == "failed" for run in left_out)
        notes.append(f"Runs that are not in the table: {failed} failed, {len(left_out) - failed} unfinished.")
        notes += [f"{run.state}: {run.folder}{': ' + run.error if run.error else ''}" for run in left_out]
    return notes


def _sorted(columns: Sequence[Column], rows: list[tuple[Value, ...]], sort: str | None) -> list[tuple[Value, ...]]:
    keys = [column.key for column in columns]
    # Without a wish: by the fields from right to left, so that the first one is the slowest.
    for name in [sort] if sort is not None else [column.key for column in reversed(columns) if column.kind == "field"]:
        reverse = name.startswith("-")
        place = keys.index(_known("column", [name.removeprefix("-")], keys)[0])
        best_first = columns[place].kind == "accuracy"
        present = [row for row in rows if row[place] is not None]
        absent = [row for row in rows if row[place] is None]
        rows = sorted(present, key=lambda row: order(row[place]), reverse=reverse != best_first) + absent
    return rows
