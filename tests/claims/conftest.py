"""One run of the whole ledger, shared by the tests (it takes about a quarter of a minute), and what each claim took."""

from __future__ import annotations

import pytest

from clearhead.claims import claims, run
from tests.effort import Effort


@pytest.fixture(scope="session")
def watched():
    found = {}
    for name in claims():
        with Effort() as took:
            (outcome,) = run([name], seed=0)
        found[name] = outcome, took
    return found


@pytest.fixture(scope="session")
def outcomes(watched):
    return {name: outcome for name, (outcome, _) in watched.items()}


@pytest.fixture(scope="session")
def effort(watched):
    return {name: took for name, (_, took) in watched.items()}
