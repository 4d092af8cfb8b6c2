"""`anyk.lab.compare`: the command as a function."""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyk.lab import engines, tables
from anyk.lab.comparison import report_page, results
from anyk.lab.comparison import verdict as words
from anyk.lab.comparison.config import WITHOUT_EFFECT, ComparisonConfig, ComparisonFields
from anyk.lab.comparison.outcome import Comparison
from anyk.lab.comparison.search import expected_trainings, search
from anyk.lab.comparison.snippet import code
from anyk.lab.data import keep
from anyk.lab.data.tables import Options
from anyk.lab.errors import LabError
from anyk.lab.progress import watched
from anyk.lab.run.own_models import Maker, word_of
from anyk.lab.run.training import Progress


@dataclass(frozen=True)
class Report(Comparison):
    """The outcome of :func:`compare`: everything that was measured, and what it shows.

    ``print`` shows the table and the verdict, a notebook the whole report.
    """

    folder: str = ""
    """where results.json, report.html, model.safetensors and the runs are"""
    reused: int = 0
    """runs that an earlier call had finished"""

    @property
    def verdict(self) -> list[str]:
        """What the comparison shows, in sentences; the first is the headline."""
        return words.verdict(self)

    @property
    def chosen(self) -> str:
        """The loss to use, which is the best on validation if the test confirms it, otherwise softmax."""
        return self.choice.name

    @property
    def code(self) -> str:
        """The lines of Python that make this loss."""
        return code(self.choice.config, self.data["classes"])

    def table(self, format: tables.Format = "terminal") -> str:
        """The table of test accuracies and differences to softmax, as text.

        Args:
            format: terminal, markdown, latex or csv.
        """
        return tables.render(words.table(self), format)

    def coverage_table(self, format: tables.Format = "terminal") -> str:
        """The table of how many guesses of each loss cover 50, 80, 90, 95 and 99 % of the test examples, as text.

        Args:
            format: terminal, markdown, latex or csv.
        """
        return tables.render(words.coverage_table(self), format)

    def to_json(self) -> dict[str, Any]:
        """The content of results.json."""
        return results.to_json(self)

    def to_frame(self) -> Any:
        """The same as a pandas DataFrame, in fractions: a row for each method and metric."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise LabError("to_frame needs pandas: pip install pandas") from None
        rows = []
        for row in self.to_json()["derived"]["table"]:
            for metric, value in row["test"].items():
                found = row["difference"].get(metric, {})
                rows.append({"method": row["method"], "metric": metric, **value, **found, "p": found.get("p_holm")})
        columns = ["method", "metric", "mean", "std", "seeds", "difference", "low", "high", "p"]
        return pandas.DataFrame(rows, columns=columns)

    def __str__(self) -> str:
        tuned = [f"{method.name} was tuned to {report_page.tuned_values(method)}." for method in self.methods if method.runs]
        return "\n".join([self.table(), *([self.coverage_table()] if self.coverages else []), *self.verdict, *tuned])

    def _repr_html_(self) -> str:
        return report_page.embed(self)


def compare(
    data: Any,
    model: str | Maker = "auto",
    losses: str | Sequence[str] = ComparisonFields.losses,
    ks: int | Sequence[int] = (),
    **options: Any,
) -> Report:
    """Find out whether top-k training helps on some data, with which loss, by how much, and whether that may be luck.

    The learning rate and one hyperparameter of every loss are tuned on validation, with equally many tries for each. Then each
    loss is trained with several seeds, and all are compared on test data. Runs are separate processes and keep their state
    in ``out``: after an interruption, the same call goes on where it stopped.

    Args:
        data: what the command takes, a word or a path; arrays ``(X, y)`` or ``(X, y, X_test, y_test)``, or a mapping with
            these names and perhaps ``classes`` and ``groups``; a torch Dataset of (example, label), or two: train and test;
            a DataFrame of pandas, with ``label_column=`` unless that is the last, or two.
        model: what the command takes; or a function of a module that is called with the shape of one example and the number
            of classes and returns an ``nn.Module``.
        losses: what to compare; softmax is always included, and gce if there are error losses.
        ks: the k that you will show to people. It sets P_K, the metrics, what is tuned for and what is judged. By default
            1 and 5; with fewer than 9 classes, 1 and half of them.
        options: the other options of the command, by their names with underscores: ``effort``, ``seeds``, ``budget``, ``time``,
            ``jobs``, ``engine``, ``address``, ``out``, ``quiet``, ``epochs``, ``batch_size``, ``device``, …; what each does is
            in `anyk compare --help`.

    Returns:
        The outcome. ``print`` it, show it in a notebook, or ask for its ``verdict``, ``table()``, ``to_frame()``, ``chosen``
        and ``code``.

    Example:
        >>> import anyk.lab
        >>> report = anyk.lab.compare("points.npz", losses=["error"], ks=[1, 5], epochs=10)  # doctest: +SKIP
        >>> report.chosen, report.verdict[0]  # doctest: +SKIP
    """
    given = {
        **options,
        "model": word_of(model),
        "losses": [losses] if isinstance(losses, str) else list(losses),
        "ks": list(ks) if isinstance(ks, Iterable) else [ks],
    }
    if isinstance(out := options.get("out"), Path):
        given["out"] = str(out)
    config = ComparisonConfig.from_json(given, "compare")  # which may refuse it, before the data are written
    store = config.folder.with_name(f"{config.folder.name}-data") if out is not None else Path("anyk-runs") / "data"
    if not isinstance(data, (str, Path)):
        settled = vars(Options())  # a table has been read
        config = config.replace(data=keep(data, store, config.table_options), **settled)
        given = {name: value for name, value in given.items() if name not in settled}
    else:
        config = config.replace(data=str(data))
    shown = [f"{name}={value!r}" for name, value in given.items() if name not in WITHOUT_EFFECT]
    return run(config, f"anyk.lab.compare({', '.join([repr(config.data), *shown])})")


def run(config: ComparisonConfig, command: str) -> Report:
    """Make a comparison and show how it goes.

    Args:
        config: what to compare.
        command: what to type to get the same again.
    """
    engines.check(config.engine, config.address)  # before the data are read
    ended = {path.parent for path in (config.folder / "runs").glob("*/result.json")}
    reused: set[Path] = set()

    def show(folder: Path, progress: Progress) -> None:
        reused.update({folder} & ended)
        display.show(folder, progress)

    with watched(expected_trainings(config), config.quiet, config.log, unit="trainings") as display:
        outcome = search(config, command=command, on_progress=show, on_plan=display.tell, on_cost=display.count)
    return Report(**vars(outcome), folder=str(config.folder), reused=len(reused))
