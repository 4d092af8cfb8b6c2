import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from anyk.lab import losses, train
from anyk.lab.config import DataFields, RunConfig
from anyk.lab.data.prepare import prepare
from anyk.lab.errors import Diverged, LabError
from anyk.lab.folder import FolderTaken, Run

CONFIG = RunConfig(loss="softmax", epochs=4, batch_size=20, learning_rate=0.01)


def test_a_run_learns_what_can_be_learned(prepared, tmp_path):
    result = train.train(CONFIG.replace(epochs=10), prepared, tmp_path / "run")
    assert result["test"]["top1"] > 0.6 and result["train"]["top1"] > 0.6
    run = Run(tmp_path / "run")
    assert run.result() == result and len(run.metrics()) == 10
    ranks = run.test()["ranks"]
    assert len(ranks) == len(prepared.split.test)
    assert math.isclose(float((ranks == 1).float().mean()), result["test"]["top1"], abs_tol=1e-6)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("loss", ["softmax", "gce", "error", "error:ksubset", "splitter", "lapsum", "smooth", "hinge", "truncated", "softmax_at_k"])
def test_every_loss_trains(prepared, tmp_path, loss):
    result = train.train(CONFIG.replace(loss=loss, epochs=2), prepared, tmp_path / "run")
    assert result["test"]["top1"] > 0.2


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_the_same_bits_after_stops(prepared, tmp_path, train_in_parts, model):
    config = CONFIG.replace(model=model, hidden=16, dropout=0.2)
    whole = train.train(config, prepared, tmp_path / "whole")
    assert train_in_parts(config, prepared, tmp_path / "parts") > 3
    parts = Run(tmp_path / "parts").result()
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


def test_the_same_bits_after_a_kill(prepared, tmp_path):
    """A process that is killed at any moment leaves a folder from which the run goes on."""
    script = tmp_path / "go.py"
    script.write_text(
        "import sys, pathlib\nfrom anyk.lab import train\nfrom anyk.lab.config import RunConfig\n"
        "from anyk.lab.data.prepare import open_prepared\n"
        "train.CHECKPOINT_SECONDS = train.CHECKPOINT_SHARE = 0\n"
        "config = RunConfig.from_json({'loss': 'error', 'epochs': 60, 'batch_size': 8, 'learning_rate': 0.01})\n"
        "train.train(config, open_prepared(pathlib.Path(sys.argv[1])), sys.argv[2])\n"
    )
    for _ in range(2):
        process = subprocess.Popen([sys.executable, script, prepared.folder, tmp_path / "killed"])
        while not (tmp_path / "killed" / "checkpoint.safetensors").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    config = RunConfig(loss="error", epochs=60, batch_size=8, learning_rate=0.01)
    killed = train.train(config, prepared, tmp_path / "killed", timeout=5)
    whole = train.train(config, prepared, tmp_path / "whole")
    assert {**killed, "seconds": 0} == {**whole, "seconds": 0}
    assert len(Run(tmp_path / "killed").metrics()) == 60


def test_a_run_that_has_ended_is_not_made_again(prepared, tmp_path):
    first = train.train(CONFIG, prepared, tmp_path / "run")
    assert train.train(CONFIG, prepared, tmp_path / "run", should_stop=lambda: True) == first


def test_a_folder_of_another_config_is_refused(prepared, tmp_path):
    train.train(CONFIG, prepared, tmp_path / "run")
    with pytest.raises(LabError, match="epochs was 4"):
        train.train(CONFIG.replace(epochs=5), prepared, tmp_path / "run")


def test_other_peoples_files_and_locks_are_respected(prepared, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(LabError, match=r"thesis\.txt"):
        train.train(CONFIG, prepared, tmp_path / "mine")
    with Run(tmp_path / "run").locked(), pytest.raises(FolderTaken):
        train.train(CONFIG, prepared, tmp_path / "run")


def test_damaged_runs_say_what_to_delete(prepared, tmp_path):
    train.train(CONFIG, prepared, tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{")
    with pytest.raises(LabError, match="delete"):
        train.train(CONFIG, prepared, tmp_path / "run")


def test_divergence_is_told(prepared, tmp_path):
    with pytest.raises(Diverged, match="lower the learning rate"):
        train.train(CONFIG.replace(learning_rate=1e30, optimizer="sgd", model="mlp"), prepared, tmp_path / "run")
    assert "learning rate" in (tmp_path / "run" / "error.txt").read_text()


def test_metrics_go_to_whoever_asks(prepared, tmp_path):
    got = []
    train.train(CONFIG, prepared, tmp_path / "run", on_metrics=lambda step, line: got.append((step, line["validation"]["top1"])))
    assert len(got) == 4 and got == [(line["step"], line["validation"]["top1"]) for line in Run(tmp_path / "run").metrics()]


def test_a_short_run_has_the_whole_schedule(prepared, tmp_path):
    train.train(CONFIG.replace(length=0.5), prepared, tmp_path / "run")
    rates = [line["learning_rate"] for line in Run(tmp_path / "run").metrics()]
    assert len(rates) == 2 and rates[-1] < 0.001


def test_linear_layers_start_at_zero_and_others_as_torch_has_it(prepared, tmp_path):
    from anyk.lab.models import ModelSpec, last_layer

    for model, zero in (("linear", True), ("mlp", False)):
        config = RunConfig(model=model).resolved("features", 100, 6)
        assert all(not bool(each.any()) for each in last_layer(ModelSpec.of(config, prepared).build())) == zero


def test_each_metric_has_its_own_epoch_where_asked(prepared, tmp_path):
    result = train.train(CONFIG.replace(select="each"), prepared, tmp_path / "run")
    assert {"top1", "top5"} <= set(result["selected"]) == set(result["test"])


def test_images_and_sequences_train(tmp_path):
    images = np.random.default_rng(0).integers(0, 100, (60, 8, 8, 1), dtype=np.uint8) + 50 * (np.arange(60) % 3)[:, None, None, None].astype(np.uint8)
    found = prepare((images, np.arange(60) % 3), DataFields(), tmp_path)
    for model in ("cnn", "resnet18"):
        config = RunConfig(loss="error", model=model, epochs=1, augment=("crop", "flip", "affine"))
        assert train.train(config, found, tmp_path / model)["data"]["kind"] == "images"
    (tmp_path / "s.txt").write_text("\n".join("a b c d a b c d" for _ in range(30)))
    found = prepare(f"sequences:{tmp_path / 's.txt'}", DataFields(mask_seen=False), tmp_path)
    assert train.train(RunConfig(loss="softmax", epochs=20), found, tmp_path / "s")["test"]["top1"] == 1.0


def test_what_does_not_go_with_the_data_is_told_before_a_folder_is_made(prepared, tmp_path):
    for config, says in (
        (RunConfig(model="cnn"), "takes images"),
        (RunConfig(augment=("flip",)), "augment"),
        (RunConfig(loss="nonsense"), "nonsense"),
        (RunConfig(p_k=(0.1,) * 10), "P_K reaches"),
        (RunConfig(model="no.such:thing"), "cannot be imported"),
    ):
        with pytest.raises(LabError, match=says):
            train.check(config, prepared, "cpu")
    with pytest.raises(LabError, match="device"):
        train.check(CONFIG, prepared, "nonsense")
    assert not (tmp_path / "run").exists()


def test_a_models_own_error_is_an_outcome_with_its_words(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\ncalls = 0\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        global calls\n        calls += 1\n"
        "        if calls > 3: raise RuntimeError('my own bug')\n        return super().forward(x)\n"
        "def make(shape, classes): return Net(shape[0], classes)\n"
    )
    fields = RunConfig(model="mine:make", loss="softmax").to_json()
    outcome = train.work(str(tmp_path / "run"), fields, str(prepared.folder), "cpu", 1, lambda *_: None, lambda: False)
    assert "my own bug" in outcome.error and not outcome.diverged and not outcome.stopped


def test_identity_is_what_a_result_depends_on():
    one, other = RunConfig(loss="softmax", p_k=(1.0,)), RunConfig(loss="softmax", p_k=(0.5, 0.5), q=0.3)
    assert losses.relevant(one) == losses.relevant(other) == {"loss": "softmax"}
    assert losses.relevant(RunConfig(loss="error", q=0.3)) == {"q": 0.3}
    assert json.dumps(RunConfig().identity()) == "{}"


def test_threads_and_the_callers_random_numbers_are_left_alone(prepared, tmp_path):
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    train.train(CONFIG, prepared, tmp_path / "run", threads=1)
    assert torch.random.get_rng_state().equal(before) and torch.get_num_threads() == threads and os.getpid()
