"""What all tests share: repeatable randomness, one thread, hypothesis without deadlines."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("clearhead", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clearhead")


SHAPED = ("attention", "audio", "baselines", "data", "generation", "layers", "look", "masks", "models", "positions")
SHAPED += ("pretrained", "training")
"""The rooms whose signatures have shapes: their tests run with jaxtyping's checks, which cost half as much again."""

OFTEN = ("attention/test_plan.py", "generation/test_fast.py", "generation/test_models.py", "look/test_stream.py")
OFTEN += ("masks/test_count.py", "masks/test_parse.py", "models/test_cached_decoding.py", "models/test_words.py")
OFTEN += ("training/test_loop.py",)
"""Of these rooms, tests that call the same few signatures so often that the checks cost twice what is tested; the other
tests of their rooms call them too."""


HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    """Where the checks are on and plain tests left out, their rooms are not imported either."""
    leaves_out = config.getoption("jaxtyping_packages") and "plain" in config.getoption("markexpr")
    return True if leaves_out and collection_path.parent == HERE and collection_path.name not in SHAPED else None


def pytest_collection_finish():
    # What was imported stays until the end: the garbage collector need not go over a million objects again and again.
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries take at the end for a leak what was never looked at


def pytest_collection_modifyitems(items):
    for item in items:
        path = item.path.relative_to(HERE)
        if path.parts[0] not in SHAPED or path.as_posix() in OFTEN:
            item.add_marker("plain")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # The tests' tensors are tiny: two threads would wait for each other, the more so on a busy machine. And sums must
    # be made in one order to be compared bit for bit.
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    # No test pulls the plug, and a run writes its files forty times.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def small_disk(monkeypatch):
    """`with small_disk(9_000):` no file grows beyond so many bytes, and the system refuses as on a full disk."""
    # Python would write the first bytes of what it compiles meanwhile, here or in a child, and trip over them later.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    resource = pytest.importorskip("resource", reason="limits of a process are POSIX's")

    @contextlib.contextmanager
    def limited(size: int):
        before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))

    return limited
