"""Operators, drawn: the matrix P over temperatures, the loss as a function of the target's score."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from anyk.lab import figures
from anyk.lab.errors import LabError
from anyk.lab.figures import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from anyk.lab.run import loss_names
from anyk.losses import Top1, topk_cross_entropy
from anyk.operators import Operator, names
from anyk.operators import by_name as make_operator


def operator_titles() -> dict[str, str]:
    """The operators that can be drawn, by name, with their titles."""
    return {name: loss_names.find(name).title for name in names()}


def matrix(
    operators: Sequence[str] | None,
    scores: Sequence[float] | Tensor,
    k: int,
    temperatures: Sequence[float],
    path: str | Path,
) -> Path:
    """Draw P, the probability that a class has a rank, as heat maps: a row of pictures for each operator, a column for each
    temperature.

    Args:
        operators: by name; None: all.
        scores: the scores of the classes, at most 64.
        k: number of ranks.
        temperatures: smaller is harder.
        path: the file; its suffix is the format.

    Returns:
        The path.
    """
    path = figures.checked_path(path)
    row = _checked_scores(scores)
    n = len(row)
    figures.check_number("k", k, 1, n)
    titles = operator_titles()
    chosen = {name: figures.choose("operators", name, titles) for name in (titles if operators is None else operators)}
    if not chosen or not temperatures:
        raise LabError("operators and temperatures should each have at least one entry.")
    for temperature in temperatures:
        _check_temperature(temperature)
    cell = min(0.34, 3.2 / n)
    with matplotlib.rc_context(figures.PICTURE_STYLE):
        size = (len(temperatures) * (n * cell + 0.35) + 2.6, len(chosen) * (max(k * cell, 0.55) + 0.3) + 1.25)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(chosen), len(temperatures), squeeze=False, sharex=True, sharey=True)
        image = None
        for (name, title), line in zip(chosen.items(), grid, strict=True):
            for temperature, axes in zip(temperatures, line, strict=True):
                with torch.no_grad():
                    probabilities = make_operator(name, temperature=temperature)(row, k)
                image = axes.imshow(probabilities.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
                _write_values(axes, probabilities, cell)
                axes.set_yticks(range(k), [figures.ordinal(rank) for rank in range(1, k + 1)] if k <= 12 else [""] * k)
                axes.tick_params(length=0, labelsize=7.5)
                axes.spines[:].set_visible(False)
                axes.set_xticks(range(n), [f"{score:g}" for score in row.tolist()] if n <= 16 else [""] * n)
            line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9, labelpad=8, weight="bold")
        for temperature, axes in zip(temperatures, grid[0], strict=True):
            axes.set_title(f"temperature {temperature:g}", fontsize=9)
        figure.supxlabel("classes, by their scores", fontsize=9)
        figure.suptitle("P: the probability that a class has a rank", x=0.01, ha="left", fontsize=11, weight="bold")
        assert image is not None
        bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 2.2 / size[1] * 1.4), aspect=22, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=7.5)
        return figures.save(figure, path)


def _write_values(axes: Axes, probabilities: Tensor, cell: float) -> None:
    if cell < 0.27:
        return
    for rank, line in enumerate(probabilities.tolist()):
        for number, value in enumerate(line):
            if value >= 0.005:
                text = f"{value:.2f}".removeprefix("0") if value < 0.995 else "1"
                axes.text(number, rank, text, ha="center", va="center", fontsize=6, color="white" if value > 0.55 else INK)


_SOFTMAX = "softmax cross-entropy"
_CURVES = (
    (BLUE, "-"),
    (SKY, "--"),
    ("#4D4D4D", ":"),
    ("#7B4EA3", "--"),
    (PURPLE, "-"),
    (ORANGE, "-"),
    (GREEN, "-"),
    (VERMILLION, "--"),
)


def loss_curves(
    path: str | Path,
    *,
    operators: Sequence[str] | None = None,
    others: Sequence[float] | Tensor = (3.0, 2.5, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5),
    p_k: Sequence[float] = (0.0, 0.0, 0.0, 0.0, 1.0),
    temperature: float = 0.5,
    top1: Top1 = "separate",
    points: int = 241,
) -> Path:
    """Draw the loss, and its slope, over the target's score, for several operators and for softmax cross-entropy.

    Args:
        path: the file; its suffix is the format.
        operators: by name; None: all.
        others: the scores of the other classes; the target's runs past them on both sides.
        p_k: P_K. The default is the top-5 part alone, where the operators differ most.
        temperature: of all operators.
        top1: how the top-1 part is measured, see :func:`anyk.topk_cross_entropy`.
        points: places at which the loss is computed.

    Returns:
        The path.
    """
    path = figures.checked_path(path)
    rivals = _checked_scores(others)
    _check_temperature(temperature)
    figures.check_number("points", points, 2, 100_000)
    if top1 not in ("separate", "mixed", "operator"):
        raise LabError(f"top1 should be separate, mixed or operator, but is {top1!r}.")
    if not p_k or min(p_k) < 0 or abs(sum(p_k) - 1) > 1e-4 or len(p_k) > len(rivals):
        raise LabError(f"p_k should be at most {len(rivals)} weights that sum to 1 (fewer than classes), but is {list(p_k)}.")
    titles = operator_titles()
    chosen = {name: figures.choose("operators", name, titles) for name in (titles if operators is None else operators)}
    margin = 2 + 0.25 * float(rivals.max() - rivals.min())
    target_scores = torch.linspace(float(rivals.min()) - margin, float(rivals.max()) + margin, points, dtype=torch.float64)
    curves = {
        _SOFTMAX: (
            _curve(target_scores, rivals, lambda s, y: topk_cross_entropy(s, y, [1.0], reduction="none")),
            "black",
            "-",
        )
    }
    for name, title in chosen.items():
        operator = make_operator(name, temperature=temperature)

        def loss(scores: Tensor, target: Tensor, operator: Operator = operator) -> Tensor:
            return topk_cross_entropy(scores, target, list(p_k), operator, top1=top1, reduction="none")

        curves[title] = (_curve(target_scores, rivals, loss), *_CURVES[list(titles).index(name) % len(_CURVES)])
    with matplotlib.rc_context(figures.PICTURE_STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        value_axes, slope_axes = figure.subplots(1, 2, sharex=True)
        for title, ((values, slopes), colour, line) in curves.items():
            width = 1.4 if colour == "black" else 1.8
            value_axes.plot(target_scores, values, color=colour, ls=line, lw=width, label=title, gid=f"loss-{title}")
            slope_axes.plot(target_scores, slopes, color=colour, ls=line, lw=width, gid=f"slope-{title}")
        for axes, label in ((value_axes, "loss"), (slope_axes, "derivative of the loss by the target's score")):
            axes.grid(color="#E6E6E6", lw=0.6)
            axes.set_axisbelow(True)
            axes.set(xlabel="score of the target", xlim=(float(target_scores[0]), float(target_scores[-1])))
            axes.set_title(label, loc="left")
            axes.tick_params(length=0)
            for score in rivals.tolist():
                axes.axvline(score, ymax=0.025, color=INK, lw=1)
        # NeuralSort and SinkhornSort are steeper by a factor n: they may leave the picture so that the others can be seen.
        highest = 1.5 * float(curves[_SOFTMAX][0][0].max())
        steepest = -1.5 * max(1.0, 1 / temperature)
        leaves = any(float(values.max()) > highest for (values, _), _, _ in curves.values())
        value_axes.set_ylim(0, highest if leaves else None)
        if any(float(slopes.min()) < steepest for (_, slopes), _, _ in curves.values()):
            highest_slope = max(float(slopes.max()) for (_, slopes), _, _ in curves.values())
            slope_axes.set_ylim(steepest, highest_slope - 0.05 * steepest)
        weights = ", ".join(f"{weight:g}" for weight in p_k)
        figure.suptitle(
            f"The loss for P_K = [{weights}], temperature {temperature:g}", x=0.01, ha="left", fontsize=11, weight="bold"
        )
        figure.legend(
            loc="outside right center",
            frameon=False,
            fontsize=8.5,
            title="ticks at the bottom:\nscores of the others",
            title_fontsize=8,
        )
        return figures.save(figure, path)


def _curve(target_scores: Tensor, rivals: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and slope at each score of the target, which stands behind the others."""
    column = target_scores.clone().requires_grad_()
    scores = torch.cat([rivals.double().expand(len(column), -1), column[:, None]], 1)
    values = loss(scores, torch.full((len(column),), len(rivals)))
    (slopes,) = torch.autograd.grad(values.sum(), column)
    return values.detach(), slopes


def _check_temperature(temperature: float) -> None:
    if not (isinstance(temperature, (int, float)) and 0 < temperature < math.inf):
        raise LabError(f"temperatures should be positive numbers, but one is {temperature!r}.")


def _checked_scores(scores: Sequence[float] | Tensor) -> Tensor:
    try:
        row = torch.as_tensor(scores, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise LabError("scores should be a list of numbers.") from None
    if row.ndim != 1 or not 2 <= len(row) <= 64 or not bool(row.isfinite().all()):
        raise LabError(
            f"scores should be between 2 and 64 finite numbers, but have the shape {tuple(row.shape)} or are not finite."
        )
    return row
