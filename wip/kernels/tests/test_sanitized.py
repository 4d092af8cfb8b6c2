"""Nothing outside is read or written, nothing is undefined, and nothing is read that was not written: sanitized.py."""

import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import anyk
from anyk.kernels import abi, build, native
from anyk.losses import CrossEntropySpec, ErrorSpec
from anyk.registry import SWAPS

SCRIPT = Path(__file__).parent.parent / "sanitized.py"
COMPILER = next((found for name in ("gcc", "cc") if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="the sanitizers' libraries are Linux's"),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
]
CASES = 300


def runtime() -> str:
    """The sanitizer's library, which must be there before anything else."""
    found = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("the compiler has no address sanitizer")
    return found


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return build.build(sanitize=True)
    except build.Unavailable as why:
        pytest.skip(str(why))


def losses(seed: int) -> list[dict[str, object]]:
    """Of every operator, swap, policy and family, as the library is told of them."""
    draw, made = random.Random(seed), []
    while len(made) < CASES:
        n = draw.choice([draw.randint(1, 6), draw.randint(1, 40), draw.choice([63, 64, 65, 130, 300, 1000])])
        k = draw.randint(1, min(n, 7))
        m = draw.choice([k, n, draw.randint(k, n)])
        if m > 150:
            continue
        temperature = draw.choice([0.01, 1.0, 30.0])
        operator = draw.choice([
            anyk.NeuralSort, anyk.SoftSort, anyk.LapSum, anyk.KSubset,
            lambda t: anyk.SortingNetwork(draw.choice(["splitter", "bitonic", "odd_even"]), t, draw.choice(list(SWAPS)),
                                          draw.choice(["target", "sorted", "given"])),
        ])(temperature)  # fmt: skip
        p_k, smoothing = [1 / k] * k, 0.0
        if draw.random() < 0.5:
            top1, over = draw.choice(["separate", "mixed", "operator"]), draw.choice(["all", "candidates"])
            spec = CrossEntropySpec.of(p_k, operator, m, top1, over)
        else:
            ce_weight = draw.choice([0.0, 0.2])
            spec = ErrorSpec.of(p_k, operator, m, ce_weight, draw.choice([0.0, 0.5, 1.0]))
            smoothing = draw.choice([0.0, 0.1]) if ce_weight else 0.0
        if spec.is_cross_entropy(k):
            continue
        given = spec.uses_softmax and m == n and draw.random() < 0.3
        description = spec.describe(n, k, m, smoothing, given)
        assert not isinstance(description, str)
        prepared = native.prepare(description)
        assert not isinstance(prepared, str)
        wiring = description.wiring
        tables = [] if wiring is None else [table.numpy().tobytes() for table in wiring]
        numbers = abi.packer(abi.Spec).unpack(prepared.spec)[:-5]
        sorting = b"" if description.sorting is None else description.sorting.numpy().tobytes()
        made.append({
            "n": n, "m": m, "k": k, "numbers": numbers, "tables": tables, "sorting": sorting, "given": given,
            "rest": prepared.rest, "powers": 0, "rate": 0.0,
        })  # fmt: skip
    for _ in range(CASES // 10):
        k = draw.randint(1, abi.Limit.MOST_K)
        n = draw.choice([k + 1, k + 2, draw.randint(k + 1, 70), 300, 1000])
        prepared = native.prepare_smooth(n, k, draw.choice([0.01, 1.0, 30.0]), 1.0, draw.choice([None, 1.0, 1e3]))
        assert not isinstance(prepared, str)
        made.append({
            "n": n, "m": k + 1, "k": k, "numbers": abi.packer(abi.SmoothSpec).unpack(prepared.spec), "given": False,
            "rest": prepared.rest, "powers": k, "rate": prepared.rate,
        })  # fmt: skip
    return made


@pytest.mark.parametrize("variant", [0, 1, 2, 3])
def test_sanitized(library, tmp_path, variant):
    (tmp_path / "losses").write_bytes(pickle.dumps(losses(variant)))
    digests = set()
    for fill in (0x00, 0x7F, 0xFF):  # 0, large numbers, NaN
        options = f"detect_leaks=0:max_malloc_fill_size=100000000:malloc_fill_byte={fill}"
        environment = {
            **os.environ, "LD_PRELOAD": runtime(), "ASAN_OPTIONS": options, "UBSAN_OPTIONS": "print_stacktrace=1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-S", str(SCRIPT), str(library), str(tmp_path / "losses"), str(variant), str(variant)],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        if done.stdout.strip() == "not here":
            pytest.skip("this machine has not got these instructions")
        digests.add(done.stdout)
    assert len(digests) == 1, "the result depends on memory that nobody wrote"


def test_the_sanitizer_sees_a_byte(library):
    """The buffers of the script end where they end: one class too many is seen."""
    code = f"""
import ctypes, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import sanitized
buffers = sanitized.Buffers()
library = ctypes.CDLL({str(library)!r})
scores, classes = buffers.of(sanitized.packed([1.0] * 20, 0)), buffers.room(8)
library.anyk_best(sanitized.SELECTION.pack(1, int(sys.argv[1]), 1, 21, 0, 1, scores, classes))
"""
    environment = {**os.environ, "LD_PRELOAD": runtime(), "ASAN_OPTIONS": "detect_leaks=0"}
    for n, wrong in ((20, False), (21, True)):
        done = subprocess.run([sys.executable, "-S", "-c", code, str(n)], env=environment, capture_output=True, text=True)
        assert (done.returncode != 0) == wrong, done.stderr
        assert ("heap-buffer-overflow" in done.stderr) == wrong
