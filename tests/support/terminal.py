"""The console of the command line as in a terminal, where it draws progress bars."""

from __future__ import annotations

import pytest

from clearhead.cli.output import console


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the console write to standard output as to an interactive terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(console, "is_interactive", True)
