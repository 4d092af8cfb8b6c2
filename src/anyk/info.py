"""Versions, machine, devices, kernels and extras: `anyk info`, and the `environment.json` of a run.

It needs the core's packages alone: it is what tells which others are missing.
"""

import importlib.metadata
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import anyk
from anyk import kernels

#: their versions can change what a run computes or shows
PACKAGES = ("torch", "numpy", "matplotlib", "safetensors", "scipy")
#: the extras for users; the others serve the development of anyk
EXTRAS = ("lab", "embed", "hf", "onnx", "sklearn", "cluster", "tensorboard", "wandb", "mlflow")


def gather() -> dict[str, Any]:
    """What a bug report needs, as JSON values."""
    extras = {name: missing(name) for name in EXTRAS}
    return {
        "versions": versions(), "machine": machine(), "devices": devices(), "kernels": kernels.report(), "extras": extras,
    }  # fmt: skip


def environment() -> dict[str, Any]:
    """What a run's result may depend on beside its config and data: the content of `environment.json`."""
    more = {"deterministic": torch.are_deterministic_algorithms_enabled(), "command": [*sys.argv], "folder": str(Path.cwd())}
    return {"versions": versions(), "machine": machine(), "devices": devices(), **more}


def versions() -> dict[str, str | None]:
    """anyk, Python and the packages that matter; None: not installed."""
    return {"anyk": anyk.__version__, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def machine() -> dict[str, Any]:
    """System, processor and its instruction set, cores that this process may use, torch's threads, bytes of memory."""
    name = None
    with suppress(OSError):  # platform.processor() is empty on most Linux systems
        name = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    return {
        "system": platform.platform(),
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": usable_memory(),
    }


def usable_memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or what its container is limited to; None: unknown."""
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for place in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path("/sys/fs/cgroup", place).read_text()))
    return min(limits, default=None)


def devices() -> dict[str, str]:
    """The CUDA devices, which the plain code uses, with their names."""
    return {f"cuda:{number}": torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}


def missing(extra: str) -> list[str] | None:
    """The requirements of an extra that are not installed; None: unknown, in a checkout that was never installed."""
    try:
        lines = importlib.metadata.requires("anyk") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = [line.partition(";")[0].strip() for line in lines if re.search(rf"""extra\s*==\s*["']{extra}["']""", line)]
    # An extra of an extra ("anyk[lab]") says nothing by itself.
    names = {requirement: re.split(r"[^\w.-]", requirement)[0] for requirement in wanted if not requirement.startswith("anyk")}
    return [requirement for requirement, name in names.items() if _version(name) is None]


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def describe(facts: dict[str, Any]) -> str:
    """What :func:`gather` found, in lines for people."""
    machine, native = facts["machine"], facts["kernels"]["native"]
    memory = "an unknown amount" if machine["memory"] is None else f"{machine['memory'] / 2**30:.1f} GiB"
    rows = {name: version or "not installed" for name, version in facts["versions"].items()}
    rows["system"] = machine["system"]
    rows["processor"] = f"{machine['processor']}, {machine['instructions']}"
    rows["cores"] = f"{machine['cores']}, {machine['threads']} threads of torch, {memory} of memory"
    rows["devices"] = ", ".join(["cpu", *(f"{device} ({name})" for device, name in facts["devices"].items())])
    rows["backend"] = facts["kernels"]["setting"]
    rows["native"] = f"used {native['variant'] or ''}".rstrip() if native["usable"] else f"not used: {native['why']}"
    if "cache" in facts:
        rows["cache"] = facts["cache"]
    for name, lacking in facts["extras"].items():
        state = "unknown: anyk is not installed here" if lacking is None else "installed"
        rows[f"[{name}]"] = f'missing {", ".join(lacking)}: pip install "anyk[{name}]"' if lacking else state
    return "\n".join(f"{name:14}{text}" for name, text in rows.items())
