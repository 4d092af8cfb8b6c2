"""Which 8 of 64 pixels would you keep to tell digits apart? Three ways to choose, and what a classifier makes of each.

pip install "anyk[sklearn]"
python examples/keep_pixels.py
"""

import argparse
import warnings
from functools import partial

try:
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_selection import RFE, SelectKBest, mutual_info_classif
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier
    from sklearn.preprocessing import StandardScaler
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is missing: pip install "anyk[sklearn]"') from None

from anyk.sklearn import TopKSelector

# As in evidence/selection.py, which has five splits and tunes all ways: there, TopKSelector and RFE are tied on these digits.
JUDGE = {"hidden_layer_sizes": (128,), "alpha": 1e-2, "batch_size": 128, "learning_rate_init": 3e-3, "max_iter": 80}


def show(pictures: dict[str, np.ndarray]) -> None:
    """The kept pixels of each method as a square, side by side."""
    width = max(16, *map(len, pictures)) + 3
    print("".join(name.ljust(width) for name in pictures).rstrip())
    for row in range(8):
        squares = ("".join("██" if kept else "· " for kept in mask.reshape(8, 8)[row]) for mask in pictures.values())
        print("".join(square.ljust(width) for square in squares).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--splits", type=int, default=3)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    accuracies: dict[str, list[float]] = {}
    pictures: dict[str, np.ndarray] = {}
    for split in range(options.splits):
        train, test, y_train, y_test = train_test_split(x, y, test_size=0.3, stratify=y, random_state=split)
        scaler = StandardScaler().fit(train)
        train, test = scaler.transform(train), scaler.transform(test)
        ways = {
            "TopKSelector": TopKSelector(options.k, max_iter=options.steps, random_state=split),
            "RFE": RFE(LogisticRegression(max_iter=2000), n_features_to_select=options.k, step=0.1),
            "mutual information": SelectKBest(partial(mutual_info_classif, random_state=split), k=options.k),
        }
        for name, way in ways.items():
            kept = way.fit(train, y_train).get_support()
            judge = MLPClassifier(random_state=split, **JUDGE)
            with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # 80 epochs for all
                judge.fit(train[:, kept], y_train)
            accuracies.setdefault(name, []).append(100 * judge.score(test[:, kept], y_test))
            pictures.setdefault(name, kept)
    print(f"Digits of 8 x 8 pixels; {options.k} are kept, and a classifier sees only these.\n")
    show(pictures)
    print(f"\nRight on the test, mean of {options.splits} splits (the pictures are of the first):")
    for name, values in accuracies.items():
        print(f"  {name:20} {np.mean(values):.1f} %   {' '.join(f'{value:.1f}' for value in values)}")
    print("Tuned and over more splits, the first two are tied (docs/operators.md).")


if __name__ == "__main__":
    main()
