"""`anyk compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from anyk.lab import files
from anyk.lab.cli.words import Flag, say, say_json, warn
from anyk.lab.comparison.config import ComparisonConfig, ComparisonFields
from anyk.lab.errors import LabError, reuse_sentence
from anyk.lab.run import processes
from anyk.lab.run.config import DataFields, LossFields, ModelFields, TrainingFields

if TYPE_CHECKING:
    from anyk.lab.comparison.compare import Report

NOT_DECIDED = 3
"""the exit code of a comparison that has no answer yet"""


def _config(
    data: DataFields, comparison: ComparisonFields, model: ModelFields, loss: LossFields, training: TrainingFields
) -> ComparisonConfig:
    return ComparisonConfig(**vars(data), **vars(comparison), **vars(model), **vars(loss), **vars(training))


def _is_of(report: "Report", folder: Path) -> bool:
    """Whether the report in the folder is of this comparison: one that has nothing to tell leaves an earlier one there."""
    try:
        return bool(files.read_object(folder / "results.json", "")["command"] == report.command)
    except (LabError, KeyError):
        return False


def command(
    config: Annotated[ComparisonConfig, tyro.conf.OmitArgPrefixes, tyro.conf.arg(constructor=_config, name="")],
    *,
    json: Flag = False,
) -> int:
    """Find out whether top-k training helps on your data, with which loss, by how much, and whether that may be luck.

    Tunes the learning rate and one hyperparameter of every loss on validation, with equally many tries for each; trains each
    loss with several seeds, and compares them on the test set. Writes results.json, report.html and the model to use. The exit
    code is 0 if there is an answer ("no difference" is one), 3 if there is none yet, 1 if runs failed. After an interruption,
    the same command goes on where it stopped.

    Args:
        config: what to compare; the tuning starts at the values of its runs.
        json: print the results as JSON instead of text.
    """
    from anyk.lab.comparison.compare import run
    from anyk.lab.comparison.snippet import code

    report = run(config, processes.command_line())
    if report.reused:
        warn(reuse_sentence(report.reused))
    if json:
        say_json(report.to_json())
    else:
        say(str(report))
        if report.decided:
            say(f"\nTo paste, for {report.chosen}:\n")
            say(report.code)
            for method in report.all_confirmed if report.choice not in report.all_confirmed else ():
                say(f"On the test, {method.name} is better than {report.chosen}; to paste it:\n")
                say(code(method.config, report.data["classes"]))
        if _is_of(report, config.folder):
            say(f"Report: {config.folder / 'report.html'}")
    # Too few runs because of the time are no failure: the same command goes on.
    failed = report.failures or any(not method.runs and not method.capped for method in report.methods)
    return 1 if failed else 0 if report.decided else NOT_DECIDED
