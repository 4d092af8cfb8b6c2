"""results.json: a comparison written down and read back."""

import base64
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyk.lab import files
from anyk.lab.comparison.outcome import (
    ByClass,
    Comparison,
    Confusion,
    Example,
    Guess,
    Method,
    Moves,
    SeedRun,
    Try,
    chosen,
    decided,
    differences,
    measured,
    metrics,
    other_differences,
    others,
    picked,
)
from anyk.lab.comparison.verdict import notes, verdict
from anyk.lab.errors import Failure, LabError
from anyk.lab.run.config import Config
from anyk.lab.statistics import Contrast

FORMAT = 2


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The content of results.json: the raw outcome, and what was derived from it for readers without this library."""
    raw = dataclasses.asdict(comparison)
    for part in ("methods", "controls"):
        for method, fields in zip(getattr(comparison, part), raw[part], strict=True):
            fields["config"] = method.config.to_json()
    derived = {
        "verdict": verdict(comparison),
        "chosen": chosen(comparison).name if comparison.methods else None,
        "picked": picked(comparison).name if comparison.methods else None,
        "decided": decided(comparison),
        "notes": notes(comparison),
        "table": [
            {
                "method": method.name,
                "test": {
                    metric: {"mean": value.mean, "std": value.std, "seeds": len(value.values)}
                    for metric in (*metrics(comparison), *others(comparison))
                    if (value := measured(method, metric)) is not None
                },
                "difference": {
                    metric: {**dataclasses.asdict(difference.paired), "p_holm": difference.p}
                    for (name, metric), difference in {**differences(comparison), **other_differences(comparison)}.items()
                    if name == method.name
                },
            }
            for method in (*comparison.methods, *comparison.controls)
        ],
    }
    return _json_value({"format": FORMAT, **raw, "derived": derived})


def from_json(content: Mapping[str, Any], source: str = "results.json") -> Comparison:
    """The raw outcome, read back; what was derived is derived again."""
    if content.get("format") == 1:
        raise LabError(f"{source} is of an older version of anyk, which counted no test examples: run `anyk compare` again.")
    if content.get("format") != FORMAT:
        raise LabError(f"{source} has the format {content.get('format')!r}; this version reads format {FORMAT}.")
    try:
        by_class, moves = content["by_class"], content["moves"]
        return Comparison(
            data=content["data"],
            command=content["command"],
            settings=content["settings"],
            methods=tuple(_method(fields, source) for fields in content["methods"]),
            controls=tuple(_method(fields, source) for fields in content["controls"]),
            contrasts=tuple(_contrast(fields) for fields in content["contrasts"]),
            ks=tuple(content["ks"]),
            by_class=_by_class(by_class) if by_class is not None else None,
            moves=_moves(moves) if moves is not None else None,
            unreadable=tuple(content["unreadable"]),
            environment=content["environment"],
            failures=tuple(Failure(**failure) for failure in content["failures"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LabError(f"{source} is not the outcome of `anyk compare`: {type(error).__name__} {error}.") from None


def write(comparison: Comparison, file: str | Path) -> None:
    """Write results.json."""
    files.write_object(Path(file), to_json(comparison))


def read(file: str | Path) -> Comparison:
    """Read results.json."""
    return from_json(files.read_object(Path(file), "run `anyk compare` again"), str(file))


def _method(fields: Mapping[str, Any], source: str) -> Method:
    return Method(
        name=fields["name"],
        config=Config.from_json(fields["config"], source),
        tries=tuple(Try(**{**point, "scores": tuple(point["scores"])}) for point in fields["tries"]),
        runs=tuple(SeedRun(**{**run, "curve": tuple(run["curve"])}) for run in fields["runs"]),
        hyperparameter=fields["hyperparameter"],
        capped=fields["capped"],
        bounds=tuple(fields["bounds"]),
        longer=fields["longer"],
        same_length=fields["same_length"],
    )


def _contrast(fields: Mapping[str, Any]) -> Contrast:
    return Contrast(**{**fields, "by_seed": tuple(fields["by_seed"])})


def _by_class(fields: Mapping[str, Any]) -> ByClass:
    lists = {name: tuple(fields[name]) for name in ("seeds", "names", "examples")}
    hits = {side: {metric: tuple(counts) for metric, counts in fields[side].items()} for side in ("before", "after")}
    return ByClass(**{**fields, **lists, **hits, "confusions": tuple(Confusion(**pair) for pair in fields["confusions"])})


def _moves(fields: Mapping[str, Any]) -> Moves:
    examples = []
    for example in fields["examples"]:
        guesses = {side: tuple(Guess(**guess) for guess in example[side]) for side in ("before", "after")}
        image = base64.b64decode(example["image"]) if example["image"] is not None else None
        lists = {"ranks": tuple(example["ranks"]), "context": tuple(example.get("context", ()))}
        examples.append(Example(**{**example, **guesses, **lists, "image": image}))
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
