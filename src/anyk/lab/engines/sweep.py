"""`anyk sweep`: a grid of configs, or a list of them, as many runs in one folder."""

import itertools
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyk.lab import files
from anyk.lab.did_you_mean import nearest
from anyk.lab.engines.attempt import Outcome, ended
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError, reuse_sentence
from anyk.lab.run import losses as losses_of_configs
from anyk.lab.run.batches import CHECKED, READ, check_setting, read_data
from anyk.lab.run.config import TYPES, Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import Progress

if TYPE_CHECKING:
    from anyk.lab.engines.on_ray import Cluster


def grid(base: Config, axes: Mapping[str, Sequence[Any]]) -> dict[str, Config]:
    """Every combination of the axes' values, by name; what a loss does not take makes no further runs of it.

    >>> list(grid(Config(), {"loss": ["softmax", "lapsum"], "m": [8, 16]}))
    ['loss=softmax', 'loss=lapsum,m=8', 'loss=lapsum,m=16']
    """
    configs: dict[str, Config] = {}
    idle_in_all, losses = set(losses_of_configs.SETTINGS), set()
    for values in itertools.product(*axes.values()):
        fields = dict(zip(axes, values, strict=True))
        config = Config.from_json({**base.to_json(), **fields}, "the grid")
        idle = set(losses_of_configs.SETTINGS) - losses_of_configs.settings_of(config.loss)
        idle_in_all &= idle
        losses.add(config.loss)
        name = ",".join(f"{name}={_word(value)}" for name, value in fields.items() if name not in idle)
        configs[name or "run"] = config.replace(**{name: getattr(base, name) for name in fields if name in idle})
    for name, choices in axes.items():
        if name in idle_in_all and len(choices) > 1:
            raise LabError(f"the grid varies {name}, which no loss in it takes ({', '.join(sorted(losses))}): leave it out.")
    return configs


def parse_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    """Axes from the command line: ``field=value,value``, where the items of a list stand between slashes.

    >>> parse_axes(["loss=softmax, splitter", "m=16,none", "p_k=1,.5/.5"])
    {'loss': ['softmax', 'splitter'], 'm': [16, None], 'p_k': [[1], [0.5, 0.5]]}
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = (part.strip() for part in word.partition("="))
        pieces = [piece.strip() for piece in values.split(",")]
        if not equals or name not in TYPES or not all(pieces):
            hint = "" if name in TYPES else f": {_nearest(name)}"
            raise LabError(f"a grid axis should be field=value,value with a field of a config, but is {word!r}{hint}.")
        is_list = typing.get_origin(TYPES[name]) is tuple or "tuple" in str(TYPES[name])
        axes[name] = [[_value(item) for item in piece.split("/")] if is_list else _value(piece) for piece in pieces]
    return axes


def read(path: Path, base: Config) -> dict[str, Config]:
    """The runs of a JSON file: ``{"base": {…}, "grid": {field: [value, …]}}`` or ``{"base": {…}, "runs": {name: {…}}}``."""
    content = files.read_object(path, 'write one with "grid" or "runs"')
    try:
        base = Config.from_json({**base.to_json(), **content.get("base", {})}, str(path))
        runs = {
            name: Config.from_json({**base.to_json(), **fields}, f"run {name} of {path}")
            for name, fields in content.get("runs", {}).items()
        }
        return {**(grid(base, content["grid"]) if "grid" in content else {}), **runs}
    except (ValueError, AttributeError, TypeError) as error:
        raise LabError(f'{path} should be a JSON object with "grid" or "runs": {error}.') from None


def run_all(
    configs: Mapping[str, Config],
    out: Path,
    *,
    jobs: int,
    address: str | None = None,
    on_progress: Callable[[Path, Progress], None] = lambda folder, progress: None,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Outcome]:
    """Run every config in ``out``/name. Runs that have ended are not run again; one that fails does not stop the others.

    Args:
        configs: the runs by name.
        out: the folder for them.
        jobs: runs at a time; 0: as many as there is room for.
        address: HOST:PORT of a Ray cluster that computes the runs; None: processes on this machine.
        on_progress: called with a run's folder and where it stands.
        on_note: called with a sentence that the user should know.
    """
    if jobs < 0:
        raise LabError(f"jobs should be at least 0 (0: as many as there are processors), but is {jobs}.")
    if not configs:
        raise LabError("the sweep has no runs: give --grid or --file.")
    for name in configs:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise LabError(f"the name of a run should be a plain word, but is {name!r}.")
    before = {name: ended(out / name, config) for name, config in configs.items()}
    _check([config for name, config in configs.items() if before[name] is None], here=address is None)
    if reused := sum(outcome is not None and outcome.result is not None for outcome in before.values()):
        on_note(reuse_sentence(reused))
    engine = _engine(out, jobs, address, on_progress, on_note)
    with Run(out).locked(), engine as pool:
        outcomes = pool.run({out / name: config for name, config in configs.items()})
    return {name: outcomes[out / name] for name in configs}


def _check(configs: Sequence[Config], here: bool) -> None:
    """Raise what would make runs fail: once, before any of them starts."""
    different = {tuple(getattr(config, field) for field in CHECKED): config for config in configs}
    sources = {tuple(getattr(config, field) for field in READ): config for config in configs}
    for source, first in sources.items():
        dataset = read_data(first)
        for config in different.values():
            if tuple(getattr(config, field) for field in READ) == source:
                check_setting(config, dataset, here=here)


def _engine(
    out: Path,
    jobs: int,
    address: str | None,
    on_progress: Callable[[Path, Progress], None],
    on_note: Callable[[str], None],
) -> "Pool | Cluster":
    if address is None:
        return Pool(jobs or os.cpu_count() or 1, on_progress)
    from anyk.lab.engines.on_ray import Cluster

    return Cluster(address, out, jobs, on_progress, on_note)


def _nearest(name: str) -> str:
    """The fields that may have been meant, or all."""
    near = nearest(name, TYPES)
    return (
        f"the nearest {'field is' if len(near) == 1 else 'fields are'} {', '.join(near)}"
        if near
        else f"the fields are {', '.join(TYPES)}"
    )


def _value(word: str) -> Any:
    if word.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word.lower(), word)


def _word(value: Any) -> str:
    """A value as a part of a folder's name."""
    words = "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return words.replace("/", "_").replace("\\", "_").replace(",", "_")
