"""The command line: every command from words to files, and what it says when something is wrong."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import lab_data
import made
from anyk.lab import Report, cli
from anyk.lab.cli.words import WholeConfig
from anyk.lab.comparison import compare
from anyk.lab.run.config import Config


@pytest.fixture
def data(tmp_path):
    return str(lab_data.write_embedding_set(tmp_path / "points"))


QUICK = ("--epochs", "2", "--batch-size", "32", "--m", "8", "--quiet")


@pytest.mark.parametrize(
    "form", [("--p-k", ".5,0,.5"), ("--p-k=.5,0,.5",), ("--p_k", ".5,", "0,.5"), ("--p-k", ".5", "0", ".5")]
)
@pytest.mark.parametrize("none", [("--m", "none"), ("--m=NONE",), ("--m", "None")])
def test_lists_with_commas_and_none_in_small_letters(anyk, monkeypatch, form, none):
    seen = []

    def train(config: WholeConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setitem(cli.COMMANDS, "train", train)
    assert anyk("train", "none", *form, *none, "--p-k-end", "none") == (0, "", "")
    assert seen == [Config(data="none", p_k=(0.5, 0.0, 0.5), m=None)]


def test_compare_prints_a_verdict_and_code_that_runs(anyk, data, tmp_path):
    words = ["compare", data, "--losses", "softmax", "ksubset", "--effort", "quick"]
    code, out, err = anyk(*words, "--budget", "1", *QUICK)
    assert (code, err) == (3, "")
    assert re.search("\nNot decided: --budget 1 .* softmax and ksubset", out)
    assert "import" not in out  # nothing to paste where nothing was decided
    code, out, err = anyk(*words, *QUICK)
    assert code == 0
    pasted = out[out.index("import") : out.index("Report:")]
    names: dict[str, object] = {}
    exec(pasted, names)
    assert "criterion" in names
    folder = tmp_path / "anyk-runs" / "compare-points"
    assert {path.name for path in folder.iterdir()} == {".lock", "results.json", "report.html", "model.safetensors", "runs"}
    assert "anyk compare" in (folder / "report.html").read_text()
    code, out, _ = anyk(*words, *QUICK, "--json")
    assert code == 0
    assert [method["name"] for method in json.loads(out)["methods"]] == ["softmax", "ksubset"]
    # One that has nothing to tell leaves the report of the other there, and does not pass it off as its own.
    code, out, _ = anyk(*words, *QUICK, "--learning-rate", "0.3", "--time", "0.001s")
    assert code == 3
    assert "Report:" not in out


def test_train_then_report_in_every_format(anyk, data, tmp_path):
    for seed in ("0", "1"):
        code, out, err = anyk("train", data, "--loss", "lapsum", "--seed", seed, *QUICK)
        assert (code, err) == (0, "")
        assert "test" in out
    code, out, _ = anyk("train", data, "--loss", "lapsum", *QUICK, "--json")
    assert json.loads(out) == json.loads((tmp_path / "anyk-runs" / "points-lapsum-seed0" / "result.json").read_text())
    for form, sign in (("terminal", "─"), ("markdown", "|"), ("latex", r"\toprule"), ("csv", ",")):
        code, out, _ = anyk("report", "anyk-runs", "--format", form, "--plot", "plot.svg")
        assert code == 0
        assert sign in out
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    assert anyk("report", "anyk-runs", "--curves", "curves.csv")[0] == 0
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0].startswith("run,loss,seed,step,epoch,train_loss,validation_top1,validation_top5,")
    assert len(lines) == 1 + 2 * 2


def test_compare_with_a_failed_run_ends_with_1(anyk, data):
    diverging = ("--optimizer", "sgd", "--learning-rate", "1e29", "--weight-decay", "1e9", "--seeds", "1", "--budget", "2")
    code, out, _ = anyk("compare", data, "--losses", "lapsum", *diverging, *QUICK, "--out", "out")
    assert code == 1
    assert out.count("lower the learning rate") == 1
    assert "2 runs failed (" in out  # one of each loss, however many rates diverged
    assert anyk("compare", data, "--losses", "lapsum", *diverging, *QUICK, "--out", "out", "--json")[0] == 1


def test_compare_ends_with_0_when_it_is_decided(anyk, data, tmp_path):
    words = ("compare", data, "--losses", "ksubset", "--seeds", "3", "--time", "1h", *QUICK)
    code, out, err = anyk(*words)
    assert (code, err) == (0, "")
    assert "Not decided" not in out
    results = json.loads((tmp_path / "anyk-runs" / "compare-points" / "results.json").read_text())
    assert results["derived"]["decided"] is True
    assert f"To paste, for {results['derived']['chosen']}:" in out


def test_compare_gives_the_lines_of_what_the_test_confirms_beside_those_to_use(anyk, monkeypatch):
    """Validation has picked splitter, which the test does not confirm; lapsum it does."""
    pick = made.with_validation(made.method("splitter", made.shifted()), 0.95)
    other = made.method("lapsum", made.shifted(top1=0.02), config=Config(loss="lapsum", temperature=0.25))
    report = Report(**vars(made.measured(made.SOFTMAX, pick, made.with_validation(other, 0.1))), folder="out")
    monkeypatch.setattr(compare, "run", lambda config, command: report)
    code, out, _ = anyk("compare", "anything", "--losses", "splitter", "lapsum")
    assert code == 0
    first, second = out.split("To paste, for softmax:")[1].split("On the test, lapsum is better than softmax; to paste it:")
    assert "torch.nn.CrossEntropyLoss()" in first
    assert "anyk.LapSum(temperature=0.25)" in second
    sure = made.measured(made.SOFTMAX, made.with_validation(other, 0.95))
    monkeypatch.setattr(compare, "run", lambda config, command: Report(**vars(sure), folder="out"))
    assert "to paste it" not in anyk("compare", "anything", "--losses", "lapsum")[1]


def test_a_folder_of_another_config_is_left_alone(anyk, data):
    words = ("train", data, "--loss", "lapsum", *QUICK)
    assert anyk(*words)[0] == 0
    code, _, err = anyk(*words, "--temperature", "2")
    assert code == 2
    assert "points-lapsum-seed0 holds a run of another config (temperature was 1.0 and is now 2.0)" in err
    assert err.endswith(": choose another folder with --out.\n")


def test_train_says_when_more_training_would_help(anyk, data):
    words = ("train", data, "--loss", "softmax", "--quiet", "--batch-size", "500")
    code, out, _ = anyk(*words, "--out", "first")
    assert code == 0
    hint = "raise --epochs or --learning-rate"
    assert re.search(f"near chance.*{hint}", out.splitlines()[-1])
    assert hint not in anyk(*words, "--learning-rate", "1e-3", "--epochs", "20", "--out", "second")[1]  # as the user wished
    assert hint not in anyk(*words, "--learning-rate", "0.3", "--out", "third")[1]


def test_import_and_embed(anyk, tmp_path):
    np.savez(tmp_path / "arrays.npz", x=np.random.default_rng(0).normal(size=(60, 4)), y=np.arange(60) % 6)
    code, out, _ = anyk("import", "arrays.npz")
    assert (code, out) == (0, "arrays is ready: anyk compare arrays\n")
    assert anyk("train", "arrays", "--epochs", "1", "--quiet")[0] == 0
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 30), (80 * number, 100, 20)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "cat" / "broken.png").write_bytes(b"nonsense")
    (tmp_path / "mine.py").write_text(
        "import torch, numpy\n"
        "def make():\n"
        "    flat = torch.nn.Flatten()\n"
        "    return flat, lambda image: torch.tensor(numpy.array(image.resize((4, 4))) / 255.0).permute(2, 0, 1).float()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        code, out, err = anyk("embed", "photos", "--backbone", "mine:make", "--quiet")
    finally:
        sys.path.remove(str(tmp_path))
    assert code == 0
    assert out.endswith("photos-embeddings: 6 examples, 2 classes, 48 dimensions\n")
    assert "skipped cat/broken.png" in err


def test_reproduce_leaves_other_folders_alone(anyk, tmp_path):
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "dataset.json").write_text("mine")
    for words in (("table2", "--smoke"), ("table1", "--data", "cifar100=nowhere")):
        code, _, err = anyk("reproduce", *words, "--quiet", "--out", "mine")
        assert (code, "mine holds files that are not of a run (data)" in err) == (2, True)
    assert [path.name for path in (tmp_path / "mine").rglob("*")] == ["data", "dataset.json"]
    assert (tmp_path / "mine" / "data" / "dataset.json").read_text() == "mine"
    assert anyk("reproduce", "table1", "--data", "cifar100=nowhere", "--out", "new")[0] == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("experiment", ["table5", "backbones"])
def test_reproduce_smoke(anyk, experiment):
    words = ("reproduce", experiment, "--smoke", "--quiet", "--format", "markdown")
    code, out, err = anyk(*words)
    assert (code, err) == (0, "")
    assert "| paper |" in out
    assert "difference" not in out
    code, again, err = anyk(*words)
    assert (code, again) == (0, out)
    assert re.fullmatch(r"Runs that had already finished .*: \d+\.\n", err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "nowhere"), "nowhere does not exist; DATA may be glyphs"),
        (("train", "points", "--p-k", "0.5", "0.6"), "p_k: expected probabilities that sum to 1"),
        (("train", "points", "--device", "nonsense", "--quiet"), "device 'nonsense' cannot be used here"),
        (("report", "points", "--curves", "no/where.csv"), "no should be a folder that exists"),
        (("reproduce", "table2"), "table2 needs data that only you can give"),
        (("reproduce", "table2", "--data", "a", "b"), "--data should be NAME=PATH"),
        (("reproduce", "table2", "--data", "imagenet1k=nothere"), "nothere does not exist; DATA may be"),
        (("compare", "points", "--losses", "softmax"), "losses should name something to compare with softmax"),
        (("compare", "points", "--time", "soon"), "such as 90s, 10m or 2h, but is 'soon'"),
        (("trian", "points"), "there is no command 'trian': did you mean anyk train?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(anyk, data, tmp_path, words, message):
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = anyk(*words)
    assert code == 2
    assert out == ""
    assert err.startswith("anyk: ")
    assert message in err
    assert err.count("\n") == 1
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before  # nothing half-written stays


def test_the_real_process_shows_no_traceback(tmp_path):
    folder = lab_data.write_embedding_set(tmp_path / "points")
    file = folder / "train.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    command = [sys.executable, "-m", "anyk", "compare", str(folder), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "train.safetensors" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
