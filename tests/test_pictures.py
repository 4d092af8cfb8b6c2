"""The pictures of the guide: drawn the same each time, with what should be in them."""

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import draw_network
import draw_operators
import pictures
from anyk import networks

DOCS = Path(__file__).parent.parent / "docs"


def ids(path):
    return [element.get("id") for element in ElementTree.parse(path).iter() if element.get("id")]


def texts(path):
    return [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(("n", "k"), [(16, 5), (7, 3)])
def test_every_comparator_is_drawn_once_where_it_is(tmp_path, n, k):
    path = tmp_path / "network.svg"
    draw_network.network(n, k, path)
    built = networks.splitter(n, k)
    drawn = sorted(name for name in ids(path) if name.startswith("comparator-"))
    assert drawn == sorted(f"comparator-{layer}-{i}-{j}" for layer, pairs in enumerate(built.layers) for i, j in pairs)
    assert sum(name.startswith("wire-") for name in ids(path)) == n
    assert {name for name in ids(path) if name.startswith("settled-")} == {f"settled-{wire}" for wire in built.outputs}
    assert f"{built.depth} layers, {built.size} comparators; the larger value goes to the upper wire" in texts(path)


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


def test_comparators_of_a_layer_do_not_touch():
    for columns in (draw_network.side_by_side(layer) for layer in networks.bitonic(32).layers):
        for column in columns:
            assert all(before[1] < after[0] for before, after in itertools.pairwise(column))


def test_matrix(tmp_path):
    path = tmp_path / "matrix.svg"
    draw_operators.matrix(["Splitter network", "LapSum"], [0.01, 1.0], path, [2.0, 1.0, 0.0], 2)
    labels = texts(path)
    assert {"Splitter network", "LapSum", "temperature 0.01", "temperature 1", "1st", "2nd"} <= set(labels)
    assert labels.count("1") >= 4  # at a small temperature P is a permutation: two operators, two ranks


def test_masks(tmp_path):
    path = tmp_path / "masks.svg"
    draw_operators.masks([0.01, 1e6], path, [2.0, 1.0, 0.0, -1.0], 2)
    labels = texts(path)
    assert {*draw_operators.MASKS, "temperature 0.01", "temperature 1e+06"} <= set(labels)
    assert labels.count("0.00") == labels.count("1.00") == len(draw_operators.MASKS)  # undecided: nothing, and k (1 - k / n)


def test_loss_curves(tmp_path):
    path = tmp_path / "loss.svg"
    draw_operators.loss_curves(path, points=21)
    for title in (draw_operators.SOFTMAX, *draw_operators.OPERATORS):
        assert {f"loss-{title}", f"slope-{title}"} <= set(ids(path))
        assert title in texts(path)


def test_curve_is_the_loss_and_its_slope():
    places = torch.linspace(-3, 3, 13, dtype=torch.float64)
    values, slopes = draw_operators.curve(places, torch.nn.functional.cross_entropy)
    others = torch.tensor(draw_operators.OTHERS).expand(13, -1)
    expected = torch.cat([others, places[:, None]], 1).softmax(1)[:, -1]
    torch.testing.assert_close(values, -expected.log())
    torch.testing.assert_close(slopes, expected - 1)


def test_pictures_are_drawn_the_same_each_time(tmp_path):
    for name in ("first", "second"):
        pictures.idea(tmp_path / f"{name}.svg")
        draw_network.network(8, 3, tmp_path / f"{name}-network.svg")
    for name in ("", "-network"):
        assert (tmp_path / f"first{name}.svg").read_bytes() == (tmp_path / f"second{name}.svg").read_bytes()


def test_runs_of_the_study_are_plotted(tmp_path):
    for name, chosen in pictures.PLOTS.items():
        pictures.plot(tmp_path / name, chosen)
        assert "<path" in (tmp_path / name).read_text()


def test_every_picture_of_the_guide_is_drawn_by_something():
    pages = [DOCS / "evidence.md"]  # `make evidence` draws its
    by_evidence = {name for page in pages for name in re.findall(r"\(images/([\w-]+\.svg)\)", page.read_text())}
    drawn_here = {*pictures.DRAWINGS, *pictures.PLOTS, *pictures.PAGES}
    assert {file.name for file in pictures.IMAGES.iterdir()} == drawn_here | by_evidence
    assert all(file.stat().st_size < 100_000 for file in pictures.IMAGES.iterdir())


def test_pixels_that_methods_keep(tmp_path):
    path = tmp_path / "pixels.svg"
    pictures.pixels(path)
    found = json.loads(pictures.SELECTION.read_text())["sets"]["mnist"]["methods"]
    shown = [method for method in pictures.CHOOSERS if "chosen" in found.get(method, {})]
    assert "mask" in shown
    assert [name for name in ids(path) if name.startswith("pixels-")] == [f"pixels-{method}" for method in shown]
    for method in shown:
        assert f"{found[method]['mean']:.1f} % right" in texts(path)
        (group,) = (element for element in ElementTree.parse(path).iter() if element.get("id") == f"pixels-{method}")
        assert sum(element.tag.endswith("}use") for element in group.iter()) == 20
