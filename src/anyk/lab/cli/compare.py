"""`anyk compare`."""

import os
from pathlib import Path

from anyk.lab.cli.words import CommonSetting, Flag, Loggers, command_line, say, say_json, slug


def command(
    setting: CommonSetting,
    *,
    losses: tuple[str, ...] = ("softmax", "splitter"),
    seeds: int = 5,
    budget: int = 6,
    jobs: int = 0,
    out: Path | None = None,
    log: Loggers = (),
    quiet: Flag = False,
    json: Flag = False,
) -> int:
    """Does top-k training help on your data, which variant, by how much, and is that luck?

    Tunes every loss with the same number of tries on validation, trains it with several seeds, and tells what the test
    says. Writes results.json, report.html and the best model.

    Args:
        setting: what the runs have in common; learning_rate and temperature are where the tuning starts.
        losses: what to compare; softmax is always among them.
        seeds: runs of each tuned loss.
        budget: tries that each loss has for tuning.
        jobs: runs at a time; 0 is one for each core.
        out: folder for the outcome; by default anyk-runs/compare-DATA.
        log: hand the metrics of all runs on: tensorboard, wandb, mlflow, or several.
        quiet: show no progress.
        json: print the results as JSON instead of words.
    """
    from anyk.lab import tables
    from anyk.lab.comparison import compare
    from anyk.lab.comparison.outcome import BASELINE, best
    from anyk.lab.comparison.results import to_json
    from anyk.lab.comparison.snippet import code
    from anyk.lab.comparison.verdict import table, verdict
    from anyk.lab.progress import watched

    out = out or Path("anyk-runs") / f"compare-{slug(setting.data)}"
    count = len({BASELINE, *losses}) * (budget + seeds)
    with watched(count, quiet, log) as display:
        outcome = compare(
            setting,
            losses,
            out,
            seeds=seeds,
            budget=budget,
            jobs=jobs or os.cpu_count() or 1,
            command=command_line(),
            on_progress=display.show,
        )
    # A try that diverges while tuning is no failure: others were better.
    exit_code = 1 if any(len(method.runs) < seeds for method in outcome.methods) else 0
    if json:
        say_json(to_json(outcome))
        return exit_code
    say(tables.render(table(outcome), "terminal"))
    say("\n".join(verdict(outcome)))
    chosen = best(outcome)
    say(f"\nTo paste: {chosen.name}, the best on validation (of equals the first)\n")
    say(code(chosen.recipe, outcome.data["classes"]))
    say(f"Report: {out / 'report.html'}")
    return exit_code
