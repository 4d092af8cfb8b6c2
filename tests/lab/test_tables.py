"""Numbers are written in one way, whatever they are written in."""

import pytest

from anyk.lab.statistics import Paired
from anyk.lab.tables import Column, Difference, Table, render

TABLE = Table(
    (Column("name", "name", "field"), Column("gain", "gain", "points"), Column("paper", "paper", "signed")),
    (
        ("worse", Difference(Paired(-0.0123, 5), 0.012), -1.23),
        ("same", Difference(Paired(-0.00001, 5), 0.9), -0.001),
        ("better", Difference(Paired(0.0123, 5), 1e-9), 1.23),
    ),
)


@pytest.mark.parametrize(("format", "minus"), [("terminal", "−"), ("markdown", "−"), ("latex", "$-$")])
def test_what_people_read_has_one_minus_and_no_negative_nothing(format, minus):
    worse, same, better = (line for line in render(TABLE, format).splitlines() if any(row[0] in line for row in TABLE.rows))
    assert worse.count(f"{minus}1.23") == 2
    assert same.count("0.00") == 2
    assert not any(sign + "0.00" in same for sign in "-−+$")
    assert better.count("+1.23") == 2


def test_what_programs_read_has_a_hyphen():
    rows = [line.split(",") for line in render(TABLE, "csv").splitlines()[1:]]
    assert [float(row[-1]) for row in rows] == [-1.23, 0.0, 1.23]
    assert [float(row[1]) for row in rows] == [-0.0123, -0.00001, 0.0123]
