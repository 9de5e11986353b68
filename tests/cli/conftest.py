"""The command line, run inside the test's own process (importing torch once), with what it prints and its
exit status."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest

from clearhead.cli import main


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def cli(monkeypatch, capsys):
    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["clearhead", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run
