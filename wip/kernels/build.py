"""Builds the native library, ``_native.so``, from ``csrc/``: plain C, without Python's or torch's headers.

    python src/anyk/kernels/build.py [--sanitize]

builds it beside this file, unless it is there and made of these very sources. The installation does the same (hatch_build.py),
and goes on without the library where there is no compiler or the compiler fails: then the plain code serves. Run by hand or by
``make``, a compiler that fails is an error. ``ANYK_NATIVE`` in the environment: ``require`` makes it an error not to have the
library in the end, ``off`` builds nothing. ``CC`` names the compiler.

Nothing of anyk or torch is imported here: neither is there when anyk is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ABI = HERE / "abi.py"
COMPILERS = ("cc", "gcc", "clang")
# Errors and traps of the floating point unit are not looked at, and a*b+c may be one instruction; but infinities and NaN count.
FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    "-fno-tree-loop-distribute-patterns",  # a few scores at the end of a row are no reason to call memcpy
)
SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover")
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx512cd", *AVX2, "-mprefer-vector-width=512")
X86_VARIANTS = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": (*AVX512, "-mavx512bf16")}
"""csrc/kernels.c is compiled once more for each; the library chooses when it is loaded"""


class Unavailable(Exception):
    """There is no way to build the library here, and nothing is wrong with that."""


class Failed(Exception):
    """The library could have been built, and was not."""


def build(*, sanitize: bool = False) -> Path:
    """Builds the library if it is not there, or made of other sources.

    Args:
        sanitize: with checks of addresses and undefined behaviour, as another library beside the one that is used.

    Returns: where it is. It is whole whenever it is there: it gets its name when it is finished.

    Raises:
        Unavailable: no compiler.
        Failed: the compiler failed, or the folder cannot be written to.
    """
    library = _place(sanitize)
    try:
        if _is_current(library, sanitize):
            with contextlib.suppress(OSError):  # a folder that is only read
                os.utime(library)  # as new as the sources, for make
        else:
            compiler = _compiler()
            with tempfile.TemporaryDirectory() as folder:
                _link(compiler, _objects(compiler, Path(folder), sanitize), Path(folder, library.name), sanitize)
                _move(Path(folder, library.name), library)
    except OSError as error:
        raise Failed(str(error)) from error
    return library


def build_if_possible(*, sanitize: bool = False, strict: bool = False) -> Path | None:
    """Builds the library as ``ANYK_NATIVE`` says; without one, and unless it is required, says why and returns None.

    Args:
        sanitize: as for :func:`build`.
        strict: a compiler that fails is an error.
    """
    wanted = os.environ.get("ANYK_NATIVE") or "auto"
    if wanted not in ("auto", "require", "off"):
        raise Failed(f"ANYK_NATIVE must be auto, require or off, got {wanted!r}")
    try:
        if wanted == "off":
            raise Unavailable("ANYK_NATIVE is off")
        return build(sanitize=sanitize)
    except (Unavailable, Failed) as error:
        with contextlib.suppress(OSError):
            if not _is_current(_place(sanitize), sanitize):  # what other sources made must not serve for these
                _place(sanitize).unlink()
        if wanted == "require" or (strict and isinstance(error, Failed)):
            raise
        sys.stderr.write(f"anyk is used without its native library, with plain PyTorch code instead: {error}\n")
        return None


def _place(sanitize: bool) -> Path:
    return HERE / ("_native_asan.so" if sanitize else "_native.so")


def _stamp(sanitize: bool) -> str:
    """What the library is made of, as a word that is put into it: times of files say little after a checkout or a copy."""
    sources = [*sorted(file for file in (HERE / "csrc").iterdir() if file.suffix in (".c", ".h")), ABI, Path(__file__)]
    made_of = [(file.name, file.read_text(encoding="utf-8")) for file in sources]
    parts = (made_of, sysconfig.get_platform(), os.environ.get("CC"), sanitize)
    return "anyk-native-" + hashlib.sha256(repr(parts).encode()).hexdigest()


def _is_current(library: Path, sanitize: bool) -> bool:
    return library.exists() and _stamp(sanitize).encode() in library.read_bytes()


def _compiler() -> list[str]:
    if os.name == "nt":
        raise Unavailable("it is not built on Windows")
    if sys.maxsize < 2**32:
        raise Unavailable("it is for 64 bits, and this Python has 32")
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [[name] for name in COMPILERS]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:]]
    raise Unavailable(f"no C compiler ({named[0] if named else ', '.join(COMPILERS)}) was found")


def _objects(compiler: list[str], folder: Path, sanitize: bool) -> list[Path]:
    """The compiled files: kernels.c for each instruction set, then the others, which know what there is."""
    (folder / "abi.h").write_text(runpy.run_path(str(ABI))["header"]())
    flags = [*FLAGS, f"-I{folder}", *(SANITIZE if sanitize else ())]
    x86 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
    variants = {name: own for name, own in X86_VARIANTS.items() if x86 and _knows(compiler, own, folder)} | {"baseline": ()}

    def kernels(variant: str) -> Path:
        target = folder / f"kernels-{variant}.o"
        _compile(compiler, "kernels.c", target, [*flags, f"-DVARIANT={variant}", *variants[variant]])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(kernels, variants))
    have = [f"-DHAS_{variant.upper()}" for variant in variants]
    (folder / "stamp.c").write_text(f'const char anyk_stamp[] = "{_stamp(sanitize)}";\n')
    objects = [*built, folder / "anyk.o", folder / "stamp.o"]
    _compile(compiler, "anyk.c", folder / "anyk.o", [*flags, *have])
    _compile(compiler, str(folder / "stamp.c"), folder / "stamp.o", list(FLAGS))
    return objects


def _knows(compiler: list[str], flags: tuple[str, ...], folder: Path) -> bool:
    """Whether the compiler has these instructions."""
    (folder / "empty.c").write_text("typedef int nothing;\n")
    try:
        _compile(compiler, str(folder / "empty.c"), folder / "empty.o", list(flags))
    except Failed:
        return False
    return True


def _compile(compiler: list[str], source: str, target: Path, flags: list[str]) -> None:
    _run([*compiler, *flags, "-c", source, "-o", str(target)], f"compiling {Path(source).name}")


def _link(compiler: list[str], objects: list[Path], target: Path, sanitize: bool) -> None:
    # A name that is nowhere shows here and not when the library is loaded. The sanitizers' own come with the process.
    flags = [*SANITIZE] if sanitize else ["-Wl,-z,defs"] if sys.platform == "linux" else []
    _run([*compiler, "-shared", "-pthread", *flags, *map(str, objects), "-o", str(target), "-lm"], "linking")


def _run(command: list[str], doing: str) -> None:
    # From the sources' folder, by relative names: no place of this machine gets into the library.
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=HERE / "csrc", env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line or "undefined" in line] or lines  # and not what it warns of
        ended = f" ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else " failed"
        raise Failed("\n  ".join([f"{Path(command[0]).name}{ended}, {doing}", *errors[:5]]))


def _move(made: Path, library: Path) -> None:
    beside = library.with_name(f".{library.stem}-{os.getpid()}.so")
    try:
        shutil.copy(made, beside)
        os.replace(beside, library)  # at once: who loads it meanwhile has the old one or the new one
    finally:
        beside.unlink(missing_ok=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Builds anyk's native library beside this file.")
    parser.add_argument("--sanitize", action="store_true", help="build _native_asan.so, with checks, instead")
    try:
        build_if_possible(sanitize=parser.parse_args().sanitize, strict=True)
    except (Unavailable, Failed) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
