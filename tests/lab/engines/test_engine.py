"""What all engines share: runs that tasks ask for, and how they end."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from anyk.lab.engines.engine import Engine, Outcome, Task
from anyk.lab.run.config import Config, Setting


class Made(Engine):
    """An engine with room for two runs that never fail, of which the older one ends in each turn."""

    def __init__(self, until: int | None = None) -> None:
        super().__init__(out_of_time=lambda: until is not None and len(self.started) >= until)
        self.started: list[str] = []
        self.running: deque[Path] = deque()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def room(self, config: Setting) -> int:
        return 2

    def _has_room(self) -> bool:
        return len(self.running) < self.room(Config())

    def _start(self, folder: Path, config: Config) -> None:
        self.started.append(folder.name)
        self.running.append(folder)

    def _wait(self) -> list[tuple[Path, Outcome]]:
        return [(folder, Outcome({"name": folder.name})) for folder in [self.running.popleft()]] if self.running else []


def task(folder: Path, *rounds: Sequence[str]) -> Task[list[str | None]]:
    """Runs in rounds; the names of their results."""
    found = []
    for names in rounds:
        outcomes = yield {folder / name: Config() for name in names}
        found += [outcome.result["name"] if outcome.result else None for outcome in outcomes.values()]
    return found


def test_tasks_go_on_as_soon_as_their_own_runs_have_ended(tmp_path: Path) -> None:
    engine = Made()
    found = engine.run_tasks([task(tmp_path, "a", "b"), task(tmp_path, "cde"), task(tmp_path), task(tmp_path, "", "f")])
    assert found == [["a", "b"], ["c", "d", "e"], [], ["f"]]
    assert engine.started == list("acdebf")  # b, which waits for a, came after what was asked for before it


def test_a_run_that_two_tasks_ask_for_is_made_once(tmp_path: Path) -> None:
    engine = Made()
    assert engine.run_tasks([task(tmp_path, "ab"), task(tmp_path, "b", "a")]) == [["a", "b"], ["b", "a"]]
    assert engine.started == ["a", "b"]


def test_when_the_time_is_over_no_more_is_started_and_every_task_comes_to_its_end(tmp_path: Path) -> None:
    engine = Made(until=2)
    assert engine.run_tasks([task(tmp_path, "abc", "d"), task(tmp_path, "e")]) == [["a", "b", None, None], [None]]
    assert engine.started == ["a", "b"]


def test_an_error_of_a_task_ends_the_others(tmp_path: Path) -> None:
    def failing() -> Iterator[dict[Path, Config]]:
        yield {tmp_path / "a": Config()}
        raise ZeroDivisionError

    engine = Made()
    with pytest.raises(ZeroDivisionError):
        engine.run_tasks([failing(), task(tmp_path, "b", "c")])  # type: ignore[list-item]
    assert "c" not in engine.started
