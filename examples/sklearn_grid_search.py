"""A scikit-learn estimator with the top-k loss: in a pipeline, in a grid search, and its first guesses.

pip install "anyk[sklearn]"
python examples/sklearn_grid_search.py
"""

try:
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA
    from sklearn.model_selection import GridSearchCV, train_test_split
    from sklearn.pipeline import make_pipeline
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is missing: pip install "anyk[sklearn]"') from None

from anyk.sklearn import TopKClassifier, topk_score, topk_scorer


def main() -> None:
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
    pipeline = make_pipeline(PCA(10, random_state=0), TopKClassifier(random_state=0))
    search = GridSearchCV(
        pipeline,
        {"topkclassifier__p_k": [(1,), (0.5, 0.5), (0.5, 0, 0.5)], "topkclassifier__alpha": [1e-3, 1e-1]},
        scoring={"top1": topk_scorer(1), "top3": topk_scorer(3)},
        refit="top3",
        cv=3,
    ).fit(X, y)
    print("best for top-3:", search.best_params_)
    print(f"test: top-1 {topk_score(search, X_test, y_test, 1):.3f}, top-3 {topk_score(search, X_test, y_test, 3):.3f}")

    features, classifier = search.best_estimator_[:-1], search.best_estimator_[-1]
    for guesses, digit in zip(classifier.predict_topk(features.transform(X_test[:3]), k=3), y_test, strict=False):
        print(f"a {digit}: {', '.join(map(str, guesses))}?")


if __name__ == "__main__":
    main()
