"""The guide: its commands parse, its pages run, its reference is whole, its links lead somewhere. The site: test_site.py."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tyro
from PIL import Image

from anyk.lab import cli
from anyk.lab.cli.parsing import arguments, normalized

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """The commands in a page's indented lines, in its blocks of shell, and in its sentences."""
    text = page.read_text()
    shell = "\n".join(re.findall(r"```(?:console|sh|bash|shell)\n(.*?)```", text, re.DOTALL))
    lines = [
        *re.findall(r"^    (anyk \w+.*)$", text, re.MULTILINE),
        *re.findall(r"^(?:\$ )?(anyk \w+.*)$", shell, re.MULTILINE),
    ]
    inline = re.findall(r"`(anyk \w+ [^`]+)`", text)  # the bare name of a command is no command
    found = [*lines, *(words for words in inline if words.split()[1] in cli.COMMANDS)]
    return [words for words in found if not re.search(r"\bNAME\b|…|--help", words)]


def parse(words: list[str]) -> None:
    """As the command line does, but nothing is run."""

    def stub(function):
        @functools.wraps(function)
        def parsed(*arguments, **keywords):
            return 0

        return parsed

    stubs = {name: stub(function) for name, function in cli.COMMANDS.items()}
    tyro.extras.subcommand_cli_from_dict(stubs, prog="anyk", args=words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_pages_are_commands(page):
    for command in commands(page):
        try:
            words = shlex.split(command, comments=True)[1:]
            parse(normalized(words, arguments(cli.COMMANDS[words[0]])))
        except SystemExit:
            pytest.fail(f"{page.name}: {command}")


def test_a_wrong_command_would_be_noticed():
    with pytest.raises(SystemExit):
        parse(["compare", "--no-such-option"])
    assert len({command for page in PAGES for command in commands(page)}) > 20


# --- your own data ----------------------------------------------------------------------------------------------------

SMALL = {"compare": ["--epochs", "1", "--budget", "1", "--seeds", "1", "--quiet"], "train": ["--epochs", "1", "--quiet"]}


def test_own_data_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    """Every command and every block of the page, in order; training is cut short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    write_photos(tmp_path / "photos")
    write_table(tmp_path / "table.csv")
    write_baskets(tmp_path / "baskets.txt")
    page = (DOCS / "own-data.md").read_text()
    done = []
    for block, command in re.findall(r"```python\n(.*?)```|^    (anyk [^\n]*)$", page, re.DOTALL | re.MULTILINE):
        if block.startswith("# my_models.py"):
            Path("my_models.py").write_text(block)
        elif block:
            exec(compile(block, "own-data.md", "exec"), {})
        if block:
            continue
        words = shlex.split(command)[1:]
        with pytest.raises(SystemExit) as end:
            cli.main([*words, *SMALL.get(words[0], [])])
        expected = 3 if words[0] == "compare" else 0  # cut short, nothing is decided
        assert end.value.code == expected, (command, capsys.readouterr().err)
        done.append(words[0])
    assert set(done) == {"embed", "compare", "import", "train"}
    shown = capsys.readouterr().out
    *_, text, by_head, by_network = shown.splitlines()  # the guesses of the last two blocks
    assert re.fullmatch(r"(\w[\w ]* [01]\.\d\d(, |$)){3}", text)
    for guesses in (by_head, by_network):
        ((first, *others),) = ast.literal_eval(guesses)
        assert [len(others), type(first[0]), type(first[1])] == [2, str, float]
    for report in ("photos-report", "pixels-report", "texts-report", "baskets-report"):
        assert "<html" in (tmp_path / report / "report.html").read_text()


def write_photos(folder: Path) -> None:
    """Noise in seventeen colours: more classes than m, four pictures each."""
    random = np.random.default_rng(0)
    for name in ("husky", "malamute", *(f"kind {number}" for number in range(15))):
        (folder / name).mkdir(parents=True)
        colour = random.integers(0, 200, 3)
        for copy in range(4):
            pixels = (colour + random.integers(0, 55, (12, 12, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{copy + 1:03}.jpg")


def write_table(file: Path) -> None:
    random = np.random.default_rng(0)
    rows = [f"{x:.3f},{y:.3f},kind {number % 8}" for number, (x, y) in enumerate(random.standard_normal((160, 2)))]
    file.write_text("\n".join(["width,height,kind", *rows]) + "\n")


def write_baskets(file: Path) -> None:
    """Thirty items, each mostly followed by the same few; the last of one line is in no other."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(60):
        items = [int(random.integers(30))]
        while len(items) < 8:
            items.append((2 * items[-1] + int(random.integers(3))) % 30)
        lines.append(" ".join(f"item{item}" for item in items))
    file.write_text("\n".join([*lines, "item1 item2 item3 new"]) + "\n")


# --- reference, links and pictures ------------------------------------------------------------------------------------


def public_names() -> set[str]:
    """As docs/conf.py has them, which needs Sphinx to be imported."""
    listed = ast.literal_eval(re.search(r"^PUBLIC_MODULES = (.+)$", (DOCS / "conf.py").read_text(), re.MULTILINE)[1])
    names = {f"{name}.{word}" for name in listed for word in importlib.import_module(name).__all__}
    modules = {name for name in names if inspect.ismodule(attribute(name))}
    assert modules <= set(listed)
    return names - modules


def attribute(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_the_reference_names_every_public_name():
    listed = re.findall(r"^- `(anyk[\w.]*)`: \S", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert public_names() <= set(listed)
    assert len(set(listed)) == len(listed)
    for name in listed:
        assert inspect.getdoc(attribute(name)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_of_the_pages_exist(page):
    """As a code host follows them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, link


DEFERRED = re.compile(r"\bsee\b|\bas (?:for|there|in)\b(?! ``torch)")
"""Words that send the reader of a parameter elsewhere; what PyTorch's functions take is known."""


def documented(thing: object) -> dict[str, str]:
    """The parameters in the docstring, each with what is said of it."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.getdoc(thing) or "", re.MULTILINE)
    entries = re.split(r"^    (?=\S)", section[1], flags=re.MULTILINE)[1:] if section else []
    return dict(entry.split(":", 1) for entry in entries)


@pytest.mark.parametrize("name", sorted(public_names()))
def test_parameters_are_told_where_they_stand(name):
    thing = attribute(name)
    if not callable(thing) or name in {"anyk.lab.Report", "anyk.registry.Registry", "anyk.registry.ExtensionError"}:
        return  # nobody calls them
    told = documented(thing)
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert parameter.name in told
    for parameter, words in told.items():
        assert parameter.isidentifier(), f"{parameter}: one by one"
        assert not DEFERRED.search(words), (parameter, words)


def load_pictures():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_drawn_the_same_each_time(tmp_path):
    pictures = load_pictures()
    for name in ("first", "second"):
        pictures.idea(tmp_path / f"{name}.svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_every_picture_of_the_guide_has_its_command():
    pictures = load_pictures()
    by_evidence = set(
        re.findall(r"\(images/([\w-]+\.svg)\)", (DOCS / "results.md").read_text() + (DOCS / "pays.md").read_text())
    )
    made_here = {"idea.svg", *pictures.COMMANDS, *pictures.PLOTS, *pictures.PAGES}
    assert {file.name for file in pictures.IMAGES.iterdir()} == made_here | by_evidence
    assert all(file.stat().st_size < 100_000 for file in pictures.IMAGES.iterdir())
    for command in pictures.COMMANDS.values():
        parse(command.split())
