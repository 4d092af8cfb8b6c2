"""The package as a user meets it: every public name documented, the pages run, imports stay light."""

import doctest
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import anyk

ROOT = pathlib.Path(__file__).parent.parent
PUBLIC = [getattr(anyk, name) for name in anyk.__all__ if name not in ("networks", "parallel")]
PUBLIC += [getattr(module, name) for module in (anyk.networks, anyk.parallel) for name in module.__all__]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_public_names_are_documented_with_an_example(thing):
    assert thing.__doc__
    if thing is not anyk.Operator:  # abstract: nothing to run
        assert doctest.DocTestParser().get_examples(thing.__doc__)
    if inspect.isclass(thing):
        for name, method in inspect.getmembers(thing, inspect.isfunction):
            if not name.startswith("_") and method.__module__.startswith("anyk") and name not in ("extra_repr", "forward"):
                assert inspect.getdoc(method), f"{thing.__name__}.{name}"


def code_blocks():
    elsewhere = {"extending.md", "own-data.md"}  # test_extending.py, test_guide.py
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name in elsewhere:
            continue
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            yield pytest.param(block, id=f"{page.name}-{number}")


@pytest.mark.parametrize("block", list(code_blocks()))
def test_code_in_the_pages_runs(block, capsys):
    exec(compile(block, "page", "exec"), {})


def test_import_brings_torch_and_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import anyk\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "unexpected = new - {'anyk', 'jaxtyping', 'wadler_lindig', 'numpy'} - set(sys.stdlib_module_names)\n"
        "assert not unexpected, unexpected"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_version_is_in_the_changelog():
    assert f"## {anyk.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_is_private_in_torch_is_reached_in_one_place():
    source = pathlib.Path(anyk.__file__).parent
    reaching = re.compile(r"\btorch(\.\w+)*\._[a-z]\w*|forward_ad\._")
    found = {
        file.relative_to(source).as_posix()
        for file in source.rglob("*.py")
        for line in file.read_text().splitlines()
        if reaching.search(line) and not line.strip().startswith(('"torch._utils', '"torch.storage'))  # names in pickles
    }
    assert found == {"_compat.py"}
