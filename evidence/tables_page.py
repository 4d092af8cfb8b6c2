"""docs/results-tables.md: every sweep, every claim method by method, the tuned values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import claims
import study
from anyk import networks
from anyk.lab import statistics, tables
from anyk.lab.run.config import Config
from anyk.lab.run.loss_names import find
from claims import TITLES, Evidence, p_k_title
from layout import escaped, grid_table, lines_of, paragraph, section_table, shown, size_of, temperature_of, title_of, without
from study import Cell, cell


def page(evidence: Evidence) -> str:
    """The whole of docs/results-tables.md."""
    lines = [
        "# Results, all tables",
        "",
        *paragraph(
            """Written by `make evidence`, do not edit. What it comes to, and how it was measured, is in
            [the results](results.md). p is corrected by Holm's method over each table."""
        ),
        "",
        *_dropins(evidence),
        *_parts(evidence),
        *_p_k(evidence),
        *_alpha(evidence),
        *_sizes(evidence),
        *_collapse(evidence),
        *_temperature(evidence),
        *_choices(evidence),
        *_measured(evidence),
        *_tuned(evidence),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _dropins(evidence: Evidence) -> list[str]:
    lines = ["## Drop-ins", "", "Softmax's tuned config with another loss. Differences to softmax.", ""]
    for data in study.SETTINGS:
        table = section_table(
            evidence,
            study.section("dropin", data),
            lambda each: cell(each.data, "softmax"),
            {"operator": title_of, "temperature": temperature_of},
        )
        lines += shown(evidence, "dropin", data, table)
    rows = []
    for method in study.DROPINS:
        for value in study.CONSTANTS:
            words = []
            for data in study.SETTINGS:
                runs = list(evidence.runs(study.plain(cell(data, method, temperature=value))).values())
                score = study.score(runs) if len(runs) == 5 else None
                words.append("–" if score is None else f"{100 * score:.2f}")
            rows.append((TITLES[method], value, *words))
    lines += ["On validation, the mean of top-1 and top-5, seeds 1 to 5:", ""]
    return [*lines, *lines_of(["operator", "temperature", *study.SETTINGS], rows), ""]


def _parts(evidence: Evidence) -> list[str]:
    """The claims, method by method."""
    lines = [
        "## The claims, method by method",
        "",
        "Difference in points and p: one-sided for the claim, with Holm's correction within a claim of several cases.",
        "",
    ]
    rows = []
    for claim in claims.claims():
        judged = {data: claims.judge(claim, data, evidence).parts for data in claim.parts}
        names = dict.fromkeys(name for parts in judged.values() for name in parts)
        for number, name in enumerate(names):
            words = []
            for data in study.SETTINGS:
                found, p, word = judged.get(data, {}).get(name, (None, None, "–"))
                words.append(word if found is None else f"{100 * found.difference:+.2f}, {tables.p_text(p)}: {word}")
            rows.append((escaped(claim.text) if number == 0 else "", escaped(name), *words))
    return [*lines, *lines_of(["claim", "of", *study.SETTINGS], rows, left=4), ""]


def _p_k(evidence: Evidence) -> list[str]:
    p_ks = ("half", "quarter", "tenth", "fifth", "pure")
    lines = [
        "## Distributions",
        "",
        "Top-1 / top-5; in brackets the number of seeds where it is below 5. The layout of the paper's tables 3 and 4.",
        "",
    ]
    for data in study.SETTINGS:
        table = section_table(
            evidence,
            study.section("p_k", data),
            lambda each: cell(each.data, "softmax", seeds=each.seeds),
            {"method": title_of, "P_K": lambda each: p_k_title(each.p_k)},
        )
        head, *rest = shown(evidence, "p_k", data, table)
        lines += [
            head,
            "",
            *grid_table(evidence, data, p_ks, study.OPERATORS),
            "",
            "Against softmax, the P_K that are not among the main rows:",
            *rest,
        ]
    return lines


def _alpha(evidence: Evidence) -> list[str]:
    data = "embeddings"
    table = section_table(
        evidence,
        study.section("alpha", data),
        lambda each: cell(each.data, "softmax"),
        {"method": title_of, "P_K": lambda each: p_k_title(each.p_k)},
    )
    told = "P_K = [1 - α, 0, 0, 0, α]; α = 0 is softmax. The paper's figure 2, left."
    return ["## The weight of top-5", "", told, "", *shown(evidence, "alpha", data, table)]


def _sizes(evidence: Evidence) -> list[str]:
    lines = [
        "## The number of ranked classes, m",
        "",
        "On embeddings P_K = [.25, 0, 0, 0, .75], as in the paper's figure 2, right.",
        "",
    ]
    for data in study.SETTINGS:
        table = section_table(
            evidence,
            study.section("m", data),
            lambda each: without(each, "m"),
            {"method": title_of, "P_K": lambda each: p_k_title(each.p_k), "m": size_of},
        )
        shared = study.SETTINGS[data].config.m
        head, *rest = shown(evidence, "m", data, table)
        lines += [head, "", f"Differences to {f'm = {shared}' if shared else 'all classes'}.", *rest]
    return lines


TRUNCATION = paragraph(
    """With m < n the candidates of an example are the classes with its highest scores, and the target among them even where
    it stands far behind. While all scores are nearly equal, as at the start of a training from scratch, the cheapest way down
    is not to raise the target but to make all candidates equal: T_k is then k/m. The scores of all classes run together and the
    hidden units die. The softmax part, which sees all classes, works against it, the more the larger P_K(1) is. An "auto"
    temperature makes it worse: it shrinks with the scores, and the gradient grows. Whether and when a training recovers
    depends on the rest of the setting. Below, the splitter (logistic, temperature 1 unless it says auto) in the lab's own
    setting for glyphs, six epochs (300 classes, batches of 50, learning rate 2e-3, one cycle, one seed). *Spread* is the
    standard deviation of an example's scores, *alive* the share of hidden units that are not zero for the whole batch, *ratio*
    the norm of the top-k part's gradient over that of softmax (with respect to the scores, both unweighted)."""
)


def _collapse(evidence: Evidence) -> list[str]:
    lines = ["## Truncation from scratch", "", *TRUNCATION, ""]
    found = evidence.measured.get("collapse")
    if found is None:
        return [*lines, "Not measured: `python evidence/measure.py collapse`", ""]
    rows = []
    for row in found["rows"]:
        title = "[" + ", ".join(f"{p:g}".lstrip("0") or "0" for p in row["p_k"]) + "]"
        for place, step in enumerate(found["steps"]):
            seen = row["seen"]
            words = [
                f"{seen['spread'][place]:g}",
                f"{seen['alive'][place]:.2f}",
                f"{seen['ratio'][place]:g}",
                f"{100 * seen['top5'][place]:.0f} %",
            ]
            first = [title, str(row["m"] or "all"), str(row["temperature"])] if place == 0 else ["", "", ""]
            if step in (0, 100, found["steps"][-1]):
                rows.append((*first, step, *words))
    titles = ["P_K", "m", "temperature", "step", "spread", "alive", "ratio", "top-5 of the batch"]
    return [*lines, *lines_of(titles, rows), ""]


def _temperature(evidence: Evidence) -> list[str]:
    lines = [
        "## Temperature",
        "",
        'Multiples of the tuned one, and "auto"; P_K = [.5, 0, 0, 0, .5]. Differences to the tuned one.',
        "",
    ]
    for data in _with("temperature"):

        def value(each: Cell) -> str:
            tuned = evidence.tuning(each.data, each.method).best
            if dict(each.changes).get("temperature") == "auto":
                return "auto"
            return "" if tuned is None else f"{each.factor:g} × {tuned.temperature:g}"

        table = section_table(
            evidence,
            study.section("temperature", data),
            lambda each: replace(each, factor=1.0, changes=()),
            {"method": title_of, "temperature": value},
        )
        lines += shown(evidence, "temperature", data, table)
    return lines


def _with(name: str) -> list[str]:
    """The data sets that have a section."""
    return [data for data in study.SETTINGS if study.section(name, data)]


def _softmax_with(each: Cell) -> str:
    smoothing = dict(each.changes).get("label_smoothing")
    return f"label smoothing {smoothing:g}" if smoothing else f"learning rate × {each.rate:g}" if each.rate != 1 else ""


def _choices(evidence: Evidence) -> list[str]:
    """The small sweeps, all alike."""
    parts: list[tuple[str, str, str, Mapping[str, Callable[[Cell], Any]], Callable[[Cell], Cell], Sequence[str]]] = [
        (
            "swap",
            "Swap",
            "The splitter with logistic_art, tuned by itself, against logistic.",
            {"method": title_of, "P_K": lambda each: p_k_title(each.p_k)},
            lambda each: cell(each.data, "splitter", each.p_k),
            ("top1", "top5"),
        ),
        (
            "wires",
            "Where the classes enter a network",
            'P_K = [.5, 0, 0, 0, .5]. Differences to `wires="target"`.',
            {"method": title_of, "wires": lambda each: dict(each.changes).get("wires", "target")},
            lambda each: replace(each, changes=()),
            ("top1", "top5"),
        ),
        (
            "top1",
            "How the top-1 part is measured",
            'Differences to `top1="separate"`.',
            {
                "method": title_of,
                "P_K": lambda each: p_k_title(each.p_k),
                "top1": lambda each: dict(each.changes).get("top1", "separate"),
            },
            lambda each: replace(each, changes=()),
            ("top1", "top5"),
        ),
        (
            "noise",
            "Label noise",
            "A share of the training labels is replaced. Differences to softmax with the same noise.",
            {
                "method": title_of,
                "P_K": lambda each: p_k_title(each.p_k),
                "noise": lambda each: dict(each.changes).get("label_noise", 0.0),
            },
            lambda each: replace(each, method="softmax", p_k="softmax"),
            ("top1", "top5"),
        ),
        (
            "noisy",
            "Wrong labels, confirmed",
            """Softmax's config with one changed line and 40 % of the training labels replaced, on seeds that nothing was chosen
            by and another part of the data as validation. Written down before these runs: it pays if top-1 and top-5 are both
            significantly above softmax. Added when the embeddings had shown a gain: what softmax gains there by other small
            changes.""",
            {"operator": title_of, "temperature": temperature_of, "with": _softmax_with},
            lambda each: cell(each.data, "softmax", label_noise=0.4, **study.CONFIRMED),
            ("top1", "top5"),
        ),
        (
            "rates",
            "Softmax with other learning rates",
            """On the confirming seeds. Asked when half the rate had explained what wrong labels seemed to show: does another
            rate give softmax the top-5 gain of the drop-ins too?""",
            {"operator": title_of, "with": _softmax_with},
            lambda each: replace(each, rate=1.0),
            ("top1", "top5"),
        ),
        (
            "top20",
            "Top-10 and top-20 components",
            "On embeddings with m = 40. Differences to the method's own top-5 component.",
            {"method": title_of, "P_K": lambda each: p_k_title(each.p_k)},
            lambda each: each if each.method == "softmax" else replace(each, p_k="half"),
            ("top1", "top5", "top20"),
        ),
        (
            "epochs",
            "Longer training",
            "Twice the epochs, all else as tuned: what the settings leave to gain. Differences to the setting's own epochs.",
            {
                "method": title_of,
                "P_K": lambda each: p_k_title(each.p_k),
                "epochs": lambda each: dict(each.changes).get("epochs", study.SETTINGS[each.data].config.epochs),
            },
            lambda each: replace(each, changes=()),
            ("top1", "top5"),
        ),
    ]
    lines = []
    for name, title, told, fields, baseline, metrics in parts:
        lines += [f"## {title}", "", *paragraph(told), ""]
        for data in _with(name):
            table = section_table(evidence, study.section(name, data), baseline, fields, metrics)
            lines += shown(evidence, name, data, table)
    return lines


def _measured(evidence: Evidence) -> list[str]:
    lines = ["## Measured beside the runs", "", "### Sinkhorn's iterations over training", ""]
    found = evidence.measured.get("iterations")
    if found is None:
        lines += ["Not measured: `python evidence/measure.py iterations --data embeddings=FOLDER`", ""]
    else:
        lines += _iterations(found)
    rows: list[Sequence[object]] = []
    for n in (16, 100, 1000):
        for name, network in (
            ("splitter", networks.splitter(n, 5)),
            ("bitonic, cut to 5 outputs", networks.bitonic(n).top(5)),
            ("bitonic", networks.bitonic(n)),
        ):
            rows.append((name, n, 5, network.size, network.depth))
    titles = ["network", "classes", "k", "comparators", "layers"]
    lines += ["### What a network costs", "", *lines_of(titles, rows), ""]
    cost = evidence.measured.get("cost")
    if cost is None:
        lines += ["Time: not measured, `python evidence/measure.py cost`", ""]
    else:
        lines += ["Forward and backward of the loss, in turns in one process, one thread; the time of bitonic is 1:", ""]
        rows = [
            (f"{row['batch']}, {row['n']}, {row['m'] or 'all'}", f"{row['splitter']:.2f}", 1, f"{row['odd_even']:.2f}")
            for row in cost
        ]
        lines += [*lines_of(["batch, n, m", "splitter", "bitonic", "odd-even"], rows), ""]
    return lines


def _iterations(found: Mapping[str, Any]) -> list[str]:
    stages = found["stages"]
    lines = [
        f"Plain Sinkhorn iterations until every row sum is right to {found['tolerance']:g}, at most {found['most']} (mean over "
        f"{found['rows']} validation examples), and the error that {found['fixed']} iterations leave, with the head as it is "
        f"after so many epochs; tuned temperature {found['temperature']:g}, {len(found['seeds'])} seeds.",
        "",
    ]
    rows = []
    for place, stage in enumerate(stages):
        means = [statistics.mean([seed[name][place] for seed in found["seeds"]]) for name in ("iterations", "error", "spread")]
        rows.append((f"{stage:g}", f"{means[0]:.1f}", f"{means[1]:.2e}", f"{means[2]:.2f}"))
    titles = ["epochs", "iterations", "error after fixed iterations", "spread of the scores"]
    return [*lines, *lines_of(titles, rows, left=0), ""]


def _tuned(evidence: Evidence) -> list[str]:
    lines = ["## Tuned values", "", "The best of so many tries on validation.", ""]
    rows = []
    for data in study.SETTINGS:
        for method in (name for name in study.METHODS if name not in study.DROPINS):
            tuned = evidence.tuning(data, method)
            if tuned.best is None:
                rows.append((data, TITLES[method], "not tuned", "", len(tuned.tries)))
                continue
            best: Config = tuned.best
            warm = f"{best.temperature:g}" if find(best.loss).has_temperature else "–"
            rows.append((data, TITLES[method], f"{best.learning_rate:g}", warm, len(tuned.tries)))
    return [*lines, *lines_of(["data", "method", "learning rate", "temperature", "tries"], rows, left=2), ""]
