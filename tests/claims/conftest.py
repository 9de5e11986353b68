"""One run of the whole ledger, shared by the tests (it takes about a quarter of a minute)."""

from __future__ import annotations

import pytest

from clearhead.claims import run


@pytest.fixture(scope="session")
def outcomes():
    return {o.claim.id: o for o in run(seed=0)}
