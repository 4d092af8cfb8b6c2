"""Which module needs which: no two need each other, the core nothing of the lab, the kernels neither losses nor operators."""

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


def inside(package: str) -> set[str]:
    return {name for name in GRAPH if name == package or name.startswith(f"{package}.")}


def needed_by(names: set[str]) -> set[str]:
    """These modules, and all that they need."""
    found, new = set(names), set(names)
    while new:
        new = set().union(*(GRAPH[name] for name in new)) - found
        found |= new
    return found


def test_the_graph_is_found() -> None:
    assert "anyk.kernels" in GRAPH["anyk.losses"]
    assert "anyk.kernels.triton" in GRAPH["anyk.kernels"]  # inside of a function
    assert "anyk.checks" in needed_by({"anyk.lab"})


def test_no_modules_need_each_other() -> None:
    try:
        list(graphlib.TopologicalSorter(GRAPH).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_core_needs_nothing_of_the_lab() -> None:
    lab = inside("anyk.lab")
    assert {name: GRAPH[name] & lab for name in GRAPH.keys() - lab - DOORS if GRAPH[name] & lab} == {}


def test_the_kernels_need_neither_losses_nor_operators() -> None:
    assert not needed_by(inside("anyk.kernels")) & {"anyk.losses", *inside("anyk.operators")}
