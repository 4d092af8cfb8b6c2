"""Confusion matrices that wrong labels are drawn from: what people answered for each class, or what a model answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from anyk.lab.errors import LabError
from anyk.lab.run import models, training
from anyk.lab.run.batches import EVALUATION_BATCH, Reader, divide, read_data, resolved
from anyk.lab.run.run_folder import Run
from pays import plan
from pays.plan import Set
from pays.summaries import SUMMARIES, Summaries


def with_share(matrix: np.ndarray, wrong: float) -> np.ndarray:
    """The matrix with so much of its mass off the diagonal, the same factor for every class; rows sum to 1.

    >>> with_share(np.array([[8.0, 2, 0], [3, 6, 1], [1, 0, 9]]), 0.1)
    array([[0.91428571, 0.08571429, 0.        ],
           [0.12857143, 0.82857143, 0.04285714],
           [0.04285714, 0.        , 0.95714286]])
    """
    shares = matrix.astype(np.float64) / matrix.sum(1, keepdims=True)
    np.fill_diagonal(shares, 0.0)
    shares *= wrong / shares.sum(1).mean()
    if shares.sum(1).max() > 1:
        raise LabError(f"{wrong:g} of wrong labels would leave a class none that are right.")
    shares[np.diag_indices(len(shares))] = 1 - shares.sum(1)
    return shares


def same_share(matrix: np.ndarray, wrong: float) -> np.ndarray:
    """The matrix with so much of the mass of every row off the diagonal; a row that has none there takes that of all."""
    shares = matrix.astype(np.float64).copy()
    np.fill_diagonal(shares, 0.0)
    shares += 1e-9 * shares.sum(0)
    np.fill_diagonal(shares, 0.0)
    shares *= wrong / shares.sum(1, keepdims=True)
    shares[np.diag_indices(len(shares))] = 1 - wrong
    return shares


def write(each: Set, place: str, folder: Path, people: str) -> str:
    """The file with the matrix of a set, made if it is not there.

    Args:
        each: a set with wrong labels.
        place: its data.
        folder: of the runs.
        people: the file with what people answered; of completion, none.
    """
    path = folder / f"{each.name}-confusions.npy"
    if path.exists():
        return str(path)
    if each.name.startswith("completion"):
        answers = folder / "completion-answers.npy"
        if not answers.exists():
            _save(answers, model_answers(place, folder / "completion-first"))
        matrix = same_share(np.load(answers), each.wrong)
    else:
        if not people:
            raise LabError(f"--data should say what people answered for the classes of {each.name}, as confusions=FILE.npy.")
        matrix = with_share(np.load(people), each.wrong)
    _save(path, matrix)
    return str(path)


def model_answers(place: str, folder: Path) -> np.ndarray:
    """What softmax answers for each class: the mean of its probabilities over examples that it was not trained with."""
    clean = plan.SETS["completion"]
    tuned = Summaries(clean, SUMMARIES).tuned["softmax"]["values"]
    config = clean.start("softmax").replace(**tuned, data=place)
    training.train(config, folder)
    dataset = read_data(config)
    config = resolved(config, dataset)
    parts = divide(dataset, config)
    model = models.build(config, dataset)
    saved = Run(folder).load_tensors("model.safetensors")
    assert saved is not None
    model.load_state_dict(saved[0])
    model.eval()
    unseen = torch.ones(len(dataset.train), dtype=torch.bool)
    unseen[parts.train] = False
    unseen &= dataset.train.labels >= 0
    sums = torch.zeros(len(dataset.classes), len(dataset.classes), dtype=torch.float64)
    reader = Reader(dataset, torch.device("cpu"), config)
    with torch.inference_mode():
        for index in unseen.nonzero().flatten().split(EVALUATION_BATCH):
            answers = model(reader(dataset.train, index)).softmax(1)
            sums.index_add_(0, dataset.train.labels[index], answers.double())
    return sums.numpy()


def _save(path: Path, matrix: np.ndarray) -> None:
    unfinished = path.with_suffix(".unfinished.npy")
    np.save(unfinished, matrix)
    unfinished.replace(path)
