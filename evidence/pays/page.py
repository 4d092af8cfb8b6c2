"""Write evidence/tables/pays.md and its figures from the summaries in the repository, and what other pages quote of it.

    python evidence/pays/page.py          # or: make evidence

Nothing is trained here and no data are needed; what has no runs is a dash. In README.md and the guide, what stands between
``<!-- pays: NAME -->`` and ``<!-- end -->`` is written too.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import table1_small
from anyk.lab import statistics, tables
from anyk.lab.statistics import Contrast, Paired
from pays import plan, rule
from pays.plan import BASE, DECIDE, EVERY, METHODS, NOISY, SETS, Set
from pays.rule import Tested
from pays.summaries import SUMMARIES, Summaries

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "evidence" / "tables"
COMMAND = """python evidence/pays/runner.py --runs RUNS --jobs 2 \\
        --data embeddings=FOLDER items=FILE pixels=FILE.npz confusions=FILE.npy"""
PLACE = re.compile(r"(?<=<!-- pays: )([\w -]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
#: the methods of the README's table, and how it calls them
SHOWN = {
    "plain": "softmax without smoothing",
    "gce": "generalised cross-entropy",
    "error:lapsum mix": "`TopKErrorLoss({1: .5, K: .5})`",
    BASE: "`TopKErrorLoss({1: .5, K: .5}, KSubset())`",
    "error:ksubset pure": "`TopKErrorLoss({K: 1}, KSubset())`",
    "splitter mix": "`TopKCrossEntropyLoss({1: .5, K: .5})`, the paper's",
}


# Layout --------------------------------------------------------------------------------------------------------------------


def paragraph(text: str) -> list[str]:
    """The lines of a paragraph, and an empty one."""
    return [*textwrap.wrap(" ".join(text.split()), 125, break_long_words=False, break_on_hyphens=False), ""]


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table, and an empty line; the first ``left`` columns are flush left, the others flush right.

    >>> table(["loss", "top-1"], [("softmax", 64.2)])
    ['| loss | top-1 |', '| :-- | --: |', '| softmax | 64.2 |', '']
    """
    marks = [":--"] * left + ["--:"] * (len(titles) - left)
    return [*(f"| {' | '.join(map(str, row))} |" for row in (titles, marks, *rows)), ""]


def title(method: str, k: int | str = "K") -> str:
    """How a method of the main table is written.

    >>> title("error:ksubset mix", 5), title("lapsum pure"), title("softmax")
    ('error:ksubset {1: .5, 5: .5}', 'lapsum {K: 1}', 'softmax')
    """
    name, space, word = method.partition(" ")
    return f"{name} {{1: .5, {k}: .5}}" if word == "mix" else f"{name} {{{k}: 1}}" if space else name


def heading(name: str) -> list[str]:
    """The heading of a set."""
    words = EVERY[name].title
    return [f"### {words[0].upper()}{words[1:]}", ""]


def mean_text(values: Sequence[float]) -> str:
    """Mean and standard deviation in percent."""
    if not values:
        return "–"
    spread = statistics.std(values)
    return tables.percent(statistics.mean(values)) + ("" if spread is None else f" ± {tables.percent(spread)}")


def difference_text(one: Tested | None, hits: bool = False) -> str:
    """A difference in points, in test examples if asked, its interval and its p."""
    if one is None:
        return "–"
    found = one.paired
    words = tables.points(found.difference)
    if hits and found.hits is not None:
        words += f", {tables.hits(found.hits)}"
    if found.low is not None and found.high is not None:
        words += f" ({tables.interval(found.low, found.high)})"
    return f"{words}, {tables.p_text(one.p)}" if one.p is not None else words


def points_text(one: Tested | None) -> str:
    """A difference in points; bold where its p is below the rule's level."""
    if one is None:
        return "–"
    words = tables.points(one.paired.difference)
    return f"**{words}**" if one.sure else words


class Evidence:
    """The summaries of all sets."""

    def __init__(self, folder: Path = SUMMARIES) -> None:
        self.sets = {name: Summaries(each, folder) for name, each in plan.EVERY.items()}
        paths = {name: folder / f"pays-{name}-heads.json" for name in SETS}
        self.heads: dict[str, Any] = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}

    def values(self, name: str, purpose: str, metric: str) -> list[float]:
        """A test metric over the seeds; empty where there is no run."""
        return list(self.sets[name].values(purpose, metric).values())

    def means(self, name: str, purpose: str) -> list[str]:
        """Top-1 and top-K of a row."""
        return [mean_text(self.values(name, purpose, metric)) for metric in EVERY[name].metrics]

    def family(self, name: str, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str, str], Tested]:
        """The differences of some pairs of rows in top-1 and top-K, as one family of tests."""
        return rule.family(self.sets[name], pairs, EVERY[name].metrics)


def page(evidence: Evidence, images: Path | None = None) -> str:
    """The whole of evidence/tables/pays.md. Figures are drawn to ``images`` if it is given."""
    lines = [
        *("# Where it pays", ""),
        *paragraph(sentence(evidence)),
        *paragraph(
            """Written by `make evidence` from the run summaries in `evidence/summaries`; do not edit. What is asked, how
            everything is tuned and the rule for the default were written down before the runs, in `evidence/pays/plan.py`. A
            run is found by its config, so this goes on where it stopped; `status` in place of the options says what is
            missing:"""
        ),
        *(f"    {COMMAND}", ""),
        *_main(evidence),
        *_rule(evidence),
        *_wrong(evidence),
        *_asked(
            *(evidence, "q2", "Which k gains where", _which_k),
            f"""The tuned `{BASE}` with another P_K and nothing else changed, measured at every k. If the loss does
            what it says, a single k is the best of its own column. Percent, and in brackets points against softmax; bold: the
            best of a column.""",
        ),
        *_asked(
            *(evidence, "q3", "Hyperparameters, one at a time", _hyperparameters),
            f"""The tuned `{BASE}` with one hyperparameter changed: points against it as tuned. m: points against m = 64, with
            the tuned values of each operator. Operators: each at the best of the temperatures
            {", ".join(f"{value:g}" for value in plan.OPERATOR_TEMPERATURES)} on validation, all else as tuned for KSubset. A
            ce_weight that falls does so linearly over the run; ce_weight 1 is softmax with the cross-entropy's smoothing.""",
        ),
        *_asked(
            *(evidence, "q4", "Where it stops paying", partial(_stops, images=images)),
            f"""softmax, gce and `{BASE}`, each as tuned, on the embeddings with the best of half, once and twice its tuned rate
            on validation, at every level. Points against softmax at the same level.""",
        ),
        *_heads(evidence),
        *_claims(evidence),
        *_settings(evidence),
    ]
    return "\n".join(lines).rstrip() + "\n"


# The answer, and what other pages quote ------------------------------------------------------------------------------------


def sentence(evidence: Evidence) -> str:
    """What came out, in a sentence or two."""
    chosen = rule.default(rule.judge(evidence.sets))
    if chosen is None:
        return "**Not decided yet**: runs are missing."
    who = f"`{chosen.method}` passes" if chosen.passes else "No loss passes"
    told = [
        f"**{who} the rule that was set before the runs**: no top-1 lost on any of the four sets, the list gained on three."
    ]
    quiet = []
    for name in DECIDE:
        found, k = rule.main_differences(evidence.sets[name], "softmax"), SETS[name].k
        words = [
            f"{_loss(method, k)} {'gains' if one.paired.difference > 0 else 'loses'} "
            f"{100 * abs(one.paired.difference):.2f} points of top-{each}"
            for method, shown in SHOWN.items()
            for each in SETS[name].ks
            if "TopK" in shown and (one := found.get((method, each))) is not None and one.sure
        ]
        if words:
            told.append(f"On {SETS[name].title}, {', '.join(words)}.")
        else:
            quiet.append(SETS[name].title)
    if quiet:
        told.append(f"No sure difference of these losses: {'; '.join(quiet)}.")
    return " ".join(told)


def _loss(method: str, k: int) -> str:
    """What is typed for a method of the README's table.

    >>> _loss("error:ksubset mix", 10)
    '`TopKErrorLoss({1: .5, 10: .5}, KSubset())`'
    """
    return SHOWN.get(method, f"`{title(method)}`").partition(", the")[0].replace("K:", f"{k}:")


def overview(evidence: Evidence, methods: Mapping[str, str], names: Sequence[str] = DECIDE) -> list[str]:
    """The sets side by side: softmax in percent, the others, as they are called, as points against it, top-1 | top-K."""
    rows = [("softmax, tuned smoothing, %", *(softmax_text(evidence, name) for name in names))]
    rows += [(words, *(both_text(evidence, name, method) for name in names)) for method, words in methods.items()]
    return table(["top-1 \\| top-K", *(EVERY[name].title for name in names)], rows)


def softmax_text(evidence: Evidence, name: str) -> str:
    """Top-1 and top-K of softmax on a set, in percent."""
    values = [evidence.values(name, "main: softmax", metric) for metric in EVERY[name].metrics]
    return " \\| ".join(tables.percent(statistics.mean(one)) for one in values) if all(values) else "–"


def both_text(evidence: Evidence, name: str, method: str, against: str = "softmax") -> str:
    """Points of top-1 and top-K against another method on a set."""
    found = rule.main_differences(evidence.sets[name], against)
    pair = [found.get((method, k)) for k in EVERY[name].ks]
    return " \\| ".join(map(points_text, pair)) if any(pair) else "–"


def main_table(evidence: Evidence) -> str:
    """What the README quotes."""
    note = """Points against softmax with tuned learning rate and label smoothing; bold: p < .01 after Holm, over seeds and test
    examples. All methods, intervals and the differences to gce: [all tables](evidence/tables/pays.md)."""
    return "\n".join([*overview(evidence, SHOWN), *paragraph(note)]).rstrip()


#: the rows of README's table: what the data are, and the set
FRONT = {
    "Next token of Python code, 2,000 classes": "completion",
    "The same, 40 % of the labels wrong": "completion-wrong40",
    "CIFAR-100 features, linear layer": "embeddings",
    "The same, 40 % wrong, as people confuse them": "embeddings-wrong40",
    "CIFAR-100 images of 16 px, from scratch": "pixels",
    "Next film, 3,416 classes (top-10)": "items",
}


def front_table(evidence: Evidence) -> str:
    """What README shows: right and wrong labels, and where nothing is gained."""
    head = [
        "top-1 \\| top-5",
        "cross-entropy, label smoothing tuned, %",
        "bounded loss without k, points",
        "`TopKErrorLoss({1: .5, 5: .5})`, tuned, points",
    ]
    rows = [
        (words, softmax_text(evidence, name), *(both_text(evidence, name, method) for method in ("gce", "error:lapsum mix")))
        for words, name in FRONT.items()
    ]
    return "\n".join(table(head, rows)).rstrip()


def gain_at_each_k(evidence: Evidence, name: str = "completion") -> str:
    """What the guide quotes: the points that P_K brings at each k."""
    rows = []
    for cell in plan.cells("q2", name)[2:]:
        found = [rule.difference(evidence.sets[name], cell.id, "q2: softmax", f"top{k}") for k in plan.KS]
        rows.append((f"`{cell.name}`", *("–" if one is None else tables.points(one.difference) for one in found)))
    return "\n".join(table(["P_K", *(f"top-{k}" for k in plan.KS)], rows)).rstrip()


def wrong_sentence(evidence: Evidence) -> str:
    """What the rule for wrong labels says, as README quotes it."""
    judged = rule.judge_wrong(evidence.sets)
    if any(one.helps is None for one in judged):
        return "The rule that was set before the runs is open: runs are missing."
    best = rule.line_for_wrong_labels(judged)
    if best is None:
        return "No loss helps by the rule that was set before the runs: use label smoothing."
    mix = next(one for one in judged if one.method == "error:lapsum mix")
    sets = len(rule.WRONG)
    if best.method != "gce":
        beyond = f"on {len(best.beyond_gce)} of them than without k, too" if best.beyond_gce else "on none than without k"
        words = f"{_loss(best.method, 5)} is significantly better than cross-entropy on {len(best.gained)} of {sets} settings"
        return f"{words}, {beyond}."
    words = f"the bounded loss without k is significantly better than cross-entropy on {len(best.gained)} of {sets} settings"
    own = f"{_loss(mix.method, 5)} is better on {len(mix.gained)}, and worse on {len(mix.lost) or 'none'}"
    beside = f"against the loss without k it is better on {len(mix.beyond_gce)} and worse on {len(mix.behind_gce)}"
    return f"Being bounded is what helps, and not k: {words} and worse on none. {own}; {beside}."


def check_sentence(evidence: Evidence, name: str = "pixels-wrong40") -> str:
    """What came out on the set with wrong labels that is outside the rule."""
    found = rule.main_differences(evidence.sets[name], "softmax")
    told = []
    for method, words in {"gce": "the bounded loss without k", "error:lapsum mix": _loss("error:lapsum mix", 5)}.items():
        pair = [found.get((method, k)) for k in EVERY[name].ks]
        least = min((one.p for one in pair if one is not None and one.p is not None), default=None)
        level = "too few seeds to test" if least is None else f"p ≥ {least:.2g}"
        told.append(f"{words} {both_text(evidence, name, method)} ({level})")
    return f"Images of 16 px, with five seeds, are a check outside the rule: {' and '.join(told)}, top-1 \\| top-5."


def small_table(evidence: Evidence) -> str:
    """The paper's table 1 in small: another script's runs."""
    results = table1_small.read()
    if not results:
        return "It has not been run yet: a night on two cores."
    answers = f"{table1_small.sentence(results)} {table1_small.smoothed_sentence(results)}"
    return "\n".join([answers, "", *table1_small.table(results, smoothed=False)])


QUOTES: Mapping[str, Callable[[Evidence], str]] = {
    **{"main": main_table, "sentence": sentence, "front": front_table, "which k": gain_at_each_k, "wrong": wrong_sentence},
    **{"check": check_sentence, "table 1 in small": small_table},
}


def quoted(text: str, evidence: Evidence, guide: bool = False) -> str:
    """A page with what stands between its ``<!-- pays: NAME -->`` and ``<!-- end -->`` filled in; links are the README's, or
    those of a page of the guide."""

    def filled(place: re.Match[str]) -> str:
        words = QUOTES[place[1]](evidence)
        words = words.replace("(docs/", "(").replace("(evidence/", "(../evidence/") if guide else words
        return f"{place[1]}{place[2]}\n{words}\n\n"

    return PLACE.sub(filled, text)


def pages(root: Path, evidence: Evidence) -> dict[Path, str]:
    """The README and the pages of the guide, with what they quote filled in."""
    paths = {root / "README.md": False, **dict.fromkeys(sorted((root / "docs").glob("*.md")), True)}
    return {path: quoted(path.read_text(encoding="utf-8"), evidence, guide) for path, guide in paths.items()}


# Main table ----------------------------------------------------------------------------------------------------------------


def _main(evidence: Evidence) -> list[str]:
    lines = [
        *("## Main table", ""),
        *paragraph(
            """*softmax* has its learning rate and its label smoothing tuned: what the others must beat. *plain* is softmax
            without smoothing. *gce* is bounded as the error losses are, but knows no k. *error* is `TopKErrorLoss`, the names
            without it are the paper's `TopKCrossEntropyLoss`; *softmax_at_k* is SL@K as published, which pushes targets far
            behind away and so does not learn from scratch here; *mix* has half of P_K on 1 and half on K, *pure* has all of it
            on K. K, the list that is looked at, is 5; for items 10. Accuracies are percent of the test examples. Differences
            are points and, in the tables of a set, test examples, on the same seeds, with the two-way 95 % interval over seeds
            and examples; p after Holm over the methods and both k of a set, for softmax and for gce each."""
        ),
        *overview(evidence, {name: title(name) for name in METHODS if name != "softmax"}),
        *paragraph("Bold: p < .01 after Holm against softmax. Each set with its intervals, and against gce:"),
    ]
    for name, each in SETS.items():
        lines += [*heading(name), *_set_table(evidence, each)]
    return lines


def _wrong(evidence: Evidence) -> list[str]:
    """Question 7: wrong labels."""
    methods = {name: title(name) for name in METHODS if any(name in each.methods for each in NOISY.values())}
    methods.pop("softmax")
    judged = rule.judge_wrong(evidence.sets)
    rows = []
    for one in judged:
        word = {True: "helps", False: "no", None: "open"}[one.helps]
        mean = "–" if one.mean is None else tables.points(one.mean)
        rows.append(
            (title(one.method), word, *(len(sets) for sets in (one.gained, one.lost, one.beyond_gce, one.behind_gce)), mean)
        )
    lines = [
        *("## Wrong labels", ""),
        *paragraph(
            """The labels for training and validation are drawn from a confusion matrix, once for tuning and all seeds; those of
            the test are right. CIFAR-100: what people answered (CIFAR-100N); completion: what a first softmax model answers.
            The smoothing of softmax goes up to .4."""
        ),
        *overview(evidence, methods, list(NOISY)),
        *paragraph(
            f"""The rule, written down before the runs: a loss helps if on at least {rule.ENOUGH_WRONG} of the six sets without
            pixels it gains top-1 or top-K with p < .01 after Holm, and loses neither so surely on any. *Beyond* and
            *behind gce*: sets on which one of both is surely better or worse than gce's (Holm over both)."""
        ),
        *table(["loss", "rule", "gained on", "lost on", "beyond gce on", "behind gce on", "mean of both"], rows),
        *paragraph(wrong_sentence(evidence)),
    ]
    for name, each in NOISY.items():
        lines += [*heading(name), *_set_table(evidence, each)]
        guesses = [
            (title(method, each.k), *(_guesses(evidence, name, method, share) for share in (90, 95))) for method in each.methods
        ]
        lines += table(["guesses that cover, mean of the seeds", "90 %", "95 %"], guesses)
        if cells := plan.cells("q7", name):
            pairs = plan.pairs("q7", name)
            tested = {
                found: one
                for control in ("softmax", "gce")
                for found, one in evidence.family(name, [pair for pair in pairs if pair[1] == f"q7: {control}"]).items()
            }
            lines += paragraph("The tuned methods on a second draw of wrong labels:")
            lines += table(
                ["", *(f"to {control}, top-{k}" for control in ("softmax", "gce") for k in each.ks)],
                [
                    (
                        title(cell.name, each.k),
                        *(
                            difference_text(tested.get((cell.id, f"q7: {control}", f"top{k}")))
                            for control in ("softmax", "gce")
                            for k in each.ks
                        ),
                    )
                    for cell in cells
                    if cell.name != "softmax"
                ],
            )
    return lines


def _guesses(evidence: Evidence, name: str, method: str, share: int) -> str:
    """How many guesses cover so many percent of the test examples."""
    values = [line.test.get(f"guesses{share}") for line in evidence.sets[name].runs(f"main: {method}").values()]
    found = [value for value in values if value is not None]
    return f"{statistics.mean(found):.1f}" if found and len(found) == len(values) else "–"


def _set_table(evidence: Evidence, each: Set) -> list[str]:
    summaries, rows = evidence.sets[each.name], []
    found = {control: rule.main_differences(summaries, control) for control in ("softmax", "gce")}
    for method in each.methods:
        runs = summaries.runs(f"main: {method}")
        differences = [difference_text(found[control].get((method, k)), hits=True) for control in found for k in each.ks]
        diverged = sum(not line.test for line in runs.values())
        seeds = f"{len(runs)}" + (f" ({diverged} diverged)" if diverged else "")
        rows.append((title(method, each.k), *evidence.means(each.name, f"main: {method}"), *differences, seeds))
    head = ["", "top-1", f"top-{each.k}", *(f"to {control}, top-{k}" for control in found for k in each.ks), "seeds"]
    return table(head, rows)


def _rule(evidence: Evidence) -> list[str]:
    judged = rule.judge(evidence.sets)
    rows = []
    for one in judged:
        word = {True: "passes", False: "no", None: "open"}[one.passes]
        mean = "–" if one.mean is None else tables.points(one.mean)
        rows.append((title(one.method), word, "; ".join(one.reasons) or "–", ", ".join(one.gained) or "–", mean))
    chosen = rule.default(judged)
    return [
        *("## The default", ""),
        *paragraph(
            f"""The rule for the default, written down before the runs: over the four sets, the two-way 95 % interval of the
            top-1 difference lies above -{100 * rule.MARGIN:g} points on each, top-k (5; 10 for items) is gained on at least
            three with p < .01 after Holm against softmax with tuned smoothing, and the mean of both is not below gce's (over
            the four sets together). If nothing passes, the best by the mean of both stays the default; that mean is over the
            sets that all candidates have, in points against softmax."""
        ),
        *table(["candidate", "rule", "why", "list gained on", "mean of both"], rows, left=4),
        *("Open." if chosen is None else f"By the rule the default is `{chosen.method}`.", ""),
    ]


# Questions -----------------------------------------------------------------------------------------------------------------


def _asked(evidence: Evidence, question: str, title: str, answer: Callable[[Evidence, str], list[str]], told: str) -> list[str]:
    """The section of a question: what is asked, and the answer for each set."""
    explored = """Three fresh seeds, 11 to 13, for each row: this is for finding out, and nothing is decided by it. p after Holm
    over a table."""
    lines = [f"## {title}", "", *paragraph(told), *paragraph(explored)]
    for name in plan.QUESTIONS[question][0]:
        lines += [*heading(name), *answer(evidence, name)]
    return lines


def _which_k(evidence: Evidence, name: str) -> list[str]:
    cells = plan.cells("q2", name)
    means = {
        (cell.id, k): statistics.mean(values)
        for cell in cells
        for k in plan.KS
        if (values := evidence.values(name, cell.id, f"top{k}"))
    }

    def text(cell: plan.Cell, k: int) -> str:
        own = means.get((cell.id, k))
        if own is None:
            return "–"
        best = own == max(value for (_, each), value in means.items() if each == k)
        percent = f"**{tables.percent(own)}**" if best else tables.percent(own)
        found = rule.difference(evidence.sets[name], cell.id, "q2: softmax", f"top{k}")
        return percent if found is None else f"{percent} ({tables.points(found.difference)})"

    rows = [(cell.name, *(text(cell, k) for k in plan.KS)) for cell in cells]
    return [*table(["trained for", *(f"top-{k}" for k in plan.KS)], rows), *_diagonal(evidence, name, means)]


def _diagonal(evidence: Evidence, name: str, means: Mapping[tuple[str, int], float]) -> list[str]:
    """Whether a single k is the best of the single ones at its own k, and what it gains on k = 1 there."""
    found = {k: rule.difference(evidence.sets[name], f"q2: {{{k}}}", "q2: {1}", f"top{k}") for k in plan.KS[1:]}
    tested = rule.corrected({k: one for k, one in found.items() if one is not None})
    told = []
    for k in plan.KS:
        column = {other: means[f"q2: {{{other}}}", k] for other in plan.KS if (f"q2: {{{other}}}", k) in means}
        if len(column) == len(plan.KS):
            best = max(column, key=column.__getitem__)
            gain = f"; {{{k}}} against {{1}} {difference_text(tested[k])}" if k in tested else ""
            told.append(f"At top-{k} the best single k is {best}{gain}.")
    return paragraph(" ".join(told)) if told else []


#: the tables of question 3, and what the names of their rows have in them
GROUPS = {
    "q": "q ",
    "ce_weight": "ce_weight ",
    "Temperature": "temperature ",
    "m": ", m ",
    "Operators": "operator ",
}


def _hyperparameters(evidence: Evidence, name: str) -> list[str]:
    summaries, each = evidence.sets[name], SETS[name]
    values = summaries.tuned.get(BASE, {}).get("values", {})
    usual: dict[str, Any] = {"q": 1.0, "temperature": 1.0, "m": "auto", **values}
    base = " \\| ".join(evidence.means(name, "q3: tuned"))
    lines = paragraph(f"As tuned ({_values_text(values) or 'not yet'}): {base}.")
    for word, mark in GROUPS.items():
        cells = [cell for cell in plan.cells("q3", name) if mark in cell.id]
        pairs = [
            pair
            for pair in plan.pairs("q3", name)
            if mark in pair[0] and pair[1] in ("q3: tuned", f"{pair[0].rpartition(' ')[0]} 64")
        ]
        tested, against = evidence.family(name, pairs), dict(pairs)
        rows = []
        for cell in cells:
            label = cell.name if word == "m" else cell.name.removeprefix(mark)
            if cell.id in summaries.head["chosen"]:
                label += f" (temperature {summaries.head['chosen'][cell.id]['temperature']:g})"
            elif cell.method == BASE and all(usual.get(field) == value for field, value in cell.changes):
                label += ", as tuned"
            found = [tested.get((cell.id, against.get(cell.id, ""), metric)) for metric in each.metrics]
            rows.append((label, *evidence.means(name, cell.id), *map(difference_text, found)))
        if rows:
            to = "to m = 64" if word == "m" else "to tuned"
            lines += table([word, "top-1", f"top-{each.k}", f"{to}, top-1", f"{to}, top-{each.k}"], rows)
    return lines


# Where it stops paying -----------------------------------------------------------------------------------------------------

#: two figures, two panels each, of one set
FIGURED = "completion"
FIGURES = {"pays-model-and-data": ("capacity", "data"), "pays-noise-and-context": ("noise", "context")}
AXES = {
    "capacity": "hidden units",
    "data": "share of the training data",
    "noise": "wrong training labels",
    "context": "tokens of context",
}
#: colours that the colour-blind can tell apart, text that stays text, and the same picture as the same file
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "anyk",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "svg.fonttype": "none",
}


def _stops(evidence: Evidence, name: str, images: Path | None) -> list[str]:
    each, lines = SETS[name], []
    for file, dimensions in FIGURES.items() if name == FIGURED else ():
        if images is not None:
            draw(evidence, name, dimensions, images / f"{file}.svg")
        told = " and ".join(f"the {AXES[dimension]}" for dimension in dimensions)
        lines += [f"![Points against softmax over {told}]({file}.svg)", ""]
    for dimension, levels in plan.levels(name).items():
        cells = {level: f"q4: {dimension} {level}, " for level in levels}
        pairs = {
            level: [(cell + one, cell + other) for one, other in (("gce", "softmax"), (BASE, "softmax"), (BASE, "gce"))]
            for level, cell in cells.items()
        }
        tested = evidence.family(name, [pair for own in pairs.values() for pair in own])
        rows = [
            (
                level,
                " \\| ".join(evidence.means(name, f"{cells[level]}softmax")),
                *(difference_text(tested.get((*pair, metric))) for pair in own for metric in each.metrics),
            )
            for level, own in pairs.items()
        ]
        head = [AXES[dimension], f"softmax, top-1 \\| top-{each.k}"]
        head += [f"{words}, top-{k}" for words in ("gce", "error", "error to gce") for k in each.ks]
        lines += table(head, rows)
    return lines


def _gains(evidence: Evidence, name: str, dimension: str, method: str, metric: str) -> list[tuple[int, Paired]]:
    """The differences to softmax over a dimension: the place of the level, and the difference."""
    cells = [f"q4: {dimension} {level}, " for level in plan.levels(name)[dimension]]
    found = [rule.difference(evidence.sets[name], cell + method, f"{cell}softmax", metric) for cell in cells]
    return [(place, one) for place, one in enumerate(found) if one is not None]


def draw(evidence: Evidence, name: str, dimensions: Sequence[str], path: Path) -> None:
    """A panel for each dimension: points against softmax of the error loss and of gce, at 1 and at K, with their intervals."""
    import matplotlib
    from matplotlib.figure import Figure

    k = SETS[name].k
    styles = (
        (BASE, 1, "#0072B2", "o", "-"),
        (BASE, k, "#D55E00", "s", "-"),
        ("gce", 1, "#56B4E9", "o", ":"),
        ("gce", k, "#E69F00", "s", ":"),
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        panels = figure.subplots(1, len(dimensions), sharey=True, squeeze=False)[0]
        for panel, dimension in zip(panels, dimensions, strict=True):
            panel.axhline(0, color="#888888", linewidth=1)
            for number, (method, each, colour, marker, line) in enumerate(styles):
                found = _gains(evidence, name, dimension, method, f"top{each}")
                panel.errorbar(
                    [place + 0.06 * (number - 1.5) for place, _ in found],
                    [100 * one.difference for _, one in found],
                    [100 * (one.difference - (one.difference if one.low is None else one.low)) for _, one in found],
                    label=f"{'error' if method == BASE else method}, top-{each}" if dimension == dimensions[0] else None,
                    color=colour,
                    marker=marker,
                    linestyle=line,
                    markersize=4,
                    capsize=2,
                )
            names = list(plan.levels(name)[dimension])
            panel.set_xticks(range(len(names)), names)
            panel.set_xlabel(AXES[dimension])
            panel.grid(axis="y", alpha=0.3)
        panels[0].set_ylabel("points against softmax")
        figure.legend(loc="outside upper center", ncols=len(styles), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


#: of the picture of the front page: what is drawn, and how it is called
DRAWN = {"gce": ("bounded, without k", "#888888", "s"), "error:lapsum mix": ("TopKErrorLoss({1: .5, K: .5})", "#0072B2", "o")}


def draw_front(evidence: Evidence, path: Path) -> None:
    """The sets from top to bottom, right labels first: points against softmax with their intervals, at 1 and at K."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [name for name in (*DECIDE, *NOISY) if evidence.sets[name].runs("main: error:lapsum mix")]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 0.9 + 0.32 * len(names)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for number, (panel, word) in enumerate(zip(panels, ("top-1", "top-5 (films: top-10)"), strict=True)):
            panel.axvline(0, color="#888888", linewidth=1)
            for offset, (method, (words, colour, marker)) in zip((0.13, -0.13), DRAWN.items(), strict=True):
                found = [
                    rule.difference(evidence.sets[name], f"main: {method}", "main: softmax", EVERY[name].metrics[number])
                    for name in names
                ]
                known = [(len(names) - 1 - place + offset, one) for place, one in enumerate(found) if one is not None]
                panel.errorbar(
                    [100 * one.difference for _, one in known],
                    [place for place, _ in known],
                    xerr=[100 * (one.difference - (one.difference if one.low is None else one.low)) for _, one in known],
                    label=words if number == 0 else None,
                    color=colour,
                    marker=marker,
                    linestyle="none",
                    markersize=4,
                    capsize=2,
                )
            panel.set_title(word, fontsize="medium")
            panel.grid(axis="x", alpha=0.3)
        panels[0].set_yticks(range(len(names)), [_short_title(name) for name in reversed(names)])
        figure.supxlabel("points against cross-entropy with the best label smoothing", fontsize="medium")
        figure.legend(loc="outside upper center", ncols=len(DRAWN), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


def _short_title(name: str) -> str:
    """As the picture calls a set.

    >>> _short_title("embeddings-mlp-wrong40")
    'features, small network, 40 % wrong'
    """
    source, _, wrong = name.partition("-wrong")
    titles = {
        "completion": "next token",
        "items": "next film",
        "pixels": "images of 16 px",
        "embeddings": "features, linear",
        "embeddings-mlp": "features, small network",
    }
    return titles[source] + (f", {wrong} % wrong" if wrong else "")


# Heads, claims, settings ---------------------------------------------------------------------------------------------------


def _heads(evidence: Evidence) -> list[str]:
    """One head for each k."""
    told = """A shared body with two heads: one for the first guess, one for the list. The first guess comes from the one, the
    rest from the other without it. Points against the mixture, one head with half of P_K on 1 and half on K, on the same
    seeds."""
    lines = ["## One head for each k", "", *paragraph(told)]
    beats: dict[str, list[bool]] = {}
    for name, found in evidence.heads.items():
        each, tested = SETS[name], {}
        for part, counted in found["contrasts"].items():
            contrasts = [Contrast(**{**one, "by_seed": tuple(one["by_seed"])}) for one in counted]
            pairs = {(part, one.method, one.metric): statistics.two_way(one) for one in contrasts}
            tested |= rule.corrected(pairs)
        rows = []
        for row, values in found["rows"].items():
            means = [mean_text([seed[metric] for seed in values["test"]]) for metric in each.metrics]
            cells = [tested.get((part, row, metric)) for part in ("test", "validation") for metric in each.metrics]
            rows.append((row, *means, *map(difference_text, cells)))
            *_, first, listed = cells
            if first is not None and listed is not None:
                keeps = first.paired.low is not None and first.paired.low > -rule.MARGIN
                beats.setdefault(row, []).append(keeps and listed.sure and listed.paired.difference > 0)
        head = ["", "top-1", f"top-{each.k}", *(f"{part}, top-{k}" for part in ("test", "validation") for k in each.ks)]
        lines += [*heading(name), *table(head, rows)]
    if beats and len(evidence.heads) == len(plan.HEADS):
        winners = [row for row, found in beats.items() if all(found)]
        outcome = f"{' and '.join(winners)} beats" if winners else "no row beats"
        lines += paragraph(f"By the rule of `evidence/pays/heads.py`, on validation: {outcome} the mixture on both sets.")
    return lines


def claims(name: str) -> list[tuple[str, str, str, str]]:
    """What the paper says that the runs of a set can tell: the claim, what is expected, and the rows, by their purposes."""
    found = []
    k, methods, operators = SETS[name].k, SETS[name].methods, ("ksubset", "lapsum", "splitter")
    for operator in operators:
        one, other = f"error:{operator} pure", f"error:{operator} mix"
        if one in methods and other in methods:
            found.append((f"pure top-{k} costs top-1 ({operator})", "less top-1", f"main: {one}", f"main: {other}"))
    if name in plan.QUESTIONS["q2"][0]:
        mixture = f"q2: {{1: .5, {k}: .5}}"
        found.append(("a distribution over k against k = 1", "more of both", mixture, "q2: {1}"))
        found.append((f"a distribution over k against k = {k}", "more of both", mixture, f"q2: {{{k}}}"))
        found.append(("1..5 against k = 1", "more of both", "q2: 1..5", "q2: {1}"))
    made = {cell.id for cell in plan.cells("q3", name)}
    sorts = [("splitter networks match full sorting", "same", "splitter", "bitonic")]
    sorts += [(f"splitter networks beat {other}", "more", "splitter", other) for other in ("neuralsort", "softsort")]
    sorts.append(("SoftSort beats NeuralSort", "more", "softsort", "neuralsort"))
    asked = [(text, expected, f"q3: operator {one}", f"q3: operator {other}") for text, expected, one, other in sorts]
    for operator in operators:
        for m in ("16", "256", "all"):
            size = f"q3: {operator}, m"
            asked.append((f"m {m} against 64 ({operator})", "little", f"{size} {m}", f"{size} 64"))
    return [*found, *(claim for claim in asked if set(claim[2:]) <= made)]


def _claims(evidence: Evidence) -> list[str]:
    told = """From the runs above: points of the first against the second, p after Holm over a set's table. The paper speaks of
    its own loss, -log T: see [its study](paper-loss.md)."""
    lines = ["## The paper's claims, with the bounded form", "", *paragraph(told)]
    for name, each in SETS.items():
        listed = claims(name)
        tested = evidence.family(name, [(one, other) for *_, one, other in listed])
        rows = [
            (text, expected, *(difference_text(tested.get((one, other, metric))) for metric in each.metrics))
            for text, expected, one, other in listed
            if (one, other, "top1") in tested
        ]
        if rows:
            lines += [*heading(name), *table(["claim", "expected", "top-1", f"top-{each.k}"], rows, left=2)]
    return lines


def _settings(evidence: Evidence) -> list[str]:
    lines = ["## How it was measured", ""]
    for name, each in EVERY.items():
        summaries = evidence.sets[name]
        data = summaries.data
        if not data:
            lines.append(f"- **{each.title}** (`{name}`): no run yet.")
            continue
        told = ", ".join(f"{field.replace('_', ' ')} {_field_text(value)}" for field, value in each.fields.items())
        seconds = sum(line.seconds for line in summaries.lines.values())
        lines.append(
            f"- **{each.title}** (`{name}`): {data['classes']:,} classes, {data['train']:,} training, {data['validation']:,} "
            f"validation, {data['test']:,} test examples; {told}. Tuning: {each.budget} points at full length for each method. "
            f"{len(summaries.lines)} runs, {tables.duration(seconds)}."
        )
    lines += ["", *paragraph("What was tuned, on validation (the mean of top-1 and top-K):")]
    rows: list[Sequence[object]] = []
    for name, summaries in evidence.sets.items():
        for method, found in sorted(summaries.tuned.items(), key=lambda item: list(METHODS).index(item[0])):
            if found.get("failed"):
                rows.append((name, method, "every run failed", "–", "–", found["tries"]))
                continue
            ended = "budget" if found["capped"] else "; ".join(found["bounds"]) or "inside"
            rows.append((name, method, _values_text(found["values"]), tables.percent(found["score"]), ended, found["tries"]))
    return [*lines, *table(["set", "method", "tuned", "validation", "the best point lies", "tries"], rows, left=3)]


def _values_text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in values.items())


def _field_text(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(map(str, value)) or "none"
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    evidence = Evidence()
    draw_front(evidence, ROOT / "docs" / "images" / "evidence.svg")
    TABLES.joinpath("pays.md").write_text(page(evidence, TABLES), encoding="utf-8")
    for path, text in pages(ROOT, evidence).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
