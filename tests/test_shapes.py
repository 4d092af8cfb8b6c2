"""The shapes in the annotations are true: jaxtyping and beartype check each call, in a process that imports anyk anew."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "anyk"
CORE = [
    file for file in sorted(SOURCE.rglob("*.py")) if "lab" not in file.relative_to(SOURCE).parts and file.stem != "__main__"
]


@pytest.mark.parametrize("what", [[TESTS / "shapes.py"], CORE], ids=["calls", "docstrings"])
def test_annotated_shapes_hold(what):
    words = [sys.executable, TESTS / "checked.py", "-q", "--tb=short", "-p", "no:cacheprovider", *what]
    done = subprocess.run([*map(str, words)], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
