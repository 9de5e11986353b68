"""Warm calls of `attend` run a bounded number of Python functions, because short calls spend their time there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.attention import attend
from clearhead.attention.sparse import interval_op, launch, op
from clearhead.attention.sparse.fast_launch import FastLaunch
from clearhead.masks import causal, documents, every, window

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


@pytest.fixture
def launches(monkeypatch):
    """Run everything of the Triton kernels except the kernels, and return the list of launches."""
    pytest.importorskip("triton", reason="Triton is not installed")
    launched = []
    for module in (op, interval_op):
        monkeypatch.setattr(module, "runs_triton", lambda x: True)
    monkeypatch.setattr(launch, "launch_kernel", lambda *args, **constants: launched.append(args))
    monkeypatch.setattr(FastLaunch, "__call__", lambda self, *args, **constants: launched.append(args))
    return launched


@pytest.mark.measured
@pytest.mark.parametrize(
    ("mask", "n_kernels", "limit"),
    [
        (causal() & (window(64, 0) | every(32)), 4, 82),
        (causal() & documents(torch.arange(512) // 100), 3, 95),
    ],
    ids=["plan", "intervals"],
)
def test_warm_sparse_step_runs_few_python_functions(launches, mask, n_kernels, limit):
    """Forward and backward outside of graphs, without the launches."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 16, 512, 64).bfloat16().unbind())
    grad = torch.randn(1, 16, 512, 64).bfloat16()

    def step():
        out = attend(q, k, v, mask, impl="sparse")
        torch.autograd.grad(out, (q, k, v), grad)

    for _ in range(3):
        step()
    launches.clear()
    count = count_python_calls(step)
    assert len(launches) == n_kernels
    assert count <= limit
