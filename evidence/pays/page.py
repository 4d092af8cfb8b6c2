"""docs/pays.md: where a top-k loss pays, from the kept summaries alone; and what the README quotes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from anyk.lab import figures, statistics, tables
from anyk.lab.statistics import Paired
from layout import escaped, lines_of, paragraph
from pays import plan, rule
from pays.kept import SUMMARIES, Kept
from pays.plan import BASE, DECIDE, METHODS, SETS, Set
from pays.rule import Tested

RUN = "python evidence/pays/run.py"
COMMAND = f"{RUN} --data embeddings=FOLDER items=FILE pixels=FILE.npz --runs RUNS --jobs 2"
PLACES = {
    "items": "items=FILE",
    "pixels": "pixels=FILE.npz",
    **dict.fromkeys(("embeddings", "embeddings-mlp"), "embeddings=FOLDER"),
}
PLACE = re.compile(r"(?<=<!-- pays: )([\w -]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
#: the README's table, and how it calls them
SHOWN = {
    "plain": "softmax without smoothing",
    "gce": "generalised cross-entropy",
    "error:lapsum mix": "`TopKErrorLoss({1: .5, K: .5})`",
    BASE: "`TopKErrorLoss({1: .5, K: .5}, KSubset())`",
    "error:ksubset pure": "`TopKErrorLoss({K: 1}, KSubset())`",
    "splitter mix": "`TopKCrossEntropyLoss({1: .5, K: .5})`, the paper's",
}

INTRODUCTION = paragraph(
    """Written by `make evidence` from the run summaries in `evidence/summaries`; do not edit. What is asked, how everything is
    tuned and the rule for the default were written down before the runs, in `evidence/pays/plan.py`. A run is found by its
    config, so this goes on where it stopped; `status` in place of the options says what is missing:"""
)
READING = paragraph(
    """*softmax* has its learning rate and its label smoothing tuned: what the others must beat. *plain* is softmax without
    smoothing. *gce* is bounded as the error losses are, but knows no k. *error* is `TopKErrorLoss`, the names without it are
    the paper's `TopKCrossEntropyLoss`; *softmax_at_k* is SL@K as published, which pushes targets far behind away and so does
    not learn from scratch here; *mix* has half of P_K on 1 and half on K, *pure* has all of it on K. K, the list that
    is looked at, is 5; for items 10. Accuracies are percent of the test examples. Differences are points and, in the tables
    of a set, test examples, on the same seeds, with the two-way 95 % interval over seeds and examples; p after Holm over
    the methods and both k of a set, for softmax and for gce each."""
)
EXPLORED = paragraph(
    """Three fresh seeds, 11 to 13, for each row: this is for finding out, and nothing is decided by it. p after Holm over a
    table."""
)
RULE = paragraph(
    f"""The rule for the default, written down before the runs: over the four sets, the two-way 95 % interval of the top-1
    difference lies above -{100 * rule.MARGIN:g} points on each, top-k (5; 10 for items) is gained on at least three with
    p < .01 after Holm against softmax with tuned smoothing, and the mean of both is not below gce's (over the four sets
    together). If nothing passes, the best by the mean of both stays the default; that mean is over the sets that all
    candidates have, in points against softmax."""
)
WHICH_K = paragraph(
    f"""The tuned `{BASE}` with another P_K and nothing else changed, measured at every k. If the loss does
    what it says, a single k is the best of its own column. Percent, and in brackets points against softmax; bold: the best
    of a column."""
)
KNOBS = paragraph(
    f"""The tuned `{BASE}` with one hyperparameter changed: points against it as tuned. m: points against m = 64, with
    the tuned values of each operator. Operators: each at the best of the temperatures
    {", ".join(f"{value:g}" for value in plan.OPERATOR_TEMPERATURES)} on validation, all else as tuned for KSubset. A ce_weight
    that falls does so linearly over the run; ce_weight 1 is softmax with the cross-entropy's smoothing."""
)
STOPS = paragraph(
    f"""softmax, gce and `{BASE}`, each as tuned, on the embeddings with the best of half, once and twice its tuned rate on
    validation, at every level. Points against softmax at the same level."""
)
HEADS = paragraph(
    """A shared body with two heads: one for the first guess, one for the list. The first guess comes from
    the one, the rest from the other without it. Points against the mixture, one head with half of P_K on 1 and half on K, on
    the same seeds."""
)
CLAIMS = paragraph(
    """From the runs above: points of the first against the second, p after Holm over a set's table. The
    paper speaks of its own loss, -log T: see [results](results.md) for that."""
)


def title(method: str, k: int | str = "K") -> str:
    """How a method of the main table is written.

    >>> title("error:ksubset mix", 5), title("lapsum pure"), title("softmax")
    ('error:ksubset {1: .5, 5: .5}', 'lapsum {K: 1}', 'softmax')
    """
    name, space, word = method.partition(" ")
    return f"{name} {{1: .5, {k}: .5}}" if word == "mix" else f"{name} {{{k}: 1}}" if space else name


def command(part: str, name: str) -> str:
    """What to type for the runs of a part on a set."""
    data = f" --data {PLACES[name]}" if name in PLACES else ""
    return f"{RUN}{data} --runs RUNS --only {part} --on {name}"


def heading(name: str) -> list[str]:
    """The heading of a set."""
    words = SETS[name].title
    return [f"### {words[0].upper()}{words[1:]}", ""]


class Evidence:
    """The summaries of all sets."""

    def __init__(self, folder: Path = SUMMARIES) -> None:
        self.sets = {name: Kept(each, folder) for name, each in SETS.items()}
        paths = {name: folder / f"pays-{name}-heads.json" for name in SETS}
        self.heads: dict[str, Any] = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}

    def values(self, name: str, purpose: str, metric: str) -> list[float]:
        """A test metric over the seeds; empty where there is no run."""
        return list(self.sets[name].values(purpose, metric).values())


def page(evidence: Evidence, images: Path | None = None) -> str:
    """The whole of docs/pays.md. Figures are drawn to ``images`` if it is given."""
    lines = [
        "# Where it pays",
        "",
        *paragraph(sentence(evidence)),
        "",
        *INTRODUCTION,
        "",
        f"    {COMMAND}",
        "",
        *_main(evidence),
        *_rule(evidence),
        *_asked(evidence, "q2", "Which k gains where", WHICH_K, _which_k),
        *_asked(evidence, "q3", "Knobs, one at a time", KNOBS, _hyperparameters),
        *_asked(evidence, "q4", "Where it stops paying", STOPS, partial(_stops, images=images)),
        *_heads(evidence),
        *_claims(evidence),
        *_settings(evidence),
    ]
    return "\n".join(lines).rstrip() + "\n"


# The answer ----------------------------------------------------------------------------------------------------------------


def sentence(evidence: Evidence) -> str:
    """What came out, in a sentence or two."""
    judged = rule.judge(evidence.sets)
    chosen = rule.default(judged)
    if chosen is None:
        open_still = [SETS[name].title for name in DECIDE if not _complete(evidence, name, (*plan.COMPARED,))]
        told = f"no complete runs yet of {'; '.join(open_still)}" if open_still else "some methods are not measured yet"
        return f"**Not decided yet**: {told}."
    rule_words = "no top-1 lost on any of the four sets, the list gained on three"
    if chosen.passes:
        told = [f"**`{chosen.method}` passes the rule that was set before the runs**: {rule_words}."]
    else:
        told = [f"**No loss passes the rule that was set before the runs**: {rule_words}."]
    quiet = []
    for name in DECIDE:
        found, k = rule.main_differences(evidence.sets[name], "softmax"), SETS[name].k
        sure = {
            (method, each): found[method, each].paired.difference
            for method in SHOWN
            for each in (1, k)
            if "TopK" in SHOWN[method] and (method, each) in found and _sure(found[method, each])
        }
        words = [
            f"{_loss(method, k)} {'gains' if gain > 0 else 'loses'} {100 * abs(gain):.2f} points of top-{each}"
            for (method, each), gain in sure.items()
        ]
        if words:
            told.append(f"On {SETS[name].title}, {', '.join(words)}.")
        else:
            quiet.append(SETS[name].title)
    if quiet:
        told.append(f"No sure difference: {'; '.join(quiet)}.")
    return " ".join(told)


def _loss(method: str, k: int) -> str:
    """What is typed for a method of the README's table.

    >>> _loss("error:ksubset mix", 10)
    '`TopKErrorLoss({1: .5, 10: .5}, KSubset())`'
    """
    return SHOWN[method].partition(", the")[0].replace("K:", f"{k}:")


def _has(evidence: Evidence, name: str, method: str) -> bool:
    return (method, 1) in rule.main_differences(evidence.sets[name], "softmax")


def _both(evidence: Evidence, name: str, method: str, against: str = "softmax") -> str:
    found = rule.main_differences(evidence.sets[name], against)
    pair = [found.get((method, k)) for k in (1, SETS[name].k)]
    return " | ".join("–" if one is None else _points(one) for one in pair)


def _points(one: Tested) -> str:
    """A difference in points; bold where it is sure by the rule's level."""
    words = tables.points(one.paired.difference)
    return f"**{words}**" if _sure(one) else words


def _sure(one: Tested) -> bool:
    return one.p is not None and one.p < rule.SURE


def _complete(evidence: Evidence, name: str, methods: Sequence[str]) -> bool:
    each = SETS[name]
    return all(len(evidence.sets[name].runs(f"main: {method}")) >= len(each.seeds) for method in methods)


def overview(evidence: Evidence, methods: Mapping[str, str], sets: Sequence[str] = DECIDE) -> list[str]:
    """The sets side by side: softmax in percent, the others, as they are called, as points against it, top-1 | top-K."""
    rows = []
    softmax = []
    for name in sets:
        means = [evidence.values(name, "main: softmax", f"top{k}") for k in (1, SETS[name].k)]
        softmax.append(" \\| ".join(tables.percent(statistics.mean(one)) for one in means) if all(means) else "–")
    rows.append(("softmax, tuned smoothing, %", *softmax))
    for method, words in methods.items():
        cells = [_both(evidence, name, method).replace("|", "\\|") if _has(evidence, name, method) else "–" for name in sets]
        rows.append((words, *cells))
    return lines_of(["top-1 \\| top-K", *(SETS[name].title for name in sets)], rows)


def fragment(evidence: Evidence) -> str:
    """What the README quotes."""
    if not any(_has(evidence, name, BASE) for name in DECIDE):
        return f"Not measured yet: `{COMMAND} --only main`"
    return "\n".join(
        [
            *overview(evidence, SHOWN),
            "",
            *paragraph(
                """Points against softmax with tuned learning rate and label smoothing; bold: p < .01 after Holm, over seeds and
                test examples. All methods, intervals and the differences to gce: [where it pays](docs/pays.md)."""
            ),
        ]
    )


def diagonal(evidence: Evidence, name: str = "completion") -> str:
    """What the guide quotes: the points that P_K brings at each k."""
    rows = []
    for cell in plan.cells("q2", name)[2:]:
        found = [rule.difference(evidence.sets[name], cell.id, "q2: softmax", f"top{k}") for k in plan.KS]
        rows.append((f"`{cell.name}`", *("–" if one is None else tables.points(one.difference) for one in found)))
    return "\n".join(lines_of(["P_K", *(f"top-{k}" for k in plan.KS)], rows))


QUOTES: Mapping[str, Callable[[Evidence], str]] = {"main": fragment, "sentence": sentence, "which k": diagonal}


def quoted(text: str, evidence: Evidence, guide: bool = False) -> str:
    """A page with what stands between its ``<!-- pays: NAME -->`` and ``<!-- end -->`` filled in; links are the README's, or
    those of a page of the guide."""

    def filled(place: re.Match[str]) -> str:
        words = QUOTES[place[1]](evidence)
        return f"{place[1]}{place[2]}\n{words.replace('(docs/', '(') if guide else words}\n\n"

    return PLACE.sub(filled, text)


def pages(root: Path, evidence: Evidence) -> dict[Path, str]:
    """The README and the pages of the guide, with what they quote filled in."""
    paths = {root / "README.md": False, **dict.fromkeys(sorted((root / "docs").glob("*.md")), True)}
    return {path: quoted(path.read_text(encoding="utf-8"), evidence, guide) for path, guide in paths.items()}


# Main table ----------------------------------------------------------------------------------------------------------------


def _main(evidence: Evidence) -> list[str]:
    lines = [
        "## Main table",
        "",
        *READING,
        "",
        *overview(evidence, {name: title(name) for name in METHODS if name != "softmax"}),
        "",
    ]
    lines += [*paragraph("Bold: p < .01 after Holm against softmax. Each set with its intervals, and against gce:"), ""]
    for name, each in SETS.items():
        lines += heading(name)
        kept = evidence.sets[name]
        there = [method for method in each.methods if kept.runs(f"main: {method}")]
        if not there:
            lines += [*_nothing("main", name)]
            continue
        lines += [*_set_table(evidence, each, there), ""]
        fewer: dict[int, list[str]] = {}
        for method in each.methods:
            if (seeds := len(kept.runs(f"main: {method}"))) < len(each.seeds):
                fewer.setdefault(seeds, []).append(method)
        if fewer:
            told = "; ".join(f"{seeds} of {len(each.seeds)} seeds: {', '.join(found)}" for seeds, found in fewer.items())
            lines += [*paragraph(f"Missing. {told}."), "", f"    {command('main', name)}", ""]
    return lines


def _set_table(evidence: Evidence, each: Set, methods: Sequence[str]) -> list[str]:
    kept = evidence.sets[each.name]
    found = {control: rule.main_differences(kept, control) for control in ("softmax", "gce")}
    ks, rows = (1, each.k), []
    for method in methods:
        purpose = f"main: {method}"
        cells = [_mean(evidence.values(each.name, purpose, f"top{k}")) for k in ks]
        cells += [_told(found[control].get((method, k)), hits=True) for control in found for k in ks]
        diverged = sum(not line.test for line in kept.runs(purpose).values())
        seeds = f"{len(kept.runs(purpose))}" + (f" ({diverged} diverged)" if diverged else "")
        rows.append((title(method, each.k), *cells, seeds))
    head = ["", "top-1", f"top-{each.k}", *(f"to {control}, top-{k}" for control in found for k in ks), "seeds"]
    return lines_of(head, rows)


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "–"
    spread = statistics.std(values)
    return tables.percent(statistics.mean(values)) + ("" if spread is None else f" ± {tables.percent(spread)}")


def _told(one: Tested | None, hits: bool = False) -> str:
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


def _rule(evidence: Evidence) -> list[str]:
    judged = rule.judge(evidence.sets)
    rows = []
    for one in judged:
        word = {True: "passes", False: "no", None: "open"}[one.passes]
        mean = "–" if one.mean is None else tables.points(one.mean)
        rows.append((title(one.method), word, "; ".join(one.reasons) or "–", ", ".join(one.gained) or "–", mean))
    head = ["candidate", "rule", "why", "list gained on", "mean of both"]
    chosen = rule.default(judged)
    outcome = "Open." if chosen is None else f"By the rule the default is `{chosen.method}`."
    return ["## The default", "", *RULE, "", *lines_of(head, rows, left=4), "", outcome, ""]


# Questions -----------------------------------------------------------------------------------------------------------------


def _nothing(question: str, name: str) -> list[str]:
    return [f"No run yet: `{command(question, name)}`", ""]


def _incomplete(evidence: Evidence, question: str, name: str) -> list[str]:
    """What is missing of a question, if anything is."""
    cells = plan.cells(question, name)
    missing = [cell.name for cell in cells if len(evidence.sets[name].runs(cell.id)) < len(cell.seeds)]
    if not missing:
        return []
    listed = f"{', '.join(missing[:8])}{' and more' if len(missing) > 8 else ''}"
    return [
        *paragraph(f"Missing: {len(missing)} of {len(cells)} rows ({listed})."),
        "",
        f"    {command(question, name)}",
        "",
    ]


def _any(evidence: Evidence, question: str, name: str) -> bool:
    return any(evidence.sets[name].runs(cell.id) for cell in plan.cells(question, name))


def _asked(
    evidence: Evidence, question: str, title: str, told: Sequence[str], answer: Callable[[Evidence, str], list[str]]
) -> list[str]:
    """The section of a question: what is asked, and for each set the answer, as far as there are runs."""
    lines = [f"## {title}", "", *told, "", *EXPLORED, ""]
    for name in plan.QUESTIONS[question][0]:
        lines += heading(name)
        if _any(evidence, question, name):
            lines += [*answer(evidence, name), *_incomplete(evidence, question, name)]
        else:
            lines += _nothing(question, name)
    return lines


def _which_k(evidence: Evidence, name: str) -> list[str]:
    kept, cells = evidence.sets[name], plan.cells("q2", name)
    means = {
        (cell.id, k): statistics.mean(values)
        for cell in cells
        for k in plan.KS
        if (values := evidence.values(name, cell.id, f"top{k}"))
    }
    rows = []
    for cell in cells:
        row = [cell.name]
        for k in plan.KS:
            own = means.get((cell.id, k))
            if own is None:
                row.append("–")
                continue
            best = own == max(value for (other, each), value in means.items() if each == k)
            percent = f"**{tables.percent(own)}**" if best else tables.percent(own)
            found = rule.difference(kept, cell.id, "q2: softmax", f"top{k}")
            row.append(percent if found is None else f"{percent} ({tables.points(found.difference)})")
        rows.append(row)
    return [*lines_of(["trained for", *(f"top-{k}" for k in plan.KS)], rows), "", *_diagonal(evidence, name, means)]


def _diagonal(evidence: Evidence, name: str, means: Mapping[tuple[str, int], float]) -> list[str]:
    """Whether a single k is the best of the single ones at its own k, and what it gains on k = 1 there."""
    found = {k: rule.difference(evidence.sets[name], f"q2: {{{k}}}", "q2: {1}", f"top{k}") for k in plan.KS[1:]}
    tested = {k: one for k, one in found.items() if one is not None}
    corrected = dict(zip(tested, statistics.holm([one.p for one in tested.values()]), strict=True))
    told = []
    for k in plan.KS:
        column = {other: means[f"q2: {{{other}}}", k] for other in plan.KS if (f"q2: {{{other}}}", k) in means}
        if len(column) == len(plan.KS):
            best = max(column, key=column.__getitem__)
            gain = f"; {{{k}}} against {{1}} {_told(Tested(tested[k], corrected[k]))}" if k in tested else ""
            told.append(f"At top-{k} the best single k is {best}{gain}.")
    return [*paragraph(" ".join(told)), ""] if told else []


GROUPS = {
    "q": "q ",
    "ce_weight": "ce_weight ",
    "Temperature": "temperature ",
    "m": ", m ",
    "Operators": "operator ",
}


def _hyperparameters(evidence: Evidence, name: str) -> list[str]:
    kept, k = evidence.sets[name], SETS[name].k
    values = kept.tuned.get(BASE, {}).get("values", {})
    tuned = ", ".join(f"{hyperparameter.replace('_', ' ')} {value:g}" for hyperparameter, value in values.items())
    base = " \\| ".join(_mean(evidence.values(name, "q3: tuned", f"top{each}")) for each in (1, k))
    lines = [*paragraph(f"As tuned ({tuned or 'not yet'}): {base}."), ""]
    for word, mark in GROUPS.items():
        cells = [cell for cell in plan.cells("q3", name) if mark in cell.id]
        if not cells:
            continue
        pairs = [
            pair
            for pair in plan.pairs("q3", name)
            if mark in pair[0] and pair[1] in ("q3: tuned", f"{pair[0].rpartition(' ')[0]} 64")
        ]
        tested = rule.family(kept, pairs, ["top1", f"top{k}"])
        against = dict(pairs)
        rows = []
        for cell in cells:
            label = cell.name if word == "m" else cell.name.removeprefix(mark)
            if cell.id in kept.head["chosen"]:
                label += f" (temperature {kept.head['chosen'][cell.id]['temperature']:g})"
            elif _is_tuned(cell, values):
                label += ", as tuned"
            means = [_mean(evidence.values(name, cell.id, f"top{each}")) for each in (1, k)]
            found = [tested.get((cell.id, against.get(cell.id, ""), f"top{each}")) for each in (1, k)]
            rows.append((label, *means, *map(_told, found)))
        to = "to m = 64" if word == "m" else "to tuned"
        lines += [*lines_of([word, "top-1", f"top-{k}", f"{to}, top-1", f"{to}, top-{k}"], rows), ""]
    return lines


def _is_tuned(cell: plan.Cell, values: Mapping[str, float]) -> bool:
    usual: dict[str, Any] = {"q": 1.0, "temperature": 1.0, "m": "auto", **values}
    return cell.method == BASE and all(usual.get(name) == value for name, value in cell.changes)


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


def _stops(evidence: Evidence, name: str, images: Path | None) -> list[str]:
    lines = []
    for file, dimensions in FIGURES.items() if name == FIGURED else ():
        if _drawable(evidence, name, dimensions):
            if images is not None:
                draw(evidence, name, dimensions, images / f"{file}.svg")
            told = " and ".join(f"the {AXES[dimension]}" for dimension in dimensions)
            lines += [f"![Points against softmax over {told}](images/{file}.svg)", ""]
    kept, k = evidence.sets[name], SETS[name].k
    for dimension, levels in plan.levels(name).items():
        pairs = [
            (f"q4: {dimension} {level}, {one}", f"q4: {dimension} {level}, {other}")
            for level in levels
            for one, other in (("gce", "softmax"), (BASE, "softmax"), (BASE, "gce"))
        ]
        tested = rule.family(kept, pairs, ["top1", f"top{k}"])
        rows = []
        for level in levels:
            own = [pair for pair in pairs if pair[0].startswith(f"q4: {dimension} {level}, ")]
            softmax = " \\| ".join(
                _mean(evidence.values(name, f"q4: {dimension} {level}, softmax", f"top{each}")) for each in (1, k)
            )
            rows.append((level, softmax, *(_told(tested.get((*pair, f"top{each}"))) for pair in own for each in (1, k))))
        head = [AXES[dimension], f"softmax, top-1 \\| top-{k}"]
        head += [f"{words}, top-{each}" for words in ("gce", "error", "error to gce") for each in (1, k)]
        lines += [*lines_of(head, rows), ""]
    return lines


def _gains(evidence: Evidence, name: str, dimension: str, method: str, metric: str) -> list[tuple[int, Paired]]:
    """The differences to softmax over a dimension: the place of the level, and the difference."""
    found = [
        rule.difference(evidence.sets[name], f"q4: {dimension} {level}, {method}", f"q4: {dimension} {level}, softmax", metric)
        for level in plan.levels(name)[dimension]
    ]
    return [(place, one) for place, one in enumerate(found) if one is not None]


def _drawable(evidence: Evidence, name: str, dimensions: Sequence[str]) -> bool:
    return all(len(_gains(evidence, name, dimension, BASE, "top1")) > 1 for dimension in dimensions)


def draw(evidence: Evidence, name: str, dimensions: Sequence[str], path: Path) -> None:
    """A panel for each dimension: points against softmax of the error loss and of gce, at 1 and at K, with their intervals."""
    import matplotlib
    from matplotlib.figure import Figure

    k = SETS[name].k
    styles = (
        (BASE, 1, figures.BLUE, "o", "-"),
        (BASE, k, figures.VERMILLION, "s", "-"),
        ("gce", 1, figures.SKY, "o", ":"),
        ("gce", k, figures.ORANGE, "s", ":"),
    )
    with matplotlib.rc_context(figures.PICTURE_STYLE):
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
        figures.save(figure, path)


# Heads, claims, settings ---------------------------------------------------------------------------------------------------


def _heads(evidence: Evidence) -> list[str]:
    """One head for each k."""
    lines = ["## One head for each k", "", *HEADS, ""]
    beats: dict[str, list[bool]] = {}
    for name in plan.HEADS:
        lines += heading(name)
        found, k = evidence.heads.get(name), SETS[name].k
        if found is None:
            data = f" --data {PLACES[name]}" if name in PLACES else ""
            lines += [f"No run yet: `python evidence/pays/heads.py{data} --runs RUNS --on {name}`", ""]
            continue
        tested = {part: _counted(found["contrasts"][part]) for part in ("validation", "test")}
        rows = []
        for row, values in found["rows"].items():
            means = [_mean([seed[f"top{each}"] for seed in values["test"]]) for each in (1, k)]
            differences = [_told(tested[part].get((row, f"top{each}"))) for part in ("test", "validation") for each in (1, k)]
            rows.append((row, *means, *differences))
            if (row, "top1") in tested["validation"]:
                first, listed = (tested["validation"][row, f"top{each}"] for each in (1, k))
                kept = first.paired.low is not None and first.paired.low > -rule.MARGIN
                gains = listed.p is not None and listed.p < rule.SURE and listed.paired.difference > 0
                beats.setdefault(row, []).append(kept and gains)
        head = ["", "top-1", f"top-{k}", *(f"{part}, top-{each}" for part in ("test", "validation") for each in (1, k))]
        lines += [*lines_of(head, rows), ""]
    if beats and all(len(found) == len(plan.HEADS) for found in beats.values()):
        winners = [row for row, found in beats.items() if all(found)]
        outcome = f"{' and '.join(winners)} beats" if winners else "no row beats"
        lines += [
            *paragraph(f"By the rule of `evidence/pays/heads.py`, on validation: {outcome} the mixture on both sets."),
            "",
        ]
    return lines


def _counted(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Tested]:
    """Contrasts as they were written down, as one family of tests: by row and metric."""
    found = {
        (str(one["method"]), str(one["metric"])): statistics.two_way(
            statistics.Contrast(**{**one, "by_seed": tuple(one["by_seed"])})
        )
        for one in rows
    }
    corrected = statistics.holm([one.p for one in found.values()])
    return {name: Tested(one, p) for (name, one), p in zip(found.items(), corrected, strict=True)}


def claims(name: str) -> list[tuple[str, str, str, str]]:
    """What the paper says that the runs of a set can tell: the claim, what is expected, and the rows, by their purposes."""
    found = []
    k, methods = SETS[name].k, SETS[name].methods
    for operator in ("ksubset", "lapsum", "splitter"):
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
    for operator in ("ksubset", "lapsum", "splitter"):
        for m in ("16", "256", "all"):
            size = f"q3: {operator}, m"
            asked.append((f"m {m} against 64 ({operator})", "little", f"{size} {m}", f"{size} 64"))
    return [*found, *(claim for claim in asked if set(claim[2:]) <= made)]


def _claims(evidence: Evidence) -> list[str]:
    lines = [
        "## The paper's claims, with the bounded form",
        "",
        *CLAIMS,
        "",
    ]
    for name in SETS:
        listed = claims(name)
        kept, k = evidence.sets[name], SETS[name].k
        tested = rule.family(kept, [(one, other) for *_, one, other in listed], ["top1", f"top{k}"])
        rows = [
            (escaped(text), expected, *(_told(tested.get((one, other, f"top{each}"))) for each in (1, k)))
            for text, expected, one, other in listed
            if (one, other, "top1") in tested
        ]
        if rows:
            lines += [*heading(name), *lines_of(["claim", "expected", "top-1", f"top-{k}"], rows, left=2), ""]
    return lines if len(lines) > 5 else [*lines, f"No run yet: `{COMMAND}`", ""]


def _settings(evidence: Evidence) -> list[str]:
    lines = ["## How it was measured", ""]
    for name, each in SETS.items():
        kept, fields = evidence.sets[name], dict(each.fields)
        if not kept.data:
            lines.append(f"- **{each.title}** (`{name}`): no run yet.")
            continue
        told = ", ".join(f"{field.replace('_', ' ')} {_word(value)}" for field, value in fields.items())
        data = kept.data
        hours = sum(line.seconds for line in kept.lines.values())
        lines.append(
            f"- **{each.title}** (`{name}`): {data['classes']:,} classes, {data['train']:,} training, {data['validation']:,} "
            f"validation, {data['test']:,} test examples; {told}. Tuning: {each.budget} points at full length for each method. "
            f"{len(kept.lines)} runs, {tables.duration(hours)}."
        )
    lines += ["", *paragraph("What was tuned, on validation (the mean of top-1 and top-K):"), ""]
    rows = []
    for name in SETS:
        for method, found in evidence.sets[name].tuned.items():
            if found.get("failed"):
                rows.append((name, method, "every run failed", "–", "–", found["tries"]))
                continue
            values = ", ".join(
                f"{hyperparameter.replace('_', ' ')} {value:g}" for hyperparameter, value in found["values"].items()
            )
            ended = "budget" if found["capped"] else "; ".join(found["bounds"]) or "inside"
            rows.append((name, method, values, tables.percent(found["score"]), ended, found["tries"]))
    rows.sort(key=lambda row: (list(SETS).index(str(row[0])), list(METHODS).index(str(row[1]))))
    head = ["set", "method", "tuned", "validation", "the best point lies", "tries"]
    return [*lines, *(lines_of(head, rows, left=3) if rows else ["Nothing yet."]), ""]


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(map(str, value)) or "none"
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
