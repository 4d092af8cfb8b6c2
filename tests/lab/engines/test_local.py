"""Many runs in processes of this machine."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import lab_data
from anyk.lab import engines
from anyk.lab.engines import local
from anyk.lab.engines.engine import Outcome
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.training import Progress
from anyk.lab.warn_once import warn_once


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    data = lab_data.write_embedding_set(tmp_path_factory.mktemp("data") / "points")
    return Config(data=str(data), epochs=3, batch_size=32, learning_rate=1e-2, m=8)


def test_a_failing_run_does_not_stop_the_others_and_what_has_ended_is_not_run_again(base: Config, tmp_path: Path) -> None:
    configs = {
        tmp_path / "good": base,
        tmp_path / "bad": base.replace(optimizer="sgd", learning_rate=1e30, weight_decay=1.0),
        tmp_path / "other": base.replace(seed=1),
    }
    seen: dict[str, list[int]] = {}

    def note(folder: Path, progress: Progress) -> None:
        seen.setdefault(folder.name, []).append(progress.step)

    with Pool(2, note) as pool:
        outcomes = pool.run(configs)
        assert list(outcomes) == list(configs)
        good, bad, other = outcomes.values()
        assert good.result == Run(tmp_path / "good").result()
        assert other.result is not None
        assert bad.result is None
        assert bad.diverged
        assert Run(tmp_path / "bad").error() == bad.error
        assert seen["good"][-1] == Run(tmp_path / "good").metrics()[-1]["step"]
        written = (tmp_path / "good" / "result.json").stat().st_mtime_ns
        assert dict(pool.results({tmp_path / "good": base})) == {tmp_path / "good": good}
        assert (tmp_path / "good" / "result.json").stat().st_mtime_ns == written


def worker() -> int:
    """The only one."""
    (found,) = [child for child in multiprocessing.active_children() if child.name.startswith("ForkServerProcess")]
    return found.pid or 0


def server() -> int:
    """The process that forks the workers."""
    return multiprocessing.forkserver._forkserver._forkserver_pid


def test_a_run_whose_worker_is_killed_goes_on_and_fails_at_the_third_time(base: Config, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(_: Path, progress: Progress) -> None:
        if progress.step and worker() not in killed and len(killed) < times:
            killed.append(worker())
            os.kill(killed[-1], signal.SIGKILL)

    folder, times = tmp_path / "often", 3
    with Pool(1, kill) as pool:
        outcome = pool.run({folder: base.replace(epochs=100000)})[folder]
    assert outcome.result is None
    assert outcome.error == "the process of this run ended 3 times, at last with exit code -9"
    assert Run(folder).error() == outcome.error
    killed, folder, times = [], tmp_path / "once", 1
    with Pool(1, kill) as pool:
        outcome = pool.run({folder: base.replace(epochs=200)})[folder]
        undisturbed = pool.run({tmp_path / "undisturbed": base.replace(epochs=200)})[tmp_path / "undisturbed"]
    assert len(killed) == 1
    assert outcome.result is not None
    assert undisturbed.result is not None
    assert outcome.result["validation"] == undisturbed.result["validation"]


def test_the_runs_go_on_when_the_process_that_forks_them_is_killed(base: Config, tmp_path: Path) -> None:
    """While a run is at work, and again before one is started."""
    killed = []

    def kill(_: Path, progress: Progress) -> None:
        if not killed:
            killed.append(server())
            os.kill(server(), signal.SIGKILL)

    with Pool(1, kill) as pool:
        outcomes = pool.run({tmp_path / str(seed): base.replace(seed=seed) for seed in range(2)})
        assert server() not in killed
        os.kill(server(), signal.SIGKILL)
        outcomes |= pool.run({tmp_path / "2": base.replace(seed=2)})
    assert all(outcome.result for outcome in outcomes.values())


def test_a_process_that_cannot_be_started_is_an_error_that_says_so(base: Config, tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "start", refuse)
    with (
        pytest.raises(LabError, match=r"no process could be started for .*one \(BlockingIOError: .*unavailable"),
        Pool(1) as pool,
    ):
        pool.run({tmp_path / "one": base})


def test_a_worker_that_does_not_answer_is_killed(base: Config, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(local, "STOPPING_SECONDS", 0.0)
    stuck: list[int] = []

    def stop(_: Path, progress: Progress) -> None:
        if not stuck:
            stuck.append(worker())
            os.kill(worker(), signal.SIGSTOP)
            pool.stop()

    with Pool(1, stop) as pool:
        assert pool.run({tmp_path / "stuck": base.replace(epochs=100000)}) == {tmp_path / "stuck": Outcome()}
    with pytest.raises(ProcessLookupError):
        os.kill(stuck[0], 0)
    assert Run(tmp_path / "stuck").error() is None


def test_an_interrupt_in_python_saves_and_a_second_one_kills(base: Config, tmp_path: Path) -> None:
    """What waits in the queue is not begun, and nobody waits for it."""
    long = {tmp_path / name: base.replace(epochs=100000) for name in ("first", "second")}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Pool(1, throttled_once(interrupt)) as pool:
        pool.run(long)
    assert (tmp_path / "first" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "second").exists()
    assert not multiprocessing.active_children()

    with pytest.raises(KeyboardInterrupt), Pool(1, throttled_once(interrupt)) as pool:  # noqa: PT012
        pool._wait = interrupt  # type: ignore[method-assign, assignment]
        pool._start(tmp_path / "first", long[tmp_path / "first"])
        pid = worker()
        pool.run({})
        interrupt()
    (ended,) = multiprocessing.active_children() or [None]
    if ended is not None:
        ended.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def throttled_once(function: Callable[..., None]) -> Callable[..., None]:
    """Calls it the first time only."""
    calls = itertools.count()
    return lambda *given: function(*given) if next(calls) == 0 else None


SECOND_SIGNAL = """
import multiprocessing, os, signal, sys
from pathlib import Path
from anyk.lab import stopping
from anyk.lab import engines
from anyk.lab.engines import local
from anyk.lab.errors import LabError
from anyk.lab.run.config import Config

local.STOPPING_SECONDS = stopping.SECONDS = 1e6

class Pool(local.Pool):
    def stop(self):
        super().stop()
        print(worker.pid, flush=True)  # now it waits for a worker that does not answer

def show(*_):
    global worker
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGTERM)

stopping.listen()
with Pool(1, show) as pool:
    pool.run({Path(sys.argv[1]): Config(data=sys.argv[2], epochs=100000, batch_size=32, m=8)})
"""


def test_a_second_signal_ends_the_cleaning_up(base: Config, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SECOND_SIGNAL, str(tmp_path / "run"), base.data]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.count("\n")) == (143, 1), errors
    assert errors.startswith("Stopped. To go on: ")
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_stopping_a_pool_saves_checkpoints_and_starts_no_more(base: Config, tmp_path: Path) -> None:
    long = base.replace(epochs=100000)
    pool = Pool(1, lambda folder, progress: pool.stop())
    with pool:
        outcomes = pool.run({tmp_path / name: long for name in ("first", "second")})
    assert list(outcomes.values()) == [Outcome(), Outcome()]
    assert (tmp_path / "first" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="POSIX")
def test_workers_hold_signals_back_until_they_can_take_them(tmp_path):
    (tmp_path / "start.py").write_text(
        "import multiprocessing, signal\n"
        "def held():\n"
        "    return {signal.SIGINT, signal.SIGTERM} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "def tell(pipe):\n"
        "    pipe.send(held())\n"
        "if __name__ == '__main__':\n"
        "    from anyk.lab.engines.local import _signals_wait\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    here, there = context.Pipe()\n"
        "    process = context.Process(target=tell, args=(there,))\n"
        "    with _signals_wait():\n"
        "        process.start()\n"
        "    print(here.recv(), held())\n"
        "    process.join()\n"
    )
    command = [sys.executable, str(tmp_path / "start.py")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True False\n"


def test_a_remark_of_many_workers_is_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    for split in ("train", "val"):
        for color in range(4):
            (tmp_path / "set" / split / str(color)).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (8, 8), (60 * color, 9 * number, 0)).save(
                    tmp_path / "set" / split / str(color) / f"{number}.png"
                )
    config = Config(data=str(tmp_path / "set"), loss="softmax", p_k=(1.0,), epochs=1)
    with Pool(jobs=1) as runs:
        outcomes = runs.run({tmp_path / str(seed): config.replace(seed=seed) for seed in range(2)})
    assert all(outcome.result for outcome in outcomes.values())
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/set/val is taken as the test set")
    warn_once(message)
    assert len(caplog.messages) == 1


def test_runs_at_a_time_follow_the_cores_that_the_process_may_use(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 7, 8})
    with engines.make("local", None, 0) as pool:
        assert pool.room(base) == 3
