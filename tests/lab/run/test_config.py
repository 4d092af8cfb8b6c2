"""Configs: what they accept, what they say about the rest, and that they survive JSON."""

import json
from typing import Any

import pytest

from anyk.lab.errors import LabError
from anyk.lab.run.config import BY_KIND, Config, Setting
from anyk.lab.run.training import learning_rate


def test_json_round_trip() -> None:
    config = Config(
        p_k=(0.25, 0.75), ce_weight=0, ce_weight_end=1, m=7, augment=("crop",), clip=1, amp=True, loss="lapsum", seed=3
    )
    assert config.clip == 1.0
    assert isinstance(config.clip, float)
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": "3"}, "epochs should be an integer, but is '3'"),
        ({"epochs": True}, "epochs should be an integer"),
        ({"amp": 1}, "amp should be true or false"),
        ({"temperature": "warm"}, "temperature should be a number, but"),
        ({"temperature": 0.0}, "temperature should be between"),
        ({"temperature": float("nan")}, "temperature should be a number, but"),
        ({"p_k": []}, "p_k: expected at least one"),
        ({"p_k": [0.5, 0.6]}, "p_k: expected probabilities that sum to 1"),
        ({"p_k": [0.5, "x"]}, "p_k should be numbers"),
        ({"p_k": [1.0], "p_k_end": [0.5, 0.5]}, "p_k_end should be as long as p_k"),
        ({"p_k_end": [0, 0, 0, 0, 1.0], "p_k_file": "x.json"}, "cannot be combined"),
        ({"m": "all"}, "m should be an integer or auto or nothing, but is 'all'"),
        ({"ce_weight": 1.5}, "ce_weight should be between 0 and 1"),
        ({"swap": "hard"}, "swap: expected one of 'logistic', .* got 'hard'"),
        ({"loss": "bubble"}, "loss: expected one of 'softmax', 'gce', 'error', 'error:OPERATOR', 'splitter', .* got 'bubble'"),
        (
            {"loss": "error", "ce_weight": 0, "label_smoothing": 0.1},
            "label_smoothing is that of the cross-entropy, but ce_weight is 0",
        ),
        ({"m": 0}, "m should be between"),
        ({"measure": [3, 0]}, "measure should be k of at least 1"),
        ({"learning_rat": 1.0}, "unknown field 'learning_rat'"),
    ],
    ids=str,
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match="the config.*" + message):
        Config.from_json(fields)


@pytest.mark.parametrize("kind", BY_KIND)
def test_resolving_fills_what_was_left_open_and_nothing_else(kind: str) -> None:
    resolved = Config().resolved(kind, 100_000)
    assert {name: getattr(resolved, name) for name in BY_KIND[kind]} == BY_KIND[kind]
    own = Setting(
        learning_rate=0.5, schedule="cosine", batch_size=7, epochs=3, shuffle="full", augment=(), model="gru", hidden=5,
        dropout=0.0, context=3, embedding=4, layers=7,
    )  # fmt: skip
    assert own.resolved(kind, 100) == own
    assert Config().resolved(kind, 200).batch_size == 10  # an epoch has twenty steps even so
    assert Config().resolved(kind, 3).batch_size == 1


def test_learning_rate_schedules() -> None:
    def rates(schedule: Any) -> list[float]:
        config = Config(learning_rate=2.0, schedule=schedule)
        return [learning_rate(config, step / 100) for step in range(101)]

    assert rates("constant") == [2.0] * 101
    cosine, onecycle = rates("cosine"), rates("onecycle")
    assert cosine[0] == 2.0
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] == pytest.approx(0)
    assert onecycle[0] == pytest.approx(0.08)
    assert max(onecycle) == pytest.approx(onecycle[30]) == pytest.approx(2.0)
    assert onecycle[-1] == pytest.approx(0)
