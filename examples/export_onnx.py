"""A trained head with its k best classes as output: torch.export, ONNX, and the same answers from onnxruntime.

pip install anyk onnx onnxscript onnxruntime
python examples/export_onnx.py [FILE]
"""

import sys
import tempfile
from pathlib import Path

import torch

try:
    import onnx  # noqa: F401  the exporter needs it
    import onnxruntime
    import onnxscript  # noqa: F401  and this
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install onnx onnxscript onnxruntime") from None

import anyk

CLASSES, WIDTH, K = 100, 32, 5


class FirstGuesses(torch.nn.Module):
    """Probabilities and numbers of the k best classes, best first."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(self.head(features).softmax(-1), K)


def main(file: Path) -> None:
    torch.manual_seed(0)
    centres = torch.randn(CLASSES, WIDTH)
    head = anyk.LinearHead(WIDTH, CLASSES, anyk.TopKCrossEntropyLoss([0.5, 0, 0, 0, 0.5], m=16))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(200):
        y = torch.randint(CLASSES, (200,))
        optimizer.zero_grad()
        head(centres[y] + torch.randn(200, WIDTH), y).backward()
        optimizer.step()

    y = torch.randint(CLASSES, (64,))
    x = centres[y] + torch.randn(64, WIDTH)
    model = FirstGuesses(head.as_linear()).eval()
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    names = {"input_names": ["features"], "output_names": ["p", "classes"]}
    torch.onnx.export(program, f=file, dynamo=True, external_data=False, verbose=False, **names)
    print(f"{file.name}: {file.stat().st_size} bytes")

    p, classes = model(x)
    exported_p, exported_classes = program.module()(x)
    print(f"torch.export: same classes {torch.equal(classes, exported_classes)}, p to {(p - exported_p).abs().max():.0e}")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    onnx_p, onnx_classes = map(torch.from_numpy, session.run(None, {"features": x.numpy()}))
    print(f"onnxruntime: same classes {torch.equal(classes, onnx_classes)}, p to {(p - onnx_p).abs().max():.0e}")
    print(f"top-{K} of {len(y)} new examples: {(onnx_classes == y[:, None]).any(1).float().mean():.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "head.onnx")
