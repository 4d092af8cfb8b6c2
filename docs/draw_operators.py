"""Draws operators: P and masks over temperatures, and the loss over the target's score; pictures.py calls it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import anyk
from anyk.lab import plots
from anyk.lab.plots import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from draw_network import STYLE, ordinal

OPERATORS: dict[str, tuple[Callable[[float], anyk.Operator], str, str]] = {
    "Splitter network": (partial(anyk.SortingNetwork, "splitter"), BLUE, "-"),
    "Bitonic network": (partial(anyk.SortingNetwork, "bitonic"), SKY, "--"),
    "Odd-even network": (partial(anyk.SortingNetwork, "odd_even"), "#4D4D4D", ":"),
    "KSubset": (anyk.KSubset, "#7B4EA3", "--"),
    "LapSum": (anyk.LapSum, PURPLE, "-"),
    "NeuralSort": (anyk.NeuralSort, ORANGE, "-"),
    "SinkhornSort": (anyk.SinkhornSort, GREEN, "-"),
    "SoftSort": (anyk.SoftSort, VERMILLION, "--"),
}
"""title -> the operator of a temperature, and how its curve is drawn"""
SOFTMAX = "softmax cross-entropy"

SCORES = (3.0, 2.5, 2.2, 1.5, 1.0, 0.5, 0.0, -1.0)
OTHERS = (3.0, 2.5, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5)
P_K = (0.0, 0.0, 0.0, 0.0, 1.0)
"""the top-5 part alone, where the operators differ most"""


def matrix(
    titles: Sequence[str], temperatures: Sequence[float], path: Path, scores: Sequence[float] = SCORES, k: int = 5
) -> None:
    """P, the probability that a class has a rank, as heat maps: a row for each operator, a column for each temperature."""
    row, cell = torch.tensor(scores, dtype=torch.float64), 0.34
    width, height = len(temperatures) * (len(row) * cell + 0.35) + 2.6, len(titles) * (k * cell + 0.3) + 1.25
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(len(titles), len(temperatures), squeeze=False, sharex=True, sharey=True)
        for title, line in zip(titles, grid, strict=True):
            for temperature, axes in zip(temperatures, line, strict=True):
                probabilities = OPERATORS[title][0](temperature)(row, k)
                image = axes.imshow(probabilities.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
                write_values(axes, probabilities)
                axes.set_yticks(range(k), [ordinal(rank) for rank in range(1, k + 1)])
                axes.tick_params(length=0, labelsize=7.5)
                axes.spines[:].set_visible(False)
                axes.set_xticks(range(len(row)), [f"{score:g}" for score in scores])
            line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9, labelpad=8, weight="bold")
        for temperature, axes in zip(temperatures, grid[0], strict=True):
            axes.set_title(f"temperature {temperature:g}", fontsize=9)
        figure.supxlabel("classes, by their scores", fontsize=9)
        figure.suptitle("P: the probability that a class has a rank", x=0.01, ha="left", fontsize=11, weight="bold")
        bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 2.2 / height * 1.4), aspect=22, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=7.5)
        plots.save(figure, path)


def write_values(axes: Axes, probabilities: Tensor) -> None:
    for rank, line in enumerate(probabilities.tolist()):
        for number, value in enumerate(line):
            if value >= 0.005:
                text = f"{value:.2f}".removeprefix("0") if value < 0.995 else "1"
                axes.text(number, rank, text, ha="center", va="center", fontsize=6, color="white" if value > 0.55 else INK)


def loss_curves(path: Path, temperature: float = 0.5, points: int = 241) -> None:
    """The loss, and its slope, over the target's score, for all operators and for softmax cross-entropy."""
    margin = 2 + 0.25 * (max(OTHERS) - min(OTHERS))
    places = torch.linspace(min(OTHERS) - margin, max(OTHERS) + margin, points, dtype=torch.float64)
    curves = {SOFTMAX: (*curve(places, partial(anyk.topk_cross_entropy, p_k=[1.0])), "black", "-")}
    for title, (operator, colour, line) in OPERATORS.items():
        loss = partial(anyk.topk_cross_entropy, p_k=list(P_K), operator=operator(temperature), m=None)
        curves[title] = (*curve(places, loss), colour, line)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        value_axes, slope_axes = figure.subplots(1, 2, sharex=True)
        for title, (values, slopes, colour, line) in curves.items():
            width = 1.4 if title == SOFTMAX else 1.8
            value_axes.plot(places, values, color=colour, ls=line, lw=width, label=title, gid=f"loss-{title}")
            slope_axes.plot(places, slopes, color=colour, ls=line, lw=width, gid=f"slope-{title}")
        for axes, label in ((value_axes, "loss"), (slope_axes, "derivative of the loss by the target's score")):
            axes.grid(color="#E6E6E6", lw=0.6)
            axes.set_axisbelow(True)
            axes.set(xlabel="score of the target", xlim=(float(places[0]), float(places[-1])))
            axes.set_title(label, loc="left")
            axes.tick_params(length=0)
            for score in OTHERS:
                axes.axvline(score, ymax=0.025, color=INK, lw=1)
        # NeuralSort and SinkhornSort are steeper by a factor n: they may leave the picture so that the others can be seen.
        value_axes.set_ylim(0, 1.5 * float(curves[SOFTMAX][0].max()))
        steepest, flattest = -1.5 / temperature, max(float(slopes.max()) for _, slopes, _, _ in curves.values())
        slope_axes.set_ylim(steepest, flattest - 0.05 * steepest)
        weights = ", ".join(f"{weight:g}" for weight in P_K)
        title = f"The loss for P_K = [{weights}], temperature {temperature:g}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        note = "ticks at the bottom:\nscores of the others"
        figure.legend(loc="outside right center", frameon=False, fontsize=8.5, title=note, title_fontsize=8)
        plots.save(figure, path)


def curve(places: Tensor, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and slope at each score of the target, which stands behind the others."""
    column = places.clone().requires_grad_()
    scores = torch.cat([torch.tensor(OTHERS).expand(len(column), -1), column[:, None]], 1)
    values = loss(scores, torch.full((len(column),), len(OTHERS)), reduction="none")
    (slopes,) = torch.autograd.grad(values.sum(), column)
    return values.detach(), slopes


CHOICES = (2.4, 1.9, 1.5, 1.1, 0.9, 0.4, 0.1, -0.2, -0.6, -1.0, -1.5, -2.1)
"""the scores of the picture of masks"""


MASKS: dict[str, tuple[Callable[[float], anyk.Operator], str]] = {
    "LapSum": (anyk.LapSum, BLUE),
    "KSubset": (anyk.KSubset, "#7B4EA3"),
    "Permutahedron": (anyk.Permutahedron, GREEN),
}
"""title -> the operator of a temperature, and the colour of its masks"""


def masks(temperatures: Sequence[float], path: Path, scores: Sequence[float] = CHOICES, k: int = 4) -> None:
    """Masks as bars, with the undecided mass: a row for each operator, a column for each temperature."""
    row, places = torch.tensor(scores, dtype=torch.float64), range(len(scores))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.35 * len(MASKS) + 1.1), layout="constrained")
        grid = figure.subplots(len(MASKS), len(temperatures), squeeze=False, sharex=True, sharey=True)
        for (title, (operator, colour)), line in zip(MASKS.items(), grid, strict=True):
            for temperature, axes in zip(temperatures, line, strict=True):
                mask = operator(temperature).mask(row, k)
                undecided = abs(float((mask * (1 - mask)).sum()))  # a last digit above 1 is no less than nothing
                axes.bar(places, mask.tolist(), color=colour, width=0.8, gid=f"mask-{title}-{temperature:g}")
                axes.plot([-0.5, k - 0.5, k - 0.5, len(row) - 0.5], [1, 1, 0, 0], color=INK, lw=0.9, ls=(0, (4, 2)))
                axes.text(len(row) - 0.5, 0.97, f"{undecided:.2f}", ha="right", va="top", fontsize=12, weight="bold")
                axes.set(xlim=(-0.7, len(row) - 0.3), ylim=(0, 1.12), yticks=(0, 1))
                axes.set_xticks(places, [f"{score:g}" if place % 3 == 0 else "" for place, score in enumerate(scores)])
                axes.tick_params(length=0, labelsize=7.5)
                axes.spines[:].set_visible(False)
            line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9, labelpad=8, weight="bold")
        for temperature, axes in zip(temperatures, grid[0], strict=True):
            axes.set_title(f"temperature {temperature:g}", fontsize=9)
        most = k * (1 - k / len(row))
        note = f"dashed: the exact {k}; in bold: the undecided mass, sum m (1 - m), at most k (1 - k/n) = {most:.2f}"
        figure.supxlabel(f"entries, by their scores; {note}", fontsize=9)
        figure.suptitle(f"soft_topk of {len(row)} scores, k = {k}", x=0.01, ha="left", fontsize=11, weight="bold")
        plots.save(figure, path)
