"""Docstrings may use torch and anyk without importing them; interrupts work however the tests were started."""

import importlib.util
import signal

import pytest
import torch

import anyk


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch
    doctest_namespace["anyk"] = anyk


# Importing it imports triton, which only the tests want.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/anyk/kernels/triton_kernels.py"]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts background jobs so, and they hand it on: the commands that the tests interrupt would not notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)
