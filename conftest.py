"""The examples in the docstrings may use torch and anyk without importing them."""

import pytest
import torch

import anyk


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch
    doctest_namespace["anyk"] = anyk
