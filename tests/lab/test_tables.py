"""Numbers are written in one way, whatever they are written in."""

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


def test_what_people_read_has_one_minus_and_no_negative_nothing():
    worse, same, better = render(TABLE, "markdown").splitlines()[2:]
    assert (worse, better) == ("| worse | −1.23 | −1.23 |", "| better | +1.23 | +1.23 |")
    assert same == "| same | 0.00 | 0.00 |"
    assert "$-$1.23" in render(TABLE, "latex")


def test_what_programs_read_has_a_hyphen():
    rows = [line.split(",") for line in render(TABLE, "csv").splitlines()[1:]]
    assert [float(row[-1]) for row in rows] == [-1.23, 0.0, 1.23]
    assert [float(row[1]) for row in rows] == [-0.0123, -0.00001, 0.0123]
