"""What a model's file keeps for lists of a promised coverage: thresholds as of PredictionSets, and what cannot be promised."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import anyk
import lab_data
import made
from anyk import prediction_sets
from anyk.lab.errors import LabError
from anyk.lab.run import batches, models, training
from anyk.lab.run.calibration import Calibration
from anyk.lab.run.config import Config


def drawn(count: int, seed: int = 0, classes: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(count, classes, generator=generator)
    return scores, scores.softmax(1).multinomial(1, generator=generator)[:, 0]


@pytest.mark.parametrize("count", [1, 19, 350, 5000])
def test_the_thresholds_are_those_of_prediction_sets_rounded_down(count: int) -> None:
    scores, target = drawn(count)
    found = Calibration.of(prediction_sets.conformity(scores, target), ())
    for step in (1, 5, 500, 800, 900, 950, 990, 999):
        try:
            exact = min(anyk.PredictionSets(scores, target, step / 1000).threshold, 0.0)
        except ValueError:
            assert step > len(found.thresholds)
            continue
        assert exact - 1.01e-4 < found.threshold(step / 1000) <= exact
    assert Calibration.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_what_lies_between_two_thousandths_gets_the_longer_lists() -> None:
    found = Calibration.of(prediction_sets.conformity(*drawn(5000)), ())
    assert found.threshold(0.9001) == found.threshold(0.901) < found.threshold(0.9)


@pytest.mark.parametrize(
    ("coverage", "message"),
    [
        (0.0, "coverage: expected a number above 0 and below 1, got 0."),
        (math.nan, "coverage: expected a number above 0 and below 1, got nan."),
        (
            0.99,
            r"coverage 0.99 cannot be promised by this model: .* 40 validation examples, and needs 99; ask for at most 0.975\.",
        ),
        (0.9995, "nothing is kept beyond 0.999; ask for at most 0.975"),
    ],
)
def test_what_cannot_be_promised(coverage: float, message: str) -> None:
    found = Calibration.of(prediction_sets.conformity(*drawn(40)), ())
    assert found.threshold(0.975) < 0
    with pytest.raises(LabError, match=message):
        found.threshold(coverage)
    with pytest.raises(LabError, match="with 0 validation examples, and needs 9; train it with more of them"):
        Calibration.of(torch.empty(0), ()).threshold(0.9)


def test_targets_that_are_no_guess_bound_what_can_be_promised() -> None:
    conformity = prediction_sets.conformity(*drawn(999))
    conformity[:100] = -math.inf
    conformity[100:110] = math.nan
    found = Calibration.of(conformity, ())
    assert found.threshold(0.889) < 0
    with pytest.raises(
        LabError, match=r"999 validation examples, too many of which have a target that it never guesses; .* 0.889"
    ):
        found.threshold(0.89)


@pytest.mark.parametrize(
    "changes",
    [
        {"examples": -1},
        {"examples": 2.5},
        {"chose": "the epoch"},
        {"thresholds": [0.0, -1.0, -0.5]},
        {"thresholds": [0.5]},
        {"thresholds": [math.nan]},
        {"thresholds": [-math.inf]},
        {"thresholds": [0.0] * 1000},
        {"more": 1},
    ],
    ids=str,
)
def test_a_file_that_lies_is_refused(changes: dict[str, Any]) -> None:
    fine = {"examples": 3, "chose": ["the epoch"], "thresholds": [0.0, -0.5]}
    assert Calibration.from_json(fine).chose == ("the epoch",)
    with pytest.raises(ValueError, match="calibration"):
        Calibration.from_json({**fine, **changes})
    plan = models.Plan("linear", (3,), ("a", "b"), hidden=4, dropout=0.0)
    with pytest.raises(ValueError, match="calibration"):
        models.Plan.from_json({**plan.to_json(), "calibration": {**fine, **changes}})


@pytest.mark.parametrize(
    ("changes", "chose"), [({}, ("the epoch",)), ({"select": "last"}, ()), ({"select": "last", "patience": 2}, ("the epoch",))]
)
def test_a_run_keeps_what_its_validation_examples_say(changes: dict[str, Any], chose: tuple[str, ...], tmp_path: Path) -> None:
    data = str(lab_data.write_embedding_set(tmp_path / "points"))
    config = Config(data=data, loss="softmax", epochs=2, **changes)
    training.train(config, tmp_path / "run")
    parts, classifier = made.trained(tmp_path / "run").parts, models.load(tmp_path / "run")
    found = classifier.plan.calibration
    assert found is not None
    assert found.chose == chose
    assert found.examples == len(parts.validation)
    dataset = batches.read_data(config)
    scores = classifier(dataset.train.take(parts.validation))
    exact = anyk.PredictionSets(scores, dataset.train.labels[parts.validation], 0.9).threshold
    assert found.threshold(0.9) == pytest.approx(min(exact, 0.0), abs=2e-4)
    training.train(config.replace(label_noise=0.3), tmp_path / "wrong labels")
    assert models.load(tmp_path / "wrong labels").plan.calibration is None
    training.train(config.replace(tested=False), tmp_path / "tuning")
    tuning = models.load(tmp_path / "tuning")
    assert tuning.plan.calibration is None
    with pytest.raises(
        LabError, match=r"saved without what coverage needs, .*: train it again without, or use anyk\.PredictionSets"
    ):
        tuning.guesses(torch.zeros(1, 16), coverage=0.9)
    with pytest.raises(LabError, match="give either the number of guesses or their coverage"):
        tuning.guesses(torch.zeros(1, 16), 3, coverage=0.9)


def test_coverage_holds_on_new_groups():
    """Examples of a group are nearly alike, and groups differ in size: a promise must be of new groups."""
    generator = torch.Generator().manual_seed(0)
    covered = []
    for _ in range(200):
        sizes = torch.randint(1, 60, (40,), generator=generator)
        hard = -3 * torch.rand(40, generator=generator) ** 2
        groups = torch.arange(40).repeat_interleave(sizes)
        held = hard[groups] - 0.05 * torch.rand(len(groups), generator=generator)
        new = -3 * torch.rand(500, generator=generator) ** 2 - 0.05 * torch.rand(500, generator=generator)
        found = Calibration.of(held, (), groups)
        assert found.examples == 40
        covered.append(float((new >= found.threshold(0.9)).float().mean()))
    assert sum(covered) / 200 >= 0.89
