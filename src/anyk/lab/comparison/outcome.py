"""A comparison of losses: the raw outcome of `anyk compare`, what follows from it, and how to say it.

The dataclasses hold what was measured and nothing derived from it; the functions below derive the rest.
"""

import base64
import dataclasses
import inspect
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyk
from anyk.lab import errors, files, statistics
from anyk.lab.errors import LabError
from anyk.lab.run.names import LOSSES
from anyk.lab.run.recipe import Recipe
from anyk.lab.statistics import SIGNIFICANT, Paired, holm, paired
from anyk.lab.tables import Column, Difference, Measured, Table, Value, metrics_of, p_text, points, title

BASELINE = "softmax"
ENOUGH_SEEDS = 3
#: what is tuned, in words
KNOBS = {"learning_rate": "learning rate", "temperature": "temperature"}


@dataclass(frozen=True)
class Try:
    """One point of the tuning grid. ``score`` is the validation metric tuned for; None where training diverged."""

    learning_rate: float
    temperature: float | str
    score: float | None
    validation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SeedRun:
    """One run of the tuned recipe. ``curve`` holds the lines of its metrics.jsonl."""

    seed: int
    test: Mapping[str, float]
    validation: Mapping[str, float]
    seconds: float
    folder: str = ""
    curve: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Method:
    """A loss with its tuned recipe, the tries that tuned it and one run for each seed."""

    name: str
    recipe: Recipe
    tries: tuple[Try, ...]
    runs: tuple[SeedRun, ...]


@dataclass(frozen=True)
class Guess:
    """A class that a model proposes."""

    name: str
    probability: float | None = None


@dataclass(frozen=True)
class Example:
    """A test example whose target moved into, or out of, the first five guesses. The guesses are best first."""

    index: int
    target: str
    moved: Literal["in", "out"]
    before: tuple[Guess, ...]
    """of the baseline"""
    after: tuple[Guess, ...]
    """of the method"""
    image: bytes | None = None
    """a PNG file"""


@dataclass(frozen=True)
class Moves:
    """How many test examples have their target in the first five guesses of one method only, of one seed; some of them."""

    method: str
    seed: int
    into: int
    out_of: int
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The raw outcome of `anyk compare`."""

    data: Mapping[str, Any]
    """name, kind, classes, train, validation, test, fingerprint: as in a run's result.json"""
    command: str
    """what to type to get the same again"""
    settings: Mapping[str, Any]
    """budget, seeds, metric (the validation metric tuned for), p_k, m, ...: shown as they are"""
    methods: tuple[Method, ...]
    """in the order of the report, the baseline (softmax) among them"""
    moves: Moves | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    """as in a run's environment.json"""
    failures: tuple[str, ...] = ()
    """runs that ended with an error, a sentence each"""


def metrics(comparison: Comparison) -> list[str]:
    """The test metrics that at least one run has, in the order of the report."""
    names = metrics_of(method.recipe for method in comparison.methods)
    return [name for name in names if any(name in run.test for method in comparison.methods for run in method.runs)]


def measured(method: Method, metric: str) -> Measured | None:
    """A test metric over the seeds, in fractions; None where no run has it."""
    values = tuple(run.test[metric] for run in method.runs if metric in run.test)
    return Measured(values) if values else None


def differences(comparison: Comparison) -> dict[tuple[str, str], Difference]:
    """Every other method against the baseline on the seeds that both have, for each (method, metric).

    The p are corrected by Holm's method over all of them: they are one family.
    """
    baseline = next((method for method in comparison.methods if method.name == BASELINE), None)
    if baseline is None:
        return {}
    found: dict[tuple[str, str], Paired] = {}
    for method in comparison.methods:
        for metric in metrics(comparison) if method is not baseline else ():
            base = {run.seed: run.test[metric] for run in baseline.runs if metric in run.test}
            own = {run.seed: run.test[metric] for run in method.runs if metric in run.test}
            seeds = sorted(base.keys() & own.keys())
            if seeds:
                found[method.name, metric] = paired([own[seed] for seed in seeds], [base[seed] for seed in seeds])
    corrected = holm([pair.p for pair in found.values()])
    return {key: Difference(pair, p) for (key, pair), p in zip(found.items(), corrected, strict=True)}


def best(comparison: Comparison) -> Method:
    """The method with the best mean, over the seeds, of the validation metric tuned for; the first one of equals.

    Validation and not test: the test must not choose what it is to judge.
    """
    ranked = sorted(comparison.methods, key=lambda method: method.name != BASELINE)
    return max(ranked, key=lambda method: _validation_score(comparison, method))


def _validation_score(comparison: Comparison, method: Method) -> float:
    metric = comparison.settings.get("metric", "mean")
    scores = [run.validation[metric] for run in method.runs if metric in run.validation]
    return statistics.mean(scores) if scores and all(map(math.isfinite, scores)) else -math.inf


def table(comparison: Comparison) -> Table:
    """The table of the report: accuracies, differences to the baseline, time."""
    names, found = metrics(comparison), differences(comparison)
    columns = [Column("method", "method", "field"), *(Column(name, title(name), "accuracy") for name in names)]
    columns += [Column(f"difference_{name}", f"Δ {title(name)}", "difference") for name in names if found]
    columns += [Column("seeds", "seeds", "count"), Column("seconds", "time", "seconds")]
    rows = []
    for method in comparison.methods:
        cells: list[Value] = [method.name, *(measured(method, name) for name in names)]
        cells += [found.get((method.name, name)) for name in names if found]
        times = tuple(run.seconds for run in method.runs)
        rows.append((*cells, len(method.runs), Measured(times) if times else None))
    return Table(tuple(columns), tuple(rows), tuple(notes(comparison)))


def notes(comparison: Comparison) -> list[str]:
    """How to read the table."""
    lines = ["Test accuracy, mean ± standard deviation over the seeds."]
    found = differences(comparison)
    tests = sum(difference.paired.p is not None for difference in found.values())
    if found:
        lines[0] += f" Δ is the difference to {BASELINE} on the same seeds, in percentage points."
    if tests:
        lines.append(
            "p is of a two-sided paired t-test, corrected by Holm's method; the family is every method and every metric of "
            f"this report, {tests} {'test' if tests == 1 else 'tests'}. Below {SIGNIFICANT} counts as significant."
        )
    return lines


def verdict(comparison: Comparison) -> list[str]:
    """What the comparison shows, in sentences; the first is the headline."""
    return [*_outcome(comparison), *_choice(comparison), *_warnings(comparison)]


def _outcome(comparison: Comparison) -> list[str]:
    others = [method for method in comparison.methods if method.name != BASELINE and method.runs]
    baseline = [method for method in comparison.methods if method.name == BASELINE and method.runs]
    if not baseline:
        return [f"There is no finished run of {BASELINE}, so there is nothing to measure the other methods against."]
    if not others:
        return [f"Only {BASELINE} has finished runs, so there is nothing to compare."]
    found = differences(comparison)
    pairs = {method.name: {m: d for (name, m), d in found.items() if name == method.name} for method in others}
    pairs = {name: own for name, own in pairs.items() if own}
    if not pairs:
        return [f"No method shares a seed and a metric with {BASELINE}, so there is nothing to compare."]
    seeds = {name: min(difference.paired.count for difference in own.values()) for name, own in pairs.items()}
    judged = {name: own for name, own in pairs.items() if seeds[name] >= ENOUGH_SEEDS}
    sentences = [
        _judged_sentence(name, own) if name in judged else _unjudged_sentence(name, own, seeds[name])
        for name, own in pairs.items()
    ]
    scope = f"Of the methods with at least {ENOUGH_SEEDS} seeds: " if 0 < len(judged) < len(pairs) else ""
    doubt = _doubt([method for method in (*baseline, *others) if method.name in (BASELINE, *judged)]) if judged else ""
    return [doubt + scope + _headline(judged, max(seeds.values())), *sentences]


def _doubt(methods: Iterable[Method]) -> str:
    """What the headline begins with where one of the methods that it judges might do better with more tuning."""
    unfinished = {method.name: borders for method in methods if (borders := _borders(method))}
    if not unfinished:
        return ""
    options = [f"--{name.replace('_', '-')}" for name in KNOBS if any(name in borders for borders in unfinished.values())]
    return (
        f"Not tuned to the end: {_join(unfinished)} {'was' if len(unfinished) == 1 else 'were'} best at the border of what was "
        f"tried; raise --budget, or start elsewhere with {' or '.join(options)}. So far: "
    )


def _headline(judged: Mapping[str, Mapping[str, Difference]], most_seeds: int) -> str:
    if most_seeds == 1:
        return "One seed cannot tell a gain from chance: raise --seeds."
    if not judged:
        return f"{most_seeds} seeds are too few to judge significance, so the differences may be chance: raise --seeds."
    gaining = {name: gains for name, own in judged.items() if (gains := _significant(own, 1))}
    losing = {name: losses for name, own in judged.items() if (losses := _significant(own, -1))}
    free = [f"{name} in {_join(map(title, gains))}" for name, gains in gaining.items() if name not in losing]
    if free:
        risks = [risk for name in gaining if name not in losing if (risk := _risk(name, judged[name]))]
        told = f" The intervals do not exclude that {_join(risks)}." if risks else ""
        return f"Better than {BASELINE} without a significant loss: {_join(free)}.{told}"
    if gaining:
        verbs = ("gains", "loses") if len(gaining) == 1 else ("gain", "lose")
        return f"A trade against {BASELINE}: {_join(gaining)} {verbs[0]} in one metric and {verbs[1]} in another."
    if losing:
        return f"Nothing beats {BASELINE}; it is significantly better than {_join(losing)}."
    return f"Nothing beats {BASELINE}: no difference in any metric is significant."


def _significant(own: Mapping[str, Difference], sign: int) -> list[str]:
    """The metrics with a significant gain (sign 1) or loss (sign -1)."""
    found = {metric: d for metric, d in own.items() if d.p is not None and d.p < SIGNIFICANT}
    return [metric for metric, difference in found.items() if sign * difference.paired.difference > 0]


def _risk(name: str, own: Mapping[str, Difference]) -> str:
    """The largest loss within the confidence intervals: few seeds show no significant loss of anything."""
    lows = {metric: difference.paired.low for metric, difference in own.items() if difference.paired.low is not None}
    metric = min(lows, key=lows.__getitem__, default=None)
    if metric is None or not points(lows[metric]).startswith("-"):
        return ""
    return f"{name} loses {points(lows[metric])[1:]} points of {title(metric)}"


def _unjudged_sentence(name: str, own: Mapping[str, Difference], seeds: int) -> str:
    """For too few seeds: what was seen, without judging it."""
    where = f"{name} against {BASELINE} on {seeds} {'seed' if seeds == 1 else 'seeds'}, not judged"
    if _tied(own):
        return f"{where}: the same test accuracy."
    return f"{where}: {_join(f'{title(metric)} {_points(difference)}' for metric, difference in own.items())} points."


def _judged_sentence(name: str, own: Mapping[str, Difference]) -> str:
    if _tied(own):
        return f"{name} and {BASELINE} are tied: the same mean test accuracy."

    def listed(chosen: Iterable[str]) -> str:
        return _join(f"{title(metric)} ({_points(own[metric])} points, {_test_text(own[metric])})" for metric in chosen)

    gains, losses = _significant(own, 1), _significant(own, -1)
    rest = [metric for metric in own if metric not in gains + losses]
    parts = [f"{verb} {listed(chosen)}" for verb, chosen in (("gains", gains), ("loses", losses)) if chosen]
    if not parts:
        return f"{name} does not differ significantly from {BASELINE}: {listed(rest)}."
    return f"{name} {' and '.join(parts)} against {BASELINE}{f'; not significant: {listed(rest)}' if rest else ''}."


def _tied(own: Mapping[str, Difference]) -> bool:
    return all(abs(difference.paired.difference) < 1e-9 for difference in own.values())


def _test_text(difference: Difference) -> str:
    return p_text(difference.p) if difference.p is not None else f"no test: {difference.paired.reason}"


def _points(difference: Difference) -> str:
    return points(difference.paired.difference).replace("-", "−")


def _choice(comparison: Comparison) -> list[str]:
    """Which method validation would choose."""
    finished = [method for method in comparison.methods if _validation_score(comparison, method) > -math.inf]
    if len(finished) < 2:
        return []
    metric = comparison.settings.get("metric", "mean")
    if metric == "mean":
        meaning = "the mean of top-1 and top-5" if comparison.data.get("classes", math.inf) > 5 else "top-1"
    else:
        meaning = title(metric)
    top = _validation_score(comparison, best(comparison))
    tied = [method.name for method in finished if math.isclose(_validation_score(comparison, method), top, rel_tol=1e-9)]
    value = f"{meaning}, {100 * top:.2f} %"
    if len(tied) > 1:
        return [f"{_join(tied)} are tied on validation ({value})."]
    return [f"On validation, {tied[0]} is best ({value})."]


def _warnings(comparison: Comparison) -> list[str]:
    """What weakens the comparison."""
    sentences = [sentence for method in comparison.methods for sentence in _tuning_warnings(method)]
    budgets = {len(method.tries) for method in comparison.methods}
    if len(budgets) > 1:
        tries = _join(f"{method.name} {len(method.tries)}" for method in comparison.methods)
        sentences.append(f"The methods were not tuned equally; tries: {tries}.")
    baseline = next((method for method in comparison.methods if method.name == BASELINE and method.runs), None)
    for method in comparison.methods if baseline is not None else ():
        missing = [m for m in metrics(comparison) if measured(method, m) is None]
        if missing and method.runs:
            sentences.append(f"{method.name} has no {_join(map(title, missing))}, so there is no difference to give.")
        if baseline is not None and method.runs and {run.seed for run in method.runs} != {run.seed for run in baseline.runs}:
            sentences.append(f"{method.name} and {BASELINE} do not have the same seeds; differences use those that both have.")
        if not method.runs:
            sentences.append(f"{method.name} has no finished run.")
    failed = [sentence.partition(" failed: ") for sentence in comparison.failures]
    return sentences + errors.failures((name, error) for name, _, error in failed)


def _tuning_warnings(method: Method) -> list[str]:
    """An optimum at the border of what was tried may not be the optimum."""
    borders = _borders(method)
    if not borders:
        return []
    return [f"{method.name} was best at the border of the tuning grid ({_join(borders.values())}): raise --budget."]


def _borders(method: Method) -> dict[str, str]:
    """The knobs whose tuned value is the smallest or the largest of those tried, with a few words on each."""
    borders = {}
    for name, words in KNOBS.items():
        if name == "temperature" and not LOSSES[method.recipe.loss].has_temperature:
            continue
        chosen = getattr(method.recipe, name)
        tried = sorted({getattr(point, name) for point in method.tries if not isinstance(getattr(point, name), str)})
        if len(tried) > 1 and not isinstance(chosen, str) and chosen in (tried[0], tried[-1]):
            borders[name] = f"{words} {chosen:g}, the {'smallest' if chosen == tried[0] else 'largest'} tried"
    return borders


def _join(words: Iterable[str]) -> str:
    """
    >>> _join(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def code(recipe: Recipe, classes: int | None = None) -> str:
    """The lines of Python that make the recipe's loss, called ``criterion``.

    Args:
        recipe: the tuned recipe.
        classes: their number, where known: the loss refuses an m above it, and an m of all of them says nothing.

    >>> code(Recipe(loss="lapsum", p_k=(0.5, 0.5), temperature=0.1)).splitlines()[-1]
    'criterion = anyk.TopKCrossEntropyLoss([0.5, 0.5], anyk.LapSum(temperature=0.1))'
    """
    imports, comments = ["import anyk"], [f"# tuned with {recipe.optimizer}, learning rate {recipe.learning_rate:g}"]
    loss = LOSSES[recipe.loss]
    made, own = _qualified(loss.make), _arguments(loss.make, loss.arguments(recipe))
    if not loss.is_operator and not loss.has_k:
        imports, call = ["import torch"], f"torch.nn.{loss.make.__name__}({', '.join(own)})"
    elif loss.has_k:
        k = str(max(place for place, weight in enumerate(recipe.p_k, start=1) if weight > 0))
        if recipe.p_k_file is not None:
            imports, rows = _read_p_k(recipe.p_k_file)
            k = f"max(place for row in {rows} for place, weight in enumerate(row, start=1) if weight > 0)"
        call = f"{made}({', '.join([f'k={k}', *own])})"
    else:
        weights = str(list(recipe.p_k))
        if recipe.p_k_file is not None:
            imports, weights = _read_p_k(recipe.p_k_file)
        if recipe.p_k_end is not None:
            comments.append(f"# P_K moved from these weights to {list(recipe.p_k_end)}, linearly over the run")
        if recipe.temperature_end is not None:
            comments.append(f"# the temperature moved to {recipe.temperature_end!r}, geometrically over the run")
        limit = [f"m={recipe.m}"] if recipe.m is not None and (classes is None or recipe.m < classes) else []
        settings = {name: getattr(recipe, name) for name in ("top1", "softmax_over", "label_smoothing")}
        others = _arguments(anyk.TopKCrossEntropyLoss, settings)
        operator = f"{made}({', '.join(own)})"
        call = f"anyk.TopKCrossEntropyLoss({', '.join([weights, operator, *limit, *others])})"
    if not made.startswith(("anyk.", "torch.")):
        imports = [*imports, f"import {loss.make.__module__}"]
    return "\n".join([*imports, "", *comments, f"criterion = {call}", ""])


def _arguments(make: type, values: Mapping[str, Any]) -> list[str]:
    """Keyword arguments: the temperature always, the others where they are not what the class takes by itself."""
    parameters = inspect.signature(make).parameters
    said = {name: value for name, value in values.items() if name == "temperature" or value != parameters[name].default}
    return [f"{name}={_quoted(value)}" for name, value in said.items()]


def _qualified(make: type) -> str:
    """How a class is called in code: those of anyk by the library's name."""
    package = "anyk" if getattr(anyk, make.__name__, None) is make else make.__module__
    return f"{package}.{make.__name__}"


def _quoted(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _read_p_k(file: str) -> tuple[list[str], str]:
    """Imports and the expression that reads one P_K for each class."""
    text = f"Path({_quoted(file)}).read_text()"
    if file.endswith(".json"):
        return ["import json", "from pathlib import Path", "", "import anyk"], f"json.loads({text})"
    rows = f"[[float(p) for p in row] for row in csv.reader({text}.splitlines()) if row]"
    return ["import csv", "from pathlib import Path", "", "import anyk"], rows


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The content of results.json: the raw outcome, and what was derived from it for readers without this library."""
    raw = dataclasses.asdict(comparison)
    for method, fields in zip(comparison.methods, raw["methods"], strict=True):
        fields["recipe"] = method.recipe.to_json()
    derived = {
        "verdict": verdict(comparison),
        "best": best(comparison).name if comparison.methods else None,
        "notes": notes(comparison),
        "table": [
            {
                "method": method.name,
                "test": {
                    metric: {"mean": value.mean, "std": value.std, "seeds": len(value.values)}
                    for metric in metrics(comparison)
                    if (value := measured(method, metric)) is not None
                },
                "difference": {
                    metric: {**dataclasses.asdict(difference.paired), "p_holm": difference.p}
                    for (name, metric), difference in differences(comparison).items()
                    if name == method.name
                },
            }
            for method in comparison.methods
        ],
    }
    return _json_value({"format": 1, **raw, "derived": derived})


def from_json(content: Mapping[str, Any], source: str = "results.json") -> Comparison:
    """The raw outcome, read back; what was derived is derived again."""
    if content.get("format") != 1:
        raise LabError(f"{source} has the format {content.get('format')!r}; this version reads format 1.")
    try:
        moves = content.get("moves")
        return Comparison(
            data=content["data"],
            command=content["command"],
            settings=content["settings"],
            methods=tuple(_method(fields, source) for fields in content["methods"]),
            moves=_moves(moves) if moves is not None else None,
            environment=content["environment"],
            failures=tuple(content["failures"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LabError(f"{source} is not the outcome of `anyk compare`: {type(error).__name__} {error}.") from None


def write(comparison: Comparison, file: str | Path) -> None:
    """Write results.json."""
    files.write_atomically(Path(file), (json.dumps(to_json(comparison), indent=1, allow_nan=False) + "\n").encode())


def read(file: str | Path) -> Comparison:
    """Read results.json."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{file} cannot be read as JSON ({error}): run `anyk compare` again.") from None
    if not isinstance(content, dict):
        raise LabError(f"{file} should hold a JSON object: run `anyk compare` again.")
    return from_json(content, str(file))


def _method(fields: Mapping[str, Any], source: str) -> Method:
    return Method(
        name=fields["name"],
        recipe=Recipe.from_json(fields["recipe"], source),
        tries=tuple(Try(**point) for point in fields["tries"]),
        runs=tuple(SeedRun(**{**run, "curve": tuple(run["curve"])}) for run in fields["runs"]),
    )


def _moves(fields: Mapping[str, Any]) -> Moves:
    examples = []
    for example in fields["examples"]:
        guesses = {side: tuple(Guess(**guess) for guess in example[side]) for side in ("before", "after")}
        image = base64.b64decode(example["image"]) if example["image"] is not None else None
        examples.append(Example(**{**example, **guesses, "image": image}))
    return Moves(**{**fields, "examples": tuple(examples)})


def _json_value(value: Any) -> Any:
    """Tuples as lists, images as base64, and null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
