"""The guide: its commands parse, its pages run, its links lead somewhere. The site: test_site.py."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
import torch
import tyro
from PIL import Image

import anyk
import lab_data
from anyk.lab import cli
from anyk.lab.cli.parsing import arguments, normalized
from anyk.operators.base import has

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
    return [words for words in (*lines, *inline) if not re.search(r"\bNAME\b|…|--help", words)]


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
            assert words[0] in cli.COMMANDS, command
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
    kind = lab_data.write_photos(tmp_path / "photos", classes=17, per_class=4, size=(12, 12)) / "kind 0"
    Image.open(next(kind.iterdir())).save(kind / "001.jpg")
    kind.rename(tmp_path / "photos" / "husky")
    lab_data.write_table(tmp_path / "table.csv", classes=8, per_class=20, width=2)
    lab_data.write_items(tmp_path / "baskets.txt")
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


# --- links -----------------------------------------------------------------------------------------------------------


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


# --- operators as tools -----------------------------------------------------------------------------------------------


def tables(page: Path) -> list[list[list[str]]]:
    """The cells of every table of a page, with the header."""
    blocks = re.findall(r"(?:^ *\|.*\|$\n?)+", page.read_text(), re.MULTILINE)
    rows = ([line.strip().strip("|").split("|") for line in block.splitlines()] for block in blocks)
    return [[[cell.strip() for cell in row] for row in table] for table in rows]


def test_what_each_operator_can_do_is_as_the_page_tells():
    (table,) = (table for table in tables(DOCS / "operators.md") if table[0][:2] == ["", "mask"])
    told = {}
    for names, *cells in table[2:]:
        for name in re.findall(r"`(\w+)`", names):
            told[name] = [bool(cell) and not cell.startswith("no") for cell in cells[:-1]]
    kinds = {kind.__name__: kind for kind in anyk.Operator.__subclasses__() if kind.__module__.startswith("anyk.")}
    expected = {
        name: [has(kind, "mask"), kind.real_k, has(kind, "ranks"), has(kind, "sort"), has(kind, "threshold")]
        for name, kind in kinds.items()
    }
    assert told == expected


def jumps(kind: str, swap: str, n: int = 16, k: int = 4) -> torch.Tensor:
    """By how much the mask jumps where two neighbours cross, the most of its entries, for many rows."""
    scores = torch.randn(400, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ordered, order = scores.sort(-1, descending=True)
    middle, network = (ordered[:, 1:] + ordered[:, :-1]) / 2, anyk.SortingNetwork(kind, 1.0, swap)
    found = []
    for place in range(n - 1):
        sides = (torch.stack([middle[:, place] + step, middle[:, place] - step], -1) for step in (1e-7, -1e-7))
        before, after = (network.mask(scores.scatter(1, order[:, place : place + 2], side), k) for side in sides)
        found.append((before - after).abs().amax(-1))
    return torch.stack(found)


def test_the_page_tells_how_a_networks_mask_jumps():
    (table,) = (table for table in tables(DOCS / "operators.md") if table[0][0] == "swap")
    assert {row[0].strip("`") for row in table[2:]} == set(anyk.registry.SWAPS)
    for swap, *cells in table[2:]:
        for kind, cell in zip(("splitter", "bitonic", "odd_even"), cells, strict=True):
            mean, largest = map(float, cell.split("/"))
            found = jumps(kind, swap.strip("`"))
            assert (mean, largest) == (
                pytest.approx(found.mean().item(), abs=1e-3),
                pytest.approx(found.max().item(), abs=1e-2),
            )
