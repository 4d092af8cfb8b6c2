"""The paper's tables and figures: the configs that repeat them, and our numbers beside theirs.

An :class:`Experiment` is a list of cells. A cell is one entry of a table: a data set, a method, a P_K, and the accuracies
the paper gives, in percent. ``experiment.configs(...)`` are the runs, ``experiment.compare(results)`` are the tables.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from anyk import networks
from anyk.lab.errors import LabError
from anyk.lab.paper import numbers
from anyk.lab.paper.numbers import Cell, Regime
from anyk.lab.run.config import Config
from anyk.lab.statistics import mean, std
from anyk.lab.tables import Column, Table, Value

Source = Literal["paper", "official"]


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


_SINKHORN = "Sinkhorn's temperature is not published; (m - 1)/8 is ours."
_SMOKE = "Short runs on synthetic data: they show that everything works; the numbers cannot be compared with the paper's."
_NETWORK = "The paper does not say which network DiffSortNets is in its tables; here it is splitter."
_HEAD = "The official code starts the target on a wire of its own that anyk does not offer; wires=target is the nearest."


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
    small: bool = False
    """whether it is smaller than the paper's: what can be compared then are the differences to softmax"""

    @property
    def needs(self) -> dict[str, str]:
        """The data sets it needs, by name, and what each is."""
        return {cell.data: numbers.NEEDS[cell.data] for cell in self.cells}

    def configs(
        self,
        data: str | Mapping[str, str] | None = None,
        *,
        smoke: bool = False,
        seeds: int | None = None,
        source: Source = "paper",
    ) -> dict[str, Config]:
        """The runs of the experiment.

        Args:
            data: for each data set of ``needs`` the config's ``data`` (a folder of embeddings; ``cifar100`` needs none), or
                one text where it needs only one. Data sets that are left out are left out of the experiment.
            smoke: shrunk to seconds, for :meth:`write_smoke_data`.
            seeds: how many; None: as many as in the paper (with ``smoke`` one).
            source: ``"paper"`` or ``"official"``, where they differ.

        Returns:
            Run name -> config. Nothing, where there is nothing to train.
        """
        if seeds is not None and seeds < 1:
            raise LabError(f"seeds should be at least 1, but is {seeds}.")
        places = self._places(data)
        runs = {}
        for cell in self._cells_for(places):
            count = seeds or (1 if smoke else cell.seeds)
            config = _config(cell, places[cell.data], source, smoke)
            runs.update({f"{cell.name}-seed{seed}": config.replace(seed=seed) for seed in range(count)})
        return runs

    def write_smoke_data(self, folder: str | Path) -> dict[str, str]:
        """Write small made data sets in the formats of the real ones; the ``data`` of a smoke run."""
        return {name: _write_small(Path(folder) / name, name) for name in self.needs}

    def compare(self, results: Mapping[str, Mapping[str, Any]], *, smoke: bool = False) -> Table:
        """Our numbers beside the paper's, in percent.

        Args:
            results: run name -> content of the run's ``result.json``; names that are not of this experiment are not looked at.
                Needs ``["test"][metric]`` as fractions.
            smoke: the results are of smoke runs; the table says so, and has no differences to the paper.
        """
        if self.name == "depths":
            return _depth_table(self.title)
        columns = [*_columns("field", "data", "method", "P_K"), *_columns("count", "m", "runs")]
        for metric in self.metrics:
            columns += _columns("number", metric, "std", "paper")
            columns += [] if smoke else _columns("signed", *(("Δ", "Δ paper") if self.small else ("difference",)))
        names = {*self.needs, *self._other_names(results)}
        rows: list[tuple[Value, ...]] = []
        for cell in self._cells_for(dict.fromkeys(names, "")):
            runs = _runs(cell, results)
            m = None if cell.method in ("softmax", "smooth") else cell.m or _regime(cell.data).config.m
            method = numbers.METHODS[cell.method] + (f", smoothing {cell.label_smoothing:g}" if cell.label_smoothing else "")
            row: list[Value] = [cell.data, method, _list(cell.p_k), m, len(runs)]
            for place, (metric, paper) in enumerate(zip(self.metrics, cell.paper, strict=True)):
                ours = _percents(runs, metric)
                row += _beside(ours, paper)[: 3 if smoke or self.small else 4]
                if self.small and not smoke:
                    row += self._to_softmax(cell, place, results)
            rows.append(tuple(row))
        notes = (_SMOKE, *self.notes) if smoke else self.notes
        return Table(tuple(columns), tuple(rows), notes, self.title)

    def _to_softmax(self, cell: Cell, place: int, results: Mapping[str, Mapping[str, Any]]) -> list[Value]:
        """Our difference to softmax with the same label smoothing in a metric, and the paper's."""
        softmax = next(one for one in self.cells if one.method == "softmax" and one.label_smoothing == cell.label_smoothing)
        if cell is softmax:
            return [None, None]
        ours, theirs = (_percents(_runs(one, results), self.metrics[place]) for one in (cell, softmax))
        paper, base = cell.paper[place], softmax.paper[place]
        return [
            mean(ours) - mean(theirs) if ours and theirs else None,
            None if paper is None or base is None else paper - base,
        ]

    def _places(self, data: str | Mapping[str, str] | None) -> dict[str, str]:
        needs = self.needs
        if isinstance(data, str):
            if len(needs) != 1:
                raise LabError(f"{self.name} needs several data sets ({', '.join(needs)}): give --data NAME=PATH for each.")
            data = dict.fromkeys(needs, data)
        places = {name: "cifar100" for name in needs if name.startswith("cifar100")}
        places.update(data or {})
        unknown = sorted(set(places) - set(needs))
        if unknown and self.more_cells is None:
            raise LabError(f"{self.name} knows no data set {unknown[0]!r}; it needs {', '.join(needs)}.")
        if needs and not places:
            wanted = "; ".join(f"{name}: {what}" for name, what in needs.items())
            raise LabError(
                f"{self.name} needs data that only you can give. {wanted}. Give --data NAME=PATH for those you have."
            )
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


def _regime(data: str) -> Regime:
    return numbers.REGIMES.get(data, numbers.REGIMES["imagenet1k"])


def _config(cell: Cell, place: str, source: Source, smoke: bool) -> Config:
    regime = _regime(cell.data)
    config = regime.config.replace(data=place, label_smoothing=cell.label_smoothing)
    if source == "official":
        config = config.replace(**regime.official)
    if smoke:
        config = config.replace(**regime.smoke)
    if cell.method == "softmax":
        return config.replace(loss="softmax", p_k=numbers.TOP1, m=None, top1="separate", softmax_over="all", wires="target")
    ranked = cell.m or regime.ranked
    inverse = regime.inverse_temperatures.get(cell.method, numbers.SINKHORN_INVERSE_TEMPERATURE)
    config = config.replace(p_k=cell.p_k, temperature=temperature(cell.method, inverse, ranked))
    if cell.method == "smooth":  # over all classes, as published
        return config.replace(loss="smooth", m=None, top1="separate", softmax_over="all", wires="target")
    if cell.m is not None:
        config = config.replace(m=cell.m)
    if cell.method == "diffsortnets":
        return config.replace(loss="splitter", swap=regime.swap)
    return config.replace(loss=cell.method, wires="target")


def _runs(cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    pattern = re.compile(re.escape(cell.name) + r"-seed\d+")
    return [result for name, result in results.items() if pattern.fullmatch(name)]


def _percents(runs: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    values = ((run.get("test") or {}).get(metric) for run in runs)  # a run that has not been tested counts for nothing
    return [100 * value for value in values if value is not None]


def _beside(ours: Sequence[float], paper: float | None) -> tuple[Value, ...]:
    """Mean, standard deviation, the paper's number, the difference."""
    if not ours:
        return None, None, paper, None
    return mean(ours), std(ours), paper, None if paper is None else mean(ours) - paper


def _list(p_k: Sequence[float]) -> str:
    """As the paper writes it; long ones with the zeros left out."""
    entries = [f"{weight:g}".removeprefix("0") or "0" for weight in p_k]
    if len(entries) > 5:
        entries = [entries[0], "0", "...", "0", entries[-1]]
        return f"[{','.join(entries)}] ({len(p_k)})"
    return f"[{','.join(entries)}]"


def _columns(kind: Literal["field", "count", "number", "signed"], *titles: str) -> list[Column]:
    return [Column(title, title, kind) for title in titles]


def _depth_table(title: str) -> Table:
    """Table 7, from the networks themselves. The classical selections are equally deep: at the largest n one will do."""
    rows: list[tuple[Value, ...]] = []
    for n, (full, classical, splitter) in numbers.DEPTHS.items():
        kinds = ("bitonic", "odd_even_merge", "pairwise") if n < 65536 else ("bitonic",)
        rows.append(_depth_row(n, "full sort (bitonic)", lambda n, k: networks.bitonic(n), (full,)))
        for kind in kinds:
            rows.append(_depth_row(n, f"{kind} selection", partial(networks.selection, kind=kind), classical))
        rows.append(_depth_row(n, "splitter selection", networks.splitter, splitter))
        for build in (networks.bitonic, networks.selection, networks.splitter):
            getattr(build, "cache_clear")()  # noqa: B009 — up to half a gigabyte of comparators
    depths = [f"k = {k}" for k in range(1, 9)]
    columns = [*_columns("count", "n"), *_columns("field", "network"), *_columns("count", *depths)]
    return Table((*columns, *_columns("field", "paper", "equal")), tuple(rows), title=title)


def _depth_row(n: int, name: str, build: Callable[[int, int], networks.Network], paper: Sequence[int]) -> tuple[Value, ...]:
    depths = [build(n, k).depth for k in range(1, 9)]
    return n, name, *depths, " ".join(map(str, paper)), "yes" if depths == [*paper] * (8 // len(paper)) else "no"


# --- small data in the same formats ---

_SMOKE_CLASSES, _SMOKE_DIM = 60, 32  # more classes than the largest m


def _write_small(folder: Path, name: str) -> str:
    if name.startswith("cifar100"):
        from anyk.lab.data import cifar

        cifar.write_small(folder, 2)
        return f"cifar100:{folder}"
    from anyk.lab.data import Dataset, Split, embeddings

    generator = torch.Generator().manual_seed(sum(name.encode()))
    centres = torch.randn(_SMOKE_CLASSES, _SMOKE_DIM, generator=generator)

    def examples(of_each: int) -> Split:
        labels = torch.arange(_SMOKE_CLASSES).repeat_interleave(of_each)
        noise = torch.randn(len(labels), _SMOKE_DIM, generator=generator)
        return Split((centres[labels] + 1.2 * noise,), labels)

    classes = tuple(f"class {number}" for number in range(_SMOKE_CLASSES))
    return str(embeddings.write(folder, Dataset(name, "embeddings", classes, examples(20), examples(5), ""), force=True))


_EXPERIMENTS = (
    Experiment("table1", "Table 1: CIFAR-100, ResNet18 from scratch", numbers.TABLE_1, notes=(_SINKHORN, _NETWORK)),
    Experiment(
        "table1-small",
        "Table 1 in small: CIFAR-100 at 16 px, ResNet18 at a quarter of its width, up to 60 epochs",
        numbers.TABLE_1_SMALL,
        notes=(
            "The paper's images have 32 px and its ResNet18 is four times as wide, so what can be compared are the differences "
            "to softmax (Δ, and Δ paper). The rows with smoothing are compared with softmax with the same.",
            "A run ends when no metric has improved for 10 epochs.",
            _SINKHORN,
            _NETWORK,
        ),
        small=True,
    ),
    Experiment(
        "table2",
        "Table 2: ImageNet-1K and ImageNet-21K-P, the head of ResNeXt-101 32x48d WSL",
        numbers.TABLE_2,
        notes=(_SINKHORN, _NETWORK, _HEAD),
    ),
    Experiment(
        "table3",
        "Table 3: ImageNet-1K and ImageNet-21K-P for different P_K",
        numbers.TABLE_3,
        notes=(_SINKHORN, _NETWORK, _HEAD),
    ),
    Experiment("table4", "Table 4: CIFAR-100 for different P_K", numbers.TABLE_4, notes=(_SINKHORN, _NETWORK)),
    Experiment(
        "table5",
        "Table 5: ImageNet-1K, two backbones",
        numbers.TABLE_5,
        notes=(_SINKHORN, "The paper does not give SinkhornSort's P_K here; it is taken to be DiffSortNets'.", _HEAD),
    ),
    Experiment(
        "table6",
        "Table 6: ImageNet-21K-P with top-5, top-10 and top-20 components",
        numbers.TABLE_6,
        metrics=("top1", "top5", "top10", "top20"),
        notes=(_SINKHORN, _NETWORK, "The paper's two softmax rows are one setting; one set of runs serves all three."),
    ),
    Experiment(
        "alpha",
        "Figure 2, left: P_K = [1-a, 0, 0, 0, a], SinkhornSort, ImageNet-1K",
        numbers.ALPHA,
        notes=(
            _SINKHORN,
            "The figure's numbers are not in the text: the paper's column repeats tables 2 and 3 (10 runs, not 5).",
            "The paper: top-1 rises up to a of about 0.6 and falls steeply at 1, where top-5 is best.",
        ),
    ),
    Experiment(
        "set-size",
        "Figure 2, right: number m of ranked classes, SinkhornSort, P_K = [.25, 0, 0, 0, .75], ImageNet-1K",
        numbers.SET_SIZE,
        notes=(
            _SINKHORN,
            "The figure's numbers are not in the text; m = 16 repeats table 3.",
            "The paper: between 10 and 40 m has a moderate influence; from 1000 on training becomes unstable.",
        ),
    ),
    Experiment(
        "backbones",
        "Figure 3 and table 5: top-k fine-tuning on several backbones, ImageNet-1K",
        tuple(cell for name in (*numbers.RESNEXT_SIZES, numbers.EFFICIENTNET) for cell in numbers.backbone(name)),
        notes=(
            "The figure compares with the original heads, without numbers in the text; here the baseline is softmax.",
            "The figure's method is not named; table 5's DiffSortNets setting is used.",
        ),
        more_cells=numbers.backbone,
    ),
    Experiment("depths", "Table 7: depths of sorting and selection networks"),
)
EXPERIMENTS = {experiment.name: experiment for experiment in _EXPERIMENTS}
"""By name, as ``anyk reproduce`` takes them."""


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise LabError(f"The experiments are {', '.join(EXPERIMENTS)}; there is none called {name!r}.")
    return EXPERIMENTS[name]
