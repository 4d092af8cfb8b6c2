"""Prediction sets: the promise over many splits, the same sets by another definition, and what breaks neither."""

import math

import pytest
import torch

import anyk

CLASSES, HELD_OUT, NEW, SPLITS = 12, 49, 100, 1000


def pool(kind, size=4000):
    """Scores and targets: drawn from the model's own probabilities, or by another rule."""
    generator = torch.Generator().manual_seed(3)
    scores = 2 * torch.randn(size, CLASSES, generator=generator, dtype=torch.float64)
    target = scores.softmax(1).multinomial(1, generator=generator)[:, 0]
    if kind == "ties":
        scores = scores.round()
    elif kind == "half precision":
        scores = scores.bfloat16()
    elif kind == "poor":
        scores = torch.randn(size, CLASSES, generator=generator)
    elif kind == "overconfident":
        scores = 50 * scores
    elif kind == "good":
        scores[torch.arange(size), target] += 5
    elif kind == "excluded":  # some classes are no guess, and a few of these are right all the same
        scores = scores.masked_fill(torch.rand(size, CLASSES, generator=generator) < 0.03, -math.inf)
    return scores, target


def mean_coverage(kind, coverage):
    """Over the splits, and its standard error."""
    scores, target = pool(kind)
    generator, found = torch.Generator().manual_seed(1), torch.empty(SPLITS)
    for split in range(SPLITS):
        places = torch.randint(len(target), (HELD_OUT + NEW,), generator=generator)
        held_out, new = places[:HELD_OUT], places[HELD_OUT:]
        shown = anyk.PredictionSets(scores[held_out], target[held_out], coverage)(scores[new])
        found[split] = shown[torch.arange(NEW), target[new]].float().mean()
    return found.mean().item(), found.std().item() / math.sqrt(SPLITS)


# Of 50 examples, 0.9 and 0.8 are whole numbers: the mean is the coverage itself. 0.93 is rounded up to 0.94.
@pytest.mark.parametrize(
    ("kind", "coverage", "expected"),
    [
        ("own", 0.9, 0.9),
        ("own", 0.8, 0.8),
        ("own", 0.93, 0.94),
        ("poor", 0.9, 0.9),
        ("poor", 0.98, 0.98),
        ("overconfident", 0.9, 0.9),
    ],
)
def test_the_promise_is_kept_over_a_thousand_splits_and_no_more_than_that(kind, coverage, expected):
    mean, error = mean_coverage(kind, coverage)
    assert abs(mean - expected) < 4 * error
    assert 4 * error < 1 / (HELD_OUT + 1)  # one place off would show


@pytest.mark.parametrize(
    ("kind", "coverage"), [("ties", 0.9), ("half precision", 0.9), ("good", 0.9), ("good", 0.5), ("excluded", 0.9)]
)
def test_the_promise_is_kept_with_equal_scores_and_where_the_first_guess_is_enough(kind, coverage):
    mean, error = mean_coverage(kind, coverage)
    assert mean > coverage - 4 * error


@pytest.mark.parametrize("kind", ["own", "ties", "good", "excluded"])
@pytest.mark.parametrize("coverage", [0.1, 0.55, 0.9, 0.98])
def test_a_class_is_shown_unless_too_many_held_out_targets_fit_better(kind, coverage):
    """The definition by p-values, one class at a time, in plain Python."""
    scores, target = (part[:260] for part in pool(kind))

    def fit(row, label):
        return math.inf if row[label] == max(row) else row[label] - math.log(sum(map(math.exp, row)))

    rows = scores.double().tolist()
    known = [fit(rows[place], int(target[place])) for place in range(60)]
    most = round(100 * coverage) * 61  # hundredths: no rounding of numbers that binary does not have
    expected = [
        [100 * sum(one > fit(row, label) + 1e-9 for one in known) < most for label in range(CLASSES)] for row in rows[60:]
    ]
    assert anyk.PredictionSets(scores[:60], target[:60], coverage)(scores[60:]).tolist() == expected


def test_sets_of_right_probabilities_are_shorter_than_any_list_of_fixed_length():
    scores, target = pool("own")
    shown = anyk.PredictionSets(scores[:2000], target[:2000], 0.9)(scores[2000:])
    accuracy = anyk.topk_accuracy(scores[2000:], target[2000:], range(1, CLASSES + 1))
    fixed = next(k for k in accuracy if accuracy[k] >= 0.9)
    assert shown.sum(1).double().mean() < 0.9 * fixed
    assert shown.sum(1).min() == 1
    assert shown.sum(1).max() > fixed


def test_every_set_is_the_first_guesses_and_has_at_least_one():
    scores, target = pool("own")
    shown = anyk.PredictionSets(scores, target, 0.05)(scores[:50])  # the first guesses are right more often than that
    assert shown.sum(1).tolist() == [1] * 50
    assert (shown.long().argmax(1) == scores[:50].argmax(1)).all()
    shown = anyk.PredictionSets(scores, target, 0.9)(scores[:50])
    lowest = scores[:50].masked_fill(~shown, math.inf).amin(1)
    assert (lowest > scores[:50].masked_fill(shown, -math.inf).amax(1)).all()


@pytest.mark.parametrize(("coverage", "needed"), [(0.5, 1), (0.9, 9), (0.95, 19), (0.99, 99), (0.55, 2)])
def test_too_few_examples_are_counted(coverage, needed):
    scores, target = pool("own")
    anyk.PredictionSets(scores[:needed], target[:needed], coverage)
    with pytest.raises(ValueError, match=f"at least {needed} examples for a coverage of {coverage:g}, got {needed - 1}:"):
        anyk.PredictionSets(scores[: needed - 1], target[: needed - 1], coverage)


def test_bad_arguments_are_named():
    scores, target = pool("own")
    for wrong in (0, 1, 1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match="coverage: expected a number above 0 and below 1, got"):
            anyk.PredictionSets(scores, target, wrong)
    with pytest.raises(TypeError, match="coverage: expected a number"):
        anyk.PredictionSets(scores, target, "0.9")
    with pytest.raises(ValueError, match="target: expected shape"):
        anyk.PredictionSets(scores, target[:-1])
    with pytest.raises(ValueError, match="target: expected class indices from 0 to 11, got 12"):
        anyk.PredictionSets(scores, torch.full_like(target, 12))
    for bad, rows in ((math.nan, 1), (math.inf, 1)):
        broken = scores.clone()
        broken[5, 3] = bad
        with pytest.raises(ValueError, match=f"no NaN, no inf and no row of -inf alone, got them in {rows} of 4000 rows"):
            anyk.PredictionSets(broken, target)
    with pytest.raises(TypeError, match="scores: expected a floating-point tensor"):
        anyk.PredictionSets(scores, target)(scores.long())


def test_half_precision_is_computed_in_float32():
    scores, target = pool("half precision")
    show, same = anyk.PredictionSets(scores, target), anyk.PredictionSets(scores.float(), target)
    assert show.threshold == same.threshold
    assert torch.equal(show(scores), same(scores.float()))


def test_rows_of_which_nothing_is_known_are_shown_whole():
    show = anyk.PredictionSets(*pool("own"), 0.5)
    for bad in (math.nan, math.inf):
        row = torch.zeros(CLASSES)
        row[2] = bad
        assert show(row).all()
    assert show(torch.full((CLASSES,), -math.inf)).all()
    padded = torch.tensor([3.0, *[-math.inf] * (CLASSES - 1)])
    assert show(padded).tolist() == [True] + [False] * (CLASSES - 1)


def test_targets_that_are_no_guess_need_all_classes():
    scores, target = torch.zeros(20, 4), torch.zeros(20, dtype=torch.long)
    scores[:3, 0] = -math.inf
    assert anyk.PredictionSets(scores, target, 0.9)(torch.tensor([1.0, 0.0, 0.0, -math.inf])).all()
    assert anyk.PredictionSets(scores, target, 0.8)(torch.tensor([1.0, 0.0, 0.0, -math.inf])).sum() == 1


def test_positions_are_examples():
    scores, target = (part[:300] for part in pool("own"))
    show = anyk.PredictionSets(scores, target)
    placed = scores.reshape(50, 6, CLASSES).movedim(-1, 1)
    assert anyk.PredictionSets(placed, target.reshape(50, 6)).threshold == pytest.approx(show.threshold)
    assert torch.equal(show(placed), show(scores).reshape(50, 6, CLASSES).movedim(-1, 1))
    assert torch.equal(show(scores[0]), show(scores)[0])
    assert show(scores[:0]).shape == (0, CLASSES)
    assert show(scores[:0]).dtype == torch.bool
    assert not show(scores.requires_grad_()).requires_grad
    assert repr(show).startswith("PredictionSets(coverage=0.9, threshold=-")
