"""Models of sequences: what they may see, what they learn, what is no guess, and many classes."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

import lab_data
from anyk.lab.data.tokens import IGNORED, OUT_OF_VOCABULARY, SequenceSplit
from anyk.lab.errors import LabError
from anyk.lab.run import batches, evaluation, losses, models, training
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.sequence_models import AttentionModel, ContextModel, GRUModel, SequenceModel
from made import trained

CLASSES, LENGTH = 7, 6
OTHER, PADDING = CLASSES, CLASSES + 1


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "read_data", lab_data.read_or_make)


def made(name: str, length: int = LENGTH, *, tied: bool = False, heads: int = 1) -> SequenceModel:
    torch.manual_seed(0)
    if name == "context":
        return ContextModel(length, CLASSES, 8, 12, 0.0, tied)
    if name == "gru":
        return GRUModel(CLASSES, 8, 12, 2, 0.0, tied)
    return AttentionModel(length, CLASSES, 8, 2, heads, 0.0, tied)


def some_tokens(batch: int = 5, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(CLASSES + 1, (batch, length), generator=torch.Generator().manual_seed(1))


def everywhere(tokens: torch.Tensor) -> torch.Tensor:
    return torch.ones(tokens.shape, dtype=torch.bool)


def quick(**changes: Any) -> Config:
    return Config(
        data="tokens", loss="softmax", model="context", context=8, embedding=16, hidden=32, layers=1, dropout=0.0,
        epochs=8, batch_size=32, learning_rate=2e-2,
    ).replace(**changes)  # fmt: skip


# What a model may see ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "heads"), [("gru", 1), ("attention", 1), ("attention", 2)])
def test_a_causal_model_does_not_look_ahead(name: str, heads: int) -> None:
    model, tokens = made(name, heads=heads), some_tokens()
    for mode in (model.train(), model.eval()):  # torch has code of its own for evaluation
        with torch.no_grad():
            scores = mode(tokens, everywhere(tokens)).view(*tokens.shape, CLASSES)
            for place in range(1, LENGTH):
                changed = tokens.clone()
                changed[:, place] = (tokens[:, place] + 1) % (CLASSES + 1)
                others = mode(changed, everywhere(tokens)).view(*tokens.shape, CLASSES)
                assert_close(others[:, :place], scores[:, :place])
                assert float((others[:, place] - scores[:, place]).abs().min(1).values.max()) > 1e-4
                assert float((others[:, -1] - scores[:, -1]).abs().max()) > 1e-5  # what is later does see it
            assert_close(mode(tokens), scores[:, -1])


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_does_not_see_the_padding(heads: int) -> None:
    """A padded context has the scores that a model without the padded places gives it, whatever stands for padding."""
    model, tokens = made("attention", heads=heads), some_tokens()
    short = made("attention", LENGTH - 2, heads=heads)
    short.load_state_dict({**model.state_dict(), "positions": model.state_dict()["positions"][2:]})
    padded = tokens.clone()
    padded[:, :2] = PADDING
    for mode in ("train", "eval"):
        getattr(model, mode)(), getattr(short, mode)()
        with torch.no_grad():
            rows = model(padded, everywhere(padded)).view(*padded.shape, CLASSES)
            assert rows.isfinite().all()
            assert_close(rows[:, 2:], short(tokens[:, 2:], everywhere(tokens[:, 2:])).view(-1, LENGTH - 2, CLASSES))
            assert model(torch.full_like(tokens, PADDING)).isfinite().all()  # nothing was before
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.embedding.weight[PADDING] += 5.0
        assert_close(changed(padded), model(padded))
        assert float((changed(tokens) - model(tokens)).abs().max()) == 0.0


@pytest.mark.parametrize("name", ["context", "gru", "attention"])
def test_tied_weights_are_there_once_and_learn_from_both_uses(name: str, tmp_path: Path) -> None:
    model, tokens = made(name, tied=True), some_tokens()
    wide = [key for key, tensor in model.state_dict().items() if tensor.shape[0] in (CLASSES, CLASSES + 2) and tensor.ndim == 2]
    assert wide == ["embedding.weight"]
    target = torch.arange(len(tokens)) % CLASSES
    nn.functional.cross_entropy(model(tokens), target).backward()
    assert model.embedding.weight.grad is not None
    both = model.embedding.weight.grad.clone()

    # The same with weights of two layers: the gradient is the sum of theirs.
    apart = made(name, tied=True)
    apart.output = nn.Linear(8, CLASSES)
    apart.output.load_state_dict({"weight": model.embedding.weight[:CLASSES].detach(), "bias": torch.zeros(CLASSES)})
    nn.functional.cross_entropy(apart(tokens), target).backward()
    assert apart.embedding.weight.grad is not None
    assert apart.output.weight.grad is not None
    assert_close(both[:CLASSES], apart.embedding.weight.grad[:CLASSES] + apart.output.weight.grad)
    assert float(apart.output.weight.grad.abs().min()) > 0
    assert not any(map(torch.equal, [both[:CLASSES]] * 2, [apart.embedding.weight.grad[:CLASSES], apart.output.weight.grad]))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.embedding.weight.zero_()
        assert float(copied(tokens).abs().max()) == 0.0  # its own embedding, not that of the first
        assert float(model(tokens).abs().max()) > 0


def test_a_rate_for_the_head() -> None:
    for name in ("context", "gru", "attention"):
        model = made(name)
        assert [id(each) for each in model.head_parameters()] == [id(each) for each in model.output.parameters()]
    with pytest.raises(LabError, match="tied gives the last layer the weights of the embedding"):
        training.check(quick(tied=True, head_learning_rate=0.1))
    training.check(quick(head_learning_rate=0.1))


# Training ------------------------------------------------------------------------------------------------------------------


def rule_accuracy(examples: SequenceSplit) -> float:
    """How often the token is the one after that before the last: no model knows more."""
    contexts = examples.contexts(torch.arange(len(examples)), 2)
    rule = torch.where(contexts[:, 0] < 8, (contexts[:, 0] + 1) % 8, 0)
    return float((rule == examples.labels).double().mean())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "context"},
        {"model": "context", "tied": True, "loss": "error"},
        {"model": "gru", "loss": "splitter"},
        {"model": "gru", "tied": True, "layers": 2, "dropout": 0.05},
        {"model": "attention", "tied": True, "heads": 2},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_rule_is_learned(changes: dict[str, Any], tmp_path: Path) -> None:
    config = quick(p_k=(0.7, 0.3), epochs=12 if changes["model"] == "attention" else 8).replace(**changes)
    result = training.train(config, tmp_path / "run")
    predictor = trained(tmp_path / "run")
    test = predictor.parts.test
    assert isinstance(test, SequenceSplit)
    assert result["test"]["top1"] > rule_accuracy(test) - 0.05  # about .87
    assert rule_accuracy(test) > 0.8
    assert result["data"]["context"] == 8
    assert result["data"]["tokens"] == "items"

    # Read back from its file, it says the same of the same tokens.
    loaded = models.load(tmp_path / "run")
    index = predictor.parts.test_index
    contexts = test.contexts(index, 8)
    with torch.no_grad():
        assert_close(loaded(contexts), predictor.model(predictor.reader(test, index)))
    guessed = load_file(tmp_path / "run" / "test.safetensors")["guesses"]
    assert [[name for name, _ in row] for row in loaded.guesses(contexts.int(), 2)] == [
        [loaded.classes[number] for number in row] for row in guessed[:, :2].tolist()
    ]
    hits = (guessed[:, 0] == test.labels[index]).double().mean()
    assert result["test"]["top1"] == pytest.approx(float(hits), abs=1e-9)


def test_every_place_of_a_sequence_trains_a_causal_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each training example once in an epoch, with the tokens before it, and no other place."""
    seen: list[tuple[int, ...]] = []
    forward = GRUModel.forward

    def listen(model: GRUModel, tokens: torch.Tensor, where: torch.Tensor | None = None, **asked: Any) -> torch.Tensor:
        if where is not None:
            seen.extend(tuple(tokens[row, : place + 1].tolist()) for row, place in where.nonzero().tolist())
        return forward(model, tokens, where, **asked)

    monkeypatch.setattr(GRUModel, "forward", listen)
    dataset = lab_data.sequence_set()
    parts = batches.divide(dataset, quick(train_fraction=0.5))
    training.train(quick(model="gru", epochs=1, train_fraction=0.5), tmp_path / "run")
    assert isinstance(dataset.train, SequenceSplit)
    assert len(seen) == len(parts.train) < 0.6 * len(dataset.training)
    wanted = dataset.train.contexts(parts.train, 8).tolist()
    # A window may begin in the middle of a sequence: fewer tokens are seen then, never others.
    ends = sorted((tokens[-1], tokens[-2:]) for tokens in seen if len(tokens) > 1)
    assert len(ends) > 0.7 * len(wanted)
    assert {pair for _, pair in ends} <= {tuple(row[-2:]) for row in wanted}
    assert sorted(tokens[-1] for tokens in seen) == sorted(row[-1] for row in wanted)


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tokens.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes):\n"
        "    assert shape == (5,), shape\n"
        "    return nn.Sequential(nn.Embedding(classes + 2, 8), nn.Flatten(), nn.Linear(40, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = quick(model="my_tokens:make", context=5, epochs=6)
    result = training.train(config, tmp_path / "run")
    assert result["test"]["top1"] > 0.75
    loaded = models.load(tmp_path / "run", trust=True)
    assert loaded.plan.tokens == "items"
    assert loaded(torch.full((2, 5), 9)).shape == (2, 8)
    assert Config(model="my_tokens:make").resolved("sequences", 1000).context == 32
    with pytest.raises(LabError, match=r"failed when called with \(32,\), 8 \(AssertionError"):
        training.check(config.replace(context=0))


def test_settings_that_sequences_do_not_take() -> None:
    for changes, problem in (
        ({"model": "mlp"}, "model mlp takes no tokens, but made items holds sequences of them: choose context, gru, attention"),
        ({"mixup": 0.2}, "mixup mixes numbers, but made items holds sequences"),
        ({"model": "attention", "heads": 3}, "heads should divide the embedding of 16 numbers, but is 3"),
        ({"data": "images", "model": "gru"}, "model gru takes sequences of tokens, but made images holds images"),
        ({"data": "images", "model": "auto", "mask_seen": True}, "mask_seen is for sequences, but made images holds images"),
    ):
        with pytest.raises(LabError, match=problem):
            training.check(quick(**changes))


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    return [{**line, "seconds": 0} for line in Run(folder).metrics()], load_file(folder / "model.safetensors")


@pytest.mark.parametrize("changes", [{"model": "gru", "dropout": 0.2}, {"model": "attention", "mask_seen": True}], ids=str)
def test_a_run_stopped_at_any_step_ends_with_the_same_bits(
    changes: dict[str, Any], tmp_path: Path, train_in_parts: Callable[[Config, Path], int]
) -> None:
    config = quick(epochs=2, evaluate_every=5, label_noise=0.1, data="items", batch_size=64, **changes)
    training.train(config, tmp_path / "whole")
    assert train_in_parts(config, tmp_path / "parts") > 3
    (lines, weights), (expected, others) = outcome(tmp_path / "parts"), outcome(tmp_path / "whole")
    assert lines == expected
    assert all(torch.equal(weights[name], others[name]) for name in others)


# What is no guess ----------------------------------------------------------------------------------------------------------


def slow_mask(scores: torch.Tensor, examples: SequenceSplit, index: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    masked, bounds = scores.clone(), examples.begins.tolist()
    for row, (example, label) in enumerate(zip(index.tolist(), labels.tolist(), strict=True)):
        place = int(examples.places[example])
        begin = max(bound for bound in bounds if bound <= place)
        for token in examples.stream[begin:place].tolist():
            if token < scores.shape[1] and token != label:
                masked[row, token] = -math.inf
    return masked


@pytest.mark.parametrize("model", ["context", "gru"])
def test_what_was_seen_is_no_guess(model: str, tmp_path: Path) -> None:
    config = quick(model=model, data="items", mask_seen=True, epochs=2)
    result = training.train(config, tmp_path / "run")
    predictor = trained(tmp_path / "run")
    test, index = predictor.parts.test, predictor.parts.test_index
    assert isinstance(test, SequenceSplit)
    with torch.no_grad():
        scores = slow_mask(predictor.model(predictor.reader(test, index)), test, index, test.labels[index])
    assert int(scores.isinf().sum()) > len(index)
    labels = test.labels[index].tolist()
    ranks = [
        1 + (sum(bool(row[c] >= row[t]) for c in range(55) if c != t) if t >= 0 else 55)
        for row, t in zip(scores, labels, strict=True)
    ]
    assert labels.count(OUT_OF_VOCABULARY) == 2  # which no guess hits
    kept = load_file(tmp_path / "run" / "test.safetensors")
    assert kept["ranks"].tolist() == ranks
    assert result["test"]["top1"] == sum(rank == 1 for rank in ranks) / len(ranks)
    for row, first in zip(scores, kept["guesses"].tolist(), strict=True):
        assert row[first].tolist() == sorted(row.tolist(), reverse=True)[: len(first)]
    # What calibrates is what `anyk predict` would show: there a target that was seen is no guess either.
    none = torch.full((len(index),), -1)
    with torch.no_grad():
        scores = slow_mask(predictor.model(predictor.reader(test, index)), test, index, none)
    found = evaluation.conformity(predictor.model.eval(), test, index, predictor.reader)
    for row, target, fit in zip(scores, labels, found.tolist(), strict=True):
        hidden, first = target < 0 or row[target] == -math.inf, target >= 0 and row[target] == row.max()
        expected = math.inf if first else -math.inf if hidden else float(row.log_softmax(0)[target])
        assert fit == pytest.approx(expected, abs=1e-5)
    assert found.isinf().sum() >= 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["softmax", "gce", "error", "splitter", "lapsum", "smooth"])
def test_losses_of_what_may_be_guessed(loss: str, smoothing: float) -> None:
    """The loss over the classes that are left, and no gradient to the others: as if these were not there."""
    config = Config(loss=loss, label_smoothing=smoothing, mask_seen=True, p_k=(0.5, 0.5), m=None)
    scores = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0, 3, 9, 5, 5, 1])
    seen = torch.zeros(6, 10, dtype=torch.bool)
    for row, label in enumerate(target.tolist()):
        seen[row, [c for c in range(10) if c != label][: row + 3]] = True  # up to eight: nothing but two is left
    masked = scores.masked_fill(seen, -math.inf).requires_grad_()
    each = [losses.criterion(config, 10)(masked[row], target[row]) for row in range(6)]
    together = losses.criterion(config, 10)(masked, target)
    together.backward()
    assert masked.grad is not None
    assert masked.grad.isfinite().all()
    assert float(masked.grad[seen].abs().max()) == 0.0
    assert_close(together, torch.stack(each).mean())
    for row in range(6):
        left = (~seen[row]).nonzero().flatten()
        fewer = losses.criterion(config.replace(mask_seen=False), len(left))
        expected = fewer(scores[row, left][None], (left == target[row]).nonzero()[0])
        assert_close(each[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", ["context", "gru"])
@pytest.mark.parametrize("loss", ["softmax", "gce", "error", "splitter"])
def test_the_target_is_never_masked_in_training(loss: str, model: str, tmp_path: Path) -> None:
    """Also where noise has put another label there, which the sequence may have had."""
    config = quick(model=model, loss=loss, data="items", mask_seen=True, label_smoothing=0.1, label_noise=0.5, p_k=(0.5, 0.5))
    training.train(config.replace(epochs=1), tmp_path / "run")
    lines = Run(tmp_path / "run").metrics()
    assert all(math.isfinite(line["train_loss"]) for line in lines)
    assert all(weight.isfinite().all() for weight in load_file(tmp_path / "run" / "model.safetensors").values())


def test_too_little_is_left_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows themselves: the most that a sequence has had before a training place."""
    few = lab_data.sequence_set(classes=30, others=30, length=12, last=True)
    monkeypatch.setattr(training, "read_data", lambda _: few)
    train, config = few.train, quick(mask_seen=True, loss="error")
    assert isinstance(train, SequenceSplit)
    parts = batches.divide(few, config)
    bounds = train.begins.tolist()
    left = [
        30 - len({token for token in train.stream[max(b for b in bounds if b <= place) : place].tolist() if token < 30})
        for place in train.places[parts.train].tolist()
    ]
    fits, too_long = ((0.5, *[0.0] * (k - 2), 0.5) for k in (min(left), min(left) + 1))
    training.check(config.replace(p_k=fits))
    training.check(config.replace(p_k=too_long, mask_seen=False))
    training.check(config.replace(p_k=too_long, loss="softmax"))
    with pytest.raises(
        LabError, match=rf"mask_seen leaves {min(left)} of the 30 classes .* P_K reaches to k = {min(left) + 1}"
    ):
        training.check(config.replace(p_k=too_long))


def test_the_masks_of_windows_are_those_of_their_places() -> None:
    dataset = lab_data.sequence_set(last=True)
    train = dataset.train
    assert isinstance(train, SequenceSplit)
    parts = batches.divide(dataset, quick())
    windows = batches.windows_of(dataset, parts, quick(model="gru"))
    assert windows is not None
    _, labels, places = windows.take(windows.shifted(torch.Generator().manual_seed(0)))
    where = labels != IGNORED
    scores = torch.randn(int(where.sum()), len(dataset.classes), generator=torch.Generator().manual_seed(1))
    found = batches.mask_seen(scores, train, places[where], labels[where])
    examples = torch.searchsorted(train.places, places[where])
    assert_close(found, slow_mask(scores, train, examples, labels[where]))
    assert batches.windows_of(dataset, parts, quick(model="context")) is None
    assert batches.steps_per_epoch(quick(model="gru", batch_size=33), parts, windows) == math.ceil(len(windows) / 4)
    assert batches.steps_per_epoch(quick(model="gru", batch_size=1), parts, windows) == len(windows)
    assert batches.steps_per_epoch(quick(), parts, None) == math.ceil(len(parts.train) / 32)


# Many classes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("model", "tried"), [("context", ("softmax", "error")), ("gru", ("gce", "splitter"))])
def test_of_many_classes_the_scores_are_not_stored(
    model: str, tried: tuple[str, ...], tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same training, to rounding, with the scores made in pieces."""
    for loss in tried:
        config = quick(
            model=model, tied=tied, loss=loss, p_k=(0.5, 0.5), m=4, epochs=1, label_smoothing=0.1, dropout=0.1, evaluate_every=4
        )
        curves = []
        for most in (20_000, 2):
            monkeypatch.setattr(losses, "MOST_SCORES", most)
            built = training._Training(config, Run(tmp_path / "none"), training.ALONE)
            assert (built.head is None) == (most == 20_000)
            assert list(built.model.state_dict()) == list(load_names(config))
            folder = tmp_path / f"{loss} {most}"
            training.train(config, folder)
            lines = Run(folder).metrics()
            curves.append([line["train_loss"] for line in lines] + [line["validation"]["cross_entropy"] for line in lines])
        assert curves[1] == pytest.approx(curves[0], rel=2e-4)
    # What is masked needs the scores, and so does a loss that no head knows.
    assert losses.head(built.criterion, built.model, config.replace(mask_seen=True)) is None
    hinge = config.replace(loss="hinge")
    assert losses.head(losses.criterion(hinge, CLASSES), built.model, hinge) is None


def load_names(config: Config) -> dict[str, torch.Tensor]:
    return models.build(config, lab_data.sequence_set()).state_dict()


def test_plans_of_models_of_sequences() -> None:
    dataset = lab_data.sequence_set()
    plan = models.Plan.of(batches.resolved(quick(model="attention", heads=2), dataset), dataset)
    assert models.Plan.from_json(plan.to_json()) == plan
    for changes, problem in (
        ({"tokens": ""}, "tokens should be items, words or python, but is ''"),
        ({"shape": [3, 8, 8]}, "shape should be 1 positive numbers"),
        ({"embedding": 0}, "embedding should be a positive number"),
        ({"tied": 1}, "tied should be true or false"),
    ):
        with pytest.raises(ValueError, match=problem):
            models.Plan.from_json({**plan.to_json(), **changes})
    classifier = models.Classifier(plan, plan.build().state_dict())
    for wrong, error, problem in (
        (torch.zeros(2, 8), TypeError, "examples: expected integers, got torch.float32"),
        (torch.zeros(2, 7, dtype=torch.int64), ValueError, r"examples: expected shape \(N, 8\), got \(2, 7\)"),
        (torch.full((2, 8), 10), ValueError, "examples: expected tokens from 0 to 9, got 10"),
        (torch.full((2, 8), -1), ValueError, "examples: expected tokens from 0 to 9, got -1"),
    ):
        with pytest.raises(error, match=problem):
            classifier(wrong)
    assert classifier(torch.full((0, 8), 9)).shape == (0, 8)
    assert dataclasses.replace(plan, model="gru").build()(torch.full((2, 8), 9)).shape == (2, 8)
