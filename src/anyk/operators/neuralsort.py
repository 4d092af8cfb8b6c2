"""NeuralSort: each rank is a softmax over the classes."""

from __future__ import annotations

import torch
from torch import Tensor

from anyk.docstrings import documented
from anyk.kernels.loss_description import NEURALSORT
from anyk.operators.base import Operator, by_class, exactly, expected_sort, in_order, log_running_sum, log_running_sums


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
    dtype, scores = scores.dtype, exactly(scores)  # multiples of the scores may be beyond float32
    gaps = scores[..., :-1] - scores[..., 1:]
    place = torch.arange(1, scores.shape[-1], device=scores.device)
    better = torch.nn.functional.pad((gaps * place).cumsum(-1), (1, 0))
    ranks = torch.arange(1, k + 1, device=scores.device)[:, None]
    exponents = (1 - 2 * ranks) * scores[..., None, :] - 2 * better[..., None, :]
    if real is not None:
        exponents = exponents.masked_fill(~real[..., None, :], -torch.inf)
    return exponents.log_softmax(-1).to(dtype)
