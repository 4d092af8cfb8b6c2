"""What tests of the lab share: the command, small data with a known answer, and a run that is stopped again and again."""

import itertools
import sys
from pathlib import Path

import pytest
from lab_data import blobs

import anyk_cli
from anyk.lab import train
from anyk.lab.config import DataFields
from anyk.lab.data.prepare import prepare
from anyk.lab.errors import Stopped


@pytest.fixture
def anyk(capsys, monkeypatch, tmp_path):
    """The command, in a folder of its own: its exit code and what it said on standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anyk", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            anyk_cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def points():
    """Features and labels."""
    return blobs()


@pytest.fixture
def prepared(points, tmp_path):
    """The same, prepared."""
    return prepare(points, DataFields(), tmp_path / "prepared")


@pytest.fixture
def train_in_parts():
    """Train a config to its end, stopped at every third step and begun again; how often it was stopped."""

    def run(config, data, folder: Path) -> int:
        asked = itertools.count(1)
        for stops in itertools.count():
            try:
                train.train(config, data, folder, should_stop=lambda: next(asked) % 4 == 0)
                return stops
            except Stopped:
                pass

    return run
