"""The package as a user meets it: every public name documented, the pages run, imports stay light."""

import doctest
import inspect
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import anyk
import anyk.lab
import anyk.sklearn

ROOT = pathlib.Path(__file__).parent.parent


def public(*modules):
    """The public names of these modules, each with what it is."""
    things = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    return [pytest.param(thing, id=name) for name, thing in things if not inspect.ismodule(thing)]


@pytest.mark.parametrize("thing", public(anyk, anyk.networks, anyk.parallel))
def test_public_names_are_documented_with_an_example(thing):
    assert thing.__doc__
    if thing is not anyk.Operator:  # abstract: nothing to run
        assert doctest.DocTestParser().get_examples(thing.__doc__)
    if inspect.isclass(thing):
        for name, method in inspect.getmembers(thing, inspect.isfunction):
            if not name.startswith("_") and method.__module__.startswith("anyk") and name not in ("extra_repr", "forward"):
                assert inspect.getdoc(method), f"{thing.__name__}.{name}"


@pytest.mark.parametrize("thing", public(anyk, anyk.lab, anyk.networks, anyk.parallel, anyk.registry, anyk.sklearn))
def test_the_docstring_names_every_parameter(thing):
    if not callable(thing) or thing is anyk.lab.Report or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return  # no user calls them
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert re.search(rf"\b{parameter.name}\b", inspect.getdoc(thing)), parameter.name


def code_blocks():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name == "own-data.md":  # test_guide.py
            continue
        text = page.read_text().partition("\n## Extending\n")[0]  # test_extending.py
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            yield pytest.param(block, id=f"{page.name}-{number}")


@pytest.mark.parametrize("block", list(code_blocks()))
def test_code_in_the_pages_runs(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "points.npz" in block:
        labels = np.arange(240) % 12
        np.savez("points.npz", x=np.random.default_rng(0).normal(labels[:, None], size=(240, 8)).astype(np.float32), y=labels)
    exec(compile(block, "page", "exec"), {})


def test_import_brings_torch_and_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import anyk\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "unexpected = new - {'anyk', 'jaxtyping', 'wadler_lindig', 'numpy'} - set(sys.stdlib_module_names)\n"
        "assert not unexpected, unexpected"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


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
