"""The last section of docs/tools.md: every block, added in one place, makes what can be trained, tuned and written down."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lab_data import write_embedding_set

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tools.md").read_text().partition("\n## Extending\n")[2]
SECTIONS = {
    re.search(r"^(.+)", section)[1]: (
        re.search(r"`src/anyk/(\S+?)`", section)[1],
        re.search(r"```python\n(.*?)```", section, re.DOTALL)[1],
    )
    for section in PAGE.split("\n### ")[1:]
}
#: section -> how the new thing is asked for
ASKED = {
    "An operator": {"loss": "squaresort"},
    "A swap": {"loss": "splitter", "swap": "algebraic"},
    "A network": {"loss": "pairwise"},
    "A loss": {"loss": "kth_lead"},
}

USE = """
    import json, sys, torch
    import anyk
    from anyk.lab.comparison.snippet import code
    from anyk.lab.run import losses, training
    from anyk.lab.run.config import Config
    from anyk.lab.run.loss_names import find, import_modules

    data, out, modules, *asked = sys.argv[1:]
    import_modules(modules.split())
    for place, fields in enumerate(map(json.loads, asked)):
        config = Config(data=data, epochs=3, learning_rate=0.01, **fields)
        result = training.train(config, f"{out}/run{place}")
        assert result["test"]["top5"] > 0.6, result["test"]
        if find(config.loss).family == "cross_entropy":
            torch.manual_seed(0)
            operator = losses.criterion(config, 12).operator
            scores = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
            target = torch.arange(4)
            assert torch.autograd.gradcheck(lambda s: operator.log_inclusion(s, target, 3), scores)
            assert torch.autograd.gradcheck(lambda s: operator(s, 3), scores)
        line = code(config)
        print(line)
        names = {"__name__": "page"}
        exec(line, names)
        assert names["criterion"](torch.randn(4, 12), torch.arange(4)).isfinite()
"""


def test_the_page_has_the_four():
    assert set(SECTIONS) == set(ASKED)


def run(command: list[str], folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True)


def use(asked: list[dict[str, str]], module: str, folder: Path, source: Path) -> str:
    (folder / "use.py").write_text(textwrap.dedent(USE))
    data = write_embedding_set(folder / "data")
    done = run(["-W", "error", "use.py", str(data), str(folder), module, *map(json.dumps, asked)], folder, source)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("\n\n".join(block for _, block in SECTIONS.values()))
    shown = use(list(ASKED.values()), "mine", tmp_path, ROOT / "src")
    assert "mine.SquareSort(temperature=1.0)" in shown
    assert "mine.KthLeadLoss(k=5)" in shown
    assert 'anyk.SortingNetwork(kind="pairwise", temperature=1.0)' in shown


def test_a_module_imported_by_the_command_line(tmp_path: Path) -> None:
    """In the command's own process, and in those of its runs."""
    (tmp_path / "mine.py").write_text(SECTIONS["A loss"][1])
    data = str(write_embedding_set(tmp_path / "data"))
    few = ("--epochs", "1", "--seeds", "1", "--budget", "1", "--quiet")
    done = run(["-m", "anyk", "compare", data, "--losses", "kth_lead", "--import", "mine", *few], tmp_path, ROOT / "src")
    assert done.returncode in (0, 3), done.stderr
    assert "kth_lead" in done.stdout
    report = ["-m", "anyk", "report", "anyk-runs/compare-data/runs"]
    assert run([*report, "--import=mine"], tmp_path, ROOT / "src").returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--loss", "mine"), "got 'mine'; --import MODULE brings those of another package."),
        (("--import", "nowhere"), "anyk: the import of nowhere failed (ModuleNotFoundError: No module named 'nowhere')."),
    ],
)
def test_what_cannot_be_imported_is_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run(["-m", "anyk", "train", "glyphs", *words], tmp_path, ROOT / "src")
    assert done.returncode == 2
    assert done.stderr.endswith(message + "\n")
    assert done.stderr.count("\n") == 1
