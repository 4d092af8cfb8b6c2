"""The package as a user meets it: every public name documented, an argument in the same words everywhere, pages that run."""

import doctest
import importlib
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
CORE = (anyk, anyk.metrics, anyk.networks, anyk.parallel, anyk.ranking, anyk.sklearn)


def public(*modules):
    """The public names of these modules, each with what it is."""
    return [
        pytest.param(getattr(module, name), id=f"{module.__name__}.{name}") for module in modules for name in module.__all__
    ]


def test_the_public_names():
    assert len(anyk.__all__) == len(set(anyk.__all__)) <= 28
    modules = {"lab", "metrics", "networks", "operators", "parallel", "ranking", "sklearn", "swaps"}
    assert set(dir(anyk)) == {*anyk.__all__, *modules, "__version__"}
    assert all(hasattr(anyk, name) for name in dir(anyk))


def test_a_name_that_moved_says_where_it_is():
    for name, module in anyk._ELSEWHERE.items():
        assert hasattr(importlib.import_module(module), name)
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': it is {module}\.{name}"):
            getattr(anyk, name)
    with pytest.raises(AttributeError, match=r"TopKClassifier.*examples/skorch_classifier\.py"):
        anyk.TopKClassifier  # noqa: B018
    assert (ROOT / "examples" / "skorch_classifier.py").exists()
    with pytest.raises(AttributeError, match=r"no attribute 'topk'$"):
        anyk.topk  # noqa: B018


@pytest.mark.parametrize("thing", public(*CORE))
def test_public_names_are_documented_with_an_example(thing):
    if not callable(thing) or thing is anyk.networks.Kind:
        return  # data
    assert doctest.DocTestParser().get_examples(thing.__doc__)
    if inspect.isclass(thing):
        for name, method in inspect.getmembers(thing, inspect.isfunction):
            if not name.startswith("_") and method.__module__.startswith("anyk") and name not in ("extra_repr", "forward"):
                assert inspect.getdoc(method), f"{thing.__name__}.{name}"


def arguments(thing):
    """The arguments of a docstring, each with its words."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(thing) or "", re.MULTILINE | re.DOTALL)
    parts = re.split(r"^    (\w+(?:, \w+)*): ", section[1], flags=re.MULTILINE)[1:] if section else []
    return {name: " ".join(words.split()) for name, words in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("thing", public(*CORE, anyk.lab))
def test_the_docstring_names_every_parameter(thing):
    if not callable(thing) or thing is anyk.lab.Report or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return  # no user calls them
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert re.search(rf"\b{parameter.name}\b", inspect.getdoc(thing)), parameter.name


#: how many wordings the arguments have that are different things in different places
WORDINGS = {
    **{"scores": 10, "k": 11, "operator": 11, "temperature": 7, "where": 7, "target": 5, "dim": 5, "reduction": 3},
    **dict.fromkeys(("descending", "device", "ignore_index", "largest", "loss", "margin", "n", "q"), 2),
}


def test_an_argument_has_the_same_words_everywhere():
    words = {}
    for thing in (parameter.values[0] for parameter in public(*CORE)):
        for name, text in arguments(thing).items():
            words.setdefault(name, {}).setdefault(text, []).append(thing.__name__)
    assert [*map(len, words["p_k"].values())] == [4]
    assert {name: texts for name, texts in words.items() if len(texts) > WORDINGS.get(name, 1)} == {}


def code_blocks():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name == "own-data.md":  # tests/pages/test_guide.py
            continue
        text = page.read_text().partition("\n## Extending\n")[0]  # tests/pages/test_extending.py
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
        "assert not unexpected, unexpected\n"
        "assert not {'anyk.lab', 'anyk.sklearn', 'torch._dynamo'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
