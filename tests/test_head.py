"""The fused head is the layer and the loss: same values, same gradients, and never a tensor of the size of the scores."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import anyk
from anyk import LinearHead, TopKCrossEntropyLoss
from strategies import name, operators

D, N, ROWS = 5, 23, 6
P_K = [0.3, 0.1, 0.0, 0.6]
WAYS = [(top1, over) for top1 in ("separate", "mixed", "operator") for over in ("all", "candidates")]
ways = pytest.mark.parametrize(("top1", "softmax_over"), WAYS)
candidates_only = pytest.mark.parametrize(
    ("top1", "softmax_over"), [way for way in WAYS if {"operator", "candidates"} & {*way}]
)


def problem(dtype=torch.float32, n=N, seed=0, shape=(ROWS,)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, D, dtype=dtype, generator=generator) * 2
    return x.requires_grad_(), torch.randint(n, shape, generator=generator)


def head_and_loss(p_k=P_K, operator=None, *, n=N, m=8, bias=True, chunk_size=7, sparse=False, dtype=torch.float32, **kwargs):
    torch.manual_seed(1)
    loss, criterion = (TopKCrossEntropyLoss(p_k, operator, m=m, **kwargs) for _ in range(2))
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


@pytest.mark.parametrize(
    ("operator", "top1", "softmax_over"),
    [*((anyk.LapSum(), *way) for way in WAYS), *((each, "mixed", "all") for each in operators())],
)
def test_same_as_the_two_steps(operator, top1, softmax_over):
    x, target = problem(torch.float64)
    for bias, smoothing in ((True, 0.0), (False, 0.1)):
        head, criterion = head_and_loss(
            P_K, operator, bias=bias, dtype=torch.float64, top1=top1, softmax_over=softmax_over, label_smoothing=smoothing
        )
        assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target))


@pytest.mark.parametrize(("ce_weight", "q"), [(0.2, 1.0), (0.0, 1.0), (0.5, 0.3), (0.3, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("operator", [anyk.LapSum(), anyk.KSubset(), anyk.SoftSort(), anyk.SortingNetwork()], ids=name)
def test_the_bounded_loss(operator, ce_weight, q):
    x, target = problem(torch.float64)
    target[2] = -100
    weight = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for smoothing, weights in ((0.0, None), (0.0, weight), (0.1, weight), (1.0, None)):
        if smoothing and not ce_weight:
            continue
        settings = {"m": 8, "ce_weight": ce_weight, "q": q, "label_smoothing": smoothing, "weight": weights}
        torch.manual_seed(1)
        loss = anyk.TopKErrorLoss(P_K, operator, **settings)
        head = LinearHead(D, N, loss, chunk_size=7, dtype=torch.float64, sparse=ce_weight == 0)
        assert_same(results(head(x, target), x, head), two_steps(head, loss, x, target))


@ways
@pytest.mark.parametrize("chunk_size", [1, 7, 22, 100])
def test_chunks_of_any_size(chunk_size, top1, softmax_over):
    x, target = problem()
    for m, smoothing in itertools.product((4, 8, 22), (0.0, 0.1, 1.0)):
        head, criterion = head_and_loss(
            m=m, chunk_size=chunk_size, top1=top1, softmax_over=softmax_over, label_smoothing=smoothing
        )
        assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), rtol=1e-5, atol=2e-6)


@ways
@pytest.mark.parametrize("m", [None, N])
def test_all_classes_ranked(m, top1, softmax_over):
    x, target = problem()
    for operator in (anyk.LapSum(), anyk.SortingNetwork("bitonic", wires="given")):
        head, criterion = head_and_loss(P_K, operator, m=m, top1=top1, softmax_over=softmax_over)
        assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), rtol=0, atol=0)


@pytest.mark.parametrize("m", [None, 1, 5, N])
@pytest.mark.parametrize("kwargs", [{}, {"label_smoothing": 0.2}, {"weight": torch.rand(N)}, {"softmax_over": "candidates"}])
def test_top1_alone(m, kwargs):
    x, target = problem()
    head, criterion = head_and_loss([1.0], m=m, **kwargs)
    assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), rtol=1e-5, atol=2e-6)


@ways
def test_weights_ignored_rows_and_reductions(top1, softmax_over):
    x, target = problem()
    target[2] = target[4] = 3
    weight = torch.rand(N, generator=torch.Generator().manual_seed(5))
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
        head, criterion = head_and_loss(
            top1=top1, softmax_over=softmax_over, weight=weight, ignore_index=3, reduction=reduction, label_smoothing=smoothing
        )
        loss = head(x, target)
        assert reduction != "none" or loss.tolist()[2] == 0
        actual = results(loss, x, head)
        assert_same(actual, two_steps(head, criterion, x, target), rtol=1e-5, atol=2e-6)
        spoilt = x.detach().clone()
        spoilt[2] = torch.nan
        spoilt.requires_grad_()
        assert_same(results(head(spoilt, target), spoilt, head), actual, rtol=0, atol=0)


@ways
def test_p_k_by_class_and_by_example(top1, softmax_over):
    x, target = problem()
    generator = torch.Generator().manual_seed(2)
    by_class, by_example = (
        torch.rand(N, 3, generator=generator).softmax(-1),
        torch.rand(ROWS, 5, generator=generator).softmax(-1),
    )
    for p_k, call in ((by_class, {}), ([1.0], {"example_p_k": by_example})):
        head, criterion = head_and_loss(p_k, top1=top1, softmax_over=softmax_over)
        expected = two_steps(head, criterion, x, target, **call)
        assert_same(results(head(x, target, **call), x, head), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 3, 2)])
def test_shapes(shape):
    x, target = problem(shape=shape)
    head, criterion = head_and_loss(reduction="none")
    loss = head(x, target)
    assert loss.shape == shape
    assert_same(results(loss, x, head), two_steps(head, criterion, x, target), rtol=1e-5, atol=2e-6)
    if len(shape) > 1:
        by_example = torch.rand(shape[0], 3).softmax(-1)
        expected = two_steps(head, criterion, x, target, example_p_k=by_example)
        assert_same(results(head(x, target, example_p_k=by_example), x, head), expected, rtol=1e-5, atol=2e-6)


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, top1, softmax_over):
    # The seed is one without equal scores, in the numbers that torch 2.6 draws and in those of 2.13: how equal ones share
    # their gradient is open.
    x, target = problem(dtype, seed=9)
    head, criterion = head_and_loss(dtype=dtype, top1=top1, softmax_over=softmax_over)
    actual, expected = results(head(x, target), x, head), two_steps(head, criterion, x, target)
    assert actual[0].dtype == torch.float32
    assert [g.dtype for g in actual[1:]] == [dtype] * 3
    assert_same(actual[:1], expected[:1], rtol=1e-5, atol=1e-5)
    assert_same(actual[1:], expected[1:], rtol=0, atol=0.02)
    head.criterion.label_smoothing = criterion.label_smoothing = 0.1
    actual, expected = results(head(x, target), x, head), two_steps(head, criterion, x, target)
    assert_same(actual[:1], expected[:1], rtol=1e-3, atol=1e-3)
    assert_same(actual[1:], expected[1:], rtol=0, atol=0.02)


@ways
def test_autocast(top1, softmax_over):
    x, target = problem()
    head, criterion = head_and_loss(top1=top1, softmax_over=softmax_over)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, expected = head(x, target), criterion(head.as_linear()(x), target)
        scores, _ = head.predict(x, 3)
        assert scores.dtype == torch.bfloat16
    assert loss != criterion(head.as_linear()(x), target)  # it did compute in bfloat16
    actual, expected = results(loss, x, head), results(expected, x, head)
    assert [g.dtype for g in actual] == [torch.float32] * 4
    assert_same(actual[:1], expected[:1])
    assert_same(actual[1:], expected[1:], rtol=0, atol=0.02)


@ways
def test_only_the_gradients_that_are_wanted(top1, softmax_over):
    x, target = problem()
    head, criterion = head_and_loss(top1=top1, softmax_over=softmax_over)
    expected = two_steps(head, criterion, x, target)
    for wanted in itertools.product((False, True), repeat=3):
        if not any(wanted):
            continue
        tensors = [x.detach().requires_grad_(wanted[0])]
        tensors += [p.requires_grad_(on) for p, on in zip(head.linear.parameters(), wanted[1:], strict=True)]
        loss = head(tensors[0], target)
        with Largest(()) as largest:
            loss.backward()
        assert ((N, D) in largest.shapes) == wanted[1]  # a frozen layer does not pay for its gradient
        for tensor, on, gradient in zip(tensors, wanted, expected[1:], strict=True):
            assert (tensor.grad is not None) == on
            if on:
                torch.testing.assert_close(tensor.grad, gradient, rtol=1e-5, atol=2e-6)
            tensor.grad = None


def test_huge_scores_keep_their_digits():
    x, target = problem()
    head, criterion = head_and_loss()
    with torch.no_grad():
        head.linear.bias += 1e5
        exact = copy.deepcopy(head).double()
        expected = criterion(exact.as_linear()(x.double()), target)
    scores = head.as_linear()(x).double()  # what rounding of the scores themselves leaves
    torch.testing.assert_close(head(x, target).double(), criterion(scores, target), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head(x, target).double(), expected, rtol=0.02, atol=0)


def test_no_second_derivative():
    x, target = problem()
    head, _ = head_and_loss()
    (gradient,) = torch.autograd.grad(head(x, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---- candidates ---------------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 12])
def test_ties_across_chunks(chunk_size, top1, softmax_over):
    """Every class twice, in different chunks: which of two equals is kept changes neither the loss nor the input's gradient."""
    x, target = problem(n=24)
    head, criterion = head_and_loss(n=24, m=7, chunk_size=chunk_size, top1=top1, softmax_over=softmax_over)
    with torch.no_grad():
        for p in head.linear.parameters():
            p[12:] = p[:12].clone()
    actual, expected = results(head(x, target), x, head), two_steps(head, criterion, x, target)
    assert_same(actual[:2], expected[:2], rtol=1e-5, atol=2e-6)
    for mine, theirs in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(mine[:12] + mine[12:], theirs[:12] + theirs[12:], rtol=1e-5, atol=2e-6)


@ways
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padded_classes(smoothing, top1, softmax_over):
    x, target = problem(n=15)
    head, criterion = head_and_loss(
        m=18, chunk_size=4, top1=top1, softmax_over=softmax_over, label_smoothing=smoothing, weight=torch.rand(N)
    )
    with torch.no_grad():
        head.linear.bias[15:] = -torch.inf
    assert_same(results(head(x, target), x, head), two_steps(head, criterion, x, target), rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match="target: expected classes that are not padding"):
        head(x, torch.full_like(target, 16))


@ways
def test_nan_inputs_give_a_nan_loss(top1, softmax_over):
    x, target = problem()
    x = x.detach()
    x[2] = torch.nan
    head, _ = head_and_loss(top1=top1, softmax_over=softmax_over, reduction="none")
    assert head(x, target).isnan().tolist() == [row == 2 for row in range(ROWS)]


# ---- sparse gradients ---------------------------------------------------------------------------------------------------


@candidates_only
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_is_dense(top1, softmax_over, bias, dtype):
    x, target = problem(dtype)
    target[1] = -100
    kwargs = {"bias": bias, "m": 4, "dtype": dtype, "top1": top1, "softmax_over": softmax_over}
    sparse, _ = head_and_loss(sparse=True, **kwargs)
    dense, _ = head_and_loss(sparse=False, **kwargs)
    assert_same(results(sparse(x, target), x, sparse), results(dense(x, target), x, dense), rtol=0, atol=0)
    sparse(x, target).backward()
    for p in sparse.linear.parameters():
        assert p.grad.is_sparse
        assert len(p.grad._indices().unique()) == p.grad._nnz()
        assert p.grad._nnz() <= 4 * (ROWS - 1)
        torch.sparse_coo_tensor(p.grad._indices(), p.grad._values(), p.grad.shape, check_invariants=True)


def test_ignored_examples_touch_no_rows():
    x, target = problem()
    head, _ = head_and_loss(sparse=True, top1="operator", reduction="sum")
    head(x, torch.full_like(target, -100)).backward()
    assert head.linear.weight.grad._nnz() == 0
    assert head.linear.bias.grad._nnz() == 0


# ---- memory -------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that any result of an operation has, views of the parameters and their gradients aside."""

    def __init__(self, allowed):
        super().__init__()
        self.allowed = allowed
        self.seen = 0
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            # x[:, 0] is first a slice of all of x for torch 2.6
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and function is not torch.ops.aten.slice.Tensor:
                self.shapes.add(tuple(tensor.shape))
                if tensor.shape not in self.allowed:
                    self.seen = max(self.seen, tensor.numel())
        return result


@ways
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_scores_are_never_stored(top1, softmax_over, smoothing):
    n, rows, chunk, m = 5000, 64, 256, 8
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, D, generator=generator, requires_grad=True)
    target = torch.randint(n, (rows,), generator=generator)
    loss = TopKCrossEntropyLoss(P_K, anyk.LapSum(), m=m, top1=top1, softmax_over=softmax_over, label_smoothing=smoothing)
    head = LinearHead(D, n, loss, chunk_size=chunk)
    with Largest({(n, D), (n,)}) as largest:
        head(x, target).backward()
        head.predict(x, 5)
    limit = max(rows * chunk, 2 * rows * m * m * len(P_K))  # smoothing ranks each row once for each candidate
    assert rows * chunk <= largest.seen <= limit < rows * n / 5
    with Largest({(n, D), (n,)}) as largest:
        TopKCrossEntropyLoss(P_K, anyk.LapSum(), m=m)(head.as_linear()(x), target)
    assert largest.seen >= rows * n


# ---- prediction, state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 23, 50])
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
    other = LinearHead(D, N, TopKCrossEntropyLoss(head.criterion.p_k.tolist(), m=8, weight=torch.ones(N)))
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


def make(d=D, n=N, p_k=(0.5, 0.5), m=8, chunk_size=7, sparse=False, **kwargs):
    return LinearHead(d, n, TopKCrossEntropyLoss(p_k, m=m, **kwargs), chunk_size=chunk_size, sparse=sparse)


X, TARGET = torch.zeros(2, D), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make(m=24), ValueError, "m: expected 1 <= m <= num_classes = 23, got 24"),
        (lambda: LinearHead(D, N, torch.nn.CrossEntropyLoss()), TypeError, "loss: expected an anyk.TopKLoss"),
        (lambda: LinearHead(D, N, anyk.TopKErrorLoss(P_K, m=8), sparse=True), ValueError, "sparse: .* ce_weight=0"),
        (lambda: make(sparse=True), ValueError, "sparse: expected a loss of the candidates alone .softmax_over="),
        (lambda: make(sparse=True, top1="operator", m=None), ValueError, "sparse: expected .* m below num_classes"),
        (lambda: make()(X[:, :3], TARGET), ValueError, r"x: expected shape \(…, 5\), got \(2, 3\)"),
        (lambda: make()(X.double(), TARGET), TypeError, "x: expected dtype torch.float32 like the weight, got torch.float64"),
        (lambda: make()(X, TARGET.float()), TypeError, "target: expected class indices .* use as_linear"),
        (lambda: make().predict(X, 24), ValueError, "k: expected 1 <= k <= num_classes = 23, got 24"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
