"""torch.compile: one graph for a call, and few graphs however often the sizes change."""

import pytest
import torch

import anyk

CALLS = {
    "mask of lapsum": lambda s, k: anyk.soft_topk(s, k),
    "mask of sinkhorn": lambda s, k: anyk.soft_topk(s, k, "sinkhorn"),
    "mask of permutahedron": lambda s, k: anyk.soft_topk(s, k, "permutahedron"),
    "mask of ksubset": lambda s, k: anyk.soft_topk(s, k, "ksubset"),
    "hard mask": lambda s, k: anyk.soft_topk(s, k, hard=True),
    "mask, where": lambda s, k: anyk.soft_topk(s, k, where=s > -1),
    "mask, k of rows": lambda s, k: anyk.soft_topk(s, torch.full(s.shape[:1], 2.5)),
    "mask, temperature of rows": lambda s, k: anyk.soft_topk(s, k, temperature=torch.full(s.shape[:1], 0.5)),
    "ranks of lapsum": lambda s, k: anyk.soft_rank(s),
    "sort of lapsum": lambda s, k: anyk.soft_sort(s),
    "quantile": lambda s, k: anyk.soft_quantile(s, 0.3),
    "selection": lambda s, k: anyk.select_topk(s[..., None] * torch.ones(3), s, k)[0],
    "selection by the mask": lambda s, k: anyk.select_topk(s[..., None] * torch.ones(3), s, k, backward="mask")[0],
    "samples": lambda s, k: anyk.sample_k_subset(s, k).sum(-1),
    "loss": lambda s, k: anyk.topk_error(s, s.argmin(-1), {1: 0.5, 5: 0.5}, m=12),
}
#: any ten values of what changes
SIZES = {"batch": lambda i: (2 + 3 * i, 3, 40), "k": lambda i: (5, 2 + 3 * i, 40), "n": lambda i: (5, 3, 17 + 23 * i)}
slow = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script", "ignore:.torch._prims_common.check")  # torch's own
FEW = ["mask of lapsum", "ranks of lapsum", "selection"]


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=slow) for name in CALLS])
@pytest.mark.parametrize("what", SIZES)
def test_ten_values_of_a_size_make_few_graphs(name, what):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, backend=backend)
    for i in range(10):
        batch, k, n = SIZES[what](i)
        scores = torch.randn(batch, n, generator=torch.Generator().manual_seed(i), requires_grad=True)
        torch.testing.assert_close(compiled(scores, k), CALLS[name](scores, k), rtol=1e-4, atol=1e-5)
    assert len(graphs) <= 3


@slow
@pytest.mark.parametrize(
    ("name", "most"), [("mask of lapsum", 15), ("ranks of lapsum", 40), ("sort of lapsum", 45)], ids=["mask", "ranks", "sort"]
)
def test_compiled_kernels_of_the_plain_code(name, most):
    metrics = pytest.importorskip("torch._inductor.metrics")
    scores = torch.randn(64, 1000, requires_grad=True)
    with anyk.backend("torch"):
        torch._dynamo.reset()
        metrics.reset()
        torch.compile(lambda s: (CALLS[name](s, 32) * 2).sum(), fullgraph=True)(scores).backward()
    assert metrics.generated_kernel_count <= most


@slow
@pytest.mark.parametrize("name", ["mask of lapsum", "sort of lapsum", "mask, k of rows"])
def test_compiled_values_and_gradients_of_other_layouts(name):
    """By inductor, with dynamic sizes, of transposed scores."""
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True)
    for shape in ((40, 6), (33, 9)):
        scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).t().requires_grad_()
        actual, expected = compiled(scores, 4), CALLS[name](scores, 4)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        weight = torch.linspace(-1, 1, actual.numel()).reshape(actual.shape)
        gradients = [torch.autograd.grad((each * weight).sum(), scores)[0] for each in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
