"""The times of the functions of a sparse step are printed for both kinds of kernels."""

from __future__ import annotations

import torch

from benchmarks import sparse_host
from clearhead.attention.sparse import interval_op, op
from clearhead.masks import causal, documents, every, window


def test_measure_lists_functions_and_restores_them(monkeypatch):
    monkeypatch.setattr(sparse_host, "ROUNDS", 1)
    monkeypatch.setattr(sparse_host, "STEPS", 1)
    originals = op._backward, interval_op._backward
    planned = sparse_host.measure(causal() & (window(64, 0) | every(32)), "cpu")
    intervals = sparse_host.measure(causal() & documents(torch.arange(sparse_host.LENGTH) // 100), "cpu")
    assert any("op._backward, 1 calls" in line for line in planned)
    assert any("interval_op._backward, 1 calls" in line for line in intervals)
    assert (op._backward, interval_op._backward) == originals
