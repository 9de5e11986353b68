"""Fixture that runs `clearhead cost` in process."""

from __future__ import annotations

import sys

import pytest

from clearhead.cli.app import run as run_command


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command and returns exit status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "cost", *arguments])
        with pytest.raises(SystemExit) as ending:
            run_command()
        captured = capsys.readouterr()
        return int(ending.value.code or 0), captured.out, captured.err

    return call
