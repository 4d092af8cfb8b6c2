"""The scikit-learn estimator: scikit-learn's own checks, the objective it claims to minimise, and what users do with it."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import make_blobs, make_circles
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import anyk
import anyk.sklearn
from anyk import losses
from anyk.sklearn import TopKClassifier, topk_score, topk_scorer


def not_for_mini_batches(estimator):
    why = "an example of weight 2 comes once in an epoch, a repeated one twice, in different batches or held out"
    checks = [f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")]
    return dict.fromkeys(checks, why) if estimator.solver == "adam" else {}


# The checks have three classes at most: the default P_K is top-1 there, the second classifier ranks.
@parametrize_with_checks(
    [
        TopKClassifier(),
        TopKClassifier(p_k=(0.5, 0.5), loss="cross_entropy"),
        TopKClassifier(solver="adam", learning_rate=0.05, batch_size=16, early_stopping=True, hidden_layer_sizes=(8,)),
    ],
    expected_failed_checks=not_for_mini_batches,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def blobs():
    """Twelve classes that overlap, in features of very different size."""
    X, y = make_blobs(360, 6, centers=12, cluster_std=3.0, random_state=0)
    X = X * [1e-3, 1, 1, 10, 100, 1] + [0, 5, 0, 1000, 0, 0]
    return X[:240], y[:240], X[240:], y[240:]


def objective(classifier, X, y, weights):
    """The formula of the docstring, from the fitted coefficients; with its gradient for the standardised weights."""
    scaler = StandardScaler().fit(X, sample_weight=weights)
    coefs = torch.tensor(classifier.coefs_[0] * scaler.scale_[:, None], requires_grad=True)
    intercept = torch.tensor(classifier.intercepts_[0] + scaler.mean_ @ classifier.coefs_[0], requires_grad=True)
    scores = torch.tensor(scaler.transform(X)) @ coefs + intercept
    each = anyk.topk_cross_entropy(scores, torch.tensor(y), classifier.p_k_.tolist(), m=classifier.m, reduction="none")
    weights = torch.tensor(weights, dtype=torch.float64)
    value = (weights * each).sum() / weights.sum() + classifier.alpha / 2 * coefs.square().sum()
    return value.item(), torch.autograd.grad(value, [coefs, intercept])


def test_minimises_what_it_says(blobs):
    X, y, *_ = blobs
    weights = np.random.default_rng(0).uniform(0.2, 2, len(y))
    classifier = TopKClassifier(p_k=(0.5, 0, 0.5), loss="cross_entropy", m=8, alpha=1e-2, tol=1e-7).fit(X, y, weights)
    value, gradients = objective(classifier, X, y, weights)
    assert classifier.loss_ == pytest.approx(value, rel=1e-9)
    assert classifier.loss_curve_[-1] == pytest.approx(value, rel=1e-6)
    assert classifier.loss_curve_[0] > value
    assert all(gradient.abs().max() < 1e-4 for gradient in gradients)


def test_top1_alone_is_logistic_regression(blobs):
    X, y, X_test, _ = blobs
    ours = TopKClassifier(p_k=(1,), loss="cross_entropy", alpha=1e-2, tol=1e-8).fit(X, y)
    scaler = StandardScaler().fit(X)
    theirs = LogisticRegression(C=1 / (1e-2 * len(y)), tol=1e-8, max_iter=1000).fit(scaler.transform(X), y)
    np.testing.assert_allclose(ours.predict_proba(X_test), theirs.predict_proba(scaler.transform(X_test)), atol=1e-4)


def test_adam_goes_to_the_same_place(blobs):
    X, y, *_ = blobs
    shared = {"p_k": (0.5, 0, 0.5), "loss": "cross_entropy", "alpha": 1e-2}
    exact = TopKClassifier(**shared).fit(X, y)
    settings = {"m": None, "solver": "adam", "learning_rate": 0.02, "max_iter": 60, "batch_size": 60, "random_state": 0}
    adam = TopKClassifier(**shared, **settings).fit(X, y)
    value, _ = objective(adam, X, y, np.ones(len(y)))
    assert exact.loss_ - 1e-6 <= value <= exact.loss_ + 0.02
    assert adam.n_iter_ == len(adam.loss_curve_) == 60


def test_first_guesses(blobs):
    X, y, X_test, y_test = blobs
    names = np.array([f"class {label:02d}" for label in range(12)], dtype=object)
    classifier = TopKClassifier().fit(X, names[y])
    scores, labels = classifier.decision_function(X_test), names[y_test]
    guesses = classifier.predict_topk(X_test, k=5)
    assert (guesses == names[(-scores).argsort(1)[:, :5]]).all()
    assert (guesses[:, 0] == classifier.predict(X_test)).all()
    expected = np.mean([label in guess for label, guess in zip(labels, guesses, strict=True)])
    theirs = top_k_accuracy_score(labels, scores, k=5, labels=names)
    ours = anyk.topk_accuracy(torch.tensor(scores), torch.tensor(y_test), ks=(5,))[5].item()
    assert classifier.score_topk(X_test, labels, k=5) == pytest.approx(expected) == pytest.approx(theirs) == pytest.approx(ours)
    assert classifier.score_topk(X_test, labels, k=1) == classifier.score(X_test, labels)
    assert classifier.score_topk(X_test, labels, k=99) == 1
    np.testing.assert_allclose(classifier.predict_proba(X_test), torch.tensor(scores).softmax(1))


def test_top_k_score_of_any_classifier():
    class Fixed:
        classes_ = np.array(["a", "b", "d"])

        def predict_proba(self, rows):
            return np.asarray(rows)

    rows = [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.1, 0.2, 0.7]]
    assert topk_score(Fixed(), rows, ["a", "b", "d"], 1) == pytest.approx(2 / 3)  # a tie counts against
    assert topk_score(Fixed(), rows, ["a", "b", "d"], 2) == 1
    assert topk_score(Fixed(), rows, ["b", "c", "e"], 3) == pytest.approx(1 / 3)  # c and e are not known
    assert topk_score(Fixed(), rows, ["a", "b", "d"], 1, sample_weight=[1, 6, 1]) == 0.25
    binary = LogisticRegression().fit([[0.0], [1.0]], ["x", "y"])
    assert topk_score(binary, [[0.0], [2.0]], ["y", "y"], 1) == 0.5
    assert topk_score(binary, [[0.0], [2.0]], ["y", "y"], 2) == 1


@pytest.mark.parametrize(
    ("p_k", "n_classes", "used"),
    [
        ((0.5, 0, 0, 0, 0.5), 6, [0.5, 0, 0, 0, 0.5]),
        ((0.5, 0, 0, 0, 0.5), 5, [1]),  # every top-5 guess among five classes is right
        ((0.2,) * 5, 3, [0.5, 0.5]),
        ((0.5, 0.5), 1, [1]),
        ([[0.5, 0, 0.5], [0.2, 0.8, 0], [0, 0, 1]], 3, [[1, 0], [0.2, 0.8], [1, 0]]),
    ],
)
def test_p_k_that_can_be_missed(p_k, n_classes, used):
    X = np.eye(n_classes, 2).repeat(2, 0)
    y = np.arange(n_classes).repeat(2)
    np.testing.assert_allclose(TopKClassifier(p_k=p_k, alpha=1).fit(X, y).p_k_, used)


@pytest.mark.parametrize("settings", [{}, {"operator": "lapsum", "ce_weight": 0.5, "q": 0.5}, {"p_k": {1: 0.5, 3: 0.5}}])
def test_the_bounded_loss(settings, blobs):
    X, y, X_test, y_test = blobs
    classifier = TopKClassifier(**{"p_k": (0.5, 0, 0.5), "max_iter": 60, "tol": 1e-3, **settings}).fit(X, y)
    assert classifier.score_topk(X_test, y_test, k=3) > 0.8
    scores = torch.tensor(classifier.decision_function(X))
    given = {name: settings[name] for name in ("operator", "ce_weight", "q") if name in settings}
    each = anyk.topk_error(scores, torch.tensor(y), [0.5, 0, 0.5], **given)
    penalty = classifier.alpha / 2 * (classifier.coefs_[0] * X.std(0)[:, None]) ** 2
    assert classifier.loss_ == pytest.approx(each.item() + penalty.sum(), rel=1e-6)


def test_an_operator_is_copied_not_touched(blobs):
    X, y, *_ = blobs
    operator = anyk.SortingNetwork("splitter", torch.nn.Parameter(torch.tensor(1.0)))
    classifier = TopKClassifier(operator=operator, max_iter=3, tol=1)
    again = clone(classifier)
    assert again.operator is not operator
    assert repr(again.get_params()) == repr(classifier.get_params())
    classifier.fit(X, y)
    assert classifier.operator is operator
    assert operator.temperature.grad is None
    assert operator.temperature.requires_grad


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
@pytest.mark.parametrize("standardize", [True, False])
def test_sparse_input_gives_what_dense_input_gives(solver, standardize):
    rng = np.random.default_rng(0)
    X = rng.poisson(0.3, (150, 30)) * rng.uniform(0.5, 2, 30)
    X[7] = 0
    y = np.arange(150) % 7
    X[np.arange(150), y] += 2
    few, precision = (200, 1e-6) if solver == "lbfgs" else (8, 1e-2)
    classifier = TopKClassifier((0.5, 0.5), solver=solver, standardize=standardize, batch_size=40, max_iter=few, tol=1e-2)
    classifier.set_params(hidden_layer_sizes=(5,), random_state=0)
    dense = clone(classifier).fit(X, y)
    for kind in (sparse.csr_matrix, sparse.coo_array):
        thin = clone(classifier).fit(kind(X), y)
        np.testing.assert_allclose(thin.decision_function(kind(X)), dense.decision_function(X), atol=precision)


def test_weights_are_repetitions(blobs):
    X, y, X_test, _ = blobs
    weights = np.random.default_rng(0).integers(0, 4, len(y))
    classifier = TopKClassifier(p_k=(0.5, 0, 0.5), alpha=1e-2, tol=1e-6)
    weighted = clone(classifier).fit(X, y, sample_weight=weights).decision_function(X_test)
    repeated = clone(classifier).fit(X.repeat(weights, 0), y.repeat(weights)).decision_function(X_test)
    np.testing.assert_allclose(weighted, repeated, atol=1e-4)
    plain = clone(classifier).fit(X, y).decision_function(X_test)
    assert abs(plain - weighted).max() > 0.1


def test_examples_of_weight_zero_are_not_there_for_adam_either(blobs):
    X, y, X_test, _ = blobs
    keep = np.arange(len(y)) % 3 > 0
    classifier = TopKClassifier(solver="adam", max_iter=3, random_state=0)
    weighted = clone(classifier).fit(X, y, sample_weight=keep.astype(float))
    removed = clone(classifier).fit(X[keep], y[keep])
    assert (weighted.predict_proba(X_test) == removed.predict_proba(X_test)).all()


def test_class_weights(blobs):
    X, y, X_test, _ = blobs
    weighting = {label: 1 + label for label in range(12)}
    by_class = TopKClassifier(class_weight=weighting).fit(X, y).decision_function(X_test)
    by_example = TopKClassifier().fit(X, y, sample_weight=1.0 + y).decision_function(X_test)
    assert (by_class == by_example).all()
    rare = np.concatenate([np.flatnonzero(y == 0)[:3], np.flatnonzero(y > 0)])
    plain, balanced = (
        TopKClassifier(class_weight=weights).fit(X[rare], y[rare]).decision_function(X_test)[:, 0].mean()
        for weights in (None, "balanced")
    )
    assert balanced > plain


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_one_seed_one_result_and_torchs_own_random_numbers_stay(solver, blobs):
    X, y, *_ = blobs
    settings = {"solver": solver, "hidden_layer_sizes": (6,), "max_iter": 3, "early_stopping": True}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = TopKClassifier(random_state=0, **settings).fit(X, y).decision_function(X)
    assert (torch.get_rng_state() == before).all()
    torch.manual_seed(6)
    assert (TopKClassifier(random_state=0, **settings).fit(X, y).decision_function(X) == first).all()
    assert (TopKClassifier(random_state=1, **settings).fit(X, y).decision_function(X) != first).any()


def test_pipeline_and_grid_search(blobs):
    X, y, X_test, y_test = blobs
    pipeline = make_pipeline(StandardScaler(), PolynomialFeatures(2), TopKClassifier(loss="cross_entropy", tol=1e-2))
    search = GridSearchCV(
        pipeline,
        {"topkclassifier__p_k": [(1,), (0.5, 0, 0.5)], "topkclassifier__alpha": [1e-3, 1.0]},
        scoring={"top1": topk_scorer(1), "top3": topk_scorer(3)},
        refit="top3",
        cv=3,
    ).fit(X, y)
    assert (search.cv_results_["mean_test_top3"] >= search.cv_results_["mean_test_top1"]).all()
    assert search.best_params_["topkclassifier__alpha"] == 1e-3
    assert search.score(X_test, y_test) == topk_score(search, X_test, y_test, 3) > 0.8
    assert cross_val_score(pipeline, X, y, scoring=topk_scorer(12), cv=2, n_jobs=1).tolist() == [1.0, 1.0]


def test_hidden_layers_learn_what_a_line_cannot():
    X, y = make_circles(300, noise=0.05, factor=0.5, random_state=0)
    assert TopKClassifier().fit(X, y).score(X, y) < 0.7
    deep = TopKClassifier(hidden_layer_sizes=(16, 8), random_state=0).fit(X, y)
    assert deep.score(X, y) > 0.97
    assert [weight.shape for weight in deep.coefs_] == [(2, 16), (16, 8), (8, 2)]


@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
def test_as_a_torch_module(hidden, blobs):
    X, y, X_test, _ = blobs
    classifier = TopKClassifier(hidden_layer_sizes=hidden, max_iter=5, tol=1, random_state=0).fit(X, y)
    module = classifier.to_torch()
    scores = module.double()(torch.tensor(X_test)).detach()
    np.testing.assert_allclose(scores, classifier.decision_function(X_test), rtol=1e-3, atol=1e-3)
    assert classifier.to_torch()[0].weight.dtype == torch.float32


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_early_stopping_returns_to_the_best_step(solver, capsys):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 40)), rng.integers(0, 8, 200)  # nothing to learn
    settings = {"solver": solver, "learning_rate": 0.05, "max_iter": 50, "random_state": 0, "alpha": 0.0}
    classifier = TopKClassifier(early_stopping=True, verbose=True, **settings).fit(X, y)
    curve = classifier.validation_loss_curve_
    assert classifier.n_iter_ == len(curve) == len(classifier.loss_curve_) < 50
    assert classifier.loss_ == min(curve)
    assert curve[-1] > min(curve)
    if solver == "lbfgs":  # the same steps, ended at the best one
        shorter = clone(classifier).set_params(max_iter=1 + int(np.argmin(curve)), verbose=False).fit(X, y)
        np.testing.assert_allclose(shorter.coefs_[0], classifier.coefs_[0])
    written = capsys.readouterr()
    assert (written.out, written.err.count("\n")) == ("", len(curve))
    assert written.err.splitlines()[-1].startswith(f"TopKClassifier {len(curve)}: loss ")


def test_warm_start(blobs):
    X, y, X_test, _ = blobs
    classifier = TopKClassifier(warm_start=True).fit(X, y)
    first, steps = classifier.loss_, classifier.n_iter_
    classifier.fit(X, y)
    assert classifier.loss_ <= classifier.loss_curve_[0] <= first + 1e-9
    assert classifier.n_iter_ < steps / 4
    cold = TopKClassifier().fit(X, y)
    np.testing.assert_allclose(classifier.predict_proba(X_test), cold.predict_proba(X_test), atol=0.05)
    with pytest.raises(ValueError, match=r"^y: expected the classes of the last fit"):
        classifier.fit(X, y + 1)
    with pytest.raises(ValueError, match=r"^hidden_layer_sizes: expected those of the last fit .* got \(4,\)"):
        classifier.set_params(hidden_layer_sizes=(4,)).fit(X, y)


def test_all_examples_count_however_few_fit_at_once(blobs, monkeypatch):
    X, y, X_test, _ = blobs
    whole = TopKClassifier().fit(X, y).decision_function(X_test)
    monkeypatch.setattr(anyk.sklearn, "SCORES_AT_ONCE", 12 * 50)
    np.testing.assert_allclose(TopKClassifier().fit(X, y).decision_function(X_test), whole, rtol=1e-4, atol=1e-4)


def test_many_examples_are_trained_in_batches(blobs, monkeypatch):
    X, y, *_ = blobs
    monkeypatch.setattr(anyk.sklearn, "MOST_EXAMPLES_FOR_LBFGS", 239)
    automatic, adam = (TopKClassifier(solver=solver, max_iter=2, random_state=0).fit(X, y) for solver in ("auto", "adam"))
    assert (automatic.predict_proba(X) == adam.predict_proba(X)).all()


def test_not_converged(blobs):
    X, y, *_ = blobs
    with pytest.warns(ConvergenceWarning, match="max_iter = 2"):
        assert TopKClassifier(max_iter=2).fit(X, y).n_iter_ == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p_k": (0.5, 0.6)}, r"p_k: .* sum to 1 .*, got the sum 1.1"),
        ({"p_k": [[0.5, 0.5]] * 3}, r"p_k: expected shape .* n = 12 classes, got \(3, 2\)"),
        ({"hidden_layer_sizes": 10}, r"hidden_layer_sizes: expected a sequence of integers, got 10"),
        ({"alpha": -1}, r"alpha: .* got -1"),
        ({"early_stopping": True, "validation_fraction": 0.999}, r"early_stopping: .* n_samples = 240"),
        ({"solver": "adam", "learning_rate": 1e25, "max_iter": 3}, r"learning_rate: expected one .* finite, got 1e\+25"),
    ],
    ids=str,
)
def test_bad_parameters_are_said_at_fit(settings, message, blobs):
    X, y, *_ = blobs
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        TopKClassifier(**settings).fit(X, y)


def test_bad_input(blobs):
    X, y, *_ = blobs
    with pytest.raises(ValueError, match=r"^sample_weight: expected some weight above 0, got none"):
        TopKClassifier(class_weight=dict.fromkeys(range(12), 0)).fit(X, y)
    classifier = TopKClassifier(max_iter=5, tol=1).fit(X, y)
    with pytest.raises(ValueError, match=r"^k: expected 1 <= k <= the number of classes = 12, got 13"):
        classifier.predict_topk(X, 13)


def test_without_scikit_learn():
    code = (
        "import sys; sys.modules['sklearn'] = None; import anyk\n"
        "try:\n    import anyk.sklearn\n"
        "except ImportError as error:\n    print(error, error.__suppress_context__)"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == 'anyk.sklearn needs scikit-learn 1.6 or later: pip install "anyk[sklearn]" True\n'


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("enough", "threads"), [(anyk.sklearn.MULTIPLICATIONS_OF_THREAD, 1), (100, 2)])
@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_threads_by_the_work(solver, enough, threads, blobs, monkeypatch):
    """Small steps take one of torch's threads; afterwards, also after an error, there are as many as before."""
    plain, used = losses.topk_error, []

    def watched(*args, **settings):
        used.append(torch.get_num_threads())
        if len(used) == 5:
            raise RuntimeError("the fifth")
        return plain(*args, **settings)

    monkeypatch.setattr(losses, "topk_error", watched)
    monkeypatch.setattr(anyk.sklearn, "MULTIPLICATIONS_OF_THREAD", enough)
    with pytest.raises(RuntimeError, match="the fifth"):
        TopKClassifier(solver=solver).fit(*blobs[:2])
    assert set(used) == {threads}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_threads_after_fits_at_the_same_time():
    """The second begins in a thread that is new to torch, while it has the one thread of the first, and ends last."""
    begun, second_begun, first_ended = (threading.Event() for _ in range(3))
    found = []

    def fit(says, waits):
        with anyk.sklearn._threads(1):
            says.set()
            waits.wait(20)
        found.append(torch.get_num_threads())

    first = threading.Thread(target=fit, args=(begun, second_begun))
    second = threading.Thread(target=fit, args=(second_begun, first_ended))
    first.start()
    begun.wait(20)
    second.start()
    first.join(20)
    first_ended.set()
    second.join(20)
    with ThreadPoolExecutor() as later:
        found.append(later.submit(torch.get_num_threads).result())
    assert found == [2, 2, 2]
