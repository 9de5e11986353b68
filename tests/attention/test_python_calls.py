"""Warm calls of `attend` run a bounded number of Python functions, because short calls spend their time there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.attention import attend
from clearhead.masks import causal, window

PACKAGE = str(Path(clearhead.__file__).parent)


def count_python_calls(function):
    """Return how many Python functions of the package a call runs."""
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return count


@pytest.mark.measured
@pytest.mark.parametrize(
    ("mask", "length", "limit"),
    [(None, 64, 25), (causal(), 64, 25), (causal(), 4096, 25), (causal() & window(64, 0), 4096, 60)],
    ids=["dense", "causal", "long causal", "sparse"],
)
def test_warm_attend_runs_few_python_functions(mask, length, limit):
    q, k, v = torch.randn(3, 1, 4, length, 16).unbind()
    with torch.no_grad():
        for _ in range(2):
            attend(q, k, v, mask)
        assert count_python_calls(lambda: attend(q, k, v, mask)) <= limit
