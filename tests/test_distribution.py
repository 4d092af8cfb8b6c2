"""The package as it is built and installed: what it carries, what it declares, and what the core does on its own."""

import ast
import email
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import anyk
from anyk import lab
from release.check import empty_environment, needed_by

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "anyk"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = SETTINGS["project"]["optional-dependencies"]
INSTALL = 'pip install "anyk[lab]"'
ELSEWHERE = {"lightgbm", "pandas", "timm", "tiny_backbone", "triton"}
"""imported only when a user, or a test that writes it, names a model of it, or asks for a frame; triton comes with torch where
there is CUDA"""
ELSEWHERE |= {"lassonet", "mlxtend", "stg"}  # what evidence/selection.py compares with, and one of its sets

# The places of this checkout and this environment must not leak into the ones that are made here.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "ANYK"))}


def run(
    *command: object, cwd: Path | None = None, source: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = CLEAN if source is None else {**CLEAN, "PYTHONPATH": str(source)}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def requirements(*extras: str) -> dict[str, Requirement]:
    """What an installation with these extras asks for directly, by canonical name."""
    found = {}
    texts = [*SETTINGS["project"]["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    for requirement in map(Requirement, texts):
        if requirement.name == "anyk":
            found |= requirements(*requirement.extras)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


# What is built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    place = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", place, cwd=ROOT)
    (archive,) = place.iterdir()
    with tarfile.open(archive) as content:
        # The filter came with Python 3.11.4; the archive is our own.
        content.extractall(place, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return place / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as an installer without wheels does."""
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", place, cwd=sdist)
    (path,) = place.iterdir()
    return path


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel, what it depends on, and nothing else.

    Nothing is downloaded: what it depends on is linked from here.
    """
    return empty_environment(tmp_path_factory.mktemp("bare"), wheel)


def test_the_wheel_holds_the_package_and_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = email.message_from_bytes(archive.read(f"anyk-{anyk.__version__}.dist-info/METADATA"))
    ours = {f"anyk/{file.relative_to(SOURCE)}" for file in SOURCE.rglob("*") if file.is_file()}
    ours = {name for name in ours if not name.endswith((".pyc", ".so", "kernels/build.py")) and "/csrc/" not in name}
    # tests/kernels/test_build.py has both kinds
    library = set() if wheel.name.endswith("-py3-none-any.whl") else {"anyk/kernels/_native.so"}
    assert {name for name in names if ".dist-info/" not in name} == ours | library
    assert {"anyk/py.typed", f"anyk-{anyk.__version__}.dist-info/licenses/LICENSE"} <= names
    # License-Expression and License-File exist since metadata 2.4; older backends drop or rename them.
    assert tuple(map(int, about["Metadata-Version"].split("."))) >= (2, 4)
    assert (about["License-Expression"], about["License-File"], about["License"]) == ("MIT", "LICENSE", None)
    assert about["Requires-Python"] == SETTINGS["project"]["requires-python"]
    assert {Requirement(text).name for text in about.get_all("Requires-Dist") if "extra" not in text} == {
        "torch",
        "numpy",
        "jaxtyping",
    }


def test_the_sdist_carries_what_its_tests_need(sdist):
    # Importing every test finds the files they read and the modules beside them; the quick ones run.
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run(*tests, "--collect-only", cwd=sdist, source=sdist / "src")
    quick = ["tests/test_networks.py", "tests/test_metrics.py", "src/anyk/networks.py"]
    assert " passed" in run(*tests, *quick, cwd=sdist, source=sdist / "src").stdout


# What the core does on its own


def test_the_core_imports_and_trains_without_the_extras(bare):
    code = (
        "import torch, anyk, anyk.info\n"
        "scores = torch.randn(4, 9, requires_grad=True)\n"
        "anyk.TopKCrossEntropyLoss([.5, .5])(scores, torch.arange(4)).backward()\n"
        "assert all(hasattr(anyk, name) for name in anyk.__all__)\n"
        "print(anyk.__file__, scores.grad.isfinite().all().item())"
    )
    place, finite = run(bare / "python", "-W", "error", "-c", code).stdout.split()
    assert Path(place).is_relative_to(bare.parent)
    assert finite == "True"


def test_version_and_info_without_the_lab(bare):
    assert run(bare / "anyk", "--version").stdout == f"anyk {anyk.__version__}\n"
    words = run(bare / "anyk", "info").stdout
    assert re.search(rf"^\[lab\] +missing .*tyro.*: {re.escape(INSTALL)}$", words, re.MULTILINE)
    assert "cache" not in words
    assert re.search(r"^native +(not )?used", words, re.MULTILINE)
    facts = json.loads(run(bare / "anyk", "info", "--json").stdout)
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert facts["extras"]["lab"]


@pytest.mark.parametrize("words", [["--help"], ["info", "--yaml"]])
def test_other_commands_without_the_lab_say_what_to_install(bare, words):
    done = run(bare / "anyk", *words, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"The lab needs the packages .*\bmatplotlib\b.* and tyro: {re.escape(INSTALL)}\n", done.stderr)


def test_importing_the_lab_without_its_packages_says_what_to_install(bare):
    done = run(bare / "python", "-c", "import anyk.lab.data", check=False)
    assert re.fullmatch(rf"ModuleNotFoundError: The lab needs .* {re.escape(INSTALL)}", done.stderr.splitlines()[-1])


def test_one_missing_package_is_named():
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'rich' else find(name)\n"
        "try:\n    import anyk.lab\nexcept ModuleNotFoundError as error:\n    print(error, error.name)"
    )
    assert run(sys.executable, "-c", code, source=ROOT / "src").stdout == f"The lab needs the package rich: {INSTALL} rich\n"


# What is declared


def imported(files: Iterable[Path], *, at_start: bool = False) -> set[str]:
    """The packages that files import, apart from Python's own; ``at_start``: by being imported themselves."""
    found = set()
    for file in files:
        tree = ast.parse(file.read_text())
        later = {
            inner for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda)) for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if at_start and node in later:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                found |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    return {name.split(".")[0] for name in found} - set(sys.stdlib_module_names) - {"anyk"}


def distributions(modules: Iterable[str]) -> set[str]:
    """What brings the modules; of several, the one with the module's own name."""
    known = {module: sorted(names, key=lambda name: name != module) for module, names in packages_distributions().items()}
    return {canonicalize_name(known.get(module, [module])[0]) for module in modules}


def test_what_the_core_imports_at_its_start_is_a_dependency():
    core = [
        file
        for file in SOURCE.rglob("*.py")
        if "lab" not in file.relative_to(SOURCE).parts and file.name not in ("sklearn.py", "triton_kernels.py")
    ]
    assert distributions(imported(core, at_start=True)) <= set(requirements())


@pytest.mark.parametrize(
    ("files", "extras"),
    [
        ("src/anyk/sklearn.py", ["sklearn"]),
        ("src/anyk/lab/**/*.py", ["lab", "embed", "hf", "onnx", "cluster", "loggers"]),
        ("src/**/*.py", ["lab", "embed", "hf", "onnx", "cluster", "loggers", "sklearn"]),
        ("docs/*.py", ["docs"]),
        ("examples/*.py", ["examples"]),
        ("benchmarks/*.py", ["bench", "sklearn"]),
        ("release/*.py", ["release"]),
        ("evidence/**/*.py", ["lab", "sklearn"]),
        ("tests/**/*.py", ["test", "loggers"]),
    ],
)
def test_every_import_is_declared(files, extras):
    paths = sorted(ROOT.glob(files))
    folders = ("tests", "evidence", "benchmarks", "docs", "release")
    files_beside = [ROOT / "hatch_build.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    beside = {name for file in files_beside for name in (file.stem, file.parent.name)}  # a module, or the package it is in
    modules = imported(paths) - ELSEWHERE - (set() if files.startswith("src") else beside)
    assert modules
    assert distributions(modules) <= set(requirements(*extras))


def test_the_lab_checks_for_all_of_its_extra():
    assert distributions(lab.PACKAGES) == set(requirements("lab")) - set(requirements())


# What is pinned


def test_constraints_pin_whatever_an_extra_brings():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines)  # a version, no place
    assert len(pins) == len(lines)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    asked = requirements(*EXTRAS)
    for requirement in [*asked.values(), *map(Requirement, SETTINGS["build-system"]["requires"])]:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    # Some builds of torch bring packages for a GPU: they follow from its own version.
    here = {canonicalize_name(each.name) for each in importlib.metadata.distributions()}
    brought = {
        canonicalize_name(each.name)
        for name in set(asked) & here - {"torch"}
        for each in needed_by(importlib.metadata.distribution(name))
        if not each.name.startswith(("nvidia", "cuda", "triton"))
    }
    assert brought <= set(pins)
