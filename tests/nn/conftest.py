"""Fixtures of the nn tests."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def unchecked(monkeypatch):
    """Lets a wrong call reach the package's own error, also where jaxtyping checks signatures before it."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
