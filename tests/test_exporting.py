"""Exported models: torch.export with symbolic sizes, and the same numbers in ONNX Runtime."""

import io
import itertools

import pytest
import torch
from torch.export import Dim

import anyk

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the exporter and its packages


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, scores):
        return self.function(scores)


def exported(function, scores, dynamic):
    shapes = {"scores": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if dynamic else {}}
    program = torch.export.export(Model(function), (scores,), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.onnx.export(program, dynamo=True, verbose=False, input_names=["scores"]).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    return program.module(), lambda scores: torch.from_numpy(session.run(None, {"scores": scores.numpy()})[0])


def scores_of(*shape):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


# k follows from n, which is symbolic
DYNAMIC = {
    "mask of lapsum": lambda s: anyk.soft_topk(s, s.shape[-1] // 4, temperature=0.5),
    "mask of sinkhorn": lambda s: anyk.soft_topk(s, s.shape[-1] // 4, "sinkhorn"),
    "hard mask": lambda s: anyk.soft_topk(s, s.shape[-1] // 4, hard=True),
    "ranks of lapsum": lambda s: anyk.soft_rank(s, temperature=0.5),
    "sort of lapsum": lambda s: anyk.soft_sort(s, temperature=0.5),
    "select_topk": lambda s: anyk.select_topk(s[..., None] * torch.arange(3.0), s, s.shape[-1] // 4)[0],
}
STATIC = {
    "mask of permutahedron": lambda s: anyk.soft_topk(s, 3, "permutahedron"),
    "mask of ksubset": lambda s: anyk.soft_topk(s, 3, "ksubset"),
    "mask of a network": lambda s: anyk.soft_topk(s, 3, "splitter"),
    "ranks of permutahedron": lambda s: anyk.soft_rank(s, "permutahedron"),
    "sort of permutahedron": lambda s: anyk.soft_sort(s, "permutahedron"),
    "quantile": lambda s: anyk.soft_quantile(s, 0.3),
    "P of softsort": lambda s: anyk.SoftSort()(s, 3),
    "P of neuralsort": lambda s: anyk.NeuralSort()(s, 3),
    "P of a network": lambda s: anyk.SortingNetwork("bitonic")(s, 3),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_with_symbolic_sizes(name):
    program, session = exported(DYNAMIC[name], scores_of(4, 32), dynamic=True)
    for batch, n in itertools.product((1, 5), (8, 32, 41)):
        scores = scores_of(batch, n)
        expected = DYNAMIC[name](scores)
        torch.testing.assert_close(program(scores), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(session(scores), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STATIC)
def test_with_the_sizes_of_the_example(name):
    scores = scores_of(4, 16)
    program, session = exported(STATIC[name], scores, dynamic=False)
    expected = STATIC[name](scores)
    torch.testing.assert_close(program(scores), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(session(scores), expected, rtol=1e-4, atol=1e-5)
