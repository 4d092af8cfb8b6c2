"""`anyk report`."""

from pathlib import Path
from typing import Annotated

import tyro

from anyk.lab.cli.words import say, warn
from anyk.lab.tables import Format


def command(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = (Path("anyk-runs"),),
    *,
    format: Format = "terminal",
    fields: tuple[str, ...] | None = None,
    metrics: tuple[str, ...] | None = None,
    sort: str | None = None,
    plot: Path | None = None,
    curves: Path | None = None,
) -> int:
    """Any set of runs as a table, and as a plot.

    Args:
        folders: run folders, or folders that hold some.
        format: of the table.
        fields: the recipe's fields to show; by default those that differ.
        metrics: top1, top5, mrr, ndcg10, validation_top1, ...; by default those that were measured.
        sort: a field or a metric; --sort=-top1 for the worst first.
        plot: also draw to this .png, .svg or .pdf file: lines over the number that was swept, else top-1 against top-k.
        curves: also write every evaluation of every run to this .csv file.
    """
    from anyk.lab import files, tables
    from anyk.lab.run import summaries

    if curves is not None:
        files.refuse_to_overwrite(curves, force=True)
    found = summaries.collect(folders)
    table = summaries.table(found, fields=fields, metrics=metrics, sort=sort)
    if curves is not None:
        files.write_atomically(curves, tables.csv_of(summaries.curves(found)).encode())
    if plot is not None:
        from anyk.lab import plots

        plots.plot(table, plot, without=() if metrics is not None else summaries.RANKING)
    say(tables.render(table, format))
    if format == "csv":  # which has no place for them
        for note in table.notes:
            warn(note)
    return 0
