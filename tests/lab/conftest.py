"""What tests of several commands share."""

import itertools
import sys
from pathlib import Path

import pytest

from anyk.lab import cli
from anyk.lab.run import training
from anyk.lab.run.config import Config


@pytest.fixture
def anyk(capsys, monkeypatch, tmp_path):
    """The command, in a folder of its own: its exit code and what it said on standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anyk", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def train_in_parts():
    """Train a config to its end, stopped at every third step and begun again; how often it was stopped."""

    def train(config: Config, folder: Path) -> int:
        asked = itertools.count(1)
        for stops in itertools.count():
            try:
                training.train(config, folder, should_stop=lambda: next(asked) % 4 == 0)
                return stops
            except training.Stopped:
                pass

    return train
