"""No change of the code changes a number, unless the file that records them was written again on purpose."""

import json

import pytest
import torch

import recorded

KNOWN = json.loads(recorded.FILE.read_text())


@pytest.fixture(scope="module")
def measured():
    return recorded.measured()


def test_nothing_is_left_out(measured):
    assert measured.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_recorded(name, measured):
    actual, expected = (torch.tensor(rows, dtype=torch.float64) for rows in (measured[name][1:], KNOWN[name][1:]))
    torch.testing.assert_close(measured[name][0], KNOWN[name][0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
