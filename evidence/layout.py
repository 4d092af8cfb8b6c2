"""How the pages of results are laid out: tables of cells, what is missing from them, numbers as words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import study
from anyk.lab import statistics, tables
from anyk.lab.tables import Column, Difference, Measured, Table
from claims import TITLES, Evidence, difference, p_k_title
from study import Cell, cell

COMMAND = "python evidence/study.py run --data embeddings=FOLDER --runs RUNS"


def paragraph(text: str) -> list[str]:
    """Lines of a width that is read with ease."""
    return textwrap.wrap(" ".join(text.split()), 125, break_long_words=False, break_on_hyphens=False)


def section_table(
    evidence: Evidence,
    cells: Sequence[Cell],
    baseline: Callable[[Cell], Cell],
    fields: Mapping[str, Callable[[Cell], Any]],
    metrics: Sequence[str] = ("top1", "top5"),
) -> Table:
    """One row a cell: accuracies, and the differences to the cell's baseline on the same seeds, with Holm over the table."""
    tests: list[statistics.Paired | None] = []
    for each in cells:
        other = baseline(each)
        tests += [None if other == each else difference(metric, [each], [other]).paired(evidence) for metric in metrics]
    corrected = iter(statistics.holm([None if test is None else test.p for test in tests]))
    pairs = iter(tests)
    rows = []
    for each in cells:
        row: list[Any] = [tell(each) for tell in fields.values()]
        for metric in metrics:
            values = tuple(evidence.values(each, metric).values())
            test, p = next(pairs), next(corrected)
            row += [Measured(values) if values else None, None if test is None else Difference(test, p)]
        seeds = len(evidence.values(each, metrics[0]))
        diverged = evidence.diverged(each)
        row.append(f"{seeds}" + (f" ({diverged} diverged)" if diverged else "") if seeds or diverged else "missing")
        rows.append(tuple(row))
    columns = [Column(name, name, "field") for name in fields]
    for metric in metrics:
        title = tables.title(metric)
        columns += [
            Column(metric, title, "accuracy"),
            Column(f"{metric}_difference", f"{title} difference (95 % interval)", "difference"),
        ]
    columns.append(Column("seeds", "seeds", "count"))
    return Table(tuple(columns), tuple(rows))


def lines_of(titles: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table of words; the first ``left`` columns are flush left, the others, of numbers, flush right.

    >>> lines_of(["loss", "top-1"], [("softmax", 64.2)])
    ['| loss | top-1 |', '| :-- | --: |', '| softmax | 64.2 |']
    """
    marks = [":--"] * left + ["--:"] * (len(titles) - left)
    return [f"| {' | '.join(map(str, row))} |" for row in (titles, marks, *rows)]


def grid_table(evidence: Evidence, data: str, p_ks: Sequence[str], methods: Sequence[str]) -> list[str]:
    """The paper's layout: a method in a row, a P_K in a column, top-1 | top-5 in a cell."""
    rows = []
    for method in methods:
        words = []
        for p_k in p_ks:
            each = cell(data, method, p_k, 10)
            top1, top5 = (tuple(evidence.values(each, metric).values()) for metric in ("top1", "top5"))
            own = (method in study.TUNED_WITH) == (p_k == each.p_k and method in study.TUNED_WITH)
            shown = f"{100 * statistics.mean(top1):.2f} / {100 * statistics.mean(top5):.2f}" if top1 and own else "–"
            words.append(shown if not 0 < len(top1) < 5 or not own else f"{shown} ({len(top1)})")
        rows.append((TITLES[method], *words))
    return lines_of(["", *map(p_k_title, p_ks)], rows)


def missing(evidence: Evidence, cells: Sequence[Cell]) -> tuple[int, int]:
    """Runs that are there, and runs that were planned."""
    have = sum(len(evidence.values(each, "top1")) + evidence.diverged(each) for each in cells)
    return have, sum(each.seeds for each in cells)


def markdown(table: Table) -> str:
    """The table, its differences with their confidence intervals."""

    def words(value: Any) -> Any:
        if not isinstance(value, Difference):
            return value
        return f"{with_interval(value.paired)}, {tables.p_text(value.p)}"

    columns = tuple(replace(each, kind="count") if each.kind == "difference" else each for each in table.columns)
    rows = tuple(tuple(words(value) for value in row) for row in table.rows)
    return tables.render(Table(columns, rows, table.notes), "markdown")


def shown(evidence: Evidence, name: str, data: str, table: Table) -> list[str]:
    """A table with what is missing from it; without any run, that alone."""
    told = completeness(evidence, name, data)
    if missing(evidence, study.section(name, data))[0] == 0:
        return [f"### {data.capitalize()}", "", f"No run yet: `{COMMAND} --on {data} --only {name}`", ""]
    return [f"### {data.capitalize()}", "", markdown(table), *([told, ""] if told else [])]


def completeness(evidence: Evidence, name: str, data: str) -> str:
    """What is missing from a part, and the command that runs it; empty where nothing is."""
    have, planned = missing(evidence, study.section(name, data))
    if have == planned:
        return ""
    return f"{have} of {planned} runs of this part are there. The others: `{COMMAND} --on {data} --only {name}`"


def with_interval(found: statistics.Paired) -> str:
    """A difference in points, with its 95 % interval."""
    interval = "" if found.low is None or found.high is None else f" ({100 * found.low:+.2f} … {100 * found.high:+.2f})"
    return f"{100 * found.difference:+.2f}{interval}"


def escaped(text: str) -> str:
    """Text that may stand in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("*", "\\*")


def title_of(each: Cell) -> str:
    """The method of a cell as it is written."""
    return TITLES[each.method]


def temperature_of(each: Cell) -> float | str:
    """The temperature of a drop-in."""
    return "" if each.method == "softmax" else dict(each.changes).get("temperature", 1.0)


def without(each: Cell, name: str) -> Cell:
    """The cell without one of its changes."""
    return replace(each, changes=tuple(change for change in each.changes if change[0] != name))


def size_of(each: Cell) -> int:
    """How many classes a cell ranks."""
    setting = study.SETTINGS[each.data].config
    classes = 100 if each.data == "embeddings" else int(setting.data.partition(":")[2])
    return int(dict(each.changes).get("m", setting.m) or classes)
