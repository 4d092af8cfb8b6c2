"""What a loss is measured by beside softmax: the most frequent class, and scikit-learn's logistic regression."""

import importlib.util
import warnings
from typing import Any

import numpy as np
import torch

import anyk
from anyk.lab.config import ComparisonConfig
from anyk.lab.data.prepare import Prepared
from anyk.lab.findings import Method, SeedRun

MOST_ROWS, MOST_NUMBERS = 50_000, 50_000_000
"""of more, logistic regression would take longer than all that it is compared with"""
STRENGTHS = tuple(10.0**power for power in range(-3, 4))


def all_of(data: Prepared, config: ComparisonConfig, seeds: int) -> list[Method]:
    """The references that these data allow."""
    return [most_frequent(data, config.ks), *logistic_regression(data, config, seeds)]


def most_frequent(data: Prepared, ks: tuple[int, ...]) -> Method:
    """Always the most frequent classes of the training examples."""
    counts = torch.bincount(data.labels[data.split.train], minlength=len(data.classes)).float()
    labels = data.labels[data.split.test]
    run = _seed_run(counts.expand(len(labels), -1), labels, ks, 1)
    return Method("most frequent", "reference", "always the most frequent classes of the training set", None, (run,))


def logistic_regression(data: Prepared, config: ComparisonConfig, seeds: int) -> list[Method]:
    """Multinomial logistic regression on the standardised features, C chosen on validation."""
    rows, width = len(data.split.train), int(np.prod(data.shape))
    if data.kind != "features" or importlib.util.find_spec("sklearn") is None:
        return []
    if rows > MOST_ROWS or rows * width > MOST_NUMBERS or rows * len(data.classes) > MOST_NUMBERS:
        return []
    from sklearn.linear_model import LogisticRegression

    assert data.mean is not None
    assert data.std is not None
    parts: dict[str, Any] = {}
    for name in ("train", "validation", "test"):
        index = getattr(data.split, name)
        parts[name] = ((data.examples.take(index).float() - data.mean) / data.std).numpy(), data.labels[index]
    best, best_score = None, -1.0
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=200)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged shows in its score
            model.fit(parts["train"][0], parts["train"][1].numpy())
        score = float((model.predict(parts["validation"][0]) == parts["validation"][1].numpy()).mean())
        if score > best_score:
            best, best_score = model, score
    assert best is not None
    examples, labels = parts["test"]
    scores = torch.full((len(labels), len(data.classes)), -torch.inf, dtype=torch.float64)
    scores[:, torch.from_numpy(best.classes_)] = torch.from_numpy(best.predict_proba(examples)).double().log()
    run = _seed_run(scores, labels, config.ks, 1)
    words = f"scikit-learn's LogisticRegression, C = {best.C:g} by validation"
    return [Method("logistic regression", "reference", words, None, (run,))]


def _seed_run(scores: torch.Tensor, labels: torch.Tensor, ks: tuple[int, ...], seed: int) -> SeedRun:
    known = labels >= 0
    ranks = torch.where(known, anyk.target_ranks(scores, labels.clamp(min=0)), scores.shape[1] + 1)
    test = {f"top{k}": float((ranks <= k).double().mean()) for k in {*ks, 1, 5} if k < scores.shape[1]}
    return SeedRun(seed, {}, test, {}, {}, 0.0, 0.0, ranks=ranks.numpy())
