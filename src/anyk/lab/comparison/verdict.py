"""What a comparison shows, in words and in a table."""

import math
from collections.abc import Iterable, Mapping

from anyk.lab.comparison.config import BASELINE, BOUNDED
from anyk.lab.comparison.outcome import GOOD_SEEDS, NOT_COUNTED, ROOM, Comparison, Method
from anyk.lab.coverage import SHARES
from anyk.lab.errors import failure_sentences
from anyk.lab.run import loss_names
from anyk.lab.statistics import CONFIDENCE, ENOUGH_SEEDS, SIGNIFICANT
from anyk.lab.tables import (
    Column,
    Difference,
    Measured,
    Table,
    Value,
    hits,
    interval,
    p_text,
    percent,
    points,
    title,
)

#: the percentage of the sentence on the length of lists
USUAL_SHARE = 95
assert USUAL_SHARE in SHARES


def table(comparison: Comparison) -> Table:
    """The table of the report: for each metric a row for each method, first the judged metrics.

    Of those that are not tested, only the one that was tuned for.
    """
    found = comparison.differences
    if not any(method.runs for method in comparison.methods):
        return _preliminary(comparison)
    columns = [Column("metric", "metric", "field"), Column("method", "method", "field"), Column("test", "test", "accuracy")]
    parts = [Column("difference", "Δ", "points"), Column("hits", "Δ", "hits")] if found else []
    if any(one.paired.p is not None for one in found.values()):
        parts += [Column("difference", f"{100 * CONFIDENCE:.0f} % interval", "interval"), Column("p", "p", "p")]
    columns += [*parts, Column("seeds", "seeds", "count"), Column("seconds", "time", "seconds")]
    rows: list[tuple[Value, ...]] = []
    for metric in (*comparison.metrics, *(name for name in comparison.others if name == comparison.tuned_metric)):
        for method in comparison.all_methods:
            cells = [found.get((method.name, metric))] * len(parts)
            times = tuple(run.seconds for run in method.runs)
            seconds = Measured(times) if times else None
            rows.append((title(metric), method.name, method.measured(metric), *cells, len(method.runs), seconds))
    return Table(tuple(columns), tuple(rows), tuple(notes(comparison)))


def _preliminary(comparison: Comparison) -> Table:
    """What the tuning has shown so far."""
    columns = (
        Column("method", "method", "field"),
        Column("validation", f"best on validation, {_tuned_words(comparison)}", "accuracy"),
        Column("tries", "tries", "count"),
    )
    rows: list[tuple[Value, ...]] = []
    for method in comparison.methods:
        score = comparison.tuned_score(method)
        rows.append((method.name, Measured((score,)) if score > -math.inf else None, len(method.tries)))
    return Table(columns, tuple(rows), tuple(notes(comparison)))


def coverage_table(comparison: Comparison) -> Table:
    """How many guesses of each method cover how many of the test examples; without rows, where that was not counted."""
    columns = [
        Column("method", "guesses that cover", "field"),
        *(Column(f"{share}", f"{share} %", "count") for share in SHARES),
    ]
    rows = tuple((one.method, *(one.guesses[share] for share in SHARES)) for one in comparison.coverages)
    return Table(tuple(columns), rows)


def notes(comparison: Comparison) -> list[str]:
    """How to read the table."""
    losses: dict[str, list[str]] = {}
    for method in comparison.methods:
        losses.setdefault(loss_names.find(method.config.loss).words, []).append(method.name)
    told = "; ".join(f"{', '.join(names)}: {words}" for words, names in losses.items())
    return [*_measured(comparison), f"{told}."] if told else _measured(comparison)


def _measured(comparison: Comparison) -> list[str]:
    """What was measured and tested."""
    if not any(method.runs for method in comparison.methods):
        return ["Preliminary: the best score of the tuning so far, on validation and one seed; the test was not looked at."]
    lines = ["Test accuracy, mean ± standard deviation over the seeds."]
    found = comparison.differences
    tests = sum(one.p is not None for one in found.values())
    if found:
        lines[0] += f" Δ is the difference to {BASELINE} on the same seeds, in points and in test examples (mean of the seeds)."
    if tests:
        grouped = any(one.clusters < one.examples for one in comparison.contrasts)
        lines.append(
            f"The interval and p account for two kinds of luck: that of the seeds and that of the test examples"
            f"{', which come in groups' if grouped else ''}. p is corrected by Holm's method over {counted(tests, 'test')}: "
            f"every method, in {_either(map(title, comparison.judged_metrics), 'and')}. "
            f"Differences to controls are corrected separately. "
            f"p below {SIGNIFICANT} counts as significant. Metrics outside --ks are not tested."
        )
    if any(map(_only_before_correction, _shown(comparison))):
        lines.append(f"The intervals are not corrected: one that leaves out 0 is no finding where p is {SIGNIFICANT} or more.")
    return lines


def _shown(comparison: Comparison) -> list[Difference]:
    """All that is shown with an interval: the differences to the baseline and, of what gains, those to its controls."""
    gaining = {method.name for method in comparison.judged if comparison.significant(method, 1)}
    beyond = (one for (name, *_), one in comparison.beyond_controls.items() if name in gaining)
    return [*comparison.differences.values(), *beyond]


def _only_before_correction(one: Difference) -> bool:
    """Whether an interval and the corrected p beside it seem to contradict each other."""
    low, high = one.paired.low, one.paired.high
    if low is None or high is None or one.p is None:
        return False
    return one.p >= SIGNIFICANT and not low <= 0 <= high


def verdict(comparison: Comparison) -> list[str]:
    """What the comparison shows, in sentences; the first is the headline, one sentence."""
    if comparison.decided:
        first, *rest = [_headline(comparison), *_unseen(comparison), *_seen(comparison), *_controls(comparison)]
    else:
        first, *rest = [f"Not decided: {_what_is_missing(comparison)}", *_seen(comparison)]
    return [first, *_wrong_labels(comparison), *rest, *_choice(comparison), *_lists(comparison), *_caveats(comparison)]


def _wrong_labels(comparison: Comparison) -> list[str]:
    """That the labels were made wrong: whoever reads the report alone would take them for those of the data."""
    noise = next((method.config.label_noise for method in comparison.methods if method.config.label_noise), None)
    if not noise:
        return []
    if isinstance(noise, str):
        how = f"The labels for training and validation were drawn anew from the confusions in {noise}, so some are wrong"
    else:
        how = f"{100 * noise:g} % of the labels for training and validation were replaced by wrong ones on purpose"
    return [f"{how}; those of the test were not."]


# The headline --------------------------------------------------------------------------------------------------------------


def _what_is_missing(comparison: Comparison) -> str:
    """Why there is no answer, and what to run for one."""
    if out_of_time := [method for method in comparison.methods if method.capped.startswith("--time") and not method.runs]:
        return _capped_words(out_of_time)
    if comparison.baseline is None or not comparison.baseline.runs:
        return f"there is no finished run of {BASELINE} to measure the others against."
    if not any(method.name != BASELINE and method.runs for method in comparison.methods):
        return f"only {BASELINE} has finished runs, so there is nothing to compare."
    if not comparison.compared:
        return f"no method shares a seed and a metric with {BASELINE}."
    if comparison.capped:
        return _capped_words(comparison.capped)
    if not comparison.judged:
        most = max(len(comparison.shared(method)) for method in comparison.compared)
        count = "one seed" if most == 1 else f"{most} seeds"
        if any(len(method.runs) > most for method in comparison.compared):
            return f"no method shares more than {count} with {BASELINE}, which cannot tell a gain from luck."
        return f"{count} cannot tell a gain from luck; run the same command with --seeds {GOOD_SEEDS} to go on."
    if comparison.unconfirmed:
        found = comparison.differences
        method, metric = max(comparison.unconfirmed, key=lambda one: found[one[0].name, one[1]].paired.difference)
        gain = f"{title(metric)} {_difference_words(found[method.name, metric], counts=False)}"
        few = f"{counted(len(comparison.shared(method)), 'seed')} cannot confirm"
        return f"{method.name} gains {gain}, which {few}; run the same command with --seeds {GOOD_SEEDS} to go on."
    [(behind, ahead), *_] = comparison.overtaking
    gains = [100 * (comparison.gain_of_longer(method) or 0.0) for method in (behind, ahead)]
    return (
        f"with twice the epochs {behind.name} gains {gains[0]:.2f} points on validation and {ahead.name} {gains[1]:.2f}, which "
        f"may reverse their order; run it again with --epochs {2 * ahead.config.epochs or 'twice as many'}."
    )


def _capped_words(methods: Iterable[Method]) -> str:
    caps: dict[str, list[str]] = {}
    for method in methods:
        caps.setdefault(method.capped, []).append(method.name)
    # What the time cut short may have been the tuning or the seeds.
    what = {cap: "the runs" if cap.startswith("--time") else "the tuning" for cap in caps}
    ended = _either((f"{cap} ended {what[cap]} of {_either(names, 'and')}" for cap, names in caps.items()), "and")
    options = dict.fromkeys(cap.split()[0] if cap.startswith("--") else "cap" for cap in caps)
    return f"{ended} too early; run the same command with a larger {_either(options, 'and')}, or without, to go on."


def _headline(comparison: Comparison) -> str:
    pick = comparison.picked
    gains, losses = (comparison.significant(pick, sign) for sign in (1, -1))
    if gains and losses:
        return f"A trade: {pick.name} gains {_listed(gains)} and loses {_listed(losses)} against {BASELINE}."
    if gains and (lost := comparison.lost_seeds(pick)):
        missing = f"it has no result on {lost} of {counted(lost + len(pick.runs), 'seed')}, so it does not count as better"
        return f"{pick.name} gains {_listed(gains)} against {BASELINE}, but {missing}."
    if gains:
        causes = [
            _cause(comparison, pick, one, gains)
            for one in comparison.controls_of(pick)
            if _has_it_too(comparison, pick, one, gains)
        ]
        but = f", but {_either(causes, 'and')}" if causes else ""
        return f"{pick.name} is better than {BASELINE}: {_listed(gains)}{but}{_lower(comparison, pick)}."
    none, winners = f"No gain over {BASELINE} is shown", comparison.all_confirmed
    if pick.name != BASELINE:
        it = pick.name if winners else "it"
        message = f"on the test {it} loses {_listed(losses)}" if losses else f"the test does not confirm {it}"
        if pick not in comparison.judged:
            message = f"{pick.name} has too few seeds to confirm it" if winners else "has too few seeds to confirm it"
        if winners:
            better = f"{_gains(comparison, winners)} {'is' if len(winners) == 1 else 'are'} better than {BASELINE} on the test"
            return f"{better}; but {pick.name} is best on validation, and {message}."
        return f"{none}: {pick.name} is best on validation, but {message}."
    if winners:
        gain = f"{_gains(comparison, winners)} {'gains' if len(winners) == 1 else 'gain'}"
        return f"Nothing is ahead of {BASELINE} on validation, which does not bear out what {gain} on the test."
    losing = [method for method in comparison.judged if comparison.significant(method, -1)]
    trading = [method.name for method in losing if comparison.significant(method, 1)]
    losers = [method.name for method in losing if method.name not in trading]
    verbs = ("gains", "loses") if len(trading) == 1 else ("gain", "lose")
    trade = f"{_either(trading, 'and')} {verbs[0]} in one metric and {verbs[1]} in another" if trading else ""
    if losers:
        return f"{none}: {BASELINE} is better than {_either(losers, 'and')}{trade and f', and {trade}'}."
    if trading:
        return f"{none}: {trade}."
    tests = [one for (name, metric), one in comparison.differences.items() if metric in comparison.judged_metrics]
    if not any(one.p is not None for one in tests):
        uncounted = any(one.paired.reason == NOT_COUNTED for one in tests)
        why = f"no test, {NOT_COUNTED}" if uncounted else "too few test examples differ to tell"
        return f"{none}: {why}."
    return f"{none}: every difference in {_either(map(title, comparison.judged_metrics), 'and')} may be luck."


def _gains(comparison: Comparison, winners: Iterable[Method]) -> str:
    """Methods with what each of them gains for certain."""
    told = []
    for method in winners:
        gains = comparison.significant(method, 1).items()
        sizes = (f"{points(one.paired.difference)} points of {title(metric)}" for metric, one in gains)
        told.append(f"{method.name} ({_either(sizes, 'and')})")
    return _either(told, "and")


def _lower(comparison: Comparison, method: Method) -> str:
    """What a method may lose beside what it gains."""
    found = comparison.differences
    lower = [
        f"{percent(abs(one.paired.difference))} points of {title(metric)}"
        for metric in comparison.judged_metrics
        if (one := found.get((method.name, metric))) is not None and round(100 * one.paired.difference, 2) < 0
    ]
    return f"; it loses {_either(lower, 'and')}, which may be luck" if lower else ""


def _listed(found: Mapping[str, Difference]) -> str:
    """Gains or losses, without their sign."""
    return _either((f"{percent(abs(one.paired.difference))} points of {_with_hits(m, one)}" for m, one in found.items()), "and")


def _with_hits(metric: str, one: Difference) -> str:
    if one.paired.hits is None or one.paired.examples is None:
        return title(metric)
    return f"{title(metric)} ({hits(abs(one.paired.hits)).removeprefix('+')} of {one.paired.examples:,} test examples)"


# What was seen -------------------------------------------------------------------------------------------------------------


def _seen(comparison: Comparison) -> list[str]:
    """A sentence for each method of which the table does not show how sure its differences are."""
    found, sure = comparison.differences, [method.name for method in comparison.judged]
    sentences = []
    for method in comparison.compared:
        own = {metric: found[method.name, metric] for metric in comparison.judged_metrics if (method.name, metric) in found}
        message = "; ".join(f"{title(metric)} {_difference_words(one)}" for metric, one in own.items() if one.p is None)
        seeds = len(comparison.shared(method))
        few = f" on {counted(seeds, 'seed')}, not judged" if method.name not in sure else ""
        if message:
            sentences.append(f"{method.name} against {BASELINE}{few}: {message}.")
    return sentences


def _difference_words(one: Difference, counts: bool = True) -> str:
    found = one.paired
    words = [f"{points(found.difference)} points"]
    if counts and found.hits is not None and found.examples is not None:
        words.append(f"{hits(found.hits)} of {found.examples:,} test examples")
    if found.low is not None and found.high is not None:
        words.append(f"{100 * CONFIDENCE:.0f} % interval {interval(found.low, found.high)}")
    if one.p is not None:
        words.append(p_text(one.p))
    elif found.reason is not None:
        words.append(f"no test: {found.reason}")
    return f"{words[0]} ({', '.join(words[1:])})" if words[1:] else words[0]


def _unseen(comparison: Comparison) -> list[str]:
    """Where no gain is sure: the largest that the intervals leave room for, if that would matter."""
    if any(comparison.significant(method, 1) for method in comparison.judged):
        return []
    room = [
        (one.paired.high, method.name, metric)
        for method in comparison.judged
        for metric in comparison.judged_metrics
        if (one := comparison.differences.get((method.name, metric))) is not None and one.paired.high is not None
    ]
    if not room or max(room)[0] <= ROOM:
        return []
    high, name, metric = max(room)
    return [
        f"A real gain is not ruled out: the intervals still allow up to {100 * high:.1f} points ({name}, {title(metric)}). "
        "More test examples or seeds would tell."
    ]


# Controls ------------------------------------------------------------------------------------------------------------------


def _has_it_too(comparison: Comparison, method: Method, control: Method, gains: Iterable[str]) -> bool:
    """Whether a control gains at least half as much in each of the metrics, and the method no more than by luck above it."""
    baseline = comparison.baseline
    if baseline is None or len(control.runs) < ENOUGH_SEEDS:
        return False
    for metric in gains:
        own, theirs = (comparison.difference(one, baseline, metric) for one in (method, control))
        if own is None or theirs is None or theirs.difference < own.difference / 2:
            return False
        if _surely_more(comparison.beyond_controls.get((method.name, control.name, metric))):
            return False
    return True


def _explains(comparison: Comparison, control: Method, metric: str) -> bool:
    """Whether a control could: softmax with another rate cannot, where it is no better than softmax."""
    if control.config.loss == BOUNDED or comparison.baseline is None:
        return True
    found = comparison.difference(control, comparison.baseline, metric)
    return found is None or found.difference > 0


def _surely_more(found: Difference | None) -> bool:
    return found is not None and found.p is not None and found.p < SIGNIFICANT and found.paired.difference > 0


def _cause(comparison: Comparison, method: Method, control: Method, gains: Iterable[str]) -> str:
    """What else gains it, and how much of it."""
    beside = [comparison.difference(control, method, metric) for metric in gains]
    much = "as much or more" if all(one is not None and one.difference >= 0 for one in beside) else "half of it or more"
    if control.config.loss == BOUNDED:
        return f"{control.name}, which knows no k, gains {much}"
    return f"{BASELINE} with the learning rate {control.config.learning_rate:g} gains {much}"


def _controls(comparison: Comparison) -> list[str]:
    """What the controls say about the methods that gain, where the headline has not said it."""
    sentences = []
    for method in comparison.judged:
        gains = comparison.significant(method, 1)
        for control in comparison.controls_of(method) if gains else ():
            too = [metric for metric in gains if _has_it_too(comparison, method, control, [metric])]
            if too and not (method is comparison.picked and len(too) == len(gains) and comparison.confirmed(method)):
                sentences.append(
                    f"{method.name} gains {_either(map(title, too), 'and')}, but {_cause(comparison, method, control, too)}."
                )
            every = comparison.beyond_controls
            beside = {
                metric: every.get((method.name, control.name, metric))
                for metric in gains
                if metric not in too and _explains(comparison, control, metric)
            }
            for more, surely in (("more than luck", True), ("which may be luck", False)):
                told = [
                    f"{title(metric)} {_difference_words(found, counts=False)}"
                    for metric, found in beside.items()
                    if found is not None and found.paired.difference > 0 and _surely_more(found) == surely
                ]
                if told:
                    sentences.append(f"Against the control {control.name}, {method.name} gains {_either(told, 'and')}: {more}.")
            behind = [
                f"{title(metric)} {_difference_words(found, counts=False)}"
                for metric in comparison.judged_metrics
                if (found := every.get((method.name, control.name, metric))) is not None and found.paired.difference < 0
            ]
            if behind and beside:
                sentences.append(f"It is behind {control.name} in {_either(behind, 'and')}.")
    return sentences


# Validation, and what weakens the comparison -------------------------------------------------------------------------------


def _choice(comparison: Comparison) -> list[str]:
    """Which method validation would choose, and what the test alone would."""
    finished = [method for method in comparison.methods if comparison.validation_score(method) > -math.inf]
    if len(finished) < 2:
        return []
    pick, best = comparison.picked, comparison.best_on_validation
    value = f"{_tuned_words(comparison)}, {percent(comparison.validation_score(best[0]))} %"
    names = _either((method.name for method in best), "and")
    where = " of those trained on all seeds" if any(method.settled for method in finished) and not best[0].settled else ""
    sentences = [f"On validation, {names} {'are tied' if len(best) > 1 else 'is best'}{where} ({value})."]
    if pick not in best:
        sentences.append(
            "The labels of validation are wrong, too, so only methods that the test confirms were considered; the size of the "
            "gain is optimistic."
        )
    other = [method.name for method in comparison.all_confirmed if method is not pick]
    if other and comparison.decided:
        verb = ("is" if len(other) == 1 else "are") + (" also" if comparison.confirmed(pick) else "")
        sentences.append(
            f"On the test {_either(other, 'and')} {verb} significantly better than {BASELINE}"
            + ("." if pick not in best else "; validation decides, since the test could not judge what it chose itself.")
        )
    return sentences


def _lists(comparison: Comparison) -> list[str]:
    """How many guesses to show, of the method to use and of the others."""
    needed = {one.method: one.guesses[USUAL_SHARE] for one in comparison.coverages}
    chosen = comparison.choice.name if comparison.methods else ""
    if chosen not in needed:
        return []
    if (own := needed[chosen]) is None:
        covered = max(one.curve[-1][1] for one in comparison.coverages)
        return [
            f"No number of guesses is right {USUAL_SHARE} % of the time: {percent(1 - covered)} % of the test examples have a "
            "target that is none of the classes."
        ]
    others = [f"{m.name} {k:,}" for m in comparison.methods if m.name != chosen and (k := needed.get(m.name)) is not None]
    rest = f"; with {_either(others, 'and')}" if others else ""
    return [f"To be right {USUAL_SHARE} % of the time on the test, show {counted(own, 'guess')} with {chosen}{rest}."]


def _tuned_words(comparison: Comparison) -> str:
    metric = comparison.tuned_metric
    if metric != "mean":
        return title(metric)
    names = [title(name) for name in comparison.judged_metrics] or [title(f"top{k}") for k in comparison.ks]
    return f"the mean of {_either(names, 'and')}" if len(names) > 1 else names[0]


def _caveats(comparison: Comparison) -> list[str]:
    """What weakens the comparison."""
    sentences = []
    if comparison.decided and comparison.settings.get("effort") == "quick":
        sentences.append("Whether the training was long enough was not checked; --effort normal checks it.")
    settled = [method for method in comparison.methods if method.settled]
    if settled:
        names, seeds = _either((method.name for method in settled), "and"), max(len(method.runs) for method in settled)
        sentences.append(
            f"{names} {'was' if len(settled) == 1 else 'were'} trained on {counted(seeds, 'seed')}, since more could hardly "
            "change the answer; --seeds N trains all on N."
        )
    late = comparison.undertrained
    if late:
        gains = _either((f"{name} {percent(gain)}" for name, gain in late.items()), "and")
        sentences.append(
            f"The runs may be too short: twice the epochs gain, in points of {_tuned_words(comparison)} on validation, "
            f"{gains}. Raise --epochs."
        )
    if comparison.decided:
        sentences += [f"{method.name} is best at {bound}." for method in comparison.methods for bound in method.bounds]
    sentences += [
        f"{method.name} has the learning rate of {method.rate_of}, {method.config.learning_rate:g}: on validation, over the "
        "seeds, it does better with it than with what its own search found."
        for method in comparison.methods
        if method.rate_of
    ]
    tried = {len(method.tries) for method in comparison.methods}
    if len(tried) > 1 and comparison.decided:
        tries = _either((f"{method.name} {len(method.tries)}" for method in comparison.methods), "and")
        sentences.append(f"The methods were not tuned equally; tries: {tries}.")
    baseline = comparison.baseline
    for method in comparison.methods if baseline is not None and baseline.runs else ():
        missing = [m for m in comparison.metrics if method.measured(m) is None]
        if missing and method.runs:
            sentences.append(f"{method.name} has no {_either(map(title, missing), 'and')}, so there is no difference to give.")
        others = {run.seed for run in baseline.runs} if baseline is not None else set()
        if method.runs and not method.settled and {run.seed for run in method.runs} != others:
            sentences.append(f"{method.name} and {BASELINE} do not have the same seeds; differences use those that both have.")
        if not method.runs:
            sentences.append(f"{method.name} has no finished run.")
    return sentences + failure_sentences(comparison.failures)


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "run"), counted(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def _either(words: Iterable[str], last: str) -> str:
    """
    >>> _either(["a", "b", "c"], "or")
    'a, b or c'
    """
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end
