"""Which code computes a loss: what no kernel may touch goes to the plain code, and nothing that was assigned is missed."""

import copy
import pickle

import pytest
import torch
from torch import nn

import anyk
from anyk import candidates
from anyk.kernels import native
from anyk.losses import CrossEntropySpec, topk_loss

pytestmark = pytest.mark.skipif(bool(native.status()), reason=f"native kernels: {native.status()}")
P_K = {1: 0.5, 5: 0.5}


def batch(n: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, n, generator=generator), torch.randint(n, (4,), generator=generator)


def plain(criterion, scores, target):
    with anyk.backend("torch"):
        return criterion(scores, target)


@pytest.mark.parametrize("operator", ["bitonic", "lapsum"])
def test_the_default_device_is_not_where_the_tables_are(operator):
    scores, target = batch(41)
    with torch.device("meta"):
        for m in (17, None):
            loss = anyk.TopKCrossEntropyLoss(P_K, operator, m=m)(scores, target)
            assert loss.device.type == "cpu"
        assert candidates.best(scores, 3).device.type == "cpu"


class Wrapped(torch.Tensor):
    """Has no memory of its own, like a distributed tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        inner = [each.inner if isinstance(each, Wrapped) else each for each in arguments]
        return function(*inner, **(keywords or {}))


def test_targets_and_weights_without_memory():
    scores, target = batch()
    criterion = anyk.TopKCrossEntropyLoss(P_K, m=16)
    expected = plain(criterion, scores, target)
    torch.testing.assert_close(criterion(scores, Wrapped(target)), expected)
    weighted = anyk.TopKCrossEntropyLoss(P_K, m=16, weight=Wrapped(torch.ones(37)))
    torch.testing.assert_close(weighted(scores, target), expected)


def test_nothing_is_recorded_that_is_no_operation():
    scores, target = batch()
    criterion = anyk.TopKErrorLoss(P_K, m=16)
    from torch.fx.experimental.proxy_tensor import make_fx

    # The plain code looks at values, which cannot be recorded, and says so. A kernel would leave nothing but empty memory.
    with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
        make_fx(lambda scores: criterion(scores, target))(scores)


def test_p_k_that_was_learned_may_change():
    scores, target = batch()
    p_k = nn.Parameter(torch.tensor([0.5, 0.25, 0.25]))
    criterion = anyk.TopKCrossEntropyLoss(p_k, m=16)
    criterion(scores, target).backward()
    p_k.grad = None
    p_k.requires_grad_(False)
    criterion(scores, target)
    p_k.copy_(torch.tensor([0.0, 0.0, 1.0]))
    torch.testing.assert_close(criterion(scores, target), plain(criterion, scores, target))
    p_k.requires_grad_(True)
    criterion(scores, target).backward()
    assert p_k.grad is not None


class Doubled(CrossEntropySpec):
    def losses(self, *given):
        return 2 * super().losses(*given)


def test_another_loss_is_not_taken_for_ours():
    scores, target = batch()
    criterion = anyk.TopKCrossEntropyLoss(P_K, m=16)
    spec = criterion.spec
    doubled = Doubled(spec.p_k, spec.operator, spec.m)
    loss = topk_loss(doubled, scores, target, criterion.conventions)
    torch.testing.assert_close(loss, 2 * criterion(scores, target))


def test_everything_may_be_assigned_after_a_call():
    scores, target = batch()
    criterion = anyk.TopKErrorLoss(P_K, "splitter", m=16)
    for name, value in (
        ("m", 20), ("ce_weight", 0.7), ("q", 0.5), ("reduction", "sum"), ("ignore_index", int(target[0])),
        ("operator", "lapsum"),
        ("p_k", [0.1, 0.9]), ("weight", torch.rand(37)), ("label_smoothing", 0.0),
        ("weight", nn.Parameter(torch.rand(37))),
    ):  # fmt: skip
        before = criterion(scores, target)
        if name == "weight":
            criterion.weight = None
        setattr(criterion, name, value)
        after = criterion(scores, target)
        torch.testing.assert_close(after, plain(criterion, scores, target))
        assert name == "label_smoothing" or not torch.equal(before, after)
    criterion.operator.temperature = 3.0
    torch.testing.assert_close(criterion(scores, target), plain(criterion, scores, target))
    criterion.operator.temperature = nn.Parameter(torch.tensor(2.0))
    criterion(scores, target).backward()
    assert criterion.operator.temperature.grad is not None
    for again in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        torch.testing.assert_close(again(scores, target), criterion(scores, target))


def test_a_second_derivative_is_that_of_the_same_loss():
    scores, target = batch()
    scores.requires_grad_()
    for m in (16, 37, None):
        criterion = anyk.TopKCrossEntropyLoss(P_K, m=m)
        torch.autograd.grad(criterion(scores, target), scores, create_graph=True)
        loss = criterion(scores, target)
        criterion.operator.temperature = 2.0
        with pytest.raises(RuntimeError, match="operator: expected as it was in the forward pass"):
            torch.autograd.grad(loss, scores, create_graph=True)
    loss = criterion(scores, target)
    target[0] = (target[0] + 1) % 37
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, scores)


def test_the_smooth_loss_leaves_what_is_strange_to_the_plain_code():
    scores, target = batch()
    criterion = anyk.SmoothTopKLoss(3)
    criterion.temperature = torch.tensor(0.5, requires_grad=True)
    criterion(scores, target).backward()
    assert criterion.temperature.grad is not None
    criterion = anyk.SmoothTopKLoss(3)
    criterion.k = 2.5
    with pytest.raises(TypeError, match="k: expected an integer"):
        criterion(scores, target)
    scores[0, :5] = torch.inf
    scores.requires_grad_()
    anyk.SmoothTopKLoss(3)(scores, torch.full((4,), 9)).backward()
    assert scores.grad.isnan().any()
