"""The study on choosing features: its order, its rule, and what the guide shows of it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "evidence"))

import selection  # noqa: E402


def results(accuracy, seconds=1.0, sets=selection.FIRST):
    """All runs of some sets: accuracy(set, method) in each split, with a spread of 1 % either side."""
    return {
        cell: {
            "validation": 0.5 + (cell[3] == 0),
            "test": accuracy(cell[0], cell[2]) + 0.01 * (cell[1] % 2) if cell[3] == 0 else 0.0,
            "seconds": seconds if cell[2] == "mask" else 1.0,
            "chosen": [1, 2],
        }
        for cell in selection.cells()
        if cell[0] in sets
    }


def ahead(*names, by=0.1):
    return lambda name, method: 0.6 + by * (method == "mask" and name in names)


def behind(*names, by=0.1):
    return lambda name, method: 0.6 - by * (method == "mask" and name in names)


def test_what_decides_is_run_first():
    cells = selection.cells()
    assert len(cells) == len(set(cells)) == 7 * 5 * 30
    assert {cell[0] for cell in cells[: 4 * 5 * 30]} == set(selection.FIRST)
    quick = cells[: 4 * 5 * 21]
    assert not {"STG", "LassoNet"} & {cell[2] for cell in quick}
    assert [cell[1] for cell in quick] == sorted(cell[1] for cell in quick)


def test_the_try_with_the_best_validation_counts():
    row = selection.rows(results(ahead("isolet")), "isolet")["mask"]
    assert row["tests"] == [70, 71, 70, 71, 70]
    assert row["tries"] == [0] * 5
    assert row["mean"] == 70.4
    assert row["error"] == round(np.std(row["tests"], ddof=1) / np.sqrt(5), 2)


@pytest.mark.parametrize(("by", "tied"), [(0.0, True), (0.002, True), (0.003, False)])
def test_one_standard_error_of_the_best_other(by, tied):
    found = selection.verdict(selection.rows(results(behind("mnist", by=by)), "mnist"))
    assert found["best or tied"] is tied  # the standard error is 0.24 %


def test_slowest():
    rows = selection.rows(results(ahead(), seconds=1.1), "mnist")
    assert selection.verdict(rows)["slowest"] is True
    assert selection.verdict(rows | {"LassoNet": {"failure": "did not end"}})["slowest"] is False


@pytest.mark.parametrize(
    ("lost", "on"),
    [((), True), (("isolet",), True), (("madelon5",), True), (("isolet", "madelon20"), False), (("isolet", "mnist"), False)],
)
def test_it_ends_after_the_first_three_unless_two_are_won(lost, on):
    done = results(behind(*lost))
    assert selection.goes_on(done) is on
    rest = selection.left(done)
    assert {cell[0] for cell in rest} == ({"mice", "digits", "made"} if on else set())


def test_what_did_not_end_is_not_tried_again():
    done = {("isolet", 0, "LassoNet", 0): {"failure": "did not end", "seconds": 600}}
    rest = selection.left(done)
    assert not any(cell[0] == "isolet" and cell[2] == "LassoNet" for cell in rest)
    assert ("mnist", 0, "LassoNet", 0) in rest
    assert selection.summary(done)["sets"]["isolet"]["methods"]["LassoNet"] == {"failure": "did not end"}


def test_parts_do_not_meet():
    y, groups = np.arange(120) // 5 % 4, np.arange(120) // 5
    for split in range(2):
        train, validation, test = selection.divide(y, groups, split)
        assert sorted([*train, *validation, *test]) == list(range(120))
        assert not set(groups[train]) & set(groups[validation]) | set(groups[train]) & set(groups[test])
        assert not set(groups[validation]) & set(groups[test])


def test_a_cut_line_is_left_out(tmp_path):
    (tmp_path / "cells.jsonl").write_text('{"cell": ["mnist", 0, "F test", 0], "test": 0.7}\n{"cell": ["mni')
    assert selection.read(tmp_path) == {("mnist", 0, "F test", 0): {"test": 0.7}}


def test_the_table_of_the_guide_is_that_of_the_summary():
    table = "\n".join(selection.table(json.loads(selection.SUMMARY.read_text())))
    assert any(table in page.read_text() for page in (ROOT / "docs").glob("*.md")), "python evidence/selection.py table"
