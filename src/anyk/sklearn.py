"""For scikit-learn: a selector of k features, and top-k accuracy as a score of any classifier.

To train a classifier by a loss of this package in a pipeline or a grid search, use skorch: ``examples/skorch_classifier.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

try:
    from sklearn.base import BaseEstimator
    from sklearn.feature_selection import SelectorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ImportError('anyk.sklearn needs scikit-learn 1.6 or later: pip install "anyk[sklearn]"') from None

from anyk import checks, metrics
from anyk.functional import soft_topk

__all__ = ["TopKSelector", "topk_score", "topk_scorer"]


class TopKSelector(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """Selects k features by training a small model and a soft mask of the features together.

    A linear model or a multi-layer perceptron is trained on ``x * m``, x the standardised features and

        m = soft_topk(s, k, "lapsum", t),

    a mask with one entry per feature that sums to k. The scores s are trained with the model, by the same loss. As t falls, the
    mask turns into zeros and ones. The k features with the highest scores are kept.

    Args:
        k: how many features to keep.
        task: "classification", cross-entropy; "regression", mean squared error; "auto" asks scikit-learn's ``type_of_target``:
            regression if y has fractions.
        hidden_layer_sizes: widths of hidden layers (ReLU); () is a linear model, which sees no interaction of features.
        temperature: a pair, t at the start and at the end; it falls geometrically.
        bound: scores are kept between -bound and bound about their mean: no choice is final while the temperature is high, and
            of two redundant features one is dropped. None decides early; that is better where features matter only together,
            or where most of many are noise. "auto": trains both with 1 and with None, in twice the time, and takes the choice
            whose k features have the lower loss at the end.
        noise: standard deviation of what is added to the standardised features in every step, so that the model does not
            memorise single examples.
        learning_rate: of Adam for the model; falls to zero in the second half.
        score_learning_rate: of Adam for the scores.
        max_iter: steps of Adam.
        batch_size: examples in a step.
        random_state: seed of initial weights, noise and order of mini-batches. torch's global random state is not touched.
        device: where to train, such as "cpu" or "cuda".

    Attributes:
        scores_: (n_features,) s at the end.
        support_: (n_features,) whether a feature is kept.
        bound_: the bound that was taken.
        loss_: at the end, of the kept features alone, without noise; of a regression in units of the variance of y.
        n_iter_: the number of steps of one training, ``max_iter``.
        n_features_in_, feature_names_in_: as in every scikit-learn estimator.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from anyk.sklearn import TopKSelector
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
        bound: float | Literal["auto"] | None = "auto",
        noise: float = 0.5,
        learning_rate: float = 1e-3,
        score_learning_rate: float = 0.1,
        max_iter: int = 2000,
        batch_size: int = 128,
        random_state: Any = None,
        device: Any = "cpu",
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

    def fit(self, X: Any, y: Any) -> TopKSelector:
        """Choose the features.

        Args:
            X: (n_samples, n_features) array or data frame.
            y: (n_samples,) labels of any kind, or numbers.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        k = checks.count("k", self.k, 1, X.shape[1], "n_features")
        target, outputs = self._target(y)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        with np.errstate(over="ignore", invalid="ignore"):
            standardised = StandardScaler().fit_transform(X)
        features = torch.as_tensor(standardised, device=self.device, dtype=torch.float32)
        if not bool(features.isfinite().all()):
            raise ValueError("X: expected features that are finite when they are standardised in float32, got larger ones")
        target, found = target.to(self.device), []
        for bound in (1.0, None) if self.bound == "auto" else (self.bound,):
            generator = torch.Generator().manual_seed(seed)
            model = _model([X.shape[1], *map(int, self.hidden_layer_sizes), outputs], generator).to(self.device)
            scores, loss = self._train(model, features, target, k, bound, generator)
            if np.isfinite(scores).all() and math.isfinite(loss):
                found.append((scores, loss, bound))
        if not found:
            raise ValueError(f"learning_rate: expected one with which the scores stay finite, got {self.learning_rate!r}")
        self.scores_, self.loss_, self.bound_ = min(found, key=lambda each: each[1])
        self.n_iter_ = int(self.max_iter)
        self.support_ = np.zeros(X.shape[1], dtype=bool)
        self.support_[_k_best(torch.from_numpy(self.scores_), k)] = True
        return self

    def _train(
        self, model: Any, features: Tensor, target: Tensor, k: int, bound: Any, generator: Any
    ) -> tuple[np.ndarray, float]:
        """The scores of the features at the end, and the loss with the best k alone."""
        (hot, cold), steps, batch = self.temperature, int(self.max_iter), min(int(self.batch_size), len(target))
        scores = torch.zeros(features.shape[1], device=self.device, requires_grad=True)
        criterion = functional.mse_loss if target.is_floating_point() else functional.cross_entropy
        groups: Any = [{"params": model.parameters()}, {"params": [scores], "lr": self.score_learning_rate}]
        optimizer = torch.optim.Adam(groups, lr=self.learning_rate)
        order = torch.empty(0, dtype=torch.long)
        for step in range(1, steps + 1):
            if len(order) < batch:
                order = torch.cat([order, torch.randperm(len(target), generator=generator)])
            rows, order = order[:batch].to(self.device), order[batch:]
            optimizer.param_groups[0]["lr"] = self.learning_rate * min(1, 2 * (1 - step / steps))
            mask = soft_topk(scores, k, temperature=hot * (cold / hot) ** (step / steps))
            some = features[rows]
            some = some + float(self.noise) * torch.randn(some.shape, generator=generator).to(some)
            loss = criterion(model(some * mask), target[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if bound is not None:
                with torch.no_grad():
                    scores.sub_(scores.mean()).clamp_(-bound, bound)
        with torch.no_grad():  # not the loss of the mask: one that ends undecided has more than k features to look at
            alone = torch.zeros_like(scores).index_fill(0, _k_best(scores, k), 1)
            loss = criterion(model(features * alone), target)
        return scores.detach().cpu().double().numpy(), float(loss)

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self, "support_")
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
            if len(classes) < 2:
                raise ValueError(f"y: expected at least two classes with task='classification', got {len(classes)} class")
            return torch.from_numpy(index), len(classes)
        try:
            values = y.astype(np.float64)
        except ValueError:
            raise ValueError(f"y: expected numbers with task='regression', got dtype {y.dtype}") from None
        if not np.isfinite(values).all():
            raise ValueError("y: expected finite numbers with task='regression', got NaN or infinity")
        scaled = (values - values.mean()) / (values.std() or 1)
        return torch.from_numpy(scaled).float()[:, None], 1

    def _check_parameters(self) -> None:
        checks.one_of("task", self.task, ("auto", "classification", "regression"))
        if isinstance(self.hidden_layer_sizes, str) or not isinstance(self.hidden_layer_sizes, Sequence):
            raise TypeError(f"hidden_layer_sizes: expected a sequence of integers, got {self.hidden_layer_sizes!r}")
        for size in self.hidden_layer_sizes:
            checks.at_least_one("hidden_layer_sizes", size)
        for name in ("max_iter", "batch_size"):
            checks.at_least_one(name, getattr(self, name))
        for name in ("learning_rate", "score_learning_rate", *(() if self.bound in (None, "auto") else ("bound",))):
            checks.positive(name, getattr(self, name))
        checks.at_least("noise", self.noise, 0)
        if not isinstance(self.temperature, Sequence) or len(self.temperature) != 2:
            raise ValueError(f"temperature: expected two numbers, start and end, got {self.temperature!r}")
        for value in self.temperature:
            checks.positive("temperature", value)


def _model(sizes: list[int], generator: torch.Generator) -> nn.Sequential:
    """At the start, equal scores for all classes; hidden layers as He et al. (2015) draw them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear: Any = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]  # draws no random numbers
        weight = torch.zeros(inputs, outputs)
        if len(layers) < 2 * (len(sizes) - 2):
            weight = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64) * math.sqrt(2 / inputs)
        linear.load_state_dict({"weight": weight.t(), "bias": torch.zeros(outputs)})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _k_best(scores: Tensor, k: int) -> Tensor:
    """The places of the k highest scores, of equal ones the first."""
    return scores.sort(descending=True, stable=True).indices[:k]


def topk_score(estimator: Any, X: Any, y: Any, k: int, sample_weight: Any = None) -> float:
    """The fraction of examples whose label is among the first k classes of any fitted scikit-learn classifier or pipeline.

    As in :func:`anyk.topk_accuracy`, ties count against the classifier. A label that it was not fitted with is a miss.

    Args:
        estimator: has ``classes_`` and ``decision_function`` or ``predict_proba``.
        X: (n_samples, n_features).
        y: (n_samples,) labels.
        k: how many guesses; beyond the number of classes every known label is a hit.
        sample_weight: (n_samples,) weight of each example.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.linear_model import LogisticRegression
        >>> from anyk.sklearn import topk_score
        >>> X, y = load_iris(return_X_y=True)
        >>> topk_score(LogisticRegression(max_iter=500).fit(X, y), X, y, k=3)
        1.0
    """
    k = checks.at_least_one("k", k)
    scores = np.asarray(
        estimator.decision_function(X) if hasattr(estimator, "decision_function") else estimator.predict_proba(X)
    )
    if scores.ndim == 1:
        scores = np.stack([np.zeros_like(scores), scores], 1)
    classes, y = np.asarray(estimator.classes_), np.asarray(y)
    if y.shape != scores.shape[:1]:
        raise ValueError(f"y: expected shape {scores.shape[:1]} to fit X, got {y.shape}")
    place = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    ranks = metrics.target_ranks(torch.from_numpy(scores), torch.from_numpy(place)).numpy()
    return float(np.average((ranks <= k) & (classes[place] == y), weights=sample_weight))


def topk_scorer(k: int) -> Callable[..., float]:
    """:func:`topk_score` for this k as a scorer: ``scoring=`` of ``GridSearchCV``, ``cross_val_score`` and the like.

    Args:
        k: how many guesses count.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.linear_model import LogisticRegression
        >>> from anyk.sklearn import topk_scorer
        >>> X, y = load_iris(return_X_y=True)
        >>> topk_scorer(2)(LogisticRegression(max_iter=500).fit(X, y), X, y)
        1.0
    """
    return partial(topk_score, k=checks.at_least_one("k", k))
