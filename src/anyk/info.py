"""Versions, machine, devices, kernels and extras: `anyk info`, and the `environment.json` of a run.

It needs the core's packages alone: it is what tells which others are missing.
"""

import importlib.metadata
import os
import platform
import re
import sys
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
    return {
        "versions": versions(),
        "machine": machine(),
        "devices": devices(),
        "kernels": kernels.report(),
        "extras": {name: missing(name) for name in EXTRAS},
    }


def environment() -> dict[str, Any]:
    """What a run's result may depend on beside its config and data: the content of `environment.json`."""
    return {
        "versions": versions(),
        "machine": machine(),
        "devices": devices(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "command": list(sys.argv),
        "folder": str(Path.cwd()),
    }


def versions() -> dict[str, str | None]:
    """anyk, Python and the packages that matter; None: not installed."""
    return {"anyk": anyk.__version__, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def machine() -> dict[str, Any]:
    """System, processor and its instruction set, cores that this process may use, torch's threads, bytes of memory."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
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
        try:
            limits.append(int(Path("/sys/fs/cgroup", place).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(limits, default=None)


def devices() -> dict[str, str]:
    """What a config's ``device`` can be here, beside the CPU, with its name."""
    found = {f"cuda:{number}": torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return {**found, "mps": "Apple GPU"} if torch.backends.mps.is_available() else found


def missing(extra: str) -> list[str] | None:
    """The requirements of an extra that are not met; None: unknown, in a checkout that was never installed."""
    try:
        lines = importlib.metadata.requires("anyk") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = [line.partition(";")[0].strip() for line in lines if re.search(rf"""extra\s*==\s*["']{extra}["']""", line)]
    # An extra of an extra ("anyk[lab]") says nothing by itself.
    return [requirement for requirement in wanted if not requirement.startswith("anyk") and not _met(requirement)]


def _met(requirement: str) -> bool:
    version = _version(re.split(r"[^\w.-]", requirement)[0])
    if version is None:
        return False
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it comes with the lab; without it versions are not compared
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name; platform.processor() is empty on most Linux systems."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def describe(facts: dict[str, Any]) -> str:
    """What :func:`gather` found, in lines for people."""
    machine, used = facts["machine"], dict(facts["kernels"])
    memory = "an unknown amount" if machine["memory"] is None else f"{machine['memory'] / 2**30:.1f} GiB"
    rows = {name: version or "not installed" for name, version in facts["versions"].items()}
    rows["system"] = machine["system"]
    rows["processor"] = f"{machine['processor']}, {machine['instructions']}"
    rows["cores"] = f"{machine['cores']}, {machine['threads']} threads of torch, {memory} of memory"
    rows["devices"] = ", ".join(["cpu", *(f"{device} ({name})" for device, name in facts["devices"].items())])
    rows["backend"] = used.pop("setting")
    for name, kernel in used.items():
        rows[name] = f"used {kernel.get('variant') or ''}".rstrip() if kernel["usable"] else f"not used: {kernel['why']}"
    if "cache" in facts:
        rows["cache"] = facts["cache"]
    for name, lacking in facts["extras"].items():
        state = "unknown: anyk is not installed here" if lacking is None else "installed"
        rows[f"[{name}]"] = f'missing {", ".join(lacking)}: pip install "anyk[{name}]"' if lacking else state
    return "\n".join(f"{name:14}{text}" for name, text in rows.items())
