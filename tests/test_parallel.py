"""Sharded classes, in real processes: everything must be as in one process that has all classes.

Four processes are started once and run the functions named ``in_each_…``; groups of one, two and three of them stand for
smaller worlds.
"""

import copy
import datetime
import multiprocessing
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import anyk
from anyk import parallel
from strategies import operators

WORLD = 4
MODES = ("separate", "mixed", "operator")
P_K = [0.3, 0.1, 0.0, 0.6]
SIZES = {1: [11], 2: [3, 8], 3: [6, 0, 5], 4: [2, 5, 1, 4]}
GROUPS = {}  # in the processes: world -> the group of that size, not the first ranks


# ---- the processes ------------------------------------------------------------------------------------------------------


class Processes:
    """Runs functions of this module in all processes at once."""

    def __init__(self, folder):
        self.folder, self.members = folder, []

    def __call__(self, function, *args):
        if not self.members:
            self.start()
        for _, pipe in self.members:
            pipe.send((function.__name__, args))
        silent = [pipe for _, pipe in self.members]
        while silent:
            ready = wait(silent, timeout=60)
            errors = [pipe.recv() for pipe in ready] or ["no answer"]
            if any(errors):
                self.stop()  # the others may wait for the one that failed
                raise AssertionError("\n".join(error for error in errors if error))
            silent = [pipe for pipe in silent if pipe not in ready]

    def start(self):
        context = multiprocessing.get_context("spawn")
        file = self.folder / f"store-{len(list(self.folder.iterdir()))}"
        for rank in range(WORLD):
            pipe, other = context.Pipe()
            process = context.Process(target=serve, args=(rank, f"file://{file}", other), daemon=True)
            process.start()
            self.members.append((process, pipe))

    def stop(self):
        for process, _ in self.members:
            process.kill()
            process.join()
        self.members = []


def serve(rank, store, pipe):
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=limit)
    for world in (1, 2, 3):
        GROUPS[world] = dist.new_group(range(WORLD - world, WORLD), timeout=limit)
    GROUPS[WORLD] = None
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")  # torch 2.6's own
    while True:
        function, args = pipe.recv()
        try:
            globals()[function](*args)
            pipe.send(None)
        except BaseException:
            pipe.send(f"rank {rank}\n{traceback.format_exc()}")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    started = Processes(tmp_path_factory.mktemp("parallel"))
    yield started
    started.stop()


def place(world):
    """The group and the rank in it; None for the rank of a process that is not in it."""
    group = GROUPS[world]
    rank = dist.get_rank(group)
    return group, None if rank < 0 else rank


def batch(rows, n, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator, dtype=torch.float64).to(dtype), torch.randint(
        n, (rows,), generator=generator
    )


def own(tensor, sizes, rank):
    return tensor.split(sizes, -1)[rank]


def sharded(
    local, target, p_k, operator=None, *, loss="topk_cross_entropy", group=None, slices=None, example_p_k=None, **settings
):
    """The loss of a slice of the classes, called as the function of all of them is."""
    module = {"topk_cross_entropy": anyk.TopKCrossEntropyLoss, "topk_error": anyk.TopKErrorLoss}[loss]
    criterion = parallel.Sharded(module(p_k, operator, **settings), group=group, slices=slices)
    return criterion(local, target, example_p_k=example_p_k)


def same_as_alone(world, scores, target, *args, sizes=None, rtol=1e-9, atol=1e-11, loss="topk_cross_entropy", **kwargs):
    """Loss and gradient against those of all classes in one process."""
    group, rank = place(world)
    sizes = sizes or SIZES[world]
    everything = scores.clone().requires_grad_()
    expected = getattr(anyk, loss)(everything, target, *args, **kwargs)
    factors = torch.arange(1.0, 1 + expected.numel(), dtype=expected.dtype).reshape(expected.shape)
    (expected * factors).sum().backward()
    local = own(scores, sizes, rank).clone().requires_grad_()
    actual = sharded(local, target, *args, loss=loss, group=group, **kwargs)
    (actual * factors).sum().backward()
    assert actual.dtype == expected.dtype
    assert local.grad.dtype == local.dtype

    def explain(message):
        return f"{args} {kwargs} {sizes}\n{message}"

    assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=explain)
    assert_close(local.grad, own(everything.grad, sizes, rank), rtol=rtol, atol=atol, msg=explain)
    told = sharded(local, target, *args, loss=loss, group=group, slices=sizes, **kwargs)
    assert_close(told, actual, rtol=0, atol=0, equal_nan=True)
    values = parallel._all_gather(actual.detach(), group)
    assert_close(values, values[:1].expand_as(values), rtol=0, atol=0, equal_nan=True)


def members_only(function):
    """For processes outside the group there is nothing to do."""

    def run(world, *args):
        if place(world)[1] is not None:
            function(world, *args)

    run.__name__ = function.__name__
    return run


# ---- loss and gradients -------------------------------------------------------------------------------------------------


@members_only
def in_each_every_operator(world, first, step):
    scores, target = batch(5, sum(SIZES[world]))
    for operator in operators()[first::step]:
        for top1 in MODES:
            for m in (None, 5):
                same_as_alone(world, scores, target, P_K, operator, m=m, top1=top1)


@pytest.mark.parametrize(("world", "first", "step"), [(2, 0, 1), (3, 0, 4), (4, 2, 4)])
def test_every_operator_and_mode(processes, world, first, step):
    processes(in_each_every_operator, world, first, step)


@members_only
def in_each_all_settings(world, dtype):
    n = sum(SIZES[world])
    scores, target = batch(6, n, dtype)
    scores *= 1.5
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(n, generator=generator).to(dtype)
    by_class = torch.rand(n, 3, generator=generator).softmax(-1)
    by_example = torch.rand(6, 3, generator=generator).softmax(-1)
    ignored = target.clone()
    ignored[2] = -100
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for top1 in MODES:
        for operator, m in ((anyk.LapSum(), 4), (anyk.SortingNetwork(), None), (anyk.KSubset(0.7), n)):
            for more in (
                {},
                {"softmax_over": "candidates"},
                {"reduction": "none", "weight": weight},
                {"reduction": "sum", "label_smoothing": 0.3},
                {"weight": weight, "label_smoothing": 0.1, "softmax_over": "candidates"},
                {"example_p_k": by_example},
            ):
                same_as_alone(world, scores, ignored, P_K, operator, m=m, top1=top1, **more, **tolerance)
            same_as_alone(world, scores, ignored, by_class, operator, m=m, top1=top1, weight=weight, **tolerance)
            same_as_alone(world, scores, target, by_class, operator, m=m, top1=top1, label_smoothing=0.2, **tolerance)
        for more in ({}, {"label_smoothing": 0.1, "weight": weight}, {"softmax_over": "candidates", "m": 3}):
            same_as_alone(world, scores, ignored, [1.0], top1=top1, **more, **tolerance)
    for ce_weight, q in ((0.2, 1.0), (0.0, 0.5), (1.0, 1.0)):
        for operator, m in ((anyk.LapSum(), 4), ("ksubset", None)):
            for more in ({}, {"reduction": "none", "weight": weight}, {"label_smoothing": 0.3, "weight": weight}):
                if ce_weight or "label_smoothing" not in more:
                    more = {**more, "loss": "topk_error", "ce_weight": ce_weight, "q": q}
                    same_as_alone(world, scores, ignored, P_K, operator, m=m, **more, **tolerance)
            same_as_alone(world, scores, ignored, by_class, operator, m=m, loss="topk_error", ce_weight=ce_weight, **tolerance)
    same_as_alone(world, scores, torch.full_like(target, -100), P_K, m=5, **tolerance)
    same_as_alone(world, scores[:0], target[:0], P_K, m=5, reduction="none", **tolerance)
    same_as_alone(world, scores[:0], target[:0], P_K, m=5, reduction="sum", label_smoothing=0.1, **tolerance)


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float64), (2, torch.float64), (3, torch.float64), (3, torch.float32)])
def test_all_settings(processes, world, dtype):
    processes(in_each_all_settings, world, dtype)


@members_only
def in_each_slices(world):
    for sizes in ([40, 0, 0], [0, 0, 40], [1, 38, 1], [0, 40, 0], [13, 13, 14], [2, 3, 35]):
        scores, _ = batch(40, 40)
        target = torch.arange(40)
        for kwargs in ({"m": 7}, {"m": 4, "label_smoothing": 0.1}, {"m": 40}, {}):
            for operator in (anyk.SortingNetwork(), anyk.SortingNetwork("bitonic", wires="given")):
                same_as_alone(world, scores, target, P_K, operator, sizes=sizes, **kwargs)


def test_slices_of_any_size_and_targets_anywhere(processes):
    processes(in_each_slices, 3)


@members_only
def in_each_ties(world):
    generator = torch.Generator().manual_seed(2)
    n = sum(SIZES[world])
    scores = torch.randint(3, (40, n), generator=generator).double()
    target = torch.randint(n, (40,), generator=generator)
    for operator in (
        anyk.SortingNetwork(),
        anyk.SortingNetwork(wires="sorted"),
        anyk.SortingNetwork(wires="given"),
        anyk.LapSum(),
    ):
        same_as_alone(world, scores, target, P_K, operator)
    # At the edge of the m best any of the equals may be taken: the same loss; the gradient is the same in sum.
    group, rank = place(world)
    everything, local = scores.clone().requires_grad_(), own(scores, SIZES[world], rank).clone().requires_grad_()
    expected = anyk.topk_cross_entropy(everything, target, P_K, m=5, reduction="none")
    actual = sharded(local, target, P_K, m=5, reduction="none", group=group)
    assert_close(actual, expected)
    expected.sum().backward()
    actual.sum().backward()
    gradient = torch.zeros_like(scores)
    own(gradient, SIZES[world], rank).copy_(local.grad)
    dist.all_reduce(gradient, group=group)
    is_target = torch.arange(n) == target[:, None]
    for value in range(3):
        equals = (scores == value) & ~is_target
        assert_close((gradient * equals).sum(-1), (everything.grad * equals).sum(-1))
    assert_close(gradient[is_target], everything.grad[is_target])


def test_ties(processes):
    processes(in_each_ties, 3)


@members_only
def in_each_padding(world):
    n = sum(SIZES[world])
    scores, target = batch(6, n)
    scores[0, 1:4] = -torch.inf
    scores[1, :6] = -torch.inf  # a whole slice
    scores[2, 6:] = -torch.inf
    scores[5] = torch.nan
    target = torch.tensor([0, 7, 5, 2, 10, -100])
    for operator in (anyk.SortingNetwork(), anyk.LapSum(), anyk.SinkhornSort(), anyk.SortingNetwork(wires="given")):
        for top1 in MODES:
            for kwargs in ({}, {"m": 6}, {"m": 5, "label_smoothing": 0.1}, {"m": 5, "softmax_over": "candidates"}):
                same_as_alone(world, scores, target, P_K, operator, top1=top1, **kwargs)
    same_as_alone(world, scores[:5], target[:5], [1.0])
    group, rank = place(world)
    with pytest.raises(ValueError, match="target: expected classes that are not padding"):
        sharded(own(scores, SIZES[world], rank)[:1], torch.tensor([1]), P_K, group=group, m=5)


def test_padding_and_ignored_rows(processes):
    processes(in_each_padding, 3)


@members_only
def in_each_half(world):
    for dtype in (torch.float16, torch.bfloat16):
        scores, target = batch(8, sum(SIZES[world]), dtype)
        for kwargs in ({"m": 5}, {"top1": "operator"}, {"m": 5, "label_smoothing": 0.1}):
            # The candidates' scores and sums are exact; the gradient is rounded to half precision in the end.
            same_as_alone(world, scores, target, P_K, anyk.LapSum(), rtol=2e-2, atol=1e-3, **kwargs)
            group, rank = place(world)
            local = own(scores, SIZES[world], rank)
            loss = sharded(local, target, P_K, anyk.LapSum(), group=group, **kwargs)
            assert_close(loss, anyk.topk_cross_entropy(scores.float(), target, P_K, anyk.LapSum(), **kwargs))
    # Far from zero, digits are scarce: everything is relative to the best score.
    scores, target = batch(50, sum(SIZES[world]), torch.float32)
    scores = (scores * 4).round() / 4
    far = own(scores + 1e6, SIZES[world], rank)
    for p_k, kwargs in (([1.0], {}), (P_K, {"m": 5}), (P_K, {"m": 5, "label_smoothing": 0.1})):
        assert_close(
            sharded(far, target, p_k, group=group, **kwargs),
            anyk.topk_cross_entropy(scores, target, p_k, **kwargs),
        )


def test_precision(processes):
    processes(in_each_half, 3)


@members_only
def in_each_other_gradients(world):
    """A learned temperature gets its whole gradient in every process; nothing is differentiated twice in silence."""
    scores, target = batch(5, sum(SIZES[world]))
    group, rank = place(world)
    alone = anyk.LapSum(torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64)))
    shared = copy.deepcopy(alone)
    anyk.topk_cross_entropy(scores, target, P_K, alone, m=5).backward()
    local = own(scores, SIZES[world], rank).clone().requires_grad_()
    sharded(local, target, P_K, shared, group=group, m=5).backward()
    assert_close(shared.temperature.grad, alone.temperature.grad)
    loss = sharded(local, target, P_K, shared, group=group, m=5)
    (gradient,) = torch.autograd.grad(loss, local, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gradients_of_the_temperature_and_of_gradients(processes):
    processes(in_each_other_gradients, 3)


# ---- communication ------------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts what goes into and comes out of collectives, however they are called."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.calls += 1
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return function(*args, **(kwargs or {}))


@members_only
def in_each_traffic(world):
    group, _ = place(world)
    rows, m = 16, 6
    header = 5 * 8  # the sizes, and a few checksums; not sent with slices
    for n_local in (50, 500):
        _, target = batch(rows, world * n_local)
        local = torch.randn(rows, n_local, requires_grad=True)
        for kwargs, calls, numbers in (
            ({"m": m}, 2, m + 2),
            ({"m": m, "top1": "operator"}, 2, m),
            ({"m": m, "label_smoothing": 0.1}, 2, m + 5 + m),  # with the classes
            ({"p_k": [1.0]}, 2, 3),
        ):
            for slices in (None, [n_local] * world):
                with Traffic() as traffic:
                    loss = sharded(local, target, **({"p_k": P_K} | kwargs), group=group, slices=slices)
                assert traffic.calls == (calls if slices is None else 1)
                told = (header if slices is None else 0) + rows * numbers * 4
                assert traffic.bytes == (world + 1) * told, (kwargs, traffic.bytes)
            with Traffic() as traffic:
                loss.backward()
            assert traffic.calls == 0
        with Traffic() as traffic:
            parallel.topk_hits(local, target, group=group)
        assert traffic.bytes == (world + 1) * (header + rows * 4) + rows * 8


@pytest.mark.parametrize("world", [2, 3])
def test_traffic_does_not_grow_with_the_classes(processes, world):
    processes(in_each_traffic, world)


# ---- errors -------------------------------------------------------------------------------------------------------------


@members_only
def in_each_errors(world):
    group, rank = place(world)
    scores, target = batch(4, sum(SIZES[world]))
    local = own(scores, SIZES[world], rank)

    def refuses(message, *args, error=ValueError, **kwargs):
        with pytest.raises(error, match=message):
            sharded(*args, group=group, **kwargs)
        if error is ValueError:
            dist.barrier(group)  # everybody has refused

    refuses("target: expected class indices from 0 to 10, got 11", local, target + 11 - target.max(), P_K)
    refuses("p_k: expected no k above m = 3, got k = 4", local, target, P_K, m=3)
    refuses("label_smoothing: expected a number below 1", local, target, P_K, label_smoothing=1.0)
    refuses("same number of rows", local[: 4 - rank // 2], target[: 4 - rank // 2], P_K)
    refuses("same settings, dtype", local.to([torch.float32, torch.float64][rank // 2]), target, P_K)
    refuses("same targets", local, target.flip(0) if rank else target, P_K)
    refuses("same settings", local, target, P_K, m=5 + rank // 2)
    refuses("at least one class", local[:, :0], target, P_K)
    refuses("local_scores: expected shape \\(B, n_local\\)", local[0], target, P_K)
    refuses("target: .* class probabilities are not supported", local, scores.softmax(-1), P_K, error=TypeError)
    refuses("slices: expected 3 sizes, with . for rank ., got", local, target, P_K, slices=[1, 1, 9])
    with pytest.raises(TypeError, match="ks: expected a sequence"):
        parallel.topk_hits(local, target, 3, group=group)


def in_each_outsider():
    scores, target = batch(4, 5)
    if dist.get_rank(GROUPS[3]) < 0:
        with pytest.raises(ValueError, match="group: expected one that this process is a member of"):
            sharded(scores, target, P_K, group=GROUPS[3])


def test_bad_input(processes):
    processes(in_each_errors, 3)
    processes(in_each_outsider)


def test_no_process_group():
    scores, target = batch(4, 5)
    with pytest.raises(RuntimeError, match=r"group: .*init_process_group"):
        sharded(scores, target, P_K)


# ---- metrics ------------------------------------------------------------------------------------------------------------


@members_only
def in_each_metrics(world):
    group, rank = place(world)
    n = sum(SIZES[world])
    scores, target = batch(60, n)
    tied = (scores * 2).round()
    broken = scores.clone()
    broken[::7, 2] = torch.nan
    broken[::5, 9] = torch.nan
    for case in (scores, tied, broken, tied.half(), scores.bfloat16()):
        local = own(case, SIZES[world], rank)
        ks = (1, 2, 5, n, n + 3)
        assert parallel.topk_hits(local, target, ks, group=group) == anyk.topk_hits(case, target, ks)
        assert parallel.topk_accuracy(local, target, group=group) == anyk.topk_accuracy(case, target)
        some = torch.where(torch.arange(len(target)) % 3 == 0, -100, target)
        assert parallel.topk_accuracy(local, some, group=group) == anyk.topk_accuracy(case, some)
    assert parallel.topk_hits(local, target, (), group=group) == {}
    assert parallel.topk_accuracy(local[:0], target[:0], (1,), group=group)[1].isnan()
    with pytest.raises(ValueError, match="target: expected class indices from 0 to"):
        parallel.topk_hits(local, target - 100, group=group)


@pytest.mark.parametrize("world", [1, 3])
def test_metrics(processes, world):
    processes(in_each_metrics, world)


# ---- DTensor ------------------------------------------------------------------------------------------------------------


def in_each_dtensor(shape, placements):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", shape)
    how = [{"class": Shard(1), "batch": Shard(0), "same": Replicate()}[word] for word in placements]
    how_rows = [Shard(0) if word == "batch" else Replicate() for word in placements]
    rows, n = 7, 13
    scores, target = batch(rows, n)
    target[3] = -100
    weight = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_example = torch.rand(rows, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    rows_of_all = distribute_tensor(target, mesh, how_rows)
    examples_of_all = distribute_tensor(by_example, mesh, how_rows)
    for given_target, given_p_k in ((rows_of_all, examples_of_all), (rows_of_all.to_local(), examples_of_all.to_local())):
        for kwargs in (
            {"m": 5},
            {"reduction": "sum", "weight": weight},
            {"m": 5, "label_smoothing": 0.1, "weight": weight},
            {"m": 5, "example_p_k": by_example},
            {"m": 5, "reduction": "none"},
        ):
            everything = scores.clone().requires_grad_()
            expected = anyk.topk_cross_entropy(everything, target, P_K, **kwargs)
            spread = distribute_tensor(scores, mesh, how).requires_grad_()
            if "example_p_k" in kwargs:
                kwargs = kwargs | {"example_p_k": given_p_k}
            loss = sharded(spread, given_target, torch.tensor(P_K, dtype=torch.float64), **kwargs)
            assert isinstance(loss, DTensor)
            assert loss.shape == expected.shape
            assert_close(loss.full_tensor(), expected)
            expected.sum().backward()
            loss.sum().backward()
            assert isinstance(spread.grad, DTensor)
            # torch 2.6 replicates it; the values are the same
            assert spread.grad.placements == tuple(how) or torch.__version__ < "2.13"
            assert_close(spread.grad.full_tensor(), everything.grad)
        valid = target.clamp(min=0)
        local_target = distribute_tensor(valid, mesh, how_rows)
        for given in (local_target, local_target.to_local()):
            assert parallel.topk_hits(spread, given, (1, 3)) == anyk.topk_hits(scores, valid, (1, 3))
            assert parallel.topk_accuracy(spread, given, (1, 3)) == anyk.topk_accuracy(scores, valid, (1, 3))


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((4,), ["class"]), ((2, 2), ["class", "same"]), ((2, 2), ["class", "batch"])],
)
def test_dtensor(processes, shape, placements):
    processes(in_each_dtensor, shape, placements)


def in_each_wrong_dtensor():
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    scores, target = batch(4, 12)
    for how in ([Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(1), Shard(1)]):
        with pytest.raises(ValueError, match="local_scores: expected a DTensor with Shard\\(1\\)"):
            sharded(distribute_tensor(scores, mesh, how), target, P_K)
    spread = distribute_tensor(scores, mesh, [Replicate(), Shard(1)])
    with pytest.raises(ValueError, match="group: expected None with a DTensor"):
        sharded(spread, target, P_K, group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"target: expected a torch\.Tensor to go with local_scores"):
        sharded(scores, distribute_tensor(target, mesh, [Replicate()] * 2), P_K)
    # A mesh that does not list the ranks in ascending order; its group does the same, and if it did not, we would say so.
    backwards = distribute_tensor(scores, DeviceMesh("cpu", [3, 2, 1, 0]), [Shard(1)])
    loss = sharded(backwards, target, P_K, m=5)
    assert_close(loss.to_local(), anyk.topk_cross_entropy(scores, target, P_K, m=5))
    shard = parallel._Shard.of(scores, target, None)
    with pytest.raises(ValueError, match="ranks in the order of the slices, got the slices"):
        parallel._Slices.of(shard._replace(place=WORLD - 1 - shard.place), None)


def test_wrong_dtensor(processes):
    processes(in_each_wrong_dtensor)


# ---- end to end ---------------------------------------------------------------------------------------------------------


def in_each_layer():
    """A column-wise parallel layer: DTensor adds up the parts of the gradient of the features."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    scores, target = batch(6, 10)
    features, head = scores[:, :5].clone(), torch.randn(10, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole = [features.clone().requires_grad_(), head.clone().requires_grad_()]
    anyk.topk_cross_entropy(whole[0] @ whole[1].t(), target, P_K, m=5).backward()
    parts = [distribute_tensor(features, mesh, [Replicate()]), distribute_tensor(head, mesh, [Shard(0)])]
    parts = [part.requires_grad_() for part in parts]
    sharded(parts[0] @ parts[1].t(), target, P_K, m=5).backward()
    for part, expected in zip(parts, whole, strict=True):
        assert_close(part.grad.full_tensor(), expected.grad)


def test_column_wise_parallel_layer(processes):
    processes(in_each_layer)


def in_each_mesh():
    """However the examples and the classes are spread, the training is the same."""
    import importlib.util

    from torch.distributed.device_mesh import init_device_mesh

    file = Path(__file__).parents[1] / "examples" / "sharded_head.py"
    spec = importlib.util.spec_from_file_location("sharded_head", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.BATCH = 37  # not to be shared out evenly
    torch.set_default_dtype(torch.float64)
    try:
        trained = [
            example.train(init_device_mesh("cpu", shape, mesh_dim_names=("data", "classes")), steps=8)
            for shape in ((4, 1), (2, 2), (1, 4))
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    (expected, accuracy, whole, _), *others = trained
    assert expected[-1] < 0.9 * expected[0]
    for curve, other_accuracy, model, classes in others:
        assert_close(torch.tensor(curve), torch.tensor(expected))
        assert other_accuracy == accuracy
        assert_close(model.body, whole.body)
        assert_close(model.head, whole.head[classes])


def test_example_on_a_mesh_of_examples_and_classes(processes):
    processes(in_each_mesh)


def test_what_it_accepts():
    with pytest.raises(TypeError, match=r"loss: expected an anyk.TopKLoss, .*got SmoothTopKLoss"):
        parallel.Sharded(anyk.SmoothTopKLoss(3))
