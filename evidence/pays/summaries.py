"""The files in evidence/summaries: what the repository keeps of the runs, so that no run folder is needed to write the page.

``pays-SET.jsonl``: a head (the shared config, the data, what was tuned and what was chosen), then a line for each run: what it
was for, in which fields its config differs from the shared one, its accuracies and its seconds. ``pays-SET-contrasts.json``:
a line for each pair of rows and each k, as :class:`anyk.lab.statistics.Contrast` counts them.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyk.lab.errors import LabError
from anyk.lab.files import write_atomically
from anyk.lab.run.config import Config
from anyk.lab.statistics import Contrast
from pays.plan import Set

SUMMARIES = Path(__file__).parents[1] / "summaries"
_DATA = ("kind", "classes", "train", "validation", "test", "fingerprint")


def own(config: Config, shared: Config) -> dict[str, Any]:
    """The fields in which a config differs from the shared one. A run is found by them, also when the lab gets more fields."""
    names = [name for name in shared.differences(config) if name not in ("data", "loss", "seed")]
    return {"loss": config.loss, "seed": config.seed, **{name: config.to_json()[name] for name in names}}


def key(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True)


@dataclass
class Line:
    """One run."""

    own: dict[str, Any]
    seconds: float = 0.0
    epochs: float = 0.0
    selected: float = 0.0
    test: dict[str, float] = field(default_factory=dict)
    """empty if the run was for the tuning, or diverged"""
    validation: dict[str, float] = field(default_factory=dict)
    """empty if it diverged"""
    purposes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return int(self.own["seed"])


class Summaries:
    """The summaries of one set. Several threads may add to them."""

    def __init__(self, each: Set, folder: Path = SUMMARIES) -> None:
        self.set, self.path = each, folder / f"pays-{each.name}.jsonl"
        self.contrasts_path = folder / f"pays-{each.name}-contrasts.json"
        self.head: dict[str, Any] = {"data": {}, "tuned": {}, "chosen": {}}
        self.lines: dict[str, Line] = {}
        self.contrasts: dict[tuple[str, str, str], Contrast] = {}
        self._guard = threading.RLock()
        if self.path.exists():
            first, *rest = self.path.read_text().splitlines()
            self.head |= json.loads(first)
            self.lines = {key(line.own): line for line in (Line(**json.loads(text)) for text in rest)}
        if self.contrasts_path.exists():
            for fields in json.loads(self.contrasts_path.read_text()):
                self._hold(Contrast(**{**fields, "by_seed": tuple(fields["by_seed"])}))

    @property
    def data(self) -> Mapping[str, Any]:
        """kind, classes, train, validation, test, fingerprint; empty before the first run."""
        return self.head["data"]

    @property
    def tuned(self) -> dict[str, dict[str, Any]]:
        """For each method the tuned ``values``, ``tries``, ``capped``, ``bounds``, and the ``score`` on validation."""
        return self.head["tuned"]

    def runs(self, purpose: str) -> dict[int, Line]:
        """The runs that served a purpose, by seed."""
        found = [line for line in self.lines.values() if purpose in line.purposes]
        return {line.seed: line for line in sorted(found, key=lambda line: line.seed)}

    def values(self, purpose: str, metric: str) -> dict[int, float]:
        """A test metric by seed. A run that diverged guesses, so that it cannot pass for missing."""
        guess = int(metric.removeprefix("top")) / self.data.get("classes", 1)
        return {seed: line.test.get(metric, guess) for seed, line in self.runs(purpose).items()}

    def contrast(self, one: str, other: str, metric: str) -> Contrast | None:
        """The counts for two purposes."""
        return self.contrasts.get((one, other, metric))

    def describe(self, data: Mapping[str, Any], shared: Config, environment: Mapping[str, Any]) -> None:
        """Record the data; raise if the runs so far were made on other data."""
        found = {name: data[name] for name in _DATA if name in data}
        before = self.data.get("fingerprint")
        if before not in (None, found["fingerprint"]):
            raise LabError(f"the data of {self.set.name} have changed since {self.path} was begun: move it away.")
        with self._guard:
            self.head |= {"data": found, "shared": shared.to_json(), "versions": dict(environment["versions"])}

    def add(self, config: Config, result: Mapping[str, Any] | None, purpose: str) -> None:
        """Record the outcome of a run; ``result`` is None if it diverged."""
        fields = own(config, self.set.config)
        line = Line(fields)
        if result is not None:
            rounded = {part: {name: round(value, 6) for name, value in result[part].items()} for part in ("test", "validation")}
            selected = next(iter(result["selected"].values()), 0.0)
            line = Line(fields, round(result["seconds"], 1), result["epochs"], selected, **rounded)
        with self._guard:
            before = self.lines.get(key(fields))
            line.purposes = sorted({*(before.purposes if before else ()), purpose})
            if line != before:
                self.lines[key(fields)] = line
                self.save()

    def assign(self, purpose: str, configs: Iterable[Config]) -> None:
        """Make these the only runs of a purpose. An earlier search may have ended with another config."""
        wanted = {key(own(config, self.set.config)) for config in configs}
        with self._guard:
            for name, line in list(self.lines.items()):
                if purpose in line.purposes and name not in wanted:
                    line.purposes.remove(purpose)
                    if not line.purposes:
                        del self.lines[name]
            self.save()

    def note(self, part: str, name: str, value: Any) -> None:
        """Record what was tuned or chosen."""
        with self._guard:
            self.head[part][name] = value
            self.save()

    def count(self, found: Sequence[Contrast], gone: Sequence[tuple[str, str]] = ()) -> None:
        """Record the counts of some pairs, and drop those of pairs whose runs are gone."""
        with self._guard:
            self.contrasts = {name: each for name, each in self.contrasts.items() if name[:2] not in gone}
            for each in found:
                self._hold(each)
            rows = [json.dumps(dataclasses.asdict(self.contrasts[name]), sort_keys=True) for name in sorted(self.contrasts)]
            _write(self.contrasts_path, "[\n" + ",\n".join(rows) + "\n]\n")

    def _hold(self, found: Contrast) -> None:
        self.contrasts[found.method, found.against, found.metric] = found

    def save(self) -> None:
        lines = [json.dumps(vars(self.lines[name]), sort_keys=True) for name in sorted(self.lines)]
        _write(self.path, "\n".join([json.dumps(self.head, sort_keys=True), *lines]) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
