"""Pictures: files that open, with what should be in them."""

import itertools
import re
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from anyk import networks
from anyk.lab import network_pictures, pictures
from anyk.lab.errors import LabError
from anyk.lab.network_pictures import network


def ids(path):
    return [element.get("id") for element in ElementTree.parse(path).iter() if element.get("id")]


def texts(path):
    return [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("kind", network_pictures.drawable())
@pytest.mark.parametrize(("n", "k"), [(16, 5), (7, 3)])
def test_every_comparator_is_drawn_once_where_it_is(tmp_path, kind, n, k):
    path = network(kind, n, k, tmp_path / "network.svg")
    built = network_pictures.drawable()[kind][1](n, k)
    drawn = sorted(name for name in ids(path) if name.startswith("comparator-"))
    assert drawn == sorted(f"comparator-{layer}-{i}-{j}" for layer, pairs in enumerate(built.layers) for i, j in pairs)
    assert sum(name.startswith("wire-") for name in ids(path)) == n
    assert sorted(name for name in ids(path) if name.startswith("settled-")) == [
        f"settled-{wire}" for wire in sorted(built.outputs)
    ]
    assert f"{built.depth} layers, {built.size} comparators; the larger value goes to the upper wire" in texts(path)


def test_the_splitter_of_the_paper(tmp_path):
    path = network("splitter", 16, 5, tmp_path / "network.svg")
    assert sum(name.startswith("pruned-") for name in ids(path)) == 2
    labels = texts(path)
    assert {"1st", "5th", "wire drops out", "rank is settled", "not needed for these outputs"} <= set(labels)
    assert "15" in labels  # the least rank of the last wire after the first cascade, and the wire's number
    assert labels.count("15") == 2


@pytest.mark.parametrize(("n", "k"), [(8, 3), (16, 5), (33, 6)])
def test_least_ranks_of_the_construction_are_true(n, k):
    values = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(seed)) for seed in range(200)])
    cascades = networks.splitter_cascades(n, k)
    for layer in range(max(cascade.end for cascade in cascades)):
        for cascade in cascades:
            for i, j in cascade.layers[layer - cascade.start] if cascade.start <= layer < cascade.end else ():
                pair = values[:, [i, j]]
                values[:, i], values[:, j] = pair.max(1).values, pair.min(1).values
        ranks = n - 1 - values
        for cascade in cascades:
            if cascade.end == layer + 1:
                least = ranks[:, list(cascade.wires)].min(0).values
                assert (least >= torch.tensor(cascade.ranks)).all()


@pytest.mark.parametrize("kind", ["odd_even", "bitonic"])
def test_known_order_is_true(kind):
    built = network_pictures.drawable()[kind][1](12, 12)
    values = torch.stack([torch.randperm(12) for _ in range(50)])
    for layer, order in zip(built.layers, network_pictures._known_order(built), strict=True):
        for i, j in layer:
            values[:, i], values[:, j] = values[:, [i, j]].max(1).values, values[:, [i, j]].min(1).values
        no_less = (values[:, :, None] >= values[:, None, :]).all(0)
        assert not (order & ~no_less).any()


def test_comparators_of_a_layer_do_not_touch():
    for columns in (network_pictures._side_by_side(layer) for layer in networks.bitonic(32).layers):
        for column in columns:
            assert all(before[1] < after[0] for before, after in itertools.pairwise(column))


def test_packed_has_the_same_comparators_in_its_own_layers(tmp_path):
    path = network("splitter", 32, 5, tmp_path / "network.svg", packed=True)
    built = networks.splitter(32, 5).packed()
    drawn = sorted(name for name in ids(path) if name.startswith("comparator-"))
    assert drawn == sorted(f"comparator-{layer}-{i}-{j}" for layer, pairs in enumerate(built.layers) for i, j in pairs)


def test_sixty_four_wires_and_one(tmp_path):
    for n in (64, 1):
        with Image.open(network("splitter", n, min(n, 5), tmp_path / f"{n}.png")) as picture:
            picture.load()
            assert picture.width > 600
            assert picture.convert("L").getextrema()[0] < 60  # something dark is on it


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_suffix_is_the_format(tmp_path, suffix):
    path = network("bitonic", 4, 2, tmp_path / f"network.{suffix}")
    start = path.read_bytes()[:400]
    assert {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}[suffix] in start


def test_the_same_picture_is_the_same_file(tmp_path):
    first, second = (network("splitter", 8, 3, tmp_path / f"{name}.svg").read_bytes() for name in "ab")
    assert first == second


def test_matrix(tmp_path):
    path = pictures.matrix(["splitter", "lapsum"], [2.0, 1.0, 0.0], 2, [0.01, 1.0], tmp_path / "matrix.svg")
    labels = texts(path)
    assert {"Splitter network", "LapSum", "temperature 0.01", "temperature 1", "1st", "2nd"} <= set(labels)
    assert labels.count("1") >= 4  # at a small temperature P is a permutation: two operators, two ranks
    with Image.open(pictures.matrix(["bitonic", "sinkhorn"], torch.arange(24.0), 15, [1], tmp_path / "large.png")) as picture:
        picture.load()


def test_loss_curves(tmp_path):
    path = pictures.loss_curves(tmp_path / "loss.svg", points=21)
    for title in ("softmax cross-entropy", *pictures.operator_titles().values()):
        assert f"loss-{title}" in ids(path)
        assert f"slope-{title}" in ids(path)
        assert title in texts(path)


def test_curve_is_the_loss_and_its_slope():
    places = torch.linspace(-3, 3, 13, dtype=torch.float64)
    values, slopes = pictures._curve(
        places, torch.tensor([0.0, 1.0]), lambda s, y: -s.log_softmax(1).gather(1, y[:, None])[:, 0]
    )
    expected = torch.stack([torch.zeros(13), torch.ones(13), places], 1).softmax(1)[:, 2]
    torch.testing.assert_close(values, -expected.log())
    torch.testing.assert_close(slopes, expected - 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: network("quick", 8, 2, path / "a.png"), "kind should be one of splitter, bitonic"),
        (
            lambda path: network("splitter", 0, 1, path / "a.png"),
            "n should be an integer between 1 and 128, but is 0",
        ),
        (lambda path: network("splitter", 129, 1, path / "a.png"), "n should be an integer between 1 and 128"),
        (
            lambda path: network("splitter", 8, 9, path / "a.png"),
            "k should be an integer between 1 and 8, but is 9",
        ),
        (lambda path: network("splitter", 8.0, 2, path / "a.png"), "n should be an integer"),
        (
            lambda path: network("splitter", 8, 2, path / "a.jpeg"),
            r"a\.jpeg should end in \.png, \.svg, \.pdf",
        ),
        (lambda path: network("splitter", 8, 2, path / "no" / "a.png"), "no should be a folder that exists"),
        (lambda path: network("splitter", 8, 2, path / "folder.png"), r"folder\.png could not be written"),
        (lambda path: pictures.matrix(["quick"], [1.0, 2.0], 1, [1], path / "a.png"), "operators should be one of"),
        (lambda path: pictures.matrix(["lapsum"], [1.0, float("nan")], 1, [1], path / "a.png"), "scores should be"),
        (lambda path: pictures.matrix(["lapsum"], ["a"], 1, [1], path / "a.png"), "scores should be a list of numbers"),
        (
            lambda path: pictures.matrix(["lapsum"], [1.0, 2.0], 3, [1], path / "a.png"),
            "k should be an integer between 1 and 2",
        ),
        (lambda path: pictures.matrix(["lapsum"], [1.0, 2.0], 1, [0], path / "a.png"), "temperatures should be positive"),
        (lambda path: pictures.matrix([], [1.0, 2.0], 1, [1], path / "a.png"), "at least one entry"),
        (lambda path: pictures.loss_curves(path / "a.png", p_k=[0.5]), "p_k should be at most 9 weights"),
        (lambda path: pictures.loss_curves(path / "a.png", top1="first"), "top1 should be separate, mixed or operator"),
        (lambda path: pictures.loss_curves(path / "a.png", temperature=-1), "temperatures should be positive"),
    ],
)
def test_bad_arguments(tmp_path, call, message):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(LabError, match=message):
        call(tmp_path)
    assert not re.search("a\\.", " ".join(path.name for path in tmp_path.iterdir()))
