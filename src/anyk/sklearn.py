"""scikit-learn estimators: a classifier that is trained for the first k guesses, and a selector of k features.

The models are linear, or small multi-layer perceptrons. They are fitted with torch and kept as NumPy arrays: what is fitted
needs no device, and pickles like any other estimator.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

try:
    import numpy as np
    from scipy import optimize, sparse
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_selection import SelectorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state, compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError:
    raise ImportError('anyk.sklearn needs scikit-learn 1.6 or later: pip install "anyk[sklearn]"') from None

from anyk import checks, losses, metrics, tools
from anyk import p_k as p_ks
from anyk.operators import Operator, by_name

__all__ = ["TopKClassifier", "TopKSelector", "topk_score", "topk_scorer"]

#: the loss and the operator that it has by default
LOSSES = {"error": "lapsum", "cross_entropy": "splitter"}
MOST_EXAMPLES_FOR_LBFGS = 10_000
LBFGS_ITERATIONS = 500
ADAM_EPOCHS, ADAM_STEPS = 20, 2000
# L-BFGS uses all examples in each step, but so many scores at a time.
SCORES_AT_ONCE = 2**21
# Of a step, for each thread beside the first: less is done sooner than threads have waited for one another.
MULTIPLICATIONS_OF_THREAD = 2**27
#: how often a selector says how far it is
REPORTS = 20


class TopKClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear classifier, or a multi-layer perceptron, trained by :class:`anyk.TopKErrorLoss` or
    :class:`anyk.TopKCrossEntropyLoss`.

    With standardised features x, scores s(x) and example weights w it minimises

        sum_i w_i L(s(x_i), y_i) / sum_i w_i  +  alpha / 2 * (sum of the squared weights, without the intercepts).

    Fits NumPy arrays, data frames and sparse matrices. Predictions do not depend on torch. A small model is fitted with one of
    torch's threads, a large one with as many as ``torch.get_num_threads()`` says.

    Args:
        p_k: weights of top-1, top-2, …, summing to 1, a mapping such as {1: .5, 5: .5}, an integer k for {k: 1}, or one such
            row for each class, in the order of ``classes_``. Among n classes every top-n guess is right: entries from the n-th
            on are dropped and the others scaled to sum to 1 (top-1 alone if none is left); ``p_k_`` is what was used.
        operator: "splitter", "bitonic", "odd_even", "lapsum", "ksubset", "softsort", "neuralsort", "sinkhorn", or an
            ``anyk.Operator``, which then brings its own temperature; None: that of the loss, "lapsum" or "splitter".
        loss: "error", one minus the probability that the label is among the first k, plus a share of cross-entropy
            (:func:`anyk.topk_error`), or "cross_entropy", -log of that probability (:func:`anyk.topk_cross_entropy`), the loss
            of the paper, with lower top-1 accuracy on all four data sets where both were run (evidence/tables/pays.md).
        temperature: of an operator given by name; the smaller, the closer to exact sorting.
        m: number of best classes of each example that are ranked; None: all; "auto": 64, or four times the k of P_K if that is
            more.
        top1: of "cross_entropy", the top-1 part: "separate", softmax cross-entropy as its own term; "mixed", softmax inside the
            logarithm; "operator", the operator's own.
        ce_weight: of "error": the share of softmax cross-entropy, between 0 and 1.
        q: of "error": 1 is the expected top-k error, smaller is nearer to cross-entropy.
        hidden_layer_sizes: widths of hidden layers (ReLU); () is a linear model.
        standardize: subtract each feature's mean and divide by its standard deviation; "auto": dense input yes, sparse input
            no, since rare words would get the largest weights. ``coefs_`` apply to the features before standardisation.
        alpha: L2 penalty, on the weights of the standardised features.
        solver: "lbfgs": all examples in each step, in float64, to convergence, with nothing to tune; "adam": mini-batches in
            float32, learning rate falling to zero by a cosine; "auto": lbfgs for up to 10 000 examples.
        learning_rate: of adam, at the start.
        batch_size: of adam: examples in a step.
        max_iter: the most iterations of lbfgs or epochs of adam; None: 500 iterations, or 20 epochs and at least 2000 steps.
        tol: lbfgs stops when no entry of the gradient is larger than this, or when a step lowers the loss, relative to
            max(loss, 1), by less than ``1e-4 * tol``. With early stopping, the smallest improvement that counts.
        early_stopping: keep a part of the examples for validation, stop when their loss no longer falls, and return to the
            best step.
        validation_fraction: that part, stratified by class if each has at least two examples and both parts have room for all.
        n_iter_no_change: how many iterations or epochs without improvement early stopping waits.
        class_weight: {class: weight}, "balanced", or None.
        warm_start: continue from the previous fit instead of starting anew.
        random_state: seed of initial hidden weights, order of mini-batches and validation split. torch's global random state
            is not touched.
        device: where to train, such as "cpu" or "cuda".
        verbose: write the loss of each iteration or epoch to standard error.

    Attributes:
        classes_: (n_classes,) the labels.
        coefs_, intercepts_: weights (inputs, outputs) and intercepts (outputs,) of each layer.
        p_k_: the P_K that was trained for.
        n_iter_: iterations of lbfgs or epochs of adam.
        loss_: the loss at the end with the penalty (of adam: the mean over the last epoch); with early stopping the best
            validation loss, without it.
        loss_curve_, validation_loss_curve_: the losses of each iteration or epoch.
        n_features_in_, feature_names_in_: as in every scikit-learn estimator.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from anyk.sklearn import TopKClassifier
        >>> X, y = load_digits(return_X_y=True)
        >>> classifier = TopKClassifier(p_k=(0.5, 0, 0.5)).fit(X[:1000], y[:1000])
        >>> classifier.predict_topk(X[1000:1002], k=3).shape
        (2, 3)
        >>> classifier.score_topk(X[1000:], y[1000:], k=3) > 0.95
        True
    """

    def __init__(
        self,
        p_k: Any = (0.5, 0, 0, 0, 0.5),
        operator: str | Operator | None = None,
        *,
        loss: Literal["error", "cross_entropy"] = "error",
        temperature: float = 1.0,
        m: losses.M = "auto",
        top1: losses.Top1 = "separate",
        ce_weight: float = 0.2,
        q: float = 1.0,
        hidden_layer_sizes: Sequence[int] = (),
        standardize: bool | str = "auto",
        alpha: float = 1e-3,
        solver: str = "auto",
        learning_rate: float = 1e-3,
        batch_size: int = 200,
        max_iter: int | None = None,
        tol: float = 1e-4,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        class_weight: Any = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: Any = "cpu",
        verbose: bool = False,
    ) -> None:
        self.p_k = p_k
        self.operator = operator
        self.loss = loss
        self.temperature = temperature
        self.m = m
        self.top1 = top1
        self.ce_weight = ce_weight
        self.q = q
        self.hidden_layer_sizes = hidden_layer_sizes
        self.standardize = standardize
        self.alpha = alpha
        self.solver = solver
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TopKClassifier:
        """Fit the model.

        Args:
            X: (n_samples, n_features) array, data frame or sparse matrix.
            y: (n_samples,) labels of any kind.
            sample_weight: (n_samples,) weight of each example; with lbfgs, an integer is the same as repeating the example.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32])
        check_classification_targets(y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        weights = weights * compute_sample_weight(self.class_weight, y)
        classes, target = np.unique(y, return_inverse=True)
        sizes = [X.shape[1], *map(int, self.hidden_layer_sizes), len(classes)]
        if not (weights > 0).all():  # an example that does not count must not move the mean or a batch either
            X, target, weights = X[weights > 0], target[weights > 0], weights[weights > 0]
            if not len(weights):
                raise ValueError("sample_weight: expected some weight above 0, got none")

        rng = check_random_state(self.random_state)
        generator = torch.Generator().manual_seed(int(rng.randint(np.iinfo(np.int32).max)))
        held_out = None
        if self.early_stopping:
            train, rest = _split(target, self.validation_fraction, rng)
            held_out = X[rest], target[rest], weights[rest]
            X, target, weights = X[train], target[train], weights[train]
        solver = self.solver
        if solver == "auto":
            solver = "lbfgs" if X.shape[0] <= MOST_EXAMPLES_FOR_LBFGS else "adam"
        double = solver == "lbfgs" and torch.device(self.device).type != "mps"
        to = partial(torch.as_tensor, device=self.device, dtype=torch.float64 if double else torch.float32)

        centre, scale = self._scaling(X, weights)
        start = self._last_fit(classes, sizes, centre, scale) or _initial(sizes, generator)
        parameters = [to(values).clone().requires_grad_() for values in start]
        self.p_k_ = _possible_p_k(self.p_k, len(classes))
        criterion, scaling = self._criterion(len(classes)), (to(centre), to(scale))

        def examples(X: Any, target: Any, weights: Any) -> Examples:
            X = X if sparse.issparse(X) else to((X - centre) / scale)
            return X, torch.as_tensor(target, device=self.device), to(weights / weights.mean())

        def mean_loss(X: Any, target: Tensor, weights: Tensor) -> Tensor:
            return (weights * criterion(_perceptron(parameters, X, *scaling), target)).mean()

        def penalty() -> Tensor:
            return float(self.alpha) / 2 * torch.stack([weight.square().sum() for weight in parameters[::2]]).sum()

        chunk = max(1, SCORES_AT_ONCE // len(classes)) if solver == "lbfgs" else self.batch_size
        of_example = X.size / X.shape[0] * sizes[1] + sum(inputs * outputs for inputs, outputs in pairwise(sizes[1:]))
        with _threads(int(min(chunk, X.shape[0]) * of_example)):
            trainer = _Trainer(parameters, mean_loss, penalty, held_out and examples(*held_out), self)
            if solver == "lbfgs":
                trainer.lbfgs(examples(X, target, weights), chunk)
            else:
                trainer.adam(examples(X, target, weights), generator)
            trainer.return_to_best()

        arrays = [parameter.detach().cpu().double().numpy() for parameter in parameters]
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError(f"learning_rate: expected one with which the weights stay finite, got {self.learning_rate!r}")
        self.classes_, self.coefs_, self.intercepts_ = classes, arrays[::2], arrays[1::2]
        self.coefs_[0] = self.coefs_[0] / scale[:, None]  # for features as they come
        self.intercepts_[0] = self.intercepts_[0] - centre @ self.coefs_[0]
        self.n_iter_ = len(trainer.curve)
        self.loss_ = trainer.loss
        self.loss_curve_, self.validation_loss_curve_ = trainer.curve, trainer.validation_curve
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores (n_samples, n_classes); with two classes, as in scikit-learn, the second minus the first (n_samples,)."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Softmax of the scores (n_samples, n_classes). Trained for more than top-1, they rank well but are not calibrated."""
        scores = self._scores(X)
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The class with the highest score, (n_samples,)."""
        scores = self._scores(X)  # first: it says that nothing is fitted
        return self.classes_[scores.argmax(1)]

    def predict_topk(self, X: Any, k: int = 5) -> np.ndarray:
        """The k classes with the highest scores, best first, (n_samples, k); of equal scores the first in ``classes_``."""
        scores = self._scores(X)
        k = checks.count("k", k, 1, scores.shape[1], "the number of classes")
        return self.classes_[np.argsort(-scores, axis=1, kind="stable")[:, :k]]

    def score_topk(self, X: Any, y: Any, k: int = 5, sample_weight: Any = None) -> float:
        """The fraction of examples whose label is among the first k classes, see :func:`topk_score`."""
        return topk_score(self, X, y, k, sample_weight)

    def to_torch(self) -> nn.Sequential:
        """The fitted model as a ``torch.nn.Sequential`` from unscaled features to scores, in torch's default dtype."""
        check_is_fitted(self)
        modules: list[nn.Module] = []
        for weight, bias in zip(self.coefs_, self.intercepts_, strict=True):
            linear = nn.utils.skip_init(nn.Linear, *weight.shape)  # type: ignore[no-untyped-call]  # draws nothing
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(weight.T.copy()))
                linear.bias.copy_(torch.from_numpy(bias))
            modules += [nn.ReLU(), linear] if modules else [linear]
        return nn.Sequential(*modules)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        scores = X @ self.coefs_[0] + self.intercepts_[0]
        for weight, bias in zip(self.coefs_[1:], self.intercepts_[1:], strict=True):
            scores = np.maximum(scores, 0) @ weight + bias
        return scores

    def _check_parameters(self) -> None:
        checks.one_of("solver", self.solver, ("auto", "lbfgs", "adam"))
        checks.one_of("standardize", self.standardize, ("auto", True, False))
        checks.one_of("loss", self.loss, LOSSES)
        _check_sizes(self.hidden_layer_sizes)
        for name in ("batch_size", "n_iter_no_change", *(["max_iter"] if self.max_iter is not None else [])):
            checks.at_least_one(name, getattr(self, name))
        checks.at_least("alpha", self.alpha, 0)
        checks.at_least("tol", self.tol, 0)
        checks.positive("learning_rate", self.learning_rate)
        checks.between("validation_fraction", self.validation_fraction, 0, 1)

    def _last_fit(self, classes: np.ndarray, sizes: list[int], centre: np.ndarray, scale: np.ndarray) -> list[Any]:
        """Weights and intercepts to go on from, for standardised features; none without ``warm_start``."""
        if not (self.warm_start and hasattr(self, "coefs_")):
            return []
        if not np.array_equal(classes, self.classes_):
            raise ValueError(f"y: expected the classes of the last fit, {self.classes_}, with warm_start, got {classes}")
        if [weight.shape for weight in self.coefs_] != list(pairwise(sizes)):
            given = repr(self.hidden_layer_sizes)
            raise ValueError(f"hidden_layer_sizes: expected those of the last fit with warm_start, got {given}")
        found = [values for layer in zip(self.coefs_, self.intercepts_, strict=True) for values in layer]
        return [found[0] * scale[:, None], found[1] + centre @ found[0], *found[2:]]

    def _scaling(self, X: Any, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.standardize or (self.standardize == "auto" and sparse.issparse(X)):
            return np.zeros(X.shape[1]), np.ones(X.shape[1])
        found = StandardScaler(with_mean=False).fit(X, sample_weight=weights)  # it finds the mean all the same
        return found.mean_.astype(np.float64), found.scale_.astype(np.float64)

    def _criterion(self, n_classes: int) -> Callable[[Tensor, Tensor], Tensor]:
        operator = LOSSES[self.loss] if self.operator is None else self.operator
        if isinstance(operator, Operator):
            operator = copy.deepcopy(operator).requires_grad_(False).to(self.device)
        else:
            operator = by_name(operator, temperature=self.temperature)
        m = self.m if self.m in (None, "auto") else min(checks.at_least_one("m", self.m), n_classes)
        shared = {"p_k": self.p_k_.tolist(), "operator": operator, "m": m, "reduction": "none"}
        if self.loss == "error":
            return partial(losses.topk_error, ce_weight=self.ce_weight, q=self.q, **shared)
        return partial(losses.topk_cross_entropy, top1=self.top1, **shared)


Examples = tuple[Any, Tensor, Tensor]
"""features, a tensor or a sparse matrix; class indices; weights of mean 1"""


def _perceptron(parameters: list[Tensor], features: Any, centre: Tensor, scale: Tensor) -> Tensor:
    """Scores of standardised features. Sparse features come as they are, and the first layer standardises them."""
    weight, bias, *later = parameters
    if sparse.issparse(features):
        weight = weight / scale[:, None]
        columns, starts = (torch.as_tensor(a, device=weight.device).long() for a in (features.indices, features.indptr))
        values = torch.as_tensor(features.data).to(weight)
        product = functional.embedding_bag(
            columns, weight, starts, mode="sum", per_sample_weights=values, include_last_offset=True
        )
        scores = product - centre @ weight + bias
    else:
        scores = features @ weight + bias
    return _later_layers(later, scores)


def _later_layers(parameters: list[Tensor], scores: Tensor) -> Tensor:
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        scores = scores.relu() @ weight + bias
    return scores


def _check_sizes(hidden_layer_sizes: object) -> None:
    if isinstance(hidden_layer_sizes, str) or not isinstance(hidden_layer_sizes, Sequence):
        raise TypeError(f"hidden_layer_sizes: expected a sequence of integers, got {hidden_layer_sizes!r}")
    for size in hidden_layer_sizes:
        checks.at_least_one("hidden_layer_sizes", size)


_guard = threading.Lock()
_fits: list[int] = []


@contextmanager
def _threads(multiplications: int) -> Iterator[None]:
    """As many of torch's threads as a step with so many multiplications is worth, never more than there were before.

    A thread of Python's that is new to torch begins with the number that another one has set last. So fits at the same time
    all go back to the number that the first of them has found.
    """
    with _guard:
        before = _fits[0] if _fits else torch.get_num_threads()
        _fits.append(before)
    torch.set_num_threads(min(before, 1 + multiplications // MULTIPLICATIONS_OF_THREAD))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        with _guard:
            _fits.pop()


class _NoImprovement(Exception):
    """Early stopping."""


class _Trainer:
    """Minimises the mean loss of examples plus a penalty.

    Args:
        parameters: what is trained.
        mean_loss: (features, target, weights) -> their mean loss.
        penalty: what is added to it, but not to the loss of examples held out.
        held_out: examples for early stopping, if any.
        settings: an estimator with the parameters learning_rate, batch_size, max_iter, tol, n_iter_no_change and verbose of
            :class:`TopKClassifier`.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        mean_loss: Callable[..., Tensor],
        penalty: Callable[[], Tensor],
        held_out: Examples | None,
        settings: Any,
    ) -> None:
        self.parameters, self.mean_loss, self.penalty, self.settings = parameters, mean_loss, penalty, settings
        self.held_out = held_out
        self.curve: list[float] = []
        self.validation_curve: list[float] = []
        self.loss = math.nan
        self._best = _vector(parameters)
        self._waited = 0

    def lbfgs(self, examples: Examples, chunk: int) -> None:
        number, tol = len(examples[1]), self.settings.tol
        chunks = [[part[start : start + chunk] for part in examples] for start in range(0, number, chunk)]

        def loss_and_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
            self._load(values)
            total = self.penalty()
            total.backward()  # type: ignore[no-untyped-call]
            self.loss = total.item()
            for some in chunks:
                share = self.mean_loss(*some) * (len(some[1]) / number)
                share.backward()  # type: ignore[no-untyped-call]
                self.loss += share.item()
            return self.loss, _vector(parameter.grad for parameter in self.parameters)

        def after_iteration(values: np.ndarray) -> None:
            self._load(values)
            if self._after_iteration():
                raise _NoImprovement

        max_iter = self.settings.max_iter or LBFGS_ITERATIONS
        options = {"maxiter": max_iter, "maxfun": 20 * max_iter, "maxls": 50, "gtol": tol, "ftol": 1e-4 * tol}
        start = _vector(self.parameters)
        try:
            result = optimize.minimize(
                loss_and_gradient, start, jac=True, method="L-BFGS-B", callback=after_iteration, options=options
            )
        except _NoImprovement:
            return
        self._load(result.x)
        self.loss = float(result.fun)
        if result.status == 1 and self.held_out is None:
            message = f"lbfgs did not converge in max_iter = {max_iter} iterations: increase max_iter, alpha or tol"
            warnings.warn(message, ConvergenceWarning, stacklevel=4)

    def adam(self, examples: Examples, generator: torch.Generator) -> None:
        number, size = len(examples[1]), self.settings.batch_size
        steps = math.ceil(number / size)
        epochs = self.settings.max_iter or max(ADAM_EPOCHS, math.ceil(ADAM_STEPS / steps))
        optimizer = torch.optim.Adam(self.parameters, lr=self.settings.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
        for _ in range(epochs):
            order = torch.randperm(number, generator=generator).numpy()
            total = 0.0
            for start in range(0, number, size):
                batch = [part[order[start : start + size]] for part in examples]
                optimizer.zero_grad()
                loss = self.mean_loss(*batch) + self.penalty()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                total += loss.item() * len(batch[1])
            self.loss = total / number
            if self._after_iteration():
                return

    def _after_iteration(self) -> bool:
        """Note the losses; whether it is time to stop."""
        self.curve.append(self.loss)
        message = f"{type(self.settings).__name__} {len(self.curve)}: loss {self.loss:.6g}"
        if self.held_out is None:
            self._say(message)
            return False
        with torch.no_grad():
            validation = self.mean_loss(*self.held_out).item()
        self._say(f"{message}, validation {validation:.6g}")
        best = min(self.validation_curve, default=math.inf)
        self._waited = 0 if validation < best - self.settings.tol else self._waited + 1
        if validation < best:
            self._best = _vector(self.parameters)
        self.validation_curve.append(validation)
        return self._waited >= self.settings.n_iter_no_change

    def _say(self, message: str) -> None:
        if self.settings.verbose:
            sys.stderr.write(message + "\n")

    def return_to_best(self) -> None:
        """With examples held out: to where their loss was lowest."""
        self.curve = self.curve or [self.loss]  # lbfgs found nothing left to do
        if self.validation_curve:
            self._load(self._best)
            self.loss = min(self.validation_curve)

    def _load(self, values: np.ndarray) -> None:
        """Take these values and forget the gradients."""
        nn.utils.vector_to_parameters(torch.tensor(values).to(self.parameters[0]), self.parameters)
        for parameter in self.parameters:
            parameter.grad = None


def _vector(tensors: Iterable[Any]) -> np.ndarray:
    """All values in one vector of float64."""
    return nn.utils.parameters_to_vector(tensors).detach().cpu().double().numpy()


def _split(target: np.ndarray, fraction: float, rng: Any) -> tuple[np.ndarray, np.ndarray]:
    number = max(1, round(fraction * len(target)))
    if number >= len(target):
        raise ValueError(f"early_stopping: expected examples to train with and to validate with, got n_samples = {len(target)}")
    counts = np.unique(target, return_counts=True)[1]
    stratify = target if counts.min() > 1 and len(counts) <= min(number, len(target) - number) else None
    train, held_out = train_test_split(np.arange(len(target)), test_size=number, stratify=stratify, random_state=rng)
    return train, held_out


def _initial(sizes: list[int], generator: torch.Generator) -> list[Tensor]:
    """Weights and intercepts: equal scores for all classes; hidden layers as He et al. (2015) draw them."""
    parameters = []
    for inputs, outputs in pairwise(sizes[:-1]):
        weight = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64) * math.sqrt(2 / inputs)
        parameters += [weight, torch.zeros(outputs)]
    return [*parameters, torch.zeros(sizes[-2], sizes[-1]), torch.zeros(sizes[-1])]


def _possible_p_k(p_k: Any, n_classes: int) -> np.ndarray:
    """P_K over the k for which a guess can be wrong: below the number of classes."""
    given = p_ks.read(p_k).values.detach().cpu().double().numpy()
    possible = given[..., : max(1, n_classes - 1)]
    total = possible.sum(-1, keepdims=True)
    top1 = np.eye(1, possible.shape[-1])[0]
    possible = np.where(total > 0, possible / np.where(total > 0, total, 1), top1)
    used = np.flatnonzero(possible.reshape(-1, possible.shape[-1]).any(0))
    return possible[..., : used[-1] + 1]


def _best(scores: Tensor, k: int) -> Tensor:
    """The places of the k highest scores, of equal ones the first."""
    return scores.sort(descending=True, stable=True).indices[:k]


class TopKSelector(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """Selects k features by training a small model and a soft mask of the features together.

    A linear model or a multi-layer perceptron is trained on ``x * m``, x the standardised features and

        m = soft_topk(s, k, "lapsum", t),

    a mask with one entry per feature that sums to k. The scores s are trained with the model, by the same loss. As t falls, the
    mask turns into zeros and ones. The k features with the highest scores are kept: exactly k, all distinct, chosen together.

    Args:
        k: how many features to keep.
        task: "classification", cross-entropy; "regression", mean squared error; "auto": regression if y has fractions. Many
            different whole numbers may be either: then "auto" is an error.
        hidden_layer_sizes: widths of hidden layers (ReLU); () is a linear model, which sees no interaction of features.
        temperature: a pair, t at the start and at the end; it falls geometrically.
        bound: scores are kept between -bound and bound about their mean, so that no choice is final while the temperature is
            high, and of two redundant features one is dropped. None: no bound, which decides early; that is better
            where features matter only together, or where most of many are noise. "auto": trains with the bound 1 and without
            one, and takes the choice whose k features have the lower loss at the end, in twice the time.
        noise: standard deviation of the noise that is added to the standardised features in every step, so that the model does
            not memorise single examples; 0 means no noise.
        learning_rate: of Adam for the model; falls to zero in the second half.
        score_learning_rate: of Adam for the scores.
        max_iter: steps of Adam.
        batch_size: examples in a step.
        random_state: seed of initial weights, noise and order of mini-batches. torch's global random state is not touched.
        device: where to train, such as "cpu" or "cuda".
        verbose: write temperature, loss and undecided mass, sum m (1 - m), to standard error, twenty times.

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
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        with np.errstate(over="ignore", invalid="ignore"):
            standardised = StandardScaler().fit_transform(X)
        features = torch.as_tensor(standardised, device=self.device, dtype=torch.float32)
        if not bool(features.isfinite().all()):
            raise ValueError("X: expected features that are finite when they are standardised in float32, got larger ones")
        sizes = [X.shape[1], *map(int, self.hidden_layer_sizes), outputs]
        batch = min(int(self.batch_size), len(target))
        with _threads(3 * batch * sum(inputs * outputs for inputs, outputs in pairwise(sizes))):
            trained = [
                (*self._train(features, target.to(self.device), k, sizes, batch, (hot, cold), bound, seed), bound)
                for bound in ((1.0, None) if self.bound == "auto" else (self.bound,))
            ]
        finite = [each for each in trained if np.isfinite(each[0]).all() and math.isfinite(each[1])]
        if not finite:
            raise ValueError(f"learning_rate: expected one with which the scores stay finite, got {self.learning_rate!r}")
        self.scores_, self.loss_, self.bound_ = min(finite, key=lambda each: each[1])
        self.n_iter_ = int(self.max_iter)
        self.support_ = np.zeros(X.shape[1], dtype=bool)
        self.support_[_best(torch.from_numpy(self.scores_), k)] = True
        return self

    def _train(
        self,
        features: Tensor,
        target: Tensor,
        k: int,
        sizes: list[int],
        batch: int,
        temperatures: tuple[float, float],
        bound: float | None,
        seed: int,
    ) -> tuple[np.ndarray, float]:
        """The scores of the features at the end, and the loss with the best k alone."""
        (hot, cold), outputs = temperatures, sizes[-1]
        generator = torch.Generator().manual_seed(seed)
        parameters = [
            torch.as_tensor(values, device=self.device, dtype=torch.float32).clone().requires_grad_()
            for values in _initial(sizes, generator)
        ]
        scores = torch.zeros(sizes[0], device=self.device, requires_grad=True)
        criterion = functional.cross_entropy if outputs > 1 else functional.mse_loss

        def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
            outcome = _later_layers(parameters[2:], hidden + parameters[1])
            return criterion(outcome if outputs > 1 else outcome[:, 0], target)

        model = {"params": parameters, "lr": self.learning_rate}
        optimizer = torch.optim.Adam([model, {"params": [scores], "lr": self.score_learning_rate}])

        number, steps = len(target), int(self.max_iter)
        order = torch.empty(0, dtype=torch.long)
        total: Any = 0.0
        since = 0
        for step in range(1, steps + 1):
            if len(order) < batch:
                order = torch.cat([order, torch.randperm(number, generator=generator)])
            rows, order = order[:batch].to(self.device), order[batch:]
            done = step / steps
            temperature = hot * (cold / hot) ** done
            optimizer.param_groups[0]["lr"] = self.learning_rate * min(1, 2 * (1 - done))
            mask = tools.soft_topk(scores, k, temperature=temperature)
            some = features[rows]
            some = some + float(self.noise) * torch.randn(some.shape, generator=generator).to(some)
            loss = loss_of(some * mask @ parameters[0], target[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if bound is not None:
                with torch.no_grad():
                    scores.sub_(scores.mean()).clamp_(-bound, bound)
            if not self.verbose:
                continue
            total += loss.detach()  # read rarely: a look would wait for the device
            since += 1
            if step * REPORTS // steps > (step - 1) * REPORTS // steps:
                undecided = float((mask * (1 - mask)).detach().sum())
                message = f"temperature {temperature:.3g}, loss {float(total) / since:.6g}, undecided {undecided:.3g} of {k}"
                sys.stderr.write(f"TopKSelector {step} of {steps}, bound {bound}: {message}\n")
                total, since = 0.0, 0
        with torch.no_grad():  # not the loss of the mask: one that ends undecided has more than k features to look at
            kept = _best(scores, k)
            loss = loss_of(features[:, kept] @ parameters[0][kept], target)
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
            if y.dtype.kind in "fiu" and task == "classification" and (number := len(np.unique(y))) > max(20, len(y) / 10):
                what = f"for a y with {number} different whole numbers in {len(y)} examples"
                raise ValueError(f"task: expected 'regression' or 'classification' {what}, got 'auto'")
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
        return torch.from_numpy(scaled).float(), 1

    def _check_parameters(self) -> tuple[float, float]:
        checks.one_of("task", self.task, ("auto", "classification", "regression"))
        _check_sizes(self.hidden_layer_sizes)
        for name in ("max_iter", "batch_size"):
            checks.at_least_one(name, getattr(self, name))
        for name in ("learning_rate", "score_learning_rate"):
            checks.positive(name, getattr(self, name))
        checks.at_least("noise", self.noise, 0)
        if self.bound is not None and self.bound != "auto":
            checks.positive("bound", self.bound)
        try:
            hot, cold = self.temperature
        except (TypeError, ValueError):
            raise ValueError(f"temperature: expected two numbers, start and end, got {self.temperature!r}") from None
        return checks.positive("temperature", hot), checks.positive("temperature", cold)


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
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.model_selection import cross_val_score
        >>> from anyk.sklearn import TopKClassifier, topk_scorer
        >>> X, y = load_digits(return_X_y=True)
        >>> float(cross_val_score(TopKClassifier(), X[:300], y[:300], cv=3, scoring=topk_scorer(3)).min()) > 0.9
        True
    """
    return partial(topk_score, k=checks.at_least_one("k", k))
