"""Compiles the triton kernels for GPUs that are not here: registers, spills and shared memory.

    python benchmarks/triton_compile.py [--quick] [--out benchmarks/triton.md]

For compute capability 8.0 and 9.0, with the assembler that comes with triton. Nothing is run, so nothing is timed.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from measuring import markdown_table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import anyk
from anyk.kernels import triton as host
from anyk.kernels import triton_kernels as kernels
from anyk.kernels.abi import Operator
from anyk.kernels.loss_description import Description
from anyk.losses import CrossEntropySpec, ErrorSpec
from anyk.registry import SWAPS

CAPABILITIES = (80, 90)
CLASSES, CANDIDATES, P_K = 1000, 16, [0.5, 0, 0, 0, 0.5]
POINTERS = {"target": "*i64", "classes": "*i64", "leaders": "*i64"} | dict.fromkeys(
    ("table", "starts", "outputs", "ranks"), "*i32"
)
FLOATS = ("scale", "ce_weight", "rest", "q", "smoothing")
FLOAT_POINTERS = (
    *("scores", "p_k", "class_weight", "sums", "scratch", "losses", "gradients", "coefficients"),
    *("incoming", "divisor", "result"),
)


@dataclass(frozen=True)
class Job:
    """A kernel and what it is compiled for."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    absent: tuple[str, ...] = ()
    """the pointers that such a call does not have"""

    def source(self) -> ASTSource:
        constants = self.constants | dict.fromkeys(self.absent) | {"stride_class": 1}
        signature = {}
        for argument in self.kernel.arg_names:
            if argument in constants:
                signature[argument] = "constexpr"
            elif argument in POINTERS:
                signature[argument] = POINTERS[argument]
            elif argument == "scratch" and constants["WIDE"]:
                signature[argument] = "*fp64"
            elif argument in FLOAT_POINTERS:
                signature[argument] = "*fp32"
            else:
                signature[argument] = "fp32" if argument in FLOATS else "i32"
        aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")}
        return ASTSource(self.kernel, signature, constants, aligned)


def candidates(name: str, spec: Any, m: int = CANDIDATES, n: int = CLASSES, gradient: bool = True) -> Job:
    description = spec.describe(n, len(P_K), m)
    assert isinstance(description, Description), description
    constants = host.candidate_constants(description, "all", False, gradient)
    warps = constants.pop("num_warps")
    absent = {"class_weight", "classes" if constants["AS_GIVEN"] else "leaders"}
    if constants["OPERATOR"] != Operator.NETWORK:
        absent |= {"table", "starts", "outputs", "ranks"}
    if constants["SOFTMAX"] != 1:
        absent |= {"sums", "coefficients"}
    if not gradient:
        absent |= {"gradients", "coefficients"}
    return Job(f"candidates_kernel, {name}, m = {m}{'' if gradient else ', no gradient'}", kernels.candidates_kernel, constants,
               warps, tuple(absent))  # fmt: skip


def loss(operator: anyk.Operator, top1: Any = "separate") -> Any:
    return CrossEntropySpec.of(P_K, operator, None, top1, "all")


def jobs(quick: bool) -> list[Job]:
    softmax = [
        Job(f"softmax_kernel{name}", kernels.softmax_kernel, {"SMOOTHED": smoothed, "BLOCK": 1024}, 4)
        for name, smoothed in (("", False), (", smoothed", True))
    ]
    fixed = {"AS_GIVEN": False, "MEAN": True, "BLOCK": 1024}
    gradient = [
        Job(
            f"gradient_kernel, {name}", kernels.gradient_kernel, fixed | {"USES_SOFTMAX": uses, "SMOOTHED": smoothed}, 4, absent
        )
        for name, uses, smoothed, absent in (
            ("softmax", True, False, ()),
            ("softmax smoothed", True, True, ()),
            ("candidates alone", False, False, ("sums", "coefficients")),
        )
    ]
    network = candidates("splitter, logistic", loss(anyk.SortingNetwork()))
    if quick:
        return [softmax[0], network, gradient[0]]
    operators = {"LapSum": anyk.LapSum, "KSubset": anyk.KSubset, "SoftSort": anyk.SoftSort, "NeuralSort": anyk.NeuralSort}
    large = {"splitter, logistic": anyk.SortingNetwork, **operators}
    return [
        *softmax,
        network,
        *(candidates(f"splitter, {swap}", loss(anyk.SortingNetwork(swap=swap))) for swap in SWAPS if swap != "logistic"),
        *(candidates(f"bitonic, {wires}", loss(anyk.SortingNetwork("bitonic", wires=wires))) for wires in ("sorted", "given")),
        candidates("odd_even", loss(anyk.SortingNetwork("odd_even"))),
        candidates("splitter, given, all classes", loss(anyk.SortingNetwork(wires="given")), n=CANDIDATES),
        *(candidates(name, loss(operator())) for name, operator in operators.items()),
        candidates("KSubset, error", ErrorSpec.of(P_K, anyk.KSubset(), None, 0.2, 0.7)),
        candidates("splitter, mixed", loss(anyk.SortingNetwork(), "mixed")),
        candidates("splitter, operator", loss(anyk.SortingNetwork(), "operator")),
        candidates("splitter, logistic", loss(anyk.SortingNetwork()), gradient=False),
        *(candidates(name, loss(operator()), m=m) for m in (64, 1000) for name, operator in large.items()),
        *gradient,
    ]


def compiled(job: Job, capability: int) -> list[str]:
    """Registers, bytes of spills (stored, loaded), bytes of shared memory."""
    result = triton.compile(
        job.source(), target=GPUTarget("cuda", capability, 32), options={"num_warps": job.warps, **host.COMPILE_OPTIONS}
    )
    assert result.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(result.asm["ptx"])
        report = assembled(path, capability)
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if registers is None or spills is None:
        raise RuntimeError(report)
    return [registers[1], f"{spills[1]} / {spills[2]}", str(result.metadata.shared)]


def assembled(path: Path, capability: int) -> str:
    """What the assembler says. Triton brings two, and writes what the one understands that it takes for a capability."""
    reports = []
    for tool in ("ptxas", "ptxas-blackwell"):
        command = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        if command.exists():
            arguments = [str(command), "-v", f"--gpu-name=sm_{capability}{'a' if capability == 90 else ''}", str(path)]
            result = subprocess.run([*arguments, "-o", "/dev/null"], capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stderr
            reports.append(result.stderr)
    raise RuntimeError("\n".join(reports) or "triton has no assembler")


def page(quick: bool) -> str:
    table = [["kernel", "warps", *(f"{what}, {c / 10}" for c in CAPABILITIES for what in ("registers", "spills", "shared"))]]
    for job in jobs(quick):
        print(job.name)
        table.append([job.name, str(job.warps), *(cell for capability in CAPABILITIES for cell in compiled(job, capability))])
    return f"""# The triton kernels, without a GPU

**They were never timed, and never ran on a GPU: there was none.** Their numbers were compared with the plain code under
triton's interpreter (`tests/kernels/triton_interpreted.py`); this is what the compiler says of them.

`python benchmarks/triton_compile.py`, triton {triton.__version__}, its own ptxas, compute capability 8.0 and 9.0; float32
scores, P_K over k = {len(P_K)}, {CLASSES} classes, the default cross-entropy unless told otherwise. Spills are bytes stored /
loaded for each thread, shared memory is bytes for each block. Scores lie row by row; a call whose n is a multiple of 16 is
compiled once more, with wider loads.

{markdown_table(table[0], table[1:])}

## Launches

A step with its gradient is six calls: `torch.topk`, `softmax_kernel` (if the loss has a softmax over all classes),
`candidates_kernel`, a sum and a division for the mean; in the backward pass `gradient_kernel`. Each of torch's may be more than
one launch. A batch whose scratch passes {host.MOST_SCRATCH // 2**20} MiB takes `candidates_kernel` in parts.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one of each kernel")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "triton.md")
    arguments = parser.parse_args()
    arguments.out.write_text(page(arguments.quick))


if __name__ == "__main__":
    main()
