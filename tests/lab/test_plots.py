"""Tables as plots: the same table gives the same file, and what is drawn follows from what differs."""

import pytest

import made
from anyk.lab import plots
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.summaries import collect, table

BASE = Config(data="some_data")


def test_plots(tmp_path):
    for loss in ("softmax", "splitter"):
        made.run_folder(tmp_path / loss, BASE.replace(loss=loss), {"top1": 0.5, "top5": 0.9})
    found = table(collect([tmp_path]))
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        file = tmp_path / "plots" / f"bars.{suffix}"
        plots.plot(found, file)
        first = file.read_bytes()
        assert first.startswith(start)
        plots.plot(found, file)
        assert file.read_bytes() == first
    with pytest.raises(LabError, match=r"bars\.gif"):
        plots.plot(found, tmp_path / "bars.gif")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Make runs of configs with these test accuracies, plot them, and return the figure."""
    figures_made = []
    monkeypatch.setattr(plots, "save", lambda figure, path, dpi: figures_made.append(figure))

    def draw(*runs, seeds=1, **options):
        folder = tmp_path / str(len(figures_made))
        for number, (config, test) in enumerate(runs):
            for seed in range(seeds):
                made.run_folder(folder / f"{number}-{seed}", config.replace(seed=seed), test(seed) if callable(test) else test)
        plots.plot(table(collect([folder])), tmp_path / "plot.svg", **options)
        figures_made[-1].draw_without_rendering()
        return figures_made[-1]

    return draw


def names_in(legend):
    return [each.get_text() for each in legend.get_texts()]


def test_columns_for_the_table_alone_are_not_drawn(drawn):
    runs = [(BASE.replace(temperature=t), {"top1": 0.5, "mrr": 0.6, "ndcg10": 0.6}) for t in (0.5, 1.0)]
    assert [axes.get_title() for axes in drawn(*runs).get_axes()] == ["top-1", "MRR", "NDCG@10"]
    assert [axes.get_title() for axes in drawn(*runs, without=("mrr", "ndcg10")).get_axes()] == ["top-1"]


def test_lines_over_the_number_that_was_swept(drawn):
    figure = drawn(*((BASE.replace(temperature=t), {"top1": 0.5 + t / 100, "top5": 0.9}) for t in (0.1, 1.0, 10.0)))
    panels = figure.get_axes()
    assert [axes.get_title() for axes in panels] == ["top-1", "top-5"]
    assert [axes.get_xlabel() for axes in panels] == ["temperature"] * 2
    assert panels[0].get_xscale() == "log"
    assert panels[0].lines[0].get_xydata().tolist() == [[0.1, pytest.approx(50.1)], [1, 51], [10, pytest.approx(60)]]
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["0.1", "1", "10"]
    assert figure.legends == []  # one line needs no name


def test_a_line_for_each_loss_and_a_level_for_one_without_the_number(drawn):
    runs = [(BASE.replace(loss=loss, m=m), {"top1": 0.5 + m / 1000}) for loss in ("lapsum", "splitter") for m in (8, 16)]
    figure = drawn((BASE.replace(loss="softmax"), {"top1": 0.4}), *runs)
    (axes,) = figure.get_axes()
    assert sorted(names_in(figure.legends[0])) == ["lapsum", "softmax", "splitter"]
    level = next(line for line in axes.lines if line.get_label() == "softmax")
    assert set(level.get_ydata()) == {40.0}
    assert axes.get_xlabel() == "m"


def test_top_1_against_top_k_where_the_loss_differs(drawn):
    tests = {"softmax": (0.6, 0.8), "splitter": (0.55, 0.85), "hinge": (0.5, 0.7), "gce": (0.61, 0.75)}
    figure = drawn(
        *((BASE.replace(loss=loss), {"top1": a, "top5": b, "top10": 0.9}) for loss, (a, b) in tests.items()), seeds=2
    )
    (axes,) = figure.get_axes()
    assert [axes.get_xlabel(), axes.get_ylabel()] == ["top-1 in %, mean ± std", "top-5 in %, mean ± std"]
    assert sorted(names_in(figure.legends[0])) == sorted(tests)
    points = {each.get_label(): each.lines[0].get_xydata().tolist()[0] for each in axes.containers}
    assert points == {name: pytest.approx([100 * a, 100 * b]) for name, (a, b) in tests.items()}
    step = next(line for line in axes.lines if line.get_linestyle() == ":")
    assert step.get_xdata().tolist() == pytest.approx([55, 60, 61])  # hinge is beaten in both
    assert step.get_drawstyle() == "steps-pre"  # for a top-1 between two runs, the top-5 of the one on the right is to be had


def test_methods_with_a_learning_rate_each_make_no_lines(drawn):
    rates = {"softmax": 0.1, "lapsum": 0.2, "gce": 0.3}
    runs = [(BASE.replace(loss=loss, learning_rate=rate), {"top1": rate, "top5": 1 - rate}) for loss, rate in rates.items()]
    assert "gce, learning rate 0.3" in names_in(drawn(*runs).legends[0])


def test_bars_where_neither_a_number_nor_the_loss_differs(drawn):
    runs = [(BASE.replace(optimizer=optimizer), {"top1": 0.5, "top5": 0.9}) for optimizer in ("adam", "sgd")]
    (axes,) = drawn(*runs).get_axes()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["optimizer adam", "optimizer sgd"]
    (axes,) = drawn(*((BASE.replace(loss=loss), {"top1": 0.5}) for loss in ("softmax", "lapsum"))).get_axes()  # no top-k
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["lapsum", "softmax"]


def test_the_mean_of_curves_ends_where_a_seed_stopped():
    assert plots.mean_curve([[(1, 10), (2, 20), (3, 30)], [(1, 20), (2, 40)]]) == [(1, 15), (2, 30)]
    assert plots.mean_curve([[(1, 10)], [(2, 20)]]) == []
