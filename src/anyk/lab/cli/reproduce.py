"""`anyk reproduce`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from anyk.lab.cli.words import Flag, Group, say, warn
from anyk.lab.engines import EngineName
from anyk.lab.errors import Failure, LabError, failure_sentences, reuse_sentence
from anyk.lab.tables import Format


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Path | None = None
    """folder for the runs; by default anyk-runs/EXPERIMENT"""
    format: Format = "terminal"
    """format of the table"""
    quiet: Flag = False
    """show no progress"""


def command(
    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")],
    *,
    data: tuple[str, ...] = (),
    smoke: Flag = False,
    seeds: int | None = None,
    source: Literal["paper", "official"] = "paper",
    jobs: int = 0,
    engine: EngineName = "local",
    address: str | None = None,
    output: Group[Output],
) -> int:
    """Reproduce a table or a figure of the paper, with our numbers beside its own.

    Args:
        experiment: table1, table1-small, table2, table3, table4, table5, table6, alpha, set-size, backbones or depths.
        data: where the data sets that it needs are: a path, or NAME=PATH for each.
        smoke: a trial of the same steps, in about a minute, on small synthetic data in the same formats.
        seeds: how many; by default as many as in the paper.
        source: the paper's settings or the official code's, where they differ.
        jobs: runs at a time; 0 is one for each core, or as many as the cluster has room for.
        engine: where to run: local, in processes of this machine, or ray, on a Ray cluster.
        address: ray: HOST:PORT of the cluster; by default RAY_ADDRESS, or a Ray on this machine, started for the command.
    """
    from anyk.lab import engines, tables
    from anyk.lab.engines.engine import ended
    from anyk.lab.paper import experiments
    from anyk.lab.progress import watched
    from anyk.lab.run.batches import check_setting, read_data
    from anyk.lab.run.run_folder import Run

    if jobs < 0:
        raise LabError(f"--jobs should be at least 0 (0: one for each core), but is {jobs}.")
    chosen = experiments.experiment(experiment)
    engines.check(engine, address)
    out = output.out or Path("anyk-runs") / (f"{experiment}-smoke" if smoke else experiment)
    places: str | dict[str, str] | None
    if smoke:
        with Run(out).locked():
            places = chosen.write_smoke_data(out / "data")
    elif len(data) == 1 and "=" not in data[0]:
        places = data[0]
    else:
        places = dict(_name_and_path(word) for word in data) or None
    Run(out).refuse_other_files()
    named = chosen.configs(places, smoke=smoke, seeds=seeds, source=source)
    configs = {out / "runs" / name: config for name, config in named.items()}
    before = {folder: ended(folder, config) for folder, config in configs.items()}
    # Before any of them starts; all runs on one data set have the same model and training.
    for config in {config.data: config for folder, config in configs.items() if before[folder] is None}.values():
        check_setting(config if engine == "local" else config.replace(device="cpu"), read_data(config))
    if reused := sum(outcome is not None and outcome.result is not None for outcome in before.values()):
        warn(reuse_sentence(reused))
    outcomes = {}
    if configs:
        with (
            Run(out / "runs").locked(),
            watched(len(configs), output.quiet) as display,
            engines.make(engine, address, jobs, display.show) as pool,
        ):
            outcomes = {folder.name: outcome for folder, outcome in pool.run(configs).items()}
    results = {name: outcome.result for name, outcome in outcomes.items() if outcome.result is not None}
    table = chosen.compare(results, smoke=smoke)
    say(table.title)
    say(tables.render(table, output.format))
    failed = [Failure(name, outcome.error) for name, outcome in outcomes.items() if outcome.error]
    for sentence in failure_sentences(failed):
        warn(sentence)
    return 1 if failed else 0


def _name_and_path(word: str) -> tuple[str, str]:
    name, equals, path = word.partition("=")
    if not equals:
        raise LabError(f"--data should be NAME=PATH for each data set, but is {word!r}.")
    return name, path
