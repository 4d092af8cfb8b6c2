"""The selector that evidence/selection.py asks about. It moves to anyk.sklearn if it passes the rule that is written there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn import functional

import anyk
from anyk import checks
from anyk.sklearn import _check_sizes, _initial, _later_layers

#: how often it says how far it is
REPORTS = 20


class TopKSelector(SelectorMixin, BaseEstimator):
    """Keeps the k features with which a small model does best.

    A linear model or a multi-layer perceptron is trained on ``x * m``, x the standardised features and

        m = soft_topk(s, k, "lapsum", t),

    a mask of one entry a feature that sums to k. The scores s are trained with the model, by the same loss. While t falls, the
    mask turns into zeros and ones. The k features with the highest scores are kept: exactly k, all distinct, chosen together.

    Args:
        k: how many features to keep.
        task: "classification", cross-entropy; "regression", mean squared error; "auto": regression if y has fractions.
        hidden_layer_sizes: widths of hidden layers (ReLU); () is a linear model, which sees no interaction of features.
        temperature: t at the start and at the end; it falls geometrically.
        bound: scores are kept between -bound and bound about their mean, so that no choice is final while the temperature is
            high, and of two features that say the same one gives way; None: no bound, which decides early and is better where
            features matter only together.
        noise: standard deviation of the noise that is added to the standardised features in every step, so that the model does
            not learn single examples by heart; 0 is none.
        learning_rate: of Adam for the model; falls to zero in the second half.
        score_learning_rate: of Adam for the scores.
        max_iter: steps of Adam.
        batch_size: examples in a step.
        random_state: seed of initial weights, noise and order of mini-batches. torch's own random numbers are not touched.
        device: where to train, such as "cpu" or "cuda".
        verbose: write temperature, loss and undecided mass, sum m (1 - m), to standard error, twenty times.

    Attributes:
        scores_: (n_features,) s at the end.
        support_: (n_features,) whether a feature is kept.
        loss_: mean loss of the last twentieth of the steps, noise included; of a regression in units of the variance of y.
        n_iter_: steps that were made, max_iter.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from selector import TopKSelector
        >>> X, y = load_digits(return_X_y=True)
        >>> selector = TopKSelector(8, max_iter=300, random_state=0).fit(X, y)
        >>> selector.transform(X).shape, len(selector.get_support(indices=True))
        ((1797, 8), 8)
    """

    def __init__(
        self,
        k: int = 10,
        *,
        task: Literal["auto", "classification", "regression"] = "auto",
        hidden_layer_sizes: Sequence[int] = (64,),
        temperature: tuple[float, float] = (1.0, 0.03),
        bound: float | None = 1.0,
        noise: float = 0.5,
        learning_rate: float = 1e-3,
        score_learning_rate: float = 0.1,
        max_iter: int = 2000,
        batch_size: int = 128,
        random_state: Any = None,
        device: Any = "cpu",
        verbose: bool = False,
    ) -> None:
        self.k = k
        self.task = task
        self.hidden_layer_sizes = hidden_layer_sizes
        self.temperature = temperature
        self.bound = bound
        self.noise = noise
        self.learning_rate = learning_rate
        self.score_learning_rate = score_learning_rate
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> TopKSelector:
        """Choose the features.

        Args:
            X: (n_samples, n_features) array or data frame.
            y: (n_samples,) labels of any kind, or numbers.
        """
        hot, cold = self._check_parameters()
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        k = checks.count("k", self.k, 1, X.shape[1], "n_features")
        target, outputs = self._target(y)
        rng = check_random_state(self.random_state)
        generator = torch.Generator().manual_seed(int(rng.randint(np.iinfo(np.int32).max)))
        to = partial(torch.as_tensor, device=self.device, dtype=torch.float32)
        features, target = to(StandardScaler().fit_transform(X)), target.to(self.device)
        sizes = [X.shape[1], *map(int, self.hidden_layer_sizes), outputs]
        parameters = [to(values).clone().requires_grad_() for values in _initial(sizes, generator)]
        scores = torch.zeros(X.shape[1], device=self.device, requires_grad=True)
        criterion = functional.cross_entropy if outputs > 1 else functional.mse_loss
        model = {"params": parameters, "lr": self.learning_rate}
        optimizer = torch.optim.Adam([model, {"params": [scores], "lr": self.score_learning_rate}])

        number, steps = len(target), int(self.max_iter)
        batch, order = min(int(self.batch_size), number), torch.empty(0, dtype=torch.long)
        total: Any = 0.0
        since = 0
        for step in range(1, steps + 1):
            if len(order) < batch:
                order = torch.cat([order, torch.randperm(number, generator=generator)])
            rows, order = order[:batch].to(self.device), order[batch:]
            done = step / steps
            temperature = hot * (cold / hot) ** done
            optimizer.param_groups[0]["lr"] = self.learning_rate * min(1, 2 * (1 - done))
            mask = anyk.soft_topk(scores, k, temperature=temperature)
            some = features[rows]
            some = some + float(self.noise) * torch.randn(some.shape, generator=generator).to(some)
            outcome = _later_layers(parameters[2:], some * mask @ parameters[0] + parameters[1])
            loss = criterion(outcome if outputs > 1 else outcome[:, 0], target[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if self.bound is not None:
                with torch.no_grad():
                    scores.sub_(scores.mean()).clamp_(-self.bound, self.bound)
            total += loss.detach()  # read rarely: a look would wait for the device
            since += 1
            if step * REPORTS // steps > (step - 1) * REPORTS // steps:
                self.loss_, total, since = float(total) / since, 0.0, 0
                if self.verbose:
                    undecided = float((mask * (1 - mask)).detach().sum())
                    message = f"temperature {temperature:.3g}, loss {self.loss_:.6g}, undecided {undecided:.3g} of {k}"
                    sys.stderr.write(f"TopKSelector {step} of {steps}: {message}\n")
        self.scores_, self.n_iter_ = scores.detach().cpu().double().numpy(), steps
        if not np.isfinite(self.scores_).all():
            raise ValueError(f"learning_rate: expected one with which the scores stay finite, got {self.learning_rate!r}")
        self.support_ = np.zeros(X.shape[1], dtype=bool)
        self.support_[np.argsort(-self.scores_, kind="stable")[:k]] = True
        return self

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self)
        return self.support_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _target(self, y: np.ndarray) -> tuple[Tensor, int]:
        """What the model is trained for, and how many outputs that takes."""
        task = self.task
        if task == "auto":
            task = "regression" if type_of_target(y).startswith("continuous") else "classification"
        if task == "classification":
            check_classification_targets(y)
            classes, index = np.unique(y, return_inverse=True)
            return torch.from_numpy(index), max(2, len(classes))
        try:
            values = y.astype(np.float64)
        except ValueError:
            raise ValueError(f"y: expected numbers with task='regression', got dtype {y.dtype}") from None
        scaled = (values - values.mean()) / (values.std() or 1)
        return torch.from_numpy(scaled).float(), 1

    def _check_parameters(self) -> tuple[float, float]:
        checks.one_of("task", self.task, ("auto", "classification", "regression"))
        _check_sizes(self.hidden_layer_sizes)
        for name in ("max_iter", "batch_size"):
            checks.at_least_one(name, getattr(self, name))
        for name in ("learning_rate", "score_learning_rate"):
            checks.positive(name, getattr(self, name))
        checks.at_least("noise", self.noise, 0)
        if self.bound is not None:
            checks.positive("bound", self.bound)
        try:
            hot, cold = self.temperature
        except (TypeError, ValueError):
            raise ValueError(f"temperature: expected two numbers, start and end, got {self.temperature!r}") from None
        return checks.positive("temperature", hot), checks.positive("temperature", cold)
