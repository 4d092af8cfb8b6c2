"""Inputs that a function of the tools once got wrong: strides, infinities, temperatures of odd shapes, autocast."""

import pytest
import torch

import anyk

INF = float("inf")


def scores_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda s, dim: anyk.soft_topk(s, 5, dim=dim),
        lambda s, dim: anyk.soft_topk(s, 5, "permutahedron", dim=dim),
        lambda s, dim: anyk.soft_topk(s, 5, "ksubset", dim=dim),
        lambda s, dim: anyk.soft_topk(s, 5, "splitter", dim=dim),
        lambda s, dim: anyk.soft_rank(s, dim=dim),
        lambda s, dim: anyk.soft_rank(s, "permutahedron", dim=dim),
        lambda s, dim: anyk.soft_sort(s, dim=dim),
    ],
)
def test_the_first_dimension_of_a_matrix(call):
    columns = scores_of(30, 8).requires_grad_()
    rows = columns.detach().t().contiguous().requires_grad_()
    weights = scores_of(30, 8)
    by_columns, by_rows = call(columns, 0), call(rows, -1)
    torch.testing.assert_close(by_columns, by_rows.t())
    (by_columns * weights).sum().backward()
    (by_rows * weights.t()).sum().backward()
    torch.testing.assert_close(columns.grad, rows.grad.t())
