"""Fixtures that skip plots of runs."""

from __future__ import annotations

import pytest


@pytest.fixture
def drawn():
    """Request this fixture in tests that need the plot of a run."""


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    # Drawing takes as long as all the rest of a tiny run, and there are hundreds of them.
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("clearhead.training.launch.draw_run", lambda folder: None)
