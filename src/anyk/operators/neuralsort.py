"""NeuralSort: each rank is a softmax over the classes."""

from __future__ import annotations

import torch
from torch import Tensor

from anyk.docstrings import documented
from anyk.kernels.loss_description import NEURALSORT
from anyk.operators.base import Operator, by_class, expected_sort, in_order, log_running_sum, log_running_sums

#: less than one over the number of classes, and a power of 2, by which nothing is rounded
SMALL = 2.0**-22


@documented
class NeuralSort(Operator, name="neuralsort"):
    r"""Unimodal row-stochastic relaxation of sorting.

    ``P[r] = softmax(((n + 1 - 2r) s - A) / t)`` with ``A_c = sum_j |s_c - s_j|``. Rows sum to 1, columns need not: T can
    exceed 1, and the loss then counts it as 1.

    Cost: O(n log n + k n).

    Args:
        {temperature}

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> anyk.NeuralSort(temperature=0.1)(scores, k=2).round()
        tensor([[0., 1., 0.],
                [0., 0., 1.]])

    Reference: Grover et al., "Stochastic Optimization of Sorting Networks via Continuous Relaxations", ICLR 2019.
    """

    kernel_code = NEURALSORT

    def _sort(self, scores: Tensor, real: Tensor | None) -> Tensor:
        return expected_sort(self, scores, real)

    def _matrix(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        scores, real, classes = in_order(scores, real)
        return by_class(_log_rows(scores, real, k).exp(), classes)

    def _log_inclusion(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        return log_running_sum(_log_rows(scores, real, k), position)

    def _every_log_inclusion(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        return log_running_sums(_log_rows(scores, real, k), real)


def _log_rows(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """log P for scores in descending order, without the n x n differences.

    For the class in place c, with Q_c = sum over the better classes of (s_j - s_c), the formula's exponent is
    (1 - 2r) s_c - 2 Q_c up to a constant of the row: the number of classes cancels. Q grows from place to place by
    c (s_(c-1) - s_c): a sum of non-negative terms, so nothing cancels.
    """
    scores = SMALL * scores  # multiples of the scores may overflow, those of so much less do not
    gaps = scores[..., :-1] - scores[..., 1:]
    place = torch.arange(1, scores.shape[-1], device=scores.device)
    better = torch.nn.functional.pad((gaps * place).cumsum(-1), (1, 0))
    ranks = torch.arange(1, k + 1, device=scores.device)[:, None]
    exponents = (1 - 2 * ranks) * scores[..., None, :] - 2 * better[..., None, :]
    if real is not None:
        exponents = exponents.masked_fill(~real[..., None, :], -torch.inf)
    return ((exponents - exponents.detach().amax(-1, keepdim=True)) / SMALL).log_softmax(-1)
