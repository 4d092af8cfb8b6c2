"""`anyk report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from anyk.lab.cli.words import Group, say, warn
from anyk.lab.tables import Format


@dataclass(frozen=True)
class Output:
    """What is written."""

    format: Format = "terminal"
    """format of the table"""
    plot: Path | None = None
    """also draw to this .png, .svg or .pdf file: lines over the number that was varied, else top-1 against top-k"""
    curves: Path | None = None
    """also write every evaluation of every run to this .csv file"""


def command(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = (Path("anyk-runs"),),
    *,
    fields: tuple[str, ...] | None = None,
    metrics: tuple[str, ...] | None = None,
    sort: str | None = None,
    output: Group[Output],
) -> int:
    """Show any set of runs as a table, and with --plot as a plot.

    Args:
        folders: run folders, or folders that hold some.
        fields: the config's fields to show; by default those that differ.
        metrics: top1, top5, mrr, ndcg10, validation_top1, ...; by default those that were measured, of tested runs.
        sort: a field or a metric; --sort=-top1 for the worst first.
    """
    from anyk.lab import files, tables
    from anyk.lab.run import summaries

    plot, curves = output.plot, output.curves
    if curves is not None:
        files.refuse_to_overwrite(curves, force=True)
    found = summaries.collect(folders)
    table = summaries.table(found, fields=fields, metrics=metrics, sort=sort)
    if curves is not None:
        files.write_atomically(curves, tables.csv_of(summaries.curves(found)).encode())
    if plot is not None:
        from anyk.lab import plots

        plots.plot(table, plot, without=() if metrics is not None else summaries.RANKING)
    say(tables.render(table, output.format))
    if output.format == "csv":  # which has no place for them
        for note in table.notes:
            warn(note)
    return 0
