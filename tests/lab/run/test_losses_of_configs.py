"""From a config's words to a loss: the bounded family, its control, and what moves over a run."""

import pytest
import torch

import anyk
from anyk.lab.run import loss_names
from anyk.lab.run.config import Config
from anyk.lab.run.losses import SETTINGS, criterion, reschedule, settings_of, trained_ks

SCORES = torch.randn(8, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = torch.arange(8)


def test_error_is_the_library_s():
    config = Config(loss="error:lapsum", ce_weight=0.4, q=0.6, temperature=2.0, label_smoothing=0.1, m=20)
    expected = anyk.topk_error(
        SCORES, TARGET, {1: 0.5, 5: 0.5}, anyk.LapSum(2.0), ce_weight=0.4, q=0.6, label_smoothing=0.1, m=20
    )
    torch.testing.assert_close(criterion(config, 100)(SCORES, TARGET), expected)
    default = anyk.topk_error(SCORES, TARGET, {1: 0.5, 5: 0.5})
    torch.testing.assert_close(criterion(Config(loss="error"), 100)(SCORES, TARGET), default)
    assert trained_ks(criterion(config, 100), config) == [1, 5]


def test_the_control_knows_no_k():
    """(1 - p^q) / q with the softmax over all classes, whatever P_K, m and temperature say."""
    config = Config(loss="gce", ce_weight=0.1, q=0.4, m=7, temperature=3.0, temperature_end=9.0)
    loss = criterion(config, 100)
    reschedule(loss, config, 0.5)
    p = SCORES.softmax(-1).gather(-1, TARGET[:, None])
    torch.testing.assert_close(loss(SCORES, TARGET), (-0.1 * p.log() + 0.9 * (1 - p**0.4) / 0.4).mean())
    assert trained_ks(loss, config) == [1]


@pytest.mark.parametrize("loss", ["error", "gce"])
def test_the_guide_moves(loss):
    config = Config(loss=loss, ce_weight=0.8, ce_weight_end=0.2)
    made = criterion(config, 100)
    for progress, ce_weight in ((0.0, 0.8), (0.5, 0.5), (1.0, 0.2)):
        reschedule(made, config, progress)
        assert made.ce_weight == pytest.approx(ce_weight)
        still = criterion(config.replace(ce_weight=made.ce_weight, ce_weight_end=None), 100)
        torch.testing.assert_close(made(SCORES, TARGET), still(SCORES, TARGET))


def test_temperature_and_p_k_move_with_the_error():
    config = Config(loss="error", temperature=1.0, temperature_end=4.0, p_k=(1.0, 0.0), p_k_end=(0.0, 1.0))
    made = criterion(config, 100)
    reschedule(made, config, 0.5)
    expected = anyk.topk_error(SCORES, TARGET, [0.5, 0.5], anyk.LapSum(2.0))
    torch.testing.assert_close(made(SCORES, TARGET), expected)
    assert trained_ks(made, config) == [1, 2]


OTHER = {
    "p_k": (0.0, 0.3, 0.3, 0.2, 0.2),
    "p_k_end": (0.0, 0.0, 0.0, 1.0, 0.0),
    "m": 6,
    "temperature": 2.5,
    "temperature_end": 7.0,
    "top1": "operator",
    "softmax_over": "candidates",
    "ce_weight": 0.9,
    "ce_weight_end": 0.6,
    "q": 0.3,
    "swap": "cauchy",
    "wires": "given",
    "anchors": "topk",
    "label_smoothing": 0.2,
}


@pytest.mark.parametrize("loss", [name.replace("OPERATOR", "lapsum") for name in loss_names.names()])
def test_settings_of_a_loss_are_those_that_change_it(loss, tmp_path):
    """Half-way through a run, on examples of which some have many rivals."""
    (tmp_path / "p_k.json").write_text(str([[0.0, 0.0, 1.0]] * 100))
    others = OTHER | {"p_k_file": str(tmp_path / "p_k.json")}
    assert set(others) == set(SETTINGS)
    start = Config(loss=loss, top1="mixed" if "softmax_over" in settings_of(loss) else "separate", m=12)

    def value(config):
        made = criterion(config, 100)
        reschedule(made, config, 0.5)
        return made(3 * SCORES, TARGET)

    changing = {name for name, other in others.items() if not torch.equal(value(start), value(start.replace(**{name: other})))}
    # A loss for one k sees no more of P_K than its length, which is the same here.
    length_alone = {"p_k"} if loss_names.find(loss).family == "one k" else set()
    assert changing == settings_of(loss) - length_alone


def test_softmax_stays_softmax_where_a_guide_moves_and_what_was_seen_is_masked():
    config = Config(loss="softmax", mask_seen=True, ce_weight=0.5, ce_weight_end=0.1)
    made = criterion(config, 10)
    reschedule(made, config, 0.5)
    assert made.ce_weight == 1.0
