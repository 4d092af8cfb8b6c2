"""A scikit-learn classifier with the top-k loss, by skorch: in a pipeline, with a grid search over P_K.

The digits of scikit-learn, 8 x 8 pixels.

    pip install "anyk[sklearn]" skorch
    python examples/skorch_classifier.py
"""

try:
    import skorch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV, train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is missing: pip install "anyk[sklearn]" skorch') from None

import numpy as np
import torch
from torch import nn

import anyk
from anyk.sklearn import topk_scorer


def main() -> None:
    torch.manual_seed(0)
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
    classifier = skorch.NeuralNetClassifier(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        criterion=anyk.TopKErrorLoss,
        criterion__p_k=1,
        optimizer=torch.optim.AdamW,
        lr=0.01,
        max_epochs=15,
        predict_nonlinearity=None,  # the loss takes logits
        train_split=None,
        verbose=0,
    )
    pipeline = make_pipeline(StandardScaler(), FunctionTransformer(np.float32), classifier)
    search = GridSearchCV(
        pipeline,
        {"neuralnetclassifier__criterion__p_k": [{1: 1.0}, {1: 0.5, 2: 0.5}, {1: 0.5, 3: 0.5}]},
        scoring={"top1": topk_scorer(1), "top3": topk_scorer(3)},
        refit="top3",
        cv=3,
    ).fit(X, y)
    print("best for top-3:", search.best_params_)
    accuracy = {k: topk_scorer(k)(search, X_test, y_test) for k in (1, 3)}
    print(f"test: top-1 {accuracy[1]:.3f}, top-3 {accuracy[3]:.3f}")
    guesses = search.predict_proba(X_test[:3]).argsort(-1)[:, ::-1][:, :3]
    for first, digit in zip(guesses, y_test[:3], strict=True):
        print(f"a {digit}: {', '.join(map(str, first))}?")


if __name__ == "__main__":
    main()
