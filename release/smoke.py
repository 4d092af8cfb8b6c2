"""What every installation must do: import, one step of both families, `anyk info`. It needs the core's packages and no more.

python release/smoke.py native|plain    with the native library, or without one: then the plain code
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import anyk

wanted = sys.argv[1]
assert wanted in ("native", "plain"), wanted
assert not Path(anyk.__file__).is_relative_to(Path(__file__).resolve().parent.parent / "src"), "not installed"

torch.manual_seed(0)
scores, target = torch.randn(32, 1000), torch.randint(1000, (32,))
for criterion in (anyk.TopKCrossEntropyLoss({1: 0.5, 5: 0.5}), anyk.TopKErrorLoss({1: 0.5, 5: 0.5})):
    losses, gradients = [], []
    for setting in ("auto", "torch"):
        leaf = scores.clone().requires_grad_()
        with anyk.backend(setting):
            loss = criterion(leaf, target)
            loss.backward()
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    assert gradients[0].isfinite().all()
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)

command = next(Path(sysconfig.get_path("scripts")).glob("anyk*"))
facts = json.loads(subprocess.run([command, "info", "--json"], check=True, capture_output=True, text=True).stdout)
assert facts["versions"]["anyk"] == anyk.__version__
native = facts["kernels"]["native"]
assert native["usable"] is (wanted == "native"), native
print(f"anyk {anyk.__version__}, torch {torch.__version__}, {native.get('variant') or 'plain code'}")
