"""The cache on the disk: prepared data sets, each in one safetensors file, and small results as JSON."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pooch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anyk.lab import files
from anyk.lab.data.sets import Dataset, Split
from anyk.lab.data.tokens import SequenceSplit
from anyk.lab.errors import LabError
from anyk.lab.warn_once import warn_once

#: fields of a Dataset that are stored with it without being a part of its content and its digest
_REMARKS = ("unreadable", "reasons", "remarks")


def cache_folder() -> Path:
    """Where downloads and prepared data are kept: $ANYK_CACHE, or the system's folder for caches."""
    chosen = os.environ.get("ANYK_CACHE")
    return Path(chosen).expanduser() if chosen else Path(pooch.os_cache("anyk"))


def remember(name: str, build: Callable[[], Dataset]) -> Dataset:
    """The prepared data set of this name; ``build`` makes it where there is none, or a damaged one.

    The name has to change with everything that the data depend on. Processes may build at the same time: each writes the
    whole file and the last one wins. A cache that cannot be written is reported and otherwise ignored. The data set's
    fingerprint is the digest of its content.
    """
    path = cache_folder() / f"{name}.safetensors"
    if path.exists():
        try:
            return read(path)
        except Exception as error:  # a damaged file makes the parsers raise anything
            warn_once(f"{path} is damaged ({error}); preparing the data again.")
    dataset = build()
    dataset = dataclasses.replace(dataset, fingerprint=fingerprint(dataset))
    try:
        write(path, dataset)
    except (OSError, SafetensorError, LabError) as error:
        # Not the whole error, which names a temporary file: a note is told once, if its text does not change.
        reason = getattr(error, "strerror", None) or error
        warn_once(f"The prepared data could not be kept in {path.parent} for the next run: {reason}")
    return dataset


def remember_object(kind: str, key: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A JSON object that follows from ``key``, a JSON value; from the cache where it was computed before.

    Args:
        kind: the folder in the cache.
        key: everything that the object depends on.
        compute: makes it.
    """
    text = json.dumps(key)
    path = cache_folder() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, LabError):
        known = files.parsed(path.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.pop("key", None) == text:
            return known
    found = compute()
    with contextlib.suppress(OSError, LabError):  # without a cache the next run only takes longer to start
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_object(path, {"key": text, **found})
    return found


def write(path: Path, dataset: Dataset) -> None:
    """Write a data set with its fingerprint into one file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remarks = {name: json.dumps(value) for name in _REMARKS if (value := getattr(dataset, name))}
    with files.replacing(path) as temporary:
        facts = json.dumps([_facts(dataset), dataset.fingerprint])
        save_file(_tensors(dataset), temporary, {"dataset": facts, **remarks})


def fingerprint(dataset: Dataset) -> str:
    """The digest of a data set's content."""
    return _digest(_tensors(dataset), _facts(dataset))


def _facts(dataset: Dataset) -> dict[str, Any]:
    facts = {field: getattr(dataset, field) for field in ("name", "kind", "classes", "mean", "std")}
    return facts | ({"tokens": dataset.tokens} if dataset.tokens else {})


def _tensors(dataset: Dataset) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {"validation": dataset.validation}
    for name, examples in dataset.splits.items():
        stored = examples.parts[0] if len(examples.parts) == 1 else torch.cat(examples.parts)
        if isinstance(examples, SequenceSplit):
            tensors |= {"stream": stored, "begins": examples.begins, name: examples.places}
        else:
            tensors |= {name: stored}
        tensors |= {f"{name}_labels": examples.labels, f"{name}_groups": examples.groups}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def key_of(sources: Iterable[Path], *settings: object) -> str:
    """A short text that changes with the names, sizes and times of the files, and with the settings."""
    digest = hashlib.sha256(repr(settings).encode())
    for path in sources:
        facts = path.stat()
        digest.update(repr((str(path.absolute()), facts.st_size, facts.st_mtime_ns)).encode())
    return digest.hexdigest()[:16]


def read(path: Path) -> Dataset:
    """What :func:`write` wrote; raises whatever a damaged file makes the parsers raise, or a ValueError."""
    with safe_open(path, "pt") as file:
        facts, noted = json.loads(file.metadata()["dataset"])
        remarks: dict[str, Any] = {name: tuple(json.loads(file.metadata().get(name, "[]"))) for name in _REMARKS}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    if _digest(tensors, facts) != noted:
        raise ValueError("its checksum is wrong")
    splits: dict[str, Split] = {}
    for name in ("train", "test"):
        if name in tensors:
            labels, groups = tensors[f"{name}_labels"], tensors.get(f"{name}_groups")
            if "stream" in tensors:
                padding = len(facts["classes"]) + 1
                stream = (tensors["stream"],)
                splits[name] = SequenceSplit(stream, labels, (), groups, tensors[name], tensors["begins"], padding)
            else:
                splits[name] = Split((tensors[name],), labels, groups=groups)
    return Dataset(
        name=facts["name"],
        kind=facts["kind"],
        classes=tuple(facts["classes"]),
        train=splits["train"],
        test=splits.get("test"),
        fingerprint=noted,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        validation=tensors.get("validation"),
        tokens=facts.get("tokens", ""),
        **remarks,
    )


def _digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()
