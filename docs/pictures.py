"""Draws every picture of the guide again: `make pictures`. The same versions give the same files.

The picture of the idea is drawn here, the others by draw_network.py and draw_operators.py. Plots of runs are those of
`anyk report --plot`, of runs of the study that stand in evidence/summaries. Screenshots of pages need a Chromium; that of the
report needs `make demo` before, and stays as it is without.
"""

import base64
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import anyk
import draw_network
import draw_operators
from anyk.lab import plots
from anyk.lab.plots import BLUE, GREEN, INK, ORANGE
from anyk.lab.run import summaries
from anyk.lab.run.config import Config

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"

DRAWINGS: dict[str, Callable[[Path], None]] = {
    "idea.svg": lambda path: idea(path),
    "network.svg": lambda path: draw_network.network(16, 5, path),
    "matrix.svg": lambda path: draw_operators.matrix(
        ["Splitter network", "LapSum", "SoftSort", "SinkhornSort"], [0.1, 1.0], path
    ),
    "loss.svg": draw_operators.loss_curves,
    "masks.svg": lambda path: draw_operators.masks([0.03, 0.1, 0.3, 1.0, 3.0, 10.0], path),
    "pixels.svg": lambda path: pixels(path),
}
"""file -> what draws it"""

TEMPERATURES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TUNED = {"splitter": 4.0, "bitonic": 2.0, "lapsum": 4.0, "ksubset": 4.0, "softsort": 2.0, "neuralsort": 8.0, "sinkhorn": 16.0}
SOFTMAX = {"loss": "softmax", "p_k": [1.0]}
PLOTS: dict[str, list[dict[str, object]]] = {
    "plot-lines.svg": [
        SOFTMAX,
        *({"loss": name, "temperature": t} for name in ("splitter", "lapsum", "ksubset") for t in TEMPERATURES),
    ],
    "plot-trade.svg": [SOFTMAX, *({"loss": name, "temperature": t} for name, t in TUNED.items())],
    "plot-bars.svg": [{"temperature": 4.0, "top1": top1} for top1 in ("separate", "mixed", "operator")],
}
"""file -> which runs of the study on embeddings it shows: what differs from its config, all seeds"""
STUDY = ROOT / "evidence" / "summaries" / "embeddings.jsonl"
SELECTION = ROOT / "evidence" / "summaries" / "selection.json"
CHOOSERS = {"mask": "mask, trained", "RFE": "RFE, logistic regression", "ExtraTrees": "ExtraTrees", "F test": "F test"}
"""method of the study on choosing features -> its title above the pixels that it keeps"""

PAGES = {"explore.png": ROOT / "docs" / "play.html", "report.png": ROOT / "demo" / "report.html"}
"""file -> the page that it is a screenshot of"""

GUESSES = {
    "husky": 3.0,
    "Eskimo dog": 2.7,
    "malamute": 2.4,
    "wolf": 1.7,
    "Samoyed": 1.3,
    "collie": -0.6,
    "fox": -1.0,
    "lynx": -2.0,
}
"""The scores of the picture of the idea; the true class is third."""
TRUE, K = "malamute", 5
GREY, SHADE, DARK_ORANGE = "#6B6B6B", "#BDBDB8", "#A86200"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        draw(folder / name)
    for name, chosen in PLOTS.items():
        plot(folder / name, chosen)
    take_screenshots(folder)


def plot(path: Path, chosen: list[dict[str, object]]) -> None:
    """Runs of the study as `anyk report --plot` draws them."""
    head, *lines = map(json.loads, STUDY.read_text().splitlines())
    wanted = [{**head["shared"], **settings} for settings in chosen]
    runs = []
    for number, line in enumerate(lines):
        config = {**head["shared"], **line["own"]}
        if {**config, "seed": head["shared"]["seed"]} in wanted:
            result = {"data": head["data"], **{part: line[part] for part in ("test", "validation", "seconds")}}
            shown = Config(p_k=tuple(config["p_k"]), **{name: config[name] for name in ("loss", "temperature", "top1", "seed")})
            runs.append(summaries.RunSummary(Path(str(number)), "finished", shown, result))
    plots.plot(summaries.table(runs, metrics=["top1", "top5"]), path)


def take_screenshots(folder: Path) -> None:
    """Pages, in a real browser; few colours make small files."""
    sys.path.insert(0, str(ROOT / "tests"))
    import browser

    if browser.find() is None:
        print("no Chromium: the screenshots stay as they are", file=sys.stderr)  # noqa: T201
        return
    with tempfile.TemporaryDirectory() as scratch, browser.opened(scratch) as page:
        for name, file in PAGES.items():
            if not file.exists():
                print(f"{file} is missing: {name} stays as it is; `make demo` writes it", file=sys.stderr)  # noqa: T201
                continue
            page.open(file, width=1180, height=900)
            page.evaluate("document.querySelector('#scenes button:nth-of-type(3)')?.click()")  # one where much is pulled
            page.evaluate("0")
            picture = Image.open(io.BytesIO(base64.b64decode(page.screenshot(whole=False))))
            picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(folder / name, optimize=True)


def idea(path: Path) -> None:
    """Eight look-alikes, the true one third: what cross-entropy asks for, and what the top-5 loss asks for."""
    names = list(GUESSES)
    place = names.index(TRUE)
    scores = torch.tensor(list(GUESSES.values()), requires_grad=True)
    target = torch.tensor(place)
    operator = anyk.KSubset()  # its T_1 is softmax: one curve holds both losses
    inclusion = operator.inclusion(scores, target, K).detach()
    losses, pulls = {}, {}
    for k in (1, K):
        loss = anyk.topk_cross_entropy(scores, target, [0.0] * (k - 1) + [1.0], operator, top1="operator")
        (gradient,) = torch.autograd.grad(loss, scores)
        losses[k], pulls[k] = loss.item(), -gradient

    style = {"font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "path", "svg.hashsalt": "anyk"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10.4, 3.9))
        left = figure.add_axes((0.1, 0.04, 0.19, 0.66))
        middle = figure.add_axes((0.36, 0.17, 0.215, 0.55))
        right = figure.add_axes((0.645, 0.04, 0.345, 0.66))
        for axes, x, title in (
            (left, 0.012, "1   Guesses for one photo"),
            (middle, 0.352, "2   Is it among the first j?"),
            (right, 0.645, "3   How the loss moves the scores"),
        ):
            figure.text(x, 0.925, title, weight="bold", fontsize=12, color=INK)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
        _guesses(left, names, place)
        _inclusion(middle, inclusion.tolist())
        _pulls(right, place, losses, pulls)
        figure.text(0.012, 0.855, "classes that look alike, by their scores", fontsize=9.5, color=GREY)
        figure.text(0.352, 0.855, "probability T_j, with a gradient", fontsize=9.5, color=GREY)
        plots.save(figure, path)


def pixels(path: Path) -> None:
    """Which 20 of the 784 pixels of a digit four methods keep, and how well a classifier does that sees only these."""
    found = json.loads(SELECTION.read_text())["sets"]["mnist"]["methods"]
    shown = {method: title for method, title in CHOOSERS.items() if "chosen" in found.get(method, {})}
    style = {"font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "anyk"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10.4, 3.2))
        for place, (method, title) in enumerate(shown.items()):
            axes = figure.add_axes((0.01 + place / len(shown), 0.03, 0.92 / len(shown), 0.75))
            rows, columns = zip(*(divmod(pixel, 28) for pixel in found[method]["chosen"]), strict=True)
            axes.scatter(columns, rows, marker="s", s=22, color=BLUE if method == "mask" else ORANGE, gid=f"pixels-{method}")
            axes.set(xlim=(-0.5, 27.5), ylim=(27.5, -0.5), xticks=[], yticks=[], aspect="equal", facecolor="#F4F4F1")
            axes.spines[:].set_color(SHADE)
            axes.set_title(f"{title}\n{found[method]['mean']:.1f} % right", color=INK, fontsize=11)
        plots.save(figure, path)


def _guesses(axes: Axes, names: list[str], place: int) -> None:
    colours = [ORANGE if row == place else SHADE for row in range(len(names))]
    axes.barh(range(len(names)), [score + 3 for score in GUESSES.values()], color=colours, height=0.66)
    axes.set(yticks=range(len(names)), xticks=[], xlim=(0, 7.6), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticklabels(names)
    axes.get_yticklabels()[place].set(weight="bold", color=DARK_ORANGE)
    axes.text(0.2, place, "the true class", color=INK, weight="bold", va="center", fontsize=9)
    axes.plot([-3.4, 7.6], [K - 0.5] * 2, color=GREEN, lw=1.4, ls=(0, (4, 2)), clip_on=False)
    axes.text(7.6, K - 0.58, f"first {K}", color=GREEN, ha="right", va="bottom", fontsize=9.5, weight="bold")


def _inclusion(axes: Axes, inclusion: list[float]) -> None:
    steps = range(1, K + 1)
    axes.bar(steps, [1] * K, color="#EEEEEB", width=0.74)
    axes.bar(steps, inclusion, color=[BLUE, *[SHADE] * (K - 2), GREEN], width=0.74)
    for j, value in zip(steps, inclusion, strict=True):
        trained = j in (1, K)
        words = {"weight": "bold", "fontsize": 11} if trained else {"fontsize": 9, "color": GREY}
        axes.text(j, value + 0.015, f"{100 * value:.0f}%", ha="center", va="bottom", **words)
    axes.set(xticks=steps, yticks=[], xlim=(0.5, K + 0.5), ylim=(0, 1.08))
    axes.set_xlabel("j", labelpad=1, color=GREY)
    for j, colour, name in ((1, BLUE, "cross-entropy"), (K, GREEN, f"top-{K} loss")):
        axes.get_xticklabels()[j - 1].set(weight="bold", color=colour)
        axes.text(j, -0.17, f"{name}\nraises this", color=colour, ha="center", va="top", fontsize=9.5)


def _pulls(axes: Axes, place: int, losses: dict[int, float], pulls: dict[int, Tensor]) -> None:
    """Minus the gradient of both losses, in the rows of the guesses."""
    axes.set(xticks=[], yticks=[], xlim=(-0.62, 3.0), ylim=(len(GUESSES) - 0.4, -0.6))
    columns = (
        (0.0, 1, BLUE, "cross-entropy", "not first: push hard"),
        (1.85, K, GREEN, f"top-{K} loss", f"in the first {K}: almost done"),
    )
    for start, k, colour, name, says in columns:
        axes.text(start - 0.5, -1.62, f"{name} {losses[k]:.2f}", color=colour, weight="bold", fontsize=11.5)
        axes.text(start - 0.5, -0.98, says, color=INK, fontsize=9.5)
        axes.plot([start] * 2, [-0.5, len(GUESSES) - 0.5], color="#BDBDB8", lw=0.8)
        for row, pull in enumerate(pulls[k].tolist()):
            axes.barh(row, pull, left=start, height=0.66, color=colour if row == place else SHADE)
        axes.text(start - 0.06, len(GUESSES) - 0.72, "\u25c4 down", ha="right", va="center", color=GREY, fontsize=8.5)
        axes.text(start + 0.06, len(GUESSES) - 0.72, "up \u25ba", ha="left", va="center", color=GREY, fontsize=8.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
