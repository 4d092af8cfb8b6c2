"""`anyk.lab.compare`: the command as a function."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyk.lab import files, tables
from anyk.lab.comparison import page, search
from anyk.lab.comparison import verdict as words
from anyk.lab.comparison.outcome import (
    Comparison,
    chosen,
    decided,
    differences,
    measured,
    metrics,
    other_differences,
    others,
)
from anyk.lab.comparison.snippet import code
from anyk.lab.data import keep
from anyk.lab.errors import LabError
from anyk.lab.progress import Display
from anyk.lab.run.config import Setting
from anyk.lab.run.own_models import Maker, word_of


@dataclass(frozen=True)
class Report(Comparison):
    """The outcome of :func:`compare`: everything that was measured, and what it shows.

    ``print`` shows the table and the verdict, a notebook the whole report.
    """

    folder: str = ""
    """where results.json, report.html, model.safetensors and the runs are"""

    @property
    def verdict(self) -> list[str]:
        """What the comparison shows, in sentences; the first is the headline."""
        return words.verdict(self)

    @property
    def decided(self) -> bool:
        """Whether there is an answer; that there is no difference is one, too."""
        return decided(self)

    @property
    def chosen(self) -> str:
        """The loss to use, which is the best on validation if the test confirms it, otherwise softmax."""
        return chosen(self).name

    @property
    def code(self) -> str:
        """The lines of Python that make this loss."""
        return code(chosen(self).config, self.data["classes"])

    def table(self, format: tables.Format = "terminal") -> str:
        """The table of test accuracies and differences to softmax, as text.

        Args:
            format: terminal, markdown, latex or csv.
        """
        return tables.render(words.table(self), format)

    def to_frame(self) -> Any:
        """The same as a pandas DataFrame, in fractions: a row for each method and metric."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise LabError("to_frame needs pandas: pip install pandas") from None
        found, rows = {**differences(self), **other_differences(self)}, []
        for method in (*self.methods, *self.controls):
            for metric in (*metrics(self), *others(self)):
                value, other = measured(method, metric), found.get((method.name, metric))
                row: dict[str, Any] = {"method": method.name, "metric": metric}
                row |= {"mean": value.mean, "std": value.std, "seeds": len(value.values)} if value is not None else {}
                if other is not None:
                    row |= {"difference": other.paired.difference, "low": other.paired.low, "high": other.paired.high}
                    row["p"] = other.p
                rows.append(row)
        return pandas.DataFrame(rows, columns=["method", "metric", *_NUMBERS])

    def __str__(self) -> str:
        return "\n".join([self.table(), *self.verdict])

    def _repr_html_(self) -> str:
        return page.embed(self)


_NUMBERS = ("mean", "std", "seeds", "difference", "low", "high", "p")


def compare(
    data: Any,
    model: str | Maker = "auto",
    losses: Sequence[str] = search.LOSSES,
    ks: int | Sequence[int] = (),
    *,
    seeds: int = search.SEEDS,
    budget: int | None = None,
    time: float | str | None = None,
    jobs: int | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **setting: Any,
) -> Report:
    """Find out whether top-k training helps on some data, by how much, and whether that is luck.

    Every loss is tuned on validation until its best learning rate, and the best value of the one hyperparameter it has of its
    own, lie inside what was tried. Then it is trained with several seeds, and the test tells. Runs are processes of
    their own and keep their state in ``out``: the same call goes on where it was stopped.

    Args:
        data: what the command takes, a word or a path; arrays ``(X, y)`` or ``(X, y, X_test, y_test)``, or a mapping with
            these names and perhaps ``classes`` and ``groups``; a torch Dataset of (example, label), or two: train and test.
        model: what the command takes; or a function of a module that is called with the shape of one example and the number
            of classes and returns an ``nn.Module``.
        losses: what to compare; softmax is always among them, and gce beside error losses.
        ks: the k that you will show to people. It sets P_K, the metrics, what is tuned for and what is judged. By default
            1 and 5.
        seeds: runs of each tuned loss.
        budget: the most points of each loss to try at full length; None: as many as it takes.
        time: what the whole may take, in seconds or as a word such as "10m"; None: as long as it takes.
        jobs: runs at a time; None: one for each core.
        out: the folder for the outcome; by default one in anyk-runs, named by the data.
        quiet: show no progress.
        setting: what the runs have in common, by the names of the command's options: epochs, batch_size, device, …

    Returns:
        The outcome. ``print`` it, show it in a notebook, or ask for its ``verdict``, ``table()``, ``to_frame()``, ``chosen``
        and ``code``.

    Example:
        >>> import anyk.lab
        >>> outcome = anyk.lab.compare("points.npz", losses=["error"], ks=[1, 5], epochs=10)  # doctest: +SKIP
        >>> outcome.chosen, outcome.verdict[0]  # doctest: +SKIP
    """
    if isinstance(losses, str):
        raise LabError(f"losses should be a list of names, but is {losses!r}: write [{losses!r}].")
    store = Path(out).with_name(f"{Path(out).name}-data") if out is not None else Path("anyk-runs") / "data"
    wanted = [ks] if isinstance(ks, int) else list(ks)
    named = {"model": word_of(model), "ks": wanted}
    Setting.from_json({**setting, **named}, "compare")  # before the data are written
    given = Setting.from_json({"data": keep(data, store), **setting, **named}, "compare")
    folder = Path(out) if out is not None else Path("anyk-runs") / f"compare-{files.slug(given.data)}"
    shown = {"losses": list(losses), "ks": wanted, "seeds": seeds, "budget": budget, "time": time, **setting}
    arguments = [repr(given.data), f"model={given.model!r}", *(f"{name}={value!r}" for name, value in shown.items())]
    with Display(search.expected_runs(losses, seeds, budget), quiet) as display:
        outcome = search.compare(
            given,
            losses,
            folder,
            jobs=jobs or os.cpu_count() or 1,
            seeds=seeds,
            budget=budget,
            time=search.seconds_of(time) if isinstance(time, str) else time,
            command=f"anyk.lab.compare({', '.join(arguments)})",
            on_progress=display.show,
            on_plan=display.tell,
        )
    return Report(**vars(outcome), folder=str(folder))
