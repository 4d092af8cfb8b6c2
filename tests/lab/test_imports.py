"""The rooms of the lab: no module needs one that needs it, and the core needs none of them."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import anyk

ROOT = Path(anyk.__file__).parent
#: the command line is the lab's door, and `python -m anyk` leads to it
DOORS = {"anyk.__main__"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of anyk that are named in imports, those inside of functions too; of a package's submodule, that alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in inside)


GRAPH = {name: set(imported(tree)) for name, tree in MODULES.items()}


def in_lab(name: str) -> bool:
    return name == "anyk.lab" or name.startswith("anyk.lab.")


def test_the_graph_is_found() -> None:
    assert "anyk.lab.run.training" in GRAPH["anyk.lab.engines.engine"]
    assert "anyk.lab.comparison.compare" in GRAPH["anyk.lab.cli.compare"]  # inside of a function


def test_no_modules_of_the_lab_need_each_other() -> None:
    lab = {name: {other for other in needs if in_lab(other)} for name, needs in GRAPH.items() if in_lab(name)}
    try:
        list(graphlib.TopologicalSorter(lab).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_core_needs_nothing_of_the_lab() -> None:
    needs = {name: {other for other in needs if in_lab(other)} for name, needs in GRAPH.items() if not in_lab(name)}
    assert {name: found for name, found in needs.items() if found and name not in DOORS} == {}
