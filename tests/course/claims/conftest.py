"""One run of all claims (about 15 seconds), shared by the tests, and the work of each claim."""

from __future__ import annotations

import sys

import pytest

from clearhead.cli.app import app
from clearhead.cli.app import run as run_command
from clearhead.course.claims import claims
from clearhead.course.claims import run as run_claims
from tests.support.work_counters import Effort


@pytest.fixture(scope="session")
def measured():
    results = {}
    for name in claims():
        with Effort() as work:
            (outcome,) = run_claims([name], seed=0)
        results[name] = outcome, work
    return results


@pytest.fixture(scope="session")
def outcomes(measured):
    return {name: outcome for name, (outcome, _) in measured.items()}


@pytest.fixture(scope="session")
def effort(measured):
    return {name: work for name, (_, work) in measured.items()}


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command in this process: exit status, standard output, standard error."""

    # `--version` is not under test, and its callback leaves None where jaxtyping's checks want a bool.
    monkeypatch.setattr(app, "registered_callback", None)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "claims", *arguments])
        with pytest.raises(SystemExit) as stop:
            run_command()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call
