import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from anyk.lab.config import ComparisonConfig


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(240, 4))
    labels = rows[:, :3].argmax(1)
    lines = ["a,b,c,d,label", *(",".join(f"{x:.3f}" for x in row) + f",k{label}" for row, label in zip(rows, labels, strict=True))]
    (tmp_path / "points.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "points.csv"


def test_compare(anyk, table):
    code, out, err = anyk("compare", table, "--losses", "error", "--effort", "quick", "--epochs", 3, "--jobs", 2, "--out", "o")
    assert code == 0 and "criterion = " in out and "Report: o/report.html" in out and len(out.splitlines()) <= 25
    assert "The label is 'label'" in err and "trainings" in err
    content = json.loads((table.parent / "o" / "results.json").read_text())
    assert content["decided"] and str(table.parent) not in json.dumps(content)
    code, out, _ = anyk("compare", table, "--losses", "error", "--effort", "quick", "--epochs", 3, "--jobs", 2, "--out", "o", "--json")
    assert code == 0 and json.loads(out)["look"] == 1


def test_train_and_predict(anyk, table):
    code, out, _ = anyk("train", table, "--loss", "lapsum", "--epochs=5", "--out", "run", "--p_k", ".5,.5", "--quiet")
    assert code == 0 and "top-1" in out
    code, out, _ = anyk("predict", "run", table, "--k", 1)
    assert code == 0 and len(out.splitlines()) == 241
    code, out, _ = anyk("train", table, "--loss", "lapsum", "--epochs=5", "--out", "run", "--p_k", ".5,.5", "--quiet", "--json")
    assert json.loads(out)["config"]["p_k"] == [0.5, 0.5]


def test_import_and_info(anyk, tmp_path):
    np.savez(tmp_path / "a.npz", X=np.random.default_rng(0).normal(size=(30, 4)), y=np.arange(30) % 3)
    code, out, _ = anyk("import", tmp_path / "a.npz", tmp_path / "set")
    assert code == 0 and "30 examples of 3 classes" in out
    code, out, _ = anyk("info")
    assert code == 0 and "torch" in out
    assert "torch" in json.loads(anyk("info", "--json")[1])


MISTAKES = {
    "no command": ((), ""),
    "an unknown command": (("compar",), "did you mean anyk compare?"),
    "an unknown option": (("compare", "--epoch", "3"), "did you mean --epochs?"),
    "a word for a number": (("compare", "--epochs", "many"), "--epochs should be an integer, but is 'many'"),
    "a number out of range": (("compare", "--q", "3"), "between 0 and 1"),
    "no such choice": (("compare", "--effort", "huge"), "--effort should be quick, normal, thorough"),
    "an unknown loss": (("train", "--loss", "softmaxx"), "softmaxx"),
    "no such data": (("compare", "nowhere.csv"), "nowhere.csv does not exist"),
    "one loss": (("compare", "--losses", "softmax"), "alone"),
    "a lacking value": (("compare", "--epochs"), "--epochs"),
    "a bad time": (("compare", "--time", "soon"), "90s, 10m or 2h"),
    "an import": (("--import", "no_such_module", "info"), "no_such_module"),
    "predict without files": (("predict", "x"), "FILE"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_line_and_exit_code_2(anyk, name):
    words, says = MISTAKES[name]
    code, out, err = anyk(*words)
    assert code == 2 and says in err + out
    if name != "no command":
        assert out == "" and len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_none_and_lists(anyk, table):
    code, out, _ = anyk("train", table, "--m", "none", "--ks", "1,2", "--epochs", 1, "--out", "r", "--quiet", "--json")
    assert code == 0 and json.loads(out)["config"]["ks"] == [1, 2] and json.loads(out)["config"]["m"] is None


def test_help_names_every_option_and_its_meaning(anyk):
    code, out, _ = anyk("compare", "--help")
    assert code == 0
    for name in ComparisonConfig.__dataclass_fields__:
        assert name == "data" or f"--{name.replace('_', '-')}" in out
    assert "how thoroughly to tune" in out


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_need_no_torch(word):
    """Quick, that is: what takes time is not loaded."""
    script = "import sys, anyk_cli\ntry: anyk_cli.main()\nfinally: sys.stderr.write(str('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script, word], capture_output=True, text=True, env=environment(), check=True)
    assert "anyk" in done.stdout and done.stderr == "False"


def test_an_early_interrupt_is_quiet(table):
    process = subprocess.Popen(
        [sys.executable, "-m", "anyk_cli", "compare", table, "--quiet"], stderr=subprocess.PIPE, text=True, env=environment(), cwd=table.parent
    )
    time.sleep(0.15)
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors and process.returncode in (130, -2)


def test_paths_are_in_the_report_only_when_asked(anyk, table):
    words = ("compare", table, "--losses", "gce", "--effort", "quick", "--epochs", 1, "--jobs", 2, "--quiet")
    assert anyk(*words, "--out", "o", "--with-paths")[0] in (0, 3)
    assert str(table) in (table.parent / "o" / "results.json").read_text()


def test_few_files_of_the_lab_are_entered(table):
    script = (
        "import sys, anyk_cli, pathlib\nsys.argv = ['anyk', 'compare', 'points.csv', '--losses', 'gce', '--effort', 'quick', '--epochs', '1', '--quiet']\n"
        "try: anyk_cli.main()\nexcept SystemExit: pass\n"
        "print([name for name, module in sys.modules.items() if name.startswith('anyk.lab') and getattr(module, '__file__', None)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), cwd=table.parent, check=True)
    assert len(eval(done.stdout.splitlines()[-1])) <= 30
