"""Small data with a known answer, for tests of the lab."""

import numpy as np


def blobs(classes=6, each=40, width=8, spread=1.0, seed=0):
    """Features around a centre for each class, and their labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, width))
    labels = np.arange(classes).repeat(each)
    return (centres[labels] + spread * rng.normal(size=(len(labels), width))).astype(np.float32), labels
