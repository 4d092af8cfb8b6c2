"""Which start wire of the target shifts T least against the sorted order.

    python benchmarks/wires.py

With wires="target" a network starts the target on one fixed wire and the others, in descending order, on the rest. T then
differs from the T of the sorted order. For each kind, n and k this prints the shift of T_k, its mean and its mean absolute
value over random scores and several temperatures: for the library's wire, for the best wire (least mean absolute shift) and
for wire 0.
"""

from __future__ import annotations

import time

import torch
from measuring import markdown_table
from torch import Tensor

from anyk import SortingNetwork
from anyk.registry import NETWORKS

SIZES = (8, 16, 32, 50, 100)
KS = (1, 2, 3, 5, 10)
TEMPERATURES = (0.25, 0.5, 1.0)
EXAMPLES = 300
WIRES_AT_ONCE = 4
SELECTS = ("splitter",)  # kinds whose network depends on k; the others give T_1, …, T_10 in one pass


def examples(n: int) -> tuple[Tensor, Tensor]:
    """Normal scores in descending order and the target's place: mostly among the best 8, where T is neither 0 nor 1."""
    scores = torch.randn(EXAMPLES, n).sort(dim=-1, descending=True).values
    anywhere, ahead = torch.randint(n, (EXAMPLES,)), torch.randint(min(8, n), (EXAMPLES,))
    return scores, torch.where(torch.rand(EXAMPLES) < 0.7, ahead, anywhere)


def with_target_on_each_wire(scores: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Descending scores (B, n) -> (n wires, B, n) for wires="given", and the target's class there."""
    n = scores.shape[-1]
    wire = torch.arange(n)
    start = wire[:, None, None]
    other = wire - (wire > start).long()
    classes = torch.where(wire == start, place[:, None], other + (other >= place[:, None]))
    on_wires = scores.expand(n, -1, -1).gather(-1, classes)
    # "given" puts the last class on the first wire.
    return on_wires.flip(-1), (n - 1 - wire)[:, None].expand(-1, len(scores))


def shifts(kind: str, n: int, ks: tuple[int, ...]) -> dict[int, Tensor]:
    """For each k: (wires, 2), the mean and the mean absolute shift of T_k."""
    sums = {k: torch.zeros(n, 2) for k in ks}
    for temperature in TEMPERATURES:
        scores, place = examples(n)
        arranged, target = with_target_on_each_wire(scores, place)
        given, in_order = (SortingNetwork(kind, temperature, wires=wires) for wires in ("given", "sorted"))
        passes = [(k,) for k in ks] if kind in SELECTS else [ks]
        for group in passes:
            most = max(group)
            # A few wires at a time: the whole does not fit into the processor's cache and takes several times as long.
            chunks = zip(arranged.split(WIRES_AT_ONCE), target.split(WIRES_AT_ONCE), strict=True)
            included = torch.cat([given.inclusion(*chunk, most) for chunk in chunks])
            expected = in_order.inclusion(scores, place, most)
            shift = included - expected
            chosen = SortingNetwork(kind, temperature).inclusion(scores, place, most) - expected
            # The library's own arrangement must be one of ours, or this table would be about something else.
            torch.testing.assert_close(shift[library_wire(kind, n)], chosen, atol=1e-5, rtol=0)
            for k in group:
                shift_k = shift[..., k - 1]
                sums[k] += torch.stack([shift_k.mean(-1), shift_k.abs().mean(-1)], -1) / len(TEMPERATURES)
    return sums


def library_wire(kind: str, n: int) -> int:
    return int(NETWORKS[kind].target_wire(torch.tensor(n)))


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for kind in NETWORKS:
            for n in SIZES:
                for k, shift in shifts(kind, n, tuple(k for k in KS if k <= n)).items():
                    best = int(shift[:, 1].argmin())
                    cells: list[object] = [kind, n, k]
                    for wire in (library_wire(kind, n), best, 0):
                        cells += [wire, f"{shift[wire, 0]:+.3f}", f"{shift[wire, 1]:.3f}"]
                    rows.append(cells)
    header = ["kind", "n", "k"]
    for which in ("library's", "best", "first"):
        header += [f"{which} wire", "mean", "mean abs"]
    print(markdown_table(header, rows))
    print(f"\n{EXAMPLES} examples at temperatures {TEMPERATURES}; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
