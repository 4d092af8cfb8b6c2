"""`anyk sweep`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anyk.lab.cli.words import Flag, Group, Loggers, WholeConfig, say, tell_failures, warn
from anyk.lab.errors import LabError


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Path = Path("anyk-runs/sweep")
    """folder for the runs"""
    log: Loggers = ()
    """hand the metrics on: tensorboard, wandb, mlflow, or several"""
    quiet: Flag = False
    """show no progress"""


def command(
    base: WholeConfig,
    *,
    grid: tuple[str, ...] = (),
    file: Path | None = None,
    jobs: int = 0,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    output: Group[Output],
) -> int:
    """Many runs, in parallel processes or on a cluster.

    Interrupted, the same command goes on; a run that fails does not stop the others.

    Args:
        base: what all runs have in common.
        grid: axes such as loss=softmax,splitter seed=0,1,2 m=16,none p_k=1,.5/.5; every combination is a run.
        file: a JSON file with "grid" or "runs", and "base", instead of --grid.
        jobs: runs at a time; 0 is one for each core, or on a cluster as many as it has room for.
        engine: local is this machine; ray is a Ray cluster, whose nodes must see the folders of data and runs.
        address: HOST:PORT of the Ray cluster; by default the environment variable RAY_ADDRESS.
    """
    from anyk.lab import tables
    from anyk.lab.engines import sweep
    from anyk.lab.engines.attempt import failures
    from anyk.lab.progress import watched
    from anyk.lab.run import summaries

    if file is not None and grid:
        raise LabError("give --grid or --file, not both.")
    if engine == "local" and address is not None:
        raise LabError("--address is for a cluster: add --engine ray.")
    if engine == "ray":
        address = address or os.environ.get("RAY_ADDRESS")
        if not address:
            raise LabError("--engine ray needs --address HOST:PORT, which `ray start --head` tells.")
    configs = sweep.read(file, base) if file is not None else sweep.grid(base, sweep.parse_axes(grid))
    out = output.out
    with watched(len(configs), output.quiet, output.log) as display:
        outcomes = sweep.run_all(configs, out, jobs=jobs, address=address, on_progress=display.show, on_note=warn)
    say(tables.render(summaries.table(summaries.collect([out])), "terminal"))
    return tell_failures(failures(outcomes))
