"""One run of the whole ledger, shared by the tests (it takes about a quarter of a minute), and what each claim took."""

from __future__ import annotations

import sys

import pytest

from clearhead.cli.app import app
from clearhead.cli.app import run as run_command
from clearhead.course.claims import claims
from clearhead.course.claims import run as try_claims
from tests.support.work_counters import Effort


@pytest.fixture(scope="session")
def watched():
    found = {}
    for name in claims():
        with Effort() as took:
            (outcome,) = try_claims([name], seed=0)
        found[name] = outcome, took
    return found


@pytest.fixture(scope="session")
def outcomes(watched):
    return {name: outcome for name, (outcome, _) in watched.items()}


@pytest.fixture(scope="session")
def effort(watched):
    return {name: took for name, (_, took) in watched.items()}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: exit status, standard output, standard error."""

    # `--version` is not under test, and its callback leaves None where jaxtyping's checks want a bool.
    monkeypatch.setattr(app, "registered_callback", None)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "claims", *arguments])
        with pytest.raises(SystemExit) as ending:
            run_command()
        shown = capsys.readouterr()
        return int(ending.value.code or 0), shown.out, shown.err

    return call
