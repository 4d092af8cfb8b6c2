"""The guide: its commands parse, its pages run, its links lead somewhere. The site: test_site.py."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
import tyro
from PIL import Image

import lab_data
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
