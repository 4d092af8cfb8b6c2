"""The study behind docs/results.md: which runs it is made of, and the command that makes them.

    python evidence/study.py run --data embeddings=FOLDER --runs RUNS --jobs 2
    python evidence/study.py run --data embeddings=FOLDER --runs RUNS --only alpha m

Every method is tuned once on each data set, with the same number of runs on validation, and keeps its learning rate and
temperature wherever it appears. A run that has ended is not made again: runs are found by their configs, first in
``evidence/summaries`` (one line for each run, what the repository keeps), then in the run folders. The command may be stopped
at any moment and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grid
from anyk.lab.data import load
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError
from anyk.lab.files import write_atomically
from anyk.lab.run.config import Config
from anyk.lab.run.folder import Run
from anyk.lab.run.loss_names import find

SUMMARIES = Path(__file__).parent / "summaries"
#: of the runs that tune; the others count from 1
TUNING_SEEDS = (0, 101, 102)

#: what the message of a run says whose loss was not finite
DIVERGED = "training loss"

Fields = Mapping[str, Any]
PKS: dict[str, tuple[float, ...]] = {
    "half": (0.5, 0.0, 0.0, 0.0, 0.5),
    "pure": (0.0, 0.0, 0.0, 0.0, 1.0),
    "fifth": (0.2, 0.2, 0.2, 0.2, 0.2),
    "quarter": (0.25, 0.0, 0.0, 0.0, 0.75),
    "tenth": (0.1, 0.0, 0.0, 0.0, 0.9),
    "top10": (0.5, *(0.0,) * 8, 0.5),
    "top20": (0.5, *(0.0,) * 18, 0.5),
}


# What there is to compare --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded(Config):
    """A config as it was when these runs were made.

    There was a temperature "auto" then, which followed the spread of the scores. What speaks against it stays on record; such
    runs cannot be made again. The embeddings were taken as they are.
    """

    temperature: float | str = 1.0  # type: ignore[assignment]
    standardize: bool = False
    hidden: int = 512
    dropout: float | None = 0.0
    loss: str = "splitter"


@dataclass(frozen=True)
class Setting:
    """A data set and how all methods train on it."""

    name: str
    config: Recorded
    budget: int
    """points of the grid that are tried to tune a method"""
    tuning_seeds: int
    """runs at each point: more where the validation examples are few"""
    tuning: Mapping[str, Any]
    """fields that differ while tuning"""
    tunes_rate: bool
    """whether every method searches its learning rate too, or takes over the one that softmax found"""
    temperatures: Mapping[str, float]
    """where the search begins, by method; others begin at 1"""
    fields: Mapping[str, Fields] = field(default_factory=dict)
    """what a method needs here beside the shared config"""


# Where the search for a temperature begins follows from the paper's own: about 2 for NeuralSort and SoftSort among 16
# candidates and 16 among 100 classes; Sinkhorn's is near NeuralSort's.
SETTINGS: dict[str, Setting] = {
    "embeddings": Setting(
        "embeddings",
        Recorded(
            data="embeddings",
            model="linear",
            m=16,
            epochs=10,
            batch_size=500,
            learning_rate=2e-3,
            schedule="cosine",
            augment=(),
        ),
        budget=7,
        tuning_seeds=1,
        tuning={},
        tunes_rate=True,
        temperatures={"neuralsort": 2.0, "softsort": 2.0, "sinkhorn": 2.0},
    ),
    # All classes are ranked: from scratch, truncation to the best few makes the scores collapse (see "Truncation").
    "glyphs": Setting(
        "glyphs",
        Recorded(
            data="glyphs:200",
            model="cnn",
            m=None,
            epochs=16,
            batch_size=100,
            learning_rate=4e-3,
            schedule="onecycle",
            augment=("affine",),
            validation=0.2,
        ),
        budget=5,
        tuning_seeds=3,
        tuning={"epochs": 8},
        tunes_rate=False,  # among few validation examples a wrong rate wins by chance, and costs more than any loss gains
        temperatures={"neuralsort": 32.0, "softsort": 2.0, "sinkhorn": 16.0},
        fields={"sinkhorn": {"anchors": "topk"}},
    ),
}
METHODS: dict[str, Fields] = {
    "softmax": {"loss": "softmax"},
    "smooth": {"loss": "smooth"},
    "neuralsort": {"loss": "neuralsort"},
    "softsort": {"loss": "softsort"},
    "sinkhorn": {"loss": "sinkhorn"},
    "bitonic": {"loss": "bitonic"},
    "splitter": {"loss": "splitter"},
    "lapsum": {"loss": "lapsum"},
    "ksubset": {"loss": "ksubset"},
    "splitter-art": {"loss": "splitter", "swap": "logistic_art"},
    "splitter-dropin": {"loss": "splitter"},
    "lapsum-dropin": {"loss": "lapsum"},
}
#: one changed line: softmax's tuned config with another loss, nothing of it tuned
DROPINS = ("splitter-dropin", "lapsum-dropin")
OPERATORS = ("neuralsort", "softsort", "sinkhorn", "bitonic", "splitter", "lapsum", "ksubset")
#: the P_K that a method is tuned with
TUNED_WITH = {"softmax": (1.0,), "smooth": PKS["pure"]}


@dataclass(frozen=True)
class Cell:
    """One number of a table: a method with some fields of its own, over so many seeds.

    ``factor`` multiplies the tuned temperature, ``rate`` the tuned learning rate; ``first`` is the first seed.
    """

    data: str
    method: str
    p_k: str
    seeds: int = 5
    changes: tuple[tuple[str, Any], ...] = ()
    factor: float = 1.0
    first: int = 1
    rate: float = 1.0

    def configs(self, tuned: Config) -> list[Config]:
        """The runs, one for each seed; the tuning had a seed of its own."""
        changes: dict[str, Any] = dict(self.changes)
        if self.method not in TUNED_WITH:
            changes["p_k"] = PKS.get(self.p_k) or tuple(float(p) for p in self.p_k.split("/"))
        if self.factor != 1.0 and not isinstance(tuned.temperature, str):
            changes["temperature"] = tuned.temperature * self.factor
        if self.rate != 1.0:
            changes["learning_rate"] = tuned.learning_rate * self.rate
        return [tuned.replace(**changes, seed=self.first + number) for number in range(self.seeds)]


def cell(
    data: str,
    method: str,
    p_k: str = "half",
    seeds: int = 5,
    factor: float = 1.0,
    first: int = 1,
    rate: float = 1.0,
    **changes: Any,
) -> Cell:
    """A :class:`Cell`; a method that has no P_K to choose gets its own."""
    if method == "softmax":
        p_k = "softmax"
    if method == "smooth":
        p_k = "pure"
    return Cell(data, method, p_k, seeds, tuple(sorted(changes.items())), factor, first, rate)


def mix(alpha: float) -> str:
    """P_K = [1 - alpha, 0, 0, 0, alpha] by name."""
    known = {0.5: "half", 0.75: "quarter", 0.9: "tenth", 1.0: "pure"}
    return known.get(alpha) or f"{1 - alpha:g}/0/0/0/{alpha:g}"


ALPHA_METHODS = ("sinkhorn", "splitter", "lapsum")
ALPHAS = (0.2, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
SIZES = (6, 10, 16, 25, 40, None)
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NOISES = (0.2, 0.4)
#: of the drop-ins
CONSTANTS: tuple[float | str, ...] = (1.0, 2.0, 4.0, "auto")
# How a default is chosen, written down before the runs of "dropin" and "confirm" were made. A drop-in passes on a data set if
# the 95 % interval of its top-1 difference to softmax lies above minus the margin, and its top-5 gain is significant (Holm
# over finalists and data sets). The default is the finalist that passes on both. If none does, it stays the splitter, unless
# LapSum's mean of top-1 and top-5 is significantly higher on one data set and not significantly lower on the other.
CONFIRMED = {"first": 11, "seeds": 20, "split_seed": 1}
#: a loss of accuracy that nobody would mind: what the test examples and a few seeds can tell
MARGINS = {"embeddings": 0.001, "glyphs": 0.005}
#: the default as it is, confirmed beside the finalists to see what a change of it would change
DEFAULT = ("splitter-dropin", 1.0)
# With 40 % wrong labels the drop-ins' kin looked better than softmax in top-1 and top-5, on five seeds. Written down before the
# runs that look again: softmax's config, the default and LapSum at the temperature it was confirmed with, fresh seeds, another
# split. It pays if top-1 and top-5 are both significantly above softmax (Holm over the four of a data set).
NOISY = (("softmax", 1.0), ("splitter-dropin", 1.0), ("lapsum-dropin", 4.0))
# Added when the embeddings had shown a gain: what softmax gains there by other small changes.
NOISY_SOFTMAX: tuple[Fields, ...] = ({"label_smoothing": 0.1}, {"label_smoothing": 0.2}, {"rate": 0.5}, {"rate": 0.25})
# Half the rate explained what wrong labels had seemed to show. Asked next: does another rate explain the confirmed gain too?
RATES = (1.0, 0.5, 2.0)
#: stood out in the main rows of glyphs after the rule had been written: confirmed beside the finalists, tuned as there
FOLLOWED = "ksubset"


def _main(data: str, seeds: int, p_ks: Sequence[str]) -> list[Cell]:
    cells = [cell(data, "softmax", seeds=seeds), cell(data, "smooth", seeds=seeds)]
    return cells + [cell(data, method, p_k, seeds) for p_k in p_ks for method in OPERATORS]


def _section(name: str, data: str) -> list[Cell]:
    """The cells of a section for one data set.

    The sweeps are of the embeddings, the setting of the paper's figures; on glyphs there are those that bear on a default.
    """
    glyphs = data == "glyphs"
    if name == "main":
        return _main(data, 10, ("half", "fifth", "pure"))
    if name == "dropin":
        return [cell(data, "softmax")] + [cell(data, m, temperature=value) for m in DROPINS for value in CONSTANTS]
    if name == "p_k":
        return [cell(data, method, p_k) for p_k in ("quarter", "tenth") for method in OPERATORS]
    if name == "top1":
        methods = ("splitter", "lapsum") if glyphs else ("splitter", "lapsum", "neuralsort")
        p_ks = ("half",) if glyphs else ("half", "fifth")
        modes = ("separate", "mixed", "operator")
        return [cell(data, method, p_k, top1=mode) for p_k in p_ks for method in methods for mode in modes]
    if name == "m":
        if glyphs:
            cells = [cell(data, "splitter", p_k, m=m) for p_k in ("half", "fifth") for m in (8, 16, 64, None)]
            return cells + [cell(data, "lapsum", "half", m=m) for m in (8, 16, None)]
        cells = [cell(data, method, "quarter", m=m) for method in ("splitter", "lapsum", "neuralsort") for m in SIZES]
        cells += [cell(data, method, "half", m=m) for method in ("splitter", "lapsum") for m in (6, 8, 10, 16)]
        return cells + [cell(data, "sinkhorn", "quarter", m=m) for m in (6, 10, 16, 25, 40)]
    if name == "noise":
        methods = ("softmax", "splitter", "lapsum") if glyphs else ("softmax", "smooth", "splitter", "lapsum", "sinkhorn")
        return [cell(data, method, label_noise=noise) for noise in NOISES for method in methods]
    if name == "noisy":
        cells = [cell(data, method, temperature=value, label_noise=0.4, **CONFIRMED) for method, value in NOISY]
        others = () if glyphs else NOISY_SOFTMAX
        return cells + [cell(data, "softmax", label_noise=0.4, **CONFIRMED, **fields) for fields in others]
    if glyphs:
        return []
    if name == "rates":
        return [cell(data, "softmax", rate=rate, **CONFIRMED) for rate in RATES]
    if name == "alpha":
        return [cell(data, "softmax")] + [cell(data, m, mix(alpha)) for m in ALPHA_METHODS for alpha in ALPHAS]
    if name == "temperature":
        methods = ("splitter", "lapsum", "neuralsort", "softsort", "ksubset", "sinkhorn")
        cells = [cell(data, method, factor=factor) for method in methods for factor in FACTORS]
        return cells + [cell(data, method, temperature="auto") for method in methods]
    if name == "swap":
        return [cell(data, "splitter-art", p_k) for p_k in ("half", "fifth", "pure")]
    if name == "wires":
        return [
            cell(data, method, "half", wires=wires)
            for method in ("splitter", "bitonic")
            for wires in ("target", "sorted", "given")
        ]
    if name == "top20":
        methods = ("splitter", "neuralsort", "lapsum")  # Sinkhorn among 40 takes minutes a run
        return [cell(data, "softmax")] + [cell(data, m, p_k, m=40) for p_k in ("half", "top10", "top20") for m in methods]
    if name == "epochs":
        epochs = SETTINGS[data].config.epochs
        return [cell(data, method, epochs=factor * epochs) for method in ("softmax", "splitter") for factor in (1, 2)]
    raise LabError(f"there is no section {name!r}; there are {', '.join(SECTIONS)}.")


SECTIONS = (
    "main",
    "dropin",
    "p_k",
    "alpha",
    "m",
    "temperature",
    "swap",
    "wires",
    "top1",
    "noise",
    "noisy",
    "rates",
    "top20",
    "epochs",
)
PARTS = (*SECTIONS, "confirm")


def section(name: str, data: str) -> list[Cell]:
    """The cells of a section of the report, each once; a change that is the setting's own value is no change."""
    return list(dict.fromkeys(plain(each) for each in _section(name, data)))


def plain(each: Cell) -> Cell:
    """The cell without changes that change nothing."""
    shared = SETTINGS[each.data].config
    return replace(each, changes=tuple((key, value) for key, value in each.changes if getattr(shared, key) != value))


def finalists(known: Mapping[str, Summaries]) -> dict[str, float | str]:
    """For each drop-in the temperature that did best on validation, both data sets together; empty while a run is missing.

    The rule was written down before these runs were made: the mean of top-1 and top-5 on validation, seeds 1 to 5, the same
    constant on both data sets. The test says nothing here.
    """
    best: dict[str, float | str] = {}
    for method in DROPINS:
        scores: dict[float | str, float] = {}
        for value in CONSTANTS:
            for data in SETTINGS:
                each = plain(cell(data, method, temperature=value))
                runs = runs_of(each, known[data])
                if runs is None or len(runs) < each.seeds:
                    return {}
                scores[value] = scores.get(value, 0.0) + (score(runs) or 0.0)
        best[method] = max(CONSTANTS, key=scores.__getitem__)
    return best


def confirmation(data: str, known: Mapping[str, Summaries]) -> list[Cell]:
    """Softmax, the finalists and the default as it is, on seeds that nothing was chosen by and another part as validation."""
    chosen = finalists(known)
    cells = [cell(data, method, temperature=value, **CONFIRMED) for method, value in chosen.items()]
    cells.append(cell(data, FOLLOWED, **CONFIRMED))
    if DEFAULT not in chosen.items():
        cells.append(cell(data, DEFAULT[0], temperature=DEFAULT[1], **CONFIRMED))
    return [plain(each) for each in ([cell(data, "softmax", **CONFIRMED), *cells] if chosen else [])]


# Summaries -----------------------------------------------------------------------------------------------------------------


def key(config: Config, shared: Config) -> str:
    """What a config has of its own, as text: the name of a run."""
    own = {name: new for name, (_, new) in shared.differences(config).items() if name != "data"}
    if not find(config.loss).has_temperature:
        own.pop("temperature", None)
    return json.dumps(own, sort_keys=True)


@dataclass(frozen=True)
class Summary:
    """What the repository keeps of a run. ``own`` are the fields in which its config differs from the setting's."""

    own: dict[str, Any]
    test: dict[str, float]
    validation: dict[str, float]
    epochs: float
    selected: float
    seconds: float

    def line(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


class Summaries:
    """The lines of one data set: a head with the shared config and the data's fingerprint, then one line for each run."""

    def __init__(self, setting: Setting, path: Path) -> None:
        self.setting, self.path = setting, path
        self.head: dict[str, Any] = {"shared": setting.config.to_json(), "data": None}
        self.runs: dict[str, Summary] = {}
        if not path.exists():
            return
        first, *lines = path.read_text().splitlines()
        self.head = json.loads(first)
        if Recorded.from_json(self.head["shared"], str(path)) != setting.config:  # fields that came later have their defaults
            raise LabError(f"{path} belongs to another shared config: move it away, or mend SETTINGS in study.py.")
        for line in lines:
            run = Summary(**json.loads(line))
            self.runs[json.dumps(run.own, sort_keys=True)] = run

    def find(self, config: Config) -> Summary | None:
        return self.runs.get(key(config, self.setting.config))

    def add(self, config: Config, result: Mapping[str, Any]) -> None:
        """Take over the outcome of a run folder."""
        data = {name: result["data"][name] for name in ("classes", "fingerprint", "name", "test", "train", "validation")}
        if self.head["data"] not in (None, data):
            raise LabError(f"the data of {self.path.stem} have changed since {self.path} was begun.")
        self.head["data"] = data
        own = key(config, self.setting.config)
        measured = {
            split: {name: round(value, 5) for name, value in result[split].items() if name != "mean"}
            for split in ("test", "validation")
        }
        selected = next(iter(result["selected"].values()))
        seconds = round(result["seconds_in_model"], 1)
        self.runs[own] = Summary(json.loads(own), measured["test"], measured["validation"], result["epochs"], selected, seconds)

    def add_diverged(self, config: Config) -> None:
        """Note a run whose loss was not finite: it has no accuracies."""
        own = key(config, self.setting.config)
        self.runs[own] = Summary(json.loads(own), {}, {}, 0.0, 0.0, 0.0)

    def save(self) -> None:
        if self.path.exists():  # another process may have added some meanwhile
            self.runs = {**Summaries(self.setting, self.path).runs, **self.runs}
        lines = [json.dumps(self.head, sort_keys=True), *(self.runs[name].line() for name in sorted(self.runs))]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, ("\n".join(lines) + "\n").encode())


def read(data: str, folder: Path = SUMMARIES) -> Summaries:
    """The summaries of one data set."""
    return Summaries(SETTINGS[data], folder / f"{data}.jsonl")


# Tuning: the same search for all, told by what is known so far ---------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """How far the search for a method has come: the tries that are still to make, or the winner."""

    missing: tuple[Config, ...] = ()
    best: Config | None = None
    tries: tuple[tuple[Config, float | None], ...] = ()


def tuning(data: str, method: str, known: Summaries) -> Tuning:
    """Replay the search with the runs that are known.

    First the method's first temperature, a quarter and four times of it (softmax: the learning rate, half and twice), then
    steps of factor 2 around the best so far, as in ``anyk compare``.
    """
    setting = SETTINGS[data]
    if method in DROPINS:
        softmax = tuning(data, "softmax", known)
        own = {**METHODS[method], "p_k": PKS["half"], "temperature": 1.0}
        return Tuning(softmax.missing, softmax.best and softmax.best.replace(**own))
    fields = {**METHODS[method], **setting.fields.get(method, {}), "p_k": TUNED_WITH.get(method, PKS["half"])}
    start = setting.config.replace(**fields, temperature=setting.temperatures.get(method, 1.0))
    warm = find(start.loss).has_temperature
    first: list[grid.Point] = [(0, 0), (0, 2), (0, -2)] if warm else [(0,), (1,), (-1,)]
    if warm and not setting.tunes_rate:
        softmax = tuning(data, "softmax", known)
        if softmax.best is None:
            return Tuning(softmax.missing)
        start = start.replace(learning_rate=softmax.best.learning_rate)
        first = [(0,), (2,), (-2,)]

    def at(config: Config, point: grid.Point) -> Config:
        return grid.at(config, point if not warm or setting.tunes_rate else (0, *point))

    tried, seeds = start.replace(**setting.tuning), TUNING_SEEDS[: setting.tuning_seeds]
    scores: dict[grid.Point, float | None] = {}
    tries: list[tuple[Config, float | None]] = []
    points = first
    while True:
        made = {point: [at(tried, point).replace(seed=seed) for seed in seeds] for point in points}
        missing = tuple(config for configs in made.values() for config in configs if known.find(config) is None)
        if missing:
            return Tuning(missing, tries=tuple(tries))
        for point, configs in made.items():
            scores[point] = score([run for config in configs if (run := known.find(config)) is not None])
            tries.append((configs[0], scores[point]))
        if len(scores) >= setting.budget:
            return Tuning((), at(start, grid.best_point(scores)), tuple(tries))
        points = grid.next_points(scores, len(first[0]))[: min(grid.ROUND, setting.budget - len(scores))]


def score(runs: Sequence[Summary]) -> float | None:
    """What tuning maximises: the mean of top-1 and top-5 on validation, over the seeds; None if a run diverged."""
    if not all(run.validation for run in runs):
        return None
    return sum((run.validation["top1"] + run.validation["top5"]) / 2 for run in runs) / len(runs)


def runs_of(each: Cell, known: Summaries) -> list[Summary] | None:
    """The finished runs of a cell in the order of their seeds; None while its method is not tuned."""
    tuned = tuning(each.data, each.method, known).best
    if tuned is None:
        return None
    return [run for config in each.configs(tuned) if (run := known.find(config)) is not None]


# The command ---------------------------------------------------------------------------------------------------------------


def plan(data: Sequence[str], only: Sequence[str], seeds: int | None, methods: Sequence[str] = ()) -> Iterator[Cell]:
    """All cells that were asked for, the most important first: a few seeds of the main rows before the rest of them."""
    for method in methods:
        if method not in METHODS:
            raise LabError(f"there is no method {method!r}; there are {', '.join(METHODS)}.")
    wanted = [each for each in _plan(data, only, seeds) if not methods or each.method in methods]
    yield from dict.fromkeys(wanted)


def _plan(data: Sequence[str], only: Sequence[str], seeds: int | None) -> Iterator[Cell]:
    names = [name for name in SECTIONS if not only or name in only]
    for name in only:
        if name not in PARTS:
            raise LabError(f"there is no section {name!r}; there are {', '.join(PARTS)}.")
    if "main" in names:
        for count in (5, 10):
            for each in data:
                for main in section("main", each):
                    yield replace(main, seeds=min(count, seeds or count))
    for name in names:
        for each in data:
            for other in section(name, each):
                yield replace(other, seeds=min(other.seeds, seeds or other.seeds))


def waves(cells: Iterable[Cell], known: Mapping[str, Summaries], size: int) -> Iterator[list[tuple[str, Config]]]:
    """What is still to run, in pieces: after each, its outcomes are among ``known``. What failed to run is not asked for again.

    The methods of a data set are tuned together, when its first cell comes, so that many tries can be made at once.
    """
    cells = list(cells)
    asked: set[tuple[str, str]] = set()
    tuned: set[str] = set()
    wave: list[tuple[str, Config]] = []

    def new(data: str, configs: Iterable[Config]) -> Iterator[tuple[str, Config]]:
        for config in configs:
            name = data, key(config, SETTINGS[data].config)
            if name not in asked and known[data].find(config) is None:
                asked.add(name)
                yield data, config

    for each in cells:
        if each.data not in tuned:
            if wave:
                yield wave
                wave = []
            methods = list(dict.fromkeys(other.method for other in cells if other.data == each.data))
            while tries := [
                found for method in methods for found in new(each.data, tuning(each.data, method, known[each.data]).missing)
            ]:
                yield tries
            tuned.add(each.data)
        best = tuning(each.data, each.method, known[each.data]).best
        wave += new(each.data, each.configs(best) if best else ())
        if len(wave) >= size:
            yield wave
            wave = []
    if wave:
        yield wave


def run(
    data: Mapping[str, str],
    folder: Path,
    *,
    jobs: int,
    only: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: int | None = None,
    out: Path = SUMMARIES,
) -> int:
    """Make the runs that are missing; returns how many were made."""
    known = {name: read(name, out) for name in data}
    fingerprints = {name: load(place).fingerprint for name, place in data.items()}
    made = 0

    def all_waves() -> Iterator[list[tuple[str, Config]]]:
        yield from waves(plan(list(data), only, seeds, methods), known, 10 * jobs)
        if not only or "confirm" in only:  # what is to be confirmed is known when the rest is there
            both = {name: known.get(name) or read(name, out) for name in SETTINGS}
            yield from waves([each for name in data for each in confirmation(name, both)], known, 10 * jobs)

    with Pool(jobs) as pool:
        for wave in all_waves():
            places = {}
            for name, config in wave:
                own = key(config, SETTINGS[name].config)
                digest = hashlib.blake2b(f"{fingerprints[name]} {own}".encode(), digest_size=6).hexdigest()
                places[folder / name / f"{config.loss}-seed{config.seed}-{digest}"] = (name, config)
            outcomes = pool.run({place: config.replace(data=data[name]) for place, (name, config) in places.items()})
            for place, (name, config) in places.items():
                result = outcomes[place].result
                if result is not None:
                    known[name].add(config, result)
                    made += 1
                elif DIVERGED in (outcomes[place].error or ""):
                    known[name].add_diverged(config)
                else:
                    print(f"{place.name}: {outcomes[place].error or 'stopped'}", file=sys.stderr)
            for name in data:
                known[name].save()
            print(f"{made} runs so far", file=sys.stderr, flush=True)
    return made


def collect(folder: Path, out: Path = SUMMARIES) -> int:
    """Take over all runs that have ended in the run folders, also those of a command still at work; returns how many."""
    count = 0
    for name in SETTINGS:
        known = read(name, out)
        finished = sorted(file.parent for file in (folder / name).glob("*/result.json"))
        for place in finished:
            known.add(Run(place).config(), Run(place).result() or {})
        for place in sorted(file.parent for file in (folder / name).glob("*/error.txt")):
            if DIVERGED in (Run(place).error() or ""):
                known.add_diverged(Run(place).config())
        count += len(finished)
        if finished:
            known.save()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="make the runs that are missing")
    runner.add_argument("--data", nargs="+", default=[], metavar="NAME=PLACE", help="where a data set is: embeddings=FOLDER")
    runner.add_argument("--runs", type=Path, required=True, help="the run folders")
    runner.add_argument("--jobs", type=int, default=2)
    runner.add_argument("--only", nargs="*", default=[], help=f"sections: {', '.join(PARTS)}")
    runner.add_argument("--on", nargs="*", default=list(SETTINGS), help="data sets, the most important first")
    runner.add_argument("--methods", nargs="*", default=[], help=f"methods: {', '.join(METHODS)}")
    runner.add_argument("--seeds", type=int, default=None, help="at most so many seeds for each cell")
    collector = commands.add_parser("collect", help="take over the runs that have ended, also while another process makes more")
    collector.add_argument("--runs", type=Path, required=True, help="the run folders")
    arguments = parser.parse_args()
    if arguments.command == "collect":
        print(f"{collect(arguments.runs)} runs", file=sys.stderr)
        return
    places = dict(word.partition("=")[::2] for word in arguments.data)
    data = {name: places.get(name, SETTINGS[name].config.data) for name in arguments.on}
    run(data, arguments.runs, jobs=arguments.jobs, only=arguments.only, methods=arguments.methods, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
