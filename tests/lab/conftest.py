"""What tests of several commands share."""

import sys

import pytest

from anyk.lab import cli


@pytest.fixture
def anyk(capsys, monkeypatch, tmp_path):
    """The command, in a folder of its own: its exit code and what it said on standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anyk", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run
