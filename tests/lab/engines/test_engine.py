"""One run as every engine makes it."""

import threading
from pathlib import Path

import pytest

import lab_data
from anyk.lab.engines import engine
from anyk.lab.engines.engine import Outcome
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import Progress


def test_progress_is_told_now_and_then_evaluations_sooner_and_the_end_always(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: clock[0])
    told: list[int] = []
    tell = engine.throttled(lambda progress: told.append(progress.step), 1.0)
    for step, pause, line in ((1, 0, None), (2, 0.9, None), (3, 0.2, None), (4, 0.1, {}), (5, 0.2, {}), (9, 0, None)):
        clock[0] += pause
        tell(Progress(step, 9, line))
    assert told == [1, 3, 5, 9]


def test_a_taken_folder_is_waited_for_and_then_an_error(tmp_path: Path) -> None:
    fields = Config(data=str(lab_data.write_embedding_set(tmp_path / "points")), epochs=1).to_json()
    stop = threading.Event()
    with Run(tmp_path / "run").locked():
        taken = engine.attempt(fields, tmp_path / "run", lambda progress: None, stop, 0.0)
        assert taken.result is None
        assert "another process is at work" in (taken.error or "")
        stop.set()
        assert engine.attempt(fields, tmp_path / "run", lambda progress: None, stop, 60.0) == Outcome()
    assert engine.ended(tmp_path / "run", Config.from_json(fields)) is None
    stop.clear()
    assert engine.attempt(fields, tmp_path / "run", lambda progress: None, stop, 0.0).result is not None
    assert engine.attempt({"loss": "nonsense"}, tmp_path / "run", lambda progress: None, stop, 0.0).error
