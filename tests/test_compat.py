"""What is not public in torch: in one file, all of it listed here, and each does what it is there for."""

import ast
import pathlib
import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import anyk
from anyk import _compat

SOURCE = pathlib.Path(anyk.__file__).parent
PRIVATE = re.compile(r"\btorch(\.\w+)*\._[a-z]\w*|\bforward_ad\._")


def test_what_is_private_in_torch_is_listed_here():
    """Dotted names with a private part, the class's own aside."""
    tree = ast.parse((SOURCE / "_compat.py").read_text())
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = {name for name in names if re.fullmatch(r"(torch|function)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name)}
    assert private - {"torch._C", "torch._C._functorch"} == {
        "function._dynamo_marked_constant",
        "torch._C._functorch.is_legacy_batchedtensor",
        "torch._C._functorch.maybe_current_level",
        "torch._C._len_torch_dispatch_stack",
        "torch.autograd.forward_ad._current_level",
    }


def test_it_is_reached_in_one_place():
    allowed = {"_compat.py"}
    found = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        for line in file.read_text().splitlines()
        if PRIVATE.search(line) and not re.search(r"""["']torch\.[\w.]*["']""", line)  # names in pickles, and of modules
    }
    assert found == allowed


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
def test_eager():
    seen = []

    def look(x):
        seen.append(_compat.is_eager(x))
        return x.sum()

    x = torch.ones(2, 3, requires_grad=True)
    look(x)
    look(torch.nn.Parameter(torch.ones(3)))
    with torch.no_grad():
        look(x)
    assert seen == [True] * 3
    seen.clear()
    torch.func.vmap(look)(x)
    torch.func.grad(look)(torch.ones(3))
    torch.func.jvp(look, (torch.ones(3),), (torch.ones(3),))
    with torch.autograd.forward_ad.dual_level():
        look(torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3)))
    make_fx(look, tracing_mode="fake")(torch.ones(3))
    torch.compile(look, backend="eager")(torch.ones(3))
    assert not any(seen)
    assert len(seen) >= 5


def test_the_backward_of_a_batch_of_gradients_is_not_eager():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(_compat.is_eager(grad))
            return grad

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Look.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [False]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")  # torch's own
def test_recorded():
    seen = []

    def look(x):
        seen.append(_compat.is_recorded())
        return x * 2

    look(torch.ones(3))
    assert seen == [False]
    torch.jit.trace(look, torch.ones(3), check_trace=False)
    make_fx(look)(torch.ones(3))
    assert seen[1:] == [True] * 2
