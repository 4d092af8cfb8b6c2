"""Names: one place for all, looked up when they are used."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import anyk
from anyk import baselines, registry
from anyk.operators.sorting_network import Kind

SCORES, TARGET = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), torch.arange(4)


@pytest.mark.parametrize("name", registry.operator_names())
def test_strings_name_operators_everywhere(name):
    operator = registry.operator(name)
    expected = anyk.topk_cross_entropy(SCORES, TARGET, [0.5, 0.5], operator)
    assert torch.equal(anyk.TopKCrossEntropyLoss([0.5, 0.5], name)(SCORES, TARGET), expected)
    assert torch.equal(anyk.topk_cross_entropy(SCORES, TARGET, [0.5, 0.5], name), expected)
    assert torch.equal(
        anyk.TopKErrorLoss([0.5, 0.5], name)(SCORES, TARGET), anyk.topk_error(SCORES, TARGET, [0.5, 0.5], operator)
    )
    assert type(anyk.LinearTopKCrossEntropy(3, 9, [0.5, 0.5], name).criterion.operator) is type(operator)


def test_what_is_defined_later_is_known():
    class Later(anyk.KSubset, name="later"):
        pass

    try:
        registry.NETWORKS["later_network"] = Kind("Mine", anyk.networks.splitter, lambda number: number // 2)
        registry.SWAPS["later_swap"] = registry.SWAPS["logistic"]
        assert type(anyk.TopKCrossEntropyLoss([1.0], "later").operator) is Later
        assert anyk.SortingNetwork("later_network", swap="later_swap").inclusion(SCORES, TARGET, 2).isfinite().all()
        assert {"later", "later_network"} <= set(registry.operator_names())
    finally:
        for table, name in (
            (registry.OPERATORS, "later"), (registry.NETWORKS, "later_network"), (registry.SWAPS, "later_swap"),
        ):  # fmt: skip
            del table[name]


def test_names_are_given_once():
    for base, taken in (
        (anyk.Operator, "lapsum"), (baselines.FixedKLoss, "hinge"), (anyk.Operator, "splitter"), (anyk.Operator, "hinge"),
        (baselines.FixedKLoss, "lapsum"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"name: expected one that is free, got '{taken}', which anyk"):
            type("Mine", (base,), {}, name=taken)
    for reserved in ("softmax", "gce", "error", "error:mine"):
        with pytest.raises(ValueError, match=f"name: expected one without a colon, .*, got '{reserved}'"):
            type("Mine", (anyk.Operator,), {}, name=reserved)
    with pytest.raises(ValueError, match="name: expected one that is free, got 'ksubset'"):
        registry.NETWORKS["ksubset"] = registry.NETWORKS["splitter"]
    again = type("LapSum", (anyk.LapSum,), {"__module__": anyk.LapSum.__module__, "__qualname__": "LapSum"})
    registry.OPERATORS["lapsum"] = again  # as from a notebook cell that is run twice
    registry.OPERATORS["lapsum"] = anyk.LapSum


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: anyk.SortingNetwork("bubble"), ValueError, "kind: expected one of 'splitter', 'bitonic', .* got 'bubble'"),
        (lambda: anyk.SortingNetwork(swap="hard"), ValueError, "swap: expected one of 'logistic', .* got 'hard'"),
        (lambda: anyk.SortingNetwork(swap=None), ValueError, "swap: expected one of 'logistic', .* got None"),
        (lambda: registry.operator("bubble"), ValueError, "operator: expected one of 'splitter', .*'lapsum'.* got 'bubble'"),
        (lambda: registry.operator(anyk.LapSum), TypeError, "operator: expected .* got the class LapSum"),
    ],
)
def test_bad_names(call, error, message):
    with pytest.raises(error, match=message):
        call()


def run(folder: Path, module: str, code: str) -> subprocess.CompletedProcess[str]:
    """With a package installed whose entry points name the module."""
    about = folder / "mine-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[anyk]\nmine = {module}\n")
    paths = (folder, Path(anyk.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_package_can_bring_more(tmp_path):
    (tmp_path / "mine.py").write_text("import anyk\nclass Mine(anyk.KSubset, name='mine'):\n    pass\n")
    done = run(
        tmp_path,
        "mine",
        """
        import sys, anyk
        assert "mine" not in sys.modules, "importing anyk imports no extension"
        anyk.TopKCrossEntropyLoss([1.0], "lapsum")
        assert "mine" not in sys.modules, "nor does a name that is known"
        print(type(anyk.TopKCrossEntropyLoss([1.0], "mine").operator).__name__)
        """,
    )
    assert done.stdout == "Mine\n", done.stderr


def test_a_broken_package_is_named(tmp_path):
    done = run(tmp_path, "nowhere", "import anyk; anyk.registry.operator('mine')")
    assert "ExtensionError: operator: expected one of" in done.stderr
    assert "got 'mine'; nowhere, an extension of anyk, cannot be loaded: ModuleNotFoundError" in done.stderr
    done = run(tmp_path, "nowhere", "import anyk; anyk.registry.operator('lapsum'); anyk.SortingNetwork('splitter')")
    assert done.returncode == 0, "what anyk knows by itself does not need it"


def test_an_extension_that_asks_for_names_while_another_thread_does(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom anyk import registry\ntime.sleep(0.5)\nregistry.operator_names()\n"
        "import anyk\nclass Mine(anyk.KSubset, name='mine'):\n    pass\n"
    )
    done = run(
        tmp_path,
        "slow",
        """
        import threading, time
        import anyk
        first = threading.Thread(target=lambda: __import__("slow"))
        second = threading.Thread(target=anyk.registry.operator_names)
        first.start(); time.sleep(0.1); second.start()
        first.join(20); second.join(20)
        assert not first.is_alive() and not second.is_alive()
        anyk.registry.operator("mine")
        """,
    )
    assert done.returncode == 0, done.stderr
