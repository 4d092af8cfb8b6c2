"""The paper's tables and figures: what they say, the recipes that repeat them, and our numbers beside theirs.

An :class:`Experiment` is a list of cells. A cell is one entry of a table: a data set, a method, a P_K, and the accuracies
the paper gives, in percent. ``experiment.recipes(...)`` are the runs, ``experiment.compare(results)`` is the table.

Where the paper leaves something open (temperatures, how the top-1 part is measured, where the softmax runs), the official code
and its README say it; where the two differ, ``source`` chooses: the CIFAR batch (100 in the paper, 128 in the code) and the
epochs on ImageNet-1K (100, 20). What neither says is marked as ours in ``Experiment.notes``.

Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022; https://github.com/Felix-Petersen/difftopk.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from anyk import networks
from anyk.lab.errors import LabError
from anyk.lab.run.names import NetworkName
from anyk.lab.run.recipe import Recipe

Source = Literal["paper", "official"]
Value = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under a header, to be printed by whoever likes. Accuracies are in percent; None is unknown."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    notes: tuple[str, ...] = ()
    also: "tuple[Table, ...]" = ()
    """tables that belong to it"""


# --- how the paper trains ---


@dataclass(frozen=True)
class Setting:
    """How the paper trains on one kind of data."""

    recipe: Recipe
    official: Mapping[str, Any]
    """fields in which the official code differs"""
    smoke: Mapping[str, Any]
    """fields that make it a matter of seconds"""
    ranked: int
    """number of classes that are ranked: m, or all"""
    inverse_temperatures: Mapping[str, float]
    """as the official README gives them"""
    swap: str = "logistic_art"


# The paper does not give Sinkhorn's temperature, and the official code has no Sinkhorn. Its losses in a comment show the
# convention: epsilon = 1 / inverse temperature, ranks at n points between 0 and 1. This value is ours: it gives nearly the
# temperature of NeuralSort, whose T is close to Sinkhorn's at equal temperature, both for CIFAR (12.4, 16) and m = 16 (1.9, 2).
SINKHORN_INVERSE_TEMPERATURE = 8.0

_HEAD_SMOKE = {"epochs": 2, "batch_size": 100, "evaluate_every": 5, "validation": 0.1, "learning_rate": 1e-2}

_IMAGENET_1K = Setting(
    recipe=Recipe(
        data="imagenet1k",
        model="linear",
        validation=50_000 / 1_281_167,
        learning_rate=10**-4.5,
        batch_size=500,
        epochs=100,
        evaluate_every=100,
        select="each",
        m=16,
        top1="mixed",
        softmax_over="candidates",
        wires="target",
    ),
    official={"epochs": 20},
    smoke=_HEAD_SMOKE,
    ranked=16,
    inverse_temperatures={"diffsortnets": 1.0, "neuralsort": 0.5, "softsort": 0.5, "smooth": 1.0},
)
SETTINGS: dict[str, Setting] = {
    "cifar100": Setting(
        recipe=Recipe(
            data="cifar100",
            model="resnet18",
            validation=0.05,
            learning_rate=1e-3,
            batch_size=100,
            epochs=200,
            select="each",
            augment=("crop", "flip"),
            top1="separate",
            wires="given",
        ),
        official={"batch_size": 128},
        smoke={"epochs": 1, "batch_size": 50, "validation": 0.1},
        ranked=100,
        inverse_temperatures={"diffsortnets": 0.5, "neuralsort": 0.0625, "softsort": 0.0625, "smooth": 1.0},
    ),
    "imagenet1k": _IMAGENET_1K,
    "imagenet21kp": Setting(
        # The paper: 40 epochs, 10^-4, m = 50. 100,000 of the 11.06 million training images are for validation.
        recipe=_IMAGENET_1K.recipe.but(
            data="imagenet21kp", validation=100_000 / 11_060_000, learning_rate=1e-4, epochs=40, m=50
        ),
        official={},
        smoke={**_HEAD_SMOKE, "epochs": 1},  # many runs, and Sinkhorn over m = 50
        ranked=50,
        inverse_temperatures=_IMAGENET_1K.inverse_temperatures,
    ),
    "efficientnet-l2": Setting(
        recipe=_IMAGENET_1K.recipe.but(data="efficientnet-l2"),
        official=_IMAGENET_1K.official,
        smoke=_HEAD_SMOKE,
        ranked=16,
        inverse_temperatures={"diffsortnets": 0.5, "smooth": 1.0},
        swap="logistic",
    ),
}
"""By kind of data."""


def temperature(method: str, inverse_temperature: float, ranked: int) -> float:
    """The temperature of an ``anyk`` operator for the inverse temperature b that the official code is given.

    ==============  ============================================  ===================================  =============
    method          there                                         here                                 temperature
    ==============  ============================================  ===================================  =============
    logistic        sigmoid(b d)                                  sigmoid(d / t)                       1 / b
    logistic_art    sigmoid(b d / abs(d)^0.5)                     sigmoid(sign(d) sqrt(abs(d) / t^2))  1 / b
    neuralsort      softmax((...) / tau), tau = 1 / b             softmax((...) / t)                   1 / b
    softsort        softmax(-abs(...) / tau), tau = 1 / b         softmax(-abs(...) / t)               1 / b
    sinkhorn        epsilon = 1 / b, n ranks between 0 and 1      ranks -1 … -n                        (n - 1) / b
    smooth          tau = b, not inverted                         t                                    b
    ==============  ============================================  ===================================  =============

    Sinkhorn: of the squared cost only the product of score and rank matters, -2 s a / epsilon. Ranks that are 1 / (n - 1)
    apart are n - 1 times closer than ours.

    Args:
        method: softmax, smooth, neuralsort, softsort, sinkhorn or diffsortnets (both swaps above).
        inverse_temperature: b.
        ranked: n, the number of classes that are ranked.

    >>> temperature("neuralsort", 0.0625, ranked=100), temperature("sinkhorn", 8.0, ranked=16)
    (16.0, 1.875)
    """
    if method == "smooth":
        return inverse_temperature
    if method == "sinkhorn":
        return (ranked - 1) / inverse_temperature
    return 1 / inverse_temperature


# --- what the paper says ---

METHODS = {
    "softmax": "Softmax",
    "smooth": "Smooth top-k loss",
    "neuralsort": "NeuralSort",
    "softsort": "SoftSort",
    "sinkhorn": "SinkhornSort",
    "diffsortnets": "DiffSortNets",
}
OPERATORS = ("neuralsort", "softsort", "sinkhorn", "diffsortnets")


def top(*weights: tuple[int, float]) -> tuple[float, ...]:
    """P_K from (k, weight) pairs.

    >>> top((1, 0.5), (5, 0.5))
    (0.5, 0.0, 0.0, 0.0, 0.5)
    """
    entries = dict(weights)
    return tuple(entries.get(k, 0.0) for k in range(1, max(entries) + 1))


TOP1, TOP5 = (1.0,), top((5, 1.0))
HALF, QUARTER, TENTH = (top((1, share), (5, 1 - share)) for share in (0.5, 0.25, 0.1))
EVEN = (0.2,) * 5


@dataclass(frozen=True)
class Cell:
    """One entry of a table: a method with a P_K on a data set."""

    data: str
    method: str
    p_k: tuple[float, ...]
    paper: tuple[float | None, ...]
    """percent, in the order of the experiment's metrics; None where the paper's text has no number"""
    m: int | None = None
    """other than the setting's"""
    seeds: int = 10
    """runs that the paper averages"""

    @property
    def name(self) -> str:
        """The runs' name without the seed: fit for a folder."""
        parts = [self.data, self.method] if self.method == "softmax" else [self.data, self.method, _short(self.p_k)]
        return "-".join(parts if self.m is None else [*parts, f"m{self.m}"])


def _short(p_k: Sequence[float]) -> str:
    """[.5, 0, 0, 0, .5] -> top1x50-top5x50; equal weights: top1to5."""
    if len(p_k) > 1 and len(set(p_k)) == 1:
        return f"top1to{len(p_k)}"
    return "-".join(f"top{k}x{100 * weight:g}" for k, weight in enumerate(p_k, 1) if weight)


def _cells(data: str, rows: Iterable[tuple[str, Sequence[float], str]], seeds: int) -> tuple[Cell, ...]:
    """Cells from (method, P_K, "61.27 | 85.31")."""
    return tuple(Cell(data, method, tuple(p_k), _numbers(text), seeds=seeds) for method, p_k, text in rows)


def _grid(data: str, distributions: Sequence[Sequence[float]], rows: Mapping[str, str], seeds: int) -> tuple[Cell, ...]:
    """Cells from method -> "61.12 | 86.47 & 61.07 | 87.23 & …", one entry for each distribution."""
    return tuple(
        Cell(data, method, tuple(p_k), _numbers(entry), seeds=seeds)
        for method, text in rows.items()
        for p_k, entry in zip(distributions, text.split("&"), strict=True)
    )


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split("|"))


_MAIN_METHODS = (
    ("softmax", TOP1),
    ("smooth", TOP5),
    *((method, TOP5) for method in OPERATORS),
)


def _main(data: str, ours: Sequence[float], texts: str, seeds: int) -> tuple[Cell, ...]:
    """Tables 1 and 2: six baselines, then the four methods with a mixed P_K."""
    rows = [*_MAIN_METHODS, *((method, ours) for method in OPERATORS)]
    return _cells(data, [(*row, text) for row, text in zip(rows, texts.split("&"), strict=True)], seeds)


_TABLE_1 = _main(
    "cifar100",
    EVEN,
    "61.27|85.31 & 53.07|85.23 & 22.58|84.41 & 1.01|5.09 & 55.62|87.04 & 52.81|84.21 &"
    "61.46|86.03 & 61.53|82.39 & 61.89|86.94 & 62.00|86.73",
    seeds=2,
)
_TABLE_2 = _main(
    "imagenet1k",
    HALF,
    "86.06|97.795 & 85.15|97.540 & 33.37|94.748 & 18.23|94.965 & 85.65|97.991 & 69.05|97.389 &"
    "86.30|97.896 & 86.26|97.963 & 86.29|97.971 & 86.24|97.937",
    seeds=10,
) + _main(
    "imagenet21kp",
    HALF,
    "39.29|69.63 & 34.03|65.56 & 15.87|33.81 & 33.61|69.82 & 36.93|69.80 & 35.96|69.76 &"
    "37.85|68.08 & 39.93|70.63 & 39.85|70.56 & 40.22|70.88",
    seeds=2,
)
_FOUR = (HALF, QUARTER, TENTH, EVEN)
_TABLE_3 = _grid(
    "imagenet1k",
    _FOUR,
    {
        "neuralsort": "86.30|97.896 & 34.26|95.410 & 34.32|94.889 & 85.75|97.865",
        "softsort": "86.26|97.963 & 86.16|97.954 & 27.30|95.915 & 86.18|97.979",
        "sinkhorn": "86.29|97.971 & 86.24|97.989 & 86.18|97.987 & 86.22|97.989",
        "diffsortnets": "86.24|97.937 & 86.15|97.936 & 86.04|97.980 & 86.21|98.003",
    },
    seeds=10,
) + _grid(
    "imagenet21kp",
    _FOUR,
    {
        "neuralsort": "37.85|68.08 & 36.16|67.60 & 33.02|67.29 & 37.09|67.90",
        "softsort": "39.93|70.63 & 39.08|70.27 & 37.78|70.07 & 39.68|70.57",
        "sinkhorn": "39.85|70.56 & 39.21|70.41 & 38.42|70.12 & 39.22|70.49",
        "diffsortnets": "40.22|70.88 & 39.56|70.58 & 38.48|70.25 & 39.69|70.69",
    },
    seeds=2,
)
_TABLE_4 = _grid(
    "cifar100",
    _FOUR,
    {
        "neuralsort": "61.12|86.47 & 61.07|87.23 & 52.57|85.76 & 61.46|86.03",
        "softsort": "61.17|83.95 & 61.05|83.10 & 58.16|79.26 & 61.53|82.39",
        "sinkhorn": "61.34|86.38 & 61.50|86.68 & 57.35|86.34 & 61.89|86.94",
        "diffsortnets": "60.07|86.44 & 61.57|86.51 & 61.74|87.22 & 62.00|86.73",
    },
    seeds=2,
)
RESNEXT, EFFICIENTNET = "resnext101-32x48d", "efficientnet-l2"
_TABLE_5 = _cells(
    RESNEXT,
    [("softmax", TOP1, "86.06|97.80"), ("sinkhorn", EVEN, "86.22|97.99"), ("diffsortnets", EVEN, "86.21|98.00")],
    seeds=10,
) + _cells(
    EFFICIENTNET,
    [("softmax", TOP1, "88.33|98.65"), ("sinkhorn", QUARTER, "88.32|98.66"), ("diffsortnets", QUARTER, "88.37|98.68")],
    seeds=10,
)
PUBLISHED_MODELS = (
    ("ResNet50", "yes", "79.26", "94.75"),
    ("ResNet152", "yes", "80.62", "95.51"),
    ("ResNeXt-101 32x48d WSL", "yes", "85.43", "97.57"),
    ("ViT-L/16", "yes", "87.76", "—"),
    ("Noisy Student EfficientNet-L2", "yes", "88.35", "98.65"),
    ("BiT-L", "no", "87.54", "98.46"),
    ("CLIP (w/ Noisy Student EffNet-L2)", "no", "≈88.4", "—"),
    ("ViT-H/14", "no", "88.55", "—"),
    ("ALIGN (EfficientNet-L2)", "no", "88.64", "98.67"),
    ("Meta Pseudo Labels (EffNet-L2)", "no", "90.20", "≈98.8"),
    ("ViT-G/14", "no", "90.45", "—"),
    ("CoAtNet-7", "no", "90.88", "—"),
)
"""Table 5's other models: name, publicly available, top-1, top-5, as reported by their authors."""

REPORTED = {RESNEXT: (85.43, 97.57), EFFICIENTNET: (88.35, 98.65)}
"""The reported accuracies of the backbones' own heads, against which table 5 also tests."""

P_VALUES = {
    (EFFICIENTNET, "observed"): (0.00001, 0.00005),
    (EFFICIENTNET, "reported"): (0.00087, 0.00005),
}
"""The paper's t-tests of DiffSortNets against the observed and the reported baseline: p for top-1 and top-5."""

_TABLE_6 = tuple(
    cell
    for k, softmax, rows in (
        (
            5,
            "39.29|69.63|78.55|85.33",
            {
                "neuralsort": "37.85|68.08|77.22|84.21 & 36.16|67.60|76.96|84.08 & 33.02|67.29|76.88|84.05",
                "softsort": "39.93|70.63|79.45|85.96 & 39.08|70.27|79.29|85.94 & 37.78|70.07|79.19|85.87",
                "sinkhorn": "39.85|70.56|79.53|86.13 & 39.21|70.41|79.54|86.18 & 38.42|70.12|79.44|86.12",
                "diffsortnets": "40.22|70.88|79.54|86.03 & 39.56|70.58|79.44|86.01 & 38.48|70.25|79.29|85.90",
            },
        ),
        (
            10,
            "39.33|69.62|78.55|85.36",
            {
                "neuralsort": "37.22|67.02|76.75|84.10 & 34.59|66.09|76.46|84.01 & 29.60|65.16|76.26|84.01",
                "softsort": "39.26|69.52|79.13|85.93 & 37.71|68.56|78.71|85.78 & 33.68|67.35|78.43|85.70",
                "sinkhorn": "39.65|70.25|79.47|86.22 & 38.90|69.91|79.41|86.25 & 37.98|69.57|79.33|86.16",
                "diffsortnets": "39.92|70.13|79.38|86.02 & 39.10|69.60|79.21|86.03 & 37.88|69.07|79.04|85.91",
            },
        ),
        (
            20,
            "39.33|69.62|78.55|85.36",
            {
                "neuralsort": "36.32|65.33|75.82|83.99 & 33.00|62.99|74.84|83.83 & 27.35|60.34|74.02|83.77",
                "softsort": "38.04|65.98|77.17|85.45 & 34.30|62.89|76.03|85.19 & 24.02|56.35|74.32|84.82",
                "sinkhorn": "39.76|69.76|79.17|86.17 & 38.77|69.18|78.99|86.20 & 37.71|68.68|78.86|86.16",
                "diffsortnets": "39.54|68.59|77.95|85.49 & 38.62|67.62|77.43|85.37 & 37.46|66.80|77.01|85.17",
            },
        ),
    )
    for cell in (
        Cell("imagenet21kp", "softmax", (1.0, *(0.0,) * (k - 1)), _numbers(softmax), seeds=2),
        *_grid("imagenet21kp", [top((1, share), (k, 1 - share)) for share in (0.5, 0.25, 0.1)], rows, seeds=2),
    )
)

DEPTHS: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    16: (10, (4, 7, 9, 9, 10, 10, 10, 10), (4, 6, 7, 8, 10, 11, 12, 13)),
    1024: (55, (10, 19, 27, 27, 34, 34, 34, 34), (10, 14, 16, 18, 22, 25, 27, 29)),
    10450: (105, (14, 27, 39, 39, 50, 50, 50, 50), (14, 18, 20, 23, 27, 30, 32, 34)),
    65536: (136, (16, 31, 45, 45, 58, 58, 58, 58), (16, 20, 22, 25, 29, 32, 34, 36)),
}
"""The paper's depths: n -> full sort, classical selection for k = 1 … 8, splitter selection for k = 1 … 8."""

_NOT_IN_TEXT = (None, None)
# The figures' curves are not in the text; these points of theirs are in tables 2 and 3 (there over 10 runs).
_ALPHA_POINTS = {0.5: (86.29, 97.971), 0.75: (86.24, 97.989), 0.9: (86.18, 97.987), 1.0: (85.65, 97.991)}
_ALPHA = (
    Cell("imagenet1k", "softmax", TOP1, (86.06, 97.795), seeds=5),
    *(
        Cell(
            "imagenet1k", "sinkhorn", top((1, round(1 - alpha, 2)), (5, alpha)), _ALPHA_POINTS.get(alpha, _NOT_IN_TEXT), seeds=5
        )
        for alpha in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0)
    ),
)
_SET_SIZE = tuple(
    Cell("imagenet1k", "sinkhorn", QUARTER, (86.24, 97.989) if m == 16 else _NOT_IN_TEXT, m=m, seeds=5)
    for m in (8, 10, 12, 16, 20, 24, 32, 40)
)
RESNEXT_SIZES = ("resnext101-32x8d", "resnext101-32x16d", "resnext101-32x32d", RESNEXT)


def _backbone(data: str) -> tuple[Cell, ...]:
    known = {(cell.data, cell.method): cell.paper for cell in _TABLE_5}
    p_k = QUARTER if data == EFFICIENTNET else EVEN
    return tuple(
        Cell(data, method, weights, known.get((data, method), _NOT_IN_TEXT), seeds=10)
        for method, weights in (("softmax", TOP1), ("diffsortnets", p_k))
    )


# --- experiments ---

_SINKHORN_NOTE = "Sinkhorn's temperature is not published; (m - 1)/8 is ours. The paper searched at a resolution of 2 (grid)."
_SMOKE_NOTE = "Short runs on made data: they show that everything works; the numbers cannot be held against the paper's."
_NETWORK_NOTE = "The paper does not say which network DiffSortNets is in its tables; splitter unless asked otherwise."
_HEAD_NOTE = "The official code starts the target on a wire of its own that anyk does not offer; wires=target is the nearest."


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper."""

    name: str
    title: str
    cells: tuple[Cell, ...] = ()
    metrics: tuple[str, ...] = ("top1", "top5")
    notes: tuple[str, ...] = ()
    more_cells: Callable[[str], tuple[Cell, ...]] | None = None
    """cells for a data set of any other name"""
    also: Callable[["Experiment", Mapping[str, Mapping[str, Any]]], tuple[Table, ...]] | None = None
    """tables that belong to the comparison"""

    @property
    def needs(self) -> dict[str, str]:
        """The data sets it needs, by name, and what each is."""
        return {cell.data: _NEEDS[cell.data] for cell in self.cells}

    def recipes(
        self,
        data: str | Mapping[str, str] | None = None,
        *,
        smoke: bool = False,
        seeds: int | Sequence[int] | None = None,
        source: Source = "paper",
        network: NetworkName = "splitter",
        grid: Sequence[float] = (1.0,),
    ) -> dict[str, Recipe]:
        """The runs of the experiment.

        Args:
            data: for each data set of ``needs`` the recipe's ``data`` (a folder of embeddings; ``cifar100`` needs none), or
                one text where it needs only one. Data sets that are left out are left out of the experiment.
            smoke: shrunk to seconds, for :meth:`write_smoke_data`.
            seeds: how many, or which; None: as many as in the paper (with ``smoke`` one).
            source: ``"paper"`` or ``"official"``, where they differ.
            network: the network of DiffSortNets.
            grid: factors of the published temperature; :meth:`compare` takes the best on validation.

        Returns:
            Run name -> recipe. Nothing, where there is nothing to train.
        """
        if source not in ("paper", "official"):
            raise LabError(f"source should be paper or official, but is {source!r}.")
        if not grid or not all(factor > 0 for factor in grid):
            raise LabError(f"grid should be positive factors of the temperature, but is {list(grid)}.")
        if isinstance(seeds, int) and seeds < 1:
            raise LabError(f"seeds should be at least 1, but is {seeds}.")
        places = self._places(data)
        runs = {}
        for cell in self._cells_for(places):
            numbers = range(1 if smoke else cell.seeds) if seeds is None else range(seeds) if isinstance(seeds, int) else seeds
            for factor in grid if cell.method != "softmax" else (1.0,):
                recipe = _recipe(cell, places[cell.data], source, network, factor, smoke)
                name = cell.name if factor == 1 else f"{cell.name}-t{factor:g}"
                runs.update({f"{name}-seed{seed}": recipe.but(seed=seed) for seed in numbers})
        return runs

    def write_smoke_data(self, folder: str | Path) -> dict[str, str]:
        """Write small made data sets in the formats of the real ones; the ``data`` of a smoke run."""
        return {name: _write_small(Path(folder) / name, name) for name in self.needs}

    def compare(self, results: Mapping[str, Mapping[str, Any]], *, smoke: bool = False) -> Table:
        """Our numbers beside the paper's.

        Args:
            results: run name -> content of the run's ``result.json``; names that are not of this experiment are not looked at.
                Needs ``["test"][metric]`` as fractions, and with a grid of temperatures ``["validation"][metric]``.
            smoke: the results are of smoke runs; the table says so, and has no differences to the paper.
        """
        if self.name == "depths":
            return _depth_table()
        header = ["data", "method", "P_K", "m", "runs"]
        for metric in self.metrics:
            header += [metric, "std", "paper"] if smoke else [metric, "std", "paper", "difference"]
        names = {*self.needs, *self._other_names(results)}
        rows: list[tuple[Value, ...]] = []
        for cell in self._cells_for(dict.fromkeys(names, "")):
            runs = _runs(cell, results)
            m = None if cell.method in ("softmax", "smooth") else cell.m or _setting(cell.data).recipe.m
            row: list[Value] = [cell.data, METHODS[cell.method], _list(cell.p_k), m, len(runs)]
            for metric, paper in zip(self.metrics, cell.paper, strict=True):
                row += _beside(_percents(runs, metric), paper)[: 3 if smoke else 4]
            rows.append(tuple(row))
        notes = (_SMOKE_NOTE, *self.notes) if smoke else self.notes
        return Table(self.title, tuple(header), rows, notes, self.also(self, results) if self.also else ())

    def _places(self, data: str | Mapping[str, str] | None) -> dict[str, str]:
        needs = self.needs
        if isinstance(data, str):
            if len(needs) != 1:
                raise LabError(f"{self.name} needs several data sets ({', '.join(needs)}): give each its own path by name.")
            data = dict.fromkeys(needs, data)
        places = {"cifar100": "cifar100"} if "cifar100" in needs else {}
        places.update(data or {})
        unknown = sorted(set(places) - set(needs))
        if unknown and self.more_cells is None:
            raise LabError(f"{self.name} knows no data set {unknown[0]!r}; it needs {', '.join(needs)}.")
        if needs and not places:
            wanted = "; ".join(f"{name}: {what}" for name, what in needs.items())
            raise LabError(f"{self.name} needs data that only you can give. {wanted}.")
        return places

    def _cells_for(self, names: Mapping[str, str]) -> list[Cell]:
        cells = [cell for cell in self.cells if cell.data in names]
        for name in sorted(set(names) - set(self.needs)):
            cells += self.more_cells(name) if self.more_cells is not None else ()
        return cells

    def _other_names(self, results: Iterable[str]) -> set[str]:
        if self.more_cells is None:
            return set()
        matches = (re.match(r"(.+?)-(?:softmax|diffsortnets-.+)-seed\d+$", name) for name in results)
        return {match[1] for match in matches if match} - set(self.needs)


def _setting(data: str) -> Setting:
    return SETTINGS.get(data, SETTINGS["imagenet1k"])


def _recipe(cell: Cell, place: str, source: Source, network: NetworkName, factor: float, smoke: bool) -> Recipe:
    setting = _setting(cell.data)
    recipe = setting.recipe.but(data=place)
    if source == "official":
        recipe = recipe.but(**setting.official)
    if smoke:
        recipe = recipe.but(**setting.smoke)
    if cell.method == "softmax":
        return recipe.but(loss="softmax", p_k=TOP1, m=None, top1="separate", softmax_over="all", wires="target")
    ranked = cell.m or setting.ranked
    inverse = setting.inverse_temperatures.get(cell.method, SINKHORN_INVERSE_TEMPERATURE)
    recipe = recipe.but(p_k=cell.p_k, temperature=factor * temperature(cell.method, inverse, ranked))
    if cell.method == "smooth":  # over all classes, as published
        return recipe.but(loss="smooth", m=None, top1="separate", softmax_over="all", wires="target")
    if cell.m is not None:
        recipe = recipe.but(m=cell.m)
    if cell.method == "diffsortnets":
        return recipe.but(loss=network, swap=setting.swap)
    return recipe.but(loss=cell.method, wires="target")


def _runs(cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results of a cell; of several temperatures the best on validation."""
    pattern = re.compile(re.escape(cell.name) + r"(?:-t([^-]+(?:e-\d+)?))?-seed\d+")
    by_factor: dict[str, list[Mapping[str, Any]]] = {}
    for name, result in results.items():
        match = pattern.fullmatch(name)
        if match:
            by_factor.setdefault(match[1] or "1", []).append(result)
    if len(by_factor) <= 1:
        return next(iter(by_factor.values()), [])

    def on_validation(runs: list[Mapping[str, Any]]) -> float:
        return statistics.fmean((run["validation"]["top1"] + run["validation"]["top5"]) / 2 for run in runs)

    try:
        return max(by_factor.values(), key=on_validation)
    except KeyError as error:
        raise LabError(
            f"{cell.name} has runs at several temperatures, but their results lack validation accuracies ({error})."
        ) from None


def _percents(runs: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    values = ((run.get("test") or {}).get(metric) for run in runs)  # a run that has not been tested counts for nothing
    return [100 * value for value in values if value is not None]


def _beside(ours: Sequence[float], paper: float | None) -> tuple[Value, ...]:
    """Mean, standard deviation, the paper's number, the difference."""
    if not ours:
        return None, None, paper, None
    mean = statistics.fmean(ours)
    spread = statistics.stdev(ours) if len(ours) > 1 else None
    return mean, spread, paper, None if paper is None else mean - paper


def _list(p_k: Sequence[float]) -> str:
    """As the paper writes it; long ones with the zeros left out."""
    entries = [f"{weight:g}".removeprefix("0") or "0" for weight in p_k]
    if len(entries) > 5:
        entries = [entries[0], "0", "...", "0", entries[-1]]
        return f"[{','.join(entries)}] ({len(p_k)})"
    return f"[{','.join(entries)}]"


def _significance(experiment: Experiment, results: Mapping[str, Mapping[str, Any]]) -> tuple[Table, ...]:
    """Table 5's t-tests: DiffSortNets and SinkhornSort against the baseline's runs (Welch) and its reported accuracy."""
    from scipy import stats  # half a second, and only here

    rows: list[tuple[Value, ...]] = []
    for cell in experiment.cells:
        if cell.method == "softmax":
            continue
        softmax = next(other for other in experiment.cells if other.data == cell.data and other.method == "softmax")
        for kind in ("observed", "reported"):
            row: list[Value] = [cell.data, METHODS[cell.method], kind]
            papers = P_VALUES.get((cell.data, kind), (None, None)) if cell.method == "diffsortnets" else (None, None)
            for place, (metric, paper) in enumerate(zip(experiment.metrics, papers, strict=True)):
                ours = _percents(_runs(cell, results), metric)
                base = _percents(_runs(softmax, results), metric)
                p: float | None = None
                if kind == "observed" and min(len(ours), len(base)) > 1 and len({*ours}) + len({*base}) > 2:
                    p = float(stats.ttest_ind(ours, base, equal_var=False).pvalue)
                elif kind == "reported" and len({*ours}) > 1:
                    p = float(stats.ttest_1samp(ours, REPORTED[cell.data][place]).pvalue)
                row += [p, paper]
            rows.append(tuple(row))
    tests = Table(
        "t-tests against the baseline (two-sided, over seeds; the paper calls p < 0.01 significant)",
        ("data", "method", "baseline", "p top1", "paper", "p top5", "paper"),
        rows,
        ("observed: Welch's test against the softmax runs. reported: against the backbone's published accuracy.",),
    )
    models: list[tuple[Value, ...]] = [*PUBLISHED_MODELS]
    return tests, Table("Other models, as their authors report them", ("model", "public", "top1", "top5"), models)


def _depth_table() -> Table:
    """Table 7, from the networks themselves. The classical selections are equally deep: at the largest n one will do."""
    rows: list[tuple[Value, ...]] = []
    for n, (full, classical, splitter) in DEPTHS.items():
        kinds = ("bitonic", "odd_even_merge", "pairwise") if n < 65536 else ("bitonic",)
        rows.append(_depth_row(n, "full sort (bitonic)", lambda n, k: networks.bitonic(n), (full,)))
        for kind in kinds:
            rows.append(_depth_row(n, f"{kind} selection", partial(networks.selection, kind=kind), classical))
        rows.append(_depth_row(n, "splitter selection", networks.splitter, splitter))
        for build in (networks.bitonic, networks.selection, networks.splitter):
            getattr(build, "cache_clear")()  # noqa: B009 — up to half a gigabyte of comparators
    header = ("n", "network", *(f"k = {k}" for k in range(1, 9)), "paper", "equal")
    return Table(EXPERIMENTS["depths"].title, header, rows)


def _depth_row(n: int, name: str, build: Callable[[int, int], networks.Network], paper: Sequence[int]) -> tuple[Value, ...]:
    depths = [build(n, k).depth for k in range(1, 9)]
    return n, name, *depths, " ".join(map(str, paper)), "yes" if depths == [*paper] * (8 // len(paper)) else "no"


# --- small data in the same formats ---

_SMOKE_CLASSES, _SMOKE_DIM = 60, 32  # more classes than the largest m


def _write_small(folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    if name == "cifar100":
        from anyk.lab.data import cifar

        cifar.write_small(folder, "python", 2)
        return f"cifar100:{folder}"
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(sum(name.encode()))
    centres = torch.randn(_SMOKE_CLASSES, _SMOKE_DIM, generator=generator)
    for part, examples in (("train", 20), ("test", 5)):
        labels = torch.arange(_SMOKE_CLASSES).repeat_interleave(examples)
        noise = torch.randn(len(labels), _SMOKE_DIM, generator=generator)
        save_file({"embeddings": centres[labels] + 1.2 * noise, "labels": labels}, folder / f"{part}.safetensors")
    about = {"name": name, "classes": [f"class {number}" for number in range(_SMOKE_CLASSES)], "dim": _SMOKE_DIM}
    (folder / "dataset.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    return str(folder)


_NEEDS = {
    "cifar100": "CIFAR-100, which is downloaded unless it is there",
    "imagenet1k": "ImageNet-1K through ResNeXt-101 32x48d WSL at 320 px (2048 dimensions), a folder of embeddings",
    "imagenet21kp": "ImageNet-21K-P (winter 2021) through ResNeXt-101 32x48d WSL at 224 px, a folder of embeddings",
    **{
        name: f"ImageNet-1K through ResNeXt-101 {name.split('-')[1]} WSL at 320 px, a folder of embeddings"
        for name in RESNEXT_SIZES
    },
    EFFICIENTNET: "ImageNet-1K through Noisy Student EfficientNet-L2 at 800 px (5504 dimensions), a folder of embeddings",
}

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table1",
            "Table 1: CIFAR-100, ResNet18 from scratch",
            _TABLE_1,
            notes=(_SINKHORN_NOTE, _NETWORK_NOTE),
        ),
        Experiment(
            "table2",
            "Table 2: ImageNet-1K and ImageNet-21K-P, the head of ResNeXt-101 32x48d WSL",
            _TABLE_2,
            notes=(_SINKHORN_NOTE, _NETWORK_NOTE, _HEAD_NOTE),
        ),
        Experiment(
            "table3",
            "Table 3: ImageNet-1K and ImageNet-21K-P for different P_K",
            _TABLE_3,
            notes=(_SINKHORN_NOTE, _NETWORK_NOTE, _HEAD_NOTE),
        ),
        Experiment(
            "table4",
            "Table 4: CIFAR-100 for different P_K",
            _TABLE_4,
            notes=(_SINKHORN_NOTE, _NETWORK_NOTE),
        ),
        Experiment(
            "table5",
            "Table 5: ImageNet-1K, two backbones, with t-tests",
            _TABLE_5,
            notes=(
                _SINKHORN_NOTE,
                "The paper does not give SinkhornSort's P_K here; it is taken to be DiffSortNets'.",
                _HEAD_NOTE,
            ),
            also=_significance,
        ),
        Experiment(
            "table6",
            "Table 6: ImageNet-21K-P with top-5, top-10 and top-20 components",
            _TABLE_6,
            metrics=("top1", "top5", "top10", "top20"),
            notes=(
                _SINKHORN_NOTE,
                _NETWORK_NOTE,
                "The paper's two softmax rows are one setting; one set of runs serves all three.",
            ),
        ),
        Experiment(
            "alpha",
            "Figure 2, left: P_K = [1-a, 0, 0, 0, a], SinkhornSort, ImageNet-1K",
            _ALPHA,
            notes=(
                _SINKHORN_NOTE,
                "The figure's numbers are not in the text: the paper's column repeats tables 2 and 3 (10 runs, not 5).",
                "The paper: top-1 rises up to a of about 0.6 and falls steeply at 1, where top-5 is best.",
            ),
        ),
        Experiment(
            "set-size",
            "Figure 2, right: number m of ranked classes, SinkhornSort, P_K = [.25, 0, 0, 0, .75], ImageNet-1K",
            _SET_SIZE,
            notes=(
                _SINKHORN_NOTE,
                "The figure's numbers are not in the text; m = 16 repeats table 3.",
                "The paper: between 10 and 40 m has a moderate influence; from 1000 on training becomes unstable.",
            ),
        ),
        Experiment(
            "backbones",
            "Figure 3 and table 5: top-k fine-tuning on several backbones, ImageNet-1K",
            tuple(cell for name in (*RESNEXT_SIZES, EFFICIENTNET) for cell in _backbone(name)),
            notes=(
                "The figure compares with the original heads, without numbers in the text; here the baseline is softmax.",
                "The figure's method is not named; table 5's DiffSortNets setting is used.",
            ),
            more_cells=_backbone,
        ),
        Experiment("depths", "Table 7: depths of sorting and selection networks"),
    )
}
"""By name, as ``anyk reproduce`` takes them."""


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise LabError(f"The experiments are {', '.join(EXPERIMENTS)}; there is none called {name!r}.")
    return EXPERIMENTS[name]
