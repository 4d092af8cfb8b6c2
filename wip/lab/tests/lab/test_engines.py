import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from anyk.lab import engines, train
from anyk.lab.config import RunConfig
from anyk.lab.engines import Outcome, local

CONFIG = RunConfig(loss="softmax", epochs=2)


def configs(folder, number, **changes):
    return {folder / str(seed): CONFIG.replace(seed=seed, **changes) for seed in range(number)}


def test_runs_are_made_a_few_at_a_time_and_not_again(prepared, tmp_path):
    ended = []
    with engines.make("local", train.work, jobs=2) as pool:
        found = pool.run(configs(tmp_path, 4), prepared.folder, on_end=ended.append)
        assert [outcome.result["config"]["seed"] for outcome in found.values()] == [0, 1, 2, 3] and len(ended) == 4
        assert len(pool._workers) == 2
        times = {path: (path / "result.json").stat().st_mtime_ns for path in found}
        again = pool.run(configs(tmp_path, 5), prepared.folder)
    assert all((path / "result.json").stat().st_mtime_ns == before for path, before in times.items()) and len(again) == 5
    assert again[tmp_path / "3"].result == found[tmp_path / "3"].result


def test_the_same_answer_in_this_process(prepared, tmp_path):
    with engines.make("local", train.work, jobs=1, threads=1) as pool:
        [outcome] = pool.run(configs(tmp_path, 1), prepared.folder).values()
    alone = train.train(CONFIG, prepared, tmp_path / "alone")
    assert {**outcome.result, "seconds": 0} == {**alone, "seconds": 0}


def crash(folder, fields, *rest):
    if fields["seed"] == 1:
        os._exit(7)
    return Outcome(result={"seed": fields["seed"]})


def dies_once(folder, fields, *rest):
    os.makedirs(folder, exist_ok=True)
    if not os.path.exists(f"{folder}/tried"):
        pathlib.Path(folder, "tried").touch()
        os._exit(7)
    return Outcome(result={"seed": fields["seed"]})


def waits(folder, fields, data, device, threads, on_step, should_stop, imports):
    while not should_stop():
        time.sleep(0.01)
    return Outcome()


def where(folder, fields, data, device, threads, on_step, should_stop, imports):
    time.sleep(0.05)
    return Outcome(result={"device": device, "threads": threads})


def test_a_run_that_crashes_takes_no_other_with_it(tmp_path):
    with engines.make("local", crash, jobs=2) as pool:
        found = pool.run(configs(tmp_path, 4), tmp_path)
    assert [bool(outcome.error) for outcome in found.values()] == [False, True, False, False]
    assert "exit code 7" in found[tmp_path / "1"].error


def test_a_run_whose_process_dies_is_started_again(tmp_path):
    with engines.make("local", dies_once, jobs=2) as pool:
        assert all(outcome.result for outcome in pool.run(configs(tmp_path, 3), tmp_path).values())


def test_a_diverged_run_says_so(prepared, tmp_path):
    bad = configs(tmp_path, 1, learning_rate=1e30, optimizer="sgd", model="mlp")
    with engines.make("local", train.work, jobs=1) as pool:
        [outcome] = pool.run(bad, prepared.folder).values()
    assert outcome.diverged and "lower the learning rate" in outcome.error


def test_runs_stop_when_told_and_none_is_started_any_more(tmp_path):
    began = time.monotonic()
    with engines.make("local", waits, jobs=2) as pool:
        found = pool.run(configs(tmp_path, 5), tmp_path, should_stop=lambda: time.monotonic() - began > 1)
    assert all(outcome.stopped for outcome in found.values())


def test_each_gpu_has_one_run_at_a_time_and_cores_are_divided(tmp_path, monkeypatch):
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(local, "cores_of_this_process", lambda: 8)
    pool = local.Pool(where, device="cuda")
    assert pool.jobs == 2 and pool.threads == 4
    with pool:
        found = pool.run(configs(tmp_path, 4), tmp_path)
    assert sorted(outcome.result["device"] for outcome in found.values()) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert local.Pool(where, device="cuda", jobs=4).jobs == 4
    assert local.Pool(where, device="cpu").jobs == 8 and local.Pool(where, device="cpu").threads == 1
    assert local.Pool(where, device="cpu", jobs=2, threads=6).threads == 3


def test_the_affinity_counts_and_not_the_machine():
    assert local.cores_of_this_process() == len(os.sched_getaffinity(0))


SCRIPT = """
import pathlib, sys
from anyk.lab import engines, train
from anyk.lab.config import RunConfig
folder = pathlib.Path(sys.argv[2])
configs = {folder / str(seed): RunConfig(loss="softmax", epochs=100_000, seed=seed) for seed in range(4)}
with engines.ended_by_signals() as should_stop, engines.make("local", train.work, jobs=2) as pool:
    print("begun", flush=True)
    found = pool.run(configs, pathlib.Path(sys.argv[1]), should_stop=should_stop)
print(all(outcome.stopped for outcome in found.values()), flush=True)
"""


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid):
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    parents = {int(one): (int(two), state) for one, two, state in (line.split(None, 2) for line in listed.splitlines())}
    found, new = set(), {pid}
    while new:
        new = {child for child, (parent, state) in parents.items() if parent in new and not state.startswith("Z")} - found
        found |= new
    return found


@pytest.mark.parametrize("number", [1, 2, 3])
def test_signals_end_everything(prepared, tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, prepared.folder, tmp_path / "runs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "begun\n"
    deadline = time.monotonic() + 60
    while not list((tmp_path / "runs").glob("*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = children_of(process.pid)
    for _ in range(number):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    output, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    if number == 1:
        assert output == "True\n" and list((tmp_path / "runs").glob("*/checkpoint.safetensors"))
    deadline = time.monotonic() + 10
    alive = workers
    while alive and time.monotonic() < deadline:
        alive = {pid for pid in workers if is_alive(pid)}
        time.sleep(0.1)
    assert not alive


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_same_answer_on_ray(prepared, tmp_path):
    pytest.importorskip("ray")
    with engines.make("ray", train.work, jobs=2) as cluster:
        found = cluster.run(configs(tmp_path / "ray", 3), prepared.folder)
        again = cluster.run(configs(tmp_path / "ray", 3), prepared.folder)
    for (folder, outcome), other in zip(found.items(), again.values(), strict=True):
        alone = train.train(CONFIG.replace(seed=int(folder.name)), prepared, tmp_path / "alone" / folder.name)
        assert {**outcome.result, "seconds": 0} == {**alone, "seconds": 0} and other.result == outcome.result
