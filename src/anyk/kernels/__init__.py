"""Faster ways to compute a loss than the plain code, where there are any."""

from pathlib import Path
from typing import Any


def report() -> dict[str, Any]:
    """Which kernels can be used here, and why the others cannot."""
    there = Path(__file__).with_name("_native.so").exists()
    why = "" if there else "no compiler when anyk was installed"
    return {"setting": "auto", "native": {"usable": there, "why": why}}
