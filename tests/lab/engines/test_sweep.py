"""Grids and lists of configs, run in one folder."""

import json
from pathlib import Path
from typing import Any

import pytest

import lab_data
from anyk.lab.engines import sweep
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import Progress


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    data = lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points")
    return Config(data=str(data), epochs=3, batch_size=32, learning_rate=1e-2, m=8)


def test_a_failing_run_does_not_stop_the_others(base: Config, tmp_path: Path) -> None:
    configs = {
        "good": base,
        "bad": base.replace(optimizer="sgd", learning_rate=1e30, weight_decay=1.0),
        "other": base.replace(seed=1),
    }
    seen: dict[str, list[int]] = {}

    def note(folder: Path, progress: Progress) -> None:
        seen.setdefault(folder.name, []).append(progress.step)

    outcomes = sweep.run_all(configs, tmp_path, jobs=2, on_progress=note)
    assert outcomes["good"].result == Run(tmp_path / "good").result()
    assert outcomes["other"].result is not None
    assert outcomes["bad"].result is None
    assert "lower the learning rate" in (outcomes["bad"].error or "")
    assert Run(tmp_path / "bad").error() == outcomes["bad"].error
    assert seen["good"][-1] == Run(tmp_path / "good").metrics()[-1]["step"]
    again = sweep.run_all({"good": base}, tmp_path, jobs=1)
    with pytest.raises(LabError, match="jobs should be at least 0"):
        sweep.run_all({"good": base}, tmp_path, jobs=-1)
    assert again["good"].result == outcomes["good"].result


def test_grid_axes_and_files(base: Config, tmp_path: Path) -> None:
    axes = sweep.parse_axes(["loss=softmax,lapsum", "p_k=1,.5/.5", "amp=true", "m=auto,16"])
    assert axes["p_k"] == [[1], [0.5, 0.5]]
    assert len(sweep.grid(Config(), axes)) == 5  # softmax has neither P_K nor m
    for word in ("loss", "nonsense=1", "loss=", "=3"):
        with pytest.raises(LabError, match="a grid axis should be"):
            sweep.parse_axes([word])
    with pytest.raises(LabError, match="the grid: loss: expected one of"):
        sweep.grid(Config(), {"loss": ["nonsense"]})

    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"base": {"epochs": 2}, "grid": {"seed": [0, 1]}, "runs": {"mine": {"loss": "softmax"}}}))
    configs = sweep.read(path, Config(data=base.data))
    assert set(configs) == {"seed=0", "seed=1", "mine"}
    assert configs["mine"] == Config(data=base.data, epochs=2, loss="softmax")
    for content in ("nonsense", "[]", '{"runs": [1]}', '{"runs": {"a": 1}}'):
        path.write_text(content)
        with pytest.raises(LabError, match=r"sweep\.json (should|cannot)"):
            sweep.read(path, Config())
    with pytest.raises(LabError, match="has no runs"):
        sweep.run_all({}, tmp_path / "none", jobs=1)
    with pytest.raises(LabError, match="plain word"):
        sweep.run_all({"../up": Config()}, tmp_path / "none", jobs=1)


def test_softmax_is_not_repeated_for_settings_that_it_does_not_have() -> None:
    axes = sweep.parse_axes(["loss=softmax,gce,splitter,hinge", "temperature=.5,2", "ce_weight=.1,.3", "learning_rate=.1,.2"])
    configs = sweep.grid(Config(m=8), axes)
    counts = {loss: sum(config.loss == loss for config in configs.values()) for loss in axes["loss"]}
    assert counts == {"softmax": 2, "gce": 4, "splitter": 4, "hinge": 2}
    assert "loss=softmax,learning_rate=0.1" in configs
    assert "loss=splitter,temperature=0.5,learning_rate=0.1" in configs
    assert len(set(map(repr, configs.values()))) == len(configs)
    # What is not taken stays as it was: the same run in another grid is the same config.
    assert configs["loss=softmax,learning_rate=0.2"] == Config(loss="softmax", m=8, learning_rate=0.2)
    with pytest.raises(LabError, match=r"the grid varies m, which no loss in it takes \(gce, softmax\)"):
        sweep.grid(Config(), {"m": [8, 16], "loss": ["softmax", "gce"]})
    assert list(sweep.grid(Config(loss="softmax"), {"m": [8], "seed": [0, 1]})) == ["seed=0", "seed=1"]
    with pytest.raises(LabError, match="m should be"):
        sweep.grid(Config(), {"loss": ["softmax"], "m": ["nonsense"]})


def test_a_sweep_leaves_a_folder_of_other_files_alone(base: Config, tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").touch()
    with pytest.raises(LabError, match=r"holds files that are not of a run \(cat.jpg\)"):
        sweep.run_all({"good": base}, tmp_path, jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["cat.jpg"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "cnn"}, "model cnn takes images, but points holds embeddings"),
        ({"augment": ("flip",)}, "augment changes images"),
        ({"device": "cuda:7"}, "device 'cuda:7' cannot be used here"),
        ({"model": "no_such_module:make"}, "cannot be imported"),
        ({"data": "no such file"}, "does not exist"),
        ({"image_size": 8}, "image_size resizes images"),
    ],
    ids=str,
)
def test_contradictions_are_told_once_before_any_run(changes: Any, problem: str, base: Config, tmp_path: Path) -> None:
    configs = {"good": base, "bad": base.replace(**changes), "worse": base.replace(**changes, seed=1)}
    with pytest.raises(LabError, match=problem):
        sweep.run_all(configs, tmp_path / "runs", jobs=1, on_progress=lambda *_: pytest.fail("a run was started"))
    assert not (tmp_path / "runs").exists()


def test_what_has_ended_is_not_checked_again(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = base.replace(epochs=1)
    sweep.run_all({"good": config}, tmp_path, jobs=1)
    monkeypatch.setattr(sweep, "read_data", lambda _: pytest.fail("the data were read"))
    assert sweep.run_all({"good": config}, tmp_path, jobs=1)["good"].result is not None
