"""results.json: the outcome of a comparison for programs."""

import base64
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from anyk.lab.comparison.outcome import Comparison
from anyk.lab.comparison.verdict import notes, verdict

FORMAT = 2


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The content of results.json: the raw outcome, and what was derived from it for readers without this library."""
    raw = {field.name: getattr(comparison, field.name) for field in dataclasses.fields(Comparison)}
    found = comparison.differences
    derived = {
        "verdict": verdict(comparison),
        "chosen": comparison.choice.name if comparison.methods else None,
        "picked": comparison.picked.name if comparison.methods else None,
        "decided": comparison.decided,
        "notes": notes(comparison),
        "table": [
            {
                "method": method.name,
                "test": {
                    metric: {"mean": value.mean, "std": value.std, "seeds": len(value.values)}
                    for metric in (*comparison.metrics, *comparison.others)
                    if (value := method.measured(metric)) is not None
                },
                "guesses": next((one.guesses for one in comparison.coverages if one.method == method.name), None),
                "difference": {
                    metric: {**dataclasses.asdict(difference.paired), "p_holm": difference.p}
                    for (name, metric), difference in found.items()
                    if name == method.name
                },
            }
            for method in comparison.all_methods
        ],
    }
    return _json_value({"format": FORMAT, **raw, "derived": derived})


def _json_value(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists, images as base64, and null for numbers that JSON does not have."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
