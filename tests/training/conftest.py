"""Fixtures that reset signal handlers, which a shell may ignore in background jobs, and that skip plots of runs."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True)
def _signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def drawn():
    """Request this fixture in tests that need the plot of a run."""


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    # Drawing takes as long as all the rest of a tiny run, and there are hundreds of them.
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("clearhead.training.launch.draw_run", lambda folder: None)
