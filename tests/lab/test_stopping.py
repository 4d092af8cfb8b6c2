"""How a process ends when it is told to: real signals, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import anyk

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")

BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
from anyk.lab import files, stopping
stopping.SECONDS = stopping.MOMENT = 1e6
stopping.listen()
def tell(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
def until_told():
    while not stopping.requested():
        time.sleep(0.001)
"""


def ended(script: str, *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a script that has begun to listen."""
    command = [sys.executable, "-c", BEGIN + script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_nothing_to_save_a_signal_ends_the_process_whatever_it_waits_for(number: signal.Signals, tmp_path: Path) -> None:
    """A lock that nobody gives back, and a file half-written."""
    script = """
lock = threading.Lock()
lock.acquire()
with files.replacing(Path(sys.argv[2])) as temporary:
    temporary.write_text("half")
    tell(int(sys.argv[1]))
    lock.acquire()
"""
    assert ended(script, number.value, tmp_path / "file") == (
        128 + number,
        "",
        f"Stopped. To go on: anyk {number.value} {tmp_path / 'file'}\n",
    )
    assert not list(tmp_path.iterdir())


def test_what_is_at_work_is_asked_and_may_come_to_its_end() -> None:
    script = """
with stopping.asked_first():
    tell(signal.SIGTERM)
    until_told()
    print("saved")
sys.stderr.write(stopping.farewell())
sys.exit(stopping.exit_code())
"""
    assert ended(script) == (143, "saved\n", "Stopped. To go on: anyk\n")


def test_a_second_signal_ends_at_once_and_says_so_once() -> None:
    script = """
with stopping.asked_first():
    tell(signal.SIGINT)
    until_told()
    sys.stderr.write(stopping.farewell())
    sys.stderr.flush()
    tell(signal.SIGTERM)
    threading.Event().wait()
"""
    assert ended(script) == (130, "", "Stopped. To go on: anyk\n")


def test_who_does_not_answer_in_time_is_ended() -> None:
    script = """
stopping.SECONDS = 0.0
with stopping.asked_first():
    tell(signal.SIGTERM)
    threading.Event().wait()
"""
    assert ended(script)[0] == 143


def test_the_workers_are_killed_with_the_process() -> None:
    script = """
import subprocess
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
os.kill(worker.pid, signal.SIGSTOP)
stopping.begin(worker.pid)
print(worker.pid, flush=True)
tell(signal.SIGTERM)
until_told()
tell(signal.SIGTERM)
worker.wait()
threading.Event().wait()
"""
    code, out, _ = ended(script)
    assert code == 143
    assert not Path(f"/proc/{out.strip()}/exe").exists()


def test_other_signals_and_those_after_the_end_change_nothing() -> None:
    script = """
import atexit
signal.signal(signal.SIGUSR1, lambda *_: None)
tell(signal.SIGUSR1)
atexit._run_exitfuncs()
tell(signal.SIGINT, signal.SIGTERM)
"""
    assert ended(script) == (0, "", "")


def test_the_process_that_forks_is_killed_even_if_it_is_just_being_started(tmp_path: Path) -> None:
    """Between its start and the moment at which its number is known."""
    script = """
from multiprocessing import util
from anyk.lab.engines.local import Pool
from anyk.lab.run.config import Config
plain = util.spawnv_passfds
def spawn(path, words, descriptors):
    if not any("forkserver" in str(word) for word in words):
        return plain(path, words, descriptors)
    pid = plain(path, [words[0], "-c", "import time; time.sleep(600)"], descriptors)
    print(pid, flush=True)
    tell(signal.SIGTERM)
    until_told()
    time.sleep(0.2)
    return pid
util.spawnv_passfds = spawn
Pool(1)._start(Path(sys.argv[1]), Config())
"""
    code, out, _ = ended(script, tmp_path / "run")
    assert code == 128 + signal.SIGTERM
    assert has_ended(int(out))


def test_a_command_that_is_done_ends_whatever_python_would_take_apart(tmp_path: Path) -> None:
    lines = ["import atexit, time", "class Slow:", "    def __del__(self): time.sleep(600)", "slow = Slow()"]
    (tmp_path / "slow_end.py").write_text("\n".join([*lines, "atexit.register(print, 'at the end')"]))
    command = [sys.executable, "-m", "anyk", "--import", "slow_end", "--version"]
    places = [str(tmp_path), str(Path(anyk.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"anyk {anyk.__version__}\nat the end\n", "")


def has_ended(pid: int) -> bool:
    """Within twenty seconds; if not, it is killed."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize("moment", ["rename", "rmtree"])
def test_a_set_that_is_being_replaced_is_there_and_nothing_beside_it(moment: str, tmp_path: Path) -> None:
    """Told to end between the two renames, or while the former set is being removed."""
    script = """
import shutil
from anyk.lab.data import embeddings
def tells_first(plain):
    def replacement(*args, **options):
        if threading.current_thread() is threading.main_thread() and "replaced" in str(args):
            tell(signal.SIGTERM)
            until_told()
            time.sleep(0.2)
        return plain(*args, **options)
    return replacement
place = {"rename": os, "rmtree": shutil}[sys.argv[2]]
setattr(place, sys.argv[2], tells_first(getattr(place, sys.argv[2])))
with embeddings._appears_whole(Path(sys.argv[1])) as building:
    (building / "new").touch()
time.sleep(600)
"""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "old").touch()
    assert ended(script, tmp_path / "set", moment)[0] == 128 + signal.SIGTERM
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["set", "set/new"]


@pytest.mark.parametrize(
    ("words", "quiet"),
    [(["-m", "anyk", "info"], True), (["bin/anyk", "info"], True), (["-c", "import anyk"], False), (["own.py"], False)],
)
def test_a_signal_while_torch_is_imported_shows_no_traceback_of_the_command(
    words: list[str], quiet: bool, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "anyk").write_text("from anyk.__main__ import main; main()")
    (tmp_path / "own.py").write_text("import anyk")
    places = [str(tmp_path), str(Path(anyk.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's job in the background ignores it
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT  # 130 for a shell
    assert ("Traceback" not in said) == quiet
    assert bool(said) != quiet
