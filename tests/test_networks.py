"""Networks: the paper's depth table, the 0-1 principle, pruning and packing."""

import random
import subprocess
import sys

import pytest

from anyk import networks
from oracles import run_network

SELECTION_KINDS = ("bitonic", "odd_even_merge", "pairwise")

# Table 7 of the paper: n -> full sort, classical selection for k = 1..8, splitter selection for k = 1..8
DEPTHS = {
    16: (10, (4, 7, 9, 9, 10, 10, 10, 10), (4, 6, 7, 8, 10, 11, 12, 13)),
    1024: (55, (10, 19, 27, 27, 34, 34, 34, 34), (10, 14, 16, 18, 22, 25, 27, 29)),
    10450: (105, (14, 27, 39, 39, 50, 50, 50, 50), (14, 18, 20, 23, 27, 30, 32, 34)),
    65536: (136, (16, 31, 45, 45, 58, 58, 58, 58), (16, 20, 22, 25, 29, 32, 34, 36)),
}


@pytest.mark.parametrize("n", [16, 1024, 10450, pytest.param(65536, marks=pytest.mark.full)])
def test_depth_table(n):
    full, classical, splitter = DEPTHS[n]
    assert networks.bitonic(n).depth == full
    assert tuple(networks.splitter(n, k).depth for k in range(1, 9)) == splitter
    for kind in SELECTION_KINDS:
        assert tuple(networks.selection(n, k, kind).depth for k in range(1, 9)) == classical
    for build in (networks.bitonic, networks.splitter, networks.selection):
        build.cache_clear()  # half a gigabyte of comparators at n = 65536


def builders(n):
    """Every network for n wires, with the number of outputs it promises."""
    yield networks.odd_even(n), n
    yield networks.bitonic(n), n
    for k in range(1, n + 1):
        yield networks.odd_even(n).top(k), k
        yield networks.bitonic(n).top(k), k
        yield networks.splitter(n, k), k
        for kind in SELECTION_KINDS:
            yield networks.selection(n, k, kind), k


def works_on(network, rows_of_bits):
    """The 0-1 principle on many inputs at once: bit b of wires[i] is wire i's value in input b."""
    wires = list(rows_of_bits)
    for layer in network.layers:
        for i, j in layer:
            wires[i], wires[j] = wires[i] | wires[j], wires[i] & wires[j]
    return [wires[wire] for wire in network.outputs]


def sorted_bits(rows_of_bits, k):
    """Output r is 1 in the inputs that have more than r ones."""
    at_least = [~0] + [0] * len(rows_of_bits)  # at_least[c]: inputs with at least c ones so far
    for row in rows_of_bits:
        for c in range(len(rows_of_bits), 0, -1):
            at_least[c] |= at_least[c - 1] & row
    return at_least[1 : k + 1]


@pytest.mark.parametrize("n", range(1, 13))
def test_all_zero_one_inputs(n):
    inputs = [sum(1 << b for b in range(1 << n) if b >> i & 1) for i in range(n)]
    for network, k in builders(n):
        assert works_on(network, inputs) == sorted_bits(inputs, k), (network.n, k)


@pytest.mark.parametrize("n", [13, 16, 17, 31, 50, 64, 100, 255])
def test_sampled_zero_one_inputs(n):
    bits = random.Random(n)
    inputs = [bits.getrandbits(4000) & bits.getrandbits(4000) for _ in range(n)]
    mostly_zero = [row & bits.getrandbits(4000) & bits.getrandbits(4000) for row in inputs]
    cases = [(networks.odd_even(n), n), (networks.bitonic(n), n)]
    for k in (1, 2, 5, 8):
        cases.append((networks.splitter(n, k), k))
        cases += [(networks.selection(n, k, kind), k) for kind in SELECTION_KINDS]
    for network, k in cases:
        for rows in (inputs, mostly_zero):
            assert works_on(network, rows) == sorted_bits(rows, k)


def test_numbers_are_selected():
    values = random.Random(0).sample(range(1000), 100)
    assert run_network(networks.splitter(100, 7), values) == sorted(values, reverse=True)[:7]


def test_pruning_keeps_the_layers():
    full, pruned = networks.bitonic(16), networks.bitonic(16).top(3)
    assert pruned.depth == full.depth
    assert all(set(few) <= set(many) for few, many in zip(pruned.layers, full.layers, strict=True))
    assert pruned.size < full.size


def test_splitter_size_of_the_paper_scale():
    assert networks.splitter(1000, 5).size == 3046


def test_every_kept_comparator_matters():
    # without any one of them some 0-1 input comes out wrong
    everything = [sum(1 << b for b in range(1 << 12) if b >> i & 1) for i in range(12)]
    network = networks.splitter(12, 4)
    for number, layer in enumerate(network.layers):
        for pair in layer:
            layers = [tuple(p for p in other if p != pair) if i == number else other for i, other in enumerate(network.layers)]
            broken = networks.Network(12, tuple(layers), network.outputs)
            assert works_on(broken, everything) != sorted_bits(everything, 4), pair


def test_packed_is_the_same_network_in_fewer_layers():
    network = networks.splitter(1024, 5)
    packed = network.packed()
    assert (network.depth, packed.depth) == (22, 21)
    assert sorted(sum(packed.layers, ())) == sorted(sum(network.layers, ()))
    values = random.Random(1).sample(range(10**6), 1024)
    assert run_network(packed, values) == run_network(network, values)


def test_network_is_a_value():
    network = networks.splitter(8, 2)
    again = networks.Network(network.n, network.layers, network.outputs)
    assert network == again
    assert hash(network) == hash(again)
    assert network != networks.splitter(8, 3)
    with pytest.raises(AttributeError):
        network.n = 9
    assert networks.splitter(8, 2) is network  # cached


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: networks.bitonic(0), ValueError, "n: expected at least 1 wire, got 0"),
        (lambda: networks.splitter(4, 5), ValueError, "k: expected 1 <= k <= n=4, got 5"),
        (lambda: networks.splitter(8, 2.0), TypeError, "k: expected an integer, got 2.0"),
        (lambda: networks.odd_even(True), TypeError, "n: expected an integer, got True"),
        (lambda: networks.selection(8, 2, "quick"), ValueError, "kind: expected one of bitonic, odd_even_merge, pairwise"),
        (lambda: networks.Network(4, (((0, 1), (1, 2)),), (0,)), ValueError, "layers: expected disjoint"),
        (lambda: networks.Network(4, (((2, 1),),), (0,)), ValueError, r"layers: expected comparators .* got \(2, 1\)"),
        (lambda: networks.Network(4, (), (0, 4)), ValueError, "outputs: expected distinct wires"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_torch_in_networks():
    source = networks.__file__
    code = f"import runpy, sys; runpy.run_path({source!r}, run_name='networks'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
