"""What this machine has: versions, devices, kernels, data sets, extras. For `anyk info` and the `environment.json` of a run.

It needs the core's packages and no more: it is what tells that others are missing.
"""

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import anyk
from anyk import kernels

KEY_PACKAGES = ("torch", "numpy", "matplotlib", "safetensors", "scipy")
"""their versions can change what a run computes or shows"""
USER_EXTRAS = ("lab", "embed", "onnx", "sklearn", "cluster", "tensorboard", "wandb", "mlflow")
"""the extras that are for users; the others serve the development of anyk"""


def gather(*, cache: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Everything that `anyk info` shows, as JSON values.

    Args:
        cache: the lab's cache folder; None: there is no lab, and neither ``cache`` nor ``embeddings`` among the facts.
        folder: where to look for embedding sets; None: the current folder.
    """
    places = [] if cache is None else dict.fromkeys([cache.resolve(), (folder or Path()).resolve()])
    return {
        "versions": versions(),
        "machine": machine(),
        "memory": memory(),
        "devices": devices(),
        "kernels": kernels.report(),
        "extras": extras(),
        "cache": None if cache is None else {"folder": str(cache), "contents": _contents(cache)},
        "embeddings": None if cache is None else [about for place in places for about in embedding_sets(place)],
    }


def environment() -> dict[str, Any]:
    """What a run's result may depend on beside its config and data: the content of `environment.json`."""
    return {
        "versions": versions(),
        "machine": machine(),
        "memory": memory(),
        "devices": devices(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "command": list(sys.argv),
        "folder": str(Path.cwd()),
    }


def versions() -> dict[str, str | None]:
    """anyk, Python and the packages that matter; None: not installed."""
    return {
        "anyk": anyk.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in KEY_PACKAGES},
    }


def machine() -> dict[str, Any]:
    """System, processor, and how many cores this process may use."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def memory() -> dict[str, int | None]:
    """Bytes of memory, in total and available; None where the system does not say."""
    facts = dict(_meminfo())
    total = facts.get("MemTotal")
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"total": total, "available": facts.get("MemAvailable")}


def usable_memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or what its container is limited to; None: unknown."""
    limits = [memory()["total"]]
    for place in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        try:
            limits.append(int(Path("/sys/fs/cgroup", place).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min((limit for limit in limits if limit), default=None)


def devices() -> list[dict[str, Any]]:
    """What a config's ``device`` can be here."""
    found: list[dict[str, Any]] = [{"device": "cpu", "name": _processor(), "memory": memory()["total"]}]
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            found.append({"device": f"cuda:{number}", "name": properties.name, "memory": properties.total_memory})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "memory": None})
    return found


def extras() -> dict[str, dict[str, Any]]:
    """For each extra: whether it is installed (None: unknown), what is missing, and the command that adds it."""
    wanted: dict[str, list[str]] = {name: [] for name in USER_EXTRAS}
    for text in _requirements():
        requirement, _, marker = text.partition(";")
        extra = re.search(r"""extra\s*==\s*["']([\w.-]+)""", marker)
        # An extra of an extra ("anyk[lab]") says nothing by itself.
        if extra and extra[1] in wanted and _name(requirement) != "anyk":
            wanted[extra[1]].append(requirement.strip())
    result = {}
    for name, requirements in wanted.items():
        missing = [requirement for requirement in requirements if not _fulfilled(requirement)]
        # A checkout that was never installed does not know its requirements.
        installed = not missing if requirements else None
        result[name] = {"installed": installed, "missing": missing, "command": f'pip install "anyk[{name}]"'}
    return result


def embedding_sets(folder: Path) -> Iterator[dict[str, Any]]:
    """The embedding sets in a folder and one level below it: folders with a ``dataset.json``."""
    try:
        places = [folder, *sorted(place for place in folder.iterdir() if place.is_dir())]
    except OSError:
        return
    for place in places:
        try:
            about = json.loads((place / "dataset.json").read_text(encoding="utf-8"))
            classes = about.get("classes")
            size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
        except (OSError, ValueError, AttributeError):  # not there, not readable, not JSON, or not an object
            continue
        count = len(classes) if isinstance(classes, list) else None
        yield {"folder": str(place), "name": str(about.get("name", place.name)), "classes": count, "bytes": size}


def _contents(folder: Path) -> list[dict[str, Any]]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [{"name": entry.name, "bytes": _size(entry)} for entry in entries if not entry.name.startswith(".")]


def _size(entry: Path) -> int:
    files = entry.rglob("*") if entry.is_dir() else [entry]
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # another process has just removed it
            continue
    return total


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("anyk") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _name(requirement: str) -> str:
    found = re.match(r"\s*([\w.-]+)", requirement)
    return found[1] if found else ""


def _fulfilled(requirement: str) -> bool:
    version = _version(_name(requirement))
    if version is None:
        return False
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it comes with the lab; without it versions are not compared
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _processor() -> str:
    """The processor's name; platform.processor() is empty on most Linux systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip().lower() in ("model name", "hardware", "cpu model"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _meminfo() -> Iterator[tuple[str, int]]:
    """The entries of Linux's /proc/meminfo in bytes; none elsewhere."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            yield key, int(words[0]) * 1024


def _kernel_state(kernel: dict[str, Any]) -> str:
    if not kernel["usable"]:
        return f"not used: {kernel['why']}"
    return f"used: {kernel['variant']}" if kernel.get("variant") else "used"


def describe(facts: dict[str, Any]) -> str:
    """What :func:`gather` found, in lines for people."""

    def size(count: int | None) -> str:
        return "unknown" if count is None else f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

    machine, memory = facts["machine"], facts["memory"]
    lines = ["versions"]
    lines += [f"  {name:12} {version or 'not installed'}" for name, version in facts["versions"].items()]
    lines += ["machine", f"  {machine['system']}", f"  {machine['usable_cores']} cores, {size(memory['total'])} of memory"]
    lines += ["devices"]
    lines += [f"  {device['device']:12} {device['name']}, {size(device['memory'])}" for device in facts["devices"]]
    lines += ["kernels", f"  {'setting':12} {facts['kernels']['setting']}"]
    for name, kernel in facts["kernels"].items():
        if name != "setting":
            lines.append(f"  {name:12} {_kernel_state(kernel)}")
    lines += ["extras"]
    for name, extra in facts["extras"].items():
        missing = f"missing {', '.join(extra['missing'])}: {extra['command']}"
        state = {True: "installed", False: missing, None: "unknown: anyk is not installed here"}[extra["installed"]]
        lines.append(f"  {name:12} {state}")
    if facts["cache"] is None:
        return "\n".join(lines)
    lines += [f"cache {facts['cache']['folder']}"]
    lines += [f"  {entry['name']}, {size(entry['bytes'])}" for entry in facts["cache"]["contents"]] or ["  empty"]
    lines += ["embedding sets here and in the cache"]
    lines += ["  none"] * (not facts["embeddings"])
    for found in facts["embeddings"]:
        lines.append(f"  {found['folder']}: {found['name']}, {found['classes']} classes, {size(found['bytes'])}")
    return "\n".join(lines)
