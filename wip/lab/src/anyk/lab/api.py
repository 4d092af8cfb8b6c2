"""`anyk.lab.compare`: the command as a function."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from anyk.lab import experiment, models, report, snippet, verdict
from anyk.lab.config import ComparisonConfig, ComparisonFields
from anyk.lab.errors import LabError
from anyk.lab.findings import Findings
from anyk.lab.progress import shown


class Report:
    """The outcome of :func:`compare`. ``print`` shows the verdict and the table, a notebook the whole report.

    Args:
        findings: everything that was measured, and what it shows.
        folder: where results.json, report.html, model.safetensors and the runs are.
    """

    def __init__(self, findings: Findings, folder: Path) -> None:
        self.findings, self.folder = findings, folder

    @property
    def verdict(self) -> list[str]:
        """What the comparison shows, in sentences; the first is the headline."""
        return [verdict.headline(self.findings), *verdict.sentences(self.findings)]

    @property
    def decided(self) -> bool:
        """Whether there is an answer; that there is no difference is one, too."""
        return self.findings.decided

    @property
    def chosen(self) -> str:
        """The loss to use: the best on validation if the test confirms it, otherwise softmax."""
        return self.findings.chosen.name

    @property
    def code(self) -> str:
        """The lines of Python that make this loss."""
        config = self.findings.chosen.config
        return "" if config is None else snippet.code(config, int(self.findings.data["classes"]))

    def to_json(self) -> dict[str, Any]:
        """The content of results.json."""
        return self.findings.to_json()

    def to_frame(self) -> Any:
        """A pandas DataFrame, in fractions: a row for each method and metric."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise LabError("to_frame needs pandas: pip install pandas") from None
        rows = []
        for method in self.findings.methods:
            for metric in self.findings.metrics:
                if (mean := method.mean(metric)) is None:
                    continue
                one = self.findings.differences.get((method.name, metric))
                tested = {
                    name: None if one is None else getattr(one, name) for name in ("difference", "low", "high", "p", "p_holm")
                }
                own = {"method": method.name, "role": method.role, "metric": metric, "mean": mean, "std": method.std(metric)}
                tuned = {} if method.config is None else {"learning_rate": method.config.learning_rate}
                rows.append({**own, "seeds": len(method.runs), **tested, **tuned})
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        return "\n".join(verdict.terminal(self.findings, str(self.folder / "report.html")))

    def _repr_html_(self) -> str:
        return report.render(self.findings)


def compare(
    data: Any,
    model: str | models.Maker = "auto",
    losses: str | Sequence[str] = ComparisonFields.losses,
    ks: int | Sequence[int] = (),
    **options: Any,
) -> Report:
    """Find out whether top-k training helps on some data, with which loss, by how much, and whether that may be luck.

    Every loss is tuned on validation, with equally many trials for each. Then each is trained with several seeds, and all are
    compared on test data. Runs are processes of their own and keep their state in ``out``: after an interruption, the same call
    goes on where it stopped.

    Args:
        data: what the command takes, a word or a path; arrays ``(X, y)`` or ``(X, y, X_test, y_test)``, or a mapping with
            these names and perhaps ``groups``, ``times``, ``classes`` and ``name``; a torch Dataset of (example, label), or two:
            train and test; a DataFrame, with ``label_column=`` unless that is the last, or two.
        model: what the command takes; or a function of a module that is called with the shape of one example and the number
            of classes and returns an ``nn.Module``.
        losses: what to compare; softmax is always included, and gce if there are error losses.
        ks: the k that you will show to people; by default 1 and 5, with fewer than 9 classes 1 and half of them.
        options: the other options of the command, by their names with underscores: ``effort``, ``seeds``, ``time``, ``jobs``,
            ``out``, ``epochs``, ``device``, …; what each does is in `anyk compare --help`.

    Returns:
        The outcome. ``print`` it, show it in a notebook, or ask for its ``verdict``, ``to_frame()``, ``chosen`` and ``code``.

    Example:
        >>> import anyk.lab
        >>> report = anyk.lab.compare("points.npz", losses=["error"], ks=[1, 5], epochs=10)  # doctest: +SKIP
        >>> report.chosen, report.verdict[0]  # doctest: +SKIP
    """
    given = {
        **options,
        "data": str(data) if isinstance(data, (str, Path)) else "memory",
        "model": models.word_of(model),
        "losses": [losses] if isinstance(losses, str) else list(losses),
        "ks": list(ks) if isinstance(ks, Iterable) else [ks],
    }
    if isinstance(given.get("out"), Path):
        given["out"] = str(given["out"])
    config = ComparisonConfig.from_json(given, "compare")
    with shown(config.quiet) as (tell, on_progress):
        command = f"anyk.lab.compare({', '.join(f'{name}={value!r}' for name, value in given.items())})"
        in_memory = None if isinstance(data, (str, Path)) else data
        findings = experiment.run(config, in_memory, tell=tell, on_progress=on_progress, command=command)
    return Report(findings, config.folder)
