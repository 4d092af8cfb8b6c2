"""report.html: one page that works offline. Its first screen says what the terminal says."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2

from anyk.lab import plots, snippet, verdict
from anyk.lab.findings import SHARES, Findings, Method
from anyk.lab.tune import COARSE

SHOWN_CLASSES = 20


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("anyk.lab"), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"title": verdict.title, "percent": verdict.percent, "words": _words}
    return environment


def render(found: Findings) -> str:
    """The page."""
    others = [metric for metric in found.metrics if metric not in found.judged and metric != "cross_entropy"]
    use = found.chosen if found.decided else found.picked
    ordered = [use, *(method for method in found.losses if method is not use)]
    rival = found.picked if found.picked is not found.baseline else next((one for one in found.losses[1:] if one.runs), None)
    return (
        _environment()
        .get_template("report.html")
        .render(
            found=found,
            headline=verdict.headline(found),
            sentences=verdict.sentences(found),
            notes=verdict.notes(found),
            others=others,
            cells={(method.name, metric): _cell(found, method, metric) for method in found.methods for metric in found.metrics},
            codes=[
                (method.name, snippet.code(method.config, int(found.data["classes"])))
                for method in ordered
                if method.config is not None and method.runs
            ],
            picture=plots.accuracies(found),
            learned=[_learned(method) for method in found.methods if method.runs],
            guesses=[(method.name, counts) for method in found.methods if (counts := found.guesses_for(method))],
            shares=SHARES,
            rival="" if rival is None else rival.name,
            classes=[] if rival is None else found.by_class(rival, found.judged[0])[:SHOWN_CLASSES],
            grids=[grid for method in found.losses if (grid := _grid(method))],
        )
    )


def _cell(found: Findings, method: Method, metric: str) -> dict[str, str]:
    mean, std, one = method.mean(metric), method.std(metric), found.differences.get((method.name, metric))
    cell = {"value": "–" if mean is None else verdict.percent(mean), "std": "" if not std else verdict.percent(std)}
    difference, interval, p = verdict.difference_words(one) if one is not None else ("", "", "")
    significant = one is not None and one.p_holm is not None and one.p_holm < found.level
    effect = ("better" if one is not None and one.difference > 0 else "worse") if significant else ""
    return {**cell, "difference": difference, "interval": interval, "p": p, "effect": effect}


def _learned(method: Method) -> list[str]:
    """A method's accuracy in the three parts, and its time."""
    found = [method.mean("top1", "train"), method.mean("top1", "validation"), method.mean("top1"), method.mean("macro_top1")]
    seconds = sum(run.seconds for run in method.runs) / len(method.runs)
    return [method.name, *("–" if one is None else verdict.percent(one) for one in found), f"{seconds:.1f}" if seconds else "–"]


def _grid(method: Method) -> dict[str, Any] | None:
    """The coarse stage of the tuning, by learning rate and by what else was tried."""
    scores: dict[tuple[float, str], float] = {}
    for trial in method.trials:
        if trial.split == 0 and trial.score is not None and trial.length <= 2 * COARSE:
            scores[trial.point["learning_rate"], _setting(trial.point)] = trial.score
    if not scores:
        return None
    rates, settings = sorted({rate for rate, _ in scores}), list(dict.fromkeys(setting for _, setting in scores))
    top = max(scores.values())
    rows = []
    for rate in rates:
        row = []
        for setting in settings:
            score = scores.get((rate, setting))
            share = 0 if score is None else max(0, round(100 * (1 - (top - score) / 0.05)))
            row.append(("" if score is None else f"{100 * score:.1f}", share))
        rows.append((f"{rate:g}", row))
    chosen = "" if method.config is None else f"learning rate {method.config.learning_rate:g}"
    tried = {name for trial in method.trials for name in trial.point if name != "learning_rate"}
    values = [f"{name.replace('_', ' ')} {getattr(method.config, name):g}" for name in sorted(tried)]
    return {"name": method.name, "columns": settings, "rows": rows, "chosen": ", ".join([chosen, *values])}


def _setting(point: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in point.items() if name != "learning_rate") or "usual"
    )


def _words(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_words(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value))
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return str(value)
