"""The selector of features: scikit-learn's own checks, exactly k, and features of which it is known which matter."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.datasets import make_classification, make_friedman1
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from anyk.sklearn import TopKSelector


@parametrize_with_checks(
    [TopKSelector(2, max_iter=20, hidden_layer_sizes=(4,)), TopKSelector(1, max_iter=20, task="regression")]
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def corners():
    """The class is the sign of a product: alone, neither of the two features tells anything. Sizes differ a thousandfold."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 12))
    y = np.where(X[:, 3] * X[:, 8] > 0, "same", "other")
    return X * 10.0 ** (np.arange(12) % 4 - 2) + 5, y


def test_finds_what_matters_only_together(corners):
    X, y = corners
    selector = TopKSelector(2, max_iter=600, random_state=0).fit(X, y)
    assert selector.get_support(indices=True).tolist() == [3, 8]
    assert (selector.transform(X) == X[:, [3, 8]]).all()
    assert selector.loss_ < 0.3 < np.log(2)


def test_one_of_two_that_say_the_same_is_enough():
    rng = np.random.default_rng(0)
    strong, weak = rng.normal(size=(2, 500))
    X = np.stack([strong, strong + 1e-3 * rng.normal(size=500), *rng.normal(size=(4, 500)), weak], 1)
    y = 2 * strong + weak > 0
    chosen = TopKSelector(2, max_iter=600, random_state=0).fit(X, y).get_support(indices=True)
    assert chosen[0] in (0, 1)
    assert chosen[1] == 6


def test_finds_the_few_of_many_that_matter():
    # All scores at a bound are alike, and with many features some of noise get there: such a choice is not taken.
    X = np.random.default_rng(0).normal(size=(1000, 200))
    y = X[:, -10:].sum(1)
    selector = TopKSelector(3, random_state=0).fit(X, y)
    assert selector.get_support(indices=True).min() >= 190
    assert selector.bound_ is None
    bounded = TopKSelector(3, bound=1.0, random_state=0).fit(X, y)
    assert selector.loss_ < bounded.loss_


def test_an_undecided_mask_does_not_win_by_seeing_more_than_k_features():
    X, y = make_classification(150, 200, n_informative=15, n_redundant=100, n_classes=6, random_state=6)
    bounded, free = (TopKSelector(5, bound=bound, random_state=6).fit(X, y) for bound in (1.0, None))
    auto = TopKSelector(5, random_state=6).fit(X, y)
    assert auto.bound_ is None
    assert auto.loss_ == free.loss_ < bounded.loss_
    assert (auto.support_ == free.support_).all()


def test_regression():
    X, y = make_friedman1(500, 15, random_state=0)  # the first five matter, two of them by their product
    selector = TopKSelector(5, max_iter=1500, random_state=0).fit(X, 1000 * y + 7)
    assert selector.get_support(indices=True).tolist() == [0, 1, 2, 3, 4]
    assert selector.loss_ < 0.3  # of the variance
    counts = np.round(y)
    as_numbers = TopKSelector(5, task="regression", max_iter=1500, random_state=0).fit(X, counts)
    assert as_numbers.get_support(indices=True).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("k", [1, 7, 11, 12])
@pytest.mark.parametrize("hidden", [(), (5, 4)])
def test_exactly_k_distinct(k, hidden, corners):
    selector = TopKSelector(k, hidden_layer_sizes=hidden, max_iter=20, random_state=1).fit(*corners)
    assert selector.get_support().sum() == len(set(selector.get_support(indices=True))) == k
    assert selector.transform(corners[0]).shape == (600, k)


def test_exactly_k_of_features_that_are_all_alike():
    selector = TopKSelector(3, max_iter=20, noise=0).fit(np.zeros((10, 5)), [0, 1] * 5)
    assert selector.get_support().tolist() == [True] * 3 + [False] * 2


def test_names_and_pipeline(corners):
    X, y = corners
    frame = pd.DataFrame(X, columns=[f"gene {number}" for number in range(12)])
    selector = TopKSelector(2, max_iter=600, random_state=0).set_output(transform="pandas").fit(frame, y)
    assert selector.get_feature_names_out().tolist() == ["gene 3", "gene 8"]
    assert selector.transform(frame).equals(frame[["gene 3", "gene 8"]])
    pipeline = make_pipeline(TopKSelector(max_iter=20, random_state=0), StandardScaler(), LogisticRegression())
    search = GridSearchCV(pipeline, {"topkselector__k": [1, 12]}, cv=2).fit(X, y)
    assert search.best_estimator_[0].get_support().sum() in (1, 12)


def test_random_state_and_torchs_own_numbers(corners):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (TopKSelector(4, max_iter=50, random_state=seed).fit(*corners).scores_ for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert (first == again).all()
    assert (first != other).any()


def test_progress(corners, capsys):
    TopKSelector(4, bound=1.0, max_iter=50).fit(*corners)
    assert capsys.readouterr() == ("", "")
    TopKSelector(4, bound=1.0, max_iter=50, verbose=True).fit(*corners)
    written = capsys.readouterr()
    lines = written.err.splitlines()
    assert (written.out, len(lines)) == ("", 20)
    assert lines[0].startswith("TopKSelector 3 of 50, bound 1.0: temperature 0.8")
    assert lines[-1].startswith("TopKSelector 50 of 50, bound 1.0: temperature 0.03, loss 0.")
    assert ", undecided " in lines[-1]
    assert lines[-1].endswith(" of 4")
    TopKSelector(4, max_iter=3, verbose=True).fit(*corners)
    assert capsys.readouterr().err.count("\n") == 2 * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 13}, r"k: expected 1 <= k <= n_features = 12, got 13"),
        ({"k": 0}, r"k: expected 1 <= k <= n_features = 12, got 0"),
        ({"k": 2.0}, r"k: expected an integer, got 2.0"),
        ({"task": "ranking"}, r"task: expected one of 'auto', 'classification', 'regression', got 'ranking'"),
        ({"task": "regression"}, r"y: expected numbers with task='regression', got dtype <U5"),
        ({"hidden_layer_sizes": 10}, r"hidden_layer_sizes: expected a sequence of integers, got 10"),
        ({"temperature": 0.1}, r"temperature: expected two numbers, start and end, got 0.1"),
        ({"temperature": (1.0, 0.0)}, r"temperature: expected a positive, finite number, got 0"),
        ({"score_learning_rate": 0}, r"score_learning_rate: expected a positive, finite number, got 0"),
        ({"bound": 0}, r"bound: expected a positive, finite number, got 0"),
        ({"noise": -1}, r"noise: expected a finite number of at least 0, got -1"),
        ({"max_iter": 0}, r"max_iter: expected at least 1, got 0"),
        ({"batch_size": "all"}, r"batch_size: expected an integer, got 'all'"),
        ({"learning_rate": 1e30, "max_iter": 9}, r"learning_rate: expected one .* finite, got 1e\+30"),
    ],
    ids=str,
)
def test_bad_parameters_are_said_at_fit(settings, message, corners):
    selector = TopKSelector(**{"k": 2, **settings})
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        selector.fit(*corners)
    with pytest.raises(NotFittedError):
        selector.get_support()


def test_bad_input(corners):
    X, y = corners
    numbers = np.round(2 * X[:, 3])
    with pytest.raises(ValueError, match=r"task: expected 'regression' or 'classification' for a y with \d+ different whole"):
        TopKSelector(2).fit(X, numbers)
    with pytest.raises(ValueError, match="task: expected 'regression' or 'classification'"):
        TopKSelector(2).fit(X, numbers.astype(int))
    assert len(np.unique(numbers)) > 60
    TopKSelector(2, task="classification", max_iter=2).fit(X, numbers.astype(int))
    TopKSelector(2, max_iter=2).fit(X, numbers.astype(int).astype(str))
    with pytest.raises(ValueError, match="y: expected at least two classes with task='classification', got 1 class"):
        TopKSelector(2).fit(X, np.zeros(600, dtype=int))
    with pytest.raises(ValueError, match="X: expected features that are finite when they are standardised in float32"):
        TopKSelector(2).fit(X * np.where(np.arange(12) == 3, 1e200, 1), y)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        TopKSelector(2).fit(np.where(X.max() - 1 < X, np.nan, X), y)
    with pytest.raises(TypeError, match="Sparse data was passed"):
        TopKSelector(2).fit(sparse.csr_matrix(X), y)
    with pytest.raises(ValueError, match="requires y to be passed"):
        TopKSelector(2).fit(X, None)
