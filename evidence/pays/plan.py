"""What the second study asks, written down before its runs.

**Sets.** ``completion``: the next token of Python's standard library among 2000, a small context model. ``items``: the next
film of MovieLens-1M's users among 3416. ``pixels``: CIFAR-100 at 16 px from scratch. ``embeddings``: CIFAR-100 as frozen
features, a linear layer. These four decide. ``embeddings-mlp`` (a hidden layer of 512) and ``glyphs`` (characters in many
fonts, from scratch) are checks. K, the list that is looked at, is 5; for items 10.

**Tuning.** Every method and set by itself, with the search of `anyk compare` on the mean of top-1 and top-K on validation,
and with the same number of points at full length: see ``budget`` of each set. Tuned are the learning rate and what each
method has of its own (:data:`METHODS`). Points within noise of the best are tried on two further seeds, except for pixels.
Plain softmax is no contender: its search ends when its best rate lies inside what was tried.

**1. Main table.** The tuned methods on seeds that nothing was chosen by, 1 to 10 (pixels and glyphs: 1 to 5): differences to
softmax, whose learning rate and label smoothing are tuned, and to gce, which is bounded as the error losses are but knows no
k; two-way intervals over seeds and test examples; Holm over the methods and the two k of a set, for each of the two controls.

**The rule for the default**: over the four sets, the two-way 95 % interval of the top-1 difference lies above -0.2 points on
each, top-k (5; 10 for items) is gained on at least three with p < .01 after Holm against softmax with tuned smoothing, and
the mean of both is not below gce's. If nothing passes, the best by the mean of both stays the default. The candidates are
the error losses that the main table has on completion, items and embeddings (pixels have one of them).

**2. Which k gains where** (completion, items). The tuned ``error:ksubset mix`` with other P_K and nothing else changed, each
measured at every k: the diagonal of that table should be the best of its column.

**3. Hyperparameters, one at a time** (embeddings; a shorter list on completion). The tuned ``error:ksubset mix`` with one
changed: q; ce_weight, fixed and falling over the run; temperature; operators, each at the best of three temperatures on
validation. m also for LapSum and the splitter network, from their own tuned values; the network's stops at 256.

**4. Where it stops paying** (completion, embeddings). softmax, gce and ``error:ksubset mix`` as tuned, on embeddings with the
best of half, once and twice the tuned rate on validation, over capacity, data, label noise and the length of the context.
With less data the epochs grow with the root of the ratio.

**5. One head for each k**: see ``heads.py``.

**6. The paper's claims with the bounded form**, from the runs above: a distribution over k beats a single k
({1: .5, K: .5} and 1..5 against {1} and {K}); pure top-K costs top-1; splitter networks match full sorting and beat NeuralSort
and SoftSort; SoftSort beats NeuralSort; m between 16 and n matters little; a large m helps with many classes.

Questions 2 to 4 and 6 are explored on three fresh seeds, 11 to 13: their p are for reading, and nothing is decided by them.

**Cut for time**, after the first four methods of the main table were seen on completion, items and embeddings, and before any
other run: the methods after the seventh are asked on the embeddings alone (and there all of them), but for SL@K on items;
question 3 is short on completion, question 4 has fewer levels there and keeps the tuned rates; pixels go without plain softmax;
the checks have fewer methods, seeds and points of tuning. The error loss with LapSum came to pixels when it was the best by the
mean of both on the other three sets. Holm is over what is left. When all of this had run but question 2 on items, the
glyphs and a context of 12, the temperature and m to all 2000 classes came back to completion; nothing of theirs had been seen.
Question 4's label noise is that of version 0.2.0: training labels alone, any other class, another draw for each seed.

**7. Wrong labels**, written down before any of their runs. The labels for training *and* validation are drawn once, the same
for tuning and all seeds; those of the test are right. :data:`NOISY`: the embeddings (linear, and a hidden layer) with 40 % of
what people answered for CIFAR-100's classes (CIFAR-100N), and with 20 %, half of the mass off the diagonal; completion with 20
and 40 % of the tokens drawn from what a first softmax model, trained on right labels, answers for tokens of that class that it
has not seen; pixels with 40 %, without a schedule that ends in time: long enough to learn the wrong labels by heart. Methods:
softmax, whose smoothing goes up to .4; gce; the error losses with LapSum, mix and pure, at 40 % also with KSubset; the paper's.
Tuned, trained and tested as in the main table, with the same number of tries for each, but on one seed of the tuning where the
embeddings' linear layer has three; Holm over the methods and both k of a set. As a check, the tuned methods without the paper's
on a second draw of labels (40 %, not pixels; completion: LapSum alone).

**The rule for wrong labels**, over the six sets without pixels, which have three methods and are a check. A loss *helps* if on
at least four sets it gains top-1 or top-K over softmax with p < .01 after Holm, and on no set loses one of them so surely. The
line that README shows for wrong labels is what helps and has the best mean of both over the six sets. If that is gce, README
says that being bounded is what helps, and not k; if a loss that knows k helps and is best, but not surely better than gce on
any set (p < .01 after Holm over both k), README says so, too; if nothing helps, it says that label smoothing is what to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from anyk.lab.comparison import tuning
from anyk.lab.comparison.tuning import Axis
from anyk.lab.run.config import Config

Changes = tuple[tuple[str, Any], ...]

SEEDS = tuple(range(1, 11))
FRESH = (11, 12, 13)
#: the seed of what is chosen on validation
CHOOSING = 0
#: the k that contrasts are kept of
KS = (1, 3, 5, 10, 20)
DECIDE = ("completion", "items", "pixels", "embeddings")
BASE = "error:ksubset mix"
CONTROLS = ("softmax", "gce", "plain")


# Methods -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A row of the main table: a loss, and what is tuned of it beside the learning rate."""

    name: str
    loss: str
    p_k: str = "mix"
    """mix: half of it on 1 and half on K; pure: all on K"""
    hyperparameters: tuple[str, ...] = ()
    spends: bool = True
    """whether it goes on until it had as many tries as the others"""


SMOOTHING = (0.0, 0.05, 0.1, 0.2)
#: with wrong labels
MORE_SMOOTHING = (*SMOOTHING, 0.4)
#: of the cross-entropy
SMOOTHED = (0.0, 0.1)
VALUES: Mapping[str, tuple[float, ...]] = {"q": (0.25, 0.5, 0.75, 1.0), "ce_weight": (0.1, 0.2, 0.5, 0.8)}


def _methods() -> Iterator[Method]:
    """In the order in which they are made."""

    def error(operator: str, p_k: str) -> Method:
        return Method(f"error:{operator} {p_k}", f"error:{operator}", p_k, ("ce_weight", "label_smoothing"))

    def paper(operator: str, p_k: str) -> Method:
        return Method(f"{operator} {p_k}", operator, p_k, ("temperature",))

    yield Method("softmax", "softmax", hyperparameters=("label_smoothing",))
    yield Method("gce", "gce", hyperparameters=("q", "label_smoothing"))
    yield error("ksubset", "mix")
    yield paper("splitter", "mix")
    yield Method("plain", "softmax", spends=False)
    yield error("lapsum", "mix")
    yield error("ksubset", "pure")
    yield error("splitter", "mix")
    yield Method("softmax_at_k", "softmax_at_k", "pure", ("temperature",))
    yield paper("ksubset", "mix")
    yield paper("lapsum", "mix")
    yield error("lapsum", "pure")
    yield error("splitter", "pure")
    yield Method("smooth", "smooth", "pure", ("temperature",))
    yield paper("splitter", "pure")
    yield paper("ksubset", "pure")
    yield paper("lapsum", "pure")


METHODS: Mapping[str, Method] = {method.name: method for method in _methods()}
ALL = tuple(name for name in METHODS if name != "softmax_at_k")
FIRST_THREE, FIRST_FOUR, FIRST_SEVEN = tuple(METHODS)[:3], tuple(METHODS)[:4], tuple(METHODS)[:7]


def weights(p_k: Mapping[int, float]) -> tuple[float, ...]:
    """P_K as a config has it.

    >>> weights({1: 0.5, 3: 0.5})
    (0.5, 0.0, 0.5)
    """
    return tuple(p_k.get(k, 0.0) for k in range(1, max(p_k) + 1))


def p_k(word: str, k: int) -> tuple[float, ...]:
    return weights({1: 0.5, k: 0.5} if word == "mix" else {k: 1.0})


# Sets ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Set:
    """Data, and how all methods train on them.

    ``fields`` are those of the shared config. The config is made when it is asked for: a field that this version of the lab
    does not have is an error then, and of this set alone.
    """

    name: str
    title: str
    fields: Mapping[str, Any]
    place: str = "{}"
    """the word for the data, around what the command line says where it has braces"""
    k: int = 5
    methods: tuple[str, ...] = ALL
    seeds: tuple[int, ...] = SEEDS
    budget: int = 10
    """points of the tuning at full length, for each method"""
    tuning_seeds: int = 3
    wrong: float = 0.0
    """the share of wrong labels, for training and validation"""

    @property
    def config(self) -> Config:
        """What all runs share. Its data are the name of the set: no path of a machine gets into a summary."""
        shared = {"ks": (1, self.k), "p_k": p_k("mix", self.k), "measure": (3,), "label_smoothing": 0.0, "ce_weight": 0.2}
        return Config.from_json({**shared, **self.fields, "data": self.name, "loss": "softmax"}, f"the set {self.name}")

    @property
    def ks(self) -> tuple[int, int]:
        """The two k that are looked at."""
        return 1, self.k

    @property
    def metrics(self) -> tuple[str, str]:
        """The accuracies at these k."""
        return "top1", f"top{self.k}"

    def start(self, method: str) -> Config:
        """Where the tuning of a method begins."""
        found = METHODS[method]
        # SL@K gives up every target where its temperature is small against the logarithm of the number of classes.
        temperature = 16.0 if method == "softmax_at_k" else 1.0
        return self.config.replace(loss=found.loss, p_k=p_k(found.p_k, self.k), temperature=temperature)

    def axes(self, method: str) -> list[Axis]:
        """What is tuned of a method."""
        start = self.start(method)
        axes = [tuning.learning_rates(start.learning_rate)]
        for hyperparameter in METHODS[method].hyperparameters:
            if hyperparameter == "temperature":
                axes.append(tuning.geometric(hyperparameter, start.temperature, base=2, places=2, powers=8, steps=(4, 2)))
            elif hyperparameter == "label_smoothing":
                values = SMOOTHED if start.loss != "softmax" else MORE_SMOOTHING if self.wrong else SMOOTHING
                axes.append(tuning.listed(hyperparameter, 0.0, values))
            else:
                axes.append(tuning.listed(hyperparameter, getattr(start, hyperparameter), VALUES[hyperparameter]))
        return axes

    def rehearsed(self) -> Set:
        """A small copy, to see that all of it runs."""
        return replace(self, fields={**self.fields, "epochs": 1}, budget=2, tuning_seeds=1, seeds=self.seeds[:3])


# As they are: these features are principal components, and softmax itself has 1.2 points less with all of them of one size.
_FEATURES = {
    **{"batch_size": 500, "epochs": 15, "learning_rate": 1e-3, "schedule": "cosine", "augment": ()},
    "standardize": False,
}
_SETS = (
    Set(
        "completion",
        "code completion, 2000 tokens",
        {
            **{"model": "context", "context": 6, "embedding": 48, "hidden": 96, "dropout": 0.2},
            **{"train_fraction": 0.2, "epochs": 4, "batch_size": 500, "learning_rate": 6e-3},
        },
        place="completion:2000",
        methods=FIRST_SEVEN,
        budget=8,
    ),
    Set(
        "items",
        "next film, 3416",
        {
            **{"model": "context", "context": 6, "embedding": 32, "hidden": 32, "dropout": 0.1},
            **{"train_fraction": 0.25, "epochs": 4, "batch_size": 500, "learning_rate": 1e-2},
        },
        place="sequences:{}",
        k=10,
        methods=(*FIRST_SEVEN, "softmax_at_k"),
        budget=8,
    ),
    Set(
        "pixels",
        "CIFAR-100 at 16 px, from scratch",
        {
            **{"model": "cnn", "width": 48, "augment": ("crop", "flip"), "schedule": "onecycle"},
            **{"epochs": 10, "train_fraction": 0.5, "batch_size": 100, "learning_rate": 4e-3},
        },
        methods=(*FIRST_FOUR, "error:lapsum mix"),
        seeds=SEEDS[:5],
        budget=4,
        tuning_seeds=1,
    ),
    Set(
        "embeddings",
        "CIFAR-100 embeddings, linear",
        {**_FEATURES, "model": "linear", "hidden": 512, "dropout": 0.0},
    ),
    Set(
        "embeddings-mlp",
        "CIFAR-100 embeddings, a hidden layer of 512",
        {**_FEATURES, "model": "mlp", "hidden": 512, "dropout": 0.2},
        methods=(*FIRST_THREE, "error:ksubset pure"),
        seeds=SEEDS[:5],
        budget=5,
        tuning_seeds=1,
    ),
    Set(
        "glyphs",
        "glyphs of 200 characters, from scratch",
        {
            **{"model": "cnn", "m": None, "epochs": 16, "batch_size": 100, "learning_rate": 4e-3},
            **{"schedule": "onecycle", "augment": ("affine",), "validation": 0.2, "hidden": 512, "dropout": 0.0},
        },
        place="glyphs:200",
        methods=FIRST_THREE,
        seeds=SEEDS[:3],
        budget=4,
        tuning_seeds=1,
    ),
)
SETS: Mapping[str, Set] = {each.name: each for each in _SETS}


def _noisy() -> Iterator[Set]:
    """The sets of question 7, named by the set that they are made of and the percentage that is wrong."""
    lapsum = ("softmax", "gce", "error:lapsum mix", "error:lapsum pure", "splitter mix")
    both = (*lapsum[:4], "error:ksubset mix", "error:ksubset pure", "splitter mix")
    budgets = {"embeddings": 10, "embeddings-mlp": 8, "completion": 8}
    for wrong, methods in ((0.4, both), (0.2, lapsum)):
        for name, budget in budgets.items():
            each = SETS[name]
            called, title = f"{name}-wrong{100 * wrong:.0f}", f"{each.title}, {100 * wrong:.0f} % wrong labels"
            changes = {"methods": methods, "seeds": SEEDS, "budget": budget, "tuning_seeds": 3 if name == "embeddings" else 1}
            yield replace(each, name=called, title=title, wrong=wrong, **changes)
    long = {"epochs": 30, "schedule": "constant", "augment": ("flip",), "learning_rate": 1e-3}
    pixels = SETS["pixels"]
    yield replace(
        pixels,
        **{"name": "pixels-wrong40", "title": f"{pixels.title}, 40 % wrong labels", "wrong": 0.4},
        **{"fields": {**pixels.fields, **long}, "methods": ("softmax", "gce", "error:lapsum mix")},
    )


NOISY: Mapping[str, Set] = {each.name: each for each in _noisy()}
EVERY: Mapping[str, Set] = {**SETS, **NOISY}


# Questions -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A row of a question: a tuned method of the main table with some fields changed, over a few seeds.

    Of ``choices``, each a few more changes, the best on validation is taken.
    """

    question: str
    set: str
    name: str
    method: str = BASE
    changes: Changes = ()
    choices: tuple[Changes, ...] = ()
    seeds: tuple[int, ...] = FRESH

    @property
    def id(self) -> str:
        """What its runs are for, in the summaries."""
        return f"{self.question}: {self.name}"

    def config(self, tuned: Config, choice: Changes = ()) -> Config:
        """The run of a tuned config with the changes."""
        return changed(tuned, (*self.changes, *choice))


def changed(tuned: Config, changes: Changes) -> Config:
    """The config with some fields changed. ``rate`` is a factor of the learning rate; without cross-entropy there is no label
    smoothing."""
    fields = dict(changes)
    if "rate" in fields:
        fields["learning_rate"] = float(f"{tuned.learning_rate * fields.pop('rate'):.4g}")
    if fields.get("ce_weight") == 0:
        fields["label_smoothing"] = 0.0
    return tuned.replace(**fields)


def _fields(**changes: Any) -> Changes:
    return tuple(changes.items())


def _controls(question: str, each: str) -> list[Cell]:
    return [Cell(question, each, name, name) for name in ("softmax", "gce")]


P_KS: Mapping[str, tuple[float, ...]] = {
    **{f"{{{k}}}": weights({k: 1.0}) for k in KS},
    "{1: .5, 5: .5}": weights({1: 0.5, 5: 0.5}),
    "{1: .5, 10: .5}": weights({1: 0.5, 10: 0.5}),
    "1..5": (0.2,) * 5,
}


def _q2(each: str) -> list[Cell]:
    return _controls("q2", each) + [Cell("q2", each, name, changes=_fields(p_k=p_k)) for name, p_k in P_KS.items()]


@dataclass(frozen=True)
class Varied:
    """The values that question 3 tries on a set. ``sizes`` is m, by operator; "auto" is 64 there."""

    q: tuple[float, ...]
    ce_weight: tuple[float, ...]
    falling: tuple[tuple[float, float], ...]
    temperature: tuple[float, ...]
    sizes: Mapping[str, tuple[int | str | None, ...]]
    operators: tuple[str, ...] = ()


VARIED: Mapping[str, Varied] = {
    "completion": Varied(
        q=(0.0, 0.5, 1.0),
        ce_weight=(0.0, 0.2, 0.5),
        falling=((1.0, 0.0),),
        temperature=(0.5, 1.0, 2.0),
        sizes={"ksubset": (5, 16, "auto", 256, None), "lapsum": (16, "auto", 256, None)},
    ),
    "embeddings": Varied(
        q=(0.0, 0.25, 0.5, 0.75, 1.0),
        ce_weight=(0.0, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0),
        falling=((1.0, 0.0), (0.5, 0.0), (1.0, 0.2)),
        temperature=(0.25, 0.5, 1.0, 2.0, 4.0),
        sizes=dict.fromkeys(("ksubset", "lapsum", "splitter"), (5, 16, "auto", None)),
        operators=("ksubset", "lapsum", "splitter", "bitonic", "neuralsort", "softsort", "sinkhorn"),
    ),
}
OPERATOR_TEMPERATURES = (1.0, 4.0, 16.0)


def _q3(each: str) -> list[Cell]:
    varied = VARIED[each]
    cells = [Cell("q3", each, "tuned"), *_controls("q3", each)]
    for name in ("q", "ce_weight", "temperature"):
        cells += [Cell("q3", each, f"{name} {value:g}", changes=((name, value),)) for value in getattr(varied, name)]
    cells += [
        Cell("q3", each, f"ce_weight {start:g} to {end:g}", changes=_fields(ce_weight=start, ce_weight_end=end))
        for start, end in varied.falling
    ]
    for operator, sizes in varied.sizes.items():
        for m in sizes:
            size = {"auto": "64", None: "all"}.get(m, str(m))
            cells.append(Cell("q3", each, f"{operator}, m {size}", f"error:{operator} mix", _fields(m=m)))
    warm = tuple(_fields(temperature=value) for value in OPERATOR_TEMPERATURES)
    for operator in varied.operators:
        anchors = {"anchors": "topk"} if operator == "sinkhorn" else {}
        changes = _fields(loss=f"error:{operator}", **anchors)
        cells.append(Cell("q3", each, f"operator {operator}", changes=changes, choices=warm))
    return cells


RATES = (1.0, 0.5, 2.0)
COMPARED = ("softmax", "gce", BASE)
Levels = Mapping[str, Mapping[str, Changes]]


def levels(each: str) -> Levels:
    """What question 4 varies: by dimension, then by level."""
    fields = SETS[each].fields
    whole, epochs = fields.get("train_fraction", 1.0), fields["epochs"]
    shares = (0.0, 0.2, 0.4) if each == "embeddings" else (0.0, 0.4)
    data = {f"{whole / ratio:g}": _fields(train_fraction=whole / ratio, epochs=round(epochs * ratio**0.5)) for ratio in (16, 4)}
    found = {
        "data": {**data, f"{whole:g}": ()},
        "noise": {f"{noise:g}": _fields(label_noise=noise) if noise else () for noise in shares},
    }
    if each == "embeddings":
        sizes = {str(hidden): _fields(model="mlp", hidden=hidden, dropout=0.2) for hidden in (16, 64, 512)}
        return {"capacity": {**sizes, "linear": ()}, **found}
    sizes = {str(hidden): _fields(hidden=hidden, embedding=max(hidden // 2, 8)) for hidden in (16, 256)}
    lengths = {str(length): _fields(context=length) if length != fields["context"] else () for length in (1, 6, 12)}
    return {
        "capacity": dict(sorted({**sizes, str(fields["hidden"]): ()}.items(), key=lambda item: int(item[0]))),
        **found,
        "context": lengths,
    }


def _q4(each: str) -> list[Cell]:
    rates = tuple(_fields(rate=rate) for rate in RATES) if each == "embeddings" else ()
    return [
        Cell("q4", each, f"{dimension} {level}, {method}", method, changes, rates)
        for dimension, found in levels(each).items()
        for level, changes in found.items()
        for method in COMPARED
    ]


def _q7(each: str) -> list[Cell]:
    methods = EVERY[each].methods if not each.startswith("completion") else EVERY[each].methods[:4]
    return [Cell("q7", each, name, name, _fields(noise_seed=1), seeds=SEEDS) for name in methods if name != "splitter mix"]


QUESTIONS: Mapping[str, tuple[tuple[str, ...], Callable[[str], list[Cell]]]] = {
    "q2": (("completion", "items"), _q2),
    "q3": (("completion", "embeddings"), _q3),
    "q4": (("completion", "embeddings"), _q4),
    "q7": (("embeddings-wrong40", "embeddings-mlp-wrong40", "completion-wrong40"), _q7),
}
PARTS = ("main", *QUESTIONS)
#: the sets of question 5
HEADS = ("completion", "embeddings-mlp")


def cells(question: str, each: str) -> list[Cell]:
    """The rows of a question on a set; none where it is not asked there."""
    sets, make = QUESTIONS[question]
    return make(each) if each in sets else []


def pairs(question: str, each: str) -> list[tuple[str, str]]:
    """Which rows are compared with which, by what their runs are for."""
    found = [cell.id for cell in cells(question, each)] if question in QUESTIONS else []
    if question == "main":
        names = EVERY[each].methods
        against = [(name, other) for other in CONTROLS for name in names if other in names and name != other]
        mixed = [(f"{name} pure", f"{name} mix") for name in OPERATOR_NAMES if f"{name} pure" in names]
        return [(f"main: {name}", f"main: {other}") for name, other in (*against, *mixed)]
    if question == "q2":
        against = ["q2: softmax", "q2: gce", "q2: {1}", f"q2: {{{EVERY[each].k}}}"]
        return [(name, other) for other in against for name in found if name != other and found]
    if question == "q3":
        usual = [(name, "q3: tuned") for name in found if ", m " not in name and name != "q3: tuned"]
        sizes = [(name, f"{name.partition(', m ')[0]}, m 64") for name in found if ", m " in name and not name.endswith(" 64")]
        sorts = [("splitter", "bitonic"), ("splitter", "neuralsort"), ("splitter", "softsort"), ("softsort", "neuralsort")]
        pairs = [(f"q3: operator {one}", f"q3: operator {other}") for one, other in sorts]
        return usual + sizes + [pair for pair in pairs if set(pair) <= set(found)]
    if question == "q7":
        return [(name, f"q7: {other}") for other in ("softmax", "gce") for name in found if name != f"q7: {other}"]
    return [
        (name, f"{name.rpartition(', ')[0]}, {other}")
        for other in COMPARED[:2]
        for name in found
        if not name.endswith(f", {other}") and not name.endswith(", softmax")
    ]


OPERATOR_NAMES = ("error:ksubset", "error:lapsum", "error:splitter", "ksubset", "lapsum", "splitter")
