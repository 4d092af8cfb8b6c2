"""Models of the user's and of timm: found by a word, tried before any run, trained, saved and read back."""

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lab_data
import made
from anyk.lab.engines.local import Pool
from anyk.lab.errors import LabError
from anyk.lab.run import models, own_models, training
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run

MODULE = """
    import pathlib

    import torch
    from torch import nn

    pathlib.Path("imported.txt").touch()

    class Net(nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.backbone = nn.Sequential(nn.Flatten(), nn.LazyLinear(24), nn.ReLU(), nn.Dropout(0.3))
            self.head = nn.Linear(24, classes)
            self.register_buffer("shift", torch.full((24,), 0.5), persistent=False)

        def forward(self, x):
            return self.head(self.backbone(x) + self.shift)

    def make(shape, classes):
        return Net(shape, classes)

    def tied(shape, classes):
        model = Net(shape, classes)
        model.again = model.head
        return model

    def frozen(shape, classes):
        return nn.Linear(shape[0], classes).requires_grad_(False)

    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}
        def set_extra_state(self, state):
            pass

    def odd(shape, classes):
        return Odd(shape[0], classes)

    def narrow(shape, classes):
        return nn.Linear(shape[0], 3)

    def endless(shape, classes):
        model = nn.Linear(shape[0], classes)
        nn.init.constant_(model.weight, float("inf"))
        return model

    def mistaken(shape, classes):
        return nn.Linear(shape, classes)

    def picky(shape, classes):
        return nn.Conv2d(3, classes, 3)

    def nothing(shape, classes):
        return None

    def headless(shape, classes):
        model = nn.Bilinear(1, 1, classes)
        model.forward = lambda x: nn.Bilinear.forward(model, x[:, :1], x[:, :1])
        return model
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module in it, which is not on the path."""
    (tmp_path / "my_models.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import math\n\nmath.nonsense\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_models", "broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def config(here: Path) -> Config:
    data = lab_data.write_embedding_set(here / "points")
    return Config(data=str(data), model="my_models:make", epochs=3, batch_size=32, learning_rate=1e-2, m=8)


def test_a_model_of_yours_is_trained_in_processes_and_read_back(here: Path, config: Config) -> None:
    with Pool(1) as pool:
        (outcome,) = pool.run({here / "run": config}).values()
    assert outcome.result is not None, outcome.error
    assert outcome.result["test"]["top5"] > 0.6
    assert outcome.result["config"]["model"] == "my_models:make"
    again = training.train(config, here / "again")
    assert again["test"] == outcome.result["test"]
    assert str(here) not in sys.path

    predictor = made.trained(here / "run")
    examples = predictor.parts.test.take(predictor.parts.test_index)
    scores = predictor.model(predictor.reader(predictor.parts.test, predictor.parts.test_index))
    make = own_models.find("my_models:make")
    for arguments in ({"trust": True}, {"model": make}, {"model": "my_models:make"}):
        state = torch.get_rng_state()
        loaded = models.load(here / "run", **arguments)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(loaded(examples), scores)


def test_reading_a_file_imports_nothing_that_it_names(here: Path, config: Config) -> None:
    training.train(config.replace(epochs=1), here / "run")
    sys.modules.pop("my_models")
    (here / "imported.txt").unlink()
    with pytest.raises(
        LabError, match=r"names the model my_models:make, .*\(--model my_models:make, in Python model=.* or trust=True\)"
    ):
        models.load(here / "run")
    # A function of the caller's stands in for the one that the file names.
    loaded = models.load(here / "run", model=_net)
    assert loaded(torch.zeros(2, 16)).shape == (2, 12)
    assert "my_models" not in sys.modules
    assert not (here / "imported.txt").exists()


def _net(shape: tuple[int, ...], classes: int) -> nn.Module:
    model = nn.Module()
    model.backbone = nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 24), nn.ReLU())
    model.head = nn.Linear(24, classes)
    model.forward = lambda x: model.head(model.backbone(x))
    return model


def test_a_run_with_a_rate_of_its_own_for_the_head_goes_on_with_the_same_bits(
    here: Path, config: Config, train_in_parts: Callable[[Config, Path], int]
) -> None:
    config = config.replace(head_learning_rate=0.04, schedule="onecycle", optimizer="adamw", weight_decay=0.01)
    training.train(config, here / "whole")
    assert train_in_parts(config, here / "parts") > 3
    whole, parts = ((here / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    training.train(config.replace(head_learning_rate=0.0), here / "same")
    assert (here / "same" / "model.safetensors").read_bytes() != whole


def test_the_head_is_the_last_linear_layer_or_what_the_model_says(here: Path, config: Config) -> None:
    config = config.replace(head_learning_rate=0.04)
    net = _net((16,), 12)
    rest, head = models.parameter_groups(net, config)
    assert [id(p) for p in head["params"]] == [id(p) for p in net.head.parameters()]
    assert len(rest["params"]) == 2
    assert (rest["factor"], head["factor"]) == (1.0, 4.0)
    net.get_classifier = lambda: net.backbone
    assert models.parameter_groups(net, config)[1]["params"][0] is net.backbone[1].weight
    net.head_parameters = lambda: iter([net.head.bias])
    assert models.parameter_groups(net, config)[1]["params"] == [net.head.bias]
    (all_of_it,) = models.parameter_groups(nn.Linear(3, 2), config)
    assert (len(all_of_it["params"]), all_of_it["factor"]) == (2, 4.0)
    net.head_parameters = lambda: [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(LabError, match="head_learning_rate needs a head"):
        models.parameter_groups(net, config)
    with pytest.raises(LabError, match="head_learning_rate needs a head"):
        training.check(config.replace(model="my_models:headless"))


def test_both_learning_rates_follow_the_schedule(here: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = torch.optim.Adam.step

    def note(optimizer: Any, *arguments: Any) -> Any:
        seen.append([group["lr"] for group in optimizer.param_groups])
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", note)
    training.train(config.replace(head_learning_rate=0.03, schedule="cosine"), here / "run")
    assert seen[0] == [0.01, 0.03]
    assert seen[-1][0] < 0.002
    assert all(head == pytest.approx(3 * rest) for rest, head in seen)


def test_weights_that_are_tied_are_saved(here: Path, config: Config) -> None:
    tied = config.replace(model="my_models:tied", epochs=1)
    with pytest.raises(training.Stopped):  # which writes a checkpoint
        training.train(tied, here / "run", should_stop=iter([False, True]).__next__)
    training.train(tied, here / "run")
    loaded = models.load(here / "run", trust=True)
    assert torch.equal(loaded.model.again.weight, loaded.model.head.weight)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("no_such_module:make", r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_module'\)"),
        ("broken:make", r"cannot be imported \(AttributeError: module 'math' has no attribute 'nonsense'"),
        ("my_models:missing", "is not found: my_models has no missing"),
        ("my_models:nothing", "should return an nn.Module, but returned a NoneType"),
        ("my_models:mistaken", r"failed when called with \(16,\), 12 \(TypeError: .*, line \d+ of my_models.py\)"),
        ("my_models:picky", r"failed on two examples of shape \(16,\) \(RuntimeError: "),
        ("my_models:narrow", r"should give scores of shape \(2, 12\) for two examples, but gives the shape \(2, 3\)"),
        ("my_models:endless", "should give finite scores"),
        ("my_models:frozen", "has no parameter that can be trained"),
        ("my_models:odd", "has _extra_state in its state_dict"),
    ],
)
def test_what_is_wrong_with_a_model_is_one_line_before_any_run(word: str, problem: str, here: Path, config: Config) -> None:
    with pytest.raises(LabError, match=problem) as caught:
        training.check(config.replace(model=word))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["", "lineer", "my_models:", ":make", "timm:", "timm:hf-hub:org/net", "a b:c", "my:x:y"])
def test_words_that_name_no_model(word: str) -> None:
    with pytest.raises(LabError, match=r"model should be auto, linear, .*, module:function or timm:NAME, but is"):
        Config(model=word)


def test_a_function_becomes_its_word(here: Path) -> None:
    make = own_models.find("my_models:make")
    assert own_models.word_of(make) == "my_models:make"
    assert own_models.word_of("cnn") == "cnn"
    assert own_models.word_of(own_models.find("my_models:Net")) == "my_models:Net"
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("def make(shape, classes): ...", scope)
    with pytest.raises(LabError, match=r"model make is defined in the script or notebook itself; runs are processes .*move it"):
        own_models.word_of(scope["make"])
    with pytest.raises(LabError, match="at the top level"):
        own_models.word_of(lambda shape, classes: nn.Linear(1, 1))
    with pytest.raises(LabError, match="a function that makes a new model for each run, but is a Linear"):
        own_models.word_of(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(LabError, match="but is a int"):
        own_models.word_of(3)  # type: ignore[arg-type]


TIMM = """
    from torch import nn

    ASKED = []

    class Tiny(nn.Module):
        def __init__(self, channels, classes):
            super().__init__()
            self.fc = nn.Linear(channels, classes)
            self.after = nn.Linear(classes, classes)

        def forward(self, x):
            return self.after(self.fc(x.mean((2, 3))))

        def get_classifier(self):
            return self.fc

    def create_model(name, pretrained=False, num_classes=1000, in_chans=3):
        ASKED.append((name, pretrained, num_classes, in_chans))
        if name != "tiny.b1-in1k":
            raise RuntimeError(f"Unknown model ({name})")
        return Tiny(in_chans, num_classes)
"""


def test_a_model_of_timm_itself(tmp_path: Path) -> None:
    try:
        importlib.import_module("timm")
    except Exception as error:  # torchvision, which it needs, is built for one torch
        pytest.skip(f"timm does not import here ({type(error).__name__}: {error})")
    photos = lab_data.write_photos(tmp_path / "photos")
    config = Config(data=str(photos), model="timm:test_resnet", loss="error", p_k=(0.5, 0.5), epochs=1, batch_size=8)
    training.train(config.replace(head_learning_rate=0.01), tmp_path / "run")
    model = models.load(tmp_path / "run")
    assert model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 4)


def test_models_of_timm_by_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "timm.py").write_text(textwrap.dedent(TIMM))
    monkeypatch.syspath_prepend(tmp_path / "place")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setattr(training, "read_data", lambda _: lab_data.image_set())
    config = Config(model="timm:tiny.b1-in1k:pretrained", epochs=1, batch_size=24, head_learning_rate=0.1)
    training.train(config, tmp_path / "run")
    import timm

    assert timm.ASKED == [("tiny.b1-in1k", True, 6, 1)]
    assert models.load(tmp_path / "run")(torch.zeros(2, 1, 12, 12, dtype=torch.uint8)).shape == (2, 6)
    assert timm.ASKED[1:] == [("tiny.b1-in1k", False, 6, 1)] * 2  # the weights are there; one is only looked at
    training.check(config.replace(model="timm:tiny.b1-in1k"))
    assert timm.ASKED[-1][1] is False
    with pytest.raises(LabError, match=r"timm cannot make huge \(RuntimeError: Unknown model \(huge\)\)"):
        training.check(config.replace(model="timm:huge"))
    (tmp_path / "place" / "timm.py").write_text("raise RuntimeError('made for another torch')")
    monkeypatch.delitem(sys.modules, "timm")
    with pytest.raises(LabError, match=r"needs timm \(RuntimeError: made for another torch\): pip install timm"):
        training.check(config)
    assert Run(tmp_path / "run").config() == config
