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
    from anyk.lab import tables
    from anyk.lab.run import summaries

    table = summaries.table(summaries.collect(folders), fields=fields, metrics=metrics, sort=sort)
    if plot is not None:
        from anyk.lab import plots

        plots.plot(table, plot)
    say(tables.render(table, format))
    if format == "csv":  # which has no place for them
        for note in table.notes:
            warn(note)
    return 0
