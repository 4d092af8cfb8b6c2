"""Run many configs, each in a folder of its own: in processes of this machine (local.py) or on a Ray cluster (on_ray.py)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anyk.lab.errors import LabError

if TYPE_CHECKING:
    from anyk.lab.engines.engine import Engine
    from anyk.lab.run.training import Progress

EngineName = Literal["local", "ray"]


def check(engine: EngineName, address: str | None) -> None:
    """Raise what :func:`make` would raise, or its engine when it begins, as far as that is found out quickly."""
    if engine == "ray":
        from anyk.lab.engines import on_ray

        on_ray.check(address)
    elif address is not None:
        raise LabError(f"address is for the engine ray, but the engine is {engine} and the address {address}: leave one out.")


def make(
    engine: EngineName,
    address: str | None,
    jobs: int,
    on_progress: "Callable[[Path, Progress], None]" = lambda folder, progress: None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> "Engine":
    """The engine of a command.

    Args:
        engine: local, the processes of this machine, or ray.
        address: HOST:PORT of a Ray cluster; None: what RAY_ADDRESS says, or a Ray on this machine that is started for this.
        jobs: runs at a time; 0: one for each core, or as many as the cluster has room for.
        on_progress: called with a run's folder and where it stands.
        out_of_time: asked again and again; True stops the runs.
    """
    # Neither needs the other's packages.
    if engine == "ray":
        from anyk.lab.engines.on_ray import Cluster

        return Cluster(address, jobs, on_progress, out_of_time=out_of_time)
    check(engine, address)
    from anyk.lab.engines.local import Pool

    return Pool(jobs or usable_cores(), on_progress, out_of_time=out_of_time)


def usable_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
