"""Imbalanced classes: the losses beside logit-adjusted softmax and the noised top-k hinge, on a long-tailed cut.

    pip install pytopk==0.1.0                                             # for this study alone
    python evidence/imbalance.py run --data FOLDER --runs RUNS.jsonl      # FOLDER: embeddings of CIFAR-100
    python evidence/imbalance.py page                                     # writes the tables of docs/imbalance.md

What is asked, written down before the runs:

1. Does TopKErrorLoss({1: .5, 5: .5}), plain, with class weights or with a P_K for each class, have more top-5 than
   logit-adjusted softmax, the method to beat, and what does it cost in top-1?
2. Does it gain when its own scores are adjusted in the same way?
3. Does the balanced noised top-k hinge (k = 5), or its form for imbalanced classes, have more top-5 than that?
4. What happens to the classes with few examples?

Added when the first tuning runs of the imbalanced hinge were seen, which is the one with features and weights of length 1:

5. Is it that layer? The two adjusted losses with it, tau = 1, the scale of the scores as their hyperparameter.

Added when all of these were done, because the default operator of TopKErrorLoss had become LapSum; it was KSubset, which the
other rows have:

6. Is it the same with LapSum? The two adjusted rows again.

How: the cut is the usual one. Of class c = 0 … 99, in the order of the class list, there are int(500 * 100^(-c/99))
training examples: 500 of the first, 5 of the last, 10,847 in all. A linear layer on standardised features, trained as the
lab does by default (Adam, batches of 500, 20 epochs, cosine schedule), the model of the last step. Each method has its
learning rate and one hyperparameter tuned, on two seeds, by the mean of top-1 and top-5 on a validation part: the rate, then
the hyperparameter, then again until neither moves; where the best rate is at an end of its grid, the grid goes on. For
tuning, 50 training examples of each class are set aside first (the validation part, balanced), and
the cut is made of the other 450 in
the same way. Then each method is trained with what was found on five fresh seeds. A seed draws the examples of the cut, the
first weights and the order; methods share seeds, and differences are paired by them.

The test part is balanced, so micro and macro averages agree. "As frequent" is the average with the classes as frequent as in
training: what a micro average would be on a test that is as imbalanced. Many, medium, few: classes with more than 100 training
examples, 20 to 100, fewer than 20 (35, 35 and 30 classes).

A difference to logit-adjusted softmax counts as found at p < .05 of the paired t-test after Holm over the first table, as
questions 1 to 4 have it. The rows that were added are a family of their own: looking further must not change what was asked
first. It would: over all rows together the top-1 of question 2 has p = .07 instead of .047. What was not asked before has no
test: the pairs of the two losses have their intervals alone.
It is what other seeds and other cuts would show; that the test examples are a sample too is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import anyk
from anyk.lab import statistics
from anyk.lab.data import load
from anyk.p_k import Distribution

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "evidence" / "summaries" / "imbalance.json"
PAGE = ROOT / "docs" / "imbalance.md"

RATIO, HEAD, VALIDATION = 100, 500, 50
EPOCHS, BATCH = 20, 500
RATES = (-3.5, -3.0, -2.5, -2.0)
"""decimal exponents of the learning rates"""
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
P_K = {1: 0.5, 5: 0.5}
BASE = "adjusted"
GROUPS = ("many", "medium", "few")
ADDED = ("adjusted_cosine", "error_adjusted_cosine", "lapsum_adjusted", "lapsum_adjusted_cosine")
"""the methods of questions 5 and 6"""
STEPS = ("softmax", "adjusted", "adjusted_cosine", "lapsum_adjusted_cosine")
"""one thing more at a time, the default of TopKErrorLoss last"""
PAIRS = {
    "nothing": ("error", "softmax"),
    "class weights": ("error_weighted", "weighted"),
    "logit adjustment": ("error_adjusted", "adjusted"),
    "logit adjustment, LapSum": ("lapsum_adjusted", "adjusted"),
    "logit adjustment, length 1": ("error_adjusted_cosine", "adjusted_cosine"),
    "logit adjustment, length 1, LapSum": ("lapsum_adjusted_cosine", "adjusted_cosine"),
}
"""what is done about the imbalance -> TopKErrorLoss and softmax with it"""

Loss = Callable[[Tensor, Tensor], Tensor]


# The methods ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    title: str
    hyperparameter: str
    values: tuple[float, ...]
    make: Callable[[Tensor, float], Loss]
    """the loss for the numbers of training examples of the classes and a value of the hyperparameter"""
    cosine: bool = False
    """whether features and weights have length 1 in the linear layer"""


def adjusted(loss: Loss, counts: Tensor, tau: float) -> Loss:
    """A loss of scores to which tau times the log of the class frequencies is added, in training alone (Menon et al. 2021)."""
    shift = tau * (counts / counts.sum()).log()
    return lambda scores, target: loss(scores + shift, target)


def weights(counts: Tensor, power: float) -> Tensor:
    """One over a power of the number of examples, 1 in the mean over the examples.

    >>> weights(torch.tensor([4.0, 1.0]), 0.5)
    tensor([0.8333, 1.6667])
    """
    weight = counts**-power
    return weight * counts.sum() / (weight * counts).sum()


def per_class(counts: Tensor, tail: float) -> Tensor:
    """P_K for each class: the share of top-1 goes from 1 - tail (most examples) to tail (fewest), with the log of their number;
    the rest is for top-5.

    >>> per_class(torch.tensor([100.0, 10.0, 1.0]), 0.0)[:, [0, 4]].T
    tensor([[1.0000, 0.5000, 0.0000],
            [0.0000, 0.5000, 1.0000]])
    """
    rare = (counts.max().log() - counts.log()) / (counts.max() / counts.min()).log()
    p_k = torch.zeros(len(counts), 5)
    p_k[:, 0] = 1 - tail + (2 * tail - 1) * rare
    p_k[:, 4] = 1 - p_k[:, 0]
    return p_k


def scaled(loss: Loss, scale: float) -> Loss:
    """A loss of scores between -1 and 1, made larger."""
    return lambda scores, target: loss(scale * scores, target)


def noised(counts: Tensor, epsilon: float) -> Loss:
    from pytopk import BalNoisedTopK

    return BalNoisedTopK(k=5, epsilon=epsilon)


def noised_imbalanced(counts: Tensor, margin: float) -> Loss:
    from pytopk import ImbalNoisedTopK

    return ImbalNoisedTopK(k=5, epsilon=0.1, max_m=margin, cls_num_list=counts.tolist())


def error(p_k: Distribution, operator: str = "ksubset", **settings: Any) -> Loss:
    """The bounded loss, with the operator that was the default at the time of the first runs."""
    return anyk.TopKErrorLoss(p_k, operator, **settings)


SCALES = (8.0, 16.0, 32.0, 64.0)
POWERS, TAUS = (0.25, 0.5, 0.75, 1.0), (0.5, 1.0, 1.5, 2.0)
METHODS = {
    "softmax": Method(
        "softmax", "label smoothing", (0.0, 0.05, 0.1, 0.2), lambda n, value: nn.CrossEntropyLoss(label_smoothing=value)
    ),
    "weighted": Method("softmax, weight 1/n^p", "p", POWERS, lambda n, value: nn.CrossEntropyLoss(weight=weights(n, value))),
    "adjusted": Method("logit-adjusted softmax", "tau", TAUS, lambda n, value: adjusted(nn.CrossEntropyLoss(), n, value)),
    "noised": Method("balanced noised top-5 hinge", "epsilon", (0.1, 0.3, 1.0, 3.0), noised),
    "noised_imbalanced": Method(
        "imbalanced noised top-5 hinge, length 1", "largest margin", (0.1, 0.2, 0.3, 0.5), noised_imbalanced, cosine=True
    ),
    "error": Method("TopKErrorLoss", "guide", (0.1, 0.2, 0.5, 0.8), lambda n, value: error(P_K, guide=value)),
    "error_weighted": Method("TopKErrorLoss, weight 1/n^p", "p", POWERS, lambda n, value: error(P_K, weight=weights(n, value))),
    "error_per_class": Method(
        "TopKErrorLoss, P_K per class",
        "top-1 share of the rarest",
        (0.0, 0.25, 0.75, 1.0),
        lambda n, value: error(per_class(n, value)),
    ),
    "error_adjusted": Method("TopKErrorLoss, logit-adjusted", "tau", TAUS, lambda n, value: adjusted(error(P_K), n, value)),
    "adjusted_cosine": Method(
        "logit-adjusted softmax, length 1",
        "scale",
        SCALES,
        lambda n, value: scaled(adjusted(nn.CrossEntropyLoss(), n, 1.0), value),
        cosine=True,
    ),
    "error_adjusted_cosine": Method(
        "TopKErrorLoss, logit-adjusted, length 1",
        "scale",
        SCALES,
        lambda n, value: scaled(adjusted(error(P_K), n, 1.0), value),
        cosine=True,
    ),
    "lapsum_adjusted": Method(
        "TopKErrorLoss with LapSum, logit-adjusted", "tau", TAUS, lambda n, value: adjusted(error(P_K, "lapsum"), n, value)
    ),
    "lapsum_adjusted_cosine": Method(
        "TopKErrorLoss with LapSum, logit-adjusted, length 1",
        "scale",
        SCALES,
        lambda n, value: scaled(adjusted(error(P_K, "lapsum"), n, 1.0), value),
        cosine=True,
    ),
}


# One run -------------------------------------------------------------------------------------------------------------------


def long_tail(head: int, classes: int, ratio: float = RATIO) -> list[int]:
    """How many examples each class has in the cut.

    >>> counts = long_tail(500, 100)
    >>> counts[0], counts[-1], sum(counts)
    (500, 5, 10847)
    """
    return [int(head * ratio ** (-c / (classes - 1))) for c in range(classes)]


def cut(labels: Tensor, seed: int, validation: int = 0) -> tuple[Tensor, Tensor]:
    """Positions of the training examples of a seed's cut, and of the examples set aside for validation, the same number of each
    class."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(labels.max()) + 1
    members = [torch.where(labels == c)[0] for c in range(classes)]
    shuffled = [each[torch.randperm(len(each), generator=generator)] for each in members]
    counts = long_tail(min(map(len, members)) - validation, classes)
    kept = [each[validation : validation + count] for each, count in zip(shuffled, counts, strict=True)]
    return torch.cat(kept), torch.cat([each[:validation] for each in shuffled])


@dataclass(frozen=True)
class Examples:
    features: Tensor
    labels: Tensor

    def at(self, index: Tensor) -> Examples:
        return Examples(self.features[index], self.labels[index])


def trained(method: Method, value: float, rate: float, seed: int, train: Examples) -> Callable[[Tensor], Tensor]:
    """Train a linear layer; the function from features to scores."""
    torch.manual_seed(seed)
    mean, std = train.features.mean(0), train.features.std(0)

    def prepared(features: Tensor) -> Tensor:
        features = (features - mean) / std
        return functional.normalize(features) if method.cosine else features

    counts = train.labels.bincount().float()
    layer = nn.Linear(train.features.shape[1], len(counts), bias=not method.cosine)
    loss = method.make(counts, value)
    optimizer = torch.optim.Adam(layer.parameters(), rate)
    batches = math.ceil(len(train.labels) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * batches)

    def scores(inputs: Tensor) -> Tensor:
        return functional.linear(inputs, functional.normalize(layer.weight)) if method.cosine else layer(inputs)

    inputs = prepared(train.features)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(inputs)).chunk(batches):
            optimizer.zero_grad()
            loss(scores(inputs[index]), train.labels[index]).backward()
            optimizer.step()
            schedule.step()
    return torch.no_grad()(lambda features: scores(prepared(features)))


def accuracies(scores: Tensor, labels: Tensor, counts: Tensor) -> dict[str, float]:
    """Top-1 and top-5: micro and macro, of the classes with many, medium and few of the ``counts`` training examples, and with
    the classes as frequent as in training."""
    examples = labels.bincount(minlength=len(counts))
    ranks = anyk.target_ranks(scores, labels)
    members = {"many": counts > 100, "medium": (counts >= 20) & (counts <= 100), "few": counts < 20}
    found = {}
    for k in (1, 5):
        of_class = labels[ranks <= k].bincount(minlength=len(counts)).double() / examples
        found[f"top{k}"] = float(anyk.topk_accuracy(scores, labels, (k,))[k])
        found[f"macro_top{k}"] = float(anyk.topk_accuracy(scores, labels, (k,), average="macro")[k])
        found |= {f"{group}_top{k}": float(of_class[where].mean()) for group, where in members.items() if where.any()}
        found[f"frequent_top{k}"] = float((of_class * counts).sum() / counts.sum())
    return found


# All runs ------------------------------------------------------------------------------------------------------------------


class Runs:
    """Results by (method, exponent of the rate, hyperparameter, seed, part), kept in a file of lines as they come."""

    def __init__(self, file: Path, train: Examples, test: Examples) -> None:
        self.file, self.train, self.test = file, train, test
        lines = file.read_text().splitlines() if file.exists() else []
        self.known = {tuple(key): result for key, result in map(json.loads, lines)}

    def __call__(self, name: str, exponent: float, value: float, seed: int, tuning: bool) -> dict[str, float]:
        key = (name, exponent, value, seed, "validation" if tuning else "test")
        if key not in self.known:
            index, aside = cut(self.train.labels, seed, VALIDATION if tuning else 0)
            own = self.train.at(index)
            scores = trained(METHODS[name], value, 10**exponent, seed, own)
            shown = self.train.at(aside) if tuning else self.test
            result = accuracies(scores(shown.features), shown.labels, own.labels.bincount())
            self.known[key] = {metric: round(number, 6) for metric, number in result.items()}
            with self.file.open("a") as file:
                file.write(json.dumps([key, self.known[key]]) + "\n")
            print(*key, *(f"{100 * result[metric]:.2f}" for metric in ("top1", "top5", "few_top5")), flush=True)
        return self.known[key]


def tune(name: str, run: Callable[..., dict[str, float]]) -> dict[str, Any]:
    """The best rate and hyperparameter on the validation part, one at a time until neither moves.
    The hyperparameter begins at its second value."""
    exponents, values = list(RATES), METHODS[name].values
    found: dict[tuple[float, float], float] = {}

    def best(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
        points = list(points)
        for point in points:
            if point not in found:
                results = [run(name, *point, seed, tuning=True) for seed in TUNING_SEEDS]
                found[point] = statistics.mean([(result["top1"] + result["top5"]) / 2 for result in results])
        return max(points, key=lambda point: found[point])

    exponent, value = math.nan, values[1]
    while True:
        before = exponent, value
        exponent, _ = best((each, value) for each in exponents)
        if exponent == exponents[0]:
            exponents.insert(0, exponent - 0.5)
        elif exponent == exponents[-1]:
            exponents.append(exponent + 0.5)
        else:
            _, value = best((exponent, each) for each in values)
            if (exponent, value) == before:
                break
    return {"exponent": exponent, "hyperparameter": value, "validation": round(found[exponent, value], 5), "tries": len(found)}


def run_all(place: str, file: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    dataset = load(place)
    parts = [Examples(torch.cat(list(part.parts)).float(), part.labels) for part in (dataset.train, dataset.test)]
    runs = Runs(file, *parts)
    methods = {}
    for name in METHODS:
        best = tune(name, runs)
        results = [runs(name, best["exponent"], best["hyperparameter"], seed, tuning=False) for seed in SEEDS]
        metrics = {metric: [round(result[metric], 5) for result in results] for metric in results[0]}
        methods[name] = {"tuned": best, "test": metrics}
    return {"seeds": SEEDS, "methods": methods}


# The page ------------------------------------------------------------------------------------------------------------------


def steps(summary: Mapping[str, Any]) -> str:
    """What each step gives, on a balanced test and with the classes as frequent as in training."""
    methods = summary["methods"]
    rows = []
    for before, name in zip((None, *STEPS), STEPS, strict=False):
        row = [METHODS[name].title]
        for metric in ("top1", "top5", "frequent_top1", "frequent_top5"):
            mean = statistics.mean(methods[name]["test"][metric])
            gain = "" if before is None else f" ({points(mean - statistics.mean(methods[before]['test'][metric]))})"
            row.append(f"{100 * mean:.2f}{gain}")
        rows.append(row)
    titles = ["%", "top-1, macro", "top-5, macro", "top-1, frequent", "top-5, frequent"]
    return "\n".join(markdown(titles, rows))


def losses(summary: Mapping[str, Any]) -> str:
    """TopKErrorLoss to softmax, with the same done about the imbalance."""
    test = {name: method["test"] for name, method in summary["methods"].items()}
    rows = [
        [title, *(interval(statistics.paired(test[error][metric], test[softmax][metric])) for metric in ("top1", "top5"))]
        for title, (error, softmax) in PAIRS.items()
    ]
    return "\n".join(markdown(["both with", "top-1", "top-5"], rows))


def tables(summary: Mapping[str, Any]) -> str:
    """The tables of the page, in Markdown."""
    methods = summary["methods"]
    base = methods[BASE]["test"]
    names = [name for name in METHODS if name in methods]
    pairs = {
        (name, metric): statistics.paired(methods[name]["test"][metric], base[metric])
        for name in names
        if name != BASE
        for metric in ("top1", "top5")
    }
    corrected: dict[tuple[str, str], float | None] = {}
    for added in (False, True):
        family = [key for key in pairs if (key[0] in ADDED) == added]
        corrected |= zip(family, statistics.holm([pairs[key].p for key in family]), strict=True)

    def difference(name: str, metric: str) -> str:
        if name == BASE:
            return "–"
        p = corrected[name, metric]
        return interval(pairs[name, metric], bold=p is not None and p < statistics.SIGNIFICANT)

    first = [
        [METHODS[name].title]
        + [words for k in ("top1", "top5") for words in (spread(methods[name]["test"][k]), difference(name, k))]
        for name in names
    ]
    second = [
        [METHODS[name].title]
        + [both(methods[name]["test"], group) for group in (*GROUPS, "frequent")]
        + [tuned(name, methods[name])]
        for name in names
    ]
    titles = ("many", "medium", "few examples", "frequent", "tuned: learning rate, hyperparameter")
    return "\n".join(
        [
            *markdown(["", "top-1 %", "to logit-adjusted", "top-5 %", "to logit-adjusted"], first),
            "",
            f"Mean ± standard deviation of {len(summary['seeds'])} seeds; differences in points, on the same seeds, with their",
            "95 % interval; bold: p < .05 after Holm, over the rows that were planned and over the four that were added.",
            "The same by classes, top-1 | top-5:",
            "",
            *markdown(["", *titles], second),
        ]
    )


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = [":--", *["--:"] * (len(titles) - 1)]
    return [f"| {' | '.join(row)} |" for row in (titles, marks, *rows)]


def interval(pair: statistics.Paired, bold: bool = False) -> str:
    words = f"**{points(pair.difference)}**" if bold else points(pair.difference)
    return words if pair.low is None or pair.high is None else f"{words} ({points(pair.low)} to {points(pair.high)})"


def points(difference: float) -> str:
    """
    >>> points(-0.012)
    '−1.20'
    """
    return f"{100 * difference:+.2f}".replace("-", "−")


def spread(values: Sequence[float]) -> str:
    """
    >>> spread([0.5, 0.51])
    '50.50 ± 0.71'
    """
    return f"{100 * statistics.mean(values):.2f} ± {100 * (statistics.std(values) or 0):.2f}"


def both(test: Mapping[str, Sequence[float]], group: str) -> str:
    """Top-1 and top-5 of a group of classes."""
    return " \\| ".join(f"{100 * statistics.mean(test[f'{group}_top{k}']):.1f}" for k in (1, 5))


def tuned(name: str, method: Mapping[str, Any]) -> str:
    """The tuned values; a hyperparameter at the end of what was tried says so."""
    best, hyperparameter = method["tuned"], METHODS[name]
    end = ", the end of the grid" if best["hyperparameter"] in (hyperparameter.values[0], hyperparameter.values[-1]) else ""
    return f"{10 ** best['exponent']:.2g}, {hyperparameter.hyperparameter} {best['hyperparameter']:g}{end}"


def written(page: str, summary: Mapping[str, Any]) -> str:
    """The page with the tables of the summary."""
    for name, content in (("steps", steps), ("losses", losses), ("all", tables)):
        page = placed(page, name, content(summary))
    return page


def placed(page: str, name: str, content: str) -> str:
    """The page with the content between the marks of that name."""
    marks = rf"(<!-- imbalance: {name} -->\n).*?(\n<!-- end -->)"
    return re.sub(marks, lambda found: f"{found[1]}\n{content}\n{found[2]}", page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--data", default="", metavar="FOLDER")
    parser.add_argument("--runs", type=Path, default=Path("imbalance.jsonl"), help="what is done already, and what will be")
    arguments = parser.parse_args()
    if arguments.what == "run":
        SUMMARY.write_text(json.dumps(run_all(arguments.data, arguments.runs), indent=1) + "\n")
    else:
        PAGE.write_text(written(PAGE.read_text(), json.loads(SUMMARY.read_text())))


if __name__ == "__main__":
    main()
