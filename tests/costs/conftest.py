"""The command, run as a person would."""

from __future__ import annotations

import sys

import pytest

from clearhead.cli.app import run as run_command


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: exit status, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "cost", *arguments])
        with pytest.raises(SystemExit) as ending:
            run_command()
        shown = capsys.readouterr()
        return int(ending.value.code or 0), shown.out, shown.err

    return call
