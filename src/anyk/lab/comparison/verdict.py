"""What a comparison shows, in words and in a table."""

import math
from collections.abc import Iterable, Mapping

from anyk.lab.comparison.outcome import BASELINE, Comparison, Method, differences, measured, metrics, validation_score
from anyk.lab.comparison.outcome import chosen as best
from anyk.lab.errors import failure_sentences
from anyk.lab.run import names
from anyk.lab.statistics import SIGNIFICANT
from anyk.lab.tables import Column, Difference, Measured, Table, Value, p_text, percent, points, title

ENOUGH_SEEDS = 3
#: what is tuned, in words
KNOBS = {"learning_rate": "learning rate", "temperature": "temperature"}


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
    if metric is None or round(100 * lows[metric], 2) >= 0:
        return ""
    return f"{name} loses {percent(-lows[metric])} points of {title(metric)}"


def _unjudged_sentence(name: str, own: Mapping[str, Difference], seeds: int) -> str:
    """For too few seeds: what was seen, without judging it."""
    where = f"{name} against {BASELINE} on {seeds} {'seed' if seeds == 1 else 'seeds'}, not judged"
    if _tied(own):
        return f"{where}: the same test accuracy."
    return f"{where}: {_join(f'{title(metric)} {_gain(difference)}' for metric, difference in own.items())} points."


def _judged_sentence(name: str, own: Mapping[str, Difference]) -> str:
    if _tied(own):
        return f"{name} and {BASELINE} are tied: the same mean test accuracy."

    def listed(chosen: Iterable[str]) -> str:
        return _join(f"{title(metric)} ({_gain(own[metric])} points, {_test_text(own[metric])})" for metric in chosen)

    gains, losses = _significant(own, 1), _significant(own, -1)
    rest = [metric for metric in own if metric not in gains + losses]
    parts = [f"{verb} {listed(chosen)}" for verb, chosen in (("gains", gains), ("loses", losses)) if chosen]
    if not parts:
        return f"{name} does not differ significantly from {BASELINE}: {listed(rest)}."
    return f"{name} {' and '.join(parts)} against {BASELINE}{f'; not significant: {listed(rest)}' if rest else ''}."


def _tied(own: Mapping[str, Difference]) -> bool:
    return all(abs(difference.paired.difference) < 1e-9 for difference in own.values())


def _gain(difference: Difference) -> str:
    return points(difference.paired.difference)


def _test_text(difference: Difference) -> str:
    return p_text(difference.p) if difference.p is not None else f"no test: {difference.paired.reason}"


def _choice(comparison: Comparison) -> list[str]:
    """Which method validation would choose."""
    finished = [method for method in comparison.methods if validation_score(comparison, method) > -math.inf]
    if len(finished) < 2:
        return []
    metric = comparison.settings.get("metric", "mean")
    if metric == "mean":
        meaning = "the mean of top-1 and top-5" if comparison.data.get("classes", math.inf) > 5 else "top-1"
    else:
        meaning = title(metric)
    top = validation_score(comparison, best(comparison))
    tied = [method.name for method in finished if math.isclose(validation_score(comparison, method), top, rel_tol=1e-9)]
    value = f"{meaning}, {percent(top)} %"
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
    return sentences + failure_sentences(comparison.failures)


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
        if name == "temperature" and not names.find(method.recipe.loss).has_temperature:
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
