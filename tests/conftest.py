"""The helpers beside this file (made.py, lab_data.py, …) can be imported by tests in any folder below."""

import sys
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# The same examples in every run; `pytest --hypothesis-profile=default` draws others.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded():
    """What a test draws does not depend on the tests before it, which differ from run to run with several workers."""
    torch.manual_seed(0)


@pytest.fixture(params=["torch", "native"])
def backend(request):
    """Runs a test twice: by the plain code alone, and with the native kernels."""
    import anyk
    from anyk.kernels import native

    if request.param == "native" and native.status():
        pytest.skip(f"the native library: {native.status()}")
    with anyk.backend(request.param):
        yield request.param


@pytest.fixture(scope="session")
def tab(tmp_path_factory):
    """A tab of a real browser; browser.py says what it can do."""
    import browser

    if browser.find() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with browser.opened(tmp_path_factory.mktemp("profile")) as tab:
        yield tab
