"""The words of the command line: its help, and what it says where words are wrong."""

import re
from pathlib import Path

import pytest
import tyro

import anyk as package
import lab_data
import made
from anyk.lab import cli
from anyk.lab.cli import parsing
from anyk.lab.run.config import Config

CONFIG = ("data", "model", "loss", "training", "output")
GROUPS = {
    "compare": ("data", "comparison", "model", "loss", "training"),
    "train": CONFIG,
    "report": ("output",),
    "predict": ("data", "model", "output"),
    "export": ("output",),
    "reproduce": ("output",),
    "embed": ("model", "output"),
    "import": ("data", "output"),
    "info": (),
}
QUICK = ("--epochs", "1", "--batch-size", "32", "--m", "8", "--quiet")


@pytest.fixture
def data(tmp_path):
    return str(lab_data.write_embedding_set(tmp_path / "points"))


def boxes(page: str) -> dict[str, str]:
    """The groups of a page of help, by title, as tyro writes them where it does not know the terminal."""
    return dict(re.findall(r"^ ([a-z ]+?) *\n -{10,} \n(.*?)(?=\n \S|\Z)", page, re.DOTALL | re.MULTILINE))


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_shows_every_command_once_and_the_version(anyk, word):
    code, page, err = anyk(word)
    assert (code, err) == (0, "")
    assert "--import MODULE" in page
    assert package.__version__ in page
    assert sorted(re.findall(r"^ *• ([a-z]+) ", page, re.MULTILINE)) == sorted(cli.COMMANDS)
    assert anyk("--version") == (0, f"anyk {package.__version__}\n", "")


@pytest.mark.parametrize("command", GROUPS)
def test_help_of_a_command_is_grouped(anyk, command):
    code, page, err = anyk(command, "--help")
    assert (code, err) == (0, "")
    assert page.splitlines()[0].endswith("OPTIONS] [DATA]") == (command in ("compare", "train"))
    found = boxes(page)
    groups = [f"{group} options" for group in GROUPS[command]]
    assert [title for title in found if title not in ("positional arguments", "options")] == groups
    for title in groups:
        assert "--" in found[title]
    for name, argument in parsing.arguments(cli.COMMANDS[command]).items():
        where = [title for title, rows in found.items() if re.search(rf"--{name}\b(?!-)", rows)]
        assert argument.positional or where, name
    # The table that unknown options are found by has all that tyro shows.
    rows = re.findall(r"^  (--?[a-z].*)", page, re.MULTILINE)
    shown = {option for row in rows for option in re.findall(r"(?<=--)[a-z0-9-]+", row.split("   ")[0])}
    assert {"help"} < shown <= {"help", *parsing.arguments(cli.COMMANDS[command])}


def test_completions_for_a_shell_are_still_written(anyk):
    code, out, _ = anyk("--tyro-print-completion", "bash")
    assert (code or 0) == 0
    assert all(command in out for command in cli.COMMANDS)


# --- options that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    {
        "lr": "learning-rate",
        "num-epochs": "epochs",
        "opt": "optimizer",
        "temp": "temperature or --temperature-end",
        "batchsize": "batch-size",
        "losses": "loss",
        "size": "image-size or --batch-size",
    }.items(),
)
def test_what_people_type_for_an_option(anyk, typed, meant):
    code, out, err = anyk("train", f"--{typed}", "3")
    assert (code, out, err) == (2, "", f"anyk: --{typed} is not an option of anyk train: did you mean --{meant}?\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train", "points", "--lr=3", "--bs", "4"),
            "--lr is not an option of anyk train: did you mean --learning-rate? "
            "--bs is not an option of anyk train: did you mean --batch-size?",
        ),
        (("train", "--gpu"), "--gpu is not an option of anyk train: anyk train --help lists the options."),
        (
            ("train", "--data", "points"),
            "--data is not an option of anyk train: DATA is given without an option, anyk train DATA.",
        ),
        (("compare", "--seed", "1"), "--seed is not an option of anyk compare: did you mean --seeds?"),
        (
            ("predict", "run", "new.npz", "--topk", "3"),
            "--topk is not an option of anyk predict: anyk predict --help lists the options.",
        ),
        (("train", "a", "b", "c"), "unexpected 'b' and 'c' besides DATA: anyk train --help says what it takes."),
        (("info", "x"), "unexpected 'x': anyk info --help says what it takes."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_words_that_a_command_does_not_know_are_one_line(anyk, words, message):
    assert anyk(*words) == (2, "", f"anyk: {message}\n")


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--learning-rate", "fast"), "--learning-rate should be a number, but is 'fast'."),
        (("train", "--epochs"), "--epochs should be an integer, but has no value."),
        (("train", "--loss", "--epochs", "3"), "--loss should be a text, but has no value."),
        (("train", "--optimizer", "adm"), "--optimizer should be adam, adamw, sgd, but is 'adm'."),
        (("train", "--m", "all"), "--m should be an integer or auto or none, but is 'all'."),
        (("reproduce", "depths", "--jobs", "-1"), "--jobs should be at least 0"),
        (("train", "--p-k", ".5,x"), "--p-k should be numbers, but is '.5 x'."),
        (("train", "--log", "excel"), "--log should be some of tensorboard, wandb, mlflow, but is 'excel'."),
        (("train", "--loss", "spliter"), None),
        (("predict", "-o"), "--out should be a path or none, but has no value."),
        (("export",), "RUN should be given: anyk export --help tells what that is."),
        (("import",), "give the file to import."),
        ((), "a command should be given: the commands are compare, train,"),
        (("--lr", "3"), "--lr should stand after a command, or be --help or --version: the commands are compare,"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_values_are_one_line_of_the_same_style(anyk, words, message):
    code, out, err = anyk(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"anyk: {message or ''}")
    assert not re.search("[╭│]", err)


def test_where_tyro_has_changed_its_own_words_remain(anyk, monkeypatch):
    monkeypatch.delattr(tyro, "_errors")
    code, _, err = anyk("train", "--epochs", "x")
    assert code == 2
    assert "--epochs" in err


def test_fields_of_a_config_are_guessed_like_options():
    with pytest.raises(package.lab.errors.LabError, match=r"unknown field 'bs': did you mean batch_size\?"):
        Config.from_json({"bs": 3})


# --- runs that had ended ----------------------------------------------------------------------------------------------


def test_train_says_that_a_run_had_ended(anyk, data):
    words = ("train", data, "--loss", "lapsum", *QUICK)
    assert anyk(*words)[::2] == (0, "")
    for more in ((), ("--json",)):
        code, out, err = anyk(*words, *more)
        assert (code, "test" in out) == (0, True)
        assert err.startswith("anyk-runs/points-lapsum-seed0 had already finished")
    assert anyk(*words, "--seed", "1")[::2] == (0, "")


def test_compare_says_how_many_had_ended(anyk, data, tmp_path):
    words = ("compare", data, "--losses", "lapsum", "--seeds", "1", "--budget", "1", *QUICK)
    assert anyk(*words)[2] == ""
    runs = list(Path("anyk-runs/compare-points/runs").glob("*/result.json"))
    assert anyk(*words)[2].endswith(f" and are reused: {len(runs)}.\n")
    made.run_folder(tmp_path / "anyk-runs/compare-points/runs/other", Config(), {"top1": 0.5, "top5": 0.9})
    assert anyk(*words)[2].endswith(f" {len(runs)}.\n")  # not those that this comparison does not need


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "first", "order"),
    [
        ("knd", "length,colour,kind,width\n3,red,0,4\n", "kind, length, colour, width"),  # like the word
        ("foo", "length,width\n", "length, width"),
    ],
)
def test_import_lists_all_columns_the_likeliest_first(anyk, tmp_path, typed, first, order):
    (tmp_path / "t.csv").write_text(first)
    message = f"t.csv has no column '{typed}': its columns are, the likeliest first, {order}."
    assert anyk("import", "t.csv", "--label-column", typed) == (2, "", f"anyk: {message}\n")
