"""What a comparison shows, in words: for the terminal and the top of the report."""

from collections.abc import Iterable, Mapping, Sequence

from anyk.lab import snippet
from anyk.lab.config import BASELINE
from anyk.lab.findings import LATE, Findings, Method
from anyk.lab.statistics import Difference


def headline(found: Findings) -> str:
    """The answer, in one sentence."""
    if not found.decided:
        return f"Not decided: {found.why_undecided}."
    pick = found.picked
    gains, losses = found.significant(pick, 1), found.significant(pick, -1)
    if found.nothing_learned:
        return "Nothing is learned: no loss is surely better than always the most frequent class."
    if gains and losses:
        return f"A trade: {pick.name} gains {_listed(gains)} and loses {_listed(losses)} against {BASELINE}."
    if pick in found.confirmed:
        causes = [each for control in found.controls_of(pick) if (each := _explained(found, pick, control))]
        return f"{pick.name} is better than {BASELINE}: {_listed(gains)}{''.join(f', but {cause}' for cause in causes[:1])}."
    none = f"No gain over {BASELINE} is shown"
    winners = f"{_either(one.name for one in found.confirmed)} gains on the test" if found.confirmed else ""
    if pick.name != BASELINE:
        says = f"loses {_listed(losses)} on the test" if losses else "is not confirmed by the test"
        return f"{none}: {pick.name} is best on validation, but {says}{f'; {winners}' if winners else ''}."
    losing = [method.name for method in found.losses[1:] if found.significant(method, -1)]
    if winners:
        return f"{none}: nothing is ahead of {BASELINE} on validation, though {winners}."
    if losing:
        return f"{none}: {BASELINE} is better than {_either(losing)}."
    if found.too_few_examples:
        return f"{none}: {found.too_few_examples}."
    return f"{none}: every difference in {_either(map(title, found.judged))} may be luck."


def sentences(found: Findings) -> list[str]:
    """What weakens or explains the answer."""
    told = []
    if noise := found.settings.get("label_noise"):
        how = "drawn from a confusion matrix" if isinstance(noise, str) else f"{100 * float(noise):g} % of them"
        told.append(f"Labels for training and validation were made wrong ({how}); those of the test are right.")
    for method in found.confirmed:
        for control in found.controls_of(method):
            if cause := _explained(found, method, control):
                told.append(f"{method.name}: {cause}.")
    if found.too_few_examples and found.decided:
        told.append(f"{_first_up(found.too_few_examples)}.")
    for method in (found.baseline, *([found.picked] if found.picked is not found.baseline else [])):
        if (method.late_gain or 0.0) > LATE and method.config is not None:
            epochs = 2 * method.config.epochs
            told.append(
                f"{method.name} still gained {100 * (method.late_gain or 0.0):.1f} points in the second half of training: "
                f"--epochs {epochs} may change the answer."
            )
    for method in found.losses:
        told += [f"{method.name} was tuned to its bound: {bound}." for bound in method.at_bounds]
    best = max((method for method in found.losses if method.runs), key=lambda one: one.mean("top1") or 0.0, default=None)
    for method in found.methods:
        own, other = method.mean("top1"), None if best is None else best.mean("top1")
        if method.role == "reference" and own is not None and other is not None and own > other:
            told.append(f"{method.name} ({method.words}) is ahead of all: {percent(own)} % top-1 against {percent(other)} %.")
    gap = _gap(found)
    if gap:
        told.append(gap)
    if found.look > 1:
        told.append(
            f"This is look {found.look} at this test set: the tests are at the level {found.level:g}, so that all looks stay below .05."
        )
    told += [f"A run failed: {failure}" for failure in found.failures[:3]]
    return told


def _gap(found: Findings) -> str:
    """That validation and test differ by more than their sizes explain."""
    method = found.baseline
    own, other = method.mean("top1", "validation"), method.mean("top1")
    if own is None or other is None or found.settings.get("label_noise"):
        return ""
    sizes = [float(found.data[name]) for name in ("validation", "test")]
    error = (own * (1 - own) / sizes[0] + other * (1 - other) / sizes[1]) ** 0.5
    if abs(own - other) <= 4 * max(error, 1e-9) or abs(own - other) < 0.02:
        return ""
    return (
        f"Validation ({percent(own)} %) and test ({percent(other)} % top-1) differ by more than their sizes explain: are rows of one "
        "group in both, or is the test of another kind?"
    )


def _explained(found: Findings, method: Method, control: Method) -> str:
    """That a control has what the method gains; "" if the method is surely better, or the control does not gain."""
    beyond = [found.beyond_controls.get((method.name, control.name, metric)) for metric in found.significant(method, 1)]
    if not beyond or any(
        one is not None and one.p_holm is not None and one.p_holm < found.level and one.difference > 0 for one in beyond
    ):
        return ""
    gains = [found.differences.get((control.name, metric)) for metric in found.significant(method, 1)]
    shown = [100 * one.difference for one in gains if one is not None]
    if not shown or max(shown) <= 0:
        return ""
    return f"{control.name} has {'all' if min(shown) > 0 else 'some'} of that, too ({', '.join(f'{gain:+.2f}' for gain in shown)} points)"


def terminal(found: Findings, report: str = "") -> list[str]:
    """The answer on a screen: the verdict, one row for each method, what else there is to know, the line to paste.

    At most 25 lines for three losses and two k.
    """
    lines = [headline(found), ""]
    lines += _table(found)
    told = sentences(found)
    lines += ["", *told[:4], *([f"({len(told) - 4} more remarks in the report.)"] if len(told) > 4 else [])] if told else []
    use = found.chosen if found.decided else found.picked
    if use.config is not None and use.runs:
        code = [
            line
            for line in snippet.code(use.config, int(found.data["classes"])).splitlines()
            if line and not line.startswith("import")
        ]
        what = f"To paste, for {use.name}:" if found.decided else f"To paste, for {use.name}, the best so far:"
        lines += ["", what, *(f"    {line}" for line in code)]
    if report:
        lines += ["", f"Report: {report}"]
    return lines


def _table(found: Findings) -> list[str]:
    """One row for each method: accuracy, difference, interval and p in each judged metric."""
    head = ["%", *(name for metric in found.judged for name in (title(metric), "Δ", "interval", "p"))]
    rows = [head]
    for method in found.methods:
        if not method.runs:
            continue
        row = [method.name]
        for metric in found.judged:
            mean, one = method.mean(metric), found.differences.get((method.name, metric))
            row.append("–" if mean is None else percent(mean))
            tested = one is not None and method.role != "reference"
            row += difference_words(one) if one is not None and tested else ["", "", ""]
        rows.append(row)
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    aligned = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [line.rstrip() for line in aligned]


def difference_words(one: Difference) -> list[str]:
    """A difference in points, its interval and its p, as texts."""
    interval = "" if one.low is None or one.high is None else f"{100 * one.low:+.2f} … {100 * one.high:+.2f}"
    p = one.p if one.p_holm is None else one.p_holm
    return [f"{100 * one.difference:+.2f}", interval, "" if p is None else p_text(p)]


def p_text(p: float) -> str:
    """A p, as short as it can be read.

    >>> p_text(0.00002), p_text(0.034), p_text(0.6)
    ('<.001', '.034', '.60')
    """
    if p < 0.001:
        return "<.001"
    return f"{p:.3f}".lstrip("0") if p < 0.1 else f"{p:.2f}".lstrip("0") if p < 1 else "1"


def title(metric: str) -> str:
    """A metric in words.

    >>> title("top5"), title("macro_top1"), title("mrr"), title("ndcg10")
    ('top-5', 'macro top-1', 'MRR', 'NDCG@10')
    """
    words = metric.replace("macro_", "macro ").replace("top", "top-").replace("_", " ")
    return {"mrr": "MRR"}.get(metric, f"NDCG@{metric[4:]}" if metric.startswith("ndcg") else words)


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.64321)
    '64.32'
    """
    return f"{100 * share:.2f}"


def notes(found: Findings) -> list[str]:
    """How the numbers are to be read."""
    tests = len([one for one in found.differences.values() if one.p_holm is not None])
    grouped = " (which come in groups)" if found.groups is not None else ""
    lines = [
        f"Test accuracy in percent, mean over the seeds. Δ is the difference to {BASELINE} over the same seeds, in points. Each seed "
        "has its own draw of validation and was tuned on it, so that the luck of tuning is in the difference between seeds.",
        f"Interval ({100 * (1 - found.level):.0f} %) and p count the luck of seeds and of test examples{grouped}; p is corrected by "
        f"Holm's method over {tests} tests, the intervals are not. p below {found.level:g} counts.",
    ]
    told = dict.fromkeys(f"{method.name}: {method.words}" for method in found.methods if method.role != "control")
    return [*lines, "; ".join(told) + "."]


def _listed(found: Mapping[str, Difference]) -> str:
    """Gains or losses, without their sign."""
    return _either(f"{abs(100 * one.difference):.2f} points of {title(metric)}{_hits(one)}" for metric, one in found.items())


def _hits(one: Difference) -> str:
    return "" if one.hits is None else f" ({abs(one.hits):.0f} of {one.examples:,} test examples)"


def _either(words: Iterable[str]) -> str:
    listed: Sequence[str] = list(words)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}" if listed else ""


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
