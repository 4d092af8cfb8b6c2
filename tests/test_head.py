"""The fused head is the layer and the loss: same values, same gradients, and never a tensor of the size of the scores."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import anyk
from anyk import GeneralizedCrossEntropyLoss, LinearHead, TopKCrossEntropyLoss, TopKErrorLoss
from strategies import name, operators

D, N, ROWS = 5, 23, 6
P_K = [0.3, 0.1, 0.0, 0.6]
LOSSES = {
    "separate": partial(TopKCrossEntropyLoss, P_K, m=8),
    "mixed": partial(TopKCrossEntropyLoss, P_K, m=8, top1="mixed"),
    "operator": partial(TopKCrossEntropyLoss, P_K, m=8, top1="operator"),
    "separate candidates": partial(TopKCrossEntropyLoss, P_K, m=8, softmax_over="candidates"),
    "mixed candidates": partial(TopKCrossEntropyLoss, P_K, m=8, top1="mixed", softmax_over="candidates"),
    "error": partial(TopKErrorLoss, P_K, m=8),
    "error alone": partial(TopKErrorLoss, P_K, m=8, ce_weight=0, q=0.5),
    "error without an error": partial(TopKErrorLoss, P_K, m=8, ce_weight=1),
    "gce": partial(GeneralizedCrossEntropyLoss, 0.5, ce_weight=0.3, temperature=0.7),
    "gce q 0": partial(GeneralizedCrossEntropyLoss, 0, temperature=2.0),
}
CANDIDATES_ONLY = ["operator", "separate candidates", "mixed candidates", "error alone"]
SMOOTHED = ["separate", "error", "error without an error", "gce", "gce q 0"]
RANKED = [name for name in LOSSES if "gce" not in name]
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_ranked = pytest.mark.parametrize("loss", RANKED)
candidates_only = pytest.mark.parametrize("loss", CANDIDATES_ONLY)
rough = {"rtol": 1e-5, "atol": 2e-6}


def problem(dtype=torch.float32, n=N, seed=0, shape=(ROWS,)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, D, dtype=dtype, generator=generator) * 2
    return x.requires_grad_(), torch.randint(n, shape, generator=generator)


def head_and_loss(loss="separate", *, n=N, bias=True, chunk_size=7, sparse=False, dtype=torch.float32, **kwargs):
    torch.manual_seed(1)
    loss, criterion = (LOSSES[loss](**kwargs) for _ in range(2))
    return LinearHead(D, n, loss, bias=bias, chunk_size=chunk_size, sparse=sparse, dtype=dtype), criterion


def results(loss, x, head):
    """The loss and its gradients with respect to the input and the layer."""
    parameters = list(head.linear.parameters())
    gradients = torch.autograd.grad(loss.sum(), [x, *parameters])
    return [loss, *(g.to_dense() if g.is_sparse else g for g in gradients)]


def two_steps(head, criterion, x, target, **call):
    scores = head.as_linear()(x)
    scores = scores.movedim(-1, 1) if scores.ndim > 1 else scores
    return results(criterion(scores, target, **call), x, head)


def assert_same(actual, expected, **tolerance):
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


# ---- parity -------------------------------------------------------------------------------------------------------------


@every_loss
def test_same_as_the_two_steps(loss):
    weight = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    x, target = problem(torch.float64)
    target[2] = target[4] = 3
    smoothings = (0.0, 0.1, 1.0) if loss in SMOOTHED else (0.0,)
    for bias, smoothing, weights, reduction in itertools.product(
        (True, False), smoothings, (None, weight), ("mean", "sum", "none")
    ):
        settings = {"label_smoothing": smoothing, "weight": weights, "reduction": reduction, "ignore_index": 3}
        head, criterion = head_and_loss(loss, bias=bias, dtype=torch.float64, **settings)
        value = head(x, target)
        assert reduction != "none" or value.tolist()[2] == 0
        actual = results(value, x, head)
        assert_same(actual, two_steps(head, criterion, x, target))
        spoilt = x.detach().clone()
        spoilt[2] = torch.nan
        spoilt.requires_grad_()
        assert_same(results(head(spoilt, target), spoilt, head), actual, rtol=0, atol=0)


@pytest.mark.parametrize("operator", operators(), ids=name)
def test_every_operator(operator):
    x, target = problem(torch.float64)
    for loss in ("mixed", "error"):
        head, criterion = head_and_loss(loss, operator=operator, dtype=torch.float64)
        assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target))


@every_loss
@pytest.mark.parametrize("chunk_size", [1, 7, 22, 100])
def test_chunks_of_any_size(chunk_size, loss):
    x, target = problem()
    for m in (4, 8, 22) if loss in RANKED else (None,):
        settings = {"m": m} if loss in RANKED else {}
        settings |= {"label_smoothing": 0.1} if loss in SMOOTHED else {}
        head, criterion = head_and_loss(loss, chunk_size=chunk_size, **settings)
        assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), **rough)


@every_ranked
@pytest.mark.parametrize("m", [None, N])
def test_all_classes_ranked(m, loss):
    x, target = problem()
    for operator in (anyk.LapSum(), anyk.SortingNetwork("bitonic", wires="given")):
        head, criterion = head_and_loss(loss, operator=operator, m=m)
        tolerance = rough if loss == "error without an error" else {"rtol": 0, "atol": 0}
        assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), **tolerance)


@pytest.mark.parametrize("m", [None, 1, 5, N])
@pytest.mark.parametrize("kwargs", [{}, {"label_smoothing": 0.2}, {"weight": torch.rand(N)}, {"softmax_over": "candidates"}])
def test_top1_alone(m, kwargs):
    x, target = problem()
    criterion = TopKCrossEntropyLoss([1.0], m=m, **kwargs)
    head = LinearHead(D, N, criterion, chunk_size=7)
    assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), **rough)


@every_ranked
def test_p_k_by_class_and_by_example(loss):
    x, target = problem()
    generator = torch.Generator().manual_seed(2)
    by_class, by_example = (torch.rand(*size, generator=generator).softmax(-1) for size in ((N, 3), (ROWS, 5)))
    for p_k, call in ((by_class, {}), ([1.0], {"example_p_k": by_example})):
        head, criterion = head_and_loss(loss)
        head.criterion.p_k = criterion.p_k = p_k
        assert_same(results(head(x, target, **call), x, head), two_steps(head, criterion, x, target, **call), **rough)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 3, 2)])
def test_shapes(shape):
    x, target = problem(shape=shape)
    for loss in ("separate", "gce"):
        head, criterion = head_and_loss(loss, reduction="none")
        value = head(x, target)
        assert value.shape == shape
        assert_same(results(value, x, head), two_steps(head, criterion, x, target), **rough)
    if len(shape) > 1:
        head, criterion = head_and_loss(reduction="none")
        by_example = torch.rand(shape[0], 3).softmax(-1)
        expected = two_steps(head, criterion, x, target, example_p_k=by_example)
        assert_same(results(head(x, target, example_p_k=by_example), x, head), expected, **rough)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, loss):
    # The seed is one without equal scores, in the numbers that torch 2.6 draws and in those of 2.13: how equal ones share
    # their gradient is open.
    x, target = problem(dtype, seed=9)
    for smoothing in (0.0, 0.1) if loss in SMOOTHED else (0.0,):
        head, criterion = head_and_loss(loss, dtype=dtype, label_smoothing=smoothing)
        actual, expected = results(head(x, target), x, head), two_steps(head, criterion, x, target)
        assert actual[0].dtype == torch.float32
        assert [g.dtype for g in actual[1:]] == [dtype] * 3
        # inputs are divided by the temperature before they are rounded, scores after
        assert_same(actual[:1], expected[:1], **({"rtol": 0.02, "atol": 0} if "gce" in loss else {"rtol": 1e-5, "atol": 1e-5}))
        assert_same(actual[1:], expected[1:], rtol=0, atol=0.02)


@every_loss
def test_autocast(loss):
    x, target = problem()
    head, criterion = head_and_loss(loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, expected = head(x, target), criterion(head.as_linear()(x), target)
        scores, _ = head.predict(x, 3)
        assert scores.dtype == torch.bfloat16
    assert value != criterion(head.as_linear()(x), target)  # it did compute in bfloat16
    actual, expected = results(value, x, head), results(expected, x, head)
    assert [g.dtype for g in actual] == [torch.float32] * 4
    assert_same(actual[:1], expected[:1], **({"rtol": 0.02, "atol": 0} if "gce" in loss else {}))
    assert_same(actual[1:], expected[1:], rtol=0, atol=0.02)


@pytest.mark.parametrize("loss", ["separate", "error alone", "gce"])
def test_only_the_gradients_that_are_wanted(loss):
    x, target = problem()
    head, criterion = head_and_loss(loss)
    expected = two_steps(head, criterion, x, target)
    for wanted in itertools.product((False, True), repeat=3):
        if not any(wanted):
            continue
        tensors = [x.detach().requires_grad_(wanted[0])]
        tensors += [p.requires_grad_(on) for p, on in zip(head.linear.parameters(), wanted[1:], strict=True)]
        value = head(tensors[0], target)
        with Largest(()) as largest:
            value.backward()
        assert ((N, D) in largest.shapes) == wanted[1]  # a frozen layer does not pay for its gradient
        for tensor, on, gradient in zip(tensors, wanted, expected[1:], strict=True):
            assert (tensor.grad is not None) == on
            if on:
                torch.testing.assert_close(tensor.grad, gradient, **rough)
            tensor.grad = None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_huge_scores_keep_their_digits(smoothing):
    x, target = problem()
    head, criterion = head_and_loss(label_smoothing=smoothing)
    with torch.no_grad():
        head.linear.bias += 1e5
    scores = head.as_linear()(x).double()  # what rounding of the scores themselves leaves
    torch.testing.assert_close(head(x, target).double(), criterion(scores, target), rtol=1e-5, atol=1e-5)


def test_no_second_derivative():
    x, target = problem()
    head, _ = head_and_loss()
    (gradient,) = torch.autograd.grad(head(x, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---- candidates ---------------------------------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("chunk_size", [1, 5, 12])
def test_ties_across_chunks(chunk_size, loss):
    """Every class twice, in different chunks: which of two equals is kept changes neither the loss nor the input's gradient."""
    x, target = problem(n=24)
    head, criterion = head_and_loss(loss, n=24, chunk_size=chunk_size, **({"m": 7} if loss in RANKED else {}))
    with torch.no_grad():
        for p in head.linear.parameters():
            p[12:] = p[:12].clone()
    actual, expected = results(head(x, target), x, head), two_steps(head, criterion, x, target)
    assert_same(actual[:2], expected[:2], **rough)
    for mine, theirs in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(mine[:12] + mine[12:], theirs[:12] + theirs[12:], **rough)


@every_loss
def test_padded_classes(loss):
    x, target = problem(n=15)
    for smoothing in (0.0, 0.1) if loss in SMOOTHED else (0.0,):
        settings = {"label_smoothing": smoothing, "weight": torch.rand(N), **({"m": 18} if loss in RANKED else {})}
        head, criterion = head_and_loss(loss, chunk_size=4, **settings)
        with torch.no_grad():
            head.linear.bias[15:] = -torch.inf
        assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), **rough)
    if loss in RANKED[:-1]:
        with pytest.raises(ValueError, match="target: expected classes that are not padding"):
            head(x, torch.full_like(target, 16))


@every_loss
def test_nan_inputs_give_a_nan_loss(loss):
    x, target = problem()
    x = x.detach()
    x[2] = torch.nan
    head, _ = head_and_loss(loss, reduction="none")
    assert head(x, target).isnan().tolist() == [row == 2 for row in range(ROWS)]


# ---- sparse gradients ---------------------------------------------------------------------------------------------------


@candidates_only
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_is_dense(loss, bias, dtype):
    x, target = problem(dtype)
    target[1] = -100
    sparse, _ = head_and_loss(loss, sparse=True, bias=bias, m=4, dtype=dtype)
    dense, _ = head_and_loss(loss, sparse=False, bias=bias, m=4, dtype=dtype)
    assert_same(results(sparse(x, target), x, sparse), results(dense(x, target), x, dense), rtol=0, atol=0)
    sparse(x, target).backward()
    for p in sparse.linear.parameters():
        assert p.grad.is_sparse
        assert len(p.grad._indices().unique()) == p.grad._nnz() <= 4 * (ROWS - 1)
        torch.sparse_coo_tensor(p.grad._indices(), p.grad._values(), p.grad.shape, check_invariants=True)


def test_ignored_examples_touch_no_rows():
    x, target = problem()
    head, _ = head_and_loss("operator", sparse=True, reduction="sum")
    head(x, torch.full_like(target, -100)).backward()
    assert head.linear.weight.grad._nnz() == 0
    assert head.linear.bias.grad._nnz() == 0


# ---- memory -------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that any result of an operation has, views of the parameters and their gradients aside."""

    def __init__(self, allowed):
        super().__init__()
        self.allowed, self.seen, self.shapes = allowed, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            # x[:, 0] is first a slice of all of x for torch 2.6
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and function is not torch.ops.aten.slice.Tensor:
                self.shapes.add(tuple(tensor.shape))
                if tensor.shape not in self.allowed:
                    self.seen = max(self.seen, tensor.numel())
        return result


@every_loss
def test_the_scores_are_never_stored(loss):
    n, rows, chunk = 5000, 64, 256
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, D, generator=generator, requires_grad=True)
    target = torch.randint(n, (rows,), generator=generator)
    for smoothing in (0.0, 0.1) if loss in SMOOTHED else (0.0,):
        head, criterion = head_and_loss(loss, n=n, chunk_size=chunk, label_smoothing=smoothing)
        with Largest({(n, D), (n,)}) as largest:
            head(x, target).backward()
            head.predict(x, 5)
        assert rows * chunk <= largest.seen <= 2 * rows * chunk  # a network keeps more numbers than a chunk has scores
    with Largest({(n, D), (n,)}) as largest:
        criterion(head.as_linear()(x), target)
    assert largest.seen >= rows * n


# ---- prediction, state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 50])
@pytest.mark.parametrize("shape", [(), (4,), (0,), (2, 3)])
def test_predict_is_topk_of_all_scores(chunk_size, shape):
    x, _ = problem(shape=shape)
    head, _ = head_and_loss(chunk_size=chunk_size)
    for k in (1, 5, N):
        scores, classes = head.predict(x, k)
        expected = head.as_linear()(x).topk(k)
        torch.testing.assert_close(scores, expected.values)
        assert torch.equal(classes, expected.indices)
        assert not scores.requires_grad


def test_state():
    x, target = problem()
    head, _ = head_and_loss(weight=torch.rand(N))
    expected = head(x, target)
    other = LinearHead(D, N, TopKCrossEntropyLoss(P_K, m=8, weight=torch.ones(N)))
    assert other(x, target) != expected
    other.load_state_dict(head.state_dict())
    for copied in (other, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        torch.testing.assert_close(copied(x, target), expected)
    assert set(head.state_dict()) == {"linear.weight", "linear.bias", "criterion.weight"}
    assert "chunk_size=7" in repr(head)
    meta = LinearHead(D, N, TopKCrossEntropyLoss(P_K, m=8, weight=torch.rand(N)), device="meta")
    assert all(tensor.is_meta for tensor in meta.state_dict().values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it at graph breaks
def test_compile_breaks_the_graph_but_not_the_result():
    x, target = problem()
    head, _ = head_and_loss()
    compiled = torch.compile(lambda x: head(x.sin(), target) * 2, backend="eager")
    torch.testing.assert_close(compiled(x), head(x.sin(), target) * 2)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(head(x.sin(), target) * 2, x))


# ---- bad input ----------------------------------------------------------------------------------------------------------


X, TARGET = torch.zeros(2, D), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: head_and_loss(m=24), ValueError, "m: .* = 23, got 24"),
        (lambda: head_and_loss(weight=torch.ones(3)), ValueError, r"weight: expected shape \(23,\)"),
        (lambda: LinearHead(D, N, torch.nn.CrossEntropyLoss()), TypeError, "loss: expected .*, got CrossEntropyLoss"),
        (lambda: head_and_loss("error", sparse=True), ValueError, "sparse: .* ce_weight=0"),
        (lambda: head_and_loss("gce", sparse=True), ValueError, "sparse: expected a loss of the candidates alone"),
        (lambda: head_and_loss("operator", sparse=True, m=None), ValueError, "sparse: expected .* m below num_classes"),
        (lambda: head_and_loss()[0](X[:, :3], TARGET), ValueError, r"x: expected shape \(…, 5\), got \(2, 3\)"),
        (lambda: head_and_loss()[0](X.double(), TARGET), RuntimeError, "dtype"),  # torch's own
        (lambda: head_and_loss()[0](X, TARGET.float()), TypeError, "target: expected class indices"),
        (lambda: head_and_loss("gce")[0](X, TARGET, example_p_k=torch.ones(2, 1)), TypeError, "example_p_k: expected none"),
        (lambda: head_and_loss()[0].predict(X, 24), ValueError, "k: expected 1 <= k <= num_classes = 23, got 24"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
