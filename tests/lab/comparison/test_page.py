"""The page: one file without a network, every name escaped, whole whatever is missing."""

import html.parser
import re

import pytest

import made
from anyk.lab.comparison import page
from anyk.lab.comparison.outcome import Example, Guess, Moves, Try
from anyk.lab.comparison.snippet import code
from anyk.lab.comparison.verdict import notes, verdict
from anyk.lab.errors import Failure

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Reader(html.parser.HTMLParser):
    """Checks that tags are closed in order; collects tags, text and images."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.words, self.ids = [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.ids += [given["id"]] if "id" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(compared):
    source = page.render(compared)
    reader = Reader(source)
    for tag, attributes in reader.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "href", "action") or value.startswith("data:image/png;base64,")
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden")
    assert not re.search(r"https?://|@import|url\((?!#)", source)
    assert len(reader.ids) == len(set(reader.ids))
    assert "NaN" not in source
    assert not re.search(r"\bnan\b|\binf\b", source)
    return reader, " ".join(" ".join(reader.words).split())


def full():
    methods = [
        made.method(name, made.accuracies(0.6 + shift, 0.8 + 2 * shift, 0.9 + shift), epochs=12)
        for name, shift in (("softmax", 0.0), ("splitter", 0.01), ("lapsum", 0.005))
    ]
    return made.comparison(*methods, moves=made.moves(6))


def test_everything_is_on_the_page():
    compared = full()
    reader, words = read(compared)
    for sentence in verdict(compared) + notes(compared):
        assert sentence in words
    for method in compared.methods:
        assert method.name in words
        assert " ".join(code(method.recipe, 100).split()) in words
    for value in (
        compared.command,
        "312",
        "145",
        "9f86d081884c7d65",
        "torch",
        "budget",
        "Moved into the first five (3 of 312)",
    ):
        assert value in words
    charts = [attributes["aria-label"] for tag, attributes in reader.tags if tag == "svg" and "aria-label" in attributes]
    assert len(charts) == 8
    assert sum(tag == "img" for tag, _ in reader.tags) == 6
    assert sum(attributes.get("class") == "chosen" for tag, attributes in reader.tags if tag == "td") == 3


def test_the_same_outcome_is_the_same_page(tmp_path):
    page.write(full(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page.render(full())
    assert len(page.render(full())) < 100_000


def test_names_are_escaped():
    evil = '<script>alert("1")</script>'
    tests = made.accuracies(0.6, 0.8, 0.9)
    moves = Moves(evil, 0, 1, 0, (Example(0, evil, "in", (Guess(evil, 0.5),), (Guess(evil),), made.png()),))
    compared = made.comparison(
        made.method("softmax", tests, epochs=3),
        made.method(evil, tests, epochs=3),
        data={"name": evil, "classes": 3},
        command=evil,
        settings={evil: evil, "metric": "mean"},
        environment={evil: {evil: evil}},
        moves=moves,
        failures=(Failure(evil, evil),),
    )
    _, words = read(compared)
    assert words.count("alert(") > 10
    assert "<script" not in page.render(compared)


@pytest.mark.parametrize(
    "compared",
    [
        made.comparison(),
        made.comparison(made.method("softmax", [])),
        made.comparison(made.method("softmax", made.accuracies(0.6, 0.8), tries=())),
        made.comparison(made.method("splitter", made.accuracies(0.6, 0.8, seeds=1), epochs=1)),
        made.comparison(*(made.method(name, made.accuracies(0.6, 0.8, seeds=1), epochs=5) for name in ("softmax", "splitter"))),
        made.comparison(*(made.method(name, [{"top1": 1.0, "top5": 1.0}] * 3, epochs=2) for name in ("softmax", "splitter"))),
        made.comparison(*(made.method(name, [{"top1": 0.0}] * 3) for name in ("softmax", "splitter")), classes=2),
        made.comparison(*(made.method(name, made.accuracies(0.2, 0.3, 0.4), epochs=3) for name in made.LOSSES), classes=2000),
        made.comparison(made.method("softmax", made.accuracies(0.6, 0.8)), data={}, settings={}, moves=made.moves(0)),
        made.comparison(made.method("softmax", made.accuracies(0.6, 0.8)), moves=made.moves(3, image=False)),
        made.comparison(
            made.method("splitter", made.accuracies(0.6, 0.8), tries=(Try(1.0, 1.0, None), Try(1.0, 2.0, float("nan"))))
        ),
    ],
)
def test_whatever_is_missing(compared):
    _, words = read(compared)
    for method in compared.methods:
        assert method.name in words


def test_curves():
    long = made.method("softmax", made.accuracies(0.6, 0.8, seeds=2), epochs=1000)
    assert all(len(curve) <= 150 and curve[-1][0] == 1000 for curve in page._curves(long, "top1"))
    # One seed stopped early: the mean ends with it.
    assert page._mean_curve([[(1, 10), (2, 20), (3, 30)], [(1, 20), (2, 40)]]) == [(1, 15), (2, 30)]
    assert page._mean_curve([[(1, 10)], [(2, 20)]]) == []


@pytest.mark.parametrize(("low", "high"), [(0, 1), (61.2, 68.1), (93.41, 93.42), (0, 1000), (1, 2)])
def test_ticks_are_few_and_inside(low, high):
    ticks = page._Axis(low, high, 0, 100).ticks
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
