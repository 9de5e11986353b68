"""Signals as a terminal gives them: whoever starts the tests may ignore some, as a shell does for a background job.
And runs without their picture."""

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
    """For tests that want the picture of a run."""


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    # Drawing takes as long as all the rest of a tiny run, and there are hundreds of them.
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("clearhead.training.launch.draw_run", lambda folder: None)
