"""docs/extending.md: every block, added in one place, makes a thing that can be trained, tuned, written down and drawn."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lab_data import write_embedding_set

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = {
    re.search(r"^(.+)", section)[1]: (
        re.search(r"`src/anyk/(\S+?)`", section)[1],
        re.search(r"```python\n(.*?)```", section, re.DOTALL)[1],
    )
    for section in PAGE.split("\n## ")[1:]
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
    from anyk.lab.run.names import find
    from anyk.lab.run.config import Config

    data, out, *asked = sys.argv[1:]
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


def use(asked: list[dict[str, str]], folder: Path, *paths: Path) -> str:
    (folder / "use.py").write_text(textwrap.dedent(USE))
    data = write_embedding_set(folder / "data")
    command = [sys.executable, "-W", "error", str(folder / "use.py"), str(data), str(folder), *map(json.dumps, asked)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("section", ASKED)
def test_one_edit_in_one_file_of_the_library(section: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file, block = SECTIONS[section]
    with (tmp_path / "src" / "anyk" / file).open("a") as edited:
        edited.write("\n\n" + block)
    use([ASKED[section]], tmp_path, tmp_path / "src")


def test_one_file_of_ones_own(tmp_path: Path) -> None:
    install(tmp_path, "mine")
    (tmp_path / "mine.py").write_text("\n\n".join(block for _, block in SECTIONS.values()))
    shown = use(list(ASKED.values()), tmp_path, tmp_path, ROOT / "src")
    assert "mine.SquareSort(temperature=1.0)" in shown
    assert "mine.KthLeadLoss(k=5)" in shown
    assert 'anyk.SortingNetwork(kind="pairwise", temperature=1.0)' in shown


def install(folder: Path, module: str) -> None:
    """What pip leaves of a package whose entry points name the module."""
    about = folder / "mine-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[anyk]\nmine = {module}\n")


def test_a_broken_extension_is_named(tmp_path: Path) -> None:
    install(tmp_path, "nowhere")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT / "src")))}
    command = [sys.executable, "-m", "anyk", "train", "glyphs", "--loss", "mine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nowhere, an extension of anyk, cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr
