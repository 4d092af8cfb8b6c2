"""Calls the native library that was built with --sanitize, with buffers that end where they end. Run by test_sanitized.py.

Without torch and anyk, whose own memory would be watched too: what they know of the losses comes in a pickle. Every buffer is
one allocation of exactly its size, so that a byte before or behind it is seen. What was never written shows as well: all the
memory is filled with a byte that the caller chooses, and a digest of the results, which it must not change, is printed.

    LD_PRELOAD=libasan.so ASAN_OPTIONS=malloc_fill_byte=… python sanitized.py LIBRARY LOSSES VARIANT SEED
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import pickle
import random
import runpy
import struct
import sys
from pathlib import Path

ABI = runpy.run_path(str(Path(__file__).parent.parent / "src" / "anyk" / "kernels" / "abi.py"))
SPEC, SMOOTH, BATCH, BACKWARD, SELECTION, MASK, MASK_BACKWARD, *REST = map(ABI["packer"], ABI["STRUCTURES"])
RANKING, DRAW, NETWORK_MASK = REST
FINE, BAD_TARGET, PADDED_TARGET, TOO_FEW, _, STRANGE = ABI["Status"]
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


class Buffers:
    """Memory of one case."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def of(self, content: bytes) -> int:
        address = self.room(len(content))
        ctypes.memmove(address, content, len(content))
        return address

    def room(self, size: int) -> int:
        address = libc.malloc(size)
        assert address
        self.taken.append(address)
        return address

    def free(self) -> None:
        for address in self.taken:
            libc.free(address)


def packed(values: list[float], dtype: int) -> bytes:
    if dtype == 0:
        return struct.pack(f"{len(values)}f", *values)
    if dtype == 1:
        return b"".join(struct.pack("f", value)[2:] for value in values)
    return struct.pack(f"{len(values)}e", *(max(-65504.0, min(65504.0, v)) if math.isfinite(v) else v for v in values))


def drawn_rows(draw: random.Random, rows: int, n: int, k: int, target: list[int]) -> list[list[float]]:
    kind = draw.choice(
        ["normal", "normal", "ties", "equal", "ascending", "descending", "huge", "padded", "nan", "inf", "zeros"]
    )
    scores = [[draw.gauss(0, 2) for _ in range(n)] for _ in range(rows)]
    for row, own in zip(scores, target, strict=True):
        own = own if 0 <= own < n else 0
        if kind == "ties":
            row[:] = [float(round(value)) for value in row]
        elif kind == "equal":
            row[:] = [row[0]] * n
        elif kind in ("ascending", "descending"):
            row.sort(reverse=kind == "descending")
        elif kind == "huge":
            row[:] = [value * 10 ** draw.uniform(-40, 37) for value in row]
        elif kind == "padded":
            left = draw.randint(k, n)
            kept = {own, *draw.sample(range(n), left)}
            row[:] = [value if c in kept else -math.inf for c, value in enumerate(row)]
        elif kind == "nan":
            row[draw.randrange(n)] = draw.choice([math.nan, -math.nan])
        elif kind == "inf":
            for c in range(n):
                row[c] = draw.choice([row[c], row[c], math.inf, -math.inf if c != own else 0.0])
        elif kind == "zeros":
            row[:] = [draw.choice([0.0, -0.0, 1e-45, -1e-45]) for _ in row]
    return scores


def laid_out(draw: random.Random, scores: list[list[float]], n: int, dtype: int, buffers: Buffers) -> tuple[int, int]:
    """Where the first row starts and how far the next is: side by side, apart, behind something, or one row for all."""
    layout = draw.choice(["whole", "whole", "apart", "behind", "one"])
    size = 4 if dtype == 0 else 2
    if layout == "one" and scores:
        scores[:] = [scores[0]] * len(scores)
        return buffers.of(packed(scores[0], dtype)), 0
    before, after = (0, 0) if layout == "whole" else (draw.randint(0, 9), draw.randint(0, 9))
    beside = [math.nan]
    flat = [value for row in scores for value in (*beside * before, *row, *beside * after)]
    if layout == "behind" and after:  # the last row ends with the buffer
        flat = flat[:-after]
    return buffers.of(packed(flat, dtype)) + before * size, before + n + after


def one_loss(library: ctypes.CDLL, loss: dict[str, object], draw: random.Random, digest: object) -> int:
    buffers = Buffers()
    n, m, k = loss["n"], loss["m"], loss["k"]
    rows, dtype = draw.choice([0, 1, 2, 15, 16, 17, 31, 33, 50]), draw.randrange(3)
    p_k_of, reduction, threads = draw.randrange(3), draw.randrange(3), draw.choice([1, 1, 4])
    ignored = draw.choice([-100, 0])
    target = [draw.randrange(n) for _ in range(rows)]
    for row in range(rows):
        if draw.random() < 0.1:
            target[row] = ignored
    wrong = rows > 0 and draw.random() < 0.05
    if wrong:
        target[draw.randrange(rows)] = draw.choice([-1, n, 2**40, -(2**62)])
    scores = drawn_rows(draw, rows, n, k, target)
    start, stride = laid_out(draw, scores, n, dtype, buffers)
    shares = [1 / k] * k
    if draw.random() < 0.3:
        shares = [0.0] * (k - 1) + [1.0]
    several = {0: 1, 1: n, 2: rows}[p_k_of]
    powers, rate = loss["powers"], loss["rate"]
    if powers:
        spec, run = SMOOTH.pack(*loss["numbers"]), library.anyk_smooth
    else:
        tables = [buffers.of(table) for table in loss["tables"]] or [0, 0, 0]
        sorting = loss["sorting"]
        spec = SPEC.pack(*loss["numbers"], *tables, len(sorting) // 8, buffers.of(sorting) if sorting else 0)
        run = library.anyk_forward
    weight = buffers.of(struct.pack(f"{n}f", *(draw.random() for _ in range(n)))) if draw.random() < 0.3 else 0
    result = 1 if reduction != 2 else rows
    results = [buffers.room(4 * size) for size in (result, rows * m, rows * m, rows * loss["rest"], 1, rows)]
    with_gradient, given = draw.random() < 0.8, 0
    kept = [address if with_gradient else 0 for address in results[1:]]
    if not loss["rest"]:
        kept[2] = 0
    if loss["given"]:
        given = buffers.of(struct.pack(f"{rows}f", *(draw.random() for _ in range(rows))))
    else:
        kept[4] = 0
    batch = BATCH.pack(
        rows, stride, ignored, dtype, p_k_of, reduction, threads, start, buffers.of(struct.pack(f"{rows}q", *target)),
        buffers.of(struct.pack(f"{several * k}d", *shares * several)), weight, given, results[0], *kept,
    )  # fmt: skip
    status = run(buffers_bytes(buffers, spec), buffers_bytes(buffers, batch))
    assert status in (FINE, BAD_TARGET, PADDED_TARGET, TOO_FEW, STRANGE), status
    assert not wrong or status == BAD_TARGET, "a wrong target was taken"
    if status == FINE:
        digest.update(ctypes.string_at(results[0], 4 * result))
    if status == FINE and with_gradient and loss["given"]:
        digest.update(ctypes.string_at(kept[4], 4 * rows))
    if status == FINE and with_gradient:
        single = reduction != 2
        apart = draw.choice([0, 1, 3])
        incoming = buffers.of(
            struct.pack("f", 0.5) if single or not apart else struct.pack("f", 0.5) * ((rows - 1) * apart + 1)
        )
        size, beside = 4 if dtype == 0 else 2, draw.choice([0, 0, 3])
        out = buffers.room(max(0, rows * (n + beside) - beside) * size)
        back = BACKWARD.pack(
            rows, n, m, stride, n + beside, 0 if single else apart, dtype, powers, threads, single, rate,
            start, kept[0], kept[1], kept[2], kept[3] if single else 0, incoming, out,
        )  # fmt: skip
        assert library.anyk_backward(buffers_bytes(buffers, back)) == FINE
        for row in range(rows):
            digest.update(ctypes.string_at(out + row * (n + beside) * size, n * size))
    buffers.free()
    return status


def buffers_bytes(buffers: Buffers, content: bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(buffers.of(content))


def one_selection(library: ctypes.CDLL, draw: random.Random, digest: object) -> None:
    buffers = Buffers()
    n = draw.choice([draw.randint(1, 70), draw.randint(1, 70), draw.choice([127, 128, 129, 255, 257, 1000, 3000])])
    m, rows, dtype = draw.choice([1, n, draw.randint(1, n), min(n, 64)]), draw.choice([0, 1, 3, 17]), draw.randrange(3)
    scores = drawn_rows(draw, rows, n, 1, [0] * rows)
    start, stride = laid_out(draw, scores, n, dtype, buffers)
    classes = buffers.room(8 * rows * m)
    selection = SELECTION.pack(rows, n, m, stride, dtype, draw.choice([1, 4]), start, classes)
    status = library.anyk_best(buffers_bytes(buffers, selection))
    if status == FINE:
        found = ctypes.string_at(classes, 8 * rows * m)
        assert all(0 <= c < n for c in struct.unpack(f"{rows * m}q", found))
        digest.update(found)
    buffers.free()


def one_mask(library: ctypes.CDLL, draw: random.Random, digest: object) -> None:
    """A mask or the thresholds, and the gradient, of each operator, with one k for all rows or one for each."""
    buffers = Buffers()
    n = draw.choice([draw.randint(1, 70), draw.choice([127, 128, 129, 255, 257, 1000, 3000])])
    rows, dtype, threads = draw.choice([0, 1, 3, 17]), draw.randrange(3), draw.choice([1, 4])
    if draw.random() < 0.03:  # long rows, which threads share
        n, rows, threads = draw.choice([65536, 70_001]), draw.choice([1, 2]), 4
    kind = int(draw.choice([ABI["Operator"].LAPSUM, ABI["Operator"].PERMUTAHEDRON, ABI["Operator"].KSUBSET]))
    subset = kind == ABI["Operator"].KSUBSET
    of_threshold = kind == ABI["Operator"].LAPSUM and draw.random() < 0.3
    scores = drawn_rows(draw, rows, n, 1, [0] * rows)
    start, stride = laid_out(draw, scores, n, dtype, buffers)
    ks = [draw.choice([0, 1, n / 2, n - 1, n, draw.uniform(0, n)]) for _ in range(rows)]
    rate, size = draw.choice([0.01, 1.0, 1000.0]), 4 if dtype == 0 else 2
    kept = 8 * rows * (3 if subset else 1)
    threshold, out = buffers.room(kept), 0 if of_threshold else buffers.room(size * rows * n)
    each = buffers.of(struct.pack(f"{rows}d", *ks)) if draw.random() < 0.5 and not subset else 0
    given = (rows, n, stride, dtype, threads, kind, 0, draw.choice([1, draw.randint(0, n)]), rate, start, each, threshold, out)
    status = library.anyk_mask(buffers_bytes(buffers, MASK.pack(*given)))
    assert status in (FINE, STRANGE)
    if status == FINE:
        digest.update(ctypes.string_at(threshold, kept) + (ctypes.string_at(out, size * rows * n) if out else b""))
        noise = [draw.gauss(0, 1) for _ in range(rows if of_threshold else rows * n)]
        incoming = buffers.of(struct.pack(f"{rows}d", *noise) if of_threshold else packed(noise, dtype))
        of_k, of_rate = (draw.choice([0, buffers.room(8 * rows)]) for _ in range(2))
        results = buffers.room(size * rows * n), 0 if subset else of_k, of_rate  # KSubset has no gradient by k
        given = (rows, n, stride, n, dtype, threads, kind, of_threshold, rate, start, threshold, incoming, *results)
        assert library.anyk_mask_backward(buffers_bytes(buffers, MASK_BACKWARD.pack(*given))) == FINE
        digest.update(ctypes.string_at(results[0], size * rows * n))
        for result in filter(None, results[1:]):
            digest.update(ctypes.string_at(result, 8 * rows))
    buffers.free()


def one_network_mask(library: ctypes.CDLL, draw: random.Random, digest: object) -> None:
    """The mask of an odd-even network, and its gradient."""
    buffers = Buffers()
    n, rows = draw.randint(2, 40), draw.choice([0, 1, 15, 16, 17, 33])
    k, ordered = (
        draw.randint(1, n - 1),
        [sorted((float(draw.randint(0, 9)) for _ in range(n)), reverse=True) for _ in range(rows)],
    )
    pairs = [(i, i + 1, layer) for layer in range(n) for i in range(layer % 2, n - 1, 2)]
    tables = (
        buffers.of(struct.pack(f"{3 * len(pairs)}i", *(each for pair in pairs for each in pair))),
        buffers.of(struct.pack(f"{k}i", *range(k))),
    )
    scores = buffers.of(packed([value for row in ordered for value in row], 0))
    order = buffers.of(struct.pack(f"{rows * n}q", *(place for _ in range(rows) for place in draw.sample(range(n), n))))
    swap, threads = int(draw.choice(list(ABI["Swap"]))), draw.choice([1, 4])
    for incoming in (0, buffers.of(packed([draw.gauss(0, 1) for _ in range(rows * n)], 0))):
        results = buffers.room(4 * rows * n), draw.choice([0, buffers.room(8 * rows)])
        given = (rows, n, k, len(pairs), threads, swap, draw.choice([0.01, 1.0, 1000.0]), *tables, scores, order, incoming)
        assert library.anyk_network_mask(buffers_bytes(buffers, NETWORK_MASK.pack(*given, *results))) == FINE
        digest.update(ctypes.string_at(results[0], 4 * rows * n))
    buffers.free()


def one_draw(library: ctypes.CDLL, draw: random.Random, digest: object) -> None:
    """Random subsets: always of size k, of what is not padding."""
    buffers = Buffers()
    n = draw.choice([draw.randint(1, 70), draw.choice([127, 128, 129, 255, 257, 1000, 3000])])
    rows, dtype, k = draw.choice([0, 1, 3, 17]), draw.randrange(3), draw.choice([0, 1, n // 2, n - 1, n, draw.randint(0, n)])
    scores = drawn_rows(draw, rows, n, 1, [0] * rows)
    start, stride = laid_out(draw, scores, n, dtype, buffers)
    divisions = (1 << (n - 1).bit_length()) - 1
    uniform = buffers.of(struct.pack(f"{rows * divisions}d", *(draw.random() for _ in range(rows * divisions))))
    out, size = buffers.room((4 if dtype == 0 else 2) * rows * n), 4 if dtype == 0 else 2
    given = (rows, n, k, stride, dtype, draw.choice([1, 4]), draw.choice([0.01, 1.0, 1000.0]), start, uniform, out)
    status = library.anyk_draw(buffers_bytes(buffers, DRAW.pack(*given)))
    assert status in (FINE, STRANGE)
    if status == FINE:
        digest.update(ctypes.string_at(out, size * rows * n))
    for row in range(rows if status == FINE and dtype == 0 else 0):
        drawn, real = struct.unpack(f"{n}f", ctypes.string_at(out + 4 * row * n, 4 * n)), [s > -math.inf for s in scores[row]]
        if not any(map(math.isnan, scores[row])):
            assert sum(drawn) == min(k, sum(real))
            assert all(value in (0, 1) and (exists or not value) for value, exists in zip(drawn, real, strict=True))
    buffers.free()


def one_ranking(library: ctypes.CDLL, draw: random.Random) -> None:
    """Ranks or a sort, and their gradient, of rows in descending order."""
    buffers = Buffers()
    n, rows = draw.choice([1, 2, draw.randint(1, 70), 1000]), draw.choice([0, 1, 3, 17])
    ordered = [sorted((draw.choice([0.0, draw.gauss(0, 30)]) for _ in range(n)), reverse=True) for _ in range(rows)]
    scores = buffers.of(packed([value for row in ordered for value in row], 0))
    order = buffers.of(struct.pack(f"{rows * n}q", *(place for _ in range(rows) for place in draw.sample(range(n), n))))
    operator, kind = draw.choice([("LAPSUM", 0), ("PERMUTAHEDRON", 0), ("PERMUTAHEDRON", 1)])
    for incoming in (0, buffers.of(packed([draw.gauss(0, 1) for _ in range(rows * n)], 0))):
        results = buffers.room(4 * rows * n), draw.choice([0, buffers.room(8 * rows)])
        given = (rows, n, draw.choice([1, 4]), int(ABI["Operator"][operator]), kind, 0, draw.choice([0.01, 1.0, 1000.0]))
        assert library.anyk_ranking(buffers_bytes(buffers, RANKING.pack(*given, scores, order, incoming, *results))) == FINE
    buffers.free()


def main(path: str, losses_path: str, variant: int, seed: int) -> None:
    library = ctypes.CDLL(path)
    if not library.anyk_use(variant):
        print("not here")  # noqa: T201
        return
    with open(losses_path, "rb") as file:
        losses = pickle.load(file)
    draw, digest, statuses = random.Random(seed), hashlib.sha256(), [0] * 6
    for loss in losses:
        for _ in range(2):
            statuses[one_loss(library, loss, draw, digest)] += 1
        one_selection(library, draw, digest)
    draw = random.Random(seed)
    for _ in range(300):
        one_mask(library, draw, digest)
        one_ranking(library, draw)
        one_draw(library, draw, digest)
    for _ in range(100):
        one_network_mask(library, draw, digest)
    assert all(statuses[:4]), statuses
    print(digest.hexdigest())  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
