"""Many runs in processes of this machine."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import lab_data
from anyk.lab.engines.engine import Outcome
from anyk.lab.engines.local import Pool
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


def test_a_killed_worker_is_a_failed_run(base: Config, tmp_path: Path) -> None:
    long = base.replace(epochs=100000)
    folder = tmp_path / "long"

    def kill(_: Path, progress: Progress) -> None:
        if progress.step:
            (worker,) = [child for child in multiprocessing.active_children() if child.name.startswith("ForkServerProcess")]
            os.kill(worker.pid or 0, signal.SIGKILL)

    with Pool(1, kill) as pool:
        outcome = pool.run({folder: long})[folder]
    assert outcome.result is None
    assert outcome.error == "the process of this run ended with exit code -9"
    assert Run(folder).error() == outcome.error


def test_stopping_a_pool_saves_checkpoints_and_starts_no_more(base: Config, tmp_path: Path) -> None:
    long = base.replace(epochs=100000)
    pool = Pool(1, lambda folder, progress: pool.stop())
    with pool:
        outcomes = pool.run({tmp_path / name: long for name in ("first", "second")})
    assert list(outcomes.values()) == [Outcome(), Outcome()]
    assert (tmp_path / "first" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="POSIX")
def test_workers_hold_ctrl_c_back_until_they_can_take_it(tmp_path):
    (tmp_path / "start.py").write_text(
        "import multiprocessing, signal\n"
        "def held():\n"
        "    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
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
