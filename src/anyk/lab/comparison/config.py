"""A comparison as plain data: which losses on which data, how thoroughly they are tuned, and what that may cost.

The same fields are the options of `anyk compare`, the arguments of :func:`anyk.lab.compare` and what the search takes: a new
option is a new field here.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from anyk.lab import files
from anyk.lab.comparison.tuning import EFFORTS, Effort
from anyk.lab.engines import EngineName
from anyk.lab.errors import LabError
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config, Setting, even_p_k, usual_ks
from anyk.lab.run.loggers import LoggerName

BASELINE = "softmax"
"""what the other losses are measured against"""
BOUNDED = "gce"
"""the control of the error losses: bounded as they are, but without k"""


@dataclass(frozen=True)
class ComparisonFields:
    """What to compare, and how long that may take."""

    losses: tuple[str, ...] = (BASELINE, BOUNDED, "error", "splitter")
    """what to compare; softmax is always included, and gce if there are error losses"""
    effort: Literal["quick", "normal", "thorough"] = "normal"
    """how thoroughly to tune: about 8, 12 or 32 trainings of each loss"""
    seeds: int | None = None
    """seeds to train each tuned loss with; none: by the effort, and fewer where more could hardly change the answer"""
    budget: int | None = None
    """the most tries of each loss at full length; none: as many as it takes"""
    time: str | float | None = None
    """time limit of the whole comparison, such as 90s, 10m or 2h; by default there is none"""
    jobs: int = 0
    """runs at a time; 0: one for each core, or as many as the cluster has room for"""
    engine: EngineName = "local"
    """where to run: local, in processes of this machine, or ray, on a Ray cluster"""
    address: str | None = None
    """ray: HOST:PORT of the cluster; by default RAY_ADDRESS, or a Ray on this machine, started for the command"""
    out: str | None = None
    """folder for the results; by default anyk-runs/compare-DATA"""
    log: tuple[LoggerName, ...] = ()
    """also send the metrics of all runs to tensorboard, wandb or mlflow, or to several of them"""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """show no progress"""


#: fields that change nothing about what is found
WITHOUT_EFFECT = ("jobs", "engine", "address", "out", "log", "quiet")


@dataclass(frozen=True)
class ComparisonConfig(ComparisonFields, Setting):
    """A comparison: what its runs have in common, which is where the tuning starts, and the fields above.

    The losses begin with softmax, and gce is one of them if there are error losses.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("seeds", self.seeds), ("budget", self.budget), ("jobs", self.jobs or 1)):
            if value is not None and value < 1:
                raise LabError(f"{name} should be at least 1, but is {value}.")
        if self.seconds is not None and not self.seconds > 0:
            raise LabError(f"time should be above 0 seconds, but is {self.seconds:g}.")
        object.__setattr__(self, "losses", _with_controls(self.losses))
        if self.select == "each":
            raise LabError(
                "select each has several models for each run, and a comparison needs one: choose another, such as mean."
            )

    @property
    def level(self) -> Effort:
        """What the effort means."""
        return EFFORTS[self.effort]

    @property
    def most_seeds(self) -> int:
        """Runs of each tuned loss, unless fewer are enough."""
        return self.seeds or self.level.seeds

    @property
    def seconds(self) -> float | None:
        """The time that the whole may take."""
        return seconds_of(self.time) if isinstance(self.time, str) else self.time

    @property
    def folder(self) -> Path:
        """Where the outcome goes."""
        return Path(self.out) if self.out is not None else Path("anyk-runs") / f"compare-{files.slug(self.data)}"

    def run_config(self, loss: str) -> Config:
        """One run with a loss, before anything is tuned."""
        return Config(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)}, loss=loss)

    def recorded(self) -> dict[str, Any]:
        """The settings that results.json and the report show."""
        shown = {name: value for name, value in self.to_json().items() if name not in WITHOUT_EFFECT}
        return {"metric": metric_of(self), **shown}

    def with_ks(self, classes: int) -> "ComparisonConfig":
        """The same with ks and P_K filled in for so many classes: each follows from the other, if that was given."""
        ks, own = tuple(dict.fromkeys(self.ks)), self.gives_p_k
        if not ks and own and self.p_k_file is None:
            weights = map(max, zip(self.p_k, self.p_k_end or self.p_k, strict=True))
            ks = tuple(k for k, weight in enumerate(weights, start=1) if weight > 0 and k < classes)
        ks = ks or usual_ks(classes)
        return self.replace(ks=ks, p_k=self.p_k if own else even_p_k(ks))


def metric_of(setting: Setting) -> str:
    """The validation metric that is tuned for."""
    return setting.select if setting.select != "last" else "mean"


def _with_controls(losses: tuple[str, ...]) -> tuple[str, ...]:
    """Softmax first, each loss once, and gce where there are error losses."""
    found = {loss: loss_names.find(loss) for loss in (BASELINE, *losses)}
    if len(found) == 1:
        raise LabError(f"losses should name something to compare with {BASELINE}, such as splitter, but {BASELINE} is alone.")
    listed = list(found)
    if any(loss.family == "error" for loss in found.values()) and BOUNDED not in found:
        listed.insert(1, BOUNDED)
    return tuple(listed)


def seconds_of(word: str) -> float:
    """A time such as 90s, 10m or 2h in seconds.

    >>> seconds_of("10m"), seconds_of("1.5h"), seconds_of("45")
    (600.0, 5400.0, 45.0)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|m|min|h)?", word.strip().lower())
    if match is None:
        raise LabError(f"time should be a number of seconds, minutes or hours such as 90s, 10m or 2h, but is {word!r}.")
    return float(match[1]) * {"h": 3600, "m": 60, "min": 60}.get(match[2] or "s", 1)
