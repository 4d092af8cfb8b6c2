"""The page: one file without a network, every name escaped, whole whatever is missing."""

import base64
import dataclasses
import html
import html.parser
import re

import pytest

import made
from anyk.lab.comparison import report_page
from anyk.lab.comparison.outcome import LEARNING_RATE_OF, ByClass, Confusion, Example, Guess, Moves, Try
from anyk.lab.comparison.snippet import code
from anyk.lab.comparison.verdict import notes, verdict
from anyk.lab.errors import Failure

VOID = {"meta", "img", "br", "hr", "link", "input"}
INLINE = {"span", "strong", "tspan"}


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
        self.words += [] if tag in INLINE else [" "]
        self.ids += [given["id"]] if "id" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.words += [] if tag in INLINE else [" "]

    def handle_data(self, data):
        self.words.append(data)


def read(compared):
    source = report_page.render(compared)
    reader = Reader(source)
    for tag, attributes in reader.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "href", "action") or re.match(r"data:image/(png|svg\+xml);base64,", value)
        if tag == "img":
            assert attributes["alt"]
    assert not re.search(r"https?://|@import|url\((?!#)", source)
    assert len(reader.ids) == len(set(reader.ids))
    assert "NaN" not in source
    assert not re.search(r"\bnan\b|\binf\b", source)
    return reader, " ".join("".join(reader.words).split())


def charts(reader):
    """The SVG of the page's charts."""
    start = "data:image/svg+xml;base64,"
    sources = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    return [base64.b64decode(source.removeprefix(start)).decode() for source in sources if source.startswith(start)]


def methods():
    found = [
        made.method(name, made.accuracies(0.6 + shift, 0.8 + 2 * shift, 0.9 + shift), epochs=12)
        for name, shift in (("softmax", 0.0), ("splitter", 0.01), ("lapsum", 0.005))
    ]
    return [dataclasses.replace(method, hyperparameter="temperature") for method in found]


def full():
    confusions = [Confusion("otter", "seal", 30, 12), Confusion("seal", "otter", 3, 40), Confusion("shrew", "mouse", 1, 0)]
    counted = made.by_class([5, 9, 7, 7], [9, 2, 7, 8], confusions=confusions)
    control = made.method(LEARNING_RATE_OF + "lapsum", made.accuracies(0.602, 0.802, 0.9), tries=())
    return made.measured(
        *methods(), controls=[control], moves=made.moves(6), by_class=counted, unreadable=("cats/broken.jpg", "dogs/cut.png")
    )


def test_everything_is_on_the_page():
    compared = full()
    reader, words = read(compared)
    for sentence in verdict(compared) + notes(compared):
        assert sentence in words.replace("\N{NON-BREAKING HYPHEN}", "-")
    for method in compared.all_methods:
        assert method.name in words
    for method in compared.methods:
        assert " ".join(code(method.config, 100).split()) in words
    for fact in (compared.command, "312", "145", "9f86d081884c7d65", "torch", "budget", "row 4", "#7", "cats/broken.jpg"):
        assert fact in words
    assert sum(tag == "img" for tag, _ in reader.tags) == 8
    trade, curves = charts(reader)
    for name in (method.name for method in compared.methods):
        assert f">{name}<" in trade
        assert f">{name}<" in curves
    assert compared.controls[0].name in trade
    assert sum(attributes.get("class") == "chosen" for tag, attributes in reader.tags if tag == "td") == 3
    assert sum(attributes.get("class") == "headline" for _, attributes in reader.tags) == 1


def test_every_metric_has_its_difference_in_points_and_examples():
    compared = full()
    _, words = read(compared)
    table = words[words.index("time per run") : words.index("Test accuracy, mean")]
    _, splitter, lapsum, control = re.split(r"splitter|(?<!rate of )lapsum|softmax, learning", table)
    for row in (splitter, lapsum, control):
        assert len(re.findall(r"Δ [+−0][\d.]+ points \([+−\d.,]+ examples?\)", row)) == 3
    # What is judged is tested: top-1 and top-5, of the methods and not of the control.
    assert [row.count(" p ") for row in (splitter, lapsum, control)] == [2, 2, 0]
    assert [len(re.findall(r"[+−][\d.]+ to [+−][\d.]+", row)) for row in (splitter, lapsum, control)] == [2, 2, 0]


def test_other_metrics_are_folded_away_below():
    plain, compared = report_page.render(full()), made.with_others(full())
    assert "MRR" not in plain
    folded = re.compile(r"<details><summary>MRR, NDCG@5, NDCG@10, macro top-1, macro top-5.*?</details>\n", re.DOTALL)
    shown = report_page.render(compared)
    [part] = folded.findall(shown)
    assert part.count("Δ&nbsp;") == 15  # of each method and control but softmax
    assert not re.search(r"\bp [=&]|examples\)", part)
    # All the rest is as it was: nothing is drawn of them.
    assert folded.sub("", shown).split() == plain.split()


def test_how_long_the_list_must_be():
    lists = (made.coverage("softmax", 1, 2, 4, 8, 1200), made.coverage("splitter", 1, 2, 3, 7, None))
    compared = made.measured(made.SOFTMAX, made.method("splitter", made.shifted()), coverages=lists)
    reader, _ = read(compared)
    words = " ".join("".join(reader.words).split())
    assert "guesses that cover 50 % 80 % 90 % 95 % 99 % softmax 1 2 4 8 1,200 splitter 1 2 3 7 –" in words
    charts = [given["alt"] for tag, given in reader.tags if tag == "img"]
    assert any("over k" in alt for alt in charts)
    bare, _ = read(dataclasses.replace(compared, coverages=()))
    assert "guesses that cover" not in "".join(bare.words)


def test_without_a_test_there_is_no_word_of_intervals():
    capped = [dataclasses.replace(method, capped="--budget 3") for method in methods()]
    _, words = read(made.measured(*capped))
    assert not re.search(r"\bp [=<]|interval|Interval", words)


def test_classes_that_gain_and_lose_are_sorted_and_counted():
    before = [5] * 30
    after = [5 + number for number in (*range(-1, -13, -1), *range(18))]
    _, words = read(made.comparison(*methods(), by_class=made.by_class(before, after)))
    part = words[
        words.index("top-5 Classes that gain: 17, by 153 hits. Classes that lose: 12, by 78.") : words.index(
            "top-1 Classes that gain"
        )
    ]
    gained, lost = part.split("lost most")
    # class 29 gains most; of three seeds with ten examples
    assert "class 29 +17 5 22 30 class 28 +16 5 21 30" in gained
    assert gained.count("class ") == lost.count("class ") == 10
    assert "class 11 −12 5 -7 30 class 10 −11 5 -6 30" in lost
    assert "class 12" not in part  # neither gains nor loses


def of_sequences(kind, context):
    data = {**made.comparison().data, "kind": "sequences", "context": 6, "tokens": kind}
    return made.measured(*methods(), data=data, moves=made.moves(4, image=False, context=context))


@pytest.mark.parametrize(
    ("kind", "context", "shown"),
    [
        ("python", ("def", "f", "(", "<newline>", "…", "."), "def f ( <newline> … . ?"),
        ("items", ("Emma (1996)", "…", "Heat (1995)"), "Emma (1996) · … · Heat (1995) ?"),
    ],
)
def test_of_sequences_the_context_stands_where_images_do(kind, context, shown):
    reader, words = read(of_sequences(kind, context))
    examples = words[words.index("What moved") :]
    assert examples.count(f"{shown} beaver row") == 4
    assert len(charts(reader)) == sum(tag == "img" for tag, _ in reader.tags) == 2  # none of examples


def all_named(name, method):
    """A comparison in which everything has this name, but for the method."""
    tests = made.accuracies(0.6, 0.8, 0.9)
    guesses = ((Guess(name, 0.5),), (Guess(name),), (6, 1))
    hits = {"top1": (3,), "top5": (400_000,)}, {"top1": (4,), "top5": (300_000,)}
    return made.comparison(
        made.method("softmax", tests, epochs=3),
        made.method(method, tests, epochs=3),
        controls=(made.method(LEARNING_RATE_OF + method, made.accuracies(0.602, 0.802, 0.9), tries=()),),
        data={"name": name, "classes": 3, "tokens": "words"},
        command=name,
        settings={name: name, "metric": "mean"},
        environment={name: {name: name}},
        moves=Moves(method, 5, 0, 1, 0, (Example(name, name, "in", *guesses, made.png(), (name,)),)),
        by_class=ByClass(method, (0, 1), (name,), (1_000_000,), *hits, (Confusion(name, name, 200_000, 100_000),)),
        unreadable=(name,),
        failures=(Failure(name, name),),
    )


def test_names_are_escaped():
    evil = '<script>alert("1")</script> $x'
    compared = all_named(evil, evil)
    reader, words = read(compared)
    assert not any("<script" in chart for chart in charts(reader))
    assert words.count("alert(") > 10
    assert "<script" not in report_page.render(compared)
    assert "<script" not in report_page.embed(compared)


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
        made.measured(*(made.method(name, made.accuracies(0.6, 0.8)) for name in ("softmax", "splitter")), ks=(1,)),
        made.measured(*(made.method(name, made.accuracies(0.6, 0.8, 0.9)) for name in ("softmax", "splitter")), ks=(10,)),
        made.comparison(
            made.method(
                "splitter", made.accuracies(0.6, 0.8), tries=(Try(1.0, 1.0, 20, (None,)), Try(1.0, None, 20, (float("nan"),)))
            )
        ),
    ],
)
def test_whatever_is_missing(compared):
    _, words = read(compared)
    for method in compared.methods:
        assert method.name in words


def test_a_notebook_shows_the_page_in_a_frame():
    compared = full()
    frame = report_page.embed(compared)
    [source] = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(source) == report_page.render(compared)


LONG = "a name without any end " + "x" * 80


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("compared", [made.with_others(full()), all_named(LONG, "error:lapsum")], ids=["full", "long"])
def test_in_a_browser_nothing_scrolls_sideways(tab, tmp_path, compared, width, dark):
    (tmp_path / "report.html").write_text(report_page.render(compared), encoding="utf-8")
    tab.open(tmp_path / "report.html", width, 800, dark=dark, touch=width == 360)
    tab.run("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert tab.run("document.documentElement.scrollWidth") == width
    assert tab.complaints == []
    assert all(url.startswith(("file:", "data:")) for url in tab.requests)
    assert tab.run("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
