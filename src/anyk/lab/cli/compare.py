"""`anyk compare`."""

import os
from dataclasses import dataclass
from pathlib import Path

from anyk.lab.cli.words import CommonSetting, Flag, Group, Loggers, command_line, say, say_json, slug, warn
from anyk.lab.errors import reuse_sentence

NOT_DECIDED = 3
"""the exit code of a comparison that has no answer yet"""


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Path | None = None
    """folder for the outcome; by default anyk-runs/compare-DATA"""
    log: Loggers = ()
    """hand the metrics of all runs on: tensorboard, wandb, mlflow, or several"""
    quiet: Flag = False
    """show no progress"""
    json: Flag = False
    """print the results as JSON instead of words"""


def command(
    setting: CommonSetting,
    *,
    losses: tuple[str, ...] = ("softmax", "gce", "error", "splitter"),
    seeds: int = 5,
    budget: int | None = None,
    time: str | None = None,
    jobs: int = 0,
    output: Group[Output],
) -> int:
    """Does top-k training help on your data, which variant, by how much, and is that luck?

    Tunes every loss on validation until its best learning rate, and the best value of the one hyperparameter it has of its own,
    lie inside what was tried; trains it with several seeds, and tells what the test says. Writes results.json, report.html and
    the model to use. Ends with 0 if there is an answer ("no difference" is one), 3 if there is none yet, 1 if runs failed.
    The same command goes on where it was stopped.

    Args:
        setting: what the runs have in common; the tuning starts at its values.
        losses: what to compare; softmax is always among them, and gce beside error losses.
        seeds: runs of each tuned loss.
        budget: the most points of each loss to try at full length; by default as many as it takes.
        time: what the whole may take, such as 90s, 10m or 2h; by default as long as it takes.
        jobs: runs at a time; 0 is one for each core.
    """
    from anyk.lab import tables
    from anyk.lab.comparison.outcome import chosen, decided
    from anyk.lab.comparison.results import to_json
    from anyk.lab.comparison.search import compare, expected_runs, seconds_of
    from anyk.lab.comparison.snippet import code
    from anyk.lab.comparison.verdict import table, verdict
    from anyk.lab.progress import watched
    from anyk.lab.run.training import Progress

    def show(folder: Path, progress: Progress) -> None:
        if folder in had_ended:
            reused.add(folder)
        display.show(folder, progress)

    out = output.out or Path("anyk-runs") / f"compare-{slug(setting.data)}"
    had_ended = {path.parent for path in (out / "runs").glob("*/result.json")}
    reused: set[Path] = set()
    with watched(expected_runs(losses, seeds, budget), output.quiet, output.log) as display:
        outcome = compare(
            setting,
            losses,
            out,
            jobs=jobs or os.cpu_count() or 1,
            seeds=seeds,
            budget=budget,
            time=seconds_of(time) if time is not None else None,
            command=command_line(),
            on_progress=show,
            on_plan=display.tell,
        )
    if reused:
        warn(reuse_sentence(len(reused)))
    if output.json:
        say_json(to_json(outcome))
    else:
        say(tables.render(table(outcome), "terminal"))
        say("\n".join(verdict(outcome)))
        use = chosen(outcome)
        say(f"\nTo paste: {use.name}\n")
        say(code(use.config, outcome.data["classes"]))
        say(f"Report: {out / 'report.html'}")
    # Too few runs because of the time are no failure: the same command goes on.
    failed = outcome.failures or any(len(method.runs) < seeds and not method.capped for method in outcome.methods)
    return 1 if failed else 0 if decided(outcome) else NOT_DECIDED
